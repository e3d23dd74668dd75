#!/bin/bash
# Makes one node ready before the ranks start; common.sh runs it on each. $1: the packed environment, if there is one.

set -euo pipefail

mkdir -p "$MIOPEN_USER_DB_PATH" "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"
[[ -n ${1:-} ]] || exit 0

rm -rf "$1" # an interrupted start of this job may have left one
mkdir "$1"
tar --use-compress-program="$(command -v pigz || command -v gzip)" -xf "$1.tar.gz" -C "$1" # pigz: with several cores
rm "$1.tar.gz"
# Scripts in the environment name the path where it was made; this writes the new one.
# https://conda.github.io/conda-pack/#unpacking-the-environment
exec "$1/bin/python" "$1/bin/conda-unpack"

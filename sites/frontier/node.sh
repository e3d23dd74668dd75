#!/bin/bash
# Makes one node ready, before the ranks start. common.sh runs it once on each node.
#
#   ./node.sh [ENVIRONMENT]   cache directories; and the file ENVIRONMENT.tar.gz, unpacked as the directory ENVIRONMENT

set -euo pipefail

mkdir -p "$MIOPEN_USER_DB_PATH" "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"
[[ -n ${1:-} ]] || exit 0

# An interrupted start of this job may have left one.
rm -rf "$1"
mkdir "$1"
# pigz unpacks with several cores; gzip is there if pigz is not.
unpack=$(command -v pigz || command -v gzip)
tar --use-compress-program="$unpack" -xf "$1.tar.gz" -C "$1"
rm "$1.tar.gz"
# Scripts in the environment name the path where it was made; this writes the new one.
# https://conda.github.io/conda-pack/#unpacking-the-environment
exec "$1/bin/python" "$1/bin/conda-unpack"

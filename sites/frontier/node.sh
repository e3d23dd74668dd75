#!/bin/bash
# Makes one node ready before the ranks start; common.sh runs it on each. $1: the packed environment, if there is one.

set -euo pipefail

# Compilers load code from there: the folder is this user's alone, and not one that somebody made before.
caches=${TRITON_CACHE_DIR%/*}
if ! mkdir -m 700 "$caches" 2>/dev/null && [[ $(stat -c '%u %a %F' "$caches") != "$UID 700 directory" ]]; then
    echo "error: $caches on $HOSTNAME is not this user's alone (mode 700): remove it, or submit a new job" >&2
    exit 3
fi
mkdir -p "$MIOPEN_USER_DB_PATH" "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"
[[ -n ${1:-} ]] || exit 0

rm -rf "$1" # an interrupted start of this job may have left one
mkdir "$1"
tar --use-compress-program="$(command -v pigz || command -v gzip)" -xf "$1.tar.gz" -C "$1" # pigz: with several cores
rm "$1.tar.gz"
# Scripts in the environment name the path where it was made; this writes the new one.
# https://conda.github.io/conda-pack/#unpacking-the-environment
exec "$1/bin/python" "$1/bin/conda-unpack"

#!/bin/bash
# Fetches an image with PyTorch, and makes the virtual environment over it in which job.sl runs with software="apptainer ...".
#
#   ./image-build.sh IMAGE [flags of install.sh]
#
#   IMAGE    docker://REPOSITORY@sha256:DIGEST, or a .sif that is here already; it has PyTorch 2.8 and Python 3.11 or newer
#
# A tag, as :latest, is another image tomorrow; a digest stays. That of the day, for a tag of https://hub.docker.com/r/pytorch/pytorch/tags:
#   skopeo inspect --format '{{.Digest}}' docker://pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime
# Load Apptainer's module first, if it has one: job.sl loads the same. No root is needed, since nothing is built into the image:
# ddp_core stands in .venv-apptainer beside it, which sees the image's PyTorch. Run it again, with the same arguments, after
# whatever happened. It writes image.sif, .venv-apptainer and, while it runs, .apptainer beside this script, and nothing else.
# Exit codes: 0 done, 1 a step failed (run it again), 2 wrong arguments, 3 something is missing: nothing was changed.

set -euo pipefail

fail() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ${1:---help} == --help || $1 == -h ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit $(($# == 0 ? 2 : 0))
fi
image=$1
shift
case $image in
*://*@sha256:*) ;;
*://*) fail 2 "$image has no digest, and may be another image tomorrow: REPOSITORY@sha256:... (--help says how to find it)" ;;
*) [[ -f $image ]] || fail 2 "no file $image, and it is no docker:// address (--help)" ;;
esac
from=$image
[[ $image == *://* ]] || from="$(realpath "$image"), $(stat --format '%s bytes of %y' "$image")" # a file may change
command -v apptainer >/dev/null || fail 3 "no apptainer on $(hostname): load its module (module avail apptainer), or use a node that has it"
[[ -w $here ]] || fail 3 "$here cannot be written"

# ---- the image ---------------------------------------------------------------------------------------------------

# Off the home directory, where they would be by default, and exported: layers of an image are some GB, and homes are small.
# https://apptainer.org/docs/user/latest/build_env.html
export APPTAINER_CACHEDIR=$here/.apptainer/cache APPTAINER_TMPDIR=$here/.apptainer/tmp
rm -rf "$here/.apptainer"
mkdir -p "$APPTAINER_CACHEDIR" "$APPTAINER_TMPDIR"
trap 'rm -rf "$here/.apptainer"' EXIT

sif=$here/image.sif
if [[ ! -e $sif || ! -e $sif.from || $(<"$sif.from") != "$from" ]]; then
    rm -f "$sif.from"
    if [[ $image == *://* ]]; then
        echo "fetching $image (minutes, and some GB)"
        apptainer pull --force "$sif" "$image" || fail 1 "apptainer could not fetch $image (above): run this again; compute nodes may need a proxy"
    elif [[ ! $image -ef $sif ]]; then
        cp "$image" "$sif"
    fi
    echo "$from" >"$sif.from"
fi

# ---- ddp_core, over it -------------------------------------------------------------------------------------------

exec_flags=(
    # This directory, which not every cluster shows in an image by itself.
    # https://apptainer.org/docs/user/latest/bind_paths_and_mounts.html
    --bind "$here"

    # And the one that relative paths start from.
    # https://apptainer.org/docs/user/latest/cli/apptainer_exec.html
    --bind "$PWD" --pwd "$PWD"
)
# The core, and other paths that install.sh is given.
for path in "$here/../../core" "$@"; do
    [[ ! -e $path ]] || exec_flags+=(--bind "$(realpath "$path")")
done
apptainer --quiet exec "${exec_flags[@]}" "$sif" "$here/install.sh" "$@" "$here/.venv-apptainer" ||
    fail 1 "install.sh failed in the image (above): take another image, or pass install.sh's flags"
echo "image: image.sif, sha256 $(sha256sum "$sif" | cut -d ' ' -f 1), from $from"
echo 'in job.sl: software="apptainer --nv" (AMD: --rocm)'

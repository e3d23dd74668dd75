#!/bin/bash -l
# Makes the virtual environment over the container in which the jobs run: ddp_core, and what you add. PyTorch is the image's.
#
#   ./install.sh [--core WHAT] [--add PACKAGE]... [--squashfs]
#
#   --core WHAT     ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#   --add PACKAGE   a package from PyPI that the image lacks, as pip names it: optuna, "h5py>=3"; what the image has stays
#   --squashfs      pack it all into one file, for Lustre's sake: worth it with --add of large packages
#
# On a login node, or anywhere with a network, in a minute: PyTorch is not installed. Run again, with the same flags, it makes
# all of it anew: .venv beside this script, or where a link of that name leads, and nothing else.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

die() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
core=$here/../../core packed='' add=()
while (($#)); do
    case $1 in
    --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --squashfs) packed=yes ;;
    --core | --add) [[ -n ${2:-} ]] || die 2 "$1 needs a value (--help)" ;;&
    --core) core=$2 && shift ;;
    --add) add+=("$2") && shift ;;
    *) die 2 "unknown flag $1 (--help lists them)" ;;
    esac
    shift
done

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

[[ -f $core || -f $core/pyproject.toml || $core == *://* ]] ||
    die 3 "no ddp_core at $core: pass --core, the repository's core/, a wheel or a URL"
[[ -z $packed ]] || command -v mksquashfs >/dev/null || die 3 "no mksquashfs on $HOSTNAME: LUMI's login nodes have it"

# The modules and the image: common.sh checks them, with the same messages as a job. Importing leaves no files behind.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONDONTWRITEBYTECODE
export PYTHONDONTWRITEBYTECODE=1
# shellcheck source=common.sh
source "$here/common.sh"
in_image() { singularity exec "$image" "$@"; }

version=$(in_image python -c '
import platform, sys, torch
if sys.version_info < (3, 11) or tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
    sys.exit(f"the image has Python {platform.python_version()} and torch {torch.__version__}, older than 3.11 and 2.8")
print(platform.python_version())
') || die 3 "the image $image cannot be used (above): edit image= in common.sh"

mkdir -p "$here/.venv" || die 3 "$here/.venv cannot be made"
prefix=$(cd -P "$here/.venv" && pwd)
mark=$prefix/.install # of a directory that is ours, and may be emptied
[[ -e $mark || -z $(ls -A "$prefix") ]] || die 3 "$prefix holds something else: move it away"
in_image test -w "$prefix" || die 3 "containers cannot write into $prefix: use your home, /project, /scratch or /flash"

# ---- the virtual environment ------------------------------------------------------------------------------------

echo "making $prefix with the image's Python $version"
echo "unfinished" >"$mark"
find "$prefix" -mindepth 1 -maxdepth 1 ! -name .install -exec rm -rf {} +

# pip and venv leave nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Nor does it install where your shell or your pip.conf says.
# https://pip.pypa.io/en/stable/topics/configuration/#environment-variables
export PIP_USER=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
venv=$prefix
[[ -z $packed ]] || venv=$TMPDIR/venv
pip() { in_image "$venv/bin/python" -m pip --quiet "$@"; }

# https://docs.lumi-supercomputer.eu/laif/software/ai-environment/
in_image python -m venv --system-site-packages "$venv" || die 1 "the image's python -m venv failed (above): run this again"
# The image's own Python is in a virtual environment, too (/opt/venv), and another one does not inherit its packages. Newer
# images name them in PYTHONPATH; this line does so in all. https://github.com/Lumi-supercomputer/LUMI-AI-Guide/issues/106
in_image python -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' >"$TMPDIR/image.pth"
for packages in "$venv"/lib/python*/site-packages; do
    cp "$TMPDIR/image.pth" "$packages/image.pth"
done

if [[ -d $core ]]; then
    cp -R "$core" "$TMPDIR/core" # a build writes into its source
    core=$TMPDIR/core
fi
echo "installing ddp_core${add[*]:+, ${add[*]}}"
# Unless the image has it, this file of PyPI, and no other.
# https://pypi.org/project/safetensors/0.8.0/#files
echo 'safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774' >"$TMPDIR/safetensors.txt"
[[ $(pip list --format=freeze) == *safetensors==* ]] ||
    pip install --require-hashes --no-deps --requirement "$TMPDIR/safetensors.txt" ||
    die 1 "pip could not install safetensors (above): check the network, then run this again"
# What the image has stays: a torch from PyPI would be the one for NVIDIA, and the image's packages are found first anyway.
# https://pip.pypa.io/en/stable/user_guide/#constraints-files
pip list --format=freeze >"$TMPDIR/image.txt"
[[ -z ${add[*]} ]] || pip install --constraint "$TMPDIR/image.txt" "${add[@]}" ||
    die 1 "pip could not install ${add[*]} (above): no network, or it needs another version of what the image has"
pip install --no-deps "$core" || die 1 "pip could not install ddp_core (above): without network pass a wheel as --core"

in_image "$venv/bin/python" -c '
import platform, torch, safetensors.torch, ddp_core
print("python", platform.python_version(), "ddp_core", ddp_core.__version__)
print("torch", torch.__version__, "for", f"hip {torch.version.hip}" if torch.version.hip else "no AMD GPU: no image for LUMI")
' || die 1 "the environment does not work (above): run this again"

if [[ -n $packed ]]; then
    # One thread and no extended attributes, as LUMI asks on its login nodes.
    # https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/02-setting-up-environment/README.md
    mksquashfs "$venv" "$TMPDIR/packed.sqsh" -processors 1 -no-xattrs -no-progress -quiet || die 1 "mksquashfs failed (above)"
    mv "$TMPDIR/packed.sqsh" "$prefix/packed.sqsh"
fi
echo "$version $image_name ${add[*]}" >"$mark" # a job checks that it starts the same image

echo "installed in $prefix; submit: cd $(printf %q "$here") && sbatch job.sl --epochs 3"

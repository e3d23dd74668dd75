#!/bin/bash
# Makes .venv beside job.sl: ddp_core over the PyTorch that job.sl names, NERSC's module or NERSC's container.
#
#   ./install.sh [--core WHAT] [--with PACKAGE]...
#
#   --core WHAT      ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#   --with PACKAGE   a package more, any number of times: tensorboard, wandb, ipykernel; torch stays as it is
#
# For a conda environment of your own: take pytorch/... out of the line `modules=(...)` of job.sl, activate it, and run this.
# Run it on a login node, which has the network; again, with the same flags, after a change in job.sl or whatever happened:
# what is whole is kept, the rest is made anew. It writes into .venv only.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

fail() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
core=$here/../../core packages=()
while (($#)); do
    case $1 in
    --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --core | --with) [[ -n ${2:-} ]] || fail 2 "$1 needs a value (--help)" ;;&
    --core) core=$2 ;;
    --with) packages+=("$2") ;;
    *) fail 2 "unknown flag $1 (--help lists them)" ;;
    esac
    shift 2
done

# ---- what is there: nothing is written before all of this holds --------------------------------------------------------

[[ -f $core || -f $core/pyproject.toml || $core == *://* ]] || fail 3 "no ddp_core at $core: pass --core (--help)"

# What `pip install --user` left, or PYTHONPATH names, is no part of the environment. Importing leaves no files in the module's
# own folders.
# https://docs.python.org/3/using/cmdline.html#environment-variables
unset PYTHONPATH
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1

# The choice, the modules and the image stand in job.sl alone. Bash reads them, with quotes or a comment behind.
pytorch='' image='' modules=()
# shellcheck source=/dev/null # of job.sl these lines alone
source <(grep -E '^(pytorch=| *image=| *modules=\(.*\))' "$here/job.sl")
[[ $pytorch == module || $pytorch == container ]] || fail 3 "pytorch=$pytorch in job.sl, but should be module or container"
[[ $pytorch != module ]] || grep -q '^ *modules=(.*)' "$here/job.sl" ||
    fail 3 "job.sl has lost its line modules=(...), which may be empty"
container=()
if [[ $pytorch == container ]]; then
    origin="container image=$image"
    images=$(shifterimg images | awk '{ print $NF }') || fail 3 "no list of images (above): run this on a login node"
    if ! grep -qxF "$image" <<<"$images"; then
        grep pytorch <<<"$images" >&2 || echo "(no image with pytorch in its name)" >&2
        fail 3 "no image $image; there are the above: edit image= in job.sl, or shifterimg pull $image"
    fi
    container=(shifter --image="$image" --module=none) # no driver and no NCCL of the node: nothing computes here
else
    origin=module${modules[*]:+ modules=${modules[*]}}
    type module >/dev/null 2>&1 || fail 3 "no module command: start this from bash -l"
    set +u # module functions read unset variables
    if ((${#modules[@]})) && ! module load "${modules[@]}"; then
        module -t avail pytorch nccl >&2 || true
        fail 3 "no modules ${modules[*]}; there are the above: edit modules= in job.sl"
    fi
    set -u
fi

found=$("${container[@]}" python -c '
import os, platform, sys
if sys.version_info < (3, 11):
    sys.exit(f"Python is {platform.python_version()}, older than 3.11")
try:
    import torch
except ImportError as error:
    sys.exit(f"no torch: {error}")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
    sys.exit(f"torch is {torch.__version__}, older than 2.8")
if sys.prefix != sys.base_prefix:
    sys.exit(f"{sys.prefix} is a virtual environment, which another cannot inherit")
print(os.path.realpath(sys.executable), torch.__version__, platform.python_version(), sep="\n")
') || fail 3 "the $origin cannot be used (above): name another in job.sl"
{ read -r python && read -r torch && read -r version; } <<<"$found"

# ---- the virtual environment: whole, or made again -----------------------------------------------------------------------

venv=$here/.venv mark=$here/.venv/.install
mkdir -p "$venv"
[[ -e $mark || -z $(ls -A "$venv") ]] || fail 3 "$venv holds something else: move it away"

# A virtual environment cannot be moved, nor survive another Python. job.sl looks for the words of its origin.
wanted="$venv | $origin | $python $version | torch $torch"
if [[ ! -e $mark || $(<"$mark") != "$wanted" ]]; then
    echo unfinished >"$mark"
    echo "making $venv over $origin: Python $version, torch $torch"
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name .install -exec rm -rf {} +
    # NERSC's torch and pip are seen through it, and never replaced. Without a pip of its own, which Ubuntu's Python, as in
    # the container, cannot make; and from the executable itself, since a link to it may lead past its packages.
    "${container[@]}" "$python" -m venv --system-site-packages --without-pip "$venv" || fail 1 "venv failed (above)"
    echo "$wanted" >"$mark"
fi

# pip leaves nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$venv/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Nor does it install where your shell or your pip.conf says.
# https://pip.pypa.io/en/stable/topics/configuration/#environment-variables
export PIP_USER=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "${container[@]}" "$venv/bin/python" -m pip --quiet install "$@"; }

# The core is small, so made again each time. An interrupted pip leaves packages that it can neither use nor remove.
rm -rf "$venv"/lib*/python*/site-packages/{ddp_core,safetensors,~}*
if [[ -d $core ]]; then
    cp -R "$core" "$TMPDIR/core" # a build writes into its source, and a container may not see it
    core=$TMPDIR/core
elif [[ -e $core ]]; then
    core=$(realpath "$core")
fi
echo "installing ddp_core${packages[*]:+ ${packages[*]}}"
# Unless the module or the image has it, this file of PyPI, and no other.
# https://pypi.org/project/safetensors/0.8.0/#files
echo 'safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774' >"$TMPDIR/safetensors.txt"
[[ $("${container[@]}" "$venv/bin/python" -m pip list --format=freeze) == *safetensors==* ]] ||
    pip --require-hashes --no-deps --requirement "$TMPDIR/safetensors.txt" ||
    fail 1 "pip could not install safetensors (above): check the network, then run this again"
# What pip may add is free, but not another torch.
echo "torch==$torch" >"$TMPDIR/constraint"
[[ -z ${packages[*]} ]] || pip --constraint "$TMPDIR/constraint" "${packages[@]}" ||
    fail 1 "pip could not install ${packages[*]} (above): check the network, then run this again"
pip --no-deps "$core" || fail 1 "pip could not install ddp_core (above): without network pass a wheel as --core"

# ---- does it work -----------------------------------------------------------------------------------------------------

"${container[@]}" "$venv/bin/python" -c '
import platform, torch, safetensors.torch, ddp_core
print("python", platform.python_version())
print("torch", torch.__version__, "for", f"cuda {torch.version.cuda}" if torch.version.cuda else "the CPU alone")
print("ddp_core", ddp_core.__version__)
' || { echo unfinished >"$mark" && fail 1 "the environment does not work (above): run this again"; }
echo "installed in $venv; submit: cd $(printf %q "$here") && sbatch job.sl --epochs 3"

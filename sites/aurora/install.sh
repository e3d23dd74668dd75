#!/bin/bash -l
# Makes the virtual environment in which job.pbs runs: ddp_core, over the PyTorch of ALCF's frameworks module.
#
#   ./install.sh [--core WHAT]     ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#
# Run it on a login node, which has the Internet. It loads the modules of common.sh, as job.pbs does. Run again, it makes all
# anew, in a minute, since PyTorch is the module's: .venv beside this script, or where a link of that name leads.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

die() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
core=$here/../../core
(($# <= 2)) || die 2 "unknown flag $3 (--help lists them)"
case ${1:-} in
--help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
--core) core=${2:-} && [[ -n $core ]] || die 2 "--core needs a value (--help)" ;;
?*) die 2 "unknown flag $1 (--help lists them)" ;;
esac

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

[[ -f $core || -f $core/pyproject.toml || $core == *://* ]] ||
    die 3 "no ddp_core at '$core': pass --core, the repository's core/, a wheel or a URL"

# Importing leaves no files in Python's own folders.
# https://docs.python.org/3/using/cmdline.html#environment-variables
export PYTHONDONTWRITEBYTECODE=1
# shellcheck source=common.sh
source "$here/common.sh"
load_modules
python=$(command -v python3) || die 3 "the modules of common.sh bring no python3"
"$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' ||
    die 3 "$python is in a virtual environment, which another cannot inherit: deactivate it"
need_torch "$python"
"$python" -c '
import importlib.metadata, sys
torch = importlib.metadata.version("torch")
if sys.version_info < (3, 11) or tuple(map(int, torch.split(".")[:2])) < (2, 8):
    sys.exit(f"Python {sys.version.split()[0]} and torch {torch}, but should be 3.11 and 2.8, or newer")
' || die 3 "the Python of the modules in common.sh cannot be used (above): write another module there"

mkdir -p "$here/.venv" || die 3 "$here/.venv cannot be made"
prefix=$(cd -P "$here/.venv" && pwd)
mark=$prefix/.install # of a directory that is ours, and may be emptied
[[ -e $mark || -z $(ls -A "$prefix") ]] || die 3 "$prefix holds something else: move it away"

# ---- the virtual environment ------------------------------------------------------------------------------------

echo "making $prefix with $python"
echo unfinished >"$mark"
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
pip() { "$prefix/bin/python" -m pip --quiet "$@"; }

# The torch of the module is used and never replaced: it was built for this machine.
# https://docs.alcf.anl.gov/aurora/data-science/python/
"$python" -m venv --system-site-packages "$prefix" || die 1 "$python -m venv failed (above): run this again"
if [[ -d $core ]]; then
    cp -R "$core" "$TMPDIR/core" # a build writes into its source
    core=$TMPDIR/core
fi
echo "installing ddp_core"
# Unless the module has it, this file of PyPI, and no other. Of ddp_core no dependencies: nothing may replace torch.
# https://pypi.org/project/safetensors/0.8.0/#files
echo 'safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774' >"$TMPDIR/safetensors.txt"
{ { [[ $(pip list --format=freeze) == *safetensors==* ]] ||
    pip install --require-hashes --no-deps --requirement "$TMPDIR/safetensors.txt"; } && pip install --no-deps "$core"; } ||
    die 1 "pip could not install ddp_core (above): run this on a login node, which has the Internet, or pass a wheel as --core"

# ---- does it work -----------------------------------------------------------------------------------------------

LD_LIBRARY_PATH=${TORCH_LIB:-}${TORCH_LIB:+:}${LD_LIBRARY_PATH:-} "$prefix/bin/python" -c '
import platform, torch, safetensors.torch, ddp_core
xpu = getattr(torch.version, "xpu", None)
print("python", platform.python_version())
print("torch", torch.__version__, f"for xpu {xpu}" if xpu else "NOT for xpu: train.py will refuse it")
print("ddp_core", ddp_core.__version__)
' || die 1 "the environment does not work (above): run this again"
# A job compares it: no virtual environment survives another Python.
echo "modules=${modules[*]}" >"$mark"

echo "installed in $prefix; submit: cd $(printf %q "$here") && qsub -v TRAIN_ARGS=\"--epochs 3\" job.pbs"

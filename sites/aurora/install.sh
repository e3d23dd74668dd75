#!/bin/bash -l
# Makes the virtual environment in which job.pbs runs: ddp_core, over the PyTorch of ALCF's frameworks module.
#
#   ./install.sh [PREFIX] [--core WHAT]
#
#   PREFIX        where to make it (default: .venv beside this script, where job.pbs looks for it)
#   --core WHAT   ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#
# Run it on a login node, which has the Internet. It loads the module that job.pbs loads. Run it again, with the same flags,
# after whatever happened: what is whole is kept, the rest is made anew. It writes nothing outside PREFIX.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

fail() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

# ---- what is asked for ------------------------------------------------------------------------------------------

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix='' core=''
while (($#)); do
    case $1 in
    --help | -h)
        sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --core)
        [[ -n ${2:-} ]] || fail 2 "$1 needs a value (--help)"
        core=$2
        shift 2
        ;;
    -*) fail 2 "unknown flag $1 (--help lists them)" ;;
    *)
        [[ -z $prefix ]] || fail 2 "two prefixes, $prefix and $1: quote a path with spaces"
        prefix=$1
        shift
        ;;
    esac
done
prefix=${prefix:-$here/.venv}

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

if [[ -z $core ]]; then
    core=$here/../../core
    [[ -d $core ]] || fail 3 "no ddp_core at $core: pass --core, the repository's core/ directory, a wheel or a URL"
elif [[ ! -e $core && $core != *://* ]]; then
    fail 3 "--core $core: no such directory or file, and not a URL"
fi
[[ ! -d $core || -f $core/pyproject.toml ]] || fail 3 "--core $core is no Python package: it has no pyproject.toml"

# One place names the module: job.pbs.
wanted_module=$(sed -n 's|^module load \([^ ]*\).*|\1|p' "$here/job.pbs")
[[ -n $wanted_module ]] || fail 3 "$here/job.pbs loads no module"
type module >/dev/null 2>&1 || fail 3 "no module command: run this on a login node of Aurora, in a login shell"

# What lies in ~/.local is no part of the environment, here and in the job. Importing leaves no files in Python's own folders.
# https://docs.python.org/3/using/cmdline.html#environment-variables
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1

set +u # module functions read unset variables
if ! module load "$wanted_module"; then
    echo "there is now:" >&2
    module --terse avail frameworks >&2 || true
    fail 3 "module $wanted_module cannot be loaded (above): write one that there is into job.pbs"
fi
set -u

python=$(command -v python3) || fail 3 "module $wanted_module brings no python3"
version=$("$python" -c 'import platform; print(platform.python_version())') || fail 3 "$python does not run (above)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail 3 "$python is Python $version, and 3.11 or newer is needed: write another module into job.pbs"
torch=$("$python" -c '
import sys
if sys.prefix != sys.base_prefix:
    sys.exit(f"{sys.executable} is in a virtual environment, which another cannot inherit: deactivate it")
import torch
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
    sys.exit(f"its torch is {torch.__version__}, and xccl is built in from 2.8 on")
print(torch.__version__)
') || fail 3 "the torch of module $wanted_module cannot be used (above)"

mkdir -p "$prefix" || fail 3 "PREFIX $prefix cannot be made"
prefix=$(cd -P "$prefix" && pwd)
# The mark of a directory that is ours, and may be emptied. It says how far we came.
mark=$prefix/.install
[[ -e $mark || -z $(ls -A "$prefix") ]] || fail 3 "PREFIX $prefix holds something else: pass a new or an empty directory"
[[ -w $prefix ]] || fail 3 "PREFIX $prefix cannot be written"

# ---- the virtual environment: whole, or made again ---------------------------------------------------------------

# It cannot be moved, nor survive another Python or another torch under it.
wanted="$prefix | $python $version | $wanted_module torch $torch"
if [[ ! -e $mark || $(<"$mark") != "$wanted" ]]; then
    echo unfinished >"$mark"
    echo "making $prefix with Python $version and torch $torch of $wanted_module"
    find "$prefix" -mindepth 1 -maxdepth 1 ! -name .install -exec rm -rf {} +
fi

# pip and venv leave nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "$prefix/bin/python" -m pip --quiet "$@"; }

if [[ $(<"$mark") != "$wanted" ]]; then
    # The torch of the module is used and never replaced: it was built for this machine.
    # https://docs.alcf.anl.gov/aurora/data-science/python/
    "$python" -m venv --system-site-packages "$prefix" || fail 1 "$python -m venv failed (above): run this again"
    echo "$wanted" >"$mark"
fi

# ---- the core: small, so made again each time --------------------------------------------------------------------

# An interrupted pip leaves packages that it can neither use nor remove.
rm -rf "$prefix"/lib*/python*/site-packages/{ddp_core,safetensors,~}*
if [[ -d $core ]]; then
    cp -R "$core" "$TMPDIR/core" # a build writes into its source
    core=$TMPDIR/core
fi
echo "installing ddp_core"
# pip takes the module's own safetensors, where it has one.
pip install 'safetensors>=0.4.3' ||
    fail 1 "pip could not install safetensors (above): run this on a login node, which has the Internet"
# With the module's setuptools, where it can build the core, no Internet is needed.
build=()
"$prefix/bin/python" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null &&
    build=(--no-build-isolation)
# Without dependencies: nothing may replace torch.
pip install --no-deps "${build[@]}" "$core" ||
    fail 1 "pip could not install ddp_core (above): run this on a login node, which has the Internet, or pass a wheel as --core"

# ---- does it work -----------------------------------------------------------------------------------------------

"$prefix/bin/python" -c '
import platform, torch, safetensors.torch, ddp_core
print("python", platform.python_version())
xpu = getattr(torch.version, "xpu", None)
print("torch", torch.__version__, f"for xpu {xpu}" if xpu else "NOT for xpu: train.py will refuse it")
print("ddp_core", ddp_core.__version__)
' || fail 1 "the environment does not work (above): run this again"

echo "installed in $prefix"
[[ $prefix -ef $here/.venv ]] || echo "job.pbs looks for .venv beside itself: ln -s $(printf %q "$prefix") .venv"
echo "submit: cd $(printf %q "$here") && qsub -v TRAIN_ARGS=\"--epochs 3\" job.pbs"

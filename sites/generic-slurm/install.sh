#!/bin/bash
# Makes the virtual environment in which job.sl runs: PyTorch and ddp_core.
#
#   ./install.sh [PREFIX] [--core WHAT] [--torch SPEC] [--torch-index URL]
#
#   PREFIX              where to make it (default: .venv beside this script, where job.sl looks for it)
#   --core WHAT         ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#   --torch SPEC        the PyTorch to install (default: the one that Python brings, as from a module; else torch==2.13.0)
#   --torch-index URL   where pip finds it, for a CUDA, ROCm or CPU build that is not PyPI's
#   PYTHON=...          the Python to use, 3.11 or newer (default: python3)
#
# Load the modules that training shall run with first: job.sl loads the same ones. Run it again, with the same flags,
# after whatever happened: what is whole is kept, the rest is made anew. It writes nothing outside PREFIX.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

fail() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

# ---- what is asked for ------------------------------------------------------------------------------------------

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix='' core='' torch='' torch_index='' python=${PYTHON:-python3}
while (($#)); do
    case $1 in
    --help | -h)
        sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --core | --torch | --torch-index)
        [[ -n ${2:-} ]] || fail 2 "$1 needs a value (--help)"
        case $1 in
        --core) core=$2 ;;
        --torch) torch=$2 ;;
        --torch-index) torch_index=$2 ;;
        esac
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

# What lies in ~/.local is no part of the environment, here and in the job. Importing leaves no files in Python's own folders.
# https://docs.python.org/3/using/cmdline.html#environment-variables
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1

command -v "$python" >/dev/null || fail 3 "no $python: load a Python module, or set PYTHON=/path/to/python3.11 (or newer)"
version=$("$python" -c 'import platform; print(platform.python_version())') || fail 3 "$python does not run (above)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail 3 "$(command -v "$python") is Python $version: load a module of 3.11 or newer, or set PYTHON=/path/to/python3.11"

inherited=''
if [[ -z $torch && -z $torch_index ]]; then
    inherited=$("$python" -c '
import importlib.util, sys
if importlib.util.find_spec("torch"):
    if sys.prefix != sys.base_prefix:
        sys.exit(f"the torch of {sys.executable} is in a virtual environment, which another cannot inherit")
    import torch
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
        sys.exit(f"the torch of {sys.executable} is {torch.__version__}, older than 2.8")
    print(torch.__version__)
') || fail 3 "the torch that $python brings cannot be used (above): load another module, or pass --torch torch==2.13.0"
fi
# A release that this site was tried with. PyPI has it for NVIDIA GPUs; which driver it needs is pytorch.org's to say.
# https://pytorch.org/get-started/previous-versions/
torch=${torch:-torch==2.13.0}

mkdir -p "$prefix" || fail 3 "PREFIX $prefix cannot be made"
prefix=$(cd -P "$prefix" && pwd)
# The mark of a directory that is ours, and may be emptied. It says how far we came.
mark=$prefix/.install
[[ -e $mark || -z $(ls -A "$prefix") ]] || fail 3 "PREFIX $prefix holds something else: pass a new or an empty directory"
[[ -w $prefix ]] || fail 3 "PREFIX $prefix cannot be written"

# ---- the virtual environment and PyTorch: whole, or made again ---------------------------------------------------

# A virtual environment cannot be moved, nor survive another Python.
wanted="$prefix | $("$python" -c 'import sys; print(sys.base_prefix)') $version | ${inherited:-$torch $torch_index}"
if [[ ! -e $mark || $(<"$mark") != "$wanted" ]]; then
    echo unfinished >"$mark"
    echo "making $prefix with Python $version"
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
    # The torch of a module is used and never replaced: it was built for this machine.
    # https://docs.python.org/3/library/venv.html
    "$python" -m venv ${inherited:+--system-site-packages} "$prefix" ||
        fail 1 "$python -m venv failed (above): load a Python module that has venv and ensurepip"
    if [[ -z $inherited ]]; then
        echo "installing $torch (minutes, and some GB with CUDA)"
        # numpy: without it torch 2.13 warns at every import.
        pip install ${torch_index:+--index-url "$torch_index"} "$torch" numpy ||
            fail 1 "pip could not install $torch (above): check the network and --torch-index, then run this again"
    fi
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
pip install 'safetensors>=0.4.3' || fail 1 "pip could not install safetensors (above): check the network, then run this again"
# Without dependencies: nothing may replace torch.
pip install --no-deps "$core" || fail 1 "pip could not install ddp_core (above): without network pass a wheel as --core"

# The modules of now, for job.sl.
# https://modules.readthedocs.io/en/latest/module.html#envvar-LOADEDMODULES
rm -f "$prefix/modules"
[[ -z ${LOADEDMODULES:-} ]] || echo "${LOADEDMODULES//:/ }" >"$prefix/modules"

# ---- does it work -----------------------------------------------------------------------------------------------

"$prefix/bin/python" -c '
import platform, torch, safetensors.torch, ddp_core
builds = [f"{name} {number}" for name in ("cuda", "hip", "xpu") if (number := getattr(torch.version, name, None))]
print("python", platform.python_version())
print("torch", torch.__version__, "for", *builds or ["the CPU alone: --torch-index finds builds for GPUs"])
print("ddp_core", ddp_core.__version__)
' || fail 1 "the environment does not work (above): run this again, and with other modules if it fails again"

echo "installed in $prefix"
[[ $prefix -ef $here/.venv || $prefix -ef $here/.venv-apptainer ]] || echo "job.sl looks for .venv beside itself: ln -s $(printf %q "$prefix") .venv"
echo "submit: cd $(printf %q "$here") && sbatch job.sl --epochs 3"

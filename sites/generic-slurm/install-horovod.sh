#!/bin/bash
# Builds Horovod 0.28.1 into the environment that install.sh made, for train_horovod.py: 3 to 6 minutes.
#
#   ./install-horovod.sh [PYTHON] [--nccl DIR] [--sdist FILE]
#
#   PYTHON         of the environment, which must have PyTorch and ddp_core (default: .venv/bin/python beside this script)
#   --nccl DIR     with NCCL, whose include/ and lib/ are in DIR, for NVIDIA GPUs; it takes nvcc. Without it: gloo, for CPUs
#   --sdist FILE   horovod-0.28.1.tar.gz, where PyPI cannot be reached
#
# 0.28.1, of June 2023, is the last release: `pip install horovod` fails, since it asks for C++14 in two files and PyTorch's
# headers are C++17. It needs a C++ compiler. Run it again after whatever happened. It writes nothing outside PYTHON's environment.
# Exit codes: 0 done, 1 the build failed, 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

fail() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python='' nccl='' sdist=''
while (($#)); do
    case $1 in
    --help | -h)
        sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --nccl | --sdist)
        [[ -e ${2:-} ]] || fail 2 "$1 needs a path that is there, not '${2:-}' (--help)"
        case $1 in
        --nccl) nccl=$(cd "$2" && pwd) ;;
        --sdist) sdist=$(realpath "$2") ;;
        esac
        shift 2
        ;;
    -*) fail 2 "unknown flag $1 (--help lists them)" ;;
    *)
        [[ -z $python ]] || fail 2 "two Pythons, $python and $1: quote a path with spaces"
        python=$1
        shift
        ;;
    esac
done
python=$(command -v "${python:-$here/.venv/bin/python}") || fail 3 "no ${python:-$here/.venv/bin/python}: run ./install.sh first, or name a Python"

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

# What lies in ~/.local is no part of the environment.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
export PYTHONNOUSERSITE=1

"$python" -c 'import torch, ddp_core' || fail 3 "$python lacks PyTorch or ddp_core (above): run ./install.sh first"
prefix=$("$python" -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")')
[[ $prefix ]] || fail 3 "$python is in no virtual environment, and nothing is installed outside one"
[[ -w $prefix ]] || fail 3 "$prefix cannot be written"
compiler=$(command -v "${CXX:-g++}") || fail 3 "no ${CXX:-g++}: load a compiler module, or set CXX"
"$compiler" -std=c++17 -fsyntax-only -x c++ /dev/null || fail 3 "$compiler knows no C++17: load a newer compiler, or set CXX"
if [[ $nccl ]]; then
    [[ -e $nccl/include/nccl.h ]] || fail 3 "--nccl $nccl has no include/nccl.h"
    command -v nvcc >/dev/null || fail 3 "--nccl needs nvcc: load a CUDA module of $("$python" -c 'import torch; print(torch.version.cuda)')"
    # Gradients on the GPUs, by NCCL, which is in this directory.
    # https://horovod.readthedocs.io/en/stable/gpus_include.html
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$nccl
fi

# ---- the source, with C++17 --------------------------------------------------------------------------------------

# pip and the build leave nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/horovod PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "$python" -m pip --quiet "$@"; }

# What its setup.py would fetch by itself, and not from where pip is told to; setuptools brings distutils to Python 3.12.
pip install 'setuptools>=70.1' cloudpickle psutil pyyaml packaging 'cffi>=1.4.0' || fail 1 "pip could not install what the build needs (above)"
# The build finds commands of the environment: CMake 3.13 or newer, where the machine has none.
# https://horovod.readthedocs.io/en/stable/install_include.html
export PATH=$prefix/bin:$PATH
command -v cmake >/dev/null || pip install cmake || fail 1 "no cmake, and pip could not install it (above): load a module"

if [[ -z $sdist ]]; then
    pip download --no-deps --no-binary :all: --no-build-isolation --dest "$TMPDIR" horovod==0.28.1 ||
        fail 1 "pip could not fetch horovod 0.28.1 (above): pass --sdist horovod-0.28.1.tar.gz"
    sdist=$TMPDIR/horovod-0.28.1.tar.gz
fi
# The file of 2023 on https://pypi.org/project/horovod/0.28.1/#files
echo "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0  $sdist" | sha256sum --check --quiet ||
    fail 1 "$sdist is not PyPI's horovod-0.28.1.tar.gz"
tar -xzf "$sdist" -C "$TMPDIR"
source=$TMPDIR/horovod-0.28.1
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"

# ---- the build ---------------------------------------------------------------------------------------------------

# For PyTorch alone, also where other frameworks and an MPI are there: the ranks come from srun, and meet over gloo.
# https://horovod.readthedocs.io/en/stable/install_include.html
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
# CMake 4 refuses gloo's own files, which ask for CMake 2.8.
# https://cmake.org/cmake/help/latest/envvar/CMAKE_POLICY_VERSION_MINIMUM.html
export CMAKE_POLICY_VERSION_MINIMUM=3.5
# One compiler a core that this job has; the build's own default is 8.
# https://www.gnu.org/software/make/manual/html_node/Options-Summary.html
export MAKEFLAGS=${MAKEFLAGS:--j$(nproc)}

echo "building horovod 0.28.1 with $compiler in $TMPDIR (minutes)"
began=$SECONDS
# Without isolation: it is built against the PyTorch that is there. Without dependencies: nothing may replace that one.
"$python" -m pip install --no-deps --no-build-isolation --force-reinstall --verbose "$source" >"$TMPDIR/log" 2>&1 || {
    grep -m 5 -B 1 -A 3 -E 'error|Error' "$TMPDIR/log" >&2 || tail -n 20 "$TMPDIR/log" >&2
    fail 1 "horovod could not be built (above, the first errors)"
}

"$python" -c '
import horovod, horovod.torch as hvd, platform, torch
print("python", platform.python_version())
print("torch", torch.__version__)
print("horovod", horovod.__version__, "with", *[name for name in ("gloo", "nccl", "mpi") if getattr(hvd, name + "_built")()])
' || fail 1 "horovod does not work (above): run this again, and with another compiler if it fails again"
echo "built in $((SECONDS - began)) s, installed in $prefix"
echo "submit: cd $(printf %q "$here") && sbatch job-horovod.sl --epochs 3"

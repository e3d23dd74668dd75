#!/bin/bash
# Builds Horovod 0.28.1 for train_horovod.py: install-horovod.sh PYTHON, which `install.sh --horovod` runs. 3 to 6 minutes.
#
# It takes a C++17 compiler (CXX=..., default g++) and sums on CPUs, by gloo; with HOROVOD_NCCL_HOME=DIR, where NCCL's include/
# and lib/ are, on NVIDIA GPUs: that takes nvcc. 0.28.1, of June 2023, is the last release, and `pip install horovod` fails:
# two files ask for C++14, PyTorch's headers for C++17 (https://github.com/horovod/horovod/issues/4014). They are changed here.
# Exit codes: 0 done, 1 the build failed (run it again), 3 something is missing: nothing was changed.

set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# What lies in ~/.local is no part of the environment.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
export PYTHONNOUSERSITE=1

python=$(command -v "${1:-.venv/bin/python}") || fail 3 "no ${1:-.venv/bin/python}: run ./install.sh first, or name a Python"
prefix=$("$python" -c 'import sys, torch; print(sys.prefix); sys.exit(sys.prefix == sys.base_prefix)') ||
    fail 3 "$python lacks PyTorch (above), or is in no virtual environment: run ./install.sh first"
"${CXX:-g++}" -std=c++17 -fsyntax-only -x c++ /dev/null ||
    fail 3 "no ${CXX:-g++} that knows C++17: add a compiler's module to modules=() in job.sl, or set CXX"
if [[ ${HOROVOD_NCCL_HOME:-} ]]; then
    [[ -e $HOROVOD_NCCL_HOME/include/nccl.h ]] || fail 3 "HOROVOD_NCCL_HOME=$HOROVOD_NCCL_HOME has no include/nccl.h"
    command -v nvcc >/dev/null || fail 3 "no nvcc: add the module of torch's CUDA to modules=() in job.sl"
    # Gradients on GPUs are summed by NCCL. https://horovod.readthedocs.io/en/stable/gpus_include.html
    export HOROVOD_GPU_OPERATIONS=NCCL
fi

# For PyTorch alone, also where other frameworks and an MPI are there: the ranks come from srun, and meet over gloo.
# https://horovod.readthedocs.io/en/stable/install_include.html
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
# CMake 4 refuses gloo's own files, which ask for CMake 2.8.
# https://cmake.org/cmake/help/latest/envvar/CMAKE_POLICY_VERSION_MINIMUM.html
export CMAKE_POLICY_VERSION_MINIMUM=3.5
# CMake of the environment, where the machine has none. https://horovod.readthedocs.io/en/stable/install_include.html
export PATH=$prefix/bin:$PATH
# pip and the build leave nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/horovod PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "$python" -m pip --quiet "$@"; }
# What its setup.py would fetch by itself, and not from where pip is told to; setuptools brings distutils to Python 3.12.
pip install 'setuptools>=70.1' 'cloudpickle>=3' 'psutil>=5.9' 'pyyaml>=6' 'packaging>=23' 'cffi>=1.4.0' ||
    fail 1 "pip could not install what the build needs (above)"
command -v cmake >/dev/null || pip install 'cmake>=3.18' || fail 1 "no cmake, and pip could not install it (above)"
# The file of 2023 on https://pypi.org/project/horovod/0.28.1/#files
echo "horovod==0.28.1 --hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0" >"$TMPDIR/horovod.txt"
pip download --no-deps --no-binary :all: --no-build-isolation --dest "$TMPDIR" --requirement "$TMPDIR/horovod.txt" ||
    fail 1 "pip could not fetch horovod 0.28.1 (above)"
source=$TMPDIR/horovod-0.28.1
tar -xzf "$source.tar.gz" -C "$TMPDIR"
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$source"/{,horovod/torch/}CMakeLists.txt

echo "building horovod 0.28.1 (minutes)"
# Without isolation: it is built against the PyTorch that is there. Without dependencies: nothing may replace that one.
"$python" -m pip install --no-deps --no-build-isolation --force-reinstall --verbose "$source" >"$TMPDIR/log" 2>&1 || {
    grep -m 5 -B 1 -A 3 -E 'error|Error' "$TMPDIR/log" >&2 || tail -n 20 "$TMPDIR/log" >&2
    fail 1 "horovod could not be built (above, the first errors)"
}
"$python" -c '
import horovod, horovod.torch as hvd
print("horovod", horovod.__version__, "with", *[name for name in ("gloo", "nccl") if getattr(hvd, name + "_built")()])
' || fail 1 "horovod does not work (above): run this again, and with another compiler if it fails again"

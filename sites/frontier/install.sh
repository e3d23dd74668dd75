#!/bin/bash -l
# Makes the conda environment in which job.sl runs: PyTorch for ROCm, mpi4py over Cray MPICH, ddp_core, and what you add.
#
#   ./install.sh [PREFIX] [--core WHAT] [--add PACKAGE]... [--pack] [--torch SPEC] [--torch-index URL]
#
#   PREFIX              where to make it (default: env beside this script, where else a link leads to it). Best below
#                       /ccs/proj/PROJECT, which is never purged, with --pack
#   --core WHAT         ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#   --add PACKAGE       one more package, as pip names it: --add torchvision==0.25.0 --add h5py
#   --pack              also make env.tar.gz beside this script, which job.sl sends to the nodes' NVMe: from 2 nodes on
#   --torch SPEC        the PyTorch to install (default: torch==2.10.0)
#   --torch-index URL   where pip finds it (default: https://download.pytorch.org/whl/rocm7.1)
#
# Run it on a login node, and again, with the same flags, after whatever happened: what is whole is kept, the rest is made anew.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
source "$here/common.sh"
modules=()
# Of job.sl that line alone, which shellcheck cannot follow.
# shellcheck source=/dev/null
source <(grep '^modules=' "$here/job.sl")

# ---- what is asked for ------------------------------------------------------------------------------------------

prefix='' core=$here/../../core torch=torch==2.10.0 torch_index=https://download.pytorch.org/whl/rocm7.1 pack='' add=()
while (($#)); do
    case $1 in
    --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --pack) pack=yes ;;
    --core | --add | --torch | --torch-index) [[ -n ${2:-} ]] || fail "$1 needs a value (--help)" 2 ;;&
    --core) core=$2 && shift ;;
    --add) add+=("$2") && shift ;;
    --torch) torch=$2 && shift ;;
    --torch-index) torch_index=$2 && shift ;;
    -*) fail "unknown flag $1 (--help lists them)" 2 ;;
    *)
        [[ -z $prefix ]] || fail "two prefixes, $prefix and $1" 2
        prefix=$1
        ;;
    esac
    shift
done
prefix=${prefix:-$here/env}

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

[[ -f $core || -f $core/pyproject.toml || $core == *://* ]] ||
    fail "no ddp_core at $core: pass --core, the repository's core/, a wheel or a URL"
load_modules "${modules[@]}"
{ mkdir -p "$prefix" && [[ -w $prefix ]]; } || fail "PREFIX $prefix cannot be made, or not be written"
prefix=$(cd -P "$prefix" && pwd)
mark=$prefix/.install # of a directory that is ours, and may be emptied; it says how far we came
[[ -e $mark || -z $(ls -A "$prefix") ]] || fail "PREFIX $prefix holds something else: pass a new or an empty directory"
[[ ! -e $here/env || -L $here/env || $here/env -ef $prefix ]] || fail "$here/env is another environment: remove it first"

# ---- conda environment and PyTorch, then mpi4py: whole, or made again ---------------------------------------------

# An environment cannot be moved, nor mpi4py survive another MPI.
wanted="$prefix | ${modules[*]} | $torch $torch_index"
if [[ ! -e $mark || $(<"$mark") != "$wanted" ]]; then
    echo unfinished >"$mark"
    echo "making $prefix"
    find "$prefix" -mindepth 1 -maxdepth 1 ! -name .install -exec rm -rf {} +
fi
rm -f "$here/env.tar.gz" # it is older than what is made now

# pip and conda leave nothing in /tmp, ~/.cache or ~/.conda, and importing leaves no files in Python's own folders.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONDONTWRITEBYTECODE=1
# Nor does it install where your shell or your pip.conf says.
# https://pip.pypa.io/en/stable/topics/configuration/#environment-variables
export PIP_USER=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV
# https://docs.conda.io/projects/conda/en/stable/user-guide/configuration/settings.html
export CONDA_PKGS_DIRS=$TMPDIR/pkgs CONDA_REGISTER_ENVS=false
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "$prefix/bin/python" -m pip --quiet "$@"; }

if [[ $(<"$mark") != "$wanted" ]]; then
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#installing-pytorch
    conda create --yes --quiet --prefix "$prefix" --channel conda-forge python=3.12 pip ||
        fail "conda create failed (above): check the network, then run this again" 1
    echo "installing $torch from $torch_index (minutes, and many GB)"
    # Without numpy torch warns at every import.
    pip install --index-url "$torch_index" "$torch" 'numpy>=1.26' ||
        fail "pip could not install $torch (above): check the network and --torch-index, then run this again" 1
    echo "$wanted" >"$mark"
fi

if [[ ! -e $prefix/.mpi4py ]]; then # a mark of its own: when it fails, the many GB above are kept
    echo "building mpi4py with $(command -v cc)"
    (
        # With them cc links what GPU-aware MPI needs; MPI only counts ranks here. PyPI's own build is for other MPIs.
        # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#optional-install-mpi4py
        set +u
        module unload rocm craype-accel-amd-gfx90a rccl-net-plugin || exit 1 # bash ignores set -e in what stands before ||
        set -u
        MPICC="cc -shared" pip install --no-binary=mpi4py mpi4py==4.1.2
    ) || fail "mpi4py could not be built (above): check the network and what cc is, then run this again" 1
    touch "$prefix/.mpi4py"
fi

# ---- the core, and what you add: made again each time -------------------------------------------------------------

# An interrupted pip leaves packages that it can neither use nor remove.
rm -rf "$prefix"/lib*/python*/site-packages/{ddp_core,safetensors,conda_pack,~}*
if [[ -d $core ]]; then
    cp -R "$core" "$TMPDIR/core" # a build writes into its source
    core=$TMPDIR/core
fi
echo "installing ddp_core${add[*]:+, ${add[*]}}"
# pip takes this file of PyPI, and no other.
# https://pypi.org/project/safetensors/0.8.0/#files
echo 'safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774' >"$TMPDIR/safetensors.txt"
pip install --require-hashes --no-deps --requirement "$TMPDIR/safetensors.txt" ||
    fail "pip could not install safetensors (above): check the network, then run this again" 1
# Nothing may replace torch; torchvision for ROCm is on torch's index, other packages are on PyPI.
# https://pip.pypa.io/en/stable/user_guide/#constraints-files
pip list --format=freeze >"$TMPDIR/constraints.txt"
[[ -z ${add[*]} ]] || pip install --constraint "$TMPDIR/constraints.txt" --extra-index-url "$torch_index" "${add[@]}" ||
    fail "pip could not install ${add[*]} (above): check the network, and which torch it wants" 1
pip install --no-deps "$core" || fail "pip could not install ddp_core (above): without network pass a wheel as --core" 1

# ---- does it work -----------------------------------------------------------------------------------------------

"$prefix/bin/python" -c '
import mpi4py
mpi4py.rc.initialize = False  # a login node has no MPI to start
from mpi4py import MPI
import platform, torch, safetensors.torch, ddp_core
print("python", platform.python_version())
print("mpi4py", mpi4py.__version__, "over", MPI.Get_library_version().split("\n")[0].strip("\0 "))
print("torch", torch.__version__, "for", f"hip {torch.version.hip}" if torch.version.hip else "no AMD GPU: --torch-index")
print("ddp_core", ddp_core.__version__)
' || { echo unfinished >"$mark" && fail "the environment does not work (above): run this again, or into a new PREFIX" 1; }
[[ $here/env -ef $prefix ]] || ln -sfn "$prefix" "$here/env"

# ---- the packed environment --------------------------------------------------------------------------------------

if [[ -n $pack ]]; then
    echo "packing (minutes)"
    # https://pypi.org/project/conda-pack/0.9.2/#files
    echo 'conda-pack==0.9.2 --hash=sha256:437c1acadcdfe3d4f44233513eb116129cde3911088f72ae00871802c7943e47' >"$TMPDIR/pack.txt"
    pip install --require-hashes --no-deps --requirement "$TMPDIR/pack.txt" ||
        fail "pip could not install conda-pack (above): check the network, then run this again" 1
    # Under another name until it is whole. conda-pack --help
    "$prefix/bin/conda-pack" --quiet --prefix "$prefix" --exclude "tmp/*" --n-threads 8 --force \
        --output "$here/env-unfinished.tar.gz" || fail "conda-pack failed (above): job.sl works without env.tar.gz, too" 1
    mv "$here/env-unfinished.tar.gz" "$here/env.tar.gz"
    echo "packed $(du -h "$here/env.tar.gz" | cut -f1) in $here/env.tar.gz, which job.sl sends to the nodes"
fi

echo "installed in $prefix; submit: cd $(printf %q "$here") && sbatch job.sl --epochs 3"

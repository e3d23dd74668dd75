#!/bin/bash -l
# Makes the conda environment in which job.sl runs: PyTorch for ROCm, mpi4py over Cray MPICH, and ddp_core.
#
#   ./install.sh [PREFIX] [--core WHAT] [--torch SPEC] [--torch-index URL] [--build-plugin[=TARBALL]] [--pack]
#
#   PREFIX              where to make it (default: env beside this script, where job.sl looks for it)
#   --core WHAT         ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#   --torch SPEC        the PyTorch to install (default: torch==2.10.0)
#   --torch-index URL   where pip finds it (default: https://download.pytorch.org/whl/rocm7.1)
#   --build-plugin      build aws-ofi-nccl 1.19.2, which job.sl then takes in place of the module rccl-net-plugin; with
#                       =TARBALL from a release file that is here already
#   --pack              also make PREFIX/env.tar.gz, which job.sl sends to the nodes' NVMe: recommended from 2 nodes on
#
# Run it on a login node, and again, with the same flags, after whatever happened: what is whole is kept, the rest is made
# anew. It writes nothing outside PREFIX.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

fail() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

# In loading order, as in job.sl. The ones that OLCF recommends since July 2026, when it removed those of its older texts.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#installing-pytorch
modules=(PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a)
plugin_url=https://github.com/aws/aws-ofi-nccl/releases/download/v1.19.2/aws-ofi-nccl-1.19.2.tar.gz

# ---- what is asked for ------------------------------------------------------------------------------------------

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix='' core='' torch=torch==2.10.0 torch_index=https://download.pytorch.org/whl/rocm7.1 plugin='' pack=''
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
    --build-plugin | --build-plugin=*)
        plugin=$plugin_url
        [[ $1 != *=* ]] || plugin=${1#*=}
        shift
        ;;
    --pack)
        pack=yes
        shift
        ;;
    -*) fail 2 "unknown flag $1 (--help lists them)" ;;
    *)
        [[ -z $prefix ]] || fail 2 "two prefixes, $prefix and $1: quote a path with spaces"
        prefix=$1
        shift
        ;;
    esac
done
prefix=${prefix:-$here/env}

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

if [[ -z $core ]]; then
    core=$here/../../core
    [[ -d $core ]] || fail 3 "no ddp_core at $core: pass --core, the repository's core/ directory, a wheel or a URL"
elif [[ ! -e $core && $core != *://* ]]; then
    fail 3 "--core $core: no such directory or file, and not a URL"
fi
[[ ! -d $core || -f $core/pyproject.toml ]] || fail 3 "--core $core is no Python package: it has no pyproject.toml"
[[ -z $plugin || $plugin == "$plugin_url" || -f $plugin ]] || fail 3 "--build-plugin=$plugin: no such file"

# What lies in ~/.local is no part of the environment, here and in the job. Importing leaves no files in Python's own folders.
# https://docs.python.org/3/using/cmdline.html#environment-variables
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1

command -v module >/dev/null || fail 3 "no module command: is this a login node of Frontier?"
set +u # module functions read unset variables
module reset >/dev/null 2>&1 || fail 3 "module reset failed: log in anew"
for name in "${modules[@]}"; do
    [[ -z $plugin || $name != rccl-net-plugin ]] || continue # built here
    # One after the other: what there is can depend on what is loaded. "avail" prints to the screen's channel.
    module is-avail "$name" ||
        fail 3 "no module $name; there is: $(module -t avail "${name%%/*}" 2>&1 | grep -v ':$' | tr '\n' ' ' || true)- choose, and put it into install.sh and job.sl"
    module load "$name" || fail 3 "module load $name failed (above)"
done
set -u
# cpe/26.03 is not Frontier's default, so its libraries must be found before the system's.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#installing-pytorch
export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}
for command in conda cc; do
    command -v "$command" >/dev/null || fail 3 "no $command, though ${modules[*]} are loaded: ask help@olcf.ornl.gov"
done
libfabric=/opt/cray/libfabric/2.3.1
if [[ -n $plugin ]]; then
    [[ -d $libfabric ]] || fail 3 "no $libfabric; there is: $(cd /opt/cray/libfabric 2>/dev/null && echo * || echo none) - put it into install.sh (libfabric=)"
    [[ -n ${ROCM_PATH:-} ]] || fail 3 "ROCM_PATH is not set, though rocm is loaded"
fi

mkdir -p "$prefix" || fail 3 "PREFIX $prefix cannot be made"
prefix=$(cd -P "$prefix" && pwd)
# The mark of a directory that is ours, and may be emptied. It says how far we came.
mark=$prefix/.install
[[ -e $mark || -z $(ls -A "$prefix") ]] || fail 3 "PREFIX $prefix holds something else: pass a new or an empty directory"
[[ -w $prefix ]] || fail 3 "PREFIX $prefix cannot be written"

# ---- conda environment and PyTorch, then mpi4py: whole, or made again ---------------------------------------------

# An environment cannot be moved, nor mpi4py survive another MPI.
wanted="$prefix | ${modules[*]} | $torch $torch_index"
if [[ ! -e $mark || $(<"$mark") != "$wanted" ]]; then
    echo unfinished >"$mark"
    echo "making $prefix"
    find "$prefix" -mindepth 1 -maxdepth 1 ! -name .install -exec rm -rf {} +
fi
# A packed environment is older than what is made now.
rm -f "$prefix/env.tar.gz"

# pip leaves nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Nor conda in ~/.conda: neither packages, nor this environment's name in a list of all.
# https://docs.conda.io/projects/conda/en/stable/user-guide/configuration/settings.html
export CONDA_PKGS_DIRS=$prefix/pkgs CONDA_REGISTER_ENVS=false
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "$prefix/bin/python" -m pip --quiet "$@"; }

if [[ $(<"$mark") != "$wanted" ]]; then
    conda_flags=(
        # No questions. conda create --help
        --yes
        # No progress bars. conda create --help
        --quiet
        # A path, and not a name below ~/.conda. conda create --help
        --prefix "$prefix"
        # Where OLCF takes Python from. https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#installing-pytorch
        --channel conda-forge
    )
    conda create "${conda_flags[@]}" python=3.12 pip || fail 1 "conda create failed (above): check the network, then run this again"
    echo "installing $torch from $torch_index (minutes, and many GB)"
    # numpy: without it torch warns at every import.
    pip install --index-url "$torch_index" "$torch" numpy ||
        fail 1 "pip could not install $torch (above): check the network and --torch-index, then run this again"
    echo "$wanted" >"$mark"
fi

# A file of its own: when this fails, the many GB above are kept.
if [[ ! -e $prefix/.mpi4py ]]; then
    echo "building mpi4py with $(command -v cc)"
    (
        # With them loaded, cc would link what GPU-aware MPI needs; MPI counts ranks here, and moves nothing of a GPU's.
        # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#optional-install-mpi4py
        set +u
        module unload rocm craype-accel-amd-gfx90a rccl-net-plugin
        set -u
        # PyPI's own build is made for other MPIs than Cray's.
        MPICC="cc -shared" pip install --no-binary=mpi4py mpi4py==4.1.2
    ) || fail 1 "mpi4py could not be built (above): check the network and what cc is, then run this again"
    touch "$prefix/.mpi4py"
fi

# ---- the core: small, so made again each time --------------------------------------------------------------------

# An interrupted pip leaves packages that it can neither use nor remove.
rm -rf "$prefix"/lib*/python*/site-packages/{ddp_core,safetensors,conda_pack,~}*
if [[ -d $core ]]; then
    cp -R "$core" "$TMPDIR/core" # a build writes into its source
    core=$TMPDIR/core
fi
echo "installing ddp_core"
pip install 'safetensors>=0.4.3' || fail 1 "pip could not install safetensors (above): check the network, then run this again"
# Without dependencies: nothing may replace torch.
pip install --no-deps "$core" || fail 1 "pip could not install ddp_core (above): without network pass a wheel as --core"

# ---- the network plugin, by hand ---------------------------------------------------------------------------------

if [[ -n $plugin && ! -e $prefix/aws-ofi-nccl/lib/libnccl-net.so ]]; then
    echo "building aws-ofi-nccl from $plugin"
    rm -rf "$prefix/aws-ofi-nccl"
    source_dir=$TMPDIR/aws-ofi-nccl
    mkdir "$source_dir"
    if [[ $plugin == "$plugin_url" ]]; then
        curl --fail --silent --show-error --location --output "$TMPDIR/plugin.tar.gz" "$plugin" ||
            fail 1 "no $plugin (above): check the network, or pass --build-plugin=TARBALL"
        plugin=$TMPDIR/plugin.tar.gz
    fi
    tar -xf "$plugin" -C "$source_dir" --strip-components=1 || fail 1 "$plugin is no tar file (above)"
    configure_flags=(
        # What the system's network library is, and not one of conda's. ./configure --help
        --with-libfabric="$libfabric"
        # AMD's GPUs. ./configure --help
        --with-rocm="$ROCM_PATH"
        # Into the environment, with which it is packed. ./configure --help
        --prefix="$prefix/aws-ofi-nccl"
    )
    # The library's two names: some versions of RCCL look for NCCL's. The link comes last: with it the plugin is whole.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
    (
        cd "$source_dir" && CC=gcc ./configure "${configure_flags[@]}" >configure.out && make >make.out && make install >install.out &&
            ln -sf librccl-net.so "$prefix/aws-ofi-nccl/lib/libnccl-net.so" && [[ -e $prefix/aws-ofi-nccl/lib/libnccl-net.so ]]
    ) || fail 1 "aws-ofi-nccl could not be built (above): drop --build-plugin, and job.sl takes the module rccl-net-plugin"
fi

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
' || fail 1 "the environment does not work (above): run this again, into a new PREFIX if it fails again"
[[ ! -e $prefix/aws-ofi-nccl/lib/libnccl-net.so ]] || echo "aws-ofi-nccl in $prefix/aws-ofi-nccl, which job.sl takes in place of the module"

# ---- the packed environment --------------------------------------------------------------------------------------

if [[ -n $pack ]]; then
    echo "packing (minutes)"
    pip install conda-pack==0.9.2 || fail 1 "pip could not install conda-pack (above): check the network, then run this again"
    pack_flags=(
        # This environment. conda-pack --help
        --prefix "$prefix"
        # Inside PREFIX like all else; under another name until it is whole. conda-pack --help
        --output "$prefix/tmp/env.tar.gz"
        # All cores for compressing. conda-pack --help
        --n-threads -1
        # What conda has downloaded is of no use on a node. conda-pack --help
        --exclude "pkgs/*"
        # Nor what is being made here. conda-pack --help
        --exclude "tmp/*"
        # No progress bar. conda-pack --help
        --quiet
    )
    "$prefix/bin/conda-pack" "${pack_flags[@]}" || fail 1 "conda-pack failed (above): job.sl works without env.tar.gz, too"
    mv "$prefix/tmp/env.tar.gz" "$prefix/env.tar.gz"
    echo "packed: $(du -h "$prefix/env.tar.gz" | cut -f1) in $prefix/env.tar.gz, which job.sl sends to the nodes; remove it to do without"
fi

echo "installed in $prefix"
[[ $prefix -ef $here/env ]] || echo "job.sl looks for env beside itself: ln -s $(printf %q "$prefix") env"
echo "submit: cd $(printf %q "$here") && sbatch job.sl --epochs 3"

#!/bin/bash
# Makes the virtual environment in which job.sl runs: PyTorch, ddp_core and, where asked for, Horovod and other packages.
#
#   ./install.sh [--core WHAT] [--torch SPEC] [--torch-index URL] [--image IMAGE] [--add PACKAGE]... [--horovod]
#
#   --core WHAT         ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#   --torch SPEC        the PyTorch to install (default: the one that Python brings, as from a module; else torch==2.13.0)
#   --torch-index URL   where pip finds it, for a CUDA, ROCm or CPU build that is not PyPI's
#   --image IMAGE       PyTorch is in an image: docker://REPOSITORY@sha256:DIGEST, or a .sif that is here already
#   --add PACKAGE       a further package, as accelerate==1.15.0
#   --horovod           Horovod 0.28.1, built here; install-horovod.sh says what that takes
#   PYTHON=...          the Python to use, 3.11 or newer (default: python3)
#
# It loads the modules of job.sl's line modules=(...). Run it again, with the same flags, after whatever happened: what is
# whole is kept, the rest is made anew. It writes .venv beside this script and nothing else; of an image, image.sif and
# .venv-apptainer, which sees the image's PyTorch. Nothing is built into the image, so no root is needed.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
source "$here/common.sh"

# ---- what is asked for ------------------------------------------------------------------------------------------

core=$here/../../core torch='' torch_index='' image='' add=() horovod='' python=${PYTHON:-python3} flags=()
while (($#)); do
    case $1 in
    --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --horovod) horovod=yes flags+=("$1") && shift && continue ;;
    --core | --torch | --torch-index | --image | --add) [[ ${2:-} ]] || fail 2 "$1 needs a value (--help)" ;;&
    --core) core=$2 ;;
    --torch) torch=$2 ;;
    --torch-index) torch_index=$2 ;;
    --image) image=$2 ;;
    --add) add+=("$2") ;;
    *) fail 2 "unknown flag $1 (--help lists them)" ;;
    esac
    [[ $1 == --image ]] || flags+=("$1" "$2") # for this script in the image
    shift 2
done

line=$(grep -m 1 '^modules=(.*)' "$here/job.sl") || fail 3 "job.sl has lost its line modules=(...), which may be empty"
modules=()
eval "$line"
if [[ -z ${APPTAINER_CONTAINER:-} ]]; then # an image has its own software
    load_modules
    ((${#modules[@]})) || [[ -z ${LOADEDMODULES:-} ]] ||
        echo "note: job.sl loads no module; what training needs of ${LOADEDMODULES//:/ } belongs into its modules=()"
fi

# ---- an image: fetched, and the rest of this script runs in it ---------------------------------------------------

if [[ $image ]]; then
    # A tag, as :latest, is another image tomorrow; a digest stays.
    [[ $image != *://* || $image == *@sha256:* ]] ||
        fail 2 "$image has no digest (skopeo inspect --format '{{.Digest}}' $image): pass docker://REPOSITORY@sha256:..."
    [[ $image == *://* || -f $image ]] || fail 2 "no file $image, and it is no docker:// address (--help)"
    command -v apptainer >/dev/null || fail 3 "no apptainer on $HOSTNAME: add its module to modules=() in job.sl"
    sif=$here/image.sif from=$image
    [[ $image == *://* ]] || from=$(stat --format "$(realpath "$image"), %s bytes of %y" "$image") # a file may change
    if [[ ! -e $sif || ! -e $sif.from || $(<"$sif.from") != "$from" ]]; then
        rm -f "$sif.from"
        [[ ! -e $here/.venv-apptainer ]] || echo unfinished >"$here/.venv-apptainer/.install" # it was another image's
        # Off the home directory, where they would be by default: layers of an image are some GB, and homes are small.
        # https://apptainer.org/docs/user/latest/build_env.html
        export APPTAINER_CACHEDIR=$here/.apptainer/cache APPTAINER_TMPDIR=$here/.apptainer/tmp
        trap 'rm -rf "$here/.apptainer"' EXIT
        mkdir -p "$APPTAINER_CACHEDIR" "$APPTAINER_TMPDIR"
        if [[ $image == *://* ]]; then
            echo "fetching $image (minutes, and some GB)"
            apptainer pull --force "$sif" "$image" || fail 1 "apptainer could not fetch it (above): is a proxy needed here?"
        elif [[ ! $image -ef $sif ]]; then
            cp "$image" "$sif"
        fi
        rm -rf "$here/.apptainer"
        echo "$from" >"$sif.from"
    fi
    # Shown in the image: this directory, the one that relative paths start from, the core, and paths among the flags.
    binds=(--bind "$here" --bind "$PWD" --pwd "$PWD")
    for path in "$here/../../core" "${flags[@]}"; do
        [[ ! -e $path ]] || binds+=(--bind "$(realpath "$path")")
    done
    exec apptainer --quiet exec "${binds[@]}" "$sif" bash "$here/install.sh" "${flags[@]}"
fi

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

[[ -f $core || -f $core/pyproject.toml || $core == *://* ]] ||
    fail 3 "no ddp_core at $core: pass --core, the repository's core/, a wheel or a URL"
# What lies in ~/.local is no part of the environment, here and in the job. Importing leaves no files in Python's own folders.
# https://docs.python.org/3/using/cmdline.html#environment-variables
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1

version=$("$python" -c 'import sys; print(sys.version.split()[0]); sys.exit(sys.version_info < (3, 11))') ||
    fail 3 "$python is ${version:-not there}: add a module of 3.11 or newer to modules=() in job.sl, or set PYTHON"
inherited=''
[[ $torch$torch_index ]] || inherited=$("$python" -c '
import importlib.util, sys
if importlib.util.find_spec("torch"):
    if sys.prefix != sys.base_prefix:
        sys.exit(f"the torch of {sys.executable} is in a virtual environment, which another cannot inherit")
    import torch
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
        sys.exit(f"the torch of {sys.executable} is {torch.__version__}, older than 2.8")
    print(torch.__version__)
') || fail 3 "the torch that $python brings cannot be used (above): take another module, or pass --torch torch==2.13.0"
# A release that this site was tried with. PyPI has it for NVIDIA GPUs; which driver it needs is pytorch.org's to say.
torch=${torch:-torch==2.13.0}

prefix=$here/.venv${APPTAINER_CONTAINER:+-apptainer}
mkdir -p "$prefix" || fail 3 "$prefix cannot be made"
mark=$prefix/.install # of a directory that is ours, and may be emptied; it says how far we came
[[ -e $mark || -z $(ls -A "$prefix") ]] || fail 3 "$prefix holds something else: move it away"

# ---- the virtual environment and PyTorch: whole, or made again ---------------------------------------------------

# A virtual environment cannot be moved, nor survive another Python or other modules.
base=$("$python" -c 'import sys; print(sys.base_prefix)')
wanted="$prefix | $base $version | ${inherited:-$torch $torch_index} | modules=(${modules[*]})"
if [[ ! -e $mark || $(<"$mark") != "$wanted" ]]; then
    echo unfinished >"$mark"
    echo "making $prefix with Python $version"
    find "$prefix/" -mindepth 1 -maxdepth 1 ! -name .install -exec rm -rf {} +
fi

# pip and venv leave nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Nor does it install where your shell or your pip.conf says.
# https://pip.pypa.io/en/stable/topics/configuration/#environment-variables
export PIP_USER=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "$prefix/bin/python" -m pip --quiet install "$@"; }

if [[ $(<"$mark") != "$wanted" ]]; then
    # The torch of a module is used and never replaced: it was built for this machine.
    "$python" -m venv ${inherited:+--system-site-packages} "$prefix" ||
        fail 1 "$python -m venv failed (above): take a Python that has venv and ensurepip"
    if [[ -z $inherited ]]; then
        echo "installing $torch (minutes, and some GB with CUDA)"
        # numpy: without it torch 2.13 warns at every import.
        pip ${torch_index:+--index-url "$torch_index"} "$torch" 'numpy>=1.26' ||
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
echo "installing ddp_core ${add[*]}"
# Of PyPI this file, for x86_64 or aarch64, and no other.
# https://pypi.org/project/safetensors/0.8.0/#files
cat >"$TMPDIR/safetensors.txt" <<END
safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774 \\
    --hash=sha256:7a46e5ff292c356d6991e60942ba7f79817682d3a2cef0702136448cb9c4d235
END
pip --require-hashes --no-deps --requirement "$TMPDIR/safetensors.txt" ||
    fail 1 "pip could not install safetensors (above): check the network, then run this again"
# Nothing may replace torch: it is named again, and ddp_core comes without its dependencies.
torch=$("$prefix/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))')
[[ -z ${add[*]} ]] || pip "${add[@]}" "$torch" || fail 1 "pip could not install ${add[*]} (above): run this again"
pip --no-deps "$core" || fail 1 "pip could not install ddp_core (above): without network pass a wheel as --core"
[[ -z $horovod ]] || "$here/install-horovod.sh" "$prefix/bin/python" || exit

# ---- does it work -----------------------------------------------------------------------------------------------

"$prefix/bin/python" -c '
import platform, torch, safetensors.torch, ddp_core
builds = [f"{name} {number}" for name in ("cuda", "hip", "xpu") if (number := getattr(torch.version, name, None))]
print("python", platform.python_version())
print("torch", torch.__version__, "for", *builds or ["the CPU alone: --torch-index finds builds for GPUs"])
print("ddp_core", ddp_core.__version__)
' || { echo unfinished >"$mark" && fail 1 "the environment does not work (above): run this again, or with other modules"; }
echo "installed in $prefix; submit: cd $(printf %q "$here") && sbatch job.sl --epochs 3"

#!/bin/bash
# Makes the virtual environment in which the jobs run: ddp_core over the PyTorch that NERSC built.
#
#   ./install.sh [PREFIX] [--shifter] [--core WHAT] [--with PACKAGE]...
#
#   PREFIX           where to make it (default: .venv beside this script, where job.sl looks for it; with --shifter
#                    .venv-shifter, where job-shifter.sl does)
#   --shifter        over the container that job-shifter.sl names, in place of the module that job.sl loads
#   --core WHAT      ddp_core: a directory, a wheel or a URL (default: ../../core, as in the repository)
#   --with PACKAGE   a package more, any number of times: tensorboard, wandb, nbclient, ipykernel; torch stays as it is
#
# For a conda environment of your own: delete the line in job.sl that loads the module, activate it, and run this.
# Run it again, with the same flags, after whatever happened: what is whole is kept, the rest is made anew. It writes
# nothing outside PREFIX. It needs the network: run it on a login node.
# Exit codes: 0 done, 1 an installation failed (run it again), 2 a wrong flag, 3 something is missing: nothing was changed.

set -euo pipefail

fail() { # code, message
    echo "error: $2" >&2
    exit "$1"
}

# ---- what is asked for ------------------------------------------------------------------------------------------

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix='' core='' shifter='' packages=()
while (($#)); do
    case $1 in
    --help | -h)
        sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --shifter)
        shifter=yes
        shift
        ;;
    --core | --with)
        [[ -n ${2:-} ]] || fail 2 "$1 needs a value (--help)"
        case $1 in
        --core) core=$2 ;;
        --with) packages+=("$2") ;;
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
if [[ -n $shifter ]]; then script=job-shifter.sl venv=.venv-shifter; else script=job.sl venv=.venv; fi
prefix=${prefix:-$here/$venv}

# ---- what is there: nothing is written before all of this holds --------------------------------------------------

if [[ -z $core ]]; then
    core=$here/../../core
    [[ -d $core ]] || fail 3 "no ddp_core at $core: pass --core, the repository's core/ directory, a wheel or a URL"
elif [[ ! -e $core && $core != *://* ]]; then
    fail 3 "--core $core: no such directory or file, and not a URL"
fi
[[ ! -d $core || -f $core/pyproject.toml ]] || fail 3 "--core $core is no Python package: it has no pyproject.toml"

# What `pip install --user` left is no part of the environment, here and in the job. Importing leaves no files in the
# module's own folders.
# https://docs.python.org/3/using/cmdline.html#environment-variables
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1

# The module and the image are named once, in the job scripts.
container=() modules=()
if [[ -n $shifter ]]; then
    image=$(sed -n 's/^image=//p' "$here/job-shifter.sl")
    origin="image $image"
    command -v shifterimg >/dev/null || fail 3 "no shifterimg: run this on a login node of Perlmutter"
    images=$(shifterimg images) || fail 3 "shifterimg images failed (above): try again later"
    if ! awk '{ print $NF }' <<<"$images" | grep -qxF "$image"; then
        awk '{ print $NF }' <<<"$images" | grep pytorch >&2 || echo "(no image with pytorch in its name)" >&2
        fail 3 "no image $image; there are the above: edit image= in job-shifter.sl, or shifterimg pull $image"
    fi
    container=(
        shifter

        # As in the job.
        # https://github.com/NERSC/shifter/blob/692d38cd6e35994bcd6e653df314abe1f34d0a6f/doc/command/shifter.rst
        --image="$image"

        # No driver and no NCCL of the node: nothing computes here.
        # https://github.com/NERSC/shifter/blob/1378b5716e466cdc637feceb72fe84f55aefcb22/doc/modules.rst
        --module=none
    )
else
    read -r -a modules < <(sed -n 's/^ *module  *load  *\([^ |]*\).*/\1/p' "$here/job.sl"; echo)
    origin="module ${modules[*]:-(none: the python of $(command -v python || echo nowhere))}"
    if ((${#modules[@]})); then
        type module >/dev/null 2>&1 || fail 3 "no module command: run this in a login shell of Perlmutter"
        set +u # module functions read unset variables
        if ! module load "${modules[@]}"; then
            module -t avail pytorch >&2 || true
            fail 3 "no module ${modules[*]}; there are the above: edit the line in job.sl that loads it"
        fi
        set -u
    fi
    command -v python >/dev/null || fail 3 "no python, though $origin was loaded: edit the line in job.sl that loads it"
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
print(platform.python_version(), torch.__version__, sys.prefix, os.path.realpath(sys.executable), sep="\n")
') || fail 3 "$origin cannot be used (above): name another one in $script"
{ read -r python_version && read -r torch_version && read -r python_prefix && read -r python; } <<<"$found"

mkdir -p "$prefix" || fail 3 "PREFIX $prefix cannot be made"
prefix=$(cd -P "$prefix" && pwd)
# The mark of a directory that is ours, and may be emptied. It says how far we came.
mark=$prefix/.install
[[ -e $mark || -z $(ls -A "$prefix") ]] || fail 3 "PREFIX $prefix holds something else: pass a new or an empty directory"
[[ -w $prefix ]] || fail 3 "PREFIX $prefix cannot be written"

# ---- the virtual environment: whole, or made again ---------------------------------------------------------------

# A virtual environment cannot be moved, nor survive another Python.
wanted="$prefix | $origin | $python_prefix $python_version | torch $torch_version"
if [[ ! -e $mark || $(<"$mark") != "$wanted" ]]; then
    echo unfinished >"$mark"
    echo "making $prefix over $origin: Python $python_version, torch $torch_version"
    find "$prefix" -mindepth 1 -maxdepth 1 ! -name .install -exec rm -rf {} +
fi

# pip and venv leave nothing in /tmp or ~/.cache.
# https://pip.pypa.io/en/stable/topics/caching/
export TMPDIR=$prefix/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
rm -rf "$TMPDIR"
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
pip() { "${container[@]}" "$prefix/bin/python" -m pip --quiet "$@"; }

if [[ $(<"$mark") != "$wanted" ]]; then
    # NERSC's torch and pip are seen through it, and never replaced. Without a pip of its own, which Ubuntu's Python, as in
    # a container, cannot make; and from the executable itself, since a link to it may lead past its packages.
    # https://docs.python.org/3/library/venv.html
    "${container[@]}" "$python" -m venv --system-site-packages --without-pip "$prefix" ||
        fail 1 "$python -m venv failed (above): run this again"
    echo "$wanted" >"$mark"
fi

# ---- the core: small, so made again each time --------------------------------------------------------------------

# An interrupted pip leaves packages that it can neither use nor remove.
rm -rf "$prefix"/lib*/python*/site-packages/{ddp_core,safetensors,~}*
if [[ -d $core ]]; then
    cp -R "$core" "$TMPDIR/core" # a build writes into its source
    core=$TMPDIR/core
elif [[ -e $core ]]; then
    core=$(cd "$(dirname "$core")" && pwd)/$(basename "$core")
fi
# What pip may add is free, but not another torch.
echo "torch==$torch_version" >"$TMPDIR/constraint"
echo "installing ddp_core${packages[*]:+ ${packages[*]}}"
pip install --constraint "$TMPDIR/constraint" 'safetensors>=0.4.3' "${packages[@]}" ||
    fail 1 "pip could not install safetensors ${packages[*]} (above): check the network, then run this again"
# Without dependencies: nothing may replace torch.
pip install --no-deps "$core" || fail 1 "pip could not install ddp_core (above): without network pass a wheel as --core"

# ---- does it work -----------------------------------------------------------------------------------------------

"${container[@]}" "$prefix/bin/python" -c '
import platform, torch, safetensors.torch, ddp_core
print("python", platform.python_version())
print("torch", torch.__version__, "for", f"cuda {torch.version.cuda}" if torch.version.cuda else "the CPU alone")
print("ddp_core", ddp_core.__version__)
' || {
    echo unfinished >"$mark"
    fail 1 "the environment does not work (above): run this again, and with another module or image if it fails again"
}

echo "installed in $prefix"
[[ $prefix -ef $here/$venv ]] || echo "$script looks for $venv beside itself: ln -s $(printf %q "$prefix") $venv"
echo "submit: cd $(printf %q "$here") && sbatch $script --epochs 3"

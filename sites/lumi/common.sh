#!/bin/bash
# What job.sl, job-torchrun.sl, python.sh and install.sh share: the image, what its programs see, how a job ends.
# Sourced, never run. Nothing here is to be edited, unless another image is wanted: then run install.sh again.

set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 3 # as train.py: nothing was started
}

site=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---- the image and the module that it needs ---------------------------------------------------------------------

# LUMI AI Factory's. Its name decodes as Ubuntu 24.04, ROCm 7.0, libfabric 2.1, MPICH 5.0, PyTorch 2.10 (inferred).
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/05-multi-gpu-and-node/run_ddp_srun_4.sh
images=/appl/local/laifs/containers
image=$images/lumi-multitorch-u24r70f21m50t210-20260415_130625/lumi-multitorch-full-u24r70f21m50t210-20260415_130625.sif

# The module names in SINGULARITY_BIND what a container needs of the system: the network's libraries and the file systems.
# Purged before, since another container module binds other things: EasyBuild's PyTorch also sets NCCL_NET_GDR_LEVEL.
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/02-setting-up-environment/README.md
modules=/appl/local/laifs/modules
[[ $(type -t module) == function ]] || fail "no module command: start this from a login shell (bash -l)"
[[ -d $modules ]] || fail "no $modules on $HOSTNAME: this is not LUMI, or its containers have moved (module spider aif)"
set +u # module functions read unset variables
module purge
module use "$modules"
module load lumi-aif-singularity-bindings ||
    fail "the bindings module did not load (above); in $modules there is: $(cd "$modules" && echo *)"
set -u
command -v singularity >/dev/null || fail "no singularity on $HOSTNAME: on LUMI it is there without a module"
[[ -f $image ]] || fail "no image $image; there is: $(printf '%s ' "$images"/*/lumi-multitorch-full-*.sif)(edit image= in common.sh)"

# ---- what programs in the container see -------------------------------------------------------------------------
# Singularity hands on the variables of the shell that starts it, except those that the image sets itself: to overrule the
# image, prefix a name with SINGULARITYENV_. https://docs.sylabs.io/guides/latest/user-guide/environment_and_metadata.html

# PYTHONPATH: the image may carry one of its own, for its packages, and the shell's would take its place (laifs#15).
# NCCL_NET_GDR_LEVEL: jobs of several nodes hang when it is set, to PHB or SYS (laifs#30); the older documents set it.
# https://github.com/lumi-ai-factory/laifs-container-recipes/issues/30 and /issues/15
unset PYTHONPATH NCCL_NET_GDR_LEVEL

# Keeps jobs in these containers from hanging: how libfabric notices that registered memory was freed.
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/118
export FI_MR_CACHE_MONITOR=userfaultfd

# Singularity mounts the home directory: packages in ~/.local would come before the image's.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
export PYTHONNOUSERSITE=1

# The caches of compiled kernels. In /tmp, since Lustre has not the file locks that they want, and each node has a /tmp of its
# own: rank.sh, torchrun.py and python.sh make them there. Named for user and job: neither a neighbour nor the same user's
# next job meets them, so that nobody has to delete what another rank may be using.
cache=/tmp/ddp-$UID-${SLURM_JOB_ID:-no-job}

# MIOpen's tuning results, and its compiled kernels.
# https://rocm.docs.amd.com/projects/MIOpen/en/latest/install/build-source.html
export MIOPEN_USER_DB_PATH=$cache/miopen-db
# https://rocm.docs.amd.com/projects/MIOpen/en/latest/cache.html
export MIOPEN_CUSTOM_CACHE_DIR=$cache/miopen-kernels

# What --compile makes; Triton's would be in the home directory.
# https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor
# https://github.com/deepspeedai/DeepSpeed/pull/7907
export TRITON_CACHE_DIR=$cache/triton

# Python in the container, with ddp_core over the image's packages; and where install.sh --squashfs has packed that into
# one file, the file is mounted. https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/02-setting-up-environment/README.md
python=$site/.venv/bin/python
singularity_flags=()
if [[ -f $site/.venv/packed.sqsh ]]; then
    python=/user-software/bin/python
    singularity_flags+=(
        # https://docs.sylabs.io/guides/latest/user-guide/bind_paths_and_mounts.html#bind-images
        --bind "$site/.venv/packed.sqsh:/user-software:image-src=/"
    )
fi

# ---- for job scripts --------------------------------------------------------------------------------------------

# How often Slurm has started this job again; it is not set in the first start.
# https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
restarts=${SLURM_RESTART_COUNT:-0}
# It goes back into the queue at most so often: a job that can never end shall not come back for ever.
max_restarts=20

# RCCL_DEBUG=yes sbatch job.sl: what RCCL finds and chooses, into a file a process; which network it uses stands there.
# Injected into the container, so that it holds whatever the image sets.
if [[ -n ${RCCL_DEBUG:-} ]]; then
    # https://rocm.docs.amd.com/projects/rccl/en/latest/api-reference/env-variables.html
    export SINGULARITYENV_NCCL_DEBUG=INFO
    # Not COLL, which writes a line at each collective of each rank.
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug-subsys
    export SINGULARITYENV_NCCL_DEBUG_SUBSYS=INIT,NET
    # %h and %p: host and process. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug-file
    export SINGULARITYENV_NCCL_DEBUG_FILE="$PWD/rccl-${SLURM_JOB_ID:-no-job}-%h-%p.log"
fi

# Binding to cores needs all of them: core 0 of each chiplet is the system's, 1 to 7 are the job's. Where some are another
# job's, srun refuses the masks, in many words of its own; here it is one line.
need_whole_nodes() {
    local mine needed=0xfefefefefefefefe
    # "NO" is Slurm's word for whole nodes. https://slurm.schedmd.com/scontrol.html
    [[ ! $(scontrol show job "$SLURM_JOB_ID") =~ OverSubscribe=NO ]] || return 0
    mine=$(printf '%016x' 0)$(taskset -p $$ | sed 's/.* //')
    mine=0x${mine: -16} # of 128 hardware threads the first 64 are the cores
    (((mine & needed) == needed)) ||
        fail "this job shares its nodes, and has the cores $mine of $needed: ranks are bound to cores on whole nodes only; add --exclusive, or -p standard-g"
}

# The head node, and a port on it, for the ranks to meet: determined here, since the container has no scontrol. Prints what
# the job is. $1: ranks on a node.
describe_job() {
    local versions messages
    # Rank 0 runs on the job's first node. The node list is compressed ("nid[005001-005002]"), and scontrol expands it.
    # https://slurm.schedmd.com/scontrol.html#OPT_hostnames
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts%%$'\n'*}

    # From the job id: two jobs on a node take the same one only if their ids differ by a multiple of 10000, and then the
    # ranks notice. https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/05-multi-gpu-and-node/README.md
    export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))

    [[ -e $site/.venv/.install ]] || fail "no virtual environment at $site/.venv: run ./install.sh first"
    messages=$(mktemp) # Singularity's own stand on stderr, of a success too
    versions=$(singularity exec "${singularity_flags[@]}" "$image" "$python" -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "ddp-core")))
' 2>"$messages") || fail "the container does not run $python ($(tail -n 1 "$messages")): run ./install.sh again, in a directory that containers see: home, /project, /scratch, /flash"
    rm "$messages"
    echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) $versions image=$(basename "$image")"
    echo "nodes=$SLURM_JOB_NUM_NODES ranks=$((SLURM_JOB_NUM_NODES * $1)) ranks_per_node=$1 cores_per_rank=$OMP_NUM_THREADS gpus_per_node=${SLURM_GPUS_PER_NODE:-0}"
    echo "hosts=${hosts//$'\n'/,} master=$MASTER_ADDR:$MASTER_PORT"
}

# The end of a job script: its name, the ranks' exit code, its arguments.
finish() {
    local script=$1 code=$2 resume
    shift 2
    ((code == 75)) || exit "$code"
    # 75: stopped early and saved, on all ranks. This shell has not seen the USR1; a SIGTERM, as from scancel, has ended it
    # before it comes here, and "Incomplete" keeps even then a cancelled job from coming back.
    # The command that resumes by hand. Without --fresh, which would put aside what this job has done.
    resume="sbatch $script $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
    resume=${resume/ --fresh / }
    if ((restarts >= max_restarts)); then
        echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); to resume: $resume" >&2
    else
        # Said before: the requeue ends this shell.
        echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
        scontrol requeue Incomplete "$SLURM_JOB_ID" || echo "error: Slurm did not requeue the job (above); to resume: $resume" >&2
    fi
    exit 75
}

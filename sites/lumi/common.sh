#!/bin/bash
# What job.sl, python.sh and install.sh share: the image, its modules and caches, how a job begins and ends. Only sourced.

set -euo pipefail

images=/appl/local/laifs/containers
# EDIT: the image. It is named with its date, so that a new release changes nothing for you; the newest one is where the link
# $images/lumi-multitorch-latest.sif leads. After a change run install.sh again. The name decodes as Ubuntu 24.04, ROCm 7.0,
# libfabric 2.1, MPICH 5.0, PyTorch 2.10. By users' scripts there is a newer one, u24r72f21m50t211-20260929_104918: ROCm 7.2,
# PyTorch 2.11. That one may need NCCL_NET_PLUGIN (Known failures in README.md). Whether both are still there is unverified.
# https://github.com/lumi-ai-factory/laifs-container-recipes/issues/44
# https://github.com/Lumi-supercomputer/lumi-userguide/pull/315
image=$images/lumi-multitorch-u24r70f21m50t210-20260807_115122/lumi-multitorch-full-u24r70f21m50t210-20260807_115122.sif

fail() {
    echo "error: $1" >&2
    exit 3 # as train.py: nothing was started
}
site=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---- the modules ------------------------------------------------------------------------------------------------

# lumi-aif-singularity-bindings names in SINGULARITY_BIND what a container needs of the system: the network's libraries and the
# file systems. Local-LAIF makes it visible; where there is no Local-LAIF yet, the folder does. Purged before, since other
# container modules bind other things. https://github.com/Lumi-supercomputer/lumi-userguide/pull/315
[[ $(type -t module) == function ]] || fail "no module command: start this from a login shell (bash -l)"
set +u # module functions read unset variables
module purge || fail "module purge failed (above)"
module load Local-LAIF 2>/dev/null || module use /appl/local/laifs/modules || fail "no module Local-LAIF, nor its folder"
module load lumi-aif-singularity-bindings || fail "lumi-aif-singularity-bindings did not load (above): is this LUMI?"
set -u
command -v singularity >/dev/null || fail "no singularity on $HOSTNAME: on LUMI it is there without a module"
[[ -f $image ]] || fail "no image $image; set image= in common.sh to one of: $(echo "$images"/*/lumi-multitorch-full-*.sif)"
image_name=$(basename "$(realpath "$image")") # of a link: what it leads to today

# ---- what programs in the container see: this shell's variables; what the image sets, only SINGULARITYENV_NAME overrules ----

# The image has a PYTHONPATH of its own, and packages in ~/.local must not come before its packages.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
unset PYTHONPATH
export PYTHONNOUSERSITE=1

# Caches of compiled kernels, on each node in /tmp: on Lustre ranks read what others are writing, and fail. /tmp is memory
# of the job, so a job empties it when it ends. Named for user and job, so that no two jobs share it.
# https://docs.lumi-supercomputer.eu/storage/#temporary-storage-on-compute-nodes
cache=/tmp/ddp-$UID-${SLURM_JOB_ID:-no-job}
# https://docs.lumi-supercomputer.eu/software/packages/pytorch/
export MIOPEN_USER_DB_PATH=$cache/miopen MIOPEN_CUSTOM_CACHE_DIR=$cache/miopen
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/issues/112
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton TORCH_EXTENSIONS_DIR=$cache/extensions

# What torch.hub and Hugging Face download goes to the project's scratch, unless you say otherwise: home holds 20 GB.
if [[ -n ${SLURM_JOB_ACCOUNT:-} ]]; then
    # https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/05-multi-gpu-and-node/run_ddp_srun_4.sh
    export TORCH_HOME=${TORCH_HOME:-/scratch/$SLURM_JOB_ACCOUNT/$USER/torch_home}
    # https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables#hfhome
    export HF_HOME=${HF_HOME:-/scratch/$SLURM_JOB_ACCOUNT/$USER/hf_home}
fi

# The container's Python with ddp_core; where install.sh --squashfs has packed it into one file, that is mounted.
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/02-setting-up-environment/README.md
python=$site/.venv/bin/python
singularity_flags=()
if [[ -f $site/.venv/packed.sqsh ]]; then
    python=/user-software/bin/python
    singularity_flags=(--bind "$site/.venv/packed.sqsh:/user-software:image-src=/")
fi

# ---- for job.sl -------------------------------------------------------------------------------------------------

# How often Slurm has started this job again, and how often it may: one that never ends must not come back for ever.
restarts=${SLURM_RESTART_COUNT:-0} max_restarts=20
# Bash evaluates what stands in a variable that it computes with, commands too: whole numbers alone.
for name in SLURM_RESTART_COUNT SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_NTASKS_PER_NODE; do
    value=${!name:-0}
    [[ $value =~ ^(0|[1-9][0-9]{0,17})$ ]] || fail "$name=$(printf %q "${value:0:80}"), but should be a whole number"
done

if [[ -n ${RCCL_DEBUG:-} ]]; then
    # What RCCL finds and chooses, without a line for each collective, in a file for each process: %h is the host.
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    export SINGULARITYENV_NCCL_DEBUG=INFO SINGULARITYENV_NCCL_DEBUG_SUBSYS=INIT,NET
    export SINGULARITYENV_NCCL_DEBUG_FILE="$PWD/rccl-${SLURM_JOB_ID:-no-job}-%h-%p.log"
fi

# The head node and its port, for the ranks to meet (get-master in LUMI's older containers); prints what the job is.
describe_job() {
    local hosts versions messages
    [[ ${LAUNCHER:=srun} == srun || $LAUNCHER == torchrun ]] || fail "LAUNCHER=$LAUNCHER, but should be srun or torchrun"
    # Ranks are bound to cores by number, so a node must be the job's alone: "NO" is Slurm's word for that.
    # https://slurm.schedmd.com/scontrol.html
    [[ $(scontrol show job "$SLURM_JOB_ID") == *OverSubscribe=NO* ]] ||
        fail "this job shares its nodes: add --exclusive, or -p standard-g (ranks are bound to the cores of whole nodes)"

    # With --ntasks alone Slurm decides how many ranks a node has; the masks are for as many on each.
    ((${SLURM_NTASKS:-0} == SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE)) ||
        fail "ntasks=${SLURM_NTASKS:-none} leaves open how many ranks a node has: pass sbatch --nodes and --ntasks-per-node"

    # Rank 0 runs on the first node. The container has no scontrol. https://slurm.schedmd.com/scontrol.html#OPT_hostnames
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts%%$'\n'*}
    # From the job id: two jobs on a node get the same one only if their ids differ by a multiple of 10000; then ranks notice.
    # https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/05-multi-gpu-and-node/README.md
    export MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))
    # Of this start's ranks alone: they sign with it what they tell each other while they meet. od --help
    export DDP_SECRET
    DDP_SECRET=$(od -An -N32 -tx8 /dev/urandom | tr -d ' \n')

    grep -qsF " $image_name " "$site/.venv/.install" || fail "no environment for $image_name at $site/.venv: run ./install.sh"
    messages=$(mktemp) # Singularity's own go to stderr, also when all is well
    versions=$(singularity exec "${singularity_flags[@]}" "$image" "$python" -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "ddp-core")))
' 2>"$messages") || fail "$python does not run in the container ($(tail -n 1 "$messages")): run ./install.sh again"
    rm "$messages"
    echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) $versions image=$image_name"
    echo "nodes=$SLURM_JOB_NUM_NODES ranks_per_node=$SLURM_NTASKS_PER_NODE launcher=$LAUNCHER" \
        "cores_per_rank=$OMP_NUM_THREADS gpus_per_node=${SLURM_GPUS_PER_NODE:-0}"
    echo "hosts=${hosts//$'\n'/,} master=$MASTER_ADDR:$MASTER_PORT"
}

# The end of a job, with the ranks' exit code and the script's arguments.
finish() {
    local code=$1 resume job
    shift
    # No rank is left that could be using the caches. Before a requeue it must not use up what is left of the time limit.
    timeout --kill-after=5 $((code == 75 ? 15 : 60)) srun --ntasks="$SLURM_JOB_NUM_NODES" rm -rf "$cache" ||
        echo "warning: $cache may be left on a node" >&2
    ((code == 75)) || exit "$code"
    # The last job of an array has the array's own number, by which all would be requeued: 36_3 names one of them.
    # https://slurm.schedmd.com/job_array.html
    job=$SLURM_JOB_ID
    [[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
    # 75: all ranks have stopped and saved. --fresh would put aside what they saved.
    resume="sbatch job.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
    resume="to resume, with the other options that this job had: ${resume/ --fresh / }"
    if [[ $SLURM_JOB_PARTITION == dev-g ]]; then
        # For tests, not for production. https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/partitions/
        echo "stopped and saved: a job in dev-g does not requeue itself; $resume"
    elif ((restarts >= max_restarts)); then
        echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); $resume" >&2
    else
        # Said before: the requeue ends this shell. "Incomplete": a cancelled job does not come back.
        echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
        scontrol requeue Incomplete "$job" || echo "error: it was not requeued (above); $resume" >&2
    fi
    exit 75
}

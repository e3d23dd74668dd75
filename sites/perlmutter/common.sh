#!/bin/bash
# What surrounds the launch in job.sl: a description of the job, the fabric check, metrics, and the way back into the queue.
# Sourced by job.sl, never run. Nothing here is to be edited.

set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 3 # as train.py: nothing was started
}

# What your shell has in PYTHONPATH would come before the packages of .venv. Unset before the modules, which may set it.
unset PYTHONPATH

# SIGTERM, of a preemption or of scancel, is for the ranks. Should it come to this shell too, it waits for them all the same.
trap 'echo "SIGTERM: waiting for the ranks to save"' TERM

# How often Slurm has started this job again, and how often it may: a job that can never end must not come back for ever.
# Slurm does not set the variable in the first start. https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
restarts=${SLURM_RESTART_COUNT:-0} max_restarts=20
# Bash evaluates what stands in a variable that it computes with, commands too: whole numbers alone.
for name in SLURM_RESTART_COUNT SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_CPUS_PER_TASK; do
    value=${!name:-0}
    [[ $value =~ ^(0|[1-9][0-9]{0,17})$ ]] || fail "$name=$(printf %q "${value:0:80}"), but should be a whole number"
done

python=$PWD/.venv/bin/python # of the module, or of the container: then this node has it in the container only
container=()                 # the words that start a program in the container
metrics=''                   # the process that writes metrics

# Says what the job is, and exports where rank 0 listens. Fails without an environment, or where NCCL would not use the fabric.
# $1: where PyTorch comes from, in words.
describe_job() {
    local hosts software
    # Rank 0 runs on the job's first node. The node list is compressed ("nid[001001-001002]"), and scontrol expands it.
    # https://slurm.schedmd.com/scontrol.html#OPT_hostnames
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export MASTER_ADDR=${hosts%%$'\n'*}

    # Its port, from the job id: two jobs on a node take the same one only if their ids differ by a multiple of 10000, and
    # then the ranks notice. 20000-29999 is below the ports that Linux hands to outgoing connections, 32768-60999.
    # https://docs.kernel.org/networking/ip-sysctl.html
    export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

    # Of this start's ranks alone: they sign with it what they tell each other while they meet. od --help
    export DDP_SECRET
    DDP_SECRET=$(od -An -N32 -tx8 /dev/urandom | tr -d ' \n')

    [[ -e .venv/.install && $(<.venv/.install) == *" | $1 | "* ]] || fail "no .venv of the $1 here: run ./install.sh again"
    software=$("${container[@]}" "$python" -c '
from importlib.metadata import version
from os import environ
from platform import python_version
versions = [f"{name}={version(name)}" for name in ("torch", "ddp-core")]
print(f"python={python_version()}", *versions, "nccl_net=" + environ.get("NCCL_NET", "unset").replace(" ", "_"))
' 2>&1) || fail "$python does not start (${software##*$'\n'}): run ./install.sh again"
    echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) pytorch=${1% modules=*} $software"
    echo "nodes=$SLURM_JOB_NUM_NODES ranks=$SLURM_NTASKS ranks_per_node=$SLURM_NTASKS_PER_NODE" \
        "cpus_per_rank=$SLURM_CPUS_PER_TASK gpus_per_node=${SLURM_GPUS_PER_NODE:-0}"
    echo "hosts=${hosts//$'\n'/,} master=$MASTER_ADDR:$MASTER_PORT"

    # Between nodes NCCL without its plugin for Slingshot goes over TCP, 8.3 times slower, and does not say so (measured):
    # https://github.com/saforem2/ezpz/blob/1dd97b7/docs/guides/perlmutter.md
    # With the plugin's name in NCCL_NET, where NERSC's modules put it, NCCL ends if it cannot load the plugin:
    # https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/nccl/nccl_tuning_guide.md
    # It has three names, in any case of letters; until 1.11 the first alone:
    # https://github.com/aws/aws-ofi-nccl/blob/2daf7d3/src/nccl_ofi_interface_nvidia.cpp
    if ((SLURM_JOB_NUM_NODES > 1)) && [[ ! ${software,,} =~ nccl_net=(aws_libfabric|libfabric|ofi)([[:space:]]|$) ]]; then
        fail "NCCL_NET is not \"AWS Libfabric\" or OFI (nccl_net above): NCCL may go over TCP; load nccl's module, or Shifter's"
    fi
}

# With METRICS="tensorboard wandb": a process beside the ranks, on this node, which reads what rank 0 writes. $@: as train.py's.
start_metrics() {
    local backend backends run_dir
    [[ -n ${METRICS:-} ]] || return 0
    read -r -a backends <<<"$METRICS"
    for backend in "${backends[@]}"; do
        [[ $backend == tensorboard || $backend == wandb ]] ||
            fail "METRICS=$METRICS, but should be tensorboard, wandb, or both with a space between them"
    done
    run_dir=$("${container[@]}" "$python" -m ddp_core.find_run "$@")
    "${container[@]}" "$python" metrics.py --follow "${backends[@]/#/--}" "$run_dir" &
    metrics=$!
}

# The end of job.sl: the ranks' exit code, the arguments of job.sl.
finish() {
    local code=$1 state resume job
    shift
    # The writer of metrics has 20 s for what is left. Whether it could is of no consequence here.
    if [[ -n $metrics ]]; then
        kill -TERM "$metrics" 2>/dev/null || true
        timeout 20 tail --pid="$metrics" -f /dev/null || echo "metrics: ended after 20 s, before all was written"
        kill -KILL "$metrics" 2>/dev/null || true
    fi
    ((code == 75)) || exit "$code"

    # The last job of an array has the array's own number, by which all would be requeued: 36_3 names one of them.
    # https://slurm.schedmd.com/job_array.html
    job=$SLURM_JOB_ID
    [[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
    # 75: stopped early and saved, on all ranks. A job that is still RUNNING for Slurm, as in the grace time of a preemption,
    # goes back into the queue; one that was cancelled is COMPLETING, and stays cancelled.
    # Where squeue does not answer, requeue is tried: its "Incomplete" leaves a cancelled job alone, too.
    state=$(squeue --noheader --jobs="$job" --format=%T) || state=RUNNING
    # The command that resumes by hand. Without --fresh, which would put aside what this job has done.
    resume="sbatch job.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
    resume="to resume, with the other options that this job had: ${resume/ --fresh / }"
    if [[ ${SLURM_JOB_QOS:-} == debug || ${SLURM_JOB_QOS:-} == gpu_debug ]]; then
        # The second is Slurm's name of it on GPU nodes. https://docs.nersc.gov/policies/resource-usage/
        echo "stopped and saved. NERSC prohibits chains of debug jobs, so this one does not come back; $resume"
    elif ((restarts >= max_restarts)); then
        echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); $resume" >&2
    elif [[ $state != RUNNING ]]; then
        echo "stopped and saved: job $SLURM_JOB_ID is $state and does not come back; $resume"
    else
        # Said before: the requeue ends this shell.
        echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
        scontrol requeue Incomplete "$job" || echo "error: not requeued (above); $resume" >&2
    fi
    exit 75
}

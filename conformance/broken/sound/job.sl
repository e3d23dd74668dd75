#!/bin/bash
# sound: one rank per device of a machine that does not exist.

# EDIT: the account that pays.
# https://slurm.schedmd.com/sbatch.html#OPT_account
#SBATCH --account=my_account

# Of one start: a longer run comes back.
# https://slurm.schedmd.com/sbatch.html#OPT_time
#SBATCH --time=00:30:00

# Two nodes show what one does not.
# https://slurm.schedmd.com/sbatch.html#OPT_nodes
#SBATCH --nodes=2

# A rank for each device.
# https://slurm.schedmd.com/sbatch.html#OPT_ntasks-per-node
#SBATCH --ntasks-per-node=4

# All devices of a node.
# https://slurm.schedmd.com/sbatch.html#OPT_gpus-per-node
#SBATCH --gpus-per-node=4

# A quarter of the node's cores.
# https://slurm.schedmd.com/sbatch.html#OPT_cpus-per-task
#SBATCH --cpus-per-task=8

# The requeued job writes on in the same log.
# https://slurm.schedmd.com/sbatch.html#OPT_open-mode
#SBATCH --open-mode=append

# After a lost node Slurm starts the job again.
# https://slurm.schedmd.com/sbatch.html#OPT_requeue
#SBATCH --requeue

# To the ranks, two minutes before the time limit.
# https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

# Bash would run what stands in it.
[[ ${SLURM_RESTART_COUNT:-0} =~ ^[0-9]+$ ]] || { echo "error: SLURM_RESTART_COUNT is no whole number" >&2 && exit 3; }

# Of a user's shell: its packages would come before those of the job's Python.
unset PYTHONPATH

# CPU threads of a rank: its own cores.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# From the job's number, so that two jobs on a node do not meet.
# unverified
export MARCH_PORT=$((20000 + SLURM_JOB_ID % 10000))

# Of this start's ranks alone: they sign with it what they tell each other while they meet. od --help
export DDP_SECRET
DDP_SECRET=$(od -An -N32 -tx8 /dev/urandom | tr -d ' \n')

march_flags=(
    # Ranks on each node. march --help
    --each "$SLURM_NTASKS_PER_NODE"
)
train_flags=(
    # The seconds of --signal above: saves that are too slow for it are noted in time. python train.py --help
    --grace 120
    # A requeued job keeps its number, and so finds its run again. python3 train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)
code=0
march "${march_flags[@]}" python3 train.py "${train_flags[@]}" "$@" || code=$?
((code == 75)) || exit "$code"
# The last job of an array has the array's own number, by which all would come back.
job=$SLURM_JOB_ID
[[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
# 75: stopped and saved. A job that can never end must not come back for ever.
resume="sbatch job.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
if ((${SLURM_RESTART_COUNT:-0} < 20)); then
    scontrol requeue Incomplete "$job" || echo "error: Slurm did not requeue it; to resume, with this job's other options: ${resume/ --fresh / }" >&2
else
    echo "stopped and saved; to resume, with this job's other options: ${resume/ --fresh / }"
fi
exit 75

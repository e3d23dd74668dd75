#!/bin/bash -l
# sound-cluster: one rank per device of a machine that is virtual only, started by srun.

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
#SBATCH --ntasks-per-node=2

# All devices of a node.
# https://slurm.schedmd.com/sbatch.html#OPT_gpus-per-node
#SBATCH --gpus-per-node=2

# Half of the node's cores are near a device; the other one is left to the system.
# https://slurm.schedmd.com/sbatch.html#OPT_cpus-per-task
#SBATCH --cpus-per-task=1

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

[[ -d packages ]] || { echo "error: no packages here: run ./install.sh first" >&2 && exit 3; }

set +u # module functions read unset variables
module load pytorch/1.0 net-plugin/1.0
set -u

# By itself RCCL looks for libnccl-net.so, and finds none.
# unverified
export NCCL_NET_PLUGIN=librccl-net.so

# Bash would run what stands in it.
[[ ${SLURM_RESTART_COUNT:-0} =~ ^[0-9]+$ ]] || { echo "error: SLURM_RESTART_COUNT is no whole number" >&2 && exit 3; }
restarts=${SLURM_RESTART_COUNT:-0}
max_restarts=20

# An inner srun would have no PATH.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# CPU threads of a rank: its own cores.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Rank 0's node, by its name on the first interface.
# unverified
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

# From the job's number, so that two jobs on a node do not meet.
# unverified
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# Names this start of this job.
# unverified
export JOB_START=$SLURM_JOB_ID.$restarts

# Of a shell within another job. https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}"
unset SLURM_GPUS SLURM_GPUS_PER_SOCKET SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU

srun_flags=(
    # srun does not take it from the job. https://slurm.schedmd.com/srun.html#OPT_cpus-per-task
    --cpus-per-task="$SLURM_CPUS_PER_TASK"

    # One device a rank. https://slurm.schedmd.com/srun.html#OPT_gpus-per-task
    --gpus-per-task=1

    # The one near its cores. https://slurm.schedmd.com/srun.html#OPT_gpu-bind
    --gpu-bind=closest

    # A rank that died alone ends the job. https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1

    # Ranks that are left a minute after the first one ended hang. https://slurm.schedmd.com/srun.html#OPT_wait
    --wait=60
)
train_flags=(
    # A requeued job keeps its number, and so finds its run again. python3 train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)
code=0
srun "${srun_flags[@]}" python3 train.py "${train_flags[@]}" "$@" || code=$?
((code == 75)) || exit "$code"
job=$SLURM_JOB_ID
[[ ${SLURM_ARRAY_JOB_ID:-} != "$job" ]] || job+=_$SLURM_ARRAY_TASK_ID
if ((restarts < max_restarts)); then
    scontrol requeue Incomplete "$job"
else
    resume="sbatch job.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
    echo "stopped and saved; to resume, with this job's other options: ${resume/ --fresh / }"
fi
exit 75

#!/bin/bash
# Runs in the container, once a rank: makes this node's caches, says which rank this is, and becomes the program.
#
#   srun ... singularity exec IMAGE bash rank.sh PYTHON train.py [flags]

set -euo pipefail

# Ignored until train.py takes them, and that is inherited: a signal that comes while Python starts would end it. TERM comes
# when another rank has failed first, and 143 would take the place of the code and of the line that say what was wrong.
trap '' TERM USR1

# Whichever rank of the node is first makes them; for the others they are there.
mkdir -p "$MIOPEN_USER_DB_PATH" "$MIOPEN_CUSTOM_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"

: "${SLURM_STEP_NUM_TASKS:?: rank.sh is for srun, which sets it; python.sh starts one process}"
# "8(x2)": 8 ranks on each of two nodes. Uneven nodes ("8,4") would need another reading, and are nobody's intention.
if [[ $SLURM_STEP_TASKS_PER_NODE == *,* ]]; then
    echo "error: SLURM_STEP_TASKS_PER_NODE=$SLURM_STEP_TASKS_PER_NODE, but should be the same number on every node" >&2
    exit 3
fi

# The names under which torchrun tells the same, so that train.py reads one set. They differ from rank to rank: srun knows
# them, the batch script does not. https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
# Of the step, not of the job (https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES):
# 0 to WORLD_SIZE - 1, over all nodes.
export RANK=$SLURM_PROCID
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS
# 0 to LOCAL_WORLD_SIZE - 1, on this node: which GCD, and which of the masks of job.sl.
export LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%(*}
# The node's place in the job, from 0.
export GROUP_RANK=$SLURM_NODEID
# A job has many steps, and is started again when it is requeued: the ranks of one start know each other by this.
export RUN_ID=$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}

exec "$@"

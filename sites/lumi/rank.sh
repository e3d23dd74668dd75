#!/bin/bash
# Runs in the container, once a rank, and becomes the program (conda-python-distributed in LUMI's older containers):
#   srun ... singularity exec IMAGE bash rank.sh PYTHON train.py [flags]

set -euo pipefail

# Ignored until train.py takes them: a signal that comes while Python starts would end it. When another rank has failed, TERM
# comes, and its 143 would hide the code and the line that say what was wrong.
trap '' TERM USR1 USR2

# The node's first rank makes it. Compilers load code from there: it is this user's alone, and not what somebody made before.
cache=${TRITON_CACHE_DIR%/*}
if ! mkdir -m 700 "$cache" 2>/dev/null && [[ $(stat -c '%u %a %F' "$cache") != "$UID 700 directory" ]]; then
    echo "error: $cache on $HOSTNAME is not this user's alone (mode 700): remove it, or submit a new job" >&2
    exit 3
fi
mkdir -p "$MIOPEN_USER_DB_PATH"

: "${SLURM_STEP_NUM_TASKS:?: rank.sh is for srun, which sets it; python.sh starts one process}"
# "8(x2)": 8 ranks on each of two nodes. "8,4" would need another reading, and nobody wants it.
if [[ ! $SLURM_STEP_TASKS_PER_NODE =~ ^[0-9]+(\(x[0-9]+\))?$ ]]; then
    echo "error: SLURM_STEP_TASKS_PER_NODE=$SLURM_STEP_TASKS_PER_NODE, but should be the same number on every node" >&2
    exit 3
fi

# The names under which torchrun says the same, so that train.py reads one set. Only srun's tasks know these values.
# https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
export RANK=$SLURM_PROCID
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS
export LOCAL_RANK=$SLURM_LOCALID # on this node: which GCD, and which of the masks of job.sl
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%(*}
export GROUP_RANK=$SLURM_NODEID # the node's place in the job
# The ranks of one start know each other by this: a job has many steps, and is started again when it is requeued.
export RUN_ID=$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}

exec "$@"

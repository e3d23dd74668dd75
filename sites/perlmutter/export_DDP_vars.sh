#!/bin/bash
# What train.py must know of this rank, from what srun tells it. Every rank sources it before train.py:
#   srun ... bash -c 'source ./export_DDP_vars.sh && exec "$@"' rank python train.py
# Not the batch script: there SLURM_PROCID is 0 for all, and srun sets CUDA_VISIBLE_DEVICES anew in every rank.

if [[ -z ${SLURM_STEP_NUM_TASKS:-} ]]; then
    echo "error: SLURM_STEP_NUM_TASKS is not set: export_DDP_vars.sh is for the ranks that srun starts" >&2
    return 3
fi
set -euo pipefail

# Ignored until train.py takes them: a signal that comes while Python starts would end it. When another rank has failed, TERM
# comes, and its 143 would hide the code and the line that say what was wrong.
trap '' TERM USR1 USR2

# "4(x2)": 4 ranks on each of two nodes. "4,3" would need another reading, and nobody wants it.
if [[ ! $SLURM_STEP_TASKS_PER_NODE =~ ^[0-9]+(\(x[0-9]+\))?$ ]]; then
    echo "error: SLURM_STEP_TASKS_PER_NODE=$SLURM_STEP_TASKS_PER_NODE, but should be the same number on every node" >&2
    return 3
fi

# The rank, 0 to WORLD_SIZE-1; the ranks of this step (SLURM_NTASKS is the job's, and a step may have fewer); this rank's place
# on its node, which chooses the GPU; the ranks on its node; the node's place. They have torchrun's names, for train.py.
# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
export RANK=$SLURM_PROCID
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS
export LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%(*}
export GROUP_RANK=$SLURM_NODEID

# Different in another job, another step and another start of this job: ranks notice that they met somebody else's.
# https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
export DDP_JOB_ID=$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}

# Local rank 0 runs on cores 0-15, and the GPU beside these cores is number 3; rank 3 on 48-63, beside GPU 0. Reversed,
# the list gives every rank the near one. Only for a whole node: of a part of one, Slurm shows no number 3.
# https://github.com/NERSC/sc25-dl-tutorial/blob/8c6ccde/submit_pm_dp.sh
if [[ ${CUDA_VISIBLE_DEVICES:-} == 0,1,2,3 ]]; then
    export CUDA_VISIBLE_DEVICES=3,2,1,0
fi

# On one node NCCL needs no network; with a name here it would use one, and be slower.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/ccl_env.sh
[[ ${SLURM_STEP_NUM_NODES:-1} != 1 ]] || unset NCCL_NET

# Compiled kernels: on the node, by job; nobody deletes them. Their defaults, ~/.nv (unverified), /tmp/torchinductor_USER and
# ~/.triton, are shared by all ranks or all jobs. https://docs.nvidia.com/cuda/cuda-c-programming-guide/
# https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html
cache=/tmp/ddp-$UID-$SLURM_JOB_ID
export CUDA_CACHE_PATH=$cache/cuda
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor
export TRITON_CACHE_DIR=$cache/triton
# Code is loaded from there: it is this user's alone, and not what somebody made before.
if ! mkdir -m 700 "$cache" 2>/dev/null && [[ $(stat -c '%u %a %F' "$cache") != "$UID 700 directory" ]]; then
    echo "error: $cache on $HOSTNAME is not this user's alone (mode 700): remove it, or submit a new job" >&2
    return 3
fi

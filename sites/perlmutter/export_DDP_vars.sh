#!/bin/bash
# What torch.distributed and train.py want to know of this rank, from what srun tells it. Every rank sources it before it
# becomes train.py:
#
#   srun ... bash -c 'source ./export_DDP_vars.sh && exec "$@"' rank python train.py
#
# Not the batch script: there SLURM_PROCID is 0 for all, and srun sets CUDA_VISIBLE_DEVICES anew in every rank.

if [[ -z ${SLURM_STEP_NUM_TASKS:-} ]]; then
    echo "error: SLURM_STEP_NUM_TASKS is not set: export_DDP_vars.sh is for the ranks that srun starts" >&2
    return 3
fi
set -euo pipefail

# ---- who this process is ----------------------------------------------------------------------------------------

# 0 to WORLD_SIZE-1, over the whole step. The four names are torchrun's, so that train.py reads both alike.
# https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
export RANK=$SLURM_PROCID

# The ranks of this step. SLURM_NTASKS is the job's, and a step may have fewer: the others would be waited for.
# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS

# This rank's place on its node, from 0. It chooses the GPU.
# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
export LOCAL_RANK=$SLURM_LOCALID

# This node's place among the nodes, from 0: a lost node is named by it.
# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
export GROUP_RANK=$SLURM_NODEID

# Slurm writes the ranks of each node as "4(x2),3" for 4, 4 and 3.
IFS=, read -r -a groups <<<"$SLURM_STEP_TASKS_PER_NODE"
tasks=()
for group in "${groups[@]}"; do
    repeat=1
    [[ $group != *x* ]] || repeat=${group//*x/} repeat=${repeat%)}
    for ((; repeat > 0; repeat--)); do tasks+=("${group%%(*}"); done
done
# The ranks on this node.
# https://slurm.schedmd.com/srun.html#OPT_SLURM_STEP_TASKS_PER_NODE
export LOCAL_WORLD_SIZE=${tasks[SLURM_NODEID]}

# Another job, another step or another start of this job has another one: ranks notice that they met somebody else's.
# https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
export DDP_JOB_ID=$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}

# ---- which GPU ---------------------------------------------------------------------------------------------------

# Local rank 0 runs on cores 0-15, and the GPU beside these cores is number 3; rank 3 on 48-63, beside GPU 0. Reversed,
# the list gives every rank the near one. Only for a whole node: of a part of one, Slurm shows no number 3.
# https://github.com/NERSC/sc25-dl-tutorial/blob/6f7a074964e8015e371bc4aefa80d1f1de7e4d3b/submit_pm_dp.sh
if [[ ${CUDA_VISIBLE_DEVICES:-} == 0,1,2,3 ]]; then
    export CUDA_VISIBLE_DEVICES=3,2,1,0
fi

# ---- what compilers keep: on the node, by job, made by whichever rank comes first and deleted by none ---------------

caches=/tmp/ddp-$SLURM_JOB_ID
mkdir -p "$caches"

# Kernels that the driver compiles. By default they go to ~/.nv (unverified), where all ranks of a job would write at once.
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/
export CUDA_CACHE_PATH=$caches/cuda

# --compile: what torch.compile has made. Its default, /tmp/torchinductor_USER, is shared by all jobs on a node.
# https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor

# --compile: Triton's kernels. By default they go to ~/.triton.
# https://github.com/deepspeedai/DeepSpeed/pull/7907
export TRITON_CACHE_DIR=$caches/triton

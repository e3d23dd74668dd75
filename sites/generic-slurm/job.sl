#!/bin/bash -l
# generic-slurm: trains on the GPUs of any Slurm cluster, one rank on each GPU.
#
#   sbatch job.sl [flags of train.py]          submit, from this directory
#   sbatch job.sl --run-dir runs/JOB [flags]   resume what job JOB left
#   scancel --signal=USR1 JOB                  save now, stop, and go back into the queue
#   sbatch --nodes=1 job.sl install [flags]    run ./install.sh on a node of the kind that will train
#
# -l above: a login shell has the module command and Slurm's own, however the job was submitted.

# ---- this cluster: the lines to edit ----------------------------------------------------------------------------

# EDIT: the account that pays; delete the line where the cluster has none. sbatch --help
#SBATCH --account=my_account

# EDIT: a partition whose nodes have GPUs (sinfo --format="%P %G %c %m %f": GPUs, cores, memory, features). sbatch --help
#SBATCH --partition=gpu

# EDIT: a feature that chooses one kind of node; delete the line where the partition's nodes are all alike.
# https://slurm.schedmd.com/sbatch.html#OPT_constraint
#SBATCH --constraint=my_feature

# EDIT: nodes; ranks = nodes x ntasks-per-node must divide the global batch (96 unless a flag or the workload says
# otherwise). sbatch --help
#SBATCH --nodes=2

# EDIT: GPUs of a node. Per node, not per task: each rank sees all of them and takes its own, because GPUs that are
# hidden from each other have kept NCCL from copying directly between them. https://github.com/NVIDIA/nccl/issues/1066
#SBATCH --gpus-per-node=4

# EDIT: ranks on a node, one for each of its GPUs. sbatch --help
#SBATCH --ntasks-per-node=4

# EDIT: cores a rank, at most the cores of a node / ntasks-per-node. sbatch --help
#SBATCH --cpus-per-task=4

# EDIT: memory a node. A rank on a GPU holds a few GB of libraries before its first step (8 GB a rank: unverified).
#SBATCH --mem=32G

# EDIT: time limit of one start; a run that needs more of them is requeued and goes on. sbatch --help
#SBATCH --time=01:00:00

# ---- every cluster: directives that stay as they are -------------------------------------------------------------

# Names the log. sbatch --help
#SBATCH --job-name=train

# Beside this script: a job whose log directory does not exist dies without a word. sbatch --help
#SBATCH --output=%x-%j.out

# A requeued job writes to the same log; truncating it would erase what happened before. sbatch --help
#SBATCH --open-mode=append

# After a node failure or a preemption Slurm starts this script again, under the same job id. sbatch --help
#SBATCH --requeue

# USR1 to every rank 120 s before the time limit (Slurm may be 60 s early): they agree, save and exit with 75. "B:" would
# send it to this shell alone. https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

# ---- this cluster, again: choices, which stand here since no directive may follow a command ----------------------

# EDIT: the modules to train with, each with its version and all on this line: modules=(gcc/13.2 cuda/12.8 python/3.11).
# install.sh loads the same ones. Name Slurm's and Apptainer's too where they are modules. Empty: none.
modules=()

# EDIT: where PyTorch is: "venv" (of install.sh), or the image of install.sh --image: "apptainer --nv" with NVIDIA's GPUs,
# "apptainer --rocm" with AMD's. https://apptainer.org/docs/user/latest/gpu.html
software=venv

# EDIT: what starts the ranks: "srun", or one "torchrun" on each node. srun is a program less; torchrun has flags of its own, as
# --numa-binding, which belong into use_torchrun of common.sh.
launcher=srun

# EDIT: who sums the gradients: train.py (PyTorch), train_horovod.py or train_accelerate.py. README.md says what they need.
program=train.py

# EDIT: on a RoCE network (RDMA over Ethernet), the index of the nodes' RoCE v2 address, which show_gids lists; 3 on many.
# Empty is right on InfiniBand, and on most RoCE since NCCL 2.21, which looks for that index itself.
roce_gid_index=

# EDIT: the proxy through which nodes reach PyPI, for `job.sl install` alone: http://proxy.example.org:3128. Empty: none.
proxy=

# ---- every cluster: nothing to edit from here on ----------------------------------------------------------------

# sbatch has copied this script elsewhere, so the files beside it are found from the directory of submission.
[[ -f common.sh ]] || { echo "error: no common.sh in $PWD: submit from the site's folder, or with --chdir=DIR" >&2 && exit 3; }
# What surrounds the launch: prepare, use_torchrun, describe_job, finish.
# shellcheck source=common.sh
source ./common.sh

if [[ ${1:-} == install ]]; then
    # pip and Apptainer read these; no_proxy has the addresses that need no proxy.
    # https://pip.pypa.io/en/stable/user_guide/#using-a-proxy-server
    [[ -z $proxy ]] || export http_proxy=$proxy https_proxy=$proxy no_proxy=localhost,127.0.0.1
    exec bash -l ./install.sh "${@:2}"
fi
prepare

# Under sbatch --export=NONE srun would start the ranks without PATH and without the variables below.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# Packages in ~/.local would come before those of a module (its torch, too).
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
export PYTHONNOUSERSITE=1

# CPU threads of a rank: its own cores. Where Slurm does not bind tasks to cores, a rank sees those of all jobs on the node.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Rank 0 runs on the job's first node. The node list is compressed ("n[1-2]"), and scontrol expands it.
# https://slurm.schedmd.com/scontrol.html#OPT_hostnames
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}

# Rank 0's port, from the job id: two jobs on a node take the same one only if their ids differ by a multiple of 10000,
# and then the ranks notice. 20000-29999 is below the ports that Linux hands to outgoing connections, 32768-60999.
# https://docs.kernel.org/networking/ip-sysctl.html
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# Of this start's ranks alone: they sign with it what they tell each other while they meet. od --help
export DDP_SECRET
DDP_SECRET=$(od -An -N32 -tx8 /dev/urandom | tr -d ' \n')

# Which of an adapter's addresses NCCL uses.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-gid-index
[[ -z $roce_gid_index ]] || export NCCL_IB_GID_INDEX=$roce_gid_index

# What srun starts: the ranks, or a torchrun on each node that starts them.
tasks_per_node=$SLURM_NTASKS_PER_NODE cores=$SLURM_CPUS_PER_TASK
command=("${run_python[@]}" "$program")
[[ $launcher == srun ]] || use_torchrun

# What sbatch has taken along from a shell in another job: srun would bind by that job's mask, and refuse its words of memory
# beside this job's. The step has the memory of its job. https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}"
# And share out the GPUs of that one (salloc --gpus=8): of this job sbatch says --gpus-per-node alone.
unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_GPU_BIND SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU

srun_flags=(
    # The ranks of a node, or its torchrun. srun --help
    --ntasks-per-node="$tasks_per_node"

    # On all nodes: by itself srun starts as many as the job has ranks. srun --help
    --ntasks="$((SLURM_JOB_NUM_NODES * tasks_per_node))"

    # srun of Slurm 22.05 and 23.02 does not take it from the job, and each rank would get one core.
    # https://github.com/SchedMD/slurm/blob/slurm-22-05-0-1/RELEASE_NOTES
    --cpus-per-task="$cores"

    # A rank that died alone ends the job, instead of the time limit.
    # https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1

    # Ranks that are left 60 s after the first one ended well hang: end them. srun --help
    --wait=60
)

train_flags=(
    # Named, not found: a node without a working GPU is an error, never a slow run on its CPU. "cuda" is AMD's too.
    # python train.py --help
    --device cuda

    # The seconds of --signal above: saves that are too slow for it are noted in time. python train.py --help
    --grace 120

    # A requeued job keeps its id, and so finds its run again. A first start refuses an older run; --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

describe_job
code=0
# What the user passed comes last: of a flag given twice, the last one counts.
srun "${srun_flags[@]}" "${command[@]}" "${train_flags[@]}" "$@" || code=$?
finish "$code" "$@"

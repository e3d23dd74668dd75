#!/bin/bash -l
# generic-slurm: as job.sl, but the ranks run train_accelerate.py: Hugging Face's Accelerate, which
# `.venv/bin/pip install accelerate==1.15.0` installs.
#
#   sbatch job-accelerate.sl [flags of train.py]          submit, from this directory
#   sbatch job-accelerate.sl --run-dir runs/JOB [flags]   resume what job JOB left, whichever script it was submitted with
#   scancel --signal=USR1 JOB                             save now, stop, and go back into the queue
#
# -l above: a login shell has the module command and Slurm's own, however the job was submitted.

# ---- this cluster: the lines to edit ----------------------------------------------------------------------------

# EDIT: the account that pays; delete the line where the cluster has none.
# https://slurm.schedmd.com/sbatch.html#OPT_account
#SBATCH --account=my_account

# EDIT: a partition whose nodes have GPUs (sinfo --format="%P %G %c %m" lists partitions, GPUs, cores and memory).
# https://slurm.schedmd.com/sbatch.html#OPT_partition
#SBATCH --partition=gpu

# EDIT: nodes; ranks = nodes x ntasks-per-node must divide the global batch (96 unless a flag says otherwise).
# https://slurm.schedmd.com/sbatch.html#OPT_nodes
#SBATCH --nodes=2

# EDIT: GPUs of a node. Per node, not per task: each rank sees all of them and takes its own, because GPUs that are
# hidden from each other have kept NCCL from copying directly between them. https://github.com/NVIDIA/nccl/issues/1066
# https://slurm.schedmd.com/sbatch.html#OPT_gpus-per-node
#SBATCH --gpus-per-node=4

# EDIT: ranks on a node, one for each of its GPUs.
# https://slurm.schedmd.com/sbatch.html#OPT_ntasks-per-node
#SBATCH --ntasks-per-node=4

# EDIT: cores a rank, at most the cores of a node / ntasks-per-node.
# https://slurm.schedmd.com/sbatch.html#OPT_cpus-per-task
#SBATCH --cpus-per-task=4

# EDIT: memory a node. A rank on a GPU holds a few GB of libraries before its first step (8 GB a rank: unverified).
# https://slurm.schedmd.com/sbatch.html#OPT_mem
#SBATCH --mem=32G

# EDIT: time limit of one start; a run that needs more of them is requeued and goes on.
# https://slurm.schedmd.com/sbatch.html#OPT_time
#SBATCH --time=01:00:00

# ---- every cluster: directives that stay as they are -------------------------------------------------------------

# Names the log, below.
# https://slurm.schedmd.com/sbatch.html#OPT_job-name
#SBATCH --job-name=accelerate

# Beside this script: a job whose log directory does not exist dies without a word.
# https://slurm.schedmd.com/sbatch.html#OPT_output
#SBATCH --output=%x-%j.out

# A requeued job writes to the same log; truncating it would erase what happened before.
# https://slurm.schedmd.com/sbatch.html#OPT_open-mode
#SBATCH --open-mode=append

# After a node failure or a preemption Slurm starts this script again, under the same job id.
# https://slurm.schedmd.com/sbatch.html#OPT_requeue
#SBATCH --requeue

# USR1 to every rank 120 s before the time limit (Slurm may be 60 s early): they agree, save and exit with 75. Without
# "B:", which would send it to this shell, that has nothing to do but to wait for them.
# https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

# From here on all is job.sl's: its modules, variables, launch and requeue. What it reads as comments are its directives.
# In the image of image-build.sh there is no Accelerate: software=venv.
exec env DDP_PROGRAM=train_accelerate.py DDP_SCRIPT=job-accelerate.sl bash -l job.sl "$@"

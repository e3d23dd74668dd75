#!/bin/bash -l
# perlmutter: one rank per A100 of Perlmutter's GPU nodes, with NERSC's PyTorch module or in NERSC's container.
#
#   sbatch job.sl [flags of train.py]              submit, from this directory
#   sbatch job.sl --run-dir runs/JOB [flags]       resume what job JOB left
#   scancel --signal=USR1 JOB                      save now, stop, and go back into the queue
#   METRICS="tensorboard wandb" sbatch job.sl      write metrics beside the training (README.md)
#   sbatch --qos=shared --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 job.sl     a single GPU
#
# -l above: a login shell has the commands module and shifter, however the job was submitted.

# ---- your project: the lines to edit; a sixth, module or container, stands below the directives --------------------

# EDIT: the project that pays, as in Iris.
# https://docs.nersc.gov/jobs/policy/
#SBATCH --account=m1234

# EDIT: regular is for production; preempt is charged less and may be stopped for other jobs: the program comes back and goes
# on; shared is for 1 or 2 GPUs of a node. For a short test: sbatch --qos=debug job.sl. A debug job does not come back.
# https://docs.nersc.gov/jobs/policy/ https://docs.nersc.gov/jobs/examples/#preemptible-jobs
#SBATCH --qos=regular

# EDIT: nodes with GPUs; "gpu&hbm80g", in quotes, for GPUs of 80 GB instead of 40 (unverified: seen in public job scripts).
# https://docs.nersc.gov/jobs/policy/
#SBATCH --constraint=gpu

# EDIT: nodes; ranks = nodes x 4 must divide the global batch (96 unless a flag or the workload says otherwise). sbatch --help
#SBATCH --nodes=2

# EDIT: time limit of one start; a longer run is requeued and goes on. debug allows 30 minutes, regular and shared 2 days.
# https://github.com/doe-iri/iri-facility-api-python/issues/49
#SBATCH --time=00:30:00

# ---- Perlmutter: nothing to edit ------------------------------------------------------------------------------------

# One rank for each of a node's four A100.
# https://github.com/NERSC/sc25-dl-tutorial/blob/8c6ccde/submit_pm_dp.sh
#SBATCH --ntasks-per-node=4

# Per node, not per task: each rank sees all four GPUs and takes its own. GPUs that are hidden from each other have kept
# NCCL from copying directly between them. https://github.com/NVIDIA/nccl/issues/1066
#SBATCH --gpus-per-node=4

# A quarter of the node for each rank: its CPU has 64 cores, and Slurm counts the 2 hardware threads of each.
# https://github.com/NERSC/sc25-dl-tutorial/blob/8c6ccde/submit_pm_dp.sh
#SBATCH --cpus-per-task=32

# Names the log. sbatch --help
#SBATCH --job-name=train

# The log lies beside this script: a job whose log directory does not exist dies without a word. sbatch --help
#SBATCH --output=%x-%j.out

# A requeued job writes to the same log; truncating it would erase what happened before. sbatch --help
#SBATCH --open-mode=append

# After a node failure or a preemption Slurm starts this script again, under the same job id. sbatch --help
#SBATCH --requeue

# USR1 to every rank 120 s before the time limit (Slurm may be 60 s early): they agree, save and exit with 75. Without "B:",
# which would send it to this shell alone. https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

# sbatch has copied this script elsewhere, so the files beside it are found from the directory of submission.
[[ -f common.sh ]] || { echo "error: no common.sh in $PWD: submit from the site's directory" >&2 && exit 3; }

# What surrounds the launch: a description of the job, the fabric check, metrics, the way back into the queue.
# shellcheck source=common.sh
source ./common.sh

# ---- PyTorch ----------------------------------------------------------------------------------------------------------

# EDIT: module or container. After a change here or in the names below run ./install.sh again, which reads them.
pytorch=module

# These are of one way or the other, and not of the shell that submits.
unset modules image
case $pytorch in
module)
    # PyTorch 2.13 for CUDA 13; and NCCL's plugin for Slingshot, which the first does not bring (describe_job in common.sh).
    # The two were measured together. nccl/2.29.2-cu13 is there, too: for CUDA 13, untried with this PyTorch (lorrax).
    # https://github.com/saforem2/ezpz/blob/1dd97b7/docs/guides/perlmutter.md
    # No purge before them: NERSC's defaults, loaded at login, are part of what they expect (unverified).
    modules=(pytorch/2.13.0 nccl/2.24.3)
    set +u # module functions read unset variables
    module load "${modules[@]}" || fail "no such module (above): module avail pytorch nccl, then edit job.sl"
    set -u
    ;;
container)
    # NERSC's build of NVIDIA's container of January 2026, for CUDA 13. shifterimg images | grep pytorch lists others.
    # https://github.com/NERSC/slurm-ray-cluster/blob/1da281f/submit-ray-symmetric.sbatch_shifter
    image=nersc/pytorch:26.01.01

    container=(
        shifter

        # Named here, not in an #SBATCH line, so that the same words work by hand.
        # https://github.com/NERSC/shifter/blob/84b7d34/doc/command/shifter.rst
        --image="$image"

        # What the node adds to the image: the driver, and NCCL's plugin for Slingshot; nccl-plugin is the one for CUDA 12.
        # https://github.com/NERSC/slurm-ray-cluster/blob/1da281f/README.md
        --module="gpu,nccl-cu13-plugin"
    )
    ;;
*) fail "pytorch=$pytorch in job.sl, but should be module or container" ;;
esac

# ---- what the ranks find in their environment -----------------------------------------------------------------------

# Under sbatch --export=NONE srun would start the ranks without PATH and without the variables below.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# What `pip install --user` has left in ~/.local or beside the module would come before the module's packages (its torch, too).
# python --help
export PYTHONNOUSERSITE=1

# CPU threads of a rank: its cores, which Slurm counts twice. What was exported at submission stands.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((SLURM_CPUS_PER_TASK + 1) / 2))}

# HDF5 files on file systems without locks (unverified which): HDF5 would refuse to open them.
# https://github.com/NERSC/sc25-dl-tutorial/blob/8c6ccde/submit_pm_dp.sh
export HDF5_USE_FILE_LOCKING=FALSE

# How libfabric learns that memory it has registered was given back: the default monitor hangs under NCCL (unverified why).
# https://github.com/NERSC/sc25-dl-tutorial/blob/8c6ccde/submit_pm_dp.sh
export FI_MR_CACHE_MONITOR=userfaultfd

# Every message goes by rendezvous. By default small ones do not: they may pass through the host's memory, and NCCL's sends
# between nodes have deadlocked (lorrax). nccl/2.29.2-cu13 sets the first of the two itself. A value that is set already stands.
# https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/ccl_env.sh
export FI_CXI_RDZV_THRESHOLD=${FI_CXI_RDZV_THRESHOLD:-0}
export FI_CXI_RDZV_GET_MIN=${FI_CXI_RDZV_GET_MIN:-0}

# The modules set 1. With 1 a file of yours that imports mpi4py ends every rank: the module's mpi4py lacks Cray's library for
# GPUs (GTL). With 0 nothing is lost, since the core hands no tensor to MPI.
# https://github.com/saforem2/ezpz/blob/1dd97b7/docs/guides/perlmutter.md
export MPICH_GPU_SUPPORT_ENABLED=0

# ---- the launch -------------------------------------------------------------------------------------------------------

train_flags=(
    # Named, not found: a node without a working GPU is an error, never a slow run on its CPU. python train.py --help
    --device cuda

    # The seconds of --signal above: saves that are too slow for it are noted in time. python train.py --help
    --grace 120

    # A requeued job keeps its id, and so finds its run again. A first start refuses an older run; --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

# What sbatch has taken along from a shell in another job: srun would bind by that job's mask, and refuse its words of memory.
# https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}"
# And share out the GPUs of that one (salloc --gpus=8): of this job sbatch says --gpus-per-node alone.
unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_GPU_BIND SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU

srun_flags=(
    # srun of Slurm 22.05 and 23.02 does not take it from the job, and a rank would not be held to its quarter of the node.
    # https://github.com/SchedMD/slurm/blob/slurm-22-05-0-1/RELEASE_NOTES
    --cpus-per-task="$SLURM_CPUS_PER_TASK"

    # Each rank stays on its own cores, the first on 0-15: the order of the GPUs in export_DDP_vars.sh counts on it. srun --help
    --cpu-bind=cores

    # A rank that died alone ends the job; the others would wait for it until the time limit. srun --help
    --kill-on-bad-exit=1

    # Ranks that are left 60 s after the first one ended, well or not, hang: end them. srun --help
    --wait=60
)

describe_job "$pytorch${image:+ image=$image}${modules[*]:+ modules=${modules[*]}}"
start_metrics "${train_flags[@]}" "$@"

code=0
# What the user passed comes last: of a flag given twice, the last one counts.
# shellcheck disable=SC2016 # "$@" is for the shell of the rank
srun "${srun_flags[@]}" "${container[@]}" bash -c 'source ./export_DDP_vars.sh && exec "$@"' rank \
    "$python" train.py "${train_flags[@]}" "$@" || code=$?
finish "$code" "$@"

#!/bin/bash -l
# lumi: one rank per GCD of LUMI-G nodes, each in a container that srun starts.
#
#   sbatch job.sl [flags of train.py]          submit, from this directory
#   sbatch job.sl --run-dir runs/JOB [flags]   resume what job JOB left
#   scancel --signal=USR1 JOB                  save now, stop, and go back into the queue
#   LAUNCHER=torchrun sbatch job.sl [flags]    a torchrun on each node starts its ranks
#   RCCL_DEBUG=yes sbatch job.sl [flags]       a file for each rank says which network RCCL uses
#
# -l above: a login shell has the module command, however the job was submitted.

# ---- the lines to edit; the image is in common.sh ---------------------------------------------------------------

# EDIT: the project that pays (lumi-workspaces lists yours).
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/batch-job/
#SBATCH --account=project_465xxxxxx

# EDIT: nodes. There are 8 ranks on each; all ranks together must divide the global batch (96 by default). sbatch --help
#SBATCH --nodes=2

# EDIT: time limit of one start, at most 2 days: a longer run is requeued and resumes.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/partitions/
#SBATCH --time=01:00:00

# EDIT: standard-g, up to 1024 nodes; dev-g for short tests (scontrol show partition dev-g): there no job requeues itself.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/partitions/
#SBATCH --partition=standard-g

# ---- LUMI-G: nothing to edit from here on -----------------------------------------------------------------------

# Whole nodes in every partition: cores are bound to GPUs by their numbers.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/lumig-job/
#SBATCH --exclusive
# A GCD, half an MI250X card, is a GPU to Slurm and PyTorch. Each rank sees all eight and uses that of its local rank.
# https://docs.lumi-supercomputer.eu/hardware/lumig/
#SBATCH --gpus-per-node=8
# One rank for each GCD, on seven cores: a chiplet has eight, and the system keeps the first.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/
#SBATCH --ntasks-per-node=8
# As above. sbatch --help
#SBATCH --cpus-per-task=7
# A GPU's share of the 480 GiB that jobs get on a node. Files in /tmp count, too.
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/05-multi-gpu-and-node/run_ddp_srun_4.sh
#SBATCH --mem-per-gpu=60G
# Names the log. sbatch --help
#SBATCH --job-name=train
# The log, beside this script. sbatch --help
#SBATCH --output=%x-%j.out
# A requeued job keeps its log. sbatch --help
#SBATCH --open-mode=append
# After a node failure Slurm starts this script again, under the same job id. sbatch --help
#SBATCH --requeue
# USR1 to every rank, 120 to 180 s before the time limit: they save and exit with 75. sbatch --help
#SBATCH --signal=USR1@120

set -euo pipefail

# Slurm runs a copy of this script: the files beside it are found from the directory of submission.
[[ -f common.sh ]] || { echo "error: no common.sh in $PWD: submit from the site's directory, or pass --chdir" >&2 && exit 3; }
# The image; the modules Local-LAIF and lumi-aif-singularity-bindings; the caches; the functions below.
# shellcheck source=common.sh
source ./common.sh

# The ranks get this shell's variables also under sbatch --export=NONE. sbatch --help
export SLURM_EXPORT_ENV=ALL
# CPU threads of a rank: its own cores.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# How libfabric notices that registered memory was freed: with its default, jobs of several nodes hung.
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/118
export FI_MR_CACHE_MONITOR=userfaultfd
# The interface of gloo, which ranks use for what does not lie in a GPU's memory (unverified on LUMI).
# https://docs.pytorch.org/docs/stable/distributed.html
export GLOO_SOCKET_IFNAME=hsn0
# Older documents set it. In these images jobs of several nodes hung with it.
# https://github.com/lumi-ai-factory/laifs-container-recipes/issues/30
unset NCCL_NET_GDR_LEVEL
if ((SLURM_JOB_NUM_NODES > 1)); then
    # A name of the image's network plugin: RCCL ends the job if the plugin does not start. Without this line RCCL goes over TCP
    # and says nothing. One node needs no network; with a name RCCL would use it there, too.
    # https://github.com/HewlettPackard/shs-ccl-docs/blob/438fcce/ccl_env.sh
    # https://github.com/aws/aws-ofi-nccl/blob/2daf7d3/src/nccl_ofi_interface_nvidia.cpp
    export NCCL_NET=OFI
else
    unset NCCL_NET # of your shell
fi

# A rank's cores: GCD 0 hangs at chiplet (CCD) 6, GCD 1 at 7, and so on. CCD c has cores 8c to 8c+7, and 0xfe stands for the
# upper seven of eight: GCD 0 has the mask 0xfe000000000000, cores 49-55.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/#gpu-binding
masks=''
for ccd in 6 7 2 3 0 1 4 5; do
    masks+=$(printf ',0x%x' $((0xfe << 8 * ccd)))
done
start=(bash rank.sh "$python") # says which rank it is, and becomes train.py
tasks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
if [[ ${LAUNCHER:-srun} == torchrun ]]; then
    # One task a node, on the cores of all GCDs: torchrun starts the ranks and divides the cores.
    masks=,0xfefefefefefefefe tasks=$SLURM_JOB_NUM_NODES
    start=("$python" torchrun.py "$SLURM_NTASKS_PER_NODE")
fi
# The masks replace srun's --cpus-per-task, which it would read here. That implies --exact: where Slurm counts two threads a
# core, the step gets half of the cores, and the masks are refused. (LUMI's guide keeps both.)
# https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
# What sbatch has taken along from a shell in another job: srun would bind by that job's mask, and refuse its words of memory
# beside this job's.
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}"
# And share out the GPUs of that one (salloc --gpus=8): of this job sbatch says --gpus-per-node alone.
unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_GPU_BIND SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU

srun_flags=(
    # As above. srun --help
    --ntasks="$tasks"
    # Cores of each rank, as above. srun --help
    --cpu-bind=mask_cpu:"${masks#,}"
    # A rank that dies alone ends the job at once. srun --help
    --kill-on-bad-exit=1
    # Ranks that still run 60 s after the first one ended hang: end them. srun --help
    --wait=60
)
train_flags=(
    # Without a working GPU this is an error, never a slow run on the CPU. "cuda" is AMD's too. python train.py --help
    --device cuda
    # The seconds of --signal above: saves that are too slow for it are noted in time. python train.py --help
    --grace 120
    # A requeued job keeps its id and finds its run. A run of another job there is refused. python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

describe_job
code=0
# Your own flags come last: of a flag given twice, the last one counts.
srun "${srun_flags[@]}" singularity exec "${singularity_flags[@]}" "$image" \
    "${start[@]}" train.py "${train_flags[@]}" "$@" || code=$?
finish "$code" "$@"

#!/bin/bash -l
# lumi: one rank per GCD of LUMI-G nodes, each started by srun in a container of its own.
#
#   sbatch job.sl [flags of train.py]          submit, from this directory
#   sbatch job.sl --run-dir runs/JOB [flags]   resume what job JOB left
#   scancel --signal=USR1 JOB                  save now, stop, and go back into the queue
#   RCCL_DEBUG=yes sbatch job.sl [flags]       which network RCCL uses, in a file for each rank
#
# -l above: a login shell has the module command, however the job was submitted.

# ---- the lines to edit ------------------------------------------------------------------------------------------

# EDIT: the project that pays (lumi-workspaces lists yours).
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/batch-job/
#SBATCH --account=project_465xxxxxx

# EDIT: nodes; ranks = nodes x 8 must divide the global batch (96 unless a flag says otherwise).
# https://slurm.schedmd.com/sbatch.html#OPT_nodes
#SBATCH --nodes=2

# EDIT: time limit of one start, at most 2 days; a run that needs more of them is requeued and goes on.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/partitions/
#SBATCH --time=01:00:00

# EDIT: standard-g for whole nodes, up to 1024 of them; dev-g (3 hours) to try something.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/partitions/
#SBATCH --partition=standard-g

# ---- LUMI-G: nothing to edit from here on -----------------------------------------------------------------------

# Whole nodes in every partition: cores are bound to GPUs by their numbers. standard-g has no others.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/lumig-job/
#SBATCH --exclusive

# A node's four MI250X are eight GPUs, to Slurm and to PyTorch: one GCD each. Per node, not per task: each rank sees all
# eight and takes the one with its local rank.
# https://docs.lumi-supercomputer.eu/hardware/lumig/
#SBATCH --gpus-per-node=8

# Eight ranks, one for each GCD.
# https://slurm.schedmd.com/sbatch.html#OPT_ntasks-per-node
#SBATCH --ntasks-per-node=8

# Seven cores a rank: those of one chiplet, but for its first, which the system keeps.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/
#SBATCH --cpus-per-task=7

# A node's memory is 512 GiB, of which jobs get 480: a GPU's share.
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/05-multi-gpu-and-node/run_ddp_srun_4.sh
#SBATCH --mem-per-gpu=60G

# Names the log, below.
# https://slurm.schedmd.com/sbatch.html#OPT_job-name
#SBATCH --job-name=train

# Beside this script: a job whose log directory does not exist dies without a word.
# https://slurm.schedmd.com/sbatch.html#OPT_output
#SBATCH --output=%x-%j.out

# A requeued job writes to the same log; truncating it would erase what happened before.
# https://slurm.schedmd.com/sbatch.html#OPT_open-mode
#SBATCH --open-mode=append

# After a node failure Slurm starts this script again, under the same job id.
# https://slurm.schedmd.com/sbatch.html#OPT_requeue
#SBATCH --requeue

# USR1 to every rank 120 s before the time limit (Slurm may be 60 s early): they agree, save and exit with 75. Without
# "B:", which would send it to this shell, that has nothing to do but to wait for them.
# https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

# sbatch has copied this script elsewhere, so the files beside it are found from the directory of submission.
[[ -f common.sh ]] || { echo "error: no common.sh in $PWD: submit from the site's directory, or with --chdir=DIR" >&2 && exit 3; }

# The image, the module lumi-aif-singularity-bindings, the fabric's variables, the caches; and the functions below.
# shellcheck source=common.sh
source ./common.sh

# Under sbatch --export=NONE srun would start the ranks without PATH and without the variables below; the manual says so.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# CPU threads of a rank: its own cores.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# srun would take --cpus-per-task from these, except in Slurm 22.05 and 23.02. It implies --exact, which cuts the step to half
# of the cores where Slurm counts two threads a core, so that the masks below would be refused.
# https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK

# The chiplet (CCD) that GCD 0, 1, ... hangs at: rank and GCD have one number, so rank 0 belongs on CCD 6. CCD c has cores
# 8c to 8c+7; 0xfe are the upper seven of eight. Hence 0xfe000000000000 for GCD 0: cores 49-55.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/#gpu-binding
masks=''
for ccd in 6 7 2 3 0 1 4 5; do
    masks+=$(printf ',0x%x' $((0xfe << 8 * ccd)))
done

srun_flags=(
    # A rank's cores, as above, in place of --cpus-per-task.
    # https://slurm.schedmd.com/srun.html#OPT_cpu-bind
    --cpu-bind=mask_cpu:"${masks#,}"

    # A rank that died alone ends the job, instead of the time limit.
    # https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1

    # Ranks that are left 60 s after the first one ended, well or not, hang: end them.
    # https://slurm.schedmd.com/srun.html#OPT_wait
    --wait=60
)

train_flags=(
    # Named, not found: a node without a working GPU is an error, never a slow run on its CPU. "cuda" is AMD's too.
    # python train.py --help
    --device cuda

    # A requeued job keeps its id, and so finds its run again. A first start refuses an older run; --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

need_whole_nodes
describe_job "$SLURM_NTASKS_PER_NODE"

code=0
# What the user passed comes last: of a flag given twice, the last one counts.
# exec, not run: exactly this command, whatever start script the image has.
srun "${srun_flags[@]}" singularity exec "${singularity_flags[@]}" "$image" \
    bash rank.sh "$python" train.py "${train_flags[@]}" "$@" || code=$?
finish job.sl "$code" "$@"

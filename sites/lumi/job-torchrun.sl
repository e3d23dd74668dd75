#!/bin/bash -l
# lumi: one rank per GCD of LUMI-G nodes, started by a torchrun on each node, which srun starts in a container.
#
#   sbatch job-torchrun.sl [flags of train.py]          submit, from this directory
#   sbatch job-torchrun.sl --run-dir runs/JOB [flags]   resume what job JOB left
#   scancel --signal=USR1 JOB                           save now, stop, and go back into the queue
#   RCCL_DEBUG=yes sbatch job-torchrun.sl [flags]       which network RCCL uses, in a file for each rank
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

# One task a node: torchrun, which starts eight ranks.
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/a7e3387/05-multi-gpu-and-node/run_ddp_torchrun_4.sh
#SBATCH --ntasks-per-node=1

# All cores that jobs get: 64, less the first of each of the eight chiplets.
# https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/
#SBATCH --cpus-per-task=56

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

# USR1 to each torchrun.py 120 s before the time limit (Slurm may be 60 s early), which hands it to its ranks: they agree,
# save and exit with 75. Without "B:", which would send it to this shell, that has nothing to do but to wait for them.
# https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

# sbatch has copied this script elsewhere, so the files beside it are found from the directory of submission.
[[ -f common.sh ]] || { echo "error: no common.sh in $PWD: submit from the site's directory, or with --chdir=DIR" >&2 && exit 3; }

# The image, the module lumi-aif-singularity-bindings, the fabric's variables, the caches; and the functions below.
# shellcheck source=common.sh
source ./common.sh

# Under sbatch --export=NONE srun would start torchrun without PATH and without the variables below; the manual says so.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# Ranks on a node, one for each GCD.
ranks_per_node=8

# CPU threads of a rank: its own cores.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / ranks_per_node))

# srun would take --cpus-per-task from these, except in Slurm 22.05 and 23.02. It implies --exact, which cuts the step to half
# of the cores where Slurm counts two threads a core, so that the mask below would be refused.
# https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK

need_whole_nodes
describe_job "$ranks_per_node"

srun_flags=(
    # All the cores, which torchrun divides: of each of the eight chiplets the upper seven of eight. Without it srun would
    # bind the task, and all ranks with it, to one core.
    # https://slurm.schedmd.com/srun.html#OPT_cpu-bind
    --cpu-bind=mask_cpu:0xfefefefefefefefe

    # A node whose ranks failed ends the job, instead of the time limit.
    # https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1

    # Nodes that are left 60 s after the first one ended, well or not, hang: end them.
    # https://slurm.schedmd.com/srun.html#OPT_wait
    --wait=60
)

torchrun_flags=(
    # All of the job: fewer would start without the others. torchrun --help
    --nnodes="$SLURM_JOB_NUM_NODES"

    # Ranks on each. torchrun --help
    --nproc-per-node="$ranks_per_node"

    # Who calls itself so belongs together: this start of this job.
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    --rdzv-id="$SLURM_JOB_ID.$restarts"

    # The launchers meet at the first of them, without another service.
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    --rdzv-backend=c10d

    # Where they meet: at the first node.
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"

    # Each rank on cores of its own beside its GCD: the four NUMA nodes have two GCDs and 14 cores each, halved.
    # https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/100
    --numa-binding=exclusive

    # What it starts is the command below, not a Python file. torchrun --help
    --no-python
)

train_flags=(
    # Named, not found: a node without a working GPU is an error, never a slow run on its CPU. "cuda" is AMD's too.
    # python train.py --help
    --device cuda

    # A requeued job keeps its id, and so finds its run again. A first start refuses an older run; --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

rank=(
    # Ignored until train.py takes them: a signal that comes while Python starts would end it. torchrun sends TERM when another
    # rank has failed first, and the line that says what was wrong would be lost. env --help
    env --ignore-signal=TERM --ignore-signal=USR1
    "$python" train.py
)

code=0
# What the user passed comes last: of a flag given twice, the last one counts.
# exec, not run: exactly this command, whatever start script the image has.
srun "${srun_flags[@]}" singularity exec "${singularity_flags[@]}" "$image" \
    "$python" torchrun.py "${torchrun_flags[@]}" "${rank[@]}" "${train_flags[@]}" "$@" || code=$?
finish job-torchrun.sl "$code" "$@"

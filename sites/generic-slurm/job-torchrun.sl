#!/bin/bash -l
# generic-slurm: as job.sl, but srun starts one torchrun a node, and that the node's ranks.
#
#   sbatch job-torchrun.sl [flags of train.py]          submit, from this directory
#   sbatch job-torchrun.sl --run-dir runs/JOB [flags]   resume what job JOB left, whichever script it was submitted with
#   scancel --signal=USR1 JOB                           save now, stop, and go back into the queue
#
# For what needs torchrun, as --numa-binding; else job.sl, which has a launcher less. -l above: a login shell has the module
# command and Slurm's own, however the job was submitted.

# ---- this cluster: the lines to edit ----------------------------------------------------------------------------

# EDIT: the account that pays; delete the line where the cluster has none.
# https://slurm.schedmd.com/sbatch.html#OPT_account
#SBATCH --account=my_account

# EDIT: a partition whose nodes have GPUs (sinfo --format="%P %G %c %m" lists partitions, GPUs, cores and memory).
# https://slurm.schedmd.com/sbatch.html#OPT_partition
#SBATCH --partition=gpu

# EDIT: nodes; ranks = nodes x ranks_per_node must divide the global batch (96 unless a flag says otherwise).
# https://slurm.schedmd.com/sbatch.html#OPT_nodes
#SBATCH --nodes=2

# EDIT: GPUs of a node. Per node, not per task: each rank sees all of them and takes its own, because GPUs that are
# hidden from each other have kept NCCL from copying directly between them. https://github.com/NVIDIA/nccl/issues/1066
# https://slurm.schedmd.com/sbatch.html#OPT_gpus-per-node
#SBATCH --gpus-per-node=4

# One task a node, a torchrun. How many ranks it starts stands below: ranks_per_node.
# https://slurm.schedmd.com/sbatch.html#OPT_ntasks-per-node
#SBATCH --ntasks-per-node=1

# EDIT: cores of a node, for all its ranks together.
# https://slurm.schedmd.com/sbatch.html#OPT_cpus-per-task
#SBATCH --cpus-per-task=16

# EDIT: memory a node. A rank on a GPU holds a few GB of libraries before its first step (8 GB a rank: unverified).
# https://slurm.schedmd.com/sbatch.html#OPT_mem
#SBATCH --mem=32G

# EDIT: time limit of one start; a run that needs more of them is requeued and goes on.
# https://slurm.schedmd.com/sbatch.html#OPT_time
#SBATCH --time=01:00:00

# ---- every cluster: directives that stay as they are -------------------------------------------------------------

# Names the log, below.
# https://slurm.schedmd.com/sbatch.html#OPT_job-name
#SBATCH --job-name=train

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

# ---- this cluster, again: two values to edit, which stand here since no directive may follow a command -----------

# EDIT: ranks on a node, one for each of its GPUs.
ranks_per_node=4

# EDIT: on a RoCE network (RDMA over Ethernet), the row of the adapter's address table with the nodes' RoCE v2 address, which
# show_gids lists; 3 on many. Empty is right on InfiniBand, and since NCCL 2.21 on most RoCE too: it looks for that row itself.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-gid-index
roce_gid_index=

# ---- every cluster: nothing to edit from here on ----------------------------------------------------------------

fail() {
    echo "error: $1" >&2
    exit 3 # as train.py: nothing was started
}

# How often Slurm has started this job again; it is not set in the first start.
# https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
restarts=${SLURM_RESTART_COUNT:-0}
# It goes back into the queue at most so often: a job that can never end shall not come back for ever.
max_restarts=20

# sbatch has copied this script elsewhere, so the files beside it are found from the directory of submission.
[[ -f train.py ]] || fail "no train.py in $PWD: submit from the site's directory, or with sbatch --chdir=DIR"
venv=$PWD/.venv
[[ -e $venv/.install ]] || fail "no virtual environment at $venv: run ./install.sh first"

# The modules that were loaded when it was installed: another set can mean other libraries under the same Python.
if [[ -e $venv/modules ]]; then
    read -r -a modules <"$venv/modules"
    set +u # module functions read unset variables
    { module purge && module load "${modules[@]}"; } ||
        fail "module load ${modules[*]} failed (above): load what there is now and run ./install.sh again"
    set -u
fi

python=$venv/bin/python

# Under sbatch --export=NONE srun would start the ranks without PATH and without the variables below; the manual says so.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# Packages in ~/.local would come before the virtual environment's.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
export PYTHONNOUSERSITE=1

# CPU threads of a rank: its share of the cores. torchrun would set 1.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > ranks_per_node ? SLURM_CPUS_PER_TASK / ranks_per_node : 1))

# The torchruns meet on the job's first node. The node list is compressed ("n[1-2]"), and scontrol expands it.
# https://slurm.schedmd.com/scontrol.html#OPT_hostnames
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}

# The port where they meet, from the job id: 20000-29999 is below the ports that Linux hands to outgoing connections,
# 32768-60999. The ranks' own port is a free one, which torchrun tells them.
# https://docs.kernel.org/networking/ip-sysctl.html
port=$((20000 + SLURM_JOB_ID % 10000))

# Where one is given.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-gid-index
[[ -z $roce_gid_index ]] || export NCCL_IB_GID_INDEX=$roce_gid_index

train_flags=(
    # Named, not found: a node without a working GPU is an error, never a slow run on its CPU. "cuda" is AMD's too.
    # python train.py --help
    --device cuda

    # A requeued job keeps its id, and so finds its run again. A first start refuses an older run; --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

torchrun_flags=(
    # The ranks of the other nodes are started by the other torchruns.
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    --nnodes="$SLURM_JOB_NUM_NODES"
    # As above.
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    --nproc-per-node="$ranks_per_node"
    # The store of PyTorch itself, on the first node: nothing else has to run.
    # https://docs.pytorch.org/docs/stable/elastic/run.html#note-on-rendezvous-backend
    --rdzv-backend=c10d
    # The option is spelt rdzv. The torchrun whose host has this name serves.
    # https://docs.pytorch.org/docs/stable/elastic/run.html#note-on-rendezvous-backend
    --rdzv-endpoint="$head:$port"
    # Other jobs, and other starts of this one, do not join.
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    --rdzv-id="$SLURM_JOB_ID.$restarts"
    # A failed rank is Slurm's to start again: torchrun would do it within this time limit, and for every cause.
    # https://docs.pytorch.org/docs/stable/elastic/run.html
    --max-restarts=0
    # What it starts is the command below, not a Python file. torchrun --help
    --no-python
)

rank=(
    # Ignored until train.py takes it: torchrun sends TERM when another rank has failed first, and would end one that is still
    # starting before it has said what is wrong. env --help
    env --ignore-signal=TERM
    "$python" train.py
)

srun_flags=(
    # srun of Slurm 22.05 and 23.02 does not take it from the job, and all ranks of a node would share one core.
    # https://github.com/SchedMD/slurm/blob/slurm-22-05-0-1/RELEASE_NOTES
    --cpus-per-task="$SLURM_CPUS_PER_TASK"

    # A rank that died alone ends the job, instead of the time limit. Ranks that end together say why, and with which code,
    # before Slurm's SIGTERM matters to them (README.md has the figures).
    # https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1

    # Ranks that are left 60 s after the first one ended well hang: end them.
    # https://slurm.schedmd.com/srun.html#OPT_wait
    --wait=60
)

versions=$("$python" -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "ddp-core")))
' 2>&1) || fail "$venv is not whole (${versions##*$'\n'}): run ./install.sh again"
echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) $versions launcher=torchrun"
echo "nodes=$SLURM_JOB_NUM_NODES ranks=$((SLURM_JOB_NUM_NODES * ranks_per_node)) ranks_per_node=$ranks_per_node cores_per_rank=$OMP_NUM_THREADS gpus_per_node=${SLURM_GPUS_PER_NODE:-0}"
echo "hosts=${hosts//$'\n'/,} master=$head:$port"

code=0
# agent.py is torchrun, but for two things: USR1 does not end it, and the ranks' exit code becomes its own.
# What the user passed comes last: of a flag given twice, the last one counts.
srun "${srun_flags[@]}" "$python" agent.py "${torchrun_flags[@]}" "${rank[@]}" "${train_flags[@]}" "$@" || code=$?
((code == 75)) || exit "$code"

# 75: stopped early and saved, on all ranks. This shell has not seen the USR1; a SIGTERM, as from scancel, has ended it
# before it comes here, and "Incomplete" keeps even then a cancelled job from coming back.
# The command that resumes by hand. Without --fresh, which would put aside what this job has done.
resume="sbatch job-torchrun.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
resume=${resume/ --fresh / }
if ((restarts >= max_restarts)); then
    echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); to resume: $resume" >&2
else
    # Said before: the requeue ends this shell.
    echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
    scontrol requeue Incomplete "$SLURM_JOB_ID" || echo "error: Slurm did not requeue the job (above); to resume: $resume" >&2
fi
exit 75

#!/bin/bash -l
# frontier: one rank for each GCD, half of an MI250X and a GPU to PyTorch, on nodes of OLCF's Frontier, started by srun.
#
#   sbatch job.sl [flags of train.py]          submit, from this directory
#   sbatch job.sl --run-dir runs/JOB [flags]   resume what job JOB left
#   scancel --signal=USR1 JOB                  save now, stop, and go back into the queue
#
# -l above: a login shell has the module command, however the job was submitted.

# ---- your project: the lines to edit ----------------------------------------------------------------------------

# EDIT: the project that pays, three letters and three digits.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#common-slurm-options
#SBATCH --account=ABC123

# EDIT: nodes; 8 ranks each, and their number must divide the global batch (96 unless a flag says otherwise).
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#common-slurm-options
#SBATCH --nodes=2

# EDIT: time limit of one start, at most 2 h for 1 to 91 nodes, 6 h to 183, 12 h above; a run that needs more of them is
# requeued and goes on.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#job-priority-by-node-count
#SBATCH --time=00:30:00

# ---- the machine: nothing to edit from here on ------------------------------------------------------------------

# Production jobs. "extended" takes up to 64 nodes for 24 h; for a short test add --qos=debug to sbatch's line, one job at
# a time.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#batch-partition-queue-policy
#SBATCH --partition=batch

# One rank for each of a node's 8 GCDs.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#frontier-compute-nodes
#SBATCH --ntasks-per-node=8

# The cores of one L3 cache without its first, which the system keeps: 56 of 64 are left for 8 ranks.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#low-noise-mode-layout
#SBATCH --cpus-per-task=7

# What FI_CXI_RDZV_PROTO=alt_read needs, which the module rccl-net-plugin sets: with it RCCL is faster in large jobs, and
# MPI slower, which here only counts the ranks. The two belong together.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#alternative-rendezvous-protocol
#SBATCH --network=disable_rdzv_get

# The node's own disks, /mnt/bb/USER, for the packed environment (nodes.sh). Every node has them.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#nvme-usage
#SBATCH --constraint=nvme

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

fail() {
    echo "error: $1" >&2
    exit 3 # as train.py: nothing was started
}

# How often Slurm has started this job again; it is not set in the first start.
# https://slurm.schedmd.com/sbatch.html#OPT_SLURM_RESTART_COUNT
restarts=${SLURM_RESTART_COUNT:-0}
# It goes back into the queue at most so often: a job that can never end shall not come back for ever.
max_restarts=20

# ---- where everything is ----------------------------------------------------------------------------------------

# sbatch has copied this script elsewhere, so the files beside it are found from the directory of submission.
[[ -f train.py && -f nodes.sh ]] || fail "no train.py and nodes.sh in $PWD: submit from the site's directory, or with sbatch --chdir=DIR"
[[ -x env/bin/python ]] || fail "no environment at $PWD/env: run ./install.sh first"
# What ./install.sh --build-plugin has built, in place of the module.
built=env/aws-ofi-nccl/lib/libnccl-net.so

# install.sh has seen that these are there, and built mpi4py with them. "reset" begins where a login does, whatever was
# loaded when this was submitted.
set +u # module functions read unset variables
{
    module --quiet reset &&
        module load PrgEnv-gnu/8.7.0 &&
        module load cpe/26.03 &&
        module load miniforge3/23.11.0-0 &&
        module load rocm/7.1.1 &&
        { [[ -e $built ]] || module load rccl-net-plugin; } &&
        module load craype-accel-amd-gfx90a
} || fail "a module does not load (above), perhaps since Frontier's software changed: edit these lines here and in install.sh, and run ./install.sh"
set -u

# The libraries of cpe/26.03: it is not Frontier's default, and the system's own would be taken in their place.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#installing-pytorch
export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}

# Under sbatch --export=NONE srun would start the ranks without PATH and without the variables below; the manual says so.
# https://slurm.schedmd.com/sbatch.html#OPT_export
export SLURM_EXPORT_ENV=ALL

# Packages in ~/.local would come before the environment's.
# https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE
export PYTHONNOUSERSITE=1

# CPU threads of a rank: its own cores.
# https://docs.pytorch.org/docs/stable/threading_environment_variables.html
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# ---- caches, and what may be downloaded --------------------------------------------------------------------------

# MIOpen's databases, local to the node: in the home directory, on NFS, ranks meet disk I/O errors. By user and job, so that
# nobody meets another's; nodes.sh makes them on every node.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#multinode-scripts
caches=/tmp/$USER-$SLURM_JOB_ID
export MIOPEN_USER_DB_PATH=$caches/miopen
export MIOPEN_CUSTOM_CACHE_DIR=$caches/miopen

# What --compile writes, for the same reasons.
# https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor
export TRITON_CACHE_DIR=$caches/triton

# Data sets and models that a training of your own downloads: below this directory, since the home directory holds 50 GB.
# Orion deletes what was not used for 90 days.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#dataset-cache
export HF_HOME=${HF_HOME:-$PWD/cache/huggingface} TORCH_HOME=${TORCH_HOME:-$PWD/cache/torch}

# Compute nodes reach the internet through this proxy alone, and ddp_core does not need it. Without all_proxy=socks://,
# which OLCF lists, too: httpx, in Hugging Face's packages, refuses it before any request.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#proxy-settings
export http_proxy=http://proxy.ccs.ornl.gov:3128/
export https_proxy=http://proxy.ccs.ornl.gov:3128/

# Python reads neither OLCF's "*." nor its "/8": endings of names, and addresses as they are.
# https://docs.python.org/3/library/urllib.request.html
export no_proxy=localhost,127.0.0.1,.ccs.ornl.gov,.frontier.olcf.ornl.gov

# ---- the network: Slingshot, and never TCP in silence -------------------------------------------------------------

# Gloo, over which the ranks agree, opens its connections on the first Slingshot interface, as rank 0 does.
# https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
export GLOO_SOCKET_IFNAME=hsn0

plugin=none
if ((SLURM_JOB_NUM_NODES == 1)); then
    # On one node GCDs are reached without a network, and the plugin would not start: Slurm sets up none for such a job.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
    export NCCL_NET=Socket
else
    # The name by which the plugin announces itself: without it RCCL ends, where it would go over TCP and say nothing.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
    export NCCL_NET=OFI
    # shellcheck source=rccl-env.sh
    [[ ! -e $built ]] || source ./rccl-env.sh "$PWD/$built"
    # Whether it is there and loads, with all that it needs, is seen here and not an hour later in a log of RCCL's.
    plugin=$(env/bin/python -c '
import ctypes, os, sys
name = os.environ.get("NCCL_NET_PLUGIN", "")
names = [name, f"librccl-net-{name}.so", f"libnccl-net-{name}.so"] if name else ["librccl-net.so", "libnccl-net.so"]
errors = []
for name in names:
    try:
        ctypes.CDLL(name)
        sys.exit(print(name))
    except OSError as error:
        errors.append(str(error))
sys.exit("; ".join(errors))
' 2>&1) || fail "RCCL's network plugin does not load ($plugin): see module show rccl-net-plugin, or run ./install.sh --build-plugin; a single node (--nodes=1) needs none"
fi

# ---- the nodes --------------------------------------------------------------------------------------------------

# The environment, by its path; "conda activate" would add nothing that this program uses.
environment=$PWD/env
if [[ -e env/env.tar.gz ]]; then # ./install.sh --pack
    environment=/mnt/bb/$USER/env-$SLURM_JOB_ID
    [[ -d /mnt/bb/$USER ]] || fail "no /mnt/bb/$USER on $HOSTNAME for env/env.tar.gz: submit with --constraint=nvme, or remove that file"
    before=$SECONDS
    ./nodes.sh "$PWD/env/env.tar.gz" "$environment" || fail "a node did not get env/env.tar.gz (above): submit again, or remove that file to start from $PWD/env"
    broadcast=$((SECONDS - before))
else
    ./nodes.sh || fail "a node could not make its cache directories (above)"
fi
python=$environment/bin/python

# ---- the launch -------------------------------------------------------------------------------------------------

train_flags=(
    # Named, not found: a node without a working GPU is an error, never a slow run on its CPU. "cuda" is AMD's too.
    # python train.py --help
    --device cuda

    # A requeued job keeps its id, and so finds its run again. A first start refuses an older run; --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

srun_flags=(
    # All nodes of the job.
    # https://slurm.schedmd.com/srun.html#OPT_nodes
    --nodes="$SLURM_JOB_NUM_NODES"

    # All ranks: 8 on each.
    # https://slurm.schedmd.com/srun.html#OPT_ntasks
    --ntasks="$SLURM_NTASKS"

    # srun of Slurm 22.05 and 23.02 does not take it from the job, and each rank would get one core.
    # https://github.com/SchedMD/slurm/blob/slurm-22-05-0-1/RELEASE_NOTES
    --cpus-per-task="$SLURM_CPUS_PER_TASK"

    # A rank sees one GCD, and calls it device 0 whichever it is.
    # https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#gpu-mapping
    --gpus-per-task=1

    # The one that hangs on the L3 cache of the rank's cores: ranks 0 to 7 of a node get GCD 4, 5, 2, 3, 6, 7, 0, 1.
    # https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#gpu-mapping
    --gpu-bind=closest

    # A rank that died alone ends the job, in place of the time limit. Ranks that fail together have said so before.
    # https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1

    # Ranks that are left 60 s after the first one ended, well or not, hang: end them.
    # https://slurm.schedmd.com/srun.html#OPT_wait
    --wait=60
)

versions=$(env/bin/python -c '
from importlib.metadata import version
from platform import python_version
print(f"python={python_version()}", *(f"{name}={version(name)}" for name in ("torch", "mpi4py", "ddp-core")))
' 2>&1) || fail "$PWD/env is not whole (${versions##*$'\n'}): run ./install.sh again"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "job=$SLURM_JOB_ID restarts=$restarts slurm=$(srun --version) $versions"
echo "nodes=$SLURM_JOB_NUM_NODES ranks=$SLURM_NTASKS ranks_per_node=$SLURM_NTASKS_PER_NODE cores_per_rank=$SLURM_CPUS_PER_TASK gpus_per_node=$SLURM_NTASKS_PER_NODE"
echo "hosts=${hosts//$'\n'/,} master=${hosts%%$'\n'*}:free" # the port is chosen on rank 0, over MPI
echo "environment=$environment broadcast_seconds=${broadcast:-0} rccl_net=$NCCL_NET rccl_plugin=$plugin"

code=0
# What the user passed comes last: of a flag given twice, the last one counts.
srun "${srun_flags[@]}" "$python" train.py "${train_flags[@]}" "$@" || code=$?
((code == 75)) || exit "$code"

# 75: stopped early and saved, on all ranks. This shell has not seen the USR1; a SIGTERM, as from scancel, has ended it
# before it comes here, and "Incomplete" keeps even then a cancelled job from coming back.
# The command that resumes by hand. Without --fresh, which would put aside what this job has done.
resume="sbatch job.sl $(printf '%q ' --run-dir "runs/$SLURM_JOB_ID" "$@")"
resume=${resume/ --fresh / }
if ((restarts >= max_restarts)); then
    echo "error: stopped and saved, but this was restart $restarts of $max_restarts (max_restarts); to resume: $resume" >&2
else
    # Said before: the requeue ends this shell.
    echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue, and resumes when it starts"
    scontrol requeue Incomplete "$SLURM_JOB_ID" || echo "error: Slurm did not requeue the job (above); to resume: $resume" >&2
fi
exit 75

#!/bin/bash -l
# frontier: one rank for each GCD (half an MI250X, and one GPU to PyTorch) of OLCF's Frontier, started by srun.
#
#   sbatch job.sl [flags of train.py]          submit, from this directory
#   sbatch job.sl --run-dir runs/JOB [flags]   resume what job JOB left
#   scancel --signal=USR1 JOB                  save now, stop, and go back into the queue
#
# -l above: a login shell has the module command, however the job was submitted.

# ---- the lines to edit ------------------------------------------------------------------------------------------

# EDIT: the project that pays, three letters and three digits.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#common-slurm-options
#SBATCH --account=ABC123

# EDIT: nodes. Each has 8 ranks; all ranks must divide the global batch (96 unless a flag or the workload says otherwise).
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#common-slurm-options
#SBATCH --nodes=2

# EDIT: time limit of one start, at most 2 h for 1 to 91 nodes, 6 h to 183, 12 h above. A longer run is requeued and goes on.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#job-priority-by-node-count
#SBATCH --time=00:30:00

# ---- the machine: nothing to edit from here on ------------------------------------------------------------------

# Production jobs; --partition=extended takes up to 64 nodes for 24 h. For a short test: sbatch --qos=debug job.sl.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#batch-partition-queue-policy
#SBATCH --partition=batch

# One rank for each of a node's 8 GCDs.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#frontier-compute-nodes
#SBATCH --ntasks-per-node=8

# The 8 cores of one L3 cache, without the first, which the system keeps.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#low-noise-mode-layout
#SBATCH --cpus-per-task=7

# Goes with FI_CXI_RDZV_PROTO=alt_read, which the module rccl-net-plugin sets. Together they make RCCL faster in large jobs.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#alternative-rendezvous-protocol
#SBATCH --network=disable_rdzv_get

# The node's own disks, /mnt/bb/USER, for the packed environment. Every node has them.
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#nvme-usage
#SBATCH --constraint=nvme

# Names the log. sbatch --help
#SBATCH --job-name=train

# The log, beside this script: Slurm ends a job without a word when the log's directory does not exist. sbatch --help
#SBATCH --output=%x-%j.out

# A requeued job adds to its log. sbatch --help
#SBATCH --open-mode=append

# After a node failure Slurm starts this script again, under the same job id. sbatch --help
#SBATCH --requeue

# USR1 to every rank 120 s before the time limit (Slurm may be 60 s early): the ranks save and exit with 75. Not "B:USR1", which
# would signal this shell alone.
# https://slurm.schedmd.com/sbatch.html#OPT_signal
#SBATCH --signal=USR1@120

set -euo pipefail

# sbatch runs a copy of this script in another directory, so the files beside it are found from the directory of submission.
[[ -f common.sh ]] || { echo "error: no common.sh in $PWD: submit from this directory, or with --chdir=DIR" >&2 && exit 3; }

# What happens around the launch: load_modules, prepare_job, describe_job, finish.
# shellcheck source=common.sh
source ./common.sh

# In loading order. install.sh and plugin.sh read this line, too. After a change run ./install.sh again.
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#installing-pytorch
modules=(PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a)
load_modules "${modules[@]}"

# Sets caches, threads, the proxy; and environment: the directory env, or its copy on each node's NVMe if there is env.tar.gz
# (./install.sh --pack).
prepare_job
python=$environment/bin/python

# ---- the network: Slingshot, and never TCP in silence -----------------------------------------------------------

# Gloo, over which the ranks agree when to stop, uses the first Slingshot interface, as rank 0's address does.
# https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
export GLOO_SOCKET_IFNAME=hsn0

if ((SLURM_JOB_NUM_NODES == 1)); then
    # One node: GCDs need no network, and the plugin would not start, since Slurm configures none for such a job.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
    export NCCL_NET=Socket
else
    # RCCL ends the job when the plugin does not start. Without this line it goes over TCP and says nothing.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#manual-rccl-network-plugin-configuration-not-recommended
    export NCCL_NET=OFI

    # A plugin that ./plugin.sh has built, and the variables that the module sets otherwise.
    # shellcheck source=plugin.sh
    [[ ! -d $environment/aws-ofi-nccl ]] || source ./plugin.sh "$environment/aws-ofi-nccl/lib/librccl-net.so"

    # The plugin's file. By itself RCCL 2.27.7 of ROCm 7.1.1 opens libnccl-net.so only. The module has librccl-net.so (of
    # aws-ofi-nccl 1.19.2 for ROCm 7.1.1) and does not set this variable (public outputs of "module show", July 2026).
    # https://github.com/ROCm/rocm-systems/pull/4201
    export NCCL_NET_PLUGIN=${NCCL_NET_PLUGIN:-${OLCF_OFI_NCCL_ROOT:-}/lib/librccl-net.so}
    # Loaded once here: what is missing shows now, and not after the ranks have waited for each other.
    said=$("$python" -c 'import ctypes, os; ctypes.CDLL(os.environ["NCCL_NET_PLUGIN"])' 2>&1) ||
        fail "RCCL's network plugin does not load (${said##*$'\n'}): see module show rccl-net-plugin; --nodes=1 needs none"
fi

# ---- the launch -------------------------------------------------------------------------------------------------

srun_flags=(
    # As in OLCF's line; srun does not take it from the job.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#multinode-scripts
    --cpus-per-task="$SLURM_CPUS_PER_TASK"

    # A rank sees one GCD, and calls it device 0 whichever it is.
    # https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#gpu-mapping
    --gpus-per-task=1

    # The GCD on the L3 cache of the rank's cores: ranks 0 to 7 of a node get GCD 4, 5, 2, 3, 6, 7, 0, 1.
    # https://docs.olcf.ornl.gov/systems/frontier_user_guide.html#gpu-mapping
    --gpu-bind=closest

    # A rank that dies alone ends the job at once, and not at the time limit. srun --help
    --kill-on-bad-exit=1

    # Ranks that still run 60 s after the first one ended hang: end them. srun --help
    --wait=60
)

train_flags=(
    # Named, so that a node without a working GPU is an error. "cuda" is AMD's, too. python train.py --help
    --device cuda

    # The seconds of --signal above: saves that are too slow for it are noted in time. python train.py --help
    --grace 120

    # A requeued job keeps its id and finds its run again; a first start refuses an older run. --run-dir overrides this.
    # python train.py --help
    --new-run-dir "runs/$SLURM_JOB_ID"
)

describe_job

code=0
# The user's flags come last: of a flag given twice, the last one counts.
srun "${srun_flags[@]}" "$python" train.py "${train_flags[@]}" "$@" || code=$?
# 75 means stopped and saved: the job goes back into the queue. Any other code is the job's own.
finish "$code" "$@"

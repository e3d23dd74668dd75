#!/bin/bash
# Makes every node of the job ready, before the ranks start: cache directories, and the packed environment on its NVMe.
#
#   ./nodes.sh [PACKED ENVIRONMENT]   from job.sl: take the file PACKED to all nodes, and unpack it there as ENVIRONMENT
#   ./nodes.sh --here [ENVIRONMENT]   from the line above, once on each node

set -euo pipefail

if [[ ${1:-} == --here ]]; then
    # A directory that is there is left as it is: nothing of this job's is ever deleted while it is in use.
    mkdir -p "$MIOPEN_USER_DB_PATH" "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"
    [[ -n ${2:-} ]] || exit 0
    # What an interrupted start has left, on a node that this job has been given again.
    rm -rf "$2"
    mkdir "$2"
    # pigz unpacks with several cores; gzip where it is not installed.
    unpack=$(command -v pigz || command -v gzip)
    tar --use-compress-program="$unpack" -xf "$2.tar.gz" -C "$2"
    rm "$2.tar.gz"
    # Puts the new path in place of the old one into scripts that name it.
    # https://conda.github.io/conda-pack/#unpacking-the-environment
    exec "$2/bin/python" "$2/bin/conda-unpack"
fi

if [[ -n ${1:-} ]]; then
    sbcast_flags=(
        # With the times and modes of the file that is sent. sbcast --help
        --preserve
        # Over what an earlier start has left there. sbcast --help
        --force
    )
    # Its exit code counts: after a failure the nodes hold parts of files (set -e).
    # https://docs.olcf.ornl.gov/software/python/sbcast_conda.html
    sbcast "${sbcast_flags[@]}" "$1" "$2.tar.gz"
fi

srun_flags=(
    # One process on each node.
    # https://slurm.schedmd.com/srun.html#OPT_ntasks-per-node
    --ntasks-per-node=1
    # As many processes as nodes, and not as many as ranks, which srun would take from the job.
    # https://slurm.schedmd.com/srun.html#OPT_ntasks
    --ntasks="$SLURM_JOB_NUM_NODES"
    # All nodes of the job.
    # https://slurm.schedmd.com/srun.html#OPT_nodes
    --nodes="$SLURM_JOB_NUM_NODES"
    # All cores that the ranks will have, for unpacking.
    # https://slurm.schedmd.com/srun.html#OPT_cpus-per-task
    --cpus-per-task="$((SLURM_NTASKS_PER_NODE * SLURM_CPUS_PER_TASK))"
    # A node that cannot be made ready ends this on all others.
    # https://slurm.schedmd.com/srun.html#OPT_kill-on-bad-exit
    --kill-on-bad-exit=1
)
srun "${srun_flags[@]}" ./nodes.sh --here "${2:-}"

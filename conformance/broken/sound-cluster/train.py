"""sound-cluster: who this process is, from what srun exports, and job.sl.

sbatch job.sl --epochs 5
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("packages")))

from ddp_core import Rank, run


def rank(environ: Mapping[str, str]) -> Rank:
    """The Rank that srun and job.sl tell; outside a job, a world of one. Raises PreflightError that names the variable."""
    if "SLURM_PROCID" not in environ:
        return Rank.single()
    return Rank.read(
        environ,
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_NTASKS_PER_NODE",
        node_rank="SLURM_NODEID",
        master_addr="MASTER_ADDR",
        master_port="MASTER_PORT",
        job_id="JOB_START",
        restart="SLURM_RESTART_COUNT",  # from the second start on
    )


if __name__ == "__main__":
    raise SystemExit(run(rank))

"""generic-slurm: who this process is, from what srun or torchrun exports. All else is ddp_core's.

    sbatch job.sl --epochs 5                                                                          Slurm: srun starts ranks
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 train.py --epochs 5     one machine
    .venv/bin/python train.py --epochs 5                                                              one process

The same flags everywhere: python train.py --help.
"""

import re
from collections.abc import Mapping

from ddp_core import Rank, run
from ddp_core.errors import PreflightError


def rank(environ: Mapping[str, str]) -> Rank:
    """As this process's launcher has it; without a launcher, a world of one. PreflightError names a variable that is wrong."""
    if "TORCHELASTIC_RUN_ID" in environ:  # first, since torchrun in a Slurm job is the nearer of the two
        return of_torchrun(environ)
    if "SLURM_PROCID" in environ:
        return of_srun(environ)
    # A shell of salloc, or an MPI's own mpiexec (MPICH's, Open MPI's): worlds of one would look like success.
    for name in ("SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if (tasks := environ.get(name) or "1") != "1":
            start = "start job.sl, or torchrun as the first lines of train.py have it; or one process with env -u"
            raise PreflightError(f"{name}={tasks[:80]!r}, many tasks, but SLURM_PROCID is not set: {start} {name}")
    return Rank.single()


def of_torchrun(environ: Mapping[str, str]) -> Rank:
    """https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables"""
    # torchrun starts all ranks again when one fails: another start, another id.
    start = f"{environ['TORCHELASTIC_RUN_ID']}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Rank.read(
        {**environ, "TORCHELASTIC_RUN_ID": start},
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        master_addr="MASTER_ADDR",
        master_port="MASTER_PORT",
        job_id="TORCHELASTIC_RUN_ID",
        # Slurm sets its count from the second start of a job on; by itself torchrun starts ranks again that have failed.
        restart="SLURM_RESTART_COUNT" if "SLURM_RESTART_COUNT" in environ else "TORCHELASTIC_RESTART_COUNT",
        # Then MASTER_PORT is torchrun's own store, and rank 0 must not open another there.
        launcher_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def of_srun(environ: Mapping[str, str]) -> Rank:
    """https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES; MASTER_* are job.sl's.

    The step's variables, not the job's: a batch script without srun has PROCID 0 too, and would pass for a world of one.
    """
    # A job has many steps, and is started again when it is requeued. Slurm counts that from the second start on.
    start = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    # "4(x2)": 4 ranks on each of two nodes. "4,3" stays as it is, and is refused: job.sl has as many on every node.
    tasks = re.sub(r"^(\d+)\(x\d+\)$", r"\1", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Rank.read(
        {**environ, "SLURM_JOB_ID": ".".join(start), "SLURM_STEP_TASKS_PER_NODE": tasks},
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        node_rank="SLURM_NODEID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        master_addr="MASTER_ADDR",
        master_port="MASTER_PORT",
        job_id="SLURM_JOB_ID",
        restart="SLURM_RESTART_COUNT",
    )


if __name__ == "__main__":
    raise SystemExit(run(rank))

"""lumi: who this process is, from what rank.sh or torchrun exports in the container. All else is ddp_core's.

    sbatch job.sl --epochs 5                         srun starts every rank
    LAUNCHER=torchrun sbatch job.sl --epochs 5       srun starts a torchrun on each node, and that its ranks
    srun -n1 --gpus=1 ./python.sh train.py --epochs 5    one process

The same flags everywhere: ./python.sh train.py --help.
"""

from collections.abc import Mapping

from ddp_core import Rank, run
from ddp_core.errors import PreflightError


def rank(environ: Mapping[str, str]) -> Rank:
    """The Rank that the launcher describes; without a launcher, a world of one. PreflightError names a wrong variable."""
    environ = dict(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        # torchrun starts all ranks again when one fails: another start, another id.
        environ["RUN_ID"] = f"{environ['TORCHELASTIC_RUN_ID']}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    elif "RANK" not in environ:
        refuse_many(environ)
        return Rank.single()
    # https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    return Rank.read(
        environ,
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        master_addr="MASTER_ADDR",
        master_port="MASTER_PORT",
        job_id="RUN_ID",
        restart="SLURM_RESTART_COUNT",  # Slurm sets it from the second start of a job on
        # MASTER_PORT is then torchrun's own store, and rank 0 must not open another there.
        launcher_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def refuse_many(environ: Mapping[str, str]) -> None:
    """Sixteen worlds of one would look like success: srun without rank.sh, a batch script without srun, or mpiexec."""
    of_slurm = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"  # the step's, of a large job
    for name in (of_slurm, "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if (tasks := environ.get(name) or "1") != "1":
            start = f"start this by srun and rank.sh, or one process with env -u {name}"
            raise PreflightError(f"{name}={tasks[:80]!r}, many tasks, but RANK is not set: {start}")


if __name__ == "__main__":
    raise SystemExit(run(rank))

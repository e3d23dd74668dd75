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
    """Sixteen worlds of one would look like success: srun without rank.sh, or a batch script without srun."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    if tasks != "1":
        start = "start this by srun and rank.sh"
        if not environ.get("SLURM_STEP_NUM_TASKS"):
            start += ", or one process with SLURM_NTASKS=1"
        raise PreflightError(f"Slurm was asked for {tasks[:80]!r} tasks, but RANK is not set: {start}")


if __name__ == "__main__":
    raise SystemExit(run(rank))

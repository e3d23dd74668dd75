"""perlmutter: who this process is, from what export_DDP_vars.sh or torchrun exports. All else is ddp_core's.

    sbatch job.sl --epochs 5                 several GPUs and nodes
    .venv/bin/python train.py --epochs 5     one GPU: the same run as in notebook.ipynb
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 4 train.py --epochs 5     one node, by hand

The same flags everywhere: python train.py --help.
"""

from collections.abc import Mapping

from ddp_core import Rank, run
from ddp_core.errors import PreflightError


def rank(environ: Mapping[str, str]) -> Rank:
    """The Rank that this process is told; without a launcher, a world of one, which is what the notebook has.

    Raises PreflightError that names the variable and its value.
    """
    if not environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        # Of the step, of a job without srun, or mpiexec's. Worlds of one would look like success: eight, or one for all GPUs.
        of_slurm = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        for name in (of_slurm, "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
            if (tasks := environ.get(name) or "1") != "1":
                start = f"start this by srun and export_DDP_vars.sh, as job.sl does, or one process with env -u {name}"
                raise PreflightError(f"{name}={tasks[:80]!r}, many tasks, but RANK is not set: {start}")
        return Rank.single()
    job = {"job_id": "DDP_JOB_ID", "restart": "SLURM_RESTART_COUNT"}
    if "TORCHELASTIC_RUN_ID" in environ:
        # torchrun starts all ranks again when one fails: another start, another id.
        start = f"{environ['TORCHELASTIC_RUN_ID']}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        environ = {**environ, "TORCHELASTIC_RUN_ID": start}
        job = {"job_id": "TORCHELASTIC_RUN_ID", "restart": "TORCHELASTIC_RESTART_COUNT"}
    return Rank.read(
        environ,
        # Then MASTER_PORT is torchrun's own store, and rank 0 must not open another there.
        launcher_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        master_addr="MASTER_ADDR",
        master_port="MASTER_PORT",
        **job,
    )


if __name__ == "__main__":
    raise SystemExit(run(rank))

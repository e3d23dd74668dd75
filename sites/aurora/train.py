"""aurora: who this process is, from what PALS mpiexec and job.pbs export. All else is ddp_core's.

    qsub -v TRAIN_ARGS="--epochs 5" job.pbs    a job: mpiexec starts every rank
    .venv/bin/python train.py --epochs 5       one process, on the first tile that it can see

The same flags everywhere: python train.py --help. This site's device is --device xpu, and its backend xccl, both
built into PyTorch: no Intel extension and no oneCCL bindings are imported.
"""

from collections.abc import Mapping

from ddp_core import Rank, run


def rank(environ: Mapping[str, str]) -> Rank:
    """The Rank that PALS tells; without it, a world of one. Raises PreflightError that names the variable.

    PALS tells a rank its number, its place on the node, how many share the node, and the node's number; the names are in
    https://github.com/meta-pytorch/torchcomms/pull/79. It tells no world size and, with --pmi=pmix, PMI does not either:
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT, JOB_START and DDP_RESTART are job.pbs's. JOB_START is another one for each mpiexec of
    a job; DDP_RESTART counts the starts before this one, over all jobs of the run.
    """
    if "PALS_RANKID" not in environ:
        return Rank.single()
    return Rank.read(
        environ,
        rank="PALS_RANKID",
        world_size="WORLD_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_world_size="PALS_LOCAL_SIZE",
        node_rank="PALS_NODEID",
        master_addr="MASTER_ADDR",
        master_port="MASTER_PORT",
        job_id="JOB_START",
        restart="DDP_RESTART",
    )


if __name__ == "__main__":
    raise SystemExit(run(rank))

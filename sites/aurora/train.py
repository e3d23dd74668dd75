"""aurora: who this process is, from what PALS mpiexec and job.pbs export. All else is ddp_core's.

    qsub -v TRAIN_ARGS="--epochs 5" job.pbs    a job: mpiexec starts every rank
    .venv/bin/python train.py --epochs 5       one process, on the first tile that it can see

The same flags everywhere: python train.py --help. This site's device is --device xpu, and its backend xccl, both
built into PyTorch: no Intel extension and no oneCCL bindings are imported.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from ddp_core import Rank, run
from ddp_core.errors import PreflightError


def rank(environ: Mapping[str, str]) -> Rank:
    """The Rank that PALS tells; without it, a world of one. Raises PreflightError that names the variable.

    The names are in https://github.com/meta-pytorch/torchcomms/pull/79. PALS does not tell the world size: WORLD_SIZE and what
    stands below it are job.pbs's. JOB_START differs for each mpiexec of a job; DDP_RESTART counts the run's earlier starts.
    """
    if "PALS_RANKID" not in environ:
        # Without mpiexec in a job of several nodes: one process would look like success. The job's first node has the file.
        file = Path(environ.get("PBS_NODEFILE", ""))
        nodes = len({*file.read_text().split()}) if file.is_file() else 1
        if nodes > 1:
            start = "start ./job.pbs, or one process with env -u PBS_NODEFILE"
            raise PreflightError(f"PBS_NODEFILE has {nodes} nodes, but PALS_RANKID is not set: {start}")
        return Rank.single()
    if environ.get("CCL_ATL_TRANSPORT") == "mpi" and any(Path("/dev/dri").glob("renderD*")):
        start_mpi()
    return Rank.read(
        environ,
        rank="PALS_RANKID",
        local_rank="PALS_LOCAL_RANKID",
        local_world_size="PALS_LOCAL_SIZE",
        node_rank="PALS_NODEID",
        world_size="WORLD_SIZE",
        master_addr="MASTER_ADDR",
        master_port="MASTER_PORT",
        job_id="JOB_START",
        restart="DDP_RESTART",
    )


def start_mpi() -> None:
    """Start MPI, by which oneCCL sends data: since frameworks/2026.1.0 it may fail where nobody has started it before.

    Not on a node without a GPU, where the ranks use gloo. MPI is left open: oneCCL uses it to the end, and to close it would
    mean to wait for ranks that are lost (unverified: that PALS takes this for a normal end).
    https://docs.alcf.anl.gov/aurora/data-science/frameworks/frameworks/
    """
    cores = os.sched_getaffinity(0)
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI  # this import starts MPI; before torch, which core imports later, as in ALCF's examples
    except (ImportError, RuntimeError) as error:
        raise PreflightError(f"mpi4py does not load ({error}): load the modules that common.sh loads") from error
    if not MPI.Is_initialized():
        raise PreflightError("mpi4py was imported and MPI is not started: MPI4PY_RC_INITIALIZE must not be 0")
    os.sched_setaffinity(0, cores)  # MPICH has been seen to change it


if __name__ == "__main__":
    raise SystemExit(run(rank))

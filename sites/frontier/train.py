"""frontier: who this process is, agreed over MPI between the ranks that srun has started. ddp_core does the rest.

    sbatch job.sl --epochs 5            a job: srun starts one rank for each GCD
    env/bin/python train.py --epochs 5  one process, without a launcher

The same flags everywhere: env/bin/python train.py --help.
"""

import os
import random
import secrets
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress

from ddp_core import Rank, run
from ddp_core.errors import PreflightError


def rank(environ: Mapping[str, str]) -> Rank:
    """This process's Rank, from MPI; without srun a world of one. Collective: all ranks call it. Raises PreflightError."""
    if "TORCHELASTIC_RUN_ID" in environ:  # OLCF has measured 10 minutes in place of 10 seconds
        raise PreflightError("TORCHELASTIC_RUN_ID is set: torchrun puts all ranks on one core here: start this as job.sl does")
    if "SLURM_PROCID" not in environ:
        # A shell of salloc, or another MPI's mpiexec: one process for a job of many tasks would look like success.
        for name in ("SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
            if (tasks := environ.get(name) or "1") != "1":
                start = f"start job.sl, or one process with env -u {name}"
                raise PreflightError(f"{name}={tasks[:80]!r}, many tasks, but SLURM_PROCID is not set: {start}")
        return Rank.single()
    # Of the step, not of the job: a batch script that runs `python train.py` without srun has a PROCID, too.
    world_size = whole_number(environ, "SLURM_STEP_NUM_TASKS")
    # Slurm sets it from the second start of a job on.
    restart = whole_number(environ, "SLURM_RESTART_COUNT", unset="0")
    step = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}.{restart}"
    return from_mpi(world_size, restart, step)


def whole_number(environ: Mapping[str, str], variable: str, unset: str = "") -> int:
    text = environ.get(variable) or unset
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise PreflightError(f"{variable}={text[:80]!r}, but should be a whole number: start this by srun, as job.sl does")
    return int(text)


def from_mpi(world_size: int, restart: int, step: str) -> Rank:
    """world_size: the ranks that srun has started. step: the numbers of job and step, for people to read."""
    # Before torch, which core imports later: after it, Cray MPICH takes the ranks for badly bound, and aborts.
    # https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#mpich-mpi4py-errors
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise PreflightError(f"mpi4py does not load ({error}): load what job.sl loads, and run ./install.sh again") from error
    if is_ours := not MPI.Is_initialized():
        cores = os.sched_getaffinity(0)
        MPI.Init()
        os.sched_setaffinity(0, cores)  # MPICH can leave a rank on one of its seven cores
    world = MPI.COMM_WORLD
    if world.size != world_size:  # n worlds of one would train n times, and look like success
        said = f"SLURM_STEP_NUM_TASKS={world_size}, but MPI tells of a world of {world.size}: mpi4py was not built with this"
        raise PreflightError(f"{said} machine's MPI, or srun was given another --mpi: run ./install.sh into a new PREFIX")
    node = world.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks that can share memory with this one
    # MPI does not number the nodes: the lowest rank of each stands for it, and nodes are counted in that order.
    lowest_here = node.bcast(world.rank)
    lowest = sorted(set(world.allgather(lowest_here)))
    address, port, start, secret = world.bcast(meeting_point(step) if world.rank == 0 else None)
    me = dict(rank=world.rank, world_size=world.size, local_rank=node.rank, local_world_size=node.size)
    me |= dict(node_rank=lowest.index(lowest_here), master_addr=address, master_port=port, job_id=start, restart=restart)
    node.Free()
    if is_ours:  # left open, MPI would wait at the end for ranks that are lost
        MPI.Finalize()
    return Rank(**me, secret=secret, variables=dict(master_addr="hostname -i of rank 0"))


def meeting_point(step: str) -> tuple[str, int, str, str]:
    """The address of rank 0's first Slingshot interface, a free port there, a name that no other start has, and a secret."""
    host = socket.gethostname()
    with suppress(OSError):  # if the name has no address, core reports that on all ranks
        host = socket.gethostbyname(host)
    for port in random.sample(range(20000, 30000), 100):  # below the ports that Linux gives to outgoing connections
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            break
    return host, port, f"{step}.{uuid.uuid4().hex[:8]}", secrets.token_hex()


if __name__ == "__main__":
    raise SystemExit(run(rank))

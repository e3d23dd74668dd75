"""sound-mpi: a whole site for a machine that does not exist, whose launcher tells the ranks nothing: they ask MPI.

mpiexec -n 8 --ppn 4 python train.py --epochs 5
"""

import os
import random
import secrets
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress

from ddp_core import Rank, run


def rank(environ: Mapping[str, str]) -> Rank:
    """The Rank that MPI tells; without mpiexec MPI itself is a world of one. Collective: all ranks call it."""
    is_ours, cores = "mpi4py.MPI" not in sys.modules, os.sched_getaffinity(0)
    from mpi4py import MPI  # not at the top of the file: this import starts MPI

    os.sched_setaffinity(0, cores)  # some MPIs leave a rank on one core
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks that can share memory with this one
    local_rank, local_world_size = node.rank, node.size
    # MPI does not number the nodes: each is known by the lowest of its ranks, and counted in their order.
    lowest_here = node.bcast(world.rank)
    lowest = sorted(set(world.allgather(lowest_here)))
    node.Free()
    address, port, job_id, secret = world.bcast(meeting_point() if world.rank == 0 else None)
    me = Rank(
        rank=world.rank,
        world_size=world.size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=lowest.index(lowest_here),
        master_addr=address,
        master_port=port,
        job_id=job_id,
        secret=secret,
    )
    if is_ours:  # left open, MPI would wait at the end for ranks that are lost
        MPI.Finalize()
    return me


def meeting_point() -> tuple[str, int, str, str]:
    """Rank 0's address, a port that is free there now, a name that no other start has, and a secret."""
    for port in random.sample(range(20000, 30000), 100):  # below the ports that Linux gives to outgoing connections
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            break
    return socket.gethostname(), port, uuid.uuid4().hex, secrets.token_hex()


if __name__ == "__main__":
    raise SystemExit(run(rank))

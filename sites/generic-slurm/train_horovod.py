"""generic-slurm: train.py, but Horovod sums the gradients, over gloo or NCCL of its own.

    sbatch job.sl --epochs 5        with program=train_horovod.py in job.sl
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 train_horovod.py --epochs 5     one machine

It needs `./install.sh --horovod`. All flags and files are train.py's.
"""

import os
import threading

from ddp_core import run
from ddp_core.errors import PreflightError
from ddp_core.reduction import Flat
from torch.distributed import DistBackendError
from train import rank


class Horovod(Flat):
    """As --reduction flat, but Horovod sums the one tensor that holds all gradients."""

    def __init__(self, model, compiled, peers, unused_parameters):
        super().__init__(model, compiled, peers, unused_parameters)
        self.parts, self.gathered = None, []  # in which Flat gathers the ranks' gradients, to add them by itself
        try:
            import horovod.torch as hvd
            from horovod import __version__
        except ImportError as error:
            raise PreflightError(f"{error}: ./install.sh --horovod") from error
        if not self.flat.is_cpu and not hvd.nccl_built():
            raise PreflightError("this Horovod was built without NCCL: build it with HOROVOD_NCCL_HOME, or pass --device cpu")
        self.hvd, self.name = hvd, f"horovod {__version__}"
        if "HOROVOD_RANK" in os.environ:  # it exports no address at which the ranks of the core could meet
            raise PreflightError("HOROVOD_RANK is set: start this with srun or torchrun, not horovodrun")
        if peers.world_size > 1:
            export(peers)
            peers.wait()  # hvd.init() waits 30 s for the other ranks, and a slow file system can part them for longer
        hvd.init()
        if hvd.size() != peers.world_size:  # 16 worlds of one look like 16 successes
            raise PreflightError(f"Horovod has {hvd.size()} ranks, but should have {peers.world_size}")

    def _sum_over_ranks(self):
        try:
            # The sum: by default Horovod averages over the ranks, and the weight of a row would depend on the world size.
            self.hvd.allreduce_(self.flat, op=self.hvd.Sum, name="gradients")
        except RuntimeError as error:  # a rank was lost; the core knows PyTorch's word for it, not Horovod's
            raise DistBackendError(str(error)) from error

    def leave(self):
        self.hvd.shutdown()


def export(peers) -> None:
    """What horovodrun does by ssh, for ranks that srun or torchrun started: hvd.init() reads nothing else.

    Rank 0 serves the address book in which the ranks find each other. As horovod/runner/gloo_run.py of 0.28.1.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    me, port = rank(os.environ), 0
    if me.rank == 0:
        server = RendezvousHTTPServer(("", 0), RendezvousHandler, 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
    place = dict(RANK=me.rank, SIZE=me.world_size, LOCAL_RANK=me.local_rank, LOCAL_SIZE=me.local_world_size)
    place |= dict(HOSTNAME=f"node{me.node_rank}", CONTROLLER="gloo", CPU_OPERATIONS="gloo")
    place |= dict(GLOO_RENDEZVOUS_ADDR=me.master_addr, GLOO_RENDEZVOUS_PORT=peers.broadcast(port))
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # a lost rank is the core's to report, in one line
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in place.items()})


if __name__ == "__main__":
    raise SystemExit(run(rank, reduction=Horovod))

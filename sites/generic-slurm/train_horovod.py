"""generic-slurm: train.py with Horovod: gradients are summed by its optimizer, over gloo or NCCL of its own.

    sbatch job-horovod.sl --epochs 5
    .venv/bin/horovodrun -np 2 .venv/bin/python train_horovod.py --epochs 5     one machine, no scheduler

It needs `./install-horovod.sh`. variants.py has what this shares with Accelerate's variant.
"""

import os
import time
from collections.abc import Mapping
from http.client import HTTPConnection

from ddp_core import Rank
from ddp_core.errors import ExitCode, PreflightError, RendezvousError
from train import rank
from variants import Run, main, not_installed

try:
    import horovod.torch as hvd
    from horovod import __version__
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.threads import in_thread
except ModuleNotFoundError as error:
    main(rank, not_installed(error, "./install-horovod.sh"))


def rank_of(environ: Mapping[str, str]) -> Rank:
    """horovodrun's rank, else srun's."""
    if "HOROVOD_RANK" not in environ:
        return rank(environ)
    fields = ("rank", "local_rank", "size", "local_size", "cross_rank", "gloo_rendezvous_addr", "gloo_rendezvous_port")
    names = ("rank", "local_rank", "world_size", "local_world_size", "node_rank", "master_addr", "master_port")
    variables = dict(zip(names, (f"HOROVOD_{field.upper()}" for field in fields), strict=True))
    return Rank.read(environ, **variables, job_id="HOROVOD_GLOO_RENDEZVOUS_PORT")


def export(run: Run) -> None:
    """What horovodrun does on one machine and by ssh, for ranks that srun started: hvd.init() reads nothing else.

    Rank 0 serves the address book in which the ranks' gloo looks the others up. As horovod/runner/gloo_run.py of 0.28.1.
    """
    who, nodes = run.rank, run.rank.world_size // run.rank.local_world_size
    if who.world_size == 1 or "HOROVOD_RANK" in os.environ:
        return
    told = dict(RANK=who.rank, SIZE=who.world_size, LOCAL_RANK=who.local_rank, LOCAL_SIZE=who.local_world_size)
    told |= dict(CROSS_RANK=who.node_rank, CROSS_SIZE=nodes, HOSTNAME=f"node{who.node_rank}", CONTROLLER="gloo")
    told |= dict(CPU_OPERATIONS="gloo", GLOO_RENDEZVOUS_ADDR=who.master_addr, GLOO_RENDEZVOUS_PORT=who.master_port)
    told |= dict(GLOO_TIMEOUT_SECONDS=int(run.config.rendezvous_timeout))
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in told.items()})
    if who.rank == 0:
        hosts = ",".join(f"node{node}:{who.local_world_size}" for node in range(nodes))
        try:
            server = RendezvousHTTPServer(("", who.master_port), RendezvousHandler, 0)
        except OSError as error:
            raise RendezvousError(f"MASTER_PORT={who.master_port}: {error.strerror}: choose another") from error
        server.init(get_host_assignments(parse_hosts(hosts), who.world_size))
        server.cache["job"] = {"id": who.job_id.encode()}
        in_thread(server.serve_forever)
    wait(who, run.config.rendezvous_timeout)


def wait(who: Rank, seconds: float) -> None:
    """For rank 0's address book, of which hvd.init() asks three times and then aborts; and not another job's."""
    where, end = f"MASTER_ADDR={who.master_addr} MASTER_PORT={who.master_port}", time.monotonic() + seconds
    while True:
        try:
            connection = HTTPConnection(who.master_addr, who.master_port, timeout=seconds)
            connection.request("GET", "/job/id")
            theirs = connection.getresponse().read().decode()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise RendezvousError(f"{where}: rank 0 did not answer within {seconds:g} s ({error.strerror})") from error
            time.sleep(0.2)
    if theirs != who.job_id:
        raise RendezvousError(f"{where} belongs to job {theirs}, and this is job {who.job_id}: choose another MASTER_PORT")


def train(run: Run) -> ExitCode:
    export(run)
    hvd.init()
    if run.device.type != "cpu" and not hvd.nccl_built():
        raise PreflightError("this Horovod was built without NCCL: ./install-horovod.sh --nccl DIR, or pass --device cpu")
    # Before the snapshot is read: Horovod's is a new optimizer, without the momentum of the one that it is made from. The
    # sum, for by default it averages over the ranks, and the share of a rank's rows would depend on the world size.
    run.optimizer = hvd.DistributedOptimizer(run.optimizer, named_parameters=run.model.named_parameters(), op=hvd.Sum)
    # With a name: by default it is the object's type, and ranks that hold different ones wait for each other for ever.
    run.begin(f"horovod {__version__}", hvd.size(), lambda value: hvd.allgather_object(value, name="object"))
    # No hvd.broadcast_optimizer_state: where there is no state it takes a step to make one, which --weight-decay would make
    # another start. begin() has given all ranks the same parameters and momentum.

    while run.step < run.total_steps:
        inputs, targets = run.batch()
        run.optimizer.zero_grad()
        loss = run.objective.loss(run.model(inputs), targets)  # summed over the rows of this rank
        (loss * run.share).backward()
        run.optimizer.step()
        if not run.done(hvd.allreduce(run.told(loss), op=hvd.Sum, name="loss")):
            continue
        if run.step % run.steps_per_epoch == 0:
            run.end_epoch(hvd.allreduce(run.evaluate(), op=hvd.Sum, name="evaluation"))
        run.save()
        if run.stopping:
            break
    code = run.end()
    hvd.shutdown()
    return code


if __name__ == "__main__":
    raise SystemExit(main(rank_of, train))

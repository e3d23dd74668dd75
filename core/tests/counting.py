"""Counts the cost of the control plane in a rank. The kernel supplies the counts of files, connections and bytes.

train(..., ranks=world(64), faults={rank: call("counting", "count", folder / str(rank)) for rank in range(64)})
"""

import json
import os
import socket
import stat
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_core.reduction import Reduction

TCP_INFO = 11
SENT, RECEIVED = 200, 128  # offsets in struct tcp_info of tcpi_bytes_sent and tcpi_bytes_received


def count(file: Path, alone: bool = False) -> None:
    """Count in this process from now on; called before the program. alone: without gloo's connections for gradients."""
    from ddp_core import device, process_group, reconcile, rendezvous

    counts = dict(requests=0, connections=0, bytes=0, messages=0, content=0, files=0)
    of_control: set[int] = set()
    exchange = reconcile.Reconciliation.exchange

    class Counting(process_group.Control):
        def __init__(self, *arguments):
            before = connections()
            super().__init__(*arguments)
            of_control.update(connections() - before)
            counts.update(connections=len(of_control))

        def collect(self, values, merge):
            self.count(values)
            return super().collect(values, merge)

        def broadcast(self, tensor):
            self.count(tensor)
            super().broadcast(tensor)

        def count(self, tensor):
            counts.update(messages=counts["messages"] + 1, content=counts["content"] + tensor.nbytes)

    def exchanged(*arguments):
        try:
            return exchange(*arguments)
        finally:
            counts.update(bytes=moved(of_control), files=max(counts["files"], len(os.listdir("/proc/self/fd"))))
            file.write_text(json.dumps(counts))

    process_group.Control, reconcile.Reconciliation.exchange = Counting, exchanged
    for name in ("set", "read", "add", "check", "wait"):
        setattr(rendezvous.SignedStore, name, counted(getattr(rendezvous.SignedStore, name), counts))
    if alone:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

        device.BACKENDS["cpu"] = "fake"
        init = dist.init_process_group
        dist.init_process_group = lambda backend, device_id, **others: init(backend, **others)


def counted(method, counts: dict[str, int]):
    def act(store, key, *others):
        counts["requests"] += "".join(key).startswith("control/")
        return method(store, key, *others)

    return act


def connections() -> set[int]:
    """The file descriptors of this process that are TCP connections."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, not a socket, or a listening socket
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                        found.add(int(name))
    return found


def moved(files: set[int]) -> int:
    """Bytes sent and received over these connections, from the kernel's counters."""
    total = 0
    for number in files:
        with socket.socket(fileno=os.dup(number)) as one:
            facts = one.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
            total += sum(struct.unpack_from("Q", facts, place)[0] for place in (SENT, RECEIVED))
    return total


class OverTheTree(Reduction):
    """Gradients are summed over the control plane, because nothing else connects these ranks."""

    name = "over the tree"

    def sum_gradients(self) -> None:
        super().sum_gradients()
        flat = torch.cat([gradient.flatten() for gradient in self.gradients]).double()
        sums = self.peers.reduce(flat)[0].split([gradient.numel() for gradient in self.gradients])
        for gradient, total in zip(self.gradients, sums, strict=True):
            gradient.copy_(total.view(gradient.shape))


def main(world_size: int) -> None:
    """Needs about 24 MB of memory per rank."""
    import ranks

    ranks.SECONDS, ranks.FLAGS = 600.0, "--device cpu --rendezvous-timeout 500 --timeout 500"
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, f"counts-{rank}") for rank in range(world_size)]
        faults = {rank: ranks.call("counting", "count", file, True) for rank, file in enumerate(files)}
        flags = f"--epochs 1 --steps-per-epoch 6 --global-batch-size {world_size}"
        ranks.train(Path(name, "run"), flags, world_size, faults=faults, reduction="counting:OverTheTree", code=0)
        first, *others = [json.loads(file.read_text()) for file in files]
    for what in first:
        least, most = (end(one[what] for one in others) for end in (min, max))
        print(f"{what}: {first[what]} on rank 0, {least} to {most} on the others")


if __name__ == "__main__":
    main(int(sys.argv[1]))

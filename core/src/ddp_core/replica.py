"""The model as one rank holds it: parameters and gradients as two flat tensors, and the sum of gradients over ranks.

Every parameter is a view into `values` and its gradient a view into `grads`, so that zeroing, summing, checking and
updating are one operation each, whatever the number of layers.
"""

import os
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from ddp_core.config import TrainConfig
from ddp_core.process_group import Peers

# DDP's first bucket (torch.distributed). Gradients that fit in it leave DDP nothing to overlap: it, too, sends them
# after the last layer's backward. There one collective by hand does the same work without DDP's hooks.
FIRST_BUCKET = 1024 * 1024  # bytes


def tree_sum(parts: Sequence):
    """The sum of parts (tensors of one shape, or the rows of one) in an order that is a function of their number alone.

    While their number is even, the second half is added to the first; what is left is added up in order. So several ranks
    that each sum every world_size-th part, and then their sums, form the same brackets as one rank with all parts, if
    and only if each has a power of two of them: --reduction canonical.
    """
    while len(parts) % 2 == 0:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return sum(parts[1:], start=parts[0])


class Replica:
    """model: the bare module. forward: what the trainer calls (the module, compiled or wrapped in DDP)."""

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device, dtype: torch.dtype, peers: Peers):
        self.model = model.to(device, dtype)
        self.peers, self.world_size = peers, peers.rank.world_size
        parameters = dict(model.named_parameters())
        count = sum(parameter.numel() for parameter in parameters.values())
        self.values = torch.empty(count, device=device, dtype=dtype)
        self.grads = torch.zeros_like(self.values)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.channels_last = config.channels_last
        views, grads = self.views(self.values), self.views(self.grads)
        for name, parameter in parameters.items():
            views[name].copy_(parameter.data)
            parameter.data, parameter.grad = views[name], grads[name]

        small = count * dtype.itemsize <= FIRST_BUCKET
        self.reduction = ("flat" if small else "ddp") if config.reduction == "auto" else config.reduction
        self.forward = torch.compile(self.model) if config.compile else self.model
        if self.reduction == "ddp" and self.world_size > 1:
            from torch.nn.parallel import DistributedDataParallel

            self.forward = DistributedDataParallel(self.forward, process_group=peers.data)
        # Gather, then add: gloo is faster so with small tensors, and the order of additions is ours, as canonical needs it.
        small_world = device.type == "cpu" and self.world_size <= 8
        gathers = self.reduction == "canonical" or (self.reduction == "flat" and small_world)
        self.parts = torch.empty(self.world_size, count, device=device, dtype=dtype) if gathers else None
        self.gathered = list(self.parts.unbind()) if gathers else []
        self.aside: list[torch.Tensor] = []  # canonical: the gradients of this step's shards but the last

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A flat tensor of all parameters (or gradients, or momenta) as one view for each parameter's name."""
        views, start = {}, 0
        for name, shape in self.shapes.items():
            part = flat[start : start + shape.numel()]
            start += shape.numel()
            if self.channels_last and len(shape) == 4:
                out, into, height, width = shape
                views[name] = part.view(out, height, width, into).permute(0, 3, 1, 2)
            else:
                views[name] = part.view(shape)
        return views

    @contextmanager
    def more_to_come(self):
        """For all micro-batches of a step but the last: DDP would send the gradients of each; canonical keeps them apart."""
        with self.forward.no_sync() if hasattr(self.forward, "no_sync") else nullcontext():
            yield
        if self.reduction == "canonical":
            self.aside.append(self.grads.clone())
            self.grads.zero_()

    def sum_gradients(self) -> None:
        """Sum `grads` over the ranks, in place: the one collective of a step. Under DDP, backward has done it."""
        if self.aside:
            self.grads.copy_(tree_sum([*self.aside, self.grads]))
            self.aside.clear()
        if self.world_size == 1 or self.reduction == "ddp":
            return
        if self.parts is None:
            dist.all_reduce(self.grads, group=self.peers.data)
        else:
            work = dist.all_gather(self.gathered, self.grads, group=self.peers.data, async_op=True)
            while self.grads.is_cpu and not work.is_completed():
                os.sched_yield()  # not asleep: a core that has halted wakes later than gloo has gathered (half the time)
            work.wait()
            if self.reduction == "canonical":
                self.grads.copy_(tree_sum(self.parts))
            else:
                torch.sum(self.parts, 0, out=self.grads)

    def checksum(self) -> torch.Tensor:
        """[1] fp64: the parameters' bits, summed as integers modulo 2**52. Replicas that agree have equal ones."""
        bits = self.values.view(torch.int64 if self.values.dtype == torch.float64 else torch.int32)
        return (bits.sum(dtype=torch.int64) % 2**52).double().cpu().view(1)

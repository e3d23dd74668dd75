"""Sum the gradients of all ranks: --reduction ddp, flat or canonical, or a class given to run(rank, reduction=...).

A rank's loss is the sum over its rows, divided by the global batch size: gradients are summed over ranks, not averaged.
Every rank takes rank 0's buffers (BatchNorm's statistics) after every step, as under DistributedDataParallel.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_core.control import tree_sum
from ddp_core.errors import WorkloadError
from ddp_core.process_group import Peers
from ddp_core.state import Kept, local

MOST_TIMED = 2**24  # numbers; the time of a longer sum is extrapolated from these


class Reduction:
    """Base class; by itself it sums nothing. forward: the module that the training step calls."""

    name = "none"
    ranks_per_replica = 1  # ranks that together hold one parameter: ranks r and r + ranks_per_replica hold the same part of it
    needs_all = False  # every parameter must get a gradient on this rank: the trainer checks it before the sum over ranks
    overlaps = False  # gradients are summed while backward runs, so the time that the sums take cannot be measured

    def __init__(self, model: nn.Module, compiled: nn.Module, peers: Peers, unused_parameters: bool):
        self.model, self.peers, self.unused_parameters = model, peers, unused_parameters
        self.forward: Any = compiled
        self.world_size = peers.world_size
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = self.parameters[0].device
        self.changing: list[str] = []  # buffers that a training forward changes, as probe.py observed

    def weight(self, global_batch_size: int) -> float:
        """Factor for a rank's summed loss: then all ranks' gradients add up to those of the global batch's mean loss."""
        return 1 / global_batch_size

    @property
    def gradients(self) -> list[torch.Tensor]:
        """This rank's rows of the summed gradients, after sum_gradients(). One tensor may hold those of many parameters."""
        return [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Norm of this rank's gradients to the norm over all ranks: the same, unless ranks hold parts (sharding.py)."""
        return norm

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def warm_up(self, backward: Callable) -> None:
        """Called once before training. backward: a collective forward and backward pass on some rows."""

    def no_sync(self):
        """Context manager for every micro-batch of a step except the last."""
        return nullcontext()

    def sum_gradients(self) -> None:
        """Called after the last backward of a step. Collective."""
        if self.changing:
            self.peers.broadcast_tensors([self.model.get_buffer(name) for name in self.changing])

    def leave(self) -> None:
        """Called after training, before the ranks disconnect."""

    def seconds_of_a_sum(self, share: float = 1.0) -> float:
        """Collective. Seconds of one all_reduce by itself, over `share` times the number of trained parameters."""
        count = int(share * sum(p.numel() for p in self.parameters)) + 1
        numbers = torch.zeros(min(count, MOST_TIMED), device=self.device)  # a large model leaves little device memory
        took = []
        for _ in range(2):  # the first one also opens connections, so the second counts
            self.peers.wait()
            began = time.perf_counter()
            dist.all_reduce(numbers, group=self.peers.data)
            numbers[0].item()
            took.append(time.perf_counter() - began)
        return took[-1] * count / len(numbers)


class Ddp(Reduction):
    """PyTorch's DistributedDataParallel: sums buckets of gradients while backward runs. Gradients are views of its buckets."""

    name = "ddp"
    overlaps = True
    buckets: list[torch.Tensor] | None = None

    def __init__(self, model: nn.Module, compiled: nn.Module, peers: Peers, unused_parameters: bool):
        super().__init__(model, compiled, peers, unused_parameters)
        # DDP itself notices it only in the next forward pass; until then the other ranks wait in its sum.
        self.needs_all = not unused_parameters
        if self.world_size == 1:
            self.name, self.overlaps = Reduction.name, Reduction.overlaps
            return
        from torch.nn.parallel import DistributedDataParallel

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # its successor is new in torch 2.13
            self.forward = DistributedDataParallel(
                compiled,
                process_group=peers.data,
                gradient_as_bucket_view=True,
                find_unused_parameters=unused_parameters,
                broadcast_buffers=False,  # sum_gradients() broadcasts them, once a step
                init_sync=False,  # Trainer.restore() has sent rank 0's parameters to all ranks
            )

    def weight(self, global_batch_size: int) -> float:
        return self.world_size / global_batch_size  # DDP divides the sum by the world size

    def warm_up(self, backward: Callable) -> None:
        """Run one backward, since DDP rearranges its buckets after its first. A gradient's place in a bucket decides in which
        order the ranks' values are added: without this, a resumed run would differ in the last bits from an unstopped one.
        """
        if self.world_size > 1 and not self.unused_parameters:
            kept, called = Kept(self.model), list[object]()
            hook = self.forward.register_forward_pre_hook(lambda *_: called.append(None))
            backward()
            hook.remove()
            if not called:
                raise WorkloadError(
                    "forward() goes past DistributedDataParallel, which then sums no gradient: call the `model` that it is "
                    "given, or pass --reduction flat",
                    everywhere=True,
                )
            self.zero_grad()
            kept.put_back()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """DDP's buckets, if they hold all gradients and nothing else: for most small models a single tensor."""
        if self.world_size == 1 or self.unused_parameters:
            return super().gradients
        if self.buckets is None:
            gradients = super().gradients
            first_of = {gradient.untyped_storage().data_ptr(): gradient for gradient in gradients}
            buckets = [gradient.new_empty(0).set_(gradient.untyped_storage()) for gradient in first_of.values()]
            whole = sum(bucket.numel() for bucket in buckets) == sum(gradient.numel() for gradient in gradients)
            self.buckets = buckets if whole else []
        return self.buckets or super().gradients

    def no_sync(self):
        return self.forward.no_sync() if self.world_size > 1 else super().no_sync()


class Flat(Reduction):
    """All gradients are views into one tensor, summed in one collective after backward: nothing overlaps."""

    name = "flat"

    def __init__(self, model: nn.Module, compiled: nn.Module, peers: Peers, unused_parameters: bool):
        super().__init__(model, compiled, peers, unused_parameters)
        first = self.parameters[0]
        sizes = [parameter.numel() for parameter in self.parameters]
        # With unused_parameters the tensor ends with one count per parameter: the ranks that have its gradient.
        self.flat = torch.zeros(sum(sizes) + unused_parameters * len(sizes), device=first.device, dtype=first.dtype)
        *parts, self.counts = self.flat.split([*sizes, len(self.flat) - sum(sizes)])
        self.views = [  # in each parameter's memory order (channels last, transposed), as fused optimizers need
            part.as_strided(parameter.shape, torch.empty_like(parameter).stride(), part.storage_offset())
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]
        self.zero_grad()
        # Gather all parts and add them here: faster than gloo's all_reduce for small tensors. And canonical needs its own
        # order of additions.
        gathers = self.name == "canonical" or (first.device.type == "cpu" and self.world_size <= 8)
        self.parts: Any = self.flat.new_empty(self.world_size, len(self.flat)) if gathers else None
        self.gathered = list(self.parts.unbind()) if self.parts is not None else []

    @property
    def gradients(self) -> list[torch.Tensor]:
        return super().gradients if self.unused_parameters else [self.flat]

    def zero_grad(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = None if self.unused_parameters else view

    def sum_gradients(self) -> None:
        super().sum_gradients()
        self._collect()
        if self.world_size > 1:
            self._sum_over_ranks()
        if self.unused_parameters:
            for parameter, view, ranks in zip(self.parameters, self.views, self.counts.tolist(), strict=True):
                parameter.grad = view if ranks else None

    def _collect(self) -> None:
        """Copy gradients that are no views into the flat tensor."""
        if self.unused_parameters:
            for number, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    self.counts[number] = 1

    def _sum_over_ranks(self) -> None:
        if self.parts is None:
            dist.all_reduce(self.flat, group=self.peers.data)
        else:
            dist.all_gather(self.gathered, self.flat, group=self.peers.data)
            self._add_parts()

    def _add_parts(self) -> None:
        torch.sum(self.parts, 0, out=self.flat)


class Canonical(Flat):
    """The same bits at every world size: its micro-batches (--shards) are the same, and are added in one fixed tree."""

    name = "canonical"

    def __init__(self, model: nn.Module, compiled: nn.Module, peers: Peers, unused_parameters: bool):
        super().__init__(model, compiled, peers, unused_parameters)
        self.shards: list[torch.Tensor] = []  # gradients of all but the last shard of this step

    @contextmanager
    def no_sync(self):
        yield
        self._collect()
        self.shards.append(self.flat.clone())
        self.zero_grad()

    def sum_gradients(self) -> None:
        if self.shards:
            self._collect()
            self.flat.copy_(tree_sum([*self.shards, self.flat]))
            self.shards.clear()
            if self.unused_parameters:  # else the next _collect() would overwrite the sum with the last shard's gradients
                for parameter in self.parameters:
                    parameter.grad = None
        super().sum_gradients()

    def _add_parts(self) -> None:
        self.flat.copy_(tree_sum(self.parts))


REDUCTIONS = {"ddp": Ddp, "flat": Flat, "canonical": Canonical}

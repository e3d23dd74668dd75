"""--capture: a step's kernels as one CUDA graph, for models so small that launching them takes longer than their work.

A graph does again what was done while it was captured, in the same places of memory, with the numbers that lie there by
then. So each batch is copied to where the captured one lay, and the numbers of a step are cloned before the next one.
Whatever the host decides in a step must be the same in all: what is not is refused, here and by config.py.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from ddp_core.batches import converted
from ddp_core.errors import PreflightError, WorkloadError
from ddp_core.order import DROPOUT, seed_generators
from ddp_core.rehearsal import rehearse
from ddp_core.workload import blame

WARM_UP = 3  # steps, in which memory is allocated and libraries begin


class CapturedStep:
    """Called in the place of Trainer._run_step, and the same to the bit."""

    def __init__(self, trainer):
        self.trainer, self.warm_up = trainer, WARM_UP
        self.graph: Any = None
        workload = trainer.workload
        if trainer.device.type != "cuda":
            raise PreflightError(f"--capture is for CUDA and ROCm, and this rank computes on {trainer.device}: leave it out")
        if not trainer.guard.reads_flag or any("capturable" in group for group in trainer.optimizer.param_groups):
            kind = type(trainer.optimizer).__name__
            raise WorkloadError(
                f"--capture: {kind} decides or counts on the host: take --optimizer sgd, or leave --capture out"
            )
        if trainer.seen.others:
            raise WorkloadError(
                f"--capture: --workload {workload.name} draws from Python's or NumPy's generator: draw from torch's"
            )
        self.stream = torch.cuda.Stream(trainer.device)

    def __call__(self) -> None:
        trainer = self.trainer
        if self.warm_up:  # on the stream of the capture, as torch.cuda.graph asks for
            self.warm_up -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                trainer._run_step()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        began = time.perf_counter()
        with trainer.profile.part("data"):
            batch = next(trainer.batches)
        trainer.watch.spent("reading", began)
        # As in _run_step. The captured kernels draw under whatever seed is set when they are launched.
        seed_generators(trainer.device, DROPOUT, trainer.config.seed, trainer.step, 0)
        if self.graph is None:
            self._capture(batch)
        else:
            rehearse("step", trainer.step, trainer.model)
        for place, tensor in zip(self.places, self._tensors(batch), strict=True):
            if place.shape != tensor.shape:
                found, first = tuple(tensor.shape), tuple(place.shape)
                raise WorkloadError(
                    f"--capture: a batch at step {trainer.step} has a tensor of {found}, and the first had {first}"
                )
            place.copy_(tensor, non_blocking=True)
        self.graph.replay()
        trainer.reconciliation.losses.append(self.loss.clone())
        trainer.reconciliation.norms.append(self.norm.clone())
        trainer.state.progress.step += 1
        trainer.watch.spent("own", began)

    def _capture(self, batch: Any) -> None:
        """_run_step, whose kernels are written down and not launched."""
        trainer, reconciliation = self.trainer, self.trainer.reconciliation
        batch = converted(batch, torch.clone, trainer.device)
        self.places = self._tensors(batch)
        rest, trainer.batches = trainer.batches, iter([batch])
        self.graph = torch.cuda.CUDAGraph()
        count_steps, trainer.workload.count_steps = trainer.workload.count_steps, self._refuse_steps
        try:
            with torch.cuda.graph(self.graph, stream=self.stream):
                trainer._run_step()
        except Exception as error:
            raise blame(error, trainer.workload.file, "--capture: a step cannot be captured (leave it out)") from error
        trainer.batches, trainer.workload.count_steps = rest, count_steps
        trainer.state.progress.step -= 1
        self.loss, self.norm = reconciliation.losses.pop(), reconciliation.norms.pop()

    def _refuse_steps(self) -> int:
        name = self.trainer.workload.name
        raise WorkloadError(
            f"--capture: --workload {name} asks for steps_done, which never changes in a graph: leave --capture out"
        )

    def _tensors(self, batch: Any) -> list[torch.Tensor]:
        if isinstance(batch, torch.Tensor):
            return [batch]
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else None
        if parts is None:
            name = self.trainer.workload.name
            raise WorkloadError(
                f"--capture: a batch of --workload {name} has a {type(batch).__name__}: only tensors can be copied"
            )
        return [tensor for part in parts for tensor in self._tensors(part)]

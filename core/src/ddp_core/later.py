"""Checks while a run trains, for faults that the trial before the first step (probe.py) could not see."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ddp_core.attributes import changes, note_changes, of_optimizer, of_workload, writes
from ddp_core.comparison import trained_parameters
from ddp_core.replicas import checksum
from ddp_core.state import made_by_torch, saved_buffers, unsaved
from ddp_core.workload import Workload, listed, note_on

EARLY = 10  # steps at the beginning of a start in which attributes are checked


class Later:
    """One rank's checks of its model and optimizer."""

    def __init__(self, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, shared: list[str], step: int):
        """shared: names of the buffers that all ranks take from rank 0 in every step. step: the first of this start."""
        self.workload, self.model, self.optimizer, self.first = workload, model, optimizer, step
        self.shapes = self._shapes()
        self.own = self.shapes.keys() - {*shared}
        self.trained = {*trained_parameters(model)}
        self.factor: float | None = None  # the schedule's, at the last step
        self.noted: set[tuple[str, str]] = set()  # owner and name of attributes: each is noted once per start
        self.notes: list[str] = []  # on single steps, for the next look()
        self.begin()

    def look(self, step: int, norms: torch.Tensor) -> list[str]:
        """Called at each reconciliation. Returns notes, each only once per start. norms: of the gradients since the last call.

        Raises WorkloadError if no snapshot could hold or resume this model and optimizer.
        """
        if changed := sorted(self.trained ^ {*trained_parameters(self.model)}):
            raise self.workload.unusable(
                f"requires_grad of {listed(changed)} has changed by step {step}, and what is trained is settled when a run "
                "begins: freeze in model(); to train more later, begin another run, whose model() loads best.safetensors"
            )
        if kept := unsaved(self.model, self.optimizer):
            raise self.workload.unusable(
                f"the optimizer {type(self.optimizer).__name__} keeps {listed(kept)}, and a snapshot holds tensors and numbers "
                "of parameters: make one tensor of a list (torch.stack)"
            )
        self.refuse_other_shapes(step)
        notes, self.notes = self.notes, []
        if step - len(norms) == self.first and not norms.any():
            notes.append(
                f"every gradient was 0 at step {self.first}: the loss does not depend on the model (a weight of 0, sign, "
                "round, a unit that never begins), and nothing is learned"
            )
        return notes + self._notes_on_buffers(step)

    def look_at_rates(self, factor: float) -> None:
        """Called in every step before its rates are set. factor: the schedule's. Finds rates that are not the last step's."""
        rates = [(group["lr"], group["initial_lr"]) for group in self.optimizer.param_groups if self.factor is not None]
        # To compare a tensor would wait for the device.
        others = any(not isinstance(rate, torch.Tensor) and rate != first * self.factor for rate, first in rates)
        if others and ("optimizer", "lr") not in self.noted:
            self.noted.add(("optimizer", "lr"))
            self.notes.append(
                "something sets the learning rate (one of torch's lr_scheduler, or lr of a group by hand), and no snapshot has "
                "it: each step sets it back to the group's first one times the factor that schedule() returns"
            )
        self.factor = factor

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around the optimizer's step: finds attributes that it changes there, or a hook does, such as an average."""
        hooks = [getattr(self.optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
        # What the first step makes is no change.
        watched = self.first < step <= self.first + EARLY and (any(hooks) or not made_by_torch(self.optimizer))
        before = self._attributes() if watched else {}
        yield
        for owner, now in (self._attributes() if watched else {}).items():
            names = [name for name in changes(before[owner], now) if (owner, name) not in self.noted]
            self.noted |= {(owner, name) for name in names}
            self.notes += note_changes(names, owner, "step of the optimizer")

    def _attributes(self) -> dict[str, dict[str, list]]:
        return dict(workload=of_workload(self.workload, self.model), optimizer=of_optimizer(self.optimizer, self.model))

    def refuse_other_shapes(self, step: int) -> None:
        """Raise WorkloadError if a saved buffer has changed its shape: the next start makes the old shape, and could not load
        the snapshot.
        """
        now = self._shapes()
        for name in now:
            if now[name] != (began := self.shapes.get(name)):
                raise self.workload.unusable(
                    f"the model's buffer {name} has the shape {now[name]} by step {step}, and had {began} when the run began: "
                    "no start could go on from its snapshot; make it as large as it gets in model(), or persistent=False"
                )

    def _shapes(self) -> dict[str, tuple]:
        return {name: tuple(buffer.shape) for name, buffer in saved_buffers(self.model).items()}

    def begin(self) -> None:
        """Take the buffers as they are now for the reference: the run begins, or all ranks have just taken rank 0's."""
        self.buffers = self._own_buffers({})

    def _own_buffers(self, before: dict[str, tuple]) -> dict[str, tuple]:
        """By name: a buffer, kept alive so that no new one gets its address; its writes; its content, compared if written."""
        now = {}
        for name, buffer in self.model.named_buffers():
            if name in self.own:
                unchanged = name in before and before[name][1] == writes(buffer)
                now[name] = before[name] if unchanged else (buffer, writes(buffer), checksum([buffer]).item())
        return now

    def _notes_on_buffers(self, step: int) -> list[str]:
        """A note on buffers whose values changed. Being written is not enough: many layers write the same values again."""
        before, self.buffers = self.buffers, self._own_buffers(self.buffers)
        changed = [name for name, (*_, content) in self.buffers.items() if name not in before or content != before[name][2]]
        self.own -= {*changed}
        return note_on(
            changed,
            "the model began to change its buffers {names} by step {step}, and not at the first: if it does so by a rank's own "
            "rows, each rank keeps its own until an evaluation, and a run that goes on has rank 0's; change them in every "
            "step, by nothing until then",
            step=step,
        )

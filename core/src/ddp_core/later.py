"""Checks at each reconciliation, for faults that the trial before the first step (probe.py) could not see."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ddp_core.probe import kept_by, plain
from ddp_core.replicas import BITS, checksum
from ddp_core.state import RATES, dense, local, made_by_torch, saved_buffers, unsaved
from ddp_core.workload import Workload

EARLY = 10  # steps at the beginning of a start in which the optimizer's attributes are checked
OF_TORCH = ("state", "param_groups", "defaults", "grad_scale", "found_inf")
LATE_BUFFERS = (
    "the model began to change its buffers {names} by step {step}, and not at the first: if it does so by a rank's own rows, "
    "each rank keeps its own until an evaluation, and a run that goes on has rank 0's; change them in every step, by nothing "
    "until then"
)
NO_GRADIENT = (
    "every gradient was 0 at step {step}: the loss does not depend on the model (a weight of 0, sign, round, a unit that never "
    "begins), and nothing is learned"
)
KEPT_BESIDE = (
    "of the optimizer {names} changes from step to step, and is in no snapshot: a run that goes on begins anew there, unless "
    "each step does; keep what later steps need in self.state[parameter] (tensors, numbers), or as a number in a group"
)
KEPT_IN_STEP = (
    "{names} of the workload changes with every step of the optimizer, and no snapshot has it: a run that goes on begins with "
    "it anew, unless each step does; keep averaged weights in the model, as a submodule, numbers in a group of the optimizer"
)
RATE_IS_SET = (
    "something sets the learning rate (one of torch's lr_scheduler, or lr of a group by hand), and no snapshot has it: before "
    "each step of the optimizer it is set back to the group's first one times the factor of schedule(); return from there what "
    "it should be"
)


class Later:
    """One rank's checks of its model and optimizer."""

    def __init__(self, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, shared: list[str], step: int):
        """shared: names of the buffers that all ranks take from rank 0 in every step. step: the first of this start."""
        self.workload, self.model, self.optimizer, self.first = workload, model, optimizer, step
        self.shapes = self._shapes()
        self.own = self.shapes.keys() - {*shared}
        self.trained = self._trained()
        self.beside: dict[str, list] | None = None
        self.factor: float | None = None  # the schedule's, at the last step
        self.found: dict[str, bool] = {}  # notes on single steps, and whether look() has returned them
        self.begin()

    def look(self, step: int, norms: torch.Tensor) -> list[str]:
        """Returns notes, each only once per start. norms: of the gradients since the last call. Raises WorkloadError if no
        snapshot could hold or resume this model and optimizer.
        """
        if changed := sorted(self.trained ^ self._trained()):
            raise self.workload.unusable(
                f"requires_grad of {', '.join(changed[:6])} has changed by step {step}, and what is trained is settled "
                "when a run begins: freeze in model(); to train more later, begin another run with this one's weights (model() "
                "loads best.safetensors)"
            )
        if kept := unsaved(self.model, self.optimizer):
            raise self.workload.unusable(
                f"the optimizer {type(self.optimizer).__name__} keeps {', '.join(kept[:6])}, and a snapshot holds tensors and "
                "numbers of parameters: make one tensor of a list (torch.stack)"
            )
        self.refuse_other_shapes(step)
        first = step - len(norms) == self.first
        no_gradient = [NO_GRADIENT.format(step=self.first)] if first and not norms.any() else []
        found = [note for note, returned in self.found.items() if not returned]
        self.found = dict.fromkeys(self.found, True)
        return [*no_gradient, *self._late_buffers(step), *self._kept_beside(step), *found]

    def look_at_rates(self, factor: float) -> None:
        """Called in every step before its rates are set. factor: the schedule's. Finds rates that are not the last step's."""
        rates = [(group["lr"], group["initial_lr"]) for group in self.optimizer.param_groups if self.factor is not None]
        # To compare a tensor would wait for the device.
        if any(not isinstance(rate, torch.Tensor) and rate != first * self.factor for rate, first in rates):
            self.found.setdefault(RATE_IS_SET, False)
        self.factor = factor

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around the optimizer's step: finds attributes of the workload that a hook changes there, such as an average."""
        hooks = [getattr(self.optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
        # What the first step makes is no change.
        watched = self.first < step <= self.first + 2 and (any(hooks) or not made_by_torch(self.optimizer))
        before = self._kept_by_workload() if watched else {}
        yield
        now = self._kept_by_workload() if before else {}
        if changed := [f"self.{name}" for name in now if now[name] != before.get(name, now[name])]:
            self.found.setdefault(KEPT_IN_STEP.format(names=", ".join(changed[:6])), False)

    def _kept_by_workload(self) -> dict[str, list]:
        """What is no view of the model's own tensors, whose versions move with theirs."""
        own = {tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers())}
        kept = kept_by(self.workload, self.model).items()
        return {name: [part for part in parts if not isinstance(part, tuple) or part[0] not in own] for name, parts in kept}

    def refuse_other_shapes(self, step: int) -> None:
        """Raise WorkloadError if a saved buffer has changed its shape: the next start makes the old shape, and could not load
        the snapshot.
        """
        now = self._shapes()
        for name in now:
            if now[name] != (began := self.shapes.get(name)):
                raise self.workload.unusable(
                    f"the model's buffer {name} has the shape {now[name]} by step {step}, and had {began} when the run began: "
                    "no start could go on from its snapshot; make it as large as it gets in model(), or register it with "
                    "persistent=False"
                )

    def begin(self) -> None:
        """Take the buffers as they are now for the reference: the run begins, or all ranks have just taken rank 0's."""
        self.held = buffers = self._own_buffers()  # kept alive, so that no new buffer gets the same address
        self.versions = {name: (buffer.data_ptr(), buffer._version) for name, buffer in buffers.items()}
        self.content = {name: _content(buffer) for name, buffer in buffers.items()}

    def _shapes(self) -> dict[str, tuple]:
        return {name: tuple(buffer.shape) for name, buffer in saved_buffers(self.model).items()}

    def _trained(self) -> set[str]:
        return {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self.model.named_buffers() if name in self.own and not buffer.is_inference()}

    def _late_buffers(self, step: int) -> list[str]:
        """A note on buffers whose values changed. Being written is not enough: many layers write the same values again."""
        if not self.own:
            return []
        buffers = self._own_buffers()
        now = {name: (buffer.data_ptr(), buffer._version) for name, buffer in buffers.items()}
        written = [name for name in now if now[name] != self.versions.get(name)]
        content = {name: _content(self.model.get_buffer(name)) for name in written}
        late = [name for name in written if content[name] != self.content.get(name)]
        self.held = {name: buffers[name] for name in buffers.keys() - {*late}}
        self.versions, self.content, self.own = now, self.content | content, self.own - {*late}
        return [LATE_BUFFERS.format(names=", ".join(late[:6]), step=step)] if late else []

    def _kept_beside(self, step: int) -> list[str]:
        if self.beside == {}:
            return []
        now, before = kept_beside(self.optimizer, self.model), self.beside or {}
        changed = [name for name in before if now.get(name) != before[name]]  # attributes made in the first step do not count
        early = step < self.first + EARLY
        self.beside = {name: now[name] for name in before or now if name not in changed} if early else {}
        return [KEPT_BESIDE.format(names=", ".join(changed[:6]))] if changed else []


def _content(buffer: torch.Tensor) -> float | None:
    return checksum([buffer]).item() if dense(buffer) and buffer.element_size() in BITS else None


def kept_beside(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, list]:
    """What a user's own optimizer keeps outside its state, by name: attributes, and group entries that are not numbers."""
    if made_by_torch(optimizer):
        return {}
    kept = {f"self.{name}": value for name, value in vars(optimizer).items() if name not in OF_TORCH}
    groups = optimizer.param_groups
    for key in dict.fromkeys(key for group in groups for key in group if key not in ("params", *RATES)):
        kept[f"{key} in a group"] = [value for group in groups if not isinstance(value := group.get(key), int | float)]
    saved = {id(tensor) for tensor in (*model.parameters(), *model.buffers(), *tree_leaves([*optimizer.state.values()]))}
    saved |= {id(parameter.grad) for parameter in model.parameters()}

    def parts(value: Any) -> list:
        wrapped = [part for part in tree_leaves(value) if isinstance(part, torch.optim.Optimizer)]
        states = [[*part.state.values()] for part in wrapped if part.state is not optimizer.state]
        return [at_a_glance(part) for part in tree_leaves([value, states]) if id(part) not in saved]

    return {name: parts(value) for name, value in kept.items()}


def at_a_glance(part: Any) -> Any:
    """A value to compare a part by. For a tensor, which may be as large as the model: how often it was written, and the first
    64 numbers of its first row.
    """
    if not isinstance(part, torch.Tensor):
        return plain(part)
    own = None if part.is_inference() else local(part.detach())
    if own is None or type(own) is not torch.Tensor or not dense(own) or own.is_meta or not own.numel():
        return None
    row = own[(0,) * (own.ndim - 1)] if own.ndim > 1 else own.reshape(-1)
    return part._version, plain(row[:64])

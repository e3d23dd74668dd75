"""What a snapshot holds: the model, its optimizer, and how far the run has come. Names are those of the model without DDP."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ddp_core.document import refuse_senseless
from ddp_core.errors import SnapshotError, printable
from ddp_core.snapshot import DTYPE_NAMED, DTYPES

RATES = ("lr", "initial_lr")  # in an optimizer's group: not saved, since the schedule sets them
# torch.optim's names of state tensors, and our names for them in a snapshot. Other names are kept.
NAMES = {"momentum_buffer": "momentum", "exp_avg": "mean", "exp_avg_sq": "square"}
OPTIONAL = ("scale", "measured", "stateless", "numbers")  # fields of Progress that a snapshot lacks if they are empty


@dataclass
class Progress:
    """How far a run has come, in all its starts."""

    step: int = 0  # optimizer steps done
    loss_sum: float = 0.0  # of the steps done in this epoch
    history: list[list] = field(default_factory=list)  # one row an epoch: epoch, training loss, then the evaluation's values
    best: list | None = None  # epoch and held-out loss of best.safetensors
    scale: list | None = None  # fp16's loss scale, and the steps since it changed
    measured: list[str] = field(default_factory=list)  # names of the values in a row of history, after its epoch
    stateless: list[str] = field(default_factory=list)  # trained parameters that have had no gradient so far
    numbers: list[dict] = field(default_factory=list)  # the optimizer's numbers_of() that have changed

    def document(self) -> dict:
        known = dict(step=self.step, epochs_run=len(self.history), epoch_loss_sum=self.loss_sum.hex())
        known |= dict(history=self.history, best=self.best)
        return known | {name: value for name in OPTIONAL if (value := getattr(self, name))}

    @classmethod
    def of(cls, document: dict) -> "Progress":
        saved = [name for name in OPTIONAL if name in document]
        known = {name: document[name] for name in ("step", "history", "best", *saved)}
        return cls(loss_sum=float.fromhex(document["epoch_loss_sum"]), **known)


class State:
    """facts: entries that must be equal when a run resumes (problem, data, steps_per_epoch), and others that are only noted."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict):
        self.model, self.optimizer, self.facts, self.progress = model, optimizer, facts, Progress()
        self.begun_with = numbers_of(model, optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of a snapshot, by names without `module.` or other traces of DDP or torch.compile."""
        return of_model(self.model) | of_optimizer(self.model, self.optimizer)

    def document(self) -> dict:
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        has_state = self.optimizer.state or self.progress.scale  # under fp16 all steps so far may have been skipped
        self.progress.stateless = [name for name, p in trained.items() if has_state and not self.optimizer.state.get(p)]
        pairs = zip(numbers_of(self.model, self.optimizer), self.begun_with, strict=True)
        moved = [{key: value for key, value in now.items() if value != then.get(key)} for now, then in pairs]
        self.progress.numbers = moved if any(moved) else []
        return self.facts | self.progress.document()

    def lay_out(self) -> None:
        """Make the optimizer create its state, into which a snapshot is then copied.

        torch.optim creates it at the first step only. So this does a step with gradients of zero, or of one if that fails: some
        optimizers divide by the norm. The snapshot overwrites the parameters later. Frozen parameters, which the optimizer may
        also hold, get no gradient and no state.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
        except (ArithmeticError, torch.linalg.LinAlgError):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def made_later(self, tensors: dict) -> list[tuple[str, str, str, tuple]]:
        """State that a user's own optimizer created after its first step: (state, parameter, dtype, shape), from a snapshot."""
        if made_by_torch(self.optimizer):
            return []
        made, trained = [], {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        for full in sorted(tensors.keys() - self.tensors().keys()):
            kind, key, name = (*full.split(".", 2), "", "")[:3]
            if kind == "optim" and name in trained:
                made.append((key, name, DTYPES.get(tensors[full].dtype, tensors[full].dtype), tuple(tensors[full].shape)))
        return made

    def make(self, states: list) -> None:
        """Create the states of made_later(), into which a snapshot is then copied."""
        parameters, of_torch = dict(self.model.named_parameters()), {ours: theirs for theirs, ours in NAMES.items()}
        for key, name, dtype, shape in states:
            parameter = parameters[name]
            alike = tuple(shape) == tuple(parameter.shape)  # then sharded as the parameter is
            like = parameter.detach() if alike else torch.empty(shape, device=parameter.device)
            self.optimizer.state[parameter][of_torch.get(key, key)] = torch.zeros_like(like, dtype=DTYPE_NAMED[dtype])

    def check(self, tensors: dict[str, torch.Tensor], document: dict, path: object) -> Progress:
        """The progress in a snapshot. Raises SnapshotError unless it fits the run, the model and the laid-out optimizer."""
        if missing := sorted((self.facts | Progress().document()).keys() - document.keys()):
            raise SnapshotError(f"{path} lacks {', '.join(missing)}: it is no snapshot of a run; pass --fresh")
        refuse_senseless(document, path)
        progress = Progress.of(document)
        self.forget(progress.stateless)
        theirs, ours = ({name: facts[name] for name in ("data", "steps_per_epoch")} for facts in (document, self.facts))
        then, now = document["problem"], dict(self.facts["problem"])
        if "epochs" not in then:  # then epochs made no difference to the losses
            now.pop("epochs", None)
        # Compared separately: a flag may be called --data, too.
        differ = differences(then, now) + differences(theirs, ours)
        mine = self.tensors()
        differ = differ or differences(layout(tensors), layout(mine)) or self._unknown(progress.numbers)
        if differ:
            why, way_out = "", ""
            if len(differ) == 1 and differ[0].startswith("epochs:"):
                why = "its schedule, or what reads config.epochs in the workload's file, is laid out over them; "
            if document["data"] != self.facts["data"] and len(differ) == 1:
                why = (
                    "data() gave other rows than then: files have changed, or a flag that names them, or it draws from a "
                    "generator of its own; "
                )
                way_out = "; rows with an attribute `fingerprint` (sites/README.md) are the same while that is"
            raise SnapshotError(
                f"{path} is of another run ({'; '.join(differ[:8])}): {why}pass that run's flags, another --run-dir, or "
                f"--fresh{way_out}"
            )
        return progress

    def _unknown(self, numbers: list[dict]) -> list[str]:
        """The optimizer's numbers in a snapshot that this optimizer does not keep."""
        mine = numbers_of(self.model, self.optimizer)
        (*groups, states), (*ours, our_states) = numbers or mine, mine
        if len(groups) != len(ours):
            return [f"{len(groups)} groups of the optimizer there, {len(ours)} here"]
        pairs = [*zip(groups, ours, strict=True), *((states[name], our_states.get(name, {})) for name in states)]
        return [f"{printable(key)}: no number of this optimizer" for then, now in pairs for key in then.keys() - now.keys()]

    def forget(self, stateless: list[str]) -> None:
        """Remove the optimizer's state of parameters that have had no gradient."""
        for name, parameter in self.model.named_parameters():
            if name in stateless:
                self.optimizer.state.pop(parameter, None)

    def put_numbers(self) -> None:
        """Set the optimizer's plain numbers to the snapshot's, since lay_out() has counted a step."""
        *begun, _ = self.begun_with
        *moved, states = self.progress.numbers or [{} for _ in self.begun_with]
        for group, then, now in zip(self.optimizer.param_groups, begun, moved, strict=True):
            group.update(then | now)
        for name, parameter in self.model.named_parameters():
            if name in states:
                self.optimizer.state[parameter].update(states[name])

    def restore(self, loaded: tuple[dict[str, torch.Tensor], dict] | None, path: object, peers) -> None:
        """Collective. Send rank 0's snapshot, or its new model, to all ranks. Raises SnapshotError on all ranks."""
        resuming = peers.broadcast(loaded is not None)
        if resuming:
            self.lay_out()
            self.make(peers.broadcast(self.made_later(loaded[0]) if loaded else None))
        progress = peers.together((lambda: self.check(*loaded, path).__dict__) if loaded else None)
        self.progress = Progress(**peers.broadcast(progress or {}))
        self.forget(self.progress.stateless)
        if resuming:
            self.put_numbers()
        self.send(loaded[0] if loaded else {}, resuming, peers)

    def send(self, tensors: dict[str, torch.Tensor], resuming: bool, peers) -> None:
        """Collective. Send the numbers of rank 0's snapshot, or else of its new model, to all ranks."""
        for name, tensor in self.tensors().items() if tensors else ():
            tensor.copy_(tensors[name])
        peers.broadcast_tensors(list(self.tensors().values()))

    def save(self, write: Callable, trainer) -> None:
        """Collective. write(tensors, put_drafts): on rank 0, writes the snapshot."""
        trainer.peers.together(trainer.saver and (lambda: write(self.tensors(), None)), trainer.record.failure)


def dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is neither sparse nor ragged: torch cannot compare those."""
    return tensor.layout == torch.strided and not tensor.is_nested


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: its rows if the tensor is sharded (sharding.py), else all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state_dict has. Others may be caches, with another length on each rank."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def of_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.<name>`: every parameter once (tied ones under the first name), and the buffers that are saved."""
    named = dict(model.named_parameters()) | saved_buffers(model)
    return {f"model.{name}": tensor.detach() for name, tensor in named.items()}


def averages(model: nn.Module) -> list[nn.Parameter]:
    """Frozen parameters that a forward pass in training may change, such as a moving average of the trained ones.

    If they take more than twice the bytes of the trained ones, they include a backbone, and a copy would cost too much memory.
    Then only those with the shape of a trained one, and counters, if these stay within the limit; else none.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    shapes = {p.shape for p in trained}
    alike = [p for p in frozen if p.shape in shapes or p.numel() == 1]
    most = 2 * sum(p.nbytes for p in trained)
    return next((some for some in (frozen, alike) if sum(p.nbytes for p in some) <= most), [])


class Kept:
    """A copy of everything that a forward pass in training may change: buffers, and averages of parameters."""

    def __init__(self, model: nn.Module, averaged: bool = True):
        self.model = model
        # On the CPU: at a resume the optimizer's state already takes the device's memory.
        self.buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers() if dense(buffer)}
        self.averages = [(p, p.detach().to("cpu", copy=True)) for p in (averages(model) if averaged else ())]

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Restore the copy. Returns the names of the buffers that had changed."""
        for parameter, numbers in self.averages:
            parameter.copy_(numbers)
        # By name: a forward pass may replace a buffer's tensor. A new buffer, or a longer one, is a cache (of angles, say).
        now, changed = dict(self.model.named_buffers()), []
        for name, numbers in self.buffers.items():
            buffer = now.get(name)
            if buffer is not None and buffer.shape == numbers.shape and not torch.equal(buffer.cpu(), numbers):
                buffer.copy_(numbers)
                changed.append(name)
        return changed


def of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`optim.<state>.<parameter>`: the tensors of the optimizer's state. torch.optim keeps nothing else there."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optim.{NAMES.get(key, key)}.{name}"] = value.detach()
    return tensors


def numbers_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict]:
    """The plain numbers that an optimizer keeps, such as a count of steps: of each group; last, by name, of each parameter.

    torch.optim's own optimizers keep only tensors for a parameter.
    """

    def numbers(values: dict) -> dict:
        return {key: value for key, value in values.items() if isinstance(value, int | float)}

    groups = [{key: n for key, n in numbers(group).items() if key not in RATES} for group in optimizer.param_groups]
    states = {name: numbers(optimizer.state.get(parameter, {})) for name, parameter in model.named_parameters()}
    return [*groups, {name: kept for name, kept in states.items() if kept}]


def made_by_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's, not a user's own."""
    return type(optimizer).__module__.partition(".")[0] == "torch"


def unsaved(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of optimizer state that no snapshot holds: neither a tensor nor a number of a parameter."""
    if made_by_torch(optimizer):
        return []
    if optimizer.state.keys() - {*model.parameters()}:
        return ["a state of no parameter"]
    pairs = [pair for state in optimizer.state.values() for pair in state.items()]
    return sorted({str(key) for key, value in pairs if not isinstance(value, torch.Tensor | int | float | None)})


def differences(theirs: dict, ours: dict) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    differ = [name for name in names if ours.get(name) != theirs.get(name)]
    return [f"{printable(name)}: {printable(theirs.get(name))} there, {printable(ours.get(name))} here" for name in differ]


def layout(tensors: dict) -> dict[str, str]:
    """Dtype and shape by name, of tensors in memory or still in a file (Stored)."""
    return {name: f"{DTYPE_NAMED.get(tensor.dtype, tensor.dtype)} {tuple(tensor.shape)}" for name, tensor in tensors.items()}

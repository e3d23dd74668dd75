"""Tries a workload on a few rows before training: refuses silent mistakes, and notes which promises the workload breaks.

The trial does not change training: buffers, gradients and random numbers are as before.
"""

import copy
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_core.batches import SMALL, Batches, converted
from ddp_core.comparison import compare_gradients, compare_losses, compare_metrics, refuse_unlike_sums
from ddp_core.config import refuse_other_default_device
from ddp_core.errors import WorkloadError
from ddp_core.order import DROPOUT, generator_positions, positions_of_others, seed_generators, seeded_anew
from ddp_core.replicas import checksum
from ddp_core.snapshot import memory
from ddp_core.state import Kept, dense, saved_buffers
from ddp_core.workload import (
    NO_SHARDS,
    YOURS,
    Workload,
    blame,
    blaming,
    factor_of,
    outputs_of,
    refuse_other_names,
    row_of,
    sources_of,
    unknown_to_shards,
)

MANY = 16  # rows: so many that a loss or a metric is seldom 0
FEW = 4
DRAWS = 32  # evaluations of a loss with random noise, to tell a mean from a sum
LONG = 2**12  # entries: a longer list, of file names say, is not looked into
LARGE = 2**20  # numbers: a larger tensor is not copied, and its content is not compared
RANDOM = (
    "random numbers are drawn in the model or loss (dropout, noise): by torch's generators, which are seeded at each step, but "
    "losses depend on the world size; not so with --reduction canonical"
)
DRAWN = (
    "Python's or NumPy's generator is drawn from in the model or loss, and seeded at each step: what depends on it depends on "
    "the world size; not so with --reduction canonical"
)
DRAWN_FOR_A_BATCH = (
    "collate() draws random numbers, which follow the last row of a batch: losses depend on the world size; not so of what "
    "__getitem__ draws, nor with --reduction canonical"
)
NOT_REPEATED = (
    "the same rows and seeds gave another loss the second time: the model or loss draws from a generator of its own "
    "(torch.Generator, numpy.random.default_rng), keeps something from call to call, or uses kernels that do not repeat "
    "(--deterministic): a run does not repeat, nor resume, bit for bit"
)
ROWS_NOT_REPEATED = (
    "{row} was another when it was read again: it is drawn from a generator of its own (torch.Generator, "
    "numpy.random.default_rng), or __getitem__ changes it in place (.clone()): a run does not repeat; torch's, Python's and "
    "NumPy's own generators are seeded for each row"
)
NOT_RESUMED = "; such a run cannot be resumed where that generator is not seeded: its fingerprint would be another"
SEEDS = (
    "{where} seeds a generator (torch.manual_seed, random.seed, numpy.random.seed), and draws the same for {each}: take it "
    "out, the core seeds them"
)
ROUNDED = (
    "column {names} of fp64 has less than three digits left of what tells rows apart, once rounded: subtract a mean (of times "
    "in seconds, say), or pass --precision fp64"
)
UNCALLED = (
    "the class has {names}, which neither the core nor the file calls: what the core calls is named in sites/README.md, step 6"
)
KEPT = (
    "{names} of the {owner} changes with every batch, and no snapshot holds it: a run that goes on begins with it anew; keep "
    "it in a buffer of the model (register_buffer), or compute it from self.steps_done or self.epochs_done"
)
CONSTANT_PART = (
    "part {name!r} of loss() has no gradient, yet counts in the loss, which chooses best.safetensors: return it from metrics()"
)
RATE = (
    "schedule() returned --lr {lr:g} itself at step 0: what it returns is a factor, and the learning rate is {lr:g} times that"
)
NO_RATE = "schedule() returned 0 at every step that was tried, from 0 to {last}: nothing is trained (/, not //, divides steps)"
MODE = (
    "forward() or loss() calls {call}() on the model, or a part of it: its dropout and BatchNorm are {what}; take it out, "
    "or put the mode back after it: the core calls both"
)
MODES = ((True, "train", "on where held-out rows are evaluated"), (False, "eval", "off where it is trained"))
WRITTEN = (
    "the model writes its parameters {names} when it is called: what an initialization by rows makes of them comes from the "
    "few that are tried before the first step, and what a rank writes by its own rows later the others do not have; compute it "
    "in model(), or keep it in a buffer"
)
FLAG = (
    "the rows that were tried set {names} of the model, and the buffers beside it were put back: what it calls initialized is "
    "not; make the flag a buffer (register_buffer), which is put back, too, and saved"
)
ANNEALED = (
    "the loss of held-out rows changes with self.steps_done, and chooses best.safetensors: where torch.is_grad_enabled() is "
    "false, give it one measure throughout, the last one, say"
)
OF_OTHER_TENSORS = "device|dtype|meta|scalar type|Input type"  # in torch's errors about tensors that do not go together
BATCH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class ProbeResult:
    """What the trial found. losses: the names of several losses, () for one loss."""

    losses: tuple[str, ...]
    metrics: tuple[str, ...]
    buffers: list[str]  # names of those that a forward in training changes: BatchNorm's statistics
    rows: Any  # the rows that were tried, as one batch
    others: bool  # whether the loss also draws from Python's or NumPy's generator
    written: list[str]  # names of the trained parameters that the model writes when it is called
    repeats: bool  # whether rows and loss were the same when they were tried again with the same seeds
    notes: list[str]  # which of the usual promises this workload breaks


def probe(model: nn.Module, batches: Batches, autocast, agreed: Callable) -> ProbeResult:
    """Raises WorkloadError for a loss that is no scalar or a mean, a parameter without a gradient, rows that do not collate.

    agreed: returns rank 0's value of a condition that may differ between ranks, if a forward pass is collective (--sharding).
    """
    workload = batches.workload
    refuse_other_default_device(workload)
    if (dtype := torch.get_default_dtype()) != torch.float32:  # optimizers count steps in it, and fused ones then fail
        raise workload.unusable(f"torch's default dtype is {dtype}: take set_default_dtype out, pass --precision fp64")
    trial, trained, flags = _Trial(model, batches, autocast, agreed), bits_of_trained(model), flags_of(model)
    try:
        trial.read()
        trial.refuse_gradients_of_rows()
        losses, metrics = trial.look()
        others, random = trial.look_for_random_numbers()
    except (Exception, SystemExit) as error:
        if batches.config.sharding != "none" and (what := unknown_to_shards(error)):
            raise WorkloadError(f"--sharding {batches.config.sharding}: {NO_SHARDS.format(what=what)}") from error
        if re.search(OF_OTHER_TENSORS, str(error)):  # hidden parameters were not moved or converted
            _refuse_hidden(workload, model, lambda part: part.requires_grad)
        row, name = row_of(error), workload.name
        what = f"row {row} of --workload {name}" if row else f"--workload {name}, tried on {trial.trying}"
        blamed = blame(error, workload.file, what)
        if blamed is not error and (cause := trial.cause_of(error)):
            blamed = WorkloadError(f"{blamed}; {cause}")
        raise blamed from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        changed = trial.put_buffers_back()
    if batches.config.sharding != "none" and (moved := [name for name in changed if name.endswith("n_averaged")]):
        raise workload.unusable(
            f"forward() moves an average of the weights ({moved[0]}), and they are in parts: pass --sharding none"
        )
    notes = [ROUNDED.format(names=", ".join(batches.rounded[:6]))] if batches.rounded else []
    written = names_of_written(model, trained)
    notes += notes_on_buffers(model, changed) + notes_on_flags(model, flags, changed) + notes_on_written(written)
    notes += trial.notes + random
    notes += notes_on_uncalled(workload)
    repeats = not {NOT_REPEATED, ROWS_NOT_REPEATED.format(row="row 0")} & {*notes}
    return ProbeResult(losses, metrics, changed, trial.rows, others, written, repeats, notes)


class _Trial:
    def __init__(self, model: nn.Module, batches: Batches, autocast, agreed: Callable):
        self.model, self.batches, self.autocast, self.agreed = model, batches, autocast, agreed
        self.workload, self.config = batches.workload, batches.config
        self.kept = Kept(model, averaged=self.config.sharding == "none")  # else parameters are sharded
        self.changed: list[str] = []
        self.count = min(2, len(batches))
        self.trying = f"{self.count} of its rows"  # for messages
        self.rows: Any = None
        self.alone: list[Any] = []
        self.many: list[Any] = []  # more rows together, then each alone
        self.tried: list[list[Any]] = []  # rows and alone, drawn anew several times, if collate() is random
        self.repeats = True
        self.rows_repeat = True  # else a batch and its rows alone have been drawn apart
        self.notes: list[str] = []
        self.moved: list[str] = []  # attributes of the workload that metrics() changes
        self.modes: set[bool] = set()  # training modes that forward and loss set on a part of the model

    def outcome(self, batch: Any, seed: int, others: bool = False) -> tuple[Any, Any, Any]:
        """Outputs, loss, and the batch as both leave it. It is a copy, since the batch is tried again."""
        seed_generators(self.batches.device, DROPOUT, self.config.seed, seed, others=others)
        batch = converted(batch, torch.clone, self.batches.device)
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            with self.autocast():
                outputs = outputs_of(self.workload, self.model, batch)
                loss = self.workload.loss(outputs, batch)
        finally:  # an error may come of it
            # A frozen part may always be in eval mode.
            self.modes |= {m.training for m, before in modes if m.training != before and (m.training or _trains(m))}
        return outputs, loss, batch

    def total(self, batch: Any, seed: int, others: bool = False) -> torch.Tensor:
        return _total(self.workload, self.outcome(batch, seed, others)[1])[1]

    def read(self) -> None:
        """Read the rows to try, together and each alone. Notes a row that differs when it is read again with the same seeds."""
        places, spread = [*range(self.count)], self.spread()
        many = [*range(self.count, self.count + len(spread))]
        groups = [[*places], *([place] for place in places)]
        all_groups = [*groups, many, *([place] for place in many)]
        at = len(groups)
        batched = getattr(self.batches.rows, "batched", False)
        if batched or self.config.row_seeds == "off":
            batches = self.batches.few([*places, *spread], all_groups)
            (self.rows, *self.alone), self.many = batches[:at], batches[at:]
            self.draw(places, groups)
            again = self.batches.few(places, [places])[0] if batched else self.rows
            self._note_other_rows(self.rows, again)
            return
        again = len(places) + len(spread)
        *batches, row = self.batches.few([*places, *spread, 0], [*all_groups, [again]])
        (self.rows, *self.alone), self.many = batches[:at], batches[at:]
        self.notes += [SEEDS.format(where="__getitem__", each="every row and epoch")] if self.batches.rows_seed else []
        self.draw(places, groups)
        self._note_other_rows(self.alone[0], row)

    def _note_other_rows(self, first: Any, again: Any) -> None:
        """Note rows that are others when they are read again. Those of a batch are then no sum of the same rows alone."""
        numbers: list[list[torch.Tensor]] = [[], []]
        for values, batch in zip(numbers, (first, again), strict=True):
            converted(batch, lambda tensor, values=values: values.append(_comparable(tensor)), self.batches.device)
        if not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*numbers, strict=False)):
            self.notes.append(ROWS_NOT_REPEATED.format(row="row 0"))
            self.rows_repeat = not getattr(self.batches.rows, "batched", False)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors in the rows."""
        tensors: list[torch.Tensor] = []
        converted(self.rows, tensors.append, self.batches.device)
        return tensors

    def refuse_gradients_of_rows(self) -> None:
        if any(tensor.requires_grad for tensor in self.tensors()):
            raise self.workload.unusable(
                "rows require a gradient (another model has made them, say): compute them under torch.no_grad(), or .detach() "
                "them"
            )

    def draw(self, places: list[int], groups: list[list[int]]) -> None:
        """If collate() is random, draw many batches: their averages show whether a loss is a mean or a sum."""
        if self.agreed(self.batches.collate_draws):
            self.notes += [] if self.config.shards else [DRAWN_FOR_A_BATCH]
            size = sum(tensor.nbytes for tensor in self.tensors())
            batches = self.batches.few(places, groups, max(4, min(DRAWS, SMALL // max(1, size))))  # all at once in memory
            self.tried = [batches[at : at + len(groups)] for at in range(0, len(batches), len(groups))]

    def spread(self) -> list[int]:
        """At most MANY row numbers from all over the data, whose first rows may be alike: sorted by class, or without a label.

        They are no more than a rank trains on at once: it may lack the memory for more.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        at_once = self.config.global_batch_size // ranks // self.config.accumulate
        # Under --sharding each forward gathers the whole model.
        most = MANY if self.config.sharding == "none" else FEW
        count = min(most, max(self.count, at_once), len(self.batches))
        return [len(self.batches) * number // count for number in range(count)]

    def _note_constants(self, names: list[str]) -> None:
        """Note loss parts that have no gradient and are not 0 over many rows: a part that a batch lacks may be 0."""
        with torch.no_grad():
            loss = self.outcome(self.many[0], 0)[1]
        self.notes += [CONSTANT_PART.format(name=name) for name in names if loss.get(name)]

    def _try_many(self, metrics: Mapping, notes: list[str]) -> None:
        """Compare loss and metrics of many rows with the sum of theirs alone. Of two rows a metric is often 0.

        metrics: those of two rows. notes: on the loss of two rows.
        """
        seed_generators(self.batches.device, DROPOUT, self.config.seed, 0)
        still, drawn, losses = generator_positions(), False, []
        results: list[Mapping] = []
        spread, usual = self.spread(), self.trying
        for rows, place in zip(self.many, (None, *spread), strict=True):
            self.trying = f"{len(spread)} of its rows" if place is None else f"row {place}"
            outputs, loss, batch = self.outcome(rows, 0)
            drawn = drawn or generator_positions() != still  # in some batches only: noise would look like a difference
            losses.append(_total(self.workload, loss)[1].double())
            results.append(self.workload.metrics(outputs, batch) if metrics else {})
            refuse_other_names(self.workload, results[-1], metrics)
        self.trying = usual
        if not drawn and not notes:
            self.notes += (notes := compare_losses(self.workload, torch.tensor([losses])))
        self.notes += compare_metrics(self.workload, results, not notes)
        if not drawn and not notes and self.config.sharding == "none":  # else a backward is collective
            totals = [partial(self.total, batch, 0) for batch in (self.rows, *self.alone)]
            self.notes += compare_gradients(self.model, *totals)

    def _try_last_step(self, at_first: torch.Tensor) -> None:
        """Note a loss of held-out rows that is another one after the last step."""
        steps = self.config.epochs * self.config.steps_of(len(self.batches))
        self.workload.core_sets(count_steps=lambda: steps - 1)  # what training asks for last, of a table, say
        self.trying += ", as in the last step"
        try:
            self.notes += [ANNEALED] if self.total(self.rows, 0) != at_first else []
        finally:
            del vars(self.workload)["count_steps"]

    def put_buffers_back(self) -> list[str]:
        """Restore the buffers. Returns the names of those that the model has changed so far."""
        self.changed = list(dict.fromkeys([*self.changed, *self.kept.put_back()]))
        return self.changed

    def look(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Try forward, loss, metrics and backward. Returns the names of several losses, and of the metrics."""
        workload = self.workload
        self.model.eval()
        with torch.no_grad():
            outputs, loss, batch = self.outcome(self.rows, 0)
            names, whole = _total(workload, loss)
            metrics = workload.metrics(outputs, batch)
            if not isinstance(metrics, Mapping):
                raise workload.unusable(f"metrics() should return a dictionary, and returned {type(metrics).__name__}")
            kept = kept_by(workload, self.model)
            workload.metrics(outputs, batch)
            self.moved = _changed(kept, kept_by(workload, self.model))
            refuse_unlike_sums(workload, metrics)
            _refuse_odd_names(workload, loss=names, metrics=metrics)
            if taken := metrics.keys() & {"loss", *(f"loss_{part}" for part in names)}:
                raise workload.unusable(f"metrics() has {', '.join(sorted(taken))}, the name of a loss: give it another")
            if self.count == 2 and self.agreed(self.rows_repeat):
                self.repeats = bool(whole == self.total(self.rows, 0))  # now: after many trials a counter is at its end
                draws = 1 if not self.tried and self.agreed(bool(whole == self.total(self.rows, 1))) else DRAWS
                tried = self.tried or [[self.rows, *self.alone]] * draws
                losses = [[self.total(batch, draw).double() for batch in batches] for draw, batches in enumerate(tried)]
                notes = compare_losses(workload, torch.tensor(losses))
                self.notes += notes
                if self.agreed(draws == 1):  # else noise would look like a difference
                    self._try_many(metrics, notes)
            if self.agreed(self.repeats):
                self._try_last_step(whole)
        del self.many[1:]
        self.model.train()
        loss = self.outcome(self.rows, 0)[1]
        total = _total(workload, loss)[1]
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise workload.unusable("loss() calls backward(), and the core does: take it out")
        if total.requires_grad:
            total.backward()
        if isinstance(loss, Mapping) and (constant := [name for name, part in loss.items() if not part.requires_grad]):
            self._note_constants(constant)
        _refuse_unused(workload, self.model)
        self.notes += self.notes_on_modes()
        return names, tuple(metrics)

    def notes_on_modes(self) -> list[str]:
        return [MODE.format(call=call, what=what) for mode, call, what in MODES if mode in self.modes]

    def cause_of(self, error: BaseException) -> str:
        """What the trial knows of an error's cause, or empty."""
        if "more than 1 value per channel" in str(error):  # of BatchNorm, which is evaluated in training mode
            return "; ".join(self.notes_on_modes())
        return unlike_the_model(self.workload, self.model) if re.search(OF_OTHER_TENSORS, str(error)) else ""

    @torch.enable_grad()  # as in training: what a model or loss counts, it may count only then
    def look_for_random_numbers(self) -> tuple[bool, list[str]]:
        """Whether the loss also draws from Python's or NumPy's generator, and notes."""

        def loss(seed: int, others: bool = False) -> float:
            self.put_buffers_back()
            return self.total(self.rows, seed, others).detach().nan_to_num().item()

        first, kept, plain = loss(0), kept_by(self.workload, self.model), kept_in(self.model)
        before = generator_positions()
        second = loss(0)
        # Even if the loss is the same: perhaps one row in ten is mixed with another.
        drawn = positions_of_others() != before[1:]
        moved = [*_changed(kept, kept_by(self.workload, self.model)), *self.moved]
        self.notes += _notes_on_kept([f"self.{name}" for name in dict.fromkeys(moved)], "workload")
        self.notes += _notes_on_kept(_changed(plain, kept_in(self.model)), "model")
        other = loss(1, others=True)
        seeds = seeded_anew(before, generator_positions())
        self.notes += [SEEDS.format(where="forward() or loss()", each="every batch")] if seeds else []
        if self.agreed(self.repeats or drawn):
            if self.agreed(first == second and not drawn):
                return False, [RANDOM] if first != other and not self.config.shards else []
            if self.agreed(loss(0, others=True) == loss(0, others=True)):
                return True, [] if self.config.shards else [DRAWN if self.agreed(first == second) else RANDOM]
        return False, [NOT_REPEATED]


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def notes_on_uncalled(workload: Workload) -> list[str]:
    """A note on methods that nothing calls, such as Lightning's training_step, configure_optimizers: training ignores them."""
    if not workload.file:
        return []
    text = b"".join(sources_of(workload.file)).decode(errors="replace")
    own = [name for name, value in vars(type(workload)).items() if callable(value) and not name.startswith("_")]
    names = [name for name in own if name not in YOURS and not re.search(rf"(\.|[\"']){name}\b", text)]
    return [UNCALLED.format(names=", ".join(names[:6]))] if names else []


def notes_on_rows(others: list[str], of_data: list[str], held_out: bool, notes: list[str]) -> list[str]:
    """Notes on rows, then the probe's notes. others: rows that differed when they were read again for a fingerprint. of_data:
    other notes on the data. held_out: whether there are held-out rows.
    """
    known = [ROWS_NOT_REPEATED.format(row="row 0")] if others else []
    known += [] if held_out else [ANNEALED]
    of_rows = [ROWS_NOT_REPEATED.format(row=row) + NOT_RESUMED for row in others[:1]]
    return of_rows + of_data + [note for note in notes if note not in known]


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without NaN; empty for a ragged or sparse one, which torch cannot compare."""
    return tensor.nan_to_num() if dense(tensor) else torch.zeros(0)


def kept_by(workload: Workload, model: nn.Module) -> dict[str, list]:
    """The workload's own attributes by name: numbers; for each tensor that is not the model's, its address and how often it was
    written.
    """
    of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[str, list] = {}
    for name, value in vars(workload).items():
        if isinstance(value, list | tuple | set | dict) and len(value) > LONG:
            kept[name] = [len(value)]
            continue
        parts = tree_leaves([*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else value)
        tensors = [part for part in parts if isinstance(part, torch.Tensor) and id(part) not in of_model]
        numbers = [part for part in parts if isinstance(part, bool | int | float)]
        kept[name] = [*numbers, *(_version(tensor) for tensor in tensors)]
    return kept


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor is, and how often it was written; torch does not count that for all."""
    counted = dense(tensor) and not tensor.is_inference()
    return (tensor.data_ptr(), tensor._version) if counted else (id(tensor), 0)


def kept_in(model: nn.Module) -> dict[str, list]:
    """Plain attributes of the model's modules, by name: numbers, strings, and checksums of tensors that are no buffers."""
    of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own, kept = vars(nn.Module()), {}
    for place, module in model.named_modules():
        of_torch = type(module).__module__.partition(".")[0] == "torch"
        for name, value in vars(module).items():
            if name not in own and not (of_torch and name.startswith("_")):
                parts = [part for part in tree_leaves(value) if id(part) not in of_model]
                kept[f"{place}.{name}".lstrip(".")] = [plain(part) for part in parts]
    return kept


def plain(part: Any) -> Any:
    """A value for comparing a part: a number, a string, or a checksum of a tensor up to LARGE numbers; else None."""
    if type(part) is torch.Tensor and dense(part) and part.numel() <= LARGE:
        content = part.detach().cpu().contiguous()  # the name keeps it alive: memory() does not
        return part.shape, zlib.crc32(memory(content))
    return part if isinstance(part, bool | int | str) else repr(part) if isinstance(part, float) else None  # NaN equals NaN


def _changed(kept: dict[str, list], now: dict[str, list]) -> list[str]:
    return [name for name in now if kept.get(name) != now[name]]


def _notes_on_kept(names: list[str], owner: str) -> list[str]:
    return [KEPT.format(names=", ".join(names[:6]), owner=owner)] if names else []


def notes_on_schedule(workload: Workload, model: nn.Module, total_steps: int) -> list[str]:
    """Notes on the schedule's first step, tried on a copy of the workload, so that its counters stay. Raises WorkloadError."""
    kept: list[dict] = []
    with blaming(workload, "schedule()"), torch.no_grad():
        tried = copy.copy(workload)
        for name, value in vars(workload).items():
            vars(tried)[name] = tree_map_only(torch.Tensor, lambda part: part.clone() if part.numel() <= LARGE else part, value)
        for _ in range(2):  # twice: an attribute made at the first call is no change
            factor = factor_of(tried, 0, total_steps)
            kept.append(kept_by(tried, model))
        steps = range(0, total_steps, max(1, total_steps // 16))
        none = factor == 0 and not any(factor_of(tried, step, total_steps) for step in steps)  # a warm-up may begin at 0
    is_rate = workload.overrides("schedule") and factor == workload.config.lr != 1
    notes = [RATE.format(lr=factor)] if is_rate else [NO_RATE.format(last=steps[-1])] if none else []
    return notes + _notes_on_kept([f"self.{name}" for name in _changed(*kept)], "workload")


def _total(workload: Workload, loss: Any) -> tuple[tuple[str, ...], torch.Tensor]:
    named = loss if isinstance(loss, Mapping) else {"": loss}
    if not named:
        raise workload.unusable("loss() returned an empty dictionary, and should name a loss")
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise workload.unusable(
                f"loss(){f' {name!r}' if name else ''} returned {what}, and should return a scalar: the sum over the rows of "
                "the batch"
            )
    return (tuple(named) if named is loss else ()), sum(value.reshape(()) for value in named.values())


def _refuse_odd_names(workload: Workload, **returned: Iterable) -> None:
    """Raises WorkloadError for a name that cannot stand in a log line name=value, or name a column."""
    for method, names in returned.items():
        if odd := [name for name in names if not re.fullmatch(r"[\w./+-]+", str(name))]:
            raise workload.unusable(f"{method}() names {odd[0]!r}, and should take letters, digits and _ . / + - alone")


def _refuse_unused(workload: Workload, model: nn.Module) -> None:
    for name, value in vars(workload).items():
        parts = [value] if isinstance(value, nn.Parameter) else value.parameters() if isinstance(value, nn.Module) else ()
        if any(part.grad is not None for part in parts if all(part is not own for own in model.parameters())):
            raise workload.unusable(
                f"self.{name} has a gradient, and is no part of the model, which alone is trained: make it one in model(), or "
                "detach it"
            )
    _refuse_hidden(workload, model, lambda part: part.grad is not None)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    sparse = [name for name, parameter in trained.items() if parameter.grad is not None and parameter.grad.is_sparse]
    if sparse:
        raise workload.unusable(
            f"the gradient of {', '.join(sparse)} is sparse, and ranks add up dense ones: make the layer with sparse=False"
        )
    if not trained or len(unused) == len(trained):
        raise workload.unusable(
            "the loss has no gradient for any parameter: is it cut off (detach)? If a batch may lack what counts, return "
            "outputs.sum() * 0 for it"
        )
    if unused and not workload.unused_parameters:
        raise workload.unusable(
            f"no gradient for {', '.join(unused[:6])}{' and on' if len(unused) > 6 else ''}: use them in the loss, freeze them "
            "(requires_grad_(False)), or set unused_parameters = True in the class"
        )


def unlike_the_model(workload: Workload, model: nn.Module) -> str:
    """Words on an attribute of the workload whose tensors are elsewhere, or in another precision than the model's. Or empty."""
    of_model = next(model.parameters(), torch.zeros(0))
    for name, value in vars(workload).items():
        parts = tree_leaves([*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else value)
        for part in (part for part in parts if isinstance(part, torch.Tensor)):
            if part.device != of_model.device or (part.is_floating_point() and part.dtype != of_model.dtype):
                kinds = [f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}" for tensor in (part, of_model)]
                return (
                    f"self.{name} is {kinds[0]}, and the model {kinds[1]}: only the model is moved and converted, so call "
                    f"self.{name}.to(next(model.parameters())) in forward()"
                )
    return ""


def _refuse_hidden(workload: Workload, model: nn.Module, trained: Callable) -> None:
    """Raises WorkloadError for layers in a plain list or dictionary, in which torch does not find them."""
    own = {id(part) for part in model.parameters()}
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                hidden = [leaf for leaf in tree_leaves(value) if isinstance(leaf, nn.Parameter | nn.Module)]
                parts = [part for leaf in hidden for part in (leaf.parameters() if isinstance(leaf, nn.Module) else [leaf])]
                if any(trained(part) and id(part) not in own for part in parts):
                    raise workload.unusable(
                        f"{f'{place}.{name}'.lstrip('.')} of the model is neither trained nor saved: make the "
                        f"{type(value).__name__} an nn.ModuleList, nn.ModuleDict or nn.ParameterList, or freeze it "
                        "(requires_grad_(False))"
                    )


def bits_of_trained(model: nn.Module) -> dict[str, float]:
    """Checksums of the trained parameters, by name. Of a large one, how often it was written; writes to .data do not count."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: checksum([p]).item() if p.numel() <= LARGE else p._version for name, p in trained.items()}


def names_of_written(model: nn.Module, before: dict[str, float]) -> list[str]:
    return [name for name, bits in bits_of_trained(model).items() if bits != before.get(name)]


def notes_on_written(names: list[str]) -> list[str]:
    """They are not restored. The model's own flag says that they are initialized, and no snapshot holds it: if the flag were
    reset, too, a resumed run would initialize its trained parameters again.
    """
    return [WRITTEN.format(names=", ".join(names[:6]))] if names else []


def flags_of(model: nn.Module) -> dict[tuple[str, str], bool]:
    """The booleans that modules keep as plain attributes, by module and name."""
    flags = {(place, name): value for place, module in model.named_modules() for name, value in vars(module).items()}
    return {key: value for key, value in flags.items() if isinstance(value, bool) and key[1] != "training"}


def notes_on_flags(model: nn.Module, before: dict[tuple[str, str], bool], changed: list[str]) -> list[str]:
    """A note on flags that the trial set beside a buffer that it put back. changed: names of these buffers."""
    moved = {name.rpartition(".")[0] for name in changed}
    found = [key for key, value in flags_of(model).items() if value != before.get(key, False) and key[0] in moved]
    return [FLAG.format(names=", ".join(".".join(filter(None, key)) for key in found[:6]))] if found else []


def notes_on_buffers(model: nn.Module, changed: list[str]) -> list[str]:
    """Notes on statistics of batches and on other buffers. changed: names of those that a forward in training changes."""
    normal = {
        name: kind.__name__
        for name, module in model.named_modules()
        for kind in BATCH_STATISTICS
        if isinstance(module, kind)
        if module.running_mean is None or f"{name}.running_mean".lstrip(".") in changed  # else frozen
    }
    kinds = sorted({*normal.values()})
    own = [name for name in changed if name.rpartition(".")[0] not in normal]
    notes, saved = [], saved_buffers(model)
    if lost := [name for name in changed if name not in saved]:
        notes.append(
            f"no snapshot holds {', '.join(lost[:6])} (persistent=False), which the model changes in training: a run that goes "
            "on begins with it anew"
        )
    if kinds:
        notes.append(
            f"{', '.join(kinds)} uses statistics of a rank's own rows: losses depend on the world size; GroupNorm does not, "
            f"nor SyncBatchNorm on accelerators"
        )
    if own:
        notes.append(
            f"the model changes its buffers {', '.join(own[:6])}{' and on' if len(own) > 6 else ''} in training, and all ranks "
            f"take rank 0's: losses depend on the world size if these depend on its rows"
        )
    return notes

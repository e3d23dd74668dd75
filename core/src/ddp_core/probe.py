"""Tries a workload on a few rows before training: refuses silent mistakes, and notes which promises the workload breaks.

The trial does not change training: buffers, gradients and random numbers are as before.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from ddp_core.attributes import LARGE, changes, note_changes, of_modules, of_workload, refuse_beside, unlike_the_model
from ddp_core.batches import SMALL, Batches, converted
from ddp_core.comparison import compare_gradients, compare_losses, compare_metrics, refuse_unlike_sums, trained_parameters
from ddp_core.config import refuse_other_default_device
from ddp_core.errors import WorkloadError
from ddp_core.order import DROPOUT, generator_positions, positions_of_others, seed_generators, seeded_anew
from ddp_core.replicas import BITS, checksum
from ddp_core.state import Kept, dense, saved_buffers
from ddp_core.workload import (
    NO_SHARDS,
    Workload,
    blame,
    blaming,
    factor_of,
    listed,
    note_on,
    outputs_of,
    parts_of,
    refuse_other_names,
    row_of,
    unknown_to_shards,
)

MANY = 16  # rows: so many that a loss or a metric is seldom 0
FEW = 4
DRAWS = 32  # evaluations of a loss with random noise, to tell a mean from a sum
RANDOM = (
    "random numbers are drawn in the model or loss (dropout, noise): the generators of torch, Python and NumPy are seeded at "
    "each step, but losses depend on the world size; not so with --reduction canonical"
)
ROW_NOT_REPEATED = (
    "{row} was another when it was read again: it is drawn from a generator of its own (torch.Generator, "
    "numpy.random.default_rng), or __getitem__ changes it in place (.clone()): a run does not repeat; torch's, Python's and "
    "NumPy's own generators are seeded for each row"
)
SEEDS = "{where} seeds a generator (torch.manual_seed, random.seed), and draws the same for {each}: the core seeds them"
ANNEALED = (
    "the loss of held-out rows changes with self.steps_done, and chooses best.safetensors: where torch.is_grad_enabled() is "
    "false, give it one measure throughout, the last one, say"
)
MODES = ((True, "train", "on where held-out rows are evaluated"), (False, "eval", "off where it is trained"))
OF_OTHER_TENSORS = "device|dtype|meta|scalar type|Input type"  # in torch's errors about tensors that do not go together
BATCH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def probe(model: nn.Module, batches: Batches, autocast, agreed: Callable) -> "Trial":
    """Raises WorkloadError for a loss that is no scalar or a mean, a parameter without a gradient, rows that do not collate.

    agreed: returns rank 0's value of a condition that may differ between ranks, if a forward pass is collective (--sharding).
    """
    workload = batches.workload
    refuse_other_default_device(workload)
    if (dtype := torch.get_default_dtype()) != torch.float32:  # optimizers count steps in it, and fused ones then fail
        raise workload.unusable(f"torch's default dtype is {dtype}: take set_default_dtype out, pass --precision fp64")
    trial, trained, attributes = Trial(model, batches, autocast, agreed), bits_of_trained(model), of_modules(model)
    try:
        trial.read()
        trial.evaluate()
        trial.train()
        trial.repeat()
    except (Exception, SystemExit) as error:
        raise trial.explained(error) from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        trial.put_buffers_back()
    if trial.sharded and (moved := [name for name in trial.buffers if name.endswith("n_averaged")]):
        raise workload.unusable(
            f"forward() moves an average of the weights ({moved[0]}), and they are in parts: pass --sharding none"
        )
    trial.notes += notes_on_buffers(model, trial.buffers) + notes_on_flags(attributes, of_modules(model), trial.buffers)
    # They are not restored. The model's own flag says that they are initialized, and no snapshot holds it: if the flag were
    # reset, too, a resumed run would initialize its trained parameters again.
    trial.written = changes(trained, bits_of_trained(model))
    trial.notes += note_on(
        trial.written,
        "the model writes its parameters {names} when it is called: an initialization by rows has seen only the few that are "
        "tried, and what a rank writes by its own rows later the others do not have; compute it in model()",
    )
    del trial.kept, trial.alone, trial.many, trial.tried  # frees their memory: the run keeps the trial
    return trial


class Trial:
    """Tries a workload on a few rows. Its attributes are what it found: a run keeps it."""

    def __init__(self, model: nn.Module, batches: Batches, autocast, agreed: Callable):
        self.model, self.batches, self.autocast, self.agreed = model, batches, autocast, agreed
        self.workload, self.config, self.sharded = batches.workload, batches.config, batches.config.sharding != "none"
        self.kept = Kept(model, averaged=not self.sharded)
        self.losses: tuple[str, ...] = ()  # names of several losses, none of one
        self.metrics: tuple[str, ...] = ()
        self.buffers: list[str] = []  # names of those that a forward in training changes: BatchNorm's statistics
        self.written: list[str] = []  # names of the trained parameters that the model writes when it is called
        self.others = False  # whether the loss also draws from Python's or NumPy's generator
        self.repeats = True  # whether rows and loss are the same when they are tried again with the same seeds
        self.notes: list[str] = []  # which of the usual promises this workload breaks
        self.modes: set[bool] = set()  # training modes that forward and loss set on a part of the model
        self.count = min(2, len(batches))
        self.trying = f"{self.count} of its rows"  # for messages
        # Then many rows from all over the data, whose first ones may be alike: sorted by class, or without a label. They are no
        # more than a rank trains on at once: it may lack the memory. Under --sharding each forward gathers the whole model.
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        at_once = self.config.global_batch_size // ranks // self.config.accumulate
        many = min(FEW if self.sharded else MANY, max(self.count, at_once), len(batches))
        self.spread = [len(batches) * number // many for number in range(many)]

    def read(self) -> None:
        """Read the rows to try, together and each alone, and the first one again: the same seeds should give the same row."""
        self.notes += note_on(
            self.batches.rounded,
            "column {names} of fp64 has less than three digits left of what tells rows apart, once rounded: subtract a mean "
            "(of times in seconds, say), or pass --precision fp64",
        )
        batched = getattr(self.batches.rows, "batched", False)
        first = [*range(self.count)]
        *many, again = range(self.count, self.count + len(self.spread) + 1)  # places among the rows that are read
        groups = [first, *([place] for place in first)]
        all_groups = [*groups, many, *([place] for place in many), [again]]
        *read, row = self.batches.few([*first, *self.spread, 0], all_groups)
        (self.rows, *self.alone), self.many = read[: len(groups)], read[len(groups) :]
        tensors, *pair = [self._tensors(batch) for batch in (self.rows, self.alone[0], row)]
        if any(tensor.requires_grad for tensor in tensors):
            raise self.workload.unusable("rows require a gradient (another model has made them, say): .detach() them")
        plain = [tensor for tensor in tensors if dense(tensor) and tensor.element_size() in BITS]  # complex128 is not
        self.checksum = checksum(tensor.resolve_conj().resolve_neg() for tensor in plain).item() % 2**32
        seeded = batched or self.config.row_seeds != "off"
        if seeded and self.batches.rows_seed:
            self.notes.append(SEEDS.format(where="__getitem__", each="every row and epoch"))
        self.tried: list[list[Any]] = []  # rows and alone, drawn anew several times, if collate() is random
        if self.agreed(self.batches.collate_draws):  # then averages show whether a loss is a mean or a sum
            note = (
                "collate() draws random numbers, which follow the last row of a batch: losses depend on the world size; not so "
                "of what __getitem__ draws, nor with --reduction canonical"
            )
            self.notes += [] if self.config.shards else [note]
            draws = max(4, min(DRAWS, SMALL // max(1, sum(tensor.nbytes for tensor in tensors))))  # all at once in memory
            drawn = self.batches.few(first, groups, draws)
            self.tried = [drawn[at : at + len(groups)] for at in range(0, len(drawn), len(groups))]
        pair = [[part.nan_to_num() for part in parts if dense(part)] for parts in pair]
        same = all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(*pair, strict=False))
        if seeded and not same:
            self.notes.append(ROW_NOT_REPEATED.format(row="row 0"))
            self.repeats = False
        self.comparable = same or not batched  # else a batch and its rows alone have been drawn apart

    def _tensors(self, batch: Any) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        converted(batch, tensors.append, self.batches.device)
        return tensors

    @torch.no_grad()
    def evaluate(self) -> None:
        """Try loss and metrics as of held-out rows, and compare those of rows together with those of each alone."""
        workload = self.workload
        self.model.eval()
        outputs, loss, batch = self.outcome(self.rows, 0)
        self.losses = tuple(loss) if isinstance(loss, Mapping) else ()
        whole = parts_of(loss, self.losses, workload)[0]
        metrics = workload.metrics(outputs, batch)
        if not isinstance(metrics, Mapping):
            raise workload.unusable(f"metrics() should return a dictionary, and returned {type(metrics).__name__}")
        self.metrics = tuple(metrics)
        attributes = of_workload(workload, self.model)
        workload.metrics(outputs, batch)
        self.moved = changes(attributes, of_workload(workload, self.model))  # attributes that metrics() changes
        refuse_unlike_sums(workload, metrics)
        _refuse_odd_names(workload, loss=self.losses, metrics=metrics)
        if taken := metrics.keys() & {"loss", *(f"loss_{part}" for part in self.losses)}:
            raise workload.unusable(f"metrics() has {', '.join(sorted(taken))}, the name of a loss: give it another")
        self.steady = True  # whether the loss is the same the second time
        if self.count == 2 and self.agreed(self.comparable):
            self.steady = bool(whole == self.total(self.rows, 0))  # now: after many trials a counter is at its end
            draws = 1 if not self.tried and self.agreed(bool(whole == self.total(self.rows, 1))) else DRAWS
            tried = self.tried or [[self.rows, *self.alone]] * draws
            losses = [[self.total(batch, draw).double() for batch in batches] for draw, batches in enumerate(tried)]
            notes = compare_losses(workload, torch.tensor(losses))
            self.notes += notes
            if self.agreed(draws == 1):  # else noise would look like a difference
                self._evaluate_many(notes)
        if self.agreed(self.steady):
            steps = self.config.epochs * self.config.steps_of(len(self.batches))
            workload.core_sets(count_steps=lambda: steps - 1)  # what training asks for last, of a table, say
            self.trying += ", as in the last step"
            try:
                self.notes += [ANNEALED] if self.total(self.rows, 0) != whole else []
            finally:
                del vars(workload)["count_steps"]

    def _evaluate_many(self, notes: list[str]) -> None:
        """The same with many rows: of two rows a metric is often 0. notes: on the loss of two rows."""
        seed_generators(self.batches.device, DROPOUT, self.config.seed, 0)
        still, drawn, losses = generator_positions(), False, []
        results: list[Mapping] = []
        usual = self.trying
        for rows, place in zip(self.many, (None, *self.spread), strict=True):
            self.trying = f"{len(self.spread)} of its rows" if place is None else f"row {place}"
            outputs, loss, batch = self.outcome(rows, 0)
            drawn = drawn or generator_positions() != still  # in some batches only: noise would look like a difference
            losses.append(parts_of(loss, self.losses, self.workload)[0].double())
            results.append(self.workload.metrics(outputs, batch) if self.metrics else {})
            refuse_other_names(self.workload, results[-1], self.metrics)
        self.trying = usual
        if not drawn and not notes:
            self.notes += (notes := compare_losses(self.workload, torch.tensor([losses])))
        self.notes += compare_metrics(self.workload, results, not notes)
        if not drawn and not notes and not self.sharded:  # else a backward is collective
            totals = [partial(self.total, batch, 0) for batch in (self.rows, *self.alone)]
            self.notes += compare_gradients(self.model, *totals)

    def train(self) -> None:
        """Try forward, loss and backward as in training."""
        del self.many[1:]
        self.model.train()
        loss = self.outcome(self.rows, 0)[1]
        total = parts_of(loss, self.losses, self.workload)[0]
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise self.workload.unusable("loss() calls backward(), and the core does: take it out")
        if total.requires_grad:
            total.backward()
        if constant := [name for name in self.losses if not getattr(loss[name], "requires_grad", False)]:
            with torch.no_grad():  # a part that these rows lack may be 0
                loss = self.outcome(self.many[0], 0)[1]
            self.notes += [
                f"part {name!r} of loss() has no gradient, yet counts in the loss, which chooses best.safetensors: move "
                "it to metrics()"
                for name in constant
                if loss.get(name)
            ]
        _refuse_unused(self.workload, self.model)
        self.notes += self.notes_on_modes()

    @torch.enable_grad()  # as in training: what a model or loss counts, it may count only then
    def repeat(self) -> None:
        """Compare calls with the same rows, and the same seeds or others."""

        def loss(seed: int, others: bool = False) -> float:
            self.put_buffers_back()
            return self.total(self.rows, seed, others).detach().nan_to_num().item()

        first, of_self, of_model = loss(0), of_workload(self.workload, self.model), of_modules(self.model)
        before = generator_positions()
        second = loss(0)
        # Even if the loss is the same: perhaps one row in ten is mixed with another.
        drawn = positions_of_others() != before[1:]
        moved = dict.fromkeys([*changes(of_self, of_workload(self.workload, self.model)), *self.moved])
        self.notes += note_changes([*moved], "workload", "batch")
        self.notes += note_changes(changes(of_model, of_modules(self.model)), "model", "batch")
        other = loss(1, others=True)
        seeds = seeded_anew(before, generator_positions())
        self.notes += [SEEDS.format(where="forward() or loss()", each="every batch")] if seeds else []
        random = [] if self.config.shards else [RANDOM]
        if self.agreed(self.steady or drawn):
            if self.agreed(first == second and not drawn):
                self.notes += random if first != other else []
                return
            if self.agreed(loss(0, others=True) == loss(0, others=True)):
                self.notes += random
                self.others = True
                return
        self.notes.append(
            "the same rows and seeds gave another loss the second time: the model or loss draws from a generator of its own "
            "(torch.Generator, numpy.random.default_rng), keeps something from call to call, or uses kernels that do not "
            "repeat (--deterministic): a run does not repeat, nor resume, bit for bit"
        )
        self.repeats = False

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
            for module, mode in modes:
                # A frozen part may always be in eval mode.
                if module.training != mode and (module.training or any(p.requires_grad for p in module.parameters())):
                    self.modes.add(module.training)
        return outputs, loss, batch

    def total(self, batch: Any, seed: int, others: bool = False) -> torch.Tensor:
        return parts_of(self.outcome(batch, seed, others)[1], self.losses, self.workload)[0]

    def put_buffers_back(self) -> None:
        self.buffers = [*dict.fromkeys([*self.buffers, *self.kept.put_back()])]

    def notes_on_modes(self) -> list[str]:
        return [
            f"forward() or loss() calls {call}() on the model, or a part of it: its dropout and BatchNorm are {what}; take it "
            "out, or put the mode back after it: the core calls both"
            for mode, call, what in MODES
            if mode in self.modes
        ]

    def explained(self, error: BaseException) -> BaseException:
        """The error in one line, with what the trial knows of its cause."""
        workload, cause = self.workload, ""
        if self.sharded and (what := unknown_to_shards(error)):
            return WorkloadError(f"--sharding {self.config.sharding}: {NO_SHARDS.format(what=what)}")
        if re.search(OF_OTHER_TENSORS, str(error)):
            refuse_beside(workload, self.model, "model", lambda part: part.requires_grad)  # they were not moved or converted
            cause = unlike_the_model(workload, self.model)
        if "more than 1 value per channel" in str(error):  # of BatchNorm, which is evaluated in training mode
            cause = "; ".join(self.notes_on_modes())
        row, of_file = row_of(error), f"--workload {workload.name}"
        blamed = blame(error, workload.file, f"row {row} of {of_file}" if row else f"{of_file}, tried on {self.trying}")
        return WorkloadError(f"{blamed}; {cause}") if cause and blamed is not error else blamed


# ---- refusals -----------------------------------------------------------------------------------------------------


def _refuse_odd_names(workload: Workload, **returned: Iterable) -> None:
    """Raises WorkloadError for a name that cannot stand in a log line name=value, or name a column."""
    for method, names in returned.items():
        if odd := [name for name in names if not re.fullmatch(r"[\w./+-]+", str(name))]:
            raise workload.unusable(f"{method}() names {odd[0]!r}, and should take letters, digits and _ . / + - alone")


def _refuse_unused(workload: Workload, model: nn.Module) -> None:
    for owner in ("workload", "model"):
        refuse_beside(workload, model, owner, lambda part: part.grad is not None)
    trained = trained_parameters(model)
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    if sparse := [name for name, p in trained.items() if p.grad is not None and p.grad.is_sparse]:
        raise workload.unusable(
            f"the gradient of {listed(sparse)} is sparse, and ranks add up dense ones: make the layer with sparse=False"
        )
    if len(unused) == len(trained):
        raise workload.unusable(
            "the loss has no gradient for any parameter: is it cut off (detach)? If a batch may lack what counts, return "
            "outputs.sum() * 0 for it"
        )
    if unused and not workload.unused_parameters:
        raise workload.unusable(
            f"no gradient for {listed(unused)}: use them in the loss, freeze them (requires_grad_(False)), or set "
            "unused_parameters = True in the class"
        )


# ---- notes --------------------------------------------------------------------------------------------------------


def notes_on_rows(others: list[str], of_data: list[str], held_out: bool, notes: list[str]) -> list[str]:
    """Notes on rows, then the probe's notes. others: rows that differed when they were read again for a fingerprint. of_data:
    other notes on the data. held_out: whether there are held-out rows.
    """
    of_rows = [
        f"{ROW_NOT_REPEATED.format(row=row)}; if that generator is not seeded, no run can be resumed: the fingerprint differs"
        for row in others[:1]
    ]
    unneeded = [ROW_NOT_REPEATED.format(row="row 0")] * bool(others) + [ANNEALED] * (not held_out)
    return of_rows + of_data + [note for note in notes if note not in unneeded]


def notes_on_schedule(workload: Workload, model: nn.Module, total_steps: int) -> list[str]:
    """Notes on the schedule's first step, tried on a copy of the workload, so that its counters stay. Raises WorkloadError."""
    attributes: list[dict] = []
    with blaming(workload, "schedule()"), torch.no_grad():
        tried = copy.copy(workload)
        for name, value in vars(workload).items():
            vars(tried)[name] = tree_map_only(torch.Tensor, lambda part: part.clone() if part.numel() <= LARGE else part, value)
        for _ in range(2):  # twice: an attribute made at the first call is no change
            factor = factor_of(tried, 0, total_steps)
            attributes.append(of_workload(tried, model))
        steps = range(0, total_steps, max(1, total_steps // 16))
        none = factor == 0 and not any(factor_of(tried, step, total_steps) for step in steps)  # a warm-up may begin at 0
    notes, lr = note_changes(changes(*attributes), "workload", "batch"), workload.config.lr
    if workload.overrides("schedule") and factor == lr != 1:
        notes.append(f"schedule() returned --lr {lr:g} itself at step 0: it should return a factor, which multiplies it")
    if none:
        notes.append(
            f"schedule() returned 0 at every step that was tried, from 0 to {steps[-1]}: nothing is trained (// in place of /?)"
        )
    return notes


def bits_of_trained(model: nn.Module) -> dict[str, float]:
    """Checksums of the trained parameters, by name. Of a large one, how often it was written; writes to .data do not count."""
    trained = trained_parameters(model).items()
    return {name: checksum([p]).item() if p.numel() <= LARGE else p._version for name, p in trained}


def notes_on_flags(before: Mapping[str, list], now: Mapping[str, list], buffers: list[str]) -> list[str]:
    """A note on flags that the trial set beside a buffer that it put back. before, now: attributes. buffers: names of these."""
    beside = {name.rpartition(".")[0] for name in buffers}
    flags = [name for name, value in now.items() if [*map(type, value)] == [bool] and name.rpartition(".")[0] in beside]
    return note_on(
        [name for name in flags if now[name] != before.get(name, [False])],
        "the rows that were tried set {names} of the model, and the buffers beside it were put back: what it calls initialized "
        "is not; make the flag a buffer (register_buffer), which is put back, too, and saved",
    )


def notes_on_buffers(model: nn.Module, changed: list[str]) -> list[str]:
    """Notes on statistics of batches and on other buffers. changed: names of those that a forward in training changes."""
    normal = {
        name: kind.__name__
        for name, module in model.named_modules()
        for kind in BATCH_STATISTICS
        if isinstance(module, kind)
        if module.running_mean is None or f"{name}.running_mean".lstrip(".") in changed  # else frozen
    }
    saved = saved_buffers(model)
    notes = note_on(
        [name for name in changed if name not in saved],
        "no snapshot holds {names} (persistent=False), which the model changes in training: a resumed run begins with it anew",
    )
    notes += note_on(
        sorted({*normal.values()}),
        "{names} uses statistics of a rank's own rows: losses depend on the world size; GroupNorm does not, nor SyncBatchNorm "
        "on accelerators",
    )
    return notes + note_on(
        [name for name in changed if name.rpartition(".")[0] not in normal],
        "the model changes its buffers {names} in training, and all ranks take rank 0's: losses may depend on the world size",
    )

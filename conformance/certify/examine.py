"""Checks on a few rows of a workload, in one separate process, in fp64: read twice, split, trained on, and read again.

Findings here are certain and name a line of the file. Effects of several ranks are measured by runs.py.
"""

import collections
import functools
import hashlib
import itertools
import math
import random
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from conformance.certify.source import Source

ROWS = 24  # rows that are examined closely
SCANNED, SECONDS = 4096, 15.0  # rows checked for non-finite numbers and for duplicates, and the time for that in seconds
WHOLE = 2**26  # bytes of an array that are all hashed; of a larger one, often a mapped file, only the beginning and samples
EXACT = 1e-9  # relative: the order of additions in fp64 changes a sum by less


def examine(argv: list[str]) -> dict:
    """findings: dictionaries of kind, says, line. notes: facts from the flags and the data. failed: why it ended early."""
    examination = Examination(argv)
    failed = ""
    try:
        examination.all()
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    return dict(findings=examination.findings, notes=examination.notes, failed=failed)


class Examination:
    def __init__(self, argv: list[str]):
        self.argv = argv
        self.findings: list[dict] = []
        self.notes: dict[str, Any] = {}

    def find(self, kind: str, says: str, line: int | None = None) -> None:
        self.findings.append(dict(kind=kind, says=says, line=line))

    def all(self) -> None:
        from ddp_core import data
        from ddp_core.batches import Batches
        from ddp_core.config import choose, parse
        from ddp_core.order import seed_everything

        settings = self.settings()
        self.workload = choose(self.argv)
        self.source = Source(self.workload.file)
        own = parse(self.argv, 1, workload=self.workload)
        names = ("precision", "epochs", "steps_per_epoch", "global_batch_size", "accumulate")
        self.notes |= dict(file=str(self.workload.file)) | {name: getattr(own, name) for name in names}
        self.notes["per_rank"] = parse(self.argv, 2, workload=self.workload).global_batch_size != own.global_batch_size
        self.config = config = parse([*self.argv, "--precision", "fp64"], 1, workload=self.workload)
        seed_everything(config.seed)
        train, held_out = data.of_workload(self.workload, config)
        self.notes["row_by_row"] = not getattr(train, "batched", False)
        cpu, fp64 = torch.device("cpu"), torch.float64
        self.train = Batches(train, self.workload, config, cpu, fp64)
        self.held_out = Batches(held_out, self.workload, config, cpu, fp64) if held_out is not None and len(held_out) else None
        rows = self.rows()
        seed_everything(config.seed)
        self.model = self.workload.model(config).to(fp64)
        parameters = {name for name, _ in self.model.named_parameters()}
        self.sums()
        self.optimizer = self.workload.optimizer(self.model, config)
        self.steps(0, 1)  # the first step may create variables once; those are no state
        before = self.outside()
        self.steps(1, 3)
        self.new_parameters(parameters)
        self.state(before)
        if rows and rows != self.hashes():
            self.find("in-place", "rows are others after they were trained on: something changes them in place", self.changed())
        self.schedule()
        self.settings_changed(settings)

    def new_parameters(self, before: set[str]) -> None:
        if new := {name for name, _ in self.model.named_parameters()} - before:
            line = self.source.word("Parameter(", "nn.", "Linear(", within="forward")
            self.find("parameter", f"{', '.join(sorted(new))} is made in forward(): make it where the model is made", line)

    def state(self, before: dict[str, str]) -> None:
        saved = {f"model.{name}" for name in self.model.state_dict()}
        for name, value in self.outside().items():
            if name in before and before[name] != value and name not in saved:
                self.find("state", f"{name} changes in training, and no snapshot has it", self.source.assignment(name))

    def settings_changed(self, before: dict[str, str]) -> None:
        changes = []
        for name, value in self.settings().items():
            if value != before[name]:
                word = name.rpartition(".")[2]
                changes.append((self.source.word(f"{word} =", f"set_{word}", f"use_{word}"), name, value))
        for line, name, value in sorted(changes, key=lambda entry: entry[0] is None)[:1]:
            self.find("setting", f"the file sets {name} to {value}", line)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def hashes(self) -> list[str]:
        """A hash of each of the first training rows, read by itself, with its random numbers."""
        return [fingerprint(self.train.few([row], [[0]])[0]) for row in range(min(ROWS, len(self.train)))]

    def bare(self, batches, row: int) -> Any:
        """A row, read with the same seed for every row, so that equal rows look equal in spite of random noise."""
        from ddp_core.order import seed_generators

        if getattr(batches.rows, "batched", False):
            return batches.few([row], [[0]])[0]
        seed_generators(batches.device, 8, others=True)
        return self.workload.collate([batches.rows[row]])

    def held(self) -> dict[str, str]:
        """Hashes of the training rows and of their attributes."""
        rows = self.train.rows
        return {name: fingerprint(value) for name, value in [*attributes(rows), *([("them", rows)] if plain(rows) else [])]}

    def rows(self) -> list[str]:
        """Rows must be equal when read again, and finite; held-out rows must occur once. Returns hashes() if these repeat."""
        held, first = self.held(), self.hashes()
        same = first == self.hashes()
        changed = [name for name, value in self.held().items() if held.get(name) != value]
        if not same:
            says = "a row is another when it is read again with the same seeds"
            if changed:
                self.find("in-place", f"{says}: reading it changes {', '.join(changed)}", self.changed())
            else:
                self.find("rows", says)
        elif changed:
            says = f"reading rows changes {', '.join(changed)}: what is drawn for a row is kept there, in this process alone"
            self.find("kept", says, self.source.assignment(f"self.{changed[0]}"))
        scanned: dict[str, list[tuple[str, int]]] = {}
        self.notes["looked_through"], began = {}, time.monotonic()
        for name, batches in (("training", self.train), ("held-out", self.held_out)):
            count = len(batches) if batches else 0
            for row in range(min(SCANNED, count)):
                if time.monotonic() > began + SECONDS:
                    break
                self.notes["looked_through"][name] = row + 1, count
                batch = self.bare(batches, row)
                odd = [tensor for tensor in tensors(batch) if tensor.is_floating_point() and not tensor.isfinite().all()]
                if odd:
                    self.find("not-finite", f"{name} row {row} has numbers that are not finite", self.source.function("data"))
                    break
                scanned.setdefault(fingerprint(batch), []).append((name, row))
        doubles = [places for places in scanned.values() if sum(name == "held-out" for name, _ in places) > 1]
        if doubles:
            rows = ", ".join(str(row) for name, row in doubles[0] if name == "held-out")
            count = sum(len(places) - 1 for places in doubles)
            few = 100 * count <= self.notes["looked_through"]["held-out"][0]  # usual in text, or for small molecules
            says = f"{count} held-out rows are there twice (rows {rows}): they count twice"
            self.find("doubles" if few else "held-out-twice", says, self.source.function("data"))
        shared = [p for p in scanned.values() if {name for name, _ in p} == {"training", "held-out"}]
        if shared:
            count = sum(name == "held-out" for places in shared for name, _ in places)
            kind = "leak" if 2 * count > min(SCANNED, len(self.held_out or ())) else "shared"
            says = f"{count} held-out rows are training rows, too: row {shared[0][-1][1]} is the first"
            self.find(kind, says, self.source.function("data"))
        return first if same else []

    # ---- sums -------------------------------------------------------------------------------------------------------

    def sums(self) -> None:
        """Loss and metrics of a batch must equal the sum over its parts, in whatever batch a row is."""
        count = min(7, len(self.train))
        rows = [*range(count)]
        cuts = [rows[:1], rows[1:3], rows[3:]] if count > 3 else [[row] for row in rows]
        self.model.eval()
        with torch.no_grad():
            for name, batches in (("loss", self.train), ("metrics", self.held_out)):
                if not batches or len(batches) < count:
                    continue
                whole, *parts = batches.few(rows, [rows, *filter(None, cuts)])
                if (first := self.values(name, whole, 0)) != self.values(name, whole, 1):
                    self.notes["eval_random"] = True  # the loss draws noise, so sums cannot be compared
                    continue
                apart = [self.values(name, part, 0) for part in parts]
                for key, value in first.items():
                    total = math.fsum(values.get(key, math.nan) for values in apart)
                    if not math.isclose(value, total, rel_tol=EXACT, abs_tol=EXACT):
                        ratio = f"{value:.6g} for {count} rows together, and {total:.6g} for them apart"
                        self.find("sums", f"{key} is no sum over rows: {ratio}", self.suspect_of_sums(name))
                        break
        self.model.train()

    def values(self, name: str, batch: Any, seed: int) -> dict[str, float]:
        from ddp_core.order import seed_generators

        seed_generators(torch.device("cpu"), 9, seed, others=True)
        outputs = self.workload.forward(self.model, batch)
        if name == "loss":
            loss = self.workload.loss(outputs, batch)
            named = loss if isinstance(loss, dict) else {"loss()": loss}
            return {key: float(value) for key, value in named.items()}
        results = {}
        for key, value in self.workload.metrics(outputs, batch).items():
            for place, number in enumerate(value if isinstance(value, tuple) else (value,)):
                results[f"the metric {key}{', its count,' if place else ''}"] = float(number)
        return results

    def suspect_of_sums(self, name: str) -> int | None:
        """The line where rows may mix: a mean in the loss or in the code before it, else the method itself."""
        words = (".mean", "len(", ".std", ".shape[0]", "size(0)", ".max", "% ", "// ")
        lines = (self.source.word(word, within=method) for method in (name, "forward", "collate") for word in words)
        return next(filter(None, lines), None) or self.source.function(name)

    # ---- training ---------------------------------------------------------------------------------------------------

    def steps(self, first: int, end: int) -> None:
        from ddp_core.order import seed_generators

        size = max(1, min(self.config.global_batch_size, 16, len(self.train) // end))
        for step in range(first, end):
            rows = [*range(step * size, (step + 1) * size)]
            [batch] = self.train.few(rows, [[*range(len(rows))]])
            seed_generators(torch.device("cpu"), 5, self.config.seed, step, 0, others=True)
            self.optimizer.zero_grad()
            loss = self.workload.loss(self.workload.forward(self.model, batch), batch)
            total: Any = sum(loss.values()) if isinstance(loss, dict) else loss
            if total.requires_grad:
                (total / len(rows)).backward()
            for group in self.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.workload.schedule(step, 100, self.config)
            self.optimizer.step()

    def outside(self) -> dict[str, str]:
        """Hashes of values outside model and optimizer state: the file's variables, its objects' attributes."""
        import sys

        module, fingerprints = sys.modules[type(self.workload).__module__], {}
        for name, value in vars(module).items():
            if not name.startswith("__") and plain(value):
                fingerprints[name] = fingerprint(value)
            elif getattr(value, "__module__", None) == module.__name__ and isinstance(value, type | types.FunctionType):
                fingerprints |= {f"{name}.{key}": fingerprint(own) for key, own in attributes(value)}
        held = dict(workload=self.workload, optimizer=self.optimizer, training_rows=self.train.rows)
        held |= {f"model.{name}" if name else "model": part for name, part in self.model.named_modules()}
        for owner, thing in held.items():
            fingerprints |= {f"{owner}.{name}": fingerprint(value) for name, value in attributes(thing)}
        return fingerprints

    def changed(self) -> int | None:
        return self.source.change_in_place("__getitem__", "collate", "forward", "loss")

    def schedule(self) -> None:
        """The schedule must depend on the step alone."""
        total, config, schedule = 200, self.config, self.workload.schedule
        forth = [float(schedule(step, total, config)) for step in range(total)]
        back = [float(schedule(step, total, config)) for step in reversed(range(total))][::-1]
        if forth != back:
            step = next(step for step in range(total) if forth[step] != back[step])
            says = f"schedule() gave {forth[step]:.6g} at step {step}, and {back[step]:.6g} when it was asked again"
            says += ": it counts its calls, so that a stopped run goes on with others"
            self.find("schedule", says, self.source.function("schedule"))
        elif (tail := next((s for s in range(total) if len({*forth[s:]}) == 1), 0)) and 0 < tail <= config.epochs < total / 4:
            says = f"schedule() does not change after step {tail}: does it count epochs? It is given steps"
            self.find("schedule-epochs", says, self.source.function("schedule"))

    @staticmethod
    def settings() -> dict[str, str]:
        def asked(value: Callable[[], Any]) -> str:
            try:
                return str(value())
            except (RuntimeError, AttributeError) as error:  # torch refuses an old name after a new one was set
                return f"unknown: {error}"

        getters: dict[str, Callable[[], Any]] = dict(
            default_dtype=torch.get_default_dtype,
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled,
            benchmark=lambda: torch.backends.cudnn.benchmark,
        )
        places = {"": torch.backends, "cuda.matmul.": torch.backends.cuda.matmul, "cudnn.": torch.backends.cudnn}
        for name, owner in places.items():
            getters[f"{name}fp32_precision"] = functools.partial(getattr, owner, "fp32_precision")
            getters[f"{name}allow_tf32"] = functools.partial(getattr, owner, "allow_tf32")
        getters["float32_matmul_precision"] = torch.get_float32_matmul_precision
        return {name: asked(value) for name, value in getters.items()}


# Attributes that torch keeps on modules and optimizers, and the core on a workload.
INNER = {"state", "param_groups", "defaults", "config", "fingerprint", "columns", *vars(torch.nn.Module())}


def attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a program's own object in which it may count or store values."""
    for name, value in getattr(thing, "__dict__", {}).items():
        if name not in INNER and not name.startswith("__") and plain(value):
            yield name, value


def plain(value: Any) -> bool:
    """Whether this is a number, a text, a tensor, an array, or a container of these: values that a program may count in."""
    if isinstance(value, types.ModuleType | type | types.FunctionType | Path):
        return False
    if isinstance(value, dict | list | tuple | set | collections.deque):
        return len(value) < 10_000
    kinds = bool | int | float | str | torch.Tensor | torch.Generator | random.Random | itertools.count | None
    return isinstance(value, kinds) or hasattr(value, "tobytes") or type(value).__module__ == "numpy.random._generator"


def tensors(batch: Any) -> list:
    from ddp_core.batches import converted

    collected: list = []
    converted(batch, collected.append, torch.device("cpu"))
    return collected


def pieces(flat: Any) -> Iterator[bytes]:
    """The bytes of a flat NumPy array that are hashed."""
    if flat.nbytes <= WHOLE:
        yield flat.tobytes()
        return
    for start in range(0, len(flat), len(flat) // 64):
        yield flat[start : start + WHOLE // 64 // flat.itemsize].tobytes()


def fingerprint(value: Any) -> str:
    total = hashlib.sha256()

    def add(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            total.update(str((tuple(value.shape), value.dtype)).encode())
            for piece in pieces(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()) if value.numel() else ():
                total.update(piece)
        elif isinstance(value, dict) and depth < 4:
            for key, entry in value.items():
                add(str(key))
                add(entry, depth + 1)
        elif isinstance(value, list | tuple | set | collections.deque) and depth < 4:
            for entry in value:
                add(entry, depth + 1)
        elif isinstance(value, torch.Generator):
            add(value.get_state())
        elif isinstance(value, random.Random):
            total.update(repr(value.getstate()).encode())
        elif hasattr(value, "bit_generator"):
            total.update(repr(value.bit_generator.state).encode())
        elif hasattr(value, "tobytes"):
            for piece in pieces(value.reshape(-1)) if hasattr(value, "reshape") else (value.tobytes(),):
                total.update(piece)
        elif isinstance(value, bool | int | float | str | bytes | itertools.count | None):
            total.update(repr(value).encode())

    add(value)
    return total.hexdigest()[:16]

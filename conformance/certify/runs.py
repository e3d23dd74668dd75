"""The program in so many ranks, by a site's own train.py: processes forked from one that has imported torch."""

import ast
import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from conformance.certify import witness
from conformance.harness import forked
from conformance.harness.ports import free_port
from conformance.harness.sites import ROOT, Launch, without_launcher
from conformance.harness.target import read_records

FLAGS = "--device cpu --log-every 1 --log-seconds 0 --timeout 60 --rendezvous-timeout 30 --save-minutes 0"
starts = count(1)


@dataclass(frozen=True)
class Change:
    """What is different in one run of the program; nothing by default.

    moved: every initial parameter is multiplied with 1 + moved * a random number. dropout: False switches it off.
    statistics: False has BatchNorm use its stored ones. backwards: folders are listed from their end. hash_seed: of Python, in
    a new process. stop_at, kill_at: the optimizer step at which a rank gets SIGUSR1, or SIGKILL. rows: at most so many.
    """

    moved: float = 0.0
    dropout: bool = True
    statistics: bool = True
    backwards: bool = False
    hash_seed: int | None = None
    stop_at: int | None = None
    kill_at: int | None = None
    rows: int = 0


@dataclass
class Ended:
    """A run that has ended: one entry a rank in exit_codes, errors and calls."""

    name: str
    folder: Path
    exit_codes: list[int]
    errors: list[str]
    seconds: float
    calls: list[list[witness.Call]] = field(default_factory=list)

    @functools.cached_property
    def records(self) -> list[dict]:
        return read_records(self.folder)

    def of(self, kind: str) -> list[dict]:
        """The records of a kind; of the steps and epochs that a resumed run has repeated, the last."""
        found = [record for record in self.records if record["kind"] == kind]
        return list({record["step"]: record for record in found}.values()) if kind in ("step", "epoch") else found

    @property
    def losses(self) -> list[float]:
        return [float.fromhex(record["loss_hex"]) for record in self.of("step")]

    @property
    def first_line(self) -> dict:
        return self.of("start")[0]

    @property
    def held_out(self) -> list[dict[str, float]]:
        """Of each epoch what was found of the held-out rows."""
        return [{name: value for name, value in record.items() if name.startswith("eval_")} for record in self.of("epoch")]

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshot.safetensors"

    @property
    def witnessed(self) -> list[witness.Call]:
        """Of all ranks, each call once."""
        return list(dict.fromkeys(call for calls in self.calls for call in calls))

    @property
    def error(self) -> str:
        """The line that train.py ended with, the last rank's if none is marked as the job's."""
        lines = [line for text in self.errors for line in text.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("error")] or lines
        return said[0] if said else f"exit codes {self.exit_codes}, and not a word"

    @property
    def well(self) -> bool:
        return set(self.exit_codes) == {0}


class Program:
    """A scientist's file at a site. flags: of train.py, in every run. folder: where the runs are."""

    def __init__(self, file: str, launch: Launch, flags: list[str], folder: Path, rows: int = 0):
        self.file, self.launch, self.flags, self.folder, self.rows = file, launch, flags, folder, rows
        self.runs: list[Ended] = []

    @functools.cached_property
    def server(self):
        """A process that has imported what the program imports, and forks the ranks; the program itself it does not know."""
        return forked.server(["ddp_core.trainer", "conformance.certify.runs", *imports_of(self.file)])

    def run(
        self, name: str, ranks: int, flags: str = "", after: Ended | None = None, launch: Launch | None = None, **change
    ) -> Ended:
        """To its end. after: goes on from a copy of that run's directory. change: see Change."""
        folder, number, launch = self.folder / name, next(starts), launch or self.launch
        if after:
            shutil.copytree(after.folder, folder)
        folder.mkdir(parents=True, exist_ok=True)
        argv = [*FLAGS.split(), "--workload", self.file, "--run-dir", str(folder), *self.flags, *flags.split()]
        port, outside = free_port(), without_launcher() | dict(OMP_NUM_THREADS="1")
        changed, began = Change(rows=self.rows, **change), time.monotonic()
        processes: list[Any] = []
        files = [[folder / f".{number}-{rank}.{end}" for end in ("out", "err", "calls")] for rank in range(ranks)]
        for rank in range(ranks):
            environ = outside | launch.environ(rank, ranks, 1, port, f"{1000 + number}")
            arguments = (str(launch.train), argv, environ, files[rank], self.file, changed, rank == ranks - 1)
            processes.append(
                self.server.Process(target=as_rank, args=arguments)
                if changed.hash_seed is None
                else Afresh(changed.hash_seed, arguments)
            )
        forked.run_to_their_end(processes, 600)
        _, errors, calls = ([file.read_text() if file.exists() else "" for file in those] for those in zip(*files, strict=True))
        codes = [process.exitcode or 0 if process.exitcode is not None else -9 for process in processes]
        ended = Ended(name, folder, codes, errors, time.monotonic() - began, [*map(witness.read, calls)])
        self.runs.append(ended)
        return ended

    def examine(self, flags: str = "") -> dict:
        """What examine.py finds, in a process of its own."""
        folder = self.folder / "examined"
        folder.mkdir(exist_ok=True)
        argv = [*FLAGS.split(), "--workload", self.file, *self.flags, *flags.split()]
        result, change = folder / "examined.json", Change(rows=self.rows)
        process = self.server.Process(target=as_examiner, args=(argv, self.file, result, change))
        forked.run_to_their_end([process], 300)
        return (
            json.loads(result.read_text())
            if result.exists()
            else dict(failed=f"exit code {process.exitcode}", findings=[], notes={})
        )


class Afresh:
    """A rank in a new interpreter with a hash seed of its own: the order of a set of texts depends on it."""

    def __init__(self, hash_seed: int, arguments: tuple):
        train, argv, environ, files, file, change, last = arguments
        told = dict(train=train, argv=argv, files=[*map(str, files)], file=file, change=asdict(change), last=last)
        self.environ = environ | dict(PYTHONHASHSEED=str(hash_seed))
        self.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH", ""), str(ROOT))))
        self.command = [sys.executable, "-m", "conformance.certify.runs", json.dumps(told)]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, env=self.environ)

    def join(self, seconds: float | None = None) -> None:
        assert self.process, "start() comes first"
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()

    @property
    def exitcode(self) -> int | None:
        return self.process.returncode if self.process else None


def as_rank(train: str, argv: list[str], environ: dict, files: list[Path], file: str, change: Change, last: bool) -> None:
    """In a process of its own: `python train.py ARGV` as a launcher starts it."""
    forked.become(train, argv, environ, files)
    witness.install(Path(file), Path(files[2]), backwards=change.backwards)
    make(change, last)
    runpy.run_path(train, run_name="__main__")


def as_examiner(argv: list[str], file: str, result: Path, change: Change) -> None:
    from conformance.certify.examine import examine

    calls = result.with_suffix(".calls")
    witness.install(Path(file), calls)
    make(change, False)
    result.write_text(json.dumps(examine(argv)))


def make(change: Change, last: bool) -> None:
    """Have every workload that is found from now on be changed so. last: whether this rank is the one that is killed."""
    from ddp_core import workload as module

    find = module.find

    def found(what):
        workload = find(what)
        _change(workload, change, last)
        return workload

    module.find = found


def _change(workload, change: Change, last: bool) -> None:
    import torch

    data, model, schedule = workload.data, workload.model, workload.schedule

    def fewer(config):
        from ddp_core.data import _known

        return tuple(rows if rows is None else Head(_known(rows), change.rows) for rows in data(config))

    def changed(config):
        made = model(config)
        if change.moved:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in made.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.mul_((1 + change.moved * noise).to(parameter.dtype))
        for part in made.modules():
            if not change.dropout and "Dropout" in type(part).__name__:
                part.p = 0.0
            if not change.statistics and "BatchNorm" in type(part).__name__:
                part.train = lambda mode=True, part=part: part
                part.training = False
        return made

    def at(step, total_steps, config):
        if step == change.stop_at and last:
            os.kill(os.getpid(), signal.SIGUSR1)
        if step == change.kill_at and last:
            os.kill(os.getpid(), signal.SIGKILL)
        return schedule(step, total_steps, config)

    workload.data, workload.model, workload.schedule = fewer if change.rows else data, changed, at
    if not change.dropout:
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
            setattr(torch.nn.functional, name, lambda values, *_, **__: values)


class Head:
    """The first of the rows."""

    def __init__(self, rows, count: int):
        self.rows, self.count = rows, min(count, len(rows))
        self.batched = getattr(rows, "batched", False)
        if fingerprint := getattr(rows, "fingerprint", ""):
            self.fingerprint = f"{fingerprint}-{self.count}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        return self.rows[index]


def imports_of(file: str) -> list[str]:
    """The modules that the file imports and that are installed, not those beside it."""
    tree = ast.parse(Path(file).read_text()) if Path(file).suffix == ".py" else ast.Module([], [])
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name for name in dict.fromkeys(names) if not Path(file).with_name(f"{name.partition('.')[0]}.py").exists()]


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    as_rank(told["train"], told["argv"], dict(os.environ), told["files"], told["file"], Change(**told["change"]), told["last"])

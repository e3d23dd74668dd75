"""Runs of the program in N ranks with a site's own train.py. Ranks are forked from a process that has imported torch."""

import ast
import functools
import json
import os
import runpy
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from conformance.certify import witness
from conformance.harness import forked
from conformance.harness.ports import free_port
from conformance.harness.sites import ROOT, Launch, without_launcher
from conformance.harness.submit import Jobs
from conformance.harness.target import Run, read_records

FLAGS = "--log-every 1 --log-seconds 0 --timeout 60 --rendezvous-timeout 30 --save-minutes 0"
starts = count(1)


@dataclass(frozen=True)
class Change:
    """The changes for one run of the program; none by default.

    moved: multiply each initial parameter by 1 + moved * a random number. dropout: False switches it off. statistics: False
    makes BatchNorm use its stored ones. backwards: list folders from their end. hash_seed: PYTHONHASHSEED, in a new process.
    stop_at, kill_at: the optimizer step at which a rank gets SIGUSR1 or SIGKILL. rows: use at most this many.
    """

    moved: float = 0.0
    dropout: bool = True
    statistics: bool = True
    backwards: bool = False
    hash_seed: int | None = None
    stop_at: int | None = None
    kill_at: int | None = None
    rows: int = 0


@dataclass(frozen=True)
class Ended(Run):
    """A finished run with its name. calls: what the witness saw in each rank."""

    name: str
    seconds: float
    calls: list[list[witness.Call]]

    @property
    def first_line(self) -> dict:
        return self.of("start")[0]

    @property
    def held_out(self) -> list[dict[str, float]]:
        """The held-out results of each epoch."""
        return [{name: value for name, value in record.items() if name.startswith("eval_")} for record in self.of("epoch")]

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshot.safetensors"

    @property
    def witnessed(self) -> list[witness.Call]:
        """The calls of all ranks, without repetitions."""
        return list(dict.fromkeys(call for calls in self.calls for call in calls))

    @property
    def error(self) -> str:
        """The line with which train.py ended: the one marked as an error, else the last rank's."""
        lines = [line for line in self.error_lines if line.strip()]
        lines = [line for line in lines if line.startswith("error")] or lines
        return lines[0] if lines else f"exit codes {self.exit_codes}, and not a word"

    @property
    def well(self) -> bool:
        return set(self.exit_codes) == {0}


class Program:
    """A scientist's file at a site. flags: train.py's, for every run. folder: holds the runs.

    other: a launcher of another site, which resumes snapshots. jobs: those of the site's own script, or None.
    """

    def __init__(
        self,
        file: str,
        launch: Launch,
        flags: list[str],
        folder: Path,
        rows: int = 0,
        other: Launch | None = None,
        jobs: Jobs | None = None,
    ):
        self.file, self.launch, self.flags, self.folder, self.rows = file, launch, flags, folder, rows
        self.other, self.jobs = other or launch, jobs
        self.runs: list[Ended] = []
        self.made: dict[str, bool] = {}  # files that the program has made in these runs, and whether they still exist

    @functools.cached_property
    def server(self):
        """A fork server that has imported the modules that the program imports, but not the program itself."""
        return forked.server(["ddp_core.trainer", "conformance.certify.runs", *imports_of(self.file)])

    def run(
        self, name: str, ranks: int, flags: str = "", after: Ended | None = None, launch: Launch | None = None, **change
    ) -> Ended:
        """Run to the end. after: continue from a copy of that run's directory. change: see Change."""
        folder, number, launch = self.folder / name, next(starts), launch or self.launch
        if after:
            copied(after.folder, folder)
        folder.mkdir(parents=True, exist_ok=True)
        argv = ["--device", "cpu", *self.argv(flags), "--run-dir", str(folder)]
        if ranks > 1:
            self.forget_files()
        port, outside = free_port(), without_launcher() | dict(OMP_NUM_THREADS="1")
        changed, began = Change(rows=self.rows, **change), time.monotonic()
        logs = [str(folder / f".{number}-{rank}") for rank in range(ranks)]
        same = dict(train=str(launch.train), argv=argv, file=self.file, change=asdict(changed), several=ranks > 1)
        environs = [outside | launch.environ(rank, ranks, 1, port, f"{1000 + number}") for rank in range(ranks)]
        arguments: list[dict] = [
            same | dict(environ=environs[rank], log=logs[rank], last=rank == ranks - 1) for rank in range(ranks)
        ]
        if changed.hash_seed is not None or (launch.mpi and ranks > 1):
            (folder / f".{number}.json").write_text(json.dumps(arguments))
            command, environ = apart(folder / f".{number}.json", ranks, changed.hash_seed or 0)
            processes: list[Any] = [self.server.Process(target=execute, args=(command, environ))]
        else:
            processes = [self.server.Process(target=as_rank, kwargs=one) for one in arguments]
        forked.run_to_their_end(processes, 600)
        codes = [process.exitcode for process in processes]
        codes = codes if len(codes) == ranks else codes * ranks  # mpiexec has one exit code for all ranks
        errors = [file.read_text() if file.exists() else "" for file in (Path(f"{log}.err") for log in logs)]
        calls = [witness.read(Path(f"{log}.calls")) for log in logs]
        run = Ended(folder, codes, [], errors, [], read_records(folder), name, time.monotonic() - began, calls)
        self.runs.append(run)
        self.remember_files(run.witnessed)
        return run

    def argv(self, flags: str) -> list[str]:
        """All arguments of train.py. The run's own flags come last and override the others."""
        return [*FLAGS.split(), "--workload", self.file, *self.flags, *flags.split()]

    def remember_files(self, calls: Iterable[witness.Call]) -> None:
        self.made |= {call.what: True for call in calls if call.made and self.made.get(call.what, True)}

    def forget_files(self) -> None:
        """Delete the files that the program made, each once: several ranks then start as a job does for the first time."""
        for path in (path for path, exists in self.made.items() if exists):
            Path(path).unlink(missing_ok=True)
        self.made = dict.fromkeys(self.made, False)

    def examine(self, flags: str = "") -> dict:
        """The result of examine.py, run in a separate process."""
        folder = self.folder / "examined"
        folder.mkdir(exist_ok=True)
        result, change = folder / "examined.json", Change(rows=self.rows)
        arguments = (["--device", "cpu", *self.argv(flags)], self.file, result, change)
        process = self.server.Process(target=as_examiner, args=arguments)
        forked.run_to_their_end([process], 300)
        calls = folder / "examined.calls"
        self.remember_files(witness.read(calls))
        if result.exists():
            return json.loads(result.read_text())
        return dict(failed=f"exit code {process.exitcode}", findings=[], notes={})


def apart(arguments_file: Path, ranks: int, hash_seed: int) -> tuple[list[str], dict[str, str]]:
    """Command and environment of ranks in new interpreters: for another hash seed, or at a site whose ranks ask MPI.

    arguments_file: JSON with the arguments of as_rank() for each rank.
    """
    start = [*shlex.split(mpiexec() or "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    places = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT))))
    environ = without_launcher() | dict(PYTHONHASHSEED=str(hash_seed), PYTHONPATH=places, OMP_NUM_THREADS="1")
    return [*start, sys.executable, "-m", "conformance.certify.runs", str(arguments_file)], environ


def execute(command: list[str], environ: dict[str, str]) -> None:
    """Called in a separate process, which becomes that of the command."""
    for descriptor in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    os.execvpe(command[0], command, environ)


def copied(run: Path, folder: Path) -> None:
    """Copy a run directory without its lock. Otherwise the new run would wait for a job that was killed on another host."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("run.lock"))


def mpiexec() -> str | None:
    """The mpiexec command, or None."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return os.environ.get("MPIEXEC") or shutil.which("mpiexec", path=path)


def as_rank(train: str, argv: list[str], environ: dict, log: str, file: str, change: dict, last: bool, several: bool) -> None:
    """Called in a separate process: like `python train.py ARGV` under a launcher. log: where its logs are, but for the ends."""
    forked.become(train, argv, environ, [Path(f"{log}.out"), Path(f"{log}.err")])
    witness.install(Path(file), Path(f"{log}.calls"), backwards=change["backwards"], several=several)
    make(Change(**change), lambda: last)
    runpy.run_path(train, run_name="__main__")


def as_examiner(argv: list[str], file: str, result: Path, change: Change) -> None:
    from conformance.certify.examine import examine

    calls = result.with_suffix(".calls")
    witness.install(Path(file), calls)
    make(change, lambda: False)
    result.write_text(json.dumps(examine(argv)))


def make(change: Change, mine: Callable[[], bool]) -> None:
    """Change every workload that is found from now on. mine: whether this rank is the one to stop or kill."""
    from ddp_core import workload as module

    find = module.find

    def find_changed(what):
        workload = find(what)
        _change(workload, change, mine)
        return workload

    module.find = find_changed


def changed(file: str, log: str, module: str, **change) -> type:
    """The file's class with changes, for the file that a job runs (jobs.py). log: prefix of the names of its logs."""
    from ddp_core import workload

    witness.install(Path(file), Path(f"{log}-{os.getpid()}.calls"))
    original = workload.find(file)

    def first() -> bool:
        """True once: for the first caller of all ranks and of all starts of the job."""
        try:
            os.close(os.open(f"{log}.once", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    class OfTheUser:  # a base class: the core refuses a workload whose own class defines `file`
        file = property(lambda self: original.file, lambda self, value: None)  # for the digest and the line numbers

    class Changed(OfTheUser, type(original)):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            _change(self, Change(**change), first)

    Changed.__module__ = module
    return Changed


def _change(workload, change: Change, mine: Callable[[], bool]) -> None:
    import torch

    data, model, schedule = workload.data, workload.model, workload.schedule

    def fewer(config):
        from ddp_core.data import _known

        return tuple(rows if rows is None else head(_known(rows), change.rows) for rows in data(config))

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
        if step == change.stop_at and mine():
            os.kill(os.getpid(), signal.SIGUSR1)
        if step == change.kill_at and mine():
            os.kill(os.getpid(), signal.SIGKILL)
        return schedule(step, total_steps, config)

    vars(workload).update(data=fewer if change.rows else data, model=changed, schedule=at)
    if not change.dropout:
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
            setattr(torch.nn.functional, name, lambda values, *_, **__: values)


def head(rows, count: int):
    """The first rows: a view where rows are in memory or in a mapped file."""
    return rows.with_columns([column[:count] for column in rows.columns]) if hasattr(rows, "columns") else Head(rows, count)


class Head:
    """The first rows of a dataset that is read row by row."""

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
    """The installed modules that the file imports. Modules beside the file are left out."""
    tree = ast.parse(Path(file).read_text()) if Path(file).suffix == ".py" else ast.Module([], [])
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name for name in dict.fromkeys(names) if not Path(file).with_name(f"{name.partition('.')[0]}.py").exists()]


if __name__ == "__main__":
    arguments = json.loads(Path(sys.argv[1]).read_text())
    if len(arguments) > 1:  # mpiexec started this process
        from mpi4py import MPI

        arguments = arguments[MPI.COMM_WORLD.rank :]
    as_rank(**arguments[0])

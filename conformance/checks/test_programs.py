"""Every file of programs/ is trained at one site, stopped and resumed there, and resumed at another site.

    python -m pytest conformance/checks/test_programs.py

Ranks are processes of this machine. Each runs a site's train.py with its launcher's variables, and is forked, because the
imports of a program take seconds. constraints.txt pins these imports; without them the tests fail.
"""

import functools
import os
import re
import runpy
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from conformance.harness import forked, sites
from conformance.harness.check import T0, T1
from conformance.harness.ports import free_port
from conformance.harness.reference import sha256, take_apart, worst_deviation
from conformance.harness.sites import ROOT, Launch, without_launcher
from conformance.harness.target import Run, read_records

clause, rejects = pytest.mark.clause, pytest.mark.rejects
pytestmark = pytest.mark.timeout(300, method="thread")

PROGRAMS = sorted((ROOT / "conformance/programs").glob("*.py"))
LINES = 60
FLAGS = "--device cpu --precision fp64 --log-every 1 --timeout 60 --rendezvous-timeout 30"  # all others are the program's
SECONDS = 120.0  # limit for a run that takes seconds
CANONICAL = "--reduction canonical"
STARTS = count(1)
# Each site's first launcher; ranks that ask MPI for their numbers would need an mpiexec.
LAUNCHES = [site.launches[0] for site in sites.find() if site.launches and not site.launches[0].mpi]


# ---- ranks ----------------------------------------------------------------------------------------------------------


@functools.cache
def server():
    """Return a process that has imported the programs' modules, and forks the ranks."""
    return forked.server((path.stem for path in PROGRAMS), PROGRAMS[0].parent)


def as_rank(train: str, argv: list[str], environ: dict[str, str], files: list[Path], stopped_in: Path | None) -> None:
    """Run `python train.py ARGV`, in this process, as a launcher would start it. stopped_in: see stop_itself()."""
    forked.become(train, argv, environ, files)
    if stopped_in:
        stop_itself(stopped_in)
    runpy.run_path(train, run_name="__main__")


def stop_itself(folder: Path) -> None:
    """Send SIGUSR1 to this process at the first save after the first epoch, so that it arrives in mid-epoch, and once."""
    log, me, sent = folder / "run.jsonl", os.getpid(), []

    def hear(event: str, arguments: tuple) -> None:
        saves = event == "open" and str(arguments[0]).startswith(f"{folder}/") and "safetensors" in Path(str(arguments[0])).name
        if saves and not sent and os.getpid() == me and '"kind":"epoch"' in log.read_text():
            sent.append(event)
            os.kill(me, signal.SIGUSR1)

    sys.addaudithook(hear)


def train(program: Path, folder: Path, launch: Launch, ranks: int, flags: str = "", stop: bool = False) -> Run:
    """Train the program to its end with this site's train.py. stop: rank 0 gets SIGUSR1 in mid-epoch."""
    if stop:  # short steps: else ranks would communicate only at the ends of epochs
        flags += " --save-steps 3"
    argv = [*FLAGS.split(), "--workload", str(program), "--run-dir", str(folder), *flags.split()]
    start, port, outside = next(STARTS), free_port(), without_launcher() | dict(OMP_NUM_THREADS="1")
    files = [[folder.with_name(f"{folder.name}-{start}-{rank}.{end}") for end in ("out", "err")] for rank in range(ranks)]
    processes = []
    for rank in range(ranks):
        environ = outside | launch.environ(rank, ranks, 1, port, f"{1000 + start}")
        arguments = (str(launch.train), argv, environ, files[rank], folder if stop and rank == 0 else None)
        processes.append(server().Process(target=as_rank, args=arguments))
    forked.run_to_their_end(processes, SECONDS)
    output, errors = ([file.read_text() for file in those] for those in zip(*files, strict=True))
    return Run(folder, [process.exitcode for process in processes], output, errors, [], read_records(folder))


# ---- the runs of a program ------------------------------------------------------------------------------------------


class Runs:
    """A program's runs, each made once. launch, other_launch: of two sites. others: ranks at the other site, 1 or 4."""

    def __init__(self, program: Path, folder: Path, number: int = 0):
        self.program, self.folder = program, folder
        self.launch, self.other_launch = (LAUNCHES[(number + other) % len(LAUNCHES)] for other in (0, 1))
        self.others = 1 if number % 2 else 4

    def run(self, name: str, launch: Launch, ranks: int, flags: str = "", after: Run | None = None, stop: bool = False) -> Run:
        """after: resume from a copy of that run's directory."""
        if after:
            shutil.copytree(after.folder, self.folder / name)
        result = train(self.program, self.folder / name, launch, ranks, flags, stop)
        if result.exit_codes != [75 if stop else 0] * ranks:
            output = " ".join(line for text in result.errors for line in text.splitlines()[-3:])
            codes = f"exit codes={result.exit_codes} {output[-600:]}, but should be {75 if stop else 0}"
            pytest.fail(f"{self.program.name}, {name}: {codes}")
        return result

    @functools.cached_property
    def whole(self) -> Run:
        return self.run("whole", self.launch, 2)

    @functools.cached_property
    def stopped(self) -> Run:
        return self.run("stopped", self.launch, 2, stop=True)

    @functools.cached_property
    def resumed(self) -> Run:
        """It has the number of workers that the program's docstring recommends, which changes no result."""
        workers = re.search(r"--workers \d+", self.program.read_text())
        return self.run("resumed", self.launch, 2, workers[0] if workers else "", after=self.stopped)

    @functools.cached_property
    def handed_on(self) -> Run:
        return self.run("handed-on", self.other_launch, self.others, after=self.stopped)

    @functools.cached_property
    def whole_canonical(self) -> Run:
        """This run has one rank; the run compared with it begins with two, and ends with four."""
        return self.run("whole-canonical", self.other_launch, 1, CANONICAL)

    @functools.cached_property
    def handed_on_canonical(self) -> Run:
        stopped = self.run("stopped-canonical", self.launch, 2, CANONICAL, stop=True)
        return self.run("handed-on-canonical", self.other_launch, 4, CANONICAL, after=stopped)

    @property
    def notes(self) -> list[str]:
        return self.whole.of("start")[0]["notes"]

    def noted(self, words: str) -> bool:
        return any(words in note for note in self.notes)

    @property
    def has_batch_norm(self) -> bool:
        """Return whether the snapshot has a running mean."""
        return any(name.endswith("running_mean") for name in of_snapshot(self.whole, "tensors"))


def of_snapshot(run: Run, what: str) -> dict:
    return take_apart(run.folder / "snapshot.safetensors")[what]


MADE: dict[Path, Runs] = {}


@pytest.fixture
def runs(program, tmp_path_factory) -> Runs:
    if program not in MADE:
        MADE[program] = Runs(program, tmp_path_factory.mktemp(program.stem), PROGRAMS.index(program))
    return MADE[program]


def resumes_where_it_stopped(runs: Runs, resumed: Run) -> Iterator[str]:
    """Yield what is wrong with the step at which a stopped run was resumed."""
    last = resumed.of("start")[1]
    steps = len(runs.whole.losses)
    epoch = steps // len(runs.whole.of("epoch"))
    stopped = next(record["step"] for record in resumed.of("end") if record["exit_code"] == 75)
    if not (stopped % epoch and epoch < stopped < steps):
        yield f"stopped at step={stopped}, but should be in mid-epoch, of {epoch}"
    if last["step"] != stopped:
        yield f"resumed at step={last['step']}, but should be {stopped}"
    if len(resumed.losses) != steps:
        yield f"steps={len(resumed.losses)}, but should be {steps}"


def differs_from_the_whole(runs: Runs) -> Iterator[str]:
    """Yield differences between the resumed run and one that was never stopped; there should be none."""
    both = (runs.resumed, runs.whole)
    pairs = (("step", "loss_hex"), ("epoch", "loss"), ("epoch", "eval_loss"))
    seen = {f"{name} of each {kind}": [run.values(kind, name) for run in both] for kind, name in pairs}
    seen["snapshot"] = [sha256(run.folder / "snapshot.safetensors") for run in both]
    for what, (ours, whole) in seen.items():
        if ours != whole:
            yield f"{what}={str(ours)[:60]}, but should be {str(whole)[:60]}"


def too_long_or_crowded(program: Path) -> Iterator[str]:
    text = program.read_text()
    lines, classes = len(text.splitlines()), len(re.findall(r"^class \w+\(.*\bWorkload\b.*\):", text, re.MULTILINE))
    if lines > LINES:
        yield f"lines={lines}, but should be at most {LINES}"
    if classes != 1:
        yield f"workloads={classes}, but should be 1"


# ---- each of them ---------------------------------------------------------------------------------------------------

each = pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)


@clause("L14")
@each
def test_learns(check, runs):
    """A user's file, as short as it is, learns with the flags that it sets."""
    check.holds(*too_long_or_crowded(runs.program))
    losses, held_out = runs.whole.values("epoch", "loss"), runs.whole.values("epoch", "eval_loss")
    check.equal(epochs=(len(losses) > 1, True), losses=(losses, sorted(losses, reverse=True)))
    check.equal(learns=(losses[-1] < losses[0] and held_out[-1] < held_out[0], True))


@clause("C7")
@each
def test_resumes_as_if_never_stopped(check, runs):
    check.holds(*resumes_where_it_stopped(runs, runs.resumed), *differs_from_the_whole(runs))


@clause("C2", "L16")
@each
def test_goes_on_at_another_site(check, runs):
    """With another number of ranks, its losses are the same unless a note says why not."""
    handed_on, whole = runs.handed_on, runs.whole
    check["C2"].equal(another_site=(runs.other_launch.site == runs.launch.site, False))
    check["C2"].holds(*resumes_where_it_stopped(runs, handed_on))
    check["C2"].equal(ranks=([len(start["ranks"]) for start in handed_on.of("start")], [2, runs.others]))
    epochs = handed_on.values("epoch", "loss")
    check["C2"].equal(goes_on_learning=(epochs[-1] < epochs[0], True))
    if not runs.notes:
        check["C2"].close(handed_on.losses, whole.losses, T1)
    elif runs.noted("random numbers"):
        canonical = runs.handed_on_canonical
        check["C2"].holds(*resumes_where_it_stopped(runs, canonical))
        check["L16"].close(canonical.losses, runs.whole_canonical.losses, T0)
        check["L16"].equal(tensors=tuple(of_snapshot(run, "crc32") for run in (canonical, runs.whole_canonical)))


@clause("L17")
@each
def test_notes_say_what_depends_on_the_world_size(check, runs):
    """The note names BatchNorm if its statistics are in the snapshot; else random numbers, if other ranks have other losses."""
    depends = worst_deviation(runs.handed_on.losses, runs.whole.losses) > T1
    check.equal(names_batch_norm=(runs.noted("BatchNorm"), runs.has_batch_norm))
    check.equal(notes=(len(runs.notes), int(depends)), same_notes=({*map(str, [runs.notes])}, {*printed(runs.whole)}))
    check.equal(names_random_numbers=(runs.noted("random numbers"), depends and not runs.has_batch_norm))


def printed(run: Run) -> list[str]:
    """Return the notes that rank 0 has printed, as one list's text."""
    return [str([line.removeprefix("note=") for line in run.output[0].splitlines() if line.startswith("note=")])]


# ---- and others, that must be rejected ------------------------------------------------------------------------------

IMPURE = """
import numpy as np
import torch
from ddp_core import Workload


class Rows(torch.utils.data.Dataset):
    fingerprint = "waves"  # else rows would be read for one, and differ between the ranks: exit code 4

    def __init__(self):
        self.inputs = torch.arange(96 * 4.0).view(96, 4).sin()
        self.generator = np.random.default_rng(SEED)

    def __len__(self):
        return 96

    def __getitem__(self, index):
        row = self.inputs[index]
        DRAW
        return row.clone(), row.sum()


class Impure(Workload):
    defaults = dict(epochs=3, global_batch_size=12, lr=0.01)

    def data(self, config):
        inputs = torch.ones(24, 4)
        return Rows(), (inputs, inputs.sum(1))

    def model(self, config):
        return torch.nn.Linear(4, 1)

    def loss(self, outputs, batch):
        return ((outputs.squeeze(1) - batch[1]) ** 2).sum()
"""
DRAWN = "row = row + 0.01 * self.generator.normal()"


@clause("V6")
@rejects("C7")
@pytest.mark.parametrize(
    "seed, draw",
    [("", DRAWN), ("1", DRAWN), ("", "row *= 0.9")],
    ids=["unseeded", "a-generator-of-its-own", "rows-changed-in-place"],
)
def test_a_program_with_a_state_of_its_own_is_rejected(tmp_path, seed, draw):
    """No run can resume it: its state is no function of seed, epoch and row."""
    program = tmp_path / "impure.py"
    program.write_text(IMPURE.replace("SEED", seed).replace("DRAW", draw))
    runs = Runs(program, tmp_path)
    assert not [*resumes_where_it_stopped(runs, runs.resumed)]
    differences = {line.partition(" of ")[0].partition("=")[0]: line for line in differs_from_the_whole(runs)}
    assert {"loss_hex", "snapshot"} <= differences.keys(), differences


@clause("V6")
@rejects("L14")
def test_a_program_that_is_too_long_is_rejected(tmp_path):
    long = tmp_path / "long.py"
    long.write_text(PROGRAMS[0].read_text() + "\n\nclass Another(Workload):\n    pass\n")
    lines = len(long.read_text().splitlines())
    assert [*too_long_or_crowded(long)] == [f"lines={lines}, but should be at most {LINES}", "workloads=2, but should be 1"]

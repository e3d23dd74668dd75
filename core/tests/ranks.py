"""Jobs of W ranks for the tests. Ranks are forked processes on 127.0.0.1 that run ddp_core like a real job's.

A fork server starts them: a clean process that has imported torch and done nothing else. Importing torch takes seconds,
forking milliseconds; and a process that has run autograd must not be forked.
"""

import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path

from ddp_core import Rank, run, snapshot
from ddp_core.files import in_place

from conformance.harness.ports import free_port

forks = multiprocessing.get_context("forkserver")

forks.set_forkserver_preload(["ddp_core.trainer", "ddp_core.sharding", "parked", "pytest"])

SECONDS = 40.0  # deadline of a job: then its ranks are killed and the test fails
FLAGS = "--device cpu --log-every 1 --rendezvous-timeout 20 --timeout 20"
numbers = itertools.count()


@dataclass
class Job:
    """The results of a job: each rank's exit code and output, and the run directory."""

    codes: list[int]  # -9: killed by signal 9
    out: list[str]
    err: list[str]
    run_dir: Path | None = None

    @property
    def error(self) -> str:
        """The error line. Fails unless all ranks together wrote one line to stderr."""
        lines = [line for text in self.err for line in text.splitlines()]
        assert len(lines) == 1 and lines[0].startswith("error"), f"not one error line but {len(lines)}: {lines}"
        return lines[0]

    def records(self, kind: str) -> list[dict]:
        lines = (self.run_dir / "run.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        """The loss of each step. After a resume, the last record of a repeated step counts."""
        losses = {record["step"]: float.fromhex(record["loss_hex"]) for record in self.records("step")}
        assert sorted(losses) == list(range(len(losses))), f"steps are missing: {sorted(losses)}"
        return [losses[step] for step in range(len(losses))]

    @property
    def snapshot(self) -> Path:
        return self.run_dir / "snapshot.safetensors"

    def snapshot_hash(self) -> str:
        """Hash of the snapshot file, or of a set's index, which has the checksums of all tensors; step_of() verifies these."""
        return hashlib.sha256(in_place(self.snapshot).read_bytes()).hexdigest()


def train(
    run_dir: Path,
    flags: str = "",
    world_size: int = 1,
    *,
    ranks: Sequence[Rank] | None = None,
    flags_of: dict[int, str] | None = None,
    faults: dict[int, Callable[[], None]] | None = None,
    hanging: Sequence[int] = (),
    strict_launcher: bool = False,
    workload: str = "",
    reduction: str = "",
    code: int | None = None,
) -> Job:
    """Run a job to its end.

    ranks: used instead of world_size ranks of one job. flags_of, faults: by index in ranks, extra flags, and what to call
    before the program starts. hanging: ranks to kill when all others have ended. strict_launcher: SIGTERM to all other
    ranks when the first has ended, like srun --kill-on-bad-exit=1. workload, reduction: for run(), as "module:Class"; a
    workload may also be a file. code: the expected exit code of every rank.
    """
    ranks = world(world_size) if ranks is None else ranks
    common = [*FLAGS.split(), "--run-dir", str(run_dir), *flags.split()]
    calls = []
    for place, rank in enumerate(ranks):
        argv = common + (flags_of or {}).get(place, "").split()
        calls.append(partial(as_rank, rank, argv, (faults or {}).get(place), workload, reduction))
    job = replace(fork(run_dir.parent, *calls, hanging=hanging, strict=strict_launcher), run_dir=run_dir)
    if code is not None:
        assert job.codes == [code] * len(ranks), f"exit codes {job.codes}, but should be {code}: {job.err}"
    return job


def assert_same_run(job: Job, reference: Job) -> None:
    """Every loss and every byte of the snapshot must be equal."""
    assert [loss.hex() for loss in job.losses] == [loss.hex() for loss in reference.losses]
    assert job.snapshot_hash() == reference.snapshot_hash()


def step_of(job: Job) -> int:
    return snapshot.read(job.snapshot)[1]["step"]


def world(world_size: int, port: int | None = None, job_id: str = "job-1", **others) -> list[Rank]:
    """All ranks of a job on one node."""
    port = free_port() if port is None else port
    return [Rank(r, world_size, r, world_size, 0, "127.0.0.1", port, job_id, **others) for r in range(world_size)]


def on_nodes(nodes: int, ranks: int) -> list[Rank]:
    """All ranks of a job on several nodes, which are all this machine."""
    port, size = free_port(), nodes * ranks
    host = socket.gethostname()  # on several nodes, 127.0.0.1 is refused
    return [Rank(r, size, r % ranks, ranks, r // ranks, host, port, "job-1") for r in range(size)]


def fork(folder: Path, *calls: Callable[[], int | None], hanging: Sequence[int] = (), strict: bool = False) -> Job:
    """Run each call in its own process. Its exit code is the call's result; after an exception, 1 with a traceback."""
    files = [folder / f"process-{next(numbers)}" for _ in calls]
    processes = [forks.Process(target=_in_process, args=(file, call)) for file, call in zip(files, calls, strict=True)]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + SECONDS
        if strict:
            connection.wait([process.sentinel for process in processes], SECONDS)
            for process in processes:
                process.terminate()
        for place, process in enumerate(processes):
            if place not in hanging:
                process.join(max(0.0, deadline - time.monotonic()))
        late = [place for place, process in enumerate(processes) if process.is_alive() and place not in hanging]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    out, err = ([file.with_suffix(ending).read_text() for file in files] for ending in (".out", ".err"))
    assert not late, f"after {SECONDS:g} s processes {late} still ran: {out} {err}"
    return Job([process.exitcode for process in processes], out, err)


def call(module: str, name: str, *args) -> Callable[[], int | None]:
    """A function of a test file, to call by name in another process, which cannot import pytest's modules."""
    return partial(_import_and_call, module, name, *args)


def _import_and_call(module: str, name: str, *args) -> int | None:
    return getattr(importlib.import_module(module), name)(*args)


def _in_process(file: Path, call: Callable[[], int | None]) -> None:
    for descriptor, ending in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(file.with_suffix(ending), os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
    sys.exit(call())


def as_rank(
    rank: Rank, argv: list[str], fault: Callable[[], None] | None = None, workload: str = "", reduction: str = ""
) -> int:
    from ddp_core import process_group, rendezvous, run_directory

    # Seconds. All ranks are on one machine, so longer waits are useless.
    process_group.ROLL_CALL = rendezvous.REPORT_SECONDS = run_directory.LAG = 1.0
    if fault:
        fault()
    given = {name: _named(text) for name, text in dict(workload=workload, reduction=reduction).items() if text}
    return run(lambda environ: rank, argv, **given)


def _named(text: str) -> type | Path:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name) if name else Path(text)

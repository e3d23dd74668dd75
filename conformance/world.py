"""The MPI ranks that conformance runs in, and how they start a site's train.py together.

All ranks judge the same gathered evidence: what a rank has seen alone is gathered before it is judged, so that a check
passes or fails on all ranks alike. pytest-mpi has no such rule of its own, and a rank that fails alone hangs the others.
"""

import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.sites import Launch, without_launcher

# The ranks start within milliseconds of each other: whoever waits this long waits for a rank that will not come.
DEADLINES = "--timeout 60 --rendezvous-timeout 10"


@dataclass(frozen=True)
class Run:
    """What one start of train.py has left, equal on all ranks. One entry a rank: exit_codes, output, errors."""

    folder: Path
    exit_codes: list[int]
    output: list[str]
    errors: list[str]
    records: list[dict]

    def of(self, kind: str) -> list[dict]:
        """The records of a kind; of the steps and epochs that a resumed run has repeated, the last."""
        records = [record for record in self.records if record["kind"] == kind]
        if kind in ("step", "epoch"):
            records = list({record["step"]: record for record in records}.values())
        return records

    def values(self, kind: str, name: str) -> list:
        return [record[name] for record in self.of(kind)]


class World:
    """This rank among the others. comm: an MPI communicator."""

    def __init__(self, comm):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.starts = 0

    def meet(self, seconds: float = 600) -> bool:
        """Wait for all ranks; False when some have not come. Asleep: MPI's own waiting takes a core from those that work."""
        request, end = self.comm.Ibarrier(), time.monotonic() + seconds
        while not request.Test():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def gather(self, value: Any) -> list:
        """Every rank's value, on every rank."""
        self.meet()
        return self.comm.allgather(value)

    def on_rank_0(self, make: Callable[[], Any]) -> Any:
        """Rank 0's result, on every rank; its exception likewise."""
        result, error = None, None
        if self.rank == 0:
            try:
                result = make()
            except Exception as exception:
                error = exception
        result, error = self.gather((result, error))[0]
        if error:
            raise error
        return result

    def train(self, launch: Launch, folder: Path, flags: str, num_nodes=1, alone=False, signal_rank=None) -> Run:
        """Start the site's train.py by its path on all ranks, as this launcher starts it; returns when all have ended.

        alone: on rank 0 only, without a launcher. signal_rank: the rank that gets a SIGUSR1 when it has trained a step.
        """
        import torch  # noqa: F401 - now, and not in the program: the ranks meet after it, whatever it takes on each

        self.starts += 1
        environ, mine = without_launcher(), None
        port = self.on_rank_0(_free_port)
        if not alone:
            environ |= launch.environ(self.rank, self.size, num_nodes, port, job_id=str(1000 + self.starts))
        if not alone or self.rank == 0:
            if self.rank == signal_rank:
                threading.Thread(target=_signal_in_mid_epoch, args=(folder / "run.jsonl",), daemon=True).start()
            argv = [*flags.split(), *DEADLINES.split(), "--device", "cpu", "--log-every", "1", "--run-dir", str(folder)]
            mine = _start(launch.train, argv, environ)
        ended = zip(*(one for one in self.gather(mine) if one), strict=True)
        return Run(folder, *map(list, ended), self.on_rank_0(lambda: _read_records(folder)))


def _read_records(folder: Path) -> list[dict]:
    path = folder / "run.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class _Left(BaseException):
    """Instead of os._exit, which would take pytest along."""


def _start(program: Path, argv: list[str], environ: dict[str, str]) -> tuple[int, str, str]:
    """Run a program in this process, which has imported torch already: exit code, standard output, standard error."""
    before = dict(os.environ), sys.argv, list(sys.path), os._exit
    output, errors = io.StringIO(), io.StringIO()

    def leave(code: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            before[-1](code)  # pytest-timeout's: it means this process
        raise _Left(code)

    os.environ.clear()
    os.environ.update(environ)
    sys.argv, sys.path[:0], os._exit = [str(program), *argv], [str(program.parent)], leave
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            runpy.run_path(str(program), run_name="__main__")
        code = 0
    except (SystemExit, _Left) as left:
        code = int(left.args[0] or 0) if left.args else 0
    except Exception:
        errors.write(traceback.format_exc())
        code = 1
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        sys.argv, sys.path[:], os._exit = before[1:]
        _drop_process_group()
    return code, output.getvalue(), errors.getvalue()


def _drop_process_group() -> None:
    """A program that fails leaves its group to the end of its process, which here goes on."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _signal_in_mid_epoch(log: Path) -> None:
    """Send this process a SIGUSR1 when the first step is on record, as a scheduler does before the time is up."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if log.exists() and '"kind":"step"' in log.read_text():
            os.kill(os.getpid(), signal.SIGUSR1)
            return
        time.sleep(0.0005)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]

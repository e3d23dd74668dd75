"""The MPI ranks that conformance runs in, and how they start a site's train.py together.

All ranks judge the same gathered evidence: what a rank has seen alone is gathered before it is judged, so that a check
passes or fails on all ranks alike. pytest-mpi has no such rule of its own, and a rank that fails alone hangs the others.
"""

import gc
import io
import json
import multiprocessing
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from conformance.harness import core_of
from conformance.harness.ports import free_port
from conformance.harness.sites import Launch, without_launcher
from conformance.harness.target import BACKENDS, Run, Target, read_records

# The ranks start within milliseconds of each other: whoever waits this long waits for a rank that will not come.
DEADLINES = "--timeout 60 --rendezvous-timeout 10"
FIRST_STEP = '"kind":"step"'


class World(Target):
    """This rank among the others. comm: an MPI communicator. device, backend: what train.py is told to use."""

    def __init__(self, comm, device: str = "cpu", backend: str = "auto"):
        super().__init__()
        self.comm, self.device, self.backend = comm, device, backend
        self.rank, self.size, self.ranks_per_node = comm.rank, comm.size, comm.size
        self.backend_in_use = BACKENDS[device] if backend == "auto" else backend
        self.starts = 0
        self.writes = Writes()

    # ---- the ranks --------------------------------------------------------------------------------------------------

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

    def runs_folder(self, make: Callable[[], Path]) -> Path:
        return self.on_rank_0(make)

    @property
    def devices_visible_to_a_rank(self) -> int:
        if self.device == "cpu":
            return 0
        import torch

        return torch.accelerator.device_count()

    # ---- train.py ---------------------------------------------------------------------------------------------------

    def ahead(self, folder: Path, flags: str) -> None:
        """There is no queue here."""

    def train(
        self,
        launch: Launch,
        folder: Path,
        flags: str,
        num_nodes: int = 1,
        environ: dict[str, str] | None = None,
        odd_flags: str = "",
        odd_start: tuple[str, int] | None = None,
        restart: int = 0,
        run_dir: str = "--run-dir",
        signal_rank: int | None = None,
        kill_ranks: tuple[int, ...] = (),
        kill_at: str = '"epoch":1',
        kill_by: signal.Signals = signal.SIGKILL,
        largest_file: int | None = None,
        apart: bool = False,
        bare: bool = False,
        reversed_mpi: bool = False,
    ) -> Run:
        """Start the site's train.py by its path on all ranks, as this launcher starts it; returns when all have ended.

        environ: what is changed in what the launcher exports. odd_flags, and odd_start, a job id and a count of restarts,
        are for the last rank alone. restart: how often the job was started before. run_dir: the flag that names the folder.
        signal_rank gets a SIGUSR1 in mid-epoch, and kill_ranks get kill_by when run.jsonl has the words of kill_at; or, where
        largest_file says so many bytes, a SIGXFSZ when one of their files has them. apart: each rank is a process of its own,
        as it is where ranks are killed: one that fails alone ends, and its connections with it. bare: in the folder, with these
        flags alone. reversed_mpi: MPI's world has its ranks in the other order.
        """
        import torch  # noqa: F401 - now, and not in the program: the ranks meet after it, whatever it takes on each

        self.starts += 1
        last = self.rank == self.size - 1
        start = odd_start if odd_start and last else (str(1000 + self.starts), restart)
        exported = launch.environ(self.rank, self.size, num_nodes, self.on_rank_0(free_port), *start)
        argv = [*(flags.split() if bare else self.flags(folder, flags, run_dir)), *(odd_flags.split() if last else ())]
        variables = without_launcher() | exported | (environ or {})
        log = folder / "run.jsonl"
        kill = Kill(log, kill_at, kill_by) if self.rank in kill_ranks else None
        with self.writes.below(folder) as written:
            if self.device != "cpu" and (kill_ranks or apart or "--workers" in argv):
                kill = Kill(log, FIRST_STEP, signal.SIGUSR1) if self.rank == signal_rank else kill
                result = _start_anew(launch.train, argv, variables, kill)
            elif kill_ranks or apart:
                limit = largest_file if self.rank in kill_ranks else None
                result = _start_apart(launch.train, argv, variables, None if limit else kill, limit)
            else:
                if self.rank == signal_rank:
                    threading.Thread(target=_signal_in_mid_epoch, args=(log,), daemon=True).start()
                with in_folder(folder if bare else None), self.reversed(reversed_mpi):
                    result = _start(launch.train, argv, variables)
        everyone = zip(*self.gather((*result, sorted(written))), strict=True)
        codes, output, errors, files = map(list, everyone)
        return Run(folder, codes, output, errors, files, self.on_rank_0(lambda: read_records(folder)))

    @contextmanager
    def reversed(self, wanted: bool) -> Iterator[None]:
        """Under it the last rank is MPI's rank 0, for whoever asks."""
        if not wanted:
            yield
            return
        from mpi4py import MPI

        before, MPI.COMM_WORLD = MPI.COMM_WORLD, self.comm.Split(0, -self.rank)  # type: ignore[misc]
        try:
            yield
        finally:
            MPI.COMM_WORLD = before  # type: ignore[misc]

    def alone(self, launch: Launch, folder: Path, flags: str, environ: dict[str, str] | None = None) -> Run:
        """`python train.py` by hand: a process of its own on rank 0, without a launcher. environ: what is changed for it."""

        def by_hand() -> subprocess.CompletedProcess:
            command = [sys.executable, str(launch.train), *self.flags(folder, flags)]
            variables = without_launcher() | (environ or {})
            return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)

        result = self.on_rank_0(by_hand)
        records = self.on_rank_0(lambda: read_records(folder))
        return Run(folder, [result.returncode], [result.stdout], [result.stderr], [[]], records)

    def flags(self, folder: Path, flags: str, run_dir: str = "--run-dir") -> list[str]:
        """What every run of conformance is told; flags come last, so that they count."""
        common = f"{DEADLINES} --log-every 1 --device {self.device} --backend {self.backend}"
        if self.device != "cpu":
            common += " --deterministic"
        return [*common.split(), run_dir, str(folder), *flags.split()]


@contextmanager
def in_folder(folder: Path | None) -> Iterator[None]:
    """As its working directory."""
    before = Path.cwd()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class Writes:
    """Which files this process opens to write, moves or removes below a folder. Python's own audit events tell."""

    def __init__(self):
        self.folder, self.seen = None, set()
        sys.addaudithook(self._hear)

    def below(self, folder: Path) -> "Writes":
        self.folder, self.seen = str(folder), set()
        return self

    def __enter__(self) -> set[str]:
        return self.seen

    def __exit__(self, *_) -> None:
        self.folder = None

    def _hear(self, event: str, arguments: tuple) -> None:
        if self.folder and (event == "open" or event in ("os.rename", "os.link", "os.remove", "os.truncate", "os.mkdir")):
            path, mode, flags = arguments if event == "open" else (arguments[0], None, os.O_WRONLY)
            writes = any(letter in (mode or "") for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR)
            if writes and isinstance(path, str | Path) and str(path).startswith(self.folder):
                self.seen.add(Path(path).name)


# ---- one program in this process ------------------------------------------------------------------------------------


class Kill(NamedTuple):
    """A signal for a rank, when its log has these words."""

    log: Path
    words: str
    number: signal.Signals


class _Left(BaseException):
    """Instead of os._exit, which would take pytest along."""


def _start(program: Path, argv: list[str], environ: dict[str, str]) -> tuple[int, str, str]:
    """Run a program in this process, which has imported torch already: exit code, standard output, standard error."""
    before, here = (dict(os.environ), sys.argv, list(sys.path), os._exit), os.getpid()
    # Buffered as where the output is a file: what is not flushed before os._exit is lost.
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    errors = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", line_buffering=True)

    def leave(code: int) -> None:
        if threading.current_thread() is not threading.main_thread() or os.getpid() != here:
            before[-1](code)  # pytest-timeout's, which means this process; and that of a process that reads rows
        raise _Left(code, written(output), written(errors))

    os.environ.clear()
    os.environ.update(environ)
    sys.argv, sys.path[:0], os._exit = [str(program), *argv], [str(program.parent)], leave  # type: ignore[assignment]
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            runpy.run_path(str(program), run_name="__main__")
        code = 0
    except SystemExit as system_exit:
        code = int(system_exit.args[0] or 0) if system_exit.args else 0
    except _Left as left:
        return left.args
    except Exception:
        errors.write(traceback.format_exc())
        code = 1
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        sys.argv, sys.path[:], os._exit = before[1:]
        _drop_process_group()
        core_of.look(program)
        # What a site has changed of the core ends with its program: the next one imports its own.
        for name in [name for name in sys.modules if name.partition(".")[0] == "ddp_core"]:
            del sys.modules[name]
        if "--workers" in argv:
            _end_workers()
    for stream in (output, errors):
        stream.flush()
    return code, written(output), written(errors)


def written(stream: io.TextIOWrapper) -> str:
    """What has left its buffer."""
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


def _end_workers() -> None:
    """The processes that read rows would have ended with this one.

    A later run's would inherit what is not yet collected, the groups of this one, and wait for threads that they have not.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own calls it an error
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, before)
    gc.collect()


def _drop_process_group() -> None:
    """A program that fails leaves its group to the end of its process, which here goes on: so that peers see it end."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()  # DistributedDataParallel holds it in a circle


def _start_apart(
    program: Path, argv: list[str], environ: dict[str, str], kill: Kill | None = None, largest_file: int | None = None
) -> tuple[int, str, str]:
    """As _start, in a child of this process. largest_file: in bytes, from which on it gets the kernel's SIGXFSZ."""
    sys.stdout.flush()
    sys.stderr.flush()
    receive, send = os.pipe()
    gc.collect()  # stores of earlier runs: in the child they would wait for threads that it has not
    child = os.fork()  # torch is imported already, and no group of it is open
    if child == 0:
        gc.freeze()
        if largest_file:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and would go on to clean up
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        try:
            result = _start(program, argv, environ)
            os.write(send, json.dumps(result)[-60000:].encode())
        finally:
            os._exit(0)
    os.close(send)
    if kill:
        _wait_for(kill.log, kill.words, receive)
        os.kill(child, kill.number)  # not yet reaped, so it is still this child's number
    with open(receive, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    # C++ may have ended it by a handler of the program's, which exits.
    return tuple(json.loads(answer)) if answer else (os.WEXITSTATUS(status) or 128 + os.WTERMSIG(status), "", "")


def _start_anew(program: Path, argv: list[str], environ: dict[str, str], kill: Kill | None) -> tuple[int, str, str]:
    """As _start_apart, by exec: in the fork of a process that has used CUDA there is no CUDA, and once a worker of it hung."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, str(program), *argv], env=environ, stdout=output, stderr=errors)
        if kill:
            exit_fd = os.pidfd_open(process.pid)
            _wait_for(kill.log, kill.words, exit_fd)
            os.close(exit_fd)
            process.send_signal(kill.number)
        code = process.wait()
        for file in (output, errors):
            file.seek(0)
        return code if code >= 0 else 128 - code, output.read(), errors.read()


def _signal_in_mid_epoch(log: Path) -> None:
    """Send this process a SIGUSR1 when the first step is on record, as a scheduler does before the time is up."""
    if _wait_for(log, FIRST_STEP):
        os.kill(os.getpid(), signal.SIGUSR1)


def _wait_for(log: Path, words: str, *ends: int, seconds: float = 60) -> bool:
    """Until a log has these words, or one of these pipes has something to say."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if log.exists() and words in log.read_text():
            return True
        if select.select(ends, [], [], 0.002)[0]:
            break
    return False

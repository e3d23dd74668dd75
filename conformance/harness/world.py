"""The MPI ranks that conformance runs in, and how they start a site's train.py together.

All ranks judge the same evidence: each rank's findings are gathered first, so that a check passes or fails on all ranks
alike. pytest-mpi does not ensure this, and a rank that fails alone hangs the others.
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

# The ranks start within milliseconds of each other, so a rank that waits this long waits for one that will not come.
DEADLINES = "--timeout 60 --rendezvous-timeout 10"
FIRST_STEP = '"kind":"step"'


class World(Target):
    """This rank among the others. comm: an MPI communicator. device, backend: flags for train.py."""

    def __init__(self, comm, device: str = "cpu", backend: str = "auto"):
        super().__init__()
        self.comm, self.device, self.backend = comm, device, backend
        self.rank, self.size, self.ranks_per_node = comm.rank, comm.size, comm.size
        self.backend_in_use = BACKENDS[device] if backend == "auto" else backend
        self.starts = 0
        self.writes = Writes()

    # ---- the ranks --------------------------------------------------------------------------------------------------

    def meet(self, seconds: float = 600) -> bool:
        """Wait for all ranks; False if some have not come. It sleeps: MPI's own wait would take a core from working ranks."""
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
        """Rank 0's result, on every rank. Its exception is raised on all, too."""
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
        """Do nothing: there is no queue here."""

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
        """Start the site's train.py by its path on all ranks, as this launcher does. Return when all have ended.

        environ: changes to the launcher's variables. restart: earlier starts of the job. run_dir: the flag that names the
        folder. odd_flags and odd_start (job id, restarts) are for the last rank only. signal_rank gets a SIGUSR1 in mid-epoch.
        kill_ranks get kill_by when run.jsonl contains kill_at; with largest_file (bytes), a SIGXFSZ when a file is that large.
        apart: each rank is a process of its own, as with kill_ranks: one that fails alone ends, and its connections with it.
        bare: run in the folder, with these flags only. reversed_mpi: MPI's world has its ranks in reverse order.
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
        """Meanwhile MPI's ranks are in reverse order: the last rank is rank 0."""
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
        """`python train.py` by hand: a process of its own on rank 0, without a launcher. environ: changes for it."""

        def by_hand() -> subprocess.CompletedProcess:
            command = [sys.executable, str(launch.train), *self.flags(folder, flags)]
            variables = without_launcher() | (environ or {})
            return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)

        result = self.on_rank_0(by_hand)
        records = self.on_rank_0(lambda: read_records(folder))
        return Run(folder, [result.returncode], [result.stdout], [result.stderr], [[]], records)

    def flags(self, folder: Path, flags: str, run_dir: str = "--run-dir") -> list[str]:
        """The flags of every run. The given flags come last, so they override."""
        common = f"{DEADLINES} --log-every 1 --device {self.device} --backend {self.backend}"
        if self.device != "cpu":
            common += " --deterministic"
        return [*common.split(), run_dir, str(folder), *flags.split()]


@contextmanager
def in_folder(folder: Path | None) -> Iterator[None]:
    """Make the folder the working directory for a while."""
    before = Path.cwd()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class Writes:
    """Which files below a folder this process opens to write, moves or removes. Python's audit events report them."""

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
    """A signal for a rank, sent when its log contains these words."""

    log: Path
    words: str
    number: signal.Signals


class _Left(BaseException):
    """Replaces os._exit, which would end pytest, too."""


def _start(program: Path, argv: list[str], environ: dict[str, str]) -> tuple[int, str, str]:
    """Run a program in this process, which has imported torch: exit code, standard output, standard error."""
    before, here = (dict(os.environ), sys.argv, list(sys.path), os._exit), os.getpid()
    # Buffered like a file: text that is not flushed before os._exit is lost.
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    errors = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", line_buffering=True)

    def leave(code: int) -> None:
        if threading.current_thread() is not threading.main_thread() or os.getpid() != here:
            before[-1](code)  # pytest-timeout means the whole process; a worker that reads rows, itself
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
        # A site's changes to the core end with its program: the next program imports the core anew.
        for name in [name for name in sys.modules if name.partition(".")[0] == "ddp_core"]:
            del sys.modules[name]
        if "--workers" in argv:
            _end_workers()
    for stream in (output, errors):
        stream.flush()
    return code, written(output), written(errors)


def written(stream: io.TextIOWrapper) -> str:
    """The text that has left the stream's buffer."""
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined]


def _end_workers() -> None:
    """Kill the workers that read rows: they would end with this process, which goes on.

    Workers of a later run would inherit this run's process groups if they were not collected, and wait for threads they lack.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own handler reports a killed worker as an error
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, before)
    gc.collect()


def _drop_process_group() -> None:
    """Destroy the process group, so that peers see it end. A failed program leaves that to its process, which here goes on."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()  # DistributedDataParallel holds the group in a reference cycle


def _start_apart(
    program: Path, argv: list[str], environ: dict[str, str], kill: Kill | None = None, largest_file: int | None = None
) -> tuple[int, str, str]:
    """Like _start, in a forked child. largest_file: bytes; a longer file gets the child a SIGXFSZ from the kernel."""
    sys.stdout.flush()
    sys.stderr.flush()
    receive, send = os.pipe()
    gc.collect()  # collect earlier runs' stores: in the child they would wait for threads that it lacks
    child = os.fork()  # safe: torch is imported, and no process group is open
    if child == 0:
        gc.freeze()
        if largest_file:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores this signal, and would go on and clean up
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
        os.kill(child, kill.number)  # the child is not yet reaped, so the PID is still its own
    with open(receive, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    # If C++ ended the child, a handler of the program may have called exit.
    return tuple(json.loads(answer)) if answer else (os.WEXITSTATUS(status) or 128 + os.WTERMSIG(status), "", "")


def _start_anew(program: Path, argv: list[str], environ: dict[str, str], kill: Kill | None) -> tuple[int, str, str]:
    """Like _start_apart, by exec: a fork of a process that has used CUDA has no CUDA, and once a worker of one hung."""
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
    """Send this process a SIGUSR1 when run.jsonl has the first step, as a scheduler does before the time limit."""
    if _wait_for(log, FIRST_STEP):
        os.kill(os.getpid(), signal.SIGUSR1)


def _wait_for(log: Path, words: str, *ends: int, seconds: float = 60) -> bool:
    """True once a log contains these words; False if one of these file descriptors is readable first, or time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if log.exists() and words in log.read_text():
            return True
        if select.select(ends, [], [], 0.002)[0]:
            break
    return False

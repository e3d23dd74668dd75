"""Reads rows one by one through PyTorch's DataLoader: in the core's order, seeded for each row, in worker processes."""

import ctypes
import fcntl
import gc
import os
import signal
import stat
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from functools import cached_property
from multiprocessing import active_children
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from ddp_core.errors import PeerLostError, PreflightError, first_line
from ddp_core.order import AUGMENTATION, generator_positions, seed_others, stream, word
from ddp_core.stop import StopFlag
from ddp_core.workload import ROW, Workload


def loaded(rows: Any, config, places, collate: Callable, workers: int, pin: bool = False) -> Generator[Any]:
    """Batches from DataLoader. places: for each batch, a list of (epoch, row). Raises PreflightError, PeerLostError."""
    timing: dict[str, Any] = dict(timeout=config.timeout, multiprocessing_context="fork") if workers else {}
    loader: DataLoader[Any] = DataLoader(
        SeededRows(rows, config),  # type: ignore[arg-type]
        batch_sampler=places,
        collate_fn=lambda values_and_numbers: collated(collate, *values_and_numbers),
        num_workers=workers,
        pin_memory=pin,
        worker_init_fn=_begin_worker if workers else None,
        **timing,
    )
    # A worker must not finalize the rank's objects, such as a process group: it would wait for threads that it does not have.
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, StopFlag.SIGNALS)  # blocked in a worker until it ignores them (_begin_worker)
    signal_handling._SIGCHLD_handler_set = True  # keeps DataLoader from installing its handler: Workers installs one
    try:
        batches = iter(loader)  # forks the workers
    except OSError as error:
        raise PreflightError(
            f"--workers {workers}: no process could be started to read rows ({error.strerror}): lower it, or raise ulimit -u"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, StopFlag.SIGNALS)
        gc.unfreeze()
    if workers:
        Workers(batches)
    try:
        yield from batches
    except RuntimeError as error:
        if str(error).startswith("Too many open files"):
            raise PreflightError(
                "too many open files: each tensor of a batch that a worker hands on is one; raise ulimit -n, or lower --workers"
            ) from error
        if str(error).startswith(("DataLoader worker", "DataLoader timed out")):
            raise PeerLostError(
                f"a worker that reads rows died or hangs ({first_line(error)}): lower --workers, or see its memory and /dev/shm"
            ) from error
        raise
    finally:
        if workers:
            batches._shutdown_workers()  # type: ignore[attr-defined]


def some(rows: Any, config, places: list[tuple[int, int]], made: Callable[[list], Any]) -> Any:
    """made() of a few rows. With --workers, a worker reads them: a file that a Dataset opens at its first row must not be open
    before the workers are forked, or they would share one position in it.
    """
    batches = loaded(Watched(rows) if config.workers else rows, config, [places], made, min(1, config.workers))
    try:
        return next(batches)
    finally:
        batches.close()


class Watched:
    """Rows that a worker reads to find shared files. A file that the rank opened has one position for all its workers, which
    move it for each other: ValueError if two rows move it. A file that is mapped, or opened again, is no problem.
    """

    def __init__(self, rows: Any):
        self.rows = rows
        self.moved: dict[int, int] = {}  # by file, the first row that moved its position

    def __getitem__(self, row: int) -> Any:
        before = {copied: os.lseek(copied, 0, os.SEEK_CUR) for copied in self.files}
        value = self.rows[row]
        for copied, place in before.items():
            # Only if two rows move it: in a list with one open file a row (images, say), each file has one reader at a time.
            if os.lseek(copied, 0, os.SEEK_CUR) != place and self.moved.setdefault(copied, row) != row:
                raise ValueError(
                    f"{self.files[copied]} was open before the workers (--workers), which would read at each other's places in "
                    "it: open it in __getitem__, at the first row that is read, and not before"
                )
        return value

    @cached_property
    def files(self) -> dict[int, str]:
        """At the first read, in the worker: names of regular files open for reading, by a copy of their descriptor."""
        copies = {}
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the listing's own descriptor is closed by now
                of_rows = number > 2 and stat.S_ISREG(os.fstat(number).st_mode)  # below: read-only, so no log
                if of_rows and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                    copies[os.dup(number)] = os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
        return copies


class WithGenerators:
    """Rows, each with the states of all random generators after it was read."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __getitem__(self, row: int) -> tuple[Any, tuple]:
        return self.rows[row], generator_positions()


class SeededRows:
    """Rows by (epoch, row). Random numbers drawn while a row is read depend on seed, epoch and row only: not on the worker, the
    rank, the world size, or earlier rows.
    """

    def __init__(self, rows: Any, config):
        self.rows, self.seed, self.seeded = rows, config.seed, config.row_seeds == "on"
        self.epoch: int | None = None
        self.state = 0

    def __getitems__(self, places: list[tuple[int, int]]) -> tuple[list, list[int]]:
        """The rows of a batch, and their numbers, which collated() needs for messages. DataLoader calls this."""
        return [self[place] for place in places], [row for _, row in places]

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, row = place
        self.seed_generators(epoch, row)
        try:
            return self.rows[row]
        except StopIteration as error:  # unchanged, it would end the loader
            raise RuntimeError(f"row {row} is behind the last: rows need an index, streams are not supported") from error
        except Exception as error:
            error.add_note(f"{ROW}{row}")
            raise

    def seed_generators(self, epoch: int, row: int) -> None:
        if not self.seeded:
            return
        if epoch != self.epoch:
            self.epoch, self.state = epoch, stream(AUGMENTATION, self.seed, epoch)
        seed = word(row, state=self.state)
        torch.default_generator.manual_seed(seed)
        seed_others(seed)


def collated(collate: Callable, values: list, numbers: list[int]) -> Any:
    """The batch. If rows do not fit together, raises TypeError that names a row that is None, or unlike the others."""
    try:
        return collate(values)
    except Exception as error:
        forms = [form_of(value) for value in values]
        usual = max(forms, key=forms.count)
        odd = [place for place, value in enumerate(values) if value is None and "NoneType" in str(error)]
        why = "__getitem__ returned None for row {0}"
        if not odd and getattr(collate, "__func__", None) is Workload.collate:  # a class's own collate() may accept unlike rows
            odd = [place for place, form in enumerate(forms) if form != usual]
            why = "row {0} is {1}, and row {2} is {3}: rows of other kinds or sizes need a collate() of the class"
        if not odd:
            raise
        first = odd[0]
        named = TypeError(why.format(numbers[first], forms[first], numbers[forms.index(usual)], usual))
        named.add_note(f"{ROW}{numbers[first]}")
        raise named from error


def form_of(value: Any) -> str:
    """The shapes or types in a row, as text."""
    if hasattr(value, "shape"):
        return str([*value.shape])
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {form_of(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        forms = [*map(form_of, value)]
        alike = len(forms) > 3 and len({*forms}) == 1
        return f"{len(forms)} x {forms[0]}" if alike else f"({', '.join(forms)})"
    return type(value).__name__


def _begin_worker(number: int) -> None:
    """Ignore a scheduler's signals, which reach every process of a job: workers read until their rank has saved and ended."""
    for name in StopFlag.SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, StopFlag.SIGNALS)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the rank's process ends
    # A batch that cannot be sent (/dev/shm is full, say) is lost, and the rank would wait for it for ever.
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    sys.excepthook = _pass_over_hang_ups


def _end_worker(error: BaseException, batch: Any) -> None:
    print(f"a worker cannot hand on its rows: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _pass_over_hang_ups(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Hide the error of a thread that sends rows to a rank which has stopped: the rank has closed the connection."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


class Workers:
    """The workers of a DataLoader's iterator: a rank notices here when they die, and ends them.

    DataLoader's own handler raises a worker's death at any place in the rank, even while it holds a queue's lock.
    DataLoader's own event has a lock that a killed worker may hold. Neither lock is released then: a run reported its dead
    worker, and did not end.
    """

    waiting: "Workers | None" = None  # of the class: a rank waits for one loader at a time

    def __init__(self, batches: Any):
        self.batches, self.get, self.ending = batches, batches._try_get_data, False
        batches._try_get_data, batches._workers_done_event = self.wait, self  # the loader uses both to wait and to end
        signal.signal(signal.SIGCHLD, self.look)

    def wait(self, *timeout) -> tuple[bool, Any]:
        """Wait for rows. A worker's death is an error here, and nowhere else."""
        Workers.waiting = self  # before look(), so that no death is missed in between
        try:
            self.look()
            return self.get(*timeout)
        finally:
            Workers.waiting = None

    @staticmethod
    def look(*_) -> None:
        if not Workers.waiting:
            return
        signal_handling._error_if_any_worker_fails()
        # It misses a worker that Python has already reaped, which happens whenever another process starts.
        if dead := [worker.pid for worker in Workers.waiting.batches._workers if worker.exitcode is not None]:
            raise RuntimeError(f"DataLoader worker (pid {dead[0]}) exited unexpectedly")

    def set(self) -> None:
        """Kill the workers. Python's own way at exit is SIGTERM, which they ignore: it would wait for ever."""
        self.ending = True
        if self.batches._worker_pids_set:
            signal_handling._remove_worker_pids(id(self.batches))  # else a killed worker is an error
            self.batches._worker_pids_set = False
        for worker in self.batches._workers:
            worker.kill()

    def is_set(self) -> bool:
        return self.ending


def kill_children() -> None:
    """At exit, before Python waits for its children: a DataLoader that fails while starting leaves its workers running."""
    for child in active_children():
        if child.daemon:
            child.kill()

"""Rows that are read one by one: through PyTorch's DataLoader, in our order, seeded row by row, by processes of their own."""

import ctypes
import fcntl
import gc
import os
import signal
import stat
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from multiprocessing import active_children
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from ddp_core.errors import PeerLostError, PreflightError, first_line
from ddp_core.order import AUGMENTATION, drawn_so_far, seed_others, stream, word
from ddp_core.stop import StopFlag
from ddp_core.workload import ROW, Workload


def loaded(rows: Any, config, places, collate: Callable, workers: int, pin: bool = False) -> Generator[Any]:
    """Batches of DataLoader. places: of each batch, the list of (epoch, row)."""
    timing: dict[str, Any] = dict(timeout=config.timeout, multiprocessing_context="fork") if workers else {}
    seeded = SeededRows(rows, config)
    loader: DataLoader[Any] = DataLoader(
        seeded,  # type: ignore[arg-type]
        batch_sampler=places,
        collate_fn=lambda values: collated(collate, values, seeded.taken()),
        num_workers=workers,
        pin_memory=pin,
        worker_init_fn=_begin_worker if workers else None,
        **timing,
    )
    # Of what the rank has left, a process group say, a worker closes nothing: that would wait for threads it has not.
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, StopFlag.SIGNALS)  # in a worker until it ignores them (_begin_worker)
    signal_handling._SIGCHLD_handler_set = True  # by Workers, which says why
    try:
        batches = iter(loader)  # forks
    except OSError as error:
        raise PreflightError(
            f"--workers {workers}: no process could be started to read rows ({error.strerror}): lower --workers, or raise "
            f"ulimit -u"
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
                f"a worker that reads rows died or hangs ({first_line(error)}): lower --workers, or see its line, its memory "
                "and /dev/shm"
            ) from error
        raise
    finally:
        if workers:
            batches._shutdown_workers()  # type: ignore[attr-defined]


def some(rows: Any, config, places: list[tuple[int, int]], made: Callable[[list], Any]) -> Any:
    """What is made of these rows. Where workers will read, a worker reads these, too: a file that a Dataset opens at its first
    row would otherwise be open before the workers are forked, and they would read at each other's places in it.
    """
    batches = loaded(Watched(rows) if config.workers else rows, config, [places], made, min(1, config.workers))
    try:
        return next(batches)
    finally:
        batches.close()


class _Wrapped:
    """Rows, and something more at each that is read."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)


class Watched(_Wrapped):
    """Rows as a worker tries them. A file that its rank has opened has one place for all its workers, and they would read at
    each other's: it is refused where two rows move that place. One that is mapped, or opened again, is left alone.
    """

    def __init__(self, rows: Any):
        super().__init__(rows)
        self.files: dict[int, str] | None = None
        self.moved: dict[int, int] = {}  # the first row that did

    def __getitem__(self, row: int) -> Any:
        if self.files is None:  # in the worker
            self.files = inherited_files()
        before = {copied: os.lseek(copied, 0, os.SEEK_CUR) for copied in self.files}
        value = self.rows[row]
        for copied, place in before.items():
            # By two rows: a list of a file for each row, as of opened images, has one reader at a time.
            if os.lseek(copied, 0, os.SEEK_CUR) != place and self.moved.setdefault(copied, row) != row:
                raise ValueError(
                    f"{self.files[copied]} was open before the workers (--workers), which would read at each other's places in "
                    "it: open it in __getitem__, at the first row that is read, and not before"
                )
        return value


def inherited_files() -> dict[int, str]:
    """Files that this process can read at its own place, by a copy of their number, which lasts when they are closed."""
    copies = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the folder itself
            of_rows = number > 2 and stat.S_ISREG(os.fstat(number).st_mode)  # and nothing that is written, as a log
            if of_rows and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                copies[os.dup(number)] = os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
    return copies


class WithGenerators(_Wrapped):
    """Rows, each with the positions of all random generators after it was read."""

    def __getitem__(self, row: int) -> tuple[Any, tuple]:
        return self.rows[row], drawn_so_far()


class SeededRows(_Wrapped):
    """Rows by (epoch, row). Whatever is drawn while a row is read is a function of seed, epoch and row, and of nothing else:
    not of the worker, the rank, the world size, or the rows before.
    """

    def __init__(self, rows: Any, config):
        super().__init__(rows)
        self.seed, self.seeded = config.seed, config.row_seeds == "on"
        self.epoch: int | None = None
        self.state = 0
        self.read: list[int] = []  # of the batch that is being read

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, row = place
        self.read.append(row)
        self.seed_generators(epoch, row)
        try:
            return self.rows[row]
        except StopIteration as error:  # which would end the loader
            raise RuntimeError(f"row {row} is behind the last: rows need an index, streams are not supported") from error
        except Exception as error:
            error.add_note(f"{ROW}{row}")
            raise

    def taken(self) -> list[int]:
        read, self.read = self.read, []
        return read

    def seed_generators(self, epoch: int, row: int) -> None:
        if not self.seeded:
            return
        if epoch != self.epoch:
            self.epoch, self.state = epoch, stream(AUGMENTATION, self.seed, epoch)
        seed = word(row, state=self.state)
        torch.default_generator.manual_seed(seed)
        seed_others(seed)


def collated(collate: Callable, values: list, numbers: list[int]) -> Any:
    """The batch; of rows that do not make one that is named which is None, or unlike the others."""
    try:
        return collate(values)
    except Exception as error:
        forms = [_form(value) for value in values]
        usual = max(forms, key=forms.count)
        odd = [place for place, value in enumerate(values) if value is None and "NoneType" in str(error)]
        why = "__getitem__ returned None for row {0}"
        if not odd and getattr(collate, "__func__", None) is Workload.collate:  # a class's own may well take unlike ones
            odd = [place for place, form in enumerate(forms) if form != usual]
            why = "row {0} is {1}, and row {2} is {3}: rows of other kinds or sizes need a collate() of the class"
        if not odd:
            raise
        first = odd[0]
        named = TypeError(why.format(numbers[first], forms[first], numbers[forms.index(usual)], usual))
        named.add_note(f"{ROW}{numbers[first]}")
        raise named from error


def _form(value: Any) -> str:
    """Of a row, in words."""
    if hasattr(value, "shape"):
        return str([*value.shape])
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_form(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        forms = [*map(_form, value)]
        alike = len(forms) > 3 and len({*forms}) == 1
        return f"{len(forms)} x {forms[0]}" if alike else f"({', '.join(forms)})"
    return type(value).__name__


def _begin_worker(number: int) -> None:
    """A scheduler signals every process of a job: workers read on until their rank has saved, and die with it."""
    for name in StopFlag.SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, StopFlag.SIGNALS)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the rank's process ends
    # A batch that cannot be handed on, since /dev/shm is full say, is gone, and the rank would wait for it.
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    sys.excepthook = _pass_over_hang_ups


def _end_worker(error: BaseException, batch: Any) -> None:
    print(f"a worker cannot hand on its rows: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _pass_over_hang_ups(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A rank that stops while it takes rows hangs up on the thread that hands them on. That is no news."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


class Workers:
    """The processes of a DataLoader's iterator, as a rank sees them: when they die, and how they end.

    DataLoader's own handler raises a worker's death wherever the rank is, also where it has just taken a lock of a queue.
    Its event has a lock that a killed worker may hold. Neither lock is released then: a run that had named its worker did
    not end.
    """

    waiting: "Workers | None" = None  # a process has one rank, which waits for one thing

    def __init__(self, batches: Any):
        self.batches, self.get, self.ending = batches, batches._try_get_data, False
        batches._try_get_data, batches._workers_done_event = self.wait, self  # where it waits, and where it tells them to end
        signal.signal(signal.SIGCHLD, self.look)

    def wait(self, *timeout) -> tuple[bool, Any]:
        """For rows. A worker that dies is an error here, and nowhere else."""
        Workers.waiting = self  # first, and then a look at those that have died before
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
        # It passes over one that Python has reaped, as each start of another process does.
        if dead := [worker.pid for worker in Workers.waiting.batches._workers if worker.exitcode is not None]:
            raise RuntimeError(f"DataLoader worker (pid {dead[0]}) exited unexpectedly")

    def set(self) -> None:
        """End them. They ignore SIGTERM, by which Python ends its children before it leaves: it would wait for ever."""
        self.ending = True
        if self.batches._worker_pids_set:
            signal_handling._remove_worker_pids(id(self.batches))  # it calls a killed worker an error
            self.batches._worker_pids_set = False
        for worker in self.batches._workers:
            worker.kill()

    def is_set(self) -> bool:
        return self.ending


def kill_children() -> None:
    """At the end of the process, before Python waits for them: DataLoader that failed while it started has left them."""
    for child in active_children():
        if child.daemon:
            child.kill()

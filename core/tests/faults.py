"""Faults for one process of a job: `train(..., faults={1: at_step(20, signalled(SIGKILL))})`.

A fault is called in the forked process before the program starts. Faults are functions or partial() of functions,
because a lambda cannot be pickled.
"""

import gc
import itertools
import os
import pkgutil
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

Fault = Callable[[], None]


def at_step(number: int, act: Fault) -> Fault:
    """Act before the number-th optimizer step of this process (from 0): after its backward, before anything has changed."""
    return partial(_hook_step, number, act)


def _hook_step(number: int, act: Fault) -> None:
    from ddp_core.guard import Guard

    step, calls = Guard.step, itertools.count()

    def hooked(*args, **kwargs):
        if next(calls) == number:
            act()
        return step(*args, **kwargs)

    Guard.step = hooked


def before_training(act: Fault) -> Fault:
    """Act when the ranks have met and the model is built."""
    return partial(_hook_restore, act)


def _hook_restore(act: Fault) -> None:
    from ddp_core.trainer import Trainer

    restore = Trainer.restore

    def hooked(*args, **kwargs):
        act()
        return restore(*args, **kwargs)

    Trainer.restore = hooked


def after_save(act: Fault) -> Fault:
    """Act after every snapshot that this process writes."""
    return partial(_hook_save, act)


def _hook_save(act: Fault) -> None:
    from ddp_core.run_directory import RunDirectory

    save = RunDirectory.save

    def hooked(*args, **kwargs):
        save(*args, **kwargs)
        act()

    RunDirectory.save = hooked


def signalled(number: signal.Signals) -> Fault:
    """The process sends itself this signal."""
    return partial(_send, number)


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def once_saved(act: Fault) -> Fault:
    """Act when the background writes are finished: for tests that do not kill a running write."""
    return partial(_once_saved, act)


def _once_saved(act: Fault) -> None:
    from ddp_core.background import Saver

    for saver in [found for found in gc.get_objects() if type(found) is Saver and found.pending]:
        saver.pending.exception()  # waits for the write
    act()


def signalled_after(seconds: float, number: signal.Signals) -> Fault:
    """The process gets this signal from a timer, in the middle of other work."""
    return partial(_send_after, seconds, number)


def _send_after(seconds: float, number: signal.Signals) -> None:
    threading.Timer(seconds, _send, [number]).start()


def sleeping(seconds: float) -> Fault:
    return partial(time.sleep, seconds)


def in_turn(*acts: Fault) -> Fault:
    return partial(_call_all, acts)


def _call_all(acts: tuple[Fault, ...]) -> None:
    for act in acts:
        act()


def comparing_calls() -> None:
    """Like TORCH_DISTRIBUTED_DEBUG=DETAIL, which comes too late here: it is read when torch is imported."""
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)


def dying() -> None:
    """The process ends before the program starts, as when its node lacks a library."""
    os._exit(99)


def environment(**variables: str) -> Fault:
    return partial(_set_environment, variables)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def files_limited_to(size: int) -> Fault:
    """No file of the process may grow beyond size bytes from now on. Writes then fail, as on a full disk."""
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))


def slow_disk(seconds: float) -> Fault:
    """Every fsync of the process takes this many seconds longer."""
    return partial(_slow, "os", "fsync", seconds)


def slow_evaluation(seconds: float) -> Fault:
    return partial(_slow, "ddp_core.evaluation:Evaluation", "evaluate", seconds)


def _slow(module: str, name: str, seconds: float) -> None:
    where = pkgutil.resolve_name(module)
    act = getattr(where, name)

    def slowly(*args):
        time.sleep(seconds)
        return act(*args)

    setattr(where, name, slowly)


def seen_late(name: str, looks: int) -> Fault:
    """The process sees files of this name only from its looks-th look on, as on a shared file system with a cache."""
    return partial(_see_late, name, looks)


def _see_late(name: str, looks: int) -> None:
    is_file, calls = Path.is_file, itertools.count(1)
    Path.is_file = lambda path: (path.name != name or next(calls) >= looks) and is_file(path)


def poisoned(row: int) -> Fault:
    """One training row holds a NaN, in this process only."""
    return partial(_poison, row)


def _poison(row: int) -> None:
    from ddp_core import data

    of_workload = data.of_workload

    def poisoned_rows(workload, config):
        train, held_out = of_workload(workload, config)
        train.columns[0][row, 0] = torch.nan
        return train, held_out

    data.of_workload = poisoned_rows


def failing_data(error: Exception) -> Fault:
    """Loading the data fails with this error, in this process only."""
    return partial(_fail_data, error)


def _fail_data(error: Exception) -> None:
    from ddp_core import data

    def failing(workload, config):
        raise error

    data.of_workload = failing


def cores(count: int) -> Fault:
    """Bind the process to this many cores, as a launcher does."""
    return partial(_bind, count)


def _bind(count: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def threads(count: int) -> Fault:
    return partial(torch.set_num_threads, count)


def standing_in(folder: Path) -> Fault:
    """Start in this folder; relative paths begin here."""
    return partial(os.chdir, folder)

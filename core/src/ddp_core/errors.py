"""The failures of a run and their exit codes. The codes are stable, because batch scripts branch on them.

A Failure is an error that the user can fix: one line that names the flag, variable or file, its value and the fix.
Any other exception is a bug of ours: it ends with a traceback and exit code 1.
"""

import errno
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

NAMED = 16  # ranks named in one line at most: two nodes of eight


def printable(text: object, most: int = 160) -> str:
    """Text from files or the environment, safe to print: one line of at most `most` characters, no terminal escapes."""
    text = str(text)
    return "".join(char if char.isprintable() else " " for char in text[:most]) + ("..." if len(text) > most else "")


def first_line(error: BaseException, most: int = 160) -> str:
    """The first line of an error's message; its class name if the message is empty (MemoryError)."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def named(ranks: Sequence[int]) -> str:
    """The first NAMED ranks, as text: a line with 40,000 ranks helps nobody, and would be sent to every rank."""
    return ", ".join(map(str, ranks[:NAMED])) + " and more" * (len(ranks) > NAMED)


class ExitCode(IntEnum):
    DONE = 0
    USAGE = 2  # a wrong flag, a value that this workload or batch size does not allow, or a fault in the workload's file
    PREFLIGHT = 3  # launcher variables, device, data or run directory: nothing was started
    RENDEZVOUS = 4  # the ranks did not meet, or differ in what they are about to run
    SNAPSHOT = 5  # the snapshot cannot be used; it was left unchanged
    NON_FINITE = 6  # a loss or gradient is not finite; stopped before the optimizer used it
    PEER_LOST = 7  # a rank died, hung or ran out of memory; what was saved is whole
    STORAGE = 8  # the run directory cannot be written; what was saved is whole
    STOPPED = 75  # stopped early and saved, on all ranks alike: --run-dir resumes it (EX_TEMPFAIL of sysexits.h)


class Failure(Exception):
    """everywhere: every rank raises the same failure, so only rank 0 prints it."""

    code: ExitCode
    agreed = False  # True: every rank knows of it, and raises it or a Failure of the same code

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(printable(message, 4000))
        self.everywhere = everywhere


class UsageError(Failure, ValueError):
    code = ExitCode.USAGE


class WorkloadError(Failure, ValueError):
    """The workload's file cannot be used, or has failed. The message names the file and the line."""

    code = ExitCode.USAGE


class PreflightError(Failure, ValueError):
    code = ExitCode.PREFLIGHT


class RendezvousError(Failure):
    code = ExitCode.RENDEZVOUS


class SnapshotError(Failure):
    code = ExitCode.SNAPSHOT


class NewerFormatError(SnapshotError):
    """The snapshot was written by a newer ddp_core. No older snapshot is used instead: that would lose trained steps."""


class NonFiniteError(Failure):
    code = ExitCode.NON_FINITE


class PeerLostError(Failure):
    code = ExitCode.PEER_LOST


class StorageError(Failure):
    code = ExitCode.STORAGE


class StoppedError(Failure):
    code = ExitCode.STOPPED


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: beyond ulimit -f


def fix_of(error: OSError, path: Path) -> str:
    """What to do after this file of a run directory could not be written."""
    return f"{'free space' if is_full(error) else 'see to that file system'} and submit again with --run-dir {path.parent}"


def failure_with(code: int, message: str, everywhere: bool = True) -> Failure:
    """A Failure of the exit code that another rank reported."""
    return next(kind for kind in Failure.__subclasses__() if kind.code == code)(message, everywhere)

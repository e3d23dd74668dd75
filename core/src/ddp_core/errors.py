"""What can go wrong, and the exit code that says so. The codes are stable: batch scripts branch on them.

A Failure is an error that the user can act on: one line that names the flag, variable or file, its value and the fix.
Anything else that escapes is a bug of ours: a traceback and exit code 1.
"""

import errno
from collections.abc import Sequence
from enum import IntEnum

NAMED = 16  # ranks, at most, in one line: two nodes of eight


def printable(text: object, most: int = 160) -> str:
    """One line, cut, with nothing that a terminal would obey: of what files and the environment hold."""
    text = str(text)
    return "".join(char if char.isprintable() else " " for char in text[:most]) + ("..." if len(text) > most else "")


def first_line(error: BaseException, most: int = 160) -> str:
    """Of its message, or its class where it has none, as MemoryError has."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def named(ranks: Sequence[int]) -> str:
    """The first of them: a line that names 40,000 helps nobody, and is sent to all."""
    return ", ".join(map(str, ranks[:NAMED])) + " and more" * (len(ranks) > NAMED)


class ExitCode(IntEnum):
    DONE = 0
    USAGE = 2  # a flag, a value that this workload or batch cannot take, or the workload's own file
    PREFLIGHT = 3  # launcher variables, device, data or run directory: nothing was started
    RENDEZVOUS = 4  # the ranks did not meet, or do not agree on what they are about to run
    SNAPSHOT = 5  # there is a snapshot and it cannot be used; it was left as it is
    NON_FINITE = 6  # a loss or gradient is not finite; stopped before the optimizer used it
    PEER_LOST = 7  # a rank died, hung or ran out of memory; what was saved is whole
    STORAGE = 8  # the run directory cannot be written; what was saved is whole
    STOPPED = 75  # stopped early and saved, on all ranks alike: submit again to resume (EX_TEMPFAIL of sysexits.h)


class Failure(Exception):
    """everywhere: every rank raises the same one, so that rank 0 alone prints it."""

    code: ExitCode
    agreed = False  # every rank has learnt of it, and raises this one or one of its code

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(printable(message, 4000))
        self.everywhere = everywhere


class UsageError(Failure, ValueError):
    code = ExitCode.USAGE


class WorkloadError(Failure, ValueError):
    """The workload's file cannot be used, or has failed: names the file and the line."""

    code = ExitCode.USAGE


class PreflightError(Failure, ValueError):
    code = ExitCode.PREFLIGHT


class RendezvousError(Failure):
    code = ExitCode.RENDEZVOUS


class SnapshotError(Failure):
    code = ExitCode.SNAPSHOT


class NewerFormatError(SnapshotError):
    """A snapshot of a ddp_core that is newer than this one: an older snapshot beside it would undo what that has trained."""


class NonFiniteError(Failure):
    code = ExitCode.NON_FINITE


class PeerLostError(Failure):
    code = ExitCode.PEER_LOST


class StorageError(Failure):
    code = ExitCode.STORAGE


class StoppedError(Failure):
    code = ExitCode.STOPPED


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last one: ulimit -f


def fix_of(error: OSError) -> str:
    """What to do where a file cannot be written."""
    return f"{'free space' if is_full(error) else 'see to that file system'} and submit again"


def failure_with(code: int, message: str, everywhere: bool = True) -> Failure:
    """The Failure of an exit code that a peer told us."""
    return next(kind for kind in Failure.__subclasses__() if kind.code == code)(message, everywhere)

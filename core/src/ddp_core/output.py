"""Keep training when standard output fails: its reader has left (| head), its disk is full, it is closed or ASCII only."""

import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress


class Lasting:
    """A stream that falls silent after a failed write, while the program goes on: run.jsonl has the same information."""

    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def _try(self, act: Callable, *arguments: str) -> None:
        try:
            act(*arguments)
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with suppress(OSError, ValueError):  # so that Python's flush at exit does not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        if self.stream is not sys.__stderr__:
            with suppress(OSError, ValueError):
                why = getattr(error, "strerror", None) or error
                print(
                    f"warning: standard output cannot be written ({why}): the run goes on, see its run.jsonl", file=sys.stderr
                )


@contextmanager
def lasting_output():
    """Protect print(), sys.stdout and sys.stderr, also for a workload's file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # fill 0..2 if closed: else a run's file would take the number
        pass
    os.close(descriptor)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (Lasting(stream or open(os.devnull, "w")) for stream in before)  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before

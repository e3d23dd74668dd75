"""--profile N: trace N steps of rank 0 to RUN_DIR/trace.json.gz, which https://ui.perfetto.dev opens.

The trace names data, forward, backward, communication, optimizer and snapshot. Sums that DistributedDataParallel starts during
backward have torch's names (gloo:, nccl:, xccl:). A snapshot follows the last of these steps, so that the trace has one.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import profiler

from ddp_core.errors import StorageError, fix_of
from ddp_core.record import Record

WARM_UP = 5  # steps not traced, since the first ones allocate memory and choose kernels
NOTHING: AbstractContextManager = nullcontext()


class Profile:
    """steps: how many to trace; 0: none. first: the first step of this start. path: on rank 0; None elsewhere."""

    def __init__(self, steps: int, first: int, path: Path | None, record: Record):
        self.path, self.record = path if steps else None, record
        self.trace: profiler.profile | None = None  # while it runs
        self.first = first + WARM_UP
        self.last = self.first + steps if steps else -1

    def part(self, name: str) -> AbstractContextManager:
        """A context that gives its code this name in the trace."""
        return profiler.record_function(name) if self.trace else NOTHING

    def at(self, step: int) -> None:
        """Start or end the trace, if it is time. Called between steps; step: steps done."""
        if step == self.first and self.path:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else kineto prints to stderr when it starts and ends
            self.trace = profiler.profile()  # CPU, and every device that this torch can trace
            self.trace.start()
        elif step == self.last:
            self.end()

    def end(self) -> None:
        """Write the trace, if there is one. Note a failure on the record."""
        trace, self.trace = self.trace, None
        path, self.path = self.path, None
        if path and not trace:
            self.record.say(note=f"--profile: nothing was traced, for that begins with step {self.first}, and none came")
        if path and trace:
            trace.stop()
            try:
                trace.export_chrome_trace(str(path))  # gzipped, because the name ends in .gz
                self.record.say(profile=path, open_it_at="https://ui.perfetto.dev")
            except OSError as error:
                why = f"{error.strerror}: {fix_of(error, path)}, or leave --profile out"
                self.record.failure = StorageError(f"{path}: {why} (torch writes it to TMPDIR first)")

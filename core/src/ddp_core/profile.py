"""--profile N: trace N steps of rank 0 to RUN_DIR/trace.json.gz, which https://ui.perfetto.dev opens.

The trace names data, forward, backward, communication, optimizer and snapshot. Sums that DistributedDataParallel starts during
backward have torch's names (gloo:, nccl:, xccl:). A snapshot follows the last of these steps, so that the trace has one.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ddp_core.errors import StorageError, fix_of
from ddp_core.record import Record

WARM_UP = 5  # steps not traced, since the first ones allocate memory and choose kernels
NOTHING: AbstractContextManager = nullcontext()


class Profile:
    """steps: how many to trace; 0: none. first: the first step of this start. path: on rank 0; None elsewhere."""

    def __init__(self, steps: int, first: int, path: Path | None, record: Record):
        self.path, self.record = path, record
        self.trace: Any = None  # the profiler while it runs
        self.begun = not steps
        self.first = first + WARM_UP if steps else -1
        self.last = self.first + steps if steps else -1

    def part(self, name: str) -> AbstractContextManager:
        """A context that gives its code this name in the trace."""
        if self.trace is None:
            return NOTHING
        from torch.profiler import record_function

        return record_function(name)

    def at(self, step: int) -> None:
        """Start or end the trace, if it is time. Called between steps; step: steps done."""
        if step == self.first and self.path:
            from torch import profiler

            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else kineto prints to stderr when it starts and ends
            self.trace, self.begun = profiler.profile(), True  # CPU, and every device that this torch can trace
            self.trace.start()
        elif step == self.last:
            self.end()

    def end(self) -> None:
        """Write the trace, if there is one. Note a failure on the record."""
        if self.path and not self.begun:
            self.record.say(note=f"--profile: nothing was traced, for that begins with step {self.first}, and none came")
        if self.trace is None or self.path is None:
            return
        trace, self.trace = self.trace, None
        trace.stop()
        try:
            trace.export_chrome_trace(str(self.path))  # gzipped, because the name ends in .gz
            self.record.say(profile=self.path, open_it_at="https://ui.perfetto.dev")
        except OSError as error:
            why = f"{error.strerror}: {fix_of(error, self.path)}, or leave --profile out"
            self.record.failure = StorageError(f"{self.path}: {why} (torch writes it to TMPDIR first)")

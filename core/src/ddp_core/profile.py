"""--profile N: what N steps of rank 0 spend their time on, as run-dir/trace.json.gz, which https://ui.perfetto.dev opens.

Named there are data, forward, backward, communication, optimizer and snapshot; sums that DistributedDataParallel starts during
backward have torch's names (gloo:, nccl:, xccl:). A snapshot is saved after the last of the steps, so that the trace has one.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ddp_core.errors import StorageError, fix_of
from ddp_core.record import Record

WARM_UP = 5  # steps: the first ones allocate memory, and choose kernels
NOTHING: AbstractContextManager = nullcontext()


class Profile:
    """path: rank 0's, None elsewhere. steps: 0 for none. first: the step that this start of the run begins with."""

    def __init__(self, steps: int, first: int, path: Path | None, record: Record):
        self.path, self.record = path, record
        self.trace: Any = None  # while it is taken
        self.begun = not steps
        self.first = first + WARM_UP if steps else -1
        self.last = self.first + steps if steps else -1

    def part(self, name: str) -> AbstractContextManager:
        """What is done under it has this name in the trace."""
        if self.trace is None:
            return NOTHING
        from torch.profiler import record_function

        return record_function(name)

    def at(self, step: int) -> None:
        """Between two steps; step: how many are done."""
        if step == self.first and self.path:
            from torch import profiler

            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells stderr that it begins, and that it ends
            self.trace, self.begun = profiler.profile(), True  # of all that this torch can trace
            self.trace.start()
        elif step == self.last:
            self.end()

    def end(self) -> None:
        """Write what has been traced."""
        if self.path and not self.begun:
            self.record.say(note=f"--profile: nothing was traced, for that begins with step {self.first}, and none came")
        if self.trace is None or self.path is None:
            return
        trace, self.trace = self.trace, None
        trace.stop()
        try:
            trace.export_chrome_trace(str(self.path))  # packed, as its name says
            self.record.say(profile=self.path, open_it_at="https://ui.perfetto.dev")
        except OSError as error:
            why = f"{error.strerror}: {fix_of(error)}, or leave --profile out"
            self.record.failure = StorageError(f"{self.path}: {why} (torch writes it to TMPDIR first)")

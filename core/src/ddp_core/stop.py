"""The wish to stop, as a flag. A signal handler that does more than this deadlocks or dies (Lightning#21406)."""

import signal


class StopFlag:
    """Set by SIGTERM (preemption, cancel), SIGUSR1 (the scheduler's warning) and SIGINT (Ctrl-C).

    The trainer asks for it at step boundaries and stops when all ranks have agreed to. The handlers stay to the end of the
    process: a launcher that ends the other ranks once one has left with 75 must not turn their 75 into 143.
    """

    def __init__(self):
        self.reason = ""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._set)

    def __bool__(self) -> bool:
        return bool(self.reason)

    def _set(self, number, frame) -> None:
        self.reason = signal.Signals(number).name

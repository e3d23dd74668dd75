"""The wish to stop, as a flag. A signal handler that does more than this deadlocks or dies (Lightning#21406)."""

import signal


class StopFlag:
    """Set by SIGTERM (preemption, cancel), SIGUSR1 (the scheduler's warning) and SIGINT (Ctrl-C).

    The trainer asks for it at step boundaries and stops when all ranks have agreed to.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self):
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __enter__(self) -> "StopFlag":
        self._previous = {number: signal.signal(number, self._set) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _set(self, number, frame) -> None:
        self.reason = signal.Signals(number).name

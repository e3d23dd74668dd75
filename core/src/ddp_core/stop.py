"""A flag that signals set. A signal handler that does more than set a flag can deadlock or crash (Lightning#21406)."""

import os
import signal
import time


class StopFlag:
    """Set by SIGTERM (preemption, cancel), SIGUSR1 (the scheduler's warning) and SIGINT (Ctrl-C).

    The trainer reads it between steps, and stops once all ranks have agreed to.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self):
        self.reason, self.since = "", 0.0
        self.listen()

    def listen(self) -> None:
        for number in self.SIGNALS:
            signal.signal(number, self._set)

    def ignore(self) -> None:
        """Ignore the signals from now on: a launcher may send SIGTERM to all ranks once one has left, and their exit code must
        stay 75, not 143. Python removes its own handlers while it ends, but ignored signals stay ignored.
        """
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def __bool__(self) -> bool:
        return bool(self.reason)

    def _set(self, number, frame) -> None:
        if not self.reason:  # keep the first: a launcher may send SIGTERM later, when ranks end
            self.since, self.reason = time.monotonic(), signal.Signals(number).name


def _in_a_fork() -> None:
    """Make processes that the workload forks ignore these signals, except SIGTERM, by which multiprocessing.Pool ends its own.
    SIGTERM gets the default action, not a Python handler: that runs too late if the process has just begun to wait for a lock.
    """
    for number in StopFlag.SIGNALS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), StopFlag):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


os.register_at_fork(after_in_child=_in_a_fork)

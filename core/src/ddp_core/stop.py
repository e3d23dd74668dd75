"""The wish to stop, as a flag. A signal handler that does more than this deadlocks or dies (Lightning#21406)."""

import os
import signal
import time


class StopFlag:
    """Set by SIGTERM (preemption, cancel), SIGUSR1 (the scheduler's warning) and SIGINT (Ctrl-C).

    The trainer asks for it at step boundaries and stops when all ranks have agreed to.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self):
        self.reason, self.since = "", 0.0
        self.listen()

    def listen(self) -> None:
        for number in self.SIGNALS:
            signal.signal(number, self._set)

    def ignore(self) -> None:
        """From now on: a launcher may end the other ranks once one has left, and must not turn their 75 into 143.

        Python takes its own handlers away while it ends; what is ignored stays ignored.
        """
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def __bool__(self) -> bool:
        return bool(self.reason)

    def _set(self, number, frame) -> None:
        if not self.reason:  # the first one is the reason; a launcher may send SIGTERM after it, as ranks end
            self.since, self.reason = time.monotonic(), signal.Signals(number).name


def _in_a_fork() -> None:
    """A process that the workload has forked ignores the run's stop, except SIGTERM: a multiprocessing.Pool ends its own by it.
    SIGTERM ends it at once: a handler of Python's comes too late where the process has just begun to wait for a lock.
    """
    for number in StopFlag.SIGNALS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), StopFlag):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


os.register_at_fork(after_in_child=_in_a_fork)

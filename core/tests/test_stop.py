"""The stop flag: which signals it hears, and when it stops hearing them.

python -m pytest core/tests/test_stop.py
"""

import os
import signal
import sys

import pytest
import ranks
from ddp_core.stop import StopFlag


def ends_with_75(number: int) -> int:
    """The launcher ends the other ranks by SIGTERM when one exits, while Python removes its handlers."""
    stop = StopFlag()
    stop.ignore()
    os.kill(os.getpid(), number)
    sys.stdout.flush()
    return 75 if not stop else 1


@pytest.mark.parametrize("number", StopFlag.SIGNALS)
def test_a_rank_that_leaves_hears_no_signal_any_more(tmp_path, number):
    assert ranks.fork(tmp_path, ranks.call("test_stop", "ends_with_75", number)).codes == [75]


def has_a_child(number: int) -> int:
    """0 if the child survives; else the number of the signal that ended it."""
    stop = StopFlag()
    if not (child := os.fork()):
        os.kill(os.getpid(), number)
        os._exit(1 if stop else 0)
    return -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number, code", [(signal.SIGUSR1, 0), (signal.SIGINT, 0), (signal.SIGTERM, signal.SIGTERM)])
def test_a_process_that_a_workload_forks_ends_by_sigterm_alone(tmp_path, number, code):
    """A scheduler signals all processes of a job. multiprocessing ends its processes by SIGTERM and waits for them."""
    assert ranks.fork(tmp_path, ranks.call("test_stop", "has_a_child", number)).codes == [code]


def hears(number: int) -> int:
    stop = StopFlag()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)  # as launchers do when a rank ends
    return 0 if stop.reason == signal.Signals(number).name else 1


@pytest.mark.parametrize("number", StopFlag.SIGNALS)
def test_the_first_signal_is_the_reason(tmp_path, number):
    assert ranks.fork(tmp_path, ranks.call("test_stop", "hears", number)).codes == [0]

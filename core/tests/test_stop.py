"""The wish to stop, heard and no longer heard.

python -m pytest core/tests/test_stop.py
"""

import os
import signal
import sys

import pytest
import ranks
from ddp_core.stop import StopFlag


def ends_with_75(number: int) -> int:
    """A launcher that ends the others once one has left sends them SIGTERM while Python takes its own handlers away."""
    stop = StopFlag()
    stop.ignore()
    os.kill(os.getpid(), number)
    sys.stdout.flush()
    return 75 if not stop else 1


@pytest.mark.parametrize("number", StopFlag.SIGNALS)
def test_a_rank_that_leaves_hears_no_signal_any_more(tmp_path, number):
    assert ranks.fork(tmp_path, ranks.call("test_stop", "ends_with_75", number)).codes == [75]


def hears(number: int) -> int:
    stop = StopFlag()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)  # as ranks end
    return 0 if stop.reason == signal.Signals(number).name else 1


@pytest.mark.parametrize("number", StopFlag.SIGNALS)
def test_the_first_signal_is_the_reason(tmp_path, number):
    assert ranks.fork(tmp_path, ranks.call("test_stop", "hears", number)).codes == [0]

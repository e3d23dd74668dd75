"""Print a line when C++ ends the process. gloo's own thread does so when a message has another size than expected.

No exception reaches Python then, but C++ calls a handler first: https://en.cppreference.com/w/cpp/error/set_terminate
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddp_core.errors import ExitCode


@contextmanager
def spoken(words: Callable[[], str]) -> Iterator[None]:
    """Within this context a process that C++ ends prints words() and exits with 7, not with C++'s message and 134."""

    def terminate() -> None:
        print(words(), file=sys.stderr, flush=True)
        os._exit(ExitCode.PEER_LOST)

    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):  # another C++ library: its own message stays
        yield
        return
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None)(terminate)
    before = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:  # while Python shuts down, the handler could not run any more
        set_terminate(before)

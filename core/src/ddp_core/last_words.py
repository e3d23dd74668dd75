"""A line where C++ ends the process. gloo does so, from a thread of its own, when a message has another size than expected.

No exception reaches Python then. C++ asks a handler first, https://en.cppreference.com/w/cpp/error/set_terminate
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddp_core.errors import ExitCode


@contextmanager
def spoken(words: Callable[[], str]) -> Iterator[None]:
    """Meanwhile a process that C++ ends prints these words and exits with 7, instead of C++'s own and 134."""

    def terminate() -> None:
        print(words(), file=sys.stderr, flush=True)
        os._exit(ExitCode.PEER_LOST)

    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):  # another library of C++: its own words, as ever
        yield
        return
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None)(terminate)
    before = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:  # not while Python ends: then there is nothing left to call
        set_terminate(before)

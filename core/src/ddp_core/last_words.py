"""A line where C++ ends the process: gloo does it from a thread of its own when a message has not the size that it waits for.

No exception reaches Python then. C++ asks a handler first, https://en.cppreference.com/w/cpp/error/set_terminate
"""

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ddp_core.errors import ExitCode

_handlers: list[Any] = []  # C++ has their addresses: they must not be collected


def leave(words: Callable[[], str]) -> None:
    """From now on the process prints these words and ends with 7, instead of C++'s own and 134."""

    def terminate() -> None:
        print(words(), file=sys.stderr, flush=True)
        os._exit(ExitCode.PEER_LOST)

    with suppress(OSError, AttributeError):  # another library of C++: its own words, as ever
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        _handlers.append(ctypes.CFUNCTYPE(None)(terminate))
        set_terminate(_handlers[-1])

"""A port for rank 0 that no other test on this machine has been given."""

import random
import socket
from collections import deque
from contextlib import suppress

PORTS = range(20000, 32000)  # below the range that Linux gives to outgoing connections, which could take a port at any moment
HELD: deque[socket.socket] = deque(maxlen=32)  # the names that hold the last 32 ports; jobs with older ports have ended


def free_port() -> int:
    """A port on which nobody listens. No other process gets it from here until this one ends, or has asked for 32 more.

    A name in Linux's abstract socket namespace holds it. Like a port, the name belongs to the network namespace, and the kernel
    removes it with its process.
    """
    while True:
        port, name = random.SystemRandom().choice(PORTS), socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.socket() as listener:
            name.bind(f"\0ddp-sites-port-{port}")
            listener.bind(("", port))
            if len(HELD) == HELD.maxlen:
                HELD.popleft().close()
            HELD.append(name)
            return port
        name.close()

"""A port for rank 0, that no other test on this machine has been given."""

import random
import socket
from collections import deque
from contextlib import suppress

PORTS = range(20000, 32000)  # below those that Linux gives to outgoing connections: a moment later one could be somebody's
HELD: deque[socket.socket] = deque(maxlen=32)  # the names of the last ports; a job before these is over


def free_port() -> int:
    """Nobody listens there yet, and until this process ends or has asked for many more nobody else gets it from here.

    The name in Linux's abstract namespace is what holds it: like a port it is of this network, and it goes with its process.
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

"""A process on rank 0's machine that is not part of the job: it finds where the port is open, and writes into the store."""

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

ENDS = dict(error=[75, "stopped before the first step"])
# A forgery that would help an attacker: all ranks end as if the job were to start again.
FORGED = {"rank/0": ENDS, "rank/1": ENDS, "verdict": ENDS}
SIGNATURE = bytes(32)
LISTEN = "0A"


@contextmanager
def stranger(port: int) -> Iterator[set[str]]:
    """Meanwhile a process overwrites what the ranks write. Afterwards the set holds the addresses where the port was open."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            _overwrite(port, send)
        finally:
            os._exit(0)
    os.close(send)
    addresses: set[str] = set()
    try:
        yield addresses
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(receive) as pipe:
            addresses.update(pipe.read().split())


def _overwrite(port: int, send: int) -> None:
    from torch.distributed import TCPStore

    while not (addresses := listening(port)):
        time.sleep(0.001)
    os.write(send, " ".join([*addresses, ""]).encode())
    store: Any = TCPStore(os.uname().nodename, port, None, False, timedelta(seconds=10), wait_for_workers=False)
    with suppress(RuntimeError):  # rank 0 has left
        while True:
            for key, value in FORGED.items():
                store.set(f"ddp_core//{key}", SIGNATURE + json.dumps(value).encode())


def listening(port: int) -> list[str]:
    """The addresses of this machine where a program listens on this port. 0.0.0.0 and :: mean all addresses."""
    addresses = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == LISTEN and int(number, 16) == port:
                words = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
                addresses.append(socket.inet_ntop(family, b"".join(words)))
    return addresses

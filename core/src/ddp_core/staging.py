"""Read each data file from its file system once per node, not once per rank: the ranks of a node share a copy in memory.

    path = self.once_a_node(path)        in a workload's data()

The first rank of a node copies the file into unnamed memory (memfd_create), and passes the open file to the others over a
socket. So no other user can replace the file, and nothing is left behind, however the job ends: the memory is freed with the
last rank. Seals make it read-only. A file without a copy is read where it is, and a note at the start says why. The ranks
compare what they have read as usual, by the fingerprint of the rows.
"""

import fcntl
import os
import resource
import socket
import stat
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ddp_core.errors import first_line, printable
from ddp_core.memory import available
from ddp_core.rank import Rank
from ddp_core.rendezvous import Rendezvous, with_timeout

CHUNK = 2**24  # bytes
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
IN_MEMORY = ("tmpfs", "ramfs")  # file systems that are memory already: /dev/shm, and /tmp of a node without a disk


class Staging:
    """The copies of a node. Its first rank makes them and serves them; the other ranks request them."""

    def __init__(self, rank: Rank, rendezvous: Rendezvous, wanted: bool):
        self.shared, self.leads, self.rendezvous = wanted and rank.local_world_size > 1, rank.local_rank == 0, rendezvous
        self.key = f"staging/{rank.node_rank}"
        self.copies: dict[str, int | None] = {}  # open file by path; None: no copy, read the file where it is
        self.note: dict[str, str] = {}  # for this rank's row: why the first file without a copy has none
        # Copy until half of --rendezvous-timeout is over: the rest is left for reading files where they are.
        self.until = (time.monotonic() + rendezvous.deadline) / 2
        self.over = False  # set once this rank has read its data, or failed to: then the others wait for no further copy
        self.address = b""
        if self.shared and self.leads:
            self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.server.bind("")  # Linux chooses an abstract address, which is no file
            self.server.listen(rank.local_world_size)
            rendezvous.store.set(self.key, self.server.getsockname())
            threading.Thread(target=self._serve, daemon=True).start()

    def once(self, path: str | Path) -> Path:
        """The path to read from: that of the copy (/proc/PID/fd/N), or `path` if there is none."""
        name = os.path.abspath(path)
        if self.shared and name not in self.copies:
            self.copies[name] = self._copy(name) if self.leads else self._ask(name)
        copy = self.copies.get(name)
        return Path(path) if copy is None else Path(f"/proc/{os.getpid()}/fd/{copy}")

    def close(self) -> None:
        """Serve no more: all ranks have read their data. Their copies live as long as they do."""
        if self.shared and self.leads:
            with suppress(OSError):  # the socket is closed already
                self.server.shutdown(socket.SHUT_RDWR)  # ends accept() in the thread
            self.server.close()

    def _copy(self, name: str) -> int | None:
        """Copy the file. Returns the copy's file descriptor, or None if the file is to be read where it is."""
        if not self.copies:
            self.room = available() // 2
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8  # a copy is an open file, mapping it opens another
        try:
            status = os.stat(name)
            if not stat.S_ISREG(status.st_mode) or _in_memory(status.st_dev):
                return None
            if status.st_size > self.room:
                left = f"of half of the memory that was free, {self.room} bytes are left"
                return self._no_copy(name, f"it has {status.st_size} bytes, and {left}")
            if len(self.copies) >= most:
                return self._no_copy(name, f"ulimit -n allows {most} copies")
            nameless = os.memfd_create(os.fsdecode(os.fsencode(name)[-200:]), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            with open(nameless, "wb") as copy, open(name, "rb", buffering=0) as file:
                while (chunk := file.read(CHUNK)) and time.monotonic() < self.until and not self.rendezvous.stop:
                    copy.write(chunk)
                if chunk:
                    return self._no_copy(name, "copying took half of --rendezvous-timeout")
                copy.flush()
                fcntl.fcntl(copy, fcntl.F_ADD_SEALS, SEALS)
                self.room -= status.st_size
                return os.dup(copy.fileno())
        except OSError as error:  # if the file itself is at fault, reading it raises the error later
            return self._no_copy(name, str(error.strerror))

    def _no_copy(self, name: str, why: str) -> int | None:
        host = socket.gethostname()
        self.note.setdefault("in_place", f"{printable(name, 400)} is read by each rank of {host}, not once: {why}")
        return None

    def _serve(self) -> None:
        with suppress(OSError):  # close() was called
            while True:
                line, _ = self.server.accept()
                with line, suppress(OSError):
                    if not _of_this_user(line):
                        continue
                    line.settimeout(1)
                    name = os.fsdecode(line.recv(2**16))
                    while name not in self.copies and not self.over:
                        time.sleep(0.01)
                    copy = self.copies.get(name)
                    socket.send_fds(line, [b"."], [] if copy is None else [copy])

    def _ask(self, name: str) -> int | None:
        seconds, store = max(1.0, self.until - time.monotonic()), self.rendezvous.store
        try:
            if not self.address:
                with_timeout(lambda: store.wait([self.key], timedelta(seconds=seconds)), seconds + 1)
                self.address = store.get(self.key)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.settimeout(seconds + 5)
                line.connect(self.address)
                if not _of_this_user(line):
                    return self._no_copy(name, "another user's program has the address of the first rank")
                line.send(os.fsencode(name))
                _, copies, *_ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except (OSError, RuntimeError) as error:
            return self._no_copy(name, f"its first rank gave no copy ({first_line(error, 80)})")
        return copies[0] if copies else None


def _of_this_user(line: socket.socket) -> bool:
    """Whether the other end runs as this user: anybody on the node can connect to an abstract address, or reuse a free one."""
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.geteuid()


def _in_memory(device: int) -> bool:
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(words[2] == number and words[words.index("-") + 1] in IN_MEMORY for words in mounts)


def notes_on_copies(rows: list[dict]) -> list[str]:
    """A note on files that each rank read itself, though once per node was wanted. Removes `in_place` from the rows."""
    notes = [(row["node_rank"], row.pop("in_place")) for row in rows if "in_place" in row]
    others = len({node for node, _ in notes}) - 1
    return [f"{why}{f'; {others} other nodes say so, too' if others else ''}" for _, why in notes[:1]]

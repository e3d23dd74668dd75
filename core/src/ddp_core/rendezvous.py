"""How the ranks of a job meet before any process group exists: the store that rank 0 serves, and the check-in."""

import errno
import hmac
import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_core.device import refuse_shared_devices
from ddp_core.errors import ExitCode, Failure, RendezvousError, StoppedError, failure_with, named
from ddp_core.rank import Rank
from ddp_core.stop import StopFlag

REPORT_SECONDS = 10.0  # seconds that a rank whose workload file failed tries to reach rank 0
FIXES = dict.fromkeys(
    ("training_rows", "held_out_rows", "data"),
    ": data() should give all ranks the same rows: draw from torch's, Python's or NumPy's own generators, which are seeded, "
    "sort what sets and os.listdir() give, and read files that nobody writes",
) | dict(
    workload_file=": it, or what it imports from beside it, is a copy of another age on that node",
    core=": other files of ddp_core on that node: run the site's install.sh again",
    python=": other versions of Python: run the site's install.sh again",
    cpu_capability=": their sums round differently: ask for nodes of one kind, or export ATEN_CPU_CAPABILITY=avx2 to all",
)
SIGNATURE = 32  # bytes of an HMAC-SHA256
GRACE = 2.0  # seconds that a rank stays after a stop signal, so that all ranks can report, or learn, why the job ends


class SignedStore(dist.Store):
    """A store whose values carry a signature made with the job's secret, so that values of other programs are refused.

    Gloo exchanges its addresses through it, too. add() and check() are not signed: they only decide whether ranks refuse to
    start, and how long a leaving rank waits for the others.
    """

    def __init__(self, store: dist.Store, secret: str, where: str):
        super().__init__()
        self.store: Any = store
        self.secret, self.where = secret.encode(), where

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        self.store.set(key, self._signature(key, value) + value)

    def get(self, key: str) -> bytes:
        value, signed = self.read(key)
        if not signed:
            raise self.foreign(key)
        return value

    def read(self, key: str) -> tuple[bytes, bool]:
        """The value, and whether a rank of this job wrote it."""
        stored = self.store.get(key)
        return stored[SIGNATURE:], hmac.compare_digest(stored[:SIGNATURE], self._signature(key, stored[SIGNATURE:]))

    def foreign(self, key: str) -> RendezvousError:
        return RendezvousError(
            f"{self.where}: the {key} in rank 0's store is not what a rank of this job writes: a program that is not the job's "
            f"has been there, or ranks differ in ddp_core or DDP_SECRET"
        )

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + value, "sha256")

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.store.wait(keys, *timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)


class Rendezvous:
    """The store that rank 0 serves, and the check-in: every rank learns that all ranks are ready, or why they are not."""

    def __init__(self, rank: Rank, seconds: float, stop: StopFlag):
        """Connect to rank 0. Raises RendezvousError after `seconds` (--rendezvous-timeout), at once on another job's rank 0."""
        self.rank, self.stop, self.seconds, self.deadline = rank, stop, seconds, time.monotonic() + seconds
        self.where = f"MASTER_ADDR={rank.master_addr} MASTER_PORT={rank.master_port}"
        self.unsigned: Any = dist.HashStore()
        self.store: Any = self.unsigned
        if rank.world_size == 1:
            return  # no other rank, so no port is opened
        serves = rank.rank == 0 and not rank.launcher_store
        try:
            socket.getaddrinfo(rank.master_addr, rank.master_port)
            options: dict[str, Any] = dict(is_master=serves, timeout=timedelta(seconds=seconds), wait_for_workers=False)
            options |= dict(master_listen_fd=self._listen().detach()) if serves else {}
            store = self._wait(lambda: dist.TCPStore(rank.master_addr, rank.master_port, **options))
        except OSError as error:
            raise RendezvousError(f"{self.where}: {error.strerror}: is it the address of the job's first node?") from error
        except (RuntimeError, ValueError) as error:  # its own message is pages of C++ frames
            raise RendezvousError(
                f"{self.where}: rank 0 did not answer rank {rank.rank} on {socket.gethostname()} within "
                f"{seconds:g} s (--rendezvous-timeout): it failed earlier, or cannot be reached from here"
            ) from error
        # A launcher's store outlives a restart of the ranks, so job_id separates the keys of one start from the next.
        self.unsigned = dist.PrefixStore(f"ddp_core/{rank.job_id if rank.launcher_store else ''}", store)
        self.store = SignedStore(self.unsigned, rank.secret, self.where)
        self._greet()

    def _listen(self) -> socket.socket:
        """Open rank 0's port, only on the interface that MASTER_ADDR names."""
        host, port, here = self.rank.master_addr, self.rank.master_port, socket.gethostname()
        for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            # Debian's /etc/hosts maps the node's own name to a loopback address. Other nodes resolve it to another one, which
            # this node does not know, so it listens on all.
            loopback = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
            everywhere = loopback and self.rank.local_world_size < self.rank.world_size
            if everywhere:
                note = f"MASTER_ADDR={host} is {place[0]} on {here} itself (/etc/hosts), so rank 0 listens on all interfaces"
                print(f"note: {note}", file=sys.stderr)
            try:
                return socket.create_server(("", port) if everywhere else place, family=family, backlog=4096)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise RendezvousError(
                        f"{self.where} is taken on {here} by another program: choose another MASTER_PORT"
                        if error.errno == errno.EADDRINUSE
                        else f"{self.where}: {error.strerror} on {here}"
                    ) from error
        raise RendezvousError(
            f"{self.where} is no address of {here}, where rank 0 is: is it the address of the job's first node?"
        )

    def _greet(self) -> None:
        """Read rank 0's greeting before writing any key: another job's rank 0 may answer on this port."""
        mine = dict(job_id=self.rank.job_id, world_size=self.rank.world_size)
        if self.rank.rank == 0:
            self.store.set("greeting", json.dumps(mine))
            return
        text, signed = self._get("greeting", self.store.read)
        theirs = mine | _parsed(text)  # read even if unsigned: the error then names the other job
        if theirs["job_id"] != mine["job_id"]:
            job = ascii(str(theirs["job_id"])[:80])[1:-1]  # escaped, since another program may have written it
            raise RendezvousError(
                f"{self.where} belongs to job {job}, and this is job {mine['job_id']}: choose another MASTER_PORT"
            )
        if not signed:
            raise self.store.foreign("greeting")
        if theirs["world_size"] != mine["world_size"]:
            message = f"world_size={mine['world_size']} on rank {self.rank.rank}, but {theirs['world_size']} on rank 0"
            self._raise_objection(message)
        if self.store.add(f"count/{self.rank.rank}", 1) > 1:
            message = f"rank {self.rank.rank} is there twice, also on {socket.gethostname()}: check the launch line"
            self._raise_objection(message, twice=True)

    def check_in(self, facts: dict, row: dict, error: Failure | None) -> list[dict]:
        """Report to rank 0 and wait for its verdict. Returns all ranks' rows on rank 0, [] on the others.

        facts: must be equal on all ranks. row: describes this rank. Raises on all ranks, and rank 0 prints it: the failure of
        the first rank that has one, or RendezvousError for missing ranks and for facts that differ.
        """
        mine: dict = dict(error=[int(error.code), str(error)]) if error else dict(facts=facts, row=row)
        self.store.set(f"rank/{self.rank.rank}", json.dumps(mine))
        rows: list[dict] = []
        if self.rank.rank == 0:
            verdict: dict = dict(well=True)
            try:
                rows = self._collect()
            except Failure as failure:
                verdict = dict(error=[int(failure.code), str(failure)])
            self.store.set("verdict", json.dumps(verdict))
        else:
            try:
                text = self._get("verdict")
            except RendezvousError:
                waited = f"{self.seconds:g} s (--rendezvous-timeout)"
                late = f"rank {self.rank.rank} has given up after {waited}: rank 0 was not ready"
                with suppress(RuntimeError):  # rank 0 may still be reading its data, or may be gone
                    with_timeout(lambda: self.store.set("objection", late), 1)
                raise
            verdict = self._validated(text, "verdict", "well")
        if verdict.get("error"):
            self._leave_together()
            raise failure_with(*verdict["error"])
        return rows

    def _leave_together(self, answers: bool = True) -> None:
        """Wait until all ranks know why they end, also late ones. The store ends with rank 0, and a launcher may kill all ranks
        once one has left (srun --kill-on-bad-exit=1), which changes their exit codes.
        """
        if self.rank.rank:
            with suppress(RuntimeError, RendezvousError, StoppedError):  # rank 0 has left, or this rank got a stop signal
                if answers:
                    self.store.set(f"heard/{self.rank.rank}", "")
                self._get("farewell")
            return
        others = [f"heard/{rank}" for rank in range(1, self.rank.world_size)]
        end = max(self.deadline, time.monotonic() + 1)
        while time.monotonic() < end and others and not self.store.check(others):
            if self.stop:  # then some ranks may be dead, and never answer
                end = min(end, time.monotonic() + GRACE)
            time.sleep(0.02)
        self.store.set("farewell", "")

    def _collect(self) -> list[dict]:
        entries, began, size = dict[int, dict](), time.monotonic(), self.rank.world_size
        missing = [*range(size)]
        while True:
            if self.store.check(["objection"]):
                raise RendezvousError(self.store.get("objection").decode())
            for rank in missing:
                key = f"rank/{rank}"
                if not self.store.check([key]):
                    continue
                entry = entries[rank] = self._validated(self.store.get(key), key, "facts", "row")
                if entry.get("error"):
                    code, message = entry["error"]
                    raise failure_with(code, message if rank == 0 else f"rank {rank}: {message}")
                for name in entry["facts"] | entries[0]["facts"]:
                    theirs, ours = (each["facts"].get(name, "nothing") for each in (entry, entries[0]))
                    if theirs != ours:
                        message = f"{name}={theirs} on rank {rank}, but {ours} on rank 0{FIXES.get(name, '')}"
                        raise RendezvousError(f"{message} (rank {rank} is on {entry['row'].get('host')})")
            missing = [rank for rank in missing if rank not in entries]
            if not missing:
                break
            names = named(missing)
            if time.monotonic() > self.deadline:
                raise RendezvousError(
                    f"{len(missing)} of {size} ranks missing after {self.seconds:g} s (--rendezvous-timeout): rank {names}"
                )
            self._raise_if_stopped(missing=f" (rank {names} had not)")
            # Each look sends a request per missing rank, so look less often the longer it takes.
            time.sleep(max(0.005, min(0.5, 0.05 * (time.monotonic() - began), self.deadline - time.monotonic())))
        rows = [entries[rank]["row"] for rank in range(size)]
        refuse_shared_devices(rows)
        return rows

    def _raise_objection(self, message: str, twice: bool = False) -> None:
        """Fail for a reason that rank 0 cannot see. Rank 0 prints it, unless all its ranks had checked in before.

        twice: another process is this rank, too, and answers rank 0.
        """
        self.store.set("objection", message)
        try:
            failed = "error" in self._validated(self._get("verdict"), "verdict", "well")
        except (RendezvousError, RuntimeError):
            failed = True  # rank 0 has left, so the job had failed already
        if failed:
            self._leave_together(answers=not twice)
        raise RendezvousError(message, everywhere=failed)

    def _validated(self, text: bytes, key: str, *names: str) -> dict:
        """A rank's JSON document, which must have these names or an error: without a secret anybody can write one."""
        document = _parsed(text)
        match document.get("error"):
            case None:
                valid = all(name in document for name in names)
            case [code, str()]:
                valid = code in list(ExitCode)
            case _:
                valid = False
        if not valid:
            raise self.store.foreign(key)
        return document

    def _get(self, key: str, read: Callable | None = None):
        # End before _wait() does: a connection that still waits for a key cannot send an objection.
        seconds = timedelta(seconds=max(0.1, self.deadline + 1.5 - time.monotonic()))
        try:
            return self._wait(lambda: [self.store.wait([key], seconds), (read or self.store.get)(key)][1])
        except (RuntimeError, ValueError) as error:
            self._raise_if_stopped()  # rank 0 may have ended by the same stop signal
            raise RendezvousError(
                f"{self.where}: rank 0 has ended, or gave no {key} within {self.seconds:g} s (--rendezvous-timeout)"
            ) from error

    def _wait(self, act: Callable):
        # Rank 0 may use its whole deadline to name who is missing, so the others wait 2 s longer, and GRACE after a stop.
        return with_timeout(act, self.deadline + 2 - time.monotonic(), lambda: self._raise_if_stopped(GRACE))

    def _raise_if_stopped(self, grace: float = 0.0, missing: str = "") -> None:
        if not self.stop or time.monotonic() < self.stop.since + grace:
            return
        if self.stop.reason == "SIGTERM":  # with 75 the job would be requeued, and the rank that cannot start would fail again
            raise RendezvousError(
                f"SIGTERM before all ranks had met{missing}: a rank has failed (see its own output), or the job was cancelled"
            )
        raise StoppedError(f"{self.stop.reason} before the first step: the run is as it was, submit again with its --run-dir")


def with_timeout(act: Callable, seconds: float, meanwhile: Callable = lambda: None):
    """Run act() in a thread and return its result. The store blocks signal handlers, and blocks for ever if a frozen rank or
    another program is at the other end. Raises what act raises, and RuntimeError after `seconds`.
    """
    outcome: Future = Future()
    end = time.monotonic() + seconds

    def fulfil():
        try:
            outcome.set_result(act())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    while time.monotonic() < end:
        try:
            return outcome.result(0.2)
        except TimeoutError:
            meanwhile()
    raise RuntimeError("no answer")


def _parsed(text: bytes) -> dict:
    """The JSON object in the text; empty if there is none."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) else {}

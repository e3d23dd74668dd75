"""How the ranks of a job meet, before any process group: the store that rank 0 serves, and the check-in."""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ddp_core.device import refuse_shared_devices
from ddp_core.errors import Failure, RendezvousError, StoppedError, failure_with
from ddp_core.rank import Rank
from ddp_core.stop import StopFlag

TELLING = 10.0  # seconds that a rank without its workload's file tries to reach rank 0
GRACE = 2.0  # seconds that a rank which is told to stop gives the others: to say, or to hear, why the job ends


class Rendezvous:
    """The store that rank 0 serves, and the check-in: all ranks learn that all are well, or why not."""

    def __init__(self, rank: Rank, seconds: float, stop: StopFlag):
        """Connect. Raises RendezvousError within these seconds (--rendezvous-timeout); at once on another job's rank 0."""
        self.rank, self.stop, self.seconds = rank, stop, seconds
        self.deadline = time.monotonic() + self.seconds
        self.where = f"MASTER_ADDR={rank.master_addr} MASTER_PORT={rank.master_port}"
        serves = rank.rank == 0 and not rank.launcher_store
        timeout = timedelta(seconds=self.seconds)
        try:
            socket.getaddrinfo(rank.master_addr, rank.master_port)
            where = (rank.master_addr, rank.master_port, None, serves, timeout)
            store = self._wait(lambda: dist.TCPStore(*where, wait_for_workers=False))
        except OSError as error:
            raise RendezvousError(f"{self.where}: {error.strerror}: is it the address of the job's first node?") from error
        except (RuntimeError, ValueError) as error:  # pages of C++ frames
            raise RendezvousError(
                f"{self.where} is taken on {socket.gethostname()} by another program: choose another MASTER_PORT"
                if serves
                else f"{self.where}: rank 0 did not answer rank {rank.rank} on {socket.gethostname()} within "
                f"{self.seconds:g} s (--rendezvous-timeout): it failed earlier, or cannot be reached from here"
            ) from error
        # A launcher's store outlives a restart of the ranks: job_id keeps the keys of one start apart from the next's.
        self.store = dist.PrefixStore(f"ddp_core/{rank.job_id if rank.launcher_store else ''}", store)
        self._greet()

    def _greet(self) -> None:
        """Read rank 0's greeting before writing a key: what answers on this port may be another job's rank 0."""
        mine = dict(job_id=self.rank.job_id, world_size=self.rank.world_size)
        if self.rank.rank == 0:
            self.store.set("greeting", json.dumps(mine))
            return
        theirs = json.loads(self._get("greeting"))
        if theirs["job_id"] != mine["job_id"]:
            raise RendezvousError(
                f"{self.where} belongs to job {theirs['job_id']}, and this is job {mine['job_id']}: choose another MASTER_PORT"
            )
        if theirs["world_size"] != mine["world_size"]:
            message = f"world_size={mine['world_size']} on rank {self.rank.rank}, but {theirs['world_size']} on rank 0"
            self._object(message, heard=[f"heard/{self.rank.rank}"])
        if self.store.add(f"count/{self.rank.rank}", 1) > 1:
            self._object(f"rank {self.rank.rank} is there twice, also on {socket.gethostname()}: check the launch line", [])

    def check_in(self, facts: dict, row: dict, error: Failure | None) -> list[dict]:
        """Tell rank 0 how this rank is and hear its verdict. Returns all ranks' rows.

        facts must be equal on all ranks. Raises, on all ranks alike and printed by rank 0: the failure of the first rank
        that has one; RendezvousError for ranks that are missing or of another mind.
        """
        mine: dict = dict(error=[int(error.code), str(error)]) if error else dict(facts=facts, row=row)
        self.store.set(f"rank/{self.rank.rank}", json.dumps(mine))
        if self.rank.rank == 0:
            try:
                verdict: dict = dict(rows=self._collect())
            except Failure as failure:
                verdict = dict(error=[int(failure.code), str(failure)])
            self.store.set("verdict", json.dumps(verdict))
        else:
            verdict = json.loads(self._get("verdict"))
        if "error" in verdict:
            self._leave_together()
            raise failure_with(*verdict["error"])
        return verdict["rows"]

    def _leave_together(self) -> None:
        """Wait until all ranks know why they end, also those that are yet to come: the store ends with rank 0, and a launcher
        may end all ranks once one has left (srun --kill-on-bad-exit=1), with other codes than this one.
        """
        if self.rank.rank:
            with suppress(RuntimeError, RendezvousError, StoppedError):  # rank 0 has left, or this rank was told to
                self.store.set(f"heard/{self.rank.rank}", "")
                self._get("farewell")
            return
        others = [f"heard/{rank}" for rank in range(1, self.rank.world_size)]
        end = max(self.deadline, time.monotonic() + 1)
        while time.monotonic() < end and others and not self.store.check(others):
            if self.stop:  # then some may be dead, and never hear
                end = min(end, time.monotonic() + GRACE)
            time.sleep(0.02)
        self.store.set("farewell", "")

    def _collect(self) -> list[dict]:
        entries: dict[int, dict] = {}
        while missing := sorted(set(range(self.rank.world_size)) - entries.keys()):
            if self.store.check(["objection"]):
                raise RendezvousError(self.store.get("objection").decode())
            for rank in missing:
                if not self.store.check([f"rank/{rank}"]):
                    continue
                entry = entries[rank] = json.loads(self.store.get(f"rank/{rank}"))
                if "error" in entry:
                    code, message = entry["error"]
                    raise failure_with(code, message if rank == 0 else f"rank {rank}: {message}")
                for name, value in entry["facts"].items():
                    if value != entries[0]["facts"][name]:
                        raise RendezvousError(f"{name}={value} on rank {rank}, but {entries[0]['facts'][name]} on rank 0")
            names = ", ".join(map(str, missing))
            if time.monotonic() > self.deadline:
                raise RendezvousError(
                    f"{len(missing)} of {self.rank.world_size} ranks missing after {self.seconds:g} s "
                    f"(--rendezvous-timeout): rank {names}"
                )
            self._obey(missing=f" (rank {names} had not)")
            time.sleep(0.005)
        rows = [entries[rank]["row"] for rank in range(self.rank.world_size)]
        refuse_shared_devices(rows)
        return rows

    def _object(self, message: str, heard: list[str]) -> None:
        """Fail for a reason that rank 0 cannot see; it prints it, unless it had its ranks together before."""
        self.store.set("objection", message)
        try:
            told = "error" in json.loads(self._get("verdict"))
            for key in heard:
                self.store.set(key, "")
            if told:
                self._get("farewell")
        except (RendezvousError, RuntimeError):
            told = True  # rank 0 has left already: the job had failed
        raise RendezvousError(message, everywhere=told)

    def _get(self, key: str) -> bytes:
        try:
            return self._wait(lambda: self.store.get(key))
        except (RuntimeError, ValueError) as error:
            self._obey()  # as rank 0 may have done
            raise RendezvousError(f"{self.where}: rank 0 was lost, or gave no {key} within {self.seconds:g} s") from error

    def _wait(self, act: Callable):
        # Rank 0 needs all of its deadline to name who is missing; its verdict comes a little later, also that it obeys.
        return patiently(act, self.deadline + 2 - time.monotonic(), lambda: self._obey(GRACE))

    def _obey(self, grace: float = 0.0, missing: str = "") -> None:
        if not self.stop or time.monotonic() < self.stop.since + grace:
            return
        if self.stop.reason == "SIGTERM":  # 75 would have the job come back, and the rank that cannot start fail again
            raise RendezvousError(
                f"SIGTERM before all ranks had met{missing}: a rank has failed (see its own output), or the job was cancelled"
            )
        raise StoppedError(f"{self.stop.reason} before the first step: the run is as it was, submit again")


def tell(rank: Rank, failure: Failure, stop: StopFlag) -> None:
    """Of a rank that cannot use the workload's file: rank 0 may be able to, on another node, and wait for this one.

    Silent where rank 0 does not answer: it has failed too, and said so.
    """
    with suppress(Failure):
        Rendezvous(rank, TELLING, stop).check_in({}, {}, failure)


def patiently(act: Callable, seconds: float, meanwhile: Callable = lambda: None):
    """act(), in a thread: the store blocks where no signal handler runs, and for ever when a stranger or a frozen rank
    is at the other end. Raises what act raises, and RuntimeError when it takes longer.
    """
    outcome: Future = Future()
    end = time.monotonic() + seconds

    def fulfil():
        try:
            outcome.set_result(act())
        except (RuntimeError, ValueError) as error:
            outcome.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    while time.monotonic() < end:
        try:
            return outcome.result(0.2)
        except TimeoutError:
            meanwhile()
    raise RuntimeError("no answer")

"""How the ranks of a job meet: the store, the check-in, and two process groups.

The data group carries gradients (nccl, xccl or gloo, by device). The control group is gloo everywhere: what the ranks
agree on goes over it, so that this code is the same on a laptop and on 4,096 GPUs and is tested on the former.
"""

import json
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_core.config import TrainConfig
from ddp_core.device import backend_of, refuse_shared_devices
from ddp_core.errors import Failure, PeerLostError, RendezvousError, StoppedError, failure_with
from ddp_core.rank import Rank
from ddp_core.stop import StopFlag

ROLL_CALL = 5.0  # seconds that survivors wait for each other before they call a rank lost


class Rendezvous:
    """The store that rank 0 serves, and the check-in: all ranks learn that all are well, or why not."""

    def __init__(self, rank: Rank, config: TrainConfig, stop: StopFlag):
        """Connect. Raises RendezvousError within --rendezvous-timeout, and at once on another job's rank 0."""
        self.rank, self.stop, self.seconds = rank, stop, config.rendezvous_timeout
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
        mine = dict(error=[int(error.code), str(error)]) if error else dict(facts=facts, row=row)
        self.store.set(f"rank/{self.rank.rank}", json.dumps(mine))
        if self.rank.rank == 0:
            try:
                verdict = dict(rows=self._collect())
            except Failure as failure:
                verdict = dict(error=[int(failure.code), str(failure)])
            self.store.set("verdict", json.dumps(verdict))
        else:
            verdict = json.loads(self._get("verdict"))
            self.store.set(f"heard/{self.rank.rank}", "")
        if "error" in verdict:
            # The store ends with rank 0, which stays until the others have read why, also those that are yet to come.
            others = [f"heard/{rank}" for rank in range(1, self.rank.world_size)]
            end = max(self.deadline, time.monotonic() + 1) if self.rank.rank == 0 else 0
            while time.monotonic() < end and others and not self.store.check(others):
                self._obey()
                time.sleep(0.02)
            raise failure_with(*verdict["error"])
        return verdict["rows"]

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
            if missing and time.monotonic() > self.deadline:
                names = ", ".join(map(str, missing))
                raise RendezvousError(
                    f"{len(missing)} of {self.rank.world_size} ranks missing after {self.seconds:g} s "
                    f"(--rendezvous-timeout): rank {names}"
                )
            self._obey()
            time.sleep(0.005)
        rows = [entries[rank]["row"] for rank in range(self.rank.world_size)]
        refuse_shared_devices(rows)
        return rows

    def _object(self, message: str, heard: list[str]) -> None:
        """Fail for a reason that rank 0 cannot see; it prints it, unless it had its ranks together before."""
        self.store.set("objection", message)
        verdict = json.loads(self._get("verdict"))
        for key in heard:
            self.store.set(key, "")
        raise RendezvousError(message, everywhere="error" in verdict)

    def _get(self, key: str) -> bytes:
        try:
            return self._wait(lambda: self.store.get(key))
        except (RuntimeError, ValueError) as error:
            raise RendezvousError(f"{self.where}: rank 0 was lost, or gave no {key} within {self.seconds:g} s") from error

    def _wait(self, act: Callable):
        """act(), in a thread: a store blocks where no signal handler runs, and for ever when a stranger accepts."""
        outcome = Future()

        def fulfil():
            try:
                outcome.set_result(act())
            except (RuntimeError, ValueError) as error:
                outcome.set_exception(error)

        threading.Thread(target=fulfil, daemon=True).start()
        # Rank 0 needs all of its deadline to name who is missing; its verdict comes a little later.
        while time.monotonic() < self.deadline + 2:
            try:
                return outcome.result(0.2)
            except TimeoutError:
                self._obey()
        raise RuntimeError("no answer")

    def _obey(self) -> None:
        if self.stop:
            raise StoppedError(f"{self.stop.reason} before the first step: the run is as it was, submit again")


class Peers:
    """The two groups of a running job, and what the trainer asks of them."""

    def __init__(self, rank: Rank, config: TrainConfig, device: torch.device, rendezvous: Rendezvous):
        self.rank, self.store = rank, rendezvous.store
        backend, timeout = backend_of(config, device.type), timedelta(seconds=config.timeout)
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", self.store),
                rank=rank.rank,
                world_size=rank.world_size,
                timeout=timeout,
                device_id=None if backend == "gloo" else device,
            )
            self.data = dist.group.WORLD
            self.control = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise RendezvousError(
                f"the ranks met, but their {backend} group did not connect ({_first_line(error)}): check "
                f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')} and the address of {socket.gethostname()}"
            ) from error

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[n] fp64 values of this rank to the [world_size, n] values of all, on every rank."""
        if self.rank.world_size == 1:
            return values.view(1, -1)
        everyone = torch.empty(self.rank.world_size, len(values), dtype=torch.float64)
        dist.all_gather(list(everyone.unbind()), values, group=self.control)
        return everyone

    def agree(self, failure: Failure | None) -> None:
        """After something that one rank did alone: raises its Failure there, and one of its code on all others."""
        codes = self.gather(torch.tensor([failure.code if failure else 0], dtype=torch.float64))[:, 0]
        if failure:
            raise failure
        if codes.any():
            raise failure_with(int(codes.max()), f"rank {int(codes.argmax())} failed")

    def broadcast(self, value, tensors: list[torch.Tensor]):
        """Rank 0's small value (as JSON), returned on all ranks, and its tensors, in place."""
        if self.rank.rank == 0:
            self.store.set("broadcast", json.dumps(value))
        for tensor in tensors:
            dist.broadcast(tensor, 0, group=self.data)
        return json.loads(self.store.get("broadcast"))

    @staticmethod
    def is_lost(error: RuntimeError) -> bool:
        """Whether a RuntimeError is a collective without its peer: gloo's have no type of their own."""
        return isinstance(error, dist.DistError) or any(word in str(error) for word in ("peer", "imed out", "gloo"))

    def lost(self, error: RuntimeError, when: str) -> PeerLostError:
        """Who is missing when a collective has failed: rank 0 calls the roll over the store, and tells."""
        others = range(1, self.rank.world_size)
        try:
            traceback.clear_frames(error.__traceback__)
            self.leave()  # closes connections, so that ranks that wait for this one fail, too, and answer
            self.store.set(f"alive/{self.rank.rank}", "")
            if self.rank.rank == 0:
                missing, end = [*others], time.monotonic() + ROLL_CALL
                while missing and time.monotonic() < end:
                    missing = [rank for rank in others if not self.store.check([f"alive/{rank}"])]
                    time.sleep(0.05)
                self.store.set("missing", json.dumps(missing))
                time.sleep(1)  # the store ends with this process: let the others read
            else:
                self.store.wait(["missing"], timedelta(seconds=ROLL_CALL + 5))
                missing = json.loads(self.store.get("missing"))
        except (RuntimeError, ValueError):
            missing = [0]  # the store went with it
        who = f"rank {', '.join(map(str, missing))} died or hangs" if missing else "a connection broke"
        # Without rank 0 one rank a node speaks.
        tells = self.rank.local_rank == 0 or self.rank.rank == 1 if missing == [0] else self.rank.rank == 0
        return PeerLostError(
            f"{who} {when} ({_first_line(error)}): see that rank's output, then submit again; the last snapshot is whole",
            everywhere=not tells,
        )

    def wait(self) -> None:
        """For all ranks: without it at the end, who leaves first can hang who is still connecting."""
        dist.barrier(group=self.control)

    def leave(self) -> None:
        self.data = self.control = None
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    """Of a message from C++: without the source file in front, and the guesses behind the first sentence."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[/?\S*\] ", "", line).partition(". ")[0][:160]

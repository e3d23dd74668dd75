"""The two process groups of a running job.

The data group carries gradients (nccl, xccl or gloo, by device). The control group carries what the ranks agree on. It is
gloo everywhere, so the same code runs on a laptop, where it is tested, and on 4,096 GPUs. It is a tree of groups
(control.py).
"""

import json
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_core.config import TrainConfig
from ddp_core.control import Control, tree_sum
from ddp_core.device import backend_of
from ddp_core.errors import NAMED, Failure, PeerLostError, RendezvousError, failure_with, first_line, named
from ddp_core.rank import Rank
from ddp_core.rendezvous import Rendezvous, with_timeout

ROLL_CALL = 5.0  # seconds that the remaining ranks wait for each other before they report a rank as lost
# NCCL's watchdog ends the process at its timeout (SIGABRT, 134), so the control group's must come first: exit code 7.
NOTICED_BY_GLOO = timedelta(seconds=60)
LOOPBACK = "lo"  # its name on Linux
NOTHING = torch.zeros(0, dtype=torch.float64)
DIFFER = "mismatch between collectives"  # in PyTorch's message when TORCH_DISTRIBUTED_DEBUG=DETAIL compares calls
ALIKE = (
    "where a workload's file calls torch.distributed, every rank must do so alike and in the same order; "
    # --reduction flat, since torch 2.13's DistributedDataParallel ends in a segmentation fault under that variable.
    "TORCH_DISTRIBUTED_DEBUG=DETAIL with --reduction flat names the calls"
)


class Peers:
    """The two groups of a running job, and the collectives that the trainer uses."""

    def __init__(self, rank: Rank, config: TrainConfig, device: torch.device, rendezvous: Rendezvous):
        self.rank, self.world_size, self.local_rank = rank.rank, rank.world_size, rank.local_rank
        self.local_world_size = rank.local_world_size
        self.store, self.run_dir, self.left = rendezvous.store, config.run_dir, False
        backend, timeout = backend_of(config, device.type), timedelta(seconds=config.timeout)
        self.data_timeout = timeout if backend == "gloo" else timeout + NOTICED_BY_GLOO
        self.store.set_timeout(timeout)
        # nccl's threads ask their store once a second; a store written in Python was never tested with them.
        of_data = self.store if backend == "gloo" else rendezvous.unsigned
        if rank.local_world_size == rank.world_size:  # one node: no connection from outside is needed
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", of_data),
                rank=rank.rank,
                world_size=rank.world_size,
                timeout=self.data_timeout,
                device_id=None if backend == "gloo" else device,
            )
            self.data = dist.group.WORLD
            with _handing_out(self.store):
                self.control = Control(rank.rank, rank.world_size, timeout)
            # Wait for all: if a rank went on and died while another still connects, it would look unreachable.
            self.wait()
        except RuntimeError as error:
            raise RendezvousError(
                f"the ranks met, but their {backend} group did not connect ({sentence_of(error)}): check "
                f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')} and the address of {socket.gethostname()}"
            ) from error

    def reduce(self, sums: torch.Tensor = NOTHING, most: torch.Tensor = NOTHING) -> tuple[torch.Tensor, ...]:
        """Collective. Two fp64 vectors: [n] sums over all ranks, added in the order of tree_sum(), and [m] maxima over all
        ranks (NaN if any is NaN). The result is the same on every rank.
        """

        def merge(parts: torch.Tensor) -> torch.Tensor:
            return torch.cat((tree_sum(parts[:, : len(sums)]), parts[:, len(sums) :].amax(0)))

        return self.control.reduce(torch.cat((sums, most)), merge).split([len(sums), len(most)])

    def which(self, condition: bool) -> list[int]:
        """Collective. The ranks on which the condition is true: the lowest NAMED + 1 of them."""
        mine = torch.full((NAMED + 1,), float("inf"), dtype=torch.float64)
        mine[0] = self.rank if condition else mine[0]
        first = self.control.reduce(mine, lambda parts: parts.flatten().sort().values[: NAMED + 1])
        return first[first.isfinite()].int().tolist()

    def agree(self, failure: Failure | None) -> None:
        """Collective, after an action that may fail on one rank: raises its Failure there, and one of that code elsewhere."""
        if failure and failure.agreed:
            raise failure
        code = int(failure.code) if failure else 0
        highest, of_rank_0 = self.reduce(most=torch.tensor([code, 0 if self.rank else code], dtype=torch.float64))[1].tolist()
        if not highest:
            return
        first, *_ = self.which(code == highest)
        if failure:
            failure.everywhere = bool(of_rank_0)  # if rank 0 failed too, it alone prints
        failure = failure or failure_with(int(highest), f"rank {first} failed")
        failure.agreed = True
        raise failure

    def together(self, act: Callable | None, failure: Failure | None = None) -> Any:
        """Collective. Run act() on every rank that has one and has not failed before. If it fails on one rank, all raise.

        Returns the result of this rank's act.
        """
        result = None
        if act and not failure:
            try:
                result = act()
            except Failure as error:
                failure = error
        self.agree(failure)
        return result

    def broadcast(self, value):
        """Collective. Returns rank 0's value on all ranks; it travels as JSON."""
        text = bytearray(json.dumps(value).encode() if self.rank == 0 else b"")
        length = torch.tensor([len(text)])
        self.control.broadcast(length)
        text = text or bytearray(int(length))
        self.control.broadcast(torch.frombuffer(text, dtype=torch.uint8))
        return json.loads(text)

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Collective. Copy rank 0's values into the tensors of all ranks: one message per tensor above 1 MiB, and one for all
        small tensors of a dtype and device. BatchNorm's buffers, sent in every step, are many and small.
        """
        kinds: dict[tuple, list[torch.Tensor]] = {}
        for number, tensor in enumerate(tensors if self.world_size > 1 else ()):
            alone = number if tensor.nbytes > 2**20 else -1
            kinds.setdefault((tensor.dtype, tensor.device.type, alone), []).append(tensor.detach())
        for (_, device, _), alike in kinds.items():
            # Not nccl for tensors on the CPU: an optimizer may keep its step count there.
            send = self.control.broadcast if device == "cpu" else partial(dist.broadcast, src=0, group=self.data)
            whole = len(alike) == 1 and alike[0].is_contiguous()
            flat = alike[0].view(-1) if whole else torch.cat([tensor.reshape(-1) for tensor in alike])
            send(flat.view(torch.uint8))  # as bytes: gloo and nccl support few dtypes, and no booleans
            if not whole:
                for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    @staticmethod
    def is_lost(error: RuntimeError) -> bool:
        """Whether a RuntimeError means that a collective lost a peer. gloo's errors have no type of their own."""
        if str(error).startswith("Caught ") or (dist.is_initialized() and dist.get_world_size() == 1):
            return False  # raised in a worker that reads rows; or there is no peer
        words = ("peer", "imed out", "gloo", "onitored", "pair closure", "Pair is not connected", DIFFER)
        return isinstance(error, dist.DistError) or any(word in str(error) for word in words)

    def hang_up(self) -> None:
        """Close connections, so that ranks that wait for this one fail, too, and answer the roll call.

        With nccl only the control groups are closed: closing nccl's would wait for its peers.
        """
        for group in [None] if dist.get_backend() == "gloo" else [group for _, group in self.control.groups]:
            dist.destroy_process_group(group)
        self.left = True
        del self.data, self.control

    def lost(self, error: RuntimeError, when: str, place: str = "") -> Failure:
        """Find out who is missing after a failed collective: rank 0 calls the roll over the store. Returns the Failure.

        place: the line of the workload's file where this rank was. If a missing rank had failed, all end with its exit code.
        """
        traceback.clear_frames(error.__traceback__)
        self.hang_up()
        try:
            missing, code, places = with_timeout(lambda: self._call_the_roll(place), 2 * ROLL_CALL + 3)
        except (RuntimeError, ValueError):
            missing, code, places = [0], 0, {}  # the store ended with rank 0, or is frozen with it
        except RendezvousError:
            missing, code, places = [], 0, {}  # another program wrote to the store
        who = f"rank {named(missing)} died or hangs" if missing else "a connection broke"
        fix = f"see that rank's output, then submit again with --run-dir {self.run_dir}"
        if not missing and (places or DIFFER in str(error)):
            who = "ranks are in calls that differ," if DIFFER in str(error) else f"{who}, or ranks are in calls that differ,"
            at = [f"rank {named(ranks)} in {line}" for line, ranks in places.items()]
            fix = "; ".join([*at[:3], ALIKE])
        # If rank 0 is missing, one rank per node prints.
        prints = self.local_rank == 0 or self.rank == 1 if missing == [0] else self.rank == 0
        if code:
            line = f"rank {named(missing)} failed {when}: see its line; what was saved is whole"
            return failure_with(code, line, everywhere=not prints or missing == [0])
        return PeerLostError(f"{who} {when} ({sentence_of(error)}): {fix}; what was saved is whole", everywhere=not prints)

    def _call_the_roll(self, place: str) -> tuple[list[int], int, dict[str, list[int]]]:
        """Missing ranks, their exit code (0: unknown), and on rank 0 the ranks by their line in the workload's file."""
        self.store.set(f"alive/{self.rank}", place)
        if self.rank:
            self.store.wait(["missing"], timedelta(seconds=2 * ROLL_CALL))
            return *json.loads(self.store.get("missing")), {}  # only rank 0 reports the lines
        lines, end = {0: place}, time.monotonic() + ROLL_CALL
        while len(lines) < self.world_size and time.monotonic() < end:
            time.sleep(0.05)
            answers = {rank: self._signed(f"alive/{rank}") for rank in range(self.world_size) if rank not in lines}
            lines |= {rank: line.decode() for rank, line in answers.items() if line is not None}
        missing = [rank for rank in range(self.world_size) if rank not in lines][: NAMED + 1]  # short, since all ranks read it
        code = max((int(self._signed(f"failed/{rank}") or 0) for rank in missing), default=0)
        self.store.set("missing", json.dumps([missing, code]))
        time.sleep(min(1, ROLL_CALL))  # let the others read first: the store ends with this process
        places: dict[str, list[int]] = {}
        for rank, line in sorted(lines.items()):
            if line and not missing:
                places.setdefault(line, []).append(rank)
        return missing, code, places

    def _signed(self, key: str) -> bytes | None:
        """What a rank of this job has written there, else None: an unsigned value does not count."""
        with suppress(RendezvousError):
            return self.store.get(key) if self.store.check([key]) else None
        return None

    def speaks(self, code: int) -> bool:
        """Whether this rank prints its own failure: rank 0 does, the others only if rank 0 has not failed."""
        with suppress(RuntimeError, ValueError):
            self.store.set(f"failed/{self.rank}", str(code))
            if not self.rank:
                self.store.set("missing", json.dumps([[0], code]))
            if self.world_size > 1:
                self.hang_up()
            end = time.monotonic() + 1
            while self.rank and time.monotonic() < end:
                if self._signed("failed/0"):
                    return False
                time.sleep(0.05)
            time.sleep(0 if self.rank or self.world_size == 1 else 1)  # let the others read first: the store ends with rank 0
        return True

    def wait(self) -> None:
        """Collective. Wait until all ranks are here. Needed before they exit, too: a rank that exits early can hang another."""
        self.reduce(most=torch.zeros(1, dtype=torch.float64))

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _handing_out(store: dist.Store) -> Iterator[None]:
    """Make new_group() use this store: torch offers no argument for it, and takes the first group's store."""
    groups: Any = dist.distributed_c10d._world.pg_map
    kind, first = groups[dist.group.WORLD]
    groups[dist.group.WORLD] = kind, dist.PrefixStore("control", store)
    try:
        yield
    finally:
        groups[dist.group.WORLD] = kind, first


def sentence_of(error: BaseException) -> str:
    """The first sentence of a C++ message, without the source file before it and the guesses after it."""
    line = first_line(error, 4000)
    if DIFFER in line:
        return ", ".join(re.findall(r"OpType=(\w+(?:, TensorShape=\[[^]]*\])?)", str(error)))
    return re.sub(r"^\[/?\S*\] ", "", line).partition(". ")[0][:160]

"""The two process groups of a running job.

The data group carries gradients (nccl, xccl or gloo, by device). The control group is gloo everywhere, and carries what
the ranks agree on. Its code is the same on a laptop, where it is tested, and on 4,096 GPUs. It is a tree of groups
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
from ddp_core.rendezvous import Rendezvous, patiently

ROLL_CALL = 5.0  # seconds that survivors wait for each other before they call a rank lost
LOOPBACK = "lo"  # Linux's name of it
NOTHING = torch.zeros(0, dtype=torch.float64)
DIFFER = "mismatch between collectives"  # PyTorch's words where it compares calls
ALIKE = (
    "where a workload's file calls torch.distributed, every rank must do so alike and in the same order; "
    # With DistributedDataParallel torch 2.13 ends by a segmentation fault under that variable.
    "TORCH_DISTRIBUTED_DEBUG=DETAIL with --reduction flat names the calls"
)


class Peers:
    """The two groups of a running job, and what the trainer asks of them."""

    def __init__(self, rank: Rank, config: TrainConfig, device: torch.device, rendezvous: Rendezvous):
        self.rank, self.world_size, self.local_rank = rank.rank, rank.world_size, rank.local_rank
        self.local_world_size = rank.local_world_size
        self.store, self.left = rendezvous.store, False
        backend, timeout = backend_of(config, device.type), timedelta(seconds=config.timeout)
        self.store.set_timeout(timeout)
        # nccl's threads ask their store once a second, and nobody has tried what they do with one that is written in Python.
        of_data = self.store if backend == "gloo" else rendezvous.unsigned
        if rank.local_world_size == rank.world_size:  # then nobody needs to reach gloo from elsewhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", of_data),
                rank=rank.rank,
                world_size=rank.world_size,
                timeout=timeout,
                device_id=None if backend == "gloo" else device,
            )
            self.data = dist.group.WORLD
            with _handing_out(self.store):
                self.control = Control(rank.rank, rank.world_size, timeout)
            # A rank that goes on and dies while another still connects would be taken for one that cannot be reached.
            self.wait()
        except RuntimeError as error:
            raise RendezvousError(
                f"the ranks met, but their {backend} group did not connect ({sentence_of(error)}): check "
                f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')} and the address of {socket.gethostname()}"
            ) from error

    def reduce(self, sums: torch.Tensor = NOTHING, most: torch.Tensor = NOTHING) -> tuple[torch.Tensor, ...]:
        """fp64 numbers [n] and [m] of this rank to the sums of the former over all ranks, in the order of tree_sum(), and to
        the largest of the latter (NaN, if there is one); the same on every rank.
        """

        def merge(parts: torch.Tensor) -> torch.Tensor:
            return torch.cat((tree_sum(parts[:, : len(sums)]), parts[:, len(sums) :].amax(0)))

        return self.control.reduce(torch.cat((sums, most)), merge).split([len(sums), len(most)])

    def which(self, condition: bool) -> list[int]:
        """Collective. The ranks of which it is true: the first of them, one more than are named."""
        mine = torch.full((NAMED + 1,), float("inf"), dtype=torch.float64)
        mine[0] = self.rank if condition else mine[0]
        first = self.control.reduce(mine, lambda parts: parts.flatten().sort().values[: NAMED + 1])
        return first[first.isfinite()].int().tolist()

    def agree(self, failure: Failure | None) -> None:
        """After something that one rank did alone: raises its Failure there, and one of its code on all others."""
        if failure and failure.agreed:
            raise failure
        code = int(failure.code) if failure else 0
        highest, of_rank_0 = self.reduce(most=torch.tensor([code, 0 if self.rank else code], dtype=torch.float64))[1].tolist()
        if not highest:
            return
        first, *_ = self.which(code == highest)
        if failure:
            failure.everywhere = bool(of_rank_0)  # then rank 0 speaks for all
        failure = failure or failure_with(int(highest), f"rank {first} failed")
        failure.agreed = True
        raise failure

    def together(self, act: Callable | None, failure: Failure | None = None) -> Any:
        """Collective. Every rank that has something to do does it, unless it has failed before; where one fails, all do.

        Returns what this rank's act returned.
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
        """Rank 0's value (as JSON), returned on all ranks."""
        if self.world_size == 1:
            return value
        text = bytearray(json.dumps(value).encode() if self.rank == 0 else b"")
        length = torch.tensor([len(text)])
        self.control.broadcast(length)
        text = text or bytearray(int(length))
        self.control.broadcast(torch.frombuffer(text, dtype=torch.uint8))
        return json.loads(text)

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Rank 0's numbers to all ranks, in place: a message for each large tensor, and one for all small ones of a kind."""
        kinds: dict[tuple, list[torch.Tensor]] = {}
        for number, tensor in enumerate(tensors if self.world_size > 1 else ()):
            alone = number if tensor.nbytes > 2**20 else -1
            kinds.setdefault((tensor.dtype, tensor.device.type, alone), []).append(tensor)
        for (_, device, alone), alike in kinds.items():
            # An optimizer may keep its step count on the CPU, where nccl does not reach.
            send = self.control.broadcast if device == "cpu" else partial(dist.broadcast, src=0, group=self.data)
            if alone >= 0 and alike[0].is_contiguous():
                send(_as_bytes(alike[0]))
                continue
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
            send(_as_bytes(flat))
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    @staticmethod
    def is_lost(error: RuntimeError) -> bool:
        """Whether a RuntimeError is a collective without its peer: gloo's have no type of their own."""
        if str(error).startswith("Caught ") or (dist.is_initialized() and dist.get_world_size() == 1):
            return False  # of a process that reads rows; of a rank without peers
        words = ("peer", "imed out", "gloo", "onitored", "pair closure", "Pair is not connected", DIFFER)
        return isinstance(error, dist.DistError) or any(word in str(error) for word in words)

    def hang_up(self) -> None:
        """Closes connections, so that ranks that wait for this one fail, too, and answer. nccl would wait for its peers."""
        for group in [None] if dist.get_backend() == "gloo" else [group for _, group in self.control.groups]:
            dist.destroy_process_group(group)
        self.left = True
        del self.data, self.control

    def lost(self, error: RuntimeError, when: str, place: str = "") -> Failure:
        """Who is missing when a collective has failed: rank 0 calls the roll over the store, and tells.

        place: the line of the workload's file in which this rank was. A missing one that has failed ends all with its code.
        """
        traceback.clear_frames(error.__traceback__)
        self.hang_up()
        places: dict[str, list[int]] = {}
        try:
            missing, code, places = patiently(lambda: self._call_the_roll(place), 2 * ROLL_CALL + 3)
        except (RuntimeError, ValueError):
            missing, code = [0], 0  # the store went with it, or is frozen
        except RendezvousError:
            missing, code = [], 0  # what is there, no rank has written
        who = f"rank {named(missing)} died or hangs" if missing else "a connection broke"
        fix = "see that rank's output, then submit again"
        if not missing and (places or DIFFER in str(error)):
            who = "ranks are in calls that differ," if DIFFER in str(error) else f"{who}, or ranks are in calls that differ,"
            at = [f"rank {named(ranks)} in {line}" for line, ranks in places.items()]
            fix = "; ".join([*at[:3], ALIKE])
        # Without rank 0 one rank a node speaks.
        prints = self.local_rank == 0 or self.rank == 1 if missing == [0] else self.rank == 0
        if code:
            line = f"rank {named(missing)} failed {when}: see its line; what was saved is whole"
            return failure_with(code, line, everywhere=not prints or missing == [0])
        return PeerLostError(f"{who} {when} ({sentence_of(error)}): {fix}; what was saved is whole", everywhere=not prints)

    def _call_the_roll(self, place: str) -> tuple[list[int], int, dict[str, list[int]]]:
        """The ranks that are missing, the code with which they end, and who is in which line of the workload's file."""
        self.store.set(f"alive/{self.rank}", place)
        if self.rank:
            self.store.wait(["missing"], timedelta(seconds=2 * ROLL_CALL))
            return *json.loads(self.store.get("missing")), {}  # rank 0 alone tells
        missing, end = [*range(1, self.world_size)], time.monotonic() + ROLL_CALL
        while (missing := [rank for rank in missing if not self._has_said(f"alive/{rank}")]) and time.monotonic() < end:
            time.sleep(0.05)
        places: dict[str, list[int]] = {place: [0]}
        for rank in range(1, 0 if missing else self.world_size):
            places.setdefault(self.store.get(f"alive/{rank}").decode(), []).append(rank)
        places.pop("", None)
        missing = missing[: NAMED + 1]  # all ranks read it
        code = max((int(self.store.get(f"failed/{rank}")) for rank in missing if self._has_said(f"failed/{rank}")), default=0)
        self.store.set("missing", json.dumps([missing, code]))
        time.sleep(min(1, ROLL_CALL))  # the store ends with this process: let the others read
        return missing, code, places

    def _has_said(self, key: str) -> bool:
        """Whether a rank has; a stranger's word does not count."""
        with suppress(RendezvousError):
            return self.store.check([key]) and self.store.get(key) is not None
        return False

    def speaks(self, code: int) -> bool:
        """Whether this rank prints a failure of its own: rank 0 does, the others only where rank 0 has none."""
        with suppress(RuntimeError, ValueError):
            self.store.set(f"failed/{self.rank}", str(code))
            if not self.rank:
                self.store.set("missing", json.dumps([[0], code]))
            if self.world_size > 1:
                self.hang_up()
            end = time.monotonic() + 1
            while self.rank and time.monotonic() < end:
                if self._has_said("failed/0"):
                    return False
                time.sleep(0.05)
            time.sleep(0 if self.rank or self.world_size == 1 else 1)  # the store ends with rank 0: let the others read
        return True

    def wait(self) -> None:
        """Collective. Until all ranks are here: before they part, for one, as a rank that exits early can hang another."""
        self.reduce(most=torch.zeros(1, dtype=torch.float64))

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _handing_out(store: dist.Store) -> Iterator[None]:
    """new_group() gives its group the store of the first one, and asks for no other."""
    groups: Any = dist.distributed_c10d._world.pg_map
    kind, first = groups[dist.group.WORLD]
    groups[dist.group.WORLD] = kind, dist.PrefixStore("control", store)
    try:
        yield
    finally:
        groups[dist.group.WORLD] = kind, first


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: gloo and nccl know few kinds of number, and no booleans."""
    return tensor.detach().view(-1).view(torch.uint8)


def sentence_of(error: BaseException) -> str:
    """Of a message from C++: without the source file in front, and the guesses behind the first sentence."""
    line = first_line(error, 4000)
    if DIFFER in line:
        return ", ".join(re.findall(r"OpType=(\w+(?:, TensorShape=\[[^]]*\])?)", str(error)))
    return re.sub(r"^\[/?\S*\] ", "", line).partition(". ")[0][:160]

"""The core's control plane with all ranks in one process, over a transport that counts: what does each of 75,264 ranks pay?

    from conformance.harness.counted import Counted
    counted = Counted(75264)
    totals = counted.reduce(numbers, merge)      # numbers[rank] to what each rank has in the end
    counted.of(0).messages

The ranks are the core's own class Control. They run one after another without waiting: a group's speaker is its first member,
so numbers are collected from the last rank to the first, and broadcast from the first to the last.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass
class Cost:
    """What one rank has opened, sent and received."""

    connections: int = 0
    messages: int = 0  # sent and received
    bytes: int = 0


class Counted:
    def __init__(self, world_size: int):
        from ddp_core.control import Control

        self.costs: dict[int, Cost] = defaultdict(Cost)
        self.sent: dict[tuple, dict[int, torch.Tensor]] = defaultdict(dict)  # by group, not yet received
        self.rank = 0  # the rank that runs now
        with self._instead_of_torch():
            self.ranks = [Control(rank, world_size, timedelta()) for rank in self._each(range(world_size))]

    def of(self, rank: int) -> Cost:
        return self.costs[rank]

    def reduce(self, numbers: torch.Tensor, merge: Callable) -> list[torch.Tensor]:
        """numbers: [ranks, n]. Returns what reduce() gives on each rank. reduce() is collect(), then broadcast()."""
        last_first = range(len(self.ranks) - 1, -1, -1)
        with self._instead_of_torch():
            sums = {rank: self.ranks[rank].collect(numbers[rank], merge) for rank in self._each(last_first)}
            for rank in self._each(range(len(self.ranks))):
                self.ranks[rank].broadcast(sums[rank])
        return [sums[rank] for rank in range(len(self.ranks))]

    def _each(self, ranks):
        for self.rank in ranks:
            yield self.rank

    # ---- replaces torch.distributed -------------------------------------------------------------------------------

    @contextmanager
    def _instead_of_torch(self):
        names = ("new_group", "gather", "broadcast")
        own = [getattr(dist, name) for name in names]
        try:
            for name in names:
                setattr(dist, name, getattr(self, f"_{name}"))
            yield
        finally:
            for name, act in zip(names, own, strict=True):
                setattr(dist, name, act)

    def _new_group(self, members: list[int], **_) -> tuple[int, ...]:
        """gloo connects every member with every other."""
        self.costs[self.rank].connections += len(members) - 1
        return tuple(members)

    def _gather(self, tensor: torch.Tensor, places: list[torch.Tensor] | None, speaker: int, group: tuple[int, ...]) -> None:
        if places is None:
            self.sent[group][self.rank] = tensor.clone()
            return
        assert self.rank == speaker, (self.rank, group)
        sent = self.sent.pop(group, {}) | {speaker: tensor}
        for place, member in zip(places, group, strict=True):
            place.copy_(sent[member])
            self._count(member, tensor)

    def _broadcast(self, tensor: torch.Tensor, speaker: int, group: tuple[int, ...]) -> None:
        """Count as if the speaker sent to each member, the most it can be. In gloo the members pass it on."""
        if self.rank == speaker:
            self.sent[group][speaker] = tensor.clone()  # what is sent is not what the speaker has later
        else:
            tensor.copy_(self.sent[group][speaker])
            self.rank, rank = speaker, self.rank
            self._count(rank, tensor)
            self.rank = rank

    def _count(self, other: int, tensor: torch.Tensor) -> None:
        for rank in {self.rank, other} if other != self.rank else ():
            self.costs[rank].messages += 1
            self.costs[rank].bytes += tensor.nbytes


def check_in_of(world_size: int, facts: dict[int, dict] | None = None) -> tuple[int, int]:
    """How many rows rank 0 has once all ranks have checked in, and how many bytes each other rank then reads.

    facts: by rank. Ranks without an entry state none.
    """
    from ddp_core import Rank
    from ddp_core.rendezvous import Rendezvous
    from ddp_core.stop import StopFlag

    alone, store = Rank(0, 1, 0, 1, 0, "127.0.0.1", 1, "job"), dist.HashStore()
    for rank in range(world_size - 1, -1, -1):
        meeting = Rendezvous(alone, 20, StopFlag())  # alone (world size 1), so it opens no port
        meeting.rank = replace(alone, rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        meeting.store = store
        store.set("verdict", json.dumps(dict(well=True)))  # others would wait for it, and rank 0 comes last
        store.set(f"heard/{rank}", "")
        row = dict(rank=rank, local_rank=rank % 8, node_rank=rank // 8, host=f"node{rank // 8}", backend="gloo")
        rows = meeting.check_in((facts or {}).get(rank, {}), row, None)
    return len(rows), len(store.get("verdict"))

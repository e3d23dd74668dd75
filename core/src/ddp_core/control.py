"""The control plane: a tree of groups of at most 32 ranks, over which the ranks exchange small messages.

Numbers go up the tree: the first member of each group gathers and merges them, and represents the group one level up.
Rank 0's result goes down again. So a rank's connections, messages and bytes grow with the logarithm of the number of ranks,
and sums are always added in the order of tree_sum(), whatever order the messages arrive in.
"""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MEMBERS = 32  # ranks in a group at most


class Control:
    """A rank's place in the tree."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta):
        self.rank = rank
        # use_local_synchronization: only the members make a group; the other ranks are making theirs.
        alone: dict[str, Any] = dict(backend="gloo", timeout=timeout, use_local_synchronization=True)
        self.groups = [(members, dist.new_group([*members], **alone)) for members in groups_of(rank, world_size)]

    def reduce(self, values: torch.Tensor, merge: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Collective. Values [n] of each rank, merged to [n] on every rank. merge: [members, n] in rank order to [n]."""
        values = self.collect(values, merge)
        self.broadcast(values)
        return values

    def collect(self, values: torch.Tensor, merge: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Collective. The merged values on rank 0; elsewhere a tensor of the same size, which broadcast() then fills."""
        for members, group in self.groups:
            speaks = self.rank == members[0]
            parts = values.new_empty(len(members), len(values)) if speaks else None
            dist.gather(values, None if parts is None else [*parts], members[0], group=group)
            values = values.clone() if parts is None else merge(parts)
        return values

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Collective. Copy rank 0's values into the tensors of all ranks."""
        for members, group in reversed(self.groups):
            dist.broadcast(tensor, members[0], group=group)


def groups_of(rank: int, world_size: int) -> list[range]:
    """The members of this rank's groups, from the lowest level up. It represents each group except its last.

    Up to 32 ranks are one group. Beyond, an even number splits into groups at equal, largest distances: their sums are the
    first folds of tree_sum(). An odd number splits into groups of neighbours, and the last rank may form a group alone: torch
    names a group by the number of groups made before it, which must be equal on all members.
    """
    groups = []
    count, span = world_size, 1  # ranks on this level, and the distance between them
    while count > 1 and rank % span == 0 and rank < count * span:
        place = rank // span
        if count > MEMBERS and count % 2 == 0:
            left, apart = count // math.gcd(count, 2 ** (MEMBERS.bit_length() - 1)), 1
            members = range(place % left, count, left)
        else:
            first, left, apart = place - place % MEMBERS, -(-count // MEMBERS), MEMBERS
            members = range(first, min(first + MEMBERS, count))
        groups.append(range(members.start * span, members.stop * span, members.step * span))
        count, span = left, span * apart
    return groups


def tree_sum(parts: Sequence | torch.Tensor):
    """Sum the parts (tensors of one shape, or the rows of a tensor) in an order that depends only on their number.

    While their number is even, the second half is added to the first. The rest is added in order, in groups of 32 if there
    are more. When each rank holds a power-of-two number of parts, the additions nest as on one rank: --reduction canonical.
    """
    while len(parts) % 2 == 0:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    if len(parts) > MEMBERS:
        return tree_sum([tree_sum(parts[first : first + MEMBERS]) for first in range(0, len(parts), MEMBERS)])
    return sum(parts[1:], start=parts[0])

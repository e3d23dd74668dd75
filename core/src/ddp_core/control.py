"""The control plane: what the ranks tell each other goes over groups of at most 32 in a tree.

Numbers go up the tree: the first member of each group gathers and merges them, and represents it in the next group.
Rank 0's result goes down again. So a rank's connections, messages and bytes grow with the logarithm of the
number of ranks, and the sum of all is added in one order, whatever order they come in: that of tree_sum().
"""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MEMBERS = 32  # of a group, at most


class Control:
    """A rank's place in the tree."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta):
        self.rank = rank
        # Each made by its members alone: the others have groups of their own to make.
        alone: dict[str, Any] = dict(backend="gloo", timeout=timeout, use_local_synchronization=True)
        self.groups = [(members, dist.new_group([*members], **alone)) for members in groups_of(rank, world_size)]

    def reduce(self, values: torch.Tensor, merge: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[n] of this rank to [n] of all, on every rank. merge: [members, n], in the order of their ranks, to [n]."""
        values = self.collect(values, merge)
        self.broadcast(values)
        return values

    def collect(self, values: torch.Tensor, merge: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Of all ranks, on rank 0; elsewhere a place for them, to broadcast() to."""
        for members, group in self.groups:
            speaks = self.rank == members[0]
            parts = values.new_empty(len(members), len(values)) if speaks else None
            dist.gather(values, None if parts is None else [*parts], members[0], group=group)
            values = values.clone() if parts is None else merge(parts)
        return values

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's numbers to all ranks, in place."""
        for members, group in reversed(self.groups):
            dist.broadcast(tensor, members[0], group=group)


def groups_of(rank: int, world_size: int) -> list[range]:
    """The members of this rank's groups, from the lowest level up. It speaks for each group but its last.

    An even number of ranks falls into groups of up to 32 of which each is as far from the next as can be: their sums are
    the first folds of tree_sum(). An odd number falls into groups of neighbours, where the last one may be alone in its own:
    torch names a group by the number of groups before it, which has to be the same on all members.
    """
    groups = []
    count, span = world_size, 1  # so many ranks are left, each so far from the next
    while count > 1 and rank % span == 0 and rank < count * span:
        place = rank // span
        if count <= MEMBERS:
            members, left, apart = range(count), 1, 1
        elif count % 2 == 0:
            left, apart = count // math.gcd(count, 2 ** (MEMBERS.bit_length() - 1)), 1
            members = range(place % left, count, left)
        else:
            first, left, apart = place - place % MEMBERS, -(-count // MEMBERS), MEMBERS
            members = range(first, min(first + MEMBERS, count))
        groups.append(range(members.start * span, members.stop * span, members.step * span))
        count, span = left, span * apart
    return groups


def tree_sum(parts: Sequence | torch.Tensor):
    """The sum of parts (tensors of one shape, or the rows of one) in an order that is a function of their number alone.

    While their number is even, the second half is added to the first; what is left is added up in order, by 32s where it is
    more. When each rank holds a power-of-two number of parts, the additions nest as on one rank: --reduction canonical.
    """
    while len(parts) % 2 == 0:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    if len(parts) > MEMBERS:
        return tree_sum([tree_sum(parts[first : first + MEMBERS]) for first in range(0, len(parts), MEMBERS)])
    return sum(parts[1:], start=parts[0])

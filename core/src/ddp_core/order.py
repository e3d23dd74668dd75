"""Random numbers from integers, and the order of rows that is made from them.

With splitmix64 every machine draws the same numbers. Those of torch's generators change with the instruction set.
"""

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SORTED_ORDER = 2**24  # rows: a longer order is computed row by row, since sorting takes 16 bytes a row in each rank
# Streams of random numbers: the first label of words(). Stream 2 is for regression's rows, 3 for initial parameters.
ORDER, AUGMENTATION, DROPOUT, EVALUATION, OPTIMIZER = 1, 4, 5, 6, 7
GOLDEN, MIX1, MIX2 = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
MASK = 2**64 - 1


def splitmix64(state: torch.Tensor) -> torch.Tensor:
    """Map int64 states to int64 outputs, a bijection of the 64-bit words (Steele, Lea, Flood, OOPSLA 2014)."""
    z = state + GOLDEN  # int64 wraps modulo 2**64, as the algorithm wants
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift: torch's own keeps the sign


def words(count: int, *labels: int) -> torch.Tensor:
    """[count] distinct int64 words. Other labels give another stream."""
    state = stream(*labels)
    signed = state - (state >> 63 << 64)
    return splitmix64(signed + GOLDEN * torch.arange(count, dtype=torch.int64))


def uniform(count: int, *labels: int) -> torch.Tensor:
    """[count] fp64 values k / 2**24 in [0, 1): exact in fp32 too."""
    return _shift(words(count, *labels), 40).double() / 2**24


def word(*labels: int, state: int = 0) -> int:
    """The first of words(1, *labels), without a sign, in 2 microseconds: a seed for other generators.

    state: stream() of the labels before these, if many words share them.
    """
    return stream(*labels, 0, state=state)


def stream(*labels: int, state: int = 0) -> int:
    """The state after these labels, from which word() can continue."""
    for label in labels:
        z = ((state ^ label) + GOLDEN) & MASK
        z = ((z ^ z >> 30) * MIX1) & MASK
        z = ((z ^ z >> 27) * MIX2) & MASK
        state = z ^ z >> 31
    return state


def sample_order(seed: int, epoch: int, count: int) -> torch.Tensor:
    """[count] int64: a permutation of the rows. It depends on seed and epoch, never on the world size.

    Sorting distinct random words is exact on every machine, and 2 to 4 times faster here than Fisher-Yates.
    """
    return words(count, ORDER, seed, epoch).argsort()


def keyed_order(seed: int, epoch: int, count: int, places: torch.Tensor) -> torch.Tensor:
    """The rows at these places of an order that is never stored: for more rows than can be sorted in memory.

    A Feistel network of four rounds permutes the words of 2*half bits, the fewest that hold count. A word that is no row
    is permuted again until it is one (cycle walking): fewer than 4 times on average.
    """
    half = max(1, math.ceil((count - 1).bit_length() / 2))
    keys = [word(ORDER, seed, epoch, round_) & (2**62 - 1) for round_ in range(4)]
    low = (1 << half) - 1
    rows, outside = places.clone(), torch.ones_like(places, dtype=torch.bool)
    while outside.any():
        left, right = rows[outside] >> half, rows[outside] & low
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) & low)
        rows[outside] = (left << half) | right
        outside = rows >= count
    return rows


def rows_of_rank(order: torch.Tensor, global_batch_size: int, rank: int, world_size: int) -> torch.Tensor:
    """[steps, rows a rank] int64: step s trains on order[s*G : (s+1)*G], and this rank on every world_size-th row of it.

    Rows that do not fill a global batch are left out of this epoch. Another epoch leaves out other rows.
    """
    steps = len(order) // global_batch_size
    return order[: steps * global_batch_size].view(steps, global_batch_size)[:, rank::world_size]


def micro_batches(rows: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Split a rank's rows into `count` micro-batches: rows m::count. Each is every (count * world_size)-th row of all ranks: if
    that product is fixed (--shards), the micro-batches are the same at any world size.
    """
    return [rows[first::count] for first in range(count)] if count > 1 else [rows]


class Order:
    """Which rows this rank trains on, step by step."""

    def __init__(self, count: int, seed: int, global_batch_size: int, rank: int, world_size: int):
        self.count, self.seed, self.global_batch_size = count, seed, global_batch_size
        self.rank, self.world_size = rank, world_size

    def epoch(self, epoch: int, first: int, steps: int, device: torch.device) -> Iterator[torch.Tensor]:
        """For each of the steps first..steps-1 of an epoch, this rank's row numbers: int64, on the device."""
        size = self.global_batch_size
        if self.count <= SORTED_ORDER:
            order = sample_order(self.seed, epoch, self.count)
            yield from rows_of_rank(order, size, self.rank, self.world_size)[first:steps].to(device)
            return
        for step in range(first, steps):
            places = torch.arange(step * size + self.rank, (step + 1) * size, self.world_size)
            yield keyed_order(self.seed, epoch, self.count, places).to(device)


def seed_generators(device: torch.device, *labels: int, others: bool = False) -> None:
    """Seed torch's generators of the CPU and of this device. torch.manual_seed seeds every device's, at ten times the cost.

    others: also seed Python's and NumPy's, at ten times the cost.
    """
    seed = word(*labels)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).default_generators[device.index].manual_seed(seed)
    if others:
        seed_others(seed)


def seed_others(seed: int) -> None:
    """Seed Python's generator, and NumPy's if NumPy has been imported."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def drawing_alike(device: torch.device, rank: int, *labels: int) -> Iterator[None]:
    """Inside, all ranks draw the same numbers. After it each draws its own: rows may be read next (--row-seeds off)."""
    seed_generators(device, *labels, others=True)
    yield
    seed_generators(device, *labels, rank + 1, others=True)


def generator_positions() -> tuple:
    """The states of all generators: torch's on the CPU, Python's, NumPy's."""
    return torch.get_rng_state().tolist(), *positions_of_others()


def positions_of_others() -> tuple:
    """The states of Python's and NumPy's generators: another value, once anything was drawn from them."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and [str(part) for part in numpy.random.get_state()]


def seeded_anew(one: tuple, other: tuple) -> bool:
    """Whether a generator has the same state in both results of generator_positions(), which follow different seeds."""
    return any(state is not None and state == again for state, again in zip(one, other, strict=True))


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators: before a workload makes its data, and before its model."""
    torch.manual_seed(seed)
    seed_others(seed)

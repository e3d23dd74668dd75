"""Random integers, the order of samples, and who trains on which rows.

python -m pytest core/tests/test_data.py
"""

import pytest
import torch
from ddp_core import data

MASK = 2**64 - 1
# The sequence from seed 1234567 that https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64 publishes.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def splitmix64(state: int) -> int:
    """The output of one state, in Python's own integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def words(count: int, *labels: int) -> list[int]:
    state = 0
    for label in labels:
        state = splitmix64(state ^ label)
    return [splitmix64((state + i * 0x9E3779B97F4A7C15) & MASK) for i in range(count)]


def unsigned(values: torch.Tensor) -> list[int]:
    return [value & MASK for value in values.tolist()]


# ---- integers -----------------------------------------------------------------------------------------------------


def test_splitmix64_gives_the_published_numbers():
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK for i in range(len(PUBLISHED))]
    assert [splitmix64(state) for state in states] == PUBLISHED
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    assert unsigned(data.splitmix64(signed)) == PUBLISHED


@pytest.mark.parametrize("labels", [(), (0,), (1, 0, 0), (3, 7, 2**32 - 1)])
def test_words_equal_those_of_plain_python(labels):
    assert unsigned(data.words(500, *labels)) == words(500, *labels)


def test_uniform_numbers_are_multiples_of_2_to_the_minus_24():
    values = data.uniform(1000, 2, 0)
    assert values.tolist() == [(word >> 40) / 2**24 for word in words(1000, 2, 0)]
    assert values.min() >= 0 and values.max() < 1 and 0.45 < values.mean() < 0.55
    assert torch.equal(values.float().double(), values), "not exact in fp32"


# ---- the order of samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 97, 1438])
def test_the_order_is_a_permutation(count):
    assert sorted(data.sample_order(0, 0, count).tolist()) == list(range(count))


def test_the_order_is_that_of_plain_python():
    drawn = [word - 2**64 if word >= 2**63 else word for word in words(200, 1, 5, 3)]
    assert data.sample_order(5, 3, 200).tolist() == sorted(range(200), key=drawn.__getitem__)


def test_every_seed_and_epoch_has_an_order_of_its_own():
    orders = {tuple(data.sample_order(seed, epoch, 50).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_every_row_comes_first_about_equally_often():
    first = torch.tensor([data.sample_order(0, epoch, 10)[0] for epoch in range(2000)]).bincount(minlength=10)
    assert first.min() > 140 and first.max() < 260, first  # 200 +- 4.5 standard deviations


# ---- who trains on what -------------------------------------------------------------------------------------------

BATCHES = [(world_size, rows * world_size) for world_size in range(1, 17) for rows in (1, 3, 8)]


@pytest.mark.parametrize("world_size, batch", BATCHES)
def test_the_ranks_share_every_global_batch_out_among_them(world_size, batch):
    order = data.sample_order(0, 0, 403)
    shares = [data.rows_of_rank(order, batch, rank, world_size) for rank in range(world_size)]
    assert {share.shape for share in shares} == {(403 // batch, batch // world_size)}
    for step in range(403 // batch):
        together = torch.cat([share[step] for share in shares])
        assert sorted(together.tolist()) == sorted(order[step * batch : (step + 1) * batch].tolist())


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_rank_r_takes_every_world_size_th_row(world_size):
    order = data.sample_order(2, 1, 100)
    for rank in range(world_size):
        share = data.rows_of_rank(order, 12, rank, world_size)
        assert share[3].tolist() == order[36 + rank : 48 : world_size].tolist()


def test_rows_left_over_are_others_in_the_next_epoch():
    left = [set(data.sample_order(0, epoch, 100)[96:].tolist()) for epoch in range(2)]
    assert left[0] != left[1]

"""Random integers, the order of samples, and each rank's rows.

python -m pytest core/tests/test_order.py
"""

import random

import numpy
import pytest
import torch
from ddp_core import order as module
from ddp_core.order import Order, keyed_order, micro_batches, rows_of_rank, sample_order, uniform, word
from ddp_core.order import splitmix64 as ours
from ddp_core.order import words as our_words
from ranks import call, train

MASK = 2**64 - 1
# The published sequence for seed 1234567: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def splitmix64(state: int) -> int:
    """The output for one state, computed with Python's integers."""
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
    assert unsigned(ours(signed)) == PUBLISHED


@pytest.mark.parametrize("labels", [(), (0,), (1, 0, 0), (3, 7, 2**32 - 1)])
def test_words_equal_those_of_plain_python(labels):
    assert unsigned(our_words(500, *labels)) == words(500, *labels)


@pytest.mark.parametrize("labels", [(), (0,), (1, 0, 0), (4, 0, -1, 7), (3, 7, 2**32 - 1), (5, 2**53)])
def test_a_seed_is_the_first_word_without_its_sign(labels):
    assert [word(*labels)] == words(1, *labels)
    assert 0 <= word(*labels) < 2**64


def test_uniform_numbers_are_multiples_of_2_to_the_minus_24():
    values = uniform(1000, 2, 0)
    assert values.tolist() == [(word >> 40) / 2**24 for word in words(1000, 2, 0)]
    assert values.min() >= 0 and values.max() < 1 and 0.45 < values.mean() < 0.55
    assert torch.equal(values.float().double(), values), "not exact in fp32"


# ---- the order of samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 97, 1438])
def test_the_order_is_a_permutation(count):
    assert sorted(sample_order(0, 0, count).tolist()) == list(range(count))


def test_the_order_is_that_of_plain_python():
    drawn = [word - 2**64 if word >= 2**63 else word for word in words(200, 1, 5, 3)]
    assert sample_order(5, 3, 200).tolist() == sorted(range(200), key=drawn.__getitem__)


def test_every_seed_and_epoch_has_an_order_of_its_own():
    orders = {tuple(sample_order(seed, epoch, 50).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_every_row_comes_first_about_equally_often():
    first = torch.tensor([sample_order(0, epoch, 10)[0] for epoch in range(2000)]).bincount(minlength=10)
    assert first.min() > 140 and first.max() < 260, first  # 200 +- 4.5 standard deviations


# ---- rows of a rank -----------------------------------------------------------------------------------------------

BATCHES = [(world_size, rows * world_size) for world_size in range(1, 17) for rows in (1, 3, 8)]


@pytest.mark.parametrize("world_size, batch", BATCHES)
@pytest.mark.fault(23)
def test_the_ranks_share_every_global_batch_out_among_them(world_size, batch):
    order = sample_order(0, 0, 403)
    shares = [rows_of_rank(order, batch, rank, world_size) for rank in range(world_size)]
    assert {share.shape for share in shares} == {(403 // batch, batch // world_size)}
    for step in range(403 // batch):
        together = torch.cat([share[step] for share in shares])
        assert sorted(together.tolist()) == sorted(order[step * batch : (step + 1) * batch].tolist())


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_rank_r_takes_every_world_size_th_row(world_size):
    order = sample_order(2, 1, 100)
    for rank in range(world_size):
        share = rows_of_rank(order, 12, rank, world_size)
        assert share[3].tolist() == order[36 + rank : 48 : world_size].tolist()


def test_rows_left_over_are_others_in_the_next_epoch():
    left = [set(sample_order(0, epoch, 100)[96:].tolist()) for epoch in range(2)]
    assert left[0] != left[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_micro_batches_of_all_ranks_are_the_same_while_their_number_is(count):
    """--reduction canonical needs this: rank r's m-th micro-batch is number r + m * world_size of all."""
    rows = torch.arange(24)
    shards = {r + m * 2: part.tolist() for r in range(2) for m, part in enumerate(micro_batches(rows[r::2], count))}
    assert shards == {number: rows[number :: 2 * count].tolist() for number in range(2 * count)}


# ---- an order computed place by place -----------------------------------------------------------------------------


def keyed(seed: int, epoch: int, count: int, place: int) -> int:
    """The row at a place, computed with Python's integers: a Feistel network of four rounds, repeated until it gives a row."""
    bits = (count - 1).bit_length()
    half = max(1, (bits + 1) // 2)
    keys = [words(1, 1, seed, epoch, number)[0] % 2**62 for number in range(4)]
    row = place
    while True:
        left, right = row >> half, row % 2**half
        for key in keys:
            left, right = right, left ^ splitmix64(right ^ key) % 2**half
        row = left << half | right
        if row < count:
            return row


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 1023, 1025, 4097])
def test_a_keyed_order_is_a_permutation(count):
    for seed, epoch in ((0, 0), (0, 1), (7, 3)):
        assert sorted(keyed_order(seed, epoch, count, torch.arange(count)).tolist()) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 100, 1000, 2**24 + 1, 10**9, 10**12, 2**62])
def test_it_is_that_of_plain_python(count):
    places = sorted({0, 1 % count, count // 3, count // 2, count - 1})
    for seed, epoch in ((0, 0), (5, 2)):
        found = keyed_order(seed, epoch, count, torch.tensor(places)).tolist()
        assert found == [keyed(seed, epoch, count, place) for place in places]


def test_a_place_has_its_row_whatever_else_is_asked_for():
    places = torch.tensor([999_999_999, 3, 123_456_789, 3])
    together = keyed_order(0, 0, 10**9, places).tolist()
    assert together == [keyed_order(0, 0, 10**9, place.view(1)).item() for place in places]
    assert together[1] == together[3] and places.tolist() == [999_999_999, 3, 123_456_789, 3], "places were changed"


def test_every_seed_and_epoch_has_a_keyed_order_of_its_own():
    orders = {tuple(keyed_order(seed, epoch, 50, torch.arange(50)).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("count", [10, 1000])
def test_every_row_comes_first_about_equally_often_there_too(count):
    first = torch.tensor([keyed_order(0, epoch, count, torch.zeros(1, dtype=torch.int64)).item() for epoch in range(2000)])
    tenths = (first * 10 // count).bincount(minlength=10)
    assert tenths.min() > 140 and tenths.max() < 260, tenths  # 200 +- 4.5 standard deviations


def test_neighbours_are_scattered():
    """For places 0 .. 99,999 of 10^6, the mean distance between successive rows is a third of all rows, as by chance."""
    rows = keyed_order(0, 0, 10**6, torch.arange(10**5)).double()
    assert abs((rows[1:] - rows[:-1]).abs().mean().item() / 10**6 - 1 / 3) < 0.01


# ---- the choice between both orders -------------------------------------------------------------------------------


@pytest.mark.parametrize("count, batch", [(100, 12), (97, 8), (64, 64)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_above_the_threshold_the_keyed_order_is_shared_out_among_the_ranks(monkeypatch, count, batch, world_size):
    def steps_of(rank: int, first: int = 0) -> list[list[int]]:
        rows = Order(count, 3, batch, rank, world_size).epoch(2, first, count // batch, torch.device("cpu"))
        return [step.tolist() for step in rows]

    below, last = [steps_of(rank) for rank in range(world_size)], count // batch - 1
    assert steps_of(0, first=last) == below[0][-1:], "an epoch is entered in its middle"
    monkeypatch.setattr(module, "SORTED_ORDER", count)
    assert [steps_of(rank) for rank in range(world_size)] == below, "at the threshold it is sorted still"
    monkeypatch.setattr(module, "SORTED_ORDER", count - 1)
    above = [steps_of(rank) for rank in range(world_size)]
    for shares, order in ((below, sample_order(3, 2, count)), (above, keyed_order(3, 2, count, torch.arange(count)))):
        for step in range(count // batch):
            mine = order[step * batch : (step + 1) * batch].tolist()
            assert [shares[rank][step] for rank in range(world_size)] == [mine[rank::world_size] for rank in range(world_size)]
    assert steps_of(0, first=last) == above[0][-1:], "above the threshold, too"


def test_the_threshold_is_what_16_bytes_a_row_allow():
    assert module.SORTED_ORDER == 2**24


def _never_sorted() -> None:
    module.SORTED_ORDER = 10


def test_a_run_in_keyed_order_repeats_at_every_world_size_and_is_another_one(finished, tmp_path):
    from test_trainer import deviation

    fault = {rank: call("test_order", "_never_sorted") for rank in range(2)}
    flags = "--epochs 2 --precision fp64"
    two = train(tmp_path / "two", flags, 2, faults=fault, code=0)
    one = train(tmp_path / "one", flags, 1, faults=fault, code=0)
    assert deviation(two.losses, one.losses) < 1e-12
    assert deviation(two.losses, finished(flags, 2).losses) > 1e-3


def test_all_three_generators_are_seeded():
    def drawn(seed: int) -> tuple:
        module.seed_everything(seed)
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    first, again, other = drawn(3), drawn(3), drawn(4)
    assert first == again and not any(one == two for one, two in zip(first, other, strict=True))

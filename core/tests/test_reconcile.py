"""The ranks agree once a second: on sums, the slowest clock's interval, stops, saves, and non-finite numbers.

python -m pytest core/tests/test_reconcile.py
"""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from ddp_core import reconcile
from ddp_core.reconcile import Reconciliation
from ranks import call, train
from small import Small
from stand_in import Marked

NAN, INF, NOW = math.nan, math.inf, 1000.0
FLAGS = ("stop", "save", "tolerates", "seconds")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: NOW))


class Peers:
    """Stands for two ranks; this one is at `place`. others: the other rank's values that differ from this rank's."""

    def __init__(self, place: int = 0, **others):
        self.rank, self.others = place, others

    def reduce(self, sums: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        others, other = sums.clone(), most.clone()
        for name, value in self.others.items():
            if name in FLAGS:
                other[FLAGS.index(name)] = 1 - value if name == "tolerates" else value
            else:
                others[:], other[len(FLAGS) :] = torch.tensor(value).split([len(sums), len(most) - len(FLAGS)])
        self.bad = not others.isfinite().all()
        return sums + others, torch.maximum(most, other)

    def which(self, condition: bool) -> list[int]:
        return [rank for rank in (0, 1) if (condition if rank == self.rank else self.bad)]


def exchange(peers: Peers, losses=(1.0, 2.0), norms=(3.0, 4.0), seconds=0.5, step=10, **words):
    reconciliation = Reconciliation(peers)
    reconciliation.losses = [torch.tensor(loss, dtype=torch.float64) for loss in losses]
    reconciliation.norms = [torch.tensor(norm) for norm in norms]
    reconciliation.last = NOW - seconds
    return reconciliation, reconciliation.exchange(step, **dict(stop=False, save=False, tolerates=False) | words)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("mine, theirs", [(0.01, 2.0), (2.0, 0.01)])
def test_the_next_interval_is_that_of_the_slowest_clock_on_every_rank(place, mine, theirs):
    """Otherwise the ranks would exchange at different steps, and wait for each other forever."""
    reconciliation, agreed = exchange(Peers(place, seconds=theirs), [1.0] * 40, [1.0] * 40, seconds=mine)
    assert (reconciliation.interval, agreed.seconds) == (20, 2.0)


@pytest.mark.parametrize("count, seconds, interval", [(4, 1e-4, 8), (200, 0.01, 256), (1, 10.0, 1), (20, 0.1, 40)])
def test_an_interval_grows_to_twice_the_last_at_most_and_is_a_step_at_least(count, seconds, interval):
    reconciliation, _ = exchange(Peers(seconds=0), [1.0] * count, [1.0] * count, seconds=seconds)
    assert reconciliation.interval == interval


def test_it_is_due_after_as_many_steps():
    reconciliation, _ = exchange(Peers(), [1.0] * 4, [1.0] * 4, seconds=1e-4)
    due = []
    for _ in range(8):
        due.append(reconciliation.due)
        reconciliation.norms.append(torch.tensor(1.0))
    assert [*due, reconciliation.due] == [False] * 8 + [True]


@pytest.mark.parametrize("place", [0, 1])
def test_any_rank_may_stop_and_rank_0_alone_may_save(place):
    _, agreed = exchange(Peers(place, stop=1))
    assert agreed.stop and not agreed.save
    _, agreed = exchange(Peers(place, stop=0, save=0), stop=True, save=True)
    assert agreed.stop and agreed.save == (place == 0)
    _, agreed = exchange(Peers(place, save=1))
    assert agreed.save
    _, agreed = exchange(Peers(place))
    assert not agreed.stop and not agreed.save


def test_a_sum_that_overflows_is_not_finite_though_no_rank_s_loss_is():
    _, agreed = exchange(Peers(), losses=(1.0, 1e308))
    assert agreed.not_finite == (9, [], "loss")


def test_losses_are_sums_over_micro_batches_and_ranks_step_by_step():
    _, agreed = exchange(Peers(numbers=[10.0, 20.0, 3.0, 4.0]), losses=(1.0, 2.0, 4.0, 8.0))
    assert agreed.losses.tolist() == [[13.0], [32.0]] and agreed.norms.tolist() == [3.0, 4.0]


def test_parts_of_a_loss_stay_apart():
    _, agreed = exchange(Peers(), losses=([3.0, 1.0, 2.0], [7.0, 3.0, 4.0]))
    assert agreed.losses.tolist() == [[6.0, 2.0, 4.0], [14.0, 6.0, 8.0]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_first_step_that_is_not_finite_is_named_with_its_ranks(bad):
    _, agreed = exchange(Peers(numbers=[1.0, bad, bad, 1.0, 1.0, 1.0]), losses=(1.0, 1.0, bad), norms=(1.0, 1.0, bad))
    assert agreed.not_finite == (8, [1], "loss on rank 1")
    _, agreed = exchange(Peers(), losses=(1.0, bad), norms=(1.0, bad))
    assert agreed.not_finite == (9, [0, 1], "loss on rank 0, 1")


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_gradient_that_is_not_finite_is_tolerated_where_all_ranks_tolerate_it(bad):
    _, agreed = exchange(Peers(), norms=(bad, 1.0))
    assert agreed.not_finite == (8, [], "gradient")
    _, agreed = exchange(Peers(tolerates=0), norms=(bad, 1.0), tolerates=True)
    assert agreed.not_finite == (8, [], "gradient")
    _, agreed = exchange(Peers(), norms=(bad, 1.0), tolerates=True)
    assert agreed.not_finite is None
    for losses in ((1.0, bad), ([3.0, 1.0, 2.0], [bad, 1.0, bad])):  # a sum of which one part is not finite
        _, agreed = exchange(Peers(), losses=losses, norms=(bad, bad), tolerates=True)
        assert agreed.not_finite == (9, [0, 1], "loss on rank 0, 1")


def test_the_ranks_wait_for_each_other_before_they_wait_for_their_devices():
    """gloo notices a lost rank; a device would wait forever."""
    order, peers = [], Peers()
    peers.wait = lambda: order.append("peers")
    with Marked(lambda what, name: order.append(name)) as marked:
        marked.in_step = True
        reconciliation = Reconciliation(peers)
        reconciliation.losses = reconciliation.norms = [torch.ones((), device=torch.device("cuda"))]
        reconciliation.exchange(1, stop=False, save=False, tolerates=False)
    assert order == ["peers", "cpu"]


def test_the_seconds_of_steps_end_when_the_device_has_done_them(monkeypatch):
    """The host is ahead of the device: its own clock would count these steps' seconds to the next ones."""
    clock, peers = [NOW], Peers(seconds=0)
    peers.wait = lambda: None
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Marked(lambda what, name: clock.append(clock.pop() + 2.0)) as marked:
        marked.in_step = True
        reconciliation = Reconciliation(peers)
        reconciliation.losses = reconciliation.norms = [torch.ones((), device=torch.device("cuda"))]
        agreed = reconciliation.exchange(1, stop=False, save=False, tolerates=False)
    assert (agreed.seconds, reconciliation.last) == (2.0, NOW + 2)


def test_what_was_told_is_forgotten_and_the_clock_begins_anew():
    reconciliation, _ = exchange(Peers(), seconds=5)
    assert reconciliation.losses == reconciliation.norms == []
    assert reconciliation.last == NOW


class Lagging(Small):
    """Metrics take 0.2 s on all ranks."""

    defaults = Small.defaults | dict(epochs=1, global_batch_size=8)

    def metrics(self, outputs, batch):
        time.sleep(0.2)
        return super().metrics(outputs, batch)


def _a_fast_clock() -> None:
    """Rank 1's clock runs at three times the speed."""
    from ddp_core import evaluation

    evaluation.time = SimpleNamespace(monotonic=lambda: 3 * time.monotonic())


def test_ranks_whose_clocks_differ_ask_each_other_after_the_same_held_out_batch(tmp_path):
    faults = {1: call("test_reconcile", "_a_fast_clock")}
    train(tmp_path / "run", "--timeout 5", 2, workload="test_reconcile:Lagging", faults=faults, code=0)

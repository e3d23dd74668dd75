"""Every workload trains on two ranks as on one, and its loss falls.

python -m pytest core/tests/test_workloads.py
"""

import pytest
from test_trainer import deviation


@pytest.mark.parametrize("workload", ["digits", "regression", "mnist", "gpt"])
def test_the_loss_falls_on_two_ranks(workload, flags_of, finished):
    job = finished(flags_of[workload], 2)
    first, second = job.records("epoch")
    assert second["loss"] < 0.9 * first["loss"]
    assert second["eval_loss"] < first["eval_loss"]
    assert job.records("start")[0]["config"]["workload"] == workload


@pytest.mark.parametrize("workload", ["regression", "mnist", "gpt"])
def test_two_ranks_train_like_one(workload, flags_of, finished):
    two, one = (finished(f"{flags_of[workload]} --precision fp64", size) for size in (2, 1))
    assert deviation(two.losses, one.losses) < 1e-10
    metric = next(name for name in one.records("epoch")[-1] if name in ("eval_accuracy", "eval_absolute_error"))
    for ours, theirs in zip(two.records("epoch"), one.records("epoch"), strict=True):
        assert ours[metric] == pytest.approx(theirs[metric], rel=1e-10)


def test_channels_last_gives_the_same_losses(flags_of, finished):
    """Snapshots, too, hold the numbers in the order of the shapes, whatever their order in memory."""
    flags = f"{flags_of['mnist']} --precision fp64"
    assert deviation(finished(f"{flags} --channels-last", 2).losses, finished(flags, 2).losses) < 1e-10


def test_a_batch_per_rank_makes_the_steps_fewer(flags_of, finished):
    flags = "--workload regression --epochs 1 --per-rank-batch-size 256"
    assert len(finished(flags, 1).losses) == 8
    assert len(finished(flags, 2).losses) == 4

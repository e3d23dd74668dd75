"""A snapshot holds everything that a stopped run needs to resume bit for bit, for any model and any optimizer.

python -m pytest core/tests/test_state.py
"""

import re
import signal

import pytest
import torch
from ddp_core import snapshot
from ddp_core.config import parse
from ddp_core.order import rows_of_rank, sample_order, seed_everything
from ddp_core.workload import find
from faults import at_step, signalled
from ranks import Job, assert_same_run, step_of, train
from small import OPTIMIZERS, BatchNorm, Dropout, Groups, table
from test_order import words
from test_reduction import assert_same_bits
from test_trainer import deviation

STOPPED = {0: at_step(4, signalled(signal.SIGUSR1))}  # in the middle of the first epoch, which has 8 steps


def stopped_and_resumed(folder, workload: str, flags: str, first: int, then: int) -> Job:
    job = train(folder / "run", flags, first, workload=workload, faults=STOPPED, code=75)
    assert 0 < step_of(job) < 8, "it did not stop in the middle of an epoch"
    return train(folder / "run", flags, then, workload=workload, code=0)


def tensors_of(job: Job) -> dict[str, torch.Tensor]:
    return snapshot.read(job.snapshot)[0]


# ---- any optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_any_optimizer_of_torch_is_stopped_and_resumed_bit_for_bit(finished, tmp_path, rule):
    whole = finished(f"--rule {rule}", 1, "small:Optimizers")
    assert whole.losses[-1] < whole.losses[0], "it does not train"
    assert_same_run(stopped_and_resumed(tmp_path, "small:Optimizers", f"--rule {rule}", 1, 1), whole)


@pytest.mark.parametrize("rule", ["nesterov", "rprop", "nadam", "counting"])
def test_it_is_the_same_on_two_ranks(finished, tmp_path, rule):
    """If rank 1 did not get the state, the replicas would diverge."""
    whole = finished(f"--rule {rule}", 2, "small:Optimizers")
    assert deviation(whole.losses, finished(f"--rule {rule}", 1, "small:Optimizers").losses) < 1e-10
    assert_same_run(stopped_and_resumed(tmp_path, "small:Optimizers", f"--rule {rule}", 2, 2), whole)


def test_states_are_named_after_their_parameters_and_of_sgd_and_adam_as_in_earlier_snapshots(finished):
    parts = {"plain": set(), "nesterov": {"momentum"}, "amsgrad": {"mean", "square", "max_exp_avg_sq", "step"}}
    parts["asgd"] = {"ax", "mu", "eta", "step"}
    for rule, states in parts.items():
        names = tensors_of(finished(f"--rule {rule}", 1, "small:Optimizers")).keys()
        model = {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert names == {f"{part}.{name}" for part in ("model", *(f"optim.{state}" for state in states)) for name in model}


def test_a_loop_by_hand_with_its_groups_clipping_and_schedule_has_the_same_losses(finished):
    """small.Groups: AdamW with two groups and its own schedule, against a textbook loop on the same rows."""
    flags = "--clip-norm 0.5 --epochs 2"
    workload, config = find(Groups), parse(flags.split(), 1, workload=find(Groups))
    seed_everything(config.seed)
    model, (inputs, targets) = workload.model(config).double(), table()
    optimizer, losses = workload.optimizer(model, config), []
    rates = [group["lr"] for group in optimizer.param_groups]
    for epoch in range(2):
        for rows in rows_of_rank(sample_order(0, epoch, 128), 16, 0, 1):
            loss = torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / (1 + len(losses))
            optimizer.step()
            losses.append(loss.item())
    job = finished(flags, 1, "small:Groups")
    assert deviation(job.losses, losses) < 1e-12
    assert max(record["grad_norm"] for record in job.records("step")) > 0.5, "nothing was clipped: this shows less"
    assert deviation(finished("--epochs 2", 1, "small:Groups").losses, losses) > 1e-6, "clipping changes nothing"


@pytest.mark.parametrize("first, then", [(2, 2), (2, 1)])
def test_groups_clipping_and_a_schedule_go_on_where_they_were(finished, tmp_path, first, then):
    job = stopped_and_resumed(tmp_path, "small:Groups", "--clip-norm 0.5", first, then)
    whole = finished("--clip-norm 0.5", 2, "small:Groups")
    assert deviation(job.losses, whole.losses) < 1e-12
    if (first, then) == (2, 2):
        assert_same_run(job, whole)


# ---- any model ----------------------------------------------------------------------------------------------------


KINDS = ["Dropout", "BatchNorm", "Tied", "Frozen", "FineTuned", "Experts", "Turned", "Dictionary", "SeveralLosses"]


@pytest.mark.parametrize("workload", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_any_kind_is_stopped_and_resumed_bit_for_bit(finished, tmp_path, workload, world_size):
    whole = finished("", world_size, f"small:{workload}")
    epochs = whole.records("epoch")
    assert epochs[-1]["loss"] < epochs[0]["loss"], "it does not train"
    assert_same_run(stopped_and_resumed(tmp_path, f"small:{workload}", "", world_size, world_size), whole)


@pytest.mark.parametrize("reduction", ["flat", "canonical"])
def test_it_is_the_same_without_ddp(finished, tmp_path, reduction):
    for workload in ("Dropout", "BatchNorm", "Experts"):
        flags = f"--reduction {reduction}"
        whole = finished(flags, 2, f"small:{workload}")
        (tmp_path / workload).mkdir()
        assert_same_run(stopped_and_resumed(tmp_path / workload, f"small:{workload}", flags, 2, 2), whole)


def test_more_than_two_ranks_under_ddp_resume_bit_for_bit(finished, tmp_path):
    """DDP rearranges its buckets after its first backward, which changes the order of additions."""
    whole = finished("", 4, "small:Small")
    assert_same_run(stopped_and_resumed(tmp_path, "small:Small", "", 4, 4), whole)


def test_tied_weights_are_saved_once_and_stay_tied(finished):
    tensors = tensors_of(finished("", 1, "small:Tied"))
    assert "model.0.weight" in tensors and "model.2.weight" not in tensors
    assert "optim.momentum.0.weight" in tensors and "optim.momentum.2.weight" not in tensors


def test_frozen_parameters_are_saved_do_not_move_and_have_no_state(finished, tmp_path):
    tensors = tensors_of(finished("", 2, "small:Frozen"))
    start = tensors_of(train(tmp_path / "run", "--steps-per-epoch 1 --epochs 1", 2, workload="small:Frozen", code=0))
    assert torch.equal(tensors["model.0.weight"], start["model.0.weight"])
    assert not torch.equal(tensors["model.2.weight"], start["model.2.weight"])
    assert {name for name in tensors if name.startswith("optim")} == {"optim.momentum.2.weight", "optim.momentum.2.bias"}


def test_a_parameter_that_has_never_had_a_gradient_is_left_alone_and_has_no_state(finished):
    """small.Experts: the last expert is never used. Weight decay would change it."""
    flags = "--weight-decay 0.1 --epochs 1 --steps-per-epoch 2"
    job = finished(flags, 2, "small:Experts")
    tensors, document = snapshot.read(job.snapshot)
    without = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    without -= {name.removeprefix("optim.momentum.") for name in tensors}
    assert {"experts.5.weight", "experts.5.bias"} <= without == {*document["stateless"]}
    later = tensors_of(finished("--weight-decay 0.1", 2, "small:Experts"))
    assert torch.equal(later["model.experts.5.weight"], tensors["model.experts.5.weight"])


@pytest.mark.parametrize("workload", ["FirstUnasked", "Turned"])
def test_several_ranks_resume_from_what_only_rank_0_has_read(finished, tmp_path, workload):
    """FirstUnasked: ranks make states that the snapshot lacks. Turned: a large tensor with another memory order."""
    flags = "--weight-decay 0.1"
    train(tmp_path / "run", f"{flags} --epochs 1", 2, workload=f"small:{workload}", code=0)
    again = train(tmp_path / "run", f"{flags} --timeout 5", 2, workload=f"small:{workload}", code=0)
    assert_same_run(again, finished(flags, 2, f"small:{workload}"))


# ---- buffers ------------------------------------------------------------------------------------------------------


def test_buffers_are_in_the_snapshot_and_those_of_rank_0(finished):
    tensors = tensors_of(finished("", 2, "small:BatchNorm"))
    assert {"model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"} <= tensors.keys()
    assert tensors["model.1.num_batches_tracked"].item() == 24, "a step is counted twice, or the one that is tried counts"
    assert tensors["model.1.num_batches_tracked"].dtype == torch.int64


def test_statistics_are_trained_and_evaluation_uses_them(finished):
    """On one rank: compare with rank 0's running mean, computed by hand, after the first epoch."""
    workload = find(BatchNorm)
    config = parse(["--epochs", "1"], 1, workload=workload)
    seed_everything(0)
    model, (inputs, targets) = workload.model(config).double(), table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for rows in rows_of_rank(sample_order(0, 0, 128), 16, 0, 1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    job = finished("--epochs 1", 1, "small:BatchNorm")
    torch.testing.assert_close(tensors_of(job)["model.1.running_mean"], model[1].running_mean, rtol=1e-12, atol=1e-14)
    held_out, expected = table(37, first=128)
    loss = torch.nn.functional.mse_loss(model.eval()(held_out), expected).item()
    assert job.records("epoch")[0]["eval_loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("reduction", ["ddp", "flat", "canonical"])
def test_every_rank_evaluates_with_the_same_statistics(finished, reduction):
    """Means over all held-out rows with rank 0's model, computed again from the snapshot."""
    job = finished(f"--reduction {reduction}", 2, "small:BatchNorm")
    workload = find(BatchNorm)
    model = workload.model(parse([], 1, workload=workload)).double()
    model.load_state_dict({name.removeprefix("model."): v for name, v in tensors_of(job).items() if name.startswith("model.")})
    inputs, targets = table(37, first=128)
    loss = torch.nn.functional.mse_loss(model.eval()(inputs), targets).item()
    assert job.records("epoch")[-1]["eval_loss"] == pytest.approx(loss, rel=1e-12)


# ---- random numbers -----------------------------------------------------------------------------------------------


def test_dropout_drops_and_another_seed_drops_others(finished):
    plain, dropped, other = (
        finished(flags, 1, w) for flags, w in (("", "small:Dropout"), ("", "small:Small"), ("--seed 1", "small:Dropout"))
    )
    assert deviation(plain.losses, dropped.losses) > 1e-3
    assert deviation(plain.losses, other.losses) > 1e-3


@pytest.mark.parametrize("flags, first, then", [("", 2, 2), ("--reduction canonical", 1, 2)])
def test_noise_from_python_and_numpy_is_drawn_again_after_a_stop(finished, tmp_path, flags, first, then):
    assert_same_run(stopped_and_resumed(tmp_path, "small:Mixup", flags, first, then), finished(flags, then, "small:Mixup"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_masks_are_a_function_of_seed_step_and_micro_batch(finished, world_size):
    """Two micro-batches per rank, by hand: torch's generator is seeded with words(1, 5, seed, step, its number) for each."""
    seed_everything(0)
    workload = find(Dropout)
    model, (inputs, targets) = workload.model(parse([], 1, workload=workload)).double().train(), table()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for epoch in range(3):
        for rows in rows_of_rank(sample_order(0, epoch, 128), 16, 0, 1):
            optimizer.zero_grad()
            total = 0.0
            for number in range(2 * world_size):
                torch.manual_seed(words(1, 5, 0, len(losses), number)[0])
                mine = rows[number :: 2 * world_size]
                loss = torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine], reduction="sum") / 16
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses.append(total)
    assert deviation(finished("--accumulate 2", world_size, "small:Dropout").losses, losses) < 1e-12


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("workload", ["Dropout", "SeveralLosses", "Experts", "Tied"])
def test_canonical_gives_the_same_bits_at_every_world_size_also_with_dropout(finished, workload, world_size):
    flags = "--reduction canonical --shards 8"
    assert_same_bits(finished(flags, world_size, f"small:{workload}"), finished(flags, 1, f"small:{workload}"))


def test_a_run_with_dropout_goes_on_at_another_world_size_to_the_bit_under_canonical(finished, tmp_path):
    flags = "--reduction canonical --shards 8"
    job = stopped_and_resumed(tmp_path, "small:Dropout", flags, 4, 2)
    assert_same_bits(job, finished(flags, 1, "small:Dropout"))


# ---- fp16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_trains_with_a_scaled_loss_and_its_scale_goes_on(finished, tmp_path, world_size):
    flags = "--precision fp16 --reduction flat"
    exact, job = finished("", 1, "small:Small"), finished(flags, world_size, "small:Small")
    assert 1e-6 < deviation(job.losses, exact.losses) < 0.2
    whole, growth = snapshot.read(job.snapshot)[1]["scale"]
    assert float.fromhex(whole) == 65536 and growth == 24, "one step after another without an overflow"
    assert_same_run(stopped_and_resumed(tmp_path, "small:Small", flags, world_size, world_size), job)


def test_under_fp16_a_step_that_overflows_is_left_out_and_said(tmp_path):
    """A loss of thousands times 2**16 exceeds fp16. The first steps are skipped until the scale is low enough."""
    source = """
from small import *

class Large(Small):
    def forward(self, model, batch):
        return model(batch[0]) * 100
"""
    (tmp_path / "large.py").write_text(source)
    flags = f"--workload {tmp_path / 'large.py'} --precision fp16 --lr 1e-6"
    whole = train(tmp_path / "whole", flags, 2, code=0)
    skipped = [record["grad_norm"] is None for record in whole.records("step")]
    assert skipped[0] and not skipped[-1], "this shows nothing"
    assert all(loss > 0 for loss in whole.losses)
    assert re.search(rf"skipped steps +{sum(skipped)} of {len(skipped)}: gradients overflowed", whole.out[0]), whole.out[0]
    scale, _ = snapshot.read(whole.snapshot)[1]["scale"]
    assert float.fromhex(scale) == 65536 / 2 ** sum(skipped)
    train(tmp_path / "run", flags, 2, faults={0: at_step(1, signalled(signal.SIGUSR1))}, code=75)
    assert_same_run(train(tmp_path / "run", flags, 2, code=0), whole)

"""The same losses: repeated, at other world sizes, precisions, reductions and micro-batches; evaluation; saved files.

python -m pytest core/tests/test_trainer.py
"""

import json
import math
import socket
from pathlib import Path

import pytest
import ranks
import torch
from ddp_core import snapshot

TWO_EPOCHS = "--epochs 2 --precision fp64"


def deviation(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of two loss curves."""
    assert len(losses) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


# ---- it learns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_digits_are_learned_in_three_epochs(finished, world_size):
    job = finished("--epochs 3", world_size)
    epochs = job.records("epoch")
    assert epochs[-1]["eval_accuracy"] > 0.95
    assert epochs[0]["loss"] > epochs[1]["loss"] > epochs[2]["loss"] > 0
    assert job.losses[0] > math.log(10) > 10 * job.losses[-1]
    assert all(record["grad_norm"] > 0 for record in job.records("step"))


def test_a_finished_run_says_so(finished):
    job = finished("--epochs 3", 2)
    assert "run complete" in job.out[0] and "3 of 3" in job.out[0]
    assert job.out[1] == "" and job.err == ["", ""], "a rank other than 0 has something to say"
    assert [record["exit_code"] for record in job.records("end")] == [0]


def test_an_evaluation_leaves_the_training_as_it_was(finished):
    """Dropout must act in every epoch, not only before the first evaluation."""
    assert finished("", 1, "small:Dropout").losses == finished("--eval-every 9", 1, "small:Dropout").losses


def test_the_best_model_is_kept_also_where_no_snapshot_is_due(finished):
    job = finished("--save-every 3", 1, "small:Worsens")
    losses = [record["eval_loss"] for record in job.records("epoch")]
    assert losses.index(min(losses)) < 2, losses
    _, document = snapshot.read(job.run_dir / "best.safetensors")
    assert document["epochs_run"] == losses.index(min(losses)) + 1 and len(job.records("snapshot")) == 1


def test_an_epoch_s_loss_is_the_mean_over_its_steps(finished):
    job = finished(TWO_EPOCHS, 2)
    for record in job.records("epoch"):
        steps = job.losses[14 * record["epoch"] : 14 * (record["epoch"] + 1)]
        assert record["loss"] == pytest.approx(sum(steps) / 14, rel=1e-14)


@pytest.mark.parametrize("world_size", [1, 2])
def test_epochs_without_evaluation_and_snapshot_are_recorded_as_well(finished, world_size):
    """Ranks do not wait for each other at such an epoch's end. Its loss is reported later and is the same."""
    often, seldom = (
        finished(f"--epochs 6 --precision fp64{flags}", world_size) for flags in ("", " --eval-every 4 --save-every 9")
    )
    assert [loss.hex() for loss in often.losses] == [loss.hex() for loss in seldom.losses]
    for name in ("epoch", "step", "loss"):
        assert [record[name] for record in often.records("epoch")] == [record[name] for record in seldom.records("epoch")]
    assert [record["epoch"] for record in seldom.records("epoch") if "eval_loss" in record] == [3, 5]
    assert [len(row) for row in snapshot.read(seldom.snapshot)[1]["history"]] == [2, 2, 2, 4, 2, 4]
    assert len(seldom.records("snapshot")) == 1


@pytest.mark.parametrize("flag", ["--seed 1", "--lr 0.05", "--momentum 0.5", "--weight-decay 0.01", "--warmup-steps 5"])
def test_another_choice_gives_another_curve(finished, flag):
    """A flag without effect would pass every comparison of runs."""
    assert deviation(finished(f"{TWO_EPOCHS} {flag}", 1).losses, finished(TWO_EPOCHS, 1).losses) > 1e-3


@pytest.mark.fault(24)
def test_every_epoch_has_an_order_of_its_own(finished):
    """At a tiny learning rate, equal orders of rows would give equal losses."""
    losses = finished("--epochs 2 --lr 1e-12 --precision fp64", 1).losses
    assert deviation(losses[:14], losses[14:]) > 1e-3


# ---- the same losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("flags", ["", "--optimizer adamw --lr 0.003", "--lr-schedule cosine --warmup-steps 4"])
def test_losses_do_not_depend_on_the_world_size(finished, world_size, flags):
    flags = f"{TWO_EPOCHS} {flags}".strip()
    assert deviation(finished(flags, world_size).losses, finished(flags, 1).losses) < 1e-12


@pytest.mark.parametrize("world_size, reduction", [(6, "ddp"), (8, "canonical"), (12, "flat")])
def test_larger_worlds_whose_shards_are_uneven_train_and_evaluate_alike(finished, world_size, reduction):
    """With 359 held-out rows, some of 6, 8 or 12 ranks have one row more."""
    flags = f"{TWO_EPOCHS} --reduction {reduction}"
    job, alone = finished(flags, world_size), finished(flags, 1)
    assert deviation(job.losses, alone.losses) < 1e-12
    for name in ("loss", "eval_loss", "eval_accuracy"):
        of_both = ([record[name] for record in one.records("epoch")] for one in (job, alone))
        assert deviation(*of_both) < 1e-12, name


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_in_fp32_do_not_depend_on_the_world_size(finished, world_size):
    assert deviation(finished("--epochs 2", world_size).losses, finished("--epochs 2", 1).losses) < 1e-5


def test_fp32_follows_fp64_and_bf16_at_a_distance(finished):
    exact = finished(TWO_EPOCHS, 1).losses
    assert 0 < deviation(finished("--epochs 2", 1).losses, exact) < 1e-5
    assert 1e-5 < deviation(finished("--epochs 2 --precision bf16", 2).losses, exact) < 0.2


@pytest.mark.parametrize(
    "precision, product, dtype, form",
    [
        ("fp16", "float16", "float32", "outputs"),
        ("bf16", "bfloat16", "float32", "{'of': outputs}"),
        ("bf16", "bfloat16", "float32", "[outputs, (outputs, 1)]"),
        ("fp64", "float64", "float64", "outputs"),
    ],
)
def test_losses_and_metrics_are_not_rounded_as_products_are(tmp_path, precision, product, dtype, form):
    """Checked in the trial of two rows, in steps and in evaluation."""
    file = tmp_path / "mine.py"
    file.write_text(f"""
import torch
from ddp_core.workloads.digits import Digits


class Mine(Digits):
    def forward(self, model, batch):
        outputs = model(batch[0])
        print("product", outputs.dtype)
        return {form}

    def loss(self, outputs, batch):
        return super().loss(first(outputs), batch)

    def metrics(self, outputs, batch):
        return super().metrics(first(outputs), batch)


def first(outputs):
    (tensor, *_) = torch.utils._pytree.tree_leaves(outputs)
    print("given", tensor.dtype)
    return tensor
""")
    flags = f"--epochs 1 --steps-per-epoch 2 --precision {precision}"
    job = ranks.train(tmp_path / "run", flags, 2, workload=str(file), code=0)
    for output in job.out:
        printed = {line for line in output.splitlines() if line.startswith(("product", "given"))}
        assert printed == {f"product torch.{product}", f"given torch.{dtype}"}


@pytest.mark.parametrize("flags, world_size", [(TWO_EPOCHS, 1), (TWO_EPOCHS, 2), ("--epochs 2", 4)])
def test_a_run_repeats_bit_for_bit(finished, tmp_path, flags, world_size):
    again = ranks.train(tmp_path / "run", flags, world_size, code=0)
    assert again.losses == finished(flags, world_size).losses
    assert again.snapshot_hash() == finished(flags, world_size).snapshot_hash()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ddp_and_the_flat_sum_agree(finished, world_size):
    ddp, flat = (finished(f"{TWO_EPOCHS} --reduction {kind}", world_size) for kind in ("ddp", "flat"))
    assert [job.records("start")[0]["reduction"] for job in (ddp, flat)] == ["ddp" if world_size > 1 else "none", "flat"]
    assert deviation(ddp.losses, flat.losses) < 1e-12


@pytest.mark.parametrize("reduction", ["ddp", "flat"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_add_up_to_the_same_step(finished, world_size, reduction):
    flags = f"{TWO_EPOCHS} --reduction {reduction}"
    whole, cut = finished(flags, world_size), finished(f"{flags} --accumulate 3", world_size)
    assert deviation(cut.losses, whole.losses) < 1e-12


def test_scale_lr_trains_with_the_product(finished):
    scaled, plain = finished(f"{TWO_EPOCHS} --lr 0.05 --scale-lr", 2), finished(f"{TWO_EPOCHS} --lr 0.1", 2)
    assert scaled.losses == plain.losses


def test_each_group_of_parameters_keeps_its_own_learning_rate(tmp_path):
    """The schedule multiplies 0.01 and 0.03 here, whatever --lr is."""
    write = ranks.call("test_trainer", "_write_rates", tmp_path / "rates")
    ranks.train(tmp_path / "run", "--epochs 1 --lr 7", workload="small:Groups", faults={0: write}, code=0)
    rates = [json.loads(line) for line in (tmp_path / "rates").read_text().splitlines()]
    assert len(rates) > 2 and rates == [[0.01 * (1 / (1 + step)), 0.03 * (1 / (1 + step))] for step in range(len(rates))]


def _write_rates(file: Path) -> None:
    from ddp_core.guard import Guard

    step = Guard.step

    def stepped(guard):
        with open(file, "a") as lines:
            lines.write(f"{json.dumps([group['lr'] for group in guard.optimizer.param_groups])}\n")
        return step(guard)

    Guard.step = stepped


# ---- evaluation and saved files -----------------------------------------------------------------------------------


def test_an_evaluation_takes_no_more_rows_at_once_than_training(tmp_path):
    """16 of a step's 96 rows, with 2 ranks and 3 micro-batches. A model that fills the memory in training must fit here too."""
    write = ranks.call("test_trainer", "_write_sizes", tmp_path / "sizes")
    flags = "--epochs 1 --steps-per-epoch 1 --accumulate 3"
    ranks.train(tmp_path / "run", flags, 2, faults={1: write}, code=0)
    sizes = [line.split() for line in (tmp_path / "sizes").read_text().splitlines()]
    assert [max(int(size) for training, size in sizes if training == how) for how in ("True", "False")] == [16, 16]


def _write_sizes(file: Path) -> None:
    forward = torch.nn.Linear.forward

    def recorded(layer, rows):
        with open(file, "a") as lines:
            lines.write(f"{layer.training} {len(rows)}\n")
        return forward(layer, rows)

    torch.nn.Linear.forward = recorded


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_held_out_row_counts_once(finished, world_size):
    """359 rows do not divide by 2 or 4. An accuracy over all rows, each counted once, is a multiple of 1/359."""
    for ours, alone in zip(*(finished(TWO_EPOCHS, size).records("epoch") for size in (world_size, 1)), strict=True):
        assert ours["eval_accuracy"] * 359 == pytest.approx(round(ours["eval_accuracy"] * 359), abs=1e-9)
        assert ours["eval_accuracy"] == alone["eval_accuracy"]
        assert ours["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-12)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_held_out_rows_may_be_fewer_than_ranks(tmp_path, rows, world_size):
    methods = f"    def data(self, config):\n        return table(), table({rows}, first=128)\n"
    (tmp_path / "mine.py").write_text(f"from small import *\n\nclass Mine(Small):\n{methods}")
    flags = f"--workload {tmp_path / 'mine.py'} --epochs 1"
    one, many = (ranks.train(tmp_path / str(size), flags, size, code=0).records("epoch")[0] for size in (1, world_size))
    assert many["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-12) and one["eval_loss"] > 0


def test_evaluation_and_snapshots_come_every_so_many_epochs_and_at_the_end(finished):
    job = finished("--epochs 5 --eval-every 2 --save-every 3 --steps-per-epoch 3", 1)
    assert ["eval_loss" in record for record in job.records("epoch")] == [False, True, False, True, True]
    assert [record["epochs_run"] for record in job.records("snapshot")] == [3, 5]
    _, document = snapshot.read(job.run_dir / "snapshot.prev.safetensors")
    assert document["measured"] == ["loss", "eval_loss", "eval_accuracy"], "the third epoch has no evaluation, the second has"


def test_replicas_that_differ_from_the_start_are_named_before_the_first_step(tmp_path):
    odd = {1: ranks.call("test_trainer", "_receive_other_numbers")}
    job = ranks.train(tmp_path / "run", "", 2, workload="small:Small", faults=odd, code=7)
    assert "the parameters of rank 1 differ from rank 0's at step 0: " in job.error


def _receive_other_numbers() -> None:
    from ddp_core.state import State

    restore = State.restore

    def restored(state, *others):
        restore(state, *others)
        next(state.model.parameters()).detach().add_(1)

    State.restore = restored


def test_the_best_model_is_that_of_the_lowest_held_out_loss(finished):
    """This large learning rate makes the loss rise again, so the best epoch is not the last."""
    job = finished("--epochs 6 --steps-per-epoch 3 --lr 3.0 --seed 1", 1)
    losses = [record["eval_loss"] for record in job.records("epoch")]
    _, document = snapshot.read(job.run_dir / "best.safetensors")
    assert losses.index(min(losses)) != 5, f"the last epoch is the best, this shows nothing: {losses}"
    assert document["epochs_run"] == losses.index(min(losses)) + 1
    assert float.fromhex(document["best"][1]) == min(losses)


@pytest.mark.parametrize("reduction", ["ddp", "flat"])
@pytest.mark.fault(38)
def test_a_snapshot_has_the_names_of_the_bare_model(finished, reduction):
    tensors, document = snapshot.read(finished(f"{TWO_EPOCHS} --reduction {reduction}", 2).snapshot)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert tensors.keys() == {f"{kind}.{name}" for kind in ("model", "optim.momentum") for name in names}
    assert all(values.dtype == torch.float64 and values.isfinite().all() for values in tensors.values())
    assert (document["step"], document["epochs_run"], document["world_size"]) == (28, 2, 2)


def test_a_snapshot_says_nothing_of_where_it_was_written(finished):
    job = finished(TWO_EPOCHS, 2)
    text = json.dumps(snapshot.read(job.snapshot)[1])
    assert str(job.run_dir) not in text and f'"{socket.gethostname()}"' not in text

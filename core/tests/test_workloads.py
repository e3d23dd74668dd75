"""The built-in workloads: initial parameters, losses as sums over rows, learnable data; two ranks train like one.

python -m pytest core/tests/test_workloads.py
"""

import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ddp_core import data
from ddp_core.config import TrainConfig, parse
from ddp_core.workload import BUILT_IN, Workload, find, initial_parameters
from ddp_core.workloads.gpt import CONTEXT, GPT, LAYERS_HEADS_WIDTH
from test_order import words
from test_trainer import deviation

WORKLOADS = list(BUILT_IN)


def config(workload: str, flags: str = "") -> TrainConfig:
    return parse(["--workload", workload, *(["--model-size", "tiny"] if workload == "gpt" else []), *flags.split()], 1)


def built(workload: str, seed: int = 0) -> torch.nn.Module:
    return find(workload).model(config(workload, f"--seed {seed}"))


def batch(workload: str, digits, count: int = 8, dtype: torch.dtype = torch.float32) -> tuple | torch.Tensor:
    """Rows like the workload's, made from the digits if it has no data of its own."""
    pixels, labels = digits
    if workload == "mnist":
        images = F.pad(pixels.repeat_interleave(3, 1).repeat_interleave(3, 2) * 15, (2, 2, 2, 2))
        return images[:count], labels[:count]
    if workload == "gpt":
        return F.pad(pixels[:count].flatten(1), (1, 0))
    train, _ = data.of_workload(find(workload), config(workload))
    columns = train[torch.arange(count)]
    return tuple(column.to(dtype) if column.is_floating_point() else column for column in columns)


def part(rows: tuple | torch.Tensor, index: slice) -> tuple | torch.Tensor:
    return tuple(column[index] for column in rows) if isinstance(rows, tuple) else rows[index]


# ---- initial parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
def test_initial_parameters_do_not_depend_on_torch_s_generators(workload):
    torch.manual_seed(1)
    first = built(workload).state_dict()
    torch.manual_seed(2)
    for name, values in built(workload).state_dict().items():
        assert torch.equal(values, first[name]), name


@pytest.mark.parametrize("workload", WORKLOADS)
def test_initial_parameters_are_the_same_numbers_in_fp64(workload):
    single, double = built(workload), initial_parameters(built(workload, seed=1).double(), 0)
    for (name, one), two in zip(single.named_parameters(), double.parameters(), strict=True):
        assert two.dtype == torch.float64 and torch.equal(one.double(), two), name


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_matrix_has_numbers_of_its_own_and_another_seed_others(workload):
    matrices = [p.flatten()[:50] for seed in (0, 1) for p in built(workload, seed).parameters() if p.ndim > 1]
    assert len({tuple(values.tolist()) for values in matrices}) == len(matrices)


def test_initial_parameters_are_those_of_plain_python():
    """u in [0, 1) from 24 bits; (2 u - 1) / sqrt(fan_in), rounded to fp32."""
    drawn = words(20, 3, 4, zlib.crc32(b"weight"))
    expected = torch.tensor([(2 * (word >> 40) / 2**24 - 1) / 20**0.5 for word in drawn], dtype=torch.float64)
    module = built("regression", seed=4)
    assert torch.equal(module.weight.flatten(), expected.float())
    assert module.bias.tolist() == [0.0]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_biases_are_0_gains_1_and_matrices_within_their_bound(workload):
    for name, values in built(workload).named_parameters():
        if values.ndim == 1:
            assert (values == (0 if name.endswith("bias") else 1)).all(), name
        else:
            bound = values[0].numel() ** -0.5
            assert 0.8 * bound < values.abs().max() <= bound, name
            assert abs(values.mean()) < 0.3 * bound, name


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_model_keeps_batch_statistics_or_draws_random_numbers(workload, digits):
    """Either would make the losses depend on the world size."""
    module, rows, forward = built(workload), batch(workload, digits), find(workload).forward
    assert not list(module.buffers())
    assert torch.equal(forward(module.train(), rows), forward(module.eval(), rows))


# ---- losses -------------------------------------------------------------------------------------------------------


def summed(workload: Workload, kind: str, outputs: torch.Tensor, rows: tuple | torch.Tensor) -> float:
    """The value of the loss, or of the only metric."""
    if kind == "loss":
        return workload.loss(outputs, rows).item()
    (value,) = workload.metrics(outputs, rows).values()
    return float(value)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_losses_and_metrics_are_sums_over_the_rows(workload, kind, digits):
    mine, module = find(workload), built(workload).double()
    rows = batch(workload, digits, dtype=torch.float64)
    outputs = mine.forward(module, rows).detach()
    alone = [part(rows, slice(i, i + 1)) for i in range(8)]
    apart = sum(summed(mine, kind, outputs[i : i + 1], row) for i, row in enumerate(alone))
    assert summed(mine, kind, outputs, rows) == pytest.approx(apart, rel=1e-12)


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_their_number():
    loss = find("digits").loss(torch.zeros(3, 10), (None, torch.tensor([1, 2, 3])))
    assert loss.item() == pytest.approx(3 * torch.tensor(10.0).log().item())
    per_row = find("gpt").loss(torch.zeros(2, 5, 256), torch.zeros(2, 6, dtype=torch.uint8))
    assert per_row.item() == pytest.approx(2 * torch.tensor(256.0).log().item())


def test_files_of_text_come_in_the_order_of_their_names(tmp_path, monkeypatch):
    """The listing order depends on the file system and may differ between nodes."""
    for name in ("b/text.txt", "c/text.txt", "a/text.txt", "d/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name[0] * 400)
    listed = Path.rglob
    for reverse in (False, True):
        monkeypatch.setattr(Path, "rglob", lambda *words, last=reverse: iter(sorted(listed(*words), reverse=last)))
        rows, _ = find("gpt").data(config("gpt", f"--data-dir {tmp_path}"))
        assert bytes(rows[torch.tensor([0])][0].tolist()).startswith(b"aaa")


def test_text_in_folders_below_is_read_too(tmp_path):
    for name in ("a.txt", "below/b.txt", "below/deeper/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name[-5] * 4000)
    parts = find("gpt").data(config("gpt", f"--data-dir {tmp_path}"))
    assert {value for rows in parts for value in rows[torch.arange(len(rows))].flatten().tolist()} == {*b"abc\n"}


def test_gpt_has_the_sizes_of_the_published_models():
    """Layers, heads, width and positions of GPT-2's three larger sizes. Tests of shapes would miss a wrong number of heads."""
    sizes = {"tiny": (2, 2, 64, 64), "small": (6, 6, 384, 256), "medium": (12, 12, 768, 512)}
    sizes |= {"large": (24, 16, 1024, 1024), "xl": (48, 25, 1600, 1024)}
    with torch.device("meta"):
        for size, (layers, heads, width, positions) in sizes.items():
            model = GPT(*LAYERS_HEADS_WIDTH[size], CONTEXT[size])
            found = len(model.blocks), {block.heads for block in model.blocks}, *reversed(model.positions.weight.shape)
            assert found == (layers, {heads}, width, positions), size


def test_accuracy_counts_rows_and_for_gpt_the_mean_over_positions():
    outputs = F.one_hot(torch.tensor([[1, 2], [3, 4]]), 256).float()
    rows = torch.tensor([[9, 1, 2], [9, 3, 0]], dtype=torch.uint8)
    assert find("gpt").metrics(outputs, rows)["accuracy"] == 1.5
    assert find("mnist").metrics(outputs[:, 0], (None, torch.tensor([1, 0])))["accuracy"] == 1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_gradient_is_alive_and_the_loss_falls(workload, digits):
    mine, module, rows = find(workload), built(workload), batch(workload, digits, 32)
    losses, velocity = [], [torch.zeros_like(parameter) for parameter in module.parameters()]
    for _ in range(25):
        module.zero_grad()
        total = mine.loss(mine.forward(module, rows), rows) / 32
        total.backward()
        if not losses:
            dead = [name for name, p in module.named_parameters() if not p.grad.abs().max() > 0]
            assert not dead, f"no gradient reaches {dead}"
        with torch.no_grad():
            for parameter, moving in zip(module.parameters(), velocity, strict=True):
                parameter.sub_(0.05 * moving.mul_(0.9).add_(parameter.grad))
        losses.append(total.item())
    assert losses[-1] < 0.9 * losses[0], losses


def test_the_published_loss_teaches_nothing(digits):
    """Cross-entropy over one column, as in the original example of `regression`: always 0, like its gradients."""
    (inputs, targets), module = batch("regression", digits), built("regression")
    loss = F.cross_entropy(module(inputs), targets)
    loss.backward()
    assert loss.item() == 0 and module.weight.grad.abs().max() == 0


# ---- trained ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
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
    """In snapshots too, numbers are ordered by shape, whatever their order in memory."""
    flags = f"{flags_of['mnist']} --precision fp64"
    assert deviation(finished(f"{flags} --channels-last", 2).losses, finished(flags, 2).losses) < 1e-10


def test_a_batch_per_rank_makes_the_steps_fewer(flags_of, finished):
    flags = "--workload regression --epochs 1 --per-rank-batch-size 256"
    assert len(finished(flags, 1).losses) == 8
    assert len(finished(flags, 2).losses) == 4


def test_channels_last_is_how_the_numbers_lie_in_memory():
    config = parse(["--workload", "mnist", "--channels-last"], 1)
    weights = [p for p in find("mnist").model(config).parameters() if p.dim() == 4 and p.shape[1] > 1]
    assert weights and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)

"""Initial parameters, losses that are sums over rows, and that every workload has something to learn.

python -m pytest core/tests/test_model.py
"""

import zlib

import pytest
import torch
import torch.nn.functional as F
from ddp_core import data, model
from ddp_core.config import TrainConfig, parse
from test_data import words

WORKLOADS = ["digits", "regression", "mnist", "gpt"]


def config(workload: str, flags: str = "") -> TrainConfig:
    return parse(["--workload", workload, *(["--model-size", "tiny"] if workload == "gpt" else []), *flags.split()], 1)


def built(workload: str, seed: int = 0) -> torch.nn.Module:
    module = model.build(config(workload))
    model.initial_parameters(module, seed)
    return module


def batch(workload: str, digits, count: int = 8) -> data.Rows:
    """Rows like the workload's, made from the digits where it brings none of its own."""
    pixels, labels = digits
    if workload == "mnist":
        images = F.pad(pixels.float().repeat_interleave(3, 1).repeat_interleave(3, 2), (2, 2, 2, 2)) / 5 - 0.7
        return data.Rows(images[:count].unsqueeze(1), labels[:count].long())
    if workload == "gpt":
        rows = pixels[:count].flatten(1)
        return data.Rows(rows[:, :-1], rows[:, 1:])
    rows = data.load(config(workload)).train.to(torch.device("cpu"), torch.float32)
    return data.Rows(rows.inputs[:count], rows.targets[:count])


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
    single, double = built(workload), model.build(config(workload)).double()
    model.initial_parameters(double, 0)
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
    module, rows = built(workload), batch(workload, digits)
    assert not list(module.buffers())
    assert torch.equal(module.train()(rows.inputs), module.eval()(rows.inputs))


# ---- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_losses_and_metrics_are_sums_over_the_rows(workload, kind, digits):
    rows, module = batch(workload, digits), built(workload).double()
    inputs = rows.inputs if workload == "gpt" else rows.inputs.double()
    targets = rows.targets.double() if workload == "regression" else rows.targets
    summed = getattr(model.objective(workload), kind)
    outputs = module(inputs).detach()
    apart = sum(summed(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(rows)))
    assert summed(outputs, targets).item() == pytest.approx(apart.item(), rel=1e-12)


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_their_number():
    loss = model.objective("digits").loss(torch.zeros(3, 10), torch.tensor([1, 2, 3]))
    assert loss.item() == pytest.approx(3 * torch.tensor(10.0).log().item())
    per_row = model.objective("gpt").loss(torch.zeros(2, 5, 256), torch.zeros(2, 5, dtype=torch.uint8))
    assert per_row.item() == pytest.approx(2 * torch.tensor(256.0).log().item())


def test_accuracy_counts_rows_and_for_gpt_the_mean_over_positions():
    outputs = F.one_hot(torch.tensor([[1, 2], [3, 4]]), 256).float()
    assert model.objective("gpt").metric(outputs, torch.tensor([[1, 2], [3, 0]], dtype=torch.uint8)) == 1.5
    assert model.objective("mnist").metric(outputs[:, 0], torch.tensor([1, 0])) == 1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_gradient_is_alive_and_the_loss_falls(workload, digits):
    module, rows, loss = built(workload), batch(workload, digits, 32), model.objective(workload).loss
    losses, velocity = [], [torch.zeros_like(parameter) for parameter in module.parameters()]
    for _ in range(25):
        module.zero_grad()
        total = loss(module(rows.inputs), rows.targets) / len(rows)
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
    """Cross-entropy over one column, as in the example that `regression` is after: always 0, like its gradients."""
    rows, module = batch("regression", digits), built("regression")
    loss = F.cross_entropy(module(rows.inputs), rows.targets)
    loss.backward()
    assert loss.item() == 0 and module.weight.grad.abs().max() == 0

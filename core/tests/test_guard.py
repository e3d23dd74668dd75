"""A gradient that is not finite stops the optimizer for good. Also clipping, and the learning rate's schedule.

python -m pytest core/tests/test_guard.py
"""

import math

import pytest
import torch
from ddp_core.config import parse
from ddp_core.guard import Guard
from ddp_core.order import uniform
from ddp_core.workload import find
from torch.optim import SGD, AdamW, NAdam, Optimizer, RMSprop

CPU = torch.device("cpu")
OPTIMIZERS = {
    "sgd, fused": lambda p: SGD([p], lr=0.1, momentum=0.9, fused=True),
    "adamw, fused": lambda p: AdamW([p], lr=0.1, fused=True),
    "nadam": lambda p: NAdam([p], lr=0.1),
    "rmsprop, foreach": lambda p: RMSprop([p], lr=0.1, foreach=True),
    "two groups, one fused": lambda p: SGD([{"params": [p], "fused": True}, {"params": [other()]}], lr=0.1, momentum=0.9),
}


def other() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def guarded(optimizer: Optimizer, precision: str = "fp64", clip_norm: float = 0.0, weight: float = 1.0) -> Guard:
    return Guard(optimizer, precision, clip_norm, weight, CPU)


def step(guard: Guard, parameter: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """One step of the optimizer with this gradient. Returns the norm that the guard saw."""
    parameter.grad = grad.clone()
    norm = guard.norm([p.grad for group in guard.optimizer.param_groups for p in group["params"]])
    guard.step()
    return norm


def everything(optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of all parameters and all states."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*parameters, *states)]


# ---- numbers that are not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.fault(19)
def test_after_a_gradient_that_is_not_finite_no_number_changes_any_more(made, bad):
    parameter, grad = torch.nn.Parameter(uniform(50, 1)), uniform(50, 2)
    optimizer = made(parameter)
    guard = guarded(optimizer)
    untouched = everything(optimizer)
    assert step(guard, parameter, grad).isfinite()
    before = everything(optimizer)
    assert not torch.equal(before[0], untouched[0]), "a good gradient changes nothing"
    spoilt = grad.clone()
    spoilt[7] = bad
    assert not step(guard, parameter, spoilt).isfinite()
    for _ in range(3):  # finite gradients afterwards change nothing
        step(guard, parameter, grad)
    for now, then in zip(everything(optimizer), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_makes_every_gradient_nan(bad):
    """Even unrelated parameters get NaN, so that a sum over ranks carries it to all."""
    one, two = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    guard = guarded(SGD([one, two], lr=0.1, fused=True), weight=0.25)
    guard.weighted(one.sum() + 2 * two.sum() + bad).backward()
    assert one.grad.isnan().all() and two.grad.isnan().all()


def test_a_finite_loss_has_its_gradients_times_the_weight():
    parameter = torch.nn.Parameter(uniform(5, 3))
    guard = guarded(SGD([parameter], lr=0.1, fused=True), weight=1 / 96)
    loss = (parameter * parameter).sum()
    assert guard.weighted(loss).item() == loss.item() / 96
    guard.weighted(loss).backward()
    torch.testing.assert_close(parameter.grad, 2 * parameter.detach() / 96, rtol=1e-15, atol=0)


# ---- the norm, and clipping ---------------------------------------------------------------------------------------


def gradients(scale: float) -> list[torch.Tensor]:
    return [(uniform(30, 4).view(5, 6) - 0.5) * scale, (uniform(7, 5) - 0.5) * scale]


@pytest.mark.parametrize("count", [1, 2])
def test_the_norm_is_that_of_all_gradients_together(count):
    grads = gradients(1.0)[:count]
    expected = torch.cat([grad.flatten() for grad in grads]).norm().item()
    guard = guarded(SGD([other()], lr=0.1, fused=True))
    assert guard.norm(grads).item() == pytest.approx(expected, rel=1e-14)


def test_without_clipping_gradients_stay_as_they_are():
    grads = gradients(1e6)
    guarded(SGD([other()], lr=0.1, fused=True)).norm(grads)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(grads, gradients(1e6), strict=True))


@pytest.mark.parametrize("scale", [0.01, 1.0, 1e6])
def test_gradients_are_clipped_as_torch_does_and_the_norm_before_is_told(scale):
    grads, theirs = gradients(scale), [torch.nn.Parameter(grad) for grad in gradients(scale)]
    for parameter in theirs:
        parameter.grad = parameter.detach().clone()
    norm = guarded(SGD([other()], lr=0.1, fused=True), clip_norm=0.7).norm(grads)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-14)
    for ours, parameter in zip(grads, theirs, strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-14, atol=0)
    clipped = torch.cat([grad.flatten() for grad in grads]).norm()
    assert clipped <= 0.7 and (scale < 0.1 or clipped > 0.699)


def test_a_step_without_any_gradient_has_norm_0():
    assert guarded(SGD([other()], lr=0.1, fused=True), clip_norm=1.0).norm([]).item() == 0


# ---- fp16 ---------------------------------------------------------------------------------------------------------


def test_under_fp16_a_step_that_overflows_is_skipped_and_the_scale_is_halved():
    parameter = torch.nn.Parameter(torch.ones(4))
    guard = Guard(SGD([parameter], lr=0.5), "fp16", 0.0, 1.0, CPU)
    before = float.fromhex(guard.scale[0])
    guard.weighted((parameter * torch.inf).sum() * 0 + parameter.sum() * torch.inf).backward()
    guard.norm([parameter.grad])
    guard.step()
    assert torch.equal(parameter.detach(), torch.ones(4)) and guard.tolerates()
    assert float.fromhex(guard.scale[0]) == before / 2
    parameter.grad = None
    guard.weighted(parameter.sum()).backward()
    assert guard.norm([parameter.grad]).item() == 2.0  # four ones: the scale is removed first
    guard.step()
    assert torch.equal(parameter.detach(), torch.full((4,), 0.5))


def test_under_fp16_overflows_are_not_tolerated_for_ever():
    parameter = torch.nn.Parameter(torch.ones(1))
    guard = Guard(SGD([parameter], lr=0.5), "fp16", 0.0, 1.0, CPU)
    tolerated = 0
    while guard.tolerates():
        tolerated += 1
        parameter.grad = torch.full((1,), torch.inf)
        guard.weighted(parameter.sum())  # the scaler starts with its first loss
        guard.norm([parameter.grad])
        guard.step()
        assert tolerated < 40
    assert tolerated == 17  # the scale falls from 2**16 to below 1


def test_the_scaler_goes_on_where_it_was():
    def made() -> Guard:
        return Guard(SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5), "fp16", 0.0, 1.0, CPU)

    first, second = made(), made()
    first.scale = [(512.0).hex(), 7]
    second.scale = first.scale
    assert second.scale == [(512.0).hex(), 7]
    (parameter,) = second.optimizer.param_groups[0]["params"]
    assert second.weighted(parameter.sum()).item() == 512.0
    assert guarded(SGD([other()], lr=0.1)).scale is None, "no scale without fp16"


# ---- the learning rate --------------------------------------------------------------------------------------------


def rates(flags: str, total: int) -> list[float]:
    config = parse(["--lr", "0.8", *flags.split()], 1)
    return [config.lr * find("digits").schedule(step, total, config) for step in range(total)]


def test_without_a_schedule_the_learning_rate_is_constant():
    assert rates("", 5) == [0.8] * 5


def test_warm_up_rises_linearly_and_ends_at_the_learning_rate():
    assert rates("--warmup-steps 3", 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rel=1e-15)


def test_a_cosine_falls_from_the_learning_rate_towards_0_after_the_last_step():
    expected = [0.4 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert rates("--lr-schedule cosine", 4) == pytest.approx(expected, rel=1e-15)


def test_a_cosine_begins_after_the_warm_up():
    course = rates("--lr-schedule cosine --warmup-steps 2", 6)
    assert course[:2] == pytest.approx([0.8 / 3, 1.6 / 3], rel=1e-15)
    assert course[2:] == pytest.approx(rates("--lr-schedule cosine", 4), rel=1e-15)


def test_a_warm_up_longer_than_the_run_only_rises():
    course = rates("--lr-schedule cosine --warmup-steps 9", 5)
    assert course == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4], rel=1e-15)

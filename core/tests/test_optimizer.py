"""The optimizer equals torch's own, a gradient that is not finite stops it for good, and the learning rate's course.

python -m pytest core/tests/test_optimizer.py
"""

import math

import pytest
import torch
from ddp_core.config import parse
from ddp_core.data import uniform
from ddp_core.optimizer import Optimizer, learning_rate

SGD = "--optimizer sgd --momentum 0.9"
ADAMW = "--optimizer adamw --momentum 0.8"


def optimizer_of(flags: str, values: torch.Tensor, grads: torch.Tensor) -> Optimizer:
    return Optimizer(parse(flags.split(), 1), values, grads)


def torch_s_own(flags: str, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    decay = 0.05 if "decay" in flags else 0.0
    if "sgd" in flags:
        return torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=decay)
    return torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.95), eps=1e-8, weight_decay=decay)


@pytest.mark.parametrize("flags", [SGD, ADAMW, f"{SGD} --weight-decay 0.05", f"{ADAMW} --weight-decay 0.05"])
def test_twenty_steps_equal_those_of_torch_optim(flags):
    values, grads = uniform(300, 9) - 0.5, torch.zeros(300, dtype=torch.float64)
    theirs = torch.nn.Parameter(values.clone())
    mine, reference = optimizer_of(flags, values, grads), torch_s_own(flags, theirs)
    for step in range(20):
        lr = 0.1 / (1 + step)  # another learning rate each step, as schedules have
        reference.param_groups[0]["lr"] = lr
        grads.copy_(torch.sin(3 * values) + 0.1 * uniform(300, 9, step))
        theirs.grad = grads.clone()
        norm = mine.step(lr)
        reference.step()
        assert norm.item() == pytest.approx(theirs.grad.norm().item(), rel=1e-14)
        torch.testing.assert_close(values, theirs.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("flags", [SGD, ADAMW])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_after_a_gradient_that_is_not_finite_no_number_changes_any_more(flags, bad):
    values, grads = uniform(50, 1), uniform(50, 2)
    optimizer = optimizer_of(flags, values, grads)
    optimizer.step(0.1)
    before = [flat.clone() for flat in (values, *optimizer.state.values(), optimizer.steps)]
    good = grads.clone()
    grads[7] = bad
    assert not optimizer.step(0.1).isfinite()
    grads.copy_(good)  # the gradients that follow are fine, and come too late
    for _ in range(3):
        optimizer.step(0.1)
    for flat, then in zip((values, *optimizer.state.values(), optimizer.steps), before, strict=True):
        assert torch.equal(flat, then)


@pytest.mark.parametrize("flags", [SGD, ADAMW])
def test_state_and_step_count_are_all_that_a_second_optimizer_needs_to_go_on(flags):
    values, grads = uniform(50, 1), uniform(50, 2)
    first = optimizer_of(flags, values, grads)
    for _ in range(3):
        first.step(0.1)
    copy = values.clone()
    second = optimizer_of(flags, copy, grads)
    for name, flat in first.state.items():
        second.state[name].copy_(flat)
    second.steps.fill_(3)
    first.step(0.1)
    second.step(0.1)
    assert torch.equal(copy, values)


# ---- the learning rate --------------------------------------------------------------------------------------------


def rates(flags: str, total: int) -> list[float]:
    config = parse(["--lr", "0.8", *flags.split()], 1)
    return [learning_rate(config, step, total) for step in range(total)]


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

"""Compares what loss() and metrics() give for rows together with the sum of what they give for each row alone.

The core sums over micro-batches and ranks, so a mean, or a loss in which rows depend on each other, is another one there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real

import torch
from torch import nn

from ddp_core.errors import Failure
from ddp_core.process_group import Peers
from ddp_core.workload import Workload, note_on, out_of_memory

ROUNDED_BY = dict(bf16=0.1, fp16=0.1, tf32=0.01)  # relative: ten times the rounding of a number, and more


def compare_losses(workload: Workload, losses: torch.Tensor) -> list[str]:
    """Raises WorkloadError for a mean; notes what is no sum. losses: [draws, 1 + rows], of the rows together, then of each;
    several draws if the loss is random.
    """
    together, *alone = losses.mean(0).tolist()
    apart, size = sum(alone), sum(map(abs, alone))
    rows = "two" if len(alone) == 2 else f"{len(alone)}"
    noise = losses.std(0).sum().item() / len(losses) ** 0.5 if len(losses) > 1 else 1e-3 * abs(apart)
    if abs(together - apart / len(alone)) <= 2 * noise and abs(together - apart) > 5 * noise:
        raise workload.unusable(
            f"loss() returns a mean over rows ({together:.6g} for {rows} rows, {apart:.6g} is the sum of each), and should "
            "return their sum: reduction='sum', or times the rows"
        )
    near = ROUNDED_BY.get(workload.config.precision, 1e-3)
    drawn = 10 * noise if len(losses) > 1 else 0.0
    close = abs(together - apart) <= max(drawn, near * size)
    if close or not math.isfinite(together):  # of one row it may be NaN: over a batch's deviation, say
        return []
    return [
        f"the loss of {rows} rows together is not the sum of theirs alone: a mean (over pairs, in contrastive losses) is to be "
        "multiplied with the rows, or its gradients are too small by that factor; [n, 1] and [n] numbers are compared in all "
        "pairs (broadcast); rows that depend on each other make losses depend on the world size"
    ]


def compare_gradients(model: nn.Module, together: Callable, *alone: Callable) -> list[str]:
    """Note parameters whose gradient is no sum over rows. Each function returns a loss: of the rows together, then of each.

    The model is in eval mode, in which rows are apart. What remains is added up in place, for no second copy of the gradients.
    """
    parameters, parts = trained_parameters(model), []
    if hooked(model):  # their sum is not the hook's of the sum
        return []
    try:
        with torch.enable_grad():
            (whole := together()).backward()
            sizes = _norms(parameters)
            for loss in alone:
                (part := loss()).neg().backward()
                parts.append(part.item())
            left = _norms(parameters)
    except Exception as error:  # training has no gradients in eval mode, and neither have cuDNN's recurrent layers
        if isinstance(error, Failure) or out_of_memory(error) or (isinstance(error, RuntimeError) and Peers.is_lost(error)):
            raise
        return []
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    # Of each, and of all: a bias in attention has no gradient but what rounding leaves. 10 %: a model may autocast itself.
    near = 0.1
    if abs(whole.item() - sum(parts)) > near * sum(map(abs, parts)):  # the loss counts or draws where there are gradients
        return []
    least = near / 10 * math.hypot(*sizes.values())
    names = [name for name, size in left.items() if size > near * sizes.get(name, 0.0) + least]
    return note_on(
        names,
        "the gradient of {names} for two rows together is not the sum of theirs alone, although the loss is: a penalty that is "
        "0 at first, say, is to be multiplied with the rows, or it is counted once for each part of a batch",
    )


def _norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    return {name: p.grad.norm().item() for name, p in parameters.items() if p.grad is not None}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def hooked(model: nn.Module) -> list[str]:
    """Names of trained parameters with hooks of the user. DistributedDataParallel adds its hooks later, and elsewhere."""
    return [name for name, p in trained_parameters(model).items() if p._backward_hooks or p._post_accumulate_grad_hooks]


def compare_metrics(workload: Workload, results: Sequence[Mapping], rows_are_apart: bool) -> list[str]:
    """Refuse means; note values that are no sum. results: metrics() of the rows together, then of each row.

    rows_are_apart: whether the loss is a sum over rows. If not, a sum over the batch may look like a mean.
    """
    notes = []
    for name, value in results[0].items():
        if isinstance(value, tuple):
            sums, counts = ([float(result[name][part]) for result in results] for part in (0, 1))
            notes += _note_on_sum(workload, f"{name} (count)", counts) or _note_on_sum(workload, f"{name} (sum)", sums)
            continue
        together, *alone = values = [float(result[name]) for result in results]
        apart = sum(alone)
        near = 1e-3 * abs(apart)
        if rows_are_apart and abs(together - apart / len(alone)) <= near < abs(together - apart):
            raise workload.unusable(
                f"metrics() has a mean over rows as {name!r} ({together:.6g} for {len(alone)} rows, {apart:.6g} is the sum "
                "of each), and should have their sum: .sum(), or times the rows"
            )
        notes += _note_on_sum(workload, name, values)
    return notes


def _note_on_sum(workload: Workload, name: str, values: Sequence[float]) -> list[str]:
    """A note on a metric that is no sum over rows. values: of the rows together, then of each row."""
    together, *alone = values
    apart = sum(alone)  # NaN if one is: a correlation of one row, say
    # 1 %, because sums of many rows round.
    near = max(0.01, ROUNDED_BY.get(workload.config.precision, 0.0)) * sum(map(abs, alone))
    close = together == apart or abs(together - apart) <= near < math.inf  # of one row it may be infinite: R2, say
    if close or math.isnan(together):
        return []
    return [
        f"metric {name!r} of {len(alone)} rows together is {together:.6g}, and {apart:.6g} is the sum of theirs: its record, "
        "the sum over all batches divided by the rows, depends on the batches; return what adds up, as a number or as (sum, "
        "count): squared errors and not their root, hits and not F1"
    ]


def refuse_unlike_sums(workload: Workload, metrics: Mapping) -> None:
    for name, value in metrics.items():
        for part in value if isinstance(value, tuple) and len(value) == 2 else (value,):
            if not (isinstance(part, Real) or (isinstance(part, torch.Tensor) and part.numel() == 1)):
                what = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else repr(part)[:60]
                raise workload.unusable(
                    f"metrics() has {what} as {name!r}, and should have a number, the sum over the rows of the batch, or a "
                    "pair of numbers: (sum, count)"
                )

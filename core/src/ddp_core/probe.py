"""Two rows through a workload before it trains: mistakes that would train on in silence, and promises it does not allow.

Nothing of this changes what is trained: buffers, gradients and random numbers are as before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_core.batches import Batches
from ddp_core.errors import WorkloadError
from ddp_core.order import DROPOUT, seed_generators
from ddp_core.workload import Workload, blame

DRAWS = 32  # of a loss in which noise is drawn, to tell a mean from a sum
BATCH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Seen:
    """losses: the names of several losses, () of one. metrics: name to whether it brings a count of its own."""

    losses: tuple[str, ...]
    metrics: dict[str, bool]
    buffers: list[str]  # those that a forward in training changes: BatchNorm's statistics
    notes: list[str]  # what of the usual promises this workload does not allow


def probe(workload: Workload, model: nn.Module, batches: Batches, config, autocast) -> Seen:
    """Raises WorkloadError: a loss that is no scalar or a mean, a parameter without a gradient, rows that do not collate."""
    count = min(2, len(batches))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        losses, metrics, notes = _look(workload, model, batches, config, autocast, count)
        changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
    except Exception as error:
        raise blame(error, workload.file, f"--workload {workload.name}, tried on {count} of its rows") from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    return Seen(losses, metrics, changed, notes)


def _look(workload: Workload, model: nn.Module, batches: Batches, config, autocast, count: int) -> tuple:
    def outcome(of: Any, seed: int) -> tuple[Any, Any]:
        seed_generators(batches.device, DROPOUT, config.seed, seed)
        with autocast():
            outputs = workload.forward(model, of)
            return outputs, workload.loss(outputs, of)

    rows, *alone = batches.few([*range(count)], [[*range(count)], *([place] for place in range(count))])
    model.eval()
    with torch.no_grad():
        outputs, loss = outcome(rows, 0)
        names, whole = _total(workload, loss)
        metrics = workload.metrics(outputs, rows)
        if not isinstance(metrics, Mapping):
            raise WorkloadError(
                f"--workload {workload.name}: metrics() should return a dictionary, and returned {type(metrics).__name__}"
            )
        if count == 2:
            draws = 1 if whole == _total(workload, outcome(rows, 1)[1])[1] else DRAWS
            losses = [[_total(workload, outcome(of, draw)[1])[1].double() for of in (rows, *alone)] for draw in range(draws)]
            _refuse_mean(workload, torch.tensor(losses))
    model.train()
    with torch.no_grad():
        random = _total(workload, outcome(rows, 0)[1])[1] != _total(workload, outcome(rows, 1)[1])[1]
    _, total = _total(workload, outcome(rows, 0)[1])
    if total.requires_grad:
        total.backward()
    _refuse_unused(workload, model)
    return (
        names,
        {name: isinstance(value, tuple) for name, value in metrics.items()},
        _notes(model, bool(random) and not config.shards),
    )


def _total(workload: Workload, loss: Any) -> tuple[tuple[str, ...], torch.Tensor]:
    named = loss if isinstance(loss, Mapping) else {"": loss}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise WorkloadError(
                f"--workload {workload.name}: loss(){f' {name!r}' if name else ''} returned {what}, and should return a "
                f"scalar: the sum over the rows of the batch"
            )
    return (tuple(named) if named is loss else ()), sum(value.reshape(()) for value in named.values())


def _refuse_mean(workload: Workload, losses: torch.Tensor) -> None:
    """losses: [draws, 3] of two rows together, of the first, of the second; several draws where noise is drawn in them."""
    together, first, second = losses.mean(0).tolist()
    both = first + second
    noise = losses.std(0).sum().item() / len(losses) ** 0.5 if len(losses) > 1 else 1e-3 * abs(both)
    if abs(together - both / 2) <= 2 * noise and abs(together - both) > 5 * noise:
        raise WorkloadError(
            f"--workload {workload.name}: loss() returns a mean over rows ({together:.6g} for two rows, {first:.6g} and "
            f"{second:.6g} for each), and should return their sum: reduction='sum', or times the rows"
        )


def _refuse_unused(workload: Workload, model: nn.Module) -> None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    if not trained or len(unused) == len(trained):
        raise WorkloadError(f"--workload {workload.name}: the loss has no gradient for any parameter: is it cut off (detach)?")
    if unused and not workload.unused_parameters:
        raise WorkloadError(
            f"--workload {workload.name}: no gradient for {', '.join(unused[:6])}{' and on' if len(unused) > 6 else ''}: use "
            f"them in the loss, freeze them (requires_grad_(False)), or set unused_parameters = True in the class"
        )


def _notes(model: nn.Module, random: bool) -> list[str]:
    kinds = sorted({type(module).__name__ for module in model.modules() if type(module) in BATCH_STATISTICS})
    notes = []
    if kinds:
        notes.append(
            f"{', '.join(kinds)} uses statistics of a rank's own rows: losses depend on the world size; GroupNorm does not, "
            f"nor SyncBatchNorm on accelerators"
        )
    if random:
        notes.append(
            "random numbers are drawn in the model or loss (dropout, noise): a run repeats and resumes bit for bit, but losses "
            "depend on the world size; not so with --reduction canonical"
        )
    return notes

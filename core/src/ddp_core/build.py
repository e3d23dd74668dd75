"""Model and optimizer, as the workload makes them: refused, or noted, before anything is trained."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_core.batches import Batches
from ddp_core.order import seed_everything
from ddp_core.probe import Seen, probe
from ddp_core.process_group import Peers
from ddp_core.snapshot import refuse_unknown_dtypes
from ddp_core.state import of_model
from ddp_core.workload import Workload, blaming


def build_model_and_optimizer(
    rows: Batches, peers: Peers, autocast: Callable, sharding: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Seen]:
    """Collective under --sharding. rows: of the training, two of which are tried (probe.py). sharding: the module, where it is
    needed. Raises WorkloadError.
    """
    workload, config, device, dtype = rows.workload, rows.config, rows.device, rows.dtype
    # The ranks may draw different numbers all the same (a set, the clock): rank 0's are sent to all in Trainer.restore().
    seed_everything(config.seed)
    agreed: Callable = bool
    with blaming(workload, "the model"):
        if config.sharding != "none":
            model, notes = sharding.build(workload, config, peers, device, dtype)
            agreed = peers.broadcast
        else:
            model = workload.model(config)
            refuse_other_modules(model, workload)
            refuse_unknown_dtypes(of_model(model), workload.name)
            notes = notes_on_precision(model, config.precision)
            model = in_precision(model, dtype, device)
            if config.checkpoint_activations:
                sharding.checkpoint(sharding.chosen(workload, model))
        seen = probe(model, rows, autocast, agreed)
        if config.checkpoint_activations:
            sharding.refuse_to_compute_again(workload, model, seen)
        optimizer = workload.optimizer(model, config)
        seen.notes.extend([*notes, *check_optimizer(optimizer, model, workload, config)])
    # What the schedule multiplies; torch.optim's own schedulers use the same name.
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return model, optimizer, seen


def in_precision(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> nn.Module:
    """In place. Module.to() would take the imaginary parts of complex numbers away."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else dtype.to_complex() if tensor.is_complex() else None
        return tensor.to(device, kind)

    return model._apply(convert)


def check_optimizer(optimizer: object, model: nn.Module, workload: Workload, config) -> list[str]:
    """Notes on what it leaves alone. Raises WorkloadError where it is none that a loop can step."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise workload.unusable(
            f"optimizer() returned {type(optimizer).__name__}, and should return an optimizer of torch.optim that needs no "
            "closure"
        )
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise workload.unusable(
            "optimizer() made one of torch's lr_scheduler, which nobody steps and no snapshot holds: return its factor at a "
            "step from schedule()"
        )
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if strangers := len(stepped - {*model.parameters()}):
        raise workload.unusable(
            f"optimizer() has {strangers} parameters that are not the model's, and no gradient of theirs is summed over ranks: "
            "make them the model's (a module or nn.Parameter of it)"
        )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    left = [name for name, parameter in trained.items() if parameter not in stepped]
    if len(left) == len(trained):
        raise workload.unusable("optimizer() has no parameter that is trained: give it those with requires_grad")
    for name in left:  # else their gradients would be summed, and the others clipped by the norm of all
        trained[name].requires_grad_(False)
    notes = [f"the optimizer has no group with {', '.join(left[:6])}: not trained"] if left else []
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if config.lr not in rates:
        theirs = ", ".join(f"{rate:g}" for rate in sorted(rates)[:6])
        notes.append(
            f"--lr {config.lr:g} is the rate of no group of optimizer() ({theirs}): it has no effect, unless optimizer() reads "
            f"config.lr"
        )
    return notes


def refuse_other_modules(model: object, workload: Workload) -> None:
    """Raises WorkloadError where it is none, where it divides its rows itself, or has what no snapshot holds or gives back."""
    if not isinstance(model, nn.Module):
        raise workload.unusable(f"model() returned {type(model).__name__}, and should return a torch.nn.Module")
    kinds = {type(module).__name__ for module in model.modules()}
    if around := sorted(kind for kind in kinds if kind.endswith("DataParallel") or kind.startswith("FSDP")):
        raise workload.unusable(
            f"model() returned a {', '.join(around)}, and should return the module without it: --reduction and --sharding put "
            "it there"
        )
    if lazy := [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]:
        raise workload.unusable(
            f"{', '.join(lazy[:4])} has no shape yet (a lazy module): call the model on a row in model(), before you return it"
        )
    asked = nn.Module.get_extra_state
    if extra := sorted({type(module).__name__ for module in model.modules() if type(module).get_extra_state is not asked}):
        raise workload.unusable(
            f"{', '.join(extra)} has get_extra_state(), and a snapshot holds parameters and buffers: keep it in one "
            "(register_buffer)"
        )
    tensors = of_model(model).items()
    if views := [name for name, t in tensors if any(n > 1 and not s for n, s in zip(t.shape, t.stride(), strict=True))]:
        raise workload.unusable(
            f"{views[0]} is an expanded view, whose rows are one: a snapshot cannot be read back into it, so .clone() it"
        )


def notes_on_precision(model: nn.Module, precision: str) -> list[str]:
    """Numbers that the model has made in another precision than the run's, into which they are converted."""
    kinds = {str(t.dtype).removeprefix("torch.") for t in of_model(model).values() if t.is_floating_point()}
    kinds -= {"float32", "float64" if precision == "fp64" else "float32"}
    fix = ": pass --precision fp64" if "float64" in kinds else ""
    return [f"the model has numbers in {kind}, which --precision {precision} converts{fix}" for kind in sorted(kinds)]

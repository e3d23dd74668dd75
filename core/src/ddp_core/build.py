"""Builds the workload's model and optimizer, and refuses or notes mistakes in them before training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_core.batches import Batches
from ddp_core.comparison import hooked, trained_parameters
from ddp_core.order import seed_everything
from ddp_core.probe import Trial, probe
from ddp_core.process_group import Peers
from ddp_core.snapshot import refuse_unknown_dtypes
from ddp_core.state import dense, of_model
from ddp_core.workload import Workload, blaming, listed, note_on


def build_model_and_optimizer(
    rows: Batches, peers: Peers, autocast: Callable, sharding: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Trial]:
    """Collective under --sharding. rows: training rows, of which two are tried (probe.py). sharding: sharding.py, if it is
    needed. Raises WorkloadError.
    """
    workload, config, device, dtype = rows.workload, rows.config, rows.device, rows.dtype
    workload.core_sets(_steps_in_epoch=config.steps_of(len(rows)))
    # The ranks may still draw different numbers (a set's order, the clock): Trainer.restore() sends rank 0's to all.
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
        notes = notes + notes_on_modes(model)
        probed = probe(model, rows, autocast, agreed)
        if config.checkpoint_activations:
            sharding.refuse_to_compute_again(workload, model, probed)
        with blaming(workload, "optimizer()"):
            optimizer = workload.optimizer(model, config)
        probed.notes.extend([*notes, *check_optimizer(optimizer, model, workload, config)])
        probed.notes.extend(
            note_on(
                [] if config.shards else hooked(model),
                "hooks on {names} act on a rank's own gradient, before the sum over ranks: losses depend on the world size, "
                "unless they multiply it by a number; register_step_pre_hook of the optimizer comes after the sum",
            )
        )
    # The rate that the schedule multiplies; torch.optim's own schedulers use the same name.
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return model, optimizer, probed


def in_precision(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> nn.Module:
    """Convert real and complex numbers in place. Module.to() would drop the imaginary parts of complex numbers."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else dtype.to_complex() if tensor.is_complex() else None
        return tensor.to(device, kind)

    return model._apply(convert)


def check_optimizer(optimizer: object, model: nn.Module, workload: Workload, config) -> list[str]:
    """Notes on parameters and flags that the optimizer ignores. Raises WorkloadError if the training loop cannot step it."""
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
    trained = trained_parameters(model)
    left = [name for name, parameter in trained.items() if parameter not in stepped]
    if len(left) == len(trained):
        raise workload.unusable("optimizer() has no parameter that is trained: give it those with requires_grad")
    for name in left:  # else their gradients would be summed, and count in the norm that clips the others
        trained[name].requires_grad_(False)
    notes = note_on(left, "the optimizer has no group with {names}: not trained")
    groups, rule = optimizer.param_groups, torch.optim.SGD if config.optimizer == "sgd" else torch.optim.AdamW
    taken: dict[str, list] = dict(lr=[float(group["lr"]) for group in groups])
    taken["optimizer"] = [config.optimizer if isinstance(optimizer, rule) else type(optimizer).__name__]
    for name, other in (("momentum", "betas"), ("weight_decay", "")):  # AdamW's --momentum is its beta1
        taken[name] = [group.get(name, (group.get(other) or (0.0,))[0]) for group in groups]
    return notes + [
        f"--{name.replace('_', '-')} {getattr(config, name)} is not what optimizer() took ("
        f"{listed([*dict.fromkeys(map(str, values))])}): it has no effect, unless optimizer() reads config.{name}"
        for name, values in taken.items()
        if getattr(config, name) not in values and (name == "lr" or name in config.passed)
    ]


def refuse_other_modules(model: object, workload: Workload) -> None:
    """Raises WorkloadError for a model that is no module, is already wrapped (DDP, FSDP), or that no snapshot can restore."""
    if not isinstance(model, nn.Module):
        raise workload.unusable(f"model() returned {type(model).__name__}, and should return a torch.nn.Module")
    kinds = {type(module).__name__ for module in model.modules()}
    if around := sorted(kind for kind in kinds if kind.endswith("DataParallel") or kind.startswith("FSDP")):
        raise workload.unusable(
            f"model() returned a {', '.join(around)}, and should return the module without it: the core puts it there"
        )
    if "OptimizedModule" in kinds:
        raise workload.unusable(
            "model() returned what torch.compile() has wrapped, whose parameters have other names in a snapshot: pass "
            "--compile, or compile the part in place (part.compile())"
        )
    if lazy := [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]:
        raise workload.unusable(
            f"{', '.join(lazy[:4])} has no shape yet (a lazy module): call the model on a row in model(), before you return it"
        )
    asked = nn.Module.get_extra_state
    if extra := sorted({type(module).__name__ for module in model.modules() if type(module).get_extra_state is not asked}):
        raise workload.unusable(
            f"{', '.join(extra)} has get_extra_state(), and a snapshot holds parameters and buffers: keep it in a buffer"
        )
    tensors = of_model(model).items()
    if sparse := [name for name, tensor in tensors if not dense(tensor)]:
        raise workload.unusable(
            f"{sparse[0]} is sparse or ragged, and a snapshot holds dense tensors: register it with persistent=False"
        )
    if views := [name for name, t in tensors if any(n > 1 and not s for n, s in zip(t.shape, t.stride(), strict=True))]:
        raise workload.unusable(
            f"{views[0]} is an expanded view, whose rows are one: a snapshot cannot be read back into it, so .clone() it"
        )
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        places.setdefault(parameter.data_ptr() if parameter.numel() else 0, []).append(name)
    # Parts of a sharded parameter, and numbers on the meta device, have no address.
    trained = trained_parameters(model).keys()
    if shared := [names for place, names in places.items() if place and len(names) > 1 and trained & {*names}]:
        raise workload.unusable(
            f"{' and '.join(shared[0][:4])} are parameters of one memory (by .data), which the optimizer would step once for "
            "each, and --precision or --device part: to tie them, make them one parameter (one.weight = other.weight)"
        )


def notes_on_precision(model: nn.Module, precision: str) -> list[str]:
    """Notes on numbers of the model in another precision than the run's, to which they are converted."""
    kinds = {str(t.dtype).removeprefix("torch.") for t in of_model(model).values() if t.is_floating_point()}
    kinds -= {"float32", "float64" if precision == "fp64" else "float32"}
    fix = ": pass --precision fp64" if "float64" in kinds else ""
    return [f"the model has numbers in {kind}, which --precision {precision} converts{fix}" for kind in sorted(kinds)]


def notes_on_modes(model: nn.Module) -> list[str]:
    """A note on submodules that model() left in eval mode, unless the model's train() leaves them in it."""
    parts = {module for module in model.modules() if not module.training}
    if not parts or model in parts:
        return []
    model.train()
    changed = [name for name, module in model.named_modules() if module in parts and module.training]
    for module in parts:
        module.training = False
    return note_on(
        [name for name in changed if not any(name.startswith(f"{other}.") for other in changed)],
        "model() left {names} in eval mode, and the run trains it in training mode: BatchNorm's statistics move, and dropout "
        "is on; the model's own train() may leave it in eval mode",
    )

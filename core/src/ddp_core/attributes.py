"""Compares attributes that no snapshot holds: the workload's, those of the model's modules, and a user's own optimizer's."""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ddp_core.snapshot import memory
from ddp_core.state import RATES, dense, local, made_by_torch
from ddp_core.workload import Workload, note_on

LONG = 2**12  # entries: a longer list, of file names say, is not looked into
LARGE = 2**20  # numbers: a larger tensor is not copied, and its content is not compared
OF_TORCH = ("state", "param_groups", "defaults", "grad_scale", "found_inf")


def note_changes(names: list[str], owner: str, when: str) -> list[str]:
    return note_on(
        names,
        "{names} of the {owner} changes with every {when}, and no snapshot holds it: a run that goes on begins with it anew; "
        "keep it in a buffer or submodule of the model, in the optimizer's self.state[parameter], or as a number in one of its "
        "groups, or compute it from self.steps_done or self.epochs_done",
        owner=owner,
        when=when,
    )


def changes(before: Mapping, now: Mapping) -> list[str]:
    """Names with another value. An attribute that is new is no change."""
    return [name for name in now if before.get(name, now[name]) != now[name]]


def of_workload(workload: Workload, model: nn.Module) -> dict[str, list]:
    return _values(_attributes_of_workload(workload), [*model.parameters(), *model.buffers()], writes)


def of_modules(model: nn.Module) -> dict[str, list]:
    return _values(_attributes_of_modules(model), [*model.parameters(), *model.buffers()], _content)


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, list]:
    """Of a user's own optimizer: attributes, and group entries that are not numbers, which a snapshot holds."""
    if made_by_torch(optimizer):
        return {}

    def wrapped(value: Any) -> list:
        inner = [part for part in tree_leaves(value) if isinstance(part, torch.optim.Optimizer)]
        return [[*part.state.values()] for part in inner if part.state is not optimizer.state]

    attributes = {f"self.{name}": [value, wrapped(value)] for name, value in vars(optimizer).items() if name not in OF_TORCH}
    groups = optimizer.param_groups
    for key in dict.fromkeys(key for group in groups for key in group if key not in ("params", *RATES)):
        attributes[f"{key} in a group"] = [value for group in groups if not isinstance(value := group.get(key), int | float)]
    gradients = [parameter.grad for parameter in model.parameters()]
    saved = tree_leaves([*model.parameters(), *model.buffers(), gradients, [*optimizer.state.values()]])
    return _values(attributes, saved, writes)


def refuse_beside(workload: Workload, model: nn.Module, owner: str, counts: Callable) -> None:
    """Raises WorkloadError for parameters that are not the model's, as of layers in a plain list, where torch finds none."""
    own = {id(parameter) for parameter in model.parameters()}
    attributes = _attributes_of_modules(model) if owner == "model" else _attributes_of_workload(workload)
    for name, value in attributes.items():
        if any(isinstance(part, nn.Parameter) and id(part) not in own and counts(part) for part in _parts_in(value)):
            raise workload.unusable(
                f"{name} of the {owner} is neither trained nor saved: make it a part of the model (of an nn.ModuleList, "
                "nn.ModuleDict or nn.ParameterList, not a plain list), or freeze it (requires_grad_(False))"
            )


def unlike_the_model(workload: Workload, model: nn.Module) -> str:
    """Words on an attribute of the workload whose tensors are elsewhere, or in another precision than the model's. Or empty."""
    of_model = next(model.parameters(), torch.zeros(0))
    for name, value in _attributes_of_workload(workload).items():
        for part in (part for part in _parts_in(value) if isinstance(part, torch.Tensor)):
            if part.device != of_model.device or (part.is_floating_point() and part.dtype != of_model.dtype):
                kind, kind_of_model = (f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (part, of_model))
                return (
                    f"{name} is {kind}, and the model {kind_of_model}: only the model is moved and converted, so call "
                    f"{name}.to(next(model.parameters())) in forward()"
                )
    return ""


def _attributes_of_workload(workload: Workload) -> dict[str, Any]:
    return {f"self.{name}": value for name, value in vars(workload).items()}


def _attributes_of_modules(model: nn.Module) -> dict[str, Any]:
    """Attributes of the model's modules, by name, that are no parameters, buffers or modules, nor private ones of torch's."""
    own, attributes = vars(nn.Module()), {}
    for place, module in model.named_modules():
        of_torch = type(module).__module__.partition(".")[0] == "torch"
        for name, value in vars(module).items():
            if name not in own and not (of_torch and name.startswith("_")):
                attributes[f"{place}.{name}".lstrip(".")] = value
    return attributes


def _parts_in(value: Any) -> list:
    """All that lists, tuples and dictionaries hold, but of a long one its length. A module's are its parameters and buffers."""
    if isinstance(value, list | tuple | set | dict) and len(value) > LONG:
        return [len(value)]
    parts = []
    for leaf in tree_leaves(value):
        parts += [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]
    return parts


def _values(attributes: Mapping[str, Any], saved: Iterable, of_tensor: Callable) -> dict[str, list]:
    """Values to compare by name: numbers, texts, and of_tensor() of tensors that are no views of `saved` ones."""
    addresses = {_address(part) for part in saved if isinstance(part, torch.Tensor)}

    def value_of(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return None if _address(part) in addresses else of_tensor(part)
        return repr(part) if isinstance(part, float) else part if isinstance(part, bool | int | str) else None  # NaN equals NaN

    return {name: [value_of(part) for part in _parts_in(value)] for name, value in attributes.items()}


def _address(tensor: torch.Tensor) -> int:
    own = local(tensor.detach())
    return own.data_ptr() if dense(own) else id(tensor)


def writes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor is, and how often it was written; torch does not count that for all."""
    return _address(tensor), tensor._version if dense(tensor) and not tensor.is_inference() else 0


def _content(tensor: torch.Tensor) -> tuple | None:
    """Shape and checksum of a tensor of up to LARGE numbers; else None."""
    own = local(tensor.detach())
    if type(own) is not torch.Tensor or not dense(own) or own.is_meta or own.numel() > LARGE:
        return None
    content = own.cpu().contiguous()  # the name keeps it alive: memory() does not
    return own.shape, zlib.crc32(memory(content))

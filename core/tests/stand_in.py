"""A stand-in for an accelerator, to test the core's accelerator code on a machine that has none.

Its tensors are in CPU memory and carry a mark. `device` and `is_cpu` report the accelerator, results of marked tensors are
marked too, and an operation that mixes them with CPU tensors fails, as on a real accelerator. The data group, named nccl or
xccl, accepts marked tensors only; the control group accepts all others. What the core asks of the device is printed, so
tests find it in Job.out.
"""

import os
import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from faults import Fault
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU = torch.device("cpu")
WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")  # where the host waits
BOTH_SIDES = ("copy_", "to", "cpu", "backward", "_has_compatible_shallow_copy_type")  # may have operands on two devices


def accelerator(kind: str, count: int = 4, free: int = 2**30, name: str = "") -> Fault:
    """torch sees `count` devices of this kind in this process, with `free` bytes each; their uuids begin with `name`."""
    return partial(_install, kind, count, free, name)


class Marked(TorchFunctionMode):
    """Marks tensors that are made on a device or moved there, and all results computed from them."""

    def __init__(self, say):
        super().__init__()
        self.say, self.in_step = say, False

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords, name = keywords or {}, getattr(function, "__name__", "")
        attribute = getattr(getattr(function, "__self__", None), "__name__", "") if name.startswith("__") else ""
        if attribute == "device":
            return mark_of(arguments[0]) or CPU
        if attribute in ("is_cpu", "is_cuda", "is_xpu"):
            return (mark_of(arguments[0]) or CPU).type == attribute.removeprefix("is_")
        if name == "_parse_to":  # Module.to() inspects its arguments
            return function(*arguments, **keywords)
        if keywords.pop("pin_memory", False):
            print("stand-in: page-locked memory for a copy", flush=True)
        leaves = tree_leaves((arguments, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        marks = [mark for tensor in tensors if (mark := mark_of(tensor))]
        to_cpu = name == "cpu" or (name == "to" and any(isinstance(leaf, str) and leaf == "cpu" for leaf in arguments[1:2]))
        wanted = CPU if to_cpu else next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        copied = wanted == CPU and not keywords.get("non_blocking")
        copied = copied and "/torch/optim/" not in sys._getframe(1).f_code.co_filename  # optimizers ask C++, which has no marks
        if self.in_step and marks and (copied or name in WAITS):
            self.say("a step waits", name)
        mixed = marks and any(tensor.ndim and mark_of(tensor) != marks[0] for tensor in tensors)
        mixed = mixed or (marks and name.endswith("_") and not mark_of(tensors[0]))  # in place, also for single numbers
        if mixed and wanted is None and name not in BOTH_SIDES and not attribute:
            raise RuntimeError(f"{name}: expected all tensors on one device, but found {[*map(mark_of, tensors)]}")
        arguments, keywords = tree_map_only(torch.device, lambda _: CPU, (arguments, keywords))
        result = function(*arguments, **keywords)
        mark = wanted or (mark_of(tensors[0]) if name == "copy_" else next(iter(marks), None))
        if tensors and result is tensors[0] and (mark_of(result) or CPU) != (mark or CPU):
            result = result.clone()  # another device has its own memory
        for tensor in (arguments[0],) if attribute == "data" else tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and mark and mark != CPU:
                tensor.mark = mark
        return result


def mark_of(tensor: torch.Tensor) -> torch.device | None:
    return tensor.__dict__.get("mark")


def _install(kind: str, count: int, free: int, name: str) -> None:
    said = set()

    def say(*what) -> None:
        """Print this once only."""
        if what not in said:
            print("stand-in:", *what, flush=True)
        said.add(what)

    def made_current(index: int) -> None:
        say("current", index)
        say("matmul", torch.get_float32_matmul_precision(), "cudnn", torch.backends.cudnn.allow_tf32)
        say("workspace", os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    def said_instead(what: str, function, answer):
        """Print the original function's arguments, and return the answer for another device."""
        return lambda *arguments: [say(what, *arguments), function(answer, *arguments[1:])][1]

    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device(kind)
    torch.accelerator.device_count = lambda: count
    torch.accelerator.set_device_index = made_current
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.current_stream = lambda device=None: SimpleNamespace(is_capturing=lambda: False)
    torch.use_deterministic_algorithms = partial(say, "deterministic")  # torch's own function imports its compiler
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"{name}{device.index}")
    generators = [SimpleNamespace(manual_seed=partial(say, "generator", index)) for index in range(count)]
    module = SimpleNamespace(default_generators=generators, mem_get_info=lambda device: (free, 2**40))
    module.get_device_name = lambda device: f"stand-in {device.index}"
    torch.get_device_module = lambda device=None: module
    torch.autocast = said_instead("autocast", torch.autocast, "cpu")
    torch.amp.GradScaler = said_instead("scaler", torch.amp.GradScaler, "cpu")
    torch.Tensor.pin_memory = lambda tensor, device=None: [say("pinned"), tensor][1]
    _install_groups(kind, say)
    marked = Marked(say)
    marked.__enter__()
    _watch_steps(marked)


def _watch_steps(marked: Marked) -> None:
    from ddp_core.trainer import Trainer

    run_step = Trainer._run_step

    def watched(trainer: Trainer) -> None:
        marked.in_step = True
        run_step(trainer)
        marked.in_step = False

    Trainer._run_step = watched


def _install_groups(kind: str, say) -> None:
    init, get_backend, named = dist.init_process_group, dist.get_backend, []

    def init_process_group(backend, device_id=None, **others):
        say("group", backend, device_id)
        say("patience", others["timeout"].seconds)
        named.append(backend)
        init("gloo", **others)

    def checked(collective, *arguments, group, **keywords):
        data, marked = group is dist.group.WORLD, [bool(mark_of(tensor)) for tensor in tree_leaves(arguments) if _is(tensor)]
        if data and named[0] != "gloo" and not all(marked):
            raise RuntimeError(f"no backend of {named[0]} for tensors of the CPU")
        if not data and any(marked):
            raise RuntimeError(f"tensors of {kind} in the control group")
        return collective(*arguments, group=group, **keywords)

    dist.init_process_group = init_process_group
    dist.get_backend = lambda group=None: get_backend(group) if group else named[0]
    for name in ("all_reduce", "all_gather", "gather", "broadcast"):
        setattr(dist, name, partial(checked, getattr(dist, name)))


def _is(value) -> bool:
    return isinstance(value, torch.Tensor)

"""A workload is what is trained: one file with data, model, loss, metrics, default flags, and flags of its own.

    python train.py --workload digits            a built-in workload: workloads/*.py, each a template for yours
    python train.py --workload path/to/mine.py   yours: a file with one class that derives from Workload

A workload never sees ranks. The core decides the order of rows, the seeds of rows and steps, the sums over ranks and
the content of a snapshot, so a workload cannot get these wrong.
"""

import ast
import copy
import difflib
import errno
import hashlib
import importlib
import importlib.util
import itertools
import math
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ddp_core.errors import Failure, WorkloadError, first_line

MOST_SOURCES = 64  # files that are read when the imports of a workload's file are followed
BUILT_IN = ("digits", "regression", "mnist", "gpt")
ROW = "ddp_core reads row "  # then its number: a note on an exception that was raised while the row was read
NOT_THE_USER_S = {"site-packages", "dist-packages", "ddp_core"}
NO_SHARDS = (
    "PyTorch cannot do this with parts of tensors ({what}): call a layer whose weights another module reads in the model's own "
    "forward, and .clone() a parameter that forward() hands on; else take another optimizer, or pass --sharding none"
)
# What a workload's class may define.
YOURS: tuple[str, ...] = ("defaults", "unused_parameters", "flags", "data", "collate", "model", "forward", "loss", "metrics")
YOURS += ("shards", "optimizer", "schedule")
CALLED_AGAIN = {"collate", "forward", "loss", "metrics", "schedule"}  # called often: an attribute of that name would hide it


class Workload:
    """Derive your class from this: `data`, `model` and `loss` are required. `config` has every flag, such as config.epochs."""

    defaults: ClassVar[dict] = {}  # of flags, the core's and your own: dict(epochs=10, global_batch_size=96, lr=0.1)
    unused_parameters = False  # True: some parameters may have no gradient in a step; the optimizer then skips them

    name = ""  # the built-in's name, or the file's without .py
    file: Path | None = None
    config: Any = None  # set before data() is called: forward, loss and metrics can use self.config.width
    staging: Any = None  # set while data() runs: the node's copies of files (staging.py)
    count_steps: Callable[[], int] = staticmethod(lambda: 0)  # the Trainer sets it

    _steps_in_epoch = 1  # build.py sets it

    @property
    def steps_done(self) -> int:
        """Optimizer steps done, over all starts of the run: for a forward or loss that changes during training."""
        return self.count_steps()

    @property
    def epochs_done(self) -> float:
        """The same in epochs, 1.5 in the middle of the second: min(1, self.epochs_done / 10) rises over ten epochs."""
        return self.steps_done / self._steps_in_epoch

    def flags(self, add: Callable) -> None:
        """Add your own flags: add("--width", type=int, default=64, help="..."), with the arguments of argparse's add_argument.

        A snapshot remembers these flags, and a run resumes only with the same values. Pass remembered=False for a flag
        that does not change the losses, such as a folder's name.
        """

    def data(self, config) -> tuple[Any, Any]:
        """Return (training rows, held-out rows): tensors, or objects with length and index (data.py). None: no evaluation."""
        raise NotImplementedError

    def once_a_node(self, path: str | Path) -> Path:
        """For data(): copy a file into the node's memory, shared by the node's ranks (--stage-data). Returns the copy's path.

        The copy lasts as long as the run. Its path has no suffix such as .npy. If no copy is made, `path` is returned.
        """
        return self.staging.once(path) if self.staging else Path(path)

    def collate(self, rows: list) -> Any:
        """Make a batch from rows that were read one by one. Default: torch's default_collate.

        A batch may have any form, ragged rows too: the core knows how many rows it asked for.
        """
        from torch.utils.data import default_collate

        try:
            return default_collate(rows)
        except (RuntimeError, TypeError) as error:
            raise TypeError(f"{error} (rows of other kinds or sizes need a collate() of the class)") from error

    def model(self, config) -> nn.Module:
        """Return the module, on the CPU. It is built under --seed; all ranks then get rank 0's parameters and buffers."""
        raise NotImplementedError

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs for a batch. The model gets a tuple's first entry, or a dictionary's entries as keywords:
        write your own forward() if the dictionary also holds targets.

        Call model(...) itself: with several ranks it is a DistributedDataParallel, which sums the gradients over ranks.
        """
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(batch[0]) if isinstance(batch, list | tuple) else model(batch)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the sum over the rows of the batch, a scalar. For several losses, return a dictionary; their sum is trained.

        Under --precision bf16 and fp16 the outputs arrive in fp32: tensors in tuples, lists, dictionaries and dataclasses.

        If a row has many positions (pixels, tokens), its loss is the mean over them: reduction="sum", divided by their number.
        Held-out rows are evaluated under torch.no_grad(): a loss that differentiates needs torch.enable_grad().
        """
        raise NotImplementedError

    def metrics(self, outputs: Any, batch: Any) -> dict:
        """Return {name: sum over the rows of a held-out batch}, or {name: (sum, count)} if the mean is not over rows.

        If all counts of an evaluation are 0, 0.0 is recorded: for example precision, if no row was predicted positive.
        """
        return {}

    def shards(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers that --sharding gathers one at a time, and that --checkpoint-activations computes twice.

        They must be modules that the model's forward calls. Default: the children of the largest ModuleList, else of the
        largest Sequential, else none. The largest has the most parameters.
        """
        for kind in (nn.ModuleList, nn.Sequential):
            if lists := [module for module in model.modules() if isinstance(module, kind)]:
                return [*max(lists, key=lambda module: sum(p.numel() for p in module.parameters())).children()]
        return []

    def optimizer(self, model: nn.Module, config) -> torch.optim.Optimizer:
        """Return any optimizer of torch.optim, also with parameter groups. Default: --optimizer, with its flags."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rule = dict(lr=config.lr, weight_decay=config.weight_decay)
        if config.optimizer == "sgd":
            # torch 2.13's fused SGD reads uninitialized momentum after fp16's scaler skips the first step, fails if a parameter
            # gets its first gradient later than others, and does not exist for sharded parameters (--sharding).
            fused = config.precision != "fp16" and not self.unused_parameters and config.sharding == "none"
            return torch.optim.SGD(parameters, momentum=config.momentum, fused=fused, **rule)
        return torch.optim.AdamW(parameters, betas=(config.momentum, 0.95), fused=True, **rule)

    def schedule(self, step: int, total_steps: int, config) -> float:
        """Return the factor on every group's learning rate at this step, counted from 0.

        It depends on the step alone, so a snapshot need not save it. Default: --warmup-steps, then --lr-schedule:
        constant, or a cosine that would reach 0 after the last step.
        """
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        if config.lr_schedule == "constant":
            return 1.0
        done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * done))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OURS | CALLED_AGAIN:
            raise AttributeError(f"self.{name} is a name of the core's: call yours otherwise, self.my_{name}")
        super().__setattr__(name, value)

    def core_sets(self, **values: Any) -> None:
        """Set the core's own attributes. __setattr__ refuses these names to a workload's class."""
        vars(self).update(values)

    def overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Workload, method)

    def reads(self, name: str) -> bool:
        """Whether the workload's file, or a file beside it that it imports, reads config.<name>."""
        nodes: list[ast.AST] = []
        for text in sources_of(self.file) if self.file else ():
            with suppress(SyntaxError, ValueError, RecursionError):
                nodes += ast.walk(ast.parse(text))
        taken = [ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == name]
        return any(value.rpartition(".")[2] in ("config", "conf", "cfg", "c") for value in taken)

    def unusable(self, why: str) -> WorkloadError:
        return WorkloadError(f"--workload {self.name}: {why}")

    def digest(self) -> str:
        """Checksum of the file and of files beside it that it imports. Ranks compare it, to detect a stale copy on one node."""
        return hashlib.sha256(b"".join(sources_of(self.file))).hexdigest()[:12] if self.file else ""


# A class may set self.config by itself, also outside a run.
OURS = {name for name in vars(Workload) if not name.startswith("_")} - {*YOURS, "config"}


def sources_of(file: Path) -> Iterator[bytes]:
    """The bytes of a workload's file, and of files that it imports from its folder, directly or through each other. At most
    MOST_SOURCES files: the folder may be full of installed packages.
    """
    sources = [file]
    for source in itertools.islice(sources, MOST_SOURCES):  # the loop extends it
        yield (text := source.read_bytes())
        with suppress(SyntaxError, ValueError, RecursionError):  # a file with errors is reported when it is imported
            for name in _imported(ast.parse(text)):
                paths = [folder / name.replace(".", "/") for folder in (file.parent, source.parent)]
                beside = [path for one in paths for path in (one.with_name(f"{one.name}.py"), one / "__init__.py")]
                readable = [path for path in beside if path.is_file() and os.access(path, os.R_OK)]
                sources += dict.fromkeys(path for path in readable if path not in sources)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of the imported modules, and of the packages that contain them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = f"{getattr(node, 'module', None) or ''}.{alias.name}".lstrip(".")  # only `from` has a module
                yield from itertools.accumulate(name.split("."), "{}.{}".format)


def outputs_of(workload: Workload, model: nn.Module, batch: Any) -> Any:
    """The outputs of forward(). Tensors that autocast left in bf16 or fp16 are converted to fp32.

    Under CUDA's autocast, cross_entropy computes in its input's precision (on the CPU in fp32). bf16 would round each row's
    loss to 8 bits: on an H100 the first loss of digits was off by 3e-4, ten times the error of bf16 products (torch 2.11).
    """
    return tree_map(_in_fp32, workload.forward(model, batch))


def _in_fp32(leaf: Any) -> Any:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return with_fields(leaf, lambda value: tree_map(_in_fp32, value))
    half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if half else leaf


def with_fields(instance: Any, convert: Callable) -> Any:
    """A copy of a dataclass instance, also of a frozen one, with convert() applied to every field."""
    made = copy.copy(instance)
    for field in fields(instance):
        object.__setattr__(made, field.name, convert(getattr(instance, field.name)))
    return made


def parts_of(loss: Any, names: tuple[str, ...], workload: Workload) -> list[torch.Tensor]:
    """The loss to train on, a scalar; for several losses, then each part in the order of `names`. Raises WorkloadError."""
    if (isinstance(loss, Mapping) and {*loss} != {*names}) or (names and not isinstance(loss, Mapping)):
        now, before = [*loss] if isinstance(loss, Mapping) else "one", [*names] or "one"
        raise workload.unusable(f"loss() gave {now}, and {before} before: give a part that a batch has not as 0")
    parts = {name: loss[name] for name in names} if names else {"": loss}
    scalars = [value for value in parts.values() if isinstance(value, torch.Tensor) and value.numel() == 1]
    for name, value in parts.items():
        if isinstance(value, int | float) and scalars:
            parts[name] = scalars[0].new_full((), value)
        elif not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:40]
            raise workload.unusable(
                f"loss(){f' {name!r}' if name else ''} returned {what}, and should return a scalar: the sum over its rows"
            )
    first, *others = losses = [value.reshape(()) for value in parts.values()]
    return [sum(others, first), *losses] if names else losses


def refuse_unused(workload: Workload, model: nn.Module, step: int) -> None:
    """Raises WorkloadError if a parameter has no gradient after this step. One that the model has frozen does not count."""
    if unused := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]:
        raise no_gradient(workload, step, f" ({listed(unused)})")


def no_gradient(workload: Workload, step: int, names: str = "") -> WorkloadError:
    fix = "set unused_parameters = True in the class"
    if workload.config.sharding != "none":
        fix = f"use each in every batch (times 0, say), or pass --sharding none and {fix}"
    return workload.unusable(f"some parameters{names} had no gradient in step {step}: {fix}")


def refuse_other_names(workload: Workload, metrics: Mapping, before: Iterable[str]) -> None:
    """Raises WorkloadError if a batch has other metrics than the batches before."""
    if metrics.keys() != {*before}:
        raise workload.unusable(f"metrics() gave {[*metrics]}, and {[*before]} before: give what a batch has not as (0, 0)")


def factor_of(workload: Workload, step: int, total_steps: int) -> float:
    """The schedule's factor on the learning rate, finite and not negative. Raises WorkloadError."""
    factor = workload.schedule(step, total_steps, workload.config)
    if not hasattr(factor, "__float__") or not 0 <= (factor := float(factor)) < math.inf:
        raise workload.unusable(
            f"schedule() returned {factor!r} at step {step} of {total_steps}, and should return a number from 0 on, a factor"
        )
    return factor


def note_on(names: Sequence[str], text: str, **values: Any) -> list[str]:
    """A note with these {names}, if there are any."""
    return [text.format(names=listed(names), **values)] if names else []


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + " and on" * (len(names) > 6)


# ---- from a name or a file to the workload ------------------------------------------------------------------------


def find(what: str | type[Workload]) -> Workload:
    """The workload of a built-in name, a file, or a class. Raises WorkloadError that names the file and its line."""
    if isinstance(what, type):
        module = sys.modules[what.__module__]
        file = getattr(module, "__file__", None)
        return _made(what, re.sub(r"\W+", "-", what.__name__).lower(), Path(file).resolve() if file else None)
    if what in BUILT_IN:
        module = importlib.import_module(f"ddp_core.workloads.{what}")
        return _made(_only_class(module, what), what, Path(str(module.__file__)))
    path = Path(what)
    if path.suffix != ".py" or not path.is_file():
        raise WorkloadError(
            f"--workload {what} is no file of Python on {os.uname().nodename}, nor one of {', '.join(BUILT_IN)}"
        )
    file = path.resolve()  # before loading: its code may change the working directory
    return _made(_only_class(_load(path), what), path.stem, file)


def _made(kind: type[Workload], name: str, file: Path | None) -> Workload:
    missing = [method for method in ("data", "model", "loss") if getattr(kind, method, None) is getattr(Workload, method)]
    if missing or not issubclass(kind, Workload):
        raise WorkloadError(f"--workload {name}: class {kind.__name__} lacks {', '.join(missing) or 'Workload as its base'}")
    _refuse_misspelled(kind, name)
    try:
        workload = kind()
    except (Exception, SystemExit) as error:
        raise blame(error, file, f"--workload {name}: {kind.__name__}(), which is called without arguments") from error
    workload.core_sets(name=name, file=file)
    given: Any = workload.defaults
    if not isinstance(given, Mapping):
        kind_of = "a method" if callable(given) else f"a {type(given).__name__}"
        raise workload.unusable(f"defaults is {kind_of}, and should be a dict(...): defaults = dict(epochs=10)")
    if not isinstance(workload.unused_parameters, bool):
        raise workload.unusable(f"unused_parameters is {workload.unused_parameters!r:.40}, and should be True or False")
    return workload


def _refuse_misspelled(kind: type[Workload], name: str) -> None:
    """Raises WorkloadError for a name that is almost one of Workload's: the core would not call it, and would train without
    those metrics or that schedule. Also for a name that the core itself uses.
    """
    own = vars(kind)
    for taken in OURS & own.keys():
        raise WorkloadError(f"--workload {name}: class {kind.__name__} has {taken}, a name of the core's: call yours otherwise")
    for method in [method for method in own if method not in YOURS and not method.startswith("_")]:
        for close in difflib.get_close_matches(method, YOURS, 1, 0.8):
            if close not in own and callable(getattr(kind, method)) == callable(getattr(Workload, close)):
                raise WorkloadError(
                    f"--workload {name}: class {kind.__name__} has {method}, which the core does not ask for: call it {close}, "
                    f"or _{method} where it is your own"
                )


def _load(path: Path):
    """The file as a module. It can import files beside it. So can its worker processes, which inherit sys.path."""
    name, folder = path.stem, str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    loaded = sys.modules.get(name)
    other = loaded is not None and Path(getattr(loaded, "__file__", None) or "-").resolve() != path.resolve()
    if other or name in sys.stdlib_module_names:
        name = f"workload_{name}"  # another module has that name, or will have it: statistics, say
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path  # find() accepts .py files only
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise WorkloadError(f"--workload {path}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise blame(error, path.resolve(), f"--workload {path}") from error
    return module


def _only_class(module, what: str) -> type[Workload]:
    mine = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Workload)]
    mine = [kind for kind in dict.fromkeys(mine) if kind.__module__ == module.__name__]
    leaves = [kind for kind in mine if not any(other is not kind and issubclass(other, kind) for other in mine)]
    if len(leaves) != 1:
        names = f"{len(leaves)} ({', '.join(kind.__name__ for kind in leaves)})" if leaves else "none"
        raise WorkloadError(f"--workload {what} should have one class that derives from ddp_core.Workload, and has {names}")
    return leaves[0]


@contextmanager
def blaming(workload: Workload, what: str) -> Iterator[None]:
    """Context for calls into a workload's file, and for work on its results: blame() makes one line of an exception."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = _called_wrongly(workload, error) or what
        raise blame(error, workload.file, f"{what} of --workload {workload.name}") from error


def _called_wrongly(workload: Workload, error: BaseException) -> str:
    """'loss(), line 12,' if a method does not accept the core's arguments: then the traceback has no line of the file."""
    if line_in(error, workload.file):
        return ""
    name = (re.findall(rf"^{re.escape(type(workload).__qualname__)}\.(\w+)\(\) (?:takes|missing|got)", str(error)) or [""])[0]
    code = getattr(getattr(type(workload), name, None), "__code__", None)
    return f"{name}(), line {code.co_firstlineno}," if code and isinstance(error, TypeError) else ""


def blame(error: BaseException, file: Path | None, when: str) -> BaseException:
    """A one-line WorkloadError for an error or sys.exit() of the workload's file. Failures and lack of memory are unchanged."""
    from ddp_core.process_group import Peers

    between_ranks = torch.distributed.is_initialized() and isinstance(error, RuntimeError) and Peers.is_lost(error)
    if isinstance(error, Failure) or out_of_memory(error) or (between_ranks and not raised_by(error, file)):
        return error
    place = line_in(error, file)
    lines = [line for line in map(str.strip, str(error).splitlines()) if line and not line.startswith(ROW)]
    if [line[-1:] for line in lines[:1]] == [":"]:  # the reason is on the next line
        lines[:2] = [" ".join(lines[:2])]
    text = f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
    if lines and lines[0].startswith("Caught "):  # from a worker: its traceback follows, and the last line is the error
        text = lines[-1][:240]
    if "'DistributedDataParallel' object has no attribute" in text:
        text += "; in several ranks model is DDP's: call model(...) itself, and move the rest into the model's own forward"
    elif _calls_backward(error, file) and re.search("does not require grad|graph a second time", text):
        text += "; backward() is the core's to call: take it out"
    elif "does not require grad and does not have a grad_fn" in text:
        text += "; held-out rows come under torch.no_grad(): what is differentiated there stands in `with torch.enable_grad():`"
    return WorkloadError(f"{when}{f', {place}' if place else ''}: {text}")


def _calls_backward(error: BaseException, file: Path | None) -> bool:
    """Whether a line of this file called backward() of a tensor."""
    frames = [(Path(frame.filename).resolve(), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    calls = [(below.name, name) for (place, _), (below, name) in itertools.pairwise(frames) if place == file]
    return ("_tensor.py", "backward") in calls


def raised_by(error: BaseException, file: Path | None) -> bool:
    """Whether a `raise` in this file made the error, whatever its message says."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return any(Path(frame.filename).resolve() == file and (frame.line or "").startswith("raise") for frame in last)


def out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory. For the host, torch's allocator raises a plain RuntimeError."""
    host = "DefaultCPUAllocator" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return host or isinstance(error, MemoryError | torch.OutOfMemoryError)


def unknown_to_shards(error: BaseException) -> str:
    """The error's first line, if torch cannot do an operation on sharded tensors (--sharding); else empty."""
    words = ("DTensor", "sharding strategy", "Sharding propagation", "setStorage: sizes")
    return first_line(error) if any(word in str(error) for word in words) else ""


def row_of(error: BaseException) -> str:
    """The number of the row that could not be read (SeededRows), or empty. A worker's error holds its traceback as text."""
    notes = "\n".join([*getattr(error, "__notes__", []), str(error)])
    return (re.findall(rf"(?m)^{ROW}(\d+)$", notes) or [""])[-1]


def line_in(error: BaseException, file: Path | None) -> str:
    """The innermost line of the traceback that is in the file, 'line 12 (loss)', or in a module beside it, 'data.py, line 9
    (read)'; else empty.
    """
    if file is None:
        return ""
    frames = [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    # A worker's error holds its traceback as text.
    frames += re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(error))
    for name, line, function in reversed(frames):
        path = Path(name).resolve()
        others = not NOT_THE_USER_S.isdisjoint(path.parts) or "/lib/python3" in str(path)  # an environment may be beside it
        if path == file or (file.parent in path.parents and not others):
            return f"{'' if path == file else f'{path.name}, '}line {line} ({function})"
    return ""


# ---- what the built-in workloads share, and yours may use ----------------------------------------------------------


@torch.no_grad()
def initial_parameters(model: nn.Module, seed: int) -> nn.Module:
    """Set matrices uniform in +-1/sqrt(fan_in), gains to 1, biases to 0, in place. The numbers are the same on every machine.

    They are drawn from integers, because torch's own generators give other numbers on another instruction set.
    """
    from ddp_core.order import uniform

    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            bound = 1 / math.sqrt(parameter[0].numel())
            values = uniform(parameter.numel(), 3, seed, zlib.crc32(name.encode()))
            parameter.copy_(((2 * values - 1) * bound).float().view(parameter.shape))  # an fp64 run begins with fp32 numbers
    return model

"""Workload: what is trained. One file says it: data, model, loss, metrics, defaults, and flags of its own.

    python train.py --workload digits            a built-in one: workloads/*.py, each a template for yours
    python train.py --workload path/to/mine.py   yours: a file with one class that derives from Workload

A workload never sees ranks. The core decides the order of rows, the seeds of rows and steps, the sums over ranks and
what a snapshot holds, so that a workload cannot get these wrong.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ddp_core.errors import Failure, WorkloadError, first_line

MOST_SOURCES = 64  # files that a workload's own may lead to
BUILT_IN = ("digits", "regression", "mnist", "gpt")
ROW = "ddp_core reads row "  # before its number, in a note to what was raised while it was read
NOT_THE_USER_S = {"site-packages", "dist-packages", "ddp_core"}
NO_GRADIENT = "some parameters{names} had no gradient in step {step}: set unused_parameters = True in the class"
NO_SHARDS = (
    "PyTorch cannot do this with parts of tensors ({what}): a layer whose weights another module reads is to be called by the "
    "model's forward itself, and a parameter that forward() hands on is to be copied (.clone()); else take another optimizer, "
    "or pass --sharding none"
)
# What a class may say.
YOURS: tuple[str, ...] = ("defaults", "unused_parameters", "flags", "data", "collate", "model", "forward", "loss", "metrics")
YOURS += ("shards", "optimizer", "schedule")
CALLED_AGAIN = {"collate", "forward", "loss", "metrics", "schedule"}  # an attribute of that name would be called in its place


class Workload:
    """Derive from this; `data`, `model` and `loss` are required. `config` has every flag: config.epochs, config.seed."""

    defaults: ClassVar[dict] = {}  # of flags, the core's and its own: dict(epochs=10, global_batch_size=96, lr=0.1)
    unused_parameters = False  # True: some parameters have no gradient in some steps, and the optimizer leaves them alone

    name = ""  # the built-in's name, or the file's without .py
    file: Path | None = None
    config: Any = None  # from data() on, also in forward, loss and metrics: self.config.width
    staging: Any = None  # of a run, while it reads its data
    count_steps: Callable[[], int] = staticmethod(lambda: 0)  # the Trainer's

    @property
    def steps_done(self) -> int:
        """Of the optimizer, in all starts of the run: in forward and loss, for what changes as training goes on."""
        return self.count_steps()

    def flags(self, add: Callable) -> None:
        """Own flags: add("--width", type=int, default=64, help="..."), as argparse's add_argument.

        A snapshot remembers them and resumes under the same ones; remembered=False is for those, such as a folder's
        name, that do not change the losses.
        """

    def data(self, config) -> tuple[Any, Any]:
        """Training and held-out rows (None: no evaluation): tensors, or anything with a length and an index (data.py)."""
        raise NotImplementedError

    def once_a_node(self, path: str | Path) -> Path:
        """In data(): the path of a copy of this file in the memory of the node, which its ranks share (--stage-data).

        The copy is there as long as the run, and its path has no ending. A file that is not copied has its own path.
        """
        return self.staging.once(path) if self.staging else Path(path)

    def collate(self, rows: list) -> Any:
        """Rows that were read one by one to a batch; torch's default_collate unless you say otherwise.

        A batch can be of any form, also of ragged rows: the core counts the rows that it asked for.
        """
        from torch.utils.data import default_collate

        try:
            return default_collate(rows)
        except (RuntimeError, TypeError) as error:
            raise TypeError(f"{error} (rows of other kinds or sizes need a collate() of the class)") from error

    def model(self, config) -> nn.Module:
        """The module, on the CPU. It is built under --seed; all ranks then train with rank 0's numbers."""
        raise NotImplementedError

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs for a batch. A tuple's first entry is the model's input; a dictionary, all its keywords: write
        your own forward() where the dictionary holds targets too.

        In several ranks `model` has DistributedDataParallel around it, and is to be called itself: it sums the gradients.
        """
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(batch[0]) if isinstance(batch, list | tuple) else model(batch)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor | dict[str, torch.Tensor]:
        """The sum over the rows of the batch, a scalar; of several losses a dictionary, and their sum is trained.

        The outputs are fp32, also under --precision bf16 and fp16: tensors in tuples, lists, dictionaries and dataclasses.

        Where a row has many positions (pixels, tokens), its loss is their mean: reduction="sum" divided by their number.
        Held-out rows come under torch.no_grad(): what a loss differentiates is computed under torch.enable_grad().
        """
        raise NotImplementedError

    def metrics(self, outputs: Any, batch: Any) -> dict:
        """Name to the sum over the rows of a held-out batch; or to a pair, where the mean is not over rows: (sum, count).

        Where all counts of an evaluation are 0, as of a precision of which no row was predicted, 0.0 is recorded.
        """
        return {}

    def shards(self, model: nn.Module) -> list[nn.Module]:
        """The layers that --sharding gathers one at a time, and that --checkpoint-activations computes twice.

        Modules of the model that its forward calls: these are the children of the largest ModuleList, else of the largest
        Sequential; none of a model that has neither.
        """
        for kind in (nn.ModuleList, nn.Sequential):
            if lists := [module for module in model.modules() if isinstance(module, kind)]:
                return [*max(lists, key=lambda module: sum(p.numel() for p in module.parameters())).children()]
        return []

    def optimizer(self, model: nn.Module, config) -> torch.optim.Optimizer:
        """Any optimizer of torch.optim, also with parameter groups. This one is --optimizer with its flags."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rule = dict(lr=config.lr, weight_decay=config.weight_decay)
        if config.optimizer == "sgd":
            # torch 2.13's fused SGD has a momentum of uninitialized memory where fp16's scaler skips the first step, and fails
            # where a parameter has its first gradient later than others.
            # And rows of a matrix (--sharding) have no fused SGD at all.
            fused = config.precision != "fp16" and not self.unused_parameters and config.sharding == "none"
            return torch.optim.SGD(parameters, momentum=config.momentum, fused=fused, **rule)
        return torch.optim.AdamW(parameters, betas=(config.momentum, 0.95), fused=True, **rule)

    def schedule(self, step: int, total_steps: int, config) -> float:
        """What every group's learning rate is multiplied with at this step, counted from 0.

        A function of the step, so that nothing of it need be saved. This one is --warmup-steps, then --lr-schedule:
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
        """The core's own attributes, which __setattr__ keeps from a class."""
        vars(self).update(values)

    def overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Workload, method)

    def reads(self, name: str) -> bool:
        """Whether its file, or one that this imports from beside it, takes this from config."""
        nodes: list[ast.AST] = []
        for text in sources_of(self.file) if self.file else ():
            with suppress(SyntaxError, ValueError, RecursionError):
                nodes += ast.walk(ast.parse(text))
        taken = [ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == name]
        return any(value.rpartition(".")[2] in ("config", "conf", "cfg", "c") for value in taken)

    def unusable(self, why: str) -> WorkloadError:
        return WorkloadError(f"--workload {self.name}: {why}")

    def digest(self) -> str:
        """Of the file and what it imports from beside it: ranks compare it, so that a stale copy on one node is noticed."""
        return hashlib.sha256(b"".join(sources_of(self.file))).hexdigest()[:12] if self.file else ""


# Its config a class may keep by itself, also where no run has set it.
OURS = {name for name in vars(Workload) if not name.startswith("_")} - {*YOURS, "config"}


def sources_of(file: Path) -> Iterator[bytes]:
    """Of a workload's file, and of those in its folder that it imports, by themselves or by each other; not all, of a folder of
    installed packages.
    """
    sources = [file]
    for source in itertools.islice(sources, MOST_SOURCES):  # it grows meanwhile
        yield (text := source.read_bytes())
        with suppress(SyntaxError, ValueError, RecursionError):  # of one that is not imported yet
            for name in _imported(ast.parse(text)):
                paths = [folder / name.replace(".", "/") for folder in (file.parent, source.parent)]
                beside = [path for one in paths for path in (one.with_name(f"{one.name}.py"), one / "__init__.py")]
                readable = [path for path in beside if path.is_file() and os.access(path, os.R_OK)]
                sources += dict.fromkeys(path for path in readable if path not in sources)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of modules, and of packages that these are in."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
    for name in names:
        yield from itertools.accumulate(name.split("."), "{}.{}".format)


def outputs_of(workload: Workload, model: nn.Module, batch: Any) -> Any:
    """forward(), whose outputs are fp32 where autocast has left bf16 or fp16.

    Under CUDA's autocast cross_entropy has its input's precision (on the CPU fp32), so bf16 would round the loss of each row to
    8 bits: on an H100 the first loss of digits was off by 3e-4, ten times what bf16 products did (torch 2.11).
    """
    return tree_map(_in_fp32, workload.forward(model, batch))


def _in_fp32(leaf: Any) -> Any:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return with_fields(leaf, lambda value: tree_map(_in_fp32, value))
    half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if half else leaf


def with_fields(instance: Any, convert: Callable) -> Any:
    """A copy of a dataclass's instance, a frozen one's too, with every field converted."""
    made = copy.copy(instance)
    for field in fields(instance):
        object.__setattr__(made, field.name, convert(getattr(instance, field.name)))
    return made


def parts_of(loss: Any, names: tuple[str, ...], workload: Workload) -> list[torch.Tensor]:
    """The loss to train on, a scalar, and behind it its parts in the order of `names`; of one loss it alone."""
    if (isinstance(loss, Mapping) and {*loss} != {*names}) or (names and not isinstance(loss, Mapping)):
        now, before = [*loss] if isinstance(loss, Mapping) else "one", [*names] or "one"
        raise workload.unusable(f"loss() gave {now}, and {before} before: give a part that a batch has not as 0")
    if not names and isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return [loss.reshape(())]
    given = [loss[name] for name in names] if names else [loss]
    kind = next((value for value in given if isinstance(value, torch.Tensor)), None)
    if kind is None or not all(isinstance(value, int | float) or getattr(value, "numel", int)() == 1 for value in given):
        what = ", ".join(f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:40] for value in given)
        raise workload.unusable(f"loss() returned {what}, and a scalar before: the sum over a batch's rows, as a tensor")
    parts = [(value if isinstance(value, torch.Tensor) else kind.new_full((), value)).reshape(()) for value in given]
    return [sum(parts[1:], parts[0]), *parts]


def refuse_unused(workload: Workload, model: nn.Module, step: int) -> None:
    """Of a step, which has given some parameters no gradient: one that the model freezes meanwhile is another matter."""
    if unused := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]:
        raise workload.unusable(NO_GRADIENT.format(step=step, names=f" ({', '.join(unused[:6])})"))


def refuse_other_names(workload: Workload, metrics: Mapping, before: Iterable[str]) -> None:
    """Of metrics, which have the same names in every batch. Raises WorkloadError."""
    if metrics.keys() != {*before}:
        raise workload.unusable(f"metrics() gave {[*metrics]}, and {[*before]} before: give what a batch has not as (0, 0)")


def factor_of(workload: Workload, step: int, total_steps: int) -> float:
    """What the schedule multiplies the learning rate with. Raises WorkloadError."""
    factor = workload.schedule(step, total_steps, workload.config)
    if not hasattr(factor, "__float__") or not 0 <= (factor := float(factor)) < math.inf:
        raise workload.unusable(
            f"schedule() returned {factor!r} at step {step} of {total_steps}, and should return a number from 0 on, which the "
            "learning rate is multiplied with"
        )
    return factor


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
    file = path.resolve()  # now: it may change the folder
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
    given: Any = workload.defaults
    if not isinstance(given, Mapping):
        kind_of = "a method" if callable(given) else f"a {type(given).__name__}"
        raise WorkloadError(f"--workload {name}: defaults is {kind_of}, and should be a dict(...): defaults = dict(epochs=10)")
    if not isinstance(workload.unused_parameters, bool):
        raise WorkloadError(
            f"--workload {name}: unused_parameters is {workload.unused_parameters!r:.40}, and should be True or False"
        )
    workload.core_sets(name=name, file=file)
    return workload


def _refuse_misspelled(kind: type[Workload], name: str) -> None:
    """What is called almost as one of Workload's, and would be asked for by nobody: no metrics, another schedule. And what has
    the name of something of the core's.
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
    """The file as a module. Files beside it can be imported, too: by its workers as well, for they get sys.path."""
    name, folder = path.stem, str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    loaded = sys.modules.get(name)
    other = loaded is not None and Path(getattr(loaded, "__file__", None) or "-").resolve() != path.resolve()
    if other or name in sys.stdlib_module_names:
        name = f"workload_{name}"  # a module of that name is in use, or will be: statistics.py, say
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path  # find() takes no other file than Python's
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
    """Around what a workload's file does, or what is done with it: see blame()."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = _called_wrongly(workload, error) or what
        raise blame(error, workload.file, f"{what} of --workload {workload.name}") from error


def _called_wrongly(workload: Workload, error: BaseException) -> str:
    """A method that does not take what the core gives it, and its line: no line of the file is run then."""
    if line_in(error, workload.file):
        return ""
    name = (re.findall(rf"^{re.escape(type(workload).__qualname__)}\.(\w+)\(\) (?:takes|missing|got)", str(error)) or [""])[0]
    code = getattr(getattr(type(workload), name, None), "__code__", None)
    return f"{name}(), line {code.co_firstlineno}," if code and isinstance(error, TypeError) else ""


def blame(error: BaseException, file: Path | None, when: str) -> BaseException:
    """One line for an exception that the workload's file has raised, or that was raised on its behalf; also for sys.exit()."""
    from ddp_core.process_group import Peers

    between_ranks = torch.distributed.is_initialized() and isinstance(error, RuntimeError) and Peers.is_lost(error)
    if isinstance(error, Failure) or out_of_memory(error) or (between_ranks and not raised_by(error, file)):
        return error
    place = line_in(error, file)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(ROW)]
    if [line[-1:] for line in lines[:1]] == [":"]:  # what is wrong comes after it
        lines[:2] = [" ".join(lines[:2])]
    text = f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
    if lines and lines[0].startswith("Caught "):  # in a worker: its own traceback follows, and ends with the error
        text = lines[-1][:240]
    if "'DistributedDataParallel' object has no attribute" in text:
        text += "; in several ranks model is DDP's: call model(...) itself, and move the rest into the model's own forward"
    elif _calls_backward(error, file) and re.search("does not require grad|graph a second time", text):
        text += "; backward() is the core's to call: take it out"
    elif "does not require grad and does not have a grad_fn" in text:
        text += "; held-out rows come under torch.no_grad(): what is differentiated there stands in `with torch.enable_grad():`"
    return WorkloadError(f"{when}{f', {place}' if place else ''}: {text}")


def _calls_backward(error: BaseException, file: Path | None) -> bool:
    """Of a tensor, and by a line of this file."""
    frames = [(Path(frame.filename).resolve(), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    calls = [(below.name, name) for (place, _), (below, name) in itertools.pairwise(frames) if place == file]
    return ("_tensor.py", "backward") in calls


def raised_by(error: BaseException, file: Path | None) -> bool:
    """Whether a `raise` of this file made the error, whatever its words are like."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return any(Path(frame.filename).resolve() == file and (frame.line or "").startswith("raise") for frame in last)


def out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host, for which torch's allocator raises a plain RuntimeError."""
    host = "DefaultCPUAllocator" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return host or isinstance(error, MemoryError | torch.OutOfMemoryError)


def unknown_to_shards(error: BaseException) -> str:
    """Of an operation of torch that has no form for tensors whose rows are dealt over ranks; empty of all others."""
    words = ("DTensor", "sharding strategy", "Sharding propagation", "setStorage: sizes")
    return first_line(error) if any(word in str(error) for word in words) else ""


def row_of(error: BaseException) -> str:
    """The row that could not be read (SeededRows); from a worker the traceback comes as text."""
    notes = "\n".join([*getattr(error, "__notes__", []), str(error)])
    return (re.findall(rf"(?m)^{ROW}(\d+)$", notes) or [""])[-1]


def line_in(error: BaseException, file: Path | None) -> str:
    """The deepest line of the file that the error came through, 'line 12 (loss)', or of a module beside it, 'data.py, line 9
    (read)'; empty where there is none.
    """
    if file is None:
        return ""
    frames = [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    # From a worker the traceback comes as text.
    frames += re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(error))
    for name, line, function in reversed(frames):
        path = Path(name).resolve()
        others = not NOT_THE_USER_S.isdisjoint(path.parts) or "/lib/python3" in str(path)  # an environment lies beside it, too
        if path == file or (file.parent in path.parents and not others):
            return f"{'' if path == file else f'{path.name}, '}line {line} ({function})"
    return ""


# ---- what the built-in workloads share, and yours may use ----------------------------------------------------------


@torch.no_grad()
def initial_parameters(model: nn.Module, seed: int) -> nn.Module:
    """Matrices uniform in +-1/sqrt(fan_in), gains 1, biases 0: from integers, the same numbers on every machine.

    torch's own generators give other numbers on other instruction sets.
    """
    from ddp_core.order import uniform

    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            bound = 1 / math.sqrt(parameter[0].numel())
            values = uniform(parameter.numel(), 3, seed, zlib.crc32(name.encode()))
            parameter.copy_(((2 * values - 1) * bound).float().view(parameter.shape))  # fp32, also in an fp64 run
    return model

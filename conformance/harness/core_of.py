"""Which core has trained in this process: are its bytes this repository's, and has a site replaced a part of it?

    with core_of.watched() as found:      found: a line for each thing that is not this repository's
        world.train(...)

The check runs after the program, while its modules are still loaded. A function's code names the file that defines it.
"""

import ast
import contextlib
import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.harness.sites import ROOT

CORE = ROOT / "core/src/ddp_core"
# The modules of torch that a training uses.
TORCH: tuple[str, ...] = ("torch.nn.functional", "torch.nn.modules", "torch.nn.parallel", "torch.optim", "torch.autograd")
TORCH += ("torch.utils.data", "torch.amp", "torch.distributed.distributed_c10d", "torch._tensor")
_watching: list[list[str]] = []


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def look(program: Path) -> None:
    """Look at the end of a program, before its modules are dropped."""
    if _watching:
        _watching[-1].extend(foreign(program.resolve().parent))


def digests(core: Path) -> dict[str, str]:
    """SHA-256 of each module of a copy of the core, by its path in it."""
    return {str(path.relative_to(core)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(core.rglob("*.py"))}


def foreign(site: Path) -> list[str]:
    """Find the parts of the core and of torch in this process that are not this repository's: a line for each."""
    violations, mine = [], {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "ddp_core"}
    if "ddp_core.trainer" not in mine:
        violations.append("ddp_core.trainer was not imported: something else has trained")
    for name, module in mine.items():
        path = Path(getattr(module, "__file__", None) or "nowhere")
        parts = name.split(".")[1:]
        package = path.name == "__init__.py"
        should_be = CORE.joinpath(*parts, path.name) if package else CORE.joinpath(*parts).with_suffix(".py")
        if not path.is_file() or not should_be.is_file() or path.read_bytes() != should_be.read_bytes():
            violations.append(f"{name} is {path}, which is not this repository's")
        else:
            violations += changed(module, path)
    theirs = [name for name in list(sys.modules) if name in ("torch", "torch.distributed") or name.startswith(TORCH)]
    for name in [*mine, *theirs]:
        own = [what for what, code in functions(sys.modules[name]) if of_folder(code, site)]
        violations += [f"{name}.{what} is the site's own" for what in own]
    return list(dict.fromkeys(violations))


def changed(module: types.ModuleType, path: Path) -> list[str]:
    """Find functions and constants of a module that differ from those in its file."""
    tree = ast.parse(path.read_text())
    written, violations = {*codes(compile(tree, str(path), "exec"))}, []
    for what, function in functions(module):
        code = function.__code__
        made = code.co_filename == "<string>" and not function.__name__.startswith("__")  # __ names: a dataclass's
        if made or (code.co_filename == str(path) and code not in written):
            violations.append(f"{module.__name__}.{what} is not that of its file")
    again = {line.target.id for line in tree.body if isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name)}
    for line in tree.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and line.targets[0].id not in again:
            with contextlib.suppress(ValueError):
                name, value = line.targets[0].id, ast.literal_eval(line.value)
                if isinstance(value, str | int | float | tuple) and getattr(module, name, None) != value:
                    violations.append(f"{module.__name__}.{name}={getattr(module, name, None)!r}, but its file has {value!r}")
    return violations


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions of a module and of its classes, each with its name there."""
    for name, value in list(vars(module).items()):
        owned = [(name, value)]
        if issubclass(type(value), type):
            owned = [(f"{name}.{key}", one) for key, one in vars(value).items()]
        for what, one in owned:
            for each in unwrapped(one):
                yield what, each


def unwrapped(value: Any) -> Iterator[types.FunctionType]:
    """The functions inside a property, a method, a partial or a decorated function."""
    for _ in range(5):
        kind = type(value)  # not value.__class__: an object can make that say something else
        if kind is types.FunctionType:
            yield value
            value = vars(value).get("__wrapped__")
        elif kind is functools.partial:
            value = value.func
        elif issubclass(kind, property):
            value = value.fget
        elif kind in (staticmethod, classmethod, functools._lru_cache_wrapper):
            value = value.__wrapped__
        else:
            return


def of_folder(function: types.FunctionType, folder: Path) -> bool:
    """True if its code was written below this folder. The suite's own code is not, wherever the suite lies."""
    return Path(function.__code__.co_filename).is_relative_to(folder)

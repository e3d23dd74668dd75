"""Records which calls a workload's file makes, and on which line: clocks, process numbers, generators, seeds, rank variables.

Most of these calls are harmless. They become suspects when a promise is broken; promises.py says for which promise.
"""

import contextlib
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from conformance.harness import sites

# Watched functions by kind of call. A call of kind "generator" is harmless if it is seeded.
WATCHED = {
    "clock": ["time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns"],
    "process": ["os.getpid", "os.getppid", "os.urandom", "uuid.uuid4", "uuid.uuid1", "socket.gethostname"],
    "generator": [
        "random.Random",
        "random.SystemRandom",
        "numpy.random.default_rng",
        "numpy.random.RandomState",
        "numpy.random.Generator",
        "torch.Generator",
        "torch.seed",
    ],
    "seed": ["torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed_all", "random.seed", "numpy.random.seed"],
    "state": ["torch.get_rng_state", "torch.set_rng_state", "random.setstate", "numpy.random.set_state"],
    "ranks": [f"torch.distributed.{name}" for name in ("get_rank", "get_world_size", "all_reduce", "all_gather", "broadcast")],
    "setting": [
        "torch.set_float32_matmul_precision",
        "torch.use_deterministic_algorithms",
        "torch.set_default_dtype",
        "torch.set_num_threads",
    ],
    "listing": ["os.listdir", "os.scandir"],
    "write": ["torch.save", "safetensors.torch.save_file"],  # written in C++, where Python's audit events see no file
}
IDENTITY = {name for site in sites.find() for launch in site.launches for name, _ in launch.templates} | {"WORLD_SIZE", "RANK"}
# Functions of the core, and the phase of a call made below each.
PHASES = {
    "_run_step": "a step",
    "evaluate": "evaluation",
    "probe": "the first look",
    "of_workload": "data",
    "build_model_and_optimizer": "model",
}


@dataclass(frozen=True)
class Call:
    """One call. what: the function, variable or file. function, line: its place in the file. when: see PHASES.

    seeded: it has arguments. made: the file did not exist before.
    """

    kind: str
    what: str
    function: str
    line: int
    when: str
    seeded: bool = False
    made: bool = False

    def __str__(self) -> str:
        return f"{self.what}, line {self.line} ({self.function})"


class Witness:
    """Logs, once each, the watched calls made by this file or by a file beside it."""

    def __init__(self, file: Path, log: Path):
        self.folder, self.log, self.seen = str(file.resolve().parent), log, set[Call]()

    def is_theirs(self, frame) -> bool:
        return frame.f_code.co_filename.startswith(self.folder)

    def hear(self, kind: str, what: str, seeded: bool = False, through: bool = False, made: bool = False) -> bool:
        """Whether the file made this call: directly, or with `through` also indirectly."""
        place, when = None, ""
        frame: FrameType | None = sys._getframe(2)
        direct = True
        while frame:
            if place is None and self.is_theirs(frame) and (direct or through):
                place = (frame.f_code.co_name, frame.f_lineno)
            when = when or PHASES.get(frame.f_code.co_name, "")
            direct, frame = False, frame.f_back
            if place is None and not through:
                return False
        if place is None:
            return False
        call = Call(kind, what, *place, when, seeded, made)
        if call not in self.seen:
            self.seen.add(call)
            with open(self.log, "a") as file:
                file.write(json.dumps(asdict(call)) + "\n")
        return True


def install(file: Path, log: Path, backwards: bool = False, several: bool = False) -> None:
    """Watch this process from now on. backwards: reverse the folder listings that the file gets. several: several ranks run.

    With several ranks, the writer of a new file waits 0.5 s first, so that other ranks that look for the file miss it.
    """
    if not Path(file).is_file():
        return
    witness = Witness(Path(file), Path(log))
    for kind, names in WATCHED.items():
        for name in names:
            module, _, function = name.rpartition(".")
            if module.partition(".")[0] == "numpy" and "numpy" not in sys.modules:
                continue
            owner = importlib.import_module(module)
            watched = getattr(owner, function, None)
            if kind == "listing":
                setattr(owner, function, _listing(witness, watched, name, backwards))
            elif isinstance(watched, type):
                setattr(owner, function, _kind_of(witness, watched, name))
            elif watched:
                setattr(owner, function, _watched(witness, watched, kind, name))
    get = os._Environ.__getitem__

    def read(environ, name):
        if name in IDENTITY:
            witness.hear("ranks", f"os.environ[{name!r}]", through=True)
        return get(environ, name)

    setattr(os._Environ, "__getitem__", read)  # noqa: B010 - mypy takes an assignment for a mistake
    sys.addaudithook(_hears_writing(witness, several))


def _watched(witness: Witness, function, kind: str, name: str):
    @functools.wraps(function)
    def watched(*arguments, **keywords):
        if kind == "write":
            path = arguments[1] if len(arguments) > 1 else next(iter(keywords.values()), "")
            made = isinstance(path, str | Path) and not os.path.exists(path)
            witness.hear(kind, str(path), made=made)
        else:
            witness.hear(kind, name, seeded=bool(arguments or keywords))
        return function(*arguments, **keywords)

    return watched


def _kind_of(witness: Witness, kind: Any, name: str) -> type:
    """A class that reports when an instance is made. isinstance and subclasses work as before."""

    class Kind(type(kind)):  # type: ignore[misc]
        def __call__(cls, *arguments, **keywords):
            # torch.Generator() starts with the same seed everywhere.
            witness.hear("generator", name, seeded=bool(arguments or keywords) or name == "torch.Generator")
            return kind(*arguments, **keywords)

        def __instancecheck__(cls, instance):
            return isinstance(instance, kind)

    try:
        return Kind(kind.__name__, (kind,), {"__module__": kind.__module__})
    except TypeError:  # a class that allows no subclass
        return kind


def _listing(witness: Witness, function, name: str, backwards: bool):
    def listed(*arguments, **keywords):
        if not witness.hear("listing", name, through=True) or not backwards:
            return function(*arguments, **keywords)
        entries = function(*arguments, **keywords)
        if isinstance(entries, list):
            return entries[::-1]
        with entries:
            return Entries([*entries][::-1])

    return listed


class Entries(contextlib.AbstractContextManager, Iterator):
    """Stands for the result of os.scandir, with these entries."""

    def __init__(self, entries: list):
        self.entries = iter(entries)

    def __next__(self):
        return next(self.entries)

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to close."""


def _hears_writing(witness: Witness, several: bool):
    waited: set[str] = set()

    def hear(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.rename") or isinstance(arguments[0], int):
            return
        path, mode, flags = arguments if event == "open" else (arguments[1], "w", 0)
        path, mode, flags = str(path), mode or "", flags or 0
        writes = any(letter in mode for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR)
        if not writes or path.startswith(("/dev/", str(witness.log.parent))) or os.path.isdir(path):
            return
        # A file made with O_EXCL or renamed into place is never seen half written.
        alone = event == "os.rename" or "x" in mode or flags & os.O_EXCL
        heard = witness.hear("file" if alone else "write", path, through=True, made=not os.path.exists(path))
        if heard and several and not alone and len(waited) < 3 and path not in waited:
            waited.add(path)
            time.sleep(0.5)

    return hear


def read(log: Path) -> list[Call]:
    """The calls in the log of one rank, which is made at the first."""
    return [Call(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []

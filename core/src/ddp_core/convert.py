"""Converts a checkpoint of a published DDP example to a snapshot, which train.py resumes like its own.

    python -m ddp_core.snapshot convert OLD.pt --run-dir DIR [flags of train.py]

Only this module reads a pickle, with torch's safe unpickler. In that a file could still run code before torch 2.6
(CVE-2025-32434) and 2.10 (CVE-2026-24747, https://github.com/pytorch/pytorch/security/advisories/GHSA-63cw-57p8-fm3p).
"""

import argparse
import re
import resource
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ddp_core import data, state
from ddp_core.build import in_precision
from ddp_core.config import Parser, TrainConfig, choose, number, parse
from ddp_core.device import versions
from ddp_core.errors import Failure, PreflightError, SnapshotError, UsageError, printable
from ddp_core.files import in_place
from ddp_core.run_directory import RunDirectory
from ddp_core.workload import Workload

# Names of the parts: MODEL_STATE and EPOCHS_RUN by pytorch's ddp-tutorial-series and OLCF's example; model_state,
# optimizer_state_dict, scheduler_state_dict, epoch and iters by NERSC's tutorials.
MODEL = ("MODEL_STATE", "model_state", "model_state_dict")
OPTIMIZER = ("optimizer_state_dict", "optimizer_state", "optimizer")
EPOCH = ("EPOCHS_RUN", "epoch")  # in all these programs the 0-based index of the last finished epoch
STATES = {"sgd": {"momentum": "momentum_buffer"}, "adamw": {"mean": "exp_avg", "square": "exp_avg_sq"}}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_EPOCHS = 10**6


def main(argv: list[str]) -> int:
    """The command line; returns the exit code (errors.py)."""
    parser = Parser(
        usage="python -m ddp_core.snapshot convert OLD.pt --run-dir DIR [--world-size N] [--epochs-run N] [flags of train.py]",
        description="Make a snapshot from what torch.save wrote: {MODEL_STATE, EPOCHS_RUN}; {model_state, epoch, iters, "
        "optimizer_state_dict, ...}; or a bare state_dict; with or without `module.` in the names. Parameters, momentum or "
        "AdamW's moments, and epochs run are taken over. Flags of train.py: those of the run that is to go on.",
        epilog="exit codes: 0 done, 2 usage, 3 torch is older than 2.10 or DIR has a run, 5 OLD.pt cannot be used, 8 storage",
        allow_abbrev=False,
    )
    size, count = number(int, 1, 2**20), number(int, 0, MOST_EPOCHS)
    parser.add_argument("convert", choices=["convert"], help=argparse.SUPPRESS)
    parser.add_argument("old", type=Path, metavar="OLD.pt")
    parser.add_argument("--world-size", type=size, default=1, metavar="N", help="ranks, for --per-rank-batch-size (default: 1)")
    parser.add_argument("--epochs-run", type=count, metavar="N", help="count N epochs as run, whatever the file says")
    try:
        args, others = parser.parse_known_args(argv)
        workload = choose(others)
        config = parse(others, args.world_size, workload=workload)
        convert(args.old, workload, config, args.world_size, args.epochs_run)
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    return 0


def convert(old: Path, workload: Workload, config: TrainConfig, world_size: int, epochs_run: int | None) -> None:
    """Write the snapshot into config.run_dir, or nothing. Raises a Failure that names the file and what does not fit."""
    if workload.overrides("optimizer"):
        raise UsageError(
            f"--workload {workload.name} has an optimizer of its own: only SGD and AdamW of the flags are converted"
        )
    content, rows = _load(old), data.of_workload(workload, config)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    net = in_precision(workload.model(config), dtype)
    mine = {name.removeprefix("model."): tensor for name, tensor in state.of_model(net).items()}
    trained = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    first = {id(tensor): name for name, tensor in net.named_parameters()}
    every = net.named_parameters(remove_duplicate=False)
    tied = {name: first[id(tensor)] for name, tensor in every if name not in mine}
    model = _fitted(old, next((content[key] for key in MODEL if key in content), content), mine, dtype, tied)
    moments, moments_step = _moments(old, content, trained, dtype, config)

    steps, of_flag = config.steps_of(len(rows[0])), epochs_run is not None
    if epochs_run is None:
        key = next((key for key in EPOCH if key in content), None)
        epochs_run = _count(old, content, key, MOST_EPOCHS) + 1 if key else 0
        says = f"{key}={epochs_run - 1} is the last epoch that was finished" if key else "no epoch is in the file"
        print(f"{says}: {epochs_run} epochs run (--epochs-run N if it is not so)")
    step = epochs_run * steps
    done = _count(old, content, "iters", 2**53) if "iters" in content else moments_step
    if not of_flag and done not in (None, step):
        raise SnapshotError(
            f"{old} was saved after {done} steps, but {epochs_run} epochs of these flags are {step} ({steps} an epoch): pass "
            f"that run's batch size; if it was saved within an epoch, --epochs-run N goes on from the start of epoch N"
        )
    if moments_step not in (None, step):  # AdamW's bias correction depends on the step
        print(f"the optimizer's state is of step {moments_step}, and this is {step}: it is left out")
        moments = {}
    for theirs in STATES[config.optimizer].values():
        if theirs not in moments:
            print(f"{theirs}: the file has none for all parameters, it begins at zero")
            moments[theirs] = {name: torch.zeros(parameter.shape, dtype=dtype) for name, parameter in trained.items()}
    if any(key.startswith("scheduler") for key in content):
        print("the scheduler's state is not needed: the learning rate is a function of the step (--lr-schedule)")
    print("losses of earlier epochs are not in the file: the history has none, and the next evaluation is the best so far")

    parts = {"model": model} | {f"optim.{ours}": moments[theirs] for ours, theirs in STATES[config.optimizer].items()}
    if config.optimizer == "adamw":
        parts["optim.step"] = {name: torch.tensor(float(step)) for name in trained}
    elif not config.momentum:
        del parts["optim.momentum"]
    tensors = {f"{part}.{name}": values for part, named in parts.items() for name, values in named.items()}
    fingerprint, *_ = data.fingerprint(*rows, workload, config)
    facts = dict(problem=config.problem(), data=fingerprint, steps_per_epoch=steps, world_size=world_size, versions=versions())
    progress = state.Progress(step=step, history=[[epoch] for epoch in range(epochs_run)])
    directory = RunDirectory(config.run_dir, "convert", config.fresh, new=True, most=config.max_shard_size)
    try:
        directory.save(tensors, facts | progress.document())
    finally:
        directory.release()
    print(f"wrote {in_place(directory.snapshot)}: train.py with these flags goes on at step {step}, {epochs_run} epochs run")


def _load(old: Path) -> dict:
    """The dictionary in the file. Raises SnapshotError for any other content, PreflightError if torch is too old."""
    if torch.__version__ < "2.10":
        raise PreflightError(
            f"torch {torch.__version__} is older than 2.10, and a checkpoint can make its safe unpickler run code "
            f"(CVE-2026-24747): convert where torch is newer; it may train with this one"
        )
    if not old.is_file():
        raise SnapshotError(f"{old} is no file")
    try:
        with zipfile.ZipFile(old) as archive:
            _refuse_damaged(archive, old.stat().st_size)
        with _memory_for(old.stat().st_size):
            content = torch.load(old, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile file can make the unpickler raise anything
        match = re.search(r"GLOBAL ([\w.]{1,80})", str(error))
        why = f"it holds {match[1]}, which is no plain data" if match else f"{type(error).__name__}: {printable(str(error))}"
        raise SnapshotError(f"{old} is not a checkpoint that can be read safely ({why})") from error
    return _dictionary(old, content)


def _dictionary(old: Path, value: object) -> dict[str, Any]:
    """A plain copy of a dictionary of names: a file's OrderedDict may have attributes that hide its methods."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in dict.keys(value)):
        raise SnapshotError(f"{old} holds {type(value).__name__}, but should hold a dictionary of names")
    return dict(dict.items(value))


def _refuse_damaged(archive: zipfile.ZipFile, size: int) -> None:
    """Raises ValueError for a damaged archive, before torch reads it: torch checks no checksum."""
    entries = archive.infolist()
    if any(entry.compress_type for entry in entries):
        raise ValueError("its entries are compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("its entries overlap, which torch.save never makes")
    if broken := archive.testzip():
        raise ValueError(
            f"the checksum of {broken} differs: it is damaged, or torch.serialization.set_crc32_options(False) was in force"
        )


@contextmanager
def _memory_for(size: int):
    """Limit the memory for reading, in proportion to the file's size in bytes: a small hostile file could take all memory."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    used: Any = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    most = (int(used[1]) << 10) + 2 * size + 2**28
    resource.setrlimit(resource.RLIMIT_DATA, (most if limits[0] < 0 else min(most, limits[0]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def _plain(values: object) -> torch.Tensor | None:
    """The numbers of a dense CPU tensor, else None. A file may have added attributes that hide a tensor's methods."""
    if type(values) not in (torch.Tensor, torch.nn.Parameter):
        return None
    tensor = torch.Tensor.detach(values)  # type: ignore[arg-type]
    return tensor if tensor.is_cpu and state.dense(tensor) else None


def _fitted(
    old: Path, value: object, mine: dict, dtype: torch.dtype, tied: dict[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """A state_dict's tensors: real numbers in `dtype`, others unchanged. Raises SnapshotError that lists what differs.

    tied: other names of a tied tensor, to the one name that a snapshot has.
    """
    named = _dictionary(old, value)
    # DDP's prefix is on all names or on none.
    prefix = "module." if all(name.startswith("module.") for name in named) else ""
    named = {name.removeprefix(prefix): values for name, values in named.items()}
    twice = {name: (named.pop(name), first) for name, first in (tied or {}).items() if name in named}
    wrong = [f"{printable(name)}: {'missing' if name in mine else 'unexpected'}" for name in mine.keys() ^ named.keys()]
    for name, (values, first) in twice.items():
        one, other = _plain(values), _plain(named.get(first))
        if one is None or other is None or one.dtype != other.dtype or not torch.equal(one, other):
            wrong.append(f"{name}: another tensor than {first}, and here they are one")
    for name in mine.keys() & named.keys():
        values = named[name] = _plain(theirs := named[name])
        real = mine[name].is_floating_point()
        if values is None or (values.dtype not in FLOATS if real else values.dtype != mine[name].dtype):
            kind = "real numbers" if real else str(mine[name].dtype)
            wrong.append(
                f"{name}: {type(theirs).__name__ if values is None else values.dtype}, but should be a tensor of {kind}"
            )
        elif values.shape != mine[name].shape:
            wrong.append(f"{name}: {printable(str(tuple(values.shape)))} there, {tuple(mine[name].shape)} here")
        elif not values.isfinite().all():
            wrong.append(f"{name}: not finite")
        elif real and not torch.equal(values.to(dtype).to(values.dtype), values):
            wrong.append(f"{name}: {values.dtype} numbers that {dtype} rounds: pass --precision fp64")
    if wrong:
        raise SnapshotError(f"{old} does not fit the model of these flags ({'; '.join(sorted(wrong)[:8])}): pass that run's")
    return {name: named[name].to(dtype if mine[name].is_floating_point() else mine[name].dtype) for name in mine}


def _moments(old: Path, content: dict, mine: dict, dtype: torch.dtype, config: TrainConfig) -> tuple[dict, int | None]:
    """Momentum, or AdamW's two moments, by parameter name, and AdamW's step. Empty unless the file has all of them."""
    theirs: Any = next((content[key] for key in OPTIMIZER if key in content), None)
    try:
        [group] = theirs["param_groups"]  # the order of several groups is not the model's
        states = [theirs["state"][index] for index in group["params"]]
        lists = {key: [state[key] for state in states] for key in STATES[config.optimizer].values()}
        [step] = {int(state["step"]) if config.optimizer == "adamw" else None for state in states}
    except Exception:  # a hostile file can make these raise anything
        return {}, None
    if any(len(values) != len(mine) or any(value is None for value in values) for values in lists.values()):
        return {}, None
    return {key: _fitted(old, dict(zip(mine, values, strict=True)), mine, dtype) for key, values in lists.items()}, step


def _count(old: Path, content: dict, key: str, most: int) -> int:
    value = content[key]
    if type(value) is not int or not 0 <= value < most:
        shown = value if type(value) is int and value.bit_length() < 64 else type(value).__name__
        raise SnapshotError(f"{old}: {key}={shown} is no whole number from 0 to {most:g}")
    return value

"""TrainConfig: the training choices, each declared once with its flag.

Job geometry (nodes, ranks, devices) is in the batch script, process identity in the environment; neither is here.
A workload's file holds its defaults and its own flags: `config.width` is the value of its flag --width.
"""

import argparse
import difflib
import json
import math
import re
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from ddp_core.errors import UsageError

SHARDS = 8  # default of --shards: fits 1, 2, 4 and 8 ranks


def number(kind, low, high, above=False):
    """An argparse type: a number from `low` (or above it) to `high`; any other text is a one-line error."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or "_" in text or not text.isascii() or not low <= value <= high or (above and value == low):
            noun = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {noun} {'above' if above else 'from'} {low} to {high:g}")
        return value

    return convert


def size_in_bytes(text: str) -> int:
    """An argparse type: 2GB, 500MB, or a number of bytes. Returns bytes; units are powers of 1000."""
    match = re.fullmatch(r"(\d{1,15})(KB|MB|GB|TB|)", text.upper(), re.ASCII)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 2GB, 500MB or 4096 (bytes)")
    return int(match[1]) * 1000 ** ["", "KB", "MB", "GB", "TB"].index(match[2])


def _flag(default: Any, text: str, **keywords: Any) -> Any:
    """A field that a flag of its name sets: the default, the help, and more arguments of argparse's add_argument."""
    return field(metadata=dict(default=default, help=text, **keywords))


_count, _size = (partial(_flag, type=number(int, low, 2**53), metavar="N") for low in (0, 1))
_positive = partial(_flag, type=number(float, 0, 1e9, above=True), metavar="X")
_share = partial(_flag, type=number(float, 0, 1e9), metavar="X")
_seconds = partial(_flag, type=number(float, 0, 1e7, above=True), metavar="S")
_switch = partial(_flag, False, action="store_true")


@dataclass(frozen=True)
class TrainConfig:
    """Every training choice of a run, resolved: no None is left for the trainer to interpret."""

    own: dict  # the workload's own flags
    remembered: tuple[str, ...]  # the choices that determine the losses

    # What is trained.
    workload: str = _flag(None, "digits, regression, mnist, gpt, or a file of yours (default: digits)", metavar="NAME|FILE")
    epochs: int = _size(10, "epochs in all, counted from the start of the run")
    steps_per_epoch: int = _count(0, "steps an epoch (default: as many as the rows fill)")
    global_batch_size: int = _size(None, "rows a step, over all ranks")
    accumulate: int = _size(1, "micro-batches a step, to save memory (default: 1)")  # in one rank's share of it
    seed: int = _count(0, "of initial parameters, order, augmentation, dropout (default: 0)")

    # How its parameters are updated.
    optimizer: str = _flag("sgd", "SGD with momentum, or AdamW", choices=["sgd", "adamw"])
    lr: float = _positive(0.01, "learning rate")  # the field's value: after --scale-lr
    momentum: float = _share(0.9, "of SGD; AdamW's beta1 (beta2: 0.95)")
    weight_decay: float = _share(0.0, "L2 with sgd, decoupled with adamw (default: 0)")
    lr_schedule: str = _flag("constant", "cosine: to 0 at the end (default: constant)", choices=["constant", "cosine"])
    warmup_steps: int = _count(0, "the learning rate rises linearly over them (default: 0)")
    clip_norm: float = _share(0.0, "scale gradients down to this norm (default: 0, not clipped)")

    # What computes it, and how ranks meet and rows are read.
    device: str = _flag("auto", "auto: the accelerator if one is visible", choices=["auto", "cpu", "cuda", "xpu"])
    backend: str = _flag("auto", "auto: the one for the device", choices=["auto", "gloo", "nccl", "xccl"])
    precision: str = _flag("fp32", "of arithmetic (default: fp32)", choices=["fp64", "fp32", "tf32", "bf16", "fp16"])
    reduction: str = _flag(
        "ddp",
        "of gradients. ddp: DistributedDataParallel; flat: in one piece after backward; canonical: in --shards, for the "
        "same bits at every world size (deterministic, one thread a rank on the CPU; slower) (default: ddp)",
        choices=["ddp", "flat", "canonical"],
    )
    sharding: str = _flag(
        "none",
        "full: a rank keeps a part of the model; hybrid: within a node (default: none)",
        choices=["none", "full", "hybrid"],
    )
    checkpoint_activations: bool = _switch("keep no outputs within the model's layers: less memory, slower")
    offload: bool = _switch("with --sharding: parameters and optimizer on the CPU between uses")
    # The field's value is 0 without --reduction canonical.
    shards: int = _size(None, f"with canonical: parts of a step, ranks x a power of two (default: {SHARDS})")
    deterministic: bool = _switch("only kernels that repeat bit for bit, on an accelerator")
    compile: bool = _switch("torch.compile; measured slower on CPU for these models")
    workers: int = _count(0, "processes a rank for data that are read row by row (default: 0)")
    row_seeds: str = _flag("on", "seed generators for each such row (default: on)", choices=["on", "off"])
    stage_data: str = _flag("on", "read each data file once a node, if memory has room (default: on)", choices=["on", "off"])
    rendezvous_timeout: float = _seconds(120.0, "seconds for all ranks to meet (default: 120)")
    timeout: float = _seconds(600.0, "seconds for one collective (default: 600)")

    # What is saved and reported.
    run_dir: str = _flag(None, "snapshots and run.jsonl; what is there is resumed (default: runs/WORKLOAD)", metavar="DIR")
    # The field's value: whether the run directory belongs to one job.
    new_run_dir: bool = _flag(None, "of job scripts: the same, but refused if another job has left a run there", metavar="DIR")
    fresh: bool = _switch("start again; the run that is there is moved to DIR/old-N")
    save_every: int = _size(1, "epochs between snapshots (default: 1)")
    save_minutes: float = _share(10.0, "also save every M minutes (default: 10; 0: never)", metavar="M")
    save_steps: int = _count(0, "also save every N steps (default: 0, never)")
    max_shard_size: int = _flag(
        2 * 10**9, "a larger snapshot is a set of such files and an index (default: 2GB)", type=size_in_bytes, metavar="SIZE"
    )
    grace: float = _share(0.0, "seconds from signal to kill: notes slower saves (default: 0)", metavar="S")
    eval_every: int = _size(1, "epochs between evaluations (default: 1)")
    log_every: int = _size(10, "steps between records of the loss (default: 10)")
    log_seconds: float = _share(30.0, "seconds between lines of progress (default: 30; 0: none)", metavar="S")
    profile: int = _size(0, "trace N steps (10) of rank 0: DIR/trace.json.gz, for ui.perfetto.dev", nargs="?", const=10)
    debug: bool = _switch("tracebacks and C++ messages along with the one-line errors")

    passed: tuple[str, ...] = ()  # flags of OF_THE_OPTIMIZER that the command line gives

    def __getattr__(self, name: str):
        own = self.__dict__.get("own", {})
        if name in own:
            return own[name]
        raise AttributeError(f"there is no flag --{name.replace('_', '-')} (config.{name})")

    def steps_of(self, rows: int) -> int:
        """Steps per epoch. Rows that do not fill a global batch are left out; the next epoch's order leaves out others."""
        return min(rows // self.global_batch_size, self.steps_per_epoch or rows)

    def problem(self) -> dict:
        """The choices that determine the losses: a snapshot resumes only if they are equal."""
        return {name: _comparable(getattr(self, name)) for name in self.remembered}

    def facts(self) -> dict:
        """All choices as numbers and texts, for the start record and for the ranks to compare."""
        plain = {choice.name: getattr(self, choice.name) for choice in fields(self) if choice.metadata}
        for name, value in self.own.items():
            plain[name] = _comparable(value) if isinstance(value, str | int | float | None) else _in_words(value)
        return plain


def _in_words(value) -> str:
    """A text that is equal on all ranks: sets are sorted and addresses cut out, since both differ by process."""
    text = f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, set | frozenset) else str(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _comparable(value):
    """The value as a snapshot's JSON returns it. NaN and infinity become texts: JSON lacks both, and NaN != NaN."""
    if isinstance(value, list | tuple):
        return [_comparable(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): _comparable(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)) else value


def _refuse_unknown_kinds(own: dict, workload) -> None:
    """Raise WorkloadError where a remembered own flag has a value that JSON, and so a snapshot, cannot hold."""
    for name, value in own.items():
        try:
            json.dumps(_comparable(value))
        except TypeError as error:  # "Object of type set is not JSON serializable"
            kind = str(error).split()[3]
            raise workload.unusable(
                f"--{name.replace('_', '-')} has a value of the type {kind}, and a snapshot remembers texts, numbers, paths, "
                "and lists of them: take one of these, or add(..., remembered=False)"
            ) from error


# Remembered for every workload. `epochs` is added where a schedule or a loss depends on the length of the run.
REMEMBERED: tuple[str, ...] = ("workload", "steps_per_epoch", "global_batch_size", "optimizer", "lr", "momentum")
REMEMBERED += ("weight_decay", "lr_schedule", "warmup_steps", "clip_norm", "row_seeds", "precision", "seed")

OF_THE_OPTIMIZER = ("optimizer", "momentum", "weight_decay")  # no effect if a workload's optimizer() does not read them

GROUPS = dict(workload="problem", optimizer="optimizer", device="machine", run_dir="run")  # of --help, by their first flag

# Flags for which a workload cannot set a default: find_run.py must find the run from the command line alone.
COMMAND_LINE_ONLY = ("help", "workload", "run_dir", "new_run_dir", "fresh")


def choose(argv: list[str], default: str | type = "digits"):
    """The workload that --workload names; without the flag, `default` (a name, file or class). Raises WorkloadError."""
    from ddp_core.workload import find

    workload = find(looked_up(argv, "workload").get("workload", default))
    refuse_other_default_device(workload)
    return workload


def refuse_other_default_device(workload) -> None:
    """Raises WorkloadError for torch.set_default_device() in a workload's file: it would also move the core's small tensors."""
    import torch

    try:
        kind = torch.get_default_device().type
    except (AssertionError, RuntimeError):  # get_default_device() makes a tensor there
        kind = "one that this machine lacks"
    if kind != "cpu":
        torch.set_default_device(None)  # this rank still has to send the refusal to the others
        raise workload.unusable(f"torch's default device is {kind}: take set_default_device out, pass --device")


def looked_up(argv: list[str], *names: str) -> dict[str, str]:
    """Those of these flags that the command line has, as texts. Raises UsageError."""
    flags = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in names:
        flags.add_argument(f"--{name.replace('_', '-')}")
    return vars(flags.parse_known_args(argv)[0])


def parse(argv: list[str], world_size: int, quiet: bool = False, workload=None) -> TrainConfig:
    """Parse flags into a TrainConfig. Raises UsageError that names the flag and its value; --help prints and exits.

    quiet: print no help (every rank but 0). workload: the one that choose() returned.
    """
    workload = workload or choose(argv)
    parser, own_flags = _parser(workload, quiet)
    values = vars(parser.parse_args(argv))
    if unknown := sorted(workload.defaults.keys() - values.keys()):
        raise workload.unusable(f"its defaults name {', '.join(unknown)}, and there is no such flag")
    if not (values["global_batch_size"] or values["per_rank_batch_size"]):
        values["global_batch_size"] = workload.defaults.get("global_batch_size", 96)
        values["per_rank_batch_size"] = workload.defaults.get("per_rank_batch_size")
    own = {name: values.pop(name) for name in own_flags}
    per_rank = values.pop("per_rank_batch_size")
    values["global_batch_size"] = _global_batch_size(values["global_batch_size"], per_rank, values["accumulate"], world_size)
    values["shards"] = _shards(values, world_size)
    if values["shards"]:  # a rank's shards are its micro-batches; default kernels of an accelerator may not repeat
        values["accumulate"], values["deterministic"] = values["shards"] // world_size, True
    _refuse_sharding(values)
    values["lr"] *= world_size if values.pop("scale_lr") else 1
    values["workload"] = workload.name
    values["passed"] = tuple(looked_up(argv, *OF_THE_OPTIMIZER))
    new = values.pop("new_run_dir")
    values["new_run_dir"] = bool(new and not values["run_dir"])
    values["run_dir"] = values["run_dir"] or new or f"runs/{workload.name}"
    remembered = (*REMEMBERED, *(name for name in own if own_flags[name]))
    _refuse_unknown_kinds({name: own[name] for name in remembered if name in own}, workload)
    if values["lr_schedule"] == "cosine" or workload.overrides("schedule") or workload.reads("epochs"):
        remembered += ("epochs",)
    return TrainConfig(own=own, remembered=remembered, **values)


def _global_batch_size(global_batch_size: int, per_rank: int | None, accumulate: int, world_size: int) -> int:
    """Rows per step over all ranks; each rank gets an equal number, in `accumulate` equal parts. Raises UsageError."""
    if per_rank:
        if per_rank % accumulate:
            raise UsageError(f"--per-rank-batch-size {per_rank} does not divide by --accumulate {accumulate}")
        return per_rank * world_size
    parts = world_size * accumulate
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        fits = [str(size) for size in (below, below + parts) if size]
        ranks = f"{world_size} ranks x " if world_size > 1 else ""
        what = f"--global-batch-size {global_batch_size} does not divide by {ranks}--accumulate {accumulate}"
        # A run that resumes keeps its batch size, so it needs other ranks.
        sizes = range(1, min(global_batch_size, 4096) + 1)
        worlds = [str(size) for size in sizes if global_batch_size % (size * accumulate) == 0]
        others = f", or one of {', '.join(worlds)} ranks" if worlds else ""
        raise UsageError(f"{what}: take {' or '.join(fits)}{others}")
    return global_batch_size


def _shards(flags: dict, world_size: int) -> int:
    """Micro-batches of a step over all ranks under --reduction canonical, whose sums nest (tree_sum); else 0."""
    if flags["reduction"] != "canonical":
        if flags["shards"]:
            raise UsageError(f"--shards {flags['shards']} is for --reduction canonical, not {flags['reduction']}")
        return 0
    shards, size = flags["shards"] or SHARDS, flags["global_batch_size"]
    if flags["accumulate"] > 1:
        raise UsageError(f"--accumulate {flags['accumulate']}: with --reduction canonical raise --shards {shards} instead")
    fits = [world_size << power for power in range(size.bit_length()) if size % (world_size << power) == 0]
    if shards not in fits and (world_size > 1 or size % shards):
        raise UsageError(
            f"--shards {shards} is not {world_size} ranks x a power of two that divides --global-batch-size {size}: "
            f"take {', '.join(map(str, fits))}"
        )
    return shards


def _refuse_sharding(flags: dict) -> None:
    """Raise UsageError for flags that do not work with --sharding."""
    sharding = flags["sharding"]
    if sharding == "none":
        if flags["offload"]:
            raise UsageError("--offload is for --sharding full or hybrid, not none")
        return
    if flags["reduction"] != "ddp":
        raise UsageError(f"--reduction {flags['reduction']} is for whole models: leave it out with --sharding {sharding}")
    if flags["compile"]:
        raise UsageError(f"--compile is not made for --sharding {sharding}: leave one of them out")
    if flags["offload"] and flags["precision"] == "fp16":
        raise UsageError("--offload keeps gradients where fp16's scaler does not reach: pass --precision bf16")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        unknown = [word.partition("=")[0] for word in message.partition("unrecognized arguments: ")[2].split()][:1]
        close = [near for word in unknown for near in difflib.get_close_matches(word, self._option_string_actions, 1, 0.7)]
        hints = [*close[:1], *(f"--workload {word}" for word in unknown if word.endswith(".py"))]
        raise UsageError(f"{message} ({f'is it {hints[0]}? ' if hints else ''}train.py --help lists the flags)")


def _in_one_line(kind):
    """Wrap the type of a workload's own flag: argparse reports only a few kinds of error in one line; this makes it all."""

    def convert(text: str):
        try:
            return kind(text)
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            raise
        except (Exception, SystemExit) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {type(error).__name__}: {error}") from error

    convert.__name__ = getattr(kind, "__name__", repr(kind))
    return convert


def _parser(workload, quiet: bool) -> tuple[argparse.ArgumentParser, dict[str, bool]]:
    """Returns the parser, and the names of the workload's own flags, each with whether a snapshot remembers it."""
    parser = Parser(
        prog="train.py",
        description="Train one workload on all ranks of this job; what is in the run directory is resumed.",
        epilog="exit codes: 0 done, 2 usage or the workload's file, 3 preflight, 4 rendezvous or peers disagree, 5 snapshot "
        "unusable, 6 non-finite loss, 7 peer lost or hung, 8 storage, 75 stopped early and saved: resume with --run-dir",
        allow_abbrev=False,
    )
    if quiet:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
    batch = parser.add_mutually_exclusive_group()
    for choice in fields(TrainConfig):
        if choice.name in GROUPS:
            section = parser.add_argument_group(GROUPS[choice.name])
        if choice.metadata:
            group = batch if choice.name == "global_batch_size" else section
            group.add_argument(f"--{choice.name.replace('_', '-')}", **choice.metadata)
        if choice.name == "global_batch_size":
            batch.add_argument(
                "--per-rank-batch-size", type=number(int, 1, 2**53), metavar="N", help="rows a step on each rank"
            )
        if choice.name == "lr":
            section.add_argument("--scale-lr", action="store_true", help="multiply --lr by the world size")

    for action in parser._actions:
        if action.dest in workload.defaults:
            value = _fitting(workload, action)
            without = re.sub(r" \(default: .*\)$", "", action.help or "")
            action.help = f"{without} (default: {str(value).replace('%', '%%')})"
            if not action.dest.endswith("batch_size"):  # parse() sets these: giving one must drop the default of the other
                action.default = value

    of_core = {action.dest for action in parser._actions} | {choice.name for choice in fields(TrainConfig)}
    own: dict[str, bool] = {}
    group = parser.add_argument_group(f"of --workload {workload.name}")

    def add_own(*names: str, remembered: bool = True, **keywords) -> None:
        if keywords.get("type") is bool:
            raise ValueError(f'{names[0]} has type=bool, which makes True of "False": action="store_true" is for switches')
        if keywords.get("type") is list:
            raise ValueError(f'{names[0]} has type=list, which makes letters of a word: nargs="+" is for lists')
        if not names[0].startswith("-"):
            raise ValueError(f"{names[0]} is no flag: call it '--{names[0]}'")
        default = keywords.get("default")
        if type(default) in (int, float) and not {"type", "action"} & keywords.keys():
            raise ValueError(f"{names[0]} has the default {default} and no type: give type={type(default).__name__}, or str")
        action = group.add_argument(*names, **keywords)
        if callable(action.type):
            action.type = _in_one_line(action.type)
        action.default = workload.defaults.get(action.dest, action.default)
        own[action.dest] = remembered and own.get(action.dest, True)  # two flags may set one value

    try:
        workload.flags(add_own)
    except Exception as error:
        raise workload.unusable(f"its flags() failed: {type(error).__name__}: {error}") from error
    if taken := [name for name in own if name in of_core or hasattr(TrainConfig, name)]:
        raise workload.unusable(f"its flag --{taken[0]} has a name that config has: give it another")
    return parser, own


def _fitting(workload, action: argparse.Action):
    """The workload's default for this flag. Raises WorkloadError if the flag would refuse it."""
    value, why = workload.defaults[action.dest], ""
    if action.dest in COMMAND_LINE_ONLY:
        why = f"--{action.dest.replace('_', '-')} is for the command line alone"
    elif action.choices and value not in action.choices:
        why = f"should be {' or '.join(action.choices)}"
    elif action.nargs == 0 and not isinstance(value, bool):
        why = "should be True or False"
    elif action.type:
        try:
            action.type(str(value))  # type: ignore[operator]
        except argparse.ArgumentTypeError as error:
            why = str(error)
    if why:
        raise workload.unusable(f"its defaults have {action.dest}={value!r}, but {why}")
    return value

"""TrainConfig: the training choices, and the flags that set them.

Job geometry (nodes, ranks, devices) is in the batch script, process identity in the environment; neither is here.
"""

import argparse
from dataclasses import dataclass

from ddp_core.errors import UsageError

# What each workload trains with unless a flag says otherwise. Global batches divide by 1, 2, 4, 8, 12, 16, 24, 32,
# 48 and 96 ranks. `regression` is OLCF's example for Frontier: its batch is per rank, so its problem grows with the world.
DEFAULTS = {
    "digits": dict(epochs=10, global_batch_size=96, optimizer="sgd", lr=0.1, momentum=0.9),
    "regression": dict(epochs=20, per_rank_batch_size=32, optimizer="sgd", lr=1e-3, momentum=0.0),
    "mnist": dict(epochs=3, global_batch_size=192, optimizer="sgd", lr=0.05, momentum=0.9),
    "gpt": dict(epochs=1, global_batch_size=96, optimizer="adamw", lr=1e-3, momentum=0.9),
}
SHARDS = 8  # of --reduction canonical, for worlds of 1, 2, 4 and 8


@dataclass(frozen=True)
class TrainConfig:
    """Every training choice of a run, resolved: no None is left for the trainer to guess at."""

    workload: str
    data_dir: str
    model_size: str
    epochs: int
    steps_per_epoch: int  # 0: as many full global batches as the training rows give
    global_batch_size: int  # rows a step, over all ranks
    accumulate: int  # micro-batches that one rank's share of a step is cut into
    shards: int  # with --reduction canonical: micro-batches of a step over all ranks; else 0
    optimizer: str
    lr: float  # after --scale-lr
    momentum: float
    weight_decay: float
    lr_schedule: str
    warmup_steps: int
    precision: str
    seed: int
    device: str
    backend: str
    reduction: str
    deterministic: bool
    compile: bool
    channels_last: bool
    run_dir: str
    fresh: bool
    save_every: int  # epochs
    eval_every: int  # epochs
    log_every: int  # steps
    rendezvous_timeout: float  # seconds
    timeout: float  # seconds
    debug: bool

    def problem(self) -> dict:
        """The choices that determine the losses: a snapshot resumes only under the same ones."""
        names = (
            *("workload", "model_size", "steps_per_epoch", "global_batch_size", "optimizer", "lr", "momentum"),
            *("weight_decay", "lr_schedule", "warmup_steps", "precision", "seed"),
        )
        problem = {name: getattr(self, name) for name in names}
        if self.lr_schedule == "cosine":
            problem["epochs"] = self.epochs  # the schedule is laid out over them
        return problem


def parse(argv: list[str] | None, world_size: int, quiet: bool = False) -> TrainConfig:
    """Flags to TrainConfig. Raises UsageError that names the flag and its value; --help prints and exits.

    quiet: print no help (every rank but 0).
    """
    flags = _parser(quiet).parse_args(argv)
    values = vars(flags)
    for name, value in DEFAULTS[flags.workload].items():
        batch_is_set = flags.global_batch_size or flags.per_rank_batch_size
        if values[name] is None and not (name.endswith("batch_size") and batch_is_set):
            values[name] = value
    values["global_batch_size"] = _global_batch_size(
        values["global_batch_size"], values.pop("per_rank_batch_size"), flags.accumulate, world_size
    )
    values["shards"] = _shards(flags, world_size)
    if flags.shards:  # a rank's shards are its micro-batches; the default kernels of an accelerator need not repeat
        values["accumulate"], values["deterministic"] = flags.shards // world_size, True
    values["lr"] *= world_size if values.pop("scale_lr") else 1
    values["run_dir"] = flags.run_dir or f"runs/{flags.workload}"
    if flags.model_size != "small" and flags.workload != "gpt":
        raise UsageError(f"--model-size {flags.model_size} is for --workload gpt, not {flags.workload}")
    if flags.data_dir and flags.workload not in ("mnist", "gpt"):
        raise UsageError(f"--data-dir {flags.data_dir}: --workload {flags.workload} brings its own data")
    if flags.channels_last and flags.workload != "mnist":
        raise UsageError(f"--channels-last is for images (--workload mnist), not {flags.workload}")
    return TrainConfig(**values)


def _global_batch_size(global_batch_size: int | None, per_rank: int | None, accumulate: int, world_size: int) -> int:
    """Rows a step over all ranks; every rank gets the same number of rows, in `accumulate` equal parts."""
    if per_rank:
        if per_rank % accumulate:
            raise UsageError(f"--per-rank-batch-size {per_rank} does not divide by --accumulate {accumulate}")
        return per_rank * world_size
    parts = world_size * accumulate
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        fits = [str(size) for size in (below, below + parts) if size]
        worlds = [str(size) for size in range(1, global_batch_size + 1) if global_batch_size % (size * accumulate) == 0]
        raise UsageError(
            f"--global-batch-size {global_batch_size} does not divide by {world_size} ranks x --accumulate {accumulate}: "
            f"take {' or '.join(fits)}, or one of {', '.join(worlds) or 'no'} ranks"
        )
    return global_batch_size


def _shards(flags: argparse.Namespace, world_size: int) -> int:
    """Of --reduction canonical: micro-batches of a step over all ranks, whose sums nest in each other (tree_sum); else 0."""
    if flags.reduction != "canonical":
        if flags.shards:
            raise UsageError(f"--shards {flags.shards} is for --reduction canonical, not {flags.reduction}")
        return 0
    shards, size = flags.shards or SHARDS, flags.global_batch_size
    if flags.accumulate > 1:
        raise UsageError(f"--accumulate {flags.accumulate}: with --reduction canonical raise --shards {shards} in its place")
    fits = [world_size << power for power in range(size.bit_length()) if size % (world_size << power) == 0]
    if shards not in fits and (world_size > 1 or size % shards):
        raise UsageError(
            f"--shards {shards} is not {world_size} ranks x a power of two that divides --global-batch-size {size}: "
            f"take {', '.join(map(str, fits))}"
        )
    return shards


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (train.py --help lists the flags)")


def number(kind, low, high, above=False):
    """An argparse type: a number from `low` (or above it) to `high`, else one line that says so."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high or (above and value == low):
            noun = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {noun} {'above' if above else 'from'} {low} to {high:g}")
        return value

    return convert


def _parser(quiet: bool) -> argparse.ArgumentParser:
    parser = Parser(
        prog="train.py",
        description="Train one workload on all ranks of this job; what is in the run directory is resumed.",
        epilog="exit codes: 0 done, 2 usage, 3 preflight, 4 rendezvous or peers disagree, 5 snapshot unusable, "
        "6 non-finite loss, 7 peer lost or hung, 8 storage, 75 stopped early and saved: submit again to resume",
        allow_abbrev=False,
    )
    if quiet:
        parser.print_help = lambda file=None: None
    count, size = number(int, 0, 2**53), number(int, 1, 2**53)
    positive, seconds, share = (number(float, 0, high, above) for high, above in ((1e9, True), (1e7, True), (1e9, False)))

    add = parser.add_argument_group("problem").add_argument
    add("--workload", choices=list(DEFAULTS), default="digits", help="what to train (default: %(default)s)")
    add("--data-dir", default="", metavar="DIR", help="mnist: the IDX files; gpt: text files (default: Python's own)")
    add("--model-size", choices=["tiny", "small", "medium"], default="small", help="of gpt (default: %(default)s)")
    add("--epochs", type=size, metavar="N", help="epochs in all, counted from the start of the run")
    add("--steps-per-epoch", type=count, default=0, metavar="N", help="end each epoch after N steps (default: all rows)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--global-batch-size", type=size, metavar="N", help="rows a step, over all ranks")
    batch.add_argument("--per-rank-batch-size", type=size, metavar="N", help="rows a step on each rank")
    add("--accumulate", type=size, default=1, metavar="N", help="micro-batches a step, to save memory (default: 1)")
    add("--seed", type=count, default=0, metavar="N", help="of the initial parameters and the sample order (default: 0)")

    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=["sgd", "adamw"], help="SGD with momentum, or AdamW")
    add("--lr", type=positive, metavar="X", help="learning rate")
    add("--scale-lr", action="store_true", help="multiply --lr by the world size")
    add("--momentum", type=share, metavar="X", help="of SGD; AdamW's beta1")
    add("--weight-decay", type=share, default=0.0, metavar="X", help="L2 with sgd, decoupled with adamw (default: 0)")
    add("--lr-schedule", choices=["constant", "cosine"], default="constant", help="cosine: to 0 at the last step")
    add("--warmup-steps", type=count, default=0, metavar="N", help="the learning rate rises linearly over them (default: 0)")

    add = parser.add_argument_group("machine").add_argument
    add("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto", help="auto: the accelerator if one is visible")
    add("--backend", choices=["auto", "gloo", "nccl", "xccl"], default="auto", help="auto: the one for the device")
    add("--precision", choices=["fp64", "fp32", "tf32", "bf16"], default="fp32", help="of the arithmetic (default: fp32)")
    add(
        "--reduction",
        choices=["auto", "flat", "ddp", "canonical"],
        default="auto",
        help="of gradients. flat: in one piece after backward; ddp: by DDP, during it; auto: flat up to 1 MiB, else ddp; "
        "canonical: in --shards, for the same bits at every world size (deterministic, one thread a rank on the CPU; slower)",
    )
    add("--shards", type=size, metavar="N", help=f"of canonical: parts of a step, ranks x a power of two (default: {SHARDS})")
    add("--deterministic", action="store_true", help="only kernels that repeat bit for bit, on an accelerator")
    add("--compile", action="store_true", help="torch.compile; measured slower on CPU for these models")
    add("--channels-last", action="store_true", help="convolutions in NHWC memory order")
    add("--rendezvous-timeout", type=seconds, default=120.0, metavar="S", help="for all ranks to meet (default: 120)")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="for one collective (default: 600)")

    add = parser.add_argument_group("run").add_argument
    add("--run-dir", metavar="DIR", help="snapshots and run.jsonl (default: runs/WORKLOAD)")
    add("--fresh", action="store_true", help="start again; the run that is there is moved to DIR/old-N")
    add("--save-every", type=size, default=1, metavar="N", help="epochs between snapshots (default: 1)")
    add("--eval-every", type=size, default=1, metavar="N", help="epochs between evaluations (default: 1)")
    add("--log-every", type=size, default=10, metavar="N", help="steps between records of the loss (default: 10)")
    add("--debug", action="store_true", help="tracebacks and C++ messages along with the one-line errors")
    return parser

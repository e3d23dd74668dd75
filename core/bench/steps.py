"""The time of a training step, and the memory of a rank: ours, an expert's DDP loop, Lightning and Accelerate.

Each contestant trains the same number of steps in each turn. A turn of ours has all of a user's run except evaluation
and snapshots: the order of the epoch, the guards, the ranks' exchange, and rank 0's records.
"""

import math
import statistics
import struct
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import Report, World, interleave, ratio, spread
from safetensors.torch import load_file

FLAGS = {  # by row of the table; a step of gpt small takes some seconds on two cores
    "regression": ["--workload", "regression"],
    "digits": ["--workload", "digits"],
    "mnist": ["--workload", "mnist", "--steps-per-epoch", "10"],
    "gpt tiny": ["--workload", "gpt", "--model-size", "tiny", "--steps-per-epoch", "4"],
    "U-Net": ["--workload", str(Path(__file__).parents[2] / "conformance/programs/unet.py")],
    "gpt small": ["--workload", "gpt", "--model-size", "small", "--steps-per-epoch", "1", "--global-batch-size", "8"],
}
CONTESTANTS = {  # name in the table: the program's name, its own flags
    "ours": ("ours", []),
    "bare": ("bare", []),
    "ours flat": ("ours", ["--reduction", "flat"]),
}
OTHERS = ["Lightning", "Lightning tuned", "Accelerate", "Accelerate tuned"]


def others(report: Report) -> list[str]:
    """Names of the others whose package is installed; the report names those that are left out."""
    there = [name for name in OTHERS if find_spec(name.split()[0].lower())]
    if missing := [name for name in OTHERS if name not in there]:
        report.say(f"\nNot installed here, and left out: {', '.join(missing)}.")
    return there


def race(contestants: dict, flags: list[str], world_size: int, rounds: int, turn_seconds: float = 0.5) -> dict[str, dict]:
    """By contestant, for each round: microseconds a step (us), in CPU time (cpu), and bytes of rank 0 (resident, peak, device).
    `differs`: the largest difference of its parameters from those of `bare` after one epoch.
    """
    with ExitStack() as stack:
        worlds = {}
        for name, (program, own) in contestants.items():
            worlds[name] = World(program, world_size, [*flags, *own])
            stack.callback(worlds[name].close)
        for world in worlds.values():
            world.ask(epochs=1)  # not timed: start, imports, compilation
        saved = {name: _parameters(world) for name, world in worlds.items()}
        seconds = max(reply["seconds"] for reply in worlds["bare"].ask(epochs=1))
        epochs = max(1, math.ceil(turn_seconds / seconds))

        def turn(name: str) -> dict[str, float]:
            """The slowest rank's times a step, and rank 0's memory."""
            replies = worlds[name].ask(epochs=epochs)
            figures = {kind: max(r[of] / r["steps"] for r in replies) * 1e6 for kind, of in (("us", "seconds"), ("cpu", "cpu"))}
            return figures | {kind: replies[0][kind] for kind in ("resident", "peak", "device")}

        turns = interleave({name: lambda name=name: turn(name) for name in worlds}, rounds)
    found = {name: {kind: [turn[kind] for turn in mine] for kind in mine[0]} for name, mine in turns.items()}
    for name, result in found.items():
        pairs = zip(saved[name], saved["bare"], strict=True)
        result["differs"] = max((a - b).abs().max().item() for a, b in pairs)
    return found


def write_idx(folder: Path) -> None:
    """Write the four files of MNIST, with random images and fewer rows."""
    numbers = torch.Generator().manual_seed(1)
    for split, count in (("train", 3840), ("t10k", 384)):
        images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=numbers)
        labels = torch.randint(10, (count,), dtype=torch.uint8, generator=numbers)
        for name, values in ((f"{split}-images-idx3-ubyte", images), (f"{split}-labels-idx1-ubyte", labels)):
            head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
            (folder / name).write_bytes(head + bytes(values.flatten().tolist()))


def _parameters(world: World) -> list[torch.Tensor]:
    """The parameters after one epoch, before rounding errors have grown."""
    path = world.path("parameters.safetensors")
    world.ask(save=str(path))
    return [tensor for _, tensor in sorted(load_file(path).items(), key=lambda item: int(item[0]))]


def measure(report: Report, works: list[str], world_sizes: list[int], rounds: int, common: list[str]) -> None:
    report.say(f"\n## A step: microseconds, and ratios within a round, median (min..max) of {rounds} rounds")
    there = others(report)
    report.table(
        *("workload", "ranks", "ours, us", "bare DDP, us", "ours / bare", "in CPU time", "ours flat / bare"),
        *(f"{name} / ours" for name in there),
        "parameters differ by",
    )
    raced, contestants = {}, CONTESTANTS | {name: (name, []) for name in there}
    for work in works:
        for size in world_sizes:
            with TemporaryDirectory(prefix="ddp-bench-") as folder:
                flags = FLAGS[work]
                if work == "mnist":
                    write_idx(Path(folder))
                    flags = [*flags, "--data-dir", folder]
                found = raced[work, size] = race(contestants, [*flags, *common], size, rounds)
            us = {name: result["us"] for name, result in found.items()}
            where = f"a step of {work}, ranks: {size}"
            row = [work, str(size), spread(us["ours"]), spread(us["bare"])]
            row.append(report.want(f"{where}, ours / bare", us["ours"], us["bare"], most=1.05))
            row += [ratio(found["ours"]["cpu"], found["bare"]["cpu"]), ratio(us["ours flat"], us["bare"])]
            row += [report.want(f"{where}, {name} / ours", us[name], us["ours"], least=1.0) for name in there]
            report.row(*row, f"{max(result['differs'] for result in found.values()):.0e}")
            report.raw[f"{work} {size}"] = found
    memory(report, raced, [name for name in there if "tuned" in name])


def memory(report: Report, raced: dict, tuned: list[str]) -> None:
    report.say("\n## Memory of rank 0: resident, MB, after the steps above; ratios of it, and of the peak since the start")
    columns = [f"{name} / ours" for name in tuned]
    report.table("workload", "ranks", "ours, MB", "bare DDP, MB", "ours / bare", "ours / bare, peak", *columns)
    for (work, size), found in raced.items():
        resident = {name: result["resident"] for name, result in found.items()}
        row = [f"{statistics.median(resident[name]) / 1e6:.0f}" for name in ("ours", "bare")]
        if work == "gpt small":
            row.append(report.want(f"memory of {work}, ranks: {size}", resident["ours"], resident["bare"], most=1.0))
        else:
            row.append(ratio(resident["ours"], resident["bare"]))
        row.append(ratio(found["ours"]["peak"], found["bare"]["peak"]))
        report.row(work, str(size), *row, *(ratio(resident[name], resident["ours"]) for name in tuned))

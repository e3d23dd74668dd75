"""How well a device is used: gpt's share of the rate of matrix products, waits of the host, and short steps.

Accelerators train gpt medium, 86 million parameters, under bf16. A CPU can only try this part out, with gpt tiny: it has no
device to wait for, so no limits apply.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from common import Report, World, ratio, spread
from steps import FLAGS, others, race

STEPS = 50  # in a trace
# Library calls in which the host waits for its device: CUDA's, ROCm's and, judging by their names, Level Zero's.
WAIT = re.compile(r"(cuda|hip|ze)\w*Synchronize")
REGRESSION = 8000  # steps that an accelerator should do in a second


def measure(report: Report, device: str, world_sizes: list[int], rounds: int, common: list[str]) -> None:
    share_of_products(report, device, world_sizes, rounds, common)
    waits(report, device, world_sizes, common)
    short_steps(report, device, world_sizes, rounds, common)


def share_of_products(report: Report, device: str, world_sizes: list[int], rounds: int, common: list[str]) -> None:
    """Time a step, and square bf16 products with as many operations: the ratio is the share."""
    size, rows, steps = ("tiny", 32, 2) if device == "cpu" else ("medium", 32, 10)
    want = wanting(report, device)
    report.say(f"\n## gpt {size} under bf16, {rows} rows a rank: share of the rate of matrix products, median (min..max)")
    names = ["bare", *(name for name in others(report) if "tuned" in name)]
    report.table("ranks", "ours, us", "ours", *names, *(f"{name} / ours" for name in names), "device memory, ours / bare")
    contestants = {name: (name, []) for name in ("ours", "products", *names)}
    for ranks in world_sizes:
        flags = ["--workload", "gpt", "--model-size", size, "--precision", "bf16", "--steps-per-epoch", str(steps)]
        found = race(contestants, [*flags, "--global-batch-size", str(rows * ranks), *common], ranks, rounds)
        us = {name: result["us"] for name, result in found.items()}
        where = f"gpt {size} under bf16, ranks: {ranks}"
        row = [spread(us["ours"]), want(f"{where}, share of products", us["products"], us["ours"], least=0.5)]
        row += [ratio(us["products"], us[name]) for name in names]
        row += [want(f"{where}, {name} / ours", us[name], us["ours"], least=1.0) for name in names]
        memory = found["ours"]["device"], found["bare"]["device"]
        row.append(want(f"{where}, device memory", *memory, most=1.05) if all(memory[1]) else "no accelerator")
        report.row(str(ranks), *row)
        report.raw[f"device {ranks}"] = found


def wanting(report: Report, device: str) -> Callable[..., str]:
    """report.want; for the CPU, the ratio without a limit."""
    return report.want if device != "cpu" else lambda what, over, under, **limits: ratio(over, under)


def waits(report: Report, device: str, world_sizes: list[int], common: list[str]) -> None:
    """Count waits in the trace of --profile. The ranks' exchange once a second waits, and no step does."""
    report.say(f"\n## Waits of rank 0 for its device in {STEPS} steps, by the trace of --profile")
    report.table("workload", "ranks", "waits a step", "where")
    for work in ("regression", "gpt tiny"):
        for ranks in world_sizes:
            flags = [*FLAGS[work], "--epochs", "1", "--steps-per-epoch", str(STEPS + 20), "--profile", str(STEPS)]
            world = World("our start", ranks, [*flags, *common])
            try:
                world.wait()
                seen = in_steps(world.path("run/trace.json.gz"))
            finally:
                world.close()
            count = wanting(report, device)(f"waits of a step of {work}, ranks: {ranks}", [seen.total()], [STEPS], most=0.5)
            report.row(work, str(ranks), count, ", ".join(f"{name} {times}" for name, times in seen.items()) or "none")
            report.raw[f"waits {work} {ranks}"] = seen


def in_steps(trace: Path) -> Counter:
    """Count the waits up to the end of the last optimizer step, by name."""
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    ends = [event["ts"] + event["dur"] for event in events if event["name"] == "optimizer"]
    if not ends:
        raise SystemExit(f"{trace}: no optimizer step is in it, so it tells nothing of waits")
    return Counter(event["name"] for event in events if WAIT.fullmatch(event["name"]) and event["ts"] < max(ends))


def short_steps(report: Report, device: str, world_sizes: list[int], rounds: int, common: list[str]) -> None:
    """Time steps that are so short that the host's work takes the time."""
    want = wanting(report, device)
    report.say(f"\n## {REGRESSION} steps of regression: seconds, median (min..max) of {rounds} rounds")
    contestants = {"ours": ("ours", []), "ours flat": ("ours", ["--reduction", "flat"]), "bare": ("bare", [])}
    report.table("ranks", *contestants)
    for ranks in world_sizes:
        found = race(contestants, [*FLAGS["regression"], *common], ranks, rounds)
        seconds = {name: [REGRESSION * us / 1e6 for us in result["us"]] for name, result in found.items()}
        want(f"{REGRESSION} steps of regression, ranks: {ranks}, s", seconds["ours"], [1.0] * rounds, most=1.0)
        report.row(str(ranks), *(spread(values, 2) for values in seconds.values()))
        report.raw[f"short {ranks}"] = found

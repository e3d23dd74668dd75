"""Seconds from the start of the processes to the end of the first step of digits.

Ours is a whole run as a user starts it, timed by the `seconds` in its run.jsonl. The others reply after the step.
"""

import json
import time

from common import Report, World, interleave, ratio, spread
from steps import others

FLAGS = ["--workload", "digits", "--steps-per-epoch", "1"]
CONTESTANTS = {
    "ours": ("our start", ["--epochs", "1"]),
    "bare": ("bare", []),
    "ours flat": ("our start", ["--epochs", "1", "--reduction", "flat"]),
}


def start(program: str, size: int, flags: list[str]) -> dict[str, float]:
    """When each phase of rank 0 ended, in seconds since before the first process began; `first_step` is the last."""
    world = World(program, size, flags)
    try:
        if program != "our start":
            world.ask(epochs=1)
            return {"first_step": time.monotonic() - world.began}
        python = world.replies()[0]["began"] - world.began
        world.wait()
        lines = world.path("run/run.jsonl").read_text().splitlines()
        ends = json.loads(lines[-1])["seconds"]
        return {"python": python} | {name: python + end for name, end in ends.items() if name != "training"}
    finally:
        world.close()


def measure(report: Report, world_sizes: list[int], rounds: int, common: list[str]) -> None:
    report.say(f"\n## From process start to the end of the first step of digits: seconds, median (min..max) of {rounds} rounds")
    tuned = [name for name in others(report) if "tuned" in name]
    contestants = CONTESTANTS | {name: (name, []) for name in tuned}
    columns = ("ranks", "ours", "bare DDP", "ours / bare", "ours flat / bare")
    report.table(*columns, *(f"{name} / ours" for name in tuned), "the phases of ours")
    for size in world_sizes:
        phases: list[dict] = []

        def turn(name: str, size: int = size, phases: list = phases) -> float:
            program, own = contestants[name]
            ends = start(program, size, [*FLAGS, *own, *common])
            if name == "ours":
                phases.append(ends)
            return ends["first_step"]

        seconds = interleave({name: lambda name=name: turn(name) for name in contestants}, rounds)
        ours, bare = seconds["ours"], seconds["bare"]
        row = [spread(ours, 2), spread(bare, 2)]
        row.append(report.want(f"start of digits, ranks: {size}, ours / bare", ours, bare, most=0.7))
        row += [ratio(seconds["ours flat"], bare), *(ratio(seconds[name], ours) for name in tuned)]
        report.row(str(size), *row, _spent(phases[1:]))
        report.raw[f"startup {size}"] = dict(seconds=seconds, phases=phases[1:])


def _spent(phases: list[dict]) -> str:
    """Median seconds in each phase, as text."""
    names = list(phases[0])[: list(phases[0]).index("first_step") + 1]
    ends = [[0.0, *(phase[name] for name in names)] for phase in phases]
    spent = {name: sorted(end[i + 1] - end[i] for end in ends)[len(ends) // 2] for i, name in enumerate(names)}
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items())

"""How fast a run was, and what took its time: for the `end` record and the closing table."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("reading", "communication", "evaluation", "snapshots")  # timed parts of training; the rest is computing


class Stopwatch:
    """Seconds that this rank has spent in each part since its training began."""

    def __init__(self):
        self.began = time.monotonic()
        self.seconds = dict.fromkeys((*PARTS, "forward"), 0.0)
        self.skipped = 0  # steps skipped under fp16, since a gradient overflowed
        self.speeds: list[float] = []  # rows per second over all ranks, one value per reconciliation

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Inside, time counts to this part."""
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    @property
    def speed(self) -> float:
        """Rows per second over all ranks: median of the last 30 reconciliations."""
        return statistics.median(self.speeds[-30:])


def summarize(trainer, steps: int) -> tuple[dict, dict, dict]:
    """Collective. Returns rows per second, seconds by part, and table lines for both. steps: trained in this start."""
    watch, peers = trainer.watch, trainer.peers
    training = time.monotonic() - watch.began
    took, estimated = {part: watch.seconds[part] for part in PARTS}, ""
    if steps and peers.world_size > 1 and (trainer.reduction.overlaps or trainer.device.type != "cpu"):
        # The sums overlap with backward and cannot be timed: estimate them by an all_reduce of the same size alone.
        half = (training - sum(took.values()) + took["communication"]) / 2
        took["communication"], estimated = min(steps * trainer.reduction.seconds_of_a_sum(), half), " (estimated)"
    # Reading and forward: a rank's own time, before it waits for others.
    own = torch.tensor([watch.seconds["reading"] + watch.seconds["forward"]], dtype=torch.float64)
    total, most = peers.reduce(own, own)
    slowest, times = peers.which(bool(own == most))[0], (most * peers.world_size / total.clamp(min=1e-9)).item()
    speeds = sorted(watch.speeds) or [0.0]
    mean = round(steps * trainer.config.global_batch_size / training, 1)
    speed = dict(rows_a_second=mean, median=round(statistics.median(speeds), 1), p10=round(speeds[len(speeds) // 10], 1))
    seconds = dict(training=training, computing=max(0.0, training - sum(took.values()))) | took
    lines = {"rows a second": f"{mean:.6g} (median {speed['median']:.6g}, slowest tenth {speed['p10']:.6g})"}
    if steps:
        parts = {part + (estimated if part == "communication" else ""): value for part, value in seconds.items()}
        lines["seconds"] = ", ".join(f"{part} {value:.3g}" for part, value in parts.items() if part != "training")
    if watch.skipped:
        lines["skipped steps"] = f"{watch.skipped} of {steps}: gradients overflowed, and fp16's scale was halved each time"
    if steps and peers.world_size > 1 and peers.rank == 0:  # it alone knows all hosts
        host = trainer.ranks[slowest]["host"]
        lines["slowest rank"] = f"{slowest} on {host}: {times:.2f} times the mean, before gradients are exchanged"
    return speed | {"slowest_rank": slowest}, {part: round(value, 4) for part, value in seconds.items()}, lines

"""How fast a run was, and where its seconds went: for the record's last line and the table at the end."""

import statistics
import time

import torch

PARTS = ("reading", "communication", "evaluation", "snapshots")  # of the training's seconds; the rest is computing


class Stopwatch:
    """What this rank has spent in each part, since its training began."""

    def __init__(self):
        self.began = time.monotonic()
        self.seconds = dict.fromkeys((*PARTS, "own"), 0.0)  # own: until a rank's gradients meet those of the others
        self.skipped = 0  # steps whose gradient had overflowed, under fp16
        self.speeds: list[float] = []  # rows a second, all ranks together, from one reconciliation to the next

    def spent(self, part: str, since: float) -> None:
        """since: time.perf_counter() when the part began."""
        self.seconds[part] += time.perf_counter() - since

    @property
    def speed(self) -> float:
        """Rows a second lately."""
        return statistics.median(self.speeds[-30:])


def summarize(trainer, steps: int) -> tuple[dict, dict, dict]:
    """Collective. Rows a second, seconds by part, and the lines of the table that tell both. steps: of this start."""
    watch, peers = trainer.watch, trainer.peers
    training = time.monotonic() - watch.began
    took, estimated = {part: watch.seconds[part] for part in PARTS}, ""
    if steps and peers.world_size > 1 and (trainer.reduction.overlaps or trainer.device.type != "cpu"):
        # It happens during backward, where nobody sees it: what a sum of as many numbers takes by itself.
        half = (training - sum(took.values()) + took["communication"]) / 2
        took["communication"], estimated = min(steps * trainer.reduction.seconds_of_a_sum(), half), " (estimated)"
    own = torch.tensor([watch.seconds["own"]], dtype=torch.float64)
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
    if steps and peers.world_size > 1 and peers.rank == 0:  # which knows all rows, and prints
        host = trainer.ranks[slowest]["host"]
        lines["slowest rank"] = f"{slowest} on {host}: {times:.2f} times the mean, before gradients are exchanged"
    return speed | {"slowest_rank": slowest}, {part: round(value, 4) for part, value in seconds.items()}, lines

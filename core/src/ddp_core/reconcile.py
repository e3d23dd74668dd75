"""What the ranks exchange while they train: about once a second, not once a step.

At a reconciliation the host waits for the device, and the ranks wait for each other. They exchange the losses and gradient
norms of the steps since the last one, the wish to stop, and whether a snapshot is due by rank 0's clock.
"""

import time
from dataclasses import dataclass

import torch

from ddp_core.control import tree_sum
from ddp_core.errors import named
from ddp_core.process_group import Peers

MOST_STEPS = 256  # at most between two reconciliations, however fast the steps are
SECONDS = 1.0  # target time between two reconciliations


def next_interval(steps: int, seconds: float) -> int:
    """Steps until the next reconciliation. steps, seconds: since the last one, by the slowest rank's clock."""
    return max(1, min(MOST_STEPS, 2 * steps, int(steps * SECONDS / max(seconds, 1e-6))))


@dataclass(frozen=True)
class Agreed:
    """Equal on all ranks. losses: [steps, parts], sums over the rows of all ranks. norms: [steps]."""

    losses: torch.Tensor
    norms: torch.Tensor
    stop: bool
    save: bool
    seconds: float  # of these steps, by the slowest rank's clock
    not_finite: tuple[int, list[int], str] | None  # the first such step; ranks with such a loss ([]: a gradient); description


class Reconciliation:
    def __init__(self, peers: Peers):
        self.peers = peers
        self.losses: list[torch.Tensor] = []  # this rank's losses since the last exchange, one per micro-batch
        self.norms: list[torch.Tensor] = []  # gradient norms since then, one per step
        self.interval = 1  # steps between two exchanges
        self.last = time.monotonic()  # when the steps since the last exchange began

    def begin_step(self) -> None:
        if not self.norms:  # evaluation and saving do not count
            self.last = time.monotonic()

    @property
    def due(self) -> bool:
        return len(self.norms) >= self.interval

    def exchange(self, step: int, stop: bool, save: bool, tolerates: bool) -> Agreed:
        """Collective. step: steps done so far. save: only rank 0's counts. tolerates: norms may be non-finite (fp16)."""
        count = len(self.norms)
        losses = torch.stack(self.losses).double().view(count, len(self.losses) // count, -1)
        mine = tree_sum(losses.unbind(1))  # [steps, parts], sums over this rank's rows
        numbers = torch.cat((mine.flatten(), torch.stack(self.norms).double()))
        if numbers.device.type != "cpu":
            self.peers.wait()  # gloo detects a lost rank; waiting for the device first would hang on it
        numbers, now = numbers.cpu(), time.monotonic()  # the host waits for the device, and the steps have ended
        mine, norms = numbers[: mine.numel()].view(mine.shape), numbers[mine.numel() :]
        flags = torch.tensor([stop, save and self.peers.rank == 0, not tolerates, now - self.last], dtype=torch.float64)
        # Norms are equal on all ranks; their maximum tells all ranks of one that is not finite.
        sums, most = self.peers.reduce(mine.flatten(), torch.cat((flags, norms)))
        losses, norms, seconds = sums.view(mine.shape), most[4:], most[3].item()
        # All ranks compute the same interval from the slowest one's clock.
        self.interval = next_interval(count, seconds)
        self.losses, self.norms, self.last = [], [], now
        not_finite, bad = None, ~losses.isfinite().all(1)
        steps = bad | (~norms.isfinite() & bool(most[2]))
        if steps.any():  # on all ranks alike
            index = int(steps.int().argmax())
            ranks = self.peers.which(not mine[index].isfinite().all())
            which = f"loss on rank {named(ranks)}" if ranks else "loss" if bad[index] else "gradient"
            not_finite = step - count + index, ranks, which
        return Agreed(
            losses=losses,  # per step, so that results repeat bit for bit whatever the interval
            norms=norms,
            stop=bool(most[0]),
            save=bool(most[1]),
            seconds=seconds,
            not_finite=not_finite,
        )

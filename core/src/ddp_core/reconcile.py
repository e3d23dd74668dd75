"""What the ranks tell each other while they train: about once a second, not once a step.

At a reconciliation the host waits for the device, and the ranks for each other: losses of the steps since the last one,
gradient norms, the wish to stop, and whether rank 0's clock says that a snapshot is due.
"""

import time
from dataclasses import dataclass

import torch

from ddp_core.control import tree_sum
from ddp_core.errors import named
from ddp_core.process_group import Peers

MOST_STEPS = 256  # between two reconciliations, however fast the steps are
SECONDS = 1.0  # wanted between two


def next_interval(steps: int, seconds: float) -> int:
    """Steps until the ranks next ask each other, after so many that took the slowest one so long."""
    return max(1, min(MOST_STEPS, 2 * steps, int(steps * SECONDS / max(seconds, 1e-6))))


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks. first: the step of the first of `losses` [steps, parts] (sums over rows) and `norms` [steps]."""

    first: int
    losses: torch.Tensor
    norms: torch.Tensor
    stop: bool
    save: bool
    seconds: float  # since the last reconciliation, by the slowest rank's clock
    not_finite: tuple[int, list[int], str] | None  # a step, the ranks whose loss it is (none: a gradient), and which it is


class Reconciliation:
    def __init__(self, peers: Peers):
        self.peers = peers
        self.losses: list[torch.Tensor] = []  # of this rank's rows since the last time, one a micro-batch
        self.norms: list[torch.Tensor] = []  # of the gradients, one a step
        self.interval = 1  # steps from one to the next
        self.last = time.monotonic()

    @property
    def due(self) -> bool:
        return len(self.norms) >= self.interval

    def exchange(self, step: int, stop: bool, save: bool, tolerates: bool) -> Agreed:
        """Collective. step: steps done so far. save: rank 0's word counts. tolerates: norms need not be finite (fp16)."""
        count, now = len(self.norms), time.monotonic()
        losses = torch.stack(self.losses).double().view(count, len(self.losses) // count, -1)
        mine = tree_sum(losses.unbind(1))  # [steps, parts], of this rank
        numbers = torch.cat((mine.flatten(), torch.stack(self.norms).double()))
        if numbers.device.type != "cpu":
            self.peers.wait()  # gloo notices a lost rank; the device would wait for it
        numbers = numbers.cpu()  # waits for the device
        mine, norms = numbers[: mine.numel()].view(mine.shape), numbers[mine.numel() :]
        flags = torch.tensor([stop, save and self.peers.rank == 0, not tolerates, now - self.last], dtype=torch.float64)
        # Norms are equal on all ranks. By the maximum all learn of one that is not finite.
        sums, most = self.peers.reduce(mine.flatten(), torch.cat((flags, norms)))
        losses, norms, seconds = sums.view(mine.shape), most[4:], most[3].item()
        # All ranks compute the same interval from the slowest one's clock.
        self.interval = next_interval(count, seconds)
        self.losses, self.norms, self.last = [], [], now
        return Agreed(
            first=step - count,
            losses=losses,  # each step by itself: a run repeats bit for bit whatever the interval
            norms=norms,
            stop=bool(most[0]),
            save=bool(most[1]),
            seconds=seconds,
            not_finite=self._not_finite(step - count, mine, losses, norms, not most[2]),
        )

    def _not_finite(
        self, first: int, mine: torch.Tensor, losses: torch.Tensor, norms: torch.Tensor, tolerates: bool
    ) -> tuple[int, list[int], str] | None:
        """Collective, where something is not; whether it is, all ranks know. mine: this rank's part of the losses."""
        bad = ~losses.isfinite().all(1)
        steps = bad | (~norms.isfinite() & (not tolerates))
        if not steps.any():
            return None
        index = int(steps.int().argmax())
        ranks = self.peers.which(not mine[index].isfinite().all())
        return first + index, ranks, f"loss on rank {named(ranks)}" if ranks else "loss" if bad[index] else "gradient"

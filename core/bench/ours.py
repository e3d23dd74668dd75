"""Everything that the benchmarks know of ddp_core: its program, run in turns, and its problems for the other programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import ddp_core

if TYPE_CHECKING:  # only run() imports torch, as in a site's train.py
    import torch

VARIABLES = dict(
    **dict(rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK", local_world_size="LOCAL_WORLD_SIZE"),
    **dict(node_rank="GROUP_RANK", master_addr="MASTER_ADDR", master_port="MASTER_PORT", job_id="TORCHELASTIC_RUN_ID"),
)
RUN = "run"  # the run directory, in the folder of the world
NEVER = str(10**6)
TRAIN_ONLY = ("--epochs", NEVER, "--eval-every", NEVER, "--save-every", NEVER, "--save-minutes", "0")


def run(flags: list[str]) -> int:
    """Run the program as a user starts it. Returns its exit code."""
    return ddp_core.run(lambda environ: ddp_core.Rank.read(environ, **VARIABLES), [*flags, "--run-dir", RUN])


def run_in_turns(flags: list[str], epochs_of: Callable[[torch.nn.Module, int], Iterator[int]]) -> None:
    """Like run(), but each epoch of the Trainer waits for its turn.

    A turn includes row order, guards, the ranks' exchange and rank 0's records, but no evaluation and no snapshots.
    """
    from ddp_core.trainer import Trainer

    run_epoch, asked = Trainer._run_epoch, []

    def when_asked(trainer: Trainer, epoch: int, first: int) -> bool:
        if not asked:
            asked.append(epochs_of(trainer.model, trainer.steps_per_epoch))
        next(asked[0])  # waits for the turn
        trainer.reconciliation.last = time.monotonic()  # the turns of others do not count as this run's time
        return run_epoch(trainer, epoch, first)

    Trainer._run_epoch = when_asked
    run([*flags, *TRAIN_ONLY])


class Problem:
    """A workload under these flags, for another program: the same rows, order, model and initial parameters."""

    def __init__(self, flags: list[str]):
        import torch
        from ddp_core.config import choose, parse
        from ddp_core.data import of_workload
        from ddp_core.order import Order, seed_everything

        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.workload = choose(flags)
        self.config = parse(flags, self.world_size, workload=self.workload)
        self.rows, _ = of_workload(self.workload, self.config)
        seed_everything(self.config.seed)  # for a model with random numbers
        self.model = self.workload.model(self.config)
        self.steps = min(len(self.rows) // self.config.global_batch_size, self.config.steps_per_epoch or len(self.rows))
        self.all_rows, self.cpu = torch.arange(len(self.rows)), torch.device("cpu")
        common = (len(self.rows), self.config.seed, self.config.global_batch_size)
        self.orders = [Order(*common, rank, self.world_size) for rank in range(self.world_size)]

    @property
    def batched(self) -> bool:
        """Whether the rows are tensors, indexed by a whole batch at once; else they are a Dataset of single rows."""
        return getattr(self.rows, "batched", False)

    def tensors(self) -> Any:
        """All training rows as one batch."""
        return self.rows[self.all_rows]

    def order(self, epoch: int, rank: int | None = None) -> list[torch.Tensor]:
        """Row numbers of this rank, or of `rank`: one tensor a step."""
        return list(self.orders[self.rank if rank is None else rank].epoch(epoch, 0, self.steps, self.cpu))

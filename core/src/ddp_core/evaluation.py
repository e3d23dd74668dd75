"""Mean losses and metrics over the held-out rows: each row counts once, whatever the world size."""

import math
import time
from collections.abc import Iterator

import torch

from ddp_core.comparison import refuse_unlike_sums
from ddp_core.control import tree_sum
from ddp_core.errors import NonFiniteError
from ddp_core.order import EVALUATION, seed_generators
from ddp_core.reconcile import SECONDS, next_interval
from ddp_core.workload import outputs_of, parts_of, refuse_other_names


class Evaluation:
    """Evaluates the held-out rows. The same workers read them for all evaluations of a run."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.batches = trainer.held_out.stream(self._plan())

    def _layout(self) -> Iterator[tuple[int, int, range]]:
        """This rank's micro-batches, sized as in training: shard, place in it, row numbers. Each rank has as many as rank 0,
        because forward is collective under --sharding: the last one of a shard may have no rows.
        """
        config, peers, count = self.trainer.config, self.trainer.peers, len(self.trainer.held_out)
        shards = peers.world_size * config.accumulate
        size = max(1, config.global_batch_size // shards)
        for shard in range(peers.rank, shards, peers.world_size):
            rows, of_rank_0 = range(shard, count, shards), range(shard - peers.rank, count, shards)
            for place in range(-(-len(of_rank_0) // size)):
                yield shard, place, rows[place * size : (place + 1) * size]

    def _plan(self) -> Iterator[tuple[int, torch.Tensor]]:
        while True:
            for *_, own in self._layout():
                rows = own or range(1)  # row 0, which does not count
                yield -1, torch.arange(rows.start, rows.stop, rows.step, device=self.trainer.held_out.index_device)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Collective. Returns the mean by name (eval_loss, eval_loss_<part>, eval_<metric>); {} if the ranks agree to stop.

        Raises NonFiniteError on all ranks.
        """
        trainer = self.trainer
        workload, config, peers, probed = trainer.workload, trainer.config, trainer.peers, trainer.probed
        trainer.model.eval()
        names = ["loss", *(f"loss_{part}" for part in probed.losses), *probed.metrics]
        # Sums, a count for each (0: the number of rows), and the number of rows, since a mean of means would be wrong.
        totals = torch.zeros(config.accumulate, 2 * len(names) + 1, dtype=torch.float64, device=trainer.device)
        # This start has trained no step yet. If it also stopped within the evaluation, the job could restart for ever
        # without progress, so it evaluates to the end.
        early = bool(trainer.stop) and trainer.step == trainer.first
        asked, interval, began = 0, 1, time.monotonic()
        last = began
        for done, (shard, place, rows) in enumerate(self._layout()):
            # Agree about once a second, as in training: an evaluation can take longer than a scheduler's grace time.
            if done - asked == interval:
                now = time.monotonic()
                stop = bool(trainer.stop) and now - began > SECONDS  # a short evaluation is completed rather than repeated
                mine = torch.tensor([stop, early, now - last], dtype=torch.float64)
                stop, too_early, seconds = peers.reduce(most=mine)[1].tolist()
                if stop and not too_early:
                    return {}
                asked, interval, last = done, next_interval(interval, seconds), now
            batch = next(self.batches)
            seed_generators(trainer.device, EVALUATION, config.seed, shard, place, others=probed.others)
            with trainer.autocast():
                outputs = outputs_of(workload, trainer.model, batch)
                loss, metrics = workload.loss(outputs, batch), workload.metrics(outputs, batch)
            refuse_other_names(workload, metrics, probed.metrics)
            refuse_unlike_sums(workload, metrics)
            if rows:
                values = [*parts_of(loss, probed.losses, workload), *(metrics[name] for name in probed.metrics)]
                pairs = [value if isinstance(value, tuple) else (value, 0) for value in values]
                numbers = [*(value for value, _ in pairs), *(count for _, count in pairs), len(rows)]
                scalars = [torch.as_tensor(number).detach().double().reshape(()).to(trainer.device) for number in numbers]
                totals[shard // peers.world_size] += torch.stack(scalars)
        sums, counts, count = peers.reduce(tree_sum(totals).cpu())[0].split([len(names), len(names), 1])
        assert int(count) == len(trainer.held_out), (count, len(trainer.held_out))
        means = [total / (own or count.item()) for total, own in zip(sums.tolist(), counts.tolist(), strict=True)]
        results = {f"eval_{name}": mean for name, mean in zip(names, means, strict=True)}
        if not all(map(math.isfinite, [*means, *counts.tolist()])):
            fix = f"lower --lr {config.lr:g}, or see the held-out rows"
            if math.isfinite(results["eval_loss"]):
                fix = "the loss is: see metrics(), which may give (sum, count) of the rows that have one"
            raise NonFiniteError(
                f"held-out results are not finite after step {trainer.step} ({results}): no snapshot was written; {fix}",
                everywhere=True,
            )
        return results

"""Mean losses and metrics over the held-out rows: each row counts once, whatever the world size."""

import itertools
import math
import time

import torch

from ddp_core.comparison import refuse_unlike_sums
from ddp_core.control import tree_sum
from ddp_core.errors import NonFiniteError
from ddp_core.order import EVALUATION, micro_batches, seed_generators
from ddp_core.reconcile import SECONDS, next_interval
from ddp_core.workload import outputs_of, parts_of, refuse_other_names


def shares_of(trainer) -> tuple[list[list[torch.Tensor]], list[int], list[int]]:
    """This rank's micro-batches by shard, sized as in training; how many count per shard; and how many rank 0 has."""
    config, peers, batches = trainer.config, trainer.peers, trainer.held_out
    mine = torch.arange(min(peers.rank, len(batches)), len(batches), peers.world_size, device=batches.index_device)
    size = max(1, config.global_batch_size // peers.world_size // config.accumulate)
    shards = [[rows for rows in shard.split(size) if len(rows)] for shard in micro_batches(mine, config.accumulate)]
    counted = [len(shard) for shard in shards]
    of_rank_0 = micro_batches(torch.arange(0, len(batches), peers.world_size), config.accumulate)
    most = [-(-len(rows) // size) for rows in of_rank_0]  # batches per shard; no rank has more than rank 0
    if config.sharding != "none":
        # Forward is collective: where rank 0 has more batches, this rank runs extra ones of row 0, which do not count.
        for part, batches_of_rank_0 in enumerate(most):
            shards[part] += [mine.new_zeros(1)] * (batches_of_rank_0 - counted[part])
    return shards, counted, most


class Evaluation:
    """Evaluates the held-out rows. They are divided once, and the same workers read them for all evaluations of a run."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.shards, self.counted, self.most = shares_of(trainer)
        rows = [rows for shard in self.shards for rows in shard]
        stream = trainer.held_out.stream((-1, part) for part in itertools.cycle(rows))
        # Taking one batch forks the workers here, once, before the first sum of gradients (see Trainer.train).
        self.batches = itertools.chain([*itertools.islice(stream, 1)], stream)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Collective. Returns the mean by name (eval_loss, eval_loss_<part>, eval_<metric>); {} if the ranks agree to stop.

        Raises NonFiniteError on all ranks.
        """
        trainer = self.trainer
        workload, config, peers, probed = trainer.workload, trainer.config, trainer.peers, trainer.probed
        trainer.model.eval()
        names = ["loss", *(f"loss_{part}" for part in probed.losses), *probed.metrics]
        # The ranks exchange sums with their counts, since a mean of means would be wrong.
        totals = torch.zeros(config.accumulate, 2 * len(names) + 1, dtype=torch.float64, device=trainer.device)
        places = [(number, place) for number, most in enumerate(self.most) for place in range(most)]
        # This start has trained no step yet. If it also stopped within the evaluation, the job could restart for ever
        # without progress, so it evaluates to the end.
        early = bool(trainer.stop) and trainer.step == trainer.first
        asked, interval, began = 0, 1, time.monotonic()
        last = began
        for done, (number, place) in enumerate(places):
            # Agree about once a second, as in training: an evaluation can take longer than a scheduler's grace time.
            if done - asked == interval:
                now = time.monotonic()
                stop = bool(trainer.stop) and now - began > SECONDS  # a short evaluation is completed rather than repeated
                told = torch.tensor([stop, early, now - last], dtype=torch.float64)
                stop, too_early, seconds = peers.reduce(most=told)[1].tolist()
                if stop and not too_early:
                    return {}
                asked, interval, last = done, next_interval(interval, seconds), now
            if place >= len(self.shards[number]):
                continue
            batch = next(self.batches)
            part = peers.rank + peers.world_size * number
            seed_generators(trainer.device, EVALUATION, config.seed, part, place, others=probed.others)
            with trainer.autocast():
                outputs = outputs_of(workload, trainer.model, batch)
                loss, metrics = workload.loss(outputs, batch), workload.metrics(outputs, batch)
            refuse_other_names(workload, metrics, probed.metrics)
            refuse_unlike_sums(workload, metrics)
            if place < self.counted[number]:
                losses, rows = parts_of(loss, probed.losses, workload), len(self.shards[number][place])
                totals[number] += _sums(losses, [metrics[name] for name in probed.metrics], rows).to(trainer.device)
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


def _sums(losses: list[torch.Tensor], metrics: list, rows: int) -> torch.Tensor:
    """[2n + 1] fp64: sums of n losses and metrics, a count for each (0: use the number of rows), and the number of rows."""
    pairs = [(value, 0) for value in losses] + [v if isinstance(v, tuple) else (v, 0) for v in metrics]
    values = [*(value for value, _ in pairs), *(count for _, count in pairs), rows]
    return torch.stack([torch.as_tensor(value).detach().double().reshape(()).to(losses[0].device) for value in values])

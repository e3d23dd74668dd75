"""What was tried for a faster step, with the step time it costs or saves: why the core does, or does not do it.

    python core/bench/variants.py                       # regression, digits, gpt in worlds of 1 and 2: about 3 minutes
    python core/bench/variants.py --workloads digits --world-sizes 4

Runs like steps.py: the same Trainer, one choice changed, all in turn within one run. `time` is over that of `ours`.
"""

import torch
import torch.distributed as dist
from common import Report, ratio, spread
from ddp_core.trainer import Trainer
from steps import Bare, Ours, arguments, measure
from torch import nn


class Threads(Ours):
    def epoch(self, index: int) -> None:
        torch.set_num_threads(2)
        super().epoch(index)
        torch.set_num_threads(1)


class OptimizerClass(Ours):
    """torch.optim.SGD or AdamW on the flat tensor. It also imports torch._dynamo: seconds, once in every process."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        config, replica = self.trainer.config, self.trainer.replica
        flat = nn.Parameter(replica.values)
        flat.grad = replica.grads
        self.torchs = torch.optim.SGD([flat], config.lr, config.momentum, fused=True)
        if config.optimizer == "adamw":
            self.torchs = torch.optim.AdamW([flat], config.lr, (config.momentum, 0.95), weight_decay=0.0, fused=True)
        self.trainer.optimizer.step = self._step

    def _step(self, lr: float) -> torch.Tensor:
        self.torchs.step()
        return torch.linalg.vector_norm(self.trainer.replica.grads)


class AllReduce(Ours):
    """One all_reduce, where the core gathers all parts and adds them in rank order."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer, reduction="flat")
        replica = self.trainer.replica
        replica.sum_gradients = lambda: dist.all_reduce(replica.grads, group=trainer.peers.data)


def contestants(trainer: Trainer) -> dict:
    found = {"ours": Ours(trainer, reduction="flat"), "two threads a rank": Threads(trainer)}
    found["torch.optim class"] = OptimizerClass(trainer)
    if trainer.world_size > 1:
        found["all_reduce"] = AllReduce(trainer)
        found["DDP (--reduction ddp)"] = Ours(trainer, reduction="ddp")
        found["bare DDP"] = Bare(trainer)
        found["bare DDP, static_graph"] = Bare(trainer, static_graph=True)
        found["bare DDP, gradient_as_bucket_view"] = Bare(trainer, gradient_as_bucket_view=True)
    elif trainer.config.compile:  # --compile on the command line of this program
        found = {"ours": Ours(trainer, compile=False), "torch.compile": Ours(trainer, compile=True)}
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(world_sizes=[1, 2])
    parser.add_argument("--compile", action="store_true", help="torch.compile alone, at 1 rank; needs a C++ compiler")
    args = parser.parse_args()
    report = Report(args.out, "# Variants: us a step and time over ours within a round, as median (min..max)")
    report.table("workload", "ranks", "variant", "us a step", "time over ours")
    for workload in args.workloads:
        for world_size in [1] if args.compile else args.world_sizes:
            extra = ["--compile"] if args.compile else []
            result = measure(workload, world_size, args.rounds, contestants, extra)
            report.raw[f"{workload} {world_size}"] = result
            for name, us in result["us"].items():
                report.row(workload, str(world_size), name, spread(us), ratio(us, result["us"]["ours"]))
    report.close()


if __name__ == "__main__":
    main()

"""Time of a training step: ours against the loop that OLCF publishes for Frontier, and against a bare DDP loop.

    python core/bench/steps.py                              # all workloads in worlds of 1, 2 and 4: about 5 minutes
    python core/bench/steps.py --workloads regression --world-sizes 1 --rounds 15

`ours` is the Trainer that run() built, driven by its own _run_epoch: the epoch's order, every step, the reconciliation
with the other ranks and, on rank 0, the records of run.jsonl as in default use. Evaluation and snapshots are left out
on every side. Each contestant trains the same number of steps in each round; the first round is dropped.
"""

import argparse
import itertools
import json
import os
import time
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

# A rank computes on one thread: two a rank are slower as soon as the ranks fill the cores (variants.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ddp_core
import torch
import torch._dynamo  # the first step of a torch.optim class imports it (2 s): once here, and not in every rank
import torch.distributed as dist
import torch.nn.functional as F
from common import Report, fork_ranks, interleave, ratio, spread
from ddp_core.data import Data, rows_of_rank, sample_order
from ddp_core.errors import ExitCode
from ddp_core.model import build, initial_parameters
from ddp_core.trainer import Trainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FLAGS = {  # a workload's flags; and the steps of one turn, about half a second at one rank
    "regression": ([], 1024),
    "digits": ([], 504),
    "gpt": (["--model-size", "tiny", "--steps-per-epoch", "4"], 4),
}
NEVER = str(10**6)
SHARDS = (4, 8)  # of --reduction canonical, where the world size divides them
TARGETS = {1: 2.5, 2: 1.5, 4: 1.1}  # published / ours by world size; ours / bare should be at most 1.1


# ---- contestants: each has epoch(index) -----------------------------------------------------------------------------


class Ours:
    """The Trainer, or a second one of other choices beside it."""

    def __init__(self, trainer: Trainer, **choices):
        data = Data(trainer.train_rows, trainer.held_out, trainer.fingerprint)
        config = replace(trainer.config, **choices)
        parts = (trainer.peers, trainer.device, data, trainer.directory, trainer.record, trainer.stop)
        self.trainer = Trainer(config, *parts)
        self.model = self.trainer.replica.model

    def epoch(self, index: int) -> None:
        self.trainer._run_epoch(index, 0)


class Bare:
    """DDP as its documentation shows it, with our model, initial parameters, row order and tensor indexing."""

    def __init__(self, trainer: Trainer, **ddp):
        self.trainer, self.config = trainer, trainer.config
        self.model = build(self.config)
        initial_parameters(self.model, self.config.seed)
        self.forward = DistributedDataParallel(self.model.to(trainer.device), **ddp)
        parameters, lr, momentum = self.forward.parameters(), self.config.lr, self.config.momentum
        self.optimizer = torch.optim.SGD(parameters, lr, momentum)
        if self.config.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, (momentum, 0.95), weight_decay=0.0)
        self.loss = F.mse_loss if self.config.workload == "regression" else _cross_entropy

    def epoch(self, index: int) -> None:
        trainer, size = self.trainer, self.config.global_batch_size
        order = sample_order(self.config.seed, index, len(trainer.train_rows))
        rows = rows_of_rank(order, size, trainer.rank, trainer.world_size).to(trainer.device)
        for step in range(trainer.steps_per_epoch):
            inputs, targets = trainer.train_rows[rows[step]]
            self.optimizer.zero_grad()
            self.loss(self.forward(inputs), targets).backward()
            self.optimizer.step()


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten().long())


class RandomPairs(Dataset):
    def __init__(self, count: int):
        self.pairs = [(torch.rand(20), torch.rand(1)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int):
        return self.pairs[index]


class Published:
    """The loop of OLCF's PyTorch guide, written anew from what it does: rows one by one through a DataLoader, and one
    batch fetched each epoch only to print its size. Its cross-entropy over one output is 0 for ever: mean square here.
    https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html
    """

    def __init__(self, trainer: Trainer):
        self.device, self.rank = trainer.device, trainer.rank
        self.model = DistributedDataParallel(torch.nn.Linear(20, 1).to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        rows = RandomPairs(2048)
        # The guide pins memory; without an accelerator that only warns.
        pin = self.device.type != "cpu"
        self.loader = DataLoader(rows, batch_size=32, pin_memory=pin, shuffle=False, sampler=DistributedSampler(rows))

    def epoch(self, index: int) -> None:
        size = len(next(iter(self.loader))[0])
        print(f"[GPU{self.rank}] Epoch {index} | Batchsize: {size} | Steps: {len(self.loader)}")
        self.loader.sampler.set_epoch(index)
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(inputs.to(self.device)), targets.to(self.device))
            loss.backward()
            self.optimizer.step()


def contestants(trainer: Trainer) -> dict:
    found = {"ours flat": Ours(trainer, reduction="flat"), "ours ddp": Ours(trainer, reduction="ddp")}
    for shards in SHARDS:
        if shards % trainer.world_size == 0:
            cut = dict(shards=shards, accumulate=shards // trainer.world_size)
            found[f"canonical {shards}"] = Ours(trainer, reduction="canonical", **cut)
    found["bare"] = Bare(trainer)
    if trainer.config.workload == "regression":
        found["published"] = Published(trainer)
    return found


# ---- one world ------------------------------------------------------------------------------------------------------


def measure(workload: str, world_size: int, rounds: int, entrants=contestants, extra=(), deadline=600.0) -> dict:
    """Microseconds a step by contestant and round; the parameters' largest difference from those of `bare`."""
    flags, steps = FLAGS[workload]
    flags = ["--workload", workload, "--epochs", NEVER, "--eval-every", NEVER, "--save-every", NEVER, *flags, *extra]

    def compare(trainer: Trainer, folder: Path) -> ExitCode:
        entered = entrants(trainer)
        epochs = max(1, steps // world_size // trainer.steps_per_epoch)
        turns = {name: partial(_turn, trainer, entrant, epochs, itertools.count()) for name, entrant in entered.items()}
        result = dict(us=interleave(turns, rounds), differ={})
        with torch.no_grad():
            for name, entrant in entered.items() if "bare" in entered else ():
                pairs = zip(entrant.model.parameters(), entered["bare"].model.parameters(), strict=True)
                result["differ"][name] = max((a - b).abs().max().item() for a, b in pairs)
        if trainer.rank == 0:
            (folder / "result.json").write_text(json.dumps(result))
        return ExitCode.DONE

    def rank_main(rank: int, port: int, folder: Path) -> None:
        # run() does all that it does for a user, up to the training, whose place the comparison takes.
        Trainer.train = lambda trainer: compare(trainer, folder)
        me = ddp_core.Rank(rank, world_size, rank, world_size, 0, "127.0.0.1", port, "bench")
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            code = ddp_core.run(lambda environ: me, [*flags, "--run-dir", str(folder / "run")])
        assert code == 0, code

    return fork_ranks(world_size, rank_main, deadline)


def _turn(trainer: Trainer, entrant, epochs: int, indices) -> float:
    dist.barrier(group=trainer.peers.control)
    began = time.perf_counter()
    for _ in range(epochs):
        entrant.epoch(next(indices))
    return (time.perf_counter() - began) / epochs / trainer.steps_per_epoch * 1e6


def arguments(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(FLAGS), default=list(FLAGS))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7, help="counted ones; one more comes first (default: 7)")
    parser.add_argument("--out", type=Path, help="write the output there: Markdown, or raw figures for *.json")
    return parser


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(args.out, "# Step times: us a step, and ratios within a round, as median (min..max)")
    report.say(f"Targets: published / ours at least {TARGETS} by world size; ours / bare at most 1.1.\n")
    columns = ("workload", "ranks", "ours flat, us", "ours ddp, us", "bare DDP, us", "published, us")
    report.table(*columns, "published / ours flat", "ours flat / bare", "ours ddp / bare", "parameters differ")
    canonical = []
    for workload in args.workloads:
        for world_size in args.world_sizes:
            result = measure(workload, world_size, args.rounds)
            report.raw[f"{workload} {world_size}"] = result
            us = result["us"]
            names = ("ours flat", "ours ddp", "bare", "published")
            times = [spread(us[name]) if name in us else "" for name in names]
            faster = ratio(us["published"], us["ours flat"]) if "published" in us else ""
            against = [ratio(us[name], us["bare"]) for name in names[:2]]
            differ = max(result["differ"][name] for name in us if name.startswith(("ours", "canonical")))
            report.row(workload, str(world_size), *times, faster, *against, f"{differ:.0e}")
            for name in (name for name in us if name.startswith("canonical")):
                over = [ratio(us[name], us[other]) for other in ("ours ddp", "bare")]
                canonical.append((workload, str(world_size), name.split()[1], spread(us[name]), *over))
    report.say("\n--reduction canonical\n")
    report.table("workload", "ranks", "shards", "us", "canonical / ours ddp", "canonical / bare")
    for row in canonical:
        report.row(*row)
    report.close()


if __name__ == "__main__":
    main()

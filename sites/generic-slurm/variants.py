"""generic-slurm: what train_horovod.py and train_accelerate.py have in common, so that they show what differs.

Flags, data, model, order of rows, losses, run.jsonl and the snapshot are train.py's, and so is the exit code: a run that one
of them began, another goes on with. Here is the plain loop of PyTorch, where train.py's core has its own: one sum of losses a
step, one snapshot an epoch. Preflight, the roll call of lost ranks and most flags are train.py's alone.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from ddp_core import Rank
from ddp_core.config import TrainConfig, parse
from ddp_core.data import load, rows_of_rank, sample_order, steps_per_epoch
from ddp_core.device import describe, prepare_device, versions
from ddp_core.errors import ExitCode, Failure, NonFiniteError, PreflightError, SnapshotError, UsageError
from ddp_core.model import build, initial_parameters, objective
from ddp_core.optimizer import learning_rate
from ddp_core.record import Record
from ddp_core.snapshot import RunDirectory, write
from ddp_core.stop import StopFlag

# What the loop below does, and no flag changes.
FIXED = dict(accumulate=1, shards=0, optimizer="sgd", backend="auto", reduction="auto", deterministic=False, compile=False)
FIXED |= dict(channels_last=False, eval_every=1, save_every=1)


def main(rank_of: Callable, train: Callable) -> int:
    """train(Run) by each rank; the exit code is train.py's (ddp_core.errors)."""
    stop, rank, run = StopFlag(), None, None
    try:
        rank = rank_of(os.environ)
        config = parse(None, rank.world_size, quiet=rank.rank != 0)
        for name, value in (FIXED | dict(precision="fp64" if config.precision == "fp64" else "fp32")).items():
            if (given := getattr(config, name)) != value:
                raise UsageError(f"--{name.replace('_', '-')} {given}: this program has {value} alone, train.py has more")
        run = Run(rank, config, stop)  # alive to the end: gloo can hang while Python frees what holds its groups
        code = int(train(run))
    except Failure as error:
        if not rank or rank.rank == 0 or not (error.everywhere or isinstance(error, UsageError)):
            print(f"error [rank {rank.rank if rank else '?'}, {os.uname().nodename}]: {error}", file=sys.stderr)
        code = int(error.code)
    finally:
        stop.ignore()
        if run and run.directory:
            run.directory.release()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not through Python, where a library may wait for a rank that has left


def not_installed(error: ModuleNotFoundError, fix: str) -> Callable:
    """What main() does in place of training where every rank lacks the library: one line, and exit code 3."""

    def train(_):
        raise PreflightError(f"{error}: {fix}", everywhere=True)

    return train


class Run:
    """One rank's part of a run. `model` and `optimizer` are plain; a variant puts the library's in their place."""

    def __init__(self, rank: Rank, config: TrainConfig, stop: StopFlag):
        self.rank, self.config, self.stop, self.record = rank, config, stop, Record(time.monotonic())
        self.device, self.world_size = prepare_device(config, rank), rank.world_size
        data, dtype = load(config), torch.float64 if config.precision == "fp64" else torch.float32
        self.train_rows, self.held_out = data.train.to(self.device, dtype), data.held_out.to(self.device, dtype)
        self.fingerprint, self.objective = data.fingerprint, objective(config.workload)
        self.bare = self.model = build(config)
        initial_parameters(self.model, config.seed)  # from the seed: equal on all ranks, with nothing to broadcast
        self.model.to(self.device, dtype)
        rule = dict(lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **rule)
        self.steps_per_epoch = steps_per_epoch(config, data)
        self.total_steps, self.directory = config.epochs * self.steps_per_epoch, None
        self.step, self.loss_sum, self.history, self.best = 0, 0.0, [], None

    def begin(self, library: str, world_size: int, gather: Callable) -> None:
        """gather: an object of this rank to the list of all ranks'. Then the snapshot, if there is one."""
        if world_size != self.world_size:  # 16 worlds of one look like 16 successes
            raise PreflightError(f"world_size={world_size} for {library}, but the launcher started {self.world_size} ranks")
        self.gather, self.replica = gather, SimpleNamespace(reduction=library)
        state = self.on_rank_0(self._open)
        if state:
            self._adopt(*state)
        rows = gather(describe(self.config, self.rank, self.device))
        self.record.start(rows, self)

    def on_rank_0(self, act: Callable):
        """What act returned on rank 0, on all ranks; its Failure likewise."""
        answer = None
        if self.rank.rank == 0:
            try:
                answer = act()
            except Failure as failure:
                answer = failure
        answer = self.gather(answer)[0]
        if isinstance(answer, Failure):
            answer.everywhere = True
            raise answer
        return answer

    def _open(self):
        self.directory = RunDirectory(self.config.run_dir, self.rank.job_id, self.config.fresh)
        self.record.open(self.directory.log)
        state = self.directory.load()
        ours = self.config.problem() | {"data": self.fingerprint}
        if state and state[1]["problem"] | {"data": state[1]["data"]} != ours:
            raise SnapshotError(f"{self.directory.snapshot} is of another run: pass its flags, another --run-dir, or --fresh")
        return state

    @torch.no_grad()
    def _adopt(self, tensors: dict, document: dict) -> None:
        self.step, self.loss_sum = document["step"], float.fromhex(document["epoch_loss_sum"])
        self.history, self.best = document["history"], document["best"]
        for name, parameter in self.bare.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            momentum = tensors[f"optim.momentum.{name}"].to(self.device)
            self.optimizer.state[parameter]["momentum_buffer"] = momentum

    # ---- a step, and an epoch ------------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """What a sum over this rank's rows is multiplied with, so that the sum over all ranks is the global batch's mean."""
        return 1 / self.config.global_batch_size

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank in the next step: its share of a global batch that no world size changes."""
        epoch, index = divmod(self.step, self.steps_per_epoch)
        if index == 0 or self.step == self.record.first:
            order = sample_order(self.config.seed, epoch, len(self.train_rows))
            rows = rows_of_rank(order, self.config.global_batch_size, self.rank.rank, self.world_size)
            self.rows = rows.to(self.device)
            self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step, self.total_steps)
        return self.train_rows[self.rows[index]]

    def told(self, loss: torch.Tensor) -> torch.Tensor:
        """What the ranks sum once a step: their losses, and the wish to stop. [2] fp64."""
        return torch.stack([loss.detach().double(), torch.tensor(float(bool(self.stop)), device=loss.device)])

    def done(self, told: torch.Tensor) -> bool:
        """After a step; told: the sum. True when it was an epoch's last, or the ranks stop here."""
        loss, stop = told.tolist()
        loss *= self.share
        epoch, index = divmod(self.step, self.steps_per_epoch)
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is not finite at step {self.step}: the last snapshot is whole", everywhere=True)
        self.step, self.stopping = self.step + 1, bool(stop)
        self.loss_sum = self.loss_sum + loss if index else loss
        if self.step % self.config.log_every == 0:
            self.record.write("step", epoch=epoch, step=self.step - 1, loss=loss, loss_hex=loss.hex())
        return self.stopping or self.step % self.steps_per_epoch == 0

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        """This rank's sums over the held-out rows, each row on one rank: what the ranks sum at an epoch's end. [3] fp64."""
        self.model.eval()
        total = torch.zeros(3, dtype=torch.float64, device=self.device)
        for rows in torch.arange(self.rank.rank, len(self.held_out), self.world_size, device=self.device).split(512):
            inputs, targets = self.held_out[rows]
            outputs = self.bare(inputs)  # not the wrapped one, which may have collectives of its own
            parts = self.objective.loss(outputs, targets), self.objective.metric(outputs, targets), len(rows)
            total += torch.tensor(parts, dtype=torch.float64, device=self.device)
        return total

    def end_epoch(self, total: torch.Tensor) -> None:
        """total: evaluate() summed over the ranks."""
        loss, metric, count = total.tolist()
        values = {"loss": self.loss_sum / self.steps_per_epoch, "eval_loss": loss / count}
        values[f"eval_{self.objective.metric_name}"] = metric / count
        epoch = len(self.history)
        self.history.append([epoch, *(value.hex() for value in values.values())])
        self.record.epoch(self, epoch, values)
        if not self.best or values["eval_loss"] < float.fromhex(self.best[1]):
            self.best = [epoch, values["eval_loss"].hex()]
            self.on_rank_0(lambda: write(self.directory.best, *self._state()))

    def save(self) -> None:
        self.on_rank_0(lambda: self.directory.save(*self._state()))

    def end(self) -> ExitCode:
        code = ExitCode.STOPPED if self.step < self.total_steps else ExitCode.DONE
        self.record.end(code, self)
        self.gather(None)  # all ranks are here: who leaves first can hang who is still at work
        return code

    def _state(self) -> tuple[dict, dict]:
        """By the bare model's names: no `module.`."""
        tensors = {f"model.{name}": parameter for name, parameter in self.bare.named_parameters()}
        for name, parameter in self.bare.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            tensors[f"optim.momentum.{name}"] = state.get("momentum_buffer", torch.zeros_like(parameter))
        document = dict(problem=self.config.problem(), data=self.fingerprint, step=self.step, history=self.history)
        document |= dict(steps_per_epoch=self.steps_per_epoch, epochs_run=len(self.history), best=self.best)
        document |= dict(epoch_loss_sum=self.loss_sum.hex(), world_size=self.world_size, versions=versions())
        return tensors, document

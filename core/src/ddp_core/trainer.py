"""The training loop. Read this file first.

One step: a batch is one index into the training rows, forward, backward, one sum of gradients over the ranks, one
update. The host waits for the device, and the ranks for each other's losses, once a second (_reconcile), not once a step.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from ddp_core.config import TrainConfig
from ddp_core.data import Data, rows_of_rank, sample_order, steps_per_epoch
from ddp_core.device import versions
from ddp_core.errors import ExitCode, Failure, NonFiniteError, PeerLostError, SnapshotError
from ddp_core.model import build, initial_parameters, objective
from ddp_core.optimizer import Optimizer, learning_rate
from ddp_core.process_group import Peers
from ddp_core.record import Record
from ddp_core.replica import Replica, tree_sum
from ddp_core.snapshot import RunDirectory, write
from ddp_core.stop import StopFlag

MOST_STEPS_UNSEEN = 256  # between two reconciliations, however fast the steps are


class Trainer:
    """One rank's part of a run. directory: rank 0's, None elsewhere. All methods but _run_step are collective."""

    def __init__(
        self,
        config: TrainConfig,
        peers: Peers,
        device: torch.device,
        data: Data,
        directory: RunDirectory | None,
        record: Record,
        stop: StopFlag,
    ):
        self.config, self.peers, self.device = config, peers, device
        self.directory, self.record, self.stop = directory, record, stop
        self.rank, self.world_size = peers.rank.rank, peers.rank.world_size
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        self.train_rows, self.held_out = data.train.to(device, dtype), data.held_out.to(device, dtype)
        self.fingerprint = data.fingerprint
        model = build(config)
        initial_parameters(model, config.seed)
        self.replica = Replica(model, config, device, dtype, peers)
        self.objective = objective(config.workload)
        self.optimizer = Optimizer(config, self.replica.values, self.replica.grads)
        bf16 = config.precision == "bf16"
        self.autocast = (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else nullcontext

        self.steps_per_epoch = steps_per_epoch(config, data)
        self.total_steps = config.epochs * self.steps_per_epoch
        self.step = 0  # optimizer steps done, in all epochs and all earlier starts of this run
        self.loss_sum = 0.0  # of the steps done in this epoch
        self.history: list[list] = []  # one row an epoch: epoch, training loss, evaluation loss, metric
        self.best: list | None = None  # epoch and evaluation loss of best.safetensors

        # Each rank's loss is its rows' part of the mean over the global batch, so gradients are summed over the ranks, not
        # averaged; DDP divides by the world size, and is given that much more.
        share = (self.world_size if self.replica.reduction == "ddp" else 1) / config.global_batch_size
        self.share = torch.tensor(share, device=device, dtype=dtype)
        self.losses: list[torch.Tensor] = []  # of this rank's rows since the last reconciliation, one a micro-batch
        self.norms: list[torch.Tensor] = []  # of the gradients, one a step
        self.interval = 1  # steps from one reconciliation to the next
        self.reconciled = time.monotonic()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> ExitCode:
        """Train to the end, or until the ranks agree to stop. Raises a Failure on all ranks alike."""
        while self.step < self.total_steps:
            stop = self._run_epoch(*divmod(self.step, self.steps_per_epoch))
            if stop and self.step < self.total_steps:
                self._save_snapshot()
                return ExitCode.STOPPED
        return ExitCode.DONE

    def _run_epoch(self, epoch: int, first: int) -> bool:
        """The steps of an epoch from `first` on. True when the ranks have agreed to stop."""
        order = sample_order(self.config.seed, epoch, len(self.train_rows))
        rows = rows_of_rank(order, self.config.global_batch_size, self.rank, self.world_size).to(self.device)
        self.replica.forward.train()
        for index in range(first, self.steps_per_epoch):
            self._run_step(rows[index])
            last = index == self.steps_per_epoch - 1
            if last or len(self.norms) == self.interval:
                stop = self._reconcile()
                if stop and not last:
                    return True
        self._end_epoch(epoch)
        return stop

    def _run_step(self, rows: torch.Tensor) -> None:
        self.replica.grads.zero_()
        *others, last = self._micro_batches(rows)
        for batch in others:
            with self.replica.more_to_come():
                self._forward_backward(batch)
        self._forward_backward(last)
        self.replica.sum_gradients()
        self.norms.append(self.optimizer.step(learning_rate(self.config, self.step, self.total_steps)))
        self.step += 1

    def _micro_batches(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A rank's rows m::accumulate, for every m. They are every (accumulate * world_size)-th of the rows of all ranks:
        while that product (--shards) stays, so do the micro-batches, whatever the world size."""
        count = self.config.accumulate
        return tuple(rows[first::count] for first in range(count)) if count > 1 else (rows,)

    def _forward_backward(self, rows: torch.Tensor) -> None:
        inputs, targets = self.train_rows[rows]
        with self.autocast():
            loss = self.objective.loss(self.replica.forward(inputs), targets)
        value = loss.detach()
        self.losses.append(value)
        # 0 * loss makes every gradient NaN where the loss is not finite: the sum then tells all ranks. (The weight as an
        # argument of backward() would be one operation less, and imports sympy: 0.4 s.)
        (loss * torch.add(self.share, value, alpha=0)).backward()

    # ---- what the ranks tell each other ---------------------------------------------------------------------------

    def _reconcile(self) -> bool:
        """Exchange the losses of the steps since the last time, and the wish to stop. True: all ranks stop here.

        Raises NonFiniteError on all ranks; no parameter has changed since before the step that it names.
        """
        count, now = len(self.norms), time.monotonic()
        first = self.step - count
        losses = tree_sum(torch.stack(self.losses).double().view(count, -1).T)  # of this rank, by step
        numbers = torch.cat((losses, torch.stack(self.norms).double())).cpu()  # waits for the device
        flags = torch.tensor([bool(self.stop), now - self.reconciled], dtype=torch.float64)
        everyone = self.peers.gather(torch.cat((flags, numbers)))
        losses, norms = everyone[:, 2:].view(-1, 2, count).unbind(1)  # each [ranks, steps]
        if not everyone.isfinite().all():
            self._refuse_non_finite(first, losses, norms)
        # The sum of each step by itself, so that a run repeats bit for bit whatever the interval.
        for step, (loss, norm) in enumerate(zip(tree_sum(losses).tolist(), norms[0].tolist(), strict=True), first):
            self._note(step, loss / self.config.global_batch_size, norm)
        self.record.lap("first_step")
        # About a second of steps, by the slowest rank; all ranks compute the same.
        seconds = everyone[:, 1].max().item()
        self.interval = max(1, min(MOST_STEPS_UNSEEN, 2 * count, int(count / max(seconds, 1e-6))))
        self.losses, self.norms, self.reconciled = [], [], now
        return bool(everyone[:, 0].any())

    def _note(self, step: int, loss: float, grad_norm: float) -> None:
        epoch, index = divmod(step, self.steps_per_epoch)
        self.loss_sum = self.loss_sum + loss if index else loss
        if (step + 1) % self.config.log_every == 0:
            self.record.write("step", epoch=epoch, step=step, loss=loss, loss_hex=loss.hex(), grad_norm=grad_norm)

    def _refuse_non_finite(self, first: int, losses: torch.Tensor, norms: torch.Tensor) -> None:
        index = (~(losses.isfinite() & norms.isfinite())).any(0).int().argmax().item()
        epoch, place = divmod(first + index, self.steps_per_epoch)
        ranks = (~losses[:, index].isfinite()).nonzero().flatten().tolist()
        where = f"loss on rank {', '.join(map(str, ranks))}" if ranks else "gradient"
        order = sample_order(self.config.seed, epoch, len(self.train_rows))
        rows = rows_of_rank(order, self.config.global_batch_size, *(ranks or [0])[:1], self.world_size)[place, :6].tolist()
        raise NonFiniteError(
            f"the {where} is not finite at step {first + index} (epoch {epoch}, rows {rows} and on): stopped before the "
            f"optimizer step, the snapshot is as it was; lower --lr {self.config.lr:g}, add --warmup-steps, or see these rows",
            everywhere=True,
        )

    # ---- the end of an epoch --------------------------------------------------------------------------------------

    def _end_epoch(self, epoch: int) -> None:
        config, done = self.config, self.step == self.total_steps
        values = {"loss": self.loss_sum / self.steps_per_epoch}
        if done or (epoch + 1) % config.eval_every == 0:
            values |= self._evaluate()
        self.history.append([epoch, *(value.hex() for value in values.values())])
        self.record.epoch(self, epoch, values)
        loss = values.get("eval_loss", float("inf"))
        if loss < (float.fromhex(self.best[1]) if self.best else float("inf")):
            self.best = [epoch, loss.hex()]
            self._on_rank_0(lambda: write(self.directory.best, self._tensors(), self._document()))
        if done or (epoch + 1) % config.save_every == 0:
            self._save_snapshot()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Mean loss and metric over the held-out rows, every row counted once, whatever the world size."""
        self.replica.model.eval()
        mine = torch.arange(self.rank, len(self.held_out), self.world_size, device=self.device)
        totals = torch.zeros(self.config.accumulate, 3, dtype=torch.float64, device=self.device)
        size = max(1, self.config.global_batch_size // self.world_size // self.config.accumulate)
        for total, shard in zip(totals, self._micro_batches(mine), strict=True):
            for rows in shard.split(size):
                inputs, targets = self.held_out[rows]
                with self.autocast():
                    outputs = self.replica.model(inputs)
                    total[0] += self.objective.loss(outputs, targets)
                total[1] += self.objective.metric(outputs, targets)
                total[2] += len(rows)
        loss, metric, count = tree_sum(self.peers.gather(tree_sum(totals).cpu())).tolist()
        assert count == len(self.held_out), (count, len(self.held_out))
        return {"eval_loss": loss / count, f"eval_{self.objective.metric_name}": metric / count}

    # ---- snapshots ------------------------------------------------------------------------------------------------

    def restore(self, state: tuple[dict[str, torch.Tensor], dict] | None) -> None:
        """Rank 0's snapshot (None for a new run) to all ranks. Raises SnapshotError on all ranks."""
        progress = self._on_rank_0(lambda: self._adopt(*state) if state else [0, 0.0, [], None])
        flat = [self.replica.values, *self.optimizer.state.values()]
        self.step, self.loss_sum, self.history, self.best = self.peers.broadcast(progress, flat)
        self.optimizer.steps.fill_(self.step)
        self._refuse_diverged_replicas()

    def _save_snapshot(self) -> None:
        began = time.monotonic()
        self._refuse_diverged_replicas()
        self._on_rank_0(lambda: self.directory.save(self._tensors(), self._document()))
        self.record.write("snapshot", step=self.step, epochs_run=len(self.history), seconds=time.monotonic() - began)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Names as in the bare model: no `module.`, no trace of DDP or torch.compile."""
        flats = {"model": self.replica.values} | {f"optim.{name}": flat for name, flat in self.optimizer.state.items()}
        return {f"{kind}.{name}": view for kind, flat in flats.items() for name, view in self.replica.views(flat).items()}

    def _document(self) -> dict:
        return dict(
            problem=self.config.problem(),
            data=self.fingerprint,
            step=self.step,
            steps_per_epoch=self.steps_per_epoch,
            epochs_run=len(self.history),
            epoch_loss_sum=self.loss_sum.hex(),
            history=self.history,
            best=self.best,
            world_size=self.world_size,
            versions=versions(),
        )

    def _adopt(self, tensors: dict[str, torch.Tensor], document: dict) -> list:
        """A snapshot's state into this replica; its progress. Raises SnapshotError that lists what does not fit."""

        def differences(theirs: dict, ours: dict) -> list[str]:
            names = sorted(ours.keys() | theirs.keys())
            return [f"{n}: {theirs.get(n)} there, {ours.get(n)} here" for n in names if ours.get(n) != theirs.get(n)]

        def shapes(tensors: dict[str, torch.Tensor]) -> dict:
            return {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()}

        mine, ours = self._tensors(), self._document()
        if missing := sorted(ours.keys() - document.keys()):
            raise SnapshotError(
                f"{self.directory.snapshot} lacks {', '.join(missing)}: it is no snapshot of a run; pass --fresh"
            )
        differ = differences(document["problem"] | {"data": document["data"]}, ours["problem"] | {"data": ours["data"]})
        differ = differ or differences(shapes(tensors), shapes(mine))
        if differ:
            raise SnapshotError(
                f"{self.directory.snapshot} is of another run ({'; '.join(differ[:8])}): pass that run's flags, another "
                f"--run-dir, or --fresh"
            )
        for name, view in mine.items():
            view.copy_(tensors[name])
        return [document["step"], float.fromhex(document["epoch_loss_sum"]), document["history"], document["best"]]

    def _on_rank_0(self, act: Callable):
        """Rank 0 acts, all ranks learn whether it could. Returns what it returned; raises its Failure on all ranks."""
        failure, result = self.record.failure, None
        if self.rank == 0 and not failure:
            try:
                result = act()
            except Failure as error:
                failure = error
        self.peers.agree(failure)
        return result

    def _refuse_diverged_replicas(self) -> None:
        sums = self.peers.gather(self.replica.checksum())[:, 0]
        odd = (sums != sums[0]).nonzero().flatten().tolist()
        if odd:
            raise PeerLostError(
                f"the parameters of rank {', '.join(map(str, odd))} differ from rank 0's at step {self.step}: no snapshot was "
                f"written; suspect the memory or the fabric of that node, and resume without it",
                everywhere=True,
            )

"""The training loop. Read this file first.

_run_step() is the step of every PyTorch tutorial: zero_grad, forward, loss, backward, step. Each further task of a run on
many ranks has its own module:

    order.py               chooses the rows that this rank trains on
    batches.py, loading.py read them, and make batches on the device
    build.py, probe.py     make model and optimizer, and try them on a few rows before training
    reduction.py           sums the gradients of all ranks: DistributedDataParallel, or by hand
    sharding.py            does the same for a model that one device cannot hold
    guard.py               keeps NaN and infinity out of the model
    reconcile.py           exchanges losses, norms and the wish to stop between ranks, about once a second
    later.py, replicas.py  check the model at each exchange, and that all ranks compute alike, and have equal parameters
    attributes.py          compares what no snapshot holds
    evaluation.py          computes losses and metrics on the held-out rows
    state.py, document.py, snapshot.py, files.py, run_directory.py    what a snapshot holds, how it is written, and where
    background.py          writes snapshots while training goes on
"""

import importlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ddp_core.background import Saver
from ddp_core.batches import Batches
from ddp_core.build import build_model_and_optimizer
from ddp_core.config import TrainConfig
from ddp_core.device import versions
from ddp_core.errors import ExitCode, NonFiniteError
from ddp_core.evaluation import Evaluation
from ddp_core.files import in_place
from ddp_core.guard import Guard
from ddp_core.later import Later
from ddp_core.order import DROPOUT, OPTIMIZER, Order, drawing_alike, micro_batches, seed_generators
from ddp_core.probe import notes_on_schedule
from ddp_core.process_group import Peers
from ddp_core.profile import Profile
from ddp_core.reconcile import Agreed, Reconciliation
from ddp_core.record import Record
from ddp_core.reduction import REDUCTIONS, Reduction
from ddp_core.rehearsal import rehearse
from ddp_core.replicas import refuse_diverged, refuse_unlike
from ddp_core.run_directory import RunDirectory
from ddp_core.state import State, made_by_torch, saved_buffers
from ddp_core.stop import StopFlag
from ddp_core.summary import Stopwatch
from ddp_core.workload import Workload, factor_of, outputs_of, parts_of, refuse_unused


class Trainer:
    """One rank's part of a run. Every rank must call restore() and train() (they are collective)."""

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        peers: Peers,
        device: torch.device,
        rows: tuple,
        fingerprint: str,
        directory: RunDirectory | None,
        record: Record,
        stop: StopFlag,
        reduction: type[Reduction] | None = None,
    ):
        """rows: for training, and held out (or None). fingerprint: hash of both. directory: None on every rank but 0.

        reduction: a class that replaces the one of --reduction.
        """
        sharded = config.sharding != "none"
        # Importing sharding.py takes a second, so only a run that needs it pays.
        needed = sharded or config.checkpoint_activations
        sharding: Any = importlib.import_module("ddp_core.sharding") if needed else None
        self.reduction_class = reduction or (sharding.Sharded if sharded else REDUCTIONS[config.reduction])
        self.workload, self.config, self.peers, self.device = workload, config, peers, device
        self.directory: Any = directory
        self.saver: Any = directory and Saver(directory, record, config.grace)
        self.record, self.stop = record, stop
        self.ranks: list[dict] = []  # on rank 0: host and device of each rank, for the closing table
        self.rank_0_writes = False  # True: some rank cannot see the run directory, so rank 0 writes all snapshot files
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
        self.autocast = (lambda: torch.autocast(device.type, autocast_dtype)) if autocast_dtype else nullcontext

        train, held_out = rows
        # Each rank can read every row; the indices of each batch (_plan) select the ones it does read.
        self.train_rows = Batches(train, workload, config, device, dtype)
        self.held_out = None if held_out is None else Batches(held_out, workload, config, device, dtype, "held-out ")
        # The order depends only on seed and epoch: every rank computes the same one and takes every world_size-th row.
        self.order = Order(len(train), config.seed, config.global_batch_size, peers.rank, peers.world_size)
        self.steps_per_epoch = config.steps_of(len(train))
        self.total_steps = config.epochs * self.steps_per_epoch

        build = partial(build_model_and_optimizer, self.train_rows, peers, self.autocast, sharding)
        self.model, self.optimizer, self.probed = peers.together(build)
        self.own_optimizer = not made_by_torch(self.optimizer)
        self.probed.notes.extend(peers.together(lambda: notes_on_schedule(workload, self.model, self.total_steps)))
        facts = dict(problem=config.problem(), data=fingerprint, steps_per_epoch=self.steps_per_epoch)
        facts |= dict(world_size=peers.world_size, versions=versions())
        self.state: State = (sharding.ShardedState if sharded else State)(self.model, self.optimizer, facts)
        workload.core_sets(count_steps=lambda: self.step)
        self.reconciliation, self.last_save = Reconciliation(peers), time.monotonic()

    def restore(self, loaded: tuple[dict[str, torch.Tensor], dict] | None) -> None:
        """Continue from rank 0's snapshot, or start with rank 0's new model (loaded is None on the other ranks, too).

        Raises SnapshotError on all ranks.
        """
        config = self.config
        self.state.restore(loaded, self.directory and in_place(self.directory.snapshot), self.peers)
        # Only now: DDP and the flat gradient tensor are built from the restored parameters.
        compiled: Any = torch.compile(self.model) if config.compile else self.model
        self.reduction = self.reduction_class(self.model, compiled, self.peers, self.workload.unused_parameters)
        self.reduction.changing = self.probed.buffers
        shared = self.probed.buffers if self.peers.world_size > 1 else [*saved_buffers(self.model)]
        self.later = Later(self.workload, self.model, self.optimizer, shared, self.step)
        weight = self.reduction.weight(config.global_batch_size)
        self.guard = Guard(self.optimizer, config.precision, config.clip_norm, weight, self.device)
        self.guard.scale = self.state.progress.scale
        # Check before training that every rank received the same parameters, not only at the first snapshot.
        refuse_diverged(self)

    def _first_backward(self) -> None:
        """Run backward on the two rows that probe.py tried, for Reduction.warm_up(), which discards the gradients."""
        rows = self.probed.rows
        with self.autocast():
            loss = self.workload.loss(outputs_of(self.workload, self.reduction.forward, rows), rows)
        parts_of(loss, self.probed.losses, self.workload)[0].backward()
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Before the other ranks wait for a sum that this rank has no part of."""
        if self.reduction.needs_all and any(parameter.grad is None for parameter in self.reduction.parameters):
            refuse_unused(self.workload, self.model, self.step)

    @property
    def step(self) -> int:
        """Optimizer steps done since the run began, counted over all its starts."""
        return self.state.progress.step

    def close(self) -> None:
        """Stop the worker processes that read rows."""
        for batches in filter(None, (self.train_rows, self.held_out)):
            batches.close()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> ExitCode:
        """Train to the end (DONE), or until the ranks agree to stop (STOPPED). Raises the same kind of Failure on all ranks."""
        self.first = self.step  # the step at which this start of the run begins
        self.profile = Profile(self.config.profile, self.first, self.directory and self.directory.trace, self.record)
        if self.held_out and (self.step < self.total_steps or self._unfinished):
            self.evaluation = Evaluation(self)
        if self.step < self.total_steps:
            # One stream for all epochs, so that its workers also read ahead across the end of an epoch.
            self.batches = self.train_rows.stream(self._plan())
            refuse_unlike(self)
            self.reduction.warm_up(self._first_backward)
        self.watch = Stopwatch()
        # First repeat the evaluation that the previous start did not complete, if there is one.
        stop = self._unfinished and self._end_epoch(len(self.state.progress.history) - 1)
        while self.step < self.total_steps and not stop:
            stop = self._run_epoch(*divmod(self.step, self.steps_per_epoch))
        if stopped := stop and (self.step < self.total_steps or self._unfinished):
            self._save_snapshot()
        self.profile.end()
        # A run must not end before its last snapshot is on the disk.
        with self.watch.part("snapshots"):
            self._wait_for_save()
            self.peers.together(self.saver and self.saver.settle, self.record.failure)
        if stopped:
            return ExitCode.STOPPED
        rehearse("end", self.step)
        return ExitCode.DONE

    def _run_epoch(self, epoch: int, first: int) -> bool:
        """Train the steps of an epoch from index `first` on. Returns True when the ranks have agreed to stop."""
        self.reduction.forward.train()
        stop, done = False, (epoch + 1) * self.steps_per_epoch == self.total_steps
        ends = done or self._evaluates(epoch) or (epoch + 1) % self.config.save_every == 0
        for index in range(first, self.steps_per_epoch):
            self.profile.at(self.step)
            self._run_step()
            last = index == self.steps_per_epoch - 1
            save = self.config.save_steps > 0 and self.step % self.config.save_steps == 0
            save = save or self.step == self.profile.last
            # A reconciliation waits for the device. An epoch that ends without evaluation or snapshot needs none:
            # the next one reports its loss.
            if (last and ends) or save or self.reconciliation.due:
                agreed = self._reconcile(epoch, index)
                stop, save = agreed.stop, save or agreed.save
                if save and not last and not stop:
                    self._save_snapshot()
                if stop and not last:
                    return True
        if ends or save:
            stop = self._end_epoch(epoch, save, stop)
        return stop

    def _run_step(self) -> None:
        """Do one optimizer step, on this rank's share of a global batch."""
        rehearse("step", self.step, self.model)
        self.reconciliation.begin_step()
        # This rank's rows of the global batch, in --accumulate micro-batches (one by default).
        with self.profile.part("data"), self.watch.part("reading"):
            batches = [next(self.batches) for _ in range(self.config.accumulate)]

        # backward() adds to existing gradients, so each step must clear the previous ones.
        self.reduction.zero_grad()
        for number, batch in enumerate(batches):
            # Dropout depends only on seed, step and micro-batch, so a resumed run draws the same masks.
            shard = self.peers.rank + self.peers.world_size * number
            seed_generators(self.device, DROPOUT, self.config.seed, self.step, shard, others=self.probed.others)
            # DDP sums over ranks only in the step's last backward; the earlier ones add up on this rank (no_sync).
            with self.reduction.no_sync() if number < len(batches) - 1 else nullcontext():
                # bf16 and fp16 apply to the forward pass only: parameters and gradients stay fp32.
                with self.autocast(), self.profile.part("forward"), self.watch.part("forward"):
                    outputs = outputs_of(self.workload, self.reduction.forward, batch)
                    loss, *parts = parts_of(self.workload.loss(outputs, batch), self.probed.losses, self.workload)
                # Its value stays on the device until the next reconciliation, so no step waits for it.
                self.reconciliation.losses.append(torch.stack([loss, *parts]).detach() if parts else loss.detach())
                # Each rank's loss is a sum over its rows. Weighted, the gradients of all ranks add up to the gradient of
                # the mean over the global batch.
                with self.profile.part("backward"):
                    self.guard.weighted(loss).backward()

        self._refuse_unused()
        # DDP has summed the gradients during backward; flat and canonical sum them here.
        with self.profile.part("communication"), self.watch.part("communication"):
            self.reduction.sum_gradients()

        # The learning rate depends only on the step, so there is no scheduler state to save.
        self._set_learning_rate()
        # Clip after the sum over ranks: every rank has the same norm, clips alike, and parameters stay equal.
        self.reconciliation.norms.append(self.guard.norm(self.reduction.gradients, self.reduction.norm))
        # A user's optimizer may draw noise: it must be the same on every rank and in a resumed run. torch.optim draws none.
        draw = (self.device, self.peers.rank, OPTIMIZER, self.config.seed, self.step)
        alike = drawing_alike(*draw) if self.own_optimizer else nullcontext()
        with self.profile.part("optimizer"), self.later.watching(self.step), alike:
            self.guard.step()  # optimizer.step(), unless a gradient is not finite
        self.state.progress.step += 1

    def _set_learning_rate(self) -> None:
        factor = factor_of(self.workload, self.step, self.total_steps)
        self.later.look_at_rates(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _plan(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the epoch and the row indices of every micro-batch of this rank, from this step to the end of the run."""
        epoch, first = divmod(self.step, self.steps_per_epoch)
        while epoch < self.config.epochs:
            for rows in self.order.epoch(epoch, first, self.steps_per_epoch, self.train_rows.index_device):
                for part in micro_batches(rows, self.config.accumulate):
                    yield epoch, part
            epoch, first = epoch + 1, 0

    # ---- what the ranks exchange ----------------------------------------------------------------------------------

    def _reconcile(self, epoch: int, index: int) -> Agreed:
        """Collective. Exchange and record the steps since the last reconciliation.

        Raises NonFiniteError on all ranks; the guard has blocked every update from the step that it names on.
        """
        config = self.config
        due = config.save_minutes > 0 and time.monotonic() - self.last_save >= 60 * config.save_minutes
        if self.saver:
            self.saver.look()
            # When the background save failed, ask for a new one: it raises the StorageError on all ranks.
            due = due or self.saver.failed
        # Only rank 0's clock counts: with a clock each, ranks would not all save at the same step.
        with self.profile.part("communication"):
            agreed = self.reconciliation.exchange(self.step, bool(self.stop), due, self.guard.tolerates())
        if agreed.not_finite:
            self._refuse_non_finite(*agreed.not_finite)
        for note in self.later.look(self.step, agreed.norms):
            self.record.say(note=note)
        # The ranks exchange sums over rows, divided once here: means of means would round differently at each world size.
        losses = (agreed.losses / config.global_batch_size).tolist()
        for step, (parts, norm) in enumerate(zip(losses, agreed.norms.tolist(), strict=True), self.step - len(losses)):
            self._record_step(step, *parts, grad_norm=norm)
        self.record.lap("first_step")
        self.watch.speeds.append(len(losses) * config.global_batch_size / max(agreed.seconds, 1e-9))
        left = (self.total_steps - self.step) * config.global_batch_size / self.watch.speed
        place = (f"{epoch + 1}/{config.epochs}", index + 1, self.steps_per_epoch)
        self.record.progress(*place, losses[-1][0], self.watch.speeds[-1], left)
        return agreed

    def _record_step(self, step: int, loss: float, *parts: float, grad_norm: float) -> None:
        # Every rank keeps loss_sum and history alike; only rank 0's record is open, and writes.
        epoch, index = divmod(step, self.steps_per_epoch)
        progress = self.state.progress
        progress.loss_sum = progress.loss_sum + loss if index else loss
        self.watch.skipped += not math.isfinite(grad_norm)
        if (step + 1) % self.config.log_every == 0:
            by_name = dict(losses=dict(zip(self.probed.losses, parts, strict=True))) if parts else {}
            norm = grad_norm if math.isfinite(grad_norm) else None  # fp16 skipped this step
            self.record.write("step", epoch=epoch, step=step, loss=loss, loss_hex=loss.hex(), **by_name, grad_norm=norm)
        if index == self.steps_per_epoch - 1 and not self._evaluates(epoch):
            self._close_epoch(epoch, {})

    def _refuse_non_finite(self, step: int, ranks: list[int], which: str) -> None:
        # The message names rows of the first rank whose loss is not finite; of rank 0 where only the gradient is not.
        epoch, index = divmod(step, self.steps_per_epoch)
        size, world_size = self.config.global_batch_size, self.peers.world_size
        order = Order(self.order.count, self.config.seed, size, ranks[0] if ranks else 0, world_size)
        rows = next(order.epoch(epoch, index, index + 1, torch.device("cpu")))[:6].tolist()
        raise NonFiniteError(
            f"the {which} is not finite at step {step} (epoch {epoch}, rows {rows} and on): stopped before the optimizer "
            f"step, the snapshot is as it was; lower --lr {self.config.lr:g}, add --warmup-steps, or see these rows",
            everywhere=True,
        )

    # ---- the end of an epoch, and snapshots -----------------------------------------------------------------------

    def _evaluates(self, epoch: int) -> bool:
        """Whether this epoch ends with an evaluation of the held-out rows."""
        return self.held_out is not None and (epoch + 1 == self.config.epochs or (epoch + 1) % self.config.eval_every == 0)

    @property
    def _unfinished(self) -> bool:
        """Whether a stop interrupted the last epoch's evaluation: its history row then has only epoch and training loss."""
        history, at_end = self.state.progress.history, self.step % self.steps_per_epoch == 0
        return bool(history) and at_end and len(history[-1]) == 2 and self._evaluates(len(history) - 1)

    def _end_epoch(self, epoch: int, save: bool = False, stop: bool = False) -> bool:
        """Evaluate and save, where this epoch does. Call it after a reconciliation: all losses of the epoch must be known.

        save: a snapshot is due, whatever --save-every says. stop: the ranks have agreed to stop, and train() saves.
        Returns True where the ranks have agreed to stop, before or during the evaluation.
        """
        progress, best = self.state.progress, False
        if self._evaluates(epoch):
            with self.watch.part("evaluation"):
                # A buffer that began to change late may differ by rank (later.py). All evaluate with rank 0's, as the snapshot.
                self.peers.broadcast_tensors([*saved_buffers(self.model).values()])
                self.later.begin()
                rehearse("evaluation", self.step)
                results = self.evaluation.evaluate()
            if not results:  # the ranks agreed to stop: the next start evaluates, and records this epoch
                progress.history[epoch:] = [[epoch, (progress.loss_sum / self.steps_per_epoch).hex()]]
                return True
            self._close_epoch(epoch, results)
            if results["eval_loss"] < (float.fromhex(progress.best[1]) if progress.best else float("inf")):
                progress.best, best = [epoch, results["eval_loss"].hex()], True
        due = self.step == self.total_steps or (not stop and (save or (epoch + 1) % self.config.save_every == 0))
        if due or best:
            self._save_snapshot(best, due)
        return stop

    def _close_epoch(self, epoch: int, results: dict[str, float]) -> None:
        """Record an epoch after its last step. results: name to mean over the held-out rows; {} without evaluation."""
        progress = self.state.progress
        values = {"loss": progress.loss_sum / self.steps_per_epoch} | results
        progress.history[epoch:] = [[epoch, *(value.hex() for value in values.values())]]
        progress.measured = [*values] if results else progress.measured
        self.record.epoch(epoch, self.config.epochs, (epoch + 1) * self.steps_per_epoch, values)

    def _save_snapshot(self, best: bool = False, snapshot: bool = True) -> None:
        """Collective. Write best.safetensors (best), a snapshot (snapshot), or both. Raises a Failure on all ranks.

        Where memory allows, training waits only for a copy of the state, which a thread writes meanwhile (background.py).
        """

        def write(tensors: dict, drafts: Callable | None) -> None:
            self.later.refuse_other_shapes(self.step)  # an evaluation may have resized buffers
            self.saver.save(tensors, self.state.document(), best, snapshot, drafts)

        with self.profile.part("snapshot"), self.watch.part("snapshots"):
            self._wait_for_save()
            refuse_diverged(self)
            self.state.progress.scale = self.guard.scale
            self.state.save(write, self)
            self._wait_for_save(beside=False)
        self.last_save = time.monotonic() if snapshot else self.last_save

    def _wait_for_save(self, beside: bool = True) -> None:
        """Collective. Wait until rank 0's save is on the disk. beside=False: only for one that training must wait for.

        In short pieces: in one collective for the whole save the other ranks would give rank 0 up after --timeout.
        """
        seconds = min(30.0, self.config.timeout / 4)
        while self.peers.which(bool(self.saver) and (beside or not self.saver.beside) and not self.saver.written(seconds)):
            pass

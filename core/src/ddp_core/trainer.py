"""The training loop. Read this file first.

A step is what every PyTorch tutorial shows: zero_grad, forward, loss, backward, step (_run_step). Whatever else a
run of many ranks needs is in a module of its own:

    order.py, batches.py   which rows this rank trains on, and how they are read
    build.py, probe.py     model and optimizer, looked at before anything is trained
    reduction.py           how the gradients of all ranks are summed: DistributedDataParallel, or by hand
    sharding.py            the same for models in parts, where one device does not hold them
    guard.py               numbers that are not finite never reach the model
    reconcile.py           what the ranks tell each other, once a second
    later.py, replicas.py  what is looked at then, and before each snapshot
    evaluation.py          the held-out rows
    state.py, document.py, snapshot.py, files.py, run_directory.py    what is saved, how it is written, and where
    background.py          and beside what
"""

import importlib
import itertools
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
from ddp_core.replicas import refuse_diverged
from ddp_core.run_directory import RunDirectory
from ddp_core.state import State, made_by_torch, saved_buffers
from ddp_core.stop import StopFlag
from ddp_core.summary import Stopwatch
from ddp_core.workload import Workload, factor_of, outputs_of, parts_of, refuse_unused


class Trainer:
    """One rank's part of a run; restore() and train() are collective. directory: rank 0's, None elsewhere."""

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
        """reduction: another class than --reduction's."""
        sharded = config.sharding != "none"
        # Its import costs a second: only for those who want it.
        needed = sharded or config.checkpoint_activations
        sharding: Any = importlib.import_module("ddp_core.sharding") if needed else None
        self.kind = reduction or (sharding.Sharded if sharded else REDUCTIONS[config.reduction])
        self.workload, self.config, self.peers, self.device = workload, config, peers, device
        self.directory: Any = directory
        self.saver: Any = directory and Saver(directory, record, config.grace)
        self.record, self.stop = record, stop
        self.ranks: list[dict] = []  # a row a rank, for the table at the end
        self.alone = False  # whether rank 0 writes all of a snapshot, for not all ranks see the run directory
        dtype = torch.float64 if config.precision == "fp64" else torch.float32
        lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
        self.autocast = (lambda: torch.autocast(device.type, lower)) if lower else nullcontext

        train, held_out = rows
        # Both know all rows. Which of them this rank reads is asked for batch by batch.
        self.train_rows = Batches(train, workload, config, device, dtype)
        self.held_out = None if held_out is None else Batches(held_out, workload, config, device, dtype, "held-out ")
        # Of (seed, epoch) alone: every rank makes the same order and takes every world_size-th row of it.
        self.order = Order(len(train), config.seed, config.global_batch_size, peers.rank, peers.world_size)
        self.steps_per_epoch = config.steps_of(len(train))
        self.total_steps = config.epochs * self.steps_per_epoch

        build = partial(build_model_and_optimizer, self.train_rows, peers, self.autocast, sharding)
        self.model, self.optimizer, self.seen = peers.together(build)
        self.own_optimizer = not made_by_torch(self.optimizer)
        self.seen.notes.extend(peers.together(lambda: notes_on_schedule(workload, self.model, self.total_steps)))
        facts = dict(problem=config.problem(), data=fingerprint, steps_per_epoch=self.steps_per_epoch)
        facts |= dict(world_size=peers.world_size, versions=versions())
        make_state = partial(sharding.ShardedState, device=device) if sharded else State
        self.state: State = make_state(self.model, self.optimizer, facts)
        workload.core_sets(count_steps=lambda: self.step)
        self.reconciliation, self.watch, self.saved = Reconciliation(peers), Stopwatch(), time.monotonic()

    def restore(self, loaded: tuple[dict[str, torch.Tensor], dict] | None) -> None:
        """Go on from rank 0's snapshot, or begin with its new model. Raises SnapshotError on all ranks."""
        config = self.config
        self.state.restore(loaded, self.directory and in_place(self.directory.snapshot), self.peers)
        # After the numbers are there: DDP and the flat tensors are made of them.
        compiled: Any = torch.compile(self.model) if config.compile else self.model
        self.reduction = self.kind(self.model, compiled, self.peers, self.workload.unused_parameters)
        self.reduction.changing = self.seen.buffers
        shared = self.seen.buffers if self.peers.world_size > 1 else [*saved_buffers(self.model)]
        self.later = Later(self.workload, self.model, self.optimizer, shared, self.step)
        weight = self.reduction.weight(config.global_batch_size)
        self.guard = Guard(self.optimizer, config.precision, config.clip_norm, weight, self.device)
        self.guard.scale = self.state.progress.scale
        # Now, not at the first snapshot: what was sent to the ranks has arrived as it was.
        refuse_diverged(self.model, self.peers, self.reduction.split_over, self.step)

    def _first_backward(self) -> None:
        """Of the rows that were tried, on every rank; nothing is made of its gradients."""
        rows = self.seen.rows
        with self.autocast():
            loss = self.workload.loss(outputs_of(self.workload, self.reduction.forward, rows), rows)
        parts_of(loss, self.seen.losses, self.workload)[0].backward()

    @property
    def step(self) -> int:
        """Optimizer steps done, in all epochs and all starts of this run."""
        return self.state.progress.step

    def close(self) -> None:
        """End the processes that read rows."""
        for batches in filter(None, (self.train_rows, self.held_out)):
            batches.close()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> ExitCode:
        """Train to the end, or until the ranks agree to stop. Raises a Failure on all ranks alike."""
        self.first = self.step  # of this start
        self.profile = Profile(self.config.profile, self.first, self.directory and self.directory.trace, self.record)
        # One stream for all epochs: its workers read ahead over the end of an epoch, too.
        self.batches = self.train_rows.stream(self._plan())
        if self.step < self.total_steps:
            # Now its workers are forked. Forked behind the first sum of gradients they crashed, in one session of two.
            self.batches = itertools.chain([next(self.batches)], self.batches)
        if self.held_out and (self.step < self.total_steps or self._unfinished):
            self.evaluation = Evaluation(self)
        if self.step < self.total_steps:
            self.reduction.settle(self._first_backward)
        self.watch, self.reconciliation.last = Stopwatch(), time.monotonic()
        stop = self._unfinished and self._end_epoch(len(self.state.progress.history) - 1)
        while self.step < self.total_steps and not stop:
            stop = self._run_epoch(*divmod(self.step, self.steps_per_epoch))
        if stop and (self.step < self.total_steps or self._unfinished):
            self._save_snapshot()
            self._finish()
            return ExitCode.STOPPED
        self._finish()
        rehearse("end", self.step)
        return ExitCode.DONE

    def _run_epoch(self, epoch: int, first: int) -> bool:
        """The steps of an epoch from `first` on. True when the ranks have agreed to stop."""
        self.reduction.forward.train()
        stop, done = False, (epoch + 1) * self.steps_per_epoch == self.total_steps
        ends = done or self._evaluates(epoch) or (epoch + 1) % self.config.save_every == 0
        for index in range(first, self.steps_per_epoch):
            self.profile.at(self.step)
            self._run_step()
            last = index == self.steps_per_epoch - 1
            save = self.config.save_steps > 0 and self.step % self.config.save_steps == 0
            save = save or self.step == self.profile.last
            # An epoch without evaluation and snapshot is no reason to wait: its loss is told a little later.
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
        """One optimizer step, on this rank's share of a global batch."""
        rehearse("step", self.step, self.model)
        began = time.perf_counter()
        # Without --accumulate one batch: this rank's rows of the global batch.
        with self.profile.part("data"):
            batches = [next(self.batches) for _ in range(self.config.accumulate)]
        self.watch.spent("reading", began)

        # backward() adds to the gradients that are there, so a step begins without any.
        self.reduction.zero_grad()
        for number, batch in enumerate(batches):
            # Dropout is a function of seed, step and micro-batch: a stopped run resumes with the same masks.
            shard = self.peers.rank + self.peers.world_size * number
            seed_generators(self.device, DROPOUT, self.config.seed, self.step, shard, others=self.seen.others)
            # DDP sums gradients in the last backward of a step; before it they only add up on each rank.
            with self.reduction.more_to_come() if number < len(batches) - 1 else nullcontext():
                # bf16 and fp16 are for the forward pass alone: parameters and gradients stay fp32.
                with self.autocast(), self.profile.part("forward"):
                    outputs = outputs_of(self.workload, self.reduction.forward, batch)
                    loss = self._loss_of(self.workload.loss(outputs, batch))
                if number == 0:
                    self.watch.spent("own", began)
                # The weight makes the gradients of all ranks add up to those of the mean over the global batch.
                with self.profile.part("backward"):
                    self.guard.weighted(loss).backward()

        began = time.perf_counter()
        # DDP has summed the gradients during backward; flat and canonical do it here.
        with self.profile.part("communication"):
            self.reduction.sum_gradients()
        self.watch.spent("communication", began)

        # A function of the step, so there is no scheduler whose state could be lost.
        self._set_learning_rate()
        # After the sum, so that every rank has the same norm, clips alike, and keeps equal parameters.
        gradients = self.reduction.gradients
        if self.reduction.needs_all and len(gradients) < len(self.reduction.parameters):
            refuse_unused(self.workload, self.model, self.step)
        self.reconciliation.norms.append(self.guard.norm(gradients, self.reduction.norm))
        # Noise that an optimizer adds is the same on every rank, and in a resumed run; torch.optim's own add none.
        draw = (self.device, self.peers.rank, OPTIMIZER, self.config.seed, self.step)
        with self.profile.part("optimizer"), drawing_alike(*draw) if self.own_optimizer else nullcontext():
            self.guard.step()  # optimizer.step(), unless a gradient is not finite
        self.state.progress.step += 1

    def _loss_of(self, loss: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss to train on, a scalar. Its value waits on the device for the next reconciliation: no step waits for it."""
        total, *parts = parts_of(loss, self.seen.losses, self.workload)
        self.reconciliation.losses.append(torch.stack([part.detach() for part in (total, *parts)]) if parts else total.detach())
        return total

    def _set_learning_rate(self) -> None:
        factor = factor_of(self.workload, self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _plan(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The epoch and the rows of every micro-batch, from this step to the run's end."""
        epoch, first = divmod(self.step, self.steps_per_epoch)
        while epoch < self.config.epochs:
            for rows in self.order.epoch(epoch, first, self.steps_per_epoch, self.train_rows.index_device):
                for part in micro_batches(rows, self.config.accumulate):
                    yield epoch, part
            epoch, first = epoch + 1, 0

    # ---- what the ranks tell each other ---------------------------------------------------------------------------

    def _reconcile(self, epoch: int, index: int) -> Agreed:
        """Raises NonFiniteError on all ranks; no parameter has changed since before the step that it names."""
        config = self.config
        due = config.save_minutes > 0 and time.monotonic() - self.saved >= 60 * config.save_minutes
        if self.saver:
            self.saver.look()
            # A save that has failed beside the training is due again: so all ranks hear of it, now.
            due = due or self.saver.failed
        # Rank 0's clock decides for all: ranks that looked at their own would not save at the same step.
        with self.profile.part("communication"):
            agreed = self.reconciliation.exchange(self.step, bool(self.stop), due, self.guard.tolerates())
        if agreed.not_finite:
            self._refuse_non_finite(*agreed.not_finite)
        for note in self.later.look(self.step, agreed.norms):
            self.record.say(note=note)
        # Sums over rows travel, and are divided once: a mean of the ranks' means would round at every world size anew.
        losses = (agreed.losses / config.global_batch_size).tolist()
        for step, (parts, norm) in enumerate(zip(losses, agreed.norms.tolist(), strict=True), agreed.first):
            self._record_step(step, *parts, grad_norm=norm)
        self.record.lap("first_step")
        self.watch.speeds.append(len(losses) * config.global_batch_size / max(agreed.seconds, 1e-9))
        left = (self.total_steps - self.step) * config.global_batch_size / self.watch.speed
        place = (f"{epoch + 1}/{config.epochs}", index + 1, self.steps_per_epoch)
        self.record.progress(*place, losses[-1][0], self.watch.speeds[-1], left)
        return agreed

    def _record_step(self, step: int, loss: float, *parts: float, grad_norm: float) -> None:
        epoch, index = divmod(step, self.steps_per_epoch)
        progress = self.state.progress
        progress.loss_sum = progress.loss_sum + loss if index else loss
        self.watch.skipped += not math.isfinite(grad_norm)
        if (step + 1) % self.config.log_every == 0:
            by_name = dict(losses=dict(zip(self.seen.losses, parts, strict=True))) if parts else {}
            norm = grad_norm if math.isfinite(grad_norm) else None  # fp16 skipped this step
            self.record.write("step", epoch=epoch, step=step, loss=loss, loss_hex=loss.hex(), **by_name, grad_norm=norm)
        if index == self.steps_per_epoch - 1 and not self._evaluates(epoch):
            self._close_epoch(epoch, {})

    def _refuse_non_finite(self, step: int, ranks: list[int], which: str) -> None:
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
        """Whether this epoch ends with the held-out rows."""
        return self.held_out is not None and (epoch + 1 == self.config.epochs or (epoch + 1) % self.config.eval_every == 0)

    @property
    def _unfinished(self) -> bool:
        """Whether a stop broke off the last epoch's evaluation: its row of history has the training loss alone."""
        history, at_end = self.state.progress.history, self.step % self.steps_per_epoch == 0
        return bool(history) and at_end and len(history[-1]) == 2 and self._evaluates(len(history) - 1)

    def _end_epoch(self, epoch: int, save: bool = False, stop: bool = False) -> bool:
        """Evaluation and snapshots, where this epoch has them. The ranks have just told each other their losses.

        save: whether a snapshot is due, whatever --save-every says. stop: whether train() is about to save the last one.
        True where the ranks have agreed to stop, before or during the evaluation.
        """
        progress, best = self.state.progress, False
        if self._evaluates(epoch):
            began = time.perf_counter()
            # BatchNorm's statistics are each rank's own: all evaluate with those that the snapshot has.
            self.peers.broadcast_tensors([*saved_buffers(self.model).values()])
            self.later.begin()
            rehearse("evaluation", self.step)
            results = self.evaluation.evaluate()
            self.watch.spent("evaluation", began)
            if not results:  # the next start evaluates, and records this epoch
                progress.history[epoch:] = [[epoch, self._mean_loss.hex()]]
                return True
            self._close_epoch(epoch, results)
            if results["eval_loss"] < (float.fromhex(progress.best[1]) if progress.best else float("inf")):
                progress.best, best = [epoch, results["eval_loss"].hex()], True
        due = self.step == self.total_steps or (not stop and (save or (epoch + 1) % self.config.save_every == 0))
        if due or best:
            self._save_snapshot(best, due)
        self.reconciliation.last = time.monotonic()  # the next steps are timed without this
        return stop

    @property
    def _mean_loss(self) -> float:
        """Of the epoch that has just ended."""
        return self.state.progress.loss_sum / self.steps_per_epoch

    def _close_epoch(self, epoch: int, results: dict[str, float]) -> None:
        """All steps of the epoch are known. results: of the held-out rows."""
        progress = self.state.progress
        values = {"loss": self._mean_loss} | results
        progress.history[epoch:] = [[epoch, *(value.hex() for value in values.values())]]
        progress.measured = [*values] if results else progress.measured
        self.record.epoch(epoch, self.config.epochs, (epoch + 1) * self.steps_per_epoch, values)

    def _save_snapshot(self, best: bool = False, snapshot: bool = True) -> None:
        """Training waits for a copy of the state, which is written while it goes on. best: as best.safetensors, too."""
        began = time.perf_counter()
        refuse_diverged(self.model, self.peers, self.reduction.split_over, self.step)
        with self.profile.part("snapshot"):
            self.state.progress.scale = self.guard.scale

            def write(tensors: dict, drafts: Callable | None) -> None:
                self.later.refuse_other_shapes(self.step)  # an evaluation may have changed them
                self.saver.save(tensors, self.state.document(), best, snapshot, drafts)

            self.state.save(write, self)
        self.saved = time.monotonic() if snapshot else self.saved
        self.watch.spent("snapshots", began)

    def _finish(self) -> None:
        """A run has not ended before its last snapshot is on the disk."""
        self.profile.end()
        began = time.perf_counter()
        self.peers.together(self.saver and self.saver.settle, self.record.failure)
        self.watch.spent("snapshots", began)

"""The training loops that ours is compared with: an expert's with DistributedDataParallel, Accelerate's and Lightning's.

Accelerate and Lightning run twice. Untuned: as their documentation shows them, with rows one by one through DataLoader and
the default optimizer. Tuned: with the expert's choices, which are whole batches indexed in one tensor on the device,
gradients that live in DDP's buckets, and a fused optimizer. None writes logs or checkpoints.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ours import Problem
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.flop_counter import FlopCounterMode

EpochsOf = Callable[[torch.nn.Module, int], Iterator[int]]  # Turns.epochs
MIXED = {"fp32": "no", "bf16": "bf16"}  # --precision in Accelerate's words
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


# ---- what they share ------------------------------------------------------------------------------------------------


def loss_of(problem: Problem, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the rows, as most programs have it: DDP averages it over the ranks."""
    outputs = problem.workload.forward(model, batch)
    if problem.workload.name == "unet":  # sums over the rows, of two losses
        sums = problem.workload.loss(outputs, batch)
        return sum(sums.values()) / len(batch[0])
    if problem.workload.name == "regression":
        return F.mse_loss(outputs, batch[1])
    if problem.workload.name == "gpt":
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten().long())
    return F.cross_entropy(outputs, batch[1].long())


def optimizer_of(problem: Problem, model: torch.nn.Module, tuned: bool) -> torch.optim.Optimizer:
    config, choices = problem.config, dict(fused=True) if tuned else {}
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), config.lr, config.momentum, **choices)
    return torch.optim.AdamW(model.parameters(), config.lr, (config.momentum, 0.95), weight_decay=0.0, **choices)


def device_of(problem: Problem) -> torch.device:
    if problem.config.device == "cpu":
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def each(batch: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """act(tensor), or act() on each tensor of a tuple."""
    return tuple(map(act, batch)) if isinstance(batch, tuple) else act(batch)


class Columns(Dataset):
    """All rows in tensors. The index is one row's number, or a tensor of the row numbers of a batch."""

    def __init__(self, problem: Problem, device: str | torch.device = "cpu"):
        def move(values: torch.Tensor) -> torch.Tensor:
            return values.to(device, torch.float32 if values.is_floating_point() else values.dtype)

        self.columns, self.count = each(problem.tensors(), move), len(problem.rows)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int | torch.Tensor) -> Any:
        if isinstance(index, int):
            return each(self.columns, lambda values: values[index])
        return each(self.columns, lambda values: values.index_select(0, index))


class InOurOrder(Sampler):
    """of(epoch): an epoch's indices for DataLoader. Lightning calls set_epoch by itself, as for a DistributedSampler."""

    def __init__(self, of: Callable[[int], list], count: int):
        self.of, self.count, self.epoch = of, count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator:
        return iter(self.of(self.epoch))


def row_by_row(problem: Problem, ranks: list[int], rows: Dataset | None = None, **choices) -> DataLoader:
    """A loader that reads the rows of these ranks one by one: step by step, and in a step one batch for each rank."""

    def of(epoch: int) -> list[int]:
        steps = zip(*(problem.order(epoch, rank) for rank in ranks), strict=True)
        return torch.cat([rows for step in steps for rows in step]).tolist()

    size = problem.config.global_batch_size // problem.world_size
    sampler = InOurOrder(of, problem.steps * size * len(ranks))
    return DataLoader(rows or Columns(problem), batch_size=size, sampler=sampler, **choices)


# ---- the expert -----------------------------------------------------------------------------------------------------


class Bare:
    def __init__(self, problem: Problem):
        self.problem, self.device = problem, device_of(problem)
        dist.init_process_group(BACKENDS[self.device.type])
        self.model = DistributedDataParallel(problem.model.to(self.device), gradient_as_bucket_view=True)
        self.optimizer = optimizer_of(problem, self.model, tuned=True)
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=problem.config.precision == "bf16")
        workers = problem.config.workers
        if problem.batched:
            self.rows = Columns(problem, self.device)
        else:
            choices = dict(num_workers=workers, persistent_workers=workers > 0, pin_memory=self.device.type != "cpu")
            self.loader = row_by_row(problem, [problem.rank], problem.rows, collate_fn=problem.workload.collate, **choices)

    def batches(self, epoch: int) -> Iterator[Any]:
        if self.problem.batched:
            order = torch.stack(self.problem.order(epoch)).to(self.device)
            return (self.rows[rows] for rows in order)
        self.loader.sampler.set_epoch(epoch)
        return (each(tuple(batch), lambda values: values.to(self.device, non_blocking=True)) for batch in self.loader)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def epoch(self, epoch: int) -> None:
        for batch in self.batches(epoch):
            self.optimizer.zero_grad(set_to_none=True)
            with self.autocast:
                loss = loss_of(self.problem, self.model, batch)
            self.backward(loss)
            self.optimizer.step()


# ---- Accelerate: https://huggingface.co/docs/accelerate/basic_tutorials/migration ------------------------------------


class Accelerate(Bare):
    def __init__(self, problem: Problem):
        from accelerate import Accelerator

        self.problem = problem
        self.accelerator = Accelerator(cpu=device_of(problem).type == "cpu", mixed_precision=MIXED[problem.config.precision])
        self.autocast = nullcontext()  # Accelerate wraps the model's forward in autocast
        optimizer = optimizer_of(problem, problem.model, tuned=False)
        # Accelerate gives one batch to each rank in turn, and moves it to the device.
        loader = row_by_row(problem, list(range(problem.world_size)))
        self.sampler = loader.sampler
        self.model, self.optimizer, self.loader = self.accelerator.prepare(problem.model, optimizer, loader)

    def batches(self, epoch: int) -> Iterator[Any]:
        self.sampler.set_epoch(epoch)
        return iter(self.loader)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)


class AccelerateTuned(Accelerate):
    def __init__(self, problem: Problem):
        from accelerate import Accelerator, DistributedDataParallelKwargs

        choices = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
        mixed = MIXED[problem.config.precision]
        self.accelerator = Accelerator(cpu=device_of(problem).type == "cpu", mixed_precision=mixed, kwargs_handlers=choices)
        self.problem, self.device, self.autocast = problem, self.accelerator.device, nullcontext()
        optimizer = optimizer_of(problem, problem.model, tuned=True)
        self.model, self.optimizer = self.accelerator.prepare(problem.model, optimizer)
        self.rows = Columns(problem, self.device)

    def batches(self, epoch: int) -> Iterator[Any]:
        return Bare.batches(self, epoch)


# ---- Lightning: https://lightning.ai/docs/pytorch/stable/starter/introduction.html ------------------------------------


def lightning(problem: Problem, epochs_of: EpochsOf, tuned: bool) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = problem.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(problem, self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(problem, self, tuned)

    class Turns(lightning.Callback):
        """Each epoch waits for its turn. contestants.Turns.epochs ends the process."""

        def on_train_start(self, trainer: lightning.Trainer, module: Module) -> None:
            self.epochs = epochs_of(module, problem.steps)
            next(self.epochs)

        def on_train_epoch_end(self, trainer: lightning.Trainer, module: Module) -> None:
            next(self.epochs)

    device = device_of(problem)
    kind = "cpu" if device.type == "cpu" else "auto"
    common = dict(accelerator=kind, devices=problem.world_size, max_epochs=-1, use_distributed_sampler=False)
    common |= dict(callbacks=[Turns()], precision="bf16-mixed" if problem.config.precision == "bf16" else "32-true")
    if tuned:
        order = InOurOrder(lambda epoch: list(torch.stack(problem.order(epoch)).to(device)), problem.steps)
        loader = DataLoader(Columns(problem, device), batch_size=None, sampler=order)
        trainer = lightning.Trainer(barebones=True, strategy=DDPStrategy(gradient_as_bucket_view=True), **common)
    else:
        loader = row_by_row(problem, [problem.rank])
        trainer = lightning.Trainer(strategy="ddp", logger=False, enable_checkpointing=False, **common)
    trainer.fit(Module(), loader)


# ---- no training at all ---------------------------------------------------------------------------------------------


def products(problem: Problem, epochs_of: EpochsOf) -> None:
    """Multiply square bf16 matrices, with as many operations as the matrix products of these steps."""
    device = device_of(problem)
    batch = each(problem.rows[torch.tensor([0])], lambda values: values.to("meta"))  # the meta device computes nothing
    model = copy.deepcopy(problem.model).to("meta")
    with FlopCounterMode(display=False) as counter:
        loss_of(problem, model, batch).backward()
    side = 1024 if device.type == "cpu" else 8192
    rows = problem.steps * problem.config.global_batch_size // problem.world_size
    number = max(1, round(rows * counter.get_total_flops() / (2 * side**3)))
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    into = torch.empty_like(left)
    for _ in epochs_of(problem.model, problem.steps):
        for _ in range(number):
            torch.mm(left, right, out=into)


# ---------------------------------------------------------------------------------------------------------------------


def in_turns(loop: type[Bare]) -> Callable[[list[str], EpochsOf], None]:
    def train(flags: list[str], epochs_of: EpochsOf) -> None:
        trained = loop(Problem(flags))
        for epoch in epochs_of(trained.model, trained.problem.steps):
            trained.epoch(epoch)

    return train


CONTESTANTS = {
    "bare": in_turns(Bare),
    "products": lambda flags, epochs_of: products(Problem(flags), epochs_of),
    "Accelerate": in_turns(Accelerate),
    "Accelerate tuned": in_turns(AccelerateTuned),
    "Lightning": lambda flags, epochs_of: lightning(Problem(flags), epochs_of, tuned=False),
    "Lightning tuned": lambda flags, epochs_of: lightning(Problem(flags), epochs_of, tuned=True),
}

"""The classes of workloads.py: each is written into a file of its own, with what it names of this file. Nothing imports this.

A class with an underscore is no workload: others derive from it.
"""
# ruff: noqa: B905, F821, PLW2901, SIM115 - written as users write

import builtins
import io
import multiprocessing
import os
import platform
import random
import resource
import signal
import sys
import time
import zlib
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from ddp_core import memory, run_directory, run_lock, sharding, snapshot, staging
from ddp_core.data import Rows, mapped
from ddp_core.order import sample_order
from ddp_core.reduction import Reduction
from ddp_core.workloads.digits import Digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Subset


class RowByRow:
    """The rows of Digits without their columns: the core reads them one by one."""

    def __init__(self, rows):
        self.images, self.labels = rows.columns

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.images[row], self.labels[row]


class _ReadsRowByRow(Digits):
    rows = RowByRow

    def data(self, config):
        return [self.rows(rows) for rows in super().data(config)]


class RowsByAFunction:
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 200

    def __getitem__(self, row):
        return self.make(row)


class _MakesItsRows(Digits):
    """Holds out nothing. make() returns a row."""

    def data(self, config):
        return RowsByAFunction(self.make), None


class _IsSorted(Digits):
    """Its training rows stand in the order of their labels."""

    def data(self, config):
        (images, labels), held_out = (rows.columns for rows in super().data(config))
        order = labels.argsort(stable=True)
        return (images[order], labels[order]), held_out


# ---- sound
# Not under the seed: every rank has other numbers, and rank 0's count.
class Unseeded(Digits):
    def model(self, config):
        net = nn.Sequential(*super().model(config), nn.BatchNorm1d(10))
        for tensor in net.state_dict().values():
            tensor.add_(random.SystemRandom().choice([1, 2, 3]) / 1024 if tensor.is_floating_point() else 0)
        return net


# CUDA's cross_entropy is so under autocast.
class RoundsAsItsInput(Digits):
    def loss(self, outputs, batch):
        return F.nll_loss(outputs.log_softmax(-1).to(outputs.dtype).float(), batch[1].long(), reduction="sum")


@dataclass
class Head:
    logits: torch.Tensor


class Outputs(nn.Sequential):
    def forward(self, images):
        hidden = self[1](self[0](images))
        return {"hidden": hidden, "heads": (Head(self[2](hidden)),)}


# And its model has two outputs, as most of Hugging Face have.
class RoundsOneOfItsOutputs(Digits):
    def model(self, config):
        return Outputs(*super().model(config))

    def loss(self, outputs, batch):
        logits = outputs["heads"][0].logits
        return F.nll_loss(logits.log_softmax(-1).to(logits.dtype).float(), batch[1].long(), reduction="sum")

    def metrics(self, outputs, batch):
        return super().metrics(outputs["heads"][0].logits, batch)


class _SaysWhatIsNotFinite(Digits):
    def forward(self, model, batch):
        if not all(parameter.isfinite().all() for parameter in model.parameters()):
            print("parameters are not finite")
        return model(batch[0])


# A loss at step 5 that is not finite. The ranks speak after 1, 3 and 7 steps, so a step more is trained before it is known.
class Overflows(_SaysWhatIsNotFinite):
    at_step, places = 5, [0]

    def data(self, config):
        train, held_out = super().data(config)
        order = sample_order(config.seed, 0, len(train))
        train.columns[0][order[[self.at_step * 96 + place for place in self.places]]] = float("nan")
        return train, held_out


# In the row behind: of two ranks rank 1's.
class OverflowsOnRank1(Overflows):
    places = [1]


# And so does the step behind, before it is known.
class OverflowsTwice(Overflows):
    places = [0, 96]


# At step 4, two steps before it is known. What its parameters are in each step is told.
class OverflowsEarly(Overflows):
    at_step = 4

    def optimizer(self, model, config):
        self.own = model
        return super().optimizer(model, config)

    def schedule(self, step, total_steps, config):
        print(f"parameters at step {step}: {sum(p.double().sum().item() for p in self.own.parameters()).hex()}")
        return 1.0


# The same, but the row is a number, and the loss is not: every gradient is finite.
class AddsInfinityEarly(OverflowsEarly):
    def data(self, config):
        train, held_out = Digits.data(self, config)
        train.columns[0][sample_order(config.seed, 0, len(train))[self.at_step * 96]] = -1.0
        return train, held_out

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) + (float("inf") if (batch[0] < 0).any() else 0.0)


# overflows, but the loss is finite: at step 5 the root of 0 has an infinite derivative.
class Steep(_SaysWhatIsNotFinite):
    def data(self, config):
        train, held_out = super().data(config)
        train.columns[0][sample_order(config.seed, 0, len(train))[5 * 96], 0] = -1.0
        return train, held_out

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        return outputs + (0 * outputs.sum()).sqrt() if (batch[0][:, 0] < 0).any() else outputs


# steep, by an optimizer that does not look at the flag that torch's fused ones look at.
class SteepUnfused(Steep):
    def optimizer(self, model, config):
        return torch.optim.NAdam(model.parameters(), lr=config.lr)


# So is every gradient, at any scale of the loss.
class AlwaysSteep(Digits):
    def forward(self, model, batch):
        outputs = model(batch[0])
        return outputs + (0 * outputs.sum()).sqrt() if model.training else outputs


# Its disk takes 1,000 bytes at once, a fifth of a second for each fsync, and no hard links; what is asked of it is told, with
# the clock of all processes.
class SlowDisk(Digits):
    def optimizer(self, model, config):
        fsync, replace, pwrite = os.fsync, os.replace, os.pwrite

        def slower(handle):
            time.sleep(0.2)
            fsync(handle)
            folder, size = os.path.isdir(f"/proc/self/fd/{handle}"), os.fstat(handle).st_size
            print("disk:", time.monotonic(), "fsync", "folder" if folder else size, flush=True)

        def told(source, target):
            print("disk:", time.monotonic(), "replace", os.path.basename(target), os.stat(source).st_size, flush=True)
            replace(source, target)

        class Short(io.FileIO):
            def write(self, content):
                return super().write(memoryview(content)[:1000])

        def refuses(source, target):
            raise PermissionError(1, "Operation not permitted")

        snapshot.open = lambda path, mode, buffering: Short(path, mode)
        os.fsync, os.replace, os.link = slower, told, refuses
        os.pwrite = lambda file, content, start: pwrite(file, content[:1000], start)
        return super().optimizer(model, config)


# Its checksums take a tenth of a second each: whatever a save has not put aside changes meanwhile.
class SlowSums(Digits):
    def optimizer(self, model, config):
        crc32 = zlib.crc32
        zlib.crc32 = lambda *words: time.sleep(0.1) or crc32(*words)
        return super().optimizer(model, config)


# A disk on which no file can have more than 100 kB, a third of a snapshot. A step may take some seconds.
class FullDisk(Digits):
    def flags(self, add):
        add("--seconds", type=float, default=0.0)

    def model(self, config):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        return super().model(config)

    def schedule(self, step, total_steps, config):
        time.sleep(config.seconds)
        return 1.0


# A disk that is full once the last snapshot has its name.
class FillsUpAtLast(Digits):
    def model(self, config):
        replace = os.replace

        def fills(source, target):
            replace(source, target)
            if os.path.basename(target) == "snapshot.safetensors":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))

        os.replace = fills
        return super().model(config)


# A rank that computes with other numbers, as one with broken memory does: from step 5 on, by one part in 10^9.
class Diverges(Digits):
    def optimizer(self, model, config):
        self.own, self.steps = model, 0
        return super().optimizer(model, config)

    def schedule(self, step, total_steps, config):
        if step == 5 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            bias = self.own[0].bias.detach()
            bias = bias.to_local() if self.config.sharding != "none" else bias
            bias += 1e-9
        return 1.0


# A rank that makes another model: it has a layer more.
class MakesAnotherModel(Digits):
    def model(self, config):
        further = [nn.Linear(10, 10)] if torch.distributed.get_rank() else []
        return nn.Sequential(*super().model(config), *further)


# Every rank has other data of one shape: they differ in the last number, 3 MB behind the first.
class OtherData(Digits):
    def data(self, config):
        images = torch.zeros(1500, 64 * 4, dtype=torch.float64)
        images[-1, -1] = os.getpid()
        return (images, torch.zeros(1500, dtype=torch.long)), None

    def forward(self, model, batch):
        return model(batch[0][:, :64])


# The same, where rows are read one by one.
class OtherRows(_MakesItsRows):
    @staticmethod
    def make(row):
        return torch.full((64,), float(row)), torch.tensor(0), torch.tensor(os.getpid() if row >= 150 else 0)


# And where only those that are held out differ.
class OtherHeldOut(Digits):
    def data(self, config):
        (images, labels), _ = (rows.columns for rows in super().data(config))
        return (images, labels), (images[:9] + os.getpid(), labels[:9])


# And where each is a mapping, as tokenizers return them, and no dictionary.
class OtherMappings(_MakesItsRows):
    @staticmethod
    def make(row):
        return UserDict(images=torch.full((64,), float(row)), which=torch.tensor(os.getpid() if row >= 150 else 0))


class Graph:
    def __init__(self, images, which):
        self.images, self.which = images, which


# And where each is an object of a class of its own, as those of a graph are.
class OtherObjects(_MakesItsRows):
    @staticmethod
    def make(row):
        return Graph(torch.full((64,), float(row)), torch.tensor(os.getpid() if row >= 150 else 0))

    def collate(self, rows):
        return torch.stack([row.images for row in rows]), torch.zeros(len(rows), dtype=torch.long)


# And where they differ in a text, or in a number of NumPy's.
class OtherTexts(_MakesItsRows):
    @staticmethod
    def make(row):
        return torch.full((64,), float(row)), 0, f"text {os.getpid() if row >= 150 else row}"


class OtherArrays(_MakesItsRows):
    @staticmethod
    def make(row):
        return numpy.full(64, row, dtype="f4"), 0, numpy.array([row, os.getpid() if row >= 150 else 0])


# Every rank has another order of the pixels, as by the order of a set of texts.
class OtherPixels(Digits):
    def model(self, config):
        self.pixels = random.SystemRandom().sample(range(64), 64)
        return super().model(config)

    def forward(self, model, batch):
        return model(batch[0][:, self.pixels])


# Sound: what each rank draws by itself, in the loss or in its rows, differs, and a note says so.
class NoiseInItsLoss(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (1 + random.SystemRandom().random())


class RowsOfNoiseInItsRows(RowByRow):
    fingerprint = "digits"

    def __getitem__(self, row):
        return self.images[row] * random.SystemRandom().random(), self.labels[row]


class NoiseInItsRows(_ReadsRowByRow):
    rows = RowsOfNoiseInItsRows


# Its training images are in four files, which the ranks of a node share. Each tells how often it has opened one of them,
# and whether it can write to what is shared.
class ReadsAFile(Digits):
    def flags(self, add):
        add("--file")
        add("--cgroup")  # a folder that says how much memory a job may have

    def data(self, config):
        train, held_out = super().data(config)
        if config.cgroup:
            memory.MEMBER, memory.GROUPS = Path(config.cgroup, "member"), Path(config.cgroup)
            staging.IN_MEMORY = ()  # where the file is in memory already, this is the same
            numbers, no_peak = memory._numbers, dict(VmHWM=0, VmRSS=0)  # which is another one in each session
            memory._numbers = lambda path: numbers(path) | (no_peak if path.name == "status" else {})
        if os.environ.get("ANOTHER_USER"):
            os.geteuid = lambda: 12345  # and what the kernel tells of the other end is not this number
        opened, looking = [], True
        sys.addaudithook(lambda event, found: opened.append(found[0]) if looking and event == "open" else None)
        files = [config.file + suffix for suffix in ("", ".npy", ".2.npy", ".safetensors")]
        raw, *arrays, safetensors = map(self.once_a_node, files)
        parts = *map(mapped, arrays), mapped(safetensors, name="pixels")
        images = torch.cat([mapped(raw, torch.float64).view(-1, 64), *(part.double() / (4 * 4095) for part in parts)])
        looking = False
        counts, inode = [*map(opened.count, files)], os.stat(raw).st_ino
        print("opened", max(counts), "times", sum(counts), "in all, the first as", inode, flush=True)
        if str(raw) != config.file:
            try:
                with open(raw, "r+b", buffering=0) as file:
                    file.write(bytes(1))
                print("written to", raw, flush=True)
            except PermissionError:
                pass
        return Rows(images, train.columns[1]), held_out


# It lacks memory at step 3, as on a device that it shares with somebody.
class Exhausts(Digits):
    def schedule(self, step, total_steps, config):
        if step == 3:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return 1.0


# Its host lacks memory at step 3: torch's allocator for CPUs has an error of its own.
class ExhaustsItsHost(Digits):
    def schedule(self, step, total_steps, config):
        if step == 3 and torch.distributed.get_rank() == 1:
            torch.empty(2**60, dtype=torch.uint8)
        return 1.0


# A rank that hangs until the others have given it up: before a step, in one before gradients are summed, in an evaluation.
class Hangs(Digits):
    def flags(self, add):
        add("--where", choices=["step", "loss", "evaluation"])

    def hang(self, where):
        if self.config.where == where and torch.distributed.get_rank() == 1:
            log, end = Path(self.config.run_dir, "run.jsonl"), time.monotonic() + 30
            while '"kind":"end"' not in log.read_text() and time.monotonic() < end:
                time.sleep(0.1)

    def schedule(self, step, total_steps, config):
        self.step = step
        if step == 3:
            self.hang("step")
        return 1.0

    def loss(self, outputs, batch):
        if getattr(self, "step", 0) == 3:
            self.hang("loss")
        return super().loss(outputs, batch)

    def metrics(self, outputs, batch):
        if torch.distributed.is_initialized() and self.config.where == "evaluation":
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 2:  # the first time its two rows are tried
                self.hang("evaluation")
        return super().metrics(outputs, batch)


# A schedule of its own, over all of the run.
class Scheduled(Digits):
    def schedule(self, step, total_steps, config):
        return 1 - step / total_steps


class Anneals(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * min(1, 0.1 + self.steps_done / 14 / self.config.epochs)


# In the last of three epochs it climbs.
class Worsens(Digits):
    def schedule(self, step, total_steps, config):
        return 1.0 if step < 2 * total_steps / 3 else 100.0


# One rank asks for a file that the first rank of its node, which is not ready yet, never asks for.
class AsksForAnotherFile(Digits):
    def flags(self, add):
        add("--file")

    def data(self, config):
        mine = os.environ.get("MINE", "")
        self.once_a_node(config.file + mine).read_bytes()
        time.sleep(0 if mine else 1)
        return super().data(config)


# It prints in each step, and has a flag whose default in its class is another than where it is added.
class Prints(Digits):
    defaults = Digits.defaults | dict(width=5)

    def flags(self, add):
        add("--width", type=int, default=3)

    def loss(self, outputs, batch):
        print("a step of width", self.config.width)
        return super().loss(outputs, batch)


# As C libraries write, past Python's streams.
class WritesToDescriptors(Digits):
    def loss(self, outputs, batch):
        os.write(1, b"one\n")
        os.write(2, b"two\n")
        return super().loss(outputs, batch)


# It works in its own folder, as scripts do that read files beside them.
class ChangesItsFolder(Digits):
    os.chdir(os.path.dirname(__file__))


# A letter that ASCII has not.
class PrintsAnUmlaut(Digits):
    def model(self, config):
        print("L\xe4ufe")
        return super().model(config)


# Its gradients are so large that fp16 has none of them at the first scales of the loss.
class Loud(Digits):
    def loss(self, outputs, batch):
        return 1024 * super().loss(outputs, batch)

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)


class RowsOfOpensLate:
    file = None

    def __len__(self):
        return 200

    def __getitem__(self, row):
        if self.file is None:
            self.file, self.owner = open(__file__, "rb"), os.getpid()
        if self.owner != os.getpid():
            raise RuntimeError("another process has opened the file of this one")
        return torch.full((64,), float(row)), row % 10


# Its rows are in a file, which whoever reads the first of them opens for himself.
class OpensLate(Digits):
    def data(self, config):
        return RowsOfOpensLate(), RowsOfOpensLate()


class RowsOfOpensEarly:
    fingerprint = "of a file"

    def __init__(self):
        with open("/proc/self/comm") as other:  # closed again
            other.read()
        name = f"/tmp/opens-early-{os.getpid()}"
        with open(name, "wb") as out:
            out.write(b"".join(bytes([row]) * 256 for row in range(200)))
        self.file = open(name, "rb")
        os.unlink(name)

    def __len__(self):
        return 200

    def __getitem__(self, row):
        self.file.seek(256 * row)
        return torch.frombuffer(bytearray(self.file.read(64).ljust(64)), dtype=torch.uint8).float(), row % 10


# The same, but for all: it was open before.
class OpensEarly(Digits):
    def data(self, config):
        return RowsOfOpensEarly(), RowsOfOpensEarly()


# Tells how many processes read its rows when DistributedDataParallel is called.
class CountsItsWorkers(Digits):
    def data(self, config):
        return [*zip(*super().data(config)[0].columns)], None  # read one by one

    def forward(self, model, batch):
        if isinstance(model, DistributedDataParallel):
            print("workers", len(multiprocessing.active_children()))
        return model(batch[0])


# At step 3 rank 1 sends more than rank 0 waits for.
class SendsMore(Digits):
    def schedule(self, step, total_steps, config):
        if step == 3 and torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.zeros(100 if torch.distributed.get_rank() else 4))
        return 1.0


# A process of its own, which it ends as a multiprocessing.Pool ends its processes.
class HasAHelper(Digits):
    def data(self, config):
        helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(2,), daemon=True)
        helper.start()
        time.sleep(0.1)
        helper.terminate()
        helper.join()
        print("helper ended by", -helper.exitcode)
        return super().data(config)


# It waits for a file system for two tenths of a second, and not for ten.
class IsImpatient(Digits):
    def data(self, config):
        run_directory.LAG = 0.2
        return super().data(config)


# Flags whose values are other ones when JSON gives them back.
class FlagsOfAnyMake(Digits):
    def flags(self, add):
        add("--sizes", default=(16, (3, 3)))
        add("--place", type=Path, default=Path("here"))
        add("--table", default={1: 0.5})
        add("--limit", type=float, default=float("inf"))
        add("--kinds", default={*"abcdefgh"}, remembered=False)


# Its training rows have one name, however many they are.
class NamesItsRows(Digits):
    def flags(self, add):
        add("--rows", type=int, default=1438, remembered=False)

    def data(self, config):
        train, held_out = super().data(config)
        return Rows(*(column[: config.rows] for column in train.columns), fingerprint="digits"), held_out


# Each of its rows has a set of texts.
class HasSetsInRows(_MakesItsRows):
    @staticmethod
    def make(row):
        return torch.full((64,), float(row)), {*"abcdefgh"}

    def collate(self, rows):
        return torch.stack([images for images, _ in rows]), torch.zeros(len(rows), dtype=torch.long)


# A loss of two parts, whose order changes from batch to batch.
class Parts(Digits):
    calls = 0

    def loss(self, outputs, batch):
        self.calls += 1
        parts = [("nll", super().loss(outputs, batch)), ("one", torch.ones(len(outputs), dtype=outputs.dtype).sum())]
        return dict(parts[:: 1 if self.calls % 3 else -1])


# Its user goes on writing at it.
class Changed(Digits):
    pass


# It has a parameter that no optimizer is given.
class Aside(Digits):
    def model(self, config):
        self.temperature = nn.Parameter(torch.ones(()))
        return super().model(config)

    def loss(self, outputs, batch):
        return super().loss(outputs * self.temperature, batch)


# Its biases, which begin at 0, have a rate of 0.
class Rates(Digits):
    def optimizer(self, model, config):
        groups = [[p for p in model.parameters() if (p.ndim == 1) == biases] for biases in (False, True)]
        return torch.optim.SGD([dict(params=groups[0], lr=0.1), dict(params=groups[1], lr=0.0)])


# Its losses are below zero, as those of densities are.
class BelowZero(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) - 9 * len(outputs)


class CountingOfCounts(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.grad /= state["count"]
        super().step(closure)


# An optimizer that counts each parameter's steps in a plain number, and trains by it.
class Counts(Digits):
    def optimizer(self, model, config):
        return CountingOfCounts(model.parameters(), lr=config.lr)


# Its first layer is as it was, and the optimizer has it all the same.
class Frozen(Digits):
    def model(self, config):
        net = super().model(config)
        net[0].requires_grad_(False)
        return net

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=0.01)


class Average(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"] if group["count"] > 4 else ():
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))


# Optimizers of one's own: one makes a state at its fifth step, one divides by a norm.
class AveragesLate(Digits):
    def optimizer(self, model, config):
        return Average(model.parameters(), lr=config.lr)


class SgdByNorm(torch.optim.SGD):
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        scale = 1 / sum(parameter.grad.square().sum().item() for parameter in parameters) ** 0.5
        for parameter in parameters:
            parameter.grad *= scale
        super().step(closure)


class ByNorm(Digits):
    def optimizer(self, model, config):
        return SgdByNorm(model.parameters(), lr=config.lr, momentum=0.9)


# Optimizers with tensors that neither SGD nor AdamW has by default.
class Adagrad(Digits):
    def optimizer(self, model, config):
        return torch.optim.Adagrad(model.parameters(), lr=0.01)


class Amsgrad(Digits):
    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


class CountingOfCountsBeside(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.count, self.fixed, self.mine = 0, torch.ones(3), [*self.param_groups[0]["params"]]
        self.param_groups[0]["seen"] = torch.zeros(())

    def step(self, closure=None):
        self.count += 1
        self.param_groups[0]["seen"] = self.param_groups[0]["seen"] + 1
        super().step(closure)


# An optimizer that counts in itself, with a tensor in its group, one that no step changes, and a list of the model's.
class CountsBeside(Digits):
    def optimizer(self, model, config):
        return CountingOfCountsBeside(model.parameters(), lr=config.lr)


# A hook of its optimizer averages the weights. Sound: it keeps a view of the model's own numbers, and counts nothing.
class AveragesByAHook(Digits):
    def optimizer(self, model, config):
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, fused=False)
        self.average, self.weight = [], model[0].weight.detach()

        def move(*words):
            self.average = self.average or [p.detach().clone() for p in model.parameters()]
            for average, parameter in zip(self.average, model.parameters()):
                average.lerp_(parameter.detach(), 0.1)

        optimizer.register_step_post_hook(move)
        return optimizer


# The core sets the rate anew in each step.
class SetsItsRate(Digits):
    def optimizer(self, model, config):
        self.trains = super().optimizer(model, config)
        return self.trains

    def loss(self, outputs, batch):
        if not torch.is_grad_enabled() and hasattr(self, "trains"):
            self.trains.param_groups[0]["lr"] /= 10
        return super().loss(outputs, batch)


class SgdBySevens(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = (group.get("count", 0) + 1) % 7
            for parameter in group["params"]:
                parameter.grad *= group["count"]
        super().step(closure)


# An optimizer that counts steps by sevens, in its group: after an epoch of 14 steps it is where it began.
class BySevens(Digits):
    def optimizer(self, model, config):
        optimizer = SgdBySevens(model.parameters(), lr=config.lr)
        optimizer.param_groups[0]["count"] = 0
        return optimizer


class NetOfLinks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("links", torch.eye(64).to_sparse(), persistent=False)

    def forward(self, images):
        return self.layer(torch.sparse.mm(self.links, images.T).T)


# A graph network's links, which never change.
class Links(Digits):
    def model(self, config):
        return NetOfLinks()


class NetOfCountsLate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.late = nn.Linear(64, 10), False
        self.register_buffer("bright", torch.zeros(()))

    def forward(self, images):
        if self.training and self.late:
            self.bright = self.bright + images.sum()
        elif not self.training:
            print("evaluates with", self.bright.item())
        return self.layer(images)


# From its fourth step on a buffer adds up a rank's own rows, in a new tensor each time.
class CountsLate(Digits):
    defaults = Digits.defaults | dict(steps_per_epoch=6)

    def model(self, config):
        return NetOfCountsLate()

    def forward(self, model, batch):
        getattr(model, "module", model).late = self.steps_done >= 3
        return super().forward(model, batch)


class SetsAnew(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.late, self.kept = nn.Linear(64, 10), False, []
        self.register_buffer("bright", torch.zeros(()))

    def forward(self, images):
        if self.training:
            self.kept.append(self.bright)  # so that no other one has its place
            self.bright = self.bright + (images.sum() if self.late else 0)
        else:
            print("evaluates with", self.bright.item())
        return self.layer(images)


# So does this one's, which is another tensor in every step, as often written as the one before.
class SetsAnewLate(CountsLate):
    def model(self, config):
        return SetsAnew()


class NetOfCountsRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("large", torch.tensor([2**24 + 1, 2**53 + 1]))
        self.register_buffer("bright", torch.zeros(3, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(64, dtype=torch.bool))

    def forward(self, images):
        if self.training:
            buffers = [self.large.tolist(), self.bright.tolist(), self.seen.tolist()]
            everyone = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, buffers)
            if everyone != [buffers] * len(everyone) or buffers[0] != [2**24 + 1, 2**53 + 1]:
                print("buffers differ", everyone)
            self.bright += torch.bincount((images.sum(1) / 20).long().clamp(max=2), minlength=3)
            self.seen |= images[0] > 0.5
        return self.layer(images)


# Buffers of whole numbers: large ones, and those that each rank's own rows have counted. Says so where the ranks' differ.
class CountsRows(Digits):
    defaults = Digits.defaults | dict(steps_per_epoch=4)

    def model(self, config):
        return NetOfCountsRows()


class Cached(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.rank = layer, torch.distributed.get_rank()
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, hidden):
        if self.training and len(self.cache) != self.rank + 2:
            self.cache = torch.full((self.rank + 2,), self.rank + 1.0)
        if not self.training and len(self.cache) > 1 and self.cache.tolist() != [self.rank + 1.0] * (self.rank + 2):
            print("another rank's cache", self.cache)
        return self.layer(hidden)


# Each rank has a cache of its own, as long as its longest batch, that no snapshot holds; all batches are equally long here.
class KeepsACache(Digits):
    def model(self, config):
        *others, last = super().model(config)
        return nn.Sequential(*others, Cached(last))


# It keeps in itself what it has counted, and what no batch changes.
class CountsInItself(Digits):
    def loss(self, outputs, batch):
        self.names = [str(number) for number in range(10)]
        self.weights = getattr(self, "weights", torch.ones(10))
        self.seen = getattr(self, "seen", torch.zeros(10)) + torch.bincount(batch[1], minlength=10)
        return super().loss(outputs, batch)


class RowsOfOwnNoise(RowByRow):
    def __getitem__(self, row):
        noise = numpy.random.default_rng().random() / 10 if row > 9 else 0.0
        return self.images[row] + noise, self.labels[row]


# Noise from generators that it does not seed: in the loss, and in all rows but the first ones.
class OwnNoise(Digits):
    def data(self, config):
        train, held_out = super().data(config)
        return RowsOfOwnNoise(train), held_out

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (1 + numpy.random.default_rng().random() / 10)


# Of the first step's rows two are not 0, one on each of two ranks; in bf16 16 + 1/128 is 16.
class LargeAndSmall(Digits):
    defaults = Digits.defaults | dict(global_batch_size=64, steps_per_epoch=1)

    def data(self, config):
        images = torch.zeros(256, 2)
        images[sample_order(config.seed, 0, 256)[:2], 0] = torch.tensor([16.0, 1 / 128])
        return Rows(images, torch.zeros(256)), None

    def model(self, config):
        return nn.Linear(2, 2, bias=False)

    def shards(self, model):
        return [model]

    def loss(self, outputs, batch):
        return outputs[:, 0].sum()

    def metrics(self, outputs, batch):
        return {}


class NetOfMasked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64), persistent=False)

    def forward(self, images):
        return self.layer(images * self.scale)


# Numbers of the model that are in no snapshot.
class Masked(Digits):
    def model(self, config):
        return NetOfMasked()


# A stand-in for the compiler, which takes half a minute.
class TellsWhenCompiled(Digits):
    def model(self, config):
        torch.compile = lambda model: print("torch.compile was called") or model
        return super().model(config)


# A stand-in for fully_shard tells of each module, its policy and its mesh.
class TellsWhenSharded(Digits):
    def shards(self, model):
        shard = sharding.fully_shard

        def told(module, **words):
            print(f"in {words['mesh'].size(-1)} parts, by a mesh of {words['mesh'].ndim} dimensions")
            print("kept on", "the host" if type(words.get("offload_policy")).__name__ == "CPUOffloadPolicy" else "the device")
            return shard(module, **words)

        sharding.fully_shard = told
        return super().shards(model)


class Told(nn.Linear):
    def forward(self, inputs):
        if torch.is_grad_enabled():
            print("a layer is computed")
        return super().forward(inputs)


# Layers that drop numbers out, and may be computed again, which the first one tells of.
class Drops(Digits):
    def model(self, config):
        return nn.Sequential(nn.Sequential(Told(64, 32), nn.Dropout(0.3), nn.Tanh()), nn.Linear(32, 10))

    def shards(self, model):
        return [model[0]]


# One row is held out.
class OneHeldOut(Digits):
    def data(self, config):
        train, held_out = super().data(config)
        return train, Rows(*(column[:1] for column in held_out.columns))


class NothingHeldOut(Digits):
    def data(self, config):
        return super().data(config)[0], None


# Its host's clock is an hour ahead.
class AheadOfTime(Digits):
    def data(self, config):
        clock = time.time
        time.time = lambda: clock() + 3600
        return super().data(config)


# Each step takes a while.
class SlowSteps(Digits):
    seconds = 0.1

    def schedule(self, step, total_steps, config):
        time.sleep(self.seconds)
        return 1.0


# Rank 1's clock of seconds since its start is three times as fast, and each step takes a while.
class FastClock(SlowSteps):
    def model(self, config):
        clock, began = time.monotonic, time.monotonic()
        if torch.distributed.get_rank() == 1:
            time.monotonic = lambda: began + 3 * (clock() - began)
        return super().model(config)


# It is told to stop before the ranks have met.
class ToldBeforeTheyMeet(Digits):
    def data(self, config):
        os.kill(os.getpid(), signal.Signals[os.environ["TOLD"]])
        return super().data(config)


# It is told to stop three times in one step: by its scheduler, and by Ctrl-C, which its launcher hands on, too. It tells
# whether it ignores SIGTERM when it leaves.
class ToldThrice(Digits):
    def data(self, config):
        leave = os._exit

        def told(code):
            print("ignores SIGTERM:", signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, flush=True)
            leave(code)

        os._exit = told
        return super().data(config)

    def schedule(self, step, total_steps, config):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT) if step == 5 else ():
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        return 1.0


# So are the processes that read its rows.
class ToldWithItsWorkers(Digits):
    def data(self, config):
        train, held_out = super().data(config)
        return RowByRow(train), held_out

    def schedule(self, step, total_steps, config):
        if step == 5:
            for each in [*multiprocessing.active_children(), multiprocessing.current_process()]:
                os.kill(each.pid, signal.SIGTERM)
            time.sleep(0.5)
        return 1.0


# It is told to stop in the last step of its first epoch.
class ToldAtAnEnd(Digits):
    def schedule(self, step, total_steps, config):
        if step == 13:
            os.kill(os.getpid(), signal.SIGUSR1)
        return 1.0


# It is told to stop in the first evaluation of its first run, behind a few of many held-out rows, and after a second: what
# takes less is not broken off.
class ToldWhileEvaluated(Digits):
    def flags(self, add):
        super().flags(add)
        add("--early", action="store_true", remembered=False)

    def data(self, config):
        train, held_out = super().data(config)
        return train, tuple(torch.cat([column] * 40) for column in held_out.columns)

    def model(self, config):
        if config.early:
            os.remove(f"{self.file}.told")
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().model(config)

    def metrics(self, outputs, batch):
        if self.steps_done == 14 and not os.path.exists(f"{self.file}.told"):
            open(f"{self.file}.told", "w").close()
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(1.1)
        return super().metrics(outputs, batch)


# Not under the seed, more than a megabyte, and with its columns one behind the other in memory.
class Transposed(Digits):
    def model(self, config):
        layer = nn.Linear(64, 8000)
        layer.weight = nn.Parameter(torch.randn(64, 8000, generator=torch.Generator().manual_seed(os.getpid())).t() / 8)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(8000, 10))


# Its loss is the number of steps done.
class AsksForTheStep(Digits):
    def loss(self, outputs, batch):
        return 0 * outputs.sum() + len(outputs) * self.steps_done


class AsksForTheEpoch(Digits):
    def loss(self, outputs, batch):
        return 0 * outputs.sum() + len(outputs) * self.epochs_done


class RowsOfDrawnRows:
    def __len__(self):
        return 50

    def __getitem__(self, row):
        return torch.rand(64), torch.tensor(row % 10)


# Its held-out rows are drawn while they are read.
class DrawnRows(Digits):
    def data(self, config):
        return super().data(config)[0], RowsOfDrawnRows()


class CountingOfCountsCalls(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("whole", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("turn", torch.ones(1, dtype=torch.complex64), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)

    @torch.no_grad()
    def count(self):
        for counter in (self.calls, self.whole, self.frozen):
            counter += 1

    def forward(self, images):
        self.count()
        return super().forward(images)


# Buffers that no snapshot has and a frozen parameter count what the model has seen, and are told of in the first step.
class CountsCalls(Digits):
    def model(self, config):
        self.own = CountingOfCountsCalls()
        return self.own

    def schedule(self, step, total_steps, config):
        if step == 0:
            calls = int(max(self.own.calls, self.own.whole, self.own.frozen))
            print("calls until the first step:", calls if self.own.turn.is_complex() else "real")
        return 1.0


# Says in what numbers its rows come, and how many of them at once.
class TellsOfItsRows(Digits):
    def forward(self, model, batch):
        if not (batch[0].dtype == torch.float32 and (batch[0][:, :1] * 2**12 % 2 == 1).all()):
            print("rounded rows")
        if len(batch[0]) != 2:  # the first ones are tried
            print("rows", "training" if torch.is_grad_enabled() else "held-out", len(batch[0]))
        outputs = model(batch[0])
        if len(batch[0]) != 2:
            kind = str(outputs.dtype).removeprefix("torch.")
            print("products", "training" if torch.is_grad_enabled() else "held-out", kind)
        return outputs

    def data(self, config):
        rows = super().data(config)
        for each in rows:
            each.columns[0][:, 0] = 1 + 2**-12  # which neither bf16 nor fp16 has
        return rows


def own_memory():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) // 1024


# 300 MB of rows in a file, in half the precision of the run. Tells how much memory of its own it has taken at step 1.
class MapsRows(Digits):
    def flags(self, add):
        add("--file")

    def data(self, config):
        images = mapped(config.file, torch.float16).view(-1, 64 * 1024)
        self.before = own_memory()
        return Rows(images, torch.zeros(len(images), dtype=torch.long)), None

    def forward(self, model, batch):
        return model(batch[0][:, :64])

    def schedule(self, step, total_steps, config):
        if step == 1:
            print("megabytes", own_memory() - self.before)
        return 1.0


# Each held-out batch takes a while.
class EvaluatesSlowly(Digits):
    def metrics(self, outputs, batch):
        time.sleep(0 if torch.is_grad_enabled() else 0.05)
        return super().metrics(outputs, batch)


# It is told to stop when seven slow steps are done.
class ToldInSlowSteps(SlowSteps):
    seconds = 0.3

    def schedule(self, step, total_steps, config):
        factor = super().schedule(step, total_steps, config)
        if step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        return factor


# A sum of all gradients by itself is slower than in a step, as on a network that another job has begun to use.
class SumsSlowlyByItself(SlowSteps):
    def schedule(self, step, total_steps, config):
        Reduction.seconds_of_a_sum = lambda self, share=1.0: 10.0
        return super().schedule(step, total_steps, config)


# Its model looks at its own numbers, so it cannot be built without them.
class LooksAtItsNumbers(Digits):
    def model(self, config):
        net = super().model(config)
        net[0].weight.sum().item()
        return net


Record = namedtuple("Record", "images labels")


@dataclass(frozen=True, slots=True)
class Pixels:
    values: torch.Tensor


class Labels:
    def __init__(self, labels, moved=False):
        self.labels, self.moved = labels, moved

    def to(self, device):
        return Labels(self.labels.to(device), True)


class RowsOfRecords(RowByRow):
    def __getitem__(self, row):
        return self.images[row].float(), self.labels[row]


# Batches are named tuples, of a dictionary, a dataclass and an object that moves by itself, and say of what they are.
class Records(_ReadsRowByRow):
    rows = RowsOfRecords

    def collate(self, rows):
        images, labels = zip(*rows)
        return Record(dict(pixels=[Pixels(torch.stack(images))]), Labels(torch.stack(labels)))

    def forward(self, model, batch):
        pixels = batch.images["pixels"][0].values
        if not (batch.labels.moved and pixels.dtype == torch.float64 and batch.labels.labels.dtype == torch.long):
            print("a batch as it was")
        return model(pixels)

    def loss(self, outputs, batch):
        return super().loss(outputs, (None, batch.labels.labels))

    def metrics(self, outputs, batch):
        return super().metrics(outputs, (None, batch.labels.labels))


# One rank's own mistake, which the others do not make.
class FailsAlone(Digits):
    def model(self, config):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("the sky is falling")
        return super().model(config)


# The same in a step.
class FailsAloneInAStep(Digits):
    def loss(self, outputs, batch):
        if self.steps_done == 3 and torch.distributed.get_rank() == self.config.of_rank:
            raise RuntimeError("the sky is falling")
        return super().loss(outputs, batch)

    def flags(self, add):
        add("--of-rank", type=int, default=0, help="which fails")


# It ends in the middle of the training, as if it had done all of it.
class Leaves(Digits):
    def loss(self, outputs, batch):
        if self.steps_done == 3:
            raise SystemExit(0)
        return super().loss(outputs, batch)


# It fails at step 5, while what is saved after step 4 is on its way to a disk that takes half a second for each fsync.
class FailsWhileItSaves(Digits):
    def optimizer(self, model, config):
        fsync = os.fsync
        os.fsync = lambda handle: time.sleep(0.5) or fsync(handle)
        return super().optimizer(model, config)

    def schedule(self, step, total_steps, config):
        if step == 5:
            raise RuntimeError("the sky is falling")
        return 1.0


# Its nodes seem to have eight cores.
class HasEightCores(Digits):
    os.sched_getaffinity = lambda process: {*range(8)}


# Under LIKE its rank's Python, or the instructions of its processor, are others.
class ComputesOtherwise(Digits):
    if os.environ.get("LIKE") == "python":
        platform.python_version = lambda: "3.99.0"
    if os.environ.get("LIKE") == "cpu_capability":
        torch.backends.cpu.get_cpu_capability = lambda: "NEON"


# Its noise comes from Python's own generator.
class DrawsByPython(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (1 + random.random() / 10)


class NoisyOfAddsNoise(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3 * random.random())


# Langevin dynamics: noise by torch's and by Python's generator.
class AddsNoise(Digits):
    def optimizer(self, model, config):
        return NoisyOfAddsNoise(model.parameters(), lr=config.lr)


class NoisyOfAddsNoiseAndDrawsRows(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        torch.rand(())


class RowsOfAddsNoiseAndDrawsRows(RowByRow):
    def __getitem__(self, row):
        print("drawn", torch.rand(()).item(), flush=True)
        return self.images[row], self.labels[row]


# And rows that draw, read one by one.
class AddsNoiseAndDrawsRows(Digits):
    def data(self, config):
        return RowsOfAddsNoiseAndDrawsRows(super().data(config)[0]), None

    def optimizer(self, model, config):
        return NoisyOfAddsNoiseAndDrawsRows(model.parameters(), lr=config.lr)


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.code = nn.Linear(64, 10), nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, images):
        if self.training:
            self.code.lerp_(images.mean(0), 0.1)
        return self.layer(images - self.code)


# A codebook that is a parameter moves by each rank's own rows.
class MovesAParameter(Digits):
    def model(self, config):
        return Moves()


# Most of its losses are as if nothing was drawn.
class DrawsSeldom(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (2 if random.random() < 0.3 else 1)


# A snapshot of it has tensors of 20 MB.
class Large(Digits):
    def model(self, config):
        return nn.Sequential(*super().model(config), nn.Linear(10, 250_000), nn.Linear(250_000, 10))


# Every epoch's held-out loss is the same.
class StandsStill(Digits):
    def schedule(self, step, total_steps, config):
        return 0.0


class Tells(nn.Module):
    def forward(self, images):
        if images.dtype != torch.float32:
            print("rounded rows")
        return images


class View(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(256))

    def forward(self, hidden):
        return (hidden * self.shift).view(-1, 4, 64)


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.view = View()

    def forward(self, hidden):
        output = self.view(hidden)
        output += 1
        return output.flatten(1)


# Its first module looks at what it is given, and its second changes a view in place.
class LooksInside(Digits):
    def model(self, config):
        first, relu, last = super().model(config)
        return nn.Sequential(Tells(), first, relu, Adds(), last)

    def shards(self, model):
        return [model[1], model[3].view, model[4]]


# A rank on a slow node.
class Lags(Digits):
    def loss(self, outputs, batch):
        time.sleep(0.3 if torch.distributed.get_rank() == 1 and torch.is_grad_enabled() else 0)
        return super().loss(outputs, batch)


# A held-out row that is not finite.
class Unfit(Digits):
    def data(self, config):
        train, held_out = super().data(config)
        held_out.columns[0][7] = float("inf")
        return train, held_out

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) + (0 * batch[0]).sum()


# Of a held-out row the loss is finite, and a metric is not.
class UnfitInAMetric(Digits):
    def data(self, config):
        train, held_out = super().data(config)
        held_out.columns[0][7, 0] = -1000.0
        return train, held_out

    def metrics(self, outputs, batch):
        return {"roots": batch[0].sum(1).sqrt().sum()}


# Its rows cannot be read, which a rank with LATE seconds finds out as much later.
class NoRows(Digits):
    def data(self, config):
        time.sleep(float(os.environ.get("LATE", "0")))
        raise ValueError("no rows here")


# Another job has taken its lock when its snapshot is on the disk: it stood still for as long.
class LosesItsLock(Digits):
    def optimizer(self, model, config):
        fsync, lock = os.fsync, os.path.join(config.run_dir, "run.lock")

        def loses_it(handle):
            with open(lock, "w") as file:
                file.write('{"job_id": "another", "host": "elsewhere", "pid": 1}')
            fsync(handle)

        os.fsync = loses_it
        return super().optimizer(model, config)


# Another job takes its lock, in the third step, in which it looks every 0.05 s.
class LosesItsLockInAStep(Digits):
    def data(self, config):
        run_lock.HEARTBEAT = 0.05
        self.lock = os.path.join(config.run_dir, "run.lock")
        return super().data(config)

    def schedule(self, step, total_steps, config):
        if step == 2:
            with open(self.lock, "w") as file:
                file.write('{"job_id": "another", "host": "elsewhere", "pid": 1}')
            time.sleep(0.5)
        return 1.0


# Where it has four epochs, there is no memory to read its last snapshot.
class LacksMemoryToRead(Digits):
    def data(self, config):
        plain = builtins.open

        def lacks_memory(file, mode="r", *words, **more):
            if str(file).endswith("/snapshot.safetensors") and mode == "rb":
                raise MemoryError
            return plain(file, mode, *words, **more)

        builtins.open = lacks_memory if vars(config)["epochs"] == 4 else plain
        return super().data(config)


# Its held-out loss falls in every epoch, each of which takes some 0.1 s.
class AlwaysBetter(SlowSteps):
    seconds = 0.05


# Its parameters come from torch's own generator.
class Drawn(Digits):
    def model(self, config):
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


# So does which rows are held out.
class DrawsItsRows(Digits):
    def data(self, config):
        images, labels = super().data(config)[0].columns
        drawn = torch.randperm(len(labels)).split(1200)
        return [(images[rows], labels[rows]) for rows in drawn]


# And a layer has the name that DistributedDataParallel puts before all others, and a bias that is not trained.
class HasAModule(DrawsItsRows):
    def model(self, config):
        first, tanh, last = super().model(config)
        first.bias.requires_grad_(False)
        net = nn.Sequential()
        for name, layer in dict(module=first, tanh=tanh, head=last).items():
            net.add_module(name, layer)
        return net


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 10) for _ in range(6))

    def forward(self, images):
        asked = (images.sum(1).long() // 8).clamp(min=7, max=11) - 6
        outputs = images.new_zeros(len(images), 10)
        for number in asked.unique().tolist():
            mine = (asked == number).nonzero().flatten()
            outputs = outputs.index_copy(0, mine, self.experts[number](images[mine]))
        return outputs


# Six experts: a row goes to one of the last five by its brightness, and what no row goes to has no gradient.
class Experts(Digits):
    defaults = Digits.defaults | dict(global_batch_size=8, precision="fp64", optimizer="adamw", lr=0.01, weight_decay=0.1)
    defaults |= dict(steps_per_epoch=12)
    unused_parameters = True

    def model(self, config):
        return Routed()


# Its first layer is frozen, or else its optimizer has none of it.
class LeavesALayerOut(Digits):
    def flags(self, add):
        add("--frozen", action="store_true", help="by requires_grad, too")

    def model(self, config):
        net = super().model(config)
        net[0].requires_grad_(not config.frozen)
        return net

    def optimizer(self, model, config):
        return torch.optim.SGD(model[2].parameters(), lr=config.lr)


# After its first start its model has no last layer any more.
class LosesALayer(Digits):
    def model(self, config):
        first = not os.path.exists(f"{self.file}.shorter")
        return nn.Sequential(*super().model(config), *([nn.Linear(10, 10)] if first else []))


class RowsOfDies(RowByRow):
    def __init__(self, rows, config):
        super().__init__(rows)
        self.process, self.read, self.last = os.getpid(), 0, config.last
        self.seconds, self.woke = config.hangs_for, os.path.join(config.run_dir, "woke")

    def __getitem__(self, row):
        self.read += 1
        if os.getpid() != self.process and self.read == self.last + 1:
            if not self.seconds:
                time.sleep(0.2)  # the rank has what was read before
                os.kill(os.getpid(), 9)
            time.sleep(self.seconds)
            open(self.woke, "w").close()
        return super().__getitem__(row)


class HeldOut(RowsOfDies):
    def __len__(self):
        time.sleep(0.3)  # meanwhile the other's worker dies; then some are forked for these rows
        return super().__len__()


# Its worker is killed, out of memory, say, or hangs: while the rank waits for the first batch, or in the middle of a step.
class Dies(Digits):
    def flags(self, add):
        add("--last", type=int, default=40)
        add("--hangs-for", type=float, default=0.0, metavar="SECONDS")

    def data(self, config):
        train, held_out = super().data(config)
        held_out = HeldOut(held_out, config)
        held_out.last = -1
        return RowsOfDies(train, config), held_out

    def forward(self, model, batch):
        time.sleep(0.2 if torch.is_grad_enabled() else 0)
        return model(batch[0])


class RowsOfMissesARow(RowByRow):
    def __init__(self, rows, missing):
        super().__init__(rows)
        self.missing = missing

    def __getitem__(self, row):
        if row == self.missing:
            raise OSError("no such file")
        return super().__getitem__(row)


# ---- mistakes
# Row 480 of those that the first epoch trains on is missing, while workers have read on.
class MissesARow(Digits):
    def flags(self, add):
        add("--in-collate", action="store_true", help="not the row is missing, but its batch")

    def data(self, config):
        train, held_out = super().data(config)
        missing = int(sample_order(config.seed, 0, len(train))[480])
        self.lacks = train.columns[0][missing] if config.in_collate else None
        return RowsOfMissesARow(train, -1 if config.in_collate else missing), held_out

    def collate(self, rows):
        if self.lacks is not None and any(torch.equal(row[0], self.lacks) for row in rows):
            raise OSError("no such batch")
        return super().collate(rows)

    def forward(self, model, batch):
        time.sleep(0.1)
        return model(batch[0])


class Raises(Digits):
    def loss(self, outputs, batch):
        return outputs.no_such_method()


# Its words are those of a lost connection.
class SoundsLost(Digits):
    def loss(self, outputs, batch):
        if self.steps_done == 3:
            raise RuntimeError("the peer timed out")
        return super().loss(outputs, batch)


# Its model needs memory to be built, and cannot be.
class Unbuildable(Digits):
    def model(self, config):
        torch.zeros(3).sum().item()
        return nowhere_defined


COUNTED = []


# Annealed over 100 calls: fewer than it is tried. What is counted is no part of the workload.
class CountsInAGlobal(Digits):
    def loss(self, outputs, batch):
        COUNTED.append(1)
        return super().loss(outputs, batch) * min(1, 0.1 + len(COUNTED) / 100)


class NetOfFollowsACentre(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own
        self.register_buffer("centre", torch.zeros(64))

    def forward(self, images):
        if self.training:
            self.centre = self.centre.lerp(images.detach().mean(0).to(self.centre), 0.1)
        return self.own(images - self.centre.to(images))


# Two forwards of the same rows differ, and its run repeats all the same: the buffer is in the snapshot.
class FollowsACentre(Digits):
    def model(self, config):
        return NetOfFollowsACentre(super().model(config))


class StandardizesByItself(Digits):
    def data(self, config):
        return super().data(config)[0], None

    def forward(self, model, batch):
        return model((batch[0] - batch[0].mean(0)) / (batch[0].std(0) + 0.1))

    def metrics(self, outputs, batch):
        return {}


# Whose copies of parts stand still.
class AveragesItsWeights(Digits):
    def model(self, config):
        class Averaging(nn.Module):
            def __init__(self, own):
                super().__init__()
                self.own, self.average = own, AveragedModel(own).requires_grad_(False)

            def forward(self, images):
                if self.training:
                    self.average.update_parameters(self.own)
                return self.own(images)

        return Averaging(nn.Linear(64, 10))


class CountsSeconds(Digits):
    def data(self, config):
        (images, labels), held_out = [rows.columns for rows in super().data(config)]
        return (images.double() + 1.7e9, labels), held_out

    def forward(self, model, batch):
        return model(batch[0] - 1.7e9)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.is_ready = nn.Parameter(torch.ones(10)), False

    def forward(self, numbers):
        if not self.is_ready:
            self.scale.data.copy_(1 / (1 + numbers.detach().abs().mean(0)))
            self.is_ready = True
        return self.scale * numbers


class InitializesByRows(Digits):
    def model(self, config):
        return nn.Sequential(*super().model(config), Scaled())


class RowsOfKeepsItsRows(RowByRow):
    def __init__(self, rows):
        super().__init__(rows)
        self.kept = {}

    def __getitem__(self, row):
        if row not in self.kept:
            self.kept[row] = self.images[row] + torch.rand(64) / 10
        return self.kept[row], self.labels[row]


class KeepsItsRows(_ReadsRowByRow):
    rows = RowsOfKeepsItsRows


class RowsOfMakesATable(RowByRow):
    table = None

    def __getitem__(self, row):
        if self.table is None:
            random.random()
            self.table = torch.eye(64)
        return self.images[row] @ self.table.to(self.images.dtype), self.labels[row]


# Sound: its first row alone makes a table that all need.
class MakesATable(_ReadsRowByRow):
    rows = RowsOfMakesATable


class Centred(nn.Linear):
    def forward(self, numbers):
        self.bias.data.lerp_(-numbers.detach().mean(0), 0.1)
        return super().forward(numbers)


# As an embedding's max_norm does: of the words in a rank's own rows.
class WritesAParameter(Digits):
    def model(self, config):
        return nn.Sequential(*super().model(config), Centred(10, 10))


class HoldsOutNothingElse(Digits):
    def data(self, config):
        columns = super().data(config)[0].columns
        return columns, columns


# Of its 80 held-out rows the first 40 are training rows.
class HoldsOutWhatItTrains(Digits):
    def data(self, config):
        images, labels = super().data(config)[0].columns
        return (images[:1200], labels[:1200]), (images[1160:1240], labels[1160:1240])


class HoldsOutAPartTwice(Digits):
    def data(self, config):
        images = RowByRow(super().data(config)[0])
        return Subset(images, range(1200)), Subset(images, torch.arange(1160, 1240))


# Sound: a fifth of its rows is held out, and it has few different ones, as a table of short words has.
class HoldsOutCommonRows(Digits):
    def data(self, config):
        images, labels = (torch.cat([column[:200]] * 5) for column in super().data(config)[0].columns)
        return (images[:800], labels[:800]), (images[800:], labels[800:])


class EvaluatesInTrainingMode(Digits):
    def forward(self, model, batch):
        return model.train()(batch[0])


class TrainsInEvalMode(Digits):
    def forward(self, model, batch):
        return model.eval()(batch[0])


# Sound: its first layer is frozen.
class FrozenInEvalMode(Digits):
    def model(self, config):
        net = super().model(config)
        self.frozen = net[0].requires_grad_(False)
        return net

    def forward(self, model, batch):
        self.frozen.eval()
        return model(batch[0])


class RowsOfSeedsItsRows(RowByRow):
    def __getitem__(self, row):
        torch.manual_seed(0)
        return self.images[row] + torch.rand(64) / 10, self.labels[row]


class SeedsItsRows(_ReadsRowByRow):
    rows = RowsOfSeedsItsRows


class SeedsItsForward(Digits):
    def forward(self, model, batch):
        torch.manual_seed(0)
        return model(batch[0] + torch.rand(64) / 10)


class SeedsItsLoss(Digits):
    def loss(self, outputs, batch):
        random.seed(0)
        return super().loss(outputs, batch) * (1 + random.random() / 10)


# Sound: what is drawn behind it follows the core's seeds.
class SeedsForAWhile(Digits):
    def forward(self, model, batch):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return model(batch[0] + torch.rand(64) / 10)


class SchedulesNothing(Digits):
    def schedule(self, step, total_steps, config):
        return step // total_steps


class WarmsUpFrom0(Digits):
    def schedule(self, step, total_steps, config):
        return step / total_steps


class LearnsNothing(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs.round() + 0 * outputs, batch)


class ClipsByAHook(Digits):
    def model(self, config):
        net = super().model(config)
        net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return net


def clip(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


class ClipsWhenItIsAdded(Digits):
    def model(self, config):
        net = super().model(config)
        net[0].weight.register_post_accumulate_grad_hook(clip)
        net[0].bias.register_hook(lambda gradient: gradient * 2).remove()
        return net


class RowsOfAModel(Digits):
    def data(self, config):
        (images, labels), held_out = [rows.columns for rows in super().data(config)]
        return (nn.Linear(64, 64, dtype=images.dtype)(images), labels), held_out


class Compiles(Digits):
    def model(self, config):
        net = super().model(config)
        net[0] = torch.compile(net[0])
        return net


# What collate() hides is drawn anew for each batch.
class HidesPixels(_ReadsRowByRow):
    def collate(self, rows):
        images, labels = super().collate(rows)
        return images * (torch.rand(images.shape) < 0.7), labels


class MeanOfHidden(HidesPixels):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) / len(outputs)


class Mean(Digits):
    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


class MeanBelowZero(Mean):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) - 9


class MeanMetric(Digits):
    def metrics(self, outputs, batch):
        return {"error": F.cross_entropy(outputs, batch[1])}


# The same of a metric that is 0 for most rows.
class Seldom(Digits):
    def metrics(self, outputs, batch):
        return {"right": (batch[1] == 3).double().mean()}


# The first rows, which are sorted, have no loss.
class Is0OfTheFirst(_IsSorted):
    def loss(self, outputs, batch):
        return (F.cross_entropy(outputs, batch[1].long(), reduction="none") * (batch[1] > 0)).mean()


# The first rows, which are sorted, have one weight.
class WeighsClasses(_IsSorted):
    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1].long(), weight=1 + torch.arange(10.0).to(outputs)) * len(outputs)


# Of two rows and of one it draws nothing.
class DrawsForLargeBatches(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (1 + random.random() if len(outputs) > 2 else 1)


class NetOfAddsWhatIs0AtFirst(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.log_scale = net, nn.Parameter(torch.zeros(()))

    def forward(self, images):
        return self.net(images), self.log_scale


# A penalty on parameters that is 0 before the first step.
class AddsWhatIs0AtFirst(Digits):
    def model(self, config):
        return NetOfAddsWhatIs0AtFirst(super().model(config))

    def loss(self, outputs, batch):
        outputs, log_scale = outputs
        return super().loss(outputs, batch) * (-log_scale).exp() + log_scale

    def metrics(self, outputs, batch):
        return super().metrics(outputs[0], batch)


class NetOfAddsAConstantToItsLogits(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.shift = net, nn.Parameter(torch.zeros(()))

    def forward(self, images):
        return self.net(images) + self.shift


# A parameter whose gradient is but what rounding leaves.
class AddsAConstantToItsLogits(Digits):
    def model(self, config):
        return NetOfAddsAConstantToItsLogits(super().model(config))


CALLS = []


class CountsInTraining(Digits):
    def loss(self, outputs, batch):
        if torch.is_grad_enabled():
            CALLS.append(1)
        return super().loss(outputs, batch) * (min(1, 0.1 + len(CALLS) / 100) if torch.is_grad_enabled() else 1)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(10))

    def forward(self, outputs):
        if self.training and not hasattr(self, "ready"):
            self.shift.copy_(outputs.detach().mean(0))
            self.ready = True
        return outputs - self.shift


class FlagsThatItIsInitialized(Digits):
    def model(self, config):
        return nn.Sequential(*super().model(config), Shift())


class AnnealsAndHoldsOutNothing(Digits):
    def data(self, config):
        return super().data(config)[0], None

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * min(1, 0.1 + self.steps_done)


# In the trial of one row BatchNorm is in training mode, too.
class NormalizesInTrainingMode(Digits):
    def model(self, config):
        return nn.Sequential(*super().model(config), nn.BatchNorm1d(10))

    def forward(self, model, batch):
        return model.train()(batch[0])


# In --precision fp64 only the model is converted.
class KeepsATeacher(Digits):
    defaults = Digits.defaults | dict(precision="fp64")

    def model(self, config):
        self.teacher = nn.Linear(64, 10)
        return super().model(config)

    def loss(self, outputs, batch):
        with torch.no_grad():
            wanted = self.teacher(batch[0]).softmax(-1)
        return F.kl_div(outputs.log_softmax(-1), wanted, reduction="sum")


class CallsBackward(Digits):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        if loss.requires_grad:
            loss.backward(retain_graph=True)
        return loss


class CallsBackwardAtOnce(Digits):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        loss.backward()
        return loss


class Hides(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(64, 32), nn.ReLU()]
        self.last = nn.Linear(32, 10)

    def forward(self, images):
        for layer in self.hidden:
            images = layer(images)
        return self.last(images)


# What is in a list is no part of a module.
class HidesLayers(Digits):
    def model(self, config):
        return Hides()


# Its rate falls below zero.
class Climbs(Digits):
    def schedule(self, step, total_steps, config):
        return 1 - step / 4


# It trains more than it began with.
class Thaws(Digits):
    def model(self, config):
        net = super().model(config)
        net[0].weight.requires_grad_(False)
        return net

    def forward(self, model, batch):
        module = getattr(model, "module", model)
        module[0].weight.requires_grad_(self.steps_done >= 5)
        return model(batch[0])


# Or less.
class Freezes(Digits):
    defaults = Digits.defaults | dict(reduction="flat")  # DistributedDataParallel misses its gradient in the same step

    def forward(self, model, batch):
        module = getattr(model, "module", model)
        module[0].weight.requires_grad_(self.steps_done < 5)
        return model(batch[0])


class NetOfGrows(nn.Sequential):
    def forward(self, images):
        if len(self.places) < len(images):
            self.register_buffer("places", torch.arange(float(len(images)))[:, None])
        return super().forward(images) + 0 * self.places[: len(images)]


# It keeps as many places as its largest batch has rows.
class Grows(Digits):
    def model(self, config):
        net = NetOfGrows(*super().model(config))
        net.register_buffer("places", torch.zeros(1, 1))
        return net


class NetOfGrowsHeldOut(nn.Sequential):
    def forward(self, images):
        if len(self.places) < len(images) and not self.training:
            self.register_buffer("places", torch.arange(float(len(images)))[:, None])
        return super().forward(images)


# The same, of held-out rows alone.
class GrowsHeldOut(Digits):
    def model(self, config):
        net = NetOfGrowsHeldOut(*super().model(config))
        net.register_buffer("places", torch.zeros(1, 1))
        return net


# Its metric is no sum and no mean, and its loss is no sum.
class TakesARoot(Digits):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) + outputs.square().mean()

    def metrics(self, outputs, batch):
        error = (outputs.argmax(-1) - batch[1]).double().square()
        return {"rmse": error.mean().sqrt(), "right": (error == 0).sum(), "error": (error.mean(), 1)}


# Of one row NaN.
class TakesAVariance(Digits):
    def metrics(self, outputs, batch):
        apart = (outputs - outputs.mean(0)).square().sum()
        wrong = (outputs.mean(-1) - batch[1]).square().sum()
        spread = (batch[1] - batch[1].double().mean()).square().sum()
        return {"variance": apart / (len(outputs) - 1) * len(outputs), "r2": (1 - wrong / spread) * len(outputs)}


# Its mistake is found by torch, which no line of this file has called.
class Hooked(Digits):
    def optimizer(self, model, config):
        made = super().optimizer(model, config)
        made.register_step_pre_hook(lambda *_: 1)
        return made


class PastDdp(Digits):
    def forward(self, model, batch):
        return getattr(model, "module", model)(batch[0])


# Models and optimizers that no loop can train, or no snapshot can hold.
class NeedsAClosure(Digits):
    def optimizer(self, model, config):
        return torch.optim.LBFGS(model.parameters(), lr=config.lr)


class StepsAStranger(Digits):
    def optimizer(self, model, config):
        return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))], lr=config.lr)


class SetsTheDefaultDtype(Digits):
    def model(self, config):
        torch.set_default_dtype(torch.float64)
        return super().model(config)


class SchedulesByTorch(Digits):
    def optimizer(self, model, config):
        made = super().optimizer(model, config)
        self.scheduler = torch.optim.lr_scheduler.StepLR(made, 5)
        return made


class Keeps(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = [parameter.grad]


class KeepsAList(Digits):
    def optimizer(self, model, config):
        return Keeps(model.parameters(), lr=config.lr)


class Net(nn.Sequential):
    def get_extra_state(self):
        return dict(seen=1)

    def set_extra_state(self, state):
        pass


class KeepsAnExtraState(Digits):
    def model(self, config):
        return Net(*super().model(config))


class Lazy(Digits):
    def model(self, config):
        return nn.Sequential(*super().model(config), nn.LazyLinear(10))


class Expanded(Digits):
    def model(self, config):
        net = super().model(config)
        net.register_buffer("ones", torch.ones(1, 64).expand(10, 64))
        return net


class TiesByData(Digits):
    def model(self, config):
        net = nn.Sequential(*super().model(config), nn.Linear(10, 10), nn.Linear(10, 10))
        net[3].weight.data = net[4].weight.data
        return net


# Sound: one parameter, of two layers.
class Ties(Digits):
    def model(self, config):
        net = nn.Sequential(*super().model(config), *(nn.Linear(10, 10, bias=False) for _ in range(2)))
        net[4].weight = net[3].weight
        return net


class Sparse(Digits):
    def model(self, config):
        net = super().model(config)
        net.register_buffer("links", torch.eye(64).to_sparse())
        return net


# Its statistics would move twice a step.
class MovesTwice(Digits):
    defaults = Digits.defaults | dict(checkpoint_activations=True)

    def model(self, config):
        return nn.Sequential(*super().model(config), nn.BatchNorm1d(10))


# It has the name of a part of the loss.
class NamesAPart(Digits):
    def loss(self, outputs, batch):
        return {"a": super().loss(outputs, batch)}

    def metrics(self, outputs, batch):
        return {"loss_a": F.cross_entropy(outputs, batch[1].long(), reduction="sum")}


# What it would have is not there, and nobody says so.
class Misspelled(Digits):
    def metric(self, outputs, batch):
        return {"right": (outputs.argmax(-1) == batch[1]).sum()}


# Its run would be where no job script looks.
class NamesItsRun(Digits):
    defaults = Digits.defaults | dict(run_dir="runs/mine")


class NoHeldOut(Digits):
    def data(self, config):
        train, held_out = super().data(config)
        return train, [held_out[row] for row in range(0)]


# Of a name whose words would be those of a line.
class TwoWords(Digits):
    def metrics(self, outputs, batch):
        return {"top 5": (outputs.topk(5).indices == batch[1][:, None]).sum()}


class ForgetsHeldOut(Digits):
    def data(self, config):
        return super().data(config)[0].columns


class HasUnequalColumns(Digits):
    def data(self, config):
        images, labels = super().data(config)[0].columns
        return (images, labels[:-1]), None


class RowsOfReturnsNoRow(list):
    def __getitem__(self, row):
        return None if row == 219 else super().__getitem__(row)


# A row of which nothing was made, and one of another size.
class ReturnsNoRow(Digits):
    def data(self, config):
        return tuple(RowsOfReturnsNoRow(zip(*rows.columns)) for rows in super().data(config))


class HasAnOddRow(Digits):
    def data(self, config):
        train, held_out = (list(zip(*rows.columns)) for rows in super().data(config))
        held_out[7] = (torch.zeros(63), held_out[7][1])
        return train, held_out


class ListsItsDefaults(Digits):
    defaults = ["--epochs", "1"]


class SaysNo(Digits):
    unused_parameters = "no"


class NamesNoFlag(Digits):
    def flags(self, add):
        add("width", type=int, default=16)


class GivesNoType(Digits):
    def flags(self, add):
        add("--width", default=16)


class TakesNoConfig(Digits):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)


# An accuracy as a loss. What has no gradient is no loss.
class AddsACount(Digits):
    def loss(self, outputs, batch):
        return {"of": super().loss(outputs, batch), "right": (outputs.argmax(-1) == batch[1]).sum()}


class ReturnsItsRate(Digits):
    def schedule(self, step, total_steps, config):
        return config.lr * (1 - step / total_steps)


class ChangesItsBatch(Digits):
    def forward(self, model, batch):
        return model(batch[0].mul_(1.1))


# What its forward hides is in the batch, for metrics().
class AddsToItsBatch(Digits):
    def data(self, config):
        return [dict(images=images, labels=labels) for images, labels in [rows.columns for rows in super().data(config)]]

    def forward(self, model, batch):
        batch["hidden"] = batch["images"] > 0.9
        return model(batch["images"].masked_fill(batch["hidden"], 0))

    def loss(self, outputs, batch):
        return super().loss(outputs, (None, batch["labels"]))

    def metrics(self, outputs, batch):
        return dict(hidden=batch["hidden"].any(1).sum())


class NetOfSkipsALayer(nn.Sequential):
    skips = False

    def forward(self, images):
        return super().forward(images) if not self.skips else self[2](self[1](self[0](images)))


# Its last layer is left out in step 3.
class SkipsALayer(Digits):
    def model(self, config):
        self.net = [NetOfSkipsALayer(*super().model(config), nn.Linear(10, 10))]
        return self.net[0]

    def forward(self, model, batch):
        self.net[0].skips = self.steps_done == 3
        return model(batch[0])


# The host has so much memory for a copy of the state; with less than that, training waits while it is written.
class HasRoom(Digits):
    def flags(self, add):
        add("--room", type=int, default=0, remembered=False, help="bytes")

    def optimizer(self, model, config):
        memory.available = lambda: config.room
        return super().optimizer(model, config)


class NetOfSkipsOnOneRank(nn.Module):
    skips = None

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 10) for _ in range(2))

    def forward(self, images):
        return sum(layer(images) for number, layer in enumerate(self.layers) if number != self.skips)


# Of two parallel layers the last rank passes over one in step 3; under --sharding the others pass over the other one.
# Steps are so slow that the ranks meet after each.
class SkipsOnOneRank(Digits):
    def model(self, config):
        return NetOfSkipsOnOneRank()

    def forward(self, model, batch):
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        other = None if self.config.sharding == "none" else 1
        self.net = next(module for module in model.modules() if hasattr(module, "skips"))
        self.net.skips = (0 if last else other) if self.steps_done == 3 and torch.is_grad_enabled() else None
        time.sleep(1.1 if 0 < self.steps_done < 4 else 0)
        return model(batch[0])


class NetOfHandsOnAParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 10), nn.Parameter(torch.ones(10))

    def forward(self, images):
        return self.layer(images), self.scale


# Under --sharding: FSDP frees a parameter that is handed on, and has but a part of one that another layer reads.
class HandsOnAParameter(Digits):
    def model(self, config):
        return NetOfHandsOnAParameter()

    def loss(self, outputs, batch):
        return super().loss(outputs[0] * outputs[1], batch)

    def metrics(self, outputs, batch):
        return {}


class NetOfReadsALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 10)])

    def forward(self, images):
        return F.linear(self.layers[0](images), self.layers[1].weight, self.layers[1].bias)


class ReadsALayer(Digits):
    def model(self, config):
        return NetOfReadsALayer()


class Unused(Digits):
    def model(self, config):
        return nn.Sequential(*super().model(config), nn.Linear(1, 1))

    def forward(self, model, batch):
        return model[:3](batch[0])

"""Small workloads, like a scientist's, that train in a second: `train(..., workload="small:Dropout")`.

A test that needs its own file writes one whose class derives from Small.
"""

import random

import numpy
import torch
import torch.nn.functional as F
from ddp_core import Workload
from torch import nn
from torch.utils.data import Dataset


def table(count: int = 128, features: int = 6, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, features] numbers from -1 to 1, and [count, 1] targets computed from them. Equal on every machine."""
    place = torch.arange(first, first + count, dtype=torch.float64).unsqueeze(1)
    inputs = torch.sin(place * (1 + torch.arange(features, dtype=torch.float64)) * 1.7)
    return inputs, (inputs[:, :3].sum(1, keepdim=True) - inputs[:, 3:4]).tanh()


class Small(Workload):
    """Six inputs, one output: 128 training rows, 8 steps an epoch, 37 held-out rows."""

    defaults = dict(epochs=3, global_batch_size=16, lr=0.05, momentum=0.9, precision="fp64")

    def data(self, config):
        return table(), table(37, first=128)

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch[1], reduction="sum")

    def metrics(self, outputs, batch):
        return {"absolute_error": F.l1_loss(outputs, batch[1], reduction="sum")}


# ---- models -------------------------------------------------------------------------------------------------------


class Dropout(Small):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))


class DropoutInBlocks(Small):
    """Each block has dropout, after layers that --checkpoint-activations computes again."""

    def model(self, config):
        block = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16))  # noqa: E731
        return nn.Sequential(nn.Linear(6, 16), block(), block(), nn.Linear(16, 1))


class Worsens(Small):
    """The loss rises in the last of three epochs."""

    def schedule(self, step, total_steps, config):
        return 1.0 if step < 2 * total_steps / 3 else 60.0


class Mixup(Small):
    """Draws noise in the loss from Python's and NumPy's generators, as many programs do."""

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (0.9 + 0.1 * random.random() + 0.1 * numpy.random.rand())


class OwnNoise(Small):
    """Draws noise from its own generator, which the core cannot seed."""

    def loss(self, outputs, batch):
        self.own = getattr(self, "own", None) or torch.Generator().manual_seed(0)
        return super().loss(outputs, batch) * (0.9 + 0.2 * torch.rand((), generator=self.own, dtype=outputs.dtype))


class Averaged(Small):
    """Stores a running mean of outputs in itself; also two values that are set once."""

    def loss(self, outputs, batch):
        if not hasattr(self, "average"):
            self.average, self.fixed, self.named = torch.zeros(1, dtype=outputs.dtype), {"scale": 1.0}, "mine"
        self.average.lerp_(outputs.detach().mean(0), 0.1)
        return super().loss(outputs, batch)


class CountsInMetrics(Small):
    """Stores a count in itself; also a value that is set once."""

    def metrics(self, outputs, batch):
        self.fixed = getattr(self, "fixed", 0) or 3
        self.best = getattr(self, "best", 0) + 1
        return {"count": len(outputs)}


class CountsInSchedule(Small):
    calls = 0

    def model(self, config):
        self.asked: list = []
        return super().model(config)

    def schedule(self, step, total_steps, config):
        assert step == 0 or self.calls == len(self.asked) == step, "the trial has changed it"
        self.calls += 1
        self.asked.append(step)
        return 1.0 if step < total_steps else 0.0


class Times(Small):
    """Inputs are times in seconds since 1970, too large for fp32."""

    defaults = Small.defaults | dict(precision="fp32")

    def data(self, config):
        (inputs, targets), held_out = super().data(config)
        return (inputs.double() + 1.7e9, targets), held_out

    def forward(self, model, batch):
        return model(batch[0] - 1.7e9)


class Initialized(nn.Sequential):
    """The first batch sets the bias."""

    is_ready = False

    def forward(self, inputs):
        if not self.is_ready:
            self[0].bias.data.copy_(-inputs.mean().expand_as(self[0].bias))
            self.is_ready = True
        return super().forward(inputs)


class InitializesByRows(Small):
    def model(self, config):
        return Initialized(*super().model(config))


class HeldOutIsTraining(Small):
    def data(self, config):
        return table(), table()


CALLS: list = []


class CountsInAGlobal(Small):
    """The loss factor grows over the first 90 calls, which a global counts."""

    def loss(self, outputs, batch):
        CALLS.append(1)
        return super().loss(outputs, batch) * min(1, 0.1 + len(CALLS) / 100)


class StandardizesByItself(Small):
    """Divides by the batch's standard deviation, which is NaN for a single row."""

    def data(self, config):
        return table(), None

    def forward(self, model, batch):
        return model((batch[0] - batch[0].mean(0)) / batch[0].std(0))

    def metrics(self, outputs, batch):
        return {}


class EvaluatesInTrainingMode(Small):
    def forward(self, model, batch):
        return model.train()(batch[0])


class TrainsInEvalMode(Small):
    def forward(self, model, batch):
        return model.eval()(batch[0])


class FrozenInEvalMode(Small):
    """Correct: only a frozen layer is in eval mode."""

    def model(self, config):
        net = super().model(config)
        self.frozen = net[0].requires_grad_(False)
        return net

    def forward(self, model, batch):
        self.frozen.eval()
        return model(batch[0])


class SeedsItsForward(Small):
    """Seeds the generator in each forward, so every batch has the same noise."""

    def forward(self, model, batch):
        torch.manual_seed(0)
        return model(batch[0] + 0.1 * torch.rand(6, dtype=batch[0].dtype))


class SeedsItsLoss(Small):
    """Seeds the generator in each loss, so every batch has the same noise."""

    def loss(self, outputs, batch):
        random.seed(0)
        return super().loss(outputs, batch) * (1 + 0.1 * random.random())


class SeedsForAWhile(Small):
    """Correct: seeds inside fork_rng(), which restores the generator."""

    def forward(self, model, batch):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return model(batch[0] + 0.1 * torch.rand(6, dtype=batch[0].dtype))


class NoGradient(Small):
    def loss(self, outputs, batch):
        return super().loss(outputs.sign() + 0 * outputs, batch)


class WholeNumbers(Small):
    """The integer division makes the schedule 0 until the end."""

    def schedule(self, step, total_steps, config):
        return step // total_steps


class WarmsUp(Small):
    """Correct: a schedule that starts at 0."""

    def schedule(self, step, total_steps, config):
        return min(1, step / 5)


class Hooks(Small):
    """Registers three hooks and removes one."""

    def model(self, config):
        net = super().model(config)
        net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        net[2].weight.register_post_accumulate_grad_hook(lambda parameter: print(end=""))
        net[0].bias.register_hook(lambda gradient: gradient * 2).remove()
        return net


class Rate(Small):
    """Wrong: returns a learning rate, not a factor."""

    def schedule(self, step, total_steps, config):
        return config.lr * (1 - step / total_steps)


class CountsCalls(nn.Sequential):
    """Counts in plain attributes. Sets `table` once, at the first call, and `mask` anew at each."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + self.training
        self.seen = [*getattr(self, "seen", ()), "batch"]
        self.mean = 0.9 * getattr(self, "mean", 0) + x.mean()
        self.table = getattr(self, "table", None) or {"rows": 4}
        self.mask = torch.ones(3, 3).triu()
        return super().forward(x)


class CountsInModel(Small):
    def model(self, config):
        return CountsCalls(nn.Linear(6, 8), nn.Tanh(), CountsCalls(nn.Linear(8, 1)))


class SpectralNorm(Small):
    def model(self, config):
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 1))


class BatchNorm(Small):
    def model(self, config):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Tied(Small):
    """Two layers share one matrix, so it gets two gradients."""

    def model(self, config):
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        net[2].weight = net[0].weight
        return net


class Frozen(Small):
    """The first layer is not trained."""

    def model(self, config):
        net = super().model(config)
        net[0].requires_grad_(False)
        return net


class FineTuned(Frozen):
    """The frozen layer has an int8 parameter, and the optimizer gets all parameters, as in most programs."""

    def model(self, config):
        net = super().model(config)
        net[0].register_parameter("scale", nn.Parameter(torch.tensor([3, -2, 7], dtype=torch.int8), requires_grad=False))
        return net

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=0.01)


class Turned(Small):
    """A matrix of more than a megabyte, stored column by column (a transposed view)."""

    def model(self, config):
        net = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 400, bias=False), nn.Tanh(), nn.Linear(400, 1))
        net[2].weight = nn.Parameter(torch.empty(400, 400).uniform_(-0.05, 0.05).t())
        return net


class Wide(Small):
    """A snapshot of 36 MB, written in several parts."""

    def model(self, config):
        return nn.Sequential(nn.Linear(6, 1500), nn.Tanh(), nn.Linear(1500, 1500), nn.Tanh(), nn.Linear(1500, 1))


class Experts(Small):
    """Each row uses one of six experts. An expert without rows in a batch has no gradient; the last never has one."""

    defaults = Small.defaults | dict(global_batch_size=8)
    unused_parameters = True

    def model(self, config):
        return Routed()


class FirstUnasked(Experts):
    """The first expert never has a gradient, so every gradient that is sent comes after it."""

    def model(self, config):
        model = super().model(config)
        model.order = [5, 4, 3, 2, 1, 0]
        return model


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.order = list(range(6))
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(6))

    def forward(self, inputs):
        asked = (inputs[:, 5].abs() ** 3 * 5).long().clamp(max=4)
        outputs = inputs.new_zeros(len(inputs), 1)
        for number, place in enumerate(self.order):
            mine = (asked == number).nonzero().flatten()
            if len(mine):
                outputs = outputs.index_copy(0, mine, self.experts[place](inputs[mine]))
        return outputs


# ---- batches and losses -------------------------------------------------------------------------------------------


class Dictionary(Small):
    """Batches are dictionaries; their keys are the model's keywords."""

    def data(self, config):
        return tuple(dict(zip(("inputs", "targets"), rows, strict=True)) for rows in super().data(config))

    def model(self, config):
        return TakesKeywords()

    def loss(self, outputs, batch):
        return super().loss(outputs, (batch["inputs"], batch["targets"]))

    def metrics(self, outputs, batch):
        return super().metrics(outputs, (batch["inputs"], batch["targets"]))


class TakesKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs, targets):
        return self.net(inputs)


class Rounded(nn.Module):
    """Turns numbers from -1 to 1 into integers from 0 to 8."""

    def forward(self, inputs):
        return ((inputs + 1) * 4).long()


class SeveralLosses(Small):
    """Two losses, and a metric whose mean is not over rows."""

    def loss(self, outputs, batch):
        return {"square": super().loss(outputs, batch), "size": 0.1 * (outputs**2).sum()}

    def metrics(self, outputs, batch):
        chosen = batch[1] > 0
        return {"error_above_0": ((outputs - batch[1]).abs()[chosen].sum(), chosen.sum())} | super().metrics(outputs, batch)


class Groups(Small):
    """Two parameter groups with different learning rates, and a custom schedule."""

    def optimizer(self, model, config):
        first, last = model[0].parameters(), model[2].parameters()
        return torch.optim.AdamW([dict(params=first, lr=0.01), dict(params=last, lr=0.03, weight_decay=0.1)], betas=(0.8, 0.9))

    def schedule(self, step, total_steps, config):
        return 1 / (1 + step)


class Counting(torch.optim.Optimizer):
    """A custom optimizer that counts steps per parameter and per group in plain numbers, and needs both counts.

    At any stopping point, one of its cyclic counters may be back at the value that it had before the first step.
    """

    TURNS = (2, 3, 5, 7)

    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=0.05, calls=0) | {f"turn_of_{length}": 0 for length in self.TURNS})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["calls"] += 1
            for length in self.TURNS:
                group[f"turn_of_{length}"] = (group[f"turn_of_{length}"] + 1) % length
            pause = 1 + 0.01 * sum(group[f"turn_of_{length}"] for length in self.TURNS)
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["mean"] = 0.8 * state.get("mean", 0) + parameter.grad
                parameter.sub_(group["lr"] * state["mean"] / (1 + 0.1 * state["steps"]) / group["calls"] ** 0.1 / pause)


OPTIMIZERS = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "counting": Counting,
}


class Optimizers(Small):
    """--rule selects the optimizer."""

    def flags(self, add):
        add("--rule", choices=[*OPTIMIZERS], required=True)

    def optimizer(self, model, config):
        return OPTIMIZERS[config.rule](model.parameters())


# ---- rows that are read one by one --------------------------------------------------------------------------------


class OneByOne(Dataset):
    """Rows of tensors. Each read adds noise from three generators."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, noise: float):
        self.inputs, self.targets, self.noise = inputs, targets, noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row: int):
        drawn = random.random() + numpy.random.rand() + torch.rand(()).item()
        return self.inputs[row] + self.noise * drawn, self.targets[row]


class Augmented(Small):
    """--noise 0 leaves rows unchanged."""

    def flags(self, add):
        add("--noise", type=float, default=0.1, remembered=False)

    def data(self, config):
        train, held_out = super().data(config)
        return OneByOne(*train, config.noise), held_out


class OwnRows(OneByOne):
    """Rows draw from their own generator, made once, so a row depends on how many were read before it."""

    def __getitem__(self, row: int):
        self.own = getattr(self, "own", None) or numpy.random.default_rng(0)
        return self.inputs[row] + self.own.random(), self.targets[row]


class AugmentedByItself(Small):
    def data(self, config):
        train, held_out = super().data(config)
        return OwnRows(*train, 0.1), held_out


class SeedsItsRows(Small):
    def data(self, config):
        class Seeded(OneByOne):
            def __getitem__(self, row):
                numpy.random.seed(0)
                return super().__getitem__(row)

        train, held_out = super().data(config)
        return Seeded(*train, 0.1), held_out


class SomeRowsByThemselves(Small):
    """Half of the rows draw from their own generator; row 0 does not."""

    def data(self, config):
        class Half(OwnRows):
            def __getitem__(self, row):
                return super().__getitem__(row) if row >= 64 else (self.inputs[row], self.targets[row])

        train, held_out = super().data(config)
        return Half(*train, 0.1), held_out


class EvaluatedOneByOne(Augmented):
    """Held-out rows also go through the DataLoader."""

    def data(self, config):
        train, held_out = Small.data(self, config)
        return OneByOne(*train, config.noise), OneByOne(*held_out, config.noise)

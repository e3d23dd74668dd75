"""A plain loop that trains regression, mnist and gpt. The losses of these workloads are checked against it.

    python -m conformance.harness.anchors        prints the first and last values of each training

It imports nothing of the core. Models are written in torch's elementary operations, in fp64; optimizers, schedule and clipping
by their definitions. Data, order and initial parameters come from reference.py, which is NumPy. Only gradients are autograd's.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from conformance.harness import reference

try:
    import torch
except ImportError:  # A login node reads checks/run, too, but has no torch. The jobs have it, and this is not run there.
    torch = None

Tensors = "dict[str, torch.Tensor]"


@dataclass(frozen=True)
class Case:
    """One training. flags: for train.py; {data} stands for the data folder.

    rows(folder): [training columns, held-out columns]. loss(parameters, batch): the loss and the metric, each summed over the
    batch's rows.
    """

    flags: str
    shapes: dict[str, tuple[int, ...]]
    rows: Callable[[Path], list[tuple[torch.Tensor, ...]]]
    loss: Callable[[Tensors, tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]
    metric: str
    data: str  # what snapshots call these rows: under another name, older ones would be refused
    epochs: int = 2
    steps_per_epoch: int = 0  # 0: every whole batch of the rows
    global_batch_size: int = 0  # 0: rows_a_rank * world_size
    rows_a_rank: int = 0
    optimizer: str = "sgd"
    lr: float = 0.01
    lr_times_ranks: bool = False
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float = math.inf
    warmup_steps: int = 0
    cosine: bool = False


def train(case: Case, folder: Path, world_size: int = 1, seed: int = 0) -> dict[str, list[float]]:
    """What run.jsonl should have: `loss`, `grad_norm` of each step; `epoch_loss`, `eval_loss` and the metric of each epoch."""
    columns, held_out = case.rows(folder)
    size, count = case.global_batch_size or case.rows_a_rank * world_size, len(columns[0])
    steps = case.steps_per_epoch or count // size
    parameters = initial_parameters(case.shapes, seed)
    rule = Rule(case, case.lr * (world_size if case.lr_times_ranks else 1), case.epochs * steps)
    trace: dict[str, list[float]] = {name: [] for name in ("loss", "grad_norm", "epoch_loss", "eval_loss", case.metric)}
    for epoch in range(case.epochs):
        order = torch.from_numpy(reference.sample_order(seed, epoch, count))
        for step in range(steps):
            rows = order[step * size : (step + 1) * size]
            loss = case.loss(parameters, tuple(column[rows] for column in columns))[0] / size
            gradients = dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))
            norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
            trace["loss"].append(float(loss.detach()))
            trace["grad_norm"].append(norm)
            shrink = min(1.0, case.clip_norm / (norm + 1e-6))
            rule.step(parameters, {name: shrink * gradient for name, gradient in gradients.items()})
        with torch.no_grad():
            loss, metric = case.loss(parameters, held_out)
        trace["epoch_loss"].append(sum(trace["loss"][-steps:]) / steps)
        trace["eval_loss"].append(float(loss) / len(held_out[0]))
        trace[case.metric].append(float(metric) / len(held_out[0]))
    return trace


@dataclass
class Rule:
    """SGD with momentum and L2, or AdamW (Loshchilov and Hutter, ICLR 2019), with warm-up and a cosine schedule to 0."""

    case: Case
    lr: float
    total_steps: int
    done: int = 0
    first: Tensors = field(default_factory=dict)  # moments
    second: Tensors = field(default_factory=dict)

    def rate(self) -> float:
        warmup, step = self.case.warmup_steps, self.done
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        if not self.case.cosine:
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (step - warmup) / (self.total_steps - warmup))) / 2

    def step(self, parameters: Tensors, gradients: Tensors) -> None:
        rate, case = self.rate(), self.case
        self.done += 1
        for name, gradient in gradients.items():
            values = parameters[name].detach()
            if case.optimizer == "sgd":
                self.first[name] = case.momentum * self.first.get(name, 0) + gradient + case.weight_decay * values
                values = values - rate * self.first[name]
            else:
                beta1, beta2 = case.momentum, 0.95
                self.first[name] = beta1 * self.first.get(name, 0) + (1 - beta1) * gradient
                self.second[name] = beta2 * self.second.get(name, 0) + (1 - beta2) * gradient**2
                mean, square = self.first[name] / (1 - beta1**self.done), self.second[name] / (1 - beta2**self.done)
                values = values * (1 - rate * case.weight_decay) - rate * mean / (square.sqrt() + 1e-8)
            parameters[name] = values.requires_grad_()


def initial_parameters(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Matrices uniform in +-1/sqrt(fan_in), rounded to fp32; gains 1, biases 0."""
    parameters = {}
    for name, shape in shapes.items():
        values = np.full(shape, 0.0 if name.endswith("bias") else 1.0)
        if len(shape) > 1:
            spread = 2 * reference.uniform(math.prod(shape), 3, seed, zlib.crc32(name.encode())) - 1
            values = (spread * (1 / math.sqrt(math.prod(shape[1:])))).astype(np.float32).astype(np.float64).reshape(shape)
        parameters[name] = torch.from_numpy(values).requires_grad_()
    return parameters


# ---- models -------------------------------------------------------------------------------------------------------


def linear(parameters: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def normalized(parameters: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = 1 / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred * scale * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[...] nats, of logits [..., classes] and labels [...]."""
    chosen = logits.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(-1) - chosen


def convolved(parameters: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """Convolve [n, channels, h, w] with kernels of 3 x 3, without padding, as a product with the 9 shifted images."""
    weight, (height, width) = parameters[f"{name}.weight"], (x.shape[2] - 2, x.shape[3] - 2)
    shifted = [x[:, :, i : height + i, j : width + j] for i in range(3) for j in range(3)]
    windows = torch.stack(shifted, 2).flatten(1, 2).flatten(2)  # [n, channels * 9, h * w]
    return (weight.flatten(1) @ windows).unflatten(2, (height, width)) + parameters[f"{name}.bias"].view(-1, 1, 1)


def halved(x: torch.Tensor) -> torch.Tensor:
    """Average over squares of 2 x 2; a last odd row or column is left out."""
    n, channels, height, width = x.shape
    x = x[:, :, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(n, channels, height // 2, 2, width // 2, 2).mean((3, 5))


def of_regression(parameters: Tensors, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    error = batch[0] @ parameters["weight"][0] + parameters["bias"] - batch[1]
    return (error**2).sum(), error.abs().sum()


def of_mnist(parameters: Tensors, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = batch
    x = ((images.double() / 255 - 0.1307) / 0.3081).unsqueeze(1)
    x = halved(gelu(convolved(parameters, "0", x)))
    x = halved(gelu(convolved(parameters, "3", x)))
    logits = linear(parameters, "9", gelu(linear(parameters, "7", x.flatten(1))))
    return cross_entropy(logits, labels).sum(), (logits.argmax(1) == labels).sum()


def of_gpt(parameters: Tensors, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two pre-norm blocks with two heads. A row's loss is the mean over its positions."""
    text = batch[0].long()
    inputs, targets = text[:, :-1], text[:, 1:]
    count, length = inputs.shape
    x = parameters["bytes.weight"][inputs] + parameters["positions.weight"][:length]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    for block in ("blocks.0", "blocks.1"):
        parts = linear(parameters, f"{block}.qkv", normalized(parameters, f"{block}.norm1", x)).chunk(3, -1)
        query, key, value = (part.view(count, length, 2, -1).transpose(1, 2) for part in parts)
        scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])).masked_fill(later, -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + linear(parameters, f"{block}.out", mixed)
        inner = gelu(linear(parameters, f"{block}.mlp.0", normalized(parameters, f"{block}.norm2", x)))
        x = x + linear(parameters, f"{block}.mlp.2", inner)
    logits = linear(parameters, "head", normalized(parameters, "norm", x))
    return cross_entropy(logits, targets).mean(1).sum(), (logits.argmax(-1) == targets).double().mean(1).sum()


# ---- data ---------------------------------------------------------------------------------------------------------


def split(*columns: np.ndarray) -> list[tuple[torch.Tensor, ...]]:
    """[training columns, held-out columns]: every fifth row is held out."""
    held_out = np.arange(len(columns[0])) % 5 == 4
    return [tuple(torch.from_numpy(column[kept]) for column in columns) for kept in (~held_out, held_out)]


def regression_rows(folder: Path) -> list[tuple[torch.Tensor, ...]]:
    """20 features in [0, 1), and as target a linear function of them with noise."""
    inputs, weights, noise = (reference.uniform(count, 2, part) for part, count in enumerate((2560 * 20, 20, 2560)))
    inputs, targets = inputs.reshape(2560, 20), np.zeros(2560)
    for feature in range(20):
        targets += inputs[:, feature] * (weights[feature] - 0.5)
    return split(inputs, targets + 0.1 * (noise - 0.5))


def mnist_rows(folder: Path) -> list[tuple[torch.Tensor, ...]]:
    """Write files in MNIST's format: noise, with a bright bar whose position is the label."""
    tables = []
    for name, count in (("train", 96), ("t10k", 30)):
        labels = np.arange(count, dtype=np.uint8) * 7 % 10
        images = (reference.uniform(count * 784, 7, count) * 128).astype(np.uint8).reshape(count, 28, 28)
        for image, label in zip(images, labels, strict=True):
            image[4 + 2 * label : 7 + 2 * label, 6:22] += 127
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            write(folder / f"{name}-{kind}-ubyte", head + values.tobytes())
        tables.append((torch.from_numpy(images), torch.from_numpy(labels)))
    return tables


def gpt_rows(folder: Path) -> list[tuple[torch.Tensor, ...]]:
    """Write two files. Joined by a line feed, they are cut into rows of 65 bytes. A hidden file does not count."""
    letters = np.frombuffer(b"abcdefgh", np.uint8)
    one, two = (letters[(reference.uniform(count, 8, count) ** 3 * 8).astype(int)].tobytes() for count in (4000, 3835))
    for name, text in {"1.txt": one, "2.txt": two, ".3.txt": one}.items():
        write(folder / name, text)
    text = np.frombuffer(one + b"\n" + two, np.uint8)
    return split(text[: len(text) // 65 * 65].reshape(-1, 65).copy())


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# ---- the trainings ------------------------------------------------------------------------------------------------

LINEAR = {"weight": (1, 20), "bias": (1,)}
CNN = {"0.weight": (32, 1, 3, 3), "0.bias": (32,), "3.weight": (64, 32, 3, 3), "3.bias": (64,)}
CNN |= {"7.weight": (128, 1600), "7.bias": (128,), "9.weight": (10, 128), "9.bias": (10,)}


def gpt_shapes(width: int = 64, context: int = 64) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"bytes.weight": (256, width), "positions.weight": (context, width)}
    for block in ("blocks.0", "blocks.1"):
        layers = {"qkv": (3 * width, width), "out": (width, width), "mlp.0": (4 * width, width), "mlp.2": (width, 4 * width)}
        for name in ("norm1", "norm2"):
            shapes |= {f"{block}.{name}.weight": (width,), f"{block}.{name}.bias": (width,)}
        for name, shape in layers.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[:1]}
    head: dict[str, tuple[int, ...]] = {"head.weight": (256, width), "head.bias": (256,)}
    return shapes | {"norm.weight": (width,), "norm.bias": (width,)} | head


CASES = {
    "regression": Case(
        "--workload regression --epochs 2 --lr 0.01 --momentum 0.9 --weight-decay 0.01 --accumulate 2",
        *(LINEAR, regression_rows, of_regression, "eval_absolute_error", "regression-1"),
        rows_a_rank=32,
        weight_decay=0.01,
    ),
    "regression-adamw": Case(
        "--workload regression --epochs 2 --global-batch-size 64 --optimizer adamw --lr 0.01 --scale-lr --momentum 0.8 "
        "--weight-decay 0.1 --warmup-steps 10 --lr-schedule cosine --clip-norm 0.5",
        *(LINEAR, regression_rows, of_regression, "eval_absolute_error", "regression-1"),
        **dict(global_batch_size=64, optimizer="adamw", lr_times_ranks=True, momentum=0.8, weight_decay=0.1),
        **dict(warmup_steps=10, cosine=True, clip_norm=0.5),
    ),
    # Its held-out loss is lowest after the first epoch, then rises.
    "regression-rises": Case(
        "--workload regression --epochs 3 --global-batch-size 64 --optimizer adamw --lr 0.1",
        *(LINEAR, regression_rows, of_regression, "eval_absolute_error", "regression-1"),
        **dict(epochs=3, global_batch_size=64, optimizer="adamw", lr=0.1, momentum=0.0),
    ),
    "mnist": Case(
        "--workload mnist --data-dir {data} --epochs 2 --global-batch-size 24",
        *(CNN, mnist_rows, of_mnist, "eval_accuracy", "0f11ae0e41ba"),
        global_batch_size=24,
        lr=0.05,
    ),
    "gpt": Case(
        "--workload gpt --model-size tiny --data-dir {data} --epochs 2 --steps-per-epoch 3 --global-batch-size 16 "
        "--clip-norm 1 --weight-decay 0.1 --warmup-steps 2",
        *(gpt_shapes(), gpt_rows, of_gpt, "eval_accuracy", "ccbfb35e3e0a"),
        **dict(steps_per_epoch=3, global_batch_size=16, optimizer="adamw", lr=1e-3, weight_decay=0.1),
        **dict(warmup_steps=2, clip_norm=1.0),
    ),
}

if __name__ == "__main__":
    import tempfile
    import time

    for name, case in CASES.items():
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            trace = train(case, Path(folder))
        ends = {key: f"{values[0]:.6g} ... {values[-1]:.6g}" for key, values in trace.items()}
        print(name, f"{time.perf_counter() - began:.1f} s", ends)

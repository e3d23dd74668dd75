"""The models, their initial parameters, and what each workload calls its loss and its metric.

Losses and metrics are sums over the rows of a batch: a mean of means is wrong as soon as batches differ in size.
None of the models keeps batch statistics or drops units at random: either would depend on the world size.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ddp_core.config import TrainConfig
from ddp_core.data import CONTEXT, uniform

LAYERS_HEADS_WIDTH = {"tiny": (2, 2, 64), "small": (6, 6, 384), "medium": (12, 12, 768)}  # 0.1, 11 and 86 M parameters


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer over bytes: [batch, length] uint8 to [batch, length, 256] logits."""

    def __init__(self, layers: int, heads: int, width: int, context: int):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens.long()) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def build(config: TrainConfig) -> nn.Module:
    """The model of a workload, on the CPU; initial_parameters() gives it its numbers."""
    if config.workload == "digits":
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
    if config.workload == "regression":
        return nn.Linear(20, 1)
    if config.workload == "mnist":
        # GELU and average pooling: with ReLU and max pooling, rounding of 1e-7 grows to 6 % of the loss in 400 steps.
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(32, 64, 3), nn.GELU(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(1600, 128), nn.GELU(), nn.Linear(128, 10)),
        )
    return GPT(*LAYERS_HEADS_WIDTH[config.model_size], CONTEXT[config.model_size])


@torch.no_grad()
def initial_parameters(model: nn.Module, seed: int) -> None:
    """Matrices uniform in +-1/sqrt(fan_in), gains 1, biases 0: from integers, the same numbers at every precision."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            bound = 1 / math.sqrt(parameter[0].numel())
            values = uniform(parameter.numel(), 3, seed, zlib.crc32(name.encode()))
            parameter.copy_(((2 * values - 1) * bound).float().view(parameter.shape))  # fp32, also in an fp64 run


@dataclass(frozen=True)
class Objective:
    """loss and metric: (outputs, targets) to the sum over the rows of the batch."""

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    metric: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    metric_name: str


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a row: the mean over its positions, in nats."""
    positions = targets.shape[1:].numel()
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten().long(), reduction="sum") / positions


def _accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).sum() / targets.shape[1:].numel()


def _squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets, reduction="sum")


def _absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(outputs, targets, reduction="sum")


def objective(workload: str) -> Objective:
    if workload == "regression":
        return Objective(_squared_error, _absolute_error, "absolute_error")
    return Objective(_cross_entropy, _accuracy, "accuracy")

"""gpt: a decoder-only transformer over bytes, trained on any text, also on text that is larger than memory.

python train.py --workload gpt --model-size tiny [--data-dir DIR]
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ddp_core import Workload
from ddp_core.data import Bytes, split
from ddp_core.workload import initial_parameters

CONTEXT = {"tiny": 64, "small": 256, "medium": 512, "large": 1024, "xl": 1024}  # input bytes of one row
# 0.1, 11, 86, 304 and 1,478 M parameters. The last three have the layers of GPT-2 small, medium and XL, but 256 tokens.
LAYERS_HEADS_WIDTH = {"tiny": (2, 2, 64), "small": (6, 6, 384), "medium": (12, 12, 768)}
LAYERS_HEADS_WIDTH |= {"large": (24, 16, 1024), "xl": (48, 25, 1600)}


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
    """Maps [batch, length] bytes to [batch, length, 256] logits of the next byte."""

    def __init__(self, layers: int, heads: int, width: int, context: int):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens.long()) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Gpt(Workload):
    defaults = dict(epochs=1, global_batch_size=96, optimizer="adamw", lr=1e-3, momentum=0.9)

    def flags(self, add):
        add("--model-size", choices=[*CONTEXT], default="small", help="0.1 to 1478 million parameters (default: %(default)s)")
        add("--data-dir", default="", metavar="DIR", remembered=False, help="text files (default: Python's standard library)")

    def data(self, config):
        """The files joined, and cut into rows of CONTEXT + 1 bytes; every fifth row is held out."""
        library = Path(sysconfig.get_path("stdlib"))
        below = Path(config.data_dir).rglob("*") if config.data_dir else library.glob("*.py")
        files = sorted(path for path in below if path.is_file() and not path.name.startswith("."))
        files = [self.once_a_node(path) for path in files] if config.data_dir else files
        return split(Bytes(files, CONTEXT[config.model_size] + 1, f"--data-dir {config.data_dir or library}"))

    def model(self, config):
        return initial_parameters(GPT(*LAYERS_HEADS_WIDTH[config.model_size], CONTEXT[config.model_size]), config.seed)

    def forward(self, model, batch):
        return model(batch[:, :-1])

    def loss(self, outputs, batch):
        """The loss of a row is the mean over its positions, in nats."""
        return F.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten().long(), reduction="sum") / outputs.shape[1]

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[:, 1:]).sum() / outputs.shape[1]}

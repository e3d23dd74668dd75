"""mnist: a small CNN on the 70,000 digits of MNIST. It never downloads; its errors say how to fetch the files.

python train.py --workload mnist --data-dir DIR
"""

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ddp_core import Workload
from ddp_core.data import Rows
from ddp_core.errors import PreflightError, UsageError
from ddp_core.workload import initial_parameters

ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist"
MEAN, DEVIATION = 0.1307, 0.3081  # over all training pixels, scaled to 0..1; the values of PyTorch's own example


class Mnist(Workload):
    defaults = dict(epochs=3, global_batch_size=192, optimizer="sgd", lr=0.05, momentum=0.9)

    def flags(self, add):
        add("--data-dir", default="", metavar="DIR", remembered=False, help="the IDX files, gzipped or not, anywhere below it")
        add("--channels-last", action="store_true", remembered=False, help="convolutions in NHWC memory order")

    def data(self, config):
        """60,000 training images of 28x28, and MNIST's own 10,000 held-out ones. They are bytes until forward() scales them."""
        if not config.data_dir:
            raise UsageError("--workload mnist needs --data-dir: the folder of the IDX files. " + how_to_fetch("DIR"))
        digest, parts = hashlib.sha256(), []
        for name in ("train", "t10k"):
            images = idx(self.once_a_node, config.data_dir, f"{name}-images-idx3", 3, digest)
            labels = idx(self.once_a_node, config.data_dir, f"{name}-labels-idx1", 1, digest)
            if len(images) != len(labels) or images.shape[1:] != (28, 28):
                raise PreflightError(f"--data-dir {config.data_dir}: {name} is {tuple(images.shape)}, {len(labels)} labels")
            parts.append((images, labels))
        return tuple(Rows(*part, fingerprint=digest.hexdigest()[:12]) for part in parts)

    def model(self, config):
        # GELU and average pooling: with ReLU and max pooling, a rounding error of 1e-7 grows to 6 % of the loss in 400 steps.
        net = nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(32, 64, 3), nn.GELU(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(1600, 128), nn.GELU(), nn.Linear(128, 10)),
        )
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        return initial_parameters(net, config.seed).to(memory_format=layout)  # type: ignore[call-overload]

    def forward(self, model, batch):
        pixels = batch[0].unsqueeze(1).to(next(model.parameters()).dtype) / 255
        return model((pixels - MEAN) / DEVIATION)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1].long(), reduction="sum")

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).sum()}


def idx(once_a_node: Callable, folder: str, name: str, dimensions: int, digest) -> torch.Tensor:
    """An IDX file (magic number 0x0000080d, d big-endian sizes, the bytes) as a uint8 tensor. Raises PreflightError."""
    files = sorted(path for ending in ("", ".gz") for path in Path(folder).rglob(f"{name}-ubyte{ending}"))
    if not files:
        raise PreflightError(f"--data-dir {folder} has no {name}-ubyte[.gz]. {how_to_fetch(folder)}")
    try:
        raw = once_a_node(files[0]).read_bytes()
        raw = gzip.decompress(raw) if files[0].suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise PreflightError(f"{files[0]}: {error}: fetch it again") from error
    digest.update(raw)
    start = 4 + 4 * dimensions
    whole = raw[:4] == bytes((0, 0, 8, dimensions)) and len(raw) > start
    shape = struct.unpack(f">{dimensions}I", raw[4:start]) if whole else ()
    if not whole or math.prod(shape) != len(raw) - start:
        raise PreflightError(f"{files[0]} is not a whole IDX file of {dimensions} dimensions of bytes: fetch it again")
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(shape)


def how_to_fetch(folder: str) -> str:
    return (
        f"Fetch them once on a login node: mkdir -p {folder} && cd {folder} && for f in train-images-idx3 "
        f"train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do curl -fLO {ADDRESS}/$f-ubyte.gz; done"
    )

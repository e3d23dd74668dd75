"""Datasets as tensors, and the order of their rows.

Random numbers come from integer arithmetic (splitmix64), not from torch's generators, whose numbers change with the
instruction set: every machine draws the same. Rows lie in one tensor on the rank's device; a batch is one index into it.
"""

import gzip
import hashlib
import math
import struct
import sysconfig
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from ddp_core.config import TrainConfig
from ddp_core.errors import PreflightError, UsageError

HELD_OUT = 5  # every fifth row is held out, where a dataset brings no split of its own
CONTEXT = {"tiny": 64, "small": 256, "medium": 512}  # bytes of text in one row of gpt


@dataclass(frozen=True)
class Rows:
    """[n, ...] inputs and [n, ...] targets; rows[index] is a batch."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Rows":
        """On the device; real numbers in the precision of the run, bytes and labels as they are."""

        def move(values: torch.Tensor) -> torch.Tensor:
            return values.to(device, dtype) if values.is_floating_point() else values.to(device)

        return Rows(move(self.inputs), move(self.targets))


@dataclass(frozen=True)
class Data:
    train: Rows
    held_out: Rows
    fingerprint: str  # of the bytes that were read: the ranks compare it, and a snapshot remembers it


# ---- integers -----------------------------------------------------------------------------------------------------

GOLDEN, MIX1, MIX2 = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def splitmix64(state: torch.Tensor) -> torch.Tensor:
    """int64 states to int64 outputs, a bijection of the 64-bit words (Steele, Lea, Flood, OOPSLA 2014)."""
    z = state + GOLDEN  # int64 wraps modulo 2**64, as the algorithm wants
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # logical: torch's own shift keeps the sign


def words(count: int, *labels: int) -> torch.Tensor:
    """[count] distinct int64 words; other labels, another stream."""
    state = torch.zeros(1, dtype=torch.int64)
    for label in labels:
        state = splitmix64(state ^ label)
    return splitmix64(state + GOLDEN * torch.arange(count, dtype=torch.int64))


def uniform(count: int, *labels: int) -> torch.Tensor:
    """[count] fp64 values k / 2**24 in [0, 1): exact in fp32 too."""
    return _shift(words(count, *labels), 40).double() / 2**24


def sample_order(seed: int, epoch: int, count: int) -> torch.Tensor:
    """[count] int64: a permutation of the rows, a function of seed and epoch and never of the world size.

    The order in which distinct random words sort: exact on every machine, and 2 to 4 times faster here than Fisher-Yates.
    """
    return words(count, 1, seed, epoch).argsort()


def rows_of_rank(order: torch.Tensor, global_batch_size: int, rank: int, world_size: int) -> torch.Tensor:
    """[steps, rows a rank] int64: step s trains on order[s*G : (s+1)*G], this rank on every world_size-th of them.

    Rows that do not fill a global batch are left out of this epoch; the next epoch's order leaves out others.
    """
    steps = len(order) // global_batch_size
    return order[: steps * global_batch_size].view(steps, global_batch_size)[:, rank::world_size]


def steps_per_epoch(config: TrainConfig, data: Data) -> int:
    return min(len(data.train) // config.global_batch_size, config.steps_per_epoch or len(data.train))


# ---- datasets -----------------------------------------------------------------------------------------------------


def load(config: TrainConfig) -> Data:
    """The data of a workload. Never downloads. Raises PreflightError that names the missing file and how to get it."""
    data = {"digits": _digits, "regression": _regression, "mnist": _mnist, "gpt": _text}[config.workload](config)
    if config.global_batch_size > len(data.train):
        raise UsageError(
            f"--global-batch-size {config.global_batch_size} is more than the {len(data.train)} training rows of "
            f"{config.workload}: no step would fill it"
        )
    return data


def _split(inputs: torch.Tensor, targets: torch.Tensor, fingerprint: str) -> Data:
    held_out = torch.arange(len(targets)) % HELD_OUT == HELD_OUT - 1
    return Data(Rows(inputs[~held_out], targets[~held_out]), Rows(inputs[held_out], targets[held_out]), fingerprint)


def _digits(config: TrainConfig) -> Data:
    """1,797 handwritten digits of 8x8 pixels from 0 to 16, labels 0 to 9 (digits.md has the source)."""
    text = gzip.decompress(resources.files("ddp_core").joinpath("digits.csv.gz").read_bytes())
    table = torch.frombuffer(bytearray(map(int, text.replace(b"\n", b",").strip(b",").split(b","))), dtype=torch.uint8)
    table = table.view(-1, 65)
    return _split(table[:, :64].float() / 4, table[:, 64].long(), hashlib.sha256(text).hexdigest()[:12])


def _regression(config: TrainConfig) -> Data:
    """2,048 rows of 20 features in [0, 1), as in OLCF's example for Frontier; the targets can be learned, as there not."""
    count, features = 2048 + 2048 // (HELD_OUT - 1), 20
    inputs = uniform(count * features, 2, 0).view(count, features)
    teacher = uniform(features, 2, 1) - 0.5
    noise = uniform(count, 2, 2) - 0.5
    # Summed feature by feature: a matrix product's order of additions differs between machines.
    targets = sum(inputs[:, i] * teacher[i] for i in range(features)) + 0.1 * noise
    return _split(inputs, targets.view(count, 1), "regression-1")


def _mnist(config: TrainConfig) -> Data:
    """The IDX files of MNIST, gzipped or not, anywhere below --data-dir; its own 10,000 rows are held out."""
    digest = hashlib.sha256()
    parts = {}
    for split in ("train", "t10k"):
        images = _idx(config, f"{split}-images-idx3-ubyte", 3, digest)
        labels = _idx(config, f"{split}-labels-idx1-ubyte", 1, digest)
        if len(images) != len(labels) or images.shape[1:] != (28, 28):
            raise PreflightError(f"--data-dir {config.data_dir}: {split} is {tuple(images.shape)}, {len(labels)} labels")
        parts[split] = Rows((images.unsqueeze(1).float() / 255 - 0.1307) / 0.3081, labels.long())
    return Data(parts["train"], parts["t10k"], digest.hexdigest()[:12])


def _idx(config: TrainConfig, name: str, dimensions: int, digest) -> torch.Tensor:
    """An IDX file as a uint8 tensor: magic number 0x0000080d, d big-endian sizes, the bytes."""
    if not config.data_dir:
        raise UsageError("--workload mnist needs --data-dir: the folder of the IDX files. " + _how_to_fetch("DIR"))
    found = sorted(path for ending in ("", ".gz") for path in Path(config.data_dir).rglob(name + ending))
    if not found:
        raise PreflightError(f"--data-dir {config.data_dir} has no {name}[.gz]. {_how_to_fetch(config.data_dir)}")
    try:
        raw = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise PreflightError(f"{found[0]}: {error}: fetch it again") from error
    digest.update(raw)
    start = 4 + 4 * dimensions
    whole = raw[:4] == bytes((0, 0, 8, dimensions)) and len(raw) > start
    shape = struct.unpack(f">{dimensions}I", raw[4:start]) if whole else ()
    if not whole or math.prod(shape) != len(raw) - start:
        raise PreflightError(f"{found[0]} is not a whole IDX file of {dimensions} dimensions of bytes: fetch it again")
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(shape)


def _how_to_fetch(folder: str) -> str:
    address = "https://ossci-datasets.s3.amazonaws.com/mnist"
    return (
        f"Fetch them once on a login node: mkdir -p {folder} && cd {folder} && for f in train-images-idx3 "
        f"train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do curl -fLO {address}/$f-ubyte.gz; done"
    )


def _text(config: TrainConfig) -> Data:
    """The bytes of the text files below --data-dir, in rows of CONTEXT + 1; by default Python's standard library."""
    if config.data_dir:
        folder = Path(config.data_dir)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    else:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))
    try:
        raw = b"\n".join(path.read_bytes() for path in files)
    except OSError as error:
        raise PreflightError(f"--data-dir {config.data_dir}: {error}") from error
    width = CONTEXT[config.model_size] + 1
    count = len(raw) // width
    if count < HELD_OUT:
        raise PreflightError(
            f"--data-dir {folder} has {len(files)} files of {len(raw)} bytes: less than {HELD_OUT} rows of {width}"
        )
    table = torch.frombuffer(bytearray(raw[: count * width]), dtype=torch.uint8).view(count, width)
    return _split(table[:, :-1], table[:, 1:], hashlib.sha256(raw).hexdigest()[:12])

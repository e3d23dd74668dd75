"""The reference training once more, in NumPy. The golden trace is checked against it. It imports neither torch nor core.

    python -m conformance.harness.reference        prints its losses, and how much a perturbation is amplified

Read it as the definition of workload `digits`: its random numbers, its sample order, its model, its loss. It also defines, for
noisy.py, the random numbers drawn while rows are read and in a model.
"""

import gzip
import hashlib
import json
import math
import random
import zlib
from pathlib import Path

import numpy as np

DIGITS = Path(__file__).parents[2] / "core/src/ddp_core/workloads/digits.csv.gz"
AUGMENTATION, DROPOUT, EVALUATION = 4, 5, 6  # streams of random numbers: the first for rows, the others for micro-batches
LAYERS = {"0.weight": (256, 64), "0.bias": (256,), "2.weight": (10, 256), "2.bias": (10,)}  # Linear, tanh, Linear


def splitmix64(state: np.ndarray) -> np.ndarray:
    """uint64 to uint64, modulo 2**64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words(count: int, *labels: int) -> np.ndarray:
    """[count] uint64 of the stream that the labels name: one splitmix64 for each label, then one for each word."""
    state = np.zeros(1, np.uint64)
    for label in labels:
        state = splitmix64(state ^ np.uint64(label))
    return splitmix64(state + np.uint64(0x9E3779B97F4A7C15) * np.arange(count, dtype=np.uint64))


def uniform(count: int, *labels: int) -> np.ndarray:
    """[count] fp64: the upper 24 bits of each word, as k / 2**24 in [0, 1)."""
    return (words(count, *labels) >> np.uint64(40)) / 2.0**24


def sample_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """[count] row numbers, sorted by their words as signed integers."""
    return np.argsort(words(count, 1, seed, epoch).view(np.int64))


def keyed_order(seed: int, epoch: int, count: int, places: np.ndarray) -> np.ndarray:
    """The rows at these places of an order of more than 2**24 rows, which is never held in memory.

    A Feistel network of four rounds permutes words of 2 * half bits, the fewest that hold count. A result that is no row goes
    through it again.
    """
    half = np.uint64(max(1, math.ceil((count - 1).bit_length() / 2)))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = [words(1, 1, seed, epoch, number) & np.uint64(2**62 - 1) for number in range(4)]
    rows = np.array(places, np.uint64)
    again = np.ones(len(rows), bool)
    while again.any():
        left, right = rows[again] >> half, rows[again] & low
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) & low)
        rows[again] = left << half | right
        again = rows >= count
    return rows.astype(np.int64)


def batches(order: np.ndarray, global_batch_size: int, world_size: int) -> np.ndarray:
    """[world_size, steps, rows a rank]: of the global batch order[s*G : (s+1)*G], rank r has every world_size-th row."""
    steps = len(order) // global_batch_size
    whole = order[: steps * global_batch_size].reshape(steps, global_batch_size)
    return np.stack([whole[:, rank::world_size] for rank in range(world_size)])


def drawn(*labels: int) -> tuple[float, float]:
    """The first numbers of random.random() and torch.rand(()), once Python and torch are seeded with the labels' word."""
    seed = int(words(1, *labels)[0])
    TWISTER.seed(seed & 0xFFFFFFFF)  # torch's generator is the Mersenne twister, seeded with the lower 32 bits
    return random.Random(seed).random(), int(TWISTER.randint(2**32, dtype=np.uint32) & 0xFFFFFF) / 2.0**24


TWISTER = np.random.RandomState()


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images [1438, 64] from 0 to 4, and labels; the same held out [359, 64]: rows 4, 9, 14, ... of the file."""
    table = np.array([line.split(b",") for line in gzip.decompress(DIGITS.read_bytes()).split()], np.int64)
    held_out = np.arange(len(table)) % 5 == 4
    images, labels = table[:, :64] / 4, table[:, 64]
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def initial_parameters(seed: int) -> dict[str, np.ndarray]:
    """Matrices uniform in +-1/sqrt(fan_in), rounded to fp32; biases 0."""
    parameters = {}
    for name, shape in LAYERS.items():
        values = np.zeros(shape)
        if len(shape) == 2:
            spread = 2 * uniform(math.prod(shape), 3, seed, zlib.crc32(name.encode())) - 1
            values[:] = (spread / math.sqrt(shape[1])).astype(np.float32).reshape(shape)
        parameters[name] = values
    return parameters


def forward(parameters: dict, images: np.ndarray, labels: np.ndarray, factor=1.0) -> tuple[np.ndarray, ...]:
    """Hidden layer, log-probabilities, and cross-entropy of each row. factor: multiplies the logits."""
    hidden = np.tanh(images @ parameters["0.weight"].T + parameters["0.bias"])
    logits = factor * (hidden @ parameters["2.weight"].T + parameters["2.bias"])
    logits -= logits.max(1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return hidden, log_probabilities, -log_probabilities[np.arange(len(labels)), labels]


def gradients(parameters: dict, images: np.ndarray, labels: np.ndarray, factor=1.0) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss over these rows, and its gradients by parameter name."""
    hidden, log_probabilities, losses = forward(parameters, images, labels, factor)
    at_logits = np.exp(log_probabilities)
    at_logits[np.arange(len(labels)), labels] -= 1
    at_logits *= factor / len(labels)
    at_hidden = at_logits @ parameters["2.weight"] * (1 - hidden**2)
    names = {"0.weight": at_hidden.T @ images, "0.bias": at_hidden.sum(0)}
    return losses.mean(), names | {"2.weight": at_logits.T @ hidden, "2.bias": at_logits.sum(0)}


def train(
    seed=0,
    epochs=3,
    global_batch_size=96,
    lr=0.1,
    momentum=0.9,
    perturbation=0.0,
    noisy=False,
    jitter=0.0,
    shards=1,
    steps=None,
) -> dict[str, list[float]]:
    """The loss of every step before its update; the loss and accuracy on the held-out rows after every epoch.

    perturbation: every initial parameter is multiplied by 1 +- this, with signs from another stream. noisy: noisy.py's rows.
    jitter: noisy.py's flag; one number is drawn for each of a step's `shards` micro-batches, and of the held-out rows'.
    steps: of each epoch; default: all.
    """
    images, labels, held_out_images, held_out_labels = load()
    parameters = initial_parameters(seed)
    for number, (name, values) in enumerate(parameters.items()):
        signs = np.where(uniform(values.size, 9, number) < 0.5, -1, 1).reshape(values.shape)
        parameters[name] = values * (1 + perturbation * signs)
    velocity = {name: np.zeros_like(values) for name, values in parameters.items()}
    trace = dict(losses=[], eval_losses=[], eval_accuracies=[])
    for epoch in range(epochs):
        for rows in batches(sample_order(seed, epoch, len(labels)), global_batch_size, 1)[0][:steps]:
            read = np.stack([as_read(images[row], seed, epoch, row) for row in rows.tolist()]) if noisy else images[rows]
            step = len(trace["losses"])
            shares = [(read[shard::shards], labels[rows[shard::shards]]) for shard in range(shards)]
            scales = [factor(jitter, DROPOUT, seed, step, shard) for shard in range(shards)]
            parts = [gradients(parameters, *share, scale) for share, scale in zip(shares, scales, strict=True)]
            trace["losses"].append(float(sum(loss for loss, _ in parts)) / shards)
            for name in parameters:
                velocity[name] = momentum * velocity[name] + sum(gradient[name] for _, gradient in parts) / shards
                parameters[name] -= lr * velocity[name]
        scale = factors(jitter, seed, len(held_out_labels), shards, global_batch_size // shards) if jitter else 1.0
        _, log_probabilities, losses = forward(parameters, held_out_images, held_out_labels, scale)
        trace["eval_losses"].append(float(losses.mean()))
        right = log_probabilities.argmax(1) == held_out_labels
        trace["eval_accuracies"].append(float(right.mean()))
        if noisy:
            trace.setdefault("eval_accuracies_of_even", []).append(float(right[held_out_labels % 2 == 0].mean()))
    return trace


def not_the_history(history: list[list], limit: float, **told) -> list[str]:
    """What is wrong with a snapshot's history. Its rows hold the mean loss and the held-out loss of each epoch."""
    trace, found = train(**told), []
    means = np.reshape(trace["losses"], (told["epochs"], -1)).mean(1).tolist()
    for column, (name, should_be) in enumerate(dict(losses=means, held_out_losses=trace["eval_losses"]).items(), 1):
        worst = worst_deviation([float.fromhex(row[column]) for row in history], should_be)
        if not worst <= limit:
            found.append(
                f"worst deviation of {name} in the snapshot's history={worst:.1e}, but should be at most {limit:g}, {told}"
            )
    return found


def as_read(image: np.ndarray, seed: int, epoch: int, row: int) -> np.ndarray:
    """A row as noisy.py reads it: brighter or darker, independent of the worker and of the rows read before."""
    shift, scale = drawn(AUGMENTATION, seed, epoch, row)
    return image * scale + shift


def factor(jitter: float, *labels: int) -> float:
    """What multiplies noisy.py's logits in one micro-batch. Shard m of M has the rows m, m + M, ... of the global batch."""
    return 1 + jitter * drawn(*labels)[1]


def factors(jitter: float, seed: int, count: int, shards: int, size: int) -> np.ndarray:
    """[count, 1]: the factor of each held-out row. Rows are dealt to shards as in a step; a shard reads `size` at a time."""
    found = np.ones((count, 1))
    for shard in range(shards):
        for place, start in enumerate(range(shard, count, shards * size)):
            found[start : start + shards * size : shards] = factor(jitter, EVALUATION, seed, shard, place)
    return found


def worst_deviation(values: list[float], reference: list[float]) -> float:
    """The largest relative difference; infinite if the lengths differ or a value is not finite."""
    if len(values) != len(reference) or not reference or not np.isfinite(values).all():
        return math.inf
    return float(np.max(np.abs(np.subtract(values, reference)) / np.abs(reference)))


def amplification(perturbation: float = 1e-7) -> float:
    """How far the losses move when the initial parameters do, as a relative difference."""
    return worst_deviation(train(perturbation=perturbation)["losses"], train()["losses"])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else f"no {path.name}"


def take_apart(path: Path) -> dict:
    """Read a safetensors file by its format: a length, a JSON header, bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__")
    tensors = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    sums = {name: zlib.crc32(raw[start:][slice(*entry["data_offsets"])]) for name, entry in header.items()}
    return dict(keys=[*metadata], document=json.loads(metadata["ddp_core"]), tensors=tensors, crc32=sums)


if __name__ == "__main__":
    trace = train()
    print(f"losses {trace['losses'][0]:.6f} ... {trace['losses'][-1]:.6f}, held out {trace['eval_losses']}")
    print(f"perturbed by 1e-7, the losses move by {amplification():.1e}")

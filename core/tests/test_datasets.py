"""The data of the built-in workloads: training rows, held-out rows, and errors for missing or broken files.

python -m pytest core/tests/test_datasets.py
"""

import gzip
import hashlib
import shutil
from dataclasses import dataclass
from importlib import resources

import pytest
import torch
from ddp_core import data
from ddp_core.config import choose, parse
from ddp_core.errors import PreflightError, UsageError


@dataclass
class Loaded:
    """All training rows and all held-out rows, each as one batch."""

    train: tuple | torch.Tensor
    held_out: tuple | torch.Tensor
    fingerprint: str


def load(*argv: str, world_size: int = 1) -> Loaded:
    argv, workload = list(argv), choose(list(argv))
    config = parse(argv, world_size, workload=workload)
    train, held_out = data.of_workload(workload, config)
    batches = (rows[torch.arange(len(rows))] for rows in (train, held_out))
    return Loaded(*batches, data.fingerprint(train, held_out, workload, config)[0])


def test_a_batch_larger_than_the_data_is_an_error():
    with pytest.raises(UsageError, match="--global-batch-size 1439 is more than the 1438 training rows"):
        load("--global-batch-size", "1439")


# ---- digits -------------------------------------------------------------------------------------------------------


def test_digits_are_the_published_ones(digits):
    """1,797 rows. The count of each digit is that of Alpaydin and Kaynak's test set."""
    text = gzip.decompress(resources.files("ddp_core.workloads").joinpath("digits.csv.gz").read_bytes())
    assert hashlib.sha256(text).hexdigest() == "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
    pixels, labels = digits
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(pixels) == 1797 and pixels.max() == 16


def test_digits_are_read_as_they_are_and_every_fifth_is_held_out(digits):
    loaded, (pixels, labels) = load(), digits
    for rows, mine in ((loaded.held_out, [*range(4, 1797, 5)]), (loaded.train, [i for i in range(1797) if i % 5 != 4])):
        inputs, targets = rows
        assert targets.tolist() == labels[mine].tolist()
        assert torch.equal(inputs, pixels[mine].view(-1, 64) / 4)
    assert (len(loaded.train[0]), len(loaded.held_out[0])) == (1438, 359)


@pytest.mark.parametrize("workload", ["regression", "gpt"])
def test_a_fifth_of_the_rows_is_held_out_and_none_of_them_is_trained_on(workload, tmp_path):
    flags = text_folder(tmp_path) if workload == "gpt" else []
    loaded = load("--workload", workload, *flags, "--global-batch-size", "8")
    inputs = [rows[:, :-1] if workload == "gpt" else rows[0] for rows in (loaded.train, loaded.held_out)]
    trained, held_out = ({tuple(row) for row in rows.tolist()} for rows in inputs)
    assert len(trained) == 4 * len(held_out) and not trained & held_out
    assert [len(rows) for rows in inputs] == [len(trained), len(held_out)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_world_size_reads_the_same_rows(world_size):
    assert torch.equal(load(world_size=world_size).train[0], load().train[0])


# ---- regression ---------------------------------------------------------------------------------------------------


def test_regression_can_be_learned():
    """Unlike the published example, which draws targets and inputs independently: nothing can be learned from it."""
    inputs, targets = load("--workload", "regression").train
    assert inputs.shape == (2048, 20) and targets.shape == (2048, 1)
    inputs = torch.cat((inputs, torch.ones(2048, 1)), 1)
    rest = targets - inputs @ torch.linalg.lstsq(inputs, targets).solution
    assert rest.var() < 0.01 * targets.var()


# ---- mnist --------------------------------------------------------------------------------------------------------


def test_idx_files_are_read_gzipped_or_not(idx_folder, digits):
    loaded = load("--workload", "mnist", "--data-dir", str(idx_folder))
    (images, labels), (held_out, held_out_labels) = loaded.train, loaded.held_out
    assert images.shape == (960, 28, 28) and held_out.shape == (120, 28, 28)
    assert labels.tolist() == digits[1][:960].tolist()
    assert held_out_labels.tolist() == digits[1][960:1080].tolist()
    assert torch.equal(images[:, 3:27:3, 3:27:3], digits[0][:960] * 15)


def test_images_are_bytes_until_they_are_in_a_batch_and_then_as_pytorch_s_example_has_them(idx_folder, digits):
    """The model's input at pixel 3, 3 of the first digit: (grey / 255 - 0.1307) / 0.3081."""
    loaded, seen = load("--workload", "mnist", "--data-dir", str(idx_folder)), []
    images, labels = loaded.train

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, inputs):
            seen.append(inputs)

    choose(["--workload", "mnist"]).forward(Model(), (images[:5], labels[:5]))
    assert images.dtype == torch.uint8 and seen[0].shape == (5, 1, 28, 28)
    expected = (digits[0][:5, 0, 0].double() * 15 / 255 - 0.1307) / 0.3081
    assert torch.allclose(seen[0][:, 0, 3, 3], expected, rtol=1e-14, atol=0)


def test_idx_files_may_lie_deeper_in_the_folder(idx_folder, tmp_path):
    shutil.copytree(idx_folder, tmp_path / "MNIST" / "raw")
    deeper, there = (load("--workload", "mnist", "--data-dir", str(folder)) for folder in (tmp_path, idx_folder))
    assert deeper.fingerprint == there.fingerprint


def test_gzipped_or_not_they_have_the_same_fingerprint(idx_folder, tmp_path):
    """A user may unpack the images between two jobs of a run."""
    for path in idx_folder.iterdir():
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        (tmp_path / path.name.removesuffix(".gz")).write_bytes(raw)
    plain, there = (load("--workload", "mnist", "--data-dir", str(folder)) for folder in (tmp_path, idx_folder))
    assert plain.fingerprint == there.fingerprint


def test_images_of_the_same_names_and_sizes_have_another_fingerprint(idx_folder, tmp_path):
    """Fashion-MNIST's files have the same names and sizes."""
    shutil.copytree(idx_folder, tmp_path / "raw")
    [images] = [path for path in (tmp_path / "raw").iterdir() if path.name.startswith("train-images")]
    raw = gzip.decompress(images.read_bytes()) if images.suffix == ".gz" else images.read_bytes()
    raw = raw[:-1] + bytes([raw[-1] ^ 1])
    images.write_bytes(gzip.compress(raw) if images.suffix == ".gz" else raw)
    other, there = (load("--workload", "mnist", "--data-dir", str(folder)) for folder in (tmp_path, idx_folder))
    assert other.fingerprint != there.fingerprint


@pytest.mark.fault(17)
def test_mnist_without_a_folder_says_how_to_fetch_it():
    with pytest.raises(UsageError, match=r"--data-dir.*curl .*https://ossci-datasets"):
        load("--workload", "mnist")


def test_a_missing_idx_file_is_named_with_the_way_to_fetch_it(idx_folder, tmp_path):
    shutil.copytree(idx_folder, tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(PreflightError, match=r"mnist has no t10k-labels-idx1-ubyte.*curl .*https://ossci-datasets"):
        load("--workload", "mnist", "--data-dir", str(tmp_path / "mnist"))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"


DAMAGES = {
    **{f"the first {keep} bytes": (IMAGES, lambda raw, keep=keep: raw[:keep]) for keep in (0, 3, 4, 9, 15, 16, 1000)},
    "one byte short": (IMAGES, lambda raw: raw[:-1]),
    "one byte more": (IMAGES, lambda raw: raw + b"\0"),
    "floats": (IMAGES, lambda raw: b"\0\0\x0d\x03" + raw[4:]),
    "the magic number of labels": (IMAGES, lambda raw: b"\0\0\x08\x01" + raw[4:]),
    "a web page": (IMAGES, lambda raw: b"<!DOCTYPE html><html>403 Forbidden</html>"),  # what curl without -f saves
    "half a gzip file": (LABELS, lambda raw: raw[: len(raw) // 2]),
    "a gzip file without its last byte": (LABELS, lambda raw: raw[:-1]),
    "no gzip file": (LABELS, lambda raw: b"not gzip at all"),
    "a gzip file damaged at its head": (LABELS, lambda raw: raw[:10] + b"\xff" * 10 + raw[20:]),
    "a gzip file damaged within": (LABELS, lambda raw: raw[:100] + bytes(40) + raw[140:]),
    "a gzip file with another checksum": (LABELS, lambda raw: raw[:-8] + bytes(4) + raw[-4:]),
}


@pytest.mark.parametrize("name, damage", DAMAGES.values(), ids=DAMAGES)
def test_a_broken_idx_file_is_named(name, damage, idx_folder, tmp_path):
    folder = tmp_path / "mnist"
    shutil.copytree(idx_folder, folder)
    (folder / name).write_bytes(damage((idx_folder / name).read_bytes()))
    with pytest.raises(PreflightError, match=f"{name}.*fetch it again"):
        load("--workload", "mnist", "--data-dir", str(folder))


def test_images_and_labels_that_do_not_belong_together_are_named(idx_folder, tmp_path):
    folder = tmp_path / "mnist"
    shutil.copytree(idx_folder, folder)
    shutil.copy(folder / "t10k-labels-idx1-ubyte.gz", folder / LABELS)
    with pytest.raises(PreflightError, match=r"train.*\(960, 28, 28\).*120 labels"):
        load("--workload", "mnist", "--data-dir", str(folder))


# ---- gpt ----------------------------------------------------------------------------------------------------------


def text_folder(folder, count: int = 65 * 50) -> list[str]:
    """Write two files of different bytes and a hidden one. Returns the flags that read them."""
    (folder / "texts").mkdir()
    raw = bytes(i * 7 % 251 for i in range(count))
    (folder / "texts" / "a.txt").write_bytes(raw[:1000])
    (folder / "texts" / "b.txt").write_bytes(raw[1001:])  # a newline is put between two files
    (folder / "texts" / ".hidden").write_bytes(b"x" * 1000)
    return ["--data-dir", str(folder / "texts"), "--model-size", "tiny"]


def test_gpt_predicts_each_byte_from_those_before_it(tmp_path):
    loaded = load("--workload", "gpt", *text_folder(tmp_path), "--global-batch-size", "8")
    assert loaded.train.shape == (40, 65) and loaded.held_out.shape == (10, 65)
    assert loaded.train[0].tolist() == [i * 7 % 251 for i in range(65)]
    assert loaded.held_out[0, 0] == 4 * 65 * 7 % 251, "the fifth row is not the first that is held out"
    logits = torch.zeros(40, 64, 256)
    logits.scatter_(2, loaded.train[:, 1:].long().unsqueeze(2), 1.0)  # predicts the byte that follows
    assert choose(["--workload", "gpt"]).metrics(logits, loaded.train)["accuracy"] == 40


def test_gpt_reads_python_s_own_library_by_default():
    assert len(load("--workload", "gpt", "--model-size", "tiny").train) > 10_000


@pytest.mark.parametrize("content", [None, b"", b"too short"])
def test_too_little_text_is_an_error_that_names_the_folder(tmp_path, content):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(PreflightError, match=f"--data-dir {tmp_path}"):
        load("--workload", "gpt", "--data-dir", str(tmp_path))


def test_other_bytes_have_another_fingerprint(tmp_path):
    flags = ["--workload", "gpt", *text_folder(tmp_path), "--global-batch-size", "8"]
    before = load(*flags).fingerprint
    (tmp_path / "texts" / "b.txt").write_bytes(bytes(65 * 50))
    assert load(*flags).fingerprint != before

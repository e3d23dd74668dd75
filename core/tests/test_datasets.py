"""The datasets: what is read, what is held out, and files that are missing or broken.

python -m pytest core/tests/test_datasets.py
"""

import gzip
import hashlib
import shutil
from importlib import resources

import pytest
import torch
from ddp_core import data
from ddp_core.config import parse
from ddp_core.errors import PreflightError, UsageError


def load(*argv: str, world_size: int = 1) -> data.Data:
    return data.load(parse(list(argv), world_size))


def test_a_batch_larger_than_the_data_is_an_error():
    with pytest.raises(UsageError, match="--global-batch-size 1439 is more than the 1438 training rows"):
        load("--global-batch-size", "1439")


# ---- digits -------------------------------------------------------------------------------------------------------


def test_digits_are_the_published_ones(digits):
    """1,797 rows; the number of each digit is that of Alpaydin and Kaynak's test set."""
    text = gzip.decompress(resources.files("ddp_core").joinpath("digits.csv.gz").read_bytes())
    assert hashlib.sha256(text).hexdigest() == "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
    pixels, labels = digits
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(pixels) == 1797 and pixels.max() == 16


def test_digits_are_read_as_they_are_and_every_fifth_is_held_out(digits):
    loaded, (pixels, labels) = load(), digits
    for rows, mine in ((loaded.held_out, [*range(4, 1797, 5)]), (loaded.train, [i for i in range(1797) if i % 5 != 4])):
        assert rows.targets.tolist() == labels[mine].tolist()
        assert torch.equal(rows.inputs, pixels[mine].view(-1, 64) / 4)
    assert (len(loaded.train), len(loaded.held_out)) == (1438, 359)


@pytest.mark.parametrize("workload", ["regression", "gpt"])
def test_a_fifth_of_the_rows_is_held_out_and_none_of_them_is_trained_on(workload, tmp_path):
    flags = text_folder(tmp_path) if workload == "gpt" else []
    loaded = load("--workload", workload, *flags, "--global-batch-size", "8")
    trained, held_out = ({tuple(row) for row in rows.inputs.tolist()} for rows in (loaded.train, loaded.held_out))
    assert len(trained) == 4 * len(held_out) and not trained & held_out
    assert (len(loaded.train), len(loaded.held_out)) == (len(trained), len(held_out))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_world_size_reads_the_same_rows(world_size):
    assert torch.equal(load(world_size=world_size).train.inputs, load().train.inputs)


# ---- regression ---------------------------------------------------------------------------------------------------


def test_regression_can_be_learned():
    """The published example draws targets and inputs independently: there is nothing to learn in it."""
    rows = load("--workload", "regression").train
    assert rows.inputs.shape == (2048, 20) and rows.targets.shape == (2048, 1)
    inputs = torch.cat((rows.inputs, torch.ones(2048, 1)), 1)
    rest = rows.targets - inputs @ torch.linalg.lstsq(inputs, rows.targets).solution
    assert rest.var() < 0.01 * rows.targets.var()


# ---- mnist --------------------------------------------------------------------------------------------------------


def test_idx_files_are_read_gzipped_or_not(idx_folder, digits):
    loaded = load("--workload", "mnist", "--data-dir", str(idx_folder))
    assert loaded.train.inputs.shape == (960, 1, 28, 28) and loaded.held_out.inputs.shape == (120, 1, 28, 28)
    assert loaded.train.targets.tolist() == digits[1][:960].tolist()
    assert loaded.held_out.targets.tolist() == digits[1][960:1080].tolist()
    grey = ((loaded.train.inputs[:, 0] * 0.3081 + 0.1307) * 255).round()
    assert torch.equal(grey[:, 3:27:3, 3:27:3], digits[0][:960] * 15.0)


def test_idx_files_may_lie_deeper_in_the_folder(idx_folder, tmp_path):
    shutil.copytree(idx_folder, tmp_path / "MNIST" / "raw")
    deeper, there = (load("--workload", "mnist", "--data-dir", str(folder)) for folder in (tmp_path, idx_folder))
    assert deeper.fingerprint == there.fingerprint


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
    """Two files of different bytes and a hidden one; the flags that read them."""
    (folder / "texts").mkdir()
    raw = bytes(i * 7 % 251 for i in range(count))
    (folder / "texts" / "a.txt").write_bytes(raw[:1000])
    (folder / "texts" / "b.txt").write_bytes(raw[1001:])  # a newline comes between two files
    (folder / "texts" / ".hidden").write_bytes(b"x" * 1000)
    return ["--data-dir", str(folder / "texts"), "--model-size", "tiny"]


def test_gpt_predicts_each_byte_from_those_before_it(tmp_path):
    loaded = load("--workload", "gpt", *text_folder(tmp_path), "--global-batch-size", "8")
    assert loaded.train.inputs.shape == (40, 64) and loaded.held_out.inputs.shape == (10, 64)
    assert torch.equal(loaded.train.inputs[:, 1:], loaded.train.targets[:, :-1])
    assert loaded.train.inputs[0].tolist() == [i * 7 % 251 for i in range(64)]
    assert loaded.held_out.inputs[0, 0] == 4 * 65 * 7 % 251, "the fifth row is not the first that is held out"


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

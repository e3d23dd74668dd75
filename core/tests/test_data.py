"""Rows in tensors, arrays and mapped files: equal rows from each, a fingerprint of their content, and errors.

python -m pytest core/tests/test_data.py
"""

import datetime
import os
import re
from dataclasses import dataclass

import numpy
import pytest
import torch
from ddp_core import data
from ddp_core.batches import Batches
from ddp_core.config import parse
from ddp_core.data import Bytes, Every, Rows, mapped, split
from ddp_core.errors import PreflightError, UsageError, WorkloadError
from ddp_core.workload import find
from ranks import train
from safetensors.torch import save_file
from small import Small, table
from torch.utils.data import TensorDataset

INPUTS, TARGETS = table()
SOME = torch.tensor([5, 0, 127, 5])


def of(train_rows, held_out=None, batch: int = 16):
    """The core's form of data()'s result: training rows, held-out rows, and their fingerprint."""
    workload = find(Small)
    workload.data = lambda config: (train_rows, held_out)
    config = parse(["--global-batch-size", str(batch)], 1, workload=find(Small))
    rows = data.of_workload(workload, config)
    return *rows, data.fingerprint(*rows, workload, config)[0]


# ---- forms --------------------------------------------------------------------------------------------------------


def forms(folder) -> dict:
    """The same table in every form that is read by whole batches, each with the type of its batches."""
    numpy.save(folder / "inputs.npy", INPUTS.numpy())
    numpy.save(folder / "targets.npy", TARGETS.numpy())
    save_file({"inputs": INPUTS, "other": torch.ones(3), "targets": TARGETS}, folder / "both.safetensors")
    (folder / "inputs.raw").write_bytes(INPUTS.numpy().tobytes())
    raw = mapped(folder / "inputs.raw", torch.float64).view(128, 6)
    opened = [numpy.load(folder / f"{name}.npy", mmap_mode="r") for name in ("inputs", "targets")]
    return {
        "a tuple of tensors": ((INPUTS, TARGETS), tuple),
        "a tuple of arrays": ((INPUTS.numpy(), TARGETS.numpy()), tuple),
        "Rows": (Rows(INPUTS, TARGETS), tuple),
        "a TensorDataset": (TensorDataset(INPUTS, TARGETS), tuple),
        "a dictionary": ({"a": INPUTS, "b": TARGETS}, dict),
        "one tensor": (INPUTS, torch.Tensor),
        "NumPy's memory maps": (tuple(opened), tuple),
        "mapped npy": ((mapped(folder / "inputs.npy"), mapped(folder / "targets.npy")), tuple),
        "mapped safetensors": (tuple(mapped(folder / "both.safetensors", name=name) for name in ("inputs", "targets")), tuple),
        "mapped raw": (raw, torch.Tensor),
    }


FORMS = ["a tuple of tensors", "a tuple of arrays", "Rows", "a TensorDataset", "a dictionary", "one tensor"]
FORMS += ["NumPy's memory maps", "mapped npy", "mapped safetensors", "mapped raw"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(tmp_path, form):
    given, kind = forms(tmp_path)[form]
    rows, none, fingerprint = of(given)
    batch = rows[SOME]
    assert type(batch) is kind and len(rows) == 128 and none is None
    columns = batch.values() if kind is dict else batch if kind is tuple else [batch]
    for ours, theirs in zip(columns, (INPUTS, TARGETS), strict=kind is not torch.Tensor):
        assert torch.equal(ours, theirs[SOME])
    assert kind is not dict or [*batch] == ["a", "b"]
    assert fingerprint == of(INPUTS if kind is torch.Tensor else (INPUTS, TARGETS))[2], "the same content by another name"


@pytest.mark.parametrize("form", ["a TensorDataset", "NumPy's memory maps", "mapped npy", "mapped safetensors"])
def test_training_on_any_form_is_the_same_training(finished, tmp_path, form):
    source = f"""
from small import *
from pathlib import Path
from test_data import forms

class Mine(Small):
    def data(self, config):
        return forms(Path({str(tmp_path)!r}))[{form!r}][0], table(37, first=128)
"""
    (tmp_path / "mine.py").write_text(source)
    job = train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'}", code=0)
    assert job.losses == finished("", 1, "small:Small").losses


@pytest.mark.parametrize("given", [(table()[0], table(100)[1]), {"a": table()[0], "b": table(100)[1]}])
def test_columns_of_unequal_length_are_named(given):
    with pytest.raises(WorkloadError, match=r"ValueError: columns of unequal length \([0a]: 128, [1b]: 100\)"):
        of(given)


@pytest.mark.parametrize("held_out", [torch.zeros(9), torch.zeros(9, 6, dtype=torch.long), torch.zeros(9, 6, 2)])
def test_inputs_and_targets_are_no_training_and_held_out_rows(held_out):
    with pytest.raises(UsageError, match="held-out rows have another form"):
        of(torch.zeros(128, 6), held_out)


@pytest.mark.parametrize(
    "train, held_out",
    [
        ((torch.zeros(128, 6), torch.zeros(128, 3)), (torch.zeros(9, 6), torch.zeros(9, dtype=torch.long))),  # shares, classes
        ((torch.zeros(128, 6).byte(), torch.zeros(128)), (torch.zeros(9, 7), torch.zeros(9))),  # raw images and prepared images
        (torch.zeros(128, 6), (torch.zeros(9, 6), torch.zeros(9))),  # training rows without targets
        (torch.zeros(128, 6), torch.zeros(9, 8)),
        (torch.zeros(128, 6), None),
    ],
)
def test_held_out_rows_may_have_a_form_of_their_own(train, held_out):
    of(train, held_out)


def test_lists_of_inputs_and_targets_are_no_training_and_held_out_rows():
    rows = [torch.zeros(length) for length in range(1, 129)]
    of(rows, rows[:9])
    for targets in ([0] * 128, [torch.zeros(())] * 128, [torch.zeros(2, 2)] * 128):
        with pytest.raises(UsageError, match="held-out rows have another form"):
            of(rows, targets)


# ---- mapped files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "i1", "?", "<u2", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_npy_files_of_every_kind_are_mapped(tmp_path, dtype, shape):
    array = (numpy.arange(numpy.prod(shape)) % 3).reshape(shape).astype(dtype)
    numpy.save(tmp_path / "a.npy", array)
    found = mapped(tmp_path / "a.npy")
    assert found.dtype == torch.from_numpy(array).dtype and torch.equal(found, torch.from_numpy(array))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_files_of_every_version_are_mapped(tmp_path, version):
    """From version 2.0 on, the header's length has four bytes."""
    with open(tmp_path / "a.npy", "wb") as file:
        numpy.lib.format.write_array(file, INPUTS.numpy(), version)
    assert torch.equal(mapped(tmp_path / "a.npy"), INPUTS)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
)
def test_safetensors_of_every_kind_are_mapped(tmp_path, dtype):
    tensors = {
        "a": torch.arange(7).to(dtype),
        "wanted": torch.arange(24).view(2, 3, 4).to(dtype),
        "z": torch.ones(3, dtype=dtype),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    found = mapped(tmp_path / "a.safetensors", name="wanted")
    assert found.dtype == dtype and torch.equal(found, tensors["wanted"])


def test_raw_numbers_are_mapped_and_a_rest_that_is_no_number_is_left_out(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(numpy.arange(1000, dtype=numpy.uint16).tobytes() + b"x")
    found = mapped(tmp_path / "tokens.bin", torch.uint16)
    assert found.shape == (1000,) and found.to(torch.int32).tolist() == list(range(1000))
    assert mapped(tmp_path / "tokens.bin").shape == (2001,)


def test_a_file_larger_than_memory_is_mapped_and_what_is_written_there_stays_here(tmp_path):
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with open(tmp_path / "huge.bin", "wb") as file:
        file.truncate(size)
    found = mapped(tmp_path / "huge.bin")
    found[-1] = 7
    assert len(found) == size and found[-1] == 7
    with open(tmp_path / "huge.bin", "rb") as file:
        file.seek(size - 1)
        assert file.read() == b"\0"
    (tmp_path / "empty.bin").touch()
    assert len(mapped(tmp_path / "empty.bin")) == 0


def test_a_mapped_file_stays_on_the_disk(tmp_path):
    """A file of 300 MB, of which some rows are read. Resident memory grows by less than a tenth of it."""
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(300 * 2**20)

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    rows = Rows(mapped(tmp_path / "large.bin", torch.float32).view(-1, 256))
    assert len(rows) == 307_200 and rows[torch.arange(0, 307_200, 3072)][0].shape == (100, 256)
    assert resident() - before < 30 * 2**20


@pytest.mark.parametrize(
    "name, raw, said",
    [
        ("not-there.npy", None, "FileNotFoundError"),
        ("short.npy", b"\x93NUMPY", "IndexError"),
        ("text.npy", b"hello, this is no array at all, but a text", "cannot be mapped"),
        ("short.safetensors", b"\x10\0\0\0\0\0\0\0{}", "cannot be mapped"),
        ("not-there.bin", None, "FileNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_mapped_is_named(tmp_path, name, raw, said):
    if raw is not None:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(PreflightError, match=f"{re.escape(str(tmp_path / name))} .*{said}"):
        mapped(tmp_path / name, name="a")


@pytest.mark.parametrize(
    "array",
    [numpy.asfortranarray(numpy.ones((3, 4))), numpy.ones(3, dtype=">f4"), numpy.array(["a", "b"])],
    ids=["fortran", "big", "text"],
)
def test_an_array_in_an_order_that_is_not_read_is_named(tmp_path, array):
    numpy.save(tmp_path / "a.npy", array)
    with pytest.raises(PreflightError, match=r"a\.npy cannot be mapped"):
        mapped(tmp_path / "a.npy")


def test_a_tensor_that_a_file_does_not_have_is_named(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(PreflightError, match=r"a\.safetensors cannot be mapped \(KeyError: 'b'\)"):
        mapped(tmp_path / "a.safetensors", name="b")


# ---- text of several files ----------------------------------------------------------------------------------------

TEXTS = {
    "one": [b"abcdefghijklmnopqrstuvwxyz" * 3],
    "two": [b"0123456789" * 3, b"abcdefghij" * 4],
    "empty ones among them": [b"", b"abc" * 5, b"", b"", b"defg" * 4, b""],
    "many of one byte": [bytes([65 + number % 26]) for number in range(40)],
    "a row over four files": [b"a" * 6, b"b", b"", b"c", b"d" * 30],
}


@pytest.mark.parametrize("parts", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("width", [1, 4, 7])
def test_bytes_of_several_files_are_those_of_all_read_at_once(tmp_path, parts, width):
    files = []
    for number, part in enumerate(parts):
        files.append(tmp_path / f"{number:02d}")
        files[-1].write_bytes(part)
    whole = b"\n".join(parts)
    rows = Bytes(files, width, "here")
    assert len(rows) == len(whole) // width
    expected = torch.tensor([list(whole[row * width : (row + 1) * width]) for row in range(len(rows))], dtype=torch.uint8)
    assert torch.equal(rows[torch.arange(len(rows))], expected)
    backwards = torch.arange(len(rows)).flip(0)
    assert torch.equal(rows[backwards], expected[backwards])
    for part, kept in zip(split(rows), (lambda row: row % 5 != 4, lambda row: row % 5 == 4), strict=True):
        mine = [row for row in range(len(rows)) if kept(row)]
        assert isinstance(part, Every) and len(part) == len(mine)
        assert torch.equal(part[torch.arange(len(part))], expected[mine])


def test_of_a_text_larger_than_memory_the_row_alone_is_read(tmp_path):
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with open(tmp_path / "huge.txt", "wb") as file:
        file.write(b"abcdefgh")
        file.truncate(size)
    rows = Bytes([tmp_path / "huge.txt"], 4, "here")
    assert rows[torch.tensor([1, size // 4 - 1])].tolist() == [[*b"efgh"], [0] * 4]


def test_a_text_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(PreflightError, match=rf"{re.escape(str(tmp_path / 'folder'))} cannot be mapped \(IsADirectoryError: "):
        Bytes([tmp_path / "folder"], 4, "here")


def test_the_fingerprint_of_texts_tells_where_one_ends(tmp_path):
    def fingerprint(*parts: bytes) -> str:
        files = [tmp_path / f"{len(parts)}-{number}" for number in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            file.write_bytes(part)
        return Bytes(files, 1, "here").fingerprint

    assert fingerprint(b"abcdef", b"g") != fingerprint(b"abcde", b"fg") != fingerprint(b"abcdefg")
    assert fingerprint(b"abc\ndef") == fingerprint(b"abc", b"def"), "these are the same rows"


# ---- held out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 9, 10, 11, 128])
def test_every_fifth_row_is_held_out(count):
    column = torch.arange(count)
    kept, held_out = split(Rows(column, bare=True))
    assert held_out.columns[0].tolist() == list(range(4, count, 5))
    assert sorted(kept.columns[0].tolist() + held_out.columns[0].tolist()) == list(range(count))


# ---- fingerprints -------------------------------------------------------------------------------------------------


def changed(tensor: torch.Tensor, row: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row] += 1
    return tensor


@pytest.mark.parametrize("row", [0, 1, 64, 127])
def test_one_other_number_is_another_fingerprint(row):
    given = of((INPUTS, TARGETS))[2]
    assert of((INPUTS, changed(TARGETS, row)))[2] != given != of((changed(INPUTS, row), TARGETS))[2]


def test_held_out_rows_count_too_and_equal_names_are_said_once():
    assert of(INPUTS, TARGETS)[2] != of(INPUTS, changed(TARGETS, 0))[2]
    assert of(Rows(INPUTS, fingerprint="v1"), Rows(INPUTS, fingerprint="v1"))[2] == "v1"
    assert of(Rows(INPUTS, fingerprint="v1"), Rows(TARGETS, fingerprint="v2"))[2] == "v1+v2"


def test_of_large_data_the_size_and_a_part_of_the_bytes_are_compared(monkeypatch):
    monkeypatch.setattr(data, "HASHED_WHOLE", 2**20)
    large = torch.zeros(3 * 2**20, dtype=torch.uint8)
    given = data.digest([large])
    for row, same in ((0, False), (3 * 2**19, True), (3 * 2**20 - 1, False)):
        assert (data.digest([changed(large, row)]) == given) is same, row
    assert data.digest([large[:-1]]) != given


class Listed:
    """Rows that are read one by one, of any values."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, row):
        return self.values[row]


@dataclass(frozen=True, slots=True)
class Slotted:
    values: torch.Tensor


class Graph:
    """An object that refers to itself, and to an object whose repr is only an address."""

    def __init__(self, nodes):
        self.nodes, self.graph, self.lock = nodes, self, object()


@pytest.mark.parametrize(
    "first, other",
    [
        (1, 2),
        ("a", "b"),
        (None, 0),
        ((1, [2, 3]), (1, [2, 4])),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}),
        ({"a": 1}, {"b": 1}),
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2, 3).t(), torch.arange(6.0).view(3, 2)),
        (numpy.ones(2), numpy.zeros(2)),
        (b"x", b"y"),
        ({"b", "a"}, {"b", "c"}),
        (Slotted(torch.ones(2)), Slotted(torch.zeros(2))),
        (Graph(torch.ones(2)), Graph(torch.zeros(2))),
        ([Graph({"a": 1})], [Graph({"a": 2})]),
        (datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)),
    ],
)
def test_rows_of_any_kind_have_a_fingerprint(first, other):
    one, again, two = (of(Listed([value] * 20))[2] for value in (first, first, other))
    assert one == again != two
    assert of(Listed([first] * 21))[2] != one, "another length"


def test_arrays_of_objects_are_what_these_are():
    rows = lambda last: Listed([numpy.array([f"row {row}", [row, last]], dtype=object) for row in range(20)])  # noqa: E731
    assert of(rows(1.5))[2] == of(rows(1.5))[2] != of(rows(2.5))[2]


def test_a_dictionary_s_order_does_not_matter():
    assert of(Listed([{"a": 1, "b": 2}] * 16))[2] == of(Listed([{"b": 2, "a": 1}] * 16))[2]


def test_a_fingerprint_of_their_own_wins():
    rows = Listed([1] * 16)
    rows.fingerprint = "release 7"
    assert of(rows)[2] == "release 7"


def test_augmented_rows_have_one_fingerprint_however_often_it_is_taken():
    """The core seeds the generators for each row here too; otherwise the fingerprint would differ between ranks."""
    from small import OneByOne

    assert of(OneByOne(*table(), noise=1.0))[2] == of(OneByOne(*table(), noise=1.0))[2]


def test_a_row_that_cannot_be_read_for_the_fingerprint_is_blamed_on_the_data():
    class Broken(Listed):
        def __getitem__(self, row):
            raise OSError("tape 7")

    with pytest.raises(
        WorkloadError, match=r"the data of --workload small, test_data.py, line \d+ \(__getitem__\): OSError: tape 7"
    ):
        of(Broken([0] * 16))


class Own:
    """A custom class of rows that is indexed by a whole batch, as `batched` says."""

    batched, fingerprint = True, "own"

    def __len__(self):
        return 32

    def __getitem__(self, index: torch.Tensor):
        return index.double() / 4, 2 * index


def test_rows_that_say_so_are_indexed_by_a_whole_batch():
    rows, _, fingerprint = of(Own())
    config = parse(["--device", "cpu"], 1, workload=find(Small))
    batches = Batches(rows, find(Small), config, torch.device("cpu"), torch.float32)
    ((inputs, targets),) = batches.stream(iter([(0, SOME)]))
    assert fingerprint == "own" and torch.equal(targets, 2 * SOME)
    assert inputs.dtype == torch.float32 and torch.equal(inputs, SOME.float() / 4)

"""The snapshot file: equal bytes for equal runs; a file is read whole or refused.

python -m pytest core/tests/test_snapshot.py
"""

import hashlib
import io
import os
import re
import stat
import struct
from pathlib import Path

import pytest
import ranks
import torch
from ddp_core import files, show, snapshot
from ddp_core.errors import ExitCode, SnapshotError, StorageError
from faults import files_limited_to
from safetensors import safe_open
from safetensors.torch import save_file

TENSORS = {
    "model.weight": torch.arange(300, dtype=torch.float32).view(20, 15),
    "model.bias": torch.ones(3, dtype=torch.float64),
    "optim.momentum.weight": torch.full((20, 15), -0.5),
}
DOCUMENT = {"step": 41, "epochs_run": 2, "epoch_loss_sum": "0x1.8p+1", "versions": {"ddp_core": "0.1.0"}}


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "snapshot.safetensors"
    snapshot.write(path, TENSORS, DOCUMENT)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_written_is_read(file):
    tensors, document = snapshot.read(file)
    assert tensors.keys() == TENSORS.keys()
    for name, values in tensors.items():
        assert values.dtype == TENSORS[name].dtype and torch.equal(values, TENSORS[name]), name
    assert {name: document[name] for name in DOCUMENT} == DOCUMENT


@pytest.mark.parametrize("dtype", snapshot.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3)])
def test_every_kind_of_number_is_written_and_read(tmp_path, dtype, shape):
    """Also scalars, as an optimizer's step is, empty tensors, and types of different sizes together."""
    values = (torch.arange(7) % 2)[: max(1, torch.Size(shape).numel())].expand(max(shape, default=1), -1).reshape(-1)
    values = values[: torch.Size(shape).numel()].view(shape).to(dtype)
    snapshot.write(tmp_path / "file", {"model.a": values, "model.b": torch.ones(3, dtype=torch.uint8)}, DOCUMENT)
    found = snapshot.read(tmp_path / "file")[0]["model.a"]
    assert found.dtype == dtype and found.shape == shape and torch.equal(found, values)


def test_the_same_state_is_the_same_bytes(file):
    first = sha256(file)
    for _ in range(5):
        snapshot.write(file, dict(reversed(TENSORS.items())), dict(reversed(DOCUMENT.items())))
        assert sha256(file) == first


@pytest.mark.parametrize("most", [float("inf"), 8])
def test_a_save_leaves_no_file_open(tmp_path, most):
    """A run of weeks saves thousands of times with 1,024 file descriptors."""
    numbers = dict.fromkeys("abc", torch.ones(4))

    def save() -> int:
        snapshot.write(tmp_path / "snapshot.safetensors", numbers, dict(step=1), most=most)
        return len(os.listdir("/proc/self/fd"))

    assert save() == save() == save()


def test_values_in_another_memory_order_are_the_same_bytes(file, tmp_path):
    turned = {name: values.t().contiguous().t() if values.ndim == 2 else values for name, values in TENSORS.items()}
    snapshot.write(tmp_path / "other.safetensors", turned, DOCUMENT)
    assert sha256(tmp_path / "other.safetensors") == sha256(file)


def test_other_values_are_other_bytes(file, tmp_path):
    snapshot.write(tmp_path / "other.safetensors", TENSORS | {"model.bias": torch.zeros(3).double()}, DOCUMENT)
    assert sha256(tmp_path / "other.safetensors") != sha256(file)


@pytest.mark.fault(46)
def test_a_copy_under_another_name_is_as_good(file, tmp_path):
    copied = file.rename(tmp_path / "keep-this")
    os.utime(copied, (0, 0))
    assert snapshot.read(copied)[1]["step"] == 41


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_mode_of_the_file_is_the_umask_s(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        snapshot.write(tmp_path / "file", TENSORS, DOCUMENT)
        assert os.umask(mask) == mask, "writing a snapshot changed the umask"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_the_file_is_on_the_disk_before_it_has_its_name_and_the_name_before_write_returns(tmp_path, monkeypatch):
    """Without the first fsync, a machine crash leaves a file of zeros; without the second, no file."""
    done = []

    def noting(name: str):
        call = getattr(os, name)

        def noted(target, *args):
            done.append("fsync folder" if name == "fsync" and stat.S_ISDIR(os.fstat(target).st_mode) else name)
            return call(target, *args)

        monkeypatch.setattr(os, name, noted)

    noting("fsync")
    noting("replace")
    snapshot.write(tmp_path / "file", TENSORS, DOCUMENT)
    assert done == ["fsync", "replace", "fsync folder"]


# ---- broken files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [0, 0.1, 30, 90, 99.9])
@pytest.mark.fault(34)
def test_a_truncated_file_is_refused_by_name(file, percent):
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * percent / 100)])
    with pytest.raises(SnapshotError, match=re.escape(str(file))):
        snapshot.read(file)


def flipped(raw: bytes, bit: int) -> bytes:
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


@pytest.mark.fault(35)
def test_a_flipped_bit_in_a_tensor_is_found(file):
    raw = file.read_bytes()
    for bit in range(8 * (len(raw) - sum(values.nbytes for values in TENSORS.values())), 8 * len(raw), 77):
        file.write_bytes(flipped(raw, bit))
        with pytest.raises(SnapshotError, match=r"model\.|optim\."):
            snapshot.read(file)


@pytest.mark.parametrize("reads", [snapshot.read, show.verify])
def test_a_tensor_that_was_taken_out_is_missed(file, reads):
    with safe_open(file, "pt") as whole:
        metadata = whole.metadata()
    save_file({name: tensor for name, tensor in TENSORS.items() if name != "model.bias"}, file, metadata)
    with pytest.raises(SnapshotError, match=r"is damaged: the checksum of model\.bias differs"):
        reads(file)


def test_a_flipped_bit_in_the_header_changes_nothing_in_silence(file):
    """A step count of 40 for 41 would repeat a step. A wrong digit in a loss sum would be reported."""
    raw, (tensors, document) = file.read_bytes(), snapshot.read(file)
    unnoticed = []
    for bit in range(8 * 8, 8 * (8 + struct.unpack("<Q", raw[:8])[0]), 5):
        file.write_bytes(flipped(raw, bit))
        try:
            read, said = snapshot.read(file)
        except SnapshotError:
            continue
        if said != document or any(not torch.equal(read[name], tensors[name]) for name in tensors):
            unnoticed.append(flipped(raw, bit)[bit // 8 - 12 : bit // 8 + 6])
    assert not unnoticed, f"{len(unnoticed)} flipped bits are loaded in silence, such as {unnoticed[:5]}"


def test_a_newer_format_names_its_writer(file, monkeypatch):
    monkeypatch.setattr(snapshot, "FORMAT", snapshot.FORMAT + 1)
    snapshot.write(file, TENSORS, DOCUMENT | {"versions": {"ddp_core": "9.9"}})
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match=r"format 3.*9\.9.*format 2"):
        snapshot.read(file)


# ---- no space -----------------------------------------------------------------------------------------------------


def _write_without_space(path: Path) -> int:
    files_limited_to(1000)()
    try:
        snapshot.write(path, TENSORS, DOCUMENT | {"step": 42})
    except StorageError as error:
        print(error)
        return error.code
    return 0


def test_without_space_the_old_file_stays_and_no_other(file):
    before = sha256(file)
    job = ranks.fork(file.parent, ranks.call("test_snapshot", "_write_without_space", file))
    assert job.codes == [ExitCode.STORAGE] == [8]
    assert str(file) in job.out[0] and "free" in job.out[0]
    assert sha256(file) == before
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "file"))):
        snapshot.write(tmp_path / "file" / "snapshot.safetensors", TENSORS, DOCUMENT)


def test_a_tensor_is_read_whole_though_the_system_gives_it_in_parts(folder, monkeypatch):
    """Linux reads at most 0x7ffff000 bytes at once: https://man7.org/linux/man-pages/man2/read.2.html#NOTES"""

    class InParts(io.FileIO):
        def readinto(self, view):
            return super().readinto(memoryview(view)[:256])

    def in_parts(path, mode, buffering=-1):
        return InParts(path) if buffering == 0 else io.BufferedReader(InParts(path))

    snapshot.write(folder / "parts.safetensors", TENSORS, DOCUMENT)
    monkeypatch.setattr(files, "open", in_parts, raising=False)
    stored, _ = files.header_of(folder / "parts.safetensors")
    for name, tensor in TENSORS.items():
        assert torch.equal(snapshot.load(stored[name]), tensor)

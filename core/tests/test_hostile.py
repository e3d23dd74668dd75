"""A snapshot is data: reading it runs no code, and bad content ends in one error that names the file.

python -m pytest core/tests/test_hostile.py
"""

import json
import os
import pickle
import re
import struct
from pathlib import Path

import ddp_core
import pytest
import torch
from ddp_core import files, show, snapshot
from ddp_core.errors import ExitCode, SnapshotError, StorageError


def safetensors_bytes(header: dict | bytes, body: bytes = b"") -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + body


class RunsCode:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return os.mkdir, ("code-has-run",)


def shape(*sizes: int) -> dict:
    return {"dtype": "F32", "shape": sizes, "data_offsets": [0, 4]}


HOSTILE = {
    "garbage": os.urandom(5000),
    "nothing but zeros": bytes(4096),
    "a pickle": pickle.dumps(RunsCode()),
    "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 2**26) + b"{}",
    "a header that is no JSON": safetensors_bytes(b"{" * 50),
    "a header nested deeply": safetensors_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a shape of 2**60": safetensors_bytes({"model.weight": shape(2**60)}, bytes(4)),
    "sizes whose product wraps to 1": safetensors_bytes({"model.weight": shape(2**32, 2**32, 1)}, bytes(4)),
    "offsets outside the file": safetensors_bytes({"a": shape(1) | {"data_offsets": [2**40, 2**40 + 4]}}, bytes(4)),
    "no numbers, and a shape of 2**64": safetensors_bytes(
        {
            "__metadata__": {"ddp_core": '{"format": 2, "crc32": {}, "document_crc32": 0}'},
            "a": {"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]},
        }
    ),
    "no document": safetensors_bytes({"model.weight": shape(1)}, bytes(4)),
    **{
        f"a document that is {name}": safetensors_bytes({"__metadata__": {"ddp_core": text}})
        for name, text in {
            "no JSON": "{",
            "a list": "[]",
            "a number": "7",
            "null": "null",
            "empty": "{}",
            "nested deeply": "[" * 100_000,
            "without checksums": '{"format": 1}',
            "with checksums that are a list": '{"format": 1, "crc32": []}',
            "of a format that is a text": '{"format": "1", "crc32": {}}',
            "of a format that is true": '{"format": true, "crc32": {}}',
            "of format 0": '{"format": 0, "crc32": {}}',
            "of a newer format without its writer": '{"format": 99}',
            "of a newer format with a strange writer": '{"format": 99, "versions": [1]}',
            "that a terminal would obey": '{"format": 99, "versions": {"ddp_core": "\\u001b[2J\\n9.9"}}',
        }.items()
    },
}


@pytest.mark.fault(36)
@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path, monkeypatch, raw, lazily):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(SnapshotError) as caught:
        snapshot.read(tmp_path / "file", lazily)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700
    assert str(tmp_path / "file") in str(caught.value) and caught.value.code == ExitCode.SNAPSHOT == 5
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.fault(36)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "file"
    dict(pipe=os.mkfifo, device=lambda path: path.symlink_to("/dev/zero"), folder=os.mkdir)[kind](path)
    for read in (snapshot.read, show.verify):
        with pytest.raises(SnapshotError, match="Is a directory" if kind == "folder" else "it is no file"):
            read(path)


@pytest.mark.fault(36)
def test_a_header_of_93_mb_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """Parsing such a header took 2.6 GB."""
    monkeypatch.setattr(files.json, "loads", lambda *_: pytest.fail("it was read"))
    with open(tmp_path / "file", "wb") as file:
        file.write(struct.pack("<Q", 93 * 2**20))
        file.truncate(94 * 2**20)
    for read in (snapshot.read, show.show):
        with pytest.raises(SnapshotError, match="its header should have 97517568 bytes"):
            read(tmp_path / "file")


def test_a_header_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    for module in (snapshot, files):
        monkeypatch.setattr(module, "MOST_HEADER", 2000)
    snapshot.write(tmp_path / "file", {}, {"history": "x" * 500})
    snapshot.read(tmp_path / "file")
    with pytest.raises(StorageError, match="in a new --run-dir"):
        snapshot.write(tmp_path / "file", {}, {"history": "x" * 2000})
    assert len(snapshot.read(tmp_path / "file")[1]["history"]) == 500


def test_a_message_says_no_more_of_a_file_than_a_line(tmp_path):
    """The file chooses its tensors' names."""
    names = {f"\x1b[2J{number}" * 9: torch.ones(2) for number in range(400)}
    snapshot.write(tmp_path / "file", names, {"step": 1})
    raw = bytearray((tmp_path / "file").read_bytes())
    raw[-3000:] = bytes(3000)
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(SnapshotError, match="the checksum of") as caught:
        snapshot.read(tmp_path / "file")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.fault(36)
@pytest.mark.parametrize("act", ["show", "verify"])
def test_show_and_verify_refuse_it_in_a_line_too(tmp_path, capsys, act):
    for number, raw in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}").write_bytes(raw)
    assert show.main([act, *(str(tmp_path / f"{number}") for number in range(len(HOSTILE)))]) == 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(HOSTILE) and all(line.isprintable() and len(line) < 700 for line in lines), lines


@pytest.mark.fault(36)
def test_what_show_prints_no_terminal_obeys(tmp_path, capsys):
    words = dict.fromkeys(("step", "epochs_run", "steps_per_epoch", "data", "world_size"), "\x1b[2J" * 9)
    document = words | dict(versions={"\x1b[2J": "\x1b[2J"}, problem={"\x1b[2J": "\x1b[2J"}, best=None, history=[])
    snapshot.write(tmp_path / "file", {"\x1b[2J": torch.ones(1)}, document)
    assert show.main(["show", str(tmp_path / "file")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    for wrong in (dict(best=[1]), dict(history=[[]]), dict(history=[[1, 2]]), dict(problem=7), dict(best=[1, "0x1p99999"])):
        snapshot.write(tmp_path / "file", {}, document | wrong)
        assert show.main(["show", str(tmp_path / "file")]) == 5
        assert capsys.readouterr().err.count("\n") == 1


def test_what_torch_save_wrote_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": RunsCode()}, tmp_path / "file")
    with pytest.raises(SnapshotError):
        snapshot.read(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_package_knows_no_pickle_but_in_the_one_place_that_converts():
    """Only convert calls torch.load: once, with weights_only=True (test_convert.py)."""
    forbidden = re.compile(r"import \w*pickle|torch\.load|torch\.save\(|marshal|shelve|\beval\(|\bexec\(")
    found = []
    for source in Path(ddp_core.__file__).parent.rglob("*.py"):
        code = "\n".join(line.partition("#")[0] for line in source.read_text().splitlines())
        found += [(source.name, word) for word in forbidden.findall(code.replace(".eval(", ""))]
    assert found == [("convert.py", "torch.load")]

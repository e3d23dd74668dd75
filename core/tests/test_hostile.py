"""A snapshot is data: whatever is in the file, reading it runs no code and ends in one error that names it.

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
from ddp_core import snapshot
from ddp_core.errors import ExitCode, SnapshotError


def safetensors_bytes(header: dict | bytes, body: bytes = b"") -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + body


class RunsCode:
    """Unpickling it makes a file."""

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
        }.items()
    },
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path, monkeypatch, raw):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(SnapshotError) as caught:
        snapshot.read(tmp_path / "file")
    assert str(tmp_path / "file") in str(caught.value) and caught.value.code == ExitCode.SNAPSHOT == 5
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_torch_save_wrote_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": RunsCode()}, tmp_path / "file")
    with pytest.raises(SnapshotError):
        snapshot.read(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_package_knows_no_pickle_but_in_the_one_place_that_converts():
    """There torch.load is called once, with weights_only=True (test_convert.py)."""
    forbidden = re.compile(r"import \w*pickle|torch\.load|torch\.save\(|marshal|shelve|\beval\(|\bexec\(")
    found = []
    for source in Path(ddp_core.__file__).parent.rglob("*.py"):
        code = "\n".join(line.partition("#")[0] for line in source.read_text().splitlines())
        found += [(source.name, word) for word in forbidden.findall(code.replace(".eval(", ""))]
    assert found == [("convert.py", "torch.load")]

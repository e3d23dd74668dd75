"""The snapshot commands show, verify and diff; any other file gets one line.

python -m pytest core/tests/test_show.py
"""

import math
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddp_core import show, snapshot
from ddp_core.errors import SnapshotError
from test_snapshot import DOCUMENT, TENSORS, flipped

FACTS = {"problem": {"workload": "digits", "lr": 0.1}, "data": "abc", "steps_per_epoch": 14, "world_size": 2}
FACTS |= {"best": [1, (0.25).hex()], "history": [[0, (0.5).hex(), (0.5).hex()], [1, (0.375).hex(), (0.25).hex(), (0.9).hex()]]}
STORED = sorted((Path(__file__).parent / "snapshots").glob("*.safetensors"))


def written(path: Path, tensors: dict | None = None, **document) -> Path:
    snapshot.write(path, TENSORS | (tensors or {}), DOCUMENT | FACTS | document)
    return path


def said(capsys, *argv, code: int = 0) -> str:
    assert show.main([*map(str, argv)]) == code
    out, err = capsys.readouterr()
    return out if code < 2 else err


# ---- show and verify ------------------------------------------------------------------------------------------------


def test_show_tells_the_header_the_history_and_the_tensors(tmp_path, capsys):
    text = said(capsys, "show", written(tmp_path / "file"))
    assert "format 2" in text and "ddp_core 0.1.0" in text and "2 ranks" in text
    assert "step 41, 2 epochs of 14 steps" in text and "lr=0.1 workload=digits" in text and "data: abc" in text
    assert "held-out loss: 0.25 after epoch 1" in text
    assert re.search(r"\n +epoch=0 +loss=0.5  eval_loss=0.5\n +epoch=1 +loss=0.375  eval_loss=0.25  metric=0.9\n", text)
    named = said(capsys, "show", written(tmp_path / "named", measured=["loss", "eval_loss", "eval_accuracy"]))
    assert "loss=0.375  eval_loss=0.25  eval_accuracy=0.9\n" in named and "loss=0.5  eval_loss=0.5\n" in named
    assert re.search(r"model.bias +F64 +\[3\]", text) and "3 tensors, 0.002 MB" in text


def test_verify_says_of_each_file_whether_it_is_whole(tmp_path, capsys):
    good, bad = written(tmp_path / "good"), written(tmp_path / "bad")
    bad.write_bytes(flipped(bad.read_bytes(), 8 * bad.stat().st_size - 5))
    assert show.main(["verify", str(bad), str(good)]) == 5
    out, err = capsys.readouterr()
    assert out.startswith(f"{good}: whole, 3 tensors, ") and out.count("\n") == 1
    assert err.startswith(f"error: {bad} is damaged: the checksum of optim.momentum.weight differs") and err.count("\n") == 1


@pytest.mark.parametrize("act", ["show", "verify", "diff"])
def test_who_reads_no_further_ends_it_without_a_word(tmp_path, act):
    """A reader such as `| head` closes the pipe. The command ends by SIGPIPE, without an exception."""
    files = [written(tmp_path / "file"), *[written(tmp_path / "other", step=42)] * (act == "diff")]
    command = f'"{sys.executable}" -m ddp_core.snapshot {act} {" ".join(map(str, files))} | true; exit ${{PIPESTATUS[0]}}'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
@pytest.mark.parametrize("act", ["show", "verify"])
def test_snapshots_of_every_format_are_shown_and_whole(capsys, path, act):
    assert str(path) in said(capsys, act, path)


def test_every_flipped_bit_is_found_that_a_resume_finds(tmp_path, capsys):
    path = written(tmp_path / "file")
    raw = path.read_bytes()
    for bit in range(0, 8 * len(raw), 97):
        path.write_bytes(flipped(raw, bit))
        try:
            snapshot.read(path)
            continue
        except SnapshotError:
            assert str(path) in said(capsys, "verify", path, code=5)


# ---- files that are not snapshots -----------------------------------------------------------------------------------

HEAD = struct.pack("<Q", 2)
BAD = {
    "empty": b"",
    "short": b"1234567",
    "text": b"This is a text, and no snapshot of anything.",
    "long": struct.pack("<Q", 2**62),
}
BAD |= {"no document": HEAD + b"{}", "no object": HEAD + b"[]", "no JSON": HEAD + b"{{", "no text": HEAD + b"\xff\xfe"}
BAD |= {"a list": struct.pack("<Q", 36) + b'{"__metadata__": {"ddp_core": "[]"}}'}


@pytest.mark.parametrize("act", ["show", "verify", "diff"])
@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_one_line_says_what_is_no_snapshot(tmp_path, capsys, act, content):
    (tmp_path / "file").write_bytes(content)
    files = [tmp_path / "file", *([tmp_path / "file"] if act == "diff" else [])]
    line = said(capsys, act, *files, code=5)
    assert line.startswith(f"error: {tmp_path / 'file'} is not a whole snapshot (") and line.count("\n") == 1


@pytest.mark.parametrize("act", ["show", "verify"])
@pytest.mark.parametrize("percent", [30, 90, 99.9])
def test_half_a_snapshot_is_none(tmp_path, capsys, act, percent):
    path = written(tmp_path / "file")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * percent / 100)])
    assert "is not a whole snapshot" in said(capsys, act, path, code=5)


def test_a_file_that_is_not_there_or_no_file_is_named(tmp_path, capsys):
    assert said(capsys, "show", tmp_path / "none", code=5) == f"error: {tmp_path / 'none'}: No such file or directory\n"
    assert said(capsys, "verify", tmp_path, code=5) == f"error: {tmp_path}: Is a directory\n"


@pytest.mark.parametrize(
    "argv", [[], ["show"], ["look", "file"], ["diff", "file"], ["diff", "a", "b", "c"], ["show", "--all", "f"]]
)
def test_a_mistake_in_the_command_is_a_usage_error(capsys, argv):
    line = said(capsys, *argv, code=2)
    assert line.startswith("error: ") and line.count("\n") == 1


# ---- diff -----------------------------------------------------------------------------------------------------------


def test_equal_files_hold_the_same(tmp_path, capsys):
    assert said(capsys, "diff", written(tmp_path / "a"), written(tmp_path / "b")).endswith("they hold the same\n")


def test_diff_names_each_tensor_that_differs_and_by_how_much(tmp_path, capsys):
    other = TENSORS["model.weight"].clone()
    other[3, 4] += 0.5
    other[0, 0] -= 0.25
    changed = {"model.weight": other, "model.bias": torch.ones(4).double(), "model.new": torch.ones(1)}
    history = [*FACTS["history"][:1], [1, (0.4).hex()]]
    second = written(tmp_path / "b", changed, step=42, problem={"workload": "digits", "lr": 0.2}, history=history)
    lines = said(capsys, "diff", written(tmp_path / "a"), second, code=1).splitlines()[2:]
    assert lines == [
        "history: 2 and 2 epochs, of which the first 1 are the same",
        "problem.lr: 0.1 and 0.2",
        "step: 41 and 42",
        "model.bias: F64 [3] and F64 [4]",
        "model.new: missing and F32 [1]",
        "model.weight: 2 of 300 numbers differ, by at most 0.5 (the largest is 299)",
    ]


@pytest.mark.parametrize("dtype", snapshot.DTYPES)
def test_it_compares_every_kind_of_number(tmp_path, capsys, dtype):
    one, other = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1, 1, 1]).to(dtype)
    files = [written(tmp_path / name, {"model.x": values}) for name, values in (("a", one), ("b", other))]
    assert "model.x: 1 of 3 numbers differ, by at most 1 (the largest is 1)" in said(capsys, "diff", *files, code=1)


def test_what_is_no_number_differs_without_end_and_a_sign_of_zero_by_nothing(tmp_path, capsys):
    for value, distance in ((math.nan, "inf"), (-0.0, "0")):
        one, other = torch.zeros(2), torch.tensor([0.0, value])
        files = [written(tmp_path / name, {"model.x": values}) for name, values in (("a", one), ("b", other))]
        assert f"model.x: 1 of 2 numbers differ, by at most {distance} (" in said(capsys, "diff", *files, code=1)


def test_large_tensors_are_compared_part_by_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(show, "PART", 7)
    other = TENSORS["model.weight"] + torch.eye(20, 15)
    files = [written(tmp_path / "a"), written(tmp_path / "b", {"model.weight": other})]
    assert "model.weight: 15 of 300 numbers differ, by at most 1 (" in said(capsys, "diff", *files, code=1)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["show", "verify"])
def test_show_and_verify_import_neither_torch_nor_safetensors(tmp_path, act):
    """A login node's Python may have neither, so importing them fails here."""
    for name in ("torch", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('there is none')")
    environ = os.environ | dict(PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(show.__file__).parents[1])]))
    command = [sys.executable, "-W", "error", "-m", "ddp_core.snapshot", act, str(written(tmp_path / "file"))]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "") and "step 41" in ended.stdout


def test_help_names_all_four_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        show.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(word in text for word in ("show", "verify", "diff", "convert --help", "5 a file is no whole snapshot"))

"""run.jsonl: what its records hold, that a resumed run appends to it, and that half a line at its end does no harm.

python -m pytest core/tests/test_record.py
"""

import json
import math
import time
from pathlib import Path

import pytest
import ranks
from ddp_core.errors import StorageError
from ddp_core.record import Record
from faults import after_save, at_step, files_limited_to

KEYS = {  # at least
    "start": {"step", "config", "data", "versions", "world_size", "reduction", "ranks", "seconds"},
    "step": {"epoch", "step", "loss", "loss_hex", "grad_norm"},
    "epoch": {"epoch", "step", "loss", "eval_loss", "eval_accuracy", "seconds"},
    "snapshot": {"step", "epochs_run", "seconds"},
    "end": {"exit_code", "step", "rows_a_second", "seconds"},
}
RANK_KEYS = {"rank", "local_rank", "node_rank", "host", "device", "device_index", "backend", "cores", "threads"}


def opened(path: Path) -> Record:
    record = Record(time.monotonic())
    record.open(path)
    return record


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


# ---- the file -----------------------------------------------------------------------------------------------------


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    record = opened(tmp_path / "run.jsonl")  # held open: closing it would write the line too
    record.write("step", step=1, loss=0.5)
    assert (tmp_path / "run.jsonl").read_text() == '{"kind":"step","step":1,"loss":0.5}\n'


def test_a_second_record_appends(tmp_path):
    for kind in ("start", "step", "end"):
        opened(tmp_path / "run.jsonl").write(kind)
    assert kinds(tmp_path / "run.jsonl") == ["start", "step", "end"]


@pytest.mark.parametrize("torn", ["{", '{"kind":"st', '{"kind":"step","step":2}'])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"start"}\n{"kind":"step"}\n' + torn)
    opened(path).write("end")
    assert kinds(path) == ["start", "step", "end"]


@pytest.mark.parametrize("size", [10, 70_000, 200_000])
def test_a_torn_line_may_be_long(tmp_path, size):
    """The start record of a thousand ranks has 200 kB."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"start"}\n{"kind":"step","' + "x" * size)
    opened(path).write("end")
    assert kinds(path) == ["start", "end"]


@pytest.mark.parametrize("text", ["", "{"])
def test_a_file_without_a_whole_line_becomes_empty(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    opened(path)
    assert path.read_text() == ""


def test_a_file_of_whole_lines_stays_as_it_is(tmp_path):
    path = tmp_path / "run.jsonl"
    text = '{"kind":"step"}\n' * 20_000
    path.write_text(text)
    opened(path)
    assert path.read_text() == text


def test_a_record_that_is_not_open_writes_and_says_nothing(capsys):
    record = Record(time.monotonic())
    record.write("step", step=1)
    record.say(epoch=1)
    assert capsys.readouterr().out == ""


def test_progress_lines_are_key_value(tmp_path, capsys):
    opened(tmp_path / "run.jsonl").say(epoch="1/2", loss=0.123456789, left_out=None)
    assert capsys.readouterr().out == "epoch=1/2 loss=0.123457\n"


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "run.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"run\.jsonl"):
        opened(tmp_path / "run.jsonl")


# ---- the records of a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KEYS)
def test_each_kind_of_record_has_its_keys(finished, kind):
    records = finished("--epochs 2 --precision fp64", 2).records(kind)
    assert records and all(record.keys() > KEYS[kind] for record in records)


def test_the_order_of_the_records_is_that_of_the_run(finished):
    job = finished("--epochs 2 --precision fp64", 2)
    epoch = ["step"] * 14 + ["epoch", "snapshot"]
    assert kinds(job.run_dir / "run.jsonl") == ["start", *epoch, *epoch, "end"]


def test_the_start_record_says_where_each_rank_is(finished):
    (start,) = finished("--epochs 2 --precision fp64", 2).records("start")
    assert [row["rank"] for row in start["ranks"]] == [row["local_rank"] for row in start["ranks"]] == [0, 1]
    assert all(row.keys() >= RANK_KEYS for row in start["ranks"])
    assert {(row["device"], row["backend"]) for row in start["ranks"]} == {("cpu", "gloo")}
    assert start["world_size"] == 2 and start["config"]["epochs"] == 2
    assert start["versions"].keys() == {"ddp_core", "torch"}


def test_a_loss_stands_there_exactly(finished):
    for record in finished("--epochs 2 --precision fp64", 2).records("step"):
        assert float.fromhex(record["loss_hex"]) == record["loss"] and math.isfinite(record["grad_norm"])


def test_losses_are_logged_every_so_many_steps(finished):
    job = finished("--epochs 2 --log-every 5", 1)
    assert [record["step"] for record in job.records("step")] == [4, 9, 14, 19, 24]


def test_a_log_that_cannot_be_written_ends_the_run_on_all_ranks_alike(tmp_path):
    """run.jsonl of one step an entry has about 5 kB after 20 steps."""
    full = {0: at_step(20, files_limited_to(4000))}
    job = ranks.train(tmp_path / "run", "--epochs 3 --save-every 9", 2, faults=full, code=8)
    assert "run.jsonl" in job.error and "free space" in job.error


def test_an_end_that_cannot_be_written_ends_the_run_on_all_ranks_alike(tmp_path):
    """A log longer than any snapshot, so that the limit stops the log alone, after the last snapshot."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.jsonl").write_text('{"kind":"step"}\n' * 60_000)
    job = ranks.train(tmp_path / "run", "--epochs 1", 2, faults={0: after_save(files_limited_to(500_000))}, code=8)
    assert "run.jsonl" in job.error and job.snapshot.exists()

"""run.jsonl: its records, and a torn last line; progress lines, notes, and the table at the end.

python -m pytest core/tests/test_record.py
"""

import json
import math
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from ddp_core import snapshot
from ddp_core.attributes import changes, of_optimizer
from ddp_core.config import parse
from ddp_core.errors import StorageError
from ddp_core.order import sample_order, seed_everything
from ddp_core.probe import notes_on_buffers
from ddp_core.record import Record
from ddp_core.summary import Stopwatch, summarize
from ddp_core.workload import find
from faults import after_save, at_step, files_limited_to, signalled
from small import OneByOne, SeveralLosses, Small, table

KEYS = {  # the keys that each record has at least
    "start": {"step", "config", "data", "versions", "world_size", "reduction", "ranks", "seconds", "restart", "notes"}
    | {"workload_file", "training_rows", "held_out_rows"},
    "step": {"epoch", "step", "loss", "loss_hex", "grad_norm"},
    "epoch": {"epoch", "step", "loss", "eval_loss", "eval_accuracy", "seconds"},
    "snapshot": {"step", "epochs_run", "seconds", "writing", "copy"},
    "end": {"exit_code", "step", "rows_a_second", "median", "p10", "slowest_rank", "seconds"},
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
    record = opened(tmp_path / "run.jsonl")  # kept open: closing it would also write the line
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
    epoch, found = ["step"] * 14 + ["epoch"], kinds(job.run_dir / "run.jsonl")
    assert [kind for kind in found if kind != "snapshot"] == ["start", *epoch, *epoch, "end"]
    first, second = (place for place, kind in enumerate(found) if kind == "snapshot")  # each when it was durable
    assert found.index("epoch") < first < second < found.index("end")


def test_the_start_record_says_where_each_rank_is(finished):
    (start,) = finished("--epochs 2 --precision fp64", 2).records("start")
    assert [row["rank"] for row in start["ranks"]] == [row["local_rank"] for row in start["ranks"]] == [0, 1]
    assert all(row.keys() >= RANK_KEYS for row in start["ranks"])
    assert {(row["device"], row["backend"]) for row in start["ranks"]} == {("cpu", "gloo")}
    assert start["world_size"] == 2 and start["config"]["epochs"] == 2
    assert start["versions"].keys() == {"ddp_core", "torch"}


def many(tmp_path: Path, count: int) -> list[dict]:
    """The rows of `count` ranks, 8 per node, after a recorded start."""
    rows = [dict(rank=n, node_rank=n // 8, host=f"node{n // 8}", device="cpu") for n in range(count)]
    record = opened(tmp_path / "run.jsonl")
    record.start(0, 0, dict(device="cpu"), rows, [])
    assert record.failure is None
    return rows


def test_beyond_64_ranks_the_start_has_a_row_a_node_and_a_file_those_of_all_ranks(tmp_path, capsys):
    beside = tmp_path / "ranks.jsonl"
    rows = many(tmp_path, 68)
    assert [json.loads(line) for line in beside.read_text().splitlines()] == rows
    assert f"ranks=68 (all of them in {beside})" in capsys.readouterr().out
    assert many(tmp_path, 64) and not beside.exists(), "it would be taken for this start's"
    large, small = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert large["ranks"] == [rows[8 * node] | dict(ranks_on_node=min(8, 68 - 8 * node)) for node in range(9)]
    assert small["ranks"] == rows[:64]


def test_a_file_of_ranks_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "ranks.jsonl").mkdir()
    record = opened(tmp_path / "run.jsonl")
    rows = [dict(rank=n, node_rank=n, host=f"node{n}", device="cpu") for n in range(65)]
    record.start(0, 0, dict(device="cpu"), rows, [])
    assert "ranks.jsonl" in str(record.failure)


def test_a_loss_stands_there_exactly(finished):
    for record in finished("--epochs 2 --precision fp64", 2).records("step"):
        assert float.fromhex(record["loss_hex"]) == record["loss"] and math.isfinite(record["grad_norm"])


def test_losses_are_logged_every_so_many_steps(finished):
    job = finished("--epochs 2 --log-every 5", 1)
    assert [record["step"] for record in job.records("step")] == [4, 9, 14, 19, 24]


def test_a_log_that_cannot_be_written_ends_the_run_on_all_ranks_alike(tmp_path):
    """With a record per step, run.jsonl has about 5 kB after 20 steps."""
    full = {0: at_step(20, files_limited_to(4000))}
    job = ranks.train(tmp_path / "run", "--epochs 3 --save-every 9", 2, faults=full, code=8)
    assert "run.jsonl" in job.error and "free space" in job.error


def test_an_end_that_cannot_be_written_ends_the_run_on_all_ranks_alike(tmp_path):
    """The log is longer than any snapshot, so the limit stops only the log, after the last snapshot."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.jsonl").write_text('{"kind":"step"}\n' * 60_000)
    job = ranks.train(tmp_path / "run", "--epochs 1", 2, faults={0: after_save(files_limited_to(500_000))}, code=8)
    assert "run.jsonl" in job.error and job.snapshot.exists()


# ---- several losses, metrics, notes -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_of_several_losses_is_recorded_and_their_sum_is_the_loss(finished, world_size):
    job = finished("", world_size, "small:SeveralLosses")
    for record in job.records("step"):
        assert record["losses"].keys() == {"square", "size"}
        assert sum(record["losses"].values()) == pytest.approx(record["loss"], rel=1e-12)
    for record in job.records("epoch"):
        assert record["eval_loss_square"] + record["eval_loss_size"] == pytest.approx(record["eval_loss"], rel=1e-12)
    alone = finished("", 1, "small:SeveralLosses").records("step")
    for ours, theirs in zip(job.records("step"), alone, strict=True):
        assert ours["losses"]["square"] == pytest.approx(theirs["losses"]["square"], rel=1e-10)


def test_the_parts_have_the_names_that_the_workload_gave_them(finished):
    """The first step's parts, computed by hand from the model as built and the rows of the first global batch."""
    seed_everything(0)
    model, rows = find(SeveralLosses).model(parse([], 1)).double(), sample_order(0, 0, 128)[:16]
    inputs, targets = (column[rows] for column in table())
    outputs = model(inputs)
    record = finished("", 2, "small:SeveralLosses").records("step")[0]
    assert record["losses"]["square"] == pytest.approx((outputs - targets).square().mean().item(), rel=1e-12)
    assert record["losses"]["size"] == pytest.approx(0.1 * outputs.square().mean().item(), rel=1e-12)


def test_one_loss_has_no_parts(finished):
    assert all("losses" not in record for record in finished("", 2, "small:Small").records("step"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_metric_with_a_count_of_its_own_is_a_mean_over_that(finished, world_size):
    """small.SeveralLosses: the error over rows above 0 only, computed again from the snapshot."""
    job = finished("", world_size, "small:SeveralLosses")
    model = find(SeveralLosses).model(parse([], 1)).double()
    tensors, _ = snapshot.read(job.snapshot)
    model.load_state_dict({name.removeprefix("model."): v for name, v in tensors.items() if name.startswith("model.")})
    inputs, targets = table(37, first=128)
    error = (model(inputs) - targets).abs()
    (*_, last) = job.records("epoch")
    assert last["eval_error_above_0"] == pytest.approx(error[targets > 0].mean().item(), rel=1e-12)
    assert last["eval_absolute_error"] == pytest.approx(error.mean().item(), rel=1e-12)


class CountsNothing(Small):
    """A metric with a finite sum and a count that is not finite."""

    def metrics(self, outputs, batch):
        return {"odd": (outputs.sum(), torch.tensor(torch.nan))}


@pytest.mark.fault(18)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_held_out_result_that_is_not_finite_is_code_6_and_no_word_of_the_record(tmp_path, world_size):
    job = ranks.train(tmp_path / "run", "--epochs 1", world_size, workload="test_record:CountsNothing", code=6)
    assert "held-out results are not finite after step 8 ({'eval_loss':" in job.error and not job.snapshot.exists()
    for line in (job.run_dir / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


class Limited(Small):
    def flags(self, add):
        add("--limit", type=float, default=float("inf"))


@pytest.mark.parametrize("limit", ["inf", "nan"])
def test_a_flag_of_one_s_own_that_is_no_number_is_a_word_in_the_record(tmp_path, limit):
    """All ranks have the same value, although NaN is not equal to itself. The run can be resumed with it."""
    flags = f"--epochs 1 --limit {limit}"
    job = ranks.train(tmp_path / "run", flags, 2, workload="test_record:Limited", code=0)
    assert job.records("start")[0]["config"]["limit"] == limit
    assert "Infinity" not in (text := (job.run_dir / "run.jsonl").read_text()) and "NaN" not in text
    ranks.train(tmp_path / "run", flags.replace("1", "2", 1), 2, workload="test_record:Limited", code=0)


NOTES = {
    "small:Small": None,
    "small:Frozen": None,
    "small:Augmented": None,
    "small:BatchNorm": "BatchNorm1d uses statistics of a rank's own rows: losses depend on the world size; GroupNorm does not",
    "small:Dropout": "random numbers are drawn in the model or loss (dropout, noise)",
    "small:Mixup": "random numbers are drawn in the model or loss (dropout, noise)",
    "small:OwnNoise": "the same rows and seeds gave another loss the second time",
    "small:AugmentedByItself": "row 0 was another when it was read again",
    "small:SomeRowsByThemselves": "row 64 was another when it was read again",
    "small:Averaged": "self.average of the workload changes with every batch, and no snapshot holds it",
    "small:CountsInMetrics": "self.best of the workload changes with every batch, and no snapshot holds it",
    "small:CountsInSchedule": "self.asked, self.calls of the workload changes with every batch, and no snapshot holds it",
    "small:Times": "column 0 of fp64 has less than three digits left",
    "small:InitializesByRows": "the model writes its parameters 0.bias when it is called",
    "small:HeldOutIsTraining": "held-out rows are the training rows",
    "small:CountsInAGlobal": "the same rows and seeds gave another loss the second time",
    "small:StandardizesByItself": "the loss of two rows together is not the sum of theirs alone",
    "small:EvaluatesInTrainingMode": "forward() or loss() calls train() on the model, or a part of it",
    "small:TrainsInEvalMode": "forward() or loss() calls eval() on the model, or a part of it",
    "small:FrozenInEvalMode": None,
    "small:SeedsItsForward": "forward() or loss() seeds a generator",
    "small:SeedsItsLoss": "forward() or loss() seeds a generator",
    "small:SeedsForAWhile": None,
    "small:SeedsItsRows": "__getitem__ seeds a generator",
    "small:WholeNumbers": "schedule() returned 0 at every step that was tried, from 0 to 23",
    "small:WarmsUp": None,
    "small:Hooks": "hooks on 0.weight, 2.weight act on a rank's own gradient, before the sum over ranks",
    "small:Rate": "schedule() returned --lr 0.05 itself at step 0",
    "small:CountsInModel": "calls, seen, mean, 2.calls, 2.seen, 2.mean of the model changes with every batch, and no snapshot",
    "small:SpectralNorm": "the model changes its buffers 0.weight_u, 0.weight_v in training, and all ranks take rank 0's",
}


@pytest.mark.parametrize("workload", NOTES)
def test_what_a_workload_does_not_allow_is_said_at_the_start_and_recorded(finished, workload):
    job, note = finished("", 2, workload), NOTES[workload]
    (start,) = job.records("start")
    assert len(start["notes"]) == (note is not None) and job.out[0].count("note=") == len(start["notes"])
    if note:
        assert note in start["notes"][0] and f"note={start['notes'][0]}" in job.out[0].splitlines()


def test_gradients_that_are_all_0_are_said_once(finished):
    job = finished("", 2, "small:NoGradient")
    assert job.out[0].count("note=every gradient was 0 at step 0") == job.out[0].count("note=") == 1


@pytest.mark.parametrize("tracks, changed, noted", [(True, ["1.running_mean"], True), (True, [], False), (False, [], True)])
def test_a_batch_s_own_statistics_are_noted_and_frozen_ones_are_not(tracks, changed, noted):
    """Without running means no buffer changes, but the statistics still come from the batch."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8, track_running_stats=tracks))
    assert [note.split(" uses ")[0] for note in notes_on_buffers(model, changed)] == ["BatchNorm1d"] * noted


def test_what_an_optimizer_changes_beside_its_state_is_seen_also_in_one_that_it_wraps():
    class Around(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.inner, self.mine, self.fixed = torch.optim.Adam(self.param_groups), parameters, torch.ones(3)

        def step(self):
            self.inner.step()

    model = torch.nn.Linear(2, 1)
    optimizer, kept = Around([*model.parameters()]), []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
        kept.append(of_optimizer(optimizer, model))
    assert changes(*kept) == ["self.inner"]
    assert of_optimizer(optimizer.inner, model) == {}


def test_under_canonical_dropout_needs_no_note(finished):
    assert all(
        finished("--reduction canonical", 2, f"small:{name}").records("start")[0]["notes"] == []
        for name in ("Dropout", "Mixup")
    )


def test_parameters_that_the_optimizer_does_not_have_are_a_note(tmp_path):
    source = "    def optimizer(self, model, config):\n        return torch.optim.SGD(model[0].parameters(), lr=config.lr)\n"
    (tmp_path / "mine.py").write_text(f"from small import *\n\nclass Mine(Small):\n{source}")
    job = ranks.train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'} --epochs 1", 2, code=0)
    (note,) = job.records("start")[0]["notes"]
    assert "2.weight, 2.bias" in note and "not trained" in note


def test_a_learning_rate_that_no_group_has_is_a_note(tmp_path):
    source = "    def optimizer(self, model, config):\n        return torch.optim.SGD(model.parameters(), lr=0.25)\n"
    (tmp_path / "mine.py").write_text(f"from small import *\n\nclass Mine(Small):\n{source}")
    for flags, notes in (("--lr 0.5", 1), ("--lr 0.25", 0)):
        job = ranks.train(tmp_path / flags, f"--workload {tmp_path / 'mine.py'} --epochs 1 {flags}", code=0)
        found = job.records("start")[0]["notes"]
        assert [note.split(":")[0] for note in found] == ["--lr 0.5 is not what optimizer() took (0.25)"] * notes


@pytest.mark.parametrize("rule", ["Adam(model.parameters(), lr=0.05)", "SGD(model.parameters(), lr=0.05, momentum=0.5)"])
def test_flags_of_another_optimizer_are_notes_where_they_are_passed(tmp_path, rule):
    source = f"    def optimizer(self, model, config):\n        return torch.optim.{rule}\n"
    (tmp_path / "mine.py").write_text(f"from small import *\n\nclass Mine(Small):\n{source}")
    found = []
    for flags in ("", "--optimizer adamw --momentum=0.1 --weight-decay 0.7", "--optimizer sgd --momentum 0.5 --weight-decay 0"):
        job = ranks.train(tmp_path / f"run{len(found)}", f"--workload {tmp_path / 'mine.py'} --epochs 1 {flags}", code=0)
        found.append([note.split(":")[0] for note in job.records("start")[0]["notes"]])
    said, adam = "is not what optimizer() took", rule.startswith("Adam")
    assert found[0] == []
    name, beta = ("Adam", "0.9") if adam else ("SGD", "0.5")
    all_three = [f"--optimizer adamw {said} ({name})", f"--momentum 0.1 {said} ({beta})", f"--weight-decay 0.7 {said} (0)"]
    assert found[1] == all_three
    assert found[2] == ([f"--optimizer sgd {said} (Adam)", f"--momentum 0.5 {said} (0.9)"] if adam else [])


def test_the_core_s_own_optimizers_follow_their_flags(tmp_path):
    for name in ("sgd", "adamw"):
        flags = f"--epochs 1 --optimizer {name} --momentum 0.8 --weight-decay 0.1"
        job = ranks.train(tmp_path / name, flags, workload="small:Small", code=0)
        assert job.records("start")[0]["notes"] == []


FROZEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Dropout(0.5), nn.Tanh()))
        self.head = nn.Linear(8, 1)
        self.backbone.requires_grad_(False).eval()

    def forward(self, inputs):
        return self.head(self.backbone(inputs))
"""
KEPT_IN_EVAL = """
    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self
"""


@pytest.mark.parametrize("flags", ["", "--sharding full"])
@pytest.mark.parametrize("keeps", ["", KEPT_IN_EVAL], ids=["none", "train"])
def test_a_submodule_in_eval_mode_is_a_note_unless_train_leaves_it_so(tmp_path, keeps, flags):
    model = "\nclass Mine(Small):\n    def model(self, config):\n        return Net()\n"
    (tmp_path / "mine.py").write_text(f"from small import *\n{FROZEN}{keeps}\n{model}")
    job = ranks.train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'} --epochs 1 {flags}", 2, code=0)
    notes = [note for note in job.records("start")[0]["notes"] if "eval mode" in note]
    said = "model() left backbone in eval mode, and the run trains it in training mode"
    assert [note.split(":")[0] for note in notes] == ([] if keeps else [said])


def test_the_start_says_how_often_the_job_was_started_and_how_many_rows_there_are(tmp_path):
    job = ranks.train(tmp_path / "run", "", ranks=ranks.world(2, restart=3), workload="small:Small", code=0)
    (start,) = job.records("start")
    assert (start["restart"], start["training_rows"], start["held_out_rows"]) == (3, 128, 37)
    assert re.fullmatch(r"[0-9a-f]{12}", start["workload_file"])


# ---- progress -----------------------------------------------------------------------------------------------------

LINE = re.compile(r"epoch=(\d)/2 step=(\d+)/14 loss=(\S+) rows_a_second=\d+ left=\d+:\d\d:\d\d")


def test_lines_come_while_an_epoch_lasts(finished):
    """With an interval that has always passed, every reconciliation prints a line; they come after at most 1, 3, 7 steps."""
    job = finished("--epochs 2 --log-seconds 1e-9", 2)
    found = [match.groups() for match in map(LINE.fullmatch, job.out[0].splitlines()) if match]
    assert len(found) >= 4 and job.out[1] == ""
    for epoch, step, loss in found:
        assert float(loss) == pytest.approx(job.losses[14 * (int(epoch) - 1) + int(step) - 1], rel=1e-5)


@pytest.mark.parametrize("flags", ["--epochs 2 --log-seconds 0", "--epochs 2"])
def test_there_is_none_with_0_and_none_in_a_run_of_a_second(finished, flags):
    out = finished(flags, 2).out[0].splitlines()
    assert not [line for line in out if "left=" in line] and len([line for line in out if line.startswith("epoch=")]) == 2


def told(record: Record, capsys, seconds: list[float], monkeypatch) -> list[float]:
    """The times, of these, at which a progress line is printed."""
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = []
    for now in seconds:
        record.progress("1/2", 3, 10, 0.5, 1000.0, 60.0)
        if out := capsys.readouterr().out:
            assert out == "epoch=1/2 step=3/10 loss=0.5 rows_a_second=1000 left=0:01:00\n"
            lines.append(now)
    return lines


def test_a_line_comes_every_so_many_seconds_since_the_last_word(tmp_path, monkeypatch, capsys):
    record = Record(0.0, log_seconds=30)
    record.open(tmp_path / "run.jsonl")
    record.spoke = 100.0
    assert told(record, capsys, [101, 129, 130, 131, 159, 160, 300, 310], monkeypatch) == [130, 160, 300]
    monkeypatch.setattr(time, "monotonic", lambda: 320.0)
    record.epoch(0, 2, 10, {"loss": 0.5})
    capsys.readouterr()
    assert told(record, capsys, [331, 349, 350], monkeypatch) == [350], "an epoch's line is a word, too"


@pytest.mark.parametrize("seconds, shown", [(0, "0:00:00"), (59.6, "0:01:00"), (3599, "0:59:59"), (90_061, "25:01:01")])
def test_the_time_left_is_hours_minutes_seconds(tmp_path, capsys, seconds, shown):
    record = Record(0.0, log_seconds=1e-9)
    record.open(tmp_path / "run.jsonl")
    record.progress("1/2", 3, 10, 0.5, 1000.0, seconds)
    assert capsys.readouterr().out.endswith(f"left={shown}\n")


def test_on_a_terminal_one_line_is_written_over_and_taken_away(tmp_path, monkeypatch, capsys):
    record = opened(tmp_path / "run.jsonl")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for step in (1, 2):
        record.progress("1/2", step, 10, 0.5, 1000.0, 60.0)
    record.say(epoch="1/2")
    live = "\r\033[Kepoch 1/2  loss 0.5  1000 rows/s  0:01:00 left  step {}/10"
    assert capsys.readouterr().out == live.format(1) + live.format(2) + "\r\033[K" + "epoch=1/2\n"


def test_where_tqdm_is_installed_the_line_is_its_bar(tmp_path, monkeypatch):
    class Bar:
        made = []

        def __init__(self, total, leave, file):
            self.total, self.n, self.said, self.closed = total, 0, "", False
            Bar.made.append(self)

        def set_description_str(self, text, refresh):
            self.said = text

        def close(self):
            self.closed = True

    record = opened(tmp_path / "run.jsonl")
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    sys.modules["tqdm"].tqdm = Bar
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for step in (1, 7):
        record.progress("1/2", step, 10, 0.5, 1000.0, 60.0)
    (bar,) = Bar.made
    assert (bar.total, bar.n, bar.closed) == (10, 7, False) and "loss 0.5" in bar.said
    record.say(epoch="1/2")
    assert bar.closed


# ---- the end ------------------------------------------------------------------------------------------------------

PARTS = ["computing", "reading", "communication", "evaluation", "snapshots"]


def table_of(job: ranks.Job) -> dict[str, str]:
    """The indented lines below the title."""
    lines = [line for line in job.out[0].splitlines() if line.startswith("  ")]
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)


def test_the_table_at_the_end_has_what_was_trained_how_fast_and_where_the_time_went(finished):
    job = finished("--epochs 3", 2)
    table, (end,), last = table_of(job), job.records("end"), job.records("epoch")[-1]
    assert (table["workload"], table["epochs run"], table["steps"], table["ranks"]) == ("digits", "3 of 3", "42", "2 on cpu")
    shown = [float(table[name]) for name in ("training loss", "held-out loss", "held-out accuracy")]
    assert shown == pytest.approx([last["loss"], last["eval_loss"], last["eval_accuracy"]], rel=1e-5)
    speed = re.fullmatch(r"(\S+) \(median (\S+), slowest tenth (\S+)\)", table["rows a second"]).groups()
    assert [float(part) for part in speed] == pytest.approx([end["rows_a_second"], end["median"], end["p10"]], rel=1e-4)
    assert [re.match(r"[a-z]+( \(estimated\))?", part)[0] for part in table["seconds"].split(", ")] == [
        part + " (estimated)" * (part == "communication") for part in PARTS
    ]
    host = job.records("start")[0]["ranks"][end["slowest_rank"]]["host"]
    assert re.match(rf"{end['slowest_rank']} on {host}: \d+\.\d\d times the mean", table["slowest rank"])
    assert table["run"] == str(job.run_dir)


def test_the_parts_of_the_training_s_seconds_are_all_of_them(finished):
    for world_size in (1, 2):
        (end,) = finished("--epochs 3", world_size).records("end")
        seconds = end["seconds"]
        assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["training"], abs=1e-3)
        assert min(seconds[part] for part in PARTS) >= 0 and seconds["evaluation"] > 0 and seconds["snapshots"] > 0
        assert end["p10"] <= end["median"]


def test_the_slowest_tenth_is_of_the_whole_run_and_not_of_its_beginning():
    watch = Stopwatch()
    watch.speeds = [*range(100, 60, -1), 3.0, 2.0, 1.0, 4.0, *range(60, 4, -1)]
    peers = SimpleNamespace(world_size=1, rank=0, reduce=lambda own, most: (own, most), which=lambda mine: [0])
    config = SimpleNamespace(global_batch_size=8)
    speed, _, lines = summarize(SimpleNamespace(watch=watch, peers=peers, config=config), 0)
    assert (speed["median"], speed["p10"]) == (50.5, 11)
    assert "(median 50.5, slowest tenth 11)" in lines["rows a second"]


def test_communication_that_can_be_seen_is_not_estimated_and_one_rank_is_not_the_slowest(finished):
    flat, alone = table_of(finished("--epochs 2 --reduction flat", 2)), table_of(finished("--epochs 2", 1))
    assert "communication " in flat["seconds"] and "estimated" not in flat["seconds"]
    assert "slowest rank" not in alone and "estimated" not in alone["seconds"]


def test_the_table_has_every_loss_and_metric(finished):
    table, last = (get(finished("", 2, "small:SeveralLosses")) for get in (table_of, lambda job: job.records("epoch")[-1]))
    for shown, key in {
        "held-out loss": "eval_loss",
        "held-out loss, square": "eval_loss_square",
        "held-out loss, size": "eval_loss_size",
        "held-out error_above_0": "eval_error_above_0",
        "held-out absolute_error": "eval_absolute_error",
    }.items():
        assert float(table[shown]) == pytest.approx(last[key], rel=1e-5)


def test_a_run_that_was_stopped_tells_its_own_steps_speed(tmp_path):
    """Rows per second count this start's steps, not all steps of the run."""
    flags = "--epochs 2"
    job = ranks.train(tmp_path / "run", flags, 1, faults={0: at_step(3, signalled(signal.SIGUSR1))}, code=75)
    assert "stopped early (SIGUSR1) and saved" in job.out[0] and table_of(job)["epochs run"] == "0 of 2"
    job = ranks.train(tmp_path / "run", flags, 1, code=0)
    end = job.records("end")[-1]
    begun = job.records("start")[-1]["step"]
    assert 0 < begun < 28
    assert end["rows_a_second"] == pytest.approx((28 - begun) * 96 / end["seconds"]["training"], rel=0.01)


def test_a_run_with_nothing_left_to_do_has_no_speed(finished, tmp_path):
    ranks.train(tmp_path / "run", "--epochs 1", 2, code=0)
    job = ranks.train(tmp_path / "run", "--epochs 1", 2, code=0)
    end = job.records("end")[-1]
    assert (end["rows_a_second"], end["median"], end["p10"]) == (0, 0, 0) and "seconds" not in table_of(job)


# ---- meaning of the numbers -----------------------------------------------------------------------------------------


def test_the_time_left_is_of_the_steps_that_are_left(tmp_path):
    job = train_small(
        tmp_path / "run", "--epochs 3 --log-seconds 1e-9", faults={0: ranks.call("test_record", "_told_at_100_rows_a_second")}
    )
    told = [line.split()[1:] for line in job.out[0].splitlines() if line.startswith("told ")]
    assert len(told) >= 9
    for epoch, index, steps, left in told:
        step = 8 * (int(epoch[0]) - 1) + int(index)
        assert (epoch[1:], steps) == ("/3", "8") and float(left) == pytest.approx((24 - step) * 16 / 100)


def _told_at_100_rows_a_second() -> None:
    def told(self, epoch, index, steps, loss, rows_a_second, left):
        print("told", epoch, index, steps, left, flush=True)

    Record.progress, Stopwatch.speed = told, property(lambda self: 100.0)


def train_small(run_dir: Path, flags: str, world_size: int = 1, workload: str = "small:Small", **others) -> ranks.Job:
    return ranks.train(run_dir, flags, world_size, workload=workload, code=0, **others)


def test_the_speed_that_counts_is_the_latest():
    watch = Stopwatch()
    watch.speeds = [1.0] * 40 + [100.0] * 30
    assert watch.speed == 100.0


class SlowRows(OneByOne):
    """Each row takes 10 ms."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class ReadSlowly(Small):
    def data(self, config):
        return SlowRows(*table(), 0.0), None


def test_reading_and_waiting_for_others_are_where_they_belong(tmp_path):
    reads = train_small(tmp_path / "reads", "--epochs 1 --steps-per-epoch 3", workload="test_record:ReadSlowly")
    assert reads.records("end")[0]["seconds"]["reading"] >= 0.3  # 2 x 16 rows; others were read before the training
    waits = train_small(tmp_path / "waits", "--epochs 1 --steps-per-epoch 4 --reduction flat", 2, "test_record:Lags")
    end = waits.records("end")[0]
    assert end["seconds"]["communication"] >= 0.6 and end["slowest_rank"] == 1
    assert 1 <= float(re.match(r"1 on \S+: (\S+) times the mean", table_of(waits)["slowest rank"])[1]) <= 2


class Lags(Small):
    """Rank 1 takes 0.2 s per step."""

    def loss(self, outputs, batch):
        time.sleep(0.2 if torch.distributed.get_rank() == 1 else 0)
        return super().loss(outputs, batch)


class LongEvaluation(Small):
    """Each held-out batch takes 1,000 s by the clock."""

    past = 0.0

    def metrics(self, outputs, batch):
        type(self).past += 1000.0
        return super().metrics(outputs, batch)


def _a_clock_that_evaluation_moves() -> None:
    monotonic = time.monotonic
    time.monotonic = lambda: monotonic() + LongEvaluation.past


def test_the_speed_is_that_of_steps_alone(tmp_path):
    faults = {0: ranks.call("test_record", "_a_clock_that_evaluation_moves")}
    job = train_small(tmp_path / "run", "--epochs 3 --save-minutes 0", workload="test_record:LongEvaluation", faults=faults)
    assert job.records("end")[0]["p10"] > 1


def test_that_no_accelerator_is_visible_is_said_where_one_was_hoped_for(tmp_path, capsys):
    for device in ("auto", "cpu"):
        rows = [dict(rank=n, node_rank=0, host="node0", device="cpu") for n in range(12)]
        opened(tmp_path / "run.jsonl").start(0, 0, dict(device=device), rows, [])
        out = capsys.readouterr().out
        assert ("no accelerator is visible" in out) is (device == "auto")
        assert len([line for line in out.splitlines() if line.startswith("rank=")]) == 8, "a line a rank would be thousands"


def test_the_first_of_a_phase_counts_and_epochs_from_1(tmp_path, capsys, monkeypatch):
    record = opened(tmp_path / "run.jsonl")
    record.lap("first_step")
    first = record.seconds["first_step"]
    monkeypatch.setattr(time, "monotonic", lambda: record.began + 500.0)
    record.lap("first_step")
    assert record.seconds["first_step"] == first
    record.training = record.began
    record.epoch(0, 3, 14, dict(loss=0.5))
    assert capsys.readouterr().out.startswith("epoch=1/3 step=14 loss=0.5")

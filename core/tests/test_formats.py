"""Snapshots of earlier versions are resumed, with the losses that those versions gave.

python -m pytest core/tests/test_formats.py
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from ddp_core import data, snapshot
from ranks import train
from test_trainer import deviation

HERE = Path(__file__).parent / "snapshots"
FORMATS = {number: json.loads((HERE / f"format{number}.json").read_text()) for number in (1, 2)}
NAMES = [f"format{number}-{name}" for number, runs in FORMATS.items() for name in runs]


def known(name: str) -> dict:
    """Flags, losses of all steps, and [loss, held-out loss] of all epochs."""
    return FORMATS[int(name[6])][name.partition("-")[2]]


def resumed(folder: Path, name: str, flags: str = "", world_size: int = 1, code: int = 0) -> ranks.Job:
    (folder / "run").mkdir()
    shutil.copy(HERE / f"{name}.safetensors", folder / "run" / "snapshot.safetensors")
    flags = f"{known(name)['flags'].replace('HERE', str(HERE))} --epochs 4 {flags}"
    faults = {0: partial(as_recorded, raw_document(HERE / f"{name}.safetensors")["data"])} if name == "format2-own" else {}
    return train(folder / "run", flags, world_size, code=code, faults=faults)


def as_recorded(fingerprint: str) -> None:
    """golden.py's rows come from torch's sin and tanh. Their last bits, and so their fingerprint, depend on the CPU."""
    data.fingerprint = lambda *rows: (fingerprint, [], [])


KINDS = [(name, 1, "ddp") for name in NAMES]
KINDS += [(name, 2, kind) for name in NAMES for kind in ("ddp", "flat") if name != "format2-own"]  # format2-own has BatchNorm


@pytest.mark.parametrize("name, world_size, reduction", KINDS)
@pytest.mark.fault(40)
def test_a_snapshot_of_each_format_goes_on_to_the_losses_of_its_own_version(tmp_path, name, world_size, reduction):
    step = raw_document(HERE / f"{name}.safetensors")["step"]
    assert 10 < step < 20, "it is not of the middle of an epoch"
    job = resumed(tmp_path, name, f"--reduction {reduction}", world_size)
    losses, expected = [float.fromhex(record["loss_hex"]) for record in job.records("step")], known(name)
    assert [record["step"] for record in job.records("step")] == list(range(step, 40))
    assert deviation(losses, [float.fromhex(loss) for loss in expected["losses"]][step:]) < 1e-12
    epochs = [[float.fromhex(value) for value in row] for row in expected["epochs"]][1:]
    found = [[record["loss"], record["eval_loss"]] for record in job.records("epoch")]
    for ours, theirs in zip(found, epochs, strict=True):
        assert deviation(ours, theirs) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_what_it_becomes_is_of_the_newest_format_with_its_history(tmp_path, name):
    job = resumed(tmp_path, name)
    document, history = raw_document(job.snapshot), known(name)["epochs"]
    assert document["format"] == snapshot.FORMAT == 2 and document["step"] == 40
    for row, expected in zip(document["history"], history, strict=True):
        assert deviation([float.fromhex(value) for value in row[1:3]], [float.fromhex(value) for value in expected]) < 1e-12


def raw_document(path: Path) -> dict:
    """The document as it stands in the file."""
    raw = path.read_bytes()
    return json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["ddp_core"])


@pytest.mark.parametrize("name", NAMES)
def test_these_files_are_of_the_format_that_they_are_named_after(name):
    assert raw_document(HERE / f"{name}.safetensors")["format"] == int(name[6])


@pytest.mark.parametrize(
    "name, flags, said",
    [
        ("format1-momentum", "--lr 0.5", "lr: 0.01 there, 0.5 here"),
        ("format1-momentum", "--clip-norm 1", "clip_norm: 0.0 there, 1.0 here"),
        ("format1-momentum", "--row-seeds off", "row_seeds: on there, off here"),
        ("format1-adamw", "--epochs 5", "epochs: 4 there, 5 here"),
        ("format2-own", "--width 6", "width: 5 there, 6 here"),
    ],
)
def test_under_other_flags_it_is_refused_as_ever(tmp_path, name, flags, said):
    """A setting that format 1 lacks gets the value with which it trained."""
    assert said in resumed(tmp_path, name, flags, code=5).error


def of_format_1(problem: dict, step: int, *names: str) -> tuple[dict, dict]:
    tensors = {name: torch.ones(2) for name in names}
    return snapshot.migrate(tensors, {"format": 1, "problem": problem, "step": step})


def test_the_steps_that_adamw_counts_in_format_2_are_the_run_s(tmp_path):
    names = [f"{part}.{name}" for part in ("model", "optim.mean", "optim.square") for name in ("a.weight", "b")]
    tensors, _ = of_format_1({"optimizer": "adamw", "momentum": 0.9}, 17, *names)
    assert {name: tensors[name].item() for name in tensors.keys() - {*names}} == {"optim.step.a.weight": 17, "optim.step.b": 17}


@pytest.mark.parametrize("momentum, kept", [(0.0, set()), (0.9, {"optim.momentum.a"})])
def test_a_momentum_of_zeros_is_kept_where_there_is_momentum_only(momentum, kept):
    tensors, _ = of_format_1({"optimizer": "sgd", "momentum": momentum}, 17, "model.a", "optim.momentum.a")
    assert tensors.keys() == {"model.a"} | kept


@pytest.mark.parametrize("workload, size", [("gpt", {"model_size": "tiny"}), ("mnist", {})])
def test_the_model_size_is_gpt_s_own_flag_now(workload, size):
    _, document = of_format_1({"workload": workload, "model_size": "tiny", "optimizer": "sgd", "momentum": 0.9}, 1)
    assert document["problem"].keys() - {"workload", "optimizer", "momentum", "clip_norm", "row_seeds"} == {*size}
    assert document["problem"].get("model_size") == size.get("model_size")


def test_a_snapshot_of_format_2_is_read_as_it_stands():
    tensors, document = {"model.a": torch.ones(2)}, {"format": 2, "problem": {"optimizer": "adamw", "momentum": 0.9}, "step": 3}
    assert snapshot.migrate(tensors, document) == (tensors, document)

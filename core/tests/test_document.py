"""Snapshots with correct checksums and impossible documents: each is refused in one line, with exit code 5.

python -m pytest core/tests/test_document.py
"""

import copy
from pathlib import Path

import pytest
import torch
from ddp_core import snapshot
from ddp_core.document import refuse_senseless
from ddp_core.errors import SnapshotError
from ddp_core.state import State, layout
from ranks import train

FACTS = dict(problem={"workload": "small", "lr": 0.1}, data="abc", steps_per_epoch=4, world_size=1, versions={"torch": "2"})
WHOLE = FACTS | dict(step=9, epochs_run=2, epoch_loss_sum=(0.5).hex(), best=[1, (0.5).hex()])
WHOLE |= dict(history=[[0, (1.0).hex(), "inf"], [1, (0.5).hex(), (0.5).hex()]], scale=[(2.0).hex(), 3], stateless=["bias"])


def fresh() -> State:
    model = torch.nn.Linear(3, 1)
    return State(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), FACTS)


def adopted(document: dict) -> State:
    """The state that a run reads from a snapshot with this document and fitting tensors."""
    theirs, ours = fresh(), fresh()
    theirs.lay_out()
    theirs.forget(["bias"])
    ours.lay_out()
    ours.progress = ours.check(theirs.tensors(), document, "FILE")
    ours.put_numbers()
    return ours


def test_what_an_optimizer_makes_in_a_later_step_is_made_as_a_snapshot_has_it():
    """A user's optimizer may make state later; torch's optimizers make all of it in the first step."""
    theirs, ours, torch_s = fresh(), fresh(), fresh()
    ours.optimizer.__class__ = type("Own", (torch.optim.SGD,), {})
    for parameter in theirs.model.parameters():
        theirs.optimizer.state[parameter] |= {"slow": parameter.detach().double(), "steps": torch.zeros(2, dtype=torch.int64)}
    ours.make(ours.made_later(theirs.tensors()))
    assert layout(ours.tensors()) == layout(theirs.tensors())
    assert torch_s.made_later(theirs.tensors()) == []


def test_what_a_run_has_written_makes_sense():
    assert adopted(WHOLE).progress.step == 9
    assert adopted(WHOLE | dict(numbers=[{"momentum": 0.5}, {}])).optimizer.param_groups[0]["momentum"] == 0.5
    for path in (Path(__file__).parent / "snapshots").glob("*.safetensors"):
        refuse_senseless(snapshot.read(path)[1], path)


SENSELESS = {
    "step": [-1, 8.5, "9", None, True, [], 10**30, 7],
    "steps_per_epoch": [0, -4, 4.0, None, "4", 3],
    "epochs_run": [1, 3, None, "2", -1],
    "epoch_loss_sum": ["nan", "inf", "", "x", None, 0.5, [], "0x1p99999", "0x" + "f" * 5000],
    "history": [
        None,
        [],
        {},
        [[0], [0]],
        [[1], [0]],
        [[0], 1],
        [[0], []],
        [[0], [1, 0.5]],
        [[0], [1, None]],
        [[0], [1, "x"]],
        [[0], [True]],
        [[0], {"1": 1}],
    ],
    "best": [1, [], [1], [2, "0x1p0"], [-1, "0x1p0"], [1, None], [1, "x"], "no", {}],
    "scale": [None, [], [1.0, 2], ["0x0p0", 1], ["inf", 1], ["nan", 1], ["0x1p0"], ["0x1p0", -1], ["0x1p0", 10**30], 7],
    "stateless": [None, "bias", 7, {}],
    "numbers": [
        7,
        {},
        [{}],
        [{}, {}, {}],
        [{}, []],
        [[], {}],
        [{"momentum": "x"}, {}],
        [{"params": 1}, {}],
        [{"lr": 1}, {}],
        [{"betas": 7}, {}],
        [{}, {"bias": 7}],
        [{}, {"bias": {"x": 1}}],
    ],
    "problem": [None, [], "x", 7, {}],
    "data": [None, 7, [], "another"],
}


@pytest.mark.fault(36)
@pytest.mark.parametrize("name, value", [(name, value) for name in SENSELESS for value in SENSELESS[name]])
def test_what_no_run_can_have_written_is_refused_by_its_name(name, value):
    with pytest.raises(SnapshotError, match=r"^FILE ") as caught:
        adopted(copy.deepcopy(WHOLE) | {name: value})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


@pytest.mark.fault(36)
@pytest.mark.parametrize("name", [name for name in WHOLE if name not in ("scale", "stateless")])
def test_what_is_missing_is_named(name):
    with pytest.raises(SnapshotError, match=f"^FILE lacks {name}"):
        adopted({key: value for key, value in WHOLE.items() if key != name})


@pytest.mark.fault(37)
def test_values_of_another_run_are_said_in_a_line_and_cut():
    problem = {"workload": "\x1b[2J\n" * 9000, "lr": [0.1] * 9000} | {f"\x1b{number}": number for number in range(99)}
    with pytest.raises(SnapshotError, match="is of another run") as caught:
        adopted(WHOLE | dict(problem=problem))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 3000


@pytest.mark.fault(36)
def test_on_all_ranks_it_is_exit_code_5(finished, tmp_path):
    job = finished("--epochs 1", 2)
    tensors, document = snapshot.read(job.snapshot)
    (tmp_path / "run").mkdir()
    document = {name: document[name] for name in document if name != "document_crc32"} | dict(epoch_loss_sum="no number")
    snapshot.write(tmp_path / "run" / "snapshot.safetensors", tensors, document)
    error = train(tmp_path / "run", "--epochs 2", 2, code=5).error
    assert "snapshot.safetensors makes no sense (epoch_loss_sum is no number): restore a copy, or pass --fresh" in error

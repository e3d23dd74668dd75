"""Rare but allowed programs: averaged weights, complex buffers, groups without parameters, unusual batches.

python -m pytest core/tests/test_unusual.py
"""

import copy
import errno
import os
import resource
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from ddp_core import convert, device, run_lock, snapshot
from ddp_core.batches import converted
from ddp_core.config import parse
from ddp_core.data import Rows
from ddp_core.errors import StorageError
from ddp_core.rank import Rank
from ddp_core.run_directory import RunDirectory
from ddp_core.workload import find, parts_of
from ranks import assert_same_run, train
from small import Small, table
from torch import nn
from torch.nn.utils.rnn import pack_sequence

RUN = "--epochs 2"


class Rotated(Small):
    """A complex buffer rotates pairs of numbers, as in many language models. It is not saved in snapshots."""

    def model(self, config):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 1)
                self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)

            def forward(self, inputs):
                assert self.turn.is_complex()
                pairs = torch.view_as_complex(self.inner(inputs).view(-1, 3, 2)) * self.turn
                return self.outer(torch.view_as_real(pairs).flatten(1))

        return Net()


class Averaging(Small):
    """A frozen copy follows the weights, and a frozen parameter counts the updates."""

    def model(self, config):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.own = nn.Linear(6, 1)
                self.average = copy.deepcopy(self.own).requires_grad_(False)
                self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

            @torch.no_grad()
            def follow(self):
                self.calls.add_(1)
                for average, now in zip(self.average.parameters(), self.own.parameters(), strict=True):
                    average.lerp_(now, 0.1)

            def forward(self, inputs):
                if self.training:
                    self.follow()
                return self.own(inputs)

        return Net()


class AveragingBesideABackbone(Averaging):
    """Copying all frozen parameters would need too much memory."""

    def model(self, config):
        net = super().model(config)
        net.backbone = nn.Linear(100, 100).requires_grad_(False)
        return net


class HeadAlone(Small):
    """The optimizer has only the head, although the rest of the model is not frozen."""

    def optimizer(self, model, config):
        return torch.optim.SGD(model[2].parameters(), config.lr)


class FirstGroupIsEmpty(Small):
    def model(self, config):
        model = super().model(config)
        model[0].requires_grad_(False)
        return model

    def optimizer(self, model, config):
        trained = [parameter for parameter in model[0].parameters() if parameter.requires_grad]
        return torch.optim.AdamW([dict(params=trained, lr=1e-4), dict(params=model[2].parameters())], lr=config.lr)


class Halved(Rows):
    """Prepares each batch itself."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs.float() / 200, targets


class Prepared(Small):
    def data(self, config):
        inputs, targets = table()
        return Halved((inputs * 100).to(torch.int8), targets), None

    def loss(self, outputs, batch):
        assert batch[0].abs().max() <= 0.5 and batch[0].dtype == outputs.dtype
        return super().loss(outputs, batch)


class Listed:
    """Rows one by one, of a class that names its columns."""

    columns = ("inputs", "targets")

    def __init__(self):
        self.inputs, self.targets = table()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row):
        return self.inputs[row], self.targets[row]


class Named(Small):
    def data(self, config):
        return Listed(), None


class Sparse(Named):
    def collate(self, rows):
        inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
        return inputs.relu().to_sparse(), targets

    def model(self, config):
        return nn.Linear(6, 1)

    def forward(self, model, batch):
        return torch.sparse.mm(batch[0], model.weight.t()) + model.bias


class Ragged(Named):
    def collate(self, rows):
        return torch.nested.nested_tensor(
            [row[0][: 1 + int(row[0].abs().sum() * 1000) % 5] for row in rows], layout=torch.jagged
        )

    def model(self, config):
        return nn.Linear(1, 1)

    def forward(self, model, batch):
        return model(batch.values().unsqueeze(1))

    def loss(self, outputs, batch):
        return outputs.square().sum() + 0 * len(batch)

    def metrics(self, outputs, batch):
        return {}


class SwitchedOff(Small):
    def flags(self, add):
        add("--flip", action="store_true", default=True, help="turn rows round")
        add("--no-flip", dest="flip", action="store_false", help="leave them as they are")


class OfAStream(Named):
    def data(self, config):
        class Stream(Listed):
            def __getitem__(self, row):
                if row >= 100:
                    raise StopIteration
                return super().__getitem__(row)

        return Stream(), None


class Unsent(Named):
    """A batch that cannot be sent to another process."""

    def collate(self, rows):
        return *super().collate(rows), (lambda: None)


class NothingLater(Small):
    def loss(self, outputs, batch):
        return 0.0 if self.steps_done == 3 else super().loss(outputs, batch)


class NoMetricLater(Small):
    def metrics(self, outputs, batch):
        return {"found": None if self.steps_done else outputs.sum()}


class FrozenAlone(FirstGroupIsEmpty):
    def optimizer(self, model, config):
        return torch.optim.SGD(model[0].parameters(), config.lr)


class AHomeOfItsOwn(Small):
    def model(self, config):
        os.chdir("/")
        return super().model(config)


class Problem(Small):
    def flags(self, add):
        add("--problem", default="heat", help="which equation")


@pytest.mark.parametrize("workload", ["FirstGroupIsEmpty", "Prepared", "Named", "Sparse", "Ragged", "SwitchedOff"])
@pytest.mark.parametrize("flags", ["", "--precision fp32 --workers 1"])
def test_it_trains_and_nothing_is_noted(tmp_path, workload, flags):
    job = train(tmp_path / "run", f"{RUN} {flags}", workload=f"test_unusual:{workload}", code=0)
    notes = [note for note in job.records("start")[0]["notes"] if "held-out" not in note]
    assert len(job.losses) == 16 and notes == []


@pytest.mark.parametrize("flags", ["--precision fp64", "--precision fp32", "--precision fp64 --sharding full"])
def test_complex_buffers_stay_complex(tmp_path, flags):
    job = train(tmp_path / "run", f"{RUN} {flags}", workload="test_unusual:Rotated", code=0)
    assert job.losses[-1] < job.losses[0]


@pytest.mark.parametrize("kind, ranks", [("Averaging", 1), ("Averaging", 2), ("AveragingBesideABackbone", 2)])
def test_an_average_of_the_weights_moves_once_a_step_whoever_starts_the_run(tmp_path, kind, ranks):
    never = train(tmp_path / "never", RUN, ranks, workload=f"test_unusual:{kind}", code=0)
    for epochs in (1, 2):
        job = train(tmp_path / "again", f"--epochs {epochs}", ranks, workload=f"test_unusual:{kind}", code=0)
    assert_same_run(job, never)
    assert snapshot.read(job.snapshot)[0]["model.calls"] == 16


def test_a_file_that_changes_its_folder_as_it_is_imported_is_found_all_the_same(tmp_path, monkeypatch):
    written = tmp_path / "mine.py"
    written.write_text("import os\nfrom small import *\n\nos.chdir('/')\n\n\nclass Mine(Small):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    workload = find("mine.py")
    assert workload.file == written and workload.digest()


def test_what_no_group_has_is_left_out_of_the_norm_that_clips(tmp_path):
    losses = {}
    for precision in ("fp32", "fp16"):
        flags = f"{RUN} --clip-norm 0.5 --precision {precision}"
        losses[precision] = train(tmp_path / precision, flags, workload="test_unusual:HeadAlone", code=0).losses
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.05) and losses["fp32"][-1] < losses["fp32"][0]


def test_a_run_directory_is_where_the_job_was_started_though_the_workload_goes_elsewhere(tmp_path):
    where = os.path.relpath(tmp_path / "run")
    job = train(tmp_path / "run", f"{RUN} --run-dir {where}", workload="test_unusual:AHomeOfItsOwn", code=0)
    assert job.snapshot.exists() and not any("own disk" in note for note in job.records("start")[0]["notes"])


@pytest.mark.parametrize(
    "workload, flags, code, words",
    [
        ("OfAStream", "", 2, "row 1"),
        ("OfAStream", "--workers 1", 2, "rows need an index, streams are not supported"),
        ("NothingLater", "", 2, "loss() returned 0.0, and should return a scalar"),
        ("NoMetricLater", "", 2, "metrics() has None as 'found'"),
        ("FrozenAlone", "", 2, "optimizer() has no parameter that is trained"),
        ("Problem", "", 2, "its flag --problem has a name that config has"),
    ],
)
def test_what_cannot_be_trained_is_one_line(tmp_path, workload, flags, code, words):
    job = train(tmp_path / "run", f"{RUN} {flags}", workload=f"test_unusual:{workload}", code=code)
    assert words in job.error and len(job.error.splitlines()) == 1


def test_rows_that_a_worker_cannot_hand_on_end_the_run_at_once(tmp_path):
    job = train(tmp_path / "run", f"{RUN} --workers 1 --timeout 50", workload="test_unusual:Unsent", code=7)
    why, error = job.err[0].splitlines()
    assert "a worker cannot hand on its rows: " in why and error.startswith("error: a worker that reads rows died")


def test_a_part_of_the_loss_may_be_a_number(tmp_path):
    named = {"one": torch.ones(()).requires_grad_(), "none": 0}
    total, one, none = parts_of(named, ("one", "none"), Small())
    assert (total.item(), one.item(), none.item()) == (1, 1, 0) and total.requires_grad


def test_open_files_are_raised_for_what_workers_hand_on():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        device.raise_limits(Rank.single())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_packed_sequences_keep_their_lengths_on_the_cpu():
    packed = converted(
        pack_sequence([torch.ones(3), torch.ones(1)]), lambda tensor: tensor.double().to("meta"), torch.device("meta")
    )
    assert packed.data.is_meta and packed.batch_sizes.tolist() == [2, 1, 1]


@dataclass(frozen=True, slots=True)
class Pair:
    inputs: torch.Tensor
    targets: torch.Tensor
    name: str = "pair"


class BatchOfADataclass(Small):
    """The outputs are dataclasses too, inside a dictionary."""

    def data(self, config):
        rows = lambda first, count: [*zip(*table(count, first=first), strict=True)]  # noqa: E731
        return rows(0, 128), rows(128, 37)

    def collate(self, rows):
        return Pair(*map(torch.stack, zip(*rows, strict=True)))

    def forward(self, model, batch):
        return {"of": Pair(model(batch.inputs), batch.targets)}

    def loss(self, outputs, batch):
        assert outputs["of"].inputs.dtype in (torch.float32, torch.float64), outputs["of"].inputs.dtype
        return F.mse_loss(outputs["of"].inputs, batch.targets, reduction="sum")

    def metrics(self, outputs, batch):
        return {"absolute_error": F.l1_loss(outputs["of"].inputs, batch.targets, reduction="sum")}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_batches_and_outputs_may_be_dataclasses(tmp_path, precision):
    """Batches get the run's precision; outputs that autocast left in bf16 become fp32."""
    flags = f"{RUN} --precision {precision}"
    plain = train(tmp_path / "plain", flags, workload="small:Small", code=0)
    assert train(tmp_path / "run", flags, workload="test_unusual:BatchOfADataclass", code=0).losses == plain.losses


def test_a_tokenizer_s_batch_stays_one():
    batch = UserDict(ids=torch.ones(2, dtype=torch.int32))
    made = converted(batch, lambda tensor: tensor.long(), torch.device("cpu"))
    assert type(made) is UserDict and made["ids"].dtype == torch.int64 and batch["ids"].dtype == torch.int32


# ---- file systems ------------------------------------------------------------------------------------------------


def test_a_draft_that_has_gone_meanwhile_is_no_error(tmp_path, monkeypatch):
    glob = type(tmp_path).glob
    gone = lambda path, pattern: [path / ".gone.tmp"] if pattern == ".*.tmp" else glob(path, pattern)  # noqa: E731
    monkeypatch.setattr(type(tmp_path), "glob", gone)
    RunDirectory(tmp_path / "run", "job").release()


@pytest.mark.parametrize("number, fine", [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_sync_folders_is_used_all_the_same(tmp_path, monkeypatch, number, fine):
    fsync, opened = os.fsync, len(os.listdir("/proc/self/fd"))

    def of_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    document = dict(step=1, problem={})
    if fine:
        snapshot.write(tmp_path / "a.safetensors", {"a": torch.ones(3)}, document)
        assert snapshot.read(tmp_path / "a.safetensors")[0]["a"].tolist() == [1, 1, 1]
    else:
        with pytest.raises(StorageError):
            snapshot.write(tmp_path / "a.safetensors", {"a": torch.ones(3)}, document)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_link_that_was_made_though_the_server_says_it_was_there_is_one_s_own(tmp_path, monkeypatch):
    link = os.link

    def asked_twice(source, target) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", asked_twice)
    lock = run_lock.RunLock(tmp_path / "run.lock", "job")
    lock.release()
    assert not (tmp_path / "run.lock").exists()


# ---- convert ------------------------------------------------------------------------------------------------------


class Tied(Small):
    def model(self, config):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
        model[2].weight = model[0].weight
        return model


@pytest.mark.parametrize("other, code", [(False, 0), (True, 5)])
def test_a_checkpoint_has_tied_weights_twice(tmp_path, other, code):
    (tmp_path / "tied.py").write_text("from test_unusual import *\n\n\nclass Mine(Tied):\n    pass\n")
    flags = f"--workload {tmp_path / 'tied.py'} --momentum 0".split()
    state = Tied().model(parse(flags, 1, workload=find(str(tmp_path / "tied.py")))).double().state_dict()
    state["2.weight"] = state["2.weight"] + other
    torch.save(dict(MODEL_STATE=state, EPOCHS_RUN=0), tmp_path / "old.pt")
    run_dir = tmp_path / "run"
    assert convert.main(["convert", str(tmp_path / "old.pt"), "--run-dir", str(run_dir), *flags]) == code
    if not other:
        assert "model.2.weight" not in snapshot.read(run_dir / "snapshot.safetensors")[0]
        assert F.mse_loss(snapshot.read(run_dir / "snapshot.safetensors")[0]["model.0.weight"], state["0.weight"]) == 0


BESIDE = """
def read(row):
    if row == 100:
        raise ValueError("corrupt record")
    return row
"""
READS_BESIDE = """
import random
from small import *
from rows_beside import read

class Read(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, row):
        return tuple(column[read(row)] for column in table())

class Mine(Small):
    def data(self, config):
        return Read(), table(37, first=128)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_module_beside_the_file_names_its_line_and_the_row(tmp_path, workers):
    (tmp_path / "rows_beside.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text(READS_BESIDE)
    job = train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'} --workers {workers}", code=2)
    assert "row 100 of --workload mine, rows_beside.py, line 4 (read): ValueError: corrupt record" in job.error


def test_an_error_in_an_environment_beside_the_file_names_the_line_that_led_there(tmp_path):
    library = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "rows_beside.py"
    library.parent.mkdir(parents=True)
    library.write_text(BESIDE)
    (tmp_path / "mine.py").write_text(f"import sys; sys.path.insert(0, {str(library.parent)!r}){READS_BESIDE}")
    job = train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'}", code=2)
    assert "row 100 of --workload mine, line 11 (<genexpr>): ValueError: corrupt record" in job.error


MIXES = """
import random
from small import *

class OneByOne(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, row):
        return tuple(column[row] for column in table())

class Mine(Small):
    def data(self, config):
        return OneByOne(), table(37, first=128)

    def collate(self, rows):
        inputs, labels = super().collate(rows)
        return inputs * random.uniform(0.5, 1.5), labels
"""


def test_what_collate_draws_follows_its_last_row(tmp_path):
    """The run repeats, and no note denies it."""
    (tmp_path / "mine.py").write_text(MIXES)
    runs = [
        train(tmp_path / str(workers), f"--workload {tmp_path / 'mine.py'} --workers {workers}", code=0) for workers in (0, 1)
    ]
    assert runs[0].losses == runs[1].losses
    assert [note for run in runs for record in run.records("start") for note in record["notes"] if "read again" in note] == []


LOADS_ANOTHER = """
from small import *

class Mine(Small):
    def model(self, config):
        model = super().model(config)
        model.load_state_dict(nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)).state_dict())
        return model
"""


def test_an_error_whose_first_line_ends_with_a_colon_goes_on(tmp_path):
    (tmp_path / "mine.py").write_text(LOADS_ANOTHER)
    job = train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'}", code=2)
    assert (
        "line 7 (model): RuntimeError: Error(s) in loading state_dict for Sequential: size mismatch for 0.weight" in job.error
    )


DIFFERENTIATES = """
from small import *

class Mine(Small):
    def forward(self, model, batch):
        inputs = batch[0].requires_grad_()
        outputs = model(inputs)
        torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return outputs
"""


def test_who_differentiates_held_out_rows_hears_how(tmp_path):
    (tmp_path / "mine.py").write_text(DIFFERENTIATES)
    job = train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'}", code=2)
    assert "line 8 (forward)" in job.error and "torch.enable_grad()" in job.error


CACHES = """
from small import *

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(6, 1)
        self.register_buffer("angles", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        places = 1 + int(inputs.detach().abs().sum() * 1000) % 40
        if len(self.angles) < places:
            self.register_buffer("angles", torch.arange(places) / 7.0, persistent=False)
            self.register_buffer("cosines", self.angles.cos(), persistent=False)
        assert torch.equal(self.cosines, self.angles.cos())
        return self.own(inputs) + 0 * self.cosines[0]

class Mine(Small):
    def model(self, config):
        return Net()
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_may_make_its_buffers_while_it_is_called(tmp_path, world_size):
    """Buffers may also grow: many models keep angles for all positions seen so far, which differ between ranks."""
    (tmp_path / "mine.py").write_text(CACHES)
    train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'}", world_size, code=0)


# ---- right programs that the trial must leave alone -------------------------------------------------------------------


class DrawnTogether(Small):
    """Its rows are read as a batch, and each time with other noise."""

    def data(self, config):
        class Noisy(Rows):
            def __getitem__(self, rows):
                inputs, targets = super().__getitem__(rows)
                return inputs + torch.randn(inputs.shape, dtype=inputs.dtype), targets

        return Noisy(*table()), None


class Weighted(Small):
    """Its loss takes a weight for each step from a table that ends with the last one. A buffer beside it is sparse."""

    def data(self, config):
        rows = table()
        self.weights = torch.linspace(1, 2, 2 * config.steps_of(len(rows[0])))  # of two epochs
        self.links = torch.eye(3).to_sparse()
        return rows, None

    def loss(self, outputs, batch):
        return self.weights[self.steps_done] * super().loss(outputs, batch)


@pytest.mark.parametrize("flags", ["", "--sharding full"])
def test_rows_that_draw_as_a_batch_are_noted_and_not_refused(tmp_path, flags):
    """Ranks may draw others for the rows that are tried: their losses tell nothing."""
    job = train(tmp_path / "run", f"--epochs 1 {flags}", 2, workload="test_unusual:DrawnTogether", code=0)
    notes = job.records("start")[0]["notes"]
    assert any("row 0 was another" in note for note in notes) and not any("is not the sum" in note for note in notes)


def test_a_loss_may_take_a_number_for_each_step_from_a_table(tmp_path):
    train(tmp_path / "run", "--epochs 2", workload="test_unusual:Weighted", code=0)

"""Checkpoints of the published examples become snapshots: all their content is used, and training goes on as if it had always
run here. A hostile or unknown file is refused with one line.

python -m pytest core/tests/test_convert.py
"""

import ast
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_core import convert, data, snapshot
from ddp_core.config import choose, parse
from ddp_core.order import rows_of_rank, sample_order
from ranks import train as train_job
from test_hostile import RunsCode
from torch.nn.parallel import DistributedDataParallel

SGD = "--workload digits --precision fp64"
PLAIN = "--workload regression --precision fp64 --epochs 4"  # OLCF's problem: no momentum, 32 rows per rank
ADAMW = "--workload digits --precision fp64 --optimizer adamw --lr 0.001 --weight-decay 0.01"
COSINE = "--workload digits --precision fp64 --lr-schedule cosine --warmup-steps 5 --epochs 4"


def by_hand(flags: str, epochs: int, wrapped: bool = False, world_size: int = 1):
    """Model, optimizer, scheduler and steps after `epochs` epochs of a loop like the examples', with torch.optim."""
    workload, config = choose(flags.split()), parse(flags.split(), world_size)
    train, _ = data.of_workload(workload, config)
    inputs, targets = train[torch.arange(len(train))]
    inputs, targets = inputs.double(), targets.double() if targets.is_floating_point() else targets
    model = workload.model(config).double()
    model = DistributedDataParallel(model) if wrapped else model
    common = dict(params=model.parameters(), lr=1.0, weight_decay=config.weight_decay)
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(**common, momentum=config.momentum)
    else:
        optimizer = torch.optim.AdamW(**common, betas=(config.momentum, 0.95))
    batches = len(train) // config.global_batch_size
    total = config.epochs * batches
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.lr * workload.schedule(step, total, config))
    for epoch in range(epochs):
        order = sample_order(config.seed, epoch, len(train))
        for rows in rows_of_rank(order, config.global_batch_size, 0, 1):
            optimizer.zero_grad()
            (workload.loss(model(inputs[rows]), (None, targets[rows])) / config.global_batch_size).backward()
            optimizer.step()
            scheduler.step()
    return model, optimizer, scheduler, epochs * batches


def checkpoint(kind: str, flags: str, epochs: int, wrapped: bool = False, world_size: int = 1) -> dict:
    model, optimizer, scheduler, steps = by_hand(flags, epochs, wrapped, world_size)
    if kind == "olcf":  # this example saves the wrapped module's state
        return {"MODEL_STATE": getattr(model, "module", model).state_dict(), "EPOCHS_RUN": epochs - 1}
    if kind == "nersc":
        return {
            "iters": steps,
            "epoch": epochs - 1,
            "model_state": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "scheduler_state_dict": scheduler.state_dict(),
        }
    if kind == "recipe":  # like many programs
        return {"epoch": epochs - 1, "model_state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    return model.state_dict()


def converted(folder: Path, content, flags: str, code: int = 0, capsys=None) -> str:
    """The output of convert, or the line on stderr if it fails."""
    torch.save(content, folder / "old.pt")
    got = convert.main(["convert", str(folder / "old.pt"), "--run-dir", str(folder / "run"), *flags.split()])
    out, err = capsys.readouterr()
    assert got == code, (got, out, err)
    assert not err or (err.startswith("error: ") and err.count("\n") == 1), err
    return err or out


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- training goes on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, flags, wrapped",
    [
        ("olcf", PLAIN, False),
        ("olcf", PLAIN, True),
        ("nersc", SGD, False),
        ("nersc", SGD, True),
        ("nersc", ADAMW, True),
        ("nersc", COSINE, False),
        ("recipe", SGD, False),
    ],
)
def test_training_goes_on_as_if_it_had_been_ours(finished, tmp_path, group, capsys, kind, flags, wrapped):
    """Two epochs by torch.optim and two by the core have the same losses as four by the core."""
    content = checkpoint(kind, flags, 2, wrapped)
    if kind == "nersc":  # the layers' first use may have been in another order
        content["optimizer_state_dict"]["state"] = dict(reversed(content["optimizer_state_dict"]["state"].items()))
    said = converted(tmp_path, content, flags, capsys=capsys)
    assert "2 epochs run" in said and ("scheduler" in said) == (kind == "nersc")
    assert ("begins at zero" in said) == (kind == "olcf")
    ours = finished(f"{flags} --epochs 4", 1)
    job = train_job(tmp_path / "run", f"{flags} --epochs 4", code=0)
    steps = job.records("step")
    assert [record["step"] for record in steps] == list(range(len(ours.losses) // 2, len(ours.losses)))
    assert [record["loss"] for record in steps] == pytest.approx(ours.losses[len(steps) :], rel=1e-12)
    (tensors, document), (expected, _) = snapshot.read(job.snapshot), snapshot.read(ours.snapshot)
    assert all(torch.allclose(tensors[name], expected[name], rtol=1e-10, atol=1e-13) for name in expected)
    assert document["epochs_run"] == 4 and [row[0] for row in document["history"]] == [0, 1, 2, 3]
    assert document["history"][:2] == [[0], [1]], "losses that nobody has measured"
    assert "epochs run" in job.out[0] and "4 of 4" in job.out[0]


def test_a_bare_state_dict_starts_a_run_with_its_parameters(finished, tmp_path, capsys):
    flags = f"{SGD} --epochs 3"
    assert "no epoch is in the file: 0 epochs run" in converted(tmp_path, checkpoint("bare", flags, 0), flags, capsys=capsys)
    assert train_job(tmp_path / "run", flags, code=0).losses == finished(flags, 1).losses


def test_what_is_converted_can_be_a_set_of_files(finished, tmp_path, capsys):
    flags = f"{SGD} --epochs 3"
    said = converted(tmp_path, checkpoint("bare", flags, 0), f"{flags} --max-shard-size 50KB", capsys=capsys)
    assert f"wrote {tmp_path}/run/snapshot.safetensors.index.json: " in said
    assert train_job(tmp_path / "run", flags, code=0).losses == finished(flags, 1).losses
    converted(tmp_path, checkpoint("bare", flags, 0), flags, code=3, capsys=capsys)


def test_epochs_that_are_cut_short_are_so_in_the_snapshot(finished, tmp_path, capsys):
    flags = f"{SGD} --epochs 3 --steps-per-epoch 5"
    converted(tmp_path, checkpoint("bare", flags, 0), flags, capsys=capsys)
    job = train_job(tmp_path / "run", flags, code=0)
    assert job.losses == finished(flags, 1).losses and len(job.losses) == 15


def test_a_bare_state_dict_can_be_told_its_epochs(tmp_path, group, capsys):
    converted(tmp_path, checkpoint("bare", PLAIN, 2, wrapped=True), f"{PLAIN} --epochs-run 2", capsys=capsys)
    tensors, document = snapshot.read(tmp_path / "run" / "snapshot.safetensors")
    assert (document["epochs_run"], document["step"]) == (2, 128)
    assert tensors.keys() == {"model.weight", "model.bias"}, "without --momentum SGD has no state"


def test_rows_a_rank_are_of_all_ranks(finished, tmp_path, capsys):
    """OLCF's example gives the batch size per rank, so the problem changes with the world size."""
    converted(tmp_path, checkpoint("olcf", PLAIN, 2, world_size=2), f"{PLAIN} --world-size 2", capsys=capsys)
    job = train_job(tmp_path / "run", PLAIN, 2, code=0)
    ours = finished(PLAIN, 2).losses
    assert [record["loss"] for record in job.records("step")] == pytest.approx(ours[len(ours) // 2 :], rel=1e-12)


def test_a_finished_run_is_complete_and_can_be_continued(tmp_path, capsys):
    converted(tmp_path, checkpoint("olcf", PLAIN, 4), PLAIN, capsys=capsys)
    assert "run is complete already" in train_job(tmp_path / "run", PLAIN, code=0).out[0]
    assert len(train_job(tmp_path / "run", f"{PLAIN} --epochs 5", code=0).records("step")) == 64


def test_the_checkpoint_of_a_file_of_one_s_own_is_converted_with_its_buffers(finished, tmp_path, capsys):
    """BatchNorm's statistics, and its integer count of batches."""
    (tmp_path / "mine.py").write_text("from small import *\n\nclass Mine(BatchNorm):\n    pass\n")
    flags = f"--workload {tmp_path / 'mine.py'}"
    tensors, _ = snapshot.read(train_job(tmp_path / "first", f"{flags} --epochs 1", code=0).snapshot)
    state = {name.removeprefix("model."): values for name, values in tensors.items() if name.startswith("model.")}
    converted(tmp_path, {"MODEL_STATE": state, "EPOCHS_RUN": 0}, flags, capsys=capsys)
    found, document = snapshot.read(tmp_path / "run" / "snapshot.safetensors")
    assert document["step"] == 8 and found["model.1.num_batches_tracked"].dtype == torch.int64
    assert all(torch.equal(found[f"model.{name}"], values) for name, values in state.items())
    train_job(tmp_path / "run", f"{flags} --epochs 2", code=0)


def test_rows_that_are_drawn_are_those_of_a_run(tmp_path, capsys):
    text = "    def data(self, config):\n        return tuple(column[torch.randperm(128)] for column in table()), None\n"
    (tmp_path / "mine.py").write_text(f"from small import *\n\nclass Mine(Small):\n{text}")
    flags = f"--workload {tmp_path / 'mine.py'}"
    tensors, _ = snapshot.read(train_job(tmp_path / "first", f"{flags} --epochs 1", code=0).snapshot)
    state = {name.removeprefix("model."): values for name, values in tensors.items() if name.startswith("model.")}
    converted(tmp_path, {"MODEL_STATE": state, "EPOCHS_RUN": 0}, flags, capsys=capsys)
    train_job(tmp_path / "run", f"{flags} --epochs 2", code=0)


def test_an_optimizer_of_the_file_s_own_is_not_converted(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("from small import *\n\nclass Mine(Groups):\n    pass\n")
    line = converted(tmp_path, linear(), f"--workload {tmp_path / 'mine.py'}", code=2, capsys=capsys)
    assert "--workload mine has an optimizer of its own" in line


# ---- checkpoints that do not fit ----------------------------------------------------------------------------------


def linear(**changed) -> dict:
    return {"weight": torch.zeros(1, 20), "bias": torch.zeros(1)} | changed


def doubling() -> list:
    """A small file whose list has 2**60 items when it is written out."""
    value = [0]
    for _ in range(60):
        value = [value, value]
    return value


REGRESSION = "--workload regression"


@pytest.mark.parametrize(
    "content, said",
    [
        (linear(weight=torch.zeros(1, 21)), "weight: (1, 21) there, (1, 20) here"),
        ({"weight": torch.zeros(1, 20)}, "bias: missing"),
        (linear(extra=torch.zeros(3)), "extra: unexpected"),
        ({"module.weight": torch.zeros(1, 20), "bias": torch.zeros(1)}, "module.weight: unexpected"),
        (linear(weight=torch.zeros(1, 20, dtype=torch.int64)), "weight: torch.int64, but should be"),
        (linear(weight=torch.zeros(1, 20).to_sparse()), "weight: Tensor, but should be"),
        (linear(weight=torch.zeros(1, 20, device="meta")), "weight: Tensor, but should be"),
        (linear(weight="zeros"), "weight: str, but should be"),
        (linear(weight=torch.full((1, 20), torch.inf)), "weight: not finite"),
        (linear(weight=torch.full((1, 20), 0.1).double() / 3), "pass --precision fp64"),
        ({"MODEL_STATE": linear(), "EPOCHS_RUN": -1}, "EPOCHS_RUN=-1 is no whole number"),
        ({"MODEL_STATE": linear(), "EPOCHS_RUN": 10**15}, "EPOCHS_RUN=1000000000000000 is no whole number"),
        ({"MODEL_STATE": linear(), "EPOCHS_RUN": 2**2000}, "EPOCHS_RUN=int is no whole number"),
        ({"MODEL_STATE": linear(), "EPOCHS_RUN": "4\n" * 99}, "EPOCHS_RUN=str is no whole number"),
        ({"MODEL_STATE": linear(), "EPOCHS_RUN": doubling()}, "EPOCHS_RUN=list is no whole number"),
        (linear(**{"\x1b[2J\n": torch.zeros(1)}), " [2J : unexpected"),
        ({"MODEL_STATE": [1], "EPOCHS_RUN": 1}, "holds list, but should hold a dictionary of names"),
        (
            {"model_state": linear(), "epoch": 1, "iters": 127},
            "after 127 steps, but 2 epochs of these flags are 128",
        ),
        ({"model_state": linear(), "epoch": 1, "iters": 64}, "after 64 steps, but 2 epochs of these flags are 128"),
        ([linear()], "holds list, but should hold a dictionary of names"),
        ({1: torch.zeros(1)}, "holds dict, but should hold a dictionary of names"),
        ({}, "bias: missing; weight: missing"),
    ],
)
def test_what_does_not_fit_is_listed_and_nothing_is_written(tmp_path, capsys, content, said):
    line = converted(tmp_path, content, REGRESSION, code=5, capsys=capsys)
    assert said in line and str(tmp_path / "old.pt") in line
    assert not (tmp_path / "run").exists()


def test_all_that_differs_is_listed(tmp_path, capsys):
    line = converted(tmp_path, {"weight": torch.zeros(2), "other": torch.zeros(2)}, REGRESSION, code=5, capsys=capsys)
    assert all(text in line for text in ("bias: missing", "other: unexpected", "weight: (2,) there, (1, 20) here"))


def test_a_file_saved_within_an_epoch_can_go_on_from_the_start_of_one(tmp_path, capsys):
    content = checkpoint("nersc", ADAMW, 2) | {"iters": 20}
    assert "--epochs-run N" in converted(tmp_path, content, ADAMW, code=5, capsys=capsys)
    said = converted(tmp_path, content, f"{ADAMW} --epochs-run 1", capsys=capsys)
    assert "of step 28, and this is 14: it is left out" in said and "exp_avg_sq" in said
    tensors, document = snapshot.read(tmp_path / "run" / "snapshot.safetensors")
    assert document["step"] == 14 and not tensors["optim.mean.0.weight"].any()


def test_the_moments_of_several_parameter_groups_are_not_guessed(tmp_path, capsys):
    """Their order is the groups' order, not the model's. Parameters of equal shape would get the wrong moments."""
    content = checkpoint("nersc", SGD, 1)
    (group,) = content["optimizer_state_dict"]["param_groups"]
    content["optimizer_state_dict"]["param_groups"] = [group | {"params": [0, 2]}, group | {"params": [1, 3]}]
    assert "momentum_buffer: the file has none for all" in converted(tmp_path, content, SGD, capsys=capsys)


def test_a_directory_that_has_a_run_is_refused(tmp_path, capsys):
    train_job(tmp_path / "run", f"{REGRESSION} --epochs 1", code=0)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    line = converted(tmp_path, linear(), REGRESSION, code=3, capsys=capsys)
    assert "has a run already" in line and f"--run-dir {tmp_path / 'run'}" in line
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    converted(tmp_path, linear(), f"{REGRESSION} --fresh", capsys=capsys)
    assert {path.name for path in (tmp_path / "run" / "old-1").iterdir()} == {path.name for path in before}


# ---- hostile files ------------------------------------------------------------------------------------------------


def saved(content) -> bytes:
    import io

    torch.save(content, file := io.BytesIO())
    return file.getvalue()


def compressed(raw: bytes) -> bytes:
    import io

    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


def overlapping(raw: bytes) -> bytes:
    """A thousand entries that all point to the same megabyte."""
    import io

    with zipfile.ZipFile(file := io.BytesIO(raw), "a") as archive:
        big = archive.getinfo("archive/data/0")
        for number in range(1000):
            again = zipfile.ZipInfo(f"archive/data/{number + 10}")
            for name in ("CRC", "compress_size", "file_size", "header_offset"):
                setattr(again, name, getattr(big, name))
            archive.filelist.append(again)
        archive._didModify = True
    return file.getvalue()


def hung_on(values: torch.Tensor, **attributes) -> torch.Tensor:
    """The file sets attributes that hide a tensor's methods."""
    values.__dict__.update(attributes)
    return values


def pickled(program: bytes) -> bytes:
    """A complete archive with correct checksums and this pickle."""
    import io

    with zipfile.ZipFile(io.BytesIO(saved({}))) as old, zipfile.ZipFile(file := io.BytesIO(), "w") as new:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("data.pkl") else old.read(name))
    return file.getvalue()


# OrderedDict(), then its attributes items=7 and keys=7, which hide its methods.
ATTRIBUTES = b"\x80\x02ccollections\nOrderedDict\n)R}(X\x05\x00\x00\x00itemsK\x07X\x04\x00\x00\x00keysK\x07ub."

WHOLE = saved(linear())
# bytearray(2**32), in few bytes
HUNGRY = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x01\x85R."
HOSTILE = {
    "entries that overlap": overlapping(saved({"weight": torch.zeros(2**18)})),
    "four GB of nothing": pickled(HUNGRY),
    "a dictionary with attributes": pickled(ATTRIBUTES),
    "code": saved({"MODEL_STATE": RunsCode(), "EPOCHS_RUN": 1}),
    "code instead of a dictionary": saved(RunsCode()),
    "empty": b"",
    "garbage": os.urandom(4096),
    "truncated": WHOLE[: len(WHOLE) // 2],
    "without its end": WHOLE[:-30],
    "half of its bytes": WHOLE[len(WHOLE) // 2 :],
    "a zip of something else": None,
    "a bomb": compressed(saved({"weight": torch.zeros(10**7)})),
    "no pickle in it": WHOLE.replace(b"data.pkl", b"data.xxl"),
    "a pickle that ends early": WHOLE.replace(b"ctorch._utils\n", b".torch._utils\n"),
    "a snapshot": None,
    "before torch 1.6": None,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.fault(36)
def test_a_hostile_file_is_refused_with_one_line_and_runs_nothing(tmp_path, monkeypatch, capsys, name):
    raw = HOSTILE[name]
    old = tmp_path / "old.pt"
    if name == "a zip of something else":
        with zipfile.ZipFile(old, "w") as file:
            file.writestr("notes.txt", "nothing")
    elif name == "a snapshot":
        snapshot.write(old, linear(), {"step": 1})
    elif name == "before torch 1.6":
        torch.save(linear(), old, _use_new_zipfile_serialization=False)
    else:
        old.write_bytes(raw)
    monkeypatch.chdir(tmp_path)
    assert convert.main(["convert", "old.pt", "--run-dir", "run", *REGRESSION.split()]) == 5
    err = capsys.readouterr().err
    assert err.startswith("error: old.pt ") and err.count("\n") == 1 and len(err) < 400
    assert "code" not in name or "mkdir" in err
    assert name != "a bomb" or "compressed" in err
    assert name != "entries that overlap" or "overlap" in err
    assert name != "four GB of nothing" or "read safely (MemoryError" in err
    assert [path.name for path in tmp_path.iterdir()] == ["old.pt"]


@pytest.mark.fault(35)
@pytest.mark.parametrize("place", range(20))
def test_a_flipped_bit_is_never_believed(tmp_path, capsys, place):
    """In any of the numbers. torch.load does not check the archive's checksums."""
    content = {"weight": torch.randn(1, 20), "bias": torch.randn(1)}
    torch.save(content, tmp_path / "old.pt")
    raw = bytearray((tmp_path / "old.pt").read_bytes())
    numbers = content["weight"].numpy().tobytes()
    raw[raw.index(numbers) + place * len(numbers) // 20] ^= 1 << place % 8
    (tmp_path / "old.pt").write_bytes(raw)
    assert convert.main(["convert", str(tmp_path / "old.pt"), "--run-dir", str(tmp_path / "run"), *REGRESSION.split()]) == 5
    assert "the checksum of" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    "content",
    [
        linear(weight=hung_on(torch.zeros(1, 20), isfinite=7, to=7, detach=7, numel=7)),
        linear(weight=torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])),
        linear(weight=[[[[torch.zeros(1, 20)]]]]),
        {"MODEL_STATE": {"MODEL_STATE": linear()}, "EPOCHS_RUN": [[1]]},
        {"model_state": linear(), "optimizer_state": {"param_groups": [{"params": [[1], [2]]}], "state": torch.zeros(2)}},
        {"model_state": linear(), "optimizer_state": {"param_groups": [{"params": torch.zeros(2)}], "state": {0: 1}}},
    ],
    ids=range(6),
)
def test_what_hangs_on_a_tensor_or_dictionary_is_no_traceback(tmp_path, capsys, content):
    torch.save(content, tmp_path / "old.pt")
    code = convert.main(["convert", str(tmp_path / "old.pt"), "--run-dir", str(tmp_path / "run"), *REGRESSION.split()])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) in ((0, 0), (5, 1)), (code, err)


@pytest.mark.parametrize("name", ["folder", "missing.pt", "pipe"])
def test_what_is_no_file_is_refused(tmp_path, capsys, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert convert.main(["convert", str(tmp_path / name), *REGRESSION.split()]) == 5
    assert capsys.readouterr().err == f"error: {tmp_path / name} is no file\n"


@pytest.mark.parametrize("version", ["2.8.0", "2.9.1+cu128", "2.10.0a0+git123"])
def test_an_older_torch_is_refused_with_the_reason(tmp_path, monkeypatch, capsys, version):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    line = converted(tmp_path, linear(), REGRESSION, code=3, capsys=capsys)
    assert version in line and "CVE-2026-24747" in line


def test_one_place_alone_reads_a_pickle_and_does_it_safely():
    calls = [node for node in ast.walk(ast.parse(Path(convert.__file__).read_text())) if isinstance(node, ast.Call)]
    (call,) = (call for call in calls if ast.unparse(call.func) == "torch.load")
    assert {word.arg: ast.unparse(word.value) for word in call.keywords} == {"map_location": "'cpu'", "weights_only": "True"}


# ---- the command --------------------------------------------------------------------------------------------------


def command(*argv: str) -> subprocess.CompletedProcess:
    call = [sys.executable, "-W", "error::RuntimeWarning", "-m", "ddp_core.snapshot", *argv]
    return subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_converts(tmp_path):
    torch.save(OrderedDict(linear()), tmp_path / "old.pt")
    done = command("convert", str(tmp_path / "old.pt"), "--run-dir", str(tmp_path / "run"), *REGRESSION.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert snapshot.read(tmp_path / "run" / "snapshot.safetensors")[1]["step"] == 0


@pytest.mark.parametrize(
    "argv",
    [[], ["read"], ["convert"], ["convert", "--run-dir"], ["convert", "x", "--lr"], ["convert", "x", "--world-size", "0"]],
)
def test_wrong_usage_is_one_line_and_2(capsys, argv):
    assert convert.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("argv", [["--help"], ["convert", "--help"], ["convert", "x", "-h"]])
def test_help_names_the_formats_and_the_flags(capsys, argv):
    with pytest.raises(SystemExit, match="0"):
        convert.main(argv)
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("MODEL_STATE", "model_state", "state_dict", "--run-dir", "--epochs-run", "--world-size")
    )

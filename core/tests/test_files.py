"""Snapshots of several files: a set and its index. One index is complete at every moment.

python -m pytest core/tests/test_files.py
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from ddp_core import files, show, snapshot
from ddp_core.background import Saver
from ddp_core.errors import SnapshotError, StorageError
from ddp_core.record import Record
from ddp_core.run_directory import RunDirectory
from faults import at_step, environment, files_limited_to, in_turn, signalled, standing_in
from ranks import assert_same_run, step_of, train
from safetensors.torch import load_file
from test_run_directory import _no_link
from test_sharding import assert_same_training, saving_at_once

MOST = 10_000  # bytes of a file
ONE = 2**40


def state(step: int) -> tuple[dict[str, torch.Tensor], dict]:
    """A state of three files; one holds a tensor larger than MOST."""
    sizes = {"model.a": 3000, "model.b": 900, "model.c": 300, "optim.momentum.a": 1000, "optim.step.a": 1}
    tensors = {name: torch.full((size,), float(step), dtype=torch.float64) for name, size in sizes.items()}
    return tensors, {"step": step, "epochs_run": 0, "history": [[0]], "versions": {"ddp_core": "0.1.0"}}


def step_in(loaded: tuple[dict[str, torch.Tensor], dict]) -> int:
    tensors, document = loaded
    assert len(tensors) == 5 and all((values == document["step"]).all() for values in tensors.values())
    return document["step"]


def directory_of(folder: Path, most: float = MOST) -> RunDirectory:
    return RunDirectory(str(folder), "job-1", most=most)


def save(folder: Path, *steps: int, most: float = MOST, best: bool = False) -> None:
    directory = directory_of(folder, most)
    for step in steps:
        if best:
            directory.save_best(*state(step))
        directory.save(*state(step))
    directory.release()


def load(folder: Path, lazily: bool = False):
    directory = directory_of(folder)
    directory.release()
    return directory.load(lazily)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"run.lock"}


def named_by(index: Path) -> set[str]:
    return {*json.loads(index.read_bytes())["weight_map"].values()}


def assert_nothing_stale(folder: Path) -> None:
    """Every file must be named by an index, and no snapshot may exist as both a file and a set."""
    indexes = [*folder.glob("*.index.json")]
    named = {name for index in indexes for name in named_by(index)}
    alone = {"snapshot.safetensors", "snapshot.prev.safetensors", "best.safetensors"} & names(folder)
    assert names(folder) == named | alone | {index.name for index in indexes}
    assert not {f"{name}.index.json" for name in alone} & names(folder)


@pytest.fixture
def written(tmp_path) -> Path:
    """The index of a set."""
    snapshot.write(tmp_path / "snapshot.safetensors", *state(41), most=MOST)
    return tmp_path / "snapshot.safetensors.index.json"


# ---- written files --------------------------------------------------------------------------------------------------


def test_a_set_is_files_that_safetensors_reads_and_an_index_as_hugging_face_has_it(written):
    index = json.loads(written.read_bytes())
    assert index["metadata"]["total_size"] == 8 * 5201 and index["metadata"]["ddp_core"]["step"] == 41
    files_of = sorted(named_by(written))
    ends = [name[len("snapshot-41-12345678") :] for name in files_of]
    assert ends == [f"-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert names(written.parent) == {*files_of, written.name}
    found = {}
    for name in files_of:
        tensors = load_file(written.with_name(name))
        assert {*tensors} == {tensor for tensor, file in index["weight_map"].items() if file == name}
        assert len(tensors) == 1 or sum(values.nbytes for values in tensors.values()) <= MOST
        raw = written.with_name(name).read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        assert header["__metadata__"] == {"format": "pt"}  # transformers refuses a file without it
        found |= tensors
    assert step_in((found, state(41)[1])) == 41


@pytest.mark.parametrize("more", [0, 1])
def test_up_to_the_size_it_is_the_one_file_as_without_a_limit(tmp_path, more):
    tensors, document = state(1)
    snapshot.write(tmp_path / "alone", tensors, document)
    limited, size = tmp_path / "limited", 8 * 5201 - more
    snapshot.write(limited, tensors, document, most=size)
    assert (limited.exists(), files.index_of(limited).exists()) == (not more, bool(more))
    assert more or limited.read_bytes() == (tmp_path / "alone").read_bytes()


def test_one_tensor_that_is_larger_is_one_file(tmp_path):
    snapshot.write(tmp_path / "file", {"model.a": torch.ones(100)}, {"step": 1}, most=10)
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("name", ["snapshot.safetensors", "snapshot.safetensors.index.json"])
def test_what_is_written_is_read(written, lazily, name):
    tensors, document = snapshot.read(written.with_name(name), lazily)
    tensors = {name: snapshot.load(values) for name, values in tensors.items()} if lazily else tensors
    assert step_in((tensors, document)) == 41 and {key: document[key] for key in state(41)[1]} == state(41)[1]


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors*")}


def test_the_same_state_is_the_same_bytes_also_from_a_copy(tmp_path):
    """In the background, each file is written from its image in memory."""
    tensors, document = state(5)
    turned = [dict(reversed(part.items())) for part in (tensors, document)]
    snapshot.write(tmp_path / "snapshot.safetensors", *turned, most=MOST)
    directory, record = directory_of(tmp_path / "run"), Record(time.monotonic())
    record.open(directory.log)
    saver = Saver(directory, record)
    saver.save(tensors, document, best=False, snapshot=True)
    for values in tensors.values():
        values.fill_(-1)
    saver.settle()
    directory.release()
    assert len(bytes_of(tmp_path)) == 4 and bytes_of(tmp_path / "run") == bytes_of(tmp_path) and saver.buffer.nbytes > 8 * 5201


def test_another_content_or_split_has_other_names(tmp_path):
    """Otherwise a set would overwrite the set in use."""
    seen = set()
    for number, most in enumerate((MOST, MOST - 2000, 9000)):
        for value in (0.0, 1.0):
            tensors = state(5)[0] | {"optim.step.a": torch.tensor([value])}
            folder = tmp_path / f"{number}-{value}"
            folder.mkdir()
            snapshot.write(folder / "snapshot.safetensors", tensors, state(5)[1], most=most)
            for name, digest in bytes_of(folder).items():
                assert name.endswith("index.json") or (name, digest) in seen or name not in {other for other, _ in seen}
                seen.add((name, digest))


def test_everything_that_an_index_names_is_on_the_disk_before_the_index_has_its_name(tmp_path, monkeypatch):
    done = []

    def noting(name: str):
        call = getattr(os, name)

        def noted(target, *args):
            kind = Path(args[0]).suffix if args else "folder" if stat.S_ISDIR(os.fstat(target).st_mode) else "file"
            done.append((name, kind))
            return call(target, *args)

        monkeypatch.setattr(os, name, noted)

    noting("fsync")
    noting("replace")
    snapshot.write(tmp_path / "snapshot.safetensors", *state(1), most=MOST)
    first = [("fsync", "file")] * 4 + [("replace", ".safetensors")] * 3
    assert done == [*first, ("fsync", "folder"), ("replace", ".json"), ("fsync", "folder")]


# ---- in a run directory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [*itertools.product([MOST, ONE], repeat=3)], ids=str)
def test_from_one_file_to_a_set_and_back_nothing_stale_is_left(tmp_path, sizes):
    for step, most in enumerate(sizes, 1):
        save(tmp_path, step, most=most, best=True)
        assert step_in(load(tmp_path)) == step
        assert_nothing_stale(tmp_path)
        found = [snapshot.read(tmp_path / f"{name}.safetensors") for name in ("snapshot", "best")]
        assert [*map(step_in, found)] == [step, step]
    assert step_in(snapshot.read(tmp_path / "snapshot.prev.safetensors")) == 2


def _save_and_die(folder: Path, place: int, links: bool, most: int, best: bool) -> None:
    if not links:
        os.link = _no_link
    directory, boundaries = directory_of(folder, most), itertools.count()

    def at_call(frame, event: str, function) -> None:
        # Ignore calls on a lock by the threads that compute checksums: their number varies.
        if event != "c_call" or function.__name__ not in ("link", "unlink", "replace", "fsync", "pwrite"):
            return
        if not isinstance(function.__self__, str) and next(boundaries) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(at_call)
    (directory.save_best if best else directory.save)(*state(3))
    sys.setprofile(None)


@pytest.mark.parametrize("before, after", [(MOST, MOST), (ONE, MOST), (MOST, ONE)], ids=["sets", "to a set", "to a file"])
@pytest.mark.parametrize(
    "best, links", [(False, True), (False, False), (True, True)], ids=["hard links", "no hard links", "best"]
)
@pytest.mark.fault(31)
def test_killed_at_any_boundary_of_a_save_the_old_set_or_the_new_one_is_there_whole(tmp_path, before, after, best, links):
    save(tmp_path / "before", 1, 2, most=before, best=True)
    found = []
    for place in itertools.count():
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(place))
        job = ranks.fork(tmp_path, ranks.call("test_files", "_save_and_die", folder, place, links, after, best))
        if job.codes == [0]:
            break
        assert job.codes == [-signal.SIGKILL], job.err
        loaded = load(folder)
        found.append(step_in(snapshot.read(folder / "best.safetensors") if best else loaded))
        assert not best or step_in(loaded) == 2
        save(folder, 4, most=after)
        assert_nothing_stale(folder)
        steps = [step_in(snapshot.read(folder / f"{name}.safetensors")) for name in ("snapshot", "snapshot.prev", "best")]
        assert steps == [4, step_in(loaded), found[-1] if best else 2]
    assert len(found) >= 12, "these are not all boundaries of a save"
    assert found == sorted(found) and {*found} == {2, 3}, "first the old state, then the new one"
    ended = [step_in(load(folder)), step_in(snapshot.read(folder / "best.safetensors"))]
    assert ended == ([2, 3] if best else [3, 2])


@pytest.mark.parametrize("damage", ["missing", "short", "one byte", "index"])
@pytest.mark.fault(34)
def test_a_damaged_set_falls_back_and_never_takes_the_place_of_the_whole_one(tmp_path, capsys, damage):
    save(tmp_path, 1, 2)
    index = tmp_path / "snapshot.safetensors.index.json"
    victim = index if damage == "index" else tmp_path / sorted(named_by(index))[1]
    raw = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(raw[: len(raw) // 2] if damage == "short" else raw[:-9] + b"x" + raw[-8:])
    directory = directory_of(tmp_path)
    assert step_in(directory.load()) == 1
    warning = capsys.readouterr().out
    assert warning.startswith("warning: ") and str(index) in warning and "snapshot.prev.safetensors.index.json" in warning
    assert "moves that file to snapshot.damaged.safetensors.index.json" in warning
    directory.save(*state(3))
    directory.release()
    assert step_in(load(tmp_path)) == 3 and step_in(snapshot.read(tmp_path / "snapshot.prev.safetensors")) == 1
    assert (tmp_path / "snapshot.damaged.safetensors.index.json").exists()
    if damage != "missing":
        assert victim.name in names(tmp_path) or damage == "index", "what may be rescued is kept"


def test_of_a_file_and_a_set_the_one_that_is_further_is_loaded_and_the_other_is_named(tmp_path, capsys):
    """The state after a kill between the commit of one and the removal of the other. Opening the folder removes nothing."""
    for step, most in ((3, ONE), (4, MOST), (5, ONE)):
        save(tmp_path / str(step), step, most=most)
    for older, newer in ((3, 4), (4, 5)):
        folder = tmp_path / f"{older}-{newer}"
        for step in (older, newer):
            shutil.copytree(tmp_path / str(step), folder, dirs_exist_ok=True)
        before = names(folder)
        assert step_in(load(folder)) == newer and names(folder) == before
        assert re.search(r"warning: \S+/snapshot.safetensors\S* is there too, and not as far", capsys.readouterr().out)
        save(folder, 6)
        assert_nothing_stale(folder)
        assert step_in(load(folder)) == 6


@pytest.mark.parametrize("newer, name", [(MOST, "snapshot.safetensors.index.json"), (ONE, "snapshot.safetensors")])
def test_of_a_file_and_a_set_one_that_is_damaged_is_not_passed_over_in_silence(tmp_path, capsys, newer, name):
    """The damaged one may be the later one."""
    save(tmp_path / "old", 3, most=ONE if newer == MOST else MOST)
    save(tmp_path / "new", 4, 5, most=newer)
    shutil.copytree(tmp_path / "old", tmp_path / "new", dirs_exist_ok=True)
    damaged = tmp_path / "new" / name
    damaged.write_bytes(b"garbage")
    assert step_in(load(tmp_path / "new")) == 4
    assert f"warning: {damaged} is not a whole snapshot" in capsys.readouterr().out


def test_two_damaged_sets_are_refused_and_stay(tmp_path):
    save(tmp_path, 1, 2)
    for path in tmp_path.glob("snapshot-*-00002-of-*"):
        path.write_bytes(b"garbage")
    before = names(tmp_path)
    with pytest.raises(SnapshotError, match=r"snapshot\.safetensors\.index.*snapshot\.prev\.safetensors\.index.*--fresh"):
        load(tmp_path)
    assert names(tmp_path) == before


def test_a_link_to_an_index_that_leads_nowhere_is_no_empty_directory(tmp_path):
    tmp_path.joinpath("snapshot.safetensors.index.json").symlink_to("/purged/index.json")
    with pytest.raises(SnapshotError, match=r"leads to /purged/index.json, which is not there"):
        load(tmp_path)


def test_fresh_moves_a_set_aside_whole(tmp_path):
    save(tmp_path, 1, 2, best=True)
    before = names(tmp_path)
    RunDirectory(str(tmp_path), "job-2", fresh=True).release()
    assert names(tmp_path) == {"old-1"} and names(tmp_path / "old-1") == before
    assert [step_in(snapshot.read(tmp_path / "old-1" / f"{name}.safetensors")) for name in ("snapshot", "best")] == [2, 2]
    assert load(tmp_path) is None


def test_files_of_others_are_left_alone(tmp_path):
    """Such as a set that the user renamed, and another program's set."""
    save(tmp_path, 1)
    kept = {"keep.safetensors.index.json", *named_by(tmp_path / "snapshot.safetensors.index.json")}
    (tmp_path / "keep.safetensors.index.json").write_bytes((tmp_path / "snapshot.safetensors.index.json").read_bytes())
    for name in ("model-00001-of-00002.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes(b"")
        kept.add(name)
    save(tmp_path, 2, 3)
    assert kept <= names(tmp_path) and step_in(snapshot.read(tmp_path / "keep.safetensors.index.json")) == 1


def test_on_a_full_disk_the_old_set_stays_and_no_other_file(tmp_path):
    save(tmp_path, 1, 2)
    before = names(tmp_path)
    job = ranks.fork(tmp_path.parent, ranks.call("test_files", "_save_without_space", tmp_path))
    assert job.codes == [8] and "free space and submit again" in job.out[0]
    assert step_in(load(tmp_path)) == 2 and names(tmp_path) < before


def _save_without_space(folder: Path) -> int:
    files_limited_to(MOST + 2000)()  # the second file is larger than that
    directory = directory_of(folder)
    try:
        directory.save(*state(3))
    except StorageError as error:
        print(error)
        return error.code
    return 0


def test_an_index_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    for module in (files, snapshot):
        monkeypatch.setattr(module, "MOST_HEADER", 2000)
    with pytest.raises(StorageError, match="in a new --run-dir"):
        snapshot.write(tmp_path / "snapshot.safetensors", state(2)[0], state(2)[1] | {"history": "x" * 2000}, most=MOST)
    assert step_in(load(tmp_path)) == 1


# ---- hostile and damaged indexes ------------------------------------------------------------------------------------


def _other(index: dict, name: str) -> dict:
    return index | dict(weight_map=index["weight_map"] | {"model.a": name})


def _placed(index: dict, tensor: str) -> dict:
    """Put the tensor in model.a's file."""
    return index | dict(weight_map=index["weight_map"] | {tensor: index["weight_map"]["model.a"]})


def _without(index: dict, tensor: str) -> dict:
    return index | dict(weight_map={name: file for name, file in index["weight_map"].items() if name != tensor})


HOSTILE = {
    "a folder above": lambda index: _other(index, "../file.safetensors"),
    "an absolute path": lambda index: _other(index, "/etc/file.safetensors"),
    "no safetensors": lambda index: _other(index, "/etc/passwd"),
    "a folder": lambda index: _other(index, ".."),
    "itself": lambda index: _other(index, "snapshot.safetensors.index.json"),
    "a zero byte": lambda index: _other(index, "a\0b.safetensors"),
    "no text": lambda index: _other(index, 7),
    "a file that is not there": lambda index: _other(index, "none.safetensors"),
    "a tensor in another file": lambda index: _placed(index, "model.b"),
    "a tensor in no file": lambda index: _placed(index, "model.z"),
    "a tensor left out": lambda index: _without(index, "model.b"),
    "a file left out": lambda index: _without(index, "model.a"),
    "another size": lambda index: index | dict(metadata=index["metadata"] | dict(total_size=1)),
    "no document": lambda index: index | dict(metadata=dict(total_size=index["metadata"]["total_size"])),
    "a document that is a list": lambda index: index | dict(metadata=index["metadata"] | dict(ddp_core=[])),
    "a document without format": lambda index: index | dict(metadata=index["metadata"] | dict(ddp_core={})),
    "no metadata": lambda index: dict(weight_map=index["weight_map"]),
    "no names": lambda index: dict(metadata=index["metadata"]),
    "names that are a list": lambda index: index | dict(weight_map=[*index["weight_map"]]),
    "a list": lambda index: [],
    "what a terminal obeys": lambda index: index | dict(weight_map={"\x1b[2J" * 99: "\x1b[2J" * 99}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.fault(36)
def test_a_hostile_index_is_refused_in_a_line(written, capsys, change):
    written.write_text(json.dumps(change(json.loads(written.read_bytes()))))
    before = names(written.parent)
    for read in (snapshot.read, lambda path: snapshot.read(path, lazily=True), show.verify):
        with pytest.raises(SnapshotError) as caught:
            read(written)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 700 and str(written.parent) in str(caught.value)
    assert show.main(["show", str(written)]) in (0, 5)  # show does not verify the document
    assert capsys.readouterr().err.count("\n") <= 1 and names(written.parent) == before


@pytest.mark.parametrize("which", ["index", "file"])
@pytest.mark.fault(36)
def test_a_header_of_93_mb_is_refused_before_it_is_read(written, which):
    path = written if which == "index" else written.with_name(sorted(named_by(written))[0])
    with open(path, "r+b") as file:
        if which == "file":
            file.write(struct.pack("<Q", 93 * 2**20))
        file.truncate(93 * 2**20)
    for read in (snapshot.read, lambda path: snapshot.read(path, lazily=True), show.show):
        with pytest.raises(SnapshotError, match="its header should have 97517568 bytes"):
            read(written)


@pytest.mark.parametrize("which", ["index", "file"])
@pytest.mark.fault(36)
def test_a_pipe_is_not_waited_for(written, which):
    path = written if which == "index" else written.with_name(sorted(named_by(written))[0])
    path.unlink()
    os.mkfifo(path)
    for read in (snapshot.read, show.verify):
        with pytest.raises(SnapshotError, match="it is no file"):
            read(written)


@pytest.mark.fault(35)
def test_a_flipped_bit_anywhere_in_a_set_changes_nothing_in_silence(written):
    good, unnoticed = snapshot.read(written), []
    for path in sorted(written.parent.iterdir()):
        raw = path.read_bytes()
        for bit in range(0, 8 * len(raw), 5 if path == written else 997):
            path.write_bytes(raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :])
            try:
                tensors, document = snapshot.read(written)
            except SnapshotError:
                continue
            if document != good[1] or any(not torch.equal(tensors[name], good[0][name]) for name in good[0]):
                unnoticed.append((path.name, bit))
        path.write_bytes(raw)
    assert not unnoticed


# ---- show, verify, diff ---------------------------------------------------------------------------------------------


def test_show_verify_and_diff_know_sets(written, tmp_path, capsys):
    tensors, document = state(41)
    document |= dict(steps_per_epoch=14, problem={}, data="abc", best=None, world_size=1, history=[])
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    snapshot.write(one, tensors, document)
    snapshot.write(other, tensors, document, most=MOST)
    assert show.main(["show", str(other)]) == show.main(["show", f"{other}.index.json"]) == 0
    assert capsys.readouterr().out.count("5 tensors, 0.042 MB") == 2
    assert show.main(["verify", str(one), str(other)]) == 0
    assert show.main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.endswith("they hold the same\n")
    tensors["model.b"][3] += 0.5
    snapshot.write(other, tensors, document, most=MOST)
    assert show.main(["diff", f"{other}.index.json", str(one)]) == 1
    assert "model.b: 1 of 900 numbers differ, by at most 0.5" in capsys.readouterr().out


def test_of_a_file_of_a_set_it_is_said_where_the_document_is(written):
    for read in (snapshot.read, lambda path: snapshot.read(path, lazily=True), show.show):
        with pytest.raises(SnapshotError, match=r"it has no document; of a set, that is in the index"):
            read(written.with_name(min(named_by(written))))


# ---- a run ----------------------------------------------------------------------------------------------------------

RUN = "--epochs 3 --precision fp64"
SETS = "--max-shard-size 50KB"


def test_a_run_goes_from_one_file_to_a_set_and_back_bit_for_bit(finished, tmp_path):
    stops = [in_turn(at_step(number, signalled(signal.SIGTERM))) for number in (3, 15)]
    for flags, stop in (("", stops[0]), (SETS, stops[1])):
        job = train(tmp_path / "run", f"{RUN} {flags}", 2, faults={0: stop}, code=75)
        index = job.run_dir / "snapshot.safetensors.index.json"
        assert index.exists() == bool(flags) != job.snapshot.exists()
        if flags:
            assert step_of(job) == job.records("end")[-1]["step"] and len(named_by(index)) > 2
    job = train(tmp_path / "run", RUN, 2, code=0)
    assert_same_run(job, finished(RUN, 2))
    assert_nothing_stale_of_a_run(job.run_dir)


def assert_nothing_stale_of_a_run(folder: Path) -> None:
    (folder / "run.jsonl").rename(folder.parent / "run.jsonl")
    assert_nothing_stale(folder)
    (folder.parent / "run.jsonl").rename(folder / "run.jsonl")


def sets_of(job: ranks.Job) -> dict[str, str]:
    return bytes_of(job.run_dir)


def test_killed_and_resumed_a_run_with_sets_ends_as_one_that_was_not(finished, tmp_path):
    flags = f"{RUN} {SETS} --save-steps 5"
    job = train(tmp_path / "run", flags, 2, faults={0: at_step(17, signalled(signal.SIGKILL))})
    assert job.codes == [-signal.SIGKILL, 7]
    again, reference = train(tmp_path / "run", flags, 2, code=0), finished(flags, 2)
    assert [loss.hex() for loss in again.losses] == [loss.hex() for loss in reference.losses]
    assert sets_of(again) == sets_of(reference)
    assert_nothing_stale_of_a_run(again.run_dir)


def test_at_every_world_size_the_files_have_equal_bytes(finished):
    flags = f"{RUN} {SETS} --reduction canonical"
    one, *others = (sets_of(finished(flags, world_size)) for world_size in (1, 2, 4))
    indexes = {name for name in one if name.endswith("index.json")}
    assert len(indexes) == 3 and len(one) > 9
    for other in others:  # the index holds the world size
        assert other.keys() == one.keys() and {name for name in one if one[name] != other[name]} == indexes


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sharded_run_reads_a_set_and_writes_it_to_the_bit(finished, tmp_path, world_size):
    """Like a single file (test_sharding.py), except for the world size in the index."""
    flags = f"--optimizer adamw {SETS}"
    reference = finished(flags, 2)
    index = reference.run_dir / "snapshot.safetensors.index.json"
    (tmp_path / "run").mkdir()
    for name in (index.name, *named_by(index)):
        shutil.copy(reference.run_dir / name, tmp_path / "run")
    before = bytes_of(tmp_path / "run")
    faults = dict.fromkeys(range(world_size), saving_at_once)
    job = train(tmp_path / "run", f"{flags} --sharding full --epochs 99", world_size, faults=faults, code=75)
    after = bytes_of(job.run_dir)
    assert len(before) > 3 and after.keys() == before.keys() | {"snapshot.prev.safetensors.index.json"}
    assert {name for name in before if after[name] != before[name]} == ({index.name} if world_size > 2 else set())
    assert_nothing_stale_of_a_run(job.run_dir)


def test_a_sharded_run_with_sets_goes_on_from_a_file_and_ends_along_the_same_losses(finished, tmp_path):
    train(tmp_path / "run", RUN, 2, faults={0: at_step(3, signalled(signal.SIGTERM))}, code=75)
    stop = {0: at_step(15, signalled(signal.SIGTERM))}
    train(tmp_path / "run", f"{RUN} {SETS} --sharding full", 2, faults=stop, code=75)
    job = train(tmp_path / "run", f"{RUN} {SETS} --sharding full", 4, code=0)
    assert_same_training(job, finished(RUN, 2))
    assert_nothing_stale_of_a_run(job.run_dir)


# ---- written by several ranks ---------------------------------------------------------------------------------------

SHARDED = f"{RUN} --sharding full {SETS}"


def telling() -> None:
    """Print the number of each file that this rank writes."""
    from ddp_core import sharding

    put = sharding.put

    def told(draft, gathered):
        sums = put(draft, gathered=gathered)
        print("put", draft.path.name.split(".")[3], flush=True)
        return sums

    sharding.put = told


def put_by(job: ranks.Job) -> list[set[int]]:
    """For each rank, the numbers of its files in a set."""
    return [{int(line.split()[1]) for line in out.splitlines() if line.startswith("put ")} for out in job.out]


def by_rank_0_alone() -> None:
    from ddp_core import sharding

    sharding.Writers._deal = lambda writers, count: [0] * count
    telling()


@pytest.mark.parametrize(
    "world_size, size, expected",
    [
        (1, "50KB", [{0, 1, 2, 3, 4}]),
        (2, "50KB", [{0, 2, 4}, {1, 3}]),
        (4, "50KB", [{0, 4}, {1}, {2}, {3}]),
        (4, "200KB", [{0}, set(), {1}, set()]),  # on two nodes of two ranks: one writer per node
    ],
)
def test_every_rank_writes_its_files_of_a_set_and_the_bytes_are_those_of_one_writer(tmp_path, world_size, size, expected):
    flags = f"{RUN} --sharding full --max-shard-size {size}"
    jobs = [
        train(tmp_path / name, flags, world_size, faults=dict.fromkeys(range(world_size), fault), code=0)
        for name, fault in (("parallel", telling), ("alone", by_rank_0_alone))
    ]
    parallel, alone = jobs
    assert put_by(parallel) == expected
    assert put_by(alone) == [{*range(len(set().union(*expected)))}, *[set()] * (world_size - 1)]
    assert bytes_of(parallel.run_dir) == bytes_of(alone.run_dir) and parallel.losses == alone.losses
    snapshot.read(parallel.snapshot)
    assert_nothing_stale_of_a_run(parallel.run_dir)


def test_all_files_of_a_set_are_written_at_once(tmp_path):
    """Each writer waits at its first tensor until the others have reached theirs."""
    flags = "--epochs 1 --precision fp64 --sharding full --max-shard-size 200KB"
    faults = {rank: partial(waiting_for_each_other, tmp_path, rank) for rank in range(2)}
    assert put_by(train(tmp_path / "run", flags, 2, faults=faults, code=0)) == [{0}, {1}]


def waiting_for_each_other(folder: Path, rank: int) -> None:
    from ddp_core import sharding

    telling()
    put = sharding.put

    def together(draft, gathered):
        def first(name):
            whole = gathered(name)
            (folder / f"has-{rank}").touch()
            while not (folder / f"has-{1 - rank}").exists():
                time.sleep(0.01)
            return whole

        return put(draft, gathered=first)

    sharding.put = together


def test_a_writer_gathers_no_more_tensors_than_it_can_put_down(monkeypatch, tmp_path):
    from ddp_core import sharding

    tensors = {f"model.{n}": torch.full((4,), float(n)) for n in range(9)}
    taken, wholes = [], []
    peers = SimpleNamespace(rank=0, world_size=1, broadcast=lambda value: value, reduce=lambda most: (None, most))
    writers = sharding.Writers(tensors, SimpleNamespace(peers=peers, rank_0_writes=False, step=1))
    monkeypatch.setattr(sharding.Writers, "_whole", lambda self, name: wholes.append(name) or self.tensors[name])
    put = sharding.put

    def slowly(draft, gathered):
        def one(name):
            taken.append(gathered(name))
            end = time.monotonic() + 20
            while len(wholes) < min(len(taken) + 2, 9) and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.01)
            assert len(wholes) == min(len(taken) + 2, 9), "one is put down, one waits, one was gathered"
            return taken[-1]

        return put(draft, gathered=one)

    monkeypatch.setattr(sharding, "put", slowly)
    snapshot.write(tmp_path / "file", tensors, {"step": 1}, put_drafts=writers.lead)
    assert len(taken) == 9 and all(
        torch.equal(values, tensors[name]) for name, values in snapshot.read(tmp_path / "file")[0].items()
    )


@pytest.mark.parametrize("world_size, rank", [(2, 0), (2, 1), (4, 3)])
@pytest.mark.fault(32)
def test_a_full_disk_of_any_writer_ends_all_ranks_and_the_old_set_stays(finished, tmp_path, world_size, rank):
    fault = environment(DDP_FAULT=f"enospc save=20 rank={rank}")
    job = train(tmp_path / "run", SHARDED, world_size, faults=dict.fromkeys(range(world_size), fault), code=8)
    assert "No space left on device" in job.error and "free space and submit again" in job.error
    assert str(job.run_dir) in job.error and f" of 5, by rank {rank} on {socket.gethostname()}: " in job.error
    assert step_of(job) == 14
    assert_nothing_stale_of_a_run(job.run_dir)
    assert_same_run(train(tmp_path / "run", SHARDED, world_size, code=0), finished(SHARDED, world_size))


def test_a_file_that_does_not_fit_half_way_ends_all_ranks_though_they_go_on_gathering(finished, tmp_path):
    job = train(tmp_path / "run", SHARDED, 4, faults={1: at_step(20, files_limited_to(100_000))}, code=8)
    assert "file 2 of 5, by rank 1 on" in job.error and "File too large" in job.error
    assert step_of(job) == 14 and not list(job.run_dir.glob(".*"))
    assert_same_run(train(tmp_path / "run", SHARDED, 4, code=0), finished(SHARDED, 4))


def dying_with_a_draft() -> None:
    """Die when the first file of the second set is on the disk."""
    from ddp_core import sharding

    put = sharding.put

    def killed(draft, gathered):
        sums = put(draft, gathered=gathered)
        if draft.path.with_name("snapshot.safetensors.index.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return sums

    sharding.put = killed


def dying_before_the_commit() -> None:
    """Die when all files of the second set are on the disk, before they get their names."""
    names_of_files = snapshot.names_of_files

    def killed(path, step, sums):
        if step > 14 and path.name == "snapshot.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        return names_of_files(path, step, sums)

    snapshot.names_of_files = killed


@pytest.mark.parametrize("rank, fault", [(0, dying_before_the_commit), (1, dying_with_a_draft), (3, dying_with_a_draft)])
@pytest.mark.fault(31)
def test_a_writer_that_is_killed_before_the_commit_leaves_the_old_set_whole(finished, tmp_path, rank, fault):
    job = train(tmp_path / "run", SHARDED, 4, faults={rank: fault})
    assert job.codes == [-signal.SIGKILL if n == rank else 7 for n in range(4)], job.err
    assert step_of(job) == 14
    again = train(tmp_path / "run", SHARDED, 4, code=0)
    assert_same_run(again, finished(SHARDED, 4))
    assert sets_of(again) == sets_of(finished(SHARDED, 4))
    assert_nothing_stale_of_a_run(again.run_dir)


def test_where_the_other_ranks_do_not_see_the_run_directory_rank_0_writes_all_files(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    faults = {rank: in_turn(standing_in(tmp_path / place), telling) for rank, place in enumerate(("a", "b"))}
    job = train(tmp_path / "a" / "run", f"{SHARDED} --epochs 1 --run-dir run", 2, faults=faults, code=0)
    assert put_by(job) == [{*range(5)}, set()] and step_of(job) == 14

"""Saving in the background: it copies a single step, one save at a time, and reports when it is durable or has failed.

python -m pytest core/tests/test_background.py
"""

import errno
import fcntl
import itertools
import json
import math
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ranks
import torch
from ddp_core import background, memory, run_directory, snapshot
from ddp_core.background import Saver
from ddp_core.errors import StorageError
from ddp_core.record import Record
from ddp_core.run_directory import RunDirectory
from faults import at_step, files_limited_to, in_turn, signalled, sleeping, slow_disk
from ranks import assert_same_run, step_of, train
from states import BYTES, load, state
from states import step_of as step_in
from test_run_directory import CHANGES_FILES

RUN = "--epochs 3 --precision fp64"  # 14 steps an epoch


def whole(step: int) -> tuple[dict[str, torch.Tensor], dict]:
    tensors, document = state(step)
    return tensors, document | dict(epochs_run=0, history=[[0]])


class Gate:
    """Writes wait until the gate is opened."""

    def __init__(self, monkeypatch):
        self.opened, self.waiting, write = threading.Event(), threading.Event(), snapshot.write

        def waits(*arguments, **source):
            self.waiting.set()
            assert self.opened.wait(30)
            write(*arguments, **source)

        monkeypatch.setattr(run_directory, "write", waits)


@pytest.fixture
def gate(monkeypatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def saver(tmp_path):
    directory, record = RunDirectory(str(tmp_path / "run"), "job-0"), Record(time.monotonic())
    record.open(directory.log)
    saver = Saver(directory, record)
    yield saver
    directory.release()


def on_record(saver: Saver) -> list[dict]:
    return [json.loads(line) for line in saver.directory.log.read_text().splitlines()]


# ---- a copy, and one save at a time ---------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_as_it_was_whatever_is_trained_meanwhile(saver, gate):
    tensors, document = whole(1)
    saver.save(tensors, document, best=True, snapshot=True)
    tensors["model.weight"].fill_(-1)
    document["history"].append([1])
    document["step"] = -1
    gate.opened.set()
    saver.settle()
    for path in (saver.directory.snapshot, saver.directory.best):
        read = snapshot.read(path)
        assert step_in(read) == 1 and read[1]["history"] == [[0]]


def test_a_copy_from_a_device_has_arrived_before_it_is_written(saver, monkeypatch):
    """Into page-locked memory, copy_() returns before the copy is complete."""
    order = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: order.append("arrived"))
    monkeypatch.setattr(run_directory, "write", lambda *arguments, **source: order.append("written"))
    saver.save(*whole(1), best=False, snapshot=True)
    saver.settle()
    assert order == ["arrived", "written"]


def test_it_is_the_file_that_is_written_without_a_copy(saver, tmp_path):
    tensors = {"model.a": torch.ones(3, 5).t(), "optim.step.a": torch.tensor(2.0), "model.b": torch.arange(7) % 2 == 0}
    tensors |= {
        "model.c": torch.empty(0),
        "model.d": torch.arange(5.0, dtype=torch.float64),
        "model.e": torch.ones(3).bfloat16(),
    }
    saver.save(tensors, whole(1)[1], best=False, snapshot=True)
    saver.settle()
    snapshot.write(tmp_path / "plain", tensors, whole(1)[1])
    assert saver.directory.snapshot.read_bytes() == (tmp_path / "plain").read_bytes()


def test_a_disk_that_takes_a_part_of_what_it_is_given_is_given_the_rest(saver, tmp_path, monkeypatch):
    """Disks that are almost full, and network disks, may write fewer bytes than asked."""
    monkeypatch.setattr(snapshot, "PART", snapshot.PAGE)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, start: pwrite(file, content[:1000], start))
    saver.save(*whole(1), best=False, snapshot=True)
    saver.settle()
    snapshot.write(tmp_path / "plain", *whole(1))
    assert saver.directory.snapshot.read_bytes() == (tmp_path / "plain").read_bytes()


def test_a_document_longer_than_a_part_is_written_whole(saver, monkeypatch):
    """A document of 200,000 epochs or more."""
    monkeypatch.setattr(snapshot, "PART", snapshot.PAGE)
    tensors, document = whole(1)
    document |= dict(history=[[epoch, (0.1 * epoch).hex()] for epoch in range(400)])
    for _ in range(2):
        saver.save(tensors, document, best=False, snapshot=True)
        saver.settle()
    for path in (saver.directory.snapshot, saver.directory.previous):
        assert snapshot.read(path)[1]["history"] == document["history"]


@pytest.mark.parametrize("kept", [0, 3])
def test_a_copy_is_written_in_parts_and_one_that_fails_is_the_whole_save_s(saver, tmp_path, monkeypatch, kept):
    """kept: the number of parts that fit on the disk; 0 for no limit."""
    monkeypatch.setattr(snapshot, "PART", snapshot.PAGE)
    pwrite, full = os.pwrite, kept * snapshot.PAGE

    def limited(file: int, content, start: int) -> int:
        if full and start >= full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, content, start)

    monkeypatch.setattr(os, "pwrite", limited)
    saver.save(*whole(1), best=False, snapshot=True)
    if full:
        with pytest.raises(StorageError, match="No space left on device"):
            saver.settle()
        assert not saver.directory.snapshot.exists()
        return
    saver.settle()
    snapshot.write(tmp_path / "plain", *whole(1))
    assert saver.directory.snapshot.read_bytes() == (tmp_path / "plain").read_bytes()


def test_parts_that_a_disk_refuses_at_once_to_write_around_its_cache_are_written_through_it(saver, tmp_path, monkeypatch):
    """The second refusal comes after the first has already switched the file."""
    monkeypatch.setattr(snapshot, "PART", snapshot.PAGE)
    flags, calls, both, switched, pwrite = [0], itertools.count(), threading.Barrier(2), threading.Event(), os.pwrite

    def control(file, command: int, value: int = 0) -> int:
        if command == fcntl.F_GETFL:
            return flags[0]
        flags[0] = value
        if not value & os.O_DIRECT:
            switched.set()
        return 0

    def refused(file: int, content, start: int) -> int:
        call = next(calls)
        if call < 2:
            both.wait(30)
        if call == 1:
            assert switched.wait(30)
        if call < 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, content, start)

    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "pwrite", refused)
    saver.save(*whole(1), best=False, snapshot=True)
    saver.settle()
    snapshot.write(tmp_path / "plain", *whole(1))
    assert saver.directory.snapshot.read_bytes() == (tmp_path / "plain").read_bytes()


def test_the_next_save_waits_and_leaves_the_copy_alone_that_is_written(saver, gate):
    saver.save(*whole(1), best=False, snapshot=True)
    with ThreadPoolExecutor(1) as pool:
        assert gate.waiting.wait(30)
        second = pool.submit(saver.save, *whole(2), best=False, snapshot=True)
        time.sleep(0.2)  # long enough for a copy
        assert not second.done()
        gate.opened.set()
        second.result()
    saver.settle()
    found = [snapshot.read(path) for path in (saver.directory.snapshot, saver.directory.previous)]
    assert [*map(step_in, found)] == [2, 1]


def test_the_copy_is_kept_in_the_same_memory(saver):
    places = []
    for step in (1, 2, 3):
        saver.save(*whole(step), best=False, snapshot=True)
        places.append(saver.buffer.data_ptr())
    assert len({*places}) == 1 and saver.buffer.nbytes >= BYTES


def test_the_memory_grows_with_the_history_of_a_long_run(saver):
    """Each epoch adds a row, until the document exceeds the memory reserved for it."""
    tensors, document = whole(1)
    saver.save(tensors, document, False, True)
    document["history"] = [[epoch, *(math.sqrt(epoch + part).hex() for part in range(3))] for epoch in range(2000)]
    saver.save(tensors, document | {"step": 2}, False, True)
    saver.settle()
    assert len(snapshot.read(saver.directory.snapshot)[1]["history"]) == 2000


# ---- reports of a save ----------------------------------------------------------------------------------------------


def test_a_snapshot_is_on_record_when_it_is_durable_and_not_before(saver, gate):
    saver.save(*whole(7), best=True, snapshot=True)
    assert gate.waiting.wait(30)
    saver.look()
    assert on_record(saver) == []
    gate.opened.set()
    saver.settle()
    [said] = on_record(saver)
    assert (said["kind"], said["step"], said["epochs_run"]) == ("snapshot", 7, 0) and said["copy"] >= BYTES
    assert said["seconds"] > 0 and said["writing"] > 0


def test_the_best_model_alone_is_no_snapshot_on_record(saver):
    saver.save(*whole(7), best=True, snapshot=False)
    saver.settle()
    assert on_record(saver) == [] and not saver.directory.snapshot.exists() and saver.directory.best.exists()


def test_the_best_model_is_durable_before_the_snapshot_that_tells_of_it(saver, monkeypatch):
    """If killed between the two, the resumed run would never write that model."""
    written, write = [], snapshot.write
    monkeypatch.setattr(
        run_directory, "write", lambda path, *rest, **more: [write(path, *rest, **more), written.append(path.name)]
    )
    saver.save(*whole(1), best=True, snapshot=True)
    saver.settle()
    assert written == ["best.safetensors", "snapshot.safetensors"]


def test_a_save_that_fails_is_told_once_by_whoever_asks_next(saver, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", fail)
    saver.save(*whole(1), best=False, snapshot=True)
    saver.pending.exception()
    saver.look()
    assert saver.failed
    with pytest.raises(
        StorageError,
        match=r"snapshot\.safetensors: Input/output error: see to that file system .*; what was saved before",
    ):
        saver.save(*whole(2), best=False, snapshot=True)
    monkeypatch.undo()
    assert not saver.failed and on_record(saver) == [] and not list(saver.directory.folder.glob(".*"))


# ---- the lock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["snapshot", "best"])
def test_who_loses_the_lock_while_he_writes_renames_nothing(folder, monkeypatch, which):
    first, fsync = RunDirectory(str(folder), "job-1"), os.fsync
    before = (folder / "snapshot.safetensors").read_bytes()

    def loses_it(handle):
        (folder / "run.lock").write_text(json.dumps(dict(job_id="job-2", host="another-host", pid=1)))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", loses_it)
    with pytest.raises(StorageError, match=r"run.lock is job job-2 .* now: this job stood still"):
        first.save(*state(9)) if which == "snapshot" else first.save_best(*state(9))
    assert (folder / "snapshot.safetensors").read_bytes() == before and not (folder / "best.safetensors").exists()
    assert not list(folder.glob(".*"))
    first.release()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_without_memory_for_a_copy_it_is_saved_before_training_goes_on_and_a_line_says_so_once(saver, monkeypatch, capsys):
    monkeypatch.setattr(memory, "available", lambda: BYTES - 1)
    for step in (1, 2):
        saver.save(*whole(step), best=False, snapshot=True)
        assert not saver.beside and saver.written(60)  # training waits for it: Trainer._wait_for_save()
        assert step_in(snapshot.read(saver.directory.snapshot)) == step
    saver.settle()
    assert [said["copy"] for said in on_record(saver)] == [0, 0] and saver.buffer.nbytes == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("note=training waits while snapshots are written") and "needs 0.1 MB" in line


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_memory_that_is_promised_and_not_given_is_none(saver, monkeypatch, capsys, error):
    def none(*arguments, **named):
        raise error

    tensors, document = whole(1)
    monkeypatch.setattr(background.torch, "empty", lambda size, **named: torch.zeros(0).byte() if size == 0 else none())
    saver.save(tensors, document, best=False, snapshot=True)
    saver.settle()
    assert on_record(saver)[0]["copy"] == 0 and "training waits" in capsys.readouterr().out


def groups(folder: Path, most: str, taken: int, given_up: int) -> Path:
    """Files like cgroup 2's, with a limit in the first group."""
    folder.mkdir()
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {given_up}\n")
    return folder


def test_memory_is_what_the_cgroup_leaves_too(tmp_path, monkeypatch):
    plain = memory.available()
    assert 2**20 < plain <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(memory, "MEMBER", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/system.slice/job\n")
    left = 1_000_000_000 - 999_500_000 + 300_000
    for most, expected in (("1000000000", [left]), ("max", [])):
        monkeypatch.setattr(memory, "GROUPS", groups(tmp_path / most, most, 999_500_000, 300_000))
        assert memory._of_groups() == expected
        assert memory.available() <= left if expected else memory.available() > 2**20


def test_of_what_a_cgroup_leaves_a_step_takes_its_part(tmp_path, monkeypatch):
    """The last step used 20 MB more at its peak than is in use now, between two steps."""
    numbers, peak = memory._numbers, dict(VmHWM=120_000_000, VmRSS=100_000_000)
    monkeypatch.setattr(memory, "_numbers", lambda path: numbers(path) | (peak if path.name == "status" else {}))
    monkeypatch.setattr(memory, "MEMBER", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(memory, "GROUPS", groups(tmp_path / "groups", "1000000000", 970_000_000, 0))
    assert memory.available() == 10_000_000


def _limited() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (memory._numbers(Path("/proc/self/status"))["VmPeak"] + 2**24,) * 2)
    return 0 if memory.available() <= 2**24 else 1


def test_memory_is_what_ulimit_leaves_too(tmp_path):
    assert ranks.fork(tmp_path, ranks.call("test_background", "_limited")).codes == [0]


# ---- a run ----------------------------------------------------------------------------------------------------------


def slow(seconds: float) -> None:
    """Every fsync takes this long, as on a busy disk."""
    fsync = os.fsync

    def slower(handle):
        time.sleep(seconds)
        fsync(handle)

    os.fsync = slower


def slowly():
    return ranks.call("test_background", "slow", 0.3)


def test_training_goes_on_while_a_snapshot_is_written(finished, tmp_path):
    """Each of seven files takes 0.6 s; an epoch's steps take some milliseconds."""
    job = train(tmp_path / "run", f"{RUN} --eval-every 3 --save-every 9 --save-steps 25", 2, faults={0: slowly()}, code=0)
    records = [json.loads(line) for line in (job.run_dir / "run.jsonl").read_text().splitlines()]
    order = [(record["kind"], record["step"]) for record in records]
    assert order.index(("snapshot", 25)) > order.index(("step", 30)), "the steps after it have waited"
    assert job.records("snapshot")[0]["writing"] > 0.5
    assert_same_run(job, finished(RUN + " --eval-every 3 --save-every 9", 2))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("ends, code", [("done", 0), ("stopped", 75), ("not finite", 6)])
def test_whatever_ends_a_run_its_last_save_is_durable(finished, tmp_path, world_size, ends, code):
    faults = slowly()
    if ends == "stopped":
        faults = in_turn(slowly(), at_step(3, signalled(signal.SIGTERM)))
    if ends == "not finite":
        faults = in_turn(slowly(), at_step(15, ranks.call("test_background", "_no_number")))
    job = train(tmp_path / "run", RUN, world_size, faults={0: faults}, code=code)
    assert step_of(job) == job.records("snapshot")[-1]["step"] == (14 if code == 6 else job.records("end")[-1]["step"])
    assert not list(job.run_dir.glob(".*")) and job.records("end")[-1] == _last_line(job)


def _last_line(job: ranks.Job) -> dict:
    return json.loads((job.run_dir / "run.jsonl").read_text().splitlines()[-1])


def _no_number() -> None:
    """Every gradient norm from now on is NaN."""
    from ddp_core.guard import Guard

    Guard.norm = lambda self, *_: torch.tensor(torch.nan)


def test_a_save_that_fails_beside_the_training_ends_all_ranks_before_the_next_save(finished, tmp_path):
    """The save at step 20 fails; the next would be at step 40."""
    flags = f"{RUN} --save-steps 20 --save-every 9 --eval-every 9"
    full = {0: in_turn(at_step(19, files_limited_to(100_000)), at_step(25, sleeping(1)))}
    job = train(tmp_path / "run", flags, 2, faults=full, code=8)
    assert "snapshot.safetensors" in job.error and f"free space and submit again with --run-dir {tmp_path / 'run'}" in job.error
    assert 19 <= job.records("step")[-1]["step"] < 39 and job.records("snapshot") == []
    assert not list(job.run_dir.glob(".*"))
    assert_same_run(train(tmp_path / "run", flags, 2, code=0), finished(flags, 2))


def test_one_that_fails_at_the_end_of_a_run_does_so_too(tmp_path):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={0: at_step(13, files_limited_to(100_000))}, code=8)
    assert "safetensors" in job.error


def test_when_another_failure_ends_the_run_the_failed_save_is_a_warning(tmp_path):
    faults = in_turn(at_step(3, files_limited_to(100_000)), at_step(4, ranks.call("test_background", "_no_number")))
    job = train(tmp_path / "run", f"{RUN} --save-steps 4", faults={0: faults}, code=6)
    assert "not finite" in job.error and "warning: " in job.out[0] and "snapshot.safetensors" in job.out[0]


# ---- killed ---------------------------------------------------------------------------------------------------------


def _save_beside_and_die(folder: Path, place: int) -> None:
    """Like test_run_directory's, but in the thread that writes."""
    directory, boundaries = RunDirectory(str(folder), "job-1"), itertools.count()
    saver = Saver(directory, Record(time.monotonic()))

    def at_call(frame, event: str, function) -> None:
        if event in ("c_call", "c_return") and function.__name__ in CHANGES_FILES and next(boundaries) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(at_call)
    saver.save(*whole(3), best=False, snapshot=True)
    saver.settle()


def test_killed_at_any_boundary_of_a_save_beside_training_the_old_state_or_the_new_one_is_there_whole(folder):
    found = []
    for place in itertools.count():
        job = ranks.fork(folder.parent, ranks.call("test_background", "_save_beside_and_die", folder, place))
        if job.codes == [0]:
            break
        assert job.codes == [-signal.SIGKILL], job.err
        found.append(step_in(load(folder)))
        for path, step in zip(("snapshot.safetensors", "snapshot.prev.safetensors"), (2, 1), strict=True):
            snapshot.write(folder / path, *state(step))
    assert len(found) >= 12 and found == sorted(found) and {*found} == {2, 3}


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_a_snapshot_is_written_the_run_goes_on_from_it_or_the_one_before(finished, tmp_path, victim):
    """The save at step 28 waits for that of step 14, which takes 0.6 s. The rank is killed one step later."""
    faults = {0: slowly()}
    die = at_step(29, signalled(signal.SIGKILL))
    faults[victim] = in_turn(faults[victim], die) if victim in faults else die
    flags = f"{RUN} --eval-every 3"
    job = train(tmp_path / "run", flags, 2, faults=faults)
    assert (job.codes[victim], job.codes[1 - victim]) == (-signal.SIGKILL, 7)
    assert step_of(job) == (28 if victim else 14), "rank 0 finishes its last save if it lives"
    assert_same_run(train(tmp_path / "run", flags, 2, code=0), finished(flags, 2))


# ---- the time for a save after a stop -------------------------------------------------------------------------------


@pytest.mark.fault(49)
def test_a_save_that_a_stop_may_cut_off_is_told_once(tmp_path):
    """A save takes one second here. There is no note if --grace is long enough or not given."""
    for flags, times in (("--grace 1.9", 1), ("--grace 1000", 0), ("", 0)):
        job = train(tmp_path / f"run{times}{flags[-3:]}", f"{RUN} {flags}", 2, faults={0: slow_disk(0.5)}, code=0)
        assert job.out[0].count("a stop leaves 1.9 s (--grace)") == job.out[0].count("a stop leaves") == times, job.out


def test_a_cgroup_of_version_1_is_that_of_memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory/slurm/job"
    folder.mkdir(parents=True)
    for name, text in dict(limit_in_bytes="1000", usage_in_bytes="900", stat="cache 7\ntotal_inactive_file 50\n").items():
        (folder / f"memory.{name}").write_text(text)
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/elsewhere\n9:memory:/slurm/job\n")
    monkeypatch.setattr(memory, "MEMBER", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    assert memory._of_groups() == [150]

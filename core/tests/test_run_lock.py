"""One job at a time writes in a run directory; --fresh moves existing files aside.

python -m pytest core/tests/test_run_lock.py
"""

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import ranks
from ddp_core import run_lock, snapshot
from ddp_core.errors import PreflightError, StoppedError, StorageError
from ddp_core.record import Record
from ddp_core.run_directory import RunDirectory
from ddp_core.run_lock import RunLock
from ddp_core.stop import StopFlag
from states import load, state, step_of

# ---- one job at a time --------------------------------------------------------------------------------------------


def test_a_second_job_is_refused_by_the_name_of_the_first(folder):
    first = RunDirectory(str(folder), "job-1", fresh=False)
    refusal = rf"--run-dir {re.escape(str(folder))} is in use by job job-1.*{os.getpid()}"
    (draft := folder / ".snapshot.safetensors.0.here.1.tmp").touch()  # the first job is writing this
    with pytest.raises(PreflightError, match=refusal):
        RunDirectory(str(folder), "job-2", fresh=False)
    assert list(folder.glob(".*")) == [draft], "the second job leaves nothing behind, and takes nothing away"
    first.release()
    RunDirectory(str(folder), "job-2", fresh=False).release()
    assert not draft.exists(), "its writer is gone"


def test_a_refused_fresh_job_moves_nothing(folder):
    first = RunDirectory(str(folder), "job-1", fresh=False)
    with pytest.raises(PreflightError):
        RunDirectory(str(folder), "job-2", fresh=True)
    first.release()
    assert step_of(load(folder)) == 2


def _take_and_die(folder: Path) -> None:
    RunDirectory(str(folder), "job-1", fresh=False)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.fault(43)
def test_the_lock_of_a_dead_process_is_taken_over_with_a_warning(folder, capsys):
    job = ranks.fork(folder.parent, ranks.call("test_run_lock", "_take_and_die", folder))
    assert job.codes == [-signal.SIGKILL] and (folder / "run.lock").exists()
    assert step_of(load(folder)) == 2
    assert re.search("warning: .*job-1", capsys.readouterr().out)
    assert not (folder / "run.lock").exists()


OTHER_HOST = {"job_id": "job-1", "host": "another-host", "pid": 1, "pids": "pid:[1]", "processes": "pid:[1]"}


LOCKS = {"whole": json.dumps(OTHER_HOST), "empty": "", "torn": "{", "null": "null", "a list": "[]"}


@pytest.mark.parametrize("content", LOCKS.values(), ids=LOCKS)
def test_a_lock_of_another_host_is_taken_over_once_it_was_silent_for_long(folder, content):
    lock = folder / "run.lock"
    lock.write_text(content)
    os.utime(lock, (0, 0))
    assert step_of(load(folder)) == 2


def test_a_lock_of_another_host_that_falls_silent_is_waited_for(folder, monkeypatch, capsys):
    """The lock's node was lost a moment ago and the job restarted elsewhere. Its own old lock must not refuse it."""
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.1)
    (folder / "run.lock").write_text(json.dumps(OTHER_HOST))
    began = time.monotonic()
    assert step_of(load(folder)) == 2
    assert time.monotonic() - began > 0.4
    assert re.search("job-1 .*looking for .*\n.*taking .* over from job job-1", capsys.readouterr().out)


def test_a_process_of_another_host_with_our_number_is_not_taken_for_dead(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 2)
    dead = 2**22 + 1  # larger than any Linux process number
    lock = folder / "run.lock"
    ours = os.readlink("/proc/self/ns/pid")  # the first container on every machine has the same number
    lock.write_text(json.dumps(OTHER_HOST | {"pid": dead, "pids": ours}))
    beating = threading.Timer(0.3, os.utime, [lock])
    beating.start()
    with pytest.raises(PreflightError, match=r"in use by job job-1 .host another-host"):
        load(folder)
    assert not list(folder.glob(".*")), "the second job leaves nothing behind"


def test_a_live_job_keeps_its_lock_fresh(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.02)
    directory = RunDirectory(str(folder), "job-1", fresh=False)
    os.utime(folder / "run.lock", (0, 0))
    for _ in range(500):
        if (folder / "run.lock").stat().st_mtime > 0:
            break
        time.sleep(0.02)
    assert (folder / "run.lock").stat().st_mtime > 0
    directory.release()


def test_a_file_system_that_is_away_for_a_moment_ends_no_heartbeat(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.05)
    lock, utime, calls = RunLock(folder / "run.lock", "job-1"), os.utime, []

    def away_once(path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        utime(path)

    monkeypatch.setattr(run_lock.os, "utime", away_once)
    end = time.monotonic() + 10
    while len(calls) < 4 and time.monotonic() < end:
        time.sleep(0.02)
    assert len(calls) >= 4 and not lock.lost
    lock.release()


def test_a_lock_that_cannot_be_read_is_not_taken_for_another_s(folder, monkeypatch):
    lock, text = RunLock(folder / "run.lock", "job-1"), run_lock._text
    monkeypatch.setattr(run_lock, "_text", failing_with(116, "Stale file handle"))
    with pytest.raises(
        StorageError, match=r"run\.lock: Stale file handle: see to that file system and submit again with --run-dir"
    ):
        lock.check()
    monkeypatch.setattr(run_lock, "_text", text)
    lock.check()
    lock.release()


def failing_with(number: int, text: str):
    def fail(*_):
        raise OSError(number, text)

    return fail


def test_the_file_server_s_clock_tells_how_fresh_a_lock_is(folder, monkeypatch):
    """Other nodes compare the lock with files that they make there. With a slow local clock, the lock would look dead."""
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.02)
    directory, lock = RunDirectory(str(folder), "job-1", fresh=False), folder / "run.lock"
    now = time.time()
    monkeypatch.setattr(run_lock.time, "time", lambda: now - 3600)
    os.utime(lock, (0, 0))
    end = time.monotonic() + 10
    while lock.stat().st_mtime == 0 and time.monotonic() < end:
        time.sleep(0.02)
    assert lock.stat().st_mtime > now - 60
    directory.release()


# ---- ownership of the lock -----------------------------------------------------------------------------------------


@pytest.mark.fault(42)
def test_of_two_jobs_at_a_dead_lock_the_later_one_is_refused(folder, monkeypatch):
    """It saw the dead owner, then paused. It must not remove the lock of a job that came meanwhile."""
    lock = folder / "run.lock"
    lock.write_text(json.dumps(OTHER_HOST))
    os.utime(lock, (0, 0))
    look, owners = RunLock._content_if_dead, []

    def looks_and_waits(self, path):
        content = look(self, path)
        if not owners:
            owners.append(None)
            owners.append(RunDirectory(str(folder), "job-2"))
        return content

    monkeypatch.setattr(RunLock, "_content_if_dead", looks_and_waits)
    with pytest.raises(PreflightError, match=r"in use by job job-2"):
        RunDirectory(str(folder), "job-3")
    owners[1].save(*state(9))
    owners[1].release()
    assert not list(folder.glob("*run.lock*"))


def test_who_stood_still_while_another_took_the_lock_writes_no_more(folder, monkeypatch):
    """A frozen node resumes beside its successor."""
    first = RunDirectory(str(folder), "job-1")
    before = (folder / "snapshot.safetensors").read_bytes()
    (folder / "run.lock").unlink()
    second = RunDirectory(str(folder), "job-2")
    for write in (first.save, first.save_best):
        with pytest.raises(StorageError, match=r"run.lock is job job-2 .* now: this job stood still"):
            write(*state(9))
    assert (folder / "snapshot.safetensors").read_bytes() == before
    first.release()
    assert (folder / "run.lock").exists(), "the second job's lock is not the first one's to remove"
    second.save(*state(9))
    second.release()


def test_its_record_ends_at_the_next_heartbeat(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.02)
    first = RunDirectory(str(folder), "job-1")
    log = Record(time.monotonic())
    log.open(folder / "run.jsonl", first.lost)
    log.write("step", step=0)
    (folder / "run.lock").unlink()
    second = RunDirectory(str(folder), "job-2")
    for _ in range(500):
        if first.lost():
            break
        time.sleep(0.02)
    log.write("step", step=1)
    assert "stood still" in str(log.failure)
    assert [json.loads(line)["step"] for line in (folder / "run.jsonl").read_text().splitlines()] == [0]
    assert second.lost() is None
    second.release()


def own_lock(**changed) -> dict:
    """A lock of this process."""
    pids = os.readlink("/proc/self/ns/pid")
    return dict(job_id="job-1", host=socket.gethostname(), pid=os.getpid(), pids=pids) | changed


def zombie() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    return child


@pytest.mark.parametrize("owner", ["another process with its number", "a zombie", "a text for a number"])
def test_a_dead_owner_of_this_host_is_not_taken_for_alive(folder, monkeypatch, owner):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.05)
    changed = dict(began="1") if owner.startswith("another") else dict(pid=zombie() if owner == "a zombie" else "x")
    (folder / "run.lock").write_text(json.dumps(own_lock(**changed)))
    assert step_of(load(folder)) == 2


JUNK = [
    "",
    "{",
    "[]",
    "7",
    "null",
    '"x"',
    "[" * 100_000,
    '{"pid": -1}',
    '{"pid": 1e400}',
    '{"pid": ' + "9" * 4000 + "}",
    "x" * 10**6,
]


@pytest.mark.fault(43)
@pytest.mark.parametrize("content", [*JUNK, json.dumps({"job_id": "\x1b[2J\n" * 999, "host": [1] * 9999, "pid": {"a": None}})])
def test_a_lock_that_holds_junk_is_a_dead_job_s(folder, monkeypatch, capsys, content):
    """A short warning names the lock, without its control characters."""
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.02)
    (folder / "run.lock").write_text(content)
    assert step_of(load(folder)) == 2
    said = capsys.readouterr().out.splitlines()
    assert said and all(line.isprintable() and len(line) < 600 and line.startswith("warning: ") for line in said)


def test_a_lock_of_the_future_is_waited_for_no_longer_than_another(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.1)
    lock = folder / "run.lock"
    lock.write_text(json.dumps(OTHER_HOST))
    os.utime(lock, (time.time() + 3600,) * 2)
    began = time.monotonic()
    assert step_of(load(folder)) == 2
    assert time.monotonic() - began < 20


def test_who_waits_for_a_lock_hears_that_it_is_to_stop(folder):
    (folder / "run.lock").write_text(json.dumps(OTHER_HOST))
    stop = StopFlag()
    threading.Timer(0.3, stop._set, [signal.SIGTERM, None]).start()
    with pytest.raises(StoppedError, match=f"SIGTERM before the first step: .* --run-dir {re.escape(str(folder))}"):
        RunDirectory(str(folder), "job-2", stop=stop)


def test_a_lock_that_another_job_has_taken_over_is_not_given_up(folder):
    """After a pause of minutes, during which this job was taken for dead."""
    late, lock = RunDirectory(str(folder), "job-1"), folder / "run.lock"
    lock.write_text(json.dumps(OTHER_HOST))
    late.release()
    assert json.loads(lock.read_text()) == OTHER_HOST


def test_a_lock_says_in_which_container_its_process_has_that_number(folder):
    first = RunDirectory(str(folder), "job-1")
    told = json.loads((folder / "run.lock").read_text())
    first.release()
    assert (told["job_id"], told["host"], told["pid"]) == ("job-1", os.uname().nodename, os.getpid())
    assert told["pids"] == os.readlink("/proc/self/ns/pid")


def of_another_container(pid: int) -> str:
    return json.dumps(OTHER_HOST | {"host": os.uname().nodename, "pid": pid})


def test_a_process_of_another_container_is_not_taken_for_dead_by_its_number(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 2)
    lock = folder / "run.lock"
    lock.write_text(of_another_container(pid=2**22 + 1))
    beating = threading.Timer(0.3, os.utime, [lock])
    beating.start()
    with pytest.raises(PreflightError, match="in use by job job-1"):
        load(folder)


def test_nor_for_alive(folder):
    lock = folder / "run.lock"
    lock.write_text(of_another_container(pid=os.getpid()))
    os.utime(lock, (0, 0))
    assert step_of(load(folder)) == 2


def test_a_local_clock_that_is_wrong_does_not_matter(folder, monkeypatch, capsys):
    """Only the file server's clock gives a lock's age. By the local clock, the lock was silent for an hour."""
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    (folder / "run.lock").write_text(json.dumps(OTHER_HOST))
    assert step_of(load(folder)) == 2
    assert re.search("looking for [01] s", capsys.readouterr().out)


# ---- a fresh start ------------------------------------------------------------------------------------------------


def test_fresh_moves_the_run_aside_and_loses_nothing(folder, capsys):
    (folder / "run.jsonl").write_text("first\n")
    (folder / "best.safetensors").write_bytes(b"of the first run")
    for number in (1, 2):
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        directory = RunDirectory(str(folder), f"job-{number}", fresh=True)
        assert directory.load() is None
        aside = folder / f"old-{number}"
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
        assert [path.name for path in folder.iterdir() if path.is_file()] == ["run.lock"]
        assert str(aside) in capsys.readouterr().out
        directory.save(*state(7))
        directory.release()


def test_fresh_in_an_empty_directory_moves_nothing(tmp_path):
    RunDirectory(str(tmp_path / "run"), "job-1", fresh=True).release()
    assert list((tmp_path / "run").iterdir()) == []


def test_fresh_after_an_aside_was_removed_overwrites_no_other(folder):
    """old-1 removed by hand, old-2 still there: the next one must not be old-2 again."""
    for number in (1, 2):
        directory = RunDirectory(str(folder), "job-1", fresh=True)
        directory.save(*state(number))
        directory.release()
    for path in (folder / "old-1").iterdir():
        path.unlink()
    (folder / "old-1").rmdir()
    kept = step_of(snapshot.read(folder / "old-2" / "snapshot.safetensors"))
    RunDirectory(str(folder), "job-1", fresh=True).release()
    assert step_of(snapshot.read(folder / "old-2" / "snapshot.safetensors")) == kept
    assert len(list(folder.glob("old-*/snapshot.safetensors"))) == 2

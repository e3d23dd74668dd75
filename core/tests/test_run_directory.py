"""The run directory: killed at any point, it holds the old state or the new one, complete, and reports which.

python -m pytest core/tests/test_run_directory.py
"""

import errno
import itertools
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import ranks
from ddp_core import run_directory, snapshot
from ddp_core.errors import SnapshotError, StorageError, fix_of
from ddp_core.run_directory import RunDirectory
from faults import files_limited_to
from states import BYTES, load, state, step_of, steps

# ---- loading ------------------------------------------------------------------------------------------------------


def test_an_empty_directory_has_nothing_to_resume(tmp_path):
    assert load(tmp_path / "new") is None


def test_the_newest_state_is_loaded_and_the_one_before_is_kept(folder, capsys):
    assert steps(folder) == [2, 1]
    assert step_of(load(folder)) == 2
    assert capsys.readouterr().out == ""


def test_a_fresh_run_finds_nothing_of_the_old_one(tmp_path):
    """A remaining file would make the next start resume the old run."""
    names = ("snapshot.safetensors", "snapshot.prev.safetensors", "snapshot.damaged.safetensors", "best.safetensors")
    for name in (*names, "run.jsonl", "ranks.jsonl", "trace.json.gz"):
        (tmp_path / name).write_text("of the old run")
    RunDirectory(str(tmp_path), "job-1", fresh=True).release()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "old-1" and not path.name.startswith(".")) == []
    assert {path.name for path in (tmp_path / "old-1").iterdir()} == {*names, "run.jsonl", "ranks.jsonl", "trace.json.gz"}


@pytest.mark.fault(47)
def test_times_of_the_files_do_not_matter(folder):
    os.utime(folder / "snapshot.safetensors", (0, 0))
    assert step_of(load(folder)) == 2


DAMAGES = {
    "empty": lambda raw: b"",
    "half": lambda raw: raw[: len(raw) // 2],
    "one byte": lambda raw: raw[:-9] + b"x" + raw[-8:],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.fault(34)
def test_a_broken_snapshot_falls_back_with_a_warning(folder, capsys, damage):
    path = folder / "snapshot.safetensors"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert step_of(load(folder)) == 1
    warning = capsys.readouterr().out
    assert warning.startswith("warning: ") and str(path) in warning and "snapshot.prev" in warning


@pytest.mark.fault(45)
def test_what_another_node_has_saved_is_waited_for_where_the_file_system_lags(folder, monkeypatch, capsys):
    """The record names step 2, but the file of step 1 still has its name until the lag is over."""
    monkeypatch.setattr(run_directory, "LAG", 30.0)
    late = folder / "late"
    os.rename(folder / "snapshot.safetensors", late)
    shutil.copy(folder / "snapshot.prev.safetensors", folder / "snapshot.safetensors")
    (folder / "run.jsonl").write_text('{"kind":"snapshot","step":1}\n{"kind":"snapshot","step":2}\n{"kind":"snapshot","step":3')
    threading.Timer(0.5, os.replace, (late, folder / "snapshot.safetensors")).start()
    assert step_of(load(folder)) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.fault(45)
def test_a_snapshot_that_is_older_than_the_record_tells_is_no_secret(folder, monkeypatch, capsys):
    monkeypatch.setattr(run_directory, "LAG", 0.2)
    (folder / "run.jsonl").write_text('{"kind":"snapshot","step":70,"epochs_run":5}\n')
    assert step_of(load(folder)) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: ") and "tells of a snapshot at step 70: the one that is there is of step 2" in line


def test_a_broken_snapshot_never_takes_the_place_of_the_only_whole_one(folder, monkeypatch):
    """The save after a fallback fails, as on a full disk. The snapshot used for the fallback must survive."""
    path = folder / "snapshot.safetensors"
    path.write_bytes(b"garbage")
    directory = RunDirectory(str(folder), "job")
    directory.load()
    monkeypatch.setattr(run_directory, "write", lambda *_, **__: (_ for _ in ()).throw(StorageError("full")))
    with pytest.raises(StorageError, match="full"):
        directory.save(*state(2))
    monkeypatch.undo()
    directory.release()
    assert step_of(load(folder)) == 1 and (folder / "snapshot.damaged.safetensors").read_bytes() == b"garbage"

    directory = RunDirectory(str(folder), "job")
    directory.load()
    directory.save(*state(2))
    directory.save(*state(3))
    directory.release()
    assert steps(folder) == [3, 2]


def test_the_saves_after_a_fall_back_keep_the_one_before_as_ever(folder):
    """The damaged file is set aside once. Later files are complete and become the previous snapshot."""
    (folder / "snapshot.safetensors").write_bytes(b"garbage")
    directory = RunDirectory(str(folder), "job")
    directory.load()
    for step in (2, 3):
        directory.save(*state(step))
    directory.release()
    assert steps(folder) == [3, 2] and (folder / "snapshot.damaged.safetensors").read_bytes() == b"garbage"


def test_a_missing_snapshot_falls_back_with_a_warning(folder, capsys):
    (folder / "snapshot.safetensors").unlink()
    assert step_of(load(folder)) == 1
    assert "warning: " in capsys.readouterr().out


def test_a_run_whose_snapshots_were_purged_is_refused(folder):
    """Its log names a snapshot. A start at epoch 0 would look like a resumed run."""
    (folder / "run.jsonl").write_text('{"kind":"step","step":0}\n{"kind":"snapshot","step":28,"epochs_run":2}\n')
    for name in ("snapshot.safetensors", "snapshot.prev.safetensors"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(SnapshotError, match=r"tells of a snapshot at step 28, .* is not there"):
        load(folder)


def test_of_a_purged_run_half_a_line_at_the_end_of_the_log_tells_nothing(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"kind":"snapshot","step":28,"epochs_run":2}\n{"kind":"snapshot","st')
    with pytest.raises(SnapshotError, match=r"tells of a snapshot at step 28, "):
        load(tmp_path)


def test_a_run_that_never_saved_starts_at_its_beginning(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"kind":"start","step":0}\n{"kind":"epoch","epoch":0}\n')
    assert load(tmp_path) is None


def test_a_link_that_leads_nowhere_is_no_empty_directory(folder):
    for name in ("snapshot.safetensors", "snapshot.prev.safetensors"):
        (folder / name).unlink(missing_ok=True)
    (folder / "snapshot.safetensors").symlink_to("/purged/snapshot.safetensors")
    with pytest.raises(SnapshotError, match=r"leads to /purged/snapshot.safetensors, which is not there"):
        load(folder)


@pytest.mark.fault(40)
def test_a_newer_format_is_no_reason_to_go_back(folder, monkeypatch):
    """A fallback to snapshot.prev would repeat the newer ddp_core's training with the older one."""
    monkeypatch.setattr(snapshot, "FORMAT", snapshot.FORMAT + 1)
    snapshot.write(folder / "snapshot.safetensors", *state(3))
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match=r"has format 3, of {'ddp_core': '0.1.0'}; this ddp_core reads up to format 2"):
        load(folder)


@pytest.mark.parametrize("line", [b"", b',"step":"x"', b',"step":' + b"9" * 5000, b',"step":' + b"[" * 10**5, b"\xff"])
def test_a_log_of_a_purged_run_may_hold_anything(tmp_path, line):
    (tmp_path / "run.jsonl").write_bytes(b'{"kind":"snapshot"' + line + b"}\n")
    with pytest.raises(SnapshotError, match="tells of a snapshot at step "):
        load(tmp_path)


@pytest.mark.fault(36)
@pytest.mark.parametrize("name", ["run.jsonl", "run.lock", "snapshot.safetensors", "snapshot.prev.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises((StorageError, SnapshotError), match=f"{name}.* is no file|it is no file"):
        load(tmp_path / "run")


def test_nothing_temporary_is_left_where_both_files_are_one(folder):
    """A kill between link and write leaves one file with two names, which rename() does not change."""
    (folder / "snapshot.prev.safetensors").unlink()
    os.link(folder / "snapshot.safetensors", folder / "snapshot.prev.safetensors")
    directory = RunDirectory(str(folder), "job")
    directory.save(*state(3))
    assert not list(folder.glob(".*"))
    directory.release()
    assert steps(folder) == [3, 2]


def test_two_broken_files_are_refused_and_stay(folder):
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"garbage")
    with pytest.raises(SnapshotError, match=r"snapshot\.safetensors.*snapshot\.prev\.safetensors.*--fresh"):
        load(folder)
    assert [path.read_bytes() for path in folder.glob("*.safetensors")] == [b"garbage"] * 2


def test_one_broken_file_alone_is_never_taken_for_an_empty_directory(folder):
    (folder / "snapshot.prev.safetensors").unlink()
    (folder / "snapshot.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotError):
        load(folder)


# ---- killed while saving ------------------------------------------------------------------------------------------


def _no_link(*args) -> None:
    raise OSError(errno.EPERM, "this file system has no hard links")


CHANGES_FILES = {"open", "pwrite", "flush", "close", "fsync", "link", "unlink", "replace", "rename", "chmod", "__exit__"}


def _save_and_die(folder: Path, place: int, links: bool) -> None:
    """Save step 3. At the place-th boundary, before or after a call that changes files, kill this process."""
    if not links:
        os.link = _no_link
    directory, boundaries = RunDirectory(str(folder), "job-1", fresh=False), itertools.count()

    def at_call(frame, event: str, function) -> None:
        if event in ("c_call", "c_return") and function.__name__ in CHANGES_FILES and next(boundaries) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(at_call)
    directory.save(*state(3))
    sys.setprofile(None)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.fault(31)
def test_killed_at_any_boundary_of_a_save_the_old_state_or_the_new_one_is_there_whole(folder, links):
    found = []
    for place in itertools.count():
        job = ranks.fork(folder.parent, ranks.call("test_run_directory", "_save_and_die", folder, place, links))
        if job.codes == [0]:
            break  # no more boundaries: the save finished
        assert job.codes == [-signal.SIGKILL], job.err
        found.append(step_of(load(folder)))
        assert not list(folder.glob(".*")), "what the killed writer has left is swept away"
        assert not links or {*steps(folder)} <= {1, 2, 3}, "with links, snapshot.safetensors is never missing"
        for path, step in zip(("snapshot.safetensors", "snapshot.prev.safetensors"), (2, 1), strict=True):
            snapshot.write(folder / path, *state(step))
    assert len(found) >= 12, "these are not all boundaries of a save"
    assert found == sorted(found) and {*found} == {2, 3}, "first the old state, then the new one"
    assert step_of(load(folder)) == 3


def _save_and_die_half_way(folder: Path, size: int) -> None:
    directory = RunDirectory(str(folder), "job-1", fresh=False)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel kills a process that writes beyond the limit
    files_limited_to(size)()
    directory.save(*state(3))


@pytest.mark.parametrize("size", [0, 7, 100, BYTES // 2, BYTES])
@pytest.mark.fault(31)
def test_killed_in_the_middle_of_writing_the_old_state_is_there(folder, size):
    job = ranks.fork(folder.parent, ranks.call("test_run_directory", "_save_and_die_half_way", folder, size))
    assert job.codes == [-signal.SIGXFSZ]
    assert step_of(load(folder)) == 2


# ---- storage that fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["link", "replace", "fsync"])
def test_storage_that_fails_in_a_save_is_a_storage_error(folder, monkeypatch, name):
    directory = RunDirectory(str(folder), "job-1", fresh=False)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, name, fail)
    if name == "link":  # a file system without hard links is not an error
        directory.save(*state(3))
    else:
        with pytest.raises(StorageError, match="Input/output error"):
            directory.save(*state(3))
    monkeypatch.undo()
    directory.release()
    assert step_of(load(folder)) == (3 if name == "link" else 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_space_is_to_be_freed_where_a_disk_quota_or_limit_is_full(number):
    path = Path("runs/1/run.jsonl")
    assert fix_of(OSError(number, ""), path) == "free space and submit again with --run-dir runs/1"
    assert fix_of(OSError(errno.EIO, ""), path) == "see to that file system and submit again with --run-dir runs/1"


def test_a_file_system_that_turned_read_only_is_a_storage_error(folder, monkeypatch):
    directory = RunDirectory(str(folder), "job-1", fresh=False)

    def fail(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("link", "replace", "rename", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(StorageError, match="Read-only file system"):
        directory.save(*state(3))
    monkeypatch.undo()
    directory.release()
    assert step_of(load(folder)) == 2


@pytest.mark.fault(33)
def test_a_run_directory_below_a_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"--run-dir {re.escape(str(tmp_path / 'file' / 'run'))}"):
        RunDirectory(str(tmp_path / "file" / "run"), "job-1", fresh=False)

"""The files of a run, and the lock that keeps a second job out of them."""

import itertools
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddp_core.errors import NewerFormatError, PreflightError, SnapshotError, StorageError
from ddp_core.files import in_form_of, in_place, index_of, of_sets, other_form, sweep
from ddp_core.rehearsal import rehearse
from ddp_core.run_lock import RunLock
from ddp_core.snapshot import no_storage, read, write

LAG = 10.0  # seconds until a snapshot that another node saved should be visible here
IN_VAIN = 2  # restarts without progress, after which the next restart is refused


class RunDirectory:
    """A run's files. Only rank 0 has one."""

    def __init__(
        self, folder: Path | str, job_id: str, fresh: bool = False, new: bool = False, stop=None, most: float = math.inf
    ):
        """Raises PreflightError if another job writes here, StorageError if the folder cannot be written.

        fresh: move an existing run aside. new: refuse an existing run (a job's own directory, at its first start; convert.py).
        stop: the request to stop (stop.py), checked while another job's lock is watched. most: --max-shard-size, bytes.
        """
        self.folder, self.most = Path(folder), most
        self.log = self.folder / "run.jsonl"
        self.snapshot = self.folder / "snapshot.safetensors"
        self.previous = self.folder / "snapshot.prev.safetensors"
        self.damaged = self.folder / "snapshot.damaged.safetensors"
        self.best = self.folder / "best.safetensors"
        self.trace = self.folder / "trace.json.gz"
        self._lock: Any = None  # a RunLock, once it is acquired
        self._fell_back = False
        try:
            if new and not fresh and any(map(Path.exists, map(in_place, (self.log, self.snapshot, self.previous, self.best)))):
                again = f"train.py --run-dir {folder} goes on with it"
                raise PreflightError(f"{folder} has a run already: {again}; else pass another, or --fresh")
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.log.exists() and not self.log.is_file():  # opening a pipe would block
                raise StorageError(f"{self.log} is no file: move it away")
            self._lock = RunLock(self.folder / "run.lock", job_id, stop)
            for leftover in self.folder.glob(".*.tmp"):  # left by a writer that was killed
                leftover.unlink(missing_ok=True)  # missing: its writer was just refused, and removed it
            if fresh:
                self._move_aside()
        except OSError as error:
            self.release()
            raise StorageError(f"--run-dir {folder} cannot be written ({error.strerror}): pass a folder that can be") from error

    def load(self, lazily: bool = False, restart: int = 0) -> tuple[dict[str, torch.Tensor], dict] | None:
        """The snapshot to resume from; None in an empty directory. Raises SnapshotError, never returns None, if it is broken.

        lazily: see snapshot.read. restart: the job's restart number; PreflightError if the two restarts before saved nothing.
        """
        state, saved = self._read(lazily), self.lines("snapshot")
        recorded = _number("step", saved[-1]) if saved else -1
        if state is None and saved:
            raise SnapshotError(
                f"{self.log} tells of a snapshot at step {'unknown' if recorded < 0 else recorded}, and {self.snapshot} is not "
                f"there: restore a copy, or pass --fresh to start again"
            )
        if state and in_place(self.snapshot).exists() and not self._fell_back and _is_before(state, recorded):
            self._wait_for_another()
            state = self._read(lazily)
            if state and _is_before(state, recorded):
                step = state[1]["step"]
                again = f"the one that is there is of step {step}, and what follows is trained again"
                print(f"warning: {self.log} tells of a snapshot at step {recorded}: {again}", flush=True)
        self._check_progress(restart, state[1].get("step") if state else 0)
        return state

    def _check_progress(self, restart: int, step: object) -> None:
        """Raises PreflightError to end a job that its scheduler restarts again and again, and that never saves."""
        if restart <= IN_VAIN:
            return
        lines = self.lines("start", "end")
        places = [place for place, line in enumerate(lines) if line.startswith(b'{"kind":"start"')][-IN_VAIN:]
        before = [(_number("restart", lines[place]), _number("step", lines[place])) for place in places]
        # A stop during a long evaluation also saves, at the same step at which that start began.
        stopped = any(_number("exit_code", line) == 75 for line in lines[min(places, default=0) :])
        if before == [(number, step) for number in range(restart - IN_VAIN, restart)] and not stopped:
            again = f"submit again with --run-dir {self.folder}"
            raise PreflightError(
                f"restart {restart} of this job, and restarts {restart - 2} and {restart - 1} began at step {step}, too, and "
                f"saved nothing: see in its log what ended them, lower --save-minutes perhaps, and {again}"
            )

    def _wait_for_another(self) -> None:
        """Wait at most LAG for a newer snapshot: a shared file system may still show the old one, if another node saved."""
        before, end = in_place(self.snapshot).stat(), time.monotonic() + LAG
        while time.monotonic() < end:
            time.sleep(LAG / 20)
            with suppress(FileNotFoundError):  # while it is replaced
                if not os.path.samestat(before, in_place(self.snapshot).stat()):
                    break

    def _read(self, lazily: bool) -> tuple[dict[str, torch.Tensor], dict] | None:
        broken = []
        for name in (self.snapshot, self.previous):
            path = in_place(name)
            if not path.exists():
                continue
            if (other := other_form(path)).exists():
                print(f"warning: {other} is there too, and not as far: the next save removes it", flush=True)
            try:
                state = read(path, lazily)
            except NewerFormatError:
                raise  # do not fall back: the previous snapshot lacks what has been trained since
            except SnapshotError as error:
                broken.append(str(error))
                continue
            if name == self.previous:
                self._fell_back = bool(broken)
                why = f"{self.snapshot} is missing"
                if broken:
                    damaged = in_form_of(in_place(self.snapshot), self.damaged)
                    why = f"{broken[0]}; the next save moves that file to {damaged.name}"
                print(f"warning: {why}; resuming from {path}", flush=True)
            return state
        if broken:
            raise SnapshotError(f"{' and '.join(broken)}: restore a copy, or pass --fresh to start again")
        for path in (self.snapshot, index_of(self.snapshot), self.previous, index_of(self.previous)):
            if path.is_symlink():
                raise SnapshotError(f"{path} leads to {os.readlink(path)}, which is not there: restore it, or pass --fresh")
        return None

    def lines(self, *kinds: str) -> list[bytes]:
        """The lines of run.jsonl that are of these kinds."""
        if not self.log.exists():
            return []
        words = tuple(f'{{"kind":"{kind}"'.encode() for kind in kinds)
        with open(self.log, "rb") as file:
            return [line for line in file if line.startswith(words) and line.endswith(b"\n")]  # a killed writer may leave half

    def save(self, tensors: dict[str, torch.Tensor], document: dict, **source: Any) -> None:
        """Write the snapshot (source: images or put_drafts for write()) and keep the previous one. Raises StorageError."""
        self._lock.check()
        now = in_place(self.snapshot)
        try:
            rehearse("save", document["step"])
            if self._fell_back:  # else the broken file would replace the only whole one
                os.replace(now, in_form_of(now, self.damaged))
                self._fell_back = False
            elif now.exists():
                spare, previous = self.folder / ".prev.tmp", in_form_of(now, self.previous)
                spare.unlink(missing_ok=True)
                try:
                    os.link(now, spare)  # a link, so that the name always has a file
                except OSError:  # a file system without hard links
                    spare = now
                os.replace(spare, previous)
                if spare != now:  # if both names are one inode, rename() leaves both
                    spare.unlink(missing_ok=True)
            for path in map(in_place, (self.snapshot, self.previous, self.best)):
                if path.exists():
                    other_form(path).unlink(missing_ok=True)
            sweep(self.folder)
        except OSError as error:
            raise no_storage(self.previous, error) from error
        write(self.snapshot, tensors, document, self._lock.check, most=self.most, **source)

    def save_best(self, tensors: dict[str, torch.Tensor], document: dict, **source: Any) -> None:
        """Write best.safetensors, the state with the lowest held-out loss so far. Raises StorageError."""
        write(self.best, tensors, document, self._lock.check, most=self.most, **source)

    def lost(self) -> StorageError | None:
        """The error, if the last heartbeat saw that another job has taken the run directory; else None."""
        return self._lock.loss() if self._lock.lost else None

    def release(self) -> None:
        if self._lock:
            self._lock.release()

    def _move_aside(self) -> None:
        saved = (self.snapshot, self.previous, self.damaged, self.best)
        # Move a set's files before its index: without an index the next save would remove them.
        named = [path for name in saved for path in (name, index_of(name))]
        logs = (self.trace, self.log, self.log.with_name("ranks.jsonl"))
        files = [path for path in (*of_sets(self.folder), *named, *logs) if path.exists()]
        if files:
            aside = next(path for n in itertools.count(1) if not (path := self.folder / f"old-{n}").exists())
            aside.mkdir()
            for path in files:
                os.replace(path, aside / path.name)
            print(f"--fresh: the run that was here is now in {aside}", flush=True)


def _number(name: str, line: bytes) -> int:
    """A whole number in a line of run.jsonl, else -1: the line may hold any text."""
    try:
        value = json.loads(line)[name]
    except (KeyError, ValueError, RecursionError):
        return -1
    return value if type(value) is int and 0 <= value < 10**18 else -1


def _is_before(state: tuple[dict[str, torch.Tensor], dict], recorded: int) -> bool:
    step = state[1].get("step")
    return isinstance(step, int) and step < recorded

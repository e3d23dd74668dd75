"""The files of a run, and the lock that keeps a second job out of them."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from ddp_core.errors import PreflightError, SnapshotError, StorageError
from ddp_core.snapshot import no_storage, read, write

HEARTBEAT = 10.0  # seconds; a lock that was silent six times as long is a dead job's


class RunDirectory:
    """A run's files. Rank 0 alone has one."""

    def __init__(self, folder: str, job_id: str, fresh: bool = False, new: bool = False):
        """Raises PreflightError when another job writes here, StorageError when nobody can.

        fresh: what is there is moved aside. new: what is there is refused: a job's own directory, at its first start.
        """
        self.folder = Path(folder)
        self.log = self.folder / "run.jsonl"
        self.snapshot = self.folder / "snapshot.safetensors"
        self.previous = self.folder / "snapshot.prev.safetensors"
        self.damaged = self.folder / "snapshot.damaged.safetensors"
        self.best = self.folder / "best.safetensors"
        self._lock = self.folder / "run.lock"
        self._fell_back = False
        self._released, self._mine = threading.Event(), ""
        try:
            if new and not fresh and (self.log.exists() or self.snapshot.exists()):
                raise PreflightError(f"--new-run-dir {folder} has a run of another job: pass --run-dir, or --fresh")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._acquire(job_id)
            for leftover in self.folder.glob(".*.tmp"):  # of a writer that was killed
                leftover.unlink()
            if fresh:
                self._move_aside()
        except OSError as error:
            self.release()
            raise StorageError(f"--run-dir {folder} cannot be written ({error.strerror}): pass a folder that can be") from error

    def load(self) -> tuple[dict[str, torch.Tensor], dict] | None:
        """What to resume from; None in an empty directory. A broken snapshot is never taken for none. Raises SnapshotError."""
        broken = []
        for path in (self.snapshot, self.previous):
            if not path.exists():
                continue
            try:
                state = read(path)
            except SnapshotError as error:
                broken.append(str(error))
                continue
            if path == self.previous:
                self._fell_back = bool(broken)
                aside = f", and the next save moves that file to {self.damaged.name}" if broken else ""
                why = broken[0] if broken else f"{self.snapshot} is missing"
                print(f"warning: {why}; resuming from {path}{aside}", flush=True)
            return state
        if broken:
            raise SnapshotError(f"{' and '.join(broken)}: restore a copy, or pass --fresh to start again")
        return None

    def save(self, tensors: dict[str, torch.Tensor], document: dict) -> None:
        """Write the snapshot and keep the one before it. Raises StorageError."""
        try:
            if self._fell_back:  # else it would take the place of the only whole one
                os.replace(self.snapshot, self.damaged)
                self._fell_back = False
            elif self.snapshot.exists():
                spare = self.folder / ".prev.tmp"
                spare.unlink(missing_ok=True)
                try:
                    os.link(self.snapshot, spare)  # so that snapshot.safetensors is never missing
                except OSError:  # a file system without hard links
                    spare = self.snapshot
                os.replace(spare, self.previous)
        except OSError as error:
            raise no_storage(self.previous, error) from error
        write(self.snapshot, tensors, document)

    def release(self) -> None:
        """Give the lock up, unless it is another's by now."""
        self._released.set()
        with suppress(OSError):
            if self._lock.read_text() == self._mine:
                self._lock.unlink()

    def _acquire(self, job_id: str) -> None:
        pids = os.readlink("/proc/self/ns/pid")  # two containers on a host have their own process numbers
        me = dict(job_id=job_id, host=socket.gethostname(), pid=os.getpid(), pids=pids)
        self._mine = json.dumps(me)
        if self._lock.exists():
            self._refuse_if_alive(me)
            self._lock.unlink(missing_ok=True)
        try:
            # Not flock: Lustre needs a mount option for it, and NFS servers differ.
            with open(self._lock, "x") as file:
                file.write(self._mine)
        except FileExistsError as error:
            raise PreflightError(f"--run-dir {self.folder} was taken by another job at this moment: pass another") from error
        threading.Thread(target=self._beat, daemon=True).start()

    def _refuse_if_alive(self, me: dict) -> None:
        """Of a job on another host only the silence of its lock tells that it is dead; one beat tells that it lives."""
        try:
            owner = json.loads(self._lock.read_text())
        except ValueError:
            owner = None
        owner = owner if isinstance(owner, dict) else {}
        local = all(owner.get(name) == me[name] for name in ("host", "pids"))
        name = f"job {owner.get('job_id')} (host {owner.get('host')}, process {owner.get('pid')})"
        in_use = PreflightError(f"--run-dir {self.folder} is in use by {name}: wait, cancel that job, or pass another")
        if local and Path(f"/proc/{owner['pid']}").exists():
            raise in_use
        beat, told = self._lock.stat().st_mtime, False
        while not local and (missing := 6 * HEARTBEAT - (self._now() - beat)) > 0:
            if not told:
                print(f"warning: {name} may still write into {self.folder}: looking for {missing:.0f} s", flush=True)
                told = True
            time.sleep(min(missing, HEARTBEAT / 20))
            try:
                alive = self._lock.stat().st_mtime != beat
            except FileNotFoundError:  # it has just ended
                return
            if alive:
                raise in_use
        print(f"warning: taking {self.folder} over from {name}, which is dead", flush=True)

    def _now(self) -> float:
        """By the file server's clock, as the time of the lock is."""
        clock = self.folder / f".clock.{os.getpid()}.tmp"
        clock.touch()
        now = clock.stat().st_mtime
        clock.unlink()
        return now

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT):
            try:
                os.utime(self._lock)
            except OSError:
                return

    def _move_aside(self) -> None:
        files = [path for path in (self.snapshot, self.previous, self.damaged, self.best, self.log) if path.exists()]
        if files:
            number = 1
            while (aside := self.folder / f"old-{number}").exists():
                number += 1
            aside.mkdir()
            for path in files:
                os.replace(path, aside / path.name)
            print(f"--fresh: the run that was here is now in {aside}", flush=True)

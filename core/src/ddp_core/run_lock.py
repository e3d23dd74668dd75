"""run.lock: one job at a time writes in a run directory. Works on any file system, also after its owner died with its node.

The lock is a file that names its owner. The owner touches it every ten seconds. flock is not used: Lustre needs a mount
option for it, and NFS servers differ.
"""

import hashlib
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from ddp_core.errors import PreflightError, StoppedError, StorageError, fix_of, printable

HEARTBEAT = 10.0  # seconds between touches; a lock without a touch for six times as long is a dead job's


class RunLock:
    """Held from construction to release(). Raises PreflightError if another job holds it, StoppedError at `stop`."""

    def __init__(self, path: Path, job_id: str, stop=None):
        self.path, self.stop, self.lost = path, stop, False
        pids = os.readlink("/proc/self/ns/pid")  # each container on a host has its own process numbers
        self.me = dict(job_id=job_id, host=socket.gethostname(), pid=os.getpid(), pids=pids)
        self.me |= dict(began=_began(os.getpid()), at=time.time_ns())  # two locks never have the same content
        self.content = json.dumps(self.me)
        self._released = threading.Event()
        self._acquire(path)
        threading.Thread(target=self._beat, daemon=True).start()

    def release(self) -> None:
        """Release the lock, unless another job has taken it."""
        self._released.set()
        with suppress(OSError, StorageError):
            if self._is_mine():
                self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Before a snapshot is written, and before it is renamed: raises StorageError if another job has taken the lock."""
        try:
            self.lost = self.lost or not self._is_mine()
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}: {fix_of(error, self.path)}") from error
        if self.lost:
            raise self.loss()

    def loss(self) -> StorageError:
        content = _text(self.path)
        owner = _name(_owner(content)) if content else "nobody"
        return StorageError(f"{self.path} is {owner}'s now: this job stood still for too long, and writes no more")

    def _is_mine(self) -> bool:
        return _text(self.path) == self.content

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT):
            with suppress(OSError, StorageError):  # a file system may be away for a moment: the next beat tries again
                if not self._is_mine():  # possible after this process was frozen: its wait then ends at once
                    self.lost = True
                    return
                os.utime(self.path)

    # ---- how it is taken ----------------------------------------------------------------------------------------------

    def _acquire(self, path: Path) -> None:
        """Take the lock. Several jobs may find the same dead owner at once: a second lock lets only one of them replace it.

        Only the holder of run.lock.<dead owner> may remove the dead owner's lock, and only if it is still that owner's.
        """
        while not self._created(path):
            content = self._content_if_dead(path)
            if content is None:
                continue  # it has just been released
            claim = path.with_name(f"{path.name}.{hashlib.sha256(content.encode()).hexdigest()[:8]}")
            self._acquire(claim)
            try:
                if _text(path) == content:
                    path.unlink()
            finally:
                claim.unlink(missing_ok=True)

    def _created(self, path: Path) -> bool:
        """Create the lock together with its content: nobody can see a lock without an owner. False if another job was first."""
        whole = path.with_name(f".{path.name}.{self.me['host']}.{self.me['at']}.tmp")
        whole.write_text(self.content)
        try:
            os.link(whole, path)
            return True
        except FileExistsError:
            return _text(path) == self.content  # NFS may report this for our own link, if it repeated the request
        except OSError:  # a file system without hard links
            with suppress(FileExistsError), open(path, "x") as file:
                file.write(self.content)
                return True
            return False
        finally:
            whole.unlink(missing_ok=True)

    def _content_if_dead(self, path: Path) -> str | None:
        """The content of a dead job's lock; None if the lock is gone by now. Raises PreflightError if the job is alive.

        A job on another host shows life by its lock only: one beat means that it is alive, silence that it is dead.
        """
        content = _text(path)
        if content is None:
            return None
        owner = _owner(content)
        name = _name(owner)
        in_use = PreflightError(f"--run-dir {self.path.parent} is in use by {name}: wait, cancel that job, or pass another")
        local = all(owner.get(key) == self.me[key] for key in ("host", "pids")) and isinstance(owner.get("pid"), int)
        if local and _runs(owner):
            raise in_use
        beat = _beat_of(path)
        # A file server's clock can be wrong. A lock that was watched for so long without a beat is dead, whatever its time is.
        silent = min(6 * HEARTBEAT, max(0.0, 6 * HEARTBEAT - (self._now() - (beat or 0))))
        end = time.monotonic() + (0 if local else silent)
        if not local and silent:
            print(f"warning: {name} may still write into {self.path.parent}: looking for {silent:.0f} s", flush=True)
        while time.monotonic() < end:
            time.sleep(HEARTBEAT / 20)
            if self.stop:
                again = f"submit again with --run-dir {self.path.parent}"
                raise StoppedError(f"{self.stop.reason} before the first step: the run is as it was, {again}")
            if (now := _beat_of(path)) is None:
                return None
            if now != beat:
                raise in_use
        if path == self.path:
            print(f"warning: taking {self.path.parent} over from {name}, which is dead", flush=True)
        return content

    def _now(self) -> float:
        """The time by the file server's clock, which also dates the lock."""
        clock = self.path.with_name(f".clock.{self.me['host']}.{self.me['at']}.tmp")
        try:
            with open(clock, "w") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            clock.unlink(missing_ok=True)


def _text(path: Path) -> str | None:
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise StorageError(f"{path} is no file: move it away")
    with suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read(2**16)  # a lock is one line
    return None


def _owner(content: str) -> dict:
    with suppress(ValueError, RecursionError):
        if isinstance(owner := json.loads(content), dict):
            return owner
    return {}


def _name(owner: dict) -> str:
    job, host, pid = (printable(owner.get(name), 80) for name in ("job_id", "host", "pid"))
    return f"job {job} (host {host}, process {pid})"


def _beat_of(path: Path) -> float | None:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None


def _runs(owner: dict) -> bool:
    """Whether the owner's process still runs on this host. Process numbers are reused, so its start time must agree, too."""
    began = _began(owner["pid"])
    return began is not None and owner.get("began") in (None, began)


def _began(pid: int) -> str | None:
    """The clock tick at which a process began; None if it has ended, also for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]

"""The file that a run resumes from: one safetensors file, written by rank 0, that cannot run code.

Tensors `model.<parameter>` and `optim.<state>.<parameter>`; one metadata key, `ddp_core`, with one JSON document.
Equal runs write equal bytes: no time, host, path or site is in it. World size is noted and is no condition.

    python -m ddp_core.snapshot convert OLD.pt --run-dir DIR    one from a checkpoint of torch.save (convert.py)
"""

import ctypes
import json
import os
import shutil
import socket
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ddp_core.errors import PreflightError, SnapshotError, StorageError

FORMAT = 1
DTYPES = {torch.float64: "F64", torch.float32: "F32"}
HEARTBEAT = 10.0  # seconds; a lock that was silent six times as long is a dead job's


def write(path: Path, tensors: dict[str, torch.Tensor], document: dict) -> None:
    """Write a snapshot so that a crash at any moment leaves the old file or the new one, whole. Raises StorageError.

    Temporary file in the same folder, fsync, rename, fsync of the folder. By hand, for safetensors' own writer needs
    NumPy, does not fsync, and makes a file that the group cannot read.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    sums = _checksums(tensors)
    document = document | dict(format=FORMAT, crc32=sums)
    document |= dict(document_crc32=zlib.crc32(_json(document)))
    header, end = {"__metadata__": {"ddp_core": _json(document).decode()}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = dict(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape), data_offsets=[start, end])
    head = _json(header)
    head += b" " * (-len(head) % 8)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for tensor in tensors.values():
                file.write(_memory(tensor))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _no_storage(path, error, end) from error


def _no_storage(path: Path, error: OSError, need: int = 0) -> StorageError:
    space = ""
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free
        space = f": {need / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB free (a quota may allow less)"
    return StorageError(f"{path}: {error.strerror}{space}: free space and submit again; the snapshot before it is whole")


def _json(value: dict) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    with ThreadPoolExecutor() as pool:  # zlib lets go of the interpreter: half the time on two cores
        return dict(zip(tensors, pool.map(lambda tensor: zlib.crc32(_memory(tensor)), tensors.values()), strict=True))


def _memory(tensor: torch.Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor, not copied."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and document of a snapshot, every checksum compared. Raises SnapshotError that names the file."""
    try:
        with safe_open(path, "pt") as file:
            document = json.loads((file.metadata() or {})["ddp_core"])
            if document["format"] > FORMAT:
                raise SnapshotError(
                    f"{path} has format {document['format']}, of ddp_core {document['versions']['ddp_core']}; this ddp_core "
                    f"reads up to format {FORMAT}: update it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safe_open is no dict
            sums = _checksums(tensors)
            sums["the document"] = zlib.crc32(_json({name: document[name] for name in document if name != "document_crc32"}))
            written = document["crc32"] | {"the document": document["document_crc32"]}
            broken = [name for name in sums.keys() | written.keys() if sums.get(name) != written.get(name)]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{path} is not a whole snapshot ({type(error).__name__}: {error})") from error
    if broken:
        raise SnapshotError(f"{path} is damaged: the checksum of {', '.join(sorted(broken))} differs")
    return tensors, document


class RunDirectory:
    """A run's files, and the lock that keeps a second job out of them. Rank 0 alone has one."""

    def __init__(self, folder: str, job_id: str, fresh: bool):
        """Raises PreflightError when another job writes here, StorageError when nobody can."""
        self.folder = Path(folder)
        self.log = self.folder / "run.jsonl"
        self.snapshot = self.folder / "snapshot.safetensors"
        self.previous = self.folder / "snapshot.prev.safetensors"
        self.best = self.folder / "best.safetensors"
        self._lock = self.folder / "run.lock"
        self._released, self._mine = threading.Event(), ""
        try:
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
                print(f"warning: {broken[0] if broken else f'{self.snapshot} is missing'}; resuming from {path}", flush=True)
            return state
        if broken:
            raise SnapshotError(f"{' and '.join(broken)}: restore a copy, or pass --fresh to start again")
        return None

    def save(self, tensors: dict[str, torch.Tensor], document: dict) -> None:
        """Write the snapshot and keep the one before it. Raises StorageError."""
        try:
            if self.snapshot.exists():
                spare = self.folder / ".prev.tmp"
                spare.unlink(missing_ok=True)
                try:
                    os.link(self.snapshot, spare)  # so that snapshot.safetensors is never missing
                except OSError:  # a file system without hard links
                    spare = self.snapshot
                os.replace(spare, self.previous)
        except OSError as error:
            raise _no_storage(self.previous, error) from error
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
        files = [path for path in (self.snapshot, self.previous, self.best, self.log) if path.exists()]
        if files:
            number = 1
            while (aside := self.folder / f"old-{number}").exists():
                number += 1
            aside.mkdir()
            for path in files:
                os.replace(path, aside / path.name)
            print(f"--fresh: the run that was here is now in {aside}", flush=True)


if __name__ == "__main__":
    from ddp_core.convert import main

    raise SystemExit(main(sys.argv[1:]))

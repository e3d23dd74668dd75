"""Saves while training goes on: training waits for a copy of the state in host memory, and a thread writes the copy.

Only one save runs at a time. The next one waits for it and is never skipped, so that snapshots come at the steps where they
are due. The end of a run waits for its last save.
"""

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from ddp_core import memory
from ddp_core.errors import first_line
from ddp_core.record import Record
from ddp_core.run_directory import RunDirectory
from ddp_core.snapshot import drafts_of, images_of, images_size

SPARE = 2**16  # bytes, for the history of some hundred more epochs


class Saver:
    """On rank 0. If memory for the copy is lacking, training waits until the state is written, and a log line says so."""

    def __init__(self, directory: RunDirectory, record: Record, grace: float = 0.0):
        """grace: seconds between a request to stop and the kill; 0 if unknown."""
        self.directory, self.record, self.grace = directory, record, grace
        self.pool = ThreadPoolExecutor(1, "save")
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.refused = False  # a copy had no memory, and the log says so
        self.pending: Future | None = None  # the save that is running
        self.beside = True  # training goes on meanwhile
        self.fields: dict = {}  # of that save, for run.jsonl

    def save(self, tensors: dict[str, torch.Tensor], document: dict, best: bool, snapshot: bool, put_drafts=None) -> None:
        """Save as best.safetensors, as snapshot.safetensors, or both. Raises the StorageError of the previous save.

        put_drafts: see snapshot.write(). The files are written before save() returns: it is collective.
        """
        self.settle()
        began = time.perf_counter()
        document = copy.deepcopy(document)  # the next epoch would extend its history
        copied = None if put_drafts else self._copied(tensors, document)
        images, tensors = copied or (None, tensors)
        write = partial(self._write, tensors, document, best, snapshot, images=images, put_drafts=put_drafts)
        if put_drafts:
            seconds = write()  # in this thread, so that its collectives keep their order among all others
            self.pending = Future()
            self.pending.set_result(seconds)
        else:
            self.pending = self.pool.submit(write)
        self.beside = bool(copied)
        self.fields = dict(step=document["step"], epochs_run=document["epochs_run"]) if snapshot else {}
        self.fields |= dict(seconds=time.perf_counter() - began, copy=self.buffer.nbytes) if snapshot else {}

    def _write(self, tensors: dict[str, torch.Tensor], document: dict, best: bool, snapshot: bool, **source) -> float:
        """Returns the seconds until all is on disk."""
        began = time.perf_counter()
        if best:
            self.directory.save_best(tensors, document, **source)
        if snapshot:
            self.directory.save(tensors, document, **source)
        return time.perf_counter() - began

    @property
    def failed(self) -> bool:
        return self.pending is not None and self.pending.done() and self.pending.exception() is not None

    def written(self, seconds: float | None = None) -> bool:
        """Wait so long for the running save (None: to its end). Whether none is running any more."""
        if self.pending is None:
            return True
        began = time.perf_counter()
        done = wait([self.pending], seconds).done
        if self.fields:
            self.fields["seconds"] += time.perf_counter() - began
        return bool(done)

    def look(self) -> None:
        """Record a save that has succeeded."""
        if self.pending and self.pending.done() and not self.failed:
            self.settle()

    def settle(self) -> None:
        """Wait for the running save, and record it. Raises its StorageError."""
        if self.pending is None:
            return
        self.written()
        pending, self.pending = self.pending, None
        writing = pending.result()
        if self.fields:
            self.record.write("snapshot", **self.fields, writing=writing)
        if 0 < self.grace < 2 * writing:  # at a stop, the last save may have to wait for a running one
            self.record.say(
                note=f"a save took {writing:.1f} s, and a stop leaves {self.grace:g} s (--grace), in which there may be two: "
                f"let the job script signal the ranks earlier, or the steps since the snapshot before may be lost"
            )
            self.grace = 0.0

    def _copied(self, tensors: dict[str, torch.Tensor], document: dict) -> tuple[list, dict[str, torch.Tensor]] | None:
        """A copy of the state, laid out in memory as in the files; None if memory is lacking."""
        drafts = drafts_of(tensors, document, self.directory.most)
        size = images_size(drafts)
        if self.buffer.nbytes < size and not self._has_room_for(size + SPARE, tensors):
            return None
        images, places = images_of(drafts, self.buffer)
        for name, place in places.items():
            place.copy_(tensors[name].detach(), non_blocking=True)
        if self.buffer.is_pinned():
            torch.accelerator.synchronize()
        return images, places

    def _has_room_for(self, size: int, tensors: dict[str, torch.Tensor]) -> bool:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        # An accelerator copies to pinned memory by itself, and at the speed of its link; to other memory it does not.
        pinned = any(tensor.device.type != "cpu" for tensor in tensors.values())
        need = 1 << (size - 1).bit_length() if pinned else size  # torch pins the next power of two, and keeps it
        left = memory.available()
        why = f"and {left / 1e6:.1f} MB are left"
        if left >= need:
            try:
                self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                return True
            except (RuntimeError, MemoryError) as error:
                why = f"which it did not get ({first_line(error)})"
        if not self.refused:
            self.refused = True
            self.record.say(
                note=f"training waits while snapshots are written: to go on beside that, rank 0 needs {need / 1e6:.1f} MB of "
                f"memory for a copy of the state, {why}"
            )
        return False

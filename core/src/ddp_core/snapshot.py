"""The file that a run resumes from: one safetensors file, written by rank 0, that cannot run code.

Tensors `model.<parameter or buffer>` and `optim.<state>.<parameter>`; one metadata key, `ddp_core`, with one JSON document.
Equal runs write equal bytes: no time, host, path or site is in it. World size is noted and is no condition.

    python -m ddp_core.snapshot show|verify|diff FILE...        what is in it (show.py)
    python -m ddp_core.snapshot convert OLD.pt --run-dir DIR    one from a checkpoint of torch.save (convert.py)
"""

if __name__ == "__main__":  # before torch is imported, which takes seconds and is not on every login node
    import sys

    from ddp_core.show import main

    raise SystemExit(main(sys.argv[1:]))

import ctypes
import errno
import fcntl
import json
import math
import os
import shutil
import socket
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ddp_core.errors import NewerFormatError, SnapshotError, StorageError, WorkloadError, printable
from ddp_core.show import MOST_HEADER, as_json, refuse_damaged, refuse_unreadable

FORMAT = 2  # 1: before workloads were open (migrate)
LONGEST = 2**32 - 1  # no checksum has more digits
PAGE, PART = 4096, 2**24  # bytes
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}


def write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    document: dict,
    check: Callable[[], None] = lambda: None,
    image: torch.Tensor | None = None,
    gathered: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write a snapshot so that a crash at any moment leaves the old file or the new one, whole. Raises StorageError.

    Temporary file in the same folder, fsync, check(), rename, fsync of the folder. By hand, for safetensors' own writer needs
    NumPy, does not fsync, and makes a file that the group cannot read. check: what it raises leaves the old file. image: of
    the whole file in memory, with the tensors in their places (image_of). gathered: the numbers of a name, where they are
    not all in memory (sharding.py): asked once for each, in order.
    """
    tensors = {name: tensors[name].detach() for name in in_order(tensors)}
    if gathered is None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    document = document | dict(format=FORMAT)
    room, size = room_for(tensors, document), sum(tensor.nbytes for tensor in tensors.values())
    if room - 8 > MOST_HEADER:  # read() would refuse it
        raise StorageError(f"{path}: {room >> 20} MB of history and names do not fit: go on in a new --run-dir")
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            # Checksums stand before the tensors, and are computed while these are written.
            put = partial(_put_tensors, file, tensors, room) if image is None else partial(_put_image, file, image)
            document |= dict(crc32=_put_gathered(file, tensors, gathered, room) if gathered else _checksums(tensors, put))
            document |= dict(document_crc32=zlib.crc32(as_json(document)))
            head = _head(tensors, document, room)
            if image is None:
                file.seek(0)
                file.write(head)
            else:
                ctypes.memmove(image.data_ptr(), head, room)
                _put(file, image, 0)
                file.truncate(room + size)
            os.fsync(file.fileno())
        check()
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except (OSError, StorageError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise no_storage(path, error, size) if isinstance(error, OSError) else error from error


def in_order(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Wide numbers first, so that each stands at a multiple of its size; then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def room_for(tensors: dict[str, torch.Tensor], document: dict) -> int:
    """Bytes before the first tensor, whatever its checksums are."""
    longest = dict(format=FORMAT, crc32=dict.fromkeys(tensors, LONGEST), document_crc32=LONGEST)
    return len(_head(tensors, document | longest, 0))


def _head(tensors: dict[str, torch.Tensor], document: dict, room: int) -> bytes:
    """What stands before the tensors, filled with blanks up to `room` bytes, or to a multiple of 8."""
    header: dict[str, dict] = {"__metadata__": {"ddp_core": as_json(document).decode()}}
    end = 0
    for name in in_order(tensors):
        start, end = end, end + tensors[name].nbytes
        header[name] = dict(dtype=DTYPES[tensors[name].dtype], shape=list(tensors[name].shape), data_offsets=[start, end])
    head = as_json(header)
    head = head.ljust(room - 8 if room else -(-len(head) // 8) * 8)
    return struct.pack("<Q", len(head)) + head


def image_of(
    tensors: dict[str, torch.Tensor], document: dict, buffer: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Whole pages of a buffer as a file, and the places of the tensors in it, not yet filled. buffer: image_size() bytes."""
    first = -buffer.data_ptr() % PAGE
    end, places = first + room_for(tensors, document), {}
    for name in in_order(tensors):
        start, end = end, end + tensors[name].nbytes
        places[name] = buffer[start:end].view(tensors[name].dtype).view(tensors[name].shape)
    return buffer[first : first + -(-(end - first) // PAGE) * PAGE], places


def image_size(tensors: dict[str, torch.Tensor], document: dict) -> int:
    return room_for(tensors, document) + sum(tensor.nbytes for tensor in tensors.values()) + 2 * PAGE


def _put_tensors(file: FileIO, tensors: dict[str, torch.Tensor], room: int) -> None:
    file.seek(room)
    for tensor in tensors.values():
        left = memoryview(memory(tensor))
        while left:
            left = left[file.write(left) :]  # Linux writes 2 GiB at most at once


def _put_gathered(
    file: FileIO, tensors: dict[str, torch.Tensor], gathered: Callable[[str], torch.Tensor], place: int
) -> dict[str, int]:
    """Returns their checksums."""
    sums = {}
    for name in tensors:
        whole = gathered(name)
        _put_tensors(file, {name: whole}, place)
        sums[name], place = zlib.crc32(memory(whole)), place + whole.nbytes
    return sums


def _put_image(file: FileIO, image: torch.Tensor) -> None:
    """All but its first part, which has the header, and not through the page cache: for large files at a third of the time."""
    with suppress(OSError):  # a file system that cannot
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    with ThreadPoolExecutor(4) as pool:  # parallel file systems want several parts at once
        for done in [pool.submit(_put, file, image, start) for start in range(PART, len(image), PART)]:
            done.result()


def _put(file: FileIO, image: torch.Tensor, start: int) -> None:
    """The part of an image that begins at `start`, in its place in the file."""
    left = memoryview(memory(image[start : start + PART]))
    while left:
        try:
            done = os.pwrite(file.fileno(), left, start)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # there are larger pages, or a limit within one
            continue
        left, start = left[done:], start + done


def no_storage(path: Path, error: OSError, need: int = 0) -> StorageError:
    space = ""
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free
        space = f": {need / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB free (a quota may allow less)"
    return StorageError(f"{path}: {error.strerror}{space}: free space and submit again; the snapshot before it is whole")


def _checksums(tensors: dict[str, torch.Tensor], meanwhile: Callable[[], None] = lambda: None) -> dict[str, int]:
    """meanwhile: what this thread does until they are there."""
    with ThreadPoolExecutor() as pool:  # zlib lets go of the interpreter: half the time on two cores
        sums = pool.map(lambda tensor: zlib.crc32(memory(tensor)), tensors.values())
        meanwhile()
        return dict(zip(tensors, sums, strict=True))


def memory(tensor: torch.Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor, not copied: the caller keeps the tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)


@dataclass(frozen=True)
class Stored:
    """A tensor that is still in its file: only its layout is in memory."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file
    nbytes: int

    def load(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb") as file:
            file.seek(self.start)
            if file.readinto(memory(tensor)) != self.nbytes:
                raise SnapshotError(f"{self.path} has become shorter while it was read")
        return tensor


def _stored(path: Path) -> tuple[dict[str, Stored], dict]:
    """Tensors and metadata by the file's own header. Not by safetensors, which maps all of the file: `ulimit -v` counts that.

    Raises ValueError, KeyError or TypeError unless the tensors fill the file, one behind the other.
    """
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    metadata, place, found = header.pop("__metadata__", {}), 0, {}
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        dtype, shape = dtypes[entry["dtype"]], tuple(entry["shape"])
        if (
            start != place
            or any(type(n) is not int or n < 0 for n in shape)
            or end - start != math.prod(shape) * dtype.itemsize
        ):
            raise ValueError(f"{printable(name)} has a place or a size that cannot be")
        found[name], place = Stored(path, dtype, shape, 8 + size + start, end - start), end
    if path.stat().st_size != 8 + size + place:
        raise ValueError(f"it has {path.stat().st_size} bytes, and its header tells of {8 + size + place}")
    return found, metadata


def read(path: Path, lazily: bool = False) -> tuple[dict[str, Any], dict]:
    """Tensors and document of a snapshot, every checksum compared. Raises SnapshotError that names the file.

    lazily: a Stored for each tensor, read one at a time also for its checksum.
    """
    try:
        refuse_unreadable(path)
        opened: Any = nullcontext(_stored(path)) if lazily else safe_open(path, "pt")
        with opened as file:
            tensors, metadata = file if lazily else ({}, file.metadata())
            document = json.loads((metadata or {})["ddp_core"])
            if type(document["format"]) is not int or document["format"] < 1:
                raise ValueError(f"its format is {document['format']!r}")
            if document["format"] > FORMAT:
                raise NewerFormatError(
                    f"{path} has format {document['format']}, of ddp_core {_writer(document)}; this ddp_core reads up to "
                    f"format {FORMAT}: update it"
                )
            if lazily:
                sums = {name: zlib.crc32(memory(whole)) for name in tensors for whole in [tensors[name].load()]}
            else:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safe_open is no dict
                sums = _checksums(tensors)
            refuse_damaged(path, sums, document)
            return migrate(tensors, document)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {printable(error)}"
        raise SnapshotError(f"{path} is not a whole snapshot ({why})") from error


def _writer(document: dict) -> str:
    versions = document.get("versions")
    return printable(versions.get("ddp_core"), 40) if isinstance(versions, dict) else "unknown"


def migrate(tensors: dict[str, torch.Tensor], document: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """A snapshot of format 1 as one of format 2: it knew no other problems, and counted the optimizer's steps itself."""
    if document["format"] > 1 or "problem" not in document:
        return tensors, document
    problem = dict(document["problem"])
    size = problem.pop("model_size", None)
    problem |= dict(clip_norm=0.0, row_seeds="on") | (dict(model_size=size) if problem.get("workload") == "gpt" else {})
    if problem.get("optimizer") == "adamw":
        steps = torch.tensor(float(document["step"]))
        names = [name.removeprefix("optim.mean.") for name in tensors if name.startswith("optim.mean.")]
        tensors = tensors | {f"optim.step.{name}": steps.clone() for name in names}
    elif not problem.get("momentum"):  # format 1 had a momentum of zeros there
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim.")}
    return tensors, document | dict(problem=problem)


def refuse_unknown_dtypes(tensors: dict[str, torch.Tensor], workload: str) -> None:
    """Before the training, not at its first save. Raises WorkloadError."""
    unknown = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if unknown:
        raise WorkloadError(
            f"--workload {workload}: {unknown[0]}, which a snapshot cannot hold: make it real or integer, or no parameter and "
            f"no persistent buffer (register_buffer(..., persistent=False))"
        )

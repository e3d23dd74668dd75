"""The file that a run resumes from: safetensors, that cannot run code. A large one is a set of several (files.py).

Tensors `model.<parameter or buffer>` and `optim.<state>.<parameter>`; one metadata key, `ddp_core`, with one JSON document.
Equal runs write equal bytes: no time, host, path or site is in it. World size is noted and is no condition.

    python -m ddp_core.snapshot show|verify|diff FILE...        what is in it (show.py)
    python -m ddp_core.snapshot convert OLD.pt --run-dir DIR    one from a checkpoint of torch.save (convert.py)
"""

if __name__ == "__main__":  # before torch is imported, which takes seconds and is not on every login node
    import signal
    import sys

    from ddp_core.show import main

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, as it ends other commands
    raise SystemExit(main(sys.argv[1:]))

import ctypes
import errno
import fcntl
import math
import os
import shutil
import socket
import struct
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from ddp_core.errors import NewerFormatError, StorageError, WorkloadError, fix_of, is_full, printable
from ddp_core.files import (
    MOST_HEADER,
    Stored,
    as_json,
    in_place,
    index_of,
    names_of_files,
    opened,
    other_form,
    refuse_damaged,
    sweep,
)

FORMAT = 2  # 1: before workloads were open (migrate)
LONGEST = 2**32 - 1  # no checksum has more digits
IN_A_SET = dict(format="pt")  # metadata without which transformers refuses a file
PAGE, PART = 4096, 2**24  # bytes
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
DTYPE_NAMED = {name: dtype for dtype, name in DTYPES.items()}


def write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    document: dict,
    check: Callable[[], None] = lambda: None,
    images: list[torch.Tensor] | None = None,
    put_drafts: Callable[[list["Draft"]], dict[str, int]] | None = None,
    most: float = math.inf,
) -> None:
    """Write a snapshot so that a crash at any moment leaves the old one or the new one, whole. Raises StorageError.

    Temporary files in the same folder, fsync, check(), rename, fsync of the folder. By hand, for safetensors' own writer needs
    NumPy, does not fsync, and makes a file that the group cannot read. check: what it raises leaves the old one. images: of
    the whole files in memory, with the tensors in their places (images_of). put_drafts: puts the drafts, where the numbers are
    dealt over ranks, and returns the checksums (sharding.py). most: bytes of tensors in one file.
    """
    tensors = {name: tensors[name].detach() for name in in_order(tensors)}
    if put_drafts is None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    document, size = document | dict(format=FORMAT), sum(tensor.nbytes for tensor in tensors.values())
    drafts, finals = drafts_of(tensors, document, most, partial(_draft, path)), [path]
    temporary = [draft.path for draft in drafts]
    sums: dict[str, int] = {}
    try:
        _refuse_large(path, max(draft.room for draft in drafts) - 8)
        if put_drafts:
            sums = put_drafts(drafts)
        else:
            for draft, image in zip(drafts, images or repeat(None), strict=False):
                sums |= put(draft, image)
        if len(drafts) > 1:
            finals = names_of_files(path, document["step"], [{name: sums[name] for name in file.tensors} for file in drafts])
            weight_map = {name: final.name for file, final in zip(drafts, finals, strict=True) for name in file.tensors}
            index = as_json(dict(metadata=dict(total_size=size, ddp_core=_signed(document, sums)), weight_map=weight_map))
            _refuse_large(path, len(index))
            temporary.append(_draft(path, len(drafts)))
            finals.append(index_of(path))
            with open(temporary[-1], "wb", buffering=0) as raw:
                _put_all(raw, index)
                os.fsync(raw.fileno())
        check()
        *data, commit = zip(temporary, finals, strict=True)
        for names in data:
            os.replace(*names)
        if data:
            _sync(path.parent)  # an index has its name after all that it names
        os.replace(*commit)
        _sync(path.parent)
        other_form(finals[-1]).unlink(missing_ok=True)
        sweep(path.parent)
    except Exception as error:
        for left in temporary:
            with suppress(OSError):
                left.unlink()
        if isinstance(error, OSError):
            raise no_storage(path, error, size) from error
        raise


def _refuse_large(path: Path, header: int) -> None:
    if header > MOST_HEADER:  # read() would refuse it
        raise StorageError(f"{path}: {header >> 20} MB of history and names do not fit: go on in a new --run-dir")


def _draft(path: Path, number: int) -> Path:
    return path.with_name(f".{path.name}.{number}.{socket.gethostname()}.{os.getpid()}.tmp")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # a file system that does not do this for folders
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Draft:
    """A file of a snapshot before it has its name, which it gets when all of them are on the disk."""

    path: Path
    tensors: dict[str, torch.Tensor]
    room: int  # bytes before the first tensor
    metadata: Callable[[dict[str, int]], dict[str, str]]  # by the checksums


def drafts_of(tensors: dict[str, torch.Tensor], document: dict, most: float, where: Callable[[int], Path]) -> list[Draft]:
    """One for each file. document: only a single file has it. where: the path of a draft, by its place among them."""
    files = files_of(tensors, document, most)
    metadata = (lambda sums: _alone(_signed(document, sums))) if len(files) == 1 else lambda sums: IN_A_SET
    return [Draft(where(number), file, room, metadata) for number, (file, room) in enumerate(files)]


def put(
    draft: Draft, image: torch.Tensor | None = None, gathered: Callable[[str], torch.Tensor] | None = None
) -> dict[str, int]:
    """Returns the checksums, which are computed while the tensors are written, and may stand before them in the metadata.

    gathered: the numbers of a name, where they are not all in memory: asked once for each, in order.
    """
    tensors, room = draft.tensors, draft.room
    with open(draft.path, "wb", buffering=0) as file:
        if image is None:
            sums = _put_tensors(file, tensors, gathered or tensors.__getitem__, room)
            file.seek(0)
            _put_all(file, _head(tensors, draft.metadata(sums), room))
        else:
            sums = _checksums(tensors, partial(_put_image, file, image, room))
            ctypes.memmove(image.data_ptr(), _head(tensors, draft.metadata(sums), room), room)
            for start in range(0, room, PART):  # the header may be longer than a part
                _put(file, image, start)
            file.truncate(room + sum(tensor.nbytes for tensor in tensors.values()))
        os.fsync(file.fileno())
    return sums


def in_order(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Wide numbers first, so that each stands at a multiple of its size; then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def files_of(tensors: dict[str, torch.Tensor], document: dict, most: float) -> list[tuple[dict[str, torch.Tensor], int]]:
    """The tensors of each file, in order, of so many bytes at most; a larger tensor has one alone. And the bytes before the
    first of them, whatever the checksums are.
    """
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in in_order(tensors):
        if files[-1] and size + tensors[name].nbytes > most:
            files.append({})
            size = 0
        files[-1][name] = tensors[name]
        size += tensors[name].nbytes
    metadata = IN_A_SET
    if len(files) == 1:
        metadata = _alone(document | dict(format=FORMAT, crc32=dict.fromkeys(tensors, LONGEST), document_crc32=LONGEST))
    return [(file, len(_head(file, metadata, 0))) for file in files]


def _signed(document: dict, sums: dict[str, int]) -> dict:
    document = document | dict(crc32=sums)
    return document | dict(document_crc32=zlib.crc32(as_json(document)))


def _alone(document: dict) -> dict[str, str]:
    """Metadata of a file that is a whole snapshot."""
    return dict(ddp_core=as_json(document).decode())


def _head(tensors: dict[str, torch.Tensor], metadata: dict[str, str], room: int) -> bytes:
    """What stands before the tensors, filled with blanks up to `room` bytes, or to a multiple of 8."""
    header: dict[str, dict] = {"__metadata__": metadata}
    end = 0
    for name in in_order(tensors):
        start, end = end, end + tensors[name].nbytes
        header[name] = dict(dtype=DTYPES[tensors[name].dtype], shape=list(tensors[name].shape), data_offsets=[start, end])
    head = as_json(header)
    head = head.ljust(room - 8 if room else -(-len(head) // 8) * 8)
    return struct.pack("<Q", len(head)) + head


def images_of(files: list[tuple[dict, int]], buffer: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Whole pages of a buffer as files, and the places of the tensors in them, not yet filled. buffer: images_size() bytes."""
    images, places, first = [], {}, -buffer.data_ptr() % PAGE
    for file, room in files:
        end = first + room
        for name in file:
            start, end = end, end + file[name].nbytes
            places[name] = buffer[start:end].view(file[name].dtype).view(file[name].shape)
        pages = -(-(end - first) // PAGE) * PAGE
        images.append(buffer[first : first + pages])
        first += pages
    return images, places


def images_size(files: list[tuple[dict, int]]) -> int:
    return PAGE + sum(room + sum(tensor.nbytes for tensor in file.values()) + PAGE for file, room in files)


def _put_tensors(file: FileIO, names: Iterable[str], numbers: Callable[[str], torch.Tensor], room: int) -> dict[str, int]:
    """Returns their checksums."""
    sums = {}
    file.seek(room)
    for name in names:
        tensor = numbers(name)
        _put_all(file, memory(tensor))
        sums[name] = zlib.crc32(memory(tensor))
    return sums


def _put_all(file: FileIO, content: bytes | ctypes.Array) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]  # Linux writes 2 GiB at most at once, and less on a disk that is almost full


def _put_image(file: FileIO, image: torch.Tensor, room: int) -> None:
    """All but the parts that have the header, and not through the page cache: for large files at a third of the time."""
    with suppress(OSError):  # a file system that cannot
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    with ThreadPoolExecutor(4) as pool:  # parallel file systems want several parts at once
        for done in [pool.submit(_put, file, image, start) for start in range(-(-room // PART) * PART, len(image), PART)]:
            done.result()


def _put(file: FileIO, image: torch.Tensor, start: int) -> None:
    """The part of an image that begins at `start`, in its place in the file."""
    left = memoryview(memory(image[start : start + PART]))
    while left:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)  # before: another part's thread may do the same meanwhile
        try:
            done = os.pwrite(file.fileno(), left, start)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # there are larger pages, or a limit within one
            continue
        left, start = left[done:], start + done


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def no_storage(path: Path, error: OSError, need: int = 0) -> StorageError:
    space = ""
    if is_full(error):
        with suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            space = f": {_size(need)} are needed and {_size(free)} free (a quota may allow less)"
    return StorageError(f"{path}: {error.strerror}{space}: {fix_of(error)}; what was saved before is whole")


def _checksums(tensors: dict[str, torch.Tensor], meanwhile: Callable[[], None] = lambda: None) -> dict[str, int]:
    """meanwhile: what this thread does until they are there."""
    with ThreadPoolExecutor() as pool:  # zlib lets go of the interpreter: half the time on two cores
        sums = pool.map(lambda tensor: zlib.crc32(memory(tensor)), tensors.values())
        meanwhile()
        return dict(zip(tensors, sums, strict=True))


def memory(tensor: torch.Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor, not copied: the caller keeps the tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)


def load(stored: Stored) -> torch.Tensor:
    tensor = torch.empty(stored.shape, dtype=DTYPE_NAMED[stored.dtype])
    stored.read_into(memory(tensor))
    return tensor


def read(path: Path, lazily: bool = False) -> tuple[dict[str, Any], dict]:
    """Tensors and document of a snapshot, every checksum compared. Raises SnapshotError that names the file.

    path: of a file, in whose place an index may be, or of an index. lazily: a Stored for each tensor.
    """
    path = in_place(path)
    with opened(path) as (stored, document):
        if type(document["format"]) is not int or document["format"] < 1:
            raise ValueError(f"its format is {document['format']!r}")
        if document["format"] > FORMAT:
            raise NewerFormatError(
                f"{path} has format {document['format']}, of ddp_core {_writer(document)}; this ddp_core reads up to "
                f"format {FORMAT}: update it"
            )
        tensors: dict[str, Any] = stored
        if lazily:
            sums = {name: tensor.checksum() for name, tensor in stored.items()}
        else:
            tensors = {name: load(tensor) for name, tensor in stored.items()}
            sums = _checksums(tensors)
        refuse_damaged(path, sums, document)
        return migrate(tensors, document)


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

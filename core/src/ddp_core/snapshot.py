"""Snapshots, from which a run resumes: safetensors files, which cannot run code. A large snapshot is several files (files.py).

Tensors `model.<parameter or buffer>` and `optim.<state>.<parameter>`; one metadata key, `ddp_core`, with one JSON document.
Equal runs write equal bytes: a snapshot holds no time, host, path or site. It only notes the world size: any can resume.

    python -m ddp_core.snapshot show|verify|diff FILE...        print, check or compare (show.py)
    python -m ddp_core.snapshot convert OLD.pt --run-dir DIR    make one from a checkpoint of torch.save (convert.py)
"""

if __name__ == "__main__":  # before torch is imported: that takes seconds, and some login nodes lack it
    import signal
    import sys

    from ddp_core.show import main

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this command without a traceback, like others
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
from collections.abc import Callable
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

FORMAT = 2  # format 1 knew the built-in workloads only (migrate)
LONGEST = 2**32 - 1  # a checksum with the most digits
IN_A_SET = dict(format="pt")  # transformers refuses a file without this metadata
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
    """Write a snapshot. A crash at any moment leaves the old or the new one whole. Raises StorageError.

    Order: temporary files in the same folder, fsync, check(), rename, fsync of the folder. safetensors' own writer needs NumPy,
    does not fsync, and makes a file that the group cannot read. check: raises to keep the old snapshot. images: the whole files
    in memory, with the tensors at their places (images_of). put_drafts: writes the drafts if the tensors are sharded over
    ranks, and returns the checksums (sharding.py). most: the most bytes of tensors in one file.
    """
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
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
                _put(raw, index, 0)
                os.fsync(raw.fileno())
        check()
        *data, commit = zip(temporary, finals, strict=True)
        for names in data:
            os.replace(*names)
        if data:
            _sync(path.parent)  # all files are on disk under their names before the index that lists them
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some file systems cannot fsync a folder
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Draft:
    """A file of a snapshot under its temporary name. It is renamed when all files of the snapshot are on disk."""

    path: Path
    tensors: dict[str, torch.Tensor]
    room: int  # bytes before the first tensor
    document: dict | None


def drafts_of(
    tensors: dict[str, torch.Tensor], document: dict, most: float, where: Callable[[int], Path] = lambda number: Path()
) -> list[Draft]:
    """The files of a snapshot, each with at most `most` bytes of tensors (a larger tensor has its own file).

    document: put into the file only if there is one. where: from a draft's number to its path.
    """
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in in_order(tensors):
        if files[-1] and size + tensors[name].nbytes > most:
            files.append({})
            size = 0
        files[-1][name] = tensors[name]
        size += tensors[name].nbytes
    alone = document if len(files) == 1 else None  # of a set, the index has it
    # Room for any checksums.
    longest = alone and alone | dict(format=FORMAT, crc32=dict.fromkeys(tensors, LONGEST), document_crc32=LONGEST)
    return [Draft(where(n), file, len(_head(file, longest, 0)), alone) for n, file in enumerate(files)]


def put(
    draft: Draft, image: torch.Tensor | None = None, gathered: Callable[[str], torch.Tensor] | None = None
) -> dict[str, int]:
    """Write a draft, and return its tensors' checksums. The header is written last, because it holds the checksums.

    gathered: returns the whole tensor of a name, if tensors are sharded over ranks. Called once for each name, in order.
    """
    with open(draft.path, "wb", buffering=0) as file:
        if image is None:
            sums, place = {}, draft.room
            for name, tensor in draft.tensors.items():
                whole = gathered(name) if gathered else tensor.cpu().contiguous()
                _put(file, memory(whole), place)
                sums[name], place = zlib.crc32(memory(whole)), place + whole.nbytes
        else:
            sums = _checksums(draft.tensors, partial(_put_image, file, image))
            file.truncate(draft.room + sum(tensor.nbytes for tensor in draft.tensors.values()))
        signed = draft.document and _signed(draft.document, sums)
        _put(file, _head(draft.tensors, signed, draft.room), 0)
        os.fsync(file.fileno())
    return sums


def in_order(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names in the order of a file: widest dtype first, so that each number is aligned to its size; then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _signed(document: dict, sums: dict[str, int]) -> dict:
    document = document | dict(crc32=sums)
    return document | dict(document_crc32=zlib.crc32(as_json(document)))


def _head(tensors: dict[str, torch.Tensor], document: dict | None, room: int) -> bytes:
    """The bytes before a file's tensors, padded with blanks to `room` bytes; if `room` is 0, to a multiple of 8."""
    header: dict[str, dict] = {"__metadata__": dict(ddp_core=as_json(document).decode()) if document else IN_A_SET}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = dict(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape), data_offsets=[start, end])
    head = as_json(header)
    head = head.ljust(room - 8 if room else -(-len(head) // 8) * 8)
    return struct.pack("<Q", len(head)) + head


def images_of(drafts: list[Draft], buffer: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """An image of each file, in whole pages of the buffer, and by name the tensors in them, still empty. See images_size()."""
    images, places, first = [], {}, -buffer.data_ptr() % PAGE
    for draft in drafts:
        end = first + draft.room
        for name, tensor in draft.tensors.items():
            start, end = end, end + tensor.nbytes
            places[name] = buffer[start:end].view(tensor.dtype).view(tensor.shape)
        pages = -(-(end - first) // PAGE) * PAGE
        images.append(buffer[first : first + pages])
        first += pages
    return images, places


def images_size(drafts: list[Draft]) -> int:
    return PAGE + sum(draft.room + sum(tensor.nbytes for tensor in draft.tensors.values()) + PAGE for draft in drafts)


def _put_image(file: FileIO, image: torch.Tensor) -> None:
    """Write all of an image. O_DIRECT avoids the page cache: a third of the time for large files."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with suppress(OSError):  # some file systems have no O_DIRECT
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
    with ThreadPoolExecutor(4) as pool:  # parallel file systems are faster with several writes at once
        parts = range(0, len(image), PART)
        list(pool.map(lambda start: _put(file, memory(image[start : start + PART]), start), parts))  # raises the first error
    fcntl.fcntl(file, fcntl.F_SETFL, flags)  # the header is written next, which is no whole page


def _put(file: FileIO, content: bytes | ctypes.Array, start: int) -> None:
    """Write all of the content to this place of a file. Linux writes 2 GiB at most at once, and less on an almost full disk."""
    left = memoryview(content)
    while left:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)  # before the write: another part's thread may clear O_DIRECT meanwhile
        try:
            done = os.pwrite(file.fileno(), left, start)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # larger pages than ours, or a limit within a page
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
    return StorageError(f"{path}: {error.strerror}{space}: {fix_of(error, path)}; what was saved before is whole")


def _checksums(tensors: dict[str, torch.Tensor], meanwhile: Callable[[], None] = lambda: None) -> dict[str, int]:
    """crc32 of each tensor, by name. meanwhile: work for this thread while other threads compute them."""
    with ThreadPoolExecutor() as pool:  # zlib releases the GIL: half the time on two cores
        sums = pool.map(lambda tensor: zlib.crc32(memory(tensor)), tensors.values())
        meanwhile()
        return dict(zip(tensors, sums, strict=True))


def memory(tensor: torch.Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor, not copied: the caller must keep the tensor alive."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)


def load(stored: Stored) -> torch.Tensor:
    tensor = torch.empty(stored.shape, dtype=DTYPE_NAMED[stored.dtype])
    stored.read_into(memory(tensor))
    return tensor


def read(path: Path, lazily: bool = False) -> tuple[dict[str, Any], dict]:
    """Tensors and document of a snapshot. Compares every checksum. Raises SnapshotError that names the file.

    path: a file or an index; in_place() finds the index if the file is missing. lazily: a Stored in place of each tensor.
    """
    path = in_place(path)
    with opened(path) as (stored, document):
        if type(document["format"]) is not int or document["format"] < 1:
            raise ValueError(f"its format is {document['format']!r}")
        if document["format"] > FORMAT:
            versions = printable(document.get("versions"))
            raise NewerFormatError(
                f"{path} has format {document['format']}, of {versions}; this ddp_core reads up to format {FORMAT}: update it"
            )
        tensors: dict[str, Any] = stored
        if lazily:
            sums = {name: tensor.checksum() for name, tensor in stored.items()}
        else:
            tensors = {name: load(tensor) for name, tensor in stored.items()}
            sums = _checksums(tensors)
        refuse_damaged(path, sums, document)
        return migrate(tensors, document)


def migrate(tensors: dict[str, torch.Tensor], document: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """Convert format 1 to format 2. Format 1 knew the built-in problems only, and saved no step counts of the optimizer."""
    if document["format"] > 1 or "problem" not in document:
        return tensors, document
    problem = dict(document["problem"])
    size = problem.pop("model_size", None)
    problem |= dict(clip_norm=0.0, row_seeds="on") | (dict(model_size=size) if problem.get("workload") == "gpt" else {})
    if problem.get("optimizer") == "adamw":
        steps = torch.tensor(float(document["step"]))
        names = [name.removeprefix("optim.mean.") for name in tensors if name.startswith("optim.mean.")]
        tensors = tensors | {f"optim.step.{name}": steps.clone() for name in names}
    elif not problem.get("momentum"):  # format 1 saved a momentum of zeros
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim.")}
    return tensors, document | dict(problem=problem)


def refuse_unknown_dtypes(tensors: dict[str, torch.Tensor], workload: str) -> None:
    """Raises WorkloadError for dtypes that a snapshot cannot hold: before training, not at its first save."""
    unknown = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if unknown:
        raise WorkloadError(
            f"--workload {workload}: {unknown[0]}, which a snapshot cannot hold: make it real or integer, or no parameter and "
            f"no persistent buffer (register_buffer(..., persistent=False))"
        )

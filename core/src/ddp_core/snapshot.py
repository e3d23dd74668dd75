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
import json
import os
import shutil
import socket
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ddp_core.errors import NewerFormatError, SnapshotError, StorageError, WorkloadError, printable
from ddp_core.show import as_json

MOST_HEADER = 2**25  # bytes: of 300,000 epochs and a thousand tensors; reading one takes 30 times its size
FORMAT = 2  # 1: before workloads were open (migrate)
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}


def write(path: Path, tensors: dict[str, torch.Tensor], document: dict) -> None:
    """Write a snapshot so that a crash at any moment leaves the old file or the new one, whole. Raises StorageError.

    Temporary file in the same folder, fsync, rename, fsync of the folder. By hand, for safetensors' own writer needs
    NumPy, does not fsync, and makes a file that the group cannot read.
    """
    # Wide numbers first, so that each stands at a multiple of its size; then by name.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    tensors = {name: tensors[name].detach().cpu().contiguous() for name in order}
    sums = _checksums(tensors)
    document = document | dict(format=FORMAT, crc32=sums)
    document |= dict(document_crc32=zlib.crc32(as_json(document)))
    header: dict[str, dict] = {"__metadata__": {"ddp_core": as_json(document).decode()}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = dict(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape), data_offsets=[start, end])
    head = as_json(header)
    head += b" " * (-len(head) % 8)
    if len(head) > MOST_HEADER:  # read() would refuse it
        raise StorageError(f"{path}: {len(head) >> 20} MB of history and names do not fit: go on in a new --run-dir")
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for tensor in tensors.values():
                file.write(memory(tensor))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise no_storage(path, error, end) from error


def no_storage(path: Path, error: OSError, need: int = 0) -> StorageError:
    space = ""
    with suppress(OSError):
        free = shutil.disk_usage(path.parent).free
        space = f": {need / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB free (a quota may allow less)"
    return StorageError(f"{path}: {error.strerror}{space}: free space and submit again; the snapshot before it is whole")


def _checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    with ThreadPoolExecutor() as pool:  # zlib lets go of the interpreter: half the time on two cores
        return dict(zip(tensors, pool.map(lambda tensor: zlib.crc32(memory(tensor)), tensors.values()), strict=True))


def memory(tensor: torch.Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor, not copied: the caller keeps the tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or 1)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and document of a snapshot, every checksum compared. Raises SnapshotError that names the file."""
    try:
        _refuse_unreadable(path)
        with safe_open(path, "pt") as file:
            document = json.loads((file.metadata() or {})["ddp_core"])
            if type(document["format"]) is not int or document["format"] < 1:
                raise ValueError(f"its format is {document['format']!r}")
            if document["format"] > FORMAT:
                raise NewerFormatError(
                    f"{path} has format {document['format']}, of ddp_core {_writer(document)}; this ddp_core reads up to "
                    f"format {FORMAT}: update it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safe_open is no dict
            sums = _checksums(tensors)
            sums["the document"] = zlib.crc32(as_json({name: document[name] for name in document if name != "document_crc32"}))
            written = document["crc32"] | {"the document": document["document_crc32"]}
            broken = [name for name in sums.keys() | written.keys() if sums.get(name) != written.get(name)]
            if not broken:
                return migrate(tensors, document)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {printable(error)}"
        raise SnapshotError(f"{path} is not a whole snapshot ({why})") from error
    raise SnapshotError(f"{path} is damaged: the checksum of {printable(', '.join(sorted(broken)))} differs")


def _refuse_unreadable(path: Path) -> None:
    """What would be waited for, or take memory out of all proportion, before anything of it is read."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        if (size := int.from_bytes(file.read(8), "little")) > MOST_HEADER:
            raise ValueError(f"its header should have {size} bytes, more than {MOST_HEADER}")


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

"""A snapshot larger than --max-shard-size is a set: several files and an index, in Hugging Face's convention.

    snapshot.safetensors.index.json                         the document, and which file has which tensor
    snapshot-42-1a2b3c4d-00001-of-00003.safetensors         of step 42; 1a2b3c4d is a checksum of all files' content

A set exists once its index has its name. Other contents have other names, so no file of another set is overwritten. A save
removes the files that no index in the folder names. transformers and accelerate read a set by its index:
https://huggingface.co/docs/transformers/big_models
"""

import json
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.errors import SnapshotError, printable

PIECE = 2**24  # bytes
MOST_HEADER = 2**25  # bytes, for 300,000 epochs and a thousand tensors; reading a header takes 30 times its size in memory
BYTES = dict(F64=8, F32=4, F16=2, BF16=2, BOOL=1, I64=8, I32=4, I16=2, I8=1, U8=1)  # bytes of one number
SET_FILE = re.compile(r"\w+-\d+-[0-9a-f]{8}-\d{5,}-of-\d{5,}\.safetensors")


def as_json(value: dict) -> bytes:
    """The JSON of a snapshot: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index.json")


def is_index(path: Path) -> bool:
    return path.suffix == ".json"


def names_of_files(path: Path, step: int, sums: list[dict[str, int]]) -> list[Path]:
    """Paths of a set's files. sums: for each file, its tensors' checksums. Another content or split gives other names."""
    content, count = zlib.crc32(as_json(dict(files=sums))), len(sums)
    return [path.with_name(f"{path.stem}-{step}-{content:08x}-{n + 1:05}-of-{count:05}{path.suffix}") for n in range(count)]


def in_place(path: Path) -> Path:
    """Where a snapshot is: the file of that name, or the index of a set.

    Both exist after a kill between the commit of one and the removal of the other. Then the one with the higher step counts.
    """
    forms = [form for form in (path, index_of(path)) if form.exists()]
    return max(forms, key=_step) if len(forms) > 1 else (forms or [path])[0]


def in_form_of(other: Path, name: Path) -> Path:
    """The path of a snapshot of this name, in the form of the other: an index if the other is one, else the file."""
    return index_of(name) if is_index(other) else name


def other_form(path: Path) -> Path:
    """The other possible path of a snapshot: for a file its index, for an index the file."""
    return path.with_name(path.name.removesuffix(".index.json")) if is_index(path) else index_of(path)


def sweep(folder: Path) -> None:
    """Remove files of sets that no index names. An index is searched as bytes: a damaged one keeps the files it still names."""
    indexes = b"".join(index.read_bytes() for index in folder.glob("*.safetensors.index.json") if index.is_file())
    for file in of_sets(folder):
        if file.name.encode() not in indexes:
            file.unlink()


def of_sets(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*.safetensors") if SET_FILE.fullmatch(file.name)]


# ---- reading ------------------------------------------------------------------------------------------------------


def _json_in(path: Path) -> tuple[dict, int]:
    """A file's header, or an index; and the bytes of it. Raises ValueError, before more is read, for a file that would block (a
    pipe) or whose header would fill the memory.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError("it is no file")  # a pipe, a device
    with open(path, "rb") as file:
        size = path.stat().st_size if is_index(path) else int.from_bytes(file.read(8), "little")
        if size > MOST_HEADER:
            raise ValueError(f"its header should have {size} bytes, more than {MOST_HEADER}")
        return json.loads(file.read(size)), size


@dataclass(frozen=True)
class Stored:
    """A tensor that is still in its file, as the header describes it."""

    path: Path
    dtype: str  # safetensors' name, such as F32
    shape: tuple[int, ...]
    start: int  # byte in the file
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def read_into(self, memory: Any) -> Any:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            if file.readinto(memory) != self.nbytes:
                raise SnapshotError(f"{self.path} has become shorter while it was read")
        return memory

    def checksum(self) -> int:
        total, left = 0, self.nbytes
        with open(self.path, "rb") as file:
            file.seek(self.start)
            while piece := file.read(min(PIECE, left)):
                total, left = zlib.crc32(piece, total), left - len(piece)
        return total


def header_of(path: Path) -> tuple[dict[str, Stored], dict]:
    """Tensors and metadata of one file. safetensors would map the whole file, and `ulimit -v` counts that.

    Raises ValueError, KeyError or TypeError unless the tensors fill the file without gaps.
    """
    header, size = _json_in(path)
    metadata, place, entries = header.pop("__metadata__", {}), 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if (
            start != place
            or any(type(n) is not int or n < 0 for n in shape)
            or math.prod(max(n, 1) for n in shape) >= 2**60
            or end - start != math.prod(shape) * BYTES[entry["dtype"]]
        ):
            raise ValueError(f"{printable(name)} has a place or a size that cannot be")
        entries[name], place = Stored(path, entry["dtype"], shape, 8 + size + start, end - start), end
    if path.stat().st_size != 8 + size + place:
        raise ValueError(f"it has {path.stat().st_size} bytes, and its header tells of {8 + size + place}")
    return entries, metadata


def document_in(metadata: dict | None) -> dict:
    """The document in a file's metadata. Raises ValueError if there is none."""
    metadata = metadata or {}
    if "ddp_core" not in metadata:
        raise ValueError("it has no document; of a set, that is in the index, *.safetensors.index.json")
    return json.loads(metadata["ddp_core"])


def assemble(index: Path) -> tuple[dict[str, Stored], dict]:
    """The tensors and the document of a set.

    Raises OSError, and ValueError, KeyError or TypeError unless the files hold exactly what the index says.
    """
    read, _ = _json_in(index)
    names: dict[str, set[str]] = {}
    for tensor, name in read["weight_map"].items():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{printable(tensor)} should be in {printable(name)}, which is no file beside it")
        names.setdefault(name, set()).add(tensor)
    tensors: dict[str, Stored] = {}
    for name, expected in names.items():
        parts, _ = header_of(index.with_name(name))
        if wrong := sorted(parts.keys() ^ expected):
            raise ValueError(f"{printable(wrong[0])} is in the index or in {printable(name)}, not in both")
        tensors |= parts
    total = sum(part.nbytes for part in tensors.values())
    if read["metadata"]["total_size"] != total:
        raise ValueError(f"its tensors have {total} bytes, and it tells of {printable(read['metadata']['total_size'])}")
    return tensors, read["metadata"]["ddp_core"]


@contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str, Stored], dict]]:
    """The tensors and the document of a file or a set. Raises SnapshotError that names the file, also if the caller's block
    finds the document malformed.
    """
    path = in_place(path)
    try:
        if is_index(path):
            yield assemble(path)
        else:
            tensors, metadata = header_of(path)
            yield tensors, document_in(metadata)
    except OSError as error:
        file = Path(error.filename or path)
        where = path if file == path else f"{path} is not a whole snapshot: {file.name}"
        raise SnapshotError(f"{where}: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path} is not a whole snapshot ({type(error).__name__}: {printable(error)})") from error


def refuse_damaged(path: Path, sums: dict[str, int], document: dict) -> None:
    """Raises SnapshotError that names the tensors whose checksums differ from the written ones. sums: checksums as read."""
    read = sums | {"the document": zlib.crc32(as_json({n: value for n, value in document.items() if n != "document_crc32"}))}
    written = document["crc32"] | {"the document": document["document_crc32"]}
    if broken := sorted(name for name in read.keys() | written.keys() if read.get(name) != written.get(name)):
        raise SnapshotError(f"{path} is damaged: the checksum of {printable(', '.join(broken))} differs")


def _step(path: Path) -> float:
    """The step of a snapshot; infinite if it cannot be read, so that it is chosen and reported, not ignored in silence."""
    try:
        content, _ = _json_in(path)
        document = content["metadata"]["ddp_core"] if is_index(path) else document_in(content["__metadata__"])
        return int(document["step"])
    except (ArithmeticError, AttributeError, OSError, LookupError, RecursionError, TypeError, ValueError):
        return math.inf

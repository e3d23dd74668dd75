"""A snapshot of several files: larger than --max-shard-size it is a set with an index, in Hugging Face's convention.

    snapshot.safetensors.index.json                         the document, and which file has which tensor
    snapshot-42-1a2b3c4d-00001-of-00003.safetensors         of step 42; 1a2b3c4d is a checksum of all that is in the files

A set is there when its index has its name. Other contents have other names: no file of another set is overwritten. A save
sweeps away the files that no index in the folder names. transformers and accelerate read a set by its index:
https://huggingface.co/docs/transformers/big_models
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_core.errors import printable

MOST_HEADER = 2**25  # bytes: of 300,000 epochs and a thousand tensors; reading one takes 30 times its size
LIKE_OURS = re.compile(r"\w+-\d+-[0-9a-f]{8}-\d{5,}-of-\d{5,}\.safetensors")


def as_json(value: dict) -> bytes:
    """As it stands in a snapshot: equal values are equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.index.json")


def is_index(path: Path) -> bool:
    return path.suffix == ".json"


def names_of_files(path: Path, step: int, sums: list[dict[str, int]]) -> list[Path]:
    """sums: of each file the checksums of its tensors. With other contents, or otherwise split, they have other names."""
    content, count = zlib.crc32(as_json(dict(files=sums))), len(sums)
    return [path.with_name(f"{path.stem}-{step}-{content:08x}-{n + 1:05}-of-{count:05}{path.suffix}") for n in range(count)]


def in_place(path: Path) -> Path:
    """What a snapshot is in: the file of that name, or the index of a set.

    Both are there after a kill between the commit of one and the removal of the other. Then it is the one that is further.
    """
    there = [form for form in (path, index_of(path)) if form.exists()]
    return max(there, key=_step) if len(there) > 1 else (there or [path])[0]


def in_form_of(other: Path, name: Path) -> Path:
    """Where a snapshot of this name is, if it is a file or a set as the other is."""
    return index_of(name) if is_index(other) else name


def other_form(path: Path) -> Path:
    """The other path that a snapshot of this name can have: of a file its index, of an index the file."""
    return path.with_name(path.name.removesuffix(".index.json")) if is_index(path) else index_of(path)


def sweep(folder: Path) -> None:
    """Remove files of sets that no index names. In its bytes: one that is damaged keeps the files that it still names."""
    indexes = b"".join(index.read_bytes() for index in folder.glob("*.safetensors.index.json") if index.is_file())
    for file in of_sets(folder):
        if file.name.encode() not in indexes:
            file.unlink()


def of_sets(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*.safetensors") if LIKE_OURS.fullmatch(file.name)]


# ---- reading ------------------------------------------------------------------------------------------------------


def refuse_unreadable(path: Path) -> None:
    """What would be waited for, or take memory out of all proportion, before anything of it is read. Raises ValueError."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError("it is no file")  # a pipe, a device
    with open(path, "rb") as file:
        size = path.stat().st_size if is_index(path) else int.from_bytes(file.read(8), "little")
        if size > MOST_HEADER:
            raise ValueError(f"its header should have {size} bytes, more than {MOST_HEADER}")


def document_in(metadata: dict | None) -> dict:
    """Of a file's metadata. Raises ValueError."""
    metadata = metadata or {}
    if "ddp_core" not in metadata:
        raise ValueError("it has no document; of a set, that is in the index, *.safetensors.index.json")
    return json.loads(metadata["ddp_core"])


def assemble(index: Path, parts_of: Callable[[Path], dict[str, Any]]) -> tuple[dict[str, Any], dict]:
    """The tensors of a set, each as parts_of() finds it in its file, and the document.

    Raises what reading raises, and ValueError, KeyError or TypeError unless the files have just what the index says.
    """
    refuse_unreadable(index)
    read = json.loads(index.read_bytes())
    names: dict[str, set[str]] = {}
    for tensor, name in read["weight_map"].items():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{printable(tensor)} should be in {printable(name)}, which is no file beside it")
        names.setdefault(name, set()).add(tensor)
    found: dict[str, Any] = {}
    for name, expected in names.items():
        refuse_unreadable(index.with_name(name))
        parts = parts_of(index.with_name(name))
        if wrong := sorted(parts.keys() ^ expected):
            raise ValueError(f"{printable(wrong[0])} is in the index or in {printable(name)}, not in both")
        found |= parts
    total = sum(part.nbytes for part in found.values())
    if read["metadata"]["total_size"] != total:
        raise ValueError(f"its tensors have {total} bytes, and it tells of {printable(read['metadata']['total_size'])}")
    return found, read["metadata"]["ddp_core"]


def _step(path: Path) -> float:
    """What cannot be read is further than all: it is not passed over in silence."""
    try:
        refuse_unreadable(path)
        with open(path, "rb") as file:
            if is_index(path):
                return int(json.load(file)["metadata"]["ddp_core"]["step"])
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            return int(document_in(header["__metadata__"])["step"])
    except (ArithmeticError, OSError, LookupError, RecursionError, TypeError, ValueError, struct.error):
        return math.inf

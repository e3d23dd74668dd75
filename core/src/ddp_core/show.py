"""What is in a snapshot, from its own bytes: show and verify need neither torch nor safetensors, as on a login node.

python -m ddp_core.snapshot show FILE...     how far it is, of which run, its epochs and its tensors
python -m ddp_core.snapshot verify FILE...   are all bytes those that were written?
python -m ddp_core.snapshot diff FILE FILE   which tensors differ, and by how much
"""

import itertools
import mmap
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddp_core.config import Parser
from ddp_core.errors import ExitCode, Failure, SnapshotError, UsageError, printable
from ddp_core.files import Entry, as_json, assemble, document_in, header_of, in_place, is_index

PART = 2**22  # numbers that diff compares at once


def main(argv: list[str]) -> int:
    """The command line; returns the exit code (errors.py; of diff 1 where something differs)."""
    if argv[:1] == ["convert"]:
        from ddp_core.convert import main as convert

        return convert(argv)
    usage = "python -m ddp_core.snapshot show FILE... | verify FILE... | diff FILE FILE | convert OLD.pt --run-dir DIR ..."
    parser = Parser(
        usage=usage,
        description="show: how far a snapshot is, of which run, its epochs and its tensors. verify: every checksum. diff: "
        "which tensors differ, and by how much. convert: a snapshot of another program's checkpoint (convert --help).",
        epilog="exit codes: 0 done, 1 (of diff) they differ, 2 usage, 5 a file is no whole snapshot",
        allow_abbrev=False,
    )
    parser.add_argument("act", choices=["show", "verify", "diff"])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    try:
        args = parser.parse_args(argv)
        if args.act == "diff":
            if len(args.files) != 2:
                raise UsageError(f"diff compares two files, and {len(args.files)} are named")
            return diff(*args.files)
        acts = [_tried(show if args.act == "show" else verify, path) for path in args.files]
        return max(acts)
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)


def _tried(act: Callable[[Path], None], path: Path) -> int:
    try:
        act(path)
    except SnapshotError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    return int(ExitCode.DONE)


def refuse_damaged(path: Path, sums: dict[str, int], document: dict) -> None:
    """sums: the checksum of each tensor. Raises SnapshotError that names those which are not as they were written."""
    read = sums | {"the document": zlib.crc32(as_json({n: value for n, value in document.items() if n != "document_crc32"}))}
    written = document["crc32"] | {"the document": document["document_crc32"]}
    if broken := sorted(name for name in read.keys() | written.keys() if read.get(name) != written.get(name)):
        raise SnapshotError(f"{path} is damaged: the checksum of {printable(', '.join(broken))} differs")


@dataclass(frozen=True)
class Part:
    """A tensor: what the header says of it, and its bytes."""

    entry: Entry
    bytes: memoryview

    @property
    def nbytes(self) -> int:
        return len(self.bytes)


@contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str, Part], dict]]:
    """The tensors of a file or a set, and the document. Raises SnapshotError that names the file."""
    path = in_place(path)
    try:
        with ExitStack() as files:
            if is_index(path):
                parts, document = assemble(path, lambda file: files.enter_context(_mapped(file))[0])
            else:
                parts, metadata = files.enter_context(_mapped(path))
                document = document_in(metadata)
            yield parts, document
    except OSError as error:
        raise SnapshotError(f"{error.filename or path}: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path} is not a whole snapshot ({type(error).__name__}: {printable(error)})") from error


@contextmanager
def _mapped(path: Path) -> Iterator[tuple[dict[str, Part], dict]]:
    """The tensors of one file, and its metadata."""
    entries, metadata = header_of(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw, memoryview(raw) as view:
        parts = {name: Part(entry, view[entry.start : entry.start + entry.nbytes]) for name, entry in entries.items()}
        try:
            yield parts, metadata
        finally:
            for part in parts.values():
                part.bytes.release()


# ---- show -----------------------------------------------------------------------------------------------------------


def show(path: Path) -> None:
    with opened(path) as (parts, document):
        print("\n".join(printable(line, 1000) for line in _lines(path, parts, document)))


def _lines(path: Path, parts: dict[str, Part], document: dict) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    yield f"{path}: format {document['format']}, {versions}, {document['world_size']} ranks"
    yield f"  step {document['step']}, {document['epochs_run']} epochs of {document['steps_per_epoch']} steps"
    yield "  problem: " + " ".join(f"{name}={value}" for name, value in document["problem"].items())
    yield f"  data: {document['data']}"
    if document["best"]:
        yield f"  lowest held-out loss: {float.fromhex(document['best'][1]):.6g} after epoch {document['best'][0]}"
    names = document.get("measured") or ["loss", "eval_loss"]  # and metrics, whose names older snapshots lack
    for epoch, *values in document["history"]:
        pairs = itertools.zip_longest(names[: len(values)], values, fillvalue="metric")
        yield f"  epoch={epoch:<5}" + "".join(f"  {name}={float.fromhex(value):.6g}" for name, value in pairs)
    size = sum(part.nbytes for part in parts.values())
    yield f"  {len(parts)} tensors, {size / 1e6:.3f} MB"
    width = max(map(len, parts), default=0)
    for name in sorted(parts):
        yield f"    {name:<{width}}  {parts[name].entry.dtype:<4}  {[*parts[name].entry.shape]}"


# ---- verify ---------------------------------------------------------------------------------------------------------


def verify(path: Path) -> None:
    """Raises SnapshotError that names what is damaged."""
    with opened(path) as (parts, document):
        with ThreadPoolExecutor() as pool:  # zlib lets go of the interpreter
            sums = pool.map(lambda part: zlib.crc32(part.bytes), parts.values())
            refuse_damaged(path, dict(zip(parts, sums, strict=True)), document)
        size = sum(part.nbytes for part in parts.values())
    print(f"{path}: whole, {len(parts)} tensors, {size / 1e6:.3f} MB, step {document['step']}")


# ---- diff -----------------------------------------------------------------------------------------------------------


def diff(one: Path, other: Path) -> int:
    """Prints what differs; 1 where something does. Raises SnapshotError on a damaged file: its numbers say nothing."""
    for path in (one, other):
        verify(path)
    differences = []
    with opened(one) as (mine, document), opened(other) as (theirs, another):
        for name in sorted((document.keys() | another.keys()) - {"crc32", "document_crc32"}):
            differences += _differing(name, document.get(name), another.get(name))
        for name in sorted(mine.keys() | theirs.keys()):
            kinds = [str(side[name].entry) if name in side else "missing" for side in (mine, theirs)]
            if kinds[0] != kinds[1]:
                differences.append(f"{name}: {kinds[0]} and {kinds[1]}")
            elif mine[name].bytes != theirs[name].bytes:
                differences.append(f"{name}: {_distance(mine[name].entry.dtype, mine[name].bytes, theirs[name].bytes)}")
    print("\n".join(printable(line, 1000) for line in differences) or "they hold the same")
    return 1 if differences else 0


def _differing(name: str, one: object, other: object) -> list[str]:
    """What differs in a part of the document; of dictionaries, in their entries."""
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [line for key in keys for line in _differing(f"{name}.{key}", one.get(key), other.get(key))]
    if isinstance(one, list) and isinstance(other, list) and name == "history":
        same = [mine == theirs for mine, theirs in zip(one, other, strict=False)]
        return [f"history: {len(one)} and {len(other)} epochs, of which the first {[*same, False].index(False)} are the same"]
    return [f"{name}: {one} and {other}"]


def _distance(dtype: str, one: memoryview, other: memoryview) -> str:
    """How many numbers differ, and by how much."""
    import torch

    from ddp_core.snapshot import DTYPES

    kind = {name: kind for kind, name in DTYPES.items()}[dtype]
    count, worst, largest = 0, 0.0, 0.0
    numbers = [torch.frombuffer(bytearray(part), dtype=kind) for part in (one, other)]
    for pair in zip(*(values.split(PART) for values in numbers), strict=True):
        bits = [values.view(torch.uint8).view(len(values), -1) for values in pair]
        count += int((bits[0] != bits[1]).any(1).sum())
        mine, theirs = (values.double() for values in pair)
        worst = max(worst, (mine - theirs).abs().nan_to_num(nan=float("inf")).max().item())
        largest = max(largest, mine.abs().max().item())
    return f"{count} of {len(numbers[0])} numbers differ, by at most {worst:.3g} (the largest is {largest:.3g})"

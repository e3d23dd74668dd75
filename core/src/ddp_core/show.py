"""Shows what is in a snapshot. show and verify need neither torch nor safetensors, and so run on any login node.

python -m ddp_core.snapshot show FILE...                     its step, its run, its epochs and its tensors
python -m ddp_core.snapshot verify FILE...                   are all bytes as they were written?
python -m ddp_core.snapshot diff FILE FILE                   which tensors differ, and by how much
python -m ddp_core.snapshot convert OLD.pt --run-dir DIR     from another program's checkpoint (convert --help)

exit codes: 0 done, 1 (of diff) they differ, 2 usage, 5 a file is no whole snapshot
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_core.config import Parser
from ddp_core.errors import ExitCode, Failure, SnapshotError, UsageError, printable
from ddp_core.files import Stored, opened, refuse_damaged

PART = 2**22  # numbers that diff compares at once


def main(argv: list[str]) -> int:
    """The command line; returns the exit code (errors.py; for diff, 1 if something differs)."""
    if argv[:1] == ["convert"]:
        from ddp_core.convert import main as convert

        return convert(argv)
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m ddp_core.snapshot", description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("act", choices=["show", "verify", "diff"])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    try:
        args = parser.parse_args(argv)
        if args.act == "diff":
            if len(args.files) != 2:
                raise UsageError(f"diff compares two files, and {len(args.files)} are named")
            return diff(*args.files)
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    act, code = show if args.act == "show" else verify, ExitCode.DONE
    for path in args.files:
        try:
            act(path)
        except SnapshotError as error:
            print(f"error: {error}", file=sys.stderr)
            code = error.code
    return int(code)


def show(path: Path) -> None:
    with opened(path) as (tensors, document):
        print("\n".join(printable(line, 1000) for line in _lines(path, tensors, document)))


def _lines(path: Path, tensors: dict[str, Stored], document: dict) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    yield f"{path}: format {document['format']}, {versions}, {document['world_size']} ranks"
    yield f"  step {document['step']}, {document['epochs_run']} epochs of {document['steps_per_epoch']} steps"
    yield "  problem: " + " ".join(f"{name}={value}" for name, value in document["problem"].items())
    yield f"  data: {document['data']}"
    if document["best"]:
        yield f"  lowest held-out loss: {float.fromhex(document['best'][1]):.6g} after epoch {document['best'][0]}"
    names = document.get("measured") or ["loss", "eval_loss"]  # older snapshots lack the names of metrics
    for epoch, *values in document["history"]:
        pairs = itertools.zip_longest(names[: len(values)], values, fillvalue="metric")
        yield f"  epoch={epoch:<5}" + "".join(f"  {name}={float.fromhex(value):.6g}" for name, value in pairs)
    size = sum(tensor.nbytes for tensor in tensors.values())
    yield f"  {len(tensors)} tensors, {size / 1e6:.3f} MB"
    width = max(map(len, tensors), default=0)
    for name in sorted(tensors):
        yield f"    {name:<{width}}  {tensors[name].dtype:<4}  {[*tensors[name].shape]}"


def verify(path: Path) -> None:
    """Raises SnapshotError that names what is damaged."""
    with opened(path) as (tensors, document):
        with ThreadPoolExecutor() as pool:  # zlib releases the GIL
            sums = pool.map(Stored.checksum, tensors.values())
            refuse_damaged(path, dict(zip(tensors, sums, strict=True)), document)
        size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{path}: whole, {len(tensors)} tensors, {size / 1e6:.3f} MB, step {document['step']}")


def diff(one: Path, other: Path) -> int:
    """Print what differs. Returns 1 if something does, else 0. Raises SnapshotError for a damaged file."""
    for path in (one, other):
        verify(path)
    differences = []
    with opened(one) as (mine, document), opened(other) as (theirs, another):
        for name in sorted((document.keys() | another.keys()) - {"crc32", "document_crc32"}):
            differences += _differing(name, document.get(name), another.get(name))
        for name in sorted(mine.keys() | theirs.keys()):
            kinds = [str(side[name]) if name in side else "missing" for side in (mine, theirs)]
            if kinds[0] != kinds[1]:
                differences.append(f"{name}: {kinds[0]} and {kinds[1]}")
                continue
            numbers = [side[name].read_into(bytearray(side[name].nbytes)) for side in (mine, theirs)]
            if numbers[0] != numbers[1]:
                differences.append(f"{name}: {_distance(mine[name].dtype, *numbers)}")
    print("\n".join(printable(line, 1000) for line in differences) or "they hold the same")
    return 1 if differences else 0


def _differing(name: str, one: object, other: object) -> list[str]:
    """Lines on what differs in a part of the document; dictionaries are compared entry by entry."""
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [line for key in keys for line in _differing(f"{name}.{key}", one.get(key), other.get(key))]
    if isinstance(one, list) and isinstance(other, list) and name == "history":
        same = [mine == theirs for mine, theirs in zip(one, other, strict=False)]
        return [f"history: {len(one)} and {len(other)} epochs, of which the first {[*same, False].index(False)} are the same"]
    return [f"{name}: {one} and {other}"]


def _distance(dtype: str, *sides: bytearray) -> str:
    """How many numbers differ, and by how much."""
    import torch

    from ddp_core.snapshot import DTYPE_NAMED

    count, worst, largest = 0, 0.0, 0.0
    numbers = [torch.frombuffer(side, dtype=DTYPE_NAMED[dtype]) for side in sides]
    for pair in zip(*(values.split(PART) for values in numbers), strict=True):
        bits = [values.view(torch.uint8).view(len(values), -1) for values in pair]
        count += int((bits[0] != bits[1]).any(1).sum())
        mine, theirs = (values.double() for values in pair)
        worst = max(worst, (mine - theirs).abs().nan_to_num(nan=float("inf")).max().item())
        largest = max(largest, mine.abs().max().item())
    return f"{count} of {len(numbers[0])} numbers differ, by at most {worst:.3g} (the largest is {largest:.3g})"

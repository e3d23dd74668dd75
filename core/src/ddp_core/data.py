"""The rows of a workload: tensors in memory or in a mapped file, or an object that returns its rows one by one.

A workload's data() may return, for training and for held-out rows alike:
  - tensors: Rows(inputs, targets), or a tuple or dictionary of tensors or arrays of equal first dimension. They are
    indexed by a whole batch at once, on the device if they fit there. Memory-mapped tensors (mapped(), numpy's
    mmap_mode) stay in their file, and only the rows of a batch are read.
  - a torch.utils.data.Dataset, or an object with length and index: rows are read one by one through PyTorch's
    DataLoader (--workers), with Python's, NumPy's and torch's generators seeded for each row.

All ranks call data() at the same time: write a cache under a name that no other rank uses, then rename it.
With self.once_a_node(path), one rank of a node reads a file, and the others share its copy (staging.py).
An attribute `fingerprint` names the content. Ranks compare it, and a snapshot resumes only with the same one. Without it,
tensors are hashed; of data that are read row by row, 16 rows are hashed.
"""

import ast
import copy
import hashlib
import itertools
import json
import math
import mmap
import os
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ddp_core.errors import PreflightError, UsageError
from ddp_core.loading import form_of, some
from ddp_core.order import generator_positions, seed_everything, words
from ddp_core.replicas import BITS
from ddp_core.snapshot import DTYPE_NAMED, memory
from ddp_core.workload import Workload, blaming

HELD_OUT = 5  # every fifth row is held out, if the data have no split of their own
HASHED_WHOLE = 2**30  # bytes: a larger tensor's fingerprint covers its size and 1 MiB in every 64
LOOKED_AT = 2**20  # numbers of a column that are checked for loss by rounding
COMPARED, COMPARED_ROWS = 2**28, 2**17  # bytes and rows of columns, held-out rows or training rows, that are compared in 0.2 s
SAMPLED_ROWS = 16  # rows in the fingerprint of data that are read row by row
SAME_ROWS = "held-out rows are the training rows: what is learned by heart counts as success, and chooses best.safetensors"
SOME_SAME_ROWS = "{same} of {count} held-out rows are training rows, too: what is learned by heart counts as success"
KEPT_ROWS = (
    "{what}row {row} drew random numbers when it was first read, and none when it was read again: __getitem__ keeps what it "
    "has drawn (a dictionary, lru_cache), and each epoch has the same numbers; keep only what comes before them"
)


class Rows:
    """Columns of equal length, one entry a row; rows[index] is a batch: a tuple, a dictionary, or one tensor."""

    batched = True  # the index is an int64 tensor of row numbers: a whole batch at once

    def __init__(self, *columns: torch.Tensor, names: Sequence[str] = (), bare: bool = False, fingerprint: str = ""):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing here writes
            self.columns = tuple(torch.as_tensor(column) for column in columns)
        self.names, self.bare, self.own_fingerprint = tuple(names), bare, fingerprint
        lengths = {len(column) for column in self.columns}
        if len(lengths) != 1:
            each = [f"{names[n] if names else n}: {len(column)}" for n, column in enumerate(self.columns)]
            raise ValueError(f"columns of unequal length ({', '.join(each[:16])}), and each should have an entry for every row")

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: torch.Tensor) -> Any:
        batch = tuple(column.index_select(0, index) for column in self.columns)
        if self.names:
            return dict(zip(self.names, batch, strict=True))
        return batch[0] if self.bare else batch

    @property
    def are_columns(self) -> bool:
        """Whether a batch is the columns' rows unchanged, so that they can be converted once. Not if a subclass changes it."""
        return type(self).__getitem__ is Rows.__getitem__

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def rounded(self, dtype: torch.dtype) -> list[str]:
        """Names of fp64 columns whose differences between rows keep less than three digits in this dtype: times in seconds."""
        names = []
        for name, column in zip(self.names or map(str, range(len(self.columns))), self.columns, strict=True):
            if column.dtype == torch.float64 != dtype and len(column) > 1:
                first = column[: max(2, LOOKED_AT // max(1, column[0].numel()))]
                spread, lost = first.std(0), (first - first.to(dtype)).abs().amax(0)
                names += [name] if ((spread > 0) & (lost > 1e-3 * spread)).any() else []
        return names

    @cached_property
    def fingerprint(self) -> str:
        return self.own_fingerprint or digest(column.contiguous().view(-1).view(torch.uint8) for column in self.columns)

    def with_columns(self, columns) -> "Rows":
        other = copy.copy(self)  # keeps the subclass and its attributes
        other.columns = tuple(columns)
        other.__dict__.pop("fingerprint", None)
        return other


class Bytes:
    """Rows of `width` bytes of files, which are joined by line feeds. The files are mapped, never loaded whole."""

    batched = True

    def __init__(self, files: Sequence[Path], width: int, where: object):
        self.width, self.parts = width, [contents(path) for path in files]
        self.starts = [0, *itertools.accumulate(len(part) + 1 for part in self.parts)]
        self.total = max(0, self.starts[-1] - 1)
        if len(self) < HELD_OUT:
            raise PreflightError(f"{where} has {len(files)} files of {self.total} bytes: fewer than {HELD_OUT} rows of {width}")

    def __len__(self) -> int:
        return self.total // self.width

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.read(row * self.width, self.width) for row in index.tolist()])

    def read(self, start: int, count: int) -> torch.Tensor:
        number = bisect_right(self.starts, start) - 1
        place = start - self.starts[number]
        text = self.parts[number][place : place + count]
        while len(text) < count and number + 1 < len(self.parts):
            number += 1
            text = torch.cat([text, LINE_FEED, self.parts[number][: count - len(text) - 1]])
        return text[:count]

    @cached_property
    def fingerprint(self) -> str:
        first, *others = self.parts
        return digest([first, *(piece for part in others for piece in (LINE_FEED, part))])


class Every:
    """Every fifth row of `rows` (held out), or the four rows between."""

    batched = True

    def __init__(self, rows, held_out: bool):
        self.rows, self.held_out = rows, held_out
        self.fingerprint = rows.fingerprint

    def __len__(self) -> int:
        held_out = len(self.rows) // HELD_OUT
        return held_out if self.held_out else len(self.rows) - held_out

    def __getitem__(self, index: torch.Tensor) -> Any:
        return self.rows[HELD_OUT * index + HELD_OUT - 1 if self.held_out else index + index // (HELD_OUT - 1)]


def split(rows: Rows | Bytes) -> tuple[Any, Any]:
    """(training rows, held-out rows): every fifth row is held out."""
    if not isinstance(rows, Rows):
        return Every(rows, False), Every(rows, True)
    held_out = torch.arange(len(rows)) % HELD_OUT == HELD_OUT - 1
    training, rest = (rows.with_columns([column[kept] for column in rows.columns]) for kept in (~held_out, held_out))
    return training, rest


def contents(path: str | Path) -> torch.Tensor:
    """[bytes] uint8: a file that stays where it is. Raises PreflightError. A write changes this process's copy only."""
    try:
        with open(path, "rb") as file:
            if not (size := file.seek(0, 2)):
                return torch.empty(0, dtype=torch.uint8)
            # Without NORESERVE, Linux would reserve memory for the whole file.
            pages = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise PreflightError(UNMAPPED.format(original(path), type(error).__name__, error)) from error
    return torch.frombuffer(pages, dtype=torch.uint8)


def mapped(path: str | Path, dtype: torch.dtype = torch.uint8, name: str = "") -> torch.Tensor:
    """A tensor that stays in its file: .npy, one of .safetensors (name), or raw numbers of `dtype`. Raises PreflightError."""
    content, source, start = contents(path), original(path), 0
    raw: Any = memory(content)
    shape = [len(content) // dtype.itemsize]
    try:
        if source.suffix == ".npy":
            begin = 12 if content[6] > 1 else 10
            start = begin + int.from_bytes(raw[8:begin], "little")
            header = ast.literal_eval(raw[begin:start].decode("latin1"))
            if header["fortran_order"]:
                raise ValueError("it is in Fortran's order")
            shape, dtype = header["shape"], NUMPY[header["descr"]]
        elif source.suffix == ".safetensors":
            start = 8 + int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:start])[name]
            shape, dtype, start = header["shape"], SAFETENSORS[header["dtype"]], start + header["data_offsets"][0]
    except (ValueError, KeyError, SyntaxError, IndexError) as error:
        raise PreflightError(UNMAPPED.format(source, type(error).__name__, error)) from error
    return content[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def original(path: str | Path) -> Path:
    """The source file of a copy in memory (staging.py), for messages; any other path unchanged."""
    link = os.readlink(path) if os.path.islink(path) else ""
    return Path(link.removeprefix("/memfd:").removesuffix(" (deleted)") if link.startswith("/memfd:") else path)


UNMAPPED = "{} cannot be mapped ({}: {})"
LINE_FEED = torch.tensor([10], dtype=torch.uint8)
NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
NUMPY = {"|u1": torch.uint8, "|i1": torch.int8, "|b1": torch.bool, "<u2": torch.uint16, "<i2": torch.int16}
NUMPY |= {"<i4": torch.int32, "<i8": torch.int64, "<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64}
SAFETENSORS = DTYPE_NAMED | {"U16": torch.uint16}


def digest(parts) -> str:
    """sha256 of uint8 tensors, 12 hexadecimal digits. Of a tensor above HASHED_WHOLE: its size, and 1 MiB in every 64."""
    total = hashlib.sha256()
    for part in parts:
        if len(part) <= HASHED_WHOLE:
            total.update(memory(part))
            continue
        total.update(str(len(part)).encode())
        for start in (*range(0, len(part), 2**26), len(part) - 2**20):
            total.update(memory(part[start : start + 2**20]))
    return total.hexdigest()[:12]


def of_workload(workload: Workload, config) -> tuple[Any, Any]:
    """(training rows, held-out rows) of a workload, each in one of the two forms. Raises a Failure that names its file."""
    workload.core_sets(config=config)
    seed_everything(config.seed)  # which rows are held out may be random
    with blaming(workload, "the data"):
        returned: Any = workload.data(config)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            what = f"{type(returned).__name__}: {form_of(returned)}"
            raise TypeError(f"data() should return (training rows, held-out rows), and returned {what}")
        train, held_out = (_known(rows) for rows in returned)
        count, size = 0 if train is None else len(train), config.global_batch_size
        if size > count:
            fix = "lower it" if count else "is the folder or file that data() reads the right one?"
            raise UsageError(f"--global-batch-size {size} is more than the {count} training rows of {workload.name}: {fix}")
        if held_out is not None and not len(held_out):
            raise UsageError(f"data() of {workload.name} gave no held-out row: give None where nothing is to be evaluated")
        _refuse_another_form(train, held_out)
        return train, held_out


def _refuse_another_form(train: Any, held_out: Any) -> None:
    """Raises UsageError if data() returned (inputs, targets), each a tensor or a list, for (training rows, held-out rows)."""
    rows = [first for each in (held_out, train) if (first := _first_of(each)) is not None]
    if rows[1:] and type(held_out) is type(train) and len({(row.ndim, row.is_floating_point()) for row in rows}) > 1:
        held_out_form, form = (f"{[*row.shape]} of {str(row.dtype).removeprefix('torch.')}" for row in rows)
        raise UsageError(
            f"held-out rows have another form ({held_out_form} against {form}): data() returns (training rows, held-out rows), "
            "such as ((x, y), (x2, y2))"
        )


def _first_of(rows: Any) -> torch.Tensor | None:
    """The first row of one tensor, or of a list of tensors or numbers; else None: the form of other rows is not known here."""
    if isinstance(rows, list) and isinstance(rows[0], int | float | torch.Tensor):
        return torch.as_tensor(rows[0])
    return rows.columns[0][0] if getattr(rows, "are_columns", False) and rows.bare else None


def _known(rows: Any) -> Any:
    if rows is None or getattr(rows, "batched", False):
        return rows
    if isinstance(rows, torch.Tensor):
        return Rows(rows, bare=True)
    if isinstance(rows, Mapping) and rows and all(hasattr(column, "shape") for column in rows.values()):
        return Rows(*rows.values(), names=[*rows])
    if isinstance(rows, tuple) and rows and all(hasattr(column, "shape") for column in rows):
        return Rows(*rows)
    if type(rows).__name__ == "TensorDataset":
        return Rows(*rows.tensors)
    tensors = rows if isinstance(rows, list) and all(isinstance(each, torch.Tensor) and each.ndim for each in rows) else []
    lengths = {len(each) for each in tensors}
    if len(lengths) == 1 < len({(each.dtype, each.shape) for each in tensors}) and len(tensors) < lengths.pop():
        raise TypeError(f"a list of {len(tensors)} tensors is as many rows, and these are columns: give a tuple of them")
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise TypeError(f"rows need a length and an index, and {type(rows).__name__} has not both (streams are not supported)")
    return rows


def fingerprint(train: Any, held_out: Any, workload: Workload, config) -> tuple[str, list[str], list[str]]:
    """(fingerprint of training and held-out rows, rows that changed, notes).

    The fingerprint is the rows' attribute, else a hash of their bytes, else of some rows. Rows that changed, as "row 7" or
    "held-out row 7", differed when they were read again.
    """
    with blaming(workload, "the data"):
        read = [
            (what, *_fingerprint(rows, config)) for what, rows in (("", train), ("held-out ", held_out)) if rows is not None
        ]
    others = [f"{what}row {row}" for what, _, changed, _ in read for row in changed]
    parts = [part for _, part, *_ in read]
    by_content = not (train.own_fingerprint if isinstance(train, Rows) else hasattr(train, "fingerprint"))
    same = held_out is not None and by_content and len(train) == len(held_out) and parts[0] == parts[1]
    notes = [KEPT_ROWS.format(what=what, row=kept[0]) for what, *_, kept in read if kept][:1]
    notes += [SAME_ROWS] if same else _notes_on_same_rows(train, held_out) if by_content else []
    return "+".join(dict.fromkeys(parts)), others, notes


def _notes_on_same_rows(train: Any, held_out: Any) -> list[str]:
    """A note if half of the held-out rows are among the training rows: of small columns, and of parts of one Dataset."""
    both = (train, held_out)
    if type(train).__name__ == type(held_out).__name__ == "Subset" and train.dataset is held_out.dataset:
        ours, theirs = (torch.as_tensor(rows.indices) for rows in both)
    elif all(getattr(rows, "are_columns", False) and rows.nbytes <= COMPARED and len(rows) <= COMPARED_ROWS for rows in both):
        ours, theirs = map(_hashes, both)
    else:
        return []
    known = ours.unique()
    same = int(torch.isin(theirs, known).sum())
    # Where training rows are like each other, too, as short texts and table entries are, held-out ones are so by chance.
    if 2 * same < len(theirs) or 10 * (len(ours) - len(known)) > len(ours):
        return []
    return [SOME_SAME_ROWS.format(same=same, count=len(theirs))]


def _hashes(rows: Rows) -> torch.Tensor:
    """[rows] int64: of each row, the sum of the bits of 64 numbers or more of each column, times random words."""
    total = torch.zeros(len(rows), dtype=torch.int64)
    for number, column in enumerate(rows.columns):
        width = column[0].numel()
        # Training rows that are told apart by the numbers between are counted as alike, too: that is no alarm.
        numbers = column.reshape(len(rows), width)[:, :: max(1, width // 64)].contiguous()
        bits = numbers.view(BITS[min(8, numbers.itemsize)])
        total += (bits * words(bits.shape[1], number)).sum(1)
    return total


def _fingerprint(rows: Any, config) -> tuple[str, list[int], list[int]]:
    """A fingerprint; rows that differed when the same process read them again with the same seeds; rows that drew no more."""
    count = len(rows)
    if named := getattr(rows, "fingerprint", ""):
        if config.workers and not getattr(rows, "batched", False):
            some(rows, config, [(0, row) for row in (0, count - 1, 0)], len)  # for Watched; row 0 may first come from a buffer
        return str(named), [], []
    sampled = sorted({count * number // SAMPLED_ROWS for number in range(SAMPLED_ROWS)})
    again = sampled if config.row_seeds == "on" else []
    read = some(_Hashed(rows), config, [(0, row) for row in [*sampled, *again]], list)
    first, second = read[: len(sampled)], read[len(sampled) :]
    pairs = [*zip(again, first, second, strict=False)]
    changed = [row for row, (_, once, _), (_, twice, _) in pairs if once != twice]
    kept = [row for row, (*_, drew), (*_, draws) in pairs if drew and not draws]
    # One row alone may have made something that all need, such as a table.
    return first[-1][0][:12], changed, kept if len(kept) > 1 else []


class _Hashed:
    """Each row as two digests: of all rows read so far, and of this row alone; and whether it drew random numbers. Rows are not
    kept: they may be large.
    """

    def __init__(self, rows: Any):
        self.rows, self.total = rows, hashlib.sha256(str(len(rows)).encode())

    def __getitem__(self, row: int) -> tuple[str, str, bool]:
        before = generator_positions()
        value, alone = self.rows[row], hashlib.sha256()
        drew = generator_positions() != before
        for total in (self.total, alone):
            _update(total, value)
        return self.total.hexdigest(), alone.hexdigest(), drew


def _update(total, value: Any, within: tuple[int, ...] = ()) -> None:
    """Add a value to a hash. within: ids of the objects that contain it, since objects may contain each other."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()  # the name keeps it alive: memory() does not
        total.update(memory(value))
    elif getattr(getattr(value, "dtype", None), "hasobject", False):  # NumPy arrays of objects: their bytes are addresses
        _update(total, value.tolist(), within)
    elif hasattr(value, "tobytes"):  # NumPy's other arrays, Pillow's images
        total.update(value.tobytes())
    elif isinstance(value, str | bytes | int | float | bool | None):
        total.update(repr(value).encode())
    elif (entries := _entries(value)) is not None:
        for entry in entries if id(value) not in within else ():
            _update(total, entry, (*within, id(value)))
    elif " at 0x" not in (text := repr(value)):  # dates, paths; an address differs between processes
        total.update(text.encode())


def _entries(value: Any) -> Sequence | None:
    """A container's entries, in an order that is the same in all processes; None if the value has none."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, type):
        return None
    if is_dataclass(value) and not isinstance(value, Mapping):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif not isinstance(value, Mapping):  # an object of a user's class, such as a graph
        value = getattr(value, "__dict__", None) or None
    return value and [entry for pair in sorted(value.items(), key=lambda pair: str(pair[0])) for entry in pair]

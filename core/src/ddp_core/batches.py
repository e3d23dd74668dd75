"""Makes batches on the device from rows, in the core's order. loading.py reads rows one by one."""

import copy
import itertools
import math
from collections import UserDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import is_dataclass
from multiprocessing import util
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ddp_core.errors import Failure
from ddp_core.loading import SeededRows, WithGenerators, collated, kill_children, loaded, some
from ddp_core.order import generator_positions, seeded_anew
from ddp_core.workload import Workload, blame, row_of, with_fields

SMALL = 2**28  # bytes: smaller data of another precision are converted once, not batch by batch


class Batches:
    """Micro-batches on the device, in the order of a plan: pairs of (epoch, [n] row numbers).

    Rows that fit on the device are all moved there once; others batch by batch.
    """

    def __init__(self, rows: Any, workload: Workload, config, device: torch.device, dtype: torch.dtype, kind: str = ""):
        """kind: "held-out " for held-out rows, used in messages."""
        self.kind = kind
        self.workload, self.config, self.device, self.dtype = workload, config, device, dtype
        self.rows, self.resident, self.collate_draws, self.rows_seed = rows, False, False, False
        self.rounded = rows.rounded(dtype) if getattr(rows, "are_columns", False) and not kind else []
        self.streaming: Generator[Any] | None = None
        if config.workers:
            util.Finalize(None, kill_children, exitpriority=100)
        if getattr(rows, "are_columns", False) and rows.nbytes < _room(device):
            converted_already = all(column.dtype == dtype or not column.is_floating_point() for column in rows.columns)
            if device.type != "cpu" or (rows.nbytes <= SMALL and not converted_already):
                self.rows, converted_already = rows.with_columns([self._moved(column) for column in rows.columns]), True
            self.resident = converted_already

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def index_device(self) -> torch.device:
        """The device on which row numbers must be."""
        return self.device if self.resident else torch.device("cpu")

    def stream(self, plan) -> Iterator[Any]:
        """The plan's batches. A second stream ends the first."""
        self.close()
        if getattr(self.rows, "batched", False):
            batches: Iterator[Any] = (self.rows[rows] for _, rows in plan)
        else:
            batches = self.streaming = self._read(plan)
        batches = batches if self.resident else self._ahead(batches)
        # Reading the first forks the workers now: forked after the first sum of gradients, they crashed in one session of two.
        return itertools.chain([*itertools.islice(batches, 1)], batches)

    def close(self) -> None:
        """End the processes that read rows."""
        if self.streaming is not None:
            self.streaming.close()

    def few(self, rows: list[int], groups: list[list[int]], draws: int = 1) -> list[Any]:
        """Read these rows once, in this order, and make a batch of each group, a list of places in `rows`.

        draws: how often the batches are made, each time with other random numbers for collate().
        """
        if not getattr(self.rows, "batched", False):
            seeds = SeededRows(self.rows, self.config)

            def made(rows_and_generators: list) -> tuple[list, bool, bool]:
                read, drawn_in = zip(*rows_and_generators, strict=True)
                batches, drawn = [], False
                for draw, group in itertools.product(range(draws), groups):
                    seeds.seed_generators(draw, rows[group[-1]])  # the last row seeds what collate() draws, as in training
                    numbers, before = [rows[place] for place in group], generator_positions()
                    batches.append(collated(self.workload.collate, [read[place] for place in group], numbers))
                    drawn = drawn or generator_positions() != before
                return batches, drawn, len({*rows}) > 1 and seeded_anew(*drawn_in[:2])

            batches, *facts = some(WithGenerators(self.rows), self.config, [(0, row) for row in rows], made)
            self.collate_draws, self.rows_seed = facts
            return [self._moved(batch) for batch in batches]
        numbers = torch.tensor(rows, device=self.index_device)
        return [self._moved(self.rows[numbers[group]]) for group in groups]

    def _ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """On an accelerator, keep one batch ahead: its copy is queued before training needs it."""
        if self.device.type == "cpu":
            yield from map(self._moved, batches)
            return
        moved = (self._moved(converted(batch, torch.Tensor.pin_memory, torch.device("cpu"))) for batch in batches)
        for batch, _ in itertools.pairwise(itertools.chain(moved, [None])):
            yield batch

    def _read(self, plan) -> Generator[Any]:
        """Batches through DataLoader, which reads rows in the core's order, with --workers processes."""
        asked: deque = deque()  # row numbers of the batches that workers are reading, for messages

        def places() -> Iterator[list]:
            for epoch, rows in plan:
                asked.append(rows)
                yield [(epoch, row) for row in rows.tolist()]

        workers, pin = self.config.workers, self.device.type != "cpu"
        batches = loaded(self.rows, self.config, places(), self.workload.collate, workers, pin)
        try:
            for batch in batches:
                asked.popleft()
                yield batch
        except Failure:
            raise
        except Exception as error:
            rows = asked[0].tolist()
            what = f"rows {', '.join(map(str, rows[:6]))}{' and on' if len(rows) > 6 else ''}"
            if row := row_of(error):
                what = f"row {row}"
            raise blame(error, self.workload.file, f"{self.kind}{what} of --workload {self.workload.name}") from error
        finally:
            batches.close()

    def _moved(self, batch: Any) -> Any:
        """The batch on the device: real numbers in the run's precision, others unchanged."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None, non_blocking=True)

        return converted(batch, move, self.device)


def converted(batch: Any, convert: Callable, device: torch.device) -> Any:
    """The batch with convert() applied to every tensor in tuples, lists, dictionaries and dataclasses. An object of another
    class with its own method `to` is only moved.
    """
    if isinstance(batch, torch.Tensor):
        return convert(batch)
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch) if isinstance(batch, UserDict) else {}  # a tokenizer's entries are also attributes
        made.update({name: converted(value, convert, device) for name, value in batch.items()})
        return made
    if isinstance(batch, PackedSequence):  # torch requires its batch_sizes on the CPU
        indices = (batch.sorted_indices, batch.unsorted_indices)
        return PackedSequence(convert(batch.data), batch.batch_sizes, *(i if i is None else convert(i) for i in indices))
    if isinstance(batch, list | tuple):
        values = [converted(value, convert, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if is_dataclass(batch) and not hasattr(batch, "to"):
        return with_fields(batch, lambda value: converted(value, convert, device))
    return batch.to(device) if hasattr(batch, "to") else batch


def _room(device: torch.device) -> float:
    """Bytes of data that may stay on the device: a quarter of its free memory."""
    return math.inf if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[0] / 4

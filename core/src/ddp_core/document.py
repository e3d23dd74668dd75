"""Checks that a snapshot's document makes sense, before a run uses it: its checksum shows only that it is whole."""

import math
from collections.abc import Callable

from ddp_core.errors import SnapshotError, printable


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= 2**53


def _is_row(row: list, epoch: int) -> bool:
    """An epoch's number and its measured values, among which a held-out loss may be infinite."""
    return _is_count(row[0]) and row[0] == epoch and all(isinstance(float.fromhex(text), float) for text in row[1:])


def _is_best(best: list, epochs_run: int) -> bool:
    return len(best) == 2 and _is_row(best, best[0]) and best[0] < epochs_run


def _are_numbers(values: dict) -> bool:
    return all(isinstance(value, int | float) for value in values.values())


# For each part a condition on the whole document. A part of another type makes it raise.
SENSE: dict[str, Callable[[dict], bool]] = {
    "problem": lambda document: isinstance(document["problem"], dict),
    "data": lambda document: isinstance(document["data"], str),
    "step": lambda document: _is_count(document["step"]),
    "steps_per_epoch": lambda document: _is_count(document["steps_per_epoch"], 1),
    "epochs_run": lambda document: document["epochs_run"] == document["step"] // document["steps_per_epoch"],
    "history": lambda document: (
        len(document["history"]) == document["epochs_run"]
        and all(_is_row(row, epoch) for epoch, row in enumerate(document["history"]))
    ),
    "epoch_loss_sum": lambda document: math.isfinite(float.fromhex(document["epoch_loss_sum"])),
    "best": lambda document: document["best"] is None or _is_best(document["best"], document["epochs_run"]),
    "scale": lambda document: 0 < float.fromhex(document["scale"][0]) < math.inf and _is_count(document["scale"][1]),
    "measured": lambda document: all(isinstance(name, str) for name in document["measured"]),
    "stateless": lambda document: isinstance(document["stateless"], list),
    "numbers": lambda document: all(map(_are_numbers, [*document["numbers"][:-1], *document["numbers"][-1].values()])),
}


def refuse_senseless(document: dict, path: object) -> None:
    """Raises SnapshotError that names the first part that no run can have written."""
    for name, holds in SENSE.items():
        try:
            if name not in document or holds(document):
                continue
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            pass
        value = document[name]
        shown = type(value).__name__ if isinstance(value, list | dict) else printable(value, 80)
        raise SnapshotError(f"{path} makes no sense ({name} is {shown}): restore a copy, or pass --fresh")

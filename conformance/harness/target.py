"""Where a check runs a site's train.py: in ranks under mpiexec (world.World), or in jobs of its script (submit.Jobs).

The checks of checks/run see only a Target, and a Run: what one start has left.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.harness.sites import Launch

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True)
class Run:
    """What one start of train.py has left, the same on all ranks. exit_codes, output, errors, written: one entry a rank.

    written: the files of the run directory that this rank has opened to write, or has moved.
    """

    folder: Path
    exit_codes: list[Any]  # numbers; a text if a job ended without an exit code
    output: list[str]
    errors: list[str]
    written: list[list[str]]
    records: list[dict]

    def of(self, kind: str) -> list[dict]:
        """The records of a kind. A resumed run repeats steps and epochs; of these, the last."""
        records = [record for record in self.records if record["kind"] == kind]
        if kind in ("step", "epoch"):
            records = list({record["step"]: record for record in records}.values())
        return records

    def values(self, kind: str, name: str) -> list:
        return [record[name] for record in self.of(kind)]

    @property
    def error_lines(self) -> list[str]:
        """The lines on standard error of all ranks."""
        return [line for text in self.errors for line in text.splitlines()]

    @property
    def lines(self) -> list[str]:
        """All printed lines."""
        return self.error_lines + [line for text in self.output for line in text.splitlines()]

    @property
    def losses(self) -> list[float]:
        return [float.fromhex(text) for text in self.values("step", "loss_hex")]


def read_records(folder: Path) -> list[dict]:
    path = folder / "run.jsonl"
    whole, _, half = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    records = [json.loads(line) for line in whole.splitlines()]
    with suppress(ValueError):  # a killed process may have left half a line
        records.append(json.loads(half))
    return records


class Target(ABC):
    """rank: this process's, among those that judge. size: ranks of a run; nodes, ranks_per_node: how they lie.

    device: cpu, cuda or xpu. backend_in_use: what carries the gradients there. plan: the flags of runs that many checks share,
    each with True if it is started a second time.
    """

    rank: int
    size: int
    nodes: int = 1
    ranks_per_node: int
    device: str
    backend_in_use: str

    def __init__(self):
        self.plan: list[tuple[str, bool]] = []

    @abstractmethod
    def gather(self, value: Any) -> list:
        """Every judging process's value, in each of them."""

    @abstractmethod
    def on_rank_0(self, make: Callable[[], Any]) -> Any:
        """Rank 0's result, in every judging process. Its exception is raised in all, too."""

    @abstractmethod
    def runs_folder(self, make: Callable[[], Path]) -> Path:
        """Where the runs are, on all nodes. make: makes a new folder on this machine."""

    @abstractmethod
    def ahead(self, folder: Path, flags: str) -> None:
        """Announce a run, so that its job can wait in the queue from now on."""

    @abstractmethod
    def train(self, launch: Launch, folder: Path, flags: str) -> Run:
        """Start train.py with these flags and this run directory, and wait until all ranks have ended."""

    @property
    @abstractmethod
    def devices_visible_to_a_rank(self) -> int:
        """Accelerators; 0 if the ranks train on the CPU."""

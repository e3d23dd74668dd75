"""What a run says: run.jsonl for programs; key=value lines, progress and a closing table for people. Rank 0 alone speaks.

run.jsonl holds one object a line: start, step, epoch, snapshot, end. A resumed run appends to it and repeats the steps
after its snapshot; the last record of a step counts. Losses stand there as numbers and, exactly, as float.hex(). Beyond 64
ranks ranks.jsonl has the row of each of the last start, and `start` one a node.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_core.errors import ExitCode, StorageError, fix_of

ROWS = 64  # of ranks, in one line


class Record:
    """began: time.monotonic() of the program's start. Silent until it is opened, which rank 0 alone does."""

    def __init__(self, began: float, log_seconds: float = 30.0):
        self.path: Path | None = None
        self.failure: StorageError | None = None
        self.began, self.log_seconds = began, log_seconds
        self.seconds: dict[str, float] = {}  # from `began` to the end of each phase of the start
        self.training = self.spoke = time.monotonic()
        self.bar: Any = None

    def open(self, path: Path, lost: Callable[[], StorageError | None] = lambda: None) -> None:
        """Append to run.jsonl, without the half line that a killed writer may have left. Raises StorageError.

        lost: whether the run is another job's by now: then nothing more is written.
        """
        try:
            self._file = open(path, "ab+")  # noqa: SIM115 - open as long as the run
            size, tail, reach = self._file.seek(0, os.SEEK_END), b"", 65536
            while b"\n" not in tail and len(tail) < size:
                self._file.seek(max(0, size - reach))
                tail, reach = self._file.read(), 16 * reach
            self._file.truncate(size - len(tail.rpartition(b"\n")[2]))
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        self.path, self.lost = path, lost

    def lap(self, phase: str) -> None:
        self.seconds.setdefault(phase, round(time.monotonic() - self.began, 4))

    def write(self, kind: str, **values) -> None:
        """One line of run.jsonl: `kind` first, then the values in this order, for job scripts read it with sed.

        Does not raise, on one rank of all, but keeps the failure for them to agree on.
        """
        if self.path:
            if lost := self.lost():
                self.failure = lost
                return
            try:
                self._file.write(json.dumps(dict(kind=kind, **values), separators=(",", ":"), allow_nan=False).encode() + b"\n")
                self._file.flush()
            except OSError as error:
                self.failure = StorageError(f"{self.path}: {error.strerror}: {fix_of(error)}")

    def say(self, **values) -> None:
        """One line of key=value."""
        if self.path:
            self._clear()
            print(" ".join(f"{name}={_short(value)}" for name, value in values.items() if value is not None), flush=True)

    def start(self, step: int, epochs_run: int, config: dict, rows: list[dict], notes: list[str], **facts) -> None:
        """rows: where each rank is, in rank order. notes: what of the usual promises this run does not keep."""
        self.training = self.spoke = time.monotonic()
        if config["device"] == "auto" and rows[0]["device"] == "cpu":
            self.say(note="no accelerator is visible, training on the CPU (--device auto)")
        many = len(rows) > ROWS
        facts |= dict(ranks=of_nodes(rows) if many else rows, notes=notes, seconds=self.seconds)
        self.write("start", step=step, config=config, **facts)
        if self.path and not self.failure:
            self._write_rows(rows, self.path.with_name("ranks.jsonl"))
        for row in rows[:8]:
            self.say(**row)
        if self.path and len(rows) > 8:
            self.say(ranks=f"{len(rows)} (all of them in {self.path.with_name('ranks.jsonl') if many else self.path})")
        for note in notes:
            self.say(note=note)
        if step:
            self.say(resuming=self.path and self.path.parent, epochs_run=epochs_run, step=step)

    def _write_rows(self, rows: list[dict], path: Path) -> None:
        """Of many ranks; of few run.jsonl has them, and a file of an earlier start would be of another job."""
        try:
            if len(rows) <= ROWS:
                path.unlink(missing_ok=True)
            else:
                path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        except OSError as error:
            self.failure = StorageError(f"{path}: {error.strerror}: {fix_of(error)}")

    def epoch(self, epoch: int, epochs: int, step: int, values: dict[str, float]) -> None:
        seconds = round(time.monotonic() - self.training, 3)
        self.write("epoch", epoch=epoch, step=step, seconds=seconds, **values)
        self.say(epoch=f"{epoch + 1}/{epochs}", step=step, **values, seconds=seconds)
        self.spoke = time.monotonic()

    # ---- progress within an epoch ---------------------------------------------------------------------------------

    def progress(self, epoch: str, index: int, steps: int, loss: float, rows_a_second: float, left: float) -> None:
        """Of an epoch's `steps`, `index` are done; left: seconds to the end of the run. A live line, or one now and then."""
        now = time.monotonic()
        if not self.path or not self.log_seconds:
            return
        if sys.stdout.isatty():
            self._live(epoch, index, steps, loss, rows_a_second, left)
        elif now - self.spoke >= self.log_seconds:
            self.spoke = now
            self.say(epoch=epoch, step=f"{index}/{steps}", loss=loss, rows_a_second=round(rows_a_second), left=_clock(left))

    def _live(self, epoch: str, index: int, steps: int, loss: float, rows_a_second: float, left: float) -> None:
        text = f"epoch {epoch}  loss {_short(loss)}  {rows_a_second:.0f} rows/s  {_clock(left)} left"
        try:
            from tqdm import tqdm
        except ImportError:
            print(f"\r\033[K{text}  step {index}/{steps}", end="", flush=True)
            self.bar = "\r\033[K"
            return
        if self.bar is None or self.bar.total != steps:
            self.bar = tqdm(total=steps, leave=False, file=sys.stdout)
        self.bar.n = index
        self.bar.set_description_str(text, refresh=True)

    def _clear(self) -> None:
        """Take the live line away before another is printed."""
        if isinstance(self.bar, str):
            print(self.bar, end="")
        elif self.bar is not None:
            self.bar.close()
        self.bar = None

    # ---- the end --------------------------------------------------------------------------------------------------

    def end(self, code: ExitCode, trainer, speed: dict, seconds: dict, lines: dict, trained: bool) -> None:
        """The last record of a run that ends in order, and the table. lines: what summary.py tells of its speed."""
        self.write("end", exit_code=code, step=trainer.step, **speed, seconds=self.seconds | seconds)
        if not self.path:
            return
        config, history, seen = trainer.config, trainer.state.progress.history, trainer.seen
        names = ["training loss", "held-out loss", *(f"held-out loss, {part}" for part in seen.losses)]
        names += [f"held-out {name}" for name in seen.metrics]
        table = {"workload": config.workload, "epochs run": f"{len(history)} of {config.epochs}", "steps": trainer.step}
        table |= dict(zip(names, map(float.fromhex, history[-1][1:]), strict=False)) if history else {}
        table |= {"ranks": f"{len(trainer.ranks)} on {trainer.device.type}"} | lines | {"run": self.path.parent}
        title = "run complete"
        if code == ExitCode.STOPPED:
            title = f"stopped early ({trainer.stop.reason or 'another rank was told to'}) and saved: submit again to resume"
        elif not trained:
            more = f"--epochs {2 * max(config.epochs, len(history))} would continue it"
            if "epochs" in config.remembered:
                more = f"it is laid out over --epochs {config.epochs}"
            title = f"run is complete already, nothing to do ({more})"
        width = max(map(len, table))
        self._clear()
        print("\n".join([title, *(f"  {name:<{width}}  {_short(value)}" for name, value in table.items())]), flush=True)


def of_nodes(rows: list[dict]) -> list[dict]:
    """The first row of each node, with how many it has."""
    nodes: dict[tuple, dict] = {}
    for row in rows:
        first = nodes.setdefault((row["node_rank"], row["host"]), row | dict(ranks_on_node=0))
        first["ranks_on_node"] += 1
    return [*nodes.values()]


def _short(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"

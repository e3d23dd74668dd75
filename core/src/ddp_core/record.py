"""A run's output: run.jsonl for programs; key=value lines, progress and a closing table for people. Only rank 0 writes.

run.jsonl holds one JSON object per line: start, step, epoch, snapshot, end. A resumed run appends to it and repeats the steps
after its snapshot; the last record of a step counts. Losses are numbers, and exact as float.hex(). Beyond 64 ranks the
`start` record has one row per node; ranks.jsonl has the rows of all ranks of the last start.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_core.errors import ExitCode, StorageError, fix_of

ROWS = 64  # ranks listed in a `start` record at most
CLEAR = "\r\033[K"  # on a terminal, begins the line again


class Record:
    """began: time.monotonic() when the program started. Writes nothing until open() is called, on rank 0 only."""

    def __init__(self, began: float, log_seconds: float = 30.0):
        self.path: Path | None = None
        self.failure: StorageError | None = None
        self.began, self.log_seconds = began, log_seconds
        self.seconds: dict[str, float] = {}  # from `began` to the end of each start-up phase
        self.training = self.spoke = time.monotonic()
        self.bar: Any = None  # the live line: tqdm's, or the text that clears ours

    def open(self, path: Path, lost: Callable[[], StorageError | None] = lambda: None) -> None:
        """Open run.jsonl to append; cut off an incomplete last line, left by a killed process. Raises StorageError.

        lost: returns an error once another job has taken over the run; then nothing more is written.
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
        """Write one line of run.jsonl: `kind` first, then the values in this order, since job scripts read it with sed.

        Never raises, since it runs on rank 0 only; it keeps the failure for all ranks to agree on.
        """
        if not self.path:
            return
        if lost := self.lost():
            self.failure = lost
            return
        with self._keeping_failure(self.path):
            self._file.write(_line(dict(kind=kind, **values)).encode())
            self._file.flush()

    @contextmanager
    def _keeping_failure(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = StorageError(f"{path}: {error.strerror}: {fix_of(error, path)}")

    def say(self, **values) -> None:
        """Print one line of key=value."""
        if self.path:
            self._print(" ".join(f"{name}={_short(value)}" for name, value in values.items() if value is not None))

    def start(self, step: int, epochs_run: int, config: dict, rows: list[dict], notes: list[str], **facts) -> None:
        """rows: host and device of each rank, in rank order. notes: which usual guarantees this run does not give."""
        self.training = self.spoke = time.monotonic()
        if not self.path:
            return
        if config["device"] == "auto" and rows[0]["device"] == "cpu":
            self.say(note="no accelerator is visible, training on the CPU (--device auto)")
        many = len(rows) > ROWS
        facts |= dict(ranks=of_nodes(rows) if many else rows, notes=notes, seconds=self.seconds)
        self.write("start", step=step, config=config, **facts)
        all_rows = self.path.with_name("ranks.jsonl")
        if not self.failure:
            with self._keeping_failure(all_rows):
                if many:
                    all_rows.write_text("".join(_line(row) for row in rows))
                else:  # an earlier start may have left it
                    all_rows.unlink(missing_ok=True)
        for row in rows[:8]:
            self.say(**row)
        if len(rows) > 8:
            self.say(ranks=f"{len(rows)} (all of them in {all_rows if many else self.path})")
        for note in notes:
            self.say(note=note)
        if step:
            self.say(resuming=self.path.parent, epochs_run=epochs_run, step=step)

    def epoch(self, epoch: int, epochs: int, step: int, values: dict[str, float]) -> None:
        seconds = round(time.monotonic() - self.training, 3)
        self.write("epoch", epoch=epoch, step=step, seconds=seconds, **values)
        self.say(epoch=f"{epoch + 1}/{epochs}", step=step, **values, seconds=seconds)
        self.spoke = time.monotonic()

    def progress(self, epoch: str, index: int, steps: int, loss: float, rows_a_second: float, left: float) -> None:
        """index: steps done of the epoch's `steps`. left: seconds to the end of the run. Updates a live line on a terminal,
        else prints a line every --log-seconds.
        """
        if not self.path or not self.log_seconds:
            return
        if sys.stdout.isatty():
            self._live(index, steps, f"epoch {epoch}  loss {_short(loss)}  {rows_a_second:.0f} rows/s  {_clock(left)} left")
        elif time.monotonic() - self.spoke >= self.log_seconds:
            self.spoke = time.monotonic()
            self.say(epoch=epoch, step=f"{index}/{steps}", loss=loss, rows_a_second=round(rows_a_second), left=_clock(left))

    def _live(self, index: int, steps: int, text: str) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            print(f"{CLEAR}{text}  step {index}/{steps}", end="", flush=True)
            self.bar = CLEAR
            return
        if self.bar is None or self.bar.total != steps:
            self.bar = tqdm(total=steps, leave=False, file=sys.stdout)
        self.bar.n = index
        self.bar.set_description_str(text, refresh=True)

    def _print(self, text: str) -> None:
        """Print in place of the live line, if there is one."""
        if isinstance(self.bar, str):
            print(self.bar, end="")
        elif self.bar is not None:
            self.bar.close()
        self.bar = None
        print(text, flush=True)

    def end(self, code: ExitCode, trainer, speed: dict, seconds: dict, lines: dict, trained: bool) -> None:
        """Write the last record of a run that ends in order, and print the table. lines: its rows on speed (summary.py)."""
        self.write("end", exit_code=code, step=trainer.step, **speed, seconds=self.seconds | seconds)
        if not self.path:
            return
        config, history, probed = trainer.config, trainer.state.progress.history, trainer.probed
        names = ["training loss", "held-out loss", *(f"held-out loss, {part}" for part in probed.losses)]
        names += [f"held-out {name}" for name in probed.metrics]
        table = {"workload": config.workload, "epochs run": f"{len(history)} of {config.epochs}", "steps": trainer.step}
        table |= dict(zip(names, map(float.fromhex, history[-1][1:]), strict=False)) if history else {}
        table |= {"ranks": f"{len(trainer.ranks)} on {trainer.device.type}"} | lines | {"run": self.path.parent}
        title = "run complete"
        if code == ExitCode.STOPPED:
            reason = trainer.stop.reason or "another rank was told to"
            title = f"stopped early ({reason}) and saved; --run-dir {config.run_dir} resumes it"
        elif not trained:
            more = f"--epochs {2 * max(config.epochs, len(history))} would continue it"
            if "epochs" in config.remembered:
                more = f"it is laid out over --epochs {config.epochs}"
            title = f"run is complete already, nothing to do ({more})"
        width = max(map(len, table))
        self._print("\n".join([title, *(f"  {name:<{width}}  {_short(value)}" for name, value in table.items())]))


def of_nodes(rows: list[dict]) -> list[dict]:
    """The first row of each node, with its number of ranks (ranks_on_node)."""
    nodes: dict[tuple, dict] = {}
    for row in rows:
        first = nodes.setdefault((row["node_rank"], row["host"]), row | dict(ranks_on_node=0))
        first["ranks_on_node"] += 1
    return [*nodes.values()]


def _line(values: dict) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n"


def _short(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"

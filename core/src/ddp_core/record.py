"""What a run says: run.jsonl for programs, key=value lines and a closing table for people. Rank 0 alone speaks.

run.jsonl holds one object a line: start, step, epoch, snapshot, end. A resumed run appends to it and repeats the steps
after its snapshot; the last record of a step counts. Losses stand there as numbers and, exactly, as float.hex().
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from ddp_core.device import versions
from ddp_core.errors import ExitCode, StorageError


class Record:
    """began: time.monotonic() of the program's start. Silent until it is opened, which rank 0 alone does."""

    def __init__(self, began: float):
        self.path: Path | None = None
        self.failure: StorageError | None = None
        self.began = began
        self.seconds: dict[str, float] = {}  # from `began` to the end of each phase of the start

    def open(self, path: Path) -> None:
        """Append to run.jsonl, without the half line that a killed writer may have left. Raises StorageError."""
        try:
            self._file = open(path, "ab+")  # noqa: SIM115 - open as long as the run
            size, tail, reach = self._file.seek(0, os.SEEK_END), b"", 65536
            while b"\n" not in tail and len(tail) < size:
                self._file.seek(max(0, size - reach))
                tail, reach = self._file.read(), 16 * reach
            self._file.truncate(size - len(tail.rpartition(b"\n")[2]))
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        self.path = path

    def lap(self, phase: str) -> None:
        self.seconds.setdefault(phase, round(time.monotonic() - self.began, 4))

    def write(self, kind: str, **values) -> None:
        """One line of run.jsonl. Does not raise, on one rank of all, but keeps the failure for them to agree on."""
        if self.path:
            try:
                self._file.write(json.dumps(dict(kind=kind, **values), separators=(",", ":")).encode() + b"\n")
                self._file.flush()
            except OSError as error:
                self.failure = StorageError(f"{self.path}: {error.strerror}: free space and submit again")

    def say(self, **values) -> None:
        """One progress line."""
        if self.path:
            print(" ".join(f"{name}={_short(value)}" for name, value in values.items() if value is not None), flush=True)

    def start(self, rows: list[dict], trainer) -> None:
        """rows: where each rank is, in rank order."""
        self.first, self.training = trainer.step, time.monotonic()
        world = dict(world_size=trainer.world_size, reduction=trainer.replica.reduction, ranks=rows)
        run = dict(config=asdict(trainer.config), data=trainer.fingerprint, versions=versions())
        self.write("start", step=trainer.step, **run, **world, seconds=self.seconds)
        for row in rows[:8]:
            self.say(**row)
        if len(rows) > 8:
            self.say(ranks=f"{len(rows)} (all of them in {self.path})")
        if trainer.config.device == "auto" and rows[0]["device"] == "cpu":
            self.say(note="no accelerator is visible, training on the CPU (--device auto)")
        if trainer.step:
            self.say(resuming=self.path and self.path.parent, epochs_run=len(trainer.history), step=trainer.step)

    def epoch(self, trainer, epoch: int, values: dict[str, float]) -> None:
        seconds = round(time.monotonic() - self.training, 3)
        self.write("epoch", epoch=epoch, step=trainer.step, seconds=seconds, **values)
        self.say(epoch=f"{epoch + 1}/{trainer.config.epochs}", step=trainer.step, **values, seconds=seconds)

    def end(self, code: ExitCode, trainer) -> None:
        """The last record of a run that ends in order, and the table."""
        steps, training = trainer.step - self.first, round(time.monotonic() - self.training, 4)
        speed = round(steps * trainer.config.global_batch_size / training, 1)
        seconds = self.seconds | dict(training=training)
        self.write("end", exit_code=code, step=trainer.step, rows_a_second=speed, seconds=seconds)
        if not self.path:
            return
        epochs = f"{len(trainer.history)} of {trainer.config.epochs}"
        table = {"workload": trainer.config.workload, "epochs run": epochs, "steps": trainer.step}
        names = ("training loss", "held-out loss", f"held-out {trainer.objective.metric_name}")
        if trainer.history:
            table |= dict(zip(names, map(float.fromhex, trainer.history[-1][1:]), strict=False))
        table |= {"ranks": f"{trainer.world_size} on {trainer.device.type}", "rows a second": speed, "run": self.path.parent}
        title = "run complete"
        if code == ExitCode.STOPPED:
            title = f"stopped early ({trainer.stop.reason or 'another rank was told to'}) and saved: submit again to resume"
        elif not steps:
            title = f"run is complete already, nothing to do (--epochs {2 * trainer.config.epochs} would continue it)"
        width = max(map(len, table))
        print("\n".join([title, *(f"  {name:<{width}}  {_short(value)}" for name, value in table.items())]), flush=True)


def _short(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

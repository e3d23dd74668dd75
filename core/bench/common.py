"""Shared by the benchmarks: contestants in their own processes, turns in rounds, ratios, and a report.

Every contestant is a real program: world_size processes of contestants.py. During the turns of others it waits for a
line on its standard input, and uses no core.
"""

import argparse
import itertools
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("contestants.py")
PATIENCE = 600.0  # seconds for one reply
PORTS = itertools.count(15000 + os.getpid() % 10000)  # below the system's own range, whose ports come and go


class World:
    """The ranks of one contestant, as processes of this machine, with torchrun's variables."""

    def __init__(self, name: str, world_size: int, flags: Iterable[str]):
        self.name, self.ranks = name, []
        self.folder = tempfile.TemporaryDirectory(prefix="ddp-bench-")
        # One thread a rank: two are slower as soon as the ranks fill the cores. torchrun sets it, too.
        job = dict(OMP_NUM_THREADS=1, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, GROUP_RANK=0)
        job |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port(), TORCHELASTIC_RUN_ID="bench")
        self.began = time.monotonic()
        for rank in range(world_size):
            environ = os.environ | {key: str(value) for key, value in (job | dict(RANK=rank, LOCAL_RANK=rank)).items()}
            with open(self.path(f"{rank}.err"), "w") as errors:
                pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1)
                command = [sys.executable, str(PROGRAM), name, *flags]
                self.ranks.append(subprocess.Popen(command, env=environ, cwd=self.folder.name, **pipes))

    def path(self, name: str) -> Path:
        return Path(self.folder.name, name)

    def ask(self, **request) -> list[dict]:
        """Send one request to every rank; return the reply of each. Raises SystemExit with a rank's last lines."""
        for rank in self.ranks:
            rank.stdin.write(json.dumps(request) + "\n")
        return self.replies()

    def replies(self) -> list[dict]:
        found = []
        for number, rank in enumerate(self.ranks):
            there = select.select([rank.stdout], [], [], PATIENCE)[0]
            line = rank.stdout.readline() if there else ""
            if not line:
                self.fail(number)
            found.append(json.loads(line))
        return found

    def wait(self) -> None:
        """Wait for a contestant that ends by itself. Raises SystemExit with a rank's last lines."""
        for number, rank in enumerate(self.ranks):
            if rank.wait(PATIENCE):
                self.fail(number)

    def fail(self, number: int) -> None:
        errors = self.path(f"{number}.err").read_text().splitlines()[-15:]
        raise SystemExit("\n".join([*errors, f"{self.name}: rank {number} of {len(self.ranks)} failed, or hangs"]))

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.communicate()
        self.folder.cleanup()


def _free_port() -> int:
    for port in PORTS:
        with socket.socket() as there:
            if there.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError


def interleave(turns: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list]:
    """Each round gives every contestant one turn, and begins with the next contestant. The first round is dropped."""
    figures: dict[str, list] = {name: [] for name in turns}
    names = list(turns)
    for first in range(rounds + 1):
        for place in range(len(names)):
            name = names[(first + place) % len(names)]
            figures[name].append(turns[name]())
    return {name: values[1:] for name, values in figures.items()}


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed flags, with --device. Exits if torch sees no such device."""
    import torch

    parser.add_argument("--device", choices=["cpu", "cuda", "xpu"], default="cpu", help="default: cpu; cuda is AMD's, too")
    args = parser.parse_args()
    if args.device != "cpu" and not getattr(torch, args.device).is_available():
        parser.error(
            f"--device {args.device}: torch {torch.__version__} sees none: look at the job's devices and at which torch this is"
        )
    return args


# ---- figures --------------------------------------------------------------------------------------------------------


def spread(values: list[float], digits: int = 0) -> str:
    """median (min..max)"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def ratios(over: list[float], under: list[float]) -> list[float]:
    """Ratios within a round, since other load on the machine then hits both."""
    return [a / b for a, b in zip(over, under, strict=True)]


def ratio(over: list[float], under: list[float]) -> str:
    return spread(ratios(over, under), 2)


def machine() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "no accelerator"
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return (
        f"{date.today()}, {cores} cores of {platform.machine()}, {accelerator}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load {load:.1f} at the start"
    )


class Report:
    """Prints Markdown line by line. --out FILE.md keeps it, and the raw figures in FILE.json."""

    def __init__(self, out: Path | None, title: str):
        self.out, self.lines, self.raw = out, [], {"machine": machine()}
        self.wanted: list[tuple[str, float, str, bool]] = []
        self.say(f"# {title}\n\n{self.raw['machine']}")

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        if self.out:  # at once, so that a stopped run leaves its results
            self.out.with_suffix(".md").write_text("\n".join(self.lines) + "\n")
            self.out.with_suffix(".json").write_text(json.dumps(self.raw, indent=1) + "\n")

    def table(self, *columns: str) -> None:
        self.say("")
        self.row(*columns)
        self.row(*("---" for _ in columns))

    def row(self, *cells: str) -> None:
        self.say("| " + " | ".join(cells) + " |")

    def want(self, what: str, over: list[float], under: list[float], *, most: float = 0.0, least: float = 0.0) -> str:
        """The text of ratio(). close() lists the ratio if its median misses the limit."""
        median = statistics.median(ratios(over, under))
        wanted = f"at most {most}" if most else f"at least {least}"
        self.wanted.append((what, median, wanted, median <= most if most else median >= least))
        return ratio(over, under)

    def close(self) -> None:
        if self.wanted:
            missed = [row for row in self.wanted if not row[-1]]
            self.say(f"\n## Wanted\n\n{len(self.wanted) - len(missed)} of {len(self.wanted)} medians are as wanted.")
        if self.wanted and missed:
            self.table("missed", "measured", "wanted")
            for what, median, wanted, _ in missed:
                self.row(what, f"{median:.3f}", wanted)

"""What the benchmarks share: ranks forked after one import of torch, turns interleaved in one run, and a table."""

import ctypes
import json
import os
import platform
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path


def fork_ranks(world_size: int, rank_main: Callable[[int, int, Path], None], deadline: float):
    """Run rank_main(rank, port, folder) in world_size processes; return what rank 0 left in folder/result.json.

    Raises SystemExit when a rank fails, or when not all have ended after `deadline` seconds.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ranks = [_fork(rank, port, Path(folder), rank_main) for rank in range(world_size)]
        end, left = time.monotonic() + deadline, dict(zip(ranks, range(world_size), strict=True))
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in left and os.waitstatus_to_exitcode(status) == 0:
                del left[pid]
            elif pid in left or time.monotonic() > end:
                why = f"rank {left.pop(pid)} failed" if pid in left else f"ranks {list(left.values())} hang"
                for other in left:
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
                raise SystemExit(f"{why} in a world of {world_size}")
            time.sleep(0.01)
        return json.loads((Path(folder) / "result.json").read_text())


def _fork(rank: int, port: int, folder: Path, rank_main) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives this program
        rank_main(rank, port, folder)
        code = 0
    except BaseException as error:  # a child must not run on into its parent's code
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def interleave(turns: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Every round gives each contestant one turn. A turn returns its figure; the first round is dropped."""
    figures: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds + 1):
        for name, turn in turns.items():
            figures[name].append(turn())
    return {name: values[1:] for name, values in figures.items()}


def spread(values: list[float], digits: int = 0) -> str:
    """median (min..max)"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def ratio(over: list[float], under: list[float]) -> str:
    """Median (min..max) of the ratios within a round: what else the machine does in that round hits both."""
    return spread([a / b for a, b in zip(over, under, strict=True)], 2)


def machine() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "no accelerator"
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return (
        f"{date.today()}, {cores} cores of {platform.machine()}, {accelerator}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load {load:.1f} at the start"
    )


class Report:
    """Prints Markdown as it comes; --out keeps it, or with .json the raw figures."""

    def __init__(self, out: Path | None, title: str):
        self.out, self.lines, self.raw = out, [], {"machine": machine()}
        self.say(f"{title}\n\n{self.raw['machine']}\n")

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def table(self, *columns: str) -> None:
        self.row(*columns)
        self.row(*("---" for _ in columns))

    def row(self, *cells: str) -> None:
        self.say("| " + " | ".join(cells) + " |")

    def close(self) -> None:
        if self.out:
            text = json.dumps(self.raw, indent=1) if self.out.suffix == ".json" else "\n".join(self.lines)
            self.out.write_text(text + "\n")

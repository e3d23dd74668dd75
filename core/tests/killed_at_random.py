"""Runs that are killed at random moments, again and again, and must end as if nothing had happened: bit for bit.

    python core/tests/killed_at_random.py [--kills 200] [--seed 0] [--seconds 1500]       nox -s faults -- --long

SIGKILL to all ranks of a job, or to one of them, whose peers must then say so and leave; at any moment from the start of the
processes to their exit. Printed: how many kills fell into which part of a run.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import ranks

# A name for each kind of run; each is trained once without a fault, to compare with.
RUNS = {
    "one rank": ("--epochs 6 --save-steps 5", 1, ""),
    "two ranks": ("--epochs 6 --save-steps 5", 2, ""),
    "adamw, every step saved": ("--epochs 4 --optimizer adamw --lr 0.003 --save-steps 1", 2, ""),
    "augmented rows, dropout, workers": ("--epochs 6 --workers 1 --save-steps 3", 2, "small:Augmented"),
    "flat sums, epochs saved": ("--epochs 8 --reduction flat", 2, ""),
}


def start(folder: Path, flags: str, world_size: int, workload: str) -> list:
    argv = [*ranks.FLAGS.split(), "--run-dir", str(folder / "run"), *flags.split()]
    files = [folder / f"process-{next(ranks.numbers)}" for _ in range(world_size)]
    calls = [partial(ranks.as_rank, rank, argv, None, workload) for rank in ranks.world(world_size)]
    processes = [ranks.forks.Process(target=ranks._in_process, args=pair) for pair in zip(files, calls, strict=True)]
    for process in processes:
        process.start()
    return processes


def phase(folder: Path) -> str:
    """What the run was at, from what it left behind."""
    if list(folder.glob("run/.*.tmp")):
        return "writing a snapshot"
    log = folder / "run/run.jsonl"
    lines = log.read_bytes().splitlines() if log.exists() else []
    kinds = {b'{"kind":"s': "training", b'{"kind":"e': "between epochs"}
    if not lines:
        return "before the first record"
    if lines[-1].startswith(b'{"kind":"start"'):
        return "first step"
    if lines[-1].startswith(b'{"kind":"snapshot"'):
        return "after a snapshot"
    return "exit" if lines[-1].startswith(b'{"kind":"end"') else kinds.get(lines[-1][:10], "a torn record")


def kill_once(folder: Path, flags: str, world_size: int, workload: str, seconds: float, draw: random.Random) -> str:
    """The part of the run in which it was killed; "" where it was over before. Raises AssertionError."""
    processes = start(folder, flags, world_size, workload)
    time.sleep(draw.uniform(0, 1.1 * seconds))
    if not any(process.is_alive() for process in processes):
        assert [process.exitcode for process in processes] == [0] * world_size
        return ""
    victims = processes if draw.random() < 0.7 else [draw.choice(processes)]
    where = phase(folder)
    for process in victims:
        process.kill()
    for process in processes:
        process.join(ranks.SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert None not in codes, f"a peer of a killed rank hangs: {codes}"
    # 7: a peer was lost; 4: it was lost before they had met; 0: all was done already.
    assert {*codes} <= {-9, 7, 4, 0}, (codes, [path.read_text() for path in folder.glob("*.err")][-world_size:])
    return where


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3000, help="begin no other run after so long (default: 3000)")
    flags = parser.parse_args()
    draw, counts, began, trials = random.Random(flags.seed), Counter(), time.monotonic(), 0
    references: dict[str, tuple] = {}
    with tempfile.TemporaryDirectory() as top:
        while counts.total() < flags.kills and time.monotonic() - began < flags.seconds:
            name = [*RUNS][trials % len(RUNS)]
            what, trials = RUNS[name], trials + 1
            if name not in references:
                (Path(top) / name).mkdir()
                for again in ("first", "run"):  # the fork server is started by the first
                    now = time.monotonic()
                    job = ranks.train(Path(top) / name / again, *what[:2], workload=what[2], code=0)
                references[name] = (job, time.monotonic() - now)
            reference, seconds = references[name]
            folder = Path(top) / f"trial-{trials}"
            folder.mkdir()
            for where in iter(lambda: kill_once(folder, *what, seconds, draw), ""):  # noqa: B023 - called at once
                counts[where] += 1
            ranks.assert_same_run(ranks.train(folder / "run", *what[:2], workload=what[2], code=0), reference)
            print(f"{counts.total()} kills, {trials} runs ended as one that was never killed ({name})", flush=True)
    print(", ".join(f"{where}: {count}" for where, count in counts.most_common()))
    return 0 if counts.total() >= flags.kills else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    raise SystemExit(main())

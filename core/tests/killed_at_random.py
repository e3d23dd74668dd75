"""Kills runs at random moments, again and again. Each must end exactly like a run that was never killed, bit for bit.

    python core/tests/killed_at_random.py [--kills 200] [--seed 0] [--seconds 1500]       nox -s faults -- --long
    python core/tests/killed_at_random.py --seed 0 --trial 7                              one run and its kills again

SIGKILL goes to all ranks of a job, or to one, whose peers must then report it and exit. It comes at any moment between the
start and the exit of the processes. A line per kill says how to repeat it; a table at the end counts kills by kind and part
of the run. The random draws repeat exactly; the moment of a kill within the run only roughly.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the folder that contains conformance/

import faults
import ranks


@dataclass(frozen=True)
class Kind:
    """A kind of run. slow: called in each rank, to make a part of the run long enough for a kill."""

    flags: str
    world_size: int = 2
    workload: str = ""
    slow: Callable[[], None] | None = None
    nodes: int = 1

    def world(self) -> list:
        return ranks.world(self.world_size) if self.nodes == 1 else ranks.on_nodes(self.nodes, self.world_size // self.nodes)

    def train(self, folder: Path) -> ranks.Job:
        slow = dict.fromkeys(range(self.world_size), self.slow) if self.slow else {}
        return ranks.train(folder, self.flags, ranks=self.world(), workload=self.workload, faults=slow, code=0)


SLOW = faults.slow_disk(0.08)
# Each kind is trained once without a kill, as the reference.
KINDS = {
    "one rank": Kind("--epochs 6 --save-steps 5", 1),
    "two ranks": Kind("--epochs 6 --save-steps 5"),
    "adamw, every step saved": Kind("--epochs 4 --optimizer adamw --lr 0.003 --save-steps 1"),
    "augmented rows, dropout, workers": Kind("--epochs 6 --workers 1 --save-steps 3", 2, "small:Augmented"),
    "flat sums, epochs saved": Kind("--epochs 8 --reduction flat"),
    "saves beside the training, one after the other": Kind("--epochs 3 --save-steps 2", slow=SLOW),
    "saves of 36 MB beside the training": Kind("--epochs 3 --save-steps 3", 2, "small:Wide"),
    "long evaluations": Kind("--epochs 5 --save-every 2", slow=faults.slow_evaluation(0.3)),
    "sharded": Kind("--sharding full --epochs 3 --save-steps 5"),
    "sharded, slow disk, adamw": Kind("--sharding full --epochs 2 --save-steps 3 --optimizer adamw --lr 0.003", slow=SLOW),
    "sharded, four ranks": Kind("--sharding full --epochs 3 --save-steps 4 --clip-norm 0.5", 4),
    "sharded, sets of files": Kind("--sharding full --epochs 3 --save-steps 4 --max-shard-size 50KB", 4, slow=SLOW),
    "sharded, two nodes of two ranks": Kind("--sharding hybrid --epochs 3 --save-steps 4", 4, nodes=2),
}
AIMS = ("writing a snapshot", "writing a snapshot", "evaluation", "exit")  # of half of the kills; others have none


def start(folder: Path, kind: Kind) -> list:
    argv = [*ranks.FLAGS.split(), "--run-dir", str(folder / "run"), *kind.flags.split()]
    world = kind.world()
    files = [folder / f"process-{next(ranks.numbers)}" for _ in world]
    calls = [partial(ranks.as_rank, rank, argv, kind.slow, kind.workload) for rank in world]
    processes = [ranks.forks.Process(target=ranks._in_process, args=pair) for pair in zip(files, calls, strict=True)]
    for process in processes:
        process.start()
    return processes


def phase(folder: Path, begins: int, ends: set[int]) -> str:
    """The current part of the run, from its files. begins: run.jsonl's size before this start. ends: the epochs' last steps."""
    log = folder / "run/run.jsonl"
    lines = log.read_bytes()[begins:].splitlines(keepends=True) if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    if not records:
        return "before the first record"
    if any(folder.glob("run/.snapshot.*.tmp")):
        return "writing a snapshot"
    last = records[-1]
    if last["kind"] == "step":
        return "evaluation" if last["step"] + 1 in ends else "training"
    return dict(start="first step", snapshot="training", epoch="end of an epoch", end="exit")[last["kind"]]


def kill_once(folder: Path, kind: Kind, seconds: float, ends: set[int], draw: random.Random) -> tuple[str, str] | None:
    """Who was killed and when, and the part of the run; None if the run had ended. Raises AssertionError."""
    log = folder / "run/run.jsonl"
    begins, aim = log.stat().st_size if log.exists() else 0, draw.choice(AIMS) if draw.random() < 0.5 else ""
    wait, then = draw.uniform(0, 0.95 * seconds), draw.uniform(0, 0.05)
    victim = draw.choice([None] * 7 + [draw.randrange(kind.world_size)] * 3)  # None: all ranks
    began, processes = time.monotonic(), start(folder, kind)
    time.sleep(wait)
    while aim and phase(folder, begins, ends) != aim and any(process.is_alive() for process in processes):
        time.sleep(0.002)
    time.sleep(then if aim else 0)
    if not any(process.is_alive() for process in processes):
        assert [process.exitcode for process in processes] == [0] * kind.world_size
        return None
    where, at = phase(folder, begins, ends), time.monotonic() - began
    for process in processes if victim is None else [processes[victim]]:
        process.kill()
    for process in processes:
        process.join(ranks.SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    said = [path.read_text() for path in sorted(folder.glob("*.err"))][-kind.world_size :]
    assert None not in codes, f"a peer of a killed rank hangs: {codes}"
    # 7: a peer was lost; 4: it was lost before the ranks met; 0: the work was finished.
    assert {*codes} <= {-9, 7, 4, 0}, (codes, said)
    assert not any("Traceback" in text for text in said), said
    return f"{'all ranks' if victim is None else f'rank {victim}'} after {at:.2f} s", where


def assert_nothing_saved_was_lost(job: ranks.Job) -> None:
    """Every start must be at or after the step of the last snapshot."""
    saved = 0
    for line in (job.run_dir / "run.jsonl").read_text().splitlines():
        with_step = json.loads(line) if line.startswith(('{"kind":"start"', '{"kind":"snapshot"')) else {}
        assert with_step.get("kind") != "start" or with_step["step"] >= saved, f"{with_step['step']}, but {saved} was saved"
        saved = with_step.get("step", saved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3000, help="begin no other run after so long (default: 3000)")
    parser.add_argument("--trial", type=int, default=0, help="this run alone; its number says which kind of run it is")
    flags = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    began, trial = time.monotonic(), flags.trial or 1
    references: dict[str, tuple[ranks.Job, float]] = {}
    ranks.forks.set_forkserver_preload(["ddp_core.trainer", "ddp_core.sharding"])
    top = Path(tempfile.mkdtemp(prefix="killed-at-random-"))
    while counts.total() < flags.kills and time.monotonic() - began < flags.seconds:
        name = [*KINDS][(5 * trial + flags.seed) % len(KINDS)]  # the kinds in turn, if 5 does not divide their number
        kind, folder, draw = KINDS[name], top / f"trial-{trial}", random.Random(f"{flags.seed}/{trial}")
        what = f"--seed {flags.seed} --trial {trial} ({name})"
        if name not in references:
            (top / name).mkdir()
            for again in ("first", "run"):  # the first run also starts the fork server, so the second is timed
                now = time.monotonic()
                job = kind.train(top / name / again)
            references[name] = (job, time.monotonic() - now)
        reference, seconds = references[name]
        ends = {record["step"] for record in reference.records("epoch")}
        folder.mkdir()
        try:
            while (killed := kill_once(folder, kind, seconds, ends, draw)) and counts.total() < flags.kills:
                who, where = killed
                counts[name, where] += 1
                print(f"kill {counts.total()}: {what}: {who}, {where}", flush=True)
            job = kind.train(folder / "run")
            ranks.assert_same_run(job, reference)
            ranks.step_of(job)  # also verifies every file of a set
            assert_nothing_saved_was_lost(job)
        except BaseException:
            print(f"error: {what} did not end as a run that was never killed, what it left is in {folder}", flush=True)
            raise
        print(f"the same as never killed: {what}", flush=True)
        shutil.rmtree(folder)
        trial += 1
        if flags.trial:
            break
    shutil.rmtree(top)
    for name in dict.fromkeys(name for name, _ in counts):
        parts = {where: count for (of, where), count in counts.most_common() if of == name}
        print(f"{sum(parts.values()):4} {name}: " + ", ".join(f"{where} {count}" for where, count in parts.items()))
    print(f"{counts.total()} kills in {trial - (flags.trial or 1)} runs, each in the end as one that was never killed")
    return 0 if flags.trial or counts.total() >= flags.kills else 1


if __name__ == "__main__":
    raise SystemExit(main())

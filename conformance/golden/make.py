"""Write the golden trace: the reference run in fp64, by the core, in a world of one on CPU.

    python -m conformance.golden.make
    python -m conformance.golden.make --record "why it changes"     of whatever has changed: the golden files, the references

conformance/checks/test_static.py checks what is written against NumPy. Change it only in a commit that says why.
"""

import argparse
import datetime
import hashlib
import json
import re
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("digits-fp64.json")
HARNESS, CHANGELOG = (Path(__file__).parents[level] / name for level, name in ((1, "harness"), (2, "CHANGELOG.md")))
# What the trace was made with; everything else is at its default (global batch 96, seed 0, SGD, lr 0.1, momentum 0.9).
RUN = "--workload digits --precision fp64 --epochs 3"
FLAGS = f"{RUN} --device cpu --log-every 1"


def main() -> None:
    from ddp_core import Rank, run
    from ddp_core.device import versions

    with tempfile.TemporaryDirectory() as folder:
        code = run(lambda environ: Rank.single(), [*FLAGS.split(), "--run-dir", folder])
        records = [json.loads(line) for line in Path(folder, "run.jsonl").read_text().splitlines()]
    assert code == 0, code
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    trace = dict(
        flags=FLAGS,
        made_with=versions(),
        losses=[record["loss_hex"] for record in steps],
        eval_losses=[record["eval_loss"].hex() for record in epochs],
        eval_accuracies=[record["eval_accuracy"].hex() for record in epochs],
    )
    FILE.write_text(json.dumps(trace, indent=1) + "\n")
    print(f"{FILE}: {len(steps)} steps, {len(epochs)} epochs, losses {steps[0]['loss']:.6f} to {steps[-1]['loss']:.6f}")


def digests() -> dict[str, str]:
    """Of what is compared with, by the files' names: golden traces, and what arrives at them independently."""
    independent = [HARNESS / f"{name}.py" for name in ("reference", "anchors", "noisy")]
    files = [*sorted(FILE.parent.glob("*.json")), *independent]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def recorded() -> dict[str, str]:
    """The last digest of each file in CHANGELOG.md."""
    return dict(re.findall(r"^- [\d-]+ `(\S+)` `([0-9a-f]{64})`: \S", CHANGELOG.read_text(), re.MULTILINE))


def record(why: str) -> None:
    """A line in CHANGELOG.md for each file that has changed."""
    before = recorded()
    lines = [
        f"- {datetime.date.today()} `{name}` `{digest}`: {why}\n"
        for name, digest in digests().items()
        if before.get(name) != digest
    ]
    head, heading, rest = CHANGELOG.read_text().partition("## Golden\n")
    own, blank, others = rest.partition("\n## ")
    CHANGELOG.write_text(head + heading + own.rstrip("\n") + "\n" + "".join(lines) + blank + others)
    print(f"{len(lines)} lines were added to {CHANGELOG}")


def load() -> dict[str, list[float]]:
    """losses of all steps; eval_losses and eval_accuracies of all epochs."""
    trace = json.loads(FILE.read_text())
    names = ("losses", "eval_losses", "eval_accuracies")
    return {name: [float.fromhex(value) for value in trace[name]] for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", metavar="WHY")
    why = parser.parse_args().record
    record(why) if why else main()

"""Write the golden trace: the reference run in fp64, by the core, in a world of one on CPU.

    python -m conformance.golden.make

conformance/checks/test_static.py checks what is written against NumPy. Change it only in a commit that says why.
"""

import json
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("digits-fp64.json")
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


def load() -> dict[str, list[float]]:
    """losses of all steps; eval_losses and eval_accuracies of all epochs."""
    trace = json.loads(FILE.read_text())
    names = ("losses", "eval_losses", "eval_accuracies")
    return {name: [float.fromhex(value) for value in trace[name]] for name in names}


if __name__ == "__main__":
    main()

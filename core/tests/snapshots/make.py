"""Snapshots as this ddp_core writes them, and the losses of the run that each is of: README.md says which are here.

PYTHONPATH=core/src python core/tests/snapshots/make.py 2     # the number of the format; writes format2-*.safetensors
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from ddp_core import Rank, run
from ddp_core.record import Record

HERE = Path(__file__).parent
REGRESSION = "--workload regression --precision fp64 --steps-per-epoch 10 --global-batch-size 32"
RUNS = {
    "sgd": f"{REGRESSION} --lr 0.02",
    "momentum": f"{REGRESSION} --lr 0.01 --momentum 0.9 --weight-decay 0.01",
    "adamw": f"{REGRESSION} --lr 0.01 --optimizer adamw --momentum 0.9 --lr-schedule cosine --warmup-steps 3",
}
OWN = {"own": f"--workload {HERE / 'golden.py'} --width 5"}  # from format 2 on


def train(run_dir: Path, flags: str) -> int:
    argv = f"--device cpu --log-every 1 --run-dir {run_dir} {flags}".split()
    return run(lambda environ: Rank.single(), argv)


def make(folder: Path, name: str, flags: str) -> dict:
    """Train 4 epochs without a stop; and until somewhere in the second, which makes the snapshot."""
    assert train(folder / "whole", f"{flags} --epochs 4") == 0
    write = Record.write

    def stopping(self, kind, **values):
        write(self, kind, **values)
        if kind == "epoch":
            os.kill(os.getpid(), signal.SIGUSR1)  # obeyed after the next steps

    Record.write = stopping
    assert train(folder / "stopped", f"{flags} --epochs 4") == 75
    Record.write = write
    shutil.copy(folder / "stopped" / "snapshot.safetensors", HERE / f"{name}.safetensors")
    records = [json.loads(line) for line in (folder / "whole" / "run.jsonl").read_text().splitlines()]
    epochs = [[record["loss"].hex(), record["eval_loss"].hex()] for record in records if record["kind"] == "epoch"]
    losses = [record["loss_hex"] for record in records if record["kind"] == "step"]
    return {"flags": flags.replace(str(HERE), "HERE"), "losses": losses, "epochs": epochs}


if __name__ == "__main__":
    found = {}
    for name, flags in (RUNS if sys.argv[1] == "1" else RUNS | OWN).items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = make(Path(folder), f"format{sys.argv[1]}-{name}", flags)
    (HERE / f"format{sys.argv[1]}.json").write_text(json.dumps(found, indent=1) + "\n")

"""A small search over the learning rate: one run after the other on this device, then a table, the best one first.

    .venv/bin/python sweep.py runs/sweep --lr 0.03 0.1 0.3 -- --epochs 3            in an interactive job, on one GPU
    .venv/bin/python sweep.py runs/sweep --lr 0.03 0.1 0.3 --metrics wandb          each run in W&B, offline, too
    for lr in 0.03 0.1 0.3; do sbatch job.sl --lr $lr --run-dir runs/sweep/lr-$lr; done     a job each, on several GPUs,
    .venv/bin/python sweep.py runs/sweep                                                    then only the table

Flags of train.py stand behind --. Started again it goes on where it was. W&B's own search: sweep.yaml.
Exit code: that of a run that failed; else 1 if a writer of metrics did.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


def train(run_dir: Path, lr: float, flags: list[str], metrics: list[str]) -> tuple[int, int]:
    """One run, and its metrics beside it. Returns the exit codes of both."""
    writer = None
    if metrics:
        command = [sys.executable, "metrics.py", "--follow", *(f"--{name}" for name in metrics), str(run_dir)]
        writer = subprocess.Popen(command)
    command = [sys.executable, "train.py", "--lr", str(lr), "--run-dir", str(run_dir), *flags]
    code = subprocess.run(command, check=False).returncode
    if not writer:
        return code, 0
    writer.terminate()
    try:
        return code, writer.wait(30)
    except subprocess.TimeoutExpired:
        writer.kill()
        print("metrics: ended after 30 s, before all was written", flush=True)
        return code, 1


def held_out_losses(run_dir: Path) -> list[float]:
    """Of each epoch that was evaluated."""
    epochs = {}
    log = run_dir / "run.jsonl"
    for line in log.read_text().splitlines() if log.exists() else []:
        record = json.loads(line)
        if "eval_loss" in record:
            epochs[record["epoch"]] = record["eval_loss"]
    return list(epochs.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/sweep"), help="default: %(default)s")
    parser.add_argument("--lr", type=float, nargs="+", default=[])
    parser.add_argument("--metrics", nargs="+", choices=["tensorboard", "wandb"], default=[])
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags, theirs = parser.parse_args(arguments[:end]), arguments[end + 1 :]

    ends = [train(flags.folder / f"lr-{lr:g}", lr, theirs, flags.metrics) for lr in flags.lr]
    runs = [
        (min(losses), len(losses), run_dir) for run_dir in flags.folder.glob("lr-*") if (losses := held_out_losses(run_dir))
    ]
    for loss, epochs, run_dir in sorted(runs):
        print(f"held-out loss {loss:.6f} at best, {epochs} epochs, {run_dir}")
    return max((code for code, _ in ends), default=0) or max((code for _, code in ends), default=0)


if __name__ == "__main__":
    raise SystemExit(main())

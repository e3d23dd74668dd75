"""A small search over the learning rate: the runs share out this job's GPUs, one each; then a table, the best one first.

    .venv/bin/python sweep.py runs/sweep --lr 0.01 0.03 0.1 0.3 -- --epochs 3     in an interactive job: four at a time
    .venv/bin/python sweep.py runs/sweep --lr 0.03 0.1 --ranks 4 -- --epochs 3    each on four GPUs, one after the other
    .venv/bin/python sweep.py runs/sweep --lr 0.03 0.1 --metrics wandb            each in W&B, offline, too
    for lr in 0.03 0.1; do sbatch job.sl --lr $lr --run-dir runs/sweep/lr-$lr; done     a job each, on several nodes,
    .venv/bin/python sweep.py runs/sweep                                                then only the table

Flags of train.py stand behind --. Started again it goes on where it was.
Exit code: that of a run that failed; else 1 if a writer of metrics did.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch


def train(run_dir: Path, lr: float, flags: list[str], metrics: list[str], ranks: int, free: SimpleQueue) -> tuple[int, int]:
    """One run on the next GPUs that are free, and its metrics beside it. Returns the exit codes of both."""
    gpus, code = free.get(), 1
    command = [sys.executable, "metrics.py", "--follow", *(f"--{name}" for name in metrics), str(run_dir)]
    writer = subprocess.Popen(command) if metrics else None
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, "train.py", "--lr", str(lr), "--run-dir", str(run_dir), *flags]
    try:
        # train.py refuses one process in a job of several tasks.
        code = subprocess.run(command, env=os.environ | gpus | dict(SLURM_NTASKS="1"), check=False).returncode
        if not writer:
            return code, 0
        writer.terminate()
        return code, writer.wait(30)
    except subprocess.TimeoutExpired:
        writer.kill()
        print("metrics: ended after 30 s, before all was written", flush=True)
        return code, 1
    finally:
        free.put(gpus)


def held_out_losses(run_dir: Path) -> list[float]:
    """Of each epoch that was evaluated."""
    log = run_dir / "run.jsonl"
    records = map(json.loads, log.read_text().splitlines() if log.exists() else [])
    return [*{record["epoch"]: record["eval_loss"] for record in records if "eval_loss" in record}.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/sweep"), help="default: %(default)s")
    parser.add_argument("--lr", type=float, nargs="+", default=[])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each run (default: %(default)s)")
    parser.add_argument("--metrics", nargs="+", choices=["tensorboard", "wandb"], default=[])
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags, theirs = parser.parse_args(arguments[:end]), arguments[end + 1 :]

    count, free = torch.cuda.device_count(), SimpleQueue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    if count and flags.ranks > count:
        parser.error(f"--ranks {flags.ranks}, but there are {count} GPUs")
    shares = [visible[at : at + flags.ranks] for at in range(0, count - flags.ranks + 1, flags.ranks)]
    for share in [dict(CUDA_VISIBLE_DEVICES=",".join(share)) for share in shares] or [{}]:  # without a GPU one at a time
        free.put(share)
    with ThreadPoolExecutor(len(shares) or 1) as pool:
        runs = [(flags.folder / f"lr-{lr:g}", lr, theirs, flags.metrics, flags.ranks, free) for lr in flags.lr]
        ends = [*pool.map(lambda run: train(*run), runs)]
    runs = [(min(losses), len(losses), run) for run in flags.folder.glob("lr-*") if (losses := held_out_losses(run))]
    for loss, epochs, run_dir in sorted(runs):
        print(f"held-out loss {loss:.6f} at best, {epochs} epochs, {run_dir}")
    codes = [*(code for code, _ in ends), *(code for _, code in ends)]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)  # of a signal as a shell has it


if __name__ == "__main__":
    raise SystemExit(main())

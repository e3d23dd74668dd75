"""Shows a run in TensorBoard, in Weights & Biases, or in both: a process beside the training that reads its run.jsonl.

    .venv/bin/python metrics.py --tensorboard runs/15            once, of a run that is there
    .venv/bin/python metrics.py --follow --wandb runs/15         until SIGTERM: what job.sl starts for METRICS=wandb
    .venv/bin/python -m tensorboard.main --logdir runs           to look at it, through ssh -L 6006:localhost:6006
    .venv/bin/python -m wandb sync runs/15/wandb/offline-run-*   to upload it; WANDB_MODE=online uploads at once

The training does not know of this process and waits for nothing of it. Whatever fails here is one line, and exit code 1.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ended = []  # not empty after SIGTERM: write what is there, and go


class TensorBoard:
    """Events below RUN_DIR/tensorboard, made anew each time: run.jsonl has the whole run, and a step shall stand there once."""

    def __init__(self, run_dir: Path, config: dict):
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        self.writer = SummaryWriter(run_dir / "tensorboard")
        self.writer.add_text("config", json.dumps(config, indent=1))

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run in RUN_DIR/wandb. Offline unless WANDB_MODE says otherwise: a compute node need not reach W&B to train."""

    def __init__(self, run_dir: Path, config: dict):
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        if mode == "offline":
            for earlier in run_dir.glob("wandb/offline-run-*"):  # of an earlier start of this run: written anew
                shutil.rmtree(earlier, ignore_errors=True)
        for kind in ("CACHE", "CONFIG", "DATA"):  # not into the home of all jobs
            os.environ.setdefault(f"WANDB_{kind}_DIR", str(run_dir.resolve() / "wandb" / kind.lower()))
        import wandb

        # Online, a requeued job goes on with its run, whose id this is; a sweep's agent has set its own.
        (run_dir / "wandb").mkdir(exist_ok=True)
        name = "-".join(run_dir.parts[-2:])
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ddp-sites"),
            name=name,
            id=os.environ.get("WANDB_RUN_ID", "".join(c if c.isalnum() else "-" for c in name)),
            resume="allow" if mode == "online" else None,
            dir=run_dir,
            config=config,
            settings=wandb.Settings(init_timeout=60, console="off", silent=True),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        if step >= self.run.step:  # W&B has the earlier ones
            self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def records(log: Path, follow: bool) -> Iterator[dict | None]:
    """The records of run.jsonl, as they come. None: another file has taken its place (--fresh), what was read is void."""
    file, rest, more = None, "", True
    while more:
        more = follow and not ended
        if log.exists() and (file is None or os.fstat(file.fileno()).st_ino != log.stat().st_ino):
            if file:
                yield None
            file, rest = open(log), ""  # noqa: SIM115 - as long as the run
        *lines, rest = (rest + (file.read() if file else "")).split("\n")
        for line in lines:
            yield json.loads(line)
        if more:
            time.sleep(0.5)


def copy(run_dir: Path, kinds: list[type], follow: bool) -> int:
    """The run's losses, gradients and evaluations into each backend. Returns how many records these were."""
    backends, seen, count = [], -1, 0
    for record in records(run_dir / "run.jsonl", follow):
        if record is None or (record["kind"] == "start" and not backends):
            for backend in backends:
                backend.close()
            backends, seen = [kind(run_dir, record["config"]) for kind in kinds] if record else [], -1
        elif record["kind"] in ("step", "epoch"):
            # A resumed run repeats the steps after its snapshot. An epoch's record has the number of steps done.
            train = record["kind"] == "step"
            step = record["step"] if train else record["step"] - 1
            if 2 * step + (not train) > seen:
                names = ("loss", "grad_norm") if train else [name for name in record if name.startswith("eval_")]
                values = {("train/" if train else "") + name.replace("eval_", "eval/"): record[name] for name in names}
                for backend in backends:
                    backend.write(step, values)
                seen, count = 2 * step + (not train), count + 1
    for backend in backends:
        backend.close()
    if not count:
        raise ValueError(f"no steps in {run_dir / 'run.jsonl'}")
    return count


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))  # first: a job may be over before the imports below are
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the warning is for the ranks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--tensorboard", dest="kinds", action="append_const", const=TensorBoard)
    parser.add_argument("--wandb", dest="kinds", action="append_const", const=WandB)
    parser.add_argument("--follow", action="store_true", help="until SIGTERM, not once")
    flags = parser.parse_args()
    try:
        count = copy(flags.run_dir, flags.kinds or [], flags.follow)
    except Exception as error:
        print(f"metrics: {type(error).__name__}: {' '.join(str(error).split())[:300]}; training goes on", flush=True)
        return 1
    print(f"metrics: {count} records of {flags.run_dir}", flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not through what these libraries do at the end, which can wait for a network

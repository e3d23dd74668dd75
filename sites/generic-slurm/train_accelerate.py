"""generic-slurm: train.py with Hugging Face's Accelerate: it wraps the model in DDP and finds the device.

    sbatch job-accelerate.sl --epochs 5
    .venv/bin/torchrun --standalone --nproc-per-node 2 train_accelerate.py --epochs 5

It needs `.venv/bin/pip install accelerate==1.15.0`. variants.py has what this shares with Horovod's variant.
"""

import os
from datetime import timedelta

from ddp_core.errors import ExitCode
from train import rank
from variants import Run, main, not_installed

try:
    from accelerate import Accelerator, __version__
    from accelerate.utils import InitProcessGroupKwargs, gather_object
except ModuleNotFoundError as error:
    main(rank, not_installed(error, ".venv/bin/pip install accelerate==1.15.0"))


def export(run: Run) -> None:
    """What torchrun exports, for ranks that srun started: Accelerate reads nothing else.

    https://huggingface.co/docs/accelerate/package_reference/state
    """
    who = run.rank
    told = dict(RANK=who.rank, WORLD_SIZE=who.world_size, LOCAL_RANK=who.local_rank, LOCAL_WORLD_SIZE=who.local_world_size)
    told |= dict(MASTER_ADDR=who.master_addr, MASTER_PORT=who.master_port)
    if who.world_size > 1:
        os.environ.update({name: str(value) for name, value in told.items()})


def train(run: Run) -> ExitCode:
    export(run)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=run.config.timeout))
    # On a node without GPUs Accelerate starts a world of one, whatever the launcher said, unless it is told cpu=True.
    accelerator = Accelerator(cpu=run.device.type == "cpu", kwargs_handlers=[timeout])
    run.begin(f"accelerate {__version__}", accelerator.num_processes, lambda value: gather_object([value]))
    # Not the data: its loader would deal out the rows in another order at each world size, and repeat some of them at the end.
    run.model, run.optimizer = accelerator.prepare(run.bare, run.optimizer)

    while run.step < run.total_steps:
        inputs, targets = run.batch()
        run.optimizer.zero_grad()
        loss = run.objective.loss(run.model(inputs), targets)  # summed over the rows of this rank
        # DDP averages gradients over the ranks, and we want their sum.
        accelerator.backward(loss * (run.share * accelerator.num_processes))
        run.optimizer.step()
        if not run.done(accelerator.reduce(run.told(loss), reduction="sum")):
            continue
        if run.step % run.steps_per_epoch == 0:
            run.end_epoch(accelerator.reduce(run.evaluate(), reduction="sum"))
        run.save()
        if run.stopping:
            break
    code = run.end()
    accelerator.end_training()
    return code


if __name__ == "__main__":
    raise SystemExit(main(rank, train))

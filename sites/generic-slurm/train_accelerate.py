"""generic-slurm: train.py, but Hugging Face's Accelerate wraps the model, and so sums the gradients.

    sbatch job.sl --epochs 5        with program=train_accelerate.py in job.sl
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 train_accelerate.py --epochs 5     one machine

It needs `./install.sh --add accelerate==1.15.0`. All flags and files are train.py's.
"""

import os

from ddp_core import run
from ddp_core.errors import PreflightError
from ddp_core.reduction import Ddp, Reduction
from train import rank


class Accelerate(Ddp):
    """As --reduction ddp, but Accelerate makes the DistributedDataParallel."""

    def __init__(self, model, compiled, peers, unused_parameters):
        Reduction.__init__(self, model, compiled, peers, unused_parameters)  # Ddp's own would wrap the model
        try:
            from accelerate import Accelerator, DistributedDataParallelKwargs, __version__
        except ImportError as error:
            raise PreflightError(f"{error}: ./install.sh --add accelerate==1.15.0") from error
        self.name = f"accelerate {__version__}"
        device = self.parameters[0].device
        export(device.index)
        ddp = DistributedDataParallelKwargs(find_unused_parameters=unused_parameters, gradient_as_bucket_view=True)
        # Without GPUs it starts a world of one, whatever the variables say, unless cpu=True.
        self.accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[ddp])
        if self.accelerator.num_processes != peers.world_size:  # 16 worlds of one look like 16 successes
            raise PreflightError(f"Accelerate has {self.accelerator.num_processes} ranks, but should have {peers.world_size}")
        # The model alone. Its data loader would order the rows by the number of ranks, and repeat some of them at the end.
        self.forward = self.accelerator.prepare_model(compiled)


def export(device_index: int | None) -> None:
    """What torchrun exports, all that Accelerate reads. https://huggingface.co/docs/accelerate/package_reference/state"""
    me = rank(os.environ)
    if me.world_size > 1:
        # It takes LOCAL_RANK for the index of its GPU, which is 0 where each rank sees one GPU.
        local_rank = me.local_rank if device_index is None else device_index
        place = dict(RANK=me.rank, WORLD_SIZE=me.world_size, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=me.local_world_size)
        os.environ.update({name: str(value) for name, value in place.items()})


if __name__ == "__main__":
    raise SystemExit(run(rank, reduction=Accelerate))

"""torchrun, once a node, that hands on what Slurm and job-torchrun.sl tell each other: the warning, and the exit code.

    srun ... singularity exec IMAGE PYTHON torchrun.py [flags of torchrun] PYTHON train.py [flags]

By itself torchrun dies of a SIGUSR1, and ends with 1 whatever its ranks ended with.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

CACHES = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def to_the_ranks(number: int, frame: object) -> None:
    """Send the signal to this process's children: the ranks. https://man7.org/linux/man-pages/man5/proc_pid_children.5.html"""
    for thread in Path("/proc/self/task").iterdir():
        for child in (thread / "children").read_text().split():
            os.kill(int(child), number)


def launch(argv: list[str]) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, as a shell has it, or 0."""
    # Not at the top of the file: a signal during these imports must find its handler.
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    if not torch.cuda.is_available():
        # There is nothing to be near to: right for --device cpu, and of --device cuda train.py says what is missing.
        argv = [flag for flag in argv if not flag.startswith("--numa-binding")]
    try:
        main(argv)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode  # killed by a signal
    except SignalException:
        return 1  # srun ends the step: another node has the ranks' code, and srun takes the highest
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, to_the_ranks)
    if "--debug" not in sys.argv:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # pages of C++ frames, when another node's is done first
    for name in CACHES:
        Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
    try:
        code = launch(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # At once. Python takes a second to clean up, and a node that is done sooner has srun send SIGTERM to the others: 143 in
    # place of 75, and no requeue (seen on two nodes).
    os._exit(code)

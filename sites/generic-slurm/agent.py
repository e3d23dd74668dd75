"""generic-slurm: torchrun for job.sl, with the ranks' exit code for its own.

    .venv/bin/python agent.py --standalone --nproc-per-node 2 train.py --epochs 5

All flags are torchrun's, which by itself ends with 1 whatever its ranks ended with. It dies of Slurm's USR1 before the time
limit, and of the USR2 by which you ask the ranks where they are.
"""

import os
import signal
import sys
import traceback


def launch() -> int:
    """Run torchrun; returns the exit code of the rank that failed first, as a shell has it, or 0."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode  # -9: SIGKILL, 137
    except SignalException:
        return 1  # srun ends the step: another node has the ranks' code, and srun takes the highest
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    # The ranks, which Slurm signals too, inherit it until train.py takes the signals: none ends one that is still importing.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if "--debug" not in sys.argv:  # pages of C++ frames, when the torchrun of another node has ended first
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    code = launch()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: Python takes a second to clean up, and srun would meanwhile end the other nodes, with 143 in place of 75.
    os._exit(code)

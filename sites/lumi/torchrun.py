"""torchrun, once a node. It hands Slurm's warning on to the ranks, and their exit code back to Slurm.

    srun ... singularity exec IMAGE PYTHON torchrun.py RANKS_PER_NODE train.py [flags]

By itself torchrun dies of a SIGUSR1 or SIGUSR2, and ends with 1 whatever its ranks ended with.
"""

import os
import signal
import stat
import sys
import traceback
from contextlib import suppress
from pathlib import Path


def to_the_ranks(number: int, frame: object) -> None:
    """Sends the signal to this process's children. https://man7.org/linux/man-pages/man5/proc_pid_children.5.html"""
    for thread in Path("/proc/self/task").iterdir():
        for child in (thread / "children").read_text().split():
            os.kill(int(child), number)


def make_caches(folder: Path) -> None:
    """Compilers load code from there: it is this user's alone, and not what somebody made before."""
    cache = folder.parent
    with suppress(FileExistsError):
        cache.mkdir(mode=0o700)
    facts = cache.lstat()
    if (facts.st_uid, facts.st_mode) != (os.getuid(), stat.S_IFDIR | 0o700):
        print(f"error: {cache} on {os.uname().nodename} is not this user's alone (mode 700): remove it", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)
    folder.mkdir(exist_ok=True)


def launch(ranks_per_node: str, program: list[str]) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, as a shell has it, or 0."""
    # Not at the top of the file: a signal during these imports must find its handler.
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # All flags: https://docs.pytorch.org/docs/stable/elastic/run.html
    job = os.environ
    flags = [f"--nnodes={job['SLURM_JOB_NUM_NODES']}", f"--nproc-per-node={ranks_per_node}", "--rdzv-backend=c10d"]
    flags += [f"--rdzv-endpoint={job['MASTER_ADDR']}:{job['MASTER_PORT']}"]
    flags += [f"--rdzv-id={job['SLURM_JOB_ID']}.{job.get('SLURM_RESTART_COUNT', '0')}"]  # this start of this job
    if torch.cuda.is_available():
        # A NUMA node has two GCDs and 14 cores: 7 for each rank. https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/100
        flags += ["--numa-binding=exclusive"]
    # The ranks ignore the signals until train.py takes them: one that comes while Python starts would end it.
    flags += ["--no-python", "env", "--ignore-signal=TERM", "--ignore-signal=USR1", "--ignore-signal=USR2", sys.executable]
    try:
        main([*flags, *program])
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode  # killed by a signal
    except SignalException:
        return 1  # srun ends the step: another node has the ranks' code, and srun takes the highest
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, to_the_ranks)
    signal.signal(signal.SIGUSR2, to_the_ranks)  # on which a rank prints where it is
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else pages of C++ frames when another node's launcher ends first
    try:
        make_caches(Path(os.environ["MIOPEN_USER_DB_PATH"]))
        code = launch(sys.argv[1], sys.argv[2:])
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # while Python cleans up, a node that is done has srun send SIGTERM to the others, and 143 is not 75

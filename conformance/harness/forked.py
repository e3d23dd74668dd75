"""Fork ranks from one process that has imported torch and more already: importing takes seconds, forking almost no time."""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from conformance.harness.sites import ROOT


def server(preload: Iterable[str], *path: Path) -> Any:
    """The multiprocessing context whose Process forks. path: folders of the modules in `preload`, besides the repository.

    This process has one fork server, started by the first caller, so the settings for all callers are made here. In a forked
    process, sets of strings are ordered by PYTHONHASHSEED=0. With another seed their order is another.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch._dynamo", *preload])
    before, places = dict(os.environ), [os.environ.get("PYTHONPATH", ""), str(ROOT), *map(str, path)]
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL", PYTHONHASHSEED="0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return forks


def become(train: str, argv: list[str], environ: dict[str, str], files: list[Path]) -> None:
    """Make this process what a launcher would start: `python train.py ARGV`. files: for standard output and standard error."""
    for descriptor, file in zip((1, 2), files, strict=False):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv, sys.path[:0] = [train, *argv], [str(Path(train).parent)]
    gc.freeze()


def run_to_their_end(processes: list, seconds: float) -> None:
    """Run all at once, and kill those that are left after these seconds."""
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(1.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()

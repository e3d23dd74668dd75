"""Ranks forked from one process that has imported what their programs do: importing torch costs seconds, forking nothing."""

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
    """The context whose Process forks. path: where these modules are, besides the repository.

    There is one such process in this one, and who asks first starts it: what all need is set here. Sets of texts lie in the
    order of PYTHONHASHSEED=0 in all that it forks, so that another seed is another order.
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
    """All at once; whatever is left after these seconds is killed."""
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

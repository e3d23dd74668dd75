"""Shared by the core's tests: time limits, finished runs as references, small workloads, MNIST-like files.

    python -m pytest core/tests          (nox -s tests runs these and conformance/selftest)

Ranks are forked processes (ranks.py); their faults are in faults.py. No test measures time: seconds are deadlines for
processes that hang.
"""

import gzip
import os
import struct
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

# Set before torch is imported; the fork server inherits it.
os.environ["OMP_NUM_THREADS"] = "1"
# Compiled files are compared by whole seconds. A workload file rewritten within a second would run its old code.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # run() sets it before it imports torch, but forked ranks have torch already
sys.path.insert(0, str(Path(__file__).parent))  # ranks.py and the other helpers: importlib mode does not add this folder
# The fork server imports parked.py.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))

import pytest
import ranks
import torch
from ddp_core.run_directory import RunDirectory
from states import state


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(number): tests that row of core/FAULTS.md")


def pytest_collection_modifyitems(items):
    for item in items:
        numbers = [str(mark.args[0]) for mark in item.iter_markers("fault")]
        item.user_properties += [("fault", ", ".join(numbers))] if numbers else []
        # method "thread", because a signal cannot interrupt a collective that waits in C++.
        item.add_marker(pytest.mark.timeout(120, method="thread"))


def pytest_report_teststatus(report):
    """Show the row of core/FAULTS.md under -v: PASSED (fault 12)."""
    number = dict(getattr(report, "user_properties", ())).get("fault")
    if not number or report.when != "call" or report.outcome == "skipped":
        return None
    return report.outcome, {"passed": ".", "failed": "F"}[report.outcome], f"{report.outcome.upper()} (fault {number})"


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Callable[..., ranks.Job]:
    """finished(flags, world_size, workload): the job of such a run without a fault, trained once per session."""
    jobs: dict[tuple[str, int, str], ranks.Job] = {}

    def job(flags: str, world_size: int, workload: str = "") -> ranks.Job:
        key = (flags, world_size, workload)
        if key not in jobs:
            folder = tmp_path_factory.mktemp("finished")
            jobs[key] = ranks.train(folder / "run", flags, world_size, workload=workload, code=0)
        return jobs[key]

    return job


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run directory with the states of steps 1 and 2, as a job leaves it."""
    directory = RunDirectory(str(tmp_path / "run"), "job-0", fresh=False)
    for step in (1, 2):
        directory.save(*state(step))
    directory.release()
    return tmp_path / "run"


@pytest.fixture(scope="session")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """[1797, 8, 8] uint8 pixels and [1797] labels, read without ddp_core's reader."""
    text = gzip.decompress(resources.files("ddp_core.workloads").joinpath("digits.csv.gz").read_bytes()).decode()
    table = torch.tensor([[int(value) for value in line.split(",")] for line in text.split()], dtype=torch.uint8)
    return table[:, :64].view(-1, 8, 8), table[:, 64]


@pytest.fixture(scope="session")
def idx_folder(digits, tmp_path_factory) -> Path:
    """Four files like MNIST's, made from digits: pixels scaled by three, with a margin of 2; labels gzipped."""
    pixels, labels = digits
    large = torch.zeros(len(pixels), 28, 28, dtype=torch.uint8)
    large[:, 2:26, 2:26] = (pixels * 15).repeat_interleave(3, 1).repeat_interleave(3, 2)
    folder = tmp_path_factory.mktemp("idx")
    for split, rows in (("train", slice(0, 960)), ("t10k", slice(960, 1080))):
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx_bytes(large[rows]))
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels[rows])))
    return folder


@pytest.fixture(scope="session")
def flags_of(idx_folder, tmp_path_factory):
    """Flags for small versions of the workloads. For gpt: 200 rows of predictable text."""
    texts = tmp_path_factory.mktemp("texts")
    (texts / "text.txt").write_bytes(b"the loss falls and falls and falls; " * 361)
    choices = {
        "digits": "--epochs 2",
        "regression": "--epochs 2 --steps-per-epoch 20 --global-batch-size 32 --lr 0.01",
        "mnist": "--epochs 2 --steps-per-epoch 8 --global-batch-size 24 --optimizer adamw --lr 0.003",
        "gpt": "--epochs 2 --steps-per-epoch 4 --global-batch-size 16 --model-size tiny",
    }
    folders = {"mnist": f"--data-dir {idx_folder}", "gpt": f"--data-dir {texts}"}
    return {name: f"--workload {name} {folders.get(name, '')} {flags}" for name, flags in choices.items()}


def idx_bytes(values: torch.Tensor) -> bytes:
    """A uint8 tensor in the IDX format: 0, 0, 8 for bytes, the dimensions, their big-endian sizes, the bytes."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + bytes(values.flatten().tolist())

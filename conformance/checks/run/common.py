"""Flags of runs that several checks of ranks share, and helpers that check a run's end."""

import subprocess
import sys
from pathlib import Path

import pytest

from conformance.golden import make as golden
from conformance.harness import sites

IN_RANKS = [pytest.mark.mpi, pytest.mark.timeout(120, method="thread")]
clause, only, machine = pytest.mark.clause, pytest.mark.only, pytest.mark.machine
FP64 = golden.RUN
FP32 = "--workload digits --precision fp32 --epochs 3"
SETS = "--max-shard-size 50KB"
NOISY = "--workload {noisy} --precision fp64 --epochs 2"  # Runs.filled() fills in the path
MISTYPED = "--global-batch-size 97 --epochs -1"
DRAWS = "--workload {noisy} --dropout 0.2 --jitter 0.1"
# Uses all state that a run must keep: loader position, random numbers, buffers, the optimizer's step, the schedule's.
ALL = f"{DRAWS} --batch-norm --workers 1 --optimizer adamw --clip-norm 1 --accumulate 2 --warmup-steps 9 --lr-schedule cosine"
SHORT = "--workload digits --epochs 1 --steps-per-epoch 1"
STEP_7_AND_14 = "--workload digits --precision fp64 --epochs 1 --save-steps 7"  # snapshots; as text, "7" > "14"
G = 96  # the reference run's global batch
TWO = pytest.param(2, marks=only(sizes=(2, 4), mpi=False, devices=("cpu",)))  # 2 nodes, simulated on one
SNAPSHOT, LOG = "snapshot.safetensors", "run.jsonl"
NOISY_FILE = sites.ROOT / "conformance/harness/noisy.py"


def long(world, workload: str = "--workload digits", epochs: int = 2) -> tuple[str, int]:
    """Return flags, and steps an epoch: long enough for a signal at 0.2 ms a step (one rank), short enough at 20 ms (four)."""
    size = 8 if world.size < 4 else 32
    return f"{workload} --epochs {epochs} --lr 0.01 --global-batch-size {size}", 1438 // size


def expect_exit(check, run, code):
    """Check that all ranks have ended with this code; return the run."""
    __tracebackhide__ = True
    if run.exit_codes != [code] * len(run.exit_codes):
        output = " | ".join(" ".join(text.split())[-400:] for text in run.errors if text) or "nothing"
        check.holds(f"exit codes={run.exit_codes}, but should be all {code}; standard error: {output}")
    return run


def stopped_and_saved(check, run) -> None:
    """Check that the ranks have ended with 75, and that the last snapshot is of the last step."""
    __tracebackhide__ = True
    expect_exit(check, run, 75)
    check.equal(saved=(run.values("snapshot", "step")[-1:], run.values("end", "step")))


def done(check, run, *others):
    """Check that all ranks of each run have ended with 0; return the run or runs."""
    __tracebackhide__ = True
    for one in (run, *others):
        expect_exit(check, one, 0)
    return (run, *others) if others else run


def one_line(check, run, code: int, words: str, lines: list[str] | None = None) -> None:
    """Check that all ranks have ended with this code, after one line in all on standard error, which has these words.

    lines: count these instead of standard error's.
    """
    __tracebackhide__ = True
    expect_exit(check, run, code)
    lines = run.error_lines if lines is None else lines
    check.equal(lines=(len(lines), 1), says=(words if words in "".join(lines) else lines, words))


def damaged_copy(source: Path, target: Path) -> None:
    """Copy a file, with one bit changed in its middle."""
    raw = bytearray(source.read_bytes())
    raw[len(raw) // 2] ^= 1
    target.write_bytes(raw)


def verified(*files: Path) -> int:
    return looked_at("verify", *files)


def looked_at(act: str, *files: Path) -> int:
    """Return the exit code of `python -m ddp_core.snapshot ACT` for these files."""
    command = [sys.executable, "-m", "ddp_core.snapshot", act, *files]
    return subprocess.run(command, capture_output=True, check=False).returncode


def bytes_of(thing) -> int:
    """Return the bytes of the tensors that the object holds, without its model's parameters."""
    import torch
    from torch.utils._pytree import tree_leaves

    mine = [tensor for tensor in tree_leaves([*vars(thing).values()]) if isinstance(tensor, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in mine}
    of_model = {tensor.untyped_storage().data_ptr() for tensor in thing.model.parameters()}
    return sum(size for place, size in storages.items() if place not in of_model)

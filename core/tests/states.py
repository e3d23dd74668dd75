"""Small states of a run for the tests of the run directory. Each holds its step in its tensor."""

from pathlib import Path

import torch
from ddp_core import snapshot
from ddp_core.run_directory import RunDirectory

BYTES = 40_000  # size of the tensor in a state


def state(step: int) -> tuple[dict[str, torch.Tensor], dict]:
    document = {"step": step, "versions": {"ddp_core": "0.1.0"}}
    return {"model.weight": torch.full((BYTES // 8,), float(step), dtype=torch.float64)}, document


def step_of(loaded: tuple[dict[str, torch.Tensor], dict]) -> int:
    tensors, document = loaded
    assert (tensors["model.weight"] == document["step"]).all(), "tensors and document are of different states"
    return document["step"]


def load(folder: Path) -> tuple[dict[str, torch.Tensor], dict] | None:
    directory = RunDirectory(str(folder), "job-9", fresh=False)
    try:
        return directory.load()
    finally:
        directory.release()


def steps(folder: Path) -> list[int]:
    return [step_of(snapshot.read(folder / name)) for name in ("snapshot.safetensors", "snapshot.prev.safetensors")]

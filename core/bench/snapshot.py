"""Writing and reading 1.2 GB of parameters and AdamW state: our snapshot, torch.save, torch.distributed.checkpoint and dd.

    python core/bench/snapshot.py --dir /scratch/$USER/bench        # 4 GB of that file system, 2 minutes
    python core/bench/snapshot.py --dir /tmp --parameters 10000000

`stall` is the time that training waits; `durable` is the time until the data is on disk. They differ only for saves beside
training: "ours, beside", as a run saves, and async_save. `ours` writes the same file while training waits. dd writes as many
bytes of zeros, and calls fsync. The plain copy copies every tensor to host memory. Reads come from the page cache.
"""

import argparse
import os
import shutil
import subprocess
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Report, parsed, ratio, spread
from ddp_core import snapshot
from ddp_core.background import Saver
from ddp_core.record import Record
from ddp_core.run_directory import RunDirectory
from safetensors.torch import save_file


def tensors_of(parameters: int, device: str) -> dict[str, torch.Tensor]:
    """Tensors like those of a GPT of that size: matrices of 1024 x 4096, each with a vector, three times."""
    layers = max(1, parameters // (1024 * 4096 + 4096))
    tensors = {}
    for kind in ("model", "optim.mean", "optim.square"):
        for layer in range(layers):
            tensors[f"{kind}.{layer}.weight"] = torch.rand(1024, 4096, device=device)
            tensors[f"{kind}.{layer}.bias"] = torch.rand(4096, device=device)
    return tensors


def fsync(path: Path) -> None:
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def writers(folder: Path, tensors: dict) -> dict[str, Callable[[], float]]:
    """Each returns the seconds of its stall, or None if it stalls until the end. rounds_of() times it until all is durable."""
    document = dict(problem={}, versions={"ddp_core": "bench"})

    def ours():
        snapshot.write(folder / "ours.safetensors", tensors, document)

    (folder / "run").mkdir(exist_ok=True)
    saver = Saver(RunDirectory(str(folder / "run"), "bench"), Record(time.monotonic()))

    def beside():
        began = time.perf_counter()
        saver.save(tensors, dict(step=0, epochs_run=0), best=False, snapshot=True)
        stall = time.perf_counter() - began
        saver.settle()
        return stall

    def dd():
        size = sum(tensor.nbytes for tensor in tensors.values())
        command = ["dd", "if=/dev/zero", f"of={folder / 'zeros'}", "bs=1M", f"count={size}", "iflag=count_bytes", "conv=fsync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    def safetensors_alone():
        save_file(tensors, folder / "alone.safetensors")
        fsync(folder / "alone.safetensors")

    def plain():
        torch.save(tensors, folder / "plain.pt")

    def durable():
        torch.save(tensors, folder / ".durable.pt")
        fsync(folder / ".durable.pt")
        os.replace(folder / ".durable.pt", folder / "durable.pt")
        fsync(folder)

    def checkpoint():
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        dcp.save(tensors, checkpoint_id=folder / "dcp")  # its writer calls fsync

    def asynchronous():
        shutil.rmtree(folder / "async", ignore_errors=True)
        began = time.perf_counter()
        future = dcp.async_save(tensors, checkpoint_id=folder / "async")
        stall = time.perf_counter() - began
        future.result()
        return stall

    return {
        "plain copy": lambda: [tensor.to("cpu", copy=True) for tensor in tensors.values()] and None,
        "dd": dd,
        "ours": ours,
        "ours, beside": beside,
        "safetensors + fsync": safetensors_alone,
        "torch.save": plain,
        "torch.save + fsync + rename": durable,
        "dcp.save": checkpoint,
        "dcp.async_save": asynchronous,
    }


def readers(folder: Path, tensors: dict) -> dict[str, Callable[[], object]]:
    return {
        "ours, checksums compared": lambda: snapshot.read(folder / "ours.safetensors"),
        "torch.load(weights_only=True)": lambda: torch.load(folder / "durable.pt", weights_only=True),
        "dcp.load into tensors": lambda: dcp.load(tensors, checkpoint_id=folder / "dcp"),
    }


def parts(folder: Path, tensors: dict) -> dict[str, Callable[[], object]]:
    """The parts of our write, one at a time."""
    path, pool = folder / "parts.safetensors", ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    return {
        "crc32 of all tensors": lambda: [zlib.crc32(tensor.cpu().numpy()) for tensor in tensors.values()],
        "crc32, a thread a core": lambda: list(pool.map(lambda tensor: zlib.crc32(tensor.cpu().numpy()), tensors.values())),
        "save_file": lambda: save_file(tensors, path),
        "fsync": lambda: fsync(path),
    }


def steps_beside(folder: Path, tensors: dict, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a step, a product of 256 x 256 matrices, by round: alone, and while a snapshot is written beside it."""
    saver = Saver(RunDirectory(str(folder / "beside"), "bench"), Record(time.monotonic()))
    matrix, found = torch.rand(256, 256), {"alone": [], "beside a save": []}

    def steps(enough: Callable[[], bool]) -> float:
        began, count = time.perf_counter(), 0
        while not enough():
            torch.mm(matrix, matrix)
            count += 1
        return 1e6 * (time.perf_counter() - began) / max(1, count)

    for _ in range(rounds + 1):
        end = time.perf_counter() + 1
        found["alone"].append(steps(lambda end=end: time.perf_counter() > end))
        saver.save(tensors, dict(step=0, epochs_run=0), best=False, snapshot=True)
        found["beside a save"].append(steps(saver.pending.done))
        saver.settle()
    return {name: values[1:] for name, values in found.items()}


def rounds_of(acts: dict[str, Callable], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds to the end of each act, and of its stall, by round; the first round is dropped."""
    done: dict[str, list[float]] = {name: [] for name in acts}
    stalls: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds + 1):
        for name, act in acts.items():
            if name != "fsync":
                os.sync()  # else this act also writes the data that the previous one left in memory
            began = time.perf_counter()
            stall = act()
            done[name].append(time.perf_counter() - began)
            stalls[name].append(stall if isinstance(stall, float) else done[name][-1])
    return {name: values[1:] for name, values in done.items()}, {name: values[1:] for name, values in stalls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder for it; what is written there is removed")
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="counted ones; one more comes first (default: 3)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the output there, and raw figures to FILE.json")
    args = parsed(parser)
    warnings.filterwarnings("ignore")  # torch.distributed.checkpoint warns of a world of one
    folder = args.dir / f"bench-snapshot-{os.getpid()}"
    folder.mkdir(parents=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save needs a group
    try:
        tensors = tensors_of(args.parameters, args.device)
        size = sum(tensor.nbytes for tensor in tensors.values())
        report = Report(args.out, f"Snapshots of {size / 1e9:.2f} GB: seconds as median (min..max)")
        for title, acts in (("write", writers), ("read", readers), ("part of our write", parts)):
            done, stalls = rounds_of(acts(folder, tensors), args.rounds)
            report.raw[title] = dict(done=done, stalls=stalls)
            if title == "write":
                report.table(title, "durable", "dd / it", "stall", "stall / plain copy")
                for name, values in done.items():
                    row = (spread(values, 2), ratio(done["dd"], values), spread(stalls[name], 2))
                    report.row(name, *row, ratio(stalls[name], done["plain copy"]))
                continue
            first = next(iter(done))
            report.table(title, "seconds", f"it / {first}")
            for name, values in done.items():
                report.row(name, spread(values, 2), ratio(values, done[first]))
        beside = steps_beside(folder, tensors, args.rounds)
        report.raw["step"] = beside
        report.table("a step of one thread", "microseconds", "it / alone")
        for name, values in beside.items():
            report.row(name, spread(values), ratio(values, beside["alone"]))
        report.close()
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

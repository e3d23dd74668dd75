"""aurora: what PyTorch sees of this node's GPUs, and which cores this process may use.

    .venv/bin/python device-info.py                               on a compute node, with the frameworks module loaded
    mpiexec -n 12 --ppn 12 .venv/bin/python device-info.py        the same of each rank, as mpiexec binds it

Exit code 0, or 3 where PyTorch sees no Intel GPU, as on a login node: the report then says what is missing.
"""

import os
import socket
import sys
from pathlib import Path

import torch

VARIABLES = ("ZE_FLAT_DEVICE_HIERARCHY", "ZE_AFFINITY_MASK", "ZEX_NUMBER_OF_CCS", "ONEAPI_DEVICE_SELECTOR", "OMP_NUM_THREADS")


def ranges(cores: set[int]) -> str:
    """{1, 2, 3, 8} as "1-3,8"."""
    text, cores = [], sorted(cores)
    while cores:
        run = [core for place, core in enumerate(cores) if core == cores[0] + place]
        text.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        cores = cores[len(run) :]
    return ",".join(text)


def kind(gib: float) -> str:
    """A tile has 64 GiB of memory, a whole GPU of two tiles 128: https://docs.alcf.anl.gov/aurora/."""
    return "a whole GPU of two tiles" if gib > 96 else "one tile"


def device_line(index: int) -> str:
    properties = torch.xpu.get_device_properties(index)
    gib = properties.total_memory / 2**30
    facts = dict(memory_gib=f"{gib:.1f}", units=getattr(properties, "max_compute_units", "?"))
    facts |= dict(fp64=getattr(properties, "has_fp64", "?"), driver=getattr(properties, "driver_version", "?"))
    facts["uuid"] = getattr(properties, "uuid", "?")
    return f"xpu:{index} {properties.name}, {kind(gib)}, " + " ".join(f"{name}={value}" for name, value in facts.items())


def missing() -> str:
    """Why there is no device, as far as this machine tells."""
    if not hasattr(torch, "xpu") or not getattr(torch.version, "xpu", None):
        return "this PyTorch is not built for Intel GPUs: load the frameworks module, and run install.sh again"
    if not any(Path("/dev/dri").glob("renderD*")):
        return "this machine has no GPU, as login nodes have none: run it in a job"
    if mask := os.environ.get("ZE_AFFINITY_MASK"):
        return f"ZE_AFFINITY_MASK={mask} may name no device of this node"
    return "there is a GPU, but the driver does not show it: see ONEAPI_DEVICE_SELECTOR above"


def main() -> int:
    # One write, so that the reports of several ranks are not mixed; a rank is named where PALS tells it.
    rank = f"rank={os.environ['PALS_RANKID']} " if "PALS_RANKID" in os.environ else ""
    lines = [f"{rank}host={socket.gethostname()} python={sys.version.split()[0]} torch={torch.__version__}"]
    lines += [" ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in VARIABLES)]
    cores = os.sched_getaffinity(0)
    lines += [f"cores={ranges(cores)} ({len(cores)} hardware threads)"]
    found = torch.xpu.device_count() if hasattr(torch, "xpu") and torch.xpu.is_available() else 0
    lines += [f"devices={found} xccl={'yes' if torch.distributed.is_xccl_available() else 'no'}"]
    lines += [device_line(index) for index in range(found)]
    lines += [] if found else [f"error: PyTorch sees no xpu device: {missing()}"]
    print("\n".join(lines), flush=True)
    return 0 if found else 3


if __name__ == "__main__":
    raise SystemExit(main())

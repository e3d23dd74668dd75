"""The device that a rank trains on, and the facts that ranks compare before they train."""

import ctypes
import os
import platform
import resource
import socket
from hashlib import sha256
from pathlib import Path

import torch

import ddp_core
from ddp_core.config import TrainConfig
from ddp_core.control import groups_of
from ddp_core.errors import PreflightError, UsageError
from ddp_core.rank import Rank

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def prepare_device(config: TrainConfig, rank: Rank) -> torch.device:
    """Choose this rank's device, make it current before any process group exists, and set --precision and --deterministic.

    device_index = local_rank % visible devices: 0 where the launcher shows each rank only one device.
    Raises PreflightError if the device of --device is missing: it never takes another one.
    """
    _check_environment(config)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = accelerator.type if accelerator else "cpu"
    kind = present if config.device == "auto" else config.device
    if kind not in BACKENDS:
        raise PreflightError(f"--device auto: this program trains on {', '.join(BACKENDS)}, not on {kind}: pass --device cpu")
    if kind not in ("cpu", present):
        raise PreflightError(
            f"--device {kind}, but torch {torch.__version__} sees no {kind} device on {socket.gethostname()} ({_masks()}): "
            f"check the job's device request and the torch build, or pass --device cpu"
        )
    backend = backend_of(config, kind)
    if backend not in ("gloo", BACKENDS[kind]):
        raise UsageError(f"--backend {config.backend} does not carry tensors of --device {kind}: pass auto or gloo")
    _check_limits(config, rank, backend)
    _refuse_absent_interfaces(backend)
    if kind == "cpu":
        if config.precision == "tf32":
            raise UsageError("--precision tf32 is a mode of accelerators: pass fp32 with --device cpu")
        if config.reduction == "canonical":
            torch.set_num_threads(1)  # a kernel's order of additions depends on its threads
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // rank.local_world_size))
        _tune_memory(keep=config.sharding == "none")
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    if config.deterministic:  # accelerators only: on the CPU these models repeat bit for bit without it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    count = torch.accelerator.device_count()
    if 1 < count <= rank.local_rank and backend != "gloo":
        raise PreflightError(
            f"{rank.variables.get('local_rank', 'local_rank')}={rank.local_rank}, but torch sees {count} {kind} devices on "
            f"{socket.gethostname()} ({_masks()}): start as many ranks a node as it has devices, or pass --backend gloo"
        )
    index = rank.local_rank % count
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def _masks() -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in MASKS if name in os.environ) or "no mask is set"


def _tune_memory(keep: bool) -> None:
    """Keep freed memory in the process. By default glibc returns a step's large tensors to the system, and the next step pays
    a page fault for each page: a step of mnist took 1.5 times as long, at about the same peak. MALLOC_* variables win.

    keep=False under --sharding: its modules come and go between lasting tensors, and the heap had 200 MB of holes around 37 MB.
    """
    if not any(name.startswith("MALLOC_") for name in os.environ) and (tune := getattr(ctypes.CDLL(None), "mallopt", None)):
        tune(-3, 2**25 if keep else 2**16)  # M_MMAP_THRESHOLD (older glibc: 32 MiB at most): smaller blocks come from the heap
        tune(-1, 2**31 - 1 if keep else 2**17)  # M_TRIM_THRESHOLD: the heap is not trimmed


def backend_of(config: TrainConfig, kind: str) -> str:
    return BACKENDS[kind] if config.backend == "auto" else config.backend


def describe(config: TrainConfig, rank: Rank, device: torch.device) -> dict:
    """One row of the `start` record: this rank's host, device, backend, cores and threads."""
    row = dict(rank=rank.rank, local_rank=rank.local_rank, node_rank=rank.node_rank, host=socket.gethostname())
    row |= dict(device=str(device), device_index=device.index, backend=backend_of(config, device.type))
    if device.type != "cpu":
        row["device_name"] = torch.get_device_module(device).get_device_name(device)
    if device.type == "cuda":
        row["device_uuid"] = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return row | dict(cores=len(os.sched_getaffinity(0)), threads=torch.get_num_threads())


def versions() -> dict[str, str]:
    return dict(ddp_core=ddp_core.__version__, torch=torch.__version__)


def program(device: torch.device) -> dict[str, str]:
    """Versions that must be equal on all ranks: where they differ, results would differ unnoticed."""
    same = dict(python=platform.python_version())
    return same | (dict(cpu_capability=torch.backends.cpu.get_cpu_capability()) if device.type == "cpu" else {})


def source_digest() -> str:
    """sha256 over the names and bytes of the core's own files: it also differs between copies of one version number."""
    folder = Path(__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    lines = sorted(f"{path.relative_to(folder).as_posix()} {sha256(path.read_bytes()).hexdigest()}\n" for path in files)
    return sha256("".join(lines).encode()).hexdigest()


def refuse_shared_devices(rows: list[dict]) -> None:
    """Raise PreflightError where two ranks share a device under nccl or xccl: the job script binds devices wrongly."""
    owner: dict[tuple, int] = {}
    for row in rows:
        if row["backend"] == "gloo" or not row.get("device_uuid"):
            continue
        if (first := owner.setdefault((row["host"], row["device_uuid"]), row["rank"])) != row["rank"]:
            raise PreflightError(
                f"ranks {first} and {row['rank']} share one device on {row['host']} ({row['device']}): give each its own "
                f"in the job script, or pass --backend gloo"
            )


def descriptors(rank: Rank, backend: str = "gloo") -> int:
    """Open files that a rank may need. 28 of its own were counted. Each connection adds one: in the control plane up to 31 per
    level of its tree; under gloo one to each other rank for gradients (nccl's were not counted); on rank 0, world_size for
    the store.
    """
    of_control = sum(len(members) - 1 for members in groups_of(rank.rank, rank.world_size))
    return 64 + of_control + ((backend == "gloo") + (rank.rank == 0)) * rank.world_size


def raise_limits(rank: Rank) -> None:
    """Raise this process's limit of open files before the ranks meet, as far as the hard limit allows.

    Each tensor that a worker process passes on is an open file, and so is each copy of a data file in memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(descriptors(rank), 2**16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _check_limits(config: TrainConfig, rank: Rank, backend: str) -> None:
    """Raise PreflightError if a limit of the system would end this run later."""
    # 9 threads were counted in a rank with one compute thread. Twice the workers: the held-out rows have their own.
    processes, node = rank.local_world_size * (9 + 2 * config.workers), f"the {rank.local_world_size} ranks of a node"
    for name, which, needed, what in (
        ("ulimit -n", resource.RLIMIT_NOFILE, descriptors(rank, backend), f"open files in a run of {rank.world_size} ranks"),
        ("ulimit -u", resource.RLIMIT_NPROC, processes, f"threads and processes of {node}"),
    ):
        limit = resource.getrlimit(which)[0]
        if limit != resource.RLIM_INFINITY and limit < needed:
            raise PreflightError(
                f"{name} is {limit} on {socket.gethostname()}, and {needed} are needed for {what}: raise it in the job script, "
                f"or ask the machine's operators"
            )


def _check_environment(config: TrainConfig) -> None:
    """Raise PreflightError if an environment variable would override --precision."""
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        if os.environ.get(name, "0") != "0" and config.precision in ("fp32", "fp64"):
            raise PreflightError(f"{name}={os.environ[name]} turns TF32 on under --precision {config.precision}: unset it")


def _refuse_absent_interfaces(backend: str) -> None:
    """Raise PreflightError if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME leaves no interface of this node."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in interfaces:
            raise PreflightError(f"GLOO_SOCKET_IFNAME={name}, but {socket.gethostname()} has {_states(interfaces)}")
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if backend == "nccl" and wanted and not matching(wanted, interfaces):
        raise PreflightError(f"NCCL_SOCKET_IFNAME={wanted} fits no interface: {socket.gethostname()} has {_states(interfaces)}")


def matching(wanted: str, interfaces: list[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME selects. It lists prefixes; "=" before the list: whole names; "^": exclusions.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    names, whole = wanted.lstrip("^=").split(","), wanted.lstrip("^").startswith("=")
    named = [one for one in interfaces if any(one == name if whole else one.startswith(name) for name in names)]
    return [one for one in interfaces if one not in named] if wanted.startswith("^") else named


def _states(names: list[str]) -> str:
    """Each interface with its state (up, down); Linux reports lo as unknown."""
    states = {name: Path(f"/sys/class/net/{name}/operstate") for name in names}
    return ", ".join(f"{name} ({file.read_text().strip() if file.exists() else 'unknown'})" for name, file in states.items())


def notes_on_cores(rows: list[dict]) -> list[str]:
    """A note if a rank has more threads than cores: the threads then wait for each other."""
    crowded = [row for row in rows if row["threads"] > row["cores"]]
    return [
        f"rank {row['rank']} has {row['threads']} threads on {row['cores']} cores, as {len(crowded)} of {len(rows)} ranks: set "
        f"OMP_NUM_THREADS, or ask for more cores a rank"
        for row in crowded[:1]
    ]

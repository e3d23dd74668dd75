"""How much host memory this process may still take."""

import resource
from contextlib import suppress
from pathlib import Path

MEMBER, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Files of cgroups 2 and 1: the limit, the memory in use, and the part of it that the kernel frees on demand (file cache).
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available() -> int:
    """Bytes that this process may take and keep: the least that the machine, the job's cgroups and ulimit -v leave, minus
    the peak need of a training step.
    """
    peak = _numbers(Path("/proc/self/status"))
    # Within a step more memory is in use than now, between two steps: up to the peak so far (VmHWM).
    step = peak["VmHWM"] - peak["VmRSS"]
    left = [_numbers(Path("/proc/meminfo"))["MemAvailable"] - step]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        left.append(limit - peak["VmPeak"])
    return max(0, min([*left, *(room - step for room in _of_groups())]))


def _of_groups() -> list[int]:
    """Bytes left in each memory cgroup of this process, from its own up to the root."""
    rooms = []
    with suppress(OSError):
        for line in MEMBER.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = GROUPS / "memory" if controllers else GROUPS
            group = top / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder in top.parents:
                    break
                for most, taken, given_up in FILES:
                    with suppress(OSError, ValueError):  # no limit is set, or a container does not see the file
                        room = int((folder / most).read_text()) - int((folder / taken).read_text())
                        rooms.append(room + _numbers(folder / "memory.stat").get(given_up, 0))
    return rooms


def _numbers(path: Path) -> dict[str, int]:
    """Read lines such as `VmRSS:  1234 kB` or `inactive_file 5678`. Returns bytes by name."""
    numbers = {}
    for line in path.read_text().splitlines():
        name, *rest = line.replace(":", " ").split()
        if rest and rest[0].isdigit():
            numbers[name] = int(rest[0]) * (1024 if rest[1:] == ["kB"] else 1)
    return numbers

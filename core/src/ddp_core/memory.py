"""How much memory of the host is left to this process."""

import resource
from contextlib import suppress
from pathlib import Path

MEMBER, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of cgroups 2 and 1: what may be taken, what is, and what of that the kernel gives up when it is asked for.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available() -> int:
    """Bytes that this process may take and keep: the least of what the machine, the job's cgroups and ulimit -v leave, without
    what a training step needs at its peak.
    """
    peak = _numbers(Path("/proc/self/status"))
    # Between two steps less is in use than within one.
    step = peak["VmHWM"] - peak["VmRSS"]
    left = [_numbers(Path("/proc/meminfo"))["MemAvailable"] - step]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        left.append(limit - peak["VmPeak"])
    return max(0, min([*left, *(room - step for room in _of_groups())]))


def _of_groups() -> list[int]:
    """What is left in each cgroup that this process is in, up to the first."""
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
                    with suppress(OSError, ValueError):  # there is no limit, or a container does not see it
                        room = int((folder / most).read_text()) - int((folder / taken).read_text())
                        rooms.append(room + _numbers(folder / "memory.stat").get(given_up, 0))
    return rooms


def _numbers(path: Path) -> dict[str, int]:
    """Of lines such as `VmRSS:  1234 kB` or `inactive_file 5678`, in bytes."""
    numbers = {}
    for line in path.read_text().splitlines():
        name, *rest = line.replace(":", " ").split()
        if rest and rest[0].isdigit():
            numbers[name] = int(rest[0]) * (1024 if rest[1:] == ["kB"] else 1)
    return numbers

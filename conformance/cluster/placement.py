"""On which cores, and with which device, a site's own job script starts each rank: seen by a probe that needs no torch.

    python -m pytest conformance/test_cluster.py --cluster --site NAME -k near

The probe takes the place of train.py; the job script is submitted as it stands, after the site's install.sh.
"""

import json
import re
from dataclasses import dataclass

from conformance.cluster.shape import numbers
from conformance.sites import Site

# A file a rank: srun cuts long lines, and those of many ranks mix.
PROBE = r"""
import json, os, socket
NUMBERS = dict(rank="PROCID", local_rank="LOCALID", node_rank="NODEID")
visible = os.environ.get("VARIABLE", "")
facts = {name: int(os.environ["SLURM_" + number]) for name, number in NUMBERS.items()}
facts |= dict(host=socket.gethostname(), cpus=sorted(os.sched_getaffinity(0)))
facts |= dict(visible=[int(device) for device in visible.split(",") if device])
with open(f"FOLDER/{facts['rank']}.json", "w") as file:
    json.dump(facts, file)
"""


@dataclass(frozen=True)
class Row:
    """A rank. visible: the devices that the launcher has told it of, none where it tells nothing."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    cpus: list[int]
    visible: list[int]


def probe(site: Site, folder: str) -> str:
    """A train.py that leaves a file in the folder, for each rank."""
    variable = site.facts["node"].get("device_environment", "")
    return PROBE.replace("VARIABLE", variable).replace("FOLDER", folder)


def unbound(script: str) -> str:
    """The job script without its srun's flags: ranks are where they come to be."""
    return re.sub(r"^srun_flags=\(\n.*?^\)$", "srun_flags=(--cpu-bind=none)", script, flags=re.MULTILINE | re.DOTALL)


def rows_of(texts: list[str]) -> list[Row]:
    return sorted((Row(**json.loads(text)) for text in texts), key=lambda row: row.rank)


def device_of(site: Site, row: Row) -> int:
    """Which of the node's devices a rank trains on: the one with its local rank, of those that it sees, or the only one."""
    if not row.visible:
        return row.local_rank
    return row.visible[0 if site.facts["node"]["devices_visible_to_a_rank"] == 1 else row.local_rank % len(row.visible)]


def misplaced(site: Site, rows: list[Row]) -> list[str]:
    """What is not as site.toml says, a line each."""
    node, job = site.facts["node"], site.facts["job"]
    found = []
    size = job["nodes"] * job["ranks_per_node"]
    if [row.rank for row in rows] != list(range(size)):
        return [f"ranks={[row.rank for row in rows]}, but should be 0 to {size - 1}"]
    near = node.get("cores_near_device")
    reserved = {*numbers(node.get("reserved", ""))}
    taken: dict[tuple, int] = {}
    for row in rows:
        cores, device = {cpu % node["cores"] for cpu in row.cpus}, device_of(site, row)
        told = f"rank {row.rank}, {row.host}, local rank {row.local_rank}"
        per_node = job["ranks_per_node"]
        if (row.node_rank, row.local_rank) != (row.rank // per_node, row.rank % per_node):
            found.append(f"{told}: node_rank={row.node_rank}, but should be {row.rank // per_node}: ranks lie in blocks")
        if row.visible and len(row.visible) != node["devices_visible_to_a_rank"]:
            found.append(f"{told}: devices={row.visible}, but should be {node['devices_visible_to_a_rank']} of them")
        if near and not cores <= (allowed := {*numbers(near[device])} - reserved):
            found.append(f"{told}: cores={ranges(cores)}, but should be near device {device}, in {ranges(allowed)}")
        for what in [("device", device), *(("core", core) for core in sorted(cores))]:
            other = taken.setdefault((row.host, *what), row.rank)
            if other != row.rank:
                found.append(f"{told}: {what[0]}={what[1]}, but rank {other} has it")
                break
    return found


def ranges(cores: set[int]) -> str:
    """0-2,5 for 0, 1, 2 and 5."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)

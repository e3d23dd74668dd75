"""On which cores, and with which device, a site's own job script starts each rank: seen by a probe that needs no torch.

    python -m pytest conformance/test_cluster.py --cluster --site NAME -k near

The job that starts the probe has the script's directives and srun flags, word for word. What srun starts is the probe, in what
the script starts train.py in, unless that is a container: this changes neither cores nor devices.
"""

import json
import re
from dataclasses import dataclass

from conformance.cluster.shape import numbers
from conformance.sites import Site

# A file a rank: srun cuts long lines, and those of many ranks mix.
PROBE = r"""
import json, os, socket, sys
NUMBERS = dict(rank="PROCID", local_rank="LOCALID", node_rank="NODEID")
visible = os.environ.get(sys.argv[2], "") if sys.argv[2] else ""
facts = {name: int(os.environ["SLURM_" + number]) for name, number in NUMBERS.items()}
facts |= dict(host=socket.gethostname(), cpus=sorted(os.sched_getaffinity(0)))
facts |= dict(visible=[int(device) for device in visible.split(",") if device])
with open(f"{sys.argv[1]}/{facts['rank']}.json", "w") as file:
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


def srun_of(script: str) -> tuple[str, str]:
    """The array of srun's flags, with the lines that set what it is made of; and what srun starts train.py in."""
    array = re.search(r"^srun_flags=\(\n.*?^\)$", script, re.MULTILINE | re.DOTALL)
    if not array:
        raise ValueError("no array srun_flags in the job script: its flags cannot be taken over")
    begin = array.start()
    for name in re.findall(r"\$\{?([a-z]\w*)", array[0]):
        if made := re.search(rf"^{name}=", script[:begin], re.MULTILINE):
            begin = min(begin, made.start())
    started = re.search(r'^srun "\$\{srun_flags\[@\]\}"(.*?)\s"\$\{?python\S*"', script.replace("\\\n", " "), re.MULTILINE)
    within = started[1].strip() if started else ""
    return script[begin : array.end()], "" if '"$image"' in within else within


def job_of(script: str, folder: str, variable: str, flags: str = "") -> str:
    """A job that writes a file a rank into the folder. variable: which says what devices there are. flags: more of srun."""
    directives = re.findall(r"^#SBATCH .*$", script, re.MULTILINE)
    made, within = srun_of(script)
    return "\n".join(
        [
            "#!/bin/bash -l",
            *directives,
            "set -euo pipefail",
            # As every job script has it: without, ranks of a job that was submitted with --export=NONE have no PATH.
            "export SLURM_EXPORT_ENV=ALL",
            made,
            f"srun \"${{srun_flags[@]}}\" {flags} {within} /usr/bin/python3 {folder}/probe.py {folder} '{variable}'",
            "",
        ]
    )


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

"""On which cores, and with which device, a site's own job script starts each rank. A probe replaces train.py and reports it.

    python -m pytest conformance/checks/test_jobs.py --cluster -k near

The job script is submitted unchanged, after the site's install.sh. In some ranks the probe looks after `import torch`, which
might move them. Without torch the probe is quick; tests of broken scripts need no more.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.cluster.layer import HOME, brings_a_plugin
from conformance.cluster.shape import numbers
from conformance.harness.sites import Launch, Site

# One file a rank: a launcher cuts long lines, and mixes those of many ranks.
PROBE = r"""
import json, os, socket
facts = {name: int(os.environ[variable]) for name, variable in TOLD.items()}
IMPORT
NETWORK
facts |= dict(host=socket.gethostname(), cpus=sorted(os.sched_getaffinity(0)))
facts |= dict(visible=[int(device) for device in os.environ.get("DEVICES", "").split(",") if device])
with open(f"FOLDER/{facts['rank']}.json", "w") as file:
    json.dump(facts, file)
"""
# The import takes two seconds of a core, so only every fourth rank does it.
IMPORT = "if facts['rank'] % 4 == 0: import torch"
NETWORK = f"import sys; sys.path.insert(0, '{HOME}/rccl'); import rccl; facts |= dict(plugin=rccl.opens(os.environ))"


@dataclass(frozen=True)
class Row:
    """A rank. visible: devices named in its environment; empty: none named. plugin: the network plugin that RCCL opens."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    cpus: list[int]
    visible: list[int]
    plugin: str = ""


def probe(site: Site, folder: str, torch: bool = True) -> str:
    """A train.py that writes a file into the folder for each rank. Variables of site.toml's launcher give the rank's place."""
    text = PROBE.replace("TOLD", repr(told_by(site.launches[0]))).replace("IMPORT", IMPORT if torch else "")
    text = text.replace("NETWORK", NETWORK if brings_a_plugin(site) else "")
    return text.replace("DEVICES", device_variable(site)).replace("FOLDER", folder)


def told_by(launch: Launch) -> dict[str, str]:
    """The variables in which a launcher gives a rank its place."""
    words = ("rank", "local_rank", "node_rank")
    return {word: variables[0] for word in words if (variables := launch.variables_with(word))}


def device_variable(site: Site) -> str:
    """The variable in which a launcher names a rank's devices."""
    return site.toml["node"].get("device_environment", "CUDA_VISIBLE_DEVICES")


def unbound(script: str, launcher: str) -> str:
    """The job script with a launcher that binds no rank to cores. Of a flag given twice, the last counts."""
    flags = rf"^( *){launcher}_flags=\(\n(.*?\n)\1\)$"
    text, count = re.subn(flags, rf"\1{launcher}_flags=(\n\2\1    --cpu-bind=none\n\1)", script, flags=re.MULTILINE | re.DOTALL)
    if not count:
        raise ValueError(f"no array {launcher}_flags in the job script: its ranks cannot be unbound")
    return text


def rows_of(texts: Iterable[str]) -> list[Row]:
    """Rows in the order of their ranks. Where ranks ask MPI, node_rank and local_rank are counted from the hosts."""
    rows: list[Row] = []
    for fields in sorted(map(json.loads, texts), key=lambda fields: fields["rank"]):
        hosts = list(dict.fromkeys([*(row.host for row in rows), fields["host"]]))
        before = sum(row.host == fields["host"] for row in rows)
        rows.append(Row(**dict(local_rank=before, node_rank=hosts.index(fields["host"])) | fields))
    return rows


def device_of(site: Site, row: Row) -> int:
    """The index on its node of the device that a rank trains on: its only device, or the one with its local rank."""
    if not row.visible:
        return row.local_rank
    return row.visible[0 if site.toml["node"]["devices_visible_to_a_rank"] == 1 else row.local_rank % len(row.visible)]


def misplaced(site: Site, rows: list[Row]) -> list[str]:
    """Differences from site.toml, a line each."""
    node, job = site.toml["node"], site.toml["job"]
    violations = []
    size = job["nodes"] * job["ranks_per_node"]
    if [row.rank for row in rows] != list(range(size)):
        return [f"ranks={[row.rank for row in rows]}, but should be 0 to {size - 1}"]
    near = node.get("cores_near_device")
    reserved = {*numbers(node.get("reserved", ""))}
    for row in rows:
        cores, device = {cpu % node["cores"] for cpu in row.cpus}, device_of(site, row)
        who = f"rank {row.rank}, {row.host}, local rank {row.local_rank}"
        per_node = job["ranks_per_node"]
        if (row.node_rank, row.local_rank) != (row.rank // per_node, row.rank % per_node):
            violations.append(f"{who}: node_rank={row.node_rank}, but should be {row.rank // per_node}: ranks lie in blocks")
        if row.visible and len(row.visible) != node["devices_visible_to_a_rank"]:
            violations.append(f"{who}: devices={row.visible}, but should be {node['devices_visible_to_a_rank']} of them")
        # A rank's share may be more than the near ones.
        if near and not (cores <= (allowed := {*numbers(near[device])} - reserved) or allowed <= cores - reserved == cores):
            violations.append(f"{who}: cores={ranges(cores)}, but should be near device {device}, in {ranges(allowed)}")
    return violations


def unplugged(rows: list[Row]) -> list[str]:
    """Ranks in which RCCL finds no network plugin: it would use TCP, or end the job."""
    return [f"rank {row.rank}, {row.host}: RCCL opens no network plugin, but should open one" for row in rows if not row.plugin]


def doubled(site: Site, rows: list[Row], what: str) -> list[str]:
    """Devices, or cores, that two ranks on a node share."""
    taken: dict[tuple, int] = {}
    violations = []
    for row in rows:
        mine = [device_of(site, row)] if what == "device" else sorted({cpu % site.toml["node"]["cores"] for cpu in row.cpus})
        others = [(number, taken.setdefault((row.host, number), row.rank)) for number in mine]
        number, other = next(((number, other) for number, other in others if other != row.rank), (0, row.rank))
        if other != row.rank:
            violations.append(f"rank {row.rank}, {row.host}: {what}={number}, but rank {other} has it")
    return violations


def ranges(cores: set[int]) -> str:
    """0-2,5 for 0, 1, 2 and 5."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)

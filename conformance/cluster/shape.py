"""A virtual cluster in numbers and text, from site.toml alone: its nodes' names, Slurm's files, /etc/hosts.

print(slurm_conf(site, names_of(site, 2), {}))      of a conformance.harness.sites.Site
"""

import math

from conformance.harness.sites import Site

LOGIN = "login1"
OLDEST = (22, 5)  # the oldest Slurm that is supported
# Root's own partition, whose jobs preempt all others: sbatch --partition=urgent --exclusive --nodelist=NODES --wrap=true
URGENT = "urgent"
SUBNET = "10.253"  # .K.1: interface K of the login node; .K.11 and up: the nodes'
# Slurm's flag for a device, by the variable in which the machine names devices to ranks.
DEVICE_FLAGS = {
    "CUDA_VISIBLE_DEVICES": "nvidia_gpu_env",
    "ROCR_VISIBLE_DEVICES": "amd_gpu_env",
    "ZE_AFFINITY_MASK": "intel_gpu_env",
}


def names_of(site: Site, nodes: int) -> list[str]:
    template = site.toml["node"].get("hosts", "node{:03d}")
    return [template.format(number) for number in range(1, nodes + 1)]


def impossible(site: Site) -> list[str]:
    """Values that no node or queue can have, a line each. site.toml may be half filled in."""
    node = dict(sockets=1, threads_per_core=1, reserved="", cores_near_device=[]) | site.toml.get("node", {})
    queue = dict(partitions=[], exclusive=[]) | site.toml.get("queue", {})
    least = dict(cores=1, sockets=1, threads_per_core=1, memory_gib=1, devices=0)
    wrong = {key: node.get(key) for key in least if type(node.get(key)) is not int or node[key] < least[key]}
    violations = [f"{key}={value!r}, but should be {least[key]} or more" for key, value in wrong.items()]
    if not wrong and node["cores"] % node["sockets"]:
        violations.append(f"cores={node['cores']}, but should be a multiple of sockets={node['sockets']}")
    cores: dict[str, list[int]] = {}
    for key, ranges in dict(reserved=[node["reserved"]], cores_near_device=node["cores_near_device"]).items():
        try:
            cores[key] = [number for each in ranges for number in numbers(each)]
        except ValueError:
            violations.append(f"{key}={node[key]!r}, but cores should be told as in 0-3,8")
        else:
            if not wrong and max(cores[key], default=0) >= node["cores"]:
                violations.append(f"{key}={node[key]!r}, but should have cores of 0 to {node['cores'] - 1}")
    if cores.get("reserved") and len(cores["reserved"]) != node.get("reserved_cores", 0):
        violations.append(
            f"reserved={node['reserved']!r}, but should be reserved_cores={node.get('reserved_cores', 0)} of them"
        )
    if node["cores_near_device"] and len(node["cores_near_device"]) != node.get("devices"):
        violations.append(
            f"cores_near_device has {len(node['cores_near_device'])} entries, but should have {node.get('devices')}"
        )
    try:
        names = {*names_of(site, 2)}
    except (LookupError, ValueError):
        names = set()
    if len(names) < 2:
        violations.append(f"hosts={node.get('hosts')!r}, but should have one {{}}, for the number of the node")
    strange = [name for name in queue["exclusive"] if name not in queue["partitions"]]
    return [f"[node] {line}" for line in violations] + [f"[queue] exclusive={name}, which is no partition" for name in strange]


def interfaces_of(site: Site) -> list[str]:
    return site.toml["node"].get("interfaces") or ["eth0"]


def numbers(ranges: str) -> list[int]:
    """[0, 8, 9, 10] for "0,8-10"."""
    listed: list[int] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        listed += range(int(first), int(last or first) + 1)
    return listed


def shape(site: Site, version: tuple[int, int] = OLDEST) -> tuple[int, int, int]:
    """Sockets, cores a socket, threads a core, as this version of Slurm counts them."""
    node = site.toml["node"]
    cores = node["cores"] // node.get("sockets", 1)
    if version >= (24, 11):
        # From this version on, only whole sockets can be near a device, so a smaller part of one must be called a socket.
        # https://slurm.schedmd.com/slurm.conf.html#OPT_l3cache_as_socket
        cores = math.gcd(cores, *(edge for near in node.get("cores_near_device", []) for edge in edges(near)))
    return node["cores"] // cores, cores, node.get("threads_per_core", 1)


def edges(ranges: str) -> set[int]:
    """The beginning of each range, and the number after its end: {0, 4, 8, 12} for "0-3,8-11"."""
    inside = {*numbers(ranges)}
    return inside ^ {each + 1 for each in inside}


def cpus_of(site: Site) -> int:
    sockets, cores, threads = shape(site)
    return sockets * cores * threads


def devices_of(site: Site) -> int:
    """Devices that Slurm hands out. Where Slurm stands in for another scheduler, it hands out none."""
    return site.toml["node"]["devices"] if site.toml["scheduler"] == "slurm" else 0


def topology(site: Site, version: tuple[int, int] = OLDEST) -> str:
    """The topology for hwloc, which slurmd uses. CPUs are numbered as in Linux: first one thread of each core, then the rest.

    https://www.open-mpi.org/projects/hwloc/doc/v2.9.0/a00382.php
    """
    sockets, cores, threads = shape(site, version)
    every = sockets * cores
    order = f"(indexes={threads}*{every}:{every}*1)" if threads > 1 else ""
    return f"pack:{sockets} core:{cores} pu:{threads}{order}"


def slurm_conf(site: Site, names: list[str], settings: dict[str, str], version: tuple[int, int] = OLDEST) -> str:
    """https://slurm.schedmd.com/slurm.conf.html"""
    node, queue = site.toml["node"], site.toml.get("queue", {})
    sockets, cores, threads = shape(site, version)
    with_mpi = any(launch.mpi for launch in site.launches)
    options = dict(
        ClusterName=site.name,
        SlurmctldHost=LOGIN,
        SlurmUser="root",
        AuthType="auth/munge",
        StateSaveLocation="/run/cluster/state",
        SlurmdSpoolDir="/var/spool/slurmd",
        SlurmctldPidFile="/run/slurmctld.pid",
        SlurmdPidFile="/run/slurmd.pid",
        SlurmctldLogFile="/run/cluster/log/slurmctld.log",
        SlurmdLogFile="/run/cluster/log/slurmd-%n.log",
        MailProg="/bin/true",
        # By processes: cgroups belong to the machine, and two clusters may have nodes of the same name.
        ProctrackType="proctrack/linuxproc",
        JobAcctGatherType="jobacct_gather/none",
        TaskPlugin="task/affinity",
        # PyPI's mpich uses PMI2 to find its rank. Ranks that do not ask MPI need none.
        MpiDefault="pmi2" if with_mpi else "none",
        SelectType="select/cons_tres",
        SelectTypeParameters="CR_Core_Memory",
        # Refuse an impossible job at submission, instead of leaving it in the queue.
        EnforcePartLimits="ALL",
        # Look for work at once: the cluster has no other users.
        SchedulerParameters="sched_interval=2,bf_interval=1,sched_min_interval=0,batch_sched_delay=0",
        # Nodes have the shape that is written here, whatever slurmd finds.
        SlurmdParameters="config_overrides",
        # A node that is down returns when it registers again.
        ReturnToService="1",
        # A dead node is noticed after 15 s, not 300.
        SlurmdTimeout="15",
        # Slurm answers questions about an ended job for an hour.
        MinJobAge="3600",
        PropagateResourceLimits="NONE",
    )
    if site.toml["scheduler"] == "pbs":
        # The PBS stand-in ends a job at its walltime to the second, which Slurm cannot. KILL comes 10 s after TERM.
        options |= dict(OverTimeLimit="1", KillWait="10")
    devices = devices_of(site)
    options |= dict(GresTypes="gpu") if devices else {}
    if site.toml["scheduler"] == "slurm":
        # A preempted job's ranks get SIGTERM, or their --signal under SlurmctldParameters=preempt_send_user_signal, at the
        # start of the grace time. At its end the job is requeued. https://slurm.schedmd.com/preempt.html
        options |= dict(PreemptType="preempt/partition_prio", PreemptMode="REQUEUE", PartitionName="DEFAULT GraceTime=30")
    options |= settings
    # Two jobs on one node each get the memory of their cores.
    options["DefMemPerCPU"] = node["memory_gib"] * 1024 // (sockets * cores * threads)
    node_fields = dict(Sockets=sockets, CoresPerSocket=cores, ThreadsPerCore=threads, RealMemory=node["memory_gib"] * 1024)
    node_fields |= dict(Gres=f"gpu:{devices}") if devices else {}
    # Slurm numbers a core's threads one after the other, unlike the kernel.
    reserved = [core * threads + thread for core in numbers(node.get("reserved", "")) for thread in range(threads)]
    node_fields |= dict(CpuSpecList=",".join(map(str, reserved))) if reserved else {}
    node_fields |= dict(Feature=",".join(queue["constraints"])) if queue.get("constraints") else {}
    lines = [f"{name}={value}" for name, value in options.items()]
    lines += [f"NodeName={','.join(names)} " + " ".join(f"{name}={value}" for name, value in node_fields.items())]
    default = node.get("partition", "batch")
    for partition in dict.fromkeys([*queue.get("partitions", []), default]):
        whole = partition in queue.get("exclusive", [partition])
        lines += [
            f"PartitionName={partition} Nodes=ALL Default={'YES' if partition == default else 'NO'} "
            f"OverSubscribe={'EXCLUSIVE' if whole else 'NO'} State=UP"
        ]
    if site.toml["scheduler"] == "slurm":
        # Hidden from users, who see the partitions of site.toml.
        lines += [f"PartitionName={URGENT} Nodes=ALL PriorityTier=2 PreemptMode=OFF RootOnly=YES Hidden=YES State=UP"]
    return "\n".join(lines) + "\n"


def gres_conf(site: Site) -> str:
    """https://slurm.schedmd.com/gres.conf.html"""
    node = site.toml["node"]
    near = node.get("cores_near_device", [])
    flags = DEVICE_FLAGS.get(node.get("device_environment", "CUDA_VISIBLE_DEVICES"))
    return "".join(
        f"Name=gpu File=/dev/gpu{device}"
        + (f" Flags={flags}" if flags else "")
        + (f" Cores={near[device]}" if near else "")
        + "\n"
        for device in range(devices_of(site))
    )


def hosts_file(site: Site, names: list[str], aliases: list[str]) -> str:
    """The node's name is its first interface's address. For other interfaces, the name ends with the interface's."""
    domain, suffix = site.toml["node"].get("domain"), site.toml["node"].get("suffix")
    lines = ["127.0.0.1 localhost"]
    for number, name in [(1, LOGIN), *enumerate(names, 11)]:
        more = [f"{name}.{domain}"] if domain else []
        more += [f"{name}{suffix}", *([f"{name}{suffix}.{domain}"] if domain else [])] if suffix else []
        more += [alias.format(name=name) for alias in aliases]
        for k, interface in enumerate(interfaces_of(site)):
            aliases_here = [name, *more, f"{name}-{interface}"] if k == 0 else [f"{name}-{interface}"]
            lines.append(f"{SUBNET}.{k}.{number} {' '.join(aliases_here)}")
    return "\n".join(lines) + "\n"

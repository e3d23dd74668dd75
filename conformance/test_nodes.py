"""The nodes of a site's virtual cluster: that they are what site.toml says, each its own, and what a job finds there.

    python -m pytest conformance/test_nodes.py --cluster [--site NAME_OR_FOLDER]

As root, with Slurm; `nox -s cluster` runs it. test_virtual.py has what needs neither.
"""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.cluster import layer
from conformance.cluster.shape import LOGIN, cpus_of, interfaces_of
from conformance.cluster.virtual import UID, USER, VirtualSite

only = pytest.mark.only


def test_names_and_addresses(cluster, site):
    """hostname -i gives the address that the other nodes look up, on the first interface; no route leads out."""
    for number, name in enumerate(cluster.names, 11):
        said = cluster.on(name, "hostname; hostname -i; getent hosts $(hostname)").stdout.split()
        address = f"10.253.0.{number}"
        assert said[:3] == [name, address, address], said
        for other in (LOGIN, *cluster.names):
            assert cluster.on(other, f"getent hosts {name}").stdout.split()[:2] == [address, name]
        links = cluster.on(name, "ls /sys/class/net; ip -4 -o address show").stdout
        assert {*interfaces_of(site)} <= {*links.split()}
        assert f"{address}/24" in next(line for line in links.splitlines() if f"{interfaces_of(site)[0]} " in line)
        assert cluster.on(name, "ip route show default").stdout == ""
    if domain := site.facts["node"].get("domain"):
        assert cluster.on(LOGIN, f"getent hosts {cluster.names[1]}.{domain}").stdout.split()[0] == "10.253.0.12"
    # Where the name leads, somebody answers, over every interface.
    listen = "import socket; s = socket.create_server(('', 7777)); s.accept()"
    for interface in interfaces_of(site):
        with ThreadPoolExecutor() as pool:
            server = pool.submit(cluster.on, cluster.names[1], ["timeout", "10", "python3", "-c", listen])
            reach = (
                f"for i in {{1..50}}; do echo > /dev/tcp/{cluster.names[1]}-{interface}/7777 && exit; sleep 0.1; done; exit 1"
            )
            assert cluster.on(cluster.names[0], reach).returncode == 0
            assert server.result().returncode == 0


def test_it_runs_what_it_was_booted_from(cluster):
    """This machine's Slurm, or the one of --tree: the commands, and what has registered the nodes."""
    said = subprocess.run(["chroot", cluster.tree, "slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    for name in (LOGIN, *cluster.names):
        assert cluster.on(name, "srun --version").stdout == said
    for name in cluster.names:
        assert f" Version={said.split()[-1]}\n" in cluster.on(LOGIN, f"scontrol show node {name}").stdout


def test_the_user(cluster):
    """An ordinary one, with a home that all nodes have."""
    for name in ("login", *cluster.names):
        assert cluster.on(name, "id -u; id -un; pwd; echo $HOME").stdout.split() == [str(UID), USER, *2 * [f"/home/{USER}"]]
        assert "Permission denied" in cluster.on(name, "cat /etc/shadow /run/munge/key").stderr
    cluster.on("login", "echo shared > ~/file")
    assert cluster.on(cluster.names[1], "cat ~/file").stdout == "shared\n"
    assert cluster.on("login", ["su", "-", USER, "-c", "pwd"], user=False).stdout == f"/home/{USER}\n"


def test_what_belongs_to_one_node(cluster):
    """/tmp, the processes, the boot's id (by which UCX and NCCL tell hosts apart), and what is written beside the home."""
    first, second = cluster.names[:2]
    name = f"cluster-test-{os.getpid()}"
    cluster.on(first, f"touch /tmp/{name} /dev/shm/{name}")
    cluster.on(first, f"touch /opt/{name} /etc/{name}; mkdir /{name}", user=False)
    for place in ("/tmp", "/dev/shm", "/opt", "/etc", ""):
        assert cluster.on(first, f"ls -d {place}/{name}").returncode == 0
        assert cluster.on(second, f"ls -d {place}/{name}").returncode != 0
        assert not Path(f"{place}/{name}").exists()
    ids = {cluster.on(node, "cat /proc/sys/kernel/random/boot_id").stdout for node in (first, second)}
    assert len(ids) == 2 and Path("/proc/sys/kernel/random/boot_id").read_text() not in ids
    assert "slurmctld" not in cluster.on(first, "ps -e").stdout


def test_its_cpus_and_devices(cluster, site):
    node = cluster.names[0]
    every = cpus_of(site)
    ask = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))"
    assert cluster.on(node, f"nproc; python3 -c '{ask}'").stdout.split() == [str(every)] * 3
    assert cluster.on(node, "taskset -c 0 nproc").stdout == "1\n"
    bound = cluster.on(node, f"taskset -c {every - 1} python3 -c 'import os; print(os.sched_getaffinity(0))'")
    assert bound.stdout == f"{{{every - 1}}}\n"
    told = cluster.on("login", f"scontrol show node {node}").stdout
    assert re.search(rf"CPUTot={every}\b", told), told
    assert re.search(rf"RealMemory={site.facts['node']['memory_gib'] * 1024}\b", told), told
    if site.facts["scheduler"] == "slurm":
        assert re.search(rf"Gres=gpu:{site.facts['node']['devices']}\b", told), told


# ---- what a job finds -----------------------------------------------------------------------------------------------


def login(cluster: VirtualSite, node: str, command: str) -> subprocess.CompletedProcess:
    return cluster.on(node, ["bash", "-lc", command])


def test_modules_are_those_of_site_toml(cluster, site):
    """Each loads, where the scripts look for it; another one fails in Lmod's own words."""
    modules = layer.modules_at(site)
    load = [f"{f'module use {used} && ' if used else ''}module load {' '.join(names)}" for used, names in modules.items()]
    node = cluster.names[0]
    loaded = login(cluster, node, " && ".join([*load, 'echo "$LOADEDMODULES"']))
    assert loaded.returncode == 0, loaded.stderr
    assert {*loaded.stdout.strip().split(":")} >= {name for names in modules.values() for name in names}
    for name in ["no-such-module", *(f"{name.partition('/')[0]}/0.0" for names in modules.values() for name in names)]:
        missing = login(cluster, node, "; ".join([*load[:-1], f"module load {name}"]))
        assert missing.returncode == 1, missing.stdout
        assert "The following module(s) are unknown" in missing.stderr


@only(when=lambda site: "conda/bin" in layer.stand_ins(site))
def test_conda_activates_nothing_before_init(cluster, site):
    for name in site.facts.get("software", {}).get("modules", []):
        if "conda/bin" in layer.module_file(name)[1]:
            said = login(cluster, cluster.names[0], f"module load {name} && conda activate base")
            assert said.returncode and "Run 'conda init' before 'conda activate'" in said.stderr, said
            said = login(cluster, cluster.names[0], f"module load {name} && source activate /no-such-environment")
            assert said.returncode and "EnvironmentLocationNotFound" in said.stderr, said


@only(when=lambda site: "image" in site.facts["software"])
def test_a_container_has_torch_and_no_scheduler(cluster, site):
    """And is not started of an image that is not there, or with a flag that is none."""
    image, file = site.facts["software"]["image"], layer.image_file(site)
    start = f"singularity exec {file}" if file else f"shifter --image={image}"
    node = cluster.names[0]
    inside = cluster.on(node, f"{start} sh -c 'python -c \"import torch; print(torch.__version__)\"; command -v srun'")
    assert inside.returncode == 127 and inside.stdout.count("\n") == 1, inside
    for words, said in {
        start.replace(image, f"no-such-{image}"): "no such file or directory" if file else "FAILED to lookup docker image",
        start.replace(" exec ", " exec --no-such-flag ").replace(" --image", " --no-such-flag --image"): "--no-such-flag",
    }.items():
        refused = cluster.on(node, f"{words} true")
        assert refused.returncode and said in refused.stderr, refused


def test_no_network_leads_out(cluster, site):
    """And that is said at once: nothing waits for a name server, and pip tries nothing twice."""
    for node in ("login", cluster.names[0]):
        assert "Network is unreachable" in cluster.on(node, "echo >/dev/tcp/192.0.2.1/443", timeout=20).stderr
        assert cluster.on(node, "getent hosts pypi.org", timeout=20).returncode == 2
        pip = f"{layer.PLAIN}/bin/python3 -m pip"
        lacking = cluster.on(node, f"{pip} download --no-deps --index-url https://pypi.org/simple six").stderr
        assert "No matching distribution found for six" in lacking and "Retrying" not in lacking, lacking
    addresses = cluster.on(cluster.names[0], "ip -o address show up | awk '{print $2}'").stdout.split()
    assert {*addresses} == {"lo", *interfaces_of(site)}


@only(schedulers=["slurm"])
def test_a_broadcast_reaches_each_nodes_own_disk(cluster, site):
    """sbcast, to where the scripts write; the disk is the user's, and empty at first."""
    disks = [disk.format(user=USER) for disk in layer.local_disks(site)]
    for disk in disks:
        for node in cluster.names:
            assert cluster.on(node, f"stat -c %U {disk}; ls -A {disk}").stdout.split() == [USER]
        cluster.on(cluster.names[0], f"touch {disk}/here")
        assert cluster.on(cluster.names[1], f"ls {disk}").stdout == ""
    place = f"{disks[0] if disks else '/tmp'}/broadcast"
    account = [f"--account={site.facts['queue']['account']}"] if "account" in site.facts.get("queue", {}) else []
    cluster.on("login", "echo sent > ~/sent")
    copied = ["bash", "-c", f"sbcast ~/sent {place} && srun --ntasks-per-node=1 bash -c 'cat {place}; hostname'"]
    said = cluster.on("login", ["salloc", *account, "--quiet", "--nodes=2", "--time=5", *copied])
    assert sorted(said.stdout.split()) == sorted(["sent", "sent", *cluster.names]), said
    assert cluster.on("login", f"ls {place}").returncode

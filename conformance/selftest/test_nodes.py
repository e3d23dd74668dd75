"""Nodes of a site's virtual cluster match site.toml, and each has its own processes and files.

    python -m pytest conformance/selftest/test_nodes.py --cluster [--site NAME_OR_FOLDER]

Needs root and Slurm; `nox -s cluster` runs it. test_virtual.py has the tests that need neither.
"""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance.cluster.shape import LOGIN, cpus_of, interfaces_of
from conformance.cluster.virtual import UID, USER


def test_names_and_addresses(cluster, site):
    """hostname -i gives the address that other nodes look up, on the first interface. No route leads outside."""
    for number, name in enumerate(cluster.names, 11):
        output = cluster.on(name, "hostname; hostname -i; getent hosts $(hostname)").stdout.split()
        address = f"10.253.0.{number}"
        assert output[:3] == [name, address, address], output
        for other in (LOGIN, *cluster.names):
            assert cluster.on(other, f"getent hosts {name}").stdout.split()[:2] == [address, name]
        links = cluster.on(name, "ls /sys/class/net; ip -4 -o address show").stdout
        assert {*interfaces_of(site)} <= {*links.split()}
        assert f"{address}/24" in next(line for line in links.splitlines() if f"{interfaces_of(site)[0]} " in line)
        assert cluster.on(name, "ip route show default").stdout == ""
    if domain := site.toml["node"].get("domain"):
        assert cluster.on(LOGIN, f"getent hosts {cluster.names[1]}.{domain}").stdout.split()[0] == "10.253.0.12"
    # A node's name leads to its server over every interface.
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
    """The Slurm of this machine, or of --tree: both the commands and the daemons that registered the nodes."""
    output = subprocess.run(["chroot", cluster.tree, "slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    for name in (LOGIN, *cluster.names):
        assert cluster.on(name, "srun --version").stdout == output
    for name in cluster.names:
        assert f" Version={output.split()[-1]}\n" in cluster.on(LOGIN, f"scontrol show node {name}").stdout


def test_the_user(cluster):
    """An ordinary user, whose home is on all nodes."""
    for name in ("login", *cluster.names):
        assert cluster.on(name, "id -u; id -un; pwd; echo $HOME").stdout.split() == [str(UID), USER, *2 * [f"/home/{USER}"]]
        assert "Permission denied" in cluster.on(name, "cat /etc/shadow /run/munge/key").stderr
    cluster.on("login", "echo shared > ~/file")
    assert cluster.on(cluster.names[1], "cat ~/file").stdout == "shared\n"
    assert cluster.on("login", ["su", "-", USER, "-c", "pwd"], user=False).stdout == f"/home/{USER}\n"


def test_what_belongs_to_one_node(cluster):
    """/tmp, the processes, the boot id (by which UCX and NCCL tell hosts apart), and files outside the home."""
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
    assert cluster.on(node, f"env -u OMP_THREAD_LIMIT nproc; python3 -c '{ask}'").stdout.split() == [str(every)] * 3
    assert cluster.on(node, "env -u OMP_THREAD_LIMIT taskset -c 0 nproc").stdout == "1\n"
    bound = cluster.on(node, f"taskset -c {every - 1} python3 -c 'import os; print(os.sched_getaffinity(0))'")
    assert bound.stdout == f"{{{every - 1}}}\n"
    output = cluster.on("login", f"scontrol show node {node}").stdout
    assert re.search(rf"CPUTot={every}\b", output), output
    assert re.search(rf"RealMemory={site.toml['node']['memory_gib'] * 1024}\b", output), output
    if site.toml["scheduler"] == "slurm":
        assert re.search(rf"Gres=gpu:{site.toml['node']['devices']}\b", output), output

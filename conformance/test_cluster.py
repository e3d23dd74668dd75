"""Virtual clusters, raised: that nodes and ranks are what site.toml says, and that nothing is left.

    python -m pytest conformance/test_cluster.py --cluster [--site NAME_OR_FOLDER]

As root, with Slurm. `nox -s cluster` runs it; test_virtual.py has what needs neither.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance import sites
from conformance.cluster import layer, placement
from conformance.cluster.shape import LOGIN, cpus_of, interfaces_of
from conformance.cluster.virtual import UID, USER, Refusal, VirtualSite
from conformance.sites import ROOT, Site

clause, rejects, only = pytest.mark.clause, pytest.mark.rejects, pytest.mark.only
SMALL = """
name = "small"
scheduler = "slurm"
[node]
cores = 4
memory_gib = 1
devices = 2
interfaces = ["fab0", "fab1"]
"""


@pytest.fixture(scope="session")
def cluster(site, tmp_path_factory):
    """The site's, with two nodes."""
    with VirtualSite(site, tmp_path_factory.mktemp("cluster"), build=layer.build) as raised:
        print(f"{site.name}: up in {raised.seconds['up']:.2f} s")
        yield raised


@pytest.fixture
def small(tmp_path) -> Site:
    """A site of no machine: how it comes and goes does not depend on its shape."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/site.toml").write_text(SMALL)
    return sites.find([str(tmp_path / "site")])[0]


# ---- nothing is left ------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # it has just ended
            continue
        found += [each for child in children for each in (child, *descendants(child))]
    return found


def namespaces(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("mnt", "net", "uts", "ipc", "pid")}
    except OSError:
        return set()


class Traces:
    """What a cluster in this folder has made on this machine: looked at while it is there, and looked for afterwards."""

    def __init__(self, folder: Path):
        self.folder, self.spaces = folder, set()
        self.interfaces = {*os.listdir("/sys/class/net")}

    def look(self, pid: int) -> set[str]:
        """The namespaces of the processes below this one."""
        mine = namespaces(os.getpid())
        self.spaces |= {space for each in descendants(pid) for space in namespaces(each)} - mine
        return self.spaces

    def left(self) -> list[str]:
        """Processes of its namespaces or about its folder, mounts, interfaces. After what has just been killed is gone."""
        end = time.monotonic() + 5
        while True:
            found = []
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if namespaces(int(process.name)) & self.spaces or (str(self.folder) in command and "pytest" not in command):
                    found.append(f"process {process.name} {command}")
            found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(self.folder) in line]
            found += [f"interface {name}" for name in {*os.listdir("/sys/class/net")} - self.interfaces]
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.05)


def test_nothing_is_left_after_it_is_down(small, tmp_path):
    traces = Traces(tmp_path / "cluster")
    with VirtualSite(small, tmp_path / "cluster") as cluster:
        # What a job leaves behind in the background, too.
        behind = "setsid sleep 600 >&/dev/null </dev/null &"
        assert cluster.on("login", f"sbatch --wait -N2 -n2 --wrap='srun bash -c \"{behind}\"'").returncode == 0
        assert "sleep 600" in cluster.on(cluster.names[1], "ps -e -o args").stdout
        assert len(traces.look(os.getpid())) == 5 * 3
    assert traces.left() == []
    cluster.down()


@pytest.mark.parametrize("seconds", [None, 0.1, 0.2, 0.3, 0.4, 0.5])
def test_nothing_is_left_when_it_is_killed(small, tmp_path, seconds):
    """Whenever: without a chance to tidy up, and half-way, too. Raised again in the same folder at once."""
    traces = Traces(tmp_path / "cluster")
    command = ["-m", "conformance.cluster.virtual", "--bare", "--keep", f"--site={small.folder}", f"--folder={traces.folder}"]
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        if seconds is None:
            assert process.stdout.readline().startswith("up in")
            assert len(traces.look(process.pid)) == 5 * 3
        else:
            time.sleep(seconds)
            traces.look(process.pid)
        process.kill()
    with VirtualSite(small, traces.folder) as again:
        assert again.on("login", "srun -N2 hostname").stdout
    assert traces.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_takes_it_down(small, tmp_path, number):
    traces = Traces(tmp_path / "cluster")
    command = ["-m", "conformance.cluster.virtual", "--bare", "--keep", f"--site={small.folder}", f"--folder={traces.folder}"]
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().startswith("up in")
        traces.look(process.pid)
        process.send_signal(number)
        process.wait(20)
    assert traces.left() == []
    assert not (traces.folder / "up.json").exists()


def test_one_folder_holds_one_cluster(small, tmp_path):
    with VirtualSite(small, tmp_path / "cluster") as first:
        with pytest.raises(Refusal, match="a cluster is up in"):
            VirtualSite(small, tmp_path / "cluster").up()
        assert first.on("login", "srun -N2 hostname").returncode == 0


def test_several_are_up_at_once(small, tmp_path):
    """Raised at the same moment, with the same names and addresses, and each knows nothing of the others."""
    clusters = [VirtualSite(small, tmp_path / str(number)) for number in range(3)]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(VirtualSite.up, clusters))
        clusters[0].on("login", "echo here > /tmp/file; echo here > ~/file")
        for cluster in clusters:
            assert sorted(cluster.on("login", "srun -N2 hostname").stdout.split()) == ["node001", "node002"]
        assert "No such file" in clusters[1].on("login", "cat ~/file /tmp/file").stderr
        clusters[0].down()
        assert clusters[1].on("login", "srun -N2 hostname").returncode == 0
    finally:
        for cluster in clusters:
            cluster.down()


def test_a_node_may_die(small, tmp_path):
    """The others live on, and the end is as ever."""
    traces = Traces(tmp_path / "cluster")
    with VirtualSite(small, tmp_path / "cluster", settings=dict(SlurmdTimeout="2")) as cluster:
        traces.look(os.getpid())
        cluster.crash("node002")
        assert cluster.on("login", "srun -N1 -w node001 hostname").stdout == "node001\n"
        with pytest.raises(Refusal, match="node002"):
            cluster.on("node002", "true")
    assert traces.left() == []


# ---- a node ---------------------------------------------------------------------------------------------------------


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


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def installed(cluster, site) -> str:
    """The site's folder in the user's home, after its own install.sh."""
    folder = cluster.put_site()
    ended = cluster.on("login", "./install.sh", folder=folder, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def placed(cluster, site, folder: str, change: Callable[[str], str] = str) -> list[placement.Row]:
    """The rows of a probe that stands where train.py was, in a job of the site's script."""
    here = cluster.home / Path(folder).relative_to(f"/home/{USER}")
    results = here / f"placed-{time.monotonic_ns()}"
    results.mkdir()
    os.chown(results, UID, UID)
    (here / "train.py").write_text(placement.probe(site, f"{folder}/{results.name}", torch=change is str))
    script = (site.folder / site.facts["submit"]).read_text()
    (here / site.facts["submit"]).write_text(change(script))
    log = results / "log"
    # sbatch --wait looks after 2 s and then after 10.
    wait = 'while [[ $(squeue -h -t PD,R -j "$job") ]]; do sleep 0.2; done; scontrol show job "$job" | grep -q " ExitCode=0:0"'
    submit = f"sbatch --parsable --output={folder}/{results.name}/log {site.facts['submit']}"
    ended = cluster.on("login", f"job=$({submit}) && {wait}", folder=folder, timeout=200)
    assert ended.returncode == 0, ended.stderr + (log.read_text() if log.exists() else "")
    return placement.rows_of([path.read_text() for path in results.glob("*.json")])


@pytest.mark.timeout(400)
@clause("J9")
@only(schedulers=["slurm"])
def test_ranks_are_on_the_cores_near_their_device(check, cluster, site, installed):
    """In blocks, each with a device of its own and cores of its own, near it where site.toml says what is near."""
    rows = placed(cluster, site, installed)
    print(json.dumps([[row.rank, row.host, placement.device_of(site, row), placement.ranges({*row.cpus})] for row in rows]))
    check.holds("J9", *placement.misplaced(site, rows))


@pytest.mark.timeout(400)
@rejects("J9")
@only(schedulers=["slurm"])
def test_ranks_that_are_not_bound_are_rejected(cluster, site, installed):
    rows = placed(cluster, site, installed, lambda script: placement.unbound(script, site.facts["launcher"]))
    assert any("cores=" in line or "core=" in line for line in placement.misplaced(site, rows))

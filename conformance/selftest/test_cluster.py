"""Virtual clusters start and end, also several at once, and leave nothing behind, however they end.

    python -m pytest conformance/selftest/test_cluster.py --cluster [--tree FOLDER]

Needs root and Slurm. `nox -s cluster` runs it.
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.cluster.jobs import taken
from conformance.cluster.shape import URGENT
from conformance.cluster.virtual import NoCluster, VirtualSite
from conformance.harness import sites
from conformance.harness.sites import ROOT, Site

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


@pytest.fixture
def small(tmp_path) -> Site:
    """A made-up site: start and end do not depend on the site's shape."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/site.toml").write_text(SMALL)
    return sites.find([str(tmp_path / "site")])[0]


# ---- nothing is left ------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # the process has just ended
            continue
        pids += [each for child in children for each in (child, *descendants(child))]
    return pids


def namespaces(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("mnt", "net", "uts", "ipc", "pid")}
    except OSError:
        return set()


class Traces:
    """The traces of a cluster in this folder on this machine: look() while it runs, left() after its end."""

    def __init__(self, folder: Path):
        self.folder, self.spaces = folder, set()
        self.interfaces = {*os.listdir("/sys/class/net")}

    def look(self, pid: int) -> set[str]:
        """The namespaces of the processes below this one."""
        mine = namespaces(os.getpid())
        self.spaces |= {space for each in descendants(pid) for space in namespaces(each)} - mine
        return self.spaces

    def left(self) -> list[str]:
        """Processes in its namespaces or about its folder, mounts, interfaces. Killed processes get 15 s to vanish."""
        end = time.monotonic() + 15
        while True:
            traces = []
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if namespaces(int(process.name)) & self.spaces or (str(self.folder) in command and "pytest" not in command):
                    traces.append(f"process {process.name} {command}")
            traces += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(self.folder) in line]
            traces += [f"interface {name}" for name in {*os.listdir("/sys/class/net")} - self.interfaces]
            if not traces or time.monotonic() > end:
                return traces
            time.sleep(0.05)


def test_nothing_is_left_after_it_is_down(small, tmp_path, pytestconfig):
    traces = Traces(tmp_path / "cluster")
    with VirtualSite(small, tmp_path / "cluster", tree=pytestconfig.getoption("--tree")) as cluster:
        # A background process that a job leaves behind must end too.
        behind = "setsid sleep 600 >&/dev/null </dev/null &"
        assert cluster.on("login", f"sbatch --wait -N2 -n2 --wrap='srun bash -c \"{behind}\"'").returncode == 0
        assert "sleep 600" in cluster.on(cluster.names[1], "ps -e -o args").stdout
        assert len(traces.look(os.getpid())) == 5 * 3
    assert traces.left() == []
    cluster.down()


@pytest.mark.parametrize("seconds", [None, 0.1, 0.3])
def test_nothing_is_left_when_it_is_killed(small, tmp_path, seconds, pytestconfig):
    """Killed without a chance to clean up, also during its start. A new cluster in the same folder starts at once."""
    traces = Traces(tmp_path / "cluster")
    command = ["-m", "conformance.cluster.virtual", "--bare", "--keep", f"--site={small.folder}", f"--folder={traces.folder}"]
    command += [f"--tree={pytestconfig.getoption('--tree')}"]
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


def test_one_folder_holds_one_cluster(small, tmp_path):
    with VirtualSite(small, tmp_path / "cluster") as first:
        with pytest.raises(NoCluster, match="a cluster is up in"):
            VirtualSite(small, tmp_path / "cluster").up()
        assert first.on("login", "srun -N2 hostname").returncode == 0


def test_several_are_up_at_once(small, tmp_path):
    """Started at the same moment with the same names and addresses; none sees the others."""
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
    """The other nodes go on, and the cluster ends as usual."""
    traces = Traces(tmp_path / "cluster")
    with VirtualSite(small, tmp_path / "cluster", settings=dict(SlurmdTimeout="2")) as cluster:
        traces.look(os.getpid())
        cluster.crash("node002")
        assert cluster.on("login", "srun -N1 -w node001 hostname").stdout == "node001\n"
        with pytest.raises(NoCluster, match="node002"):
            cluster.on("node002", "true")
    assert traces.left() == []


BESIDE_THE_ROOT = """
import sys
from pathlib import Path
from conformance.harness import sites
from conformance.cluster.virtual import VirtualSite

site, folder = sys.argv[1:]
with VirtualSite(sites.find([site])[0], Path(folder)) as cluster:
    first, second = cluster.names
    print(cluster.on(first, "cat /var/opt/file; echo changed > /var/opt/file; cat /var/opt/file", user=False).stdout.split())
    print(cluster.on(second, "cat /var/opt/file").stdout.split(), Path("/var/opt/file").read_text().split())
"""


def test_what_the_machine_has_mounted_beside_its_root_is_not_written_to(small, tmp_path):
    """The host has /var or /opt on separate disks. A node still writes into its own memory there."""
    mounted = 'mount -t tmpfs apart /var/opt && echo whole > /var/opt/file && exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", mounted, "sh", sys.executable, "-c", BESIDE_THE_ROOT]
    command += [str(small.folder), str(tmp_path / "cluster")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert result.stdout.splitlines() == ["['whole', 'changed']", "['whole'] ['whole']"], result.stderr


# ---- the queue ------------------------------------------------------------------------------------------------------

MADE_UP = """
name = "made-up"
scheduler = "slurm"
submit = "job.sl"
files = ["job.sl"]
[node]
cores = 2
memory_gib = 1
devices = 0
interfaces = ["fab0"]
[queue]
account = "Project_1"
qos = ["first", "second"]
constraints = ["disk"]
"""
JOB = """#!/bin/bash
#SBATCH --account=Project_1
#SBATCH --constraint=disk
#SBATCH --nodes=2
"""


@pytest.fixture
def made_up(tmp_path) -> Site:
    folder = tmp_path / "made-up"
    folder.mkdir()
    (folder / "site.toml").write_text(MADE_UP)
    (folder / "job.sl").write_text(JOB)
    return sites.find([str(folder)])[0]


def until(cluster: VirtualSite, command: str, words: str, seconds: float = 60) -> str:
    end = time.monotonic() + seconds
    while not re.search(words, output := cluster.on("login", command).stdout):
        assert time.monotonic() < end, f"{command}: {output}, but should have {words}"
        time.sleep(0.2)
    return output


@clause("V11")
@rejects("V11")
@pytest.mark.parametrize("enforced", [True, False])
def test_a_scheduler_that_asks_nobody_is_rejected(made_up, tmp_path, enforced):
    settings = {} if enforced else dict(AccountingStorageEnforce="nojobs")
    with VirtualSite(made_up, tmp_path / "cluster", settings=settings) as cluster:
        accepted = taken(cluster, made_up, cluster.put_site())
    left = ["--account=nobodys", "--qos=nobodys", "jobs in the queue=['1', '2'], but should be none"]
    assert [line.partition(": exit")[0] for line in accepted] == ([] if enforced else left), accepted


def test_accounts_and_preemption(made_up, tmp_path):
    """Users see their own accounts. A job without a QOS gets the first. Preemption sends SIGTERM, and the job resumes later."""
    rank = "trap 'echo told; sleep 1; exit 75' TERM; echo begun; while :; do sleep 0.1; done"
    job = f'srun bash -c "{rank}" || {{ scontrol requeue $SLURM_JOB_ID; exit 75; }}'
    with VirtualSite(made_up, tmp_path / "cluster") as cluster:
        (cluster.home / "job.sl").write_text(f"{JOB}#SBATCH --requeue --output=log\n{job}\n")
        assert "project_1|visitor|first,second|first\n" in (
            cluster.on("login", "sacctmgr -nP show associations format=account,user,qos,defaultqos").stdout
        )
        assert cluster.on("login", "sbatch --parsable job.sl").stdout == "1\n"
        until(cluster, "cat log", "(?s)begun.*begun")
        assert URGENT not in cluster.on("login", f"sinfo; sbatch --partition={URGENT} job.sl").stdout
        nodes = ",".join(cluster.names)
        urgent = f"sbatch --partition={URGENT} --exclusive --nodelist={nodes} --output=/dev/null --wrap='sleep 1'"
        assert cluster.on("login", urgent, user=False).returncode == 0
        until(cluster, "cat log", "(?s)told.*told")
        until(cluster, "squeue -h -a -o '%i %T %r'", "1 PENDING BeginTime")
        until(cluster, "sacct -n -P -X -D -a -o JobID,QOS,State", "2\\|normal\\|COMPLETED")
        cluster.on("login", "scontrol update JobId=1 StartTime=now")
        until(cluster, "sacct -n -P -X -D -o JobID,QOS,State", "1\\|first\\|REQUEUED\n1\\|first\\|RUNNING")

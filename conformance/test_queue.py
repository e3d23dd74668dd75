"""What the scheduler of a virtual cluster takes and what it refuses; who it is that asks; and who must make room.

    python -m pytest conformance/test_queue.py --cluster [--site NAME_OR_FOLDER]

As root, with Slurm. `nox -s cluster` runs it; test_virtual.py has what needs neither.
"""

import re
import time

import pytest

from conformance import sites
from conformance.cluster.shape import URGENT
from conformance.cluster.virtual import USER, VirtualSite
from conformance.sites import Site

clause, rejects, only = pytest.mark.clause, pytest.mark.rejects, pytest.mark.only
# What is wrong with a job, by the options that make it so; and the scheduler's words for it.
SLURM = {
    "--account=nobodys": "Invalid account or account/partition combination specified",
    "--qos=nobodys": "Invalid qos specification",
    "--partition=nowhere": "invalid partition specified: nowhere",
    "--constraint=nothing": "Invalid feature specification",
    "--nodes={more}": "More processors requested than permitted|Node count specification invalid",
}
# A PBS has no accounts of its own, and no QOS.
PBS = {
    "-q nowhere": "Unknown queue",
    "-l qos=nobodys": "Unknown resource Resource_List.qos",
}
SUBMITS = {"slurm": ("sbatch --hold", SLURM), "pbs": ("qsub", PBS)}
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


def queue(cluster: VirtualSite) -> list[str]:
    return sorted(cluster.on("login", f"squeue -h -a -u {USER} -o %i").stdout.split())


def taken(cluster: VirtualSite, site: Site, folder: str) -> list[str]:
    """What was wrong, and not refused in these words."""
    submit, wrong = SUBMITS[site.facts["scheduler"]]
    found, before = [], queue(cluster)
    for wish, words in wrong.items():
        option = wish.format(more=len(cluster.names) + 1)
        ended = cluster.on("login", f"{submit} {option} {site.facts['submit']}", folder=folder)
        said = f"{ended.stdout}{ended.stderr}".strip()
        if ended.returncode == 0 or not re.search(words, said):
            found.append(f"{option}: exit code {ended.returncode}, {said!r}, but should be refused with {words!r}")
    if left := [job for job in queue(cluster) if job not in before]:
        cluster.on("login", f"scancel {' '.join(left)}")
        found.append(f"jobs in the queue={left}, but should be none")
    return found


def until(cluster: VirtualSite, command: str, words: str, seconds: float = 30) -> str:
    end = time.monotonic() + seconds
    while not re.search(words, said := cluster.on("login", command).stdout):
        assert time.monotonic() < end, f"{command}: {said}, but should have {words}"
        time.sleep(0.2)
    return said


# ---- a site's own job -----------------------------------------------------------------------------------------------


@clause("V11")
def test_what_is_wrong_is_refused(check, cluster, site):
    check.holds("V11", *taken(cluster, site, cluster.put_site()))


@clause("V11")
@only(schedulers=["slurm"])
def test_every_script_is_taken_as_it_stands(check, cluster, site):
    """--test-only looks for nodes, too. A job that is held shows whose it is."""
    folder = cluster.put_site()
    queued = site.facts.get("queue", {})
    for script in site.job_scripts:
        asked = cluster.on("login", f"sbatch --test-only {script.name}", folder=folder)
        look = "squeue -h -o '%a %q' -j $job; scancel $job"
        ended = cluster.on("login", f"job=$(sbatch --parsable --hold {script.name}) && {{ {look}; }}", folder=folder)
        check.equal("V11", exit_codes=((asked.returncode, ended.returncode), (0, 0)), errors=(ended.stderr, ""))
        if "account" in queued:
            account, qos = ended.stdout.split()
            check.equal("V11", account=(account, queued["account"].lower()))  # Slurm has no capitals in them
            check.equal("V11", qos_is_one_of_the_site=(qos in queued.get("qos", ["normal"]), True))


@clause("V11")
@only(schedulers=["pbs"])
def test_pbs_takes_its_script_and_keeps_what_can_never_run(check, cluster, site):
    """It refuses too many nodes only where a queue has a limit."""
    folder, script = cluster.put_site(), site.facts["submit"]
    ended = cluster.on("login", f"job=$(qsub {script}) && qdel $job", folder=folder)
    check.equal("V11", exit_code=(ended.returncode, 0), errors=(ended.stderr, ""))
    ask = f"job=$(qsub -l select={len(cluster.names) + 1} {script}) && qstat -f $job && qdel $job"
    ended = cluster.on("login", ask, folder=folder)
    told = "Can Never Run: Not enough total nodes available" in ended.stdout
    check.equal("V11", told_that_it_never_runs=(told, True), errors=(ended.stderr, ""))


# ---- of no machine --------------------------------------------------------------------------------------------------


@clause("V11")
@rejects("V11")
@pytest.mark.parametrize("enforced", [True, False])
def test_a_scheduler_that_asks_nobody_is_rejected(made_up, tmp_path, enforced):
    settings = {} if enforced else dict(AccountingStorageEnforce="nojobs")
    with VirtualSite(made_up, tmp_path / "cluster", settings=settings) as cluster:
        found = taken(cluster, made_up, cluster.put_site())
    left = ["--account=nobodys", "--qos=nobodys", "jobs in the queue=['1', '2'], but should be none"]
    assert [line.partition(": exit")[0] for line in found] == ([] if enforced else left), found


def test_accounts_and_preemption(made_up, tmp_path):
    """The user is told what is theirs. A job without a QOS has the first; preempted, it gets SIGTERM, and goes on later."""
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

"""A job at a site with PBS, on a virtual cluster: the stand-ins behave like OpenPBS 23.06.06 did when it was observed.

    python -m pytest conformance/selftest/test_pbs.py --cluster

Needs root and Slurm. The site is made up. test_layer.py has the refusals of the stand-ins, which need no cluster.
"""

import os
import re
import time
from collections.abc import Iterator

import pytest

from conformance.cluster import layer
from conformance.cluster.shape import LOGIN, numbers
from conformance.cluster.virtual import UID, USER, VirtualSite
from conformance.harness.sites import Site

clause, rejects, only = pytest.mark.clause, pytest.mark.rejects, pytest.mark.only
FACTS = dict(
    name="made-up",
    scheduler="pbs",
    # The nodes in ALCF's placement examples.
    node=dict(
        cores=104, sockets=2, threads_per_core=2, reserved="0,52", reserved_cores=2, memory_gib=1, devices=12, partition="long"
    ),
    queue=dict(partitions=["short", "long"]),
)
KILL_WAIT = 2  # seconds; 10 at ALCF and on every other cluster of this suite


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pbs")
    (folder / "site").mkdir()
    settings = dict(KillWait=str(KILL_WAIT))
    with VirtualSite(Site(folder / "site", FACTS), folder / "cluster", build=layer.build, settings=settings) as cluster:
        limited = cluster.on("login", "scontrol update partition=short MaxTime=1", user=False)
        assert limited.returncode == 0, limited.stderr
        yield cluster


@pytest.fixture
def pbs(raised):
    """Empties the queue after each test."""
    yield raised
    raised.on("login", f"scancel -u {USER}; while [[ $(squeue -h -u {USER}) ]]; do sleep 0.1; done")


class PbsJob:
    """A script, submitted from its own folder in the home."""

    def __init__(self, cluster: VirtualSite, script: str, options: str = "", queue: str = "long", environment: str = ""):
        self.cluster, self.name = cluster, f"job-{time.monotonic_ns()}"
        self.folder, self.here = f"/home/{USER}/{self.name}", cluster.home / self.name
        self.here.mkdir()
        (self.here / "job.pbs").write_text(script)
        os.chown(self.here, UID, UID)
        answer = cluster.on("login", f"{environment} qsub -q {queue} -l select=2 {options} job.pbs", folder=self.folder)
        self.code, self.errors, self.id = answer.returncode, answer.stderr, answer.stdout.strip()
        self.number = self.id.partition(".")[0]

    def fields(self) -> dict[str, str]:
        answer = self.cluster.on("login", f"qstat -x -f {self.id}").stdout.replace("\n\t", "")
        return dict(re.findall(r"^ {4}([\w.]+) = (.*)$", answer, re.MULTILINE))

    def until(self, letter: str) -> dict[str, str]:
        end = time.monotonic() + 60
        while (fields := self.fields()).get("job_state") != letter:
            assert time.monotonic() < end, fields
            time.sleep(0.1)
        return fields

    def says(self, name: str, word: str = "") -> str:
        """The text of a file in its folder, as soon as it contains the word."""
        path, end = self.here / name, time.monotonic() + 60
        while not path.exists() or word not in path.read_text():
            assert time.monotonic() < end, f"no {word!r} in {name}: {path.read_text() if path.exists() else 'not there'}"
            time.sleep(0.05)
        return path.read_text()


# ---- environment of a job -------------------------------------------------------------------------------------------


def test_a_job_begins_as_there(pbs):
    script = """pwd; tr '\\0' ' ' </proc/$PPID/cmdline; echo; ls -d "$TMPDIR"; cat "$PBS_NODEFILE"; env"""
    job = PbsJob(pbs, script, "-v WANTED=1", environment="UNWANTED=1")
    assert re.fullmatch(rf"\d+\.{LOGIN}", job.id), job.errors
    where, parent, folder, first, second, *environment = job.says("job.pbs.o" + job.number, "WANTED").splitlines()
    exported = dict(line.partition("=")[::2] for line in environment)
    assert where == f"/home/{USER}"
    assert parent.startswith("bash -lc ")
    assert folder == f"/var/tmp/pbs.{job.id}"
    assert [first, second] == pbs.names
    wanted = dict(WANTED="1", OMP_NUM_THREADS="1", NCPUS="1", ENVIRONMENT="BATCH", TMPDIR=folder, PBS_JOBID=job.id)
    wanted |= dict(PBS_O_WORKDIR=job.folder, PBS_O_HOST=LOGIN, PBS_JOBDIR=where, PBS_QUEUE="long", PBS_JOBNAME="job.pbs")
    assert {name: exported.get(name) for name in wanted} == wanted
    assert not [name for name in exported if name.startswith("SLURM") or name == "UNWANTED"]
    assert pbs.on(pbs.names[0], f"ls {folder}").returncode != 0


def test_output_comes_at_the_end(pbs):
    job = PbsJob(pbs, "echo out; echo err >&2; touch $PBS_O_WORKDIR/wrote; sleep 1")
    job.says("wrote")
    assert not [*job.here.glob("*.[oe]*")]
    assert job.says("job.pbs.o" + job.number, "out") == "out\n"
    assert job.says("job.pbs.e" + job.number, "err") == "err\n"


def test_output_that_is_kept_is_written_live(pbs):
    job = PbsJob(pbs, "echo out; echo err >&2; sleep 30", "-k doe -j oe -N named")
    assert job.says("named.o" + job.number, "err") == "out\nerr\n"
    assert job.fields()["job_state"] == "R"
    assert not (job.here / f"named.e{job.number}").exists()
    pbs.on("login", f"qdel {job.id}")
    job.until("F")


# ---- refused and waiting jobs ---------------------------------------------------------------------------------------


def test_more_time_than_the_queue_gives_is_refused(pbs):
    job = PbsJob(pbs, "true", "-l walltime=00:02:00", queue="short")
    assert (job.code, job.id) == (188, "")
    assert "qsub: Job violates queue and/or server resource limits" in job.errors


def test_more_nodes_than_there_are_wait_for_ever(pbs):
    job = PbsJob(pbs, "true", "-l select=3")
    assert job.code == 0, job.errors
    fields = job.fields()
    assert (fields["job_state"], fields["comment"]) == ("Q", "Can Never Run: Not enough total nodes available")
    assert pbs.on("login", f"qdel {job.id}").returncode == 0
    assert "Exit_status" not in job.until("F")
    assert pbs.on("login", f"qdel {job.id}").returncode == 35


def test_a_dependency_on_a_deleted_job(pbs):
    """With afterok the dependent job is deleted too; with afterany it runs."""
    first = PbsJob(pbs, "sleep 30")
    strict, lax = (PbsJob(pbs, "true", f"-W depend={kind}:{first.id}") for kind in ("afterok", "afterany"))
    first.until("R")
    assert (strict.fields()["job_state"], lax.fields()["job_state"]) == ("H", "H")
    pbs.on("login", f"qdel {first.id}")
    assert "Exit_status" not in strict.until("F")
    assert lax.until("F")["Exit_status"] == "0"


# ---- end of a job ---------------------------------------------------------------------------------------------------

# On the first node in the script and in a child process, on the second in a rank: each reports TERM and keeps running.
STAYS = """
cd $PBS_O_WORKDIR
cat >rank.sh <<'END'
trap 'echo term >>$1' TERM USR1
echo up >>$1
while true; do echo $SECONDS >>last-$1; sleep 0.2; done
END
bash rank.sh child &
mpiexec -n 2 --ppn 1 bash -c 'bash rank.sh rank$PALS_RANKID' &
. ./rank.sh script
"""
ALL = ("child", "rank0", "rank1", "script")


def stays(cluster: VirtualSite, options: str = "") -> PbsJob:
    job = PbsJob(cluster, STAYS.replace("$1", "${1:-script}").replace(". ./rank.sh script", ". ./rank.sh"), options)
    for name in ALL:
        job.says(name, "up")
    return job


def seconds_after_term(job: PbsJob) -> list[float]:
    """How many seconds each process lived after TERM."""
    for name in ALL:
        job.says(name, "term")
    job.until("F")
    time.sleep(1)
    return [(job.here / f"last-{name}").stat().st_mtime - (job.here / name).stat().st_mtime for name in ALL]


def left(job: PbsJob) -> Iterator[str]:
    """Processes of an ended job that still run after a second."""
    time.sleep(1)
    for node in job.cluster.names:
        processes = job.cluster.on(node, f"grep -lsz PBS_JOBID={job.id} /proc/[0-9]*/environ").stdout
        yield from processes.split()


def test_qdel_sends_term_to_all_and_later_kill(pbs):
    job = stays(pbs)
    assert pbs.on("login", f"qdel {job.id}").returncode == 0
    lived = seconds_after_term(job)
    assert KILL_WAIT - 1 < min(lived) <= max(lived) < KILL_WAIT + 6, lived
    assert job.until("F")["Exit_status"] == "271"
    assert not [*left(job)]


def test_walltime_ends_a_job(pbs):
    job = stays(pbs, "-l walltime=9 -j oe")  # all processes have started before the limit
    lived = seconds_after_term(job)
    assert KILL_WAIT - 1 < min(lived) <= max(lived) < KILL_WAIT + 6, lived
    assert job.until("F")["Exit_status"] == "-29"
    output = job.says(f"job.pbs.o{job.number}", "=>> PBS")
    assert re.search(r"^=>> PBS: job killed: walltime \d+ exceeded limit 9$", output, re.MULTILINE), output


def test_walltime_leaves_a_job_time_to_end_by_itself(pbs):
    job = PbsJob(pbs, "trap 'echo saved; exit 75' TERM; sleep 60 & wait", "-l walltime=1 -k doe")
    assert job.until("F")["Exit_status"] == "-29"
    assert job.says("job.pbs.o" + job.number) == "saved\n"


def test_a_signal_of_qsig_kills_the_login_shell(pbs):
    """Thus the job ends at once, although the script traps the signal."""
    job = stays(pbs)
    assert pbs.on("login", f"qsig -s USR1 {job.id}").returncode == 0
    assert job.until("F")["Exit_status"] == "266"
    assert not [*left(job)]


# ---- ranks ----------------------------------------------------------------------------------------------------------

# Options of mpiexec, and each rank's CPUs on a node, as in ALCF's pages about running jobs.
PLACED = {
    "-n 12 --ppn 6 --cpu-bind depth --depth 8": "1-8 9-16 17-24 25-32 33-40 41-48",
    "-n 24 --ppn 12 --cpu-bind depth --depth 8": "1-8 9-16 17-24 25-32 33-40 41-48 49-51,53-57 58-65 66-73 74-81 82-89 90-97",
    "-n 8 --ppn 4 --cpu-bind list:1-8:9-16:53-60:61-68": "1-8 9-16 53-60 61-68",
    "-n 4 --ppn 2 --cpu-bind list:1:105": "1 105",
}


@pytest.mark.parametrize("options", PLACED)
def test_ranks_are_placed_as_alcf_documents(pbs, options):
    line = "echo $PALS_RANKID $PALS_NODEID $PALS_LOCAL_RANKID $(hostname) $(taskset -cp $$ | cut -d: -f2) ${!SLURM*}"
    script = f"cd $PBS_O_WORKDIR; mkdir ranks; mpiexec {options} bash -c '{line} >ranks/$PALS_RANKID'"
    job = PbsJob(pbs, script)
    assert job.until("F")["Exit_status"] == "0", job.says(f"job.pbs.e{job.number}")
    rows = sorted((path.read_text().split() for path in (job.here / "ranks").iterdir()), key=lambda row: int(row[0]))
    of_a_node = PLACED[options].split()
    wanted = [
        [str(rank), str(rank // len(of_a_node)), str(rank % len(of_a_node)), pbs.names[rank // len(of_a_node)]]
        for rank in range(2 * len(of_a_node))
    ]
    assert [row[:4] for row in rows] == wanted
    assert [numbers(row[4]) for row in rows] == [numbers(each) for each in of_a_node] * 2
    assert not [row for row in rows if row[5:]]

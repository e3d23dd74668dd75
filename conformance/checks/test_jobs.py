"""A site's unedited job script on its virtual cluster: where its ranks run, whom they meet, and how it survives.

    python -m pytest conformance/checks/test_jobs.py --cluster [--site NAME_OR_FOLDER] [--clause ID]

As root, with Slurm; `nox -s cluster` runs it. One job, `life`, is stopped, preempted, and loses its nodes. At the end
its losses must be those of an undisturbed job. A slow disk, not more work, makes it last.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.cluster import layer, placement, prefix
from conformance.cluster.jobs import PATIENCE, Job, Odd, Submitter, queue, taken
from conformance.cluster.plain import Plain, of_the_core
from conformance.cluster.shape import SUBNET, URGENT, interfaces_of
from conformance.cluster.virtual import UID
from conformance.golden import make as golden
from conformance.harness import reference
from conformance.harness.check import T1, Check
from conformance.harness.reference import sha256, take_apart
from conformance.harness.target import read_records

clause, only = pytest.mark.clause, pytest.mark.only
pytestmark = pytest.mark.timeout(300, method="thread")
SLURM = only(schedulers=["slurm"])

# Clauses checked on the login node: all those of one run, of a failing one, of another reduction, and of a user's own file.
OF_LOGIN = ("R1", "R3", "R9", "J1", "J2", "L1", "L2", "L4", "L6", "L13", "L14", "S1")
FP64 = golden.RUN
# 600 steps, and a snapshot after every fifth one.
LONG = "--workload digits --precision fp64 --epochs 120 --steps-per-epoch 5 --eval-every 120"
SNAPSHOT = "snapshot.safetensors"
GO_ON = re.compile(r"\bto resume\b|\b(sbatch|qsub)\b.*--run-dir")
SLOW = 0.5  # seconds for each fsync; a snapshot needs two


@contextlib.contextmanager
def holds(check: Check):
    """Turn Odd, raised where something expected does not happen, into a violation of this clause."""
    __tracebackhide__ = True
    try:
        yield
    except Odd as odd:
        check.holds(str(odd))


def whole(folder: Path) -> int:
    """Return the step of the folder's snapshot. Raise Odd where it is damaged or missing."""
    if not (folder / SNAPSHOT).exists():
        raise Odd(f"no {SNAPSHOT} is left")
    snapshot = take_apart(folder / SNAPSHOT)
    if snapshot["crc32"] != snapshot["document"]["crc32"]:
        raise Odd(f"{SNAPSHOT} is damaged")
    return snapshot["document"]["step"]


@pytest.fixture(scope="session")
def user(cluster, site) -> Submitter:
    """A user in the site's folder in the home directory, after its install.sh."""
    folder = cluster.put_site()
    result = cluster.on("login", "./install.sh", folder=folder, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return Submitter(cluster, site, folder)


# ---- what it trains -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def suite(user, pytestconfig) -> Path:
    """Run the suite itself as a user would on a machine's login node, which needs no torch. Return the folder of its runs."""
    path = f"{prefix.ROOT}/python/bin/python"
    command = ["env", f"PYTHONPATH={prefix.ROOT}/suite", path, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["conformance/checks/run", f"--site={user.folder}", f"--submit={user.geometry(2, 2)}", "--virtual"]
    command += ["--geometry=2x2", "--device=cpu", "--part=parts", *(f"--clause={name}" for name in OF_LOGIN)]
    result = user.cluster.on("login", command, folder=user.folder.partition("/sites/")[0], timeout=280)
    if result.returncode:
        pytest.fail(f"{result.stdout}{result.stderr}", pytrace=False)
    (part,) = (user.here.parents[1] / "parts").glob("*.json")
    if folder := pytestconfig.getoption("--part"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(part, Path(folder, f"{user.site.name}-{part.name}"))
    (runs,) = (user.here / "runs").glob("conformance-*")
    return runs


@clause("J12")
def test_the_suite_submits_it_from_the_login_node(check, suite):
    """The suite submits jobs as README.md says, and its results go into the report."""
    check.equal(runs_of_it=(bool([*suite.rglob(SNAPSHOT)]), True))


@clause("S4")
def test_its_snapshot_is_that_of_ranks_without_a_scheduler(check, suite, pytestconfig):
    """Both were written after two of three epochs, by 4 ranks on 2 nodes and by 4 ranks of the process rung."""
    handed_on = pytestconfig.getoption("--handed-on")
    should_be = {sha256(path) for path in Path(handed_on or "/nowhere").glob("*-4.safetensors")}
    check.equal(snapshots_of_4_ranks_in_handed_on=(len(should_be), 1))
    runs = {sha256(path) for path in suite.rglob("snapshot.prev.safetensors") if is_the_reference_run(path.parent)}
    check.equal(sha256=(runs, should_be))


def is_the_reference_run(folder: Path) -> bool:
    config = read_records(folder)[0]["config"]
    return (config["workload"], config["reduction"]) == ("digits", "ddp")


@SLURM
@clause("J12", "R3", "R4")
def test_it_trains_when_nothing_is_exported_and_ranks_are_dealt_out(check, user):
    """srun inherits --export=NONE, and ranks then have no PATH, which no stub shows. Rank 1 is on the second node here."""
    with holds(check["J12"]):
        job = user.submit(FP64, nodes=2, ranks=2, options="--export=NONE --distribution=cyclic")
        code = job.ends()
        check["J12"].equal(exit_code=(f"{code}: {job.log_text()[-400:]}" if code else 0, 0))
        (start,) = job.starts()
        columns = {name: [row[name] for row in start["ranks"]] for name in ("host", "local_rank", "node_rank")}
        check["R3"].equal(hosts=(columns["host"], columns["host"][:2] * 2), local_ranks=(columns["local_rank"], [0, 0, 1, 1]))
        check["R4"].equal(node_ranks=(columns["node_rank"], [0, 1, 0, 1]))
        check["J12"].close(job.run().losses, golden.load()["losses"], T1)


@clause("J10")
def test_it_comes_back_only_so_often(check, user):
    """A job's thousandth start does not come back, and says how to resume."""
    with holds(check):
        user.cluster.slow_disk(SLOW)  # else it ends before its script sees a stop file
        job = user.submit(LONG, nodes=1, ranks=1, variables={user.restarts: "1000"})
        job.trains()
        user.stop(job)
        check.equal(exit_code=(job.ends(60), 75), says=(bool(GO_ON.search(job.log_text())), True))
        check.equal(jobs_in_the_queue=(queue(user.cluster), []))


@clause("J16")
def test_a_full_disk(check, user):
    """The disk has room for only one snapshot. That one stays intact, and the job resumes from it when there is room."""
    folder, nodes = f"{user.folder}/runs/full", user.cluster.names

    def on_each_node(command: str) -> None:
        for node in nodes:
            result = user.cluster.on(node, command, user=False)
            assert result.returncode == 0, result.stderr

    def seen() -> Path:
        """Copy the disk, which only one node sees, to where this machine sees it."""
        on_each_node(f"cp -r {folder}/. {user.folder}/runs/seen")
        return user.here / "runs/seen"

    with holds(check):
        user.cluster.slow_disk(0)
        assert user.cluster.on("login", f"mkdir -p {folder} {user.folder}/runs/seen").returncode == 0
        on_each_node(f"mount -t tmpfs -o size=800k,uid={UID} full {folder}")
        job = user.submit(FP64, nodes=1, ranks=2, run="full")
        check.equal(exit_code=(job.ends(), 8), says=("No space left" in job.log_text(), True))
        check.equal(step_of_the_snapshot=(whole(seen()), 14))
        on_each_node(f"mount -o remount,size=8m {folder}")
        again = user.submit(FP64, nodes=1, ranks=2, run="full")
        check.equal(exit_code=(again.ends(), 0), step_of_the_snapshot=(whole(seen()), 42))
        on_each_node(f"umount {folder}")


# ---- as a user submits it -------------------------------------------------------------------------------------------


@clause("J19")
def test_before_install_sh_it_starts_nothing(check, cluster, site):
    """In a fresh copy of the repository, one message at once says that install.sh is missing, not a traceback of each rank."""
    with holds(check):
        folder = cluster.put_site("not-installed")
        job = Plain(Submitter(cluster, site, folder), site.cases[0]).submit().runs()
        check.holds(*job.before_install())


@pytest.fixture(scope="session")
def plain(user, site) -> Callable[[], Plain]:
    """Return the unedited job, submitted once for all checks. Raise Odd where it is refused or does not end."""
    job = Plain(user, site.cases[0])
    return lambda: job if job.code is not None else job.submit().runs()


@clause("J18")
@pytest.mark.timeout(360, method="thread")
def test_it_trains_as_a_user_submits_it(check, plain):
    with holds(check):
        check.holds(*plain().faults())


@only(when=lambda site: len(site.cases) > 1)
@clause("J18", "R7")
@pytest.mark.timeout(600, method="thread")
def test_every_choice_is_submitted(check, cluster, site, user):
    """A choice that needs another environment is installed in another copy of the repository."""
    for case in site.cases[1:]:
        with holds(check["J18"]):
            mine = user
            if case.install is not None:
                mine = Submitter(cluster, site, cluster.put_site(f"choice-{case.name}"))
                script = mine.here / case.script
                script.write_text(case.edited(script.read_text()))
                (mine.here / "an-image.sif").write_text("A stand-in for an image.\n")
                result = cluster.on("login", ["./install.sh", *case.flags("an-image.sif")], folder=mine.folder, timeout=240)
                assert result.returncode == 0, result.stdout + result.stderr
            job = Plain(mine, case if case.install is None else replace(case, edit={})).submit().runs()
            check["J18"].holds(*job.faults())
            check["R7"].holds(*(job.sharing() if case.as_it_stands else ()))


@clause("A5")
def test_the_core_that_was_installed_is_this_repository_s(check, user):
    check.holds(*of_the_core(user.here))


# ---- where its ranks are --------------------------------------------------------------------------------------------


def placed(user, change: Callable[[str], str] = str, torch: bool = True) -> list[placement.Row]:
    """Return where the job's ranks were placed: a probe runs as train.py. change edits the job script."""
    train, script, results = user.here / "train.py", user.here / user.site.toml["submit"], user.here / "placed"
    before = train.read_text(), script.read_text()
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    os.chown(results, UID, UID)
    try:
        train.write_text(placement.probe(user.site, f"{user.folder}/placed", torch))
        script.write_text(change(script.read_text()))
        job = user.submit("")
        if code := job.ends(180):
            raise Odd(f"exit code={code}; its log: {job.last_words()}")
    finally:
        train.write_text(before[0]), script.write_text(before[1])
    return placement.rows_of(path.read_text() for path in results.glob("*.json"))


@clause("J9", "R7")
def test_ranks_are_on_the_cores_near_their_device(check, plain, site):
    """Ranks are placed in blocks, each with its own device and its own cores, near it where site.toml says what is near."""
    with holds(check["J9"]):
        job = plain()
        rows = [[row.rank, row.host, placement.device_of(site, row), placement.ranges({*row.cpus})] for row in job.rows]
        print(json.dumps(rows))
        check["R7"].holds(*job.sharing())
        check["J9"].holds(*job.misplaced())


@only(when=layer.brings_a_plugin)
@clause("J13")
def test_rccl_opens_its_network_plugin(check, user):
    """On several nodes, RCCL's own search order shows which file it opens. Only the machine shows whether that works."""
    with holds(check):
        rows = placed(user, torch=False)
        print({row.plugin for row in rows})
        check.holds(*placement.unplugged(rows))


@pytest.mark.rejects("J9")
def test_ranks_that_are_not_bound_are_rejected(user, site):
    rows = placed(user, lambda script: placement.unbound(script, site.toml["launcher"]), torch=False)
    assert placement.misplaced(site, rows) or placement.doubled(site, rows, "core")


# ---- whom it meets --------------------------------------------------------------------------------------------------


class Life:
    """The one job of these checks. After an event that ends it for good, it is submitted again to resume."""

    def __init__(self, user: Submitter):
        self.user, self.cluster = user, user.cluster
        self.job: Job | None = None

    def training(self, slow: float = SLOW) -> Job:
        """Return the job once it has at least one snapshot."""
        self.cluster.slow_disk(slow)
        if not self.job or not self.job.alive():
            self.job = self.user.submit(LONG, nodes=2, ranks=1, run="life")
            self.job.trains()
        self.job.until((self.job.folder / SNAPSHOT).exists, "a snapshot")
        return self.job

    def nodes(self) -> list[str]:
        """Return the nodes in the order of the ranks."""
        return [row["host"] for row in self.job.starts()[-1]["ranks"]]

    def root(self, command: str) -> str:
        return self.cluster.on("login", command, user=False).stdout

    def is_back(self, node: str) -> None:
        """Wait until a lost node is free: processes left there would be killed at the job's next start."""
        self.cluster.slow_disk(10 * SLOW)  # else the job could end meanwhile
        end = time.monotonic() + PATIENCE
        # Ask for all nodes: asked for one, slurmctld does not recount the cores in use (its proc_req.c).
        while f"{node} idle" not in self.user.nodes().split(", ") or self.processes_of_jobs(node):
            assert time.monotonic() < end, f"{node} does not come back: {self.user.nodes()}; {self.processes_of_jobs(node)}"
            time.sleep(0.2)

    def processes_of_jobs(self, node: str) -> str:
        return self.cluster.on(node, ["pgrep", "-f", "^slurmstepd"], user=False).stdout

    def ends_in(self, seconds: int) -> None:
        """Set the time limit to so many seconds from now. slurmctld may not answer at once after losing a node."""

        def set_limit() -> bool:
            end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
            command = f"scontrol update jobid={self.job.id} EndTime={end:%Y-%m-%dT%H:%M:%S}"
            return self.cluster.on("login", command, user=False).returncode == 0

        self.job.until(set_limit, "scontrol to take its time limit")


@pytest.fixture(scope="session")
def life(user) -> Life:
    return Life(user)


@clause("J13")
def test_ranks_meet_over_the_first_interface(check, life, site):
    with holds(check):
        life.training()
        networks = set()
        for node in life.nodes():
            lines = life.cluster.on(node, ["ss", "-Htnp", "state", "established"], user=False).stdout.splitlines()
            networks |= {
                address for line in lines if "python" in line for address in re.findall(rf"{SUBNET}\.(\d+)\.\d+:", line)
            }
        first = interfaces_of(site)[0]
        check.equal(interfaces_between_ranks=({interfaces_of(site)[int(k)] for k in networks}, {first}))


@only(when=lambda site: site.shares_nodes)
@clause("J13")
def test_two_jobs_on_one_node_do_not_meet(check, user):
    """Both start at the same moment, with one rank on each of two nodes: a world of one would meet nobody."""
    with holds(check):
        user.cluster.slow_disk(SLOW)
        nodes = user.cluster.names[-2:]
        jobs = [user.submit(LONG, nodes=2, ranks=1, options=f"--nodelist={','.join(nodes)}") for _ in range(2)]
        for job in jobs:
            job.trains()
        check.equal(both_train=([job.alive() for job in jobs], [True, True]))
        rows = [job.starts()[-1]["ranks"] for job in jobs]
        check.equal(hosts=([[row["host"] for row in of] for of in rows], [nodes] * 2))
        for job in jobs:
            user.cluster.on("login", [user.scheduler.cancels, job.number])
            job.ends()


@clause("J17")
def test_a_second_job_on_its_run_directory_is_refused(check, life):
    with holds(check):
        first = life.training()
        starts = len(first.starts())
        second = life.user.submit(LONG, nodes=1, ranks=1, run="life")
        code = second.ends(90)
        check.equal(exit_code=(code, 3), says=("in use by" in second.log_text(), True))
        check.equal(first_one_lives=(first.alive(), True), starts=(len(first.starts()), starts))


# ---- what happens to it ---------------------------------------------------------------------------------------------


def resumes(check, job: Job, log: str = "") -> None:
    """The job comes back by itself at the step that it saved, with the same flags. log: what it had printed before."""
    __tracebackhide__ = True
    start = job.comes_back()["step"]
    *_, end = (record for record in job.run().records if record["kind"] == "end")
    check.equal(exit_code=(end["exit_code"], 75), resumes_at_step=(start, end["step"]))
    *_, before, again = (record["config"] for record in job.starts())
    changed = {flag: (before[flag], again.get(flag)) for flag in before if again.get(flag) != before[flag]}
    check.equal(flags_of_the_start_before=(changed, {}), its_log_is_kept=(job.log_text().startswith(log), True))


def recovers(check, job: Job, step: int) -> None:
    """The job comes back by itself, at this saved step or a later one."""
    __tracebackhide__ = True
    check.equal(resumes_behind_the_snapshot=(job.comes_back(lost=True)["step"] < step, False))


@clause("J10")
def test_it_comes_back_when_it_is_stopped(check, life):
    with holds(check):
        job = life.training()
        log = job.log_text()
        life.user.stop(job)
        resumes(check, job, log)


@only(when=lambda site: site.toml["job"].get("ends_when_stopped"))
@clause("J10")
def test_it_does_not_come_back_where_that_is_prohibited(check, user, site):
    """A queue for tests may not allow jobs to follow each other: the job says how to resume."""
    for options in site.toml["job"]["ends_when_stopped"]:
        with holds(check):
            user.cluster.slow_disk(SLOW)
            job = user.submit(LONG, nodes=1, ranks=1, options=options)
            job.trains()
            user.stop(job)
            job.until(lambda job=job: not job.alive() or len(job.starts()) > 1 or user.waits(job), "its end")
            state = "in the queue again" if job.alive() else "ended"
            if job.alive():
                user.cluster.on("login", [user.scheduler.cancels, job.number])
            check.equal(**{f"stopped, with {options}, it is": (state, "ended")})
            check.equal(exit_code=(job.code(), 75), says=(bool(GO_ON.search(job.log_text())), True))


@SLURM
@clause("J10")
def test_it_comes_back_after_its_time_limit(check, life):
    """Only the scheduler warns it."""
    with holds(check):
        job = life.training()
        limit = job.fields()["TimeLimit"]
        life.ends_in(100)
        job.until(lambda: life.user.waits(job), "its place in the queue")
        life.root(f"scontrol update jobid={job.id} TimeLimit={limit}")
        resumes(check, job)


@SLURM
@clause("J10")
def test_it_comes_back_when_it_is_preempted(check, life):
    """Its ranks get SIGTERM, and have the partition's grace time."""
    with holds(check):
        job = life.training()
        nodes = ",".join(life.nodes())
        life.root(f"sbatch --partition={URGENT} --exclusive --nodelist={nodes} --output=/dev/null --wrap='sleep 1'")
        resumes(check, job)


def without(check, life, switch: Callable[[str, str], object]) -> None:
    """The job continues without its last node, which is switched "down", and "up" again afterwards."""
    __tracebackhide__ = True
    with holds(check["J14"]):
        job = life.training()
        step, node = whole(job.folder), life.nodes()[-1]
        switch(node, "down")
        try:
            recovers(check["J14"], job, step)
        finally:
            switch(node, "up")
            life.is_back(node)


@SLURM
@clause("J14")
def test_it_comes_back_when_a_node_is_set_down(check, life):
    states = dict(down="down reason=test", up="resume")
    without(check, life, lambda node, to: life.root(f"scontrol update nodename={node} state={states[to]}"))


@clause("J14")
def test_it_comes_back_when_a_node_loses_its_link(check, life, site):
    first = interfaces_of(site)[0]
    without(check, life, lambda node, to: life.cluster.on(node, f"ip link set {first} {to}", user=False))


@clause("J14")
def test_it_comes_back_when_a_node_crashes(check, life):
    """Rank 0's node crashes: the lock of the run directory is then a dead host's."""
    with holds(check):
        job = life.training()
        step = whole(job.folder)
        life.cluster.crash(life.nodes()[0])
        recovers(check, job, step)


@SLURM
@clause("J16")
def test_a_time_limit_shorter_than_the_save(check, life):
    with holds(check):
        job = life.training()
        before = whole(job.folder)
        life.cluster.slow_disk(120)
        life.ends_in(0)
        check.equal(ends_as=(job.ends(), "TIMEOUT"))
        check.equal(snapshot_of_step_or_later=(whole(job.folder) >= before, True))


@clause("J15")
def test_a_cancelled_job_saves_and_does_not_come_back(check, life):
    with holds(check):
        job = life.training()
        step = whole(job.folder)
        life.cluster.on("login", [life.user.scheduler.cancels, job.number])
        code = job.ends()
        check.equal(ends_as=(code, "CANCELLED"), saved=(whole(job.folder) > step, True))
        check.equal(jobs_in_the_queue=(queue(life.cluster), []))


@clause("J14")
def test_its_losses_are_those_of_one_that_nothing_happened_to(check, life):
    with holds(check):
        job = life.training(slow=0)
        check.equal(exit_code=(job.ends(), 0))
        other = life.user.submit(LONG, nodes=2, ranks=1)
        check.equal(exit_code=(other.ends(), 0))
        run, never = job.run(), other.run()
        check.equal(losses=(run.values("step", "loss_hex"), never.values("step", "loss_hex")))
        check.close(run.losses, reference.train(epochs=120, steps=5)["losses"], T1)
        check.equal(snapshot=(sha256(job.folder / SNAPSHOT), sha256(other.folder / SNAPSHOT)))


# ---- what its scheduler takes, and what it refuses -------------------------------------------------------------------


@clause("V11")
def test_what_is_wrong_is_refused(check, cluster, site):
    check.holds(*taken(cluster, site, cluster.put_site()))


@clause("V11")
@only(schedulers=["slurm"])
def test_every_script_is_taken_as_it_stands(check, cluster, site):
    """--test-only also looks for nodes. A held job shows its account and QOS."""
    folder = cluster.put_site()
    queued = site.toml.get("queue", {})
    for script in site.job_scripts:
        asked = cluster.on("login", f"sbatch --test-only {script.name}", folder=folder)
        look = "squeue -h -o '%a %q' -j $job; scancel $job"
        result = cluster.on("login", f"job=$(sbatch --parsable --hold {script.name}) && {{ {look}; }}", folder=folder)
        output = " | ".join(f"{asked.stderr}{result.stderr}".splitlines()[-2:])
        if asked.returncode or result.returncode or result.stderr:
            check.holds(f"{script.name}: refused ({output}), but should be taken as it stands")
        if "account" in queued:
            account, qos = result.stdout.split()
            check.equal(account=(account, queued["account"].lower()))  # Slurm's are lower case
            check.equal(qos_is_one_of_the_site=(qos in queued.get("qos", ["normal"]), True))


@clause("V11")
@only(schedulers=["pbs"])
def test_pbs_takes_its_script_and_keeps_what_can_never_run(check, cluster, site):
    """It refuses too many nodes only where a queue has a limit."""
    folder, script = cluster.put_site(), site.toml["submit"]
    # Without the site's environment the job ends by itself, perhaps before qdel.
    result = cluster.on("login", f"job=$(qsub {script}); code=$?; qdel $job &>/dev/null; exit $code", folder=folder)
    check.equal(exit_code=(result.returncode, 0), errors=(result.stderr, ""))
    ask = f"job=$(qsub -l select={len(cluster.names) + 1} {script}) && qstat -f $job && qdel $job"
    result = cluster.on("login", ask, folder=folder)
    never_runs = "Can Never Run: Not enough total nodes available" in result.stdout
    check.equal(told_that_it_never_runs=(never_runs, True), errors=(result.stderr, ""))

"""A site's job on its virtual cluster: submitted by a user on the login node, and watched by what it leaves.

    job = Submitter(cluster, site, folder).submit("--epochs 3", nodes=2, ranks=1)
    job.until(lambda: job.steps() > 10)

What a job has done stands in run.jsonl of its run directory, whatever the scheduler. Beside the site's own files, these
facts of site.toml count: `submit`, `stop` (the command by which a user has a job save and go back into the queue), and under
[job] `geometry` and `restarts`.
"""

import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from conformance.cluster.schedulers import SCHEDULERS, Slurm, Status, accepted, queued
from conformance.cluster.virtual import USER, VirtualSite
from conformance.harness.sites import Site
from conformance.harness.target import Run, read_records

LOOK = 0.3  # seconds between two looks
PATIENCE = 150.0  # seconds for what takes a tenth of it on a quiet machine


class Odd(Exception):
    """What should have happened has not, in one line."""


@dataclass
class Job:
    """number: as the scheduler has said it. folder: the run directory, as this machine sees it."""

    submitter: "Submitter"
    number: str
    folder: Path
    log: Path
    seen: int  # starts that were waited for, or were there before

    @property
    def id(self) -> str:
        """By which the Slurm that is beneath knows it."""
        return self.number.partition(".")[0]

    # ---- what it leaves ---------------------------------------------------------------------------------------------

    def run(self) -> Run:
        """What it has recorded so far."""
        return Run(self.folder, [], [], [], [], read_records(self.folder))

    def starts(self) -> list[dict]:
        return self.run().of("start")

    def steps(self) -> int:
        """In the last start."""
        kinds = [record["kind"] for record in self.run().records]
        last = len(kinds) - kinds[::-1].index("start") if "start" in kinds else 0
        return kinds[last:].count("step")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        return " | ".join(self.log_text().splitlines()[-6:]) or "nothing"

    # ---- what the scheduler says ------------------------------------------------------------------------------------

    def status(self) -> Status:
        """By the Slurm that is beneath. Raises Odd where nobody answers."""
        end = time.monotonic() + PATIENCE
        while not (status := Slurm.status(self.submitter.run, self.id)):
            if time.monotonic() > end:
                raise Odd(f"scontrol show job {self.id}: no answer for {PATIENCE:g} s")
            time.sleep(LOOK)
        return status

    def fields(self) -> dict[str, str]:
        """The fields of scontrol; empty where the job is known no longer."""
        return self.status().fields

    def alive(self) -> bool:
        status = self.status()
        return status.known and status.code is None

    def code(self) -> int | str | None:
        """The exit code of one that has ended by itself, or Slurm's word for another end."""
        return self.status().code

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Raises Odd with the job's last words where it has ended, or the seconds are over, before that."""
        end, looks = time.monotonic() + seconds, 0
        while not true():
            looks += 1
            # Slurm's commands are processes, and so not asked at each look.
            looked_up = self.number if looks % 4 == 0 and not self.alive() else None
            if true():
                return
            if looked_up == self.number or time.monotonic() > end:  # true() may have come to follow its successor
                state = f"{self.status().state}; nodes: {self.submitter.nodes()}"
                raise Odd(f"job {self.number} is {state}; and {what} was waited for; its log: {self.last_words()}")
            time.sleep(LOOK)

    def trains(self, seconds: float = PATIENCE) -> None:
        """Until it has trained some steps since its last start."""
        self.until(lambda: len(self.starts()) > self.seen and self.steps() > 0, "a start that trains", seconds)
        self.seen = len(self.starts())

    def comes_back(self, lost: bool = False, seconds: float = PATIENCE) -> dict:
        """Until it trains again after it was stopped or has lost a node: its start record.

        Slurm's delay of two minutes is not waited out, but so much of it that nothing which was sent about the start before
        reaches the next, whose steps have the same numbers: to a lost node Slurm sends again and again. And credentials are
        revoked by the second.
        """
        delay, since = 8 if lost else 2, 0.0

        def again() -> bool:
            nonlocal since
            if len(self.starts()) > self.seen and self.steps() > 0:
                return True
            since = (since or time.monotonic()) if self.submitter.waits(self) else 0.0
            if since and time.monotonic() > since + delay:
                self.submitter.hurry(self)
            self.submitter.follow(self)
            return False

        self.until(again, "another start", seconds)
        self.seen = len(self.starts())
        return self.starts()[-1]

    def ends(self, seconds: float = PATIENCE) -> int | str | None:
        end = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > end:
                raise Odd(f"job {self.number} has not ended after {seconds:g} s; its log: {self.last_words()}")
            time.sleep(LOOK)
        return self.code()


def queue(cluster: VirtualSite) -> list[str]:
    """The user's jobs."""
    return queued(lambda *command: cluster.on("login", [*command]), USER)


def taken(cluster: VirtualSite, site: Site, folder: str) -> list[str]:
    """What is wrong with a job, and the scheduler has not refused in its own words."""
    as_user = lambda *command: cluster.on("login", [*command], folder=folder)  # noqa: E731
    return accepted(as_user, site.toml["scheduler"], site.toml["submit"], len(cluster.names) + 1, USER)


class Submitter:
    """A user in the site's folder on the login node."""

    def __init__(self, cluster: VirtualSite, site: Site, folder: str):
        self.cluster, self.site, self.folder = cluster, site, folder
        self.kind = site.toml["scheduler"]
        self.scheduler = SCHEDULERS[self.kind]
        self.here = cluster.home / Path(folder).relative_to(f"/home/{USER}")
        self.count = 0

    def run(self, *command: str) -> CompletedProcess:
        """By root, on the login node."""
        return self.cluster.on("login", [*command], user=False)

    def submit(
        self,
        flags: str,
        nodes: int = 0,
        ranks: int = 0,
        options: str = "",
        run: str = "",
        variables: dict[str, str] | None = None,
    ) -> Job:
        """Raises Odd where the scheduler refuses. nodes: 0 for those of the job script as it stands. ranks: on each.

        run: the name of the run directory, below runs/; its own by default. variables: what the script finds exported.
        """
        self.count += 1
        name = run or f"run-{self.count}"
        whole = [*shlex.split(self.geometry(nodes, ranks) if nodes else ""), *shlex.split(options)]
        for variable, value in (variables or {}).items():
            whole += self.scheduler.variable(variable, value)
        log = f"log-{self.count}"
        whole += self.scheduler.log(log)
        arguments = ["--run-dir", f"runs/{name}", "--device", "cpu", "--log-every", "1", *shlex.split(flags)]
        command = self.scheduler.command(self.site.toml["submit"], whole, arguments)
        answer = self.cluster.on("login", command, folder=self.folder)
        number = self.scheduler.number(answer.stdout)
        if answer.returncode or not number:
            raise Odd(f"{shlex.join(command)} was refused: {(answer.stderr or answer.stdout).strip()}")
        job = Job(self, number, self.here / "runs" / name, self.here / log, seen=0)
        job.seen = len(job.starts())
        return job

    def of_number(self, number: str) -> Job:
        """One that was submitted otherwise, about whose files nothing is known."""
        return Job(self, number, self.here, self.here / "no-such-log", seen=0)

    @property
    def restarts(self) -> str:
        """The variable by which a start is told how often its job was started before."""
        return self.site.toml["job"].get("restarts") or self.scheduler.restarts

    def geometry(self, nodes: int, ranks: int) -> str:
        return self.site.toml["job"].get("geometry", self.scheduler.geometry).format(nodes=nodes, ranks=ranks)

    def stop(self, job: Job) -> None:
        """As README.md tells users to."""
        command = self.site.toml["stop"].format(job=job.number, number=job.id)
        answer = self.cluster.on("login", command, folder=self.folder)
        if answer.returncode:
            raise Odd(f"{command}: exit code {answer.returncode}: {answer.stderr.strip()}")

    def waits(self, job: Job) -> bool:
        """In the queue, and nothing is under way about the start before.

        Its script's exit code would be taken for the next one's, an srun that is killed has its step cancelled, and slurmctld's
        agents bring nodes what they did not take at once.
        """
        left = ["pgrep", "-f", rf"slurmstepd: \[{job.id}\.batch|^srun "]
        if job.fields().get("JobState") != "PENDING":
            return False
        agents = self.run("sdiag").stdout
        if not re.search(r"Agent queue size: *0\n.*Agent count: *0\n", agents, re.DOTALL):
            return False
        return all(self.cluster.on(node, left, user=False).returncode for node in self.cluster.alive())

    def hurry(self, job: Job) -> None:
        """Let it wait no longer."""
        self.run("scontrol", "update", f"jobid={job.id}", "StartTime=now")

    def nodes(self) -> str:
        """Their states, and the reasons of those that take no job."""
        states = self.run("sinfo", "-h", "-N", "-o", "%N %t %E").stdout
        return ", ".join(sorted({line.removesuffix(" none") for line in states.splitlines()}))

    def follow(self, job: Job) -> None:
        """Of a scheduler whose jobs submit a successor, that is the job from now on."""
        if self.kind != "slurm":
            newest = max(map(int, queued(self.run, USER)), default=0)
            if newest > int(job.id):
                job.number = job.number.replace(job.id, str(newest), 1)

"""A site's job on its virtual cluster: a user submits it on the login node, and it is watched by the files it leaves.

    job = Submitter(cluster, site, folder).submit("--epochs 3", nodes=2, ranks=1)
    job.until(lambda: job.steps() > 10)

run.jsonl in the run directory says what a job has done, under every scheduler. Of site.toml these keys are read: `submit`,
`stop` (a user's command that makes a job save and go back into the queue), and under [job] `geometry` and `restarts`.
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
PATIENCE = 150.0  # seconds; on a quiet machine, a tenth of it is enough


class Odd(Exception):
    """Something expected has not happened, in one line."""


@dataclass
class Job:
    """number: as the scheduler printed it. folder: the run directory, as this machine sees it."""

    submitter: "Submitter"
    number: str
    folder: Path
    log: Path
    seen: int  # starts that were waited for, or that were there before the job

    @property
    def id(self) -> str:
        """The number by which the Slurm underneath knows the job."""
        return self.number.partition(".")[0]

    # ---- files that it leaves ---------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Its records so far."""
        return Run(self.folder, [], [], [], [], read_records(self.folder))

    def starts(self) -> list[dict]:
        return self.run().of("start")

    def steps(self) -> int:
        """Steps since the last start."""
        kinds = [record["kind"] for record in self.run().records]
        last = len(kinds) - kinds[::-1].index("start") if "start" in kinds else 0
        return kinds[last:].count("step")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        return " | ".join(self.log_text().splitlines()[-6:]) or "nothing"

    # ---- the scheduler's answers ------------------------------------------------------------------------------------

    def status(self) -> Status:
        """The status in the Slurm underneath. Raises Odd if Slurm does not answer."""
        end = time.monotonic() + PATIENCE
        while not (status := Slurm.status(self.submitter.run, self.id)):
            if time.monotonic() > end:
                raise Odd(f"scontrol show job {self.id}: no answer for {PATIENCE:g} s")
            time.sleep(LOOK)
        return status

    def fields(self) -> dict[str, str]:
        """scontrol's fields; empty once Slurm has forgotten the job."""
        return self.status().fields

    def alive(self) -> bool:
        status = self.status()
        return status.known and status.code is None

    def code(self) -> int | str | None:
        """The exit code of a job that has ended by itself, else Slurm's word for how it ended."""
        return self.status().code

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Wait until true(). Raises Odd with the job's last log lines if the job ends, or the seconds pass, before that."""
        end, looks = time.monotonic() + seconds, 0
        while not true():
            looks += 1
            # Each of Slurm's commands is a process, so ask only at every fourth look.
            looked_up = self.number if looks % 4 == 0 and not self.alive() else None
            if true():
                return
            if looked_up == self.number or time.monotonic() > end:  # true() may have replaced the number by a successor's
                state = f"{self.status().state}; nodes: {self.submitter.nodes()}"
                raise Odd(f"job {self.number} is {state}; and {what} was waited for; its log: {self.last_words()}")
            time.sleep(LOOK)

    def trains(self, seconds: float = PATIENCE) -> None:
        """Wait until it has trained steps since a new start."""
        self.until(lambda: len(self.starts()) > self.seen and self.steps() > 0, "a start that trains", seconds)
        self.seen = len(self.starts())

    def comes_back(self, lost: bool = False, seconds: float = PATIENCE) -> dict:
        """Wait until it trains again after a stop or the loss of a node. Return the new start record.

        Slurm delays a requeued job by two minutes. Wait only a part of that: until no message about the previous start can
        reach the next, whose steps have the same numbers. To a lost node, Slurm sends again and again. Credentials are revoked
        with a resolution of one second.
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
    """The user's jobs in the queue."""
    return queued(lambda *command: cluster.on("login", [*command]), USER)


def taken(cluster: VirtualSite, site: Site, folder: str) -> list[str]:
    """What is wrong with a job, for each faulty option that the scheduler has not refused in its own words."""
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
        """Run a command on the login node, as root."""
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
        """Submit a job. Raises Odd if the scheduler refuses it. nodes: 0 for the job script's own. ranks: per node.

        run: name of the run directory below runs/; default: a new one. variables: exported to the script.
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
        """A job that was submitted in another way. Its files are not known."""
        return Job(self, number, self.here, self.here / "no-such-log", seen=0)

    @property
    def restarts(self) -> str:
        """The variable that says how often a job was started before."""
        return self.site.toml["job"].get("restarts") or self.scheduler.restarts

    def geometry(self, nodes: int, ranks: int) -> str:
        return self.site.toml["job"].get("geometry", self.scheduler.geometry).format(nodes=nodes, ranks=ranks)

    def stop(self, job: Job) -> None:
        """Stop a job as README.md says."""
        command = self.site.toml["stop"].format(job=job.number, number=job.id)
        answer = self.cluster.on("login", command, folder=self.folder)
        if answer.returncode:
            raise Odd(f"{command}: exit code {answer.returncode}: {answer.stderr.strip()}")

    def waits(self, job: Job) -> bool:
        """Pending, with no process or controller message left from the previous start.

        Otherwise the next start could get the old exit code, a killed srun could cancel the new step, or an agent of slurmctld
        could deliver an old message late.
        """
        left = ["pgrep", "-f", rf"slurmstepd: \[{job.id}\.batch|^srun "]
        if job.fields().get("JobState") != "PENDING":
            return False
        agents = self.run("sdiag").stdout
        if not re.search(r"Agent queue size: *0\n.*Agent count: *0\n", agents, re.DOTALL):
            return False
        return all(self.cluster.on(node, left, user=False).returncode for node in self.cluster.alive())

    def hurry(self, job: Job) -> None:
        """End the wait for a new start."""
        self.run("scontrol", "update", f"jobid={job.id}", "StartTime=now")

    def nodes(self) -> str:
        """The nodes' states, with the reasons of nodes that take no job."""
        states = self.run("sinfo", "-h", "-N", "-o", "%N %t %E").stdout
        return ", ".join(sorted({line.removesuffix(" none") for line in states.splitlines()}))

    def follow(self, job: Job) -> None:
        """Where jobs submit a successor (not in Slurm), go on with the newest job."""
        if self.kind != "slurm":
            newest = max(map(int, queued(self.run, USER)), default=0)
            if newest > int(job.id):
                job.number = job.number.replace(job.id, str(newest), 1)

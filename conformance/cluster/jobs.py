"""A site's job on its virtual cluster: submitted by a user on the login node, and watched by what it leaves.

    job = Submitter(cluster, site, folder).submit("--epochs 3", nodes=2, ranks=1)
    job.until(lambda: job.steps() > 10)

What a job has done stands in run.jsonl of its run directory, whatever the scheduler. Beside the site's own files, these
facts of site.toml count: `submit`, `stop` (the command by which a user has a job save and go back into the queue), and under
[job] `geometry` and `restarts`.
"""

import json
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conformance.cluster.virtual import USER, VirtualSite
from conformance.harness.sites import Site
from conformance.harness.submit import SCHEDULERS
from conformance.harness.world import Run

WAITING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
# Options for other nodes and ranks than those of the job script, and the variable that counts starts; [job] may say otherwise.
GEOMETRY = {"slurm": "--nodes={nodes} --ntasks-per-node={ranks}", "pbs": "-l select={nodes}"}
RESTARTS = {"slurm": "SLURM_RESTART_COUNT"}
VARIABLE = {"slurm": "--export=ALL,{}={}", "pbs": "-v {}={}"}
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
        path = self.folder / "run.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half written
        return Run(self.folder, [], [], [], [], [json.loads(line) for line in whole.splitlines()])

    def starts(self) -> list[dict]:
        return self.run().of("start")

    def steps(self) -> int:
        """In the last start."""
        kinds = [record["kind"] for record in self.run().records]
        last = len(kinds) - kinds[::-1].index("start") if "start" in kinds else 0
        return kinds[last:].count("step")

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        return " | ".join(self.said().splitlines()[-6:]) or "nothing"

    # ---- what the scheduler says ------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """Empty where it is known no longer. Raises Odd where nobody answers."""
        end = time.monotonic() + PATIENCE
        while True:
            told = self.submitter.cluster.on("login", ["scontrol", "-o", "show", "job", self.id], user=False)
            if told.returncode == 0 or "Invalid job id" in told.stderr:
                return dict(re.findall(r"(\w+)=(\S*)", told.stdout))
            if time.monotonic() > end:
                raise Odd(f"scontrol show job {self.id}: {told.stderr.strip()}")
            time.sleep(LOOK)

    def alive(self) -> bool:
        return self.facts().get("JobState") in WAITING

    def code(self) -> int | str:
        """The exit code of one that has ended by itself, or Slurm's word for another end."""
        facts = self.facts()
        if facts["JobState"] not in ("COMPLETED", "FAILED"):
            return facts["JobState"]
        code, signal = map(int, facts["ExitCode"].split(":"))
        return 128 + signal if signal else code

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Raises Odd with the job's last words where it has ended, or the seconds are over, before that."""
        end, looks = time.monotonic() + seconds, 0
        while not true():
            looks += 1
            # Slurm's commands are processes, and so not asked at each look.
            ended = self.number if looks % 4 == 0 and not self.alive() else None
            if true():
                return
            if ended == self.number or time.monotonic() > end:  # true() may have come to follow its successor
                facts = self.facts()
                state = f"{facts.get('JobState', 'gone')} ({facts.get('Reason')}; {self.submitter.nodes()})"
                raise Odd(f"job {self.number} is {state} and {what} was waited for; its log: {self.last_words()}")
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

    def ends(self, seconds: float = PATIENCE) -> int | str:
        end = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > end:
                raise Odd(f"job {self.number} has not ended after {seconds:g} s; its log: {self.last_words()}")
            time.sleep(LOOK)
        return self.code()


class Submitter:
    """A user in the site's folder on the login node."""

    def __init__(self, cluster: VirtualSite, site: Site, folder: str):
        self.cluster, self.site, self.folder = cluster, site, folder
        self.kind = site.facts["scheduler"]
        self.scheduler = SCHEDULERS[self.kind]
        self.here = cluster.home / Path(folder).relative_to(f"/home/{USER}")
        self.count = 0

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
            whole += shlex.split(VARIABLE[self.kind].format(variable, value))
        log = f"log-{self.count}"
        whole += [f"--output={log}"] if self.kind == "slurm" else ["-o", log, "-j", "oe"]
        told = ["--run-dir", f"runs/{name}", "--device", "cpu", "--log-every", "1", *shlex.split(flags)]
        command = self.scheduler.command(self.site.facts["submit"], whole, told)
        ended = self.cluster.on("login", command, folder=self.folder)
        number = self.scheduler.number(ended.stdout)
        if ended.returncode or not number:
            raise Odd(f"{shlex.join(command)} was refused: {(ended.stderr or ended.stdout).strip()}")
        job = Job(self, number, self.here / "runs" / name, self.here / log, seen=0)
        job.seen = len(job.starts())
        return job

    @property
    def restarts(self) -> str:
        """The variable by which a start is told how often its job was started before."""
        return self.site.facts["job"].get("restarts") or RESTARTS[self.kind]

    def geometry(self, nodes: int, ranks: int) -> str:
        return self.site.facts["job"].get("geometry", GEOMETRY[self.kind]).format(nodes=nodes, ranks=ranks)

    def stop(self, job: Job) -> None:
        """As README.md tells users to."""
        command = self.site.facts["stop"].format(job=job.number, number=job.id)
        ended = self.cluster.on("login", command, folder=self.folder)
        if ended.returncode:
            raise Odd(f"{command}: exit code {ended.returncode}: {ended.stderr.strip()}")

    def waits(self, job: Job) -> bool:
        """In the queue, and nothing is under way about the start before.

        Its script's exit code would be taken for the next one's, an srun that is killed has its step cancelled, and slurmctld's
        agents bring nodes what they did not take at once.
        """
        left = ["pgrep", "-f", rf"slurmstepd: \[{job.id}\.batch|^srun "]
        if job.facts().get("JobState") != "PENDING":
            return False
        agents = self.cluster.on("login", ["sdiag"], user=False).stdout
        if not re.search(r"Agent queue size: *0\n.*Agent count: *0\n", agents, re.DOTALL):
            return False
        return all(self.cluster.on(node, left, user=False).returncode for node in self.cluster.alive())

    def hurry(self, job: Job) -> None:
        """Let it wait no longer."""
        self.cluster.on("login", ["scontrol", "update", f"jobid={job.id}", "StartTime=now"], user=False)

    def nodes(self) -> str:
        """Their states, and the reasons of those that take no job."""
        told = self.cluster.on("login", ["sinfo", "-h", "-N", "-o", "%N %t %E"], user=False).stdout
        return ", ".join(sorted({line.removesuffix(" none") for line in told.splitlines()}))

    def follow(self, job: Job) -> None:
        """Of a scheduler whose jobs submit a successor, that is the job from now on."""
        if self.kind != "slurm":
            jobs = self.cluster.on("login", ["squeue", "-h", "-o", "%i", "-u", USER], user=False).stdout.split()
            newest = max(map(int, jobs), default=0)
            if newest > int(job.id):
                job.number = job.number.replace(job.id, str(newest), 1)

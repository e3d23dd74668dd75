"""The machine rung: submit a site's own job script from the login node, wait for it, and judge what its runs leave.

    python -m pytest conformance/checks/run --site NAME_OR_FOLDER --submit["=OPTIONS OF sbatch OR qsub"]

Jobs replaces the World of the process rung: its train() submits a job instead of running in ranks. The Python that runs this
needs numpy and pytest, but neither MPI nor torch.
"""

import datetime
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.cluster import schedulers
from conformance.cluster.schedulers import SCHEDULERS, NotSubmitted, Status
from conformance.harness.sites import Launch, Site
from conformance.harness.target import BACKENDS, Run, Target, read_records

POLL = 30.0  # seconds between two questions to a scheduler, at most: it serves everybody
NEWS = 600.0  # seconds after which an unchanged state is printed again
ROWS = 96  # the reference run's global batch
PREFLIGHT = 3  # exit code of train.py and of job scripts: nothing was started
# A node's name in the output of train.py and srun, for a job without a record.
NODE = re.compile(r"\[rank \d+, ([\w.-]+)\]|^srun: error: ([\w.-]+): task", re.MULTILINE)


SUBMITTED = Status("submitted")


@dataclass
class Submitted:
    """A job of ours."""

    number: str
    since: float = field(default_factory=time.monotonic)
    status: Status = SUBMITTED
    news: float = 0  # when its state is printed again
    before: dict[Path, int] = field(default_factory=dict)  # bytes that a log of this name had before the job began


# ---- scheduler commands ---------------------------------------------------------------------------------------------

# Variables that nox, pytest and this suite set. sbatch hands all of them to the job, where they would hide the site's own
# Python and torch.
OURS = re.compile(
    r"VIRTUAL_ENV.*|PYTHON(PATH|HOME|SAFEPATH)|(NOX|PIP|PYTEST|MPIEXEC)_.*|UV_PYTHON|OMP_NUM_THREADS|EXPECT_WORLD"
)


def environment() -> dict[str, str]:
    """This process's environment, as it was before a virtual environment was entered."""
    kept = {name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}
    folders = kept.get("PATH", os.defpath).split(os.pathsep)
    # The file identifies a virtual environment, whether `activate`, nox or its path selected it.
    kept["PATH"] = os.pathsep.join(folder for folder in folders if not (Path(folder).parent / "pyvenv.cfg").is_file())
    return kept


def ask(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    """Run a scheduler's command. Raises NotSubmitted if there is no such command."""
    environ = environment()
    executable = shutil.which(command[0], path=environ["PATH"])
    if not executable:
        raise NotSubmitted(f"no {command[0]} on PATH: --submit is for a login node of the machine")
    whole = [executable, *command[1:]]
    return subprocess.run(whole, cwd=folder, env=environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


# ---- replaces a World -----------------------------------------------------------------------------------------------


class Jobs(Target):
    """Train through one site's job script. Raises NotSubmitted if it cannot be submitted.

    options: for sbatch or qsub. geometry: (nodes, ranks a node); default: [job] of site.toml. device, backend: None and "auto"
    leave them to the job script. timeout: seconds from submission that a job may take. poll: seconds between questions to the
    scheduler, at most. say: called with a line of progress.
    """

    rank = 0  # this process judges alone

    def __init__(
        self,
        site: Site,
        options: str = "",
        geometry: tuple[int, int] | None = None,
        device: str | None = None,
        backend: str = "auto",
        timeout: float = float("inf"),
        poll: float = POLL,
        say: Callable[[str], None] = print,
    ):
        super().__init__()
        self.site, self.asked_device, self.asked_backend, self.timeout, self.say = site, device, backend, timeout, say
        self.poll = poll
        scheduler, self.script = str(site.toml.get("scheduler")), str(site.toml.get("submit"))
        if scheduler not in SCHEDULERS:
            known = " and ".join(SCHEDULERS)
            raise NotSubmitted(f"scheduler={scheduler} in {site.name}'s site.toml: conformance can submit to {known} only")
        self.scheduler = SCHEDULERS[scheduler]
        if not (site.folder / self.script).is_file():
            raise NotSubmitted(f"submit={self.script} in {site.name}'s site.toml: there is no such file in {site.folder}")
        if not shutil.which(self.scheduler.submits, path=environment()["PATH"]):
            raise NotSubmitted(f"no {self.scheduler.submits} on PATH: --submit is for a login node of the machine")
        try:
            self.options = shlex.split(options)
        except ValueError as error:
            raise NotSubmitted(f"--submit={options}: {error}") from None
        job = site.toml.get("job", {})
        self.nodes, self.ranks_per_node = geometry or (job.get("nodes"), job.get("ranks_per_node"))
        if not isinstance(self.nodes, int) or not isinstance(self.ranks_per_node, int):
            raise NotSubmitted(
                f"{site.name}'s site.toml has no nodes and ranks_per_node under [job]: add them, or pass --geometry"
            )
        self.size = self.nodes * self.ranks_per_node
        if self.size < 1 or ROWS % self.size:
            raise NotSubmitted(
                f"{self.nodes} nodes x {self.ranks_per_node} ranks cannot share the reference run's {ROWS} rows a step "
                f"equally: pass --geometry, and in --submit the options that make it so"
            )
        self.jobs: list[Submitted] = []
        self.submitted_ahead: dict[Path, Submitted] = {}
        self.full = False  # True once a job was refused while others of ours were in the queue
        self.first: dict = {}  # the start record of the first run
        self.hosts: set[str] = set()  # the nodes' names
        self._root: Path | None = None

    @property
    def root(self) -> Path:
        """The folder of the runs, below the site's folder, which all nodes see."""
        runs, name = self.site.folder / "runs", f"conformance-{datetime.date.today()}"
        again = 1
        while not self._root:
            folder = runs / (name if again == 1 else f"{name}-{again}")
            try:
                runs.mkdir(exist_ok=True)
                folder.mkdir()
                self._root = folder
            except FileExistsError:
                again += 1
            except OSError as error:
                raise NotSubmitted(f"{folder}: {error.strerror}, but the runs are written there") from None
        return self._root

    # ---- methods of a Target -----------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list:
        return [value]

    def on_rank_0(self, make: Callable[[], Any]) -> Any:
        return make()

    def runs_folder(self, make: Callable[[], Path]) -> Path:
        return self.root

    def train(self, launch: Launch, folder: Path, flags: str) -> Run:
        """Submit, unless ahead() already has, and wait until the job has ended."""
        job = self.submitted_ahead.pop(folder, None) or self._submit_when_there_is_room(folder, flags)
        self._wait(job)
        output = self._read(job, job.status.output)
        if output is None:
            output = f"job {job.number} left no log: {job.status.output} is not there, does its folder exist?"
        errors = output if job.status.errors in (None, job.status.output) else self._read(job, job.status.errors) or output
        if job.status.code == PREFLIGHT:  # every other job would end the same way
            raise NotSubmitted(f"job {job.number} has started nothing (exit code {PREFLIGHT}): {last_words(errors)}")
        code = job.status.code if isinstance(job.status.code, int) else f"{job.status.code}, of job {job.number}"
        records = self._records(folder, code)
        if code == 0 and not records:
            code = f"0, but no run.jsonl in the --run-dir of job {job.number}"
        starts = [record for record in records if record["kind"] == "start"]
        self.first = self.first or next(iter(starts), {})
        self.hosts |= {row["host"] for start in starts for row in start["ranks"]}
        self.hosts |= {host for pair in NODE.findall(errors) for host in pair if host}
        return Run(folder, [code], [output], [errors], [[]], records)

    @property
    def device(self) -> str:  # type: ignore[override]
        """What the ranks should train on: --device, else what the first run says that the job script asks for."""
        config, rows = self.first.get("config", {}), self.first.get("ranks", [{}])
        asked = self.asked_device or config.get("device", "unknown")
        if asked != "auto":
            return asked
        kind = str(rows[0].get("device", "unknown")).partition(":")[0]
        return "an accelerator" if kind == "cpu" and self.site.toml.get("node", {}).get("devices") else kind

    @property
    def backend_in_use(self) -> str:  # type: ignore[override]
        asked = self.first.get("config", {}).get("backend", "auto") if self.asked_backend == "auto" else self.asked_backend
        return BACKENDS.get(self.device, "unknown") if asked == "auto" else asked

    @property
    def devices_visible_to_a_rank(self) -> int:
        return 0 if self.device == "cpu" else self.site.toml.get("node", {}).get("devices_visible_to_a_rank", 0)

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def ahead(self, folder: Path, flags: str) -> None:
        """Submit now what train() will wait for: jobs then share one wait in the queue. If that is full, train() submits."""
        if not self.full:
            try:
                self.submitted_ahead[folder] = self._submit(folder, flags)
            except NotSubmitted as refusal:
                if not self.jobs:
                    raise
                self.full = True
                self.say(f"{refusal}; the others when one of these has ended")

    def _submit_when_there_is_room(self, folder: Path, flags: str) -> Submitted:
        while True:
            try:
                return self._submit(folder, flags)
            except NotSubmitted:
                if not (waiting := next((job for job in self.jobs if job.status.code is None), None)):
                    raise
                self._wait(waiting)

    def _submit(self, folder: Path, flags: str) -> Submitted:
        arguments = ["--log-every", "1", "--run-dir", str(folder), "--backend", self.asked_backend]
        arguments += ["--device", self.asked_device] if self.asked_device else []
        arguments += ["--deterministic"] if self.asked_device != "cpu" else []
        command = self.scheduler.command(self.script, self.options, [*arguments, *flags.split()])
        answer = ask(*command, folder=self.site.folder)
        number = self.scheduler.number(answer.stdout) if answer.returncode == 0 else None
        if not number:
            raise NotSubmitted(f"{command[0]} has refused {self.script}: {last_words(answer.stderr or answer.stdout)}")
        self.jobs.append(job := Submitted(number))
        self.say(f"job {number}: {self.script} {flags}")
        self._look_at(job)
        # Job numbers begin again when a cluster is set up anew. A job may then append to the log of an earlier namesake.
        sizes = {path: path.stat().st_size for path in (job.status.output, job.status.errors) if path and path.is_file()}
        self._look_at(job)
        # If this job still waits, the text there is another's. A running job may have printed since the first look.
        if job.status.code is None and not job.status.state.startswith("R"):
            job.before = sizes
        return job

    def _wait(self, job: Submitted) -> None:
        """Wait until it has ended. Ask about all jobs: a scheduler soon forgets an ended one, and where its log is."""
        pause = 0.5
        while True:
            for each in self.jobs:
                self._look_at(each)
            if job.status.code is not None:
                return
            if time.monotonic() - job.since > self.timeout:
                raise NotSubmitted(f"job {job.number} is still {job.status.state} after {self.timeout:g} s (--submit-timeout)")
            time.sleep(pause)
            pause = min(1.5 * pause, self.poll)

    def _look_at(self, job: Submitted) -> None:
        if job.status.code is None:
            before = job.status
            status = self.scheduler.status(ask, job.number) or before
            job.status = (status if status.known else self.scheduler.status_of_long_ago(ask, job.number)).after(before)
            if job.status.state != before.state or time.monotonic() > job.news:
                job.news = time.monotonic() + NEWS
                waited = datetime.timedelta(seconds=int(time.monotonic() - job.since))
                self.say(f"job {job.number}: {job.status.state} after {waited}")

    def close(self) -> None:
        """Remove the folder if nothing was submitted."""
        if self._root and not self.jobs:
            shutil.rmtree(self._root)

    def left_alone(self) -> str:
        """A line about jobs that are left in the queue, with the command that cancels them."""
        numbers = [job.number for job in self.jobs if job.status.code is None]
        if not numbers:
            return ""
        return f"jobs left as they are: {' '.join(numbers)}; to cancel them: {self.scheduler.cancels} {' '.join(numbers)}"

    @staticmethod
    def _read(job: Submitted, path: Path | None) -> str | None:
        end = time.monotonic() + schedulers.LAG
        while path:
            if path.is_file():
                return path.read_bytes()[job.before.get(path, 0) :].decode(errors="replace")
            if time.monotonic() > end or not path.parent.is_dir():
                break
            time.sleep(0.5)
        return None

    @staticmethod
    def _records(folder: Path, code: int | str) -> list[dict]:
        """A run's records. A shared file system may show the last ones late, so after exit code 0 wait for the end record."""
        end = time.monotonic() + (schedulers.LAG if code == 0 else 0)
        while True:
            try:
                records = read_records(folder)
            except ValueError:  # half a line
                records = []
            if time.monotonic() > end or (records and records[-1]["kind"] == "end"):
                return records
            time.sleep(0.5)

    # ---- for the report ---------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, str]:
        """Of the job's Python, not of this one."""
        return dict(self.first.get("versions", {}))

    def without_hosts(self, text: str) -> str:
        """Replace the nodes' names, which a report must not publish. report/private.py knows only this machine's names."""
        for host in self.hosts:
            text = re.sub(rf"(?<![\w.]){re.escape(host)}(?![\w-])", "<node>", text)
        return text

    def machine(self) -> dict:
        """What kind of machine the ranks found; not its name or owner."""
        rows = self.first.get("ranks", [])
        on_one_node = {row["device"] for row in rows if row["node_rank"] == 0 and row["device_index"] is not None}
        kind = next((device.partition(":")[0] for device in on_one_node), None)
        name = rows[0].get("device_name", kind) if rows else None
        return dict(cores=rows[0]["cores"] if rows else None, accelerator=name, accelerators=len(on_one_node))


def last_words(text: str) -> str:
    """The last three lines that begin with "error", else that contain it, else any: joined to one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = (
        [line for line in lines if line.startswith("error")] or [line for line in lines if "error" in line.lower()] or lines
    )
    return " | ".join(telling[-3:]) or "without a word"


def geometry(text: str) -> tuple[int, int]:
    """(2, 8) for "2x8". Raises ValueError."""
    if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
        raise ValueError(f"--geometry {text}, but should be NODESxRANKS, for example 2x8: 2 nodes with 8 ranks each")
    return int(match[1]), int(match[2])

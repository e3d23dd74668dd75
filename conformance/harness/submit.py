"""The machine rung: a site's own job script, submitted from the login node, waited for, and judged by what its runs leave.

    python -m pytest conformance/checks/test_run.py --site NAME_OR_FOLDER --submit["=OPTIONS OF sbatch OR qsub"]

Jobs stands where the process rung has the ranks of a World: its train() submits. The Python that runs this needs numpy
and pytest, neither MPI nor torch. To another scheduler: a class like Slurm, and its name in SCHEDULERS.
"""

import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.harness.sites import Launch, Site
from conformance.harness.world import BACKENDS, Run, read_records

POLL = 30.0  # seconds between two questions to a scheduler, at most: it serves everybody
NEWS = 600.0  # seconds after which a job's state is told again, though it is the same
LAG = 20.0  # seconds until the login node surely sees what a compute node has written
ROWS = 96  # the reference run's global batch
PREFLIGHT = 3  # "nothing was started", of train.py and of job scripts
# A node as train.py and srun name it, where nothing was recorded.
NODE = re.compile(r"\[rank \d+, ([\w.-]+)\]|^srun: error: ([\w.-]+): task", re.MULTILINE)


class Refusal(Exception):
    """Why nothing can be submitted or waited for, in one line for whoever called: no verdict on the site."""


@dataclass(frozen=True)
class Look:
    """A job at one moment. code: None until it has ended; then its exit code, or the scheduler's word for another end."""

    state: str
    code: int | str | None = None
    output: Path | None = None
    errors: Path | None = None


@dataclass
class Job:
    number: str
    submitted: float = field(default_factory=time.monotonic)
    look: Look = Look("submitted")
    news: float = 0  # when its state is to be told again
    before: dict[Path, int] = field(default_factory=dict)  # bytes in a log of this name, before the job has begun


# ---- schedulers -----------------------------------------------------------------------------------------------------


class Slurm:
    """https://slurm.schedmd.com/sbatch.html"""

    submits, cancels = "sbatch", "scancel"
    # With these the exit code is the script's. Any other end is told by its name, CANCELLED or TIMEOUT or NODE_FAIL.
    BY_ITSELF = ("COMPLETED", "FAILED")
    ENDED = (*BY_ITSELF, "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED")

    @staticmethod
    def command(script: str, options: list[str], flags: list[str]) -> list[str]:
        return ["sbatch", "--parsable", *options, script, *flags]

    @staticmethod
    def number(said: str) -> str | None:
        """Of "17", or "17;cluster", which a site's own messages may stand before."""
        found = re.search(r"^(\d+)(;\S+)?$", said, re.MULTILINE)
        return found and found[1]

    def look(self, number: str, before: Look) -> Look:
        told = ask("scontrol", "show", "job", number)
        if "Invalid job id" in told.stderr:  # ended for longer than MinJobAge, 5 minutes by default
            return self._look_back(number, before)
        state = re.search(r"JobState=(\S+) Reason=(\S+)", told.stdout)
        if not state:
            return before
        paths = {name: Path(path) for name, path in re.findall(r"^ *(StdOut|StdErr)=(.+)$", told.stdout, re.MULTILINE)}
        ended = re.search(r"ExitCode=(\d+:\d+)", told.stdout)
        code = self._code(state[1], ended[1] if ended else "0:0")
        words = state[1] if state[2] == "None" or code is not None else f"{state[1]} ({state[2]})"
        return Look(words, code, paths.get("StdOut"), paths.get("StdErr"))

    def _look_back(self, number: str, before: Look) -> Look:
        """Accounting remembers longer, and hears of it later."""
        end = time.monotonic() + LAG
        while True:
            told = ask("sacct", "-X", "-n", "-P", "-j", number, "-o", "State,ExitCode")
            state, _, ended = (told.stdout.splitlines() or [""])[-1].partition("|")
            if state.split(" ")[0] in self.ENDED:
                return Look(state, self._code(state.split(" ")[0], ended), before.output, before.errors)
            if time.monotonic() > end:
                return Look("gone", "unknown: neither scontrol nor sacct knows the job", before.output, before.errors)
            time.sleep(1)

    def _code(self, state: str, ended: str) -> int | str | None:
        if state not in self.ENDED:
            return None
        code, signal = map(int, ended.split(":"))
        return state if state not in self.BY_ITSELF else 128 + signal if signal else code


class Pbs:
    """https://github.com/openpbs/openpbs/blob/master/doc/man1/pbs_job_attributes.7B (tried with a stand-in only).

    A script has no arguments there: it takes them from TRAIN_ARGS.
    """

    submits, cancels = "qsub", "qdel"

    @staticmethod
    def command(script: str, options: list[str], flags: list[str]) -> list[str]:
        if odd := [flag for flag in flags if re.search(r"[\s,'\"\\]", flag)]:
            raise Refusal(f"{odd[0]}: qsub -v can hand on neither spaces nor commas nor quotes: use a folder without them")
        variables = [f"TRAIN_ARGS={' '.join(flags)}"]
        while "-v" in options[:-1]:  # of several, qsub takes the last alone
            place = options.index("-v")
            variables.insert(-1, options[place + 1])
            options = [*options[:place], *options[place + 2 :]]
        return ["qsub", *options, "-v", ",".join(variables), script]

    @staticmethod
    def number(said: str) -> str | None:
        found = re.search(r"^\d+(\[\])?(\.\S+)?$", said, re.MULTILINE)
        return found and found[0]

    def look(self, number: str, before: Look) -> Look:
        told = ask("qstat", "-x", "-f", number)
        facts = dict(re.findall(r"^ {4}(\w+) = (.*)$", told.stdout.replace("\n\t", ""), re.MULTILINE))
        if "Unknown Job" in told.stderr:
            return Look("gone", "unknown: this PBS keeps no history of jobs", before.output, before.errors)
        if not (state := facts.get("job_state")):
            return before
        output = self._file(facts.get("Output_Path", ""), f"{number}.OU")
        errors = self._file(facts.get("Error_Path", ""), f"{number}.ER")
        joined = facts.get("Join_Path", "n")  # oe: both into Output_Path, eo: into Error_Path, and the other is not made
        output, errors = errors if joined == "eo" else output, output if joined == "oe" else errors
        words = f"{state} ({facts['comment']})" if "comment" in facts and state not in "FX" else state
        return Look(words, self._code(facts) if state in "FX" else None, output, errors)

    @staticmethod
    def _file(path: str, name: str) -> Path | None:
        """Of "host:/folder/train.o17"; where a folder was asked for, this name in it."""
        if not path:
            return None
        found = Path(path.partition(":")[2] or path)
        return found / name if found.is_dir() else found

    @staticmethod
    def _code(facts: dict[str, str]) -> int | str:
        if "Exit_status" not in facts:
            return "none: deleted before it ran"
        code = int(facts["Exit_status"])
        return code - 128 if code > 256 else code  # 256 + the signal; a shell says 128 + it


SCHEDULERS = {"slurm": Slurm, "pbs": Pbs}


# ---- their commands -------------------------------------------------------------------------------------------------

# What nox, pytest and this suite have put into the environment. sbatch hands all of it to the job, where it would hide
# the site's own Python and torch.
OURS = re.compile(
    r"VIRTUAL_ENV.*|PYTHON(PATH|HOME|SAFEPATH)|(NOX|PIP|PYTEST|MPIEXEC)_.*|UV_PYTHON|OMP_NUM_THREADS|EXPECT_WORLD"
)


def environment() -> dict[str, str]:
    """This process's, as it was before a virtual environment was entered."""
    kept = {name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}
    folders = kept.get("PATH", os.defpath).split(os.pathsep)
    # A virtual environment is told by this file, entered by `activate`, by nox, or by its path.
    kept["PATH"] = os.pathsep.join(folder for folder in folders if not (Path(folder).parent / "pyvenv.cfg").is_file())
    return kept


def ask(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    """Run a scheduler's command. Raises Refusal where there is none."""
    environ = environment()
    there = shutil.which(command[0], path=environ["PATH"])
    if not there:
        raise Refusal(f"no {command[0]} on PATH: --submit is for a login node of the machine")
    whole = [there, *command[1:]]
    return subprocess.run(whole, cwd=folder, env=environ, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


# ---- instead of a World ---------------------------------------------------------------------------------------------


class Jobs:
    """One site's job script, for whatever a check wants trained. Raises Refusal where it cannot be submitted.

    options: for sbatch or qsub. geometry: (nodes, ranks a node), [job] of site.toml by default. device, backend: None and
    "auto" leave them to the job script. timeout: seconds that a job may take from being submitted. poll: seconds between two
    questions to the scheduler, at most. say: takes a line of
    progress.
    """

    rank = 0  # whoever judges is alone

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
        self.site, self.told_device, self.told_backend, self.timeout, self.say = site, device, backend, timeout, say
        self.poll = poll
        scheduler, self.script = str(site.facts.get("scheduler")), str(site.facts.get("submit"))
        if scheduler not in SCHEDULERS:
            known = " and ".join(SCHEDULERS)
            raise Refusal(f"scheduler={scheduler} in {site.name}'s site.toml: conformance can submit to {known} only")
        self.scheduler = SCHEDULERS[scheduler]()
        if not (site.folder / self.script).is_file():
            raise Refusal(f"submit={self.script} in {site.name}'s site.toml: there is no such file in {site.folder}")
        if not shutil.which(self.scheduler.submits, path=environment()["PATH"]):
            raise Refusal(f"no {self.scheduler.submits} on PATH: --submit is for a login node of the machine")
        try:
            self.options = shlex.split(options)
        except ValueError as error:
            raise Refusal(f"--submit={options}: {error}") from None
        job = site.facts.get("job", {})
        self.nodes, self.ranks_per_node = geometry or (job.get("nodes"), job.get("ranks_per_node"))
        if not isinstance(self.nodes, int) or not isinstance(self.ranks_per_node, int):
            raise Refusal(f"{site.name}'s site.toml has no nodes and ranks_per_node under [job]: add them, or pass --geometry")
        self.size = self.nodes * self.ranks_per_node
        if self.size < 1 or ROWS % self.size:
            raise Refusal(
                f"{self.nodes} nodes x {self.ranks_per_node} ranks cannot share the reference run's {ROWS} rows a step "
                f"equally: pass --geometry, and in --submit the options that make it so"
            )
        self.plan: list[tuple[str, bool]] = []  # what many checks look at, to be submitted before the first of them
        self.jobs: list[Job] = []
        self.submitted_ahead: dict[Path, Job] = {}
        self.full = False  # whether a job was refused while others of ours were waiting
        self.first: dict = {}  # the start record of the first run
        self.hosts: set[str] = set()  # the nodes' names
        self._root: Path | None = None

    @property
    def root(self) -> Path:
        """Where the runs are: below the site's folder, which all nodes see."""
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
                raise Refusal(f"{folder}: {error.strerror}, but the runs are written there") from None
        return self._root

    # ---- what a World has -------------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list:
        return [value]

    def on_rank_0(self, make: Callable[[], Any]) -> Any:
        return make()

    def train(self, launch: Launch, folder: Path, flags: str) -> Run:
        """Submit, unless it was submitted ahead, and wait until the job has ended."""
        job = self.submitted_ahead.pop(folder, None) or self._submit_when_there_is_room(folder, flags)
        self._wait(job)
        output = self._read(job, job.look.output)
        if output is None:
            output = f"job {job.number} left no log: {job.look.output} is not there, does its folder exist?"
        said = output if job.look.errors in (None, job.look.output) else self._read(job, job.look.errors) or output
        if job.look.code == PREFLIGHT:  # so would be every other job
            raise Refusal(f"job {job.number} has started nothing (exit code {PREFLIGHT}): {last_words(said)}")
        code = job.look.code if isinstance(job.look.code, int) else f"{job.look.code}, of job {job.number}"
        records = self._records(folder, code)
        if code == 0 and not records:
            code = f"0, but no run.jsonl in the --run-dir of job {job.number}"
        starts = [record for record in records if record["kind"] == "start"]
        self.first = self.first or next(iter(starts), {})
        self.hosts |= {row["host"] for start in starts for row in start["ranks"]}
        self.hosts |= {host for pair in NODE.findall(said) for host in pair if host}
        return Run(folder, [code], [output], [said], [[]], records)

    @property
    def device(self) -> str:
        """What the ranks are to train on: --device, or else what the job script asks for, as its first run tells."""
        config, rows = self.first.get("config", {}), self.first.get("ranks", [{}])
        asked = self.told_device or config.get("device", "unknown")
        if asked != "auto":
            return asked
        found = str(rows[0].get("device", "unknown")).partition(":")[0]
        return "an accelerator" if found == "cpu" and self.site.facts.get("node", {}).get("devices") else found

    @property
    def backend_in_use(self) -> str:
        asked = self.first.get("config", {}).get("backend", "auto") if self.told_backend == "auto" else self.told_backend
        return BACKENDS.get(self.device, "unknown") if asked == "auto" else asked

    @property
    def devices_visible_to_a_rank(self) -> int:
        return self.site.facts.get("node", {}).get("devices_visible_to_a_rank", 0)

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def ahead(self, folder: Path, flags: str) -> None:
        """Submit now what train() will wait for: a queue is waited for once. Where it takes no more, train() does it later."""
        if not self.full:
            try:
                self.submitted_ahead[folder] = self._submit(folder, flags)
            except Refusal as refusal:
                if not self.jobs:
                    raise
                self.full = True
                self.say(f"{refusal}; the others when one of these has ended")

    def _submit_when_there_is_room(self, folder: Path, flags: str) -> Job:
        while True:
            try:
                return self._submit(folder, flags)
            except Refusal:
                if not (waiting := next((job for job in self.jobs if job.look.code is None), None)):
                    raise
                self._wait(waiting)

    def _submit(self, folder: Path, flags: str) -> Job:
        told = ["--log-every", "1", "--run-dir", str(folder), "--backend", self.told_backend]
        told += ["--device", self.told_device] if self.told_device else []
        told += ["--deterministic"] if self.told_device != "cpu" else []
        command = self.scheduler.command(self.script, self.options, [*told, *flags.split()])
        said = ask(*command, folder=self.site.folder)
        number = self.scheduler.number(said.stdout) if said.returncode == 0 else None
        if not number:
            raise Refusal(f"{command[0]} has refused {self.script}: {last_words(said.stderr or said.stdout)}")
        self.jobs.append(job := Job(number))
        self.say(f"job {number}: {self.script} {flags}")
        self._look_at(job)
        # Job numbers begin again when a cluster is set up anew, and a job may append to its namesake's log.
        sizes = {path: path.stat().st_size for path in (job.look.output, job.look.errors) if path and path.is_file()}
        self._look_at(job)
        # What stood there is another job's if this one waits even now: it may have begun, and printed, since the first look.
        if job.look.code is None and not job.look.state.startswith("R"):
            job.before = sizes
        return job

    def _wait(self, job: Job) -> None:
        """Until it has ended. All are looked at: a scheduler soon forgets where the log of one is that has ended."""
        pause = 0.5
        while True:
            for each in self.jobs:
                self._look_at(each)
            if job.look.code is not None:
                return
            if time.monotonic() - job.submitted > self.timeout:
                raise Refusal(f"job {job.number} is still {job.look.state} after {self.timeout:g} s (--submit-timeout)")
            time.sleep(pause)
            pause = min(1.5 * pause, self.poll)

    def _look_at(self, job: Job) -> None:
        if job.look.code is None:
            before, job.look = job.look, self.scheduler.look(job.number, job.look)
            if job.look.state != before.state or time.monotonic() > job.news:
                job.news = time.monotonic() + NEWS
                waited = datetime.timedelta(seconds=int(time.monotonic() - job.submitted))
                self.say(f"job {job.number}: {job.look.state} after {waited}")

    def close(self) -> None:
        """Leave no folder where nothing was submitted."""
        if self._root and not self.jobs:
            shutil.rmtree(self._root)

    def left_alone(self) -> str:
        """What to say of jobs that nobody waits for any more."""
        numbers = [job.number for job in self.jobs if job.look.code is None]
        if not numbers:
            return ""
        return f"jobs left as they are: {' '.join(numbers)}; to cancel them: {self.scheduler.cancels} {' '.join(numbers)}"

    @staticmethod
    def _read(job: Job, path: Path | None) -> str | None:
        end = time.monotonic() + LAG
        while path:
            if path.is_file():
                return path.read_bytes()[job.before.get(path, 0) :].decode(errors="replace")
            if time.monotonic() > end or not path.parent.is_dir():
                break
            time.sleep(0.5)
        return None

    @staticmethod
    def _records(folder: Path, code: int | str) -> list[dict]:
        """Of a run that has trained to its end, all of them: a shared file system may show the last ones late."""
        end = time.monotonic() + (LAG if code == 0 else 0)
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
        """The nodes are nobody's business; report.py knows the names of this machine only."""
        for host in self.hosts:
            text = re.sub(rf"(?<![\w.]){re.escape(host)}(?![\w-])", "<node>", text)
        return text

    def machine(self) -> dict:
        """What kind of machine the ranks have found, and not whose."""
        rows = self.first.get("ranks", [])
        on_one_node = {row["device"] for row in rows if row["node_rank"] == 0 and row["device_index"] is not None}
        kind = next((device.partition(":")[0] for device in on_one_node), None)
        name = rows[0].get("device_name", kind) if rows else None
        return dict(cores=rows[0]["cores"] if rows else None, accelerator=name, accelerators=len(on_one_node))


def last_words(text: str) -> str:
    """The lines that tell of errors, train.py's and the job script's before others', or else the last ones, as one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = (
        [line for line in lines if line.startswith("error")] or [line for line in lines if "error" in line.lower()] or lines
    )
    return " | ".join(telling[-3:]) or "without a word"


def geometry(text: str) -> tuple[int, int]:
    """Of "2x8". Raises ValueError."""
    if not (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
        raise ValueError(f"--geometry {text}, but should be NODESxRANKS, for example 2x8: 2 nodes with 8 ranks each")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    sys.exit(__doc__)

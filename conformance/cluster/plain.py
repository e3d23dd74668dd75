"""A job as a user submits it: the unchanged job script, without a flag or variable of this suite, watched from outside.

    job = Plain(user, site.cases[0]); job.runs(); job.faults()

Little depends on what a site says about itself. The kernel says where ranks are; Slurm, on which nodes; their processes, how
many. The training is compared with NumPy's, through the snapshot's history, under a random seed and learning rate.
Only `--device cpu` is no user's flag: virtual nodes have no accelerator.
"""

import json
import random
import shlex
import time
from pathlib import Path

from conformance.cluster import layer, placement
from conformance.cluster.jobs import Odd, Submitter
from conformance.cluster.shape import devices_of
from conformance.harness import reference
from conformance.harness.check import T2
from conformance.harness.core_of import CORE, digests
from conformance.harness.reference import take_apart
from conformance.harness.sites import Case
from conformance.harness.target import read_records

SNAPSHOT = "snapshot.safetensors"
EPOCHS = 1
# Root runs this on a node. It finds each Python that runs PROGRAM in a step of job JOB, and prints its allowed CPUs and the
# variables NAMES of its environment.
LOOK = r"""
import json, os, re

def of_the_job(pid):
    while pid > 1:
        if "slurmstepd: [JOB." in open(f"/proc/{pid}/cmdline").read():
            return True
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    return False

for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read().decode(errors="replace").split("\0")
        program = [word for word in words[1:] if not word.startswith("-")][:1]
        if not re.match(r"python", os.path.basename(words[0])) or not program or os.path.basename(program[0]) != PROGRAM:
            continue
        if not of_the_job(int(pid)):
            continue
        pairs = open(f"/proc/{pid}/environ", "rb").read().decode(errors="replace").split("\0")
        environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        cpus = sorted(os.sched_getaffinity(int(pid)))
        print(json.dumps(dict(cpus=cpus, environ={name: environ.get(name) for name in NAMES})))
    except OSError:
        pass
"""


def listing(folder: Path) -> dict[str, tuple]:
    """Sizes and times of files, which show what was written. Left out: Python's caches, and the PBS stand-in's files."""
    entries = {}
    for path in folder.rglob("*"):
        if "__pycache__" not in path.parts and ".pbs-stand-in" not in path.parts and not path.is_dir():
            status = path.lstat()
            entries[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return entries


class Plain:
    """One job. user: in the site's folder, after install.sh. nodes, ranks: if `options` ask for others than the script.

    slow: seconds of an fsync while it runs; None if other jobs run beside it. watched: the folder that it alone may change.
    """

    def __init__(
        self,
        user: Submitter,
        case: Case,
        options: str = "",
        nodes: int = 0,
        ranks: int = 0,
        slow: float | None = 4.0,
        watched: Path | None = None,
    ):
        self.user, self.case, self.site, self.cluster = user, case, user.site, user.cluster
        self.seed, self.lr = random.SystemRandom().randrange(1, 10**6), round(random.SystemRandom().uniform(0.05, 0.1), 4)
        self.flags = f"--epochs {EPOCHS} --seed {self.seed} --lr {self.lr}"
        self.slow, self.home = slow, watched or user.cluster.home
        self.options = " ".join(filter(None, (case.options, options)))
        self.nodes, self.ranks = nodes or case.nodes, ranks or case.ranks_per_node
        self.rows: list[placement.Row] = []
        self.allocated: list[str] = []
        self.code: int | str | None = None

    # ---- it runs ----------------------------------------------------------------------------------------------------

    def submit(self) -> "Plain":
        """Submit it. Raises Odd if the scheduler refuses."""
        script = self.user.here / self.case.script
        self.before, text = listing(self.home), script.read_text()
        options = shlex.split(self.options)
        for name, value in self.case.environment.items():
            options += self.user.scheduler.variable(name, value)
        command = self.user.scheduler.command(self.case.script, options, ["--device", "cpu", *shlex.split(self.flags)])
        try:
            script.write_text(self.case.edited(text))  # Slurm and PBS copy the script when it is submitted
            result = self.cluster.on("login", command, folder=self.user.folder)
        finally:
            script.write_text(text)
        self.before[str(script.relative_to(self.home))] = listing(script.parent)[script.name]
        number = self.user.scheduler.number(result.stdout)
        if result.returncode or not number:
            self.code = "refused"
            raise Odd(f"{shlex.join(command)} was refused: {(result.stderr or result.stdout).strip()}")
        self.job = self.user.of_number(number)
        return self

    def changed(self) -> dict[str, str]:
        """Paths below the user's home that are new, changed or gone since submission."""
        now = listing(self.home)
        new = {
            path: "is new" if path not in self.before else "was changed" for path in now if now[path] != self.before.get(path)
        }
        return new | {path: "is gone" for path in self.before if path not in now}

    def run_directories(self) -> list[Path]:
        """Run directories that it has made. Only the job script knows their names."""
        new = {path for path, how in self.changed().items() if path.endswith("/run.jsonl") and how == "is new"}
        return sorted(self.home / Path(path).parent for path in new)

    def runs(self, seconds: float = 270) -> "Plain":
        """Wait until it has ended. Look at the ranks once they have met: torch is imported then, and may have moved them."""
        self.set_disk(self.slow)  # a snapshot then takes twice this time, without work: time to look
        end = time.monotonic() + seconds
        try:
            while self.job.alive():
                if not self.rows and any(
                    record["kind"] == "start" for each in self.run_directories() for record in records(each)
                ):
                    self.look()
                    self.set_disk(0)
                if time.monotonic() > end:
                    raise Odd(f"job {self.job.number} has not ended after {seconds:g} s; {self.words()}")
                time.sleep(0.3)
        finally:
            self.set_disk(0)
        self.code = self.job.code()
        return self

    def set_disk(self, seconds: float | None) -> None:
        if self.slow is not None:
            self.cluster.slow_disk(seconds)

    def look(self) -> None:
        variable_of = placement.told_by(self.case.launch)
        devices = placement.device_variable(self.site)
        names = [*variable_of.values(), devices]
        text = LOOK.replace("PROGRAM", repr(self.case.program)).replace("NAMES", repr(names)).replace("JOB", self.job.id)
        lines = []
        for node in self.cluster.names:
            result = self.cluster.on(node, [f"{layer.PLAIN}/bin/python3", "-c", text], user=False)
            for process in map(json.loads, result.stdout.splitlines()):
                environ = process.pop("environ")
                if all(environ[name] for name in variable_of.values()):
                    process |= {word: int(environ[name]) for word, name in variable_of.items()}
                    visible = [int(device) for device in (environ.get(devices) or "").split(",") if device]
                    lines.append(json.dumps(process | dict(host=node, visible=visible)))
        self.rows = placement.rows_of(lines)
        listed = self.cluster.on("login", f"scontrol show hostnames $(squeue -h -j {self.job.id} -o %N)", user=False)
        self.allocated = listed.stdout.split()

    def words(self) -> str:
        """The last lines of its log: of files beside the job script that are new or changed."""
        logs = [self.home / path for path, how in self.changed().items() if how != "is gone"]
        texts = [log.read_text(errors="replace") for log in logs if log.parent == self.user.here]
        return " | ".join("\n".join(texts).strip().splitlines()[-5:]) or "no log"

    # ---- what is wrong ----------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Faults in its training, its ranks and its files (J18), a line each."""
        drawn = f"{self.case.name}, {self.flags}"
        if self.code != 0:
            return [f"exit code={self.code}, but should be 0 [{drawn}]; its log: {self.words()}"]
        folders = self.run_directories()
        if len(folders) != 1 or self.job.id not in folders[0].name:
            names = [folder.name for folder in folders]
            return [f"new run directories={names}, but should be one with the job's number, {self.job.id} [{drawn}]"]
        return [
            f"{fault} [{drawn}]"
            for fault in (*self.of_losses(folders[0]), *self.of_ranks(folders[0]), *self.of_files(folders[0]))
        ]

    def before_install(self) -> list[str]:
        """Faults of a job that was submitted before install.sh has run (J19)."""
        faults = [f"exit code={self.code}, but should be 3"] if self.code != 3 else []
        return faults if "install.sh" in self.words() else [*faults, f"install.sh is not named in its log: {self.words()}"]

    def of_losses(self, folder: Path) -> list[str]:
        history = take_apart(folder / SNAPSHOT)["document"]["history"]
        return reference.not_the_history(history, T2["cpu"], seed=self.seed, lr=self.lr, epochs=EPOCHS)

    def of_ranks(self, folder: Path) -> list[str]:
        """Compare the processes that were seen, the ranks in the run's record, and the nodes that Slurm gave."""
        size, faults = self.nodes * self.ranks, []
        (start,) = [record for record in read_records(folder) if record["kind"] == "start"]
        seen = sorted((row.rank, row.host) for row in self.rows)
        compared = dict(
            processes_of_train_py=(len(self.rows), size),
            ranks_seen=([rank for rank, _ in seen], [*range(size)]),
            world_size_in_the_snapshot=(take_apart(folder / SNAPSHOT)["document"]["world_size"], size),
            hosts_recorded=([row["host"].partition(".")[0] for row in start["ranks"]], [host for _, host in seen]),
            nodes_with_ranks=(len({host for _, host in seen} & {*self.allocated}), self.nodes),
        )
        for name, (value, should_be) in compared.items():
            if value != should_be:
                faults.append(f"{name}={value}, but should be {should_be}")
        return faults

    def of_files(self, folder: Path) -> list[str]:
        """Besides the run directory, a job may leave one log, in the site's folder."""
        of_the_run = str(folder.relative_to(self.home))
        rest = {path: how for path, how in self.changed().items() if not path.startswith(f"{of_the_run}/")}
        logs = [path for path, how in rest.items() if how == "is new" and (self.home / path).parent == self.user.here]
        if logs:
            rest.pop(min(logs, key=lambda path: self.job.id not in path))
        temporary = [path.name for path in folder.iterdir() if path.name.endswith(".tmp") or path.name.startswith(".")]
        faults = [
            f"~/{path} {how}, but a job should leave its log and its run directory only" for path, how in sorted(rest.items())
        ]
        return [*faults[:3], *(f"{name} is left in the run directory" for name in temporary)]

    def misplaced(self) -> list[str]:
        """Faults in placement (J9). The case has the script's own geometry, and its launcher binds its ranks."""
        return [*placement.misplaced(self.site, self.rows), *placement.doubled(self.site, self.rows, "core")]

    def sharing(self) -> list[str]:
        none = [f"rank {row.rank}, {row.host}: no device, but should have one" for row in self.rows if not row.visible]
        return [*(none if devices_of(self.site) else []), *placement.doubled(self.site, self.rows, "device")]


def records(folder: Path) -> list[dict]:
    try:
        return read_records(folder)
    except (OSError, ValueError):  # half a line
        return []


def of_the_core(folder: Path) -> list[str]:
    """Copies of the core below the site's folder that differ from this repository's, and files that every Python start runs."""
    should_be, faults = digests(CORE), []
    copies = [path for path in folder.rglob("ddp_core") if path.is_dir() and not path.is_symlink()]
    for copy in copies:
        own = digests(copy)
        odd = sorted(name for name in {*own, *should_be} if own.get(name) != should_be.get(name))
        faults += [f"{copy.relative_to(folder)}/{name} is not this repository's" for name in odd[:3]]
    started = [path for name in ("sitecustomize.py", "usercustomize.py") for path in folder.rglob(name)]
    faults += [f"{path.relative_to(folder)} is started with every Python" for path in started if "conda-meta" not in path.parts]
    return faults if copies else ["no copy of ddp_core was installed"]

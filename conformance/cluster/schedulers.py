"""A scheduler's commands, and the meaning of their answers. There is one class for each; callers pass a function `run`.

    SCHEDULERS["slurm"].status(run, "17", before)      run(*words) gives a CompletedProcess

To add a scheduler: write a class like Slurm, and add its name to SCHEDULERS.
"""

import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

LAG = 20.0  # seconds until accounting knows a job, and until the login node sees a compute node's files
Ask = Callable[..., CompletedProcess]


class NotSubmitted(Exception):
    """Why nothing can be submitted or waited for, in one line for the caller. It is no verdict on the site."""


@dataclass(frozen=True)
class Status:
    """A job at one moment. state: the scheduler's words, with its reason. code: None until the job ends, then its exit code or
    the scheduler's word for another end. known: False once the scheduler has forgotten the job.
    """

    state: str
    code: int | str | None = None
    output: Path | None = None
    errors: Path | None = None
    known: bool = True
    fields: dict[str, str] = field(default_factory=dict)

    def after(self, other: "Status") -> "Status":
        """With the files of an earlier look, where this one names none."""
        return Status(self.state, self.code, self.output or other.output, self.errors or other.errors, self.known, self.fields)


class Slurm:
    """https://slurm.schedmd.com/sbatch.html"""

    submits, cancels = "sbatch", "scancel"
    geometry = "--nodes={nodes} --ntasks-per-node={ranks}"
    restarts = "SLURM_RESTART_COUNT"
    hold = "--hold"
    # In these states the exit code is the script's. Other ends have only a name: CANCELLED, TIMEOUT, NODE_FAIL.
    BY_ITSELF = ("COMPLETED", "FAILED")
    ENDED = (*BY_ITSELF, "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED")
    # Options that make a job faulty, and the scheduler's words for each fault.
    REFUSES = {
        "--account=nobodys": "Invalid account or account/partition combination specified",
        "--qos=nobodys": "Invalid qos specification",
        "--partition=nowhere": "invalid partition specified: nowhere",
        "--constraint=nothing": "Invalid feature specification",
        "--nodes={more}": "More processors requested than permitted|Node count specification invalid",
    }

    @staticmethod
    def command(script: str, options: list[str], flags: list[str]) -> list[str]:
        return ["sbatch", "--parsable", *options, script, *flags]

    @staticmethod
    def log(file: str) -> list[str]:
        return [f"--output={file}"]

    @staticmethod
    def variable(name: str, value: str) -> list[str]:
        return [f"--export=ALL,{name}={value}"]

    @staticmethod
    def number(printed: str) -> str | None:
        """The number in "17" or "17;cluster"; a site's own messages may come before it."""
        match = re.search(r"^(\d+)(;\S+)?$", printed, re.MULTILINE)
        return match and match[1]

    @classmethod
    def status(cls, run: Ask, number: str) -> Status | None:
        """None if Slurm does not answer."""
        answer = run("scontrol", "-o", "show", "job", number)
        if "Invalid job id" in answer.stderr:  # a job that ended more than MinJobAge ago, 5 minutes by default
            return Status("gone", known=False)
        fields = dict(re.findall(r"(?:^| )([A-Z]\w*)=((?:(?! [A-Z]\w*=).)*)", answer.stdout.strip()))
        if not (state := fields.get("JobState")):
            return None
        code, reason = cls.code(state, fields.get("ExitCode", "0:0")), fields.get("Reason", "None")
        words = state if reason == "None" or code is not None else f"{state} ({reason})"
        output, errors = (Path(fields[name]) if name in fields else None for name in ("StdOut", "StdErr"))
        return Status(words, code, output, errors, fields=fields)

    @classmethod
    def status_of_long_ago(cls, run: Ask, number: str) -> Status:
        """The status from accounting, which remembers a job longer, and learns of it later."""
        end = time.monotonic() + LAG
        while True:
            answer = run("sacct", "-X", "-n", "-P", "-j", number, "-o", "State,ExitCode")
            state, _, exit_code = (answer.stdout.splitlines() or [""])[-1].partition("|")
            if state.split(" ")[0] in cls.ENDED:
                return Status(state, cls.code(state.split(" ")[0], exit_code))
            if time.monotonic() > end:
                return Status("gone", "unknown: neither scontrol nor sacct knows the job")
            time.sleep(1)

    @classmethod
    def code(cls, state: str, exit_code: str) -> int | str | None:
        if state not in cls.ENDED:
            return None
        code, signal = map(int, exit_code.split(":"))
        return state if state not in cls.BY_ITSELF else 128 + signal if signal else code


class Pbs:
    """https://github.com/openpbs/openpbs/blob/master/doc/man1/pbs_job_attributes.7B (tried with a stand-in only).

    A PBS script has no arguments: it takes them from TRAIN_ARGS.
    """

    submits, cancels = "qsub", "qdel"
    geometry = "-l select={nodes}"
    restarts = None
    hold = "-h"
    # PBS has no QOS, and no accounts of its own.
    REFUSES = {
        "-q nowhere": "Unknown queue",
        "-l qos=nobodys": "Unknown resource Resource_List.qos",
    }

    @staticmethod
    def command(script: str, options: list[str], flags: list[str]) -> list[str]:
        if odd := [flag for flag in flags if re.search(r"[\s,'\"\\]", flag)]:
            raise NotSubmitted(f"{odd[0]}: qsub -v can hand on neither spaces nor commas nor quotes: use a folder without them")
        variables = [f"TRAIN_ARGS={' '.join(flags)}"]
        while "-v" in options[:-1]:  # qsub uses only the last -v
            place = options.index("-v")
            variables.insert(-1, options[place + 1])
            options = [*options[:place], *options[place + 2 :]]
        return ["qsub", *options, "-v", ",".join(variables), script]

    @staticmethod
    def log(file: str) -> list[str]:
        return ["-o", file, "-j", "oe"]

    @staticmethod
    def variable(name: str, value: str) -> list[str]:
        return ["-v", f"{name}={value}"]

    @staticmethod
    def number(printed: str) -> str | None:
        match = re.search(r"^\d+(\[\])?(\.\S+)?$", printed, re.MULTILINE)
        return match and match[0]

    @classmethod
    def status(cls, run: Ask, number: str) -> Status | None:
        """None if PBS does not answer."""
        answer = run("qstat", "-x", "-f", number)
        fields = dict(re.findall(r"^ {4}([\w.]+) = (.*)$", answer.stdout.replace("\n\t", ""), re.MULTILINE))
        if "Unknown Job" in answer.stderr:
            return Status("gone", known=False)
        if not (state := fields.get("job_state")):
            return None
        output = cls.file(fields.get("Output_Path", ""), f"{number}.OU")
        errors = cls.file(fields.get("Error_Path", ""), f"{number}.ER")
        joined = fields.get("Join_Path", "n")  # oe: both go to Output_Path; eo: both to Error_Path. The other file is not made.
        output, errors = errors if joined == "eo" else output, output if joined == "oe" else errors
        words = f"{state} ({fields['comment']})" if "comment" in fields and state not in "FX" else state
        return Status(words, cls.code(fields) if state in "FX" else None, output, errors, fields=fields)

    @staticmethod
    def status_of_long_ago(run: Ask, number: str) -> Status:
        return Status("gone", "unknown: this PBS keeps no history of jobs")

    @staticmethod
    def file(path: str, name: str) -> Path | None:
        """The file of "host:/folder/train.o17"; if the path is a folder, this name in it."""
        if not path:
            return None
        file = Path(path.partition(":")[2] or path)
        return file / name if file.is_dir() else file

    @staticmethod
    def code(fields: dict[str, str]) -> int | str:
        if "Exit_status" not in fields:
            return "none: deleted before it ran"
        code = int(fields["Exit_status"])
        return code - 128 if code > 256 else code  # PBS says 256 + signal, a shell 128 + signal


SCHEDULERS: dict[str, Any] = {"slurm": Slurm, "pbs": Pbs}


# ---- faulty jobs, to be refused -------------------------------------------------------------------------------------


def queued(run: Ask, user: str) -> list[str]:
    """The user's jobs in Slurm, which runs underneath every virtual cluster."""
    return sorted(run("squeue", "-h", "-a", "-u", user, "-o", "%i").stdout.split())


def accepted(run: Ask, name: str, script: str, nodes: int, user: str) -> list[str]:
    """Faulty jobs that the scheduler has not refused in its own words, a line each. nodes: more than there are."""
    scheduler, before, violations = SCHEDULERS[name], queued(run, user), []
    for wish, words in scheduler.REFUSES.items():
        option = wish.format(more=nodes)
        held = [scheduler.hold] if name == "slurm" else []
        answer = run(scheduler.submits, *held, *shlex.split(option), script)
        text = f"{answer.stdout}{answer.stderr}".strip()
        if answer.returncode == 0 or not re.search(words, text):
            violations.append(f"{option}: exit code {answer.returncode}, {text!r}, but should be refused with {words!r}")
    if left := [job for job in queued(run, user) if job not in before]:
        run("scancel", *left)
        violations.append(f"jobs in the queue={left}, but should be none")
    return violations

"""Stand-ins for a scheduler's commands and for a launcher, so that test_submit.py can submit on any machine.

They start the given job script on this machine, one job at a time, and remember how it ended. They print what Slurm 22.05 and
OpenPBS print. They are no scheduler: a test with them shows something about conformance only.

    python conformance/harness/stand_in.py install FOLDER

makes in FOLDER/bin: sbatch, scontrol, sacct, scancel, qsub, qstat, march, python3
"""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SPOOL = Path(os.environ.get("STAND_IN", "."))
COMMANDS = ("sbatch", "scontrol", "sacct", "scancel", "qsub", "qstat", "march")


def install(folder: str) -> int:
    """Write the commands. python3 is this Python with its torch, as from a module: its folder is no virtual environment's."""
    bin_ = Path(folder, "bin")
    bin_.mkdir(parents=True)
    calls = {name: f'{shlex.quote(sys.executable)} -S -E {shlex.quote(__file__)} {name} "$@"' for name in COMMANDS}
    for name, call in (calls | {"python3": f'{shlex.quote(sys.executable)} "$@"'}).items():
        (bin_ / name).write_text(f"#!/bin/sh\nexport STAND_IN={shlex.quote(folder)}\nexec {call}\n")
        (bin_ / name).chmod(0o755)
    return 0


# ---- jobs -----------------------------------------------------------------------------------------------------------


def job_file(number: str) -> Path:
    return SPOOL / f"job-{number.partition('.')[0]}.json"


def read(number: str) -> Any:
    """A job, or None."""
    return json.loads(job_file(number).read_text()) if job_file(number).exists() else None


def write(job: dict) -> dict:
    fresh = job_file(job["number"]).with_suffix(".new")
    fresh.write_text(json.dumps(job))
    fresh.replace(job_file(job["number"]))
    return job


def queue(**job) -> str:
    """Take a script, and start it once no other job runs."""
    held = job.pop("held")
    number = str(len(list(SPOOL.glob("job-*.json"))) + 1)
    write(job | dict(number=number, state="PENDING", reason="JobHeldUser" if held else "Resources", code=0))
    if not held:
        nowhere: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.Popen([sys.executable, __file__, "start", number], start_new_session=True, **nowhere)
    return number


def start(number: str) -> int:
    while os.environ.get("STAND_IN_WAITS") and not (SPOOL / f"asked-{number}").exists():
        time.sleep(0.02)
    with open(SPOOL / "one-at-a-time", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = write(read(number) | dict(state="RUNNING", reason="None"))
        environ = job["environ"] | {name: value.format(number=number) for name, value in job["variables"].items()}
        with open(job["log"].replace("%j", number), "a") as log:
            script = subprocess.Popen(
                ["bash", *job["script"]], cwd=job["folder"], env=environ, stdout=log, stderr=log, start_new_session=True
            )
            write(job | dict(process=script.pid))
            code = script.wait()
        if read(number)["state"] == "RUNNING":
            write(job | dict(state="COMPLETED" if code == 0 else "FAILED", reason="None", code=code))
    return 0


def no_room() -> bool:
    states = [json.loads(path.read_text())["state"] for path in SPOOL.glob("job-*.json")]
    return sum(state in ("PENDING", "RUNNING") for state in states) >= int(os.environ.get("STAND_IN_ROOM", "100"))


# ---- Slurm ----------------------------------------------------------------------------------------------------------


def sbatch(*arguments: str) -> int:
    first = next(i for i, argument in enumerate(arguments) if not argument.startswith("-"))
    script, flags = arguments[first], arguments[first + 1 :]
    directives = re.findall(r"^#SBATCH +(--\S+)", Path(script).read_text(), re.MULTILINE)
    options = dict(option.partition("=")[::2] for option in [*directives, *arguments[:first]])
    if options.get("--account") == "my_account":
        return refuse("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified")
    if no_room():
        return refuse("sbatch: error: QOSMaxSubmitJobPerUserLimit")
    each, nodes = options["--ntasks-per-node"], options["--nodes"]
    variables = dict(SLURM_JOB_ID="{number}", SLURM_JOB_NUM_NODES=nodes, SLURM_NTASKS_PER_NODE=each)
    variables |= dict(SLURM_CPUS_PER_TASK=options["--cpus-per-task"], SLURM_NTASKS=str(int(each) * int(nodes)))
    log = str(Path(options.get("--output", "slurm-%j.out")).absolute())
    whole = [str(Path(script).absolute()), *flags]
    job = dict(script=whole, folder=os.getcwd(), log=log, name="train", environ=dict(os.environ))
    number = queue(**job, variables=variables, held="--hold" in options)
    print(number if "--parsable" in options else f"Submitted batch job {number}")
    return 0


def scontrol(*arguments: str) -> int:
    """-o show job NUMBER, or requeue Incomplete NUMBER"""
    number = arguments[-1]
    if arguments[0] == "requeue":  # no stand-in's job is requeued
        return 0
    job, asked = read(number), SPOOL / f"asked-{number}"
    if not job or (os.environ.get("STAND_IN_FORGETS") and asked.exists() and job["state"] not in ("PENDING", "RUNNING")):
        return refuse("slurm_load_jobs error: Invalid job id specified")
    asked.touch()
    code, by_signal = max(job["code"], 0), max(-job["code"], 0)
    print(f"JobId={number} JobName={job['name']} JobState={job['state']} Reason={job['reason']} Dependency=(null) ", end="")
    print(f"Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}:{by_signal} ", end="")
    log = job["log"].replace("%j", number)
    print(f"StdErr={log} StdIn=/dev/null StdOut={log} Power=", flush=True)
    while os.environ.get("STAND_IN_WAITS") and read(number)["state"] in ("PENDING", "RUNNING"):
        time.sleep(0.02)
    return 0


def sacct(*arguments: str) -> int:
    job = read(arguments[arguments.index("-j") + 1])
    print(f"{job['state']}|{max(job['code'], 0)}:{max(-job['code'], 0)}")
    return 0


def scancel(number: str) -> int:
    job = write(read(number) | dict(state="CANCELLED", reason="None"))
    if "process" in job:
        os.killpg(job["process"], signal.SIGTERM)
    return 0


def refuse(words: str) -> int:
    print(words, file=sys.stderr)
    return 1


# ---- PBS ------------------------------------------------------------------------------------------------------------


def qsub(*arguments: str) -> int:
    """Submit. As in PBS, a job starts in $HOME, and gets of the environment only what -v names."""
    *options, script = arguments
    if no_room():
        return refuse("qsub: would exceed complex's per-user limit")
    name, value = options[options.index("-v") + 1].split("=", 1)
    environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "USER", "STAND_IN")}
    here, whole = os.getcwd(), [str(Path(script).absolute())]
    variables = dict(PBS_JOBID="{number}.stand-in", PBS_O_WORKDIR=here)
    job = dict(script=whole, folder=os.path.expanduser("~"), log=str(Path(f"{script}.o%j").absolute()), name=script)
    print(f"{queue(**job, environ=environ | {name: value}, variables=variables, held=False)}.stand-in")
    return 0


def qstat(*arguments: str) -> int:
    if not (job := read(arguments[-1])):
        return refuse(f"qstat: Unknown Job Id {arguments[-1]}")
    state = dict(PENDING="Q", RUNNING="R").get(job["state"], "F")
    log = job["log"].replace("%j", job["number"])
    print(f"Job Id: {job['number']}.stand-in\n    Job_Name = {job['name']}\n    job_state = {state}\n    Join_Path = oe")
    # PBS folds long values with a tab, at any character.
    print(f"    Output_Path = stand-in:{log[:40]}\n\t{log[40:]}\n    Error_Path = stand-in:{log}.none")
    print(f"    Exit_status = {job['code'] if job['code'] >= 0 else 256 - job['code']}\n" if state == "F" else "")
    return 0


# ---- the launcher ---------------------------------------------------------------------------------------------------


def march(*arguments: str) -> int:
    """--each N COMMAND: start N ranks for each node of the job. All nodes are this machine."""
    each, nodes = int(arguments[1]), int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    number = os.environ.get("SLURM_JOB_ID") or os.environ["PBS_JOBID"]
    ranks = []
    for rank in range(each * nodes):
        variables = dict(MARCH_START=f"{number}.0", MARCH_RESTARTS=0, MARCH_RANK=rank, MARCH_RANKS=each * nodes)
        variables |= dict(MARCH_PLACE=rank % each, MARCH_PLACES=each, MARCH_NODE=rank // each, MARCH_HEAD=os.uname().nodename)
        ranks.append(subprocess.Popen(arguments[2:], env=os.environ | {name: str(value) for name, value in variables.items()}))
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    return max(rank.returncode for rank in ranks)


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))

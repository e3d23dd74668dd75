"""The machine rung on a machine that does not exist: from a job script to a report, with stand-ins for the scheduler.

    python -m pytest conformance/selftest/test_submit.py

Everything is real except the commands of stand_in.py. The suite submits the job script of broken/sound, which starts
train.py in two processes, and checks their results.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from conformance.cluster.schedulers import NotSubmitted, Pbs, Slurm
from conformance.harness import files, stand_in, submit
from conformance.harness.sites import ROOT, Site
from conformance.report import merge

clause, rejects = pytest.mark.clause, pytest.mark.rejects

SMALL = "--nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --account=made-up"
PBS = """#!/bin/bash
cd "$PBS_O_WORKDIR"
read -r -a arguments <<<"$TRAIN_ARGS"
export MARCH_PORT=$((20000 + ${PBS_JOBID%%.*} % 10000)) OMP_NUM_THREADS=1
march --each 2 python3 train.py "${arguments[@]}"
"""


class Machine:
    """A login node with stand-in commands and a copy of the sound site."""

    def __init__(self, folder: Path):
        self.folder, self.site = folder, folder / "sound"
        shutil.copytree(ROOT / "conformance/broken/sound", self.site)
        stand_in.install(str(folder))
        # As in a nox session, its virtual environment comes first.
        path = os.pathsep.join([str(folder / "venv/bin"), str(folder / "bin"), os.defpath])
        (folder / "venv/bin").mkdir(parents=True)
        (folder / "venv/pyvenv.cfg").touch()
        # A login node has none of these packages; jobs use the site's.
        missing = ("torch", "safetensors", "ddp_core", "mpi4py", "jinja2", "matplotlib")
        login_node = f"import sys\n\nsys.modules |= dict.fromkeys({missing})\n"
        (folder / "hurry.py").write_text(f"{login_node}from conformance.cluster import schedulers\n\nschedulers.LAG = 0.2\n")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
        self.environ |= dict(PATH=path, VIRTUAL_ENV=str(folder / "venv"), NOX_CURRENT_SESSION="x", OMP_NUM_THREADS="7")
        self.environ["PYTHONPATH"] = str(folder)  # for hurry.py

    def change(self, file: str, old: str, new: str) -> None:
        text = (self.site / file).read_text()
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times: this test is out of date"
        (self.site / file).write_text(text.replace(old, new))

    def start(self, *options: str, submit: str = SMALL, device: str = "cpu", geometry: str = "1x2", **environ: str):
        asked = [f"--site={self.site}", f"--submit={submit}", f"--geometry={geometry}", *[f"--device={device}"] * bool(device)]
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "hurry", "conformance/checks/run"]
        streams = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        # A background process inherits from its shell that Ctrl-C is ignored; undo that.
        listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        command, environ = [*pytest, *asked, *options], self.environ | environ
        return subprocess.Popen(command, cwd=ROOT, env=environ, preexec_fn=listen, **streams)  # noqa: PLW1509

    def rung(self, *options: str, **keywords: str) -> tuple[int, str]:
        """Exit code and output of the session."""
        session = self.start(*options, **keywords)
        output, _ = session.communicate(timeout=200)
        return session.returncode, output

    def jobs(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("job-*.json"))]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def rejected(outcome: tuple[int, str], *words: str, code: int = 1) -> None:
    __tracebackhide__ = True
    missing = [word for word in words if word not in outcome[1]]
    if outcome[0] != code or missing:
        pytest.fail(f"exit code {outcome[0]}, and nothing says {missing}:\n{outcome[1][-4000:]}", pytrace=False)


def refused(outcome: tuple[int, str], *words: str, code: int = 2) -> None:
    """Checks that it was refused in one line, without a traceback."""
    __tracebackhide__ = True
    rejected(outcome, *words, code=code)
    assert "Traceback" not in outcome[1] and ".py:" not in outcome[1], outcome[1]
    assert any(all(word in line for word in words) for line in outcome[1].splitlines()), outcome[1]


# ---- from a job script to a report ----------------------------------------------------------------------------------


@clause("V7", "V13")
@pytest.mark.timeout(240)
def test_a_sound_site_passes_and_is_reported_as_of_the_machine(machine, tmp_path, check):
    code, output = machine.rung("--part", str(tmp_path / "parts"))
    assert code == 0, output
    # Two runs twice, then with flat sums, a user's file, another seed, a mistyped flag; the last uses the first one's results.
    assert len(machine.jobs()) == 9, output
    (part,) = (json.loads(path.read_text()) for path in (tmp_path / "parts").glob("*.json"))
    actual = {name: part[name] for name in ("rung", "backend", "device", "world_size")}
    check["V7"].equal(part=(actual, dict(rung="machine", backend="gloo", device="cpu", world_size=2)))
    assert {"torch", "ddp_core"} == {*part["versions"]}
    assert {check["outcome"] for check in part["checks"]} == {"passed"}
    check["V13"].equal(core=(part["files"]["core"], files.of_folder(files.core())))
    (made,) = merge.merge([part], "2026-11-21")
    check["V7"].equal(names_the_host=(os.uname().nodename in json.dumps(made), False))
    assert not merge.not_run([part])


# ---- broken job scripts ---------------------------------------------------------------------------------------------


@rejects("J1")
def test_a_script_that_drops_its_arguments(machine):
    machine.change("job.sl", ' "$@" ||', " --epochs 1 ||")
    rejected(machine.rung("--clause", "J1"), "config=[], but should be", "(J1)")


@rejects("J2")
def test_a_script_that_always_returns_0(machine):
    machine.change("job.sl", '"$@" || code=$?', '"$@" || true')
    rejected(machine.rung("--clause", "J2"), "exit codes=['0, but no run.jsonl", "but should be all 2", "(J2)")


@rejects("R4")
def test_two_nodes_that_are_one_and_no_accelerator(machine):
    """The job asks for no accelerator, so a fallback to the CPU is silent. The two nodes are both this machine."""
    small = SMALL.replace("--nodes=1 --ntasks-per-node=2", "--nodes=2 --ntasks-per-node=1")
    outcome = machine.rung("--clause", "R2", "--clause", "R4", submit=small, device="", geometry="2x1")
    rejected(outcome, "hosts=1, but should be 2", "(R4)", "'an accelerator:0'", "(R2)")


# ---- no verdict on the site -----------------------------------------------------------------------------------------


def test_the_scheduler_refuses(machine):
    outcome = machine.rung(submit=SMALL.replace("made-up", "my_account"))
    refused(outcome, "sbatch has refused job.sl: sbatch: error: Batch job submission failed: Invalid account")


def test_nothing_is_installed(machine):
    machine.change("job.sl", "set -euo pipefail", 'echo "error: no environment: run ./install.sh first" >&2\nexit 3')
    refused(machine.rung("--clause", "L2"), "job 1 has started nothing (exit code 3)", "run ./install.sh first")


@pytest.mark.parametrize(
    "file, old, new, words",
    [
        ("site.toml", 'scheduler = "slurm"', 'scheduler = "abacus"', "scheduler=abacus"),
        ("site.toml", 'scheduler = "slurm"', 'scheduler = "pbs"', "no qsub on PATH"),
        ("site.toml", 'submit = "job.sl"', 'submit = "job.pbs"', "submit=job.pbs"),
    ],
)
def test_nothing_can_be_submitted(machine, file, old, new, words):
    (machine.folder / "bin/qsub").unlink()
    machine.change(file, old, new)
    refused(machine.rung(), words, code=4)


def test_a_cancelled_job_fails_its_checks(machine):
    session = machine.start("--clause", "L2", submit=f"{SMALL} --hold")
    wait_for(machine.jobs)
    subprocess.run([machine.folder / "bin/scancel", "1"], check=True)
    output, _ = session.communicate(timeout=60)
    rejected((session.returncode, output), "exit codes=['CANCELLED, of job 1']", "job 1 left no log", "(L2)")


def test_a_job_that_takes_too_long_is_left_alone(machine):
    outcome = machine.rung("--clause", "L2", "--submit-timeout=1", submit=f"{SMALL} --hold")
    refused(outcome, "job 1 is still PENDING (JobHeldUser) after 1 s")
    rejected(outcome, "to cancel them: scancel 1", code=2)


def test_ctrl_c_leaves_the_jobs_and_says_so(machine):
    session = machine.start("--clause", "L2", "--clause", "L3", submit=f"{SMALL} --hold")
    wait_for(lambda: len(machine.jobs()) == 2)
    time.sleep(0.5)
    session.send_signal(signal.SIGINT)
    output, _ = session.communicate(timeout=60)
    rejected((session.returncode, output), "jobs left as they are: 1 2; to cancel them: scancel 1 2", code=2)


def wait_for(come) -> None:
    end = time.monotonic() + 30
    while not come():
        assert time.monotonic() < end, "it has not come to this"
        time.sleep(0.05)


# ---- input and output of a job --------------------------------------------------------------------------------------


def test_nothing_of_this_environment_reaches_the_job(machine):
    """sbatch passes its caller's environment on. A virtual environment in it would hide the site's torch."""
    machine.change("job.sl", "set -euo pipefail", "set -euo pipefail\nexport >seen\ncommand -v python3 >which")
    code, output = machine.rung("--clause", "J2")
    assert code == 0, output
    seen = (machine.site / "seen").read_text()
    leaks = [name for name in ("VIRTUAL_ENV", "PYTHONPATH", "NOX_", "PYTEST_", "OMP_NUM_THREADS", "venv/bin") if name in seen]
    assert not leaks and "SLURM_JOB_ID" in seen, leaks
    assert (machine.site / "which").read_text().strip() == str(machine.folder / "bin/python3")


def test_a_leak_would_be_seen(machine):
    """The same check fails if the environment is passed on unchanged."""
    machine.change("job.sl", "set -euo pipefail", "set -euo pipefail\nexport >seen")
    subprocess.run(["sbatch", *SMALL.split(), "job.sl", "--epochs", "-1"], cwd=machine.site, env=machine.environ, check=True)
    wait_for(lambda: machine.jobs()[0]["state"] == "FAILED")
    seen = (machine.site / "seen").read_text()
    assert all(name in seen for name in ("VIRTUAL_ENV", "PYTHONPATH", "NOX_", "OMP_NUM_THREADS", "venv/bin"))


def test_accounting_is_asked_where_the_scheduler_has_forgotten(machine):
    code, output = machine.rung("--clause", "J2", STAND_IN_FORGETS="1")
    assert code == 0, output


def test_pbs_and_a_queue_that_takes_one_job(machine):
    (machine.site / "job.pbs").write_text(PBS)
    machine.change("site.toml", 'scheduler = "slurm"', 'scheduler = "pbs"')
    machine.change("site.toml", 'submit = "job.sl"', 'submit = "job.pbs"')
    code, output = machine.rung("--clause", "J1", "--clause", "J2", submit="-A made-up", STAND_IN_ROOM="1")
    assert code == 0 and "qsub has refused job.pbs: qsub: would exceed" in output, output
    assert [job["number"] for job in machine.jobs()] == ["1", "2"]


def test_what_another_job_of_this_number_has_printed_is_not_read(machine):
    """The stand-in appends to the log, like Slurm. A job waits while another one runs."""
    (machine.site / "slurm-2.out").write_text("error: --epochs, said long ago\n")
    code, output = machine.rung("--clause", "J1", "--clause", "J2")
    assert code == 0, output
    assert (machine.site / "slurm-2.out").read_text().count("--epochs") == 2


def test_what_a_job_prints_just_after_it_was_seen_waiting_is_read(machine):
    """The stand-in starts the job during the suite's first look, and ends it before the second."""
    code, output = machine.rung("--clause", "J2", STAND_IN_WAITS="1")
    assert code == 0, output


def test_nodes_are_not_named_in_the_report(machine, tmp_path):
    machine.change("job.sl", "march_flags=(", 'echo "srun: error: nid0042: tasks 0-3: Killed" >&2\nexit 1\nmarch_flags=(')
    machine.rung("--clause", "J2", "--part", str(tmp_path / "parts"))
    (part,) = (path.read_text() for path in (tmp_path / "parts").glob("*.json"))
    assert "tasks 0-3: Killed" in part and "nid0042" not in part and "<node>" in part


def test_qsub_cannot_hand_on_a_space():
    with pytest.raises(NotSubmitted, match="spaces"):
        Pbs.command("job.pbs", [], ["--run-dir", "/a folder"])


@pytest.mark.parametrize("exit_code, code", [("0:0", 0), ("75:0", 75), ("0:9", 137)])
def test_exit_codes_of_slurm(exit_code, code):
    assert Slurm.code("COMPLETED" if code == 0 else "FAILED", exit_code) == code


@pytest.mark.parametrize("status, code", [("0", 0), ("75", 75), ("271", 143), ("-29", -29)])
def test_exit_codes_of_pbs(status, code):
    assert Pbs.code(dict(Exit_status=status)) == code
    assert "deleted" in Pbs.code({})


def test_jobs_need_a_geometry(machine, monkeypatch):
    monkeypatch.setenv("PATH", f"{machine.folder}/bin")
    toml = dict(name="sound", scheduler="slurm", submit="job.sl")
    with pytest.raises(NotSubmitted, match="--geometry"):
        submit.Jobs(Site(machine.site, toml))

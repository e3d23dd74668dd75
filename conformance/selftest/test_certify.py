"""The certificate of a scientist's own program, by every way to request it. It has no complaint about a sound program."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.certify.__main__ import main
from conformance.harness import sites
from conformance.harness.sites import ROOT
from conformance.selftest.test_submit import SMALL, Machine

SOUND = ROOT / "conformance/broken/sound-program"
# A site whose ranks always ask MPI.
BY_MPI = next(site.name for site in sites.find() if site.launches and all(launch.mpi for launch in site.launches))
pytestmark = pytest.mark.timeout(300, method="thread")


def certificate(folder: Path, *flags: str) -> tuple[int, dict]:
    code = main(["--workload", str(folder / "program.py"), "--output", str(folder / "out"), *flags])
    return code, json.loads((folder / "out/certificate.json").read_text())


def test_a_site_whose_ranks_ask_mpi(tmp_path):
    """mpiexec starts every run of several ranks, also when one is stopped or killed."""
    shutil.copytree(SOUND, tmp_path / "mine")
    code, document = certificate(tmp_path / "mine", "--ranks", "2", "--limit-steps", "4", "--site", BY_MPI)
    assert code == 0, [verdict for verdict in document["verdicts"] if verdict["state"] == "broken"]
    assert {run["name"]: len(run["exit_codes"]) for run in document["runs"]}["killed-on"] == 2


def test_jobs_of_the_sites_own_script(tmp_path):
    """A made-up site with stand-ins for Slurm's commands. Their requeue does nothing, so the job is submitted again."""
    machine = Machine(tmp_path)
    command = [sys.executable, "-m", "conformance", "--workload", str(SOUND / "program.py"), "--site", str(machine.site)]
    command += [f"--submit={SMALL}", "--geometry=1x2", "--device=cpu", "--ranks=2", "--limit-steps=4"]
    command += ["--output", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, env=machine.environ, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "out/certificate.json").read_text())
    of_jobs = {verdict["promise"]: verdict["state"] for verdict in document["verdicts"] if "in a job at" in verdict["promise"]}
    assert {*of_jobs.values()} == {"kept"} and len(of_jobs) >= 5 and len(machine.jobs()) == 7, (of_jobs, result.stdout)
    assert not any("accelerators" in line for line in document["not_shown"])


LARGE = """
import numpy as np
import torch
from ddp_core import Workload


class Rows:
    def __init__(self, first):
        self.first, self.values = first, np.memmap("{file}", dtype=np.float32, mode="r").reshape(-1, 2**14)

    def __len__(self):
        return len(self.values) - self.first

    def __getitem__(self, row):
        return torch.from_numpy(self.values[self.first + row] + row), row % 2


class Large(Workload):
    defaults = dict(epochs=1, global_batch_size=8, lr=0.001)

    def data(self, config):
        return Rows(0), Rows(100_000)

    def model(self, config):
        return torch.nn.Linear(2**14, 2)

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs / 1e4, batch[1], reduction="sum")
"""


def test_data_larger_than_memory(tmp_path):
    """A sparse file of 200 GiB: only samples are read, and the certificate says which rows were not checked."""
    with open(tmp_path / "rows.bin", "wb") as file:
        file.truncate(200 * 2**30)
    (tmp_path / "program.py").write_text(LARGE.format(file=tmp_path / "rows.bin"))
    code, document = certificate(tmp_path, "--ranks", "2", "--limit-rows", "64", "--limit-steps", "4")
    broken = [verdict for verdict in document["verdicts"] if verdict["state"] == "broken"]
    assert [verdict["promise"] for verdict in broken] == ["most held-out rows are no training rows"], broken  # all are zeros
    words = "; ".join(document["not_shown"])
    assert code == 1 and "rows after the first 64" in words and "steps after the first 4" in words


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--workload no.py", "is no file"),
        ("--workload {} --ranks two", "should be numbers"),
        ("--workload {} --site x", "--site x"),
        ("--workload {} --device cuda", "give --submit, too"),
        ("--workload {} --submit", "Give --site, too"),
        ("--workload {} --epoch 3", "unrecognized arguments: --epoch 3"),
        ("--workload gpd", "gpd"),
    ],
)
def test_what_cannot_be_certified_is_one_line(flags, says):
    command = [sys.executable, "-m", "conformance", *flags.format(SOUND / "program.py").split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and says in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr

"""Checks that have been seen to fail: broken programs, and broken ways of testing, which the process rung must reject.

    python -m pytest conformance/test_checks_fail.py

Each is a real `mpiexec -n 2` of the checks that should notice, with a copy of the core in which one line is wrong, or
with a made-up site; the message must name the clause.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.sites import ROOT, Launch, without_launcher

clause = pytest.mark.clause

TRAIN = """
import dataclasses, runpy
from ddp_core import run
rank_of = runpy.run_path({original!r})["rank"]

def rank(environ):
    rank = rank_of(environ)
    return dataclasses.replace(rank{change})

if __name__ == "__main__":
    raise SystemExit(run(rank))
"""


@pytest.fixture
def made_up_site(pytestconfig, tmp_path):
    return lambda change="": make_site(tmp_path / "made-up", pytestconfig.sites[0].launches[0], change)


def make_site(folder: Path, launch: Launch, change: str) -> Path:
    """A site that ranks as a real one does under this launcher, but for a change."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN.format(original=str(launch.train), change=f", {change}" * bool(change)))
    names = [f'{key} = "{folder.name}"' for key in ("name", "operator", "scheduler", "launcher", "submit")]
    exported = [f"{name} = {json.dumps(template)}" for name, template in launch.templates]
    lines = [*names, "[node]", "[[launchers]]", f'name = "{launch.launcher}"', "[launchers.environment]", *exported]
    (folder / "site.toml").write_text("\n".join(lines))
    return folder


def mutated_core(folder: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(ROOT / "core/src/ddp_core", folder / "ddp_core", ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "ddp_core" / file).read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times: this mutant is out of date"
    (folder / "ddp_core" / file).write_text(text.replace(old, new))
    return folder


def process_rung(site: Path, tests: str, *options: str, path: str = "", expect: int = 2, mpi: bool = True):
    """Run these checks in two ranks on this site; path goes to the front of Python's."""
    environ = without_launcher() | dict(EXPECT_WORLD=str(expect), OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT="60")
    environ |= dict(PYTHONPATH=os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")])))
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    python = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "conformance/test_process.py"]
    command = [mpiexec, "-n", "2", *python, "--with-mpi"] if mpi else python
    command += ["--site", str(site), "-k", tests, *options]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=90, check=False)


def rejected(ended: subprocess.CompletedProcess, clause_id: str, *words: str) -> None:
    __tracebackhide__ = True
    said = ended.stdout + ended.stderr
    missing = [text for text in (f"({clause_id})", *words) if text not in said]
    if ended.returncode == 0 or missing:
        pytest.fail(f"exit code {ended.returncode}, and nothing says {missing}:\n{said[-3000:]}", pytrace=False)


def test_a_sound_site_passes(made_up_site):
    ended = process_rung(made_up_site(), "node or fp64 or order or again or stopped")
    assert ended.returncode == 0, ended.stdout + ended.stderr


# What is wrong: the clause and the words of its rejection, the checks to run, then a file of the core, what stands there,
# what the mutant has instead. The words show that the mutant trained, and was not rejected for a crash.
CURVE = "deviation of losses"
MUTANTS = {
    "local rank 0 on record": ("R3", "local_rank=[0, 0]", "node", "device.py", "local_rank=rank.local_rank", "local_rank=0"),
    "rank 0's rows on all": ("D2", "rows_of_each_rank=", "order", "data.py", "[:, rank::world_size]", "[:, 0::world_size]"),
    "no sum of gradients": ("L2", "differ from rank 0", "fp64", "replica.py", "if self.world_size == 1 or", "if True or"),
    "mean for sum": ("L2", CURVE, "fp64", "replica.py", "torch.sum(self.parts", "torch.mean(self.parts"),
    "lr times world size": ("L2", CURVE, "fp64", "config.py", "else 1", "else world_size"),
    "no reshuffle": ("L2", CURVE, "fp64", "data.py", "words(count, 1, seed, epoch)", "words(count, 1, seed, 0)"),
    "loss of rank 0 alone": ("L2", CURVE, "fp64", "trainer.py", "total += of_rank", "total += total"),
    "momentum lost": ("C1", "losses=", "stopped", "trainer.py", "copy_(tensors[name])", "copy_(tensors[name] * (name < 'o'))"),
    "time in it": ("S3", "sha256=", "again", "trainer.py", "problem=self.config", "now=time.time(), problem=self.config"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_mutant_is_rejected(made_up_site, tmp_path, what):
    clause_id, words, tests, *mutation = MUTANTS[what]
    core = mutated_core(tmp_path / "core", *mutation)
    rejected(process_rung(made_up_site(), tests, path=str(core)), clause_id, words)


def test_rank_for_local_rank_is_rejected(made_up_site):
    """Right on one node only."""
    rejected(process_rung(made_up_site("local_rank=rank.rank"), "node"), "R3", "should be below the ranks of its node")


@clause("V1")
def test_too_few_ranks_are_rejected(made_up_site):
    rejected(process_rung(made_up_site(), "order", expect=4), "V1", "EXPECT_WORLD=4", "world of 2")


@clause("V2")
def test_a_skipped_check_is_rejected(made_up_site, tmp_path):
    (tmp_path / "skips_one.py").write_text(
        """
import pytest

def pytest_runtest_setup(item):
    if "7-2" in item.name:
        pytest.skip("no such device")
"""
    )
    ended = process_rung(made_up_site(), "order", "-p", "skips_one", path=str(tmp_path))
    rejected(ended, "V2", "2 passed, 1 skipped")


@clause("V2")
def test_ranks_without_their_plugin_are_rejected(made_up_site):
    """pytest-mpi alone would skip every check and end with 0."""
    rejected(process_rung(made_up_site(), "order", mpi=False), "V2", "--with-mpi")


@clause("V3")
def test_one_rank_failing_alone_ends_all(made_up_site, tmp_path):
    (tmp_path / "fails_alone.py").write_text(
        """
from mpi4py import MPI

def pytest_runtest_call(item):
    assert MPI.COMM_WORLD.rank != 1, "rank 1 has tripped"
"""
    )
    ended = process_rung(made_up_site(), "order", "-p", "fails_alone", path=str(tmp_path))
    rejected(ended, "V3", "rank 1 alone", "rank 1 has tripped")


@clause("V4")
def test_the_other_pytest_mpi_is_rejected(made_up_site, tmp_path):
    (tmp_path / "pytest_mpi.py").write_text("")  # mpi-pytest takes this name, and has no MPIPlugin
    rejected(process_rung(made_up_site(), "order", path=str(tmp_path), mpi=False), "V4", "uninstall")

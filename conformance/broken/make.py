"""Broken sites, cores and suites: how one is made of a sound one, run, and judged to be rejected.

sites.toml changes the site in sound/, cluster.toml the one in sound-cluster/, jobs.toml the same one (all its entries are jobs
of one user on one virtual cluster: test_broken_jobs.py), core.toml the core, suite.toml anything of the
repository; odd.toml has what no check rejects, in test_suite.py. Of each entry `[[broken]]`:

    clause = "R3"                the clause that must reject it
    what = "..."                 what is broken: the name of its test, so no other has it
    why = "..."                  why it matters, or is easily overlooked
    says = "..."                 words of the rejection, on one line with the clause: so it is no crash that is taken for it
    ranks = 2                    how many run the checks; 0, the default, for checks that need no ranks
    after = 1                    where a session of so many ranks comes first and hands its snapshots on
    tests = "..."                pytest's -k, where not all checks of the clause need to run
    needs = "accelerator"        where it can be rejected there only
    site = "..."                 of sites/, or another sound one, where that one is changed and checked, and not sound/
    [[broken.change]]            file, old and new: old stands there exactly once. Without old a new file, with file alone none

Every one is made in a copy of the repository, so that none can harm what it is made of.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.broken import warm
from conformance.harness.sites import ROOT, without_launcher

SOUND = "conformance/broken/sound"
LISTS = {
    "sites": SOUND,
    "cluster": f"{SOUND}-cluster",
    "jobs": f"{SOUND}-cluster",
    "core": "core/src/ddp_core",
    "suite": ".",
}  # and what an entry changes
PARTS = (
    "conformance",
    "core/src",
    "core/pyproject.toml",
    "core/tests/snapshots",
    "sites",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
)  # what a copy has


@dataclass(frozen=True)
class Broken:
    kind: str
    clause: str
    what: str
    why: str
    says: str
    change: list[dict[str, str]]
    ranks: int = 0
    after: int = 0
    tests: str = ""
    needs: str = ""
    site: str = ""

    @property
    def changed(self) -> str:
        """The folder, from the repository's top, that the files of its changes are in."""
        if self.site.startswith("sound"):
            return f"conformance/broken/{self.site}"
        return f"sites/{self.site}" if self.site else LISTS[self.kind]

    def make(self, folder: Path) -> Path:
        """A copy of the repository in this folder, with what is broken. Raises ValueError when the entry is out of date."""
        root = copy(folder)
        self.apply(root / self.changed)
        return root

    def apply(self, folder: Path) -> None:
        """Its changes, to the files of this folder. Raises ValueError when the entry is out of date."""
        for change in self.change:
            replace(folder / change["file"], change.get("old"), change.get("new"))

    def run(self, root: Path, device: str) -> subprocess.CompletedProcess:
        """The checks of its clause there."""
        options = ["--clause", self.clause, "--device", device, *(["-k", self.tests] if self.tests else [])]
        options += [f"--until={self.says}"] if not self.after else []
        options += ["--extras"] if self.clause.startswith("E") else []
        if self.kind == "cluster":
            return start(root, 0, "--site", self.changed, "--cluster", "conformance/checks/test_jobs.py", *options, seconds=300)
        options += ["--site", self.changed if self.site else SOUND]
        options += ["conformance/checks/"] if self.kind == "sites" and not self.ranks else []
        if self.after:
            options += ["--handed-on", str(root)]
            before = start(root, self.after, *options)
            assert before.returncode == 0, before.stdout + before.stderr
        return start(root, self.ranks, *options, quickly=True)


def load() -> list[Broken]:
    """All entries, in the order of the lists."""
    lists = {kind: tomllib.loads((ROOT / f"conformance/broken/{kind}.toml").read_text())["broken"] for kind in LISTS}
    return [Broken(kind=kind, **entry) for kind, entries in lists.items() for entry in entries]


def chosen(entries: list) -> list:
    """All, or every sixteenth one, the one that BROKEN_SIXTEENTH in the environment says (0 to 15): CI has no time for all."""
    return entries[int(os.environ["BROKEN_SIXTEENTH"]) :: 16] if "BROKEN_SIXTEENTH" in os.environ else entries


def copy(folder: Path) -> Path:
    """A copy of what conformance needs of the repository; compiled files too, for they save half a second a run, but for those
    that another process is just writing.
    """
    for part in PARTS:
        source, target = ROOT / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.egg-info", "reports", "*.pyc.*"))
        else:
            shutil.copy2(source, target)
    return folder


def replace(path: Path, old: str | None, new: str | None) -> None:
    """Put new in the place of old, which must be there once. Without old write a new file, without both delete it."""
    if old is None and new is None:
        path.unlink()
    elif old is None:
        if path.exists():
            raise ValueError(f"{path.name} is there already: out of date")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new or "")
    else:
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{path.name} has {old!r} {text.count(old)} times, but should have it once: out of date")
        path.write_text(text.replace(old, new or ""))


def start(
    root: Path, ranks: int, *options: str, seconds: int = 120, quickly: bool = False, **environ: str
) -> subprocess.CompletedProcess:
    """The checks of the repository below root that need ranks, in so many; for 0 those that need none.

    quickly: in warm processes, for sessions that are to fail: of several that passed mpiexec once ended one at its very end.
    """
    command = [*(warm.pytest() if quickly else [sys.executable, "-m", "pytest"]), "-p", "no:cacheprovider", *options]
    if ranks:
        mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        command = [mpiexec or "mpiexec", "-n", str(ranks), *command, "--with-mpi", "conformance/checks/run"]
    elif not any(option.startswith(("conformance/checks/", "conformance/selftest/")) for option in options):
        command.append("conformance")
    path = [str(root / "core/src"), environ.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    variables = dict(EXPECT_WORLD=str(ranks), OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT=str(seconds))
    variables |= dict(PYTHONPATH=os.pathsep.join(filter(None, path))) | environ
    environ = without_launcher() | variables
    return subprocess.run(command, cwd=root, timeout=seconds + 30, check=False, env=environ, capture_output=True, text=True)


def rejected(result: subprocess.CompletedProcess, clause: str, says: str) -> None:
    """Fails unless the run has failed with these words and the clause on one line."""
    __tracebackhide__ = True
    output = result.stdout + result.stderr
    lines = [line for line in output.splitlines() if says in line and f"({clause})" in line]
    if result.returncode == 0 or not lines:
        where = "" if lines else f", and no line has {says!r} and ({clause})"
        pytest.fail(f"exit code={result.returncode}, but should be a rejection{where}:\n{output[-3000:]}", pytrace=False)
    print(lines[0])

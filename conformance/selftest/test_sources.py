"""Facts and their pages: results of harness/sources.py in an older and a newer commit of a made-up operator's pages.

python -m pytest conformance/selftest/test_sources.py        needs git
"""

import datetime
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.broken import make
from conformance.harness import sources
from conformance.harness.sites import mistakes, one_by_one

# Without git, facts cannot be looked up.
pytestmark = pytest.mark.only(when=lambda _: bool(shutil.which("git")))
rejects = pytest.mark.rejects

FABRIC = """# The fabric

Load the module first; it is the default since spring:

    module load march/2031.1.0

## Variables

    export MARCH_FABRIC=fab0   # all jobs
    export MARCH_CACHE=userfaultfd
    export MARCH_CACHE2=userfaultfd

A job of the queue debug runs for two hours at
most, and is not chained.
"""
OLDER = {
    "docs/fabric.md": FABRIC,
    "docs/news.md": "- 2030: march/2030.4.0 came\n- 2031: march/2031.1.0 came\n",
    "docs/images.md": "Use weave-u24r70-20310301.sif today.\n",
}
ELSEWHERE = "0123456789" * 4  # a commit that is in no checkout
FACTS = ["march/2031.1.0", "MARCH_FABRIC=fab0", "MARCH_CACHE=userfaultfd", "two hours at most"]


class Documentation:
    """A git repository with an operator's pages."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main", str(folder), of=folder.parent)
        self.git("remote", "add", "origin", "https://git.example/Weavers/guides.git")

    def git(self, *arguments: str, of: Path | None = None, day: str = "2031-05-01") -> str:
        environ = os.environ | dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"{day}T12:00:00")
        environ |= dict(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull)
        command = ["git", "-C", str(of or self.folder), "-c", "user.name=w", "-c", "user.email=w@example.org", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, day: str, files: dict[str, str]) -> str:
        """Commit these files and delete all others. Returns the hash."""
        self.git("rm", "-r", "--quiet", "--ignore-unmatch", ".")
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", day, day=day)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def pages(tmp_path) -> Documentation:
    (tmp_path / "guides").mkdir()
    made = Documentation(tmp_path / "guides")
    made.commit("2031-05-01", OLDER)
    return made


@pytest.fixture
def takes(tmp_path, pages):
    """A function that writes a site whose facts come from a page of the older commit. Returns the site's folder."""

    def takes(facts=tuple(FACTS), file="docs/fabric.md", repository="weavers/guides", copy=None) -> Path:
        (tmp_path / "loom").mkdir(exist_ok=True)
        copy = copy or f'commit = "{pages.git("rev-list", "--max-parents=0", "HEAD")[:7]}"\ndated = 2031-05-01'
        (tmp_path / "loom/site.toml").write_text(
            f'name = "loom"\n[[sources]]\naddress = "https://docs.example/fabric/"\nread = 2031-05-02\n'
            f'repository = "{repository}"\n{copy}\nfile = "{file}"\nfacts = {[*facts]}\n'
        )
        return tmp_path / "loom"

    return takes


@pytest.fixture
def look(pages, takes, capsys):
    """A function that runs the command, by default on the site and the checkout. Returns exit code and output."""

    def look(*arguments: str, folder: Path | None = None) -> tuple[int, str]:
        where = ["--checkout", str(folder or pages.folder)] if "--checkout" not in arguments else []
        code = sources.main([*where, "--site", str(pages.folder.parent / "loom"), *arguments])
        output = capsys.readouterr()
        assert not (output.out and code == 2) or output.err
        return code, output.out + output.err

    takes()
    return look


def changed(old: str, new: str, file: str = "docs/fabric.md") -> dict[str, str]:
    assert old in OLDER[file]
    return OLDER | {file: OLDER[file].replace(old, new)}


# ---- facts that stand -----------------------------------------------------------------------------------------------


def test_nothing_is_found_where_all_stands(pages, look):
    """In the commit that was read, and in one where lines moved or wrap differently."""
    assert look() == (0, "loom: 4 of 4 facts stand in docs/fabric.md of weavers/guides\nall 4 facts stand, hints: 0\n")
    text = "A new line.\n\n" + FABRIC.replace("two hours at\nmost", "two\n  hours at most")
    pages.commit("2031-09-01", OLDER | {"docs/fabric.md": text, "docs/more.md": "march/2030.1.0 is deleted\n"})
    assert look("--strict")[0] == 0


# ---- facts that do not stand ----------------------------------------------------------------------------------------


@rejects("F6")
def test_a_changed_line_is_told_with_both_places(pages, look):
    pages.commit("2031-09-01", changed("# all jobs\n", "# all jobs\n\n") | changed("CACHE=userfaultfd", "CACHE=kdreg2"))
    code, output = look()
    assert code == 1
    assert "changed: 'MARCH_CACHE=userfaultfd'\n" in output
    assert "was: docs/fabric.md:10: export MARCH_CACHE=userfaultfd\n" in output
    assert "closest: docs/fabric.md:10: export MARCH_CACHE=kdreg2\n" in output
    assert output.endswith("1 of 4 facts do not stand where site.toml says, hints: 0\n")


def test_a_fact_in_another_file_has_moved(pages, takes, look):
    """A fact has not moved if the other file always had it, or if the page has a new text."""
    both = {"docs/a.md": "MARCH_CACHE=userfaultfd\n"}
    takes(copy=f'commit = "{pages.commit("2031-05-01", OLDER | both)}"\ndated = 2031-05-01')
    files = changed("    export MARCH_CACHE=userfaultfd\n", "") | both | {"docs/jobs.md": "\nMARCH_CACHE=userfaultfd\n"}
    pages.commit("2031-09-01", files)
    code, output = look()
    assert code == 1
    assert "moved: 'MARCH_CACHE=userfaultfd'" in output and "now in: docs/jobs.md:2: MARCH_CACHE=userfaultfd" in output
    pages.commit("2031-09-02", changed("    module load march/2031.1.0\n", ""))
    code, output = look()
    assert code == 1
    assert "gone: 'march/2031.1.0'" in output and "also in: docs/news.md:2: - 2031: march/2031.1.0 came" in output


def test_a_page_under_a_new_name_is_followed(pages, look):
    files = dict(OLDER)
    files["docs/network/fabric.md"] = files.pop("docs/fabric.md").replace("CACHE=userfaultfd", "CACHE=kdreg2")
    pages.commit("2031-09-01", files)
    code, output = look()
    assert code == 1 and "0 of 4 facts stand" in output
    assert "moved: 'march/2031.1.0'\n      was: docs/fabric.md:5: " in output
    assert "now: docs/network/fabric.md:5: module load march/2031.1.0" in output
    assert "changed: 'MARCH_CACHE=userfaultfd'" in output and "closest: docs/network/fabric.md:10: " in output


@rejects("F6")
def test_a_fact_that_the_page_never_had_is_found(pages, tmp_path, look):
    """A site takes a variable from a page without it. J3 accepts it, because site.toml lists it as a fact."""
    root = make.copy(tmp_path / "copy")
    sound = root / make.SOUND
    source = (
        '\n[[sources]]\naddress = "https://docs.example/fabric/"\nread = 2026-11-21\nrepository = "weavers/guides"\n'
        'dated = 2026-11-20\nfile = "docs/fabric.md"\nfacts = ["MARCH_FABRIC=fab0", "MARCH_SPEED=full"]\n'
    )
    make.replace(sound / "site.toml", "read = 2026-11-21\n", f"read = 2026-11-21\n{source}")
    block = "set -euo pipefail\n\n# What the fabric wants: https://docs.example/fabric\n"
    block += "export MARCH_FABRIC=fab0\nexport MARCH_SPEED=full\n"
    make.replace(sound / "job.sl", "set -euo pipefail\n", block)
    result = make.start(root, 0, "conformance/checks/test_static.py", "--site", make.SOUND)
    assert result.returncode == 0, result.stdout
    pages.commit("2026-11-20", OLDER | {"docs/other.md": "MARCH_SPEED=full\n"})
    code, output = look("--site", str(sound))
    assert code == 1
    assert "never there: 'MARCH_SPEED=full'\n      not in docs/fabric.md at 2026-11-20\n" in output, output
    assert "docs/other.md:1: MARCH_SPEED=full" in output


@pytest.mark.parametrize(
    ("fact", "stands"),
    [
        ("march/2031.1", False),  # only the beginning of a version
        ("FABRIC=fab0", False),  # only the end of a name
        ("MARCH_FABRIC=fab", False),
        ("fabric", False),  # the page has it with a capital letter only
        ("module load march", True),
        ("export MARCH_FABRIC=fab0 # all jobs", True),
        ("debug runs for two hours at most,", True),
    ],
)
def test_a_fact_stands_as_whole_words(pages, takes, look, fact, stands):
    pages.commit("2031-09-01", OLDER | {"docs/fabric.md": FABRIC.replace("# The fabric", "# The Fabric")})
    takes(facts=[fact])
    assert look()[0] == (0 if stands else 1)


# ---- hints ----------------------------------------------------------------------------------------------------------


def test_a_newer_version_is_a_hint_wherever_it_is_named(pages, look):
    """The old pages still stand, and a new page names the new module, as when a machine changes."""
    new = {
        "docs/a/modules.md": 'The default:\n   /opt/march/2031.3.0.lua\nsetenv("march/2031.3.0")\n',
        "docs/z.md": "march/2030.5.0\n",
    }
    pages.commit("2031-09-01", OLDER | new)
    code, output = look()
    assert code == 0
    assert "hint: march/2031.3.0 is newer than 'march/2031.1.0'\n      docs/a/modules.md:3: " in output
    assert output.count("hint:") == 1 and output.endswith("all 4 facts stand, hints: 1\n")
    assert look("--strict")[0] == 1
    pages.commit("2031-09-02", OLDER | new | changed("spring:", "summer, march/2031.3.0 is:"))
    assert "docs/fabric.md:3: Load the module first" in look()[1]  # hints from the page itself come first


# ---- checkouts ------------------------------------------------------------------------------------------------------


def test_a_checkout_is_known_by_its_remotes_or_its_name(pages, tmp_path, look):
    for name in ("guides", "a/Weavers+guides", "b/Weavers+guides/repo", "c/guides.git", "d/named-otherwise"):
        folder = tmp_path / "mirror" / name
        pages.git("clone", "--quiet", "--bare", str(pages.folder), str(folder))
        if not name.endswith("otherwise"):
            pages.git("remote", "remove", "origin", of=folder)
        else:
            pages.git("remote", "set-url", "origin", "git@git.example:weavers/guides", of=folder)
        assert look(folder=folder)[0] == 0, name
    assert look(folder=pages.folder / ".git")[0] == 0
    assert "no work tree and no git directory" in look(folder=pages.folder / "docs")[1]  # not the repository around it
    # The checkout whose remote matches is used.
    (tmp_path / "other/guides").mkdir(parents=True)
    other = Documentation(tmp_path / "other/guides")
    other.git("remote", "remove", "origin")
    other.commit("2031-09-01", {"docs/fabric.md": "Nothing.\n"})
    assert look("--checkout", str(other.folder), str(pages.folder))[0] == 0
    assert look("--checkout", str(other.folder))[0] == look("--checkout", str(other.folder / ".git"))[0] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--checkout"], "--checkout: expected at least one argument"),
        (["--chekout", "x"], "--chekout x"),
        (["--checkout", "no-such-folder"], "--checkout no-such-folder: no work tree and no git directory"),
        (["--checkout", "."], "--checkout .: no work tree and no git directory"),
        (["--site", "nowhere"], "--site nowhere is neither one of"),
        (["--at", "no-such-commit"], "--at no-such-commit: no commit of"),
    ],
)
def test_what_cannot_be_looked_up_is_one_line(look, tmp_path, monkeypatch, arguments, says):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, output = look(*arguments)
    assert code == 2 and output.startswith("error: ") and says in output and output.count("\n") == 1, output


def test_a_checkout_that_is_older_than_the_copy_says_nothing(pages, takes, look):
    takes(facts=["march/2031.9.0"], copy="dated = 2031-05-02")
    code, output = look()
    assert code == 2 and "docs/fabric.md of weavers/guides: the checkout is of 2031-05-01, older than the copy" in output


# ---- the age of a copy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "commit", "warns"),
    [
        (10, False, ""),
        (10, True, ""),
        (400, False, "the copy that was read is older than six months"),
        (400, True, "the copy that was read is older than six months"),
        (None, True, "of when is the commit? `dated` should say"),
    ],
)
def test_the_suite_warns_of_old_copies_and_not_of_old_readings(tmp_path, days, commit, warns):
    """All copies were read today."""
    root, today = make.copy(tmp_path), datetime.date.today()
    copy = [f"read = {today}", 'repository = "weavers/guides"', 'commit = "2745903"' if commit else ""]
    copy += [f"dated = {today - datetime.timedelta(days)}"] if days else []
    make.replace(root / make.SOUND / "site.toml", "read = 2026-11-21", "\n".join(copy))
    result = make.start(root, 0, "conformance/checks/test_static.py", "--site", make.SOUND, "--clause", "F6")
    assert result.returncode == 0, result.stdout
    warned = re.findall(r"UserWarning: sound: (.*): https://slurm.schedmd.com/sbatch.html \(F6\)", result.stdout)
    assert warned == ([warns] if warns else [])


def test_an_address_may_tell_the_copy():
    copy = dict(repository="weavers/guides", commit="2745903", file="docs/fabric.md")
    address = "https://github.com/weavers/guides/blob/2745903/docs/fabric.md"
    assert one_by_one([dict(address=address)]) == [dict(address=address) | copy]
    assert one_by_one([dict(address=address.replace("2745903", "main"))]) == [dict(address=address.replace("2745903", "main"))]


def test_pages_of_a_block_share_what_stands_beside_them():
    assert one_by_one([dict(read=1, pages=[dict(address="a", read=2)])]) == [dict(read=2, address="a")]
    assert one_by_one([dict(read=1, pages=[dict(address="a"), dict(address="b")])])[1] == dict(read=1, address="b")
    assert one_by_one([dict(address="a"), dict(address="b", pages=[])]) == [dict(address="a"), dict(address="b")]
    assert "a: pages, but should be one of address" in mistakes(*one_by_one([dict(address="a", pages=["b"])]))[0]

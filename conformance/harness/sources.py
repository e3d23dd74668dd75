"""Do the pages still say what the sites take from them? It looks up the facts of every site.toml in a newer checkout.

    python -m conformance.harness.sources --checkout FOLDER... [--site NAME_OR_FOLDER]... [--at COMMIT] [--strict]

A fact is a text that must stand in the `file` of an entry of [[sources]] (F6). FOLDER is a work tree or a bare git directory of
a repository in [[sources]]. Its remotes say which one, or its name: user-guides, or owner+user-guides.
A hint says that the repository now names a newer version of something in a fact: a module, an image. To end it, read the page
again and update `commit` or `dated`.

Exit codes: 0 all facts that were looked up stand, 1 one does not (--strict: or there is a hint), 2 usage, or no fact could be
looked up.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from conformance.harness import sites

# ---- a checkout -----------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    """What git prints in that folder; "" if it fails, for example for a file that a commit does not have."""
    environ = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    environ |= dict(GIT_CEILING_DIRECTORIES=str(folder.parent))  # ignore a repository that happens to lie around the folder
    done = subprocess.run(["git", "-C", str(folder), *arguments], env=environ, capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


@dataclass(frozen=True)
class Place:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        text = self.text.strip()
        return f"{self.file}:{self.line}: {text if len(text) <= 160 else text[:157] + '...'}"


@dataclass(frozen=True)
class Checkout:
    """at: the commit in which facts are looked up."""

    folder: Path
    at: str

    @classmethod
    def open(cls, folder: Path, at: str) -> "Checkout":
        here = cls(folder.resolve(), "")
        if not git(here.folder, "rev-parse", "--git-dir"):
            raise ValueError(f"--checkout {folder}: no work tree and no git directory, or none that git opens")
        if not (commit := here.commit(at)):
            raise ValueError(f"--at {at}: no commit of {folder}")
        return cls(here.folder, commit)

    def commit(self, name: str) -> str:
        return git(self.folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()

    def is_of(self, repository: str) -> int:
        """2 if a remote names the repository, 1 if only the folder's name does, else 0."""
        wanted, folder = repository.lower(), str(self.folder).lower().removesuffix("/.git").removesuffix(".git")
        remotes = git(self.folder, "config", "--get-regexp", r"^remote\..*\.url$").lower()
        if re.search(rf"[/:]{re.escape(wanted)}(\.git)?/?$", remotes, re.MULTILINE):
            return 2
        *_, parent, name = ("", *folder.split("/"))
        return int(name == wanted.partition("/")[2] or wanted.replace("/", "+") in (name, parent))

    def read(self, source: dict) -> str:
        """The commit that was read: the source's, or the last one of its day. "" if this checkout does not have it."""
        if "commit" in source:
            return self.commit(source["commit"])
        return git(self.folder, "rev-list", "-1", f"--before={source['dated']} 23:59:59", self.at).strip()

    def day(self, commit: str) -> str:
        return git(self.folder, "show", "--no-patch", "--format=%cs", commit).strip()

    def text(self, commit: str, file: str) -> str:
        return git(self.folder, "show", f"{commit}:{file}") if commit else ""

    def renamed(self, before: str, file: str) -> str:
        """The file's name now, if git detects that it was moved; else the same name."""
        flags = ("--name-status", "--find-renames", "--diff-filter=R", "-z")
        names = git(self.folder, "diff", *flags, before, self.at).split("\0")
        return dict(zip(names[1::3], names[2::3], strict=False)).get(file, file)

    def grep(self, commit: str, text: str) -> list[Place]:
        """Every line of the commit with this text."""
        rows = git(self.folder, "grep", "-InFz", "-e", text, commit).split("\n") if commit else []
        parts = [row.split("\0", 2) for row in rows if row.count("\0") >= 2]
        return [Place(file.removeprefix(f"{commit}:"), int(line), rest) for file, line, rest in parts]


# ---- facts ----------------------------------------------------------------------------------------------------------


def places(fact: str, file: str, text: str) -> list[Place]:
    """Where the fact's words stand, across line breaks, too. rocm/7.1 is not found in rocm/7.1.1."""
    before, after = r"(?<!\w)" * bool(re.match(r"\w", fact)), r"(?!\w|\.\d)" * bool(re.search(r"\w$", fact))
    words = re.compile(before + r"\s+".join(map(re.escape, fact.split())) + after)
    lines = text.split("\n")
    numbers = {text.count("\n", 0, match.start()) for match in words.finditer(text)}
    return [Place(file, number + 1, lines[number]) for number in sorted(numbers)]


def closest(line: str, file: str, now: str, then: str) -> Place | None:
    """The new line of the page that this line has probably become."""
    known = {text.strip() for text in then.split("\n")}
    fresh = {text.strip(): number for number, text in enumerate(now.split("\n"), 1) if text.strip() not in known}
    return next((Place(file, fresh[text], text) for text in difflib.get_close_matches(line.strip(), fresh, n=1)), None)


def version_of(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def series(fact: str) -> Iterator[tuple[str, str, re.Pattern[str]]]:
    """(name, beginning, pattern of its series) for names in a fact with a version (name/2.1, name:2.1) or an 8-digit date."""
    for name, start in re.findall(r"(([A-Za-z][\w.+-]*[/:])v?\d[\w.+-]*)", fact):
        yield name, start, re.compile(rf"(?<![\w.+-]){re.escape(start)}v?\d[\w.+-]*")
    for name in re.findall(r"[A-Za-z][\w.+-]*(?<!\d)20\d{6}(?!\d)[\w.+-]*", fact):
        yield name, re.split(r"\d", name)[0], re.compile(re.sub(r"\d+", r"\\d+", re.escape(name)))


def newer(fact: str, file: str, checkout: Checkout, before: str) -> list[str]:
    """Later versions that the repository names since `before`. Without `before`, only those in the same file."""
    newest: dict[tuple[int, ...], str] = {}
    for name, start, alike in series(fact):
        known = {version_of(other) for place in checkout.grep(before, start) for other in alike.findall(place.text)}
        named = [(other.rstrip(".-+"), at) for at in checkout.grep(checkout.at, start) for other in alike.findall(at.text)]
        for other, place in sorted(named, key=lambda pair: (pair[1].file != file, len(pair[0]))):
            version = version_of(other)
            if version > version_of(name) and version not in known and (before or place.file == file):
                newest.setdefault(version, f"hint: {other} is newer than {fact!r}\n    {place}")
    return [*newest.values()]


def elsewhere(fact: str, file: str, checkout: Checkout, before: str) -> tuple[bool, Place | None]:
    """(True, place) if another file has the fact since `before`; else False, and the nearest file that has it."""
    candidates = [place for place in checkout.grep(checkout.at, fact) if place.file != file and places(fact, "", place.text)]
    known = {place.file for place in checkout.grep(before, fact)}
    candidates.sort(key=lambda place: (place.file in known, -len(os.path.commonpath([place.file, file]))))
    return (bool(before) and candidates[0].file not in known, candidates[0]) if candidates else (False, None)


def look_up(source: dict, checkout: Checkout) -> tuple[list[str], list[str]]:
    """Findings and hints about the facts of one source."""
    before, file = checkout.read(source), source["file"]
    file_now = file if not before or checkout.text(checkout.at, file) else checkout.renamed(before, file)
    then, now = checkout.text(before, file), checkout.text(checkout.at, file_now)
    copy, findings, hints = source.get("commit", str(source.get("dated"))), [], []
    if before and "dated" not in source:
        hints.append(f"hint: commit {copy} is of {(day := checkout.day(before))}: write dated = {day} beside it")
    for fact in source["facts"]:
        was, stands = places(fact, file, then), places(fact, file_now, now)
        hints += newer(fact, file_now, checkout, before)
        if stands and file_now == file and (was or not before):
            continue
        is_new, other = (False, None) if stands else elsewhere(fact, file, checkout, before)
        near = closest(was[0].text, file_now, now, then) if was and not stands else None
        if before and not was:
            kind, lines = "never there", [f"not in {file} at {copy}"]
        else:
            kind = "changed" if near else "moved" if stands or is_new else "gone"
            more = f" (and {len(was) - 1} more)" if len(was) > 1 else ""
            lines = [f"was: {was[0]}{more}" if was else f"was in {file} at {copy}, which this checkout does not have"]
        lines += [f"now: {stands[0]}"] if stands else [] if now else [f"no file {file} now"]
        if not stands and not near:  # show what the page now says of the same variable
            name = (re.split(r"[=/:]", fact)[0].split() or [fact])[-1]
            near = next(iter(places(name, file_now, now)), None)
        lines += [f"closest: {near}"] if near else []
        lines += [f"{'now in' if is_new else 'also in'}: {other}"] if other else []
        findings.append("\n    ".join([f"{kind}: {fact!r}", *lines]))
    return findings, hints


# ---- the command ----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m conformance.harness.sources", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkout", type=Path, nargs="+", action="extend", required=True, metavar="FOLDER", help="of the pages' repositories")
    add("--site", action="append", metavar="NAME_OR_FOLDER", help="only this site; may be given again")
    add("--at", default="HEAD", metavar="COMMIT", help="the commit to look at (default: what is checked out)")
    add("--strict", action="store_true", help="exit code 1 for a hint, too: for a job that nobody reads while it is green")
    try:
        options = parser.parse_args(arguments)
        checkouts = [Checkout.open(folder, options.at) for folder in options.checkout]
        return run(sites.find(options.site), checkouts, options.strict)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    except FileNotFoundError:
        print("error: there is no git", file=sys.stderr)
    return 2


def run(chosen: list[sites.Site], checkouts: list[Checkout], strict: bool) -> int:
    looked_up = gone = hinted = 0
    left: Counter[str] = Counter()
    for site in chosen:
        for source in site.toml.get("sources", []):
            if wrong := sites.mistakes(source):
                raise ValueError(f"{site.folder / 'site.toml'}: {wrong[0]} (F6)")
            if not (source_facts := source.get("facts", [])):
                continue
            if "file" not in source:
                left[source["address"]] += len(source_facts)
                continue
            page = f"{source['file']} of {source['repository']}"
            checkout = max(checkouts, key=lambda one: one.is_of(source["repository"]))
            if not checkout.is_of(source["repository"]):
                left[f"{source['repository']}, which is none of --checkout"] += len(source_facts)
                continue
            if (day := checkout.day(checkout.at)) < str(source.get("dated", "")):
                left[f"{page}: the checkout is of {day}, older than the copy that was read"] += len(source_facts)
                continue
            findings, hints = look_up(source, checkout)
            looked_up, gone, hinted = looked_up + len(source_facts), gone + len(findings), hinted + len(hints)
            print(f"{site.name}: {len(source_facts) - len(findings)} of {len(source_facts)} facts stand in {page}")
            for text in findings + hints:
                print("  " + text.replace("\n", "\n  "))
    for page, count in left.items():
        print(f"not looked up: {count} facts of {page}")
    if not looked_up:
        raise ValueError(
            f"no fact of {', '.join(site.name for site in chosen)} could be looked up: is it the right --checkout?"
        )
    verdict = f"{gone} of {looked_up} facts do not stand where site.toml says" if gone else f"all {looked_up} facts stand"
    print(f"{verdict}, hints: {hinted}")
    return 1 if gone or (strict and hinted) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Begin a site: copy the nearest one under a new name, without the facts that are true of the old machine only.

    python -m conformance.harness.new_site NAME --from SITE [--to FOLDER]

SITE is one of sites/, or a folder with a site.toml. The new folder is FOLDER/NAME; FOLDER is sites/ by default, and may be
outside the repository. EDIT: marks what to fill in, in site.toml and README.md. Conformance rejects the site until no mark is
left (F7). Exit codes: 0 done; 2 refused, and nothing was written.
"""

import argparse
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from conformance.harness import keys, sites
from conformance.harness.sites import ROOT, Site

# With another name in it, an address would lead nowhere, so addresses keep the old one.
ADDRESS = r"https?://[^\s)>\"'`]+"
NEVER_SHOWN = "Everything: no job of this site has run anywhere."
NOTHING = {bool: "false", int: "0", float: "0.0", str: '""', list: "[]"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.harness.new_site", description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NAME", help="of the site and its folder: small letters, digits and hyphens")
    parser.add_argument("--from", dest="source", metavar="SITE", required=True, help="the site that is nearest to the machine")
    parser.add_argument("--to", type=Path, metavar="FOLDER", default=ROOT / "sites", help="default: sites/ of this repository")
    options = parser.parse_args(arguments)
    try:
        folder = make(options.name, options.source, options.to)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(next_steps(folder, options.source)))
    return 0


def make(name: str, source: str, to: Path) -> Path:
    """Return the new site's folder. Raises ValueError, which names the mistake, before anything is written."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"NAME {name!r}, but should be small letters, digits and single hyphens, for example my-machine")
    if not to.is_dir():
        raise ValueError(f"--to {to}: no such folder")
    folder = to / name
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} is there already: take another NAME")
    try:
        (old,) = sites.find([source])
    except ValueError as error:
        raise ValueError(str(error).replace("--site", "--from", 1)) from None
    # Copy listed files only: a site in use also has .venv, runs and logs.
    files = old.toml.get("files", [])
    if missing := [file for file in [*files, "site.toml", "README.md"] if not (old.folder / file).is_file()]:
        raise ValueError(f"--from {source}: its site.toml lists {missing[0]}, which is not there")
    with tempfile.TemporaryDirectory(dir=to, prefix=f".{name}-") as fresh:
        for file in dict.fromkeys([*files, "site.toml", "README.md"]):
            (target := Path(fresh, name, file)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(old.folder / file, target)  # copy the mode, too: install.sh is executable
            text = target.read_text()
            target.write_text(fill(file, text, old, name))
        Path(fresh, name).rename(folder)  # the site appears whole or not at all
    return folder


def fill(file: str, text: str, old: Site, name: str) -> str:
    if file == "site.toml":
        return site_toml(text, old, name)
    text = renamed(text, old.name, name)
    return readme(text, old, name) if file == "README.md" else text


def renamed(text: str, old: str, new: str) -> str:
    """Replace every whole word `old` by `new`, except in addresses and in host names."""
    return re.sub(
        rf"{ADDRESS}|(?<![\w.-]){re.escape(old)}(?![\w-]|\.\w)", lambda match: new if match[0] == old else match[0], text
    )


# ---- site.toml ------------------------------------------------------------------------------------------------------


def site_toml(text: str, old: Site, name: str) -> str:
    """Empty the old site's facts. Keep [job] and the launchers, which the copied files still need."""
    made: list[str] = []
    for header, theirs in tables(text):
        # An operator's page keeps its own words, the old name, too.
        lines = theirs if header == "[[sources]]" else [renamed(line, old.name, name) for line in theirs]
        if header in ("[node]", "[queue]", "[software]"):
            values = {key: value for key, value in old.toml[header.strip("[]")].items() if not isinstance(value, dict)}
            made += [header, *(to_edit(header, key, value, old.name) for key, value in values.items()), ""]
        elif header == "[verified]":
            made += ["[verified]", 'status = "never-run" # never-run, simulated, run-on-site', 'evidence = "nothing yet"']
            made += [f'unverified = ["{NEVER_SHOWN}"] # what the scripts count on and no run has shown', ""]
        elif header == "[software.provides]":
            made += ["# EDIT: add [software.provides] where scripts count on what a module brings: see conformance/SPEC.md", ""]
        elif header == "[[expected_failures]]":
            continue  # these were the old site's
        elif header == "[[launchers]]" and "[[launchers]]" not in made:
            made += ["# EDIT: is this what the launchers here export to a rank? Compare with `env` under each.", *lines]
        elif not header:
            made += [re.sub(r"^operator = .*$", 'operator = "" # EDIT: who runs the machine', line) for line in lines]
        else:
            made += lines
    text = "\n".join(made).rstrip() + "\n"
    tomllib.loads(text)  # our own assertion: the text is valid TOML
    return text


def to_edit(header: str, key: str, value: object, old: str) -> str:
    """The line of a fact that is missing."""
    _, required = keys.table().get(f"{header.strip('[]')}.{key}", ("", True))
    what, empty = "this machine's" if required else "this machine's, or delete the line", NOTHING.get(type(value), '""')
    return f"{key} = {empty} # EDIT: {what}; {value!r} at {old}"


def tables(text: str) -> list[tuple[str, list[str]]]:
    """("[node]", its lines) and so on; "" for lines before the first header. Comments above a header belong to it."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    inside = ""
    for line in text.splitlines():
        header = re.match(r"(\[\[?)([\w.-]+)(\]\]?)\s*(#.*)?$", line) if not inside else None
        if header:
            before = sections[-1][1]
            above: list[str] = []
            while before and before[-1].startswith("#"):
                above.insert(0, before.pop())
            sections.append(("".join(header.groups()[:3]), above))
        sections[-1][1].append(line)
        for quotes in re.findall(r'"""|\'\'\'', line):
            inside = "" if quotes == inside else inside or quotes
    return sections


# ---- README.md ------------------------------------------------------------------------------------------------------


def readme(text: str, old: Site, name: str) -> str:
    """Replace the first sentence, the status and the output, which only the new site can write. Keep the rest."""
    _, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    made = f"""\
# {name}

EDIT: the machine, who runs it, what a device is and which scheduler starts jobs, in one sentence with a link.

**Status: never-run.** Nothing of this has been submitted on the machine.

EDIT: what follows was written for {old.name}. Keep what is true of {name}, then delete this line.

"""
    for section in sections:
        heading = section.splitlines()[0]
        if re.search(r"\b(prints?|output)\b", heading, re.IGNORECASE):
            section = f"{heading}\n\nEDIT: ten lines that a job has printed, and which job that was.\n\n"  # noqa: PLW2901
        made += section
    return made.rstrip() + "\n"


def is_mark(line: str) -> bool:
    """True for a mark as F7 defines it. A sentence that explains the job script's marks is none."""
    return "EDIT:" in line and "`# EDIT:`" not in line


# ---- next steps -----------------------------------------------------------------------------------------------------


def next_steps(folder: Path, source: str) -> list[str]:
    where = folder.name if folder.parent.resolve() == ROOT / "sites" else str(folder)
    marks = [line for name in ("site.toml", "README.md") for line in (folder / name).read_text().splitlines() if is_mark(line)]
    return [
        f"{folder}, from {source}. Next:",
        f"1. Fill in the {len(marks)} lines of site.toml and README.md that are marked EDIT:, and delete the marks.",
        "2. Change in train.py, install.sh and the job script what differs on this machine.",
        f"3. nox -s conformance -- --site {where}             says what is missing, clause by clause",
        f"4. nox -s cluster -- --site {where}                 submits the job script on a virtual cluster: as root",
        f"5. On the machine: ./install.sh, then nox -s conformance -- --site {where} --submit",
        "6. Write into [verified] and README.md what was run there, and when; delete from unverified what that has shown.",
    ]


if __name__ == "__main__":
    sys.exit(main())

"""The report of conformance: what was checked, on which rung of the ladder, and when.

    python -m conformance.report --parts FOLDER    reports, from what the pytest sessions of a run left there, and the page
    python -m conformance.report                   only the page and CONFORMANCE.md, from the reports that are there

A session leaves a *part* (plugin.py, --part). A *report*, reports/<site>/<date>-<rung>-<backend>.json, is made of the parts
of one run; another run on the same day replaces it. Exit code 1: a check failed, or did not run where it should have; 2: usage.
"""

import argparse
import datetime
import getpass
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from conformance.golden import make as golden
from conformance.harness import sites
from conformance.harness.evidence import CORE, MARKS, RUNGS, STATE_OF, STATES, Evidence, counted, read, span

HERE = Path(__file__).parents[1]

# ---- from parts to reports -----------------------------------------------------------------------------------------


# root and localhost are nobody's name.
GENERIC = {"root", "localhost", "true", "false"}
IDENTIFYING = re.compile(r"USER|LOGNAME|HOST|NODE|ACCOUNT|PROJECT|MAIL|SSH|TOKEN|SECRET|PASS|KEY")
PATTERNS = [
    (re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+"), "<address>"),
    (re.compile(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])"), "<address>"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4}(?![\w:])"), "<address>"),
    (re.compile(r"""(["'`])(file://)?/(?!/)[^"'`\n]*\1"""), r"\1<path>\1"),  # in quotes, spaces belong to it
    (re.compile(r"file://[^\s\"']+"), "<path>"),
    (re.compile(r"(?<![\w/.>])/(?!/)[^\s'\"`,;:()\[\]{}<>|]+"), "<path>"),
]


def names_of_this_machine() -> dict[str, str]:
    """What would tell whose machine this is, to what stands in its place."""
    hosts = {socket.gethostname(), socket.getfqdn(), os.uname().nodename}
    found = {value: f"<{name}>" for name, value in os.environ.items() if IDENTIFYING.search(name) and len(value) > 2}
    found |= dict.fromkeys(hosts | {host.partition(".")[0] for host in hosts}, "<host>")
    # A home with a space in it becomes one that the pattern for paths sees the end of.
    found |= {getpass.getuser(): "<user>", str(Path.home()): "/~", str(sites.ROOT): "<repository>"}
    return {name: word for name, word in found.items() if len(name) > 1 and not name.isdigit() and name not in GENERIC}


def clean(facts, names: dict[str, str] | None = None):
    """The same without names of hosts, users and accounts, without absolute paths and addresses."""
    names = names_of_this_machine() if names is None else names
    if isinstance(facts, dict):
        return {key: clean(value, names) for key, value in facts.items()}
    if isinstance(facts, list):
        return [clean(value, names) for value in facts]
    if not isinstance(facts, str):
        return facts
    for name, word in sorted(names.items(), key=lambda pair: -len(pair[0])):
        facts = re.sub(rf"(?<![A-Za-z0-9<]){re.escape(name)}(?![A-Za-z0-9>])", word, facts, flags=re.IGNORECASE)
    for pattern, word in PATTERNS:
        facts = pattern.sub(word, facts)
    return facts


def merge(parts: list[dict], date: str, commit: str | None = None, modified: bool = False) -> list[dict]:
    """One report a site, rung and backend. Only the facts named here enter one. Raises ValueError where parts disagree."""
    reports: dict[tuple, dict] = {}
    for part in sorted(parts, key=lambda part: (part["rung"], part["world_size"] or 0)):
        checks = part["checks"] + [_objection(text) for text in part.get("objections", [])]
        if wrong := {check["outcome"] for check in checks} - {*STATE_OF}:
            raise ValueError(f"outcome={min(wrong)}, but should be one of {', '.join(STATE_OF)} [{_where(part)}]")
        if part["rung"] not in RUNGS:
            raise ValueError(f"rung={part['rung']}, but should be one of {', '.join(RUNGS)}")
        for site in sorted({*part["expected"], *(of["site"] for of in checks + part["curves"])}):
            if wrong := [name for name in (site, part["backend"]) if not re.fullmatch(r"\w[\w.-]*", name)]:
                raise ValueError(f"site or backend={wrong[0]}, but should be fit for the name of a file [{_where(part)}]")
            told = {"stand-ins for": part["stand_ins"][site]} if site in part.get("stand_ins", {}) else {}
            same = dict(device=part["device"], date=date, commit=commit, modified=modified)
            same |= dict(versions=clean(part["versions"] | told))
            same |= dict(machine=clean({name: part["machine"].get(name) for name in ("cores", "accelerator", "accelerators")}))
            first = dict(format=1, site=site, rung=part["rung"], backend=part["backend"]) | same
            first |= dict(world_sizes=[], expected=[], checks=[], curves=[])
            report = reports.setdefault((site, part["rung"], part["backend"]), first)
            for name in same:
                if report[name] != same[name]:
                    raise ValueError(f"{name}={same[name]}, but should be {report[name]}, as in another part [{_where(part)}]")
            size = part["world_size"]
            report["world_sizes"] = sorted({*report["world_sizes"], *([size] if size else [])})
            report["expected"] = sorted({*report["expected"], *part["expected"].get(site, [])})
            report["checks"] += [_check(check) | dict(world_size=size) for check in checks if check["site"] == site]
            report["curves"] += [
                dict(launcher=curve["launcher"], precision=curve["precision"], world_size=size, losses=curve["losses"])
                for curve in part["curves"]
                if curve["site"] == site
            ]
    return [reports[key] for key in sorted(reports)]


def _check(check: dict) -> dict:
    facts = {name: check[name] for name in ("launcher", "name", "clauses", "outcome")}
    facts |= clean({name: check.get(name) or "" for name in ("case", "message", "reason", "link", "what")})
    # JSON has no infinity, and every reader should understand a report.
    deviation = check.get("deviation")
    finite = deviation is None or math.isfinite(deviation)
    return facts | dict(deviation=deviation if finite else "inf", limit=check.get("limit"))


def _objection(text: str) -> dict:
    """What a session had to say against itself, as a failed check of the clause that the text ends with."""
    clauses = re.findall(r"\(([A-Z]+\d+)\)", text)
    return dict(site=CORE, launcher=None, name="objections", clauses=clauses, outcome="failed", message=text)


def _where(part: dict) -> str:
    size = part["world_size"]
    return ", ".join([f"{part['rung']} rung", part["backend"], *([f"world size {size}"] if size else [])])


def not_run(parts: list[dict]) -> list[str]:
    """One line for each clause that a session was to check and has not."""
    lines = []
    for part in parts:
        for site, clauses in sorted(part["expected"].items()):
            ran = [check for check in part["checks"] if check["site"] == site and check["outcome"] != "skipped"]
            missing = sorted({*clauses} - {clause for check in ran for clause in check["clauses"]})
            lines += [f"checks run=0, but should be at least 1 [{site}, {_where(part)}] ({clause})" for clause in missing]
    return lines


def write(report: dict, folder: Path) -> Path:
    """One check and one curve a line, so that a diff of two reports can be read."""
    lists = {name: ",\n".join(f"  {json.dumps(item)}" for item in report[name]) for name in ("checks", "curves")}
    lines = [f' "{name}": ' + (f"[\n{lists[name]}\n ]" if lists.get(name) else json.dumps(report[name])) for name in report]
    path = folder / report["site"] / f"{report['date']}-{report['rung']}-{report['backend']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


# ---- for a terminal, and for GitHub --------------------------------------------------------------------------------


def terminal(evidence: Evidence, colours: bool) -> str:
    """Sites by groups of clauses, then the worst deviations."""
    paint = {"failed": "31", "expected failure": "33", "pass": "32", "not run": "33"} if colours else {}
    groups = list(evidence.spec.groups)
    table = [["", *groups]]
    for site in evidence.sites:
        counts = [evidence.group(site, group)[0] for group in groups]
        table.append([site, *(" ".join(f"{MARKS[s]}{count[s]}" for s in STATES[:4] if count[s]) or "·" for count in counts)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    for state, colour in paint.items():
        lines[1:] = [re.sub(rf"{MARKS[state]}\d+", rf"\033[{colour}m\g<0>\033[0m", line) for line in lines[1:]]
    lines += ["", "   ".join(f"{MARKS[state]} {state}" for state in STATES[:4]) + "   · nothing to run here", ""]
    lines += [f"{tier:<30}  worst {margin}  [{place}]" for tier, margin, place in evidence.worst()]
    return "\n".join(lines).rstrip() + "\n"


def markdown(evidence: Evidence) -> str:
    """CONFORMANCE.md: the same as the page, in one table that GitHub shows."""

    def row(*cells) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    def cell(site: str, group: str) -> str:
        counts, rungs, dates = evidence.group(site, group)
        told = [f"{MARKS[state]} {text}" for state, text in counted(counts).items() if state != "elsewhere"]
        return "<br>".join([*told, *([", ".join(rungs), span(dates)] if rungs else [])]) or "·"

    def notes(state: str) -> Iterable[str]:
        for site, clause, text, check in evidence.notes(state):
            link = f" ([link]({check['link']}))" if check["link"].startswith("https://") else ""
            yield f"- **{clause}** at {site}, {check['date']}: {' '.join(_literal(text).split())}{link}"

    def lines(found: Iterable[str]) -> str:
        return "\n".join(found) or "None."

    spec, worst = evidence.spec, evidence.worst()
    unverified = {site: evidence.unverified(site) for site in evidence.sites}
    matrix = [row("clauses", *evidence.sites), row("---", *["---"] * len(evidence.sites))]
    matrix += [
        row(f"**{group}** {title}", *(cell(site, group) for site in evidence.sites)) for group, title in spec.groups.items()
    ]
    deviations = [row("tier", "worst relative deviation", "where"), row(*["---"] * 3)] if worst else []
    return f"""<!-- Generated by `python -m conformance.report`. Do not edit: change the reports, then run it again. -->

# Conformance

Generated by `nox -s report` from the newest reports in [reports/](reports/), {evidence.dates()}: what was checked of each site,
by groups of clauses of [SPEC.md](SPEC.md). Clause by clause, and with the loss curves, it stands in
[reports/index.html](reports/index.html), a file to open in a browser.

{lines(f"- **{site}**: {evidence.status(site)}, {len(unverified[site])} unverified" for site in evidence.sites if site != CORE)}

Each cell names the rungs that it stands on, and when they were run:

{lines(f"- *{rung}*: {words}" for rung, words in RUNGS.items())}

{lines(matrix)}

## Worst deviation and its margin

{lines(deviations + [row(*found) for found in worst])}

## Failed

{lines(notes("failed"))}

## Expected failures

{lines(notes("expected failure"))}

## Unverified

What a site counts on and no run has shown: a virtual cluster has whatever modules, images and queues `site.toml` names.

{lines(f"- **{site}**: {_prose(sentence)}" for site, sentences in unverified.items() for sentence in sentences)}

## Untested clauses

{lines(f"- **{name}** {text}" for name, text in spec.clauses.items() if name in spec.untested)}
"""


def _literal(text: str) -> str:
    """As it stands, and not as Markdown or HTML."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text)


def _prose(text: str) -> str:
    """The same, but for what stands `in backticks`."""
    return "".join(part if re.fullmatch(r"`[^`]+`", part) else _literal(part) for part in re.split(r"(`[^`]+`)", text))


# ---- the command ---------------------------------------------------------------------------------------------------


def commit_of_this_tree() -> tuple[str | None, bool]:
    """The short hash and whether the tree differs from it; what this program writes does not count."""

    def git(*arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=sites.ROOT, check=False, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        ours = [f":!{(HERE / name).relative_to(sites.ROOT)}" for name in ("reports", "CONFORMANCE.md")]
        return git("rev-parse", "--short", "HEAD"), bool(git("status", "--porcelain", "--", ".", *ours))
    except FileNotFoundError:
        return None, False


def evidence_in(folder: Path) -> Evidence:
    """Of the sites of this repository, or of the one outside it that the reports lie in."""
    beside = [str(folder.parent)] if (folder.parent / "site.toml").is_file() else None
    facts = [site.facts for site in sites.find(beside)]
    return Evidence(read(folder.glob("*/*.json")), facts, (HERE / "SPEC.md").read_text(), golden.load()["losses"])


def main(arguments: list[str] | None = None) -> int:
    from conformance.report import page

    parser = argparse.ArgumentParser(prog="python -m conformance.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", type=Path, metavar="FOLDER", help="what the sessions of a run have left, *.json, in folders, too"
    )
    parser.add_argument("--reports", type=Path, metavar="FOLDER", default=HERE / "reports", help="default: %(default)s")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="default: CONFORMANCE.md beside SPEC.md, or in --reports")
    parser.add_argument("--date", default=str(datetime.date.today()), help="of the run (default: %(default)s)")
    options = parser.parse_args(arguments)
    beside = HERE if options.reports == HERE / "reports" else options.reports
    failed, missing = [], []
    try:
        if options.parts:
            parts = read(options.parts.rglob("*.json"))
            if not parts:
                raise ValueError(f"--parts {options.parts}: no part in it, so nothing was checked")
            reports = merge(parts, str(datetime.date.fromisoformat(options.date)), *commit_of_this_tree())
            for report in reports:
                write(report, options.reports)
            failed = [(report, check) for report in reports for check in report["checks"] if check["outcome"] == "failed"]
            missing = not_run(parts)
        evidence = evidence_in(options.reports)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options.reports.mkdir(parents=True, exist_ok=True)
    (options.reports / "index.html").write_text(page.render(evidence))
    (options.markdown or beside / "CONFORMANCE.md").write_text(markdown(evidence))
    print(terminal(evidence, sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    for report, check in failed:
        where = f"[{report['site']}, {report['rung']} rung] ({' '.join(check['clauses'])})"
        print(f"failed: {check['name']} {where}: {check['message']}")
    print(*missing, f"page: {options.reports / 'index.html'}", sep="\n")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())

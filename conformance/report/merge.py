"""Merges the parts that pytest sessions leave (plugin.py, --part) into reports, reports/<site>/<rung>-<backend>.json.

A report is made from the parts of one run and replaces an older report. Reports are also merged on login nodes, so this file
imports the standard library only.
"""

import json
import math
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from conformance.harness import sites
from conformance.harness.evidence import CORE, RUNGS, STATE_OF
from conformance.report.private import clean
from conformance.report.verify import FORMAT, digest, path_of, read

PART = 1  # version of the format
NAME = re.compile(r"\w[\w.-]*")


def parts_in(folder: Path) -> list[dict]:
    """All parts in the folder. Raises ValueError if there are none, or if one is incomplete because its session was killed."""
    parts = []
    for path in sorted(folder.rglob("*.json")):
        try:
            parts.append(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON, was its session ended? {error}") from None
        if not isinstance(parts[-1], dict) or parts[-1].get("format") != PART:
            raise ValueError(f"{path}: format should be {PART}")
    if not parts:
        raise ValueError(f"--parts {folder}: no part in it, so nothing was checked")
    return parts


def merge(parts: list[dict], date: str, commit: str | None = None, modified: bool = False) -> list[dict]:
    """One report per site, rung and backend, with only the facts named here. Raises ValueError where parts disagree."""
    reports: dict[tuple, dict] = {}
    for part in sorted(parts, key=lambda part: (part["rung"], part["world_size"] or 0)):
        checks = part["checks"] + [_objection(text) for text in part.get("objections", [])]
        if wrong := {check["outcome"] for check in checks} - {*STATE_OF}:
            raise ValueError(f"outcome={min(wrong)}, but should be one of {', '.join(STATE_OF)} [{_where(part)}]")
        if part["rung"] not in RUNGS:
            raise ValueError(f"rung={part['rung']}, but should be one of {', '.join(RUNGS)}")
        for site in sorted({*part["expected"], *(of["site"] for of in checks + part["curves"])}):
            if unfit := [name for name in (site, part["backend"]) if not NAME.fullmatch(name)]:
                raise ValueError(f"site or backend={unfit[0]}, but should be fit for the name of a file [{_where(part)}]")
            stand_ins = {"stand-ins for": part["stand_ins"][site]} if site in part.get("stand_ins", {}) else {}
            same = dict(device=part["device"], date=date, commit=commit, modified=modified)
            same |= dict(versions=clean(part["versions"] | stand_ins))
            same |= dict(machine=clean({name: part["machine"].get(name) for name in ("cores", "accelerator", "accelerators")}))
            ran = part["files"]
            same |= dict(files=dict(core=ran["core"], conformance=ran["conformance"], site=ran["sites"].get(site)))
            first = dict(format=FORMAT, site=site, rung=part["rung"], backend=part["backend"]) | same
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
    return [report | dict(digest=digest(report)) for _, report in sorted(reports.items())]


def _check(check: dict) -> dict:
    kept = {name: check[name] for name in ("launcher", "name", "clauses", "outcome")}
    kept |= clean({name: check.get(name) or "" for name in ("case", "message", "reason", "link", "what")})
    # JSON has no infinity, so it is written as text that every reader understands.
    deviation = check.get("deviation")
    finite = deviation is None or math.isfinite(deviation)
    return kept | dict(deviation=deviation if finite else "inf", limit=check.get("limit"))


def _objection(text: str) -> dict:
    """A session's objection to itself, as a failed check of the clause at the end of the text."""
    clauses = re.findall(r"\(([A-Z]+\d+)\)", text)
    return dict(site=CORE, launcher=None, name="objections", clauses=clauses, outcome="failed", message=text)


def _where(part: dict) -> str:
    size = part["world_size"]
    return ", ".join([f"{part['rung']} rung", part["backend"], *([f"world size {size}"] if size else [])])


def not_run(parts: list[dict]) -> list[str]:
    """One line for each clause that a session should have checked and did not."""
    lines = []
    for part in parts:
        for site, clauses in sorted(part["expected"].items()):
            ran = [check for check in part["checks"] if check["site"] == site and check["outcome"] != "skipped"]
            missing = sorted({*clauses} - {clause for check in ran for clause in check["clauses"]})
            lines += [f"checks run=0, but should be at least 1 [{site}, {_where(part)}] ({clause})" for clause in missing]
    return lines


def write(report: dict, folder: Path) -> Path:
    """Write one check and one curve per line, so that a diff is readable. Raises ValueError if the existing report is newer."""
    path = folder / path_of(report)
    if path.exists() and (date := read(path)["date"]) > report["date"]:
        raise ValueError(f"{path}: date={report['date']}, but should be {date} or later: the report there is newer")
    lists = {name: ",\n".join(f"  {json.dumps(item)}" for item in report[name]) for name in ("checks", "curves")}
    lines = [f' "{name}": ' + (f"[\n{lists[name]}\n ]" if lists.get(name) else json.dumps(report[name])) for name in report]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def commit_of_this_tree(outputs: Iterable[Path]) -> tuple[str | None, bool]:
    """The short hash, and whether the tree differs from it. Changes to the outputs do not count."""

    def git(*arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=sites.ROOT, check=False, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        apart = [f":!{path.relative_to(sites.ROOT)}" for path in outputs]
        return git("rev-parse", "--short", "HEAD"), bool(git("status", "--porcelain", "--", ".", *apart))
    except FileNotFoundError:
        return None, False

"""The conformance report: what was checked, on which rung of the ladder, and when.

    python -m conformance.report --parts FOLDER    makes reports from the parts that pytest sessions left in FOLDER
    python -m conformance.report                   makes CONFORMANCE.md and the page from reports: needs jinja2, matplotlib

Exit code 1: a check failed, or did not run although it should. 2: usage, or a report that is refused.
"""

import argparse
import datetime
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from conformance.golden import make as golden
from conformance.harness import files, sites
from conformance.harness.evidence import MARKS, STATES, Evidence, place
from conformance.report import merge, verify

HERE = sites.ROOT / "conformance"


def evidence_in(folder: Path, newer: Iterable[dict] = ()) -> Evidence:
    """Evidence from a folder's reports; newer ones replace those of the same place. The sites are this repository's, or the
    outside site whose folder contains this one. Raises ValueError for a report that is refused.
    """
    beside = [str(folder.parent)] if (folder.parent / "site.toml").is_file() else None
    known_sites = {site.name: site for site in sites.find(beside)}

    def files_now(site: str, rung: str) -> dict:
        now = files.of_run(rung, [known_sites[site]] if site in known_sites else [])
        return dict(core=now["core"], conformance=now["conformance"], site=now["sites"].get(site))

    reports = {place(report): report for report in map(verify.read, sorted(folder.glob("*/*.json")))}
    reports |= {place(report): report for report in newer}
    tomls = [site.toml for site in known_sites.values()]
    evidence = Evidence([*reports.values()], tomls, (HERE / "SPEC.md").read_text(), golden.load()["losses"], files_now)
    if refused := verify.contradictions(evidence):
        raise ValueError("\n".join(refused))
    return evidence


def terminal(evidence: Evidence, colours: bool) -> str:
    """A table of sites by groups of clauses, then the worst deviations."""
    paint = {"failed": "31", "expected failure": "33", "pass": "32", "not run": "33"} if colours else {}
    groups, shown = list(evidence.spec.groups), STATES[:5]
    table = [["", *groups]]
    for site in evidence.sites:
        counts = [evidence.group(site, group)[0] for group in groups]
        table.append([site, *(" ".join(f"{MARKS[s]}{count[s]}" for s in shown if count[s]) or "·" for count in counts)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    for state, colour in paint.items():
        lines[1:] = [re.sub(rf"{MARKS[state]}\d+", rf"\033[{colour}m\g<0>\033[0m", line) for line in lines[1:]]
    lines += ["", "   ".join(f"{MARKS[state]} {state}" for state in shown) + "   · nothing to run here", ""]
    lines += [f"{tier:<30}  worst {margin}  [{place}]" for tier, margin, place in evidence.worst()]
    return "\n".join(lines).rstrip() + "\n"


def draw(evidence: Evidence, reports: Path) -> list[Path]:
    """Write the page, and CONFORMANCE.md beside SPEC.md or among an outside site's reports. Returns both paths."""
    from conformance.report import page  # imported here: merging reports must not need jinja2 and matplotlib

    texts = {HERE if reports == HERE / "reports" else reports: ("CONFORMANCE.md", page.markdown(evidence))}
    written = {folder / name: text for folder, (name, text) in texts.items()} | {reports / "index.html": page.render(evidence)}
    for path, text in written.items():
        path.write_text(text)
    return list(written)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", type=Path, metavar="FOLDER", help="what the sessions of a run have left, *.json, in folders, too"
    )
    parser.add_argument("--reports", type=Path, metavar="FOLDER", default=HERE / "reports", help="default: %(default)s")
    parser.add_argument("--date", default=str(datetime.date.today()), help="of the run (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        if not options.parts:
            evidence = evidence_in(options.reports)
            options.reports.mkdir(parents=True, exist_ok=True)
            print(*(f"written: {path}" for path in draw(evidence, options.reports)), sep="\n")
            return 0
        parts = merge.parts_in(options.parts)
        outputs = (HERE / "reports", HERE / "CONFORMANCE.md")
        reports = merge.merge(parts, str(datetime.date.fromisoformat(options.date)), *merge.commit_of_this_tree(outputs))
        evidence = evidence_in(options.reports, reports)  # raises ValueError before anything is written
        for report in reports:
            merge.write(report, options.reports)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(terminal(evidence, sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    failed = [(report, check) for report in reports for check in report["checks"] if check["outcome"] == "failed"]
    for report, check in failed:
        where = f"[{report['site']}, {report['rung']} rung] ({' '.join(check['clauses'])})"
        print(f"failed: {check['name']} {where}: {check['message']}")
    missing = merge.not_run(parts)
    print(*missing, f"reports: {options.reports}; `nox -s report` draws them", sep="\n")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())

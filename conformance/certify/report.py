"""The folder to attach to a paper or a ticket: certificate.json, certificate.md, and a page with the loss curves."""

import html
import json
import math
import platform
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

from conformance.certify.promises import Certificate
from conformance.certify.runs import Program
from conformance.harness import files
from conformance.harness.reference import sha256

WIDTH, HEIGHT = 900, 260
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}
td,th{padding:.3rem .8rem .3rem 0;text-align:left;vertical-align:top}.broken{color:#c0392b}.kept{color:#2e8b57}
path{fill:none;stroke-width:1.5}code{font-size:.9em}"""


def write(folder: Path, certificate: Certificate, program: Program, unproven: list[str], seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = dict(
        program=Path(program.file).name,
        flags=program.flags,
        site=program.launch.site,
        launcher=program.launch.launcher,
        date=str(date.today()),
        seconds=round(seconds, 1),
        versions=dict(python=platform.python_version(), torch=version("torch"), ddp_core=version("ddp-core")),
        hashes=hashes(program, certificate),
        verdicts=[asdict(verdict) for verdict in certificate.verdicts],
        not_shown=unproven,
        runs=[dict(name=run.name, exit_codes=run.exit_codes, seconds=round(run.seconds, 2)) for run in program.runs],
        losses={run.name: run.losses for run in program.runs if run.well},
    )
    (folder / "certificate.json").write_text(json.dumps(document, indent=1))
    (folder / "certificate.md").write_text(markdown(document))
    (folder / "certificate.html").write_text(page(document))


def hashes(program: Program, certificate: Certificate) -> dict[str, str]:
    """Hashes of everything that ran: the program's file, its data, the site's folder, the core."""
    start = next((run.first_line for run in program.runs if run.of("start")), {})
    file = Path(certificate.notes.get("file") or program.file)
    of_program = sha256(file) if file.is_file() else ""
    of_site, of_core = files.of_folder(program.launch.train.parent), files.of_folder(files.core())
    return dict(program=of_program[:16], data=start.get("data", ""), site=of_site[:16], core=of_core[:16])


def headline(document: dict) -> str:
    states = [verdict["state"] for verdict in document["verdicts"]]
    kept, broken = states.count("kept"), states.count("broken")
    return f"{kept} promises kept, {broken} broken, {len(states) - kept - broken} not promised or not shown"


def origin(document: dict) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    digests = ", ".join(f"{name} {number}" for name, number in document["hashes"].items())
    return [
        f"By the train.py of {document['site']}, launcher {document['launcher']}, "
        f"on the CPU of a test machine, {document['date']}.",
        f"Versions: {versions}. Hashes: {digests}. {len(document['runs'])} runs in {document['seconds']:.0f} s.",
        "Not shown: " + "; ".join(document["not_shown"]) + ".",
    ]


def markdown(document: dict) -> str:
    rows = ["| promise | verdict | measured | likeliest reason | line |", "|---|---|---|---|---|"]
    for verdict in document["verdicts"]:
        cells = [verdict[name] for name in ("promise", "state", "measured", "reason", "where")]
        rows.append("| " + " | ".join(str(cell or "").replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join([f"# {document['program']}: {headline(document)}", "", *rows, "", *origin(document), ""])


def page(document: dict) -> str:
    rows = []
    for verdict in document["verdicts"]:
        place = f" (line {verdict['where']})" if verdict["where"] else ""
        cells = [verdict["promise"], verdict["state"], verdict["measured"], verdict["reason"] + place]
        kind = verdict["state"].replace(" ", "-")
        rows.append(f'<tr class="{kind}">' + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    footer = "".join(f"<p>{html.escape(line)}</p>" for line in origin(document))
    title = html.escape(f"{document['program']}: {headline(document)}")
    head = "<tr><th>promise</th><th>verdict</th><th>measured</th><th>likeliest reason</th></tr>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1>{curves(document['losses'])}<table>{head}{''.join(rows)}</table>{footer}</html>\n"
    )


def curves(losses: dict[str, list[float]]) -> str:
    """SVG of every run's losses over steps; equal runs overlap."""
    shown = {name: values for name, values in losses.items() if name != "pilot" and len(values) > 1}
    finite = [value for values in shown.values() for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high, steps = min(finite), max(finite), max(map(len, shown.values()))
    lines = []
    for number, (name, values) in enumerate(shown.items()):
        points = [
            f"{step / (steps - 1) * WIDTH:.1f},{HEIGHT - (value - low) / ((high - low) or 1) * HEIGHT:.1f}"
            for step, value in enumerate(values)
            if math.isfinite(value)
        ]
        hue = 360 * number // len(shown)
        lines.append(f'<path stroke="hsl({hue} 60% 50%)" d="M{" L".join(points)}"><title>{html.escape(name)}</title></path>')
    words = f"Losses of {len(shown)} runs over {steps} steps, from {high:.4g} to {low:.4g}: {', '.join(shown)}"
    view = f'viewBox="0 -4 {WIDTH} {HEIGHT + 8}"'
    return f'<figure><svg {view} role="img">{"".join(lines)}</svg><figcaption>{html.escape(words)}</figcaption></figure>'

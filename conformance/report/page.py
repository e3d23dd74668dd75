"""CONFORMANCE.md and the HTML page: counts, comparisons and figures for the templates beside this file.

The page is one HTML file, readable without a network, without JavaScript, in print and by keyboard. Its content does not
depend on the clock or on the machine that draws it.
"""

import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from conformance.harness.evidence import MARKS, RUNGS, STATE_OF, Evidence, counted, margin, plain, plural, span
from conformance.report import curves
from conformance.report.verify import off


def render(evidence: Evidence) -> str:
    """The HTML page."""
    notes: dict[str, list[tuple]] = {}
    for site, clause, text, check in evidence.notes("failed", "expected failure", "not run"):
        notes.setdefault(clause, []).append((site, text, STATE_OF[check["outcome"]], check["link"]))
    tiers = evidence.deviations()
    known = {size for rows in tiers.values() for of in rows.values() for size in of}
    sizes = [*sorted(known - {None}), *({None} & known)]
    filled = dict(
        evidence=evidence,
        checks=[check for report in evidence.current for check in report["checks"]],
        failing=[(clause, site) for (site, clause), cell in evidence.cells.items() if cell.state == "failed"],
        statuses={site: evidence.status(site) for site in evidence.sites},
        notes=notes,
        figures=figures(evidence),
        tiers=tiers,
        sizes=sizes,
        size_heads=[f"world size {size}" if size else "no ranks" for size in sizes],
        snapshots=snapshots(evidence),
        **WORDS,
    )
    return environment(prose=code, dated=dated, versions=versions, machine=machine).get_template("page.html").render(filled)


def markdown(evidence: Evidence) -> str:
    """CONFORMANCE.md: the same content by groups of clauses, in one table that GitHub can show."""
    template = environment(prose=prose, literal=literal, cell=cell, of_group=of_group).get_template("CONFORMANCE.md")
    return template.render(evidence=evidence, **WORDS)


WORDS = dict(marks=MARKS, rungs=RUNGS, counted=counted, margin=margin)


def environment(**filters) -> Environment:
    loader, escaped = FileSystemLoader(Path(__file__).parent / "templates"), select_autoescape(["html"])
    options: dict[str, Any] = dict(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    made = Environment(loader=loader, autoescape=escaped, undefined=StrictUndefined, **options)
    made.filters |= dict(span=span, plural=plural) | filters
    return made


def code(text: str) -> Markup:
    """HTML in which text in `backticks` is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def dated(text: str) -> Markup:
    return Markup(re.sub(r"\d{4}-\d\d-\d\d", r"<time>\g<0></time>", str(escape(text))))


def literal(text: str) -> str:
    """Markdown that shows this text unchanged."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", " ".join(text.split()))


def prose(text: str) -> str:
    """The same, except for code in `backticks`."""
    return re.sub(r"(`[^`]+`)|([^`]+|`)", lambda part: part[1] or re.sub(r"([\\`*_<>\[\]|])", r"\\\1", part[2]), text)


def cell(text: str) -> str:
    """Escape text for a table cell in Markdown."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def of_group(evidence: Evidence, site: str, group: str) -> str:
    counts, rungs, dates = evidence.group(site, group)
    lines = [f"{MARKS[state]} {text}" for state, text in counted(counts).items() if state != "elsewhere"]
    return "<br>".join([*lines, *([", ".join(rungs), span(dates)] if rungs else [])]) or "·"


def versions(by_name: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(by_name.items()))


def machine(hardware: dict) -> str:
    accelerators = f"{hardware['accelerators']} of {hardware['accelerator']}" if hardware.get("accelerator") else ""
    return ", ".join(filter(None, [plural(hardware["cores"], "core") if hardware.get("cores") else "", accelerators]))


# ---- curves --------------------------------------------------------------------------------------------------------


def short(value: float) -> str:
    return "exact" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "not a number"


def figures(evidence: Evidence) -> list[dict]:
    """One figure per precision: the legend, and a panel per world size, all with the same scales."""
    drawn = []
    for report in evidence.current:
        for curve in report["curves"]:
            label = ", ".join(filter(None, [report["site"], curve["launcher"]]))
            label += "" if report["rung"] == "process" else f", {report['rung']} {report['backend']}"
            losses = [float.fromhex(text) for text in curve["losses"]]
            number = evidence.sites.index(report["site"]) % curves.SITES
            drawn.append(curve | dict(label=label, losses=losses, off=off(losses, evidence.golden), site=number))
    for curve in drawn:  # colour and shape identify the site, dashes its launcher
        labels = list(dict.fromkeys(other["label"] for other in drawn if other["site"] == curve["site"]))
        curve["dash"] = labels.index(curve["label"])
    precisions = sorted({curve["precision"] for curve in drawn}, reverse=True)
    return [figure(evidence, name, [curve for curve in drawn if curve["precision"] == name]) for name in precisions]


def figure(evidence: Evidence, precision: str, drawn: list[dict]) -> dict:
    used = {check["limit"] for report in evidence.current for check in report["checks"]}
    tiers = evidence.spec.tiers.items()
    limits = {limit: f"{tier}, {plain(limit)}" for limit, (tier, of) in tiers if of == precision and limit in used}
    deviations = [value for curve in drawn for value in curve["off"] if value and math.isfinite(value)] + [*(limits or [1e-10])]
    scale = (max(math.floor(math.log10(min(deviations))), -18), math.ceil(math.log10(max(deviations)) + 0.3))
    panels = []
    for size in sorted({curve["world_size"] for curve in drawn}):
        chosen = [curve for curve in drawn if curve["world_size"] == size]
        alike: dict[tuple, list[dict]] = {}
        for curve in chosen:
            alike.setdefault(tuple(curve["losses"]), []).append(curve)
        worst, label = max((max(curve["off"], default=math.inf), curve["label"]) for curve in chosen)
        caption = f"{plural(len(chosen), 'curve')}, {len(alike)} distinct. Worst deviation: {short(worst)}"
        caption += f" ({label})." if worst else "."
        if unequal := sum(len(curve["losses"]) != len(evidence.golden) for curve in chosen):
            caption += f" {plural(unequal, 'curve')} of another length than the golden trace."
        name = f"{precision}, world size {size}"
        heads = ["; ".join(curve["label"] for curve in same) for same in alike.values()]
        columns = [same[0]["off"] for same in alike.values()]
        svg = curves.panel(evidence.golden, chosen, scale, limits, f"World size {size}", escape(f"Losses in {name}. {caption}"))
        panels.append(
            dict(
                name=name,
                caption=caption,
                svg=Markup(svg),
                heads=[f"all {len(chosen)}"] if len(alike) == 1 < len(chosen) else heads,
                rows=[
                    (step, f"{loss:.6f}", [short(values[step]) if step < len(values) else "none" for values in columns])
                    for step, loss in enumerate(evidence.golden)
                ],
            )
        )
    legend = {curve["label"]: Markup(curves.sample(curve)) for curve in drawn}
    return dict(precision=precision, panels=panels, legend=legend)


# ---- snapshots -----------------------------------------------------------------------------------------------------


def snapshots(evidence: Evidence) -> dict:
    """The results of group S: one row per check, with the world sizes and launchers at which it ran."""
    rows: dict[tuple, dict] = {}
    for report in evidence.current:
        for check in report["checks"]:
            if clauses := [clause for clause in check["clauses"] if clause in evidence.spec.of("S")]:
                by_site = rows.setdefault((" ".join(clauses), check["name"]), {})
                by_site.setdefault(report["site"], []).append(check | dict(rung=report["rung"]))
    sites = [site for site in evidence.sites if any(site in by_site for by_site in rows.values())]
    return dict(
        sites=sites, rows=[(key, [_counted(evidence, rows[key].get(site, [])) for site in sites]) for key in sorted(rows)]
    )


def _counted(evidence: Evidence, checks: list[dict]) -> tuple[dict[str, str], str]:
    sizes = sorted({check["world_size"] for check in checks} - {None})
    rungs = sorted({check["rung"] for check in checks}, key=list(RUNGS).index)
    launchers = sorted({check["launcher"] for check in checks} - {None})
    where = [*rungs, *launchers, *(["world size " + ", ".join(map(str, sizes))] if sizes else [])]
    return counted(evidence.states(checks)), ", ".join(where)

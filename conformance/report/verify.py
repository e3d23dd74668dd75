"""Checks that a report is credible: unchanged since it was written, possible on its rung, consistent with other reports.

This finds slips, such as an edited outcome or a report in another rung's folder. It cannot detect forgery: anybody who
changes a report on purpose can compute its digest again.
"""

import datetime
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path

from conformance.harness.evidence import NEVER_EXCUSED, Evidence, deviation, place

FORMAT = 2
WITHOUT_RANKS = ("suite", "static", "extras")


def digest(report: dict) -> str:
    content = {name: value for name, value in report.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def path_of(report: dict) -> Path:
    """The report's path below reports/: one file per site, rung and backend."""
    site, rung, backend = place(report)
    return Path(site, f"{rung}-{backend}.json")


def read(path: Path) -> dict:
    """Read one report. Raises ValueError if the file was changed after it was written."""
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error} (V14)") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{path}: format should be {FORMAT} (V14)")
    if report.get("digest") != (computed := digest(report)):
        raise ValueError(f"{path}: digest={report.get('digest')}, but should be {computed}: changed after it was written (V14)")
    if (wanted := path_of(report)) != Path(*path.parts[-2:]):
        raise ValueError(f"{path}: should be {wanted}, as it says itself (V14)")
    return report


def contradictions(evidence: Evidence) -> list[str]:
    """One line per contradiction within a report or between two."""
    lines = []
    for report in evidence.reports:
        where, site = ", ".join(place(report)), evidence.site_toml.get(report["site"], {})
        texts = [*_of_rung(report, site), *_of_device(report, site), *_of_checks(report)]
        lines += [f"{text} [{where}] (V14)" for text in texts]
    for report in evidence.current:
        lines += [f"{text} [{', '.join(place(report))}] (V14)" for text in _of_curves(report, evidence)]
    return [*lines, *_between(evidence.reports), *_of_one_run(evidence.current)]


def _of_rung(report: dict, site: dict) -> Iterable[str]:
    """Facts that are impossible on this rung."""
    rung, backend, sizes, versions = (report[name] for name in ("rung", "backend", "world_sizes", "versions"))
    ranks = backend != "none" if rung == "cluster" else rung not in WITHOUT_RANKS
    used = {of["world_size"] for of in report["checks"] + report["curves"]} - {*sizes, None}
    if rung == "cluster" and "slurm" not in versions:
        yield "slurm=none, but should be the version under which the job ran"
    if rung == "cluster" and site.get("scheduler", "slurm") != "slurm" and "stand-ins for" not in versions:
        yield f"stand-ins for=none, but should name the commands of {site['scheduler']}, which does not run here"
    if rung == "process" and "mpi" not in versions:
        yield "mpi=none, but should be the library that started the ranks"
    if ranks != bool(sizes) or ranks != (backend != "none") or (report["curves"] and not ranks):
        wanted = "of ranks" if ranks else "none, as there are no ranks"
        yield f"world_sizes={sizes} and backend={backend}, but should be {wanted}"
    if ranks and "torch" not in versions:
        yield "torch=none, but should be a version"
    if used:
        yield f"world sizes of checks and curves={sorted(used)}, but should be among {sizes}"
    if datetime.date.fromisoformat(report["date"]) > datetime.date.today() + datetime.timedelta(days=1):  # time zones
        yield f"date={report['date']}, but should not be in the future"


def _of_device(report: dict, site: dict) -> Iterable[str]:
    """Accelerators that are missing, or more than possible."""
    rung, device, versions = (report[name] for name in ("rung", "device", "versions"))
    torch, accelerators = versions.get("torch", "none"), report["machine"].get("accelerators") or 0
    devices, virtual = site.get("node", {}).get("devices", 0), sorted({"slurm", "stand-ins for"} & versions.keys())
    if rung == "device" or (rung == "machine" and devices):
        if not accelerators:
            yield "accelerators=0, but should be at least 1"
        if device == "cpu":
            yield "device=cpu, but should be an accelerator"
        if "+cpu" in torch:
            yield f"torch={torch}, but should be a build for accelerators"
    elif device != "cpu":
        yield f"device={device}, but should be cpu"
    if rung == "machine" and accelerators > devices:
        yield f"accelerators={accelerators}, but should be at most {devices}, as site.toml says of a node"
    if rung == "machine" and virtual:
        yield f"{virtual[0]}={versions[virtual[0]]}, but should be on a virtual cluster only"


def _of_checks(report: dict) -> Iterable[str]:
    """Outcomes that contradict their own facts."""
    for check in report["checks"]:
        name, outcome = check["name"], check["outcome"]
        if outcome == "passed" and check["limit"] is not None and not deviation(check) <= check["limit"]:
            yield f"{name}: passed with a deviation of {check['deviation']}, but should be at most {check['limit']}"
        if outcome == "failed" and not check["message"]:
            yield f"{name}: failed without a message, but should have one"
        if outcome == "expected-failure" and not (check["reason"] and check["link"]):
            yield f"{name}: expected failure without reason and link, but should have both"
        if outcome == "expected-failure" and (never := [clause for clause in check["clauses"] if clause[0] in NEVER_EXCUSED]):
            yield f"{name}: expected failure of {never[0]}, but should be of no clause in {', '.join(NEVER_EXCUSED)}"


def _passed(report: dict, curve: dict) -> bool:
    """Whether every check passed for this curve's launcher and world size."""
    where = [check for check in report["checks"] if all(check[name] == curve[name] for name in ("launcher", "world_size"))]
    return all(check["outcome"] == "passed" for check in where)


def off(losses: list[float], golden: list[float]) -> list[float]:
    """|loss - golden| / golden at every step; infinite where this is not a number."""
    values = [abs(loss - true) / abs(true) for loss, true in zip(losses, golden, strict=False)]
    return [value if math.isfinite(value) else math.inf for value in values]


def _of_curves(report: dict, evidence: Evidence) -> Iterable[str]:
    """Curves that differ from the golden one although no check failed."""
    for curve in (curve for curve in report["curves"] if _passed(report, curve)):
        losses = [float.fromhex(text) for text in curve["losses"]]
        limit = max((limit for limit, (_, of) in evidence.spec.tiers.items() if of == curve["precision"]), default=math.inf)
        worst = max(off(losses, evidence.golden), default=math.inf)
        if len(losses) != len(evidence.golden) or not worst <= limit:
            where = f"{curve['launcher']}, world size {curve['world_size']}, {curve['precision']}"
            text = f"{worst:.1e} off in {len(losses)} steps, and nothing has failed"
            yield f"curve of {where}: {text}, but should be the golden one"


def _between(reports: list[dict]) -> Iterable[str]:
    """Reports of one commit must have the same files; reports of one core must have the same version."""
    values: dict[tuple, dict[str, list[str]]] = {}
    for report in reports:
        rung, files = report["rung"], report["files"]
        same: dict[tuple, str | None] = {("core of these files", files["core"]): report["versions"].get("ddp_core")}
        if report["commit"] and not report["modified"]:
            same |= {("files of conformance", report["commit"], rung == "suite"): files["conformance"]}
            same |= {(f"files of {report['site']}", report["commit"], rung == "static"): files["site"]}
        for key, value in same.items():
            values.setdefault(key, {}).setdefault(str(value)[:12], []).append("-".join(place(report)))
    for key, by_value in values.items():
        if len(by_value) > 1:
            yield f"{key[0]}, {str(key[1])[:12]}={by_value}, but should be the same in all reports (V14)"


def _of_one_run(reports: list[dict]) -> Iterable[str]:
    """In one run, all sites must have the same losses at a world size, bit for bit (T0)."""
    traces: dict[str, dict[tuple, set[str]]] = {}
    for report in reports:
        versions = {name: value for name, value in report["versions"].items() if name != "stand-ins for"}
        run = [report[name] for name in ("rung", "backend", "device", "date", "commit", "machine")] + [versions]
        for curve in (curve for curve in report["curves"] if _passed(report, curve)):
            what = f"{curve['precision']}, world size {curve['world_size']}, {report['rung']} rung"
            key = json.dumps([what, run], sort_keys=True)
            traces.setdefault(key, {}).setdefault(tuple(curve["losses"]), set()).add(report["site"])
    for key, by_losses in traces.items():
        if len(by_losses) > 1:
            observed = f"{len(by_losses)} ({'; '.join(', '.join(sorted(names)) for names in by_losses.values())})"
            should_be = "1: nothing has failed, and one run gives one trace"
            yield f"traces in {json.loads(key)[0]}={observed}, but should be {should_be} (V14)"

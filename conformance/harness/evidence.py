"""The evidence of the reports, clause by clause. Each report is the newest of its site, rung and backend.

report/merge.py makes the reports; report/page.py draws CONFORMANCE.md and the page.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

# The ladder, weakest rung first, and what each rung shows. The words leave no doubt about where something ran.
RUNGS = {
    "suite": "the suite itself, against what it must reject; about no site",
    "static": "files were read, nothing was trained",
    "extras": "what a site brings beside its job, run on the CPU of a test machine",
    "process": "the site's train.py in MPI ranks on the CPU of a test machine, in the environment that its launcher exports",
    "device": "the same on an accelerator of a test machine",
    "cluster": "the site's job script under a real Slurm on virtual nodes of a test machine; stand-ins are named",
    "machine": "the site's job script on the machine itself",
}
# A clause takes the first of these states that any of its checks has.
STATES = ("failed", "expected failure", "pass", "of other files", "not run", "untested", "none brought", "elsewhere")
MARKS = dict(zip(STATES, "✗!✓≠○···", strict=True))
STATE_OF = {"passed": "pass", "failed": "failed", "expected-failure": "expected failure", "skipped": "not run"}
STATUS = {
    "never-run": "never run",
    "simulated": "simulated, never on the machine itself",
    "run-on-site": "run on the machine itself",
}
CORE = "core"  # checks that belong to no site
EXTRAS = "E"  # the group of what a site may bring beside its job
NEVER_EXCUSED = ("D", "L", "S", "C")  # groups that [[expected_failures]] cannot name: the training itself


# ---- SPEC.md -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """groups: letter to title. clauses: id to sentence. tiers: limit to (tier, precision), for example ("T1", "fp64")."""

    groups: dict[str, str]
    clauses: dict[str, str]
    untested: set[str]
    tiers: dict[float, tuple[str, str]]

    @classmethod
    def read(cls, text: str) -> "Spec":
        clauses = re.findall(r"^- \*\*([A-Z]+\d+)\*\* (\(untested\) )?(.+(?:\n  .+)*)", text, re.MULTILINE)
        tiers = {}
        for tier, words in re.findall(r"\*\*(T\d)\*\*((?:[^*·\n]|\n(?!\n))+)", text):
            precision = re.search(r"\bin (\w+)", words)
            for limit in re.findall(r"\d+e-\d+", words) or [0]:
                tiers[float(limit)] = (tier, precision[1] if precision else "")
        return cls(
            dict(re.findall(r"^## ([A-Z]+): (.+)$", text, re.MULTILINE)),
            {name: " ".join(sentence.split()) for name, _, sentence in clauses},
            {name for name, untested, _ in clauses if untested},
            tiers,
        )

    def of(self, group: str) -> list[str]:
        return [name for name in self.clauses if name.rstrip("0123456789") == group]

    def tier(self, site: str, limit: float) -> str:
        """'T1, fp64: limit 1e-10'. Checks of the core have no tier."""
        words = ", ".join(filter(None, self.tiers.get(limit, ()))) if site != CORE else CORE
        return ": ".join(filter(None, [words, f"limit {plain(limit)}" if limit else "exact"]))


# ---- what reports say ----------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """A clause at a site. rung, date: of the strongest evidence for its state. notes: the checks that did not pass."""

    state: str
    rung: str = ""
    date: str = ""
    notes: list[dict] = field(default_factory=list)


class Evidence:
    """Reports, clause by clause, in a fixed order. files(site, rung): today's sha256 of the files that such a report covers.

    A report of other files is shown, but is no evidence.
    """

    def __init__(self, reports: list[dict], sites: list[dict], spec: str, golden: list[float], files: Callable):
        self.spec, self.golden = Spec.read(spec), golden
        order = [toml["name"] for toml in sites]
        order += sorted({report["site"] for report in reports} - {*order, CORE})
        self.sites = [*order, CORE]
        self.site_toml = {toml["name"]: toml for toml in sites}
        self.reports = sorted(reports, key=self._place)
        self.changed: dict[tuple, list[str]] = {}
        for report in reports:
            now = files(report["site"], report["rung"])
            self.changed[place(report)] = [name for name in now if report["files"].get(name) != now[name]]
        self.current = [report for report in self.reports if not self.changed_in(report)]
        self.cells = {(site, clause): self._cell(site, clause) for site in self.sites for clause in self.spec.clauses}

    def changed_in(self, report: dict) -> list[str]:
        """Which of core, conformance and site have changed since the report."""
        return self.changed[place(report)]

    def _place(self, report: dict) -> tuple:
        """Sort key: sites in order, strongest rung first."""
        return self.sites.index(report["site"]), -list(RUNGS).index(report["rung"]), report["backend"]

    def _cell(self, site: str, clause: str) -> Cell:
        states, notes = [], []
        for report in (report for report in self.reports if report["site"] == site):
            checks = [check for check in report["checks"] if clause in check["clauses"]]
            ran = {STATE_OF[check["outcome"]] for check in checks} - {"not run"}
            if report in self.current:
                when = dict(rung=report["rung"], date=report["date"])
                notes += [check | when for check in checks if check["outcome"] != "passed"]
            elif ran:
                ran = {"of other files"}
            if ran:
                states.append((min(ran, key=STATES.index), report["rung"], report["date"]))
        if states:
            state = min((state for state, _, _ in states), key=STATES.index)
            strongest = max((list(RUNGS).index(rung), date) for at, rung, date in states if at == state)
            return Cell(state, list(RUNGS)[strongest[0]], strongest[1], notes)
        # A clause of the core is not missing at a site, nor a site's clause at the core. A clause that no session checked takes
        # its group's place.
        alike = ({clause}, {*self.spec.of(clause.rstrip("0123456789"))})
        about_core = [{report["site"] == CORE for report in self.reports if names & _asked(report)} for names in alike]
        if not {site == CORE} & (about_core[0] or about_core[1] or {True, False}):
            return Cell("elsewhere")
        if clause in self.spec.of(EXTRAS) and site in self.site_toml and not self.site_toml[site].get("extras"):
            return Cell("none brought")
        return Cell("untested" if clause in self.spec.untested else "not run", notes=notes)

    def status(self, site: str) -> str:
        """What site.toml says about the site itself."""
        verified = self.site_toml.get(site, {}).get("verified", {})
        if site not in self.site_toml:
            return "belongs to no site" if site == CORE else "has no site.toml here"
        words = STATUS.get(verified.get("status"), "says nothing of itself")
        return f"{words}, {verified['date']}" if "date" in verified else words

    def words(self, site: str) -> str:
        """The evidence that site.toml gives."""
        return " ".join(self.site_toml.get(site, {}).get("verified", {}).get("evidence", "").split())

    def unverified(self, site: str) -> list[str]:
        """The sentences that site.toml lists under unverified: what no run has shown."""
        verified = self.site_toml.get(site, {}).get("verified", {})
        return [" ".join(sentence.split()) for sentence in verified.get("unverified", [])]

    def group(self, site: str, group: str) -> tuple[Counter, list[str], list[str]]:
        """How many clauses are in each state; their rungs, weakest first; their dates."""
        cells = [self.cells[site, clause] for clause in self.spec.of(group)]
        rungs = sorted({cell.rung for cell in cells if cell.rung}, key=list(RUNGS).index)
        return Counter(cell.state for cell in cells), rungs, sorted({cell.date for cell in cells if cell.date})

    def notes(self, *states: str) -> list[tuple[str, str, str, dict]]:
        """(site, clause, text, one check) for every check in these states. Checks with the same message are one entry."""
        entries = []
        for (site, clause), cell in self.cells.items():
            alike: dict[tuple, list[dict]] = {}
            for note in cell.notes:
                if STATE_OF[note["outcome"]] in states:
                    alike.setdefault((note["rung"], note["name"], note["reason"] or note["message"]), []).append(note)
            for (rung, name, message), notes in alike.items():
                launchers = ", ".join(sorted({note["launcher"] for note in notes} - {None}))
                sizes = ", ".join(map(str, sorted({note["world_size"] for note in notes} - {None})))
                where = filter(None, [f"{rung} rung", launchers, sizes and f"world size {sizes}"])
                entries.append((site, clause, f"{name} [{', '.join(where)}]: {message}", notes[0]))
        return entries

    def failed_of_other_files(self) -> list[str]:
        """One line a report: '2 checks failed (core, device rung, nccl, 2026-11-26: L20)'."""
        lines = []
        for report in (report for report in self.reports if self.changed_in(report)):
            failed = [check["clauses"] for check in report["checks"] if check["outcome"] == "failed"]
            if failed:
                where = f"{report['site']}, {report['rung']} rung, {report['backend']}, {report['date']}"
                lines.append(f"{plural(len(failed), 'check')} failed ({where}: {', '.join(sorted({*chain(*failed)}))})")
        return lines

    def deviations(self) -> dict[str, dict[tuple, dict]]:
        """Tier to (site, rung, backend) to world size to the check that came nearest to the limit."""
        table: dict[tuple, dict] = {}
        for report in self.current:
            for check in report["checks"]:
                if check["limit"] is not None and check["deviation"] is not None:
                    tier = (report["site"] == CORE, check["limit"], self.spec.tier(report["site"], check["limit"]))
                    row = table.setdefault(tier, {}).setdefault(place(report), {})
                    size = check["world_size"]
                    row[size] = max(row.get(size, check), check, key=deviation)
        return {tier: table[of_core, limit, tier] for of_core, limit, tier in sorted(table)}

    def worst(self) -> list[tuple[str, str, str]]:
        """(tier, margin, place) of the worst check of each tier."""
        lines = []
        for tier, rows in self.deviations().items():
            checks = [(deviation(of[size]), key, size, of[size]) for key, of in rows.items() for size in of]
            _, (site, rung, _), size, check = max(checks, key=lambda entry: entry[0])
            where = [site, check["launcher"], f"{rung} rung", size and f"world size {size}"]
            lines.append((tier, margin(check), ", ".join(filter(None, where))))
        return lines

    def dates(self) -> str:
        dates = sorted({report["date"] for report in self.reports})
        return span(dates) if dates else "no report yet"

    @staticmethod
    def states(checks: Iterable[dict]) -> Counter:
        return Counter(STATE_OF[check["outcome"]] for check in checks)


def place(report: dict) -> tuple[str, str, str]:
    """What a report is about. A newer report with the same key replaces it."""
    return report["site"], report["rung"], report["backend"]


def _asked(report: dict) -> set[str]:
    return {*report["expected"], *(clause for check in report["checks"] for clause in check["clauses"])}


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def counted(counts: Counter) -> dict[str, str]:
    """State to '2 expected failures', in the order of STATES."""
    words = {state: f"{counts[state]:,} {state}" for state in STATES if counts[state]}
    others = {"expected failure": plural(counts["expected failure"], "expected failure"), "none brought": "none brought"}
    return {state: others.get(state, text) for state, text in words.items()}


def plain(number: float) -> str:
    return f"{number:g}".replace("e-0", "e-")


def deviation(check: dict) -> float:
    return float(check["deviation"])


def margin(check: dict) -> str:
    """'9.8e-16, 100,000 times below'."""
    worst, limit = deviation(check), float(check["limit"])
    if worst == 0 or not limit or not math.isfinite(worst):
        return "exact" if worst == 0 else f"{worst:.1e}, should be exact" if not limit else "not comparable"
    times = float(f"{max(limit / worst, worst / limit):.2g}")
    return f"{worst:.1e}, {times:,.{int(times < 10)}f} times {'below' if worst <= limit else 'above'}"


def span(dates: list[str]) -> str:
    return dates[0] if dates[:1] == dates[-1:] else " to ".join([dates[0], dates[-1]]) if dates else ""

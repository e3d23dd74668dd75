"""What conformance adds to pytest: a verdict for each clause and site, and ranks that fail and end together.

conftest.py registers one class in every session: Ranks under --with-mpi (beside pytest-mpi), Submitted under --submit, else
Verdicts. EXPECT_WORLD gives the number of ranks that mpiexec was to start. report/merge.py reads the folder of --part.
"""

import json
import os
import platform
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from conformance.cluster.schedulers import NotSubmitted
from conformance.harness import files
from conformance.harness.check import clauses_of, parameters
from conformance.harness.evidence import NEVER_EXCUSED, margin, plain
from conformance.harness.submit import Jobs
from conformance.harness.world import World

LONE = 5.0  # seconds that a failing rank waits for the others to end the same test
MEETING = 120.0  # seconds that a passing rank waits for the others
CONNECTING = 15.0  # seconds for threads that the core has left behind; its rendezvous waits 10 s here
PASSED_ON = 1.0  # seconds for mpiexec to pass on output: with an immediate Abort, MPICH's lost it in 5 of 200 tries


class Verdicts:
    """Print one line a check at the end: its clauses, how many passed, the worst deviation and its margin."""

    backend = "none"
    world_size: int | None = None

    def __init__(self, config):
        self.config, self.rung = config, config.getoption("--rung")
        self.title = f"conformance, {self.rung} rung"
        self.checks: list[dict] = []
        self.curves: list[dict] = []
        self.expected: dict[str, set] = {}
        entries = [(site.name, entry) for site in config.sites for entry in site.toml.get("expected_failures", [])]
        self.expected_failures: list[tuple[str, dict]] = []
        self.failed_as_expected: list[dict] = []
        self.objections: list[str] = []
        for site, entry in entries:
            if str(entry.get("clause")).startswith(NEVER_EXCUSED):
                should_be = f"in none of the groups {', '.join(NEVER_EXCUSED)}: what a run computes is not excused"
                self.objections.append(
                    f"expected_failures: {entry['clause']} in site.toml, but should be {should_be} [{site}] (V9)"
                )
            else:
                self.expected_failures.append((site, entry))
        self.files: dict = {}

    # ---- which clauses are checked of which site --------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.expect(items)

    def expect(self, items: list[pytest.Item]) -> None:
        """Note that these clauses are to be checked of these sites."""
        for item in items:
            if clauses := clauses_of(item):
                who = self._who(item)
                item.user_properties += [("clauses", clauses), ("who", who)]
                self.expected.setdefault(who["site"], set()).update(clauses)

    @staticmethod
    def _who(item) -> dict:
        """The site and the launcher that an item is about. An item without a site is about the core."""
        launch, site = parameters(item).get("launch"), parameters(item).get("site")
        return dict(site=launch.site if launch else site.name if site else "core", launcher=launch.launcher if launch else None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Report an expected failure of the site's site.toml as such. _judge makes one that does not happen a failure (V9)."""
        report = yield
        who = dict(item.user_properties).get("who")
        if not who or (report.when != "call" and not report.failed):
            return report
        for site, entry in self.expected_failures:
            about = site == who["site"] and entry.get("launcher") in (None, who["launcher"])
            if about and report.failed and f"({entry.get('clause')})" in report.longreprtext:
                report.outcome, report.wasxfail = "skipped", entry.get("reason", "")
                report.user_properties.append(("expected", entry))
                self.failed_as_expected.append(entry)
        return report

    def pytest_runtest_logreport(self, report):
        if (words := self.config.getoption("--until")) and report.failed and words in report.longreprtext:
            self.config.pluginmanager.get_plugin("session").shouldstop = f"it has said {words!r}"
        properties = dict(report.user_properties)
        if not properties.get("clauses") or (report.when != "call" and report.passed):
            return
        expected, compared = properties.get("expected"), [value for key, value in report.user_properties if key == "deviation"]
        worst, limit, what = max(compared, default=(None, None, None))
        name, _, case = report.nodeid.rpartition("::")[2].partition("[")
        self.checks.append(
            dict(
                **properties["who"],
                name=name.removeprefix("test_"),
                case=case.rstrip("]"),
                clauses=properties["clauses"],
                outcome="expected-failure" if expected else report.outcome,
                message="" if report.passed else report.longreprtext,
                reason=expected["reason"] if expected else "",
                link=expected["link"] if expected else "",
                what=what,
                deviation=worst,
                limit=limit,
            )
        )
        curves = [value for key, value in report.user_properties if key == "curve"]
        self.curves += [dict(**properties["who"], precision=precision, losses=losses) for precision, losses in curves]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Hash the files before the tests run: somebody may edit them meanwhile."""
        if self.config.getoption("--part"):
            self.files = files.of_run(self.rung, self.config.sites)

    # ---- the end ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        self._judge()
        if self.objections and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        folder = self.config.getoption("--part")
        if folder and session.exitstatus != pytest.ExitCode.NO_TESTS_COLLECTED:
            self._write_part(Path(folder))

    def _judge(self) -> None:
        """Object if a check was skipped (V2), or an expected failure passed (V9)."""
        if skipped := [check["name"] for check in self.checks if check["outcome"] == "skipped"]:
            observed = f"{len(skipped)} required checks were skipped"
            self.objections.append(f"{observed}, but should have run: {', '.join(skipped)} (V2)")
        if self.world_size and not any(check["outcome"] in ("passed", "expected-failure") for check in self.checks):
            self.objections.append("no check has passed (V2)")
        for site, entry in self.expected_failures:
            tried = [check for check in self.checks if check["site"] == site and entry.get("clause") in check["clauses"]]
            if tried and entry not in self.failed_as_expected:
                entry_of = f"expected_failures: {entry.get('clause')} in site.toml"
                self.objections.append(f"{entry_of}, but it passes: delete the entry [{site}] (V9)")

    def _write_part(self, folder: Path) -> None:
        """Write the file from which report/merge.py makes its reports."""
        part = dict(format=1, rung=self.rung, backend=self.backend, world_size=self.world_size, files=self.files)
        part |= self.where() | dict(expected={site: sorted(clauses) for site, clauses in self.expected.items()})
        part |= dict(checks=self.checks, curves=self.curves, objections=self.objections)
        if self.rung == "cluster":
            from conformance.cluster.layer import stand_ins  # imported here: where jobs are submitted, there is only pytest
            from conformance.cluster.virtual import release_of

            part["versions"]["slurm"] = release_of(self.config.getoption("--tree"))
            laid = {
                site.name: sorted(name for names in stand_ins(site).values() for name in names) for site in self.config.sites
            }
            part |= dict(stand_ins={site: ", ".join(names) for site, names in laid.items() if names})
        folder.mkdir(parents=True, exist_ok=True)
        names = [self.rung, self.backend, str(self.world_size), self.config.getoption("--about")]
        (folder / f"{'-'.join(filter(None, names))}.json").write_text(json.dumps(part, indent=1))

    def where(self) -> dict:
        """What the losses may depend on."""
        return dict(device=self.config.getoption("--device"), versions=versions(), machine=machine())

    def pytest_terminal_summary(self, terminalreporter):
        if not self.checks and not self.objections:
            return
        terminalreporter.section(self.title)
        rows: dict[str, list[dict]] = {}
        for check in self.checks:
            rows.setdefault(check["name"], []).append(check)
        widest = max((len(" ".join(checks[0]["clauses"])) for checks in rows.values()), default=0)
        longest = max(map(len, rows), default=0)
        for name, checks in rows.items():
            passed = sum(check["outcome"] == "passed" for check in checks)
            line = f"{' '.join(checks[0]['clauses']):<{widest}}  {name:<{longest}}  {passed} of {len(checks)} passed"
            if expected := sum(check["outcome"] == "expected-failure" for check in checks):
                line += f", {expected} failed as expected"
            if compared := [check for check in checks if check["limit"] is not None]:
                worst = max(compared, key=lambda check: check["deviation"])
                line += f"  worst deviation {margin(worst)}, limit {plain(worst['limit'])} [{worst['case']}]"
            terminalreporter.write_line(line, red=passed + expected < len(checks))
        for objection in self.objections:
            terminalreporter.write_line(objection, red=True)


def versions() -> dict[str, str]:
    """The versions that the losses may depend on."""
    versions_here = dict(python=platform.python_version())
    for name, package in (("torch", "torch"), ("ddp_core", "ddp-core"), ("numpy", "numpy")):
        try:
            versions_here[name] = version(package)
        except PackageNotFoundError:
            continue
    if "mpi4py.MPI" in sys.modules:
        versions_here["mpi"] = " ".join(sys.modules["mpi4py.MPI"].Get_library_version().split("\n")[0].strip("\0").split())
    return versions_here


def machine() -> dict:
    """What kind of machine this is; not its name or owner."""
    torch: Any = sys.modules.get("torch")
    count = torch.accelerator.device_count() if torch and torch.accelerator.is_available() else 0
    name = torch.get_device_module().get_device_name() if count else None
    return dict(cores=os.cpu_count(), accelerator=name, accelerators=count)  # not the cores that MPI has bound this rank to


class Ranks(Verdicts):
    """The ranks that mpiexec has started. Raises UsageError if their number is not EXPECT_WORLD (V1)."""

    def __init__(self, config):
        super().__init__(config)
        from mpi4py import MPI  # imported here: it starts MPI, which a session without ranks must not

        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it at its import, in the first run
        device, backend = config.getoption("--device"), config.getoption("--backend")
        self.world = World(MPI.COMM_WORLD, device, backend)
        self.outcomes = World(MPI.COMM_WORLD.Dup())  # a communicator apart from the tests' own messages
        self.world_size = self.world.size
        self.rung, self.backend = "process" if device == "cpu" else "device", self.world.backend_in_use
        self.title = f"conformance, {self.rung} rung, {device}, {self.backend}, world size {self.world_size}"
        expected = os.environ.get("EXPECT_WORLD", "unset")
        if expected != str(self.world_size):
            raise pytest.UsageError(
                f"EXPECT_WORLD={expected}, but this is a world of {self.world_size}: is it the right mpiexec? (V1)"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        for plugin in self.config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":
                plugin._is_testing_mpi = False  # pytest-mpi would print 25 lines about MPI
        if self.world.rank:
            self.config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Give all ranks the same report: failed if it failed on any. A rank that failed alone ends the session (V3)."""
        report = yield from super().pytest_runtest_makereport(item, call)
        if not self.outcomes.meet(LONE if report.failed else MEETING):
            what = report.longreprtext if report.failed else f"{item.name}: the other ranks have not come to its end"
            errors: Any = sys.__stderr__
            errors.write(f"\nrank {self.world.rank} alone, so that all are ended (V3): {item.nodeid}\n{what}\n")
            errors.flush()
            time.sleep(PASSED_ON)
            self.world.comm.Abort(1)
        everyone = self.outcomes.comm.allgather((report.outcome, report.longreprtext))
        failed = [(rank, text) for rank, (outcome, text) in enumerate(everyone) if outcome == "failed"]
        if failed and not report.failed:
            report.outcome = "failed"
            report.longrepr = "\n".join(f"on rank {rank} of {self.world.size}: {text}" for rank, text in failed)
        return report

    def pytest_unconfigure(self):
        """Wait for the core's threads that still connect to a store: later they would need the interpreter, and abort it."""
        end = time.monotonic() + CONNECTING
        for thread in [thread for thread in threading.enumerate() if thread.daemon]:
            thread.join(max(0.0, end - time.monotonic()))

    def _write_part(self, folder: Path) -> None:
        if self.world.rank == 0:
            super()._write_part(folder)


class Submitted(Verdicts):
    """Jobs of one site, instead of ranks. The evidence is of the machine rung; with --virtual, of the cluster rung."""

    def __init__(self, config):
        super().__init__(config)
        if len(config.sites) != 1 or not config.getoption("--site"):
            raise pytest.UsageError("--submit: name the site of this machine, --site NAME_OR_FOLDER")
        options = {name: config.getoption(f"--{name}") for name in ("geometry", "device", "backend")}
        options |= dict(options=config.getoption("--submit"), timeout=config.getoption("--submit-timeout"))
        options |= dict(poll=1.0) if config.getoption("--virtual") else {}  # a virtual cluster serves nobody else, so ask often
        try:
            self.world = Jobs(config.sites[0], say=self._say, **options)
        except NotSubmitted as refusal:
            raise pytest.UsageError(str(refusal)) from None
        self.refused = False
        self.rung, self.world_size = "cluster" if config.getoption("--virtual") else "machine", self.world.size
        self.title = f"conformance, {self.rung} rung, {self.world.nodes} nodes x {self.world.ranks_per_node} ranks"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        for plugin in self.config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":  # pytest-mpi would skip the tests that need ranks
                self.config.pluginmanager.unregister(plugin)

    def _say(self, line: str) -> None:
        """Print at once, and not with the output of a failed test."""
        plugin = self.config.pluginmanager.getplugin
        with plugin("capturemanager").global_and_fixture_disabled():
            plugin("terminalreporter").write_line(line, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        super().pytest_collection_modifyitems(items)
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)  # no time limit: queues take hours
            for mark in item.iter_markers("machine"):
                starts = (False, True) if mark.kwargs.get("twice") else (False,)
                runs = [(flags, again) for flags in mark.args for again in starts]
                self.world.plan += [run for run in runs if run not in self.world.plan]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        if call.excinfo and isinstance(call.excinfo.value, NotSubmitted):
            self.refused = True
            pytest.exit(str(call.excinfo.value), returncode=2)
        return (yield from super().pytest_runtest_makereport(item, call))

    def _judge(self) -> None:
        """Judge, unless nothing was submitted: "no check has passed" would be no objection then."""
        if not self.refused:
            super()._judge()

    def _write_part(self, folder: Path) -> None:
        self.backend = self.world.backend_in_use
        self.files |= dict(core=self.world.first.get("core"))  # the core that the site has installed
        for check in self.checks:
            check["message"] = self.world.without_hosts(check["message"])
        if self.checks:
            super()._write_part(folder)

    def where(self) -> dict:
        return dict(device=self.world.device, versions=self.world.versions(), machine=self.world.machine())

    def pytest_terminal_summary(self, terminalreporter):
        super().pytest_terminal_summary(terminalreporter)
        for line in filter(None, (self.world.jobs and f"runs: {self.world.root}", self.world.left_alone())):
            terminalreporter.write_line(line)
        self.world.close()

"""pytest in MPI ranks: rank 0 reports for all, no rank waits for ever, and green means that everything was checked.

conftest.py registers it under --with-mpi, beside pytest-mpi. EXPECT_WORLD says how many ranks mpiexec was to start.
"""

import os
import sys

import pytest

from conformance.world import World

LONE = 5.0  # seconds that a rank which failed waits for the others to come to the end of the same test
PATIENCE = 120.0  # seconds that a rank which passed does


def clauses_of(item: pytest.Item) -> list[str]:
    return [clause for mark in item.iter_markers("clause") for clause in mark.args]


class Summary:
    """At the end one line a check: its clauses, how many have passed, the worst deviation and its margin."""

    title = "conformance"

    def __init__(self):
        self.rows: dict[str, dict] = {}
        self.objections: list[str] = []

    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.user_properties.append(("clauses", clauses_of(item)))

    def pytest_runtest_logreport(self, report):
        facts = dict(report.user_properties)
        if facts.get("clauses") and (report.when == "call" or not report.passed):
            name, _, case = report.nodeid.rpartition("::")[2].partition("[")
            row = self.rows.setdefault(name, dict(clauses=" ".join(facts["clauses"]), outcomes=[], worst=[]))
            row["outcomes"].append(report.outcome)
            row["worst"] += [(*value, case.rstrip("]")) for key, value in report.user_properties if key == "deviation"]

    def pytest_terminal_summary(self, terminalreporter):
        if not self.rows and not self.objections:
            return
        terminalreporter.section(self.title)
        widest = max((len(row["clauses"]) for row in self.rows.values()), default=0)
        longest = max(map(len, self.rows), default=0)
        for name, row in self.rows.items():
            passed, all_ = row["outcomes"].count("passed"), len(row["outcomes"])
            line = f"{row['clauses']:<{widest}}  {name:<{longest}}  {passed} of {all_} passed"
            if row["worst"]:
                worst, limit, case = max(row["worst"])
                margin = f"{limit / worst:.2g} times below {limit:g}" if worst else f"exact, limit {limit:g}"
                line += f"  worst deviation {worst:.1e}, {margin}" + f" [{case}]" * bool(case)
            terminalreporter.write_line(line, red=passed < all_)
        for objection in self.objections:
            terminalreporter.write_line(objection, red=True)


class Ranks(Summary):
    """The ranks that mpiexec has started; raises UsageError when they are not those that were asked for (V1)."""

    def __init__(self):
        super().__init__()
        from mpi4py import MPI  # starts MPI: not for a session without ranks

        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, in the first run
        self.world = World(MPI.COMM_WORLD)
        self.outcomes = World(MPI.COMM_WORLD.Dup())  # apart from what the tests themselves exchange
        self.title = f"conformance, process rung, world size {self.world.size}"
        expected = os.environ.get("EXPECT_WORLD", "unset")
        if expected != str(self.world.size):
            raise pytest.UsageError(
                f"EXPECT_WORLD={expected}, but this is a world of {self.world.size}: is it the right mpiexec? (V1)"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        config = session.config
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":
                plugin._is_testing_mpi = False  # it would print 25 lines about MPI
        if self.world.rank:
            config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    # ---- one outcome a test -----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """The same report on all ranks: failed if it failed on any. A rank that failed alone ends the session (V3)."""
        report = yield
        if not self.outcomes.meet(LONE if report.failed else PATIENCE):
            what = report.longreprtext if report.failed else f"{item.name}: the other ranks have not come to its end"
            sys.__stderr__.write(f"\nrank {self.world.rank} alone, so that all are ended (V3): {item.nodeid}\n{what}\n")
            sys.__stderr__.flush()
            self.world.comm.Abort(1)
        everyone = self.outcomes.comm.allgather((report.outcome, report.longreprtext))
        failed = [(rank, text) for rank, (outcome, text) in enumerate(everyone) if outcome == "failed"]
        if failed and not report.failed:
            report.outcome = "failed"
            report.longrepr = "\n".join(f"on rank {rank} of {self.world.size}: {text}" for rank, text in failed)
        return report

    # ---- the end ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        """Green only if something passed and nothing was skipped (V2)."""
        outcomes = [outcome for row in self.rows.values() for outcome in row["outcomes"]]
        if skipped := outcomes.count("skipped"):
            self.objections.append(f"{skipped} required checks were skipped, but should have run (V2)")
        if "passed" not in outcomes:
            self.objections.append("no check has passed (V2)")
        if self.objections and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

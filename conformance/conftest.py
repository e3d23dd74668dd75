"""Options, fixtures, and what is collected when.

    python -m pytest conformance                                              what needs one process
    EXPECT_WORLD=2 mpiexec -n 2 python -m pytest --with-mpi conformance/test_process.py      what needs ranks

--site NAME_OR_FOLDER restricts both to one site.
"""

import sys

import pytest

from conformance import sites
from conformance.plugin import Ranks, Summary, clauses_of
from conformance.reference import worst_deviation

try:
    import pytest_mpi
except ImportError:
    pytest_mpi = None
if pytest_mpi and not hasattr(pytest_mpi, "MPIPlugin"):
    raise pytest.UsageError(
        f"mpi-pytest is installed in {sys.prefix}: it takes pytest-mpi's module name pytest_mpi, and tests that "
        f"need ranks would run without them: pip uninstall mpi-pytest && pip install --force-reinstall pytest-mpi (V4)"
    )


def pytest_addoption(parser):
    parser.addoption("--site", metavar="NAME_OR_FOLDER", help="only this site of sites/, or the one in this folder")


def pytest_configure(config):
    config.addinivalue_line("markers", "clause(*ids): the clauses of SPEC.md that this test checks")
    try:
        config.sites = sites.find(config.getoption("--site"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if config.getoption("--with-mpi", default=False):
        config.pluginmanager.register(Ranks(), "ranks")
    else:
        config.pluginmanager.register(Summary(), "summary")


def pytest_ignore_collect(collection_path, config):
    """test_process.py alone needs the ranks; without them it is not there, rather than skipped."""
    without_ranks = not config.getoption("--with-mpi", default=False)
    return True if collection_path.name == "test_process.py" and without_ranks else None


def pytest_collection_modifyitems(config, items):
    if not config.pluginmanager.has_plugin("ranks") and any(item.get_closest_marker("mpi") for item in items):
        raise pytest.UsageError("test_process.py needs ranks: start it by mpiexec, and pass --with-mpi (V2)")


def pytest_generate_tests(metafunc):
    found = metafunc.config.sites
    if "launch" in metafunc.fixturenames:
        launches = [launch for site in found for launch in site.launches]
        metafunc.parametrize("launch", launches, ids=lambda launch: f"{launch.site}-{launch.launcher}", scope="session")
    if "site" in metafunc.fixturenames:
        metafunc.parametrize("site", found, ids=lambda site: site.name, scope="session")


class Check:
    """The checks of one test. where: what is checked, in the words of a message."""

    def __init__(self, where: str, node: pytest.Item):
        self.where, self.node = where, node
        self.clauses = clauses_of(node)

    def equal(self, clause: str, **facts: tuple) -> None:
        """name=(value, what it should be); all that differ are told."""
        __tracebackhide__ = True
        differ = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
        self.holds(
            clause, *(f"{name}={_short(value)}, but should be {_short(other)}" for name, (value, other) in differ.items())
        )

    def close(self, clause: str, values: list[float], reference: list[float], limit: float, what: str = "losses") -> None:
        """No relative difference above the limit; the worst is printed at the end of the session, also when green."""
        __tracebackhide__ = True
        worst = worst_deviation(values, reference)
        self.node.user_properties.append(("deviation", (worst, limit)))
        if not worst <= limit:
            self.holds(clause, f"worst relative deviation of {what}={worst:.1e}, but should be at most {limit:g}")

    def holds(self, clause: str, *violations: str) -> None:
        """Fails with one line for each violation, if there is one."""
        __tracebackhide__ = True
        assert clause in self.clauses, f"{self.node.name} is not marked with clause {clause}"
        if violations:
            pytest.fail("\n".join(f"{violation} [{self.where}] ({clause})" for violation in violations), pytrace=False)


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


@pytest.fixture
def check(request) -> Check:
    ranks = request.config.pluginmanager.get_plugin("ranks")
    which = [str(request.getfixturevalue("launch"))] if "launch" in request.fixturenames else []
    if "site" in request.fixturenames:
        which = [request.getfixturevalue("site").name]
    return Check(", ".join(which + ([f"world size {ranks.world.size}"] if ranks else [])) or "core", request.node)


@pytest.fixture(scope="session")
def world(request):
    return request.config.pluginmanager.get_plugin("ranks").world

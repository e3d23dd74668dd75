"""Checks of what a site has beside its job: a notebook, a writer of metrics, another library that sums gradients.

    python -m pytest conformance/checks/test_extras.py --extras [--by-hand] [--site NAME_OR_FOLDER] [-k NAME]

This needs the packages that the sites' [[extras]] name; `nox -s extras` installs them.
"""

import ast
import itertools
import os
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.broken.workloads import WORKLOADS
from conformance.golden import make as golden
from conformance.harness.check import T1, T2
from conformance.harness.ports import free_port
from conformance.harness.sites import ROOT, without_launcher
from conformance.harness.target import Run, read_records

MINUTES = 15  # to build packages that have no wheel
STAND_INS = ROOT / "conformance/stand_ins"


@pytest.mark.timeout(60 * MINUTES + 300)
@pytest.mark.clause("E1", "E2")
def test_an_extra_runs_as_the_site_says(check, site, extra, tmp_path):
    """The extra runs in a copy of the site's files, as a user has one, with its own home."""
    run_dir = copied(site, tmp_path)
    if "prepare" in extra:
        result = start(extra["prepare"], tmp_path, run_dir, 60 * MINUTES)
        check["E1"].equal(exit_code_of_prepare=exit_code(result, 0))
    result = start(extra["command"], tmp_path, run_dir, 180)
    check["E1"].equal(**{f"exit_code_of_{extra['name']}": exit_code(result, 0)})
    runs = {log.parent: read_records(log.parent) for log in run_dir.rglob("run.jsonl")}
    ends = [records[-1].get("exit_code") for records in runs.values()]
    check["E1"].equal(exit_codes_of_its_runs=(ends, [0] * extra.get("runs", 1)))
    # Losses do not show it: the reference run has the same ones in any number of ranks.
    sizes = [record["world_size"] for records in runs.values() for record in records if record["kind"] == "start"]
    check["E1"].equal(ranks_of_its_largest_run=(max(sizes, default=0), extra.get("ranks", 1)))
    for folder, records in runs.items() if "line" in extra else ():
        count = sum(record["kind"] in ("step", "epoch") for record in records)
        best = min((record["eval_loss"] for record in records if "eval_loss" in record), default=float("nan"))
        for line in extra["line"].format(records=count, run=folder, best=best).splitlines():
            check["E1"].equal(**{f"printed_{line!r}": (line in result.stdout.splitlines(), True)})
    if extra.get("golden"):
        for folder in runs or [run_dir]:
            trains_the_reference_run(check["E2"], folder, T1)
        trains_it_in_fp32(check["E2"], extra, tmp_path)
        trains_what_no_row_asks_for(check["E2"], extra, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.clause("E3")
def test_it_does_with_a_stand_in_for_its_library(check, site, imitated, tmp_path):
    run_dir = copied(site, tmp_path)
    result = start(imitated["command"], tmp_path, run_dir, 180, PYTHONPATH=str(STAND_INS))
    check.equal(**{f"exit_code_of_{imitated['name']}": exit_code(result, 0)})
    trains_the_reference_run(check, run_dir, T1)
    trains_it_in_fp32(check, imitated, tmp_path, PYTHONPATH=str(STAND_INS))
    trains_what_no_row_asks_for(check, imitated, tmp_path, PYTHONPATH=str(STAND_INS))


@pytest.mark.timeout(300)
@pytest.mark.clause("E3")
def test_a_stand_in_s_ranks_are_on_two_nodes(check, site, imitated, tmp_path):
    """A job copies the submitting shell's variables to all nodes. One rank starts later than the library waits."""
    run_dir, words, port = copied(site, tmp_path), list(imitated["command"]), free_port()
    if "--standalone" not in words:
        return
    words[words.index("--nproc-per-node") + 1] = "2"
    place = words.index("--standalone")
    left = dict(HOSTNAME="login1", PYTHONPATH=str(STAND_INS))
    left |= dict(HOROVOD_GLOO_TIMEOUT_SECONDS="10", STAND_IN_LATE_RANK="3")  # a rank that rank 0 does not contact first

    def node(number: int) -> subprocess.CompletedProcess:
        meet = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", socket.gethostname(), "--master-port", str(port)]
        return start([*words[:place], *meet, *words[place + 1 :]], tmp_path, run_dir, 180, **left)

    with ThreadPoolExecutor(2) as pool:
        for number, result in enumerate(pool.map(node, range(2))):
            check.equal(**{f"exit_code_of_{imitated['name']}_on_node_{number}": exit_code(result, 0)})


# Print what a program's function exports for rank 5 of 2 nodes x 4, with this device_index or none.
EXPORTS = """
import importlib.util, os, sys
sys.path.insert(0, ".")
spec = importlib.util.spec_from_file_location("of_a_site", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
getattr(module, sys.argv[2])(int(sys.argv[3]) if len(sys.argv) > 3 else None)
print(os.environ.get("RANK"), os.environ.get("LOCAL_RANK"))
"""


@pytest.mark.clause("E3")
def test_a_library_is_told_the_device_of_a_rank(check, site):
    """A function of device_index does it, where a program has one: on a CPU nothing shows which device a library takes."""
    words = {word for extra in extras_of(site) for word in extra["command"] if (site.folder / word).is_file()}
    launches = [launch for launch in site.launches if not launch.mpi]
    for word in sorted(word for word in words if word.startswith("train") and word.endswith(".py")):
        functions = [node for node in ast.parse((site.folder / word).read_text()).body if isinstance(node, ast.FunctionDef)]
        names = [node.name for node in functions if [arg.arg for arg in node.args.args] == ["device_index"]]
        for name, launch, index in itertools.product(names, launches, ("1", "0", None)):
            path = os.pathsep.join([str(ROOT / "core/src"), str(STAND_INS)])
            environ = without_launcher() | launch.environ(5, 8, 2, 29500, "1")
            environ |= dict(PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
            command = [sys.executable, "-c", EXPORTS, word, name, *([index] if index else [])]
            run: dict = dict(cwd=site.folder, env=environ, capture_output=True, text=True, timeout=60)
            result = subprocess.run(command, check=False, **run)
            told = result.stdout.strip() or result.stderr[-200:]
            if told.split()[-1:] != ["None"]:  # None: the library does not get devices by a variable
                what = f"{word}_tells_rank_5_of_2x4_under_{launch.launcher}_with_device_{index}"
                check.equal(**{what: (told, f"5 {index or 1}")})


def extras_of(site) -> list[dict]:
    return site.toml.get("extras", [])


def copied(site, folder: Path) -> Path:
    """Copy the site's files below the folder, and return the path of its run directory."""
    (folder / "site").mkdir()
    for name in {*site.toml.get("files", []), "site.toml"}:
        shutil.copy(site.folder / name, folder / "site" / name)
    return folder / "run"


def trains_the_reference_run(check, run_dir: Path, tolerance: float) -> None:
    losses, should_be = Run(run_dir, [], [], [], [], read_records(run_dir)).losses, golden.load()["losses"]
    check.equal(steps=(len(losses), len(should_be)))
    check.close(losses, should_be, tolerance)


def trains_it_in_fp32(check, extra: dict, folder: Path, **variables) -> None:
    """Where it takes --precision: a library that multiplies in bf16 by default would not change fp64."""
    if "fp64" in extra["command"]:
        command = ["fp32" if word == "fp64" else word for word in extra["command"]]
        result = start(command, folder, folder / "fp32", 180, **variables)
        check.equal(**{f"exit_code_of_{extra['name']}_in_fp32": exit_code(result, 0)})
        trains_the_reference_run(check, folder / "fp32", T2["cpu"])


def trains_what_no_row_asks_for(check, extra: dict, folder: Path, **variables) -> None:
    """Where it takes --workload: some parameters have no gradient in some steps, which any library must be told."""
    if "--workload" in extra["command"]:
        (file := folder / "experts.py").write_text(WORKLOADS["experts"])
        command = [*extra["command"], "--workload", str(file), "--epochs", "1"]
        result = start(command, folder, folder / "experts", 180, **variables)
        check.equal(**{f"exit_code_of_{extra['name']}_with_unused_parameters": exit_code(result, 0)})


# Variables that users set in their shells for other programs.
LEFT = dict(ACCELERATE_MIXED_PRECISION="bf16")


def start(command: list[str], folder: Path, run_dir: Path, seconds: float, **variables) -> subprocess.CompletedProcess:
    command = [part.format(run_dir=run_dir) for part in command]
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = without_launcher() | LEFT | dict(HOME=str(home), PATH=path, OMP_NUM_THREADS="1") | variables
    print("+", shlex.join(command))
    try:
        return subprocess.run(
            command, cwd=folder / "site", env=environ, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def exit_code(result: subprocess.CompletedProcess, should_be: int) -> tuple:
    """Return the exit code, with the end of the output if the code is wrong, and the expected one."""
    if result.returncode == should_be:
        return should_be, should_be
    return f"{result.returncode}, {' '.join((result.stdout + result.stderr).split())[-600:]!r}", should_be

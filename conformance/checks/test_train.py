"""The static rung: what a site's train.py makes of its environment, and what it passes to the core (here a stub).

    python -m pytest conformance/checks/test_train.py [--site NAME_OR_FOLDER]

This needs neither ranks nor torch.
"""

import ast
import os
import re
from itertools import product

import pytest

from conformance.harness.check import clause
from conformance.harness.stub_core import SAID, around, called, who

# srun's variables for each task of a step of 16 on two nodes. Job and step have different numbers.
STEP = dict(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NODEID="0", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="16")
STEP |= dict(SLURM_STEP_NUM_NODES="2", SLURM_STEP_TASKS_PER_NODE="8(x2)", SLURM_NTASKS="16", SLURM_JOB_ID="4242")
# Variables on the job's first node, before srun.
JOB = dict(SLURM_JOB_ID="4242", SLURM_JOB_NUM_NODES="2", SLURM_NTASKS="16", SLURM_NPROCS="16", SLURM_TASKS_PER_NODE="8(x2)")
# Further variables of an interactive session, where a user starts srun by hand.
OF_SALLOC = dict(SLURM_JOB_NAME="interactive", SLURM_PTY_PORT="40123", SLURM_PTY_WIN_COL="80", TERM="xterm")
OF_SALLOC |= dict(PBS_ENVIRONMENT="PBS_INTERACTIVE", PBS_JOBNAME="STDIN")
SESSIONS = {"": {}, "_in_a_session": OF_SALLOC, "_in_a_session_of_srun_--pty": OF_SALLOC | dict(SLURM_JOB_NAME="bash")}
# Only the job script selects the devices of a rank.
MASKS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "1,0")
MASKS |= dict(GPU_DEVICE_ORDINAL="0", ONEAPI_DEVICE_SELECTOR="level_zero:gpu")


@clause("A7")
@pytest.mark.parametrize("code", [0, 6, 75])
def test_train_py_hands_everything_to_the_core(check, site, code, tmp_path):
    """It passes the user's flags as they are, returns the core's exit code, and changes nothing around it."""
    flags = ["--epochs", "7", "--lr", "0.5", "--run-dir", "x y"]
    # Once also as one rank of several.
    environ = site.launches[0].environ(1, 4, 2, 29500, "1") | dict(MPI_SIZE="4") | MASKS if code == 75 else {}
    result = called(site, environ, tmp_path, *flags, code=code)
    last_line = result.stderr.replace(SAID, "").strip().splitlines()[-1:] or [""]
    check.equal(calls_of_run=(f"{len(result.rows)} {last_line[0][:120]}".strip(), "1"), exit_code=(result.code, code))
    (row,) = result.rows
    check.equal(flags=(row["argv"], flags), further_arguments_of_run=(row["arguments"], "()"))
    check.equal(environment_changed=(row["changed"], []), folder=(row["folder"], str(tmp_path)))
    check.equal(imported_before_the_core=(row["imported"], []))
    check.equal(printed=(result.stdout, ""), what_the_core_says_is_seen=(SAID in result.stderr, True))
    check.equal(threads_and_alarms_of_its_own=(row["beside"], 0))
    usual = around()
    check.equal(changed_of_the_process=({name: value for name, value in row["around"].items() if value != usual[name]}, {}))


@clause("R6")
def test_a_task_of_many_is_never_a_world_of_one(check, site, tmp_path):
    """It may be started by srun without the job script, by no launcher, or over an MPI that knows no other ranks."""
    ways = {launch.launcher: launch.environ(1, 16, 2, 29500, "1") | dict(MPI_SIZE="16") for launch in site.launches}
    (nodefile := tmp_path / "nodes").write_text("node1\nnode2\n")
    if site.toml["launcher"] == "srun":
        ways |= dict(
            srun_alone=STEP, job_script_without_srun=JOB | dict(SLURM_PROCID="0", SLURM_LOCALID="0"), shell_of_salloc=JOB
        )
        for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):  # on a workstation, and in a job of one task
            mpi = f"mpiexec_of_{name.partition('_')[0]}"
            ways |= {mpi: {name: "16"}, f"{mpi}_in_a_job": JOB | dict(SLURM_NTASKS="1", SLURM_NPROCS="1") | {name: "16"}}
    if site.toml["scheduler"] == "pbs":
        ways |= dict(job_script_without_mpiexec=dict(PBS_JOBID="4242.server", PBS_NODEFILE=str(nodefile)))
    for way, session in product(ways, SESSIONS):
        identity = who(site, ways[way] | SESSIONS[session], tmp_path)
        alone = identity.get("single") or identity.get("world_size") == 1
        check.equal(**{f"world_size_of_16_tasks_{way}{session}": (1 if alone else identity.get("world_size", 16), 16)})


@clause("R8")
def test_another_step_of_a_job_is_another_run_of_its_ranks(check, site, tmp_path):
    """Where train.py makes the ranks' common name from Slurm's numbers, another step has another name."""
    for launch in [launch for launch in site.launches if not launch.mpi]:
        environ = launch.environ(1, 16, 2, 29500, "1") | STEP | dict(SLURM_STEPID="0")
        name, of_job, of_step = (
            who(site, environ | other, tmp_path).get("job_id")
            for other in ({}, dict(SLURM_JOB_ID="4243"), dict(SLURM_STEP_ID="1", SLURM_STEPID="1"))
        )
        if of_job != name:
            check.equal(**{f"one_name_for_two_steps_under_{launch.launcher}": (of_step == name, False)})


@clause("R11")
@pytest.mark.parametrize("store", [True, False])
def test_the_store_of_torchrun_is_used(check, site, store, tmp_path):
    for launch in site.launches:
        environ = launch.environ(1, 4, 2, 29500, "1")
        if "TORCHELASTIC_RUN_ID" in environ:
            identity = who(site, environ | dict(TORCHELASTIC_USE_AGENT_STORE=str(store)), tmp_path)
            if identity.get("launcher_store") is not store:
                observed = f"launcher_store={identity.get('launcher_store', identity)}"
                yield f"{launch.launcher}: {observed}, but should be TORCHELASTIC_USE_AGENT_STORE={store}"


@clause("J6")
def test_a_port_of_train_py_is_one_that_linux_gives_to_nobody(check, site, tmp_path):
    """Where MPI gives the ranks their numbers, train.py itself chooses the port."""
    for launch in site.launches:
        if launch.mpi:
            environ = launch.environ(0, 1, 1, 29500, "1")
            ports = [who(site, environ, tmp_path).get("master_port", 0) for _ in range(3)]
            check.equal(ports_outside_of_1024_to_32767=([port for port in ports if not 1024 <= port < 32768], []))
            check.equal(one_port_for_all_starts=(len({*ports}) == 1, False))


@clause("B9")
def test_ranks_that_ask_mpi_agree_on_a_secret_there(check, site, tmp_path):
    for launch in site.launches:
        if launch.mpi:
            environ = launch.environ(0, 1, 1, 29500, "1")
            secrets = [who(site, environ, tmp_path).get("secret", "") for _ in range(3)]
            check.equal(shorter_than_32_characters=([len(secret) for secret in secrets if len(secret) < 32], []))
            check.equal(one_for_all_starts=(len({*secrets}) == 1, False))
            # If the system's random numbers are the same for all, other ports and times do not make another secret.
            (tmp_path / "sitecustomize.py").write_text("import os\nos.urandom = lambda count: b'7' * count\n")
            secrets = [who(site, environ, tmp_path).get("secret", "") for _ in range(3)]
            check.equal(of_random_numbers_of_the_system_alone=(len({*secrets}) == 1, True))


@clause("B9")
def test_all_nodes_hear_from_mpi_where_to_meet(check, site, tmp_path):
    """Rank 0 sends address and port: values that each node made itself would be right on one node only."""
    for launch in [launch for launch in site.launches if launch.mpi]:
        here = dict(MPI_SIZE="16", MPI_NODES="2", MPI_SAID=str(tmp_path / "said"))
        identities = [
            who(site, launch.environ(rank, 16, 2, 29500, "1") | here | dict(MPI_RANK=str(rank)), tmp_path) for rank in (0, 8)
        ]
        for name in ("master_addr", "master_port", "job_id", "secret"):
            first, second = (identity.get(name, identity.get("refused")) for identity in identities)
            if first != second:
                yield f"{launch.launcher}: {name}={second} on the second node, but should be {first}"
        place = {name: identities[1].get(name) for name in ("rank", "local_rank", "node_rank", "local_world_size")}
        should = dict(rank=8, local_rank=0, node_rank=1, local_world_size=8)
        if place != should:
            yield f"{launch.launcher}: {place} of rank 8, but should be {should}"


CALLS = ("os.sched_getaffinity", "os.sched_setaffinity", "MPI.Init")


@clause("J9")
def test_a_rank_that_takes_its_cores_back_from_mpi_has_all(check, site, tmp_path):
    """Some MPIs bind the process to one core when they start."""
    for launch in [launch for launch in site.launches if launch.mpi]:
        cores = who(site, launch.environ(0, 1, 1, 29500, "1"), tmp_path).get("cores")
        check.equal(cores_of_a_rank=(cores, len(os.sched_getaffinity(0))))


@clause("J9")
def test_cores_are_noted_before_mpi_is_started(check, site):
    """The code shows it even where MPI cannot start. Without a call of MPI.Init, the import starts MPI."""
    nodes = [*ast.walk(ast.parse((site.folder / "train.py").read_text()))]
    calls = [(ast.unparse(node.func), node.lineno) for node in nodes if isinstance(node, ast.Call)]
    imports = [node.lineno for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "mpi4py"]
    noted, taken_back, starts = ([line for name, line in calls if name == wanted] for wanted in CALLS)
    if starts or imports:
        check.equal(noted_before=(min(noted, default=10**6) < min(starts or imports), True))
        check.equal(taken_back_afterwards=(max(taken_back, default=0) > min(starts or imports), True))


@clause("R10")
def test_mpi_has_ended_before_the_training(check, site, tmp_path):
    """Otherwise a rank that waits in MPI for a lost one would wait until the time limit."""
    for launch in site.launches:
        if launch.mpi:
            environ = launch.environ(0, 1, 1, 29500, "1")
            check.equal(mpi_is_open=(who(site, environ, tmp_path).get("mpi_is_open"), False))


@clause("R10")
def test_mpi_is_told_what_it_shall_do_before_it_is_started(check, site):
    """The import of mpi4py.MPI reads mpi4py.rc; later settings have no effect."""
    for path in sorted(site.folder.glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        started = [
            node.lineno
            for node in nodes
            if (isinstance(node, ast.ImportFrom) and node.module == "mpi4py" and "MPI" in {name.name for name in node.names})
            or (isinstance(node, ast.Import | ast.ImportFrom) and "mpi4py.MPI" in ast.unparse(node))
        ]
        targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
        for target in targets:
            if re.match(r"(mpi4py\.)?rc\.\w+$", text := ast.unparse(target)) and target.lineno > min(started, default=10**6):
                yield f"{path.name}: {text} is set behind the import of mpi4py.MPI, but should be set before"

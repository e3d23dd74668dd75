"""Checks before the start: device, interface, environment and data exist, and one rank's failure ends all ranks.

python -m pytest core/tests/test_preflight.py
"""

import os
import re
import resource
import socket
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from signal import SIGTERM, SIGUSR2
from types import SimpleNamespace

import pytest
import ranks
import torch
from ddp_core import Rank, device
from ddp_core.config import parse
from ddp_core.device import describe, descriptors
from ddp_core.errors import PreflightError, SnapshotError, UsageError, failure_with
from faults import (
    at_step,
    cores,
    dying,
    environment,
    failing_data,
    in_turn,
    seen_late,
    signalled,
    signalled_after,
    sleeping,
    standing_in,
    threads,
)
from ranks import call, train
from stand_in import accelerator

# ---- devices, interfaces, environment -----------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a cuda device here")
def test_a_device_that_is_not_there_is_an_error_and_no_other_device_is_taken(tmp_path):
    job = train(tmp_path / "run", "--epochs 1 --device cuda", 2, code=3)
    assert "--device cuda" in job.error and torch.__version__ in job.error


def test_an_accelerator_that_is_neither_cuda_nor_xpu_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    with pytest.raises(PreflightError, match="trains on cpu, cuda, xpu, not on hpu: pass --device cpu"):
        device.prepare_device(parse(["--device", "auto"], 1), Rank.single())


@pytest.mark.fault(14)
def test_a_mask_that_hides_the_device_is_shown(tmp_path):
    hidden = environment(CUDA_VISIBLE_DEVICES="", ROCR_VISIBLE_DEVICES="7")
    job = train(tmp_path / "run", "--epochs 1 --device xpu", faults={0: hidden}, code=3)
    assert "CUDA_VISIBLE_DEVICES=" in job.error and "ROCR_VISIBLE_DEVICES=7" in job.error


@pytest.mark.parametrize(
    "broken", ["raise ModuleNotFoundError('no torch here')", "raise ImportError('libcudart.so.13: not there')"]
)
def test_a_python_whose_torch_cannot_be_imported_is_one_line(tmp_path, broken):
    (tmp_path / "torch.py").write_text(broken)
    started = "import ddp_core; sys.exit(ddp_core.run(lambda _: ddp_core.Rank.single()))"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {started}"
    ended = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 3 and ended.stderr.count("\n") == 1
    assert re.match(
        r"error: \S+ cannot import what the core needs \(.* (here|there)\): run the site's install.sh", ended.stderr
    )


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_rank_s_row_names_its_device(monkeypatch, kind):
    """With a stand-in for the accelerator. The name `cuda:1` alone would not identify it."""
    monkeypatch.setattr(torch.get_device_module(kind), "get_device_name", lambda device: f"Accelerator {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device.index}"))
    row = describe(parse([], 1), Rank.single(), torch.device(kind, 1))
    assert (row["device"], row["device_index"], row["device_name"]) == (f"{kind}:1", 1, "Accelerator 1")
    assert row.get("device_uuid") == ("uuid-1" if kind == "cuda" else None)


@pytest.mark.parametrize("wrong", [{0}, {1}, {0, 1}])
@pytest.mark.fault(10)
def test_an_interface_that_is_not_there_is_answered_with_those_that_are(tmp_path, wrong):
    faults = {rank: environment(GLOO_SOCKET_IFNAME="hsn0") for rank in wrong}
    job = train(tmp_path / "run", "--epochs 1", 2, faults=faults, code=3)
    assert "GLOO_SOCKET_IFNAME=hsn0" in job.error
    assert all(name in job.error for _, name in socket.if_nameindex())
    assert 0 in wrong or "rank 1: " in job.error


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    "wanted, left",
    [
        ("hsn", ["hsn0", "hsn1"]),
        ("hsn1,eth", ["eth0", "hsn1"]),
        ("=hsn", []),
        ("=hsn0,lo", ["lo", "hsn0"]),
        ("^lo,eth", ["hsn0", "hsn1"]),
        ("^=hsn0", ["lo", "eth0", "hsn1"]),
        ("ib", []),
        ("^lo,eth,hsn", []),
    ],
)
def test_interfaces_are_chosen_as_nccl_does(wanted, left):
    assert device.matching(wanted, ["lo", "eth0", "hsn0", "hsn1"]) == left


@pytest.mark.fault(10)
def test_nccl_without_an_interface_is_refused_and_gloo_does_not_look(tmp_path):
    fault = environment(NCCL_SOCKET_IFNAME="hsn")
    job = train(tmp_path / "nccl", "--epochs 1 --device auto", faults={0: in_turn(accelerator("cuda"), fault)}, code=3)
    assert re.search(r"NCCL_SOCKET_IFNAME=hsn fits no interface: \S+ has .*lo \(\w+\)", job.error)
    train(tmp_path / "run", "--epochs 1", faults={0: fault}, code=0)


def test_an_interface_that_is_there_is_used(tmp_path):
    faults = {rank: environment(GLOO_SOCKET_IFNAME="lo") for rank in range(2)}
    train(tmp_path / "run", "--epochs 1 --steps-per-epoch 1", 2, faults=faults, code=0)


@pytest.mark.parametrize("name", ["NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"])
@pytest.mark.fault(27)
def test_an_environment_that_overrules_the_precision_is_refused(tmp_path, name):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: environment(**{name: "1"})}, code=3)
    assert f"{name}=1" in job.error and "rank 1: " in job.error
    for flags, value in (("", "0"), ("--precision bf16 --fresh", "1")):  # bf16 has fewer bits than TF32
        train(tmp_path / "run", f"--epochs 1 --steps-per-epoch 1 {flags}", faults={0: environment(**{name: value})}, code=0)


@pytest.mark.parametrize("flag", ["--precision tf32", "--backend nccl"])
def test_what_the_cpu_cannot_do_is_a_usage_error(tmp_path, flag):
    assert flag in train(tmp_path / "run", f"--epochs 1 {flag}", 2, code=2).error


# ---- limits -------------------------------------------------------------------------------------------------------


def limited(which: int, soft: int, hard: int):
    return partial(resource.setrlimit, which, (soft, hard))


@pytest.mark.fault(16)
def test_a_limit_that_would_end_the_run_is_named_before(tmp_path):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: limited(resource.RLIMIT_NOFILE, 60, 60)}, code=3)
    assert "ulimit -n is 60" in job.error and "rank 1: " in job.error and "raise it in the job script" in job.error


@pytest.mark.parametrize(
    "limit, workers, enough", [(71, 0, False), (72, 0, True), (135, 4, False), (136, 4, True), (-1, 99, True)]
)
def test_threads_and_processes_of_a_node_are_counted(monkeypatch, limit, workers, enough):
    """The real limit stays unchanged, because it counts all processes of an ordinary user."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit if which == resource.RLIMIT_NPROC else 10**6, -1))
    with nullcontext() if enough else pytest.raises(PreflightError, match=f"ulimit -u is {limit} "):
        device._check_limits(parse(["--workers", str(workers)], 8), ranks.world(8)[0], "gloo")


def test_open_files_are_allowed_up_to_the_hard_limit(tmp_path):
    """About 300 ranks reach a shell's soft limit of 1,024. The kernel lets each process raise it."""
    faults = {rank: limited(resource.RLIMIT_NOFILE, 40, 200) for rank in range(2)}
    train(tmp_path / "run", "--epochs 1 --steps-per-epoch 1", 2, faults=faults, code=0)


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_rank_opens_no_more_files_than_it_was_promised(tmp_path, world_size):
    files = [tmp_path / f"files-{rank}" for rank in range(world_size)]
    faults = {rank: at_step(0, call("test_preflight", "_count_files", file)) for rank, file in enumerate(files)}
    train(tmp_path / "run", "--epochs 1 --steps-per-epoch 1", world_size, faults=faults, code=0)
    for rank, file in zip(ranks.world(world_size), files, strict=True):
        assert int(file.read_text()) <= descriptors(rank) - 30, "besides 30 for files of one's own"


def _count_files(file: Path) -> None:
    file.write_text(str(len(os.listdir("/proc/self/fd"))))


@pytest.mark.parametrize("rank, backend, most", [(1, "nccl", 256), (0, "nccl", 700), (1, "gloo", 700), (0, "gloo", 1200)])
def test_what_512_ranks_need(rank, backend, most):
    assert descriptors(Rank(rank, 512, rank, 8, 0, "node0", 29500, "1"), backend) <= most


# ---- a failure of one rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failing, error",
    [
        ([0], SnapshotError("it is broken")),
        ([1], UsageError("it is too much")),
        ([1], PreflightError("no data there")),
        ([0, 1], PreflightError("no data there")),
    ],
)
def test_a_failure_on_one_rank_reaches_all_with_its_code(tmp_path, failing, error):
    faults = {rank: failing_data(error) for rank in failing}
    job = train(tmp_path / "run", "--epochs 1", 2, faults=faults, code=error.code)
    assert str(error) in job.error
    assert 0 in failing or f"rank 1: {error}" in job.error
    assert not (tmp_path / "run" / "run.lock").exists(), "the next start finds a lock"


def test_a_failure_of_rank_0_is_told_to_a_rank_that_starts_later(tmp_path):
    """Ranks import torch from a shared file system, so their starts are seconds apart."""
    faults = {0: failing_data(PreflightError("no data there")), 1: sleeping(1.5)}
    job = train(tmp_path / "run", "--epochs 1 --rendezvous-timeout 10", 2, faults=faults, code=3)
    assert "no data there" in job.error


# ---- a launcher that ends all ranks when one exits ----------------------------------------------------------------

PATIENT = "--epochs 1 --rendezvous-timeout 100"  # longer than a test's time limit


@pytest.mark.parametrize("failing", [[0], [1], [0, 1, 2]])
def test_no_rank_leaves_before_all_have_heard_why(tmp_path, failing):
    """Rank 2 is late. If a rank exits before rank 2 hears the reason, the launcher kills rank 2."""
    faults = {rank: failing_data(PreflightError("no data there")) for rank in failing}
    faults[2] = in_turn(sleeping(1.5), *filter(None, [faults.get(2)]))
    job = train(tmp_path / "run", PATIENT, 3, faults=faults, strict_launcher=True, code=3)
    assert "no data there" in job.error


def test_ranks_that_wait_for_a_dead_one_end_with_the_failure_that_they_know(tmp_path):
    faults = {1: failing_data(PreflightError("no data there")), 2: in_turn(sleeping(2), dying)}
    job = train(tmp_path / "run", PATIENT, 3, faults=faults, strict_launcher=True)
    assert job.codes == [3, 3, 99] and "no data there" in job.error


def test_ranks_that_wait_for_a_dead_one_and_are_told_to_stop_do_not_ask_for_another_start(tmp_path):
    """Exit code 75 would requeue the job, and the rank would fail again."""
    job = train(tmp_path / "run", PATIENT, 3, faults={2: in_turn(sleeping(2), dying)}, strict_launcher=True)
    # Rank 1 may be slow to come.
    assert job.codes == [4, 4, 99] and re.search(r"SIGTERM before all ranks had met \(rank (1, )?2 had not\)", job.error)


def test_a_rank_that_is_told_to_stop_gives_rank_0_time_to_say_why(tmp_path):
    faults = {0: in_turn(sleeping(1), failing_data(PreflightError("no data there"))), 1: signalled_after(0.5, SIGTERM)}
    job = train(tmp_path / "run", PATIENT, 2, faults=faults, code=3)
    assert "no data there" in job.error


# ---- error messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6, 7, 8])
def test_every_exit_code_is_a_failure_that_can_be_told(code):
    failure = failure_with(code, "why")
    assert (int(failure.code), str(failure), failure.everywhere) == (code, "why", True)


def test_debug_shows_the_traceback_along_with_the_line(tmp_path):
    faults = {0: failing_data(PreflightError("no data there"))}
    job = train(tmp_path / "run", "--epochs 1 --debug", faults=faults, code=3)
    assert job.err[0].startswith("error: no data there\n") and "Traceback" in job.err[0]


# ---- reports of a running rank ------------------------------------------------------------------------------------


@pytest.mark.fault(21)
def test_a_rank_that_hangs_can_be_asked_where_it_is(tmp_path):
    """kill -USR2, or scancel --signal=USR2: each rank prints the stack of each thread, and goes on."""
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: at_step(3, signalled(SIGUSR2))}, code=0)
    assert "Current thread" in job.err[1] and "in _run_step" in job.err[1] and job.err[0] == ""


@pytest.mark.fault(16)
def test_more_threads_than_cores_are_said(tmp_path):
    fault = in_turn(environment(OMP_NUM_THREADS="4"), cores(1), threads(4))
    job = train(tmp_path / "run", "--epochs 1", faults={0: fault}, code=0)
    assert "rank 0 has 4 threads on 1 cores, as 1 of 1 ranks: set OMP_NUM_THREADS" in job.out[0]
    assert not [note for note in train(tmp_path / "one", "--epochs 1", code=0).records("start")[0]["notes"] if "cores" in note]


@pytest.mark.fault(44)
@pytest.mark.parametrize("places, said", [(("a", "b"), True), (("a", "a"), False)])
def test_a_run_directory_of_one_node_alone_is_said(tmp_path, places, said):
    """A job that is requeued to another node would start from the beginning there."""
    for place in places:
        (tmp_path / place).mkdir(exist_ok=True)
    faults = {rank: standing_in(tmp_path / place) for rank, place in enumerate(places)}
    job = train(tmp_path / "a" / "run", "--epochs 1 --run-dir run", 2, faults=faults, code=0)
    assert ("--run-dir run is not seen by rank 1 on" in job.out[0]) == said
    assert any("is not seen" in note for note in job.records("start")[0]["notes"]) == said


@pytest.mark.fault(45)
@pytest.mark.parametrize("looks, said", [(3, False), (10**9, True)])
def test_a_run_directory_that_a_node_sees_a_little_later_is_not_taken_for_another(tmp_path, looks, said):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: seen_late("run.lock", looks)}, code=0)
    assert ("is not seen by rank 1 on" in job.out[0]) == said


@pytest.mark.parametrize("mask, never", [(0, 0o002), (0o077, 0o077)])
def test_nothing_of_a_run_is_everybody_s_to_write(tmp_path, mask, never):
    """Even if the user's umask allows it: another user could put other weights there. A stricter umask stays."""
    train(tmp_path / "run", "--epochs 1", faults={0: partial(os.umask, mask)}, code=0)
    paths = [tmp_path / "run", *(tmp_path / "run").iterdir()]
    assert len(paths) == 4 and not [path.name for path in paths if path.stat().st_mode & never]


def test_threads_share_the_cores_that_a_job_has_and_not_those_of_the_node(monkeypatch):
    told: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    device.prepare_device(parse(["--device", "cpu"], 4), Rank(1, 4, 1, 4, 0, "localhost", 20000, "job"))
    assert told == [2]


@pytest.mark.parametrize("sharding, kept", [("none", True), ("full", False), ("hybrid", False)])
def test_a_step_s_memory_is_kept_for_the_next_step_unless_modules_are_sharded(monkeypatch, sharding, kept):
    asked = []
    monkeypatch.setattr(device, "_tune_memory", lambda keep: asked.append(keep))  # noqa: PLW0108
    device.prepare_device(parse(["--device", "cpu", "--sharding", sharding], 1), Rank.single())
    assert asked == [kept]

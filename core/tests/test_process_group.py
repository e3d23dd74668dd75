"""How ranks meet. If they cannot, one line names the faulty rank, and all ranks exit with the same code.

python -m pytest core/tests/test_process_group.py
"""

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from ddp_core import device, process_group, rendezvous, run_directory
from ddp_core.errors import PreflightError
from ddp_core.process_group import Peers
from faults import at_step, failing_data, in_turn, signalled_after, sleeping
from ranks import call, train, world

SOON = "--epochs 1 --rendezvous-timeout 3"
LATER = "--epochs 1 --rendezvous-timeout 3"
LONG = {0: at_step(0, sleeping(2))}  # the job still runs when a foreign process comes late


@pytest.fixture(params=[b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None], ids=["hangs up", "http", "silent"])
def listener(request):
    """A port where another program listens, and its answer."""

    def serve(server: socket.socket) -> None:
        connections = []
        while request.param is not None:
            try:
                connections.append(server.accept()[0])
            except OSError:
                return
            connections[-1].sendall(request.param)
            if not request.param:
                connections.pop().close()

    with socket.create_server(("127.0.0.1", ranks.free_port())) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]


# ---- missing and unexpected ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [[2], [1, 3]])
@pytest.mark.fault(5)
def test_missing_ranks_are_named(tmp_path, missing):
    present = [rank for rank in world(4) if rank.rank not in missing]
    job = train(tmp_path / "run", SOON, ranks=present, code=4)
    assert f"{len(missing)} of 4 ranks missing after 3 s" in job.error
    assert f"rank {', '.join(map(str, missing))}" in job.error


@pytest.mark.fault(4)
def test_without_rank_0_the_others_say_where_they_looked():
    """Not forked: only a new process shows whether c10d prints pages of C++ frames before the error line."""
    program = f"from ddp_core import *; raise SystemExit(run(lambda environ: {world(2)[1]!r}, {SOON.split()!r}))"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert ended.returncode == 4
    (line,) = ended.stderr.splitlines()
    assert "rank 0 did not answer rank 1" in line and "MASTER_PORT=" in line and "within 3 s" in line


def test_ranks_do_not_end_through_python(tmp_path):
    """During Python's exit, a gloo thread that asks for the interpreter can abort a complete run."""
    flags = f"{ranks.FLAGS} --epochs 1 --steps-per-epoch 1 --run-dir {tmp_path}/run".split()
    program = "import atexit, os; atexit.register(os.abort); from ddp_core import *; raise SystemExit(run(lambda _: {}, {}))"
    commands = [[sys.executable, "-c", program.format(rank, flags)] for rank in world(2)]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(60) for process in started] == [0, 0]


@pytest.mark.parametrize("flag", ["", "--debug"])
@pytest.mark.fault(11)
def test_a_kernel_without_ipv6_is_no_news(tmp_path, flag):
    """c10d tries IPv6 first and warns. --debug shows that it does so here."""
    ours = [replace(rank, master_addr="localhost") for rank in world(2)]
    flags = f"{ranks.FLAGS} --epochs 1 --steps-per-epoch 1 --run-dir {tmp_path}/run {flag}".split()
    program = "from ddp_core import *; raise SystemExit(run(lambda _: {}, {}))"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    options = dict(env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=without_ipv6)
    started = [subprocess.Popen([sys.executable, "-c", program.format(rank, flags), flag], **options) for rank in ours]
    told = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert all("errno: 97" in text for text in told) if flag else told == ["", ""]


def without_ipv6() -> None:
    """The kernel gives this process and its children errno 97 for IPv6 sockets, as a kernel without IPv6 does. Uses seccomp.

    https://docs.kernel.org/userspace-api/seccomp_filter.html
    """
    number = dict(x86_64=41, aarch64=198)[os.uname().machine]  # the number of the system call socket()
    load, jump, end, allow, refuse = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    steps = [
        (load, 0, 0, 0),
        (jump, 0, 3, number),
        (load, 0, 0, 16),  # its first argument
        (jump, 0, 1, socket.AF_INET6),
        (end, 0, 0, refuse | errno.EAFNOSUPPORT),
        (end, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "no seccomp here")


@pytest.mark.parametrize("odd, size", [(1, 3), (2, 4)])
@pytest.mark.fault(6)
def test_a_rank_that_expects_a_larger_world_names_both(tmp_path, odd, size):
    """Rank 1 is in rank 0's world of two, which then lacks it; rank 2 is beyond it, where rank 0 does not look."""
    present = world(2)
    larger = world(size, port=present[0].master_port)[odd]
    job = train(tmp_path / "run", LATER, ranks=[*present[:odd], larger], faults=LONG)
    assert job.codes[odd] == 4 and {*job.codes[:odd]} <= {0, 4}, (job.codes, job.err)
    assert f"world_size={size} on rank {odd}, but 2 on rank 0" in job.error


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.fault(7)
def test_a_rank_that_is_there_twice_is_named(tmp_path, world_size):
    """In a complete world, and in a world where another rank is missing."""
    present = world(world_size)[:2]
    job = train(tmp_path / "run", LATER, ranks=[*present, present[1]], faults=LONG)
    assert 4 in job.codes[1:] and {*job.codes} <= {0, 4}, (job.codes, job.err)
    assert "rank 1 is there twice" in job.error


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("told, code", [(signal.SIGUSR1, 75), (signal.SIGTERM, 4)])
def test_a_rank_that_waits_for_the_other_can_be_told_to_stop(tmp_path, waiting, told, code):
    """Launchers send SIGTERM also when a rank has failed. That rank is then the missing one."""
    faults = {0: signalled_after(0.5, told)}
    job = train(tmp_path / "run", "--epochs 1 --rendezvous-timeout 100", ranks=[world(2)[waiting]], faults=faults, code=code)
    assert told.name in job.error
    assert not (tmp_path / "run" / "run.lock").exists()


def test_the_first_signal_is_the_reason(tmp_path):
    """The scheduler warns all ranks. The first to exit makes the launcher end the others."""
    faults = {0: in_turn(signalled_after(0.5, signal.SIGUSR1), signalled_after(1, signal.SIGTERM))}
    train(tmp_path / "run", "--epochs 1", ranks=[world(2)[1]], faults=faults, code=75)


# ---- the port and the address -------------------------------------------------------------------------------------


@pytest.mark.fault(1)
def test_a_port_that_another_program_has_is_named_by_every_rank(tmp_path, listener):
    job = train(tmp_path / "run", SOON, ranks=world(2, port=listener), code=4)
    for rank, text in enumerate(job.err):
        assert len(text.splitlines()) == 1 and f"[rank {rank}, " in text and f"MASTER_PORT={listener}" in text
    assert "is taken" in job.err[0] and "another MASTER_PORT" in job.err[0]


@pytest.mark.fault(2)
def test_another_job_s_rank_0_is_told_from_ours(tmp_path):
    """Rank 1 of `mine` finds rank 0 of `theirs` on its port, which waits for its own rank 1."""
    theirs = world(2, job_id="theirs")[0]
    mine = world(2, port=theirs.master_port, job_id="mine")[1]
    job = train(tmp_path / "run", SOON, ranks=[theirs, mine], code=4)
    assert len(job.err[1].splitlines()) == 1 and f"MASTER_PORT={theirs.master_port} belongs to job theirs" in job.err[1]
    assert "this is job mine" in job.err[1]
    assert "1 of 2 ranks missing" in job.err[0], "the other job was disturbed"


@pytest.mark.fault(4)
def test_an_address_that_does_not_resolve_is_named(tmp_path):
    nowhere = [replace(rank, master_addr="no-such-host.invalid") for rank in world(2)]
    job = train(tmp_path / "run", SOON, ranks=nowhere, code=4)
    for rank, text in enumerate(job.err):
        assert len(text.splitlines()) == 1 and f"[rank {rank}, " in text and "MASTER_ADDR=no-such-host.invalid" in text


def test_a_launcher_s_store_serves_one_start_after_another(tmp_path):
    """torchrun's agent keeps its store when it restarts the ranks, with the keys of the first start."""
    port = ranks.free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20), wait_for_workers=False)
    failing = {1: failing_data(PreflightError("no data"))}
    first, second = (world(2, port=port, job_id=f"run.{start}", launcher_store=True) for start in (0, 1))
    train(tmp_path / "run", SOON, ranks=first, faults=failing, code=3)
    train(tmp_path / "run", SOON, ranks=second, code=0)
    del store


@pytest.mark.parametrize("world_size", [2, 8])
def test_many_ranks_meet_on_one_machine(tmp_path, world_size):
    train(tmp_path / "run", "--epochs 1 --steps-per-epoch 1", world_size, code=0)


# ---- ranks that disagree ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--lr 0.2", "lr=0.2 on rank 1, but 0.1 on rank 0"),
        ("--seed 1", "seed=1 on rank 1, but 0 on rank 0"),
        ("--run-dir elsewhere", "run_dir=elsewhere on rank 1"),
        ("--log-every 3", "log_every=3 on rank 1"),
    ],
)
@pytest.mark.fault(12)
def test_a_rank_with_other_flags_is_named_with_them(tmp_path, flags, named):
    job = train(tmp_path / "run", "--epochs 1", 2, flags_of={1: flags}, code=4)
    assert named in job.error
    assert not (tmp_path / "run" / "run.lock").exists()


def _other_version() -> None:
    import ddp_core

    ddp_core.__version__ = "0.0.9"


@pytest.mark.fault(13)
def test_a_rank_with_another_core_is_named(tmp_path):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: call("test_process_group", "_other_version")}, code=4)
    assert "ddp_core=0.0.9 on rank 1, but" in job.error


def test_a_rank_with_other_data_is_named(tmp_path):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: call("test_process_group", "_other_digits")}, code=4)
    assert "data=other on rank 1, but" in job.error


def _other_digits() -> None:
    from ddp_core import data

    data.fingerprint = lambda *rows_and_workload: ("other", [], [])


def test_a_rank_0_that_is_too_slow_hears_who_has_given_up(tmp_path):
    faults = {0: call("test_process_group", "_slow_data", 4)}
    job = train(tmp_path / "run", "--epochs 1 --rendezvous-timeout 1", 2, faults=faults, code=4)
    assert "rank 1 has given up after 1 s (--rendezvous-timeout): rank 0 was not ready" in job.err[0]
    assert "missing" not in job.err[0] and [len(text.splitlines()) for text in job.err] == [1, 1]


@pytest.mark.parametrize("name, value", [("core", "digest"), ("python", "3.99.0"), ("cpu_capability", "NEON")])
@pytest.mark.fault(12)
def test_a_rank_that_computes_with_something_else_is_named(tmp_path, name, value):
    """A stale copy of the same version on one node, another interpreter, or another type of processor."""
    faults = {1: call("test_process_group", "_other_program", name, value)}
    job = train(tmp_path / "run", "--epochs 1", 2, faults=faults, code=4)
    assert f"{name}={value} on rank 1, but" in job.error and " on rank 0: " in job.error
    assert "nothing on" not in job.error, "rank 0 says nothing of it"


def _other_program(name: str, value: str) -> None:
    from ddp_core import device

    real = device.program
    device.program = lambda *arguments: real(*arguments) | {name: value}


@pytest.mark.fault(12)
def test_every_file_of_the_core_counts(tmp_path, monkeypatch):
    copy = shutil.copytree(Path(device.__file__).parent, tmp_path / "ddp_core", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(device, "__file__", str(copy / "device.py"))
    before = device.source_digest()
    for name in ("trainer.py", "workloads/gpt.py", "workloads/digits.csv.gz"):
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole + b"\n")
        assert device.source_digest() != before, name
        (copy / name).write_bytes(whole)
    assert device.source_digest() == before


def test_a_rank_0_that_was_slow_does_not_miss_those_who_are_there(tmp_path):
    """Rank 0 reads its data for longer than --rendezvous-timeout. The other ranks wait a little longer for its verdict."""
    faults = {0: call("test_process_group", "_slow_data", 3.3)}
    train(tmp_path / "run", f"{SOON} --steps-per-epoch 1", 2, faults=faults, code=0)


def _slow_data(seconds: float) -> None:
    from ddp_core import data

    of_workload = data.of_workload
    data.of_workload = lambda *arguments: [time.sleep(seconds), of_workload(*arguments)][1]


def _fail_to_build() -> None:
    from ddp_core.errors import WorkloadError
    from ddp_core.workloads.digits import Digits

    def model(*arguments):
        raise WorkloadError("a library is older here")

    Digits.model = model


def test_what_one_rank_alone_cannot_build_it_says_itself(tmp_path):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: call("test_process_group", "_fail_to_build")}, code=2)
    assert "rank 1 failed" in job.err[0] and "a library is older here" in job.err[1]


def test_a_rank_that_comes_after_the_verdict_hears_it(tmp_path):
    """Rank 1 lacks data. Rank 2 comes two seconds later and must still get that verdict."""
    late = {1: failing_data(PreflightError("no data")), 2: sleeping(2)}
    job = train(tmp_path / "run", "--epochs 1", 3, faults=late, code=3)
    assert "no data" in job.error


# ---- memory of the host -------------------------------------------------------------------------------------------


def _exhaust(how: str) -> None:
    """Ask for more memory than exists: from torch's allocator, Python's, or the kernel."""
    if how == "torch":
        torch.empty(2**60, dtype=torch.uint8)
    elif how == "python":
        bytearray(2**62)
    else:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("how", ["torch", "python", "kernel"])
@pytest.mark.parametrize("when", ["reading", "building", "training"])
@pytest.mark.fault(28)
def test_a_rank_whose_host_has_no_memory_ends_all_with_7(tmp_path, how, when):
    fault = at_step(2, call("test_process_group", "_exhaust", how))
    fault = fault if when == "training" else call("test_process_group", "_exhaust_in", when, how)
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: fault}, code=7)
    told = [line for text in job.err for line in text.splitlines()]
    assert len(told) <= 2 and not any("Traceback" in line for line in told), told
    (own,) = [line for line in told if "out of memory, rank 1 on " in line]
    assert "--global-batch-size" in own and ("at step 2" if when == "training" else "before the first step") in own
    assert "rank 1" in job.err[0]


def _exhaust_in(when: str, how: str) -> None:
    from ddp_core import data
    from ddp_core.workloads.digits import Digits

    if when == "reading":
        data.of_workload = lambda *arguments: _exhaust(how)
    else:
        Digits.model = lambda *arguments: _exhaust(how)


# ---- cost of the rendezvous ---------------------------------------------------------------------------------------


def _count_requests(file: Path) -> None:
    """Count this process's requests to the store and the bytes read, until its first step, without gloo's."""
    from ddp_core.rendezvous import SignedStore

    counts = dict(requests=0, read=0)

    def counted(name):
        method = getattr(SignedStore, name)

        def act(store, key, *others):
            result = method(store, key, *others)
            if not "".join(key).startswith(("group/", "control/")):
                counts["requests"] += 1
                counts["read"] += len(result[0]) if name == "read" else 0
            return result

        return act

    for name in ("set", "read", "add", "check", "wait"):
        setattr(SignedStore, name, counted(name))
    at_step(0, partial(_write_counts, file, counts))()


def _write_counts(file: Path, counts: dict[str, int]) -> None:
    file.write_text(json.dumps(counts))


def test_a_rank_s_own_cost_of_meeting_does_not_grow_with_their_number(tmp_path):
    """All ranks' rows go to rank 0 only. Sent to every rank, they would be a terabyte at 75,000 ranks."""
    costs = {}
    for world_size in (2, 8, 16):
        file = tmp_path / f"costs-{world_size}"
        faults = {1: call("test_process_group", "_count_requests", file)}
        flags = "--epochs 1 --steps-per-epoch 1 --global-batch-size 96"
        train(tmp_path / f"run-{world_size}", flags, world_size, faults=faults, code=0)
        costs[world_size] = json.loads(file.read_text())
    assert costs[2]["requests"] == costs[8]["requests"] == costs[16]["requests"] < 10, costs
    assert costs[16]["read"] <= costs[2]["read"] + 2, costs  # world_size has one more digit


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:558] Connection closed by peer [10.0.0.1]:3571",
        "Timed out waiting 5000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "Pair is not connected (10.0.0.1)",
        "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0",
    ],
)
def test_every_way_in_which_gloo_says_that_a_peer_is_gone_is_known(text):
    """An unknown message once gave a traceback and exit code 1 beside a killed rank: of four ranks, killed while they met."""
    assert Peers.is_lost(RuntimeError(text)) and not Peers.is_lost(RuntimeError("shapes cannot be multiplied"))


@pytest.mark.parametrize("backend, closed", [("gloo", [None]), ("nccl", ["of a node", "of nodes"])])
def test_a_rank_that_hangs_up_closes_no_group_of_nccl_which_would_wait_for_its_peers(monkeypatch, backend, closed):
    """closed None: all groups."""
    found = []
    monkeypatch.setattr(process_group.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(process_group.dist, "destroy_process_group", found.append)
    control = SimpleNamespace(groups=[(range(2), "of a node"), (range(0, 4, 2), "of nodes")])
    Peers.hang_up(SimpleNamespace(data="data", control=control))
    assert found == closed


def test_as_many_ranks_as_the_kernel_allows_may_call_rank_0_at_once(monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "create_server", lambda place, **words: asked.append(words["backlog"]))
    rendezvous.Rendezvous._listen(SimpleNamespace(rank=world(2)[0]))
    assert asked == [4096]  # Linux's limit, net.core.somaxconn


def test_how_long_ranks_wait_for_each_other():
    """In these tests all ranks are on one machine and wait less (ranks.py)."""
    assert (process_group.ROLL_CALL, rendezvous.REPORT_SECONDS, rendezvous.GRACE, run_directory.LAG) == (5.0, 10.0, 2.0, 10.0)

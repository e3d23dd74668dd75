"""Only the job's own ranks take part. Tests what other programs on this machine may write, and where they can connect.

python -m pytest core/tests/test_stranger.py
"""

import json
import os
import random
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_core import Rank, rendezvous
from ddp_core.errors import PreflightError
from ddp_core.process_group import Peers
from ddp_core.stop import StopFlag
from faults import at_step, signalled
from ranks import assert_same_run, call, fork, train, world

FLAGS = "--epochs 1 --steps-per-epoch 3 --rendezvous-timeout 2 --timeout 2"
SECRET = "0123456789abcdef" * 2
# Values as ranks write them, as well as a stranger can imitate them.
PROGRESS = dict(step=14, loss_sum=0.0, history=[[0, "0x0p+0"]], best=None, scale=None, stateless=[], numbers=[])
FORGED = {
    "greeting": dict(job_id="job-1", world_size=2),
    "rank/0": dict(error=[75, "stopped before the first step"]),
    "rank/1": dict(error=[75, "stopped before the first step"]),
    "verdict": dict(error=[75, "stopped before the first step"]),
    "objection": "rank 1 is not wanted",
    "broadcast/1": False,
    "broadcast/2": PROGRESS,
    "farewell": "",
    "heard/1": "",
    "failed/0": "",
    "missing": [1],
}


def _connected(port: int) -> dist.TCPStore:
    """Connect as soon as rank 0 listens."""
    while True:
        with suppress(OSError, RuntimeError):
            socket.create_connection(("127.0.0.1", port)).close()
            return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)
        time.sleep(0.001)


def _overwrite(port: int, seed: int) -> None:
    """From a random moment on, overwrite all values in the store with forged ones, until this process is ended."""
    signal.alarm(60)
    draw, store = random.Random(seed), _connected(port)
    time.sleep(draw.random() * draw.choice([0, 0.1, 0.3]))
    signed = bytes(32) if draw.random() < 0.8 else b""
    with suppress(RuntimeError):  # the job has ended
        while True:
            for key in draw.sample([*FORGED], len(FORGED)):
                store.set(f"ddp_core//{key}", signed + json.dumps(FORGED[key]).encode())
            for key in store.list_keys():
                if not key.startswith("ddp_core//") or draw.random() < 0.5:
                    store.set(key, draw.randbytes(draw.choice([0, 3, 40, 4000])))
            time.sleep(draw.choice([0, 0.01]))


@pytest.fixture
def stranger():
    """stranger(act, *arguments): a foreign process on rank 0's machine."""
    started = []

    def start(act, *arguments):
        started.append(ranks.forks.Process(target=act, args=arguments))
        started[-1].start()

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize("seed", range(int(os.environ.get("STRANGERS", "8"))))
def test_a_stranger_in_the_store_changes_no_run(tmp_path, finished, stranger, seed):
    """The run has the same losses, or ends with 4 and one line per rank. It never ends untrained with 0, nor with 75."""
    present = world(2, secret=SECRET)
    stranger(_overwrite, present[0].master_port, seed)
    job = train(tmp_path / "run", FLAGS, ranks=present)
    assert job.codes in ([0, 0], [4, 4]), (job.codes, job.err)
    if job.codes == [0, 0]:
        assert_same_run(job, finished(FLAGS, 2))
    for text in job.err:
        assert len(text.splitlines()) <= 1, text


@pytest.mark.parametrize("key", ["alive/1", "missing"])
def test_a_stranger_does_not_answer_for_a_rank_that_is_lost(tmp_path, stranger, key):
    present = world(3, secret=SECRET)
    stranger(_sign, present[0].master_port, key, b"[]")
    job = train(tmp_path / "run", "--epochs 1 --timeout 5", ranks=present, faults={1: at_step(2, signalled(signal.SIGKILL))})
    assert job.codes == [7, -signal.SIGKILL, 7], job.err
    assert "rank 1 died or hangs" in job.error


# ---- forged values without a secret, when anybody can sign -------------------------------------------------------------


def _sign(port: int, key: str, text: bytes) -> None:
    """Put this correctly signed text into the store, before and after the ranks have written."""
    signal.alarm(60)
    store = _connected(port)
    signed = rendezvous.SignedStore(dist.PrefixStore("ddp_core/", store), "", "")
    with suppress(RuntimeError):
        while True:
            signed.set(key, text)


JUNK = [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"error": 4}', b'{"error": [999, "x"]}', b'{"job_id": "job-1"}']


@pytest.mark.parametrize("text", JUNK, ids=range(len(JUNK)))
@pytest.mark.parametrize("key", ["greeting", "rank/0", "rank/1", "verdict"])
def test_junk_is_one_line(tmp_path, stranger, key, text):
    """A rank uses the value that it reads first, or reports that no rank writes such a value."""
    present = world(2)
    stranger(_sign, present[0].master_port, key, text)
    job = train(tmp_path / "run", FLAGS, ranks=present)
    assert job.codes in ([0, 0], [4, 4]), (job.codes, job.err)
    assert all(len(written.splitlines()) <= 1 for written in job.err), job.err


def test_a_greeting_without_control_characters(tmp_path, stranger):
    present = world(2, job_id="mine")
    greeting = json.dumps(dict(job_id="\x1b[2J theirs\n" + 1000 * "x", world_size=2)).encode()
    stranger(_sign, present[0].master_port, "greeting", greeting)
    job = train(tmp_path / "run", FLAGS, ranks=present)
    assert job.codes in ([0, 0], [4, 4]), (job.codes, job.err)
    assert len(job.err[1]) < 400 and job.err[1].strip().isprintable(), job.err


# ---- where rank 0 listens ---------------------------------------------------------------------------------------------


def _record(file) -> None:
    """The addresses where this process listens at its first step, except gloo's on the loopback interface."""
    mine = {link.rpartition("[")[2][:-1] for link in map(os.readlink, _descriptors()) if link.startswith("socket:[")}
    file.write_text(json.dumps(sorted({place for place, inode in listeners() if inode in mine})))


def _descriptors() -> list[str]:
    return [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


def listeners() -> list[tuple[str, str]]:
    """The address and port of each listening socket, as Linux writes them, and its inode."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return [(words[1], words[9]) for words in lines if words[3] == "0A"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_machine_listens_on_its_loopback_interface_alone(tmp_path, world_size):
    """The store of several ranks, and gloo's ports, which PyTorch opens even for a single rank."""
    files = [tmp_path / f"ports-{rank}" for rank in range(world_size)]
    present = world(world_size)
    faults = {rank: at_step(0, partial(_record, file)) for rank, file in enumerate(files)}
    train(tmp_path / "run", FLAGS, ranks=present, faults=faults, code=0)
    places = [place.split(":") for file in files for place in json.loads(file.read_text())]
    assert {address for address, _ in places} == {"0100007F"}, places
    assert (f"{present[0].master_port:04X}" in {port for _, port in places}) == (world_size > 1), places


@pytest.mark.fault(4)
def test_an_address_of_another_host_is_not_taken_for_a_port_in_use(tmp_path):
    """192.0.2.0/24 belongs to nobody: https://datatracker.ietf.org/doc/html/rfc5737"""
    elsewhere = [replace(rank, master_addr="192.0.2.1") for rank in world(2)]
    job = train(tmp_path / "run", FLAGS, ranks=elsewhere[:1], code=4)
    assert "MASTER_ADDR=192.0.2.1" in job.error and "is no address of" in job.error and "taken" not in job.error


def test_a_name_that_is_the_loopback_on_its_own_host_is_heard_by_the_others(tmp_path):
    """As in Debian's /etc/hosts. Two nodes are made of one node's ranks; their name is 127.0.0.1 here."""
    port = ranks.free_port()
    two_nodes = [Rank(rank, 2, 0, 1, rank, socket.gethostname(), port, "job-1") for rank in range(2)]
    job = train(tmp_path / "run", FLAGS, ranks=two_nodes, code=0)
    name = socket.gethostbyname(socket.gethostname())
    told = [line for line in job.err[0].splitlines() if line.startswith("note: MASTER_ADDR=") and "all interfaces" in line]
    assert len(told) == name.startswith("127.") and job.err[1] == ""


# ---- the secret -------------------------------------------------------------------------------------------------------


def test_ranks_with_different_secrets_do_not_meet(tmp_path):
    first, second = world(2, secret=SECRET)[0], world(2, secret=SECRET[::-1])[1]
    job = train(tmp_path / "run", FLAGS, ranks=[first, replace(second, master_port=first.master_port)], code=4)
    assert "DDP_SECRET" in job.err[1] and "greeting" in job.err[1]
    for text in job.out + job.err:
        assert SECRET not in text and SECRET[::-1] not in text


@pytest.mark.parametrize("length", [1, 31])
def test_a_secret_that_can_be_guessed_is_refused(length):
    """The secret is not shown."""
    with pytest.raises(PreflightError, match=f"DDP_SECRET.* has {length} characters.*openssl rand") as refused:
        replace(Rank.single(), secret="q" * length)
    assert "qq" not in str(refused.value)


@pytest.mark.parametrize("secret", ["", SECRET])
def test_the_record_says_whether_there_was_a_secret(tmp_path, secret):
    job = train(tmp_path / "run", FLAGS, ranks=world(2, secret=secret), code=0)
    (start,) = job.records("start")
    assert start["signed"] == bool(secret)
    assert SECRET not in (job.run_dir / "run.jsonl").read_text()


# ---- values for all ranks ---------------------------------------------------------------------------------------------


def _long_value(rank: Rank, file: Path) -> int:
    """A value of a little more than 9 MiB; the store allows 8 MiB for one."""
    config = SimpleNamespace(timeout=20.0, backend="auto", run_dir="run")
    peers = Peers(rank, config, torch.device("cpu"), rendezvous.Rendezvous(rank, 20, StopFlag()))
    value = peers.broadcast([0.5] * 2_000_000 if rank.rank == 0 else None)
    file.write_text(str(len(value)))
    peers.wait()
    peers.leave()
    os._exit(0)


def test_the_history_of_many_epochs_reaches_all_ranks(tmp_path):
    files = [tmp_path / f"length-{rank}" for rank in range(2)]
    calls = [call("test_stranger", "_long_value", rank, file) for rank, file in zip(world(2), files, strict=True)]
    job = fork(tmp_path, *calls)
    assert job.codes == [0, 0], job.err
    assert [file.read_text() for file in files] == ["2000000", "2000000"]


def test_a_value_that_is_copied_under_another_name_is_a_stranger_s():
    """A stranger who cannot sign can still write what he has read."""
    plain = dist.HashStore()
    store = rendezvous.SignedStore(plain, SECRET, "here")
    store.set("verdict", "all are well")
    plain.set("greeting", plain.get("verdict"))
    assert store.read("verdict") == (b"all are well", True) and store.read("greeting") == (b"all are well", False)
    with pytest.raises(
        rendezvous.RendezvousError, match="the greeting in rank 0's store is not what a rank of this job writes"
    ):
        store.get("greeting")


def _note_signed_keys(file: Path) -> None:
    """Record the keys that this process writes with a signature, until its first step."""
    keys, method = [], rendezvous.SignedStore.set

    def noting(store, key, value):
        keys.append(key)
        return method(store, key, value)

    rendezvous.SignedStore.set = noting
    at_step(0, lambda: bool(file.write_text("\n".join(keys))))()


def test_the_addresses_of_gloo_are_signed(tmp_path):
    """For the groups of gradients and of control messages. Otherwise a stranger could make ranks connect to him."""
    faults = {1: call("test_stranger", "_note_signed_keys", tmp_path / "keys")}
    train(tmp_path / "run", "--epochs 1 --steps-per-epoch 1 --global-batch-size 96", 2, faults=faults, code=0)
    groups = {key.partition("/")[0] for key in (tmp_path / "keys").read_text().splitlines() if "/" in key}
    assert {"group", "control"} <= groups, groups

"""The control plane: what it agrees on, what it costs, and who is named when a rank in the middle of the tree is lost.

python -m pytest core/tests/test_control.py
"""

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ddp_core import process_group, rendezvous
from ddp_core.process_group import Peers
from ddp_core.stop import StopFlag
from faults import at_step, signalled
from ranks import assert_same_run, call, fork, train, world

FLAGS = "--epochs 2 --steps-per-epoch 3 --timeout 10"


def _in_groups_of(members: int) -> None:
    process_group.MEMBERS = members


def _both(*acts) -> None:
    for act in acts:
        act()


def in_groups_of(members: int, *acts):
    """A fault of every rank, with what else is to go wrong in this one."""
    return partial(_both, partial(_in_groups_of, members), *acts)


# ---- what it agrees on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size, members", [(1, 2), (2, 2), (3, 2), (7, 2), (8, 2), (9, 3), (10, 4), (16, 4), (17, 4)])
def test_every_rank_has_the_numbers_of_all_in_their_order(tmp_path, world_size, members):
    files = [tmp_path / f"numbers-{rank}" for rank in range(world_size)]
    places = world(world_size)
    calls = [call("test_control", "_ask", rank, members, file) for rank, file in zip(places, files, strict=True)]
    job = fork(tmp_path, *calls)
    assert job.codes == [0] * world_size, job.err
    expected = dict(gathered=[[float(rank), 0.5 - rank] for rank in range(world_size)], told=["of rank 0", 7], sent=[1.0, 2.0])
    assert [json.loads(file.read_text()) for file in files] == [expected] * world_size


def _ask(rank, members: int, file: Path) -> None:
    process_group.MEMBERS = members
    config = SimpleNamespace(timeout=20.0, backend="auto")
    peers = Peers(rank, config, torch.device("cpu"), rendezvous.Rendezvous(rank, 20, StopFlag()))
    numbers = torch.tensor([1.0, 2.0]) if rank.rank == 0 else torch.zeros(2)
    gathered = peers.gather(torch.tensor([rank.rank, 0.5 - rank.rank], dtype=torch.float64))
    told = peers.broadcast(["of rank 0", 7] if rank.rank == 0 else None)
    peers.broadcast_tensors([numbers])
    file.write_text(json.dumps(dict(gathered=gathered.tolist(), told=told, sent=numbers.tolist())))
    peers.wait()
    peers.leave()
    os._exit(0)


@pytest.mark.parametrize("members", [2, 3])
def test_a_run_is_the_same_whatever_the_tree(tmp_path, finished, members):
    """Losses are summed in an order that is a function of the number of ranks alone."""
    faults = {rank: in_groups_of(members) for rank in range(8)}
    job = train(tmp_path / "run", FLAGS, 8, faults=faults, code=0)
    assert_same_run(job, finished(FLAGS, 8))


# ---- who is lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [4, 5, 6])
def test_a_rank_that_is_lost_is_named_wherever_it_stands(tmp_path, lost):
    """Of groups of 2: rank 4 speaks for 4 to 7, rank 6 for itself and 7, and rank 5 for nobody."""
    faults = {rank: in_groups_of(2) for rank in range(8)}
    faults[lost] = in_groups_of(2, at_step(2, signalled(signal.SIGKILL)))
    job = train(tmp_path / "run", FLAGS, 8, faults=faults)
    assert job.codes == [-signal.SIGKILL if rank == lost else 7 for rank in range(8)], job.err
    assert f"rank {lost} died or hangs" in job.error


# ---- what it costs ------------------------------------------------------------------------------------------------


def groups_of(rank: int, world_size: int, monkeypatch) -> process_group.Control:
    """A rank's place in the tree, without any connection."""
    monkeypatch.setattr(dist, "new_group", lambda *arguments, **keywords: None)
    return process_group.Control(rank, world_size, None)


@pytest.mark.parametrize("world_size", [8, 32, 33, 64, 256, 512, 1024, 75264])
def test_a_rank_has_few_connections_however_many_there_are(monkeypatch, world_size):
    """At most 31 in each level of the tree: a full mesh would have one to each other rank."""
    levels = max(1, math.ceil(math.log(world_size, 32) - 1e-9))
    most, in_tree = 0, 0
    for rank in range(world_size):
        control = groups_of(rank, world_size, monkeypatch)
        assert control.depth == levels and 1 <= len(control.groups) <= levels
        assert all(rank in members and len(members) <= 32 for members, _ in control.groups)
        most = max(most, sum(len(members) - 1 for members, _ in control.groups))
        in_tree += sum(rank != members.start for members, _ in control.groups)
    assert most <= 31 * levels
    assert in_tree == world_size - 1, "each rank but 0 has one above it"

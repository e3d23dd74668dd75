"""The control plane: the results that ranks agree on, its cost, and the error when a rank within the tree is lost.

python -m pytest core/tests/test_control.py
"""

import json
import math
import os
import resource
import signal
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from ddp_core import control, process_group, rendezvous
from ddp_core.control import groups_of, tree_sum
from ddp_core.errors import named
from ddp_core.process_group import Peers
from ddp_core.stop import StopFlag
from faults import at_step, in_turn, signalled
from ranks import assert_same_run, call, fork, train, world

from conformance.harness.counted import Counted

FLAGS = "--epochs 2 --steps-per-epoch 3 --timeout 10"


def _in_groups_of(members: int) -> None:
    control.MEMBERS = members


def in_groups_of(members: int, *acts):
    """A fault that sets the tree's group size in this rank, and then acts."""
    return in_turn(partial(_in_groups_of, members), *acts)


# ---- results ------------------------------------------------------------------------------------------------------

SHAPES = [(1, 2), (2, 2), (3, 2), (7, 2), (8, 2), (9, 3), (10, 4), (16, 4), (17, 4)]


def numbers_of(rank: int) -> list[float]:
    """Numbers whose sum depends on the order of additions."""
    return [math.exp(rank), 0.1 * rank, 1 / (rank + 1)]


@pytest.mark.parametrize("world_size, members", SHAPES)
def test_every_rank_has_the_sums_the_largest_and_the_names(tmp_path, monkeypatch, world_size, members):
    files = [tmp_path / f"numbers-{rank}" for rank in range(world_size)]
    places = world(world_size)
    calls = [call("test_control", "_ask", rank, members, file) for rank, file in zip(places, files, strict=True)]
    job = fork(tmp_path, *calls)
    assert job.codes == [0] * world_size, job.err
    monkeypatch.setattr(control, "MEMBERS", members)
    sums = tree_sum([torch.tensor(numbers_of(rank), dtype=torch.float64) for rank in range(world_size)])
    expected = dict(sums=sums.tolist(), most=[world_size - 1, 0], odd=[*range(1, world_size, 2)], nobody=[])
    expected |= dict(told=["of rank 0", 7], sent=[1.0, 2.0])
    assert [json.loads(file.read_text()) for file in files] == [expected] * world_size


def _ask(rank, members: int, file: Path) -> None:
    control.MEMBERS = members
    config = SimpleNamespace(timeout=20.0, backend="auto", run_dir="run")
    peers = Peers(rank, config, torch.device("cpu"), rendezvous.Rendezvous(rank, 20, StopFlag()))
    numbers = torch.tensor([1.0, 2.0]) if rank.rank == 0 else torch.zeros(2)
    mine = torch.tensor(numbers_of(rank.rank), dtype=torch.float64)
    sums, most = peers.reduce(mine, torch.tensor([rank.rank, -rank.rank], dtype=torch.float64))
    found = dict(sums=sums.tolist(), most=most.tolist(), odd=peers.which(rank.rank % 2 == 1), nobody=peers.which(False))
    found |= dict(told=peers.broadcast(["of rank 0", 7] if rank.rank == 0 else None))
    peers.broadcast_tensors([numbers])
    file.write_text(json.dumps(found | dict(sent=numbers.tolist())))
    assert mine.tolist() == numbers_of(rank.rank), "what is given is not changed"
    peers.wait()
    peers.leave()
    os._exit(0)


@pytest.mark.parametrize("members", [2, 3])
def test_a_run_is_the_same_whatever_the_tree(tmp_path, finished, members):
    """The order in which losses are summed depends on the number of ranks only."""
    faults = {rank: in_groups_of(members) for rank in range(8)}
    job = train(tmp_path / "run", FLAGS, 8, faults=faults, code=0)
    assert_same_run(job, finished(FLAGS, 8))


# ---- lost ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 3, 6])
def test_a_rank_that_is_lost_is_named_wherever_it_stands(tmp_path, lost):
    """In groups of 2, rank 1 speaks for 1, 3, 5 and 7; rank 3 for itself and 7; rank 6 for none."""
    faults = {rank: in_groups_of(2) for rank in range(8)}
    faults[lost] = in_groups_of(2, at_step(2, signalled(signal.SIGKILL)))
    job = train(tmp_path / "run", FLAGS, 8, faults=faults)
    assert job.codes == [-signal.SIGKILL if rank == lost else 7 for rank in range(8)], job.err
    assert f"rank {lost} died or hangs" in job.error
    assert f"then submit again with --run-dir {tmp_path / 'run'};" in job.error


@pytest.mark.parametrize("world_size, lost", [(64, [33]), (75264, [2352]), (75264, [*range(0, 75264, 7)][1:])])
def test_the_roll_is_called_in_any_world(monkeypatch, world_size, lost):
    """A rank asks three times in any world. In a job that has lost a rank, rank 0 asks twice per rank, once."""
    monkeypatch.setattr(process_group, "ROLL_CALL", 0.2)
    said: dict[str, str] = {}
    requests = dict.fromkeys(range(world_size), 0)

    def peers(rank: int) -> Peers:
        def act(key, value=None):
            requests[rank] += 1
            if value is None and key not in said:
                raise InterruptedError(f"rank {rank} waits for {key}, as all others will")
            return said.setdefault(key, value)

        one = Peers.__new__(Peers)
        check = lambda keys: [requests.update({rank: requests[rank] + 1}), keys[0] in said][1]  # noqa: E731
        one.rank, one.world_size = rank, world_size
        get = lambda key: act(key).encode()  # noqa: E731
        one.store = SimpleNamespace(set=act, get=get, check=check, wait=lambda keys, _: act(keys[0]))
        return one

    others = sorted({*range(1, world_size)} - {*lost})
    for rank in others:
        with suppress(InterruptedError):
            peers(rank)._call_the_roll("")
    requests = dict.fromkeys(range(world_size), 0)
    found, code, _ = peers(0)._call_the_roll("")
    assert (found, code) == (lost[:17], 0)
    assert requests[0] <= 2 * world_size + 8 * len(lost) + 8
    assert all(peers(rank)._call_the_roll("") == (found, 0, {}) for rank in others)
    assert {requests[rank] for rank in others} == {3}


@pytest.mark.parametrize("count, line", [(1, "0"), (16, "0, 1, 2"), (17, "0, 1, 2"), (40000, "0, 1, 2")])
def test_a_line_names_16_ranks_at_most(count, line):
    found = named(range(count))
    assert found.startswith(line) and len(found.split(",")) == min(count, 16) and ("and more" in found) == (count > 16)


# ---- cost ---------------------------------------------------------------------------------------------------------

WORLDS = [1, 2, 8, 32, 33, 34, 64, 66, 99, 256, 512, 1000, 1001, 4097, 75264]


def levels(world_size: int) -> int:
    """The largest number of levels. Each level has 32 times fewer ranks than the level two below, so their number is odd."""
    return 1 if world_size <= 32 else 1 + math.ceil(math.log(world_size, 32) - 1e-9)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_rank_pays_by_the_logarithm_of_their_number(world_size):
    """At most 31 connections per level of the tree, with one message up and one down on each."""
    counted = Counted(world_size)
    numbers = torch.randn(world_size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(world_size))
    found = counted.reduce(numbers, tree_sum)
    total = tree_sum(numbers)
    assert all(torch.equal(each, total) for each in found), "another order of additions"
    costs = [counted.of(rank) for rank in range(world_size)]
    assert sum(cost.messages for cost in costs) == 4 * (world_size - 1), "two for each rank but 0, at both ends"
    for rank, cost in enumerate(costs):
        groups = groups_of(rank, world_size)
        assert len(groups) <= levels(world_size) and all(rank in members and len(members) <= 32 for members in groups)
        assert all(members[0] == rank for members in groups[:-1]), "it speaks for all of its groups but the last"
        assert cost.connections == sum(len(members) - 1 for members in groups) <= 31 * levels(world_size)
        assert cost.messages <= 2 * cost.connections and cost.bytes == 24 * cost.messages


def test_its_groups_have_the_run_s_timeout(monkeypatch):
    """Without this timeout, a hanging rank is noticed after half an hour, whatever --timeout is."""
    made = []
    monkeypatch.setattr(control.dist, "new_group", lambda members, **options: made.append(options.get("timeout")))
    control.Control(0, 64, timedelta(seconds=7))
    assert made == [timedelta(seconds=7)] * len(groups_of(0, 64))


@pytest.mark.parametrize("world_size", [8, 64, 128])
def test_forked_ranks_pay_what_the_tree_says(tmp_path, monkeypatch, world_size):
    """Each rank counts, in the kernel and in the store. Only the control plane connects the ranks here, as under nccl, whose
    connections are separate. ulimit -n 256 suffices, except for rank 0, whose store has one connection per rank.
    """
    files = [tmp_path / f"counts-{rank}" for rank in range(world_size)]
    limits = {rank: 256 if rank else 256 + world_size for rank in range(world_size)}
    limit = {rank: partial(resource.setrlimit, resource.RLIMIT_NOFILE, (most, most)) for rank, most in limits.items()}
    faults = {rank: in_turn(limit[rank], call("counting", "count", file, True)) for rank, file in enumerate(files)}
    flags = "--epochs 1 --steps-per-epoch 5 --global-batch-size 128 --timeout 90 --rendezvous-timeout 90"
    monkeypatch.setattr(ranks, "SECONDS", 100.0)
    job = train(tmp_path / "run", flags, world_size, faults=faults, reduction="counting:OverTheTree", code=0)
    assert len(job.losses) == 5
    for rank, file in enumerate(files):
        paid, groups = json.loads(file.read_text()), groups_of(rank, world_size)
        assert paid["connections"] == sum(len(members) - 1 for members in groups)
        assert paid["requests"] <= sum(4 * len(members) for members in groups)
        assert paid["files"] <= 32 + paid["connections"] + (world_size if rank == 0 else 0)
        # Bytes sent and received since the start. gloo passes messages down through at most 5 other members of a group, and
        # adds less than 256 bytes to a message. A rank that has its answer may have sent the next message already.
        times = sum(len(members) if members[0] == rank else 6 for members in groups)
        assert paid["bytes"] <= times * (paid["content"] + 256 * (paid["messages"] + 1)), paid

"""Gradient sums: ddp, flat and canonical agree; canonical gives the same bits at every world size.

python -m pytest core/tests/test_reduction.py
"""

import signal
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ddp_core import reduction, snapshot
from ddp_core.reduction import Reduction, tree_sum
from ddp_core.sharding import Sharded
from faults import at_step, signalled
from ranks import Job, train
from test_trainer import deviation

CANONICAL = "--reduction canonical"
RUN = f"--epochs 3 {CANONICAL}"  # 14 steps an epoch


def assert_same_bits(job: Job, reference: Job) -> None:
    """Every loss, gradient norm, evaluation and tensor. Snapshots may differ only where they give the world size."""
    assert [loss.hex() for loss in job.losses] == [loss.hex() for loss in reference.losses]
    ours, theirs = ({step["step"]: step["grad_norm"] for step in one.records("step")} for one in (job, reference))
    assert ours == theirs
    ours, theirs = ([record | {"seconds": 0} for record in one.records("epoch")] for one in (job, reference))
    assert ours == theirs
    for name in ("snapshot.safetensors", "best.safetensors"):
        (ours, document), (theirs, other) = (snapshot.read(one.run_dir / name) for one in (job, reference))
        assert ours.keys() == theirs.keys()
        for key in ours:
            bits, others = (tensors[key].reshape(-1).view(torch.uint8) for tensors in (ours, theirs))
            assert bits.equal(others), f"{key} in {name}"
        differ = {key for key in document.keys() | other.keys() if document.get(key) != other.get(key)}
        assert differ <= {"world_size", "document_crc32"}


# ---- the order of additions ---------------------------------------------------------------------------------------


@dataclass
class Term:
    """A sum as text, with its brackets."""

    text: str

    def __add__(self, other: "Term") -> "Term":
        return Term(f"({self.text}+{other.text})")


def test_ranks_form_the_sum_of_one_exactly_if_they_have_a_power_of_two_of_shards():
    for shards in range(1, 49):
        terms = [Term(str(shard)) for shard in range(shards)]
        for world_size in (size for size in range(1, shards + 1) if shards % size == 0):
            nested = tree_sum([tree_sum(terms[rank::world_size]) for rank in range(world_size)])
            allowed = world_size == 1 or (shards // world_size).bit_count() == 1
            assert (nested == tree_sum(terms)) == allowed, f"{shards} shards on {world_size} ranks: {nested.text}"


def test_the_order_of_additions():
    assert tree_sum([Term(str(shard)) for shard in range(4)]).text == "((0+2)+(1+3))"
    assert tree_sum([Term(str(shard)) for shard in range(6)]).text == "(((0+3)+(1+4))+(2+5))"


def test_tensors_are_summed_in_that_order():
    parts = torch.tensor([[1e16, 1.0], [1.0, 2.0], [-1e16, 4.0], [1.0, 8.0]], dtype=torch.float64)
    assert tree_sum(parts).tolist() == [2.0, 15.0]  # added in the order of rows, the first sum would be 1
    assert tree_sum(parts[:1]).tolist() == [1e16, 1.0]


# ---- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "workload, flags",
    [
        ("digits", ""),
        ("digits", "--precision fp64"),
        ("digits", "--precision bf16 --optimizer adamw --lr 0.003 --lr-schedule cosine"),
        ("digits", "--shards 4"),
        ("digits", "--precision fp64 --epochs 20 --steps-per-epoch 1"),  # most sums of few numbers agree in any order
        ("regression", ""),
        ("mnist", ""),
        ("mnist", "--channels-last --precision fp64"),
        ("gpt", ""),
        ("gpt", "--global-batch-size 64 --shards 64 --steps-per-epoch 1"),  # 41 rows are held out, so some shards have none
    ],
)
def test_every_world_size_gives_the_same_bits(flags_of, finished, workload, flags, world_size):
    flags = f"{flags_of[workload]} {CANONICAL} {flags}"
    assert_same_bits(finished(flags, world_size), finished(flags, 1))


@pytest.mark.parametrize("world_size", [3, 12])  # beyond 8 ranks, flat lets gloo add, in gloo's own order
def test_worlds_of_other_sizes_give_them_too(finished, world_size):
    assert_same_bits(finished(f"{RUN} --shards 12", world_size), finished(f"{RUN} --shards 12", 1))


@pytest.mark.parametrize("world_size", [2, 4])
def test_noise_in_held_out_rows_is_the_same(finished, world_size):
    """Mixup's loss is weighted by random numbers."""
    ours, alone = (finished(CANONICAL, size, "small:Mixup").records("epoch") for size in (world_size, 1))
    assert [record["eval_loss"] for record in ours] == [record["eval_loss"] for record in alone]


def test_it_is_the_same_training(finished):
    plain, canonical = (finished(f"--epochs 3 --precision fp64{flags}", 2) for flags in ("", f" {CANONICAL}"))
    assert deviation(canonical.losses, plain.losses) < 1e-12
    (start,) = canonical.records("start")
    assert (start["reduction"], start["config"]["shards"]) == ("canonical", 8)
    for ours, theirs in zip(canonical.records("epoch"), plain.records("epoch"), strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-12)


def test_threads_do_not_change_them(flags_of, finished, tmp_path):
    """A rank with more cores would otherwise run kernels with more threads, which add in another order."""
    flags = f"{flags_of['mnist']} {CANONICAL}"
    job = train(tmp_path / "run", flags, 1, faults={0: partial(torch.set_num_threads, 2)}, code=0)
    assert [row["threads"] for row in job.records("start")[0]["ranks"]] == [1]
    assert_same_bits(job, finished(flags, 2))


# ---- stopped, and resumed by others -------------------------------------------------------------------------------


@pytest.mark.parametrize("first, then", [(2, 4), (1, 4), (4, 1)])
def test_a_run_goes_on_at_another_world_size_to_the_bit(finished, tmp_path, first, then):
    job = train(tmp_path / "run", RUN, first, faults={0: at_step(3, signalled(signal.SIGTERM))}, code=75)
    assert snapshot.read(job.snapshot)[1]["step"] % 14, "it stopped at the end of an epoch"
    job = train(tmp_path / "run", RUN, then, code=0)
    assert [record["world_size"] for record in job.records("start")] == [first, then]
    assert_same_bits(job, finished(RUN, 1))


def test_a_run_of_another_reduction_goes_on_with_it(finished, tmp_path):
    train(tmp_path / "run", "--epochs 1 --precision fp64", 2, code=0)
    job = train(tmp_path / "run", f"{RUN} --precision fp64", 4, code=0)
    assert deviation(job.losses, finished("--epochs 3 --precision fp64", 2).losses) < 1e-12


# ---- parameters that have no gradient in some steps, and buffers ---------------------------------------------------


@pytest.mark.parametrize("flags", ["--reduction ddp", "--reduction flat", "--reduction canonical --shards 4"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parameters_without_a_gradient_are_left_alone_whatever_sums_the_others(finished, flags, world_size):
    """small.Experts: unused experts differ between ranks and shards. One that no rank uses is not stepped at all."""
    decay = "--weight-decay 0.01"
    job, alone = finished(f"{flags} {decay}", world_size, "small:Experts"), finished(decay, 1, "small:Experts")
    assert deviation(job.losses, alone.losses) < 1e-12
    for ours, theirs in zip(job.records("step"), alone.records("step"), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-10), f"step {ours['step']}"
    (ours, _), (theirs, _) = (snapshot.read(one.snapshot) for one in (job, alone))
    assert ours.keys() == theirs.keys(), "another parameter was stepped"
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("flags", ["--reduction ddp --accumulate 2", "--reduction flat --accumulate 2"])
def test_micro_batches_may_have_gradients_of_different_parameters(finished, flags):
    job, alone = finished(flags, 2, "small:Experts"), finished("", 1, "small:Experts")
    assert deviation(job.losses, alone.losses) < 1e-12


@pytest.mark.parametrize("workload", ["BatchNorm", "Dropout", "SeveralLosses", "Tied", "Frozen", "Turned"])
def test_ddp_and_flat_agree_on_any_model(finished, workload):
    ddp, flat = (finished(f"--reduction {kind}", 2, f"small:{workload}") for kind in ("ddp", "flat"))
    assert deviation(ddp.losses, flat.losses) < 1e-12
    for ours, theirs in zip(ddp.records("epoch"), flat.records("epoch"), strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-10)


def test_ddp_is_the_default(finished):
    assert finished("--epochs 3", 2).records("start")[0]["reduction"] == "ddp"
    assert finished("", 2, "small:Small").losses == finished("--reduction ddp", 2, "small:Small").losses


# ---- a reduction of a program's own -------------------------------------------------------------------------------


class OneByOne(Reduction):
    """As another library may sum gradients: one at a time, after backward."""

    name = "one by one"

    def sum_gradients(self) -> None:
        super().sum_gradients()
        for gradient in self.gradients:
            torch.distributed.all_reduce(gradient, group=self.peers.data)


@pytest.mark.parametrize("workload", ["small:Small", "small:BatchNorm"])
def test_a_program_may_bring_its_own_and_trains_the_same(finished, tmp_path, workload):
    job = train(tmp_path / "run", "", 2, workload=workload, reduction="test_reduction:OneByOne", code=0)
    assert job.records("start")[0]["reduction"] == "one by one"
    assert deviation(job.losses, finished("", 2, workload).losses) < 1e-12


@pytest.mark.parametrize("flag", ["--reduction flat", "--sharding full"])
def test_then_a_flag_that_names_another_is_refused(tmp_path, flag):
    job = train(tmp_path / "run", flag, 2, reduction="test_reduction:OneByOne", code=2)
    assert f"{flag}: " in job.error and "OneByOne" in job.error


def test_a_sum_is_timed_in_little_memory(monkeypatch):
    """A part of the numbers is timed, and the result is scaled to all."""
    sizes, clock = [], iter(range(0, 100, 3))
    monkeypatch.setattr(reduction, "MOST_TIMED", 8)
    monkeypatch.setattr(reduction.dist, "all_reduce", lambda numbers, group: sizes.append(len(numbers)))
    monkeypatch.setattr(reduction, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    peers = SimpleNamespace(wait=lambda: None, data=None)
    mine = SimpleNamespace(parameters=[torch.zeros(15)], device=torch.device("cpu"), peers=peers)
    assert Reduction.seconds_of_a_sum(mine) == 3 * 16 / 8 and sizes == [8, 8]


def test_a_sharded_sum_is_timed_by_a_rank_s_share(monkeypatch):
    """The time of one share is multiplied by the number of shares and by 1.5."""
    sharded = object.__new__(Sharded)
    sharded.ranks_per_replica = 4
    monkeypatch.setattr(Reduction, "seconds_of_a_sum", lambda sharded, share: {0.125: 2.0}[share])
    assert sharded.seconds_of_a_sum(0.5) == 1.5 * 4 * 2.0

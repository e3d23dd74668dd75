"""The process rung: every site's own train.py in real MPI ranks, on CPU and gloo, started as each of its launchers does.

    EXPECT_WORLD=2 mpiexec -n 2 python -m pytest --with-mpi conformance/test_process.py [--site NAME_OR_FOLDER]

torch is imported once a rank: train.py is run by its path inside the rank, with the environment that its launcher would
export and nothing of MPI's. Every rank judges the same gathered evidence (world.py). The clauses are those of SPEC.md.
"""

import hashlib
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from conformance import reference
from conformance.golden import make as golden
from conformance.reference import LAYERS

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120, method="thread")]
clause = pytest.mark.clause

FP64 = "--workload digits --precision fp64 --epochs 3"
FP32 = "--workload digits --precision fp32 --epochs 3"
T0, T1, T2 = 0, 1e-10, 1e-5  # relative, at every step: the same run again, fp64, fp32
G = 96  # the reference run's global batch


@pytest.fixture(scope="session")
def folder(world, launch, tmp_path_factory) -> Path:
    """Rank 0's, for all runs of one launcher."""
    return world.on_rank_0(lambda: tmp_path_factory.mktemp(f"{launch.site}-{launch.launcher}"))


@pytest.fixture(scope="session")
def run(world, launch, folder):
    """The reference run, which most checks look at: fp64, three epochs."""
    return world.train(launch, folder / "reference", FP64)


@pytest.fixture(scope="session")
def snapshots() -> dict:
    """sha256 of the reference run's snapshot, by launcher."""
    return {}


def done(check, clause_id, *runs) -> None:
    """All ranks of these runs have ended with 0."""
    __tracebackhide__ = True
    for run in runs:
        ended(check, clause_id, run, 0)


def ended(check, clause_id, run, code) -> None:
    __tracebackhide__ = True
    if run.exit_codes != [code] * len(run.exit_codes):
        said = " | ".join(text.strip()[-400:] for text in run.errors if text) or "nothing"
        check.holds(clause_id, f"exit codes={run.exit_codes}, but should be all {code}; standard error: {said}")


def losses(run) -> list[float]:
    return [float.fromhex(text) for text in run.values("step", "loss_hex")]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else f"no {path.name}"


# ---- ranks --------------------------------------------------------------------------------------------------------


@clause("R1", "R2", "X1")
def test_every_rank_is_there_once(check, world, run):
    done(check, "X1", run)
    (start,) = run.of("start")
    rows = start["ranks"]
    check.equal("R1", rank=([row["rank"] for row in rows], [*range(world.size)]), world_size=(start["world_size"], world.size))
    on_cpu = [["cpu", None, "gloo"]] * world.size
    check.equal("R2", device=([[row["device"], row["device_index"], row["backend"]] for row in rows], on_cpu))


@clause("R3", "R4")
def test_place_on_its_node(check, world, launch, folder):
    """On one node, and on two half as large: what is right on one node only shows there."""
    for num_nodes in (1, 2) if world.size % 2 == 0 else (1,):
        run = world.train(launch, folder / f"{num_nodes}-nodes", "--epochs 1 --steps-per-epoch 1", num_nodes)
        done(check, "R3", run)
        per_node, ranks = world.size // num_nodes, range(world.size)
        (rows,) = run.values("start", "ranks")
        check.equal("R3", local_rank=([row["local_rank"] for row in rows], [rank % per_node for rank in ranks]))
        check.equal("R4", node_rank=([row["node_rank"] for row in rows], [rank // per_node for rank in ranks]))


@clause("R5")
def test_without_a_launcher_a_world_of_one(check, world, launch, folder):
    run = world.train(launch, folder / "single", "--epochs 1 --steps-per-epoch 1", alone=True)
    done(check, "R5", run)
    check.equal("R5", world_size=(run.values("start", "world_size"), [1]))


# ---- order of samples ---------------------------------------------------------------------------------------------


@clause("D1", "D2", "D3")
@pytest.mark.parametrize("seed, epoch", [(0, 0), (0, 1), (7, 2)])
def test_order_of_samples(check, world, seed, epoch):
    from ddp_core.data import rows_of_rank, sample_order

    count = 1438
    should_be = reference.sample_order(seed, epoch, count)
    mine = sample_order(seed, epoch, count)
    shares = world.gather(rows_of_rank(mine, G, world.rank, world.size).tolist())
    orders = world.gather(mine.tolist())
    check.equal("D1", order=(orders, [should_be.tolist()] * world.size))
    check.equal("D2", rows_of_each_rank=(shares, reference.batches(should_be, G, world.size).tolist()))
    together = [sorted(row for share in shares for row in share[step]) for step in range(count // G)]
    global_batches = [sorted(should_be[step * G :][:G].tolist()) for step in range(count // G)]
    check.equal("D2", global_batches=(together, global_batches))
    check.equal("D3", same_order_as_the_next_epoch=(orders[0] == sample_order(seed, epoch + 1, count).tolist(), False))


# ---- losses -------------------------------------------------------------------------------------------------------


@clause("L1")
def test_every_step_is_recorded(check, run):
    done(check, "L1", run)
    check.equal("L1", steps=(run.values("step", "step"), [*range(42)]), epochs=(run.values("epoch", "epoch"), [0, 1, 2]))
    check.equal("L1", losses_and_their_hex_forms=(run.values("step", "loss"), losses(run)))


@clause("L2")
def test_losses_are_the_golden_ones_in_fp64(check, run):
    done(check, "L2", run)
    check.close("L2", losses(run), golden.load()["losses"], T1)


@clause("L3")
def test_losses_are_the_golden_ones_in_fp32(check, world, launch, folder):
    run = world.train(launch, folder / "fp32", FP32)
    done(check, "L3", run)
    check.close("L3", losses(run), golden.load()["losses"], T2)


@clause("L4")
def test_evaluation_counts_every_row_once(check, run):
    done(check, "L4", run)
    check.close("L4", run.values("epoch", "eval_loss"), golden.load()["eval_losses"], T1, "held-out losses")
    check.equal("L4", accuracies=(run.values("epoch", "eval_accuracy"), golden.load()["eval_accuracies"]))


@clause("L5", "S3")
def test_again_is_bitwise_the_same(check, world, launch, folder, run):
    again = world.train(launch, folder / "again", FP64)
    done(check, "L5", run, again)
    check.equal("L5", losses=(again.values("step", "loss_hex"), run.values("step", "loss_hex")))
    check.close("L5", losses(again), losses(run), T0)
    here, there = world.on_rank_0(lambda: [sha256(one.folder / "snapshot.safetensors") for one in (again, run)])
    check.equal("S3", snapshot_sha256=(here, there))


@clause("L6")
def test_it_learns(check, run):
    done(check, "L6", run)
    means = np.reshape(losses(run), (3, -1)).mean(1)
    check.equal("L6", losses_fall=(bool(means[2] < means[0] / 2), True))
    check.equal("L6", gradients_are_not_zero=(min(run.values("step", "grad_norm")) > 1e-6, True))


@clause("L7")
def test_another_seed_gives_another_curve(check, world, launch, folder, run):
    other = world.train(launch, folder / "seed", "--precision fp64 --epochs 1 --seed 1")
    done(check, "L7", run, other)
    check.equal("L7", differs=(reference.worst_deviation(losses(other), losses(run)[:14]) > 1e-3, True))


# ---- snapshot -----------------------------------------------------------------------------------------------------


def take_apart(path: Path) -> dict:
    """A safetensors file read by its format: a length, a JSON header, bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__")
    tensors = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    sums = {name: zlib.crc32(raw[start:][slice(*entry["data_offsets"])]) for name, entry in header.items()}
    return dict(keys=[*metadata], document=json.loads(metadata["ddp_core"]), tensors=tensors, crc32=sums)


@clause("S1", "S2", "S5", "S6")
def test_what_a_snapshot_holds(check, world, run):
    done(check, "S1", run)
    names = ("snapshot.safetensors", "snapshot.prev.safetensors", "best.safetensors", "run.jsonl")
    there = world.on_rank_0(lambda: sorted(path.name for path in run.folder.iterdir()))
    check.equal("S6", files=(there, sorted(names)))
    snapshot = world.on_rank_0(lambda: take_apart(run.folder / names[0]))
    shapes = {f"{kind}.{name}": ("F64", [*shape]) for kind in ("model", "optim.momentum") for name, shape in LAYERS.items()}
    check.equal("S1", tensors=(snapshot["tensors"], shapes))
    document = snapshot["document"]
    known = {"format", "problem", "data", "step", "steps_per_epoch", "epochs_run", "epoch_loss_sum"}
    known |= {"history", "best", "crc32", "document_crc32", "world_size", "versions"}
    check.equal("S2", metadata_keys=(snapshot["keys"], ["ddp_core"]), document_keys=({*document}, known))
    facts = dict(format=1, step=42, epochs_run=3, steps_per_epoch=14, world_size=world.size)
    check.equal("S2", **{name: (document[name], should_be) for name, should_be in facts.items()})
    text = json.dumps(
        {name: document[name] for name in {*document} - {"document_crc32"}}, sort_keys=True, separators=(",", ":")
    )
    sums = dict(crc32=snapshot["crc32"], document_crc32=zlib.crc32(text.encode()))
    check.equal("S5", **{name: (document[name], should_be) for name, should_be in sums.items()})


@clause("S4")
def test_every_launcher_writes_the_same_bytes(check, world, launch, run, snapshots):
    done(check, "S4", run)
    snapshots[launch] = world.on_rank_0(lambda: sha256(run.folder / "snapshot.safetensors"))
    first = next(iter(snapshots))
    check.equal("S4", **{f"sha256_as_of_{first}": (snapshots[launch], snapshots[first])})


# ---- continue -----------------------------------------------------------------------------------------------------


@clause("C1", "X2")
def test_stopped_and_resumed_is_bitwise_as_never_stopped(check, world, launch, folder):
    flags = "--epochs 2 --global-batch-size 8"  # 179 steps an epoch: time for a signal
    never = world.train(launch, folder / "never-stopped", flags)
    stopped = world.train(launch, folder / "stopped", flags, signal_rank=world.size - 1)
    step = world.on_rank_0(lambda: take_apart(folder / "stopped" / "snapshot.safetensors")["document"]["step"])
    resumed = world.train(launch, folder / "stopped", flags)
    done(check, "C1", never, resumed)
    ended(check, "X2", stopped, 75)
    check.equal("C1", stopped_in_mid_epoch=(step % 179 != 0, True))
    check.equal("C1", losses=(resumed.values("step", "loss_hex"), never.values("step", "loss_hex")))
    check.close("C1", losses(resumed), losses(never), T0)
    here, there = world.on_rank_0(lambda: [sha256(one.folder / "snapshot.safetensors") for one in (resumed, never)])
    check.equal("C1", snapshot_sha256=(here, there))


@clause("C2")
@pytest.mark.parametrize("written_by", ["one rank", "all ranks"])
def test_continued_at_another_world_size(check, world, launch, folder, written_by):
    there, one_writes = folder / written_by.replace(" ", "-"), written_by == "one rank"
    first = world.train(launch, there, FP64.replace("3", "1"), alone=one_writes)
    rest = world.train(launch, there, FP64, alone=not one_writes)
    done(check, "C2", first, rest)
    check.equal("C2", started_at_steps=(rest.values("start", "step"), [0, 14]))
    check.close("C2", losses(rest), golden.load()["losses"], T1)
    check.close("C2", rest.values("epoch", "eval_loss"), golden.load()["eval_losses"], T1)


@clause("C3")
def test_another_problem_is_refused(check, world, launch, folder, run):
    there = folder / "refused"
    world.on_rank_0(lambda: bool(shutil.copytree(run.folder, there)))
    before = world.on_rank_0(lambda: sha256(there / "snapshot.safetensors"))
    refused = world.train(launch, there, FP64 + " --seed 1")
    ended(check, "C3", refused, 5)
    check.equal("C3", snapshot=(world.on_rank_0(lambda: sha256(there / "snapshot.safetensors")), before))


# ---- errors -------------------------------------------------------------------------------------------------------


@clause("X3")
def test_a_mistyped_flag_is_one_line(check, world, launch, folder):
    run = world.train(launch, folder / "mistyped", "--global-batch-size 97 --epochs -1")
    ended(check, "X3", run, 2)
    lines = [line for text in run.errors + run.output for line in text.splitlines()]
    check.equal("X3", lines=(len(lines), 1), names_the_flag=("--epochs" in "".join(lines), True))

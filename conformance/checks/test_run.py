"""What every site's runs must show, by its own train.py in real ranks, started as each of its launchers does.

    EXPECT_WORLD=2 mpiexec -n 2 python -m pytest --with-mpi conformance/checks/test_run.py [--site NAME_OR_FOLDER]

The process rung on CPU and gloo, the device rung with `--device cuda`. torch is imported once a rank: train.py is run by
its path inside the rank, with the environment that its launcher would export and nothing of MPI's. Every rank judges the
same gathered evidence (world.py). The clauses are those of SPEC.md.
"""

import functools
import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.broken.workloads import WORKLOADS
from conformance.golden import make as golden
from conformance.harness import anchors, core_of, reference, sites
from conformance.harness.check import T0, T1, T2
from conformance.harness.ports import free_port
from conformance.harness.reference import LAYERS, sha256, take_apart
from conformance.harness.stranger import stranger
from conformance.harness.target import Run

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120, method="thread")]
clause, only, machine = pytest.mark.clause, pytest.mark.only, pytest.mark.machine

FP64 = golden.RUN
SHARDED = f"{golden.RUN} --sharding full"
FP32 = "--workload digits --precision fp32 --epochs 3"
FLAT = f"{FP64} --reduction flat"
OFF = "--stage-data off"
SETS = "--max-shard-size 50KB"
NOISY = "--workload {noisy} --precision fp64 --epochs 2"  # in its folder: Runs.filled
SEED = "--precision fp64 --epochs 1 --seed 1"
MISTYPED = "--global-batch-size 97 --epochs -1"
DRAWS = "--workload {noisy} --dropout 0.2 --jitter 0.1"
# All that a run must remember: where its loader is, what was drawn, buffers, an optimizer's own step, and a schedule's.
ALL = f"{DRAWS} --batch-norm --workers 1 --optimizer adamw --clip-norm 1 --accumulate 2 --warmup-steps 9 --lr-schedule cosine"
SHORT = "--workload digits --epochs 1 --steps-per-epoch 1"
REDUCTIONS = ("ddp", "flat", "canonical")
G = 96  # the reference run's global batch
TWO = pytest.param(2, marks=only(sizes=(2, 4), mpi=False, devices=("cpu",)))  # nodes, made of the ranks of one
SNAPSHOT, LOG = "snapshot.safetensors", "run.jsonl"
NOISY_FILE = sites.ROOT / "conformance/harness/noisy.py"
# Of broken/workloads.py, and what is to be said of them.
MISTAKES = dict(syntax="syntax.py, line 8: ", no_class="one class that derives from ddp_core.Workload")
MISTAKES |= dict(raises="line 10 (loss): AttributeError", mean="loss() returns a mean over rows")
MISTAKES |= dict(unused="no gradient for 3.weight", mean_metric="metrics() has a mean over rows as 'error'")
MISTAKES |= dict(misspelled="has metric, which the core does not ask for", no_held_out="gave no held-out row")
MISTAKES |= dict(two_words="metrics() names 'top 5'", aside="temperature has a gradient, and is no part of the model")
MISTAKES |= dict(seldom="metrics() has a mean over rows as 'right'", calls_backward="loss() calls backward()")
MISTAKES |= dict(climbs="schedule() returned -0.25 at step 5", hooked="hooked, at step 0 (--debug: where): RuntimeError")
MISTAKES |= dict.fromkeys(("thaws", "freezes"), "requires_grad of 0.weight has changed by step")
MISTAKES |= dict(leaves="at step 3, line 11 (loss): SystemExit")
MISTAKES |= dict(sounds_lost="at step 3, line 11 (loss): RuntimeError: the peer timed out")
# And what no loop can train, or no snapshot can hold: in ranks as in a world of one.
REFUSED = dict(needs_a_closure="should return an optimizer of torch.optim that needs no closure")
REFUSED |= dict(schedules_by_torch="optimizer() made one of torch's lr_scheduler", lazy="3.weight, 3.bias has no shape yet")
REFUSED |= dict(keeps_an_extra_state="Net has get_extra_state()", expanded="ones is an expanded view")


class Runs:
    """The runs of a session, each under its own name; train() runs what many checks look at only once, or once again."""

    def __init__(self, world, root: Path):
        self.world, self.root, self.done, self.folders = world, root, {}, {}
        self.began: dict[tuple, float] = {}  # by this process's clock
        self.seconds: dict[tuple, float] = {}  # until it was seen to have ended

    def folder(self, launch, name: str) -> Path:
        return self.root / f"{launch.site}-{launch.launcher}" / name

    def filled(self, flags: str) -> str:
        """The flags with the path of noisy.py, a copy where all nodes see it."""
        path = self.root / "noisy.py"
        if "{noisy}" in flags:
            self.world.on_rank_0(lambda: bool(shutil.copy(NOISY_FILE, path)))
        return flags.format(noisy=path)

    def once(self, launch, flags: str, again: bool = False) -> Path:
        return self.folders.setdefault((launch, flags, again), self.folder(launch, f"once-{len(self.folders)}"))

    def train(self, launch, flags: str, again: bool = False):
        if (launch, flags, again) not in self.done:
            began = self.began.setdefault((launch, flags, again), time.monotonic())
            self.done[launch, flags, again] = self.world.train(launch, self.once(launch, flags, again), self.filled(flags))
            self.seconds[launch, flags, again] = time.monotonic() - began
        return self.done[launch, flags, again]


@pytest.fixture(scope="session")
def runs(world, root, pytestconfig) -> Runs:
    runs = Runs(world, root)
    for flags, again in world.plan:  # jobs, which wait in one queue: all at once
        launch = pytestconfig.sites[0].launches[0]
        runs.began[launch, flags, again] = time.monotonic()
        world.ahead(runs.once(launch, flags, again), runs.filled(flags))
    return runs


@pytest.fixture(scope="session")
def own(site):
    """The launcher that a site names first: what does not depend on the launcher is checked under it."""
    return site.launches[0]


@pytest.fixture(scope="session")
def first():
    """What depends on no site is checked once, under the first launcher of this repository."""
    return next(launch for site in sites.find() for launch in site.launches if not launch.mpi)


@pytest.fixture(scope="session")
def own_file(world, runs) -> Callable[..., str]:
    """The flag that names one of broken/workloads.py, whose file is written, under another name where one is given."""

    def write(name: str, stem: str = "") -> str:
        file = runs.root / "workloads" / f"{stem or name}.py"
        world.on_rank_0(lambda: [file.parent.mkdir(exist_ok=True), file.write_text(WORKLOADS[name])])
        return f"--workload {file}"

    return write


@pytest.fixture(scope="session")
def train_own(world, runs, first, own_file) -> Callable[..., Run]:
    """A run of one of broken/workloads.py."""

    def train(name: str, flags: str = "", **options) -> Run:
        path = runs.folder(first, f"{name}-{world.starts}")
        return world.train(first, path, f"{own_file(name)} --epochs 1 {flags}", **options)

    return train


def long(world, workload: str = "--workload digits", epochs: int = 2) -> tuple[str, int]:
    """Flags, and steps an epoch: time for a signal at 0.2 ms a step, as in one rank, and not long at 20, as in four."""
    size = 8 if world.size < 4 else 32
    return f"{workload} --epochs {epochs} --lr 0.01 --global-batch-size {size}", 1438 // size


def expect_exit(check, run, code):
    """The run, all of whose ranks have ended with this code."""
    __tracebackhide__ = True
    if run.exit_codes != [code] * len(run.exit_codes):
        output = " | ".join(" ".join(text.split())[-400:] for text in run.errors if text) or "nothing"
        check.holds(f"exit codes={run.exit_codes}, but should be all {code}; standard error: {output}")
    return run


def stopped_and_saved(check, run) -> None:
    """At the step at which it has ended."""
    __tracebackhide__ = True
    expect_exit(check, run, 75)
    check.equal(saved=(run.values("snapshot", "step")[-1:], run.values("end", "step")))


def done(check, run, *others):
    """The run, or several of them, all of whose ranks have ended with 0."""
    __tracebackhide__ = True
    for one in (run, *others):
        expect_exit(check, one, 0)
    return (run, *others) if others else run


def one_line(check, run, code: int, words: str, lines: list[str] | None = None) -> None:
    """All ranks have ended with this code, and have said one line in all, on standard error, which has these words.

    lines: where other ones than those of standard error count.
    """
    __tracebackhide__ = True
    expect_exit(check, run, code)
    lines = run.error_lines if lines is None else lines
    check.equal(lines=(len(lines), 1), says=(words if words in "".join(lines) else lines, words))


def damaged_copy(source: Path, target: Path) -> None:
    """In its middle a bit is another one."""
    raw = bytearray(source.read_bytes())
    raw[len(raw) // 2] ^= 1
    target.write_bytes(raw)


def verified(*files: Path) -> int:
    return looked_at("verify", *files)


def looked_at(act: str, *files: Path) -> int:
    """The exit code of ddp_core's own look at these snapshots."""
    command = [sys.executable, "-m", "ddp_core.snapshot", act, *files]
    return subprocess.run(command, capture_output=True, check=False).returncode


def renumber(path: Path) -> None:
    """A snapshot: as of a newer format."""
    path.write_bytes(path.read_bytes().replace(b'\\"format\\":2', b'\\"format\\":3'))


# ---- ranks --------------------------------------------------------------------------------------------------------


@machine(FP64)
@clause("R1", "R2", "X1")
def test_every_rank_is_there_once(check, world, launch, runs):
    run = done(check["X1"], runs.train(launch, FP64))
    *_, start = run.of("start")
    rows = start["ranks"] if world.size <= 64 else [*map(json.loads, (run.folder / "ranks.jsonl").read_text().splitlines())]
    check["R1"].equal(rank=([row["rank"] for row in rows], [*range(world.size)]), world_size=(start["world_size"], world.size))
    per_node, devices = world.ranks_per_node, world.devices_visible_to_a_rank
    index = [rank % per_node % devices if devices else None for rank in range(world.size)]
    should_be = [[world.device if i is None else f"{world.device}:{i}", i, world.backend_in_use] for i in index]
    check["R2"].equal(device=([[row["device"], row["device_index"], row["backend"]] for row in rows], should_be))


@clause("R1")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("ranks", [64, 72])
def test_of_many_ranks_the_record_has_the_nodes(check, tmp_path, ranks):
    """The core's own Record, as rank 0 of so many has it."""
    from ddp_core.record import Record

    rows = [dict(rank=n, local_rank=n % 8, node_rank=n // 8, host=f"node{n // 8}", device="cpu") for n in range(ranks)]
    record = Record(time.monotonic())
    record.open(tmp_path / LOG)
    record.start(0, 0, dict(device="cpu"), rows, [])
    start, beside = json.loads((tmp_path / LOG).read_text()), tmp_path / "ranks.jsonl"
    nodes = [rows[first] | dict(ranks_on_node=8) for first in range(0, ranks, 8)]
    written = [json.loads(line) for line in beside.read_text().splitlines()] if beside.exists() else []
    check.equal(rows_in_start=(start["ranks"], rows if ranks <= 64 else nodes))
    check.equal(rows_beside=(written, rows if ranks > 64 else []))


@clause("R3", "R4")
@pytest.mark.parametrize("num_nodes", [1, TWO])
def test_place_on_its_node(check, world, launch, runs, num_nodes):
    """On one node, and on two half as large: what is right on one node only shows there."""
    run = done(check["R3"], world.train(launch, runs.folder(launch, f"{num_nodes}-nodes"), SHORT, num_nodes))
    counted_on_each_node(check, run, num_nodes, world.size // num_nodes)


def counted_on_each_node(check, run, num_nodes: int, per_node: int) -> list[dict]:
    __tracebackhide__ = True
    rows, ranks = run.values("start", "ranks")[-1], range(num_nodes * per_node)
    check["R3"].equal(local_rank=([row["local_rank"] for row in rows], [rank % per_node for rank in ranks]))
    check["R4"].equal(node_rank=([row["node_rank"] for row in rows], [rank // per_node for rank in ranks]))
    return rows


@machine(FP64, only=True)
@clause("R3", "R4")
def test_place_in_the_job(check, world, launch, runs):
    """On as many nodes as the job has; there the hosts' names show that they are as many."""
    run = done(check["R3"], runs.train(launch, FP64))
    rows = counted_on_each_node(check, run, world.nodes, world.ranks_per_node)
    hosts = [sorted({row["host"] for row in rows if row["node_rank"] == node}) for node in range(world.nodes)]
    check["R4"].equal(hosts=(len({*map(tuple, hosts)}), world.nodes), hosts_of_a_node=([*map(len, hosts)], [1] * world.nodes))


@clause("R5")
@only(sizes=(1,))
def test_without_a_launcher_a_world_of_one(check, world, own, runs):
    run = done(check, world.alone(own, runs.folder(own, "alone"), SHORT))
    check.equal(world_size=(run.values("start", "world_size"), [1]))


@clause("R6", "X4")
@only(sizes=(2, 4), mpi="world_size")
@pytest.mark.parametrize("value", ["", "many"])
def test_a_launcher_that_does_not_tell_the_world_size(check, world, launch, runs, value):
    variables = launch.variables_with("world_size")
    check["R6"].equal(variables_that_tell_the_world_size=(bool(variables), True))
    run = world.train(launch, runs.folder(launch, f"told-{value}"), SHORT, environ=dict.fromkeys(variables, value))
    check["R6"].equal(starts=(len(run.of("start")), 0))
    expect_exit(check["X4"], run, 3)
    unnamed = [rank for rank, text in enumerate(run.errors) if not any(name in text for name in variables)]
    check["X4"].equal(ranks_that_do_not_name_the_variable=(unnamed, []))


@clause("X4")
@only(sizes=(2,), devices=("cpu",))
def test_on_two_nodes_rank_0_is_not_met_at_localhost(check, world, runs, first):
    """Each node would wait for itself there."""
    names = first.variables_with("master_addr")
    here = dict.fromkeys(names, "localhost")
    run = expect_exit(check, world.train(first, runs.folder(first, "at-localhost"), SHORT, 2, environ=here), 3)
    words = [f"{name}='localhost'" for name in names]
    check.equal(ranks_that_name_it=([any(word in text for word in words) for text in run.errors], [True, True]))


@clause("R10")
@only(sizes=(2, 4), asks_mpi=True)
def test_a_rank_is_who_mpi_says(check, world, launch, runs):
    """MPI's ranks in the other order: the last process is rank 0 now, and it alone writes."""
    run = done(check, world.train(launch, runs.folder(launch, "reversed"), SHORT, reversed_mpi=True))
    writers = [rank for rank, files in enumerate(run.written) if files]
    check.equal(the_process_that_is_rank_0=(writers, [world.size - 1]))


@clause("R12")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("world_size", [8, 66, 1001, 4096])
def test_what_ranks_tell_each_other_costs_by_the_logarithm(check, world_size):
    """The core's own classes, with all ranks in this process."""
    import torch
    from ddp_core.control import tree_sum

    from conformance.harness.counted import Counted  # it needs torch, which a login node has not

    counted = Counted(world_size)
    levels = 1 if world_size <= 32 else 1 + math.ceil(math.log(world_size, 32))
    costs = [counted.of(rank) for rank in range(world_size)]
    check.equal(connections_beyond_31_a_level=([n for n in {cost.connections for cost in costs} if n > 31 * levels], []))
    numbers = np.random.default_rng(world_size).standard_normal((world_size, 2))
    sums = counted.reduce(torch.from_numpy(numbers), tree_sum)
    should_be = ordered_sum([*numbers]).tolist()
    check.equal(sums_in_that_order=(all(each.tolist() == should_be for each in sums), True))
    check.equal(messages_beyond_two_a_connection=([cost for cost in costs if cost.messages > 2 * cost.connections], []))


def ordered_sum(parts: list):
    while len(parts) % 2 == 0:
        parts = [first + second for first, second in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)]
    if len(parts) > 32:
        return ordered_sum([ordered_sum(parts[first : first + 32]) for first in range(0, len(parts), 32)])
    return sum(parts[1:], start=parts[0])


@clause("R12")
@only(sizes=(1,), devices=("cpu",))
def test_rows_of_all_ranks_go_to_rank_0_alone(check):
    from conformance.harness.counted import check_in_of

    (rows, read), (more_rows, read_then) = (check_in_of(world_size) for world_size in (8, 64))
    check.equal(rows_that_rank_0_has=([rows, more_rows], [8, 64]), bytes_that_each_rank_reads=(read_then, read))


def bytes_of(thing) -> int:
    """Of the tensors that it holds, and that are not its model's."""
    import torch
    from torch.utils._pytree import tree_leaves

    mine = [tensor for tensor in tree_leaves([*vars(thing).values()]) if isinstance(tensor, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in mine}
    of_model = {tensor.untyped_storage().data_ptr() for tensor in thing.model.parameters()}
    return sum(size for place, size in storages.items() if place not in of_model)


@clause("R12")
@only(sizes=(1,), devices=("cpu",))
def test_flat_sums_take_no_memory_that_grows_with_the_world(check):
    """The core's own class, in worlds of which no other rank is there."""
    import torch
    from ddp_core.reduction import Flat

    model = torch.nn.Linear(255, 16)
    held = {size: bytes_of(Flat(model, model, SimpleNamespace(world_size=size), False)) for size in (1, 8, 9, 1000, 75_264)}
    check.equal(more_than_ten_times_the_gradients=([size for size, count in held.items() if count > 10 * 2**14], []))


# ---- what a site knows of this suite ------------------------------------------------------------------------------


@clause("A5")
@only(sizes=(1, 2))
def test_the_core_that_trains_is_this_repository_s(check, world, launch, runs):
    with core_of.watched() as violations:
        run = world.train(launch, runs.folder(launch, "core"), SHORT)
    done(check, run)
    check.holds(*sorted({line for lines in world.gather(violations) for line in lines}))


@clause("A6")
@only(sizes=(1, 2), devices=("cpu",))
def test_with_a_user_s_flags_alone(check, world, launch, runs):
    """In a directory of its own. What is judged is in the snapshot, as after a run that nobody has watched."""
    seed, lr = world.on_rank_0(lambda: (random.SystemRandom().randrange(1, 10**6), random.SystemRandom().uniform(0.05, 0.1)))
    flags, folder = f"--seed {seed} --lr {lr:.4f} --epochs 2", runs.folder(launch, "mine")
    done(check, world.train(launch, folder, flags, bare=True))
    documents = world.on_rank_0(lambda: [take_apart(path)["document"] for path in folder.rglob(SNAPSHOT)])
    check.equal(snapshots=(len(documents), 1), world_size=(documents[0]["world_size"], world.size))
    check.holds(*reference.not_the_history(documents[0]["history"], T2["cpu"], seed=seed, lr=float(f"{lr:.4f}"), epochs=2))


# ---- the job script -----------------------------------------------------------------------------------------------


@machine(FP64, only=True)
@clause("J1")
def test_the_job_script_passes_its_arguments_on(check, launch, runs):
    run = runs.train(launch, FP64)
    expected = dict(workload="digits", precision="fp64", epochs=3, log_every=1, run_dir=str(run.folder))
    configs = [{name: config[name] for name in expected} for config in run.values("start", "config")]
    check.equal(config=(configs[-1:], [expected]))


@machine(MISTYPED, only=True)
@clause("J2", "X3")
def test_the_job_script_hands_on_the_exit_code(check, launch, runs):
    run = expect_exit(check["J2"], runs.train(launch, MISTYPED), 2)
    lines = [line for line in run.errors[0].splitlines() if "error" in line and "--epochs" in line]
    check["X3"].equal(lines_that_name_the_flag=(len(lines), 1))


@clause("R8")
@only(sizes=(2,), mpi=False)
@pytest.mark.parametrize("job_id, restart", [("7", 0), (None, 1)], ids=["another-job", "another-start"])
def test_a_rank_of_another_start_is_not_joined(check, world, own, runs, job_id, restart):
    """It has this job's address and port, as a neighbour's rank would that was given the same port."""
    odd_start = (job_id or str(1001 + world.starts), restart)
    folder, flags = runs.folder(own, f"met-{job_id}"), f"{SHORT} --rendezvous-timeout 2"
    run = expect_exit(check, world.train(own, folder, flags, odd_start=odd_start), 4)
    check.equal(starts=(len(run.of("start")), 0), says=("belongs to" in "".join(run.errors), True))


@clause("R8")
@only(sizes=(4,), devices=("cpu",))
def test_two_processes_that_are_one_rank_are_named(check, world, runs, first):
    """Of a launch line that gives two processes one number."""
    twin = {name: "2" for place in ("rank", "local_rank") for name in first.variables_with(place)}
    flags, environ = f"{SHORT} --rendezvous-timeout 3", twin if world.rank == world.size - 1 else {}
    run = expect_exit(check, world.train(first, runs.folder(first, "twins"), flags, environ=environ), 4)
    words = "rank 2 is there twice"
    check.equal(says=(words if words in "".join(run.errors) else run.errors, words))


@machine(FP64)
@clause("R9")
def test_the_end_says_how_fast_it_was(check, world, own, runs):
    run = done(check, runs.train(own, FP64))
    *_, end = run.of("end")
    speeds = [end.get(name, 0) for name in ("rows_a_second", "median", "p10")]
    parts = ("computing", "communication", "reading", "evaluation", "snapshots")
    seconds = {name: end["seconds"].get(name, -1) for name in parts}
    check.equal(all_speeds_are_told=(min(speeds) > 0, True), p10_is_the_slower=(speeds[2] <= speeds[1], True))
    rows = end["rows_a_second"] * end["seconds"]["training"]
    check.equal(rows_a_second_times_seconds_are_the_rows=(abs(rows / (42 * G) - 1) < 0.02, True))
    outside = runs.seconds[own, FP64, False]
    check.equal(training_took_longer_than_the_run=(end["seconds"]["training"] > outside, False))
    adds_up = abs(sum(seconds.values()) - end["seconds"]["training"]) < 0.1
    check.equal(all_parts_are_told=(min(seconds.values()) >= 0, True), the_parts_are_the_whole=(adds_up, True))
    check.equal(slowest_rank=(end.get("slowest_rank") in range(world.size), True))
    ratio = max(speeds[1] / speeds[0], speeds[0] / speeds[1])  # the first step is slow, and others are not all alike
    check.equal(median_is_of_another_order_than_the_mean=(ratio > 30, False))


@clause("R9")
@only(sizes=(1, 2))
def test_the_end_says_how_fast_this_start_was(check, world, runs, first):
    path, ends = runs.folder(first, "faster"), []
    for epochs in (2, 3):
        run = done(check, world.train(first, path, f"{FP64} --epochs {epochs}"))
        ends.append(run.of("end")[-1])
    rows = [end["rows_a_second"] * end["seconds"]["training"] for end in ends]
    check.close(rows, [28 * G, 14 * G], 0.02, "rows a second times seconds")


@clause("R9")
@only(sizes=(1,))
def test_the_seconds_of_a_part_are_those_of_all_times(check, train_own):
    """Three evaluations of four batches, each of which takes 0.05 s."""
    run = done(check, train_own("evaluates_slowly", "--steps-per-epoch 1 --epochs 3"))
    check.equal(seconds_of_evaluation=(min(run.values("end", "seconds")[-1]["evaluation"], 0.6), 0.6))


@clause("R9")
@only(sizes=(1, 2))
def test_an_epoch_s_progress_is_told(check, world, train_own):
    run = done(check, train_own("slow_steps", "--precision fp64 --log-seconds 0.5 --steps-per-epoch 14 --epochs 2"))
    progress_lines = [line.split() for line in run.output[0].splitlines() if re.match(r"epoch=\S+ step=\d+/14 ", line)]
    records = [dict(word.partition("=")[::2] for word in words) for words in progress_lines]
    places = [(int(record["epoch"][0]) - 1) * 14 + int(record["step"].partition("/")[0]) for record in records]
    losses = [f"{run.losses[place - 1]:.6g}" for place in places]
    check.equal(lines_within_epochs=(len(progress_lines) > 0, True), losses=([record["loss"] for record in records], losses))
    check.equal(of_other_ranks=(["step=" in text for text in run.output[1:]], [False] * (world.size - 1)))


@clause("R9")
@only(sizes=(2,))
def test_the_slowest_rank_is_named(check, train_own):
    run = done(check, train_own("lags", "--steps-per-epoch 4"))
    check.equal(slowest_rank=(run.values("end", "slowest_rank"), [1]))


@clause("R12")
@only(sizes=(2,), devices=("cpu",))
def test_ranks_whose_clocks_differ_speak_at_the_same_step(check, train_own):
    """When they next do follows from the slowest one's clock, for all."""
    done(check, train_own("fast_clock", "--steps-per-epoch 34 --timeout 5", apart=True))


@clause("R13")
@only(sizes=(2, 4))
@pytest.mark.parametrize("num_nodes", [1, TWO])
def test_a_file_of_data_is_read_once_a_node(check, world, runs, first, train_own, num_nodes):
    """Of raw numbers, of NumPy's and of safetensors': a part of the images is in each."""
    file = runs.root / "images"
    world.on_rank_0(lambda: write_images(file))
    kind = world.on_rank_0(lambda: subprocess.check_output(["stat", "-f", "-c", "%T", file], text=True).strip())
    flags = f"--precision fp64 --file {file}"
    once, each = done(check, *(train_own("reads_a_file", f"{flags} {more}", num_nodes=num_nodes) for more in ("", OFF)))
    places = [row["local_rank"] for row in once.of("start")[-1]["ranks"]]
    opened = [times_opened(run) for run in (once, each)]
    should_be = [1 if place == 0 or kind in ("tmpfs", "ramfs") else 0 for place in places]
    check.equal(times_that_each_rank_opened_it=(opened[0], should_be), and_without_staging=(opened[1], [1] * world.size))
    check.equal(ranks_that_can_write_to_it=([rank for rank, text in enumerate(once.output) if "written to" in text], []))
    check.close(once.losses, each.losses, T0)
    check.close(once.losses, runs.train(first, FP64).losses[: len(once.losses)], T0, "losses, to the reference run's")


@clause("R9")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("flags", [[], ["--sharding", "full"]], ids=["whole", "sharded"])
def test_memory_of_a_step_is_there_for_the_next_one(check, monkeypatch, flags):
    """A stand-in for the C library is told what glibc shall keep: blocks of 16 MB, and all that was given back."""
    import ctypes

    from ddp_core import Rank, config, device

    told = {}
    library = SimpleNamespace(mallopt=lambda name, value: bool(told.update({name: value})) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    device.prepare_device(config.parse(["--device", "cpu", *flags], 2, workload=config.choose([])), Rank.single())
    threshold, top = (told.get(name, -1) for name in (-3, -1))  # M_MMAP_THRESHOLD, which may be 32 MB, and M_TRIM_THRESHOLD
    kept = 2**24 <= threshold <= 2**25 and 2**30 <= top < 2**31
    given_back = 0 <= threshold <= 2**17 and 0 <= top <= 2**17
    check.equal(kept_and_given_back=((kept, given_back), (not flags, bool(flags))))


@clause("R13")
@only(sizes=(2,), devices=("cpu",))
def test_a_file_without_room_in_memory_is_read_where_it_is(check, world, runs, first, train_own):
    """Of which the job's cgroup has left 20 kB."""
    file, cgroup = runs.root / "roomless", runs.root / "cgroup"

    def write() -> None:
        write_images(file)
        cgroup.mkdir()
        most, stat = 2**40, "anon 0"
        files = {"member": "0::/", "memory.max": most, "memory.current": most - 20_000, "memory.stat": stat}
        for name, text in files.items():
            (cgroup / name).write_text(f"{text}\n")

    world.on_rank_0(write)
    run = done(check, train_own("reads_a_file", f"--steps-per-epoch 2 --file {file} --cgroup {cgroup}"))
    check.equal(times_that_each_rank_opened_it=(times_opened(run), [1, 1]))
    noted = [note for note in run.of("start")[-1]["notes"] if "half of the memory" in note]
    check.equal(notes=(len(noted), 1))


@clause("R13")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("rank", [0, 1])
def test_another_user_s_process_has_no_part_in_it(check, world, runs, first, train_own, rank):
    """Everybody on a node can ask the first rank for its copy, and can answer in its place."""
    file, cgroup = runs.root / f"not-for-all-{rank}", runs.root / f"no-limit-{rank}"
    world.on_rank_0(lambda: [write_images(file), cgroup.mkdir(), (cgroup / "member").write_text("0::/\n")])
    environ = dict(ANOTHER_USER="1") if world.rank == rank else {}
    flags = f"--steps-per-epoch 2 --file {file} --cgroup {cgroup}"
    run = done(check, train_own("reads_a_file", flags, environ=environ, apart=True))
    check.equal(times_that_each_rank_opened_it=(times_opened(run), [1, 1]))
    noted = [note for note in run.of("start")[-1]["notes"] if "not once: " in note]
    check.equal(notes=(len(noted), 1))


def write_images(file: Path) -> None:
    """A part of them as raw numbers, in NumPy's format, and in safetensors'."""
    from safetensors.numpy import save_file

    images = reference.load()[0]
    file.write_bytes(images[:500].tobytes())
    pixels = (images * 4 * 4095).astype("<u2")  # up to 65,520
    np.save(f"{file}.npy", pixels[500:900])
    save_file(dict(pixels=pixels[900:]), f"{file}.safetensors")


def times_opened(run) -> list[int]:
    """By rank."""
    return [int(text.partition("opened ")[2].split()[0]) for text in run.output]


# ---- order of samples ---------------------------------------------------------------------------------------------


@clause("D1", "D2", "D3")
@pytest.mark.parametrize("seed, epoch", [(0, 0), (0, 1), (7, 2)])
def test_order_of_samples(check, world, seed, epoch):
    from ddp_core.order import rows_of_rank, sample_order

    count = 1438
    should_be = reference.sample_order(seed, epoch, count)
    mine = sample_order(seed, epoch, count)
    shares = world.gather(rows_of_rank(mine, G, world.rank, world.size).tolist())
    orders = world.gather(mine.tolist())
    check["D3"].equal(same_order_as_the_next_epoch=(orders[0] == sample_order(seed, epoch + 1, count).tolist(), False))
    check["D1"].equal(order=(orders, [should_be.tolist()] * world.size))
    check["D2"].equal(rows_of_each_rank=(shares, reference.batches(should_be, G, world.size).tolist()))
    together = [sorted(row for share in shares for row in share[step]) for step in range(count // G)]
    global_batches = [sorted(should_be[step * G :][:G].tolist()) for step in range(count // G)]
    check["D2"].equal(global_batches=(together, global_batches))


@clause("D4")
@pytest.mark.parametrize("count, first_step", [(1000, 0), (10**9 + 7, 10**7)], ids=["all", "some"])
def test_order_of_more_rows_than_can_be_sorted(check, world, count, first_step, monkeypatch):
    """All places of a small one, which the core would sort, and three steps in the middle of one of 10^9 rows."""
    import torch
    from ddp_core import order
    from ddp_core.order import SORTED_ORDER, Order, keyed_order

    places = np.arange(count) if count == 1000 else np.arange(first_step * G, (first_step + 3) * G)
    should_be = reference.keyed_order(7, 2, count, places)
    mine = keyed_order(7, 2, count, torch.from_numpy(places)).tolist()
    check.equal(order=(mine, should_be.tolist()), rows=(len({*mine}), len(places)), sorted_up_to=(SORTED_ORDER, 2**24))
    if count <= SORTED_ORDER:
        monkeypatch.setattr(order, "SORTED_ORDER", 0)
    last = min(first_step + 3, count // G)
    for first, end in ((first_step, last), (count // G - 3, count // G)):
        should_be = reference.keyed_order(7, 2, count, np.arange(first * G, end * G))
        steps = Order(count, 7, G, world.rank, world.size).epoch(2, first, end, torch.device("cpu"))
        shares = world.gather([rows.tolist() for rows in steps])
        check.equal(rows_of_each_rank=(shares, reference.batches(should_be, G, world.size).tolist()))


@clause("D4")
@only(sizes=(1,), devices=("cpu",))
def test_rows_in_a_file_are_converted_batch_by_batch(check, world, runs, first, own_file):
    """Where they are more than 256 MB, and of another precision than the run's."""
    file = runs.root / "rows"
    with open(file, "wb") as rows:
        rows.truncate(300 * 2**20)
    path = runs.folder(first, "maps-rows")
    flags = f"{own_file('maps_rows')} --file {file} --epochs 1 --steps-per-epoch 2 --global-batch-size 8"
    run = world.alone(first, path, flags)
    file.unlink()
    done(check, run)
    megabytes = int((re.findall(r"megabytes (\d+)", run.output[0]) or [-1])[0])
    check.equal(copied=(not 0 <= megabytes < 200, False))


# ---- losses -------------------------------------------------------------------------------------------------------


@machine(FP64)
@clause("L1")
def test_every_step_is_recorded(check, own, runs):
    run = done(check, runs.train(own, FP64))
    check.equal(steps=(run.values("step", "step"), [*range(42)]), epochs=(run.values("epoch", "epoch"), [0, 1, 2]))
    check.equal(losses_and_their_hex_forms=(run.values("step", "loss"), run.losses))
    check.equal(steps_of_epochs=(run.values("epoch", "step"), [14, 28, 42]), last_step=(run.values("end", "step"), [42]))
    check.equal(exit_codes=(run.values("end", "exit_code"), [0]))
    start = run.of("start")[-1]
    choices = dict(workload="digits", precision="fp64", epochs=3, global_batch_size=G, lr=0.1, seed=0)
    check.equal(config=({name: start["config"][name] for name in choices}, choices))
    check.equal(rows=([start[f"{part}_rows"] for part in ("training", "held_out")], [1438, 359]))


@clause("L1")
@only(sizes=(1,), devices=("cpu",))
def test_under_log_every_each_step_of_so_many_is_recorded(check, world, runs, first):
    """The third, the sixth and the ninth, as they are counted: whoever has trained three steps sees one."""
    flags = f"{SHORT} --steps-per-epoch 10 --log-every 3"
    run = done(check, world.train(first, runs.folder(first, "every-third"), flags))
    check.equal(steps=(run.values("step", "step"), [2, 5, 8]))


@machine(FP64)
@clause("L2")
def test_losses_are_the_golden_ones_in_fp64(check, world, launch, runs):
    run = done(check, runs.train(launch, FP64))
    check.equal(reduction=(run.values("start", "reduction"), ["ddp" if world.size > 1 else "none"]))
    check.curve("fp64", run.losses)
    check.close(run.losses, golden.load()["losses"], T1)


@machine(FP32)
@clause("L3")
def test_losses_are_the_golden_ones_in_fp32(check, world, own, runs):
    run = done(check, runs.train(own, FP32))
    check.curve("fp32", run.losses)
    check.close(run.losses, golden.load()["losses"], T2[world.device])
    in_fp64 = reference.worst_deviation(run.losses, golden.load()["losses"]) < T1
    check.equal(same_losses_as_in_fp64=(in_fp64, False))


@machine(FP64)
@clause("L4")
def test_evaluation_counts_every_row_once(check, own, runs):
    run = done(check, runs.train(own, FP64))
    check.close(run.values("epoch", "eval_loss"), golden.load()["eval_losses"], T1, "held-out losses")
    check.equal(accuracies=(run.values("epoch", "eval_accuracy"), golden.load()["eval_accuracies"]))


@clause("L5", "S3")
@pytest.mark.parametrize(
    "flags", [pytest.param(flags, marks=machine(flags, twice=True), id=flags.split()[3]) for flags in (FP64, FP32)]
)
def test_again_is_bitwise_the_same(check, world, own, runs, flags):
    run, again = done(check["L5"], runs.train(own, flags), runs.train(own, flags, again=True))
    check["L5"].equal(losses=(again.values("step", "loss_hex"), run.values("step", "loss_hex")))
    check["L5"].close(again.losses, run.losses, T0)
    check["S3"].equal(snapshot_sha256=world.on_rank_0(lambda: (sha256(again.folder / SNAPSHOT), sha256(run.folder / SNAPSHOT))))


@clause("L4")
@only(sizes=(4,))
def test_held_out_rows_may_be_fewer_than_ranks(check, world, runs, first, own_file, train_own):
    run = done(check, train_own("one_held_out", "--precision fp64"))
    flags = f"{own_file('one_held_out')} --precision fp64 --epochs 1"
    single = done(check, world.alone(first, runs.folder(first, "one-held-out"), flags))
    for name in ("eval_loss", "eval_accuracy"):
        check.close(run.values("epoch", name), single.values("epoch", name), T1, name)


@clause("L4")
@only(sizes=(4,), devices=("cpu",))
def test_held_out_rows_of_parts_may_be_fewer_than_ranks(check, train_own):
    """A forward pass is collective: who has no row goes through one with the others."""
    whole, parts = done(check, *(train_own("one_held_out", f"--precision fp64 {flags}") for flags in ("", "--sharding full")))
    check.close(parts.values("epoch", "eval_loss"), whole.values("epoch", "eval_loss"), T1, "eval_loss")


@clause("L4")
@only(sizes=(1, 2))
def test_evaluation_changes_nothing_of_the_training(check, runs, first):
    """Of a model that draws, and counts in its buffers, while it is trained, and only then."""
    flags = f"{DRAWS} --batch-norm --steps-per-epoch 6 --epochs 3"
    often, once = done(check, runs.train(first, flags), runs.train(first, f"{flags} --eval-every 3"))
    losses = [(run.of("epoch")[-1].get("eval_loss", 0), run.values("step", "loss_hex")) for run in (often, once)]
    check.equal(held_out_loss_in_the_end_and_losses=tuple(losses))


@clause("L5")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["drawn", "draws_its_rows"])
def test_model_and_rows_are_drawn_under_the_seed(check, train_own, name):
    """By torch's generators, as most models are; the ranks of a test have drawn from them before."""
    drawn = done(check, *[train_own(name, f"--steps-per-epoch 2 --seed {seed}") for seed in (3, 3, 4)])
    losses = [run.values("step", "loss_hex") for run in drawn]
    check.equal(losses=(losses[1], losses[0]), same_losses_under_another_seed=(losses[2] == losses[0], False))


@machine(FP64)
@clause("L6")
def test_it_learns(check, own, runs):
    run = done(check, runs.train(own, FP64))
    check.equal(gradients_are_not_zero=(min(run.values("step", "grad_norm")) > 1e-6, True))
    means = np.reshape(run.losses, (3, -1)).mean(1)
    check.equal(losses_fall=(bool(means[2] < means[0] / 2), True))


@machine(FP64, SEED)
@clause("L7")
@only(sizes=(1, 2))
def test_another_seed_gives_another_curve(check, own, runs):
    run, other = done(check, runs.train(own, FP64), runs.train(own, SEED))
    check.equal(differs=(reference.worst_deviation(other.losses, run.losses[:14]) > 1e-3, True))
    check.close(other.losses, reference.train(seed=1, epochs=1)["losses"], T1, "losses under seed 1")


@clause("L11")
def test_fp32_is_not_tf32(check, world, own, runs):
    """One matrix product as the run has left the settings: TF32 is off by 3e-4, bf16 by 2e-3, fp32 by 3e-7."""
    import torch

    done(check, runs.train(own, FP32))
    check.equal(cudnn_takes_tf32=(world.device == "cuda" and torch.backends.cudnn.allow_tf32, False))
    left, right = (torch.tensor(reference.uniform(512 * 512, 11, side) - 0.5).view(512, 512) for side in (0, 1))
    exact = left @ right
    product = (left.float().to(world.device) @ right.float().to(world.device)).cpu().double()
    error = max(world.gather(((product - exact).norm() / exact.norm()).item()))
    check.close([1 + error], [1.0], 1e-5, "a matrix product in fp32 (norm)")


@clause("L11")
@only(sizes=(1, 2))
@pytest.mark.parametrize("variable", ["NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"])
def test_an_environment_that_turns_tf32_on_is_refused(check, world, runs, first, variable):
    run = expect_exit(check, world.train(first, runs.folder(first, variable), SHORT, environ={variable: "1"}), 3)
    check.equal(names_the_variable=(variable in "".join(run.errors), True))
    if world.device == "cpu":  # an accelerator's library would obey it from then on
        lower = f"{SHORT} --precision bf16"  # which has no TF32
        done(check, world.train(first, runs.folder(first, f"{variable}-bf16"), lower, environ={variable: "1"}))


@clause("L12")
@only(sizes=(2, 4))
@pytest.mark.parametrize(
    "flags", ["", "--epochs 1 --shards 32", "--epochs 1 --precision fp64"], ids=["shards-8", "shards-32", "fp64"]
)
def test_canonical_is_bitwise_the_same_in_a_world_of_one(check, world, runs, first, flags):
    """With the shards of other worlds, too: each rank adds several, as a world of one does. In fp64 all sums round."""
    run = same_in_a_world_of_one(check, world, runs, first, f"{FP32} {flags}")
    check.close(run.losses, golden.load()["losses"][: len(run.losses)], T2[world.device])


@clause("L12")
@only(sizes=(1,), devices=("cpu",))
def test_canonical_computes_with_one_thread(check, world, runs, first):
    """How a kernel sums depends on its threads, and these on the cores that a job script gives a rank."""
    threads = []
    for flags in ("--reduction canonical", ""):
        path = runs.folder(first, f"threads-{len(threads)}")
        run = done(check, world.alone(first, path, f"{SHORT} {flags}", dict(OMP_NUM_THREADS="2")))
        threads.append(run.of("start")[-1]["ranks"][0]["threads"])
    check.equal(threads_of_canonical_and_ddp=(threads, [1, 2]))


@clause("L12")
@only(sizes=(2, 4), devices=("cpu",))
def test_the_ranks_of_a_node_share_its_cores(check, world, runs, first, monkeypatch):
    """Where no variable says how many threads a rank has."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = done(check, world.train(first, runs.folder(first, "shared-cores"), SHORT, apart=True))
    rows = run.of("start")[-1]["ranks"]
    cores = [len(each) for each in world.gather(os.sched_getaffinity(0))]
    check.equal(threads=([row["threads"] for row in rows], [max(1, count // world.size) for count in cores]))


def same_in_a_world_of_one(check, world, runs, launch, flags):
    __tracebackhide__ = True
    flags = f"{flags} --reduction canonical"
    run, path = runs.train(launch, flags), runs.folder(launch, f"alone-{check.clauses[0]}-{world.starts}")
    single = world.alone(launch, path, runs.filled(flags))
    done(check, run, single)
    check.equal(losses=(run.values("step", "loss_hex"), single.values("step", "loss_hex")))
    check.equal(held_out_losses=(run.values("epoch", "eval_loss"), single.values("epoch", "eval_loss")))
    here, path = world.on_rank_0(lambda: [take_apart(one.folder / SNAPSHOT)["crc32"] for one in (run, single)])
    check.equal(checksums_of_tensors=(here, path))
    return run


@machine(FLAT)
@clause("L13")
def test_flat_sums_are_the_same_training(check, launch, runs):
    run = done(check, runs.train(launch, FLAT))
    check.equal(reduction=(run.values("start", "reduction"), ["flat"]))
    check.close(run.losses, golden.load()["losses"], T1)


@clause("L13")
@only(sizes=(1, 2))
def test_of_a_matrix_that_is_transposed_in_memory_too(check, train_own):
    """An optimizer takes its gradient in the same order."""
    flags = "--precision fp64 --steps-per-epoch 4 --reduction"
    ddp, flat = done(check, *(train_own("transposed", f"{flags} {kind}") for kind in ("ddp", "flat")))
    check.close(flat.losses, ddp.losses, T1)


@clause("L13")
@pytest.mark.parametrize("flags", [f"{FP64} --accumulate 2", f"{FLAT} --accumulate 2"], ids=["ddp", "flat"])
def test_micro_batches_are_the_same_training(check, runs, first, flags):
    run = done(check, runs.train(first, flags))
    check.close(run.losses, golden.load()["losses"], T1)


@clause("L13")
@only(sizes=(2,), devices=("cpu",))
def test_micro_batches_are_summed_once_a_step(check, runs, first, world):
    """As the trace of two steps shows."""
    sums, steps = [], []
    for accumulate in (1, 4):
        path = runs.folder(first, f"summed-{accumulate}")
        flags = f"--workload digits --epochs 1 --steps-per-epoch 9 --profile 2 --accumulate {accumulate}"
        done(check, world.train(first, path, flags))
        with gzip.open(path / "trace.json.gz") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        sums.append(sum("all_reduce" in event["name"] for event in events))
        steps.append(sum(event["name"] == "optimizer" for event in events))
    check.equal(sums=(sums[1], sums[0]), some=(sums[0] > 0, True), steps_traced=(steps, [2, 2]))


@clause("L13")
@only(sizes=(2, 4))
def test_rows_and_rates_by_rank_are_the_same_training(check, world, runs, first):
    """--per-rank-batch-size and --scale-lr, which are multiplied with the world size."""
    flags = f"--per-rank-batch-size {G // world.size} --lr {0.1 / world.size} --scale-lr"
    run = done(check, world.train(first, runs.folder(first, "by-rank"), f"{FP64} --epochs 1 {flags}"))
    check.close(run.losses, golden.load()["losses"][:14], T1)


@clause("L13")
@only(sizes=(1, 2))
def test_what_is_computed_again_is_the_same_training(check, world, train_own):
    """Dropout draws the same again."""
    again = "--checkpoint-activations"
    kinds = ["", again, *([f"{again} --sharding full"] if world.size > 1 and world.device == "cpu" else [])]
    plain, *others = [done(check, train_own("drops", f"--precision fp64 {flags}")) for flags in kinds]
    for run in others:
        check.close(run.losses, plain.losses, T1)
        times = [one.output[0].count("a layer is computed") for one in (plain, run)]
        check.equal(computed_once_more_in_each_step=(times[1] - times[0] >= len(run.losses) > 0, True))


@clause("L13")
@only(sizes=(2,), devices=("cpu",))
def test_a_model_is_compiled_where_that_is_asked_for(check, train_own):
    """A stand-in for torch.compile tells of it on each rank, and gives the model back."""
    run = done(check, train_own("tells_when_compiled", "--steps-per-epoch 1 --compile", apart=True))
    check.equal(compiled_on_each_rank=([text.count("torch.compile was called") for text in run.output], [1, 1]))


@functools.cache
def numpy_trace(**options) -> dict[str, list[float]]:
    """Of the noisy run."""
    return reference.train(noisy=True, epochs=2, **options)


@machine(NOISY)
@clause("L14")
@only(sizes=(1, 2))
def test_a_workload_of_ones_own(check, launch, runs):
    """Its rows are read one by one, and what they draw is known to NumPy."""
    run = done(check, runs.train(launch, NOISY))
    trace = numpy_trace()
    check.close(run.losses, trace["losses"], T1)
    check.close(run.values("epoch", "eval_loss"), trace["eval_losses"], T1, "held-out losses")
    for name in ("accuracy", "accuracy_of_even"):
        should_be = trace[f"eval_{name.replace('accuracy', 'accuracies')}"]
        check.close(run.values("epoch", f"eval_{name}"), should_be, T1, f"{name} on held-out rows")


@clause("L14")
@only(sizes=(1, 2))
def test_what_it_prints_is_in_each_rank_s_output(check, world, train_own):
    """To the last line, also where that is a file; and what its class says of a flag of its own is taken."""
    run = done(check, train_own("prints"))
    lines = [text.splitlines().count("a step of width 5") for text in run.output]
    check.equal(ranks_that_print_in_each_step=([count >= 14 for count in lines], [True] * world.size))


@clause("L14")
@only(sizes=(1,), devices=("cpu",))
def test_what_it_prints_may_have_letters_that_the_terminal_has_not(check, world, runs, first, own_file):
    flags, ascii_only = f"{own_file('prints_an_umlaut')} --epochs 1", dict(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    run = done(check, world.alone(first, runs.folder(first, "ascii"), flags, ascii_only))
    check.equal(spelt=("L\\xe4ufe" in run.output[0], True))


@clause("L14")
@only(sizes=(1,), devices=("cpu",))
def test_what_it_prints_need_not_be_read_to_its_end(check, world, runs, first, own_file):
    """`train.py | head -1`: the run trains on, and says once that nobody hears it."""
    folder = runs.folder(first, "unheard")
    command = [sys.executable, first.train, *world.flags(folder, f"{own_file('prints')} --epochs 1")]
    read, write = os.pipe()
    os.close(read)
    environ = sites.without_launcher()
    process = subprocess.run(command, env=environ, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    lines = process.stderr.splitlines()
    check.equal(exit_code=(process.returncode, 0), snapshot=((folder / SNAPSHOT).exists(), True))
    check.equal(lines=([line for line in lines if "standard output" not in line], []), warnings=(len(lines), 1))


@clause("L14")
@only(sizes=(1, 2))
def test_batches_of_any_make_are_moved_and_converted(check, world, train_own):
    """The digits in named tuples, dictionaries, lists and an object: in the run's precision, with the golden losses."""
    run = done(check, train_own("records", "--precision fp64 --workers 1"))
    check.equal(batches_as_they_were=(["a batch as it was" in text for text in run.output], [False] * world.size))
    check.close(run.losses, golden.load()["losses"][:14], T1)


@clause("L15")
@only(sizes=(1, 2))
def test_a_file_that_rows_are_read_from_is_a_worker_s_own(check, train_own):
    """It is opened at the first row, as PyTorch's users do it: one that was open before would be read at another's place."""
    done(check, train_own("opens_late", "--workers 2"))


@clause("L15")
@only(sizes=(2,), devices=("cpu",))
def test_workers_are_there_before_the_first_gradients(check, train_own):
    """A process that is forked behind their sum has gloo's locks, and none of its threads: it may hang, or crash."""
    run = done(check, train_own("counts_its_workers", "--workers 2 --steps-per-epoch 2"))
    counts = [re.findall(r"workers (\d+)", text)[:1] for text in run.output]
    check.equal(workers_when_ddp_is_first_called=(counts, [["2"], ["2"]]))


@clause("L15")
def test_rows_are_the_same_whoever_reads_them(check, runs, first):
    run, workers = done(check, runs.train(first, NOISY), runs.train(first, f"{NOISY} --workers 2"))
    check.equal(losses=(workers.values("step", "loss_hex"), run.values("step", "loss_hex")))
    check.close(workers.losses, numpy_trace()["losses"], T1)


@clause("L16")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_model_draws_depends_on_step_and_micro_batch(check, world, runs, first, accumulate):
    run = done(check, runs.train(first, f"{NOISY} --jitter 0.5 --accumulate {accumulate}"))
    trace = numpy_trace(jitter=0.5, shards=world.size * accumulate)
    check.close(run.losses, trace["losses"], T1)
    check.close(run.values("epoch", "eval_loss"), trace["eval_losses"], T1, "held-out losses")


@clause("L16")
@only(sizes=(1,))
def test_what_python_draws_is_drawn_again(check, world, runs, first, own_file):
    """After a stop, too."""
    flags, path = f"{own_file('draws_by_python')} --steps-per-epoch 5 --epochs", runs.folder(first, "draws-by-python")
    never = done(check, world.train(first, runs.folder(first, "draws-never-stopped"), f"{flags} 2"))
    resumed = done(check, *(world.train(first, path, f"{flags} {epochs}") for epochs in (1, 2)))[-1]
    for kind, name in (("step", "loss_hex"), ("epoch", "eval_loss")):
        check.equal(again=(resumed.values(kind, name), never.values(kind, name)))


@clause("L16")
@only(sizes=(2, 4))
def test_dropout_under_canonical_is_that_of_a_world_of_one(check, world, runs, first):
    same_in_a_world_of_one(check, world, runs, first, f"{DRAWS} --epochs 1")


@clause("L16")
@only(sizes=(1, 2))
def test_a_loss_may_ask_for_the_step(check, world, runs, first, own_file):
    """Which goes on after another start; held-out rows hear how many are done."""
    flags, path = f"{own_file('asks_for_the_step')} --precision fp64", runs.folder(first, "asks_for_the_step")
    starts = done(check, *[world.train(first, path, f"{flags} --epochs {epochs}") for epochs in (1, 2)])
    check.equal(losses=(starts[1].losses, [*map(float, range(28))]))
    check.equal(held_out_losses=(starts[1].values("epoch", "eval_loss"), [14.0, 28.0]))


@clause("L15")
@only(sizes=(1,))
def test_held_out_rows_are_drawn_as_before(check, train_own):
    """In each evaluation: else the best model is chosen by luck. The parameters stay what they are."""
    run = done(check, train_own("drawn_rows", "--epochs 3 --steps-per-epoch 2 --lr 1e-30"))
    check.equal(held_out_losses_of_three_epochs=(len({*run.values("epoch", "eval_loss")}), 1))


@clause("L17")
def test_what_depends_on_the_world_size_is_said(check, runs, first):
    plain, noted = done(check, runs.train(first, FP64), runs.train(first, f"{NOISY} --batch-norm --dropout 0.2"))
    (notes,), (none,) = noted.values("start", "notes"), plain.values("start", "notes")
    output = {word: any(word in note and "world size" in note for note in notes) for word in ("BatchNorm1d", "dropout")}
    check.equal(notes=(output, dict.fromkeys(output, True)), notes_of_digits=(none, []))
    check.equal(notes_that_are_not_printed=([note for note in notes if note not in noted.output[0]], []))


@clause("L17")
@only(sizes=(1,))
def test_what_no_snapshot_holds_is_said(check, train_own):
    """What has changed is named, and what has not is not."""
    run = done(check, train_own("counts_in_itself"))
    (notes,) = run.values("start", "notes")
    check.equal(named=([note.split(" of ")[0] for note in notes if "no snapshot holds it" in note], ["self.seen"]))
    (notes,) = done(check, train_own("counts_calls", "--steps-per-epoch 2")).values("start", "notes")
    buffers = [note.split(" (")[0] for note in notes if "persistent=False" in note]
    check.equal(buffers=(buffers, ["no snapshot holds calls, whole"]))


@clause("L17")
@only(sizes=(1,))
def test_a_metric_that_is_no_sum_is_said(check, train_own):
    """Also where the loss is none, and rows depend on each other."""
    (notes,) = done(check, train_own("takes_a_root")).values("start", "notes")
    check.equal(
        named=(
            [note.split(" of ")[0] for note in notes if note.startswith("metric ")],
            ["metric 'rmse'", "metric 'error (count)'"],
        )
    )


@clause("L18")
@only(sizes=(2, 4))
def test_all_ranks_begin_with_the_numbers_of_rank_0(check, train_own):
    done(check, *(train_own(name, apart=True) for name in ("unseeded", "transposed")))


@clause("L18")
@only(sizes=(2, 4))
@pytest.mark.parametrize("reduction", ["ddp", "flat"])
def test_all_ranks_go_on_with_the_buffers_of_rank_0(check, train_own, reduction):
    """Whole numbers too, to the last bit: those that a rank's own rows have counted are another rank's no more."""
    run = done(check, train_own("counts_rows", f"--reduction {reduction}"))
    check.equal(ranks_whose_buffers_differ=([rank for rank, text in enumerate(run.output) if "buffers differ" in text], []))


@clause("L18")
@only(sizes=(2,))
def test_what_no_snapshot_holds_is_each_rank_s_own(check, train_own):
    """Where they evaluate, too."""
    run = done(check, train_own("keeps_a_cache", "--steps-per-epoch 3"))
    check.equal(ranks_with_another_s=([rank for rank, text in enumerate(run.output) if "another rank's cache" in text], []))


@clause("L21")
@only(sizes=(2, 4))
def test_parameters_that_no_row_asks_for_are_left_alone(check, world, runs, first, own_file, train_own):
    """Of six experts each row asks for one, and for the last none does: a world of one sees which have a gradient."""
    flags = f"{own_file('experts')} --epochs 1 --clip-norm 0.1"
    single = world.alone(first, runs.folder(first, "experts-alone"), flags)
    kinds = [train_own("experts", f"--clip-norm 0.1 --reduction {kind}") for kind in REDUCTIONS]
    done(check, single, *kinds)
    for run in kinds:
        check.close(run.losses, single.losses, T1)
        check.close(run.values("step", "grad_norm"), single.values("step", "grad_norm"), T1, "gradient norms")
    names = world.on_rank_0(lambda: [*take_apart(kinds[0].folder / SNAPSHOT)["tensors"]])
    states = {name.rpartition("experts.")[2][0] for name in names if name.startswith("optim.mean.experts")}
    check.equal(experts_with_a_state=("".join(sorted(states)), "12345"))


def disk_operations(output: str) -> list[list[str]]:
    """By slow_disk: when, fsync or replace, of what."""
    return [line.split()[1:] for line in output.splitlines() if line.startswith("disk: ")]


@clause("L20")
@only(sizes=(1, 2))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_are_rounded_as_was_asked_for(check, world, first, runs, train_own, precision):
    """bf16 moves the first loss by 3e-5, fp16 by 4e-6, and fp32 by 4e-8. A kernel that rounds as its input is gets fp32."""
    import torch

    run = world.train(first, runs.folder(first, precision), f"{SHORT} --precision {precision}")
    names = ("rounds_as_its_input", "rounds_one_of_its_outputs")
    own = [train_own(name, f"--steps-per-epoch 1 --precision {precision}") for name in names]
    done(check, run, *own)
    images, labels, _, _ = reference.load()
    rows = reference.sample_order(0, 0, len(labels))[:G]
    parameters = {name: torch.from_numpy(values).float() for name, values in reference.initial_parameters(0).items()}
    tensors = (torch.from_numpy(images[rows]).float(), *parameters.values(), torch.from_numpy(labels[rows]))
    inputs, weight1, bias1, weight2, bias2, labels = (tensor.to(world.device) for tensor in tensors)
    trained = [tensor.requires_grad_() for tensor in (weight1, bias1, weight2, bias2)]
    linear = torch.nn.functional.linear
    with torch.autocast(world.device, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        logits = linear(torch.tanh(linear(inputs, weight1, bias1)), weight2, bias2)
        should_be = torch.nn.functional.cross_entropy(logits.float(), labels)
    check.close(run.losses, [should_be.item()], 2e-6, "the first loss")
    for name, rounded in zip(names, own, strict=True):
        check.close(rounded.losses, [should_be.item()], 2e-6, f"the first loss of {name}")
    norms = torch._foreach_norm(torch.autograd.grad(should_be, trained))
    check.close(run.values("step", "grad_norm"), [torch.stack(norms).norm().item()], 1e-2, "the first gradient norm")
    kinds = world.on_rank_0(lambda: {kind for kind, _ in take_apart(run.folder / SNAPSHOT)["tensors"].values()})
    check.equal(numbers_of_the_snapshot=(kinds, {"F32"}))


@clause("L20")
@only(sizes=(1, 2))
def test_gradients_are_clipped_whatever_the_precision(check, world, runs, first):
    """To a hundredth of what they are: fp16, whose loss is scaled, trains as fp32 does."""
    kinds = {}
    for precision in ("fp32", "bf16", "fp16"):
        path = runs.folder(first, f"clipped-{precision}")
        kinds[precision] = world.train(first, path, f"--workload digits --epochs 2 --clip-norm 0.01 --precision {precision}")
    done(check, *kinds.values())
    for precision in ("bf16", "fp16"):
        check.close(kinds[precision].losses, kinds["fp32"].losses, 1e-3, f"losses in {precision}")


@clause("L21")
@only(sizes=(1, 2))
def test_parameters_that_the_optimizer_has_not_are_frozen(check, world, runs, first, own_file):
    """Their gradients are in no norm, by which the others would be clipped."""
    flags = f"{own_file('leaves_a_layer_out')} --precision fp64 --epochs 1 --clip-norm 0.1"
    left, frozen = (world.train(first, runs.folder(first, f"left{way}"), f"{flags} {way}") for way in ("", "--frozen"))
    done(check, left, frozen)
    check.close(left.losses, frozen.losses, T1)
    check.close(left.values("step", "grad_norm"), frozen.values("step", "grad_norm"), T1, "gradient norms")


@clause("L18")
@only(sizes=(1, 2))
@pytest.mark.parametrize("reduction", ["ddp", "flat"])
def test_buffers_begin_as_the_model_has_made_them(check, world, train_own, reduction):
    """Those that no snapshot has, and frozen parameters, too, though some rows were tried before. Complex ones stay complex."""
    run = done(check, train_own("counts_calls", f"--steps-per-epoch 2 --reduction {reduction}"))
    calls = [re.findall(r"calls until the first step: (\w+)", text)[-1:] for text in run.output]  # schedule() is tried, too
    check.equal(calls_until_the_first_step=(calls, [["1"]] * world.size))


@clause("L18")
@only(sizes=(1,), devices=("cpu",))
def test_of_a_large_part_that_is_frozen_no_copy_is_made(check):
    """Of an average of the weights one is: what is tried before the first step may move it."""
    import torch
    from ddp_core.state import Kept

    trained, average, backbone = (torch.nn.Linear(*shape) for shape in ((64, 16), (64, 16), (64, 16 * 64)))
    for layer in (average, backbone):
        layer.requires_grad_(False)
    whole = [bytes_of(Kept(torch.nn.ModuleList(layers))) for layers in ([trained, average], [trained, average, backbone])]
    of_average = 4 * (64 * 16 + 16)
    check.equal(bytes_that_are_copied=(whole, [of_average] * 2))


@clause("L19")
@only(sizes=(1,))
@pytest.mark.parametrize("name", ["digits", "regression"])
def test_the_rows_are_the_same_under_every_seed(check, name):
    """The seed is of the order and of the parameters: else a curve under another one is one of other data."""
    import torch
    from ddp_core.workload import find

    sets = [find(name).data(SimpleNamespace(seed=seed)) for seed in (0, 1)]
    pairs = [pair for rows in zip(*sets, strict=True) for pair in zip(*(each.columns for each in rows), strict=True)]
    check.equal(rows_are_the_same=([torch.equal(*pair) for pair in pairs], [True] * len(pairs)))


@clause("L20")
@only(sizes=(1,))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rows_are_not_rounded(check, train_own, precision):
    """Autocast rounds what enters a product; a target, and what a model computes otherwise, it does not."""
    run = done(check, train_own("tells_of_its_rows", f"--precision {precision} --steps-per-epoch 2"))
    products = [sorted({*re.findall(rf"products {kind} (\w+)", run.output[0])}) for kind in ("training", "held-out")]
    should_be = [[dict(bf16="bfloat16", fp16="float16")[precision]]] * 2
    check.equal(rounded=("rounded rows" in run.output[0], False), products_trained_and_held_out=(products, should_be))


@clause("L4")
@only(sizes=(1, 2))
def test_held_out_rows_come_no_more_at_once_than_others(check, world, train_own):
    """Whose micro-batches are small has no memory for more."""
    run = done(check, train_own("tells_of_its_rows", "--accumulate 6 --steps-per-epoch 2"))
    counts = {kind: [*map(int, re.findall(rf"rows {kind} (\d+)", run.output[-1]))] for kind in ("training", "held-out")}
    most = {kind: max(each, default=0) for kind, each in counts.items()}
    check.equal(rows_at_once=(most, dict.fromkeys(most, G // world.size // 6)))


def packed(path: Path) -> None:
    """As MNIST's files are downloaded."""
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@clause("L19", "S5", "S9")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", anchors.CASES)
def test_the_other_workloads_are_a_plain_loop_s(check, world, first, runs, name):
    """What is recorded and what is kept as the best, for regression, mnist and gpt."""
    case, data = anchors.CASES[name], runs.root / f"data-{name}"
    should_be = world.on_rank_0(lambda: anchors.train(case, data, world.size))
    world.on_rank_0(lambda: [packed(path) for path in sorted(data.glob("*-images-*-ubyte"))])
    run = world.train(first, runs.folder(first, f"L19-{name}"), f"--precision fp64 {case.flags.format(data=data)}")
    done(check["L19"], run)
    recorded = {key: run.values("step", key) for key in ("loss", "grad_norm")}
    recorded |= {key: run.values("epoch", key.removeprefix("epoch_")) for key in ("epoch_loss", "eval_loss", case.metric)}
    for key, values in recorded.items():
        check["L19"].close(values, should_be[key], T1, key)
    files = world.on_rank_0(lambda: [take_apart(run.folder / file) for file in (SNAPSHOT, "best.safetensors")])
    document, best = (file["document"] for file in files)
    check["S5"].equal(crc32=(document["crc32"], files[0]["crc32"]))  # one of mnist's tensors has more than a megabyte
    history = [[row[0], *map(float.fromhex, row[1:])] for row in document["history"]]
    rows = zip(recorded["epoch_loss"], recorded["eval_loss"], recorded[case.metric], strict=True)
    check["S9"].equal(history=(history, [[epoch, *row] for epoch, row in enumerate(rows)]))
    epoch = int(np.argmin(should_be["eval_loss"]))
    steps = (epoch + 1) * len(should_be["loss"]) // case.epochs
    check["S9"].equal(best=(document["best"], [epoch, recorded["eval_loss"][epoch].hex()]), step=(best["step"], steps))


@clause("L19")
@only(sizes=(1,))
def test_texts_of_one_name_come_in_the_order_of_their_folders(check, world, runs, first):
    """As one text that has them on lines of their own: a folder is listed as its file system likes."""

    def prepare() -> bool:
        texts = {letter: bytes(ord(letter) ^ number % 7 for number in range(65 * 8)) for letter in "ceadb"}
        for letter, text in texts.items():
            (data / letter).mkdir(parents=True)
            (data / letter / "text.txt").write_bytes(text)
        whole.mkdir()
        return bool((whole / "text.txt").write_bytes(b"\n".join(texts[letter] for letter in sorted(texts))))

    data, whole = runs.root / "texts", runs.root / "whole-text"
    world.on_rank_0(prepare)
    flags = "--workload gpt --model-size tiny --epochs 1 --steps-per-epoch 2 --global-batch-size 8 --precision fp64"
    several, one = (world.train(first, runs.folder(first, d.name), f"{flags} --data-dir {d}") for d in (data, whole))
    done(check, several, one)
    check.equal(losses=(several.values("step", "loss_hex"), one.values("step", "loss_hex")))


# ---- snapshot -----------------------------------------------------------------------------------------------------


@machine(FP64)
@clause("S1", "S2", "S5", "S6")
def test_what_a_snapshot_holds(check, world, own, runs):
    run = done(check["S1"], runs.train(own, FP64))
    files = world.on_rank_0(lambda: sorted(path.name for path in run.folder.iterdir()))
    check["S6"].equal(files=(files, sorted([SNAPSHOT, "snapshot.prev.safetensors", "best.safetensors", LOG])))
    snapshot = world.on_rank_0(lambda: take_apart(run.folder / SNAPSHOT))
    shapes = {f"{kind}.{name}": ("F64", [*shape]) for kind in ("model", "optim.momentum") for name, shape in LAYERS.items()}
    check["S1"].equal(tensors=(snapshot["tensors"], shapes))
    document = snapshot["document"]
    known = {"format", "problem", "data", "step", "steps_per_epoch", "epochs_run", "epoch_loss_sum"}
    known |= {"history", "best", "crc32", "document_crc32", "world_size", "versions"}
    check["S2"].equal(metadata_keys=(snapshot["keys"], ["ddp_core"]), missing_in_the_document=(known - {*document}, set()))
    expected = dict(format=2, step=42, epochs_run=3, steps_per_epoch=14, world_size=world.size)
    check["S2"].equal(**{name: (document[name], should_be) for name, should_be in expected.items()})
    rest = {name: document[name] for name in {*document} - {"document_crc32"}}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    sums = dict(crc32=snapshot["crc32"], document_crc32=zlib.crc32(text.encode()))
    check["S5"].equal(**{name: (document[name], should_be) for name, should_be in sums.items()})


@clause("S1")
def test_a_snapshot_holds_buffers_and_any_optimizer_s_state(check, world, runs, first):
    run = done(check, runs.train(first, f"{ALL} --epochs 1"))
    trained = {"0.weight": [256, 64], "0.bias": [256], "4.weight": [10, 256], "4.bias": [10]}
    trained |= {"2.weight": [256], "2.bias": [256]}
    tensors = {f"model.{name}": ("F32", shape) for name, shape in trained.items()}
    tensors |= {f"model.2.running_{name}": ("F32", [256]) for name in ("mean", "var")}
    tensors |= {"model.2.num_batches_tracked": ("I64", []), "model.6.mean": ("F32", [])}
    tensors |= {f"optim.{name}.{of}": ("F32", shape) for of, shape in trained.items() for name in ("mean", "square")}
    tensors |= {f"optim.step.{of}": ("F32", []) for of in trained}
    snapshot = world.on_rank_0(lambda: take_apart(run.folder / SNAPSHOT))
    check.equal(tensors=(snapshot["tensors"], tensors))
    counted = zlib.crc32((14 * 2).to_bytes(8, "little"))  # micro-batches of an epoch, and none of a trial
    check.equal(crc32_of_batches_tracked=(snapshot["crc32"]["model.2.num_batches_tracked"], counted))


@clause("S10", "S11")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_snapshot_is_written_beside_training(check, world, runs, first, train_own):
    """On a slow disk, where steps are trained while it is: the state is that of a run whose disk is fast."""
    flags = "--precision fp64 --epochs 1 --save-steps"
    run, fast = done(check["S11"], train_own("slow_disk", f"{flags} 4", apart=True), runs.train(first, f"{flags} 12"))

    def steps_and_sums(one) -> list:
        files = [path for name in (SNAPSHOT, "snapshot.prev.safetensors") if (path := one.folder / name).exists()]
        try:
            both = [take_apart(path) for path in files]
        except ValueError as error:  # it is no safetensors file
            return [(str(error), {})]
        return [(each["document"]["step"], each["crc32"]) for each in both]

    states, fast_states = world.on_rank_0(lambda: (steps_and_sums(run), steps_and_sums(fast)))
    check["S11"].equal(steps=([step for step, _ in states], [14, 12]))
    check["S10"].equal(snapshots=(run.values("snapshot", "step"), [4, 8, 12, 14]))
    waits_are_told(check["S10"], run)
    durable = [record["writing"] > 0.4 and record["seconds"] >= 0 for record in run.of("snapshot")]
    check["S10"].equal(told_when_they_are_durable=(durable, [True] * 4))
    check["S11"].equal(tensors=(states, fast_states))
    check["S11"].equal(left_behind=(world.on_rank_0(lambda: [path.name for path in run.folder.glob(".*")]), []))
    disk = [act for _, *act in disk_operations(run.output[0])]
    for place, (act, name, *size) in enumerate(disk):
        if act == "replace" and name in (SNAPSHOT, "best.safetensors"):
            check["S10"].equal(before_it_has_its_name=(disk[place - 1], ["fsync", *size]))
            check["S10"].equal(after_it_has_its_name=(disk[place + 1 : place + 2], [["fsync", "folder"]]))
    names = [name for act, name, *_ in disk if act == "replace" and name in (SNAPSHOT, "best.safetensors")]
    check["S10"].equal(last_saved=(names[-2:], ["best.safetensors", SNAPSHOT]))


def waits_are_told(check, run) -> None:
    """Of a run all of whose saves are on record: each second for which training has waited, once."""
    __tracebackhide__ = True
    seconds = run.values("end", "seconds")[-1]
    waited, writing = (sum(run.values("snapshot", name)) for name in ("seconds", "writing"))
    told = "as many" if abs(waited - seconds["snapshots"]) < 0.3 else f"{waited:.2f} of {seconds['snapshots']:.2f}"
    check.equal(seconds_that_training_waited=(told, "as many"))
    check.equal(writes_take_longer_than_the_training=(writing > seconds["training"], False))


@clause("S10")
@only(sizes=(1,), devices=("cpu",))
def test_saves_that_are_too_slow_for_a_stop_are_noted(check, train_own):
    """Two may fall into the seconds that a stop leaves; here each takes more than half a second."""
    notes = []
    for grace in (0.5, 60):
        run = done(check, train_own("slow_disk", f"--precision fp64 --grace {grace}", apart=True))
        notes.append("--grace" in run.output[0])
    check.equal(noted_with_half_a_second_and_with_a_minute=(notes, [True, False]))


@clause("S11")
@only(sizes=(1, 2), devices=("cpu",))
def test_epochs_that_end_while_a_snapshot_is_written_are_not_in_it(check, world, train_own):
    flags = "--precision fp64 --epochs 8 --steps-per-epoch 2 --save-every 4 --eval-every 99"
    run = done(check, train_own("slow_sums", flags, apart=True))

    def steps_and_epochs(name: str) -> tuple | str:
        try:
            document = take_apart(run.folder / name)["document"]
        except (ValueError, LookupError) as error:
            return f"unreadable: {type(error).__name__}"
        return document["step"], document["epochs_run"], len(document["history"])

    actual = world.on_rank_0(lambda: [*map(steps_and_epochs, ("snapshot.prev.safetensors", SNAPSHOT))])
    check.equal(steps_and_epochs=(actual, [(8, 4, 4), (16, 8, 8)]))


@clause("S11")
@only(sizes=(1,), devices=("cpu",))
def test_a_save_is_finished_though_the_training_fails(check, train_own):
    run = expect_exit(check, train_own("fails_while_it_saves", "--save-steps 4", apart=True), 2)
    files = sorted(path.name for path in run.folder.glob("*snapshot*"))
    check.equal(files=(files, [SNAPSHOT]))
    check.equal(at_step=(take_apart(run.folder / SNAPSHOT)["document"]["step"], 4))


@clause("S12")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_save_that_fails_beside_training_ends_all_ranks(check, train_own):
    """That of step 20; the next one would be that of step 40, two seconds later, and the ranks speak once a second."""
    flags = "--precision fp64 --epochs 3 --save-steps 20 --save-every 9 --eval-every 9 --seconds 0.1"
    run = train_own("full_disk", flags, apart=True)
    one_line(check, run, 8, SNAPSHOT)
    check.equal(ends_before_the_next_save=(20 <= len(run.losses) < 40, True), snapshots=(run.of("snapshot"), []))


def take_set_apart(index: Path) -> dict:
    """An index and its files, read by their formats; as take_apart(), and the bytes of tensors in each file."""
    read, tensors, sums, sizes = json.loads(index.read_bytes()), {}, {}, {}
    for file in sorted({*read["weight_map"].values()}):
        raw = index.with_name(file).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert [name for name, place in read["weight_map"].items() if place == file] == sorted(header)
        tensors |= {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
        sums |= {name: zlib.crc32(raw[start:][slice(*entry["data_offsets"])]) for name, entry in header.items()}
        sizes[file] = (len(header), len(raw) - start)
    assert read["metadata"]["total_size"] == sum(size for _, size in sizes.values())
    return dict(document=read["metadata"]["ddp_core"], tensors=tensors, crc32=sums, sizes=sizes)


def files_of(folder: Path) -> tuple[list[str], list[str]]:
    """What is there, and what should be: the log, indexes, and the files that they name."""
    indexes = [folder / f"{name}.safetensors.index.json" for name in ("snapshot", "snapshot.prev", "best")]
    named = {file for index in indexes for file in take_set_apart(index)["sizes"]}
    return sorted(path.name for path in folder.iterdir()), sorted([LOG, *named, *(index.name for index in indexes)])


@clause("S13")
@only(devices=("cpu",))
def test_a_large_snapshot_is_a_set_of_files_that_holds_the_same(check, world, runs, first):
    run, whole = done(check, *(runs.train(first, flags) for flags in (f"{FP64} {SETS}", FP64)))
    for name in ("snapshot", "snapshot.prev", "best"):  # read as a set, the one before has not been written over

        def both(name: str = f"{name}.safetensors") -> list:
            return [take_set_apart(run.folder / f"{name}.index.json"), take_apart(whole.folder / name)]

        of_set, of_file = world.on_rank_0(both)
        check.equal(**{part: (of_set[part], of_file[part]) for part in ("crc32", "tensors", "document")})
        sizes = {number: size for number, (_, size) in enumerate(of_set["sizes"].values()) if size > 50_000}
        check.equal(files=(len(of_set["sizes"]), 5), larger_ones=(sizes, {1: 131072, 3: 131072}))
    check.equal(files=world.on_rank_0(lambda: files_of(run.folder)))


@clause("S13")
@only(sizes=(1, 2), devices=("cpu",))
def test_an_index_has_its_name_after_all_that_it_names(check, world, train_own):
    """Else a machine that crashes then leaves an index of files that are not there."""
    run = done(check, train_own("slow_disk", f"--precision fp64 --save-steps 7 {SETS}", apart=True))
    disk = [act for _, *act in disk_operations(run.output[0])]
    for name in ("snapshot", "best"):
        index = f"{name}.safetensors.index.json"
        named = world.on_rank_0(lambda index=index: [*take_set_apart(run.folder / index)["sizes"]])
        place = max(number for number, (act, target, *_) in enumerate(disk) if (act, target) == ("replace", index))
        before = {target: number for number, (act, target, *_) in enumerate(disk[:place]) if act == "replace"}
        check.equal(before_the_index=([file for file in named if file not in before], []))
        durable = [["fsync", disk[before[file]][2]] in disk[: before[file]] for file in named]
        check.equal(on_the_disk=(durable, [True] * len(named)))
        check.equal(around_it=([disk[place - 1], disk[place + 1]], [["fsync", "folder"]] * 2))


@clause("S10", "S13")
@only(sizes=(2, 4), devices=("cpu",))
def test_all_ranks_of_a_sharded_run_write_files_of_its_set(check, world, train_own):
    """And rank 0 names the files when every rank has its own on the disk. Training waits for it, and the record says so."""
    run = done(check["S13"], train_own("slow_disk", f"--precision fp64 --sharding full {SETS}", apart=True))
    waits_are_told(check["S10"], run)
    named = world.on_rank_0(lambda: [path.stat().st_size for path in run.folder.glob("snapshot-*.safetensors")])
    acts = [[(float(when), *act) for when, *act in disk_operations(output)] for output in run.output]
    names = [(when, target) for when, act, target, *_ in acts[0] if act == "replace"]
    [best] = [when for when, target in names if target == "best.safetensors.index.json"]  # which is saved before
    first_name = min(when for when, target in names if when > best and target.startswith("snapshot-"))
    synced = [[size for when, act, size, *_ in of if act == "fsync" and best < when < first_name] for of in acts]
    files = [[size for size in sizes if size != "folder"] for sizes in synced]
    deal = {2: [4, 2], 4: [3, 1, 1, 1]}[world.size]  # five files, and rank 0's index
    check["S13"].equal(files_by_rank=([*map(len, files)], deal))
    check["S13"].equal(not_on_the_disk=(sorted({*named} - {int(size) for sizes in files for size in sizes}), []))
    check["S13"].equal(other_ranks_name=([act for of in acts[1:] for act in of if act[1] == "replace"], []))


@clause("S13")
@only(sizes=(2, 4), devices=("cpu",))
def test_a_rank_that_cannot_write_its_file_of_a_set_ends_all(check, world, train_own):
    """The files of 100 kB and more are those of the last ranks."""
    run = train_own("full_disk", f"--precision fp64 --sharding full {SETS}", apart=True)
    one_line(check, run, 8, f".safetensors: file 2 of 5, by rank 1 on {os.uname().nodename}: ")
    check.equal(snapshots=(run.of("snapshot"), []))
    check.equal(left_behind=(world.on_rank_0(lambda: sorted(path.name for path in run.folder.glob("*.safetensors*"))), []))


@clause("S13")
@only(sizes=(2,), devices=("cpu",))
def test_rank_0_writes_the_whole_set_where_others_do_not_see_its_folder(check, world, runs, first, own_file, monkeypatch):
    """Which is on its node's own disk, as is here a path that begins in each rank's own working directory."""
    folder = runs.folder(first, "disks")
    (folder / f"of-{world.rank}").mkdir(parents=True)
    monkeypatch.chdir(folder / f"of-{world.rank}")
    flags = f"{own_file('is_impatient')} --epochs 1 --sharding full {SETS} --run-dir mine"
    run = done(check, world.train(first, folder, flags))
    files = world.on_rank_0(lambda: take_set_apart(folder / f"of-0/mine/{SNAPSHOT}.index.json")["sizes"])
    noted = ["not seen by rank 1" in text for text in run.output]
    check.equal(files=(len(files), 5), written_by_rank_1=(run.written[1], []), noted=(noted, [True, False]))


@clause("S13")
@only(sizes=(2, 4), devices=("cpu",))
def test_from_one_file_to_a_set_and_back(check, world, runs, first):
    """Nothing stale is left that could be taken for the run's state."""
    path, names = runs.folder(first, "sets"), []
    for epochs, flags in enumerate(("", f"--sharding full {SETS}", SETS, ""), 1):
        run = done(check, world.train(first, path, f"--workload digits --precision fp64 --epochs {epochs} {flags}"))
        names.append(world.on_rank_0(lambda: sorted(file.name for file in path.glob("snapshot.safetensors*"))))
    check.equal(snapshots=(names, [[SNAPSHOT], [f"{SNAPSHOT}.index.json"], [f"{SNAPSHOT}.index.json"], [SNAPSHOT]]))
    check.equal(started_at_steps=(run.values("start", "step"), [0, 14, 28, 42]))
    check.close(run.losses[:42], golden.load()["losses"], T1)


@clause("S13")
@only(sizes=(1,), devices=("cpu",))
def test_a_set_is_moved_aside_whole(check, world, runs, first):
    """--fresh keeps the older run, and the new one sweeps away what no index names."""
    path = runs.folder(first, "set-aside")
    done(check, *(world.train(first, path, f"{SHORT} {SETS} {flags}") for flags in ("", "--seed 1 --fresh")))
    index = json.loads((path / f"old-1/{SNAPSHOT}.index.json").read_text())
    lost = sorted({name for name in index["weight_map"].values() if not (path / "old-1" / name).exists()})
    check.equal(files_that_are_not_there=(lost, []))


@clause("S4")
def test_every_launcher_of_every_site_writes_the_same_bytes(check, world, launch, runs, first):
    for precision in (FP64, FP32):
        run, other = done(check, runs.train(launch, precision), runs.train(first, precision))
        mine, others = world.on_rank_0(lambda run=run, other=other: [sha256(one.folder / SNAPSHOT) for one in (run, other)])
        check.equal(**{f"sha256_as_of_{first}": (mine, others)})


@clause("S8")
@pytest.mark.parametrize("num_nodes", [1, TWO])
def test_rank_0_alone_writes(check, world, launch, runs, num_nodes):
    umask = os.umask(0)  # as of a user who shares everything, and perhaps does not know
    run = world.train(launch, runs.folder(launch, f"writers-{num_nodes}"), SHORT, num_nodes)
    os.umask(umask)
    done(check, run)
    paths = world.on_rank_0(lambda: [path.name for path in [run.folder, *run.folder.iterdir()] if path.stat().st_mode & 0o002])
    check.equal(others_may_write_to=(paths, []))
    writers = {rank: files for rank, files in enumerate(run.written) if files}
    check.equal(rank_0_writes=(SNAPSHOT in str(writers.pop(0, "")), True), other_writers=(writers, {}))


@clause("S9", "C8")
@only(sizes=(1, 2))
def test_epochs_that_are_not_evaluated_or_saved(check, world, runs, first):
    flags = f"{FP64} --eval-every 2 --save-every 2"
    run, plain = done(check["S9"], runs.train(first, flags), runs.train(first, FP64))
    check["C8"].equal(snapshots=(run.values("snapshot", "step"), [28, 42]))
    check["S9"].equal(steps_of_epochs=(run.values("epoch", "step"), [14, 28, 42]))
    names = ("loss", "eval_loss", "eval_accuracy")
    rows = [[record.get(name) for name in names] for record in plain.of("epoch")]
    rows[0][1:] = [None, None]
    check["S9"].equal(epochs=([[record.get(name) for name in names] for record in run.of("epoch")], rows))
    history = world.on_rank_0(lambda: take_apart(run.folder / SNAPSHOT)["document"]["history"])
    should_be = [[epoch, *(value.hex() for value in row if value is not None)] for epoch, row in enumerate(rows)]
    check["S9"].equal(history=(history, should_be))


@clause("C8")
@only(sizes=(1, 2))
def test_the_last_epoch_is_saved_though_nothing_else_is_due(check, world, train_own):
    """Without held-out rows, and when it is none that --save-every saves."""
    run = done(check, train_own("nothing_held_out", "--precision fp64 --epochs 3 --save-every 2"))
    document = world.on_rank_0(lambda: take_apart(run.folder / SNAPSHOT)["document"])
    check.equal(snapshots=(run.values("snapshot", "step"), [28, 42]), step=(document["step"], 42))
    check.equal(epochs=(run.values("epoch", "step"), [14, 28, 42]), of_the_snapshot=(len(document["history"]), 3))
    check.close(run.losses, golden.load()["losses"], T1)


@clause("S9")
@only(sizes=(1, 2))
def test_the_best_model_is_kept_though_no_snapshot_is_due(check, world, runs, first, own_file):
    """Its loss rises in the last epoch, after which alone a snapshot is saved."""
    path = runs.folder(first, "worsens")
    run = done(check, world.train(first, path, f"{own_file('worsens')} --epochs 3 --save-every 3"))
    losses = run.values("epoch", "eval_loss")
    file = path / "best.safetensors"
    best = world.on_rank_0(lambda: take_apart(file)["document"]["epochs_run"] if file.exists() else 0)
    check.equal(rises_at_last=(losses[-1] > min(losses), True), epochs_of_the_best=(best, losses.index(min(losses)) + 1))
    check.equal(snapshots_on_record=(run.values("snapshot", "step"), [42]))  # a killed run would be asked for more


@clause("S9")
@only(sizes=(1,))
def test_the_best_epoch_is_the_first_of_equal_ones_and_remembered(check, world, runs, first, train_own):
    equal = done(check, train_own("stands_still", "--epochs 3"))
    case, path = anchors.CASES["regression-rises"], runs.folder(first, "rises-resumed")
    flags = f"{case.flags} --precision fp64 --epochs"
    done(check, *(world.train(first, path, f"{flags} {epochs}") for epochs in (2, 3)))
    documents = [take_apart(folder / SNAPSHOT)["document"] for folder in (equal.folder, path)]
    check.equal(best_epochs=([document["best"][0] for document in documents], [0, 1]))
    kept = [take_apart(folder / "best.safetensors")["document"]["epochs_run"] for folder in (equal.folder, path)]
    check.equal(epochs_of_the_files=(kept, [1, 2]))


# ---- continue -----------------------------------------------------------------------------------------------------


@clause("C1", "X2")
def test_stopped_and_resumed_is_bitwise_as_never_stopped(check, world, own, runs):
    flags, an_epoch = long(world)
    never, path = runs.train(own, flags), runs.folder(own, "stopped")
    expect_exit(check["X2"], world.train(own, path, flags, signal_rank=world.size - 1), 75)
    step = world.on_rank_0(lambda: take_apart(path / SNAPSHOT)["document"]["step"])
    resumed = world.train(own, path, flags)
    done(check["C1"], never, resumed)
    check["C1"].equal(stopped_in_mid_epoch=(step % an_epoch != 0, True))
    check["C1"].equal(went_on_at_step=(resumed.values("start", "step")[-1], step))
    same_as_never_stopped(check["C1"], world, resumed, never)


@clause("X2")
@only(sizes=(2,))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_other_signals_stop_it_too(check, world, runs, first, number):
    """A cancelled job, and Ctrl-C."""
    path, at = runs.folder(first, number.name), '"kind":"step"'
    run = world.train(first, path, long(world)[0], kill_ranks=(1,), kill_at=at, kill_by=number)
    stopped_and_saved(check, run)


@clause("C1")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("save_every", [99, 1])
def test_stopped_at_the_end_of_an_epoch_it_saves_once(check, train_own, save_every):
    """Though that epoch is none that --save-every saves. What it saves there is the last one, and the one before it stays."""
    run = train_own("told_at_an_end", f"--epochs 3 --save-every {save_every}", apart=True)
    stopped_and_saved(check, run)
    steps = run.values("snapshot", "step")
    check.equal(saved_twice=([step for step in steps if steps.count(step) > 1], []))


@clause("C1")
@only(sizes=(1,), devices=("cpu",))
def test_stopped_at_a_step_that_is_saved_it_saves_once(check, world, runs, first, own_file):
    """And goes on: an epoch of before is evaluated no more, whatever --eval-every is by then."""
    flags, path = f"{own_file('told_thrice')} --epochs 3 --steps-per-epoch 4 --precision fp64", runs.folder(first, "told-at-6")
    stopped = expect_exit(
        check, world.train(first, path, f"{flags} --save-steps 6 --save-every 9 --eval-every 3", apart=True), 75
    )
    check.equal(snapshots=(stopped.values("snapshot", "step"), [6]))
    again = done(check, world.train(first, path, f"{flags} --eval-every 1", apart=True))
    last = {record["epoch"]: record for record in again.of("epoch")}
    check.equal(evaluated=(["eval_loss" in last[epoch] for epoch in range(3)], [False, True, True]))
    check.close([record["loss"] for record in last.values()], [sum(again.losses[i : i + 4]) / 4 for i in (0, 4, 8)], T1)


@clause("X2")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_signal_to_every_process_of_the_job_stops_it_as_well(check, train_own):
    """Schedulers send it to those that read rows, too: these read on until their rank has saved."""
    stopped_and_saved(check, train_own("told_with_its_workers", "--workers 1"))


@clause("X2")
@only(sizes=(1,), devices=("cpu",))
def test_a_process_of_the_workload_s_own_ends_when_it_is_told_to(check, train_own):
    """It has not the run's way to stop: a multiprocessing.Pool ends its processes by SIGTERM, and waits for them."""
    run = done(check, train_own("has_a_helper", "--steps-per-epoch 1", apart=True))
    check.equal(ended_by=(re.findall(r"helper ended by (\S+)", run.output[0]), [str(int(signal.SIGTERM))]))


@clause("C1")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("epochs", [1, 2])
def test_stopped_while_it_evaluates_it_does_so_at_the_next_start(check, world, runs, first, own_file, epochs):
    """Held-out rows may take longer than a scheduler waits; behind those of the last epoch there is no step left."""
    name = f"told-{epochs}"
    file, path = own_file("told_while_evaluated", name), runs.folder(first, name)
    stopped, resumed = (world.train(first, path, f"{file} --epochs {epochs}") for _ in range(2))
    stopped_and_saved(check, stopped)
    check.equal(
        evaluated_before_the_stop=(stopped.values("epoch", "epoch"), []), stopped_at=(stopped.values("end", "step"), [14])
    )
    never = world.train(first, runs.folder(first, f"{name}-never"), f"{file} --epochs {epochs}")
    done(check, resumed, never)
    check.equal(eval_losses=(resumed.values("epoch", "eval_loss"), never.values("epoch", "eval_loss")))
    same_as_never_stopped(check, world, resumed, never)


@clause("C1")
@only(sizes=(1,), devices=("cpu",))
def test_told_before_it_begins_with_an_evaluation_it_does_so_all_the_same(check, world, runs, first, own_file):
    """A run whose starts are all told early comes to its end."""
    file, path = own_file("told_while_evaluated", "told-early"), runs.folder(first, "told-early")
    stopped = world.train(first, path, f"{file} --epochs 1")
    resumed = world.train(first, path, f"{file} --epochs 1 --early")
    stopped_and_saved(check, stopped)
    check.equal(evaluated=(done(check, resumed).values("epoch", "epoch"), [0]))


@clause("X2")
@only(sizes=(1, 2), devices=("cpu",))
def test_another_signal_while_it_stops_costs_nothing(check, train_own):
    """One Ctrl-C under torchrun is two signals; a scheduler may send one before."""
    run = train_own("told_thrice", apart=True)
    stopped_and_saved(check, run)
    reasons = [word for text in run.output for word in re.findall(r"stopped early \((\w+)\)", text)]
    check.equal(reasons=(reasons, ["SIGTERM"]))


def same_as_never_stopped(check, world, resumed, never) -> None:
    __tracebackhide__ = True
    check.equal(losses=(resumed.values("step", "loss_hex"), never.values("step", "loss_hex")))
    check.close(resumed.losses, never.losses, T0)
    here, path = world.on_rank_0(lambda: [sha256(one.folder / SNAPSHOT) for one in (resumed, never)])
    check.equal(snapshot_sha256=(here, path))


@machine()
@clause("C2", "C11")
def test_continued_by_another_site_at_another_world_size(check, world, own, runs, handed_on, pytestconfig):
    """What 2 ranks have left goes on in 4 of the other kind, on CPUs: whole models in parts, and parts under ddp."""
    whole = handed_on.stem.endswith("-2") and "-parts-" not in handed_on.stem
    in_parts = whole and world.size == 4 and pytestconfig.getoption("--device") == "cpu"
    path = runs.folder(own, f"after-{handed_on.stem}")
    world.on_rank_0(lambda: [path.mkdir(parents=True), shutil.copy(handed_on, path / SNAPSHOT)])
    rest = done(check["C2"], world.train(own, path, SHARDED if in_parts else FP64))
    check["C2"].equal(started_at_step=(rest.values("start", "step"), [28]))
    should_be = "sharded" if in_parts else "ddp" if world.size > 1 else "none"
    check["C11"].equal(reduction=(rest.values("start", "reduction"), [should_be]))
    for each in (check["C2"], check["C11"]):
        each.close(rest.losses, golden.load()["losses"][28:], T1)
        each.close(rest.values("epoch", "eval_loss"), golden.load()["eval_losses"][2:], T1)


@clause("C2", "C11")
def test_snapshots_are_handed_on(check, world, own, runs, pytestconfig):
    """After two of three epochs, to sessions of other world sizes; of 2 ranks at every second site that of a model in parts."""
    every_second = [site.launches[0].site for site in pytestconfig.sites].index(own.site) % 2
    in_parts = every_second and world.size == 2 and pytestconfig.getoption("--device") == "cpu"
    run, folder = runs.train(own, SHARDED if in_parts else FP64), pytestconfig.getoption("--handed-on")
    done(check["C2"], run)
    check["C11"].close(run.losses, golden.load()["losses"], T1)
    if folder:
        target = Path(folder) / f"{own.site}{'-parts' if in_parts else ''}-{world.size}.safetensors"
        world.on_rank_0(lambda: bool(shutil.copy(run.folder / "snapshot.prev.safetensors", target)))


@machine(FP64)
@clause("C3")
def test_another_problem_is_refused(check, world, own, runs):
    run, path = runs.train(own, FP64), runs.folder(own, "refused")
    done(check, run)
    world.on_rank_0(lambda: bool(shutil.copytree(run.folder, path)))
    before = world.on_rank_0(lambda: sha256(path / SNAPSHOT))
    expect_exit(check, world.train(own, path, FP64 + " --seed 1"), 5)
    check.equal(snapshot=(world.on_rank_0(lambda: sha256(path / SNAPSHOT)), before))


@clause("C3")
@only(sizes=(1, 2))
def test_a_snapshot_of_a_larger_model_is_refused(check, world, runs, first, own_file):
    """All that this run has is in it, and more."""
    file, path = own_file("loses_a_layer"), runs.folder(first, "larger-model")
    done(check, world.train(first, path, f"{file} --epochs 1"))
    world.on_rank_0((runs.root / "workloads" / "loses_a_layer.py.shorter").touch)
    run = expect_exit(check, world.train(first, path, f"{file} --epochs 2"), 5)
    check.equal(names_the_tensor=("model.3." in "".join(run.errors), True))


# Each is another problem than the reference run; what is not another one comes last.
OTHERS = "--workload regression|--global-batch-size 48|--steps-per-epoch 7|--optimizer adamw|--lr 0.2|--momentum 0.8"
OTHERS += "|--weight-decay 0.1|--lr-schedule cosine|--warmup-steps 3|--clip-norm 1|--precision fp32|--row-seeds off"
SAME = "--accumulate 2 --reduction flat --save-every 2 --eval-every 2 --log-every 5 --save-minutes 3 --save-steps 9"
SAME += " --timeout 50"


@clause("C2", "C3")
@only(sizes=(1, 2))
def test_what_is_another_problem_and_what_is_not(check, world, runs, first):
    run, path = runs.train(first, FP64), runs.folder(first, "another-problem")
    done(check["C3"], run)
    world.on_rank_0(lambda: bool(shutil.copytree(run.folder, path)))
    codes = {flags: world.train(first, path, f"{FP64} {flags}").exit_codes for flags in OTHERS.split("|")}
    noisy, copy = runs.train(first, NOISY), runs.folder(first, "another-jitter")
    done(check["C3"], noisy)
    world.on_rank_0(lambda: bool(shutil.copytree(noisy.folder, copy)))
    own = world.train(first, copy, runs.filled(f"{NOISY} --jitter 0.5"))
    check["C3"].equal(exit_codes_under_another_flag_of_its_own=(own.exit_codes, [5] * world.size))
    check["C3"].equal(exit_codes_under=(codes, dict.fromkeys(codes, [5] * world.size)))
    again = done(check["C2"], world.train(first, path, f"{FP64} {SAME}"))
    check["C2"].equal(started_at_steps=(again.values("start", "step"), [0, 42]))


@clause("C2")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["mnist", "gpt"])
def test_data_that_were_moved_are_the_same(check, world, runs, first, name):
    """From one file system to another, which is a quicker one, or purges."""
    case, folder = anchors.CASES[name], runs.folder(first, f"moved-{name}")
    places = [runs.root / f"{where}-{name}" for where in ("first", "then")]
    world.on_rank_0(lambda: [bool(case.rows(data)) for data in places])
    for epochs, data in enumerate(places, 1):
        done(check, world.train(first, folder, f"{case.flags.format(data=data)} --epochs {epochs} --steps-per-epoch 2"))


@clause("C3")
@only(sizes=(1, 2))
def test_a_schedule_of_one_s_own_is_laid_out_over_the_run(check, world, runs, first, own_file):
    """As cosine is: under other --epochs it would go on at another learning rate."""
    file, path = own_file("scheduled"), runs.folder(first, "scheduled")
    done(check, world.train(first, path, f"{file} --epochs 1"))
    expect_exit(check, world.train(first, path, f"{file} --epochs 2"), 5)


@clause("C3")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name, file", [("mnist", "train-images-idx3"), ("mnist", "t10k-labels-idx1"), ("gpt", "2.txt")])
def test_other_data_under_the_same_names_are_refused(check, world, runs, first, name, file):
    """The last byte of a file is another: of images behind the first megabyte, of held-out labels, of a second text."""
    case, data = anchors.CASES[name], runs.root / f"other-{file}"
    flags = f"{case.flags.format(data=data)} --epochs 1 --steps-per-epoch 1"

    def prepare() -> bool:
        case.rows(data)
        for path in data.glob("train-*"):
            head = 16 if "images" in path.name else 8
            raw, rows = path.read_bytes(), 1400
            path.write_bytes(raw[:4] + rows.to_bytes(4, "big") + raw[8:head] + raw[head:] * 15)
            path.write_bytes(path.read_bytes()[: head + rows * (784 if "images" in path.name else 1)])
        return True

    def change() -> bool:
        [path] = data.glob(f"{file}*")
        raw = path.read_bytes()
        return bool(path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1])))

    run_dir = runs.folder(first, f"other-{file}")
    world.on_rank_0(prepare)
    done(check, world.train(first, run_dir, flags))
    world.on_rank_0(change)
    refused = expect_exit(check, world.train(first, run_dir, flags), 5)
    check.equal(names_the_data=("data: " in "".join(refused.errors), True))


@clause("C3")
@only(sizes=(1,), devices=("cpu",))
def test_every_byte_of_data_up_to_a_gigabyte_counts(check):
    import torch
    from ddp_core import data

    larger = torch.zeros(2**30 + 2**21, dtype=torch.uint8)  # pages of it that nobody writes are one
    rows = larger[: 2**30]
    before, larger_before = data.digest([rows]), data.digest([larger])
    rows[2**29 + 3 * 2**19] = larger[-1] = 1  # in the middle of 64 MB, and the last one
    check.equal(equal=(data.digest([rows]) == before, False))
    check.equal(of_more_equal_though_the_last_byte_is_not=(data.digest([larger]) == larger_before, False))


@clause("C2")
@only(sizes=(1,), devices=("cpu",))
def test_a_snapshot_of_the_first_format_goes_on_to_its_own_losses(check, world, runs, first):
    """A version of before wrote it in mid-epoch, with AdamW's state, and noted what it came to."""
    folder, path = sites.ROOT / "core/tests/snapshots", runs.folder(first, "format-1")
    known = json.loads((folder / "format1.json").read_text())["adamw"]
    path.mkdir(parents=True)
    shutil.copy(folder / "format1-adamw.safetensors", path / SNAPSHOT)
    run = done(check, world.train(first, path, f"{known['flags']} --epochs 4"))
    begins, losses = run.values("start", "step")[0], [float.fromhex(loss) for loss in known["losses"]]
    check.equal(begins_in_mid_epoch=(10 < begins < 20, True), steps=(run.values("step", "step"), [*range(begins, len(losses))]))
    check.close(run.values("step", "loss"), losses[begins:], T1, "losses")


@clause("C4")
@only(sizes=(1, 2))
def test_a_damaged_snapshot_is_never_taken_for_none(check, world, own, runs):
    run, path = runs.train(own, FP64), runs.folder(own, "damaged")
    done(check, run)

    def damage(*names: str) -> None:
        for name in names:
            damaged_copy(run.folder / name, path / name)

    world.on_rank_0(lambda: [shutil.copytree(run.folder, path), damage(SNAPSHOT)])
    fell_back = done(check, world.train(own, path, FP64))
    check.equal(started_at_steps=(fell_back.values("start", "step"), [0, 28]), warns=("warning" in fell_back.output[0], True))
    prev, before = world.on_rank_0(lambda: [sha256(one / "snapshot.prev.safetensors") for one in (path, run.folder)])
    check.equal(snapshot_prev=(prev, before))
    world.on_rank_0(lambda: damage(SNAPSHOT))
    done(check, world.train(own, path, f"{FP64} --save-steps 7"))  # twice: the damaged one is moved away once
    step = world.on_rank_0(lambda: take_apart(path / "snapshot.prev.safetensors")["document"]["step"])
    check.equal(snapshot_prev_at_step=(step, 35))
    world.on_rank_0(lambda: damage(SNAPSHOT, "snapshot.prev.safetensors"))
    expect_exit(check, world.train(own, path, FP64), 5)


@clause("C4")
@only(sizes=(2,), devices=("cpu",))
def test_a_damaged_snapshot_is_not_dealt_out_in_parts(check, world, own, runs):
    """Each rank of a sharded run reads its rows alone, and all of them hear what is in them."""
    run, path = runs.train(own, FP64), runs.folder(own, "damaged-parts")
    done(check, run)
    world.on_rank_0(lambda: [path.mkdir(), damaged_copy(run.folder / SNAPSHOT, path / SNAPSHOT)])
    expect_exit(check, world.train(own, path, f"{FP64} --epochs 4 --sharding full"), 5)


@clause("S5")
@only(sizes=(1,))
def test_verify_tells_of_any_file_that_is_damaged(check, world, own, runs):
    run, path = runs.train(own, FP64), runs.folder(own, "verified")
    done(check, run)

    whole, damaged = run.folder / SNAPSHOT, path / "damaged.safetensors"

    def verify() -> list[int]:
        path.mkdir()
        damaged_copy(whole, damaged)
        return [verified(*files) for files in ([damaged, whole], [whole, damaged], [whole, whole])]

    check.equal(exit_codes=(world.on_rank_0(verify), [5, 5, 0]))
    before = run.folder / "snapshot.prev.safetensors"
    acts = [("diff", whole, before), ("diff", whole, whole), ("diff", whole, damaged), ("show", whole, before)]
    codes = [looked_at(*act) for act in acts]
    check.equal(exit_codes_of_diff_and_show=(codes, [1, 0, 5, 0]))


@clause("C4")
@only(sizes=(1, 2))
def test_a_snapshot_that_is_missing_or_of_a_newer_format(check, world, runs, first):
    run, run_dir = runs.train(first, FP64), runs.folder(first, "missing-or-newer")
    done(check, run)
    world.on_rank_0(lambda: [shutil.copytree(run.folder, run_dir), (run_dir / SNAPSHOT).unlink()])
    missing = done(check, world.train(first, run_dir, FP64))
    check.equal(started_at_steps=(missing.values("start", "step"), [0, 28]), warns=("warning" in missing.output[0], True))
    world.on_rank_0(lambda: [renumber(path) for path in run_dir.glob("snapshot*")])
    newer = expect_exit(check, world.train(first, run_dir, FP64), 5)
    check.equal(says_which_format=("format 3" in "".join(newer.errors), True))
    world.on_rank_0(lambda: [path.unlink() for path in run_dir.glob("snapshot*")])  # as a purged file system has it
    one_line(check, world.train(first, run_dir, FP64), 5, "restore a copy")


@clause("C4")
@only(sizes=(1,))
def test_a_document_that_is_damaged_counts_as_well(check, world, runs, first):
    """One digit of it is another, and the tensors are whole."""
    run, run_dir = runs.train(first, FP64), runs.folder(first, "damaged-document")
    done(check, run)
    shutil.copytree(run.folder, run_dir)
    raw = (run_dir / SNAPSHOT).read_bytes()
    other = raw.replace(rb"\"best\":[2,", rb"\"best\":[1,")
    check.equal(a_digit_is_another=(raw == other, False))
    (run_dir / SNAPSHOT).write_bytes(other)
    check.equal(verify=(verified(run_dir / SNAPSHOT), 5))
    again = done(check, world.train(first, run_dir, FP64))
    check.equal(started_at_steps=(again.values("start", "step"), [0, 28]))


@clause("S5")
@only(sizes=(1,))
def test_large_tensors_and_long_documents_are_whole(check, world, runs, first, train_own):
    """They are written and read in parts, of 16 MB say: what is at a part's end counts."""
    from ddp_core import background, record, run_directory, snapshot

    run = done(check, train_own("large", "--precision fp64 --steps-per-epoch 1 --global-batch-size 8"))
    parts = take_apart(run.folder / SNAPSHOT)
    check.equal(crc32=(parts["document"]["crc32"], parts["crc32"]))
    tensors, document = snapshot.read(run.folder / SNAPSHOT)
    history = [[epoch, *[(1 / (epoch + 1)).hex()] * 3] for epoch in range(300_000)]
    del document["document_crc32"]
    directory = run_directory.RunDirectory(runs.folder(first, "long-document"), "1")
    saver = background.Saver(directory, record.Record(time.monotonic()))
    saver.save(tensors, document | dict(history=history), best=False, snapshot=True)
    saver.settle()
    directory.release()
    check.equal(verify=(verified(run.folder / SNAPSHOT, directory.snapshot), 0))


@clause("C4")
@only(sizes=(1, 2))
def test_a_newer_format_is_refused_though_an_older_one_is_there(check, world, runs, first):
    run, run_dir = runs.train(first, FP64), runs.folder(first, "newer")
    done(check, run)
    world.on_rank_0(lambda: [shutil.copytree(run.folder, run_dir), renumber(run_dir / SNAPSHOT)])
    expect_exit(check, world.train(first, run_dir, FP64), 5)


@clause("C4")
@only(sizes=(1, 2))
def test_a_damaged_file_is_not_passed_over_for_an_older_set(check, world, runs, first):
    """Which another --max-shard-size has left: the file may be further, and what was before it is."""
    run, older, run_dir = runs.train(first, FP64), runs.folder(first, "older-set"), runs.folder(first, "file-and-set")
    done(check, run, world.train(first, older, f"{FP64} --epochs 1 {SETS}"))

    def put_together() -> bool:
        shutil.copytree(run.folder, run_dir)
        for path in older.glob("snapshot*"):
            shutil.copy(path, run_dir)
        return bool((run_dir / SNAPSHOT).write_bytes(b"garbage"))

    world.on_rank_0(put_together)
    again = done(check, world.train(first, run_dir, FP64))
    check.equal(goes_on_at_step=(again.values("start", "step")[-1], 28))


@clause("S13")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("newer", ["set", "file"])
def test_of_a_file_and_a_set_the_one_that_is_further_counts(check, world, runs, first, newer):
    """Both are whole: killed between the commit of one and the removal of the other."""
    one, of_set, run_dir = runs.train(first, FP64), runs.train(first, f"{FP64} {SETS}"), runs.folder(first, f"newer-{newer}")
    done(check, one, of_set)

    def put_together() -> None:
        prev = "snapshot.prev.safetensors"
        index, file = (SNAPSHOT, prev) if newer == "set" else (prev, SNAPSHOT)
        run_dir.mkdir()
        for path in of_set.folder.glob("snapshot-*"):
            shutil.copy(path, run_dir)
        shutil.copy(of_set.folder / f"{index}.index.json", run_dir / f"{SNAPSHOT}.index.json")
        shutil.copy(one.folder / file, run_dir / SNAPSHOT)

    world.on_rank_0(put_together)
    again = done(check, world.train(first, run_dir, FP64))
    check.equal(goes_on_at_step=(again.values("start", "step"), [42]))


@clause("C4")
@only(sizes=(1, 2), devices=("cpu",))
def test_the_files_of_a_damaged_index_are_not_swept_away(check, world, runs, first):
    """They are whole, and by hand the index can be mended. What no index names is removed when a snapshot is saved."""
    path, flags = runs.folder(first, "damaged-index"), f"--workload digits --steps-per-epoch 1 {SETS} --epochs"
    done(check, *(world.train(first, path, f"{flags} {epochs}") for epochs in (1, 2)))

    def damage() -> set[str]:
        index = path / f"{SNAPSHOT}.index.json"
        text = index.read_text()
        index.write_text(text[:-2])
        return {*json.loads(text)["weight_map"].values()}

    named = world.on_rank_0(damage)
    run = done(check, world.train(first, path, f"{flags} 4"))
    check.equal(started_at_steps=(run.values("start", "step"), [0, 1, 1]))
    check.equal(files_lost=(sorted(name for name in named if not (path / name).exists()), []))


@clause("C4")
@only(sizes=(1,), devices=("cpu",))
def test_memory_that_does_not_suffice_to_read_a_snapshot_is_no_damage(check, world, runs, first, own_file):
    """In its place the one before would be gone on with, and the run's last epoch be lost."""
    flags, run_dir = own_file("lacks_memory_to_read"), runs.folder(first, "no-memory-to-read")
    done(check, world.train(first, run_dir, f"{flags} --steps-per-epoch 2 --epochs 2"))
    names = [SNAPSHOT, "snapshot.prev.safetensors", "best.safetensors"]
    before = [sha256(run_dir / name) for name in names]
    expect_exit(check, world.train(first, run_dir, f"{flags} --steps-per-epoch 2 --epochs 4", apart=True), 7)
    check.equal(files=([sha256(run_dir / name) for name in names], before))


SENSELESS = {
    "an empty history": dict(history=[]),
    "a step of another epoch": dict(step=41),
    "a sum that is no number": dict(epoch_loss_sum="nan"),
    "a problem that a terminal would obey": dict(problem={"clip_norm": "\x1b[2J\n" * 2000}),
    "numbers that no optimizer keeps": dict(numbers=[{"params": 1}, {}]),
}


@clause("X22")
@only(sizes=(1, 2))
@pytest.mark.parametrize("what", [*SENSELESS, "a pipe"])
def test_a_whole_snapshot_that_makes_no_sense(check, world, runs, first, what):
    run, run_dir = runs.train(first, FP64), runs.folder(first, f"senseless-{what.replace(' ', '-')}")
    done(check, run)

    def write() -> bool:
        from ddp_core import snapshot

        run_dir.mkdir(parents=True)
        if what == "a pipe":
            os.mkfifo(run_dir / SNAPSHOT)
            return True
        tensors, document = snapshot.read(run.folder / SNAPSHOT)
        del document["document_crc32"]
        snapshot.write(run_dir / SNAPSHOT, tensors, document | SENSELESS[what])
        return True

    world.on_rank_0(write)
    refused = world.train(first, run_dir, FP64)
    one_line(check, refused, 5, SNAPSHOT)
    text = "".join(refused.error_lines)
    check.equal(printable_and_short=(text.isprintable() and len(text) < 5000, True))


@clause("C5", "S7")
@only(sizes=(2,), mpi=False, devices=("cpu",))
def test_killed_and_resumed_is_bitwise_as_never_killed(check, world, own, runs):
    """SIGKILL to all ranks when the first epoch's snapshot is durable, be the disk slow: a crash, a lost node."""
    flags, an_epoch = long(world, epochs=3)
    never, run_dir = runs.train(own, flags), runs.folder(own, "killed")
    killed = world.train(own, run_dir, flags, kill_ranks=tuple(range(world.size)), kill_at='"kind":"snapshot"')
    expect_exit(check["C5"], killed, 137)
    at_hand = world.on_rank_0(lambda: [take_apart(path)["document"]["step"] for path in run_dir.glob("snapshot*")])
    check["S7"].equal(a_whole_snapshot=(bool(at_hand), True))
    resumed = world.train(own, run_dir, flags)
    done(check["C5"], never, resumed)
    check["C5"].equal(went_on_from_an_epoch=(resumed.values("start", "step")[-1] >= an_epoch, True))
    same_as_never_stopped(check["C5"], world, resumed, never)


@clause("C5")
@only(sizes=(1,), devices=("cpu",))
def test_the_last_snapshot_is_waited_for_where_a_file_system_lags(check, runs, first, monkeypatch):
    """Another node has saved it, and this one is shown the file of before for a while. The log knows of both."""
    from ddp_core import run_directory

    run, path = runs.train(first, FP64), runs.folder(first, "lags")
    done(check, run)
    shutil.copytree(run.folder, path)
    late, newest, before = path / "late", path / SNAPSHOT, path / "snapshot.prev.safetensors"
    newest.rename(late)
    shutil.copy(before, newest)
    monkeypatch.setattr(run_directory, "LAG", 5.0)
    directory = run_directory.RunDirectory(path, "1")
    threading.Timer(0.3, late.replace, [newest]).start()
    _, document = directory.load()
    directory.release()
    check.equal(goes_on_at_step=(document["step"], 42))


@clause("L1")
@only(sizes=(1, 2), mpi=False, devices=("cpu",))
def test_a_run_that_was_killed_has_its_steps_on_record(check, world, train_own):
    """Killed once a step is in the file: it is there long before the epoch ends."""
    all_ranks = tuple(range(world.size))
    killed = train_own("slow_steps", "--steps-per-epoch 14", kill_ranks=all_ranks, kill_at='"kind":"step"')
    expect_exit(check, killed, 137)
    text = world.on_rank_0((killed.folder / "run.jsonl").read_text)
    check.equal(ends_with_a_whole_line=(text.endswith("\n"), True), epochs=(text.count('"kind":"epoch"'), 0))


@clause("L1")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("length", [12, 200_000])
def test_half_a_line_that_a_killed_writer_has_left_is_taken_away(check, tmp_path, length):
    """The core's own Record: else the next line of a run's log is a part of it."""
    from ddp_core.record import Record

    (tmp_path / LOG).write_text('{"kind":"step","step":0}\n' + '{"kind":"start'.ljust(length, "-"))
    record = Record(time.monotonic())
    record.open(tmp_path / LOG)
    record.write("step", step=1)
    lines = (tmp_path / LOG).read_text().split("\n")
    check.equal(lines=(lines, ['{"kind":"step","step":0}', '{"kind":"step","step":1}', ""]))


@clause("S6", "S7")
@only(sizes=(1,), mpi=False, devices=("cpu",))
def test_killed_in_the_middle_of_a_snapshot(check, world, own, runs):
    """When 100 kB of the second snapshot are written, of 300: the first stands as it was, and the next start clears up."""
    path, flags = runs.folder(own, "killed-in-the-middle"), "--precision fp64 --eval-every 3"
    done(check["S7"], world.train(own, path, f"{flags} --epochs 1"))
    before = world.on_rank_0(lambda: sha256(path / SNAPSHOT))
    killed = world.train(own, path, f"{flags} --epochs 3", kill_ranks=(0,), largest_file=100_000)
    expect_exit(check["S7"], killed, 128 + signal.SIGXFSZ)
    check["S7"].equal(snapshot=(world.on_rank_0(lambda: sha256(path / SNAPSHOT)), before))
    done(check["S7"], world.train(own, path, f"{flags} --epochs 1"))  # which has nothing to do
    check["S6"].equal(left_behind=(world.on_rank_0(lambda: [one.name for one in path.glob(".*")]), []))


@clause("C6")
@only(devices=("cuda", "xpu"))
def test_from_cpu_to_accelerator_and_back(check, world, own, runs):
    from conformance.harness.world import World

    on_cpu = World(world.comm)
    path = runs.folder(own, "crossing")
    for epochs, where in enumerate((on_cpu, world, on_cpu), 1):
        run = done(check, where.train(own, path, f"{FP64[:-1]}{epochs}"))
    check.equal(started_at_steps=(run.values("start", "step"), [0, 14, 28]))
    check.close(run.losses, golden.load()["losses"], T1)


@clause("C7")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_all_that_is_drawn_and_kept_survives_a_stop(check, world, runs, first, precision):
    flags, an_epoch = long(world, ALL)
    flags += f" --precision {precision}"
    never, path = runs.train(first, flags), runs.folder(first, f"stopped-{precision}")
    expect_exit(check, world.train(first, path, runs.filled(flags), signal_rank=0), 75)
    step = world.on_rank_0(lambda: take_apart(path / SNAPSHOT)["document"]["step"])
    resumed = world.train(first, path, runs.filled(flags))
    done(check, never, resumed)
    check.equal(stopped_in_mid_epoch=(step % an_epoch != 0, True))
    same_as_never_stopped(check, world, resumed, never)


@clause("C7")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["counts", "by_sevens", "frozen", "experts"])
def test_what_an_optimizer_keeps_is_kept(check, world, runs, first, own_file, name):
    """Plain numbers of a parameter or a group; nothing of a parameter that is frozen, or that no row has asked for."""
    file, path = own_file(name), runs.folder(first, f"{name}-resumed")
    never = world.train(first, runs.folder(first, name), f"{file} --epochs 2")
    done(check, never, world.train(first, path, f"{file} --epochs 1"))
    resumed = done(check, world.train(first, path, f"{file} --epochs 2"))
    check.equal(losses=(resumed.values("step", "loss_hex"), never.values("step", "loss_hex")))


@clause("C7")
@only(sizes=(1, 2))
def test_the_scale_of_the_loss_goes_on_where_it_was(check, world, runs, first, own_file):
    """Stopped when all steps were skipped, which overflowed under fp16's first scales, and again when some were not."""
    flags = f"{own_file('loud')} --precision fp16 --steps-per-epoch 2"
    never, path = world.train(first, runs.folder(first, "loud"), f"{flags} --epochs 8"), runs.folder(first, "loud-resumed")
    resumed = [world.train(first, path, f"{flags} --epochs {epochs}") for epochs in (1, 6, 8)]
    done(check, never, *resumed)
    scales = world.on_rank_0(lambda: [take_apart(run.folder / SNAPSHOT)["document"]["scale"] for run in (never, resumed[-1])])
    check.equal(scale_and_steps_since=(scales[1], scales[0]), some_steps_were_not_skipped=(scales[0][1] > 3, True))
    same_as_never_stopped(check, world, resumed[-1], never)


class Makes:
    """Whoever unpickles it makes the folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.folder,)


# What an optimizer keeps of a parameter, by torch's names, and those of a snapshot.
MOMENTS = {"sgd": dict(momentum_buffer="momentum"), "adamw": dict(exp_avg="mean", exp_avg_sq="square", step="step")}


@clause("C2")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("optimizer", MOMENTS)
def test_a_checkpoint_of_a_published_example_goes_on(check, world, runs, first, own_file, optimizer):
    """With its momentum. One of its layers has the name of DDP's prefix, and its rows are drawn."""
    import torch
    from ddp_core import convert
    from safetensors.torch import load_file

    flags = f"{own_file('has_a_module')} --precision fp64 --optimizer {optimizer}"
    path = runs.folder(first, f"converted-{optimizer}")
    folders = [runs.folder(first, f"to-convert-{optimizer}-{epochs}") for epochs in (1, 2)]
    half, whole = done(check, *(world.train(first, folder, f"{flags} --epochs {folder.name[-1]}") for folder in folders))
    tensors, names = load_file(half.folder / SNAPSHOT), ["module.weight", "module.bias", "head.weight", "head.bias"]
    moments = MOMENTS[optimizer].items()
    states = [{theirs: tensors[f"optim.{ours}.{name}"] for theirs, ours in moments} for name in names]
    state = dict(state=dict(enumerate(states)), param_groups=[dict(params=[*range(len(names))])])
    model = {name: tensors[f"model.{name}"] for name in names}
    old, harmful, made = (half.folder / name for name in ("old.pt", "harmful.pt", "made"))
    torch.save(dict(model_state=model, optimizer_state_dict=state, epoch=0), old)
    torch.save(dict(model_state=model, further=Makes(made), epoch=0), harmful)
    command = [sys.executable, "-m", "ddp_core.snapshot", "convert", old, "--run-dir", path, *flags.split()]
    converted = subprocess.run(command, capture_output=True, text=True, check=False)
    code = 0 if torch.__version__ >= (2, 10) else 3  # whose unpickler is not safe
    check.equal(exit_code_and_error=((converted.returncode, converted.stderr if not code else ""), (code, "")))
    if not code:
        before = sha256(path / SNAPSHOT)
        outcomes = {}
        for name, file, folder, *more in (
            ("again", old, path),
            ("harmful", harmful, path.with_name(f"harmful-{optimizer}")),
            ("of another step", old, other := path.with_name(f"other-{optimizer}"), "--epochs-run", "2"),
        ):
            outcomes[name] = convert.main(["convert", str(file), "--run-dir", str(folder), *more, *flags.split()])
        check.equal(exit_codes=(outcomes, {"again": 3, "harmful": 5, "of another step": 0}), made=(made.exists(), False))
        check.equal(snapshot_that_was_there=(sha256(path / SNAPSHOT), before))
        kept = {name: bool(tensor.any()) for name, tensor in load_file(other / SNAPSHOT).items() if "step." not in name}
        wrong = [name for name, some in kept.items() if name.startswith("optim.") and some is (optimizer == "adamw")]
        check.equal(moments_of_another_step=(wrong, []))
        run = done(check, world.train(first, path, f"{flags} --epochs 2"))
        check.close(run.losses, whole.losses[len(half.losses) :], T1)


@clause("C2")
@only(sizes=(1, 2))
def test_flags_of_any_make_are_the_same_ones(check, world, runs, first, own_file):
    """A tuple, a path and a table, which a file gives back as a list, a text, and a table of texts; and a set."""
    file, path = own_file("flags_of_any_make"), runs.folder(first, "flags-of-any-make")
    _, run = done(check, *(world.train(first, path, f"{file} --steps-per-epoch 2 --epochs {epochs}") for epochs in (1, 2)))
    kinds = [config["kinds"] for config in run.values("start", "config")]
    check.equal(kinds=(kinds, [f"{{{', '.join(map(repr, 'abcdefgh'))}}}"] * 2))


@clause("C3")
@only(sizes=(1, 2))
def test_another_workload_file_than_before_is_noted(check, world, runs, first, own_file):
    """Its data and flags are the same, and its loss need not be."""
    file, path = own_file("changed"), runs.folder(first, "another-file")
    names = ("changed.py", "beside_it.py", "package/part.py")
    changed, beside, part = (runs.root / "workloads" / name for name in names)

    def write() -> None:
        changed.open("a").write("\nimport beside_it, package\n")
        part.parent.mkdir()
        for path, text in {beside: "ONE = 1\n", part.with_name("__init__.py"): "from . import part\n", part: ""}.items():
            path.write_text(text)

    world.on_rank_0(write)
    noted = []
    for epochs, next_to_change in enumerate((None, beside, None, part, changed, None), 1):
        run = done(check, world.train(first, path, f"{file} --epochs {epochs}"))
        noted.append(any("has changed since" in note for note in run.of("start")[-1]["notes"]))
        if next_to_change:
            world.on_rank_0(lambda one=next_to_change: one.open("a").write("# another\n"))
    check.equal(noted=(noted, [False, False, True, False, True, True]))


@clause("L14")
@only(sizes=(1, 2))
def test_parts_of_the_loss_have_their_names(check, train_own):
    """In whichever order a batch has them."""
    run = done(check, train_own("parts", "--precision fp64"))
    parts = [step["losses"] for step in run.of("step")]
    check.equal(part_that_is_1_a_row=({losses["one"] for losses in parts}, {1.0}))
    check.equal(held_out=(run.values("epoch", "eval_loss_one"), [1.0]))
    check.equal(in_the_table_at_the_end=(re.findall(r"held-out loss, one\W+(\S+)", run.output[0]), ["1"]))


@clause("L21")
@only(sizes=(1, 2))
def test_each_group_of_parameters_has_its_own_rate(check, world, train_own):
    run = done(check, train_own("rates"))
    sums = world.on_rank_0(lambda: take_apart(run.folder / SNAPSHOT)["crc32"])
    zeros = [sums[f"model.{name}"] == zlib.crc32(bytes(4 * count)) for name, count in (("0.bias", 256), ("2.bias", 10))]
    check.equal(biases_that_are_zero=(zeros, [True, True]), loss_falls=(run.losses[-1] < run.losses[0], True))


@clause("C8")
@only(sizes=(1,))
def test_losses_below_zero_are_as_good_as_others(check, world, runs, first, own_file):
    """Killed in mid-epoch: the snapshot has the sum of an epoch's losses so far."""
    flags, an_epoch = long(world, own_file("below_zero"), epochs=1)
    flags, path = f"{flags} --save-steps {an_epoch // 5}", runs.folder(first, "below-zero")
    words = f'"kind":"snapshot","step":{2 * (an_epoch // 5)}'
    expect_exit(check, world.train(first, path, flags, kill_ranks=(0,), kill_at=words), 137)
    resumed = done(check, world.train(first, path, flags))
    check.equal(all_below_zero=(max(resumed.losses) < 0, True))
    check.equal(went_on_in_mid_epoch=(0 < resumed.values("start", "step")[-1] < an_epoch, True))


@clause("C8")
@only(sizes=(2,), devices=("cpu",))
def test_killed_between_epochs_it_goes_on_from_its_last_step_saved(check, world, runs, first):
    flags, an_epoch = long(world, ALL)
    flags += f" --save-steps {an_epoch // 5}"
    never, path = runs.train(first, flags), runs.folder(first, "killed-in-mid-epoch")
    words = f'"kind":"snapshot","step":{2 * (an_epoch // 5)}'
    killed = world.train(first, path, runs.filled(flags), kill_ranks=tuple(range(world.size)), kill_at=words)
    expect_exit(check, killed, 137)
    resumed = world.train(first, path, runs.filled(flags))
    done(check, never, resumed)
    check.equal(went_on_in_mid_epoch=(0 < resumed.values("start", "step")[-1] < an_epoch, True))
    same_as_never_stopped(check, world, resumed, never)


@clause("C8")
def test_it_saves_every_so_many_minutes(check, world, runs, first, train_own):
    flags, an_epoch = long(world, DRAWS)
    run = done(check, runs.train(first, f"{flags} --save-minutes 0.0005"))
    between_epochs = [step for step in run.values("snapshot", "step") if step % an_epoch]
    check.equal(saves_between_epochs=(bool(between_epochs), True))
    plain = runs.train(first, FP64)
    check.equal(save_minutes_by_default=(plain.values("start", "config")[0]["save_minutes"], 10))
    slow = train_own("slow_steps", "--save-minutes 0.5 --steps-per-epoch 14")  # of 1.4 s
    check.equal(saves_in_a_second=(slow.values("snapshot", "step"), [14]))


@clause("C8")
@only(sizes=(1, 2), devices=("cpu",))
def test_the_best_model_is_no_snapshot_that_was_due(check, train_own):
    """It is saved at the end of every epoch, which takes a tenth of the minutes."""
    flags = "--steps-per-epoch 2 --lr 0.005 --epochs 40 --save-every 999 --save-minutes 0.015"
    run = done(check, train_own("always_better", flags))
    check.equal(saves_before_the_end=(len(run.of("snapshot")) > 2, True))
    most = run.values("end", "seconds")[-1]["training"] / 0.9 + 2
    check.equal(saves_beyond_one_in_so_many_minutes=(max(0, len(run.of("snapshot")) - int(most)), 0))


@clause("C8")
@only(sizes=(1,))
def test_a_save_may_be_due_at_the_end_of_an_epoch(check, runs, first):
    """That is neither evaluated nor saved for itself."""
    run = done(check, runs.train(first, f"{FP64} --save-steps 14 --save-every 99 --eval-every 99"))
    check.equal(snapshots=(run.values("snapshot", "step"), [14, 28, 42]))


@clause("C9")
@only(sizes=(1, 2), mpi="restart")
def test_only_a_job_s_first_start_begins_anew(check, world, launch, runs):
    """--new-run-dir is how job scripts name a run directory; what the launcher tells of earlier starts decides."""
    run_dir, of_job = runs.folder(launch, "of-a-job"), dict(run_dir="--new-run-dir")
    done(check, world.train(launch, run_dir, SHORT, **of_job))
    before = world.on_rank_0(lambda: sha256(run_dir / SNAPSHOT))
    one_line(check, world.train(launch, run_dir, SHORT, **of_job), 3, "--run-dir")
    check.equal(snapshot=(world.on_rank_0(lambda: sha256(run_dir / SNAPSHOT)), before))
    again = done(check, world.train(launch, run_dir, f"{SHORT} --epochs 2 --fresh", restart=1, **of_job))
    check.equal(started_at_steps=(again.values("start", "step"), [0, 1]))
    check.equal(restarts=(again.values("start", "restart"), [0, 1]))
    older = world.on_rank_0(lambda: sha256(run_dir / SNAPSHOT))
    fresh = done(check, world.train(launch, run_dir, f"{SHORT} --fresh", **of_job))
    aside = world.on_rank_0(lambda: [sha256(path) for path in run_dir.glob(f"old-*/{SNAPSHOT}")])
    previous = "snapshot.prev.safetensors"
    before = world.on_rank_0(lambda: [(run_dir / previous).exists(), any(run_dir.glob(f"old-*/{previous}"))])
    check.equal(moved_aside=(older in aside, True), the_one_before_is_there_and_aside=(before, [False, True]))
    check.equal(started_at_steps=(fresh.values("start", "step"), [0]))


@clause("C9")
@only(sizes=(1,), devices=("cpu",))
def test_a_job_script_finds_the_run_where_it_is(check, world, runs, first, own_file):
    """Of its own flag and the user's, the user's counts. A run of a user's own file has its name."""
    path, found, should_be = runs.folder(first, "find-run"), [], []
    for run_dir in ("", own_file("prints"), "--new-run-dir of-job", "--new-run-dir of-that-job --run-dir of-user"):
        flags = f"{SHORT} {run_dir}"
        done(check, world.train(first, path, f"--device cpu {flags}", bare=True))
        (log,) = {*path.rglob(LOG)} - {path / run / LOG for run in should_be}
        should_be.append(str(log.parent.relative_to(path)))
        command = [sys.executable, "-m", "ddp_core.find_run", *flags.split()]
        found.append(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip())
    check.equal(found=(found, should_be), of_user=(should_be[-1], "of-user"))


@clause("C9")
@only(sizes=(1,))
def test_a_job_that_is_started_again_in_vain_ends(check, world, runs, first, own_file):
    """Its starts fail before they have saved, as by a step that takes more memory than there is."""
    path, flags = runs.folder(first, "in-vain"), f"{own_file('fails_alone_in_a_step')} --epochs 1"
    codes = [world.train(first, path, flags, restart=restart).exit_codes for restart in range(3)]
    check.equal(exit_codes=(codes, [[2]] * 3))
    one_line(check, world.train(first, path, flags, restart=3), 3, "saved nothing")
    log = path / LOG  # as if they had been stopped, each in an evaluation that takes longer than it had
    world.on_rank_0(lambda: log.write_text(log.read_text().replace('"exit_code":2', '"exit_code":75')))
    check.equal(exit_code_after_stops=(world.train(first, path, flags, restart=3).exit_codes, [2]))


@clause("C10")
@only(sizes=(2, 4), devices=("cpu",))
@pytest.mark.parametrize("flags", ["", " --offload"], ids=["", "offload"])
def test_sharded_training_has_the_golden_losses(check, runs, first, flags):
    run = done(check, runs.train(first, f"{SHARDED}{flags}"))
    check.equal(reduction=(run.values("start", "reduction"), ["sharded"]))
    check.close(run.losses, golden.load()["losses"], T1)
    check.close(run.values("epoch", "eval_loss"), golden.load()["eval_losses"], T1, "held-out losses")


@clause("C10")
@only(sizes=(2,), devices=("cpu",))
def test_parts_are_kept_on_the_host_where_that_is_asked_for(check, train_own):
    """A stand-in for fully_shard tells of it."""
    for flags, place in (("", "the device"), (" --offload", "the host")):
        run = done(check, train_own("tells_when_sharded", f"--steps-per-epoch 1 --sharding full{flags}", apart=True))
        check.equal(places=({*re.findall(r"kept on (.*)", "\n".join(run.output))}, {place}))


@clause("C10")
@only(sizes=(2,), devices=("cpu",))
def test_sharded_models_have_numbers_that_no_snapshot_has(check, train_own):
    sharded, whole = done(check, *(train_own("masked", f"--precision fp64 {flags}") for flags in ("--sharding full", "")))
    check.close(sharded.losses, whole.losses, T1)


@clause("C10", "L20")
@only(sizes=(2,), devices=("cpu",))
def test_sharded_modules_are_given_what_whole_ones_are(check, train_own):
    """Rows as they are, under bf16, too. One that changes a view, which a unit returned, in place learns as it does whole."""
    rounded = done(check["L20"], train_own("looks_inside", "--precision bf16 --sharding full --steps-per-epoch 2"))
    check["L20"].equal(rounded_rows=("rounded rows" in "".join(rounded.output), False))
    runs = [train_own("looks_inside", f"--precision fp64 --steps-per-epoch 5 {flags}") for flags in ("", "--sharding full")]
    done(check["C10"], *runs)
    for name in ("loss", "grad_norm"):
        check["C10"].close(*(run.values("step", name) for run in runs[::-1]), T1, name)


@clause("C10")
@only(sizes=(2, 4), devices=("cpu",))
def test_sharded_gradients_are_clipped_by_the_norm_of_all(check, runs, first):
    sharded, whole = done(check, *(runs.train(first, f"{flags} --clip-norm 0.5") for flags in (SHARDED, FP64)))
    check.close(sharded.values("step", "grad_norm"), whole.values("step", "grad_norm"), T1, "norms")
    check.close(sharded.losses, whole.losses, T1)
    check.equal(clipped=(max(whole.values("step", "grad_norm")) > 0.5, True))


@clause("C10")
@only(sizes=(2,), devices=("cpu",))
def test_sharded_gradients_are_summed_in_fp32(check, train_own):
    """Under bf16, too: one rank's is 2048 times as large as the other's, and both are exact."""
    run = done(check, train_own("large_and_small", "--precision bf16 --sharding full"))
    check.close(run.values("step", "grad_norm"), [(16 + 1 / 128) / 64], 1e-5, "the norm")


@clause("C10")
@only(sizes=(4,), devices=("cpu",))
def test_nodes_that_all_have_the_whole_model_clip_by_its_norm(check, world, runs, first):
    flags = f"{FP64} --clip-norm 0.5"
    hybrid, whole = world.train(first, runs.folder(first, "hybrid"), f"{flags} --sharding hybrid", 2), runs.train(first, flags)
    done(check, hybrid, whole)
    check.close(hybrid.values("step", "grad_norm"), whole.values("step", "grad_norm"), T1, "norms")
    check.close(hybrid.losses, whole.losses, T1)


@clause("C11")
@only(sizes=(2, 4), devices=("cpu",))
def test_from_whole_models_to_parts_and_back(check, world, runs, first):
    path = runs.folder(first, "parts")
    for epochs, flags in enumerate(("", "--sharding full", ""), 1):
        run = done(check, world.train(first, path, f"{FP64[:-1]}{epochs} {flags}"))
    check.equal(reductions=(run.values("start", "reduction"), ["ddp", "sharded", "ddp"]))
    check.close(run.losses, golden.load()["losses"], T1)


@clause("C11")
@only(sizes=(2,), devices=("cpu",))
def test_parts_go_on_with_all_of_the_optimizer(check, world, runs, first):
    """AdamW has a number of steps of each parameter, too, which is nobody's part."""
    flags = f"{FP64} --optimizer adamw --lr 0.01"
    never, path = runs.train(first, flags), runs.folder(first, "parts-adamw")
    for epochs in (1, 3):
        run = world.train(first, path, f"{flags} --epochs {epochs} --sharding full")
        done(check, never, run)
    check.close(run.losses, never.losses, T1)


@clause("C12")
@only(sizes=(2, 4), devices=("cpu",))
def test_the_snapshot_of_parts_is_everybody_s(check, world, runs, first):
    done(check, *(run := [runs.train(first, flags) for flags in (SHARDED, FP64)]))
    parts, whole = world.on_rank_0(lambda: [take_apart(one.folder / SNAPSHOT) for one in run])
    check.equal(keys=(parts["keys"], whole["keys"]), tensors=(parts["tensors"], whole["tensors"]))
    differ = {key for key in whole["document"] if parts["document"].get(key) != whole["document"][key]}
    check.equal(differ=(differ - {"crc32", "document_crc32", "epoch_loss_sum", "history", "best"}, set()))


# ---- errors -------------------------------------------------------------------------------------------------------


@clause("X3")
def test_a_mistyped_flag_is_one_line(check, world, own, runs):
    run = world.train(own, runs.folder(own, "mistyped"), MISTYPED)
    one_line(check, run, 2, "--epochs", run.lines)


# Each with the words that name it.
NONSENSE = {"--lr 0": "--lr", "--lr nan": "--lr", "--precision fp8": "--precision", "--timeout 0": "--timeout"}
NONSENSE |= {"--epoch 3": "--epoch", "--width 3": "--width", "--shards 8": "--shards", "--accumulate 7": "--accumulate 7"}
NONSENSE |= {"--sharding full --offload --precision fp16": "--offload", "--offload": "--offload"}
NONSENSE |= {"--log-every 0": "--log-every", "--global-batch-size 5000": "--global-batch-size 5000"}


@clause("X3")
@only(sizes=(1, 2))
def test_flags_that_make_no_sense_are_one_line(check, world, runs, first):
    outcomes = {}
    for flags, words in NONSENSE.items():
        run = world.train(first, runs.folder(first, "nonsense"), f"{SHORT} {flags}")
        outcomes[flags] = (sorted({*run.exit_codes}), len(run.lines), words in "".join(run.lines))
    check.equal(exit_codes_lines_and_words=(outcomes, dict.fromkeys(NONSENSE, ([2], 1, True))))


DEFAULTS = dict(epochs=10, lr=0.01, momentum=0.9, weight_decay=0.0, seed=0, precision="fp32", accumulate=1, log_every=10)
DEFAULTS |= dict(save_every=1, save_minutes=10.0, save_steps=0, eval_every=1, timeout=600.0, rendezvous_timeout=120.0)
DEFAULTS |= dict(log_seconds=30.0, grace=0.0, clip_norm=0.0, warmup_steps=0, steps_per_epoch=0, workers=0, profile=0)
DEFAULTS |= dict(max_shard_size=2 * 10**9, device="auto", backend="auto", reduction="ddp", sharding="none", stage_data="on")
DEFAULTS |= dict(optimizer="sgd", lr_schedule="constant", row_seeds="on", global_batch_size=96)


@clause("X3")
@only(sizes=(1,))
def test_what_is_not_passed_is_as_help_says(check, tmp_path):
    """For a workload that brings no default of its own."""
    file = tmp_path / "plain.py"
    file.write_text("from ddp_core.workloads.digits import Digits\n\nclass Plain(Digits):\n    defaults = {}\n")
    from ddp_core import config

    found = config.parse([], 1, workload=config.choose(["--workload", str(file)]))
    check.equal(defaults=({name: getattr(found, name) for name in DEFAULTS}, DEFAULTS))


@clause("X5")
@only(sizes=(2,))
@pytest.mark.parametrize("copy", ["has_an_empty_line", "has_other_flags"])
def test_ranks_with_different_files_of_one_name(check, world, runs, first, copy):
    """A stale copy on one node."""
    file, text, flags = runs.root / copy / "noisy.py", NOISY_FILE.read_text(), "    def flags(self, add):\n"
    further = f'{flags}        add("--further", type=int, default=0, help="of this copy alone")\n'
    text = text.replace(flags, further) if copy == "has_other_flags" else f"{text}\n"
    world.on_rank_0(lambda: [file.parent.mkdir(), file.write_text(text)])
    flags = runs.filled(f"{NOISY} --steps-per-epoch 1")
    run = world.train(first, runs.folder(first, copy), flags, odd_flags=f"--workload {file}")
    expect_exit(check, run, 4)
    lines = [line for line in run.error_lines if "workload_file=" in line and "on rank 1" in line]
    check.equal(lines_that_name_the_file=(len(lines), 1))


OTHERS_OF_A_RANK = [
    "other_data",
    "other_rows",
    "other_mappings",
    "other_objects",
    "other_texts",
    "other_arrays",
    "other_held_out",
]


@clause("X5")
@only(sizes=(2,))
@pytest.mark.parametrize("name", OTHERS_OF_A_RANK)
def test_ranks_with_different_data(check, train_own, name):
    run = expect_exit(check, train_own(name), 4)
    lines = [line for line in run.error_lines if "data=" in line and "on rank 1" in line]
    on_its_node = f"(rank 1 is on {socket.gethostname()})" in "".join(lines)
    check.equal(lines_that_name_the_data=(len(lines), 1), and_the_node=(on_its_node, True))


@clause("X12")
@only(sizes=(2,))
def test_what_one_rank_alone_lacks_is_told_once(check, world, runs, first):
    """Its node does not see the data, which rank 0's does."""
    data = runs.root / "data-seen-by-rank-0"
    world.on_rank_0(lambda: bool(anchors.mnist_rows(data)))
    flags = f"--workload mnist --epochs 1 --global-batch-size 24 --data-dir {data}"
    run = world.train(first, runs.folder(first, "lacking"), flags, odd_flags="--data-dir /nowhere")
    one_line(check, run, 3, "rank 1: --data-dir /nowhere", run.lines)


@clause("X12")
@only(sizes=(1,))
def test_files_of_data_that_do_not_fit_each_other(check, world, runs, first):
    """Of mnist a label is missing, as the head of its file says."""
    data = runs.root / "a-label-too-few"
    anchors.mnist_rows(data)
    labels = data / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:4] + (95).to_bytes(4, "big") + labels.read_bytes()[8:-1])
    flags = f"--workload mnist --epochs 1 --global-batch-size 24 --data-dir {data}"
    one_line(check, world.train(first, runs.folder(first, "misfit"), flags), 3, "train is (96, 28, 28), 95 labels")


@clause("X12")
@only(sizes=(2,))
def test_what_fails_on_one_rank_alone_is_told_by_it_alone(check, train_own):
    run = train_own("fails_alone")
    lines = [line for line in run.lines if "the sky is falling" in line]
    check.equal(exit_codes=(len(set(run.exit_codes) - {0}), 1))
    check.equal(lines=(len(lines), 1), names_the_line=("line " in "".join(lines), True))


@clause("X12")
@only(sizes=(2,))
@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_ends_all_with_its_code(check, train_own, rank):
    """Of a job's codes the launcher takes the highest: 7 would have it started again, to fail again."""
    run = expect_exit(check, train_own("fails_alone_in_a_step", f"--of-rank {rank}", apart=True), 2)
    check.equal(recorded=([record["exit_code"] for record in run.of("end")], [2]))


@clause("X12")
@only(sizes=(2,), devices=("cpu",))
def test_a_rank_that_comes_late_hears_why_all_end(check, world, train_own):
    """By its exit code, too: of those of a job's ranks the launcher takes the highest."""
    late = dict(LATE="3") if world.rank == world.size - 1 else {}
    expect_exit(check, train_own("no_rows", environ=late, apart=True), 2)


@clause("X5")
@only(sizes=(2,))
def test_ranks_that_were_told_differently(check, world, own, runs):
    run = expect_exit(check, world.train(own, runs.folder(own, "odd"), SHORT, odd_flags="--lr 0.2"), 4)
    words = f"lr=0.2 on rank {world.size - 1}, but 0.1 on rank 0"
    check.equal(says=(words if words in "".join(run.errors) else run.errors, words))


@clause("X6")
def test_a_loss_that_is_not_finite(check, world, own, runs):
    path = runs.folder(own, "not-finite")
    run = expect_exit(check, world.train(own, path, "--workload regression --lr 1000"), 6)
    check.equal(names_the_step=("at step" in "".join(run.errors), True))
    check.equal(every_recorded_loss_is_finite=(bool(np.isfinite(run.losses).all()), True))


@clause("X6")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["overflows", "overflows_on_rank_1", "steep", "steep_unfused"])
def test_numbers_that_are_not_finite_reach_no_parameter(check, world, train_own, name):
    """Of the steps that are trained before it is found out none may use them: the workload looks at its own parameters."""
    run = expect_exit(check, train_own(name), 6)
    seen = [text for text in run.output if "parameters are not finite" in text]
    check.equal(names_the_step=("at step 5 " in "".join(run.errors), True), seen_in_a_later_step=(bool(seen), False))
    rank = 1 % world.size if name == "overflows_on_rank_1" else 0
    row = f"rows [{reference.sample_order(0, 0, 1438)[5 * G + rank]}"
    check.equal(names_its_rows=(row in "".join(run.errors), True))


@clause("X6")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["overflows_early", "adds_infinity_early"])
def test_after_numbers_that_are_not_finite_no_parameter_changes(check, train_own, name):
    """In the steps that are trained before it is found out, whose own numbers are fine, or their gradients."""
    run = expect_exit(check, train_own(name), 6)
    sums = dict(re.findall(r"parameters at step (\d): (\S+)", run.output[0]))
    check.equal(of_step_4_and_later=({total for step, total in sums.items() if step >= "4"}, {sums.get("4")}))
    check.equal(changes_before=(sums.get("4") == sums.get("3"), False))


@clause("X6")
@only(sizes=(1, 2))
def test_gradients_that_are_never_finite_end_fp16_too(check, train_own):
    """It passes over steps, and halves the scale of the loss, as long as that may help."""
    expect_exit(check, train_own("always_steep", "--precision fp16 --epochs 3"), 6)


@clause("X6")
@only(sizes=(1, 2))
def test_a_held_out_loss_that_is_not_finite(check, world, train_own):
    run = expect_exit(check, train_own("unfit", "--steps-per-epoch 2"), 6)
    kept = world.on_rank_0(lambda: [path.name for path in run.folder.glob("*.safetensors")])
    check.equal(snapshots=(kept, []))


@clause("X11")
@only(sizes=(2,))
def test_replicas_that_differ_leave_no_snapshot(check, train_own):
    run = expect_exit(check, train_own("diverges", "--precision fp64"), 7)
    output = "".join(run.errors)
    check.equal(names_the_rank=("of rank 1 differ" in output, True), snapshot=((run.folder / SNAPSHOT).exists(), False))


@clause("X7")
@only(sizes=(2, 4), devices=("cpu",))
@pytest.mark.parametrize("rank", [pytest.param(0, marks=only(sizes=(2,))), 1])
def test_a_killed_rank_is_named_by_the_others(check, world, runs, first, rank):
    """It, and none of those that wait for each other because of it."""
    run = world.train(first, runs.folder(first, f"lost-{rank}"), long(world)[0], kill_ranks=(rank,))
    check.equal(exit_codes=(run.exit_codes, [137 if other == rank else 7 for other in range(world.size)]))
    lost = f"rank {rank} died or hangs"
    check.equal(says=(lost if lost in "".join(run.errors) else run.errors, lost))


@clause("X7")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_a_rank_that_hangs_is_named_by_the_others(check, train_own, where):
    """After --timeout, whichever group they wait in."""
    run = expect_exit(check, train_own("hangs", f"--steps-per-epoch 5 --timeout 3 --where {where}", apart=True), 7)
    words = "rank 1 died or hangs"
    check.equal(says=(words if words in run.errors[0] else run.errors, words))


@clause("X7")
@only(sizes=(2,), devices=("cpu",))
def test_ranks_that_send_each_other_unlike_messages_end_with_7(check, train_own):
    """gloo then ends a process where no exception reaches Python."""
    expect_exit(check, train_own("sends_more", "--steps-per-epoch 5 --timeout 5", apart=True), 7)


@clause("X7")
@only(sizes=(4,), devices=("cpu",))
def test_a_rank_that_hangs_in_the_groups_of_its_node_is_noticed(check, train_own):
    """The others of its node wait for its part of the gradients there, and not in the group of all."""
    flags = "--steps-per-epoch 5 --timeout 3 --where loss --sharding hybrid"
    expect_exit(check, train_own("hangs", flags, num_nodes=2, apart=True), 7)


@clause("X15")
@only(sizes=(2,))
def test_ranks_that_do_not_come_are_named(check, world, runs, first):
    """The last one has been asked for help, and ends at once."""
    flags = f"{SHORT} --rendezvous-timeout 3"
    run = world.train(first, runs.folder(first, "missing"), flags, odd_flags="--help")
    check.equal(exit_codes=(run.exit_codes, [4] * (world.size - 1) + [0]))
    words = f"1 of {world.size} ranks missing after 3 s"
    says = all(text in "".join(run.error_lines) for text in (words, f"rank {world.size - 1}"))
    check.equal(lines=(len(run.error_lines), 1), names_the_rank=(says, True))


@clause("X2", "X15")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("name, code, words", [("SIGTERM", 4, "all ranks"), ("SIGUSR1", 75, "the first step")])
def test_a_rank_that_waits_in_vain_and_is_told_to_stop_is_not_started_again(check, train_own, name, code, words):
    """Its launcher ends it because another has failed: with 75 the job would come back, to fail again. SIGUSR1 is of a
    scheduler whose time is up, and one that comes back then is right.
    """
    run = train_own("told_before_they_meet", odd_flags="--help", environ=dict(TOLD=name), apart=True)
    of = check["X15" if code == 4 else "X2"]
    of.equal(exit_codes=(run.exit_codes, [code, 0]), names_the_signal=(f"{name} before {words}" in "".join(run.errors), True))


@clause("X16")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_stranger_changes_no_run(check, world, runs, first):
    """It writes into the store all the time, and looks where it can be reached."""
    port = world.on_rank_0(free_port)
    places = {name: str(port) for name, template in first.templates if template == "{master_port}"}
    flags = f"{SHORT} --rendezvous-timeout 5 --timeout 5"
    with stranger(port) if world.rank == 0 else nullcontext() as reachable:
        run = world.train(first, runs.folder(first, "stranger"), flags, environ=places | {"DDP_SECRET": "0123456789abcdef" * 2})
    addresses = world.on_rank_0(lambda: sorted(reachable))
    place = [socket.gethostbyname(socket.gethostname())] if world.size > 1 else []
    expected = [4, 4] if run.exit_codes == [4, 4] else [0] * world.size
    check.equal(exit_codes=(run.exit_codes, expected), listens=(addresses, place))
    lines = [len(text.splitlines()) for text in run.errors]
    check.equal(more_than_a_line=([count for count in lines if count > 1], []))


@clause("X16")
@only(sizes=(2,), devices=("cpu",))
def test_ranks_know_each_other_by_the_secret_of_the_environment(check, world, runs, first):
    from ddp_core import Rank

    secrets = [{"DDP_SECRET": digit * 32} for digit in "ab"]
    shown = repr(replace(Rank.single(), secret="a" * 32))  # as a traceback or a site's own print() shows it
    check.equal(shows_the_secret=("a" * 32 in shown, False))
    signed = done(check, world.train(first, runs.folder(first, "signed"), SHORT, environ=secrets[0]))
    check.equal(signed=(signed.values("start", "signed"), [True]))
    flags = f"{SHORT} --rendezvous-timeout 3"
    expect_exit(check, world.train(first, runs.folder(first, "two-secrets"), flags, environ=secrets[world.rank]), 4)
    guessed = expect_exit(check, world.train(first, runs.folder(first, "guessed"), flags, environ={"DDP_SECRET": "q"}), 3)
    check.equal(says_which=(["DDP_SECRET" in text for text in guessed.errors], [True, True]))


@clause("X16")
@only(sizes=(1,), devices=("cpu",))
def test_what_a_rank_has_signed_is_good_under_its_name_alone(check):
    """A stranger can copy it. The core's own store, without a network."""
    from ddp_core.errors import RendezvousError
    from ddp_core.rendezvous import SignedStore
    from torch.distributed import HashStore

    stored, taken = HashStore(), []
    signed = SignedStore(stored, "0123456789abcdef" * 2, "here")
    signed.set("rank/1", "all is well")
    stored.set("verdict", stored.get("rank/1"))
    for name in ("rank/1", "verdict"):
        try:
            taken.append(signed.get(name))
        except RendezvousError as error:
            taken.append(int(error.code))
    check.equal(taken=(taken, [b"all is well", 4]))


@clause("X13")
@only(sizes=(1,))
def test_memory_that_does_not_suffice(check, train_own):
    run = expect_exit(check, train_own("exhausts"), 7)
    lines = [line for line in run.error_lines if "out of memory" in line]
    flags = all(flag in line for line in lines for flag in ("step 3", "--global-batch-size", "--accumulate"))
    check.equal(lines=(len(lines), 1), names_step_and_flags=(flags, True))


@clause("X13")
@only(sizes=(2,))
def test_memory_of_a_host_that_does_not_suffice(check, train_own):
    run = expect_exit(check, train_own("exhausts_its_host", "--timeout 10", apart=True), 7)
    lines = [line for line in run.error_lines if "out of memory, rank 1 on " in line]
    flags = all(flag in line for line in lines for flag in ("step 3", "--global-batch-size", "--accumulate"))
    check.equal(lines=(len(lines), 1), names_step_and_flags=(flags, True), of_rank_0=("rank 1 " in run.errors[0], True))


@clause("X17")
@only(sizes=(2,))
@pytest.mark.parametrize("changed", ["trainer.py", "workloads/gpt.py"])
def test_a_stale_core_on_one_node(check, world, runs, first, changed):
    """It has the same version, and one file that differs by an empty line."""
    stale = runs.root / f"stale-core-{Path(changed).stem}"

    def copy() -> None:
        shutil.copytree(core_of.CORE, stale / "ddp_core")
        shutil.copy(first.train, stale)
        with open(stale / "ddp_core" / changed, "a") as file:
            file.write("\n")

    world.on_rank_0(copy)
    launch = replace(first, train=stale / first.train.name) if world.rank == world.size - 1 else first
    run = expect_exit(check, world.train(launch, runs.folder(first, stale.name), SHORT), 4)
    words = f"on rank {world.size - 1}, but"
    lines = [line for line in run.error_lines if "core=" in line and words in line]
    check.equal(lines_that_name_it=(len(lines), 1))


@clause("X17")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("name", ["python", "cpu_capability"])
def test_a_node_that_computes_otherwise(check, world, train_own, name):
    odd = dict(LIKE=name) if world.rank == world.size - 1 else {}
    run = expect_exit(check, train_own("computes_otherwise", environ=odd, apart=True), 4)
    lines = [line for line in run.error_lines if f"{name}=" in line and "nothing on" not in line]
    check.equal(lines_that_name_it=(len(lines), 1))


@clause("X14")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_run_directory_has_one_job_at_a_time(check, world, runs, first):
    run_dir = runs.folder(first, "one-at-a-time")
    done(check, world.train(first, run_dir, SHORT))

    def take():
        from ddp_core.run_directory import RunDirectory

        return RunDirectory(str(run_dir), "another")

    def die() -> int:
        imports = "import os, sys; from ddp_core.run_directory import RunDirectory"
        program = f"{imports}; RunDirectory(sys.argv[1], 'another'); os._exit(0)"
        return subprocess.run([sys.executable, "-c", program, run_dir], timeout=60, check=True).returncode

    held = [take()] if world.rank == 0 else []
    before = world.on_rank_0(lambda: [path.read_bytes() for path in sorted(run_dir.iterdir())])
    refused = expect_exit(check, world.train(first, run_dir, SHORT), 3)
    after = world.on_rank_0(lambda: [path.read_bytes() for path in sorted(run_dir.iterdir())])
    says = "another" in "".join(refused.errors) and "--run-dir" in "".join(refused.errors)
    check.equal(all_files_as_before=(after == before, True), names_job_and_flag=(says, True))
    for directory in held:
        directory.release()
    world.on_rank_0(die)
    again = done(check, world.train(first, run_dir, SHORT))
    left = world.on_rank_0((run_dir / "run.lock").exists)
    check.equal(warns=("another" in again.output[0], True), a_lock_is_left=(left, False))

    def leave_a_lock(**other) -> None:
        directory, lock = take(), run_dir / "run.lock"
        owner = json.loads(lock.read_text())
        directory.release()
        lock.write_text(json.dumps(owner | other))
        os.utime(lock, (0, 0))

    # Of a process whose number this one was given later, after the node was booted, say; and of a host that nobody can ask.
    for other in (dict(began="long ago"), dict(host="elsewhere")):
        world.on_rank_0(lambda other=other: leave_a_lock(**other))
        again = done(check, world.train(first, run_dir, SHORT))
        check.equal(**{f"warns_of_{next(iter(other))}": ("another" in again.output[0], True)})


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("where, place", [("host", dict(host="elsewhere")), ("container", dict(pids="pid:[1]", pid=4194303))])
def test_a_lock_that_is_touched_elsewhere_is_a_living_job_s(check, world, runs, first, own_file, where, place):
    """Whatever this host's clock says: it is an hour ahead, and the lock's time is the file server's."""
    from ddp_core.run_directory import RunDirectory

    run_dir, over = runs.folder(first, f"locked-in-another-{where}"), threading.Event()
    directory, lock = RunDirectory(str(run_dir), "another"), run_dir / "run.lock"
    owner = json.loads(lock.read_text())
    directory.release()
    lock.write_text(json.dumps(owner | place))
    half = run_dir / ".snapshot.safetensors.tmp"  # which that job is writing
    half.touch()

    def beat() -> None:
        while lock.exists() and not over.wait(0.5):
            os.utime(lock)

    threading.Thread(target=beat).start()
    run = world.train(first, run_dir, f"{own_file('ahead_of_time')} --epochs 1", apart=True)
    over.set()
    expect_exit(check, run, 3)
    check.equal(names_the_job=("job another" in "".join(run.errors), True), leaves_what_is_being_written=(half.exists(), True))


@clause("X14")
@only(sizes=(1, 2), devices=("cpu",))
def test_who_has_lost_the_lock_leaves_no_snapshot(check, world, train_own):
    """Not of what it had begun to write before, either."""
    run = expect_exit(check, train_own("loses_its_lock", "--steps-per-epoch 2", apart=True), 8)
    names = world.on_rank_0(lambda: [path.name for path in run.folder.glob("*.safetensors*")])
    check.equal(snapshots=(names, []), the_other_s_lock_is_there=(world.on_rank_0((run.folder / "run.lock").exists), True))


@clause("X14")
@only(sizes=(1, 2), devices=("cpu",))
def test_who_has_lost_the_lock_writes_no_line(check, train_own):
    """The log is the new owner's from the next beat on, long before a save is due."""
    run = expect_exit(check, train_own("loses_its_lock_in_a_step", apart=True), 8)
    late = [record["kind"] for record in run.records if record["kind"] != "start" and record.get("step", 2) > 1]
    check.equal(written_since=(late, []))


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
def test_a_living_job_touches_its_lock(check, world, runs, first, monkeypatch):
    """Every 10 s: a lock that is silent for 60 s is a dead job's."""
    from ddp_core import run_directory, run_lock

    check.equal(seconds_between_beats=(run_lock.HEARTBEAT, 10.0))
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.05)
    directory = run_directory.RunDirectory(runs.folder(first, "touched"), "1")
    lock, end = directory.folder / "run.lock", time.monotonic() + 10
    os.utime(lock, (0, 0))
    while not lock.stat().st_mtime and time.monotonic() < end:
        time.sleep(0.02)
    check.equal(touched=(lock.stat().st_mtime > 0, True))
    directory.release()


@clause("X2")
@only(sizes=(1,), devices=("cpu",))
def test_who_looks_whether_a_lock_is_touched_hears_that_it_is_to_stop(check, runs, first, monkeypatch):
    """A minute is more than a scheduler waits. Here it is three seconds; the run is told before it begins to look."""
    from ddp_core import errors, run_directory, run_lock

    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.5)
    folder, code, began = runs.folder(first, "told-at-a-lock"), 0, time.monotonic()
    folder.mkdir(parents=True)
    (folder / "run.lock").write_text('{"job_id": "another", "host": "elsewhere", "pid": 1}')
    try:
        run_directory.RunDirectory(folder, "1", stop=SimpleNamespace(reason="SIGTERM")).release()
    except errors.Failure as failure:
        code = int(failure.code)
    check.equal(exit_code=(code, 75), looks_to_the_end=(time.monotonic() - began > 2, False))
    check.equal(the_other_s_lock_is_there=((folder / "run.lock").exists(), True))


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
def test_who_has_lost_the_lock_moves_no_snapshot(check, world, runs, first):
    """Two are there, the new owner's."""
    from ddp_core import errors, run_directory, snapshot

    run, path = runs.train(first, FP64), runs.folder(first, "lost-and-saved")
    done(check, run)
    shutil.copytree(run.folder, path)
    directory = run_directory.RunDirectory(path, "1")
    (path / "run.lock").write_text('{"job_id": "another", "host": "elsewhere", "pid": 1}')
    files = sorted(path.glob("snapshot*"))
    before = [sha256(file) for file in files]
    with pytest.raises(errors.StorageError):
        directory.save(*snapshot.read(path / SNAPSHOT))
    directory.release()
    check.equal(files=(sorted(path.glob("snapshot*")), files), snapshots=([sha256(file) for file in files], before))


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
def test_who_has_lost_the_lock_leaves_alone_what_another_is_writing(check, world, runs, first):
    """A process that stood still in a save of its own goes on with it, and hears then that it has lost the lock."""
    from ddp_core import errors, snapshot

    run, path = runs.train(first, FP64), runs.folder(first, "two-writers")
    done(check, run)
    path.mkdir()
    tensors, document = snapshot.read(run.folder / SNAPSHOT)
    del document["document_crc32"]
    program = "import sys; from pathlib import Path; from ddp_core import snapshot; old, new = map(Path, sys.argv[1:])"
    program += "; snapshot.write(new, *snapshot.read(old), check=lambda: 1 / 0)"
    old, ends = run.folder / "snapshot.prev.safetensors", []

    def another_job() -> None:
        ends.append(subprocess.run([sys.executable, "-c", program, old, path / SNAPSHOT], capture_output=True, check=False))

    failed = ""
    try:
        snapshot.write(path / SNAPSHOT, tensors, document, check=another_job)
    except errors.StorageError as error:
        failed = str(error)
    check.equal(the_other_lost_it=(["ZeroDivisionError" in end.stderr.decode() for end in ends], [True]))
    whole = take_apart(path / SNAPSHOT)["crc32"] if (path / SNAPSHOT).exists() else failed
    check.equal(snapshot=(whole, take_apart(run.folder / SNAPSHOT)["crc32"]))


@clause("X8")
@only(sizes=(1, 2))
def test_a_run_directory_that_cannot_be_written(check, world, own, runs):
    file = runs.folder(own, "a-file")
    world.on_rank_0(lambda: [file.parent.mkdir(parents=True, exist_ok=True), file.touch()])
    run = expect_exit(check, world.train(own, file / "run", SHORT), 8)
    check.equal(names_the_flag=("--run-dir" in "".join(run.errors), True))


@clause("X8")
@only(sizes=(2,), devices=("cpu",))
def test_a_log_that_cannot_be_written_to_its_end(check, train_own):
    """The disk is full after the last snapshot."""
    one_line(check, train_own("fills_up_at_last", apart=True), 8, f"{LOG}: ")


@clause("X9")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", MISTAKES)
def test_a_workload_file_that_cannot_be_used_is_one_line(check, train_own, name):
    run = train_own(name)
    one_line(check, run, 2, MISTAKES[name], [line for line in run.lines if not line.startswith("rank=")])


@clause("X9")
@only(sizes=(1,))
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_or_an_optimizer_that_cannot_be_used_is_one_line(check, train_own, name):
    run = train_own(name)
    one_line(check, run, 2, REFUSED[name], [line for line in run.lines if not line.startswith("rank=")])


@clause("X9")
@only(sizes=(1,), devices=("cpu",))
def test_a_workload_s_own_default_for_its_run_directory_is_refused(check, train_own):
    """Where the run is, job scripts learn from the flags alone."""
    one_line(check, train_own("names_its_run"), 2, "--run-dir is for the command line alone")


@clause("X9")
@only(sizes=(2,))
def test_a_model_that_cannot_be_built_in_shards_is_one_line(check, train_own):
    """The ranks build it one after the other."""
    one_line(check, train_own("unbuildable", "--sharding full"), 2, "line 11 (model): NameError")


@clause("X9")
@only(sizes=(2,))
def test_a_forward_past_ddp_is_one_line(check, train_own):
    """It sums no gradient then, and the replicas drift apart."""
    one_line(check, train_own("past_ddp"), 2, "forward() goes past DistributedDataParallel")


@clause("X9")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["", "--in-collate"])
def test_a_row_that_cannot_be_read_is_named(check, world, train_own, where, workers):
    """By rank 0, which reads it, and not one of the batches that workers have read on to."""
    run = train_own("misses_a_row", f"--workers {workers} --precision fp64 {where}", apart=True)
    rows = reference.sample_order(0, 0, 1438)[5 * G : 6 * G : world.size][:3]
    words = f"rows {', '.join(map(str, rows))}" if where else f"row {rows[0]} of"
    observed = words if words in run.errors[0] else run.errors[0].strip()
    check.equal(exit_code=(run.exit_codes[0], 2), names_its_rows=(observed, words))


@clause("X10")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("batches", [0.5, 2.5])
def test_a_worker_that_dies_is_named(check, world, train_own, batches):
    """While the rank waits for its first batch, or is in its first step: workers read two batches ahead."""
    last = int(batches * G / world.size)
    run = expect_exit(check, train_own("dies", f"--workers 1 --last {last}", apart=True), 7)
    words = "a worker that reads rows died"
    check.equal(says=(words if words in "".join(run.errors) else run.errors, words))


@clause("X10")
@only(sizes=(1,), devices=("cpu",))
def test_a_worker_that_hangs_is_named(check, train_own):
    """After --timeout."""
    run = expect_exit(check, train_own("dies", "--workers 1 --hangs-for 8 --timeout 2", apart=True), 7)
    words = "a worker that reads rows died or hangs (DataLoader timed out"
    check.equal(says=(words if words in "".join(run.errors) else run.errors, words))


@clause("X10")
@only(sizes=(1,), devices=("cpu",))
def test_a_worker_that_hangs_ends_with_its_rank(check, train_own):
    """It has read the rows of the first step."""
    flags = f"--workers 1 --last {G + 9} --hangs-for 8"
    run = expect_exit(check, train_own("dies", flags, kill_ranks=(0,), kill_at='"kind":"step"'), 137)
    check.equal(a_worker_has_outlived_it=((run.folder / "woke").exists(), False))

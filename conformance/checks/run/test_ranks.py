"""SPEC.md R, A and J: ranks find each other, have the right numbers, and report their speed."""

import json
import math
import os
import random
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.checks.run.common import (
    FP64,
    IN_RANKS,
    LOG,
    MISTYPED,
    SHORT,
    SNAPSHOT,
    TWO,
    G,
    bytes_of,
    clause,
    done,
    expect_exit,
    machine,
    one_line,
    only,
)
from conformance.harness import core_of, reference
from conformance.harness.check import T0, T2
from conformance.harness.ports import free_port
from conformance.harness.reference import take_apart

pytestmark = IN_RANKS
OFF = "--stage-data off"


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
    """The core's own Record is used as on rank 0 of so many ranks. An earlier start has left the rows of others."""
    from ddp_core.record import Record

    (tmp_path / "ranks.jsonl").write_text('{"rank":0}\n')
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
    """Checked on one node, and on two half as large, which shows mistakes that one node hides."""
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
    """It uses all nodes of the job, and counts their host names."""
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


@clause("R10")
@only(sizes=(2, 4), asks_mpi=True)
def test_a_rank_is_who_mpi_says(check, world, launch, runs):
    """MPI's ranks are reversed: the last process is rank 0, and only it writes."""
    run = done(check, world.train(launch, runs.folder(launch, "reversed"), SHORT, reversed_mpi=True))
    writers = [rank for rank, files in enumerate(run.written) if files]
    check.equal(the_process_that_is_rank_0=(writers, [world.size - 1]))


@clause("R12")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("world_size", [8, 66, 1001, 4096])
def test_what_ranks_tell_each_other_costs_by_the_logarithm(check, world_size):
    """All ranks of the core's own classes are in this process."""
    import torch
    from ddp_core.control import tree_sum

    from conformance.harness.counted import Counted  # needs torch, which a login node lacks

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


@clause("R12")
@only(sizes=(1,), devices=("cpu",))
def test_flat_sums_take_no_memory_that_grows_with_the_world(check):
    """The core's own class is used alone, in worlds of these sizes."""
    import torch
    from ddp_core.reduction import Flat

    model = torch.nn.Linear(255, 16)
    held = {size: bytes_of(Flat(model, model, SimpleNamespace(world_size=size), False)) for size in (1, 8, 9, 1000, 75_264)}
    check.equal(more_than_ten_times_the_gradients=([size for size, count in held.items() if count > 10 * 2**14], []))


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
    """The run has its own directory. Only its snapshot is checked, as after a run without conformance flags."""
    seed, lr = world.on_rank_0(lambda: (random.SystemRandom().randrange(1, 10**6), random.SystemRandom().uniform(0.05, 0.1)))
    flags, folder = f"--seed {seed} --lr {lr:.4f} --epochs 2", runs.folder(launch, "mine")
    done(check, world.train(launch, folder, flags, bare=True))
    documents = world.on_rank_0(lambda: [take_apart(path)["document"] for path in folder.rglob(SNAPSHOT)])
    check.equal(snapshots=(len(documents), 1), world_size=(documents[0]["world_size"], world.size))
    check.holds(*reference.not_the_history(documents[0]["history"], T2["cpu"], seed=seed, lr=float(f"{lr:.4f}"), epochs=2))


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
    """It has this job's address and port, like a neighbour's rank that was given the same port."""
    odd_start = (job_id or str(1001 + world.starts), restart)
    folder, flags = runs.folder(own, f"met-{job_id}"), f"{SHORT} --rendezvous-timeout 2"
    run = expect_exit(check, world.train(own, folder, flags, odd_start=odd_start), 4)
    check.equal(starts=(len(run.of("start")), 0), says=("belongs to" in "".join(run.errors), True))


@clause("R8")
@only(sizes=(4,), devices=("cpu",))
def test_two_processes_that_are_one_rank_are_named(check, world, runs, first):
    """A launch line gives two processes the same number."""
    twin = {name: "2" for place in ("rank", "local_rank") for name in first.variables_with(place)}
    flags, environ = f"{SHORT} --rendezvous-timeout 3", twin if world.rank == world.size - 1 else {}
    run = expect_exit(check, world.train(first, runs.folder(first, "twins"), flags, environ=environ), 4)
    words = "rank 2 is there twice"
    check.equal(says=(words if words in "".join(run.errors) else run.errors, words))


@clause("R11")
@only(sizes=(1,), devices=("cpu",))
def test_a_launcher_s_store_serves_one_start_after_another(check):
    """The ranks of two starts meet in it, one after another in this process."""
    from datetime import timedelta

    from ddp_core import Rank
    from ddp_core.errors import RendezvousError
    from ddp_core.rendezvous import Rendezvous
    from ddp_core.stop import StopFlag
    from torch.distributed import TCPStore

    port, ends = free_port(), []
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=9), wait_for_workers=False)
    for start, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        try:
            Rendezvous(Rank(rank, 2, rank, 2, 0, "127.0.0.1", port, f"7.{start}", launcher_store=True), 2, StopFlag())
            ends.append(0)
        except RendezvousError as error:
            ends.append(int(error.code))
    del store
    check.equal(exit_codes=(ends, [0] * 4))


@machine(FP64)
@clause("R9")
def test_the_end_says_how_fast_it_was(check, world, own, runs):
    run = done(check, runs.train(own, FP64))
    *_, end = run.of("end")
    speeds = [end.get(name, 0) for name in ("rows_a_second", "median", "p10")]
    seconds, are_the_whole = parts_of(end)
    check.equal(all_speeds_are_told=(min(speeds) > 0, True), p10_is_the_slower=(speeds[2] <= speeds[1], True))
    rows = end["rows_a_second"] * end["seconds"]["training"]
    check.equal(rows_a_second_times_seconds_are_the_rows=(abs(rows / (42 * G) - 1) < 0.02, True))
    outside = runs.seconds[own, FP64, False]
    check.equal(training_took_longer_than_the_run=(end["seconds"]["training"] > outside, False))
    check.equal(all_parts_are_told=(min(seconds) >= 0, True), the_parts_are_the_whole=(are_the_whole, True))
    check.equal(slowest_rank=(end.get("slowest_rank") in range(world.size), True))
    ratio = max(speeds[1] / speeds[0], speeds[0] / speeds[1])  # the first step is slow, and others vary
    check.equal(median_is_of_another_order_than_the_mean=(ratio > 30, False))


def parts_of(end: dict) -> tuple[list[float], bool]:
    """Return the seconds of each part, and whether they add up to the training."""
    parts = [end["seconds"].get(name, -1) for name in ("computing", "communication", "reading", "evaluation", "snapshots")]
    return parts, abs(sum(parts) - end["seconds"]["training"]) < 0.1


@clause("R9")
@only(sizes=(2,))
def test_sums_that_are_slow_by_themselves_leave_the_parts_the_whole(check, train_own):
    run = done(check, train_own("sums_slowly_by_itself", "--steps-per-epoch 5"))
    check.equal(the_parts_are_the_whole=([parts_of(end)[1] for end in run.of("end")], [True]))


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
    """Three evaluations of four batches take 0.05 s for each batch."""
    run = done(check, train_own("evaluates_slowly", "--steps-per-epoch 1 --epochs 3"))
    check.equal(seconds_of_evaluation=(min(run.values("end", "seconds")[-1]["evaluation"], 0.6), 0.6))


@clause("R9")
@only(sizes=(1, 2))
def test_an_epoch_s_progress_is_told(check, world, train_own):
    run = done(check, train_own("slow_steps", "--precision fp64 --log-seconds 0.5 --steps-per-epoch 14 --epochs 3"))
    progress_lines = [line.split() for line in run.output[0].splitlines() if re.match(r"epoch=\S+ step=\d+/14 ", line)]
    records = [dict(word.partition("=")[::2] for word in words) for words in progress_lines]
    places = [(int(record["epoch"][0]) - 1) * 14 + int(record["step"].partition("/")[0]) for record in records]
    losses = [f"{run.losses[place - 1]:.6g}" for place in places]
    check.equal(lines_within_epochs=(len(progress_lines) > 0, True), losses=([record["loss"] for record in records], losses))
    left = [sum(60**place * int(part) for place, part in enumerate(record["left"].split(":")[::-1])) for record in records]
    least = [(42 - place) * 0.1 for place in places]  # each step waits 0.1 s
    check.equal(seconds_left_are_too_few=([pair for pair in zip(left, least, strict=True) if pair[0] < pair[1] - 1], []))
    check.equal(seconds_left_at_last_are_too_many=(left[-1] > 9 * least[-1] + 1, False))
    check.equal(of_other_ranks=(["step=" in text for text in run.output[1:]], [False] * (world.size - 1)))


@clause("R9")
@only(sizes=(2,))
def test_the_slowest_rank_is_named(check, train_own):
    run = done(check, train_own("lags", "--steps-per-epoch 4"))
    check.equal(slowest_rank=(run.values("end", "slowest_rank"), [1]))


@clause("R12")
@only(sizes=(2,), devices=("cpu",))
def test_ranks_whose_clocks_differ_speak_at_the_same_step(check, train_own):
    """The slowest rank's clock decides for all when they communicate next."""
    done(check, train_own("fast_clock", "--steps-per-epoch 34 --timeout 5", apart=True))


@clause("R13")
@only(sizes=(2, 4))
@pytest.mark.parametrize("num_nodes", [1, TWO])
def test_a_file_of_data_is_read_once_a_node(check, world, runs, first, train_own, num_nodes):
    """Raw, two NumPy formats and safetensors each have a part of the images. Their path is long."""
    file = runs.root / ("é" * 100) / ("é" * 100) / "images"
    world.on_rank_0(lambda: [file.parent.mkdir(parents=True, exist_ok=True), write_images(file)])
    kind = world.on_rank_0(lambda: subprocess.check_output(["stat", "-f", "-c", "%T", file], text=True).strip())
    flags = f"--precision fp64 --file {file}"
    once, each = done(check, *(train_own("reads_a_file", f"{flags} {more}", num_nodes=num_nodes) for more in ("", OFF)))
    places = [row["local_rank"] for row in once.of("start")[-1]["ranks"]]
    opened = [times_opened(run) for run in (once, each)]
    should_be = [1 if place == 0 or kind in ("tmpfs", "ramfs") else 0 for place in places]
    check.equal(times_that_each_rank_opened_it=(opened[0], should_be), and_without_staging=(opened[1], [1] * world.size))
    nodes, first_files = [row["node_rank"] for row in once.of("start")[-1]["ranks"]], numbers_behind("the first as", once)
    copies = [len({file for at, file in zip(nodes, first_files, strict=True) if at == node}) for node in {*nodes}]
    check.equal(copies_of_each_node=(copies, [1] * num_nodes))
    check.equal(ranks_that_can_write_to_it=([rank for rank, text in enumerate(once.output) if "written to" in text], []))
    check.close(once.losses, each.losses, T0)
    check.close(once.losses, runs.train(first, FP64).losses[: len(once.losses)], T0, "losses, to the reference run's")


@clause("R13")
@only(sizes=(2,))
def test_a_file_that_the_first_rank_of_a_node_does_not_ask_for_is_not_waited_for(check, world, runs, train_own):
    """Copies are waited for until half of --rendezvous-timeout, here 10 s, unless the first rank has read its data."""
    file, environ = runs.root / "asked-for", dict(MINE="-by-rank-1") if world.rank else {}
    world.on_rank_0(lambda: [Path(f"{file}{of}").write_bytes(b"x") for of in ("", "-by-rank-1")])
    flags = f"--steps-per-epoch 1 --rendezvous-timeout 20 --file {file}"
    run = done(check, train_own("asks_for_another_file", flags, environ=environ))
    seconds = run.values("start", "seconds")[-1]
    waited = seconds["groups"] - seconds["data"]
    check.equal(rank_1_comes=("at once" if waited < 8 else f"after {waited:.0f} s", "at once"))


@clause("R9")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("flags", [[], ["--sharding", "full"]], ids=["whole", "sharded"])
def test_memory_of_a_step_is_there_for_the_next_one(check, monkeypatch, flags):
    """A stand-in for the C library sees what glibc shall keep: blocks of 16 MB and all freed memory, or none if sharded."""
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


@clause("R13", "S10")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("limited, left", [("job", 20_000), ("job/step", 20_000), ("job", 540_000), ("memory/job", 540_000)])
def test_a_file_without_room_in_memory_is_read_where_it_is(check, world, runs, first, train_own, limited, left):
    """The cgroup of the job, or of its step, has 20 kB left: no room for a snapshot's copy either, so training waits. Or there
    is room for the first file only, where the kernel frees cached pages of other files.
    """
    file, cgroup = runs.root / "roomless", runs.root / f"cgroup-{limited.replace('/', '-')}-{left}"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if limited == "memory/job" else ("memory.max", "memory.current")

    def write() -> None:
        write_images(file)
        for folder in ("job/step", "memory/job"):
            (cgroup / folder).mkdir(parents=True)
        (cgroup / "member").write_text("7:cpuset:/job\n5:cpu,memory:/job\n0::/job/step\n")
        pages = left - 10_000
        stat = f"total_inactive_file {pages}" if limited == "memory/job" else f"inactive_file {pages}"
        for name, text in zip((*names, "memory.stat"), (2**40, 2**40 - left + pages, f"anon 0\n{stat}"), strict=True):
            (cgroup / limited / name).write_text(f"{text}\n")

    world.on_rank_0(write)
    run = done(check, train_own("reads_a_file", f"--steps-per-epoch 2 --file {file} --cgroup {cgroup}"))
    check["R13"].equal(times_that_each_rank_opened_it=(times_opened(run), [1, 1]))
    noted = [note for note in run.of("start")[-1]["notes"] if "half of the memory" in note]
    check["R13"].equal(notes=(len(noted), 1))
    if left > 20_000:
        opened = numbers_behind("times", run)  # rank 1 has a copy of one file of four
        check["R13"].equal(times_that_each_rank_opened_any=(opened, [4, 3]))
        return
    said = run.output[0].count("training waits while snapshots are written")
    check["S10"].equal(bytes_of_a_copy=(run.values("snapshot", "copy"), [0]), says_that_training_waits=(said, 1))


@clause("R13")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_file_in_another_order_is_refused(check, world, runs, first, train_own):
    """NumPy writes a transposed array column by column."""
    file = runs.root / "transposed"
    world.on_rank_0(lambda: [write_images(file), np.save(f"{file}.npy", np.asfortranarray(np.load(f"{file}.npy")))])
    one_line(check, train_own("reads_a_file", f"--file {file}", apart=True), 3, f"{file.name}.npy cannot be mapped")


@clause("R13")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("rank", [0, 1])
def test_another_user_s_process_has_no_part_in_it(check, world, runs, first, train_own, rank):
    """Any process on a node can ask the first rank for its copy, or answer instead of it."""
    file, cgroup = runs.root / f"not-for-all-{rank}", runs.root / f"no-limit-{rank}"
    world.on_rank_0(lambda: [write_images(file), cgroup.mkdir(), (cgroup / "member").write_text("0::/\n")])
    environ = dict(ANOTHER_USER="1") if world.rank == rank else {}
    flags = f"--steps-per-epoch 2 --file {file} --cgroup {cgroup}"
    run = done(check, train_own("reads_a_file", flags, environ=environ, apart=True))
    check.equal(times_that_each_rank_opened_it=(times_opened(run), [1, 1]))
    noted = [note for note in run.of("start")[-1]["notes"] if "not once: " in note]
    check.equal(notes=(len(noted), 1))


def write_images(file: Path) -> None:
    """Write parts of the images as raw numbers, in two versions of NumPy's format, and as safetensors."""
    from safetensors.numpy import save_file

    images = reference.load()[0]
    file.write_bytes(images[:500].tobytes())
    pixels = (images * 4 * 4095).astype("<u2")  # up to 65,520
    np.save(f"{file}.npy", pixels[500:700])
    with open(f"{file}.2.npy", "wb") as second:  # NumPy's format for a header above 64 kB
        np.lib.format.write_array(second, pixels[700:900], version=(2, 0))
    save_file(dict(first=pixels[:9], pixels=pixels[900:]), f"{file}.safetensors")


def times_opened(run) -> list[int]:
    return numbers_behind("opened", run)


def numbers_behind(words: str, run) -> list[int]:
    """Return the number behind these words in each rank's output."""
    return [int(text.partition(f"{words} ")[2].split()[0]) for text in run.output]

"""SPEC.md D and L: the ranks read the same rows in the same order, and have the same losses."""

import functools
import gzip
import json
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.checks.run.common import (
    DRAWS,
    FP32,
    FP64,
    IN_RANKS,
    LOG,
    NOISY,
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
from conformance.golden import make as golden
from conformance.harness import anchors, reference, sites
from conformance.harness.check import T0, T1, T2
from conformance.harness.reference import sha256, take_apart

pytestmark = IN_RANKS
FLAT = f"{FP64} --reduction flat"
SEED = "--precision fp64 --epochs 1 --seed 1"
REDUCTIONS = ("ddp", "flat", "canonical")


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
    """All places of a small order, which the core would normally sort, and three steps amid an order of 10^9 rows."""
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
    """The rows are more than 256 MB, and have another precision than the run."""
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
    """The third, sixth and ninth steps are recorded: users count from one, so three steps give one line."""
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
    """A forward pass is collective: a rank without a row takes part with one."""
    whole, parts = done(check, *(train_own("one_held_out", f"--precision fp64 {flags}") for flags in ("", "--sharding full")))
    check.close(parts.values("epoch", "eval_loss"), whole.values("epoch", "eval_loss"), T1, "eval_loss")


@clause("L4")
@only(sizes=(1, 2))
def test_evaluation_changes_nothing_of_the_training(check, runs, first):
    """The model draws, and counts in its buffers, only while it is trained."""
    flags = f"{DRAWS} --batch-norm --steps-per-epoch 6 --epochs 3"
    often, once = done(check, runs.train(first, flags), runs.train(first, f"{flags} --eval-every 3"))
    losses = [(run.of("epoch")[-1].get("eval_loss", 0), run.values("step", "loss_hex")) for run in (often, once)]
    check.equal(held_out_loss_in_the_end_and_losses=tuple(losses))


@clause("L5")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["drawn", "draws_its_rows"])
def test_model_and_rows_are_drawn_under_the_seed(check, train_own, name):
    """torch's generators draw them, as in most models, although the test has used these before."""
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
    """One matrix product with the run's settings shows the error: TF32 is off by 3e-4, bf16 by 2e-3, fp32 by 3e-7."""
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
    if world.device == "cpu":  # an accelerator's library would obey the variable from then on
        lower = f"{SHORT} --precision bf16"  # bf16 has no TF32
        done(check, world.train(first, runs.folder(first, f"{variable}-bf16"), lower, environ={variable: "1"}))


@clause("L12")
@only(sizes=(2, 4))
@pytest.mark.parametrize(
    "flags", ["", "--epochs 1 --shards 32", "--epochs 1 --precision fp64"], ids=["shards-8", "shards-32", "fp64"]
)
def test_canonical_is_bitwise_the_same_in_a_world_of_one(check, world, runs, first, flags):
    """This includes the shards of other worlds, several for each rank as in a world of one. In fp64 all sums round."""
    run = same_in_a_world_of_one(check, world, runs, first, f"{FP32} {flags}")
    check.close(run.losses, golden.load()["losses"][: len(run.losses)], T2[world.device])


@clause("L12")
@only(sizes=(1,), devices=("cpu",))
def test_canonical_computes_with_one_thread(check, world, runs, first):
    """A kernel's sums depend on its threads, and threads on the cores that a job script gives a rank."""
    threads = []
    for flags in ("--reduction canonical", ""):
        path = runs.folder(first, f"threads-{len(threads)}")
        run = done(check, world.alone(first, path, f"{SHORT} {flags}", dict(OMP_NUM_THREADS="2")))
        threads.append(run.of("start")[-1]["ranks"][0]["threads"])
    check.equal(threads_of_canonical_and_ddp=(threads, [1, 2]))


@clause("L12")
@only(sizes=(2, 4), devices=("cpu",))
@pytest.mark.parametrize("num_nodes", [1, TWO])
def test_the_ranks_of_a_node_share_its_cores(check, world, train_own, monkeypatch, num_nodes):
    """The node appears to have eight cores, and no variable sets the threads of a rank."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = done(check, train_own("has_eight_cores", "--steps-per-epoch 1", num_nodes=num_nodes, apart=True))
    rows = run.of("start")[-1]["ranks"]
    check.equal(threads=([row["threads"] for row in rows], [8 * num_nodes // world.size] * world.size))


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
    """An optimizer reads its gradient in the same memory order."""
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
    """The trace of two steps shows it."""
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
    """--per-rank-batch-size and --scale-lr are multiplied with the world size."""
    flags = f"--per-rank-batch-size {G // world.size} --lr {0.1 / world.size} --scale-lr"
    run = done(check, world.train(first, runs.folder(first, "by-rank"), f"{FP64} --epochs 1 {flags}"))
    check.close(run.losses, golden.load()["losses"][:14], T1)


@clause("L13")
@only(sizes=(1, 2))
def test_what_is_computed_again_is_the_same_training(check, world, train_own):
    """Recomputed dropout draws the same numbers."""
    again = "--checkpoint-activations"
    kinds = ["", again, *([f"{again} --sharding full"] if world.size > 1 and world.device == "cpu" else [])]
    plain, *others = [done(check, train_own("drops", f"--precision fp64 {flags}")) for flags in kinds]
    for run in others:
        check.close(run.losses, plain.losses, T1)
        # After the trial: in each step, and once or twice before the first.
        times = [one.output[0].partition("rank=0 ")[2].count("a layer is computed") for one in (plain, run)]
        check.equal(computed_once_more_in_each_step=(times[1] >= 2 * len(run.losses) > times[0] > 0, True))


@clause("L13")
@only(sizes=(2,), devices=("cpu",))
def test_a_model_is_compiled_where_that_is_asked_for(check, train_own):
    """A stand-in for torch.compile prints a line on each rank, and returns the model."""
    run = done(check, train_own("tells_when_compiled", "--steps-per-epoch 1 --compile", apart=True))
    check.equal(compiled_on_each_rank=([text.count("torch.compile was called") for text in run.output], [1, 1]))


@functools.cache
def numpy_trace(**options) -> dict[str, list[float]]:
    """Return NumPy's trace of the noisy run."""
    return reference.train(noisy=True, epochs=2, **options)


@machine(NOISY)
@clause("L14")
@only(sizes=(1, 2))
def test_a_workload_of_ones_own(check, launch, runs):
    """Its rows are read one by one, and NumPy knows the numbers that they draw."""
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
    """Every line arrives, also in a file. A flag of the workload's class has the value that the class sets."""
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
    """With `train.py | head -1` the run trains on, and says once that its output is not read."""
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
@only(sizes=(1,), devices=("cpu",))
def test_what_it_prints_reaches_no_file_of_the_run_where_all_output_is_closed(check, world, runs, first, own_file):
    """The next files that the process opens would have the numbers of standard output and standard error."""
    folder = runs.folder(first, "closed")
    folder.mkdir(parents=True)
    flags = world.flags(folder, f"{own_file('writes_to_descriptors')} --epochs 1")
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, first.train, *flags]
    code = subprocess.run(closed, env=sites.without_launcher(), timeout=60, check=False).returncode
    log = folder / LOG
    lines = log.read_text().splitlines() if log.exists() else ["no log"]
    check.equal(exit_code=(code, 0), lines_that_are_no_records=([line for line in lines if line[:1] != "{"][:3], []))


@clause("L14")
@only(sizes=(1, 2))
def test_batches_of_any_make_are_moved_and_converted(check, world, train_own):
    """The digits come in named tuples, dictionaries, lists and an object, in the run's precision, with the golden losses."""
    run = done(check, train_own("records", "--precision fp64 --workers 1"))
    check.equal(batches_as_they_were=(["a batch as it was" in text for text in run.output], [False] * world.size))
    check.close(run.losses, golden.load()["losses"][:14], T1)


@clause("L15")
@only(sizes=(1, 2))
def test_a_file_that_rows_are_read_from_is_a_worker_s_own(check, train_own):
    """It is opened at the first row, as PyTorch's users do: a file opened before would share its position between workers."""
    done(check, train_own("opens_late", "--workers 2"))


@clause("L15")
@only(sizes=(1, 2))
def test_a_file_that_is_open_before_the_workers_is_named(check, train_own):
    run = train_own("opens_early", "--workers 2")
    one_line(check, run, 2, "was open before the workers", [line for line in run.lines if not line.startswith("rank=")])
    done(check, train_own("opens_early"))


@clause("L15")
@only(sizes=(2,), devices=("cpu",))
def test_workers_are_there_before_the_first_gradients(check, train_own):
    """A process forked after the first sum inherits gloo's locks but not its threads: it may hang, or crash."""
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
@only(sizes=(1, 2))
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("draws_by_python", marks=only(sizes=(1,))),
        pytest.param("draws_seldom", marks=only(sizes=(1,))),
        "adds_noise",
    ],
)
def test_what_is_drawn_is_drawn_again(check, world, runs, first, own_file, name):
    """A resumed run draws the same by Python's generator, and in an optimizer, whose noise is equal on all ranks."""
    flags, path = f"{own_file(name)} --steps-per-epoch 5 --epochs", runs.folder(first, name)
    never = done(check, world.train(first, runs.folder(first, f"{name}-never-stopped"), f"{flags} 2"))
    resumed = done(check, *(world.train(first, path, f"{flags} {epochs}") for epochs in (1, 2)))[-1]
    for kind, value in (("step", "loss_hex"), ("epoch", "eval_loss")):
        check.equal(again=(resumed.values(kind, value), never.values(kind, value)))


@clause("L15")
@only(sizes=(2,))
def test_rows_that_are_not_seeded_are_drawn_by_each_rank_for_itself(check, train_own):
    """This also holds after an optimizer, which draws the same on all ranks."""
    run = done(check, train_own("adds_noise_and_draws_rows", "--row-seeds off --steps-per-epoch 4"))
    drawn = [re.findall(r"drawn (\S+)", text) for text in run.output]
    check.equal(rows_read=([len(each) >= 4 * G // 2 for each in drawn], [True, True]))
    check.equal(numbers_that_both_ranks_draw=(len({*drawn[0][-G:]} & {*drawn[1][-G:]}), 0))


@clause("L16")
@only(sizes=(2, 4))
def test_dropout_under_canonical_is_that_of_a_world_of_one(check, world, runs, first):
    same_in_a_world_of_one(check, world, runs, first, f"{DRAWS} --epochs 1")


@clause("L16")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name, steps", [("asks_for_the_step", 1), ("asks_for_the_epoch", 14)])
def test_a_loss_may_ask_for_the_step(check, world, runs, first, own_file, name, steps):
    """The step number continues after another start; held-out rows get the number of completed steps."""
    flags, path = f"{own_file(name)} --precision fp64", runs.folder(first, name)
    starts = done(check, *[world.train(first, path, f"{flags} --epochs {epochs}") for epochs in (1, 2)])
    losses = (starts[1].losses, starts[1].values("epoch", "eval_loss"))
    trained, held_out = ([round(steps * loss, 9) for loss in kind] for kind in losses)
    check.equal(losses=(trained, [*map(float, range(28))]))
    check.equal(held_out_losses=(held_out, [14.0, 28.0]))


@clause("L15")
@only(sizes=(1,))
def test_held_out_rows_are_drawn_as_before(check, train_own):
    """Each evaluation draws the same, or the best model would be chosen by luck. The tiny --lr keeps the parameters."""
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
    """Only attributes and buffers that have changed are named."""
    run = done(check, train_own("counts_in_itself"))
    (notes,) = run.values("start", "notes")
    check.equal(named=([note.split(" of ")[0] for note in notes if "no snapshot holds it" in note], ["self.seen"]))
    (notes,) = done(check, train_own("counts_calls", "--steps-per-epoch 2")).values("start", "notes")
    buffers = [note.split(" (")[0] for note in notes if "persistent=False" in note]
    check.equal(buffers=(buffers, ["no snapshot holds calls, whole"]))


@clause("L17")
@only(sizes=(1, 2))
def test_what_an_optimizer_keeps_beside_its_state_is_said(check, train_own):
    """It is named once, and an optimizer with all of its values in its state is not."""
    beside, counts = done(check, train_own("counts_beside"), train_own("counts"))
    named = [re.findall("note=(.*) of the optimizer changes", run.output[0]) for run in (beside, counts)]
    check.equal(named=(named, [["self.count, seen in a group"], []]))


@clause("L17")
@only(sizes=(1, 2))
def test_what_a_hook_changes_and_a_rate_that_is_set_back_are_said(check, train_own):
    """Each is said once, and nothing of a right optimizer of one's own, whose rates the schedule changes in each step."""
    names, schedule = ("averages_by_a_hook", "sets_its_rate", "counts"), "--epochs 3 --lr-schedule cosine"
    told = [re.findall("note=(.*?),? and ", done(check, train_own(name, schedule)).output[0]) for name in names]
    check.equal(notes=([[note.partition(" (")[0] for note in notes] for notes in told], LATER))


@clause("L17")
@only(sizes=(1,))
def test_what_does_not_repeat_is_said(check, train_own):
    """Loss and rows use unseeded generators. The first rows, which are tried beforehand, repeat."""
    (notes,) = done(check, train_own("own_noise", "--steps-per-epoch 2")).values("start", "notes")
    found = {what: any(what in note for note in notes) for what in ("another loss", "was another when it was read again")}
    check.equal(notes=(found, dict.fromkeys(found, True)))


@clause("L17")
@only(sizes=(1,))
def test_a_metric_that_is_no_sum_is_said(check, train_own):
    """The notes also name a loss that is no sum, and rows that depend on each other."""
    (notes,) = done(check, train_own("takes_a_root")).values("start", "notes")
    check.equal(
        named=(
            [note.split(" of ")[0] for note in notes if note.startswith("metric ")],
            ["metric 'rmse'", "metric 'error (count)'"],
        ),
        notes_on_the_loss=(sum("not the sum of theirs alone" in note for note in notes), 1),
    )
    (notes,) = done(check, train_own("takes_a_variance")).values("start", "notes")
    names = [note.split(" of ")[0] for note in notes]
    check.equal(of_one_row_nan_or_infinite=(names, ["metric 'variance'", "metric 'r2'"]))


LATER = [["self.average of the workload changes with every step of the optimizer"], ["something sets the learning rate"], []]
HOOKS = ("clips_by_a_hook", "clips_when_it_is_added")
NOTED = dict(adds_a_count=["part 'right' of loss() has no gradient, yet counts in the loss"], changes_its_batch=[])
NOTED |= dict(hides_pixels=["collate() draws random numbers"], holds_out_nothing_else=["held-out rows are the training rows"])
NOTED |= dict(keeps_its_rows=["row 0 drew random numbers when it was first read, and none when it was read again"])
NOTED |= dict(makes_a_table=[], holds_out_common_rows=[])
SHARED = ("holds_out_what_it_trains", "holds_out_a_part_twice")
NOTED |= {name: ["40 of 80 held-out rows are training rows, too"] for name in SHARED}
NOTED |= dict(follows_a_centre=["the model changes its buffers centre in training, and all ranks take rank 0's"])
NOTED |= dict(initializes_by_rows=["the model writes its parameters 3.scale when it is called"])
NOTED |= dict(counts_in_a_global=["the same rows and seeds gave another loss the second time"])
NOTED |= dict(standardizes_by_itself=["the loss of two rows together is not the sum of theirs alone"])
NOTED |= dict(weighs_classes=["the loss of 16 rows together is not the sum of theirs alone"], draws_for_large_batches=[])
NOTED |= dict(
    adds_what_is_0_at_first=[
        "the gradient of log_scale for two rows together is not the sum of theirs alone, although the loss is"
    ]
)
NOTED |= dict(adds_a_constant_to_its_logits=[], anneals_and_holds_out_nothing=[])
NOTED |= dict(counts_in_training=["the same rows and seeds gave another loss the second time"])
NOTED |= dict(
    flags_that_it_is_initialized=[
        "the model changes its buffers 3.shift in training, and all ranks take rank 0's",
        "the rows that were tried set 3.ready of the model, and the buffers beside it were put back",
    ]
)
NOTED |= dict(anneals=["the loss of held-out rows changes with self.steps_done, and chooses best.safetensors"])
NOTED |= dict(evaluates_in_training_mode=["forward() or loss() calls train() on the model, or a part of it"])
NOTED |= dict(trains_in_eval_mode=["forward() or loss() calls eval() on the model, or a part of it"], frozen_in_eval_mode=[])
NOTED |= {name: ["forward() or loss() seeds a generator"] for name in ("seeds_its_forward", "seeds_its_loss")}
NOTED |= dict(seeds_its_rows=["__getitem__ seeds a generator"], seeds_for_a_while=[])
NOTED |= dict(schedules_nothing=["schedule() returned 0 at every step that was tried, from 0 to 1"], warms_up_from_0=[])
NOTED |= {name: ["hooks on 0.weight act on a rank's own gradient, before the sum over ranks"] for name in HOOKS}
NOTED |= dict(adds_to_its_batch=[], returns_its_rate=["schedule() returned --lr 0.1 itself at step 0"])


@clause("L17")
@only(sizes=(1,))
@pytest.mark.parametrize("name", NOTED)
def test_what_is_no_loss_is_said(check, train_own, name):
    """No other note appears: a batch that is changed in place is not called unrepeatable."""
    (notes,) = done(check, train_own(name, "--steps-per-epoch 2")).values("start", "notes")
    check.equal(notes=([re.split(", which|: | \\(torch", note)[0] for note in notes], NOTED[name]))


@clause("L17")
@only(sizes=(1, 2))
def test_gradients_that_are_all_0_are_said_once(check, train_own):
    """A run in which only some gradients are 0 gets no note."""
    nothing, something = done(
        check, *(train_own(name, "--steps-per-epoch 2") for name in ("learns_nothing", "warms_up_from_0"))
    )
    told = [run.output[0].count("note=every gradient was 0 at step 0") for run in (nothing, something)]
    check.equal(notes=(told, [1, 0]))


@clause("L17")
@only(sizes=(1,))
def test_numbers_that_fp32_makes_alike_are_said(check, train_own):
    """Seconds since 1970 are rounded to about two minutes."""
    (notes,) = done(check, train_own("counts_seconds", "--precision fp32 --steps-per-epoch 2")).values("start", "notes")
    check.equal(notes=([note.partition(" of fp64")[0] for note in notes], ["column 0"]))


@clause("L18")
@only(sizes=(2, 4))
def test_all_ranks_begin_with_the_numbers_of_rank_0(check, train_own):
    done(check, *(train_own(name, apart=True) for name in ("unseeded", "transposed")))


@clause("L18")
@only(sizes=(2, 4))
@pytest.mark.parametrize("reduction", ["ddp", "flat"])
def test_all_ranks_go_on_with_the_buffers_of_rank_0(check, train_own, reduction):
    """Integers are equal to the last bit, too: counts of one rank's own rows are replaced by rank 0's."""
    run = done(check, train_own("counts_rows", f"--reduction {reduction}"))
    check.equal(ranks_whose_buffers_differ=([rank for rank, text in enumerate(run.output) if "buffers differ" in text], []))


@clause("L18")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_sparse_buffer_that_no_snapshot_holds_is_none_that_changes(check, train_own):
    """Torch cannot compare sparse tensors, and a graph network has one."""
    run = done(check, train_own("links", "--steps-per-epoch 2"))
    check.equal(notes=(run.values("start", "notes"), [[]]))


@clause("L18", "L17")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("name", ["counts_late", "sets_anew_late"])
def test_buffers_that_change_later_are_rank_0_s_when_it_is_evaluated(check, train_own, name):
    """The trial before the first step does not see the change; one note says so later."""
    run = done(check, train_own(name, "--save-steps 2"))
    told = [{*re.findall(r"evaluates with (\S+)", text)} - {"0.0"} for text in run.output]
    check["L18"].equal(evaluates_with=(told, [told[0]] * 2), buffers=([len(each) for each in told], [1, 1]))
    check["L17"].equal(notes=(run.output[0].count("began to change its buffers bright"), 1))


@clause("L18")
@only(sizes=(2,))
def test_what_no_snapshot_holds_is_each_rank_s_own(check, train_own):
    """This also holds while they evaluate."""
    run = done(check, train_own("keeps_a_cache", "--steps-per-epoch 3"))
    check.equal(ranks_with_another_s=([rank for rank, text in enumerate(run.output) if "another rank's cache" in text], []))


@clause("L21")
@only(sizes=(2, 4))
def test_parameters_that_no_row_asks_for_are_left_alone(check, world, runs, first, own_file, train_own):
    """Each row uses one of six experts, and none uses the last. A world of one shows which have a gradient."""
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


@clause("L20")
@only(sizes=(1, 2))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_are_rounded_as_was_asked_for(check, world, first, runs, train_own, precision):
    """bf16 moves the first loss by 3e-5, fp16 by 4e-6, fp32 by 4e-8. A kernel that rounds like its input gets fp32."""
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
    """Gradients are clipped to a hundredth: fp16, whose loss is scaled, then trains like fp32."""
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
    """Their gradients are not part of the norm by which the others are clipped."""
    flags = f"{own_file('leaves_a_layer_out')} --precision fp64 --epochs 1 --clip-norm 0.1"
    left, frozen = (world.train(first, runs.folder(first, f"left{way}"), f"{flags} {way}") for way in ("", "--frozen"))
    done(check, left, frozen)
    check.close(left.losses, frozen.losses, T1)
    check.close(left.values("step", "grad_norm"), frozen.values("step", "grad_norm"), T1, "gradient norms")


@clause("L18")
@only(sizes=(1, 2))
@pytest.mark.parametrize("reduction", ["ddp", "flat"])
def test_buffers_begin_as_the_model_has_made_them(check, world, train_own, reduction):
    """This includes buffers that no snapshot has, and frozen parameters, after rows were tried. Complex ones stay complex."""
    run = done(check, train_own("counts_calls", f"--steps-per-epoch 2 --reduction {reduction}"))
    calls = [re.findall(r"calls until the first step: (\w+)", text)[-1:] for text in run.output]  # also schedule() is tried
    check.equal(calls_until_the_first_step=(calls, [["1"]] * world.size))


@clause("L18")
@only(sizes=(1,), devices=("cpu",))
def test_of_a_large_part_that_is_frozen_no_copy_is_made(check):
    """A frozen average of the weights is copied, because the trial before the first step may move it."""
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
    """The seed sets only order and parameters: otherwise a curve under another seed would be a curve of other data."""
    import torch
    from ddp_core.workload import find

    sets = [find(name).data(SimpleNamespace(seed=seed)) for seed in (0, 1)]
    pairs = [pair for rows in zip(*sets, strict=True) for pair in zip(*(each.columns for each in rows), strict=True)]
    check.equal(rows_are_the_same=([torch.equal(*pair) for pair in pairs], [True] * len(pairs)))


@clause("L20")
@only(sizes=(1,))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rows_are_not_rounded(check, train_own, precision):
    """Autocast rounds the inputs of products, but not targets or a model's other computations."""
    run = done(check, train_own("tells_of_its_rows", f"--precision {precision} --steps-per-epoch 2"))
    products = [sorted({*re.findall(rf"products {kind} (\w+)", run.output[0])}) for kind in ("training", "held-out")]
    should_be = [[dict(bf16="bfloat16", fp16="float16")[precision]]] * 2
    check.equal(rounded=("rounded rows" in run.output[0], False), products_trained_and_held_out=(products, should_be))


@clause("L4")
@only(sizes=(1, 2))
def test_held_out_rows_come_no_more_at_once_than_others(check, world, train_own):
    """A user of small micro-batches has no memory for more rows."""
    run = done(check, train_own("tells_of_its_rows", "--accumulate 6 --steps-per-epoch 2"))
    counts = {kind: [*map(int, re.findall(rf"rows {kind} (\d+)", run.output[-1]))] for kind in ("training", "held-out")}
    most = {kind: max(each, default=0) for kind, each in counts.items()}
    check.equal(rows_at_once=(most, dict.fromkeys(most, G // world.size // 6)))


def packed(path: Path) -> None:
    """Replace a file by a compressed copy, as MNIST is downloaded."""
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@clause("L19", "S5", "S9")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", anchors.CASES)
def test_the_other_workloads_are_a_plain_loop_s(check, world, first, runs, name):
    """Records and best model of regression, mnist and gpt equal a plain loop's."""
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
    check["L19"].equal(data=(document["data"], case.data))
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
    """They equal one text that joins them by newlines: a file system lists a folder in any order."""

    def prepare() -> bool:
        sizes = dict(c=520, e=520, a=520, d=20, b=0)  # rows of 65 bytes, some of which span four files
        texts = {letter: bytes(ord(letter) ^ number % 7 for number in range(size)) for letter, size in sizes.items()}
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


@clause("L1")
@only(sizes=(1, 2), mpi=False, devices=("cpu",))
def test_a_run_that_was_killed_has_its_steps_on_record(check, world, train_own):
    """The run is killed once a step is in the file, long before the epoch ends."""
    all_ranks = tuple(range(world.size))
    killed = train_own("slow_steps", "--steps-per-epoch 14", kill_ranks=all_ranks, kill_at='"kind":"step"')
    expect_exit(check, killed, 137)
    text = world.on_rank_0((killed.folder / "run.jsonl").read_text)
    check.equal(ends_with_a_whole_line=(text.endswith("\n"), True), epochs=(text.count('"kind":"epoch"'), 0))


@clause("L1")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("length", [12, 200_000])
def test_half_a_line_that_a_killed_writer_has_left_is_taken_away(check, tmp_path, length):
    """The core's own Record removes it, or the log's next line would be a part of it."""
    from ddp_core.record import Record

    (tmp_path / LOG).write_text('{"kind":"step","step":0}\n' + '{"kind":"start'.ljust(length, "-"))
    record = Record(time.monotonic())
    record.open(tmp_path / LOG)
    record.write("step", step=1)
    lines = (tmp_path / LOG).read_text().split("\n")
    check.equal(lines=(lines, ['{"kind":"step","step":0}', '{"kind":"step","step":1}', ""]))


@clause("L14")
@only(sizes=(1, 2))
def test_parts_of_the_loss_have_their_names(check, train_own):
    """The names do not depend on the order of parts in a batch."""
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

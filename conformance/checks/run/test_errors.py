"""SPEC.md X: exit codes, one line an error, and nothing lost."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.checks.run.common import (
    FP64,
    IN_RANKS,
    LOG,
    MISTYPED,
    NOISY,
    NOISY_FILE,
    SHORT,
    SNAPSHOT,
    G,
    clause,
    done,
    expect_exit,
    long,
    one_line,
    only,
    stopped_and_saved,
)
from conformance.harness import anchors, core_of, reference
from conformance.harness.ports import free_port
from conformance.harness.reference import sha256, take_apart
from conformance.harness.stranger import stranger

pytestmark = IN_RANKS
# Mistakes in broken/workloads.py, with words that their errors must have.
MISTAKES = dict(syntax="syntax.py, line 8: ", no_class="one class that derives from ddp_core.Workload")
MISTAKES |= dict(raises="line 10 (loss): AttributeError", mean="loss() returns a mean over rows")
MISTAKES |= dict.fromkeys(("mean_of_hidden", "mean_below_zero", "is_0_of_the_first"), "loss() returns a mean over rows")
MISTAKES |= dict(unused="no gradient for 3.weight", mean_metric="metrics() has a mean over rows as 'error'")
MISTAKES |= dict(misspelled="has metric, which the core does not ask for", no_held_out="gave no held-out row")
MISTAKES |= dict(two_words="metrics() names 'top 5'", aside="self.temperature of the workload is neither trained nor saved")
MISTAKES |= dict(seldom="metrics() has a mean over rows as 'right'", calls_backward="loss() calls backward()")
MISTAKES |= dict(
    calls_backward_at_once="backward() is the core's to call", hides_layers="hidden of the model is neither trained nor saved"
)
MISTAKES |= dict(climbs="schedule() returned -0.25 at step 5", hooked="hooked, at step 0 (--debug: where): RuntimeError")
MISTAKES |= dict.fromkeys(("thaws", "freezes"), "requires_grad of 0.weight has changed by step")
MISTAKES |= dict(grows="the model's buffer places has the shape")
MISTAKES |= dict(names_a_part="metrics() has loss_a, the name of a loss")
MISTAKES |= dict(leaves="at step 3, line 11 (loss): SystemExit")
MISTAKES |= dict(sounds_lost="at step 3, line 11 (loss): RuntimeError: the peer timed out")
MISTAKES |= dict(skips_a_layer="had no gradient in step 3: set unused_parameters = True in the class")
MISTAKES |= dict(forgets_held_out="held-out rows have another form ([] of int64 against [64] of float32): data() returns (")
MISTAKES |= dict(
    lists_its_defaults="defaults is a list, and should be a dict(...)", says_no="unused_parameters is 'no', and should"
)
MISTAKES |= dict(names_no_flag="width is no flag: call it '--width'", gives_no_type="--width has the default 16 and no type")
MISTAKES |= dict(takes_no_config="optimizer(), line 9, of --workload takes_no_config: TypeError")
MISTAKES |= dict(
    keeps_a_teacher="self.teacher is float32 on", normalizes_in_training_mode="it: its dropout and BatchNorm are on"
)
MISTAKES |= dict(has_unequal_columns="columns of unequal length (0: 1438, 1: 1437)")
UNBUILT = dict(unbuildable="line 11 (model): NameError", reads_a_layer="--sharding none")
UNBUILT |= dict(clips_by_a_hook="0.weight has a hook, which its parts would not have")
UNBUILT |= dict(averages_its_weights="forward() moves an average of the weights (average.n_averaged)")
# Workloads that no loop can train, or no snapshot can hold, in any number of ranks.
REFUSED = dict(needs_a_closure="should return an optimizer of torch.optim that needs no closure")
REFUSED |= dict(rows_of_a_model="rows require a gradient (another model has made them, say)")
REFUSED |= dict(compiles="model() returned what torch.compile() has wrapped")
REFUSED |= dict(steps_a_stranger="optimizer() has 1 parameters that are not the model's")
REFUSED |= dict(sets_the_default_dtype="torch's default dtype is torch.float64: take set_default_dtype out")
REFUSED |= dict(schedules_by_torch="optimizer() made one of torch's lr_scheduler", lazy="3.weight, 3.bias has no shape yet")
REFUSED |= dict(keeps_an_extra_state="Net has get_extra_state()", expanded="ones is an expanded view", sparse="links is sparse")
REFUSED |= dict(ties_by_data="3.weight and 4.weight are parameters of one memory")
REFUSED |= dict(keeps_a_list="keeps_a_list: the optimizer Keeps keeps seen, and a snapshot holds tensors and numbers")
REFUSED |= dict(returns_no_row="row 219 of --workload returns_no_row: TypeError: __getitem__ returned None for row 219")
REFUSED |= dict(has_an_odd_row="held-out row 7 of --workload has_an_odd_row: TypeError: row 7 is ([63], [])")
REFUSED |= dict(moves_twice="3.running_mean, 3.running_var, 3.num_batches_tracked, and --checkpoint-activations computes it")


@clause("X4")
@only(sizes=(2,), devices=("cpu",))
def test_on_two_nodes_rank_0_is_not_met_at_localhost(check, world, runs, first):
    """Each node would wait for itself there."""
    names = first.variables_with("master_addr")
    here = dict.fromkeys(names, "localhost")
    run = expect_exit(check, world.train(first, runs.folder(first, "at-localhost"), SHORT, 2, environ=here), 3)
    words = [f"{name}='localhost'" for name in names]
    check.equal(ranks_that_name_it=([any(word in text for word in words) for text in run.errors], [True, True]))


@clause("R2")
@only(sizes=(1, 2))
def test_a_device_that_is_not_there_is_refused(check, world, runs, first):
    """A run on the CPU instead would be 100 times slower, with one word of its record as the only sign."""
    absent = "xpu" if world.device != "xpu" else "cuda"
    run = world.train(first, runs.folder(first, "absent-device"), f"{SHORT} --backend auto --device {absent}")
    one_line(check, run, 3, f"--device {absent}", run.lines)
    check.equal(starts=(len(run.of("start")), 0))


@clause("X2")
@only(sizes=(2,))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_other_signals_stop_it_too(check, world, runs, first, number):
    """A cancelled job and Ctrl-C stop it."""
    path, at = runs.folder(first, number.name), '"kind":"step"'
    run = world.train(first, path, long(world)[0], kill_ranks=(1,), kill_at=at, kill_by=number)
    stopped_and_saved(check, run)
    words = f"and saved; --run-dir {run.folder} resumes it"
    check.equal(says=(words if words in "".join(run.output) else run.output, words))


@clause("X2")
@only(sizes=(1, 2), devices=("cpu",))
def test_slow_steps_stop_within_seconds(check, train_own):
    """For steps of 0.3 s, the ranks communicate once a second, and the interval does not double each time."""
    run = train_own("told_in_slow_steps", apart=True)
    stopped_and_saved(check, run)
    steps = run.values("end", "step")[-1] - 7
    check.equal(stops_after=("1 to 5 steps" if steps <= 5 else f"{steps} steps", "1 to 5 steps"))


@clause("X2")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_signal_to_every_process_of_the_job_stops_it_as_well(check, train_own):
    """Schedulers signal also the processes that read rows, which continue until their rank has saved."""
    stopped_and_saved(check, train_own("told_with_its_workers", "--workers 1"))


@clause("X2")
@only(sizes=(1,), devices=("cpu",))
def test_a_process_of_the_workload_s_own_ends_when_it_is_told_to(check, train_own):
    """It does not inherit the signal handler: a multiprocessing.Pool ends its processes by SIGTERM, and waits for them."""
    run = done(check, train_own("has_a_helper", "--steps-per-epoch 1", apart=True))
    check.equal(ended_by=(re.findall(r"helper ended by (\S+)", run.output[0]), [str(int(signal.SIGTERM))]))


@clause("X2")
@only(sizes=(1, 2), devices=("cpu",))
def test_another_signal_while_it_stops_costs_nothing(check, world, train_own):
    """Ctrl-C under torchrun sends two signals. A scheduler may send one before, and a launcher one when ranks end."""
    run = train_own("told_thrice", apart=True)
    stopped_and_saved(check, run)
    reasons = [word for text in run.output for word in re.findall(r"stopped early \((\w+)\)", text)]
    check.equal(reasons=(reasons, ["SIGTERM"]))
    ignored = [text.count("ignores SIGTERM: True") for text in run.output]
    check.equal(ignores_SIGTERM_as_it_leaves=(ignored, [1] * world.size if world.size > 1 else [0]))  # Python ends a lone rank


SENSELESS = {
    "an empty history": dict(history=[]),
    "a step of another epoch": dict(step=41),
    "a step of a later epoch": dict(step=57),
    "a best epoch that is yet to come": dict(best=[3, "0x1p-1"]),
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


@clause("X3")
def test_a_mistyped_flag_is_one_line(check, world, own, runs):
    run = world.train(own, runs.folder(own, "mistyped"), MISTYPED)
    one_line(check, run, 2, "--epochs", run.lines)


@clause("X3")
@only(sizes=(1, 2))
def test_help_is_printed_once(check, world, runs, first):
    run = done(check, world.train(first, runs.folder(first, "help"), "--help"))
    check.equal(ranks_that_print_it=([rank for rank, text in enumerate(run.output) if "--workload" in text], [0]))


@clause("X9")
@only(sizes=(1,), devices=("cpu",))
def test_a_file_that_hides_a_module_of_python_s_is_named(check, runs, first):
    """A module beside the script is checked in a separate process, since torch's imports would end in a traceback."""
    folder = runs.root / "beside"
    folder.mkdir()
    (folder / "signal.py").write_text("signal = 1\n")
    program = shutil.copy(first.train, folder)
    end = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, timeout=60, check=False)
    words = f"error: {folder / 'signal.py'} hides Python's own module signal: rename it"
    check.equal(exit_code=(end.returncode, 2), says=(end.stderr.splitlines(), [words]))


# Flags, with words that the error must have.
NONSENSE = {"mine.py": "is it --workload mine.py?", "--lr 0": "--lr", "--lr nan": "--lr"}
NONSENSE |= {"--precision fp8": "--precision", "--timeout 0": "--timeout"}
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
    """The defaults hold for a workload that sets none."""
    file = tmp_path / "plain.py"
    file.write_text("from ddp_core.workloads.digits import Digits\n\nclass Plain(Digits):\n    defaults = {}\n")
    from ddp_core import config

    workload = config.choose(["--workload", str(file)])
    found = config.parse([], 1, workload=workload)
    check.equal(defaults=({name: getattr(found, name) for name in DEFAULTS}, DEFAULTS))
    sizes = {"4096": 4096, "131KB": 131_000, "2mb": 2 * 10**6, "3GB": 3 * 10**9, "1TB": 10**12}
    read = {text: config.parse(["--max-shard-size", text], 1, workload=workload).max_shard_size for text in sizes}
    check.equal(bytes_of_sizes=(read, sizes))


@clause("X5")
@only(sizes=(2,))
@pytest.mark.parametrize("copy", ["has_an_empty_line", "has_other_flags"])
def test_ranks_with_different_files_of_one_name(check, world, runs, first, copy):
    """One node has a stale copy."""
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


@clause("X5")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("flags", ["", "--reduction flat", "--sharding full"])
def test_ranks_that_compute_otherwise(check, train_own, flags):
    """Their rows and parameters are the same. What differs at each call is no mistake of a rank."""
    one_line(check, train_own("other_pixels", flags), 4, "rank 1 computes another loss than rank 0")
    done(check, *(train_own(name, f"--steps-per-epoch 2 {flags}") for name in ("noise_in_its_loss", "noise_in_its_rows")))


@clause("X5")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_alone_states_is_named(check, rank):
    """The core's own check-in runs without a network: the other rank reports no such value."""
    from ddp_core.errors import RendezvousError

    from conformance.harness.counted import check_in_of

    said = "all are well"
    try:
        check_in_of(2, {rank: dict(shape=7)})
    except RendezvousError as error:
        said = str(error)
    words = "shape=7 on rank 1" if rank else "but 7 on rank 0"
    check.equal(says=(words if words in said else said, words))


@clause("X12")
@only(sizes=(2,))
def test_what_one_rank_alone_lacks_is_told_once(check, world, runs, first):
    """Its node does not see the data that rank 0 reads."""
    data = runs.root / "data-seen-by-rank-0"
    world.on_rank_0(lambda: bool(anchors.mnist_rows(data)))
    flags = f"--workload mnist --epochs 1 --global-batch-size 24 --data-dir {data}"
    run = world.train(first, runs.folder(first, "lacking"), flags, odd_flags="--data-dir /nowhere")
    one_line(check, run, 3, "rank 1: --data-dir /nowhere", run.lines)


@clause("X12")
@only(sizes=(1,))
def test_files_of_data_that_do_not_fit_each_other(check, world, runs, first):
    """mnist has one label less than the header of its file says."""
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
    """The launcher returns the highest code of the ranks: 7 would restart the job, to fail again."""
    run = expect_exit(check, train_own("fails_alone_in_a_step", f"--of-rank {rank}", apart=True), 2)
    check.equal(recorded=([record["exit_code"] for record in run.of("end")], [2]))


@clause("X12")
@only(sizes=(2,))
@pytest.mark.parametrize("flags", ["", "--sharding full"], ids=["ddp", "sharded"])
def test_a_parameter_that_one_rank_leaves_out_ends_all(check, train_own, flags):
    """Under ddp the other ranks would wait for its gradient until --timeout; FSDP2 would add another's in its place."""
    run = expect_exit(check, train_own("skips_on_one_rank", f"--timeout 40 {flags}", apart=True), 2)
    says = "had no gradient in step 3: "
    check.equal(says=(says if says in "".join(run.errors) else "".join(run.errors)[-300:], says))


@clause("X12")
@only(sizes=(2,), devices=("cpu",))
def test_a_rank_that_comes_late_hears_why_all_end(check, world, train_own):
    """Its exit code is the same, because the launcher returns the highest code of the ranks."""
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
@pytest.mark.parametrize("name", ["overflows", "overflows_twice", "overflows_on_rank_1", "steep", "steep_unfused"])
def test_numbers_that_are_not_finite_reach_no_parameter(check, world, train_own, name):
    """No step trained before the error is found uses them: the workload checks its own parameters."""
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
    """Later steps, trained before the error is found, have finite numbers or gradients, but change nothing."""
    run = expect_exit(check, train_own(name), 6)
    sums = dict(re.findall(r"parameters at step (\d): (\S+)", run.output[0]))
    check.equal(of_step_4_and_later=({total for step, total in sums.items() if step >= "4"}, {sums.get("4")}))
    check.equal(changes_before=(sums.get("4") == sums.get("3"), False))


@clause("X6")
@only(sizes=(1, 2))
def test_gradients_that_are_never_finite_end_fp16_too(check, train_own):
    """fp16 skips steps and halves the loss scale only as long as that may help."""
    expect_exit(check, train_own("always_steep", "--precision fp16 --epochs 3"), 6)


@clause("X6")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["unfit", "unfit_in_a_metric"])
def test_a_held_out_loss_that_is_not_finite(check, world, train_own, name):
    """Or a metric."""
    run = expect_exit(check, train_own(name, "--steps-per-epoch 2"), 6)
    kept = world.on_rank_0(lambda: [path.name for path in run.folder.glob("*.safetensors")])
    check.equal(snapshots=(kept, []))


@clause("X11")
@pytest.mark.parametrize(
    "flags, nodes",
    [
        pytest.param("", 1, marks=only(sizes=(2,))),
        pytest.param("--sharding hybrid", 2, marks=only(sizes=(4,), devices=("cpu",))),
    ],
    ids=["whole", "hybrid"],
)
def test_replicas_that_differ_leave_no_snapshot(check, world, train_own, flags, nodes):
    run = expect_exit(check, train_own("diverges", f"--precision fp64 {flags}", num_nodes=nodes), 7)
    output = "".join(run.errors)
    check.equal(
        names_the_rank=(f"of rank {world.size - 1} differ" in output, True), snapshot=((run.folder / SNAPSHOT).exists(), False)
    )


@clause("X11")
@only(sizes=(2,), devices=("cpu",))
def test_replicas_that_differ_from_the_start_do_no_step(check, train_own):
    run = train_own("makes_another_model", "--reduction flat")
    one_line(check, run, 7, "model() makes other parameters there, by name or shape")
    check.equal(steps=(run.of("step"), []))


@clause("X11")
@only(sizes=(2,))
def test_what_the_model_moves_by_itself_is_not_laid_on_a_node(check, train_own):
    one_line(check, train_own("moves_a_parameter"), 7, "if the model moves code by a rank's own rows, make it a buffer")
    one_line(check, train_own("writes_a_parameter"), 7, "the model writes 3.bias when it is called, each rank by its own rows")


@clause("X7")
@only(sizes=(2, 4), devices=("cpu",))
@pytest.mark.parametrize("rank", [pytest.param(0, marks=only(sizes=(2,))), 1])
def test_a_killed_rank_is_named_by_the_others(check, world, runs, first, rank):
    """The error names that rank, and no rank that only waits because of it."""
    run = world.train(first, runs.folder(first, f"lost-{rank}"), long(world)[0], kill_ranks=(rank,))
    check.equal(exit_codes=(run.exit_codes, [137 if other == rank else 7 for other in range(world.size)]))
    for words in (f"rank {rank} died or hangs", f"then submit again with --run-dir {run.folder};"):
        check.equal(says=(words if words in "".join(run.errors) else run.errors, words))


@clause("X7")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_a_rank_that_hangs_is_named_by_the_others(check, train_own, where):
    """It is named after --timeout, in every process group."""
    run = expect_exit(check, train_own("hangs", f"--steps-per-epoch 5 --timeout 3 --where {where}", apart=True), 7)
    words = "rank 1 died or hangs"
    check.equal(says=(words if words in run.errors[0] else run.errors, words))


@clause("X7")
@only(sizes=(2,), devices=("cpu",))
def test_ranks_that_send_each_other_unlike_messages_end_with_7(check, train_own):
    """gloo then ends the process, and no exception reaches Python."""
    expect_exit(check, train_own("sends_more", "--steps-per-epoch 5 --timeout 5", apart=True), 7)


@clause("X7")
@only(sizes=(4,), devices=("cpu",))
def test_a_rank_that_hangs_in_the_groups_of_its_node_is_noticed(check, train_own):
    """The other ranks of its node wait for its gradients in the node's group, not in the global one."""
    flags = "--steps-per-epoch 5 --timeout 3 --where loss --sharding hybrid"
    expect_exit(check, train_own("hangs", flags, num_nodes=2, apart=True), 7)


@clause("X15")
@only(sizes=(2,))
def test_ranks_that_do_not_come_are_named(check, world, runs, first):
    """The last rank is started with --help, and ends at once."""
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
    """SIGTERM: the launcher ends the rank because another one has failed, and 75 would restart the job, to fail again.
    SIGUSR1: the scheduler's time limit is near, and a restart is right.
    """
    run = train_own("told_before_they_meet", odd_flags="--help", environ=dict(TOLD=name), apart=True)
    of = check["X15" if code == 4 else "X2"]
    of.equal(exit_codes=(run.exit_codes, [code, 0]), names_the_signal=(f"{name} before {words}" in "".join(run.errors), True))


@clause("X16")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_stranger_changes_no_run(check, world, runs, first):
    """The stranger writes into the store all the time, and records the addresses on which the store listens."""
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
    shown = repr(replace(Rank.single(), secret="a" * 32))  # as in a traceback, or a site's print()
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
    """A stranger can copy a signed message. This uses the core's own store, without a network."""
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
    """Version numbers are equal; one file differs by an empty line."""
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

    # Locks of a process whose number was reused, as after a reboot; and of a host that cannot be asked.
    for other in (dict(began="long ago"), dict(host="elsewhere")):
        world.on_rank_0(lambda other=other: leave_a_lock(**other))
        again = done(check, world.train(first, run_dir, SHORT))
        check.equal(**{f"warns_of_{next(iter(other))}": ("another" in again.output[0], True)})


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("where, place", [("host", dict(host="elsewhere")), ("container", dict(pids="pid:[1]", pid=4194303))])
def test_a_lock_that_is_touched_elsewhere_is_a_living_job_s(check, world, runs, first, own_file, where, place):
    """The lock's time is the file server's, so this host's clock, an hour ahead, does not matter."""
    from ddp_core.run_directory import RunDirectory

    run_dir, over = runs.folder(first, f"locked-in-another-{where}"), threading.Event()
    directory, lock = RunDirectory(str(run_dir), "another"), run_dir / "run.lock"
    owner = json.loads(lock.read_text())
    directory.release()
    lock.write_text(json.dumps(owner | place))
    half = run_dir / ".snapshot.safetensors.tmp"  # the other job is writing it
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
    """This includes a snapshot that it had begun to write before."""
    run = expect_exit(check, train_own("loses_its_lock", "--steps-per-epoch 2", apart=True), 8)
    names = world.on_rank_0(lambda: [path.name for path in run.folder.glob("*.safetensors*")])
    check.equal(snapshots=(names, []), the_other_s_lock_is_there=(world.on_rank_0((run.folder / "run.lock").exists), True))


@clause("X14")
@only(sizes=(1, 2), devices=("cpu",))
def test_who_has_lost_the_lock_writes_no_line(check, train_own):
    """From the next heartbeat on, long before the next save, the log belongs to the new owner."""
    run = expect_exit(check, train_own("loses_its_lock_in_a_step", apart=True), 8)
    late = [record["kind"] for record in run.records if record["kind"] != "start" and record.get("step", 2) > 1]
    check.equal(written_since=(late, []))


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
def test_a_living_job_touches_its_lock(check, world, runs, first, monkeypatch):
    """It does so every 10 s, even after its file system has failed once. A lock silent for 60 s is a dead job's."""
    from ddp_core import run_directory, run_lock

    check.equal(seconds_between_beats=(run_lock.HEARTBEAT, 10.0))
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.05)
    directory = run_directory.RunDirectory(runs.folder(first, "touched"), "1")
    lock, end = directory.folder / "run.lock", time.monotonic() + 10
    utime, away = os.utime, [OSError(errno.ESTALE, "stale file handle")]

    def touch(*words) -> None:
        if away:
            raise away.pop()
        utime(*words)

    monkeypatch.setattr(os, "utime", touch)
    while away and time.monotonic() < end:
        time.sleep(0.02)
    utime(lock, (0, 0))
    while not lock.stat().st_mtime and time.monotonic() < end:
        time.sleep(0.02)
    check.equal(errors=(1 - len(away), 1), touched=(lock.stat().st_mtime > 0, True))
    directory.release()


def another_s_lock(run_dir: Path, monkeypatch, heartbeat: float) -> Path:
    """Write a lock of a host that cannot be asked. heartbeat: seconds (normally 10)."""
    from ddp_core import run_lock

    monkeypatch.setattr(run_lock, "HEARTBEAT", heartbeat)
    run_dir.mkdir(parents=True)
    lock = run_dir / "run.lock"
    lock.write_text('{"job_id": "another", "host": "elsewhere", "pid": 1}')
    return lock


def code_of_taking(run_dir: Path, **stop) -> int:
    from ddp_core import errors, run_directory

    try:
        run_directory.RunDirectory(run_dir, "1", **stop).release()
    except errors.Failure as failure:
        return int(failure.code)
    return 0


@clause("X2")
@only(sizes=(1,), devices=("cpu",))
def test_who_looks_whether_a_lock_is_touched_hears_that_it_is_to_stop(check, runs, first, monkeypatch):
    """Watching a lock takes a minute, longer than a scheduler waits. Here it takes 3 s, and the stop comes before it."""
    lock, began = another_s_lock(runs.folder(first, "told-at-a-lock"), monkeypatch, 0.5), time.monotonic()
    code = code_of_taking(lock.parent, stop=SimpleNamespace(reason="SIGTERM"))
    check.equal(exit_code=(code, 75), looks_to_the_end=(time.monotonic() - began > 2, False))
    check.equal(the_other_s_lock_is_there=(lock.exists(), True))


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
def test_a_beat_that_is_late_is_no_death(check, runs, first, monkeypatch):
    """The heartbeat is three times as late as usual, as on a busy file system."""
    lock = another_s_lock(runs.folder(first, "late"), monkeypatch, 0.5)
    threading.Timer(1.5, lambda: lock.exists() and os.utime(lock)).start()
    check.equal(exit_code=(code_of_taking(lock.parent), 3))


class After:
    """A stop request that arrives after so many seconds."""

    reason = "SIGTERM"

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def __bool__(self) -> bool:
        return time.monotonic() > self.end


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
def test_a_lock_of_a_clock_that_is_ahead_is_watched_no_longer(check, runs, first, monkeypatch):
    """The lock's time is an hour ahead: the file server's clock was set back after the job died."""
    lock, ahead = another_s_lock(runs.folder(first, "of-tomorrow"), monkeypatch, 0.1), time.time() + 3600
    os.utime(lock, (ahead, ahead))
    check.equal(exit_code=(code_of_taking(lock.parent, stop=After(6)), 0))


@clause("X14")
@only(sizes=(1,), devices=("cpu",))
def test_who_has_lost_the_lock_moves_no_snapshot(check, world, runs, first):
    """Both snapshots are the new owner's, and stay."""
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
    """A process that was suspended during a save continues it, and then learns that it has lost the lock."""
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
    """The disk is full only after the last snapshot."""
    run = train_own("fills_up_at_last", apart=True)
    one_line(check, run, 8, f"{LOG}: ")
    one_line(check, run, 8, f"submit again with --run-dir {run.folder}")


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
    """The line comes before any line of an epoch."""
    run = train_own(name, apart=name == "sets_the_default_dtype")  # of its process
    one_line(check, run, 2, REFUSED[name], [line for line in run.lines if not line.startswith("rank=")])


@clause("X9")
@only(sizes=(1, 2))
def test_a_buffer_that_held_out_rows_grow_is_no_snapshot_s(check, train_own):
    """The error comes after the epoch's line, and before a save."""
    run = train_own("grows_held_out")
    one_line(check, run, 2, "the model's buffer places has the shape")
    check.equal(snapshots=((run.folder / SNAPSHOT).exists(), False))


@clause("X9")
@only(sizes=(1,), devices=("cpu",))
def test_a_workload_s_own_default_for_its_run_directory_is_refused(check, train_own):
    """Job scripts learn the run directory from the flags alone."""
    one_line(check, train_own("names_its_run"), 2, "--run-dir is for the command line alone")


@clause("X9")
@only(sizes=(2,))
@pytest.mark.parametrize("name", UNBUILT)
def test_a_model_that_cannot_be_built_in_shards_is_one_line(check, train_own, name):
    """The ranks build the model in turn. A layer that is read but not called cannot be sharded, nor can one with a hook."""
    one_line(check, train_own(name, "--sharding full"), 2, UNBUILT[name])


@clause("C10")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_parameter_that_forward_hands_on_is_trained_in_shards(check, train_own):
    """Sharding frees the parameter's memory when forward ends."""
    name, flags = "hands_on_a_parameter", "--steps-per-epoch 2 --precision fp64"
    runs = (train_own(name, f"{flags} --sharding {sharding}", apart=True) for sharding in ("full", "none"))
    parts, whole = done(check, *runs)
    check.equal(losses_are_near=(bool(np.allclose(parts.losses, whole.losses, rtol=1e-9)), True))


@clause("X9")
@only(sizes=(2,))
def test_a_forward_past_ddp_is_one_line(check, train_own):
    """Such a step sums no gradients, and the replicas drift apart."""
    one_line(check, train_own("past_ddp"), 2, "forward() goes past DistributedDataParallel")


@clause("X9")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["", "--in-collate"])
def test_a_row_that_cannot_be_read_is_named(check, world, train_own, where, workers):
    """Rank 0, which reads the row, names it, although workers have read later batches."""
    run = train_own("misses_a_row", f"--workers {workers} --precision fp64 {where}", apart=True)
    rows = reference.sample_order(0, 0, 1438)[5 * G : 6 * G : world.size][:3]
    words = f"rows {', '.join(map(str, rows))}" if where else f"row {rows[0]} of"
    observed = words if words in run.errors[0] else run.errors[0].strip()
    check.equal(exit_code=(run.exit_codes[0], 2), names_its_rows=(observed, words))


@clause("X10")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("batches", [0.5, 1.5, 2.5])
def test_a_worker_that_dies_is_named(check, world, train_own, batches):
    """The rank waits for its first batch, forks others, or is in its first step: workers read two batches ahead."""
    last, began = int(batches * G / world.size), time.monotonic()
    run = expect_exit(check, train_own("dies", f"--workers 1 --last {last} --timeout 80", apart=True), 7)
    words = "a worker that reads rows died"
    check.equal(says=(words if words in "".join(run.errors) else run.errors, words))
    check.equal(is_noticed_by_timeout_alone=(time.monotonic() - began > 80, False))


@clause("X10")
@only(sizes=(1,), devices=("cpu",))
def test_a_worker_that_hangs_is_named(check, train_own):
    """The error comes after --timeout."""
    run = expect_exit(check, train_own("dies", "--workers 1 --hangs-for 8 --timeout 2", apart=True), 7)
    words = "a worker that reads rows died or hangs (DataLoader timed out"
    check.equal(says=(words if words in "".join(run.errors) else run.errors, words))


@clause("X10")
@only(sizes=(1,), devices=("cpu",))
def test_a_worker_that_hangs_ends_with_its_rank(check, train_own):
    """The worker has read the rows of the first step."""
    flags = f"--workers 1 --last {G + 9} --hangs-for 8"
    run = expect_exit(check, train_own("dies", flags, kill_ranks=(0,), kill_at='"kind":"step"'), 137)
    check.equal(a_worker_has_outlived_it=((run.folder / "woke").exists(), False))

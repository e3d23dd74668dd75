"""SPEC.md C: a run resumes where it was, also at other sites and world sizes."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from conformance.checks.run.common import (
    ALL,
    DRAWS,
    FP64,
    IN_RANKS,
    LOG,
    NOISY,
    SETS,
    SHORT,
    SNAPSHOT,
    STEP_7_AND_14,
    clause,
    damaged_copy,
    done,
    expect_exit,
    long,
    machine,
    one_line,
    only,
    stopped_and_saved,
    verified,
)
from conformance.golden import make as golden
from conformance.harness import anchors, sites
from conformance.harness.check import T0, T1
from conformance.harness.reference import sha256, take_apart

pytestmark = IN_RANKS
SHARDED = f"{golden.RUN} --sharding full"


def renumber(path: Path) -> None:
    """Change a snapshot's format number to a newer one."""
    path.write_bytes(path.read_bytes().replace(b'\\"format\\":2', b'\\"format\\":3'))


@clause("C8")
@only(sizes=(1, 2))
def test_the_last_epoch_is_saved_though_nothing_else_is_due(check, world, train_own):
    """There are no held-out rows, and --save-every does not save this epoch."""
    run = done(check, train_own("nothing_held_out", "--precision fp64 --epochs 3 --save-every 2"))
    document = world.on_rank_0(lambda: take_apart(run.folder / SNAPSHOT)["document"])
    check.equal(snapshots=(run.values("snapshot", "step"), [28, 42]), step=(document["step"], 42))
    check.equal(epochs=(run.values("epoch", "step"), [14, 28, 42]), of_the_snapshot=(len(document["history"]), 3))
    check.close(run.losses, golden.load()["losses"], T1)


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


@clause("C1")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("save_every", [99, 1])
def test_stopped_at_the_end_of_an_epoch_it_saves_once(check, train_own, save_every):
    """It saves even if --save-every does not save that epoch. The save is the last one, and the previous snapshot stays."""
    run = train_own("told_at_an_end", f"--epochs 3 --save-every {save_every}", apart=True)
    stopped_and_saved(check, run)
    steps = run.values("snapshot", "step")
    check.equal(saved_twice=([step for step in steps if steps.count(step) > 1], []))


@clause("C1")
@only(sizes=(1, 2), devices=("cpu",))
def test_told_in_its_last_step_it_is_done(check, train_own):
    """With 75 its job would come back without a step to train."""
    run = done(check, train_own("told_at_an_end", apart=True))
    check.equal(snapshots=(run.values("snapshot", "step"), [14]))


@clause("C1")
@only(sizes=(1,), devices=("cpu",))
def test_stopped_at_a_step_that_is_saved_it_saves_once(check, world, runs, first, own_file):
    """It then resumes, and a later --eval-every does not evaluate an earlier epoch."""
    flags, path = f"{own_file('told_thrice')} --epochs 3 --steps-per-epoch 4 --precision fp64", runs.folder(first, "told-at-6")
    stopped = expect_exit(
        check, world.train(first, path, f"{flags} --save-steps 6 --save-every 9 --eval-every 3", apart=True), 75
    )
    check.equal(snapshots=(stopped.values("snapshot", "step"), [6]))
    again = done(check, world.train(first, path, f"{flags} --eval-every 1", apart=True))
    last = {record["epoch"]: record for record in again.of("epoch")}
    check.equal(evaluated=(["eval_loss" in last[epoch] for epoch in range(3)], [False, True, True]))
    check.close([record["loss"] for record in last.values()], [sum(again.losses[i : i + 4]) / 4 for i in (0, 4, 8)], T1)


@clause("C1")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("epochs", [1, 2])
def test_stopped_while_it_evaluates_it_does_so_at_the_next_start(check, world, runs, first, own_file, epochs):
    """Evaluation may take longer than a scheduler waits, and no step is left after the last epoch."""
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
    """A run completes even if all of its starts are stopped early."""
    file, path = own_file("told_while_evaluated", "told-early"), runs.folder(first, "told-early")
    stopped = world.train(first, path, f"{file} --epochs 1")
    resumed = world.train(first, path, f"{file} --epochs 1 --early")
    stopped_and_saved(check, stopped)
    check.equal(evaluated=(done(check, resumed).values("epoch", "epoch"), [0]))


def same_as_never_stopped(check, world, resumed, never) -> None:
    __tracebackhide__ = True
    check.equal(losses=(resumed.values("step", "loss_hex"), never.values("step", "loss_hex")))
    check.close(resumed.losses, never.losses, T0)
    here, path = world.on_rank_0(lambda: [sha256(one.folder / SNAPSHOT) for one in (resumed, never)])
    check.equal(snapshot_sha256=(here, path))


@machine()
@clause("C2", "C11")
def test_continued_by_another_site_at_another_world_size(check, world, own, runs, handed_on, pytestconfig):
    """On CPUs, 4 ranks change the kind of 2 ranks' snapshots: whole models continue sharded, and sharded ones under ddp."""
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
    """Snapshots after two of three epochs go to other world sizes; at every second site, 2 ranks save a sharded model's."""
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
    """The larger snapshot has all tensors of this run, and more; a smaller one lacks some."""
    file, shorter = own_file("loses_a_layer"), runs.root / "workloads" / "loses_a_layer.py.shorter"
    for than, change in dict(larger=shorter.touch, smaller=shorter.unlink).items():
        path = runs.folder(first, f"{than}-model")
        done(check, world.train(first, path, f"{file} --epochs 1"))
        world.on_rank_0(change)
        run = expect_exit(check, world.train(first, path, f"{file} --epochs 2"), 5)
        check.equal(names_the_tensor=("model.3." in "".join(run.errors), True))


# Flags that each make another problem than the reference run; then flags that do not.
OTHERS = "--workload regression|--global-batch-size 48|--steps-per-epoch 7|--optimizer adamw|--lr 0.2|--momentum 0.8"
OTHERS += "|--weight-decay 0.1|--lr-schedule cosine|--warmup-steps 3|--clip-norm 1|--precision fp32|--row-seeds off"
SAME = "--accumulate 2 --reduction flat --save-every 2 --eval-every 2 --log-every 5 --save-minutes 3 --save-steps 9"
SAME += " --timeout 50"


@clause("C2", "C3")
@only(sizes=(1, 2))
def test_what_is_another_problem_and_what_is_not(check, world, runs, first, own_file):
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
    file, fewer = own_file("names_its_rows"), runs.folder(first, "fewer-rows")
    done(check["C3"], world.train(first, fewer, f"{file} --epochs 1"))
    expect_exit(check["C3"], world.train(first, fewer, f"{file} --epochs 2 --rows 1000"), 5)
    again = done(check["C2"], world.train(first, path, f"{FP64} {SAME}"))
    check["C2"].equal(started_at_steps=(again.values("start", "step"), [0, 42]))


@clause("C2")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name", ["mnist", "gpt"])
def test_data_that_were_moved_are_the_same(check, world, runs, first, name):
    """Users move data to a faster file system, or away from one that purges."""
    case, folder = anchors.CASES[name], runs.folder(first, f"moved-{name}")
    places = [runs.root / f"{where}-{name}" for where in ("first", "then")]
    world.on_rank_0(lambda: [bool(case.rows(data)) for data in places])
    for epochs, data in enumerate(places, 1):
        done(check, world.train(first, folder, f"{case.flags.format(data=data)} --epochs {epochs} --steps-per-epoch 2"))


@clause("C3")
@only(sizes=(1, 2))
@pytest.mark.parametrize("schedule", ["cosine", "its_own", "its_loss"])
def test_a_schedule_is_laid_out_over_the_run(check, world, runs, first, own_file, schedule):
    """With other --epochs, the learning rate would jump."""
    files = dict(its_own="scheduled", its_loss="anneals")
    flags = own_file(files[schedule]) if schedule in files else "--workload digits --lr-schedule cosine"
    path = runs.folder(first, f"scheduled-{schedule}")
    done(check, world.train(first, path, f"{flags} --epochs 1"))
    expect_exit(check, world.train(first, path, f"{flags} --epochs 2"), 5)

    def forget() -> None:
        from ddp_core import snapshot

        tensors, document = snapshot.read(path / SNAPSHOT)
        del document["problem"]["epochs"], document["document_crc32"]
        snapshot.write(path / SNAPSHOT, tensors, document)

    world.on_rank_0(forget)  # as an older core wrote it, which did not note whether a loss reads the epochs
    done(check, world.train(first, path, f"{flags} --epochs 2"))


@clause("C3")
@only(sizes=(1, 2))
@pytest.mark.parametrize("name, file", [("mnist", "train-images-idx3"), ("mnist", "t10k-labels-idx1"), ("gpt", "2.txt")])
def test_other_data_under_the_same_names_are_refused(check, world, runs, first, name, file):
    """One file's last byte differs: of images beyond the first megabyte, of held-out labels, of a second text."""
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

    larger = torch.zeros(2**30 + 2**21, dtype=torch.uint8)  # memory is used only for pages that are written
    rows = larger[: 2**30]
    before, larger_before = data.digest([rows]), data.digest([larger])
    rows[2**29 + 3 * 2**19] = larger[-1] = 1  # in the middle of 64 MB, and the last one
    check.equal(equal=(data.digest([rows]) == before, False))
    check.equal(of_more_equal_though_the_last_byte_is_not=(data.digest([larger]) == larger_before, False))


@clause("C2")
@only(sizes=(1,), devices=("cpu",))
def test_a_snapshot_of_the_first_format_goes_on_to_its_own_losses(check, world, runs, first):
    """An older version wrote it in mid-epoch, with AdamW's state, and its further losses are known."""
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
    done(check, world.train(own, path, f"{FP64} --save-steps 7"))  # two saves; the damaged file is moved once
    step = world.on_rank_0(lambda: take_apart(path / "snapshot.prev.safetensors")["document"]["step"])
    check.equal(snapshot_prev_at_step=(step, 35))
    world.on_rank_0(lambda: damage(SNAPSHOT, "snapshot.prev.safetensors"))
    expect_exit(check, world.train(own, path, FP64), 5)


@clause("C4")
@only(sizes=(2,), devices=("cpu",))
def test_a_damaged_snapshot_is_not_dealt_out_in_parts(check, world, own, runs):
    """Each rank of a sharded run reads only its own rows, and all ranks learn of the damage."""
    run, path = runs.train(own, FP64), runs.folder(own, "damaged-parts")
    done(check, run)
    world.on_rank_0(lambda: [path.mkdir(), damaged_copy(run.folder / SNAPSHOT, path / SNAPSHOT)])
    expect_exit(check, world.train(own, path, f"{FP64} --epochs 4 --sharding full"), 5)


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
    world.on_rank_0(lambda: [path.unlink() for path in run_dir.glob("snapshot*")])  # as a file system purges them
    one_line(check, world.train(first, run_dir, FP64), 5, "restore a copy")


@clause("C4")
@only(sizes=(1,))
def test_a_document_that_is_damaged_counts_as_well(check, world, runs, first):
    """One digit of the document differs; the tensors are intact."""
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
    """Another --max-shard-size left the set: the file may be further, so its own predecessor is used."""
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


@clause("C4")
@only(sizes=(1, 2), devices=("cpu",))
def test_the_files_of_a_damaged_index_are_not_swept_away(check, world, runs, first):
    """The files are intact, and the index can be mended by hand. A save removes only files that no index names."""
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
    """Otherwise the run would resume from the snapshot before, and lose its last epoch."""
    flags, run_dir = own_file("lacks_memory_to_read"), runs.folder(first, "no-memory-to-read")
    done(check, world.train(first, run_dir, f"{flags} --steps-per-epoch 2 --epochs 2"))
    names = [SNAPSHOT, "snapshot.prev.safetensors", "best.safetensors"]
    before = [sha256(run_dir / name) for name in names]
    expect_exit(check, world.train(first, run_dir, f"{flags} --steps-per-epoch 2 --epochs 4", apart=True), 7)
    check.equal(files=([sha256(run_dir / name) for name in names], before))


@clause("C5", "S7")
@only(sizes=(2,), mpi=False, devices=("cpu",))
def test_killed_and_resumed_is_bitwise_as_never_killed(check, world, own, runs):
    """All ranks get SIGKILL once the first epoch's snapshot is durable, as in a crash or with a lost node."""
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
    """Another node saved it, and this node sees the previous file for a while. The log names both."""
    from ddp_core import run_directory

    run, path = runs.train(first, STEP_7_AND_14), runs.folder(first, "lags")
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
    check.equal(goes_on_at_step=(document["step"], 14))


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
@pytest.mark.parametrize("name", ["counts", "by_sevens", "frozen", "experts", "adagrad", "amsgrad", "averages_late", "by_norm"])
def test_what_an_optimizer_keeps_is_kept(check, world, runs, first, own_file, name):
    """It may keep tensors of any name, made late or at once, or numbers; nothing for parameters that are frozen or that no row
    uses. One optimizer divides by the norm of its gradients.
    """
    file, path = own_file(name), runs.folder(first, f"{name}-resumed")
    never = world.train(first, runs.folder(first, name), f"{file} --epochs 2")
    done(check, never, world.train(first, path, f"{file} --epochs 1"))
    resumed = done(check, world.train(first, path, f"{file} --epochs 2"))
    check.equal(losses=(resumed.values("step", "loss_hex"), never.values("step", "loss_hex")))


@clause("C7")
@only(sizes=(1, 2))
def test_the_scale_of_the_loss_goes_on_where_it_was(check, world, runs, first, own_file):
    """It stops after only skipped steps, as fp16's first scales overflow, and again after some that were not."""
    flags = f"{own_file('loud')} --precision fp16 --steps-per-epoch 2"
    never, path = world.train(first, runs.folder(first, "loud"), f"{flags} --epochs 8"), runs.folder(first, "loud-resumed")
    resumed = [world.train(first, path, f"{flags} --epochs {epochs}") for epochs in (1, 6, 8)]
    done(check, never, *resumed)
    scales = world.on_rank_0(lambda: [take_apart(run.folder / SNAPSHOT)["document"]["scale"] for run in (never, resumed[-1])])
    check.equal(scale_and_steps_since=(scales[1], scales[0]), some_steps_were_not_skipped=(scales[0][1] > 3, True))
    same_as_never_stopped(check, world, resumed[-1], never)


class Makes:
    """Unpickling this object makes the folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.folder,)


# An optimizer's values for each parameter: torch's name to the snapshot's.
MOMENTS = {"sgd": dict(momentum_buffer="momentum"), "adamw": dict(exp_avg="mean", exp_avg_sq="square", step="step")}


@clause("C2")
@only(sizes=(1,), devices=("cpu",))
@pytest.mark.parametrize("optimizer", MOMENTS)
def test_a_checkpoint_of_a_published_example_goes_on(check, world, runs, first, own_file, optimizer, monkeypatch):
    """Its momentum continues, too. One layer is named like DDP's prefix, its bias is frozen, and its rows are random."""
    import torch
    from ddp_core import convert
    from safetensors.torch import load_file

    flags = f"{own_file('has_a_module')} --precision fp64 --optimizer {optimizer}"
    path = runs.folder(first, f"converted-{optimizer}")
    folders = [runs.folder(first, f"to-convert-{optimizer}-{epochs}") for epochs in (1, 2)]
    half, whole = done(check, *(world.train(first, folder, f"{flags} --epochs {folder.name[-1]}") for folder in folders))
    tensors, names = load_file(half.folder / SNAPSHOT), ["module.weight", "module.bias", "head.weight", "head.bias"]
    moments, trained = MOMENTS[optimizer].items(), [name for name in names if name != "module.bias"]
    states = [{theirs: tensors[f"optim.{ours}.{name}"] for theirs, ours in moments} for name in trained]
    state = dict(state=dict(enumerate(states)), param_groups=[dict(params=[*range(len(trained))])])
    model = {name: tensors[f"model.{name}"] for name in names}
    old, ddp, harmful, made = (half.folder / name for name in ("old.pt", "ddp.pt", "harmful.pt", "made"))
    wrapped = {f"module.{name}": tensor for name, tensor in model.items()}
    torch.save(dict(MODEL_STATE=wrapped, optimizer_state_dict=state, EPOCHS_RUN=0), ddp)
    torch.save(dict(model_state=model, optimizer_state_dict=state, epoch=0), old)
    torch.save(dict(model_state=model, further=Makes(made), epoch=0), harmful)
    command = [sys.executable, "-m", "ddp_core.snapshot", "convert", old, "--run-dir", path, *flags.split()]
    converted = subprocess.run(command, capture_output=True, text=True, check=False)
    code = 0 if torch.__version__ >= (2, 10) else 3  # the unpickler of older versions is not safe
    check.equal(exit_code_and_error=((converted.returncode, converted.stderr if not code else ""), (code, "")))
    with monkeypatch.context() as older:  # compared as texts, 2.9.1 comes after 2.10
        older.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
        refused = convert.main(["convert", str(old), "--run-dir", str(path.with_name(f"by-2.9-{optimizer}")), *flags.split()])
    check.equal(exit_code_under_torch_2_9_1=(refused, 3))
    if not code:
        before = sha256(path / SNAPSHOT)
        outcomes = {}
        for name, file, folder, *more in (
            ("again", old, path),
            ("of DDP", ddp, of_ddp := path.with_name(f"ddp-{optimizer}")),
            ("harmful", harmful, path.with_name(f"harmful-{optimizer}")),
            ("of another step", old, other := path.with_name(f"other-{optimizer}"), "--epochs-run", "2"),
        ):
            outcomes[name] = convert.main(["convert", str(file), "--run-dir", str(folder), *more, *flags.split()])
        layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
        layers += [torch.nn.Linear(10, 10, bias=False) for _ in range(2)]
        for name in ("tied only here", "tied there, too"):
            torch.save(torch.nn.Sequential(*layers).state_dict(), old)
            layers[4].weight, folder = layers[3].weight, path.with_name(f"tied-{optimizer}")
            outcomes[name] = convert.main(["convert", str(old), "--run-dir", str(folder), *own_file("ties").split()])
        codes = {"again": 3, "of DDP": 0, "harmful": 5, "of another step": 0, "tied only here": 5, "tied there, too": 0}
        check.equal(exit_codes=(outcomes, codes), made=(made.exists(), False))
        check.equal(snapshot_that_was_there=(sha256(path / SNAPSHOT), before), and_of_ddp=(sha256(of_ddp / SNAPSHOT), before))
        kept = {name: bool(tensor.any()) for name, tensor in load_file(other / SNAPSHOT).items() if "step." not in name}
        wrong = [name for name, some in kept.items() if name.startswith("optim.") and some is (optimizer == "adamw")]
        check.equal(moments_of_another_step=(wrong, []))
        run = done(check, world.train(first, path, f"{flags} --epochs 2"))
        check.close(run.losses, whole.losses[len(half.losses) :], T1)


@clause("C2")
@only(sizes=(1, 2))
def test_flags_of_any_make_are_the_same_ones(check, world, runs, first, own_file):
    """A snapshot returns a tuple as a list, paths and infinity as texts, a table with text keys: all are equal; so is a set."""
    file, path = own_file("flags_of_any_make"), runs.folder(first, "flags-of-any-make")
    _, run = done(check, *(world.train(first, path, f"{file} --steps-per-epoch 2 --epochs {epochs}") for epochs in (1, 2)))
    kinds = [config["kinds"] for config in run.values("start", "config")]
    check.equal(kinds=(kinds, [f"{{{', '.join(map(repr, 'abcdefgh'))}}}"] * 2))


@clause("C2")
@only(sizes=(1,), devices=("cpu",))
def test_sets_in_rows_are_the_same_data_in_each_process(check, world, runs, first, own_file):
    """Each process orders the texts of a set differently."""
    flags, path = f"{own_file('has_sets_in_rows')} --steps-per-epoch 1 --epochs", runs.folder(first, "sets-in-rows")
    done(check, *(world.alone(first, path, f"{flags} {start}", dict(PYTHONHASHSEED=start)) for start in ("1", "2", "3")))


@clause("C3")
@only(sizes=(1, 2))
def test_another_workload_file_than_before_is_noted(check, world, runs, first, own_file):
    """Its data and flags are the same, but its loss may differ."""
    file, path = own_file("changed"), runs.folder(first, "another-file")
    names = ("changed.py", "beside_it.py", "package/part.py", "package/other.py")
    changed, beside, part, other = (runs.root / "workloads" / name for name in names)

    def write() -> None:
        changed.open("a").write("\nimport beside_it, package.other\n")
        part.parent.mkdir()
        texts = {beside: "ONE = 1\n", part.with_name("__init__.py"): "from . import part\n", part: "", other: ""}
        for path, text in texts.items():
            path.write_text(text)

    world.on_rank_0(write)
    noted = []
    for epochs, next_to_change in enumerate((None, beside, None, part, changed, other, None), 1):
        run = done(check, world.train(first, path, f"{file} --epochs {epochs}"))
        noted.append(any("has changed since" in note for note in run.of("start")[-1]["notes"]))
        if next_to_change:
            world.on_rank_0(lambda one=next_to_change: one.open("a").write("# another\n"))
    check.equal(noted=(noted, [False, False, True, False, True, True, True]))


@clause("C8")
@only(sizes=(1,))
def test_losses_below_zero_are_as_good_as_others(check, world, runs, first, own_file):
    """The run is killed in mid-epoch: the snapshot has the sum of the epoch's losses so far."""
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
    slow = train_own("slow_steps", "--save-minutes 0.5 --steps-per-epoch 14")  # takes 1.4 s
    check.equal(saves_in_a_second=(slow.values("snapshot", "step"), [14]))


@clause("C8")
@only(sizes=(1, 2), devices=("cpu",))
def test_the_best_model_is_no_snapshot_that_was_due(check, train_own):
    """Every epoch saves the best model, in a tenth of --save-minutes, but a snapshot is saved only when it is due."""
    flags = "--steps-per-epoch 2 --lr 0.005 --epochs 40 --save-every 999 --save-minutes 0.015"
    run = done(check, train_own("always_better", flags))
    check.equal(saves_before_the_end=(len(run.of("snapshot")) > 2, True))
    most = run.values("end", "seconds")[-1]["training"] / 0.9 + 2
    check.equal(saves_beyond_one_in_so_many_minutes=(max(0, len(run.of("snapshot")) - int(most)), 0))


@clause("C8")
@only(sizes=(1,))
def test_a_save_may_be_due_at_the_end_of_an_epoch(check, runs, first):
    """The epoch itself is neither evaluated nor saved."""
    run = done(check, runs.train(first, f"{FP64} --save-steps 14 --save-every 99 --eval-every 99"))
    check.equal(snapshots=(run.values("snapshot", "step"), [14, 28, 42]))


@clause("C9")
@only(sizes=(1, 2), mpi="restart")
def test_only_a_job_s_first_start_begins_anew(check, world, launch, runs):
    """Job scripts name a run directory by --new-run-dir; the launcher's number of earlier starts decides."""
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
@only(sizes=(1,))
def test_each_run_that_is_moved_aside_is_kept(check, world, runs, first):
    """A second --fresh overwrites nothing that the first one has moved."""
    path, older = runs.folder(first, "each-aside"), {}
    for seed in range(3):
        done(check, world.train(first, path, f"{SHORT} --fresh --seed {seed}"))
        older |= {f"{name} of run {seed}": (name, sha256(path / name)) for name in (SNAPSHOT, "best.safetensors") if seed < 2}
    aside = {(file.name, sha256(file)) for file in path.glob("old-*/*.safetensors")}
    check.equal(lost=([what for what, content in older.items() if content not in aside], []))
    again = done(check, world.train(first, path, f"{SHORT} --fresh --seed 2 --epochs 2", restart=1))
    check.equal(a_later_start_goes_on_at_steps=(again.values("start", "step"), [0, 1]))


@clause("C9")
@only(sizes=(1,), devices=("cpu",))
def test_a_job_script_finds_the_run_where_it_is(check, world, runs, first, own_file):
    """The user's flag overrules the script's. A run of a user's workload file has the file's name."""
    path, found, should_be = runs.folder(first, "find-run"), [], []
    own = own_file("prints", "of.two.parts")
    for run_dir in ("", own, "--new-run-dir of-job", "--new-run-dir of-that-job --run-dir of-user"):
        flags = f"{SHORT} {run_dir}"
        done(check, world.train(first, path, f"--device cpu {flags}", bare=True))
        (log,) = {*path.rglob(LOG)} - {path / run / LOG for run in should_be}
        should_be.append(str(log.parent.relative_to(path)))
        command = [sys.executable, "-m", "ddp_core.find_run", *flags.split()]
        found.append(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip())
    check.equal(found=(found, should_be), of_user=(should_be[-1], "of-user"))


@clause("C9")
@only(sizes=(1,), devices=("cpu",))
def test_a_run_directory_is_below_the_folder_of_the_start(check, world, runs, first, own_file):
    path = runs.folder(first, "changes-folder")
    flags = f"--device cpu {own_file('changes_its_folder')} --epochs 1 --steps-per-epoch 1 --run-dir mine"
    done(check, world.train(first, path, flags, bare=True))
    check.equal(run=((path / "mine" / SNAPSHOT).exists(), True))


@clause("C9")
@only(sizes=(1,))
def test_a_job_that_is_started_again_in_vain_ends(check, world, runs, first, own_file):
    """Its starts fail before a save, as with a step that needs too much memory."""
    path, flags = runs.folder(first, "in-vain"), f"{own_file('fails_alone_in_a_step')} --epochs 1"
    codes = [world.train(first, path, flags, restart=restart).exit_codes for restart in range(3)]
    check.equal(exit_codes=(codes, [[2]] * 3))
    one_line(check, world.train(first, path, flags, restart=3), 3, "saved nothing")
    log = path / LOG  # as if each start was stopped in a long evaluation
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
    """A stand-in for fully_shard prints the place."""
    for flags, place in (("", "the device"), (" --offload", "the host")):
        run = done(check, train_own("tells_when_sharded", f"--steps-per-epoch 1 --sharding full{flags}", apart=True))
        check.equal(places=({*re.findall(r"kept on (.*)", "\n".join(run.output))}, {place}))
        counts = [text.count("kept on") for text in run.output]
        check.equal(modules_that_are_shared_out=(counts, [3, 3]))  # two layers, and the rest of the model


@clause("C10")
@only(sizes=(4,), devices=("cpu",))
def test_hybrid_parts_are_those_of_a_node(check, train_own):
    """Its losses are also those of --sharding full, which uses the network between nodes for every layer; the mesh differs."""
    run = done(check, train_own("tells_when_sharded", "--steps-per-epoch 1 --sharding hybrid", num_nodes=2, apart=True))
    told = {*re.findall(r"in \d parts, by .*", "\n".join(run.output))}
    check.equal(sharded=(told, {"in 2 parts, by a mesh of 2 dimensions"}))


@clause("C10")
@only(sizes=(4,), devices=("cpu",))
def test_a_model_is_built_in_turn_on_nodes_of_one_and_of_three_ranks(check, world, first, train_own):
    place = dict(local_rank=max(0, world.rank - 1), local_world_size=3 if world.rank else 1, node_rank=min(1, world.rank))
    environ = {name: str(value) for key, value in place.items() for name in first.variables_with(key)}
    flags = "--steps-per-epoch 1 --sharding full --timeout 40"
    done(check, train_own("looks_at_its_numbers", flags, num_nodes=2, environ=environ, apart=True))


# For each rank: its node, its local rank, and the number of ranks on its node.
PLACES = dict(cyclic=[(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)], uneven=[(0, 0, 1), (1, 0, 3), (1, 1, 3), (1, 2, 3)])


@clause("C10")
@only(sizes=(4,), devices=("cpu",))
@pytest.mark.parametrize("order", PLACES)
def test_hybrid_parts_need_nodes_that_are_alike(check, world, runs, first, order):
    """Otherwise the parts of one node would lie on several nodes."""
    place = dict(zip(("node_rank", "local_rank", "local_world_size"), PLACES[order][world.rank], strict=True))
    environ = {name: str(value) for key, value in place.items() for name in first.variables_with(key)}
    run = world.train(first, runs.folder(first, f"{order}-nodes"), f"{SHORT} --sharding hybrid", 2, environ=environ)
    expect_exit(check, run, 2)
    words = "as many ranks on every node"
    check.equal(lines_that_say_so=(sum(words in line for line in run.error_lines), 1))


@clause("C10")
@only(sizes=(2,), devices=("cpu",))
def test_sharded_models_have_numbers_that_no_snapshot_has(check, train_own):
    sharded, whole = done(check, *(train_own("masked", f"--precision fp64 {flags}") for flags in ("--sharding full", "")))
    check.close(sharded.losses, whole.losses, T1)


@clause("C10", "L20")
@only(sizes=(2,), devices=("cpu",))
def test_sharded_modules_are_given_what_whole_ones_are(check, train_own):
    """Rows are not rounded, even under bf16. A model that changes a unit's returned view in place learns as when whole."""
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
    """This holds under bf16: one rank's gradient is 2048 times the other's, and both are exact."""
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
    """AdamW also has a step count for each parameter, which is not sharded."""
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

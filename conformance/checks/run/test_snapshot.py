"""SPEC.md S: what a snapshot holds, and how it is written."""

import json
import os
import shutil
import signal
import time
import zlib
from pathlib import Path

import pytest

from conformance.checks.run.common import (
    ALL,
    FP32,
    FP64,
    IN_RANKS,
    LOG,
    SETS,
    SHORT,
    SNAPSHOT,
    STEP_7_AND_14,
    TWO,
    clause,
    damaged_copy,
    done,
    expect_exit,
    looked_at,
    machine,
    one_line,
    only,
    verified,
)
from conformance.golden import make as golden
from conformance.harness import anchors
from conformance.harness.check import T1
from conformance.harness.reference import LAYERS, sha256, take_apart

pytestmark = IN_RANKS
DIGITS = "6ebb3d2fee24"  # of sha256 of its file, unpacked. Under another name all older snapshots would be refused.


def disk_operations(output: str) -> list[list[str]]:
    """Return slow_disk's lines as words: time, fsync or replace, and target."""
    return [line.split()[1:] for line in output.splitlines() if line.startswith("disk: ")]


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
    expected = dict(format=2, data=DIGITS, step=42, epochs_run=3, steps_per_epoch=14, world_size=world.size)
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
    counted = zlib.crc32((14 * 2).to_bytes(8, "little"))  # micro-batches of an epoch, none of the trial
    check.equal(crc32_of_batches_tracked=(snapshot["crc32"]["model.2.num_batches_tracked"], counted))


@clause("S10", "S11")
@only(sizes=(1, 2), devices=("cpu",))
def test_a_snapshot_is_written_beside_training(check, world, runs, first, train_own):
    """The disk is slow, and training continues during a save: the state equals that of a run with a fast disk."""
    flags = "--precision fp64 --epochs 1 --save-steps"
    run, fast = done(check["S11"], train_own("slow_disk", f"{flags} 4", apart=True), runs.train(first, f"{flags} 12"))

    def steps_and_sums(one) -> list:
        files = [path for name in (SNAPSHOT, "snapshot.prev.safetensors") if (path := one.folder / name).exists()]
        try:
            both = [take_apart(path) for path in files]
        except ValueError as error:  # no safetensors file
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
    """Check, for a run with all saves recorded, that each second of training's waiting is counted once."""
    __tracebackhide__ = True
    seconds = run.values("end", "seconds")[-1]
    waited, writing = (sum(run.values("snapshot", name)) for name in ("seconds", "writing"))
    told = "as many" if abs(waited - seconds["snapshots"]) < 0.3 else f"{waited:.2f} of {seconds['snapshots']:.2f}"
    check.equal(seconds_that_training_waited=(told, "as many"))
    check.equal(writes_take_longer_than_the_training=(writing > seconds["training"], False))


@clause("S10")
@only(sizes=(1,), devices=("cpu",))
def test_saves_that_are_too_slow_for_a_stop_are_noted(check, train_own):
    """A stop's seconds may have to suffice for two saves; here each takes more than half a second."""
    notes = []
    for grace in (0.5, 60):
        run = done(check, train_own("slow_disk", f"--precision fp64 --grace {grace}", apart=True))
        notes.append("--grace" in run.output[0])
    check.equal(noted_with_half_a_second_and_with_a_minute=(notes, [True, False]))


@clause("S11")
@only(sizes=(2,), devices=("cpu",))
@pytest.mark.parametrize("step, room", [(14, 10**9), (8, 0)], ids=["at_the_end", "without_a_copy"])
def test_a_save_may_take_longer_than_the_timeout(check, world, train_own, step, room):
    """Without this the other ranks would take rank 0 for dead, and the launcher would kill it while it writes."""
    flags = f"--precision fp64 --save-steps 8 --room {room}"
    slow = dict(environ=dict(DDP_FAULT=f"slow save={step} seconds=14"), apart=True)
    run, fast = (
        done(check, train_own("has_room", f"{flags} {more}", **how)) for more, how in (("--timeout 5", slow), ("", {}))
    )
    digests = world.on_rank_0(lambda: [sha256(each.folder / "snapshot.prev.safetensors") for each in (run, fast)])
    check.equal(snapshots=(run.values("snapshot", "step"), [8, 14]), state_of_step_8=(digests[0], digests[1]))


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
    """The save of step 20 fails. The next save would be two seconds later, at step 40, and ranks communicate once a second."""
    flags = "--precision fp64 --epochs 3 --save-steps 20 --save-every 9 --eval-every 9 --seconds 0.1"
    run = train_own("full_disk", flags, apart=True)
    one_line(check, run, 8, SNAPSHOT)
    check.equal(ends_before_the_next_save=(20 <= len(run.losses) < 40, True), snapshots=(run.of("snapshot"), []))


def take_set_apart(index: Path) -> dict:
    """Return an index and its files, read by their formats: as take_apart(), with the bytes of tensors in each file."""
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
    """Return the files in a folder, and the expected ones: the log, the indexes, and the files that they name."""
    indexes = [folder / f"{name}.safetensors.index.json" for name in ("snapshot", "snapshot.prev", "best")]
    named = {file for index in indexes for file in take_set_apart(index)["sizes"]}
    return sorted(path.name for path in folder.iterdir()), sorted([LOG, *named, *(index.name for index in indexes)])


@clause("S13")
@only(devices=("cpu",))
def test_a_large_snapshot_is_a_set_of_files_that_holds_the_same(check, world, runs, first):
    run, whole = done(check, *(runs.train(first, flags) for flags in (f"{FP64} {SETS}", FP64)))
    for name in ("snapshot", "snapshot.prev", "best"):  # read as a set, the previous one is intact

        def both(name: str = f"{name}.safetensors") -> list:
            return [take_set_apart(run.folder / f"{name}.index.json"), take_apart(whole.folder / name)]

        of_set, of_file = world.on_rank_0(both)
        check.equal(**{part: (of_set[part], of_file[part]) for part in ("crc32", "tensors", "document")})
        sizes = {number: size for number, (_, size) in enumerate(of_set["sizes"].values()) if size > 50_000}
        check.equal(files=(len(of_set["sizes"]), 5), larger_ones=(sizes, {1: 131072, 3: 131072}))
    check.equal(files=world.on_rank_0(lambda: files_of(run.folder)))


@clause("S13")
@only(sizes=(1,), devices=("cpu",))
def test_another_set_of_a_step_has_files_of_its_own(check, tmp_path):
    """Files have at most 1,000 bytes: three tensors of 400 bytes, one of 900, which differs between the sets, one of 100."""
    import torch
    from ddp_core import snapshot

    sets = []
    for last in range(2):
        tensors = {f"model.{place}": torch.zeros(100) for place in range(3)}
        tensors |= {"model.3": torch.full((225,), float(last)), "model.4": torch.zeros(25)}
        snapshot.write(tmp_path / SNAPSHOT, tensors, dict(step=1), most=1000)
        sets.append(take_set_apart(tmp_path / f"{SNAPSHOT}.index.json")["sizes"])
    check.equal(tensors_and_bytes=([[*sizes.values()] for sizes in sets], [[(2, 800), (1, 400), (2, 1000)]] * 2))
    check.equal(files_of_both_sets=(sorted(sets[0].keys() & sets[1].keys()), []))


@clause("S13")
@only(sizes=(1, 2), devices=("cpu",))
def test_an_index_has_its_name_after_all_that_it_names(check, world, train_own):
    """Otherwise a crash could leave an index that names missing files."""
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
    """Rank 0 names the files once every rank's own are on the disk. Training waits meanwhile, and the record says so."""
    run = done(check["S13"], train_own("slow_disk", f"--precision fp64 --sharding full {SETS}", apart=True))
    waits_are_told(check["S10"], run)
    named = world.on_rank_0(lambda: [path.stat().st_size for path in run.folder.glob("snapshot-*.safetensors")])
    acts = [[(float(when), *act) for when, *act in disk_operations(output)] for output in run.output]
    names = [(when, target) for when, act, target, *_ in acts[0] if act == "replace"]
    [best] = [when for when, target in names if target == "best.safetensors.index.json"]  # saved before the snapshot
    first_name = min(when for when, target in names if when > best and target.startswith("snapshot-"))
    synced = [[size for when, act, size, *_ in of if act == "fsync" and best < when < first_name] for of in acts]
    files = [[size for size in sizes if size != "folder"] for sizes in synced]
    deal = {2: [4, 2], 4: [3, 1, 1, 1]}[world.size]  # five files, and rank 0's index
    check["S13"].equal(files_by_rank=([*map(len, files)], deal))
    check["S13"].equal(not_on_the_disk=(sorted({*named} - {int(size) for sizes in files for size in sizes}), []))
    check["S13"].equal(verify=(world.on_rank_0(lambda: verified(run.folder / f"{SNAPSHOT}.index.json")), 0))
    check["S13"].equal(other_ranks_name=([act for of in acts[1:] for act in of if act[1] == "replace"], []))


@clause("S13")
@only(sizes=(2, 4), devices=("cpu",))
def test_a_rank_that_cannot_write_its_file_of_a_set_ends_all(check, world, train_own):
    """The full disk takes no file of 100 kB or more, and the last ranks write these."""
    run = train_own("full_disk", f"--precision fp64 --sharding full {SETS}", apart=True)
    one_line(check, run, 8, f".safetensors: file 2 of 5, by rank 1 on {os.uname().nodename}: ")
    check.equal(snapshots=(run.of("snapshot"), []))
    check.equal(left_behind=(world.on_rank_0(lambda: sorted(path.name for path in run.folder.glob("*.safetensors*"))), []))


@clause("S13")
@only(sizes=(2,), devices=("cpu",))
def test_rank_0_writes_the_whole_set_where_others_do_not_see_its_folder(check, world, runs, first, own_file, monkeypatch):
    """The folder is on a node's own disk; here, a path relative to each rank's own working directory."""
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
    """No stale file is left that could be mistaken for the run's state."""
    path, names = runs.folder(first, "sets"), []
    mine = path / "model-00001-of-00002.safetensors"  # a user's own file, named as by Hugging Face
    world.on_rank_0(lambda: [path.mkdir(parents=True), mine.touch()])
    for epochs, flags in enumerate(("", f"--sharding full {SETS}", SETS, ""), 1):
        run = done(check, world.train(first, path, f"--workload digits --precision fp64 --epochs {epochs} {flags}"))
        names.append(world.on_rank_0(lambda: sorted(file.name for file in path.glob("snapshot.safetensors*"))))
    check.equal(snapshots=(names, [[SNAPSHOT], [f"{SNAPSHOT}.index.json"], [f"{SNAPSHOT}.index.json"], [SNAPSHOT]]))
    check.equal(a_user_s_own_set_is_there=(world.on_rank_0(mine.exists), True))
    check.equal(started_at_steps=(run.values("start", "step"), [0, 14, 28, 42]))
    check.close(run.losses[:42], golden.load()["losses"], T1)


@clause("S13")
@only(sizes=(1,), devices=("cpu",))
def test_a_set_is_moved_aside_whole(check, world, runs, first):
    """--fresh keeps the older run, and the new one removes only files that no index names."""
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
    umask = os.umask(0)  # as of a user who shares everything, perhaps unknowingly
    run = world.train(launch, runs.folder(launch, f"writers-{num_nodes}"), SHORT, num_nodes)
    os.umask(umask)
    done(check, run)
    modes = world.on_rank_0(lambda: {path.name: path.stat().st_mode for path in [run.folder, *run.folder.iterdir()]})
    check.equal(others_may_write_to=([name for name, mode in modes.items() if mode & 0o002], []))
    check.equal(its_group_cannot_read=([name for name, mode in modes.items() if not mode & 0o040], []))
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
    longer = done(check["S9"], runs.train(first, f"{FP64} --epochs 4 --eval-every 2 --save-every 3"))
    before = world.on_rank_0(lambda: take_apart(longer.folder / "snapshot.prev.safetensors")["document"])  # not evaluated
    check["S9"].equal(names_of_values=(before.get("measured"), [*names]), after_epochs=(before["epochs_run"], 3))


@clause("S9")
@only(sizes=(1, 2))
def test_the_best_model_is_kept_though_no_snapshot_is_due(check, world, runs, first, own_file):
    """The loss rises in the last epoch, and only that epoch saves a snapshot."""
    path = runs.folder(first, "worsens")
    run = done(check, world.train(first, path, f"{own_file('worsens')} --epochs 3 --save-every 3"))
    losses = run.values("epoch", "eval_loss")
    file = path / "best.safetensors"
    best = world.on_rank_0(lambda: take_apart(file)["document"]["epochs_run"] if file.exists() else 0)
    check.equal(rises_at_last=(losses[-1] > min(losses), True), epochs_of_the_best=(best, losses.index(min(losses)) + 1))
    check.equal(snapshots_on_record=(run.values("snapshot", "step"), [42]))  # else a killed run would wait for a later one


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
    from ddp_core import snapshot

    tensors, document = snapshot.read(whole)
    del document["document_crc32"]
    fewer, further = path / "fewer.safetensors", path / "further.safetensors"
    snapshot.write(fewer, {name: tensor for name, tensor in tensors.items() if name != min(tensors)}, document)
    snapshot.write(further, tensors, document | dict(problem=document["problem"] | dict(further=1)))
    pairs = [(fewer, whole), (whole, fewer), (further, whole), (whole, further)]
    check.equal(exit_codes_of_diff_either_way=([looked_at("diff", *pair) for pair in pairs], [1] * 4))


@clause("S5")
@only(sizes=(1,))
def test_large_tensors_and_long_documents_are_whole(check, world, runs, first, train_own):
    """Both are written and read in parts of 16 MB, for example; this checks the parts' ends."""
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


@clause("S13")
@only(sizes=(1, 2), devices=("cpu",))
@pytest.mark.parametrize("newer", ["set", "file"])
def test_of_a_file_and_a_set_the_one_that_is_further_counts(check, world, runs, first, newer):
    """Both are intact: the run was killed after one was committed, before the other was removed."""
    one, of_set = (runs.train(first, f"{STEP_7_AND_14} {flags}") for flags in ("", SETS))
    run_dir = runs.folder(first, f"newer-{newer}")
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
    again = done(check, world.train(first, run_dir, STEP_7_AND_14))
    check.equal(goes_on_at_step=(again.values("start", "step"), [14]))


@clause("S6", "S7")
@only(sizes=(1,), mpi=False, devices=("cpu",))
def test_killed_in_the_middle_of_a_snapshot(check, world, own, runs):
    """The run is killed after 100 of 300 kB of the second snapshot: the first one is intact, and the next start clears up."""
    path, flags = runs.folder(own, "killed-in-the-middle"), "--precision fp64 --eval-every 3"
    done(check["S7"], world.train(own, path, f"{flags} --epochs 1"))
    before = world.on_rank_0(lambda: sha256(path / SNAPSHOT))
    killed = world.train(own, path, f"{flags} --epochs 3", kill_ranks=(0,), largest_file=100_000)
    expect_exit(check["S7"], killed, 128 + signal.SIGXFSZ)
    check["S7"].equal(snapshot=(world.on_rank_0(lambda: sha256(path / SNAPSHOT)), before))
    done(check["S7"], world.train(own, path, f"{flags} --epochs 1"))  # has nothing to do
    check["S6"].equal(left_behind=(world.on_rank_0(lambda: [one.name for one in path.glob(".*")]), []))

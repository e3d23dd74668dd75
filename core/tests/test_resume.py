"""A run stopped at any time resumes with the same losses and the same weights.

python -m pytest core/tests/test_resume.py
"""

import gc
import json
import re
import signal
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ranks
from ddp_core import snapshot
from ddp_core.errors import PreflightError
from ddp_core.run_directory import RunDirectory
from faults import at_step, before_training, once_saved, signalled
from ranks import assert_same_run, step_of, train, world
from test_trainer import deviation

RUN = "--epochs 3 --precision fp64"  # 14 steps an epoch


# ---- stopped by a signal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, world_size, told",
    [
        (signal.SIGTERM, 1, 0),
        (signal.SIGTERM, 2, 0),
        (signal.SIGTERM, 2, 1),
        (signal.SIGUSR1, 2, 1),
        (signal.SIGINT, 2, 1),
    ],
)
@pytest.mark.fault(48)
def test_one_rank_told_to_stop_stops_all_and_the_run_goes_on_as_ever(finished, tmp_path, number, world_size, told):
    job = train(tmp_path / "run", RUN, world_size, faults={told: at_step(3, signalled(number))}, code=75)
    assert job.err == [""] * world_size, "a stop is no error"
    assert f"--run-dir {tmp_path / 'run'} resumes it" in job.out[0] and (told or number.name in job.out[0])
    assert step_of(job) % 14 > 0, "it stopped at the end of an epoch: this shows nothing about the middle of one"
    assert_same_run(train(tmp_path / "run", RUN, world_size, code=0), finished(RUN, world_size))


@pytest.mark.parametrize("choices", ["--optimizer sgd", "--optimizer adamw --lr 0.003 --precision bf16"])
def test_stopped_again_and_again_the_run_is_still_the_same(finished, tmp_path, choices):
    flags, stops = f"--epochs 2 --lr-schedule cosine {choices}", 0
    while train(tmp_path / "run", flags, 2, faults={1: at_step(2, signalled(signal.SIGTERM))}).codes == [75, 75]:
        stops += 1
    assert stops > 3
    assert_same_run(train(tmp_path / "run", flags, 2, code=0), finished(flags, 2))


def test_a_stop_at_the_end_of_an_epoch_saves_once(tmp_path):
    """The previous snapshot stays, as the fallback for a damaged one."""
    job = train(tmp_path / "run", RUN, 2, faults={1: at_step(27, signalled(signal.SIGTERM))}, code=75)
    assert [record["step"] for record in job.records("snapshot")] == [14, 28]
    assert step_of(job) == 28 and snapshot.read(job.run_dir / "snapshot.prev.safetensors")[1]["step"] == 14


STOPPED_WHILE_EVALUATED = """
import os, signal, time
from small import *

class Mine(Small):
    def data(self, config):
        return table(), table(601, first=128)

    def metrics(self, outputs, batch):
        if not torch.is_grad_enabled() and self.steps_done == STEPS and os.path.exists("TOLD"):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
        return super().metrics(outputs, batch)
"""


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("epochs", [1, 3])
def test_an_evaluation_that_a_stop_breaks_off_is_done_by_the_next_start(tmp_path, epochs, world_size):
    """Evaluation can take longer than a scheduler waits. The same at the end of the run, where no step is left."""
    told = tmp_path / "told"
    text = STOPPED_WHILE_EVALUATED.replace("STEPS", str(8 * epochs)).replace("TOLD", str(told))
    (tmp_path / "mine.py").write_text(text)
    flags = f"--workload {tmp_path / 'mine.py'} --save-every 3"
    whole = train(tmp_path / "whole", flags, world_size, code=0)
    told.touch()
    stopped = train(tmp_path / "run", flags, world_size, code=75)
    told.unlink()
    assert step_of(stopped) == 8 * epochs and len(stopped.records("epoch")) == epochs - 1
    resumed = train(tmp_path / "run", flags, world_size, code=0)
    assert_same_run(resumed, whole)
    ours, theirs = ([record | dict(seconds=0, time=0) for record in job.records("epoch")] for job in (resumed, whole))
    assert ours == theirs and len(ours) == 3
    best = [snapshot.read(job.run_dir / "best.safetensors")[1]["best"] for job in (resumed, whole)]
    assert best[0] == best[1]


STOPPED_WHILE_ROWS_ARE_SLOW = """
import os, signal, time
from small import *

class Mine(Small):
    defaults = Small.defaults | dict(epochs=1, global_batch_size=1)
    held_out = 0

    def metrics(self, outputs, batch):
        if not torch.is_grad_enabled() and self.steps_done == 128:
            self.held_out += 1
            self.first = getattr(self, "first", time.monotonic())
            if self.held_out == 10:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            open("COUNT", "w").write(f"{self.held_out} {time.monotonic() - self.first}")
        return super().metrics(outputs, batch)
"""


def test_a_stop_waits_a_second_and_not_as_many_held_out_batches_as_steps_take_one(tmp_path):
    """Steps take a millisecond, so the ranks ask every 64th step here. Held-out batches take longer."""
    (tmp_path / "mine.py").write_text(STOPPED_WHILE_ROWS_ARE_SLOW.replace("COUNT", str(tmp_path / "count")))
    train(tmp_path / "run", f"--workload {tmp_path / 'mine.py'}", code=75)
    batches, seconds = map(float, (tmp_path / "count").read_text().split())
    assert seconds > 0.9 and batches < 45


@pytest.mark.fault(50)
def test_however_early_it_is_stopped_each_start_trains_a_step(finished, tmp_path):
    """The signal comes while the model is built. A requeued job still advances at each start."""
    flags, steps = "--epochs 1 --global-batch-size 240", [0]
    told = {1: before_training(signalled(signal.SIGTERM))}
    while (job := train(tmp_path / "run", flags, 2, faults=told)).codes == [75, 75]:
        steps.append(step_of(job))
        assert steps[-1] > steps[-2]
    assert len(steps) > 2 and job.codes == [0, 0]
    assert_same_run(job, finished(flags, 2))


def test_told_twice_is_told_once(finished, tmp_path):
    """A signal that comes while the ranks stop and save changes nothing."""
    told = {0: at_step(3, signalled(signal.SIGTERM)), 1: at_step(3, signalled(signal.SIGUSR1))}
    train(tmp_path / "run", RUN, 2, faults=told, code=75)
    assert_same_run(train(tmp_path / "run", RUN, 2, code=0), finished(RUN, 2))


def test_told_at_the_last_step_the_run_is_complete(tmp_path):
    job = train(tmp_path / "run", "--epochs 1", 2, faults={1: at_step(13, signalled(signal.SIGTERM))}, code=0)
    assert "run complete" in job.out[0]


# ---- killed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.fault(20)
def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_snapshot(finished, tmp_path, victim):
    job = train(tmp_path / "run", RUN, 2, faults={victim: at_step(20, once_saved(signalled(signal.SIGKILL)))})
    survivor = 1 - victim
    assert (job.codes[victim], job.codes[survivor]) == (-signal.SIGKILL, 7)
    assert f"rank {victim} died" in job.error and "what was saved is whole" in job.error
    assert step_of(job) == 14
    assert_same_run(train(tmp_path / "run", RUN, 2, code=0), finished(RUN, 2))


@pytest.mark.parametrize("victim", [0, 2])
def test_all_survivors_leave_and_name_the_rank_that_died_first(tmp_path, victim):
    job = train(tmp_path / "run", RUN, 4, faults={victim: at_step(20, signalled(signal.SIGKILL))})
    assert [code for rank, code in enumerate(job.codes) if rank != victim] == [7, 7, 7]
    assert f"rank {victim} died" in job.error


@pytest.mark.fault(21)
def test_a_rank_that_hangs_is_named_within_the_timeout(finished, tmp_path):
    stopped = {1: at_step(20, signalled(signal.SIGSTOP))}
    job = train(tmp_path / "run", f"{RUN} --timeout 2", 2, faults=stopped, hanging=[1])
    assert job.codes[0] == 7
    assert "rank 1 died or hangs" in job.error
    assert_same_run(train(tmp_path / "run", RUN, 2, code=0), finished(RUN, 2))


# ---- saved in the middle of an epoch ------------------------------------------------------------------------------


def saved_at(job: ranks.Job) -> list[int]:
    return [record["step"] for record in job.records("snapshot")]


def test_snapshots_come_every_so_many_steps_and_at_the_ends_of_epochs(finished):
    """Steps are counted over the whole run; an epoch has 14. A save changes nothing in the training."""
    job = finished(f"{RUN} --save-steps 5", 2)
    assert saved_at(job) == [5, 10, 14, 15, 20, 25, 28, 30, 35, 40, 42]
    assert job.losses == finished(RUN, 2).losses and job.snapshot_hash() == finished(RUN, 2).snapshot_hash()


def test_a_step_that_ends_an_epoch_is_saved_once(finished):
    assert saved_at(finished(f"{RUN} --save-steps 7", 1)) == [7, 14, 21, 28, 35, 42]


def test_steps_are_saved_though_epochs_are_not(finished):
    assert saved_at(finished(f"{RUN} --save-steps 20 --save-every 9", 1)) == [20, 40, 42]


@pytest.mark.parametrize("evaluated", ["", " --eval-every 9"])
def test_steps_that_end_an_epoch_are_saved_though_epochs_are_not(finished, evaluated):
    assert saved_at(finished(f"{RUN} --save-steps 14 --save-every 9{evaluated}", 2)) == [14, 28, 42]


def test_snapshots_come_every_so_many_minutes(finished):
    """With an interval that has always passed, every reconciliation saves; at least one comes in the first steps."""
    job = finished(f"{RUN} --save-minutes 1e-9", 2)
    assert saved_at(job)[0] == 1 and len(saved_at(job)) > 5 and {14, 28, 42} <= {*saved_at(job)}
    assert job.losses == finished(RUN, 2).losses and job.snapshot_hash() == finished(RUN, 2).snapshot_hash()


def _a_step_takes_a_minute() -> None:
    """A step takes a minute by the clock for snapshots. The ranks exchange after each step."""
    from ddp_core import reconcile, trainer
    from ddp_core.guard import Guard

    clock, step = SimpleNamespace(now=0.0), Guard.step

    def stepped(*args, **kwargs):
        clock.now += 60
        return step(*args, **kwargs)

    Guard.step, reconcile.MOST_STEPS = stepped, 1
    trainer.time = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)


@pytest.mark.parametrize("minutes, evaluated", [(5, 9), (9, 1)])
def test_minutes_are_counted_from_the_last_snapshot(tmp_path, minutes, evaluated):
    """Writes of best.safetensors do not count; each evaluation writes one here."""
    flags = f"{RUN} --save-minutes {minutes} --save-every 9 --eval-every {evaluated}"
    clock = ranks.call("test_resume", "_a_step_takes_a_minute")
    job = train(tmp_path / "run", flags, 2, faults=dict.fromkeys(range(2), clock), code=0)
    assert saved_at(job) == [*range(minutes, 42, minutes), 42]


def test_by_default_a_short_run_is_saved_at_the_ends_of_epochs_only(finished):
    assert saved_at(finished(RUN, 2)) == saved_at(finished(f"{RUN} --save-minutes 0", 2)) == [14, 28, 42]


@pytest.mark.parametrize(
    "flags, dies_at, saved",
    [
        ("--save-steps 4", 24, {24}),
        ("--save-steps 5", 24, {20}),
        ("--save-minutes 1e-9", 11, {*range(7, 12)}),  # the ranks exchange after at most 1, 3 and 7 steps
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_in_the_middle_of_an_epoch_the_run_goes_on_from_there_bit_for_bit(
    finished, tmp_path, flags, dies_at, saved, victim
):
    """Epochs have 14 steps. The loss of the interrupted epoch is the mean over the steps of both starts."""
    kill = at_step(dies_at, once_saved(signalled(signal.SIGKILL)))
    job = train(tmp_path / "run", f"{RUN} {flags}", 2, faults={victim: kill})
    assert job.codes[victim] == -signal.SIGKILL and job.codes[1 - victim] == 7
    assert step_of(job) in saved
    again = train(tmp_path / "run", RUN, 2, code=0)
    assert_same_run(again, finished(RUN, 2))
    ours, theirs = ([record["loss"] for record in one.records("epoch")] for one in (again, finished(RUN, 2)))
    assert ours == theirs


@pytest.mark.parametrize("workers", [0, 2])
def test_so_does_one_with_augmented_rows_and_workers(finished, tmp_path, workers):
    flags = f"--workers {workers}"
    faults = {1: at_step(13, signalled(signal.SIGKILL))}
    job = train(tmp_path / "run", f"{flags} --save-steps 3", 2, workload="small:Augmented", faults=faults)
    assert job.codes == [7, -signal.SIGKILL] and step_of(job) == 12
    again = train(tmp_path / "run", flags, 2, workload="small:Augmented", code=0)
    assert_same_run(again, finished(flags, 2, "small:Augmented"))


# ---- other world sizes, more epochs -------------------------------------------------------------------


@pytest.mark.parametrize("first, then", [(1, 2), (2, 1), (4, 2)])
@pytest.mark.fault(39)
def test_a_run_goes_on_at_another_world_size(finished, tmp_path, first, then):
    train(tmp_path / "run", RUN, first, faults={0: at_step(3, signalled(signal.SIGTERM))}, code=75)
    job = train(tmp_path / "run", RUN, then, code=0)
    assert deviation(job.losses, finished(RUN, 1).losses) < 1e-12
    assert [record["world_size"] for record in job.records("start")] == [first, then]


def test_a_run_goes_on_under_the_other_reduction_and_cut(finished, tmp_path):
    train(tmp_path / "run", f"{RUN} --reduction flat", 2, faults={0: at_step(3, signalled(signal.SIGTERM))}, code=75)
    job = train(tmp_path / "run", f"{RUN} --reduction ddp --accumulate 3", 2, code=0)
    assert deviation(job.losses, finished(RUN, 1).losses) < 1e-12


def test_more_epochs_continue_a_finished_run(finished, tmp_path):
    train(tmp_path / "run", "--epochs 1 --precision fp64", 2, code=0)
    assert_same_run(train(tmp_path / "run", RUN, 2, code=0), finished(RUN, 2))


def test_the_best_model_so_far_is_remembered(finished, tmp_path):
    """The loss rises again: an epoch after the resume is worse than the best one before it."""
    flags = "--steps-per-epoch 3 --lr 3.0 --seed 1"
    whole = finished(f"--epochs 6 {flags}", 1)
    losses = [record["eval_loss"] for record in whole.records("epoch")]
    best = losses.index(min(losses)) + 1
    assert best < 6, "the last epoch is the best: this shows nothing"
    train(tmp_path / "run", f"--epochs {best} {flags}", code=0)
    job = train(tmp_path / "run", f"--epochs 6 {flags}", code=0)
    assert (job.run_dir / "best.safetensors").read_bytes() == (whole.run_dir / "best.safetensors").read_bytes()


def test_a_finished_run_has_nothing_to_do(tmp_path):
    before = train(tmp_path / "run", "--epochs 1", 2, code=0).snapshot_hash()
    job = train(tmp_path / "run", "--epochs 1", 2, code=0)
    assert "complete already" in job.out[0]
    assert job.snapshot_hash() == before


@pytest.mark.parametrize(
    "first, then, words",
    [
        ("--epochs 4", "--epochs 2", "(--epochs 8 would continue it)"),  # --epochs 4 is trained already
        ("--epochs 2 --lr-schedule cosine", "--epochs 2 --lr-schedule cosine", "(it is laid out over --epochs 2)"),
    ],
)
def test_what_would_continue_a_finished_run_is_said_truly(tmp_path, first, then, words):
    train(tmp_path / "run", first, code=0)
    assert words in train(tmp_path / "run", then, code=0).out[0]


def test_a_broken_snapshot_falls_back_to_the_one_before(finished, tmp_path):
    job = train(tmp_path / "run", RUN, 2, code=0)
    job.snapshot.write_bytes(job.snapshot.read_bytes()[:-100])
    again = train(tmp_path / "run", RUN, 2, code=0)
    assert "warning: " in again.out[0] and "snapshot.prev" in again.out[0]
    assert_same_run(again, finished(RUN, 2))


def test_fresh_starts_again_and_moves_the_old_run_aside(finished, tmp_path):
    old = train(tmp_path / "run", "--epochs 1 --seed 5", 2, code=0).snapshot_hash()
    job = train(tmp_path / "run", f"{RUN} --fresh", 2, code=0)
    assert_same_run(job, finished(RUN, 2))
    aside = ranks.Job([], [], [], tmp_path / "run" / "old-1")
    assert aside.snapshot_hash() == old and len(aside.losses) == 14


def _say_what_is_still_held() -> None:
    """Print at the first step how many of the loaded model tensors are still in memory."""
    load, found = RunDirectory.load, []

    def watched(*arguments):
        tensors, document = load(*arguments)
        found.extend(weakref.ref(tensor) for name, tensor in tensors.items() if name.startswith("model."))
        return tensors, document

    RunDirectory.load = watched
    at_step(0, lambda: [gc.collect(), print("held", sum(tensor() is not None for tensor in found), "of", len(found))])()


def test_rank_0_does_not_keep_what_it_has_read_beside_the_state(tmp_path):
    train(tmp_path / "run", "--epochs 1 --steps-per-epoch 1", code=0)
    held = {0: ranks.call("test_resume", "_say_what_is_still_held")}
    job = train(tmp_path / "run", "--epochs 2 --steps-per-epoch 1", faults=held, code=0)
    assert re.search(r"^held 0 of [1-9]", job.out[0], re.MULTILINE), job.out[0]


# ---- started again by the same job --------------------------------------------------------------------------------


def test_fresh_acts_at_a_job_s_first_start_only(finished, tmp_path):
    """A job script passes --fresh at every start, but a requeued job must not begin again."""
    train(tmp_path / "run", "--epochs 1 --seed 5", 2, code=0)
    flags = f"{RUN} --fresh"
    job = train(tmp_path / "run", flags, ranks=world(2), faults={0: at_step(20, signalled(signal.SIGTERM))}, code=75)
    assert [path.name for path in (tmp_path / "run").glob("old-*")] == ["old-1"]
    assert 14 < step_of(job) < 42
    job = train(tmp_path / "run", flags, ranks=world(2, restart=1), code=0)
    assert [path.name for path in (tmp_path / "run").glob("old-*")] == ["old-1"]
    assert [record["restart"] for record in job.records("start")] == [0, 1]
    assert_same_run(job, finished(RUN, 2))


@pytest.mark.fault(50)
def test_a_job_that_is_started_again_and_saves_nothing_ends(finished, tmp_path):
    """For example, its node fails at the same step each time. A new job goes on."""
    for restart in range(3):  # the first start saves at an epoch's end; two more starts may follow
        killed_at(34 if restart == 0 else 6, tmp_path, restart)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    job = train(tmp_path / "run", RUN, ranks=world(2, restart=3), code=3)
    assert "restart 3 of this job, and restarts 1 and 2 began at step 28, too" in job.error
    assert f"submit again with --run-dir {tmp_path / 'run'}" in job.error
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert_same_run(train(tmp_path / "run", RUN, ranks=world(2), code=0), finished(RUN, 2))


def test_a_job_whose_restarts_go_on_is_started_again(finished, tmp_path):
    """Either the second start saves, or another job ran between the starts."""
    killed_at(6, tmp_path, 1)
    killed_at(20, tmp_path, 2)
    killed_at(6, tmp_path, 3)
    killed_at(6, tmp_path, 0)
    assert_same_run(train(tmp_path / "run", RUN, ranks=world(2, restart=4), code=0), finished(RUN, 2))


@pytest.mark.parametrize("code", [None, 75])
def test_restarts_that_were_stopped_in_order_have_saved(tmp_path, code):
    """Each was stopped in an evaluation longer than its time, so the step stays the same."""
    directory = RunDirectory(str(tmp_path), "job")
    own = dict(restart=7, exit_code=75)  # a workload's flags may have these names
    rows = [dict(kind="start", step=28, config=own, restart=restart) for restart in (1, 2)]
    starts = [json.dumps(row, separators=(",", ":")) for row in rows]
    ends = [json.dumps(dict(kind="end", exit_code=code), separators=(",", ":"))] if code else []
    directory.log.write_text("".join(f"{line}\n" for start in starts for line in [start, *ends]))
    with nullcontext() if code else pytest.raises(PreflightError, match="saved nothing"):
        directory._check_progress(3, 28)
    directory.release()


def killed_at(step: int, folder, restart: int) -> None:
    """Kill rank 1 at this step, counted from this start. Its peer exits without waiting for a reply."""
    killed = {1: at_step(step, signalled(signal.SIGKILL))}
    job = train(folder / "run", f"{RUN} --timeout 20", ranks=world(2, restart=restart), faults=killed)
    assert job.codes == [7, -signal.SIGKILL], job.err


def launched(folder, flags: str, restart: int = 0, code: int | None = None) -> ranks.Job:
    """Run a job without train()'s --run-dir, which would override the one in flags."""
    arguments = [*ranks.FLAGS.split(), "--epochs", "1", *flags.split()]
    calls = [ranks.call("ranks", "as_rank", rank, arguments) for rank in world(2, restart=restart)]
    job = ranks.fork(folder, *calls)
    assert code is None or job.codes == [code] * 2, (job.codes, job.err)
    return job


def test_a_directory_of_a_job_s_own_is_refused_where_another_job_has_left_a_run(tmp_path):
    run = tmp_path / "run-7"
    launched(tmp_path, f"--new-run-dir {run}", code=0)
    before = {path: path.read_bytes() for path in run.iterdir()}
    job = launched(tmp_path, f"--new-run-dir {run} --epochs 2", code=3)
    assert f"{run} has a run already: train.py --run-dir {run} goes on with it" in job.error
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_at_a_restart_the_directory_is_the_job_s_own_and_is_taken(tmp_path):
    launched(tmp_path, f"--new-run-dir {tmp_path / 'run'}", code=0)
    job = launched(tmp_path, f"--new-run-dir {tmp_path / 'run'} --epochs 2", restart=1, code=0)
    assert "resuming=" in job.out[0]


@pytest.mark.parametrize("order", ["--new-run-dir {0}/job --run-dir {0}/mine", "--run-dir {0}/mine --new-run-dir {0}/job"])
def test_run_dir_overrides_it_in_either_order(tmp_path, order):
    flags = order.format(tmp_path)
    launched(tmp_path, flags, code=0)
    assert "complete already" in launched(tmp_path, flags, code=0).out[0]
    assert (tmp_path / "mine" / "run.jsonl").exists() and not (tmp_path / "job").exists()


def test_fresh_and_a_directory_of_its_own_move_the_other_job_s_run_aside(tmp_path):
    flags = f"--new-run-dir {tmp_path / 'run'} --fresh"
    launched(tmp_path, flags, code=0)
    launched(tmp_path, flags, code=0)
    assert (tmp_path / "run" / "old-1" / "run.jsonl").exists()


def test_a_signal_is_heard_though_the_rank_s_own_glue_has_taken_it(tmp_path):
    """MPICH does so: it keeps SIGUSR1 after its end."""
    glue = """
import os, signal, sys, threading
from ddp_core import Rank, run

def rank(environ):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    return Rank.single()

sys.exit(run(rank))
"""
    command = [sys.executable, "-c", glue, "--epochs", "1", "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 75, ended.stderr

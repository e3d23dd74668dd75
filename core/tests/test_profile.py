"""--profile writes a trace with named parts; without the flag there is no trace.

python -m pytest core/tests/test_profile.py
"""

import gzip
import json

import pytest
import ranks
from ddp_core.profile import NOTHING, WARM_UP, Profile
from ddp_core.record import Record
from faults import at_step, signalled
from ranks import assert_same_run, train

NAMES = {"data", "forward", "backward", "communication", "optimizer", "snapshot"}
RUN = "--epochs 3 --precision fp64"  # 14 steps an epoch


def events(job: ranks.Job) -> list[dict]:
    """The trace's events that have a duration."""
    with gzip.open(job.run_dir / "trace.json.gz", "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def count(job: ranks.Job, name: str) -> int:
    return sum(event["name"] == name and event["cat"] == "user_annotation" for event in events(job))


@pytest.mark.parametrize("reduction", ["ddp", "flat"])
def test_the_trace_of_rank_0_names_the_parts_of_these_steps(finished, tmp_path, reduction):
    flags = f"{RUN} --reduction {reduction}"
    job = train(tmp_path / "run", f"{flags} --profile 3", 2, code=0)
    assert {event["name"] for event in events(job)} >= NAMES
    assert [count(job, name) for name in ("data", "forward", "backward", "optimizer", "snapshot")] == [3, 3, 3, 3, 1]
    assert f"profile={job.run_dir / 'trace.json.gz'}" in job.out[0] and job.out[1] == ""
    assert [record["step"] for record in job.records("snapshot")] == [WARM_UP + 3, 14, 28, 42]
    assert_same_run(job, finished(flags, 2))
    assert not list(job.run_dir.glob(".*"))


def test_the_sums_that_ddp_starts_during_backward_are_communication(tmp_path):
    job = train(tmp_path / "run", f"{RUN} --profile 3", 2, code=0)
    sums = [event for event in events(job) if event["name"].startswith("gloo:all_reduce")]
    assert len(sums) >= 3


@pytest.mark.parametrize("flags, steps", [("--profile", 10), ("--profile 10 --accumulate 2", 20), ("--profile 9", 9)])
def test_it_has_as_many_steps_as_are_asked_for(tmp_path, flags, steps):
    """--profile 9 ends after an epoch. Its evaluation's forward passes do not count as steps."""
    job = train(tmp_path / "run", f"{RUN} {flags}", code=0)
    assert count(job, "backward") == count(job, "forward") == steps


def test_of_a_run_that_ends_before_it_has_what_there_was(tmp_path):
    job = train(tmp_path / "run", "--epochs 1 --profile 100", code=0)
    assert count(job, "optimizer") == 14 - WARM_UP


def test_a_run_that_is_stopped_meanwhile_leaves_it_too(tmp_path):
    job = train(tmp_path / "run", f"{RUN} --profile 100", 2, faults={1: at_step(9, signalled(15))}, code=75)
    assert count(job, "optimizer") > 3


def test_a_resumed_run_is_warmed_up_anew(tmp_path):
    train(tmp_path / "run", f"{RUN} --epochs 1", code=0)
    job = train(tmp_path / "run", f"{RUN} --profile 3", code=0)
    assert 14 + WARM_UP + 3 in [record["step"] for record in job.records("snapshot")]
    assert count(job, "optimizer") == 3


def test_without_the_flag_there_is_no_trace_and_a_part_is_nothing(finished):
    assert not (finished(RUN, 2).run_dir / "trace.json.gz").exists()
    profile = Profile(0, 0, finished(RUN, 2).run_dir / "trace.json.gz", Record(0.0))
    for step in range(50):
        profile.at(step)
        assert profile.part("data") is NOTHING
    profile.end()


def _in_the_way(path) -> None:
    path.mkdir()


def test_a_trace_that_cannot_be_written_ends_the_run_on_all_ranks_alike(tmp_path):
    fault = at_step(WARM_UP, ranks.call("test_profile", "_in_the_way", tmp_path / "run" / "trace.json.gz"))
    job = train(tmp_path / "run", f"{RUN} --profile 3", 2, faults={0: fault}, code=8)
    assert f"{tmp_path / 'run' / 'trace.json.gz'}: Is a directory" in job.error and "--profile" in job.error


def test_a_run_that_ends_before_it_says_that_nothing_was_traced(tmp_path):
    job = train(tmp_path / "run", "--epochs 1 --steps-per-epoch 3 --profile", code=0)
    assert f"--profile: nothing was traced, for that begins with step {WARM_UP}, and none came" in job.out[0]
    assert not (job.run_dir / "trace.json.gz").exists()

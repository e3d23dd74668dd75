"""DDP_FAULT: each rehearsed fault ends as README promises for the real fault.

python -m pytest core/tests/test_rehearsal.py
"""

import os
import re
import signal
import subprocess
import sys

import pytest
from ddp_core import rehearsal
from ddp_core.errors import PreflightError
from faults import environment
from ranks import assert_same_run, step_of, train

RUN = "--epochs 3"


def rehearsed(tmp_path, plan: str, world_size: int = 2, flags: str = RUN, **others):
    fault = environment(DDP_FAULT=plan)
    return train(tmp_path / "run", flags, world_size, faults=dict.fromkeys(range(world_size), fault), **others)


@pytest.mark.fault(20)
@pytest.mark.parametrize("plan", ["kill step=20 rank=1", "kill save=28 rank=0", "kill evaluation=28 rank=1", "kill end rank=1"])
def test_a_killed_rank_is_named_and_the_run_goes_on(finished, tmp_path, plan):
    job = rehearsed(tmp_path, plan)
    killed = int(plan[-1])
    assert job.codes == [-9 if rank == killed else 7 for rank in range(2)]
    assert f"rank {killed} died or hangs" in job.err[1 - killed] and "DDP_FAULT: kill at" in job.out[killed]
    assert_same_run(train(tmp_path / "run", RUN, 2, code=0), finished(RUN, 2))


def test_a_hanging_rank_is_named_within_the_timeout(tmp_path):
    job = rehearsed(tmp_path, "hang step=3 rank=1", flags=f"{RUN} --timeout 3", hanging=[1])
    assert job.codes == [7, -9] and "rank 1 died or hangs" in job.err[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_of_any_rank_is_exit_code_6(tmp_path, rank):
    job = rehearsed(tmp_path, f"nan step=20 rank={rank}", code=6)
    assert f"loss on rank {rank} is not finite at step 20" in job.error and step_of(job) == 14


def test_the_rows_that_are_named_are_those_of_the_rank_with_the_nan(tmp_path):
    named = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        job = rehearsed(tmp_path / str(rank), f"nan step=3 rank={rank}", code=6)
        named.append({*re.search(r"rows \[([\d, ]+)\]", job.error)[1].split(", ")})
    assert len(named[0]) == len(named[1]) == 6 and not named[0] & named[1]


@pytest.mark.fault(32)
def test_a_full_disk_is_exit_code_8_and_the_snapshot_before_stays(finished, tmp_path):
    job = rehearsed(tmp_path, "enospc save=20", code=8)
    assert "No space left on device" in job.error and step_of(job) == 14
    assert_same_run(train(tmp_path / "run", RUN, 2, code=0), finished(RUN, 2))


def test_a_slow_save_changes_nothing(finished, tmp_path):
    job = rehearsed(tmp_path, "slow save seconds=2", code=0)
    assert_same_run(job, finished(RUN, 2))
    assert "DDP_FAULT: slow at save, step 14" in job.out[0]


def test_a_rank_that_is_held_goes_on_when_it_is_told_to(tmp_path):
    job = train(tmp_path / "run", "--epochs 1", faults={0: held_and_let_go}, code=0)
    assert "DDP_FAULT: hold at step, step 5, process" in job.out[0]


def held_and_let_go() -> None:
    os.environ["DDP_FAULT"] = "hold step=5"
    program = (
        "import os, signal, sys, time\n"
        "pid = int(sys.argv[1])\n"
        "while open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'T': time.sleep(0.05)\n"
        "os.kill(pid, signal.SIGCONT)\n"
    )
    subprocess.Popen([sys.executable, "-c", program, str(os.getpid())])


def test_it_happens_once_in_the_start_that_it_names(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    for start, times in ((0, 0), (1, 1)):
        rehearsal.plan({"DDP_FAULT": "kill step=3 start=1"}, rank=0, start=start)
        for step in range(6):
            rehearsal.rehearse("save", step)
            rehearsal.rehearse("step", step)
        assert len(killed) == times
    assert killed == [(os.getpid(), signal.SIGKILL)]
    rehearsal.plan({}, 0, 0)
    assert not rehearsal._planned


@pytest.mark.parametrize(
    "text", ["boom", "kill steps=3", "kill step=x", "kill step=-1", "nan save", "enospc step=3", "kill rank", " ", "kill 3"]
)
def test_a_plan_that_means_nothing_is_refused(text):
    with pytest.raises(PreflightError, match=r"^DDP_FAULT='"):
        rehearsal.plan({"DDP_FAULT": text}, 0, 0)

"""A run that cannot go on ends on all ranks with one exit code and one line, and keeps the last snapshot unchanged.

python -m pytest core/tests/test_refusal.py
"""

import pytest
import ranks
from ddp_core import snapshot
from ddp_core.order import rows_of_rank, sample_order
from ddp_core.run_directory import RunDirectory
from faults import at_step, files_limited_to, once_saved, poisoned
from ranks import assert_same_run, step_of, train

RUN = "--epochs 3 --precision fp64"  # 14 steps an epoch

# ---- numbers that are not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", ["", "--reduction ddp", "--reduction canonical", "--accumulate 2", "--optimizer adamw --lr 0.001"]
)
@pytest.mark.fault(18)
def test_a_nan_on_one_rank_stops_all_before_the_optimizer_uses_it(tmp_path, flags):
    """The NaN is on rank 1 only, in step 5 of the second epoch. Rank 0's own losses stay finite."""
    first, second = (rows_of_rank(sample_order(0, epoch, 1438), 96, 1, 2) for epoch in (0, 1))
    row = next(row for row in second[5, :6].tolist() if row not in first)
    good = train(tmp_path / "run", f"{RUN} {flags} --epochs 1", 2, code=0).snapshot_hash()
    job = train(tmp_path / "run", f"{RUN} {flags}", 2, faults={1: poisoned(row)}, code=6)
    assert "rank 1 " in job.error and "at step 19 " in job.error and str(row) in job.error
    assert job.snapshot_hash() == good
    assert all(values.isfinite().all() for values in snapshot.read(job.snapshot)[0].values())
    assert job.records("end")[-1]["exit_code"] == 6


def test_a_learning_rate_that_diverges_is_an_error_and_no_snapshot(tmp_path):
    job = train(tmp_path / "run", "--workload regression --lr 1e9 --epochs 1", 2, code=6)
    assert "--lr 1e+09" in job.error
    assert not job.snapshot.exists()


# ---- snapshots that cannot be used ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--lr 0.05", "lr: 0.1 there, 0.05 here"),
        ("--seed 3", "seed: 0 there, 3 here"),
        ("--global-batch-size 48", "global_batch_size: 96 there, 48 here"),
        ("--precision fp64", "precision: fp32 there, fp64 here"),
        ("--optimizer adamw --lr 0.1", "optimizer: sgd there, adamw here"),
        ("--workload regression", "workload: digits there, regression here"),
        ("--lr-schedule cosine", "lr_schedule: constant there, cosine here"),
    ],
)
@pytest.mark.fault(37)
def test_the_snapshot_of_another_run_is_refused_with_what_differs(finished, tmp_path, flags, named):
    folder = tmp_path / "run"
    folder.mkdir()
    other = finished("--epochs 3", 2)
    (folder / "snapshot.safetensors").write_bytes(other.snapshot.read_bytes())
    job = train(folder, f"--epochs 5 {flags}", 2, code=5)
    assert named in job.error and "--fresh" in job.error
    assert job.snapshot_hash() == other.snapshot_hash(), "a refused snapshot stays as it is"


def test_rows_of_a_generator_of_one_s_own_are_told_from_other_flags(tmp_path):
    """If only the data differ, the error must not blame a flag."""
    rows = "torch.rand(96, 6, generator=torch.Generator().manual_seed(int(time.time_ns() % 2**31)))"
    source = f"import time\nfrom small import *\n\nclass Mine(Small):\n    def data(self, config):\n        x = {rows}\n"
    (tmp_path / "mine.py").write_text(source + "        return (x, x.sum(1, keepdim=True)), None\n")
    flags = f"--workload {tmp_path / 'mine.py'}"
    train(tmp_path / "run", f"{flags} --epochs 1", 1, code=0)
    error = train(tmp_path / "run", f"{flags} --epochs 2", 1, code=5).error
    assert "(data: " in error and "data() gave other rows than then" in error and "`fingerprint`" in error, error


def test_a_broken_snapshot_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshot.safetensors").write_bytes(b"garbage")
    job = train(tmp_path / "run", "--epochs 1", 2, code=5)
    assert str(job.snapshot) in job.error


def test_a_file_that_is_a_whole_snapshot_of_nothing_is_refused(tmp_path):
    """The file has tensors, checksums and a document, but no run: exit code 5 on all ranks, no traceback."""
    (tmp_path / "run").mkdir()
    snapshot.write(tmp_path / "run" / "snapshot.safetensors", {}, {"written": "by hand"})
    job = train(tmp_path / "run", "--epochs 1", 2, code=5)
    assert str(job.snapshot) in job.error


# ---- storage ------------------------------------------------------------------------------------------------------


@pytest.mark.fault(32)
def test_a_snapshot_that_does_not_fit_ends_the_run_on_all_ranks_and_the_one_before_stays(finished, tmp_path):
    full = {0: at_step(20, once_saved(files_limited_to(100_000)))}
    job = train(tmp_path / "run", RUN, 2, faults=full, code=8)
    assert "snapshot.safetensors" in job.error or "best.safetensors" in job.error
    assert "free space" in job.error
    assert step_of(job) == 14 and not list(job.run_dir.glob(".*"))
    assert_same_run(train(tmp_path / "run", RUN, 2, code=0), finished(RUN, 2))


@pytest.mark.fault(42)
def test_a_second_job_in_the_same_directory_is_refused(tmp_path):
    first = RunDirectory(str(tmp_path / "run"), "first", fresh=False)
    job = train(tmp_path / "run", "--epochs 1", ranks=ranks.world(2, job_id="second"), code=3)
    first.release()
    assert "in use by job first" in job.error

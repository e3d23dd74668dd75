"""Rows read one by one by DataLoader, in the core's order: equal values for any workers and ranks.

python -m pytest core/tests/test_batches.py
"""

import random
import signal
from collections import namedtuple
from types import SimpleNamespace

import numpy
import pytest
import ranks
import torch
from ddp_core import loading
from ddp_core.batches import Batches
from ddp_core.config import parse
from ddp_core.errors import PreflightError, WorkloadError
from ddp_core.loading import SeededRows
from ddp_core.workload import find
from faults import at_step, signalled
from ranks import assert_same_run, step_of, train
from small import Augmented, OneByOne, table
from test_order import words
from test_reduction import assert_same_bits
from test_trainer import deviation

AUGMENTED = "small:Augmented"


def seeded(seed: int = 0, row_seeds: str = "on") -> SeededRows:
    return SeededRows(OneByOne(*table(), noise=1.0), SimpleNamespace(seed=seed, row_seeds=row_seeds))


# ---- random numbers of a row --------------------------------------------------------------------------------------


def test_a_row_is_a_function_of_seed_epoch_and_row_and_of_nothing_else():
    rows = seeded()
    forwards = {place: rows[place][0] for place in [(epoch, row) for epoch in range(3) for row in range(20)]}
    torch.rand(7), random.random(), numpy.random.rand()
    for place in reversed(forwards):
        assert torch.equal(rows[place][0], forwards[place]), place
    drawn = {tuple((values - table()[0][place[1]]).tolist()) for place, values in forwards.items()}
    assert len(drawn) == 60, "two rows or epochs have the same numbers"
    assert not torch.equal(seeded(seed=1)[0, 0][0], forwards[0, 0])


def test_the_generators_are_seeded_with_the_words_of_plain_python():
    """The fourth stream: words(1, 4, seed, epoch, row). NumPy takes the low 32 bits."""
    (seed,) = words(1, 4, 5, 2, 7)
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    drawn = random.random() + numpy.random.rand() + torch.rand(()).item()
    values, _ = seeded(seed=5)[2, 7]
    torch.testing.assert_close(values, table()[0][7] + drawn, rtol=1e-15, atol=0)


def test_row_seeds_off_leaves_the_generators_alone():
    rows = seeded(row_seeds="off")
    random.seed(3)
    state = random.getstate()
    assert not torch.equal(rows[0, 0][0], rows[0, 0][0])
    random.setstate(state)


class NoRows:
    """Stands for a loader and its iterator."""

    _try_get_data = _shutdown_workers = staticmethod(lambda *_: None)

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


def test_a_batch_may_take_as_long_as_timeout_says(monkeypatch):
    """Workers get --timeout, not --rendezvous-timeout."""
    config, told = parse(["--workers", "1", "--timeout", "77", "--device", "cpu"], 1, workload=find(Augmented)), {}
    monkeypatch.setattr(loading, "DataLoader", lambda rows, **flags: told.update(flags) or NoRows())
    one = Batches(OneByOne(*table(), noise=0.0), find(Augmented), config, torch.device("cpu"), torch.float64)
    assert [*one.stream(iter([]))] == [] and told["timeout"] == 77 and told["num_workers"] == 1


# ---- batches ------------------------------------------------------------------------------------------------------


def values_read(file, workers: int, world_size: int) -> None:
    """Write every row's values in two epochs, by epoch and row, read by this many ranks and workers."""
    config = parse(["--workers", str(workers), "--device", "cpu"], 1, workload=find(Augmented))
    dataset, found = OneByOne(*table(), noise=1.0), {}
    for rank in range(world_size):
        starts = [(epoch, start) for epoch in range(2) for start in range(0, 128, 16)]
        plan = [(epoch, torch.arange(start + rank, start + 16, world_size)) for epoch, start in starts]
        batches = Batches(dataset, find(Augmented), config, torch.device("cpu"), torch.float64)
        for (epoch, rows), (inputs, _) in zip(plan, batches.stream(iter(plan)), strict=True):
            found |= {(epoch, row): values for row, values in zip(rows.tolist(), inputs, strict=True)}
        batches.close()
    torch.save([found[key] for key in sorted(found)], file)


def test_every_row_has_the_same_values_for_any_number_of_workers_and_ranks(tmp_path):
    """In separate processes, because workers are forked."""
    kinds = [(workers, world_size) for workers in (0, 1, 2) for world_size in (1, 2, 4)]
    files = [tmp_path / f"{workers}-{world_size}" for workers, world_size in kinds]
    calls = [ranks.call("test_batches", "values_read", file, *kind) for file, kind in zip(files, kinds, strict=True)]
    job = ranks.fork(tmp_path, *calls)
    assert job.codes == [0] * len(kinds), job.err
    first, *others = (torch.stack(torch.load(file)) for file in files)
    assert len(first) == 256 and not torch.equal(first[:128], first[128:]), "the second epoch has the numbers of the first"
    for kind, other in zip(kinds[1:], others, strict=True):
        assert torch.equal(first, other), kind


class Unreadable(OneByOne):
    """Reading row 42 fails."""

    def __getitem__(self, row):
        if row == 42:
            raise ValueError("no such sample")
        return super().__getitem__(row)


def what_is_said(file, workers: int) -> None:
    config = parse(["--workers", str(workers), "--device", "cpu"], 1, workload=find(Augmented))
    batches = Batches(Unreadable(*table(), noise=0.0), find(Augmented), config, torch.device("cpu"), torch.float64)
    said = []
    try:
        said.extend(len(inputs) for inputs, _ in batches.stream((0, torch.arange(at, at + 4)) for at in range(0, 128, 4)))
    except WorkloadError as error:
        said.append(str(error))
    batches.close()
    file.write_text("\n".join(map(str, said)))


def test_a_row_that_cannot_be_read_is_named_however_far_workers_have_read_on(tmp_path):
    files = [tmp_path / str(workers) for workers in (0, 1, 3)]
    calls = [ranks.call("test_batches", "what_is_said", file, int(file.name)) for file in files]
    job = ranks.fork(tmp_path, *calls)
    assert job.codes == [0] * len(files), job.err
    for file in files:
        *lengths, line = file.read_text().splitlines()
        assert lengths == ["4"] * 10 and "row 42 of" in line and "no such sample" in line, line


def test_batches_come_in_the_order_of_the_plan_and_are_as_long_as_it_says():
    config = parse(["--device", "cpu"], 1, workload=find(Augmented))
    batches = Batches(OneByOne(*table(), noise=0.0), find(Augmented), config, torch.device("cpu"), torch.float32)
    plan = [(0, torch.tensor([5, 3, 9])), (0, torch.tensor([7])), (1, torch.tensor([3, 3]))]
    read = list(batches.stream(iter(plan)))
    for (_, rows), (inputs, targets) in zip(plan, read, strict=True):
        assert torch.equal(inputs, table()[0][rows].float()) and torch.equal(targets, table()[1][rows].float())


Pair = namedtuple("Pair", "image, label")


class Ragged:
    """A batch of a custom class, as in graph libraries."""

    def __init__(self, values):
        self.values = values

    def to(self, device):
        return Ragged(self.values.to(device))


def test_numbers_are_converted_in_any_kind_of_batch_and_all_else_stays():
    """Real numbers get the run's precision; integers, texts and unknown objects stay unchanged."""
    real, whole = torch.ones(2), torch.arange(2)
    batch = {"pair": Pair(real, whole), "list": [real, "text", None], "graph": Ragged(real), "tuple": (whole, 7)}
    workload = find(Augmented)
    config = parse(["--device", "cpu"], 1, workload=workload)

    class Rows:
        batched = True

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return batch

    batches = Batches(Rows(), workload, config, torch.device("cpu"), torch.float64)
    (moved,) = batches.stream(iter([(0, torch.tensor([0]))]))
    assert isinstance(moved["pair"], Pair) and moved["pair"].image.dtype == torch.float64
    assert moved["pair"].label.dtype == torch.int64 and moved["list"][0].dtype == torch.float64
    assert moved["list"][1:] == ["text", None] and moved["tuple"][1] == 7
    assert isinstance(moved["graph"], Ragged)


# ---- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_do_not_depend_on_the_number_of_workers(finished, world_size, workers):
    job, alone = finished(f"--workers {workers}", world_size, AUGMENTED), finished("", world_size, AUGMENTED)
    assert_same_run(job, alone)


@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_of_augmented_rows_do_not_depend_on_the_world_size(finished, world_size):
    job, alone = finished("", world_size, AUGMENTED), finished("", 1, AUGMENTED)
    assert deviation(job.losses, alone.losses) < 1e-12
    assert deviation(alone.losses, finished("--noise 0", 1, AUGMENTED).losses) > 1e-4, "nothing was augmented"


def test_under_canonical_they_are_the_same_bits(finished):
    flags = "--reduction canonical"
    assert_same_bits(finished(f"{flags} --workers 1", 2, AUGMENTED), finished(flags, 1, AUGMENTED))


def test_read_row_by_row_or_all_at_once_it_is_the_same_training(finished):
    assert_same_run_but_for_names(finished("--noise 0", 2, AUGMENTED), finished("", 2, "small:Small"))


def assert_same_run_but_for_names(job: ranks.Job, reference: ranks.Job) -> None:
    assert job.losses == reference.losses
    ours, theirs = ([record["eval_loss"] for record in one.records("epoch")] for one in (job, reference))
    assert ours == theirs


@pytest.mark.parametrize("world_size", [1, 2])
def test_held_out_rows_go_through_the_loader_too(finished, world_size):
    flags = "--noise 0 --workers 1"
    ours, theirs = finished(flags, world_size, "small:EvaluatedOneByOne"), finished("", world_size, "small:Small")
    assert_same_run_but_for_names(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first, then", [(1, 1), (2, 2), (2, 1)])
def test_stopped_in_the_middle_of_an_epoch_it_goes_on_with_the_same_rows(finished, tmp_path, workers, first, then):
    """The scheduler signals workers together with their rank. They read on until the rank has saved."""
    flags = f"--workers {workers}"
    stopped = {0: at_step(3, signalled(signal.SIGUSR1))}
    job = train(tmp_path / "run", flags, first, workload=AUGMENTED, faults=stopped, code=75)
    assert 0 < step_of(job) < 8
    job = train(tmp_path / "run", flags, then, workload=AUGMENTED, code=0)
    if first == then:
        assert_same_run(job, finished(flags, first, AUGMENTED))
    assert deviation(job.losses, finished(flags, first, AUGMENTED).losses) < 1e-12


def test_workers_that_are_signalled_with_their_rank_read_on(finished, tmp_path):
    """srun sends SIGTERM to every process of a step."""
    stopped = {0: at_step(3, ranks.call("test_batches", "_signal_the_family"))}
    job = train(tmp_path / "run", "--workers 2", 2, workload=AUGMENTED, faults=stopped, code=75)
    assert job.err == ["", ""] and 0 < step_of(job) < 8
    assert_same_run(
        train(tmp_path / "run", "--workers 2", 2, workload=AUGMENTED, code=0), finished("--workers 2", 2, AUGMENTED)
    )


def _signal_the_family() -> None:
    import multiprocessing
    import os

    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_workers_that_are_signalled_while_they_start_read_on(tmp_path):
    faults = {0: ranks.call("test_batches", "_signal_each_as_it_starts")}
    train(tmp_path / "run", "--workers 2 --epochs 1", 1, workload=AUGMENTED, faults=faults, code=0)


def _signal_each_as_it_starts() -> None:
    import os

    begin = loading._begin_worker

    def signalled_first(number: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        begin(number)

    loading._begin_worker = signalled_first


def test_a_worker_collects_nothing_that_its_rank_has_left(tmp_path):
    job = ranks.fork(tmp_path, ranks.call("test_batches", "_read_beside_garbage", tmp_path / "collected-by"))
    assert job.codes == [0], job.err
    process, *others = (tmp_path / "collected-by").read_text().split()
    assert not others and process == (tmp_path / "rank").read_text(), "a worker has collected it"


def _read_beside_garbage(file) -> None:
    """Uncollected garbage would close something of this process. Each worker collects garbage as soon as it is forked."""
    import gc
    import os

    class Group:
        def __init__(self):
            self.itself = self

        def __del__(self):
            with file.open("a") as out:
                out.write(f"{os.getpid()} ")

    config = parse(["--workers", "2", "--device", "cpu"], 1, workload=find(Augmented))
    batches = Batches(OneByOne(*table(), noise=0.0), find(Augmented), config, torch.device("cpu"), torch.float64)
    gc.disable()
    Group()
    os.register_at_fork(after_in_child=gc.collect)
    assert len(list(batches.stream(iter([(0, torch.arange(4))] * 4)))) == 4
    gc.collect()
    (file.parent / "rank").write_text(str(os.getpid()))


def test_a_worker_that_dies_while_others_are_started_leaves_none_that_python_would_wait_for(tmp_path):
    job = ranks.fork(tmp_path, ranks.call("test_batches", "_read_with_a_worker_that_dies_at_once"))
    assert job.codes == [1] and "DataLoader worker (pid" in job.err[0], (job.codes, job.err)


def _read_with_a_worker_that_dies_at_once() -> None:
    import os
    import time

    class Deadly(OneByOne):
        def __getitem__(self, row):
            if torch.utils.data.get_worker_info().id == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def plan():
        yield 0, torch.arange(4)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # waits for the worker's death, while DataLoader is still being made
        yield 0, torch.arange(4)

    config = parse(["--workers", "2", "--device", "cpu"], 1, workload=find(Augmented))
    next(Batches(Deadly(*table(), noise=0.0), find(Augmented), config, torch.device("cpu"), torch.float64).stream(plan()))


def test_a_worker_that_dies_while_the_rank_forks_others_is_missed_at_once(tmp_path):
    job = ranks.fork(tmp_path, ranks.call("test_batches", "_wait_for_one_that_python_has_reaped"))
    assert job.codes == [1] and "DataLoader worker (pid" in job.err[0], (job.codes, job.err)


def _wait_for_one_that_python_has_reaped() -> None:
    import multiprocessing
    import os

    class Deadly(OneByOne):
        def __getitem__(self, row):
            return super().__getitem__(row) if row < 4 else os._exit(9)

    config = parse(["--workers", "1", "--device", "cpu"], 1, workload=find(Augmented))
    rows = Batches(Deadly(*table(), noise=0.0), find(Augmented), config, torch.device("cpu"), torch.float64)
    batches = rows.stream(iter([(0, torch.arange(4)), (0, torch.arange(4, 8))]))
    next(batches)
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # waits for the worker's death
    multiprocessing.active_children()  # reaps the worker, as the start of another would
    next(batches)


def test_that_a_rank_hangs_up_on_a_worker_is_no_news(tmp_path):
    """A rank closes this connection when another worker dies while it takes rows from this one."""
    job = ranks.fork(tmp_path, ranks.call("test_batches", "_hung_up_on"))
    assert (job.codes, job.err) == ([0], [""])


def _hung_up_on() -> None:
    """Acts as a worker, whose rows are handed on by a separate thread behind a socket."""
    import socket
    from multiprocessing import resource_sharer

    loading._begin_worker(0)
    address, _ = resource_sharer.DupFd(0)._id
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(address)
    resource_sharer.stop()


@pytest.mark.parametrize("row_seeds", ["on", "off"])
def test_a_run_repeats_with_seeds_for_each_row_and_without(finished, tmp_path, row_seeds):
    """Without --row-seeds, a run repeats if one process reads all rows in order: the run's seed is enough."""
    flags = f"--row-seeds {row_seeds}"
    again = train(tmp_path / "run", flags, 1, workload=AUGMENTED, code=0)
    assert again.losses == finished(flags, 1, AUGMENTED).losses
    assert deviation(finished("--row-seeds off", 1, AUGMENTED).losses, finished("", 1, AUGMENTED).losses) > 1e-6


def test_workers_are_those_of_the_beginning(tmp_path):
    """Also for held-out rows: a process that has trained must not be forked."""
    file = tmp_path / "mine.py"
    file.write_text(COUNTS_WORKERS)
    job = train(tmp_path / "run", f"--workload {file} --workers 1 --epochs 2", 1, code=0)
    *_, trained = [line for line in job.out[0].splitlines() if line.startswith("workers")]  # schedule() is tried first
    assert trained == "workers 2"


COUNTS_WORKERS = """
import multiprocessing
from small import *

class Mine(EvaluatedOneByOne):
    def schedule(self, step, total_steps, config):
        if step == 0:
            print("workers", len(multiprocessing.active_children()), flush=True)
        return 1.0
"""


def test_too_many_open_files_are_named(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("Too many open files. Communication with the workers is no longer possible.")
        yield

    monkeypatch.setattr(loading, "DataLoader", full)
    with pytest.raises(PreflightError, match="ulimit -n, or lower --workers"):
        next(loading.loaded([], SimpleNamespace(timeout=9, row_seeds="off", seed=0), iter([]), None, 0))

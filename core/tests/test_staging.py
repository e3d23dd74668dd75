"""Data files that one rank of a node reads and the others share: which rank opens them, and what happens if sharing fails.

python -m pytest core/tests/test_staging.py

Each rank prints the files that it opens (watching). All nodes are one machine here and differ only in node_rank.
"""

import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from ddp_core import staging
from ddp_core.data import mapped
from faults import at_step, environment
from ranks import Job, on_nodes, train
from safetensors.torch import save_file
from small import table

MINE = """
import os
from small import *
from ddp_core.data import mapped

class Mine(Small):
    def data(self, config):
        folder = {folder!r}
        names = os.environ.get("NAMES", "xy")
        found = {{name: mapped(self.once_a_node(f"{{folder}}/{{name}}.npy")) for name in names}}
        x, y = found["x"], found["y"]
        return (x[:128], y[:128]), (x[128:], y[128:])
"""


@pytest.fixture
def files(tmp_path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, column in zip("xy", table(165), strict=True):
        numpy.save(folder / f"{name}.npy", column.numpy())
    return folder


def trained(
    files: Path, source: str = "", nodes: int = 1, ranks: int = 2, flags: str = "", code: int | None = 0, **faults
) -> Job:
    """The job of a workload file. faults: as rank_N, what to call before rank N's program starts."""
    folder = files.parent
    file = folder / "mine.py"
    file.write_text(source or MINE.format(folder=str(files)))
    given = {rank: partial(watching, str(files), faults.get(f"rank_{rank}")) for rank in range(nodes * ranks)}
    where = folder / f"run-{len([*folder.glob('run-*')])}"
    return train(where, f"--workload {file} {flags}", ranks=on_nodes(nodes, ranks), faults=given, code=code)


def watching(folder: str, fault=None) -> None:
    """Print each opened file below the folder."""
    staging.IN_MEMORY = ()  # the tests must not depend on whether /tmp is in memory

    def hook(event: str, args: tuple) -> None:
        if event == "open" and str(args[0]).startswith(folder):
            os.write(1, f"opened {os.path.basename(args[0])}\n".encode())

    sys.addaudithook(hook)
    if fault:
        fault()


def opened(job: Job) -> list[list[str]]:
    """For each rank, the files that it has opened."""
    return [sorted(re.findall(r"^opened (.*)$", text, re.MULTILINE)) for text in job.out]


def error(job: Job) -> str:
    """The single error line. With several nodes there is also a note about rank 0's address."""
    [line] = [line for text in job.err for line in text.splitlines() if not line.startswith("note: MASTER_ADDR")]
    return line


BOTH, NONE = ["x.npy", "y.npy"], []


# ---- once a node --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes, ranks", [(1, 2), (2, 2), (2, 1)])
def test_the_first_rank_of_a_node_opens_a_file_and_the_others_share_it(files, nodes, ranks):
    once, each = (trained(files, nodes=nodes, ranks=ranks, flags=f"--stage-data {choice}") for choice in ("on", "off"))
    assert opened(once) == [BOTH, *[NONE] * (ranks - 1)] * nodes and opened(each) == [BOTH] * (nodes * ranks)
    assert once.losses == each.losses and once.snapshot_hash() == each.snapshot_hash()
    [start], [other] = once.records("start"), each.records("start")
    assert start["data"] == other["data"] and start["notes"] == other["notes"]
    assert not any("in_place" in row for row in start["ranks"])


def test_a_long_name_that_is_not_ascii_is_shared_too(files):
    """A copy's name may have 249 bytes. Each of these letters takes three."""
    longer = files / ("測定" * 35)
    longer.mkdir()
    for name in BOTH:
        (files / name).rename(longer / name)
    assert opened(trained(files, MINE.format(folder=str(longer)))) == [BOTH, NONE]


@pytest.mark.parametrize("name", ["mnist", "gpt"])
def test_files_below_data_dir_are_read_once(flags_of, tmp_path, name):
    flags, folder = flags_of[name], re.search(r"--data-dir (\S+)", flags_of[name])[1]
    faults = dict.fromkeys(range(4), partial(watching, folder))
    once, each = (
        train(tmp_path / choice, f"{flags} --stage-data {choice}", ranks=on_nodes(2, 2), faults=faults, code=0)
        for choice in ("on", "off")
    )
    all_files = sorted(path.name for path in Path(folder).iterdir())
    assert opened(once) == [all_files, NONE] * 2 and opened(each) == [all_files] * 4
    assert once.losses == each.losses and once.snapshot_hash() == each.snapshot_hash()


def test_ranks_may_ask_for_the_files_in_any_order(files):
    job = trained(files, ranks=4, rank_1=environment(NAMES="yx"))
    assert opened(job) == [BOTH, NONE, NONE, NONE]


ROW_BY_ROW = """
import numpy
from small import *

class Late(Dataset):
    def __init__(self, x, y, first, count):
        self.x, self.y, self.first, self.count = x, y, first, count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return tuple(torch.from_numpy(numpy.load(path, mmap_mode="r")[self.first + row].copy()) for path in (self.x, self.y))

class Mine(Small):
    def data(self, config):
        x, y = (self.once_a_node(f"{folder}/{{name}}.npy") for name in "xy")
        assert "/memfd:" in os.readlink(x) and os.stat(x).st_nlink == 0, "it has no name"
        return Late(x, y, 0, 128), Late(x, y, 128, 37)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_may_be_read_from_a_copy_as_long_as_the_run(files, workers):
    source = "import os" + ROW_BY_ROW.format(folder=files)
    rows = trained(files, source, flags=f"--workers {workers}")
    assert opened(rows) == [BOTH, NONE] and rows.losses == trained(files).losses


def test_nobody_can_write_to_a_copy(files):
    source = MINE.format(folder=str(files)).replace(
        "        return (x[",
        "        open(self.once_a_node(f'{folder}/x.npy'), 'r+b', buffering=0).write(b'0')\n        return (x[",
    )
    job = trained(files, source, code=2)
    assert "PermissionError" in error(job) and "line 12 (data)" in error(job)


# ---- fingerprints of the data -------------------------------------------------------------------------------------


def on_node_1() -> None:
    socket.gethostname = lambda: "node-1"


def other_copy() -> None:
    """One byte differs in this node's copy."""
    on_node_1()
    seal = staging.fcntl.fcntl

    def damage(copy, what, how):
        os.pwrite(copy.fileno(), b"\x55", 600)
        return seal(copy, what, how)

    staging.fcntl = type("", (), {**vars(staging.fcntl), "fcntl": staticmethod(damage)})


def test_a_node_whose_copy_is_damaged_is_named(files):
    job = trained(files, nodes=2, ranks=2, code=4, rank_2=other_copy, rank_3=on_node_1)
    # The error names whichever of the node's two ranks came first.
    assert re.search(r"data=\S+ on rank ([23]), but \S+ on rank 0: .* \(rank \1 is on node-1\)", error(job))


# ---- files without a copy -----------------------------------------------------------------------------------------


def note(job: Job) -> str:
    """The single note about it, which is recorded and printed."""
    [start] = job.records("start")
    [told] = [note for note in start["notes"] if "not once" in note]
    assert "".join(job.out).count("not once") == 1 and not any("in_place" in row for row in start["ranks"])
    return told


def room_for(size: int) -> None:
    staging.available = lambda: 2 * size


def test_files_that_do_not_fit_are_read_where_they_are(files):
    """x.npy has 8,048 bytes, y.npy 1,448."""
    job = trained(files, nodes=2, ranks=2, rank_0=partial(room_for, 5000), rank_2=partial(room_for, 9000))
    assert opened(job) == [BOTH, ["x.npy"], BOTH, ["y.npy"]]
    assert re.fullmatch(rf"{files}/x.npy is read by each rank of .*: it has 8048 bytes, and of half of .* 5000 .*", note(job))
    assert job.losses == trained(files, nodes=2).losses


def no_time() -> None:
    begin = staging.Staging.__init__

    def hooked(self, *args):
        begin(self, *args)
        self.until = 0.0

    staging.Staging.__init__ = hooked


def one_copy() -> None:
    staging.resource = SimpleNamespace(getrlimit=lambda _: (8, 8), RLIMIT_NOFILE=None)


def no_memory() -> None:
    def refuse(*args):
        raise OSError(28, "No space left on device")

    os.memfd_create = refuse


@pytest.mark.parametrize(
    "fault, why, read",
    [
        (no_time, "copying took half of --rendezvous-timeout", BOTH),
        (no_memory, "No space left on device", BOTH),
        (one_copy, "ulimit -n allows 1 copies", ["y.npy"]),
    ],
)
def test_a_first_rank_that_cannot_copy_says_why(files, fault, why, read):
    job = trained(files, rank_0=fault)
    assert [sorted({*names}) for names in opened(job)] == [BOTH, read] and note(job).endswith(why)


class Later:
    """A stop that comes after a part has been copied."""

    asked = 0

    def __bool__(self):
        self.asked += 1
        return self.asked > 1


def test_a_stop_ends_a_copy(files, monkeypatch):
    """Large files take minutes, and a job that must stop has seconds."""
    monkeypatch.setattr(staging, "IN_MEMORY", ())
    monkeypatch.setattr(staging, "CHUNK", 100)
    store = SimpleNamespace(set=lambda *pair: None)
    for stop, copied in ((False, True), (True, False), (Later(), False)):
        rendezvous = SimpleNamespace(store=store, deadline=time.monotonic() + 100, stop=stop)
        node = staging.Staging(on_nodes(1, 2)[0], rendezvous, wanted=True)
        assert (node.once(files / "x.npy") != files / "x.npy") == copied


def another_user() -> None:
    """This rank's user number differs from the other end's, which the kernel reports."""
    os.geteuid = lambda: 12345


@pytest.mark.parametrize("rank, why", [(0, "its first rank gave no copy"), (1, "another user's program has the address")])
def test_another_user_s_process_is_neither_believed_nor_answered(files, rank, why):
    """Rank 0 ignores the other rank's call; rank 1 ignores rank 0's answer."""
    job = trained(files, **{f"rank_{rank}": another_user})
    assert opened(job) == [BOTH, BOTH] and why in note(job)


def test_a_copy_of_safetensors_is_read_as_what_it_was(tmp_path, monkeypatch):
    """The copy's own path, .../fd/7, has no suffix .safetensors."""
    monkeypatch.setattr(staging, "IN_MEMORY", ())
    save_file({"x": table()[0]}, tmp_path / "x.safetensors")
    store = SimpleNamespace(set=lambda *pair: None)
    rendezvous = SimpleNamespace(store=store, deadline=time.monotonic() + 100, stop=False)
    node = staging.Staging(on_nodes(1, 2)[0], rendezvous, wanted=True)
    copy = node.once(tmp_path / "x.safetensors")
    assert copy.suffix == "" and torch.equal(mapped(copy, name="x"), table()[0])


def test_files_in_memory_are_not_copied():
    assert staging._in_memory(os.stat("/dev/shm").st_dev) and not staging._in_memory(os.stat("/proc").st_dev)


# ---- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content, said", [(None, "FileNotFoundError"), (b"short", "IndexError")])
def test_the_file_that_cannot_be_read_is_named_and_not_its_copy(files, content, said):
    (files / "y.npy").unlink()
    if content:
        (files / "y.npy").write_bytes(content)
    job = trained(files, code=3)
    assert f"{files}/y.npy cannot be mapped ({said}" in error(job)


FAILS = """
from small import *
from ddp_core.data import mapped

class Mine(Small):
    def data(self, config):
        for name in "xy":
            if self.staging.leads and name == {at!r}:
                raise OSError("tape 7")
            mapped(self.once_a_node(f"{folder}/{{name}}.npy"))
        return table(), None
"""


@pytest.mark.parametrize("at", ["x", "y"])
def test_ranks_that_wait_for_a_first_rank_hear_why_it_failed(files, at):
    """Before it copies anything, or after the first of two files. Waiting takes five minutes, more than ranks.SECONDS."""
    job = trained(files, FAILS.format(folder=files, at=at), nodes=2, flags="--rendezvous-timeout 600", code=2)
    assert "line 9 (data): OSError: tape 7" in error(job)


def killed_in_a_copy() -> None:
    staging.Staging._copy = lambda self, name: os.kill(os.getpid(), signal.SIGKILL)


def test_a_first_rank_that_is_killed_while_others_wait_for_it_is_named_alone(files):
    job = trained(files, nodes=2, flags="--rendezvous-timeout 8", code=None, rank_2=killed_in_a_copy)
    assert job.codes == [4, 4, -signal.SIGKILL, 4] and "1 of 4 ranks missing after 8 s" in error(job)
    assert error(job).endswith("rank 2") and opened(job) == [BOTH, NONE, NONE, BOTH]


def test_nothing_is_left_of_a_job_that_is_killed(files):
    """During training both ranks hold the copies. After their end, no process holds one and no name leads to one."""
    job = trained(files, code=None, **{f"rank_{rank}": at_step(3, copies_then_killed) for rank in (0, 1)})
    held = [re.findall(r"^holds (.*)$", text, re.MULTILINE) for text in job.out]
    assert job.codes == [-signal.SIGKILL] * 2 and held[0] == held[1] == [f"/memfd:{files}/{name} (deleted)" for name in BOTH]
    assert copies(str(files)) == NONE


def copies(folder: str, process: str = "*") -> list[str]:
    """The copies that processes hold open."""
    found = []
    for descriptor in Path("/proc").glob(f"{process}/fd/*"):
        with suppress(OSError):
            found.append(os.readlink(descriptor))
    return sorted({link for link in found if link.startswith(f"/memfd:{folder}")})


def copies_then_killed() -> None:
    for link in copies("", str(os.getpid())):
        os.write(1, f"holds {link}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)

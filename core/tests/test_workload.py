"""A scientist's own workload: a mistake in its file is one line on stderr and exit code 2, 3 or 7, never a hang.

python -m pytest core/tests/test_workload.py
"""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
from ddp_core import run_lock
from ddp_core.config import parse
from ddp_core.errors import UsageError, WorkloadError
from ddp_core.workload import find
from faults import at_step, environment, signalled
from ranks import Job, assert_same_run, train

SMALL = "from small import *\n\n\nclass Mine(Small):\n"
WHOLE = """
import torch
from ddp_core import Workload


class Mine(Workload):
    defaults = dict(epochs=1, global_batch_size=8, lr=0.1)

    def data(self, config):
        inputs = torch.linspace(-1, 1, 96).view(32, 3)
        return (inputs, inputs.sum(1, keepdim=True)), None

    def model(self, config):
        return torch.nn.Linear(3, 1)

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().sum()
"""


def written(folder: Path, source: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(source)
    return file


def small(methods: str) -> str:
    """A file with one class that differs from small.Small in these methods. They begin in line 5."""
    lines = methods.strip("\n").splitlines()
    margin = len(lines[0]) - len(lines[0].lstrip())
    return SMALL + "".join(f"    {line[margin:]}\n" if line.strip() else "\n" for line in lines)


def line_of(source: str, text: str) -> int:
    (number,) = (number for number, line in enumerate(source.splitlines(), 1) if text in line)
    return number


def failed(folder: Path, source: str, flags: str = "", world_size: int = 2, code: int = 2, **others) -> Job:
    return train(folder / "run", f"--workload {written(folder, source)} {flags}", world_size, code=code, **others)


# ---- the file -----------------------------------------------------------------------------------------------------

FILES = {
    "empty": ("", "should have one class that derives from ddp_core.Workload, and has none"),
    "a class of another kind": ("class Mine:\n    pass\n", "and has none"),
    "an imported class only": ("from small import Small\n", "and has none"),
    "two classes": (WHOLE + WHOLE.replace("Mine", "Other"), r"and has 2 \(Mine, Other\)"),
    "a syntax error": (WHOLE.replace("return torch.nn", "return return torch.nn"), "line 14: invalid syntax"),
    "tabs and spaces": (WHOLE.replace("        return torch.nn", "\treturn torch.nn"), r"line 14: inconsistent use of tabs"),
    "a name that is not there": (WHOLE + "\nROWS = NUMBER\n", r"line 19 \(<module>\): NameError: name 'NUMBER' is not defined"),
    "a module that is not there": ("import not_there\n" + WHOLE, r"line 1 \(<module>\): ModuleNotFoundError: .*'not_there'"),
    "no loss": (WHOLE.partition("    def loss")[0], "class Mine lacks loss$"),
    "neither data nor model": (
        "from ddp_core import Workload\nclass Mine(Workload):\n    def loss(self, outputs, batch): ...\n",
        "class Mine lacks data, model$",
    ),
    "a constructor with arguments": (
        WHOLE + "    def __init__(self, width): ...\n",
        r"Mine\(\), which is called without arguments: TypeError: .*'width'",
    ),
    "an unknown flag among its defaults": (WHOLE.replace("lr=0.1", "learning_rate=0.1"), "its defaults name learning_rate"),
    "a default that is no number": (
        WHOLE.replace("epochs=1", 'epochs="two"'),
        r"its defaults have epochs='two', but 'two' is not a whole",
    ),
    "a method that nothing would call": (
        small("def metric(self, outputs, batch):\n    return {}"),
        r"has metric, which the core does not ask for: call it metrics, or _metric where it is your own",
    ),
    "defaults that nothing would take": (
        WHOLE.replace("defaults =", "default ="),
        r"has default, which the core does not ask for: call it defaults",
    ),
    "a method of the core's": (
        small("@property\ndef steps_done(self):\n    return 0"),
        r"class Mine has steps_done, a name of the core's: call yours otherwise",
    ),
    "an attribute of the core's": (
        small("def data(self, config):\n    self.file = 'rows.csv'\n    return super().data(config)"),
        r"line \d+ \(data\): AttributeError: self.file is a name of the core's: call yours otherwise, self.my_file",
    ),
    "an attribute in the place of a method": (
        small("def data(self, config):\n    self.loss = torch.nn.MSELoss()\n    return super().data(config)"),
        r"line \d+ \(data\): AttributeError: self.loss is a name of the core's",
    ),
    "a default out of its range": (
        WHOLE.replace("lr=0.1", "save_steps=-1"),
        r"its defaults have save_steps=-1, but '-1' is not a whole number from 0",
    ),
    "a default that is no choice": (
        WHOLE.replace("lr=0.1", 'optimizer="adam"'),
        r"its defaults have optimizer='adam', but should be sgd or adamw",
    ),
    "a default that is neither true nor false": (
        WHOLE.replace("lr=0.1", "deterministic=1"),
        r"its defaults have deterministic=1, but should be True or False",
    ),
    "another default device": (
        'import torch\ntorch.set_default_device("meta")\n' + WHOLE,
        "torch's default device is meta: take set_default_device out, pass --device",
    ),
    "a default device that is not there": (
        "import torch\ntorch.set_default_device('xpu')\n" + WHOLE,
        "torch's default device is (xpu|one that this machine lacks): take set_default_device out",
    ),
    "a flag that is always True": (
        small('def flags(self, add):\n    add("--big", type=bool, default=False)'),
        r'flags\(\) failed: ValueError: --big has type=bool, which makes True of "False": action="store_true"',
    ),
    "a program that leaves": ("import sys\nsys.exit(0)\n" + WHOLE, r"line 2 \(<module>\): SystemExit: 0"),
    "a flag of the core's": (small('def flags(self, add):\n    add("--lr")'), r"flags\(\) failed: .*--lr"),
    "a flag that argparse does not understand": (
        small('def flags(self, add):\n    add("--a", kind=int)'),
        r"flags\(\) failed: .*kind",
    ),
    "a flag that no snapshot remembers": (
        small("def flags(self, add):\n    add('--kinds', default={'a', 'b'})"),
        r"--kinds has a value of the type set, and a snapshot remembers texts, numbers",
    ),
    "a flag that holds one": (
        small("def flags(self, add):\n    add('--kinds', default=[[1, {2}]])"),
        r"--kinds has a value of the type set, and a snapshot remembers texts, numbers",
    ),
    "flags that fail": (
        small('def flags(self, add):\n    add("--a", default=1 / 0)'),
        r"flags\(\) failed: ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("source, said", FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_used_is_one_line_and_2(tmp_path, source, said):
    job = failed(tmp_path, source)
    assert re.search(said, job.error), job.error
    assert "mine" in job.error and not job.run_dir.exists()


@pytest.mark.parametrize("name", ["nowhere.py", "mine.txt", "folder", "digitz"])
def test_what_is_no_file_of_python_is_named_with_what_there_is(tmp_path, name):
    written(tmp_path, WHOLE, "mine.txt")
    (tmp_path / "folder").mkdir()
    job = train(tmp_path / "run", f"--workload {tmp_path / name}", 2, code=2)
    assert str(tmp_path / name) in job.error and "digits, regression, mnist, gpt" in job.error


def test_a_whole_file_trains_and_needs_neither_flags_nor_held_out_rows(tmp_path):
    job = failed(tmp_path, WHOLE, code=0)
    assert len(job.losses) == 4 and "eval_loss" not in job.records("epoch")[0]
    assert job.records("start")[0]["config"]["workload"] == "mine"


def test_defaults_are_of_any_flag_and_the_command_line_comes_first(tmp_path):
    """Also for a flag that has a default in the core."""
    source = WHOLE.replace("lr=0.1", 'lr=0.1, seed=3, log_every=1, reduction="canonical", deterministic=True')
    file = written(tmp_path, source)
    workload = find(str(file))
    config = parse(["--workload", str(file)], 1, workload=workload)
    assert (config.seed, config.log_every, config.reduction, config.deterministic) == (3, 1, "canonical", True)
    assert parse(["--seed", "0", "--reduction", "ddp"], 1, workload=workload).facts() | dict(deterministic=False) == (
        config.facts() | dict(seed=0, reduction="ddp", shards=0, accumulate=1, deterministic=False)
    )


@pytest.mark.parametrize("name", ["run_dir", "new_run_dir", "fresh", "workload", "help"])
def test_what_a_job_alone_can_say_is_no_default_of_a_class(tmp_path, name):
    file, flag = written(tmp_path, WHOLE.replace("lr=0.1", f"{name}=True")), f"--{name.replace('_', '-')}"
    with pytest.raises(WorkloadError, match=f"its defaults have {name}=True, but {flag} is for the command line alone"):
        parse([], 1, workload=find(str(file)))


def test_its_digest_is_also_that_of_the_files_beside_it_that_it_imports(tmp_path):
    """Imported directly, by each other, from a package, or only when a method is called; no other files."""
    (tmp_path / "nets").mkdir()
    beside = dict.fromkeys(("layers.py", "nets/__init__.py", "nets/blocks.py", "later.py"), "") | {"other.py": ""}
    beside |= {"layers.py": "from nets import blocks\n", "nets/blocks.py": "from . import norms\n", "nets/norms.py": ""}
    for name, text in beside.items():
        (tmp_path / name).write_text(text)
    late = "        import later\n        return torch.nn.Linear"
    file = written(tmp_path, "import layers\n" + WHOLE.replace("        return torch.nn.Linear", late))
    (tmp_path / "later.py").write_text("not = Python")
    first = find(str(file)).digest()
    changes = {name: _changed(tmp_path / name, file) != first for name in beside}
    assert changes == {name: name != "other.py" for name in beside}


def _changed(path: Path, file: Path) -> str:
    text = path.read_text()
    path.write_text(f"{text}\n# another\n")
    digest = find(str(file)).digest()
    path.write_text(text)
    return digest


def test_the_help_has_the_workload_s_defaults(tmp_path, capsys):
    file = written(tmp_path, WHOLE.replace("lr=0.1", "lr=0.1, seed=3, save_minutes=7.5"))
    with pytest.raises(SystemExit):
        parse(["--help"], 1, workload=find(str(file)))
    text = " ".join(capsys.readouterr().out.split())
    for shown in ("all ranks (default: 8)", "rate (default: 0.1)", "dropout (default: 3)", "every M minutes (default: 7.5)"):
        assert shown in text, shown


def test_a_base_class_in_the_same_file_is_no_second_workload(tmp_path):
    source = (
        WHOLE.replace("Mine(Workload)", "Base(Workload)")
        + "\n\nclass Mine(Base):\n    defaults = Base.defaults | dict(epochs=2)\n"
    )
    assert len(failed(tmp_path, source, code=0).losses) == 8


def test_files_beside_it_can_be_imported_and_a_name_of_the_standard_library_is_no_trouble(tmp_path):
    """statistics.py: a later import of the library's own statistics still gets that."""
    written(tmp_path, "ROWS = 32\n", "my_settings.py")
    source = WHOLE.replace("import torch\n", "import torch\nimport my_settings\n", 1).replace(
        "        inputs = torch.linspace(-1, 1, 96).view(32, 3)",
        "        import statistics\n\n"
        "        rows = int(statistics.median([my_settings.ROWS]))\n"
        "        inputs = torch.linspace(-1, 1, 96).view(rows, 3)",
    )
    job = train(tmp_path / "run", f"--workload {written(tmp_path, source, 'statistics.py')}", code=0)
    assert len(job.losses) == 4


# ---- data ---------------------------------------------------------------------------------------------------------

ROWS = """
    class Rows:
        def __len__(self):
            return 64

        def __getitem__(self, row):
            {}
            return torch.full((6,), float(row), dtype=torch.float64), torch.zeros(1)

    def data(self, config):
        return self.Rows(), None
"""

DATA = {
    "it fails": ("def data(self, config):\n    return open('/not/there')", r"line 6 \(data\): FileNotFoundError: .*/not/there"),
    "one thing": (
        "def data(self, config):\n    return table()[0]",
        r"data\(\) should return \(training rows, held-out rows\).*Tensor",
    ),
    "three things": (
        "def data(self, config):\n    return *table(), None",
        r"data\(\) should return \(training rows, held-out rows\)",
    ),
    "columns of unequal length": (
        "def data(self, config):\n    return (table()[0], table(100)[1]), None",
        r"the data of --workload mine: ValueError: columns of unequal length \(0: 128, 1: 100\)",
    ),
    "a stream": (
        "def data(self, config):\n    return (row for row in table()), None",
        "rows need a length and an index, and generator has not both",
    ),
    "it leaves": ("def data(self, config):\n    raise SystemExit", r"line 6 \(data\): SystemExit"),
    "it makes a process group": (
        "def data(self, config):\n    dist = torch.distributed\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n    return super().data(config)",
        "has called init_process_group: take it out, for train.py does",
    ),
    "a number": ("def data(self, config):\n    return 7, None", "rows need a length and an index, and int has not both"),
    "no held-out row": (
        "def data(self, config):\n    return table(), table(0)",
        "gave no held-out row: give None where nothing is to be evaluated",
    ),
    "no training rows": (
        "def data(self, config):\n    return None, table()",
        "--global-batch-size 16 is more than the 0 training rows of mine",
    ),
    "an empty folder": (
        "def data(self, config):\n    return (torch.empty(0, 4),), None",
        "--global-batch-size 16 is more than the 0 training rows of mine",
    ),
    "four entries": ("def data(self, config):\n    return 1, 2, 3, 4", r"held-out rows\), and returned tuple: 4 x int"),
    "too few rows": (
        "def data(self, config):\n    return table(15), None",
        "--global-batch-size 16 is more than the 15 training rows",
    ),
}


@pytest.mark.parametrize("methods, said", DATA.values(), ids=DATA)
def test_data_that_cannot_be_used_are_one_line_and_2(tmp_path, methods, said):
    job = failed(tmp_path, small(methods))
    assert re.search(said, job.error), job.error


def test_data_may_be_read_by_a_pool_of_processes(tmp_path):
    """The pool ends its processes by SIGTERM, which is not a request to stop the run."""
    methods = """
    def data(self, config):
        import multiprocessing, signal
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(-8, 0)) == [*range(8, 0, -1)]
            told = pool.map(signal.getsignal, [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
        assert told == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
        return super().data(config)
    """
    failed(tmp_path, small(methods), "--epochs 1", code=0)


def test_data_that_stop_with_a_preflight_error_of_their_own_are_3(tmp_path):
    """The built-ins do so for a missing folder: the program is right, and the place is wrong."""
    methods = """
    def data(self, config):
        from ddp_core.errors import PreflightError
        raise PreflightError("/scratch is not mounted")
    """
    assert "/scratch is not mounted" in failed(tmp_path, small(methods), code=3).error


@pytest.mark.parametrize("which", ["training_rows", "held_out_rows"])
def test_data_whose_length_differs_between_ranks_are_named(tmp_path, which):
    """One node reads a file while another still writes it. Exit code 4: the ranks disagree."""
    count = "128 - int(os.environ.get('FEWER', 0))"
    train_rows, held_out = (count, "37") if which == "training_rows" else ("128", count)
    methods = f"def data(self, config):\n    import os\n    return table({train_rows}), table({held_out})"
    job = failed(tmp_path, small(methods), faults={1: environment(FEWER="1")}, code=4)
    assert f"{which}=127 on rank 1, but 128 on rank 0" in job.error


def test_data_that_differ_between_ranks_are_named(tmp_path):
    methods = "def data(self, config):\n    import os\n    return table(first=int(os.environ.get('FIRST', 0))), None"
    job = failed(tmp_path, small(methods), faults={1: environment(FIRST="1")}, code=4)
    assert re.search(r"data=\w+ on rank 1, but \w+ on rank 0: data\(\) should give all ranks the same rows", job.error)


@pytest.mark.fault(12)
def test_a_file_that_differs_between_ranks_is_named(tmp_path):
    """One node has a stale copy."""
    mine, other = written(tmp_path, WHOLE), tmp_path / "other"
    other.mkdir()
    stale = written(other, WHOLE.replace("lr=0.1", "lr=0.2").replace("lr=0.2)", "lr=0.1)  # stale"))
    flags = {0: f"--workload {mine}", 1: f"--workload {stale}"}
    job = train(tmp_path / "run", "", 2, flags_of=flags, code=4)
    assert re.search(r"workload_file=\w+ on rank 1, but \w+ on rank 0", job.error)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "act, said",
    [
        ("if row == 37: raise OSError('tape 37')", r"row 37 of .*\(__getitem__\): OSError: .*tape 37"),
        (
            "if row == 37: return torch.zeros(5), torch.zeros(1)",
            r"row 37 of --workload mine: TypeError: row 37 is \(\[5\], \[1\]\), and row \d+ is \(\[6\], \[1\]\): rows of other",
        ),
        ("if row == 37: return None", "row 37 of --workload mine: TypeError: __getitem__ returned None for row 37"),
    ],
    ids=["cannot be read", "cannot be collated", "is none"],
)
def test_a_row_that_cannot_be_read_or_collated_is_named_with_its_batch(tmp_path, workers, act, said):
    """Row 37 is not among the rows tried at the start. One of two ranks has it, and the other must not hang."""
    flags = f"--workers {workers} --epochs 1 --global-batch-size 4"
    job = failed(tmp_path, small(ROWS.format(act)), flags, world_size=1)
    assert re.search(said, job.error), job.error
    job = train(tmp_path / "two", f"--workload {tmp_path / 'mine.py'} {flags}", 2)
    blamed(job, 2, said)


def blamed(job: Job, code: int, said: str) -> None:
    """One of two ranks must end with this code and this message. The other may print one line that points to it."""
    assert all(len(text.splitlines()) <= 1 for text in job.err), job.err
    ((rank, line),) = ((rank, text) for rank, text in enumerate(job.err) if re.search(said, text))
    assert job.codes[rank] == code and line.startswith(f"error [rank {rank}, "), (job.codes, job.err)
    other = 1 - rank
    points = f"rank {rank} died or hangs" if code == 7 else f"rank {rank} failed"
    assert job.codes[other] == code and (not job.err[other] or points in job.err[other]), (job.codes, job.err)


@pytest.mark.parametrize("source", ["", "import not_there"])
def test_a_file_that_one_node_alone_lacks_or_cannot_load_is_told_by_rank_0(tmp_path, source):
    there = tmp_path / "other.py"
    if source:
        there.write_text(source)
    job = train(tmp_path / "run", f"--workload {written(tmp_path, WHOLE)}", 2, flags_of={1: f"--workload {there}"}, code=2)
    said = "line 1 .*not_there" if source else f"is no file of Python on {os.uname().nodename}"
    assert re.search(f"rank 1: --workload {there}.*{said}", job.error), job.error


def test_rows_that_cannot_be_collated_at_all_are_found_before_the_training(tmp_path):
    methods = ROWS.replace("torch.full((6,), float(row), dtype=torch.float64)", "torch.zeros(row + 1)").format("")
    job = failed(tmp_path, small(methods))
    assert "row 1 is ([2], [1]), and row 0 is ([1], [1])" in job.error and not job.records("step")


# ---- workers ------------------------------------------------------------------------------------------------------

IN_WORKER = "if row == 37 and torch.utils.data.get_worker_info(): "


def test_a_worker_that_dies_is_named_and_nobody_hangs(tmp_path):
    methods = ROWS.format(IN_WORKER + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    job = failed(tmp_path, small(methods), "--workers 2 --epochs 1", world_size=1, code=7)
    assert "a worker that reads rows died" in job.error and "DataLoader worker (pid" in job.error
    job = train(tmp_path / "two", f"--workload {tmp_path / 'mine.py'} --workers 2 --epochs 1", 2)
    blamed(job, 7, "a worker that reads rows died")


def test_a_worker_dies_while_its_rank_computes(tmp_path):
    """The error is raised where the rank waits for its next rows. While it computes, it may hold any lock."""
    there = tmp_path / "undisturbed"
    kill = "import multiprocessing, os, time; os.kill(multiprocessing.active_children()[0].pid, 9); time.sleep(0.5)"
    schedule = (
        f"def schedule(self, step, total, config):\n    if step == 2:\n        {kill}; open({str(there)!r}, 'w')\n    return 1"
    )
    methods = ROWS.format("") + "\n".join(f"    {line}" for line in schedule.splitlines())
    job = failed(tmp_path, small(methods), "--workers 2 --epochs 4", world_size=1, code=7)
    assert "a worker that reads rows died" in job.error and there.exists()


def test_a_worker_that_dies_with_a_lock_holds_nobody_up(tmp_path):
    """The lock of the event by which DataLoader ends its workers."""
    die = (
        "import os, sys\n"
        "frame = sys._getframe()\n"
        "while 'done_event' not in frame.f_locals: frame = frame.f_back\n"
        "frame.f_locals['done_event']._cond.acquire()\n"
        "os.kill(os.getpid(), 9)"
    )
    job = failed(tmp_path, small(ROWS.format(f"{IN_WORKER}exec({die!r})")), "--workers 2 --epochs 1", world_size=1, code=7)
    assert "a worker that reads rows died" in job.error


def test_the_workers_of_held_out_rows_are_those_of_all_evaluations(tmp_path):
    """They are forked before the training, because a fork beside its threads may inherit a lock that is never released."""
    counts = []
    for epochs in (1, 3):
        pids = tmp_path / f"pids-{epochs}"
        rows = ROWS.replace("Rows(), None", "Rows(), self.Rows()")
        source = written(tmp_path, small(rows.format(f"import os; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')")))
        train(tmp_path / f"run-{epochs}", f"--workload {source} --workers 1 --epochs {epochs}", 1, code=0)
        counts.append(len({*pids.read_text().split()}))
    assert counts[0] == counts[1]


def no_more_processes() -> None:
    """The third and later forks fail: by then the rows for the trial have been read."""
    fork, calls = os.fork, []

    def few():
        calls.append(None)
        if len(calls) > 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = few


def test_workers_die_with_their_rank(tmp_path):
    """Also workers that hang in a row of their second batch: DataLoader itself checks only between batches."""
    note = f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')"
    act = f"import os, time; self.read = getattr(self, 'read', 0) + 1; {note}; self.read > 32 and time.sleep(3600)"
    source = written(tmp_path, small(ROWS.format(f"if torch.utils.data.get_worker_info(): {act}")))
    flags = f"--workload {source} --workers 2 --timeout 5"
    job = train(tmp_path / "run", flags, 1, faults={0: at_step(1, signalled(signal.SIGKILL))})
    assert job.codes == [-signal.SIGKILL]
    workers = {int(line) for line in (tmp_path / "pids").read_text().split()}
    assert len(workers) == 2 + 2  # two read the rows of the trial
    end = time.monotonic() + 20
    while time.monotonic() < end and any(map(run_lock._began, workers)):
        time.sleep(0.05)
    alive = [worker for worker in workers if run_lock._began(worker)]
    for worker in alive:
        os.kill(worker, signal.SIGKILL)
    assert not alive


def test_of_four_ranks_the_one_whose_worker_died_is_named_and_no_other(tmp_path):
    """Workers inherit a rank's connections. While they live, other ranks do not see that it has closed them."""
    methods = ROWS.format(IN_WORKER + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    job = failed(tmp_path, small(methods), "--workers 1 --epochs 1", world_size=4, code=7)
    (rank,) = (rank for rank, text in enumerate(job.err) if "a worker that reads rows died" in text)
    others = [text for place, text in enumerate(job.err) if text and place != rank]
    assert len(others) <= 1 and all(f"rank {rank} died or hangs" in text for text in others), job.err


def test_a_worker_that_hangs_is_named_after_the_timeout(tmp_path):
    methods = ROWS.format(IN_WORKER + "import time; time.sleep(3600)")
    job = failed(tmp_path, small(methods), "--workers 1 --epochs 1 --timeout 2", world_size=1, code=7)
    assert "a worker that reads rows died or hangs" in job.error and "timed out after 2" in job.error


# ---- model, loss, metrics, optimizer, schedule --------------------------------------------------------------------

WITH = "def model(self, config):\n    net = super().model(config)\n    {}\n    return net"
PARTS = {
    "model: it fails": (
        "def model(self, config):\n    return nn.Linear(6, self.width)",
        r"line 6 \(model\): AttributeError: .*width",
    ),
    "schedule: other arguments": (
        "def schedule(self, step):\n    return 1.0",
        r"schedule\(\), line 5, of --workload mine: TypeError: Mine\.schedule\(\) takes 2 positional arguments but 4 were",
    ),
    "model: none": (
        "def model(self, config):\n    nn.Linear(6, 1)",
        r"model\(\) returned NoneType, and should return a torch\.nn\.Module",
    ),
    "model: in DDP already": (
        "def model(self, config):\n    return nn.parallel.DistributedDataParallel(super().model(config))",
        r"model\(\) returned a DistributedDataParallel, and should return the module without it",
    ),
    "model: a part of it compiled": (
        WITH.format("net[0] = torch.compile(net[0])"),
        r"model\(\) returned what torch.compile\(\) has wrapped, .*: pass --compile",
    ),
    "model: a part of it in DataParallel": (
        WITH.format("net[0] = nn.DataParallel(net[0])"),
        r"model\(\) returned a DataParallel, and should return the module without it",
    ),
    "model: an unused layer": (
        WITH.format("net[0].extra = nn.Linear(2, 2)"),
        r"no gradient for 0\.extra\.weight, 0\.extra\.bias: use them in the loss, freeze them .* unused_parameters = True",
    ),
    "model: no parameters": (
        "def model(self, config):\n    return nn.AvgPool1d(6)",
        "the loss has no gradient for any parameter",
    ),
    "model: all frozen": (
        "def model(self, config):\n    return super().model(config).requires_grad_(False)",
        "the loss has no gradient for any parameter",
    ),
    "model: a complex parameter": (
        WITH.format("net.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))"),
        r"model\.phase is torch\.complex64, which a snapshot cannot hold",
    ),
    "model: a complex buffer": (
        WITH.format("net.register_buffer('phase', torch.ones(2, dtype=torch.complex128))"),
        r"model\.phase is torch\.complex128, which a snapshot cannot hold: .*persistent=False",
    ),
    "model: a buffer of a kind that files do not know": (
        WITH.format("net.register_buffer('many', torch.ones(2, dtype=torch.uint16))"),
        r"model\.many is torch\.uint16, which a snapshot cannot hold",
    ),
    "model: a lazy layer": (
        WITH.format("net[0] = nn.Sequential(net[0], nn.LazyLinear(1))"),
        r"has no shape yet \(a lazy module\): call the model on a row in model\(\)",
    ),
    "forward: it fails": (
        "def forward(self, model, batch):\n    return model(batch[0][:, :5])",
        r"line 6 \(forward\): RuntimeError: .*shapes",
    ),
    "loss: one value a row": (
        "def loss(self, outputs, batch):\n    return (outputs - batch[1]) ** 2",
        r"loss\(\) returned a tensor of shape \(2, 1\), and should return a scalar",
    ),
    "loss: a number": (
        "def loss(self, outputs, batch):\n    return super().loss(outputs, batch).item()",
        r"loss\(\) returned [\d.]+, and should return a scalar",
    ),
    "loss: nothing": (
        "def loss(self, outputs, batch):\n    super().loss(outputs, batch)",
        r"loss\(\) returned None, and should return a scalar",
    ),
    "loss: one of two is a vector": (
        "def loss(self, outputs, batch):\n    return dict(all=super().loss(outputs, batch), each=outputs[:, 0])",
        r"loss\(\) 'each' returned a tensor of shape \(2,\)",
    ),
    "loss: a mean": (
        "def loss(self, outputs, batch):\n    return F.mse_loss(outputs, batch[1])",
        r"loss\(\) returns a mean over rows .* and should return their sum",
    ),
    "loss: a mean, of what collate draws": (
        "def collate(self, rows):\n    inputs, targets = super().collate(rows)\n"
        "    return inputs * (torch.rand(inputs.shape) < 0.7), targets\n"
        "def data(self, config):\n    return [[*zip(*columns)] for columns in super().data(config)]\n"
        "def loss(self, outputs, batch):\n    return F.mse_loss(outputs, batch[1])",
        r"loss\(\) returns a mean over rows",
    ),
    "data: of another model": (
        "def data(self, config):\n    (x, y), held_out = super().data(config)\n"
        "    return (nn.Linear(6, 6).to(x)(x), y), held_out",
        "rows require a gradient",
    ),
    "loss: means in a dictionary": (
        "def loss(self, outputs, batch):\n    return dict(one=F.mse_loss(outputs, batch[1]), two=F.l1_loss(outputs, batch[1]))",
        r"loss\(\) returns a mean over rows",
    ),
    "loss: an empty dictionary": (
        "def loss(self, outputs, batch):\n    return {}",
        r"loss\(\) returned \{\}, and should return a scalar",
    ),
    "loss: it leaves": ("def loss(self, outputs, batch):\n    raise SystemExit(1)", r"line 6 \(loss\): SystemExit: 1"),
    "loss: cut off": (
        "def loss(self, outputs, batch):\n    return super().loss(outputs.detach(), batch)",
        r"no gradient for any parameter: is it cut off \(detach\)",
    ),
    "loss: it fails": (
        "def loss(self, outputs, batch):\n    return F.cross_entropy(outputs, batch[2])",
        r"line 6 \(loss\): IndexError",
    ),
    "metrics: a number": (
        "def metrics(self, outputs, batch):\n    return 0.5",
        r"metrics\(\) should return a dictionary, and returned float",
    ),
    "metrics: a value a row": (
        "def metrics(self, outputs, batch):\n    return dict(right=outputs > 0)",
        r"metrics\(\) has a tensor of shape \(2, 1\) as 'right', and should have a number",
    ),
    "metrics: three of them": (
        "def metrics(self, outputs, batch):\n    return dict(right=(1, 2, 3))",
        r"metrics\(\) has \(1, 2, 3\) as 'right', .* or a pair of numbers",
    ),
    "metrics: the name of the loss": (
        "def metrics(self, outputs, batch):\n    return dict(loss=1.0)",
        r"metrics\(\) has loss, the name of a loss: give it another",
    ),
    "metrics: the name of one of two losses": (
        "def metrics(self, outputs, batch):\n    return dict(loss_one=1.0, two=2.0)\n\n"
        "def loss(self, outputs, batch):\n    return dict(one=super().loss(outputs, batch), two=outputs.square().sum())",
        r"metrics\(\) has loss_one, the name of a loss: give it another",
    ),
    "metrics: a mean": (
        "def metrics(self, outputs, batch):\n    return dict(error=F.l1_loss(outputs, batch[1]))",
        r"metrics\(\) has a mean over rows as 'error' .* and should have their sum",
    ),
    "metrics: they fail": (
        "def metrics(self, outputs, batch):\n    return {'x': batch['x']}",
        r"line 6 \(metrics\): TypeError",
    ),
    "optimizer: it fails": (
        "def optimizer(self, model, config):\n    return torch.optim.SGD(model.weights)",
        r"line 6 \(optimizer\): AttributeError",
    ),
    "optimizer: none": (
        "def optimizer(self, model, config):\n    torch.optim.SGD(model.parameters())",
        r"optimizer\(\) returned NoneType",
    ),
    "optimizer: one that needs a closure": (
        "def optimizer(self, model, config):\n    return torch.optim.LBFGS(model.parameters())",
        r"optimizer\(\) returned LBFGS, and should return an optimizer of torch.optim that needs no closure",
    ),
    "optimizer: with a scheduler of torch's": (
        "def optimizer(self, model, config):\n    made = super().optimizer(model, config)\n"
        "    torch.optim.lr_scheduler.StepLR(made, 5)\n    return made",
        r"which nobody steps and no snapshot holds: return its factor at a step from schedule\(\)",
    ),
    "optimizer: of a parameter that is not the model's": (
        "def optimizer(self, model, config):\n    self.own = nn.Parameter(torch.ones(2))\n"
        "    return torch.optim.SGD([*model.parameters(), self.own], lr=0.1)",
        r"optimizer\(\) has 1 parameters that are not the model's, and no gradient of theirs is summed",
    ),
    "model: a parameter beside it": (
        "def model(self, config):\n    self.factor = nn.Parameter(torch.ones(()))\n    return super().model(config)\n"
        "def loss(self, outputs, batch):\n    return super().loss(outputs * self.factor, batch)",
        r"self\.factor of the workload is neither trained nor saved",
    ),
    "loss: a part that a batch has not": (
        "def loss(self, outputs, batch):\n    self.calls = getattr(self, 'calls', 0) + 1\n"
        "    return {'a': super().loss(outputs, batch)} | ({'b': outputs.sum() * 0} if self.calls < 9 else {})",
        r"loss\(\) gave \['a'\], and \['a', 'b'\] before",
    ),
    "metrics: other names for one row": (
        "def metrics(self, outputs, batch):\n    return {f'of_{len(outputs)}': 0.0}",
        r"metrics\(\) gave \['of_8'\], and \['of_2'\] before",
    ),
    "model: state of its own": (
        "def model(self, config):\n    class Kept(nn.Linear):\n        def get_extra_state(self):\n            return 7\n"
        "        def set_extra_state(self, state):\n            pass\n    return nn.Sequential(Rounded(), Kept(6, 1))",
        r"Kept has get_extra_state\(\), and a snapshot holds parameters and buffers",
    ),
    "model: a buffer that is a view": (
        "def model(self, config):\n    net = super().model(config)\n"
        "    net.register_buffer('mask', torch.zeros(3).expand(5, 3))\n    return net",
        r"mask is an expanded view, whose rows are one: .* \.clone\(\) it",
    ),
    "model: a sparse gradient": (
        "def model(self, config):\n    return nn.Sequential(Rounded(), nn.EmbeddingBag(9, 1, sparse=True))",
        r"the gradient of 1\.weight is sparse, .* sparse=False",
    ),
    "model: another default device": (
        "def model(self, config):\n    made = super().model(config)\n    torch.set_default_device('meta')\n    return made",
        r"default device is meta: take set_default_device out, pass --device",
    ),
    "model: another default dtype": (
        "def model(self, config):\n    torch.set_default_dtype(torch.float64)\n    return super().model(config)",
        r"default dtype is torch\.float64: take set_default_dtype out, pass --precision fp64",
    ),
    "metrics: a name of two words": (
        "def metrics(self, outputs, batch):\n    return {'top 5': 0.0}",
        r"metrics\(\) names 'top 5', and should take letters, digits",
    ),
    "loss: a name that would end a line": (
        "def loss(self, outputs, batch):\n    return {'a\\nb': super().loss(outputs, batch)}",
        r"loss\(\) names 'a\\nb', and should take letters, digits",
    ),
    "schedule: nothing": (
        "def schedule(self, step, total_steps, config):\n    step / total_steps",
        r"schedule\(\) returned None at step 0 of 24, and should return a number",
    ),
    "schedule: not a number": (
        "def schedule(self, step, total_steps, config):\n    return float('nan')",
        r"schedule\(\) returned nan at step 0 of 24, and should return a number",
    ),
    "schedule: it fails": (
        "def schedule(self, step, total_steps, config):\n    return 1 / step",
        r"line 6 \(schedule\): ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("flags, where", [("", "loss"), ("--workers 1", "__getitem__")])
def test_words_of_the_file_s_own_error_are_not_taken_for_a_lost_rank(tmp_path, world_size, flags, where):
    """The job is not requeued for it."""
    act = 'raise RuntimeError("the peer of the tokenizer timed out")'
    loss = (
        f"def loss(self, outputs, batch):\n    if self.steps_done == 3:\n        {act}\n    return super().loss(outputs, batch)"
    )
    read = ROWS.format(f"self.read = getattr(self, 'read', 0) + 1; exec({'if self.read > 30: ' + act!r})")
    job = failed(tmp_path, small(loss if where == "loss" else read), f"{flags} --epochs 2", world_size=world_size, code=2)
    assert re.search(rf"line \d+ \({where}\).*: RuntimeError: the peer of the tokenizer timed out", job.err[0]), job.err


def test_a_rank_whose_file_has_one_flag_more_is_named(tmp_path):
    """One node has a stale copy."""
    for name, more in (("new", "    def flags(self, add):\n        add('--width', type=int, default=4)\n"), ("old", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"from small import *\n\nclass Mine(Small):\n    lr = 1\n{more}")
    for names in (("new", "old"), ("old", "new")):
        flags = {rank: f"--workload {tmp_path / name / 'mine.py'}" for rank, name in enumerate(names)}
        job = train(tmp_path / "run", "", 2, flags_of=flags, code=4)
        assert re.search(r"workload_file=\w+ on rank 1, but \w+ on rank 0", job.error), job.error


def test_workers_that_cannot_be_started_are_one_line_and_3(tmp_path):
    source = written(tmp_path, small(ROWS.format("0")))
    job = train(tmp_path / "run", f"--workload {source} --workers 2", 1, faults={0: no_more_processes}, code=3)
    assert "--workers 2: no process could be started to read rows (Resource temporarily unavailable): lower" in job.error


OPEN = """
import mmap, os
from small import *


class Rows:
    def __init__(self, path, given):
        self.path, self.process, self.file = path, os.getpid(), open(path, "rb")
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.files = [open(path, "rb") for _ in range(64)]
        if given:
            self.fingerprint = "given"

    def __len__(self):
        return 64

    def __getitem__(self, row):
        if {0!r} == "again" and self.process != os.getpid():
            self.file.close()
            self.process, self.file = os.getpid(), open(self.path, "rb")
        read = dict(file=self.at, again=self.at, each=lambda row: self.at(row, self.files[row]), map=self.mapped)
        content = torch.frombuffer(bytearray(read[{0!r}](row)), dtype=torch.uint8)[:6]
        return content.double(), torch.zeros(1)

    def at(self, row, file=None):
        file = file or self.file
        file.seek(768 * row)
        return file.read(768)

    def mapped(self, row):
        return self.map[768 * row :][:768]


class Mine(Small):
    def data(self, config):
        with open({1!r}, "wb") as out:
            out.write(b"".join(bytes([row]) * 768 for row in range(64)))
        return Rows({1!r}, {2}), None
"""


@pytest.mark.parametrize("given", [False, True], ids=["", "with a fingerprint"])
@pytest.mark.parametrize("how, workers, code", [("file", 1, 2), ("file", 0, 0), ("again", 1, 0), ("each", 1, 0), ("map", 1, 0)])
def test_a_file_that_is_open_before_the_workers_read_it_is_refused(tmp_path, how, workers, code, given):
    """A file may be mapped, opened again, or opened for each row."""
    source = OPEN.format(how, str(tmp_path / "rows.bin"), given)
    job = failed(tmp_path, source, f"--workers {workers} --epochs 1", 1, code)
    assert code == 0 or "rows.bin was open before the workers (--workers), which would read at each" in job.error, job.error


@pytest.mark.parametrize("methods, said", PARTS.values(), ids=PARTS)
def test_a_part_that_cannot_be_used_is_one_line_and_2(tmp_path, methods, said):
    job = failed(tmp_path, small(methods))
    assert re.search(said, job.error), job.error
    assert not job.snapshot.exists() and not job.records("step")


def test_an_optimizer_that_keeps_what_no_snapshot_holds_is_told(tmp_path):
    methods = """
    def optimizer(self, model, config):
        class Kept(torch.optim.SGD):
            def step(self):
                super().step()
                for group in self.param_groups:
                    for parameter in group["params"]:
                        self.state[parameter]["history"] = ["a list"]
        return Kept(model.parameters(), lr=0.1)
    """
    job = failed(tmp_path, small(methods))
    assert "mine: the optimizer Kept keeps history, and a snapshot holds tensors and numbers" in job.error, job.error
    assert not job.snapshot.exists() and not job.records("step"), "after its first step"


@pytest.mark.parametrize("flags", ["", "--global-batch-size 1 --epochs 1"])
def test_a_loss_that_weighs_rows_unequally_is_no_mean(tmp_path, flags):
    """The rows' losses differ widely, so the mean of two is not half of their sum by chance."""
    methods = "def loss(self, outputs, batch):\n    return (batch[0][:, 0].abs() ** 3 * (outputs - batch[1])[:, 0] ** 2).sum()"
    failed(tmp_path, small(methods), flags, world_size=1, code=0)


MEAN = "def metrics(self, outputs, batch):\n    return dict(error={})\n\n"


@pytest.mark.parametrize("metric", ["F.l1_loss(outputs, batch[1], reduction='sum')", "(F.l1_loss(outputs, batch[1]), 1)", "0"])
def test_metrics_that_are_sums_or_have_their_count_are_no_means(tmp_path, metric):
    failed(tmp_path, small(MEAN.format(metric)), "--epochs 1", code=0)


@pytest.mark.parametrize(
    "metric, said",
    [
        ("(F.l1_loss(outputs, batch[1]), 1)", ["metric 'error (count)' of 8 rows together is 1, and 8 is the sum of theirs"]),
        ("(F.l1_loss(outputs, batch[1], reduction='sum'), outputs.numel())", []),
    ],
)
def test_a_count_of_batches_is_noted(tmp_path, metric, said):
    """A batch's mean with a count of 1 would be recorded as a mean of means."""
    job = failed(tmp_path, small(MEAN.format(metric)), "--epochs 1", code=0)
    assert [note.split(":")[0] for note in job.records("start")[0]["notes"]] == said


def test_a_metric_that_is_nan_of_one_row_is_noted(tmp_path):
    job = failed(tmp_path, small(MEAN.format("len(outputs) * outputs.std()")), "--epochs 1", code=0)
    (note,) = job.records("start")[0]["notes"]
    assert re.match(r"metric 'error' of 8 rows together is [\d.]+, and nan is the sum of theirs", note)


def test_the_config_may_be_kept_where_it_is(tmp_path):
    """Also when only the model is made, to use its trained weights."""
    methods = "def model(self, config):\n    self.config = config\n    return super().model(config)"
    failed(tmp_path, small(methods), "--epochs 1", code=0)
    assert find(str(tmp_path / "mine.py")).model(object())


def test_the_record_names_the_optimizer_that_trains(tmp_path):
    methods = "def optimizer(self, model, config):\n    return torch.optim.Adam(model.parameters(), lr=config.lr)"
    start = failed(tmp_path, small(methods), "--epochs 1", code=0).records("start")[0]
    assert (start["optimizer"], start["config"]["optimizer"]) == ("Adam", "sgd")


def test_metrics_that_have_other_names_in_the_training_are_named(tmp_path):
    methods = "def metrics(self, outputs, batch):\n    return {'late' if self.steps_done else 'early': len(outputs)}"
    assert "metrics() gave" in failed(tmp_path, small(methods), "--epochs 1").error


def test_metrics_are_no_means_where_rows_depend_on_each_other(tmp_path):
    """Two rows in a batch may influence each other's result, as in contrastive losses."""
    failed(tmp_path, small(MEAN.format("1") + CONTRAST), "--epochs 1", code=0)


CONTRAST = "def loss(self, outputs, batch):\n    return super().loss(outputs, batch) + (1 + outputs).sum().square()"


@pytest.mark.parametrize(
    "flags, kind, notes",
    [
        (
            "--precision fp32",
            "float64",
            ["the model has numbers in float64, which --precision fp32 converts: pass --precision fp64"],
        ),
        ("--precision fp64", "bfloat16", ["the model has numbers in bfloat16, which --precision fp64 converts"]),
        ("--precision fp64", "float64", []),
        ("--precision fp64", "float32", []),
        ("--precision bf16", "float32", []),
    ],
)
def test_numbers_of_the_model_that_are_converted_are_noted(tmp_path, flags, kind, notes):
    methods = f"def model(self, config):\n    return super().model(config).to(torch.{kind})"
    job = failed(tmp_path, small(methods), f"--epochs 1 {flags}", world_size=1, code=0)
    assert job.records("start")[0]["notes"] == notes


@pytest.mark.parametrize("methods, noted", [(CONTRAST, 1), ("width = 1", 0)], ids=["rows that see each other", "a sum"])
def test_a_loss_whose_rows_depend_on_each_other_is_noted(tmp_path, methods, noted):
    job = failed(tmp_path, small(methods), "--epochs 1", code=0)
    assert sum("is not the sum of theirs alone" in note for note in job.records("start")[0]["notes"]) == noted


@pytest.mark.parametrize("reduction", ["ddp", "flat", "canonical"])
def test_a_parameter_that_later_has_no_gradient_is_told_where_ddp_cannot_go_on(tmp_path, reduction):
    """The probe sees both layers in use. From step 3 on one is unused, and DDP waits for its gradient."""
    methods = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.first, self.calls = nn.Linear(6, 1), nn.Linear(6, 1), 0

        def forward(self, inputs):
            self.calls += self.training and torch.is_grad_enabled()
            return self.always(inputs) + (self.first(inputs) if self.calls < 5 else 0)

    def model(self, config):
        return self.Net()
    """
    code = 2 if reduction == "ddp" else 0
    job = failed(
        tmp_path,
        small(methods),
        f"--reduction {reduction} --shards 2" if reduction == "canonical" else f"--reduction {reduction}",
        code=code,
    )
    if code:
        assert "had no gradient" in job.error and "unused_parameters = True" in job.error


@pytest.mark.parametrize("when, code", [("True", 2), ("not self.training", 2), ("self.training and len(self.places) < 3", 0)])
def test_a_saved_buffer_that_grows_is_named(tmp_path, when, code):
    """Its size after the trial of a few rows is its size at each start."""
    source = f"""
from small import *

class Net(nn.Sequential):
    def forward(self, inputs):
        if {when}:
            self.register_buffer("places", torch.zeros(max(len(self.places), {"3" if code == 0 else "len(inputs)"})))
        return super().forward(inputs)

class Mine(Small):
    def model(self, config):
        net = Net(*super().model(config))
        net.register_buffer("places", torch.zeros(1))
        return net
"""
    job = failed(tmp_path, source, "--epochs 1 --global-batch-size 32", 1, code)
    if code == 0:
        failed(tmp_path, source, "--epochs 2 --global-batch-size 32", 1, 0)
    else:
        words = r"the model's buffer places has the shape \((32|40),\) by step \d, and had \(16,\) when the run began"
        assert re.search(words, job.error), job.error


@pytest.mark.parametrize("trained", ["self.steps_done < 5", "self.steps_done >= 5"], ids=["frozen", "thawed"])
def test_a_parameter_that_is_frozen_or_thawed_in_the_training_is_named(tmp_path, trained):
    methods = f"""
    def forward(self, model, batch):
        model[0].bias.requires_grad_({trained})
        return model(batch[0])

    def model(self, config):
        net = super().model(config)
        net[0].bias.requires_grad_({trained})
        return net
    """
    job = failed(tmp_path, small(methods), world_size=1)
    assert "requires_grad of 0.bias has changed by step" in job.error


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_in_the_middle_of_the_training_is_told_with_its_line(tmp_path, rank):
    methods = """
    def loss(self, outputs, batch):
        import os
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 12 and os.environ.get("FAILS"):
            raise ValueError("a row without a target")
        return super().loss(outputs, batch)
    """
    source = small(methods)
    job = failed(tmp_path, source, faults={rank: environment(FAILS="1")}, code=None)
    blamed(job, 2, re.escape(f"line {line_of(source, 'raise ValueError')} (loss): ValueError: a row without a target"))
    assert {*job.codes} == {2}, "the launcher takes the highest, and 7 would be started again"
    assert job.records("end")[-1]["exit_code"] == 2


def test_a_bug_of_a_workload_is_shown_whole_with_debug(tmp_path):
    job = failed(tmp_path, small("def data(self, config):\n    return 1 / 0"), "--debug", world_size=1)
    assert job.err[0].startswith("error: ") and "Traceback" in job.err[0] and "return 1 / 0" in job.err[0]


# ---- the workload's own collective calls ----------------------------------------------------------------------------

CALLS = """
    def loss(self, outputs, batch):
        import os
        from torch import distributed as dist
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == {number}:
            odd = "ODD" in os.environ
            {act}
        return super().loss(outputs, batch)
"""
SIZES = "dist.all_reduce(torch.ones(1003 if odd else 3))"
ORDER = "for sums in (odd, not odd): dist.all_reduce(torch.ones(3)) if sums else dist.broadcast(torch.ones(3), 0)"


@pytest.mark.fault(22)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("number", [2, 40])  # in the trial on some rows, and in the training
@pytest.mark.parametrize("act", [SIZES, ORDER, "odd and dist.all_reduce(torch.ones(3))"], ids=["sizes", "order", "one alone"])
def test_ranks_that_send_each_other_other_things_end_with_7_and_hear_why(tmp_path, world_size, number, act):
    source = small(CALLS.format(number=number, act=act))
    job = failed(tmp_path, source, "--timeout 3", world_size, code=7, faults={1: environment(ODD="1")})
    lines = "".join(job.err).splitlines()
    assert lines and all(line.startswith("error [rank ") for line in lines) and len(lines) <= world_size, job.err
    assert any("where a workload's file calls torch.distributed, every rank must do so alike" in line for line in lines), lines
    assert all(("before the first step" if number == 2 else "at step ") in line for line in lines), lines


@pytest.mark.fault(22)
def test_where_pytorch_compares_the_calls_they_are_named_with_their_line(tmp_path):
    source, compare = small(CALLS.format(number=40, act=SIZES)), faults.comparing_calls
    odd = {0: compare, 1: faults.in_turn(compare, environment(ODD="1"))}
    job = failed(tmp_path, source, "--timeout 3 --reduction flat", code=7, faults=odd)
    assert "ALLREDUCE, TensorShape=[3], ALLREDUCE, TensorShape=[1003]" in job.error
    assert f"rank 0, 1 in line {line_of(source, 'dist.all_reduce')} (loss) of mine" in job.error


# ---- the workload's own flags -------------------------------------------------------------------------------------

WIDE = small("""
    def flags(self, add):
        add("--width", type=int, default=8, help="of the hidden layer")
        add("--words", choices=["few", "many"], default="few", remembered=False)

    def model(self, config):
        return nn.Sequential(nn.Linear(6, config.width), nn.Tanh(), nn.Linear(config.width, 1))
""")


def test_own_flags_are_in_the_help_and_other_workloads_do_not_have_them(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--workload", str(written(tmp_path, WIDE)), "--help"], 1)
    out = capsys.readouterr().out
    assert "of --workload mine" in out and "--width" in out and "of the hidden layer" in out
    with pytest.raises(UsageError, match="--width 8"):
        parse(["--width", "8"], 1)


@pytest.mark.parametrize(
    "flags, said", [("--width wide", "--width: invalid int value: 'wide'"), ("--words none", "--words: invalid choice: 'none'")]
)
def test_own_flags_are_checked(tmp_path, flags, said):
    assert said in failed(tmp_path, WIDE, flags).error


@pytest.mark.parametrize(
    "kind, said",
    [
        ("lambda path: open(path).read()", r"--table: 'nowhere': FileNotFoundError: .*No such file or directory: 'nowhere'"),
        ("dict(a=1).__getitem__", "--table: 'nowhere': KeyError: 'nowhere'"),
        ("int", "--table: invalid int value: 'nowhere'"),
    ],
)
def test_what_a_type_of_an_own_flag_raises_is_one_line(tmp_path, kind, said):
    job = failed(tmp_path, small(f"def flags(self, add):\n    add('--table', type={kind})"), "--table nowhere")
    assert re.search(said, job.error), job.error


def test_own_flags_have_their_values_in_the_config_the_record_and_the_defaults_of_the_class(tmp_path):
    job = failed(tmp_path, WIDE + "    defaults = Small.defaults | dict(width=5)\n", code=0, world_size=1)
    assert job.records("start")[0]["config"]["width"] == 5
    with pytest.raises(AttributeError, match="there is no flag --height"):
        _ = parse(["--workload", str(tmp_path / "mine.py")], 1).height


def test_a_snapshot_remembers_own_flags_unless_they_say_no(tmp_path):
    failed(tmp_path, WIDE, "--epochs 1", code=0)
    assert "width: 8 there, 9 here" in failed(tmp_path, WIDE, "--epochs 2 --width 9", code=5).error
    job = failed(tmp_path, WIDE, "--epochs 2 --words many", code=0)
    assert_same_run(job, train(tmp_path / "whole", f"--workload {tmp_path / 'mine.py'} --epochs 2", 2, code=0))


def test_a_flag_may_have_the_name_of_what_the_core_remembers(tmp_path):
    flags = small("def flags(self, add):\n    add('--data', default='here')")
    failed(tmp_path, flags, "--epochs 1", code=0)
    assert "data: here there, there here" in failed(tmp_path, flags, "--epochs 2 --data there", code=5).error


def test_values_of_any_kind_are_told_in_words_that_are_equal_in_all_ranks(tmp_path):
    """A set of texts has another order in each process, and an object has another address."""
    flags = """
        def flags(self, add):
            add("--kinds", type=lambda text: set(text.split("+")), default={"b", "a"}, remembered=False)
            add("--thing", type=str, default=object(), remembered=False)
        """
    path = written(tmp_path, small(flags))
    facts = parse(["--workload", str(path)], 1).facts()
    assert facts["kinds"] == "{'a', 'b'}" and facts["thing"] == "<object object>"


# ---- from a program -----------------------------------------------------------------------------------------------


def test_run_takes_a_class_a_file_and_a_name(tmp_path):
    file = written(tmp_path, small("pass"))
    by_class, by_file, by_flag = (
        train(tmp_path / "class", "", 2, workload="small:Small", code=0),
        train(tmp_path / "file", "", 2, workload=str(file), code=0),
        train(tmp_path / "flag", f"--workload {file}", 2, workload="small:Dropout", code=0),
    )
    assert by_class.losses == by_file.losses == by_flag.losses, "--workload wins over what run() was given"
    assert by_class.records("start")[0]["config"]["workload"] == "small"
    assert by_file.snapshot_hash() == by_flag.snapshot_hash()


def test_the_whole_of_a_train_py(tmp_path):
    """A program that contains its class, as a site's train.py could. The error names its line."""
    program = WHOLE + "\nfrom ddp_core import Rank, run\nraise SystemExit(run(lambda environ: Rank.single(), workload=Mine))\n"
    file = written(tmp_path, program, "train.py")
    flags = ["--device", "cpu", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run([sys.executable, str(file), *flags], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "") and "run complete" in ended.stdout
    file.write_text(program.replace("torch.nn.Linear(3, 1)", "torch.nn.Linear(3, width)"))
    ended = subprocess.run([sys.executable, str(file), *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and re.fullmatch(r"error: .*line 14 \(model\): NameError: .*'width'.*\n", ended.stderr), (
        ended.stderr
    )

"""Run a site's train.py with a stub instead of the core. It records its arguments, and which rank the program found.

    row = called(site, environ, folder, "--epochs", "7")      {"who": {"rank": 3, ...}, "argv": [...], ...}
    who(site, environ, folder)                                its "who" alone; {"refused": "..."} after a PreflightError

It needs neither torch nor ranks. Its stub of MPI calls this process rank 0 of MPI_SIZE, or alone.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from conformance.harness.sites import Site

# Settings of the process, besides its environment, that a program can change and that affect training.
AROUND = """
import gc, os, resource, signal, socket, sys, warnings

def around():
    os.umask(mask := os.umask(0o77))
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    facts = {f"signal {number}": str(signal.getsignal(number)) for number in signal.valid_signals()} | limits
    facts.update(garbage=[gc.isenabled(), *gc.get_threshold()], warnings=str(warnings.filters), nice=os.nice(0), umask=mask)
    facts.update(timeout_of_sockets=socket.getdefaulttimeout(), recursion=sys.getrecursionlimit())
    return facts
"""
CORE = """
import json, os, signal, sys
from .around import around
from .errors import PreflightError

class Rank(dict):
    @classmethod
    def single(cls):
        return cls(single=True)

    @classmethod
    def read(cls, environ, launcher_store=False, **variables):
        found = cls(launcher_store=launcher_store)
        for name, variable in variables.items():
            text = environ.get(variable) or ("0" if name == "restart" else "")
            if not text or not (text.isdecimal() or name in ("master_addr", "job_id")):
                raise PreflightError(f"{variable}={text!r}")
            found[name] = text if name in ("master_addr", "job_id") else int(text)
        return found

    def __init__(self, variables=None, **fields):
        super().__init__(fields)

def run(rank, *arguments, **named):
    before = json.loads(os.environ.pop("BEFORE"))
    calls, code = os.environ.pop("CALLS"), int(os.environ.pop("CODE"))
    imported = sorted({"torch", "numpy"} & sys.modules.keys())
    try:
        who = rank(os.environ)
    except PreflightError as error:
        who = dict(refused=str(error))
    mpi = sys.modules.get("mpi4py.MPI")
    who.update(mpi_is_open=bool(mpi and mpi.Is_initialized() and not mpi.Is_finalized()))
    who.update(cores=len(os.sched_getaffinity(0)))
    changed = sorted(name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name))
    print("this is the core", file=sys.stderr)
    beside = len(os.listdir("/proc/self/task")) - 1 + bool(signal.alarm(0))
    facts = dict(who=who, beside=beside, argv=sys.argv[1:], changed=changed)
    facts.update(around=around(), arguments=repr([*arguments, named] if named else arguments))
    with open(calls, "a") as file:
        file.write(json.dumps(facts | dict(folder=os.getcwd(), imported=imported)) + "\\n")
    return code
"""
SAID = "this is the core\n"
ERRORS = "class PreflightError(ValueError): code = 3\n"
MPI = """
import json
import os
COMM_TYPE_SHARED, begun, over = 0, [], []
def Init(*_):
    begun.append(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as some do, for their own threads
Init_thread = Init
Finalize = lambda: over.append(1)
Is_initialized, Is_finalized = lambda: bool(begun), lambda: bool(over)

class Comm:
    # Of the first rank of a node. What the world's rank 0 hands out is in a file, for those that are called after it.
    def __init__(self, rank, size, said=None):
        self.rank, self.size, self.said, self.place = rank, size, said, 0

    Get_rank, Get_size = lambda self: self.rank, lambda self: self.size
    Free = Barrier = lambda self: None

    def Split_type(self, *_, **__):
        return Comm(0, self.size // int(os.environ.get("MPI_NODES", "1")))

    Split = Split_type

    def bcast(self, value, root=0):
        if not self.said:
            return value
        values = json.load(open(self.said)) if os.path.exists(self.said) else []
        if self.rank == 0:
            json.dump([*values, value], open(self.said, "w"))
            return value
        self.place += 1
        return values[self.place - 1]

    allgather = lambda self, value: [0, value] if self.rank else [value]

COMM_WORLD = Comm(int(os.environ.get("MPI_RANK", "0")), int(os.environ.get("MPI_SIZE", "1")), os.environ.get("MPI_SAID"))
"""
FILES = {"ddp_core/__init__.py": CORE, "ddp_core/around.py": AROUND, "ddp_core/errors.py": ERRORS, "mpi4py/MPI.py": MPI}
FILES |= {"mpi4py/__init__.py": "class rc: initialize = finalize = True\n"}


@dataclass(frozen=True)
class Called:
    code: int
    stdout: str
    stderr: str
    rows: list[dict]  # one for each call of the core's run


def called(site: Site, environ: dict[str, str], folder: Path, *flags: str, code: int = 0) -> Called:
    """Run train.py in this empty folder with this environment. The stub's run() returns `code`."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (calls := folder / "calls").write_text("")
    own = environ | dict(PATH=os.environ["PATH"], PYTHONPATH=str(folder), HOME=str(folder))
    own |= dict(LC_CTYPE="C.UTF-8", PYTHONDONTWRITEBYTECODE="1")
    more = dict(BEFORE=json.dumps(own), CALLS=str(calls), CODE=str(code))
    command = [sys.executable, str(site.folder / "train.py"), *flags]
    result = subprocess.run(command, env=own | more, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    rows = [json.loads(line) for line in calls.read_text().splitlines()]
    return Called(result.returncode, result.stdout, result.stderr, rows)


@functools.cache
def around() -> dict:
    """The settings of a Python process without train.py."""
    command = [sys.executable, "-c", f"{AROUND}\nimport json\nprint(json.dumps(around()))"]
    return json.loads(subprocess.run(command, env={}, capture_output=True, check=True).stdout)


def who(site: Site, environ: dict[str, str], folder: Path) -> dict:
    """Which rank train.py finds for this process. A program that never calls run() counts as refused."""
    result = called(site, environ, folder)
    last_line = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.code}"]
    return result.rows[0]["who"] if result.rows else dict(refused=last_line[0])

"""A dry run: a site's own scripts run here, with stand-ins for the commands of its machine, which record each call.

    runs = DryRuns(site)                           of a conformance.harness.sites.Site
    runs.install("--add", "h5py==3.14.0")          install.sh, with these flags
    runs.job(script, code=75, restarts=1)          a job script, whose ranks end with 75
    runs.case(case, event="warning")               a choice of [[job.choices]], whose ranks get a signal

It needs bash, but neither ranks, torch, a scheduler nor root. Absolute paths in a script, such as /tmp and /scratch, are moved
into the dry run's folder. Where Linux has Landlock, scripts can write nowhere else.
"""

import ctypes
import itertools
import marshal
import os
import py_compile
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.cluster import layer
from conformance.cluster.shape import names_of
from conformance.harness.shell import OF_DEVICES, Script, devices_by, handed_on, nodes_asked, words_of
from conformance.harness.sites import Case, Site

COMMANDS = Path(__file__).with_name("dry_run_commands.py")
LEFT = "left-by-the-first"
USER, SECRET = "tester", "s3cr3t-of-the-user"
YEARS_AGO = 1_600_000_000  # 2020
AROUND = ("home/", "root/")  # the folders beside sites/ that a script may write to
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD", "GITHUB_PAT", "SESSION_JWT", "AWS_CREDENTIALS", "NETRC", "NGC_AUTH")
# What users pass to a job script. Words with a space or a star must arrive unchanged.
ARGUMENTS = ("--epochs", "3", "--data-dir", "two words", "--note", "*")
# The settings of a dry run.
# event: warning, stop, limit, cancelled or asked (USR2), during training; pause: the job is deleted between two launches.
# progress: whether it trains a step. started: how often PBS has started this job.
# fails: what fails. `fails at 3`: the third command; `on a node COMMAND`: what a launcher runs; `hangs`: what starts on the
# nodes after the ranks; `start`: ranks before they record anything; `image`: the image after they have saved; `one run`: one of
# several.
# install: flags of install.sh, None if it has not run. modules_set: whether modules set what site.toml says.
# beside: another job's folders. halves: files of a killed start. planted: `open` or `link`, and a path below root/.
# shared: whether nodes are shared. spare: True if there are spare nodes and the first is down; "later": down after ranks ran.
# umask: the user's, if not this process's.
STANDARD: dict = dict(number="4242", restarts=0, code=0, all_ranks=False, event="", progress=True, shared=False, fails="")
STANDARD |= dict(environ={}, options={}, edit={}, ntasks=0, arguments=ARGUMENTS, install=(), install_fails="", case=None)
STANDARD |= dict(walltime="01:42:00", beside=(), halves=(), planted=(), modules_set=True, spare=False, recorded=None, started=1)
STANDARD |= dict(umask="")
# after: flags of an earlier run of install.sh, and after_fails, what failed in it. left: whether files LEFT are in what that
# run made. linked: whether its folder was moved since, with a link in its place. planted: a folder with somebody's file, where
# it installs. `fails` may be "pip PACKAGE", if it installs that, or "killed at 2": the second command that makes a part.
OF_INSTALL: dict = dict(after=None, after_fails="", left=False, linked=False, planted="")
# Prefixes of variables that a job has with every --export.
OF_NO_USER = ("SLURM_", "DRY_RUN")
# What PBS says of the job. It differs from the directives.
OF_PBS = dict(
    name="name42",
    queue="queue42",
    account="account42",
    walltime=STANDARD["walltime"],
    place="scatter:excl",
    filesystems="home:of42",
)
# Commands that a launcher may start, and that have no stand-in.
SHELLS = ("bash", "sh", "env", "nice", "taskset", "stdbuf", "chrt")
OF_CONDA = ("conda", "mamba", "micromamba")
# The usual limit of a process: Linux's INR_OPEN_CUR.
OPEN_FILES = 1024
# Numbers of the job, of another job, and a large one, whose last digits are no octal number.
FIRST, OTHER, LARGE = "4242", "7001", "61230899"
# Absolute paths that stay as they are. All others are moved.
KEPT = "usr|bin|sbin|lib|lib64|etc|proc|sys|dev/(?!shm)"
ABSOLUTE = re.compile(
    rf"(?:(?<=:-)|(?<![\w./:~}})\]*%$\\+-]))/(?!(?:{KEPT})(?:/|\b))(?=(?:tmp|var/tmp|dev/shm)\b|[A-Za-z][\w.-]*/[\w$])"
)
# Words after `ml` that are no modules. https://lmod.readthedocs.io/en/latest/010_user.html
OF_ML = "load|add|purge|reset|use|unuse|del|unload|rm|swap|switch|list|avail|av|spider|show|save|restore|whatis|help|keyword"
MODULE = 'module() { local said; said=$(module-call "$@") || return; eval "$said"; }; ml() { case ${1-} in '
MODULE += f'--*) module "$@" ;; -?*) module unload "${{1#-}}" ;; {OF_ML.replace("|", " | ")}) '
MODULE += 'module "$@" ;; *) module load "$@" ;; esac; }'
# The same for conda. https://docs.conda.io/projects/conda/en/stable/dev-guide/deep-dives/activation.html
CONDA = "NAME() { case ${1-} in activate | deactivate) local said; "
CONDA += 'said=$(command NAME shell.posix "$@") || return; eval "$said" ;; *) command NAME "$@" ;; esac; }\n'
# The parts of torchrun that sites' programs call. It runs the dry run's command, and its ranks' exit code is an error.
ERRORS = """
class ChildFailedError(Exception):
    def get_first_failure(self):
        code = self.args[0]
        return 0, type("Failure", (), dict(exitcode=128 - code if code > 128 else code))
"""
SIGNALS = """
class SignalException(Exception):
    def __init__(self, message, sigval):
        super().__init__(message)
        self.sigval = sigval
"""
TORCHRUN = """
import atexit, os, signal, subprocess, sys
from .elastic.multiprocessing import SignalException
from .elastic.multiprocessing.errors import ChildFailedError
def main(words=None):
    if os.environ["DRY_RUN_FAILS"] == "agent":
        atexit.register(os._exit, 143)  # another node's was quicker, and srun ends this one while Python cleans up
    if os.environ["DRY_RUN_FAILS"] == "agent" and os.environ.get("DRY_RUN_NODE", "0") != "0":
        raise SignalException("got signal 15", signal.SIGTERM)  # another node's has ended, and so srun ends this one
    code = subprocess.call(["torchrun", *(sys.argv[1:] if words is None else words)])
    if code:
        raise ChildFailedError(code)
"""
# It prints the run's id, since W&B takes two runs with one id for one, and all that it gets. It drops values of an earlier step
# than its own: https://docs.wandb.ai/models/track/log
# Its folders are in the home directory by default: https://docs.wandb.ai/models/track/environment-variables
WANDB = """
import os
class Run:
    step = 0
    def log(self, values, step):
        for value in values.values() if step >= self.step else ():
            print("wandb has", step, value, flush=True)
        self.step = max(step, self.step)
    def finish(self): pass
def init(id, resume=None, **told):
    # Online a run of this id is there once the job has started before: https://docs.wandb.ai/models/runs/resuming
    online = told.get("mode", os.environ.get("WANDB_MODE", "online")) == "online"
    again = os.environ["DRY_RUN_RESTARTS"] != "0"
    if online and resume == ("never" if again else "must"):
        raise RuntimeError(f"resume={resume!r}, but the run {id} " + ("exists" if again else "does not"))
    for kind, place in dict(CACHE=".cache", CONFIG=".config", DATA=".local/share").items():
        # Of XDG's it asks for two.
        base = (kind != "CONFIG" and os.environ.get(f"XDG_{kind}_HOME")) or os.path.expanduser(f"~/{place}")
        os.makedirs(folder := os.environ.get(f"WANDB_{kind}_DIR") or f"{base}/wandb", exist_ok=True)
        open(f"{folder}/left-by-wandb", "w").close()
    print("wandb run", id, flush=True)
    print("wandb is told", told, flush=True)
    return Run()
class Settings:
    def __init__(self, **told): pass
"""
BOARD = """
class SummaryWriter:
    def __init__(self, folder): pass
    def __getattr__(self, name):
        return lambda *told: print("tensorboard is told", *told, flush=True)
    def add_scalar(self, name, value, step):
        print("tensorboard has", step, value, flush=True)
"""
TORCH = "2.13.0+of.this.machine"  # PyPI does not have it
PACKAGES = {
    "torch/torch/__init__.py": "import os\nfrom . import cuda, version\n"
    f"__version__ = '2.14.0' if os.environ.get('DRY_RUN_FAILS') == 'another torch' else '{TORCH}'\n",
    "old-torch/torch/__init__.py": "__version__ = '2.4.0'\n",
    "torch/torch/distributed/run.py": TORCHRUN,
    "torch/torch/distributed/elastic/multiprocessing/__init__.py": SIGNALS,
    "torch/torch/distributed/elastic/multiprocessing/errors.py": ERRORS,
    "torch/torch/utils/tensorboard.py": BOARD,
    "torch/torch/version.py": "cuda = '13.0'\nhip = '7.1'\nxpu = '2026'\n",
    "torch/torch/cuda.py": "import os\ndef is_available(): return True\n"
    "def device_count(): return int(os.environ['DRY_RUN_DEVICES'])\n",
    "packages/mpi4py/__init__.py": "__version__ = '4.1.2'\nclass rc: initialize = finalize = True\n",
    "packages/mpi4py/MPI.py": "def Get_library_version(): return 'MPI of a dry run'\n",
    "packages/safetensors/__init__.py": "__version__ = '0.5'\n",
    "packages/safetensors/torch.py": "",
    "packages/numpy/__init__.py": "__version__ = '2.0'\n",
    "packages/wandb/__init__.py": WANDB,
    "core-of/ddp_core/__init__.py": "__version__ = '0.2.0'\n",
    "packages/horovod/__init__.py": "__version__ = '0.28.1'\n",
    "packages/horovod/torch.py": "def gloo_built(): return True\ndef nccl_built(): return True\n",
    # sys.executable is the stand-in. A missing library loads, except with fails="library".
    "packages/sitecustomize.py": "import ctypes, os, sys\nsys.executable = os.environ['DRY_RUN_PYTHON']\n"
    "def load(*arguments, **options):\n"
    "    if os.environ['DRY_RUN_FAILS'] == 'library':\n"
    "        raise OSError('libfabric.so.1: cannot open shared object file')\n"
    "ctypes.CDLL = load\n"
    "if os.environ['DRY_RUN_FAILS'] == 'old python':\n"
    "    sys.version_info, sys.version = (3, 9, 0, 'final', 0), '3.9.0 ' + sys.version.partition(' ')[2]\n"
    "prefix = os.path.dirname(os.path.dirname(sys.executable))\n"
    "sys.prefix = prefix\n"
    "sys.base_prefix = sys.base_prefix if os.path.exists(f'{prefix}/bin/activate') else prefix\n",
}


@dataclass(frozen=True)
class Call:
    """One call of a stand-in. end_time: None if exec replaced it by another command."""

    command: str
    path: str
    words: list[str]
    folder: str
    environ: dict[str, str]
    start_time: int
    end_time: int | None = None
    code: int | None = None
    notes: dict = field(default_factory=dict)  # texts that pip was given; signals: those that a rank has received

    @property
    def rank(self) -> int | None:
        return int(self.environ["DRY_RUN_RANK"]) if "DRY_RUN_RANK" in self.environ else None

    @property
    def text(self) -> str:
        return " ".join([self.command, *self.words])

    @property
    def program(self) -> int:
        """The place of train.py, or a similar name, among the words of a call of Python; 0 for another call."""
        place = next((place for place, word in enumerate(self.words) if not word.startswith("-")), None)
        if place is None or not self.command.startswith("python"):
            return 0
        return place + 1 if Path(self.words[place]).name.startswith("train") else 0

    @property
    def launcher_words(self) -> list[str]:
        """A launcher's words, without those of the program that it starts."""
        programs = {*command_names(), *SHELLS}
        own = itertools.takewhile(lambda word: word.startswith("-") or not ("/" in word or word in programs), self.words)
        return [*own]

    @property
    def seconds(self) -> float:
        """How long `sleep` takes, or how long `timeout` lets a launcher run until it kills it."""
        units = dict(s=1, m=60, h=3600, d=86400)
        words = self.words if self.command == "sleep" else self.notes.get("timeout", [])
        words = re.sub(r"(?<!\S)(-s |--signal[= ])\S+", "", " ".join(words)).split()
        parts = [re.fullmatch(r"([\d.]+|inf(?:inity)?)([smhd]?)", word.rpartition("=")[2]) for word in words]
        return sum(float(part[1]) * units.get(part[2], 1) for part in parts if part)

    @property
    def arguments(self) -> list[str]:
        return self.words[self.program :]

    @property
    def run_dir(self) -> str:
        """The run directory that train.py is given, or "none"."""
        return next(iter(values_of(self.arguments, "--run-dir", "--new-run-dir")), "none")

    @property
    def job_environ(self) -> dict[str, str]:
        """The environment without the dry run's own variables."""
        return {name: value for name, value in self.environ.items() if not name.startswith("DRY_RUN")}


@dataclass(frozen=True)
class DryRun:
    script: str
    launcher: str
    shape: dict
    code: int
    output: str
    calls: list[Call]
    changed: list[str]  # files that were made, changed or removed outside the site's folder, or changed or removed inside
    made: list[str] = field(default_factory=list)  # new names in the site's folder
    read: list[str] = field(default_factory=list)  # the files whose lines bash ran, if it was traced
    tree: dict[str, bytes] = field(default_factory=dict)  # after install.sh: files in the site's folder, and their bytes
    leaks: list[tuple[str, str]] = field(default_factory=list)  # files that contain a user's token or a secret, and which one
    wide: dict[str, str] = field(default_factory=dict)  # new files with more rights than the umask leaves, and their modes
    modes: dict[str, int] = field(default_factory=dict)  # of all new files and folders
    kept: Path | None = None  # after install.sh: a copy of sites/, as it has left it

    @property
    def trained(self) -> list[Call]:
        """The calls of train.py in a rank."""
        return [call for call in self.calls if call.rank is not None and call.program]

    @property
    def run_dir(self) -> str:
        """That of the first rank; "none" without ranks."""
        return self.trained[0].run_dir if self.trained else "none"

    @property
    def launches(self) -> list[Call]:
        """The launcher's calls that started ranks of train.py."""
        starts = [call for call in self.calls if call.rank is None and call.command == self.launcher]
        return [
            call for call in starts if any(call.start_time < each.start_time < (call.end_time or 0) for each in self.trained)
        ]

    @property
    def steps(self) -> list[tuple[str, Call]]:
        """The script's own commands, not those of ranks or in an image. Each comes with the `fails` that lets it fail."""
        own = [call for call in self.calls if not {"DRY_RUN_LAUNCHER", "DRY_RUN_IMAGE"} & {*call.environ}]
        return [(f"fails at {place}", call) for place, call in enumerate(own, 1)]

    @property
    def end_time(self) -> int:
        """When the last launch ended; 0 without one."""
        return max((call.end_time or 0 for call in self.launches), default=0)

    @property
    def new_starts(self) -> list[Call]:
        """Commands that start the job again, or a successor."""
        return self.successors + [call for call in self.called("scontrol") if call.words[:1] == ["requeue"]]  # not requeuehold

    @property
    def successors(self) -> list[Call]:
        """Commands that submit another job instead, or change one that waits."""
        return [call for call in self.called("sbatch", "qsub", "qalter") if "--version" not in call.words]

    @property
    def prefixes(self) -> list[str]:
        """The environments that install.sh has made."""
        made = [call for call in self.calls if "makes" in call.notes]
        calls = [call for call in made if call.command in OF_CONDA or call.words[:2] == ["-m", "venv"]]
        return [os.path.join(call.folder, call.notes["makes"]) for call in calls]

    def called(self, *commands: str) -> list[Call]:
        return [call for call in self.calls if call.command in commands]

    def pips(self, what: str = "install") -> list[tuple[Call, list[str]]]:
        """The pip calls that install (or download), each with its words behind `what`."""
        calls = [call for call in self.calls if call.words[:2] == ["-m", "pip"] or call.command in ("pip", "pip3")]
        return [(call, call.words[call.words.index(what) + 1 :]) for call in calls if what in call.words]


# Values for install.sh's flags, by the word that its --help shows for the value.
PASSED = dict(PACKAGE="h5py==3.14.0", WHAT="../../core", SPEC="torch==2.12.0", URL="https://download.pytorch.org/whl/of42")
PASSED |= dict(PREFIX="/elsewhere/a prefix", IMAGE=f"docker://registry/pytorch@sha256:{'0' * 64}")


def changed_settings(shape: dict, standard: dict) -> str:
    return repr(sorted((name, value) for name, value in shape.items() if value != standard[name]))


def umask() -> str:
    """This process's umask, which the user's scripts start with. Calling os.umask() would change it."""
    return Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0]


def limits(text: str) -> dict[str, float]:
    """The soft limits in /proc/self/limits, by name: `Max open files`."""
    rows = [(line[:26].strip(), line[26:].split()[0]) for line in text.splitlines()[1:]]
    return {name: float(value.replace("unlimited", "inf")) for name, value in rows}


def values_of(words: list[str], *flags: str) -> list[str]:
    values = [word.partition("=")[2] for word in words if word.partition("=")[0] in flags and "=" in word]
    glued = [word[2:] for word in words for flag in flags if len(flag) == 2 and re.fullmatch(rf"{flag}\w+", word)]
    return values + glued + [value for flag, value in itertools.pairwise(words) if flag in flags]


def trains(site: Site) -> list[Path]:
    """The job scripts that train."""
    return [script for script in site.job_scripts if site.job(script).get("trains", True)]


def with_modules(site: Site, *names: str) -> Case | None:
    """A case with more modules, in the line `modules=(...)` or in the line that loads torch's module by name.

    None if no script has such a line: modules do not change the Python of an image.
    """
    torch = [name for name in site.modules if "torch" in site.software.get("provides", {}).get(name, [])]
    named = "|".join(map(re.escape, torch)) or "(?!)"
    line = re.compile(rf"^( *modules=\([^)\n]*|[^#\n]*\b(?:module load|ml) (?:\S+ )*?(?:{named}))(?![^\s)])(.*)$", re.MULTILINE)
    for name in dict.fromkeys([site.toml["submit"], *(str(script.relative_to(site.folder)) for script in site.scripts)]):
        if match := line.search((site.folder / name).read_text()):
            other = f"{match[1]} {' '.join(names)}{match[2]}".replace("( ", "(")
            return replace(site.cases[0], name="other modules", script=name, edit={match[0]: other})
    return None


def kind_of(path: Path) -> int:
    """A file, a folder or a link."""
    return stat.S_IFMT(path.lstat().st_mode)


class DryRuns:
    """All dry runs of one site, each made once. close() removes their folder."""

    def __init__(self, site: Site):
        self.site = site
        self.top = Path(tempfile.mkdtemp(prefix="dry-run-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)).resolve()
        self.folder = self.top / "sites" / site.folder.name
        self.made: dict = {}
        self._touched: set[str] = set()  # paths in home/ and root/ that a run or its settings have made or changed
        self._lay()

    def close(self) -> None:
        shutil.rmtree(self.top, ignore_errors=True)

    def _write(self, name: str, text: str = "") -> Path:
        """Write a file below the dry run's folder, and make the folders above it."""
        path = self.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    # ---- the folder ---------------------------------------------------------------------------------------------------

    def _lay(self) -> None:
        top = self.top
        temporary = ("root/tmp/of-somebody-else", "root/var/tmp", "root/dev/shm")
        for name in ("bin", "home", *temporary, "calls", "spool"):
            (top / name).mkdir(parents=True)
        self._write("core/pyproject.toml", '[project]\nname = "ddp-core"\n')
        self._write("core/src/ddp_core/__init__.py")
        py_compile.compile(str(COMMANDS), str(top / "commands.pyc"), doraise=True)  # once, not 15 ms in each call
        for name in command_names() | {self.site.toml["launcher"]}:
            command = f'#!/bin/sh\nDRY_RUN={top} exec {self.python} -I -S {top}/commands.pyc "$0" "$@"\n'
            self._write(f"bin/{name}", command).chmod(0o755)
        for name, text in PACKAGES.items():
            self._write(name, text)
        if self.site.toml["node"].get("device_environment", "").startswith(("ROCR", "HIP")):  # AMD's build of torch
            (top / "torch/torch/version.py").write_text("cuda = None\nhip = '7.1'\nxpu = None\n")
        installed = [("torch", "torch", TORCH), ("old-torch", "torch", "2.4.0"), ("core-of", "ddp_core", "0.2.0")]
        installed += [("packages", *each) for each in (("mpi4py", "4.1.2"), ("safetensors", "0.5"), ("numpy", "2.0"))]
        for folder, name, version in installed:
            metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            self._write(f"{folder}/{name}-{version}.dist-info/METADATA", metadata)
        if image := layer.image_file(self.site):
            self._write(f"root/{image.lstrip('/')}")
        brought = [name for name in self.site.software.get("brought", []) if not re.search(r"^/|\.\.", name)]  # inside
        left = [".venv*", "env", "runs", "__pycache__", "*.out", ".git", "packages", "*.tar.gz", "*.sif"]
        left += [name.rstrip("/") for name in brought]
        shutil.copytree(self.site.folder, self.folder, ignore=shutil.ignore_patterns(*left))
        for name in brought:
            self._bring(name)
        for path in [self.folder / script.relative_to(self.site.folder) for script in self.site.scripts]:
            if path.is_file():
                path.write_bytes(ABSOLUTE.sub(f"{top}/root/", path.read_bytes().decode()).encode())
        # A login shell sets PATH anew, and may have a module command of this machine.
        (top / "home/.bash_profile").write_text(f"PATH={top}/bin:/usr/bin:/bin\nunset BASH_ENV\n{MODULE}\n")
        hook = "".join(CONDA.replace("NAME", name) for name in ("conda", "mamba", "micromamba"))
        self._write("etc/profile.d/conda.sh", hook)
        # Files that no script may touch.
        for name in ("home/.bashrc", "root/tmp/of-somebody-else/file", f"sites/{self.folder.name}/mine.py", "sites/other/file"):
            self._write(name, "somebody's own\n")
        self._lay_runs()
        # A node's own disk, if the machine gives each user a folder there.
        self.disks: list[str] = []
        for script in self.site.scripts:
            for place in re.findall(layer.OF_A_USER_S_DISK, script.read_text()):
                self.disks.append(f"{top}/root{place}/")
                self._write(f"root{place}/{USER}/of-another-job/file", "somebody's own\n")
        self.pristine = self._keep("pristine")

    def _takes_hook(self, name: str, *by: str) -> bool:
        """Whether a script, or one that it reads, takes conda's shell hook. by: the scripts that read it."""
        code = "\n".join(line.text for line in Script(self.folder / name).lines if not line.is_comment)
        others = [path.name for path in self.site.scripts if path.name not in (name, *by)]
        read = [other for other in others if re.search(rf"(?:\bsource|(?<!\S)\.) \S*{re.escape(other)}", code)]
        return bool(re.search(r"\bshell(\.\w+)? hook\b|/conda\.sh\b", code)) or any(
            self._takes_hook(other, name, *by) for other in read
        )

    def _bring(self, name: str) -> None:
        """Make a file or folder/ that a user brings, beside install.sh. An archive or a folder has a file in it."""
        path = self.folder / name
        file = path / "brought-1.0-py3-none-any.whl" if name.endswith("/") else path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n# brought by its user\n")
        if re.search(r"\.(tar|t?gz|t?bz2|t?xz)$", name):
            subprocess.run(["tar", "-caf", path, "-C", COMMANDS.parent, COMMANDS.name], check=True)

    def _lay_runs(self) -> None:
        """Make runs of other jobs, so many and so old that a script might think that nobody needs them."""
        other = [f"of-another-job/{name}" for name in ("snapshot.safetensors", "snapshot.prev.safetensors", "best/file")]
        for name in (*other, *(f"{job}/run.jsonl" for job in range(1000, 1030))):
            self._write(f"sites/{self.folder.name}/runs/{name}", "somebody's own\n")
        for path in (self.folder / "runs").rglob("*"):
            os.utime(path, (YEARS_AGO, YEARS_AGO))

    @property
    def other_python(self) -> Path:
        """The folder of another Python, with the same versions."""
        folder = self.top / "other/bin"
        if not folder.exists():
            folder.mkdir(parents=True)
            for name in ("python", "python3", "python3.11", "python3.12"):
                shutil.copy(self.top / "bin/python3", folder / name)
        return folder

    @property
    def python(self) -> str:
        return os.path.realpath(getattr(sys, "_base_executable", sys.executable))

    def _keep(self, name: str) -> Path:
        kept = self.top / name
        shutil.copytree(self.folder.parent, kept, symlinks=True)
        for below in AROUND:
            shutil.copytree(self.top / below, self.top / "around" / name / below, symlinks=True)
        return kept

    def _restore(self, kept: Path | None = None) -> None:
        """Restore sites/ from this copy, or from that before any installation, so that no run sees another's files.

        Restore also what runs have touched in home/ and root/.
        """
        kept = kept or self.pristine
        shutil.rmtree(self.folder.parent)
        shutil.copytree(kept, self.folder.parent, symlinks=True)
        for path in (self.top / "calls").iterdir():
            path.unlink()
        mounts = {str(path.parent.relative_to(self.top)) for path in (self.top / "root").rglob(".mounted")}  # killed run's
        for name in sorted(path for path in self._touched | mounts if path.startswith(AROUND)):
            here, then = self.top / name, self.top / "around" / kept.name / name
            if os.path.lexists(then) and os.path.lexists(here) and kind_of(then) != kind_of(here):
                shutil.rmtree(here) if kind_of(here) == stat.S_IFDIR else here.unlink()
            if then.is_dir() and not then.is_symlink():
                here.mkdir(parents=True, exist_ok=True)
                shutil.copystat(then, here)
            elif os.path.lexists(then):
                here.unlink(missing_ok=True)
                shutil.copy2(then, here, follow_symlinks=False)
            elif here.is_dir() and not here.is_symlink():
                shutil.rmtree(here, ignore_errors=True)
            elif os.path.lexists(here):
                here.unlink()

    # ---- running scripts ----------------------------------------------------------------------------------------------

    def install(self, *flags: str, **shape) -> DryRun:
        """Run install.sh. shape: settings that differ from STANDARD and OF_INSTALL."""
        standard = STANDARD | OF_INSTALL
        key = ("install.sh", *flags, changed_settings(shape, standard))
        if key not in self.made:
            full_shape = standard | shape | dict(flags=flags)
            after, planted = full_shape["after"], full_shape["planted"]
            first = None if after is None else self.install(*after, fails=full_shape["after_fails"])
            self._restore(first.kept if first else None)
            self._edit(full_shape["case"])
            for number, prefix in enumerate(map(Path, first.prefixes if first else ())):
                packages = prefix / "lib/python3.12/site-packages"
                left = (packages / LEFT, packages / f"ddp_core-0.2.0.dist-info-{LEFT}", prefix / f".{LEFT}")
                for path in left if full_shape["left"] else ():
                    path.touch()
                if full_shape["linked"] and prefix.is_dir() and not prefix.is_symlink():
                    shutil.move(prefix, self.folder / f"moved-{number}")
                    prefix.symlink_to(self.folder / f"moved-{number}")
            if planted:
                self._touched.add(planted)
                self._write(f"{planted}/mine", "somebody's own\n")
            moved = [f"{self.top}/root{flag}" if flag.startswith("/") else flag for flag in flags]
            words = [str(self.folder / "install.sh"), *moved]
            run = self._run("install.sh", words, self.folder, full_shape["environ"], full_shape)
            kept = self._keep(f"installed-{len(self.made)}") if after is None and not full_shape["umask"] else None
            self.made[key] = replace(run, kept=kept)
        return self.made[key]

    def packed(self, *flags: str) -> list[Path]:
        """Packed environments that install.sh has left with these flags, except the site's own."""
        kept, own = self.install(*flags).kept or self.pristine, self.pristine
        archives = [path.relative_to(kept) for path in kept.rglob("*") if path.name.endswith((".tar.gz", ".tar", ".sqsh"))]
        return [self.folder.parent / path for path in archives if not (own / path).exists()]

    def _edit(self, case: Case | None) -> None:
        if case:
            script = self.folder / case.script
            script.write_text(case.edited(script.read_text()))

    def job(self, script: Path, **shape) -> DryRun:
        """Run a job script. shape: settings that differ from STANDARD; nodes, by default [job]'s."""
        standard = STANDARD | dict(nodes=self.site.job(script)["nodes"])
        key = (script.name, changed_settings(shape, standard))
        if key not in self.made:
            full_shape = standard | shape
            case, flags = full_shape.pop("case"), full_shape["install"]
            own = case if case and case.install is not None and flags is not None else None  # whose installation has the edit
            if flags is None:
                self._restore()
            else:
                flags = [*flags, *case.flags(PASSED["IMAGE"])] if case else flags
                self._restore(self.install(*flags, fails=full_shape["install_fails"], case=own).kept)
            self._edit(None if own else case)
            self._touched |= {*full_shape["halves"], *full_shape["beside"]}
            for path in full_shape["halves"]:
                self._write(path, "half of it")
            for path in full_shape["beside"]:
                self._write(f"{path}/file", "another job's\n")
                for name in ("python", "conda-unpack"):  # an environment that was only half unpacked
                    self._write(f"{path}/bin/{name}", "#!/bin/sh\nexit 1\n").chmod(0o755)
            if full_shape["recorded"] is not None:
                full_shape["arguments"] = [*full_shape["arguments"], "--run-dir", str(self._recorded(full_shape["recorded"]))]
            slurm = self.site.toml["scheduler"] == "slurm"
            copy = self.top / "spool" / script.name
            text = (self.folder / script.name).read_text()
            for old, new in full_shape["edit"].items():
                text = text.replace(f"\n{old}\n", f"\n{new}\n")
            copy.write_text(text)
            environ = self._of_slurm(script, full_shape) if slurm else self._of_pbs(full_shape)
            options = Script(self.folder / script.name).options | full_shape["options"]
            environ |= taken_along(options.get("export", "ALL") if slurm else "ALL", full_shape["environ"])
            words = [str(copy), *(full_shape["arguments"] if slurm else [])]
            # PBS starts jobs in the home directory, unless it has NCI's `-l wd`.
            folder = self.folder if slurm or "wd" in Script(copy).resources else self.top / "home"
            self._plant(*full_shape["planted"])
            self.made[key] = self._run(script.name, words, folder, environ, full_shape)
        return self.made[key]

    def _recorded(self, code: int) -> Path:
        """Make a run directory as an earlier start leaves it, with its exit code."""
        words = '{"kind":"start","step":0,"epoch":0}\n{"kind":"end","exit_code":%d,"step":5,"epoch":1}\n'
        path = self._write(f"sites/{self.folder.name}/runs/earlier/run.jsonl", words % code)
        os.utime(path, (time.time() - 3600,) * 2)
        return path.parent

    def _plant(self, kind: str = "", path: str = "") -> None:
        """Make what another user could: a folder that everybody may write to, or a link to a proper one."""
        place, other = self.top / "root" / path, self.top / "root/tmp/of-somebody-else/folder"
        if not kind:
            return
        self._touched.add(f"root/{path}")
        shutil.rmtree(place, ignore_errors=True)
        other.mkdir(exist_ok=True)
        other.chmod(0o700)
        if kind == "link":
            place.symlink_to(other)
        else:
            place.mkdir(parents=True)
            place.chmod(0o777)

    def command(
        self, script: Path, line: str, *flags: str, fails: str = "", devices: Sequence[int] = (), planted: tuple[str, ...] = ()
    ) -> DryRun:
        """Run a line with a script in it, as a user types it in an allocation, in the site's folder. ARGUMENTS follow it.

        flags: of install.sh before it. devices: of the allocation, if not all of the node.
        """
        self._restore(self.install(*flags).kept)
        job, node, environ = self.site.job_scripts[0], self.site.toml["node"], {}
        if self.site.toml["scheduler"] == "slurm":
            environ = self._of_slurm(job, STANDARD | dict(nodes=1))
            if "device_environment" in node:
                environ |= {node["device_environment"]: ",".join(map(str, devices or range(node["devices"])))}
        elif self.site.toml["scheduler"] == "pbs":
            environ = self._of_pbs(STANDARD | dict(nodes=1, arguments=())) | dict(PBS_ENVIRONMENT="PBS_INTERACTIVE")
        words = ["-c", f'{line} "$@"', script.name, *ARGUMENTS]
        full_shape = STANDARD | dict(nodes=1, fails=fails, devices=len(devices))
        self._plant(*planted)
        return self._run(script.name, words, self.folder, environ, full_shape)

    def case(self, case: Case, **shape) -> DryRun:
        """Run a choice that a job script marks."""
        script = self.site.folder / case.script
        if case.name == case.script:
            return self.job(script, **shape)
        options, environ = words_of(case.options), case.environment | handed_on(case.options)
        options.pop("v", None)
        nodes = nodes_asked(case.options, self.site.toml["node"]["cores"]) or case.nodes
        shape = dict(nodes=nodes, spare=nodes > case.nodes) | shape
        shape |= dict(environ=environ | shape.get("environ", {}), options=options | shape.get("options", {}))
        return self.job(script, case=case, **shape)

    def hosts(self, nodes: int) -> list[str]:
        # Most machines' names sort differently as texts than as numbers.
        count, named = max(nodes, 2), "hosts" in self.site.toml["node"]
        names = names_of(self.site, count) if named else [f"node{number}" for number in range(9, 9 + count)]
        if self.site.toml["scheduler"] == "pbs":  # PBS lists nodes in no order
            names[:2] = names[1::-1]
        return names[:nodes]

    def _of_slurm(self, script: Path, shape: dict) -> dict[str, str]:
        """A batch script's environment. https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES"""
        options = Script(self.folder / script.name).options | shape["options"]
        each, nodes = int(options.get("ntasks-per-node", self.site.job(script).get("tasks_per_node", 1))), shape["nodes"]
        total = shape["ntasks"] or int(options.get("ntasks", each * nodes))
        first, *others = self.hosts(nodes)
        kind = first.rstrip("0123456789")
        # In Slurm's form, the text before the first comma is no node's name.
        hosts = f"{kind}[{first.removeprefix(kind)}-{others[-1].removeprefix(kind)}]" if others else first
        own = dict(JOB_ID=shape["number"], JOBID=shape["number"], JOB_NUM_NODES=nodes, NNODES=nodes)
        own |= dict(NTASKS=total, NTASKS_PER_NODE=each, TASKS_PER_NODE=f"{each}(x{nodes})" if nodes > 1 else each)
        own |= dict(PROCID=0, LOCALID=0, NODEID=0)
        own |= dict(JOB_NODELIST=hosts, NODELIST=hosts, SUBMIT_DIR=self.folder, JOB_NAME="train", EXPORT_ENV="NONE")
        own |= dict(JOB_PARTITION=options.get("partition", "batch"), JOB_QOS=options.get("qos", "normal"))
        # Slurm's CPUs are a core's threads, unless the job asks for one of each. https://slurm.schedmd.com/cpu_management.html
        single = options.get("threads-per-core") == "1" or options.get("hint") == "nomultithread"
        cpus = self.site.toml["node"]["cores"] * (1 if single else self.site.toml["node"].get("threads_per_core", 1))
        own |= dict(JOB_ACCOUNT=options.get("account", "account"), NPROCS=total, CPUS_ON_NODE=cpus)
        # In newer releases. For srun, this variable overrides its masks.
        own |= {"TRES_PER_TASK": f"cpu={options['cpus-per-task']}"} if "cpus-per-task" in options else {}
        for name in {"cpus-per-task", "gpus-per-node", "gpus-per-task"} & options.keys():
            own[name.replace("-", "_").upper()] = options[name]
        gpus = max(devices_by(name, options.get(name, "")) for name in OF_DEVICES[:3])
        own |= dict(GPUS_ON_NODE=gpus) if gpus else {}
        own |= dict(RESTART_COUNT=shape["restarts"]) if shape["restarts"] else {}
        own |= of_array(options.get("array") or options.get("a", ""), shape["number"])
        return {f"SLURM_{name}": str(value) for name, value in own.items()} | dict(SLURMD_NODENAME=self.hosts(nodes)[0])

    def _of_pbs(self, shape: dict) -> dict[str, str]:
        domain = self.site.toml["node"].get("nodefile_domain", "")
        nodefile = self.top / "spool/nodes"
        nodefile.write_text("".join(f"{host}{'.' if domain else ''}{domain}\n" for host in self.hosts(shape["nodes"])))
        environ = dict(PBS_JOBID=f"{shape['number']}.server", PBS_O_WORKDIR=str(self.folder), PBS_NODEFILE=str(nodefile))
        environ |= dict(PBS_ENVIRONMENT="PBS_BATCH", PBS_JOBNAME="train", PBS_QUEUE="workq")
        node = self.site.toml["node"]
        threads = node["cores"] * node.get("threads_per_core", 1)  # PBS sets both to the chunk's ncpus
        environ |= dict(NCPUS=str(threads), OMP_NUM_THREADS=str(threads))
        # A word in PBS's variable cannot contain a space. A newline separates as well as a space.
        words = "\n".join(word for word in shape["arguments"] if " " not in word)
        environ |= dict(PBS_O_QUEUE=OF_PBS["queue"], TRAIN_ARGS=words)
        restarts = self.site.toml["job"].get("restarts")
        return environ | ({restarts: str(shape["restarts"])} if restarts and shape["restarts"] else {})

    def of_the_machine(self, number: str) -> dict[str, str]:
        """The variables that the machine sets for a job with this number; with "", those of a login shell."""
        told = self.site.software.get("environment", {})
        told = {name: value for name, value in told.items() if number or "{job}" not in value}
        return {name: value.replace("{job}", number).replace("{user}", USER) for name, value in told.items()}

    def set_by(self, module: str) -> dict[str, str]:
        """The variables that the stand-in for this module sets."""
        return dict(re.findall(r'setenv\("(\w+)", "([^"]*)"\)', layer.module_file(self.site, module)))

    def _set_by_the_machine(self, number: str) -> dict[str, str]:
        """The same variables. A folder among them is made, for its user alone."""
        values = self.of_the_machine(number)
        for name in [name for name, value in values.items() if re.fullmatch(r"/[^:]*", value)]:
            values[name] = f"{self.top}/root{values[name]}"
            if not Path(values[name]).is_dir():
                Path(values[name]).mkdir(parents=True, mode=0o700)
        return values

    def _run(self, name: str, words: list[str], folder: Path, environ: dict[str, str], shape: dict) -> DryRun:
        site, node = self.site, self.site.toml["node"]
        nodes = shape.get("nodes", 1)
        handed_on = ("restarts", "code", "all_ranks", "event", "progress", "shared", "fails", "started")
        settings = {name: shape[name] for name in handed_on}
        settings |= dict(job=shape["number"], nodes=nodes, hosts=self.hosts(max(2, nodes)), suffix=node.get("suffix", ""))
        settings |= dict(python=self.python, suite=os.getpid())
        # A script that takes conda's hook does not count on a function conda() of a module's.
        settings |= dict(hook=self._takes_hook(name))
        settings |= dict(scheduler=site.toml["scheduler"], launcher=site.toml["launcher"])
        settings |= dict(launcher_environment=dict(site.launches[0].templates))
        settings |= dict(ranks_per_node=site.toml["job"]["ranks_per_node"], interfaces=node["interfaces"])
        settings |= dict(devices=shape.get("devices") or node["devices"])
        image = site.software.get("image", "")
        image_environment = dict(word.split("=", 1) for word in layer.provided(site, image) if "=" in word) if image else {}
        options = Script(self.folder / name).options | shape["options"]
        asked = max(devices_by(name, options.get(name, "")) for name in OF_DEVICES[:3])
        settings |= dict(asked=str(asked or ""))
        settings |= dict(image=image, image_sets=image_environment, device_environment=node.get("device_environment", ""))
        settings |= dict(to_batch="B" in options.get("signal", "").rpartition(":")[0])
        stop, other = site.toml.get("stop", ""), f"{shape['number']}0"
        settings |= dict(stop=stop.format(job=shape["number"], number=shape["number"]))
        settings |= dict(another_s_stop=stop.format(job=other, number=other))
        # An interactive job may have used most of its time already.
        limit, used = ("01:01:09", "01:00:09") if shape["event"] == "limit" else (shape["walltime"], "00:00:09")
        resources = Script(self.folder / name).resources
        own_of_pbs = {f"Resource_List.{name}": value for name, value in resources.items() if value}
        each = dict(ncpus=node["cores"], ngpus=node["devices"])  # PBS has no chunks here, and counts all nodes' together
        own_of_pbs |= {f"Resource_List.{name}": nodes * each[name] for name in each.keys() & resources.keys()}
        # The project pays where a machine has no accounts.
        account = dict(project=OF_PBS["account"]) if "P" in options else dict(Account_Name=OF_PBS["account"])
        own_of_pbs |= {"Job_Name": OF_PBS["name"], "Resource_List.walltime": limit} | account
        own_of_pbs |= {"resources_used.walltime": used}
        own_of_pbs |= dict(pair.split("=", 1) for name, pair in shape["options"].items() if name == "W")
        own_of_pbs |= {"Resource_List.select": nodes, "Resource_List.place": OF_PBS["place"]}
        if "filesystems" in site.toml.get("queue", {}):  # not every PBS knows this resource
            own_of_pbs |= {"Resource_List.filesystems": OF_PBS["filesystems"]}
        settings |= dict(of_pbs=own_of_pbs)
        settings |= dict(down=self.hosts(1)[0] if shape["spare"] else "", down_later=shape["spare"] == "later")
        # PyTorch comes with a module or an image, else through install.sh.
        settings |= dict(torch="torch" in layer.provided(site) or "image" in site.software)
        # What a module binds is unknown: only the variable's name is read.
        binds = [name for module in site.modules for name in self.set_by(module)]
        settings |= dict(bound=any(name.endswith(("_BIND", "_BINDPATH")) for name in binds))
        sets = {module: self.set_by(module) if shape["modules_set"] else {} for module in site.modules}
        (self.top / "bin/timeout").unlink(missing_ok=True)
        if shape["fails"] == "hangs":
            shutil.copy(self.top / "bin/rm", self.top / "bin/timeout")
        (self.top / "settings").write_bytes(marshal.dumps(settings | dict(modules=sets)))
        own = dict(
            DRY_RUN=str(self.top), PATH=f"{self.top}/bin:/usr/bin:/bin", HOME=str(self.top / "home"), USER=USER, LOGNAME=USER
        )
        own |= dict(HTTPS_PROXY=f"http://{USER}:{SECRET}@proxy:3128/", all_proxy=f"http://{USER}:{SECRET}@proxy:3128/")
        own |= dict(LANG="C.UTF-8", TERM="dumb", HOSTNAME=settings["hosts"][0], TMPDIR=f"{self.top}/root/tmp")
        own |= self._set_by_the_machine("" if name == "install.sh" else shape["number"]) | environ
        own |= dict.fromkeys(SECRETS, SECRET)
        # A job has no module command, unless its script starts as a login shell. A user who installs has one.
        if name == "install.sh" or re.match(r"#!.*\s(-l|--login)\b", (self.folder / name).read_text()):
            for function in re.split(r"; (?=ml\(\))", MODULE):
                own[f"BASH_FUNC_{function.partition('(')[0]}%%"] = function[function.index("()") :]
        if shape["code"] == 75 or name == "install.sh":
            (self.top / "trace.sh").write_text(
                f"PS4='+ ${{BASH_SOURCE:-$0}} '\nexec {{BASH_XTRACEFD}}>>{self.top}/calls/trace\nset -x\n"
            )
            own |= dict(BASH_ENV=str(self.top / "trace.sh"))
        before = self._files()
        mask = int(shape["umask"] or umask(), 8)
        code, output = self._start(["bash", *words], folder, own, mask)
        after = self._files()
        self._touched |= {path for path in before.keys() | after.keys() if before.get(path, "") != after.get(path, "")}
        before, after = ({path: each for path, each in files.items() if "/.has-" not in path} for files in (before, after))
        modes = {path: (self.top / path).lstat().st_mode for path in sorted(after.keys() - before.keys())}
        wide = {path: f"{mode & 0o777:o}" for path, mode in modes.items() if mode & mask and not stat.S_ISLNK(mode)}
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        mine = f"sites/{self.folder.name}/"
        made = {path.removeprefix(mine).partition("/")[0] for path in after.keys() - before.keys() if path.startswith(mine)}
        changed = [path for path in changed if not (path.startswith(mine) and path not in before)]
        paths = sorted((self.top / "calls").glob("[0-9]*[0-9]"))
        called = [Call(**marshal.loads(path.read_bytes())) for path in paths]  # noqa: S302
        trace = self.top / "calls/trace"
        lines = trace.read_text(errors="replace").splitlines() if trace.exists() else []
        written = [path for path, state in after.items() if before.get(path) != state and (self.top / path).is_file()]
        secrets = {call.environ.get("DDP_SECRET", "") for call in called if "DRY_RUN_RANK" in call.environ} - {""}
        kinds = {SECRET: "a user's"} | dict.fromkeys(secrets, "DDP_SECRET")
        texts = {path: (self.top / path).read_bytes() for path in written}
        leaks = [(path, kind) for path, text in texts.items() for value, kind in kinds.items() if value.encode() in text]
        read = sorted({match[1] for line in lines if (match := re.match(r"\++ (\S+) \S", line))})
        output = output.replace(f"{self.top}/root/", "/").replace(str(self.top), "")
        mine_now = [path for path in self.folder.rglob("*") if path.is_file()] if name == "install.sh" else []
        tree = {str(path.relative_to(self.folder)): path.read_bytes() for path in mine_now}
        tree = {path: b"packed" if text[:2] == b"\x1f\x8b" else text for path, text in tree.items()}  # gzip stores times
        run = DryRun(name, settings["launcher"], shape, code, output, called, changed, sorted(made))
        return replace(run, read=read, tree=tree, leaks=leaks, wide=wide, modes=modes)

    def _start(self, command: list[str], folder: Path, environ: dict[str, str], mask: int) -> tuple[int, str]:
        pipe: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        core = self.site.toml["scheduler"] == "pbs" and "install.sh" not in command[1]  # jobs have the limits of PBS's daemon
        confined: dict[str, Any] = dict(start_new_session=True, preexec_fn=lambda: confine(self.top, core), umask=mask)
        with subprocess.Popen(command, cwd=folder, env=environ, **pipe, **confined) as script:
            try:
                output, _ = script.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(script.pid, signal.SIGKILL)
                output, _ = script.communicate()
                output += "\nstill running after 60 s"
            return script.returncode, output

    def _files(self) -> dict[str, tuple[int, int] | None]:
        """The state of all paths below the folders that a script may write to."""
        files = {}
        for below in ("home", "root", "sites"):
            mounted = {path.parent for path in (self.top / below).rglob(".mounted")}
            for path in [path for path in (self.top / below).rglob("*") if not mounted & {path, *path.parents}]:
                status = path.lstat()
                state = None if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
                files[str(path.relative_to(self.top))] = state
        return files

    # ---- several runs, and how messages tell of one --------------------------------------------------------------------

    @property
    def flags(self) -> list[tuple[str, str]]:
        """install.sh's flags in its --help, each with the word for its value. "" for a missing flag or value."""
        usage = next((line for line in self.install("--help").output.splitlines() if "./install.sh [" in line), "")
        return re.findall(r"\[(--[\w-]+)? ?([A-Z]+)?\]", usage)

    def given(self, *values: str) -> list[tuple[str, ...]]:
        """Each flag of install.sh, with a value if it takes one. values: only flags that take one of these."""
        flags = [each for each in self.flags if not values or each[1] in values]
        return [tuple(filter(None, (flag, PASSED.get(value, value)))) for flag, value in flags]

    @property
    def by_hand(self) -> list[tuple[Path, str]]:
        """Lines in the heads of scripts that are no job's, which show how to train with them."""
        others = [script for script in self.site.scripts if script not in self.site.job_scripts]
        return [(script, line) for script in others for line in Script(script).training_lines]

    def first_ranks(self, **shape) -> Iterator[tuple[Path, Call]]:
        """Each job script that trains, with its first rank, if there is one."""
        for script in trains(self.site):
            yield from ((script, call) for call in self.job(script, **shape).trained[:1])

    def as_chosen(self) -> Iterator[tuple[Path, dict, DryRun]]:
        """Every script that trains, with a run of all ranks: unchanged, and once for each choice in its head."""
        for script in trains(self.site):
            yield script, {}, self.job(script, all_ranks=True)
            for chosen in Script(script).alternatives:
                yield script, chosen, self.job(script, all_ranks=True, environ=chosen, nodes=2)

    def in_all_ways(self) -> Iterator[tuple[str, DryRun]]:
        """The runs of as_chosen, and of each choice that scripts mark, each with its name."""
        for script, chosen, run in self.as_chosen():
            yield " ".join([script.name, *(f"{name}={value}" for name, value in chosen.items())]), run
        yield from ((case.name, self.case(case, all_ranks=True)) for case in self.site.cases)

    def without_effect(self, script: Path, choices: list[dict[str, str]], nodes: int = 2) -> Iterator[str]:
        """Those choices that change nothing, as `NAME=value`."""
        for chosen in choices if self.job(script, nodes=nodes).trained else ():
            if not self.changes(script, dict(nodes=nodes), environ=chosen):
                yield " ".join(f"{name}={value}" for name, value in chosen.items())

    def changes(self, script: Path, way: dict[str, Any], **shape) -> bool:
        """Whether settings change which commands a run calls, or what its first rank finds in its environment (of an edit: what
        any command finds), besides `environ`.
        """

        def seen(run: DryRun) -> set[tuple[str, str]]:
            calls = run.calls if "edit" in shape else run.trained[:1]
            variables = {each for call in calls for each in call.job_environ.items()}
            texts = [self.shown(call.text) for call in run.calls if call.command not in ("mktemp", "rm", "sleep")]
            texts = [re.sub(r"/tmp/tmp\.[^/\s\"']*", "/tmp/tmp.", text) for text in texts]  # mktemp's names differ in each run
            return {*variables, *(("", text) for text in texts), ("code", str(run.code))}

        chosen, environ = shape.get("environ", {}), way.get("environ", {})
        shapes: tuple[dict, ...] = ({}, dict(environ=environ | dict(DRY_RUN_AGAIN="1")), shape)
        usual, again, other = (seen(self.job(script, **(way | each))) for each in shapes)
        unlike = {name for name, _ in usual ^ again if name} | {*chosen}  # such as a secret, in each start
        texts = {text for name, text in usual ^ again if not name}
        return any(name not in unlike and text not in texts for name, text in usual ^ other)

    def removed(self, run: DryRun, own: list[Path]) -> list[str]:
        """What rm removes outside these paths. Allowed: mktemp's $TMPDIR/tmp.*, and names with the job's number."""
        violations = []
        for call in run.called("rm"):
            for word in [word for word in call.words if not word.startswith("-")]:
                path = Path(os.path.normpath(Path(call.folder, word)))
                temporary = path.parent == self.top / "root/tmp" and path.name.startswith("tmp.")
                if temporary or any(path.is_relative_to(each) for each in own if each != self.folder / "runs"):
                    continue
                inside = path.is_relative_to(self.folder) and path != self.folder
                if inside and not (self.pristine / path.relative_to(self.folder.parent)).exists():
                    continue  # a new file beside the scripts, which no copier has
                if re.search(rf"/[^/]*{run.shape['number']}[^/]*/", f"{path}/"):
                    continue
                violations.append(f"{run.script} removes {self.shown(str(path)) or word}, but should remove only what it made")
        return violations

    def exit_of(self, run: DryRun) -> str:
        """Exit code and last line, as a message has them; of 127 the line that says what was not found."""
        lines = [line for line in self.shown(run.output).splitlines() if line.strip()]
        if run.code == 127:  # a script's own last words, as of a trap, do not say what was not found
            lines = [line for line in lines if "not found" in line][:1] or lines
        return f"exit code {run.code} ({lines[-1][-160:] if lines else 'it prints nothing'})"

    def failed(self, run: DryRun, what: str) -> list[str]:
        """A violation, unless the run trains and ends with 0."""
        return [] if run.trained and not run.code else [f"{what}: {self.ending(run)}, but should be 0"]

    def refused(self, run: DryRun, what: str, name: str = "") -> list[str]:
        """A violation, unless the run ends with 3 before any rank, and names the mistake."""
        named = f" and name {name}" if name else ""
        right = run.code == 3 and not run.trained and name in run.output
        return [] if right else [f"{what}: {self.ending(run)}, but should be 3{named}"]

    def ending(self, run: DryRun) -> str:
        return f"{run.script}: {self.exit_of(run)}"

    def shown(self, text: str) -> str:
        """A text of a dry run with the site's own paths."""
        names = {f"{self.folder}/": "", f"{self.top}/root/": "/", f"{self.top}/home": "$HOME", str(self.folder): "."}
        for path, name in names.items():
            text = text.replace(path, name)
        return text


def confine(folder: Path, core: bool = False) -> None:
    """Let this process write only below this folder and /dev. core: allow core files, as long as it does not forbid them.

    Set the usual limit of open files. Containers have a far larger one, and a script that asks for more would get fewer.
    https://docs.kernel.org/userspace-api/landlock.html
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, OPEN_FILES), hard))
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most if core else 0, most))
    system = ctypes.CDLL(None, use_errno=True)
    create, add, restrict, version = 444, 445, 446, system.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 3:  # a kernel without Landlock, or with one that cannot refuse to truncate
        return
    writing = ctypes.c_uint64(sum(1 << bit for bit in (1, *range(4, 15))))  # write, remove, make, move, truncate
    rules = system.syscall(create, ctypes.byref(writing), ctypes.c_size_t(8), 0)
    for path in (folder, Path("/dev")):
        beneath = struct.pack("=Qi", writing.value, os.open(path, os.O_PATH))
        system.syscall(add, rules, 1, beneath, 0)
    system.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    system.syscall(restrict, rules, 0)


def of_array(array: str, number: str) -> dict[str, Any]:
    """Slurm's variables of an array, `0-7`, `1,3,5` or `0-15:4%2`, in its first job. https://slurm.schedmd.com/job_array.html"""
    tasks, step = list[int](), ""
    for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", array.partition("%")[0]):
        tasks += range(int(first), int(last or first) + 1, int(step or 1))
    if not tasks:
        return {}
    own = dict(JOB_ID=number, TASK_ID=tasks[0], TASK_COUNT=len(tasks), TASK_MIN=min(tasks), TASK_MAX=max(tasks))
    own |= dict(TASK_STEP=int(step or 1))
    return {f"ARRAY_{name}": value for name, value in own.items()}


def taken_along(export: str, environ: dict[str, str]) -> dict[str, str]:
    """The user's variables that sbatch gives a job with this --export. https://slurm.schedmd.com/sbatch.html#OPT_export"""
    named = export.split(",")
    taken = {name: value for name, value in environ.items() if "ALL" in named or name in named or name.startswith(OF_NO_USER)}
    return taken | dict(each.split("=", 1) for each in named if "=" in each)


def command_names() -> set[str]:
    """The words of COMMANDS. That file is a program of the dry run, and cannot be imported here."""
    return {word for text in re.findall(r'COMMANDS = """(.*?)"""', COMMANDS.read_text(), re.DOTALL) for word in text.split()}

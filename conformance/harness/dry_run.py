"""A dry run: a site's own scripts, run here with stand-ins for the commands of its machine, which record each call.

    runs = DryRuns(site)                           of a conformance.harness.sites.Site
    runs.install()                                 install.sh, without arguments
    runs.job(script, code=75, restarts=1)          a job script, whose ranks end with 75

Needs bash; neither ranks, torch, a scheduler nor root. Absolute paths that a script names, such as /tmp and /scratch, are moved
into the dry run's folder. Where Linux has Landlock, nothing else can be written to.
"""

import ctypes
import marshal
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.cluster import layer
from conformance.cluster.shape import names_of
from conformance.harness.shell import Script
from conformance.harness.sites import Site

COMMANDS = Path(__file__).with_name("dry_run_commands.py")
USER, SECRET = "tester", "s3cr3t-of-the-user"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD", "GITHUB_PAT", "SESSION_JWT", "AWS_CREDENTIALS", "NETRC", "NGC_AUTH")
# What users pass to a job script: words with a space and a star must arrive as they are.
ARGUMENTS = ("--epochs", "3", "--data-dir", "two words", "--note", "*")
# Of absolute paths these stay as they are; all others are moved.
KEPT = "usr|bin|sbin|lib|lib64|etc|proc|sys|dev/(?!shm)"
ABSOLUTE = re.compile(rf"(?<![\w./:~}})\]*%$\\+-])/(?!(?:{KEPT})(?:/|\b))(?=(?:tmp|var/tmp|dev/shm)\b|[A-Za-z][\w.-]*/[\w$])")
MODULE = 'module() { local said; said=$(module-call "$@") || return; eval "$said"; }; ml() { module load "$@"; }'
PACKAGES = {
    "../torch/torch/__init__.py": "__version__ = '2.13.0'\nfrom . import cuda, version\n",
    "../torch/torch/version.py": "cuda = '13.0'\nhip = '7.1'\nxpu = '2026'\n",
    "../torch/torch/cuda.py": "def is_available(): return True\ndef device_count(): return 8\n",
    "mpi4py/__init__.py": "__version__ = '4.1.2'\nclass rc: initialize = finalize = True\n",
    "mpi4py/MPI.py": "def Get_library_version(): return 'MPI of a dry run'\n",
    "safetensors/__init__.py": "__version__ = '0.5'\n",
    "safetensors/torch.py": "",
    "numpy/__init__.py": "__version__ = '2.0'\n",
    "ddp_core/__init__.py": "__version__ = '0.2.0'\n",
    # Python is known to scripts by the stand-in's name, and a library that is not there loads.
    "sitecustomize.py": "import ctypes, os, sys\nsys.executable = os.environ['DRY_RUN_PYTHON']\n"
    "ctypes.CDLL = lambda *arguments, **options: None\n",
}


@dataclass(frozen=True)
class Call:
    """One call of a stand-in. ended: None where another command took its place."""

    command: str
    path: str
    words: list[str]
    folder: str
    environ: dict[str, str]
    began: int
    ended: int | None = None
    code: int | None = None

    @property
    def rank(self) -> int | None:
        return int(self.environ["DRY_RUN_RANK"]) if "DRY_RUN_RANK" in self.environ else None

    @property
    def text(self) -> str:
        return " ".join([self.command, *self.words])


@dataclass(frozen=True)
class DryRun:
    script: str
    launcher: str
    shape: dict
    code: int
    output: str
    calls: list[Call]
    changed: list[str]  # files outside the site's folder, or existing files of it, that were made, changed or removed
    read: list[str] = field(default_factory=list)  # the files whose lines bash ran, when it was traced

    @property
    def trained(self) -> list[Call]:
        """The calls of train.py in a rank."""
        return [call for call in self.calls if call.rank is not None and program(call)]

    @property
    def launches(self) -> list[Call]:
        """The launcher's calls that started ranks of train.py."""
        starts = [call for call in self.calls if call.rank is None and call.command == self.launcher]
        return [call for call in starts if any(call.began < each.began < (call.ended or 0) for each in self.trained)]

    def called(self, *commands: str) -> list[Call]:
        return [call for call in self.calls if call.command in commands]


def program(call: Call) -> int:
    """The place of train.py, or its like, among the words of a call of Python; 0 if it is another one."""
    words = call.words
    place = next((place for place, word in enumerate(words) if not word.startswith("-")), None)
    if place is None or not call.command.startswith("python"):
        return 0
    return place + 1 if Path(words[place]).name.startswith("train") else 0


class DryRuns:
    """All dry runs of one site, each made once. close() removes their folder."""

    def __init__(self, site: Site):
        self.site = site
        self.top = Path(tempfile.mkdtemp(prefix="dry-run-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)).resolve()
        self.folder = self.top / "sites" / site.folder.name
        self.made: dict = {}
        self._lay()

    def close(self) -> None:
        shutil.rmtree(self.top, ignore_errors=True)

    # ---- what there is ------------------------------------------------------------------------------------------------

    def _lay(self) -> None:
        top = self.top
        for name in ("bin", "home", "root/tmp/of-somebody-else", "calls", "packages", "spool", "core/src/ddp_core"):
            (top / name).mkdir(parents=True)
        (top / "core/pyproject.toml").write_text('[project]\nname = "ddp-core"\n')
        (top / "core/src/ddp_core/__init__.py").touch()
        shutil.copy(COMMANDS, top / "commands.py")
        for name in command_names() | {self.site.toml["launcher"]}:
            file = top / "bin" / name
            file.write_text(f'#!/bin/sh\nDRY_RUN={top} exec {self.python} -I -S {top}/commands.py "$0" "$@"\n')
            file.chmod(0o755)
        for name, text in PACKAGES.items():
            (top / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
            (top / "packages" / name).write_text(text)
        for name, version in dict(torch="2.13.0", ddp_core="0.2.0", mpi4py="4.1.2", safetensors="0.5", numpy="2.0").items():
            info = top / ("torch" if name == "torch" else "packages") / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        if image := layer.image_file(self.site):
            (top / "root" / image.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            (top / "root" / image.lstrip("/")).touch()
        ignore = shutil.ignore_patterns(
            ".venv*", "env", "runs", "__pycache__", "*.out", ".git", "packages", "*.tar.gz", "*.sif"
        )
        shutil.copytree(self.site.folder, self.folder, ignore=ignore)
        for path in [self.folder / script.relative_to(self.site.folder) for script in self.site.scripts]:
            if path.is_file():
                path.write_bytes(ABSOLUTE.sub(f"{top}/root/", path.read_bytes().decode()).encode())
        # What nobody's script may touch.
        for name in ("home/.bashrc", "root/tmp/of-somebody-else/file", f"sites/{self.folder.name}/mine.py", "sites/other/file"):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text("somebody's own\n")
        snapshot = self.folder / "runs/of-another-job/snapshot.safetensors"
        snapshot.parent.mkdir(parents=True)
        snapshot.write_text("somebody's own\n")
        self.pristine = self._keep("pristine")

    @property
    def python(self) -> str:
        return os.path.realpath(getattr(sys, "_base_executable", sys.executable))

    def _keep(self, name: str) -> Path:
        kept = self.top / name
        shutil.copytree(self.folder.parent, kept, symlinks=True)
        return kept

    def _restore(self, kept: Path) -> None:
        shutil.rmtree(self.folder.parent)
        shutil.copytree(kept, self.folder.parent, symlinks=True)
        for path in (self.top / "calls").iterdir():
            path.unlink()

    # ---- scripts that are run -----------------------------------------------------------------------------------------

    def install(self) -> DryRun:
        """install.sh; what it leaves is there for the job scripts."""
        if "install" not in self.made:
            self._restore(self.pristine)
            self.made["install"] = self._run("install.sh", [str(self.folder / "install.sh")], self.folder, {}, dict(code=0))
            self.installed = self._keep("installed")
        return self.made["install"]

    def job(self, script: Path, **shape) -> DryRun:
        """A job script. shape: number, restarts, code (of the ranks), nodes, all_ranks (else only rank 0 runs), planted.

        planted: `open` or `link`, and a path below root/: what somebody else has made there before.
        """
        key = (script.name, *sorted(shape.items()))
        if key not in self.made:
            self.install()
            self._restore(self.installed)
            told = dict(number="4242", restarts=0, code=0, nodes=self.site.job(script)["nodes"], all_ranks=False)
            told |= shape
            slurm = self.site.toml["scheduler"] == "slurm"
            copy = self.top / "spool" / script.name
            shutil.copy(self.folder / script.name, copy)
            environ = self._of_slurm(script, told) if slurm else self._of_pbs(script, told)
            words = [str(copy), *(ARGUMENTS if slurm else [])]
            with self._planted(*told.get("planted", ())):
                self.made[key] = self._run(script.name, words, self.folder if slurm else self.top / "home", environ, told)
        return self.made[key]

    @contextmanager
    def _planted(self, kind: str = "", path: str = ""):
        """A folder that everybody may write to, or a link to one that is as it should be."""
        place, other = self.top / "root" / path, self.top / "root/tmp/of-somebody-else/folder"
        if kind:
            shutil.rmtree(place, ignore_errors=True)
            other.mkdir(exist_ok=True)
            other.chmod(0o700)
            if kind == "link":
                place.symlink_to(other)
            else:
                place.mkdir(parents=True)
                place.chmod(0o777)
        yield
        if place.is_symlink():
            place.unlink()
        elif kind:
            shutil.rmtree(place, ignore_errors=True)  # the job may have removed it

    def hosts(self, nodes: int) -> list[str]:
        return names_of(self.site, nodes)

    def _of_slurm(self, script: Path, told: dict) -> dict[str, str]:
        """What a batch script finds in its environment. https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES"""
        options = Script(script).options
        each, nodes = int(options.get("ntasks-per-node", self.site.job(script).get("tasks_per_node", 1))), told["nodes"]
        hosts = ",".join(self.hosts(nodes))
        own = dict(JOB_ID=told["number"], JOBID=told["number"], JOB_NUM_NODES=nodes, NNODES=nodes, NTASKS=each * nodes)
        own |= dict(
            NTASKS_PER_NODE=each, TASKS_PER_NODE=f"{each}(x{nodes})" if nodes > 1 else each, PROCID=0, LOCALID=0, NODEID=0
        )
        own |= dict(JOB_NODELIST=hosts, NODELIST=hosts, SUBMIT_DIR=self.folder, JOB_NAME="train", EXPORT_ENV="NONE")
        own |= dict(JOB_PARTITION=options.get("partition", "batch"), JOB_QOS=options.get("qos", "normal"))
        own |= dict(
            JOB_ACCOUNT=options.get("account", "account"), NPROCS=each * nodes, CPUS_ON_NODE=self.site.toml["node"]["cores"]
        )
        for name, variable in {
            "cpus-per-task": "CPUS_PER_TASK",
            "gpus-per-node": "GPUS_PER_NODE",
            "gpus-per-task": "GPUS_PER_TASK",
        }.items():
            own |= {variable: options[name]} if name in options else {}
        own |= dict(RESTART_COUNT=told["restarts"]) if told["restarts"] else {}
        return {f"SLURM_{name}": str(value) for name, value in own.items()} | dict(SLURMD_NODENAME=self.hosts(nodes)[0])

    def _of_pbs(self, script: Path, told: dict) -> dict[str, str]:
        domain = self.site.toml["node"].get("nodefile_domain", "")
        nodefile = self.top / "spool/nodes"
        nodefile.write_text("".join(f"{host}{'.' if domain else ''}{domain}\n" for host in self.hosts(told["nodes"])))
        environ = dict(PBS_JOBID=f"{told['number']}.server", PBS_O_WORKDIR=str(self.folder), PBS_NODEFILE=str(nodefile))
        environ |= dict(PBS_ENVIRONMENT="PBS_BATCH", PBS_JOBNAME="train", PBS_O_QUEUE="workq", PBS_QUEUE="workq")
        # No word of PBS's variable can have a space in it; a newline is as good as one.
        environ |= dict(TRAIN_ARGS="\n".join(word for word in ARGUMENTS if " " not in word))
        restarts = self.site.toml["job"].get("restarts")
        return environ | ({restarts: str(told["restarts"])} if restarts and told["restarts"] else {})

    def _run(self, name: str, words: list[str], folder: Path, environ: dict[str, str], told: dict) -> DryRun:
        site, node = self.site, self.site.toml["node"]
        software = site.toml.get("software", {})
        facts = dict(
            job=told.get("number", ""), restarts=told.get("restarts", 0), code=told["code"], nodes=told.get("nodes", 1)
        )
        facts |= dict(
            hosts=self.hosts(max(2, told.get("nodes", 1))), all_ranks=told.get("all_ranks", False), python=self.python
        )
        facts |= dict(launcher=site.toml["launcher"], launcher_environment=dict(site.launches[0].templates))
        facts |= dict(ranks_per_node=site.toml["job"]["ranks_per_node"], devices=node["devices"], interfaces=node["interfaces"])
        facts |= dict(devices_visible=node["devices_visible_to_a_rank"], image=software.get("image", ""))
        facts |= dict(device_environment=node.get("device_environment", ""))
        # PyTorch comes with a module or an image, or else by install.sh.
        brought = "torch" in layer.provided(site)
        facts |= dict(
            torch=brought or "image" in software,
            modules={module: set_by(site, module) for module in software.get("modules", [])},
        )
        (self.top / "facts").write_bytes(marshal.dumps(facts))
        own = dict(
            DRY_RUN=str(self.top), PATH=f"{self.top}/bin:/usr/bin:/bin", HOME=str(self.top / "home"), USER=USER, LOGNAME=USER
        )
        own |= dict(LANG="C.UTF-8", TERM="dumb", HOSTNAME=facts["hosts"][0], TMPDIR=f"{self.top}/root/tmp") | environ
        own |= dict(HTTPS_PROXY=f"http://{USER}:{SECRET}@proxy:3128/", all_proxy=f"http://{USER}:{SECRET}@proxy:3128/")
        own |= dict.fromkeys(SECRETS, SECRET) | {
            "BASH_FUNC_module%%": f"() {{ {MODULE.partition('{')[2].rpartition('; ml()')[0]}"
        }
        if told["code"] == 75 or name == "install.sh":
            (self.top / "trace.sh").write_text(
                f"PS4='+ ${{BASH_SOURCE:-$0}} '\nexec {{BASH_XTRACEFD}}>>{self.top}/calls/trace\nset -x\n"
            )
            own |= dict(BASH_ENV=str(self.top / "trace.sh"))
        before = self._files()
        code, output = self._start(["bash", *words], folder, own)
        after = self._files()
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        mine = f"sites/{self.folder.name}/"
        changed = [path for path in changed if not (path.startswith(mine) and path not in before)]
        calls = [
            marshal.loads(path.read_bytes())  # noqa: S302
            for path in sorted((self.top / "calls").glob("[0-9]*[0-9]"))
        ]
        trace = self.top / "calls/trace"
        lines = trace.read_text(errors="replace").splitlines() if trace.exists() else []
        read = sorted({match[1] for line in lines if (match := re.match(r"\++ (\S+) \S", line))})
        output = output.replace(f"{self.top}/root/", "/").replace(str(self.top), "")
        return DryRun(name, facts["launcher"], told, code, output, [Call(**call) for call in calls], changed, read)

    def _start(self, command: list[str], folder: Path, environ: dict[str, str]) -> tuple[int, str]:
        pipe: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        confined: dict[str, Any] = dict(start_new_session=True, preexec_fn=lambda: confine(self.top))
        with subprocess.Popen(command, cwd=folder, env=environ, **pipe, **confined) as script:
            try:
                output, _ = script.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(script.pid, signal.SIGKILL)
                output, _ = script.communicate()
                output += "\nstill running after 60 s"
            return script.returncode, output

    def _files(self) -> dict[str, tuple[int, int] | None]:
        """What is below the folders that a script may write to."""
        found = {}
        for below in ("home", "root", "sites"):
            for path in (self.top / below).rglob("*"):
                facts = path.lstat()
                found[str(path.relative_to(self.top))] = (
                    None if stat.S_ISDIR(facts.st_mode) else (facts.st_size, facts.st_mtime_ns)
                )
        return found

    def shown(self, text: str) -> str:
        """A text of a dry run with the site's own paths."""
        return (
            text.replace(f"{self.folder}/", "")
            .replace(f"{self.top}/root/", "/")
            .replace(f"{self.top}/home", "$HOME")
            .replace(str(self.folder), ".")
        )


def confine(folder: Path) -> None:
    """From now on this process can write below this folder and /dev alone. https://docs.kernel.org/userspace-api/landlock.html"""
    system = ctypes.CDLL(None, use_errno=True)
    create, add, restrict, version = 444, 445, 446, system.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 3:  # a kernel without it, or one that cannot refuse to truncate
        return
    writing = ctypes.c_uint64(sum(1 << bit for bit in (1, *range(4, 15))))  # write, remove, make, move, truncate
    rules = system.syscall(create, ctypes.byref(writing), ctypes.c_size_t(8), 0)
    for path in (folder, Path("/dev")):
        beneath = struct.pack("=Qi", writing.value, os.open(path, os.O_PATH))
        system.syscall(add, rules, 1, beneath, 0)
    system.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    system.syscall(restrict, rules, 0)


def set_by(site: Site, module: str) -> dict[str, str]:
    """The variables that a stand-in for this module sets."""
    return dict(re.findall(r'setenv\("(\w+)", "([^"]*)"\)', layer.module_file(site, module)))


def command_names() -> set[str]:
    """The words of COMMANDS, which cannot be imported here: the file is a program of the dry run."""
    return {word for text in re.findall(r'COMMANDS = """(.*?)"""', COMMANDS.read_text(), re.DOTALL) for word in text.split()}

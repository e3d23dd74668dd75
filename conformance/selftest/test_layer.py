"""Software and disks of the virtual cluster are made from site.toml, and its stand-in commands refuse wrong arguments.

    python -m pytest conformance/selftest/test_layer.py

Needs no root, Slurm or conda. Each stand-in is called as a script would call it; broken stand-ins are called too.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conformance.cluster import layer, prefix
from conformance.cluster.stand_ins import rccl
from conformance.harness.sites import Site

# Python may have compiled rccl.py there, so a folder is none of them.
COMMANDS = ["apptainer", *(path.name for path in layer.HERE.iterdir() if path.is_file())]
FACTS = dict(IMAGES="ours/torch:1.0", CPUS="8", RESERVED="0 4", QUEUES="debug prod", REQUIRED="Account_Name filesystems")
FACTS |= dict(SERVER="server")
# A scheduler that accepts everything and prints the arguments that it got.
SLURM = {
    "sbatch": 'printf "%s\\n" "$@" >asked; cat >body; echo 7',
    "scontrol": 'echo "JobState=${STATE:-RUNNING} RunTime=00:01:00 Restarts=0 ExitCode=${ENDED:-0:0} Reason=${WHY:-None}"; '
    'echo "Dependency=${AFTER:-(null)}"',
    "scancel": 'echo "cancelled $*"',
    "srun": 'printf "%s\\n" "$@"; echo "SLURM_JOB_ID=$SLURM_JOB_ID FOO=${FOO:-}"',
    "sinfo": "printf 'n1 idle\\nn2 down*\\nn3 drain\\n'",
    "python": "echo Python 3.11.0",
}
JOB = """#!/bin/bash
#PBS -A project
#PBS -l select=2
#PBS -l walltime=00:10:00
#PBS -q debug
#PBS -l filesystems=home
#PBS -j oe
echo started
#PBS -q unread
"""


# A job that has run: PBS gives no Exit_status for a job that was deleted before it ran.
STARTED = "qsub job.pbs && touch ~/.pbs-stand-in/7.SC"


@dataclass
class Rule:
    """A command line, its exit code, and a pattern for its output."""

    command: str
    code: int
    words: str
    environ: dict[str, str] = field(default_factory=dict)


SAY_THAT_THEY_STAND_IN = ("conda", "shifter", "shifterimg", "singularity", "qsub", "qstat", "qsig", "mpiexec")
RULES = [
    *(Rule(f"{name} --version", 0, "a stand-in") for name in SAY_THAT_THEY_STAND_IN),
    Rule("conda create --yes --prefix env --channel conda-forge python=3.12 pip", 0, "stand-in for conda: python=3.12 pip is"),
    Rule("conda create --yes --prefix env --chanel conda-forge python", 2, "unrecognized arguments: --chanel"),
    Rule("conda create --prefix env python", 1, "Proceed"),
    Rule("conda create --yes --prefix env python scipy", 1, "not available from current channels: scipy"),
    Rule("conda activate env", 1, "Run 'conda init' before 'conda activate'"),
    Rule("shifter --image=ours/torch:1.0 --module=gpu,nccl-plugin echo in", 0, "in"),
    Rule("shifter --image=ours/torch:1.0 --module=gpu,nccl-plugin env", 0, "\nNCCL_NET=AWS Libfabric\n"),
    Rule("shifter --image=ours/torch:1.0 --module=gpu env | grep -c NCCL_NET", 1, "0"),
    Rule("shifter --image=ours/torch:1.0 --env=FOO=1 env", 0, "FOO=1"),
    Rule("shifter --image=ours/torch:1.0 sh -c 'command -v srun || echo outside'", 0, "outside"),
    Rule("shifter --image=ours/torch:2.0 echo in", 1, "FAILED to lookup docker image ours/torch:2.0"),
    Rule("shifter --img=ours/torch:1.0 echo in", 1, "unrecognized arguments: --img"),
    Rule("shifter --image=ours/torch:1.0 --volume=/no-such-folder:/data echo in", 1, "invalid volume map"),
    Rule("shifterimg images", 0, "READY .* ours/torch:1.0"),
    Rule("singularity exec --rocm --bind . i.sif pwd", 0, "."),
    Rule("singularity exec --rcm i.sif echo in", 1, "unknown flag: --rcm"),
    Rule("singularity exec j.sif echo in", 255, "could not open image .*/j.sif: .* no such file or directory"),
    Rule("singularity exec --bind /no-such-folder i.sif echo in", 255, "mount source /no-such-folder doesn't exist"),
    Rule("singularity exec i.sif echo in", 255, "mount source /no doesn't exist", dict(SINGULARITY_BIND="/usr,/no")),
    Rule("singularity exec --bind /usr:/user-software i.sif echo in", 255, "singularity cannot show /usr:/user-software"),
    Rule("singularity exec --bind . i.sif no-such-command", 255, '"no-such-command": executable file not found'),
    Rule("singularity exec --bind . i.sif env", 0, "\nFOO=1", dict(SINGULARITYENV_FOO="1", FOO="2")),
    Rule("singularity exec --bind . i.sif env", 0, "LD_LIBRARY_PATH=/.singularity.d/libs", dict(LD_LIBRARY_PATH="/x")),
    Rule("singularity exec --bind . i.sif sh -c 'echo foo=$FOO'", 0, "foo=1", dict(FOO="1")),
    Rule("singularity exec --bind . i.sif sh -c 'command -v srun || echo outside'", 0, "outside"),
    Rule("apptainer --quiet exec --env FOO=1 i.sif env", 0, "FOO=1"),
    Rule("qsub job.pbs && cat asked", 0, r"7\.server\n[\s\S]*--partition=debug\n--time=0:600\n[\s\S]*--nodes=2\n"),
    Rule("qsub -q prod -l select=3 job.pbs && cat asked", 0, r"--partition=prod\n[\s\S]*--nodes=3\n"),
    Rule("qsub -l select=4 job.pbs && WHY=JobHeldUser STATE=PENDING qstat -f 7", 0, "comment = Can Never Run: Not enough"),
    Rule("qsub -l select=4 job.pbs && cat asked", 0, "--nodes=1\n--hold\n"),
    Rule("qsub job.pbs && ! grep -e --error asked", 0, "7.server"),
    Rule("qsub -W depend=afterok:7.server:8.server job.pbs && cat asked", 0, "=afterok:7:8\n--kill-on-invalid-dep=yes\n"),
    Rule("qsub -W depend=beforeok:7.server job.pbs", 1, "no depend=beforeok here"),
    Rule("qsub job.pbs && cat body", 0, r"mv /\S*/\.pbs-stand-in/\$number\.OU /\S*/here/job\.pbs\.o\$number\n"),
    Rule("qsub -k doe job.pbs && ! grep -w mv body", 0, "7.server"),
    Rule("qsub -v TRAIN_ARGS='--epochs 3',A=1 job.pbs && cat body", 0, "TRAIN_ARGS='--epochs 3' A=1 "),
    Rule("qsub job.pbs && cat body", 0, "exec env -i .*OMP_NUM_THREADS=1"),
    Rule("sed 's/#PBS -j oe/#PBS --job=oe/' job.pbs >b && qsub b", 1, "qsub: directive error: --job=oe"),
    Rule("qsub job.pbs --epochs 3", 2, "a script has no arguments"),
    Rule("qsub -v NO_SUCH_VARIABLE job.pbs", 1, "cannot send environment with the job"),
    Rule("qsub -q unread job.pbs", 170, "Unknown queue"),
    Rule("qsub -l slect=2 job.pbs", 187, "Unknown resource Resource_List.slect"),
    Rule("grep -v -e -A job.pbs >b && qsub b", 1, "Account_Name is required"),
    Rule("grep -v filesystems job.pbs >b && qsub b", 1, "Resource: filesystems is required to be set"),
    Rule("sed 's/^#PBS -A/# PBS -A/' job.pbs >b && qsub b", 1, "Account_Name is required"),
    Rule("qsub job.pbs && qstat -f 7.host", 0, r"Job_Name = job\.pbs[\s\S]*job_state = R[\s\S]*run_count = 1"),
    Rule("qsub job.pbs && qstat -f 7", 35, "Job has finished", dict(STATE="COMPLETED")),
    Rule(f"{STARTED} && qstat -x -f 7", 0, "Exit_status = 75", dict(STATE="FAILED", ENDED="75:0")),
    Rule(f"{STARTED} && qstat -x -f 7", 0, "Exit_status = 271", dict(STATE="CANCELLED", ENDED="0:0")),
    Rule(f"{STARTED} && qstat -x -f 7", 0, "Exit_status = -29", dict(STATE="TIMEOUT", ENDED="0:15")),
    Rule("qsub job.pbs && qstat -x -f 7 | grep -c Exit_status", 1, r"\n0\n$", dict(STATE="CANCELLED")),
    Rule("qstat -f 8", 153, "Unknown Job Id 8"),
    Rule("qsub job.pbs && qdel 7.host", 0, "cancelled 7$"),
    Rule("qdel 8", 153, "Unknown Job Id 8"),
    Rule("qsub job.pbs && qdel 7", 35, "qdel: 7 Job has finished", dict(STATE="COMPLETED")),
    Rule("qsub job.pbs && qsig -s SIGUSR1 7.server", 0, "cancelled --full --signal=USR1 7$"),
    Rule("pbsnodes -l", 0, r"^n2 +down\nn3 +down\n$"),
    Rule("mpiexec -n 4 --ppn 2 ./rank.sh --flag", 0, r"--nodes=2\n--ntasks=4\n--ntasks-per-node=2\n--nodelist=n1,n2\n"),
    Rule("mpiexec -n 4 --ppn 2 ./rank.sh --flag", 0, r"PALS_LOCAL_SIZE=2[\s\S]*\nmpiexec\n\./rank\.sh\n--flag\n"),
    Rule("mpiexec -n 2 --cpu-bind list:1-3:5,6 ./rank.sh", 0, "--cpu-bind=mask_cpu:0xe\n"),
    Rule("mpiexec -n 2 --ppn 2 --cpu-bind list:1-3:5,6 ./rank.sh", 0, "--cpu-bind=mask_cpu:0xe,0x60\n"),
    Rule("mpiexec -n 2 --ppn 2 --depth=2 --cpu-bind depth ./rank.sh", 0, "--cpu-bind=mask_cpu:0x6,0x28\n"),
    Rule("mpiexec -n 1 ./rank.sh", 0, "--kill-on-bad-exit=1\n"),
    Rule("mpiexec -n 2 --cpu-bind list:0-3:5,6 ./rank.sh", 1, "CPU 0 of --cpu-bind is not the job's"),
    Rule("mpiexec -n 6 --ppn 2 ./rank.sh", 1, "6 ranks at 2 a node need 3 hosts, and there are 2"),
    Rule("mpiexec --bind-to core -n 2 ./rank.sh", 1, "unrecognized option '--bind-to'"),
]
# A stand-in, a line of it, and the line's broken form. Each breaks one of the rules above.
BROKEN = [
    ("singularity", "if not os.path.exists(image):", "if False:"),
    ("singularity", "if source and not os.path.exists(source):", "if False:"),
    ("conda", "[[ -n $yes ]] || refuse", "[[ -n $yes ]] || : refuse"),
    ("conda", '*) refuse 1 "Packages', '*) : "'),
    ("shifter", 'if image not in FACTS["IMAGES"].split():', "if False:"),
    ("shifterimg", "$IMAGES", ""),
    ("qsub", "        if not given.get(name):", "        if False:"),
    ("qsub", 'if line.startswith("#PBS "):', 'if (line := line.replace("# PBS", "#PBS")).startswith("#PBS "):'),
    ("qsub", 'if told.get("q", "") not in', "if 0 not in [0] and"),
    ("qsub", "        if name not in RESOURCES:", "        if False:"),
    ("qsub", 'told[flag.lstrip("-")] = value', 'told.setdefault(flag.lstrip("-"), value)'),
    ("qsub", "exec env -i ", "exec env "),
    ("qstat", 'if letter == "F" and "-x" not in flags:', "if False:"),
    ("qstat", "code = 256 + 15", "pass"),
    ("qdel", "|| code=$?", "|| code=0"),
    ("qsig", " --full", ""),
    ("mpiexec", "if odd := [cpu for", "if odd := [] and [cpu for"),
    ("mpiexec", "    if nodes > len(names):", "    if False:"),
    ("mpiexec", "asked.no_abort_on_failure", "True"),
]


class Machine:
    """A folder with stand-ins, or with broken ones, beside a scheduler that accepts everything."""

    def __init__(self, folder: Path, changed: tuple[str, str, str] | None = None):
        self.home, self.bin, self.here = folder / "stand-ins", folder / "bin", folder / "here"
        for path in (self.bin, self.home / "image", self.here, folder / "home"):
            path.mkdir(parents=True)
        for name in ("bin", "lib"):
            (folder / "plain" / name).mkdir(parents=True)
        for name, text in SLURM.items():
            path = (folder / "plain/bin" if name == "python" else self.bin) / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        layer.link_commands(self.home / "image/bin")
        for name in COMMANDS:
            layer.lay(name, self.bin)
            text = (self.bin / name).read_text().replace(f"#!{layer.PYTHON}/bin/python3 -I", f"#!{sys.executable} -I")
            if changed and changed[0] == name:
                assert text.count(changed[1]) == 1, f"{name} has {changed[1]!r} {text.count(changed[1])} times"
                text = text.replace(changed[1], changed[2])
            (self.bin / name).write_text(text)
        machine_facts = FACTS | dict(
            PLAIN_HOME=str(folder / "plain"), IMAGE_PATH=str(self.home / "image/bin"), DOMAIN="", MPI_HOME=""
        )
        (self.home / "facts").write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in machine_facts.items()))
        (self.here / "i.sif").touch()
        (self.here / "job.pbs").write_text(JOB)
        (self.here / "nodes").write_text("n1.domain\nn2.domain\n")
        self.environ = dict(
            PATH=f"{self.bin}:{os.defpath}", HOME=str(folder / "home"), STAND_INS=str(self.home), USER="somebody",
            PBS_JOBID="7.host", PBS_NODEFILE=str(self.here / "nodes"),
        )  # fmt: skip

    def broken(self, rules: list[Rule]) -> Iterator[str]:
        """One line for each rule that is not kept."""
        for rule in rules:
            for left in (self.here / "asked", self.here / "body", *self.home.parent.glob("home/.pbs-stand-in/*")):
                left.unlink(missing_ok=True)
            result = subprocess.run(
                ["bash", "-c", rule.command], cwd=self.here, env=self.environ | rule.environ, capture_output=True, text=True,
                check=False, timeout=30, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            output = result.stdout + result.stderr
            if result.returncode != rule.code or not re.search(rule.words, output):
                yield f"{rule.command}: {result.returncode}, but should be {rule.code} and {rule.words!r}: {output}"


def rules_of(name: str) -> list[Rule]:
    return [rule for rule in RULES if re.search(rf"(^|&& |PBS_JOBID ){name}\b", rule.command)]


# These have no arguments that can be wrong.
BEHIND = {"activate", "cc", "contained", "rccl.py"}


@pytest.mark.parametrize("name", sorted({*COMMANDS} - BEHIND))
def test_a_stand_in_refuses_what_its_counterpart_refuses(name, tmp_path):
    assert rules_of(name)
    assert not [*Machine(tmp_path).broken(rules_of(name))]


@pytest.mark.parametrize("changed", BROKEN, ids=lambda changed: f"{changed[0]}: {changed[1].strip()}")
def test_a_lenient_stand_in_is_noticed(changed, tmp_path):
    assert next(Machine(tmp_path, changed).broken(rules_of(changed[0])), None)


def test_source_activate_puts_the_environment_first(tmp_path):
    machine = Machine(tmp_path)
    made = Rule('conda create -y -p env python && source activate "$PWD/env" && command -v python', 0, "/here/env/bin/python")
    assert not [*machine.broken([made, Rule("source activate /no-such", 1, "EnvironmentLocationNotFound")])]


@pytest.mark.parametrize(
    "environ, tried",
    [
        ({}, ["libnccl-net.so"]),
        (dict(NCCL_NET_PLUGIN=""), []),
        (dict(NCCL_NET_PLUGIN="/a/librccl-net.so"), ["/a/librccl-net.so"]),
        (dict(NCCL_NET_PLUGIN="librccl-net.so,ofi"), ["librccl-net.so", "ofi", "librccl-net-ofi.so"]),
    ],
)
def test_rccl_looks_for_its_plugin_under_these_names(environ, tried):
    assert rccl.names(environ) == tried


# ---- built from site.toml -------------------------------------------------------------------------------------------


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds the layer of a site with these tables and scripts."""
    monkeypatch.setattr(prefix, "make", lambda cache: tmp_path)
    monkeypatch.setattr(layer, "compile_empty", lambda library: None)

    def made(folder: Path = tmp_path, scripts: dict[str, str] | None = None, **toml):
        (folder / "site").mkdir(parents=True)
        for name, text in (scripts or {}).items():
            (folder / "site" / name).write_text(text)
        return layer.build(Site(folder / "site", dict(name="made-up") | toml), folder / "layer")

    return made


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_modules_are_exactly_those_of_site_toml(site, tmp_path, build):
    made = layer.build(site, tmp_path / "layer")
    below = [made.modulepath, *(path for path in made.paths.values() if path and path != tmp_path)]
    paths = sorted(str(path) for folder in below for path in folder.rglob("[!.]*.lua"))
    named = site.toml.get("software", {}).get("modules", [])
    assert len(paths) == len(named)
    assert all(any(path.endswith(f"/{module}.lua") for path in paths) for module in named)


def test_a_module_behind_module_use_is_found_there_only(build):
    scripts = {"job.sl": 'where=/far/modules\nmodule load gcc/13.2\nmodule use "$where"\nmodule load bindings || exit 3\n'}
    made = build(software=dict(modules=["gcc/13.2", "bindings"]), scripts=scripts)
    assert files(made.modulepath) == [f"{layer.OF_A_LOGIN}.lua", "gcc/13.2.lua"]
    assert files(made.paths["/far"]) == ["modules/bindings.lua"]


def test_an_image_file_lies_where_the_scripts_say(build):
    scripts = {"common.sh": "images=/far/images\nimage=$images/a/b.sif\n"}
    made = build(software=dict(image="a/b.sif"), scripts=scripts)
    assert files(made.paths["/far"]) == ["images/a/b.sif"]
    assert files(made.overlay / "usr/local/bin") == ["apptainer", "contained", "singularity"]
    with pytest.raises(ValueError, match="no script says in which folder"):
        layer.image_file(Site(made.overlay, dict(name="made-up", software=dict(image="a/b.sif"))))


def test_stand_ins_follow_from_site_toml(build):
    provides = {"forge/1": ["conda"], "env/8": ["compilers", "ROOT={folder}"]}
    made = build(software=dict(image="ours/torch:1.0", modules=[*provides], provides=provides), scheduler="pbs")
    commands = "contained mpiexec pbsnodes qdel qsig qstat qsub shifter shifterimg"
    assert files(made.overlay / "usr/local/bin") == commands.split()
    home = made.overlay / layer.HOME.lstrip("/")
    assert (home / "conda/bin/conda").exists()
    assert (home / "wrappers/bin/cc").exists()
    assert f'setenv("ROOT", "{layer.HOME}/empty")' in (made.modulepath / "env/8.lua").read_text()
    with pytest.raises(ValueError, match="warp in software"):
        build(software=dict(modules=["a"], provides={"a": ["warp"]}), folder=made.overlay.parent / "other")


def test_a_disk_of_each_node_is_read_in_the_scripts(build):
    scripts = {"job.sl": 'cp a /mnt/nvme/$USER/a\nexport CACHE=/tmp/$USER-1 B=$A/$USER\nls "/mnt/nvme/${USER}"\n'}
    made = build(scripts=scripts)
    assert made.paths == {"/mnt/nvme/{user}": None, prefix.ROOT: made.overlay.parent.parent}


# ---- packages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path) -> Path:
    """A folder with a wheel like mpi4py's and pip's form of its source; beside it two MPIs."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "mpi4py-4.1.2-py3-none-manylinux_2_5_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("mpi4py/__init__.py", "here = 1\nfrom . import _mpiabi\n")
        file.writestr("mpi4py/MPI.mpich.cpython.so", "for MPICH")
        file.writestr("mpi4py/MPI.openmpi.cpython.so", "for Open MPI")
        file.writestr("mpi4py-4.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.1.2\n")
        file.writestr("mpi4py-4.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        file.writestr("mpi4py-4.1.2.dist-info/RECORD", "")
    prefix.pack_source(wheel)
    (tmp_path / "mpi.h").write_text("int MPI_Init(int *, char ***);\nint MPI_Finalize(void);\n")
    (tmp_path / "mpi.c").write_text("int MPI_Init(int *a, char ***b) { return 0; }\nint MPI_Finalize(void) { return 0; }\n")
    for name, library in dict(mpich="libmpi.so.12", other="libmpi.so.40").items():
        (tmp_path / name).mkdir()
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", tmp_path / name / "libmpi.so", tmp_path / "mpi.c"]
        subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize(
    "mpicc, words",
    [
        ("cc -shared -I{0} -L{0}/mpich -Wl,--no-as-needed -lmpi", None),
        ("cc -shared -I{0} -L{0}/other -Wl,--no-as-needed -lmpi", "links another MPI than libmpi.so.12"),
        ("", "Cannot compile MPI programs"),
    ],
)
def test_mpi4py_is_built_with_the_compiler_that_is_named(wheels, mpicc, words):
    folder = wheels.parent
    link = folder / "bin/cc"  # the folder has no mpicc
    link.parent.mkdir()
    for name in ("cc", "as", "ld"):
        link.with_name(name).symlink_to(shutil.which(name))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index", f"--find-links={wheels}"]
    command += ["--no-deps", "--no-binary=mpi4py", f"--wheel-dir={folder / 'built'}", "mpi4py==4.1.2"]
    environ = dict(PATH=str(link.parent), HOME=str(folder), PIP_CONFIG_FILE=os.devnull)
    environ |= dict(MPICC=mpicc.format(folder)) if mpicc else {}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if words:
        assert result.returncode, result.stdout
        assert words in result.stdout + result.stderr
    else:
        assert not result.returncode, result.stdout + result.stderr
        (built,) = (folder / "built").iterdir()
        with zipfile.ZipFile(built) as file:
            assert file.read("mpi4py/MPI.cpython.so") == b"for MPICH"
            assert file.read("mpi4py/__init__.py") == b"here = 1\n"
            assert not any("openmpi" in path for path in file.namelist())

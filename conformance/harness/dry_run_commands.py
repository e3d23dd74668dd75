"""Stand-ins for the commands that a site's scripts call in a dry run. Each call is recorded; no job is submitted.

dry_run.py copies this file and makes a command of each name in COMMANDS. They answer as the real ones would when all goes well.
Each call leaves one file in $DRY_RUN/calls: its words, directory, environment, beginning and end.
"""

# Some hundred of these run in a test: what takes Python long to import is imported where it is needed.
import marshal
import os
import sys
import time

TOP = os.environ["DRY_RUN"]
with open(f"{TOP}/facts", "rb") as file:
    FACTS = marshal.load(file)  # noqa: S302
COMMANDS = """
srun mpiexec mpirun aprun scontrol squeue sacct sinfo sbatch scancel sbcast qsub qstat qdel qsig qalter pbsnodes
python python3 python3.11 python3.12 pip pip3 uv conda mamba micromamba conda-pack conda-unpack
singularity apptainer shifter shifterimg podman-hpc enroot
hostname getent ip sleep rm mktemp curl wget git mksquashfs cc CC make nvidia-smi rocm-smi xpu-smi nvcc crayenv module-call
"""
MINIMAL = ("SLURM", "DRY_RUN", "HOME", "USER")  # of the environment what `srun --export=NONE` leaves


def write(path: str, facts: dict) -> None:
    with open(f"{path}.new", "wb") as file:
        marshal.dump(facts, file)
    os.rename(f"{path}.new", path)


def runs(*words: str, environment: dict[str, str] | None = None) -> int:
    """The exit code of a command, as a shell has it."""
    try:
        process = os.posix_spawn(which(words[0]) or words[0], words, environment or os.environ)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return code if code >= 0 else 128 - code


def which(word: str) -> str | None:
    places = [word] if "/" in word else [f"{folder}/{word}" for folder in os.environ["PATH"].split(":")]
    return next((path for path in places if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(words, [*words[1:], ""], strict=True))


def split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The flags before a command, and the command: it begins at the first word that can be started."""
    flags: dict[str, str] = {}
    last = ""
    for place, word in enumerate(words):
        if word.startswith("-"):
            last, equals, value = word.partition("=")
            if not equals and not word.startswith("--") and len(word) > 2 and word[2:].isdecimal():
                last, value = word[:2], word[2:]
            flags[last] = value
        elif which(word):
            return flags, words[place:]
        elif last:
            flags[last] = word
    return flags, []


def first(flags: dict[str, str], *names: str, default: str = "") -> str:
    return next((flags[name] for name in names if flags.get(name)), default)


# ---- launchers ------------------------------------------------------------------------------------------------------


def launch(name: str, words: list[str]) -> int:
    """Starts each rank in turn, with the variables that this launcher sets."""
    flags, command = split(words)
    nodes, own = int(FACTS["nodes"]), os.environ.get
    if "--version" in flags or "-V" in flags:
        print("slurm 24.05.0" if name == "srun" else f"{name} 1.0")
        return 0
    if not command:
        print(f"{name}: no command among {words}", file=sys.stderr)
        return 1
    each = first(flags, "--ntasks-per-node", "--ppn", "-ppn", "--npernode", "-N" if name != "srun" else "")
    total = first(flags, "--ntasks", "-n", "-np", "--np")
    if name == "srun":
        nodes = int(first(flags, "--nodes", "-N", default=str(nodes)))
        total = total or (str(int(each) * nodes) if each else own("SLURM_NTASKS", "1"))
    elif name not in ("mpiexec", "mpirun", "aprun"):
        total = total or str(FACTS["ranks_per_node"] * nodes)
    total = total or str(int(each or 1) * nodes)
    per_node = int(each) if each else -(-int(total) // nodes)
    nodes = -(-int(total) // per_node)
    codes = []
    for rank in range(int(total) if FACTS["all_ranks"] else 1):
        environ = told_by(name, rank, int(total), per_node, nodes, flags)
        environ |= dict(DRY_RUN_NODE=str(rank // per_node), DRY_RUN_RANK=str(rank), DRY_RUN_RANKS=total)
        environ |= dict(DRY_RUN_PER_NODE=str(per_node), DRY_RUN_NODES=str(nodes))
        codes.append(runs(*command, environment=environ))
    return max(codes)


def told_by(name: str, rank: int, total: int, per_node: int, nodes: int, flags: dict[str, str]) -> dict[str, str]:
    environ = dict(os.environ)
    local, node = rank % per_node, rank // per_node
    if name == "srun":
        if first(flags, "--export", default=environ.get("SLURM_EXPORT_ENV", "ALL")).startswith("NONE"):
            environ = {key: value for key, value in environ.items() if key.startswith(MINIMAL)} | dict(PATH="/usr/bin:/bin")
        shape = f"{per_node}(x{nodes})" if nodes > 1 else f"{per_node}"
        own: dict[str, int | str] = dict(PROCID=rank, LOCALID=local, NODEID=node, STEP_ID=0)
        own |= dict(STEP_NUM_TASKS=total, NTASKS=total, NPROCS=total)
        own |= dict(STEP_NUM_NODES=nodes, STEP_TASKS_PER_NODE=shape, TASKS_PER_NODE=shape, STEPID=0)
        environ |= {f"SLURM_{key}": str(value) for key, value in own.items()}
        environ["SLURMD_NODENAME"] = FACTS["hosts"][node]
        if variable := FACTS["device_environment"]:
            seen = FACTS["devices"] if "--gpus-per-task" not in flags else int(first(flags, "--gpus-per-task") or 1)
            if "--gpu-bind" in flags and FACTS["devices_visible"] < FACTS["devices"]:
                seen = FACTS["devices_visible"]
            environ[variable] = ",".join(map(str, range(seen)))
    elif name in ("mpiexec", "mpirun", "aprun"):
        own = dict(RANKID=rank, LOCAL_RANKID=local, LOCAL_SIZE=per_node, NODEID=node)
        environ |= {f"PALS_{key}": str(value) for key, value in own.items()}
        environ |= dict(PMI_RANK=str(rank), PMI_SIZE=str(total), MPI_LOCALRANKID=str(local), MPI_LOCALNRANKS=str(per_node))
    else:  # a launcher that nobody else knows: what site.toml says, but for what the job script has set
        values: dict[str, int | str] = dict(rank=rank, world_size=total, local_rank=local, local_world_size=per_node)
        values |= dict(node_rank=node)
        values |= dict(num_nodes=nodes, job_id=FACTS["job"], restart=FACTS["restarts"], master_addr=FACTS["hosts"][0])
        values |= dict(master_port=0, tasks_per_node=per_node if nodes == 1 else f"{per_node}(x{nodes})")
        told = {key: template.format(**values) for key, template in FACTS["launcher_environment"].items()}
        environ = told | {key: value for key, value in environ.items() if key not in told or "{master_" in told_as(key)}
    return environ


def told_as(variable: str) -> str:
    return FACTS["launcher_environment"].get(variable, "")


# ---- Python ---------------------------------------------------------------------------------------------------------


def python(name: str, words: list[str]) -> int:
    rest = words[
        next((place for place, word in enumerate(words) if word not in ("-B", "-E", "-I", "-P", "-s", "-S", "-u")), 0) :
    ]
    if not rest or rest[0] in ("-c", "-", "-V", "--version"):
        return real(words)
    if rest[0] == "-m":
        return run_module(rest[1], rest[2:])
    program = rest[0]
    if not os.path.isfile(program):
        print(f"{name}: can't open file {rest[0]!r}: [Errno 2] No such file or directory", file=sys.stderr)
        return 2
    return train(rest[1:]) if "DRY_RUN_RANK" in os.environ and os.path.basename(program).startswith("train") else 0


def run_module(module: str, arguments: list[str]) -> int:
    if module == "venv":
        return environment(next(word for word in reversed(arguments) if not word.startswith("-")))
    if module == "pip":
        return pip("pip", arguments)
    if module == "ddp_core.find_run":
        print(run_dir(arguments))
    return 0


def real(words: list[str]) -> int:
    """This machine's Python, for which there is a torch with nothing in it."""
    packages = f"{TOP}/packages:{TOP}/torch" if FACTS["torch"] or os.path.exists(f"{TOP}/has-torch") else f"{TOP}/packages"
    own = dict(PYTHONPATH=packages, PYTHONDONTWRITEBYTECODE="1", DRY_RUN_PYTHON=sys.argv[1])
    return runs(FACTS["python"], *words, environment=os.environ | own)


def environment(prefix: str) -> int:
    """A virtual environment: commands, and a folder for packages."""
    for below in ("bin", "lib/python3.12/site-packages"):
        os.makedirs(f"{prefix}/{below}", exist_ok=True)
    for name in ("python", "python3", "pip", "conda-pack", "conda-unpack"):
        with open(f"{TOP}/bin/{name}") as file, open(f"{prefix}/bin/{name}", "w") as copy:
            copy.write(file.read())
        os.chmod(f"{prefix}/bin/{name}", 0o755)
    with open(f"{prefix}/bin/activate", "w") as file:
        file.write(f"export VIRTUAL_ENV='{prefix}' PATH='{prefix}/bin':$PATH\n")
    return 0


def run_dir(arguments: list[str]) -> str:
    found = "runs/digits"
    for flag, value in pairs(arguments):
        if flag in ("--run-dir", "--new-run-dir"):
            found = value
        elif flag.startswith(("--run-dir=", "--new-run-dir=")):
            found = flag.partition("=")[2]
    return found


def train(arguments: list[str]) -> int:
    """A rank that trains: rank 0 writes what a job script may read, and all end with the code that the dry run asks for."""
    code = int(FACTS["code"])
    if os.environ["DRY_RUN_RANK"] == "0":
        folder = run_dir(arguments)
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/run.jsonl", "a") as file:
            file.write('{"kind":"start","step":0,"epoch":0}\n')
            file.write(f'{{"kind":"end","exit_code":{code},"step":5,"epoch":1}}\n')
    return code


def pip(name: str, words: list[str]) -> int:
    if words[:1] == ["list"] or words[:1] == ["freeze"] or "list" in words[:3]:
        print("torch==2.13.0")
    if "install" in words and any(word.startswith("torch") for word in words):
        open(f"{TOP}/has-torch", "w").close()
    return 0


# ---- schedulers -----------------------------------------------------------------------------------------------------


def scontrol(name: str, words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(FACTS["hosts"]))
    elif words[:2] == ["show", "job"]:
        print(f"JobId={FACTS['job']} JobName=train\n   JobState=RUNNING Restarts={FACTS['restarts']} Requeue=1")
        print("   RunTime=00:00:10 TimeLimit=01:00:00 OverSubscribe=NO")
    return 0


def squeue(name: str, words: list[str]) -> int:
    print("RUNNING")
    return 0


def sbatch(name: str, words: list[str]) -> int:
    print("777" if "--parsable" in words else "Submitted batch job 777")
    return 0


def qsub(name: str, words: list[str]) -> int:
    print("777.server")
    return 0


def qstat(name: str, words: list[str]) -> int:
    told = dict(Job_Name="train", job_state="R", Account_Name="account", run_count=1)
    told |= {"resources_used.walltime": "00:00:10", "Resource_List.walltime": "01:00:00"}
    told |= {"Resource_List.select": FACTS["nodes"], "Resource_List.place": "scatter"}
    print(f"Job Id: {FACTS['job']}.server")
    print("\n".join(f"    {key} = {value}" for key, value in told.items()))
    return 0


# ---- the rest -------------------------------------------------------------------------------------------------------


def container(name: str, words: list[str]) -> int:
    """Starts what is to be started in the image. Variables with the runtime's prefix are set there without it."""
    if words[:1] and words[0] in ("pull", "build", "inspect", "import"):
        for word in words[1:]:
            if word.endswith((".sif", ".sqsh")):
                open(word, "a").close()
        return 0
    start = next((place for place, word in enumerate(words) if word in ("exec", "run", "shell")), -1)
    rest = words[start + 1 :]
    images = [
        place for place, word in enumerate(rest) if word.endswith((".sif", ".sqsh", ".sqfs")) and not word.startswith("-")
    ]
    _, command = split(rest[images[0] + 1 :] if images else rest)
    if images and not os.path.exists(rest[images[0]]):
        print(f"FATAL: could not open image {rest[images[0]]}", file=sys.stderr)
        return 255
    environ = dict(os.environ)
    for key, value in os.environ.items():
        for prefix in ("SINGULARITYENV_", "APPTAINERENV_"):
            if key.startswith(prefix):
                environ[key.removeprefix(prefix)] = value
    environ["DRY_RUN_IMAGE"] = rest[images[0]] if images else first(split(words)[0], "--image", "-i")
    if not command:
        return 0
    return runs(*command, environment=environ)


def shifterimg(name: str, words: list[str]) -> int:
    print(f"system docker READY 0123456789 2026-01-01T00:00:00 {FACTS['image']}")
    return 0


def conda(name: str, words: list[str]) -> int:
    flags, _ = split(words)
    for flag, folder in pairs(words):
        if flag in ("-p", "--prefix"):
            return environment(folder)
    if prefix := flags.get("--prefix"):
        return environment(prefix)
    return 0


def hostname(name: str, words: list[str]) -> int:
    node = int(os.environ.get("DRY_RUN_NODE", "0"))
    print(f"10.0.0.{node + 1}" if {"-i", "-I", "--ip-address"} & {*words} else FACTS["hosts"][node])
    return 0


def getent(name: str, words: list[str]) -> int:
    host = words[-1].partition(".")[0]
    node = FACTS["hosts"].index(host) if host in FACTS["hosts"] else int(os.environ.get("DRY_RUN_NODE", "0"))
    print(f"10.0.0.{node + 1} {words[-1]}")
    return 0


def ip(name: str, words: list[str]) -> int:
    node = int(os.environ.get("DRY_RUN_NODE", "0"))
    for number, interface in enumerate(FACTS["interfaces"] or ["eth0"], 2):
        print(f"{number}: {interface}    inet 10.0.0.{node + 1}/16 scope global {interface}")
    return 0


def sleep(name: str, words: list[str]) -> int:
    time.sleep(0.01)
    return 0


def rm(name: str, words: list[str]) -> int:
    """Removes within the dry run's folder only; dry_run.py judges the rest."""
    flags = [word for word in words if word.startswith("-")]
    kept = [word for word in words if word not in flags and inside(word)]
    return runs("/bin/rm", *flags, "--", *kept) if kept else 0


def inside(path: str) -> bool:
    """Strictly below one of the folders that a script may write to."""
    folder, name = os.path.split(os.path.abspath(path))
    found = os.path.join(os.path.realpath(folder), name)
    return found.startswith((f"{TOP}/home/", f"{TOP}/root/", f"{TOP}/sites/"))


def mktemp(name: str, words: list[str]) -> int:
    return runs("/bin/mktemp", *words, environment=os.environ | dict(TMPDIR=f"{TOP}/root/tmp"))


def download(name: str, words: list[str]) -> int:
    for flag, value in pairs(words):
        if flag in ("-o", "--output", "-O"):
            open(value, "a").close()
    return 0


def module_call(name: str, words: list[str]) -> int:
    """What the shell function `module` evaluates."""
    words = [word for word in words if not word.startswith("-")]
    if words[:1] in (["load"], ["add"], ["switch"], ["swap"]):
        for module in words[1:]:
            for key, value in FACTS["modules"].get(module, {}).items():
                print(f"export {key}='{value}'")
        loaded = [*filter(None, os.environ.get("LOADEDMODULES", "").split(":")), *words[1:]]
        print(f"export LOADEDMODULES='{':'.join(loaded)}'")
    elif words[:1] in (["purge"], ["reset"]):
        print("unset LOADEDMODULES")
    return 0


def nothing(name: str, words: list[str]) -> int:
    return 0


ANSWERS = dict.fromkeys(("srun", "mpiexec", "mpirun", "aprun"), launch)
ANSWERS |= dict.fromkeys(("python", "python3", "python3.11", "python3.12"), python)
ANSWERS |= dict.fromkeys(("singularity", "apptainer", "shifter", "podman-hpc", "enroot"), container)
ANSWERS |= dict(pip=pip, pip3=pip, conda=conda, mamba=conda, micromamba=conda, scontrol=scontrol, squeue=squeue)
ANSWERS |= dict(sbatch=sbatch, qsub=qsub, qstat=qstat, shifterimg=shifterimg, hostname=hostname, getent=getent, ip=ip)
ANSWERS |= dict(sleep=sleep, rm=rm, mktemp=mktemp, curl=download, wget=download)
ANSWERS |= {"module-call": module_call}


def main(name: str, words: list[str]) -> int:
    file = f"{TOP}/calls/{time.time_ns()}-{os.getpid()}"
    call = dict(command=name, path=sys.argv[1], words=words, folder=os.getcwd(), environ=dict(os.environ), began=time.time_ns())
    write(file, call)
    code = ANSWERS.get(name, launch if name == FACTS["launcher"] else nothing)(name, words)
    write(file, call | dict(ended=time.time_ns(), code=code))
    return code


if __name__ == "__main__":
    sys.exit(main(os.path.basename(sys.argv[1]), sys.argv[2:]))

"""Stand-ins for the commands that a site's scripts call in a dry run. Each call is recorded; no job is submitted.

dry_run.py compiles this file, and makes a command of each name in COMMANDS. They answer as real commands that succeed.
Each call leaves one file in $DRY_RUN/calls: its words, directory, environment, start and end.
"""

# A test runs some hundred of these, so slow imports stand where they are needed.
import _signal  # type: ignore[import-not-found]  # signal takes longer to import than all else here
import marshal
import os
import sys
import time

TOP = os.environ["DRY_RUN"]
with open(f"{TOP}/settings", "rb") as file:
    SETTINGS = marshal.load(file)  # noqa: S302
COMMANDS = """
srun mpiexec mpirun aprun torchrun scontrol squeue sacct sinfo sbatch scancel sbcast qsub qstat qdel qsig qalter pbsnodes
python python3 python3.11 python3.12 pip pip3 uv conda mamba micromamba conda-pack conda-unpack
singularity apptainer shifter shifterimg podman-hpc enroot
hostname getent ip sleep rm mktemp curl wget git mksquashfs cc CC g++ cmake make nvidia-smi rocm-smi xpu-smi nvcc crayenv
module-call numactl uuidgen
"""
USR1, USR2, TERM, KILL = 10, 12, 15, 9
NOTES: dict = {}  # what this call has seen, for its record
PATIENCE = 5.0  # seconds for which a rank waits for a signal
DEAF = 0.5  # seconds after a user's stop for which it ignores signals
MOST_LAUNCHES = 12  # a job that launches more often would never end
HANG = 10.0  # seconds for which a hanging command ignores signals
FASTER = 20  # divides the seconds of `timeout`
MINIMAL = ("SLURM", "DRY_RUN", "HOME", "USER")  # prefixes of variables that survive `srun --export=NONE`, or a list without ALL


def write(path: str, record: dict) -> None:
    with open(f"{path}.new", "wb") as file:
        marshal.dump(record, file)
    os.rename(f"{path}.new", path)


def runs(*words: str, environment: dict[str, str] | None = None, handed_on: str = "") -> int:
    """The exit code of a command, as a shell has it. The command itself gets signals, unless they are ignored here.

    handed_on: who gets a USR1 that this process gets: the "command", or the "step", which is all processes below it, too."""
    for number in (USR1, USR2, TERM):
        if _signal.getsignal(number) == _signal.SIG_DFL:
            _signal.signal(number, lambda *_: None)
    try:
        process = os.posix_spawn(which(words[0]) or words[0], words, environment or os.environ)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        return 127
    earlier = _signal.getsignal(USR1)
    if handed_on:
        _signal.signal(USR1, lambda *_: tell([process, *(below(process) if handed_on == "step" else [])]))
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    if handed_on:
        _signal.signal(USR1, _signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    _signal.signal(USR1, earlier)  # restore: ranks start one after another, and each gets the signal
    return code if code >= 0 else 128 - code


def tell(processes: list[int], number: int = USR1) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:  # it has ended
            continue


def which(word: str) -> str | None:
    places = [word] if "/" in word else [f"{folder}/{word}" for folder in os.environ["PATH"].split(":")]
    return next((path for path in places if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(words, [*words[1:], ""], strict=False))  # [] gives []


def split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The flags before a command, and the command, which begins at the first word that is executable."""
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


def value_of(words: list[str], *names: str) -> str:
    """The last value after one of these flags, or behind its =; "" if there is none."""
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    return next((value for flag, value in reversed(pairs(parts)) if flag in names), "")


def first(flags: dict[str, str], *names: str, default: str = "") -> str:
    return next((flags[name] for name in names if flags.get(name)), default)


# ---- launchers ------------------------------------------------------------------------------------------------------


def launch(name: str, words: list[str]) -> int:
    """Start the ranks one after another, with the variables that this launcher sets."""
    flags, command = split(words)
    nodes, own = int(SETTINGS["nodes"]), os.environ.get
    if "--version" in flags or "-V" in flags:
        print("slurm 24.05.0" if name == "srun" else f"{name} 1.0")
        return 0
    if not command:
        print(f"{name}: no command among {words}", file=sys.stderr)
        return 1
    named = first(flags, "--hostfile", "-hostfile", "-f")
    if file := named or (own("PBS_NODEFILE") if name != "srun" else None):
        with open(file) as hosts:
            NOTES["hosts"] = [host.partition(".")[0] for host in hosts.read().split()]
    if os.path.basename((above := command_line(os.getppid()))[0]) == "timeout":
        NOTES["timeout"] = above[1 : above.index(name)] if name in above else above[1:]
    if launches() > MOST_LAUNCHES:
        os.kill(job_script(), KILL)
    each = first(flags, "--ntasks-per-node", "--ppn", "-ppn", "--npernode", "-N" if name != "srun" else "")
    total = first(flags, "--ntasks", "-n", "-np", "--np")
    if name == "srun":
        nodes = int(first(flags, "--nodes", "-N", default=str(nodes)))
        total = total or (str(int(each) * nodes) if each else own("SLURM_NTASKS", "1"))
    elif name not in ("mpiexec", "mpirun", "aprun"):
        total = total or str(SETTINGS["ranks_per_node"] * nodes)
    count = int(total or int(each or 1) * nodes)
    nodes = -(-count // int(each)) if each else min(nodes, count)
    # In blocks: of three ranks on two nodes, the first node has two.
    sizes = [min(int(each), count - node * int(each)) if each else (count + nodes - 1 - node) // nodes for node in range(nodes)]
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    if "hosts" in NOTES and not named:  # the first of the nodes that PBS lists, whether up or down
        NOTES["hosts"] = NOTES["hosts"][: len(sizes)]
    os.environ["DRY_RUN_LAUNCHER"] = str(os.getpid())
    os.environ["DRY_RUN_ON"] = first(flags, "-w", "--nodelist", "-r", "--relative", "--host", "-host", "--hosts")
    codes = []
    # srun signals each process of the step, torchrun's ranks and processes in an image, too, as slurmstepd does.
    handed_on = "command" if of_open_mpi() else "step" if SETTINGS["to_batch"] else ""
    for rank in range(count if SETTINGS["all_ranks"] else 1):
        environ = rank_environment(name, rank, places[rank], sizes, flags)
        environ |= placed(rank, count, places[rank], sizes)
        codes.append(runs(*command, environment=environ, handed_on=handed_on))
    return max(codes)


def of_open_mpi() -> bool:
    """True for Open MPI's launcher, which passes USR1 on to its ranks: https://docs.open-mpi.org/ (mpirun, signals)."""
    return any(variable.startswith("OMPI_") for variable in SETTINGS["launcher_environment"])


def placed(rank: int, count: int, place: tuple[int, int], sizes: list[int]) -> dict[str, str]:
    node, local = place
    variables = dict(RANK=rank, RANKS=count, NODE=node, LOCAL=local, PER_NODE=sizes[node], NODES=len(sizes))
    return {f"DRY_RUN_{name}": str(value) for name, value in variables.items()}


def launches() -> int:
    """The number of launches in this run, with this one."""
    with open(f"{TOP}/calls/launches", "a") as file:
        file.write(".")
        return file.tell()


def rank_environment(name: str, rank: int, place: tuple[int, int], sizes: list[int], flags: dict[str, str]) -> dict[str, str]:
    """The environment of a rank. sizes: the ranks of each node."""
    environ = dict(os.environ)
    (node, local), nodes, total = place, len(sizes), sum(sizes)
    per_node = sizes[node]
    if name == "srun":
        handed = listed(first(flags, "--export", default=environ.get("SLURM_EXPORT_ENV", "ALL")))
        if "ALL" not in map(str.upper, handed):
            kept = {key: value for key, value in environ.items() if key.startswith(MINIMAL) or key in handed}
            environ = dict(PATH="/usr/bin:/bin") | kept
        environ |= {key: value for key, value in handed.items() if value is not None}
        even = {*sizes} == {per_node}
        shape = ",".join(map(str, sizes)) if not even else f"{per_node}(x{nodes})" if nodes > 1 else f"{per_node}"
        own: dict[str, int | str] = dict(PROCID=rank, LOCALID=local, NODEID=node, STEP_ID=0)
        own |= dict(STEP_NUM_TASKS=total, NTASKS=total, NPROCS=total)
        own |= dict(STEP_NUM_NODES=nodes, STEP_TASKS_PER_NODE=shape, TASKS_PER_NODE=shape, STEPID=0)
        environ |= {f"SLURM_{key}": str(value) for key, value in own.items()}
        environ["SLURMD_NODENAME"] = SETTINGS["hosts"][node]
        if variable := SETTINGS["device_environment"]:
            # With --gpus-per-task or --gpu-bind, a rank sees its own devices only; otherwise all. srun --help
            of_task = first(flags, "--gpus-per-task", default=environ.get("SLURM_GPUS_PER_TASK", ""))
            bind = flags.get("--gpu-bind", "per_task" if of_task else "none")
            given = os.environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2] or SETTINGS["asked"]
            seen = int(given or SETTINGS["devices"]) if bind == "none" else int(of_task.rpartition(":")[2] or 1)
            environ[variable] = ",".join(map(str, range(seen)))
    elif of_open_mpi():
        # Despite its name, NODE_RANK is a rank's number among all jobs' ranks on its node.
        own = dict(RANK=rank, SIZE=total, LOCAL_RANK=local, LOCAL_SIZE=per_node, NODE_RANK=local)
        environ |= {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in own.items()}
    elif name in ("mpiexec", "mpirun", "aprun"):
        own = dict(RANKID=rank, LOCAL_RANKID=local, LOCAL_SIZE=per_node, NODEID=node)
        environ |= {f"PALS_{key}": str(value) for key, value in own.items()}
        environ |= dict(PMI_RANK=str(rank), PMI_SIZE=str(total), MPI_LOCALRANKID=str(local), MPI_LOCALNRANKS=str(per_node))
        environ |= dict(PMI_LOCAL_RANK=str(local), PMI_LOCAL_SIZE=str(per_node))
    else:  # another launcher: site.toml's variables, except those that the job script has set
        values: dict[str, int | str] = dict(rank=rank, world_size=total, local_rank=local, local_world_size=per_node)
        values |= dict(node_rank=node)
        values |= dict(num_nodes=nodes, job_id=SETTINGS["job"], restart=SETTINGS["restarts"], master_addr=SETTINGS["hosts"][0])
        values |= dict(master_port=0, tasks_per_node=per_node if nodes == 1 else f"{per_node}(x{nodes})")
        templates = SETTINGS["launcher_environment"]
        kept = {key: value for key, value in environ.items() if key not in templates or "{master_" in templates[key]}
        environ = {key: template.format(**values) for key, template in templates.items()} | kept
    return environ


def listed(text: str) -> dict[str, str | None]:
    """The words of srun's --export, each with its value if it has one. In quotes, a value may contain commas."""
    parts = [part.replace(",", "\0") if number % 2 else part for number, part in enumerate(text.split("'"))]
    words = [word.replace("\0", ",").partition("=") for word in "".join(parts).split(",")]
    return {name: value if equals else None for name, equals, value in words}


# Flags of torchrun without a value. python -m torch.distributed.run --help
BARE = ("--standalone", "--no-python", "-m", "--module", "--run-path", "--virtual-local-rank")


def torchrun(name: str, words: list[str]) -> int:
    """Start this node's ranks one after another. The first word that belongs to no flag is the script's name."""
    flags, rest = dict[str, str](), [*words]
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        flag = "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag
        flags[flag] = value if equals or flag in BARE or not rest else rest.pop(0)
    if not rest:
        print("torchrun: error: the following arguments are required: training_script", file=sys.stderr)
        return 2
    each = first(flags, "--nproc-per-node", default="1")
    size = int(each if each.isdecimal() else SETTINGS["devices"])  # "gpu", "auto": as many as it sees, not as the job asked for
    nodes = int(first(flags, "--nnodes", default="1").rpartition(":")[2])
    node, sizes = int(os.environ.get("DRY_RUN_NODE", "0")), [size] * nodes
    host, _, port = first(flags, "--rdzv-endpoint", default="localhost:29400").rpartition(":")
    own: dict[str, object] = dict(WORLD_SIZE=size * nodes, LOCAL_WORLD_SIZE=size, GROUP_RANK=node)
    own |= dict(MASTER_ADDR=host, MASTER_PORT=port)
    own |= dict(TORCHELASTIC_RUN_ID=first(flags, "--rdzv-id"), TORCHELASTIC_RESTART_COUNT=0)
    own |= dict(TORCHELASTIC_USE_AGENT_STORE=True)
    folder = os.path.dirname(sys.argv[1])  # torchrun starts the script with its own Python, not with that of PATH
    beside_it = f"{folder}/python" if os.path.exists(f"{folder}/activate") else "python"
    python = os.environ.get("DRY_RUN_PYTHON", beside_it)
    module = ["-m"] if {"-m", "--module"} & {*flags} else []
    command = rest if "--no-python" in flags else [python, "-u", *module, *rest]
    codes = []
    for local in range(size if SETTINGS["all_ranks"] else 1):
        rank = node * size + local
        exported = own | dict(RANK=rank, LOCAL_RANK=local) | placed(rank, size * nodes, (node, local), sizes)
        codes.append(runs(*command, environment=os.environ | {key: str(value) for key, value in exported.items()}))
    return max(codes)


# ---- Python ---------------------------------------------------------------------------------------------------------


def python(name: str, words: list[str]) -> int:
    prefix = os.path.dirname(os.path.dirname(sys.argv[1]))
    of_image, own = os.path.exists(f"{prefix}/.has-image"), os.path.exists(f"{prefix}/bin/activate")
    if own and of_image != ("DRY_RUN_IMAGE" in os.environ):  # a link to a Python on the other side
        print(f"{sys.argv[1]}: cannot execute: required file not found", file=sys.stderr)
        return 127
    rest = [*words]
    while rest and rest[0] in ("-B", "-E", "-I", "-P", "-s", "-S", "-u"):
        rest.pop(0)
    if not rest or rest[0] in ("-c", "-", "-V", "--version"):
        return real(words)
    if rest[0] == "-m" and os.path.isfile(file := f"{rest[1].replace('.', '/')}.py"):
        rest[:2] = [file]
    elif rest[0] == "-m":
        return run_module(rest[1], rest[2:])
    program = rest[0]
    if not os.path.isfile(program):
        print(f"{name}: can't open file {rest[0]!r}: [Errno 2] No such file or directory", file=sys.stderr)
        return 2
    if os.path.basename(program).startswith("train"):
        if SETTINGS["fails"] == "one run" and not os.path.exists(f"{TOP}/calls/lost"):
            open(f"{TOP}/calls/lost", "w").close()
            os.kill(os.getpid(), _signal.SIGKILL)
        return train(rest[1:]) if "DRY_RUN_RANK" in os.environ else 0
    return beside(program, words)


def beside(program: str, words: list[str]) -> int:
    """Run a program that is no training, if it is the site's own: torchrun's agent, or a writer of metrics."""
    if SETTINGS["fails"] == "beside" and "DRY_RUN_RANK" not in os.environ:
        _signal.signal(TERM, _signal.SIG_IGN)
        time.sleep(10**6)
    if not (os.path.realpath(program).startswith(f"{TOP}/sites/") and program.endswith(".py")):
        return 0
    return real(words, alone="DRY_RUN_LAUNCHER" not in os.environ)


def run_module(module: str, arguments: list[str]) -> int:
    if module == "venv":
        return environment(folder_of_venv(["venv", *arguments], "--prompt"))
    if module == "pip":
        return pip("pip", arguments)
    if module == "torch.distributed.run":
        return runs("torchrun", *arguments, environment=os.environ | dict(DRY_RUN_PYTHON=sys.argv[1]))
    if module == "ddp_core.find_run":
        if not os.path.exists(f"{TOP}/sites/.has-core"):
            print(f"{sys.argv[1]}: No module named ddp_core", file=sys.stderr)
            return 1
        print(run_dir(arguments))
    return 0


def real(words: list[str], alone: bool = False) -> int:
    """Run this machine's Python, with empty stand-ins for installed packages. alone: it replaces this process, and so keeps
    the PID that a script has noted."""
    own = os.path.exists(f"{os.path.dirname(sys.argv[1])}/activate")  # only an environment's Python sees its packages
    torch = SETTINGS["torch"] or SETTINGS["fails"] == "another torch" or (own and os.path.exists(f"{TOP}/sites/.has-torch"))
    folders = {"old-torch": SETTINGS["fails"] == "old torch"} | dict(torch=torch)
    folders |= {"core-of": os.path.exists(f"{TOP}/sites/.has-core"), "packages": True}
    variables = dict(
        PYTHONPATH=":".join(f"{TOP}/{name}" for name, present in folders.items() if present),
        PYTHONDONTWRITEBYTECODE="1",
        DRY_RUN_PYTHON=sys.argv[1],
        DRY_RUN_FAILS=SETTINGS["fails"],
        DRY_RUN_RESTARTS=str(SETTINGS["restarts"]),
        DRY_RUN_DEVICES=str(SETTINGS["devices"]),
    )
    if alone:
        os.execve(SETTINGS["python"], [SETTINGS["python"], *words], os.environ | variables)
    return runs(SETTINGS["python"], *words, environment=os.environ | variables)


def packages_of(python: str) -> str:
    """The site-packages of this Python's virtual environment."""
    return f"{os.path.dirname(os.path.dirname(os.path.abspath(python)))}/lib/python3.12/site-packages"


def environment(prefix: str, of_image: bool = "DRY_RUN_IMAGE" in os.environ) -> int:
    """Make a virtual environment: commands, and a folder for packages. of_image: from a Python that only containers have."""
    for below in ("bin", "lib/python3.12/site-packages"):
        os.makedirs(f"{prefix}/{below}", exist_ok=True)
    for name in ("python", "python3", "pip", "torchrun", "conda-pack", "conda-unpack"):
        with open(f"{TOP}/bin/{name}") as file, open(f"{prefix}/bin/{name}", "w") as copy:
            copy.write(file.read())
        os.chmod(f"{prefix}/bin/{name}", 0o777 & ~int(umask(), 8))
    with open(f"{prefix}/bin/activate", "w") as file:
        file.write(f"export VIRTUAL_ENV='{prefix}' PATH='{prefix}/bin':$PATH\n")
    if of_image:
        open(f"{prefix}/.has-image", "w").close()
    return 0


def folder_of_venv(words: list[str], *valued: str) -> str:
    """The folder that venv is given, before, between or behind its options; "" if none. valued: options that take a value."""
    named = [word for before, word in pairs(words) if word and not word.startswith("-") and before not in valued]
    return named[-1] if named else ""


def run_dir(arguments: list[str]) -> str:
    return value_of(arguments, "--run-dir", "--new-run-dir") or "runs/digits"


def train(arguments: list[str]) -> int:
    """Train in a rank: rank 0 writes what a job script may read. All end with the dry run's code."""
    code = int(SETTINGS["code"])
    own, script = ([os.readlink(f"/proc/{process}/fd/{number}") for number in (1, 2)] for process in ("self", job_script()))
    NOTES["apart"] = own != script
    NOTES["missing"] = [name for name, value in os.environ.items() if value.startswith(f"{TOP}/") and not os.path.exists(value)]
    with open("/proc/self/status") as file:
        NOTES["ignored"] = int(file.read().partition("SigIgn:")[2].split()[0], 16)
    NOTES["umask"] = umask()
    with open("/proc/self/limits") as file:
        NOTES["limits"] = file.read()
    if os.environ["DRY_RUN_RANK"] == "0" and SETTINGS["fails"] != "start":
        for process in programs_beside():
            hears(process)
        if SETTINGS["event"] not in ("", "pause") and not heard(SETTINGS["event"]):
            code = 1
        folder, began = run_dir(arguments), 0 if SETTINGS["progress"] else 5
        os.makedirs(folder, exist_ok=True)
        if "--fresh" in arguments and os.path.exists(f"{folder}/run.jsonl"):
            os.replace(f"{folder}/run.jsonl", f"{folder}/run.jsonl.old")
        with open(f"{folder}/run.jsonl", "a") as file:
            file.write(f'{{"kind":"start","step":{began},"epoch":{began and 1},"config":{{}}}}\n')
            for step in (began, began + 1) if SETTINGS["progress"] else ():
                file.write(f'{{"kind":"step","step":{step},"epoch":{began and 1},"loss":{step}.5,"grad_norm":{step}.25}}\n')
            if SETTINGS["progress"]:
                file.write(f'{{"kind":"epoch","step":{began + 2},"epoch":{began and 1},"eval_loss":{began + 1}.75}}\n')
            exit_code = 75 if SETTINGS["fails"] == "image" else code  # has saved; the image is gone before it exits
            if exit_code <= 128:  # a killed run writes no end record
                file.write(f'{{"kind":"end","exit_code":{exit_code},"step":5,"epoch":1}}\n')
    return code


def umask() -> str:
    with open("/proc/self/status") as file:
        return file.read().partition("Umask:")[2].split()[0]


def hears(process: int) -> None:
    """Wait until a program beside the ranks handles SIGTERM, or has ended: a real training lasts longer than its imports."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            with open(f"/proc/{process}/status") as file:
                state = file.read()
        except OSError:  # it has ended
            return
        if "State:\tZ" in state or int(state.partition("SigCgt:")[2].split()[0], 16) & 1 << TERM - 1:
            return
        time.sleep(0.02)


def heard(event: str) -> bool:
    """True if a signal reaches this rank when the event happens: a warning to all ranks, a user's stop, the limit."""
    signals: list[int] = []
    if event == "stop":  # this rank still starts, so a single signal is lost
        for number in (USR1, TERM):
            _signal.signal(number, _signal.SIG_IGN)
        os.system(SETTINGS["stop"])
        time.sleep(DEAF)
    for number in (USR1, USR2, TERM):
        _signal.signal(number, lambda got, _: signals.append(got))
    of_ranks = below(int(os.environ["DRY_RUN_LAUNCHER"]))
    if event == "another's stop":
        os.system(SETTINGS["another_s_stop"])
    if event == "warning" and SETTINGS["to_batch"]:  # --signal=B:USR1, which the script's trap passes on
        os.kill(job_script(), USR1)
    elif event == "warning":  # to every process of the ranks; a program beside them must survive it, too
        tell([*{*of_ranks, *programs_beside()}])
    elif event == "asked":  # by scancel --signal=USR2: where the ranks are
        tell(of_ranks, USR2)
    elif event == "cancelled":  # scancel signals the ranks, and here also the script; qdel signals the script
        tell([job_script(), *(of_ranks if SETTINGS["scheduler"] == "slurm" else [])], TERM)
    until = time.monotonic() + PATIENCE
    while not signals and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1 if event in ("warning", "asked") else 0)  # the other processes must die, too
    NOTES.update(signals=signals)
    return bool(signals) != (event == "another's stop")


def parent(process: int | str) -> int:
    with open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def job_script() -> int:
    """The process of the script that this dry run has started."""
    process = os.getpid()
    while (above := parent(process)) not in (SETTINGS["suite"], 1, 0):
        process = above
    return process


def below(process: int) -> list[int]:
    """The processes that this one has started, and those that they have started."""
    processes, parents = [process], {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                parents[int(name)] = parent(name)
            except OSError:  # it has ended
                continue
    for each in processes:
        processes += [child for child, above in parents.items() if above == each]
    return processes[1:]


def programs_beside() -> list[int]:
    """The site's programs beside the ranks, for example a writer of metrics. Wait for one that is still starting."""
    launcher, until = int(os.environ["DRY_RUN_LAUNCHER"]), time.monotonic() + PATIENCE
    while True:
        of_ranks = {launcher, *below(launcher)}
        others = {process: command_line(process) for process in below(job_script()) if process not in of_ranks}
        programs = {process: words for process, words in others.items() if is_program(words)}
        on_their_way = [process for process, words in programs.items() if stands_in(words) and not below(process)]
        if not on_their_way or SETTINGS["fails"] == "beside" or time.monotonic() > until:
            return [process for process, words in programs.items() if not stands_in(words)]
        time.sleep(0.02)


def command_line(process: int) -> list[str]:
    try:
        with open(f"/proc/{process}/cmdline") as file:
            return file.read().split("\0")
    except OSError:  # it has ended
        return [""]


def is_program(words: list[str]) -> bool:
    """True for a Python program of the site, or a stand-in that will start one."""
    return any(word.endswith(".py") for word in (words[5:] if stands_in(words) else words[1:3]))


def stands_in(words: list[str]) -> bool:
    """True if the process runs this file, as a command of a dry run."""
    return f"{TOP}/commands.pyc" in words[:4]


def leave(folder: str) -> None:
    """Write the file that a command leaves in its default folder, unless it was given another, or none."""
    os.makedirs(folder, exist_ok=True)
    open(f"{folder}/left-by-{os.path.basename(sys.argv[1])}", "a").close()


def leave_cache(name: str, without: str) -> None:
    """The same in the cache of pip or uv, unless a variable says to do without."""
    if without in ("0", "false", ""):
        base = os.environ.get("XDG_CACHE_HOME") or f"{os.environ['HOME']}/.cache"
        leave(os.environ.get(f"{name.upper()}_CACHE_DIR") or f"{base}/{name}")


def pip(name: str, words: list[str]) -> int:
    own = os.environ.get
    if words[:1] == ["list"] or words[:1] == ["freeze"] or "list" in words[:3]:
        print("" if {"--local", "-l"} & {*words} else "torch==2.13.0+of.this.machine")  # a venv sees it without having it
    if os.path.isdir(packages := packages_of(sys.argv[1])):
        NOTES["there"] = [each for each in os.listdir(packages) if each.startswith("ddp_core-") and "--target" not in words]
    if "install" in words or "download" in words:
        for kind, names in dict(constraints=("-c", "--constraint"), requirements=("-r", "--requirement")).items():
            if os.path.exists(path := value_of(words, *names)):
                with open(path) as file:
                    NOTES[kind] = file.read()
        what, _, package = SETTINGS["fails"].partition(" ")
        if what == "pip" and package in ("", *words):
            print("ERROR: Could not find a version that satisfies the requirement", file=sys.stderr)
            return 1
        if "--no-cache-dir" not in words:
            leave_cache("pip", own("PIP_NO_CACHE_DIR", "0"))
    if "download" in words:
        sources(words)
    elif "install" in words and os.path.isdir(packages_of(sys.argv[1])):
        asked = [word for word in words if "==" in word or os.path.isdir(word)]
        for word in [*asked, *NOTES.get("requirements", "").split()[:1]]:
            open(f"{packages_of(sys.argv[1])}/{os.path.basename(word.rstrip('/'))}.installed", "w").close()
    for package in ("torch", "core"):
        if "install" in words and any(os.path.basename(word.rstrip("/")).startswith(package) for word in words):
            open(f"{TOP}/sites/.has-{package}", "w").close()
    return 0


def uv(name: str, words: list[str]) -> int:
    """Call Python's venv and pip, so that these are recorded; without pip's variables, and with uv's own cache."""
    own = os.environ.get
    of_python = ("--python", "-p")
    valued = (*of_python, "--prompt", "--link-mode", "--cache-dir", "--index-url", "--default-index", "--exclude-newer")
    while words and words[0].startswith("-"):  # flags of all uv commands
        words = words[1 + (words[0] in valued) :]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environ |= dict(PIP_NO_CACHE_DIR="1", PYTHONNOUSERSITE="1")
    if words[:1] == ["venv"]:
        return runs("python3", "-m", "venv", folder_of_venv(words, *valued) or ".venv", environment=environ)
    if words[:1] == ["pip"]:
        if not {"--no-cache", "-n"} & {*words}:
            leave_cache("uv", own("UV_NO_CACHE", "0"))
        python = value_of(words, *of_python) or own("VIRTUAL_ENV", ".venv")
        python += "/bin/python" if os.path.isdir(python) else ""
        rest = [word for before, word in pairs(["", *words[1:]]) if word and not {before, word} & {*of_python}]
        return runs(python, "-m", "pip", *rest, environment=environ)
    return 0


def sources(words: list[str]) -> None:
    """Make the smallest source archive that pip could download of a package that CMake builds."""
    with open(value_of(words, "--requirement", "-r")) as file:
        name, _, version = file.read().split()[0].partition("==")
    folder = f"{value_of(words, '--dest', '-d')}/{name}-{version}"
    for below in ("", f"{name}/torch/"):
        os.makedirs(f"{folder}/{below}", exist_ok=True)
        open(f"{folder}/{below}CMakeLists.txt", "w").close()
    runs("tar", "-czf", f"{folder}.tar.gz", "-C", os.path.dirname(folder), os.path.basename(folder))


# ---- schedulers -----------------------------------------------------------------------------------------------------


def scontrol(name: str, words: list[str]) -> int:
    shown = "".join(words[1:2]) if words[:1] == ["show"] else ""
    if len(shown) > 4 and "hostnames".startswith(shown):  # Slurm accepts shortened words
        # One write: a pipe takes up to 64 KiB at once, even if `head -n 1` then exits.
        os.write(1, "".join(f"{host}\n" for host in SETTINGS["hosts"][: int(SETTINGS["nodes"])]).encode())
    elif words[:1] == ["requeue"] and SETTINGS["event"] == "cancelled":
        print("scontrol: error: Requested operation not supported on a job that is completing", file=sys.stderr)
        return 1
    elif words[:2] == ["show", "job"]:
        print(f"JobId={SETTINGS['job']} JobName=train\n   JobState=RUNNING Restarts={SETTINGS['restarts']} Requeue=1")
        print(f"   RunTime=00:00:10 TimeLimit=01:00:00 OverSubscribe={'OK' if SETTINGS['shared'] else 'NO'}")
    return 0


def squeue(name: str, words: list[str]) -> int:
    import re

    state = "COMPLETING" if SETTINGS["event"] == "cancelled" else "RUNNING"
    whole = any(re.search(r"%[.\d]*T|\b(?i:state)\b", word) for word in words)
    print(state if whole else {"RUNNING": "R", "COMPLETING": "CG"}[state])  # for %t, and without a format
    return 0


def pbsnodes(name: str, words: list[str]) -> int:
    is_down = SETTINGS["down"] and (trained_here() or not SETTINGS["down_later"])
    print(f"{SETTINGS['down']}  down" if is_down else "", end="\n" if is_down else "")
    return 0


def scancel(name: str, words: list[str]) -> int:
    """Signal the processes of the ranks, if a batch shell passes signals on."""
    names = [each for each in below(job_script()) if stands_in(command_line(each))] if SETTINGS["to_batch"] else []
    for launcher in [each for each in names if os.path.basename(command_line(each)[4]) == SETTINGS["launcher"]]:
        tell(below(launcher) if "USR1" in value_of(words, "--signal", "-s") else [])
    return 0


def submit(name: str, words: list[str]) -> int:
    print("777.server" if name == "qsub" else "777" if "--parsable" in words else "Submitted batch job 777")
    return 0


def qsig(name: str, words: list[str]) -> int:
    """Signal a job's session as PBS does: its script, and all that this has started on this node."""
    number = USR1 if value_of(words, "-s").removeprefix("SIG") in ("USR1", str(USR1)) else TERM
    if words[-1].partition(".")[0] == SETTINGS["job"]:
        tell([*{job_script(), *below(job_script())} - {os.getpid(), os.getppid()}], number)
    return 0


def qstat(name: str, words: list[str]) -> int:
    attributes = SETTINGS["of_pbs"] | {"job_state": "R", "run_count": SETTINGS["started"]}
    if value_of(words, "-F") == "json" or "-Fjson" in words:
        import json

        tables: dict = {key: {} for key in ("Resource_List", "resources_used")}  # in JSON, a resource is an entry of its table
        for key, value in attributes.items():
            table, _, resource = key.partition(".")
            (tables[table] if resource else tables)[resource or key] = value
        print(json.dumps(dict(Jobs={f"{SETTINGS['job']}.server": tables})))
        return 0
    print(f"Job Id: {SETTINGS['job']}.server")
    print("\n".join(f"    {key} = {value}" for key, value in attributes.items()))
    return 0


# ---- the rest -------------------------------------------------------------------------------------------------------


def wrapper(name: str, words: list[str]) -> int:
    """Start the command behind its own flags."""
    return runs(*split(words)[1])


def container(name: str, words: list[str]) -> int:
    """Start the command in the image. Variables with the runtime's prefix are set there without it."""
    if words[:1] and words[0] in ("pull", "build", "inspect", "import"):
        return fetched(name, words)
    start = next((place for place, word in enumerate(words) if word in ("exec", "run", "shell")), -1)
    rest = words[start + 1 :]
    images = [
        place for place, word in enumerate(rest) if word.endswith((".sif", ".sqsh", ".sqfs")) and not word.startswith("-")
    ]
    flags = rest[: images[0]] if images else []
    image = rest[images[0]] if images else ""
    command = rest[images[0] + 1 :] if images else split(rest)[1]
    if images and not os.path.exists(image):
        print(f"FATAL: could not open image {image}", file=sys.stderr)
        return 255
    folder = os.getcwd()
    if images and not SETTINGS["bound"] and not shown(folder, flags):
        print(f"WARNING: {folder} is not there in the container: starting in the home directory", file=sys.stderr)
        os.chdir(os.environ["HOME"])
        if command and "/" in command[0] and os.path.abspath(os.path.join(folder, command[0])).startswith(f"{TOP}/sites/"):
            print(f"FATAL:   stat {command[0]}: no such file or directory", file=sys.stderr)
            return 255
    environ = dict(os.environ)
    if {"--cleanenv", "-e", "--containall", "-C"} & {*flags}:
        environ = {key: value for key, value in environ.items() if key.startswith(("DRY_RUN", "HOME", "PATH", "LANG"))}
    for key, value in os.environ.items():
        for prefix in ("SINGULARITYENV_", "APPTAINERENV_"):
            if key.startswith(prefix):
                environ[key.removeprefix(prefix)] = value
    if {"--contain", "-c", "--containall", "-C"} & {*flags} and not {"--nv", "--rocm"} & {*flags} and not shown("/dev", flags):
        environ["DRY_RUN_NO_DEVICES"] = "1"  # the container has its own /dev, with the least in it
    environ |= SETTINGS["image_sets"]
    NOTES["image"] = image or first(split(words)[0], "--image", "-i")
    environ["APPTAINER_CONTAINER"] = environ["SINGULARITY_CONTAINER"] = environ["DRY_RUN_IMAGE"] = NOTES["image"]
    if not command:
        return 0
    return beneath(mounted(rest), command, environ)


def beneath(mounts: list[str], command: list[str], environ: dict[str, str]) -> int:
    """Run a command in a container. Its mounts end with it."""
    code = runs(*command, environment=environ)
    for place in mounts:
        for folder, _, files in os.walk(place, topdown=False):
            for file in files:
                os.unlink(f"{folder}/{file}")
            os.rmdir(folder)
    return code


def mounted(words: list[str]) -> list[str]:
    """Mount file systems that are in a file. Without image-src only the file itself is bound, with nothing in it."""
    binds = [value for flag, value in pairs(words) if flag in ("--bind", "-B") and ".sqsh:" in value and "image-src=" in value]
    places = [place if inside(place) else f"{TOP}/root{place}" for place in (bind.split(":")[1] for bind in binds)]
    places = [place for place in places if not os.path.exists(f"{place}/.mounted")]  # else a container around this one has it
    for place in places:
        environment(place, of_image=True)
        open(f"{place}/.mounted", "w").close()
    return places


def fetched(name: str, words: list[str]) -> int:
    """Write an image file, and leave layers in the runtime's cache."""
    for word in words[1:]:
        if word.endswith((".sif", ".sqsh")):
            if os.path.exists(word) and words[0] == "pull" and not {"--force", "-F"} & {*words}:
                print(f"FATAL:   Image file already exists: {word!r} - will not overwrite", file=sys.stderr)
                return 255
            open(word, "w").close()
    leave(os.environ.get(f"{name.upper()}_CACHEDIR") or f"{os.environ['HOME']}/.{name}/cache")
    return 0


def shown(folder: str, words: list[str]) -> bool:
    """True if a container has this folder: it has the home directory, and the folders that are bound."""
    binds = [value for flag, value in pairs(words) if flag in ("--bind", "-B")]
    binds += [word.partition("=")[2] for word in words if word.startswith("--bind=")]
    binds += [
        os.environ.get(f"{prefix}_{name}", "") for prefix in ("APPTAINER", "SINGULARITY") for name in ("BIND", "BINDPATH")
    ]
    sources = [bind.partition(":")[0] for bind in ",".join(binds).split(",") if bind]
    return any(f"{folder}/".startswith(f"{os.path.realpath(source)}/") for source in [os.environ["HOME"], *sources])


def shifterimg(name: str, words: list[str]) -> int:
    print(f"system docker READY 0123456789 2026-01-01T00:00:00 {SETTINGS['image']}")
    return 0


def conda(name: str, words: list[str]) -> int:
    folder = value_of(words, "-p", "--prefix")
    if words[:1] == ["run"]:
        os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}" if folder else os.environ["PATH"]
        return runs(*split(words[1:])[1])
    if words[:1] == ["info"] and "--base" in words:
        print(TOP)
    if words[:2] in (["shell.bash", "hook"], ["shell.posix", "hook"], ["shell", "hook"]):
        with open(f"{TOP}/etc/profile.d/conda.sh") as hook:
            print(hook.read())
    elif words[:1] == ["shell.posix"]:
        return activate(words[1:])
    elif words[:1] == ["activate"] and (SETTINGS["hook"] or not (SETTINGS["modules"] or "DRY_RUN_IMAGE" in os.environ)):
        # A module and an image may define conda().
        print(f"CondaError: Run 'conda init' before '{name} activate'", file=sys.stderr)
        return 1
    if SETTINGS["fails"] == "conda":
        return 1
    if os.path.exists(path := value_of(words, "--file", "-f")):
        with open(path) as file:
            NOTES["file"] = file.read()
    words = words[words[:1] == ["env"] :]
    if words[:1] in (["create"], ["install"], ["update"]):
        leave(os.environ.get("CONDA_PKGS_DIRS") or f"{os.environ['HOME']}/.conda/pkgs")
        if os.environ.get("CONDA_REGISTER_ENVS") != "false":
            leave(f"{os.environ['HOME']}/.conda")
    return environment(folder) if folder else 0


def activate(words: list[str]) -> int:
    """Print what the shell function `conda` evaluates. An environment with a name is the machine's, and changes nothing."""
    prefix = value_of(words, "-p", "--prefix") or words[-1]
    if words[0] == "deactivate":
        print('PATH=${PATH#"${CONDA_PREFIX-}/bin:"}; unset CONDA_PREFIX')
    elif "/" in prefix:
        prefix = os.path.abspath(prefix)
        if prefix.startswith(f"{TOP}/sites/") and not os.path.isdir(f"{prefix}/bin"):
            print(f"EnvironmentLocationNotFound: Not a conda environment: {prefix}", file=sys.stderr)
            return 1
        print(f"export CONDA_PREFIX='{prefix}' PATH='{prefix}/bin':\"$PATH\"")
    return 0


def conda_pack(name: str, words: list[str]) -> int:
    return runs("tar", "-czf", value_of(words, "--output"), "-C", value_of(words, "--prefix"), ".")


def mksquashfs(name: str, words: list[str]) -> int:
    open(words[1], "w" if "-noappend" in words else "a").close()
    return 0


def sbcast(name: str, words: list[str]) -> int:
    source, target = [word for word in words if not word.startswith("-")]
    forced = any(word == "--force" or ("f" in word and word[:1] == "-" != word[1:2]) for word in words)
    if os.path.exists(target) and not forced:
        print(f"sbcast: error: open({target}): File exists", file=sys.stderr)
        return 1
    return runs("cp", source, target)


def hostname(name: str, words: list[str]) -> int:
    node = int(os.environ.get("DRY_RUN_NODE", "0"))
    if {"-I", "--all-ip-addresses"} & {*words}:  # in no order: here the management network is first
        print(f"172.16.0.{node + 1} 10.0.0.{node + 1} ")
    else:
        print(f"10.0.0.{node + 1}" if {"-i", "--ip-address"} & {*words} else SETTINGS["hosts"][node])
    return 0


def getent(name: str, words: list[str]) -> int:
    host = words[-1].partition(".")[0]
    host = host if host in SETTINGS["hosts"] else host.removesuffix(SETTINGS["suffix"])
    node = SETTINGS["hosts"].index(host) if host in SETTINGS["hosts"] else int(os.environ.get("DRY_RUN_NODE", "0"))
    print(f"10.0.0.{node + 1} {words[-1]}")
    return 0


def ip(name: str, words: list[str]) -> int:
    node = int(os.environ.get("DRY_RUN_NODE", "0"))
    there = ["mgmt0", *(SETTINGS["interfaces"] or ["eth0"])]
    asked = [interface for interface in there if interface in words]
    for number, interface in enumerate(asked or there, 2):
        network = "172.16" if interface == "mgmt0" else "10.0"
        print(f"{number}: {interface}    inet {network}.0.{node + 1}/16 scope global {interface}")
    return 0


def sleep(name: str, words: list[str]) -> int:
    if SETTINGS["event"] == "pause" and words[0].isdecimal() and int(words[0]) > 5:
        os.kill(job_script(), TERM)
    time.sleep(0.01)
    return 0


def rm(name: str, words: list[str]) -> int:
    """Remove within the dry run's folder only. dry_run.py judges the rest."""
    flags = [word for word in words if word.startswith("-")]
    kept = [word for word in words if word not in flags and inside(word)]
    return runs("/bin/rm", *flags, "--", *kept) if kept else 0


def inside(path: str) -> bool:
    """True if the path is strictly below a folder that a script may write to."""
    folder, name = os.path.split(os.path.abspath(path))
    resolved = os.path.join(os.path.realpath(folder), name)
    return resolved.startswith((f"{TOP}/home/", f"{TOP}/root/", f"{TOP}/sites/"))


def mktemp(name: str, words: list[str]) -> int:
    """Make a file or folder below a folder of this dry run, whatever the template."""
    if {"-u", "--dry-run"} & {*words}:  # makes nothing: only a random name
        return runs("/bin/mktemp", *words)
    folder = any(word == "--directory" or ("d" in word and word[:1] == "-" != word[1:2]) for word in words)
    template = next((os.path.basename(word) for word in words if "XXX" in word), "XXXXXXXXXX")
    return runs("/bin/mktemp", *["-d"] * folder, f"{TOP}/root/tmp/tmp.{template}")


def download(name: str, words: list[str]) -> int:
    for flag, value in pairs(words):
        if flag in ("-o", "--output", "-O"):
            open(value, "a").close()
    return 0


def module_call(name: str, words: list[str]) -> int:
    """Print what the shell function `module` evaluates."""
    words = [word for word in words if not word.startswith("-")]
    if words[:1] in (["load"], ["add"], ["switch"], ["swap"]):
        if SETTINGS["fails"] == "module" or SETTINGS["fails"].removeprefix("module ") in words[1:]:
            print(f"Lmod has detected the following error: {words[1]} is unknown", file=sys.stderr)
            return 1
        new = words[-1:] if words[0] in ("switch", "swap") else words[1:]  # the last module replaces the first
        for module in new:
            for key, value in SETTINGS["modules"].get(module, {}).items():
                print(f"export {key}='{value}'")
        loaded = [*filter(None, os.environ.get("LOADEDMODULES", "").split(":")), *new]
        print(f"export LOADEDMODULES='{':'.join(loaded)}'")
    elif words[:1] in (["purge"], ["reset"]):
        print("unset LOADEDMODULES")
    return 0


def uuidgen(name: str, words: list[str]) -> int:
    """Print a UUID: not every machine that runs this suite has the command."""
    with open("/proc/sys/kernel/random/uuid") as file:
        print(file.read().strip())
    return 0


ANSWERS = {"conda-pack": conda_pack, "module-call": module_call}
ANSWERS |= dict(torchrun=torchrun, pbsnodes=pbsnodes, mksquashfs=mksquashfs, sbcast=sbcast)
ANSWERS |= dict.fromkeys(("srun", "mpiexec", "mpirun", "aprun"), launch)
ANSWERS |= dict.fromkeys(("python", "python3", "python3.11", "python3.12"), python)
ANSWERS |= dict.fromkeys(("singularity", "apptainer", "shifter", "podman-hpc", "enroot"), container)
ANSWERS |= dict(pip=pip, pip3=pip, uv=uv, conda=conda, mamba=conda, micromamba=conda, scontrol=scontrol, squeue=squeue)
ANSWERS |= dict(sbatch=submit, qsub=submit, qstat=qstat, shifterimg=shifterimg, hostname=hostname, getent=getent, ip=ip)
ANSWERS |= dict(numactl=wrapper, sleep=sleep, rm=rm, mktemp=mktemp, curl=download, wget=download)
ANSWERS |= dict(uuidgen=uuidgen, qsig=qsig, scancel=scancel)


def fails() -> bool:
    """True if this is the job script's command that the dry run lets fail."""
    if "DRY_RUN_LAUNCHER" in os.environ or "DRY_RUN_IMAGE" in os.environ:
        return False
    with open(f"{TOP}/calls/commands", "a") as file:
        file.write(".")
        return SETTINGS["fails"] == f"fails at {file.tell()}"


def hangs(name: str, words: list[str]) -> bool:
    """True if this starts something on the nodes after the ranks, which the dry run lets hang."""
    if name != SETTINGS["launcher"] or "DRY_RUN_LAUNCHER" in os.environ or {"--version", "-V"} & {*words}:
        return False
    return trained_here()


def trained_here() -> bool:
    """True if ranks have run. Other jobs' runs do not count: they are years old."""
    records = [f"{folder}/run.jsonl" for folder, _, files in os.walk(f"{TOP}/sites") if "run.jsonl" in files]
    return any(time.time() - os.path.getmtime(record) < 10**7 for record in records)


def hang() -> int:
    """Wait like srun when its node does not answer: it passes signals on, and does not end."""
    for number in (USR1, TERM):
        _signal.signal(number, _signal.SIG_IGN)
    time.sleep(HANG)
    return 1


def timeout(words: list[str]) -> int:
    """Run the real `timeout`, with shorter times."""
    durations, place = {"-k", "--kill-after"}, 0
    while place < len(words) and words[place].startswith("-"):
        flag, equals, value = words[place].partition("=")
        if equals and flag in durations:
            words[place] = f"{flag}={sooner(value)}"
        elif flag in durations:
            place += 1
            words[place] = sooner(words[place])
        elif flag in ("-s", "--signal") and not equals:
            place += 1
        place += 1
    words[place] = sooner(words[place])
    return runs("/usr/bin/timeout", *words)


def sooner(duration: str) -> str:
    units = dict(s=1, m=60, h=3600, d=86400)
    return str(float(duration.rstrip("smhd")) * units.get(duration[-1:], 1) / FASTER)


# ---- an installation that is killed ---------------------------------------------------------------------------------

HALF = "left-by-a-killed-command"


def makes(name: str, words: list[str]) -> str:
    """The folder or file that a command makes or adds to in an installation; "" for other commands."""
    if words[:2] == ["-m", "venv"]:
        return folder_of_venv(words[1:], "--prompt")
    if (words[:2] == ["-m", "pip"] or name in ("pip", "pip3")) and {"install", "download"} & {*words}:
        return f"{packages_of(sys.argv[1])}/~{HALF}"  # pip gives this prefix to what it removes
    if name in ("conda", "mamba", "micromamba") and ("create" in words[:2] or words[:2] == ["env", "update"]):
        return value_of(words, "-p", "--prefix")
    if name == "conda-pack":
        return value_of(words, "--output")
    if name in ("apptainer", "singularity", "podman-hpc", "enroot") and words[:1] in (["pull"], ["build"], ["import"]):
        return next((word for word in words if word.endswith((".sif", ".sqsh"))), "")
    return words[1] if name == "mksquashfs" else ""


def killed(made: str) -> None:
    """Kill the script and all its processes, if the dry run asks for it here, and leave half of what the command makes."""
    with open(f"{TOP}/calls/made", "a") as file:
        file.write(".")
        if SETTINGS["fails"] != f"killed at {file.tell()}":
            return
    if not made.endswith((".sif", ".sqsh", ".gz")) and HALF not in made:
        made = packages_of(f"{made}/bin/python") + f"/{HALF}"
        os.makedirs(os.path.dirname(made), exist_ok=True)
    if os.path.isdir(os.path.dirname(made)):
        with open(made, "a") as half:
            half.write("half")
    os.killpg(0, KILL)


def main(name: str, words: list[str]) -> int:
    if name == "timeout":
        return timeout(words)
    file = f"{TOP}/calls/{time.time_ns()}-{os.getpid()}"
    call = dict(
        command=name, path=sys.argv[1], words=words, folder=os.getcwd(), environ=dict(os.environ), start_time=time.time_ns()
    )
    write(file, call)
    if made := makes(name, words):
        NOTES.update(makes=made, umask=umask())
        killed(made)
    on_a_node = "DRY_RUN_LAUNCHER" in os.environ and SETTINGS["fails"] == " ".join(["on a node", name, *words])
    if on_a_node or (SETTINGS["fails"].startswith("fails at ") and fails()):
        NOTES["failed"], code = True, 1
    elif SETTINGS["fails"] == "hangs" and hangs(name, words):
        code = hang()
    else:
        answer = ANSWERS.get(name, launch if name == SETTINGS["launcher"] else None)
        code = answer(name, words) if answer else 0
    write(file, call | dict(end_time=time.time_ns(), code=code, notes=NOTES))
    return code


if __name__ == "__main__":
    sys.exit(main(os.path.basename(sys.argv[1]), sys.argv[2:]))

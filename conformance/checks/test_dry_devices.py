"""The static rung: which cores and devices the ranks of a site's scripts get.

python -m pytest conformance/checks/test_dry_devices.py [--site NAME_OR_FOLDER]
"""

import ast
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from conformance.cluster.shape import numbers
from conformance.harness.check import clause
from conformance.harness.dry_run import Call, DryRun, trains, values_of
from conformance.harness.shell import Script, devices_by, gib
from conformance.harness.stub_core import who

# Variables that hide devices from a rank, or reorder them.
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")


@clause("J9")
def test_torchrun_has_the_cores_of_all_its_ranks(check, site, dry):
    """torchrun is one task of its node, and its ranks stay on the cores to which that task is bound."""
    of_ranks = ("--nproc-per-node", "--nproc_per_node")
    for case in site.cases:
        run, script = dry.case(case), site.folder / case.script
        sizes = [value for call in run.called("torchrun") for value in values_of(call.words, *of_ranks)]
        size = max((int(each) for each in sizes if each.isdecimal()), default=0)  # "gpu": as many ranks as devices
        options, job = Script(script).options, site.job(script)
        tasks = job.get("tasks_per_node", job["ranks_per_node"])  # torchrun is one task, whose cores its ranks divide
        each = int(options.get("cpus-per-task", "0")) * tasks // job["ranks_per_node"]
        for call in [call for call in run.launches if call.command == "srun"] if size and each else ():
            sets = bound(call, 1)
            count = len(sets[0]) if sets else cpus_per_task(call, script, site)
            if count < size * each:
                yield f"{case.name}: {count} cores for torchrun, but should be {size} ranks x {each}: {call.text[:120]}"


@clause("J9")
def test_torchrun_divides_the_cores_that_two_devices_share(check, site, dry):
    """`--numa-binding` node or socket gives two ranks of a NUMA node the same cores; unbound, each rank may use all cores."""
    for case in site.cases if site.toml["node"].get("cores_near_device") else ():
        for call in dry.case(case).called("torchrun"):
            if not any(re.match(r"--numa-binding|(.*/)?(numactl|taskset)$", word) for word in call.words):
                yield f"{case.name}: torchrun without --numa-binding, but should put each rank near its device"
    for path in (*site.scripts, *sorted(site.folder.glob("*.py"))):
        for way in re.findall(r'--numa-binding(?:=|", *")([\w-]+)', path.read_text()):
            if way not in ("exclusive", "core-complex"):
                yield f"{path.name}: --numa-binding={way}, but should be exclusive: its ranks would share cores"
            torchruns = [call for case in site.cases for call in dry.case(case).called("torchrun")]
            if torchruns and not any(word.startswith("--numa-binding") for call in torchruns for word in call.words):
                yield f"{path.name}: --numa-binding={way}, but no torchrun is called with it"


@clause("J9")
def test_ranks_share_the_cores_of_a_node(check, site, dry):
    """With the launcher's flags, each rank has its own cores, none reserved, near its device, and enough for its threads."""
    node = site.toml["node"]
    threads = node.get("threads_per_core", 1)
    reserved = {core + thread * node["cores"] for thread in range(threads) for core in numbers(node.get("reserved", ""))}
    tasks = ((name, call, cores) for name, run in dry.in_all_ways() for call in run.launches for cores in bound(call, 0))
    for name, call, cores in tasks:
        if of_system := [core for core in cores if core in reserved]:
            yield f"{name}: a task on cores {of_system} ({call.text[:100]}), but should leave them to the system"
    for script, chosen, run in dry.as_chosen():
        each = int(run.trained[0].environ["DRY_RUN_PER_NODE"]) if run.trained else site.job(script)["ranks_per_node"]
        if run.code:
            yield f"{script.name} {chosen}: {dry.ending(run)}, but should be 0"
        yield from (f"{script.name} {chosen}: {text}" for text in masked(site, run, each))
        yield from (f"{script.name} {chosen}: {text}" for text in threads_bound_alike(run))
        for call in run.launches:
            if {"--overcommit", "-O", "--oversubscribe", "-s"} & {*call.words}:
                yield f"{script.name}: {call.text[:100]}, but should give each rank cores of its own"
            yield from (f"{script.name}: {text}" for text in memory_of(call, script, site, each))
            sets = bound(call, each)
            words = " ".join(word for word in call.words if "bind" in word or "cpus" in word)
            taken: list[int] = []
            for local, cores in enumerate(sets or in_blocks(call, script, site, each)):
                wrong = [core for core in cores if core in taken or core >= node["cores"] * threads]
                if wrong and sets:
                    yield f"{script.name}: local rank {local} on cores {wrong} ({words[:80]}), but should have its own"
                taken += cores
                device = device_of(site, run, local, each)
                near = node.get("cores_near_device", [])
                its = {*numbers(near[device])} if device in range(len(near)) else set()
                own = {core % node["cores"] for core in cores}
                if its and not (own <= its or its <= own):  # a rank's share may be more than the near ones
                    path = f"be near device {device}: {near[device]}"
                    yield f"{script.name}: rank {local} of a node on cores {cores}, but should {path}"
            yield from (f"{script.name}: {text}" for text in devices(site, run, call))
            count = len(sets[0]) if sets else cpus_per_task(call, script, site)
            count = count // each if run.called("torchrun") and not sets else count  # the task's cores, divided among its ranks
            used = len({core % node["cores"] for core in taken}) if sets else count * each / threads
            usable = node["cores"] - node.get("reserved_cores", 0) - site.job(script).get("spare_cores", 0)
            if used <= usable - each:
                yield f"{script.name}: {used:g} cores of a node are used, but should be {usable} (spare_cores in site.toml)"
            for rank in run.trained[:1]:
                omp = rank.environ.get("OMP_NUM_THREADS", "unset")  # two threads on one core are slower than one
                most = len({core % node["cores"] for core in sets[0]}) if sets else -(-count // threads)
                least = max(2, most / 4) if most >= 4 else 1  # workers that read rows may take the other cores
                if not omp.isdecimal() or not least <= int(omp) <= most:
                    yield f"{script.name}: OMP_NUM_THREADS={omp}, but should be the {most} cores of a rank"


def memory_of(call: Call, script: Path, site, each: int) -> Iterator[str]:
    """Yield what is wrong with a step's memory, which is the job's unless the step asks for less."""
    words, cpus = call.launcher_words, cpus_per_task(call, script, site)
    names = {"mem": "NODE", "mem-per-cpu": "CPU", "mem-per-gpu": "GPU"}
    told = {name: call.environ.get(f"SLURM_MEM_PER_{what}", "") for name, what in names.items()}
    step = {name: value for name in names for value in values_of(words, f"--{name}")[-1:]} or told
    of_step, of_job = (gib(options, each * cpus, site.toml["node"]["devices"]) for options in (step, Script(script).options))
    if call.command == "srun" and 0 < of_step < of_job / 2:
        yield f"{of_step:g} GiB of a node for the ranks, but should have the job's {of_job:g}: one that needs more is killed"


def devices(site, run: DryRun, call: Call) -> Iterator[str]:
    """Yield what is wrong with the devices that ranks see, by the launcher's flags."""
    node, variable = site.toml["node"], site.toml["node"].get("device_environment")
    if call.command != "srun" or not variable or not run.trained:
        return
    seen, should = len((run.trained[0].environ.get(variable) or "").split(",")), node["devices_visible_to_a_rank"]
    if seen != should:
        yield f"{seen} devices are visible to a rank, but should be {should} (--gpus-per-task, --gpu-bind)"
    if "cores_near_device" in node and "none" in values_of(call.words, "--cpu-bind"):
        yield "--cpu-bind=none, but should keep each rank on its cores, near its device"
    bind = next(iter(values_of(call.words, "--gpu-bind")), "")
    if should < node["devices"] and "cores_near_device" in node and not re.match(r"(verbose,)?(closest|map|mask)", bind):
        yield f"--gpu-bind={bind or 'none'}, but should give each rank the device near its cores: closest"


# Variables, and patterns of their values, that give OpenMP cores by number rather than by kind (cores, threads).
# https://gcc.gnu.org/onlinedocs/libgomp/Environment-Variables.html
PINS = dict(GOMP_CPU_AFFINITY=r"\d", KMP_AFFINITY=r"proclist|explicit", OMP_PLACES=r"\{\d")


def threads_bound_alike(run: DryRun) -> Iterator[str]:
    """Yield what is wrong with a rank's cores: a list of cores that the ranks of a node share puts all on the same ones."""
    nodes = dict[tuple[str, str, str], int]()
    for call in run.trained:
        for name in [name for name, kind in PINS.items() if re.search(kind, call.environ.get(name, ""))]:
            key = (name, call.environ[name], call.environ["DRY_RUN_NODE"])
            nodes[key] = nodes.get(key, 0) + 1
    for name, value in sorted({key[:2] for key, ranks in nodes.items() if ranks > 1}):
        yield f"{name}={value} in several ranks of a node, but should leave each on cores of its own"


def masked(site, run: DryRun, each: int) -> Iterator[str]:
    """Yield what is wrong with the devices that ranks see: every node has the same devices, and counts them from 0."""
    variable, nodes = site.toml["node"].get("device_environment", ""), dict[int, list[str]]()
    for call in sorted(run.trained, key=lambda call: call.rank or 0):
        nodes.setdefault((call.rank or 0) // each, []).append(call.environ.get(variable, "all"))
    for node, masks in nodes.items():
        if variable and masks != nodes[0]:
            yield f"{variable}={' '.join(masks)} on node {node}, but should be {' '.join(nodes[0])}, as on node 0"
        most = min(each, site.toml["node"]["devices"])
        # Where Slurm gives each rank one device, every rank's value is 0.
        if variable and all(map(str.isdecimal, masks)) and 1 < len({*masks}) < most:
            yield f"{variable}={' '.join(masks)}: {len({*masks})} devices of a node are used, but should be {most}"


def bound(call: Call, each: int) -> list[list[int]]:
    """Return the cores of each rank of a node, where the launcher's flags list them. each: ranks of a node; 0 for no limit."""
    binding = re.sub(r"^(verbose|v|quiet|q),", "", next(iter(values_of(call.words, "--cpu-bind")), ""))
    kind, _, listed = binding.partition(":")
    # "0x7*4" repeats this mask four times. https://slurm.schedmd.com/srun.html#OPT_cpu-bind
    repeated = [part.partition("*") for part in listed.split(",")]
    parts = [part for part, _, times in repeated for _ in range(int(times or 1))] if kind in ("mask_cpu", "map_cpu") else []
    if kind == "mask_cpu":
        return [[bit for bit in range(1024) if int(mask, 16) >> bit & 1] for mask in parts]
    if kind == "map_cpu":
        return [[int(core, 0)] for core in parts]
    if kind == "list":
        return [numbers(part) for part in listed.split(":")][: each or None]
    return []


@clause("J9")
def test_what_is_said_of_each_device_is_said_of_all(check, site, dry):
    """A list NUMBER:VALUE,NUMBER:VALUE names every device: a missing one works differently, and all wait for its ranks."""
    devices = site.toml["node"]["devices"]
    for script, chosen, run in dry.as_chosen():
        for call in run.trained[:1]:
            for name, value in call.environ.items():
                named = re.findall(r"(?:^|,)(\d+):\d+(?=,|$)", value) if re.fullmatch(r"[\d:,]*,[\d:,]*", value) else []
                if named and sorted(map(int, named)) != [*range(devices)]:
                    yield f"{script.name} {chosen}: {name}={value}, but should name devices 0 to {devices - 1}"
                each = int(call.environ["DRY_RUN_PER_NODE"]) // devices
                if name == PARTS and {*re.findall(r":(\d+)", value)} != {str(each)}:
                    yield f"{script.name} {chosen}: {name}={value}, but should be {each} of each, as many as it has ranks"


# The variable says into how many parts Intel's compute runtime splits each device.
PARTS = "ZEX_NUMBER_OF_CCS"


@clause("J9")
def test_devices_are_chosen_once(check, site, dry):
    """Only site.toml's variable selects devices: with a second one, a rank's device is not the one near its cores."""
    own = site.toml["node"].get("device_environment", "")
    for case in site.cases:
        for call in dry.case(case, all_ranks=True).trained if own else ():
            for name in sorted({*MASKS} & call.environ.keys() - {own}):
                seen = call.environ[name].split(",")
                if seen != [str(number) for number in range(len(seen))]:
                    yield f"{case.name}: {name}={call.environ[name]}, but should be chosen by {own} alone"


@clause("J9")
def test_ranks_in_an_image_have_the_node_s_devices(check, site, dry):
    """A container that is isolated from the node has a /dev without its devices, unless a flag asks for GPUs."""
    for what, run in dry.in_all_ways() if site.toml["node"]["devices"] else ():
        for call in [call for call in run.trained[:1] if "DRY_RUN_NO_DEVICES" in call.environ]:
            image = Path(call.environ["DRY_RUN_IMAGE"]).name
            yield f"{what}: no device in {image}, but should be (--contain without --nv or --rocm hides /dev)"


@clause("J9")
def test_ranks_of_a_part_of_a_node_see_devices_that_it_has(check, site, dry):
    """Slurm numbers a job's devices from 0: of a job's two devices, a list of the node's last numbers matches none."""
    variable = site.toml["node"].get("device_environment", "")
    for script in trains(site) if variable and site.toml["scheduler"] == "slurm" else ():
        part = max(1, site.toml["node"]["devices"] // 2)
        names = [name for name in ("gres", "tres-per-node") if devices_by(name, Script(script).options.get(name, ""))]
        options = {names[0]: f"gpu:{part}"} if names else {"gpus-per-node": str(part)}
        options |= {"ntasks-per-node": str(part)}
        for call in dry.job(script, nodes=1, options=options, ntasks=part, shared=True, all_ranks=True).trained:
            seen = call.environ.get(variable, "")
            if not {*seen.split(",")} <= {*map(str, range(part))}:
                yield f"{script.name} with {part} devices: {variable}={seen}, but should be of 0 to {part - 1}"


def lines_of_several(script: Path) -> list[str]:
    """Return the commands in a program's head that start several runs."""
    return re.findall(rf"(?m)^    (\S*python {re.escape(script.name)} .*? -- .*?)(?: {{4,}}.*)?$", script.read_text())


@clause("J9")
def test_a_run_that_is_killed_beside_others_is_a_failure(check, site, dry):
    """A program that starts several runs ends with the exit code of the failed one."""
    for script in sorted(site.folder.glob("*.py")) if site.toml["node"].get("device_environment") else ():
        for line in lines_of_several(script)[:1]:
            if not (run := dry.command(script, line, fails="one run")).code:
                yield f"{line!r}, one of whose runs is killed: {dry.ending(run)}, but should be that run's"


@clause("J9")
def test_runs_side_by_side_share_the_devices_out(check, site, dry, tmp_path):
    """Where a program's head starts several runs, each sees one device for each of its ranks, and no device is idle."""
    variable, count = site.toml["node"].get("device_environment", ""), site.toml["node"]["devices"]
    for script in sorted(site.folder.glob("*.py")) if variable else ():
        lines = lines_of_several(script)
        halved = [re.sub(r"--ranks (\d+)", lambda match: f"--ranks {max(1, int(match[1]) // 2)}", line) for line in lines]
        lessened = [re.sub(r"--ranks (\d+)", lambda match: f"--ranks {max(1, int(match[1]) - 1)}", line) for line in lines]
        close = [re.sub(r"(?<=--lr )[\d. ]+\d", "0.00001 0.000012", line) for line in lines]
        cases = [(line, [*range(count)]) for line in dict.fromkeys([*lines, *halved, *lessened, *close])]
        # Half a node, as `--gpus 2` gives it: the numbers may begin above 0.
        for line, visible in [*cases, *((line, [*range(count // 2, count)]) for line in halved if count > 3)]:
            run = dry.command(script, line, devices=visible)
            if run.code == 2 and line in {*lessened} - {*lines, *halved}:  # the program refuses this number of ranks
                continue
            outside = [call for call in run.calls if call.rank is None]
            started = [call for call in outside if call.program or "torch.distributed.run" in call.words]
            shares = [tuple(call.environ.get(variable, "").split(",")) for call in started]
            places = [values_of(call.words, "--run-dir")[-1:] for call in started]
            ranks = [int((values_of(call.words, "--nproc-per-node") or ["1"])[0]) for call in started]
            observed = f"{line!r}: runs with {variable}={' '.join(map(','.join, shares)) or 'none'}"
            if len(shares) < 2 or any(len(share) != each for share, each in zip(shares, ranks, strict=True)):
                yield f"{observed}, but should be several, each with a device for each of its ranks"
            elif len(taken := [device for share in {*shares} for device in share]) != len({*taken}):
                yield f"{observed}, but should share no device with another"
            elif len({*map(tuple, places)}) < len(places):
                yield f"{line!r}: run directories {places}, but should be one each"
            elif len({*taken}) < (most := min(len(visible) // ranks[0] * ranks[0], sum(ranks))):
                yield f"{observed}, but should use {most} devices of {len(visible)}"
            elif strange := {*taken} - {*map(str, visible)}:
                yield f"{observed}, but the job has no device {', '.join(sorted(strange))}: {variable} says so"
            for call in [call for call in started if call.program][:1]:  # started without torchrun
                if refused := who(site, call.job_environ, tmp_path).get("refused"):
                    yield f"{line!r}: train.py says {refused!r}, but should be a world of one"
            apart = ("--standalone", "--rdzv", "--master")
            meet = [call for call in started if "torch.distributed.run" in call.words and not any(map(call.text.count, apart))]
            if meet:
                yield f"{line!r}: a torchrun without --standalone, but should meet no other"


@clause("J9")
def test_srun_is_told_of_cores_once(check, site, dry):
    """srun gets masks or a number of cores: with both, even by a variable, it binds to half of a mask's cores or refuses.

    Not where each mask has as many CPUs, and all threads of its cores.
    """
    node, threads = site.toml["node"], site.toml["node"].get("threads_per_core", 1)
    for case in site.cases:
        for call in dry.case(case).launches if site.toml["launcher"] == "srun" else ():
            values = {name: call.environ[name] for name in OF_CORES if name in call.environ}  # 7, or cpu=7,gres/gpu=1
            numbers_told = {name: "".join(re.findall(r"(?:^|\bcpu[=:])(\d+)", value)) for name, value in values.items()}
            sets = bound(call, 0)
            whole = all(len({cpu % node["cores"] for cpu in cpus}) * threads == len(cpus) for cpus in sets)
            wrong = [name for name, told in numbers_told.items() if not whole or {str(len(cpus)) for cpus in sets} != {told}]
            if sets and wrong:
                yield f"{case.name}: srun finds {' and '.join(wrong)} beside its masks, but should not: unset them before srun"


OF_CORES = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")


@clause("J9")
def test_a_notebook_takes_the_devices_that_there_are(check, site):
    """Where Jupyter has given one device, the notebook starts one rank: four would share the device, and be refused."""
    stand_in = "class torch:\n  class cuda:\n    def device_count(): return {}\n  accelerator = cuda\n"
    for name, cells in notebooks(site).items():
        lines = re.findall(r"(?m)^ranks\s*=.*", "\n".join(texts(cells)))
        if any("--nproc-per-node" in text for text in texts(cells)):
            check.equal(**{f"numbers_of_ranks_in_{name}": (len(lines), 1)})
        for devices, line in itertools.product((1, 4), lines):
            program = [sys.executable, "-c", f"{stand_in.format(devices)}\n{line}\nprint(ranks)"]
            result = subprocess.run(program, capture_output=True, text=True, check=False)
            printed = (result.stdout + result.stderr).strip()
            check.equal(**{f"ranks_of_{name}_on_{devices}_devices": (printed, str(devices))})


@clause("B10")
def test_a_notebook_that_is_opened_again_goes_on(check, site):
    """By default it resumes in the same folder: otherwise a lost kernel would lose all training so far.

    It has not been run: another machine's output looks like the reader's own, and each execution would change the file.
    """
    for name, cells in notebooks(site).items():
        outputs = [(cell.get("outputs"), cell.get("execution_count")) for cell in cells]
        ran = [number for number, (output, count) in enumerate(outputs, 1) if output or count is not None]
        check.equal(**{f"cells_of_{name}_that_were_run": (ran, [])})
        check.equal(**{f"{name}_begins_anew": (any("--fresh" in text for text in texts(cells)), False)})
        lines = [line for text in texts(cells) for line in ast.parse(re.sub(r"(?m)^\s*[%!].*", "", text)).body]
        imports = [line for line in lines if isinstance(line, ast.Import) and line.names[0].name in sys.stdlib_module_names]
        assigned = {ast.unparse(line.targets[0]): line for line in lines if isinstance(line, ast.Assign)}
        for line in [assigned["device"]] if "device" in assigned and site.toml["node"]["devices"] else ():
            device = re.findall(r"[\"'](\w+)[\"']", ast.unparse(line))[-1:]
            check.equal(**{f"{name}_trains_on_a_device_unless_told_otherwise": (device in (["cpu"], ["auto"]), False)})
        places = [assigned["run_dir"]] if "run_dir" in assigned else []
        for place in places[:1]:
            program = "\n".join([*map(ast.unparse, [*imports, place]), "print(run_dir)"])
            start = partial(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=False)
            result, again = start(), start()
            pair = (again.stdout.strip(), (result.stdout + result.stderr).strip())
            check.equal(**{f"run_dir_of_{name}_another_time": pair})


def notebooks(site) -> dict[str, list[dict]]:
    """Return the code cells of each notebook, by file name."""
    all_cells = {path.name: json.loads(path.read_text())["cells"] for path in sorted(site.folder.glob("*.ipynb"))}
    return {name: [cell for cell in cells if cell["cell_type"] == "code"] for name, cells in all_cells.items()}


def texts(cells: list[dict]) -> list[str]:
    return ["".join(cell["source"]) for cell in cells]


def device_of(site, run: DryRun, local: int, each: int) -> int | None:
    """Return the device, by the machine's number, of a rank that sees several; None where unknown. each: ranks of a node."""
    node, variable = site.toml["node"], site.toml["node"].get("device_environment")
    if node["devices_visible_to_a_rank"] < node["devices"] or not variable:
        return None
    call = next((call for call in run.trained if int(call.environ["DRY_RUN_RANK"]) == local), None)
    seen = [text for text in (call.environ.get(variable, "") if call else "").split(",") if text]
    if call and not seen:  # a choice of the script may redefine a device: as two tiles, for example
        return local * node["devices"] // each
    own = seen[0] if len(seen) == 1 else seen[local] if local < len(seen) else ""  # a single device is shared by all its ranks
    return int(own) if own.isdecimal() else None


def in_blocks(call: Call, script: Path, site, each: int) -> list[list[int]]:
    """Return the cores of each rank of a whole node with one socket, where srun binds ranks in order."""
    node = site.toml["node"]
    size = cpus_per_task(call, script, site) // node.get("threads_per_core", 1)
    in_order = call.command == "srun" and "cores" in values_of(call.words, "--cpu-bind") and node.get("sockets", 1) == 1
    whole = in_order and size * each == node["cores"]
    return [[*range(rank * size, rank * size + size)] for rank in range(each)] if whole else []


def cpus_per_task(call: Call, script: Path, site) -> int:
    node, each = site.toml["node"], site.job(script)["ranks_per_node"]
    if depth := values_of(call.words, "--depth", "-d"):  # in the order of the CPUs, whose first ones are of different cores
        return min(int(depth[0]), node["cores"] // each) * node.get("threads_per_core", 1)
    values = values_of(call.words, "--cpus-per-task", "-c") or [Script(script).options.get("cpus-per-task", "")]
    return int(values[0]) if values[0].isdecimal() else node["cores"] // each

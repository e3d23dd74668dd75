"""The static rung: what a site's scripts do when they are run, with stand-ins for the commands of its machine (dry_run.py).

    python -m pytest conformance/checks/test_dry_run.py [--site NAME_OR_FOLDER]

This needs bash, and neither ranks, torch nor a scheduler.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.cluster.shape import numbers
from conformance.harness.dry_run import ARGUMENTS, SECRET, Call, DryRun, DryRuns, program
from conformance.harness.shell import Script, minutes

clause = pytest.mark.clause
# What a job script may pass to train.py by itself: where and with what, and never what is trained.
OWN_FLAGS = {"--device", "--backend", "--run-dir", "--new-run-dir", "--reduction", "--workers", "--debug"}
FINAL = {2: "usage", 3: "preflight", 5: "a snapshot that cannot be used", 6: "a loss that is not finite", 8: "storage"}
# The first job, another one, and a third whose number is the second's plus a multiple of 1000.
FIRST, OTHER = "4242", "7001"
MANY_RESTARTS = 1000


@pytest.fixture(scope="session")
def dry(site):
    runs = DryRuns(site)
    yield runs
    runs.close()


def trains(site) -> list[Path]:
    return [script for script in site.job_scripts if site.job(script).get("trains", True)]


def ending(runs: DryRuns, run: DryRun) -> str:
    """How it ended, in the words of a message."""
    lines = [line for line in runs.shown(run.output).strip().splitlines() if line.strip()]
    return f"{run.script}: exit code {run.code} ({lines[-1][-160:] if lines else 'it prints nothing'})"


def ended(runs: DryRuns, script: Path, code: int) -> DryRun:
    """A job whose ranks end with this code."""
    return runs.job(script, code=code) if code else runs.job(script, all_ranks=True)


def arguments(call: Call) -> list[str]:
    return call.words[program(call) :]


def as_in_job(site, call: Call) -> dict[str, str]:
    """The environment of a rank without what this dry run has put there."""
    return {name: value for name, value in call.environ.items() if not name.startswith("DRY_RUN")}


# ---- it runs, and each rank is who site.toml says -------------------------------------------------------------------


@clause("B1")
def test_scripts_run_to_their_end(check, site, dry):
    install = dry.install()
    check.holds(*([f"{ending(dry, install)}, but should be 0"] if install.code else []))
    violations = []
    for script in trains(site):
        for nodes in (site.job(script)["nodes"], 1):
            run = dry.job(script, nodes=nodes, all_ranks=nodes > 1)
            ranks = nodes * site.job(script)["ranks_per_node"]
            started = sorted(int(call.environ["DRY_RUN_RANK"]) for call in run.trained)
            wanted = list(range(ranks if nodes > 1 else 1))
            if run.code or started != wanted or {call.environ["DRY_RUN_RANKS"] for call in run.trained} != {str(ranks)}:
                told = {call.environ["DRY_RUN_RANKS"] for call in run.trained}
                violations.append(
                    f"{ending(dry, run)} and {' '.join(told) or 'no'} ranks on {nodes} nodes, but should be 0 and {ranks}"
                )
    check.holds(*violations)


@clause("B1")
def test_ranks_run_in_the_site_s_folder_with_its_python(check, site, dry):
    """Of the environment that install.sh has made, or of the image."""
    prefixes = made_by(dry.install())
    image = (
        Path(site.toml.get("software", {}).get("image", "")).name if not site.toml.get("software", {}).get("modules") else ""
    )
    violations = []
    for script in trains(site):
        for call in dry.job(script, all_ranks=True).trained[:1]:
            path = Path(os.path.realpath(Path(call.folder, call.path).parent))
            if prefixes and not any(path.is_relative_to(os.path.realpath(prefix)) for prefix in prefixes):
                violations.append(
                    f"{script.name}: python={dry.shown(call.path)}, but should be in {dry.shown(str(prefixes[0]))}"
                )
            if image and image not in call.environ.get("DRY_RUN_IMAGE", ""):
                violations.append(f"{script.name}: ranks outside of the image {image}, but should be in it")
            if Path(call.folder) != dry.folder:
                violations.append(f"{script.name}: ranks in {dry.shown(call.folder)}, but should be in the site's folder")
    check.holds(*violations)


def made_by(install: DryRun) -> list[str]:
    """The environments that install.sh has made."""
    found = []
    for call in install.calls:
        if call.words[:2] == ["-m", "venv"]:
            found.append(os.path.join(call.folder, call.words[-1]))
        if call.command in ("conda", "mamba", "micromamba") and call.words[:1] == ["create"]:
            found += [os.path.join(call.folder, value) for value in values_of(call.words, "-p", "--prefix")]
    return found


def values_of(words: list[str], *flags: str) -> list[str]:
    found = [word.partition("=")[2] for word in words if word.partition("=")[0] in flags and "=" in word]
    return found + [value for flag, value in itertools.pairwise(words) if flag in flags]


@clause("B2")
def test_every_file_that_runs_is_the_site_s_and_listed(check, site, dry):
    listed, seen = {*site.toml.get("files", [])}, {str(path.relative_to(site.folder)) for path in site.scripts}
    of_jobs = {script: dry.job(script, code=75) for script in site.job_scripts}
    violations = []
    for script, run in [("install.sh", dry.install()), *((path.name, run) for path, run in of_jobs.items())]:
        for name in run.read:
            path = Path(name) if Path(name).is_absolute() else dry.folder / name
            relative = os.path.relpath(os.path.realpath(path), os.path.realpath(dry.folder))
            if path.name == script or not (path.is_file() or Path(name).is_absolute()) or path.is_relative_to("/dev/fd"):
                continue
            if relative not in listed or relative not in seen:
                violations.append(f"{script} runs {relative}, but should run files of the list `files` alone")
    violations += [f"{name} is named by a script, but should be in `files`, too" for name in sorted(seen - listed) if listed]
    check.holds(*violations)


@clause("B3")
def test_a_rank_is_told_what_site_toml_says(check, site, dry):
    """[launchers.environment] is what the process rung exports: here it is compared with what the job script leads to."""
    launch, violations = site.launches[0], []
    domain = site.toml["node"].get("domain", "")
    for script in trains(site):
        for shape in (dict(all_ranks=True), dict(restarts=1, code=75), dict(nodes=1)):
            run = dry.job(script, **shape)
            told = dict(number=FIRST, nodes=site.job(script)["nodes"]) | run.shape
            for call in run.trained:
                rank, per_node, nodes = (int(call.environ[f"DRY_RUN_{name}"]) for name in ("RANK", "PER_NODE", "NODES"))
                values = dict(rank=rank, world_size=per_node * nodes, local_rank=rank % per_node, local_world_size=per_node)
                values |= dict(node_rank=rank // per_node, num_nodes=nodes, restart=told["restarts"])
                values |= dict(tasks_per_node=f"{per_node}(x{nodes})" if nodes > 1 else per_node)
                patterns = {name: re.escape(str(value)) for name, value in values.items()}
                head = re.escape(dry.hosts(told["nodes"])[0])
                address = rf"{head}\.{re.escape(domain)}" if domain else rf"{head}(\.[\w.-]+)?|10\.0\.0\.1"
                patterns |= dict(master_addr=f"(?:{address})", master_port=r"\d{4,5}", job_id=rf"\S*{FIRST}\S*")
                for name, template in launch.templates:
                    if "{" not in template or (launch.mpi and "{master" in template):
                        continue
                    value = call.environ.get(name, "0" if template == "{restart}" else None)
                    # How a start is named is the site's affair: the job is in it, and another start has another name.
                    pattern = (
                        patterns["job_id"]
                        if "{job_id}" in template
                        else "".join(patterns.get(part[1:-1], re.escape(part)) for part in re.split(r"(\{\w+\})", template))
                    )
                    if value is None or not re.fullmatch(pattern, value):
                        violations.append(
                            f"{script.name}: rank {rank} of {per_node * nodes}: {name}={value}, but should be {template}"
                        )
        names = [name for name, template in launch.templates if "{job_id}" in template or "{restart}" in template]
        starts = [dry.job(script, **shape).trained[:1] for shape in (dict(all_ranks=True), dict(restarts=1, code=75))]
        first, again = ([call.environ.get(name) for call in calls for name in names] for calls in starts)
        if names and first == again:
            violations.append(f"{script.name}: {', '.join(names)} = {first} in both starts of a job, but should differ")
    check.holds(*violations[:12])


@clause("J6")
def test_the_port_depends_on_the_job(check, site, dry):
    """The ranks of two jobs are told different ports, all ranks of a job the same one, and one that Linux gives to nobody."""
    violations = []
    for script in trains(site):
        first, other = (ports(site, dry.job(script, **shape)) for shape in (dict(all_ranks=True), dict(number=OTHER)))
        violations += [
            f"{script.name}: {name}={first[name]}, but should be the same in all ranks"
            for name in first
            if len(first[name]) > 1
        ]
        same = [name for name in first if first[name] == other.get(name)]
        violations += [
            f"{script.name}: {name}={first[name]} in job {FIRST} and in job {OTHER}, but should differ" for name in same
        ]
        for name, values in first.items():
            violations += [
                f"{script.name}: {name}={value}, but should be 1024 to 32767"
                for value in values
                if not 1024 <= int(value) < 32768
            ]
    check.holds(*violations)


def ports(site, run: DryRun) -> dict[str, set[str]]:
    """By variable, or by flag of a command."""
    found: dict[str, set[str]] = {}
    told = site.launches[0].variables_with("master_port")
    for call in run.trained:
        for name, value in as_in_job(site, call).items():
            if (name in told or re.search(r"(^|_)PORT$", name)) and value.isdecimal() and value != "0":
                found.setdefault(name, set()).add(value)
    for call in run.calls:
        for value in re.findall(r"(--(?:master[-_]port|rdzv[-_]endpoint)[= ]\S*?(\d{4,5}))\b", call.text):
            found.setdefault(value[0].partition("=")[0], set()).add(value[1])
    return found


@clause("J13")
def test_only_interfaces_of_the_node_are_named(check, site, dry):
    interfaces, violations = site.toml["node"]["interfaces"], []
    for script in trains(site) if interfaces else []:
        for call in dry.job(script, all_ranks=True).trained[:1]:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CCL_KVS_IFACE", "FI_CXI_DEVICE_NAME", "TP_SOCKET_IFNAME"):
                value = call.environ.get(name)
                wrong = value and [
                    part for part in value.lstrip("=").split(",") if not any(each.startswith(part) for each in interfaces)
                ]
                if wrong or (value and name == "GLOO_SOCKET_IFNAME" and value != interfaces[0]):
                    should = interfaces[0] if name.startswith("GLOO") else f"of {', '.join(interfaces)}"
                    violations.append(f"{script.name}: {name}={value}, but should be {should}")
    check.holds(*violations)


# ---- flags, and where a run is --------------------------------------------------------------------------------------


@clause("J1")
def test_arguments_arrive_word_for_word(check, site, dry):
    wanted = list(ARGUMENTS) if site.toml["scheduler"] == "slurm" else [word for word in ARGUMENTS if " " not in word]
    for script in trains(site):
        for call in dry.job(script, all_ranks=True).trained[:1]:
            check.equal(**{f"last_arguments_of_{script.name}": (arguments(call)[-len(wanted) :], wanted)})


@clause("B4")
def test_the_script_says_where_and_not_what(check, site, dry):
    violations = []
    for script in trains(site):
        for call in dry.job(script, all_ranks=True).trained[:1]:
            own = arguments(call)[: -len(ARGUMENTS) if site.toml["scheduler"] == "slurm" else -5]
            flags = [word.partition("=")[0] for word in own if word.startswith("--")]
            wrong = [flag for flag in flags if flag not in OWN_FLAGS and not flag.endswith("timeout")]
            violations += [f"{script.name}: {flag} is passed to train.py, but should be its user's" for flag in wrong]
            if values_of(own, "--device") in (["cpu"], ["auto"]):
                violations.append(f"{script.name}: --device={values_of(own, '--device')[0]}, but should name the accelerator")
    check.holds(*violations)


@clause("B4")
def test_a_job_finds_its_run_again_and_no_other_job_s(check, site, dry):
    violations = []
    for script in trains(site):
        places = {}
        for what, shape in dict(first=dict(all_ranks=True), again=dict(restarts=1, code=75), other=dict(number=OTHER)).items():
            for call in dry.job(script, **shape).trained[:1]:
                given = values_of(arguments(call), "--run-dir", "--new-run-dir")
                places[what] = os.path.join(call.folder, given[0]) if given else "none"
        first = places.get("first", "none")
        if first == "none" or not Path(first).is_relative_to(dry.folder):
            violations.append(f"{script.name}: run directory={dry.shown(first)}, but should be below the site's folder")
        if (again := places.get("again", "none")) != first:
            told = f"{dry.shown(again)} when the job comes back, but should be {dry.shown(first)}"
            violations.append(f"{script.name}: run directory={told}")
        if places.get("other") == first:
            violations.append(f"{script.name}: run directory={dry.shown(first)} in two jobs, but should differ")
    check.holds(*violations)


# ---- how it ends, and comes back ------------------------------------------------------------------------------------


def new_starts(run: DryRun) -> list[Call]:
    """What makes a job start again, or another one in its place."""
    return [call for call in run.called("sbatch", "qsub", "qalter") if "--version" not in call.words] + [
        call for call in run.called("scontrol") if call.words[:1] in (["requeue"], ["requeuehold"])
    ]


@clause("J2")
def test_the_exit_code_of_the_ranks_is_the_job_s(check, site, dry):
    for script in trains(site):
        codes = {code: ended(dry, script, code).code for code in (0, *FINAL, 75)}
        check.equal(**{f"exit_codes_of_{script.name}": (codes, {code: code for code in codes})})


@clause("J10")
def test_what_would_fail_again_is_not_started_again(check, site, dry):
    violations = []
    for script in trains(site):
        for code, what in ({0: "done"} | FINAL).items():
            run = ended(dry, script, code)
            violations += [f"{script.name}: {call.text} after {code} ({what}), but should not" for call in new_starts(run)]
            if len(run.launches) > 1:
                violations.append(f"{script.name}: {len(run.launches)} launches after {code} ({what}), but should be 1")
    check.holds(*violations)


@clause("J10")
def test_a_stopped_job_comes_back_once_its_ranks_have_ended(check, site, dry):
    """By itself, once, and not for ever: at the last it says how to go on."""
    violations = []
    for script in trains(site):
        for restarts in (0, 1):
            run = dry.job(script, code=75, **(dict(restarts=restarts) if restarts else {}))
            starts, result = new_starts(run), max((call.ended or 0 for call in run.launches), default=0)
            if len(starts) != 1:
                violations.append(f"{script.name}: {len(starts)} new starts after 75, but should be 1 ({ending(dry, run)})")
            violations += [
                f"{script.name}: {call.text} before its ranks have ended, but should be after"
                for call in starts
                if call.began < result
            ]
            wrong = [call for call in starts if call.command == "scontrol" and FIRST not in call.words]
            violations += [f"{script.name}: {call.text}, but should name job {FIRST}" for call in wrong]
        run = dry.job(script, code=75, restarts=MANY_RESTARTS)
        if starts := new_starts(run):
            violations.append(f"{script.name}: {starts[0].text} after {MANY_RESTARTS} restarts, but should have a limit")
        elif not re.search(r"--run-dir[= ]\S*" + FIRST, run.output):
            violations.append(
                f"{script.name}: nothing about --run-dir runs/{FIRST} after the last restart, but should say how to go on"
            )
    check.holds(*violations)


@clause("J11")
def test_every_srun_of_ranks_ends_when_one_dies(check, site, dry):
    violations = []
    for script in trains(site):
        for call in dry.job(script, all_ranks=True).launches:
            if call.command == "srun" and not kills(call):
                violations.append(f"{script.name}: {call.text[:120]}, but should have --kill-on-bad-exit=1 among its flags")
            if {"--no-abort-on-failure", "--no-kill"} & {*call.words}:
                violations.append(f"{script.name}: {call.text[:120]}, but should end when a rank dies")
    check.holds(*violations)


def kills(call: Call) -> bool:
    given = values_of(call.words, "--kill-on-bad-exit", "-K")
    bare = {"-K", "-K1", "--kill-on-bad-exit"} & {*call.words} and "0" not in given
    return bool("1" in given or bare or call.environ.get("SLURM_KILL_BAD_EXIT") == "1")


# ---- cores, devices, modules, directives ----------------------------------------------------------------------------


@clause("J9")
def test_ranks_share_the_cores_of_a_node(check, site, dry):
    """Bound by the launcher's flags, ranks have cores of their own, none that is reserved, near their device; threads fit."""
    node, violations = site.toml["node"], []
    threads = node.get("threads_per_core", 1)
    reserved = {core + thread * node["cores"] for thread in range(threads) for core in numbers(node.get("reserved", ""))}
    for script in trains(site):
        run, each = dry.job(script, all_ranks=True), site.job(script)["ranks_per_node"]
        for call in run.launches:
            sets = bound(call, each)
            words = " ".join(word for word in call.words if "bind" in word or "cpus" in word)
            taken: list[int] = []
            for local, cores in enumerate(sets):
                wrong = [core for core in cores if core in reserved or core in taken or core >= node["cores"] * threads]
                if wrong:
                    violations.append(
                        f"{script.name}: local rank {local} on cores {wrong} ({words[:80]}), but should have its own"
                    )
                taken += cores
                device = device_of(site, run, local)
                near = node.get("cores_near_device")
                if near and device is not None and not {core % node["cores"] for core in cores} <= {*numbers(near[device])}:
                    path = f"be near device {device}: {near[device]}"
                    violations.append(f"{script.name}: rank {local} of a node on cores {cores}, but should {path}")
            count = len(sets[0]) if sets else cpus_per_task(call, script, site)
            used = len({core % node["cores"] for core in taken}) if sets else count * each / threads
            usable = node["cores"] - node.get("reserved_cores", 0) - site.job(script).get("spare_cores", 0)
            if used <= usable - each:
                violations.append(
                    f"{script.name}: {used:g} cores of a node are used, but should be {usable} (spare_cores in site.toml)"
                )
            for rank in run.trained[:1]:
                omp = rank.environ.get("OMP_NUM_THREADS", "unset")
                if not omp.isdecimal() or not 1 <= int(omp) <= count or (count >= 4 and int(omp) * 2 * threads < count):
                    violations.append(f"{script.name}: OMP_NUM_THREADS={omp}, but should be the {count} cores of a rank")
    check.holds(*violations[:12])


def bound(call: Call, each: int) -> list[list[int]]:
    """The cores of each rank of a node, where flags of the launcher list them."""
    told = next(iter(values_of(call.words, "--cpu-bind")), "").removeprefix("verbose,").removeprefix("v,")
    kind, _, listed = told.partition(":")
    if kind == "mask_cpu":
        return [[bit for bit in range(1024) if int(mask, 16) >> bit & 1] for mask in listed.split(",")]
    if kind == "map_cpu":
        return [[int(core)] for core in listed.split(",")]
    if kind == "list":
        return [numbers(part) for part in listed.split(":")][:each]
    return []


def device_of(site, run: DryRun, local: int) -> int | None:
    """The device of a rank that sees several, by the machine's number."""
    node, variable = site.toml["node"], site.toml["node"].get("device_environment")
    if node["devices_visible_to_a_rank"] < node["devices"] or not variable:
        return None
    call = next((call for call in run.trained if int(call.environ["DRY_RUN_RANK"]) == local), None)
    seen = (call.environ.get(variable) or ",".join(map(str, range(node["devices"])))).split(",") if call else []
    return int(seen[local]) if local < len(seen) and seen[local].isdecimal() else None


def cpus_per_task(call: Call, script: Path, site) -> int:
    told = values_of(call.words, "--cpus-per-task", "-c", "--depth", "-d") or [Script(script).options.get("cpus-per-task", "")]
    node = site.toml["node"]
    return int(told[0]) if told[0].isdecimal() else node["cores"] // site.job(script)["ranks_per_node"]


@clause("F8")
def test_modules_are_loaded_once_and_kept(check, site, dry):
    software, violations = site.toml.get("software", {}), []
    modules = software.get("modules", [])
    for script in trains(site):
        run, loaded = dry.job(script, all_ranks=True), []
        launched = min((call.began for call in run.launches), default=0)
        for call in run.called("module-call"):
            words = [word for word in call.words if not word.startswith("-")]
            if call.began > launched and words[:1] != ["list"]:
                violations.append(f"{script.name}: module {' '.join(words)} after the launch, but should be before")
            if words[:1] in (["purge"], ["reset"], ["unload"]) and loaded:
                violations.append(
                    f"{script.name}: module {' '.join(words)} after module load {loaded[-1]}, but should be before"
                )
            loaded += words[1:] if words[:1] in (["load"], ["add"], ["swap"], ["switch"]) else []
        if loaded != modules:
            violations.append(f"{script.name}: loads {' '.join(loaded)}, but should load {' '.join(modules)}, in this order")
    check.holds(*violations)


@clause("B8")
def test_directives_ask_for_what_the_machine_has(check, site):
    queue, violations = site.toml.get("queue", {}), []
    known = dict(partition="partitions", q="partitions", qos="qos", constraint="constraints")
    for script in map(Script, site.job_scripts):
        options = script.options
        for option, key in known.items():
            wanted = re.split(r"[&|,]", options[option]) if option in options else []
            wrong = [name for name in wanted if queue.get(key) and name not in queue[key]]
            violations += [
                f"{script.path.name}: {option}={name}, but should be one of {', '.join(queue[key])}" for name in wrong
            ]
        for option in ("account", "A"):
            if option in options and "account" in queue and options[option] != queue["account"]:
                violations.append(
                    f"{script.path.name}: {option}={options[option]}, but should be {queue['account']}, as in site.toml"
                )
        pbs = " ".join(text for _, text in script.directives)
        systems = re.search(r"filesystems=(\S+)", pbs)
        if "filesystems" in queue and not (systems and {*systems[1].split(":")} <= {*queue["filesystems"]}):
            violations.append(
                f"{script.path.name}: filesystems={systems and systems[1]}, but should be of {':'.join(queue['filesystems'])}"
            )
        limits = queue.get("minutes", {})
        asked = options.get("time") or (re.search(r"walltime=(\S+)", pbs) or ["", ""])[1]
        for name in {options.get("partition"), options.get("qos"), options.get("q")} & limits.keys():
            if asked and minutes(asked) > limits[name]:
                violations.append(f"{script.path.name}: time={asked}, but should be at most {limits[name]} minutes in {name}")
        if site.toml["scheduler"] == "slurm" and asked and minutes(asked) < 1:
            violations.append(f"{script.path.name}: time={asked}, but should be a minute or more")
    check.holds(*violations)


# ---- what it prints, writes, removes and installs -------------------------------------------------------------------


@clause("B5")
def test_no_secret_is_printed(check, site, dry):
    """A user's tokens are in the environment: neither the log nor the words of a command, which `ps` shows, have them."""
    violations = []
    runs = [dry.install(), *(dry.job(script, **shape) for script in site.job_scripts for shape in (dict(), dict(code=75)))]
    for run in runs:
        if SECRET in run.output:
            line = next(line for line in run.output.splitlines() if SECRET in line)
            violations.append(f"{run.script} prints {line[:60]!r}, but should print no value of the user's environment")
        for call in run.calls:
            if any(SECRET in word for word in call.words):
                violations.append(
                    f"{run.script}: {call.command} gets a user's token as a word, but should find it in its environment"
                )
    check.holds(*dict.fromkeys(violations))


@clause("B9")
def test_each_start_has_a_secret_of_its_own(check, site, dry):
    """Ranks that ask MPI who they are can agree on one there."""
    violations = []
    for script in trains(site) if not site.launches[0].mpi else []:
        runs = [dry.job(script, all_ranks=True), dry.job(script, restarts=1, code=75)]
        found = [{call.environ.get("DDP_SECRET", "") for call in run.trained} for run in runs]
        for run, values in zip(runs, found, strict=True):
            lengths = sorted(map(len, values))
            if len(lengths) != 1 or lengths[0] < 32:
                violations.append(
                    f"{script.name}: DDP_SECRET has lengths {lengths}, but should be one of 32 characters or more"
                )
            if any(
                value and value in text
                for value in values
                for text in (run.output, *itertools.chain(*(c.words for c in run.calls)))
            ):
                violations.append(f"{script.name} prints DDP_SECRET or passes it as a word, but should hand it on unseen")
        if found[0] & found[1]:
            violations.append(f"{script.name}: DDP_SECRET is the same in both starts of a job, but should differ")
    check.holds(*violations)


@clause("B6")
def test_a_job_touches_only_what_is_its_own(check, site, dry):
    violations = []
    for script in site.job_scripts:
        for shape in (dict(all_ranks=True), dict(code=75)):
            run = dry.job(script, **shape)
            node = [path for path in run.changed if re.match(r"root/(tmp|var/tmp|dev/shm)/", path)]
            shared = [path for path in node if FIRST not in path]
            others = [path for path in run.changed if path not in node and not path.startswith("root/scratch")]
            violations += [f"{script.name} changes {dry.shown(str(dry.top / path))}, but should leave it" for path in others]
            violations += [f"{script.name} writes /{path[5:]}, but should name it for job {FIRST}" for path in shared]
            violations += removed(dry, run, [dry.folder / "runs", *(dry.top / "root").rglob(f"*{FIRST}*")])
    check.holds(*dict.fromkeys(violations))


@clause("B6")
def test_an_installation_touches_only_its_prefix(check, site, dry):
    run = dry.install()
    violations = [
        f"install.sh changes {dry.shown(str(dry.top / path))}, but should write into its prefix alone" for path in run.changed
    ]
    new = [path for path in dry.installed.glob("*/*") if path.parent.name == dry.folder.name]
    there = {path.name for path in (dry.pristine / dry.folder.name).iterdir()}
    made = [dry.folder / path.name for path in new if path.name not in there]
    # Its prefix is also whatever it made and removed again.
    made += [Path(call.folder, word) for call in run.calls for word in call.words if word.startswith(f"{dry.folder}/.")]
    violations += removed(dry, run, made)
    check.holds(*dict.fromkeys(violations))


def removed(dry: DryRuns, run: DryRun, own: list[Path]) -> list[str]:
    """What rm was given that is not below, or one of, these; $TMPDIR/tmp.* is mktemp's."""
    found = []
    for call in run.called("rm"):
        for word in [word for word in call.words if not word.startswith("-")]:
            path = Path(os.path.normpath(Path(call.folder, word)))
            temporary = path.parent == dry.top / "root/tmp" and path.name.startswith("tmp.")
            if temporary or any(path.is_relative_to(each) for each in own if each != dry.folder / "runs"):
                continue
            if (
                path.is_relative_to(dry.folder)
                and not (dry.pristine / path.relative_to(dry.folder.parent)).exists()
                and path != dry.folder
            ):
                continue  # a file beside the scripts that no copier brought
            if FIRST in path.name or re.search(rf"/[^/]*{FIRST}[^/]*/", f"{path}/"):
                continue
            found.append(f"{run.script} removes {dry.shown(str(path)) or word}, but should remove only what it made")
    return found


@clause("B6")
def test_caches_are_the_job_s_own(check, site, dry):
    """Those that the script sets: not in the home directory, which all jobs share; in /tmp under the job's number."""
    violations = []
    for script in trains(site):
        for call in dry.job(script, all_ranks=True).trained[:1]:
            for name, value in as_in_job(site, call).items():
                if not re.search(r"CACHE|_DB_PATH$|^TMPDIR$", name) or not value.startswith("/") or name.startswith("PIP_"):
                    continue
                if Path(value).is_relative_to(dry.top / "home"):
                    violations.append(f"{script.name}: {name}={dry.shown(value)}, but should not be in the home directory")
                elif name != "TMPDIR" and re.match(r"/(tmp|var/tmp|dev/shm)\b", dry.shown(value)) and FIRST not in value:
                    violations.append(f"{script.name}: {name}={dry.shown(value)}, but should have the job's number in it")
    check.holds(*violations)


@clause("X20")
def test_a_cache_that_is_not_the_user_s_alone_is_refused(check, site, dry):
    """Where somebody else was first: compilers and torch load code from there."""
    violations = []
    for script in trains(site):
        run = dry.job(script, all_ranks=True)
        values = [
            value for call in run.trained for name, value in as_in_job(site, call).items() if re.search("CACHE|_DB_PATH$", name)
        ]
        shown = {dry.shown(value) for value in values}
        tops = sorted({match[1] for value in shown if (match := re.match(r"/((?:var/)?tmp/[^/]+|dev/shm/[^/]+)", value))})
        made = [path for path in tops if (dry.top / "root" / path).exists()]  # some jobs remove it at their end
        wrong = [path for path in made if (dry.top / "root" / path).stat().st_mode & 0o077]
        violations += [f"{script.name} makes /{path} for others, too, but should make it with mode 700" for path in wrong]
        for kind, path in itertools.product(("open", "link"), tops):
            what = dict(open="which others may write to", link="a link")[kind]
            run = dry.job(script, planted=(kind, path))
            if run.trained or run.code != 3:
                violations.append(f"{script.name}: trains with /{path}, {what}, but should end with 3 ({ending(dry, run)})")
            elif f"/{path}" not in run.output:
                violations.append(f"{ending(dry, run)}, but should name /{path}")
    check.holds(*violations)


@clause("X21")
def test_no_word_of_a_variable_is_run(check, site, dry):
    """Bash evaluates what stands in a variable that it computes with: UID[$(command)0] is a command."""
    violations, mark = [], dry.top / "root/tmp/has-run"
    name = site.toml["job"].get("restarts", "SLURM_RESTART_COUNT")
    for script in trains(site):
        for value in (f"UID[$(echo >{mark})0]", "two"):
            run = dry.job(script, restarts=value)
            if mark.exists():
                mark.unlink()
                violations.append(f"{script.name} runs the command in {name}=UID[$(command)0], but should refuse it")
            elif run.trained or run.code != 3 or name not in run.output:
                violations.append(f"{name}=two: {ending(dry, run)}, but should be 3 and name {name}")
    check.holds(*violations)


UNSAFE = re.compile(r"--trusted-host|--insecure|\s-k\s|--no-check-certificate|http://(?!localhost)|--break-system-packages")


@clause("B7")
def test_what_is_installed_is_named_with_its_version(check, site, dry):
    violations = []
    prefixes = [os.path.realpath(prefix) for prefix in made_by(dry.install())]
    for call in dry.install().calls:
        words = call.words[2:] if call.words[:2] == ["-m", "pip"] else call.words
        is_pip = call.words[:2] == ["-m", "pip"] or call.command in ("pip", "pip3")
        if UNSAFE.search(f" {call.text} ") and call.command not in ("rm", "module-call"):
            violations.append(f"install.sh: {dry.shown(call.text)[:120]}, but should check what it fetches")
        if is_pip and "install" in words:
            asked = requirements(words[words.index("install") + 1 :])
            loose = [word for word in asked if not pinned(word)]
            violations += [f"install.sh: pip install {word}, but should name a version" for word in loose]
            index = values_of(words, "--index-url", "--extra-index-url", "-i")
            violations += [
                f"install.sh: {url}, but should be for {site.toml['node']['device']}"
                for url in index
                if url.rstrip("/").endswith("/cpu")
            ]
            path = os.path.realpath(os.path.join(call.folder, os.path.dirname(call.path)))
            into = values_of(words, "--target", "-t", "--prefix")
            if "--user" in words or not (into or any(path.startswith(f"{prefix}/") for prefix in prefixes)):
                violations.append(f"install.sh: {dry.shown(call.text)[:120]}, but should install into its own prefix")
        if call.command in ("conda", "mamba", "micromamba") and words[:1] and words[0] in ("create", "install"):
            asked = requirements(words[1:])
            violations += [
                f"install.sh: conda {words[0]} {word}, but should name a version" for word in asked if not pinned(word)
            ]
            if not values_of(words, "-p", "--prefix"):
                violations.append(f"install.sh: {call.text[:120]}, but should name a --prefix")
        if call.command in ("git",) and words[:1] == ["clone"] and not values_of(words, "--branch", "-b"):
            violations.append(f"install.sh: {call.text[:120]}, but should name a --branch or a commit")
    for script in site.scripts:
        for number, line in enumerate(script.read_text().splitlines(), 1):
            if re.search(r"^[^#]*\b(curl|wget)\b.*\|\s*(sudo )?(ba|z)?sh\b", line):
                violations.append(
                    f"{script.name}:{number}: {line.strip()[:100]!r}, but should run nothing that it has not checked"
                )
    check.holds(*dict.fromkeys(violations))


VALUED = {
    "--index-url",
    "--extra-index-url",
    "-i",
    "--constraint",
    "-c",
    "--target",
    "-t",
    "--prefix",
    "-p",
    "--channel",
    "--find-links",
    "-f",
}
VALUED |= {
    "-n",
    "--name",
    "--cache-dir",
    "--upgrade-strategy",
    "--requirement",
    "-r",
    "--progress-bar",
    "--root-user-action",
    "--no-binary",
}


def requirements(words: list[str]) -> list[str]:
    """The packages among the words of an installation, without flags and their values."""
    found, skip = [], False
    for word in words:
        if not skip and not word.startswith("-"):
            found.append(word)
        skip = word in VALUED
    return found


def pinned(word: str) -> bool:
    """A version, a file or folder, a commit of a repository; pip and its like are Python's own."""
    if word in ("pip", "setuptools", "wheel") or "$" in word:
        return True
    if "://" in word or word.startswith("git+"):
        return bool(re.search(r"@[\w.-]+(#|$)|\d+\.\d+", word))
    if word.startswith((".", "/")) or word.endswith((".whl", ".tar.gz")):
        return True
    if re.match(r"torch(vision|audio)?\b", word):
        return bool(re.search(r"[^<>!~]==?\d", word))
    return bool(re.search(r"[=<>~]=?\s*\d", word))


# ---- train.py ---------------------------------------------------------------------------------------------------------


# Stands in for the core: `run` records with what it is called, and ends as it is asked to.
CORE = """
import json, os, sys

class Rank:
    @classmethod
    def single(cls): return cls()
    @classmethod
    def read(cls, environ, **variables): return cls()
    def __init__(self, *values, **named): pass

def run(rank, *arguments, **named):
    before = json.loads(os.environ["BEFORE"])
    if "MPI" not in before:
        rank(os.environ)
    now = {name: value for name, value in os.environ.items() if name != "BEFORE"}
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    facts = dict(argv=sys.argv[1:], arguments=repr([*arguments, named] if named else arguments), changed=changed)
    facts |= dict(folder=os.getcwd(), seeds=sorted({"torch", "numpy"} & sys.modules.keys()))
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(facts) + "\\n")
    return int(os.environ["CODE"])
"""


@clause("A7")
@pytest.mark.parametrize("code", [0, 6, 75])
def test_train_py_hands_everything_to_the_core(check, site, code, tmp_path):
    """It passes the user's flags as they are, returns the core's exit code, and changes nothing around it."""
    (tmp_path / "ddp_core").mkdir()
    (tmp_path / "ddp_core/__init__.py").write_text(CORE)
    (tmp_path / "ddp_core/errors.py").write_text("class PreflightError(ValueError): code = 3\n")
    flags, calls = ["--epochs", "7", "--lr", "0.5", "--run-dir", "x y"], tmp_path / "calls"
    environ = dict(PATH=os.environ["PATH"], PYTHONPATH=str(tmp_path), HOME=str(tmp_path), CALLS=str(calls), CODE=str(code))
    environ |= dict(LC_CTYPE="C.UTF-8", PYTHONDONTWRITEBYTECODE="1")
    if code == 75:  # once also as a rank among others; one that asks MPI has no others here
        environ |= dict(MPI="yes") if site.launches[0].mpi else site.launches[0].environ(1, 4, 2, 29500, "1")
    environ["BEFORE"] = json.dumps(environ)
    command = [sys.executable, str(site.folder / "train.py"), *flags]
    result = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    told = result.stderr.strip().splitlines()[-1:] or [""]
    rows = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    check.equal(calls_of_run=(f"{len(rows)} {told[0][:120]}".strip(), "1"), exit_code=(result.returncode, code))
    (row,) = rows
    check.equal(flags=(row["argv"], flags), further_arguments_of_run=(row["arguments"], "()"))
    check.equal(environment_changed=(row["changed"], []), folder=(row["folder"], str(tmp_path)))
    check.equal(imported_before_the_core=(row["seeds"], []))
    check.equal(printed=(result.stdout, ""))

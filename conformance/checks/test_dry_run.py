"""The static rung: what a site's scripts do when they are run, with stand-ins for the commands of its machine (dry_run.py).

    python -m pytest conformance/checks/test_dry_run.py [--site NAME_OR_FOLDER]

This needs bash, and neither ranks, torch nor a scheduler.
"""

import ast
import itertools
import json
import math
import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from conformance.checks.test_dry_install import pinned, requirements
from conformance.cluster.layer import OF_A_USER_S_DISK
from conformance.cluster.shape import numbers
from conformance.harness.check import clause
from conformance.harness.dry_run import (
    ARGUMENTS,
    OPEN_FILES,
    USER,
    Call,
    DryRun,
    arguments,
    as_in_job,
    command_names,
    ending,
    exit_of,
    given,
    limits,
    made_by,
    options_of,
    program,
    removed,
    seconds_of,
    shown_to_train,
    started_last,
    trains,
    umask,
    values_of,
    with_modules,
    without_effect,
    words_of,
)
from conformance.harness.shell import DEBUGGING, PLACEHOLDER, SETS, THROTTLING, Script, devices_by, gib, minutes, plain
from conformance.harness.sites import ROOT, place_of
from conformance.harness.stub_core import who
from conformance.harness.target import BACKENDS

# What a job script may pass to train.py by itself: where and with what, and never what is trained.
OWN_FLAGS = {"--device", "--backend", "--run-dir", "--new-run-dir", "--grace", "--reduction", "--workers", "--debug"}
OWN_FLAGS |= {"--save-minutes", "--save-steps", "--max-shard-size", "--log-seconds", "--stage-data"}
# What hides devices from a rank, and puts them into another order.
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
# The numbers of the job, of another one, and one as large as where there have been many, which ends in what is no octal one.
FIRST, OTHER, LARGE = "4242", "7001", "61230899"
# One of which most round numbers, 10000 to 60000, leave as much as they can.
HIGHEST = "58799999"
# What a scheduler brings to start ranks on its nodes: torchrun runs on each of them.
LAUNCHERS = ("srun", "mpiexec", "mpirun", "aprun")
LEAST_SECONDS_OF_WAIT, MOST_SECONDS_OF_WAIT = 30, 600
OF_A_USER = "/opt/of-a-user/lib"


# ---- it runs, and each rank is who site.toml says -------------------------------------------------------------------


@clause("B1")
def test_scripts_run_to_their_end(check, site, dry):
    install = dry.install()
    if install.code:
        yield f"{ending(dry, install)}, but should be 0"
    for case in site.cases:
        as_it_stands = case.name == case.script
        for nodes in (case.nodes, 1) if as_it_stands else (case.nodes,):
            run = dry.case(case, all_ranks=nodes > 1, **(dict(nodes=nodes) if as_it_stands else {}))
            ranks = nodes * case.ranks_per_node
            started = sorted(int(call.environ["DRY_RUN_RANK"]) for call in run.trained)
            world_sizes = {call.environ["DRY_RUN_RANKS"] for call in run.trained}
            if run.code or started != list(range(ranks if nodes > 1 else 1)) or world_sizes != {str(ranks)}:
                shown_sizes = " ".join(world_sizes) or "no"
                observed = f"{ending(dry, run)} and {shown_sizes} ranks on {nodes} nodes{started_last(dry, run)}"
                yield f"{case.name}: {observed}, but should be 0 and {ranks}"
            if run.trained and not run.launches:
                first = next((call.command for call in run.calls if call.command in LAUNCHERS), "no launcher of a scheduler")
                yield f"{case.name}: launcher={run.launcher} in site.toml, but should be {first}, which starts {ranks} ranks"
            up = [host for number, host in enumerate(dry.hosts(nodes + 1)) if number or not run.shape["spare"]][:nodes]
            for call in [call for call in run.launches if call.notes.get("hosts", up) != up]:
                yield f"{case.name}: ranks on {' '.join(call.notes['hosts'])}, but should be on {' '.join(up)}"
            for address in {call.environ.get("MASTER_ADDR", up[0]) for call in run.trained if run.shape["spare"]}:
                if address.partition(".")[0] != up[0]:
                    yield f"{case.name}: MASTER_ADDR={address}, but should be {up[0]}: the first node is down"


@clause("B1")
def test_a_job_runs_in_a_folder_with_a_space_in_its_path(check, site, dry):
    """A path in a command line of its own, as bash -c "source $PWD/...", is two words there, which shellcheck does not see."""
    link = dry.top / "a b"
    if not link.is_symlink():
        link.symlink_to(dry.folder)
    there = dict.fromkeys(("PWD", "SLURM_SUBMIT_DIR", "PBS_O_WORKDIR"), str(link))
    for case, code in itertools.product(site.cases, (0, 75)):
        usual, run = (dry.case(case, code=code, environ=environ) for environ in ({}, there))
        if run.code != code == usual.code or len(run.trained) != len(usual.trained):
            yield f'{case.name} in a folder "a b": {ending(dry, run)}, but should be {code}, as in another'


@clause("B1")
def test_scripts_run_on_as_many_nodes_as_the_machine_has(check, site, dry):
    """Linux starts nothing with a variable or word of 128 KiB: a list of all nodes. A script that says why not may end with 3.

    https://man7.org/linux/man-pages/man2/execve.2.html
    """
    for script in trains(site):
        run = dry.job(script, nodes=site.most_nodes)
        if run.code and not (run.code == 3 and "node" in exit_of(dry, run)):
            yield f"{script.name} on {site.most_nodes} nodes: {exit_of(dry, run)}, but should be 0"


@clause("B1")
def test_a_script_that_trains_is_not_said_to_prepare_only(check, site, dry):
    """By `trains = false`, with which no check of a job looks at it."""
    for script in [path for path in site.job_scripts if path not in trains(site)]:
        if count := len(dry.job(script, all_ranks=True).trained):
            yield f"{script.name}: trains=false in site.toml, but should be true: it starts {count} ranks of train.py"


# Commands whose failure is an answer, or changes nothing.
# What the scheduler sets, what scripts add to, and what is a user's to set (J13, B6).
GIVEN = "SLURM|PBS|PALS|.*PATH$|OMP_|HF_|TORCH_HOME|.*_NET(_PLUGIN)?$"
ASKS = ("rm", "sleep", "python", "python3", "qstat", "squeue", "sacct")


@clause("B11")
def test_each_choice_of_a_script_s_head_changes_something(check, site, dry):
    """In the ranks' environment or words, or in what is called: else its user believes that it is in force."""
    for script in trains(site):
        yield from (
            f"{script.name}: {choice} changes nothing, but should"
            for choice in without_effect(dry, script, alternatives(script))
        )


@clause("B11")
def test_a_default_changes_at_the_nodes_that_the_head_says(check, site, dry):
    """As in "beyond 16 nodes yes is the default": large jobs would go without it, and their users believe otherwise."""
    row = re.compile(r"(?m)^#   ([A-Z_]+)=(\w+) {2,}.*\b(?:beyond|above|more than) ([\d,]+) nodes (\w+) is the default")
    for script, (name, few, text, many) in [(path, each) for path in trains(site) for each in row.findall(path.read_text())]:
        for nodes, default in ((most := int(text.replace(",", "")), few), (most + 1, many)):
            alike = [*without_effect(dry, script, [{name: default}], nodes=nodes)]
            if dry.job(script, nodes=nodes).trained and not alike:
                yield f"{script.name} on {nodes} nodes: {name}={default} changes something, but should be the default there"


@clause("B11")
def test_a_choice_counts_whatever_was_set_before(check, site, dry):
    """By a module, say: in its ranks is what the choice decides, and not what the default would have been."""
    for script in trains(site):
        default, again = (dry.job(script, nodes=2, environ=environ) for environ in ({}, dict(DRY_RUN_AGAIN="1")))
        for chosen in alternatives(script) if default.trained and again.trained else ():
            without = dry.job(script, nodes=2, environ=chosen)
            expected, other, same = (as_in_job(run.trained[0]) if run.trained else {} for run in (without, default, again))
            before = {name: value for name, value in other.items() if same.get(name) == value != expected.get(name, value)}
            before = {name: value for name, value in before.items() if not re.match(GIVEN, name)}
            run = dry.job(script, nodes=2, environ=before | chosen)
            for name in sorted(before if run.trained and without.trained else ()):
                value = as_in_job(run.trained[0]).get(name)
                if value != expected[name]:
                    choice = " ".join(f"{name}={value}" for name, value in chosen.items())
                    yield f"{script.name}, {choice}, {name}={before[name]} was set: {value}, but should be {expected[name]}"


@clause("B11")
def test_lists_of_a_script_are_its_own(check, site, dry):
    """One that only some choice fills is otherwise what the user's shell has exported under its name: `modules`, say."""
    text = "\n".join(path.read_text() for path in site.scripts if path.suffix != ".py")
    names = {name for name in re.findall(r"\$\{(\w+)\[[@*]\]", text) if name.islower()}
    for case in site.cases if names else ():
        run = dry.case(case, environ=dict.fromkeys(names, "of-the-shell"))
        if run.code != dry.case(case).code or any("of-the-shell" in call.words for call in run.calls):
            yield f"{case.name} where a shell exports {' '.join(sorted(names))}: {ending(dry, run)}, but should be as without"


@clause("B11")
def test_a_flag_that_a_choice_names_reaches_a_command(check, site, dry):
    """As "--nv" of software="apptainer --nv": its ranks would start without the GPUs, or without what was chosen."""
    for case in site.cases:
        run = dry.case(case)
        flags = {flag for line in case.edit.values() for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", line)}
        for flag in sorted(flags - {word.partition("=")[0] for call in run.calls for word in call.words}):
            yield f"{case.name}: no command is called with {flag}, but should be"


@clause("B1")
def test_a_command_that_fails_is_not_passed_over(check, site, dry):
    """Of those before the ranks, one after the other: the job ends, or trains as without the failure, or warns of it."""
    for script, flags in itertools.product(trains(site), [(), *(flags for flags in given(dry) if dry.packed(*flags))]):
        shape = dict(nodes=2, install=flags)
        whole, again = dry.job(script, **shape), dry.job(script, **shape, environ=dict(DRY_RUN_AGAIN="1"))
        (first, *_), (second, *_) = whole.trained or [None], again.trained or [None]
        if not first or not second:
            continue  # B1 tells of it
        own = {name for name, value in first.environ.items() if second.environ.get(name) != value} | {"LOADEDMODULES"}
        for fails, step in whole.steps:
            if step.command in ASKS or {"--version", "is-avail"} & {*step.words}:
                continue
            if step in whole.launches:
                break
            run = dry.job(script, **shape, fails=fails)
            (rank, *_) = run.trained or [None]
            warned = re.search(r"(?m)^(warning|note|error): ", run.output)
            warned = warned or any("use" in call.words for call in run.called("module-call"))
            actual, expected = (
                {name: value for name, value in as_in_job(call).items() if name not in own} if call else {}
                for call in (rank, first)
            )
            same = rank and rank.words == first.words and actual == expected
            loads = step.command == "module-call" and {*step.words} & {*site.modules}
            acts = step.command in (whole.launcher, "sbcast")  # on nodes, which ranks do not show
            if (rank or not run.code) and not warned and (loads or acts or not same):
                trained = "trains all the same" if rank else "ends with 0"
                yield f"{script.name}: where {dry.shown(step.text)[:80]!r} fails it {trained}, but should end"


@clause("B1")
def test_ranks_run_in_the_site_s_folder_with_its_python(check, site, dry):
    """Of the environment that install.sh has made, or of the image."""
    prefixes = made_by(dry.install())
    image = Path(site.software.get("image", "")).name if not site.modules else ""
    for script, call in dry.first_ranks(all_ranks=True):
        path = Path(os.path.realpath(Path(call.folder, call.path).parent))
        if prefixes and not any(path.is_relative_to(os.path.realpath(prefix)) for prefix in prefixes):
            yield f"{script.name}: python={dry.shown(call.path)}, but should be in {dry.shown(str(prefixes[0]))}"
        if image and image not in call.environ.get("DRY_RUN_IMAGE", ""):
            yield f"{script.name}: ranks outside of the image {image}, but should be in it"
        if Path(call.folder) != dry.folder:
            yield f"{script.name}: ranks in {dry.shown(call.folder)}, but should be in the site's folder"


@clause("B2")
def test_every_file_that_runs_is_the_site_s_and_listed(check, site, dry):
    listed, seen = {*site.toml.get("files", [])}, {str(path.relative_to(site.folder)) for path in site.scripts}
    of_jobs = {script: dry.job(script, code=75) for script in site.job_scripts}
    for script, run in [("install.sh", dry.install()), *((path.name, run) for path, run in of_jobs.items())]:
        for name in run.read:
            path = Path(name) if Path(name).is_absolute() else dry.folder / name
            relative = os.path.relpath(os.path.realpath(path), os.path.realpath(dry.folder))
            if path.name == script or not (path.is_file() or Path(name).is_absolute()) or path.is_relative_to("/dev/fd"):
                continue
            if path.is_relative_to(dry.top / "etc"):  # the machine's: conda's hook
                continue
            if relative[:2] != ".." and not (dry.pristine / dry.folder.name / relative).exists():
                continue  # what was installed: an environment's activate
            if relative not in listed or relative not in seen:
                yield f"{script} runs {relative}, but should run files of the list `files` alone"
    yield from (f"{name} is named by a script, but should be in `files`, too" for name in sorted(seen - listed) if listed)


@clause("B2")
def test_a_job_trains_what_its_user_has_submitted(check, site, dry):
    """Also when it starts again: no branch that is newer by then, nor packages."""
    for case in site.cases:
        for call in dry.case(case).calls:
            if newer(call):
                yield f"{case.name}: {dry.shown(call.text)[:120]}, but should train with the files that were there"


def newer(call: Call) -> bool:
    """Whether a command takes what is the newest today: git pull, pip install without a version."""
    words = [call.command, *call.words]
    if call.command == "git":
        rest = [*call.words]
        while rest and rest[0].startswith("-"):  # git's own flags
            del rest[: 2 if rest[0] in ("-C", "-c") else 1]
        moves = rest[:1] and rest[0] in ("checkout", "switch", "reset", "merge", "rebase")
        return rest[:1] == ["pull"] or bool(moves and re.search(r"\borigin/|\bupstream\b|FETCH_HEAD|@\{u", " ".join(rest)))
    pip = call.words[:2] == ["-m", "pip"] or call.command in ("pip", "pip3", "uv", "conda", "mamba", "micromamba")
    if pip and {"install", "update", "upgrade"} & {*words}:
        place = max(words.index(word) for word in ("install", "update", "upgrade") if word in words)
        asked = requirements(words[place + 1 :])
        return bool({"--upgrade", "-U"} & {*words}) or "update" in words or any(not pinned(word) for word in asked)
    return False


@clause("B3")
def test_a_rank_is_told_what_site_toml_says(check, site, dry):
    """[launchers.environment] is what the process rung exports: here it is compared with what the job script leads to."""
    launch = site.launches[0]
    domain, suffix = (site.toml["node"].get(name, "") for name in ("domain", "suffix"))
    for script in trains(site):
        for shape in (dict(all_ranks=True), dict(restarts=1, code=75), dict(nodes=1), *of_fewer_ranks(site, script)):
            run = dry.job(script, **shape)
            full_shape = dict(number=FIRST, nodes=site.job(script)["nodes"]) | run.shape
            for call in run.trained:
                rank, per_node, nodes = (int(call.environ[f"DRY_RUN_{name}"]) for name in ("RANK", "PER_NODE", "NODES"))
                values = place_of(rank, per_node, nodes) | dict(restart=full_shape["restarts"])
                patterns = {name: re.escape(str(value)) for name, value in values.items()}
                head = re.escape(dry.hosts(full_shape["nodes"])[0])
                head += re.escape(suffix)
                address = rf"{head}\.{re.escape(domain)}" if domain else rf"{head}(\.[\w.-]+)?|10\.0\.0\.1"
                patterns |= dict(master_addr=f"(?:{address})", master_port=r"\d{4,5}", job_id=rf"\S*{FIRST}\S*")
                for name, template in launch.templates:
                    if "{" not in template or (launch.mpi and "{master" in template):
                        continue
                    value = call.environ.get(name, "0" if template == "{restart}" else None)
                    # How a start is named is the site's affair: the job is in it, and another start has another name.
                    parts = ["{job_id}"] if "{job_id}" in template else re.split(r"(\{\w+\})", template)
                    pattern = "".join(patterns.get(part[1:-1], re.escape(part)) for part in parts)
                    if value is None or not re.fullmatch(pattern, value):
                        head_name = dry.hosts(full_shape["nodes"])[0] + suffix
                        address = dict(master_addr=head_name, master_port="a port", job_id=FIRST)
                        difference = f"{name}={value or 'unset'}, but should be {template.format(**values, **address)}"
                        yield f"{script.name}: rank {rank} of {per_node * nodes}: {difference}"
        names = [name for name, template in launch.templates if "{job_id}" in template or "{restart}" in template]
        starts = [dry.job(script, **shape).trained[:1] for shape in (dict(all_ranks=True), dict(restarts=1, code=75))]
        first, again = ([call.environ.get(name) for call in calls for name in names] for calls in starts)
        if names and first == again:
            yield f"{script.name}: {', '.join(names)} = {first} in both starts of a job, but should differ"


@clause("B3")
def test_what_the_scripts_export_is_there_in_a_container(check, site, dry):
    """What a container leaves out, train.py has not heard: threads, caches, that packages of the user's own do not count.

    Nor what srun leaves out: --export with a list, and without ALL. What a script drops by its name, it means to.
    """
    by_hand = [(script, line) for script in site.scripts if script not in site.job_scripts for line in shown_to_train(script)]
    runs = [dry.job(script) for script in trains(site)] + [dry.command(*each) for each in by_hand]
    exported = {
        name
        for script in site.scripts
        for line in re.findall(r"\bexport ([^\n#]*)", script.read_text())
        for name in re.findall(r"\b([A-Z]\w+)\b=?", line)
    }
    text = "\n".join(path.read_text() for path in site.scripts)
    jobs = {path.name for path in site.job_scripts}
    # What an installation exports is its own.
    text_of_jobs = "\n".join(path.read_text() for path in site.scripts if not path.name.startswith("install"))
    of_jobs = {name for line in re.findall(r"\bexport ([^\n#]*)", text_of_jobs) for name in re.findall(r"\b[A-Z]\w+\b", line)}
    dropped = {name for line in re.findall(r"(?:\bunset|\benv -u)\b(.*)", text) for name in re.findall(r"\b[A-Z]\w+", line)}
    for run in runs:
        for launch in run.launches if run.script in jobs else ():  # by hand its user says what is handed on
            started = [call for call in run.calls if call.rank is not None and call.start_time > launch.start_time]
            lost = sorted((of_jobs - dropped) & {*launch.environ} - {*started[0].environ})
            if lost:
                yield f"{run.script}: {launch.command} without {', '.join(lost[:4])}, but should hand on what is exported"
        containers = [call for call in run.calls if "image" in call.notes]
        for call in [call for call in run.calls if program(call) and "DRY_RUN_IMAGE" in call.environ]:
            *_, outside = [each for each in containers if each.start_time <= call.start_time and each.rank == call.rank]
            lost = sorted(name for name in exported & {*outside.environ} if name not in call.environ)
            if lost:
                yield f"{run.script}: {outside.command} without {', '.join(lost[:4])}, but should hand on what is exported"


def of_fewer_ranks(site, script: Script) -> list[dict]:
    """A job of half as many ranks a node, where srun starts them: then a rank's number tells no more where it is."""
    per_node = site.job(script)["ranks_per_node"] // 2
    if site.toml["launcher"] != "srun" or per_node < 2:
        return []
    options = {"ntasks-per-node": str(per_node)}
    return [dict(nodes=2, all_ranks=True, options=options, ntasks=2 * per_node)]


@clause("B3")
def test_a_job_that_pbs_has_started_twice_is_a_restart(check, site, dry):
    """Slurm tells it in a variable, PBS in qstat's run_count alone; a successor counts the starts of other jobs, too."""
    names = [name for name, template in site.launches[0].templates if template == "{restart}"]
    for script in trains(site) if site.toml["scheduler"] == "pbs" else []:
        for restarts in (0, 3):
            for call in dry.job(script, started=2, restarts=restarts, code=75).trained[:1]:
                wrong = [name for name in names if call.environ.get(name) != str(restarts + 1)]
                subject = f"{script.name}, started twice after {restarts} jobs"
                yield from (f"{subject}: {name}={call.environ.get(name)}, but should be {restarts + 1}" for name in wrong)


@clause("B3")
def test_each_launch_of_a_job_is_a_start_of_its_own(check, site, dry):
    """Where it launches ranks again: those of the launch before may still be there, and `--fresh` is for the first alone."""
    for case in site.cases:
        ranks = sorted(dry.case(case, code=7).trained, key=lambda call: call.start_time)
        for name, template in case.launch.templates if len(ranks) > 1 else ():
            values = [call.environ.get(name, "0") for call in ranks]
            if template == "{restart}" and values != [str(number) for number in range(len(ranks))]:
                yield f"{case.name}, launched {len(ranks)} times: {name}={' '.join(values)}, but should rise by 1 each time"
            if re.search(r"\{(job_id|master_port)\}", template) and not case.launch.mpi and len({*values}) < len(values):
                yield f"{case.name}, launched {len(ranks)} times: {name}={' '.join(values)}, but should differ"


@clause("J11")
def test_who_launches_again_does_so_for_all_that_another_launch_may_mend(check, site, dry):
    """A rank that was lost (7), ranks that did not meet (4), and a kill from outside (137) have the same causes: nodes."""
    for case in site.cases:
        again = len(dry.case(case, code=7).launches)
        for code in (4, 137) if again > 1 else ():
            if (launches := len(dry.case(case, code=code).launches)) != again:
                yield f"{case.name}: launched {launches} times after {code}, but should be {again}, as after 7"


@clause("J11")
def test_nodes_do_not_wait_long_between_launches(check, site, dry):
    """While a script sleeps, with no ranks, they are paid for: after a rank was lost, or all have ended."""
    for case in site.cases:
        for code in (0, 7, 75):
            run = dry.case(case, code=code)
            training = [(call.start_time, call.end_time or 0) for call in run.launches]
            ends = min((end for _, end in training), default=0)
            own = [call for call in run.called("sleep") if ends and call.start_time > ends and call.rank is None]
            for call in [call for call in own if not any(start < call.start_time < end for start, end in training)]:
                if seconds_of(call.words) > MOST_SECONDS_OF_WAIT:
                    yield f"{case.name}: {call.text} after {code}, but should be {MOST_SECONDS_OF_WAIT} s at most"


@clause("B3")
def test_train_py_takes_each_rank_for_who_it_is(check, site, dry, tmp_path):
    """What it makes of the environment that a dry run's rank has found, in a first start and in a later one."""
    for case in site.cases:
        names = []
        for restarts in (0, 1):
            run = dry.case(case, all_ranks=True, **(dict(restarts=restarts, code=75) if restarts else {}))
            for call in run.trained[:1] + ([] if case.launch.mpi else run.trained[-1:]):  # MPI's stub has a rank 0 alone
                place = ("RANK", "RANKS", "NODE", "LOCAL", "PER_NODE")
                rank, ranks, node, local, size = (int(call.environ[f"DRY_RUN_{name}"]) for name in place)
                # A step can have fewer tasks than its job.
                environ = as_in_job(call) | dict(MPI_SIZE=str(ranks), SLURM_NTASKS="97")
                identity = who(site, environ, tmp_path)
                should = dict(rank=rank, world_size=ranks, restart=restarts)
                if not case.launch.mpi:
                    should |= dict(local_rank=local, local_world_size=size, node_rank=node)
                for name, value in should.items():
                    if identity.get(name) != value:
                        observed = identity.get(name, identity.get("refused"))
                        yield f"{case.name}: rank {rank} of {ranks}: {name}={observed}, but should be {value}"
            names.append(identity.get("job_id") if run.trained else None)
        if names[0] == names[1] or FIRST not in str(names[0]):
            yield f"{case.name}: starts are named {names}, but should be named by job {FIRST}, and differ"


@clause("J6")
def test_the_port_depends_on_the_job(check, site, dry):
    """The ranks of two jobs are told different ports, all ranks of a job the same one, and one that Linux gives to nobody."""
    for script in trains(site):
        shapes = (dict(all_ranks=True), dict(number=OTHER), dict(number=LARGE))
        first, other, large = (ports(site, dry.job(script, **shape)) for shape in shapes)
        for name in [name for name in first if len(first[name]) > 1]:
            yield f"{script.name}: {name}={first[name]}, but should be the same in all ranks"
        same = [name for name in first if first[name] == other.get(name)]
        array = dict(SLURM_ARRAY_JOB_ID=LARGE) if site.toml["scheduler"] == "slurm" else {}
        tasks = [ports(site, dry.job(script, number=number, environ=array)) for number in (FIRST, OTHER) if array]
        same += [f"{name} of an array" for name in tasks[0] if tasks[0][name] == tasks[1].get(name)] if array else []
        yield from (f"{script.name}: {name} is one in job {FIRST} and in job {OTHER}, but should differ" for name in same)
        lost = [name for name in first if name not in large]
        yield from (f"{script.name}: no {name} in job {LARGE}, but should be one" for name in lost)
        highest = ports(site, dry.job(script, number=HIGHEST))
        for name, values in (*first.items(), *large.items(), *highest.items()):
            for value in values:
                if not 1024 <= int(value) < 32768:
                    yield f"{script.name}: {name}={value}, but should be 1024 to 32767"


# By which the ranks of a job meet: those of another one, in the environment that sbatch takes along.
OF_ANOTHER_JOB = dict(MASTER_ADDR="elsewhere", MASTER_PORT="29500", DDP_SECRET="0" * 64)


@clause("J6")
def test_ranks_meet_where_their_own_job_says(check, site, dry):
    """Whatever it was submitted from: a shell with a tutorial's MASTER_PORT, or a job. All these would share one."""
    for case in site.cases:
        launcher_variables = {name for name, _ in case.launch.templates} | (set() if case.launch.mpi else {"DDP_SECRET"})
        for call in dry.case(case, environ=OF_ANOTHER_JOB | case.environment).trained[:1]:
            own = OF_ANOTHER_JOB.keys() & launcher_variables
            kept = sorted(name for name in own if call.environ.get(name) == OF_ANOTHER_JOB[name])
            for name in kept:
                yield f"{case.name}: {name}={OF_ANOTHER_JOB[name][:16]} of the shell that submits, but should be the job's own"


def ports(site, run: DryRun) -> dict[str, set[str]]:
    """By variable, or by flag of a command."""
    by_name: dict[str, set[str]] = {}
    port_variables = site.launches[0].variables_with("master_port")
    for call in run.trained:
        for name, value in as_in_job(call).items():
            if (name in port_variables or re.search(r"(^|_)PORT$", name)) and value.isdecimal() and value != "0":
                by_name.setdefault(name, set()).add(value)
    for call in run.calls:
        for name, port in re.findall(r"(--(?:master[-_]port|rdzv[-_]endpoint))[= ](?:\S*:)?(\d{4,})\b", call.text):
            by_name.setdefault(name, set()).add(port)
    return by_name


@clause("J13")
def test_only_interfaces_of_the_node_are_named(check, site, dry):
    interfaces = site.toml["node"]["interfaces"]
    for script in trains(site) if interfaces else []:
        for call in dry.job(script, all_ranks=True).trained[:1]:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CCL_KVS_IFACE", "FI_CXI_DEVICE_NAME", "TP_SOCKET_IFNAME"):
                value = call.environ.get(name)
                leaves_out = name.startswith("NCCL") and (value or "").startswith("^")  # all but these
                parts = (value or "").lstrip("^=" if leaves_out else "=").split(",")
                named = [any(each.startswith(part) for each in interfaces) for part in parts]
                wrong = value and (any(named) if leaves_out else not all(named))
                # By itself gloo takes the one of the node's plain name, which is another one where nodes have a second name.
                of_gloo = name == "GLOO_SOCKET_IFNAME" and (value or {"domain", "suffix"} & {*site.toml["node"]})
                if wrong or (of_gloo and value != interfaces[0]):
                    should = interfaces[0] if of_gloo else f"of {', '.join(interfaces)}"
                    yield f"{script.name}: {name}={value or 'unset'}, but should be {should}"


@clause("J13")
def test_a_network_that_is_not_known_is_not_named(check, site, dry):
    """Where `interfaces` is empty: on the next cluster there is none of that name, or it is one adapter of four."""
    names = re.compile(r".*_(IFNAME|IFACE|HCA|DEVICE_NAME|NET_DEVICES|GID_INDEX)")
    known = {match[1] for text in (*site.facts, *site.provides) if (match := SETS.match(text))}
    lines = [line for path in site.scripts for line in Script(path).lines if not line.is_comment]
    code, to_edit = ("\n".join(line.text for line in lines if line.is_to_edit is edit) for edit in (False, True))
    for script, call in [] if site.toml["node"]["interfaces"] else dry.first_ranks(all_ranks=True, nodes=2):
        for name, value in [each for each in as_in_job(call).items() if names.fullmatch(each[0])]:
            edited = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", to_edit)
            literal = re.search(rf"(=|:-)[\"']?{re.escape(value)}(?![\w.])", code)  # what a job finds out is right there
            if literal and name not in known and not edited and not value.startswith("^"):  # which leaves some out
                yield f"{script.name}: {name}={value}, but should be unset: site.toml has no `interfaces`"


@clause("J13")
def test_ranks_of_one_node_are_sent_to_no_network(check, site, dry):
    """By a plugin that the scheduler sets up for several nodes alone. NCCL's own, Socket and IB, do no harm there.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net
    """
    for case in [case for case in site.cases if "nodes" not in case.options and "select" not in case.options]:
        for call in dry.case(case, nodes=1).trained[:1]:
            if (net := call.environ.get("NCCL_NET", "Socket")) not in ("Socket", "IB"):
                yield f"{case.name} on one node: NCCL_NET={net}, but should be unset, or Socket"


@clause("J13")
def test_no_rank_has_a_variable_for_finding_faults(check, site, dry):
    """Whichever line has set it, and by whichever choice; but one that a source sets for the machine."""
    by_modules = {word.partition("=")[0] for word in site.provides}
    of_facts = {match[1] for fact in site.facts if (match := SETS.match(fact))}
    left_on = re.compile(f"{DEBUGGING.pattern}|{THROTTLING.pattern}")
    ways = [way for way in in_all_ways(site, dry) if not re.search("DEBUG|VERBOSE|TRACE", way[0])]  # which ask for that
    for what, run in ways:
        for call in run.trained[:1]:
            for name, value in as_in_job(call).items():
                if name not in by_modules | of_facts and left_on.match(f"{name}={value}"):
                    yield f"{what}: {name}={value} in a rank, but should be left to who looks for a fault"


@clause("J13")
def test_mpi_looks_for_no_devices(check, site, dry):
    """Users of Cray MPICH on GPUs export 1, which ends each rank whose mpi4py was built without its library for them."""
    name = "MPICH_GPU_SUPPORT_ENABLED"
    text = "\n".join(path.read_text() for path in (site.folder / "README.md", *site.scripts))
    for script in trains(site) if re.search(f"Cray.?MPICH|cray-mpich|{name}", text) else ():
        for call in dry.job(script, environ={name: "1"}).trained[:1]:
            if call.environ.get(name, "0") != "0":
                yield f"{script.name}: {name}={call.environ[name]} in a rank, but should be 0, whatever a shell exports"


@clause("J13")
def test_a_plugin_of_the_user_s_own_is_taken(check, site, dry):
    """Built anew, say, after the machine's libfabric has changed: the module's would run in its place, in silence."""
    for script, call in dry.first_ranks(all_ranks=True, nodes=2):
        named = call.environ.get("NCCL_NET_PLUGIN", "")
        own = f"{Path(named).parent}/./{Path(named).name}"  # the same file, which loads
        run = dry.job(script, all_ranks=True, nodes=2, environ=dict(NCCL_NET_PLUGIN=own)) if "/" in named else None
        if run and not (run.trained and run.trained[0].environ.get("NCCL_NET_PLUGIN") == own):
            yield f"{script.name}: not the NCCL_NET_PLUGIN of the user, but should be ({ending(dry, run)})"


@clause("J13")
def test_a_plugin_that_a_script_builds_is_taken(check, site, dry):
    """Where it says that it does, in the environment: `$prefix/lib/librccl-net.so`, and the job looks for lib64, say.

    A job that names none there has its own way, as LD_LIBRARY_PATH.
    """
    for builder in [path for path in site.scripts if path not in site.job_scripts]:
        text = builder.read_text()
        built = set(re.findall(r"\$(\w+)/([\w./-]*lib\w*-net[\w-]*\.so)\b", text))
        folders = {(top[1], below) for name, below in built if (top := re.search(rf"(?m)^ *{name}=.*/([\w-]+)$", text))}
        code = "\n".join(path.read_text() for path in site.scripts if path != builder)
        environments = {*re.findall(r"([\w./${}-]+)/bin/(?:python|activate)", code)}
        looks = rf"({'|'.join(map(re.escape, environments))})/%s/[\w./-]*-net[\w-]*\.so\b"
        folders = {(top, below) for top, below in folders if environments and re.search(looks % top, code)}
        for script, prefix, (top, below) in itertools.product(trains(site), made_by(dry.install()), sorted(folders)):
            plugin = Path(prefix, top, below)
            run = dry.job(script, nodes=2, halves=(str(plugin.relative_to(dry.top)),))
            if {call.environ.get("NCCL_NET_PLUGIN") for call in run.trained} != {str(plugin)}:
                named = [dry.shown(call.environ.get("NCCL_NET_PLUGIN", "none")) for call in run.trained] or [exit_of(dry, run)]
                yield f"{script.name}: plugin={named[0]}, but should be {dry.shown(str(plugin))}, which {builder.name} builds"


# ---- flags, and where a run is --------------------------------------------------------------------------------------


@clause("J1")
def test_arguments_arrive_word_for_word(check, site, dry):
    wanted = list(ARGUMENTS) if site.toml["scheduler"] == "slurm" else [word for word in ARGUMENTS if " " not in word]
    for case in site.cases:
        for call in dry.case(case, all_ranks=True).trained[:1]:
            check.equal(**{f"last_arguments_of_{case.name}": (arguments(call)[-len(wanted) :], wanted)})


@clause("B4")
def test_the_script_says_where_and_not_what(check, site, dry):
    for case in site.cases:
        for call in [
            call for shape in (dict(all_ranks=True), dict(restarts=1, code=75)) for call in dry.case(case, **shape).trained[:1]
        ]:
            own = arguments(call)[: -len(ARGUMENTS) if site.toml["scheduler"] == "slurm" else -5]
            flags = [word.partition("=")[0] for word in own if word.startswith("--")]
            # The jobs of an array differ in a choice of the training: that is what its script is for.
            chosen = "array" in Script(site.folder / case.script).options
            wrong = [flag for flag in flags if flag not in OWN_FLAGS and not flag.endswith("timeout") and not chosen]
            yield from (f"{case.name}: {flag} is passed to train.py, but should be its user's" for flag in wrong)
            if values_of(own, "--device") in (["cpu"], ["auto"]) and site.toml["node"]["devices"]:
                yield f"{case.name}: --device={values_of(own, '--device')[0]}, but should name the accelerator"
            yield from (f"{case.name}: {text}" for text in chosen_wrongly(site, call, own))
            node, script = site.toml["node"], site.folder / case.script
            threads = node["cores"] * node.get("threads_per_core", 1) // site.job(script)["ranks_per_node"]
            threads = max(threads, Script(script).geometry.get("cpus-per-task", 1))
            for workers in [value for value in values_of(own, "--workers") if value.isdecimal() and int(value) > threads]:
                yield f"{case.name}: --workers={workers}, but should be at most {threads}, the cores of a rank"


# By the beginning of a variable that hands devices to a rank, what PyTorch calls them.
KINDS = dict(ZE_="xpu", CUDA_="cuda", ROCR_="cuda", HIP_="cuda")
LEAST_SECONDS = 60  # that ranks are given to meet, and for a collective


def chosen_wrongly(site, call: Call, own: list[str]) -> Iterator[str]:
    """What is wrong with the device, the backend and the times that a script passes. own: its flags."""
    names = [site.toml["node"]["device_environment"]] if "device_environment" in site.toml["node"] else [*call.environ]
    kinds = {kind for name in names for begin, kind in KINDS.items() if name.startswith(begin)}
    for device in values_of(own, "--device")[-1:]:
        if device in KINDS.values() and kinds and device not in kinds:
            yield f"--device={device}, but should be {' or '.join(sorted(kinds))}, by the variables that ranks have"
        kinds = {device} if device in BACKENDS else kinds
    backends = ["auto", *sorted(BACKENDS[kind] for kind in kinds or BACKENDS)]
    for backend in values_of(own, "--backend"):
        if backend not in backends:
            yield f"--backend={backend}, but should be {' or '.join(backends)}: another one is slower, and nothing says so"
    for flag in [word.partition("=")[0] for word in own if re.match(r"--[\w-]*timeout\b", word)]:
        for value in values_of(own, flag):
            if re.fullmatch(r"[\d.]+", value) and float(value) < LEAST_SECONDS:
                yield f"{flag}={value}, but should be {LEAST_SECONDS} s or more: a slow rank would end the job"


@clause("B4")
def test_a_job_finds_its_run_again_and_no_other_job_s(check, site, dry):
    for script in trains(site):
        places = {}
        for what, shape in dict(first=dict(all_ranks=True), again=dict(restarts=1, code=75), other=dict(number=OTHER)).items():
            for call in dry.job(script, **shape).trained[:1]:
                given = values_of(arguments(call), "--run-dir", "--new-run-dir")
                places[what] = os.path.join(call.folder, given[0]) if given else "none"
        first = places.get("first", "none")
        if first == "none" or not Path(first).is_relative_to(dry.folder):
            yield f"{script.name}: run directory={dry.shown(first)}, but should be below the site's folder"
        if (again := places.get("again", "none")) != first:
            yield f"{script.name}: run directory={dry.shown(again)} when the job comes back, but should be {dry.shown(first)}"
        if places.get("other") == first:
            yield f"{script.name}: run directory={dry.shown(first)} in two jobs, but should differ"


@clause("J11")
def test_torchrun_starts_no_rank_again(check, site, dry):
    """It would do so for every cause. Nor does it begin with fewer nodes than the job has, or end, when some are late."""
    for case in site.cases:
        calls = dry.case(case).called("torchrun")
        max_restarts = [value for call in calls for value in values_of(call.words, "--max-restarts")]
        nodes = [value for call in calls for value in values_of(call.words, "--nnodes") if ":" in value]
        check.equal(**{f"max_restarts_of_{case.name}": ([value for value in max_restarts if value != "0"], [])})
        check.equal(**{f"nnodes_of_{case.name}_that_may_be_fewer": (nodes, [])})
        said = " ".join(value for call in calls for value in values_of(call.words, "--rdzv-conf", "--rdzv_conf"))
        short = [each for each in re.findall(r"\bjoin_timeout=\d+", said) if int(each.partition("=")[2]) < LEAST_SECONDS]
        check.equal(**{f"rdzv_conf_of_{case.name}_with_less_than_{LEAST_SECONDS}_s": (short, [])})


@clause("J9")
def test_torchrun_has_the_cores_of_all_its_ranks(check, site, dry):
    """It is one task of a node, and its ranks stay where it is bound."""
    of_ranks = ("--nproc-per-node", "--nproc_per_node")
    for case in site.cases:
        run, script = dry.case(case), site.folder / case.script
        sizes = [value for call in run.called("torchrun") for value in values_of(call.words, *of_ranks)]
        size = max((int(each) for each in sizes if each.isdecimal()), default=0)  # "gpu" is as many as torch sees
        options, job = Script(script).options, site.job(script)
        tasks = job.get("tasks_per_node", job["ranks_per_node"])  # of one task its ranks have a part each
        each = int(options.get("cpus-per-task", "0")) * tasks // job["ranks_per_node"]
        for call in [call for call in run.launches if call.command == "srun"] if size and each else ():
            sets = bound(call, 1)
            count = len(sets[0]) if sets else cpus_per_task(call, script, site)
            if count < size * each:
                yield f"{case.name}: {count} cores for torchrun, but should be {size} ranks x {each}: {call.text[:120]}"


@clause("J9")
def test_torchrun_divides_the_cores_that_two_devices_share(check, site, dry):
    """Of its ways to bind ranks `node` and `socket` give two ranks of a NUMA node the same cores; unbound, all have all."""
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


@clause("J11")
def test_every_srun_of_ranks_ends_when_one_dies(check, site, dry):
    for script in trains(site):
        for call in dry.job(script, all_ranks=True).launches:
            if call.command == "srun" and not kills(call):
                yield f"{script.name}: {call.text[:120]}, but should have --kill-on-bad-exit=1 among its flags"
            waits = values_of(call.words, "--wait", "-W") or [call.environ.get("SLURM_WAIT", "0")]
            if call.command == "srun" and not LEAST_SECONDS_OF_WAIT <= int(waits[0]) <= MOST_SECONDS_OF_WAIT:
                observed = f"--wait={waits[0]}, but should be {LEAST_SECONDS_OF_WAIT} to {MOST_SECONDS_OF_WAIT} s"
                yield f"{script.name}: {observed}: ranks that are left later hang, and sooner they may be ending well"
            yield from (f"{script.name}: {text}" for text in limits_of_its_own(call))
            if {"--no-abort-on-failure", "--no-kill"} & {*call.words}:
                yield f"{script.name}: {call.text[:120]}, but should end when a rank dies"


def limits_of_its_own(call: Call) -> Iterator[str]:
    """Those of a step: they come without the warning of the job's, unless it has one, too, and nobody raises them with that."""
    words = own_words(call)
    limit = (values_of(words, "--time", "-t") or [call.environ.get("SLURM_TIMELIMIT", "")])[0]
    warned = values_of(words, "--signal") or "SLURM_SIGNAL" in call.environ
    if call.command == "srun" and re.search("[1-9]", limit) and not warned:
        yield f"--time={limit} of srun, but should be the job's: no rank is warned of another limit"
    timed = call.notes.get("timeout", [])
    if timed and not any(re.match("--signal|--preserve-status|-s|-p$", word) for word in timed):
        yield f"ranks under timeout {' '.join(timed)}, but should have the job's limit: after another one 124 hides their code"


# What srun may start that is no stand-in.
SHELLS = ("bash", "sh", "env", "nice", "taskset", "stdbuf", "chrt")


def own_words(call: Call) -> list[str]:
    """A launcher's, without those of the program that it starts."""
    programs = {*command_names(), *SHELLS}
    own = itertools.takewhile(lambda word: word.startswith("-") or not ("/" in word or word in programs), call.words)
    return [*own]


def kills(call: Call) -> bool:
    given = values_of(call.words, "--kill-on-bad-exit", "-K")
    bare = {"-K", "--kill-on-bad-exit"} & {*call.words} and "0" not in given
    return bool("1" in given or bare or call.environ.get("SLURM_KILL_BAD_EXIT") == "1")


# ---- cores, devices, modules, directives ----------------------------------------------------------------------------


@clause("J9")
def test_ranks_share_the_cores_of_a_node(check, site, dry):
    """Bound by the launcher's flags, ranks have cores of their own, none that is reserved, near their device; threads fit."""
    node = site.toml["node"]
    threads = node.get("threads_per_core", 1)
    reserved = {core + thread * node["cores"] for thread in range(threads) for core in numbers(node.get("reserved", ""))}
    tasks = ((name, call, cores) for name, run in in_all_ways(site, dry) for call in run.launches for cores in bound(call, 0))
    for name, call, cores in tasks:
        if of_system := [core for core in cores if core in reserved]:
            yield f"{name}: a task on cores {of_system} ({call.text[:100]}), but should leave them to the system"
    for script, chosen, run in as_chosen(site, dry):
        each = int(run.trained[0].environ["DRY_RUN_PER_NODE"]) if run.trained else site.job(script)["ranks_per_node"]
        if run.code:
            yield f"{script.name} {chosen}: {ending(dry, run)}, but should be 0"
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
                if (
                    device is not None
                    and device < len(near)
                    and not {core % node["cores"] for core in cores} <= {*numbers(near[device])}
                ):
                    path = f"be near device {device}: {near[device]}"
                    yield f"{script.name}: rank {local} of a node on cores {cores}, but should {path}"
            yield from (f"{script.name}: {text}" for text in devices(site, run, call))
            count = len(sets[0]) if sets else cpus_per_task(call, script, site)
            count = count // each if run.called("torchrun") and not sets else count  # the task's, which its ranks divide
            used = len({core % node["cores"] for core in taken}) if sets else count * each / threads
            usable = node["cores"] - node.get("reserved_cores", 0) - site.job(script).get("spare_cores", 0)
            if used <= usable - each:
                yield f"{script.name}: {used:g} cores of a node are used, but should be {usable} (spare_cores in site.toml)"
            for rank in run.trained[:1]:
                omp = rank.environ.get("OMP_NUM_THREADS", "unset")  # two threads on a core are slower than one
                most = len({core % node["cores"] for core in sets[0]}) if sets else -(-count // threads)
                least = max(2, most / 4) if most >= 4 else 1  # the others may be for workers that read rows
                if not omp.isdecimal() or not least <= int(omp) <= most:
                    yield f"{script.name}: OMP_NUM_THREADS={omp}, but should be the {most} cores of a rank"


def memory_of(call: Call, script: Path, site, each: int) -> Iterator[str]:
    """What is wrong with the memory of a step, which is its job's unless it asks for less."""
    words, cpus = own_words(call), cpus_per_task(call, script, site)
    names = {"mem": "NODE", "mem-per-cpu": "CPU", "mem-per-gpu": "GPU"}
    told = {name: call.environ.get(f"SLURM_MEM_PER_{what}", "") for name, what in names.items()}
    step = {name: value for name in names for value in values_of(words, f"--{name}")[-1:]} or told
    of_step, of_job = (gib(options, each * cpus, site.toml["node"]["devices"]) for options in (step, Script(script).options))
    if call.command == "srun" and 0 < of_step < of_job / 2:
        yield f"{of_step:g} GiB of a node for the ranks, but should have the job's {of_job:g}: one that needs more is killed"


def devices(site, run: DryRun, call: Call) -> Iterator[str]:
    """What is wrong with the devices that ranks see, by the launcher's flags."""
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


# By which OpenMP is given cores by their numbers, and not the places of a kind: cores, threads.
# https://gcc.gnu.org/onlinedocs/libgomp/Environment-Variables.html
PINS = dict(GOMP_CPU_AFFINITY=r"\d", KMP_AFFINITY=r"proclist|explicit", OMP_PLACES=r"\{\d")


def threads_bound_alike(run: DryRun) -> Iterator[str]:
    """What is wrong with the cores of a rank's threads: a list that all ranks of a node have puts them on the same ones."""
    nodes = dict[tuple[str, str, str], int]()
    for call in run.trained:
        for name in [name for name, kind in PINS.items() if re.search(kind, call.environ.get(name, ""))]:
            key = (name, call.environ[name], call.environ["DRY_RUN_NODE"])
            nodes[key] = nodes.get(key, 0) + 1
    for name, value in sorted({key[:2] for key, ranks in nodes.items() if ranks > 1}):
        yield f"{name}={value} in several ranks of a node, but should leave each on cores of its own"


def masked(site, run: DryRun, each: int) -> Iterator[str]:
    """What is wrong with the devices that ranks see: every node has the same, and counts them from 0."""
    variable, nodes = site.toml["node"].get("device_environment", ""), dict[int, list[str]]()
    for call in sorted(run.trained, key=lambda call: call.rank or 0):
        nodes.setdefault((call.rank or 0) // each, []).append(call.environ.get(variable, "all"))
    for node, masks in nodes.items():
        if variable and masks != nodes[0]:
            yield f"{variable}={' '.join(masks)} on node {node}, but should be {' '.join(nodes[0])}, as on node 0"
        most = min(each, site.toml["node"]["devices"])
        # Where Slurm gives each rank its own, all are 0.
        if variable and all(map(str.isdecimal, masks)) and 1 < len({*masks}) < most:
            yield f"{variable}={' '.join(masks)}: {len({*masks})} devices of a node are used, but should be {most}"


def bound(call: Call, each: int) -> list[list[int]]:
    """The cores of each rank of a node, where flags of the launcher list them. each: 0 for all that are listed."""
    binding = re.sub(r"^(verbose|v|quiet|q),", "", next(iter(values_of(call.words, "--cpu-bind")), ""))
    kind, _, listed = binding.partition(":")
    # "0x7*4": four of it. https://slurm.schedmd.com/srun.html#OPT_cpu-bind
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
    """In a list NUMBER:VALUE,NUMBER:VALUE: a device that is not in it works otherwise, and all wait for its ranks."""
    devices = site.toml["node"]["devices"]
    for script, chosen, run in as_chosen(site, dry):
        for call in run.trained[:1]:
            for name, value in call.environ.items():
                named = re.findall(r"(?:^|,)(\d+):\d+(?=,|$)", value) if re.fullmatch(r"[\d:,]*,[\d:,]*", value) else []
                if named and sorted(map(int, named)) != [*range(devices)]:
                    yield f"{script.name} {chosen}: {name}={value}, but should name devices 0 to {devices - 1}"
                each = int(call.environ["DRY_RUN_PER_NODE"]) // devices
                if name == PARTS and {*re.findall(r":(\d+)", value)} != {str(each)}:
                    yield f"{script.name} {chosen}: {name}={value}, but should be {each} of each, as many as it has ranks"


# Into how many parts Intel's compute runtime splits each device.
PARTS = "ZEX_NUMBER_OF_CCS"


@clause("J9")
def test_devices_are_chosen_once(check, site, dry):
    """By the one variable of site.toml. Another one chooses among these: a rank's device is not the one near its cores then."""
    own = site.toml["node"].get("device_environment", "")
    for case in site.cases:
        for call in dry.case(case, all_ranks=True).trained if own else ():
            for name in sorted({*MASKS} & call.environ.keys() - {own}):
                seen = call.environ[name].split(",")
                if seen != [str(number) for number in range(len(seen))]:
                    yield f"{case.name}: {name}={call.environ[name]}, but should be chosen by {own} alone"


@clause("J9")
def test_ranks_in_an_image_have_the_node_s_devices(check, site, dry):
    """A container that is to be apart from the node has a /dev without them, unless it is told of GPUs, too."""
    for what, run in in_all_ways(site, dry) if site.toml["node"]["devices"] else ():
        for call in [call for call in run.trained[:1] if "DRY_RUN_NO_DEVICES" in call.environ]:
            image = Path(call.environ["DRY_RUN_IMAGE"]).name
            yield f"{what}: no device in {image}, but should be (--contain without --nv or --rocm hides /dev)"


@clause("J9")
def test_ranks_of_a_part_of_a_node_see_devices_that_it_has(check, site, dry):
    """Slurm counts those of a job from 0: of two, a list that begins with the node's last names none, and CUDA sees none."""
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


@clause("J9")
def test_runs_side_by_side_share_the_devices_out(check, site, dry, tmp_path):
    """Where a program's head shows how to start several: each sees as many devices as it has ranks, and all are used."""
    variable, count = site.toml["node"].get("device_environment", ""), site.toml["node"]["devices"]
    for script in sorted(site.folder.glob("*.py")) if variable else ():
        lines = re.findall(rf"(?m)^    (\S*python {re.escape(script.name)} .*? -- .*?)(?: {{4,}}.*)?$", script.read_text())
        halved = [re.sub(r"--ranks (\d+)", lambda match: f"--ranks {max(1, int(match[1]) // 2)}", line) for line in lines]
        lessened = [re.sub(r"--ranks (\d+)", lambda match: f"--ranks {max(1, int(match[1]) - 1)}", line) for line in lines]
        lessened = [
            line for line in lessened if dry.command(script, line, devices=[*range(count)]).code != 2
        ]  # if that is taken
        close = [re.sub(r"(?<=--lr )[\d. ]+\d", "0.00001 0.000012", line) for line in lines]
        for line in lines[:1]:
            if not (run := dry.command(script, line, fails="one run")).code:
                yield f"{line!r}, one of whose runs is killed: {ending(dry, run)}, but should be that run's"
        cases = [(line, [*range(count)]) for line in dict.fromkeys([*lines, *halved, *lessened, *close])]
        # Half a node, as `--gpus 2` gives it: the numbers need not begin at 0.
        for line, visible in [*cases, *((line, [*range(count // 2, count)]) for line in halved if count > 3)]:
            run = dry.command(script, line, devices=visible)
            outside = [call for call in run.calls if call.rank is None]
            started = [call for call in outside if program(call) or "torch.distributed.run" in call.words]
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
            for call in [call for call in started if program(call)][:1]:  # without torchrun
                if refused := who(site, as_in_job(call), tmp_path).get("refused"):
                    yield f"{line!r}: train.py says {refused!r}, but should be a world of one"
            apart = ("--standalone", "--rdzv", "--master")
            meet = [call for call in started if "torch.distributed.run" in call.words and not any(map(call.text.count, apart))]
            if meet:
                yield f"{line!r}: a torchrun without --standalone, but should meet no other"


@clause("J9")
def test_srun_is_told_of_cores_once(check, site, dry):
    """By masks, or by a number: with both, the environment's too, it binds to half of a mask's cores, or refuses it."""
    for case in site.cases:
        for call in dry.case(case).launches if site.toml["launcher"] == "srun" else ():
            number = [name for name in ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK") if name in call.environ]
            if re.search(r"--cpu-bind=\S*(mask|map)_cpu", call.text) and number:
                yield f"{case.name}: srun finds {' and '.join(number)} beside its masks, but should not"


@clause("J9")
def test_a_notebook_takes_the_devices_that_there_are(check, site):
    """One, where Jupyter has given one: four ranks would share it, and be refused."""
    stand_in = "class torch:\n  class cuda:\n    def device_count(): return {}\n  accelerator = cuda\n"
    for name, cells in notebooks(site).items():
        lines = re.findall(r"(?m)^ranks\s*=.*", "\n".join(cells))
        if any("--nproc-per-node" in cell for cell in cells):
            check.equal(**{f"numbers_of_ranks_in_{name}": (len(lines), 1)})
        for devices, line in itertools.product((1, 4), lines):
            program = [sys.executable, "-c", f"{stand_in.format(devices)}\n{line}\nprint(ranks)"]
            result = subprocess.run(program, capture_output=True, text=True, check=False)
            printed = (result.stdout + result.stderr).strip()
            check.equal(**{f"ranks_of_{name}_on_{devices}_devices": (printed, str(devices))})


@clause("B10")
def test_a_notebook_that_is_opened_again_goes_on(check, site):
    """By default in the same folder, and not from the start: else what was trained is lost with its kernel."""
    for name, cells in notebooks(site).items():
        check.equal(**{f"{name}_begins_anew": (any("--fresh" in cell for cell in cells), False)})
        lines = [line for cell in cells for line in ast.parse(re.sub(r"(?m)^\s*[%!].*", "", cell)).body]
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


@clause("B10")
def test_a_notebook_has_not_been_run(check, site):
    """Another machine's output looks like one's own, and each run by somebody is a change of the file."""
    for path in sorted(site.folder.glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        run = [number for number, cell in enumerate(cells, 1) if cell.get("outputs") or cell.get("execution_count") is not None]
        check.equal(**{f"cells_of_{path.name}_that_were_run": (run, [])})


def notebooks(site) -> dict[str, list[str]]:
    """The cells of code of each."""
    all_cells = {path.name: json.loads(path.read_text())["cells"] for path in sorted(site.folder.glob("*.ipynb"))}
    return {name: ["".join(cell["source"]) for cell in all_cells[name] if cell["cell_type"] == "code"] for name in all_cells}


def as_chosen(site, dry) -> Iterator[tuple[Path, dict, DryRun]]:
    """Every script that trains, and its run with all ranks: as it is, and by each choice that its head tells of."""
    for script in trains(site):
        yield script, {}, dry.job(script, all_ranks=True)
        for chosen in alternatives(script):
            yield script, chosen, dry.job(script, all_ranks=True, environ=chosen, nodes=2)


def in_all_ways(site, dry) -> Iterator[tuple[str, DryRun]]:
    """The runs of as_chosen, and those of the choices that scripts mark, each with what was chosen, in words."""
    for script, chosen, run in as_chosen(site, dry):
        yield " ".join([script.name, *(f"{name}={value}" for name, value in chosen.items())]), run
    yield from ((case.name, dry.case(case, all_ranks=True)) for case in site.cases)


def alternatives(script: Path) -> list[dict[str, str]]:
    """The values of variables that the table in a script's head has beside the default."""
    return [{name: value} for name, _, values in Script(script).variables for value in values]


def device_of(site, run: DryRun, local: int, each: int) -> int | None:
    """The device of a rank that sees several, by the machine's number. each: ranks of a node, which share all its devices."""
    node, variable = site.toml["node"], site.toml["node"].get("device_environment")
    if node["devices_visible_to_a_rank"] < node["devices"] or not variable:
        return None
    call = next((call for call in run.trained if int(call.environ["DRY_RUN_RANK"]) == local), None)
    seen = [text for text in (call.environ.get(variable, "") if call else "").split(",") if text]
    if call and not seen:  # by a choice of the script a device may be another thing: two tiles, say
        return local * node["devices"] // each
    own = seen[0] if len(seen) == 1 else seen[local] if local < len(seen) else ""  # of one, all its ranks have that
    return int(own) if own.isdecimal() else None


def in_blocks(call: Call, script: Path, site, each: int) -> list[list[int]]:
    """The cores of each rank of a whole node of one socket, where srun binds them in its own order."""
    node = site.toml["node"]
    size = cpus_per_task(call, script, site) // node.get("threads_per_core", 1)
    in_order = call.command == "srun" and "cores" in values_of(call.words, "--cpu-bind") and node.get("sockets", 1) == 1
    whole = in_order and size * each == node["cores"]
    return [[*range(rank * size, rank * size + size)] for rank in range(each)] if whole else []


def cpus_per_task(call: Call, script: Path, site) -> int:
    node, each = site.toml["node"], site.job(script)["ranks_per_node"]
    if depth := values_of(call.words, "--depth", "-d"):  # in the order of the CPUs: their first ones are of different cores
        return min(int(depth[0]), node["cores"] // each) * node.get("threads_per_core", 1)
    values = values_of(call.words, "--cpus-per-task", "-c") or [Script(script).options.get("cpus-per-task", "")]
    return int(values[0]) if values[0].isdecimal() else node["cores"] // each


@clause("J3")
def test_ranks_have_the_paths_that_the_sources_put_together(check, site, dry):
    """`export A=$B:$A` takes what B is after the modules are loaded, and before what A was: else it is another's, or empty."""
    added = re.findall(r"(?m)^export (\w+)=\$(\w+):\$\1$", "\n".join(map(plain, site.facts)))
    for script, chosen, run in as_chosen(site, dry) if added else ():
        for call in run.trained[:1]:
            for name, part in added:
                if (value := call.environ.get(part, "")) and value not in call.environ.get(name, "").split(":"):
                    yield f"{script.name} {chosen}: {part}={dry.shown(value)}, but should have it in the ranks' {name}"
    for script, (name, _) in itertools.product(trains(site), added):
        for call in dry.job(script, environ={name: OF_A_USER}).trained[:1]:
            if len(parts := call.environ[name].strip(":").split(":")) > 1 and parts[-1] != OF_A_USER:
                observed = f"{script.name}: {name}={dry.shown(':'.join(parts))}"
                yield f"{observed}, but should put the new before it, as a fact of [[sources]] does"


# And its value, which has none of the shell's words in it.
SETTING = re.compile(SETS.pattern + r"[`'\"]?([^`'\"$\s;#/][^`'\"$\s;#]*)[`'\"]*\s*(?:$|[;#])")


@clause("J3")
def test_ranks_have_the_values_of_the_sources(check, site, dry):
    """However a script arrives at them: the default of `${NAME:-value}` is none that can be read off. Paths are its own."""
    known: dict[str, set[str]] = {}
    for match in filter(None, map(SETTING.match, site.facts)):
        known.setdefault(match[1], set()).add(match[2])
    to_edit = {name for script in map(Script, site.scripts) for line, name in script.exports if line.is_to_edit}
    names = [name for name in sorted(known.keys() - to_edit) if not name.endswith(("PATH", "_PLUGIN"))]
    for what, run in in_all_ways(site, dry) if names else ():
        for call in run.trained:
            for name in names:
                if (value := call.environ.get(name)) is not None and value not in known[name]:
                    should = f"{' or '.join(sorted(known[name]))}, as a fact of [[sources]] says"
                    yield f"{what}: {name}={dry.shown(value)} in a rank, but should be {should}"


@clause("J3")
def test_ranks_of_many_nodes_have_what_is_said_to_be_for_them(check, site, dry):
    """By the comment above an exported variable, "beyond 1024 nodes": nobody tries it before it is needed."""
    asked = re.compile(r"\b(?:beyond|above|more than) ([\d,]*\d) nodes\b")
    scripts = [Script(path) for path in site.scripts if path.suffix != ".py" and not path.name.startswith("install")]
    exports = [(name, asked.search(" ".join(line.paragraph))) for script in scripts for line, name in script.exports]
    for name, said in [(name, said) for name, said in exports if said]:
        runs = [dry.job(script, nodes=int(said[1].replace(",", "")) + 1) for script in trains(site)]
        if not any(name in call.environ for run in runs for call in run.trained):
            yield f"no {name} in ranks {said[0]}, but should be there, as the comment above it says"


@clause("J3")
def test_commands_have_the_options_that_the_sources_give_them(check, site, dry):
    """A fact that is a command which the scripts call: one call has all its long options, and its name=version."""
    facts = [words for fact in site.facts if (words := of_command(fact))]
    facts = [words for words in facts if words[0] in command_names() | {site.toml["launcher"]}]
    unloads = [match[1] for fact in site.facts if (match := re.match(r"module unload (\S+)$", plain(fact)))]
    given_variables = [each for each in map(with_variables, site.facts) if each[0] and each[1][0] in command_names()]
    runs = [run for _, run in in_all_ways(site, dry)] if facts or unloads or given_variables else []
    runs += [dry.install(*flags) for flags in [(), *given(dry)]] if runs else []
    calls = [call.words for run in runs for call in run.called("module-call")]
    for name in [name for name in unloads if not any({"unload", name} <= {*words} for words in calls)]:
        yield f"no module unload {name}, but should be one, as a fact of [[sources]] says"
    for variables, (command, *_) in given_variables:
        own = [call for run in runs for call in run.calls if command in (call.command, *call.words[:2])]
        if not any(variables.items() <= call.environ.items() for call in own):
            told = " ".join(f"{name}={value!r}" for name, value in variables.items())
            yield f"no {command} has {told}, but one should, as a fact of [[sources]] says"
    for command, *words in facts:
        asked = {word for word in words if re.fullmatch(r"--[a-z][\w-]*(=[^$<{]+)?|[a-z][\w-]*==?\d[\w.]*", word)}
        asked |= {f"--channel={name}" for flag, name in itertools.pairwise(spelt_out(command, words)) if flag == "--channel"}
        lost = [asked - {*with_values(spelt_out(command, call.words))} for run in runs for call in run.called(command)]
        if least := min(lost, key=len, default=set()):
            fact = " ".join([command, *words])
            yield f"no {command} with {' '.join(sorted(least))}, but one should have it: a fact of [[sources]] is {fact}"


@clause("J3")
def test_ranks_are_bound_as_the_sources_say(check, site, dry):
    """A list of cores among the facts is that of some launch, to the last number."""
    lists = [fact for fact in site.facts if re.fullmatch(r"list:[\d,:-]+", fact)]
    launches = [call for _, run in in_all_ways(site, dry) for call in run.launches] if lists else []
    for fact in [fact for fact in lists if not any(fact in values_of(call.words, "--cpu-bind") for call in launches)]:
        yield f"no launch has --cpu-bind {fact[:60]}..., but one should, as a fact of [[sources]] says"
    # Of masks a fact may have a part, the first one behind `mask_cpu:`; fewer cores of a mask are its own, too.
    mask = r"(?:0x[0-9a-f]+|[0-9]*[a-f][0-9a-f]*)"
    facts = [match.groups() for fact in site.facts if (match := re.fullmatch(rf"(\S*mask_cpu:)?({mask}(?:,{mask})+)", fact))]
    launches = [call for _, run in in_all_ways(site, dry) for call in run.launches] if facts else []
    masks = [[int(each, 16) for each in text.split(",")] for call in launches for text in masks_of(call)]
    masks = [each for each in masks if len(each) > 1]  # not the one of a torchrun
    for first, fact in facts if masks else ():
        wanted = [int(each, 16) for each in fact.split(",")]
        starts = [(each, start) for each in masks for start in range(len(each) - len(wanted) + 1) if not (first and start)]
        runs = [each[start : start + len(wanted)] for each, start in starts]
        alike = [pair for pair in runs if all(one & two in (one, two) and one for one, two in zip(pair, wanted, strict=True))]
        if not alike:
            order = "first" if first else "one after the other"
            yield f"no launch has the masks {fact} {order}, but one should, as a fact of [[sources]] says"


def masks_of(call: Call) -> list[str]:
    return [value.partition("mask_cpu:")[2] for value in values_of(call.words, "--cpu-bind") if "mask_cpu:" in value]


def of_command(fact: str) -> list[str]:
    """Its own words, without those of the program that it starts."""
    try:
        words = shlex.split(fact.strip("`'\" "))
    except ValueError:  # a quote alone: it is prose
        return []
    return [*itertools.takewhile(lambda word: not re.search(r"^python[\d.]*$|^\./|\.(py|sh|sl|pbs)$", word), words)]


def with_variables(fact: str) -> tuple[dict[str, str], list[str]]:
    """Those that a command in a fact is given before its name, and its words: `NAME="two words" command ...`."""
    words = of_command(fact) or [""]
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: re.match(r"[A-Z]\w*=", word), words))
    return variables, words[len(variables) :] or [""]


def spelt_out(command: str, words: list[str]) -> list[str]:
    """Of conda's channels the long option: -c is another one to other commands."""
    return ["--channel" if word == "-c" and command in ("conda", "mamba", "micromamba") else word for word in words]


def with_values(words: list[str]) -> list[str]:
    """The words of a call, and its options as a fact may write them: without their value, and with it behind a `=`."""
    pairs = [f"{flag}={value}" for flag, value in itertools.pairwise(words) if flag.startswith("--")]
    return [*words, *pairs, *(word.partition("=")[0] for word in words if word.startswith("--"))]


@clause("F8")
def test_a_library_path_that_torch_needs_is_the_ranks_own(check, site, dry):
    """Where torch is found by it alone: the scheduler's commands would load its libraries in the place of the system's."""
    for script in trains(site):
        for fails, look in [(fails, call) for fails, call in dry.job(script, code=75).steps if "import torch" in call.text]:
            run, before = dry.job(script, code=75, fails=fails), look.environ.get("LD_LIBRARY_PATH")
            found = [call.environ["LD_LIBRARY_PATH"] for call in run.calls if "import torch" in call.text and not call.code]
            for rank in run.trained[:1] if found and found[0] != before else ():
                if rank.environ.get("LD_LIBRARY_PATH", "").split(":")[0] != found[0].split(":")[0]:
                    observed = f"LD_LIBRARY_PATH={dry.shown(rank.environ.get('LD_LIBRARY_PATH', 'unset'))} in a rank"
                    yield f"{script.name}: {observed}, but should begin with {found[0].split(':')[0]}, where torch was found"
            others = [call for _, call in run.steps if not call.command.startswith("python")] if run.trained else []
            commands = {call.command for call in others if call.environ.get("LD_LIBRARY_PATH") not in (before, None, "")}
            for name in sorted(commands):
                yield f"{script.name}: {name} gets the library path of the ranks, but should not"


@clause("F8")
def test_modules_are_loaded_once_and_kept(check, site, dry):
    for script in trains(site):
        run, loaded = dry.job(script, all_ranks=True), []
        launched = min((call.start_time for call in run.launches), default=math.inf)
        for call in run.called("module-call"):
            words = [word for word in call.words if not word.startswith("-")]
            if call.start_time > launched and words[:1] != ["list"]:
                yield f"{script.name}: module {' '.join(words)} after the launch, but should be before"
            its = [name for name in loaded if {name, name.partition("/")[0]} & {*words[1:]}]
            if (words[:1] in (["purge"], ["reset"]) and loaded) or (words[:1] == ["unload"] and its):  # others may go late
                yield f"{script.name}: module {' '.join(words)} after module load {loaded[-1]}, but should be before"
            if words[:1] in (["swap"], ["switch"]):  # the last one takes the place of the first
                loaded, words = [name for name in loaded if name not in its], ["load", words[-1]]
            loaded += words[1:] if words[:1] in (["load"], ["add"]) else []
        if loaded != site.modules:
            yield f"{script.name}: loads {' '.join(loaded)}, but should load {' '.join(site.modules)}, in this order"


@clause("F8")
def test_the_modules_of_a_login_shell_are_cleared_first(check, site, dry):
    """sbatch hands its environment on, with the libraries of whatever is loaded there."""
    clears, runs = site.software.get("cleared_by", ""), {}
    if clears and site.modules:
        runs = {script.name: dry.job(script) for script in trains(site)} | {"install.sh": dry.install()}
    elif clears and (case := with_modules(site, "another/1.0")):  # a site that names none, and whose user will
        runs = {case.script: dry.job(site.folder / case.script, case=case), "install.sh": dry.install(case=case)}
    elif not clears and site.modules:
        runs = {script.name: dry.job(script) for script in trains(site)} | {"install.sh": dry.install()}
    for name, run in runs.items():
        acts = [next((word for word in call.words if not word.startswith("-")), "") for call in run.called("module-call")]
        before = acts[: acts.index("load")] if "load" in acts else []
        if "load" in acts and clears and clears not in before:
            yield f"{name}: module load without module {clears} before, but should have it (software.cleared_by)"
        for act in [act for act in before if act in ("purge", "reset") and not clears]:
            yield f"{name}: module {act} before module load, but should be without, or software.cleared_by should name it"


@clause("B8")
def test_directives_ask_for_what_the_machine_has(check, site):
    queue = site.toml.get("queue", {})
    known = dict(partition="partitions", q="partitions", qos="qos", constraint="constraints")
    for script in map(Script, site.job_scripts):
        options = script.options
        for option, key in known.items():
            wanted = re.split(r"[&|,]", options[option]) if option in options else []
            wrong = [name for name in wanted if queue.get(key) and name not in queue[key]]
            yield from (f"{script.path.name}: {option}={name}, but should be one of {', '.join(queue[key])}" for name in wrong)
        for option in ("account", "A"):
            if option in options and "account" in queue and options[option] != queue["account"]:
                yield f"{script.path.name}: {option}={options[option]}, but should be {queue['account']}, as in site.toml"
        pbs = " ".join(text for _, text in script.directives)
        systems = re.search(r"filesystems=(\S+)", pbs)
        if "filesystems" in queue and not (systems and {*systems[1].split(":")} <= {*queue["filesystems"]}):
            yield f"{script.path.name}: filesystems={systems and systems[1]}, but should be of {':'.join(queue['filesystems'])}"
        for words in site.job(script.path).get("ends_when_stopped", []):
            if words_of(words).items() <= options.items():
                yield f"{script.path.name}: {words} as it stands, but should come back (ends_when_stopped)"
        if (one := options.get("q")) in queue.get("one_job", []):
            yield f"{script.path.name}: q={one}, but should be a queue that takes the job that follows (one_job)"
        limits = queue.get("minutes", {})
        asked = options.get("time") or (re.search(r"walltime=(\S+)", pbs) or ["", ""])[1]
        for name in {options.get("partition"), options.get("qos"), options.get("q")} & limits.keys():
            if asked and minutes(asked) > limits[name]:
                yield f"{script.path.name}: time={asked}, but should be at most {limits[name]} minutes in {name}"
        if site.toml["scheduler"] == "slurm" and asked and minutes(asked) < 1:
            yield f"{script.path.name}: time={asked}, but should be a minute or more"


@clause("B8")
def test_sessions_that_users_are_shown_ask_for_what_the_machine_has(check, site):
    """`salloc ...` and its like, in README.md and the heads of scripts: queues as site.toml has them, GPUs as the job's."""
    queue, slurm = site.toml.get("queue", {}), site.toml["scheduler"] == "slurm"
    known = dict(partition="partitions", q="partitions", qos="qos", constraint="constraints")
    known = known if not slurm else {option: key for option, key in known.items() if option != "q"}
    of_jobs = [Script(path).options.keys() & OF_GPUS for path in trains(site)]
    for name, command, paragraph in sessions(site):
        options = options_of(command, slurm)
        for option, key in known.items():
            wanted = [each for each in re.split(r"[&|,]", options.get(option, "")) if re.search(r"[a-z]", each)]  # not NAME
            wrong = [each for each in wanted if re.fullmatch(r"[\w.-]+", each) and queue.get(key) and each not in queue[key]]
            yield from (f"{name}: {command!r}: {option}={each}, but should be one of {', '.join(queue[key])}" for each in wrong)
        asked, limits = options.get("time", ""), queue.get("minutes", {})
        for each in {options.get("partition"), options.get("qos")} & limits.keys():
            if re.fullmatch(r"[\d:-]*\d", asked) and minutes(asked) > limits[each]:
                yield f"{name}: {command!r}: time={asked}, but should be at most {limits[each]} minutes in {each}"
        trains_there = command.startswith("salloc") and re.search(r"\btrain|torchrun|\.py\b", paragraph)
        if slurm and trains_there and all(of_jobs) and not options.keys() & {*OF_GPUS, "exclusive"}:
            yield f"{name}: {command!r}: no GPU, but should ask for some, as the job does"


# Options of Slurm's that give a job GPUs. Of --exclusive it gets all of its nodes.
OF_GPUS = {"gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task"}


def sessions(site) -> Iterator[tuple[str, str, str]]:
    """The commands for an interactive job that users are shown: where, the command, and the paragraph around it."""
    pattern = r"(?:salloc|srun|qsub -I) [^`\n]*"
    for name, paragraph in paragraphs(site):
        yield from ((name, command, paragraph) for command in re.findall(rf"`({pattern})`", " ".join(paragraph.split())))
        yield from ((name, command.strip(), paragraph) for command in re.findall(rf"(?m)^({pattern})", paragraph))
    for path in site.scripts:
        head = path.read_text().partition("\nset -")[0]
        yield from ((path.name, command, head) for command in re.findall(rf"(?m)^#   ({pattern}?)(?:  +.*)?$", head))


def paragraphs(site) -> list[tuple[str, str]]:
    """Those of README.md, an item of a list being one; not of what is told of failures, nor of another's documents."""
    sections = re.split(r"(?m)^## ", (site.folder / "README.md").read_text())
    kept = [text for text in sections if not re.match(r"(Known failures|Coming from|Where this differs)", text)]
    return [("README.md", each) for text in kept for each in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text)]


@clause("F8")
def test_the_readme_loads_the_modules_of_site_toml(check, site):
    """Where users are shown how to train by hand: .venv is made with one version, and works with no other."""
    versions = {name.partition("/")[0]: name for name in site.modules if "/" in name}
    isolated = any(re.search(r"(?m)^\s*export .*\bPYTHONNOUSERSITE=", path.read_text()) for path in trains(site))
    for name, paragraph in paragraphs(site):
        text = " ".join(paragraph.split())
        for words in re.findall(r"`module (?:load|add) ([^`]+)`", text) if re.search(r"\btrain|\.venv\b|\.py\b", text) else ():
            for word in [word for word in words.split() if "/" in word and word.partition("/")[0] in versions]:
                if word != (own := versions[word.partition("/")[0]]):
                    yield f"{name}: module load {word}, but should be {own}, as the job loads"
            torch = [word for word in words.split() if "torch" in site.software.get("provides", {}).get(word, [])]
            if torch and isolated and re.search(r"/python3? train\w*\.py", text) and "PYTHONNOUSERSITE" not in text:
                yield f"{name}: no PYTHONNOUSERSITE by hand, but should be, as in the job: ~/.local comes before {torch[0]}"


@clause("F10")
def test_the_readme_has_the_values_of_the_ranks(check, site, dry):
    """Of a variable that ranks have; a table may tell what it was elsewhere. Of what it says "no `NAME`", they have none."""
    lines = [line for line in (site.folder / "README.md").read_text().splitlines() if not line.lstrip().startswith("|")]
    text = " ".join(" ".join(lines).split())
    # Not what would be, or what users may do: "with `NAME=1` it ends", "set `NAME=1`".
    condition = re.compile(r"\b(with|if|set|export|pass|instead)\b[^.;:]*$")
    spans = re.finditer(r"`([A-Z]\w+)=[\"']?([^`\"' ]+)[\"']?`", text)
    told = [match.groups() for match in spans if not condition.search(text[max(0, match.start() - 60) : match.start()])]
    runs = [run for _, run in in_all_ways(site, dry)] + [dry.job(script, nodes=1) for script in trains(site)] if told else []
    for name, value in told:
        values = {dry.shown(call.environ[name]) for run in runs for call in run.trained if name in call.environ}
        if values and value not in values:
            yield f"README.md: {name}={value}, but should be {' or '.join(sorted(values))}, as in ranks"
    tabled = [("README.md", *row) for row in values_in_tables(site.folder / "README.md", "value")]
    if site.folder.parent == ROOT / "sites":
        tabled += [("sites/README.md", *row) for row in values_in_tables(ROOT / "sites/README.md", site.name)]
    runs = [run for _, run in in_all_ways(site, dry)] if tabled else []
    code = "\n".join(line.text for script in map(Script, site.scripts) for line in script.lines if not line.is_comment)
    for place, name, value in tabled:
        values = {dry.shown(call.environ[name]) for run in runs for call in run.trained if name in call.environ}
        if value != UNSET or place == "sites/README.md":  # of what no dry run comes to
            values = values or {*re.findall(rf"\b{name}=[\"']?([\w.,/-]+)", code)}
        values = values or {UNSET} if place == "sites/README.md" else values
        if values and value not in values:
            yield f"{place}: {name}={value} in a table, but should be {' or '.join(sorted(values))}, as in ranks"
    rows = [line for line in (site.folder / "README.md").read_text().splitlines() if re.search(r"\| left out *[:;,.|]", line)]
    left_out = [each for row in rows for each in re.findall(r"`([A-Z]\w+)=?([^`]*)`", row.partition("| left out")[0])]
    for (name, value), script in itertools.product(left_out, trains(site)):
        for call in dry.job(script, nodes=site.most_nodes).trained[:1]:
            if name in call.environ and value in ("", call.environ[name]):
                yield f"{script.name}: {name}={call.environ[name]} in a rank, but README.md says that it is left out"
    ours = "\n".join([*site.facts, *(path.read_text() for path in site.scripts)])
    without = [name for name in re.findall(r"\bno `([A-Z]\w+)`", text) if name in ours]  # another one is the user's own
    for name, script in itertools.product(without, trains(site)):
        for call in dry.job(script, environ={name: "1"}).trained[:1]:
            if name in call.environ:
                yield f"{script.name}: {name}={call.environ[name]} in a rank, but README.md says no {name}"


UNSET = "not set"


def values_in_tables(path: Path, column: str) -> list[tuple[str, str]]:
    """Variables, each with its value in this column, or UNSET, of the tables that have a row for each."""
    rows = []
    for head, cell in cells_of(path, column):
        name = re.fullmatch(r"`([A-Z][A-Z0-9_]+)`", head)
        value = re.fullmatch(rf"(`?)([\w.,/-]+|{UNSET})\1", re.sub(r"^(not set|unset)(\W*$|:.*)", UNSET, cell))
        rows += [(name[1], value[2])] if name and value and value[2] != "-" else []
    return rows


def cells_of(path: Path, column: str) -> list[tuple[str, str]]:
    """Those of this column, each behind the first one of its row."""
    rows, heads = [], []
    for line in path.read_text().splitlines() if path.is_file() else ():
        cells = [cell.strip() for cell in line.strip().split("|")[1:-1]]
        heads = heads if cells and heads else cells
        rows += [(cells[0], cells[heads.index(column)])] if column in heads[1 : len(cells)] else []
    return rows


@clause("F10")
def test_the_table_of_all_sites_has_their_numbers(check, site, dry):
    """It is where users compare machines. Flags that give ranks their cores are the launcher's."""
    own = {"ranks a node": site.toml["job"]["ranks_per_node"]}
    own |= {"devices a rank sees": site.toml["node"]["devices_visible_to_a_rank"]}
    table = ROOT / "sites/README.md"
    for head, cell in cells_of(table, site.name) if site.folder.parent == table.parent else ():
        number = re.match(r"\d+", cell)
        if head in own and number and int(number[0]) != own[head]:
            yield f"sites/README.md: {head}: {cell}, but should be {own[head]}, as site.toml says"
        for flag in re.findall(r"`(-[^`]+)`", cell) if head == "a rank's cores" else ():
            name, _, value = re.sub(r"^-c=?", "--cpus-per-task=", flag).partition("=")
            for call in dry.job(trains(site)[0]).launches:
                told = values_of(call.words, name, "-c" if name == "--cpus-per-task" else name)
                if not told or value not in ("", *told):
                    has = f"{call.command} has {name}={' '.join(told) or 'unset'}"
                    yield f"{has}, but should have {flag}, as sites/README.md says"


@clause("B8")
def test_directives_ask_for_all_that_the_machine_wants(check, site):
    """What is left out, a scheduler refuses, or puts what it likes in its place: an hour, nodes without the disk."""
    queue, slurm = site.toml.get("queue", {}), site.toml["scheduler"] == "slurm"
    wanted = dict(account="account", constraint="constraints") if slurm else dict(A="account")
    wanted = {option: key for option, key in wanted.items() if queue.get(key)}
    if len(queue.get("partitions", [])) > 1:
        wanted["partition" if slurm else "q"] = "partitions"
    for script in map(Script, site.job_scripts):
        options = script.options
        lost = [name for name in wanted if name not in options]
        yield from (f"{script.path.name}: no directive {name}, but should be one ({wanted[name]} of [queue])" for name in lost)
        if not ("time" in options if slurm else re.search(r"(?m)^#PBS .*walltime=", script.text)):
            yield f"{script.path.name}: no directive with a time limit, but should be one"
        named = [options[name] for name in ("partition", "qos", "q") if name in options]
        placeholder = PLACEHOLDER.search(queue.get("account", ""))
        if named and "minutes" in queue and not placeholder and not {*named} & queue["minutes"].keys():
            yield f"queue.minutes has nothing of {' and '.join(named)}, which {script.path.name} asks for, but should"


# ---- what it prints, writes, removes and installs -------------------------------------------------------------------


@clause("B9")
def test_each_start_has_a_secret_of_its_own(check, site, dry):
    """Ranks that ask MPI who they are can agree on one there."""
    for script in trains(site) if not site.launches[0].mpi else []:
        runs = [dry.job(script, all_ranks=True), dry.job(script, restarts=1, code=75)]
        secrets = [{call.environ.get("DDP_SECRET", "") for call in run.trained} for run in runs]
        for run, values in zip(runs, secrets, strict=True):
            lengths = sorted(map(len, values))
            if len(lengths) != 1 or lengths[0] < 32:
                yield f"{script.name}: DDP_SECRET has lengths {lengths}, but should be one of 32 characters or more"
            if any(
                value and value in text
                for value in values
                for text in (run.output, *itertools.chain(*(c.words for c in run.calls)))
            ):
                yield f"{script.name} prints DDP_SECRET or passes it as a word, but should hand it on unseen"
            for path in [path for path, kind in run.leaks if kind == "DDP_SECRET"]:
                yield f"{script.name} writes DDP_SECRET into {path}, but should hand it on unseen"
        if secrets[0] & secrets[1]:
            yield f"{script.name}: DDP_SECRET is the same in both starts of a job, but should differ"
        again = dry.job(script, environ=dict(TZ="UTC"))  # the same job number, as whoever reads the queue knows it
        if secrets[0] & {call.environ.get("DDP_SECRET", "") for call in again.trained}:
            yield f"{script.name}: DDP_SECRET follows from what others know, but should be random"
        stopped = [dry.job(script, environ=dict(at_one_time(dry), DRY_RUN_AGAIN=number)) for number in ("1", "2")]
        first, second = ({call.environ.get("DDP_SECRET", "") for call in run.trained} for run in stopped)
        if first & second - {""}:
            yield f"{script.name}: DDP_SECRET follows from the time, which `squeue` tells everybody, but should be random"


def at_one_time(dry) -> dict[str, str]:
    """Variables with which clocks stand still: bash's own, and that of `date`."""
    folder = dry.top / "clocks"
    if not folder.exists():
        folder.mkdir()
        (folder / "date").write_text('#!/bin/sh\nexec /bin/date --date=@1764000000 "$@"\n')
        (folder / "date").chmod(0o755)
        clocks = "EPOCHSECONDS=1764000000 EPOCHREALTIME=1764000000.000001"
        (folder / "stand-still").write_text(f"unset EPOCHSECONDS EPOCHREALTIME\n{clocks}\n")
    return dict(PATH=f"{folder}:{dry.top}/bin:/usr/bin:/bin", BASH_ENV=str(folder / "stand-still"))


@clause("B6")
def test_a_job_touches_only_what_is_its_own(check, site, dry):
    for script in site.job_scripts:
        for shape in (dict(all_ranks=True), dict(code=75), *(dict(install=flags) for flags in given(dry))):
            run = dry.job(script, **shape)
            node = [path for path in run.changed if re.match(r"root/(tmp|var/tmp|dev/shm)/", path)]
            shared = [path for path in node if FIRST not in path]
            elsewhere = [path for path in run.changed if path not in node and not path.startswith("root/scratch")]
            others = [path for path in elsewhere if FIRST not in path]
            yield from (f"{script.name} changes {dry.shown(str(dry.top / path))}, but should leave it" for path in others)
            yield from (f"{script.name} writes /{path[5:]}, but should name it for job {FIRST}" for path in shared)
            places = [value for call in run.trained for value in values_of(arguments(call), "--run-dir", "--new-run-dir")]
            folders = {os.path.relpath(dry.folder / place, dry.folder).partition("/") for place in places}
            runs = {"runs"} | {above for above, _, below in folders if FIRST in below}  # where all runs are
            lasting = [name for name in run.made if name not in runs and FIRST not in name]
            yield from (f"{script.name} leaves {name}, but should leave its run, and what has its number" for name in lasting)
            yield from removed(dry, run, [dry.folder / "runs", *(dry.top / "root").rglob(f"*{FIRST}*")])


@clause("B6")
def test_another_job_s_folders_on_a_node_are_left_alone(check, site, dry):
    for script, call in dry.first_ranks(all_ranks=True):
        environment = "\n".join(call.environ.values())
        own = set(re.findall(rf"{dry.top}/(root/[^\n:]*?{FIRST}[^/\n:]*)", environment))
        others = sorted(path.replace(FIRST, OTHER) for path in own)
        run = dry.job(script, beside=tuple(others), code=75) if others else None
        lost = [path for path in others if run and not (dry.top / path / "file").exists()]
        yield from (f"{script.name} removes /{path[5:]}, but should leave what is job {OTHER}'s" for path in lost)


@clause("B6")
def test_what_is_removed_in_a_node_s_memory_is_removed_on_every_node(check, site, dry):
    """`rm` in a job script empties the first node's /tmp; that of the others fills up."""
    for script in trains(site):
        nodes: dict[str, set[str]] = {}  # on which, by what is removed
        for call in dry.job(script, nodes=2, all_ranks=True).called("rm"):
            places = [word for word in call.words if re.match(r"/(tmp|dev/shm)/(?!tmp\.)", dry.shown(word))]
            if places and any(re.match(r"-\w*[rR]|--recursive", word) for word in call.words):
                node = call.environ.get("DRY_RUN_ON", "") + call.environ.get("DRY_RUN_NODE", "0")  # of a step, and in it
                nodes.setdefault(dry.shown(call.text), set()).add(node)
        for text, node_ranks in nodes.items():
            if len(node_ranks) < 2:
                yield f"{script.name}: {text} on the first node alone, but should be on each: srun"


@clause("B6")
def test_what_a_job_removes_at_its_end_it_removes_however_it_ends(check, site, dry):
    """Most jobs are never stopped: caches that only those remove fill the memory of the nodes."""
    for script in trains(site):
        removed = {code: {dry.shown(call.text) for call in dry.job(script, code=code).called("rm")} for code in (75, 0, 1)}
        for code, other in itertools.permutations(removed, 2):
            lost = {text for text in removed[other] - removed[code] if re.search(r" /(tmp|dev/shm)/(?!tmp\.)", text)}
            yield from (f"{script.name}: no {text} after {code}, but should be, as after {other}" for text in sorted(lost))


@clause("B5")
def test_proxies_are_spoken_to_by_http(check, site, dry):
    """Also for what is fetched by https: the proxy itself has no certificate. Python's httpx refuses a socks:// beside it."""
    for script, call in dry.first_ranks(all_ranks=True, environ=dict(all_proxy="socks://proxy:1080")):
        if call.environ.get("http_proxy"):
            if not call.environ.get("https_proxy"):
                yield f"{script.name}: http_proxy without https_proxy, but should have both: models are fetched by https"
            if (all_proxy := call.environ.get("all_proxy", "")).startswith("socks"):
                yield f"{script.name}: all_proxy={all_proxy} beside http_proxy, but should be unset"
        for name, value in call.environ.items():
            if name.lower() in ("http_proxy", "https_proxy") and value and not value.startswith("http://"):
                yield f"{script.name}: {name}={value}, but should be http://"


@clause("B6")
def test_what_a_run_leaves_is_as_its_user_s_umask_says(check, site, dry):
    """Others of the project read it, or do not: that is the user's to say."""
    own = umask()
    for script, call in dry.first_ranks(all_ranks=True):
        if call.notes["umask"] != own:
            yield f"{script.name}: umask={call.notes['umask']}, but should be the user's: {own}"
    for script, mask in itertools.product(site.job_scripts, ("0022", "0077")):
        for path, mode in dry.job(script, all_ranks=True, umask="" if mask == own else mask).wide.items():
            place = dry.shown(str(dry.top / path))
            yield f"{script.name} leaves {place} with mode {mode}, but should as its user's umask says: {mask}"


@clause("B6")
def test_ranks_have_the_limits_of_their_user(check, site, dry):
    """But for higher ones, a small stack, and no core files: a crash of all ranks would write the memory of each."""
    own = limits(Path("/proc/self/limits").read_text())
    own |= {CORE: 0, FILES: min(own[FILES], OPEN_FILES)}
    for script, call in dry.first_ranks(all_ranks=True):
        for name, value in limits(call.notes["limits"]).items():
            if (value > 0) if name == CORE else (value < own[name] and name != "Max stack size"):
                yield f"{script.name}: {name}={value:g} in a rank, but should be {own[name]:g}"


CORE, FILES = "Max core file size", "Max open files"


@clause("J8")
def test_the_ranks_write_into_the_job_s_log_themselves(check, site, dry):
    """Behind a pipe lines come late, by kilobytes, and the last ones of a job that is killed are lost."""
    for case in site.cases:
        if any(call.notes["apart"] for call in dry.case(case).trained):
            yield f"{case.name}: ranks write into something else than the job's log, but should not"
        for call in dry.case(case).called("torchrun"):
            value = (values_of(call.words, "--redirects", "-r") or [call.environ.get("PET_REDIRECTS", "0")])[-1]
            if value != "0" and not values_of(call.words, "--tee", "-t"):
                yield f"{case.name}: torchrun with --redirects={value}, but should leave the ranks' output in the job's log"


@clause("B6")
def test_caches_are_the_job_s_own(check, site, dry):
    """Those that the script sets: not in the home directory, which all jobs share; in /tmp under the job's number."""
    for script, call in dry.first_ranks(all_ranks=True):
        for name, value in as_in_job(call).items():
            if (
                not re.search(r"CACHE|_DB_PATH$|^TMPDIR$|^TORCH_EXTENSIONS_DIR$", name)
                or not value.startswith("/")
                or name.startswith("PIP_")
            ):
                continue
            if Path(value).is_relative_to(dry.top / "home"):
                yield f"{script.name}: {name}={dry.shown(value)}, but should not be in the home directory"
            elif name != "TMPDIR" and re.match(r"/(tmp|var/tmp|dev/shm)\b", dry.shown(value)) and FIRST not in value:
                yield f"{script.name}: {name}={dry.shown(value)}, but should have the job's number in it"


@clause("B6")
def test_sockets_find_room_in_the_ranks_temporary_folder(check, site, dry):
    """Where a source tells of the error. Linux takes 107 characters, and a DataLoader's workers make a name of 27 in it.

    https://man7.org/linux/man-pages/man7/unix.7.html
    """
    long = f"{dry.top}/root/var/tmp/pbs.{FIRST}.{'server-' * 12}"
    for script in trains(site) if any("AF_UNIX" in fact for fact in site.facts) else ():
        Path(long).mkdir(parents=True, exist_ok=True)
        for call in dry.job(script, environ=dict(TMPDIR=long)).trained[:1]:
            place = dry.shown(call.environ.get("TMPDIR", "/tmp"))
            if len(place) > 107 - 27:
                yield f"{script.name}: TMPDIR={place} in a rank, but should have 80 characters or less"


# Where what a run downloads is kept for the next one. https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
# https://docs.pytorch.org/docs/stable/hub.html#where-are-my-downloaded-models-saved
DOWNLOADS = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME")


@clause("B6")
def test_what_is_downloaded_outlives_the_job(check, site, dry):
    """In /tmp it fills the memory of each node, and each start fetches it again; at home it fills a small quota.

    In one place for all, the second user fails at locks that the first one has made.
    """
    number = str(os.getuid() or "(?<=/)0(?=/|$)")  # root's stands in many a name
    try:
        name = re.escape(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:  # as in a container
        name = USER
    own = f"{USER}|{number}|{name}"
    for script, call in dry.first_ranks(all_ranks=True):
        for name in [name for name in DOWNLOADS if name in call.environ]:
            place = dry.shown(call.environ[name])
            if FIRST in place or re.match(r"/(tmp|var/tmp|dev/shm)\b|\$HOME", place):
                yield f"{script.name}: {name}={place}, but should be where the next job finds it, and not in the home directory"
            said = any(f"{name}={place}" in plain(fact) for fact in site.facts)
            if place.startswith("/") and not said and not re.search(rf"\b({own})\b", place):
                yield f"{script.name}: {name}={place}, but should be the user's own: another one's files are locked there"


# What is not used, in silence, unless it is there: Intel's driver compiles anew, Python's tempfile takes /tmp.
# https://github.com/intel/compute-runtime/blob/master/programmers-guide/COMPILER_CACHE.md (its code: default_cache_config.cpp)
# https://docs.python.org/3/library/tempfile.html#tempfile.gettempdir
MUST_EXIST = ("NEO_CACHE_DIR", "TMPDIR")


@clause("B6")
def test_folders_that_nobody_else_makes_are_there_when_ranks_start(check, site, dry):
    for script, _, run in as_chosen(site, dry):
        for call in run.trained:
            for name in call.notes["missing"]:
                if name in MUST_EXIST:
                    yield f"{script.name}: {name}={dry.shown(call.environ[name])} is not there, but should be made"


# Of a variable that moves a cache, the one that moves its other half: of MIOpen, kernels apart from how they were tuned.
# https://rocm.docs.amd.com/projects/MIOpen/en/latest/cache.html
HALVES = {"MIOPEN_USER_DB_PATH": "MIOPEN_CUSTOM_CACHE_DIR"}


@clause("B6")
def test_both_halves_of_a_cache_are_moved(check, site, dry):
    """The other one stays in the home directory, where SQLite fails as soon as many ranks write."""
    for script, chosen, run in as_chosen(site, dry):
        for call in run.trained[:1]:
            alone = [half for half, other in HALVES.items() if half in call.environ and other not in call.environ]
            for half in alone:
                yield f"{script.name} {chosen or ''}: {half} without {HALVES[half]}, but should have both"


# Of compiled kernels, which every rank reads and writes.
KERNELS = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
KERNELS += ("NEO_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
SHARED = {"/home", "/scratch", "/work", "/project"}  # wherever they are


@clause("B6")
def test_caches_of_kernels_are_on_the_node(check, site, dry):
    """In a folder that all nodes share, SQLite's locks fail, and ranks read what others write.

    A node's own are /tmp and the like, a user's on a disk that site.toml names, and the job's that the machine makes.
    """
    scripts = "\n".join(script.read_text() for script in site.scripts)
    named = str(site.toml | dict(software=[]))  # with the facts of sources
    disks = {disk for disk in re.findall(OF_A_USER_S_DISK, scripts) if disk in named} - SHARED
    folders = ["/tmp", "/var/tmp", "/dev/shm", *(f"{disk}/{USER}" for disk in sorted(disks))]
    told = str(site.toml | dict(software=[], sources=[]))
    folders += [place for place in re.findall(r"(?<![\w./])(?:/\w+)+", told) if place not in SHARED]
    folders += [place for place in dry.of_the_machine(FIRST).values() if place.startswith("/") and FIRST in place]
    for script, _, run in as_chosen(site, dry):
        for call in run.trained[:1]:
            for name, place in [(name, dry.shown(call.environ[name])) for name in KERNELS if name in call.environ]:
                if not any(Path(place).is_relative_to(folder) for folder in folders):
                    yield f"{script.name}: {name}={place}, which all nodes share, but should be on each node"


@clause("B6")
def test_a_user_s_own_place_for_models_is_kept(check, site, dry):
    """What was downloaded there is there: gigabytes, and on nodes without a way out they are all that there is."""
    for script, call in dry.first_ranks(all_ranks=True):
        own = {name: f"/mine/{name.lower()}" for name in ("HF_HOME", "TORCH_HOME") if name in as_in_job(call)}
        for again in dry.job(script, all_ranks=True, environ=own).trained[:1] if own else ():
            lost = [name for name, value in own.items() if again.environ.get(name) != value]
            for name in lost:
                yield f"{script.name}: {name}={dry.shown(again.environ[name])}, but should be the user's"


@clause("X20")
def test_a_cache_that_is_not_the_user_s_alone_is_refused(check, site, dry):
    """Where somebody else was first: compilers and torch load code from there. Each choice that a script marks looks, too."""
    ways: dict[str, Callable] = {path.name: partial(dry.job, path) for path in trains(site)}
    ways |= {case.name: partial(dry.case, case) for case in site.cases if case.script in ways and case.name not in ways}
    for script in [path for path in site.scripts if path not in site.job_scripts]:
        for line in shown_to_train(script):
            ways[line] = lambda all_ranks, command=(script, line), **planted: dry.command(*command, **planted)
    for name, run_as in ways.items():
        run = run_as(all_ranks=True)
        variables = [pair for call in run.trained for pair in as_in_job(call).items()]
        shown = {dry.shown(value) for name, value in variables if re.search("CACHE|_DB_PATH$", name)}
        tops = {match[1] for value in shown if (match := re.match(r"/((?:var/)?tmp/[^/]+|dev/shm/[^/]+)", value))}
        # Made before the job, for it alone.
        its = [f"{place}/" for place in dry.of_the_machine(FIRST).values() if FIRST in place]
        tops = sorted(top for top in tops if not any(place.startswith(f"/{top}/") for place in its))
        now = {path: (dry.top / "root" / path).stat().st_mode for path in tops if (dry.top / "root" / path).exists()}
        wrong = [path for path in tops if run.modes.get(f"root/{path}", now.get(path, 0)) & 0o077]  # some jobs remove it
        yield from (f"{name} makes /{path} for others, too, but should make it with mode 700" for path in wrong)
        for kind, path in itertools.product(("open", "link"), tops):
            what = dict(open="which others may write to", link="a link")[kind]
            run = run_as(all_ranks=True, planted=(kind, path))
            if run.trained and not any(f"/{path}" in value for call in run.trained for value in as_in_job(call).values()):
                continue  # its name is another one each time: mktemp's
            if run.trained or run.code != 3:
                yield f"{name}: trains with /{path}, {what}, but should end with 3 ({ending(dry, run)})"
            elif f"/{path}" not in run.output:
                yield f"{ending(dry, run)}, but should name /{path}"


@clause("X21")
def test_no_word_of_a_variable_is_run(check, site, dry):
    """Bash evaluates what stands in a variable that it computes with: UID[$(command)0] is a command."""
    mark = dry.top / "root/tmp/has-run"
    name = site.toml["job"].get("restarts", "SLURM_RESTART_COUNT")
    for script in trains(site):
        for value in (f"UID[$(echo >{mark})0]", "two"):
            run = dry.job(script, restarts=value)
            if mark.exists():
                mark.unlink()
                yield f"{script.name} runs the command in {name}=UID[$(command)0], but should refuse it"
            elif run.trained or run.code != 3 or name not in run.output:
                yield f"{name}=two: {ending(dry, run)}, but should be 3 and name {name}"

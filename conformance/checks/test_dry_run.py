"""The static rung: what a site's scripts do when they run, with stand-ins for the commands of its machine (dry_run.py).

    python -m pytest conformance/checks/test_dry_run.py [--site NAME_OR_FOLDER]

This needs bash, and neither ranks, torch nor a scheduler.
"""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from conformance.checks.test_dry_install import pinned, requirements
from conformance.harness.check import clause
from conformance.harness.dry_run import ARGUMENTS, FIRST, LARGE, OTHER, Call, DryRun, trains, values_of
from conformance.harness.shell import DEBUGGING, SETS, THROTTLING, Script
from conformance.harness.sites import place_of
from conformance.harness.stub_core import who
from conformance.harness.target import BACKENDS

# Flags that a job script may pass to train.py by itself: they say where and with what to train, never what is trained.
OWN_FLAGS = {"--device", "--backend", "--run-dir", "--new-run-dir", "--grace", "--reduction", "--workers", "--debug"}
OWN_FLAGS |= {"--save-minutes", "--save-steps", "--max-shard-size", "--log-seconds", "--stage-data"}
# A job number that leaves a large remainder when divided by most round numbers, 10000 to 60000.
HIGHEST = "58799999"
# A scheduler's commands that start ranks on its nodes. torchrun itself runs on each node.
LAUNCHERS = ("srun", "mpiexec", "mpirun", "aprun")
LEAST_SECONDS_OF_WAIT, MOST_SECONDS_OF_WAIT = 30, 600


# ---- it runs, and each rank is who site.toml says -------------------------------------------------------------------


@clause("B1")
def test_scripts_run_to_their_end(check, site, dry):
    """On other nodes, too: a total among the directives (--ntasks) overrules the ranks per node, and nodes would be idle."""
    install = dry.install()
    if install.code:
        yield f"{dry.ending(install)}, but should be 0"
    for case in site.cases:
        as_it_stands = case.name == case.script
        for nodes in (case.nodes, 1 if case.nodes > 1 else 2) if as_it_stands else (case.nodes,):
            run = dry.case(case, all_ranks=nodes > 1, **(dict(nodes=nodes) if as_it_stands else {}))
            ranks = nodes * case.ranks_per_node
            started = sorted(int(call.environ["DRY_RUN_RANK"]) for call in run.trained)
            world_sizes = {call.environ["DRY_RUN_RANKS"] for call in run.trained}
            if run.code or started != list(range(ranks if nodes > 1 else 1)) or world_sizes != {str(ranks)}:
                shown_sizes = " ".join(world_sizes) or "no"
                observed = f"{dry.ending(run)} and {shown_sizes} ranks on {nodes} nodes"
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
    """shellcheck does not see that an unquoted path within a command line, as in bash -c "source $PWD/...", is two words."""
    link = dry.top / "a b"
    if not link.is_symlink():
        link.symlink_to(dry.folder)
    there = dict.fromkeys(("PWD", "SLURM_SUBMIT_DIR", "PBS_O_WORKDIR"), str(link))
    for case, code in itertools.product(site.cases, (0, 75)):
        usual, run = (dry.case(case, code=code, environ=environ) for environ in ({}, there))
        if run.code != code == usual.code or len(run.trained) != len(usual.trained):
            yield f'{case.name} in a folder "a b": {dry.ending(run)}, but should be {code}, as in another'


@clause("B1")
def test_scripts_run_on_as_many_nodes_as_the_machine_has(check, site, dry):
    """Linux starts nothing with a variable or word of 128 KiB: a list of all nodes. A script that says why may end with 3.

    https://man7.org/linux/man-pages/man2/execve.2.html
    """
    for script, nodes in itertools.product(trains(site), (10, 100, site.most_nodes)):  # 10: two digits, as in 4(x10)
        run = dry.job(script, nodes=min(nodes, site.most_nodes))
        too_long = nodes == site.most_nodes and run.code == 3 and "node" in dry.exit_of(run)
        if not too_long and (run.code or not run.trained):
            yield f"{script.name} on {nodes} nodes: {dry.exit_of(run)}, but should be 0"


@clause("B1")
def test_a_script_that_trains_is_not_said_to_prepare_only(check, site, dry):
    """No check of a job looks at a script with `trains = false`."""
    for script in [path for path in site.job_scripts if path not in trains(site)]:
        if count := len(dry.job(script, all_ranks=True).trained):
            yield f"{script.name}: trains=false in site.toml, but should be true: it starts {count} ranks of train.py"


# GIVEN: variables that the scheduler sets, that scripts extend, and that users may set (J13, B6).
# ASKS: commands whose failure is an answer, or changes nothing.
GIVEN = "SLURM|PBS|PALS|.*PATH$|OMP_|HF_|TORCH_HOME|.*_NET(_PLUGIN)?$"
ASKS = ("rm", "sleep", "python", "python3", "qstat", "squeue", "sacct")


@clause("B11")
def test_each_choice_of_a_script_s_head_changes_something(check, site, dry):
    """It changes the ranks' environment or words, or the commands called: otherwise users trust a choice without effect."""
    for script in trains(site):
        yield from (
            f"{script.name}: {choice} changes nothing, but should"
            for choice in dry.without_effect(script, Script(script).alternatives)
        )


@clause("B11")
def test_a_default_changes_at_the_nodes_that_the_head_says(check, site, dry):
    """For "beyond 16 nodes yes is the default": otherwise large jobs run without it, and their users do not know."""
    row = re.compile(r"(?m)^#   ([A-Z_]+)=(\w+) {2,}.*\b(?:beyond|above|more than) ([\d,]+) nodes (\w+) is the default")
    for script, (name, few, text, many) in [(path, each) for path in trains(site) for each in row.findall(path.read_text())]:
        for nodes, default in ((most := int(text.replace(",", "")), few), (most + 1, many)):
            alike = [*dry.without_effect(script, [{name: default}], nodes=nodes)]
            if dry.job(script, nodes=nodes).trained and not alike:
                yield f"{script.name} on {nodes} nodes: {name}={default} changes something, but should be the default there"


@clause("B11")
def test_a_choice_counts_whatever_was_set_before(check, site, dry):
    """Ranks get the value that the choice decides, not the default's, even when a module has set the variable before."""
    for script in trains(site):
        default, again = (dry.job(script, nodes=2, environ=environ) for environ in ({}, dict(DRY_RUN_AGAIN="1")))
        for chosen in Script(script).alternatives if default.trained and again.trained else ():
            without = dry.job(script, nodes=2, environ=chosen)
            expected, other, same = (run.trained[0].job_environ if run.trained else {} for run in (without, default, again))
            before = {name: value for name, value in other.items() if same.get(name) == value != expected.get(name, value)}
            before = {name: value for name, value in before.items() if not re.match(GIVEN, name)}
            run = dry.job(script, nodes=2, environ=before | chosen)
            for name in sorted(before if run.trained and without.trained else ()):
                value = run.trained[0].job_environ.get(name)
                if value != expected[name]:
                    choice = " ".join(f"{name}={value}" for name, value in chosen.items())
                    yield f"{script.name}, {choice}, {name}={before[name]} was set: {value}, but should be {expected[name]}"


@clause("B11")
def test_lists_of_a_script_are_its_own(check, site, dry):
    """A list that only some choice fills would otherwise be a variable that the user's shell exports, such as `modules`."""
    text = "\n".join(path.read_text() for path in site.scripts if path.suffix != ".py")
    names = {name for name in re.findall(r"\$\{(\w+)\[[@*]\]", text) if name.islower()}
    for case in site.cases if names else ():
        run = dry.case(case, environ=dict.fromkeys(names, "of-the-shell"))
        if run.code != dry.case(case).code or any("of-the-shell" in call.words for call in run.calls):
            yield f"{case.name} where a shell exports {' '.join(sorted(names))}: {dry.ending(run)}, but should be as without"


@clause("B11")
def test_a_flag_that_a_choice_names_reaches_a_command(check, site, dry):
    """Without "--nv" of software="apptainer --nv" ranks would start without the GPUs, or without what was chosen."""
    for case in site.cases:
        run = dry.case(case)
        flags = {flag for line in case.edit.values() for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", line)}
        for flag in sorted(flags - {word.partition("=")[0] for call in run.calls for word in call.words}):
            yield f"{case.name}: no command is called with {flag}, but should be"


@clause("B1")
def test_a_command_that_fails_is_not_passed_over(check, site, dry):
    """Each command before the ranks fails once: the job ends, or warns, or trains as without the failure."""
    for script, flags in itertools.product(trains(site), [(), *(flags for flags in dry.given() if dry.packed(*flags))]):
        shape = dict(nodes=2, install=flags)
        whole, again = dry.job(script, **shape), dry.job(script, **shape, environ=dict(DRY_RUN_AGAIN="1"))
        (first, *_), (second, *_) = whole.trained or [None], again.trained or [None]
        if not first or not second:
            continue  # B1 reports this
        own = {name for name, value in first.environ.items() if second.environ.get(name) != value} | {"LOADEDMODULES"}
        for fails, step in whole.steps:
            if step.command in ASKS or {"--version", "is-avail"} & {*step.words}:
                continue
            if step in whole.launches:
                break
            run = dry.job(script, **shape, fails=fails)
            (rank, *_) = run.trained or [None]
            warned = re.search(r"(?m)^(warning|note): ", run.output)
            warned = warned or any("use" in call.words for call in run.called("module-call"))
            actual, expected = (
                {name: value for name, value in call.job_environ.items() if name not in own} if call else {}
                for call in (rank, first)
            )
            same = rank and rank.words == first.words and actual == expected
            loads = step.command == "module-call" and {*step.words} & {*site.modules}
            acts = step.command in (whole.launcher, "sbcast")  # on nodes, which no rank's environment shows
            if (rank or not run.code) and not warned and (loads or acts or not same):
                trained = "trains all the same" if rank else "ends with 0"
                yield f"{script.name}: where {dry.shown(step.text)[:80]!r} fails it {trained}, but should end"


@clause("B1")
def test_a_command_that_fails_on_the_nodes_is_not_passed_over(check, site, dry):
    """What a launcher runs there before the ranks, such as unpacking an environment: the job ends, or warns."""
    for script, flags in itertools.product(trains(site), [(), *(flags for flags in dry.given() if dry.packed(*flags))]):
        whole = dry.job(script, nodes=2, install=flags)
        first = min((call.start_time for call in whole.launches), default=0)
        before = [call for call in whole.calls if "DRY_RUN_LAUNCHER" in call.environ and call.start_time < first]
        for text in dict.fromkeys(call.text for call in before if not asks(call)):
            run = dry.job(script, nodes=2, install=flags, fails=f"on a node {text}")
            if not any(call.notes.get("failed") for call in run.calls):
                continue  # its words are others in each start, such as a name of mktemp's: nothing has failed
            if (run.trained or not run.code) and not re.search(r"(?m)^(warning|note): ", run.output):
                trained = "trains all the same" if run.trained else "ends with 0"
                yield f"{script.name}: where {dry.shown(text)[:80]!r} fails on a node it {trained}, but should end"


def asks(call: Call) -> bool:
    """Return whether a command on a node only asks something, or removes what may be missing."""
    reads = {"-c", "--version", "-V"} & {*call.words} or call.command in ("hostname", "getent", "ip")
    return bool(reads) or (call.command in ASKS and not call.command.startswith("python"))


@clause("B1")
def test_ranks_run_in_the_site_s_folder_with_its_python(check, site, dry):
    """The Python is that of install.sh's environment, or of the image."""
    prefixes = dry.install().prefixes
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
            if path.is_relative_to(dry.top / "etc"):  # the machine's own, such as conda's hook
                continue
            if relative[:2] != ".." and not (dry.pristine / dry.folder.name / relative).exists():
                continue  # installed files, such as an environment's activate
            if relative not in listed or relative not in seen:
                yield f"{script} runs {relative}, but should run files of the list `files` alone"
    left_over = {path.name for path in site.left_over}
    for name in sorted(left_over):
        yield f"{name} is a job script by its directives, but should be in `files` of site.toml, or be deleted"
    for name in sorted(seen - listed - left_over if listed else ()):
        yield f"{name} is named by a script, but should be in `files`, too"


@clause("B2")
def test_a_job_trains_what_its_user_has_submitted(check, site, dry):
    """A later start, too, takes no newer branch and no newer packages."""
    for case in site.cases:
        for call in dry.case(case).calls:
            if newer(call):
                yield f"{case.name}: {dry.shown(call.text)[:120]}, but should train with the files that were there"


def newer(call: Call) -> bool:
    """Return whether a command takes today's newest version: git pull, pip install without a version."""
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
    """The process rung exports [launchers.environment]; this check compares it with what the job script produces."""
    launch = site.launches[0]
    domain, suffix = (site.toml["node"].get(name, "") for name in ("domain", "suffix"))
    for script in trains(site):
        for shape in (dict(all_ranks=True), dict(restarts=1, code=75), dict(nodes=1), *of_fewer_ranks(site, script)):
            run = dry.job(script, **shape)
            head = dry.hosts(run.shape["nodes"])[0] + suffix
            address = re.escape(f"{head}.{domain}") if domain else rf"{re.escape(head)}(\.[\w.-]+)?|10\.0\.0\.1"
            for call in run.trained:
                rank, per_node, nodes = (int(call.environ[f"DRY_RUN_{name}"]) for name in ("RANK", "PER_NODE", "NODES"))
                values = place_of(rank, per_node, nodes) | dict(restart=run.shape["restarts"])
                patterns = {name: re.escape(str(value)) for name, value in values.items()}
                patterns |= dict(master_addr=f"(?:{address})", master_port=r"\d{4,5}", job_id=rf"\S*{FIRST}\S*")
                for name, template in launch.templates:
                    if "{" not in template or (launch.mpi and "{master" in template):
                        continue
                    value = call.environ.get(name, "0" if template == "{restart}" else None)
                    # A site chooses how it names a start: the name has the job in it, and differs from start to start.
                    parts = ["{job_id}"] if "{job_id}" in template else re.split(r"(\{\w+\})", template)
                    pattern = "".join(patterns.get(part[1:-1], re.escape(part)) for part in parts)
                    if value is None or not re.fullmatch(pattern, value):
                        observed = f"{script.name}: rank {rank} of {per_node * nodes}: {name}={value or 'unset'}"
                        should = template.format(**values, master_addr=head, master_port="a port", job_id=FIRST)
                        yield f"{observed}, but should be {should}, as [launchers.environment] of site.toml says"


@clause("B3")
def test_what_the_scripts_export_is_there_in_a_container(check, site, dry):
    """train.py does not get variables that a container drops: threads, caches, the exclusion of the user's own packages.

    srun drops variables by --export with a list without ALL. A variable that a script drops by name is meant to go.
    """
    runs = [dry.job(script) for script in trains(site)] + [dry.command(*each) for each in dry.by_hand]
    text = "\n".join(path.read_text() for path in site.scripts)
    jobs = {path.name for path in site.job_scripts}
    # An installation's exports are for itself.
    of_jobs = "\n".join(path.read_text() for path in site.scripts if not path.name.startswith("install"))
    exported = {name for line in re.findall(r"\bexport ([^\n#]*)", of_jobs) for name in re.findall(r"\b[A-Z]\w+\b", line)}
    dropped = {name for line in re.findall(r"(?:\bunset|\benv -u)\b(.*)", text) for name in re.findall(r"\b[A-Z]\w+", line)}
    for run in runs:
        for launch in run.launches if run.script in jobs else ():  # by hand, the user decides what is passed on
            started = [call for call in run.calls if call.rank is not None and call.start_time > launch.start_time]
            if lost := sorted((exported - dropped) & {*launch.environ} - {*started[0].environ}):
                yield f"{run.script}: {launch.command} without {', '.join(lost[:4])}, but should hand on what is exported"
        containers = [call for call in run.calls if "image" in call.notes]
        for call in [call for call in run.calls if call.program and "DRY_RUN_IMAGE" in call.environ]:
            *_, outside = [each for each in containers if each.start_time <= call.start_time and each.rank == call.rank]
            if lost := sorted(exported & {*outside.environ} - {*call.environ}):
                yield f"{run.script}: {outside.command} without {', '.join(lost[:4])}, but should hand on what is exported"


def of_fewer_ranks(site, script: Script) -> list[dict]:
    """Return shapes of a job with half the ranks a node, where srun starts them: rank numbers then do not show the node."""
    per_node = site.job(script)["ranks_per_node"] // 2
    if site.toml["launcher"] != "srun" or per_node < 2:
        return []
    options = {"ntasks-per-node": str(per_node)}
    return [dict(nodes=2, all_ranks=True, options=options, ntasks=2 * per_node)]


@clause("B3")
def test_each_launch_of_a_job_is_a_start_of_its_own(check, site, dry):
    """Ranks of the previous launch may still be running, and `--fresh` is only for the first launch."""
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
    """A lost rank (7), ranks that did not meet (4) and a kill from outside (137) have the same cause: nodes."""
    for case in site.cases:
        again = len(dry.case(case, code=7).launches)
        for code in (4, 137) if again > 1 else ():
            if (launches := len(dry.case(case, code=code).launches)) != again:
                yield f"{case.name}: launched {launches} times after {code}, but should be {again}, as after 7"


@clause("J11")
def test_nodes_do_not_wait_long_between_launches(check, site, dry):
    """Nodes are paid for while a script sleeps without ranks, after a rank was lost or all have ended."""
    for case in site.cases:
        for code in (0, 7, 75):
            run = dry.case(case, code=code)
            training = [(call.start_time, call.end_time or 0) for call in run.launches]
            ends = min((end for _, end in training), default=0)
            own = [call for call in run.called("sleep") if ends and call.start_time > ends and call.rank is None]
            for call in [call for call in own if not any(start < call.start_time < end for start, end in training)]:
                if call.seconds > MOST_SECONDS_OF_WAIT:
                    yield f"{case.name}: {call.text} after {code}, but should be {MOST_SECONDS_OF_WAIT} s at most"


@clause("B3")
def test_train_py_takes_each_rank_for_who_it_is(check, site, dry, tmp_path):
    """train.py reads the environment of a dry run's rank, in a first start and in later ones.

    Slurm counts starts by a variable, PBS by qstat's run_count: there a job with the same number is one that PBS has started
    again. A successor, here the third, also counts the starts of earlier jobs.
    """
    later: dict[int, dict] = {1: dict(restarts=1, code=75)}
    if site.toml["scheduler"] == "pbs":
        later = {1: dict(started=2, code=75), 4: dict(started=2, restarts=3, code=75)}
    for case in site.cases:
        names = []
        for restarts, shape in ({0: {}} | later).items():
            run = dry.case(case, all_ranks=True, **shape)
            for call in run.trained[:1] + ([] if case.launch.mpi else run.trained[-1:]):  # MPI's stub has only a rank 0
                place = ("RANK", "RANKS", "NODE", "LOCAL", "PER_NODE")
                rank, ranks, node, local, size = (int(call.environ[f"DRY_RUN_{name}"]) for name in place)
                # A step can have fewer tasks than its job.
                environ = call.job_environ | dict(MPI_SIZE=str(ranks), SLURM_NTASKS="97")
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
    """Two jobs use different ports, all ranks of a job the same one. Linux assigns that port to no other program."""
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
        ends = dry.exit_of(dry.job(script, number=LARGE))
        yield from (f"{script.name}: no {name} in job {LARGE}, {ends}, but should be one" for name in lost)
        highest = ports(site, dry.job(script, number=HIGHEST))
        for name, values in (*first.items(), *large.items(), *highest.items()):
            for value in values:
                if not 1024 <= int(value) < 32768:
                    yield f"{script.name}: {name}={value}, but should be 1024 to 32767"


# Variables by which ranks of another job meet, left in the environment that sbatch copies.
OF_ANOTHER_JOB = dict(MASTER_ADDR="elsewhere", MASTER_PORT="29500", DDP_SECRET="0" * 64)


@clause("J6")
def test_ranks_meet_where_their_own_job_says(check, site, dry):
    """The job may be submitted from another job, or from a shell with a tutorial's MASTER_PORT, which all jobs would share."""
    for case in site.cases:
        launcher_variables = {name for name, _ in case.launch.templates} | (set() if case.launch.mpi else {"DDP_SECRET"})
        for call in dry.case(case, environ=OF_ANOTHER_JOB | case.environment).trained[:1]:
            own = OF_ANOTHER_JOB.keys() & launcher_variables
            kept = sorted(name for name in own if call.environ.get(name) == OF_ANOTHER_JOB[name])
            for name in kept:
                yield f"{case.name}: {name}={OF_ANOTHER_JOB[name][:16]} of the shell that submits, but should be the job's own"


def ports(site, run: DryRun) -> dict[str, set[str]]:
    """Return the ports, by variable or by flag of a command."""
    by_name: dict[str, set[str]] = {}
    port_variables = site.launches[0].variables_with("master_port")
    for call in run.trained:
        for name, value in call.job_environ.items():
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
                leaves_out = name.startswith("NCCL") and (value or "").startswith("^")  # ^ excludes the listed ones
                parts = (value or "").lstrip("^=" if leaves_out else "=").split(",")
                named = [any(each.startswith(part) for each in interfaces) for part in parts]
                wrong = value and (any(named) if leaves_out else not all(named))
                # gloo by default takes the interface of the node's plain name, a wrong one where nodes have a second name.
                of_gloo = name == "GLOO_SOCKET_IFNAME" and (value or {"domain", "suffix"} & {*site.toml["node"]})
                if wrong or (of_gloo and value != interfaces[0]):
                    should = interfaces[0] if of_gloo else f"of {', '.join(interfaces)}"
                    yield f"{script.name}: {name}={value or 'unset'}, but should be {should}"


@clause("J13")
def test_a_network_that_is_not_known_is_not_named(check, site, dry):
    """This is for an empty `interfaces`: on the next cluster no interface has the name, or it is one adapter of four."""
    names = re.compile(r".*_(IFNAME|IFACE|HCA|DEVICE_NAME|NET_DEVICES|GID_INDEX)")
    known = {match[1] for text in (*site.facts, *site.provides) if (match := SETS.match(text))}
    lines = [line for path in site.scripts for line in Script(path).lines if not line.is_comment]
    code, to_edit = ("\n".join(line.text for line in lines if line.is_to_edit is edit) for edit in (False, True))
    for script, call in [] if site.toml["node"]["interfaces"] else dry.first_ranks(all_ranks=True, nodes=2):
        for name, value in [each for each in call.job_environ.items() if names.fullmatch(each[0])]:
            edited = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", to_edit)
            literal = re.search(rf"(=|:-)[\"']?{re.escape(value)}(?![\w.])", code)  # a value found by the job is right there
            if literal and name not in known and not edited and not value.startswith("^"):  # a list of exclusions
                yield f"{script.name}: {name}={value}, but should be unset: site.toml has no `interfaces`"


@clause("J13")
def test_ranks_of_one_node_are_sent_to_no_network(check, site, dry):
    """The scheduler sets up a plugin only for several nodes. NCCL's own networks, Socket and IB, do no harm on one node.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net
    """
    for case in [case for case in site.cases if "nodes" not in case.options and "select" not in case.options]:
        for call in dry.case(case, nodes=1).trained[:1]:
            if (net := call.environ.get("NCCL_NET", "Socket")) not in ("Socket", "IB"):
                yield f"{case.name} on one node: NCCL_NET={net}, but should be unset, or Socket"


@clause("J13")
def test_no_rank_has_a_variable_for_finding_faults(check, site, dry):
    """No line and no choice sets one, except where a source sets it for the machine."""
    by_modules = {word.partition("=")[0] for word in site.provides}
    of_facts = {match[1] for fact in site.facts if (match := SETS.match(fact))}
    left_on = re.compile(f"{DEBUGGING.pattern}|{THROTTLING.pattern}")
    ways = [way for way in dry.in_all_ways() if not re.search("DEBUG|VERBOSE|TRACE", way[0])]  # the others ask for it
    for what, run in ways:
        for call in run.trained[:1]:
            for name, value in call.job_environ.items():
                if name not in by_modules | of_facts and left_on.match(f"{name}={value}"):
                    yield f"{what}: {name}={value} in a rank, but should be left to who looks for a fault"


@clause("J13")
def test_mpi_looks_for_no_devices(check, site, dry):
    """Users of Cray MPICH on GPUs export 1, which ends each rank whose mpi4py was built without its GPU library."""
    name = "MPICH_GPU_SUPPORT_ENABLED"
    text = "\n".join(path.read_text() for path in (site.folder / "README.md", *site.scripts))
    for script in trains(site) if re.search(f"Cray.?MPICH|cray-mpich|{name}", text) else ():
        for call in dry.job(script, environ={name: "1"}).trained[:1]:
            if call.environ.get(name, "0") != "0":
                yield f"{script.name}: {name}={call.environ[name]} in a rank, but should be 0, whatever a shell exports"


@clause("J13")
def test_a_plugin_of_the_user_s_own_is_taken(check, site, dry):
    """A user rebuilds it, for example for a newer libfabric: the module's plugin would silently run instead."""
    for script, call in dry.first_ranks(all_ranks=True, nodes=2):
        named = call.environ.get("NCCL_NET_PLUGIN", "")
        own = f"{Path(named).parent}/./{Path(named).name}"  # another name of the same file, which can be loaded
        run = dry.job(script, all_ranks=True, nodes=2, environ=dict(NCCL_NET_PLUGIN=own)) if "/" in named else None
        if run and not (run.trained and run.trained[0].environ.get("NCCL_NET_PLUGIN") == own):
            yield f"{script.name}: not the NCCL_NET_PLUGIN of the user, but should be ({dry.ending(run)})"


@clause("J13")
def test_a_plugin_that_a_script_builds_is_taken(check, site, dry):
    """A script builds `$prefix/lib/librccl-net.so` in the environment, and the job must not look in lib64, for example.

    A job that names no plugin there finds it otherwise, as by LD_LIBRARY_PATH.
    """
    for builder in [path for path in site.scripts if path not in site.job_scripts]:
        text = builder.read_text()
        built = set(re.findall(r"\$(\w+)/([\w./-]*lib\w*-net[\w-]*\.so)\b", text))
        folders = {(top[1], below) for name, below in built if (top := re.search(rf"(?m)^ *{name}=.*/([\w-]+)$", text))}
        code = "\n".join(path.read_text() for path in site.scripts if path != builder)
        environments = {*re.findall(r"([\w./${}-]+)/bin/(?:python|activate)", code)}
        looks = rf"({'|'.join(map(re.escape, environments))})/%s/[\w./-]*-net[\w-]*\.so\b"
        folders = {(top, below) for top, below in folders if environments and re.search(looks % top, code)}
        for script, prefix, (top, below) in itertools.product(trains(site), dry.install().prefixes, sorted(folders)):
            plugin = Path(prefix, top, below)
            run = dry.job(script, nodes=2, halves=(str(plugin.relative_to(dry.top)),))
            if {call.environ.get("NCCL_NET_PLUGIN") for call in run.trained} != {str(plugin)}:
                named = [dry.shown(call.environ.get("NCCL_NET_PLUGIN", "none")) for call in run.trained] or [dry.exit_of(run)]
                yield f"{script.name}: plugin={named[0]}, but should be {dry.shown(str(plugin))}, which {builder.name} builds"


# ---- flags, and where a run is --------------------------------------------------------------------------------------


@clause("J1")
def test_arguments_arrive_word_for_word(check, site, dry):
    wanted = list(ARGUMENTS) if site.toml["scheduler"] == "slurm" else [word for word in ARGUMENTS if " " not in word]
    for case in site.cases:
        for call in dry.case(case, all_ranks=True).trained[:1]:
            check.equal(**{f"last_arguments_of_{case.name}": (call.arguments[-len(wanted) :], wanted)})


@clause("B4")
def test_the_script_says_where_and_not_what(check, site, dry):
    for case in site.cases:
        for call in [
            call for shape in (dict(all_ranks=True), dict(restarts=1, code=75)) for call in dry.case(case, **shape).trained[:1]
        ]:
            own = call.arguments[: -len(ARGUMENTS) if site.toml["scheduler"] == "slurm" else -5]
            flags = [word.partition("=")[0] for word in own if word.startswith("--")]
            # The jobs of an array differ in a choice of the training, which is their script's purpose.
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


# PyTorch's name of a device, by the beginning of the variable that gives devices to ranks.
KINDS = dict(ZE_="xpu", CUDA_="cuda", ROCR_="cuda", HIP_="cuda")
LEAST_SECONDS = 60  # at least, for ranks to meet, and for a collective


def chosen_wrongly(site, call: Call, own: list[str]) -> Iterator[str]:
    """Yield what is wrong with the device, the backend and the timeouts that a script passes. own: its flags."""
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
                places[what] = os.path.join(call.folder, call.run_dir) if call.run_dir != "none" else "none"
        first = places.get("first", "none")
        if not Path(first).is_relative_to(dry.folder):
            yield f"{script.name}: run directory={dry.shown(first)}, but should be below the site's folder"
        if (again := places.get("again", "none")) != first:
            yield f"{script.name}: run directory={dry.shown(again)} when the job comes back, but should be {dry.shown(first)}"
        if places.get("other") == first:
            yield f"{script.name}: run directory={dry.shown(first)} in two jobs, but should differ"


@clause("J11")
def test_torchrun_starts_no_rank_again(check, site, dry):
    """torchrun would restart ranks after any failure. It also waits for all of the job's nodes, even for late ones."""
    for case in site.cases:
        calls = dry.case(case).called("torchrun")
        max_restarts = [value for call in calls for value in values_of(call.words, "--max-restarts")]
        nodes = [value for call in calls for value in values_of(call.words, "--nnodes") if ":" in value]
        check.equal(**{f"max_restarts_of_{case.name}": ([value for value in max_restarts if value != "0"], [])})
        check.equal(**{f"nnodes_of_{case.name}_that_may_be_fewer": (nodes, [])})
        said = " ".join(value for call in calls for value in values_of(call.words, "--rdzv-conf", "--rdzv_conf"))
        short = [each for each in re.findall(r"\bjoin_timeout=\d+", said) if int(each.partition("=")[2]) < LEAST_SECONDS]
        check.equal(**{f"rdzv_conf_of_{case.name}_with_less_than_{LEAST_SECONDS}_s": (short, [])})


@clause("J11")
def test_every_srun_of_ranks_ends_when_one_dies(check, site, dry):
    for name, run in dry.in_all_ways():
        for call in run.launches:
            if call.command == "srun" and not kills(call):
                yield f"{name}: {call.text[:120]}, but should have --kill-on-bad-exit=1 among its flags"
            waits = values_of(call.words, "--wait", "-W") or [call.environ.get("SLURM_WAIT", "0")]
            if call.command == "srun" and not LEAST_SECONDS_OF_WAIT <= int(waits[0]) <= MOST_SECONDS_OF_WAIT:
                observed = f"--wait={waits[0]}, but should be {LEAST_SECONDS_OF_WAIT} to {MOST_SECONDS_OF_WAIT} s"
                yield f"{name}: {observed}: ranks that are left later hang, and sooner they may be ending well"
            yield from (f"{name}: {text}" for text in limits_of_its_own(call))
            if {"--no-abort-on-failure", "--no-kill"} & {*call.words}:
                yield f"{name}: {call.text[:120]}, but should end when a rank dies"


def limits_of_its_own(call: Call) -> Iterator[str]:
    """Yield the time limits of a step: its ranks get no warning unless it has a signal, and a longer job does not help."""
    words = call.launcher_words
    limit = (values_of(words, "--time", "-t") or [call.environ.get("SLURM_TIMELIMIT", "")])[0]
    warned = values_of(words, "--signal") or "SLURM_SIGNAL" in call.environ
    if call.command == "srun" and re.search("[1-9]", limit) and not warned:
        yield f"--time={limit} of srun, but should be the job's: no rank is warned of another limit"
    timed = call.notes.get("timeout", [])
    if timed and not any(re.match("--signal|--preserve-status|-s|-p$", word) for word in timed):
        yield f"ranks under timeout {' '.join(timed)}, but should have the job's limit: after another one 124 hides their code"


def kills(call: Call) -> bool:
    given = values_of(call.words, "--kill-on-bad-exit", "-K")
    bare = {"-K", "--kill-on-bad-exit"} & {*call.words} and "0" not in given
    return bool("1" in given or bare or call.environ.get("SLURM_KILL_BAD_EXIT") == "1")

"""The static rung: what a site's scripts print, write and remove.

python -m pytest conformance/checks/test_dry_files.py [--site NAME_OR_FOLDER]
"""

import itertools
import os
import pwd
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from conformance.cluster.layer import OF_A_USER_S_DISK
from conformance.harness.check import clause
from conformance.harness.dry_run import FIRST, OPEN_FILES, OTHER, USER, limits, trains, umask, values_of
from conformance.harness.shell import plain


@clause("B9")
def test_each_start_has_a_secret_of_its_own(check, site, dry):
    """Ranks of a launcher get one by the environment; ranks that ask MPI who they are can agree on one there."""
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
        again = dry.job(script, environ=dict(TZ="UTC"))  # the same job number, which everybody sees in the queue
        if secrets[0] & {call.environ.get("DDP_SECRET", "") for call in again.trained}:
            yield f"{script.name}: DDP_SECRET follows from what others know, but should be random"
        stopped = [dry.job(script, environ=dict(at_one_time(dry), DRY_RUN_AGAIN=number)) for number in ("1", "2")]
        first, second = ({call.environ.get("DDP_SECRET", "") for call in run.trained} for run in stopped)
        if first & second - {""}:
            yield f"{script.name}: DDP_SECRET follows from the time, which `squeue` tells everybody, but should be random"


def at_one_time(dry) -> dict[str, str]:
    """Return variables that stop the clocks of bash and of `date`."""
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
        for shape in (dict(all_ranks=True), dict(code=75), *(dict(install=flags) for flags in dry.given())):
            run = dry.job(script, **shape)
            node = [path for path in run.changed if re.match(r"root/(tmp|var/tmp|dev/shm)/", path)]
            shared = [path for path in node if FIRST not in path]
            elsewhere = [path for path in run.changed if path not in node and not path.startswith("root/scratch")]
            others = [path for path in elsewhere if FIRST not in path]
            yield from (f"{script.name} changes {dry.shown(str(dry.top / path))}, but should leave it" for path in others)
            yield from (f"{script.name} writes /{path[5:]}, but should name it for job {FIRST}" for path in shared)
            folders = {os.path.relpath(dry.folder / call.run_dir, dry.folder).partition("/") for call in run.trained}
            runs = {"runs"} | {above for above, _, below in folders if FIRST in below}  # the folder of all runs
            lasting = [name for name in run.made if name not in runs and FIRST not in name]
            yield from (f"{script.name} leaves {name}, but should leave its run, and what has its number" for name in lasting)
            yield from dry.removed(run, [dry.folder / "runs", *(dry.top / "root").rglob(f"*{FIRST}*")])


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
    """`rm` in a job script empties only the first node's /tmp; the other nodes' would fill up."""
    for script in trains(site):
        nodes: dict[str, set[str]] = {}  # command to the nodes that run it
        for call in dry.job(script, nodes=2, all_ranks=True).called("rm"):
            places = [word for word in call.words if re.match(r"/(tmp|dev/shm)/(?!tmp\.)", dry.shown(word))]
            if places and any(re.match(r"-\w*[rR]|--recursive", word) for word in call.words):
                node = call.environ.get("DRY_RUN_ON", "") + call.environ.get("DRY_RUN_NODE", "0")  # of the step, and within it
                nodes.setdefault(dry.shown(call.text), set()).add(node)
        for text, node_ranks in nodes.items():
            if len(node_ranks) < 2:
                yield f"{script.name}: {text} on the first node alone, but should be on each: srun"


@clause("B6")
def test_what_a_job_removes_at_its_end_it_removes_however_it_ends(check, site, dry):
    """Most jobs are never stopped: caches removed only after a stop would fill the memory of the nodes."""
    for script in trains(site):
        removed = {code: {dry.shown(call.text) for call in dry.job(script, code=code).called("rm")} for code in (75, 0, 1)}
        for code, other in itertools.permutations(removed, 2):
            lost = {text for text in removed[other] - removed[code] if re.search(r" /(tmp|dev/shm)/(?!tmp\.)", text)}
            yield from (f"{script.name}: no {text} after {code}, but should be, as after {other}" for text in sorted(lost))


@clause("B5")
def test_proxies_are_spoken_to_by_http(check, site, dry):
    """This includes https downloads: the proxy has no certificate. Python's httpx refuses a socks:// beside it."""
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
def test_what_scripts_leave_is_as_their_user_s_umask_says(check, site, dry):
    """The user decides whether others may read it. Who may write to an installation could run commands as its owner."""
    own, installs = umask(), {" ".join(("install.sh", *flags)): flags for flags in [(), *dry.given()]}
    calls = [(script.name, call) for script, call in dry.first_ranks(all_ranks=True)]
    calls += [(what, call) for what, flags in installs.items() for call in dry.install(*flags).calls if "makes" in call.notes]
    for what, call in [(what, call) for what, call in calls if call.notes["umask"] != own]:
        yield f"{what}: umask={call.notes['umask']}, but should be the user's: {own}"
    for mask in sorted({"0022", "0077", own}):
        shape = dict(umask="" if mask == own else mask)
        runs = {script.name: dry.job(script, all_ranks=True, **shape) for script in site.job_scripts}
        runs |= {what: dry.install(*flags, **shape) for what, flags in installs.items() if mask == own or not flags}
        for what, path, mode in [(what, *each) for what, run in runs.items() for each in run.wide.items()]:
            place = dry.shown(str(dry.top / path))
            yield f"{what} leaves {place} with mode {mode}, but should as its user's umask says: {mask}"


@clause("B6")
def test_ranks_have_the_limits_of_their_user(check, site, dry):
    """Limits may be higher, and the stack smaller. Core files are off: each rank of a crash would write its memory."""
    own = limits(Path("/proc/self/limits").read_text())
    own |= {CORE: 0, FILES: min(own[FILES], OPEN_FILES)}
    for script, call in dry.first_ranks(all_ranks=True):
        for name, value in limits(call.notes["limits"]).items():
            if (value > 0) if name == CORE else (value < own[name] and name != "Max stack size"):
                yield f"{script.name}: {name}={value:g} in a rank, but should be {own[name]:g}"


CORE, FILES = "Max core file size", "Max open files"


@clause("J8")
def test_the_ranks_write_into_the_job_s_log_themselves(check, site, dry):
    """A pipe delays lines by kilobytes, and loses the last ones of a killed job."""
    for case in site.cases:
        if any(call.notes["apart"] for call in dry.case(case).trained):
            yield f"{case.name}: ranks write into something else than the job's log, but should not"
        for call in dry.case(case).called("torchrun"):
            value = (values_of(call.words, "--redirects", "-r") or [call.environ.get("PET_REDIRECTS", "0")])[-1]
            if value != "0" and not values_of(call.words, "--tee", "-t"):
                yield f"{case.name}: torchrun with --redirects={value}, but should leave the ranks' output in the job's log"


@clause("B6")
def test_caches_are_the_job_s_own(check, site, dry):
    """Caches that the script sets are not in the home directory, which all jobs share; in /tmp they have the job's number."""
    for script, call in dry.first_ranks(all_ranks=True):
        for name, value in call.job_environ.items():
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
    """Checked where a source names the error: Linux takes 107 characters, and a DataLoader's workers use 27 of them.

    https://man7.org/linux/man-pages/man7/unix.7.html
    """
    long = f"{dry.top}/root/var/tmp/pbs.{FIRST}.{'server-' * 12}"
    for script in trains(site) if any("AF_UNIX" in fact for fact in site.facts) else ():
        Path(long).mkdir(parents=True, exist_ok=True)
        for call in dry.job(script, environ=dict(TMPDIR=long)).trained[:1]:
            place = dry.shown(call.environ.get("TMPDIR", "/tmp"))
            if len(place) > 107 - 27:
                yield f"{script.name}: TMPDIR={place} in a rank, but should have 80 characters or less"


# Where downloads are kept for later runs. https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
# https://docs.pytorch.org/docs/stable/hub.html#where-are-my-downloaded-models-saved
DOWNLOADS = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME")


@clause("B6")
def test_what_is_downloaded_outlives_the_job(check, site, dry):
    """In /tmp, downloads fill each node's memory, and each start repeats them. At home they fill a small quota.

    In one place for all users, the second user fails at the first one's locks.
    """
    number = str(os.getuid() or "(?<=/)0(?=/|$)")  # root's 0 is part of many names
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


# Folders that are silently ignored if missing: Intel's driver recompiles, and Python's tempfile takes /tmp.
# https://github.com/intel/compute-runtime/blob/master/programmers-guide/COMPILER_CACHE.md (its code: default_cache_config.cpp)
# https://docs.python.org/3/library/tempfile.html#tempfile.gettempdir
MUST_EXIST = ("NEO_CACHE_DIR", "TMPDIR")
# Variables that move one half of a cache, with the one for the other half: MIOpen keeps kernels and tuning apart.
# https://rocm.docs.amd.com/projects/MIOpen/en/latest/cache.html
HALVES = {"MIOPEN_USER_DB_PATH": "MIOPEN_CUSTOM_CACHE_DIR"}
# Caches of compiled kernels, which every rank reads and writes.
KERNELS = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
KERNELS += ("NEO_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
SHARED = {"/home", "/scratch", "/work", "/project"}  # shared between nodes on any machine


@clause("B6")
def test_caches_of_kernels_are_on_the_node(check, site, dry):
    """In a folder that all nodes share, SQLite's locks fail, and ranks read each other's unfinished files.

    Allowed are /tmp and similar, the user's folder on a disk that site.toml names, and the folder the machine makes per job.
    Half of a cache would stay in the home directory, where SQLite fails as soon as many ranks write.
    """
    scripts = "\n".join(script.read_text() for script in site.scripts)
    named = str(site.toml | dict(software=[]))  # with the facts of sources
    disks = {disk for disk in re.findall(OF_A_USER_S_DISK, scripts) if disk in named} - SHARED
    folders = ["/tmp", "/var/tmp", "/dev/shm", *(f"{disk}/{USER}" for disk in sorted(disks))]
    told = str(site.toml | dict(software=[], sources=[]))
    folders += [place for place in re.findall(r"(?<![\w./])(?:/\w+)+", told) if place not in SHARED]
    folders += [place for place in dry.of_the_machine(FIRST).values() if place.startswith("/") and FIRST in place]
    for script, chosen, run in dry.as_chosen():
        for call, name in itertools.product(run.trained, MUST_EXIST):
            if name in call.notes["missing"]:
                yield f"{script.name}: {name}={dry.shown(call.environ[name])} is not there, but should be made"
        for call in run.trained[:1]:
            for half in [half for half, other in HALVES.items() if half in call.environ and other not in call.environ]:
                yield f"{script.name} {chosen or ''}: {half} without {HALVES[half]}, but should have both"
            for name, place in [(name, dry.shown(call.environ[name])) for name in KERNELS if name in call.environ]:
                if not any(Path(place).is_relative_to(folder) for folder in folders):
                    yield f"{script.name}: {name}={place}, which all nodes share, but should be on each node"


@clause("B6")
def test_a_user_s_own_place_for_models_is_kept(check, site, dry):
    """It may hold gigabytes, and nodes without internet access cannot download them again."""
    for script, call in dry.first_ranks(all_ranks=True):
        own = {name: f"/mine/{name.lower()}" for name in ("HF_HOME", "TORCH_HOME") if name in call.job_environ}
        for again in dry.job(script, all_ranks=True, environ=own).trained[:1] if own else ():
            lost = [name for name, value in own.items() if again.environ.get(name) != value]
            for name in lost:
                yield f"{script.name}: {name}={dry.shown(again.environ[name])}, but should be the user's"


@clause("X20")
def test_a_cache_that_is_not_the_user_s_alone_is_refused(check, site, dry):
    """Another user may have made it first, and compilers and torch load code from it. Each choice of a script checks it."""
    ways: dict[str, Callable] = {path.name: partial(dry.job, path) for path in trains(site)}
    ways |= {case.name: partial(dry.case, case) for case in site.cases if case.script in ways and case.name not in ways}
    for script, line in dry.by_hand:
        ways[line] = lambda all_ranks, command=(script, line), **planted: dry.command(*command, **planted)
    for name, run_as in ways.items():
        run = run_as(all_ranks=True)
        variables = [pair for call in run.trained for pair in call.job_environ.items()]
        shown = {dry.shown(value) for name, value in variables if re.search("CACHE|_DB_PATH$", name)}
        tops = {match[1] for value in shown if (match := re.match(r"/((?:var/)?tmp/[^/]+|dev/shm/[^/]+)", value))}
        # The machine makes these before the job, for it alone.
        its = [f"{place}/" for place in dry.of_the_machine(FIRST).values() if FIRST in place]
        tops = sorted(top for top in tops if not any(place.startswith(f"/{top}/") for place in its))
        now = {path: (dry.top / "root" / path).stat().st_mode for path in tops if (dry.top / "root" / path).exists()}
        wrong = [path for path in tops if run.modes.get(f"root/{path}", now.get(path, 0)) & 0o077]  # some jobs remove it
        yield from (f"{name} makes /{path} for others, too, but should make it with mode 700" for path in wrong)
        for kind, path in itertools.product(("open", "link"), tops):
            what = dict(open="which others may write to", link="a link")[kind]
            run = run_as(all_ranks=True, planted=(kind, path))
            if run.trained and not any(f"/{path}" in value for call in run.trained for value in call.job_environ.values()):
                continue  # mktemp gives it another name each time
            if run.trained or run.code != 3:
                yield f"{name}: trains with /{path}, {what}, but should end with 3 ({dry.ending(run)})"
            elif f"/{path}" not in run.output:
                yield f"{dry.ending(run)}, but should name /{path}"


@clause("X21")
def test_no_word_of_a_variable_is_run(check, site, dry):
    """Bash evaluates a variable's text in arithmetic: UID[$(command)0] would run the command."""
    mark = dry.top / "root/tmp/has-run"
    name = site.toml["job"].get("restarts", "SLURM_RESTART_COUNT")
    for script in trains(site):
        for value in (f"UID[$(echo >{mark})0]", "two"):
            run = dry.job(script, restarts=value)
            if mark.exists():
                mark.unlink()
                yield f"{script.name} runs the command in {name}=UID[$(command)0], but should refuse it"
            else:
                yield from dry.refused(run, f"{name}={value}", name)

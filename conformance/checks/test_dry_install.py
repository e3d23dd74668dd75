"""The static rung: what a site's install.sh does when it runs, with stand-ins for its machine's commands (dry_run.py).

    python -m pytest conformance/checks/test_dry_install.py [--site NAME_OR_FOLDER]

It runs without flags and once with each flag that its --help names.
"""

import os
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from conformance.cluster import layer
from conformance.harness.check import clause
from conformance.harness.dry_run import LEFT, PASSED, TORCH, USER, Call, DryRun, DryRuns, values_of, with_modules
from conformance.harness.sites import ROOT
from conformance.harness.sources import version_of


def runs(dry: DryRuns) -> dict[str, DryRun]:
    """Map the flags of install.sh to its runs."""
    return {" ".join(["install.sh", *flags[:1]]): dry.install(*flags) for flags in [(), *dry.given()]}


# Variables that change where pip installs, or make it refuse. PIP_USER overrules a pip.conf, too.
OF_PIP = dict(PIP_USER=("1", "--no-user"), PIP_TARGET=("/elsewhere", "--target"), PIP_PREFIX=("/elsewhere", "--prefix"))


@clause("B10")
def test_packages_of_the_user_s_own_are_not_counted(check, site, dry):
    """pip would count packages in ~/.local as installed, and no job sees those.

    Packages of the submitting shell's PYTHONPATH would come before the environment's. Modules may set the variable. With
    PIP_USER=1, a virtual environment's pip refuses, or installs into ~/.local.
    """
    for what, run in runs(dry).items():
        for call, words in run.pips():
            if not call.environ.get("PYTHONNOUSERSITE"):
                subject = f"{what}: pip install {' '.join(words)}"
                yield f"{dry.shown(subject)}: without PYTHONNOUSERSITE, but should have it as jobs do"
    own = dict(PYTHONPATH="/somewhere/site-packages")
    install = dry.install(after=(), environ=own | {name: value for name, (value, _) in OF_PIP.items()})
    for what, run in ({case.name: dry.case(case, environ=own) for case in site.cases} | {"install.sh": install}).items():
        for call in [*run.trained[:1], *(call for call, _ in run.pips())]:
            if own["PYTHONPATH"] in (value := call.environ.get("PYTHONPATH", "")):
                yield f"{what}: {call.command} with PYTHONPATH={value} of the user's shell, but should be without"
    for call, words in install.pips():
        flags = {word.partition("=")[0] for word in call.words}
        kept = [name for name, (value, flag) in OF_PIP.items() if call.environ.get(name) == value and flag not in flags]
        if kept and "--isolated" not in flags:
            subject = dry.shown(f"install.sh: pip install {' '.join(words)}")[:120]
            yield f"{subject} with {', '.join(kept)} of the user's shell, but should be without"


@clause("B10")
def test_each_flag_of_its_help_works(check, dry):
    """The result of each flag also trains: a packed environment, or one elsewhere."""
    unknown = {f"{flag} {value}" for flag, value in dry.flags if value and value not in PASSED}
    yield from (f"install.sh --help: {each}, but should be one of {', '.join(PASSED)}" for each in sorted(unknown))
    for what, run in runs(dry).items():
        if run.code:
            yield f"{what}: {dry.exit_of(run)}, but should be 0"
    for flags in dry.given():
        job = dry.job(dry.site.job_scripts[0], install=flags)
        elsewhere = PASSED["IMAGE"] in flags and job.code == 3 and "install.sh" in job.output  # job.sl names install.sh, too
        if not (job.trained and job.code == 0) and not elsewhere:
            yield f"a job after install.sh {flags[0]}: {dry.exit_of(job)}, but should be 0"


@clause("B10")
def test_what_it_installs_is_what_the_core_takes(check, dry):
    """core/pyproject.toml has the bounds: an old version would be found only by the ranks, after the queue."""
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    bounds = [f"python{project['requires-python']}", *project["dependencies"]]
    least = {name: version_of(number) for name, number in (bound.split(">=") for bound in bounds)}
    for what, run in runs(dry).items():
        asked = [word for _, words in run.pips() for word in words]
        asked += [word for call in run.called("conda", "mamba", "micromamba") for word in call.words]
        asked += [line.split()[0] for call, _ in run.pips() for line in call.notes.get("requirements", "").splitlines() if line]
        for word in dict.fromkeys(asked):
            name, _, number = re.sub("==?", "=", word).partition("=")
            if name in least and number[:1].isdigit() and version_of(number) < least[name]:
                yield f"{what}: {word}, but should be {'.'.join(map(str, least[name]))} or newer, as core/pyproject.toml says"


@clause("B10")
def test_its_help_tells_what_it_installs_by_default(check, dry):
    """Users compare `(default: torch==...)` with the driver of the nodes."""
    asked = {word for _, words in dry.install().pips() for word in words}
    for default in re.findall(r"\(default: ([^)]*)\)", " ".join(dry.install("--help").output.split())):
        for word in re.findall(r"[a-z][\w-]*==[\d.]*\d(?:\+[\w.]+)?|https?://[^\s;,]+", default):
            if word not in asked:
                own = sorted(each for each in asked if each.startswith(re.split("(?<=//)|(?<===)", word)[0]))
                yield f"install.sh --help: default: {word}, but should be {' '.join(own) or 'none'}, which pip is asked for"


@clause("B10")
def test_a_packed_environment_is_not_older_than_the_installed_one(check, dry):
    """Jobs unpack it: they would silently train with the older environment."""
    for flags in dry.given():
        for path in dry.packed(*flags):
            again = dry.install(after=flags)
            if str(path.relative_to(dry.top)) not in again.changed:
                yield f"{path.name} of install.sh {flags[0]} outlives a later install.sh, but should go, or be made anew"


@clause("B10")
def test_another_image_takes_the_place_of_the_first(check, dry):
    """The user expects the newer PyTorch, and would train with the old one."""
    image = PASSED["IMAGE"]
    for flags in dry.given("IMAGE"):
        newer = image[:-1] + "1"
        run = dry.install(*(newer if word == image else word for word in flags), after=flags)
        if not any(newer in call.words for call in run.called("apptainer", "singularity", "podman-hpc", "shifterimg")):
            yield f"install.sh {flags[0]} with another image than before: it is not fetched, but should be"
        (file := dry.top / "root/here.sif").write_text("the first")
        ours = tuple(f"/{file.name}" if word == image else word for word in flags)
        first = dry.install(*ours)
        file.write_text("another one of the same name")
        again = dry.install(*ours, after=ours)
        if b"the first" in first.tree.values() and b"another one of the same name" not in again.tree.values():
            yield f"install.sh {flags[0]} with a file that has changed: the first is kept, but should be taken anew"


@clause("B10")
def test_another_torch_takes_the_place_of_the_first(check, dry):
    """The user names another torch because the first one does not work here: a complete environment would keep the first."""
    for flag, value in dry.given("SPEC", "URL"):
        other = value[:-1] + "9"
        run = dry.install(flag, other, after=(flag, value))
        if not any(other in word for _, words in run.pips() for word in words):
            yield f"install.sh {flag} {other} after one with {value}: pip is not asked for it, but should be"
        asked = {word for _, words in run.pips() for word in words}
        lost = {word for _, words in dry.install(flag, other).pips() for word in words if re.match(r"[a-z][\w-]*==\d", word)}
        subject = f"install.sh {flag} {other} after one with {value}"
        yield from (f"{subject}: it has no {word}, but should, as if it were the first" for word in sorted(lost - asked))


@clause("B10")
def test_a_torch_that_is_asked_for_is_taken_though_python_brings_one(check, dry):
    """The user asks for another build because Python's own is wrong for this machine."""
    for flag, value in dry.given("SPEC", "URL"):
        asked = [words for _, words in dry.install(flag, value, fails="another torch").pips()]
        if not any(value in word for words in asked for word in words):
            yield f"install.sh {flag} {value} with a Python that has torch: pip is not asked for it, but should be"
        if value == PASSED["URL"] and not any(value in values_of(words, "--index-url", "-i") for words in asked):
            yield f"install.sh {flag} {value}: pip looks for torch elsewhere, too, but should look there alone"


@clause("B10")
def test_an_environment_that_does_not_work_is_not_kept(check, dry):
    """If the last test of an environment fails, the next install.sh makes it anew, and no job trains in it before."""
    steps = dry.install().steps
    looks = [fails for fails, step in steps if any("import" in word and "ddp_core" in word for word in step.words)]
    for fails in looks[-1:]:
        first, again = dry.install(fails=fails), dry.install(after=(), after_fails=fails)
        if first.code != 1 or not again.prefixes:
            observed = f"exit code {first.code}, and kept by the next install.sh"
            yield f"an environment that cannot be imported: {observed}, but should be 1, and made anew"
        job = dry.job(dry.site.job_scripts[0], install_fails=fails)
        yield from dry.refused(job, "a job in an environment that cannot be imported", "install.sh")


@clause("B10")
def test_another_torch_or_python_of_the_machine_is_noticed(check, dry):
    """A complete environment would keep packages made for the first torch.

    Two Pythons may have one version: the environment would use the first, and break when that is removed.
    """
    first, others = dry.install(), dict[str, dict]()
    brings = any("torch" in call.text and "version" in call.text for call in first.called("python", "python3"))
    if brings and not any("torch==2" in word for _, words in first.pips() for word in words):
        others["over torch 2.13.0, but should make it anew over 2.14.0"] = dict(fails="another torch")
    if any(call.words[:2] == ["-m", "venv"] and call.path.startswith(f"{dry.top}/bin/") for call in first.calls):
        path = f"{dry.other_python}:{dry.top}/bin:/usr/bin:/bin"
        others["with another python3 in PATH, but should make it anew with today's"] = dict(environ=dict(PATH=path))
    for what, shape in others.items():
        run = dry.install(after=(), **shape)
        if run.code == 0 and not run.prefixes:
            yield f"install.sh keeps what it made {what}"


@clause("B10")
def test_an_image_that_is_another_one_today_is_noticed(check, site, dry):
    """A link to the newest image changes with an update, but the environment was made for the first image."""
    path = dry.top / "root" / (layer.image_file(site) or "").lstrip("/")
    if path.is_file():
        first, newer = dry.install(), path.with_name(f"newer-{path.name}")
        path.rename(newer)
        path.symlink_to(newer)
        try:
            job = dry.job(site.job_scripts[0], environ=dict(DRY_RUN_AGAIN="another image"))
        finally:
            path.unlink()
            newer.rename(path)
        if first.code == 0:
            yield from dry.refused(job, "a job in another image than install.sh was run for", "install.sh")


@clause("B10")
def test_other_modules_than_it_was_made_with_are_noticed(check, site, dry):
    """mpi4py and virtual environments do not work with another MPI or another Python."""
    if case := with_modules(site, "another/1.0", "another/2.0"):
        [(line, other)] = case.edit.items()
        run = dry.install(after=(), case=case)
        if run.code == 0 and not run.prefixes:
            yield f"install.sh keeps what it made with {line}, but should make it anew with {other}"
        as_one = {word for call in run.called("module-call") for word in call.words if " " in word}
        yield from (f"install.sh loads {word!r}, but should load each by its name" for word in as_one)
        job = dry.job(site.job_scripts[0], case=case)
        yield from dry.refused(job, f"a job with {other}, but what install.sh made with {line}", "install.sh")


@clause("B10")
def test_a_choice_may_stand_in_quotes(check, site, dry):
    """Bash takes the value alone, also before a comment, so an install.sh that reads the job script must."""
    for case in site.cases:
        edit = {old: re.sub(r"^(\w+=)([\w./:-]+)$", r'\1"\2"  # ours', new) for old, new in case.edit.items()}
        if edit != case.edit and (run := dry.case(replace(case, name=f"{case.name} in quotes", edit=edit))).code:
            yield f"{' '.join(edit.values())}: {dry.ending(run)}, but should be 0, as without quotes"


@clause("B10")
def test_what_is_made_anew_has_nothing_of_the_first(check, site, dry):
    """pip would find packages of another Python, MPI or torch, not rebuild them, and they would fail in the job."""
    ways: list[tuple] = [(case, case.flags(PASSED["IMAGE"])) for case in site.cases if case.install is not None]
    ways += [(case, []) for case in [with_modules(site, "another/1.0")] if case]
    ways += [(None, flags) for flags in dry.given("SPEC")]
    ways.append((None, []))
    kept = set()
    for linked, (case, flags) in product((False, True), ways):
        run = dry.install(*flags, after=(), case=case, left=True, linked=linked)
        own = {os.path.relpath(os.path.realpath(prefix), os.path.realpath(dry.folder)) for prefix in run.prefixes}
        what = f"with {case.name}" if case else " ".join(flags) or "again"
        if run.code == 0 and any(path.startswith(f"{prefix}/") and path.endswith(LEFT) for prefix in own for path in run.tree):
            if what != "again" or (linked and what not in kept):
                place = ", into a link to its folder," if linked else ""
                yield f"install.sh {what}{place} keeps packages of what it has made before, but should remove them"
            kept.add(what)


@clause("B10")
def test_the_core_is_installed_though_one_of_its_version_is_there(check, dry):
    """pip calls a wheel or URL of this version already installed, silently under --quiet: jobs would keep the old core."""
    run = dry.install(after=(), left=True)
    for call, words in run.pips():
        if any(word.rstrip("/").endswith("core") for word in words) and not {"--force-reinstall", "--upgrade", "-U"} & {*words}:
            installed = call.notes.get("there", [])
            check.equal(ddp_core_that_pip_finds_there=([*map(dry.shown, installed)], []))


@clause("B10")
def test_in_another_place_it_is_the_one_that_jobs_find(check, dry):
    """A link to the environment leads to the new one. `ln -sf` would put the new link into the first one's folder."""
    for flags in dry.given("PREFIX"):
        other = tuple(word.replace(PASSED["PREFIX"], f"{PASSED['PREFIX']} 2") for word in flags)
        fresh = links(dry.install(*other).kept / dry.folder.name)
        if dry.install(*other, after=flags).code == 0 and (actual_links := links(dry.folder)) != fresh:
            observed = f"{dry.shown(str(actual_links))}, but should be {dry.shown(str(fresh))}"
            yield f"install.sh {other[-1]} after {flags[-1]}: links are {observed}"


def links(folder: Path) -> dict[str, str]:
    return {path.name: os.readlink(path) for path in folder.iterdir() if path.is_symlink()}


@clause("B10")
def test_an_installation_that_was_killed_is_made_whole_by_the_next(check, dry):
    """Ctrl-C or a login node's limits kill it. The next job ends with 3, and the next install.sh keeps nothing half made."""
    done = set()
    for flags in [(), *[flags for flags in dry.given() if PASSED["PREFIX"] not in flags]]:
        whole = dry.install(*flags)
        for number, step in enumerate([call for call in whole.calls if "makes" in call.notes], 1):
            if dry.shown(step.text) in done:
                continue
            done.add(dry.shown(step.text))
            fails = f"killed at {number}"
            again = dry.install(*flags, after=flags, after_fails=fails)
            paths = again.tree.keys() | whole.tree.keys()
            other = sorted(path for path in paths if again.tree.get(path) != whole.tree.get(path))
            what = f"{' '.join(['install.sh', *flags[:1]])}, killed in {dry.shown(step.text)[:80]!r}, and run again"
            if again.code or other:
                observed = f"{dry.exit_of(again)}, {' '.join(other[:3]) or 'the same files'}"
                yield f"{what}: {observed}, but should be 0 and the files of one that was not killed"
            if not flags:
                job = dry.job(dry.site.job_scripts[0], install_fails=fails)
                yield from dry.refused(job, "a job after an install.sh that was killed", "install.sh")


@clause("B10")
def test_what_is_made_on_a_node_s_own_disk_is_made_on_every_node(check, dry):
    """This needs a launcher: the job script's own commands run on the first node only, and other ranks would find nothing."""
    for flags in dry.given() if dry.disks else ():
        run = dry.job(dry.site.job_scripts[0], install=flags, nodes=2)
        for call in run.calls:
            reads = call.command in ("srun", "mpiexec", "sbcast") or "-c" in call.words  # reads, or copies to all nodes
            alone = not reads and nodes_of([same for same in run.calls if same.text == call.text]) == 1
            if alone and any(disk in call.text or disk in call.path for disk in dry.disks):
                yield f"{run.script}: {dry.shown(call.text)[:100]} on the first node alone, but should be on each: srun"


def nodes_of(calls: list[Call]) -> int:
    """Return how many nodes these calls ran on: at once, or by one step for each node."""
    told = {call.environ.get("DRY_RUN_ON", "") for call in calls}
    return max([len(told), *(int(call.environ.get("DRY_RUN_NODES", "1")) for call in calls)])


@clause("B10")
def test_a_packed_environment_is_unpacked_by_its_own_command(check, dry):
    """conda-unpack corrects paths in its programs, on every node: otherwise they run the old place's programs."""
    for flags in dry.given():
        packs = [call for call in dry.install(*flags).calls if "conda_pack" in call.text or "conda-pack" in call.text]
        run = dry.job(dry.site.job_scripts[0], install=flags, nodes=2) if packs and dry.packed(*flags) else None
        unpacks = [call for call in run.calls if "conda-unpack" in call.text] if run else []
        nodes = nodes_of(unpacks)
        if run and nodes < 2:
            which = "one node" if nodes else "no node"
            yield f"{run.script} after install.sh {flags[0]}: conda-unpack on {which}, but should be on each"


@clause("B10")
def test_what_an_interrupted_start_has_left_on_a_node_is_made_anew(check, dry):
    """A job killed while unpacking comes back to the same node, where its folder is incomplete."""
    script = dry.site.job_scripts[0]
    for flags in dry.given() if dry.disks else ():
        first = dry.job(script, install=flags)
        left = [re.match(rf".*/{USER}/[^/]+(?=/)", path) for path in first.changed]
        halves = tuple(call.words[-1] for call in first.called("sbcast"))  # sbcast refuses an existing file: sbcast --help
        for folder in sorted({match[0] for match in left if match}):
            shutil.rmtree(dry.top / folder, ignore_errors=True)
            again = dry.job(script, install=flags, restarts=1, beside=(folder,), halves=halves)
            theirs, ours = ({dry.shown(call.path) for call in run.trained} for run in (again, first))
            if again.code or theirs != ours:
                observed = f"{dry.ending(again)}, trained by {' '.join(theirs) or 'none'}"
                yield f"where a killed start has left {Path(folder).name}: {observed}, but should be 0, by {' '.join(ours)}"


@clause("B10")
@pytest.mark.parametrize("what", ["python", "torch"])
def test_what_is_too_old_is_refused_before_anything_is_installed(check, dry, what):
    """A machine's Python 3.9 or torch 2.4 would cause import errors on all ranks."""
    first = dry.install()
    brought = [call for call in first.called("python", "python3") if "torch" in call.text and "version" in call.text]
    own = any(call.command in ("conda", "mamba", "micromamba") for call in first.calls)  # conda makes its own Python
    venvs = [values_of(call.words, "--python", "-p") for call in first.called("uv") if call.words[:1] == ["venv"]]
    own |= any("/" not in "".join(python) for python in venvs)
    own |= what == "torch" and any("torch==2" in word for _, words in first.pips() for word in words)
    if own or not brought or not first.pips():
        return
    run = dry.install(fails=f"old {what}")
    if run.code != 3 or run.pips():
        observed = f"{dry.exit_of(run)} and {len(run.pips())} installations"
        yield f"install.sh with an old {what}: {observed}, but should be 3 before any"


@clause("B10")
def test_a_module_that_is_missing_ends_it_before_anything_is_installed(check, site, dry):
    """After an upgrade of the machine, an environment made with half of the modules would fail later, and elsewhere."""
    if case := with_modules(site, "another/1.0", "another/2.0"):  # any module may be missing, not only the last
        run = dry.install(fails="module another/1.0", case=case)
        if run.code != 3 or run.prefixes:
            yield f"install.sh without another/1.0 of two modules: {dry.ending(run)}, but should be 3 before anything"
    loads = [call for call in dry.install().called("module-call") if "load" in call.words]
    run = dry.install(fails="module") if loads else None
    names = {word.partition("/")[0] for call in loads for word in call.words[1:]}
    named = run and re.search(rf"(?m)\berror: .*\b(modules?|{'|'.join(map(re.escape, names))})\b", run.output)
    if run and (run.code != 3 or run.pips() or run.prefixes or not named):
        made = len(run.pips()) + len(run.prefixes)
        ends = f"{dry.exit_of(run)} and {made} installations"
        yield f"install.sh without its modules: {ends}, but should be 3 before any and name them"


@clause("B10")
def test_a_wrong_flag_is_refused_before_anything_is_done(check, dry):
    flags = dry.flags
    wrong = [("--no-such-flag",)] + [(flag,) for flag, value in flags if flag and value]
    for words in wrong if flags else []:
        run = dry.install(*words)
        lines = run.output.strip().splitlines()
        if run.code != 2 or len(lines) != 1 or words[0] not in run.output or run.pips():
            observed = f"{dry.exit_of(run)} and {len(lines)} lines"
            yield f"install.sh {words[0]}: {observed}, but should be 2 and one line that names it"


@clause("B10")
def test_a_flag_is_not_lost_beside_an_image(check, dry):
    """Where install.sh restarts itself in an image, it passes its flags on."""

    def done(*flags: str) -> set[str]:
        return {dry.shown(call.text) for call in dry.install(*flags).calls}

    for image, flag in product(dry.given("IMAGE"), dry.given()):
        works = flag != image and done(*flag) != done() and dry.install(*image, *flag).code == 0
        if works and done(*image, *flag) == done(*image):
            observed = f"install.sh {' '.join(image)[:40]}... {' '.join(flag)} does what it does without {flag[0]}"
            yield f"{observed}, but should hand it on"
    # A user's own wheel, in a folder that no image has.
    (wheel := dry.top / "root/wheels/mine-1.0-py3-none-any.whl").parent.mkdir(exist_ok=True)
    wheel.touch()
    for image, (flag, _) in product(dry.given("IMAGE"), dry.given("PACKAGE")):
        run = dry.install(*image, flag, f"/wheels/{wheel.name}")
        seen = [value for call in run.calls for value in values_of(call.words, "--bind", "-B") if str(wheel.parent) in value]
        if not seen:
            yield f"install.sh {flag} WHEEL beside an image: WHEEL is not bound into it, but should be"


@clause("B10")
def test_an_installation_that_fails_says_so(check, site, dry):
    """It ends with 1, and a later job with 3, as without any installation (J19)."""
    if not dry.install().pips() or not dry.install().prefixes:
        return  # nothing is installed
    run, script = dry.install(fails="pip"), site.job_scripts[0]
    if run.code != 1:
        yield f"install.sh where pip fails: exit code {run.code}, but should be 1"
    for what, shape in {"before install.sh": dict(install=None), "after it has failed": dict(install_fails="pip")}.items():
        yield from dry.refused(dry.job(script, **shape), what, "install.sh")


@clause("B10")
def test_a_step_of_an_installation_that_fails_is_not_passed_over(check, site, dry):
    """Each step that makes something or changes modules fails once: otherwise a user who asked for it learns of it in a job.

    Another command in its place, such as another source of a package, is no failure.
    """
    done = set()
    for flags in [(), *dry.given("", "PACKAGE", "IMAGE")]:
        whole = dry.install(*flags)
        before = Counter(dry.shown(call.text) for call in whole.calls)
        for fails, step in whole.steps:
            text = dry.shown(step.text)
            if text in done or not counts(site, whole, step):
                continue
            done.add(text)
            run = dry.install(*flags, fails=fails)
            if not run.code and not Counter(dry.shown(call.text) for call in run.calls) - before:
                what = " ".join(["install.sh", *flags[:1]])
                yield f"{what} where {text[:110]!r} fails: exit code 0, but should be 1, or 3 before anything is made"


def counts(site, run: DryRun, step: Call) -> bool:
    """Return whether a step makes a part of an environment, also inside an image, or changes the site's modules."""
    if step.command == "module-call":
        return bool({*step.words} & {*site.modules}) and not {*step.words} & {"is-avail", "is-loaded", "avail", "show", "list"}
    within = [call for call in run.calls if step.start_time <= call.start_time <= (step.end_time or step.start_time)]
    return any("makes" in call.notes for call in within)


@clause("B10")
def test_an_installation_starts_as_many_compilers_as_it_says(check, site, dry):
    """make -j without a number starts a compiler of 1 GB for each file, on a login node; nproc counts all its cores."""
    without = r"""(?:MAKEFLAGS=\S*|\bmake\b[^\n#]*\s)-j(?=["'}\s]|$)"""
    of_all = r"""^[^\n#]*(?:-j|--parallel|JOBS=)[= ]*"?\$\(nproc"""
    scripts = [path for path in sorted(site.folder.iterdir()) if path.suffix in (".sh", ".sl", ".pbs")]
    wrong = {path: without if path in site.job_scripts else f"{without}|{of_all}" for path in scripts}
    matches = {path.name: re.findall(each, path.read_text(), re.MULTILINE) for path, each in wrong.items()}
    yield from (f"{name}: {words[0].strip()!r}, but should have a number behind -j" for name, words in matches.items() if words)
    for call in [call for flags in [(), *dry.given()] for call in dry.install(*flags).called("mksquashfs", "conda-pack")]:
        counts = values_of(call.words, "-processors", "--n-threads", "-j")  # conda-pack takes one by default
        if (call.command == "mksquashfs" and not counts) or {*counts} & {"-1", "0"}:
            yield f"install.sh: {dry.shown(call.text)[:80]}, but should say on how many cores: a login node is everybody's"


@clause("B6")
def test_a_folder_of_somebody_else_is_no_prefix(check, dry):
    """A folder .venv of somebody else is kept as it is."""
    for prefix in dry.install().prefixes[:1]:
        place = os.path.relpath(os.path.realpath(prefix), dry.top)
        run = dry.install(planted=place)
        if run.code != 3 or f"{place}/mine" in run.changed or run.pips():
            yield f"install.sh where {Path(place).name} is somebody else's: {dry.exit_of(run)}, but should be 3 and leave it"


@clause("B6")
def test_an_installation_touches_only_its_prefix(check, dry):
    for flags in dict.fromkeys([(), *(tuple(case.flags(PASSED["IMAGE"])) for case in dry.site.cases)]):
        dry.install(*flags)  # earlier checks may have installed more
    pristine, beside = dry.pristine / dry.folder.name, f"{dry.folder.parent}/"
    pristine_names = {path.name for path in pristine.iterdir()}
    for run in [run for run in dry.made.values() if run.kept and not run.shape["planted"]]:
        kept, flags = run.kept, run.shape["flags"]
        own = [dry.folder / path.name for path in (kept / dry.folder.name).iterdir() if path.name not in pristine_names]
        # Files that it made and removed again are its own, too.
        own += [Path(call.folder, word) for call in run.calls for word in call.words if word.startswith(f"{dry.folder}/.")]
        own += [dry.top / f"root{flag}" for flag in flags if flag.startswith("/")]
        changed = [dry.top / path for path in run.changed if not any((dry.top / path).is_relative_to(each) for each in own)]
        name = " ".join(["install.sh", *flags[:1]])
        yield from (f"{name} changes {dry.shown(str(path))}, but should write into its prefix alone" for path in changed)
        yield from dry.removed(run, own)
        # Temporary files are removed: the layers of an image are some GB.
        places = {value for call in run.calls for key, value in call.environ.items() if re.search(r"(CACHEDIR|TMPDIR)$", key)}
        for place in sorted(places) if not run.shape["fails"] else ():
            if place.startswith(f"{dry.folder}/") and (kept / place[len(beside) :]).exists():
                yield f"{name} leaves {dry.shown(place)}, but should remove it at its end"


@clause("B7")
def test_nothing_replaces_the_torch_of_the_machine(check, dry):
    """The core is installed without dependencies. A user's package, accepted or refused by pip, never changes torch."""
    refused = {
        f"install.sh {flags[0]}, which pip refuses,": dry.install(*flags, fails=f"pip {PASSED['PACKAGE']}")
        for flags in dry.given("PACKAGE")
    }
    for what, run in (runs(dry) | refused).items():
        for call, words in run.pips():
            if "--no-deps" in words:
                continue
            held = f"torch=={TORCH}" in [*words, *call.notes.get("constraints", "").splitlines()]
            core = [word for word in words if word.rstrip("/").endswith("core")]
            wrong = [word for word in words if word in ("--upgrade", "-U", "--force-reinstall", "--ignore-installed", "-I")]
            if core:
                yield f"{what}: pip install of ddp_core, but should have --no-deps"
            if wrong or (PASSED["PACKAGE"] in words and not held):
                offending = " ".join([*wrong, *(word for word in words if word == PASSED["PACKAGE"])])
                yield f"{what}: pip install {offending}, but should hold the torch that is there, by --constraint or by name"


@clause("B7")
def test_an_image_is_named_by_what_is_in_it(check, dry):
    """A tag such as :latest is another image tomorrow: install.sh refuses it, or fetches today's image by its digest."""
    named, runtimes = "docker://registry/pytorch:latest", ("apptainer", "singularity", "podman-hpc", "enroot", "shifterimg")
    for flag, *_ in dry.given("IMAGE"):
        run = dry.install(flag, named)
        by_tag = [call for call in run.called(*runtimes) if named in call.words]
        if by_tag or (run.code not in (2, 3) and not any("@sha256:" in call.text for call in run.calls)):
            yield f"install.sh {flag} {named}: {dry.exit_of(run)}, but should be 2: a digest names an image, a tag does not"


UNSAFE = re.compile(r"--trusted-host|--insecure|\s-k\s|--no-check-certificate|http://(?!localhost)|--break-system-packages")
# Variables with the same effect. https://pip.pypa.io/en/stable/topics/configuration/#environment-variables
UNCHECKED = re.compile(
    r"PIP_TRUSTED_HOST=.|PIP_(EXTRA_)?INDEX_URL=.*http:|CONDA_SSL_VERIFY=(?i:0|false|no)$"
    r"|GIT_SSL_NO_VERIFY=|(CURL|REQUESTS)_CA_BUNDLE=$"
)
# Names of a proxy, for which http:// is usual.
PROXY = re.compile(r"\s(--proxy|-x)[= ]\S+|(?i:\b\w*_proxy=\S+)")
# What a line must not have, with what it should do. Also lines that no installation runs.
FETCHES = {
    r"\b(curl|wget)\b.*\|\s*(sudo )?(ba|z)?sh\b": "run nothing that it has not checked",
    rf"\b(curl|wget)\b.*({UNSAFE.pattern})": "check what it fetches",
    r"\bcurl\b(?!.*(--location\b|\s-[a-zA-Z]*L))": "follow where the server leads: --location",
    r"\bcurl\b(?!.*(--fail\b|--fail-with-body\b|\s-[a-zA-Z]*f))": "take no page of an error for the file: --fail",
}


@clause("B7")
def test_what_is_installed_is_named_with_its_version(check, site, dry):
    for run in runs(dry).values():
        asked = [(what, call, words) for what in ("install", "download") for call, words in run.pips(what)]
        for what, word in [(what, word) for what, call, words in asked for word in without_hash(call, words)]:
            # A flag may add packages named by a range, or by the user.
            if word != PASSED["PACKAGE"] and (run is dry.install() or not re.search("[<>]", word)):
                yield f"install.sh: pip {what} {word}, but should name its hash"
        yield from loose(site, dry, run)
        yield from loose_elsewhere(dry, run)
    for script in site.scripts:
        text = script.read_text()
        for match in re.finditer(r"(?m)^(?:[^#\n]*\\\n)*.*$", text):  # a command with its continuation lines
            number, line = text.count("\n", 0, match.start()) + 1, PROXY.sub("", match[0].replace("\\\n", " "))
            for should in [should for wrong, should in FETCHES.items() if re.search(rf"^[^#]*{wrong}", line)]:
                yield f"{script.name}:{number}: {line.strip()[:100]!r}, but should {should}"


PINNED = re.compile(r"([\w.-]+)==([\w.]+)((?:[ \\\n]+--hash=sha256:\w*)+)")


@clause("B7")
def test_a_hash_is_whole_and_of_the_version_above_it(check, site):
    """pip refuses a wrong hash only on the machine, after minutes, and perhaps only for `--pack`."""
    for script in site.scripts:
        text = script.read_text()
        for match in PINNED.finditer(text):
            for digest in re.findall(r"sha256:(\w+)", match[3]):
                if not re.fullmatch("[0-9a-f]{64}", digest):
                    yield f"{script.name}: {match[1]}: a hash of {len(digest)} letters, but should be 64 hex digits"
            pages = re.findall(rf"pypi\.org/project/{re.escape(match[1])}/([\w.]+)", text[: match.start()])
            if pages and (page := pages[-1].rstrip(".")) != match[2]:
                yield f"{script.name}: {match[1]}=={match[2]} below the page of {page}, but should be of one version"


def loose(site, dry: DryRuns, run: DryRun) -> Iterator[str]:
    """Yield what pip is free to choose: versions, sources and the place."""
    prefixes = [os.path.realpath(prefix) for prefix in run.prefixes]
    mpi = any(launch.mpi for launch in site.launches)
    for call, words in run.pips():
        asked = requirements(words)
        yield from (f"install.sh: pip install {word}, but should name a version" for word in asked if not pinned(word))
        mpi4py = mpi and any(word.startswith("mpi4py") for word in asked)
        if mpi4py and "mpi4py" not in "".join(values_of(words, "--no-binary")):
            yield "install.sh: pip install mpi4py, but should build it (--no-binary=mpi4py): PyPI's has another MPI"
        builds = {match[1] for word in words if (match := re.search(r"/rocm(\d+\.\d+)", word))}
        for name in site.modules:
            if (version := re.match(r"rocm/(\d+\.\d+)", name)) and builds - {version[1]}:
                yield f"install.sh: torch for ROCm {', '.join(builds)}, but should be for that of the module {name}"
        if PASSED["PACKAGE"] in words and values_of(words, "--index-url", "-i"):
            yield f"install.sh: {' '.join(words)[:120]}, but should look for a user's package on PyPI, too"
        index = values_of(words, "--index-url", "--extra-index-url", "-i")
        for url in index:
            if url.rstrip("/").endswith("/cpu"):
                yield f"install.sh: {url}, but should be for {site.toml['node']['device']}"
        path = os.path.realpath(os.path.join(call.folder, os.path.dirname(call.path)))
        into = values_of(words, "--target", "-t", "--prefix")
        if "--user" in words or not (into or any(path.startswith(f"{prefix}/") for prefix in prefixes)):
            yield f"install.sh: {dry.shown(call.text)[:120]}, but should install into its own prefix"


def loose_elsewhere(dry: DryRuns, run: DryRun) -> Iterator[str]:
    """Yield what other commands are free to choose, and unchecked downloads."""
    settings = {f"{name}={value}" for call in run.calls for name, value in call.environ.items()}
    for setting in sorted(filter(UNCHECKED.match, settings)):
        yield f"install.sh: {setting}, but should check what it fetches"
    for call in run.calls:
        words = call.words
        if UNSAFE.search(PROXY.sub("", f" {call.text} ")) and call.command not in ("rm", "module-call"):
            yield f"install.sh: {dry.shown(call.text)[:120]}, but should check what it fetches"
        words = words[words[:1] == ["env"] :]
        if call.command in ("conda", "mamba", "micromamba") and words[:1] and words[0] in ("create", "install", "update"):
            asked = requirements(words[1:]) + in_file(call.notes.get("file", ""))
            for word in asked:
                if not pinned(word):
                    yield f"install.sh: conda {words[0]} {word}, but should name a version"
            if not values_of(words, "-p", "--prefix"):
                yield f"install.sh: {call.text[:120]}, but should name a --prefix"
        if call.command in ("git",) and words[:1] == ["clone"] and not values_of(words, "--branch", "-b"):
            yield f"install.sh: {call.text[:120]}, but should name a --branch or a commit"


def without_hash(call: Call, words: list[str]) -> list[str]:
    """Return packages without a hash, except those that come with torch, have another index, or are built for a site's MPI."""
    flags = {word.partition("=")[0] for word in words}
    built = "--no-binary" in flags and "install" in call.words
    if built or flags & {"--index-url", "-i"} or any(word.startswith("torch") for word in words):
        return []
    lines = call.notes.get("requirements", "").replace("\\\n", "").splitlines()
    named = [word for word in requirements(words) if "/" not in word]
    return named + [line for line in lines if line.partition("#")[0].strip() and "--hash=sha256:" not in line]


def in_file(text: str) -> list[str]:
    """Return the packages that conda reads from a list, or below `dependencies:` in a YAML file."""
    if below := re.search(r"(?ms)^dependencies:(.*?)(?=^\w|\Z)", text):
        return re.findall(r"(?m)^\s*- *[\"']?([^\"'#\n]+)(?<!:)\b", below[1])
    return [line for line in map(str.strip, text.splitlines()) if line and line[0] not in "@#"]


# Flags that take a value as the next word.
VALUED = {"--index-url", "--extra-index-url", "-i", "--constraint", "-c", "--target", "-t", "--prefix", "-p", "--channel"}
VALUED |= {"--find-links", "-f", "-n", "--name", "--cache-dir", "--upgrade-strategy", "--requirement", "-r", "--progress-bar"}
VALUED |= {"--root-user-action", "--no-binary", "--only-binary", "--dest", "-d", "--timeout", "--retries", "--platform"}
VALUED |= {"--file", "--solver", "--subdir", "--config-settings", "-C", "--python-version"}


def requirements(words: list[str]) -> list[str]:
    """Return the packages among the words of an installation, without flags and their values."""
    packages, skip = [], False
    for word in words:
        if not skip and not word.startswith("-"):
            packages.append(word)
        skip = word in VALUED
    return packages


def pinned(word: str) -> bool:
    """Return whether a word is fixed: a version, wheel, versioned folder, the core, a commit. Pip is Python's own."""
    if word in ("pip", "setuptools", "wheel") or "$" in word:
        return True
    if "://" in word or word.startswith("git+"):
        return bool(re.search(r"@[\w.-]+(#|$)|\d+\.\d+", word))
    if word.endswith((".whl", ".tar.gz")):
        return True
    if word.startswith((".", "/")) or re.fullmatch(r"[\w.-]+(/[\w.-]+)+", word):
        return bool(re.fullmatch(r"core|.*\d\.\d.*", word.rstrip("/").rpartition("/")[2]))
    if re.match(r"torch(vision|audio)?\b", word):
        return bool(re.search(r"[^<>!~]==?\d", word))
    return bool(re.search(r"[=<>~]=?\s*\d", word))

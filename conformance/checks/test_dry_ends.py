"""The static rung: how a job ends, comes back and gets signals, in dry runs (dry_run.py); and the mistakes of users.

    python -m pytest conformance/checks/test_dry_ends.py [--site NAME_OR_FOLDER]

Each choice that a job script marks ([[job.choices]]) is run, and each submission that its head shows.
"""

import os
import re
import shlex
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from conformance.harness.check import clause
from conformance.harness.dry_run import ARGUMENTS, FIRST, OF_PBS, OTHER, PASSED, SECRET, USER, Call, DryRun, trains, values_of
from conformance.harness.shell import OPTIONS, START_SECONDS, Script, handed_on, minutes, nodes_asked, options_of, words_of
from conformance.harness.sites import ROOT, flags_in
from conformance.harness.stub_core import who

MANY_NODES, OF_ANOTHER = 100, "runs/of-another-job"
# Another machine's network settings, left in the user's environment.
LEFT = dict(NCCL_NET="Socket", NCCL_SOCKET_IFNAME="eth9", GLOO_SOCKET_IFNAME="eth9", FI_PROVIDER="tcp", NCCL_IB_DISABLE="1")
PACKAGES = "h5py >3,<4"  # has a space, and characters that a shell would take for file names
FINAL = {0: "done", 2: "usage", 3: "preflight", 5: "a snapshot that cannot be used", 6: "a loss that is not finite"}
FINAL |= {8: "storage"}
# After these codes another launch may succeed, so a few are allowed; Slurm's own requeue is for failed nodes.
LOST = {1: "a launcher that failed", 4: "ranks that did not meet", 7: "a rank that was lost", 137: "ranks that were killed"}
BUS_ERROR = 135
MOST_LAUNCHES, MANY_RESTARTS = 4, 1000
NONSENSE = "nonsense"


@clause("J2")
def test_the_exit_code_of_the_ranks_is_the_job_s(check, site, dry):
    """srun returns the highest code, perhaps that of torchrun on the other nodes after the first node's ranks have ended."""
    for case in site.cases:
        shapes: list[tuple[tuple, dict]] = [((75, 7), dict(fails="agent", nodes=2, all_ranks=True))]
        shapes = shapes if dry.case(case).called("torchrun") else []
        for codes, shape in [*shapes, ((*FINAL, *LOST, BUS_ERROR, 75), {})]:
            exit_codes = {code: dry.case(case, code=code, **shape).code for code in codes}
            check.equal(**{f"exit_codes_of_{case.name}": (exit_codes, {code: code for code in codes})})


@clause("J2")
def test_the_exit_code_of_the_ranks_is_the_job_s_whatever_fails_after_them(check, site, dry):
    """The scheduler may not answer, or a node be lost: a stopped run that ends with 1 would look failed."""
    for script in trains(site):
        run = dry.job(script, code=75)
        for fails, call in [(fails, call) for fails, call in run.steps if call.start_time > run.end_time]:
            again = dry.job(script, code=75, fails=fails)
            if again.code != 75:
                yield f"{script.name}, where {call.text} fails: {dry.ending(again)}, but should be 75"


@clause("J10")
def test_a_node_that_hangs_does_not_keep_a_stopped_job_from_coming_back(check, site, dry):
    """Little of the time limit is left, so a script's later work on the nodes has a limit of its own (timeout).

    srun passes SIGTERM on to the ranks, and continues to wait.
    """
    for script in trains(site):
        usual = dry.job(script, code=75)
        run = dry.job(script, code=75, fails="hangs") if usual.new_starts else usual
        starts = min((call.start_time for call in run.new_starts), default=0)
        for call in [call for call in run.called(run.launcher) if call.start_time > run.end_time > 0]:
            own = values_of(call.words, "--time", "-t")  # a step's limit, which Slurm enforces
            late = not starts or starts > (call.end_time or starts)  # a call without an end was killed
            if usual.new_starts and late and not own and not {"--version", "-V"} & {*call.words}:
                yield f"{script.name}, where {dry.shown(call.text)} hangs: no new start before it ends, but should be one"
        left = [float(grace) / 2 for call in usual.trained[:1] for grace in values_of(call.arguments, "--grace")[-1:]]
        seconds = timed_out([call for call in usual.called(usual.launcher) if call.start_time > usual.end_time])
        if left and usual.new_starts and seconds > left[0]:
            limit = f"at most {left[0]:g}, half of --grace"
            yield f"{script.name}: {seconds:g} s of timeout before it starts again, but should be {limit}"


def timed_out(calls: list[Call]) -> float:
    """Return the seconds after which `timeout` ends these commands; of commands that run side by side, the longest one's."""
    seconds, end_time, longest = 0.0, 0.0, 0.0
    for call in sorted(calls, key=lambda call: call.start_time):
        if call.start_time > end_time:
            seconds, longest = seconds + longest, 0.0
        longest, end_time = max(longest, call.seconds), max(end_time, call.end_time or call.start_time)
    return seconds + longest


@clause("J2")
def test_the_exit_code_of_an_earlier_start_is_none_of_this_one(check, site, dry):
    """Killed ranks record no code: the last one in run.jsonl is from an earlier start.

    But ranks that have saved may end with a bus error: Apptainer without setuid mounts by a process that Slurm's USR1 ends.
    """
    for case in site.cases:
        for code, when in ((137, ""), (BUS_ERROR, "start"), (BUS_ERROR, "")):
            run = dry.case(case, code=code, recorded=75, fails=when)
            check.equal(**{f"exit_code_of_{case.name}_whose_ranks_end_with_{code}": (run.code, code)})
            yield from (f"{case.name}: {call.text}, but should not" for call in run.new_starts)
        run = dry.case(case, code=75, recorded=0, arguments=["--fresh"])  # --fresh begins a new record
        check.equal(**{f"exit_code_of_{case.name}_--fresh": (run.code, 75)})
        check.equal(**{f"new_starts_of_{case.name}_--fresh": (len(run.new_starts), 1)})
        for words in (ARGUMENTS, ("--run-dir", "runs/mine")) if run.called("apptainer") else ():
            saved = dry.case(case, code=BUS_ERROR, fails="image", arguments=words)
            check.equal(**{f"exit_code_of_{case.name}_{' '.join(words)}": (saved.code, 75)})


@clause("J10")
def test_what_would_fail_again_is_not_started_again(check, site, dry):
    for case in site.cases:
        for code, what in (FINAL | LOST).items():
            run, most = dry.case(case, code=code), 1 if code in FINAL else MOST_LAUNCHES
            yield from (f"{case.name}: {call.text} after {code} ({what}), but should not" for call in run.new_starts)
            if len(run.launches) > most:
                yield f"{case.name}: {len(run.launches)} launches after {code} ({what}), but should be {most}"


@clause("J10")
def test_a_stopped_job_comes_back_once_its_ranks_have_ended(check, site, dry):
    """It comes back by itself, once per stop, and only a limited number of times."""
    for case in site.cases:
        for restarts in (0, 1):
            run = dry.case(case, code=75, **(dict(restarts=restarts) if restarts else {}))
            starts = run.new_starts
            if len(starts) != 1:
                yield f"{case.name}: {len(starts)} new starts after 75, but should be 1 ({dry.ending(run)})"
            for call in starts:
                if call.start_time < run.end_time:
                    yield f"{case.name}: {call.text} before its ranks have ended, but should be after"
            named = re.compile(rf"{FIRST}(_\d+)?")  # or the array's job with its index
            wrong = [call for call in starts if call.command == "scontrol" and not any(map(named.fullmatch, call.words))]
            yield from (f"{case.name}: {call.text}, but should name job {FIRST}" for call in wrong)
        for options in site.job(site.folder / case.script).get("ends_when_stopped", []):
            if starts := dry.job(site.folder / case.script, code=75, options=words_of(options)).new_starts:
                yield f"{case.name}: {starts[0].text} with {options}, but should end (ends_when_stopped)"
        if starts := dry.case(case, code=75, restarts=MANY_RESTARTS).new_starts:
            yield f"{case.name}: {starts[0].text} after {MANY_RESTARTS} restarts, but should have a limit"


@clause("J10")
def test_at_last_it_says_how_to_go_on(check, site, dry):
    """The command repeats the user's arguments, quoted for a shell, but not --fresh, which would set the run aside."""
    for script, words_given in product(
        trains(site), ([*ARGUMENTS, "--fresh", "--seed", "1"], ["--fresh", *ARGUMENTS], ["--fresh"])
    ):
        run = dry.job(script, code=75, restarts=MANY_RESTARTS, arguments=words_given)
        line = next((line for line in run.output.splitlines() if re.search(rf"--run-dir['\"]?[= ]\S*{FIRST}", line)), "")
        shown = re.search(r"(?:(['\"])(?:sbatch|qsub)\1|\b(?:sbatch|qsub))\s.*", line)
        try:
            words = shlex.split(shown[0]) if shown else []
        except ValueError:
            words = []
        if not words:
            yield f"{script.name}: {line!r} after the last restart, but should say how to go on: --run-dir runs/{FIRST}"
            continue
        if site.toml["scheduler"] != "slurm":
            words = " ".join(words).split()
        lost = [word for word in words_given if word not in words and (" " not in word or site.toml["scheduler"] == "slurm")]
        if lost != ["--fresh"]:
            difference = f"without {' '.join(lost) or 'any difference'}"
            yield f"{script.name}: the command that goes on is {shown[0]!r}, {difference}, but should lack --fresh alone"
        if not re.search(r"\boptions?\b|--nodes\b|-N ?\d|\b(select|ncpus|nodes)=", line):
            lost_option = "--nodes=4" if site.toml["scheduler"] == "slurm" else "-l select=4"
            yield f"{script.name}: {line!r}, but should name the options that the job had: {lost_option} is lost without"


@clause("J10")
def test_it_says_to_go_on_where_it_was(check, site, dry):
    """It names the user's run directory, if any: of a repeated flag, the last one counts."""
    for script in trains(site):
        run = dry.job(script, code=75, restarts=MANY_RESTARTS, arguments=["--run-dir", OF_ANOTHER])
        lines = [line for line in re.sub("[\"']", "", run.output).splitlines() if re.search(r"\b(resume|sbatch|qsub)\b", line)]
        places = re.findall(r"(?m)^.*--run-dir(?:=|[ ,]+)([^\s,;]+)", "\n".join(lines))  # the last one of each line
        if not places or {*places} != {OF_ANOTHER}:
            named = " ".join(places) or "no run directory"
            yield f"{script.name} --run-dir {OF_ANOTHER}: to resume it names {named}, but should name that"


@clause("B6")
def test_the_jobs_of_an_array_are_jobs_of_their_own(check, site, dry):
    """Jobs of an array share the array's number: with it in their names they would share a run directory and caches."""
    array = dict(SLURM_ARRAY_JOB_ID=OTHER, SLURM_ARRAY_TASK_ID="3") if site.toml["scheduler"] == "slurm" else {}
    for script in trains(site) if array else ():
        run = dry.job(script, environ=array, all_ranks=True)
        for call in run.trained[:1]:
            values = [value for name, value in call.environ.items() if not name.startswith(("SLURM_", "DRY_RUN"))]
            named = sorted({dry.shown(word) for word in [*call.words, *values] if re.search(rf"\b{OTHER}\b", word)})
            yield from (f"{script.name} in an array: {word}, but should be named for the job: {FIRST}" for word in named)
        # The array's number would stop and requeue all of its jobs. It is also the last job's own number.
        for number, name in ((FIRST, FIRST), (OTHER, f"{OTHER}_3")):
            run = dry.job(script, environ=array, number=number, code=75)
            commands = [call.text for call in run.new_starts if OTHER in call.words]
            yield from (f"{script.name} in an array: {command}, but should name the job: {name}" for command in commands)


@clause("J10")
def test_the_readme_tells_how_often_it_comes_back(check, site, dry):
    told = re.findall(r"[^.;]*\b(?:at most|up to) \d+ (?:times|in a row)\b(?! faster| slower| as )[^.;]*", site.readme)
    back = re.compile(r"queue|restart|resubmit|\bcomes? back|successor")  # "launch" means another launch within the job
    told = [part for part in told if back.search(part) and "launch" not in part]
    match = re.search(r"\b(?:at most|up to) (\d+) (times|in a row)\b", told[0]) if told else None
    most = int(match[1]) if match else 0
    for script in trains(site) if match else ():
        for restarts, should in ((3, 1), (most - 1, 1), (most, 0)):  # compared as texts, 3 would come after 20
            if len(starts := dry.job(script, code=75, restarts=restarts).new_starts) != should:
                path = f"{script.name}: {len(starts)} new starts after {restarts} restarts"
                yield f"{path}, but should be {should}: README.md says {match[0]}"


@clause("J10")
def test_the_readme_tells_how_often_it_launches_again(check, site, dry):
    """README.md also says after how long a job launches again: nodes without ranks are paid for."""
    for part in re.findall(r"[^.;]*\b(?:re|)launch(?:es)?(?: them)? again\b[^.;]*", site.readme):
        run = max((dry.case(case, code=7) for case in site.cases), key=lambda run: len(run.launches))
        again, slept = len(run.launches) - 1, {call.seconds for call in run.called("sleep")}
        for often, number in re.findall(r"\bat most (once|twice|(\d+) times)", part):
            if again != (should := int(number or dict(once=1, twice=2)[often])):
                yield f"{run.script}: {again} more launches after 7, but should be {should}: README.md says at most {often}"
        for seconds in re.findall(r"\bagain[^.;,]* after (\d+) s\b", part) if again else ():
            if float(seconds) not in slept:
                observed = " and ".join(f"{each:g}" for each in sorted(slept))
                yield f"{run.script}: sleep {observed or 'nowhere'}, but should be {seconds}: README.md says after {seconds} s"


@clause("F10")
def test_the_readme_tells_where_log_and_run_are(check, site, dry):
    """`train-JOB.out`, `train-%j.out` and `train-15.out` mean the same file there."""
    scripts = trains(site)
    known = dict(log={log_of(site, script) for script in scripts}, run={dry.job(script).run_dir for script in scripts})
    sentences = [part for part in re.split(r"(?<=[.;]) ", site.readme) if not re.search("--run-dir|install|error log", part)]
    told = [each for part in sentences for each in re.findall(r"\b[Tt]he (log|run) is (?:in )?`([^` ]+)`", part)]
    for what, span in told:
        pattern = ".*".join(map(re.escape, re.split(r"%\w|<[^>]*>|\$\{?\w+\}?|[A-Z][A-Z_]+|\d+", span.strip("./"))))
        if not any(own in ("", "none") or re.search(rf"(?:^|/){pattern}(?:/|$)", own) for own in known[what]):
            yield f"README.md: the {what} is in {span}, but should be in {' or '.join(sorted(known[what]))} (of job {FIRST})"


def log_of(site, script: Path) -> str:
    """Return the log's name for job 4242; empty where a PBS directive may name a folder."""
    options = Script(script).options
    name = options.get("job-name") or options.get("J") or options.get("N") or script.name
    if site.toml["scheduler"] != "slurm":
        return "" if "o" in options else f"{name}.o{FIRST}"
    template = options.get("output") or options.get("o") or "slurm-%j.out"
    return re.sub(r"%\d*\w", "0", re.sub(r"%\d*[jA]", FIRST, template.replace("%x", name)))


@clause("F10")
def test_a_folder_of_the_nodes_that_the_readme_names_is_there(check, site, dry):
    """Users look there for what a job has left, such as `/tmp/ddp-UID-JOB`. Names without a user or job may be examples."""
    named = {
        path for path in re.findall(r"`((?:/tmp|/var/tmp|/dev/shm)/[^`\s]*)`", site.readme) if re.search("UID|JOB|NUMBER", path)
    }
    runs = [dry.install(), *(dry.job(script, environ=environ) for script, environ in chosen(site))] if named else []
    runs += [dry.case(case) for case in site.cases] if named else []
    texts = [text for run in runs for call in run.calls for text in (*call.environ.values(), *call.words)]
    used = dry.shown("\n".join([*texts, *(f"{dry.top}/{path}" for run in runs for path in run.modes)]))
    for path in sorted(named):
        words = dict(UID=str(os.getuid()), USER=USER, JOB=FIRST, NUMBER=FIRST, SLURM_JOB_ID=FIRST)
        parts = re.split(r"\$?\{?([A-Z][A-Z_]{2,})\}?", path)
        pattern = "".join(words.get(part, "[^/]+") if place % 2 else re.escape(part) for place, part in enumerate(parts))
        if not re.search(rf"(?m)(?<![\w/]){pattern}(?![\w-])", used):
            yield f"README.md: {path}, but should be a folder that a job makes or names"


@clause("J10")
def test_a_successor_goes_on_where_its_job_was(check, site, dry):
    """A successor asks for the same resources and finds the same run, and so does its own successor."""
    variable, cores = site.toml["job"].get("restarts", ""), site.toml["node"]["cores"]
    for case in site.cases:
        run, resources = dry.case(case, code=75), Script(site.folder / case.script).resources
        place = run.run_dir
        for restarts in (1, 2):
            if not run.successors:
                break
            command = run.successors[0].text
            had = OF_PBS if site.toml["scheduler"] == "pbs" else {}
            had = {key: had[key] for key in had if key != "filesystems" or key in site.toml.get("queue", {})}
            had = {key: had[key] for key in had if key != "place" or "select" in resources}  # `place` is of chunks
            lost = [value for value in had.values() if value not in command]
            yield from (f"{case.name}: {command}, but should ask for {value}, as this job did" for value in lost)
            environ = handed_on(shlex.join(run.successors[0].words))
            if environ.get(variable) != str(restarts):
                yield f"{case.name}: {variable}={environ.get(variable)} for the next job, but should be {restarts}"
            run = dry.case(case, code=75, number=f"{int(FIRST) + restarts}", environ=environ)
            if run.run_dir != place:
                yield f"{case.name}: run directory={run.run_dir} in successor {restarts}, but should be {place}"
        # The directive's number of nodes, and another one as a user may submit it.
        for nodes in (case.nodes, case.nodes + 2):
            for call in dry.case(case, code=75, nodes=nodes).successors:
                count = nodes_asked(call.text, cores) or Script(site.folder / case.script).nodes(cores) or case.nodes
                if count != nodes:
                    yield f"{case.name} on {nodes} nodes: {call.text}, but should ask for as many, and not for {count}"
        for call in dry.case(case, code=75, progress=False).successors:
            yield f"{case.name}: {call.text} after no step, but should not: nor would the next job get further"


@clause("J10")
def test_a_successor_is_given_the_choices_of_its_job(check, site, dry):
    """A successor keeps the variables of the table in a script's head, which the user set only for the first job."""
    for script in trains(site):
        for name, default, values in Script(script).variables:
            value = values[0] if values else str(int(default) // 2 or 1)
            shape: dict = dict(code=75, nodes=3, spare=True)
            run = dry.job(script, environ={name: value}, **shape)
            for call in run.successors:
                exported = handed_on(shlex.join(call.words))
                if exported.get(name) != value:
                    yield f"{script.name} with {name}={value}: {call.text}, but should hand that on"
                again = dry.job(script, environ=exported, **shape)
                if launched(again) != launched(run):
                    observed = f"{launched(again)} in its successor, but should be {launched(run)}"
                    yield f"{script.name} with {name}={value}: {observed}"


def launched(run: DryRun) -> str:
    """Return how many ranks a run has in all, and on a node."""
    if not run.trained:
        return "no ranks"
    place = run.trained[0].environ
    return f"{place['DRY_RUN_RANKS']} ranks, {place['DRY_RUN_PER_NODE']} a node"


@clause("J10")
def test_a_successor_tolerates_the_nodes_that_its_job_did(check, site, dry):
    """Without qsub -W tolerate_node_failures=all, PBS ends a job that has lost a node, despite spare nodes.

    Asked only where the site's files name the option: not every PBS has it.
    """
    option = "tolerate_node_failures=all"
    named = any("tolerate_node_failures" in text for text in (site.readme, *(path.read_text() for path in site.scripts)))
    for script in trains(site) if named and site.toml["scheduler"] == "pbs" else ():
        for call in [call for call in dry.job(script, code=75, options=dict(W=option)).new_starts if call.command == "qsub"]:
            if option not in call.words:
                yield f"{script.name} with -W {option}: {call.text}, but should have it, too"


@clause("B8")
def test_a_time_limit_may_be_days(check, site, dry):
    for script in trains(site) if site.toml["scheduler"] == "pbs" else ():
        run = dry.job(script, walltime="36:00:00")
        yield from dry.failed(run, f"{script.name} with a walltime of 36:00:00")


@clause("J10")
def test_the_ranks_hear_in_time(check, site, dry):
    """A warning to all processes of the ranks ends none. Where the scheduler sends no warning, the job script does.

    Ranks that are lost while they save are not launched again: new ones would have no time for a step.
    """
    for case in site.cases:
        for event, what in warnings_of(site).items():
            run = dry.case(case, code=75, event=event)
            refused = event == "limit" and run.code == 3 and not run.trained
            if run.code != 75 and not refused:
                yield f"{case.name}, {what}: {dry.ending(run)}, but should be 75"
            if len(lost := dry.case(case, code=137, event=event).launches) > 1:
                yield f"{case.name}, {what}: {len(lost)} launches, but should be 1"
            left = sorted({*run.made} - {*dry.case(case, code=75).made})
            yield from (f"{case.name}, {what}: {name} is left, but should not: it would stop another start" for name in left)


@clause("J10")
def test_ranks_that_are_asked_where_they_are_train_on(check, site, dry):
    """scancel --signal=USR2 JOB signals their torchrun, too."""
    for case in site.cases if site.toml["scheduler"] == "slurm" else ():
        if (run := dry.case(case, event="asked")).code:
            yield f"{case.name}, USR2 to all ranks: {dry.ending(run)}, but should be 0"


@clause("J10")
def test_a_job_is_stopped_by_its_own_number_alone(check, site, dry):
    """A successor, too: users see only its number. Of two jobs in one folder one is stopped, and the other trains on."""
    for script in trains(site) if "stop" in warnings_of(site) else ():
        for call in dry.job(script, code=75).successors[:1]:
            run = dry.job(script, code=75, event="stop", number=OTHER, environ=handed_on(shlex.join(call.words)))
            if run.code != 75:
                yield f"{script.name}, a successor, by its own number: {dry.ending(run)}, but should be 75"
        yield from dry.failed(dry.job(script, event="another's stop"), f"{script.name}, where another job is stopped")


@clause("J10")
def test_a_node_that_is_lost_later_is_left_out_of_the_next_launch(check, site, dry):
    """This needs spare nodes: with the lost node, each launch would fail like the last one."""
    for case in site.cases:
        if (run := dry.case(case, code=7)).shape.get("spare") and len(run.launches) > 1:
            hosts = [call.notes.get("hosts", []) for call in dry.case(case, code=7, spare="later").launches]
            lost = dry.hosts(case.nodes + 1)[0]
            if lost in hosts[-1]:
                yield f"{case.name}: launched on {lost} again, but should be where a node is spare: it is down"


@clause("J10")
def test_a_scheduler_that_does_not_tell_which_nodes_are_down_ends_no_job(check, site, dry):
    for case in site.cases:
        for fails, call in dry.case(case).steps:
            if call.command in ("pbsnodes", "sinfo"):
                run = dry.case(case, fails=fails, spare=False)
                yield from dry.failed(run, f"{case.name}, where {call.text} fails")


def warnings_of(site) -> dict[str, str]:
    """Return how a job of this site may be stopped in time, as event and description."""
    if site.toml["scheduler"] == "slurm":
        return {"warning": "USR1 to all ranks"}
    return {"stop": site.toml["stop"], "limit": "60 s before its time limit"}


@clause("J8")
def test_train_py_knows_the_seconds_that_a_stop_leaves(check, site, dry):
    """--grace is --signal's number under Slurm. With another one, slow saves are noted too late, or without need."""
    for case in site.cases:
        signalled = Script(site.folder / case.script).options.get("signal", "")
        should = [signalled.partition("@")[2] or "60"] if signalled else []
        grace = sorted({value for call in dry.case(case).trained for value in values_of(call.arguments, "--grace")})
        if grace != should and (should or len(grace) != 1):
            wanted = " ".join(should) or "one number"
            yield f"{case.name}: --grace {' '.join(grace) or 'is not there'}, but should be {wanted}"


@clause("J8")
def test_a_stop_leaves_time_to_train(check, site, dry):
    """Under PBS the script counts the seconds before its limit: if they are all of it, no start would train."""
    for script in trains(site) if site.toml["scheduler"] == "pbs" else ():
        walltime = re.search(r"(?m)^#PBS .*\bwalltime=([\d:]+)", script.read_text())
        for grace in [value for call in dry.job(script).trained[:1] for value in values_of(call.arguments, "--grace")]:
            if walltime and minutes(walltime[1]) * 60 < 2 * float(grace) + START_SECONDS:
                yield f"{script.name}: --grace {grace} of walltime={walltime[1]}, but should leave half of the time to train"


@clause("F10")
def test_the_readme_has_the_seconds_that_a_stop_leaves(check, site, dry):
    """They are --grace: "120 to 180 s before" the limit under Slurm, which may send the signal 60 s early."""
    told = re.findall(r"USR1 [^.]*?\b(\d+)(?: to \d+)? s(?:econds)? before", site.readme)
    for script in trains(site) if told else ():
        for grace in [value for call in dry.job(script).trained[:1] for value in values_of(call.arguments, "--grace")]:
            if grace not in told:
                yield f"README.md: {' and '.join(told)} s before the limit, but should be {grace}: --grace of {script.name}"


@clause("J10")
def test_a_warning_while_python_starts_ends_no_rank(check, site, dry):
    """A shell that starts a rank's Python ignores both signals, and Python inherits that until train.py handles them."""
    for case in site.cases:
        run = dry.case(case)
        words = [word for call in run.launches for word in call.words]
        shell = next((word for word in words if word == "bash" or word.endswith(".sh")), "")
        if shell and not all(ignores(call, signal.SIGUSR1) for call in run.trained):
            yield f"{case.name}: {shell} starts Python, which USR1 then ends, but should have `trap '' USR1`"
        if shell and not all(ignores(call, signal.SIGTERM) for call in run.trained):
            problem = "TERM, which comes when another rank has failed, then ends, and 143 hides why"
            yield f"{case.name}: {shell} starts Python, which {problem}, but should have `trap '' TERM`"
        if run.called("torchrun") and not all(ignores(call, signal.SIGTERM) for call in run.trained):
            problem = "torchrun's TERM ends a rank while Python starts, and 143 hides why another one has failed"
            yield f"{case.name}: {problem}, but should be ignored: trap '' TERM"
        signalled = "signal" in Script(site.folder / case.script).options
        if run.called("torchrun") and signalled and not all(ignores(call, signal.SIGUSR1) for call in run.trained):
            yield f"{case.name}: USR1 ends a rank that torchrun has just started, but should be ignored there"


def ignores(call: Call, number: int) -> bool:
    return bool(call.notes.get("ignored", 0) >> (number - 1) & 1)


@clause("J15")
def test_a_cancelled_job_stays_cancelled(check, site, dry):
    for case in site.cases:
        run = dry.case(case, code=75, event="cancelled")
        starts = [call for call in run.new_starts if "Incomplete" not in call.words]
        yield from (f"{case.name}: {call.text} of a cancelled job, but should be `requeue Incomplete`" for call in starts)
        if run.code not in (75, -15):
            yield f"{case.name}, cancelled: {dry.ending(run)}, but should be 75, as its ranks end"
        launches = len(dry.case(case, code=7, event="pause").launches) if len(dry.case(case, code=7).launches) > 1 else 1
        if launches > 1:
            yield f"{case.name}, cancelled before it launches ranks again: {launches} launches, but should be 1"
    for script in trains(site):
        for call in dry.job(script, code=75).new_starts:
            if call.command == "scontrol" and "Incomplete" not in call.words:
                yield f"{script.name}: {call.text}, but should be `requeue Incomplete`: a cancelled job would come back"


# ---- what a user may get wrong, and what a user is shown -----------------------------------------------------------------


@clause("B11")
def test_a_choice_that_is_none_is_refused(check, site, dry):
    for case in site.cases:
        environ = case.environment | handed_on(case.options)
        edits = {old: re.sub(r"=.*", f"={NONSENSE}", new) for old, new in case.edit.items() if re.match(r"\w+=", new)}
        shapes = [dict(environ={name: NONSENSE}) for name in environ] + [dict(edit={old: new}) for old, new in edits.items()]
        for shape in shapes:
            run = dry.job(site.folder / case.script, **shape)
            yield from dry.refused(run, f"{case.script} with {NONSENSE} for {case.name}", NONSENSE)
    text = "\n".join(script.read_text() for script in site.scripts)
    for _, line in shown(site):  # also submissions that choose no other launch
        words = shlex.split(line)
        for name, value in (word.split("=", 1) for word in words if re.match(r"[A-Z_]+=(?!yes$)[a-z ]+$", word)):
            script = next((script for script in site.job_scripts if script.name in words), None)
            if script and re.search(rf"\$\{{?{name}\b", text):
                run = dry.job(script, environ={name: NONSENSE})
                yield from dry.refused(run, f"{script.name} with {name}={NONSENSE} for {value}", NONSENSE)


# Variables that only the scheduler, libraries and Python need to read.
OF_OTHERS = re.compile(r"(SBATCH|NCCL|CCL|FI|HF|WANDB|OMP|TORCH|PYTORCH|CUDA|HIP|MIOPEN|TRANSFORMERS|TOKENIZERS|PYTHON)_?")


@clause("B11")
def test_each_variable_that_users_are_shown_changes_something(check, site, dry):
    """Users see variables before a submission and in [[job.choices]]. A script also reads those behind README.md's qsub -v."""
    of_choices = [(site.folder / case.script, case.environment | handed_on(case.options)) for case in site.cases]
    for script in trains(site):
        pairs = dict.fromkeys(tuple(environ.items()) for where, environ in [*chosen(site), *of_choices] if where == script)
        ours = [dict(each) for each in pairs if not all(OF_OTHERS.match(name) for name, _ in each)]
        first = dry.job(script, nodes=2).trained[:1]
        # A variable that a module sets to this value has it anyway.
        variables = [environ for environ in ours if not any(environ.items() <= call.environ.items() for call in first)]
        yield from (f"{script.name}: {choice} changes nothing, but should" for choice in dry.without_effect(script, variables))
    texts = {path.name: path.read_text() for path in (site.folder / "README.md", *site.scripts)}
    code = "\n".join(line.text for path in site.scripts for line in Script(path).lines if not line.is_comment)
    unless = re.findall(r"unless you (?:export|set) `([A-Z]\w+)=([^`\"']+)`(?! in `)", " ".join(texts["README.md"].split()))
    for (name, value), script in product(unless, trains(site)):
        for call in dry.job(script, environ={name: value}).trained[:1]:
            if (own := call.environ.get(name)) != value:
                yield f"{script.name} with {name}={value}: a rank has {own}, but should have what README.md says users export"
    for name, text in texts.items():
        lists = re.findall(r"(?<=[ `])-v ([A-Z]\w*=[^`\n]*)|`((?:[A-Z_]+=\S+ )+)\./", text)
        variables = {each for words in lists for each in re.findall(r"(?<![\w$\"-])([A-Z][A-Z_]+)=", " ".join(words))}
        ours = sorted(each for each in variables if not OF_OTHERS.match(each))
        lost = [each for each in ours if not re.search(rf"\$\{{?!?{each}\b|[\"']{each}[\"']", code)]
        yield from (f"{name}: {each}=, which no script reads, but should" for each in lost)


@clause("B11")
def test_a_choice_that_is_empty_changes_something_when_it_is_filled_in(check, site, dry):
    """An empty line below `# EDIT:` stays so in every other run: a line that reads it may do nothing."""
    install = (site.folder / "install.sh").read_text()
    for script in trains(site):
        ways: list[dict[str, Any]] = [dict(nodes=2)]
        others = [environ for path, environ in chosen(site) if path == script] + Script(script).alternatives
        ways += [dict(nodes=2, environ=environ) for environ in others]  # it may act under another choice alone
        if any(re.search(rf"{re.escape(script.name)} install\b", line) for _, line in shown(site)):
            ways.append(dict(nodes=1, arguments=["install"]))
        for line in [line for line in Script(script).lines if line.is_to_edit]:
            match = re.fullmatch(r"(\w+=)(\(\)|''|\"\")?(?:\s+#.*)?", line.text)
            if match and match[1] not in install:  # that would find it in the script that lies here, not in the edited copy
                examples = re.findall(r"\"([\w./:+-]+)\"|`([\w./:+-]+)`", " ".join(line.paragraph))
                values = dict.fromkeys([*("".join(each) for each in examples), "1", "yes"])
                filled = [match[1] + (f"({value})" if match[2] == "()" else value) for value in values]
                if not any(dry.changes(script, way, edit={line.text: each}) for way, each in product(ways, filled)):
                    yield f"{script.name}:{line.number}: {filled[-1]} changes nothing, but should"


@clause("B11")
def test_another_number_of_ranks_is_started_or_refused(check, site, dry):
    """sbatch --ntasks=3 on two nodes does not fix the ranks per node: it starts three connected ranks, or ends with 3."""
    for script in trains(site) if site.toml["launcher"] == "srun" else []:
        run = dry.job(script, ntasks=3, nodes=2, all_ranks=True)
        ranks = {call.environ["DRY_RUN_RANKS"] for call in run.trained}
        should = {3, 2 * site.job(script)["ranks_per_node"]} if run.called("torchrun") else {3}  # torchrun's are no tasks
        if not (run.code == 0 and len(run.trained) in should and ranks == {str(len(run.trained))}):
            yield from dry.refused(run, f"{script.name} with --ntasks=3")


@clause("J9")
def test_a_node_has_as_many_ranks_as_its_user_asks_for(check, site, dry):
    """This also holds for torchrun, which could count the node's devices; or the job refuses the number."""
    for case in site.cases if site.toml["launcher"] == "srun" else []:
        run = dry.case(case, nodes=2, options={"ntasks-per-node": "2"})
        ranks = {call.environ["DRY_RUN_PER_NODE"] for call in run.trained}
        if ranks != {"2"} and not (run.code == 3 and not ranks):
            yield f"{case.name} with --ntasks-per-node=2: {' '.join(ranks) or 'no'} ranks on a node, but should be 2"


@clause("B11")
def test_devices_may_be_asked_for_by_their_type(check, site, dry):
    """Users may submit with --gpus-per-node=a100:4, where a machine has several types."""
    for script in trains(site):
        if (devices := Script(script).options.get("gpus-per-node", "")).isdecimal():
            run = dry.job(script, options={"gpus-per-node": f"a100:{devices}"})
            yield from dry.failed(run, f"{script.name} with --gpus-per-node=a100:{devices}")


@clause("B11")
def test_cores_are_bound_by_number_on_whole_nodes_alone(check, site, dry):
    for script in trains(site) if site.toml["scheduler"] == "slurm" else []:
        run = dry.job(script, all_ranks=True)
        if any(re.match(r"(mask|map)", binding) for call in run.launches for binding in values_of(call.words, "--cpu-bind")):
            queue = site.toml.get("queue", {})
            some_share = {*queue.get("partitions", [])} - {*queue.get("exclusive", ())}
            if "exclusive" not in queue or some_share:
                shared = dry.job(script, shared=True)
                yield from dry.refused(shared, f"{script.name} on shared nodes (scontrol show job: OverSubscribe=OK)")
            if "exclusive" in queue and some_share and "exclusive" not in Script(script).options:
                shared_ones = " and ".join(sorted(some_share))
                yield f"{script.name}: no directive exclusive, but should be one: {shared_ones} give parts of nodes, too"
            if "oversubscribe" in Script(script).options:
                yield f"{script.name}: --oversubscribe, but should have whole nodes: ranks are bound by numbers"


# libfabric's providers of no fast network, and those that run on top of another provider.
# https://ofiwg.github.io/libfabric/main/man/fabric.7.html
SLOW, UPON = {"tcp", "sockets", "udp", "shm", "net"}, {"ofi_rxm", "ofi_rxd"}
# Variables that choose and set up a library's network.
NETWORK = re.compile(r"^(NCCL|FI|CCL|PALS)_|_(NET|NET_PLUGIN|IFNAME|PROVIDER|HCA)$")


@clause("J13")
def test_ranks_of_several_nodes_never_go_over_tcp_in_silence(check, site, dry):
    """If the module that brings RCCL's or NCCL's network no longer does, the job ends, or NCCL_NET makes the library end."""
    of_a_module = any(word.startswith("NCCL_NET=") for word in site.provides)
    named = of_a_module or any(re.match(r'export NCCL_NET=(?!"?Socket)', fact) for fact in site.facts)
    for script in trains(site):
        for environ in (
            ({}, dict(NCCL_NET="Socket")) if of_a_module else ()
        ):  # left in the user's environment by another machine
            run = dry.job(script, modules_set=False, environ=environ, nodes=max(2, site.job(script)["nodes"]))
            if run.trained and run.trained[0].environ.get("NCCL_NET", "Socket") == "Socket":
                subject = f"{script.name} without NCCL_NET of its module{' and with a Socket of the user' if environ else ''}"
                yield f"{subject}: {dry.ending(run)}, but should be 3"
        run = dry.job(script, nodes=2, fails="library")
        if run.trained and run.trained[0].environ.get("NCCL_NET") == "Socket":
            yield f"{script.name}, whose network plugin does not load: {dry.ending(run)}, but should be 3"
    for case in site.cases:
        own = 2 if case.install is not None else case.nodes
        if own > case.nodes and (run := dry.case(case, nodes=own)).code:
            yield f"{case.name} on {own} nodes: {dry.ending(run)}, but should be 0"
        many = (MANY_NODES, site.most_nodes) if case.name == case.script else ()
        launched = [(nodes, call) for nodes in (own, *many) for call in dry.case(case, nodes=nodes).trained[:1]]
        for nodes, call in [(nodes, call) for nodes, call in launched if nodes > 1]:
            if (call.environ.get("NCCL_NET") or ("Socket" if named else "")) == "Socket":
                net = call.environ.get("NCCL_NET") or "unset"
                yield f"{case.name}: NCCL_NET={net} on {nodes} nodes, but should be the fast network's"
            provider = call.environ.get("FI_PROVIDER", "")
            asked = any(re.search(rf"\bFI_PROVIDER=[\"']?{re.escape(provider)}(?!\w)", fact) for fact in site.facts)
            named_ones = {*re.split("[,;]", provider.lower())} - UPON
            if named_ones and named_ones <= SLOW and not asked:
                yield f"{case.name}: FI_PROVIDER={provider} on {nodes} nodes, but should be unset, or the fast network's"


@clause("J13")
def test_what_modules_set_is_there_where_ranks_start(check, site, dry):
    """A list that a script replaces, such as a container's library path, loses the network's libraries."""
    # Two nodes at least: on one node a script may switch the network off.
    runs = {script.name: dry.job(script, nodes=max(2, site.job(script)["nodes"])) for script in trains(site)}
    runs |= {case.name: dry.case(case, nodes=max(2, case.nodes)) for case in site.cases}
    for (what, run), module in product(runs.items(), site.modules):
        loaded = any(module in call.words for call in run.called("module-call"))
        for call, (name, value) in product(run.launches if loaded else (), dry.set_by(module).items()):
            if value not in call.environ.get(name, ""):
                observed = f"{what}: {name}={call.environ.get(name, 'unset')} where ranks start"
                yield f"{dry.shown(observed)}, but should have {value}, by the module {module}"


@clause("J13")
def test_every_software_is_told_of_the_same_network(check, site, dry):
    """Settings of the network for a module's software are also set for an image's."""
    for case in [case for case in site.cases if case.install is not None]:
        both = dry.job(site.folder / case.script, nodes=2), dry.case(case, nodes=2)
        usual, own = ({name for call in run.trained[:1] for name in call.environ} for run in both)
        lost = [name for name in sorted(usual - own) if NETWORK.search(name)] if own else []
        yield from (f"{case.name}: no {name}, but should be as without it" for name in lost)


@clause("J13")
def test_the_network_is_one_of_the_nodes_and_not_of_the_ranks(check, site, dry):
    """A job of one rank a node has the same network settings as a full one, on one node, on two and on many."""
    launcher_variables = {name for name, _ in site.launches[0].templates}
    of_ranks = re.search(r"-v (\w+)=\{ranks\}", site.toml["job"].get("geometry", ""))
    for script, nodes in product(trains(site), (1, 2, MANY_NODES)):
        one_each: dict[str, Any] = dict(options={"ntasks-per-node": "1"}, ntasks=nodes)
        if site.toml["scheduler"] != "slurm":
            one_each = dict(environ={of_ranks[1]: "1"}) if of_ranks else {}
        all_ranks, one = (
            {name: value for call in run.trained[:1] for name, value in call.environ.items() if NETWORK.search(name)}
            for run in (dry.job(script, nodes=nodes), dry.job(script, nodes=nodes, **one_each))
        )
        differ = {name for name in {*all_ranks, *one} - launcher_variables if all_ranks.get(name) != one.get(name)}
        for name in sorted(differ) if all_ranks and one else ():
            what = f"{script.name} with one rank on each of {nodes} nodes: {name}={one.get(name, 'unset')}"
            yield f"{what}, but should be {all_ranks.get(name, 'unset')}, as with all ranks"


@clause("J13")
def test_what_another_machine_has_left_does_not_choose_the_network(check, site, dry):
    """The job overrules what the user's shell has exported, such as NCCL_NET=Socket from a test on one node."""
    for script in trains(site):
        own = [name for call in dry.job(script, nodes=2).trained[:1] for name in call.environ if name in LEFT]
        for nodes in (1, 2):
            usual, run = (dry.job(script, nodes=nodes, environ=environ) for environ in ({}, {name: LEFT[name] for name in own}))
            for call, other in zip(run.trained[:1], usual.trained[:1], strict=False):
                kept = [name for name in own if call.environ.get(name) == LEFT[name] != other.environ.get(name)]
                yield from (
                    f"{script.name}: {name}={LEFT[name]} of the user's shell, but should be as the job says" for name in kept
                )


# Variables of a shell within another job, which sbatch copies and srun reads.
OF_A_JOB_S_SHELL = dict(SLURM_CPU_BIND="quiet,mask_cpu:0x1", SLURM_CPU_BIND_TYPE="mask_cpu:", SLURM_CPU_BIND_LIST="0x1")
OF_A_JOB_S_SHELL |= dict(SLURM_MEM_PER_CPU="100", SLURM_MEM_PER_NODE="100")
# Variables of `salloc --gpus=1` and similar commands: for several nodes they would mean one GPU in all.
OF_A_JOB_S_SHELL |= dict(SLURM_GPUS="1", SLURM_GPUS_PER_NODE="1", SLURM_GPUS_PER_TASK="1", SLURM_GPUS_PER_SOCKET="1")
OF_A_JOB_S_SHELL |= dict(SLURM_GPU_BIND="single:9", SLURM_NTASKS_PER_GPU="9", SLURM_CPUS_PER_GPU="1")


@clause("J9")
def test_ranks_are_bound_by_their_own_job(check, site, dry):
    """Another job's mask would bind the ranks. srun refuses another job's memory beside this job's own flags."""
    for case in site.cases if site.toml["launcher"] == "srun" else ():
        asked = {*Script(site.folder / case.script).options, *words_of(case.options)}  # sbatch sets these to the job's own
        asked |= {"gpus"} if "G" in asked else set()
        left = {name: value for name, value in OF_A_JOB_S_SHELL.items() if option_of(name) not in asked}
        if not site.toml["node"]["devices"]:
            left = {name: value for name, value in left.items() if "GPU" not in name}
        for call in dry.case(case, environ=left).launches:
            said = {word.partition("=")[0].removeprefix("--") for word in call.words}  # flags overrule variables
            said |= {"gpus"} if any(word.startswith("-G") for word in call.words) else set()
            kept = [name for name, value in left.items() if call.environ.get(name) == value and option_of(name) not in said]
            if kept:
                yield f"{case.name}: {call.command} with another job's {', '.join(kept)}, but should be without"


def option_of(variable: str) -> str:
    """Return the option that an srun variable stands for, such as gpus-per-task."""
    return variable.removeprefix("SLURM_").lower().replace("_", "-")


@clause("J10")
def test_the_readme_tells_how_to_stop(check, site):
    """A command there, or in a script's head, that begins like site.toml's is that one: job scripts react to no other."""
    own = site.toml["stop"]
    if re.search(r"scancel .*(--batch\b|-\w*b)", own):
        deaf = [path.name for path in trains(site) if not re.search(r"\btrap\b.*USR1", path.read_text())]
        yield from (f"`{own}` signals the shell of {name} alone, but should signal the ranks: it has no trap" for name in deaf)
    pattern = re.sub(r"\\\{\w+\\\}", r"[A-Z]+", re.escape(own))
    text = (site.folder / "README.md").read_text()
    text = re.sub(r"`[^`\n]*USR2\b[^`\n]*`", "", text)  # asks where the ranks are, and stops nothing
    spans = re.findall(rf"`({re.escape(own.split()[0])} [^`\n]+)`", text)
    if spans and not any(re.fullmatch(pattern, span) for span in spans):
        yield f"README.md: {spans}, but should name `{own}`"
    signals = re.findall(r"`((?:scancel|qsig|kill|pkill) [^`\n]*(?:--signal|-s )[^`\n]*)`", text)
    told = [("README.md", span) for span in signals]
    for path in site.scripts:
        lines = re.findall(r"(?m)^#   (\S.*?)(?: {2,}.*)?$", path.read_text())
        told += [(path.name, line) for line in lines if signals_a_job(line, own) and "USR2" not in line]
    yield from (f"{place}: {command}, but should be `{own}`" for place, command in told if not re.fullmatch(pattern, command))


def signals_a_job(line: str, own: str) -> bool:
    """Return whether a line of a script's head shows how to stop a job so that it saves; `scancel JOB` shows how to end it."""
    word, _, rest = line.partition(" ")
    named = re.search(r"(^|\s)(--signal|-s\b|-(SIG)?(USR1|TERM|INT)\b)", rest)
    return bool(named) if word in ("scancel", "qsig", "kill", "pkill") else word == own.partition(" ")[0]


@clause("B10")
def test_what_users_are_shown_works(check, site, dry):
    """This covers each submission and installation in the head of a script, and in README.md's blocks and sentences."""
    for where_it_stands, line in shown(site):
        if redirection := re.search(r"[<>]=?\S*", re.sub(r"'[^']*'|\"[^\"]*\"", "", line)):
            yield f"{where_it_stands}: {line!r}: a shell takes {redirection[0]} for a redirection, but should find it in quotes"
        elif isinstance(run := followed(dry, line), str):
            yield f"{where_it_stands}: {line!r}: {run}"
        elif run.code or "still running" in run.output:
            yield f"{where_it_stands}: {line!r}: {dry.ending(run)}, but should be 0"
        elif lost := [flag for call in run.trained[:1] for flag in no_flags(site, call.arguments)]:
            yield f"{where_it_stands}: {line!r}: train.py is given {' '.join(lost)}, but should be given flags that there are"
        elif run.trained and (devices := run.shape.get("options", {}).get("gpus-per-node", "").rpartition(":")[2]):
            ranks = run.trained[0].environ["DRY_RUN_PER_NODE"]
            if int(ranks) > int(devices):
                yield f"{where_it_stands}: {line!r}: {ranks} ranks on {devices} devices, but should have one each"
    for command in re.findall(r"`((?:python3?|torchrun|accelerate) [^`]*\btrain\w*\.py[^`]*)`", site.readme):
        yield f"README.md: {command!r}: that Python has no ddp_core, but should be the one that install.sh makes"


@clause("B10")
def test_a_start_in_an_interactive_job_works_and_works_again(check, site, dry):
    """`./job.pbs --epochs 3`, where it is shown, also trains a second time: the job has one number for all its starts.

    In README.md `./job.pbs` alone may be the file's name.
    """
    for script in trains(site):
        started = rf"(?:[A-Z_]+=\S+ )*\./{re.escape(script.name)}\b[^`\n]*"
        head = re.findall(rf"(?m)^#   ({started}?)(?: {{2,}}.*)?$", script.read_text())
        spans = [span for span in re.findall(rf"`({started})`", site.readme) if " " in span.strip()]
        for line in dict.fromkeys([*head, *spans]):
            runs = [dry.command(script, line) for _ in range(2)]
            new = [values_of(call.arguments, "--new-run-dir") for run in runs for call in run.trained[:1]]
            if runs[0].code or not new:
                yield f"{line!r} in an interactive job: {dry.ending(runs[0])}, but should be 0"
            elif new[0] and new[0] == new[-1]:
                yield f"{line!r}: --new-run-dir {new[0][0]}, but should be --run-dir: a second start in this job is refused"


def no_flags(site, words: list[str]) -> list[str]:
    """Return the words that look like a flag but are no flag of the core or of a program of the site."""
    if any(word.endswith(".py") for word in words):
        return []  # a workload file may define its own flags
    flags = flags_in(ROOT / "core/src", "**/*.py") | flags_in(site.folder, "train*.py")
    own = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    return [flag for flag in own if flag not in flags and f"--{flag.removeprefix('--no-')}" not in flags]


@clause("B10")
def test_by_hand_in_a_step_it_trains_alone(check, site, tmp_path):
    """The shell of `srun --pty` has Slurm's variables for one task, or SLURM_NTASKS of many, and no address of rank 0."""
    text = site.readme
    told = [launch.environ(0, 1, 1, 29500, FIRST) for launch in site.launches if launch.launcher == "srun"]
    told = [each | tasks for each in told for tasks in ({}, {"SLURM_NTASKS": "4"})]
    for variables, line in product(told, re.findall(r"`srun [^`]*--pty\b[^`]*`[^.]*?`([^`]*/python3? train\.py[^`]*)`", text)):
        unset = re.findall(r"(?:-u |--unset=)(\w+)", line)
        environ = {name: value for name, value in variables.items() if name.startswith("SLURM_") and name not in unset}
        environ |= dict(re.findall(r"(?<!\S)([A-Z]\w*)=(\S+)", line))
        if refused := who(site, environ, tmp_path).get("refused"):
            yield f"README.md: {line!r} in a step of one task: {refused}, but should train"


@clause("B10")
def test_packages_that_users_are_shown_go_with_torch(check, site, dry):
    """Where one fact has both versions, install.sh pins one of them, and pip refuses any other version of the second."""
    asked = [("install.sh", word) for _, words in dry.install().pips() for word in words]
    pin, code = re.compile(r"([\w.-]+)==([\w.+]+)"), "\n".join(path.read_text() for path in site.scripts)
    of_facts = [dict(pin.findall(fact)) for fact in site.facts]
    known = [each for pins in of_facts for each in pins.items()]
    asked = [(place, word) for place, word in asked if not {*pin.findall(word.partition("+")[0])} & {*known}]
    for pins in of_facts:
        together = len(pins) > 1 and any(re.search(rf"{re.escape(f'{name}=={pins[name]}')}(?![\w.])", code) for name in pins)
        lines = [each for each in shown(site) if "--torch" not in each[1]] if together else []
        for place, line in lines + (asked if len(pins) > 1 else []):
            for name, version in pin.findall(line):
                if version != pins.get(name, version):
                    yield f"{place}: {name}=={version}, but should be {pins[name]}, as a fact of [[sources]] says"


A_TIME = re.compile(r"\d+\.\d+|\d+(:\d\d)+|\d+(\.\d+)? ?(h|hrs?|hours?)\.?")  # a table cell that is only a time


@clause("B8")
def test_jobs_have_as_many_nodes_as_their_queue_takes(check, site):
    """This holds for each script, and for each submission shown. The numbers are from a fact `| queue | least | most |`."""
    bounds, cores, submitted = site.nodes_of_queues, site.toml["node"]["cores"], []
    for script in site.job_scripts:
        submitted.append((script.name, script, ""))
        submitted += [(place, script, line) for place, line in shown(site) if f" {script.name}" in line]
    for place, path, line in submitted:
        script, given = Script(path), words_of(line.partition(f" {path.name}")[0])
        queues = [(given.get(name) or script.options.get(name, "")) for name in ("partition", "p", "q")]
        nodes = nodes_asked(line, cores) or script.nodes(cores) or 1
        for queue in [queue for queue in queues if queue in bounds]:
            least, most = bounds[queue]
            if nodes < least or (most and nodes > most):
                yield f"{place}: {line or 'as it stands'}: {nodes} nodes, but should be {least} to {most or 'more'} in {queue}"
    for path in (site.folder / "README.md", *site.scripts):  # such as "capacity (1-16 nodes" and "6 h to 183" nodes
        text = " ".join(re.sub(r"(?m)^ *#+ ", "", path.read_text()).split())
        for queue, least, most in re.findall(r"(?<![\w-])([\w-]+)`? \(([\d,]+)-([\d,]+) nodes\b", text):
            told = tuple(int(number.replace(",", "")) for number in (least, most))
            if None not in (should := bounds.get(queue, (None,))) and told != should:
                yield f"{path.name}: {queue} ({least}-{most} nodes), but should be {'-'.join(map(str, should))}, as a fact says"
        sentences = [part for part in re.split(r"(?<=[.;]) ", text) if "nodes" in part]
        for hours, most in re.findall(r"\b(\d+) h (?:for 1 )?to ([\d,]+)\b(?! h)", " ".join(sentences)):
            rows = [fact for fact in site.facts if re.search(rf"\|\s*{most}\s*\|", fact)]
            times = [cell.strip() for row in rows for cell in row.split("|") if A_TIME.fullmatch(cell.strip())]
            if times and not any(re.fullmatch(rf"0?{hours}(\.0*|(:00)+)?( ?h.*)?", each) for each in times):
                yield f"{path.name}: {hours} h to {most} nodes, but should be {' or '.join(times)}, as a fact says"
    for script in map(Script, site.job_scripts):  # [queue] has one time, of the jobs with fewest nodes
        queue = script.options.get("partition", script.options.get("q", ""))
        own = site.toml.get("queue", {}).get("minutes", {}).get(queue)
        limits = [" ".join(line.paragraph) for line, text in script.directives if re.search(r"--time=|walltime=", text)]
        for hours, most in re.findall(r"\b(\d+) h for 1 to ([\d,]+) nodes\b", " ".join(limits)):
            if own and own != (should := int(hours) * 60):
                yield f"queue.minutes: {queue}={own}, but should be {should}: {script.path.name} has {hours} h to {most} nodes"


@clause("B10")
def test_a_line_that_users_may_delete_is_not_needed(check, site, dry):
    """A comment or README.md may allow this, for nodes without GPUs or a cluster without accounts."""
    deletable = re.findall(r"delete the line `--([a-z-]+)`", site.readme)
    for case in {case.script: case for case in reversed(site.cases)}.values():  # each script's first case
        for line, option in Script(site.folder / case.script).directives:
            name = option.partition("=")[0].removeprefix("--")
            if name in deletable or "delete the line" in " ".join(line.paragraph):
                run = dry.case(replace(case, name=f"without --{name}", edit=case.edit | {line.text: ""}))
                yield from dry.failed(run, f"{case.script} without --{name}")


@clause("B6")
def test_each_process_of_each_node_has_a_log_of_its_own(check, site, dry):
    """NCCL's log: process numbers repeat across nodes. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"""
    for script, environ in chosen(site):
        for call in dry.job(script, nodes=2, environ=environ).trained[:1]:
            path = dry.shown(call.environ.get("NCCL_DEBUG_FILE", "%h-%p"))
            if "%p" not in path or not ("%h" in path or re.match(r"/(tmp|dev/shm)/", path)):
                yield f"{script.name} with {environ}: NCCL_DEBUG_FILE={path}, but should have %h and %p in it"


@clause("B10")
def test_a_run_is_one_run_of_wandb(check, site, dry):
    """Online, a requeued job continues its W&B run, and a run of the same name in another folder has another W&B run."""
    for script, environ in [each for each in chosen(site) if "wandb" in " ".join(each[1].values())]:
        shapes: dict = dict(first=("a", {}), again=("a", dict(restarts=1, code=75)), other=("b", {}))
        online = environ | dict(WANDB_MODE="online")
        for name, (sweep, shape) in shapes.items():
            run = dry.job(script, environ=online, arguments=["--run-dir", f"runs/{sweep}/lr-1"], **shape)
            shapes[name] = sorted({*re.findall(r"(?m)^wandb run (.*)$", run.output)})
        if len(shapes["first"]) != 1 or shapes["first"] != shapes["again"] or shapes["first"] == shapes["other"]:
            template = f"{script.name}: W&B's run is {{first}}, {{again}} when it comes back, and {{other}} in another folder"
            yield f"{template.format(**shapes)}, but should be one, the same, and another"
        for path in [path for path in run.changed if path.startswith("home/") and "wandb" in path]:
            yield f"{script.name}: W&B leaves {dry.shown(str(dry.top / path))}, but should nothing in the home of all jobs"


@clause("B10")
def test_metrics_have_every_step(check, site, dry):
    """The first step, an evaluation at the same step as a loss, and the steps after a warning, which is for the ranks."""
    warned: dict[str, Any] = dict(code=75, event="warning")
    for (script, environ), shape in product(chosen(site), ({}, warned)):
        for kind in [name for name in ("wandb", "tensorboard") if name in " ".join(environ.values())]:
            run = dry.job(script, environ=environ, **shape)
            recorded = sorted({*re.findall(rf"(?m)^{kind} has (.*)$", run.output)})
            observed = f"{script.name}: of steps 0 and 1{' after a warning' if shape else ''} {kind} has {recorded}"
            if recorded != OF_STEPS:
                yield f"{observed}, but should have {OF_STEPS}"


# Step and value, as the stand-in for train.py writes them: losses, norms of gradients, and a held-out loss.
OF_STEPS = ["0 0.25", "0 0.5", "1 1.25", "1 1.5", "1 1.75"]


def chosen(site) -> list[tuple[Path, dict[str, str]]]:
    """Return the job script and its variables for each submission that users are shown."""
    submissions = []
    for _, line in shown(site):
        words = shlex.split(line)
        environ = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        submissions += [(script, environ) for script in site.job_scripts if script.name in words and environ]
    return submissions


@clause("B5")
def test_no_secret_is_printed(check, site, dry):
    """A user's tokens are in the environment: no log, no other file and no word of a command has them."""
    runs = [dry.install(), *(followed(dry, line) for _, line in shown(site))]
    runs += [dry.case(case, code=code) for case in site.cases for code in (0, 75)]
    runs += [dry.job(script, nodes=2, environ=environ) for script, environ in chosen(site)]
    for run in [run for run in runs if isinstance(run, DryRun)]:
        for line in [line for line in run.output.splitlines() if SECRET in line]:
            yield f"{run.script} shows {line[:60]!r}, but should show no value of the user's environment"
        for path in [path for path, kind in run.leaks if kind == "a user's"]:
            yield f"{run.script} writes a value of the user's environment into {path}, but should not"
        for call in [call for call in run.calls if any(SECRET in word for word in call.words)]:
            yield f"{run.script}: {call.command} gets a user's token as a word, but should find it in its environment"


@clause("B10")
def test_a_script_for_users_hands_their_arguments_on(check, site, dry):
    """This covers every other script whose head shows how to train with it, after each installation."""
    for (script, line), flags in product(dry.by_hand, [(), *dry.given()]):
        run = dry.command(script, line, *flags)
        words = [call.arguments[-len(ARGUMENTS) :] for call in run.trained]
        for call in run.trained[:1] if (cores := re.search(r"--cpus-per-task=(\d+)", line)) else ():
            threads = call.environ.get("OMP_NUM_THREADS", "unset")
            if not threads.isdecimal() or int(threads) > int(cores[1]):
                yield f"{script.name}: {line!r}: OMP_NUM_THREADS={threads}, but should be at most {cores[1]}"
        if run.code or words != [list(ARGUMENTS)]:
            observed = f"{dry.ending(run)}, train.py with {words or 'nothing'}"
            after = " ".join(["install.sh", *flags])
            yield f"{script.name}: {line!r} after {after}: {observed}, but should be 0 and {list(ARGUMENTS)}"


@clause("B10")
def test_an_installation_as_a_job_gets_its_arguments(check, site, dry):
    """`job.sl install --add PACKAGE`, where it is shown, passes each argument on unchanged."""
    for script in site.job_scripts:
        if any(re.search(rf"{re.escape(script.name)} install\b", line) for _, line in shown(site)):
            run = dry.job(script, nodes=1, arguments=["install", "--add", PACKAGES], all_ranks=True)
            calls = [call for call in run.calls if PACKAGES in call.words]
            pip = [call.words[-1] for call in calls]
            if run.code or not pip:
                observed = f"{script.name} install --add {PACKAGES!r}: {dry.ending(run)}, pip has {pip or 'not heard of it'}"
                yield f"{observed}, but should be given it as it is"
            ranks = max((int(call.environ.get("DRY_RUN_RANKS", "1")) for call in calls), default=1)
            if ranks > 1:
                yield f"{script.name} install: {ranks} of it in one prefix, side by side, but should be one"
            # All proxy variables that are empty in the script are set at once: there may be one for each protocol.
            edit = {line: line + PROXY for line in re.findall(r"(?m)^(?!no_)\w*proxy=$", script.read_text())}
            for call, _ in dry.job(script, nodes=1, arguments=["install"], edit=edit).pips()[:1] if edit else ():
                for name in ("http_proxy", "https_proxy"):
                    if PROXY not in (call.environ.get(name), call.environ.get(name.upper())):
                        yield f"{script.name} install with {' '.join(edit.values())}: pip has no {name} of it, but should"


PROXY = "http://proxy.example.org:3128"


def followed(dry, line: str) -> DryRun | str:
    """Return the dry run of a command that users are shown, or why it is invalid."""
    site, environ, words = dry.site, {}, shlex.split(line)
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, environ[name] = words.pop(0).partition("=")
    if words[0] == "./install.sh":
        return dry.install(*words[1:])
    scripts, slurm = {path.name for path in site.job_scripts}, site.toml["scheduler"] == "slurm"
    place = next((place for place, word in enumerate(words) if word in scripts), None)
    if place is None:
        return f"no script is submitted, but should be one of {', '.join(sorted(scripts))}"
    options = options_of(shlex.join(words[1:place]), slurm)
    if unknown := [name for name in options if name not in OPTIONS[words[0]].split()]:
        return f"{words[0]} has no option {', '.join(unknown)}"
    if words[place + 1 :] and not slurm:
        return "qsub hands no words to a script, but should be given them by -v"
    exported = handed_on(shlex.join(words[1:place]))
    # A placeholder (--nodes=N) keeps the script's value.
    values = ("nodes", "ntasks", "time", "account", "A", "P")
    opened = {name for name in values if re.fullmatch("[A-Z]+", options.get(name, ""))}
    options = {name: value for name, value in options.items() if name != "v" and name not in opened}
    nodes = nodes_asked(shlex.join(words[:place]), site.toml["node"]["cores"]) or site.job(site.folder / words[place])["nodes"]
    shape = dict(environ=environ | exported, options=options, nodes=nodes, arguments=words[place + 1 :])
    run = dry.job(site.folder / words[place], **shape)
    if environ and slurm and not run.code:
        # Programs beside the ranks use the ranks' run directory, whichever it is.
        flags = dict(arguments=[*words[place + 1 :], "--run-dir", "elsewhere"])
        elsewhere = dry.job(site.folder / words[place], **(shape | flags))
        for call in [call for call in elsewhere.called("python") if "runs/" in call.words[-1]]:
            return f"with --run-dir elsewhere {dry.shown(call.text)} is started, but should read elsewhere"
        # After a warning, what is chosen comes back, too, such as another launcher.
        run = dry.job(site.folder / words[place], code=75, event="warning", **shape)
        # If a program beside the ranks hangs, like a writer of metrics without network, the job does not wait long.
        run = run if run.code != 75 else dry.job(site.folder / words[place], fails="beside", **shape)
    return run


def shown(site) -> list[tuple[str, str]]:
    """Return commands that submit or install, with their file: in a script's head, and in README.md's blocks and sentences."""
    lines = [(path.name, match[1]) for path in site.scripts for match in re.finditer(r"(?m)^#   (\S.*)$", path.read_text())]
    block, text = r"(?ms)^```$(.*?)^```$", (site.folder / "README.md").read_text()
    for contents in re.findall(block, text):
        lines += [("README.md", line) for line in contents.splitlines()]
    sentences = " ".join(re.sub(block, "", text).split())
    commands = [command for command in re.findall(r"`([^`]+)`", sentences) if re.search(r" .*\.(sh|sl|pbs)\b|\.sh ", command)]
    lines += [("README.md", command) for command in commands]
    shown_commands = []
    for place, text in lines:
        line = re.sub(r"\[[^]]*\]", "", re.split(r"\s{2,}|\s#", text)[0]).replace("JOB", FIRST).replace("$USER", USER)
        line = re.sub(r"(?<= )[A-Z]+(?= |$)", lambda word: PASSED.get(word[0], word[0]), line)
        if re.match(r"([A-Z_]+=(\"[^\"]*\"|\S+) )*(sbatch|qsub|\./install\.sh)( |$)", line) and "..." not in line:
            shown_commands.append((place, line.strip()))
    return shown_commands

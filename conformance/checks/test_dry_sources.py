"""The static rung: ranks, modules and directives of a site's scripts are what its sources and READMEs say.

python -m pytest conformance/checks/test_dry_sources.py [--site NAME_OR_FOLDER]
"""

import itertools
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from conformance.checks.test_static import cells_of
from conformance.harness.check import clause
from conformance.harness.dry_run import command_names, trains, values_of, with_modules
from conformance.harness.shell import PLACEHOLDER, SETS, Script, minutes, options_of, plain, words_of
from conformance.harness.sites import ROOT

OF_A_USER = "/opt/of-a-user/lib"


@clause("J3")
def test_ranks_have_the_paths_that_the_sources_put_together(check, site, dry):
    """`export A=$B:$A` puts B's value, set by the loaded modules, before A's: otherwise the path is wrong, or empty."""
    added = re.findall(r"(?m)^export (\w+)=\$(\w+):\$\1$", "\n".join(map(plain, site.facts)))
    for script, chosen, run in dry.as_chosen() if added else ():
        for call in run.trained[:1]:
            for name, part in added:
                if (value := call.environ.get(part, "")) and value not in call.environ.get(name, "").split(":"):
                    yield f"{script.name} {chosen}: {part}={dry.shown(value)}, but should have it in the ranks' {name}"
    for script, (name, _) in itertools.product(trains(site), added):
        for call in dry.job(script, environ={name: OF_A_USER}).trained[:1]:
            if len(parts := call.environ[name].strip(":").split(":")) > 1 and parts[-1] != OF_A_USER:
                observed = f"{script.name}: {name}={dry.shown(':'.join(parts))}"
                yield f"{observed}, but should put the new before it, as a fact of [[sources]] does"


# A setting, and its value without shell syntax.
SETTING = re.compile(SETS.pattern + r"[`'\"]?([^`'\"$\s;#/][^`'\"$\s;#]*)[`'\"]*\s*(?:$|[;#])")


@clause("J3")
def test_ranks_have_the_values_of_the_sources(check, site, dry):
    """They are checked as ranks get them: a default such as `${NAME:-value}` cannot be read off. Paths are the script's own."""
    known: dict[str, set[str]] = {}
    for match in filter(None, map(SETTING.match, site.facts)):
        known.setdefault(match[1], set()).add(match[2])
    to_edit = {name for script in map(Script, site.scripts) for line, name in script.exports if line.is_to_edit}
    names = [name for name in sorted(known.keys() - to_edit) if not name.endswith(("PATH", "_PLUGIN"))]
    for what, run in dry.in_all_ways() if names else ():
        for call in run.trained:
            for name in names:
                if (value := call.environ.get(name)) is not None and value not in known[name]:
                    should = f"{' or '.join(sorted(known[name]))}, as a fact of [[sources]] says"
                    yield f"{what}: {name}={dry.shown(value)} in a rank, but should be {should}"


@clause("J3")
def test_ranks_of_many_nodes_have_what_is_said_to_be_for_them(check, site, dry):
    """The comment above an exported variable may say "beyond 1024 nodes": nobody tests that before it is needed."""
    asked = re.compile(r"\b(?:beyond|above|more than) ([\d,]*\d) nodes\b")
    scripts = [Script(path) for path in site.scripts if path.suffix != ".py" and not path.name.startswith("install")]
    exports = [(name, asked.search(" ".join(line.paragraph))) for script in scripts for line, name in script.exports]
    for name, said in [(name, said) for name, said in exports if said]:
        runs = [dry.job(script, nodes=int(said[1].replace(",", "")) + 1) for script in trains(site)]
        if not any(name in call.environ for run in runs for call in run.trained):
            yield f"no {name} in ranks {said[0]}, but should be there, as the comment above it says"


@clause("J3")
def test_commands_have_the_options_that_the_sources_give_them(check, site, dry):
    """Where a fact is a command that the scripts call, one call has all its long options and its name=version."""
    facts = [words for fact in site.facts if (words := of_command(fact))]
    facts = [words for words in facts if words[0] in command_names() | {site.toml["launcher"]}]
    unloads = [match[1] for fact in site.facts if (match := re.match(r"module unload (\S+)$", plain(fact)))]
    given_variables = [each for each in map(with_variables, site.facts) if each[0] and each[1][0] in command_names()]
    runs = [run for _, run in dry.in_all_ways()] if facts or unloads or given_variables else []
    runs += [dry.install(*flags) for flags in [(), *dry.given()]] if runs else []
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
    """Some launch uses a fact's list of cores exactly."""
    lists = [fact for fact in site.facts if re.fullmatch(r"list:[\d,:-]+", fact)]
    # A fact may have only some of the masks, the first one behind `mask_cpu:`. A launch may use fewer cores of a mask.
    mask = r"(?:0x[0-9a-f]+|[0-9]*[a-f][0-9a-f]*)"
    facts = [match.groups() for fact in site.facts if (match := re.fullmatch(rf"(\S*mask_cpu:)?({mask}(?:,{mask})+)", fact))]
    launches = [call for _, run in dry.in_all_ways() for call in run.launches] if lists or facts else []
    bindings = [value for call in launches for value in values_of(call.words, "--cpu-bind")]
    for fact in [fact for fact in lists if fact not in bindings]:
        yield f"no launch has --cpu-bind {fact[:60]}..., but one should, as a fact of [[sources]] says"
    texts = [value.partition("mask_cpu:")[2].split(",") for value in bindings if "mask_cpu:" in value]
    masks = [[int(each, 16) for each in text] for text in texts if len(text) > 1]  # not the single mask of a torchrun
    for first, fact in facts if masks else ():
        wanted = [int(each, 16) for each in fact.split(",")]
        starts = [(each, start) for each in masks for start in range(len(each) - len(wanted) + 1) if not (first and start)]
        runs = [each[start : start + len(wanted)] for each, start in starts]
        alike = [pair for pair in runs if all(one & two in (one, two) and one for one, two in zip(pair, wanted, strict=True))]
        if not alike:
            order = "first" if first else "one after the other"
            yield f"no launch has the masks {fact} {order}, but one should, as a fact of [[sources]] says"


def of_command(fact: str) -> list[str]:
    """Return a command's own words, without the words of the program that it starts."""
    try:
        words = shlex.split(fact.strip("`'\" "))
    except ValueError:  # an unmatched quote: this is prose
        return []
    return [*itertools.takewhile(lambda word: not re.search(r"^python[\d.]*$|^\./|\.(py|sh|sl|pbs)$", word), words)]


def with_variables(fact: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a fact's command, and the command's words: `NAME="two words" command ...`."""
    words = of_command(fact) or [""]
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: re.match(r"[A-Z]\w*=", word), words))
    return variables, words[len(variables) :] or [""]


def spelt_out(command: str, words: list[str]) -> list[str]:
    """Return conda's -c as --channel: for other commands -c means something else."""
    return ["--channel" if word == "-c" and command in ("conda", "mamba", "micromamba") else word for word in words]


def with_values(words: list[str]) -> list[str]:
    """Return a call's words, with its options also as facts may write them: without a value, and with `=value`."""
    pairs = [f"{flag}={value}" for flag, value in itertools.pairwise(words) if flag.startswith("--")]
    return [*words, *pairs, *(word.partition("=")[0] for word in words if word.startswith("--"))]


@clause("F8")
def test_a_library_path_that_torch_needs_is_the_ranks_own(check, site, dry):
    """Where only this path finds torch: the scheduler's commands would load its libraries instead of the system's."""
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
            if words[:1] in (["swap"], ["switch"]):  # the last name replaces the first
                loaded, words = [name for name in loaded if name not in its], ["load", words[-1]]
            loaded += words[1:] if words[:1] in (["load"], ["add"]) else []
        if loaded != site.modules:
            yield f"{script.name}: loads {' '.join(loaded)}, but should load {' '.join(site.modules)}, in this order"


@clause("F8")
def test_the_modules_of_a_login_shell_are_cleared_first(check, site, dry):
    """sbatch copies the environment, with the libraries of the modules loaded there."""
    clears, runs = site.software.get("cleared_by", ""), {}
    if site.modules:
        runs = {script.name: dry.job(script) for script in trains(site)} | {"install.sh": dry.install()}
    elif clears and (case := with_modules(site, "another/1.0")):  # a site without modules, whose user adds some
        runs = {case.script: dry.job(site.folder / case.script, case=case), "install.sh": dry.install(case=case)}
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
    for script in map(Script, site.job_scripts):
        options, pbs = script.options, " ".join(text for _, text in script.directives)
        asked = options.get("time") or script.resources.get("walltime", "")
        yield from (f"{script.path.name}: {text}" for text in beyond(queue, options, asked))
        for option in ("account", "A", "P"):
            if option in options and "account" in queue and options[option] != queue["account"]:
                yield f"{script.path.name}: {option}={options[option]}, but should be {queue['account']}, as in site.toml"
        systems = re.search(r"filesystems=(\S+)", pbs)
        if "filesystems" in queue and not (systems and {*systems[1].split(":")} <= {*queue["filesystems"]}):
            yield f"{script.path.name}: filesystems={systems and systems[1]}, but should be of {':'.join(queue['filesystems'])}"
        for words in site.job(script.path).get("ends_when_stopped", []):
            if words_of(words).items() <= options.items():
                yield f"{script.path.name}: {words} as it stands, but should come back (ends_when_stopped)"
        if (one := options.get("q")) in queue.get("one_job", []):
            yield f"{script.path.name}: q={one}, but should be a queue that takes the job that follows (one_job)"
        if site.toml["scheduler"] == "slurm" and asked and minutes(asked) < 1:
            yield f"{script.path.name}: time={asked}, but should be a minute or more"


def beyond(queue: dict, options: dict[str, str], asked: str) -> Iterator[str]:
    """Yield the options that name none of site.toml's queues, QOS and features, and a time that is longer than they give."""
    known = dict(partition="partitions", q="partitions", qos="qos", constraint="constraints")
    for option, key in known.items():
        names = re.split(r"[&|,]", options[option]) if option in options else []
        wrong = [name for name in names if queue.get(key) and name not in queue[key]]
        yield from (f"{option}={name}, but should be one of {', '.join(queue[key])}" for name in wrong)
    limits = queue.get("minutes", {})
    for name in {options.get("partition"), options.get("qos"), options.get("q")} & limits.keys():
        if asked and minutes(asked) > limits[name]:
            yield f"time={asked}, but should be at most {limits[name]} minutes in {name}"


@clause("B8")
def test_sessions_that_users_are_shown_ask_for_what_the_machine_has(check, site):
    """`salloc ...` and similar, in README.md and the heads of scripts, name site.toml's queues and as many GPUs as the job."""
    queue, slurm = site.toml.get("queue", {}), site.toml["scheduler"] == "slurm"
    of_jobs = [Script(path).options.keys() & OF_GPUS for path in trains(site)]
    for name, command, paragraph in sessions(site):
        options = options_of(command, slurm)
        named = {
            option: text for option, text in options.items() if re.fullmatch(r"[\w.&|,-]*[a-z][\w.&|,-]*", text)
        }  # not NAME
        asked = options.get("time", "")
        wrong = beyond(queue, named, asked if re.fullmatch(r"[\d:-]*\d", asked) else "")
        yield from (f"{name}: {command!r}: {text}" for text in wrong)
        trains_there = command.startswith("salloc") and re.search(r"\btrain|torchrun|\.py\b", paragraph)
        if slurm and trains_there and all(of_jobs) and not options.keys() & {*OF_GPUS, "exclusive"}:
            yield f"{name}: {command!r}: no GPU, but should ask for some, as the job does"


# Slurm's options that give a job GPUs. --exclusive gives it all GPUs of its nodes.
OF_GPUS = {"gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task"}


def sessions(site) -> Iterator[tuple[str, str, str]]:
    """Yield each command for an interactive job that users are shown: its file, the command, and the paragraph around it."""
    pattern = r"(?:salloc|srun|qsub -I) [^`\n]*"
    for name, paragraph in paragraphs(site):
        yield from ((name, command, paragraph) for command in re.findall(rf"`({pattern})`", " ".join(paragraph.split())))
        yield from ((name, command.strip(), paragraph) for command in re.findall(rf"(?m)^({pattern})", paragraph))
    for path in site.scripts:
        head = path.read_text().partition("\nset -")[0]
        yield from ((path.name, command, head) for command in re.findall(rf"(?m)^#   ({pattern}?)(?:  +.*)?$", head))


def paragraphs(site) -> list[tuple[str, str]]:
    """Return README.md's paragraphs and list items, without the sections about failures and about other documents."""
    sections = re.split(r"(?m)^## ", (site.folder / "README.md").read_text())
    kept = [text for text in sections if not re.match(r"(Known failures|Coming from|Where this differs)", text)]
    return [("README.md", each) for text in kept for each in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text)]


@clause("F8")
def test_the_readme_loads_the_modules_of_site_toml(check, site):
    """Where users train by hand: .venv is made with one version of a module, and works with no other."""
    versions = {name.partition("/")[0]: name for name in site.modules if "/" in name}
    isolated = any(re.search(r"(?m)^\s*export .*\bPYTHONNOUSERSITE=", path.read_text()) for path in trains(site))
    torches = [name for name, what in site.software.get("provides", {}).items() if "torch" in what]
    for name, paragraph in paragraphs(site):
        text = " ".join(paragraph.split())
        if torches and isolated and "-m ipykernel install " in text and "PYTHONNOUSERSITE" not in text:
            yield f"{name}: a kernel without --env PYTHONNOUSERSITE 1, but should have it: ~/.local comes before {torches[0]}"
        for words in re.findall(r"`module (?:load|add) ([^`]+)`", text) if re.search(r"\btrain|\.venv\b|\.py\b", text) else ():
            for word in [word for word in words.split() if "/" in word and word.partition("/")[0] in versions]:
                if word != (own := versions[word.partition("/")[0]]):
                    yield f"{name}: module load {word}, but should be {own}, as the job loads"
            torch = [word for word in words.split() if "torch" in site.software.get("provides", {}).get(word, [])]
            if torch and isolated and re.search(r"/python3? train\w*\.py", text) and "PYTHONNOUSERSITE" not in text:
                yield f"{name}: no PYTHONNOUSERSITE by hand, but should be, as in the job: ~/.local comes before {torch[0]}"


@clause("F10")
def test_the_readme_has_the_values_of_the_ranks(check, site, dry):
    """README.md's values are the ranks'; a table may show another machine's. Variables after "no `NAME`" are not set."""
    lines = [line for line in (site.folder / "README.md").read_text().splitlines() if not line.lstrip().startswith("|")]
    text = " ".join(" ".join(lines).split())
    # Conditions and advice do not count: "with `NAME=1` it ends", "set `NAME=1`".
    condition = re.compile(r"\b(with|if|set|export|pass|instead)\b[^.;:]*$")
    spans = re.finditer(r"`([A-Z]\w+)=[\"']?([^`\"' ]+)[\"']?`", text)
    told = [match.groups() for match in spans if not condition.search(text[max(0, match.start() - 60) : match.start()])]
    tabled = [("README.md", *row) for row in values_in_tables(site.folder / "README.md", "value")]
    if site.folder.parent == ROOT / "sites":
        tabled += [("sites/README.md", *row) for row in values_in_tables(ROOT / "sites/README.md", site.name)]
    runs = [run for _, run in dry.in_all_ways()] if told or tabled else []
    of_one_node = [dry.job(script, nodes=1) for script in trains(site)] if told else []
    for name, value in told:
        ranks = [call for run in runs + of_one_node for call in run.trained]
        values = {dry.shown(call.environ[name]) for call in ranks if name in call.environ}
        if values and value not in values:
            yield f"README.md: {name}={value}, but should be {' or '.join(sorted(values))}, as in ranks"
    code = "\n".join(line.text for script in map(Script, site.scripts) for line in script.lines if not line.is_comment)
    for place, name, value in tabled:
        values = {dry.shown(call.environ[name]) for run in runs for call in run.trained if name in call.environ}
        if value != UNSET or place == "sites/README.md":  # some cases occur in no dry run
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
    without = [name for name in re.findall(r"\bno `([A-Z]\w+)`", text) if name in ours]  # other variables belong to the user
    for name, script in itertools.product(without, trains(site)):
        for call in dry.job(script, environ={name: "1"}).trained[:1]:
            if name in call.environ:
                yield f"{script.name}: {name}={call.environ[name]} in a rank, but README.md says no {name}"


UNSET = "not set"


def values_in_tables(path: Path, column: str) -> list[tuple[str, str]]:
    """Return the variables that have a row in a table, each with its value in this column, or UNSET."""
    rows = []
    for head, cell in cells_of(path, column):
        name = re.fullmatch(r"`([A-Z][A-Z0-9_]+)`", head)
        value = re.fullmatch(rf"(`?)([\w.,/-]+|{UNSET})\1", re.sub(r"^(not set|unset)(\W*$|:.*)", UNSET, cell))
        rows += [(name[1], value[2])] if name and value and value[2] != "-" else []
    return rows


@clause("F10")
def test_the_table_of_all_sites_has_their_numbers(check, site, dry):
    """Users compare machines there. Flags for a rank's cores are the launcher's."""
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
    """A scheduler refuses a job without these, or uses its own defaults: one hour, nodes without the disk."""
    queue, slurm = site.toml.get("queue", {}), site.toml["scheduler"] == "slurm"
    wanted = dict(account="account", constraint="constraints") if slurm else dict(A="account")
    wanted = {option: key for option, key in wanted.items() if queue.get(key)}
    if len(queue.get("partitions", [])) > 1:
        wanted["partition" if slurm else "q"] = "partitions"
    for script in map(Script, site.job_scripts):
        options = script.options
        lost = [name for name in wanted if name not in options and not (name == "A" and "P" in options)]  # -P: PBS's project
        yield from (f"{script.path.name}: no directive {name}, but should be one ({wanted[name]} of [queue])" for name in lost)
        if not ("time" in options if slurm else re.search(r"(?m)^#PBS .*walltime=", script.text)):
            yield f"{script.path.name}: no directive with a time limit, but should be one"
        named = [options[name] for name in ("partition", "qos", "q") if name in options]
        placeholder = PLACEHOLDER.search(queue.get("account", ""))
        if named and "minutes" in queue and not placeholder and not {*named} & queue["minutes"].keys():
            yield f"queue.minutes has nothing of {' and '.join(named)}, which {script.path.name} asks for, but should"

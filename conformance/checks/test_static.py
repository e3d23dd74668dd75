"""The static rung: which file knows what, and what the text of a site's files shows.

    python -m pytest conformance/checks/test_static.py [--site NAME_OR_FOLDER]

This needs neither ranks nor torch.
"""

import ast
import datetime
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.cluster.shape import impossible, numbers
from conformance.golden import make as golden
from conformance.harness import keys, reference, shell
from conformance.harness.check import clause
from conformance.harness.dry_run import OF_ML
from conformance.harness.new_site import is_mark
from conformance.harness.shell import Line, Script, devices_by, gib, minutes, plain
from conformance.harness.sites import ROOT, date_of_copy, find, flags_in, mistakes

CORE = sorted((ROOT / "core/src/ddp_core").rglob("*.py"))
CONFORMANCE = sorted((ROOT / "conformance").rglob("*.py"))
SITES = {path.name for path in (ROOT / "sites").iterdir() if path.is_dir()}
# A user's own copy may have any name, such as "mine" or "cluster", which our files also use as words.
ADOPTED = {name for name in SITES if (ROOT / "conformance/reports" / name).is_dir()} or SITES
WORD = r"[A-Za-z]{2,}|[^\W\d_A-Za-z]{2}"  # or two letters of a script that may be written without spaces
SCHEDULER_VARIABLE = re.compile(r"\b(SLURM|PBS|PALS|PMI|PMIX|OMPI|LSB|JSM|FLUX)_\w*")


def imports(path: Path) -> set[str]:
    """The top-level names of the modules that a file imports, anywhere in it."""
    return imported(ast.parse(path.read_text()))


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.partition(".")[0])
    return names


def where_installed(path: Path) -> set[str]:
    """Return {"tqdm"} where every import of tqdm stands in a `try` that handles its absence, else the empty set."""
    tree = ast.parse(path.read_text())
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    guarded = [node for node in tries if any(ast.unparse(handler.type or node) == "ImportError" for handler in node.handlers)]
    for node in guarded:
        node.body = [line for line in node.body if imported(line) != {"tqdm"}]
    return {"tqdm"} - imported(tree)


def without_comments(path: Path) -> str:
    """Return a Python file's code. Comments and docstrings of a copy may still name the site that it was copied from."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def matches_in(files: list[Path], pattern: str) -> dict[str, list[str]]:
    """Map each file's name to its matches."""
    matches = {str(path.relative_to(ROOT)): [m[0] for m in re.finditer(pattern, path.read_text())] for path in files}
    return {name: texts for name, texts in matches.items() if texts}


def names_of(sites: set[str]) -> str:
    """Return a pattern that matches the names of these sites; without sites, one that matches nothing."""
    return r"\b(" + "|".join(map(re.escape, sorted(sites))) + r")\b" if sites else r"(?!)"


@clause("A1")
def test_core_and_conformance_name_no_site(check):
    in_core, in_conformance = (matches_in(files, names_of(ADOPTED)) for files in (CORE, CONFORMANCE))
    check.equal(site_names_in_core=(in_core, {}), site_names_in_conformance=(in_conformance, {}))


@clause("A2")
def test_core_reads_no_scheduler_variable(check):
    check.equal(scheduler_variables_in_core=(matches_in(CORE, SCHEDULER_VARIABLE.pattern), {}))


@clause("A3")
def test_core_imports_little(check):
    allowed = sys.stdlib_module_names | {"torch", "safetensors", "ddp_core"}
    others = {path.name: sorted(unexpected) for path in CORE if (unexpected := imports(path) - allowed - where_installed(path))}
    check.equal(other_imports_of_core=(others, {}))


@clause("A3")
def test_the_core_is_imported_without_torch(check):
    """The import works where torch is missing, as on a login node, or must wait until MPI is started."""
    program = "import sys, ddp_core, ddp_core.find_run, ddp_core.show; print(*{'torch', 'safetensors'} & {*sys.modules})"
    environ = os.environ | dict(PYTHONPATH=str(ROOT / "core/src"))
    run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=False)
    check.equal(imported_with_it=(run.stdout.split() if not run.returncode else run.stderr[-300:], []))


@clause("A4")
def test_site_imports_of_ours_only_the_core(check, site):
    files = sorted(site.folder.rglob("*.py"))
    ours = {".", "core", "sites", "conformance", *SITES}
    wrong = {path.name: sorted(imports(path) & ours) for path in files if imports(path) & ours}
    others = rf"(?<![\w-]){names_of(ADOPTED - {site.name})}(?![\w-])"  # "my-site" does not name "site"
    # An address may name another site: a source is valid wherever it is used.
    texts = {path.name: re.sub(r"https?://\S+", "", without_comments(path)) for path in files}
    named = {name: names for name, text in texts.items() if (names := re.findall(others, text))}
    check.equal(imports=(wrong, {}), other_sites_named=(named, {}))


@clause("F1", "F2")
def test_files_of_a_site(check, site):
    check["F2"].holds(*keys.missing(site.toml))
    check["F2"].equal(name=(site.name, site.folder.name))
    wanted = {"README.md", "install.sh", "train.py", site.toml["submit"], *site.toml.get("files", [])}
    check["F1"].equal(missing_files=(sorted(name for name in wanted if not (site.folder / name).is_file()), []))


@clause("F3")
def test_launchers_tell_the_ranks_apart(check, launch):
    """What a launcher exports differs from rank to rank, for the ranks of two nodes."""
    exported = [launch.environ(rank, 4, 2, 29500, "1") for rank in range(4)]
    check.equal(distinct_ranks=(4 if launch.mpi else len({str(environ) for environ in exported}), 4))


@clause("F4")
def test_the_keys_of_site_toml_are_those_of_the_table(check, site):
    check.holds(*keys.wrong(site.toml), *impossible(site))
    try:
        chosen = {case.launch.launcher for case in site.cases}
    except ValueError as error:
        check.holds(str(error))
    chosen |= {one["name"] for one in site.toml["launchers"] if "by_hand" in one}
    check.equal(launchers_of_no_choice=([one.launcher for one in site.launches if one.launcher not in chosen], []))


@clause("F5")
def test_the_status_is_told_alike(check, site):
    verified = site.toml.get("verified", {})
    status, date = verified.get("status"), verified.get("date")
    known = ("never-run", "simulated", "run-on-site")
    check.equal(status=(status if status not in known else True, True), evidence=(bool(verified.get("evidence")), True))
    check.equal(has_a_date=(isinstance(date, datetime.date), status != "never-run"))
    match = re.search(r"\*\*Status: ([\w-]+)\.?\*\*\.?(?: \((\S+)\))?", (site.folder / "README.md").read_text())
    check.equal(README_md=(match and match.groups(), (status, date and str(date))))


@clause("F9")
def test_what_no_run_has_shown_is_listed(check, site):
    verified = site.toml.get("verified", {})
    listed = verified.get("unverified")
    sentences = isinstance(listed, list) and all(re.fullmatch(r"(?s)[A-Z`].* .*\.", str(sentence)) for sentence in listed)
    check.equal(unverified_is_a_list_of_sentences=(sentences, True))
    status = verified.get("status")
    check.equal(unverified_or_run_on_site=(bool(listed) or status == "run-on-site", True))
    if status == "simulated":  # by stand-ins for the software of these names
        names = [*site.modules, *([Path(site.software["image"]).name] if "image" in site.software else [])]
        check.equal(software_not_in_unverified=([name for name in names if name not in " ".join(listed)], []))


@clause("F9")
def test_the_table_of_sites_tells_what_is_unverified(check):
    """Sites with a row there are compared; a new site needs none."""
    columns = [cells_of(ROOT / "README.md", column) for column in ("unverified", "status")]
    unverified, status = ({head.partition("]")[0].removeprefix("["): cell for head, cell in cells} for cells in columns)
    verified = {site.name: site.toml.get("verified", {}) for site in find() if site.name in status}
    numbers = {name: str(len(its.get("unverified", []))) for name, its in verified.items()}
    check.equal(unverified_in_README_md=({name: unverified.get(name) for name in verified}, numbers))
    wrong = [name for name, its in verified.items() if not status[name].startswith(its["status"])]
    check.equal(another_status_in_README_md=(wrong, []))


def cells_of(path: Path, column: str) -> list[tuple[str, str]]:
    """Return the cells of this column of a file's tables, each with the first cell of its row."""
    rows, heads = [], []
    for line in path.read_text().splitlines() if path.is_file() else ():
        cells = [cell.strip() for cell in line.strip().split("|")[1:-1]]
        heads = heads if cells and heads else cells
        rows += [(cells[0], cells[heads.index(column)])] if column in heads[1 : len(cells)] else []
    return rows


@clause("F6")
def test_sources_tell_which_copy_was_read(check, site):
    sources, today = site.toml.get("sources", []), datetime.date.today()
    check.equal(sources=(bool(sources), True))
    check.holds(*(mistake for source in sources for mistake in mistakes(source)))
    check.equal(read_in_the_future=([str(source["read"]) for source in sources if source["read"] > today], []))
    days = {source["address"]: date_of_copy(source) for source in sources}
    if old := [address for address, day in days.items() if day and (today - day).days > 183]:
        warnings.warn(f"{site.name}: the copy that was read is older than six months: {', '.join(old)} (F6)", stacklevel=1)
    if undated := [address for address, day in days.items() if not day]:
        warnings.warn(f"{site.name}: of when is the commit? `dated` should say: {', '.join(undated)} (F6)", stacklevel=1)


MINUTES = dict(min=1, hr=60, hour=60, day=1440)


@clause("F6")
def test_a_queue_s_longest_job_is_that_of_the_source(check, site):
    """The source is a fact that is a table row with the queue's name and a time.

    A routing queue's row has no time. Its smallest jobs run in the queue whose row begins at the same number of nodes.
    """
    of_all = [fact for fact in site.facts if re.match(r"\|[^|]*\|\s*\d+\s*\|", fact)]
    for queue, longest in site.toml.get("queue", {}).get("minutes", {}).items():
        rows = [fact for fact in site.facts if re.match(rf"\|\s*{re.escape(queue)}\s*\|", fact)]
        if rows and not re.search(r"\d (min|hr|hour|day)|\d:\d\d", " ".join(rows)):
            least = {match[1] for row in rows if (match := re.match(r"\|[^|]*\|\s*(\d+)\b", row))}
            rows = [row for row in of_all if row.split("|")[2].strip() in least]
        limits = {int(count) * MINUTES[unit] for row in rows for count, unit in re.findall(r"(\d+) (min|hr|hour|day)", row)}
        if limits and longest not in limits:
            yield f"queue.minutes of {queue}={longest}, but should be {max(limits)}, as a fact of [[sources]] says"


# The words by which a README names the core's exit codes (X1 to X15).
EXIT_CODES = dict(usage=2, preflight=3, rendezvous=4, snapshot=5, loss=6, rank=7, storage=8, stopped=75)


@clause("F10")
def test_the_readme_has_the_core_s_exit_codes(check, site):
    text = site.readme
    lists = re.findall(r"(?:\d+ (?:a )?(?:\w+)(?: \w+){0,3}(?:, |\.|;)){5,}", text)
    codes = {name: int(code) for code, name in re.findall(r"(\d+) (?:a )?(\w+)", " ".join(lists)) if name in EXIT_CODES}
    check.equal(exit_codes_in_README_md=(codes, {name: code for name, code in EXIT_CODES.items() if name in codes}))


@clause("F10")
def test_the_readme_has_the_cores_of_site_toml(check, site):
    """They stand in a table with a column for each device and a row `cores`, perhaps with a row `rank on the node`.

    Ranks take a node's cores in order. Numbers of chiplets or NUMA nodes in other rows rise with the cores.
    """
    near = site.toml["node"].get("cores_near_device", [])
    order = sorted(range(len(near)), key=lambda device: min(numbers(near[device])))
    for table in re.findall(r"(?:^ *\|.*\n)+", (site.folder / "README.md").read_text(), re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        cores = next((row[1:] for row in rows if row[0] == "cores"), [])
        pairs = itertools.zip_longest(near, cores, fillvalue="") if near and cores else ()
        wrong = [f"{cell} for device {n}" for n, (its, cell) in enumerate(pairs) if not {*numbers(cell)} <= {*numbers(its)}]
        check.equal(cores_in_README_md_not_near_their_device=(wrong, []))
        for name, *counted in rows[1:]:
            heads = list(map(str, range(len(counted))))  # such a row only counts the columns
            if name == "rank on the node":
                check.equal(ranks_in_README_md=(counted, [str(order.index(device)) for device in range(len(near))]))
            elif cores and len(counted) == len(cores) and all(map(str.isdecimal, counted)) and counted != heads:
                along = sorted(zip(cores, map(int, counted), strict=True), key=lambda pair: numbers(pair[0])[:1])
                wrong = [f"{second[1]} on {second[0]}" for first, second in itertools.pairwise(along) if second[1] < first[1]]
                check.equal(**{f"{name}_in_README_md_not_in_the_order_of_cores": (wrong, [])})


# Tokens of Hugging Face, GitHub, GitLab, OpenAI; in an address; under a telling name. Each has a digit; placeholders have none.
SECRET = re.compile(
    r"\b(hf_|gh[pous]_|github_pat_|glpat-|sk-(proj-|ant-)?)(?=[\w-]*\d)[\w-]{16,}|://[^\s/:@$\"']+:(?=[^@]*\d)[^\s/@$\"']{6,}@(?!sha256:)"
    r"|(?i:_TOKEN|API_?KEY|ACCESS_KEY|PASSWORD|SECRET)[\"']?\]?\s*=\s*[\"']?(?=(?:[\w-]*\d){3})[\w-]{12,}(?![\w(.-])"
)


@clause("B9")
def test_no_file_holds_a_secret(check, site):
    """Anybody who copies the folder, reads it on the file system or finds it in a repository has the secret."""
    named = [site.folder / name for name in ("README.md", "site.toml", *site.toml.get("files", []))]
    for path in sorted(path for path in {*named, *site.scripts, *site.folder.glob("*.py")} if path.is_file()):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if match := SECRET.search(line):
                yield f"{path.name}:{number}: {match[0][:6]}..., but should hold no secret: read it from a file of mode 600"


@clause("B7")
def test_constraints_hold_what_the_machine_has(check, site):
    """`pip list --local` omits what an environment takes from the machine: its torch and its numpy."""
    leaves_out = re.compile(r"^[^#]*\bpip\b.* (?:list|freeze)\b.* (?:--local|-l)\b")
    check.holds(*at_lines(site, lambda line: leaves_out.search(line.text), "list what the machine has, too: no --local"))


@clause("X7")
def test_mpi_is_not_waited_for_at_the_end(check, site):
    """MPI_Finalize waits for all ranks, also for a lost one: train.py ends MPI before it trains, or never."""
    for path in sorted(site.folder.glob("*.py")):
        text = path.read_text()
        ends = re.search(r"\brc\.finalize = False\b|\bMPI\.Finalize\(\)", text)
        if re.search(r"^\s*(?:import mpi4py|from mpi4py)\b", text, re.MULTILINE) and not ends:
            yield f"{path.name}: MPI ends with Python, but should before training, or not at all (mpi4py.rc.finalize = False)"


@clause("X20")
def test_a_folder_for_all_users_files_has_a_name_of_its_own(check, site):
    """Its name is mktemp's, or has a variable in it: under a fixed name another user may have left files that are used."""
    for script in map(Script, site.scripts):
        for line in [line for line in script.lines if not line.is_comment]:
            for place, name in re.findall(r"(\$\{TMPDIR:-/tmp\}|(?<![\w.}])/(?:var/)?tmp|/dev/shm)/([^\s\"';)|]+)", line.text):
                if not re.search(r"\$|XXX", name):
                    yield f"{script.path.name}: {place}/{name}, but should be `mktemp -d`, or have $USER in its name"


@clause("B5")
def test_proxies_are_not_asked_for_the_node_itself(check, site):
    """A proxy cannot reach the node itself: without no_proxy, a program does not find its own server."""
    for script in map(Script, site.scripts):
        code = [line for line in script.lines if not line.is_comment]
        without = {host for line in code for hosts in re.findall(r"\bno_proxy=(\S*)", line.text) for host in hosts.split(",")}
        proxies = [line for line in code if re.search(r"\bhttps?_proxy=[^\s;]", line.text)]
        if missing := sorted({"localhost", "127.0.0.1"} - without):
            yield from (at(script, line, f"have no_proxy with {' and '.join(missing)}") for line in proxies[:1])


@clause("B5")
def test_no_job_takes_a_whole_environment_along(check, site):
    """PBS stores the environment with the job, and `qstat -f` shows everybody its tokens."""
    takes_all = re.compile(r"^#PBS\b.* -V\b|^[^#]*\bqsub\b[^#]*\s-V\b")
    should_be = "name the variables (-v), since -V shows all in qstat -f"
    check.holds(*at_lines(site, lambda line: takes_all.search(line.text), should_be))


@clause("J10")
def test_chained_jobs_come_after_a_stop_too(check, site):
    """A run that was stopped to be resumed ends with 75, which a scheduler counts as a failure."""
    texts = {path.name: path.read_text() for path in (site.folder / "README.md", *site.scripts)}
    wrong = [name for name, text in texts.items() if re.search(r"\bafterok\b", text)]
    check.equal(afterok_in=(wrong, []))


@clause("F8")
def test_paths_that_modules_fill_are_added_to(check, site):
    """Replacing a path removes the modules' libraries and commands from it. For a single system command that is allowed."""
    of_one_command = re.compile(r" +(q(sub|stat|alter|sig|del)|s(batch|control|cancel|queue|acct|info)|git|curl|ssh|tar) ")
    for path in site.scripts:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            command = r"(?:^\s*|[;&|{(]\s*)(?:export |if |then )?((?:LD_LIBRARY_)?PATH)=(\S*)"
            for name, value, rest in re.findall(f"{command}(.*)", line.partition(" #")[0]):
                if not re.search(rf"\$\{{?{name}\b", value) and not (value in ("", "''", '""') and of_one_command.match(rest)):
                    yield f"{path.name}:{number}: {name}={value}, but should keep what is in it"


@clause("F7")
def test_nothing_is_left_to_fill_in(check, site):
    for name in ("site.toml", "README.md"):
        for number, line in enumerate((site.folder / name).read_text().splitlines(), 1):
            if is_mark(line):
                yield f"{name}:{number}: {line.strip()}, but should be filled in"


# A module or list of modules that is loaded where a command can stand.
LOADS = re.compile(
    r"^(?:[^\"'#]*(?:[;&|{(!]|\b(?:then|do|else|if)\b))?\s*"
    rf"(?:module +(?:load|add)|ml +(?:load|add)|ml(?! +(?:-|(?:{OF_ML})(?!\S)))) +([^;&|}}#\n]+)"
)


@clause("F8")
def test_scripts_and_site_toml_name_the_same_software(check, site):
    scripts = {path.name: path.read_text() for path in site.scripts}
    image = site.software.get("image", "")
    paths = [site.folder / name for name in site.toml.get("files", []) if name not in ("README.md", "site.toml")]
    named = [*scripts.values(), *(path.read_text(errors="replace") for path in paths if path.is_file())]
    check.equal(image_in_a_script=(any(image in text for text in named), True))
    loaded = {
        f"{script}: {name}"
        for script, text in scripts.items()
        for line in text.splitlines()
        if (match := LOADS.match(line))
        for name in match[1].split()
        if re.fullmatch(r"\w[\w./+-]*", name) and name not in site.modules
    }
    check.equal(loads_what_site_toml_does_not_name=(sorted(loaded), []))


# ---- train.py --------------------------------------------------------------------------------------------------------

ODD = ("abc", "2(xabc)", "2(x99999999)", "9" * 5000, "-1", "1e3", "٣", "1 2", "", "a[$(id)]", "\x1b[2J")
ASKS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("train_of_a_site", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for environ in json.load(sys.stdin):
    try:
        print(json.dumps(["Rank", repr(module.rank(environ))]))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


@clause("X4")
def test_odd_values_of_a_variable_are_one_line(check, site):
    """For each odd value of a launcher's variable, train.py returns a rank, or one short line that names the variable."""
    cases, environments = [], []
    for launch in site.launches:
        good = launch.environ(1, 4, 2, 29500, "1")
        for name, template in launch.templates:
            number = re.fullmatch(r"\{(rank|world_size|local_rank|local_world_size|node_rank|master_port|restart)\}", template)
            if launch.mpi and template not in ("{world_size}", "{restart}"):
                continue  # train.py asks MPI before it reads the variables
            odd = [value for value in ODD if value or (number and template != "{restart}")]
            cases += [(name, value, bool(number)) for value in odd]
            environments += [good | {name: value} for value in odd]
    environ = os.environ | dict(PYTHONPATH=str(ROOT / "core/src"), PYTHONDONTWRITEBYTECODE="1")
    run: dict = dict(input=json.dumps(environments), env=environ, capture_output=True, text=True, timeout=60)
    result = subprocess.run([sys.executable, "-c", ASKS, str(site.folder / "train.py")], check=False, **run)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    check.equal(answers=(result.stderr[-200:] if result.returncode else len(answers), len(cases)))
    if any("has no attribute 'rank'" in message for _, message in answers):
        yield "train.py has no function `rank`, but should have what it hands to run() by that name"
        return
    for (name, value, number), (kind, message) in zip(cases, answers, strict=True):
        short = kind == "PreflightError" and message.isprintable() and len(message) < 500 and (name in message or not number)
        if not short and (number or kind != "Rank"):
            yield f"{name}={value[:20]!r}: {kind}: {message[:80]!r}, but should be a PreflightError of one short line"


# ---- job scripts --------------------------------------------------------------------------------------------------


def at(script: Script, line: Line, should_be: str) -> str:
    return f"{script.path.name}:{line.number}: {line.text.strip()[:100]!r}, but should {should_be}"


def at_lines(site, wrong: Callable[[Line], object], should_be: str) -> list[str]:
    """Return a violation for each wrong line of the site's scripts."""
    return [at(script, line, should_be) for script in map(Script, site.scripts) for line in script.lines if wrong(line)]


def place(address: str) -> str:
    """Return the host of an address; for GitHub with owner and repository."""
    host, *path = address.partition("://")[2].rstrip("/.:").split("/")
    return "/".join([host, *path[:2]]) if host == "github.com" else host


@clause("J3")
def test_everything_is_explained(check, site):
    known = {*shell.GENERAL.split(), *(place(source["address"]) for source in site.toml.get("sources", []))}
    known |= {f"github.com/{source['repository']}" for source in site.toml.get("sources", []) if "repository" in source}

    def unexplained(line: Line, comments: list[str]) -> str:
        text = "\n".join(comments)
        addresses = shell.ADDRESS.findall(text)
        words = re.findall(WORD, re.sub(r"\bunverified\b|--\w+|EDIT:", " ", shell.ADDRESS.sub(" ", text)))
        if not comments or len(words) < 2:
            return "have its reason directly above, of two words or more"
        if unknown := [address for address in addresses if place(address) not in known]:
            return f"have its source above, and {unknown[0]} is none of [[sources]]"
        sources = 'an address, NAME --help, man NAME, or "unverified"'
        return "" if addresses or shell.SOURCE.search(text) else f"have its source above: {sources}"

    for script in map(Script, site.scripts):
        for line, _ in [*script.directives, *script.flags]:
            directly = line.paragraph if line.above.lstrip().startswith("#") and not shell.DIRECTIVE.match(line.above) else []
            if what := unexplained(line, directly):
                yield at(script, line, what)
        for line, _ in script.exports:
            if what := unexplained(line, line.paragraph):
                yield at(script, line, what)
        submitted = script.path in site.job_scripts
        check.equal(directives_in_the_job_script=(bool(script.directives), submitted))


@clause("J3")
def test_variables_under_one_address_are_facts_of_its_page(check, site):
    """harness/sources.py looks up whether the page has the facts. Other variables can stand under another comment."""
    sources = [source for source in site.toml.get("sources", []) if "facts" in source]
    facts_by_page = {source["address"].rstrip("/"): source["facts"] for source in sources}
    for script in map(Script, site.scripts):
        blocks: dict[tuple[str, ...], list[tuple[Line, str]]] = {}
        for line, name in script.exports:
            blocks.setdefault(tuple(line.paragraph), []).append((line, name))
        for comments, exported in blocks.items():
            pages = {page.partition("#")[0].rstrip("/.:") for page in shell.ADDRESS.findall(" ".join(comments))}
            pages = {page for page in pages if not re.search(r"/(issues|pull)/\d+$", page)}  # nobody looks up facts in issues
            if len(exported) > 1 and pages and pages <= facts_by_page.keys():
                known = " ".join(fact for page in pages for fact in facts_by_page[page])
                lost = [line for line, name in exported if not re.search(rf"\b{name}\b", known)]
                yield from (at(script, line, f"be in one of the facts of {' or '.join(sorted(pages))}") for line in lost)


# NAME=value, --option=value, --option value and -l key=value, in a fact, directive or script.
VALUE = re.compile(
    r"(?<![\w./$-])(--[a-z][a-z-]+(?=[= ]\"?\w)|[A-Z][A-Z0-9_]{3,}(?==)|(?<=-l )\w+(?==)|place(?==))[= ][\"']?([\w.:/,+-]+)"
)


@clause("J3")
def test_values_are_those_of_the_sources(check, site):
    """Where facts have values of an option or variable, a script uses one of them. Lines to be edited are free."""
    known: dict[str, set[str]] = {}
    facts_text = "\n".join(site.facts)
    for name, value in VALUE.findall(facts_text):
        known.setdefault(name, set()).add(value)
    for script in map(Script, site.scripts):
        settings = [*script.directives, *script.flags, *((line, line.text) for line, _ in script.exports)]
        for line, text in settings:
            if not line.is_to_edit:
                for name, value in VALUE.findall(text):
                    if name.startswith("--") and not site.job(script.path).get("trains", True):
                        continue  # facts about training do not apply to a script that only prepares
                    if value not in known.get(name, {value}):
                        should_be = f"have {name}={' or '.join(sorted(known[name]))}, as a fact of [[sources]] says"
                        yield at(script, line, should_be)
    code = "\n".join(line.text for script in map(Script, site.scripts) for line in script.lines if not line.is_comment)
    by_modules = {word.partition("=")[0] for word in site.provides}
    for name in sorted({match[1] for fact in site.facts if (match := shell.SETS.match(fact))} - by_modules):
        if not re.search(rf"(?:\b|ENV_){name}=", code) and not advised(site, name):
            problem = "is set in no script, nor to be tried by README.md with a value of it"
            yield f"{name} {problem}, but a fact of [[sources]] sets it: another spelling is ignored"
    code += "\n".join(path.read_text() for path in sorted(site.folder.glob("*.py")))
    unverified = "\n".join(site.toml.get("verified", {}).get("unverified", []))
    for name in re.findall(r"`([A-Z0-9]+(?:_[A-Z0-9]+)+)`", unverified):
        if name in facts_text and not re.search(rf"\b{name}\b", code):
            yield f"{name} is in no script, but a fact of [[sources]] and `unverified` name it: another spelling is ignored"


def advised(site, name: str) -> bool:
    """Return whether README.md tells users to try, set or export this variable, always with a value that a fact has."""
    text = site.readme
    advice = rf"(?:[.:;,|(] |\b(?:also|or) |`)(?:try|set|export) [^.;:|]*?\b{name}=[\"']?([^`\"']+)"
    facts = [match[1] for fact in site.facts if (match := re.search(rf"\b{name}=(.*)", fact))]
    known = [
        any(re.search(rf"(?<![\w.,]){re.escape(value)}(?![\w.,])", fact) for fact in facts)
        for value in re.findall(advice, text)
    ]
    return bool(known) and all(known)


# An address, and an absolute path, in a line of code. No source describes paths that every Linux machine has.
REACHED = re.compile(r"(?:https?|ftp)://[^\s)>\"'`,;$]+(?![^\s)>\"'`,;])")
ABSOLUTE = re.compile(r"(?:(?<=:-)|(?<![\w./:~})\]*%$\\+-]))(/[A-Za-z][\w-]*)(/[\w./-]*)")
OF_LINUX = ("/bin", "/dev", "/etc", "/home", "/lib", "/path", "/proc", "/sys", "/tmp", "/usr", "/var")


@clause("J3")
def test_addresses_and_places_are_those_of_the_sources(check, site):
    """With one wrong digit in a proxy, a package index or an image's folder, the job fails after waiting in the queue."""
    facts = "\n".join(site.facts)
    # Where facts have addresses of a host, only these are allowed: another index has other builds.
    general = {*shell.GENERAL.split(), "localhost", "127.0.0.1"} - {place(address) for address in REACHED.findall(facts)}
    told = "\n".join([facts, *(source["address"] for source in site.toml.get("sources", []))])
    places = [f"{first}{rest}".rstrip("/") for first, rest in ABSOLUTE.findall(facts) if first not in OF_LINUX]
    for script in map(Script, site.scripts):
        for line in [line for line in script.lines if not line.is_comment and not line.is_to_edit]:
            code = line.text.partition(" # ")[0]
            for address in REACHED.findall(code):
                known = re.search(rf"{re.escape(address.rstrip('/'))}(?![\w-]|[.:]\w)", told)
                if not known and place(address) not in general:
                    yield at(script, line, f"have addresses of [[sources]] alone, and no fact has {address}")
            for first, rest in ABSOLUTE.findall(code):
                path = f"{first}{rest}".rstrip("/")
                # Paths are compared by one component below /appl, the machine's, and two below /opt: /opt/cray is a vendor's.
                begins = "/".join(path.split("/")[: 4 if first == "/opt" else 3])
                alike = [each for each in places if f"{each}/".startswith(f"{begins}/")]
                if alike and not any(f"{path}/".startswith(f"{each}/") or each.startswith(f"{path}/") for each in alike):
                    yield at(script, line, f"have {' or '.join(sorted({*alike}))}, as a fact of [[sources]] says, for {path}")
    port = re.compile(r"://([\w.-]+):(\d+)")
    for host, own in port.findall((site.folder / "README.md").read_text()):
        known = {number for name, number in port.findall(facts) if name == host}
        if known and own not in known:
            yield f"README.md: {host}:{own}, but should be {host}:{' or '.join(sorted(known))}, as a fact of [[sources]] says"


@clause("J3")
def test_what_the_sources_ask_of_a_job_the_site_asks(check, site):
    """The job has the directives that facts name, and loads modules in their order."""
    source_facts = [plain(fact) for fact in site.facts]
    words = [match[1] for fact in source_facts if (match := re.match(r"#SBATCH (--[a-z-]+|-\w)", fact))]
    asked = {(shell.SHORT | shell.OF_SBATCH).get(word, word.lstrip("-")) for word in words}
    lost = asked - {option for script in map(Script, site.job_scripts) for option in script.options}
    for name in sorted(lost):
        fact = "as a fact of [[sources]] in site.toml has; or that fact goes, too"
        yield f"no job script has #SBATCH --{name}, but one should, {fact}"
    of_pbs = [match.groups() for fact in source_facts if (match := re.fullmatch(r"`*(?:#PBS )?-([ejkr]) (\w+)`*", fact))]
    for name, value in of_pbs if site.toml["scheduler"] == "pbs" else ():
        for script in map(Script, site.job_scripts):
            if {*script.options.get(name, "")} != {*value}:  # in any order
                own = f"-{name} {script.options[name]}" if name in script.options else f"no -{name}"
                yield f"{script.path.name}: {own}, but should be -{name} {value}, as a fact of [[sources]] says"
    loaded = [match[1] for fact in source_facts if (match := re.match(r"module load (\S+)$", fact))]
    here = [name for name in site.modules if name in loaded]
    if here != sorted(here, key=loaded.index):
        order = " ".join(sorted(here, key=loaded.index))
        yield f"modules {' '.join(here)}, but should be in the order of the facts of [[sources]]: {order}"


@clause("B10")
def test_options_of_the_scheduler_stand_before_the_script(check, site):
    """Behind the script they are arguments of train.py, which refuses them."""
    pattern = r"\bsbatch(?: [^\s`]+)*? [\w./-]+\.(?:sl|sh)((?: +-{1,2}[\w-]+(?:[= ][^\s`-][^\s`]*)?)+)"
    own = {*shell.OPTIONS["sbatch"].split()} - {"help", "profile"}  # train.py has these flags, too
    for path in (site.folder / "README.md", *site.scripts):
        for words in re.findall(pattern, " ".join(re.sub(r"(?m)^ *#+ ", "", path.read_text()).split())):
            wrong = [name for name in re.findall(r"(?<= )--?([\w-]+)", words) if name in own]
            yield from (f"{path.name}: --{name} behind the script, but should stand before it: sbatch's" for name in wrong)


@clause("B10")
def test_programs_that_users_are_shown_have_the_flags(check, site):
    """In `python sweep.py ... -- ...` flags before the dashes are the program's; the others are train.py's and the core's."""
    shown = [("README.md", (site.folder / "README.md").read_text())]
    shown += [(path.name, path.read_text()) for path in sorted(site.folder.glob("*.py"))]
    of_core = flags_in(ROOT / "core/src", "**/*.py")
    for name, text in shown:
        for line in re.findall(r"/bin/python +([^`\n]*?\.py\b[^`\n]*)", text):
            program, words = re.findall(r"(\w+\.py)(?!.*\.py)(.*)", re.split(r" {3,}|  # ", line)[0])[0]
            path, (own, _, others) = site.folder / program, words.partition(" -- ")
            of_program = flags_in(path.parent, path.name)
            for part, known in ((own, of_program | of_core if program.startswith("train") else of_program), (others, of_core)):
                for flag in re.findall(r"(?<!\S)(--[a-z][\w-]*)", part):
                    if flag not in known:
                        yield f"{name}: {line!r} has {flag}, but should have flags that there are"
    readme = " ".join(shown[0][1].split())
    for program, flag in re.findall(r"/bin/python [^`]*?(\w+\.py)\b[^`]*`[^`.]*; `(--[a-z][\w-]*)", readme):
        of_program = flags_in(site.folder, program)
        known = of_program | of_core if program.startswith("train") else of_program
        if (site.folder / program).is_file() and flag not in known:
            yield f"README.md: {flag} behind a command of {program}, but should be a flag of it"
    # Flags of other programs are free; an abbreviation of a flag of train.py is a mistake.
    elsewhere = "\n".join([*site.facts, *(path.read_text() for path in site.scripts), *(text for _, text in shown[1:])])
    elsewhere += " --".join(["", *shell.OPTIONS["sbatch"].split()])
    for flag in re.findall(r"(?<!\S)(--[a-z][\w-]+)", " ".join(re.findall(r"`(--[^`]*)`", readme))):
        whole = [each for each in sorted(of_core) if each.startswith(flag)]
        if whole and flag not in of_core and not re.search(rf"{flag}(?![\w-])", elsewhere):
            yield f"README.md: {flag}, but should be {' or '.join(whole)}: train.py takes no part of a word"


@clause("B10")
def test_a_look_into_a_running_job_shares_its_cores(check, site):
    """A step without --overlap waits for cores until the job has ended. https://slurm.schedmd.com/srun.html#OPT_overlap"""
    for path in (site.folder / "README.md", *site.scripts):
        for command in re.findall(r"srun [^`\n]*--jobid[^`\n]*", path.read_text()):
            if "--overlap" not in command:
                yield f"{path.name}: {command!r}, but should have --overlap: it waits for the job's end"


@clause("B6")
def test_nothing_is_removed_that_a_user_may_have_named(check, site):
    """`NAME=${NAME:-...}` accepts a user's own folder, which may hold more than the script has put there."""
    for script in map(Script, site.scripts):
        for name in {*re.findall(r"\b([A-Z_]+)=\"?\$\{\1:?-", script.text)}:
            if re.search(rf"\brm -\w*r\w*[^\n;|&]* \"?\$\{{?{name}\}}?[\"'\s/]", script.text):
                yield f"{script.path.name} removes ${name}, which a user may have set, but should what it has made"


@clause("F10")
def test_times_are_told_as_slurm_reads_them(check, site):
    """Slurm reads two numbers as minutes and seconds: `--time=4:00` is not four hours."""
    for path in (site.folder / "README.md", *site.scripts):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            # 30:00 means half an hour, and is intended.
            short = re.findall(r"(?:--time[= ]|(?<!\w)-t )(?:[01]?\d|2[0-4]):\d\d(?![:\d])", line)
            for short_time in short:
                yield f"{path.name}:{number}: {short_time}, but should have hours, minutes and seconds"


@clause("F10")
def test_the_readme_has_the_days_after_which_files_are_purged(check, site):
    facts = [fact for fact in site.facts if "purge" in fact]
    known = {days for fact in facts for days in re.findall(r"(\d+) days", fact)}
    # Only sentences about the fact's file system count: logs and accounts are kept for other times.
    places = "|".join(["scratch", *(word for fact in facts for word in re.findall(r"/\w[\w/]*|\b[A-Z]\w+", fact))])
    unused = r"[^.;]*(?:purge|older than|not used|nobody has (?:read|used))[^.;]*"
    parts = [part for part in re.findall(unused, site.readme) if re.search(rf"(?i)(?<!\w)(?:{places})\b", part)]
    told = {days for part in parts for days in re.findall(r"\b(\d+) days", part)}
    if known and told - known:
        wrong, right = " and ".join(sorted(told - known)), " or ".join(sorted(known))
        yield f"README.md: files are purged after {wrong} days, but should be {right}, as a fact of [[sources]] says"


@clause("B5")
def test_what_has_no_password_listens_on_its_node_alone(check, site):
    """Everybody who can reach the node would read the runs."""
    pattern = r"(?:tensorboard|mlflow|aim)\b[^\n`]*(--bind_all|--host[= ][\"']?(?:0\.0\.0\.0|::|\*))"
    for path in (site.folder / "README.md", *site.scripts, *sorted(site.folder.glob("*.py"))):
        for flag in re.findall(pattern, path.read_text()):
            yield f"{path.name}: {flag}, but should listen on the node itself alone"


@clause("J4")
def test_what_is_to_be_edited_is_marked(check, site):
    def unmarked(line: Line) -> bool:
        return not line.is_comment and to_edit(site, line.text) and not line.is_to_edit

    check.holds(*at_lines(site, unmarked, "stand below a comment `# EDIT:`"))


@clause("J4")
def test_what_is_to_be_edited_is_plain(check, site):
    """Users see a value, not a guess: a variable of their shell may be left from another machine.

    In a directory to be copied it is empty. It is filled in where site.toml has a machine's own account or modules.
    """
    own = site.toml.get("queue", {}).get("account", "")
    filled = (own and not shell.PLACEHOLDER.search(own)) or site.modules
    for script in map(Script, site.scripts):
        for line in [line for line in script.lines if line.is_to_edit]:
            value = re.match(r"(?:export )?\w+=(.*)", line.text)
            if value and re.search(r"\$\{?[A-Z(]|`", value[1]):
                yield at(script, line, "have a plain value, which users see and edit")
            elif value and value[1].strip("'\"()") and not filled and any("Empty" in above for above in line.paragraph):
                yield at(script, line, "be empty, as its comment says of a machine that needs nothing")


def to_edit(site, text: str) -> bool:
    """Return whether the text has a placeholder or a personal value: site.toml's account, mail, a reservation."""
    if text.startswith(("#SBATCH", "#PBS")) and shell.PERSONAL.match(text):
        return True
    account = site.toml.get("queue", {}).get("account")
    text = re.sub(r"\bmktemp\b[^;|&)]*|\.X{6,}", "", text)  # mktemp's template is not a placeholder
    return bool(shell.PLACEHOLDER.search(text) or (account and re.search(rf"(?<![\w-]){re.escape(account)}(?![\w-])", text)))


@clause("J5")
def test_directives_are_directives(check, site):
    for script in map(Script, site.job_scripts):
        for line in script.lines:
            if "\r" in line.text:
                yield at(script, line, "end without a carriage return")
            if shell.NEARLY.match(line.text) and not shell.DIRECTIVE.match(line.text):
                yield at(script, line, "begin with exactly #SBATCH or #PBS and an option")
        for line, text in script.directives:
            if line.number > script.first_command:
                yield at(script, line, f"stand before the first command, line {script.first_command}")
            if re.search(r"\s#", text):
                yield at(script, line, "have no comment behind it")


@clause("J6")
def test_the_port_is_no_constant(check, site):
    should_be = "come from the job's number, or from a free port of rank 0"
    check.holds(*at_lines(site, lambda line: not line.is_comment and shell.CONSTANT_PORT.search(line.text), should_be))


@clause("J7")
def test_scripts_stop_at_the_first_error(check, site):
    check.equal(without_set_euo_pipefail=([path.name for path in site.scripts if not stops(path.read_text())], []))
    shellcheck = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    check.equal(shellcheck=(bool(shellcheck), True))
    command = [shellcheck, "--format=gcc", *(str(path.relative_to(site.folder)) for path in site.scripts)]
    result = subprocess.run(command, cwd=site.folder, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in (result.stdout + result.stderr).splitlines() if not trapped(site, line)]
    check.holds(*(f"{line}, but should pass shellcheck" for line in lines))


def trapped(site, line: str) -> bool:
    """Return whether a function that shellcheck calls unused is called by a trap, or by a function that a trap calls."""
    where = re.match(r"(.+?):(\d+):.*\[SC2329\]$", line)
    text = (site.folder / where[1]).read_text() if where else ""
    name = re.match(r"\s*(?:function )?([\w:.-]+)", text.split("\n")[int(where[2]) - 1]) if where else None
    code = "\n".join(line.text for line in Script(site.folder / where[1]).lines if not line.is_comment) if where else ""
    return bool(name and "trap " in code and len(re.findall(rf"(?<![\w-]){re.escape(name[1])}(?![\w-])", code)) > 1)


@clause("J7")
def test_what_is_switched_off_has_a_reason(check, site):
    scripts = list(map(Script, site.scripts))
    suppressions = [(script, line, reason) for script in scripts for line, reason in script.suppressions]
    for script, line, reason in suppressions:
        if len(re.findall(WORD, reason)) < 3 and not re.search(r"set \+u\b", line.text):
            yield at(script, line, "have its reason beside it or above it")
        if "disable=all" in line.text:
            yield at(script, line, "name what it disables")
    for script in scripts:  # after `set +e`, unless `set -e` follows, errors are ignored
        for line in (line for line, _ in script.suppressions if not line.is_comment):
            later = [turned(other.text, "-") for other in script.lines if other.number > line.number]
            lost = [name for name in turned(line.text, "+") if not any(name in names for names in later)]
            yield from (at(script, line, f"be undone by set -o {name}") for name in lost)


def turned(text: str, sign: str) -> set[str]:
    """Return the options that a line's `set` turns on (-) or off (+)."""
    matches = re.findall(rf"\bset \{sign}([A-Za-z]+)(?: ([a-z]+))?", text)
    names = {name for letters, name in matches if letters.endswith("o")}
    letters = dict(e="errexit", u="nounset")
    names |= {letters[letter] for word, _ in matches for letter in word if letter in letters}
    return names & {"errexit", "nounset", "pipefail"}


def stops(text: str) -> bool:
    """Return whether `set -euo pipefail` is in force, in one line, in several, or by the long names."""
    parts = [part for line in re.findall(r"(?m)^set (-.*)$", text) for part in re.findall(r"-\w+(?: [a-z]+)?", line)]
    return turned("; ".join(f"set {part}" for part in parts), "-") == {"errexit", "nounset", "pipefail"}


@clause("J8")
def test_a_stopped_job_comes_back(check, site):
    if site.toml["scheduler"] != "slurm":
        return  # the cluster rung checks how another scheduler's jobs come back
    for script in map(Script, site.job_scripts):
        if not site.job(script.path).get("trains", True):
            continue  # there is no training to come back to
        options = script.options
        check.equal(open_mode=(options.get("open-mode"), "append"))
        logs = [value for name, value in script.options.items() if name in ("output", "error", "o", "e")]
        # %A is the number of the whole array.
        own = r"%\d*[jJ]|%\d*A.*%\d*a|%\d*a.*%\d*A"
        check.equal(logs_that_jobs_share=([log for log in logs if not re.search(own, log)], []))
        check.equal(**{f"--{option}": (option in options, True) for option in ("requeue", "signal")})
        check.equal(**{"--no-kill, with which it loses its step and not its place": ("no-kill" in options, False)})
        check.holds(*late(site, script, options["signal"]))


# Seconds for a save where site.toml has no save_seconds: 10 GB at 200 MB/s, and the work before and after it.
SAVE_SECONDS = 60


def late(site, script: Script, value: str) -> Iterator[str]:
    """Yield what is wrong with --signal: its receivers, what they do on it, and its time."""
    match, needed = re.fullmatch(r"(?:[RB]+:)?(\w+)(?:@(\d+))?", value), site.job(script.path).get("save_seconds", SAVE_SECONDS)
    if site.toml.get("verified", {}).get("status") != "run-on-site":
        needed = max(needed, SAVE_SECONDS)  # a simulated or missing run says less about the time of a save
    whom = "reach the ranks, and not the batch shell alone"
    if "B" in value.partition(":")[0] and ":" in value and not hands_on(site, match[1] if match else ""):
        yield f"--signal={value}, but should {whom}"
    if not match or match[1].removeprefix("SIG") not in ("USR1", "TERM", "10", "15"):
        yield f"--signal={value}, but should be USR1 or TERM, on which train.py saves"
        return
    seconds, limit = int(match[2] or 60), script.options.get("time", "")
    if seconds < needed:
        yield f"--signal={value}, but should come {needed} s before the time limit or earlier: a save takes as long"
    least = script.options.get("time-min", "")
    if least and minutes(least) * 60 < 2 * seconds + shell.START_SECONDS:
        yield f"--signal={value} of --time-min={least}, but should leave time to start and to train: Slurm may give no more"
    if limit and minutes(limit) * 60 < 2 * seconds + shell.START_SECONDS:
        yield f"--signal={value} of --time={limit}, but should leave time to start, and half of the rest to train"


def hands_on(site, name: str) -> bool:
    """Return whether the batch shell waits for its ranks in the background, and has a trap that passes on this signal."""
    code = "\n".join(line.text for script in map(Script, site.scripts) for line in script.lines if not line.is_comment)
    signal = rf"(SIG)?{name.removeprefix('SIG')}\b"
    parts = (rf"(?m)^\s*trap\s.*\s{signal}", rf"\b(kill|scancel) .*\b{signal}", r"(?<![\w-])wait\b")
    return all(re.search(part, code) for part in parts)


@clause("J9")
def test_the_job_fits_the_node(check, site):
    node = site.toml["node"]
    for script in map(Script, site.job_scripts):
        geometry, job = script.geometry, site.job(script.path)
        path = job.get("tasks_per_node", job["ranks_per_node"])  # one where a launcher on each node starts its ranks
        tasks = geometry.get("ntasks-per-node", path)
        where = f'[job."{script.path.name}"] tasks_per_node of site.toml, or ranks_per_node'
        check.equal(nodes=(script.nodes(node["cores"]), job["nodes"]))
        check.holds(*([f"ntasks-per-node={tasks}, but should be {path}, by {where}"] if tasks != path else []))
        cores = tasks * geometry.get("cpus-per-task", 1)  # schedulers count each thread of a core
        path = (node["cores"] - node.get("reserved_cores", 0)) * node.get("threads_per_core", 1)
        devices = devices_of(script, tasks, job["nodes"], node.get("sockets", 1))
        check.equal(cores_that_a_node_has_not=(max(0, cores - path), 0))
        check.equal(devices_that_a_node_has_not=(max(0, devices - node["devices"]), 0))
        if not job.get("trains", True):
            continue
        check.equal(devices_without_a_rank=(max(0, node["devices"] - job["ranks_per_node"]), 0))
        if devices or ("device_environment" in node and site.toml["scheduler"] == "slurm"):  # Slurm gives only these
            check.equal(devices_that_are_not_asked_for=(max(0, node["devices"] - devices), 0))
        asked = gib(script.options, tasks * geometry.get("cpus-per-task", 1), devices)
        if "memory_gib" in node:  # F2 asks for it
            check.equal(gib_that_a_node_has_not=(max(0, round(asked - node["memory_gib"])), 0))
            if 0 < asked < (half := node["memory_gib"] / 2) and takes_whole_nodes(site, script):
                should_be = f"{half:g} or more: --mem=0 is all of it"
                yield f"{script.path.name}: {asked:g} GiB of a node's memory, but should be {should_be}"
            if {"exclusive", "mem-per-gpu"} <= script.options.keys():  # the devices' parts are all of the node's memory
                # Whole GiB for each device: less than 1 GiB a device may be left.
                rest = max(0, round(node["memory_gib"] - asked) - devices + 1)
                check.equal(gib_of_memory_that_no_device_has=(rest, 0))
        # Sharing alone does not require --mem: some machines give each core or device its share, and refuse the flag.
        told = re.search(r"(?<!\S)--mem(-per-\w+)?[= ]", job.get("geometry", ""))
        if told and not {"mem", "mem-per-cpu", "mem-per-gpu"} & script.options.keys():
            yield f"{script.path.name}: no --mem, but should be, as in `geometry` of site.toml: Slurm's default may be little"


def takes_whole_nodes(site, script: Script) -> bool:
    """Return whether no other job is on its nodes, as site.toml's `queue.exclusive` or the script says."""
    partition = script.options.get("partition", site.toml["node"].get("partition", "batch"))
    return "exclusive" in script.options or partition in site.toml.get("queue", {}).get("exclusive", [partition])


def devices_of(script: Script, tasks: int, nodes: int, sockets: int) -> int:
    """Return the devices of a node that the directives ask for."""
    counts = {"gpus-per-task": tasks, "tres-per-task": tasks, "gpus-per-socket": sockets, "gpus": 1 / nodes, "G": 1 / nodes}
    requested = [devices_by(name, script.options.get(name, "")) * counts.get(name, 1) for name in shell.OF_DEVICES]
    return int(max([*requested, tasks * script.geometry.get("gpus-per-task", 0)]))  # the count may be a flag of srun's


# Directives that keep a job from starting, or undo another directive. https://slurm.schedmd.com/sbatch.html
NEVER = dict.fromkeys(("hold", "begin", "deadline", "nodelist", "w", "no-requeue", "oversubscribe", "s", "contiguous"), "")
NEVER |= dict.fromkeys(("core-spec", "S", "cpus-per-gpu"), "")
NEVER |= {"export": "NIL", "gres": "none", "network": "single_node_vni"}  # only with these values
NEVER |= {"gpu-freq": r"(.*\b)?low\b.*", "cpu-freq": "(?i:low|powersave)", "nice": "(?!0$).*"}
NEVER |= dict.fromkeys(("dependency", "d"), "after.*|expand.*")  # the author's own jobs; `singleton` names no job


@clause("B8")
def test_no_directive_keeps_the_job_from_its_work(check, site):
    for script in map(Script, site.job_scripts if site.toml["scheduler"] == "slurm" else ()):
        for name, value in script.options.items():
            if name in NEVER and re.fullmatch(NEVER[name] or ".*", value):
                directive = f"--{name}={value}" if value else f"--{name}"
                yield f"{script.path.name}: {directive}, but should be left to the command line of sbatch, if at all"


@clause("J13")
def test_no_variable_for_finding_faults_is_left_on(check, site):
    """Also where no dry run comes: in scripts that are run by hand."""

    def for_debugging(line: Line) -> object:
        text = line.text.strip()
        variables = {match[0].partition("=")[0] for match in shell.DEBUGGING.finditer(text)}
        return not line.is_comment and text.startswith("export ") and variables - of_facts

    of_facts = {match[1] for fact in site.facts if (match := shell.SETS.match(fact))}  # a source sets it for the machine
    check.holds(*at_lines(site, for_debugging, "be left to who looks for a fault: it makes every step slower, or hides one"))


@clause("J13")
def test_no_script_traces_itself(check, site):
    for script in map(Script, site.scripts):
        ends = [number for number, line in enumerate(script.lines) if re.match(r"[{\s]*set \+\w*x", line.text)]
        for line in script.lines[max(ends, default=0) :]:
            if shell.TRACES.match(line.text):
                yield at(script, line, "trace nothing unless it is asked to: of each rank the log would have each line")


# ---- the golden trace is right, and a fair thing to compare by -------------------------------------------------------

STEPS = 42  # three epochs of 14


@pytest.fixture(scope="module")
def numpy_trace() -> dict[str, list[float]]:
    return reference.train()


@clause("L8")
@pytest.mark.parametrize("name", ["losses", "eval_losses", "eval_accuracies"])
def test_golden_is_what_numpy_arrives_at(check, numpy_trace, name):
    check.close(golden.load()[name], numpy_trace[name], 1e-12, name)


@clause("L8")
def test_what_is_compared_with_is_recorded(check):
    """Golden trace and reference could be changed together, wrongly: both then differ from their recorded digests."""
    now, before = golden.digests(), golden.recorded()
    check.equal(changed_since_CHANGELOG_md=([name for name in {**now, **before} if now.get(name) != before.get(name)], []))


@clause("L9")
def test_rounding_does_not_grow(check, numpy_trace):
    """Initial parameters moved by 1e-7 (fp32's rounding) move no loss by 1e-5: a larger deviation is not rounding."""
    perturbed = reference.train(perturbation=1e-7)
    assert perturbed["losses"] != numpy_trace["losses"]
    check.close(perturbed["losses"], numpy_trace["losses"], 1e-5, "losses after a perturbation of 1e-7")


@clause("L10")
def test_golden_is_not_vacuous(check, numpy_trace):
    losses, accuracy = golden.load()["losses"], golden.load()["eval_accuracies"][-1]
    check.equal(steps=(len(losses), STEPS), different_losses=(len(set(losses)), STEPS))
    check.equal(falls_to_a_tenth=(losses[-1] < losses[0] / 10, True), learns=(accuracy > 0.9, True))
    other = reference.worst_deviation(reference.train(seed=1, epochs=1)["losses"], losses[:14])
    check.equal(another_seed_differs=(other > 1e-3, True))
    # fp32 must show a learning rate that is off by one in a thousand, or the tolerance T2 says nothing.
    off = reference.worst_deviation(reference.train(lr=0.1001)["losses"], losses)
    check.equal(a_wrong_learning_rate_differs=(off > 1e-4, True))

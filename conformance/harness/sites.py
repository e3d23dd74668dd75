"""The sites of this repository, found by sites/*/site.toml and never by name. SPEC.md has the table of keys that are read."""

import datetime
import functools
import os
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Variables that the tests' own scheduler or MPI has exported. No rank of a site may see them.
FOREIGN = re.compile(r"(SLURM|SRUN|PBS|PALS|PMI|PMIX|MPI|MPIEXEC|MPIR|OMPI|HYDRA|HYDI|TORCHELASTIC)_")
TOLD = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "EXPECT_WORLD"}
# The first line of a shell script; then the suffixes of files that are no scripts, though a script names them.
SHEBANG = re.compile(rb"#!\s*(\S*/env\s+(-\S+\s+)*)?\S*\b(ba|da|z|k)?sh\b")
NO_SCRIPT = {".py", ".toml", ".md", ".ipynb", ".yaml", ".yml", ".json", ".txt", ".out", ".log", ".gz", ".sif", ".safetensors"}
# For [[sources]]: each text's pattern and its description; which keys are days; which keys need another key.
TEXTS = {
    "address": (r"https?://\S+", "an address"),
    "repository": (r"[\w.-]+/[\w.-]+", "owner/name"),
    "commit": (r"[0-9a-f]{7,40}", "7 to 40 hexadecimal digits, in quotes"),
    "file": (r"[^/\s].*", "a path in the repository"),
}
DAYS = ("read", "dated")
# An address that names one commit of one file.
OF_A_COMMIT = re.compile(r"https://github\.com/(?P<repository>[^/]+/[^/]+)/blob/(?P<commit>[0-9a-f]{7,40})/(?P<file>[^#?]+)")
OF_A_THREAD = re.compile(r"/(?:issues|pull)/\d+$")  # no checkout has an issue's text
NEEDED = {"commit": "repository", "file": "repository", "facts": "file"}


def place_of(rank: int, per_node: int, num_nodes: int) -> dict[str, int | str]:
    """Values for the templates of [launchers.environment] about a rank's place. Ranks lie in blocks on equal nodes."""
    values: dict[str, int | str] = dict(rank=rank, world_size=per_node * num_nodes, local_rank=rank % per_node)
    values |= dict(local_world_size=per_node, node_rank=rank // per_node, num_nodes=num_nodes)
    # Slurm's spelling of the ranks on each node: 4 on one node, 4(x2) on two.
    return values | dict(tasks_per_node=per_node if num_nodes == 1 else f"{per_node}(x{num_nodes})")


@dataclass(frozen=True)
class Launch:
    """One launcher of one site."""

    site: str
    launcher: str
    train: Path
    templates: tuple[tuple[str, str], ...]
    mpi: bool

    def __str__(self) -> str:
        return f"{self.site}, {self.launcher}"

    def environ(self, rank: int, world_size: int, num_nodes: int, port: int, job_id: str, restart: int = 0) -> dict[str, str]:
        """What this launcher exports to one rank. Ranks lie in blocks on equal nodes."""
        values = place_of(rank, world_size // num_nodes, num_nodes)
        values |= dict(job_id=job_id, restart=restart, master_addr=os.uname().nodename, master_port=port)
        return {name: template.format(**values) for name, template in self.templates}

    def variables_with(self, placeholder: str) -> list[str]:
        """The variables in which this launcher passes a value on unchanged, world_size for example."""
        return [name for name, template in self.templates if template == f"{{{placeholder}}}"]


OF_A_CHOICE = ("program", "edit", "environment", "options", "install")


@dataclass(frozen=True)
class Case:
    """One way to submit a job of this site: a job script, or a choice that it marks ([[job.choices]])."""

    name: str
    script: str
    launch: Launch
    nodes: int
    ranks_per_node: int
    program: str = "train.py"
    edit: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    options: str = ""
    install: str | None = None  # flags of install.sh if it must run again; {image}: the user's image
    as_it_stands: bool = True  # with the geometry of the script

    def flags(self, image: str) -> list[str]:
        """The flags of install.sh. image: the user's, an address or a path."""
        return [word.replace("{image}", image) for word in shlex.split(self.install or "")]

    def edited(self, text: str) -> str:
        """The script with the edits of this choice. Raises ValueError unless it has each edited line exactly once."""
        for old, new in self.edit.items():
            if text.count(f"\n{old}\n") != 1:
                raise ValueError(f"{self.script} has the line {old!r} {text.count(old)} times, but should have it once")
            text = text.replace(f"\n{old}\n", f"\n{new}\n")
        return text


@dataclass(frozen=True)
class Site:
    folder: Path
    toml: dict

    @property
    def name(self) -> str:
        return str(self.toml.get("name", self.folder.name))

    @property
    def launches(self) -> list[Launch]:
        """The site's launchers, its own first."""
        return [
            Launch(
                site=self.name,
                launcher=launcher.get("name", ""),
                train=self.folder / "train.py",
                templates=tuple(launcher.get("environment", {}).items()),
                mpi=launcher.get("mpi", False),
            )
            for launcher in self.toml.get("launchers", [])
        ]

    @property
    def software(self) -> dict:
        return self.toml.get("software", {})

    @property
    def modules(self) -> list[str]:
        return self.software.get("modules", [])

    @property
    def provides(self) -> list[str]:
        """What the scripts need from modules or the image: `torch`, `NAME=value` and so on."""
        return [word for words in self.software.get("provides", {}).values() for word in words]

    @property
    def facts(self) -> list[str]:
        """Texts in the sources that the site relies on."""
        return [fact for source in self.toml.get("sources", []) for fact in source.get("facts", [])]

    @property
    def readme(self) -> str:
        """README.md on one line, because a sentence may cover several."""
        return " ".join((self.folder / "README.md").read_text().split())

    @property
    def nodes_of_queues(self) -> dict[str, tuple[int, int | None]]:
        """The fewest and the most nodes of each queue, from facts like `| queue | least | most |`."""
        # A cell must be a number alone, or with a footnote: in `| gpu | 80 | 500,000 GB` no column counts nodes.
        row = re.compile(r"\|\s*([\w-]+)\s*\|\s*(\d[\d,]*)\s*(?:\|\s*(\d[\d,]*)(?:\[\^\w+\])?\s*(?:\||$)|\|?\s*$)")
        rows = [match.groups() for match in filter(None, map(row.match, self.facts))]
        return {name: (int(least.replace(",", "")), int(most.replace(",", "")) if most else None) for name, least, most in rows}

    @property
    def most_nodes(self) -> int:
        """The largest of these, at least 1000; at most 20,000, more than any machine has."""
        return min(20_000, max([1000, *(most for _, most in self.nodes_of_queues.values() if most)]))

    @property
    def shares_nodes(self) -> bool:
        """True if nodes of the site's partition are given to several jobs at once."""
        partition = self.toml.get("node", {}).get("partition", "batch")
        return partition not in self.toml.get("queue", {}).get("exclusive", [partition])

    def job(self, script: Path) -> dict:
        """What [job] says about one of the job scripts."""
        job = self.toml["job"]
        return {key: value for key, value in job.items() if not isinstance(value, dict)} | job.get(script.name, {})

    @property
    def job_scripts(self) -> list[Path]:
        """The scripts that are submitted: first the one that `submit` names, then others of `files` with directives."""
        submit = self.folder / self.toml["submit"]
        others = [path for path in self.scripts if path not in self.left_over and has_directives(path)]
        return [submit, *(path for path in others if path != submit)] if submit.is_file() else others

    @property
    def cases(self) -> list[Case]:
        """The job script that `submit` names, as it stands; the others that train; then every choice in [[job.choices]].

        Raises ValueError if a choice names a launcher, a script or a line that is missing.
        """
        own, launches = self.toml["submit"], {launch.launcher: launch for launch in self.launches}
        choices = [dict(name=script.name, script=script.name) for script in self.job_scripts]
        choices = [each for each in choices if self.job(self.folder / each["name"]).get("trains", True)]
        cases = []
        for choice in [*sorted(choices, key=lambda each: each["name"] != own), *self.toml["job"].get("choices", [])]:
            script = self.folder / choice.get("script", own)
            launch = launches.get(choice.get("launcher", self.launches[0].launcher))
            if not launch or not script.is_file():
                raise ValueError(f"{choice} in [[job.choices]], but there is no such launcher or script")
            shape = {name: choice.get(name, self.job(script)[name]) for name in ("nodes", "ranks_per_node")}
            rest = {name: choice[name] for name in OF_A_CHOICE if name in choice}
            cases.append(Case(choice["name"], script.name, launch, **shape, **rest, as_it_stands="options" not in choice))
            cases[-1].edited(script.read_text())
        return cases

    @functools.cached_property
    def left_over(self) -> list[Path]:
        """Job scripts in the folder that `files` does not list, as one of the site that was copied. B2 alone looks at them."""
        listed = {*self.toml.get("files", []), self.toml.get("submit")}
        unlisted = [path for path in self.folder.iterdir() if path.name not in listed and path.is_file() and is_shell(path)]
        return sorted(filter(has_directives, unlisted)) if "files" in self.toml else []

    @functools.cached_property
    def scripts(self) -> list[Path]:
        """The site's shell scripts, and the files in its folder that these name, except documents, data and Python."""
        ahead = [path for path in self.folder.iterdir() if path not in self.left_over and path.is_file() and is_shell(path)]
        scripts: set[Path] = set()
        here = {".", "..", *os.listdir(self.folder)}  # listed once: a look at the disk for every word takes a third of a second
        while ahead:
            scripts.add(script := ahead.pop())
            for word in set(re.findall(r"[\w.+-]+(?:/[\w.+-]+)*", script.read_text(errors="replace"))):
                parts = word.split("/")
                named = [self.folder.joinpath(*parts[start:]) for start, part in enumerate(parts) if part in here]
                texts = [path for path in named if path.suffix not in NO_SCRIPT and path.is_file() and is_text(path)]
                ahead += [path for path in texts if path not in scripts]
        return sorted(scripts)


def is_text(path: Path) -> bool:
    """True for UTF-8 text. install.sh may leave an image or a packed environment, which scripts also name."""
    with open(path, "rb") as file:
        if b"\0" in file.read(4096):
            return False
    try:
        path.read_text()
    except UnicodeDecodeError:
        return False
    return True


def is_shell(path: Path) -> bool:
    return path.suffix in (".sh", ".bash", ".sl", ".pbs", ".slurm") or bool(SHEBANG.match(path.read_bytes()[:80]))


def has_directives(path: Path) -> bool:
    return bool(re.search(r"(?m)^#(SBATCH|PBS) ", path.read_text(errors="replace")))


def find(only: list[str] | None = None) -> list[Site]:
    """All sites, or those with these names or in these folders. Raises ValueError with the name that is missing."""
    known = {path.parent.name: path.parent for path in sorted(ROOT.glob("sites/*/site.toml"))}
    sites = []
    for wanted in only or known:
        folder = known.get(wanted) or Path(wanted).resolve()
        if not (folder / "site.toml").is_file():
            raise ValueError(f"--site {wanted} is neither one of {', '.join(known)} nor a folder with a site.toml")
        try:
            toml = tomllib.loads((folder / "site.toml").read_text())
            sites.append(Site(folder, toml | dict(sources=one_by_one(toml.get("sources", [])))))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{folder / 'site.toml'}: {error} (F2)") from error
    if not sites:
        raise ValueError(f"no site.toml below {ROOT / 'sites'}")
    return sites


def one_by_one(blocks: list[dict]) -> list[dict]:
    """Split [[sources]] into one entry a page. Keys beside `pages` hold for all pages. A GitHub address may give the commit."""
    sources = []
    for block in blocks:
        shared = {key: value for key, value in block.items() if key != "pages"}
        for page in block.get("pages") or [{}]:
            source = shared | (page if isinstance(page, dict) else {"pages": page})
            match = OF_A_COMMIT.fullmatch(str(source.get("address")))
            sources.append((match.groupdict() if match else {}) | source)
    return sources


def mistakes(source: dict) -> list[str]:
    """What is wrong with one entry of [[sources]], as a check words it (F6)."""
    known = [*TEXTS, *DAYS, "facts"]
    wrong = [f"{key}, but should be one of {', '.join(known)}" for key in source if key not in known]
    wrong += [f"no {key}, but should have one" for key in ("address", "read") if key not in source]
    needed = {} if "repository" not in source and OF_A_THREAD.search(str(source.get("address"))) else NEEDED
    wrong += [f"{key}, but should have {other}, too" for key, other in needed.items() if key in source and other not in source]
    for key, value in source.items():
        if key in TEXTS and not (isinstance(value, str) and re.fullmatch(TEXTS[key][0], value)):
            wrong.append(f"{key}={value!r}, but should be {TEXTS[key][1]}")
        if key in DAYS and type(value) is not datetime.date:  # not isinstance: a datetime is a date, too
            wrong.append(f"{key}={value!r}, but should be a day")
    source_facts = source.get("facts", ["-"])
    if not (
        isinstance(source_facts, list) and source_facts and all(isinstance(fact, str) and fact.strip() for fact in source_facts)
    ):
        wrong.append(f"facts={source_facts!r}, but should be texts")
    if "repository" in source and not {"commit", "dated"} & source.keys():
        wrong.append("repository, but should have commit or dated, too: which copy was read?")
    if not wrong and source.get("dated", source["read"]) > source["read"]:
        wrong.append(f"dated={source['dated']}, but should be no later than read={source['read']}")
    return [f"{source.get('address', 'a source')}: {text}" for text in wrong]


def date_of_copy(source: dict) -> datetime.date | None:
    """The day of the copy that was read. None for a commit without one, whose day only a checkout knows."""
    return source.get("dated", None if "commit" in source else source["read"])


def flags_in(folder: Path, pattern: str) -> set[str]:
    """The flags that these programs have: --help, those that stand in quotes, and the core's as fields of TrainConfig."""
    code = "\n".join(path.read_text() for path in sorted(folder.glob(pattern)))
    choices = re.findall(r"(?m)^    (\w+): \w+ = _\w+\(", code)
    return {"--help", *re.findall(r"[\"'](--[a-z][\w-]+)[\"']", code), *(f"--{name.replace('_', '-')}" for name in choices)}


def without_launcher() -> dict[str, str]:
    """This process's environment without the variables that a launcher may have set."""
    return {name: value for name, value in os.environ.items() if not FOREIGN.match(name) and name not in TOLD}

"""Read a site's shell scripts: directives, flags, exported variables, and the comments above them."""

import itertools
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DIRECTIVE = re.compile(r"#(SBATCH|PBS)\s+(-\S.*)$")
NEARLY = re.compile(r"\s*#\s*(SBATCH|PBS)\s*-|#(sbatch|pbs)\s+-")  # ##SBATCH is a directive that its user has switched off
EXPORT = re.compile(r"\s*(?:export|declare -x)\s+(\w+)")
ARRAY = re.compile(r"\s*\w+\+?=\($")
FLAG = re.compile(r"\s+[\"']?(--?[A-Za-z][\w-]*)")
# A here-document whose text goes to the terminal or the log only.
MESSAGE = re.compile(r"\s*cat\s+(1?>&2\s*)?<<-?\s*(['\"]?)\\?([\w-]+)\2\s*(1?>&2\s*)?")
QUOTED = re.compile(r"(['\"])(.*)\1")
ADDRESS = re.compile(r"https?://[^\s)>\"'`,;]+")
# Sources of a comment's reason, besides addresses.
SOURCE = re.compile(r"[\w.-]{2,} (--help|-help|-h)(?![\w-])|\bman (\d )?[A-Za-z]\w+|\bunverified\b")
# Pages about software that is the same on all machines. Pages about one machine belong into [[sources]].
GENERAL = """
docs.python.org docs.pytorch.org pytorch.org download.pytorch.org pip.pypa.io pypi.org docs.conda.io conda.github.io
slurm.schedmd.com docs.kernel.org man7.org docs.nvidia.com huggingface.co apptainer.org docs.sylabs.io cmake.org www.gnu.org
horovod.readthedocs.io github.com/horovod/horovod github.com/NVIDIA/nccl github.com/SchedMD/slurm docs.mpi-forum.org
"""
PLACEHOLDER = re.compile(
    r"<[A-Za-z][\w -]*>|PROJECT_?ID|\b(my|your)_?(account|project|email|user|name)\w*|/path/to|CHANGE_?ME"
    r"|(?<![\w$}.])/(home|users)/(?!(apps?|shared?|public|common|soft(ware)?|sw|opt|modules?|modulefiles|spack)\b)[a-z]\w+"
    r"|\b(TODO|FIXME|TBD)\b|x{4,}|\b\w+@(example|mail|email)\b|@example\.|\bexample\.(com|org|net)\b",
    re.IGNORECASE,
)
# A copier must edit these, whatever they say: who pays, and who gets mail.
PERSONAL = re.compile(r"^#SBATCH\s+(--account|-A|--mail-user|--reservation|--wckey)|^#PBS\s+(-A|-M|-P)")
# Words that switch a check or a safeguard off. The reason must stand in the same line or above it.
SUPPRESSES = re.compile(
    r"#\s*shellcheck (disable=\S+|source=/dev/null)|\bset \+(e|o (errexit|pipefail|nounset))|\bset \+[a-z]*[eu]"
)
CONSTANT_PORT = re.compile(r"(\bexport |^|\s)\w*PORT=[\"']?\d+|--master[-_]port[= ]+\d+|--rdzv[-_](endpoint|id)[= ]\S*:\d+")
# Settings for finding faults. They make every kernel and message wait for the one before, allocate memory each time, or switch
# off compiling and caches; or a failure no longer ends the job; or a device passes as another model.
DEBUGGING = re.compile(
    r"(CUDA_LAUNCH_BLOCKING|HIP_LAUNCH_BLOCKING|AMD_SERIALIZE_(KERNEL|COPY)|(NCCL|RCCL)_(P2P|SHM|IB)_DISABLE)=[\"']?[1-9]"
    r"|NCCL_DEBUG=[\"']?TRACE|TORCH_DISTRIBUTED_DEBUG=[\"']?(DETAIL|INFO)"
    r"|(PYTORCH_NO_(CUDA|HIP)_MEMORY_CACHING|TORCH(DYNAMO|_COMPILE)_DISABLE|MIOPEN_DISABLE_CACHE)=[\"']?[1-9]"
    r"|(TORCH_)?NCCL_ASYNC_ERROR_HANDLING=[\"']?0|FI_LOG_LEVEL=[\"']?(?i:debug|trace|info)|HSA_OVERRIDE_GFX_VERSION=[\"']?\d"
)
# Settings that flood a log, block a thread, or limit NCCL. Checked in ranks, not in scripts: a choice there may use one.
THROTTLING = re.compile(
    r"NCCL_DEBUG=INFO|(CCL|AMD)_LOG_LEVEL=(?i:debug|trace|info|[3-9])|(TORCH_)?NCCL_BLOCKING_WAIT=1|PYTHONMALLOC=\w*debug"
    r"|PYTORCH_NO_XPU_MEMORY_CACHING=1|[NR]CCL_(MAX_NCHANNELS|NCHANNELS_PER_\w+|ALGO|PROTO)=."
)
# Traces each line of a script. An indented line is in a branch that somebody chose, and does not count.
TRACES = re.compile(r"set -([a-z]*x[a-z]*|.* -[a-z]*x[a-z]*|.*\bxtrace)\b|#!.*\bbash -[a-z]*x|[^#\[]*\bbash -[a-z]*x\b")
# The beginning of a fact that sets a variable.
SETS = re.compile(r"[`'\"]?(?:export )?([A-Z][A-Z0-9_]+)=")
NUMBER = re.compile(r"(\d+)(?:-\1)?")  # also Slurm's from-to
SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task"}
SHORT |= dict.fromkeys(("--ppn", "--tasks-per-node"), "ntasks-per-node")
# These letters mean something else to PBS.
OF_SBATCH = {"-A": "account", "-a": "array", "-C": "constraint", "-p": "partition", "-q": "qos", "-t": "time"}

START_SECONDS = 300  # seconds until all ranks of a large job have a signal

# sbatch: `man sbatch` of Slurm 22.05, and tres-per-task of later ones. qsub: OpenPBS (unverified: no PBS was at hand).
OPTIONS = dict(
    sbatch="""
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous core-spec
cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency error exclude exclusive export export-file
extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint
hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mem mem-bind mem-per-cpu mem-per-gpu mincpus
network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket open-mode output overcommit oversubscribe parsable partition prefer priority profile propagate qos quiet
reboot requeue reservation signal sockets-per-node spread-job switches test-only thread-spec threads-per-core time time-min tmp
tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap
A B C D F G H J L M N O Q S V W a b c d e h i k m n o p q s t v w x""",
    qsub="a A c C e f G h I j J k l m M N o p P q r R S u v V W X z",
)


@dataclass(frozen=True)
class Line:
    """One line of a script. paragraph: the comment lines above it, up to the next blank line."""

    number: int
    text: str
    paragraph: list[str]
    above: str  # the line before it

    @property
    def is_comment(self) -> bool:
        return self.text.lstrip().startswith("#") and not DIRECTIVE.match(self.text)

    @property
    def is_to_edit(self) -> bool:
        return any("# EDIT:" in above for above in self.paragraph)


@dataclass(frozen=True)
class Script:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_bytes().decode()  # with the line ends as they are

    @cached_property
    def lines(self) -> list[Line]:
        lines: list[Line] = []
        paragraph: list[str] = []
        above = end = ""
        texts = self.text.split("\n")
        for number, written in enumerate(texts, 1):
            text = "" if end else written  # a message's lines are no commands
            if end:
                end = end if written.strip() != end else ""
            elif match := MESSAGE.fullmatch(written):
                rest = itertools.dropwhile(match[3].__ne__, map(str.strip, texts[number:]))
                to_file = re.match(r"[})]\s*(>(?!&)|\|)|\)", next(itertools.islice(rest, 1, None), "")) and ">&2" not in written
                end = "" if to_file else match[3]
            line = Line(number, text, [*paragraph], above)
            if not text.strip():
                paragraph = []
            elif line.is_comment:
                paragraph.append(text)
            lines.append(line)
            above = text
        return lines

    @property
    def first_command(self) -> int:
        """The number of the first line that is neither blank nor a comment. Schedulers read no directive after it."""
        return next((line.number for line in self.lines if line.text.strip() and not line.text.lstrip().startswith("#")), 0)

    @property
    def variables(self) -> list[tuple[str, str, list[str]]]:
        """(name, default, other values) of rows `NAME=DEFAULT  words; VALUE or VALUE: words` in the script's head."""
        rows = re.findall(r"(?m)^#   ([A-Z_]+)=(\w+) {2,}(.*)$", self.text)
        values = [re.findall(r"(?:^|; )(\w+)(?: or (\w+))?:", words) for *_, words in rows]
        return [(*row[:2], [each for pair in pairs for each in pair if each]) for row, pairs in zip(rows, values, strict=True)]

    @property
    def alternatives(self) -> list[dict[str, str]]:
        """The values of these rows besides the default, as a variable to set for each."""
        return [{name: value} for name, _, values in self.variables for value in values]

    @property
    def training_lines(self) -> list[str]:
        """Lines in the script's head that show how it trains."""
        head = re.findall(r"(?m)^#   (\S.*? train\.py\b[^.\n]*)$", self.text)
        return [line for line in head if f"./{self.path.name} " in line and "..." not in line]

    @property
    def directives(self) -> list[tuple[Line, str]]:
        return [(line, match[2].strip()) for line in self.lines if (match := DIRECTIVE.match(line.text))]

    @property
    def flags(self) -> list[tuple[Line, str]]:
        """The flags in arrays, where each can have a comment above it."""
        flags, inside = [], False
        for line in self.lines:
            if inside and FLAG.match(line.text):
                text = line.text.strip()
                flags.append((line, quoted[2] if (quoted := QUOTED.fullmatch(text)) else text))
            inside = bool(ARRAY.match(line.text)) or (inside and line.text.strip() != ")")
        return flags

    @property
    def exports(self) -> list[tuple[Line, str]]:
        return [(line, match[1]) for line in self.lines if (match := EXPORT.match(line.text))]

    @property
    def suppressions(self) -> list[tuple[Line, str]]:
        """Lines that switch a check off, each with the comments beside and above it."""
        suppressions, above = [], ""
        for line in self.lines:
            match = SUPPRESSES.search(line.text)
            if match and (line.is_comment or "#" not in line.text[: match.start()]):
                suppressions.append((line, f"{line.text[match.end() :].partition('#')[2]} {above}"))
            if not line.is_comment:
                above = ""
            elif "# shellcheck " not in line.text:
                above += f" {line.text}"
        return suppressions

    @property
    def options(self) -> dict[str, str]:
        """Directives by the options' long names. They may say --nodes=2, --nodes 2, -N2 or -N 2, several in a line."""
        options: dict[str, str] = {}
        for line, text in self.directives:
            name, short = "", SHORT | OF_SBATCH if line.text.startswith("#SBATCH") else {}
            for word in shlex.split(text, comments=True):
                match = re.fullmatch(r"(--[\w-]+)=?(.*)|(-\w)(.*)", word, re.DOTALL)
                if match and not (name and re.fullmatch(r"-\d+", word)):
                    name = match[1] or match[3]
                    options[short.get(name, name.lstrip("-"))] = match[2] or match[4] or ""
                elif name:
                    options[short.get(name, name.lstrip("-"))] = word
        return options

    @property
    def geometry(self) -> dict[str, int]:
        """Numbers in Slurm's directives and in flags, by name: nodes, ntasks-per-node, cpus-per-task, gpus-per-node, ..."""
        numbers = {name: int(number[1]) for name, value in self.options.items() if (number := NUMBER.fullmatch(value))}
        for _, text in self.flags:
            if match := re.match(r"(--?[\w-]+?)[= ]*\"?(\d+)\"?$", text):
                numbers[SHORT.get(match[1], match[1].lstrip("-"))] = int(match[2])
        return numbers

    def nodes(self, cores: int) -> int | None:
        """Nodes that the directives ask for; None if they do not say. cores: of a node, for a PBS that is asked for cores."""
        of_pbs = " ".join(text for line, text in self.directives if line.text.startswith("#PBS"))
        return self.geometry.get("nodes") or nodes_asked(f"qsub {of_pbs}", cores)

    @property
    def resources(self) -> dict[str, str]:
        """What `-l` of PBS's directives asks for, by name: select, walltime, ...; "" for one without a value."""
        texts = [text for line, text in self.directives if line.text.startswith("#PBS")]
        lists = [words for text in texts for words in re.findall(r"(?<!\S)-l\s*(\S+)", text)]
        return {name: value for words in lists for name, _, value in (pair.partition("=") for pair in words.split(","))}


def words_of(options: str) -> dict[str, str]:
    """Options of a scheduler's command by name, without dashes; `-v A=1` has the name v."""
    words, values = shlex.split(options), {}
    for word, value in itertools.pairwise([*words, ""]):
        if word.startswith("-"):
            name, equals, own = word.lstrip("-").partition("=")
            values[name] = own if equals else value
    return values


def options_of(command: str, slurm: bool) -> dict[str, str]:
    """Options by their long names, from -p x, -px, --partition x and --partition=x."""
    long = {short.lstrip("-"): name for short, name in (SHORT | OF_SBATCH).items()} if slurm else {}
    try:
        options = words_of(re.sub(r"(?<!\S)(-[A-Za-z])=?(\w\S*)", r"\1 \2", command.partition(" #")[0]))
    except ValueError:
        return {}
    return {long.get(name, name): value for name, value in options.items()}


def handed_on(options: str) -> dict[str, str]:
    """The variables that qsub -v gives a job, with their values."""
    return dict(pair.split("=", 1) for pair in words_of(options).get("v", "").split(",") if "=" in pair)


def nodes_asked(text: str, cores: int) -> int | None:
    """Nodes that options of sbatch or qsub ask for: --nodes=2, -N2, select=2:ncpus=48, or the cores of all, ncpus=96."""
    text = re.sub("[\"']", "", text)
    resources = ",".join(re.findall(r"(?<!\S)-l\s*(\S+)", text))
    of_pbs = resources or "qsub" in text.split()  # whose -N is a job's name
    pattern = r"(?<![^,])(?:select|nodes)=(\d+)" if of_pbs else r"(?<!\S)(?:--nodes[= ]|-N ?)(\d+)"
    if numbers := re.findall(pattern, resources if of_pbs else text):
        return int(numbers[-1])
    of_all = re.search(r"(?<![^,])ncpus=(\d+)", resources)
    return -(-int(of_all[1]) // cores) if of_all else None


def minutes(text: str) -> float:
    """Minutes of Slurm's D-HH:MM:SS, HH:MM:SS, MM:SS and MM; infinity for UNLIMITED and infinite."""
    if text.lower() in ("unlimited", "infinite"):
        return float("inf")
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    parts = [*parts, 0, 0][:3] if days else [0] * (3 - len(parts)) + parts if len(parts) > 1 else [0, parts[0], 0]
    return int(days or 0) * 1440 + parts[0] * 60 + parts[1] + parts[2] / 60


def gib(options: dict[str, str], cpus: int, devices: int) -> float:
    """GiB of a node's memory that Slurm's options ask for. cpus: its --cpus-per-task. devices: its devices."""
    counts = {"mem": 1, "mem-per-gpu": devices, "mem-per-cpu": cpus}
    units = dict(K=2**-20, M=2**-10, G=1, T=2**10)
    asked = [(re.fullmatch(r"(\d+)([KMGT]?)B?", options.get(name, "")), count) for name, count in counts.items()]
    return max((int(match[1]) * units[match[2] or "M"] * count for match, count in asked if match), default=0)


# Options that ask for devices. If an option asks for several things, DEVICE matches the part about devices.
OF_DEVICES = ("gpus-per-node", "gres", "tres-per-node", "gpus-per-task", "tres-per-task", "gpus-per-socket", "gpus", "G")
DEVICE = re.compile(r"(?:gres[/:])?(?:[a-bd-z]pu|dcu|mlu|gcd)(?:[:/][A-Za-z][\w.-]*)?(?:[:=](\d+))?(?:\(.*\))?")


def devices_by(name: str, value: str) -> int:
    """Devices that an option asks for: --gpus-per-node=a100:4, --gres=gpu:a100:4,nvme:100, --tres-per-node=gres/gpu:4, ..."""
    if name.startswith(("gres", "tres")):
        return sum(int(match[1] or 1) for part in value.split(",") if (match := DEVICE.fullmatch(part)))
    match = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?(\d+)", value)
    return int(match[1]) if match else 0


def plain(text: str) -> str:
    """A setting in a shell, simplified: $NAME for ${NAME} and ${NAME:-}, and no quotes."""
    return re.sub(r"\$\{(\w+)(:-)?\}", r"$\1", text).replace('"', "").strip()

"""What conformance reads off a site's shell scripts: directives, flags, exported variables, and the comments above them."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

DIRECTIVE = re.compile(r"#(SBATCH|PBS)\s+(-\S.*)$")
NEARLY = re.compile(r"\s*#[#\s]*(SBATCH|PBS)\s*-|#(sbatch|pbs)\s+-")
EXPORT = re.compile(r"\s*(?:export|declare -x)\s+(\w+)")
ARRAY = re.compile(r"\s*\w+\+?=\($")
FLAG = re.compile(r"\s+(--?[A-Za-z][\w-]*)")
# Where a comment's reason comes from.
SOURCE = re.compile(r"https?://\S|--help|\bunverified\b")
PLACEHOLDER = re.compile(r"<[A-Za-z][\w -]*>|PROJECT_?ID|\b(my|your)_?(account|project|env)\w*|/path/to|CHANGE_?ME|\bTODO\b")
CONSTANT_PORT = re.compile(r"(\bexport |^|\s)\w*PORT=[\"']?\d+|--master[-_]port[= ]+\d+|--rdzv[-_](endpoint|id)[= ]\S*:\d+")
SHORT = {
    "-N": "nodes",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "--ppn": "ntasks-per-node",
    "--tasks-per-node": "ntasks-per-node",
}


@dataclass(frozen=True)
class Line:
    """One line of a script. paragraph: the comment lines that stand above it without a blank line between."""

    number: int
    text: str
    paragraph: list[str]
    above: str  # the line before it

    @property
    def is_comment(self) -> bool:
        return self.text.lstrip().startswith("#") and not DIRECTIVE.match(self.text)


@dataclass(frozen=True)
class Script:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_bytes().decode()  # with its line ends as they are

    @cached_property
    def lines(self) -> list[Line]:
        lines: list[Line] = []
        paragraph: list[str] = []
        above = ""
        for number, text in enumerate(self.text.split("\n"), 1):
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
        """The number of the first line that is neither blank nor a comment: schedulers read no directive after it."""
        return next((line.number for line in self.lines if line.text.strip() and not line.text.lstrip().startswith("#")), 0)

    @property
    def directives(self) -> list[tuple[Line, str]]:
        return [(line, match[2].strip()) for line in self.lines if (match := DIRECTIVE.match(line.text))]

    @property
    def flags(self) -> list[tuple[Line, str]]:
        """The flags that stand in arrays, where a comment can stand above each."""
        flags, inside = [], False
        for line in self.lines:
            if inside and FLAG.match(line.text):
                flags.append((line, line.text.strip()))
            inside = bool(ARRAY.match(line.text)) or (inside and line.text.strip() != ")")
        return flags

    @property
    def exports(self) -> list[tuple[Line, str]]:
        return [(line, match[1]) for line in self.lines if (match := EXPORT.match(line.text))]

    @property
    def geometry(self) -> dict[str, int]:
        """Numbers that directives and flags give by name: nodes, ntasks-per-node, cpus-per-task, gpus-per-node, ..."""
        numbers = {}
        for _, text in [*self.directives, *self.flags]:
            if select := re.search(r"select=(\d+)", text):
                numbers["nodes"] = int(select[1])
            if match := re.match(r"(--?[\w-]+?)[= ]*\"?(\d+)\"?$", text):
                numbers[SHORT.get(match[1], match[1].lstrip("-"))] = int(match[2])
        return numbers

"""A workload's file as text: finds the line that belongs to a finding."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHANGING = ("append", "add", "update", "extend", "insert", "pop", "remove", "clear", "sort", "reverse")  # of a container
HASHED = ("set", "frozenset", "hash")
ORDERLESS = ("sorted", "len", "min", "max", "sum", "any", "all", "set", "frozenset")  # order of the argument has no effect


class Source:
    """lines: the code without comments and docstrings, first line first."""

    def __init__(self, path: Path):
        text = path.read_text()
        self.tree, self.lines = ast.parse(text), text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                self.lines[token.start[0] - 1] = self.lines[token.start[0] - 1][: token.start[1]]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self.lines[node.lineno - 1 : last_line(node)] = [""] * (last_line(node) - node.lineno + 1)

    def nodes(self, below: ast.AST | None = None) -> Iterator[Any]:
        """All nodes that have a line number."""
        return (node for node in ast.walk(below or self.tree) if hasattr(node, "lineno"))

    def functions(self, name: str) -> Iterator[ast.FunctionDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name)

    def function(self, name: str) -> int | None:
        return next((node.lineno for node in self.functions(name)), None)

    def word(self, *words: str, within: str = "") -> int | None:
        """The first line with the first of these words that occurs outside imports.

        within: search only functions of this name, and functions of the file that they call.
        """
        spans = None
        if within:
            inside = [*self.functions(within)]
            names = {last(node.func) for outer in inside for node in self.nodes(outer) if isinstance(node, ast.Call)}
            inside += [node for name in sorted(names - {within}) for node in self.functions(name)]
            spans = [range(node.lineno + 1, last_line(node) + 1) for node in inside]
        numbers = [n for span in spans for n in span] if spans is not None else range(1, len(self.lines) + 1)
        for word in words:
            for number in numbers:
                line = self.lines[number - 1]
                if word in line and not line.lstrip().startswith(("import ", "from ")):
                    return number
        return None

    def call(self, *names: str, bare: bool = False) -> int | None:
        """The first line that calls one of these names. bare: only calls without arguments."""
        calls = [node for node in self.nodes() if isinstance(node, ast.Call) and not (bare and (node.args or node.keywords))]
        return min((node.lineno for node in calls if last(node.func) in names), default=None)

    def unordered(self) -> int | None:
        """The first line that makes a set whose order may matter, or calls hash(): both depend on PYTHONHASHSEED."""
        harmless: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and last(node.func) in ORDERLESS:
                harmless |= {*node.args}
            elif isinstance(node, ast.Compare):
                harmless |= {*node.comparators}
        made = [node for node in self.nodes() if isinstance(node, ast.Set | ast.SetComp) or is_call(node, *HASHED)]
        return min((node.lineno for node in made if node not in harmless), default=None)

    def assignment(self, name: str) -> int | None:
        """The last line that changes a variable, or an attribute if the name has a dot. A line in a loop comes last."""
        kind, name, line_numbers = ast.Attribute if "." in name else ast.Name, name.rpartition(".")[2], []
        for node in self.nodes():
            changed = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            if isinstance(node, ast.Call):
                changed = [keyword.value for keyword in node.keywords]  # generator=self.generator
                changed += node.args if last(node.func) == "next" else []
                if isinstance(node.func, ast.Attribute) and (node.func.attr in CHANGING or in_place(node.func.attr)):
                    changed.append(node.func.value)
            if any(isinstance(bare(part), kind) and last(part) == name for part in changed):
                line_numbers.append(node.lineno)
        return max(line_numbers, default=None)

    def change_in_place(self, *functions: str) -> int | None:
        """The first line where one of these functions changes a value in place."""
        for function in functions:
            for outer in self.functions(function):
                for node in self.nodes(outer):
                    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and in_place(node.func.attr)
                    entry = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
                    if called or entry or isinstance(node, ast.AugAssign):
                        return node.lineno
        return None


def last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def is_call(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def in_place(method: str) -> bool:
    """Whether this is a method like add_, in place by torch's convention."""
    return method.endswith("_") and not method.endswith("__")


def bare(node: ast.AST) -> ast.AST:
    """self.images for self.images[3]."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    return node


def last(node: ast.AST) -> str:
    """The last name of an expression: images for self.images[3]."""
    node = bare(node)
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")

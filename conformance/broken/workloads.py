"""Workload files with one peculiarity each, by name, as the ranks of checks/run have them. noisy.py is a sound one.

A file has a class of workload_classes.py, and before it what the class names of it: imports, functions and other classes.
"""

import ast
import re
from pathlib import Path

HEAD = """\
import os, random, time
import torch
import torch.nn.functional as F
from ddp_core.workloads.digits import Digits
from torch import nn
"""


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module makes."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return {statement.name} if isinstance(statement, ast.ClassDef | ast.FunctionDef) else set()


def files(classes: str) -> dict[str, str]:
    """The text of each workload's file. Its name is that of the class: is_0_of_the_first for Is0OfTheFirst."""
    lines, of_head = classes.splitlines(), set().union(*map(bound, ast.parse(HEAD).body))
    statements = [statement for statement in ast.parse(classes).body if bound(statement) - of_head]
    where = {name: statement for statement in statements for name in bound(statement)}

    def needed(statement: ast.stmt) -> set[ast.stmt]:
        """The statement, and every other one that it needs."""
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        return {statement}.union(*(needed(where[name]) for name in names & where.keys() if where[name] is not statement))

    def text(statement: ast.stmt) -> str:
        first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))
        space = "\n\n" if isinstance(statement, ast.ClassDef | ast.FunctionDef) else ""
        return space + "\n".join([*lines[first - 1 : statement.end_lineno], ""])

    made = {}
    for name, statement in where.items():
        parts = needed(statement)
        bases = [ast.unparse(base) for part in parts for base in getattr(part, "bases", ())]
        if "Digits" in bases and not name.startswith("_"):
            stem = re.sub(r"(?<!^)([A-Z0-9])", r"_\1", name).lower()
            made[stem] = HEAD + "".join(text(part) for part in statements if part in parts)
    return made


WORKLOADS = files(Path(__file__).with_name("workload_classes.py").read_text())
WORKLOADS["syntax"] = HEAD + "\n\nclass Syntax(Digits)\n    pass\n"
WORKLOADS["no_class"] = HEAD + "\n\nclass Model(nn.Linear):\n    pass\n"

"""core/FAULTS.md names a test for each fault, or the reason for none. The test carries the number of its row.

python -m pytest core/tests/test_faults_table.py
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (\d+) \| .* \| (\S[^|]*) \| ([^|]*) \|$", (ROOT / "core/FAULTS.md").read_text(), re.MULTILINE)


@functools.cache
def marks() -> dict[str, set[int]]:
    """The row numbers in the marks of each test in this folder, by file and name."""
    found = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                texts = " ".join(map(ast.unparse, node.decorator_list))
                found[f"{path.name}::{node.name}"] = {int(number) for number in re.findall(r"mark\.fault\((\d+)\)", texts)}
    return found


def test_there_is_a_row_for_each_of_the_64():
    assert [int(number) for number, *_ in ROWS] == list(range(1, 65))


@pytest.mark.parametrize("number, session, tests", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_a_test_that_carries_its_number_or_says_why_there_is_none(number, session, tests):
    names = re.findall(r"`(\S+?)`", tests)
    if session == "none":
        assert re.fullmatch(r"not here: .{30,}", tests), "a reason"
    assert bool(names) == (session != "none")
    for name in names:
        if not name.startswith("conformance/"):
            assert int(number) in marks().get(name, ()), f"{name} is no test with @pytest.mark.fault({number})"
            assert "faults" in session
            continue
        file, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), f"there is no {name}"


def test_a_test_with_a_number_stands_in_its_row():
    named = {number: {*re.findall(r"`(\S+?)`", tests)} for number, _, tests in ROWS}
    assert not [(test, n) for test, numbers in marks().items() for n in numbers if test not in named[str(n)]]

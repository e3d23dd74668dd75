"""Check the keys of site.toml by the table in SPEC.md.

missing(facts), wrong(facts)        violations of F2 and F4, a line each
"""

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Any

from conformance.harness.sites import ROOT

ROW = re.compile(r"^\| `([\w.]+)` \| ([a-z ]+) \| (yes|no) \|", re.MULTILINE)


def all_are(kind: type) -> Callable[[Any], bool]:
    return lambda values: all(type(value) is kind for value in values)


TYPES: dict[str, Callable[[object], bool]] = {
    "text": lambda value: type(value) is str,
    "number": lambda value: type(value) is int,
    "yes or no": lambda value: type(value) is bool,
    "day": lambda value: type(value) is datetime.date,
    "texts": lambda value: type(value) is list and all_are(str)(value),
    "table": lambda value: type(value) is dict,
    "tables": lambda value: type(value) is list and all_are(dict)(value) and bool(value),
    "a text each": lambda value: type(value) is dict and all_are(str)(value.values()),
    "a number each": lambda value: type(value) is dict and all_are(int)(value.values()),
    "texts each": lambda value: type(value) is dict and all(map(TYPES["texts"], value.values())),
}


def table() -> dict[str, tuple[str, bool]]:
    """Key to its type, and whether its table requires it."""
    rows = ROW.findall((ROOT / "conformance/SPEC.md").read_text())
    return {key: (kind, required == "yes") for key, kind, required in rows}


def tables(toml: dict) -> Iterator[tuple[str, str, dict]]:
    """Each table of site.toml: its name in SPEC.md with a final dot, its name in a message, and its content."""
    ahead = [("", "", toml)]
    known = table()
    while ahead:
        yield (at := ahead.pop(0))
        path, name, inside = at
        for key, value in inside.items():
            kind = known.get(f"{path}{key}", ("", False))[0]
            if kind == "table" and isinstance(value, dict):
                ahead.append((f"{path}{key}.", f"{name}{key}.", value))
            elif kind == "tables" and TYPES["tables"](value):
                ahead += [(f"{path}{key}.", f"{name}{key}[{number}].", each) for number, each in enumerate(value)]
            elif path == "job." and isinstance(value, dict):
                ahead.append(("job.SCRIPT.", f"job.{key}.", value))


def missing(toml: dict) -> list[str]:
    """Required keys that are missing."""
    needed = [key for key, (_, required) in table().items() if required]
    return [
        f"no {name}{key.removeprefix(path)} in site.toml, but should be there"
        for path, name, inside in tables(toml)
        for key in needed
        if key.startswith(path) and "." not in key.removeprefix(path) and key.removeprefix(path) not in inside
    ]


def wrong(toml: dict) -> list[str]:
    """Keys that are not in the table, and values of another type."""
    known, violations = table(), []
    for path, name, inside in tables(toml):
        for key, value in inside.items():
            script = path == "job." and type(value) is dict
            kind, _ = known.get("job.SCRIPT" if script else f"{path}{key}", ("", False))
            if not kind:
                violations.append(f"{name}{key}, but should be one of the keys in SPEC.md")
            elif not TYPES[kind](value):
                violations.append(f"{name}{key}={value!r}, but should be of the type: {kind}")
    software = toml.get("software", {})
    known_software = [*software.get("modules", []), software.get("image")]
    strange = [name for name in software.get("provides", {}) if name not in known_software]
    violations += [
        f"software.provides has {name}, which is not in modules, nor the full name of software.image" for name in strange
    ]
    return violations

"""Who knows what: rules that are read off the sources, and the spec's own bookkeeping.

    python -m pytest conformance/test_rules.py [--site NAME_OR_FOLDER]

This needs neither ranks nor torch.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from conformance.sites import ROOT

clause = pytest.mark.clause
CORE = sorted((ROOT / "core/src/ddp_core").rglob("*.py"))
CONFORMANCE = sorted((ROOT / "conformance").rglob("*.py"))
SITES = {path.name for path in (ROOT / "sites").iterdir() if path.is_dir()}
SCHEDULER_VARIABLE = re.compile(r"\b(SLURM|PBS|PALS|PMI|PMIX|OMPI|LSB|JSM|FLUX)_\w*")


def imports(path: Path) -> set[str]:
    """The top-level names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.partition(".")[0])
    return names


def found_in(files: list[Path], pattern: str) -> dict[str, list[str]]:
    """File name to the matches in it."""
    matches = {str(path.relative_to(ROOT)): [m[0] for m in re.finditer(pattern, path.read_text())] for path in files}
    return {name: found for name, found in matches.items() if found}


def names_of(sites: set[str]) -> str:
    """A pattern for the names of these sites; one that matches nothing for none."""
    return r"\b(" + "|".join(map(re.escape, sorted(sites))) + r")\b" if sites else r"(?!)"


@clause("A1")
def test_core_names_no_site(check):
    check.equal("A1", site_names_in_core=(found_in(CORE, names_of(SITES)), {}))


@clause("A1")
def test_conformance_names_no_site(check):
    check.equal("A1", site_names_in_conformance=(found_in(CONFORMANCE, names_of(SITES)), {}))


@clause("A2")
def test_core_reads_no_scheduler_variable(check):
    check.equal("A2", scheduler_variables_in_core=(found_in(CORE, SCHEDULER_VARIABLE.pattern), {}))


@clause("A3")
def test_core_imports_little(check):
    allowed = sys.stdlib_module_names | {"torch", "safetensors", "ddp_core"}
    others = {path.name: sorted(imports(path) - allowed) for path in CORE if imports(path) - allowed}
    check.equal("A3", other_imports_of_core=(others, {}))


@clause("A4")
def test_site_imports_of_ours_only_the_core(check, site):
    files = sorted(site.folder.rglob("*.py"))
    ours = {".", "core", "sites", "conformance", *SITES}
    wrong = {path.name: sorted(imports(path) & ours) for path in files if imports(path) & ours}
    others = names_of(SITES - {site.name})
    named = {path.name: found for path in files if (found := re.findall(others, path.read_text()))}
    check.equal("A4", imports=(wrong, {}), other_sites_named=(named, {}))


@clause("F1", "F2")
def test_files_of_a_site(check, site):
    wanted = ["README.md", "install.sh", site.facts["submit"], "train.py"]
    check.equal("F1", missing_files=([name for name in wanted if not (site.folder / name).is_file()], []))
    texts = {name: type(site.facts.get(name)) for name in ("name", "operator", "scheduler", "launcher", "submit")}
    check.equal("F2", site_toml=(texts, dict.fromkeys(texts, str)), node=(type(site.facts.get("node")), dict))
    check.equal("F2", name=(site.name, site.folder.name), launchers=(bool(site.launches), True))


@clause("F3")
def test_launchers_tell_the_ranks_apart(check, launch):
    """Filled in for the ranks of two nodes, what a launcher exports differs from rank to rank."""
    exported = [launch.environ(rank, 4, 2, 29500, "1") for rank in range(4)]
    check.equal("F3", distinct_ranks=(len({str(environ) for environ in exported}), 4))


@clause("V5")
def test_every_clause_is_tested_or_said_to_be_untested(check):
    spec = (ROOT / "conformance/SPEC.md").read_text()
    clauses = re.findall(r"^- \*\*([A-Z]\d+)\*\*(.*)$", spec, re.MULTILINE)
    untested = {name for name, text in clauses if text.startswith(" (untested)")}
    marks = [re.findall(r"@clause\((.*?)\)", path.read_text()) for path in CONFORMANCE if path.name.startswith("test_")]
    tested = {name for of_file in marks for arguments in of_file for name in re.findall(r'"([A-Z]\d+)"', arguments)}
    names = [name for name, _ in clauses]
    check.equal("V5", clauses_twice=(sorted({name for name in names if names.count(name) > 1}), []))
    check.equal("V5", tested_but_not_in_the_spec=(sorted(tested - {*names}), []))
    check.equal("V5", neither_tested_nor_untested=(sorted({*names} - tested - untested), []))
    check.equal("V5", tested_though_untested=(sorted(tested & untested), []))

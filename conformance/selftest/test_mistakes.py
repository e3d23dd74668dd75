"""A certificate names the mistakes of broken/programs.toml, with their lines. It names nothing that is odd but correct."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from conformance.broken import make
from conformance.harness import sites
from conformance.harness.sites import ROOT
from conformance.selftest.test_certify import certificate

PLANTED = tomllib.loads((ROOT / "conformance/broken/programs.toml").read_text())
# A site where srun gives ranks their numbers: programs with such mistakes read Slurm's variables.
BY_SRUN = next(
    site.name
    for site in sites.find()
    if site.launches and not site.launches[0].mpi and "SLURM_PROCID" in dict(site.launches[0].templates)
)
pytestmark = pytest.mark.timeout(300, method="thread")


def planted(folder: Path, entry: dict) -> list[str]:
    """Write the program with the entry's changes. Returns its lines."""
    program = ROOT / "conformance" / entry.get("program", "broken/sound-program/program.py")
    shutil.copytree(program.parent, folder)
    text = program.read_text()
    for old, new in entry["change"]:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    (folder / "program.py").write_text(text)
    return text.splitlines()


def named(entry: dict) -> str:
    return re.sub(r"\W+", "-", entry["what"])


@pytest.mark.parametrize("mistake", make.chosen(PLANTED["mistake"]), ids=named)
def test_a_mistake_is_named_with_its_line(mistake, tmp_path):
    lines = planted(tmp_path / "mine", mistake)
    code, document = certificate(tmp_path / "mine", "--ranks", "2", "--limit-steps", "12", "--first", "--site", BY_SRUN)
    state = mistake.get("state", "broken")
    assert code == (state == "broken")
    verdicts = [verdict for verdict in document["verdicts"] if verdict["state"] == state]
    saying = [verdict for verdict in verdicts if mistake["says"] in f"{verdict['measured']} {verdict['reason']}"]
    assert saying, f"{mistake['says']!r} is not in {verdicts}"
    if mistake["line"]:
        pointed = [lines[verdict["where"] - 1] for verdict in saying if verdict["where"]]
        assert any(mistake["line"] in line for line in pointed), f"{mistake['line']!r} is not among {pointed}"


@pytest.mark.parametrize("oddity", PLANTED["sound"], ids=named)
def test_what_is_odd_and_sound_breaks_no_promise(oddity, tmp_path):
    planted(tmp_path / "mine", oddity)
    code, document = certificate(tmp_path / "mine", "--ranks", "2", "--limit-steps", "8")
    assert code == 0, [verdict for verdict in document["verdicts"] if verdict["state"] == "broken"]

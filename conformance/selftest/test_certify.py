"""The certificate of a scientist's own program names the mistakes of broken/programs.toml, and complains of no sound one."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conformance.certify.__main__ import main
from conformance.harness import sites
from conformance.harness.sites import ROOT

PROGRAMS = ROOT / "conformance/programs"
SOUND = ROOT / "conformance/broken/sound-program"
MISTAKES = tomllib.loads((ROOT / "conformance/broken/programs.toml").read_text())["mistake"]
# One whose ranks srun tells who they are: the mistakes that ask for it ask Slurm.
BY_SRUN = next(
    site.name
    for site in sites.find()
    if site.launches and not site.launches[0].mpi and "SLURM_PROCID" in dict(site.launches[0].templates)
)
pytestmark = pytest.mark.timeout(300, method="thread")


def certificate(folder: Path, *flags: str) -> tuple[int, dict]:
    code = main(["--workload", str(folder / "program.py"), "--output", str(folder / "out"), *flags])
    return code, json.loads((folder / "out/certificate.json").read_text())


def planted(folder: Path, mistake: dict) -> list[str]:
    """The program with the mistake in it; its lines."""
    shutil.copytree(SOUND, folder)
    text = (folder / "program.py").read_text()
    for old, new in mistake["change"]:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    (folder / "program.py").write_text(text)
    return text.splitlines()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: re.sub(r"\W+", "-", mistake["what"]))
def test_a_mistake_is_named_with_its_line(mistake, tmp_path):
    lines = planted(tmp_path / "mine", mistake)
    code, found = certificate(tmp_path / "mine", "--ranks", "2", "--limit-steps", "12", "--first", "--site", BY_SRUN)
    state = mistake.get("state", "broken")
    assert code == (state == "broken")
    told = [verdict for verdict in found["verdicts"] if verdict["state"] == state]
    named = [verdict for verdict in told if mistake["says"] in f"{verdict['measured']} {verdict['reason']}"]
    assert named, f"{mistake['says']!r} is not in {told}"
    if mistake["line"]:
        pointed = [lines[verdict["where"] - 1] for verdict in named if verdict["where"]]
        assert any(mistake["line"] in line for line in pointed), f"{mistake['line']!r} is not among {pointed}"


@pytest.mark.parametrize("program", ["program.py", *sorted(path.name for path in PROGRAMS.glob("*.py"))])
def test_sound_programs_break_no_promise(program, tmp_path):
    """By the command that users give."""
    file = (SOUND if program == "program.py" else PROGRAMS) / program
    command = [sys.executable, "-m", "conformance", "--workload", str(file), "--ranks", "2", "--limit-steps", "8"]
    command += ["--output", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "certificate.json").read_text())
    assert len([verdict for verdict in found["verdicts"] if verdict["state"] == "kept"]) >= 15
    page = (tmp_path / "certificate.html").read_text()
    assert "<svg" in page and "fp64" in page and found["hashes"]["program"] in page
    assert found["hashes"]["program"] in (tmp_path / "certificate.md").read_text()


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--workload no.py", "is no file"),
        ("--workload {} --ranks two", "should be numbers"),
        ("--workload {} --site x", "--site x"),
    ],
)
def test_what_cannot_be_certified_is_one_line(flags, says):
    command = [sys.executable, "-m", "conformance", *flags.format(SOUND / "program.py").split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and says in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr

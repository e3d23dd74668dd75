"""The certificate of a sound program breaks no promise: every program of programs/, and broken/sound-program's.

python -m pytest conformance/selftest/test_sound_programs.py
"""

import json
import subprocess
import sys

import pytest

from conformance.harness.sites import ROOT

SOUND, PROGRAMS = ROOT / "conformance/broken/sound-program", ROOT / "conformance/programs"

pytestmark = pytest.mark.timeout(300, method="thread")


@pytest.mark.parametrize("program", ["program.py", *sorted(path.name for path in PROGRAMS.glob("*.py"))])
def test_sound_programs_break_no_promise(program, tmp_path):
    """The test runs the command that users run."""
    file = (SOUND if program == "program.py" else PROGRAMS) / program
    command = [sys.executable, "-m", "conformance", "--workload", str(file), "--ranks", "2", "--limit-steps", "8"]
    command += ["--output", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert len([verdict for verdict in document["verdicts"] if verdict["state"] == "kept"]) >= 15
    page = (tmp_path / "certificate.html").read_text()
    assert "<svg" in page and "fp64" in page and document["hashes"]["program"] in page
    assert document["hashes"]["program"] in (tmp_path / "certificate.md").read_text()

"""A run with a broken standard output goes on and ends with 0, and its record is complete.

python -m pytest core/tests/test_output.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_core.output import Lasting

PROGRAM = (
    "import sys; from ddp_core import Rank, run; sys.exit(run(lambda environ: Rank(0, 1, 0, 1, 0, '127.0.0.1', 1, 'job')))"
)
FLAGS = "--device cpu --epochs 3 --steps-per-epoch 4 --log-every 1"


def ended(folder: Path, where: str, **environ: str) -> subprocess.CompletedProcess:
    """Run `python train.py FLAGS` in a shell with this redirection. Standard output of the result is the exit code."""
    command = f'"{sys.executable}" -c "$PROGRAM" {FLAGS} --run-dir "{folder}" {where}'
    told = dict(os.environ) | dict(PROGRAM=PROGRAM) | environ
    return subprocess.run(["bash", "-c", command], env=told, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "where, warns",
    [
        ("| head -n 1 > /dev/null; echo ${PIPESTATUS[0]}", "Broken pipe"),
        ("> /dev/full; echo $?", "No space left on device"),
        (">&-; echo $?", ""),
        (">&- 2>&-; echo $?", ""),
        ("> /dev/full 2>&1; echo $?", ""),
    ],
)
def test_a_run_ends_well_whatever_becomes_of_its_output(tmp_path, where, warns):
    result = ended(tmp_path / "run", where)
    assert result.stdout.split()[-1] == "0", result
    assert "Traceback" not in result.stderr and warns in result.stderr
    records = [json.loads(line) for line in (tmp_path / "run/run.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [*range(12)]
    assert records[-1]["kind"] == "end" and records[-1]["exit_code"] == 0


def test_a_folder_s_name_that_ascii_does_not_know_is_spelt(tmp_path):
    result = ended(tmp_path / "Läufe", "", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0 and "L\\xe4ufe" in result.stdout and not result.stderr


def test_a_stream_that_was_closed_is_given_up(tmp_path, capsys):
    closed = Lasting(open(tmp_path / "file", "w"))  # noqa: SIM115
    closed.close()
    assert closed.write("words") == 5
    closed.flush()
    assert "standard output cannot be written" in capsys.readouterr().err

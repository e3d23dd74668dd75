"""find_run prints the run directory for a job script's flags, without importing torch.

python -m pytest core/tests/test_find_run.py
"""

import subprocess
import sys

import pytest
from ddp_core.config import parse
from ddp_core.find_run import find_run

FLAGS = [
    "",
    "--epochs 3 --lr 0.1",
    "--workload regression",
    "--run-dir here",
    "--run-dir=here --epochs 3",
    "--new-run-dir there",
    "--new-run-dir there --run-dir here",
    "--run-dir here --new-run-dir there",
    "--workload gpt --model-size tiny --new-run-dir=there",
    "--run-dir one --run-dir two",
]


@pytest.mark.parametrize("flags", FLAGS)
def test_it_is_where_the_run_will_be(flags):
    assert find_run(flags.split()) == parse(flags.split(), 1).run_dir


def test_so_for_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("from small import *\n\nclass Mine(Small):\n    pass\n")
    flags = ["--workload", str(tmp_path / "mine.py")]
    assert find_run(flags) == parse(flags, 1).run_dir == "runs/mine"


def command(program: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *program.split(), *flags], capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_it_and_imports_no_torch():
    done = command("-X importtime -m ddp_core.find_run", "--new-run-dir", "there", "--epochs", "3")
    assert (done.returncode, done.stdout) == (0, "there\n")
    assert "torch" not in done.stderr and "argparse" in done.stderr


def test_wrong_usage_is_one_line_and_2():
    done = command("-m ddp_core.find_run", "--run-dir")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1

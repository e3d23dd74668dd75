"""Every entry of broken/*.toml is rejected, by the clause that it breaks, and with a reason.

    python -m pytest conformance/selftest/test_broken.py                    all entries: some minutes
    python -m pytest conformance/selftest/test_broken.py -k momentum -rP    one entry, with its rejection message

Entries that need an accelerator run under `--device cuda`. Under `--cluster`, only entries that need a scheduler run.
"""

import shutil

import pytest

from conformance.broken import make

clause, only = pytest.mark.clause, pytest.mark.only
NEEDS = {"": [], "accelerator": only(devices=("cuda", "xpu"))}


def pytest_generate_tests(metafunc):
    on_cluster = metafunc.config.getoption("--cluster")
    those = [one for one in make.load() if one.kind != "jobs" and (one.kind == "cluster") == on_cluster]
    params = [pytest.param(broken, id=broken.what, marks=NEEDS[broken.needs]) for broken in make.chosen(those)]
    metafunc.parametrize("broken", params)


@clause("V6")
@pytest.mark.timeout(360)
def test_broken_is_rejected(broken, tmp_path, pytestconfig):
    root = broken.make(tmp_path)
    make.rejected(broken.run(root, pytestconfig.getoption("--device")), broken.clause, broken.says)
    shutil.rmtree(root)

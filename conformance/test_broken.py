"""Everything in broken/*.toml is rejected by the clause that it breaks, and says why.

    python -m pytest conformance/test_broken.py                    all of them: some minutes
    python -m pytest conformance/test_broken.py -k momentum -rP    one, and the words of its rejection

Those that need an accelerator are there under `--device cuda`.
"""

import shutil

import pytest

from conformance.broken import make

clause, only = pytest.mark.clause, pytest.mark.only
NEEDS = {"": [], "accelerator": only(devices=("cuda", "xpu"))}
EVERY = [pytest.param(broken, id=broken.what, marks=NEEDS[broken.needs]) for broken in make.load()]


@clause("V6")
@pytest.mark.parametrize("broken", EVERY)
def test_broken_is_rejected(broken, tmp_path, pytestconfig):
    root = broken.make(tmp_path)
    make.rejected(broken.run(root, pytestconfig.getoption("--device")), broken.clause, broken.says)
    shutil.rmtree(root)

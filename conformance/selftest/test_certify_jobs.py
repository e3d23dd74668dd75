"""The certificate of a program in jobs of a site's own script, on the site's virtual cluster.

    python -m pytest conformance/selftest/test_certify_jobs.py --cluster

Needs root and Slurm; `nox -s cluster` runs it. test_certify.py has the tests that need neither.
"""

import json
import shutil

import pytest

from conformance.certify.virtual import on_virtual_cluster
from conformance.harness import sites
from conformance.harness.sites import ROOT

pytestmark = pytest.mark.timeout(400, method="thread")

SOUND = ROOT / "conformance/broken/sound-program"
BY_SLURM = next(
    site for site in sites.find() if site.toml["scheduler"] == "slurm" and any(not launch.mpi for launch in site.launches)
)
# Rows depend on the host's name. Ranks on a single host cannot show this mistake.
BY_HOST = [
    "        return Waves(waves[:240]",
    "        waves = waves + len(os.uname().nodename[-1]) * int('2' in os.uname().nodename)\n",
]
BY_HOST[1] += BY_HOST[0]


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "data that depend on the host"])
def test_a_program_is_judged_in_jobs(broken, tmp_path, monkeypatch, pytestconfig):
    shutil.copytree(SOUND, tmp_path / "mine")
    if broken:
        text = (tmp_path / "mine/program.py").read_text().replace("import random\n", "import os\nimport random\n")
        assert text.count(BY_HOST[0]) == 1
        (tmp_path / "mine/program.py").write_text(text.replace(*BY_HOST))
    monkeypatch.chdir(tmp_path)
    flags = ["--ranks", "2", "--limit-steps", "4", *["--first"] * broken]
    code = on_virtual_cluster(BY_SLURM, str(tmp_path / "mine/program.py"), pytestconfig.getoption("--tree"), flags)
    document = json.loads((tmp_path / f"certificates/program-{BY_SLURM.name}/certificate.json").read_text())
    of_jobs = {verdict["promise"]: verdict for verdict in document["verdicts"] if "in a job at" in verdict["promise"]}
    assert code == broken, [verdict for verdict in document["verdicts"] if verdict["state"] == "broken"]
    if broken:
        assert [verdict["state"] for verdict in of_jobs.values()] == ["broken"], of_jobs
        return
    stopped = next(verdict for promise, verdict in of_jobs.items() if promise.startswith("stopped"))
    assert {verdict["state"] for verdict in of_jobs.values()} == {"kept"} and len(of_jobs) >= 5, of_jobs
    assert "went on at step" in stopped["measured"]
    assert "job-stopped-on" not in [run["name"] for run in document["runs"]]  # Slurm requeued the job

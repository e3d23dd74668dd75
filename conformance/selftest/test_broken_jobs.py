"""Every entry of broken/jobs.toml is rejected by the clause that it breaks. All their jobs share one virtual cluster.

    python -m pytest conformance/selftest/test_broken_jobs.py --cluster [-k WORDS -rP]

Needs root and Slurm; `nox -s cluster` runs it. A cluster and an installation per entry would take minutes each.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.broken import make
from conformance.cluster import layer
from conformance.cluster.jobs import Odd, Submitter
from conformance.cluster.plain import Plain, of_the_core
from conformance.cluster.virtual import VirtualSite
from conformance.harness import sites

clause = pytest.mark.clause
ENTRIES = make.chosen([broken for broken in make.load() if broken.kind == "jobs"])
SMALL = dict(options="--nodes=2 --ntasks-per-node=1 --gpus-per-node=1", nodes=2, ranks=1)


@pytest.fixture(scope="session")
def faults(request, tmp_path_factory, pytestconfig) -> dict[str, list[str]]:
    """The failures that the checks find for each chosen entry, by its name, and for the unchanged site under ""."""
    (site,) = sites.find([make.LISTS["jobs"]])
    chosen = {item.callspec.params["broken"].what for item in request.session.items if "faults" in item.fixturenames}
    with VirtualSite(site, tmp_path_factory.mktemp("c"), 3, layer.build, tree=pytestconfig.getoption("--tree")) as cluster:
        cluster.slow_disk(1.5)
        sound = cluster.put_site("sound")
        assert cluster.on("login", "./install.sh", folder=sound).returncode == 0

        def faults_of(broken: make.Broken | None) -> list[str]:
            name = f"broken-{ENTRIES.index(broken)}" if broken else "sound"
            user = Submitter(cluster, site, cluster.put_site(name) if broken else sound)
            if broken:
                broken.apply(user.here)
            if broken and broken.clause != "J19":
                cluster.on("login", f"cp -r {sound}/packages .", folder=user.folder)
                if any(change["file"] == "install.sh" for change in broken.change):
                    cluster.on("login", "./install.sh", folder=user.folder)
            cluster.on("login", "mkdir -p runs/earlier && echo {} >runs/earlier/run.jsonl", folder=user.folder)
            if broken and broken.clause == "A5":
                return of_the_core(user.here)
            try:
                job = Plain(user, site.cases[0], slow=None, watched=user.here, **SMALL).submit().runs(60)
            except Odd as odd:
                return [str(odd)]
            if broken and broken.clause == "J19":
                return job.before_install()
            return job.faults()

        entries = [None, *(broken for broken in ENTRIES if broken.what in chosen)]
        with ThreadPoolExecutor(4) as pool:
            return dict(zip([entry.what if entry else "" for entry in entries], pool.map(faults_of, entries), strict=True))


@clause("V6")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("broken", [pytest.param(broken, id=broken.what) for broken in ENTRIES])
def test_broken_job_is_rejected(broken, faults):
    assert faults[""] == [], "the site that broken ones are made from"
    lines = faults[broken.what]
    assert any(broken.says in line for line in lines), f"{lines}, but one should have {broken.says!r}"
    print(*lines, sep="\n")

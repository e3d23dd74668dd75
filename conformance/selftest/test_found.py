"""Software and disks that a job finds on a site's virtual cluster: modules, conda, containers, disks, no network.

    python -m pytest conformance/selftest/test_found.py --cluster [--site NAME_OR_FOLDER]

Needs root and Slurm; `nox -s cluster` runs it. test_layer.py has the tests that need neither.
"""

import subprocess

import pytest

from conformance.cluster import layer
from conformance.cluster.shape import interfaces_of
from conformance.cluster.virtual import MODULES, USER, VirtualSite

only = pytest.mark.only


def login(cluster: VirtualSite, node: str, command: str) -> subprocess.CompletedProcess:
    return cluster.on(node, ["bash", "-lc", command])


def test_modules_are_those_of_site_toml(cluster, site):
    """Each module loads from the path that the scripts use. An unknown module fails with Lmod's own message."""
    modules = layer.modules_at(site)
    load = [f"{f'module use {used} && ' if used else ''}module load {' '.join(names)}" for used, names in modules.items()]
    node = cluster.names[0]
    loaded = login(cluster, node, " && ".join([*load, 'echo "$LOADEDMODULES"']))
    assert loaded.returncode == 0, loaded.stderr
    assert {*loaded.stdout.strip().split(":")} >= {name for names in modules.values() for name in names}
    for name in ["no-such-module", *(f"{name.partition('/')[0]}/0.0" for names in modules.values() for name in names)]:
        missing = login(cluster, node, "; ".join([*load[:-1], f"module load {name}"]))
        assert missing.returncode == 1, missing.stdout
        assert "The following module(s) are unknown" in missing.stderr


@only(when=lambda site: "conda/bin" in layer.stand_ins(site))
def test_conda_activates_nothing_before_init(cluster, site):
    for name in site.toml["software"]["modules"]:
        if "conda" in layer.provided(site, name):
            output = login(cluster, cluster.names[0], f"module load {name} && conda activate base")
            assert output.returncode and "Run 'conda init' before 'conda activate'" in output.stderr, output
            output = login(cluster, cluster.names[0], f"module load {name} && source activate /no-such-environment")
            assert output.returncode and "EnvironmentLocationNotFound" in output.stderr, output


@only(when=lambda site: "image" in site.toml["software"])
def test_a_container_has_torch_and_no_scheduler(cluster, site):
    """A container does not see this machine's folders. (test_layer.py: a missing image or an unknown flag is an error.)"""
    image, file = site.toml["software"]["image"], layer.image_file(site)
    start, show, named = ("singularity exec", "--bind", file) if file else ("shifter", "--volume", f"--image={image}")
    node = cluster.names[0]
    inside = cluster.on(node, f"{start} {named} sh -c 'python -c \"import torch; print(torch.__version__)\"; command -v srun'")
    assert inside.returncode == 127 and inside.stdout.count("\n") == 1 and not inside.stderr, inside
    assert "No such file" in cluster.on(node, f"{start} {named} ls {MODULES}").stderr
    assert ".lua" in cluster.on(node, f"{start} {show}={MODULES}:/shown {named} ls -A /shown").stdout


def test_no_network_leads_out(cluster, site):
    """The failure comes at once: nothing waits for a name server, and pip does not retry."""
    for node in ("login", cluster.names[0]):
        assert "Network is unreachable" in cluster.on(node, "echo >/dev/tcp/192.0.2.1/443", timeout=20).stderr
        assert cluster.on(node, "getent hosts pypi.org", timeout=20).returncode == 2
        pip = f"{layer.PLAIN}/bin/python3 -m pip"
        lacking = cluster.on(node, f"{pip} download --no-deps --index-url https://pypi.org/simple six").stderr
        assert "No matching distribution found for six" in lacking and "Retrying" not in lacking, lacking
    addresses = cluster.on(cluster.names[0], "ip -o address show up | awk '{print $2}'").stdout.split()
    assert {*addresses} == {"lo", *interfaces_of(site)}


@only(schedulers=["slurm"])
def test_a_broadcast_reaches_each_nodes_own_disk(cluster, site):
    """sbcast writes where the scripts expect it. The disk belongs to the user and is empty at first."""
    disks = [disk.format(user=USER) for disk in layer.local_disks(site)]
    for disk in disks:
        for node in cluster.names:
            assert cluster.on(node, f"stat -c %U {disk}; ls -A {disk}").stdout.split() == [USER]
        cluster.on(cluster.names[0], f"touch {disk}/here")
        assert cluster.on(cluster.names[1], f"ls {disk}").stdout == ""
    place = f"{disks[0] if disks else '/tmp'}/broadcast"
    account = [f"--account={site.toml['queue']['account']}"] if "account" in site.toml.get("queue", {}) else []
    cluster.on("login", "echo sent > ~/sent")
    copied = ["bash", "-c", f"sbcast ~/sent {place} && srun --ntasks-per-node=1 bash -c 'cat {place}; hostname'"]
    nodes = cluster.names[:2]
    output = cluster.on("login", ["salloc", *account, "--quiet", f"--nodelist={','.join(nodes)}", "--time=5", *copied])
    assert sorted(output.stdout.split()) == sorted(["sent", "sent", *nodes]), output
    assert cluster.on("login", f"ls {place}").returncode

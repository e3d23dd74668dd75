"""The configuration of a virtual cluster is text made from site.toml. These tests need neither root nor Slurm.

python -m pytest conformance/selftest/test_virtual.py
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from conformance.cluster import jobs, layer, placement, shape, tree, virtual
from conformance.cluster.schedulers import Status
from conformance.harness.sites import Site

THREADS = dict(
    name="made-up",
    scheduler="slurm",
    node=dict(
        partition="wide",
        cores=8,
        sockets=2,
        threads_per_core=2,
        reserved="0,4",
        reserved_cores=2,
        memory_gib=16,
        devices=2,
        devices_visible_to_a_rank=1,
        device_environment="ROCR_VISIBLE_DEVICES",
        cores_near_device=["4-7", "0-3"],
        interfaces=["fab0", "fab1"],
        hosts="n{:04d}",
        domain="fab.example.org",
    ),
    queue=dict(partitions=["wide", "small"], constraints=["disk"], exclusive=["wide"]),
    job=dict(nodes=1, ranks_per_node=2),
)


def made_up(**node) -> Site:
    return Site(Path("made-up"), THREADS | dict(node=THREADS["node"] | node))


# ---- from site.toml -------------------------------------------------------------------------------------------------


def test_a_node_as_site_toml_says():
    text = shape.slurm_conf(made_up(), ["n0001", "n0002"], {})
    assert (
        "NodeName=n0001,n0002 Sockets=2 CoresPerSocket=4 ThreadsPerCore=2 RealMemory=16384 Gres=gpu:2 "
        "CpuSpecList=0,1,8,9 Feature=disk\n"
    ) in text
    assert "PartitionName=wide Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE State=UP\n" in text
    assert "PartitionName=small Nodes=ALL Default=NO OverSubscribe=NO State=UP\n" in text
    assert shape.gres_conf(made_up()) == (
        "Name=gpu File=/dev/gpu0 Flags=amd_gpu_env Cores=4-7\nName=gpu File=/dev/gpu1 Flags=amd_gpu_env Cores=0-3\n"
    )
    assert shape.topology(made_up()) == "pack:2 core:4 pu:2(indexes=2*8:8*1)"


@pytest.mark.parametrize(
    "node, should_say",
    [
        (dict(cores=0), "cores=0, but should be 1 or more"),
        (dict(memory_gib="16"), "memory_gib='16', but should be 1 or more"),
        (dict(reserved="0,8"), "reserved='0,8', but should have cores of 0 to 7"),
        (dict(cores_near_device=["0-3", "4-8"]), "cores_near_device=['0-3', '4-8'], but should have cores of 0 to 7"),
        (dict(reserved="all"), "reserved='all', but cores should be told as in 0-3,8"),
        (dict(hosts="n{name}"), "hosts='n{name}', but should have one {}, for the number of the node"),
    ],
)
def test_what_no_node_can_be_is_told(tmp_path, node, should_say):
    """Such values stand in a site that new_site.py made and nobody has filled in. broken/sites.toml has more (F4)."""
    assert shape.impossible(made_up(**node)) == [f"[node] {should_say}"]
    with pytest.raises(virtual.NoCluster, match=re.escape(f"made-up/site.toml: [node] {should_say}")):
        virtual.VirtualSite(made_up(**node), tmp_path)


def test_a_site_that_says_little():
    """The site has only the keys that F4 requires."""
    site = Site(
        Path("made-up"), dict(name="made-up", scheduler="slurm", node=dict(cores=4, memory_gib=1, devices=0, interfaces=[]))
    )
    text = shape.slurm_conf(site, shape.names_of(site, 2), {"KillWait": "5"})
    assert "NodeName=node001,node002 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1024\n" in text
    assert "PartitionName=batch Nodes=ALL Default=YES" in text
    assert "KillWait=5\n" in text and "Gres" not in text
    assert shape.gres_conf(site) == ""
    assert shape.topology(site) == "pack:1 core:4 pu:1"
    assert "10.253.0.11 node001 node001-eth0\n" in shape.hosts_file(site, ["node001"], [])


@pytest.mark.parametrize(
    "near, sockets", [(["4-7", "0-3"], 2), (["0-3", "4-7"], 2), (["0-7", "0-7"], 1), (["0-1,6-7", "0-1,6-7"], 4), ([], 1)]
)
def test_a_newer_slurm_has_whole_sockets_near_a_device(near, sockets):
    site = made_up(sockets=1, cores_near_device=near)
    assert shape.shape(site, (24, 11)) == (sockets, 8 // sockets, 2)
    assert shape.shape(site, (24, 5)) == shape.shape(site) == (1, 8, 2)
    assert f" Sockets={sockets} CoresPerSocket={8 // sockets} " in shape.slurm_conf(site, ["n0001"], {}, (25, 5))
    assert shape.topology(site, (24, 11)).startswith(f"pack:{sockets} core:{8 // sockets} ")


def test_every_site_has_a_cluster(site):
    """The configuration is complete and has this site's numbers. Every CPU that Slurm counts exists on the node."""
    node = site.toml["node"]
    text = shape.slurm_conf(site, shape.names_of(site, 2), {})
    fields = {name: int(value) for name, value in re.findall(r"(Sockets|CoresPerSocket|ThreadsPerCore|RealMemory)=(\d+)", text)}
    assert fields["Sockets"] * fields["CoresPerSocket"] == node["cores"]
    assert fields["RealMemory"] == node["memory_gib"] * 1024
    assert text.count("Default=YES") == 1
    reserved = re.search(r"CpuSpecList=(\S+)", text)
    count = len(shape.numbers(reserved[1])) if reserved else 0
    assert count == node.get("reserved_cores", 0) * fields["ThreadsPerCore"]
    assert len(shape.gres_conf(site).splitlines()) == shape.devices_of(site)


# ---- machines without a cluster -------------------------------------------------------------------------------------


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name in ("slurmd", "unshare", "nsenter") else name)
    expected = "no slurmd, unshare, nsenter here: apt-get install -y --no-install-recommends slurmd util-linux"
    assert virtual.missing() == expected


# ---- another Debian's tree ------------------------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The user is root, and only these commands exist."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def lay(folder: Path = tmp_path / "bin", **texts: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)

    return lay


def test_of_a_tree_the_scheduler_is_not_asked_for_here(tmp_path, commands):
    commands(**dict.fromkeys([*virtual.HERE_TOO], "exit 0"))
    base = tmp_path / "tree"
    hint = "python -m conformance.cluster.tree makes a tree that has all"
    assert virtual.missing(base) == f"no {', '.join(virtual.ON_NODES)} in {base}: {hint}"
    commands(base / "usr/sbin", **{name: "" for name in virtual.ON_NODES if "/" not in name})
    commands(base / "usr/share/lmod/lmod/libexec", lmod="")
    assert virtual.missing(base) is None
    (tmp_path / "bin/cc").unlink()
    assert virtual.missing(base) == "no cc here: apt-get install -y --no-install-recommends gcc libc6-dev"


def test_a_tree_is_made_once_and_whole(tmp_path, commands):
    commands(setpriv='for last; do before=${folder:-} folder=${last%/debian}; done; echo > "$before/made"', mmdebstrap="")
    folder = tree.make(tmp_path / "cache")
    assert [path.name for path in folder.iterdir()] == ["made"] and folder.stat().st_mode & 0o777 == 0o755
    commands(setpriv="exit 1")
    assert tree.make(tmp_path / "cache") == folder
    assert [*(tmp_path / "cache").iterdir()] == [folder]


def test_where_no_tree_can_be_made_it_is_said(tmp_path, commands, monkeypatch):
    commands(setpriv='echo "I: one"; echo "E: Failed to fetch" >&2; echo "E: mmdebstrap failed to run" >&2; exit 25')
    with pytest.raises(virtual.NoCluster, match="no mmdebstrap here: apt-get install"):
        tree.make(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    commands(mmdebstrap="")
    with pytest.raises(virtual.NoCluster, match=f"mmdebstrap, from {tree.ANYWHERE}: E: Failed to fetch$"):
        tree.make(tmp_path / "cache")
    assert [*(tmp_path / "cache").iterdir()] == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(virtual.NoCluster, match="made by root"):
        tree.make(tmp_path / "cache")


def test_what_a_tree_lacks_is_laid_there(tmp_path):
    """The tree's files decide, not this machine's."""
    (tmp_path / "made/usr/modules").mkdir(parents=True)
    (tmp_path / "base/usr/bin").mkdir(parents=True)
    (tmp_path / "base/usr/bin/of-the-tree").touch()
    assert layer.places(tmp_path / "made", tmp_path / "base") == {"/usr/modules": tmp_path / "made/usr/modules"}
    assert layer.places(tmp_path / "made", tmp_path) == {"/usr": tmp_path / "made/usr"}
    layer.link_commands(tmp_path / "bin", tmp_path / "base")
    assert [os.readlink(path) for path in (tmp_path / "bin").iterdir()] == ["/usr/bin/of-the-tree"]


# ---- places of ranks ------------------------------------------------------------------------------------------------


def row(rank: int, cpus: list[int], visible: list[int], **other) -> placement.Row:
    return placement.Row(**dict(rank=rank, local_rank=rank, node_rank=0, host="n0001", cpus=cpus, visible=visible) | other)


@pytest.mark.parametrize(
    "second, words",
    [
        (row(1, [1, 2], [1]), None),
        (row(1, [1, 9], [1]), None),  # CPU 9 is the second thread of core 1
        (row(1, [3, 4], [1]), "rank 1, n0001, local rank 1: cores=3-4, but should be near device 1, in 1-3"),
        (row(1, [1, 2, 3, 7], [1]), None),  # all that are near, and one more
        (row(1, [0, 1, 2, 3], [1]), "cores=0-3, but should be near device 1, in 1-3"),
        (row(1, [0, 1], [1]), "cores=0-1, but should be near device 1, in 1-3"),  # core 0 is reserved
        (row(1, [5], [0]), "device=0, but rank 0 has it"),
        (row(1, [1], [0, 1]), "devices=[0, 1], but should be 1 of them"),
        (row(1, [1], [1], node_rank=1), "node_rank=1, but should be 0"),
        (row(2, [1], [1]), "ranks=[0, 2], but should be 0 to 1"),
    ],
)
def test_what_is_misplaced_is_told(second, words):
    rows = [row(0, [5, 6], [0]), second]
    violations = placement.misplaced(made_up(), rows) + placement.doubled(made_up(), rows, "device")
    assert (not violations) if words is None else any(words in line for line in violations), violations


def test_a_shared_core_is_told():
    violations = placement.doubled(made_up(), [row(0, [1, 2], [0]), row(1, [2, 3], [1])], "core")
    assert violations == ["rank 1, n0001: core=2, but rank 0 has it"]
    assert placement.doubled(made_up(), [row(0, [1, 2], [0]), row(1, [2], [1], host="n0002")], "core") == []


def test_a_job_script_can_be_unbound(site):
    script, launcher = (site.folder / site.toml["submit"]).read_text(), site.toml["launcher"]
    changed = placement.unbound(script, launcher).splitlines()
    (line,) = [number for number, line in enumerate(changed) if line not in script.splitlines()]
    assert changed[line].strip() == "--cpu-bind=none" and changed[line + 1].strip() == ")"
    assert [*changed[:line], *changed[line + 1 :]] == script.splitlines()
    with pytest.raises(ValueError, match="no array other_flags"):
        placement.unbound(script, "other")


def test_a_rank_that_asks_mpi_is_counted():
    ranks = [dict(rank=rank, host=host, cpus=[rank], visible=[]) for rank, host in enumerate(["a", "b", "a"])]
    rows = placement.rows_of(map(json.dumps, reversed(ranks)))
    assert [(row.rank, row.local_rank, row.node_rank) for row in rows] == [(0, 0, 0), (1, 0, 1), (2, 1, 0)]


def test_ranges():
    assert shape.numbers("0,8-10") == [0, 8, 9, 10] and shape.numbers("") == []
    assert placement.ranges({0, 8, 9, 10}) == "0,8-10"


# ---- waiting for a job ----------------------------------------------------------------------------------------------


class Ended(jobs.Job):
    """Job 10 has ended; later jobs have not."""

    def alive(self) -> bool:
        return self.number != "10"

    def status(self) -> Status:
        return Status("COMPLETED", 0)


@pytest.mark.parametrize("followed", [True, False])
def test_a_job_whose_successor_has_just_come_has_not_ended(monkeypatch, followed):
    """The job's state was asked for in the same look that found the successor."""
    monkeypatch.setattr(jobs, "LOOK", 0)
    monkeypatch.setattr(jobs.Submitter, "nodes", lambda submitter: "")
    job = Ended(object.__new__(jobs.Submitter), "10", Path(), Path("/nowhere"), seen=0)
    looks = iter(range(1, 100))

    def trains() -> bool:
        look = next(looks)
        if followed and look == 8:  # the job's state was asked for just before this look
            job.number = "12"
        return look == 12

    if followed:
        job.until(trains, "another start")
    else:
        with pytest.raises(jobs.Odd, match="COMPLETED"):
            job.until(trains, "another start")

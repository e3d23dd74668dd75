"""Fixtures of the checks of ranks: runs that several checks read are trained once a session."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.broken.workloads import WORKLOADS
from conformance.checks.run.common import NOISY_FILE
from conformance.harness import sites
from conformance.harness.target import Run


class Runs:
    """The runs of a session, each under its own name; train() makes a run once, and a second time only if asked (again)."""

    def __init__(self, world, root: Path):
        self.world, self.root, self.done, self.folders = world, root, {}, {}
        self.began: dict[tuple, float] = {}  # by this process's clock
        self.seconds: dict[tuple, float] = {}  # until its end was seen

    def folder(self, launch, name: str) -> Path:
        return self.root / f"{launch.site}-{launch.launcher}" / name

    def filled(self, flags: str) -> str:
        """Return the flags with the path of noisy.py, copied to where all nodes see it."""
        path = self.root / "noisy.py"
        if "{noisy}" in flags:
            self.world.on_rank_0(lambda: bool(shutil.copy(NOISY_FILE, path)))
        return flags.format(noisy=path)

    def once(self, launch, flags: str, again: bool = False) -> Path:
        return self.folders.setdefault((launch, flags, again), self.folder(launch, f"once-{len(self.folders)}"))

    def train(self, launch, flags: str, again: bool = False):
        if (launch, flags, again) not in self.done:
            began = self.began.setdefault((launch, flags, again), time.monotonic())
            self.done[launch, flags, again] = self.world.train(launch, self.once(launch, flags, again), self.filled(flags))
            self.seconds[launch, flags, again] = time.monotonic() - began
        return self.done[launch, flags, again]


@pytest.fixture(scope="session")
def runs(world, root, pytestconfig) -> Runs:
    runs = Runs(world, root)
    for flags, again in world.plan:  # jobs of one queue: submit all at once
        launch = pytestconfig.sites[0].launches[0]
        runs.began[launch, flags, again] = time.monotonic()
        world.ahead(runs.once(launch, flags, again), runs.filled(flags))
    return runs


@pytest.fixture(scope="session")
def own(site):
    """The launcher that a site names first: checks that do not depend on the launcher use it."""
    return site.launches[0]


@pytest.fixture(scope="session")
def first():
    """The first launcher of this repository without MPI: checks that depend on no site use it once."""
    return next(launch for site in sites.find() for launch in site.launches if not launch.mpi)


@pytest.fixture(scope="session")
def own_file(world, runs) -> Callable[..., str]:
    """Write a file of broken/workloads.py, under another name if given, and return the flag that names it."""

    def write(name: str, stem: str = "") -> str:
        file = runs.root / "workloads" / f"{stem or name}.py"
        world.on_rank_0(lambda: [file.parent.mkdir(exist_ok=True), file.write_text(WORKLOADS[name])])
        return f"--workload {file}"

    return write


@pytest.fixture(scope="session")
def train_own(world, runs, first, own_file) -> Callable[..., Run]:
    """Return a function that trains one of broken/workloads.py."""

    def train(name: str, flags: str = "", **options) -> Run:
        path = runs.folder(first, f"{name}-{world.starts}")
        return world.train(first, path, f"{own_file(name)} --epochs 1 {flags}", **options)

    return train

"""The test environment that stand-ins hand out: a Python that can be moved, torch for CPUs, an MPI, and wheels for pip.

    python -m conformance.cluster.prefix [FOLDER]

Made once, of the Python that runs this and of its packages: these must hold torch, numpy, mpich and their like. On the
nodes it is ROOT:

    plain/    this Python with pip
    python/   the same, which sees torch/, and nothing else, through lib/python3.*/site-packages/torch.pth
    torch/    torch, numpy, and what torch needs
    mpi/      MPICH: bin/mpicc, include, lib
    suite/    what `pytest conformance --submit` needs on a login node, by PYTHONPATH: pytest and numpy
    wheels/   what install scripts ask pip for, besides torch (layer.py): there is no network on the nodes
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = "/opt/test-environment"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddp-sites")
# Besides what is pinned below, what builds it: pip makes an environment of its own for a build.
WHEELS = ("setuptools", "wheel", "pip", "build", "pyproject-hooks", "cython", "packaging", "conda-pack==0.9.2")


def make(cache: Path = CACHE) -> Path:
    """The environment of these versions, made if it is not there. Raises ValueError where this Python will not do."""
    names = ("torch", "numpy", "safetensors", "mpich", "mpi4py", "pytest", "pytest-timeout")
    pinned = [f"{name}=={found(name).version}" for name in names]
    of = "\n".join([sys.version, os.path.realpath(sys.executable), *pinned, *WHEELS, Path(__file__).read_text()])
    there = cache / f"test-environment-{hashlib.sha256(of.encode()).hexdigest()[:12]}"
    if there.is_dir():
        return there
    if "dist-packages" in sysconfig.get_path("purelib"):
        raise ValueError(f"{sys.executable} is Debian's, whose packages lie elsewhere: start this by another Python")
    cache.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="making-", dir=cache))
    try:
        new.chmod(0o755)  # an ordinary user reads it
        copy_python(new / "plain")
        shutil.copytree(new / "plain", new / "python", symlinks=True, copy_function=os.link)
        for packages in (new / "python").glob("lib/python3.*/site-packages"):
            (packages / "torch.pth").write_text(f"{ROOT}/torch\n")
        for folder, packages in dict(torch=("torch", "numpy"), suite=("pytest", "pytest-timeout", "numpy")).items():
            for package in set().union(*map(with_needs, packages)):
                lay(distribution(package), Path(sysconfig.get_path("purelib")), new / folder)
        lay(distribution("mpich"), Path(sys.prefix), new / "mpi")
        download(new / "wheels", [pin for pin in pinned if pin.startswith(("numpy==", "safetensors==", "mpi4py=="))])
        new.rename(there)  # whole, or not there
    except OSError:
        if not there.is_dir():  # another one was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return there


def found(package: str) -> Distribution:
    try:
        return distribution(package)
    except PackageNotFoundError:
        raise ValueError(f"no {package} in {sys.prefix}: nox -s cluster installs it") from None


def copy_python(to: Path) -> None:
    """The interpreter without its packages, but pip: it finds its library beside itself, wherever that is."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    (to / "bin").mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), to / "bin" / version)
    for name in ("python", "python3"):
        (to / "bin" / name).symlink_to(version)
    unneeded = shutil.ignore_patterns("test", "tests", "site-packages", "config-*", "idlelib", "tkinter", "__pycache__")
    shutil.copytree(base / "lib" / version, to / "lib" / version, symlinks=True, ignore=unneeded)
    shutil.copytree(base / "include" / version, to / "include" / version)
    for library in base.glob("lib/libpython*"):
        shutil.copy2(library, to / "lib" / library.name, follow_symlinks=False)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    subprocess.run([to / "bin/python", "-m", "ensurepip", "--default-pip"], check=True, env=clean, stdout=subprocess.DEVNULL)


def with_needs(package: str) -> set[str]:
    """This package and all that it needs, of what is installed."""
    wanted, seen = [package], set()
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            wanted += [need.name for need in needs(name) if not need.marker or need.marker.evaluate({"extra": ""})]
    return {name for name in seen if installed(name)}


def needs(package: str) -> Iterator[Requirement]:
    return map(Requirement, (installed(package) and distribution(package).requires) or [])


def installed(package: str) -> bool:
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


def lay(package: Distribution, below: Path, to: Path) -> None:
    """Its files that lie below a folder, as links where the file system allows: torch has 900 MB."""
    for file in package.files or []:
        path = Path(os.path.normpath(file.locate()))
        if path.is_relative_to(below) and path.is_file():
            target = to / path.relative_to(below)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(path)
            except OSError:
                shutil.copy2(path, target)


def download(to: Path, pinned: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", to]
    subprocess.run([*pip, *WHEELS, *pinned], check=True)
    # Its source, too: where a machine has an MPI of its own, it is built.
    mpi4py = [pin for pin in pinned if pin.startswith("mpi4py")]
    subprocess.run([*pip, "--no-binary=mpi4py", *mpi4py], check=True)


if __name__ == "__main__":
    print(make(*map(Path, sys.argv[1:2])))

"""The test environment that stand-ins give to jobs: a relocatable Python, torch for CPUs, an MPI, and wheels for pip.

    python -m conformance.cluster.prefix [FOLDER]

It is made once, from the running Python and its packages, among them torch, numpy and mpich. On the nodes it is ROOT:

    plain/    this Python with pip
    python/   the same, which also finds torch/, but nothing else, through lib/python3.*/site-packages/torch.pth
    torch/    torch, numpy, and their dependencies
    mpi/      MPICH: bin/mpicc, include, lib
    suite/    pytest and numpy, for `pytest conformance --submit` on a login node, by PYTHONPATH
    wheels/   what install scripts ask pip for, except torch (layer.py), since the nodes have no network. mpi4py's source is
              replaced by from_source.py: building the real one takes a minute
"""

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = "/opt/test-environment"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddp-sites")
# Besides `pinned` below: setuptools, which pip needs to build ddp_core in an environment of its own, and conda-pack.
WHEELS = ("setuptools", "conda-pack==0.9.2")
BACKEND = Path(__file__).with_name("from_source.py")
PYPROJECT = """\
[build-system]
requires = []
build-backend = "from_source"
backend-path = ["."]
"""
# Debian's Python looks for packages elsewhere, unless it is in an environment, or real_prefix is set as by old virtualenvs.
SITECUSTOMIZE = """\
import site, sys
sys.real_prefix = sys.base_prefix
site.addsitedir(f"{sys.prefix}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
"""


def make(cache: Path = CACHE) -> Path:
    """The environment of these versions; made if missing. Raises ValueError if this Python is not suitable."""
    names = ("torch", "numpy", "safetensors", "mpich", "mpi4py", "pytest", "pytest-timeout", "pip")
    pinned = [f"{name}=={required(name).version}" for name in names]
    sources = [Path(__file__).read_text(), BACKEND.read_text()]
    of = "\n".join([sys.version, os.path.realpath(sys.executable), *pinned, *WHEELS, *sources])
    path = cache / f"test-environment-{hashlib.sha256(of.encode()).hexdigest()[:12]}"
    if path.is_dir():
        return path
    if sys.prefix == sys.base_prefix:
        raise ValueError(f"{sys.executable} is in no virtual environment: nox -s cluster makes one")
    with whole(path) as new:
        copy_python(new / "plain")
        shutil.copytree(new / "plain", new / "python", symlinks=True, copy_function=os.link)
        for folder in (new / "python").glob("lib/python3.*/site-packages"):
            (folder / "torch.pth").write_text(f"{ROOT}/torch\n")
        for part, packages in dict(torch=("torch", "numpy"), suite=("pytest", "pytest-timeout", "numpy")).items():
            for package in set().union(*map(with_needs, packages)):
                lay(distribution(package), new / part)
        lay(distribution("mpich"), new / "mpi", within="../../..")
        download(new / "wheels", [pin for pin in pinned if pin.startswith(("numpy==", "safetensors==", "mpi4py=="))])
        (wheel,) = (new / "wheels").glob("mpi4py-*.whl")
        pack_source(wheel)
        # Ordinary users must be able to read it, whatever the umask was.
        subprocess.run(["chmod", "-R", "a+rX", new], check=True)
    return path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, renamed to `path` at the end: it is complete, or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="making-", dir=path.parent))
    try:
        yield new
        new.rename(path)
    except OSError:
        if not path.is_dir():  # another process was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def required(package: str) -> Distribution:
    try:
        return distribution(package)
    except PackageNotFoundError:
        raise ValueError(f"no {package} in {sys.prefix}: nox -s cluster installs it") from None


def copy_python(to: Path) -> None:
    """Copy the interpreter without its packages, except pip. It finds its library beside itself, wherever it is moved."""
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    (to / "bin").mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), to / "bin" / version)
    for name in ("python", "python3"):
        (to / "bin" / name).symlink_to(version)
    unneeded = shutil.ignore_patterns("test", "tests", "site-packages", "config-*", "idlelib", "tkinter", "EXTERNALLY-MANAGED")
    shutil.copytree(base / "lib" / version, to / "lib" / version, symlinks=True, ignore=unneeded)
    for library in base.glob("lib/libpython*.so*"):
        shutil.copy2(library, to / "lib" / library.name, follow_symlinks=False)
    packages = to / "lib" / version / "site-packages"
    lay(required("pip"), packages)
    (to / "bin/pip").write_text('#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n')
    (to / "bin/pip").chmod(0o755)
    # On the nodes it is read-only: without this, each start would compile its imports again.
    subprocess.run([to / "bin/python", "-m", "compileall", "-q", "-j0", to / "lib" / version], check=True)
    if "deb_system" in sysconfig.get_scheme_names():
        (packages.parent / "sitecustomize.py").unlink(missing_ok=True)  # a link into /etc
        (packages.parent / "sitecustomize.py").write_text(SITECUSTOMIZE)


def with_needs(package: str) -> set[str]:
    """This package and all its dependencies, as far as they are installed."""
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


def lay(package: Distribution, to: Path, within: str = "") -> None:
    """Link a package's files below site-packages, or below `within`, relative to it, into `to`; else copy. torch has 900 MB."""
    below = Path(os.path.normpath(str(package.locate_file(within))))
    for file in package.files or []:
        path = Path(os.path.normpath(str(file.locate())))
        if path.is_relative_to(below) and path.is_file():
            target = to / path.relative_to(below)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(path)
            except OSError:
                shutil.copy2(path, target)


def download(to: Path, pinned: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps", "--dest", str(to)]
    if subprocess.run([*pip, *WHEELS, *pinned], check=False).returncode:
        raise ValueError(f"pip could not download {' '.join([*WHEELS, *pinned])} (above): once, a network is needed here")


def pack_source(wheel: Path) -> None:
    """Pack, beside mpi4py's wheel, what pip takes for its source: the wheel and from_source.py."""
    name = "-".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel) as packed:
        metadata = packed.read(f"{name}.dist-info/METADATA")
    files = {"pyproject.toml": PYPROJECT.encode(), "PKG-INFO": metadata, BACKEND.name: BACKEND.read_bytes()}
    with tarfile.open(wheel.with_name(f"{name}.tar.gz"), "w:gz", compresslevel=1) as archive:
        for path, content in (files | {wheel.name: wheel.read_bytes()}).items():
            info = tarfile.TarInfo(f"{name}/{path}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


if __name__ == "__main__":
    print(make(*map(Path, sys.argv[1:2])))

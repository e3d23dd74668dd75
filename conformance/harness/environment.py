"""Install torch, the core and some packages into the environment whose Python runs this file. nox's sessions start it.

    .venv/bin/python conformance/harness/environment.py pytest pytest-timeout
    .venv/bin/python conformance/harness/environment.py --torch-of /usr/bin/python3 numpy --last tensorboard
    .venv/bin/python conformance/harness/environment.py --no-torch jinja2
    .venv/bin/python conformance/harness/environment.py --all-pinned

For packages in constraints.txt, pip accepts only files whose sha256 is in constraints.lock, which lock.py writes.

pip takes seconds even when everything is installed. A stamp, written after the last package, holds what was asked for. If the
stamp matches, pip is not started. An interrupted installation has no stamp.
"""

import argparse
import os
import re
import site
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
OF_VENV = ("pip", "setuptools", "wheel", "ddp-core")
LISTS = ("constraints.txt", "constraints.lock", "constraints-torch.txt")
NO_REQUIRE_HASHES = (26, 2)  # from this pip on, packages without a hash can be installed beside those with one
STAMP = "ddp-sites-installed.txt"  # in site-packages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--last", nargs="+", default=[], metavar="PACKAGE", help="after torch: some would bring another")
    parser.add_argument("--constraint", default=[], metavar="FILE", action="append", help="besides constraints.lock")
    parser.add_argument("--no-torch", action="store_true", help="the packages alone, without torch and the core")
    parser.add_argument("--torch-of", default=[], metavar="PYTHON", action="append", help="use its torch, if it has one")
    parser.add_argument("--all-pinned", action="store_true", help="install nothing: is all that is here in a list of versions?")
    chosen = parser.parse_args(argv)
    os.chdir(ROOT)
    if chosen.all_pinned:
        if unpinned := loose():
            print(f"error: {', '.join(unpinned)}: here, and not so in constraints.txt: write it there", file=sys.stderr)
        if unlocked := sorted(_pins("constraints.txt") ^ _pins("constraints.lock")):
            print(f"error: {', '.join(unlocked)}: in constraints.txt or .lock, not in both: nox -s lock", file=sys.stderr)
        return bool(unpinned or unlocked)
    theirs = torch_of(chosen.torch_of)
    if theirs:
        print(f"using the torch in {theirs}", flush=True)
    stamp, wanted = Path(site.getsitepackages()[0], STAMP), wish(chosen, theirs)
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    stamp.unlink(missing_ok=True)
    try:
        install(chosen, theirs, stamp.with_name("torch-of-this-machine.pth"))
    except subprocess.CalledProcessError as error:
        return error.returncode
    stamp.write_text(wanted)
    return 0


def loose() -> list[str]:
    """Packages of this environment whose version is in no list. For these, PyPI could give another version any day."""
    pinned = set().union(*map(_pins, LISTS))
    installed = distributions(path=site.getsitepackages()[:1])
    here = [f"{package.name}=={package.version.partition('+')[0]}" for package in installed]
    return sorted(each for each in here if _plain(each) not in pinned and each.partition("==")[0] not in OF_VENV)


def requirements(text: str) -> list[str]:
    """The requirements in the text of a list, without comments and hashes."""
    return [line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _pins(name: str) -> set[str]:
    return set(map(_plain, requirements(Path(name).read_text())))


def _plain(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", requirement.strip()).lower()


def wish(chosen: argparse.Namespace, theirs: Path | None) -> str:
    """Everything that decides what is installed, as text."""
    files = [*LISTS, "core/pyproject.toml", __file__, *chosen.constraint]
    inputs = dict(packages=chosen.packages, last=chosen.last, torch=not chosen.no_torch, theirs=theirs)
    inputs |= dict(root=ROOT, python=sys.version)
    inputs |= {name: Path(name).read_text() for name in files}
    return "\n".join(f"{name}: {value}" for name, value in inputs.items())


def install(chosen: argparse.Namespace, theirs: Path | None, link: Path) -> None:
    constraints = [flag for file in ("constraints.lock", *chosen.constraint) for flag in ("-c", file)]
    if tuple(map(int, version("pip").split(".")[:2])) < NO_REQUIRE_HASHES:
        newer = next(line for line in Path("constraints.lock").read_text().splitlines() if line.startswith("pip=="))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", "/dev/stdin"]
        subprocess.run(command, input=newer, text=True, check=True)
    constraints.append("--no-require-hashes")
    if chosen.packages:  # before the link: after it, pip finds some there, and installs no commands of theirs
        pip(*chosen.packages, *constraints)
    if chosen.no_torch:
        return
    if theirs:
        link.write_text(f"{theirs}\n")
    else:
        link.unlink(missing_ok=True)
        pinned = next(line for line in Path("constraints-torch.txt").read_text().splitlines() if line.startswith("torch=="))
        try:  # the CPU build, if that index answers: PyPI's brings gigabytes of CUDA
            pip("--no-deps", "--retries", "0", "--index-url", CPU_WHEELS, pinned)
        except subprocess.CalledProcessError:
            print(f"no {pinned} from {CPU_WHEELS}: taking PyPI's", flush=True)
        pip("torch", "-c", "constraints-torch.txt", *constraints)
    pip("setuptools", *constraints)
    pip("--no-build-isolation", "-e", "core", *constraints)  # in isolation, pip would build it with the newest setuptools
    if chosen.last:
        pip(*chosen.last, *constraints)


def pip(*arguments: str) -> None:
    print("+ pip install", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def torch_of(pythons: list[str]) -> Path | None:
    """The site-packages of the first Python that has torch and our Python version, for example of a module or a container."""
    program = "import importlib.util, sys; print(sys.version_info[:2], importlib.util.find_spec('torch').origin, sep='|')"
    for python in dict.fromkeys(pythons):
        answer = subprocess.run([python, "-c", program], check=False, capture_output=True, text=True).stdout.strip()
        version, _, origin = answer.partition("|")
        if origin and version == str(sys.version_info[:2]):
            return Path(origin).parent.parent
    return None


if __name__ == "__main__":
    sys.exit(main())

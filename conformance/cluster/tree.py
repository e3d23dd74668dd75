"""A Debian tree that virtual nodes boot from, for a newer Slurm than this machine's: trixie's is 24.11.

    python -m conformance.cluster.tree [FOLDER]

Root makes it once, with mmdebstrap. It prints the tree's folder, for `nox -s cluster -- --tree THERE`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from conformance.cluster.prefix import CACHE, whole
from conformance.cluster.virtual import NoCluster, exit_on_signal

SUITE = "trixie"
# Slurm with its accounting; modules; a compiler for install scripts; Python for its libraries, and for the pip wheels that a
# Debian Python, also this machine's, puts into a new venv; the commands that boot.sh and tests call.
PACKAGES = (
    "slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core lmod gcc libc6-dev python3 python3-pip-whl "
    "python3-setuptools-whl ca-certificates iproute2 util-linux mount procps hostname"
)
ANYWHERE = "http://deb.debian.org/debian"


def make(cache: Path = CACHE) -> Path:
    """The tree; made if missing. Raises NoCluster if that fails."""
    of = hashlib.sha256(f"{SUITE} {PACKAGES}".encode()).hexdigest()[:12]
    path = cache.resolve() / f"debian-{SUITE}-{of}"
    if path.is_dir():
        return path
    if os.geteuid():
        raise NoCluster("a tree is made by root: the files in it are root's")
    if not shutil.which("mmdebstrap"):
        raise NoCluster("no mmdebstrap here: apt-get install -y --no-install-recommends mmdebstrap debian-archive-keyring")
    asked = mirror()
    # Its processes end with this one: an apt that is left behind would fill the folder again.
    alone = ["setpriv", "--pdeathsig=KILL", "unshare", "--fork", "--kill-child", "--pid", "--mount-proc"]
    with whole(path) as new:
        command = [*alone, "mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(new), asked]
        try:
            result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=900)
        except subprocess.TimeoutExpired:
            raise NoCluster(f"mmdebstrap, from {asked}: not ready after 15 min") from None
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if line.startswith("E: ")] or [
                f"exit code {result.returncode}"
            ]
            raise NoCluster(f"mmdebstrap, from {asked}: {errors[0]}")
        new.chmod(0o755)  # ordinary users must be able to read it
    return path


def mirror() -> str:
    """This machine's Debian mirror, from apt. A machine without Debian uses deb.debian.org."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]
    try:
        addresses = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        addresses = []
    return next(iter(addresses), ANYWHERE)


if __name__ == "__main__":
    try:
        with exit_on_signal():
            print(make(*map(Path, sys.argv[1:2])))
    except NoCluster as reason:
        sys.exit(f"error: {reason}")

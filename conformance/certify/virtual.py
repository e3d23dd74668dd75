"""The certificate on a site's virtual cluster. A user runs the command of jobs.py on the login node.

    nox -s cluster -- --site NAME_OR_FOLDER --workload path/to/mine.py [flags of the certificate and of train.py]

Needs root and Slurm. The program's folder, with the data in it, is copied into the user's home.
"""

import contextlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from conformance.cluster import layer, prefix
from conformance.cluster.jobs import Submitter, queue
from conformance.cluster.shape import LOGIN
from conformance.cluster.virtual import UID, USER, NoCluster, VirtualSite, as_user, entered, exit_on_signal, plain
from conformance.harness.sites import Site

LARGEST = 2**30  # bytes, at most, of the program's folder
LEFT = shutil.ignore_patterns(".*", "runs", "certificates", "__pycache__", "env")


def on_virtual_cluster(site: Site, workload: str, tree: Path, flags: list[str]) -> int:
    """Returns the certificate's exit code, and leaves the certificate in certificates/. flags: all other flags."""
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as folder,
        exit_on_signal(),
        VirtualSite(site, Path(folder), build=layer.build, tree=tree) as cluster,
    ):
        print(f"up in {cluster.seconds['up']:.2f} s: {site.name}, {', '.join(cluster.names)}; ./install.sh", flush=True)
        user = Submitter(cluster, site, cluster.put_site())
        top, python = user.folder.partition("/sites/")[0], f"{prefix.ROOT}/python/bin/python"
        # The packages that nox installs for its session on a real login node.
        for line in ("./install.sh", f"{python} -m pip install --quiet --target ~/suite {top}/core"):
            installed = cluster.on("login", line, folder=user.folder, timeout=240)
            if installed.returncode:
                raise NoCluster(f"{line}: {(installed.stderr or installed.stdout).strip().splitlines()[-1]}")
        file = put(Path(workload), cluster.home / "program") if workload.endswith(".py") else workload
        places = f"PYTHONPATH=/home/{USER}/suite:{prefix.ROOT}/suite"
        command = ["env", places, python, "-m", "conformance", "--output=certificate", "--workload", file]
        command += ["--site", user.folder, f"--submit={user.geometry(2, 2)}", "--geometry=2x2", "--device=cpu", *flags]
        with hurrying(user):
            login = [*entered(cluster.pids[LOGIN]), *as_user(command, top)]
            code = subprocess.run(login, check=False, env=plain(), stdin=subprocess.DEVNULL).returncode
        made = cluster.home / top.rpartition("/")[2] / "certificate"
        if made.is_dir():
            output = Path("certificates", f"{Path(workload).stem}-{site.name}")
            shutil.copytree(made, output, dirs_exist_ok=True)
            print(f"copied from its login node to {output}/")
        return code


def put(file: Path, folder: Path) -> str:
    """Copy the program's folder into the home. Returns the file's path there."""
    size = sum(path.stat().st_size for path in file.resolve().parent.rglob("*") if path.is_file())
    if size > LARGEST:
        raise ValueError(f"--workload {file}: its folder has {size / 2**30:.1f} GiB; put it into one with what it reads alone")
    shutil.copytree(file.resolve().parent, folder, ignore=LEFT)
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, UID, UID)
    return f"/home/{folder.parent.name}/{folder.name}/{file.name}"


@contextlib.contextmanager
def hurrying(user: Submitter) -> Iterator[None]:
    """Start requeued jobs as soon as their previous start has left nothing behind; Slurm alone would wait two minutes."""
    over = threading.Event()

    def hurry() -> None:
        while not over.wait(3):
            with contextlib.suppress(NoCluster, subprocess.TimeoutExpired):
                for job in map(user.of_number, queue(user.cluster)):
                    if job.fields().get("Reason") == "BeginTime" and user.waits(job) and not over.wait(2):
                        user.hurry(job)

    thread = threading.Thread(target=hurry, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

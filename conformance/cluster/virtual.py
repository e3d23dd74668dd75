"""A site's virtual cluster: one login node and some compute nodes of its shape, with a real Slurm, on this one machine.

    python -m conformance.cluster.virtual --site NAME_OR_FOLDER [--nodes N] [--keep] [--folder FOLDER] [--tree FOLDER]
    python -m conformance.cluster.virtual --folder FOLDER --on NODE [COMMAND ...]
    python -m conformance.cluster.virtual --folder FOLDER --down

The first command starts it, prints how long that took, and ends it; with --keep, it opens a shell on the login node in between.
The others are for a second terminal. It needs root, and from Debian slurmctld, slurmd, slurmdbd, slurm-client, munge,
mariadb-server-core, iproute2, gcc and lmod; none of their daemons has to run. With --tree the nodes boot from another Debian
tree, made by tree.py. Then this machine needs only iproute2 and gcc.

All is made from site.toml. A node is a set of namespaces (mount, network, UTS, IPC, PID). Its PID 1 is boot.sh: when that
ends, the whole node ends, and it ends with the process that started it. Networks are inside the namespaces, so that any number
of clusters can be up, each in its own folder, with the same names and addresses.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance.cluster import Layer, accounting, layer
from conformance.cluster.shape import (
    LOGIN,
    OLDEST,
    SUBNET,
    cpus_of,
    devices_of,
    gres_conf,
    hosts_file,
    impossible,
    interfaces_of,
    names_of,
    slurm_conf,
    topology,
)
from conformance.harness import sites
from conformance.harness.sites import ROOT, Site

HERE = Path(__file__).parent
USER, UID = "visitor", 20001
MODULES = "/opt/modulefiles"
# The Debian package of each command: on the nodes, then on this machine.
ON_NODES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
    "slurmdbd": "slurmdbd",
    "setpriv": "util-linux",
    "/usr/share/lmod/lmod/libexec/lmod": "lmod",
}
HERE_TOO = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "cc": "gcc libc6-dev"}
APART = ["unshare", "--fork", "--kill-child", "--mount", "--net", "--uts", "--ipc", "--pid"]


class NoCluster(Exception):
    """Why no cluster can be started, or is up, here: one line for the caller."""


# ---- a cluster ------------------------------------------------------------------------------------------------------


def missing(tree: Path = Path("/")) -> str | None:
    """Why no cluster can be started here, and what to install; None if one can. tree: as for VirtualSite."""
    if os.geteuid():
        return "a virtual cluster is raised by root: nodes are namespaces with mounts and networks of their own"
    root, lacking = str(tree).rstrip("/"), {}
    folders = ":".join(root + folder for folder in plain()["PATH"].split(":"))
    for command, package in ON_NODES.items():
        if not shutil.which(root + command if command.startswith("/") else command, path=folders):
            lacking[command] = package
    if root and lacking:
        return f"no {', '.join(lacking)} in {root}: python -m conformance.cluster.tree makes a tree that has all"
    lacking |= {command: package for command, package in HERE_TOO.items() if not shutil.which(command)}
    if lacking:
        packages = " ".join(dict.fromkeys(lacking.values()))
        return f"no {', '.join(lacking)} here: apt-get install -y --no-install-recommends {packages}"
    tried = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def release_of(tree: Path) -> str:
    """The version of its Slurm: "22.05.8"."""
    in_tree = ["chroot", str(tree)] if tree != Path("/") else []  # chroot needs root
    result = subprocess.run([*in_tree, "slurmctld", "-V"], capture_output=True, text=True, check=False, env=plain())
    _must(result, f"slurmctld in {tree}")
    return result.stdout.split()[-1]


def version_of(tree: Path) -> tuple[int, int]:
    """(22, 5)"""
    year, month = map(int, release_of(tree).split(".")[:2])
    return year, month


class VirtualSite:
    """A cluster, up from up() or `with` to down(), or to the end of this process.

    build: makes what a job finds there, in an empty folder; None: Slurm only. settings: more of slurm.conf. tree: the root that
    nodes boot from, this machine's or one of tree.py. Raises NoCluster if site.toml describes no possible node.
    """

    def __init__(
        self,
        site: Site,
        folder: Path,
        nodes: int = 2,
        build: Callable[[Site, Path, Path], Layer] | None = None,
        settings: dict[str, str] | None = None,
        tree: Path = Path("/"),
    ):
        if wrong := impossible(site):
            raise NoCluster(f"{site.folder / 'site.toml'}: {wrong[0]}")
        self.site, self.folder, self.build, self.settings = site, Path(folder).resolve(), build, settings or {}
        self.names, self.tree, self.version = names_of(site, nodes), Path(tree).resolve(), OLDEST
        self.pids: dict[str, int] = {}
        self.seconds: dict[str, float] = {}  # seconds that up() and down() took
        self._inits: dict[str, Any] = {}  # processes: the parent (unshare) of each node's PID 1, by the node's name
        self._lock: Any = None  # a file descriptor

    def __enter__(self) -> "VirtualSite":
        self.up()
        return self

    def __exit__(self, *_) -> None:
        self.down()

    @property
    def home(self) -> Path:
        """The user's home, as this machine sees it. On the nodes it is /home/USER."""
        return self.folder / "home" / USER

    def up(self) -> None:
        """Start it. Raises NoCluster if that fails, or if this folder's cluster is up already."""
        start = time.monotonic()
        if reason := missing(self.tree):
            raise NoCluster(reason)
        self.version = version_of(self.tree)
        self._take_folder()
        try:
            self._lay_out()
            self._boot()
            self._connect()
            self._start_slurm()
        except BaseException:
            self.down()
            raise
        (self.folder / "up.json").write_text(json.dumps(dict(raised_by=os.getpid(), pids=self.pids)))
        self.seconds["up"] = time.monotonic() - start

    def down(self) -> None:
        """End all that is left of it, also of a cluster that is half up, or not at all."""
        start = time.monotonic()
        (self.folder / "up.json").unlink(missing_ok=True)
        for init in self._inits.values():
            init.kill()  # unshare takes its child, PID 1, along
            init.stdin.close()
            init.stdout.close()
        for init in self._inits.values():
            init.wait()
        for pid in self.pids.values():
            _gone(pid)
        self._inits, self.pids = {}, {}
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self.seconds["down"] = time.monotonic() - start

    def wait(self) -> None:
        """Wait until its login node is gone."""
        self._inits[LOGIN].wait()

    def on(
        self, node: str, command: str | list[str], user: bool = True, timeout: float = 60, folder: str | None = None
    ) -> subprocess.CompletedProcess:
        """Run a command on a node ("login": the login node), in a login shell of the user, or as root.

        Raises subprocess.TimeoutExpired, after it has ended the command.
        """
        words = ["bash", "-c", command] if isinstance(command, str) else command
        limited = ["timeout", "--kill-after=2", str(timeout), *words]
        whole = [*entered(self._pid(node)), *(as_user(limited, folder) if user else limited)]
        result = subprocess.run(
            whole, capture_output=True, text=True, check=False, timeout=timeout + 10, stdin=subprocess.DEVNULL, env=plain()
        )
        if result.returncode == 124:
            raise subprocess.TimeoutExpired(command, timeout, result.stdout, result.stderr)
        return result

    def crash(self, node: str) -> None:
        """End a node as if it lost its power."""
        os.kill(self._pid(node), signal.SIGKILL)
        self._inits[node].wait()

    def slow_disk(self, seconds: float) -> None:
        """Make each fsync on a node take this many seconds from now on; 0: this machine's own time."""
        file = self.folder / "shared/fsync"
        (self.folder / "shared/fsync.new").write_text(str(seconds))
        (self.folder / "shared/fsync.new").rename(file)

    def _pid(self, node: str) -> int:
        node = LOGIN if node == "login" else node
        if node not in self.alive():  # its PID may be another process's by now
            raise NoCluster(f"no node {node} is up, but {', '.join(self.alive()) or 'none'}")
        return self.pids[node]

    def alive(self) -> list[str]:
        """The nodes that have not crashed, with the login node."""
        return [name for name in self.pids if self._inits[name].poll() is None]

    def put_site(self, below: str = "ddp-sites") -> str:
        """Copy the repository into the home, as a user of this site has it. Return the site folder's path on the nodes."""
        repository = self.home / below
        for name in ("core", "conformance", "pyproject.toml"):
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "reports", "build")
                shutil.copytree(ROOT / name, repository / name, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / name, repository / name)
        folder = repository / "sites" / self.site.name
        folder.mkdir(parents=True, exist_ok=True)
        for name in {*self.site.toml.get("files", []), "site.toml"}:
            shutil.copy(self.site.folder / name, folder / name)
        for path in (repository, *repository.rglob("*")):
            os.lchown(path, UID, UID)
        return f"/home/{USER}/{folder.relative_to(self.home)}"

    # ---- the steps of up() ------------------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """Lock the folder. The nodes' PID 1 hold the lock, too, so it is free when the last of them has ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + 6  # the nodes of a killed cluster may still be ending
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    os.close(lock)
                    raise NoCluster(f"a cluster is up in {self.folder} already: --down, or another --folder") from None
                time.sleep(0.05)
            else:
                self._lock = lock
                return

    def _lay_out(self) -> None:
        """Write the files that the nodes boot from. Homes are kept for the next start; logs are kept until then."""
        for name in ("all", "node", "made", "layer", "shared", "munge"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        every, shared = self.folder / "all", self.folder / "shared"
        for folder in (every / "etc/slurm", every / "etc/profile.d", shared / "state", shared / "log", self.folder / "munge"):
            folder.mkdir(parents=True)
        # Users on a node read the logs, so these folders must be open to all, not to root only.
        for folder in (self.folder, self.folder / "munge"):
            folder.chmod(0o755)
        self.home.mkdir(parents=True, exist_ok=True)
        os.chown(self.home, UID, UID)
        made = None
        if self.build:
            (self.folder / "made").mkdir()
            made = self.build(self.site, self.folder / "made", self.tree)
            shutil.copytree(made.overlay, self.folder / "layer", symlinks=True)
        etc = {
            "hosts": hosts_file(self.site, self.names, made.hosts if made else []),
            "resolv.conf": "",
            # Names are in /etc/hosts; nothing should wait for a DNS.
            "nsswitch.conf": _with(self.tree / "etc/nsswitch.conf", "hosts:", "hosts: files"),
            "passwd": _with(self.tree / "etc/passwd", f"{USER}:", f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash"),
            "group": _with(self.tree / "etc/group", f"{USER}:", f"{USER}:x:{UID}:"),
            # Without an entry here `su` fails, and `su` gives a job of --export=NONE its environment.
            "shadow": _with(self.tree / "etc/shadow", f"{USER}:", f"{USER}:*:19000:0:99999:7:::"),
            "slurm/slurm.conf": slurm_conf(self.site, self.names, accounting.settings(self.site) | self.settings, self.version),
            "slurm/slurmdbd.conf": accounting.SLURMDBD_CONF,
            "slurm/gres.conf": gres_conf(self.site),
            "slurm/cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        }
        exported = dict(made.environment) if made else {}
        if made and made.modulepath:
            etc["lmod/modulespath"] = f"{MODULES}\n"  # Debian's profile.d/lmod.sh reads it
        etc["profile.d/00-site.sh"] = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exported.items())
        for name, text in etc.items():
            path = every / "etc" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        (every / "etc/shadow").chmod(0o640)
        (every / "etc/slurm/slurmdbd.conf").chmod(0o600)  # or slurmdbd does not start
        for name in (LOGIN, *self.names):
            (self.folder / "node" / name / "etc").mkdir(parents=True)
            (self.folder / "node" / name / "etc/hostname").write_text(f"{name}\n")
        paths = dict(made.paths) if made else {}
        if made and made.modulepath:
            paths[MODULES] = made.modulepath
        lines = [f"{place.format(user=USER)}\t{source.resolve() if source else ''}\n" for place, source in paths.items()]
        (self.folder / "paths").write_text("".join(lines))
        for name in ("threads", "vcpu", "disk"):
            command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self.folder / f"{name}.so"), str(HERE / f"{name}.c"), "-ldl"]
            if not (self.folder / f"{name}.so").is_file():
                _must(subprocess.run(command, capture_output=True, text=True, check=False), f"{name}.c")

    def _boot(self) -> None:
        """Boot all nodes at once. A node prints its PID when it is ready; a node that fails says why."""
        log = self.folder / "shared/log"
        for name in (LOGIN, *self.names):
            on_login = name == LOGIN
            arguments = [
                name,
                self.folder,
                0 if on_login else cpus_of(self.site),
                0 if on_login else devices_of(self.site),
                UID,
            ]
            with open(log / f"boot-{name}.log", "w") as errors:
                self._inits[name] = subprocess.Popen(
                    [*APART, HERE / "boot.sh", *map(str, arguments), self.tree, home_of_python()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    pass_fds=[self._lock],
                    start_new_session=True,  # Ctrl-C is for the process that started the cluster
                    env=plain(),
                    text=True,
                )
        for name, init in self._inits.items():
            answer = init.stdout.readline().strip()
            if not answer:
                why = (log / f"boot-{name}.log").read_text().strip().splitlines() or ["it says nothing"]
                raise NoCluster(f"{name} does not boot: {why[-1]}")
            self.pids[name] = int(answer)

    def _connect(self) -> None:
        """Make a bridge for each interface, inside the login node. No route leads out."""
        lines = []
        for k, interface in enumerate(interfaces_of(self.site)):
            lines += [f"link add {interface} type bridge", f"address add {SUBNET}.{k}.1/24 dev {interface}"]
            for name in self.names:
                port = f"p{k}.{self.names.index(name)}"
                lines += [f"link add {port} type veth peer name {interface} netns {self.pids[name]}"]
                lines += [f"link set {port} master {interface} up"]
            lines += [f"link set {interface} up"]
        # For the login node's connections to itself: slurmdbd sends a message in two parts, and the second waits 40 ms for the
        # first's acknowledgment.
        lines += [f"route replace local {SUBNET}.0.1 dev {interfaces_of(self.site)[0]} table local quickack 1"]
        self._ip(LOGIN, lines)
        for number, name in enumerate(self.names, 11):
            lines = []
            for k, interface in enumerate(interfaces_of(self.site)):
                lines += [f"address add {SUBNET}.{k}.{number}/24 dev {interface}", f"link set {interface} up"]
            self._ip(name, lines)

    def _ip(self, node: str, lines: list[str]) -> None:
        # Enter only the network namespace: then `netns PID` means the machine's PID.
        command = ["nsenter", f"--target={self.pids[node]}", "--net", "ip", "-batch", "-"]
        result = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
        _must(result, f"the network of {node}")

    def _start_slurm(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        # One munged for all nodes: its socket is in a folder that all share.
        munged = "munged --force --key-file=/run/munge/key --seed-file=/run/munge/seed --log-file=/run/cluster/log/munged.log"
        munged += " --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid"
        # slurmctld starts only if slurmdbd answers.
        steps = dict(munged=munged.split()) | accounting.steps(self.site, USER) | dict(slurmctld=["slurmctld"])
        for what, command in steps.items():
            _must(self.on("login", command, user=False), what)
        slurmd = ["env", f"HWLOC_SYNTHETIC={topology(self.site, self.version)}", "slurmd"]
        running = [
            subprocess.Popen(
                [*entered(self.pids[name]), *slurmd], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=plain(), text=True
            )
            for name in self.names
        ]
        for name, process in zip(self.names, running, strict=True):
            errors = process.communicate()[1]
            _must(subprocess.CompletedProcess([], process.returncode, "", errors), f"slurmd on {name}")
        end = time.monotonic() + 60 + len(self.names)
        while True:
            answer = self.on("login", ["sinfo", "-h", "-N", "-o", "%N %t"], user=False).stdout
            states = dict(line.split() for line in answer.splitlines())
            if len(states) == len(self.names) and {*states.values()} == {"idle"}:
                return
            if time.monotonic() > end:
                raise NoCluster(f"nodes do not come up: {states or 'slurmctld does not answer'}; see {self.folder}/shared/log")
            time.sleep(0.05)


def plain() -> dict[str, str]:
    """The environment for processes on the nodes. It has nothing of this process's, whose folders are missing there."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return dict(PATH=path, HOME="/root", LANG="C.UTF-8", TERM=os.environ.get("TERM", "dumb"))


def entered(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--mount", "--net", "--uts", "--ipc", "--pid", "--wdns=/", "--"]


def as_user(command: list[str], folder: str | None = None) -> list[str]:
    """Run a command as the user in a login shell, as after ssh."""
    variables = plain() | dict(HOME=f"/home/{USER}", USER=USER, LOGNAME=USER, SHELL="/bin/bash", PATH=os.defpath)
    environment = [f"{name}={value}" for name, value in variables.items()]
    shell = ["bash", "-lc", 'cd "$1" && shift && exec "$@"', "bash", folder or f"/home/{USER}", *command]
    return ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--init-groups", "env", "-i", *environment, *shell]


def home_of_python() -> str:
    """The folder in root's home that has this Python; "" if there is none. An ordinary user could not read it there."""
    prefix = Path(sys.base_prefix).resolve()
    return str(Path("/root", prefix.relative_to("/root").parts[0])) if prefix.is_relative_to("/root/") else ""


def _with(path: Path, beginning: str, line: str) -> str:
    """A file's text, with `line` replacing all lines that begin with `beginning`."""
    kept = [each for each in path.read_text().splitlines() if not each.startswith(beginning)]
    return "\n".join([*kept, line]) + "\n"


def _gone(pid: int) -> None:
    """Wait until a killed PID 1, and its node with it, are gone."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if "boot.sh" not in Path(f"/proc/{pid}/cmdline").read_text():
                return
        except OSError:
            return
        time.sleep(0.005)


def _must(result: subprocess.CompletedProcess, what: str) -> None:
    if result.returncode:
        words = (result.stderr or result.stdout or f"exit code {result.returncode}").strip().splitlines()
        raise NoCluster(f"{what}: {words[-1]}")


# ---- from another process -------------------------------------------------------------------------------------------


def pids_in(folder: Path) -> dict[str, int]:
    """The nodes' PIDs of the cluster that is up in this folder. Raises NoCluster if none is."""
    try:
        pids = json.loads((folder / "up.json").read_text())["pids"]
        alive = {name: pid for name, pid in pids.items() if str(folder) in Path(f"/proc/{pid}/cmdline").read_text()}
    except OSError:
        alive = {}
    if not alive:
        raise NoCluster(f"no cluster is up in {folder}")
    return alive


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """End a `with` on SIGTERM, SIGHUP and SIGINT. A script's background processes would ignore SIGINT."""

    def end(number, _):
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", metavar="NAME_OR_FOLDER")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where it lives (default: a new one, which is removed afterwards)")
    parser.add_argument("--keep", action="store_true", help="a shell on its login node; without a terminal, until it is ended")
    parser.add_argument("--tree", type=Path, default="/", help="its nodes boot from: see python -m conformance.cluster.tree")
    parser.add_argument("--bare", action="store_true", help="with Slurm alone: no modules, no containers, no copy of the site")
    parser.add_argument("--on", metavar="NODE", help="there, in the cluster that is up in --folder: a shell, or COMMAND")
    parser.add_argument("--down", action="store_true", help="take that one down")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args()
    if options.folder is None and (options.on or options.down):
        parser.error("--on and --down need --folder")
    if not (options.site or options.on or options.down):
        parser.error("--site is missing")
    try:
        if options.on:
            pids = pids_in(options.folder.resolve())
            node = LOGIN if options.on == "login" else options.on
            if node not in pids:
                return f"no node {node}: there are {', '.join(pids)}"
            command = options.command[options.command[:1] == ["--"] :] or ["bash"]
            return subprocess.run([*entered(pids[node]), *as_user(command)], check=False, env=plain()).returncode
        if options.down:
            for pid in pids_in(options.folder.resolve()).values():
                os.kill(pid, signal.SIGKILL)
            return 0
        (site,) = sites.find([options.site])
        temporary = None if options.folder else tempfile.mkdtemp(prefix="cluster-")
        try:
            build, folder = None if options.bare else layer.build, options.folder or Path(str(temporary))
            with exit_on_signal(), VirtualSite(site, folder, options.nodes, build, tree=options.tree) as cluster:
                folder_of_site = None if options.bare else cluster.put_site()
                print(f"up in {cluster.seconds['up']:.2f} s: {site.name}, {LOGIN} and {', '.join(cluster.names)}", flush=True)
                if options.keep:
                    node = cluster.names[0]
                    print(
                        f"another terminal: python -m conformance.cluster.virtual --folder {cluster.folder} --on {node}",
                        flush=True,
                    )
                if options.keep and sys.stdin.isatty():
                    subprocess.run(
                        [*entered(cluster.pids[LOGIN]), *as_user(["bash"], folder_of_site)], check=False, env=plain()
                    )
                elif options.keep:
                    cluster.wait()
            print(f"down in {cluster.seconds['down']:.2f} s")
        finally:
            if temporary:
                shutil.rmtree(temporary)
    except (NoCluster, ValueError) as reason:
        return f"error: {reason}"
    return 0


if __name__ == "__main__":
    sys.exit(main())

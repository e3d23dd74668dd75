"""What a job finds on a site's machine besides Slurm: modules, conda, containers, PBS. It is made from site.toml.

    layer = build(site, folder)      of a conformance.harness.sites.Site, into an empty folder

Commands are the stand-ins of stand_ins/. Which ones are installed follows from site.toml: `image` gives a container runtime,
`software.provides` gives conda or compilers, scheduler = "pbs" the commands of PBS and PALS. Only modules in site.toml exist.
The folders of the image and the modules are read from the site's own scripts.
"""

import base64
import hashlib
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

from conformance.cluster import Layer, prefix
from conformance.cluster.shape import LOGIN, numbers
from conformance.harness.sites import Site

HERE = Path(__file__).parent / "stand_ins"
HOME = "/usr/local/stand-ins"  # on the nodes
PLAIN, PYTHON, MPI = (f"{prefix.ROOT}/{name}" for name in ("plain", "python", "mpi"))
# Commands that a container does not have: the scheduler is outside.
OUTSIDE = "s(run|batch|cancel|control|queue|info|acct|bcast|alloc|attach|acctmgr|prio|share|stat|trigger|crontab|diag|report)"

# ---- modules --------------------------------------------------------------------------------------------------------

# For each word of `provides`, the module's text in Lmod's language. {name}: the module, with a dash before its version.
PROVIDES = {
    # The Python with torch, and the folder that `pip install --user` fills.
    "torch": f'prepend_path("PATH", "{PYTHON}/bin")\n'
    'setenv("PYTHONUSERBASE", pathJoin(os.getenv("HOME") or "", ".local/{name}"))',
    "conda": f'prepend_path("PATH", "{HOME}/conda/bin")',
    "compilers": f'prepend_path("PATH", "{HOME}/wrappers/bin")',
    # Its library is empty, and has a name that RCCL does not try by itself (stand_ins/rccl.py).
    "network-plugin": f'prepend_path("LD_LIBRARY_PATH", "{HOME}/net-plugin/lib")',
}

# A folder with one folder for each user. If the tree lacks it, it is a disk of each node.
OF_A_USER_S_DISK = r"(?<![\w.}$])((?:/\w+)+)/\$\{?USER\b"
# `module reset` fails without a default module. The dot hides this one from lists.
OF_A_LOGIN = ".of-a-login"


def provided(site: Site, module: str | None = None) -> list[str]:
    """Words that this module provides, or all modules. Raises ValueError for a word without a stand-in."""
    table = site.software.get("provides", {})
    words = [word for name, words in table.items() if module in (None, name) for word in words]
    if strange := [word for word in words if word not in PROVIDES and "=" not in word]:
        raise ValueError(f"{strange[0]} in software.provides, but should be NAME=value or one of {', '.join(PROVIDES)}")
    return words


def module_file(site: Site, module: str) -> str:
    """The text of MODULE.lua. In NAME=value, {folder} is the module's folder, and {mpi} an MPI's."""
    words, lines = provided(site, module), [f'whatis("stand-in for {module}")']
    folder = f"{HOME}/{'net-plugin' if 'network-plugin' in words else 'empty'}"
    for word in words:
        name, _, value = word.partition("=")
        does = PROVIDES.get(word) or f'setenv("{name}", "{value.format(folder=folder, mpi=MPI)}")'
        lines.append(does.replace("{name}", module.replace("/", "-")))
    return "\n".join(lines) + "\n"


def modules_at(site: Site) -> dict[str, list[str]]:
    """Modules of site.toml, by the folder that a script passes to `module use` before it loads them; "" if none does."""
    modules = site.modules
    folders: dict[str, str] = {}
    for script in site.scripts:
        used = ""
        for line in script.read_text().splitlines():
            if use := re.match(r"\s*module use (\S+)", line):
                used = value_of(site, use[1])
            elif load := re.search(r"\bmodule +(?:-\S+ +)*load +([^&|;}]+)", line):
                folders |= {module: used for module in load[1].split() if module in modules and used}
    places: dict[str, list[str]] = {}
    for module in modules:
        places.setdefault(folders.get(module, ""), []).append(module)
    return places


def value_of(site: Site, text: str) -> str:
    """A word of the site's scripts, with variables replaced that a script sets to a constant."""
    lines = "\n".join(script.read_text() for script in site.scripts)
    constants = dict(re.findall(r"^\s*(?:export )?(\w+)=([^\s$(`;]*(?:\$\{?\w+\}?[^\s$(`;]*)*)(?:\s|$)", lines, re.MULTILINE))
    text = text.strip("\"'")
    for _ in range(5):  # variables may name each other, to this depth
        text = re.sub(r"\$\{?(\w+)\}?", lambda name: constants.get(name[1], name[0]).strip("\"'"), text)
    return text


# ---- images ---------------------------------------------------------------------------------------------------------


def image_file(site: Site) -> str:
    """The image's path on the machine, if it is a file: site.toml has the end of the path, a script the whole."""
    image = site.software.get("image", "")
    if not image.endswith((".sif", ".sqfs", ".sqsh")):
        return ""
    words = {word for script in site.scripts for word in re.findall(r"[\w./${}-]+", script.read_text())}
    paths = {value_of(site, word) for word in words if word.endswith(image.rpartition("/")[2])} | {image}
    if not (absolute := sorted(path for path in paths if path.startswith("/") and f"/{path}".endswith(f"/{image}"))):
        raise ValueError(f"image={image} in {site.name}'s site.toml: no script says in which folder it lies")
    return absolute[0]


def takes_an_image(site: Site) -> bool:
    """True if a choice runs in an image that the user brings."""
    return any("{image}" in choice.get("install", "") for choice in site.toml.get("job", {}).get("choices", []))


# ---- which stand-ins -------------------------------------------------------------------------------------------------


def stand_ins(site: Site) -> dict[str, list[str]]:
    """Commands by their folder below HOME; "" for /usr/local/bin."""
    image, provides = site.software.get("image", ""), provided(site)
    commands: dict[str, list[str]] = {"": []}
    if "conda" in provides:
        commands["conda/bin"] = ["conda", "activate"]
    if "compilers" in provides:
        commands["wrappers/bin"] = ["cc"]
    if image_file(site) or takes_an_image(site):
        commands[""] += ["singularity", "apptainer", "contained"]
    elif image:
        commands[""] += ["shifter", "shifterimg", "contained"]
    if brings_a_plugin(site):
        commands["rccl"] = ["rccl.py"]
    if site.toml.get("scheduler") == "pbs":
        commands[""] += ["qsub", "qstat", "qdel", "qsig", "pbsnodes", "mpiexec"]
    return commands


def brings_a_plugin(site: Site) -> bool:
    """True if one of its modules has a network plugin for RCCL."""
    return "network-plugin" in provided(site)


def machine_facts(site: Site) -> dict[str, str]:
    """Facts about the machine that stand-ins read."""
    node, queue, software = (site.toml.get(table, {}) for table in ("node", "queue", "software"))
    cores, threads = node.get("cores", 1), node.get("threads_per_core", 1)
    reserved = [core + thread * cores for thread in range(threads) for core in numbers(node.get("reserved", ""))]
    image = software.get("image", "")
    return dict(
        PLAIN_HOME=PLAIN,
        MPI_HOME=MPI,
        CONTAINED="/usr/local/bin/contained",
        ENVIRONMENT=prefix.ROOT,
        IMAGE_PATH=f"{PYTHON}/bin:{HOME}/image/bin",
        IMAGES="" if image_file(site) else image,
        CPUS=str(cores * threads),
        RESERVED=" ".join(map(str, reserved)),
        SERVER=LOGIN,
        QUEUES=" ".join(queue.get("partitions", [])),
        REQUIRED=" ".join(["Account_Name"] * ("account" in queue) + ["filesystems"] * ("filesystems" in queue)),
        DOMAIN=node.get("nodefile_domain", ""),
    )


# ---- all together ----------------------------------------------------------------------------------------------------


def build(site: Site, folder: Path, base: Path = Path("/"), cache: Path = prefix.CACHE) -> Layer:
    """Make the layer. base: the root that nodes boot from. Raises ValueError if site.toml and the scripts lack a fact."""
    overlay, tree = folder / "overlay", folder / "tree"
    home = overlay / HOME.lstrip("/")
    (home / "empty").mkdir(parents=True)
    for below, names in stand_ins(site).items():
        for name in names:
            lay(name, home / below if below else overlay / "usr/local/bin")
    if not site.modules and "image" not in site.software:
        # The machine's own python3 may be too old, or not the one that torch was built for. A script, not a link: an
        # environment made through a link looks for its library beside the link.
        (overlay / "usr/local/bin").mkdir(parents=True, exist_ok=True)
        (overlay / "usr/local/bin/python3").write_text(f'#!/bin/sh\nexec {PLAIN}/bin/python3 "$@"\n')
        (overlay / "usr/local/bin/python3").chmod(0o755)
    (home / "facts").write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in machine_facts(site).items()))

    modulepath = folder / "modules"
    modulepath.mkdir()
    for used, modules in modules_at(site).items():
        root = tree / used.lstrip("/") if used else modulepath
        for module in modules:
            path = root / f"{module}.lua"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(module_file(site, module))
    (modulepath / f"{OF_A_LOGIN}.lua").write_text('whatis("stand-in for what a login loads by itself")\n')
    if brings_a_plugin(site):
        compile_empty(home / "net-plugin/lib/librccl-net.so")
    if "image" in site.software or takes_an_image(site):
        link_commands(home / "image/bin", base)
    if image := image_file(site):
        (tree / image.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (tree / image.lstrip("/")).write_text("A stand-in for an image: the stand-in for singularity looks no further.\n")

    domain = site.toml.get("node", {}).get("nodefile_domain")
    torch_wheels(site, home / "wheels", prefix.required("torch").version)
    return Layer(
        overlay=overlay,
        modulepath=modulepath,
        paths=places(tree, base) | local_disks(site, base) | {prefix.ROOT: prefix.make(cache)},
        hosts=[f"{{name}}.{domain}"] if domain else [],
        # The nodes have no network. pip uses wheels that were downloaded before, and no user's settings.
        environment=dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=f"{prefix.ROOT}/wheels {HOME}/wheels", PIP_CONFIG_FILE=os.devnull)
        | dict(LMOD_SYSTEM_DEFAULT_MODULES=OF_A_LOGIN)
        # A node's many CPUs are this machine's few, so several threads a rank would slow each other down.
        | dict(OMP_THREAD_LIMIT="1"),
    )


def lay(name: str, where: Path) -> None:
    """Install one stand-in. One in Python uses the test environment's Python, whatever the job has done to PATH."""
    where.mkdir(parents=True, exist_ok=True)
    text = (HERE / ("singularity" if name == "apptainer" else name)).read_text()
    (where / name).write_text(text.replace("#!/usr/bin/env python3\n", f"#!{PYTHON}/bin/python3 -I\n", 1))
    (where / name).chmod(0o755)


def places(tree: Path, base: Path = Path("/")) -> dict[str, Path]:
    """Folders below tree that base lacks, each as high up as possible, by the path where it belongs."""
    paths, ahead = {}, sorted(tree.iterdir()) if tree.is_dir() else []
    while ahead:
        path = ahead.pop()
        on_the_nodes = path.relative_to(tree)
        if (base / on_the_nodes).is_dir():
            ahead += sorted(path.iterdir())
        else:
            paths[f"/{on_the_nodes}"] = path
    return paths


def local_disks(site: Site, base: Path = Path("/")) -> dict[str, None]:
    """Folders named for the user that scripts write to and base lacks: each is a disk of the node, empty at first."""
    text = "\n".join(script.read_text() for script in site.scripts)
    disks = set(re.findall(OF_A_USER_S_DISK, text))
    return {f"{folder}/{{user}}": None for folder in sorted(disks) if not Path(f"{base}{folder}").is_dir()}


def compile_empty(library: Path) -> None:
    library.parent.mkdir(parents=True)
    command = ["cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, input="int stand_in;\n", text=True, check=True)


def link_commands(to: Path, base: Path = Path("/")) -> None:
    """Make an image's /usr/bin: base's, without the scheduler, and without any Python but the image's own."""
    to.mkdir(parents=True)
    for path in (base / "usr/bin").iterdir():
        if not re.fullmatch(rf"{OUTSIDE}|python.*|pip.*", path.name):
            (to / path.name).symlink_to(f"/usr/bin/{path.name}")


def torch_wheels(site: Site, folder: Path, version: str) -> None:
    """Make a wheel for each torch that the site's scripts ask pip for. It installs a link to the test environment's torch.

    Its version shows that it is a stand-in: 2.10.0+stand.in satisfies torch==2.10.0.
    """
    folder.mkdir(parents=True)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-none-any"  # another Python could not load that torch
    asked = {release for script in site.scripts for release in re.findall(r"\btorch==([\d.]*\d)", script.read_text())}
    for release in sorted(asked | {version.partition("+")[0]}):
        name, info = f"torch-{release}+stand.in", f"torch-{release}+stand.in.dist-info"
        files = {
            "torch-of-the-test-environment.pth": f"{prefix.ROOT}/torch\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {release}+stand.in\nSummary: torch {version}\n",
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: conformance\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }
        with zipfile.ZipFile(folder / f"{name}-{tag}.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
            record = "".join(f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items())
            wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")

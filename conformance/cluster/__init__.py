"""The virtual cluster: a real Slurm on this machine, with nodes of a site's shape, made from its site.toml.

    python -m conformance.cluster.virtual --site NAME_OR_FOLDER [--nodes N] [--keep]

virtual.py starts and ends it; layer.py makes what a job finds there besides Slurm.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    """What a job finds on the machine besides Slurm. layer.py makes it; virtual.py puts it on every node."""

    # A tree laid over the nodes' root: stand-ins in usr/local/bin/, etc/profile.d/... It is copied, so keep it small.
    overlay: Path
    # Lmod's module files. They are bound to /opt/modulefiles, which is then all of MODULEPATH.
    modulepath: Path | None = None
    # Absolute path on the nodes ({user} is filled in) to the file or folder that is bound there. None: an empty folder on each
    # node, which belongs to the user, like a local disk.
    paths: dict[str, Path | None] = field(default_factory=dict)
    # More names of each node, with the node's name filled in: "{name}.hsn.example.org".
    hosts: list[str] = field(default_factory=list)
    # Variables that a login shell exports.
    environment: dict[str, str] = field(default_factory=dict)

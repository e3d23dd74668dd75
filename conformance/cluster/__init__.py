"""The virtual cluster: a real Slurm on this machine, with nodes of a site's shape, made from its site.toml.

    python -m conformance.cluster.virtual --site NAME_OR_FOLDER [--nodes N] [--keep]

virtual.py raises and ends it, layer.py makes what a job finds there.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    """What a job finds on the machine beside Slurm: made by layer.py, put on every node by virtual.py."""

    # A tree that lies over the nodes' root: usr/local/bin/... with stand-ins, etc/profile.d/... It is copied, so keep it small.
    overlay: Path
    # Lmod's module files, bound to /opt/modulefiles, which is then all of MODULEPATH.
    modulepath: Path | None = None
    # Absolute path on the nodes ({user} is filled in) to the file or folder that is bound there; None: an empty folder of each
    # node's own, the user's, as a local disk is.
    paths: dict[str, Path | None] = field(default_factory=dict)
    # More names of each node, before which its name is filled in: "{name}.hsn.example.org".
    hosts: list[str] = field(default_factory=list)
    # What a login shell exports.
    environment: dict[str, str] = field(default_factory=dict)

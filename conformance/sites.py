"""The sites of this repository and what their launchers export. Sites are found by sites/*/site.toml, never by name.

What conformance reads of a site.toml:

    name = "..."  operator = "..."  scheduler = "..."  launcher = "..."  submit = "job.sl"
    [node]                      the shape of a node
    [[launchers]]               each way in which this site starts ranks
    name = "srun"
    [launchers.environment]     what that launcher exports to a rank; {placeholders} as in Launch.environ
    SLURM_PROCID = "{rank}"
"""

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What a scheduler or an MPI has exported to the test's own ranks: no rank of a site may be told by it.
FOREIGN = re.compile(r"(SLURM|SRUN|PBS|PALS|PMI|PMIX|MPI|MPIEXEC|MPIR|OMPI|HYDRA|HYDI|TORCHELASTIC)_")
TOLD = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "EXPECT_WORLD"}


@dataclass(frozen=True)
class Launch:
    """One launcher of one site."""

    site: str
    launcher: str
    train: Path
    templates: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.site}, {self.launcher}"

    def environ(self, rank: int, world_size: int, num_nodes: int, port: int, job_id: str) -> dict[str, str]:
        """What this launcher exports to one rank, the ranks lying in blocks on equal nodes."""
        per_node = world_size // num_nodes
        values = dict(rank=rank, world_size=world_size, local_rank=rank % per_node, local_world_size=per_node)
        values |= dict(node_rank=rank // per_node, num_nodes=num_nodes, job_id=job_id, restart=0)
        values |= dict(master_addr=os.uname().nodename, master_port=port)
        # Slurm's own spelling of the ranks on each node: 4 on one node, 4(x2) on two.
        values |= dict(tasks_per_node=per_node if num_nodes == 1 else f"{per_node}(x{num_nodes})")
        return {name: template.format(**values) for name, template in self.templates}


@dataclass(frozen=True)
class Site:
    folder: Path
    facts: dict

    @property
    def name(self) -> str:
        return self.facts["name"]

    @property
    def launches(self) -> list[Launch]:
        return [
            Launch(self.name, launcher["name"], self.folder / "train.py", tuple(launcher["environment"].items()))
            for launcher in self.facts["launchers"]
        ]


def find(only: str | None = None) -> list[Site]:
    """All sites, or the one of that name or in that folder. Raises ValueError when there is none."""
    if only and Path(only, "site.toml").is_file():
        folders = [Path(only).resolve()]
    else:
        folders = sorted(path.parent for path in ROOT.glob("sites/*/site.toml"))
    found = [Site(folder, tomllib.loads((folder / "site.toml").read_text())) for folder in folders]
    if only and not Path(only, "site.toml").is_file():
        found = [site for site in found if site.name == only]
    if not found:
        raise ValueError(f"--site {only}: no such site" if only else f"no site.toml below {ROOT / 'sites'}")
    return found


def without_launcher() -> dict[str, str]:
    """The environment of this process without what a launcher may have put there."""
    return {name: value for name, value in os.environ.items() if not FOREIGN.match(name) and name not in TOLD}

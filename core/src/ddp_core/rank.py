"""Rank: which process of the job this is. Each site's train.py makes one from the variables that its launcher exports.

The core knows no scheduler: a site says which variable holds which field, and errors name that variable.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_core.errors import PreflightError, printable

# More ranks than any machine has; and the longest host name that a resolver takes: labels of 63 characters, 253 in all.
MOST_RANKS, ADDRESS = 10**6, re.compile(r"(?=.{1,253}$)[\w:%-]{1,63}(\.[\w:%-]{1,63})*\.?", re.ASCII)
SHORTEST_SECRET = 32  # characters: 128 bits, if they are hexadecimal digits


@dataclass(frozen=True)
class Rank:
    """This process among the ranks of its job. Raises PreflightError (a ValueError) on impossible values.

    rank, world_size             0..world_size-1, over the whole job
    local_rank, local_world_size the same, over the ranks on this node; not a device index
    node_rank                    this node's index, from 0
    master_addr, master_port     where rank 0 listens; port 0 only when world_size is 1
    job_id                       equal on all ranks of one start of a job, different for every other start: a rank sees by it
                                 that it has reached the rank 0 of another job
    restart                      how often this job was started before; --fresh takes effect only at start 0
    launcher_store               the launcher itself listens at master_addr (torchrun's agent does)
    secret                       only the ranks of one start of a job know it, and sign with it what they exchange while they
                                 meet. Rank.read takes it from DDP_SECRET. Without a secret anybody can sign; one that is too
                                 short is refused
    variables                    field name to the environment variable it was read from, for error messages
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    job_id: str
    restart: int = 0
    launcher_store: bool = False
    secret: str = field(default="", repr=False)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def single(cls) -> "Rank":
        """The rank of a world of one: `python train.py` without a launcher. A site must choose this explicitly."""
        return cls(0, 1, 0, 1, 0, "127.0.0.1", 0, "single")

    @classmethod
    def read(cls, environ: Mapping[str, str], launcher_store: bool = False, **variables: str) -> "Rank":
        """Read a Rank from environment variables, one per field: Rank.read(os.environ, rank="RANK", ...).

        Raises PreflightError that names the variable and its value. Only `restart` may be unset; it is then 0.
        """
        values: dict[str, Any] = {}
        for name, variable in variables.items():
            text = environ.get(variable, "").strip() or ("0" if name == "restart" else "")
            if not text:
                raise PreflightError(f"{variable} is not set ({name} is read from it): start this program as job scripts do")
            if name not in ("master_addr", "job_id") and not (text.isascii() and text.isdigit() and len(text) < 19):
                raise PreflightError(f"{variable}={text[:80]!r}, but should be a whole number from 0 up ({name})")
            values[name] = text if name in ("master_addr", "job_id") else int(text)
        return cls(**values, launcher_store=launcher_store, secret=environ.get("DDP_SECRET", ""), variables=variables)

    def __post_init__(self):
        one_node = self.local_world_size == self.world_size
        lowest_port = 0 if self.world_size == 1 else 1
        check = self._check
        check(1 <= self.world_size <= MOST_RANKS, f"1 to {MOST_RANKS}", "world_size")
        check(0 <= self.rank < self.world_size, "below the world size", "rank", "world_size")
        check(1 <= self.local_world_size <= self.world_size, "1 to the world size", "local_world_size", "world_size")
        check(0 <= self.local_rank < self.local_world_size, "below the ranks of its node", "local_rank", "local_world_size")
        check(self.local_rank <= self.rank, "at most the rank", "local_rank", "rank")
        check(0 <= self.node_rank < self.world_size, "below the world size", "node_rank", "world_size")
        check(not one_node or self.node_rank == 0, "0: all are on one node", "node_rank", "local_world_size", "world_size")
        check(not one_node or self.local_rank == self.rank, "the rank: all are on one node", "local_rank", "rank", "world_size")
        check(bool(ADDRESS.fullmatch(self.master_addr)), "one address", "master_addr")
        check(lowest_port <= self.master_port <= 65535, "a port from 1 to 65535", "master_port")
        check(0 < len(self.job_id) <= 256 and self.job_id.isprintable(), "this job's own name", "job_id")
        check(self.restart >= 0, "0 or more", "restart")
        if 0 < len(self.secret) < SHORTEST_SECRET:  # not with _check, which would print the secret
            given = f"{len(self.secret)} characters, but should have {SHORTEST_SECRET} or more"
            raise PreflightError(f"the job's secret (DDP_SECRET) has {given}: openssl rand -hex 32 makes one")
        reachable = one_node or not _is_loopback(self.master_addr)
        check(reachable, "an address of the first node that the others reach", "master_addr", "world_size", "local_world_size")

    def _check(self, holds: bool, should_be: str, *names: str) -> None:
        if not holds:
            first, *others = (f"{self.variables.get(name, name)}={printable(repr(getattr(self, name)))}" for name in names)
            raise PreflightError(f"{first}, but should be {should_be}" + (f" ({', '.join(others)})" if others else ""))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("localhost", "localhost.localdomain")

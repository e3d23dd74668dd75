"""sound: a whole site for a machine that does not exist, whose launcher `march` exports MARCH_*.

march --nodes 2 --each 4 python train.py --epochs 5
"""

from collections.abc import Mapping

from ddp_core import Rank, run


def rank(environ: Mapping[str, str]) -> Rank:
    """The Rank that march tells; without it, a world of one. Raises PreflightError that names the variable."""
    if not any(name.startswith("MARCH_") for name in environ):
        return Rank.single()
    return Rank.read(
        environ,
        rank="MARCH_RANK",
        world_size="MARCH_RANKS",
        local_rank="MARCH_PLACE",
        local_world_size="MARCH_PLACES",
        node_rank="MARCH_NODE",
        master_addr="MARCH_HEAD",
        master_port="MARCH_PORT",
        job_id="MARCH_START",
        restart="MARCH_RESTARTS",
    )


if __name__ == "__main__":
    raise SystemExit(run(rank))

"""ddp_core: one PyTorch DDP training program, the same at every site. A site's train.py and a workload need these names."""

from ddp_core.rank import Rank
from ddp_core.run import run

__all__ = ["Rank", "Workload", "run"]
__version__ = "0.2.0"


def __getattr__(name: str):
    """Workload comes with torch, and Rank is needed before it: an MPI library may have to be started first."""
    if name == "Workload":
        from ddp_core.workload import Workload

        return Workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

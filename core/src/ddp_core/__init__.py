"""ddp_core: one PyTorch DDP training program, the same at every site. A site's train.py and a workload import Rank, Workload
and run from here.
"""

import os
import sys
from importlib.machinery import PathFinder


def _refuse_namesakes(folder: str) -> None:
    """Exit if a file beside the script has the name of a standard module: it hides that module, and torch would fail with a
    misleading traceback.
    """
    try:
        names = {entry.removesuffix(".py") for entry in os.listdir(folder or ".")}
    except OSError:  # with python -P, sys.path[0] is a zip archive
        return
    for name in sorted(names & (sys.stdlib_module_names - {*sys.builtin_module_names})):
        beside = PathFinder.find_spec(name, [folder or "."])
        imported = getattr(sys.modules.get(name), "__file__", None)  # a module imported before the script began stays
        if beside and beside.origin and imported in (None, beside.origin):
            print(f"error: {beside.origin} hides Python's own module {name}: rename it", file=sys.stderr)
            raise SystemExit(2)


_refuse_namesakes(sys.path[0])

from ddp_core.rank import Rank  # noqa: E402
from ddp_core.run import run  # noqa: E402

__all__ = ["Rank", "Workload", "run"]
__version__ = "0.2.0"


def __getattr__(name: str):
    """Import Workload only on access, since it imports torch: a site that needs Rank may have to start MPI before torch."""
    if name == "Workload":
        from ddp_core.workload import Workload

        return Workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

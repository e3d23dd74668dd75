"""torch._dynamo, the compiler's front end, imported when somebody compiles and not before.

DistributedDataParallel and every optimizer of torch.optim import it, a second or two of CPU time in each rank, for three
trivial answers (torch 2.8 to 2.13: nn/parallel/distributed.py, optim/optimizer.py, _compile.py). Until anything else is
asked of it, a stand-in gives these answers; then the real module takes its place.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

NAME = "torch._dynamo"


class _StandIn(ModuleType):
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # its default: DDP's own C++ reducer
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break(*_, **__) -> None:
        """Nothing is compiled, so there is no graph to break."""

    @staticmethod
    def disable(function=None, *_, **__):
        """What is not compiled need not be kept from it."""
        return function if function is not None else lambda function: function

    def __getattr__(self, name: str):
        # inspect.getmodule() asks every module for its __file__, also in the middle of an import: torch.distributed.tensor's
        # would close a circle with the real module's.
        if name == "__file__" or (name in ("__path__", "__spec__") and sys.modules.get(NAME) is not self):
            raise AttributeError(name)
        return getattr(_real(self), name)


def _real(stand_in: ModuleType) -> ModuleType:
    import torch

    if sys.modules.get(NAME) is stand_in:
        del sys.modules[NAME], torch._dynamo
    module = importlib.import_module(NAME)
    torch._dynamo = module
    return module


def put_off() -> None:
    """Unless it is there already. Called once, before the first process group."""
    import torch

    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _StandIn(NAME)

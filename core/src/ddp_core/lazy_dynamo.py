"""Import torch._dynamo, the compiler's front end, only when something is compiled.

DistributedDataParallel and every optimizer of torch.optim import it: one or two seconds of CPU time in each rank, for three
trivial functions (torch 2.8 to 2.13: nn/parallel/distributed.py, optim/optimizer.py, _compile.py). A stand-in provides these
three. On access to anything else the real module replaces it.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

NAME = "torch._dynamo"


class _StandIn(ModuleType):
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # torch's default: DDP's own C++ reducer
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break(*_, **__) -> None:
        """Nothing is compiled, so there is no graph to break."""

    @staticmethod
    def disable(function=None, *_, **__):
        """Return the function unchanged: without a compiler there is nothing to disable."""
        return function if function is not None else lambda function: function

    def __getattr__(self, name: str):
        # inspect.getmodule() reads __file__ of every module, even during an import: loading the real module in the middle of
        # importing torch.distributed.tensor would be a circular import.
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
    """Install the stand-in, unless torch._dynamo is imported already. Called once, before the first process group."""
    import torch

    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _StandIn(NAME)

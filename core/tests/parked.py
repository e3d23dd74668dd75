"""Imports torch._dynamo once in the fork server and puts it aside, so that ranks get it without a new import.

Sharding imports it: 0.7 s of CPU time per rank. Other ranks do not see it, as in a fresh process (lazy_dynamo.py).
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import ddp_core.sharding  # noqa: F401 - and the modules that it imports
import torch._dynamo

NAME = "torch._dynamo"


class Parked:
    """Finds the modules that were put aside. https://docs.python.org/3/reference/import.html#finders-and-loaders"""

    def __init__(self):
        names = [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]
        self.modules = {name: sys.modules.pop(name) for name in names}

    def find_spec(self, name: str, *_) -> ModuleSpec | None:
        module = self.modules.get(name)
        return ModuleSpec(name, self, is_package=hasattr(module, "__path__")) if module else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """The module was executed in the fork server; its submodules come back with it."""
        sys.modules.update(self.modules)


sys.meta_path.insert(0, Parked())
del torch._dynamo

"""A stand-in for CUDA graphs: what was computed while one was captured is computed again at each replay, in the same memory.

As with real ones, nothing has been computed when the capture is over, the host's own numbers are those of the capture, and
a value that is asked for in a capture is an error.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    def __init__(self):
        self.calls: list = []

    def replay(self) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for function, arguments, keywords, results in self.calls:
                again = function(*arguments, **keywords)
                for place, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():  # equal: a view, or in place
                        place.copy_(value)


class Capturing(TorchDispatchMode):
    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.before, self.generator = graph, {}, torch.default_generator.get_state()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in tree_leaves((arguments, keywords)):  # all: of native_batch_norm no schema says what it writes to
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*arguments, **(keywords or {}))
        self.graph.calls.append((function, arguments, keywords or {}, result))
        return result

    def undo(self) -> None:
        for storage, content in self.before.values():
            storage.copy_(content)
        torch.default_generator.set_state(self.generator)


def install(say) -> None:
    @contextmanager
    def capture(graph: Graph, stream):
        with Capturing(graph) as capturing:
            yield
        capturing.undo()
        say("captured", "a step")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture
    torch.cuda.Stream = lambda device: stream
    torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda chosen: nullcontext()

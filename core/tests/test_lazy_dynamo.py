"""Only ranks that compile import torch's compiler, which adds a second or two to a rank's start.

python -m pytest core/tests/test_lazy_dynamo.py
"""

import sys

import pytest
import ranks
from ranks import call, train

REAL = "torch._dynamo.eval_frame"  # a submodule of the real compiler


def _tell_at_the_end() -> None:
    from ddp_core.process_group import Peers

    leave = Peers.leave

    def telling(self):
        print("the compiler is", "there" if REAL in sys.modules else "not there", flush=True)
        leave(self)

    Peers.leave = telling


def test_a_run_under_ddp_does_not_import_it(tmp_path):
    tells = {rank: call("test_lazy_dynamo", "_tell_at_the_end") for rank in range(2)}
    job = train(tmp_path / "run", "--epochs 1", 2, faults=tells, code=0)
    assert job.records("start")[0]["reduction"] == "ddp"
    assert all("the compiler is not there" in text for text in job.out)


def _tell_what_is_compiled() -> None:
    import torch

    torch.compile = lambda model: print("compiled", type(model).__name__) or model


def test_a_run_compiles_its_model_if_asked_to(tmp_path):
    flags, tells = "--compile --epochs 1", {0: call("test_lazy_dynamo", "_tell_what_is_compiled")}
    job = train(tmp_path / "run", flags, workload="small:Small", faults=tells, code=0)
    assert job.out[0].count("compiled Sequential\n") == 1


def _compile() -> None:
    from ddp_core import lazy_dynamo

    lazy_dynamo.put_off()
    import torch

    assert REAL not in sys.modules and torch._dynamo is sys.modules["torch._dynamo"]
    model = torch.nn.Linear(3, 2)
    torch.optim.AdamW(model.parameters(), lr=0.1)
    assert REAL not in sys.modules, "making an optimizer imports it"
    inputs = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.compile(model, backend="eager")(inputs), model(inputs))
    assert REAL in sys.modules and type(sys.modules["torch._dynamo"]).__name__ == "module"


def test_who_compiles_gets_the_real_one(tmp_path):
    """The stand-in replaces itself at the first attribute that it lacks."""
    job = ranks.fork(tmp_path, call("test_lazy_dynamo", "_compile"))
    assert job.codes == [0], job.err


def _ask() -> None:
    from ddp_core import lazy_dynamo

    lazy_dynamo.put_off()
    import torch._dynamo

    assert torch._dynamo.config.cache_size_limit > 0 and REAL in sys.modules
    lazy_dynamo.put_off()
    assert type(sys.modules["torch._dynamo"]).__name__ == "module", "the real one was put away again"


def test_who_asks_it_for_anything_gets_the_real_one(tmp_path):
    job = ranks.fork(tmp_path, call("test_lazy_dynamo", "_ask"))
    assert job.codes == [0], job.err


def _stop_the_compiler(told: bool) -> None:
    import os
    import signal

    import torch

    class CppCompileError(RuntimeError):
        __module__ = "torch._inductor.exc"

    def stopped(*_):
        if told:
            os.kill(os.getpid(), signal.SIGUSR1)
        raise CppCompileError("C++ compile error")

    torch.compile = lambda model: model.register_forward_pre_hook(stopped) and model


@pytest.mark.parametrize("told, code", [(True, 75), (False, 2)])
def test_a_stop_that_ends_the_compiler_is_one(tmp_path, told, code):
    """Ctrl-C, or a signal to a job step, also reaches the C++ compiler."""
    faults = {0: call("test_lazy_dynamo", "_stop_the_compiler", told)}
    job = train(tmp_path / "run", "--compile --epochs 1", workload="small:Small", faults=faults, code=code)
    assert ("SIGUSR1 while the model was compiled at step 0: what was saved is whole" in job.error) == told

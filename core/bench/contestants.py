"""One rank of one contestant: common.World starts it, and asks it for epochs by lines on its standard input.

    python core/bench/contestants.py NAME FLAGS...

NAME is `ours`: our program, driven by the Trainer's own _run_epoch; `our start`: our program as a user runs it; or one of
loops.CONTESTANTS. All train the same model from the same initial parameters on the same rows, under DistributedDataParallel.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator


class Turns:
    """The rank's end of common.World: requests come in on standard input, replies go out on what was standard output."""

    def __init__(self):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the benchmark
        self.replies = os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the contestants print as usual, and nobody reads it

    def reply(self, **values) -> None:
        print(json.dumps(values), file=self.replies, flush=True)

    def epochs(self, model, steps: int) -> Iterator[int]:
        """Yield the number of each epoch to train, of `steps` steps. Ends the process when the benchmark has ended."""
        import torch
        import torch.distributed as dist

        def wait_for_all() -> None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if dist.is_initialized():
                dist.barrier()

        epoch = 0
        for request in map(json.loads, iter(sys.stdin.readline, "")):
            if "save" in request:
                _save(model, request["save"])
                self.reply()
                continue
            wait_for_all()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(request["epochs"]):
                yield epoch
                epoch += 1
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            spent = dict(seconds=time.perf_counter() - began, cpu=time.process_time() - cpu)
            self.reply(**spent, steps=steps * request["epochs"], **_memory())
        os._exit(0)


def _memory() -> dict[str, int]:
    """Bytes of this process: resident now, resident at the peak, and at the peak on its device."""
    import torch

    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    found = {name: int(lines[key].split()[0]) * 1024 for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))}
    device = torch.accelerator.is_available() and torch.get_device_module().max_memory_allocated()
    return found | dict(device=int(device))


def _save(model, path: str) -> None:
    from safetensors.torch import save_file

    if os.environ["RANK"] == "0":
        save_file({str(i): value.detach().cpu().contiguous() for i, value in enumerate(model.parameters())}, path)


def main() -> None:
    turns, (name, *flags) = Turns(), sys.argv[1:]
    if name == "our start":
        import ours

        turns.reply(began=time.monotonic())
        sys.exit(ours.run(flags))
    elif name == "ours":
        import ours

        ours.run_in_turns(flags, turns.epochs)
    else:
        import loops

        loops.CONTESTANTS[name](flags, turns.epochs)


if __name__ == "__main__":
    main()

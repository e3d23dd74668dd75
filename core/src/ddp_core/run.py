"""run(rank): a whole training program, from flags to exit code. A site's train.py calls it, and nothing else of core."""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict

from ddp_core.config import TrainConfig, parse
from ddp_core.errors import Failure, PeerLostError, UsageError
from ddp_core.rank import Rank
from ddp_core.stop import StopFlag


def run(rank_of: Callable[[Mapping[str, str]], Rank], argv: list[str] | None = None) -> int:
    """Train as this rank; the exit code (errors.py) is returned, and of several ranks each ends its process with it.

    rank_of: the site's function of os.environ.
    """
    began, rank, stop, failure = time.monotonic(), None, StopFlag(), None
    argv = sys.argv[1:] if argv is None else argv
    try:
        rank = rank_of(os.environ)
        stop.listen()  # again: an MPI library that was started and ended there can have kept SIGUSR1 (MPICH 5.0.2 does)
        code = _train(rank, parse(argv, rank.world_size, quiet=rank.rank != 0), stop, began)
    except Failure as error:
        failure, code = error, int(error.code)
    finally:
        stop.ignore()
    if failure:
        where = f" [rank {rank.rank}, {os.uname().nodename}]" if rank and rank.world_size > 1 else ""
        if not rank or rank.rank == 0 or not (failure.everywhere or isinstance(failure, UsageError)):
            print(f"error{where}: {failure}", file=sys.stderr)
        if "--debug" in argv:
            traceback.print_exception(failure)
    if rank and rank.world_size > 1:
        # Not through Python: gloo's threads may wait for a peer that does not come, and one that asks for the interpreter
        # while it ends aborts the process: 134 in place of 5 in 3 of 9 refused snapshots, on two nodes, and once, it seems,
        # in place of 0. https://github.com/pytorch/pytorch/pull/179291
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _train(rank: Rank, config: TrainConfig, stop: StopFlag, began: float) -> int:
    if not config.debug:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # pages of C++ frames, and harmless warnings
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # it is not needed
    # Not at the top of the file: --help and a mistyped flag need no torch, and a signal during this import is kept.
    import torch

    from ddp_core.data import load
    from ddp_core.device import describe, prepare_device, versions
    from ddp_core.process_group import Peers
    from ddp_core.record import Record
    from ddp_core.rendezvous import Rendezvous
    from ddp_core.snapshot import RunDirectory
    from ddp_core.trainer import Trainer

    record = Record(began)
    record.lap("imports")
    rendezvous = Rendezvous(rank, config, stop)
    record.lap("rendezvous")
    failure = directory = state = peers = trainer = None
    row, facts = {}, asdict(config) | versions()
    try:
        try:
            device = prepare_device(config, rank)
            row = describe(config, rank, device)
            data = load(config)
            facts["data"] = data.fingerprint
            if rank.rank == 0:
                directory = RunDirectory(config.run_dir, rank.job_id, config.fresh)
                state = directory.load()
                record.open(directory.log)
        except Failure as error:
            failure = error
        record.lap("data")
        rows = rendezvous.check_in(facts, row, failure)
        peers = Peers(rank, config, device, rendezvous)
        record.lap("groups")
        try:
            trainer = Trainer(config, peers, device, data, directory, record, stop)
            trainer.restore(state)
            record.lap("model")
            record.start(rows, trainer)
            code = trainer.train()
            record.end(code, trainer)
            peers.agree(record.failure)
            peers.wait()
            peers.leave()
            return int(code)
        except torch.OutOfMemoryError as error:
            parts = f"--shards {config.shards}" if config.shards else f"--accumulate {config.accumulate}"
            fix = f"lower --global-batch-size {config.global_batch_size}, or raise {parts}"
            raise PeerLostError(f"out of memory on {device} at step {trainer and trainer.step}: {fix}") from error
        except RuntimeError as error:
            if not peers.is_lost(error):
                raise
            raise peers.lost(error, f"at step {trainer.step}" if trainer else "before the first step") from error
    except Failure as error:
        record.write("end", exit_code=error.code, error=str(error))
        if peers and not isinstance(error, PeerLostError):
            peers.leave()
        raise
    finally:
        if directory:
            directory.release()

"""run(rank_of): a whole training program, from flags to exit code. A site's train.py calls only this function of the core."""

import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_core.config import TrainConfig, choose, parse
from ddp_core.errors import ExitCode, Failure, PeerLostError, PreflightError, StoppedError, UsageError, WorkloadError
from ddp_core.output import lasting_output
from ddp_core.rank import Rank
from ddp_core.record import Record
from ddp_core.rehearsal import plan
from ddp_core.stop import StopFlag

# Here, not in run(): torch reads it on import, and a class passed as workload= or reduction= imports torch before run().
if "--debug" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else torch prints pages of C++ frames, and harmless warnings


OWN = str(Path(__file__).parent)


@lasting_output()
def run(
    rank_of: Callable[[Mapping[str, str]], Rank],
    argv: list[str] | None = None,
    workload: str | type | Path = "digits",
    reduction: type | None = None,
) -> int:
    """Train as this rank. Returns the exit code (errors.py); with several ranks it ends the process with that code instead.

    rank_of: the site's function from os.environ to its Rank. workload: the default for --workload: a name, file or class.
    reduction: a subclass of Reduction (reduction.py) that sums the gradients with another library.
    """
    argv = sys.argv[1:] if argv is None else argv
    faulthandler.register(signal.SIGUSR2, file=2)  # prints the stack of every thread: kill -USR2 shows where a run hangs
    os.umask(os.umask(0o077) | 0o002)  # other users must not write to a run's files and folders
    start_folder = ""
    with suppress(OSError):  # the folder may have been removed
        start_folder = os.getcwd()  # now, because the workload's file may change it
    began, rank, stop = time.monotonic(), None, StopFlag()
    try:
        rank = rank_of(os.environ)
        plan(os.environ, rank.rank, rank.restart)
        stop.listen()  # again: an MPI library that rank_of() starts and ends may keep SIGUSR1 (MPICH 5.0.2 does)
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # NumPy is optional
        try:
            chosen = choose(argv, workload if isinstance(workload, type) else str(workload))
            config = parse(argv, rank.world_size, quiet=rank.rank != 0, workload=chosen)
            if reduction and (config.reduction != "ddp" or config.sharding != "none"):
                other = f"--reduction {config.reduction}" if config.sharding == "none" else f"--sharding {config.sharding}"
                raise UsageError(f"{other}: this program sums gradients by {reduction.__name__}; see train.py")
        except ImportError as error:  # the core's own: that of a user's file is a WorkloadError
            fix = "run the site's install.sh, and start train.py with its Python"
            message = f"{sys.executable} cannot import what the core needs ({error}): {fix}"
            raise PreflightError(message, everywhere=True) from error
        except Failure as error:
            error.everywhere = True  # all ranks have the same flags and file, so rank 0 alone prints it
            if rank.rank and isinstance(error, WorkloadError):
                from ddp_core.rendezvous import REPORT_SECONDS, Rendezvous

                # If only this node lacks the file, rank 0 waits, and must be told. If rank 0 failed too, it does not answer.
                with suppress(Failure):
                    Rendezvous(rank, REPORT_SECONDS, stop).check_in({}, {}, error)
            raise
        run_dir, record = Path(start_folder, config.run_dir), Record(began, config.log_seconds)
        code = _train(_Job(rank, chosen, config, run_dir, stop, record, reduction))
    except Failure as error:
        code = int(error.code)
        where = f" [rank {rank.rank}, {os.uname().nodename}]" if rank and rank.world_size > 1 else ""
        if not rank or rank.rank == 0 or not error.everywhere:
            print(f"error{where}: {error}", file=sys.stderr)
        if "--debug" in argv:
            traceback.print_exception(error)
    except Exception:  # a bug of ours
        if not rank or rank.world_size == 1:
            raise
        traceback.print_exc()
        code = 1
    finally:
        stop.ignore()
    if rank and rank.world_size > 1:
        # Skip Python's own shutdown: a gloo thread that waits for a lost peer and then asks for the interpreter aborts the
        # process. Exit code 134 came instead of 5 in 3 of 9 refused snapshots on two nodes, and once, it seems, instead of 0.
        # https://github.com/pytorch/pytorch/pull/179291
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _train(job: "_Job") -> int:
    """Meet the other ranks, agree that all are ready, train. Returns the exit code. Raises a Failure."""
    from ddp_core import lazy_dynamo

    if not job.config.compile:
        lazy_dynamo.put_off()
    from ddp_core.device import backend_of, describe, prepare_device, program, raise_limits, source_digest, versions
    from ddp_core.last_words import spoken
    from ddp_core.process_group import Peers
    from ddp_core.rendezvous import Rendezvous
    from ddp_core.staging import Staging
    from ddp_core.workload import out_of_memory

    rank = job.rank
    job.record.lap("imports")
    raise_limits(rank)
    rendezvous = Rendezvous(rank, job.config.rendezvous_timeout, job.stop)
    staging = Staging(rank, rendezvous, job.config.stage_data == "on")
    job.workload.core_sets(staging=staging)
    job.record.lap("rendezvous")
    failure = peers = None
    # core first, since rank 0 reports the first difference: an outdated copy on one node also explains different flags.
    row, facts = {}, dict(core=source_digest(), workload_file=job.workload.digest()) | versions() | job.config.facts()
    try:
        try:
            job.device = prepare_device(job.config, rank)
            row = describe(job.config, rank, job.device)
            facts |= program(job.device) | job.prepare()
            row |= staging.note
        except Failure as error:
            failure = error
        except Exception as error:
            if not out_of_memory(error):
                raise
            failure = job.lacks_memory(error)
        staging.over = True
        job.record.lap("data")
        try:
            job.ranks = rendezvous.check_in(facts, row, failure) or [row]
        except Failure as verdict:
            raise verdict from failure  # --debug then shows the cause, too
        staging.close()
        job.workload.core_sets(staging=None)
        peers = Peers(rank, job.config, job.device, rendezvous)
        job.record.lap("groups")
        over_gloo = rank.world_size > 1 and backend_of(job.config, job.device.type) == "gloo"
        with spoken(job.last_words) if over_gloo and not job.config.debug else nullcontext():
            try:
                code = job.train(peers, facts)
                peers.agree(job.record.failure)
                job.trainer.reduction.leave()
                peers.wait()
                peers.leave()
                return int(code)
            except (Exception, SystemExit) as error:
                raise job.explain(error, peers) from error
            finally:
                job.finish_saving()
    except Failure as error:
        job.record.write("end", exit_code=error.code, error=str(error))
        # leave() only if all ranks fail together: nccl waits there for the others, which may wait for this rank.
        if peers and not peers.left and (error.everywhere or rank.world_size == 1):
            peers.leave()
        raise
    finally:
        staging.close()
        if job.trainer and rank.world_size == 1:  # with several ranks, os._exit() ends the workers, too
            job.trainer.close()
        if job.directory:
            job.directory.release()


@dataclass
class _Job:
    """What a run needs once its ranks have met: the workload's rows, the run directory, the trainer."""

    rank: Rank
    workload: Any
    config: TrainConfig
    run_dir: Path
    stop: StopFlag
    record: Record
    reduction: type | None
    device: Any = None
    directory: Any = None
    loaded: Any = None
    trainer: Any = None
    ranks: list[dict] = field(default_factory=list)

    def prepare(self) -> dict:
        """Read the data; on rank 0 also open the run directory. Returns facts that must be equal on all ranks."""
        from torch.distributed import is_initialized

        from ddp_core import data
        from ddp_core.run_directory import RunDirectory

        config, first = self.config, self.rank.restart == 0
        self.rows = data.of_workload(self.workload, config)
        if is_initialized():
            raise self.workload.unusable(
                "its file has called init_process_group: take it out, for train.py does before model()"
            )
        lengths = [0 if rows is None else len(rows) for rows in self.rows]
        self.fingerprint, self.other_rows, self.notes_on_data = data.fingerprint(*self.rows, self.workload, config)
        if self.rank.rank == 0:
            fresh, new = config.fresh and first, config.new_run_dir and first
            self.directory = RunDirectory(self.run_dir, self.rank.job_id, fresh, new, self.stop, config.max_shard_size)
            self.loaded = self.directory.load(config.sharding != "none", self.rank.restart)
            self.record.open(self.directory.log, self.directory.lost)
        return dict(training_rows=lengths[0], held_out_rows=lengths[1], data=self.fingerprint)

    def train(self, peers, facts: dict) -> ExitCode:
        """Build the trainer, resume, train, and write the start and end records."""
        from ddp_core.device import notes_on_cores
        from ddp_core.probe import notes_on_rows
        from ddp_core.staging import notes_on_copies
        from ddp_core.summary import summarize
        from ddp_core.trainer import Trainer

        record, parts = self.record, (self.directory, self.record, self.stop, self.reduction)
        self.trainer = trainer = Trainer(self.workload, self.config, peers, self.device, self.rows, self.fingerprint, *parts)
        trainer.restore(self.loaded)
        self.loaded = None  # frees memory: it is as large as model and optimizer state
        trainer.ranks = self.ranks
        record.lap("model")
        world = {name: facts[name] for name in ("data", "training_rows", "held_out_rows", "workload_file", "core")}
        world |= dict(world_size=peers.world_size, reduction=trainer.reduction.name, restart=self.rank.restart)
        world |= dict(optimizer=type(trainer.optimizer).__name__, versions=trainer.state.facts["versions"])
        world |= dict(signed=bool(self.rank.secret)) if peers.world_size > 1 else {}
        begun = trainer.step
        notes = notes_on_rows(self.other_rows, self.notes_on_data, self.rows[1] is not None, trainer.probed.notes)
        notes += notes_on_cores(self.ranks) + notes_on_copies(self.ranks) + self._check_place(peers)
        notes += self._notes_on_another_file(facts) if begun and peers.rank == 0 else []
        record.start(begun, len(trainer.state.progress.history), self.config.facts(), self.ranks, notes, **world)
        code = trainer.train()
        record.end(code, trainer, *summarize(trainer, trainer.step - begun), trained=trainer.step > begun)
        return code

    def finish_saving(self) -> None:
        """Finish a save in progress, whatever ends the run: its state is from an earlier step, and good."""
        try:
            if self.trainer and self.trainer.saver:
                self.trainer.saver.settle()
        except Failure as error:
            print(f"warning: {error}", flush=True)

    def lacks_memory(self, error: BaseException) -> PeerLostError:
        """The Failure for memory that ran out, on the device or on the host, with what to change."""
        from torch import OutOfMemoryError

        config = self.config
        parts = f"--shards {config.shards}" if config.shards else f"--accumulate {config.accumulate}"
        fix = f"lower --global-batch-size {config.global_batch_size}, or raise {parts}"
        if config.sharding == "none" and self.rank.world_size > 1:
            fix += ", or pass --sharding full"
        if isinstance(error, OutOfMemoryError):
            return PeerLostError(f"out of memory on {self.device} {self.when}: {fix}")
        where = f"rank {self.rank.rank} on {os.uname().nodename}, in the host's own memory, {self.when}"
        return PeerLostError(f"out of memory, {where}: {fix}; or ask for more memory, or put fewer ranks on a node")

    @property
    def when(self) -> str:
        return f"at step {self.trainer.step}" if self.trainer else "before the first step"

    def last_words(self) -> str:
        from ddp_core.process_group import ALIKE

        return (
            f"error [rank {self.rank.rank}, {os.uname().nodename}]: C++ ended this process {self.when} (--debug: its words), "
            f"as gloo does where ranks send each other more or less than they wait for: {ALIKE}; what was saved is whole"
        )

    def _check_place(self, peers) -> list[str]:
        """Collective. A note if a rank does not see rank 0's lock in the run directory; then rank 0 writes all files alone."""
        from ddp_core.run_directory import LAG

        lock, end = self.run_dir / "run.lock", time.monotonic() + LAG
        text = peers.broadcast(lock.read_text() if lock.is_file() else "")
        while not (seen := lock.is_file() and lock.read_text() == text) and time.monotonic() < end:
            time.sleep(LAG / 20)
        blind = peers.which(not seen)
        self.trainer.rank_0_writes = bool(blind)
        if not blind or peers.rank:  # only rank 0 knows the hosts
            return []
        rank = f"rank {blind[0]} on {self.ranks[blind[0]]['host']}"
        return [f"--run-dir {self.config.run_dir} is not seen by {rank}: is it on a node's own disk? Another node begins anew"]

    def _notes_on_another_file(self, facts: dict) -> list[str]:
        """A note if the workload's file has changed since the previous start of this run."""
        before, digest = self.directory.lines("start"), facts["workload_file"]
        if not before or f'"workload_file":"{digest}"'.encode() in before[-1]:
            return []
        return [f"{self.workload.file}, or a file that it imports, has changed since the last start; --fresh begins anew"]

    def explain(self, error: BaseException, peers) -> BaseException:
        """Turn an exception of the training into a Failure; return it unchanged if it is a bug of ours."""
        from ddp_core import workload

        config, name, file = self.config, self.workload.name, self.workload.file
        failure: Any
        if isinstance(error, Failure):
            failure = error
        elif self.stop and type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.")):
            # --compile: the signal also ended the C++ compiler.
            failure = StoppedError(f"{self.stop.reason} while the model was compiled {self.when}: what was saved is whole")
        elif workload.out_of_memory(error):
            failure = self.lacks_memory(error)
        elif "Expected to have finished reduction" in str(error):  # DDP's message, ten lines long
            failure = workload.no_gradient(self.workload, self.trainer.step - 1)
        elif config.sharding != "none" and (what := workload.unknown_to_shards(error)):
            failure = WorkloadError(f"--sharding {config.sharding}: {workload.NO_SHARDS.format(what=what)}")
        elif isinstance(error, RuntimeError) and peers.is_lost(error) and not workload.raised_by(error, file):
            self.drop_connections()
            place = workload.line_in(error, file)
            return peers.lost(error, self.when, f"{place} of {name}" if place else "")
        elif workload.line_in(error, file):
            failure = workload.blame(error, file, f"--workload {name}, {self.when}")
        elif name not in workload.BUILT_IN and not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(OWN):
            # Raised in a library that torch called: an optimizer or a hook of the workload's file.
            failure = workload.blame(error, file, f"--workload {name}, {self.when} (--debug: where)")
        else:
            return error
        if not failure.everywhere and not isinstance(failure, PeerLostError):
            self.drop_connections()
            failure.everywhere = not peers.speaks(int(failure.code))
        return failure

    def drop_connections(self) -> None:
        """Drop all that holds connections to other ranks: worker processes inherit them, and DDP keeps its group."""
        if self.trainer:
            self.trainer.close()
            self.trainer.reduction = None
        if self.config.sharding != "none":
            from ddp_core.sharding import hang_up

            hang_up(self.rank.master_port)

"""python -m conformance --workload FILE [--site NAME] [flags of train.py]: a certificate of a scientist's own program.

Exit code 0: every promise that the program allows is kept. 1: one is broken. 2: usage.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from conformance.certify import report
from conformance.certify.jobs import by_jobs
from conformance.certify.promises import BROKEN, KEPT, MOVED, NOT_PROMISED, NOT_SHOWN, Certificate, Enough, failed
from conformance.certify.runs import Ended, Program, mpiexec
from conformance.harness import sites
from conformance.harness.sites import Launch
from conformance.harness.submit import Jobs, NotSubmitted, geometry

AIM = 240.0  # seconds that all runs together should take, on two cores
RUNS = 16.0  # cost of all runs, in units of one single-rank run of the same steps
START = 1.5  # seconds that mpiexec adds to a run, because its ranks are new interpreters; a mean over all runs
FEWEST = 12  # steps of a run, at least
# Error messages of train.py, what each means, and words to look for in the file.
REFUSED = (
    ("No module named", f"install it for this Python: {sys.executable} -m pip install PACKAGE", ()),
    ("has no shape yet", "a layer's size is not known before the first batch: give it", ("Lazy",)),
    ("no gradient for", "nothing of the loss comes back through this", (".detach(", "no_grad", ".data", "argmax")),
)
OTHER_HASHES = (3, 1, 2, 4, 5, 6)  # of PYTHONHASHSEED; other runs use 0. Half of them swap two names in a set


def main(argv: list[str] | None = None) -> int:
    options, flags = parsed(argv)
    if lacking := [name for name in ("torch", "ddp_core") if not find_spec(name)]:
        usage(f"{sys.executable} has no {' and no '.join(lacking)}: run `nox -s conformance -- --workload {options.workload}`")
    launch, other = launches(options.site)
    jobs = jobs_of(options)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        program = Program(options.workload, launch, flags, Path(folder), options.limit_rows, other, jobs)
        certificate = certify(program, options.ranks, options.limit_steps, options.first)
        unproven = list(limits(options, certificate))
        output = Path(options.output or f"certificates/{Path(options.workload).stem}")
        report.write(output, certificate, program, unproven, time.monotonic() - began)
        if options.keep:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
    broken = sum(verdict.state == BROKEN for verdict in certificate.verdicts)
    kept = sum(verdict.state == KEPT for verdict in certificate.verdicts)
    for line in unproven:
        print(f"not shown: {line}")
    print(f"{kept} promises kept, {broken} broken, in {time.monotonic() - began:.0f} s; all of it is in {output}/")
    return 1 if broken else 0


def parsed(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--workload", required=True, metavar="FILE", help="the program: a file with one Workload, or a built-in one's name")
    add("--site", metavar="NAME_OR_FOLDER", help="whose train.py runs it (default: one whose ranks need no MPI)")
    add("--ranks", default="2,4", metavar="N,N", help="worlds that are compared with one rank (default: %(default)s)")
    add("--limit-rows", type=int, default=0, metavar="N", help="use the first N rows only (default: all)")
    add("--limit-steps", type=int, default=0, metavar="N", help=f"steps of a run (default: what fits into {AIM:g} s)")
    add("--first", action="store_true", help="end at the first promise that is broken")
    add("--output", metavar="FOLDER", help="for the certificate (default: certificates/NAME)")
    add("--keep", metavar="FOLDER", help="leave the runs there")
    add("--submit", nargs="?", const="", metavar="OPTIONS", help="run it in jobs of the site's script, too: of sbatch or qsub")
    add("--geometry", metavar="NxR", help="nodes and ranks on each that OPTIONS ask for (default: the site's)")
    add("--device", choices=("cpu", "cuda", "xpu"), help="of the jobs (default: what the job script takes)")
    add("--work", help=argparse.SUPPRESS)  # nox's
    options, flags = parser.parse_known_args(argv)
    try:
        options.ranks = [int(number) for number in options.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks {options.ranks}: should be numbers, 2,4 say")
    if not Path(options.workload).is_file() and options.workload.endswith(".py"):
        parser.error(f"--workload {options.workload} is no file: give the path of your program")
    if options.submit is None and (options.device not in (None, "cpu") or options.geometry):
        parser.error("--device and --geometry are of jobs: give --submit, too. Without it all runs on this machine's CPU")
    if options.submit is not None and not options.site:
        parser.error("--submit: by which site's job script? Give --site, too")
    if Path(options.workload).is_file():
        options.workload = str(Path(options.workload).resolve())
    return options, flags


def usage(words: str) -> NoReturn:
    print(f"error: {words}", file=sys.stderr)
    sys.exit(2)


def launches(name: str | None) -> tuple[Launch, Launch]:
    """A launcher of the site, without MPI if possible; and one of another site, to resume snapshots there."""
    try:
        mine = sites.find([name] if name else None)
    except ValueError as error:
        usage(str(error))
    plain = sorted((launch for site in mine for launch in site.launches), key=lambda launch: launch.mpi)
    if not plain:
        usage(f"--site {name}: its site.toml names no launcher under [[launchers]]")
    if plain[0].mpi and not mpiexec():
        usage(f"--site {name} asks MPI for its ranks, but no mpiexec is on PATH: pip install mpich mpi4py, or set MPIEXEC")
    others = [launch for site in sites.find() for launch in site.launches[:1] if site.name != plain[0].site and not launch.mpi]
    return plain[0], (others or plain)[0]


def jobs_of(options: argparse.Namespace) -> Jobs | None:
    """The site's jobs; None without --submit."""
    if options.submit is None:
        return None
    try:
        size = geometry(options.geometry) if options.geometry else None
        site, say = sites.find([options.site])[0], lambda line: print(line.partition(" --log-every")[0], flush=True)
        return Jobs(site, options.submit, size, options.device, say=say)
    except (NotSubmitted, ValueError) as error:
        usage(str(error))


def limits(options: argparse.Namespace, certificate: Certificate):
    """One line for everything that this certificate does not show."""
    if options.limit_rows:
        yield f"rows after the first {options.limit_rows} (--limit-rows)"
    if certificate.steps < certificate.all_steps:
        yield f"steps after the first {certificate.steps} of {certificate.all_steps}, and what the schedule does there"
    for name, (looked, total) in certificate.notes.get("looked_through", {}).items():
        if looked < total:
            yield f"{name} rows after the first {looked} of {total}: whether they are finite, and there once"
    if options.submit is None:
        yield "accelerators, their kernels and libraries: everything ran on this machine's CPU"


def certify(program: Program, ranks: list[int], limit_steps: int, first: bool) -> Certificate:
    began = time.monotonic()
    print(f"{program.file}: looked at, then tried for 4 steps in one rank", flush=True)
    examined = program.examine()
    kind, _, words = examined["failed"].partition(": ")
    if kind == "UsageError" or (kind == "WorkloadError" and not Path(program.file).is_file()):
        usage(words)
    certificate = Certificate(program, examined, lambda line: print(line, flush=True), first)
    with suppress(Enough):
        try_out(certificate, program, ranks, limit_steps, began)
    return certificate


def try_out(certificate: Certificate, program: Program, ranks: list[int], limit_steps: int, began: float) -> None:
    pilot = program.run("pilot", 1, "--precision fp64 --epochs 1 --steps-per-epoch 4")
    if not trains(certificate, pilot):
        return
    start, notes, batch = pilot.first_line, certificate.notes, ""
    sizes = [*ranks, program.jobs.size] if program.jobs else ranks
    if notes["per_rank"]:
        notes["global_batch_size"] *= max(sizes)
        batch = f" --global-batch-size {notes['global_batch_size']}"
        print(f"its batch grows with the ranks: compared at{batch}", flush=True)
    each = start["training_rows"] // notes["global_batch_size"]
    each, epochs = min(each, notes["steps_per_epoch"] or each), notes["epochs"]
    spent = pilot.of("end")[0]["seconds"]
    step_seconds = max(1e-4, sum(spent[part] for part in ("reading", "computing", "communication")) / 4)
    fits = int(max(0.0, AIM / RUNS - spent["first_step"] - 2 * spent["evaluation"]) / step_seconds)
    steps = min(limit_steps or max(FEWEST, fits), each * epochs)
    some = min(epochs, 2) if steps < each * epochs else epochs
    per_epoch = max(1, min(each, steps // some))
    certificate.all_steps, certificate.steps = each * epochs, per_epoch * some
    shape = f"--epochs {some} --steps-per-epoch {per_epoch} --save-steps {max(1, certificate.steps // 5)}{batch}"
    each_run = spent["first_step"] + certificate.steps * step_seconds + some * spent["evaluation"] + START * program.launch.mpi
    about = RUNS * each_run + time.monotonic() - began + 10
    shown = f"{certificate.steps} of {certificate.all_steps} steps of {1000 * step_seconds:.0f} ms"
    print(f"{shown}, some 16 runs: about {about:.0f} s{', and what the jobs take' if program.jobs else ''}", flush=True)
    fitting = [n for n in sizes if notes["global_batch_size"] % (n * notes["accumulate"]) == 0]
    for n in sizes:
        if n not in fitting:
            words = f"{notes['global_batch_size']} rows a step cannot be shared by them: pass a --global-batch-size that can"
            certificate.judge(f"the same losses in {n} ranks as in 1", NOT_SHOWN, words)
    judge(certificate, program, [n for n in ranks if n in fitting], shape, notes["precision"], start["notes"])


def judge(certificate: Certificate, program: Program, ranks: list[int], shape: str, own: str, notes: list[str]) -> None:
    fp64 = certificate.flags64 = f"{shape} --precision fp64"
    own = f"{shape} --precision {own}"
    reference = program.run("reference", 1, fp64)
    if words := failed(reference):
        certificate.judge("it trains to its end", BROKEN, words)
        return
    repeats = certificate.repeats(reference, program.run("again", 1, fp64))
    certificate.grow(program.run("moved", 1, fp64, moved=MOVED), reference)
    certificate.examined_promises()
    orders(certificate, program, reference, fp64, repeats)
    still = in_ranks(certificate, program, ranks, reference, notes) if ranks else None
    if still and not own.endswith("fp64"):
        certificate.rounded(program.run("own-1", 1, own, **still[0]), still[1], own.rpartition(" ")[2])
    as_used(certificate, program, min(ranks, default=1), own, repeats)
    if program.jobs:
        in_jobs(certificate, program, program.jobs, own, still)


def in_jobs(certificate: Certificate, program: Program, jobs: Jobs, own: str, still: tuple[dict, Ended] | None) -> None:
    promise = f"a job at {program.launch.site} trains as one rank does here"
    try:
        if still and certificate.notes["global_batch_size"] % jobs.size == 0:
            by_jobs(certificate, program, jobs, still[1], certificate.flags64, own, still[0])
        else:
            certificate.judge(promise, NOT_SHOWN, "its losses depend on the number of ranks")
    except NotSubmitted as error:
        certificate.judge(promise, NOT_SHOWN, str(error))
    finally:
        if left := jobs.left_alone():
            print(left)


def in_ranks(
    certificate: Certificate, program: Program, ranks: list[int], reference: Ended, notes: list[str]
) -> tuple[dict, Ended] | None:
    """Compare several ranks with one. Returns the change that makes random numbers irrelevant, and its one-rank run."""
    run, fp64, two, four, noise = program.run, certificate.flags64, min(ranks), max(ranks), False
    of_buffers = ("statistics of a rank's own rows", "changes its buffers")
    statistics = next((note for note in notes if any(words in note for words in of_buffers)), "")
    random = any("random numbers are drawn" in note for note in notes)
    canonical = f"{fp64} --reduction canonical --shards {four}"
    how, flags, first = "", fp64, reference
    change: dict[str, Any] = {}
    if random:
        still = run("without-dropout", 1, fp64, dropout=False)
        noise = not still.well or any("random numbers are drawn" in note for note in still.first_line["notes"])
        change, how, first = ({}, "", reference) if noise else (dict(dropout=False), " with dropout off", still)
    if statistics:
        far, step = certificate.apart(run("as-it-stands", two, fp64, **change), first, "fp64")
        if step is not None:
            where = certificate.source.word("BatchNorm", "register_buffer")
            promise = f"the same losses in {two} ranks as in 1, as it stands"
            certificate.judge(promise, NOT_PROMISED, f"{far:.1e} apart from step {step} on", statistics, where)
        if step is not None and "changes its buffers" in statistics:  # no change switches off the program's own statistics
            certificate.shared_files()
            return None
        change, how = change | dict(statistics=False), how + " with BatchNorm's statistics fixed"
    if noise:  # noise in the loss: equal at every world size only with the same micro-batches
        flags, how = canonical, how + " with --reduction canonical"
    elif random and not statistics:
        pair = [run(f"canonical-{n}", n, canonical) for n in (1, two)]
        certificate.sizes({two: pair[1]}, pair[0], " with --reduction canonical, dropout on")
    if statistics or noise:
        first = run("one", 1, flags, **change)
    whole = {n: run(f"ranks-{n}", n, flags, **change) for n in ranks}
    agrees = certificate.sizes(whole, first, how)
    certificate.shared_files()
    if agrees:
        certificate.held_out(whole, first, how)
        for n, m, launch in [(1, four, program.other), (four, 1, program.launch)]:
            stopped = run(f"handed-{n}-{m}", n, flags, stop_at=certificate.steps // 2, **change)
            went_on = run(f"handed-{n}-{m}-on", m, flags, after=stopped, launch=launch, **change)
            certificate.handed_over(n, m, launch, went_on, first)
    return None if noise else (change, first)


def as_used(certificate: Certificate, program: Program, ranks: int, flags: str, repeats: bool) -> None:
    """Run it unchanged in its own precision: stopped, killed, with other workers."""
    run, half = program.run, certificate.steps // 2
    plain = run("own", ranks, flags)
    if words := failed(plain):
        certificate.judge(f"it trains in {ranks} ranks", BROKEN, words, **certificate.why_not_in_ranks(words))
        return
    if not repeats:
        certificate.judge("stopped or killed, it goes on to the same end", NOT_SHOWN, "a run that does not repeat cannot tell")
        return
    stopped = run("stopped", ranks, flags, stop_at=half)
    certificate.resumes("stopped, it goes on as if it had not been", plain, run("stopped-on", ranks, flags, after=stopped))
    killed = run("killed", ranks, flags, kill_at=half + 1)
    certificate.resumes("killed, it goes on from its last snapshot", plain, run("killed-on", ranks, flags, after=killed))
    if certificate.notes.get("row_by_row"):
        certificate.workers(plain, run("workers", ranks, f"{flags} --workers 2"))


def trains(certificate: Certificate, pilot: Ended) -> bool:
    if pilot.well and not certificate.failed:
        return True
    words = failed(pilot) or certificate.failed
    named = re.search(r"line (\d+)", words)
    method = next((name for name in ("loss", "metrics") if f"{name}()" in words), "")
    where = int(named[1]) if named else certificate.source.function(method)
    known = ((reason, certificate.source.word(*sought)) for message, reason, sought in REFUSED if message in words)
    why = certificate.blamed(
        next(known, None), certificate.finding("not-finite"), certificate.witnessed("ranks"), otherwise="its own line says it"
    )
    certificate.judge("it trains", BROKEN, words, why["reason"], where or why.get("where"))
    return False


def orders(certificate: Certificate, program: Program, reference: Ended, fp64: str, repeats: bool) -> None:
    """List folders backwards, and use other hash seeds."""
    promise = "the order in which files are listed and sets are walked through does not matter"
    if not repeats:
        certificate.judge(promise, NOT_SHOWN, "a run that does not repeat cannot tell")
        return
    fresh = program.run("fresh", 1, fp64, backwards=True, hash_seed=OTHER_HASHES[0])
    differs = failed(fresh) or certificate.same_bits(fresh, reference)
    place = certificate.source.unordered()
    for seed in OTHER_HASHES[1:] if place and not differs else ():
        fresh = program.run(f"hashes-{seed}", 1, fp64, hash_seed=seed, stop_at=2)
        pairs = zip(fresh.losses, reference.losses, strict=False)
        differs = next((f"the loss of step {n}: {a!r}, and {b!r}" for n, (a, b) in enumerate(pairs) if a != b), "")
        if differs or not fresh.losses:
            differs = differs or failed(fresh)
            break
    if not differs:
        certificate.judge(promise, KEPT, "equal to the bit in a new process, folders listed backwards")
        return
    apart, backwards = program.run("apart", 1, fp64, hash_seed=0), program.run("backwards", 1, fp64, backwards=True)
    if failed(apart) or certificate.same_bits(apart, reference):
        reason = certificate.blamed(
            certificate.hidden_generator(),
            certificate.witnessed("clock", "process"),
            otherwise="it is another in a new process: by memory addresses, id() or the hash of an object?",
        )
    elif failed(backwards) or certificate.same_bits(backwards, reference):
        reason = certificate.blamed(certificate.witnessed("listing"), otherwise="files are listed unsorted")
    else:
        reason = dict(reason="a set is walked through, or hash() is used: both are other in each process", where=place)
    certificate.judge(promise, BROKEN, f"other is {differs}", **reason)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

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
from pathlib import Path
from typing import Any, NoReturn

from conformance.certify import report
from conformance.certify.promises import BROKEN, KEPT, MOVED, NOT_PROMISED, NOT_SHOWN, Certificate, Enough, failed
from conformance.certify.runs import Ended, Program
from conformance.harness import sites
from conformance.harness.sites import Launch

AIM = 240.0  # seconds that all runs together should take, on two cores
RUNS = 16.0  # how many times all steps are run, in the time that a world of one takes for them
FEWEST = 12  # steps
OTHER_HASHES = 3  # under this seed sets of texts lie in another order than under 0, most of them


def main(argv: list[str] | None = None) -> int:
    options, flags = parsed(argv)
    launch, other = launches(options.site)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="certify-") as folder:
        program = Program(options.workload, launch, flags, Path(folder), options.limit_rows)
        certificate = certify(program, other, options.ranks, options.limit_steps, options.first)
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
    add("--site", metavar="NAME_OR_FOLDER", help="whose train.py runs it (default: the first whose ranks need no MPI)")
    add("--ranks", default="2,4", metavar="N,N", help="worlds that are compared with one rank (default: %(default)s)")
    add("--limit-rows", type=int, default=0, metavar="N", help="use the first N rows only (default: all)")
    add("--limit-steps", type=int, default=0, metavar="N", help=f"steps of a run (default: what fits into {AIM:g} s)")
    add("--first", action="store_true", help="end at the first promise that is broken")
    add("--output", metavar="FOLDER", help="for the certificate (default: certificates/NAME)")
    add("--keep", metavar="FOLDER", help="leave the runs there")
    add("--work", help=argparse.SUPPRESS)  # nox's
    options, flags = parser.parse_known_args(argv)
    try:
        options.ranks = [int(number) for number in options.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks {options.ranks}: should be numbers, 2,4 say")
    if not Path(options.workload).is_file() and options.workload.endswith(".py"):
        parser.error(f"--workload {options.workload} is no file: give the path of your program")
    if Path(options.workload).is_file():
        options.workload = str(Path(options.workload).resolve())
    return options, flags


def usage(words: str) -> NoReturn:
    print(f"error: {words}", file=sys.stderr)
    sys.exit(2)


def launches(name: str | None) -> tuple[Launch, Launch]:
    """A launcher of the site whose ranks need no MPI; and one of another site, for the hand-over."""
    try:
        mine = sites.find([name] if name else None)
    except ValueError as error:
        usage(str(error))
    plain = [launch for site in mine for launch in site.launches if not launch.mpi]
    if not plain:
        usage(f"--site {name}: all its launchers ask MPI for their ranks; take another site for this")
    others = [launch for site in sites.find() for launch in site.launches[:1] if site.name != plain[0].site and not launch.mpi]
    return plain[0], (others or plain)[0]


def limits(options: argparse.Namespace, certificate: Certificate):
    """What the limits leave unproven."""
    if options.limit_rows:
        yield f"rows after the first {options.limit_rows} (--limit-rows)"
    if certificate.steps < certificate.all_steps:
        yield f"steps after the first {certificate.steps} of {certificate.all_steps}, and what the schedule does there"
    yield "accelerators, their kernels and libraries: everything ran on this machine's CPU"


def certify(program: Program, other: Launch, ranks: list[int], limit_steps: int, first: bool) -> Certificate:
    began = time.monotonic()
    print(f"{program.file}: looked at, then tried for 4 steps in one rank", flush=True)
    examined = program.examine()
    certificate = Certificate(program, examined, lambda line: print(line, flush=True), first)
    with suppress(Enough):
        try_out(certificate, program, other, ranks, limit_steps, began)
    return certificate


def try_out(
    certificate: Certificate, program: Program, other: Launch, ranks: list[int], limit_steps: int, began: float
) -> None:
    pilot = program.run("pilot", 1, "--precision fp64 --epochs 1 --steps-per-epoch 4")
    if not trains(certificate, pilot):
        return
    start, notes, batch = pilot.first_line, certificate.notes, ""
    if notes["per_rank"]:
        notes["global_batch_size"] *= max(ranks)
        batch = f" --global-batch-size {notes['global_batch_size']}"
        print(f"its batch grows with the ranks: compared at{batch}", flush=True)
    each = start["training_rows"] // notes["global_batch_size"]
    each, epochs = min(each, notes["steps_per_epoch"] or each), notes["epochs"]
    spent = pilot.of("end")[0]["seconds"]
    step_seconds = max(1e-4, sum(spent[part] for part in ("reading", "computing", "communication")) / 4)
    fits = int(AIM / RUNS / step_seconds)
    steps = min(limit_steps or max(FEWEST, fits), each * epochs)
    some = min(epochs, 2) if steps < each * epochs else epochs
    per_epoch = max(1, min(each, steps // some))
    certificate.all_steps, certificate.steps = each * epochs, per_epoch * some
    shape = f"--epochs {some} --steps-per-epoch {per_epoch} --save-steps {max(1, certificate.steps // 5)}{batch}"
    about = RUNS * certificate.steps * step_seconds + time.monotonic() - began + 15
    shown = f"{certificate.steps} of {certificate.all_steps} steps of {1000 * step_seconds:.0f} ms"
    print(f"{shown}, some 16 runs: about {about:.0f} s", flush=True)
    ranks = [n for n in ranks if notes["global_batch_size"] % (n * notes["accumulate"]) == 0]
    judge(certificate, program, other, ranks, shape, notes["precision"], start)


def judge(
    certificate: Certificate, program: Program, other: Launch, ranks: list[int], shape: str, own: str, start: dict
) -> None:
    fp64 = certificate.flags64 = f"{shape} --precision fp64"
    reference = program.run("reference", 1, fp64)
    if words := failed(reference):
        certificate.judge("it trains to its end", BROKEN, words)
        return
    repeats = certificate.repeats(reference, program.run("again", 1, fp64))
    certificate.grow(program.run("moved", 1, fp64, moved=MOVED), reference)
    certificate.examined_promises()
    orders(certificate, program, reference, fp64, repeats)
    still = in_ranks(certificate, program, other, ranks, reference, start["notes"]) if ranks else None
    if still and own != "fp64":
        change, one = still
        certificate.rounded(program.run("own-1", 1, f"{shape} --precision {own}", **change), one, own)
    as_used(certificate, program, min(ranks, default=1), f"{shape} --precision {own}", repeats)


def in_ranks(
    certificate: Certificate, program: Program, other: Launch, ranks: list[int], reference: Ended, notes: list[str]
) -> tuple[dict, Ended] | None:
    """Worlds of several ranks beside one rank. Returns the change under which random numbers do not matter, and its run."""
    run, fp64, two, four, noise = program.run, certificate.flags64, min(ranks), max(ranks), False
    statistics = next(
        (note for note in notes if "statistics of a rank's own rows" in note or "changes its buffers" in note), ""
    )
    random = any("random numbers are drawn" in note for note in notes)
    canonical = f"{fp64} --reduction canonical --shards {four}"
    how, flags, first = "", fp64, reference
    change: dict[str, Any] = {}
    if random:
        still = run("without-dropout", 1, fp64, dropout=False)
        noise = not still.well or any("random numbers are drawn" in note for note in still.first_line["notes"])
        change, how, first = ({}, "", reference) if noise else (dict(dropout=False), " with dropout off", still)
    if statistics:
        far, step, near = certificate.apart(run("as-it-stands", two, fp64, **change), first, "fp64")
        if not near:
            where = certificate.source.word("BatchNorm", "register_buffer")
            promise = f"the same losses in {two} ranks as in 1, as it stands"
            certificate.judge(promise, NOT_PROMISED, f"{far:.1e} apart from step {step} on", statistics, where)
        change, how = change | dict(statistics=False), how + " with BatchNorm's statistics fixed"
    if noise:  # of its own, in the loss: the same at every world size for the same micro-batches alone
        flags, how = canonical, how + " with --reduction canonical"
    elif random and not statistics:
        pair = [run(f"canonical-{n}", n, canonical) for n in (1, two)]
        certificate.sizes({two: pair[1]}, pair[0], " with --reduction canonical, dropout on")
    if statistics or noise:
        first = run("one", 1, flags, **change)
    whole = {n: run(f"ranks-{n}", n, flags, **change) for n in ranks}
    agrees = certificate.sizes(whole, first, how)
    certificate.shared_files(whole)
    if agrees:
        certificate.held_out(whole, first, how)
        for n, m, there in [(1, four, other), (four, 1, program.launch)]:
            stopped = run(f"handed-{n}-{m}", n, flags, stop_at=certificate.steps // 2, **change)
            went_on = run(f"handed-{n}-{m}-on", m, flags, after=stopped, launch=there, **change)
            certificate.handed_over(n, m, there, went_on, first)
    return None if noise else (change, first)


def as_used(certificate: Certificate, program: Program, ranks: int, flags: str, repeats: bool) -> None:
    """In its own precision, as it stands: stopped, killed, with other workers."""
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
    where = int(named[1]) if named else certificate.source.function("loss") if "loss()" in words else None
    reason = certificate.blamed(
        certificate.finding("not-finite"), certificate.witnessed("ranks"), otherwise="its own line says it"
    )
    certificate.judge("it trains", BROKEN, words, **(reason | (dict(where=where) if where else {})))
    return False


def orders(certificate: Certificate, program: Program, reference: Ended, fp64: str, repeats: bool) -> None:
    """Folders listed from their end, and texts hashed otherwise."""
    promise = "the order in which files are listed and sets are walked through does not matter"
    if not repeats:
        certificate.judge(promise, NOT_SHOWN, "a run that does not repeat cannot tell")
        return
    fresh = program.run("fresh", 1, fp64, backwards=True, hash_seed=OTHER_HASHES)
    differs = failed(fresh) or certificate.same_bits(fresh, reference)
    if not differs:
        certificate.judge(promise, KEPT, "equal to the bit in a new process, folders listed backwards")
        return
    backwards = program.run("backwards", 1, fp64, backwards=True)
    if failed(backwards) or certificate.same_bits(backwards, reference):
        reason = certificate.blamed(certificate.witnessed("listing"), otherwise="files are listed unsorted")
    else:
        line = certificate.source.word("set(", "in {", "hash(")
        reason = dict(reason="a set is walked through, or hash() is used: their order is another in each process", where=line)
    certificate.judge(promise, BROKEN, f"other is {differs}", **reason)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

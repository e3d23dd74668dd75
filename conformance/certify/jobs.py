"""The program in jobs of a site's own script, on the machine or on a virtual cluster. Verdicts are as for local ranks.

    nox -s conformance -- --workload mine.py --submit="--account=abc123" --site mine      on a login node of the machine
    nox -s cluster -- --workload mine.py --site mine                                      on virtual nodes of its shape

A job gets another file as its workload: the same class, but it stops or kills itself at the step that Change gives.
"""

import time
from pathlib import Path

from conformance.certify import witness
from conformance.certify.promises import NOT_SHOWN, Certificate
from conformance.certify.runs import Ended, Program, copied
from conformance.harness.sites import ROOT
from conformance.harness.submit import Jobs

IN_PLACE = """\
import sys

sys.path[:0] = {path}
from conformance.certify.runs import changed

Program = changed({file!r}, {log!r}, __name__, **{change})
"""


class Submitted:
    """Runs of the program as jobs. Jobs that have begun wait in the queue together."""

    def __init__(self, program: Program, jobs: Jobs):
        self.program, self.jobs, self.begun = program, jobs, dict[str, tuple[Path, str]]()

    def begin(self, name: str, flags: str, after: Ended | None = None, **change) -> None:
        folder = self.jobs.root / name
        if after:
            copied(after.folder, folder)
        folder.mkdir(exist_ok=True)
        file = self.jobs.root / f"program-of-{name}" / f"{Path(self.program.file).stem}.py"
        file.parent.mkdir()
        change = dict(rows=self.program.rows) | change
        file.write_text(IN_PLACE.format(path=[str(ROOT)], file=self.program.file, log=str(folder / ".job"), change=change))
        print(f"{name}:", end=" ")
        words = " ".join([*self.program.argv(flags), "--workload", str(file)])
        self.begun[name] = folder, words
        self.jobs.ahead(folder, words)

    def end(self, name: str) -> Ended:
        """Wait for the job's end."""
        (folder, words), began = self.begun.pop(name), time.monotonic()
        result = self.jobs.train(self.program.launch, folder, words)
        codes = [code if isinstance(code, int) else -1 for code in result.exit_codes]
        calls = [*map(witness.read, sorted(folder.glob(".job-*.calls")))]
        seconds = time.monotonic() - began
        self.program.runs.append(run := Ended(folder, codes, [], result.errors, [], result.records, name, seconds, calls))
        return run

    def run(self, name: str, flags: str, after: Ended, **change) -> Ended:
        self.begin(name, flags, after, **change)
        return self.end(name)


def by_jobs(certificate: Certificate, program: Program, jobs: Jobs, first: Ended, flags: str, own: str, change: dict) -> None:
    """first: the one-rank run here, made with flags and change. own: flags of the program's own precision."""
    queue, launch, half = Submitted(program, jobs), program.launch, certificate.steps // 2
    ranks = jobs.size
    how = f" in a job at {launch.site}"
    here = program.run("handed-to-job", 1, flags, stop_at=half, **change)
    queue.begin("job", flags, **change)
    queue.begin("job-own", own, **change)
    queue.begin("job-killed", flags, kill_at=half + 1, **change)
    queue.begin("job-from-here", flags, after=here, **change)
    stops = jobs.scheduler.submits == "sbatch"  # Slurm requeues the job; PBS starts a successor
    if stops:
        queue.begin("job-stopped", flags, stop_at=half, **change)
    plain = queue.end("job")
    if certificate.sizes({ranks: plain}, first, how):
        certificate.held_out({ranks: plain}, first, how)
    precision = own.rpartition("--precision ")[2].split()[0]
    certificate.rounded(queue.end("job-own"), first, precision, how)
    killed = queue.end("job-killed")
    if not killed.well:
        certificate.handed_over(ranks, 1, launch, program.run("handed-job-1", 1, flags, after=killed, **change), first)
        killed = queue.run("job-killed-on", flags, after=killed, **change)
    certificate.resumes(f"killed{how}, it goes on from its last snapshot", plain, killed)
    certificate.handed_over(1, ranks, launch, queue.end("job-from-here"), first, how)
    promise = f"stopped{how}, it comes back and goes on as if it had not been"
    if stops:
        stopped = queue.end("job-stopped")
        if not stopped.well:  # its script does not requeue it
            stopped = queue.run("job-stopped-on", flags, after=stopped, **change)
        certificate.resumes(promise, plain, stopped)
    else:
        certificate.judge(promise, NOT_SHOWN, "another job comes in its place there, and that is not waited for")

"""The promises to every program, what was measured for this one, and the likeliest reason for a difference."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from conformance.certify.runs import Ended, Program
from conformance.certify.source import Source
from conformance.certify.witness import Call
from conformance.harness.reference import take_apart
from conformance.harness.sites import Launch

MOVED = 1e-7  # relative change of the initial parameters, to measure how rounding grows
UNIT = dict(fp64=2.0**-53, fp32=2.0**-24, tf32=2.0**-11, bf16=2.0**-8, fp16=2.0**-11)
SLACK = 500  # rounding errors that one step's sums may collect, in other orders of rows and ranks
COARSEST = dict(fp64=1e-7, fp32=1e-2, tf32=5e-2, bf16=0.2, fp16=0.2)  # a larger limit shows nothing
SATURATED = 1e-2  # beyond this deviation the moved run no longer shows how rounding grows

KEPT, BROKEN, NOT_PROMISED, NOT_SHOWN = "kept", "broken", "not promised", "not shown"


@dataclass
class Verdict:
    """One promise and its result. where: a line of the user's file, or None. measured: figures, in words."""

    promise: str
    state: str
    measured: str = ""
    reason: str = ""
    where: int | None = None

    @property
    def line(self) -> str:
        place = f" (line {self.where})" if self.where else ""
        return f"{self.state:>12}  {self.promise}: {self.measured}" + (f" - {self.reason}{place}" if self.reason else "")


class Enough(Exception):
    """Raised at the first broken promise, under --first."""


class Certificate:
    """The runs of a program, and the verdict on each promise. say: called with a line for each verdict.

    first: judge() raises Enough when a promise is broken.
    """

    def __init__(self, program: Program, examined: dict, say: Callable[[str], None], first: bool = False):
        self.program, self.say, self.first = program, say, first
        self.findings, self.notes, self.failed = examined["findings"], examined["notes"], examined["failed"]
        self.source = Source(Path(self.notes.get("file") or program.file))
        self.verdicts: list[Verdict] = []
        self.growth: list[float] = []
        self.steps = self.all_steps = 0  # steps of a run here, and of the whole training
        self.flags64 = ""  # flags of the reference run

    # ---- words ------------------------------------------------------------------------------------------------------

    def judge(self, promise: str, state: str, measured: str = "", reason: str = "", where: int | None = None) -> bool:
        self.verdicts.append(Verdict(promise, state, measured, reason, where))
        self.say(self.verdicts[-1].line)
        if self.first and state == BROKEN:
            raise Enough
        return state == KEPT

    def finding(self, *kinds: str) -> dict | None:
        return next((finding for kind in kinds for finding in self.findings if finding["kind"] == kind), None)

    def witnessed(self, *kinds: str, unless: Callable[[Call], bool] = lambda call: False) -> Call | None:
        calls = dict.fromkeys(call for run in self.program.runs for call in run.witnessed)
        return next((call for kind in kinds for call in calls if call.kind == kind and not unless(call)), None)

    def blamed(self, *candidates: dict | Call | tuple[str, int | None] | None, otherwise: str = "") -> dict:
        """reason and where of the first candidate that is not None."""
        for candidate in candidates:
            if isinstance(candidate, dict):
                return dict(reason=candidate["says"], where=candidate["line"])
            if isinstance(candidate, Call):
                return dict(reason=SUSPICIONS[candidate.kind].format(candidate), where=candidate.line)
            if candidate:
                return dict(reason=candidate[0], where=candidate[1])
        return dict(reason=otherwise)

    # ---- comparisons --------------------------------------------------------------------------------------------------

    def limit(self, step: int, precision: str) -> float:
        """The largest allowed relative deviation of a loss at this step."""
        grown = self.growth[min(step, len(self.growth) - 1)] if self.growth else 1.0
        return UNIT[precision] * SLACK * max(1.0, grown)

    def horizon(self, precision: str) -> int:
        """The number of steps that are compared. Later, grown rounding hides everything."""
        steps = len(self.growth) or 10**9
        for step in range(len(self.growth)):
            if self.growth[step] * MOVED > SATURATED or self.limit(step, precision) > COARSEST[precision]:
                return step
        return steps

    def apart(self, mine: Ended, other: Ended, precision: str) -> tuple[float, int | None]:
        """The worst relative deviation of a loss, and the first step beyond the limit, or None."""
        if len(mine.losses) != len(other.losses):
            return math.inf, min(len(mine.losses), len(other.losses))
        deviations = relative(mine.losses, other.losses)[: self.horizon(precision)]
        beyond = (step for step, deviation in enumerate(deviations) if deviation > self.limit(step, precision))
        return max(deviations, default=0.0), next(beyond, None)

    def held_out_apart(self, mine: Ended, other: Ended) -> tuple[float, str]:
        """The worst relative deviation beyond its limit of a held-out result in fp64, and that result's name."""
        worst, which = 0.0, ""
        per_epoch = len(other.losses) / max(1, len(other.held_out))
        for epoch, (ours, theirs) in enumerate(zip(mine.held_out, other.held_out, strict=False)):
            step = int((epoch + 1) * per_epoch) - 1
            if step >= self.horizon("fp64"):
                break
            for name, value in theirs.items():
                deviation = abs(ours.get(name, math.nan) - value) / max(abs(value), 1e-3)
                if not deviation <= 20 * self.limit(step, "fp64"):
                    worst, which = max((worst, which), (deviation, name))
        return worst, which

    @staticmethod
    def same_bits(mine: Ended, other: Ended) -> str:
        """A difference in words; empty if all is equal bit for bit."""
        for step, (a, b) in enumerate(zip(mine.losses, other.losses, strict=False)):
            if a != b and not (math.isnan(a) and math.isnan(b)):
                return f"the loss of step {step}: {a!r}, and {b!r}"
        if len(mine.losses) != len(other.losses):
            return f"{len(mine.losses)} steps, and {len(other.losses)}"
        if mine.held_out != other.held_out:
            return "held-out results"
        if tensors(mine) != tensors(other):
            return "parameters in the snapshot"
        return ""

    # ---- the promises -------------------------------------------------------------------------------------------------

    def repeats(self, first: Ended, again: Ended) -> bool:
        promise = "run twice, it is the same to the bit"
        reason = self.blamed(
            self.witnessed("generator", unless=lambda call: call.seeded),
            self.witnessed("clock", "process"),
            self.finding("rows", "state"),
            self.hidden_generator(),
            otherwise="; ".join(first.first_line.get("notes", [])) or "kernels that do not repeat, or what is read changes",
        )
        return self.equal(promise, again, first, f"{len(first.losses)} losses, held-out results, snapshot", reason)

    def equal(self, promise: str, mine: Ended, other: Ended, kept: str, reason: dict) -> bool:
        """Judge whether two runs are the same bit for bit."""
        if differs := failed(mine) or self.same_bits(mine, other):
            return self.judge(promise, BROKEN, f"other is {differs}", **reason)
        return self.judge(promise, KEPT, kept)

    def hidden_generator(self) -> tuple[str, int] | None:
        """A generator that the witness cannot see, found by its name in the file."""
        for names, bare in ((OUTSIDE, False), (UNSEEDED, True), (("id",), False)):
            for name in names:
                if line := self.source.call(name, bare=bare):
                    return f"{name}() is other in each run, and not under --seed", line
        return None

    def sizes(self, whole: dict[int, Ended], reference: Ended, how: str) -> bool:
        """whole: runs by their number of ranks."""
        promise = f"the same losses in {listed(whole)} ranks as in 1{how}"
        for ranks, run in whole.items():
            if words := failed(run):
                return self.judge(promise, BROKEN, f"in {ranks} ranks: {words}", **self.why_not_in_ranks(words))
        deviations, steps = zip(*(self.apart(run, reference, "fp64") for run in whole.values()), strict=True)
        measured = f"at most {max(deviations):.1e} apart in {min(self.horizon('fp64'), len(reference.losses))} steps of fp64"
        if beyond := [step for step in steps if step is not None]:
            return self.judge(promise, BROKEN, f"from step {beyond[0]} on {measured}", **self.why_not_in_ranks(""))
        return self.judge(promise, KEPT, measured)

    def why_not_in_ranks(self, words: str) -> dict:
        shared = self.shared_file() if words else None  # a rank may have read a half-written file
        return self.blamed(
            (": ".join(shared[:2]), shared[2]) if shared else None,
            self.witnessed("ranks"),
            self.finding("schedule", "sums"),
            self.witnessed("generator", unless=lambda call: call.seeded),
            self.witnessed("clock", "process"),
            self.finding("rows", "state", "in-place", "parameter"),
            self.finding("kept"),
            otherwise="its own line says it" if words else "nothing in the file tells why",
        )

    def grow(self, moved: Ended, reference: Ended) -> None:
        """Measure at each step how far a small change of the parameters has grown; keep the largest value so far."""
        largest = 1.0
        for deviation in relative(moved.losses, reference.losses):
            largest = max(largest, deviation / MOVED if math.isfinite(deviation) else 1 / MOVED)
            self.growth.append(largest)
        steps, compared = len(self.growth), []
        for precision in ("fp64", "fp32"):
            horizon = self.horizon(precision)
            limit = self.limit(horizon - 1, precision) if horizon else 0
            words = f"is compared for the first {horizon}, to {limit:.0e}" if horizon else "not at all"
            compared.append(f"{precision} {words}")
        text = f"rounding grows {largest:.3g}-fold in {steps} steps: {'; '.join(compared)}"
        self.judge("losses can be compared", KEPT if self.horizon("fp64") >= min(steps, 3) else NOT_SHOWN, text)

    def examined_promises(self) -> None:
        """Judge the promises that examine.py checks in a few rows."""
        for promise, (likeliest, *kinds) in EXAMINED.items():
            if finding := self.finding(*kinds):
                suspect = self.witnessed("seed", "ranks") if finding["kind"] in ("sums", "rows") else None
                self.judge(promise, BROKEN, finding["says"], **self.blamed(suspect, (likeliest, finding["line"])))
            else:
                self.judge(promise, KEPT, "looked at in a few rows")
        if self.notes.get("eval_random"):
            reason = "random numbers are drawn in evaluation, too: a dropout that is not told of it, or noise that is meant"
            promise, where = "held-out results are of the rows alone", self.source.word("dropout(", "rand")
            self.judge(promise, NOT_PROMISED, "others under another seed", reason, where)
        for kind, promise in (("shared", "no held-out row is a training row"), ("doubles", "no held-out row is there twice")):
            if finding := self.finding(kind):
                self.judge(promise, NOT_PROMISED, finding["says"], where=finding["line"])
        call = self.witnessed("seed", "state", unless=lambda call: call.when != "a step" or call.function in READING)
        promise = "seeds are the core's, settings are the flags'"
        if finding := self.finding("setting"):
            self.judge(promise, BROKEN, finding["says"], where=finding["line"])
        elif call := call or self.witnessed("setting"):
            what = call.what if call.kind == "setting" else "in training, so that masks and noise repeat"
            self.judge(promise, BROKEN, str(call), SUSPICIONS[call.kind].format(what), call.line)
        else:
            self.judge(promise, KEPT, "nothing was set while it ran")

    def held_out(self, whole: dict[int, Ended], first: Ended, how: str) -> None:
        promise = f"the same held-out results in {listed(whole)} ranks as in 1 (fp64)"
        if not first.held_out or not any(first.held_out):
            return
        worst, which = max(self.held_out_apart(run, first) for run in whole.values())
        if not which:
            self.judge(promise, KEPT, f"{', '.join(first.held_out[-1])}{how}")
            return
        reason = self.blamed(self.witnessed("ranks"), self.finding("held-out-twice", "sums", "state"), ("see metrics()", None))
        self.judge(promise, BROKEN, f"{which} is {worst:.1e} apart", **reason)

    def shared_files(self) -> None:
        promise = "ranks do not write the same file"
        if shared := self.shared_file():
            self.judge(promise, BROKEN, *shared)
        else:
            self.judge(promise, KEPT, "none was written by two")

    def shared_file(self) -> tuple[str, str, int | None] | None:
        """A file that several ranks write under one name, the advice, and the line. Readers may get a half-written file."""
        for run in self.program.runs:
            writers: dict[str, list[Call]] = {}
            for calls in run.calls:
                for path, call in {call.what: call for call in calls if call.kind == "write"}.items():
                    writers.setdefault(path, []).append(call)
            for path, calls in writers.items():
                # The file was deleted before this run. The first rank writes it again, and the program never asks for its rank.
                race = self.program.made.get(path) is False and calls[0].made and not self.witnessed("ranks")
                if len(calls) > 1 or race:
                    who = f"{len(calls)} ranks at once" if len(calls) > 1 else "whichever ranks find none"
                    reason = "write under a name of each process and rename, or before the job"
                    return f"{path} is written by {who}", reason, calls[0].line
        return None

    def handed_over(self, n: int, m: int, launch: Launch, went_on: Ended, first: Ended, how: str = "") -> None:
        promise = f"a snapshot of {n} ranks goes on in {m}{how or f', at {launch.site}'}"
        if words := failed(went_on):
            self.judge(promise, BROKEN, words, **self.why_not_in_ranks(words))
            return
        far, step = self.apart(went_on, first, "fp64")
        if step is None:
            self.judge(promise, KEPT, f"at most {far:.1e} apart")
        else:
            self.judge(promise, BROKEN, f"{far:.1e} apart from step {step} on", **self.why_not_resumed())

    def rounded(self, mine: Ended | None, reference: Ended, precision: str, how: str = "") -> None:
        if mine is None or not self.horizon(precision):
            return
        promise = f"{precision} trains as fp64 does, but for rounding{how}"
        if words := failed(mine):
            self.judge(promise, BROKEN, words)
            return
        far, step = self.apart(mine, reference, precision)
        words = f"at most {far:.1e} apart in {min(self.horizon(precision), len(reference.losses))} steps"
        reason = "sums of large and small numbers, or numbers that fp32 does not hold"
        if step is None:
            self.judge(promise, KEPT, words)
        else:
            self.judge(promise, BROKEN, f"from step {step} on {words}", reason)

    def workers(self, plain: Ended, read: Ended) -> None:
        promise = "rows are the same, whichever process reads them (--workers 2)"
        reason = self.blamed(self.witnessed("process", "generator", "clock"), self.finding("in-place", "state", "rows", "kept"))
        self.equal(promise, read, plain, "equal to the bit", reason)

    def resumes(self, promise: str, whole: Ended, resumed: Ended) -> bool:
        differs = failed(resumed) or self.same_bits(resumed, whole)
        begun = resumed.of("start")[-1]["step"] if len(resumed.of("start")) > 1 else None
        if not differs and begun:
            return self.judge(promise, KEPT, f"went on at step {begun} of {len(whole.losses)}, equal to the bit")
        if not differs:
            return self.judge(promise, NOT_SHOWN, "the run had ended before it could be stopped")
        words = f"other is {differs} (went on at step {begun})"
        return self.judge(promise, BROKEN, words, **self.why_not_resumed())

    def why_not_resumed(self) -> dict:
        return self.blamed(
            self.finding("schedule", "state", "in-place"),
            self.witnessed("generator", "state", "seed", unless=lambda call: call.when in ("", "data")),
            self.witnessed("clock", "process"),
            self.finding("rows", "parameter", "kept"),
            otherwise="something is kept that neither the model, nor the optimizer, nor the core saves",
        )


# Promises that a few rows can check: the likeliest reason, and the kinds of finding of examine.py that break them.
EXAMINED = {
    "a row is the same whenever it is read, and is not changed by training": (
        "it is changed, or drawn anew",
        "rows",
        "in-place",
    ),
    "all rows are finite, and each held-out row counts once": ("it is in the data", "not-finite", "held-out-twice"),
    "most held-out rows are no training rows": ("held-out results say nothing of new rows", "leak"),
    "loss and metrics are sums over rows, whatever rows stand together": ("a mean, or a part of other rows, is in it", "sums"),
    "all parameters are trained": ("the optimizer was made before it", "parameter"),
    "the learning rate is a function of the step": ("the step is its argument", "schedule", "schedule-epochs"),
}
# Functions whose results differ in each run: if called without arguments, and in any case.
UNSEEDED = ("default_rng", "Random", "RandomState", "SeedSequence", "seed", "time", "now", "PCG64")
OUTSIDE = ("SystemRandom", "randbelow", "randbits", "token_bytes", "urandom", "uuid4", "uuid1", "time_ns", "today")
READING = ("__getitem__", "collate", "data")  # in these functions the file may set seeds

SUSPICIONS = dict(
    clock="it depends on the time: {}",
    process="it depends on the process: {}",
    generator="it draws from a generator that is not the core's: {}; torch's, Python's and NumPy's own are seeded for it",
    seed="it seeds generators itself: {}",
    state="it sets a generator's state itself: {}",
    ranks="it asks which rank it is, or speaks to the others: {}",
    setting="it changes a setting of torch: {}",
    listing="it takes files in the order in which the file system lists them: {}; sort them",
    write="it writes a file: {}",
)


def listed(numbers: Iterable) -> str:
    return " and ".join(map(str, numbers))


def relative(losses: list[float], reference: list[float]) -> list[float]:
    """The relative deviation at each step, infinite for NaN. A reference near 0 counts as 1e-6 of the largest one."""
    scale = max(map(abs, reference), default=1.0) * 1e-6 or 1e-300
    deviations = [abs(a - b) / max(abs(b), scale) for a, b in zip(losses, reference, strict=False)]
    return [math.inf if math.isnan(deviation) else deviation for deviation in deviations]


def failed(run: Ended) -> str:
    """The exit code and error of a run; empty if the run ended well."""
    return "" if run.well else f"exit code {max(map(abs, (c or 0 for c in run.exit_codes)))}: {run.error}"


def tensors(run: Ended) -> str:
    """Checksums of the parameters and the optimizer's tensors, without the rest of the snapshot."""
    return str(take_apart(run.snapshot)["crc32"]) if run.snapshot.exists() else "no snapshot"

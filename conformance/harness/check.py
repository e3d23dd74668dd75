"""A check gives one verdict in SPEC.md's words. Messages have one grammar: `value, but should be value [where] (clause)`."""

import functools
import inspect
from collections.abc import Callable

import pytest

from conformance.harness.reference import worst_deviation

# Tiers of equality (SPEC.md): relative differences, at every step.
T0, T1 = 0, 1e-10  # T0: the same run again; T1: fp64
T2 = {"cpu": 1e-5, "cuda": 1e-4, "xpu": 1e-4}  # fp32; measured on an H100: 5e-7


MOST = 200  # violations shown of one test: the author of a new site works through this list


def clause(*ids: str) -> Callable:
    """Mark a test with the clauses of SPEC.md that it checks. A test that yields violations fails if it yields any:

    @clause("J6")
    def test_the_port_is_no_constant(check, site):
        for ...:
            yield f"{line}, but should come from the job's number"
    """

    def marked(test: Callable) -> Callable:
        if not inspect.isgeneratorfunction(test):
            return pytest.mark.clause(*ids)(test)

        @functools.wraps(test)
        def judged(check: Check, **fixtures) -> None:
            __tracebackhide__ = True
            check.holds(*test(check, **fixtures))

        return pytest.mark.clause(*ids)(judged)

    return marked


def clauses_of(item: pytest.Item) -> list[str]:
    return [clause for mark in item.iter_markers("clause") for clause in mark.args]


def parameters(item: pytest.Item) -> dict:
    return getattr(getattr(item, "callspec", None), "params", {})


def launch_of(item: pytest.Item):
    """The launcher that an item is about; for a test of a site, that site's first launcher."""
    launch, site = parameters(item).get("launch"), parameters(item).get("site")
    return launch or (site.launches[0] if site and site.launches else None)


class Check:
    """The checks of one test. where: what is checked, as messages name it.

    check.equal(...) judges by the test's only clause; check["L2"].equal(...) by one of several.
    """

    def __init__(self, where: str, node: pytest.Item, clauses: list[str] | None = None):
        self.where, self.node = where, node
        self.clauses = clauses or clauses_of(node)

    def __getitem__(self, clause: str) -> "Check":
        assert clause in self.clauses, f"{self.node.name} is not marked with clause {clause}"
        return Check(self.where, self.node, [clause])

    def equal(self, **pairs: tuple) -> None:
        """name=(value, expected value). Fails with every pair that differs."""
        __tracebackhide__ = True
        differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        self.holds(*(f"{name}={_short(value)}, but should be {_short(other)}" for name, (value, other) in differ.items()))

    def close(self, values: list[float], reference: list[float], limit: float, what: str = "losses") -> None:
        """Fail if a relative difference exceeds the limit. The session's end prints the worst, also of a passing test."""
        __tracebackhide__ = True
        worst = worst_deviation(values, reference)
        self.node.user_properties.append(("deviation", (worst, limit, what)))
        if not worst <= limit:
            self.holds(f"worst relative deviation of {what}={worst:.1e}, but should be at most {limit:g}")

    def curve(self, precision: str, losses: list[float]) -> None:
        """Keep the losses of a reference run for the report."""
        self.node.user_properties.append(("curve", (precision, [loss.hex() for loss in losses])))

    def holds(self, *violations: str) -> None:
        """Fail with one line for each violation, if there is one."""
        __tracebackhide__ = True
        assert len(self.clauses) == 1, f"{self.node.name} has the clauses {self.clauses}: which one? check[...]"
        lines = [f"{violation} [{self.where}] ({self.clauses[0]})" for violation in dict.fromkeys(violations)]
        if lines:
            more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
            pytest.fail("\n".join(lines[:MOST] + more), pytrace=False)


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."

"""The golden trace is right, and the reference training is a fair thing to compare by.

    python -m pytest conformance/checks/test_golden.py

This needs neither ranks nor torch.
"""

import pytest

from conformance.golden import make as golden
from conformance.harness import reference

clause = pytest.mark.clause
STEPS = 42  # three epochs of 14


@pytest.fixture(scope="module")
def numpy_trace() -> dict[str, list[float]]:
    return reference.train()


@clause("L8")
@pytest.mark.parametrize("name", ["losses", "eval_losses", "eval_accuracies"])
def test_golden_is_what_numpy_arrives_at(check, numpy_trace, name):
    check.close("L8", golden.load()[name], numpy_trace[name], 1e-12, name)


@clause("L9")
def test_rounding_does_not_grow(check, numpy_trace):
    """Initial parameters moved by 1e-7 (fp32's rounding) move no loss by 1e-5: what deviates more is not rounding."""
    perturbed = reference.train(perturbation=1e-7)
    assert perturbed["losses"] != numpy_trace["losses"]
    check.close("L9", perturbed["losses"], numpy_trace["losses"], 1e-5, "losses after a perturbation of 1e-7")


@clause("L10")
def test_golden_is_not_vacuous(check, numpy_trace):
    losses, accuracy = golden.load()["losses"], golden.load()["eval_accuracies"][-1]
    check.equal("L10", steps=(len(losses), STEPS), different_losses=(len(set(losses)), STEPS))
    check.equal("L10", falls_to_a_tenth=(losses[-1] < losses[0] / 10, True), learns=(accuracy > 0.9, True))
    other = reference.worst_deviation(reference.train(seed=1, epochs=1)["losses"], losses[:14])
    check.equal("L10", another_seed_differs=(other > 1e-3, True))
    # A learning rate off by one in a thousand must stand out in fp32, or the tolerance T2 says nothing.
    off = reference.worst_deviation(reference.train(lr=0.1001)["losses"], losses)
    check.equal("L10", a_wrong_learning_rate_differs=(off > 1e-4, True))

"""Fixture of the static checks: one set of dry runs for each site."""

import pytest

from conformance.harness.dry_run import DryRuns


@pytest.fixture(scope="session")
def dry(site):
    runs = DryRuns(site)
    yield runs
    runs.close()

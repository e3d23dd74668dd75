"""What the checks share: one set of dry runs a site."""

import pytest

from conformance.harness.dry_run import DryRuns


@pytest.fixture(scope="session")
def dry(site):
    runs = DryRuns(site)
    yield runs
    runs.close()

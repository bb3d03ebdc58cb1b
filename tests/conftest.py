"""For all tests: no property fails because the machine is busy, and servers that several need."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.postgres import Postgres, why_not

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; tests that need one are skipped where none can be started."""
    if reason := why_not():
        pytest.skip(reason)
    with Postgres() as server:
        yield server

"""The journal in PostgreSQL: the same promises as in SQLite."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Place
from tests.postgres import Postgres

pytestmark = pytest.mark.e2e


def test_a_job_in_postgresql_survives_the_coordinators_death_bit_for_bit(
    place: Place, postgres: Postgres
):
    flags = {"database-url": postgres.database()}
    place.start(flags=flags, crash_at="version_persisted_before_announce:2")
    place.sites("a", "b")
    job = place.submit(versions=4)
    place.crashed()
    place.start(flags=flags)
    view = place.finished(job)
    assert view.version == 4
    digests = place.digests(job)
    straight = place.submit(versions=4)
    place.finished(straight)
    assert place.digests(straight) == digests
    assert not (place.data / "skerry.db").exists()

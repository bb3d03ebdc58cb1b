"""Projections as the API shows them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator import queries
from coordinator.ledger import Ledger, LedgerRow
from coordinator.store import Store, sqlite_url
from protocol.errors import NotFoundError
from protocol.views import JobSiteView, JobView
from tests.coordinator.stubsite import spec_of
from tests.coordinator.test_store import tell


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(sqlite_url(tmp_path / "db"))
    await made.open()
    await tell(made, "j-1")
    yield made
    await made.close()


async def test_a_version_shows_its_cohort_and_metrics(store: Store) -> None:
    zero, one = await queries.versions(store, "j-1", -1)
    assert (zero.version, zero.cohort, zero.metrics) == (0, (), {})
    assert (one.version, one.cohort, one.missing, one.made_at) == (1, ("a",), {}, 5003.0)
    assert one.metrics["acc"].value == 0.5
    assert one.per_site["a"]["acc"].value == 0.5
    assert await queries.versions(store, "j-1", 1) == ()
    assert await queries.versions(store, "j-2", -1) == ()


async def test_a_settled_update_shows_its_last_word(store: Store) -> None:
    (update,) = await queries.updates(store, "j-1", 0)
    assert (update.site, update.verdict, update.settled_at) == ("a", "counted", 5002.0)
    assert await queries.updates(store, "j-1", 1) == ()
    found = await queries.settlement(store, "j-1", "a", 1, 0)
    assert found == (1, "counted", "in the open round", "s.body", 400)
    assert await queries.settlement(store, "j-1", "a", 1, 1) is None


async def test_a_job_is_completed_with_unix_times_and_socket_bytes(store: Store) -> None:
    ledger = Ledger()
    ledger.add("a", "j-1", 100, 10)
    ledger.add("b", "j-1", 1, 0)
    site = JobSiteView(
        site="a",
        role="site",
        active=True,
        epoch=1,
        clock=1,
        train_examples=1,
        eval_examples=1,
        doing="",
        joined_at_version=0,
    )
    view = JobView(
        id="j-1",
        name="n",
        task="t",
        state="finished",
        reason="",
        waiting="",
        version=1,
        round=1,
        created_at=0.0,
        sites=(site,),
    )
    extras = (await queries.job_extras(store, ["j-1"]))["j-1"]
    done = queries.complete(view, extras, ledger)
    assert (done.created_at, done.ended_at) == (5000.0, 5003.0)
    assert (done.bytes_up, done.bytes_down) == (101, 10)
    assert (done.sites[0].bytes_up, done.sites[0].bytes_down) == (100, 10)
    assert done.dense_bytes == 2 * 16  # one update up, one snapshot down, 4 floats each
    assert await queries.job_extras(store) == {"j-1": extras}


async def test_a_job_keeps_its_specification(store: Store) -> None:
    assert await queries.job_spec(store, "j-1") == spec_of()
    with pytest.raises(NotFoundError, match="j-9"):
        await queries.job_spec(store, "j-9")


async def test_ledger_totals_are_replaced_not_added(store: Store) -> None:
    await queries.save_ledger(store, [LedgerRow("a", "j-1", 5, 1), LedgerRow("a", "", 2, 0)])
    await queries.save_ledger(store, [LedgerRow("a", "j-1", 8, 2)])
    rows = sorted(await queries.load_ledger(store))
    assert rows == [LedgerRow("a", "", 2, 0), LedgerRow("a", "j-1", 8, 2)]

"""The journal and its projections in one transaction, through races, aborts and upgrades."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import journal as j
from coordinator import store as store_module
from coordinator import tables
from coordinator.store import Store, migrate, sqlite_url
from protocol.errors import ConflictError, UsageError
from protocol.metrics import metric
from tests.coordinator.stubsite import layout_of, spec_of


@pytest.fixture(params=["sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    url = sqlite_url(tmp_path / "db")
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").database()
    made = Store(url, pool=5)
    await made.open()
    yield made
    await made.close()


def story(job: str) -> list[list[j.Event]]:
    """One round of one site, in the batches that the core makes."""
    cohort = (j.CohortMember(site="a", epoch=1, clock=0, spool="s.body"),)
    return [
        [j.JobSubmitted(job=job, spec=spec_of(), by="me")],
        [
            j.SiteEntered(
                job=job,
                site="a",
                role="site",
                epoch=1,
                clock=0,
                train_examples=10,
                eval_examples=5,
                layout_digest="d",
            ),
            j.SiteRefused(job=job, site="b", reason="another layout"),
            j.VersionMade(job=job, version=0, digest="00", bytes=16, layout=layout_of(4), by="a"),
            j.JobMoved(job=job, state="running", reason="all are here"),
            j.RoundOpened(job=job, round=1, version=0, tasks=(), deadline=9.0),
        ],
        [
            j.UpdateSettled(
                job=job,
                site="a",
                epoch=1,
                clock=0,
                attempt=1,
                verdict="queued",
                reason="in the open round",
                spool="s.body",
                wire_bytes=400,
                examples=10.0,
                metrics={"loss": metric(float("nan"), 10.0)},
            ),
            j.RoundClosed(
                job=job, round=1, version=1, cohort=cohort, active_sites=1, reason="all are in"
            ),
        ],
        [
            j.VersionMade(job=job, version=1, digest="11", bytes=16, update_norm=2.0),
            j.EvaluationReported(
                job=job,
                version=1,
                site="a",
                role="site",
                examples=5.0,
                metrics={"acc": metric(0.5, 5.0)},
            ),
            j.CheckpointMade(job=job, version=1),
            j.JobMoved(job=job, state="finished", reason="done"),
        ],
    ]


async def tell(store: Store, job: str) -> None:
    for number, events in enumerate(story(job)):
        await store.append(100.0 + number, 5000.0 + number, events)


async def dump(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    async def work(connection: AsyncConnection) -> dict[str, list[tuple[Any, ...]]]:
        found = {}
        for table in tables.PROJECTIONS.values():
            columns = [column for column in table.c if column.name != "number"]
            order = [column for column in columns if column.name != "number"]
            rows = await connection.execute(sa.select(*columns).order_by(*order))
            found[table.name] = [tuple(row) for row in rows]
        return found

    return await store.read(work)


def migrated(connection: sa.Connection) -> None:
    """What an old database goes through, from the beginning."""
    store_module._upgrade(connection)


def created(connection: sa.Connection) -> None:
    """What a new database gets."""
    store_module._create_schema(connection)


@pytest.mark.parametrize("make", [migrated, created])
def test_a_new_database_gets_exactly_what_all_migrations_come_to(
    make: Callable[[sa.Connection], None],
) -> None:
    def schema(connection: sa.Connection) -> list[tuple[str, str]]:
        query = sa.text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
        return [(name, " ".join(sql.split())) for name, sql in connection.execute(query)]

    with sa.create_engine("sqlite://").begin() as one, sa.create_engine("sqlite://").begin() as two:
        migrated(one)
        make(two)
        assert schema(one) == schema(two)
        assert two.execute(sa.select(tables.revisions)).all() == [(tables.REVISION,)]
        context = MigrationContext.configure(two, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []


def test_the_same_holds_for_postgresql() -> None:
    written = io.StringIO()
    options = {"as_sql": True, "output_buffer": written}
    context = MigrationContext.configure(dialect_name="postgresql", opts=options)
    with Operations.context(context):
        for step in reversed(list(scripts().walk_revisions())):
            step.module.upgrade()
    statements: list[str] = []

    def note(statement: sa.schema.ExecutableDDLElement, *_: Any, **__: Any) -> None:
        statements.append(str(statement.compile(dialect=engine.dialect)))

    engine = sa.create_mock_engine("postgresql://", note)
    tables.metadata.create_all(engine, checkfirst=False)

    def plain(text: str) -> list[str]:
        return sorted(" ".join(one.split()) for one in text.split(";") if one.strip())

    assert plain(written.getvalue()) == plain(";".join(statements))


async def test_a_new_database_is_made_without_loading_the_migrations(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom coordinator.store import Store\n"
        "async def main():\n    store = Store(sys.argv[1])\n    await store.open()\n"
        "    await store.close()\nasyncio.run(main())\nprint('alembic' in sys.modules)"
    )
    for _ in range(2):  # new, and then up to date
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, sqlite_url(tmp_path / "db"), stdout=asyncio.subprocess.PIPE
        )
        assert (await process.communicate())[0].strip() == b"False"


def scripts() -> ScriptDirectory:
    config = Config()
    folder = Path(store_module.__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder))
    return ScriptDirectory.from_config(config)


def test_the_revision_in_the_code_is_the_newest_migration() -> None:
    assert scripts().get_heads() == [tables.REVISION]


async def test_opening_again_changes_nothing_and_finds_the_end_of_the_journal(
    tmp_path: Path,
) -> None:
    first = Store(sqlite_url(tmp_path / "db"))
    await first.open()
    await tell(first, "j-1")
    before = await dump(first)
    await first.close()
    second = Store(sqlite_url(tmp_path / "db"))
    await second.open()
    assert (second.last_seq, second.last_now) == (12, 103.0)
    assert await dump(second) == before
    await second.close()


async def test_a_database_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = Store(sqlite_url(tmp_path / "db"))
    await store.open()
    await store.write(
        lambda c: c.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    )
    with pytest.raises(ConflictError, match="cannot be brought"):
        await store.write(migrate)
    kept = await store.read(lambda c: c.scalar(sa.text("SELECT version_num FROM alembic_version")))
    assert kept == "9999"
    await store.close()


def test_an_unusable_url_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="database_url"):
        Store("nonsense")


async def test_journal_and_projections_are_stored_together_or_not_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.append(1.0, 1.0, story("j-1")[0])
    before = await dump(store)

    def broken(_entry: j.Entry, _at: float) -> list[Any]:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "rows_of", broken)
        with pytest.raises(ZeroDivisionError):
            await store.append(2.0, 2.0, story("j-1")[1])
    assert store.last_seq == 1
    assert len(await store.entries()) == 1
    assert await dump(store) == before
    await store.append(2.0, 2.0, story("j-1")[1])  # and the journal goes on where it was
    assert [entry.seq for entry in await store.entries()] == [1, 2, 3, 4, 5, 6]


async def test_projections_rebuilt_from_the_journal_are_equal(store: Store) -> None:
    await tell(store, "j-1")
    await tell(store, "j-2")
    before = await dump(store)
    assert all(before.values())

    async def damage(connection: AsyncConnection) -> None:
        await connection.execute(sa.delete(tables.versions))
        await connection.execute(sa.update(tables.jobs).values(state="nonsense", reason="?"))
        await connection.execute(
            sa.insert(tables.job_sites).values(job="j-9", site="ghost", note="?")
        )

    await store.write(damage)
    assert await dump(store) != before
    assert await store.rebuild() == 24
    assert await dump(store) == before


async def test_events_come_back_as_they_were_written(store: Store) -> None:
    await tell(store, "j-1")
    told = [event for batch in story("j-1") for event in batch]
    assert [entry.event for entry in await store.entries()] == told
    page = await store.entries(after=3, job="j-1", limit=2)
    assert [entry.seq for entry in page] == [4, 5]
    made = await store.entries_of_kinds("j-1", ("version_made", "checkpoint_made"))
    assert [type(entry.event) for entry in made] == [
        j.VersionMade,
        j.VersionMade,
        j.CheckpointMade,
    ]
    lines = await store.lines(after=11)
    assert [(line.seq, line.now) for line in lines] == [(12, 103.0)]
    assert b'"finished"' in bytes(lines[0].event)


async def test_deleting_a_job_leaves_the_others(store: Store) -> None:
    await tell(store, "j-1")
    await tell(store, "j-2")
    await store.delete_job("j-1")
    assert {entry.event.job for entry in await store.entries()} == {"j-2"}
    assert {row[0] for rows in (await dump(store)).values() for row in rows} == {"j-2"}
    assert store.last_seq == 24  # numbers are not used twice


async def test_a_second_coordinator_on_the_same_journal_is_noticed(tmp_path: Path) -> None:
    one, two = (Store(sqlite_url(tmp_path / "db")) for _ in range(2))
    await one.open()
    await two.open()
    await one.append(1.0, 1.0, story("j-1")[0])
    with pytest.raises(ConflictError, match="another coordinator"):
        await two.append(1.0, 1.0, story("j-2")[0])
    await one.close()
    await two.close()


async def test_parallel_writers_all_get_through(store: Store) -> None:
    """PC-076: 380 sites insert at the same moment; 380 rows, no error about a lock."""
    sites = tables.sites

    async def insert(number: int) -> None:
        async def work(connection: AsyncConnection) -> None:
            # Reads before it writes: what fails with SQLITE_BUSY at once unless it begins so.
            count = await connection.scalar(sa.select(sa.func.count()).select_from(sites))
            assert count is not None
            await connection.execute(
                sa.insert(sites).values(name=f"s{number}", secret_hash=f"{number}")
            )

        await store.write(work)

    await asyncio.gather(*(insert(number) for number in range(380)))
    count = sa.select(sa.func.count()).select_from(sites)
    assert await store.read(lambda c: c.scalar(count)) == 380


async def test_two_stores_write_in_turn(tmp_path: Path) -> None:
    """PC-076: also writers of two pools (a second process) wait for each other."""
    stores = [Store(sqlite_url(tmp_path / "db")) for _ in range(2)]
    for store in stores:
        await store.open()

    async def insert(store: Store, number: int) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.scalar(sa.select(sa.func.count()).select_from(tables.sites))
            await connection.execute(
                sa.insert(tables.sites).values(name=f"s{number}", secret_hash=f"{number}")
            )

        await store.write(work)

    await asyncio.gather(*(insert(stores[n % 2], n) for n in range(60)))
    count = sa.select(sa.func.count()).select_from(tables.sites)
    assert await stores[0].read(lambda c: c.scalar(count)) == 60
    for store in stores:
        await store.close()


async def test_cancelled_requests_give_their_connections_back(store: Store) -> None:
    """PC-077: pool of 5, 50 slow requests aborted half way; then 5 connections are free."""
    assert store.free_connections == 5
    slow = sa.text(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 20000)"
        " SELECT sum(i) FROM n"
    )
    begun = [asyncio.Event() for _ in range(50)]

    def request(number: int) -> asyncio.Task[int]:
        async def work(connection: AsyncConnection) -> int:
            begun[number].set()
            return (await connection.execute(slow)).scalar_one()

        return asyncio.ensure_future(store.read(work))

    tasks = [request(number) for number in range(50)]
    await begun[0].wait()
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    async with asyncio.timeout(1.0 + 10.0):  # 1 s on an idle machine
        assert await request(49) == 200010000
    await store.settle()
    assert store.free_connections == 5


async def test_a_cancelled_write_is_whole(store: Store) -> None:
    async def insert(connection: AsyncConnection) -> None:
        for number in range(20):
            await connection.execute(
                sa.insert(tables.sites).values(name=f"s{number}", secret_hash=f"{number}")
            )

    task = asyncio.ensure_future(store.write(insert))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.settle()
    count = sa.select(sa.func.count()).select_from(tables.sites)
    assert await store.read(lambda c: c.scalar(count)) == 20


async def test_durability_sets_how_sqlite_syncs(tmp_path: Path) -> None:
    store = Store(sqlite_url(tmp_path / "db"), pool=1)  # one connection goes through all of it
    await store.open()
    for power, level in ((False, 1), (True, 2), (True, 2), (False, 1)):  # 1 NORMAL, 2 FULL
        store.power = power
        assert await store.write(lambda c: c.scalar(sa.text("PRAGMA synchronous"))) == level
    assert await store.read(lambda c: c.scalar(sa.text("PRAGMA journal_mode"))) == "wal"
    await store.close()

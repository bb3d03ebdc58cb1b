"""The database: the journal and its projections in one transaction, short reads, nothing else.

Every piece of work runs to its end in a task of its own: a caller that is cancelled (its client
went away) leaves, the work gives its connection back. Writers take turns before they ask for a
connection, so that they never starve readers of the pool nor each other of SQLite's one lock.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from coordinator import tables
from coordinator.journal import SCHEMA, Entry, Event, decode_event, encode_event
from coordinator.projections import PRIMARY_KEYS, Row, Table, Value, rows_of
from protocol.errors import BusyError, ConflictError, UsageError
from protocol.views import JournalLine

log = logging.getLogger("coordinator.store")

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]

POOL_SECONDS: Final = 10.0
BUSY_SECONDS: Final = 10.0
PAGE: Final = 500
_REBUILD_PAGE: Final = 2_000
_CACHE_KIB: Final = 512  # of each connection; the kernel caches the file for all of them


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite+aiosqlite:///{path}"


class _Shape(NamedTuple):
    """What the SQL of a row depends on."""

    table: Table
    insert: bool
    key: tuple[str, ...]
    values: tuple[str, ...]


def _shape(row: Row) -> _Shape:
    return _Shape(row.table, row.insert, tuple(row.key), tuple(row.values))


def _parameters(row: Row) -> dict[str, Value]:
    if row.insert:
        return {**row.key, **row.values}
    keys = {f"key_{name}": value for name, value in row.key.items()}
    return keys | {f"set_{name}": value for name, value in row.values.items()}


class Store:
    """One database, one writing coordinator."""

    def __init__(self, url: str, *, pool: int = 5) -> None:
        try:
            parsed = make_url(url)
            self._engine = _create(parsed, pool)
        except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
            raise UsageError(
                f"database_url cannot be used: {error}",
                "Examples: sqlite+aiosqlite:////var/lib/skerry/skerry.db, "
                "postgresql+asyncpg://user@host/skerry (needs the extra `postgres`).",
            ) from None
        self._sqlite = parsed.get_backend_name() == "sqlite"
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._statements: dict[_Shape, sa.Executable] = {}
        self.power = False  # a running job asks for durability through a power cut
        self.last_seq = 0
        self.last_now: float | None = None

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Bring the schema up to date and find the end of the journal."""
        await self.write(migrate)
        async with self._engine.connect() as connection:
            found = await connection.execute(
                sa.select(tables.journal.c.seq, tables.journal.c.now)
                .order_by(tables.journal.c.seq.desc())
                .limit(1)
            )
            if row := found.first():
                self.last_seq, self.last_now = row.seq, row.now

    async def settle(self) -> None:
        """Wait for work whose callers have left."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Wait for what is under way, then give all connections back."""
        await self.settle()
        await self._engine.dispose()

    @property
    def free_connections(self) -> int:
        """Connections of the pool that nobody holds, counting those not opened yet."""
        pool = self._engine.pool
        assert isinstance(pool, sa.pool.QueuePool)
        return pool.size() - pool.checkedout()

    # ------------------------------------------------------------ work

    async def read(self, work: Work[T], *, snapshot: bool = False) -> T:
        """Run `work`, which changes nothing; with `snapshot` all its queries see one instant.

        Raises:
            BusyError: no connection became free in time.
        """
        return await self._to_the_end(self._read(work, snapshot=snapshot))

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction of its own: all of it is stored, or nothing."""
        return await self._to_the_end(self._write(work))

    async def _to_the_end(self, coroutine: Awaitable[T]) -> T:
        task: asyncio.Task[T] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # taken note of, also when nobody waits any more

    async def _read(self, work: Work[T], *, snapshot: bool) -> T:
        try:
            async with self._engine.connect() as connection:
                if snapshot:
                    await connection.execution_options(skerry="snapshot")
                return await work(connection)
        except exc.TimeoutError:
            raise BusyError(
                f"the database had no free connection for {POOL_SECONDS:.0f} s.", "Try again."
            ) from None

    async def _write(self, work: Work[T]) -> T:
        async with self._writing, self._engine.connect() as connection:
            await connection.execution_options(skerry="power" if self.power else "process")
            async with connection.begin():
                return await work(connection)

    # ------------------------------------------------------------ the journal

    async def append(self, now: float, at: float, events: Sequence[Event]) -> list[Entry]:
        """Append events and write their projections, in one transaction.

        `now` is job time, `at` Unix time.

        Raises:
            ConflictError: somebody else writes to this journal.
        """
        entries = [
            Entry(seq=self.last_seq + number, now=now, event=event)
            for number, event in enumerate(events, start=1)
        ]
        if not entries:
            return entries

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(sa.insert(tables.journal), [_stored(e, at) for e in entries])
            await self._project(connection, [row for e in entries for row in rows_of(e, at)])

        try:
            await self.write(work)
        except exc.IntegrityError as error:
            if tables.journal.name not in str(error.orig):
                raise
            raise ConflictError(
                f"the journal holds row {entries[0].seq} already ({error.orig}): another "
                "coordinator writes to this database.",
                "Stop one of the two; this one must be restarted.",
            ) from None
        self.last_seq, self.last_now = entries[-1].seq, now
        return entries

    async def _project(self, connection: AsyncConnection, rows: list[Row]) -> None:
        # Neighbours of one shape go in one call: every call is a few hops to SQLite's thread.
        for shape, group in itertools.groupby(rows, _shape):
            statement = self._statements.get(shape)
            if statement is None:
                statement = self._statements[shape] = self._statement(shape)
            await connection.execute(statement, [_parameters(row) for row in group])

    def _statement(self, shape: _Shape) -> sa.Executable:
        table = tables.PROJECTIONS[shape.table]
        if not shape.insert:
            return (
                sa.update(table)
                .where(*(table.c[name] == sa.bindparam(f"key_{name}") for name in shape.key))
                .values({name: sa.bindparam(f"set_{name}") for name in shape.values})
            )
        names = {*shape.key, *shape.values}
        insert = self._insert(table).values({name: sa.bindparam(name) for name in names})
        rest = {name: insert.excluded[name] for name in shape.values if name not in shape.key}
        return insert.on_conflict_do_update(index_elements=PRIMARY_KEYS[shape.table], set_=rest)

    def _insert(self, table: sa.Table) -> sqlite.Insert:
        # Each dialect has an `insert` of its own, both take ON CONFLICT in the same words; only
        # the one in use is loaded.
        module = importlib.import_module(f"sqlalchemy.dialects.{self._engine.dialect.name}")
        made: sqlite.Insert = module.insert(table)
        return made

    def upsert(
        self, table: sa.Table, key: Sequence[str], values: Mapping[str, Any]
    ) -> sa.Executable:
        """Insert a row, or set these columns of the one that has this key."""
        rest = {name: value for name, value in values.items() if name not in key}
        insert = self._insert(table).values(**values)
        return insert.on_conflict_do_update(index_elements=key, set_=rest)

    async def entries(self, after: int = 0, *, job: str = "", limit: int = PAGE) -> list[Entry]:
        """Journal rows beyond `after`, in order; of one job when it is named."""

        async def work(connection: AsyncConnection) -> list[Entry]:
            return [_entry(row) for row in await _journal_rows(connection, after, job, limit)]

        return await self.read(work)

    async def lines(self, after: int = 0, *, job: str = "", limit: int = PAGE) -> list[JournalLine]:
        """As `entries`, with each event's JSON as it is stored."""

        async def work(connection: AsyncConnection) -> list[JournalLine]:
            rows = await _journal_rows(connection, after, job, limit)
            return [
                JournalLine(seq=row.seq, now=row.now, event=msgspec.Raw(row.event.encode()))
                for row in rows
            ]

        return await self.read(work)

    async def entries_of_kinds(self, job: str, kinds: Iterable[str]) -> list[Entry]:
        """All rows of a job that are of these kinds, in order."""
        journal = tables.journal

        async def work(connection: AsyncConnection) -> list[Entry]:
            found = await connection.execute(
                sa.select(journal)
                .where(journal.c.job == job, journal.c.kind.in_(tuple(kinds)))
                .order_by(journal.c.seq)
            )
            return [_entry(row) for row in found]

        return await self.read(work)

    async def rebuild(self) -> int:
        """Make all projections anew from the journal; -> rows of the journal that were read."""
        count = 0

        async def work(connection: AsyncConnection) -> None:
            nonlocal count
            for table in tables.PROJECTIONS.values():
                await connection.execute(sa.delete(table))
            after = 0
            while page := await _journal_rows(connection, after, "", _REBUILD_PAGE):
                rows = [row for stored in page for row in rows_of(_entry(stored), stored.at)]
                await self._project(connection, rows)
                after = page[-1].seq
                count += len(page)

        await self.write(work)
        return count

    async def delete_job(self, job: str) -> None:
        """Remove all rows of a job."""

        async def work(connection: AsyncConnection) -> None:
            for table in (tables.journal, tables.ledger, *tables.PROJECTIONS.values()):
                await connection.execute(sa.delete(table).where(table.c.job == job))

        await self.write(work)


async def migrate(connection: AsyncConnection) -> None:
    """Create the schema, or upgrade it step by step, in the connection's transaction.

    Raises:
        ConflictError: a newer release has written this database.
    """
    known = await connection.run_sync(lambda sync: sa.inspect(sync).has_table("alembic_version"))
    if not known:
        await connection.run_sync(_create_schema)
        return
    found = await connection.scalar(sa.select(tables.revisions.c.version_num))
    if found != tables.REVISION:
        log.info("the database is at revision %s, going to %s", found, tables.REVISION)
        await connection.run_sync(_upgrade)


def _create_schema(connection: sa.Connection) -> None:
    # What all migrations together come to; a test holds the two against each other.
    tables.metadata.create_all(connection, checkfirst=False)
    tables.revisions.create(connection)
    connection.execute(sa.insert(tables.revisions).values(version_num=tables.REVISION))


def _upgrade(connection: sa.Connection) -> None:
    # Imported here: few starts need a migration, and alembic is 11 MB that would stay resident.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    logging.getLogger("alembic").setLevel(logging.WARNING)  # says what only its authors ask
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, tables.REVISION)
    except CommandError as error:
        raise ConflictError(
            f"the database cannot be brought to revision {tables.REVISION}: {error}",
            "A newer release has used it: run that one, or restore a backup.",
        ) from None


def _create(url: sa.URL, pool: int) -> AsyncEngine:
    if url.get_backend_name() != "sqlite":
        return create_async_engine(
            url, pool_size=pool, max_overflow=0, pool_timeout=POOL_SECONDS, pool_pre_ping=True
        )
    engine = create_async_engine(
        url,
        poolclass=sa.pool.AsyncAdaptedQueuePool,
        pool_size=pool,
        max_overflow=0,
        pool_timeout=POOL_SECONDS,
        connect_args={"timeout": BUSY_SECONDS},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: Any, _: object) -> None:
        # The driver's own habit of opening transactions would break BEGIN IMMEDIATE.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA journal_size_limit=67108864")
        cursor.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A transaction that reads and then writes must hold the write lock from the start: an
        # upgrade in the middle fails at once, whatever the busy timeout says. A single query is
        # its own snapshot.
        kind = connection.get_execution_options().get("skerry")
        level = {"power": "FULL", "process": "NORMAL"}.get(kind or "")
        if level is not None and connection.info.get("synchronous") != level:
            connection.exec_driver_sql(f"PRAGMA synchronous={level}")
            connection.info["synchronous"] = level  # `info` lives as long as the pooled connection
        if kind is not None:
            connection.exec_driver_sql("BEGIN" if kind == "snapshot" else "BEGIN IMMEDIATE")

    return engine


async def _journal_rows(
    connection: AsyncConnection, after: int, job: str, limit: int
) -> Sequence[sa.Row[Any]]:
    journal = tables.journal
    query = sa.select(journal).where(journal.c.seq > after)
    if job:
        query = query.where(journal.c.job == job)
    return (await connection.execute(query.order_by(journal.c.seq).limit(limit))).all()


def _stored(entry: Entry, at: float) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "now": entry.now,
        "at": at,
        "version": SCHEMA,
        "job": entry.event.job,
        "kind": type(entry.event).__struct_config__.tag,
        "event": encode_event(entry.event).decode(),
    }


def _entry(row: sa.Row[Any]) -> Entry:
    return Entry(seq=row.seq, now=row.now, event=decode_event(row.event.encode()))

"""Projections -> what the API shows. Reads only; each answer is bounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import tables
from coordinator.ledger import Ledger, LedgerRow
from coordinator.store import PAGE, Store
from protocol.errors import NotFoundError
from protocol.jobspec import JobSpec
from protocol.messages import VerdictKind
from protocol.metrics import Metric, combine
from protocol.views import JobView, UpdateView, VersionView

_Metrics: Final = msgspec.json.Decoder(dict[str, Metric])
_Names: Final = msgspec.json.Decoder(tuple[str, ...])
_Reasons: Final = msgspec.json.Decoder(dict[str, str])
_EXCHANGE: Final = 2  # one dense exchange goes up and comes down


class JobExtras(NamedTuple):
    """What the core does not hold: Unix times and the cost of dense exchange."""

    created_at: float
    ended_at: float | None
    dense_bytes: int


def no_such_job(job: str) -> NotFoundError:
    """The one sentence about it."""
    return NotFoundError(f"there is no job {job[:80]!r} here.", "`skerry job list` shows all.")


async def job_spec(store: Store, job: str) -> JobSpec:
    """The specification as it was submitted; NotFoundError."""

    async def work(connection: AsyncConnection) -> str | None:
        return await connection.scalar(
            sa.select(tables.jobs.c.spec).where(tables.jobs.c.job == job)
        )

    found = await store.read(work)
    if found is None:
        raise no_such_job(job)
    return msgspec.json.decode(found, type=JobSpec)


async def job_extras(store: Store, jobs: Iterable[str] | None = None) -> dict[str, JobExtras]:
    """Of these jobs, or of all.

    Dense exchange means: for every settled update one dense float32 update up and one dense
    snapshot down.
    """
    table, updates = tables.jobs, tables.updates
    counts = (
        sa.select(updates.c.job, sa.func.count().label("settled"))
        .group_by(updates.c.job)
        .subquery()
    )
    query = sa.select(
        table.c.job,
        table.c.created_at,
        table.c.ended_at,
        table.c.dense_bytes,
        sa.func.coalesce(counts.c.settled, 0).label("settled"),
    ).outerjoin(counts, counts.c.job == table.c.job)
    if jobs is not None:
        query = query.where(table.c.job.in_(tuple(jobs)))

    async def work(connection: AsyncConnection) -> dict[str, JobExtras]:
        return {
            row.job: JobExtras(
                row.created_at, row.ended_at, row.dense_bytes * row.settled * _EXCHANGE
            )
            for row in await connection.execute(query)
        }

    return await store.read(work)


def complete(view: JobView, extras: JobExtras | None, ledger: Ledger) -> JobView:
    """The core's view of a job with what the tables and the ledger know."""
    up, down = ledger.job(view.id)
    sites = []
    for site in view.sites:
        site_up, site_down = ledger.link(site.site, view.id)
        sites.append(msgspec.structs.replace(site, bytes_up=site_up, bytes_down=site_down))
    changes: dict[str, Any] = {"bytes_up": up, "bytes_down": down, "sites": tuple(sites)}
    if extras is not None:
        changes |= extras._asdict()
    return msgspec.structs.replace(view, **changes)


async def versions(store: Store, job: str, after: int) -> tuple[VersionView, ...]:
    """Versions above `after`, oldest first, with their metrics."""
    table, evaluations = tables.versions, tables.evaluations

    async def work(connection: AsyncConnection) -> tuple[VersionView, ...]:
        found = (
            await connection.execute(
                sa.select(table)
                .where(table.c.job == job, table.c.version > after, table.c.made_at.is_not(None))
                .order_by(table.c.version)
                .limit(PAGE)
            )
        ).all()
        if not found:
            return ()
        reports: dict[int, dict[str, dict[str, Metric]]] = defaultdict(dict)
        for row in await connection.execute(
            sa.select(evaluations)
            .where(
                evaluations.c.job == job,
                evaluations.c.version.between(found[0].version, found[-1].version),
            )
            .order_by(evaluations.c.site)
        ):
            reports[row.version][row.site] = _Metrics.decode(row.metrics)
        raw = await connection.scalar(sa.select(tables.jobs.c.spec).where(tables.jobs.c.job == job))
        lower: frozenset[str] = frozenset()
        if raw is not None:
            lower = frozenset(msgspec.json.decode(raw, type=JobSpec).evaluation.lower_is_better)
        return tuple(_version_view(row, reports.get(row.version, {}), lower) for row in found)

    return await store.read(work, snapshot=True)


def _version_view(
    row: sa.Row[Any], reports: dict[str, dict[str, Metric]], lower: frozenset[str]
) -> VersionView:
    return VersionView(
        version=row.version,
        digest=row.digest,
        bytes=row.bytes,
        made_at=row.made_at,
        cohort=_Names.decode(row.cohort),
        missing=_Reasons.decode(row.missing),
        update_norm=row.update_norm,
        model_norm=row.model_norm,
        fold_seconds=row.fold_seconds,
        metrics=combine(reports, lower) if reports else {},
        per_site=reports,
    )


async def updates(store: Store, job: str, after: int) -> tuple[UpdateView, ...]:
    """Settled updates beyond the first `after`, in the order of settling."""
    table = tables.updates

    async def work(connection: AsyncConnection) -> tuple[UpdateView, ...]:
        found = await connection.execute(
            sa.select(table)
            .where(table.c.job == job)
            .order_by(table.c.number)
            .offset(after)
            .limit(PAGE)
        )
        return tuple(
            UpdateView(
                site=row.site,
                epoch=row.epoch,
                clock=row.clock,
                attempt=row.attempt,
                verdict=row.verdict,
                reason=row.reason,
                examples=row.examples,
                steps=row.steps,
                norm=row.norm,
                wire_bytes=row.wire_bytes,
                settled_at=row.settled_at,
            )
            for row in found
        )

    return await store.read(work)


class Settlement(NamedTuple):
    """The last word about a clock of a site."""

    attempt: int
    verdict: VerdictKind
    reason: str
    spool: str
    wire_bytes: int


async def settlement(
    store: Store, job: str, site: str, epoch: int, clock: int
) -> Settlement | None:
    """What was said about this clock; None while it is open."""
    table = tables.updates

    async def work(connection: AsyncConnection) -> Settlement | None:
        row = (
            await connection.execute(
                sa.select(
                    table.c.attempt,
                    table.c.verdict,
                    table.c.reason,
                    table.c.spool,
                    table.c.wire_bytes,
                ).where(
                    table.c.job == job,
                    table.c.site == site,
                    table.c.epoch == epoch,
                    table.c.clock == clock,
                )
            )
        ).first()
        return None if row is None else Settlement(*row)

    return await store.read(work)


async def load_ledger(store: Store) -> list[LedgerRow]:
    """The totals as stored."""

    async def work(connection: AsyncConnection) -> list[LedgerRow]:
        found = await connection.execute(sa.select(tables.ledger))
        return [LedgerRow(row.site, row.job, row.up, row.down) for row in found]

    return await store.read(work)


async def save_ledger(store: Store, rows: list[LedgerRow]) -> None:
    """Store totals."""

    async def work(connection: AsyncConnection) -> None:
        for row in rows:
            await connection.execute(
                store.upsert(tables.ledger, ("site", "job"), dict(row._asdict()))
            )

    await store.write(work)

"""One batch after the other, whole, the journal first; silence and time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from coordinator.core import Core
from coordinator.engine import Engine
from coordinator.foldapi import SaveCheckpoint
from coordinator.journal import Entry
from coordinator.runner import BEAT_SECONDS
from coordinator.stimuli import JobSubmission, Tick
from protocol.errors import (
    ConflictError,
    NotFoundError,
)
from protocol.messages import Hello, encode
from tests.coordinator.engines import Clock, running
from tests.coordinator.stubsite import (
    StubSite,
    joined,
    spec_of,
    submitted,
)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running(tmp_path) as made:
        yield made


async def test_a_cancelled_caller_leaves_no_batch_half_done(engine: Engine) -> None:
    calls = [
        asyncio.ensure_future(
            engine.stimulate(JobSubmission(job=f"j-{number}", spec=spec_of(), by="me"))
        )
        for number in range(10)
    ]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await submitted(engine, spec_of())  # what was before it in the inbox is done now
    listed = {view.id for view in (await engine.jobs()).jobs}
    for number in range(10):
        if f"j-{number}" in listed:
            assert len((await engine.journal(f"j-{number}")).entries) >= 1
    assert {f"j-{number}" for number in range(1, 10, 2)} <= listed


async def test_a_refusal_changes_nothing(engine: Engine) -> None:
    job = await submitted(engine, spec_of())
    before = engine.last_seq()
    with pytest.raises(ConflictError):
        await engine.command(job, "resume", "me")
    with pytest.raises(NotFoundError):
        await engine.command("j-nothing", "stop", "me")
    assert engine.last_seq() == before


async def test_nothing_goes_on_until_the_journal_can_be_written_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PC-082: SQLite says 'disk is full': health fails, the batch waits, nothing is lost."""
    store = engine._store
    append, failures = store.append, 2
    seen: list[str] = []

    async def failing(*args: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            if failures == 0:
                seen.append(engine.health().reasons[0])
            raise OperationalError(
                "INSERT", {}, sqlite3.OperationalError("database or disk is full")
            )
        return await append(*args)

    monkeypatch.setattr(store, "append", failing)
    job = await submitted(engine, spec_of())
    assert seen == ["the journal cannot be written: database or disk is full"]
    assert engine.health().status == "ok"
    assert (await engine.journal(job)).entries[0].seq == 1


async def test_rows_that_no_database_would_take_end_this_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusing(*_args: Any) -> Any:
        raise IntegrityError("INSERT", {}, sqlite3.IntegrityError("NOT NULL constraint failed"))

    monkeypatch.setattr(engine._store, "append", refusing)
    with pytest.raises(IntegrityError):
        await submitted(engine, spec_of())
    assert engine.failed.is_set()
    assert "internal error" in engine.health().reasons[0]


async def test_somebody_else_on_the_journal_ends_this_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._store, "last_seq", -1)  # as if it had not seen the first row
    await submitted(engine, spec_of())
    monkeypatch.setattr(engine._store, "last_seq", -1)
    with pytest.raises(ConflictError, match="another coordinator"):
        await submitted(engine, spec_of())
    assert engine.failed.is_set()
    assert engine.health().status == "failing"
    with pytest.raises(ConflictError, match="another coordinator"):
        await submitted(engine, spec_of())


async def test_job_time_goes_on_from_the_journal_whatever_the_wall_clock_does(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with running(tmp_path, clock=clock) as engine:
        clock.now += 7.0
        await submitted(engine, spec_of())
        last = await engine.subscribe(0).__anext__()  # type: ignore[attr-defined]
        assert last.entries[0].now == clock.wall + 7.0
    clock.wall -= 3600.0
    clock.now = 3.0  # another boot
    async with running(tmp_path, clock=clock) as engine:
        clock.now += 5.0
        job = await submitted(engine, spec_of())
        row = (await engine.journal(job)).entries[0]
        assert row.now == 1_700_000_000.0 + 7.0 + 5.0
        assert (await engine.job(job)).job.created_at == clock.wall  # people get the wall clock


async def test_silence_counts_only_while_the_coordinator_could_hear(tmp_path: Path) -> None:
    """PC-089: the loop stands still for 15 s with a lease of 10 s; the site is kept. Later, 15 s
    of real silence end it.
    """
    clock = Clock()
    async with running(tmp_path, clock=clock, lease_seconds=10.0) as engine:
        await joined(engine, "a")
        await engine.open_session("a", Hello(instance="one"))
        clock.now += 15.0  # nothing ran meanwhile, neither timers nor sockets
        await submitted(engine, spec_of())
        assert (await engine.sites()).sites[0].state == "connected"
        for _ in range(40):  # the loop runs, nothing is heard
            clock.now += 0.5
            engine._runner._notice_stall()
            await engine.stimulate(Tick())
        assert (await engine.sites()).sites[0].state == "away"


async def test_at_the_shortest_lease_a_waiting_site_is_kept_by_the_beat_alone(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with running(tmp_path, clock=clock, lease_seconds=1.5, grace_seconds=1.0) as engine:
        await joined(engine, "a")
        await engine.open_session("a", Hello(instance="one"))
        for late in (0.0, 0.4) * 10:  # and a beat may come late
            clock.now += BEAT_SECONDS + late
            engine._runner._notice_stall()
            engine.heard("a")  # its poll is open
            await engine.stimulate(Tick())
            assert (await engine.sites()).sites[0].state == "connected"
        for _ in range(2):
            clock.now += BEAT_SECONDS
            engine._runner._notice_stall()
            await engine.stimulate(Tick())
        assert (await engine.sites()).sites[0].state == "away"


async def test_a_job_that_is_to_survive_a_power_cut_does_so_from_its_first_row_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[bool] = []
    async with running(tmp_path) as engine:
        store, append = engine._store, engine._store.append

        async def noting(*args: Any) -> Any:
            levels.append(store.power)
            return await append(*args)

        monkeypatch.setattr(store, "append", noting)
        await submitted(engine, spec_of())
        job = await submitted(engine, spec_of(durability="power"))
    async with running(tmp_path) as engine:
        store, append = engine._store, engine._store.append
        assert store.power
        monkeypatch.setattr(store, "append", noting)
        await engine.command(job, "stop", "me")
        await submitted(engine, spec_of())
    assert levels == [False, True, True, False]


async def test_a_long_journal_is_restored_page_after_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as engine:
        jobs = [await submitted(engine, spec_of()) for _ in range(7)]
        for job in jobs[::2]:
            await engine.command(job, "pause", "me")
        before = {view.id: view.state for view in (await engine.jobs()).jobs}
        last = engine.last_seq()
    monkeypatch.setattr("coordinator.runner._PAGE", 3)
    pages: list[int] = []
    restore = Core.restore

    def noting(core: Core, entries: list[Entry]) -> None:
        pages.append(len(entries))
        restore(core, entries)

    monkeypatch.setattr(Core, "restore", noting)
    async with running(tmp_path) as engine:
        assert {view.id: view.state for view in (await engine.jobs()).jobs} == before
    assert sum(pages) == last
    assert max(pages) == 3


@pytest.mark.parametrize("durability", ["power", "process"])
async def test_a_stopped_job_is_kept_through_a_power_cut_up_to_its_last_checkpoint(
    tmp_path: Path, durability: Literal["power", "process"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that lets its spools go is written after the job has ended."""
    async with running(tmp_path, real=True) as engine:
        await joined(engine, "a")
        job = await submitted(engine, spec_of(versions=9, durability=durability))
        site = StubSite(engine, "a")
        site.hold_at = 1
        task = asyncio.ensure_future(site.run())
        await site.held.wait()
        asked: list[bool] = []
        ask = engine._fold.ask

        async def noted(request: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(request, SaveCheckpoint):
                asked.append(request.fsync)
            return await ask(request, *rest, **more)

        monkeypatch.setattr(engine._fold, "ask", noted)
        await engine.command(job, "stop", "me")
        await task
        async for page in engine.subscribe(0):
            if page and b"checkpoint_made" in encode(page):
                break
        assert asked == [durability == "power"]
        assert not engine._store.power
    async with running(tmp_path) as engine:
        assert not engine._store.power

"""Whoever follows the journal gets every row, in order, and comes to an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator import feed as feed_module
from coordinator.engine import Engine
from coordinator.feed import Feed
from coordinator.journal import Commanded
from coordinator.store import Store, sqlite_url
from tests.coordinator.engines import running
from tests.coordinator.stubsite import (
    spec_of,
    state_of,
    submitted,
)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running(tmp_path) as made:
        yield made


async def test_those_who_follow_get_every_row_and_end_with_the_engine(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        rows: list[int] = []
        half = asyncio.Event()

        async def follow(job: str) -> None:
            async for page in engine.subscribe(0, job):
                assert page is not None
                rows.extend(line.seq for line in page.entries)
                half.set()

        first = await submitted(engine, spec_of())
        task = asyncio.ensure_future(follow(first))
        await half.wait()
        await submitted(engine, spec_of())
        await engine.command(first, "stop", "me")
        await state_of(engine, first, "stopped")
    await asyncio.wait_for(task, 5.0)
    assert rows == sorted(set(rows))
    assert len(rows) == 3  # submitted, commanded, moved; none of the other job


async def test_rows_older_than_memory_are_read_and_nothing_is_told_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "QUIET_SECONDS", 0.01)
    store = Store(sqlite_url(tmp_path / "db"))
    await store.open()
    feed = Feed(store)
    feed._recent = type(feed._recent)(maxlen=3)

    def event(number: int) -> Commanded:
        return Commanded(job=f"j-{number % 2}", by="me", what=str(number))

    for number in range(1, 9):
        feed.publish(await store.append(1.0, 1.0, [event(number)]))
    pages = feed.follow(0)
    first = await anext(pages)
    assert first is not None
    assert [line.seq for line in first.entries] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert await anext(pages) is None  # quiet
    waiting = asyncio.ensure_future(anext(pages))
    feed.publish(await store.append(1.0, 1.0, [event(9)]))
    page = await waiting
    while page is None:
        page = await anext(pages)
    assert [line.seq for line in page.entries] == [9]
    recent = await anext(feed.follow(6, "j-0"))
    assert recent is not None
    assert [line.seq for line in recent.entries] == [8]
    feed.forget_job("j-0")
    assert {job for job, _ in feed._recent} == {"j-1"}
    feed.close()
    assert [page async for page in pages] == []
    await store.close()

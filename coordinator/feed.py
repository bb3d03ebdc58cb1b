"""The journal as it grows, for pages that follow it: recent rows from memory, older ones read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Final

import msgspec

from coordinator.journal import Entry, encode_event
from coordinator.store import PAGE, Store
from protocol.views import JournalLine, JournalPage

RECENT_MAX: Final = 1_000
QUIET_SECONDS: Final = 15.0


class Feed:
    """Wakes everybody who follows the journal when rows were appended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recent: deque[tuple[str, JournalLine]] = deque(maxlen=RECENT_MAX)
        self._changed = asyncio.Event()
        self._closed = False

    def publish(self, entries: Iterable[Entry]) -> None:
        """These rows are durable."""
        for entry in entries:
            raw = msgspec.Raw(encode_event(entry.event))
            line = JournalLine(seq=entry.seq, now=entry.now, event=raw)
            self._recent.append((entry.event.job, line))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget_job(self, job: str) -> None:
        """The job was deleted."""
        kept = [item for item in self._recent if item[0] != job]
        self._recent.clear()
        self._recent.extend(kept)

    def close(self) -> None:
        """End all who follow."""
        self._closed = True
        self._changed.set()

    async def follow(self, after: int, job: str = "") -> AsyncIterator[JournalPage | None]:
        """Rows beyond `after`, of one job when it is named; None when it was quiet for a while,
        so that a peer that has gone shows.
        """
        while not self._closed:
            changed = self._changed
            lines = await self._beyond(after, job)
            if lines:
                after = lines[-1].seq
                yield JournalPage(entries=tuple(lines))
                continue
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def _beyond(self, after: int, job: str) -> list[JournalLine]:
        if self._recent and self._recent[0][1].seq <= after + 1:
            found = (line for of, line in self._recent if line.seq > after and job in ("", of))
            return [line for line, _ in zip(found, range(PAGE), strict=False)]
        if after >= self._store.last_seq:
            return []
        return await self._store.lines(after, job=job)

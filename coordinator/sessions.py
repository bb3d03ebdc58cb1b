"""Who is connected, how long each is counted on, and which of two namesakes is the real one.

Nothing here is journalled: after a restart of the coordinator every member is *expected* with a
fresh lease, and comes back within it or loses its epoch.

A sign of life only writes down when the lease ends: that is all that is done for every chunk that
arrives. The queue of leases learns of it when the old end would have come.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from protocol.messages import SiteRole

QUEUE_SLACK: Final = 64  # queue entries beyond twice the sessions, before it is made anew
NOWHERE: Final = -1.0  # in the queue


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The instance may open a session under this name."""

    site: str


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Another live instance holds the name; `retry_after_seconds` is when its lease would end."""

    site: str
    last_heard_seconds: float
    retry_after_seconds: float
    reason: str


@dataclass(slots=True)
class Session:
    """A connected site, or one that is expected back (`instance` is empty then). Its lease ends at
    `ends_at`; it stands at `queued_at` in the queue of leases, which is never later.
    """

    site: str
    role: SiteRole
    instance: str
    tasks: tuple[str, ...]
    heard_at: float
    ends_at: float
    closed: bool = False
    queued_at: float = 0.0


class Sessions:
    """All sessions by site name. Times are job time in seconds."""

    def __init__(self, lease_seconds: float, grace_seconds: float) -> None:
        self._lease = lease_seconds
        self._grace = grace_seconds
        self._by_site: dict[str, Session] = {}
        self._queue: list[tuple[float, int, Session]] = []  # a heap
        self._ticket = count()  # sessions have no order of their own

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_site.values())

    def get(self, site: str) -> Session | None:
        """The session of a site, if its lease has not ended."""
        return self._by_site.get(site)

    def admit(self, site: str, instance: str, now: float) -> Admitted | Refused:
        """Decide on a hello. A holder is live while its connection is open and its lease runs.

        A closed connection frees the name at once: only so can a restarted agent come back within
        the grace that keeps its epoch.
        """
        held = self._by_site.get(site)
        if held is None or held.instance in ("", instance) or held.closed or now >= held.ends_at:
            return Admitted(site=site)
        silence = now - held.heard_at
        return Refused(
            site=site,
            last_heard_seconds=silence,
            retry_after_seconds=held.ends_at - now,
            reason=f"site {site!r} is already connected from another process, last heard "
            f"{silence:.1f} s ago; stop that one, or give this one a name of its own.",
        )

    def connect(
        self, site: str, role: SiteRole, instance: str, tasks: tuple[str, ...], now: float
    ) -> bool:
        """Open a session; True when it is another process than the one before."""
        before = self._by_site.get(site)
        self._open(Session(site, role, instance, tasks, heard_at=now, ends_at=now + self._lease))
        return before is None or before.instance != instance

    def expect(self, sites: Iterable[tuple[str, SiteRole]], now: float) -> None:
        """Give sites that are known from the journal a fresh lease to come back in."""
        for site, role in sites:
            ends_at = now + self._lease
            self._open(Session(site, role, "", (), heard_at=now, ends_at=ends_at, closed=True))

    def _open(self, session: Session) -> None:
        self.drop(session.site)
        self._by_site[session.site] = session
        self._enqueue(session)

    def _enqueue(self, session: Session) -> None:
        """Queue a session by the end of its lease; where it stood before counts no more."""
        session.queued_at = session.ends_at
        heapq.heappush(self._queue, (session.ends_at, next(self._ticket), session))
        if len(self._queue) > 2 * len(self._by_site) + QUEUE_SLACK:
            self._queue = [entry for entry in self._queue if entry[0] == entry[2].queued_at]
            heapq.heapify(self._queue)

    def heard(self, site: str, now: float) -> None:
        """Any byte is life: it also revives a session whose connection had closed. It never
        shortens a lease that was extended.
        """
        session = self._by_site.get(site)
        if session is not None and session.instance:
            session.heard_at = now
            session.ends_at = max(session.ends_at, now + self._lease)
            session.closed = False

    def close(self, site: str, now: float) -> None:
        """The connection closed: what is left is the grace."""
        session = self._by_site.get(site)
        if session is not None and not session.closed:
            session.closed = True
            if now + self._grace < session.ends_at:
                session.ends_at = now + self._grace
                self._enqueue(session)

    def drop(self, site: str) -> None:
        """Forget a session."""
        session = self._by_site.pop(site, None)
        if session is not None:
            session.queued_at = NOWHERE

    def extend(self, seconds: float) -> None:
        """The coordinator itself was not listening for so long: that silence does not count."""
        for session in self._by_site.values():
            session.ends_at += seconds

    def spare(self, now: float) -> None:
        """The coordinator woke late: bytes that wait in its sockets get one grace to be read."""
        for session in self._by_site.values():
            session.ends_at = max(session.ends_at, now + self._grace)

    def expire(self, now: float) -> list[Session]:
        """Forget the sessions whose lease has ended; they, by name."""
        ended = []
        while (first := self._first()) is not None and now >= first.ends_at:
            self.drop(first.site)
            ended.append(first)
        return sorted(ended, key=lambda session: session.site)

    def wake_at(self) -> float | None:
        """When the next lease ends, if nobody is heard until then."""
        first = self._first()
        return None if first is None else first.ends_at

    def _first(self) -> Session | None:
        """The session whose lease ends first; entries that nothing stands for any more go."""
        queue = self._queue
        while queue:
            at, _, session = queue[0]
            if at != session.queued_at:
                heapq.heappop(queue)
            elif at < session.ends_at:  # it was heard since
                session.queued_at = session.ends_at
                heapq.heapreplace(queue, (session.ends_at, next(self._ticket), session))
            else:
                return session
        return None

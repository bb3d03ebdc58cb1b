"""The ledger: every byte that crossed a socket, by site and job.

Counts live in memory and are written as totals now and then, never per request. Site and job both
come from authenticated requests, so the table is as small as sites times jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Bytes(NamedTuple):
    """Bytes up (from the site) and down (to it), HTTP included."""

    up: int = 0
    down: int = 0

    def plus(self, up: int, down: int) -> Bytes:
        """These and those."""
        return Bytes(self.up + up, self.down + down)


class LedgerRow(NamedTuple):
    """A total as stored."""

    site: str
    job: str
    up: int
    down: int


class Ledger:
    """Totals per (site, job), per site and per job; `job` is empty for what belongs to none.

    `sources` are asked to `add` what their sockets have counted since, whenever somebody wants to
    see or store figures.
    """

    def __init__(self) -> None:
        self.sources: list[Callable[[], None]] = []
        self._links: dict[tuple[str, str], Bytes] = {}
        self._sites: dict[str, Bytes] = {}
        self._jobs: dict[str, Bytes] = {}
        self._dirty: set[tuple[str, str]] = set()

    def add(self, site: str, job: str, up: int, down: int) -> None:
        """Count bytes that crossed a socket.

        Raises:
            ValueError: a negative count; socket counters never go back.
        """
        if up < 0 or down < 0:
            raise ValueError(f"negative bytes for {site!r}: up {up}, down {down}")
        if up or down:
            self._count(site, job, up, down)
            self._dirty.add((site, job))

    def _count(self, site: str, job: str, up: int, down: int) -> None:
        link = (site, job)
        self._links[link] = self._links.get(link, Bytes()).plus(up, down)
        self._sites[site] = self._sites.get(site, Bytes()).plus(up, down)
        self._jobs[job] = self._jobs.get(job, Bytes()).plus(up, down)

    def link(self, site: str, job: str) -> Bytes:
        """One site in one job."""
        return self._links.get((site, job), Bytes())

    def site(self, site: str) -> Bytes:
        """One site in all jobs, and besides."""
        return self._sites.get(site, Bytes())

    def job(self, job: str) -> Bytes:
        """One job at all sites."""
        return self._jobs.get(job, Bytes())

    def total(self) -> Bytes:
        """Everything."""
        return Bytes(
            sum(b.up for b in self._sites.values()), sum(b.down for b in self._sites.values())
        )

    def load(self, rows: Iterable[LedgerRow]) -> None:
        """Go on from stored totals."""
        for row in rows:
            self._count(row.site, row.job, row.up, row.down)

    def refresh(self) -> None:
        """Come up to date with the sockets."""
        for source in self.sources:
            source()

    @property
    def pressing(self) -> bool:
        """Bytes of a job were counted and are not stored yet."""
        return any(job for _, job in self._dirty)

    def take_dirty(self) -> list[LedgerRow]:
        """Totals that changed since the last call, to be stored."""
        self.refresh()
        rows = [LedgerRow(*link, *self._links[link]) for link in sorted(self._dirty)]
        self._dirty.clear()
        return rows

    def put_back(self, rows: Iterable[LedgerRow]) -> None:
        """These could not be stored: they are due again."""
        self._dirty.update(
            (row.site, row.job) for row in rows if (row.site, row.job) in self._links
        )

    def forget_job(self, job: str) -> None:
        """The job was deleted. Its bytes stay in the sites' totals, under no job."""
        for site, of in [link for link in self._links if link[1] == job]:
            moved = self._links.pop((site, of))
            self._dirty.discard((site, of))
            self._links[site, ""] = self._links.get((site, ""), Bytes()).plus(*moved)
            self._jobs[""] = self._jobs.get("", Bytes()).plus(*moved)
            self._dirty.add((site, ""))
        self._jobs.pop(job, None)

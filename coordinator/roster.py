"""Who is active in a job, in canonical order, kept up to date member by member.

`job.evolve` tells it of everybody who enters, leaves or goes on; so that no decision has to look
through all members of a large fleet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from protocol.messages import SiteRole


class Listed(Protocol):
    """What of a member decides where it stands. Only `clock` may change while it is active."""

    @property
    def site(self) -> str:
        """Its name."""

    @property
    def role(self) -> SiteRole:
        """Site or evaluator."""

    @property
    def clock(self) -> int:
        """The next period to be settled."""

    @property
    def eval_examples(self) -> int:
        """How much test data it has."""

    @property
    def trains(self) -> bool:
        """An active site with training data."""


M = TypeVar("M", bound=Listed)

_site = attrgetter("site")


@dataclass(slots=True)
class Roster(Generic[M]):
    """The active members by name: all, and in parts. The lists are to be read, never changed."""

    everybody: list[M] = field(default_factory=list)
    sites: list[M] = field(default_factory=list)
    evaluators: list[M] = field(default_factory=list)
    training: list[M] = field(default_factory=list)  # sites with training data
    idle: list[M] = field(default_factory=list)  # evaluators, and sites without training data
    clocks: dict[int, int] = field(default_factory=dict)  # how many sites that train are at it
    testing: int = 0  # sites with test data

    def enter(self, member: M) -> None:
        """A member has become active (it was not)."""
        for part in self._parts(member):
            insort(part, member, key=_site)
        self._count(member, 1)

    def leave(self, member: M) -> None:
        """A member that was active is so no longer: to be called before it is changed."""
        for part in self._parts(member):
            del part[bisect_left(part, member.site, key=_site)]
        self._count(member, -1)

    def clear(self) -> None:
        """Everybody has left."""
        for part in (self.everybody, self.sites, self.evaluators, self.training, self.idle):
            part.clear()
        self.clocks.clear()
        self.testing = 0

    def moved(self, before: int, member: M) -> None:
        """An active member's clock was `before` and is another now."""
        if member.trains:
            self._add(before, -1)
            self._add(member.clock, 1)

    def lowest_clock(self) -> int | None:
        """The slowest clock of the sites that train; None when none does."""
        return min(self.clocks, default=None)

    def _parts(self, member: M) -> tuple[list[M], list[M], list[M]]:
        return (
            self.everybody,
            self.sites if member.role == "site" else self.evaluators,
            self.training if member.trains else self.idle,
        )

    def _count(self, member: M, by: int) -> None:
        if member.role == "site" and member.eval_examples > 0:
            self.testing += by
        if member.trains:
            self._add(member.clock, by)

    def _add(self, clock: int, by: int) -> None:
        count = self.clocks.get(clock, 0) + by
        if count:
            self.clocks[clock] = count
        else:
            del self.clocks[clock]

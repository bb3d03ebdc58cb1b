"""What a simulated worker does with its time: the contract between the fleet and whoever trains.

A period's duration comes from `plan`, at its start and without training. What it makes comes from
`train`, lazily: the first completion that is due runs all outstanding periods as one batch, in the
order of their completion times and then of their starts. So the batch is the same whenever the run
is repeated, and a period that was called off before is never trained at all.

State that a site carries from period to period changes in `settle` only: a period that was trained
and then called off has left no trace.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from client import ipc
from protocol.jobspec import JobSpec
from protocol.messages import SiteRole, VerdictKind, VersionRef
from protocol.metrics import Metric
from simulation.bodies import Body


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a site is to load a job. `options` are the site owner's own."""

    site: str
    job: str
    role: SiteRole
    spec: JobSpec
    options: dict[str, str] = {}


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A version as it lies on the site's disk."""

    version: VersionRef
    body: Body


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A period that a site was asked for; exactly one of `steps` and `epochs` is positive.

    `seconds_budget` > 0: a time-boxed period stops at the first step after so many seconds and
    delivers what it has. `applied`: queued updates of the site before this clock are settled for
    good (None: all are). `started_at` is virtual time in seconds.
    """

    site: str
    job: str
    epoch: int
    clock: int
    attempt: int
    base: Base
    steps: int = 0
    epochs: int = 0
    seconds_budget: float = 0.0
    applied: int | None = None
    started_at: float = 0.0

    @property
    def base_version(self) -> int:
        """Number of the version that it starts from."""
        return self.base.version.version


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long a period will take in virtual seconds, and how many steps it will have done."""

    seconds: float
    steps: int


class Outcome(msgspec.Struct, kw_only=True):
    """What a period came to: `failure` is empty, or why there is no update.

    The update is `body`, whole as it goes over the wire, or it is encoded from `delta` (end minus
    start, residual included) and the figures beside it; a thin fleet needs the figures only.
    """

    body: Body | None = None
    delta: list[float] = []
    examples: float = 0.0
    steps: int = 1
    norm: float = 0.0  # L2, of delta
    metrics: dict[str, Metric] = {}
    failure: str = ""
    fatal: bool = False


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a version on a site's own test data; no examples: it has none."""

    examples: float
    metrics: dict[str, Metric]


class Trainer(Protocol):
    """Trains for any number of sites. A raised exception ends the simulation: it is a bug."""

    def load(self, loading: Loading) -> ipc.Loaded | str:
        """Task, model and data of a site, at each start of its worker; a text: why not."""

    def make_init(self, site: str, job: str) -> Body:
        """Version 0 as a snapshot body, the same at every call."""

    def plan(self, work: Work) -> Plan:
        """How long it will take; draws depend on the site and the clock only."""

    def train(self, works: list[Work]) -> list[Outcome]:
        """The outcomes of a batch, in its order."""

    def evaluate(self, site: str, job: str, base: Base) -> Evaluation:
        """Metrics of a version at a site."""

    def settle(
        self, site: str, job: str, epoch: int, clock: int, attempt: int, verdict: VerdictKind
    ) -> None:
        """The verdict on an update: its state becomes current, or is thrown away, or the update
        goes back into the site's residual. Safe to repeat; the last word counts.
        """

    def forget(self, site: str, job: str) -> None:
        """The site left the job for good: nothing of it is needed any more."""

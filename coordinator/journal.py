"""The journal: an append-only list of (sequence, now, event). It is the truth.

State is what `evolve` makes of these events; tables are projections of them and can be rebuilt.
Events are facts: they are never edited, fields are only added (with defaults), and a tag never
changes its meaning. `SCHEMA` counts up when a new tag is added.
"""

from __future__ import annotations

from typing import Final

import msgspec

from protocol.jobspec import JobSpec
from protocol.jobstates import JobState
from protocol.layout import Layout
from protocol.messages import SiteRole, VerdictKind, VersionRef
from protocol.metrics import Metric

SCHEMA: Final = 2


class JournalEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base. Every event belongs to one job; `job` is empty for events of a site alone."""

    job: str = ""


class JobSubmitted(JournalEvent, frozen=True, kw_only=True, tag="job_submitted"):
    """A job came to be. `init` says that version 0 was uploaded with the submission."""

    spec: JobSpec
    by: str
    init: bool = False


class JobMoved(JournalEvent, frozen=True, kw_only=True, tag="job_moved"):
    """The job changed state, or its reason for waiting changed (then `state` is the same)."""

    state: JobState
    reason: str


class SiteEntered(JournalEvent, frozen=True, kw_only=True, tag="site_entered"):
    """A membership term begins: `epoch` and the clock it starts at (design 4.1)."""

    site: str
    role: SiteRole
    epoch: int
    clock: int
    train_examples: int
    eval_examples: int
    layout_digest: str
    notes: tuple[str, ...] = ()
    joined_at_version: int = 0  # the first version that it can train from


class SiteEnded(JournalEvent, frozen=True, kw_only=True, tag="site_ended"):
    """A membership term ended; updates of that epoch are refused from now on."""

    site: str
    epoch: int
    reason: str


class SiteRefused(JournalEvent, frozen=True, kw_only=True, tag="site_refused"):
    """A site declined the job, or was refused by it (another layout, another base model)."""

    site: str
    reason: str


class InitAsked(JournalEvent, frozen=True, kw_only=True, tag="init_asked"):
    """This site was asked to build version 0 from the seed."""

    site: str


class RoundTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One site's part in a round, or its next period under a rule without rounds.

    `steps` 0: as the job says. `seconds` > 0: a time-boxed period. `deadline` is job time in
    seconds, 0: the round's.
    """

    site: str
    epoch: int
    clock: int
    attempt: int
    steps: int = 0
    seconds: float = 0.0
    deadline: float = 0.0


class RoundOpened(JournalEvent, frozen=True, kw_only=True, tag="round_opened"):
    """A round begins on `version`; `deadline` is job time in seconds."""

    round: int
    version: int
    tasks: tuple[RoundTask, ...]
    deadline: float
    left_out: tuple[str, ...] = ()


class PeriodOpened(JournalEvent, frozen=True, kw_only=True, tag="period_opened"):
    """A site goes on by itself, without a round (ssp, async, buffered)."""

    task: RoundTask
    base: VersionRef
    reason: str


class Retried(JournalEvent, frozen=True, kw_only=True, tag="retried"):
    """A site is given the same clock once more, as the next attempt."""

    site: str
    epoch: int
    clock: int
    attempt: int
    reason: str


class UpdateSettled(JournalEvent, frozen=True, kw_only=True, tag="update_settled"):
    """A verdict on a clock, with its reason. `queued` ones are in the cohort of a later
    `RoundClosed`, or are settled once more when they are voided.
    """

    site: str
    epoch: int
    clock: int
    attempt: int
    verdict: VerdictKind
    reason: str
    spool: str = ""  # file name in the job's spool folder; empty when nothing is kept
    wire_bytes: int = 0
    examples: float = 0.0
    steps: int = 0
    norm: float = 0.0
    train_seconds: float = 0.0
    metrics: dict[str, Metric] = {}
    staleness: int = 0  # versions made between its base and its arrival
    seconds: float = 0.0  # from the instruction to the last byte
    fault: bool = False  # refused for what it holds, not for when it came


class CohortMember(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One update of a commit: in canonical order (site name, clock) under `bsp` and `buffered`,
    else in the order of the journal.

    `version` is the one it started from (-1: the one before the commit). `weight` is its
    coefficient in an additive commit, staleness included.
    """

    site: str
    epoch: int
    clock: int
    spool: str
    version: int = -1
    weight: float = 0.0
    norm: float = 0.0  # L2 norm of the update
    examples: float = 0.0  # that it declares


class RoundClosed(JournalEvent, frozen=True, kw_only=True, tag="round_closed"):
    """A round ends. With a cohort, `version` will be made of it; without, the round was void.

    Under a rule without rounds every commit is one. `additive`: the pseudo-gradient is minus the
    sum of weight_k delta_k with the coefficients of the cohort, not a weighted mean.
    """

    round: int
    version: int
    cohort: tuple[CohortMember, ...]
    active_sites: int
    reason: str
    missing: dict[str, str] = {}  # site -> why its update is not in the cohort
    additive: bool = False


class VersionMade(JournalEvent, frozen=True, kw_only=True, tag="version_made"):
    """A commit: this row is it. `layout` stands in version 0 only."""

    version: int
    digest: str
    bytes: int
    update_norm: float = 0.0
    model_norm: float = 0.0
    fold_seconds: float = 0.0
    layout: Layout | None = None
    by: str = ""  # version 0: the site that made it


class CheckpointMade(JournalEvent, frozen=True, kw_only=True, tag="checkpoint_made"):
    """Everything up to `version` is on disk without its spools."""

    version: int


class EvaluationReported(JournalEvent, frozen=True, kw_only=True, tag="evaluation_reported"):
    """Metrics of a version from one site or evaluator."""

    version: int
    site: str
    role: SiteRole
    examples: float
    metrics: dict[str, Metric]


class SiteFailed(JournalEvent, frozen=True, kw_only=True, tag="site_failed"):
    """A site could not finish a period; what follows from it stands in other events."""

    site: str
    epoch: int
    clock: int
    attempt: int
    reason: str


class Commanded(JournalEvent, frozen=True, kw_only=True, tag="commanded"):
    """A person asked for something (pause, stop, drain a site, ...)."""

    by: str
    what: str
    reason: str = ""


Event = (
    JobSubmitted
    | JobMoved
    | SiteEntered
    | SiteEnded
    | SiteRefused
    | InitAsked
    | RoundOpened
    | PeriodOpened
    | Retried
    | UpdateSettled
    | RoundClosed
    | VersionMade
    | CheckpointMade
    | EvaluationReported
    | SiteFailed
    | Commanded
)

_decoder: Final = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """JSON of an event, as stored."""
    return msgspec.json.encode(event)


def decode_event(raw: bytes) -> Event:
    """An event from its stored JSON."""
    return _decoder.decode(raw)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A journal row: `now` is job time in seconds (4.9), `seq` counts from 1."""

    seq: int
    now: float
    event: Event

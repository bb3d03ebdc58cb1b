"""What the API shows to people: the answers of `/api/v1/...`, read by the command line and pages.

All numbers are finite or null. Times are Unix seconds unless a name ends in `_seconds` (a span).
Every list answer is an object with one list in it, so that fields can be added.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import Problem
from protocol.jobspec import JobSpec
from protocol.jobstates import JobState
from protocol.messages import SiteRole, VerdictKind
from protocol.metrics import Combined, Metric


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base. Defaults are written out: a reader sees every field, always."""


class JobSiteView(View, frozen=True, kw_only=True):
    """One site in one job. `doing` is a sentence: training clock 7, waiting for edge-2, gone.

    `data_share` is its part of all declared examples, `version_share` its part of those that went
    into versions: where the second is smaller, its data was left out.
    """

    site: str
    role: SiteRole
    active: bool
    epoch: int
    clock: int
    train_examples: int
    eval_examples: int
    doing: str
    joined_at_version: int
    counted: int = 0
    refused: int = 0
    data_share: float = 0.0
    version_share: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class JobView(View, frozen=True, kw_only=True):
    """A job. `reason` says why it is in its state; `waiting` for whom or what it waits now.

    `bytes_up` and `bytes_down` are socket bytes of all sites, HTTP included; `dense_bytes` is what
    dense float32 exchange would have cost in both directions. `metrics` belong to
    `metrics_version`.
    """

    id: str
    name: str
    task: str
    state: JobState
    reason: str
    waiting: str
    version: int
    round: int
    created_at: float
    ended_at: float | None = None
    running_seconds: float = 0.0
    model_bytes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dense_bytes: int = 0
    metrics: dict[str, Combined] = {}
    metrics_version: int | None = None
    sites: tuple[JobSiteView, ...] = ()


class JobDetail(View, frozen=True, kw_only=True):
    """One job with its specification."""

    job: JobView
    spec: JobSpec


class JobList(View, frozen=True, kw_only=True):
    """`GET /api/v1/jobs`."""

    jobs: tuple[JobView, ...]


class VersionView(View, frozen=True, kw_only=True):
    """One version: who is in it, who is missing and why, and how good it is."""

    version: int
    digest: str
    bytes: int
    made_at: float
    cohort: tuple[str, ...]
    missing: dict[str, str]
    update_norm: float
    model_norm: float
    fold_seconds: float
    metrics: dict[str, Combined] = {}
    per_site: dict[str, dict[str, Metric]] = {}


class VersionList(View, frozen=True, kw_only=True):
    """`GET /api/v1/jobs/{job}/versions?after=`."""

    versions: tuple[VersionView, ...]


class UpdateView(View, frozen=True, kw_only=True):
    """One settled update."""

    site: str
    epoch: int
    clock: int
    attempt: int
    verdict: VerdictKind
    reason: str
    examples: float
    steps: int
    norm: float
    wire_bytes: int
    settled_at: float


class UpdateList(View, frozen=True, kw_only=True):
    """`GET /api/v1/jobs/{job}/updates?after=` (`after` counts updates)."""

    updates: tuple[UpdateView, ...]


class JournalLine(View, frozen=True, kw_only=True):
    """One journal row; `event` is the event's own JSON."""

    seq: int
    now: float
    event: msgspec.Raw


class JournalPage(View, frozen=True, kw_only=True):
    """`GET /api/v1/jobs/{job}/journal?after=`; also the data of each server-sent event."""

    entries: tuple[JournalLine, ...]


class SiteView(View, frozen=True, kw_only=True):
    """A site of this coordinator."""

    name: str
    role: SiteRole
    state: Literal["connected", "away", "drained", "revoked"]
    last_heard_seconds: float | None
    joined_at: float
    software: str
    tasks: tuple[str, ...]
    job: str = ""
    bytes_up: int = 0
    bytes_down: int = 0


class SiteList(View, frozen=True, kw_only=True):
    """`GET /api/v1/sites`."""

    sites: tuple[SiteView, ...]


class TokenView(View, frozen=True, kw_only=True):
    """A join token, without its secret."""

    id: str
    site: str  # the only name it is good for; empty: any
    role: SiteRole
    created_at: float
    expires_at: float
    used_at: float | None = None
    used_by: str = ""
    revoked: bool = False


class TokenList(View, frozen=True, kw_only=True):
    """`GET /api/v1/tokens`."""

    tokens: tuple[TokenView, ...]


class TokenRequest(View, frozen=True, kw_only=True):
    """`POST /api/v1/tokens`."""

    site: str = ""
    role: SiteRole = "site"
    ttl_seconds: float = 3600.0


class TokenCreated(View, frozen=True, kw_only=True):
    """The only time that the whole token is shown."""

    token: str
    view: TokenView


class JobRequest(View, frozen=True, kw_only=True):
    """`POST /api/v1/jobs` and `POST /api/v1/jobs/validate`.

    `init` is the id that `POST /api/v1/inits` (body: a safetensors file) answered with.
    """

    spec: JobSpec
    init: str = ""


class InitStored(View, frozen=True, kw_only=True):
    """Answer of `POST /api/v1/inits`."""

    init: str
    bytes: int


class CommandRequest(View, frozen=True, kw_only=True):
    """Body of `POST /api/v1/jobs/{job}/{pause|resume|drain|stop}` and of site commands."""

    reason: str = ""


class Validation(View, frozen=True, kw_only=True):
    """Answer of `POST /api/v1/jobs/validate`; `problems` empty: the job would be taken.

    `guarantees` say what its pacing promises and under which condition.
    """

    problems: tuple[Problem, ...]
    warnings: tuple[str, ...] = ()
    guarantees: tuple[str, ...] = ()


class Health(View, frozen=True, kw_only=True):
    """`/healthz` and `/readyz`. `status` is ok, degraded or failing; `reasons` say why."""

    status: Literal["ok", "degraded", "failing"]
    reasons: tuple[str, ...] = ()


class Info(View, frozen=True, kw_only=True):
    """`GET /api/v1/info`."""

    coordinator: str
    software: str
    protocol: int
    agents_url: str
    people_url: str
    ca_fingerprint: str = ""
    process_mb: float = 0.0
    process_peak_mb: float = 0.0
    fold_mb: float = 0.0
    fold_peak_mb: float = 0.0
    fold_idle_mb: float = 0.0

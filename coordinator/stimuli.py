"""What can happen to the core. The engine and the simulator make these, and nothing else."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.jobspec import JobSpec
from protocol.jobstates import JobStimulus
from protocol.layout import Layout
from protocol.messages import Event as SiteEvent
from protocol.messages import SiteRole
from protocol.metrics import Metric


class Stimulus(msgspec.Struct, frozen=True, kw_only=True):
    """Base."""


class SiteConnected(Stimulus, frozen=True, kw_only=True):
    """A session was opened (after `sessions` admitted it). The same site may come again with
    another instance after a restart: its epoch goes on if its lease has not ended.
    """

    site: str
    role: SiteRole
    instance: str
    tasks: tuple[str, ...] = ()


class SiteHeard(Stimulus, frozen=True, kw_only=True):
    """Any byte from the site. Renews its lease; makes no journal row."""

    site: str


class SiteClosed(Stimulus, frozen=True, kw_only=True):
    """Its connection closed; a short grace remains."""

    site: str


class SiteLeft(Stimulus, frozen=True, kw_only=True):
    """It said goodbye, or was drained or revoked (`removed`: it is told not to come back)."""

    site: str
    reason: str
    removed: bool = False


class SiteReported(Stimulus, frozen=True, kw_only=True):
    """An event of `protocol.messages` from the site's session."""

    site: str
    event: SiteEvent


class JobSubmission(Stimulus, frozen=True, kw_only=True):
    """A valid job. With `init` a file for version 0 lies in its folder already (and `init.problem`
    is empty); the core asks for it by TakeInit once a site has named the layout.
    """

    job: str
    spec: JobSpec
    by: str
    init: InitFacts | None = None


class JobCommand(Stimulus, frozen=True, kw_only=True):
    """pause, resume, drain, stop: refused by ConflictError when the state does not allow it."""

    job: str
    stimulus: JobStimulus
    by: str
    reason: str = ""


class InitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the fold process found in a version 0 body. `problem` is empty when it is good."""

    digest: str = ""
    bytes: int = 0
    layout: Layout | None = None
    problem: str = ""


class InitComplete(Stimulus, frozen=True, kw_only=True):
    """Version 0 was read by the fold process: uploaded by `site`, or given with the job (empty).
    Answered by one Verdict when it came from a site.
    """

    job: str
    site: str
    facts: InitFacts


class UpdateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the fold process found in a spool, whole: the core judges by these.

    `problem` is empty, or a sentence naming tensor and limit (non-finite value, wrong layout,
    wrong part size, zero examples, unreadable frame).
    """

    epoch: int
    clock: int
    attempt: int
    base_version: int
    base_digest: str
    layout_digest: str
    examples: float
    steps: int
    effective_steps: float
    norm: float
    train_seconds: float = 0.0
    metrics: dict[str, Metric] = {}
    problem: str = ""


class UploadComplete(Stimulus, frozen=True, kw_only=True):
    """The last byte is on disk and the spool was screened. Answered by exactly one Verdict."""

    job: str
    site: str
    spool: str
    wire_bytes: int
    facts: UpdateFacts


class CommitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a commit. With a `problem` no version was made."""

    version: int
    digest: str = ""
    bytes: int = 0
    update_norm: float = 0.0
    model_norm: float = 0.0
    fold_seconds: float = 0.0
    problem: str = ""


class CommitDone(Stimulus, frozen=True, kw_only=True):
    """The fold process made (or could not make) the version that was asked for."""

    job: str
    facts: CommitFacts


class CheckpointDone(Stimulus, frozen=True, kw_only=True):
    """A checkpoint is on disk, or `problem` says why not."""

    job: str
    version: int
    problem: str = ""


class DiskState(Stimulus, frozen=True, kw_only=True):
    """The disk filled up, or has room again: no round is opened while it is full."""

    full: bool
    reason: str = ""


class Tick(Stimulus, frozen=True, kw_only=True):
    """`wake_at` has come."""


Severity = Literal["info", "warning", "error"]

"""What the core asks its shell to do.

Duties of the shell: carry out a batch in order; `Persist` is durable before anything after it in
the batch, or in a later batch, is begun. An action that fails is reported back as a stimulus; it
is never dropped.
"""

from __future__ import annotations

import msgspec

from coordinator.journal import CohortMember, Event
from protocol.jobspec import JobSpec
from protocol.layout import Layout
from protocol.messages import Instruction, VerdictKind


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Base."""


class Persist(Action, frozen=True, kw_only=True):
    """Append these to the journal, and their projections, in one transaction."""

    now: float
    events: tuple[Event, ...]


class Send(Action, frozen=True, kw_only=True):
    """Put an instruction into the site's mailbox; the long poll delivers it, until acknowledged."""

    site: str
    instruction: Instruction


class Verdict(Action, frozen=True, kw_only=True):
    """Answer the upload that waits for it."""

    job: str
    site: str
    epoch: int
    clock: int
    attempt: int
    verdict: VerdictKind
    reason: str


class CloseSession(Action, frozen=True, kw_only=True):
    """End the site's session; `retry` False tells its agent not to come back."""

    site: str
    reason: str
    retry: bool


class Commit(Action, frozen=True, kw_only=True):
    """Fold `cohort` onto `base_version` into `version`. Answered by CommitDone."""

    job: str
    spec: JobSpec
    version: int
    base_version: int
    cohort: tuple[CohortMember, ...]
    active_sites: int
    base_digest: str = ""
    additive: bool = False


class TakeInit(Action, frozen=True, kw_only=True):
    """Make version 0 of the file that came with the submission, in this layout (the first ready
    site's). Answered by InitComplete with an empty site.
    """

    job: str
    spec: JobSpec
    layout: Layout


class WriteCheckpoint(Action, frozen=True, kw_only=True):
    """Write model and server state of `version`. Answered by CheckpointDone."""

    job: str
    version: int


class Discard(Action, frozen=True, kw_only=True):
    """These spools are not needed any more (refused, voided, or covered by a checkpoint)."""

    job: str
    spools: tuple[str, ...]


class KeepVersions(Action, frozen=True, kw_only=True):
    """Snapshot files of versions below `oldest` may go, except those `besides`: the ones that
    sites still train from.
    """

    job: str
    oldest: int
    besides: tuple[int, ...] = ()


class Release(Action, frozen=True, kw_only=True):
    """The job has ended or pauses: the fold process drops its tensors."""

    job: str


AnyAction = (
    Persist
    | Send
    | Verdict
    | CloseSession
    | Commit
    | TakeInit
    | WriteCheckpoint
    | Discard
    | KeepVersions
    | Release
)

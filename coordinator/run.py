"""A job in motion: its durable state, and what is known only while this process lives.

What stands in `Run` beside `job` is never journalled. After a restart it is empty, and every
question that was open is asked again; answers are idempotent, so asking twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from coordinator.actions import AnyAction, Persist, Send
from coordinator.job import Job, evolve
from coordinator.journal import Event, JobMoved
from coordinator.sessions import Sessions
from protocol import limits
from protocol.jobstates import JobStimulus, next_state
from protocol.layout import Layout
from protocol.messages import Instruction, Progress


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator's operator decides. Spans in seconds, sizes in bytes."""

    lease_seconds: float = limits.LEASE_SECONDS
    grace_seconds: float = limits.CLOSED_CONNECTION_GRACE_SECONDS
    site_jobs_max: int = 1
    init_timeout_seconds: float = 3600.0
    evaluation_timeout_seconds: float = 600.0
    checkpoint_retry_seconds: float = 30.0
    upload_bytes_max: int = limits.UPLOAD_BYTES_MAX
    spool_bytes_max: int = limits.SPOOL_BYTES_MAX
    jobs_resident_bytes_max: int = limits.JOBS_RESIDENT_BYTES_MAX


class Batch:
    """What one stimulus leads to: events, which become true at once, and actions after them."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.events: list[Event] = []
        self.actions: list[AnyAction] = []
        self.freed: set[str] = set()  # sites that a job has let go

    def emit(self, job: Job, event: Event) -> None:
        """Journal an event of this job and apply it."""
        evolve(job, event, self.now)
        self.events.append(event)

    def do(self, action: AnyAction) -> None:
        """Ask the shell for something, after everything journalled in this batch."""
        self.actions.append(action)

    def close(self) -> list[AnyAction]:
        """The whole batch, its journal rows first."""
        if not self.events:
            return self.actions
        return [Persist(now=self.now, events=tuple(self.events)), *self.actions]


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """What a job must know about the coordinator: its disk, its sites, and all jobs by id."""

    disk_full: str
    sessions: Sessions
    runs: Mapping[str, Run]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation that a site was asked for: version, and until when it is waited for."""

    version: int
    deadline: float


@dataclass(slots=True)
class LastWord:
    """The evaluation of the last version: whose report is waited for, in the order of asking, and
    who must be looked at again, because something about the site changed.
    """

    version: int
    waits: dict[str, None] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Run:
    """One job and the conversation about it with sites, engine and fold process."""

    job: Job
    config: CoreConfig
    present: dict[str, Literal["loading", "ready"]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)  # members of before: here, and without work
    declined: set[str] = field(default_factory=set)
    layouts: dict[str, Layout] = field(default_factory=dict)  # by digest, until version 0 is there
    progress: dict[str, Progress] = field(default_factory=dict)
    evaluating: dict[str, Asked] = field(default_factory=dict)  # in the order of asking
    unevaluated: dict[str, int] = field(default_factory=dict)  # site -> version it failed on
    last_word: LastWord | None = None
    unjudged: bool = True  # reports came or members left since the target was last looked at
    judged: int = -1  # the newest version when it was
    init_asked: bool = False
    commit_asked: bool = False
    checkpoint_asked: bool = False
    checkpoint_not_before: float = 0.0
    checkpoint_problem: str = ""
    wants_room: bool = False  # a checkpoint would free the spools that keep a round from opening
    oldest_kept: int = 0
    released: bool = False
    waits: dict[str, str] = field(default_factory=dict)  # site -> why it does not go on
    hold: str = ""  # why no round is open, for people

    def send(self, batch: Batch, site: str, instruction: Instruction) -> None:
        """Instruct a site that has said Ready in its session; others are told when they have."""
        if self.present.get(site) == "ready":
            batch.do(Send(site=site, instruction=instruction))

    def move(self, batch: Batch, stimulus: JobStimulus, reason: str) -> None:
        """Change the job's state by the table of `protocol.jobstates`."""
        state = next_state(self.job.state, stimulus)
        text = reason[: limits.REASON_CHARS_MAX]
        batch.emit(self.job, JobMoved(job=self.job.id, state=state, reason=text))

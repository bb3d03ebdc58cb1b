"""One job as the journal tells it: `evolve(job, event, now)` and nothing else changes it.

A live job and one rebuilt from its journal are equal after every event. The state does not grow
with versions: it holds the open round, the spools that no checkpoint covers, the members, and the
evaluations of the newest few versions. History is the journal's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from coordinator import journal as j
from coordinator.roster import Roster
from protocol.jobspec import JobSpec
from protocol.jobstates import TERMINAL, JobState
from protocol.layout import Layout
from protocol.messages import SiteRole, VersionRef
from protocol.metrics import Metric

TURNAROUNDS_MAX: Final = 64  # newest times that a period took, for a measured deadline
PACES_MAX: Final = 5  # newest periods of a site whose step time is remembered
VOIDED_MAX: Final = 64  # later words about a site's updates that are kept for its return
MOVES_MAX: Final = 256  # newest versions whose weight is remembered for `unseen_mass`
REPORTS_VERSIONS_MAX: Final = 3  # newest versions whose evaluations stay in memory
FAILURES_MAX: Final = 20  # reasons of void rounds in a row that are remembered

TaskState = Literal["training", "queued", "out"]


@dataclass(slots=True)
class Member:
    """A site's membership. `clock` is the next period to be settled in `epoch`; `last` is the
    newest settlement, of this epoch or the one before. `delivered` is its newest update that was
    queued, with the later word when it was voided, or returned at once: the site may have heard
    nothing of it, until a later update of it is queued.
    """

    site: str
    role: SiteRole
    active: bool
    epoch: int
    clock: int
    train_examples: int
    eval_examples: int
    layout_digest: str
    joined_at_version: int
    note: str = ""
    last: j.UpdateSettled | None = None
    delivered: j.UpdateSettled | None = None
    counted: int = 0
    refused: int = 0
    evaluated_version: int = -1
    # Updates besides `delivered` that were queued and voided since: the site may not have heard.
    voided: tuple[j.UpdateSettled, ...] = ()
    seen: VersionRef | None = None  # the version that has its latest update
    norm: float = 0.0  # of its latest update
    failures: int = 0  # periods in a row that came to nothing by the site's own fault
    comm_seconds: float | None = None  # of a period beside its training, a running mean
    examples_counted: float = 0.0  # in all versions together
    step_seconds: tuple[float, ...] = ()  # of its newest periods, per step

    @property
    def trains(self) -> bool:
        """An active site with training data."""
        return self.active and self.role == "site" and self.train_examples > 0


@dataclass(slots=True)
class Task:
    """One site's part in the open round; `out` ones have a final `reason`."""

    epoch: int
    clock: int
    attempt: int
    base: VersionRef | None = None
    steps: int = 0
    seconds: float = 0.0
    opened_at: float = 0.0
    deadline: float = 0.0
    state: TaskState = "training"
    reason: str = ""
    spool: str = ""


@dataclass(slots=True)
class Round:
    """The open round: its base version, its deadline in job time, and its tasks by site name.

    Under a rule without rounds it goes on for the whole job and counts the commits; it has no
    deadline of its own (0), its tasks have.
    """

    number: int
    version: int
    deadline: float
    tasks: dict[str, Task]
    left_out: tuple[str, ...]
    training: set[str] = field(default_factory=set)  # sites whose task is in that state
    opened_at: float = 0.0

    def sites(self, state: TaskState) -> list[str]:
        """Sites whose task is in this state, in canonical order."""
        if state == "training":
            return sorted(self.training)
        return sorted(site for site, task in self.tasks.items() if task.state == state)

    def put(self, site: str, task: Task) -> None:
        """Give a site its task."""
        self.tasks[site] = task
        self.training.add(site)


@dataclass(slots=True)
class Spool:
    """A stored update: its size in bytes, the version that it started from, and the one that it
    went into, once it did.
    """

    bytes: int
    base: int
    version: int | None = None


@dataclass(slots=True)
class Report:
    """One site's evaluation of one version."""

    role: SiteRole
    examples: float
    metrics: dict[str, Metric]


@dataclass(slots=True)
class Job:
    """Everything that is true about a job. Times are job time in seconds."""

    id: str
    spec: JobSpec
    by: str
    init_given: bool
    created_at: float
    state: JobState = "initialising"
    reason: str = ""
    ended_at: float | None = None
    running_seconds: float = 0.0
    running_since: float | None = None
    idle_since: float = 0.0  # since when neither a round nor a state change happened
    started: bool = False  # a round was opened: the wanted sites had been there
    members: dict[str, Member] = field(default_factory=dict)
    # The active ones of them; it follows from `members`, so comparing it would say nothing new.
    roster: Roster[Member] = field(default_factory=Roster, compare=False, repr=False)
    evaluators: int = 0  # members, active or not
    refused: dict[str, str] = field(default_factory=dict)
    init_site: str = ""
    init_asked_at: float = 0.0
    init_failures: dict[str, str] = field(default_factory=dict)
    layout: Layout | None = None
    layout_digest: str = ""
    dense_bytes: int = 0
    version: VersionRef | None = None
    round: Round | None = None
    rounds: int = 0
    fetches: int = 0  # tasks of all rounds: each is one model down
    deliveries: int = 0  # updates that were queued: each is one model up
    committing: j.RoundClosed | None = None
    queue: tuple[
        j.CohortMember, ...
    ] = ()  # updates that are here and in no round yet, oldest first
    queued_at: float = 0.0  # since when the first of them waits
    carried: dict[str, Task] = field(default_factory=dict)  # still at work when their round closed
    turnarounds: tuple[float, ...] = ()  # seconds from instruction to last byte
    marks: dict[int, VersionRef] = field(default_factory=dict)  # see `_mark`
    moves: tuple[tuple[int, tuple[str, ...], float], ...] = ()  # version, whose, its norm
    model_norm: float = 0.0
    failures: tuple[tuple[int, str], ...] = ()  # void rounds since the last version, and why
    failed_in_row: int = 0
    lost_in_row: int = 0  # periods that came to nothing since the last update that did not
    spools: dict[str, Spool] = field(default_factory=dict)
    spooled_bytes: int = 0  # of them together
    kept_bytes: int = 0
    checkpoint: int = -1
    checkpoint_at: float = 0.0
    reports: dict[int, dict[str, Report]] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        """Finished, failed or stopped."""
        return self.state in TERMINAL

    @property
    def number(self) -> int:
        """The newest version, or -1."""
        return -1 if self.version is None else self.version.version

    @property
    def streams(self) -> bool:
        """Sites go on by themselves: its rule has no rounds."""
        return self.spec.pacing.rule in ("ssp", "async", "buffered")

    @property
    def at_work(self) -> bool:
        """Somebody trains, or something that came is in no version yet."""
        if self.committing is not None or self.queue or self.carried:
            return True
        if self.round is None:
            return False
        return not self.streams or bool(self.round.training)

    def task(self, site: str) -> Task | None:
        """The site's part in the open round, or in an earlier one that it still works for."""
        found = self.round.tasks.get(site) if self.round is not None else None
        return found or self.carried.get(site)

    def active(self, role: SiteRole | None = None) -> list[Member]:
        """Active members in canonical order, of one role or of both."""
        if role is None:
            return list(self.roster.everybody)
        return list(self.roster.sites if role == "site" else self.roster.evaluators)

    def ran_seconds(self, now: float) -> float:
        """Running time until now: pauses and downtime do not count."""
        since = 0.0 if self.running_since is None else now - self.running_since
        return self.running_seconds + since


def submitted(event: j.JobSubmitted, now: float) -> Job:
    """The job that a submission begins."""
    return Job(
        id=event.job,
        spec=event.spec,
        by=event.by,
        init_given=event.init,
        created_at=now,
        idle_since=now,
        checkpoint_at=now,
    )


def evolve(job: Job, event: j.Event, now: float) -> None:
    """Apply one event of this job, in place. Total: no event is refused here."""
    match event:
        case j.JobMoved():
            _moved(job, event, now)
        case j.SiteEntered():
            _entered(job, event)
        case j.SiteEnded():
            _ended(job, event)
        case j.SiteRefused():
            job.refused[event.site] = event.reason
        case j.InitAsked():
            job.init_site, job.init_asked_at = event.site, now
        case j.RoundOpened():
            _opened(job, event, now)
        case j.PeriodOpened():
            _period(job, event, now)
        case j.Retried():
            if (task := job.task(event.site)) is not None:
                task.attempt = event.attempt
        case j.UpdateSettled():
            _settled(job, event, now)
        case j.RoundClosed():
            _closed(job, event, now)
        case j.VersionMade():
            _made(job, event, now)
        case j.CheckpointMade():
            _checkpointed(job, event, now)
        case j.EvaluationReported():
            _evaluated(job, event)
        case j.SiteFailed():
            if event.epoch and event.site in job.members:
                job.members[event.site].failures += 1
            if job.version is None and event.site == job.init_site:
                job.init_failures[event.site] = event.reason
                job.init_site = ""
        case j.JobSubmitted() | j.Commanded():
            pass
    if job.spec.pacing.reads == "pinned" and job.streams:
        _mark(job)


def _moved(job: Job, event: j.JobMoved, now: float) -> None:
    if event.state != job.state:
        job.running_seconds = job.ran_seconds(now)
        job.running_since = now if event.state == "running" else None
        job.idle_since = now
    job.state, job.reason = event.state, event.reason
    if job.terminal:
        job.ended_at = now
        job.layout = None  # its digest is enough from here on
        for member in job.roster.everybody:
            member.active = False
        job.roster.clear()


def _entered(job: Job, event: j.SiteEntered) -> None:
    job.refused.pop(event.site, None)
    before = job.members.get(event.site)
    if before is not None and before.active:
        job.roster.leave(before)
    if before is not None and before.role == "evaluator":
        job.evaluators -= 1
    job.evaluators += event.role == "evaluator"
    member = job.members[event.site] = Member(
        site=event.site,
        role=event.role,
        active=True,
        epoch=event.epoch,
        clock=event.clock,
        train_examples=event.train_examples,
        eval_examples=event.eval_examples,
        layout_digest=event.layout_digest,
        joined_at_version=event.joined_at_version,
        last=before.last if before else None,
        delivered=before.delivered if before else None,
        counted=before.counted if before else 0,
        refused=before.refused if before else 0,
        evaluated_version=before.evaluated_version if before else -1,
        voided=before.voided if before else (),
        seen=before.seen if before else None,
        norm=before.norm if before else 0.0,
        comm_seconds=before.comm_seconds if before else None,
        examples_counted=before.examples_counted if before else 0.0,
        step_seconds=before.step_seconds if before else (),
    )
    job.roster.enter(member)


def _ended(job: Job, event: j.SiteEnded) -> None:
    member = job.members.get(event.site)
    if member is not None and member.epoch == event.epoch:
        if member.active:
            job.roster.leave(member)
        member.active = False
        member.note = event.reason
    if job.init_site == event.site:
        job.init_site = ""


def _opened(job: Job, event: j.RoundOpened, now: float) -> None:
    job.rounds = event.round
    job.started = True
    job.fetches += len(event.tasks)
    job.round = Round(
        number=event.round,
        version=event.version,
        deadline=event.deadline,
        tasks={task.site: _task(task, job.version, now, event.deadline) for task in event.tasks},
        left_out=event.left_out,
        training={task.site for task in event.tasks},
        opened_at=now,
    )


def _task(task: j.RoundTask, base: VersionRef | None, now: float, deadline: float) -> Task:
    return Task(
        task.epoch,
        task.clock,
        task.attempt,
        base=base,
        steps=task.steps,
        seconds=task.seconds,
        opened_at=now,
        deadline=task.deadline or deadline,
    )


def _period(job: Job, event: j.PeriodOpened, now: float) -> None:
    job.fetches += 1
    if job.round is not None:
        job.round.put(event.task.site, _task(event.task, event.base, now, 0.0))


def _mark(job: Job) -> None:
    """Remember at which version the slowest site's applied clock first came to each value, as far
    back as a pinned read may still ask.
    """
    if not job.roster.training or job.version is None:
        return
    pending = [*(job.committing.cohort if job.committing else ()), *job.queue]
    low = min([member.clock for member in job.roster.training] + [part.clock for part in pending])
    if low not in job.marks:
        job.marks[low] = job.version
    oldest = low - job.spec.pacing.staleness
    for gone in [clock for clock in job.marks if not oldest <= clock <= low]:
        del job.marks[gone]


def _settled(job: Job, event: j.UpdateSettled, now: float) -> None:
    member = job.members[event.site]
    first = (member.epoch, member.clock) == (event.epoch, event.clock)
    if event.verdict == "refused_return" and not first:  # a later word about one that was queued
        if member.last is not None and _same(member.last, event):
            member.last = event
        if member.delivered is not None and _same(member.delivered, event):
            member.delivered = event
        else:
            member.voided = (*member.voided, event)[-VOIDED_MAX:]
        member.refused += 1
        _unspool(job, event.spool)
        job.queue = tuple(part for part in job.queue if part.spool != event.spool)
        return
    member.last = event
    if member.epoch == event.epoch:
        clock, member.clock = member.clock, event.clock + 1
        if member.active:
            job.roster.moved(clock, member)
    task = job.task(event.site)
    job.carried.pop(event.site, None)
    queued = event.verdict == "queued"
    base = task.base.version if task is not None and task.base is not None else job.number
    if task is not None and (task.epoch, task.clock) == (event.epoch, event.clock):
        task.state = "queued" if queued else "out"
        task.reason, task.spool = event.reason, event.spool
        task.attempt = event.attempt
        if job.round is not None and job.round.tasks.get(event.site) is task:
            job.round.training.discard(event.site)
    if queued:
        _remember_voided(job, member)
        member.delivered = event
        member.norm, member.failures = event.norm, 0
        job.lost_in_row = 0
        _timed(job, member, event)
        job.deliveries += 1
        _unspool(job, event.spool)
        job.spools[event.spool] = Spool(event.wire_bytes, base)
        job.spooled_bytes += event.wire_bytes
        if not job.queue:
            job.queued_at = now
        part = j.CohortMember(
            site=event.site,
            epoch=event.epoch,
            clock=event.clock,
            spool=event.spool,
            version=base,
            norm=event.norm,
            examples=event.examples,
        )
        job.queue = (*job.queue, part)
        return
    member.refused += 1
    job.lost_in_row += 1
    member.failures += event.fault
    if event.verdict == "refused_return":
        _remember_voided(job, member)
        member.delivered = event


def _remember_voided(job: Job, member: Member) -> None:
    """Another update takes the place of `delivered`: keep the word that this one came back, while
    its site may not have heard it.

    Where a site goes on only once its update is in a version, whatever it sends it has made after
    it heard all words about those before. Where it goes on at once, it has not: a word that a
    crash of the coordinator took along would be lost.
    """
    pacing, before = job.spec.pacing, member.delivered
    overtakes = pacing.rule == "buffered" and not pacing.one_per_site
    if not overtakes:
        member.voided = ()
    if before is not None and before.verdict == "refused_return" and overtakes:
        member.voided = (*member.voided, before)[-VOIDED_MAX:]


def _timed(job: Job, member: Member, event: j.UpdateSettled) -> None:
    if not event.seconds:
        return  # of a release that did not measure it
    job.turnarounds = (*job.turnarounds, event.seconds)[-TURNAROUNDS_MAX:]
    beside = max(event.seconds - event.train_seconds, 0.0)
    if event.steps and event.train_seconds > 0.0:
        step = event.train_seconds / event.steps
        member.step_seconds = (*member.step_seconds, step)[-PACES_MAX:]
    known = member.comm_seconds
    member.comm_seconds = beside if known is None else (known + beside) / 2


def _unspool(job: Job, name: str) -> int:
    """Forget a spool; its size in bytes."""
    found = job.spools.pop(name, None)
    size = found.bytes if found is not None else 0
    job.spooled_bytes -= size
    return size


def _same(last: j.UpdateSettled, event: j.UpdateSettled | j.CohortMember) -> bool:
    return (last.epoch, last.clock) == (event.epoch, event.clock)


def _closed(job: Job, event: j.RoundClosed, now: float) -> None:
    job.idle_since = now
    taken = {part.spool for part in event.cohort}
    job.queue = tuple(part for part in job.queue if part.spool not in taken)
    job.queued_at = now
    if event.cohort:
        job.committing = event
    elif job.committing is not None and job.committing.round == event.round:
        job.committing = None  # it failed; one under way counts even when what is open is voided
    if event.additive and job.round is not None:
        job.rounds += 1
        job.round.number = job.rounds
    elif job.round is not None:
        grace = now + job.spec.pacing.deadline_seconds
        for site in job.round.sites("training"):
            job.carried[site] = job.round.tasks[site]
            job.carried[site].deadline = grace
        job.round = None
    if event.cohort:
        return
    job.failed_in_row += 1
    job.turnarounds = ()  # what is late is not measured: all may have become slower
    job.failures = (*job.failures, (event.round, event.reason))[-FAILURES_MAX:]


def _made(job: Job, event: j.VersionMade, now: float) -> None:
    job.version = VersionRef(version=event.version, digest=event.digest, bytes=event.bytes)
    job.idle_since = now
    job.failed_in_row = 0
    job.failures = ()
    job.model_norm = event.model_norm
    if event.layout is not None:
        job.layout = None if job.terminal else event.layout
        job.layout_digest = event.layout.digest()
        job.dense_bytes = event.layout.dense_bytes()
        job.init_site = ""
        job.init_failures = {}
        # Version 0 arrives as a checkpoint: the fold process writes it while taking it in.
        job.checkpoint, job.checkpoint_at = event.version, now
    cohort = job.committing.cohort if job.committing else ()
    if cohort and job.spec.pacing.unseen_mass:
        move = (event.version, tuple(part.site for part in cohort), event.update_norm)
        job.moves = (*job.moves, move)[-MOVES_MAX:]
    for part in cohort:
        member = job.members[part.site]
        member.counted += 1
        member.examples_counted += part.examples
        member.seen = job.version
        job.spools[part.spool].version = event.version
    job.committing = None


def _checkpointed(job: Job, event: j.CheckpointMade, now: float) -> None:
    job.checkpoint, job.checkpoint_at = event.version, now
    for name in covered(job, event.version):
        size = _unspool(job, name)
        if job.spec.keep.updates:
            job.kept_bytes += size


def covered(job: Job, version: int) -> list[str]:
    """Spools that a checkpoint of `version` makes superfluous, in order of their names."""
    return sorted(
        name
        for name, spool in job.spools.items()
        if spool.version is not None and spool.version <= version
    )


def _evaluated(job: Job, event: j.EvaluationReported) -> None:
    report = Report(event.role, event.examples, event.metrics)
    job.reports.setdefault(event.version, {})[event.site] = report
    for old in sorted(job.reports)[:-REPORTS_VERSIONS_MAX]:
        del job.reports[old]
    member = job.members.get(event.site)
    if member is not None:
        member.evaluated_version = max(member.evaluated_version, event.version)

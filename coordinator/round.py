"""The decisions of a bulk-synchronous round, as pure functions of the job's state.

Each returns what is to be done *and* the reason that a person reads. Nothing is changed here:
`conductor` journals what is decided and `job.evolve` makes it true.

    judge    an update          -> a verdict
    closing  the open round     -> close with a cohort, void, or go on waiting
    opening  a job at rest      -> the next round, or why there is none yet

Every task of a round is settled exactly once: `queued`, or refused with a reason (its own fault,
late, its site gone). What is queued is counted with the version, or returned when the round is
void.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Final

import msgspec

from coordinator import periods, streaming
from coordinator.job import Job, Member, Task
from coordinator.journal import CohortMember, RoundOpened, RoundTask, UpdateSettled
from coordinator.selection import over_selected, select
from coordinator.stimuli import UpdateFacts
from protocol.messages import VerdictKind
from protocol.words import span

MEASURED_MIN: Final = 8  # fewer periods than this say nothing about how long one takes


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on an update. `settles`: it closes the site's open task and is journalled;
    otherwise it only repeats or turns away, and the journal stays as it is. `fault`: it is refused
    for what it holds.
    """

    verdict: VerdictKind
    reason: str
    settles: bool = False
    fault: bool = False


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """The open round ends now. An empty cohort: it is void. `late` explains it to the sites that
    are still training.
    """

    cohort: tuple[CohortMember, ...]
    reason: str
    late: str


def enough(job: Job) -> int:
    """How many updates close a round at once (the fastest m of n); 0: all are waited for."""
    sites = job.spec.sites
    return job.spec.pacing.first or (sites.select if sites.over_select else 0)


def drawn(job: Job) -> int:
    """How many sites are drawn for a round; 0: all."""
    return over_selected(job.spec.sites.select, job.spec.sites.over_select)


def allowed_seconds(job: Job) -> float:
    """How long a round may take: fixed, or from what this job's periods took so far.

    Median + k x MAD of the newest ones, once there are enough; the MAD counts for at least a
    twentieth of the median, because periods that take equally long are not late by a hair.
    """
    pacing = job.spec.pacing
    if pacing.deadline == "fixed" or len(job.turnarounds) < MEASURED_MIN:
        return pacing.deadline_seconds
    middle = median(job.turnarounds)
    spread = max(median(abs(x - middle) for x in job.turnarounds), middle / 20)
    return min(middle + pacing.deadline_mads * spread, pacing.deadline_seconds)


def box_seconds(job: Job, site: str, allowed: float) -> float:
    """How long a site may train to be in by the deadline; 0: as long as it takes."""
    if not job.spec.pacing.partial:
        return 0.0
    comm = job.members[site].comm_seconds
    return max(allowed - (allowed / 5 if comm is None else 1.5 * comm), allowed / 10)


def canonical(parts: Iterable[CohortMember]) -> tuple[CohortMember, ...]:
    """Updates in the order in which sums are made (design 4.6)."""
    return tuple(sorted(parts, key=lambda part: (part.site, part.clock)))


def quorum(job: Job) -> int:
    """Fewest usable updates that make a version."""
    return max(1, job.spec.pacing.quorum)


# ---------------------------------------------------------------- judging an update


def judge(job: Job, site: str, facts: UpdateFacts) -> Judgement:
    """The verdict on an update whose last byte is stored and screened."""
    member = job.members.get(site)
    if member is None:
        return _turn_away(f"{site} is not a member of this job")
    for known in (member.last, member.delivered, *member.voided):
        if known is not None and (known.epoch, known.clock) == (facts.epoch, facts.clock):
            return _again(known)
    if not member.active or facts.epoch != member.epoch:
        return _turn_away(_fenced(job, member, facts))
    if facts.clock < member.clock:
        return _turn_away(f"stale: clock {facts.clock} was settled before, {member.clock} is next")
    task = job.task(site)
    if facts.clock > member.clock or task is None or task.state != "training":
        return _turn_away(f"no period was asked for at clock {facts.clock}")
    if facts.attempt > task.attempt:
        return _turn_away(f"attempt {facts.attempt} was never asked for; {task.attempt} is open")
    fault = _fault(job, task, facts)
    if fault:
        return Judgement(verdict="refused_drop", reason=fault, settles=True, fault=True)
    old = streaming.stale(job, facts.base_version)
    if old:
        return Judgement(verdict="refused_drop", reason=f"stale: {old}", settles=True)
    if site in job.carried and job.spec.pacing.late == "return":
        reason = "late: its round was closed; what it learned goes into its next update"
        return Judgement(verdict="refused_return", reason=reason, settles=True)
    late = site in job.carried or job.streams
    where = "for the next version" if late else "in the open round"
    return Judgement(verdict="queued", reason=where, settles=True)


def _turn_away(reason: str) -> Judgement:
    return Judgement(verdict="refused_drop", reason=reason)


def _again(known: UpdateSettled) -> Judgement:
    """The same answer again: the first one may have been lost."""
    if known.verdict == "queued":
        return Judgement(verdict="duplicate", reason=f"clock {known.clock} is here already")
    return Judgement(verdict=known.verdict, reason=known.reason)


def _fenced(job: Job, member: Member, facts: UpdateFacts) -> str:
    if job.terminal:
        return f"the job has {'ended' if job.state == 'stopped' else job.state}: {job.reason}"
    if facts.epoch > member.epoch:
        return f"epoch {facts.epoch} was never given to {member.site}"
    if member.active:
        return f"epoch {facts.epoch} has ended; {member.site} is in epoch {member.epoch}"
    return f"epoch {facts.epoch} has ended: {member.note or 'the site was gone'}"


def _fault(job: Job, task: Task, facts: UpdateFacts) -> str:
    base = task.base
    assert base is not None
    if facts.problem:
        return facts.problem
    if (facts.base_version, facts.base_digest) != (base.version, base.digest):
        return (
            f"it starts from version {facts.base_version} ({facts.base_digest[:12]}), its period "
            f"from version {base.version} ({base.digest[:12]})"
        )
    if facts.layout_digest != job.layout_digest:
        return f"it has another layout ({facts.layout_digest[:12]}) than the job"
    # The fold process screened these too; an update that slips through would poison the mean.
    if not (math.isfinite(facts.examples) and facts.examples > 0):
        return f"it declares {facts.examples:g} examples: no usable contribution"
    if not math.isfinite(facts.norm):
        return "its norm is not a finite number"
    return ""


# ---------------------------------------------------------------- closing a round


def closing(job: Job, now: float) -> Closing | None:
    """Whether the open round ends now, and how; None: it goes on until its deadline."""
    open_ = job.round
    assert open_ is not None
    training = len(open_.training)
    need, most = quorum(job), enough(job)
    at_deadline = now >= open_.deadline
    full = 0 < most <= len(job.queue) and most <= _fresh(job)
    coming = len(job.queue) + training >= need
    if training and coming and not (at_deadline or full):
        return None
    late = f"round {open_.number} was void before it came"
    if full or at_deadline:
        how = f"with the first {_fresh(job)}" if full else "at its deadline"
        late = f"late: round {open_.number} closed {how}, after {span(now - open_.opened_at)}"
    if len(job.queue) < need:
        return Closing(cohort=(), reason=_why_void(job, need), late=late)
    cohort, fresh = canonical(job.queue), _fresh(job)
    count = f"{fresh} of {len(open_.tasks)}"
    why = f"deadline reached with {count}" if training else f"{count} are in, the others are out"
    if training and full:
        why = f"the first {count} are in"
    if not training and fresh == len(open_.tasks):
        why = "all are in"
    if late_ones := len(cohort) - fresh:
        why += f", and {late_ones} of earlier rounds"
    return Closing(cohort=cohort, reason=why, late=late)


def _fresh(job: Job) -> int:
    """How many of the updates that are here are of the open round, and not of an earlier one."""
    open_ = job.round
    assert open_ is not None
    return sum(part.version == open_.version for part in job.queue)


def _why_void(job: Job, need: int) -> str:
    open_ = job.round
    assert open_ is not None
    queued, training = open_.sites("queued"), open_.sites("training")
    causes = [f"{site}: {open_.tasks[site].reason}" for site in open_.sites("out")]
    causes += [f"{site}: not in" for site in training]
    head = (
        "no usable contribution"
        if not queued
        else f"{len(queued)} usable of {len(open_.tasks)}, the quorum is {need}"
    )
    return "; ".join([head, *causes])


def missing(job: Job) -> dict[str, str]:
    """Sites whose update is not in the cohort, each with its reason: call once all are settled."""
    open_ = job.round
    assert open_ is not None
    return {site: open_.tasks[site].reason for site in open_.sites("out")}


# ---------------------------------------------------------------- opening a round


def able(job: Job) -> list[str]:
    """Members that could begin a period now."""
    return [member.site for member in job.roster.training if member.site not in job.carried]


def needed(job: Job) -> int:
    """How many sites must be able to, so that a version can be made."""
    # Without rounds one site may well make all the updates of a buffer.
    return 1 if job.streams and not job.spec.pacing.one_per_site else quorum(job)


def lacking(job: Job) -> int:
    """How many more sites it takes before the job starts, or goes on; 0: enough are here."""
    if not job.started:
        return max(job.spec.sites.wanted - len(job.roster.sites), 0)
    return max(needed(job) - len(able(job)), 0)


def opening(job: Job, now: float) -> RoundOpened | str:
    """The next round on the newest version, or the reason why there is none yet."""
    assert job.version is not None
    sites = job.roster.sites
    if not job.started and len(sites) < job.spec.sites.wanted:
        return f"{len(sites)} of {job.spec.sites.wanted} sites are ready"
    here, need = able(job), needed(job)
    if len(here) < need:
        no_data = [m.site for m in sites if not m.trains]
        note = f" (no training data at {', '.join(no_data)})" if no_data else ""
        if job.carried:
            note += f" (still at work for an earlier round: {', '.join(sorted(job.carried))})"
        return f"{len(here)} of {need} sites that a version needs are here{note}"
    number = job.rounds + 1
    if job.streams:  # who goes on when is said by `streaming`
        return RoundOpened(
            job=job.id, round=number, version=job.version.version, tasks=(), deadline=0.0
        )
    chosen = select(job.spec.seed, number, here, drawn(job))
    taking = frozenset(chosen)
    allowed, steps = allowed_seconds(job), periods.sizes(job)
    tasks = tuple(
        RoundTask(
            site=site,
            epoch=job.members[site].epoch,
            clock=job.members[site].clock,
            attempt=1,
            steps=steps.get(site, 0),
            seconds=round(box_seconds(job, site, allowed), 3),
        )
        for site in chosen
    )
    return RoundOpened(
        job=job.id,
        round=number,
        version=job.version.version,
        tasks=tasks,
        deadline=now + allowed,
        left_out=tuple(member.site for member in sites if member.site not in taking),
    )

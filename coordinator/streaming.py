"""The rules without rounds, as pure functions of the job's state: `ssp`, `async`, `buffered`.

Every site goes on by itself, from the newest version, when its rule lets it; every commit is a
round of its own in the journal, and the others' periods go on across it.

    going     who goes on now, and why everybody else waits, for people
    commit    the updates that make the next version, with their coefficients
    overdue   periods that will not be waited for any longer
    stale     why an update comes too late for its rule

What holds is said per rule in `protocol.guarantees`. Under `ssp` a clock is compared with *applied*
clocks: an update counts as seen once its version is made, not when it arrives, so that what is
promised about reads is true of the versions that sites train from (Ho et al., NIPS 2013).
"""

from __future__ import annotations

import math

import msgspec

from coordinator import periods
from coordinator.job import Job, Member, Task
from coordinator.journal import CohortMember, PeriodOpened, RoundClosed, RoundTask
from coordinator.staleness import staleness_weight
from protocol.messages import VersionRef
from protocol.names import derive_seed
from protocol.words import span


class Going(msgspec.Struct, frozen=True, kw_only=True):
    """Periods that begin now, and for every other site that could train what it waits for."""

    opened: tuple[PeriodOpened, ...]
    waits: dict[str, str]


class _Standing:
    """What the decisions about all sites look at, gathered once."""

    def __init__(self, job: Job) -> None:
        self.at_work = set(job.round.training) if job.round is not None else set()
        self.pending = outstanding(job)
        self.first_of: dict[str, CohortMember] = {}
        for part in self.pending:
            self.first_of.setdefault(part.site, part)
        self.low = lowest(job)


def outstanding(job: Job) -> list[CohortMember]:
    """Updates that are here and in no version yet, oldest first."""
    under_way = job.committing.cohort if job.committing else ()
    return [*under_way, *job.queue]


def oldest_clock(job: Job, site: str) -> int | None:
    """The first clock of a site whose update may still come back to it; None: there is none."""
    return min((part.clock for part in outstanding(job) if part.site == site), default=None)


def lowest(job: Job) -> tuple[int, str]:
    """The slowest applied clock among the sites that train, and whose it is: up to it everything
    is settled and in the newest version. What a site left behind counts too: it may be back.
    """
    clocks = [(member.clock, member.site) for member in job.roster.training]
    clocks += [(part.clock, part.site) for part in outstanding(job)]
    return min(clocks, default=(0, ""))


# ---------------------------------------------------------------- who goes on


def going(job: Job, now: float) -> Going:
    """Everybody whose rule lets it go on does; the others wait for something that has a name."""
    assert job.version is not None
    waits: dict[str, str] = {}
    begin: list[Member] = []
    here = _Standing(job)
    for member in _order(job):
        if member.site in here.at_work:
            continue
        reason = _why_wait(job, member, here, now)
        if reason:
            waits[member.site] = reason
            continue
        here.at_work.add(member.site)
        begin.append(member)
    steps = periods.sizes(job) if begin else {}
    opened = tuple(_period(job, member, steps.get(member.site, 0), now) for member in begin)
    return Going(opened=opened, waits=waits)


def _training(job: Job) -> list[tuple[str, Task]]:
    """Open periods, in canonical order."""
    if job.round is None:
        return []
    return [(site, job.round.tasks[site]) for site in job.round.sites("training")]


def _order(job: Job) -> list[Member]:
    """Canonical; where places are few (`concurrency`), drawn from the seed for every version."""
    members = job.roster.training
    if not job.spec.pacing.concurrency:
        return members
    return sorted(
        members, key=lambda m: derive_seed(job.spec.seed, "concurrency", str(job.rounds), m.site)
    )


def _why_wait(job: Job, member: Member, here: _Standing, now: float) -> str:
    pacing = job.spec.pacing
    mine = here.first_of.get(member.site)
    if pacing.rule == "buffered":
        if mine and pacing.one_per_site:
            return f"its update is in the buffer, {len(job.queue)} of {pacing.buffer}"
        if pacing.concurrency and len(here.at_work) >= pacing.concurrency:
            return f"{len(here.at_work)} sites are at work, concurrency is {pacing.concurrency}"
        return ""
    if mine:
        return f"its update of clock {mine.clock} is being folded"
    if pacing.rule != "ssp":
        return ""
    if pacing.unseen_mass:
        return _too_massive(job, member, here)
    return _ahead(job, member, here.low, now)


def _ahead(job: Job, member: Member, slowest_at: tuple[int, str], now: float) -> str:
    low, slowest = slowest_at
    bound = job.spec.pacing.staleness
    if member.clock - low <= bound:
        return ""
    open_ = job.round
    task = open_.tasks[slowest] if open_ is not None and slowest in open_.training else None
    left = f", which has at most {span(max(task.deadline - now, 0.0))} more" if task else ""
    return f"clock {member.clock}, slowest is {slowest} at clock {low}{left}, staleness {bound}"


def _too_massive(job: Job, member: Member, here: _Standing) -> str:
    """Significance-bounded staleness: a site waits when what others have produced, and a site at
    work has not seen, would outweigh the bound. Norms add up to at least the norm of their sum, so
    the bound errs on the safe side; what is under way is taken to weigh what its site's last did.
    """
    bound = job.spec.pacing.unseen_mass * job.model_norm
    weigh = weights(job)
    working = here.at_work | {member.site}
    begun = {site: task.base.version for site, task in _training(job) if task.base is not None}
    coming = {
        other.site: weigh[other.site] * other.norm
        for other in job.roster.training
        if other.site in working
    }
    pending = [(part.site, weigh.get(part.site, 0.0) * part.norm) for part in here.pending]
    for site in sorted(working):
        seen = begun.get(site, job.number)  # who begins now does so from the newest version
        who = f"{site}, at work since version {seen}," if site != member.site else "it"
        if job.moves and seen < job.moves[0][0] - 1:
            return f"{who} is {job.number - seen} versions behind, more than are remembered"
        unseen = math.fsum(
            [
                *(
                    norm
                    for version, sites, norm in job.moves
                    if version > seen and site not in sites
                ),
                *(norm for owner, norm in pending if owner != site),
                *(norm for owner, norm in coming.items() if owner != site),
            ]
        )
        if unseen > bound:
            return (
                f"{who} would have {unseen:.3g} unseen, the bound is {bound:.3g} "
                f"({job.spec.pacing.unseen_mass:g} of the model's norm)"
            )
    return ""


def _period(job: Job, member: Member, steps: int, now: float) -> PeriodOpened:
    pacing = job.spec.pacing
    base = base_of(job, member)
    return PeriodOpened(
        job=job.id,
        task=RoundTask(
            site=member.site,
            epoch=member.epoch,
            clock=member.clock,
            attempt=1,
            steps=steps,
            deadline=now + pacing.deadline_seconds,
        ),
        base=base,
        reason=f"clock {member.clock} from version {base.version}"
        + (f", {steps} steps" if steps else ""),
    )


def base_of(job: Job, member: Member) -> VersionRef:
    """The version that a site starts from: the newest, or with pinned reads the oldest one that
    has all that the rule promises: everybody's clocks up to the bound, and the site's own latest.
    """
    assert job.version is not None
    pacing = job.spec.pacing
    if pacing.rule != "ssp" or pacing.reads != "pinned":
        return job.version
    enough = [clock for clock in sorted(job.marks) if clock >= member.clock - pacing.staleness]
    found = job.marks[enough[0]] if enough else job.version
    own = member.seen
    return own if own is not None and own.version > found.version else found


# ---------------------------------------------------------------- what makes a version


def weights(job: Job) -> dict[str, float]:
    """p_k of the active sites: declared examples (bounded), or 1, over their sum. It changes only
    when the active set does.
    """
    cap, by = job.spec.weights.examples_max, job.spec.weights.by
    counts = {
        member.site: 1.0 if by == "equal" else min(member.train_examples, cap or math.inf)
        for member in job.roster.training
    }
    total = math.fsum(counts.values())
    return {site: count / total for site, count in counts.items()}


def _weight(job: Job, part: CohortMember, version: int) -> float:
    pacing = job.spec.pacing
    known = weights(job)
    share = known.get(part.site)
    if share is None:  # it has left since: as if it were still among the active
        member, cap = job.members[part.site], job.spec.weights.examples_max or math.inf
        alike = [min(m.train_examples, cap) for m in job.roster.training]
        own = min(member.train_examples, cap)
        equal = job.spec.weights.by == "equal"
        share = 1.0 / (len(alike) + 1) if equal else own / (math.fsum(alike) + own)
    if pacing.rule == "ssp":
        return share
    fresh = staleness_weight(pacing, version - 1 - part.version)
    if pacing.rule == "async":
        return fresh * share
    return fresh * share * max(len(known), 1) / pacing.buffer


def commit(job: Job, now: float) -> RoundClosed | None:
    """The next version, if one is due: the oldest update, or a full buffer, or one that waits."""
    if job.committing is not None or not job.queue or job.round is None:
        return None
    pacing = job.spec.pacing
    if pacing.rule == "buffered":
        full = len(job.queue) >= pacing.buffer
        if not full and (now < buffer_deadline(job) or too_few(job, now)):
            return None
        taken = sorted(job.queue[: pacing.buffer], key=lambda part: (part.site, part.clock))
        count = f"{len(taken)} of {pacing.buffer}"
        reason = "the buffer is full" if full else f"the buffer's deadline came with {count}"
    else:
        taken = [job.queue[0]]
        reason = f"the update of {taken[0].site}, clock {taken[0].clock}"
    version = job.number + 1
    return RoundClosed(
        job=job.id,
        round=job.round.number,
        version=version,
        cohort=tuple(
            msgspec.structs.replace(part, weight=_weight(job, part, version)) for part in taken
        ),
        active_sites=max(len(job.roster.training), 1),
        reason=reason,
        additive=True,
    )


def buffer_deadline(job: Job) -> float:
    """When a buffer that does not fill is committed with what it has, in job time."""
    return job.queued_at + job.spec.pacing.deadline_seconds


def too_few(job: Job, now: float) -> str:
    """Why a buffer at its deadline makes no version: it has no quorum, and goes back like a round
    that has none. Empty when it has, or when there is time.
    """
    pacing, count = job.spec.pacing, len(job.queue)
    if pacing.rule != "buffered" or not 0 < count < pacing.quorum or now < buffer_deadline(job):
        return ""
    return (
        f"the buffer's deadline came with {count} of {pacing.buffer}, the quorum is {pacing.quorum}"
    )


# ---------------------------------------------------------------- what is not waited for


def staleness(job: Job, base: int) -> int:
    """Versions between `base` and the one that an update arriving now would make."""
    rule = job.spec.pacing.rule
    before = len(job.queue) if rule == "async" else 0
    return job.number + (job.committing is not None) + before - base


def stale(job: Job, base: int) -> str:
    """Why an update that started from this version is too old; empty when it is not (Ringmaster
    ASGD: such a one is not applied, and its site starts again from the newest version).
    """
    pacing = job.spec.pacing
    if pacing.rule != "async" or (tau := staleness(job, base)) <= pacing.staleness:
        return ""
    return f"{tau} versions old (from version {base}), pacing.staleness allows {pacing.staleness}"


def overdue(job: Job, now: float) -> dict[str, str]:
    """Sites whose period will not be waited for, each with the reason."""
    found = {}
    for site, task in _training(job):
        if now >= task.deadline:
            found[site] = f"late: not in after {span(task.deadline - task.opened_at)}"
        elif task.base is not None and (reason := stale(job, task.base.version)):
            found[site] = f"it would be {reason}"
    return found

"""What must hold after every journal entry and every batch; else an AssertionError names it."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator import journal as j
from coordinator.core import Core, CoreConfig
from coordinator.job import Job, evolve, submitted
from simulation.site import Identity, SimSite


@dataclass(slots=True)
class Checkers:
    """Follows the journal by itself and compares.

    - every task of a round is settled exactly once, and a queued update is counted or returned
    - versions follow one another without a gap, and never go back
    - the state of the live core equals the state told by the stored journal
    - whatever waits has a deadline and says what for
    """

    config: CoreConfig
    shadow: dict[str, Job] = field(default_factory=dict)
    open: set[tuple[str, Identity]] = field(default_factory=set)
    queued: set[tuple[str, Identity]] = field(default_factory=set)
    settled: dict[tuple[str, Identity], str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    counted: dict[tuple[str, Identity], int] = field(default_factory=dict)  # in which version
    _cohorts: dict[str, tuple[j.CohortMember, ...]] = field(default_factory=dict)

    def entry(self, entry: j.Entry) -> None:
        """Follow one stored entry, as it would be read back."""
        event = j.decode_event(j.encode_event(entry.event))
        assert event == entry.event, f"{event} is not what was stored"
        if isinstance(event, j.JobSubmitted):
            self.shadow[event.job] = submitted(event, entry.now)
        else:
            evolve(self.shadow[event.job], event, entry.now)
        self._follow(event)

    def _follow(self, event: j.Event) -> None:
        job = event.job
        match event:
            case j.RoundOpened():
                for task in event.tasks:
                    key = (task.site, Identity(job, task.epoch, task.clock))
                    assert key not in self.settled, f"{key} was settled and is asked for again"
                    self.open.add(key)
            case j.PeriodOpened():
                key = (event.task.site, Identity(job, event.task.epoch, event.task.clock))
                assert key not in self.settled, f"{key} was settled and is asked for again"
                self._may_go_on(event)
                self.open.add(key)
            case j.UpdateSettled():
                self._settle(event)
            case j.RoundClosed():
                if event.cohort:
                    self._cohorts[job] = event.cohort
                    self._may_be_made(event)
                late = self.shadow[job].spec.pacing.late != "drop"  # they go on across the closing
                left = [] if late else [key for key in self.open if key[1].job == job]
                assert event.additive or not left, (
                    f"round {event.round} closed with open tasks {left}"
                )
            case j.VersionMade():
                before = self.versions.get(job, -1)
                assert event.version == before + 1, f"version {event.version} after {before}"
                self.versions[job] = event.version
                for part in self._cohorts.pop(job, ()):
                    key = (part.site, Identity(job, part.epoch, part.clock))
                    self.queued.remove(key)
                    self.settled[key] = "counted"
                    self.counted[key] = event.version
            case _:
                pass

    def _may_go_on(self, event: j.PeriodOpened) -> None:
        """SSP's promise about reads: the base holds every active site's updates stamped
        <= c - s - 1, and the site's own latest (Ho et al., NIPS 2013).
        """
        job, site, pacing = (
            self.shadow[event.job],
            event.task.site,
            self.shadow[event.job].spec.pacing,
        )
        if pacing.rule != "ssp" or pacing.unseen_mass:
            return
        bound = event.task.clock - pacing.staleness
        active = {(m.site, m.epoch) for m in job.active("site")}
        for who, identity in [*self.open, *self.queued]:
            if identity.job == event.job and (who, identity.epoch) in active:
                assert identity.clock >= bound, f"{event} goes on, {who} is at {identity}"
        for (who, identity), version in self.counted.items():
            seen = who == site or (identity.clock < bound and (who, identity.epoch) in active)
            if identity.job == event.job and seen:
                assert version <= event.base.version, f"{event} has not seen {who} {identity}"
        own = [key for key in self.queued if key[0] == site and key[1].job == event.job]
        assert not own, f"{event} has not seen its own {own}"

    def _may_be_made(self, event: j.RoundClosed) -> None:
        """What a version may be made of, by the job's rule."""
        pacing = self.shadow[event.job].spec.pacing
        ages = [event.version - 1 - part.version for part in event.cohort]
        if pacing.rule == "async":
            assert max(ages) <= pacing.staleness, f"{event} has updates {ages} versions old"
        if pacing.rule == "buffered":
            assert len(event.cohort) <= pacing.buffer, f"{event} holds more than a buffer"
            sites = [part.site for part in event.cohort]
            assert not pacing.one_per_site or len(set(sites)) == len(sites), f"{event}: twice"

    def _settle(self, event: j.UpdateSettled) -> None:
        key = (event.site, Identity(event.job, event.epoch, event.clock))
        if event.verdict == "refused_return" and key not in self.open:
            self.queued.remove(key)
            self.settled[key] = event.verdict
            return
        assert key in self.open, f"{key} is settled without being open"
        self.open.remove(key)
        self.settled[key] = event.verdict
        if event.verdict == "queued":
            self.queued.add(key)

    def after(self, core: Core, now: float) -> None:
        """Compare after a batch."""
        for job, told in self.shadow.items():
            live = core.job(job)
            assert live == told, f"{job}: live state differs from the journal's"
            view = core.view(job, now)
            if not live.terminal:
                assert view.waiting, f"{job} waits and does not say what for"
        resting = all(job.terminal or job.state == "paused" for job in self.shadow.values())
        folding = any(job.committing for job in self.shadow.values())
        due = core.wake_at()
        assert resting or folding or due is not None, "somebody waits without a deadline"
        assert due is None or due > now, f"due at {due}, not done at {now}: it would wake for ever"

    def restored(self, core: Core) -> None:
        """Compare a core that was just rebuilt."""
        for job, told in self.shadow.items():
            assert core.job(job) == told, f"{job}: restored state differs"

    def at_end(self, sites: dict[str, SimSite]) -> None:
        """Every clock is settled, and every site knows the same about its updates."""
        assert not self.open, f"never settled: {self.open}"
        assert not self.queued, f"queued for ever: {self.queued}"
        for name, site in sites.items():
            for identity in site.produced - set(site.finished):
                heard, told = site.outcome.get(identity), self.settled.get((name, identity))
                agreed = {
                    "counted": ("queued", "counted", "duplicate"),
                    "refused_return": ("refused_return",),
                    "refused_drop": ("refused_drop",),
                }
                assert told is not None, f"{name} {identity} is unknown to the journal"
                assert heard in agreed[told], f"{name} {identity}: site {heard}, journal {told}"

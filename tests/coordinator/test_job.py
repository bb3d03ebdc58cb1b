"""The state that the journal tells."""

from __future__ import annotations

import msgspec

from coordinator import journal as j
from coordinator.job import FAILURES_MAX, REPORTS_VERSIONS_MAX, Job, covered, evolve, submitted
from protocol.jobspec import Checkpoint, Keep, Pacing, Sites, Stop
from tests.coordinator.coretools import World, make_spec


def test_state_does_not_grow_with_versions() -> None:
    here = World()
    spec = make_spec(
        sites=Sites(wanted=2), stop=Stop(versions=10_000), checkpoint=Checkpoint(every=4)
    )
    here.running("a", "b", spec=spec)
    sizes = []
    for version in range(1, 61):
        here.round()
        for site in ("a", "b"):
            here.evaluated(site, version, accuracy=0.5)
        if here.job.number - here.job.checkpoint >= 4:
            here.saved(here.job.number)
        sizes.append(len(msgspec.json.encode(here.job)))
    assert max(sizes[40:]) <= max(sizes[10:30]) + 64  # only numbers get longer
    assert len(here.job.reports) == REPORTS_VERSIONS_MAX
    assert len(here.job.spools) <= 2 * 4


def test_running_time_counts_neither_pauses_nor_the_time_before_the_start() -> None:
    here = World()
    here.now = 100.0
    here.running("a", "b")
    here.now += 10
    here.command("pause")
    here.now += 1000
    here.command("resume")
    here.now += 5
    assert here.job.ran_seconds(here.now) == 15.0


def test_a_checkpoint_covers_only_spools_up_to_its_version() -> None:
    here = World().running("a", "b", spec=make_spec(stop=Stop(versions=5)))
    here.round()
    here.round()
    here.upload("a")
    assert covered(here.job, 1) == ["a-1-0-1.body", "b-1-0-1.body"]
    here.saved(1)
    assert sorted(here.job.spools) == ["a-1-1-1.body", "a-1-2-1.body", "b-1-1-1.body"]
    assert here.job.kept_bytes == 0


def test_kept_updates_are_counted_and_not_listed() -> None:
    here = World().running("a", "b", spec=make_spec(keep=Keep(updates=True)))
    here.round()
    here.saved(1)
    assert here.job.spools == {}
    assert here.job.kept_bytes == 1000


def test_reasons_of_void_rounds_are_bounded() -> None:
    job = submitted(j.JobSubmitted(job="j", spec=make_spec(), by="ann"), 0.0)
    for number in range(50):
        closed = j.RoundClosed(
            job="j", round=number, version=0, cohort=(), active_sites=1, reason="nobody"
        )
        evolve(job, closed, 1.0)
    assert job.failed_in_row == 50
    assert len(job.failures) == FAILURES_MAX


def test_a_returning_site_keeps_its_history_and_one_row() -> None:
    """PC-027: the same site after a crash is the same member, with its counts."""
    here = World().running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3)))
    here.round()
    here.close("a")
    here.connect("a", instance="2")
    here.ready("a")
    assert sorted(here.job.members) == ["a", "b", "c"]
    assert (here.job.members["a"].epoch, here.job.members["a"].counted) == (1, 1)


def test_late_events_of_unknown_things_change_nothing() -> None:
    job = submitted(j.JobSubmitted(job="j", spec=make_spec(pacing=Pacing()), by="ann"), 0.0)
    before = msgspec.json.encode(job)
    for event in (
        j.SiteEnded(job="j", site="x", epoch=1, reason="gone"),
        j.Retried(job="j", site="x", epoch=1, clock=0, attempt=2, reason="again"),
        j.SiteFailed(job="j", site="x", epoch=1, clock=0, attempt=1, reason="no"),
        j.Commanded(job="j", by="ann", what="pause"),
    ):
        evolve(job, event, 5.0)
    assert msgspec.json.encode(job) == before
    assert isinstance(job, Job)

"""Rules without rounds over real processes, and what each promises, read from the journal."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
import pytest

from coordinator import journal as j
from tests.e2e.harness import Place

pytestmark = pytest.mark.e2e


def told(place: Place, job: str) -> list[j.Event]:
    """The job's journal, as the API gives it."""
    found: list[j.Event] = []
    after = 0
    while page := place.api.journal(job, after).entries:
        found += [j.decode_event(bytes(line.event)) for line in page]
        after = page[-1].seq
    return found


def opened(events: list[j.Event]) -> list[j.PeriodOpened]:
    return [event for event in events if isinstance(event, j.PeriodOpened)]


def check_ssp(events: list[j.Event], bound: int) -> None:
    """Every read at clock c sees what is stamped <= c - bound - 1, and the site's own latest."""
    pending: dict[tuple[str, int], int] = {}
    cohort: tuple[j.CohortMember, ...] = ()
    for event in events:
        match event:
            case j.UpdateSettled(verdict="queued", site=site, clock=clock):
                pending[site, clock] = 10**9
            case j.RoundClosed():
                cohort = event.cohort
            case j.VersionMade(version=version) if version:
                pending |= {(part.site, part.clock): version for part in cohort}
            case j.PeriodOpened(task=task, base=base):
                for (site, clock), version in pending.items():
                    if clock < task.clock - bound or site == task.site:
                        assert version <= base.version, (event, site, clock, version)
            case _:
                pass


@pytest.mark.parametrize(
    "pacing",
    [
        {"rule": "ssp", "staleness": 1},
        {"rule": "ssp", "staleness": 1, "reads": "pinned"},
        {"rule": "ssp", "unseen_mass": 10.0},
        {"rule": "async", "staleness": 8},
        {"rule": "async", "staleness": 8, "periods": "dylu"},
        {"rule": "buffered", "buffer": 2},
    ],
    ids=str,
)
def test_a_job_runs_to_its_end_under_every_rule(place: Place, pacing: dict[str, Any]):
    place.start()
    place.sites("a", "b", "c", buffers=1)
    job = place.submit(wanted=3, versions=12, pacing=pacing)
    view = place.finished(job)
    assert view.version == 12
    events = told(place, job)
    assert {event.task.site for event in opened(events)} == {"a", "b", "c"}
    if pacing.get("rule") == "ssp" and not pacing.get("unseen_mass"):
        check_ssp(events, 1)
    ages = [e.staleness for e in events if isinstance(e, j.UpdateSettled) and e.verdict == "queued"]
    assert pacing["rule"] != "async" or max(ages) <= 8
    sizes = {len(e.cohort) for e in events if isinstance(e, j.RoundClosed) and e.cohort}
    assert sizes == ({2} if pacing["rule"] == "buffered" else {1})
    sized = {event.task.steps for event in opened(events) if event.task.clock > 1}
    assert (0 in sized) == ("periods" not in pacing)


@pytest.mark.parametrize("late", ["drop", "return", "fold"])
def test_rounds_close_with_the_fastest_and_periods_are_sized_by_what_was_measured(
    place: Place, late: str
):
    place.start()
    place.sites("a", "b", "c", buffers=1)
    pacing = {"rule": "bsp", "first": 2, "late": late, "periods": "esync"}
    job = place.submit(wanted=3, versions=8, pacing=pacing)
    assert place.finished(job).version == 8
    events = told(place, job)
    closed = [e for e in events if isinstance(e, j.RoundClosed) and e.cohort]
    assert min(len(e.cohort) for e in closed) >= 2
    rounds = [e for e in events if isinstance(e, j.RoundOpened)]
    assert any(task.steps for event in rounds for task in event.tasks)


def test_a_fast_site_goes_on_while_a_slow_one_trains_and_then_waits_for_it(place: Place):
    place.start()
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    place.sites("a")
    place.join("slow", wait=fifo)
    place.agent("slow")
    writer = os.open(fifo, os.O_RDWR)  # the slow site's periods end only with a byte from here
    job = place.submit(versions=7, pacing={"rule": "ssp", "staleness": 2})
    place.wait(job, lambda v: v.version == 3)
    view = place.wait(job, lambda v: any("waits: clock 3" in site.doing for site in v.sites))
    assert "slowest is slow at clock 0" in view.waiting
    assert view.version == 3
    os.write(writer, b"xxxxxxxx")
    place.finished(job)
    os.close(writer)
    check_ssp(told(place, job), 2)


@pytest.mark.parametrize("rule", ["ssp", "async", "buffered"])
def test_a_dead_site_holds_the_others_no_longer_than_its_lease(place: Place, rule: str):
    place.start(flags={"lease-seconds": "2", "grace-seconds": "0.5"})
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    place.sites("a", "b")
    place.join("c", wait=fifo)
    agent = place.agent("c")
    pacing: dict[str, Any] = {"rule": rule, "staleness": 1 if rule == "ssp" else 100}
    if rule == "buffered":
        pacing |= {"buffer": 3, "one_per_site": True}
    job = place.submit(wanted=3, versions=8, pacing=pacing | {"deadline_seconds": 3.0})
    place.wait(job, lambda v: any(s.site == "a" and s.clock >= 1 for s in v.sites))
    agent.process.send_signal(signal.SIGKILL)
    view = place.finished(job)
    assert view.version == 8
    assert {s.site for s in view.sites if s.active or s.counted} >= {"a", "b"}


@pytest.mark.parametrize("rule", ["ssp", "async", "buffered"])
@pytest.mark.parametrize(
    "instant",
    [
        "round_closed_before_fold:3",
        "fold_after_version_file:3",
        "version_persisted_before_announce:3",
    ],
)
def test_a_killed_coordinator_goes_on_at_the_same_version(place: Place, rule: str, instant: str):
    place.start(crash_at=instant)
    place.sites("a", "b")
    pacing: dict[str, Any] = {"rule": rule, "staleness": 50 if rule == "async" else 1}
    if rule == "buffered":
        pacing["buffer"] = 2
    job = place.submit(versions=9, pacing=pacing)
    if instant.startswith("fold_"):
        view = place.finished(job)  # the fold process died, and another one took over
    else:
        place.crashed()
        place.start()
        view = place.finished(job)
    assert view.version == 9
    events = told(place, job)
    made = [event.version for event in events if isinstance(event, j.VersionMade)]
    assert made == list(range(10))
    settled = [
        (e.site, e.epoch, e.clock)
        for e in events
        if isinstance(e, j.UpdateSettled) and e.verdict != "refused_return"
    ]
    assert len(settled) == len(set(settled))
    if rule == "ssp":
        check_ssp(events, 1)


@pytest.mark.parametrize("instant", ["round_closed_before_fold:7", "fold_after_version_file:7", ""])
def test_old_updates_are_compensated_and_momentum_waits_through_kills(place: Place, instant: str):
    """What is made again after a kill needs the versions that old updates started from."""
    place.start(crash_at=instant)
    begin = {}  # periods end only with a byte from here
    for name in ("fast", "slow"):
        os.mkfifo(place.folder / name)
        place.sites(name, wait=place.folder / name, buffers=1)
        begin[name] = os.open(place.folder / name, os.O_RDWR)
    job = place.submit(
        wanted=2,
        versions=14,
        pacing={"rule": "async", "staleness": 50, "compensation": "adaptive"},
        server={"optimizer": "delayed_nesterov", "delay": 3},
        keep={"versions": 1},
        checkpoint={"every": 4},
    )
    os.write(begin["fast"], b"xxxx")
    place.wait(job, lambda v: v.version == 4)
    os.write(begin["slow"], b"x")
    place.wait(job, lambda v: v.version == 5)
    os.write(begin["fast"], b"x" * 40)
    if instant.startswith("round_closed"):
        place.crashed()
        place.start()
    assert place.finished(job).version == 14
    for file in begin.values():
        os.close(file)
    events = told(place, job)
    made = [event.version for event in events if isinstance(event, j.VersionMade)]
    assert made == list(range(15))
    parts = [(e.version, part) for e in events if isinstance(e, j.RoundClosed) for part in e.cohort]
    ((version, old),) = [(v, part) for v, part in parts if part.site == "slow"]
    assert (version, old.version) == (5, 0)


def test_the_journal_can_be_read_back_whole(place: Place):
    place.start()
    place.sites("a")
    job = place.submit(wanted=1, versions=2, pacing={"rule": "async"})
    place.finished(job)
    for event in told(place, job):
        assert j.decode_event(msgspec.json.encode(event)) == event

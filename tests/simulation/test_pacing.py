"""Every rule over the real core in virtual time: what each promises, checked at every event."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from coordinator import journal as j
from coordinator.lifecycle import spool_bytes
from protocol.jobspec import JobSpec, Pacing, Sites, Stop
from protocol.messages import Train
from simulation.faults import Faults
from simulation.fleet import Fleet
from simulation.site import Period as Trained
from simulation.site import SimSite, SiteModel
from tests.simulation.test_fleet import fleet, params, settle, spec, with_sites


def taking(seconds: float) -> SiteModel:
    def model(site: str, train: Train, base: list[float]) -> Trained:
        return Trained(seconds, [1.0 / 64 for _ in base])

    return model


def run(pacing: Pacing, paces: dict[str, float], *, versions: int = 12, **over: Any) -> Fleet:
    """A job under a rule; `paces` are the seconds that a period takes at each site."""
    world = fleet()
    for name, seconds in paces.items():
        world.add(SimSite(name, world, model=taking(seconds)))
    world.submit("j", job(pacing, sites=len(paces), versions=versions, **over))
    return settle(world)


def job(pacing: Pacing, *, sites: int, versions: int = 12, **over: Any) -> JobSpec:
    return spec(pacing=pacing, sites=Sites(wanted=sites), stop=Stop(versions=versions), **over)


def events(world: Fleet, kind: type[Any]) -> list[Any]:
    return [entry.event for entry in world.journal if isinstance(entry.event, kind)]


def clocks(world: Fleet) -> Counter[str]:
    return Counter(event.task.site for event in events(world, j.PeriodOpened))


def test_a_member_that_comes_back_when_a_job_takes_nobody_hears_of_its_end() -> None:
    world = with_sites(fleet(), "a", "b")
    world.submit("j", job(Pacing(), sites=2, versions=50))
    world.run(lambda: world.core.job("j").number >= 2, seconds=100)
    world.sites["b"].kill()
    world.cut(world.sites["b"])
    world.run_for(30.0)
    world.command("j", "pause")
    world.run_for(10.0)
    world.sites["b"].start()
    world.run_for(10.0)
    assert "j" not in world.sites["b"].ended
    world.command("j", "stop")
    settle(world)
    assert world.sites["b"].ended["j"].startswith("the job is stopped")


# ---------------------------------------------------------------- ssp


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_under_ssp_nobody_is_further_ahead_than_the_bound(staleness: int) -> None:
    """PC-042: a site may begin when its clock - the slowest clock <= bound; then it waits."""
    paces = {"a": 1.0, "b": 1.0, "slow": 5.0}
    world = run(Pacing(rule="ssp", staleness=staleness), paces, versions=24)
    assert world.core.job("j").number == 24
    lead, clock = 0, dict.fromkeys(paces, 0)
    for entry in world.journal:
        match entry.event:
            case j.UpdateSettled(site=site, clock=settled):
                clock[site] = settled + 1
            case j.PeriodOpened(task=task):
                lead = max(lead, task.clock - min(clock.values()))
            case _:
                pass
    assert lead == staleness  # neither broken nor left unused


def test_a_site_that_waits_says_for_whom_and_how_long() -> None:
    world = fleet()
    for name, seconds in (("a", 1.0), ("slow", 60.0)):
        world.add(SimSite(name, world, model=taking(seconds)))
    world.submit("j", job(Pacing(rule="ssp", staleness=1, deadline_seconds=120.0), sites=2))
    world.run(lambda: world.core.job("j").number >= 2, seconds=50)
    world.run_for(2)
    view = world.core.view("j", world.now)
    doing = {site.site: site.doing for site in view.sites}
    assert doing["a"].startswith("waits: clock 2, slowest is slow at clock 0, which has at most")
    assert doing["a"].endswith("staleness 1")
    assert "a waits: clock 2" in view.waiting
    assert "version 3 waits for slow (training" in view.waiting


@pytest.mark.parametrize("rule", ["ssp", "async", "buffered"])
def test_in_a_paused_job_no_site_is_said_to_wait_for_another(rule: Any) -> None:
    world = with_sites(fleet(), "a", "b")
    pacing = Pacing(rule=rule, buffer=2 if rule == "buffered" else 0)
    world.submit("j", job(pacing, sites=2, versions=100))
    world.run(lambda: world.core.job("j").number >= 3, seconds=100)
    world.command("j", "pause")
    world.run_for(30.0)
    view = world.core.view("j", world.now)
    assert {site.doing for site in view.sites} == {"waiting for the next version"}
    assert "waits for somebody to resume it" in view.waiting
    world.command("j", "resume")
    settle(world)


def test_a_site_that_dies_holds_the_others_back_no_longer_than_its_lease() -> None:
    world = fleet()
    for name in ("a", "b", "c"):
        world.add(SimSite(name, world, model=taking(1.0)))
    world.submit("j", job(Pacing(rule="ssp", staleness=1), sites=3, versions=60))
    world.run(lambda: world.core.job("j").number >= 6, seconds=100)
    died = world.now
    world.sites["c"].kill()
    world.cut(world.sites["c"])
    world.run(lambda: world.core.job("j").number >= 12, seconds=100)
    assert world.now - died < 15 + 6
    world.sites["c"].start()
    settle(world)
    back = [e for e in events(world, j.SiteEntered) if e.site == "c"]
    assert [e.epoch for e in back] == [1, 2]
    assert back[1].clock > back[0].clock  # at the minimum clock, not at its old one


def test_bsp_and_ssp_without_staleness_open_the_same_clocks_in_the_same_order() -> None:
    paces = {"a": 1.0, "b": 1.5, "c": 2.5}
    rounds = run(Pacing(), paces, versions=5)
    eager = run(Pacing(rule="ssp", staleness=0), paces, versions=15)
    by_rounds = [t.clock for e in events(rounds, j.RoundOpened) for t in e.tasks]
    assert [e.task.clock for e in events(eager, j.PeriodOpened)][:15] == by_rounds


def test_pinned_ssp_without_staleness_makes_the_models_of_bsp() -> None:
    """With lr 1, one update after the other from the same base adds up to their mean."""
    paces = {"a": 1.0, "b": 1.5, "c": 2.5}

    def models(pacing: Pacing, versions: int) -> list[float]:
        world = fleet()
        for name, seconds in paces.items():
            world.add(SimSite(name, world, model=drifting(seconds)))
        world.submit("j", job(pacing, sites=3, versions=versions))
        return params(settle(world))

    pinned = Pacing(rule="ssp", staleness=0, reads="pinned")
    assert models(pinned, 15) == pytest.approx(models(Pacing(), 5), abs=1e-6)


def drifting(seconds: float) -> SiteModel:
    def model(site: str, train: Train, base: list[float]) -> Trained:
        return Trained(seconds, [(ord(site) % 5) / 8 + train.clock / 64 - x / 4 for x in base])

    return model


def test_with_unseen_mass_sites_wait_for_what_is_unseen_and_not_for_clocks() -> None:
    """What a site at work has not seen stays below the bound, however far the clocks are apart."""
    paces = {"a": 1.0, "b": 1.0, "slow": 20.0}
    loose = run(Pacing(rule="ssp", unseen_mass=1e9), paces, versions=30)
    assert clocks(loose)["a"] >= 10  # nothing held it back
    world = run(Pacing(rule="ssp", unseen_mass=0.25), paces, versions=30)
    assert clocks(world)["slow"] > clocks(loose)["slow"] + 2
    # Every update here has one norm, so forecasts are right but for one that was not known yet.
    assert max(unseen(world)) <= 0.25
    assert max(unseen(loose)) > 0.5


def unseen(world: Fleet) -> list[float]:
    """At every version, for every site at work: what others have moved since its base, over the
    model's norm, without one update's worth.
    """
    made: list[tuple[float, str]] = []  # of each version, its norm and whose it is
    owner, found = "", []
    base: dict[str, int] = {}
    for entry in world.journal:
        match entry.event:
            case j.PeriodOpened(task=task, base=version):
                base[task.site] = version.version
            case j.UpdateSettled(site=site):
                base.pop(site, None)
            case j.RoundClosed(cohort=(part,)):
                owner = part.site
            case j.VersionMade(version=number, update_norm=norm, model_norm=of):
                made.append((norm, owner))
                for site, since in base.items() if number > 2 else ():  # norms are known by then
                    others = [moved for moved, whose in made[since + 1 :] if whose != site]
                    found.append((sum(others) - norm) / of)
            case _:
                pass
    return found


# ---------------------------------------------------------------- async


def test_under_async_everybody_goes_on_at_once_and_old_updates_are_refused() -> None:
    world = run(Pacing(rule="async", staleness=4), {"a": 1.0, "b": 1.0, "slow": 9.0}, versions=40)
    ages = [e.staleness for e in events(world, j.UpdateSettled) if e.verdict == "queued"]
    assert max(ages) <= 4
    opened = clocks(world)
    assert opened["a"] >= 15
    told = [e.reason for e in events(world, j.UpdateSettled) if e.site == "slow"]
    assert all("versions old (from version" in reason for reason in told[:-1])
    assert told[-1].startswith("the job ends")
    assert opened["slow"] > 2  # it was sent off again from newer versions


def test_a_version_of_async_is_the_base_plus_the_weighted_update() -> None:
    world = run(Pacing(rule="async", staleness=4), {"a": 1.0}, versions=3)
    assert params(world) == pytest.approx([3 / 64] * 4)


def test_an_older_update_weighs_less() -> None:
    world = run(
        Pacing(rule="async", staleness=20, staleness_a=1.0), {"a": 1.0, "b": 4.5}, versions=8
    )
    found = {
        e.version - 1 - part.version: part.weight
        for e in events(world, j.RoundClosed)
        for part in e.cohort
    }
    assert len(found) > 1
    assert all(weight == pytest.approx(0.5 / (1 + tau)) for tau, weight in found.items())


# ---------------------------------------------------------------- buffered


def test_a_buffer_of_k_updates_makes_a_version_divided_by_k() -> None:
    world = run(Pacing(rule="buffered", buffer=3), {"a": 1.0, "b": 1.1, "c": 7.0}, versions=6)
    closed = events(world, j.RoundClosed)
    assert [len(e.cohort) for e in closed if e.cohort] == [3] * 6
    fresh = [p.weight for e in closed for p in e.cohort if e.version - 1 == p.version]
    assert fresh == pytest.approx([1 / 3] * len(fresh))
    twice = [e for e in closed if len({p.site for p in e.cohort}) < len(e.cohort)]
    assert twice  # a fast site fills the buffer with several


def test_one_per_site_makes_a_site_wait_for_its_version() -> None:
    pacing = Pacing(rule="buffered", buffer=2, one_per_site=True)
    world = run(pacing, {"a": 1.0, "b": 3.0, "c": 7.0}, versions=6)
    for event in events(world, j.RoundClosed):
        assert len({part.site for part in event.cohort}) == len(event.cohort)


def test_a_buffer_of_all_with_one_each_has_the_cohorts_and_the_model_of_bsp() -> None:
    paces = {"a": 1.0, "b": 1.5, "c": 2.5}
    rounds = run(Pacing(), paces, versions=5)
    pacing = Pacing(rule="buffered", buffer=3, one_per_site=True)
    buffered = run(pacing, paces, versions=5)

    def cohorts(world: Fleet) -> list[list[tuple[str, int]]]:
        return [[(p.site, p.clock) for p in e.cohort] for e in events(world, j.RoundClosed)][:5]

    assert cohorts(buffered) == cohorts(rounds)
    assert params(buffered) == pytest.approx(params(rounds), abs=1e-6)


def test_concurrency_bounds_who_is_at_work() -> None:
    pacing = Pacing(rule="buffered", buffer=2, concurrency=2)
    world = fleet()
    for name in "abcdef":
        world.add(SimSite(name, world, model=taking(1.0)))
    world.submit("j", job(pacing, sites=6, versions=30))
    at_work, most = set[tuple[str, int]](), 0
    settle(world)
    for entry in world.journal:
        match entry.event:
            case j.PeriodOpened(task=task):
                at_work.add((task.site, task.clock))
                most = max(most, len(at_work))
            case j.UpdateSettled(site=site, clock=clock):
                at_work.discard((site, clock))
            case _:
                pass
    assert most == 2
    assert len(clocks(world)) == 6  # in the long run everybody has had a turn


def test_a_quorum_of_updates_may_come_from_fewer_sites() -> None:
    """Two sites make buffers of five; the job does not wait for a site for each."""
    pacing = Pacing(rule="buffered", buffer=5, quorum=4, deadline_seconds=60.0)
    world = run(pacing, {"a": 1.0, "b": 2.0}, versions=3)
    assert world.core.job("j").state == "finished"
    assert {len(e.cohort) for e in events(world, j.RoundClosed) if e.cohort} == {5}


def test_a_buffer_that_does_not_fill_is_committed_at_its_deadline() -> None:
    pacing = Pacing(rule="buffered", buffer=5, one_per_site=True, deadline_seconds=30.0)
    world = run(pacing, {"a": 1.0, "b": 1.0, "c": 1.0}, versions=3)
    reasons = [e.reason for e in events(world, j.RoundClosed) if e.cohort]
    assert reasons == ["the buffer's deadline came with 3 of 5"] * 3


def test_a_buffer_that_has_no_quorum_goes_back_and_the_job_ends_at_last() -> None:
    """Two update, three make a quorum: nobody waits for ever, and nothing is lost."""
    pacing = Pacing(rule="buffered", buffer=5, quorum=3, one_per_site=True, deadline_seconds=30.0)
    world = fleet()
    for name, seconds in (("a", 1.0), ("b", 1.0), ("c", 1e6)):
        world.add(SimSite(name, world, model=taking(seconds)))
    world.submit("j", job(pacing, sites=3, versions=3))
    settle(world)
    assert world.core.job("j").state == "failed"
    said = "the buffer's deadline came with 2 of 5, the quorum is 3"
    assert [e.reason for e in events(world, j.RoundClosed)][:3] == [said] * 3
    assert said in world.core.job("j").reason
    assert "refused_drop" not in list(world.sites["a"].outcome.values())[:3]


# ---------------------------------------------------------------- rounds


def offsets(per_clock: dict[str, list[float]]) -> Fleet:
    """Sites whose periods take these seconds, clock after clock."""

    def model(site: str, train: Train, base: list[float]) -> Trained:
        times = per_clock[site]
        return Trained(times[min(train.clock, len(times) - 1)], [1.0 / 64 for _ in base])

    world = fleet()
    for name in per_clock:
        world.add(SimSite(name, world, model=model))
    return world


def lasted(world: Fleet) -> list[float]:
    """Seconds from the opening of each round to its closing."""
    opened, found = 0.0, []
    for entry in world.journal:
        match entry.event:
            case j.RoundOpened():
                opened = entry.now
            case j.RoundClosed():
                found.append(entry.now - opened)
            case _:
                pass
    return found


def test_a_round_closes_when_all_expected_updates_are_in() -> None:
    """PC-041: arrivals after 5, 6, 6, 30 s, then 5, 5, 6, 6 s: the second closes at 6 s."""
    world = offsets({"a": [5, 5], "b": [6, 5], "c": [6, 6], "d": [30, 6]})
    world.submit("j", job(Pacing(deadline_seconds=60.0), sites=4, versions=2))
    settle(world)
    assert lasted(world)[:2] == pytest.approx([30.0, 6.0], abs=0.1)


def test_a_measured_deadline_follows_what_periods_take() -> None:
    """PC-041: the same without a fixed constant: 30 s are late where 5 and 6 s are usual."""
    usual = [5.0, 5.5, 6.0]
    paces = {name: [usual[(n + k) % 3] for k in range(5)] for n, name in enumerate("abc")}
    world = offsets(paces | {"d": [5.0, 5.5, 6.0, 5.0, 30.0, 5.0]})
    pacing = Pacing(deadline="measured", deadline_seconds=600.0)
    world.submit("j", job(pacing, sites=4, versions=6))
    settle(world)
    deadlines = [
        e.event.deadline - e.now for e in world.journal if isinstance(e.event, j.RoundOpened)
    ]
    assert deadlines[:2] == [600.0, 600.0]
    assert all(6.0 < allowed < 12.0 for allowed in deadlines[2:])
    assert lasted(world)[4] == pytest.approx(deadlines[4], abs=0.1)


def test_a_measured_deadline_is_measured_anew_when_all_have_become_slower() -> None:
    """What is late is not measured: else every round from here on would be void."""
    paces = {name: [1.0] * 4 + [10.0] * 9 for name in "abc"}
    world = offsets(paces)
    pacing = Pacing(deadline="measured", deadline_seconds=600.0, failed_rounds_max=2)
    world.submit("j", job(pacing, sites=3, versions=8))
    settle(world)
    assert world.core.job("j").state == "finished"
    void = [e for e in events(world, j.RoundClosed) if not e.cohort]
    assert len(void) == 1
    assert [len(e.cohort) for e in events(world, j.RoundClosed) if e.cohort] == [3] * 8


@pytest.mark.parametrize("late", ["drop", "return", "fold"])
def test_the_fastest_m_close_the_round_and_late_ones_are_dealt_with_as_the_job_says(
    late: Any,
) -> None:
    world = offsets({"a": [1.0], "b": [1.0], "slow": [3.5]})
    world.submit("j", job(Pacing(first=2, late=late), sites=3, versions=9))
    settle(world)
    closed = [e for e in events(world, j.RoundClosed) if e.cohort]
    assert closed[0].reason == "the first 2 of 3 are in"
    assert "slow" in closed[0].missing
    told = [e for e in events(world, j.UpdateSettled) if e.site == "slow"]
    slow = world.core.job("j").members["slow"]
    if late == "fold":
        assert slow.counted >= 2
        held = [part for e in closed for part in e.cohort if part.site == "slow"]
        assert all(part.version < e.version - 1 for e in closed for part in e.cohort
                   if part.site == "slow")  # fmt: skip
        assert held
        assert any(e.staleness > 0 for e in told if e.verdict == "queued")
    else:
        assert slow.counted == 0
        expected = {"drop": "refused_drop", "return": "refused_return"}[late]
        assert {e.verdict for e in told[:-1]} == {expected}
    site = world.sites["slow"]
    assert ("refused_return" in site.outcome.values()) == (late == "return")


def test_late_updates_do_not_close_the_round_that_they_come_into() -> None:
    """Two fast sites make a round of first = 2, however many late ones are there already."""
    paces = {"a": [1.0], "b": [1.0], "x": [1.5], "y": [1.5]}
    world = offsets(paces)
    world.submit("j", job(Pacing(first=2, late="fold"), sites=4, versions=6))
    settle(world)
    closed = [e for e in events(world, j.RoundClosed) if e.cohort]
    fresh = [sum(part.version == e.version - 1 for part in e.cohort) for e in closed]
    assert set(fresh) == {2}
    assert closed[1].reason == "all are in, and 2 of earlier rounds"
    assert {part.site for e in closed for part in e.cohort} == set(paces)


def test_room_is_kept_for_updates_that_come_late() -> None:
    world = offsets({"a": [1.0], "b": [1.0], "slow": [600.0]})
    world.submit("j", job(Pacing(first=2, late="fold"), sites=3, versions=9))
    world.run(lambda: world.core.job("j").number == 1)
    open_ = world.core.job("j")
    assert list(open_.carried) == ["slow"]
    held = sum(spool.bytes for spool in open_.spools.values())
    at_work = len(open_.round.training) if open_.round is not None else 0
    assert spool_bytes(open_) == held + (at_work + 1) * open_.dense_bytes


def test_over_selection_draws_more_and_closes_with_what_was_asked_for() -> None:
    world = fleet()
    for name in "abcdef":
        world.add(SimSite(name, world, model=taking(1.0 + (ord(name) % 5) / 4)))
    sites = Sites(wanted=6, select=2, over_select=0.5)
    world.submit("j", spec(pacing=Pacing(), sites=sites, stop=Stop(versions=8)))
    settle(world)
    assert {len(e.tasks) for e in events(world, j.RoundOpened)} == {3}
    assert {len(e.cohort) for e in events(world, j.RoundClosed) if e.cohort} == {2}


def test_partial_periods_are_boxed_so_that_they_are_in_by_the_deadline() -> None:
    world = fleet()
    boxes: list[float] = []

    def boxed(site: str, train: Train, base: list[float]) -> Trained:
        boxes.append(train.seconds)
        return Trained(min(train.seconds, 100.0), [1.0 / 64 for _ in base])

    for name in "ab":
        world.add(SimSite(name, world, model=boxed))
    world.submit("j", job(Pacing(partial=True, deadline_seconds=10.0), sites=2, versions=4))
    settle(world)
    assert all(0.0 < box < 10.0 for box in boxes)
    assert [len(e.cohort) for e in events(world, j.RoundClosed) if e.cohort] == [2] * 4


def test_who_was_left_out_is_seen_in_the_shares_of_the_data() -> None:
    world = offsets({"a": [1.0], "b": [1.0], "slow": [3.5]})
    world.submit("j", job(Pacing(first=2), sites=3, versions=9))
    settle(world)
    shares = {s.site: (s.data_share, s.version_share) for s in world.core.view("j", 0).sites}
    assert shares["slow"] == (pytest.approx(1 / 3), 0.0)
    assert shares["a"] == (pytest.approx(1 / 3), pytest.approx(1 / 2))


# ---------------------------------------------------------------- sized periods


def stepping(seconds: float, trained: list[tuple[str, int, int]]) -> SiteModel:
    """A step takes so many seconds; who took how many at which clock."""

    def model(site: str, train: Train, base: list[float]) -> Trained:
        trained.append((site, train.clock, train.steps))
        return Trained(seconds * train.steps, [1.0 / 64 for _ in base])

    return model


@pytest.mark.parametrize("rule", ["bsp", "ssp"])
def test_with_esync_fast_sites_take_more_steps_and_nobody_is_waited_for(rule: Any) -> None:
    """From the second clock on a, three times as fast as c, takes three times the steps."""
    trained: list[tuple[str, int, int]] = []
    world = fleet()
    for name, pace in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        world.add(SimSite(name, world, model=stepping(pace, trained)))
    pacing = Pacing(rule=rule, periods="esync", staleness=0)
    world.submit("j", job(pacing, sites=3, versions=12))
    settle(world)
    assert [n for site, clock, n in trained if clock == 0] == [10, 10, 10]
    later = {(site, n) for site, clock, n in trained if clock == 2}
    assert later == {("a", 30), ("b", 15), ("c", 10)}
    arrived: dict[int, list[float]] = {}
    for entry in world.journal:
        if isinstance(entry.event, j.UpdateSettled) and entry.event.verdict == "queued":
            arrived.setdefault(entry.event.clock, []).append(entry.now)
    assert max(arrived[0]) - min(arrived[0]) == pytest.approx(2.0, abs=0.1)
    assert max(arrived[2]) - min(arrived[2]) < 0.3  # a step of the slowest


def test_with_dylu_the_updates_of_async_are_about_equally_old() -> None:
    def ages(periods: Any) -> dict[str, float]:
        world = fleet()
        for name, pace in (("a", 0.1), ("b", 0.1), ("c", 0.5)):
            world.add(SimSite(name, world, model=stepping(pace, [])))
        pacing = Pacing(rule="async", staleness=50, periods=periods)
        world.submit("j", job(pacing, sites=3, versions=60))
        settle(world)
        found: dict[str, list[int]] = {}
        for event in events(world, j.UpdateSettled)[6:]:
            if event.verdict == "queued":
                found.setdefault(event.site, []).append(event.staleness)
        return {site: sum(of) / len(of) for site, of in found.items()}

    assert ages("equal")["c"] > 4 * ages("equal")["a"]
    assert ages("dylu")["c"] < 1.5 * ages("dylu")["a"]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("rule", ["ssp", "async", "buffered"])
def test_a_site_that_fails_at_every_period_is_refused_and_the_others_go_on(rule: Any) -> None:
    def broken(site: str, train: Train, base: list[float]) -> Trained:
        return Trained(0.5, [], failure="out of memory")

    world = with_sites(fleet(), "a", "b")
    world.add(SimSite("bad", world, model=broken))
    world.submit("j", job(Pacing(rule=rule, buffer=2), sites=3))
    settle(world)
    assert world.core.job("j").state == "finished"
    assert "failed 6 times in a row, at last: out of memory" in world.core.job("j").refused["bad"]


def test_a_period_that_is_not_in_by_its_deadline_is_given_up_and_begun_again() -> None:
    world = run(
        Pacing(rule="ssp", staleness=0, deadline_seconds=10.0), {"a": 1.0, "hangs": 1e6}, versions=5
    )
    late = [e for e in events(world, j.UpdateSettled) if e.site == "hangs"]
    assert {e.reason for e in late[:-1]} == {"late: not in after 10 s"}


@pytest.mark.parametrize("rule", ["ssp", "async", "buffered"])
@pytest.mark.parametrize("how", ["slow", "broken"])
def test_a_job_none_of_whose_periods_comes_to_anything_fails_and_says_why(
    rule: Any, how: str
) -> None:
    def model(site: str, train: Train, base: list[float]) -> Trained:
        return Trained(1e6, []) if how == "slow" else Trained(1.0, [], failure="out of memory")

    world = fleet()
    for name in "ab":
        world.add(SimSite(name, world, model=model))
    pacing = Pacing(rule=rule, buffer=2, deadline_seconds=10.0)
    world.submit("j", job(pacing, sites=2))
    settle(world)
    assert world.journal[-1].now < 60.0
    told = {"slow": "late: not in after 10 s", "broken": "failed 2 times: out of memory"}[how]
    reason = world.core.job("j").reason
    assert reason.endswith(f" periods in a row came to nothing; a, b: {told}")


def test_a_site_that_returns_is_not_held_at_the_clock_of_one_without_data() -> None:
    """Else everybody would wait until it had made up for all that it missed."""
    world = fleet()
    for name in "ab":
        world.add(SimSite(name, world, model=taking(1.0)))
    world.add(SimSite("empty", world, train_examples=0))
    world.submit("j", job(Pacing(rule="ssp", staleness=1), sites=3, versions=60))
    world.run(lambda: world.core.job("j").number >= 20)
    world.sites["b"].kill()
    world.cut(world.sites["b"])
    world.run_for(30.0)
    world.sites["b"].start()
    settle(world)
    back = [e for e in events(world, j.SiteEntered) if e.site == "b"]
    assert back[1].clock >= 10


@pytest.mark.parametrize("seed", range(300))
def test_storms_break_no_promise_of_any_rule(seed: int) -> None:
    """Delays, repetitions, crashes of the coordinator, sites that die and come back."""
    random = Random(seed)
    rule = random.choice(["bsp", "ssp", "async", "buffered"])
    pacing = Pacing(
        rule=rule,
        first=random.randrange(3) if rule == "bsp" else 0,
        late=random.choice(["drop", "return", "fold"]) if rule == "bsp" else "drop",
        deadline=random.choice(["fixed", "measured"]) if rule == "bsp" else "fixed",
        failed_rounds_max=100,
        staleness=random.randrange(5),
        reads=random.choice(["eager", "pinned"]) if rule == "ssp" else "eager",
        unseen_mass=random.choice([0.0, 0.0, 0.5]) if rule == "ssp" else 0.0,
        buffer=random.randrange(1, 4) if rule == "buffered" else 0,
        one_per_site=random.random() < 0.5,
        periods=random.choice(["equal", "esync", "dylu"]),
        concurrency=random.choice([0, 0, 2]),
        deadline_seconds=random.choice([8.0, 300.0]),
    )
    faults = Faults(
        seed=seed,
        delay_seconds_max=random.choice([0.0, 0.3, 2.0]),
        repeat=0.2,
        crash_at=frozenset(random.sample(range(20, 400), random.randrange(5))),
    )
    world = fleet(faults=faults)
    for name in "abc":
        world.add(SimSite(name, world, model=drifting(random.choice([0.5, 1.0, 4.0]))))
    world.submit("j", job(pacing, sites=2, versions=15))
    for _ in range(3):
        world.run_for(random.uniform(2.0, 20.0))
        site = world.sites[random.choice("abc")]
        if site.running:
            site.kill()
            world.cut(site)
            world.run_for(random.uniform(0.1, 20.0))
            site.start()
    settle(world)
    assert world.core.job("j").state == "finished"

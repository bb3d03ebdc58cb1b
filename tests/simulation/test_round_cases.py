"""What went wrong with rounds at other platforms, in virtual time with exact seconds."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import journal as j
from coordinator.core import CoreConfig
from coordinator.settings import CoordinatorSettings
from protocol.jobspec import Pacing, Sites, Stop
from protocol.messages import Train
from simulation.fleet import Fleet
from simulation.site import Period, SimSite
from tests.simulation.test_fleet import fleet, params, settle, spec, with_sites
from tests.simulation.test_pacing import events, lasted, taking


def failing(site: str, train: Train, base: list[float]) -> Period:
    return Period(1.0, [], failure=f"CUDA out of memory at {site}")


def test_a_job_whose_sites_all_fail_ends_with_their_reasons_and_no_progress() -> None:
    """PC-034: 0 results, 2 failures: no progress, and after N void rounds the job has failed."""
    world = fleet()
    for name in ("a", "b"):
        world.add(SimSite(name, world, model=failing))
    world.submit("j", spec(sites=Sites(wanted=2), pacing=Pacing(failed_rounds_max=3)))
    settle(world)
    job = world.core.job("j")
    assert (job.state, job.number) == ("failed", 0)
    assert "3 rounds in a row were void" in job.reason
    assert "CUDA out of memory at a" in job.reason
    assert "CUDA out of memory at b" in job.reason
    assert params(world) == [0.0] * 4
    # The coordinator takes the next job, and nobody of the old one disturbs it.
    world.sites["a"].model = world.sites["b"].model = taking(1.0)
    world.submit("k", spec(sites=Sites(wanted=2), stop=Stop(versions=1)))
    world.run(lambda: world.ended("k"), seconds=1_000)
    assert world.core.job("k").state == "finished"


def test_the_deadline_needs_no_message_to_fire() -> None:
    """PC-035: deadline 10 s, minimum 1, one of two killed: closed within 10 to 12 s."""
    world = fleet(config=CoreConfig(lease_seconds=600.0, grace_seconds=600.0))
    world.add(SimSite("a", world, model=taking(1.0)))
    world.add(SimSite("b", world, model=taking(1e9)))
    world.submit(
        "j",
        spec(
            sites=Sites(wanted=2),
            pacing=Pacing(quorum=1, deadline_seconds=10.0),
            stop=Stop(versions=1),
        ),
    )
    world.run(lambda: world.core.job("j").round is not None)
    world.sites["b"].kill()
    settle(world)
    (seconds,) = lasted(world)
    assert 10.0 <= seconds <= 12.0
    (closed,) = events(world, j.RoundClosed)
    assert [part.site for part in closed.cohort] == ["a"]


def test_a_job_that_waits_for_one_more_site_says_so_and_until_when() -> None:
    """PC-036: two are wanted, one is there: a visible wait with a timeout, then an end."""
    world = with_sites(fleet(), "only")
    pacing = Pacing(start_timeout_seconds=90.0)
    world.submit("j", spec(sites=Sites(wanted=2), pacing=pacing))
    world.run_for(10.0)
    waiting = world.core.view("j", world.now).waiting
    assert "1 of 2 sites are ready" in waiting
    assert "waiting for 1 more site" in waiting
    assert "at most 1 min 20 s more" in waiting
    settle(world)
    assert world.core.job("j").state == "failed"
    assert "waited 90 s in vain: 1 of 2 sites are ready" in world.core.job("j").reason


def test_a_round_in_which_nobody_was_in_time_is_tried_again_and_not_counted() -> None:
    """PC-037: 5 planned, all time out in round 2: 5 versions from 6 rounds, told truthfully."""
    world = fleet()

    def model(site: str, train: Train, base: list[float]) -> Period:
        slow = train.clock == 1
        return Period(100.0 if slow else 1.0, [1.0 / 64 for _ in base])

    for name in ("a", "b", "c"):
        world.add(SimSite(name, world, model=model))
    world.submit(
        "j",
        spec(pacing=Pacing(deadline_seconds=10.0), stop=Stop(versions=5), sites=Sites(wanted=3)),
    )
    settle(world)
    job = world.core.job("j")
    assert (job.state, job.number, job.rounds) == ("finished", 5, 6)
    void = [e for e in events(world, j.RoundClosed) if not e.cohort]
    assert [e.round for e in void] == [2]
    assert "no usable contribution" in void[0].reason
    assert {m.counted for m in job.members.values()} == {5}


def test_a_period_longer_than_the_lease_does_not_expire_while_its_site_works() -> None:
    """PC-038: training 30 s, lease 15 s, six busy sites: all are counted; and one that runs out
    of its round's time is told after how long.
    """
    world = fleet()
    for name in "abcdef":
        world.add(SimSite(name, world, model=taking(30.0)))
    world.submit("j", spec(sites=Sites(wanted=6), stop=Stop(versions=1)))
    settle(world)
    (closed,) = events(world, j.RoundClosed)
    assert len(closed.cohort) == 6
    assert not events(world, j.SiteEnded)
    late = fleet()
    late.add(SimSite("a", late, model=taking(1.0)))
    late.add(SimSite("slow", late, model=taking(30.0)))
    late.submit(
        "j",
        spec(
            sites=Sites(wanted=2),
            pacing=Pacing(rule="ssp", staleness=100, deadline_seconds=20.0),
            stop=Stop(versions=30),
        ),
    )
    settle(late)
    told = [e.reason for e in events(late, j.UpdateSettled) if e.site == "slow"]
    assert told[0] == "late: not in after 20 s"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"pacing": Pacing(deadline_seconds=6.0, failed_rounds_max=1)}, "not in"),
        ({"pacing": Pacing(start_timeout_seconds=6.0), "wanted": 3}, "waited 6 s in vain"),
        ({"config": CoreConfig(init_timeout_seconds=6.0)}, "no version 0 from it in 6 s"),
    ],
    ids=["deadline", "start", "init"],
)
def test_every_limit_says_who_what_and_how_long_when_it_is_hit(
    limit: dict[str, Any], expected: str
) -> None:
    """PC-040: no run ends at one exact duration without a word (600 s scaled to 6 s)."""
    world = fleet(config=limit.get("config"))
    world.add(SimSite("a", world, model=taking(1e6)))
    slow = SimSite("b", world, model=taking(1e6))
    world.add(slow)
    if "config" in limit:
        for site in world.sites.values():  # they never send version 0
            site.receive = _deaf(site)  # type: ignore[method-assign]
    world.submit(
        "j",
        spec(sites=Sites(wanted=limit.get("wanted", 2)), pacing=limit.get("pacing", Pacing())),
    )
    world.run(lambda: world.ended("j"), seconds=100.0)
    assert world.core.job("j").state == "failed"
    assert expected in world.core.job("j").reason
    assert "a" in world.core.job("j").reason


def _deaf(site: SimSite) -> Any:
    honest = site.receive

    def receive(instruction: Any) -> None:
        if type(instruction).__name__ != "Initialise":
            honest(instruction)

    return receive


def test_every_limit_of_the_coordinator_is_a_setting() -> None:
    """PC-040: nothing that ends a wait is a constant that nobody can change."""
    named = set(CoordinatorSettings.__struct_fields__) | set(Pacing.__struct_fields__)
    assert {
        "lease_seconds",
        "long_poll_seconds",
        "evaluation_timeout_seconds",
        "init_timeout_seconds",
        "body_idle_seconds",
        "header_seconds",
        "deadline_seconds",
        "start_timeout_seconds",
    } <= named


def test_at_the_end_every_site_is_told_and_falls_silent() -> None:
    """PC-043: three agents, two rounds: all done within 10 s of the last round, then idle."""
    world: Fleet = with_sites(fleet(), "a", "b", "c")
    world.submit("j", spec(stop=Stop(versions=2)))
    world.run(lambda: world.ended("j"), seconds=1_000)
    world.run_for(10.0)
    assert all(site.ended["j"].startswith("the job is finished") for site in world.sites.values())
    told = len(world.sent)
    journal = len(world.journal)
    world.run_for(3_600.0)
    assert (len(world.sent), len(world.journal)) == (told, journal)

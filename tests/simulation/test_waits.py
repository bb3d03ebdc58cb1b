"""Nobody is waited for without a word and a deadline, and the log says who, what and how long."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import journal as j
from coordinator.core import CoreConfig
from coordinator.narrate import tell
from protocol.jobspec import Evaluation, Pacing, Sites, Stop
from protocol.messages import Evaluate, Initialise, Instruction, Train
from simulation.fleet import Fleet
from simulation.site import Period as Trained
from simulation.site import SimSite
from tests.simulation.test_fleet import fleet, settle, spec
from tests.simulation.test_pacing import events, taking


def broken(site: str, train: Train, base: list[float]) -> Trained:
    return Trained(0.5, [], failure=f"no CUDA device at {site}")


def at_work(world: Fleet) -> bool:
    job = world.core.job("j")
    return job.round is not None and all(site.training for site in world.sites.values())


def test_sites_that_all_die_end_the_job_at_its_timeout() -> None:
    """PC-034: the agents raise and then exit: the coordinator does not wait for them for ever."""
    world = fleet()
    for name in "ab":
        world.add(SimSite(name, world, model=broken))
    pacing = Pacing(start_timeout_seconds=120.0, failed_rounds_max=9)
    world.submit("j", spec(pacing=pacing, sites=Sites(wanted=2)))
    world.run(lambda: len(events(world, j.SiteFailed)) == 2)
    for site in world.sites.values():
        site.kill()
        world.cut(site)
    died = world.now
    world.run(lambda: world.ended("j"))
    assert world.now - died < 120.0 + 15.0
    job = world.core.job("j")
    assert (job.state, job.number) == ("failed", 0)
    assert job.reason == "waited 120 s in vain: 0 of 1 sites that a version needs are here"
    (void,) = events(world, j.RoundClosed)
    assert void.cohort == ()
    assert set(void.missing) == {"a", "b"}


def test_the_minimum_that_a_person_gives_is_the_one_that_counts() -> None:
    """PC-036: a quorum of two holds for a round of three of which one updates."""
    world = fleet()
    for name, seconds in (("a", 1.0), ("b", 1e6), ("c", 1e6)):
        world.add(SimSite(name, world, model=taking(seconds)))
    pacing = Pacing(quorum=2, deadline_seconds=10.0, failed_rounds_max=1)
    world.submit("j", spec(pacing=pacing))
    settle(world)
    assert "1 usable of 3, the quorum is 2; b: not in; c: not in" in world.core.job("j").reason


@pytest.mark.parametrize(
    ("pacing", "says"),
    [
        ({"rule": "bsp"}, "late: round 1 closed at its deadline, after 20 s"),
        ({"rule": "ssp"}, "late: not in after 20 s"),
        ({"rule": "async"}, "late: not in after 20 s"),
        ({"rule": "buffered", "buffer": 2}, "late: not in after 20 s"),
    ],
    ids=str,
)
def test_a_task_that_expires_says_after_how_long(pacing: dict[str, Any], says: str) -> None:
    """PC-038: training 30 s, lifetime 20 s: the life of a task is the deadline that the job gave."""
    world = fleet()
    world.add(SimSite("a", world, model=taking(1.0)))
    world.add(SimSite("slow", world, model=taking(30.0)))
    given = Pacing(deadline_seconds=20.0, staleness=100, **pacing)
    world.submit("j", spec(sites=Sites(wanted=2), pacing=given, stop=Stop(seconds=50.0)))
    settle(world)
    told = [e.reason for e in events(world, j.UpdateSettled) if e.site == "slow"]
    assert told[0] == says


# Every span that ends a wait, set to 6 s (or to the given one), with a site that is slower.
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a round's deadline": (
        {},
        {"pacing": Pacing(deadline_seconds=6.0)},
        "train",
        "the update of slow, clock 0, is refused_drop: late: round 1 closed at its deadline, after 6 s",
    ),
    "a period's deadline": (
        {},
        {"pacing": Pacing(rule="ssp", deadline_seconds=6.0), "stop": Stop(versions=100)},
        "train",
        "the update of slow, clock 0, is refused_drop: late: not in after 6 s",
    ),
    "the lease": (
        {"lease_seconds": 6.0, "grace_seconds": 6.0},
        {},
        "silent",
        "slow takes part no more: not heard for 6.0 s, its lease has ended",
    ),
    "an evaluation": (
        {"evaluation_timeout_seconds": 6.0},
        {"evaluation": Evaluation(every=0)},
        "evaluate",
        "slow failed: no evaluation of version 2 in 6 s",
    ),
    "version 0": (
        {"init_timeout_seconds": 6.0},
        {},
        "build",
        "slow failed: no version 0 from it in 6 s",
    ),
    "the start": (
        {},
        {"sites": Sites(wanted=3), "pacing": Pacing(start_timeout_seconds=6.0)},
        "train",
        "the job is failed: waited 6 s in vain: 2 of 3 sites are ready",
    ),
    "the running time": (
        {},
        {"stop": Stop(seconds=6.0)},
        "train",
        "the job is draining: 6 s of running time were over",
    ),
}


class Slow(SimSite):
    """Answers, but never comes to do what it is asked in this one kind of message."""

    ignores: tuple[type, ...] = ()

    def receive(self, instruction: Instruction) -> None:
        if not isinstance(instruction, self.ignores):
            super().receive(instruction)


@pytest.mark.parametrize("limit", LIMITS)
def test_every_limit_can_be_set_and_says_who_what_and_how_long(
    limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """PC-040: a job never ends after a hidden 600 s (here 6) without a line that tells why."""
    config, over, cannot, says = LIMITS[limit]
    world = fleet(config=CoreConfig(**config))
    slow = Slow("slow", world, model=taking(1e6 if cannot == "train" else 1.0))
    slow.ignores = {"evaluate": (Evaluate,), "build": (Initialise,)}.get(cannot, ())
    world.add(slow)
    if cannot != "build":
        world.add(SimSite("a", world, model=taking(1.0)))
    wanted = Sites(wanted=len(world.sites))
    world.submit("j", spec(**{"sites": wanted, "stop": Stop(versions=2)} | over))
    if cannot == "silent":
        world.run(lambda: at_work(world))
        slow.frozen = True
    began = world.now
    with caplog.at_level("INFO", "coordinator.jobs"):
        world.run(lambda: says in _lines(world, caplog), seconds=30.0)
    assert world.now - began < 6.0 + 3.0


def _lines(world: Fleet, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the coordinator's log says of the journal so far."""
    caplog.clear()
    tell(entry.event for entry in world.journal)
    return caplog.messages

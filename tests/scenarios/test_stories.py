"""Stories with recorded output: `SKERRY_RECORD=1 ./run test tests/scenarios` writes them anew.

Each story is a short run of the whole coordinator; its journal, told in words, lies beside this
file and is read in review like any other text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.core import CoreConfig
from protocol.jobspec import Evaluation, JobSpec, Pacing, Period, Sites, Stop, TaskRef
from protocol.messages import Train
from simulation.bodies import MemoryFiles, vector_layout
from simulation.fakefold import FakeFold
from simulation.fleet import Fleet
from simulation.site import Period as Trained
from simulation.site import SimSite, SiteModel
from tests.scenarios.stories import tell

HERE = Path(__file__).parent


def fleet(**config: Any) -> Fleet:
    files = MemoryFiles()
    return Fleet(files, lambda: FakeFold(files), config=CoreConfig(**config))


def spec(**changes: Any) -> JobSpec:
    base: dict[str, Any] = {
        "name": "digits",
        "task": TaskRef(name="digits"),
        "period": Period(steps=10),
        "sites": Sites(wanted=3),
        "stop": Stop(versions=2),
        "evaluation": Evaluation(every=0, sites=False),
    }
    return JobSpec(**{**base, **changes})


def taking(seconds: float, *, failure: str = "", nan: bool = False) -> SiteModel:
    def model(site: str, train: Train, base: list[float]) -> Trained:
        delta = [float("nan") if nan else 1.0] * len(base)
        return Trained(seconds, delta, failure=failure)

    return model


def end(world: Fleet) -> Fleet:
    world.run(lambda: world.up and world.ended("j"))
    world.run_for(30)
    world.checkers.at_end(world.sites)
    return world


def all_sites_fail() -> Fleet:
    """Both agents raise in every period: the job fails with both reasons, nothing is counted."""
    world = fleet()
    for name in ("a", "b"):
        world.add(SimSite(name, world, model=taking(1.0, failure=f"{name} cannot allocate")))
    world.submit("j", spec(sites=Sites(wanted=2), pacing=Pacing(failed_rounds_max=2)))
    return end(world)


def killed_before_the_deadline() -> Fleet:
    """One of two dies after it fetched its task: the round closes with the other."""
    world = fleet()
    quick = world.add(SimSite("a", world, model=taking(2.0)))
    dead = world.add(SimSite("b", world, model=taking(100.0)))
    pacing = Pacing(deadline_seconds=10.0)
    world.submit("j", spec(sites=Sites(wanted=2), pacing=pacing, stop=Stop(versions=2)))
    world.run(lambda: dead.training is not None and quick.training is not None)
    dead.kill()
    world.cut(dead)
    return end(world)


def straggler_at_the_deadline() -> Fleet:
    """A slow site is aborted at the deadline, and is asked again with the next clock."""
    world = fleet()
    for name, seconds in (("a", 2.0), ("b", 2.0), ("slow", 30.0)):
        world.add(SimSite(name, world, model=taking(seconds)))
    world.submit("j", spec(pacing=Pacing(deadline_seconds=10.0)))
    return end(world)


def coordinator_dies_in_a_round() -> Fleet:
    """The coordinator is killed while one update is in and two sites train; nothing is repeated."""
    world = fleet()
    for name, seconds in (("a", 1.0), ("b", 4.0), ("c", 5.0)):
        world.add(SimSite(name, world, model=taking(seconds)))
    world.submit("j", spec())
    world.run(lambda: world.core.job("j").deliveries == 1)
    world.crash(20.0)
    return end(world)


def refused_and_declined() -> Fleet:
    """One owner does not allow the task, one has another model, one sends NaN: two remain."""
    world = fleet()
    world.add(SimSite("a", world))
    world.add(SimSite("b", world))
    world.add(SimSite("nan", world, model=taking(1.0, nan=True)))
    world.add(SimSite("other", world, layout=vector_layout(5)))
    world.add(SimSite("strict", world, declines="task 'digits' is not allowed here"))
    world.submit("j", spec(stop=Stop(versions=1)))
    return end(world)


def late_joiner_and_leaver() -> Fleet:
    """A third site joins in round 1 and takes part from round 2; it is lost and comes back."""
    world = fleet()
    for name in ("a", "b"):
        world.add(SimSite(name, world, model=taking(5.0)))
    world.submit("j", spec(sites=Sites(wanted=2), stop=Stop(versions=5)))
    world.run(lambda: world.core.job("j").round is not None)
    late = world.add(SimSite("c", world, model=taking(5.0)))
    world.run(lambda: world.core.job("j").number == 2)
    late.kill()
    world.cut(late)
    world.run_for(6.0)
    late.start()
    return end(world)


STORIES: list[Callable[[], Fleet]] = [
    all_sites_fail,
    killed_before_the_deadline,
    straggler_at_the_deadline,
    coordinator_dies_in_a_round,
    refused_and_declined,
    late_joiner_and_leaver,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_story_goes_as_recorded(story: Callable[[], Fleet]) -> None:
    path = HERE / f"{story.__name__}.txt"
    assert story.__doc__
    told = f"{story.__doc__.strip()}\n\n{tell(story())}"
    if os.environ.get("SKERRY_RECORD"):
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8")


def test_every_recorded_story_is_still_told() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == {story.__name__ for story in STORIES}

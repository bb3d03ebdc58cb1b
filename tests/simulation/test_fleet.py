"""The fleet: whole jobs in virtual time, with the checkers on after every event."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coordinator.core import CoreConfig
from protocol.jobspec import (
    Checkpoint,
    Evaluation,
    JobSpec,
    Keep,
    Pacing,
    Period,
    Server,
    Sites,
    Stop,
    TaskRef,
)
from protocol.messages import Train
from simulation.bodies import DiskFiles, MemoryFiles, decode, vector_layout
from simulation.fakefold import FakeFold
from simulation.faults import Faults
from simulation.fleet import Fleet
from simulation.site import Period as Trained
from simulation.site import SimSite, SiteModel, steady


def fleet(**kwargs: Any) -> Fleet:
    files = MemoryFiles()
    return Fleet(files, lambda: FakeFold(files), **kwargs)


def spec(**kwargs: Any) -> JobSpec:
    base: dict[str, Any] = {
        "name": "digits",
        "task": TaskRef(name="digits"),
        "period": Period(steps=10),
        "sites": Sites(wanted=3),
        "stop": Stop(versions=3),
        "seed": 7,
    }
    return JobSpec(**{**base, **kwargs})


def settle(world: Fleet) -> Fleet:
    """Run the job to its end, and everything after it."""
    world.run(lambda: world.up and world.ended("j"), seconds=5_000)
    world.run_for(60)
    world.checkers.at_end(world.sites)
    return world


def with_sites(world: Fleet, *names: str) -> Fleet:
    for name in names:
        world.add(SimSite(name, world))
    return world


def params(world: Fleet) -> list[float]:
    return decode(world.fetch("j", world.core.job("j").number))[1]


# ---------------------------------------------------------------- whole jobs


def test_a_job_runs_from_submission_to_finished() -> None:
    world = with_sites(fleet(), "a", "b", "c")
    world.submit("j", spec())
    settle(world)
    job = world.core.job("j")
    assert (job.state, job.number, job.checkpoint) == ("finished", 3, 3)
    assert [member.counted for member in job.members.values()] == [3, 3, 3]
    assert all(site.ended["j"].startswith("the job is finished") for site in world.sites.values())


def test_the_same_seed_gives_the_same_journal_twice() -> None:
    first, second = storm(11), storm(11)
    assert first.journal == second.journal
    assert first.clock.now == second.clock.now


def test_a_version_is_the_weighted_mean_of_its_cohort() -> None:
    world = fleet()
    for name, move, examples in (("a", 3.0, 100.0), ("b", 5.0, 300.0)):
        world.add(SimSite(name, world, model=moving(move, examples)))
    world.submit("j", spec(sites=Sites(wanted=2), stop=Stop(versions=1)))
    settle(world)
    assert params(world) == [4.5] * 4


def moving(by: float, examples: float = 100.0) -> SiteModel:
    def model(site: str, train: Train, base: list[float]) -> Trained:
        return Trained(1.0, [by] * len(base), examples)

    return model


def test_one_nan_is_left_out_and_the_site_goes_on_with_the_good_model() -> None:
    """PC-014: [1, nan], [3, 3], [5, 5] -> [4, 4] with one refusal, and all three next time."""

    def poisoned(site: str, train: Train, base: list[float]) -> Trained:
        bad = train.base.version == 0
        return Trained(1.0, [1.0, float("nan")] if bad else [4.0 - x for x in base])

    world = fleet()
    two = vector_layout(2)
    world.add(SimSite("a", world, model=poisoned, layout=two))
    world.add(SimSite("b", world, model=moving(3.0), layout=two))
    world.add(SimSite("c", world, model=moving(5.0), layout=two))
    world.submit("j", spec(stop=Stop(versions=2), keep=Keep(versions=5)))
    settle(world)
    assert decode(world.fetch("j", 1))[1] == [4.0, 4.0]
    counts = {m.site: (m.counted, m.refused) for m in world.core.job("j").members.values()}
    assert counts == {"a": (1, 1), "b": (2, 0), "c": (2, 0)}


def test_zero_examples_everywhere_leave_the_model_where_it_was() -> None:
    """PC-013: [1, 2] and [3, 4] with 0 examples each: the previous model is kept, never NaN."""
    world = fleet()
    world.add(SimSite("a", world, model=moving(1.0, 0.0)))
    world.add(SimSite("b", world, model=moving(3.0, 0.0)))
    world.submit("j", spec(sites=Sites(wanted=2), pacing=Pacing(failed_rounds_max=2)))
    settle(world)
    job = world.core.job("j")
    assert (job.state, job.number) == ("failed", 0)
    assert "no usable contribution" in job.reason
    assert params(world) == [0.0] * 4


def test_two_agents_with_one_name_never_flap() -> None:
    """PC-033: a second process of the same name is refused until the first is dead, then let in."""
    world = fleet(config=CoreConfig(lease_seconds=5.0))
    first = world.add(SimSite("a", world))
    world.run_for(1.0)
    first.kill()  # its connection stays half open: nobody tells the coordinator
    first.start()
    world.run_for(3.0)
    assert any("last heard" in reason for reason in first.refusals)
    world.run(lambda: first.connected, seconds=3.0)
    assert 5.0 <= world.now <= 7.0


@pytest.mark.parametrize("crash_at", [8, 20, 26, 31, 40, 47])
def test_a_crash_at_any_point_gives_the_same_model_bit_for_bit(crash_at: int) -> None:
    """PC-078: killed somewhere in six rounds of three agents; six versions, the same bits."""
    calm = with_sites(fleet(), "a", "b", "c")
    calm.submit("j", spec(stop=Stop(versions=6)))
    settle(calm)
    faults = Faults(crash_at=frozenset({crash_at}), down_seconds=3.0)
    world = with_sites(fleet(faults=faults), "a", "b", "c")
    world.submit("j", spec(stop=Stop(versions=6)))
    settle(world)
    assert world.crashes == 1
    assert world.core.job("j").version == calm.core.job("j").version


@pytest.mark.parametrize("optimizer", ["average", "nesterov"])
def test_the_real_fold_process_gives_the_same_model_through_crashes(
    tmp_path: Path, optimizer: str
) -> None:
    fold = pytest.importorskip("coordinator.fold")

    def make(name: str, faults: Faults) -> Fleet:
        files = DiskFiles(tmp_path / name)
        world = with_sites(Fleet(files, fold.FoldService, faults=faults), "a", "b", "c")
        server = Server(optimizer=optimizer)  # type: ignore[arg-type]
        world.submit(
            "j", spec(server=server, stop=Stop(versions=6), checkpoint=Checkpoint(every=2))
        )
        return settle(world)

    calm = make("calm", Faults())
    rough = make("rough", Faults(crash_at=frozenset({18, 33, 41, 52}), down_seconds=2.0))
    assert rough.crashes == 4
    assert calm.core.job("j").state == rough.core.job("j").state == "finished"
    assert calm.core.job("j").version == rough.core.job("j").version


def test_ten_restarts_in_ten_rounds_make_ten_rounds() -> None:
    """PC-079: coordinator, agents, or all of them restart ten times; ten versions are made."""
    world = with_sites(fleet(), "a", "b", "c")
    world.submit("j", spec(stop=Stop(versions=10), sites=Sites(wanted=3)))
    for turn in range(10):
        world.run(lambda turn=turn: world.up and world.core.job("j").number >= turn)  # type: ignore[misc]
        if turn % 3 != 1:
            world.crash(1.0)
        if turn % 3 != 0:
            for site in world.sites.values():
                site.kill()
                world.cut(site)
                world.clock.after(0.5, site.start)
        world.run_for(0.2)
    settle(world)
    job = world.core.job("j")
    assert (job.state, job.number) == ("finished", 10)
    assert len(job.members) == 3


# ---------------------------------------------------------------- random storms


def unreliable(seed: int) -> SiteModel:
    """A site model that is slow, fails, or sends NaN now and then, by seed."""

    def model(site: str, train: Train, base: list[float]) -> Trained:
        random = Random(f"{seed} {site} {train.epoch} {train.clock} {train.attempt}")
        done = steady(site, train, base)
        done.seconds = random.choice([0.2, 1.0, 3.0, 30.0])
        if random.random() < 0.15:
            done.failure, done.fatal = "out of memory", random.random() < 0.2
        elif random.random() < 0.1:
            done.delta[0] = float("nan")
        elif random.random() < 0.05:
            done.examples = 0.0
        return done

    return model


def storm(seed: int) -> Fleet:
    """One short job with random sites, faults, kills and commands."""
    random = Random(seed)
    crashes = frozenset(random.sample(range(1, 120), random.randint(0, 6)))
    faults = Faults(
        seed=seed,
        delay_seconds_max=random.choice([0.0, 0.5, 3.0]),
        repeat=random.choice([0.0, 0.3]),
        crash_at=crashes,
        down_seconds=random.choice([0.5, 4.0, 40.0]),
    )
    world = fleet(faults=faults, config=CoreConfig(evaluation_timeout_seconds=20.0))
    count = random.randint(2, 4)
    names = [f"site-{index}" for index in range(count)]
    for name in names:
        examples = random.choice([100, 100, 100, 0])
        world.clock.at(
            random.uniform(0, 3),
            adder(world, SimSite(name, world, model=unreliable(seed), train_examples=examples)),
        )
    if random.random() < 0.5:
        world.add(SimSite("eva", world, role="evaluator"))
    pacing = Pacing(
        quorum=random.choice([0, 1, 2]),
        deadline_seconds=random.choice([5.0, 60.0]),
        failed_rounds_max=random.choice([1, 3]),
        start_timeout_seconds=300.0,
    )
    job = spec(
        seed=seed,
        sites=Sites(wanted=random.randint(1, count), select=random.choice([0, 0, 2])),
        pacing=pacing,
        stop=Stop(versions=random.randint(1, 5)),
        evaluation=Evaluation(every=random.choice([0, 1, 2])),
    )
    while not world.up or "j" not in world.core.jobs():
        if world.up:
            world.submit("j", job)
        else:
            world.clock.step()
    for _ in range(random.randint(0, 4)):
        world.clock.at(random.uniform(2, 60), lambda: disturb(world, random))
    world.run(lambda: world.up and world.ended("j"), seconds=5_000)
    world.run_for(60)
    return world


def adder(world: Fleet, site: SimSite) -> Callable[[], None]:
    def add() -> None:
        world.add(site)

    return add


def disturb(world: Fleet, random: Random) -> None:
    what = random.choice(["kill", "kill", "freeze", "pause", "crash", "stop", "drain"])
    sites = [site for site in world.sites.values() if site.running and not site.frozen]
    site = random.choice(sites) if sites else None
    job = world.core.job("j") if world.up else None
    if what == "kill" and site:
        site.kill()
        world.cut(site)
        world.clock.after(random.choice([0.5, 10.0]), site.start)
    elif what == "freeze" and site:
        site.frozen = True

        def thaw() -> None:
            site.frozen = False

        world.clock.after(random.choice([5.0, 40.0]), thaw)
    elif what == "pause" and job and job.state == "running":
        world.command("j", "pause")
        world.clock.after(20.0, lambda: resume(world))
    elif what == "crash" and world.up:
        world.crash(2.0)
    elif what in ("stop", "drain") and job and job.state == "running" and random.random() < 0.3:
        world.command("j", what)  # type: ignore[arg-type]


def resume(world: Fleet) -> None:
    if world.up and world.core.job("j").state == "paused":
        world.command("j", "resume")
    if not world.up:  # it was down, or went down on this very command
        world.clock.after(1.0, lambda: resume(world))


@pytest.mark.parametrize("block", range(8))
def test_invariants_hold_in_random_storms(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        try:
            world = storm(seed)
            world.checkers.at_end(world.sites)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error

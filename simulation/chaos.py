"""Fault plans: a seed gives a job, sites, and everything that goes wrong; the same seed, the same.

A plan is values, so that it can be printed and read. What happens: delayed, repeated and reordered
messages; crashes of the coordinator at any of its actions; sites that die and return, that stand
still (a partition, as the coordinator sees it), that are slow, fail or send NaN; commits that fail;
a full disk; pause and resume. The checkers look at every journal entry; at the end every clock is
settled, site and journal agree about every update, and the model is what its updates add up to.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final, Literal

import msgspec

from coordinator import stimuli as s
from coordinator.core import CoreConfig
from coordinator.journal import CohortMember, RoundClosed, VersionMade
from protocol.jobspec import Evaluation, JobSpec, Pacing, Period, Sites, Stop, TaskRef
from protocol.messages import Train
from simulation import site as sites
from simulation.bodies import MemoryFiles, decode
from simulation.fakefold import FakeFold
from simulation.faults import Faults
from simulation.fleet import Fleet
from simulation.site import Identity, SimSite

JOB: Final = "j"
SECONDS_MAX: Final = 20_000.0
What = Literal["die", "freeze", "crash", "pause", "fold", "disk"]


class SitePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A site: how long a period takes it, and how often one comes to nothing or to nonsense."""

    name: str
    seconds: float
    straggles: float  # chance that a period takes ten times as long
    fails: float
    poisons: float
    joins_at: float


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong at a time, for a while. Times in virtual seconds."""

    at: float
    what: What
    site: str
    seconds: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    seed: int
    spec: JobSpec
    sites: tuple[SitePlan, ...]
    troubles: tuple[Trouble, ...]
    delay_seconds_max: float
    repeat: float
    crash_at: tuple[int, ...]
    down_seconds: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a plan. `violation` empty: every promise held."""

    seed: int
    events: int
    state: str
    versions: int
    violation: str


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(f"chaos {seed}")  # noqa: S311  plans need no secrets
    names = [f"site-{k}" for k in range(random.randint(2, 5))]
    troubles = [
        Trouble(
            at=random.uniform(1.0, 90.0),
            what=random.choice(["die", "die", "freeze", "crash", "pause", "fold", "disk"]),
            site=random.choice(names),
            seconds=random.choice([0.5, 4.0, 20.0, 45.0]),
        )
        for _ in range(random.randint(0, 6))
    ]
    return Plan(
        seed=seed,
        spec=JobSpec(
            name="chaos",
            task=TaskRef(name="t"),
            seed=seed,
            period=Period(steps=10),
            sites=Sites(wanted=random.randint(1, len(names))),
            pacing=_pacing(random, len(names)),
            stop=Stop(versions=random.randint(1, 15)),
            evaluation=Evaluation(every=random.choice([0, 1, 3])),
        ),
        sites=tuple(
            SitePlan(
                name=name,
                seconds=random.choice([0.3, 1.0, 3.0]),
                straggles=random.choice([0.0, 0.1]),
                fails=random.choice([0.0, 0.0, 0.1]),
                poisons=random.choice([0.0, 0.0, 0.1]),
                joins_at=random.choice([0.0, 0.0, 5.0, 30.0]),
            )
            for name in names
        ),
        troubles=tuple(sorted(troubles, key=lambda trouble: trouble.at)),
        delay_seconds_max=random.choice([0.0, 0.3, 2.0]),
        repeat=random.choice([0.0, 0.2]),
        crash_at=tuple(sorted(random.sample(range(5, 400), random.randint(0, 4)))),
        down_seconds=random.choice([0.5, 4.0, 40.0]),
    )


def _pacing(random: Random, sites: int) -> Pacing:
    rule = random.choice(["bsp", "ssp", "async", "buffered"])
    common: dict[str, Any] = {
        "rule": rule,
        "deadline_seconds": random.choice([5.0, 60.0]),
        "failed_rounds_max": random.choice([3, 50]),
        "start_timeout_seconds": 600.0,
    }
    by_rule: dict[str, dict[str, Any]] = {
        "bsp": {
            "first": random.choice([0, 0, 1]),
            "late": random.choice(["drop", "return", "fold"]),
            "deadline": random.choice(["fixed", "measured"]),
        },
        "ssp": {
            "staleness": random.randrange(4),
            "reads": random.choice(["eager", "pinned"]),
        },
        "async": {"staleness": random.choice([2, 10])},
        "buffered": {
            "buffer": random.randint(1, sites),
            "one_per_site": random.random() < 0.5,
            "concurrency": random.choice([0, 0, 2]),
        },
    }
    chosen = by_rule[rule]
    if rule == "ssp" and random.random() < 0.3:
        chosen = {"unseen_mass": random.choice([0.1, 1.0])}
    return msgspec.convert(common | chosen, Pacing)


# ---------------------------------------------------------------- running one


def run(plan: Plan) -> Outcome:
    """Run a plan to its end. A broken promise is in the outcome, not an exception."""
    files = MemoryFiles()
    world = Fleet(
        files,
        lambda: FakeFold(files),
        config=CoreConfig(evaluation_timeout_seconds=20.0),
        faults=Faults(
            seed=plan.seed,
            delay_seconds_max=plan.delay_seconds_max,
            repeat=plan.repeat,
            crash_at=frozenset(plan.crash_at),
            down_seconds=plan.down_seconds,
        ),
    )
    made: dict[tuple[str, Identity], list[float]] = {}
    violation = ""
    try:
        _begin(world, plan, made)
        world.run(lambda: world.up and world.ended(JOB), seconds=SECONDS_MAX)
        world.run_for(120.0)
        world.checkers.at_end(world.sites)
        _check_model(world, made)
    except AssertionError as error:
        violation = str(error) or "an assertion without words"
    job = world.core.job(JOB) if JOB in world.core.jobs() else None
    return Outcome(
        seed=plan.seed,
        events=world.clock.made,
        state=job.state if job is not None else "never submitted",
        versions=job.number if job is not None else -1,
        violation=violation,
    )


def _begin(world: Fleet, plan: Plan, made: dict[tuple[str, Identity], list[float]]) -> None:
    for chosen in plan.sites:

        def join(chosen: SitePlan = chosen) -> None:
            world.add(SimSite(chosen.name, world, model=_model(plan.seed, chosen, made)))

        world.clock.at(chosen.joins_at, join)
    for trouble in plan.troubles:

        def strike(trouble: Trouble = trouble) -> None:
            _strike(world, trouble)

        world.clock.at(trouble.at, strike)
    while not world.up or JOB not in world.core.jobs():  # it may go down on this very request
        if world.up:
            world.submit(JOB, plan.spec)
        else:
            world.clock.step()


def _model(
    seed: int, plan: SitePlan, made: dict[tuple[str, Identity], list[float]]
) -> sites.SiteModel:
    def model(site: str, train: Train, base: list[float]) -> sites.Period:
        random = Random(f"{seed} {site} {train.epoch} {train.clock} {train.attempt}")  # noqa: S311
        done = sites.steady(site, train, base)
        done.seconds = plan.seconds * (10.0 if random.random() < plan.straggles else 1.0)
        if random.random() < plan.fails:
            done.failure = "out of memory"
        elif random.random() < plan.poisons:
            done.delta[0] = float("nan")
        made[site, Identity(train.job, train.epoch, train.clock)] = done.delta
        return done

    return model


def _strike(world: Fleet, trouble: Trouble) -> None:
    site = world.sites.get(trouble.site)
    over = trouble.seconds
    match trouble.what:
        case "die" if site is not None and site.running:
            site.kill()
            world.cut(site)
            world.clock.after(over, site.start)
        case "freeze" if site is not None and site.running and not site.frozen:
            site.frozen = True
            world.clock.after(over, lambda: setattr(site, "frozen", False))
        case "crash" if world.up:
            world.crash(over)
        case "pause" if world.up and world.core.job(JOB).state == "running":
            world.command(JOB, "pause")
            world.clock.after(over, lambda: _resume(world))
        case "fold" if isinstance(world.fold, FakeFold):
            fold = world.fold
            fold.problem = "the mean update is not finite"
            world.clock.after(over, lambda: setattr(fold, "problem", ""))
        case "disk":
            world.stimulate(s.DiskState(full=True, reason="no space left"))
            world.clock.after(over, lambda: _room(world))
        case _:
            pass


def _resume(world: Fleet) -> None:
    if not world.up or (
        world.core.job(JOB).state == "paused"
        and not (world.stimulate(s.JobCommand(job=JOB, stimulus="resume", by="chaos")))
    ):
        world.clock.after(1.0, lambda: _resume(world))


def _room(world: Fleet) -> None:
    if not world.stimulate(s.DiskState(full=False)):
        world.clock.after(1.0, lambda: _room(world))


def _check_model(world: Fleet, made: dict[tuple[str, Identity], list[float]]) -> None:
    """The newest model is version 0 plus what was counted, each update once, with its weight."""
    closed: dict[int, RoundClosed] = {}
    total: list[float] | None = None
    newest = 0
    for entry in world.journal:
        match entry.event:
            case RoundClosed(cohort=cohort, version=version) if cohort:
                closed[version] = entry.event
            case VersionMade(version=version) if version:
                newest, by = version, closed[version]
                for part, weight in zip(by.cohort, _weights(by), strict=True):
                    delta = made[part.site, Identity(JOB, part.epoch, part.clock)]
                    total = total or [0.0] * len(delta)
                    total = [t + weight * d for t, d in zip(total, delta, strict=True)]
            case _:
                pass
    if total is None:
        return
    _, params = decode(world.fetch(JOB, newest))
    apart = max(abs(x - t) for x, t in zip(params, total, strict=True))
    assert apart <= 1e-4 * max(1.0, *map(abs, total)), f"the model is {apart} off its updates"


def _weights(closed: RoundClosed) -> list[float]:
    def weight(part: CohortMember) -> float:
        return part.weight if closed.additive else part.examples / total

    total = sum(part.examples for part in closed.cohort)
    return [weight(part) for part in closed.cohort]

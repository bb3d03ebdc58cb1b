"""The rules without rounds as pure functions; whole jobs are in tests/simulation/test_pacing.py."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from coordinator import journal as j
from coordinator import streaming
from coordinator.job import MOVES_MAX, Job, Round, evolve, submitted
from protocol.jobspec import JobSpec, Pacing, Period, Sites, Stop, TaskRef, Weights
from protocol.messages import VersionRef

DIGEST = "0" * 64


def world(
    clocks: dict[str, int],
    pacing: Pacing,
    examples: dict[str, int] | None = None,
    *,
    steps: int = 1,
) -> Job:
    """A running job whose sites are at these clocks, with nothing under way."""
    spec = JobSpec(
        name="n",
        task=TaskRef(name="t"),
        period=Period(steps=steps),
        sites=Sites(wanted=len(clocks)),
        stop=Stop(versions=10**6),
        pacing=pacing,
        weights=Weights(by="equal" if examples is None else "examples"),
    )
    job = submitted(j.JobSubmitted(job="j", spec=spec, by="me"), 0.0)
    job.state = "running"
    job.version = VersionRef(version=0, digest=DIGEST, bytes=1)
    job.round = Round(number=1, version=0, deadline=0.0, tasks={}, left_out=())
    job.rounds = 1
    for site, clock in clocks.items():
        entered = j.SiteEntered(
            job="j",
            site=site,
            role="site",
            epoch=1,
            clock=clock,
            train_examples=(examples or {}).get(site, 10),
            eval_examples=0,
            layout_digest="",
        )
        evolve(job, entered, 0.0)
    return job


def go(job: Job, now: float = 0.0) -> list[str]:
    """Let those go on who may; their names."""
    found = streaming.going(job, now)
    for event in found.opened:
        evolve(job, event, now)
    return [event.task.site for event in found.opened]


def arrive(job: Job, site: str, now: float = 0.0, norm: float = 1.0) -> None:
    """The update of a site that is at work comes in."""
    assert job.round is not None
    task = job.round.tasks[site]
    event = j.UpdateSettled(
        job="j",
        site=site,
        epoch=task.epoch,
        clock=task.clock,
        attempt=1,
        verdict="queued",
        reason="",
        spool=f"{site}-{task.clock}",
        norm=norm,
    )
    evolve(job, event, now)


def made(job: Job, now: float = 0.0, *, model_norm: float = 1.0) -> j.RoundClosed | None:
    """Make the next version, if one is due."""
    closed = streaming.commit(job, now)
    if closed is None:
        return None
    evolve(job, closed, now)
    moved = sum(part.weight * part.norm for part in closed.cohort)
    version = j.VersionMade(
        job="j",
        version=closed.version,
        digest=DIGEST,
        bytes=1,
        update_norm=moved,
        model_norm=model_norm,
    )
    evolve(job, version, now)
    return closed


def test_the_bound_is_on_the_distance_to_the_slowest_site() -> None:
    """PC-042: bound 2: clocks 7, 5, 5 may begin; 8, 5, 5 waits until the slowest is at 6."""
    pacing = Pacing(rule="ssp", staleness=2)
    assert "a" in go(world({"a": 7, "b": 5, "c": 5}, pacing))
    ahead = world({"a": 8, "b": 5, "c": 5}, pacing)
    assert go(ahead) == ["b", "c"]
    assert streaming.going(ahead, 0.0).waits["a"].startswith("clock 8, slowest is b at clock 5")
    for site in ("b", "c"):
        assert "a" not in go(ahead)
        arrive(ahead, site)
        made(ahead)
    assert "a" in go(ahead)


def test_an_update_counts_as_seen_when_its_version_is_made_and_not_before() -> None:
    job = world({"a": 1, "b": 0}, Pacing(rule="ssp", staleness=0))
    assert go(job) == ["b"]
    arrive(job, "b")
    assert go(job) == []  # a waits for b's version, b for its own
    assert streaming.going(job, 0.0).waits["b"] == "its update of clock 0 is being folded"
    made(job)
    assert go(job) == ["a", "b"]


@pytest.mark.parametrize("reads", ["eager", "pinned"])
def test_what_a_site_left_behind_is_waited_for_like_everything_else(reads: Any) -> None:
    """A site leaves with an update in the queue: who goes on has it in its base, should b be back."""
    job = world({"a": 2, "b": 1}, Pacing(rule="ssp", staleness=0, reads=reads))
    assert go(job) == ["b"]
    arrive(job, "b")
    evolve(job, j.SiteEnded(job="j", site="b", epoch=1, reason="gone"), 0.0)
    assert go(job) == []
    assert streaming.going(job, 0.0).waits["a"].startswith("clock 2, slowest is b at clock 1, stal")
    made(job)
    assert go(job) == ["a"]
    task = job.task("a")
    assert task is not None
    assert task.base is not None
    assert task.base.version == 1


def test_the_read_rule_holds_over_random_schedules() -> None:
    """SSP: a read at clock c sees every update stamped <= c - s - 1 and its own latest; 1e5 random
    schedules of arrivals and commits, by a book that knows only what went in and out.
    """
    random, reads = Random(3), 0
    sites = ("a", "b", "c")
    for _ in range(100_000):
        bound = random.randrange(3)
        job = world(dict.fromkeys(sites, 0), Pacing(rule="ssp", staleness=bound))
        arrived: dict[tuple[str, int], int] = {}  # update -> version that holds it, or a late one
        for _ in range(7):
            for event in streaming.going(job, 0.0).opened:
                reads += 1
                clock, base = event.task.clock, event.base.version
                for site in sites:
                    newest = clock - bound - 1 if site != event.task.site else clock - 1
                    assert all(arrived[site, c] <= base for c in range(newest + 1))
                evolve(job, event, 0.0)
            assert job.round is not None
            at_work = job.round.sites("training")
            if at_work and (random.random() < 0.7 or not job.queue):
                site = random.choice(at_work)
                arrived[site, job.round.tasks[site].clock] = 10**9
                arrive(job, site)
            elif closed := made(job):
                for part in closed.cohort:
                    arrived[part.site, part.clock] = closed.version
    assert reads >= 500_000


def test_async_is_told_how_old_an_update_will_be_when_it_is_applied() -> None:
    job = world({"a": 0, "b": 0, "c": 0}, Pacing(rule="async", staleness=1))
    assert go(job) == ["a", "b", "c"]
    assert streaming.staleness(job, 0) == 0
    arrive(job, "a")
    assert streaming.staleness(job, 0) == 1  # a's comes first
    assert streaming.stale(job, 0) == ""
    arrive(job, "b")
    assert streaming.stale(job, 0) == "2 versions old (from version 0), pacing.staleness allows 1"
    assert list(streaming.overdue(job, 0.0)) == ["c"]


def test_coefficients_are_shares_of_the_active_sites() -> None:
    job = world({"a": 0, "b": 0}, Pacing(rule="ssp"), {"a": 100, "b": 300})
    assert streaming.weights(job) == {"a": 0.25, "b": 0.75}
    go(job)
    arrive(job, "b")
    left = j.SiteEnded(job="j", site="b", epoch=1, reason="it left after its update was taken")
    evolve(job, left, 0.0)
    closed = made(job)
    assert closed is not None
    assert [part.weight for part in closed.cohort] == [0.75]


def test_unseen_mass_adds_up_what_was_made_what_waits_and_what_is_under_way() -> None:
    job = world({"a": 0, "b": 0}, Pacing(rule="ssp", unseen_mass=0.5))
    go(job)
    for _ in range(3):
        arrive(job, "a", norm=0.4)  # weighs 0.2 of a model of norm 1
        made(job)
        if go(job) != ["a"]:
            break
    # b, at work since version 0, has not seen 0.2 + 0.2; a third would make it 0.6.
    assert job.number == 2
    assert (
        "b, at work since version 0, would have 0.6 unseen, the bound is 0.5"
        in (streaming.going(job, 0.0).waits["a"])
    )
    arrive(job, "b", norm=0.4)
    made(job)
    assert go(job) == ["a", "b"]


def test_a_site_waits_too_when_it_would_itself_have_too_much_unseen() -> None:
    """Two weigh 0.4 each, c little: nobody at work minds c, but c would miss 0.8."""
    job = world({"a": 0, "b": 0, "c": 0}, Pacing(rule="ssp", unseen_mass=0.5))
    job.model_norm = 1.0
    for site, norm in (("a", 1.2), ("b", 1.2), ("c", 0.15)):
        job.members[site].norm = norm
    assert go(job) == ["a", "b"]
    why = streaming.going(job, 0.0).waits["c"]
    assert why == "it would have 0.8 unseen, the bound is 0.5 (0.5 of the model's norm)"
    arrive(job, "a", norm=1.2)
    made(job)
    assert go(job) == ["c"]


def test_mass_that_is_no_longer_remembered_is_not_taken_for_none() -> None:
    job = world({"a": 0, "b": 0}, Pacing(rule="ssp", unseen_mass=1e6))
    go(job)
    for _ in range(MOVES_MAX + 1):
        arrive(job, "a", norm=1e-9)
        made(job)
        assert go(job) == (["a"] if job.number <= MOVES_MAX else [])
    why = streaming.going(job, 0.0).waits["a"]
    assert why == "b, at work since version 0, is 257 versions behind, more than are remembered"


def test_a_buffer_without_a_quorum_at_its_deadline_makes_no_version() -> None:
    pacing = Pacing(rule="buffered", buffer=4, quorum=3, one_per_site=True, deadline_seconds=9.0)
    job = world({"a": 0, "b": 0}, pacing)
    go(job)
    arrive(job, "a", 1.0)
    arrive(job, "b", 2.0)
    assert (streaming.commit(job, 9.9), streaming.too_few(job, 9.9)) == (None, "")
    assert streaming.commit(job, 10.0) is None
    said = "the buffer's deadline came with 2 of 4, the quorum is 3"
    assert streaming.too_few(job, 10.0) == said


@pytest.mark.parametrize(("one", "waits"), [(True, ["a", "b"]), (False, [])])
def test_one_per_site_decides_whether_a_fast_site_waits(one: bool, waits: list[str]) -> None:
    pacing = Pacing(rule="buffered", buffer=3, one_per_site=one)
    job = world({"a": 0, "b": 0, "c": 0}, pacing)
    go(job)
    arrive(job, "a")
    arrive(job, "b")
    assert sorted(streaming.going(job, 0.0).waits) == waits


def test_a_pinned_read_is_the_oldest_version_that_the_bound_allows() -> None:
    pinned: Any = Pacing(rule="ssp", staleness=1, reads="pinned")
    job = world({"a": 0, "b": 0, "c": 0}, pinned)
    for site in ("a", "b", "c", "a", "b"):
        go(job)
        arrive(job, site)
        made(job)
    go(job)
    assert job.round is not None
    tasks = job.round.tasks
    bases = {site: task.base.version for site, task in tasks.items() if task.base is not None}
    # At clock 2 everybody's clock 0 is needed: version 3. c, at clock 1, needs its own: version 3.
    assert bases["c"] == 3
    assert bases["a"] == 4  # its own latest is in version 4
    assert bases["b"] == 5

"""Sized periods: H by site from measured speed."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import journal as j
from coordinator import periods
from coordinator.job import Job, evolve
from coordinator.round import opening
from protocol.jobspec import Pacing
from tests.coordinator.test_streaming import go, world


def measured(paces: dict[str, tuple[float, float]], **pacing: Any) -> Job:
    """A job with H = 10 whose sites' last periods took (seconds per step, seconds beside)."""
    job = world(dict.fromkeys(paces, 0), Pacing(rule="async", **pacing), steps=10)
    for site, (step, comm) in paces.items():
        job.members[site].step_seconds = (step,) if step else ()
        job.members[site].comm_seconds = comm if step else None
    return job


def test_with_esync_all_arrive_when_the_slowest_does() -> None:
    """T = max(10 x 1 + 2, 10 x 0.5 + 1, 10 x 0.25 + 4) = 12 s."""
    paces = {"slow": (1.0, 2.0), "fast": (0.5, 1.0), "far": (0.25, 4.0)}
    job = measured(paces, periods="esync")
    found = periods.sizes(job)
    assert found == {"slow": 10, "fast": 22, "far": 32}
    for site, (step, comm) in paces.items():
        assert 12.0 - step < found[site] * step + comm <= 12.0


def test_a_link_that_is_slow_can_be_what_the_others_wait_for() -> None:
    job = measured({"far": (0.1, 30.0), "near": (1.0, 0.0)}, periods="esync", steps_max=1000)
    assert periods.sizes(job) == {"far": 10, "near": 31}


@pytest.mark.parametrize(("given", "most"), [(0, 40), (15, 15)])
def test_no_period_is_longer_than_its_limit(given: int, most: int) -> None:
    job = measured({"a": (0.001, 0.0), "b": (1.0, 0.0)}, periods="esync", steps_max=given)
    assert periods.sizes(job) == {"a": most, "b": 10}


def test_with_dylu_the_fastest_takes_h_and_nobody_takes_none() -> None:
    paces = {"a": (0.5, 9.0), "b": (1.0, 0.0), "c": (0.7, 0.0), "d": (50.0, 0.0)}
    assert periods.sizes(measured(paces, periods="dylu")) == {"a": 10, "b": 5, "c": 7, "d": 1}


def test_equal_speeds_give_equal_periods_whatever_rounding_does() -> None:
    paces = dict.fromkeys("abc", (0.1, 0.3))
    for rule in ("esync", "dylu"):
        assert set(periods.sizes(measured(paces, periods=rule)).values()) == {10}


def test_who_was_not_measured_takes_what_the_job_says() -> None:
    job = measured({"new": (0.0, 0.0), "b": (1.0, 0.0)}, periods="esync")
    assert periods.sizes(job) == {"b": 10}
    assert periods.sizes(measured({"new": (0.0, 0.0)}, periods="esync")) == {}
    assert periods.sizes(measured({"a": (1.0, 0.0)}, periods="equal")) == {}


def settled(job: Job, train_seconds: float, seconds: float, steps: int = 10) -> None:
    task = job.task("a")
    assert task is not None
    event = j.UpdateSettled(
        job="j",
        site="a",
        epoch=1,
        clock=task.clock,
        attempt=1,
        verdict="queued",
        reason="",
        spool=f"a-{task.clock}",
        train_seconds=train_seconds,
        seconds=seconds,
        steps=steps,
    )
    evolve(job, event, 0.0)


def test_speed_is_the_median_of_the_newest_periods_so_one_straggler_changes_nothing() -> None:
    job = world({"a": 0}, Pacing(rule="async", periods="esync"), steps=10)
    for seconds in (10.0, 10.0, 50.0, 10.0):
        job.queue = ()
        assert go(job) == ["a"]
        settled(job, seconds, seconds + 2.0)
    assert job.members["a"].step_seconds == (1.0, 1.0, 5.0, 1.0)
    assert job.members["a"].comm_seconds == 2.0
    assert periods.sizes(job) == {"a": 10}
    for _ in range(9):
        job.queue = ()
        go(job)
        settled(job, 20.0, 22.0)
    assert job.members["a"].step_seconds == (2.0,) * 5  # it forgets what was long ago


def test_a_site_keeps_its_speed_when_it_comes_back() -> None:
    job = measured({"a": (1.0, 2.0), "b": (0.5, 1.0)}, periods="esync")
    job.roster.leave(job.members["b"])
    job.members["b"].active = False
    assert periods.sizes(job) == {"a": 10}
    back = j.SiteEntered(
        job="j",
        site="b",
        role="site",
        epoch=2,
        clock=0,
        train_examples=10,
        eval_examples=0,
        layout_digest="",
    )
    evolve(job, back, 0.0)
    assert periods.sizes(job) == {"a": 10, "b": 22}


def test_the_numbers_stand_in_the_journal_and_reach_the_task() -> None:
    job = measured({"a": (1.0, 2.0), "b": (0.5, 1.0)}, periods="esync")
    assert go(job) == ["a", "b"]
    assert {site: job.task(site).steps for site in "ab"} == {"a": 10, "b": 22}  # type: ignore[union-attr]
    rounds = world({"a": 0, "b": 0}, Pacing(periods="dylu"), steps=10)
    rounds.round = None
    rounds.members["a"].step_seconds = (1.0,)
    rounds.members["b"].step_seconds = (4.0,)
    event = opening(rounds, 0.0)
    assert isinstance(event, j.RoundOpened)
    assert {task.site: task.steps for task in event.tasks} == {"a": 10, "b": 2}

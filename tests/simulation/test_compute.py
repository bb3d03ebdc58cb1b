"""Step times have the distribution, the stragglers and the changes that were asked for."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile
from statistics import fmean, median, stdev

import pytest

from simulation.compute import Availability, Change, Compute, ComputeSpec


def seconds(
    spec: ComputeSpec, *, steps: int = 10, count: int = 400, at: float = 0.0
) -> list[float]:
    compute = Compute(spec, seed=1, site="a")
    return [compute.plan(clock, steps, at=at).seconds for clock in range(count)]


@pytest.mark.parametrize("steps", [10, 1000])
def test_steps_are_log_normal_whether_drawn_one_by_one_or_as_a_sum(steps: int) -> None:
    found = seconds(ComputeSpec(step_seconds=0.2, spread=0.3), steps=steps)
    assert fmean(found) / steps == pytest.approx(0.2 * 1.0460, rel=0.02)
    assert stdev(found) / steps**0.5 == pytest.approx(0.2 * 0.3210, rel=0.15)


def test_a_share_of_periods_straggles_and_a_slow_site_always_does() -> None:
    usual = seconds(ComputeSpec(spread=0.05))
    found = seconds(ComputeSpec(spread=0.05, straggle_share=0.1, straggle_factor=5.0), count=2000)
    slow = [one for one in found if one > 3 * median(usual)]
    assert len(slow) / len(found) == pytest.approx(0.1, abs=0.02)
    assert median(slow) / median(usual) == pytest.approx(5.0, rel=0.05)
    twice = seconds(ComputeSpec(spread=0.05, slow=2.0))
    assert [a / b for a, b in zip(twice, usual, strict=True)] == pytest.approx([2.0] * 400)


def test_a_regime_changes_at_its_time() -> None:
    spec = ComputeSpec(
        spread=0.0,
        changes=(Change(at=200.0, straggle_share=1.0), Change(at=100.0, factor=3.0)),
    )
    before, after, last = (seconds(spec, at=at)[0] for at in (99.0, 100.0, 200.0))
    assert (before, after, last) == pytest.approx((1.0, 3.0, 5.0))


def test_a_box_ends_a_period_at_the_step_that_passes_it() -> None:
    compute = Compute(ComputeSpec(step_seconds=1.0, spread=0.0), seed=1, site="a")
    boxed = compute.plan(0, 10, at=0.0, budget=3.5)
    assert boxed.steps == 4
    assert boxed.seconds == pytest.approx(4.0)
    assert compute.plan(0, 10, at=0.0, budget=0.1).steps == 1
    many = compute.plan(0, 1000, at=0.0, budget=100.0)
    assert many.steps == pytest.approx(100, abs=1)
    assert compute.plan(0, 1000, at=0.0, budget=1e6).steps == 1000


def test_a_recorded_trace_is_taken_as_it_is() -> None:
    spec = ComputeSpec(trace=(0.5, 0.25, 1.0))
    assert seconds(spec, steps=2, count=4) == [1.0, 0.5, 2.0, 1.0]


def test_draws_are_the_sites_and_the_clocks_own() -> None:
    spec = ComputeSpec(straggle_share=0.3)
    one, same = (Compute(spec, seed=1, site="a") for _ in range(2))
    assert one.plan(7, 5, at=0.0) == one.plan(7, 5, at=9.0) == same.plan(7, 5, at=0.0)
    assert one.plan(7, 5, at=0.0) != Compute(spec, seed=1, site="b").plan(7, 5, at=0.0)
    assert one.plan(7, 5, at=0.0) != Compute(spec, seed=2, site="a").plan(7, 5, at=0.0)


def test_a_site_is_away_for_its_share_of_the_time() -> None:
    given = Availability(offline=((50.0, 60.0), (10.0, 20.0)))
    assert list(given.windows(seed=1, site="a")) == [(10.0, 20.0), (50.0, 60.0)]
    chance = Availability(offline_share=0.1, offline_seconds=100.0)
    until = 1_000_000.0
    found = list(takewhile(lambda w: w[0] < until, chance.windows(seed=1, site="a")))
    assert all(a[1] < b[0] for a, b in pairwise(found))
    away = sum(end - start for start, end in found)
    assert away / until == pytest.approx(0.1, rel=0.1)
    other = islice(chance.windows(seed=1, site="b"), 3)
    assert list(other) != found[:3]

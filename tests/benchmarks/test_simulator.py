"""The core driven over a made-up fleet: it does what it is timed for."""

from __future__ import annotations

from benchmarks.simulator import drive


def test_a_fleet_trains_every_period_that_is_drawn() -> None:
    found = drive(sites=30, select=5, versions=4)
    assert found.periods == 5 * 4
    beats = 30 * (found.virtual_seconds // 5)
    others = 30 * 2 + 20 * 2  # connected and ready; an update, and a report on what was fetched
    assert found.events >= beats + others


def test_the_same_fleet_takes_the_same_course() -> None:
    first, second = drive(20, 0, 3), drive(20, 0, 3)
    assert (first.events, first.periods, first.virtual_seconds) == (
        second.events,
        second.periods,
        second.virtual_seconds,
    )

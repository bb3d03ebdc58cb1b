"""The common beat."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.beat import next_second, on_the_second


class Clock:
    """A loop's clock that jumps over every sleep, and comes a little late."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + 0.25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(100.6)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: found)
    monkeypatch.setattr(asyncio, "sleep", found.sleep)
    return found


def test_long_waits_end_on_a_whole_second_and_are_never_longer(clock: Clock) -> None:
    assert on_the_second(25.0) == pytest.approx(24.4)
    assert on_the_second(2.0) == pytest.approx(1.4)
    clock.now = 101.0
    assert on_the_second(25.0) == 25.0


def test_short_waits_stay_as_they_are(clock: Clock) -> None:
    assert on_the_second(0.5) == 0.5
    assert on_the_second(1.5) == 1.5


def test_the_next_second_is_told_with_its_lateness(clock: Clock) -> None:
    step = next_second()
    with pytest.raises(StopIteration) as end:
        step.send(None)
    assert clock.slept == [pytest.approx(0.4)]
    assert end.value.value == pytest.approx(0.25)

"""The virtual clock."""

from __future__ import annotations

from simulation.clock import VirtualClock


def test_calls_come_in_order_of_time_and_then_of_asking() -> None:
    clock, order = VirtualClock(), []
    clock.at(2.0, lambda: order.append(("late", clock.now)))
    clock.after(1.0, lambda: order.append(("first", clock.now)))
    clock.at(1.0, lambda: order.append(("second", clock.now)))
    while clock.step():
        pass
    assert order == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_the_past_is_now() -> None:
    clock, times = VirtualClock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: times.append(clock.now)))
    while clock.step():
        pass
    assert times == [5.0]
    assert not clock.step()

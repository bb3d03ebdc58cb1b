"""Faults by seed."""

from __future__ import annotations

from simulation.faults import Faults


def test_the_same_seed_gives_the_same_faults() -> None:
    one = Faults(seed=3, delay_seconds_max=2.0, repeat=0.3)
    two = Faults(seed=3, delay_seconds_max=2.0, repeat=0.3)
    assert [one.delays() for _ in range(50)] == [two.delays() for _ in range(50)]


def test_without_faults_every_message_arrives_once_and_soon() -> None:
    assert [Faults().delays() for _ in range(5)] == [[0.01]] * 5


def test_repeated_messages_arrive_twice_within_the_bound() -> None:
    faults = Faults(seed=1, delay_seconds_max=1.0, repeat=1.0)
    assert all(len(faults.delays()) == 2 for _ in range(20))
    assert all(0.0 < delay <= 1.01 for _ in range(20) for delay in faults.delays())

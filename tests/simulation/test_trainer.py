"""The contract between the fleet and whoever trains."""

from __future__ import annotations

from protocol.messages import VersionRef
from simulation.trainer import Base, Outcome, Work


def test_a_period_knows_the_version_that_it_starts_from() -> None:
    ref = VersionRef(version=7, digest="0" * 64, bytes=3)
    base = Base(version=ref, body=b"abc")
    work = Work(site="a", job="j", epoch=1, clock=4, attempt=1, base=base, steps=10)
    assert work.base_version == 7
    assert (work.seconds_budget, work.applied) == (0.0, None)  # no box, everything settled


def test_outcomes_do_not_share_what_they_are_filled_with() -> None:
    one, two = Outcome(), Outcome()
    one.delta.append(1.0)
    assert two.delta == []

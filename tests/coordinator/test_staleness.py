"""Weights of old updates."""

from __future__ import annotations

import pytest

from coordinator.staleness import staleness_weight
from protocol.jobspec import Pacing


@pytest.mark.parametrize(
    ("pacing", "expected"),
    [
        (Pacing(staleness_weight="constant"), [1.0, 1.0, 1.0]),
        (Pacing(staleness_weight="polynomial"), [1.0, 4**-0.5, 9**-0.5]),
        (Pacing(staleness_weight="polynomial", staleness_a=1.0), [1.0, 1 / 4, 1 / 9]),
        (Pacing(staleness_weight="hinge", staleness_a=2.0, staleness_b=3.0), [1.0, 1.0, 1 / 11]),
    ],
)
def test_weights_are_those_of_the_paper(pacing: Pacing, expected: list[float]) -> None:
    assert [staleness_weight(pacing, tau) for tau in (0, 3, 8)] == pytest.approx(expected)

from __future__ import annotations

import random

import pytest

from client.backoff import Backoff
from client.outage import Outage


@pytest.mark.parametrize("seconds", [60, 600])
@pytest.mark.parametrize("agent", range(3))
def test_an_outage_is_a_few_lines_however_long_it_lasts(seconds: int, agent: int):
    """PC-088: growing pauses with jitter; one line a change, a summary a minute, counts kept."""
    backoff, outage = Backoff(random.Random(agent)), Outage()
    now, lines, pauses = 0.0, list[str](), list[float]()
    while now < seconds:
        kind = "away" if len(pauses) % 7 else "stranger"  # a proxy that answers now and then
        if line := outage.failed(kind, f"{kind} because.", now):
            lines.append(line)
        pauses.append(backoff.pause())
        now += pauses[-1]
    tries = outage.tries
    back = outage.over(now)
    assert back is not None
    assert f"{tries} tries" in back
    assert tries == len(pauses) > seconds / 5
    assert len(lines) + 1 <= 3 + seconds // 60
    assert any("still away" in line for line in lines) == (seconds > 61)
    assert max(pauses[:2]) <= 0.8
    assert max(pauses) <= 5.0
    assert sum(pauses[-10:]) / 10 > 1.5


def test_a_single_failure_is_not_worth_a_line():
    outage = Outage()
    assert outage.failed("away", "reset", 0.0) is None
    assert outage.over(0.3) is None
    assert outage.failed("away", "reset", 25.0) is None
    assert outage.over(25.3) is None


def test_every_outage_is_told_anew():
    outage = Outage(quiet_tries=0)
    assert outage.failed("away", "refused.", 0.0)
    assert outage.over(5.0) == "connected again after 5 s and 1 tries"
    assert outage.failed("away", "refused.", 9.0)
    assert outage.over(10.0) == "connected again after 1 s and 1 tries"

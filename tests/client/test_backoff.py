from __future__ import annotations

import random

from client.backoff import Backoff


def test_pauses_stay_between_first_and_last_and_grow():
    means = []
    for k in range(1, 8):
        drawn = []
        for seed in range(200):
            backoff = Backoff(random.Random(seed))
            drawn.append([backoff.pause() for _ in range(k)][-1])
        assert min(drawn) >= 0.2
        assert max(drawn) <= min(5.0, 0.2 * 2**k)
        means.append(sum(drawn) / len(drawn))
    assert means[:5] == sorted(means[:5])


def test_sites_that_lost_one_coordinator_do_not_come_back_in_step():
    fleet = [Backoff(random.Random(seed)) for seed in range(50)]
    times = [sum(site.pause() for _ in range(6)) for site in fleet]
    assert len({round(time, 1) for time in times}) > 25


def test_years_of_failing_overflow_nothing_and_reset_begins_again():
    backoff = Backoff(random.Random(1))
    for _ in range(5000):
        assert backoff.pause() <= 5.0
    backoff.reset()
    assert backoff.pause() <= 0.4

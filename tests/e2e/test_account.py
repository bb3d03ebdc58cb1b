"""Nothing that a site produced is lost or counted twice, also when rounds come to nothing."""

from __future__ import annotations

import os

import numpy as np
import pytest

from client.stub import pretend_delta, pretend_params
from tests.client.localjobs import read_parts
from tests.e2e.harness import Place

pytestmark = pytest.mark.e2e
ELEMENTS = 1000


def test_what_sites_produced_is_applied_once_however_often_it_was_given_back(place: Place):
    """Per site: produced = applied + residual + discards, through void rounds and a restart."""
    place.start()
    place.sites("a")
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    place.join("b", wait=fifo)
    place.agent("b")
    job = place.submit(
        versions=3,
        pacing={"quorum": 2, "deadline_seconds": 1.5, "failed_rounds_max": 50},
        keep={"versions": 5},
    )

    def returned() -> int:
        return sum(u.verdict == "refused_return" for u in place.api.updates(job))

    place.wait(job, lambda _: returned() >= 1)
    agent = place.agents["a"].process
    agent.kill()
    agent.wait(10)
    place.agent("a")
    place.wait(job, lambda _: returned() >= 2)
    os.write(writer, b"x" * 60)
    assert place.finished(job, 60).version == 3
    os.close(writer)

    updates = place.api.updates(job)
    assert len({(u.site, u.epoch, u.clock) for u in updates}) == len(updates)
    assert {u.verdict for u in updates} <= {"counted", "refused_return", "refused_drop"}
    expected = pretend_params(7, ELEMENTS).astype(np.float64)
    for update in updates:
        if update.verdict in ("counted", "refused_return"):
            expected += pretend_delta(7, update.site, update.clock, ELEMENTS) / 2.0
    _, parts = read_parts(place.data / "jobs" / job / "versions" / "3.body")
    found = parts["params"].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    once = pretend_delta(7, "a", 0, ELEMENTS) / 2.0
    assert np.abs(found - once - expected).max() > 0.01, "leaving one out would be seen"

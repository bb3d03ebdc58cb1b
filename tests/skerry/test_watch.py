"""Watching a job without a terminal: what it waits for is said once per change."""

from __future__ import annotations

import pytest

from protocol.jobstates import JobState
from protocol.views import JobView
from skerry.cli.watch import Live


def view(state: JobState, waiting: str) -> JobView:
    return JobView(
        id="j-1", name="n", task="t", state=state, reason="", waiting=waiting, version=0, round=0,
        created_at=0.0,
    )  # fmt: skip


def test_a_job_that_cannot_begin_says_why_and_not_every_second(
    capsys: pytest.CaptureFixture[str],
):
    with Live(3) as live:
        live.update(view("initialising", "1 of 2 sites are ready, at most 90 s more"))
        live.update(view("initialising", "1 of 2 sites are ready, at most 89 s more"))
        live.update(view("initialising", "b: the owner has not allowed 't', at most 88 s more"))
        live.update(view("running", "round 1: waits for a"))
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if line]  # old releases of rich end with a blank one
    assert said == ["1 of 2 sites are ready", "b: the owner has not allowed 't'"]

"""The log tells the story of a job, and names job, site and version beside every line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from coordinator import journal as j
from coordinator.narrate import tell
from protocol.jobspec import JobSpec, TaskRef
from protocol.logs import JsonLines
from tests.coordinator.engines import running
from tests.coordinator.stubsite import StubSite, joined, spec_of, submitted


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    form = JsonLines()
    records = [record for record in caplog.records if record.name == "coordinator.jobs"]
    return [json.loads(form.format(record)) for record in records]


async def test_a_job_can_be_followed_by_the_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "coordinator.jobs")
    async with running(tmp_path, real=True) as engine:
        await joined(engine, "a")
        job = await submitted(engine, spec_of(versions=2))
        await StubSite(engine, "a").run()
    told = lines(caplog)
    assert {line["job"] for line in told} == {job}
    assert [line["version"] for line in told if "version" in line] == [0, 1, 2]
    assert [line["site"] for line in told if "takes part, epoch 1" in line["message"]] == ["a"]
    states = [
        word for line in told for word in [line["message"].partition("the job is ")[2]] if word
    ]
    assert [word.partition(":")[0] for word in states] == ["running", "draining", "finished"]


def test_trouble_is_a_warning_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "coordinator.jobs")
    settled = j.UpdateSettled(
        job="j", site="b", epoch=1, clock=4, attempt=1, verdict="refused_drop", reason="NaN in 'w'"
    )
    void = j.RoundClosed(
        job="j", round=3, version=2, cohort=(), active_sites=2, reason="1 of 2 updates"
    )
    quiet = j.UpdateSettled(
        job="j", site="a", epoch=1, clock=4, attempt=1, verdict="queued", reason=""
    )
    tell([settled, void, j.JobMoved(job="j", state="failed", reason="in vain"), quiet])
    told = lines(caplog)
    assert [line["level"] for line in told] == ["warning", "warning", "warning", "debug"]
    assert (told[0]["site"], told[0]["message"]) == (
        "b",
        "the update of b, clock 4, is refused_drop: NaN in 'w'",
    )
    assert told[1]["message"] == "round 3 is void: 1 of 2 updates"
    assert told[2]["message"] == "the job is failed: in vain"


def test_a_name_from_outside_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.jobs")
    spec = JobSpec(name='x\n{"level":"error"}', task=TaskRef(name="t"))
    tell([j.JobSubmitted(job="j", spec=spec, by="me")])
    [record] = caplog.records
    assert "\n" not in JsonLines().format(record)

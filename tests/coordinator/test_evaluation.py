"""Who evaluates what, and when a target counts as reached."""

from __future__ import annotations

from unittest import mock

import pytest

from coordinator import evaluation
from coordinator.evaluation import newest, reached
from coordinator.job import Job
from coordinator.journal import SiteFailed
from protocol import messages as m
from protocol.errors import MalformedError
from protocol.jobspec import Evaluation, Pacing, Sites, Stop
from protocol.metrics import Metric, metric
from tests.coordinator.coretools import World, make_spec

TARGET = Stop(versions=50, metric="accuracy", target=0.9)


def with_evaluator(every: int = 1, stop: Stop = TARGET) -> World:
    here = World()
    here.submit(spec=make_spec(stop=stop, evaluation=Evaluation(every=every)))
    here.join("a")
    here.join("b")
    here.join("eva", role="evaluator")
    here.init(here.job.init_site)
    return here


def test_a_slow_evaluator_goes_straight_to_the_newest_version() -> None:
    here = with_evaluator()
    assert here.one(m.Evaluate).instruction.base.version == 0
    here.round()
    here.round()
    assert here.to(m.Evaluate) == []
    here.evaluated("eva", 0, accuracy=0.1)
    assert here.one(m.Evaluate).instruction.base.version == 2


def test_evaluators_are_asked_every_so_many_versions() -> None:
    here = with_evaluator(every=3)
    here.evaluated("eva", 0, accuracy=0.1)
    asked = []
    for version in range(1, 8):
        here.round()
        if here.to(m.Evaluate):
            asked.append(version)
            here.evaluated("eva", version, accuracy=0.1)
    assert asked == [3, 6]


def test_zero_means_only_the_last_version() -> None:
    here = with_evaluator(every=0, stop=Stop(versions=2))
    assert here.to(m.Evaluate) == []
    here.round()
    assert here.to(m.Evaluate) == []
    assert not any(send.instruction.evaluate for send in here.all(m.Train))
    here.round()
    assert here.to(m.Evaluate) == ["a", "b", "eva"]


def test_the_evaluator_decides_about_the_target() -> None:
    here = with_evaluator()
    here.round()
    here.evaluated("a", 1, accuracy=0.99)
    here.evaluated("b", 1, accuracy=0.99)
    assert here.job.state == "running"
    here.evaluated("eva", 1, accuracy=0.91)
    assert here.job.state == "draining"
    assert here.job.reason == "accuracy 0.91 at version 1 reached the target 0.9"


def test_without_an_evaluator_a_quorum_of_one_version_decides() -> None:
    here = World()
    here.running("a", "b", "c", spec=make_spec(stop=TARGET, sites=Sites(wanted=3)))
    here.round()
    here.evaluated("a", 1, accuracy=1.0)
    assert here.job.state == "running"  # one of three is no quorum
    here.evaluated("b", 0, accuracy=1.0)
    assert here.job.state == "running"  # reports on different versions do not add up
    here.evaluated("b", 1, accuracy=0.85)
    assert here.job.state == "draining"
    assert "accuracy 0.925 at version 1" in here.job.reason


def test_a_configured_quorum_may_ask_for_more_reports() -> None:
    spec = make_spec(stop=TARGET, sites=Sites(wanted=3), pacing=Pacing(quorum=3))
    here = World().running("a", "b", "c", spec=spec)
    here.evaluated("a", 0, accuracy=1.0)
    here.evaluated("b", 0, accuracy=1.0)
    assert here.job.state == "running"
    here.evaluated("c", 0, accuracy=1.0)
    assert here.job.state == "draining"


def test_a_target_may_be_a_minimum() -> None:
    stop = Stop(versions=9, metric="loss", target=0.1, mode="min")
    here = World().running("a", spec=make_spec(stop=stop, sites=Sites(wanted=1)))
    here.evaluated("a", 0, loss=0.2)
    assert reached(here.job) == ""
    here.round()
    here.evaluated("a", 1, loss=0.1)
    assert here.job.state == "draining"


def test_an_empty_test_set_is_not_available_and_decides_nothing() -> None:
    """PC-053: zero test examples at the evaluator: blank metrics, not asked, not waited for."""
    here = World()
    here.submit(spec=make_spec(stop=Stop(versions=1, metric="accuracy", target=0.0)))
    here.join("a", test=0)
    here.join("b", test=0)
    here.join("eva", role="evaluator", test=0)
    here.init(here.job.init_site)
    assert here.to(m.Evaluate) == []
    nothing = m.Evaluated(
        job="j", version=0, examples=0, metrics={"accuracy": Metric(value=1.0, examples=0)}
    )
    here.report("eva", nothing)
    assert here.job.state == "running"
    metrics, version = newest(here.job)
    assert (metrics["accuracy"].value, version) == (None, 0)
    here.round()
    here.saved(1)
    assert here.job.state == "finished"


def test_the_same_report_twice_is_taken_once_and_an_impossible_one_not_at_all() -> None:
    here = World().running("a", "b")
    here.evaluated("a", 0, accuracy=0.5)
    rows = len(here.journal)
    here.evaluated("a", 0, accuracy=0.6)
    here.evaluated("a", 7, accuracy=0.6)
    assert len(here.journal) == rows


def test_metrics_out_of_bounds_change_nothing() -> None:
    here = World().running("a", "b")
    rows = len(here.journal)
    with pytest.raises(MalformedError):
        here.report("a", m.Evaluated(job="j", version=0, examples=1, metrics={"": metric(1.0, 1)}))
    assert len(here.journal) == rows


def test_an_evaluator_that_cannot_evaluate_a_version_is_asked_about_the_next() -> None:
    here = with_evaluator()
    here.report("eva", m.Failed(job="j", epoch=0, clock=0, attempt=0, reason="no memory"))
    assert here.to(m.Evaluate) == []
    here.round()
    assert here.one(m.Evaluate).instruction.base.version == 1


def test_an_overdue_report_is_not_waited_for() -> None:
    here = with_evaluator()
    here.core.stalled(1e6)
    here.tick(600.0)
    (told,) = [e.event for e in here.journal if isinstance(e.event, SiteFailed)]
    assert (told.site, told.reason) == ("eva", "no evaluation of version 0 in 10 min")
    assert here.to(m.Evaluate) == []
    here.round()
    assert here.one(m.Evaluate).instruction.base.version == 1


def test_sites_with_only_test_data_evaluate_by_request() -> None:
    here = World()
    here.submit()
    here.join("a")
    here.join("b", train=0)
    here.init("a")
    assert here.to(m.Evaluate) == ["b"]


def test_metrics_for_people_come_from_the_newest_decisive_version() -> None:
    here = World().running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3)))
    for site in ("a", "b", "c"):
        here.evaluated(site, 0, accuracy=0.5)
    here.round()
    here.evaluated("a", 1, accuracy=0.9)
    metrics, version = newest(here.job)
    assert (metrics["accuracy"].value, version) == (0.5, 0)
    here.evaluated("b", 1, accuracy=0.7)
    metrics, version = newest(here.job)
    assert version == 1
    assert metrics["accuracy"].worst_site == "b"


def _with_many(*values: float) -> tuple[World, list[int]]:
    """So many sites report these accuracies on version 0, and how many reports were there each time
    when the target was looked at.
    """
    names = [f"site-{index:02d}" for index in range(len(values))]
    here = World()
    here.running(*names, spec=make_spec(sites=Sites(wanted=len(names)), stop=TARGET))
    looked: list[int] = []

    def look(job: Job) -> str:
        looked.append(sum(map(len, job.reports.values())))
        return reached(job)

    with mock.patch.object(evaluation, "reached", look):
        for name, value in zip(names, values, strict=True):
            here.evaluated(name, 0, accuracy=value)
    return here, looked


def test_a_target_is_looked_at_with_every_report_of_a_few_sites() -> None:
    here, looked = _with_many(*[0.1] * 12)
    assert looked == list(range(1, 13))
    assert here.job.state == "running"


def test_a_target_is_looked_at_seldom_when_many_sites_report_and_when_all_have() -> None:
    here, looked = _with_many(*[0.1] * 61)
    assert len(looked) < 61 * 2 / 3
    assert looked[-1] == 61
    here, looked = _with_many(*[0.8995] * 60, 1.0)  # enough only with the last one
    assert here.job.state == "draining"
    assert "at version 0 reached the target 0.9" in here.job.reason

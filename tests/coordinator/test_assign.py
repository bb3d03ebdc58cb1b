"""Sites and jobs: who works for whom."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from hypothesis import given, settings

from coordinator import assign
from coordinator.assign import Assignment, works_for
from coordinator.run import Run
from coordinator.sessions import Session, Sessions
from protocol.jobspec import Sites
from protocol.messages import EndJob, Prepare
from tests.coordinator.coretools import World, make_spec
from tests.coordinator.histories import Step, histories, play


def test_jobs_take_free_sites_in_the_order_of_their_submission() -> None:
    here = World()
    here.submit("j")
    here.submit("k")
    here.connect("a")
    assert [send.instruction.job for send in here.all(Prepare)] == ["j"]
    assert here.core.job_of("a") == "j"


def test_a_second_job_queues_and_says_which_site_is_busy_with_what() -> None:
    """PC-090: job 2 is submitted while job 1 still loads; it waits, visibly, and then gets its turn."""
    here = World()
    here.submit("j", make_spec(sites=Sites(wanted=1)))
    here.connect("a")
    here.submit("k", make_spec(sites=Sites(wanted=1)))
    assert "waiting for 1 more site: a is busy with job j" in here.waiting("k")
    assert "a is loading" in here.waiting("j")
    here.command("stop")
    assert here.to(EndJob) == ["a"]
    assert [send.instruction.job for send in here.all(Prepare)] == ["k"]
    here.ready("a", "k")
    assert "a is building version 0" in here.waiting("k")


def test_a_site_may_be_given_more_than_one_job_by_configuration() -> None:
    here = World(site_jobs_max=2)
    here.submit("j")
    here.submit("k")
    here.connect("a")
    here.tick()
    assert here.core.job_of("a") == "j"
    assert "a is loading" in here.waiting("k")


def test_names_are_honoured_and_nobody_waits_for_strangers() -> None:
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=2, names=("a", "b"))))
    here.connect("a")
    here.connect("x")
    assert here.core.job_of("x") == ""
    assert "waiting for 2 more sites: a is loading; b is not connected; " in here.waiting()


def test_a_site_whose_owner_does_not_allow_the_task_is_not_asked() -> None:
    here = World()
    here.submit()
    here.connect("a", tasks=("other",))
    assert here.all(Prepare) == []
    assert "a: its owner has not allowed the task 'digits'" in here.waiting()


def test_an_evaluator_counts_for_no_wanted() -> None:
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=2, names=("a", "b"))))
    here.join("eva", role="evaluator")
    here.join("a")
    here.init("eva")
    assert here.job.round is None
    assert "1 of 2 sites are ready" in here.waiting()


def test_paused_and_draining_jobs_take_no_new_sites() -> None:
    here = World().running("a", "b")
    here.command("pause")
    here.connect("c")
    assert here.all(Prepare) == []
    here.command("drain")
    here.connect("d")
    assert here.all(Prepare) == []
    assert works_for([], "c") == []


class _Checked(Assignment):
    """Compares with looking at every session."""

    found = 0

    def pairs(self, runs: Sequence[Run], sessions: Sessions) -> list[tuple[Run, Session]]:
        expected = assign.assign(runs, list(sessions), self._site_jobs_max)
        found = super().pairs(runs, sessions)
        assert found == expected
        type(self).found += len(found)
        return found


def _told(history: list[Step], site_jobs_max: int) -> int:
    with mock.patch.object(assign, "Assignment", _Checked):
        here = World(site_jobs_max=site_jobs_max, lease_seconds=8.0)
        for step in history:
            play(here, step)
    return _Checked.found


@settings(max_examples=150, deadline=None)
@given(histories)
def test_looking_where_something_changed_finds_what_looking_at_all_finds(
    history: list[Step],
) -> None:
    for site_jobs_max in (1, 2):
        _told(history, site_jobs_max)


def test_a_site_that_a_job_lets_go_is_given_the_next_one() -> None:
    before = _Checked.found
    history = [("submit", "a", job, 0) for job in "jk"] + [("connect", "a", "j", 2)]
    assert _told(history, 1) - before == 1
    assert _told([*history, ("decline", "a", "j", 0)], 1) - before == 3  # one, and two more

"""Verdicts, closing and opening: every row of the decision tables."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.job import evolve
from coordinator.journal import CohortMember, SiteEntered
from coordinator.round import closing, judge, missing, opening, quorum
from protocol.jobspec import Pacing, Sites
from tests.coordinator.coretools import World, make_spec


def world(*sites: str, **spec: Any) -> World:
    names = sites or ("a", "b", "c")
    spec.setdefault("sites", Sites(wanted=len(names)))
    return World().running(*names, spec=make_spec(**spec))


# ---------------------------------------------------------------- judge


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, "queued", "in the open round"),
        ({"problem": "tensor 'w' is NaN"}, "refused_drop", "tensor 'w' is NaN"),
        ({"base_version": 3}, "refused_drop", "starts from version 3"),
        ({"base_digest": "other"}, "refused_drop", "(other)"),
        ({"layout_digest": "other"}, "refused_drop", "another layout (other)"),
        ({"examples": 0.0}, "refused_drop", "no usable contribution"),
        ({"examples": float("nan")}, "refused_drop", "no usable contribution"),
        ({"norm": float("inf")}, "refused_drop", "not a finite number"),
    ],
)
def test_an_update_of_the_open_task_is_settled(
    changes: dict[str, Any], verdict: str, words: str
) -> None:
    here = world()
    found = judge(here.job, "a", here.facts("a", **changes))
    assert (found.verdict, found.settles) == (verdict, True)
    assert words in found.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": 2}, "epoch 2 was never given to a"),
        ({"epoch": 0}, "epoch 0 has ended; a is in epoch 1"),
        ({"clock": 5}, "no period was asked for at clock 5"),
        ({"attempt": 2}, "attempt 2 was never asked for"),
    ],
)
def test_a_wrong_identity_is_turned_away_and_settles_nothing(
    changes: dict[str, Any], words: str
) -> None:
    here = world()
    found = judge(here.job, "a", here.facts("a", **changes))
    assert (found.verdict, found.settles) == ("refused_drop", False)
    assert words in found.reason


def test_a_stranger_is_turned_away() -> None:
    here = world()
    found = judge(here.job, "x", here.facts("a"))
    assert (found.verdict, found.settles) == ("refused_drop", False)
    assert "x is not a member" in found.reason


def test_the_same_update_again_is_a_duplicate_and_an_older_round_is_refused() -> None:
    """PC-029: round 4's update twice, then round 3's: counted once, the older one refused."""
    here = world("a", "b")
    old = here.facts("a")
    here.round()
    here.round()
    third = here.facts("a")
    here.round()
    fourth = here.facts("a")
    assert here.upload("a", facts=fourth).verdict == "queued"
    again = here.upload("a", facts=fourth)
    assert (again.verdict, again.reason) == ("duplicate", "clock 3 is here already")
    stale = here.upload("a", facts=old)
    assert (stale.verdict, stale.reason) == (
        "refused_drop",
        "stale: clock 0 was settled before, 4 is next",
    )
    assert here.upload("a", facts=third).verdict == "refused_drop"
    here.upload("b")
    cohort = here.job.committing
    assert cohort is not None
    assert [member.site for member in cohort.cohort] == ["a", "b"]
    here.committed()
    assert here.job.members["a"].counted == 4


def test_a_refusal_is_repeated_word_by_word() -> None:
    here = world()
    facts = here.facts("a", problem="tensor 'w' is NaN")
    first = here.upload("a", facts=facts)
    second = here.upload("a", facts=facts)
    assert (second.verdict, second.reason) == (first.verdict, first.reason)
    assert here.job.members["a"].refused == 1


def test_after_the_job_has_ended_an_open_update_is_refused_with_its_reason() -> None:
    here = world()
    facts = here.facts("a")
    here.command("stop")
    found = here.upload("a", facts=facts)
    assert found.verdict == "refused_drop"
    assert "stopped" in found.reason


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize(
    ("quorum_", "in_", "out", "late", "expected"),
    [
        (0, "abc", "", False, "abc"),  # all are in
        (0, "ab", "", False, None),  # c is training, there is time
        (0, "ab", "c", False, "ab"),  # c is out
        (0, "", "ab", False, None),
        (0, "", "abc", False, ""),  # nobody: void
        (0, "a", "", True, "a"),  # deadline with a quorum of one
        (0, "", "", True, ""),  # deadline with nobody
        (2, "a", "", True, ""),  # deadline below the quorum
        (2, "ab", "", True, "ab"),
        (2, "a", "b", False, None),  # c may still make it two
        (2, "", "ab", False, ""),  # two can no longer be reached
        (3, "ab", "c", False, ""),
    ],
)
def test_a_round_closes_by_the_table(
    quorum_: int, in_: str, out: str, late: bool, expected: str | None
) -> None:
    here = world(pacing=Pacing(quorum=quorum_, deadline_seconds=60.0))
    open_ = here.job.round
    assert open_ is not None
    for site in in_:
        open_.tasks[site].state = "queued"
        open_.training.remove(site)
        part = CohortMember(site=site, epoch=1, clock=0, spool=f"{site}.body")
        here.job.queue = (part, *here.job.queue)
    for site in out:
        open_.tasks[site].state = "out"
        open_.training.remove(site)
        open_.tasks[site].reason = "failed"
    found = closing(here.job, 60.0 if late else 59.0)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert "".join(member.site for member in found.cohort) == expected
    assert found.reason
    assert missing(here.job) == dict.fromkeys(out, "failed")
    assert quorum(here.job) == max(1, quorum_)


def test_a_void_round_says_who_failed_and_how() -> None:
    here = world("a", "b")
    here.upload("a", facts=here.facts("a", problem="NaN in 'w'"))
    here.upload("b", facts=here.facts("b", problem="zero examples"))
    assert here.job.failures == ((1, "no usable contribution; a: NaN in 'w'; b: zero examples"),)


# ---------------------------------------------------------------- opening


def test_opening_draws_from_sites_with_data_and_names_who_is_left_out() -> None:
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=3, select=2)))
    for site, train in (("a", 100), ("b", 0), ("c", 100)):
        here.join(site, train=train)
    here.init("a")
    assert here.job.round is not None
    assert sorted(here.job.round.tasks) == ["a", "c"]
    assert here.job.round.left_out == ("b",)


def test_opening_says_what_is_lacking() -> None:
    here = world("a", "b", pacing=Pacing(quorum=2))
    here.job.round = None
    again = SiteEntered(
        job="j",
        site="b",
        role="site",
        epoch=2,
        clock=0,
        train_examples=0,
        eval_examples=1,
        layout_digest="",
    )
    evolve(here.job, again, 0.0)
    found = opening(here.job, 0.0)
    assert found == "1 of 2 sites that a version needs are here (no training data at b)"

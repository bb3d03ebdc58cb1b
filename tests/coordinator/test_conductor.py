"""Rounds as they are carried out: actions, their order, and what is journalled."""

from __future__ import annotations

from coordinator import actions as a
from coordinator import stimuli as s
from coordinator.journal import RoundClosed, UpdateSettled, VersionMade
from protocol import messages as m
from protocol.jobspec import Pacing, Sites
from tests.coordinator.coretools import World, make_spec


def test_one_update_is_answered_before_anything_follows_from_it() -> None:
    here = World().running("a", "b")
    here.upload("a")
    assert [type(action) for action in here.last] == [a.Persist, a.Verdict]
    here.upload("b")
    assert [type(action) for action in here.last] == [a.Persist, a.Verdict, a.Commit]


def test_the_next_train_goes_out_with_the_version_that_it_starts_from() -> None:
    here = World().running("a", "b")
    here.round()
    assert [type(action) for action in here.last] == [a.Persist, a.Send, a.Send]
    train = here.all(m.Train)[0].instruction
    assert (train.base.version, train.base.digest, train.clock, train.epoch) == (1, "d1", 1, 1)
    assert (train.steps, train.epochs, train.evaluate) == (10, 0, True)
    assert train.deadline_seconds == 60.0


def test_a_commit_names_cohort_in_canonical_order_and_its_base() -> None:
    here = World().running("b", "c", "a", spec=make_spec(sites=Sites(wanted=3)))
    for site in ("c", "a", "b"):
        here.upload(site)
    commit = here.one(a.Commit)
    assert [member.site for member in commit.cohort] == ["a", "b", "c"]
    assert (commit.version, commit.base_version, commit.base_digest) == (1, 0, "d0")
    assert commit.active_sites == 3


def test_a_nan_update_is_refused_and_named_and_the_others_make_the_version() -> None:
    """PC-014: three sites, one NaN: two are averaged, the third trains on in the next round."""
    here = World().running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3)))
    found = here.upload("a", facts=here.facts("a", problem="tensor 'w' has 1 value that is NaN"))
    assert (found.verdict, found.reason) == ("refused_drop", "tensor 'w' has 1 value that is NaN")
    assert here.one(a.Discard).spools == ("a-1-0-1.body",)
    here.upload("b")
    here.upload("c")
    assert [member.site for member in here.one(a.Commit).cohort] == ["b", "c"]
    here.committed()
    closed = [e.event for e in here.journal if isinstance(e.event, RoundClosed)][-1]
    assert closed.missing == {"a": "tensor 'w' has 1 value that is NaN"}
    assert here.to(m.Train) == ["a", "b", "c"]
    assert here.job.members["a"].refused == 1


def test_stragglers_are_aborted_at_the_deadline_and_their_late_update_is_refused() -> None:
    here = World(lease_seconds=1e6).running("a", "b")
    late = here.facts("b")
    here.upload("a")
    here.tick(60.0)
    abort = here.one(m.Abort)
    assert (abort.site, abort.instruction.clock) == ("b", 0)
    assert [member.site for member in here.one(a.Commit).cohort] == ["a"]
    found = here.upload("b", facts=late)
    assert (found.verdict, found.reason) == (
        "refused_drop",
        "late: round 1 closed at its deadline, after 1 min",
    )
    assert here.one(a.Discard).spools == ("b-1-0-1.body",)


def test_below_the_quorum_at_the_deadline_queued_updates_go_back() -> None:
    here = World(lease_seconds=1e6)
    here.running("a", "b", spec=make_spec(pacing=Pacing(quorum=2, deadline_seconds=60.0)))
    here.upload("a")
    here.tick(60.0)
    word = here.one(m.Settled)
    assert (word.site, word.instruction.verdict) == ("a", "refused_return")
    assert here.one(a.Discard).spools == ("a-1-0-1.body",)
    assert here.job.failed_in_row == 1
    trains = {send.site: send.instruction.clock for send in here.all(m.Train)}
    assert trains == {"a": 1, "b": 1}  # the next clock: the first one is settled
    assert here.upload("a", facts=here.facts("a", clock=0)).verdict == "refused_return"


def test_a_round_that_cannot_reach_its_quorum_is_void_at_once() -> None:
    here = World(lease_seconds=1e6)
    here.running("a", "b", spec=make_spec(pacing=Pacing(quorum=2)))
    here.step(s.SiteLeft(site="b", reason="maintenance"))
    assert here.job.failed_in_row == 1
    assert here.to(m.Abort) == ["a"]
    assert here.job.round is None  # and none is opened until a second site is there
    assert "1 of 2 sites that a version needs are here" in here.waiting()
    here.join("b")
    assert here.job.round is not None


def test_a_failed_period_is_tried_once_more_and_then_left_out() -> None:
    here = World().running("a", "b")
    here.failed("a", "no memory")
    train = here.one(m.Train).instruction
    assert (train.clock, train.attempt) == (0, 2)
    here.failed("a", "no memory")
    assert here.all(m.Train) == []
    assert here.job.round is not None
    assert here.job.round.tasks["a"].reason == "failed 2 times: no memory"
    here.upload("b")
    here.committed()
    assert here.to(m.Train) == ["a", "b"]


def test_the_first_attempt_that_arrives_after_all_ends_the_second() -> None:
    here = World().running("a", "b")
    first = here.facts("a")
    here.failed("a", "lost the worker")
    assert here.upload("a", facts=first).verdict == "queued"
    abort = here.one(m.Abort).instruction
    assert (abort.clock, abort.attempt) == (0, 2)


def test_an_echo_of_a_failure_changes_nothing() -> None:
    here = World().running("a", "b")
    facts = here.facts("a")
    here.failed("a", "no memory")
    rows = len(here.journal)
    echo = m.Failed(job="j", epoch=facts.epoch, clock=facts.clock, attempt=1, reason="no memory")
    here.report("a", echo)
    assert len(here.journal) == rows


def test_a_commit_that_fails_makes_its_round_void() -> None:
    here = World().running("a", "b")
    here.upload("a")
    here.upload("b")
    here.committed(problem="not finite after the step")
    assert here.to(m.Settled) == ["a", "b"]
    assert here.job.failures == ((1, "the commit failed: not finite after the step"),)
    assert (here.job.number, here.job.spools) == (0, {})
    assert here.to(m.Train) == ["a", "b"]


def test_an_answer_to_a_commit_that_was_asked_twice_counts_once() -> None:
    here = World().running("a", "b")
    here.upload("a")
    here.upload("b")
    again = here.restart()
    assert [type(action) for action in again] == [a.Commit]
    here.committed()
    here.step(s.CommitDone(job="j", facts=s.CommitFacts(version=1, digest="d1", bytes=1000)))
    made = [e.event.version for e in here.journal if isinstance(e.event, VersionMade)]
    assert made == [0, 1]


def test_a_queued_update_of_a_site_that_is_gone_still_counts() -> None:
    here = World().running("a", "b")
    here.upload("a")
    here.step(s.SiteLeft(site="a", reason="maintenance"))
    here.upload("b")
    assert [member.site for member in here.one(a.Commit).cohort] == ["a", "b"]
    here.committed()
    assert here.job.members["a"].counted == 1


def test_a_site_that_missed_the_later_word_is_reminded() -> None:
    here = World().running("a", "b", spec=make_spec(pacing=Pacing(quorum=2)))
    here.upload("a")
    here.close("a")
    here.step(s.SiteLeft(site="b", reason="maintenance"))
    here.connect("a", instance="2")
    word = here.one(m.Settled).instruction
    assert (word.epoch, word.clock, word.verdict) == (1, 0, "refused_return")


def test_every_task_of_a_closed_round_is_settled_exactly_once() -> None:
    here = World(lease_seconds=1e6)
    here.running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3)))
    here.upload("a")
    here.failed("b", "fatal", fatal=True)
    here.tick(60.0)
    settled = [e.event for e in here.journal if isinstance(e.event, UpdateSettled)]
    assert sorted((e.site, e.verdict) for e in settled) == [
        ("a", "queued"),
        ("b", "refused_drop"),
        ("c", "refused_drop"),
    ]

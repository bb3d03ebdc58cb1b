"""Epochs and clocks, coming and going."""

from __future__ import annotations

import pytest

from coordinator import actions as a
from coordinator import stimuli as s
from protocol import messages as m
from protocol.errors import MalformedError
from protocol.jobspec import Pacing, Sites
from simulation.bodies import vector_layout
from tests.coordinator.coretools import LAYOUT, World, make_spec


def test_a_late_joiner_takes_part_from_the_next_round_and_says_since_when() -> None:
    """PC-030: a third site in round 3 of 10: it gets version and round, and contributes from 4 on."""
    here = World().running("a", "b")
    here.round()
    here.round()
    here.join("c")
    assert here.to(m.Train) == []
    assert here.job.members["c"].joined_at_version == 3
    here.round()
    assert sorted(here.to(m.Train)) == ["a", "b", "c"]
    train = next(send.instruction for send in here.all(m.Train) if send.site == "c")
    assert (train.base.version, train.clock) == (3, 2)  # the minimum of the active clocks then
    for _ in range(7):
        here.round()
    counted = {site: member.counted for site, member in here.job.members.items()}
    assert counted == {"a": 10, "b": 10, "c": 7}


def test_a_restart_within_the_lease_keeps_epoch_and_open_task() -> None:
    """PC-027: kill -9 in a round and the same credentials again: one member, the same Train."""
    here = World().running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3)))
    here.close("a")
    here.now += 2.9
    here.connect("a", instance="2")
    assert here.to(m.Prepare) == ["a"]
    here.ready("a")
    train = here.one(m.Train).instruction
    assert (train.epoch, train.clock, train.attempt) == (1, 0, 1)
    assert len(here.job.members) == 3


def test_a_closed_connection_ends_the_epoch_after_the_grace_and_fences_its_updates() -> None:
    here = World().running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3)))
    old = here.facts("a")
    here.close("a")
    here.tick(3.0)
    assert here.one(a.CloseSession).retry
    assert not here.job.members["a"].active
    late = here.upload("a", facts=old)
    assert (late.verdict, late.attempt) == ("refused_drop", 1)
    assert "lease has ended" in late.reason
    here.join("a")
    assert (here.job.members["a"].epoch, here.job.members["a"].clock) == (2, 0)
    assert here.upload("a", facts=old).verdict == "refused_drop"


def test_a_returner_starts_at_the_minimum_clock_of_the_active_sites() -> None:
    here = World().running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3)))
    here.step(s.SiteLeft(site="c", reason="maintenance"))
    here.round()
    here.round()
    here.join("c")
    assert (here.job.members["c"].epoch, here.job.members["c"].clock) == (2, 2)


def test_a_removed_site_is_told_not_to_come_back_and_stays_out() -> None:
    """PC-026: removed while stopped; continued later, its beats and updates change nothing."""
    here = World().running("a", "b", "site-3", spec=make_spec(sites=Sites(wanted=3)))
    facts = here.facts("site-3")
    here.now = 10.0
    assert here.core.last_heard_seconds("site-3", here.now) == 10.0
    here.step(s.SiteLeft(site="site-3", reason="removed by ann", removed=True))
    bye = here.one(m.Bye).instruction
    assert (bye.retry, bye.reason) == (False, "removed by ann")
    assert not here.one(a.CloseSession).retry
    here.now = 20.0
    here.step(s.SiteHeard(site="site-3"))
    assert here.core.last_heard_seconds("site-3", here.now) is None
    assert not here.job.members["site-3"].active
    found = here.upload("site-3", facts=facts)
    assert (found.verdict, found.reason) == ("refused_drop", "removed by ann")
    assert [session.site for session in here.core.sessions()] == ["a", "b"]


def test_a_site_with_another_model_is_refused_naming_the_tensors() -> None:
    here = World().running("a", "b")
    here.join("c", layout=vector_layout(5))
    assert "tensor 'w' has shape (5,), the job has (4,)" in here.job.refused["c"]
    assert here.one(m.EndJob).site == "c"
    assert "c" not in here.job.members


def test_another_base_model_is_refused_by_its_fingerprint() -> None:
    """PC-012: frozen tensors never travel, so sites must start from the same ones."""
    ours = vector_layout(4, fingerprint="f" * 64)
    here = World()
    here.submit()
    for site in ("a", "b"):
        here.join(site, layout=ours)
    here.init("a", layout=ours)
    here.join("c", layout=vector_layout(4, fingerprint="e" * 64))
    assert "start from the same base model" in here.job.refused["c"]


def test_version_0_settles_whose_layout_it_is() -> None:
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=3)))
    here.join("a")
    here.join("b", layout=vector_layout(4, name="v"))
    here.join("c")
    here.init("a")
    assert "missing tensor 'w'; unknown tensor 'v'" in here.job.refused["b"]
    assert [member.site for member in here.job.active()] == ["a", "c"]


def test_a_declined_site_is_asked_again_when_its_agent_was_restarted() -> None:
    here = World()
    here.submit()
    here.connect("a")
    here.report("a", m.Declined(job="j", reason="task not allowed"))
    assert here.one(m.EndJob).instruction.final  # nothing of the job is worth keeping there
    here.tick()
    assert here.all(m.Prepare) == []
    assert "a: task not allowed" in here.waiting()
    here.connect("a")  # the same process
    assert here.all(m.Prepare) == []
    here.close("a")
    here.connect("a", instance="2")
    assert here.to(m.Prepare) == ["a"]


def test_other_data_under_the_same_name_begins_another_epoch() -> None:
    here = World().running("a", "b")
    here.close("a")
    here.connect("a", instance="2")
    here.ready("a", train=7)
    member = here.job.members["a"]
    assert (member.epoch, member.train_examples, member.active) == (2, 7, True)
    assert here.job.round is not None
    assert here.job.round.tasks["a"].state == "out"


def test_a_fatal_failure_ends_the_site_in_this_job_only() -> None:
    here = World().running("a", "b")
    here.failed("a", "data set is gone", fatal=True)
    assert not here.job.members["a"].active
    assert here.job.refused["a"] == "data set is gone"
    assert here.to(m.EndJob) == ["a"]
    assert not here.one(m.EndJob).instruction.final  # its state stays, should it come back
    here.submit("k", make_spec(sites=Sites(wanted=1)))
    assert here.to(m.Prepare) == ["a"]


@pytest.mark.parametrize("fault", ["digest", "examples"])
def test_a_ready_that_contradicts_itself_changes_nothing(fault: str) -> None:
    here = World()
    here.submit()
    here.connect("a")
    rows = len(here.journal)
    ready = m.Ready(
        job="j",
        layout=LAYOUT,
        layout_digest="0" * 64 if fault == "digest" else LAYOUT.digest(),
        train_examples=-1,
        eval_examples=0,
    )
    with pytest.raises(MalformedError):
        here.report("a", ready)
    assert len(here.journal) == rows
    assert here.job.members == {}


def test_a_dead_site_does_not_count_when_the_job_starts() -> None:
    """PC-028: A waits and dies, B joins: after the window one of two is there, and no round opens."""
    here = World(lease_seconds=3.0)
    here.submit(spec=make_spec(pacing=Pacing(quorum=2)))
    here.join("A")
    here.tick(1.0)
    here.tick(2.0)  # its lease has ended
    assert here.one(a.CloseSession).site == "A"
    here.join("B")
    for _ in range(7):
        here.step(s.SiteHeard(site="B"), wait=1.0)
        here.tick()
    assert here.now == 10.0
    assert [member.site for member in here.job.active()] == ["B"]
    assert here.job.round is None
    assert "1 of 2 sites are ready; waiting for 1 more site" in here.waiting()

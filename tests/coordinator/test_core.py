"""The core as a whole: refusals, restarts, stalls, and what it does not journal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from coordinator import actions as a
from coordinator import evaluation, lifecycle
from coordinator import stimuli as s
from coordinator.core import Core, CoreConfig
from coordinator.run import Run
from coordinator.sessions import Admitted, Refused
from protocol import messages as m
from protocol.errors import ConflictError, NotFoundError
from protocol.jobspec import Sites, Stop
from tests.coordinator.coretools import LAYOUT, World, make_spec
from tests.coordinator.histories import Step, histories, play


@pytest.mark.parametrize(
    "stimulus",
    [
        s.JobCommand(job="x", stimulus="stop", by="ann"),
        s.CommitDone(job="x", facts=s.CommitFacts(version=1)),
        s.CheckpointDone(job="x", version=1),
        s.InitComplete(job="x", site="a", facts=s.InitFacts()),
    ],
)
def test_an_unknown_job_is_not_found(stimulus: s.Stimulus) -> None:
    here = World()
    with pytest.raises(NotFoundError, match="no job x"):
        here.step(stimulus)
    with pytest.raises(NotFoundError):
        here.core.view("x", 0.0)


def test_a_refused_stimulus_changes_nothing() -> None:
    here = World().running("a", "b")
    rows, wake = len(here.journal), here.core.wake_at()
    with pytest.raises(ConflictError, match="exists already"):
        here.submit()
    with pytest.raises(ConflictError, match="running cannot resume"):
        here.command("resume")
    with pytest.raises(ConflictError, match="not a command"):
        here.command("fail")
    with pytest.raises(ConflictError, match="no open session"):
        here.report("x", m.Declined(job="j", reason="no"))
    assert (len(here.journal), here.core.wake_at()) == (rows, wake)


def test_liveness_and_progress_are_never_journalled() -> None:
    here = World().running("a", "b")
    rows = len(here.journal)
    for _ in range(20):
        here.step(s.SiteHeard(site="a"), wait=0.1)
        here.report("b", m.Progress(job="j", epoch=1, clock=0, step=1, of=10))
        here.tick()
    assert len(here.journal) == rows


def test_two_agents_with_one_name_make_one_session_and_one_refusal() -> None:
    """PC-033: through the core: the second is refused before it disturbs anything."""
    here = World(lease_seconds=5.0)
    here.connect("a", instance="one")
    here.now = 1.0
    found = here.core.admit("a", "a#two", here.now)
    assert isinstance(found, Refused)
    assert found.last_heard_seconds == 1.0
    with pytest.raises(ConflictError):
        here.connect("a", instance="two")
    assert [session.instance for session in here.core.sessions()] == ["a#one"]
    here.now = 5.0
    here.tick()
    assert isinstance(here.core.admit("a", "a#two", 5.0), Admitted)


def test_silence_counts_only_while_the_coordinator_listened() -> None:
    """PC-089: window 10 s, the coordinator blocks for 15 s: nobody is declared dead."""
    here = World(lease_seconds=10.0)
    here.running("a", "b")
    here.now = 5.0
    here.step(s.SiteHeard(site="a"))
    here.step(s.SiteHeard(site="b"))
    here.tick()
    here.now += 15.0  # blocked: it wakes 5 s after a lease had ended
    here.tick()
    assert [member.active for member in here.job.members.values()] == [True, True]
    here.core.heard("a", here.now)  # what waited in the sockets
    here.tick(3.0)
    assert [member.active for member in here.job.members.values()] == [True, False]


def test_a_training_site_that_still_beats_stays_alive() -> None:
    """PC-089: 60 s of pure computation, window 10 s: progress and beats keep the lease."""
    here = World(lease_seconds=10.0, evaluation_timeout_seconds=1e6)
    here.running("a", "b")
    for _ in range(12):
        here.report("a", m.Progress(job="j", epoch=1, clock=0, step=1, of=10))
        here.step(s.SiteHeard(site="b"), wait=4.9)
        here.tick()
    assert all(member.active for member in here.job.members.values())
    assert here.now > 58.0


def test_a_measured_stall_extends_every_lease() -> None:
    here = World(lease_seconds=10.0)
    here.connect("a")
    here.core.stalled(15.0)
    assert here.core.wake_at() == 25.0


def test_a_new_process_goes_on_in_the_open_round() -> None:
    """PC-078: killed in round 3 of 6: the job is listed, goes on there, finishes at version 6."""
    here = World()
    here.running("a", "b", "c", spec=make_spec(sites=Sites(wanted=3), stop=Stop(versions=6)))
    here.round()
    here.round()
    here.upload("a")
    assert [type(action) for action in here.restart()] == [a.KeepVersions]
    assert here.core.jobs() == ("j",)
    view = here.core.view("j", here.now)
    assert (view.state, view.version, view.round) == ("running", 2, 3)
    told = []
    for site in ("a", "b", "c"):
        here.connect(site, instance="after")
        here.ready(site)
        told += here.to(m.Train)
    assert told == ["b", "c"]  # the update of a is here
    while here.job.state == "running":
        here.round()
    assert (here.job.number, here.job.rounds) == (6, 6)
    epochs = {member.epoch for member in here.job.members.values()}
    assert epochs == {1}


def test_after_a_restart_members_have_a_fresh_lease_and_lose_it_when_silent() -> None:
    here = World(lease_seconds=15.0).running("a", "b")
    here.now = 100.0
    here.restart()
    assert here.core.wake_at() == 60.0 or here.core.wake_at() == 115.0
    here.connect("a", instance="after")
    here.now = 115.0
    here.core.heard("a", here.now)
    here.tick()
    assert [member.active for member in here.job.members.values()] == [True, False]
    assert here.all(a.CloseSession) == []  # there was no session of b to close


def test_a_reconnecting_site_is_told_of_jobs_that_ended_without_it() -> None:
    here = World().running("a", "b")
    here.close("a")
    here.command("stop")
    here.connect("a", instance="2")
    ends = here.one(m.EndJob).instruction
    assert (ends.job, ends.final) == ("j", True)


def test_a_ready_for_a_job_that_is_gone_is_answered_by_its_end() -> None:
    here = World()
    here.connect("a")
    here.ready("a", "nowhere")
    assert here.one(m.EndJob).instruction.reason == "there is no such job"


def test_only_an_ended_job_can_be_forgotten() -> None:
    here = World().running("a", "b")
    with pytest.raises(ConflictError, match="is running"):
        here.core.forget("j")
    here.upload("a")
    here.upload("b")
    here.command("stop")
    with pytest.raises(ConflictError):
        here.core.forget("j")
    here.committed()
    here.core.forget("j")
    assert here.core.jobs() == ()


def test_spools_in_use_are_known_for_cleaning_up() -> None:
    here = World().running("a", "b")
    here.upload("a")
    assert here.core.spools("j") == {"a-1-0-1.body"}


def test_an_idle_core_never_wakes() -> None:
    core = Core(CoreConfig())
    assert core.wake_at() is None
    assert core.handle(s.Tick(), 5.0) == []
    assert core.resume(6.0) == []
    assert core.last_heard_seconds("a", 6.0) is None
    assert LAYOUT.dense_bytes() == 16


def _first_due(core: Core) -> float | None:
    """`wake_at` by looking at everything."""
    runs = [run for run in core._runs.values() if not (run.job.terminal and run.released)]
    due = [at for run in runs for at in lifecycle.deadlines(run)]
    due += [asked.deadline for run in runs for asked in run.evaluating.values()]
    due += [session.ends_at for session in core.sessions()]
    return min(due, default=None)


def _still_evaluating(run: Run) -> set[str]:
    """Whose report on the last version is waited for, by looking at all members."""
    job, everybody = run.job, run.job.spec.evaluation.sites
    return {
        member.site
        for member in job.active()
        if member.eval_examples > 0
        and (everybody or member.role == "evaluator")
        and member.evaluated_version < job.number
        and run.unevaluated.get(member.site) != job.number
    }


@settings(max_examples=200, deadline=None)
@given(histories)
def test_what_is_kept_up_to_date_is_what_looking_at_everything_finds(history: list[Step]) -> None:
    here = World(lease_seconds=8.0, evaluation_timeout_seconds=15.0)
    for step in history:
        play(here, step)
        core = here.core
        assert core.wake_at() == _first_due(core)
        over = {name for name, run in core._runs.items() if run.job.terminal and run.released}
        assert set(core._live) == set(core._runs) - over
        for run in core._runs.values():
            job = run.job
            assert job.spooled_bytes == sum(spool.bytes for spool in job.spools.values())
            if job.round is not None:
                at_work = {name for name, t in job.round.tasks.items() if t.state == "training"}
                assert job.round.training == at_work
            if job.state == "running":
                assert not evaluation.reached(job)
            if job.state == "draining" and not job.at_work and job.version is not None:
                assert run.last_word is not None
                waits = _still_evaluating(run)
                assert set(run.last_word.waits) == waits
                ready = {name for name in waits if run.present.get(name) == "ready"}
                assert ready <= set(run.evaluating)

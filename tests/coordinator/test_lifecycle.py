"""From submission to the end: version 0, start, stop rules, checkpoints, disk and memory."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import actions as a
from coordinator import stimuli as s
from coordinator.lifecycle import resident_bytes
from protocol import messages as m
from protocol.errors import ConflictError, MalformedError
from protocol.jobspec import (
    Checkpoint,
    Evaluation,
    Keep,
    Local,
    Pacing,
    Period,
    Server,
    Sites,
    Stop,
)
from protocol.jobstates import TRANSITIONS, JobState, JobStimulus
from tests.coordinator.coretools import LAYOUT, World, make_spec


def waits(here: World, words: str) -> None:
    """Whoever waits says so and has a deadline."""
    assert words in here.waiting()
    due = here.core.wake_at()
    assert due is not None
    assert due > here.now


# ---------------------------------------------------------------- version 0


def test_the_first_round_starts_when_the_wanted_sites_are_ready_and_takes_them_all() -> None:
    """PC-032: ten sites wanted and joining one by one: the first round is drawn from ten, takes ten."""
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=10)))
    for index in range(10):
        here.now += 0.2
        assert here.job.round is None
        here.join(f"site-{index}")
    here.init(here.job.init_site)
    assert here.job.round is not None
    assert len(here.job.round.tasks) == 10


def test_an_evaluator_builds_version_0_before_any_site_is_asked() -> None:
    here = World()
    here.submit()
    here.join("a")
    here.join("eva", role="evaluator")
    assert here.to(m.Initialise) == ["eva"]


def test_the_next_site_is_asked_when_the_first_fails_is_lost_or_is_too_slow() -> None:
    here = World(init_timeout_seconds=10.0, lease_seconds=1000.0)
    here.submit()
    for site in ("a", "b", "c", "d"):
        here.join(site)
    assert here.job.init_site == "a"
    here.report("a", m.Failed(job="j", epoch=0, clock=0, attempt=0, reason="no memory"))
    assert here.to(m.Initialise) == ["b"]
    here.step(s.SiteLeft(site="b", reason="bye"))
    assert here.to(m.Initialise) == ["c"]
    here.tick(10.0)
    assert here.to(m.Initialise) == ["d"]
    waits(here, "d is building version 0")


def test_when_nobody_can_build_version_0_the_job_fails_with_all_reasons() -> None:
    here = World()
    here.submit()
    for site in ("a", "b"):
        here.join(site)
    for site in ("a", "b"):
        here.report(site, m.Failed(job="j", epoch=0, clock=0, attempt=0, reason=f"{site} broke"))
    assert here.job.state == "failed"
    assert here.job.reason == "no site could build version 0; a: a broke; b: b broke"


def test_a_bad_version_0_is_refused_and_the_next_site_asked() -> None:
    here = World()
    here.submit()
    for site in ("a", "b"):
        here.join(site)
    here.step(s.InitComplete(job="j", site="a", facts=s.InitFacts(problem="NaN in 'w'")))
    assert here.one(a.Verdict).verdict == "refused_drop"
    assert here.to(m.Initialise) == ["b"]
    here.init("b")
    assert here.one(a.Verdict).verdict == "counted"
    here.init("a")
    assert here.one(a.Verdict).verdict == "duplicate"
    assert here.job.number == 0


@pytest.mark.parametrize("given", [False, True])
def test_a_model_whose_updates_are_too_large_ends_the_job_before_anybody_trains(
    given: bool,
) -> None:
    """PC-016: the reason names limit, size and setting; SCAFFOLD's second part counts as well."""
    for scaffold, limit in ((False, 76), (True, 112)):  # 16 bytes a part, 20 a frame
        here = World(upload_bytes_max=limit - 1)
        local = Local(scaffold=scaffold)
        here.submit(spec=make_spec(local=local), init=given)
        here.join("a")
        here.join("b")
        here.init("" if given else here.job.init_site)
        assert here.job.state == "failed"
        assert f"an update of this model has {limit} bytes" in here.job.reason
        assert f"limit of {limit - 1} bytes" in here.job.reason
        assert "upload_bytes_max" in here.job.reason
        assert [verdict.verdict for verdict in here.all(a.Verdict)] == (
            [] if given else ["refused_drop"]
        )
        assert here.to(m.Train) == []

        fits = World(upload_bytes_max=limit)
        fits.submit(spec=make_spec(local=local), init=given)
        fits.join("a")
        fits.join("b")
        fits.init("" if given else fits.job.init_site)
        assert fits.job.state == "running"


def test_a_model_that_is_only_evaluated_may_be_of_any_size() -> None:
    here = World(upload_bytes_max=1)
    here.submit(spec=make_spec(period=Period(epochs=0), stop=Stop()))
    here.join("a")
    here.join("b")
    here.init(here.job.init_site)
    assert here.job.state == "draining"


def test_a_given_file_becomes_version_0_in_the_layout_of_the_first_ready_site() -> None:
    here = World()
    here.submit(init=True)
    here.connect("a")
    assert here.all(a.TakeInit) == []
    here.ready("a")
    assert here.one(a.TakeInit).layout == LAYOUT
    assert "given file" in here.waiting()
    here.join("b")
    assert here.all(a.TakeInit) == []
    here.init("")
    assert here.all(a.Verdict) == []
    assert here.job.round is not None


def test_a_given_file_that_does_not_fit_fails_the_job_loudly() -> None:
    here = World()
    here.submit(init=True)
    here.join("a")
    here.step(s.InitComplete(job="j", site="", facts=s.InitFacts(problem="missing tensor 'w'")))
    assert here.job.state == "failed"
    assert "missing tensor 'w'" in here.job.reason


def test_a_bad_file_is_refused_at_submission() -> None:
    here = World()
    facts = s.InitFacts(problem="not safetensors")
    with pytest.raises(MalformedError, match="not safetensors"):
        here.step(s.JobSubmission(job="j", spec=make_spec(), by="ann", init=facts))
    assert here.core.jobs() == ()


def test_a_job_whose_sites_never_come_fails_at_its_start_timeout() -> None:
    here = World()
    here.submit(spec=make_spec(pacing=Pacing(start_timeout_seconds=30.0)))
    here.connect("a")
    here.ready("a")
    waits(here, "waiting for 1 more site")
    here.core.stalled(1000.0)
    here.tick(30.0)
    assert here.job.state == "failed"
    assert here.job.reason == "waited 30 s in vain: 1 of 2 sites are ready"


def test_a_job_that_waited_in_vain_says_what_kept_each_site_from_it() -> None:
    here = World(lease_seconds=1000.0)
    here.submit(
        spec=make_spec(
            sites=Sites(wanted=2, names=("a", "b", "c")),
            pacing=Pacing(start_timeout_seconds=30.0),
        )
    )
    here.connect("a", tasks=("another",))
    here.connect("b")
    here.report("b", m.Declined(job="j", reason="no GPU here."))
    here.tick(30.0)
    assert here.job.state == "failed"
    assert here.job.reason == (
        "waited 30 s in vain: 0 of 2 sites are ready: a: its owner has not allowed the task "
        "'digits'; b: no GPU here; c is not connected"
    )


@pytest.mark.parametrize("rule", ["bsp", "ssp", "async"])
def test_a_job_that_lost_all_sites_fails_with_what_became_of_each(rule: Any) -> None:
    here = World(lease_seconds=1000.0).running(
        "a", "b", spec=make_spec(pacing=Pacing(rule=rule, start_timeout_seconds=30.0))
    )
    here.failed("a", "data set is gone", fatal=True)
    here.failed("b", "disk is broken", fatal=True)
    for _ in range(3):
        here.tick(30.0)
    assert here.job.state == "failed"
    assert "waited 30 s in vain" in here.job.reason
    assert here.job.reason.endswith(": a: data set is gone; b: disk is broken")


# ---------------------------------------------------------------- running


def test_sites_without_data_are_members_that_never_block() -> None:
    """PC-055: 50, 50 and 0 examples: the third registers as 'no data' and is never waited for."""
    here = World()
    here.submit(spec=make_spec(sites=Sites(wanted=3)))
    here.join("a", train=50)
    here.join("b", train=50)
    here.join("c", train=0, test=0)
    here.init("a")
    here.round()
    here.round()
    job = here.job
    assert [member.counted for member in job.members.values()] == [2, 2, 0]
    views = {view.site: view for view in here.core.view("j", here.now).sites}
    assert views["c"].doing == "no data"
    here.command("drain")
    here.upload("a")
    here.upload("b")
    here.committed()
    assert sorted(here.to(m.Evaluate)) == ["a", "b"]  # its metrics stay blank


def test_a_job_in_which_nobody_has_data_waits_with_its_reason_and_a_deadline() -> None:
    """PC-013: without any examples no version is made, and the job says so."""
    here = World()
    here.submit()
    here.join("a", train=0)
    here.join("b", train=0)
    here.init("a")
    waits(here, "no training data at a, b")
    assert (here.job.state, here.job.number, here.job.round) == ("running", 0, None)


def test_zero_examples_from_all_make_the_round_void_and_keep_the_model() -> None:
    """PC-013: two updates of 0 examples: no usable contribution, the version stays."""
    here = World().running("a", "b")
    here.upload("a", facts=here.facts("a", examples=0.0))
    here.upload("b", facts=here.facts("b", examples=0.0))
    assert here.all(a.Commit) == []
    assert (here.job.number, here.job.failed_in_row) == (0, 1)
    assert "no usable contribution" in here.job.failures[0][1]
    assert here.to(m.Train) == ["a", "b"]


def test_rounds_void_in_a_row_fail_the_job_with_all_their_reasons() -> None:
    here = World().running("a", "b", spec=make_spec(pacing=Pacing(failed_rounds_max=2)))
    for _ in range(2):
        for site in ("a", "b"):
            for _ in range(2):
                here.failed(site, f"{site} has no memory")
    assert here.job.state == "failed"
    assert here.job.number == 0
    # The same story is told once, whatever number of rounds it is of.
    assert here.job.reason.startswith("2 rounds in a row were void; rounds 1, 2: ")
    assert here.job.reason.count("a has no memory") == 1


def test_void_rounds_with_different_reasons_are_all_told() -> None:
    here = World().running("a", "b", spec=make_spec(pacing=Pacing(failed_rounds_max=2)))
    for what in ("no memory", "no disk"):
        for site in ("a", "a", "b", "b"):
            here.failed(site, what)
    assert " void; round 1: " in here.job.reason
    assert "; round 2: " in here.job.reason
    assert "no memory" in here.job.reason
    assert "no disk" in here.job.reason


def test_a_full_disk_opens_no_round_until_there_is_room() -> None:
    here = World().running("a", "b")
    here.step(s.DiskState(full=True, reason="3 MB left"))
    here.round()
    assert here.job.round is None
    waits(here, "disk is full: 3 MB left")
    here.step(s.DiskState(full=False))
    assert here.to(m.Train) == ["a", "b"]


def test_a_job_queues_for_memory_and_starts_when_the_other_has_ended() -> None:
    here = World(jobs_resident_bytes_max=LAYOUT.dense_bytes())
    here.running("a", "b", spec=make_spec(sites=Sites(wanted=2, names=("a", "b"))))
    here.submit("k", make_spec(sites=Sites(wanted=1)))
    here.join("c", "k")
    here.init("c", "k")
    assert "queued for memory" in here.waiting("k")
    here.command("stop")
    assert here.core.job("k").round is not None


def test_a_round_queues_for_spool_room_and_a_checkpoint_makes_it() -> None:
    here = World(spool_bytes_max=1000)
    here.running("a", "b")
    here.round()
    waits(here, "queued for room")
    assert here.one(a.WriteCheckpoint).version == 1
    here.saved(1)
    assert here.one(a.Discard).spools == ("a-1-0-1.body", "b-1-0-1.body")
    assert here.job.round is not None


def test_a_round_that_can_never_fit_fails_the_job_naming_the_setting() -> None:
    here = World(spool_bytes_max=20)
    here.running("a", "b")
    assert here.job.state == "failed"
    assert "spool_bytes_max is 20: raise it" in here.job.reason


def test_resident_bytes_grow_with_the_server_optimizer() -> None:
    assert resident_bytes(make_spec(), 100) == 100
    adam = make_spec(server=Server(optimizer="adam"), local=Local(scaffold=True))
    assert resident_bytes(adam, 100) == 400


# ---------------------------------------------------------------- stop rules and the end


def finish(here: World) -> None:
    for site in list(here.to(m.Evaluate)):
        here.evaluated(site, here.job.number, accuracy=0.5)
    if here.job.checkpoint < here.job.number:
        here.saved(here.job.number)


def test_the_last_version_is_evaluated_and_written_before_the_job_is_finished() -> None:
    here = World().running("a", "b", spec=make_spec(stop=Stop(versions=1)))
    here.round()
    assert here.job.state == "draining"
    assert here.to(m.Evaluate) == ["a", "b"]
    assert here.one(a.WriteCheckpoint).version == 1
    waits(here, "the evaluation of version 1 by a, b")
    here.saved(1)
    here.evaluated("a", 1, accuracy=0.5)
    waits(here, "by b")
    here.evaluated("b", 1, accuracy=0.7)
    assert (here.job.state, here.job.reason) == ("finished", "version 1 was reached")
    assert here.to(m.EndJob) == ["a", "b"]
    assert here.all(a.Release) == [a.Release(job="j")]
    assert here.core.view("j", here.now).metrics["accuracy"].value == pytest.approx(0.6)


def test_a_silent_evaluator_delays_the_end_only_until_its_timeout() -> None:
    here = World(evaluation_timeout_seconds=5.0)
    here.running("a", "b", spec=make_spec(stop=Stop(versions=1)))
    here.round()
    here.saved(1)
    here.tick(5.0)
    assert here.job.state == "finished"


def test_a_checkpoint_that_fails_does_not_keep_the_job_from_finishing() -> None:
    here = World().running("a", "b", spec=make_spec(stop=Stop(versions=1)))
    here.round()
    here.saved(1, problem="disk full")
    for site in ("a", "b"):
        here.evaluated(site, 1, accuracy=0.5)
    assert here.job.state == "finished"
    assert "checkpoint still due: disk full" in here.job.reason
    assert here.all(a.Release) == []
    here.tick(30.0)
    assert here.one(a.WriteCheckpoint).version == 1
    here.saved(1)
    assert here.all(a.Release) == [a.Release(job="j")]


def test_running_time_stops_a_job() -> None:
    here = World(lease_seconds=1e6)
    here.running("a", "b", spec=make_spec(stop=Stop(seconds=50.0)))
    here.tick(49.0)
    assert here.job.state == "running"
    here.tick(1.0)
    assert (here.job.state, here.job.reason) == ("draining", "50 s of running time were over")
    here.round()  # the open round may close
    finish(here)
    assert (here.job.state, here.job.number) == ("finished", 1)


def test_an_evaluation_only_job_makes_no_version_and_ends_with_its_reports() -> None:
    here = World()
    here.submit(spec=make_spec(period=Period(epochs=0), stop=Stop()))
    for site in ("a", "b"):
        here.join(site)
    here.init("a")
    assert here.job.state == "draining"
    assert here.to(m.Evaluate) == ["a", "b"]
    for site in ("a", "b"):
        here.evaluated(site, 0, accuracy=0.5)
    assert (here.job.state, here.job.number, here.job.rounds) == ("finished", 0, 0)


def test_versions_are_kept_as_long_as_somebody_fetches_them() -> None:
    spec = make_spec(keep=Keep(versions=1), evaluation=Evaluation(every=1, sites=False))
    here = World()
    here.submit(spec=spec)
    for site in ("a", "b"):
        here.join(site)
    here.join("eva", role="evaluator")
    here.init("eva")
    assert here.to(m.Evaluate) == ["eva"]
    here.round()
    here.round()
    assert here.all(a.KeepVersions) == []  # the evaluator still works on version 0
    here.evaluated("eva", 0, accuracy=0.1)
    assert here.one(a.KeepVersions).oldest == 2


@pytest.mark.parametrize("compensation", ["none", "constant"])
def test_bases_of_updates_are_kept_until_a_checkpoint_covers_what_they_went_into(
    compensation: Any,
) -> None:
    spec = make_spec(
        pacing=Pacing(rule="async", staleness=9, compensation=compensation),
        keep=Keep(versions=1),
        checkpoint=Checkpoint(every=5, seconds=1e6),
        stop=Stop(versions=100),
    )
    here = World().running("fast", "slow", spec=spec)
    kept = set()

    def version(site: str) -> None:
        task = here.job.task(site)
        assert task is not None
        assert task.base is not None
        base = {"base_version": task.base.version, "base_digest": task.base.digest}
        assert here.upload(site, facts=here.facts(site, **base)).verdict == "queued"
        kept.update(v for action in here.all(a.KeepVersions) for v in action.besides)
        here.committed()
        kept.clear()
        kept.update(v for action in here.all(a.KeepVersions) for v in action.besides)

    for _ in range(3):
        version("fast")
    assert 0 in kept  # slow trains from it
    version("slow")
    assert (0 in kept) == (compensation != "none")  # version 4 is made of what started there
    version("fast")
    here.saved(5)
    version("fast")
    assert 0 not in kept


def test_checkpoints_follow_versions_and_time() -> None:
    spec = make_spec(checkpoint=Checkpoint(every=2, seconds=100.0))
    here = World(lease_seconds=1e6)
    here.running("a", "b", spec=spec)
    here.round()
    assert here.all(a.WriteCheckpoint) == []
    here.tick(50.0)
    assert here.all(a.WriteCheckpoint) == []
    here.now = 100.0
    here.tick()
    assert here.one(a.WriteCheckpoint).version == 1


# ---------------------------------------------------------------- commands in every state


def in_state(state: JobState) -> World:
    here = World()
    if state == "initialising":
        here.submit()
        here.join("a")
        return here
    here.running("a", "b", spec=make_spec(stop=Stop(versions=9)))
    if state == "paused":
        here.command("pause")
    elif state == "draining":
        here.command("drain")
    elif state == "failed":
        here.failed("a", "broken", fatal=True)
        here.failed("b", "broken", fatal=True)
        here.tick(86_400.0)
    elif state == "stopped":
        here.command("stop")
    elif state == "finished":
        here.command("drain")
        here.round()
        finish(here)
    return here


STATES: list[JobState] = [
    "initialising",
    "running",
    "paused",
    "draining",
    "finished",
    "failed",
    "stopped",
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("what", ["pause", "resume", "drain", "stop", "start", "finish", "fail"])
def test_commands_keep_to_the_table_of_transitions(state: JobState, what: JobStimulus) -> None:
    here = in_state(state)
    assert here.job.state == state
    rows = len(here.journal)
    allowed = (state, what) in TRANSITIONS and what in ("pause", "resume", "drain", "stop")
    if not allowed:
        with pytest.raises(ConflictError):
            here.command(what)
        assert (here.job.state, len(here.journal)) == (state, rows)
        return
    here.command(what)
    assert here.job.state == TRANSITIONS[(state, what)]


@pytest.mark.parametrize("phase", ["waiting", "loading", "initialising", "training", "aggregating"])
def test_a_job_is_cancelled_at_once_in_every_phase(phase: str) -> None:
    """PC-090: stop while waiting, loading, building version 0, training and aggregating."""
    here = World()
    here.submit()
    if phase != "waiting":
        here.connect("a")
        here.connect("b")
    if phase in ("initialising", "training", "aggregating"):
        here.ready("a")
        here.ready("b")
    if phase in ("training", "aggregating"):
        here.init("a")
        here.upload("a")
    if phase == "aggregating":
        here.upload("b")
    here.command("stop")
    assert here.job.state == "stopped"
    assert here.waiting() == "" or phase == "aggregating"
    if phase != "waiting":
        assert here.to(m.EndJob) == ["a", "b"]
    if phase == "training":
        assert here.to(m.Abort) == ["b"]
        assert here.to(m.Settled) == ["a"]
        assert here.one(a.Discard).spools == ("a-1-0-1.body",)
    if phase == "aggregating":  # what was acknowledged and is being folded still counts
        here.committed()
        assert here.job.number == 1
        here.saved(1)
    assert here.core.wake_at() is None or here.core.sessions()
    assert not here.core._live


def test_a_paused_job_lets_its_round_close_opens_none_and_goes_on() -> None:
    here = World().running("a", "b")
    here.command("pause")
    here.round()
    assert (here.job.number, here.job.round, here.job.state) == (1, None, "paused")
    assert here.one(a.WriteCheckpoint).version == 1
    here.saved(1)
    assert here.all(a.Release) == [a.Release(job="j")]
    assert "waits for somebody to resume it" in here.waiting()
    here.command("resume")
    assert here.to(m.Train) == ["a", "b"]


def test_a_job_paused_before_its_start_still_waits_for_the_wanted_sites() -> None:
    here = World()
    here.submit()
    here.join("a")
    here.command("pause")
    here.command("resume")
    assert (here.job.state, here.job.started) == ("running", False)
    assert "1 of 2 sites are ready" in here.waiting()
    here.join("b")
    here.init("a")
    assert here.job.round is not None

from __future__ import annotations

import random
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from client import ipc
from client import sessionapi as api
from client.assignment import Patience
from client.session import Session
from client.sessionapi import AnyAction, AnyStimulus, Identity, RememberJob, StoredUpdate
from protocol import messages
from protocol.layout import Layout, TensorSpec
from protocol.messages import Event, Instruction, Receipt, VerdictKind, VersionRef
from tests.client.fake_coordinator import stub_spec

JOBS = Path("/site/jobs")
LAYOUT = Layout(tensors=(TensorSpec(name="w", shape=(2,), dtype="float32", role="train"),))
LOADED = ipc.Loaded(layout=LAYOUT, train_examples=10, eval_examples=5)
PREPARE = messages.Prepare(job="j", spec=stub_spec())
A = TypeVar("A", bound=api.Action)
E = TypeVar("E", bound=Event)


def ref(version: int) -> VersionRef:
    return VersionRef(version=version, digest=f"d{version}", bytes=100)


def train_of(
    clock: int, *, version: int | None = None, epoch: int = 1, attempt: int = 1
) -> messages.Train:
    base = ref(clock if version is None else version)
    return messages.Train(job="j", epoch=epoch, clock=clock, attempt=attempt, base=base, steps=3)


def identity(clock: int, *, epoch: int = 1, attempt: int = 1) -> Identity:
    return Identity(job="j", epoch=epoch, clock=clock, attempt=attempt)


def stored(clock: int, *, epoch: int = 1, attempt: int = 1) -> StoredUpdate:
    return StoredUpdate(
        identity=identity(clock, epoch=epoch, attempt=attempt), body=Path("/b"), bytes=1000
    )


def receipt(verdict: VerdictKind, offset: int = 1000, reason: str = "") -> Receipt:
    return Receipt(offset=offset, verdict=verdict, reason=reason)


class Site:
    """A session and what it asked for; `now` moves only when a test says so."""

    def __init__(
        self, *updates: StoredUpdate, known: bool = False, patience: Patience | None = None
    ) -> None:
        remembered = {"j": RememberJob(job="j", spec=stub_spec(), evaluator=False)}
        self.session = Session(
            jobs=JOBS,
            stored=updates,
            known=remembered if known else {},
            rng=random.Random(1),
            patience=patience,
        )
        self.now = 0.0
        self.all: list[AnyAction] = []
        self.last: list[AnyAction] = []

    def hear(self, *stimuli: AnyStimulus) -> list[AnyAction]:
        self.last = []
        for stimulus in stimuli:
            self.last += self.session.handle(stimulus, self.now)
        self.all += self.last
        return self.last

    def told(self, *instructions: Instruction) -> list[AnyAction]:
        return self.hear(*(api.Instructed(instruction=each) for each in instructions))

    @property
    def worker(self) -> int:
        return self.of(api.StartWorker)[-1].worker

    def says(self, *said: ipc.FromWorker) -> list[AnyAction]:
        return self.hear(*(api.WorkerSaid(worker=self.worker, message=each) for each in said))

    def of(self, kind: type[A], actions: list[AnyAction] | None = None) -> list[A]:
        found = self.all if actions is None else actions
        return [action for action in found if isinstance(action, kind)]

    def reports(self, kind: type[E], actions: list[AnyAction] | None = None) -> list[E]:
        events = [report.event for report in self.of(api.Report, actions)]
        return [event for event in events if isinstance(event, kind)]

    def asks(self, actions: list[AnyAction] | None = None) -> list[ipc.ToWorker]:
        return [tell.message for tell in self.of(api.Tell, actions)]

    def ready(self) -> Site:
        self.told(PREPARE)
        self.says(LOADED)
        return self

    def training(self, clock: int = 0) -> Site:
        """To where the worker trains this clock."""
        self.told(train_of(clock))
        self.hear(api.Fetched(job="j", version=clock))
        assert isinstance(self.asks(self.last)[-1], ipc.TrainPeriod)
        return self

    def trained(self, clock: int = 0) -> list[AnyAction]:
        return self.says(
            ipc.Trained(epoch=1, clock=clock, attempt=1, path="x", bytes=1000, seconds=1.0)
        )

    def settled(self, clock: int = 0) -> list[AnyAction]:
        return self.says(ipc.SettledHere(epoch=1, clock=clock))


# ---------------------------------------------------------------- the ordinary way


def test_prepare_starts_a_worker_and_says_ready_when_it_has_loaded():
    site = Site()
    site.told(PREPARE)
    assert [type(action) for action in site.last] == [api.RememberJob, api.Say, api.StartWorker]
    site.says(LOADED)
    ready = site.reports(messages.Ready)[0]
    assert ready.layout_digest == LAYOUT.digest()
    assert (ready.train_examples, ready.eval_examples) == (10, 5)


def test_a_period_goes_from_fetch_to_settle():
    site = Site().ready()
    site.told(train_of(0))
    assert site.of(api.Fetch, site.last) == [api.Fetch(job="j", base=ref(0))]
    site.hear(api.Fetched(job="j", version=0))
    period = site.asks(site.last)[0]
    assert isinstance(period, ipc.TrainPeriod)
    assert (period.base_version, period.base_digest, period.steps) == (0, "d0", 3)
    site.trained()
    upload = site.of(api.Upload, site.last)[0]
    assert (upload.update.identity, upload.offset) == (identity(0), 0)
    assert upload.update.body.parts[-2:] == ("update-1-0-1", "body")
    site.hear(api.Stands(identity=identity(0), receipt=receipt("queued")))
    assert site.asks(site.last) == [ipc.Settle(epoch=1, clock=0, attempt=1, verdict="queued")]
    site.settled()
    assert site.last == []
    assert site.session.doing() == "waits for the coordinator's next instruction"


def test_the_next_period_may_be_asked_for_before_the_receipt_and_waits_for_it():
    site = Site().ready().training(0)
    site.trained()
    site.told(train_of(1))
    site.hear(api.Fetched(job="j", version=1))
    assert site.asks(site.last) == []
    assert not site.of(api.CallOff)
    site.hear(api.Stands(identity=identity(0), receipt=receipt("counted")))
    site.settled()
    period = site.asks(site.last)[0]
    assert isinstance(period, ipc.TrainPeriod)
    assert period.clock == 1


def test_a_base_is_kept_until_the_next_one_is_there():
    site = Site().ready().training(0)
    assert site.of(api.KeepBases) == [api.KeepBases(job="j", versions=(0,))]
    site.told(train_of(1))  # while 0 is being trained: it is superseded, but still in use
    site.hear(api.Fetched(job="j", version=1))
    assert api.KeepBases(job="j", versions=(0, 1)) in site.last
    site.says(ipc.Stopped())
    site.trained(1)
    site.hear(api.Stands(identity=identity(1), receipt=receipt("queued")))
    site.settled(1)
    site.told(train_of(2))
    site.hear(api.Fetched(job="j", version=2))
    assert api.KeepBases(job="j", versions=(2,)) in site.last


def test_a_base_that_is_here_is_not_fetched_again():
    site = Site().ready().training(0)
    site.trained()
    site.hear(api.Stands(identity=identity(0), receipt=receipt("queued")))
    site.told(train_of(1, version=0))
    site.settled()
    period = site.asks(site.last)[-1]
    assert isinstance(period, ipc.TrainPeriod)
    assert (period.clock, period.base_version) == (1, 0)
    assert len(site.of(api.Fetch)) == 1


def test_a_pinned_read_goes_straight_to_its_version_whatever_is_newer():
    site = Site().ready()
    site.told(train_of(0, version=5))
    site.hear(api.Fetched(job="j", version=5))
    site.trained()
    site.hear(api.Stands(identity=identity(0), receipt=receipt("counted")))
    site.settled()
    site.told(train_of(1, version=3))
    assert site.of(api.Fetch, site.last) == [api.Fetch(job="j", base=ref(3))]
    site.hear(api.Fetched(job="j", version=3))
    period = site.asks(site.last)[-1]
    assert isinstance(period, ipc.TrainPeriod)
    assert (period.base_version, period.base_digest) == (3, "d3")
    assert site.of(api.KeepBases)[-1].versions == (3,)


def test_another_snapshot_under_the_same_number_is_fetched_in_its_place():
    site = Site().ready().training(0)
    site.trained()
    site.hear(api.Stands(identity=identity(0), receipt=receipt("counted")))
    site.settled()
    base = VersionRef(version=0, digest="other", bytes=100)
    site.told(msgspec.structs.replace(train_of(1), base=base))
    assert site.last == [api.KeepBases(job="j", versions=()), api.Fetch(job="j", base=base)]
    site.hear(api.Fetched(job="j", version=0))
    period = site.asks(site.last)[-1]
    assert isinstance(period, ipc.TrainPeriod)
    assert period.base_digest == "other"


def test_a_base_that_the_evaluation_needs_stays_when_that_of_a_period_comes():
    site = Site().ready()
    site.told(messages.Evaluate(job="j", base=ref(4)))
    site.hear(api.Fetched(job="j", version=4))
    site.says(ipc.WorkerFailed(reason="no memory just now"))
    site.told(messages.Evaluate(job="j", base=ref(4)), train_of(0, version=2))
    site.hear(api.Fetched(job="j", version=2))
    assert site.of(api.KeepBases)[-1].versions == (2, 4)
    assert len(site.of(api.Fetch)) == 2


def test_a_period_that_its_time_box_cut_is_told_in_a_sentence():
    site = Site().ready()
    site.told(msgspec.structs.replace(train_of(0), seconds=2.5, applied=0))
    site.hear(api.Fetched(job="j", version=0))
    period = site.asks(site.last)[-1]
    assert isinstance(period, ipc.TrainPeriod)
    assert (period.seconds, period.applied) == (2.5, 0)
    trained = ipc.Trained(
        epoch=1, clock=0, attempt=1, path="x", bytes=1, seconds=2.6, steps=12, of=40, cut=True
    )
    site.says(trained)
    said = site.of(api.Say, site.last)
    assert [say.text for say in said] == [
        "clock 0 (epoch 1) was cut at step 12 of 40 by its time box of 2.5 s"
    ]
    assert not said[0].warning
    assert site.of(api.Upload, site.last)


def test_a_later_word_finds_its_update_although_later_ones_were_settled_since():
    site = Site().ready()
    for clock in range(2):
        site.training(clock)
        site.trained(clock)
        site.hear(api.Stands(identity=identity(clock), receipt=receipt("queued")))
        site.settled(clock)
    word = messages.Settled(job="j", epoch=1, clock=0, verdict="refused_return", reason="void")
    site.told(word)
    assert site.asks(site.last) == [
        ipc.Settle(epoch=1, clock=0, attempt=0, verdict="refused_return")
    ]


def test_an_evaluation_is_fetched_evaluated_and_reported():
    site = Site().ready()
    site.told(messages.Evaluate(job="j", base=ref(4)))
    site.hear(api.Fetched(job="j", version=4))
    assert isinstance(site.asks(site.last)[0], ipc.EvaluateBase)
    site.says(ipc.EvaluatedHere(version=4, examples=5, metrics={}))
    assert site.reports(messages.Evaluated)[0].version == 4


def test_version_zero_is_made_and_sent_once():
    site = Site().ready()
    initialise = messages.Initialise(job="j")
    site.told(initialise, initialise)
    site.says(ipc.InitMade(path="x", bytes=7))
    site.told(initialise)
    assert len(site.of(api.UploadInit)) == 1
    assert len([ask for ask in site.asks() if isinstance(ask, ipc.MakeInit)]) == 1
    site.hear(api.InitTaken(job="j"))
    assert site.last == []


def test_progress_is_reported_at_most_every_five_seconds():
    site = Site().ready().training(0)
    for second in range(12):
        site.now = float(second)
        site.says(ipc.Stepped(epoch=1, clock=0, step=second, of=12))
    assert [event.step for event in site.reports(messages.Progress)] == [0, 5, 10]


# ---------------------------------------------------------------- twice, late, never


def test_a_repeated_instruction_changes_nothing():
    site = Site().ready()
    site.told(PREPARE)
    assert len(site.of(api.StartWorker)) == 1
    assert len(site.reports(messages.Ready)) == 2  # it was asked for twice
    site.training(0)
    site.told(train_of(0))
    assert site.last == []
    site.trained()
    site.told(train_of(0))
    assert site.last == []
    site.hear(api.Stands(identity=identity(0), receipt=receipt("queued")))
    site.settled()
    site.told(train_of(0))
    assert site.last == []


def test_a_train_of_the_past_is_left_alone():
    site = Site().ready().training(3)
    site.told(train_of(2))
    assert site.last == []


def test_a_later_attempt_of_a_failed_clock_is_trained():
    site = Site().ready().training(0)
    site.says(ipc.WorkerFailed(reason="bad luck", epoch=1, clock=0, attempt=1))
    failed = site.reports(messages.Failed)[0]
    assert (failed.reason, failed.fatal, failed.attempt) == ("bad luck", False, 1)
    site.told(train_of(0, attempt=2))
    assert site.of(api.Fetch, site.last)  # the snapshot is fetched anew: the fault may be in it
    site.hear(api.Fetched(job="j", version=0))
    again = site.asks(site.last)[0]
    assert isinstance(again, ipc.TrainPeriod)
    assert again.attempt == 2


def test_a_new_epoch_stops_the_period_of_the_old_one():
    site = Site().ready().training(4)
    site.told(train_of(2, version=4, epoch=2))
    assert site.asks(site.last) == [ipc.Stop()]
    site.says(ipc.Stopped())
    period = site.asks(site.last)[-1]
    assert isinstance(period, ipc.TrainPeriod)
    assert (period.epoch, period.clock) == (2, 2)


def test_abort_stops_training_once_and_drops_a_result_that_came_all_the_same():
    site = Site().ready().training(0)
    abort = messages.Abort(job="j", epoch=1, clock=0, attempt=1, reason="late")
    site.told(abort)
    assert site.asks(site.last) == [ipc.Stop()]
    site.told(abort)
    assert site.asks(site.last) == []
    site.trained()
    assert not site.of(api.Upload)
    site.says(ipc.Stopped())
    assert site.asks(site.last) == [ipc.Settle(epoch=1, clock=0, attempt=1, verdict="refused_drop")]


def test_abort_of_a_finished_period_calls_its_upload_off():
    site = Site().ready().training(0)
    site.trained()
    site.told(messages.Abort(job="j", epoch=1, clock=0, attempt=1, reason="late"))
    assert site.of(api.CallOff, site.last) == [api.CallOff(identity=identity(0))]
    settle = site.asks(site.last)[0]
    assert isinstance(settle, ipc.Settle)
    assert settle.verdict == "refused_drop"
    # The answer that was on its way changes nothing any more.
    site.hear(api.Stands(identity=identity(0), receipt=receipt("queued")))
    assert not site.of(api.Tell, site.last)


def test_abort_of_an_earlier_attempt_is_not_about_us():
    site = Site().ready()
    site.told(train_of(0, attempt=2))
    site.hear(api.Fetched(job="j", version=0))
    assert isinstance(site.asks(site.last)[0], ipc.TrainPeriod)
    site.told(messages.Abort(job="j", epoch=1, clock=0, attempt=1, reason="x"))
    assert site.asks(site.last) == []


def test_a_queued_update_that_is_voided_later_comes_back():
    site = Site().ready().training(0)
    site.trained()
    site.hear(api.Stands(identity=identity(0), receipt=receipt("queued")))
    voided = messages.Settled(
        job="j", epoch=1, clock=0, verdict="refused_return", reason="no quorum"
    )
    site.told(voided, voided)  # even before the worker has settled the first word
    site.settled()
    assert site.asks(site.last) == [
        ipc.Settle(epoch=1, clock=0, attempt=1, verdict="refused_return")
    ]
    site.settled()
    assert site.asks(site.last) == []


def test_end_of_the_job_stops_the_worker_and_forgets_only_when_final():
    site = Site().ready().training(0)
    worker = site.worker
    site.told(messages.EndJob(job="j", reason="drained", final=False))
    assert site.of(api.StopWorker, site.last)[0].worker == worker
    assert site.of(api.LeaveJob, site.last) == [api.LeaveJob(job="j", forget=False)]
    site.told(messages.EndJob(job="j", reason="finished", final=True))
    assert site.of(api.LeaveJob, site.last) == [api.LeaveJob(job="j", forget=True)]
    site.told(train_of(5))
    assert "prepared" in site.reports(messages.Failed, site.last)[0].reason


def test_one_job_at_a_time():
    site = Site().ready().training(0)
    first = site.worker
    site.told(messages.Prepare(job="k", spec=stub_spec()))
    kinds = [type(action) for action in site.last]
    assert kinds.index(api.StopWorker) < kinds.index(api.StartWorker)
    assert site.worker != first
    assert site.session.job == "k"
    site.hear(api.WorkerSaid(worker=first, message=LOADED))  # of the one that was stopped
    assert site.last == []


def test_goodbye_for_good_ends_the_agent_and_goodbye_for_now_does_not():
    site = Site()
    assert site.told(messages.Bye(reason="restart", retry=True)) == []
    assert site.told(messages.Bye(reason="removed", retry=False)) == [api.Finish(reason="removed")]


# ---------------------------------------------------------------- after a crash of the agent


def test_what_was_finished_is_asked_about_first_and_never_trained_again():
    site = Site(stored(3), known=True)
    assert site.hear(api.Connected()) == [api.AskVerdict(identity=identity(3))]
    site.told(train_of(3))
    assert not site.of(api.Tell)
    site.hear(api.Stands(identity=identity(3), receipt=receipt("unsettled", offset=400)))
    upload = site.of(api.Upload, site.last)[0]
    assert (upload.offset, upload.update.bytes) == (400, 1000)
    site.says(LOADED)
    assert not site.reports(messages.Ready)  # nobody asked for it
    site.hear(api.Fetched(job="j", version=3))
    site.hear(api.Stands(identity=identity(3), receipt=receipt("queued")))
    site.settled(3)
    assert not [ask for ask in site.asks() if isinstance(ask, ipc.TrainPeriod)]


def test_a_verdict_of_before_the_crash_is_settled_before_the_next_period():
    site = Site(stored(3), known=True)
    site.hear(api.Connected())
    site.hear(api.Stands(identity=identity(3), receipt=receipt("counted")))
    site.told(train_of(4))
    site.hear(api.Fetched(job="j", version=4))
    site.says(LOADED)
    assert site.asks() == [ipc.Settle(epoch=1, clock=3, attempt=1, verdict="counted")]
    site.settled(3)
    assert isinstance(site.asks()[-1], ipc.TrainPeriod)


def test_a_half_sent_update_that_nobody_waits_for_is_dropped_not_sent():
    site = Site(stored(3), known=True)
    site.hear(api.Connected())
    site.told(train_of(4))
    site.hear(api.Stands(identity=identity(3), receipt=receipt("unsettled", offset=10)))
    assert not site.of(api.Upload)
    site.says(LOADED)
    settle = site.asks()[0]
    assert isinstance(settle, ipc.Settle)
    assert settle.verdict == "refused_drop"


def test_an_update_that_is_whole_but_not_judged_is_looked_at_again_even_when_superseded():
    """The coordinator may have died between the last byte and its verdict: the end is sent again."""
    site = Site(stored(3), known=True)
    site.hear(api.Connected())
    site.told(train_of(4))
    site.hear(api.Stands(identity=identity(3), receipt=receipt("unsettled", offset=1000)))
    assert [upload.offset for upload in site.of(api.Upload)] == [1000]
    site.hear(api.UploadBroke(identity=identity(3), reason="it is being settled"))
    wake = site.session.wake_at()
    assert wake is not None
    site.now = wake
    assert site.of(api.AskVerdict, site.hear(api.Tick()))


def test_a_job_that_is_gone_is_forgotten():
    site = Site(stored(3), known=True)
    site.hear(api.Connected(), api.JobUnknown(job="j"))
    assert api.LeaveJob(job="j", forget=True) in site.last
    assert site.hear(api.Connected()) == []


# ---------------------------------------------------------------- uploads that fail


def test_a_broken_upload_is_asked_about_after_a_pause_and_resumed():
    site = Site().ready().training(0)
    site.trained()
    site.hear(api.UploadBroke(identity=identity(0), reason="reset"))
    assert site.last == []
    wake = site.session.wake_at()
    assert wake is not None
    assert 0.2 <= wake <= 0.4
    site.now = wake
    assert site.hear(api.Tick()) == [api.AskVerdict(identity=identity(0))]
    site.hear(api.Stands(identity=identity(0), receipt=receipt("unsettled", offset=600)))
    assert site.of(api.Upload, site.last)[0].offset == 600


def test_bytes_that_are_damaged_again_and_again_are_given_up():
    site = Site().ready().training(0)
    site.trained()
    for _ in range(5):
        site.hear(api.UploadBroke(identity=identity(0), reason="bad checksum", damaged=True))
        wake = site.session.wake_at()
        site.now = max(site.now, wake or 0.0)
        site.hear(api.Tick())
        site.hear(api.Stands(identity=identity(0), receipt=receipt("unsettled", offset=0)))
    failed = site.reports(messages.Failed)[0]
    assert (failed.reason, failed.fatal) == ("bad checksum", False)
    assert site.asks()[-1] == ipc.Settle(epoch=1, clock=0, attempt=1, verdict="refused_drop")


def test_an_upload_above_a_limit_ends_the_site_in_the_job_with_the_reason():
    site = Site().ready().training(0)
    site.trained()
    site.hear(api.UploadRefused(identity=identity(0), reason="above upload_bytes_max"))
    failed = site.reports(messages.Failed)[0]
    assert failed.fatal
    assert "upload_bytes_max" in failed.reason


# ---------------------------------------------------------------- workers that fail


def test_a_task_that_is_not_allowed_is_declined():
    site = Site()
    site.told(PREPARE)
    site.hear(api.TaskDeclined(worker=site.worker, reason="not allowed here"))
    assert site.reports(messages.Declined)[0].reason == "not allowed here"
    assert len(site.of(api.StartWorker)) == 1


def test_a_task_that_cannot_be_loaded_is_declined_with_its_own_words():
    site = Site()
    site.told(PREPARE)
    site.says(ipc.WorkerFailed(reason="task.py:7: no such data", fatal=True))
    assert site.reports(messages.Declined)[0].reason == "task.py:7: no such data"
    assert site.of(api.StopWorker)


def test_a_worker_that_dies_twice_while_loading_is_not_started_a_third_time():
    site = Site()
    site.told(PREPARE)
    site.hear(api.WorkerDied(worker=1, reason="SIGKILL"))
    assert site.worker == 2
    site.hear(api.WorkerDied(worker=2, reason="SIGKILL"))
    assert site.worker == 2
    assert site.reports(messages.Declined)[0].reason == "SIGKILL"


def test_a_worker_that_dies_in_training_is_reported_and_started_for_the_next_train():
    site = Site().ready().training(0)
    site.hear(api.WorkerDied(worker=1, reason="the worker was ended by SIGKILL"))
    failed = site.reports(messages.Failed)[0]
    assert "SIGKILL" in failed.reason
    assert not failed.fatal
    assert site.worker == 1
    site.told(train_of(1))
    assert site.worker == 2
    site.says(LOADED)
    assert len(site.reports(messages.Ready)) == 1


def test_two_deaths_in_a_row_are_fatal():
    site = Site().ready().training(0)
    site.hear(api.WorkerDied(worker=1, reason="SIGSEGV"))
    site.told(train_of(0, attempt=2))
    site.says(LOADED)
    assert isinstance(site.asks()[-1], ipc.TrainPeriod)
    site.hear(api.WorkerDied(worker=2, reason="SIGSEGV"))
    assert [event.fatal for event in site.reports(messages.Failed)] == [False, True]


def test_a_silent_worker_is_ended_and_the_wait_has_a_deadline():
    """PC-040: the reason says who, what, for how long, and which setting that is."""
    site = Site(patience=Patience(work=50.0)).ready().training(0)
    assert site.session.wake_at() == 50.0
    site.now = 30.0
    site.says(ipc.Stepped(epoch=1, clock=0, step=1, of=3))
    assert site.session.wake_at() == 80.0
    site.now = 80.0
    site.hear(api.Tick())
    assert site.of(api.StopWorker)
    assert site.reports(messages.Failed)[0].reason == (
        "the worker said nothing for 50 s (work_timeout_seconds of this site) while it trains "
        "clock 0, step 1 of 3"
    )


def test_a_task_that_never_loads_is_given_up_after_the_time_of_its_own_setting():
    """PC-040"""
    site = Site(patience=Patience(load=600.0))
    site.told(PREPARE)
    assert site.session.wake_at() == 600.0
    for site.now in (600.0, 1200.0):
        site.hear(api.Tick())
    (declined,) = site.reports(messages.Declined)
    assert "said nothing for 10 min (load_timeout_seconds of this site)" in declined.reason


def test_a_worker_may_take_as_long_to_stop_as_a_step_may_take():
    """PC-040: no shorter limit, of which nobody knows, ends a worker that is called off."""
    site = Site(patience=Patience(work=3600.0)).ready().training(0)
    site.told(messages.Abort(job="j", epoch=1, clock=0, attempt=1, reason="late"))
    assert site.asks(site.last) == [ipc.Stop()]
    site.now = 3599.0
    assert site.hear(api.Tick()) == []
    site.says(ipc.Stopped())
    assert site.session.wake_at() is None
    assert not site.of(api.StopWorker)


def test_an_evaluation_that_fails_is_reported_blank_so_that_nobody_waits():
    site = Site().ready()
    site.told(messages.Evaluate(job="j", base=ref(1)))
    site.hear(api.Fetched(job="j", version=1))
    site.says(ipc.WorkerFailed(reason="no metric"))
    report = site.reports(messages.Evaluated)[0]
    assert (report.examples, report.metrics) == (0.0, {})


def test_a_version_that_cannot_be_fetched_fails_the_period_with_the_reason():
    site = Site().ready()
    site.told(train_of(0))
    site.hear(api.FetchFailed(job="j", version=0, reason="not kept"))
    assert "not kept" in site.reports(messages.Failed)[0].reason


# ---------------------------------------------------------------- any order of anything


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_order_nothing_is_trained_twice_and_every_wait_has_an_end(seed: int):
    """A worker and a coordinator that answer in any order, with repeats, breaks and deaths."""
    rng = random.Random(seed)
    site = Site().ready()
    clock, pending = 0, list[AnyStimulus]()
    trained: list[Identity] = []
    instruction = train_of(0)
    site.told(instruction)
    for _ in range(300):
        site.now += rng.random()
        for action in site.last:
            match action:
                case api.Fetch(job=job, base=base):
                    pending.append(api.Fetched(job=job, version=base.version))
                case api.StartWorker(worker=worker):
                    pending.append(api.WorkerSaid(worker=worker, message=LOADED))
                case api.Tell(worker=worker, message=ipc.TrainPeriod() as period):
                    ours = identity(period.clock, attempt=period.attempt)
                    assert ours not in trained
                    trained.append(ours)
                    done = ipc.Trained(
                        epoch=1,
                        clock=period.clock,
                        attempt=period.attempt,
                        path="",
                        bytes=1000,
                        seconds=0.0,
                    )
                    died = api.WorkerDied(worker=worker, reason="killed")
                    said = api.WorkerSaid(worker=worker, message=done)
                    pending.append(died if rng.random() < 0.05 else said)
                case api.Tell(worker=worker, message=ipc.Settle() as settle):
                    here = ipc.SettledHere(epoch=settle.epoch, clock=settle.clock)
                    pending.append(api.WorkerSaid(worker=worker, message=here))
                case api.Upload(update=update, offset=offset):
                    broke = api.UploadBroke(identity=update.identity, reason="reset")
                    stands = api.Stands(identity=update.identity, receipt=receipt("queued"))
                    pending.append(broke if rng.random() < 0.4 and offset < 1000 else stands)
                case api.AskVerdict(identity=asked):
                    offset = rng.choice([0, 300, 999])
                    answer = receipt("unsettled", offset)
                    pending.append(api.Stands(identity=asked, receipt=answer))
                case api.Report(event=messages.Failed() as failed) if not failed.fatal:
                    instruction = train_of(clock, attempt=failed.attempt + 1)
                    pending.append(api.Instructed(instruction=instruction))
                case _:
                    pass
        if trained and trained[-1].clock == clock and rng.random() < 0.2:
            clock += 1
            instruction = train_of(clock)
            pending.append(api.Instructed(instruction=instruction))
        if rng.random() < 0.2:
            pending.append(api.Instructed(instruction=instruction))
        wake = site.session.wake_at()
        if pending:
            site.hear(pending.pop(rng.randrange(len(pending))))
        elif wake is not None:
            site.now = max(site.now, wake)
            site.hear(api.Tick())
        else:
            site.last = []
    assert len(trained) > 5
    assert trained == sorted(trained)


def test_actions_and_stimuli_are_values():
    first = api.Upload(update=stored(1), offset=3)
    assert first == api.Upload(update=stored(1), offset=3)
    with pytest.raises(AttributeError):
        first.offset = 4  # type: ignore[misc]
    assert msgspec.structs.replace(first, offset=4).offset == 4

"""One job at this site, pure: what is wanted of it, and what its worker does about it.

    wanted: announce, init, train, evaluate              taken back by Abort
    worker: none -> loading -> idle <-> one request in hand

`advance` compares the two and says the next step. So an instruction that comes twice changes
nothing, and it does not matter which of two races was won: the instruction for the next period may
well come before the receipt of the last one, and waits until that is settled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from client import ipc
from client.delivery import Deliveries
from client.sessionapi import (
    AnyAction,
    Fetch,
    Fetched,
    FetchFailed,
    Identity,
    KeepBases,
    RememberJob,
    Report,
    Say,
    StartWorker,
    StopWorker,
    StoredUpdate,
    Tell,
    UploadInit,
)
from client.sitefiles import base_body, init_body, text_of
from client.sitestate import BODY, update_name
from protocol import messages
from protocol.limits import PROGRESS_EVERY_SECONDS, REASON_CHARS_MAX
from protocol.messages import VersionRef
from protocol.words import span

DEATHS_MAX: Final = 2  # of a worker in a row, without anything done in between


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker may say nothing, in seconds, before it is ended."""

    load: float = 3600.0
    work: float = 3600.0  # one step (also one that a Stop waits for) may take as long as this

    def of(self, request: ipc.ToWorker | None) -> float:
        """For this request; None is the loading of the task."""
        return self.load if request is None else self.work


def identity_of(train: messages.Train) -> Identity:
    """The update that a Train asks for."""
    return Identity(job=train.job, epoch=train.epoch, clock=train.clock, attempt=train.attempt)


def failed(identity: Identity, reason: str, *, fatal: bool = False) -> Report:
    """The report that a period could not be finished."""
    event = messages.Failed(
        job=identity.job,
        epoch=identity.epoch,
        clock=identity.clock,
        attempt=identity.attempt,
        reason=reason[:REASON_CHARS_MAX],
        fatal=fatal,
    )
    return Report(event=event)


class Assignment:
    """The job this site works for. `done` is the latest period that is over here."""

    def __init__(
        self,
        known: RememberJob,
        folder: Path,
        deliveries: Deliveries,
        *,
        patience: Patience,
        next_worker: Callable[[], int],
        done: Identity | None = None,
    ) -> None:
        self.known = known
        self.job = known.job
        self.done = done
        self._folder = folder
        self._deliveries = deliveries
        self._patience = patience
        self._next_worker = next_worker
        # wanted
        self.announce = False
        self.init: Literal["", "wanted", "sending"] = ""
        self.train: messages.Train | None = None
        self.evaluate: messages.Evaluate | None = None
        self.late: list[ipc.Settle] = []
        # doing
        self.worker = 0  # 0: there is none
        self._loaded: ipc.Loaded | None = None
        self._request: ipc.ToWorker | None = None
        self._silent_until = 0.0
        self._deaths = 0
        self._bases: dict[int, VersionRef] = {}  # what lies in the folder, whole
        self._fetching: VersionRef | None = None
        self._step = (0, 0)
        self._progress_at: float | None = None

    # ------------------------------------------------------------ what is wanted

    def prepare(self, known: RememberJob) -> list[AnyAction]:
        """The coordinator waits for Ready, perhaps once more."""
        self.known = known
        if self._loaded is not None:
            return [self._ready(self._loaded)]
        self.announce = True
        return []

    def want_train(self, train: messages.Train) -> None:
        """A period; one that is older than the latest known was delivered late."""
        identity = identity_of(train)
        if self.done is not None and identity <= self.done:
            return
        if self.train is None or identity_of(self.train) < identity:
            self.train = train

    def want_init(self) -> None:
        """Version 0, once."""
        self.init = self.init or "wanted"

    def call_off(self, identity: Identity) -> bool:
        """The period is not wanted any more; False when it was not being waited for."""
        wanted = self.train is not None and identity_of(self.train) == identity
        self.period_is_over(identity)
        return wanted

    def period_is_over(self, identity: Identity) -> None:
        """Settled, failed or called off: never begin it again."""
        self.done = max(identity, self.done or identity)
        if self.train and identity_of(self.train) <= identity:
            self.train = None
            self._step, self._progress_at = (0, 0), None

    def supersedes(self, identity: Identity) -> bool:
        """The coordinator already wants a later period than this one."""
        return self.train is not None and identity_of(self.train) > identity

    # ------------------------------------------------------------ the next step

    def advance(self, now: float) -> list[AnyAction]:
        """Begin what can begin now."""
        actions = self._fetch_next()
        if not self.worker:
            if self.announce or self.init == "wanted" or self.train or self.evaluate:
                self.worker = self._next_worker()
                self._silent_until = now + self._patience.load
                start = StartWorker(
                    worker=self.worker,
                    job=self.job,
                    spec=self.known.spec,
                    evaluator=self.known.evaluator,
                )
                actions.append(start)
        elif self._loaded is not None:
            request = self._next_request()
            if request is not None:
                self._request = request
                self._silent_until = now + self._patience.of(request)
                actions.append(Tell(worker=self.worker, message=request))
        return actions

    def _fetch_next(self) -> list[AnyAction]:
        wanted = self.train or self.evaluate
        if wanted is None or self._is_here(wanted.base) or wanted.base == self._fetching:
            return []
        self._fetching = base = wanted.base
        fetch = Fetch(job=self.job, base=base)
        if self._bases.pop(base.version, None) is None:
            return [fetch]
        # Another snapshot under that number lies in the file where this one belongs.
        return [KeepBases(job=self.job, versions=tuple(sorted(self._bases))), fetch]

    def _is_here(self, base: VersionRef) -> bool:
        return self._bases.get(base.version) == base

    def _next_request(self) -> ipc.ToWorker | None:
        if self._request is not None:
            return ipc.Stop() if self._is_unwanted(self._request) else None
        judged = self._deliveries.judged(self.job)
        if judged is not None:
            identity = judged.update.identity
            return ipc.Settle(
                epoch=identity.epoch,
                clock=identity.clock,
                attempt=identity.attempt,
                verdict=judged.verdict,
            )
        if self.late:
            return self.late[0]
        if self.init == "wanted":
            return ipc.MakeInit(path=text_of(init_body(self._folder)))
        train, evaluate = self.train, self.evaluate
        if train and self._is_here(train.base):
            if self._deliveries.pending(self.job):
                return None
            return ipc.TrainPeriod(
                base_path=self._path(train.base),
                base_version=train.base.version,
                base_digest=train.base.digest,
                epoch=train.epoch,
                clock=train.clock,
                attempt=train.attempt,
                steps=train.steps,
                epochs=train.epochs,
                evaluate=train.evaluate,
                seconds=train.seconds,
                applied=train.applied,
            )
        if evaluate and self._is_here(evaluate.base):
            return ipc.EvaluateBase(
                base_path=self._path(evaluate.base),
                base_version=evaluate.base.version,
                base_digest=evaluate.base.digest,
            )
        return None

    def _is_unwanted(self, request: ipc.ToWorker) -> bool:
        return isinstance(request, ipc.TrainPeriod) and (
            self.train is None or identity_of(self.train) != self._identity(request)
        )

    def _path(self, base: VersionRef) -> str:
        return text_of(base_body(self._folder, base.version))

    def _identity(self, said: ipc.TrainPeriod | ipc.Trained | ipc.Settle) -> Identity:
        return Identity(job=self.job, epoch=said.epoch, clock=said.clock, attempt=said.attempt)

    # ------------------------------------------------------------ fetching

    def fetched(self, stimulus: Fetched) -> list[AnyAction]:
        """A version lies in the folder; those that nothing needs any more go."""
        if self._fetching is None or stimulus.version != self._fetching.version:
            return []
        # A worker that is busy, even one that was told to stop, may still read an older one.
        wanted = [each.base for each in (self.train, self.evaluate) if each is not None]
        kept = list(self._bases.values()) if self._request is not None else wanted
        self._bases = {base.version: base for base in kept if self._is_here(base)}
        self._bases[self._fetching.version] = self._fetching
        self._fetching = None
        return [KeepBases(job=self.job, versions=tuple(sorted(self._bases)))]

    def fetch_failed(self, stimulus: FetchFailed) -> list[AnyAction]:
        """A version cannot be had."""
        if self._fetching is None or stimulus.version != self._fetching.version:
            return []
        self._fetching = None
        reason = f"version {stimulus.version} cannot be fetched: {stimulus.reason}"
        actions: list[AnyAction] = []
        if self.train and self.train.base.version == stimulus.version:
            actions += self.fail_train(reason)
        if self.evaluate and self.evaluate.base.version == stimulus.version:
            actions += self._fail_evaluate(reason)
        return actions

    # ------------------------------------------------------------ the worker

    def wake_at(self) -> float | None:
        """When the worker's silence becomes too long."""
        waits = self.worker and (self._loaded is None or self._request is not None)
        return self._silent_until if waits else None

    def tick(self, now: float) -> list[AnyAction]:
        """End a worker that has been silent for too long."""
        until = self.wake_at()
        if until is None or until > now:
            return []
        allowed = span(self._patience.of(self._request))
        setting = "load_timeout_seconds" if self._request is None else "work_timeout_seconds"
        reason = (
            f"the worker said nothing for {allowed} ({setting} of this site) while it "
            f"{self.doing()}"
        )
        return [StopWorker(worker=self.worker, reason=reason), *self.worker_is_gone(reason)]

    def worker_said(self, message: ipc.FromWorker, now: float) -> list[AnyAction]:
        """Take a message of the worker that is running."""
        self._silent_until = now + self._patience.of(self._request)
        match message:
            case ipc.Loaded():
                self._loaded = message
                if not self.announce:
                    return []
                self.announce, self._deaths = False, 0
                return [self._ready(message)]
            case ipc.Stepped():
                return self._stepped(message, now)
            case ipc.Trained():
                return self._trained(message)
            case ipc.EvaluatedHere():
                return self._evaluated(message)
            case ipc.InitMade(bytes=size):
                self._request, self._deaths = None, 0
                if self.init != "wanted":
                    return []
                self.init = "sending"
                return [UploadInit(job=self.job, body=init_body(self._folder), bytes=size)]
            case ipc.SettledHere():
                self._settled()
            case ipc.Stopped():
                if isinstance(self._request, ipc.Stop):
                    self._request = None
            case ipc.WorkerFailed():
                return self._worker_failed(message)
        return []

    def _ready(self, loaded: ipc.Loaded) -> Report:
        event = messages.Ready(
            job=self.job,
            layout=loaded.layout,
            layout_digest=loaded.layout.digest(),
            train_examples=loaded.train_examples,
            eval_examples=loaded.eval_examples,
            control=loaded.control,
            notes=loaded.notes,
        )
        return Report(event=event)

    def _stepped(self, said: ipc.Stepped, now: float) -> list[AnyAction]:
        self._step = (said.step, said.of)
        soon = self._progress_at is not None and now < self._progress_at + PROGRESS_EVERY_SECONDS
        if soon or self.train is None:
            return []
        self._progress_at = now
        event = messages.Progress(
            job=self.job, epoch=said.epoch, clock=said.clock, step=said.step, of=said.of
        )
        return [Report(event=event)]

    def _trained(self, said: ipc.Trained) -> list[AnyAction]:
        identity = self._identity(said)
        folder = self._folder / update_name(said.epoch, said.clock, said.attempt)
        update = StoredUpdate(identity=identity, body=folder / BODY, bytes=said.bytes)
        self._deaths = 0
        if isinstance(self._request, ipc.TrainPeriod):
            self._request = None
        if self.train is None or identity_of(self.train) != identity:
            # It was called off while its last step ran: only the worker has to hear of it.
            self._deliveries.hold(update, "refused_drop")
            return []
        actions: list[AnyAction] = []
        if said.cut:
            step = f"step {said.steps}" + (f" of {said.of}" if said.of else "")
            box = f"its time box of {self.train.seconds:.1f} s"
            text = f"{identity} was cut at {step} by {box}"
            actions = [Say(job=self.job, text=text)]
        return actions + self._deliveries.send(update)

    def _evaluated(self, said: ipc.EvaluatedHere) -> list[AnyAction]:
        if isinstance(self._request, ipc.EvaluateBase):
            self._request, self._deaths = None, 0
        if self.evaluate and self.evaluate.base.version == said.version:
            self.evaluate = None
        event = messages.Evaluated(
            job=self.job, version=said.version, examples=said.examples, metrics=said.metrics
        )
        return [Report(event=event)]

    def _settled(self) -> None:
        request, self._request, self._deaths = self._request, None, 0
        if isinstance(request, ipc.Settle):
            self.late = [settle for settle in self.late if settle != request]
            self._deliveries.settled(self._identity(request))
            self.period_is_over(self._identity(request))

    def _worker_failed(self, said: ipc.WorkerFailed) -> list[AnyAction]:
        request, self._request = self._request, None
        if self._loaded is None or said.fatal or isinstance(request, ipc.Settle):
            stop = StopWorker(worker=self.worker, reason="it cannot go on")
            return [stop, *self.give_up(said.reason)]
        match request:
            case ipc.TrainPeriod():
                # The fault may lie in the snapshot on this disk: the next try fetches it anew.
                self._bases = {}
                return [*self.fail_train(said.reason), KeepBases(job=self.job, versions=())]
            case ipc.EvaluateBase():
                return self._fail_evaluate(said.reason)
            case ipc.MakeInit():
                return self.fail_init(said.reason)
            case _:
                return [self._say(f"the worker says: {said.reason}")]

    def worker_is_gone(self, reason: str) -> list[AnyAction]:
        """The worker died; a new one is started as soon as one is needed."""
        request = self._request
        self._deaths += 1
        if self._deaths >= DEATHS_MAX:
            return [self._say(reason), *self.give_up(reason)]
        self.worker, self._loaded, self._request = 0, None, None
        actions: list[AnyAction] = [self._say(reason)]
        if isinstance(request, ipc.TrainPeriod):
            actions += self.fail_train(reason)
        return actions

    # ------------------------------------------------------------ what is said about failures

    def fail_train(self, reason: str, *, fatal: bool = False) -> list[AnyAction]:
        """The period that is wanted will not be finished."""
        if self.train is None:
            return []
        identity = identity_of(self.train)
        self.period_is_over(identity)
        return [failed(identity, reason, fatal=fatal), self._say(f"{identity} failed: {reason}")]

    def fail_init(self, reason: str, *, fatal: bool = False) -> list[AnyAction]:
        """Version 0 will not come from here."""
        if not self.init:
            return []
        self.init = ""
        text = f"version 0 cannot come from here: {reason}"
        nobody = Identity(job=self.job, epoch=0, clock=0, attempt=0)
        return [failed(nobody, text, fatal=fatal), self._say(text)]

    def _fail_evaluate(self, reason: str) -> list[AnyAction]:
        if self.evaluate is None:
            return []
        version, self.evaluate = self.evaluate.base.version, None
        # Blank metrics: those who wait for this report need not wait any longer.
        event = messages.Evaluated(job=self.job, version=version, examples=0.0, metrics={})
        return [Report(event=event), self._say(f"version {version} is not evaluated: {reason}")]

    def give_up(self, reason: str) -> list[AnyAction]:
        """No worker of this job can be had here: say so to everyone who waits for one."""
        self.worker, self._loaded, self._request = 0, None, None
        self._deaths = 0
        self.late = []
        actions: list[AnyAction] = []
        if self.announce:
            self.announce = False
            event = messages.Declined(job=self.job, reason=reason[:REASON_CHARS_MAX])
            actions += [Report(event=event), self._say(f"declines the job: {reason}")]
        actions += self.fail_train(reason, fatal=True)
        actions += self._fail_evaluate(reason)
        return actions + self.fail_init(reason, fatal=True)

    def _say(self, text: str) -> Say:
        return Say(job=self.job, text=text[:REASON_CHARS_MAX], warning=True)

    def doing(self) -> str:
        """What this site does for the job, or what it waits for, for people."""
        if self.worker and self._loaded is None:
            return "loads task and data"
        match self._request:
            case ipc.TrainPeriod(clock=clock):
                step, of = self._step
                return f"trains clock {clock}, step {step} of {of or '?'}"
            case ipc.EvaluateBase(base_version=version):
                return f"evaluates version {version}"
            case ipc.MakeInit():
                return "makes version 0"
            case ipc.Stop():
                return "stops a period that is not wanted any more"
            case _:
                pass
        if pending := self._deliveries.pending(self.job):
            return f"delivers the update of {pending[0]}"
        if self._fetching is not None:
            return f"fetches version {self._fetching.version}"
        return "waits for the coordinator's next instruction"

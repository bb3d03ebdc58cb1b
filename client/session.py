"""The agent's decisions, pure: what happens comes in, what to do goes out, `now` is an argument.

Here: which job this site works for, and what becomes of instructions. `assignment` holds one job
and its worker, `delivery` the finished updates on their way to a verdict.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from client import ipc
from client.assignment import Assignment, Patience, failed, identity_of
from client.delivery import Deliveries
from client.sessionapi import (
    AnyAction,
    AnyStimulus,
    Connected,
    Fetched,
    FetchFailed,
    Finish,
    Identity,
    InitRefused,
    InitTaken,
    Instructed,
    JobUnknown,
    LeaveJob,
    RememberJob,
    Say,
    Stands,
    StopWorker,
    StoredUpdate,
    TaskDeclined,
    Tick,
    UploadBroke,
    UploadRefused,
    WorkerDied,
    WorkerSaid,
)
from client.sitefiles import job_folder
from protocol import messages
from protocol.messages import Instruction


class Session:
    """One site's part, whatever happens to the connection.

    `stored` are the updates that an earlier process left behind, `known` the jobs that it had
    prepared; `jobs` is the folder in which each job has its own.
    """

    def __init__(
        self,
        *,
        jobs: Path,
        stored: Iterable[StoredUpdate] = (),
        known: Mapping[str, RememberJob] | None = None,
        rng: random.Random,
        patience: Patience | None = None,
    ) -> None:
        self._jobs = jobs
        self._known = dict(known or {})
        self._patience = patience or Patience()
        self._deliveries = Deliveries(stored, rng)
        self._workers = count(1)
        self._done: dict[str, Identity] = {}  # of jobs that this site may come back to
        self._now: Assignment | None = None

    def handle(self, stimulus: AnyStimulus, now: float) -> list[AnyAction]:
        """What follows from it, to be carried out in this order."""
        actions = self._take(stimulus, now)
        if self._now is not None:
            actions += self._now.advance(now)
        return actions

    def wake_at(self) -> float | None:
        """When a Tick is due, if nothing else happens before."""
        times = (self._deliveries.wake_at(), self._now.wake_at() if self._now else None)
        return min((time for time in times if time is not None), default=None)

    def doing(self) -> str:
        """What this site does, or what it waits for, for people."""
        return self._now.doing() if self._now else "waits for a job"

    @property
    def job(self) -> str:
        """The job this site works for; empty when there is none."""
        return self._now.job if self._now else ""

    # ------------------------------------------------------------ stimuli

    def _take(self, stimulus: AnyStimulus, now: float) -> list[AnyAction]:
        match stimulus:
            case Instructed(instruction=instruction):
                return self._instructed(instruction)
            case WorkerSaid(worker=worker, message=message):
                a = self._of_worker(worker)
                return a.worker_said(message, now) if a else []
            case WorkerDied(worker=worker, reason=reason):
                a = self._of_worker(worker)
                return a.worker_is_gone(reason) if a else []
            case TaskDeclined(worker=worker, reason=reason):
                a = self._of_worker(worker)
                return a.give_up(reason) if a else []
            case Fetched(job=job):
                a = self._of_job(job)
                return a.fetched(stimulus) if a else []
            case FetchFailed(job=job):
                a = self._of_job(job)
                return a.fetch_failed(stimulus) if a else []
            case Stands():
                return self._stands(stimulus, now)
            case UploadBroke(identity=identity, reason=reason, damaged=damaged):
                if self._deliveries.broke(identity, now, damaged=damaged):
                    return []
                return self._give_up_update(identity, reason, fatal=False)
            case UploadRefused(identity=identity, reason=reason):
                self._deliveries.judge(identity, "refused_drop")
                return self._give_up_update(identity, reason, fatal=True)
            case InitTaken(job=job):
                if a := self._of_job(job):
                    a.init = ""
                return []
            case InitRefused(job=job, reason=reason):
                a = self._of_job(job)
                return a.fail_init(reason) if a else []
            case JobUnknown(job=job):
                return self._leave(job, "the coordinator does not know it any more", forget=True)
            case Connected():
                return self._deliveries.connected()
            case Tick():
                actions = self._deliveries.tick(now)
                return actions + (self._now.tick(now) if self._now else [])

    def _of_worker(self, worker: int) -> Assignment | None:
        return self._now if self._now and self._now.worker == worker else None

    def _of_job(self, job: str) -> Assignment | None:
        return self._now if self._now and self._now.job == job else None

    def _stands(self, stimulus: Stands, now: float) -> list[AnyAction]:
        identity, receipt = stimulus.identity, stimulus.receipt
        a = self._of_job(identity.job)
        superseded = a is not None and a.supersedes(identity)
        actions = self._deliveries.stands(identity, receipt, now, superseded=superseded)
        if receipt.verdict in ("refused_drop", "refused_return"):
            text = f"the update of {identity} was refused: {receipt.reason}"
            actions.append(Say(job=identity.job, text=text, warning=True))
        return actions

    def _give_up_update(self, identity: Identity, reason: str, *, fatal: bool) -> list[AnyAction]:
        a = self._of_job(identity.job)
        if a and a.train and identity_of(a.train) == identity:
            return a.fail_train(reason, fatal=fatal)
        text = f"the update of {identity} is not taken: {reason}"
        return [
            failed(identity, reason, fatal=fatal),
            Say(job=identity.job, text=text, warning=True),
        ]

    # ------------------------------------------------------------ instructions

    def _instructed(self, instruction: Instruction) -> list[AnyAction]:
        match instruction:
            case messages.Prepare():
                return self._prepare(instruction)
            case messages.Train():
                return self._train(instruction)
            case messages.Evaluate(job=job):
                actions = self._turn_to(job)
                if a := self._of_job(job):
                    a.evaluate = instruction
                return actions
            case messages.Initialise(job=job):
                actions = self._turn_to(job)
                if a := self._of_job(job):
                    a.want_init()
                return actions
            case messages.Abort():
                return self._abort(instruction)
            case messages.Settled():
                return self._settled_later(instruction)
            case messages.EndJob(job=job, reason=reason, final=final):
                return self._leave(job, reason, forget=final)
            case messages.Bye(reason=reason, retry=retry):
                return [] if retry else [Finish(reason=reason)]

    def _prepare(self, prepare: messages.Prepare) -> list[AnyAction]:
        known = RememberJob(job=prepare.job, spec=prepare.spec, evaluator=prepare.evaluator)
        self._known[known.job] = known
        actions = [known, *self._turn_to(known.job)]
        assert self._now is not None
        return actions + self._now.prepare(known)

    def _train(self, train: messages.Train) -> list[AnyAction]:
        actions = self._turn_to(train.job)
        if a := self._of_job(train.job):
            a.want_train(train)
            return actions
        reason = "this site does not know the job (any more): it must be prepared first"
        return [*actions, failed(identity_of(train), reason)]

    def _abort(self, abort: messages.Abort) -> list[AnyAction]:
        identity = Identity(
            job=abort.job, epoch=abort.epoch, clock=abort.clock, attempt=abort.attempt
        )
        actions = self._deliveries.judge(identity, "refused_drop")
        a = self._of_job(abort.job)
        if a and a.call_off(identity):
            actions.append(Say(job=abort.job, text=f"{identity} is called off: {abort.reason}"))
        return actions

    def _settled_later(self, settled: messages.Settled) -> list[AnyAction]:
        term, attempt = (settled.epoch, settled.clock), 0
        a = self._of_job(settled.job)
        if a and a.done and (a.done.epoch, a.done.clock) == term:
            attempt = a.done.attempt
        for identity in self._deliveries.pending(settled.job):
            if (identity.epoch, identity.clock) == term:
                if not self._deliveries.is_judged(identity):
                    return self._deliveries.judge(identity, settled.verdict)
                attempt = identity.attempt
        if a is None:
            return []
        settle = ipc.Settle(
            epoch=settled.epoch, clock=settled.clock, attempt=attempt, verdict=settled.verdict
        )
        if settle not in a.late:
            a.late.append(settle)
        text = f"the update of clock {settled.clock} is {settled.verdict} now: {settled.reason}"
        return [Say(job=a.job, text=text)]

    # ------------------------------------------------------------ one job at a time

    def _turn_to(self, job: str) -> list[AnyAction]:
        """Work for a job that an instruction, perhaps to an earlier process, has prepared."""
        known = self._known.get(job)
        if known is None or self._of_job(job):
            return []
        actions: list[AnyAction] = []
        if self._now is not None:
            actions = self._leave(self._now.job, f"job {job} came", forget=False)
        self._now = Assignment(
            known,
            job_folder(self._jobs, job),
            self._deliveries,
            patience=self._patience,
            next_worker=lambda: next(self._workers),
            done=self._done.get(job),
        )
        return [*actions, Say(job=job, text=f"works for job {known.spec.name!r}")]

    def _leave(self, job: str, reason: str, *, forget: bool) -> list[AnyAction]:
        actions: list[AnyAction] = []
        if a := self._of_job(job):
            self._now = None
            if a.done:
                self._done[job] = a.done
            if a.worker:
                actions.append(StopWorker(worker=a.worker, reason=reason))
            actions.append(Say(job=job, text=f"leaves job {a.known.spec.name!r}: {reason}"))
        if forget:
            self._known.pop(job, None)
            self._done.pop(job, None)
            self._deliveries.forget(job)
        return [*actions, LeaveJob(job=job, forget=forget)]

"""Carrying out a round: what `round` decides is journalled here, and the sites are told."""

from __future__ import annotations

from coordinator import evaluation, streaming
from coordinator.actions import Commit, Discard, Send, Verdict
from coordinator.job import Job, Task
from coordinator.journal import (
    CohortMember,
    Retried,
    RoundClosed,
    RoundOpened,
    SiteFailed,
    UpdateSettled,
    VersionMade,
)
from coordinator.round import Judgement, canonical, closing, judge, missing
from coordinator.run import Batch, Run
from coordinator.stimuli import CommitFacts, UploadComplete
from protocol.messages import Abort, Failed, Settled, Train
from protocol.words import span

ATTEMPTS_MAX = 2  # a period that fails is tried once more, then the site is out of the round


def open_round(run: Run, batch: Batch, event: RoundOpened) -> None:
    """Begin a round and send its sites off."""
    batch.emit(run.job, event)
    run.progress.clear()
    run.hold = ""
    for task in event.tasks:
        send_train(run, batch, task.site)


def go_on(run: Run, batch: Batch, *, opening: bool) -> None:
    """The steps of a rule without rounds: end what is overdue, make the next version, and with
    `opening` let those go on who may.
    """
    job = run.job
    for site, reason in streaming.overdue(job, batch.now).items():
        assert job.round is not None
        task = job.round.tasks[site]
        leave_out(run, batch, site, reason)
        _abort(run, batch, site, task.epoch, task.clock, task.attempt, reason)
    # A checkpoint is of the version that the fold process holds: the next commit waits for it.
    closed = None if run.checkpoint_asked else streaming.commit(job, batch.now)
    if closed is not None:
        batch.emit(job, closed)
    elif job.committing is None and (reason := streaming.too_few(job, batch.now)):
        _return_buffer(run, batch, reason)
    ask_commit(run, batch)
    if not opening or job.round is None:
        run.waits = {}  # nobody waits for a site: the job itself does not go on
        return
    found = streaming.going(job, batch.now)
    run.waits = found.waits
    for event in found.opened:
        batch.emit(job, event)
        run.progress.pop(event.task.site, None)
        send_train(run, batch, event.task.site)


def send_train(run: Run, batch: Batch, site: str) -> None:
    """Instruct a site to train its open task, if it has one (again after a reconnection)."""
    job = run.job
    task = job.task(site)
    if task is None or task.state != "training" or task.base is None:
        return
    train = Train(
        job=job.id,
        epoch=task.epoch,
        clock=task.clock,
        attempt=task.attempt,
        base=task.base,
        steps=task.steps or job.spec.period.steps or 0,
        epochs=job.spec.period.epochs or 0,
        evaluate=evaluation.before_training(job, job.members[site], task.base.version),
        deadline_seconds=max(task.deadline - batch.now, 0.001),
        seconds=task.seconds,
        applied=streaming.oldest_clock(job, site),
    )
    run.send(batch, site, train)


def upload(run: Run, batch: Batch, stimulus: UploadComplete) -> None:
    """Judge an update and answer it."""
    job, site, facts = run.job, stimulus.site, stimulus.facts
    judgement = judge(job, site, facts)
    keep = judgement.verdict == "queued"
    open_attempt = facts.attempt
    if judgement.settles:
        task = job.task(site)
        assert task is not None
        open_attempt = task.attempt
        batch.emit(job, _settlement(job, task, judgement, stimulus, batch.now))
    batch.do(
        Verdict(
            job=job.id,
            site=site,
            epoch=facts.epoch,
            clock=facts.clock,
            attempt=facts.attempt,
            verdict=judgement.verdict,
            reason=judgement.reason,
        )
    )
    if not keep and stimulus.spool not in job.spools:  # a repetition may bear a kept one's name
        batch.do(Discard(job=job.id, spools=(stimulus.spool,)))
    if judgement.settles and facts.attempt < open_attempt:
        # The first attempt arrived after all: the second need not go on.
        _abort(run, batch, site, facts.epoch, facts.clock, open_attempt, "the update is here")


def _settlement(
    job: Job, task: Task, judgement: Judgement, stimulus: UploadComplete, now: float
) -> UpdateSettled:
    facts = stimulus.facts
    return UpdateSettled(
        job=stimulus.job,
        site=stimulus.site,
        epoch=facts.epoch,
        clock=facts.clock,
        attempt=facts.attempt,
        verdict=judgement.verdict,
        reason=judgement.reason,
        spool=stimulus.spool if judgement.verdict == "queued" else "",
        wire_bytes=stimulus.wire_bytes,
        examples=facts.examples,
        steps=facts.steps,
        norm=facts.norm,
        train_seconds=facts.train_seconds,
        metrics=facts.metrics,
        staleness=max(streaming.staleness(job, facts.base_version), 0),
        seconds=round(now - task.opened_at, 3),
        fault=judgement.fault,
    )


def period_failed(run: Run, batch: Batch, site: str, event: Failed) -> None:
    """A period could not be finished: once more, or the site is out of this round."""
    job = run.job
    task = job.task(site)
    identity = (event.epoch, event.clock, event.attempt)
    if task is None or task.state != "training":
        return
    if identity != (task.epoch, task.clock, task.attempt):
        return  # an echo of an attempt that is settled already
    batch.emit(
        job,
        SiteFailed(
            job=job.id,
            site=site,
            epoch=event.epoch,
            clock=event.clock,
            attempt=event.attempt,
            reason=event.reason,
        ),
    )
    run.progress.pop(site, None)
    if event.fatal or event.attempt >= ATTEMPTS_MAX:
        times = "" if event.attempt == 1 else f" {event.attempt} times"
        leave_out(run, batch, site, f"failed{times}: {event.reason}")
        return
    batch.emit(
        job,
        Retried(
            job=job.id,
            site=site,
            epoch=event.epoch,
            clock=event.clock,
            attempt=event.attempt + 1,
            reason=event.reason,
        ),
    )
    send_train(run, batch, site)


def leave_out(run: Run, batch: Batch, site: str, reason: str) -> None:
    """Settle a site's open task without an update: its clock is closed for this reason."""
    job = run.job
    task = job.task(site)
    if task is None or task.state != "training":
        return
    batch.emit(
        job,
        UpdateSettled(
            job=job.id,
            site=site,
            epoch=task.epoch,
            clock=task.clock,
            attempt=task.attempt,
            verdict="refused_drop",
            reason=reason,
        ),
    )


def close_if_due(run: Run, batch: Batch) -> None:
    """Close the open round when `round.closing` says so."""
    job = run.job
    found = closing(job, batch.now) if job.round and not job.streams else None
    if found is None or job.round is None:
        return
    if not found.cohort:
        void(run, batch, found.reason, late=found.late)
        return
    if job.spec.pacing.late == "drop":
        _stop_training(run, batch, found.late)
    able = len(job.roster.training)
    batch.emit(
        job,
        RoundClosed(
            job=job.id,
            round=job.round.number,
            version=job.number + 1,
            cohort=found.cohort,
            active_sites=max(able, len(found.cohort)),
            reason=found.reason,
            missing=missing(job) | dict.fromkeys(job.round.sites("training"), found.late),
        ),
    )


def call_back(run: Run, batch: Batch, reason: str = "") -> None:
    """End periods of earlier rounds that are overdue; with a reason all of them, and what came of
    them since goes back.
    """
    job = run.job
    if reason and job.round is None and job.queue:
        why = f"no round will take it: {reason}"
        _tell_returned(run, batch, [_returned(job, part, why) for part in job.queue])
    for site, task in sorted(job.carried.items()):
        if reason or batch.now >= task.deadline:
            why = reason or f"late: not in {span(job.spec.pacing.deadline_seconds)} after its round"
            leave_out(run, batch, site, why)
            _abort(run, batch, site, task.epoch, task.clock, task.attempt, why)


def void(run: Run, batch: Batch, reason: str, *, late: str) -> None:
    """End the open round without a version; what was queued goes back to its sites."""
    job = run.job
    if job.round is None:
        return
    _stop_training(run, batch, late)
    number, without = job.round.number, missing(job)
    why = f"round {number} is void: {reason}"
    returned = [_returned(job, part, why) for part in canonical(job.queue)]
    _give_back(run, batch, number, reason, returned, without)


def _return_buffer(run: Run, batch: Batch, reason: str) -> None:
    """A buffer that has waited for long enough goes back to its sites; those at work go on."""
    job = run.job
    assert job.round is not None
    returned = [_returned(job, part, reason) for part in canonical(job.queue)]
    _give_back(run, batch, job.round.number, reason, returned, {}, additive=True)


def commit_done(run: Run, batch: Batch, facts: CommitFacts) -> None:
    """A version was made, or could not be: then its round is void after all."""
    job, closed = run.job, run.job.committing
    if closed is None or facts.version != closed.version:
        return  # an answer to a question that was asked twice
    run.commit_asked = False
    if not facts.problem:
        batch.emit(
            job,
            VersionMade(
                job=job.id,
                version=facts.version,
                digest=facts.digest,
                bytes=facts.bytes,
                update_norm=facts.update_norm,
                model_norm=facts.model_norm,
                fold_seconds=facts.fold_seconds,
            ),
        )
        return
    why = f"version {closed.version} could not be made: {facts.problem}"
    returned = [_returned(job, part, why) for part in closed.cohort]
    reason = f"the commit failed: {facts.problem}"
    going = job.streams and job.round is not None
    _give_back(run, batch, closed.round, reason, returned, closed.missing, additive=going)


def _returned(job: Job, part: CohortMember, reason: str) -> UpdateSettled:
    last = job.members[part.site].last
    same = last is not None and (last.epoch, last.clock) == (part.epoch, part.clock)
    return UpdateSettled(
        job=job.id,
        site=part.site,
        epoch=part.epoch,
        clock=part.clock,
        attempt=last.attempt if last is not None and same else 1,
        verdict="refused_return",
        reason=reason,
        spool=part.spool,
    )


def ask_commit(run: Run, batch: Batch) -> None:
    """Have the closed round folded; asked again by a new process."""
    job, closed = run.job, run.job.committing
    if closed is None or run.commit_asked or job.version is None:
        return
    run.commit_asked = True
    batch.do(
        Commit(
            job=job.id,
            spec=job.spec,
            version=closed.version,
            base_version=job.version.version,
            base_digest=job.version.digest,
            cohort=closed.cohort,
            active_sites=closed.active_sites,
            additive=closed.additive,
        )
    )


def _stop_training(run: Run, batch: Batch, reason: str) -> None:
    open_ = run.job.round
    assert open_ is not None
    for site in open_.sites("training"):
        task = open_.tasks[site]
        leave_out(run, batch, site, reason)
        _abort(run, batch, site, task.epoch, task.clock, task.attempt, reason)


def _give_back(
    run: Run,
    batch: Batch,
    number: int,
    reason: str,
    returned: list[UpdateSettled],
    without: dict[str, str],
    *,
    additive: bool = False,
) -> None:
    job = run.job
    _tell_returned(run, batch, returned)
    batch.emit(
        job,
        RoundClosed(
            job=job.id,
            round=number,
            version=job.number,
            cohort=(),
            active_sites=len(job.roster.training),
            reason=reason,
            missing=without | {settled.site: settled.reason for settled in returned},
            additive=additive,
        ),
    )


def _tell_returned(run: Run, batch: Batch, returned: list[UpdateSettled]) -> None:
    """Settle queued updates a second time: they go back to their sites."""
    for settled in returned:
        batch.emit(run.job, settled)
        if settled.site in run.present:  # others are reminded when they come back
            batch.do(Send(site=settled.site, instruction=settled_word(settled)))
    if returned:
        batch.do(Discard(job=run.job.id, spools=tuple(settled.spool for settled in returned)))


def settled_word(event: UpdateSettled) -> Settled:
    """The later word about a queued update that was voided."""
    return Settled(
        job=event.job,
        epoch=event.epoch,
        clock=event.clock,
        verdict=event.verdict,
        reason=event.reason,
    )


def _abort(
    run: Run, batch: Batch, site: str, epoch: int, clock: int, attempt: int, reason: str
) -> None:
    if site in run.present:
        abort = Abort(job=run.job.id, epoch=epoch, clock=clock, attempt=attempt, reason=reason)
        batch.do(Send(site=site, instruction=abort))

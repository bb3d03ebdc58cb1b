"""A job's members: who enters with which epoch and clock, who leaves, who is refused and why."""

from __future__ import annotations

from coordinator import conductor, evaluation
from coordinator.actions import Send
from coordinator.conductor import ATTEMPTS_MAX
from coordinator.job import Member
from coordinator.journal import SiteEnded, SiteEntered, SiteFailed, SiteRefused
from coordinator.run import Batch, Run
from protocol.errors import MalformedError
from protocol.layout import Layout, check_layout, differences
from protocol.messages import EndJob, Failed, Initialise, Prepare, Ready, SiteRole


def prepare(run: Run, batch: Batch, site: str, role: SiteRole) -> None:
    """Ask a site to load the job; what else is open for it is sent once it says Ready."""
    run.present[site] = "loading"
    run.returned.discard(site)
    evaluation.forget(run, site)
    job = run.job
    remind(run, batch, site)
    message = Prepare(job=job.id, spec=job.spec, evaluator=role == "evaluator")
    batch.do(Send(site=site, instruction=message))


def remind(run: Run, batch: Batch, site: str) -> None:
    """Say again that a queued update was voided, if the site may not have heard it."""
    member = run.job.members.get(site)
    if member is None:
        return
    words = [*member.voided, *([member.delivered] if member.delivered is not None else [])]
    for word in words:
        if word.verdict == "refused_return":
            batch.do(Send(site=site, instruction=conductor.settled_word(word)))


def dismiss(run: Run, batch: Batch, site: str, reason: str, *, final: bool) -> None:
    """Tell a site that the job is over for it."""
    if site in run.present:
        end = EndJob(job=run.job.id, reason=reason, final=final)
        batch.do(Send(site=site, instruction=end))
        _forget(run, batch, site)


def tell_returned(run: Run, batch: Batch, reason: str) -> None:
    """The job has ended: members that came back when it took nobody any more hear of it too, and
    what became of what they had sent.
    """
    for site in sorted(run.returned):
        remind(run, batch, site)
        batch.do(Send(site=site, instruction=EndJob(job=run.job.id, reason=reason, final=True)))
    run.returned.clear()


def _forget(run: Run, batch: Batch, site: str) -> None:
    batch.freed.add(site)
    run.present.pop(site, None)
    run.returned.discard(site)
    run.progress.pop(site, None)
    evaluation.forget(run, site)


# ---------------------------------------------------------------- entering


def ready(run: Run, batch: Batch, site: str, role: SiteRole, event: Ready) -> None:
    """The site has loaded task and data: let it in, or refuse it naming the tensors.

    Raises:
        MalformedError: the layout is out of bounds, or its digest is of another one.
    """
    job = run.job
    check_layout(event.layout)
    digest = event.layout.digest()
    if digest != event.layout_digest:
        raise MalformedError(f"the layout of {site} does not have the digest that it names.")
    if min(event.train_examples, event.eval_examples) < 0:
        raise MalformedError(f"{site} reports a negative number of examples.")
    if site not in run.present:
        return  # it was dismissed while it was loading
    if job.version is not None and digest != job.layout_digest:
        refuse(run, batch, site, _layout_fault(job.layout, event.layout))
        return
    if job.version is None:
        run.layouts[digest] = event.layout
    run.present[site] = "ready"
    member = job.members.get(site)
    if member is not None and member.active and not _same(member, role, event):
        leave(run, batch, site, "it came back with other data or in another role")
        run.present[site] = "ready"
    if member is None or not member.active:
        enter(run, batch, site, role, event)
    evaluation.changed(run, site)
    _send_open(run, batch, site)


def _same(member: Member, role: SiteRole, event: Ready) -> bool:
    return (
        member.role,
        member.train_examples,
        member.eval_examples,
        member.layout_digest,
    ) == (role, event.train_examples, event.eval_examples, event.layout_digest)


def enter(run: Run, batch: Batch, site: str, role: SiteRole, event: Ready) -> None:
    """Begin the site's next epoch at the minimum clock of the active sites (design 4.1)."""
    job = run.job
    before = job.members.get(site)
    clock = job.roster.lowest_clock()
    if clock is None:
        clock = max((member.clock for member in job.members.values()), default=0)
    under_way = job.round is not None or job.committing is not None
    batch.emit(
        job,
        SiteEntered(
            job=job.id,
            site=site,
            role=role,
            epoch=before.epoch + 1 if before else 1,
            clock=clock,
            train_examples=event.train_examples,
            eval_examples=event.eval_examples,
            layout_digest=event.layout_digest,
            notes=event.notes,
            joined_at_version=max(job.number + under_way, 0),
        ),
    )


def _send_open(run: Run, batch: Batch, site: str) -> None:
    """What a site with a new session was asked before, and may have missed, is said again."""
    if run.job.version is None and run.job.init_site == site:
        run.send(batch, site, Initialise(job=run.job.id))
    conductor.send_train(run, batch, site)


def _layout_fault(ours: Layout | None, theirs: Layout | None) -> str:
    found = differences(ours, theirs) if ours is not None and theirs is not None else ()
    text = "; ".join(found) or f"digest {theirs.digest()[:12] if theirs else 'unknown'}"
    return f"its model is not the job's: {text}"


def check_layouts(run: Run, batch: Batch) -> None:
    """Version 0 has named the job's layout: whoever entered with another one is refused."""
    job = run.job
    for member in job.active():
        if member.layout_digest != job.layout_digest:
            theirs = run.layouts.get(member.layout_digest)
            refuse(run, batch, member.site, _layout_fault(job.layout, theirs))
    run.layouts.clear()


# ---------------------------------------------------------------- leaving


def leave(run: Run, batch: Batch, site: str, reason: str) -> None:
    """End the site's epoch, if it has one; its open task is settled with the same reason."""
    job = run.job
    member = job.members.get(site)
    if member is not None and member.active:
        conductor.leave_out(run, batch, site, reason)
        batch.emit(job, SiteEnded(job=job.id, site=site, epoch=member.epoch, reason=reason))
        run.unjudged = True  # a quorum is fewer now
    _forget(run, batch, site)


def refuse(run: Run, batch: Batch, site: str, reason: str) -> None:
    """The site cannot take part; it is asked again when its agent was restarted."""
    run.declined.add(site)
    batch.emit(run.job, SiteRefused(job=run.job.id, site=site, reason=reason))
    # A member's folder holds its state, perhaps an update; that of a stranger would stay for ever.
    dismiss(run, batch, site, reason, final=site not in run.job.members)
    leave(run, batch, site, reason)


def failed(run: Run, batch: Batch, site: str, event: Failed) -> None:
    """The worker of a site failed: in building version 0, in a period, or altogether."""
    job = run.job
    if job.version is None and job.init_site == site:
        batch.emit(
            job,
            SiteFailed(job=job.id, site=site, epoch=0, clock=0, attempt=0, reason=event.reason),
        )
    else:
        conductor.period_failed(run, batch, site, event)
        evaluation.gave_up(run, site)
    if event.fatal and site in run.present:
        refuse(run, batch, site, event.reason)
    else:
        give_up(run, batch, site, event.reason)


def give_up(run: Run, batch: Batch, site: str, reason: str) -> None:
    """Without rounds nothing else ends a site that fails at every period."""
    member, limit = run.job.members.get(site), run.job.spec.pacing.failed_rounds_max
    if member is None or not run.job.streams or member.failures < limit * ATTEMPTS_MAX:
        return
    if member.active:
        refuse(run, batch, site, f"failed {member.failures} times in a row, at last: {reason}")

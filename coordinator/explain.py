"""What people read about a job: for whom or what it waits, and what each site is doing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator import evaluation
from coordinator.assign import gap
from coordinator.job import Job, Member
from coordinator.lifecycle import deadlines
from coordinator.round import lacking
from coordinator.run import Run
from coordinator.sessions import Sessions
from protocol.views import JobSiteView, JobView
from protocol.words import some, span


def waiting(run: Run, runs: Sequence[Run], sessions: Sessions, now: float) -> str:
    """For whom or what the job waits now, and until when; empty when it has ended."""
    job = run.job
    if job.streams and job.round is not None and not job.terminal:
        return _streaming(run, runs, sessions, now)
    if job.committing is not None:
        closed = job.committing
        return f"version {closed.version} is being folded from {len(closed.cohort)} updates"
    if job.terminal:
        return ""
    if job.round is not None:
        who = [_training(run, sessions, site, now) for site in job.round.sites("training")]
        left = max(job.round.deadline - now, 0.0)
        return f"round {job.round.number}: waits for {some(who)}, deadline in {span(left)}"
    if job.state == "paused":
        return f"{job.reason}; waits for somebody to resume it"
    text = [f"waits for {run.hold}" if job.state == "draining" else run.hold]
    text += _missing(run, runs, sessions)
    due = min(deadlines(run), default=now)
    text.append(f"at most {span(due - now)} more")
    return "; ".join(part for part in text if part)


def _streaming(run: Run, runs: Sequence[Run], sessions: Sessions, now: float) -> str:
    """The same where sites go on by themselves: what comes next, and who waits for what."""
    job = run.job
    assert job.round is not None
    if job.state == "paused":
        text = [f"{job.reason}; waits for somebody to resume it"]
    else:
        text = [run.hold] if run.hold else []
    if job.committing is not None:
        count = len(job.committing.cohort)
        text.append(f"version {job.committing.version} is being folded from {count} updates")
    at_work = [_training(run, sessions, site, now) for site in job.round.sites("training")]
    if at_work:
        text.append(f"version {job.number + 1} waits for {some(at_work)}")
    waits = [f"{site} waits: {why}" for site, why in sorted(run.waits.items())]
    if waits and job.state == "running":
        text.append(some(waits, "; "))
    text += _missing(run, runs, sessions)
    due = min(deadlines(run), default=now)
    text.append(f"at most {span(due - now)} more")
    return "; ".join(text)


def _age(sessions: Sessions, site: str, now: float) -> str:
    session = sessions.get(site)
    if session is None or not session.instance:
        return "not heard since the coordinator started"
    away = "connection closed, " if session.closed else ""
    return f"{away}last heard {span(now - session.heard_at)} ago"


def _training(run: Run, sessions: Sessions, site: str, now: float) -> str:
    step = run.progress.get(site)
    doing = f"training, step {step.step} of {step.of}" if step else "training"
    return f"{site} ({doing}, {_age(sessions, site, now)})"


def _missing(run: Run, runs: Sequence[Run], sessions: Sessions) -> list[str]:
    """How many sites the job lacks, and what keeps each that could come from it."""
    lacks = lacking(run.job)
    if not lacks or run.job.state not in ("initialising", "running"):
        return []
    who = gap(run, runs, sessions)
    sites = "site" if lacks == 1 else "sites"
    text = [f"waiting for {lacks} more {sites}{': ' if who else ''}{who}"]
    if run.declined:
        text.append("who declined is asked again when its agent was restarted")
    return text


def doing(run: Run, member: Member, sessions: Sessions, now: float) -> str:
    """What a member is doing, in a sentence without its name."""
    job, site = run.job, member.site
    if not member.active:
        return member.note or (f"done: the job is {job.state}" if job.terminal else "gone")
    if run.present.get(site) == "loading":
        return "loading task and data"
    if site in run.evaluating:
        return f"evaluating version {run.evaluating[site].version}"
    task = job.task(site)
    if task is not None and task.state == "training":
        step = run.progress.get(site)
        steps = f", step {step.step} of {step.of}" if step else ""
        return f"training clock {task.clock}{steps}, {_age(sessions, site, now)}"
    if member.role == "site" and member.train_examples == 0:
        return "no data"
    if member.role == "evaluator" and member.eval_examples == 0:
        return "no data to evaluate on"
    if job.streams:
        waits = run.waits.get(site)
        return f"waits: {waits}" if waits else "waiting for the next version"
    if task is not None and task.state == "out":
        return f"out of round {job.rounds}: {task.reason}"
    if task is not None and job.round is not None:
        return f"waiting for {some(job.round.sites('training'))}"
    return "waiting for the next round" if member.trains else "waiting for the next version"


def site_views(run: Run, sessions: Sessions, now: float) -> tuple[JobSiteView, ...]:
    """All sites of a job: its members, and those that it refused before they entered."""
    job = run.job
    views = [_site_view(run, member, sessions, now) for _, member in sorted(job.members.items())]
    for site, reason in sorted(job.refused.items()):
        if site not in job.members:
            views.append(
                JobSiteView(
                    site=site,
                    role="site",
                    active=False,
                    epoch=0,
                    clock=0,
                    train_examples=0,
                    eval_examples=0,
                    doing=f"refused: {reason}",
                    joined_at_version=0,
                )
            )
    return tuple(views)


def _site_view(run: Run, member: Member, sessions: Sessions, now: float) -> JobSiteView:
    refusal = run.job.refused.get(member.site)
    return JobSiteView(
        site=member.site,
        role=member.role,
        active=member.active,
        epoch=member.epoch,
        clock=member.clock,
        train_examples=member.train_examples,
        eval_examples=member.eval_examples,
        doing=f"refused: {refusal}" if refusal else doing(run, member, sessions, now),
        joined_at_version=member.joined_at_version,
        counted=member.counted,
        refused=member.refused,
        data_share=_share(run.job, member, lambda m: m.train_examples),
        version_share=_share(run.job, member, lambda m: m.examples_counted),
    )


def _share(job: Job, member: Member, amount: Callable[[Member], float]) -> float:
    total = sum(amount(one) for one in job.members.values())
    return amount(member) / total if total else 0.0


def view(run: Run, runs: Sequence[Run], sessions: Sessions, now: float) -> JobView:
    """The job for people; socket bytes are the ledger's, and times are job time."""
    job: Job = run.job
    metrics, version = evaluation.newest(job)
    return JobView(
        id=job.id,
        name=job.spec.name,
        task=job.spec.task.name,
        state=job.state,
        reason=job.reason,
        waiting=waiting(run, runs, sessions, now),
        version=max(job.number, 0),
        round=job.rounds,
        created_at=job.created_at,
        ended_at=job.ended_at,
        running_seconds=job.ran_seconds(now),
        model_bytes=job.dense_bytes,
        dense_bytes=job.dense_bytes * (job.fetches + job.deliveries),
        metrics=metrics,
        metrics_version=version,
        sites=site_views(run, sessions, now),
    )

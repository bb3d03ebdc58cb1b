"""Who evaluates which version, what the reports add up to, and whether a target is reached.

Sites evaluate the version that they fetched, before they train on it. Evaluators, and sites that
have test data but nothing to train on, are asked by `Evaluate`: every `evaluation.every` versions,
going straight to the newest when they are slow. The last version is evaluated by everybody.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from coordinator.job import Job, Member, Report
from coordinator.journal import EvaluationReported, SiteFailed
from coordinator.run import Asked, Batch, LastWord, Run
from protocol.messages import Evaluate, Evaluated
from protocol.metrics import Combined, check_metrics, combine
from protocol.words import span

LOOKS: Final = 16  # a target is looked at so many times, about, while a version's reports double


def before_training(job: Job, member: Member, version: int) -> bool:
    """Whether this site evaluates the version that it was sent before it trains on it."""
    every = job.spec.evaluation.every
    return (
        job.spec.evaluation.sites
        and every > 0
        and (job.streams or version % every == 0)  # rounds are compared at the same versions
        and version // every > member.evaluated_version // every
        and member.eval_examples > 0
    )


def _by_request(job: Job, member: Member) -> bool:
    if not member.active or member.eval_examples <= 0:
        return False
    return member.role == "evaluator" or (not member.trains and job.spec.evaluation.sites)


def expire(run: Run, batch: Batch) -> None:
    """Stop waiting for reports that are overdue: those versions go without them."""
    while run.evaluating:
        site, asked = next(iter(run.evaluating.items()))
        if batch.now < asked.deadline:
            return  # who was asked later has longer
        limit = span(run.config.evaluation_timeout_seconds)
        reason = f"no evaluation of version {asked.version} in {limit}"
        failed = SiteFailed(job=run.job.id, site=site, epoch=0, clock=0, attempt=0, reason=reason)
        batch.emit(run.job, failed)
        gave_up(run, site)


def ask(run: Run, batch: Batch) -> None:
    """Ask those who evaluate by request, each at most one version at a time."""
    job, every = run.job, run.job.spec.evaluation.every
    if job.version is None or every == 0 or not job.started or job.state == "paused":
        return
    for member in job.roster.idle:
        due = (
            (member.evaluated_version // every + 1) * every if member.evaluated_version >= 0 else 0
        )
        if _by_request(job, member) and job.number >= due:
            _request(run, batch, member.site)


def ask_last(run: Run, batch: Batch) -> Collection[str]:
    """Ask everybody about the last version; the sites that are still waited for."""
    job, last = run.job, run.last_word
    if last is None or last.version != job.number:
        last = run.last_word = LastWord(job.number)
        last.changed.update(member.site for member in job.roster.everybody)
    for site in sorted(last.changed):
        if _last_wanted(run, site):
            last.waits[site] = None
            _request(run, batch, site)
        else:
            last.waits.pop(site, None)
    last.changed.clear()
    return last.waits


def _last_wanted(run: Run, site: str) -> bool:
    job, member = run.job, run.job.members.get(site)
    if member is None or not member.active or member.eval_examples <= 0:
        return False
    everybody = job.spec.evaluation.sites or job.spec.evaluation_only
    done = member.evaluated_version >= job.number or run.unevaluated.get(site) == job.number
    return (member.role == "evaluator" or everybody) and not done


def changed(run: Run, site: str) -> None:
    """A site came, left, is ready, or has evaluated or given up: it is looked at again."""
    if run.last_word is not None:
        run.last_word.changed.add(site)


def _request(run: Run, batch: Batch, site: str) -> None:
    version = run.job.version
    if version is None or run.present.get(site) != "ready" or site in run.evaluating:
        return
    if run.unevaluated.get(site) == version.version:
        return
    deadline = batch.now + run.config.evaluation_timeout_seconds
    run.evaluating[site] = Asked(version=version.version, deadline=deadline)
    run.send(batch, site, Evaluate(job=run.job.id, base=version))


def forget(run: Run, site: str) -> None:
    """The site has a new session: what it was asked before is asked anew by the next `ask`."""
    run.evaluating.pop(site, None)
    run.unevaluated.pop(site, None)
    changed(run, site)


def reported(run: Run, batch: Batch, site: str, event: Evaluated) -> None:
    """Take a report, once per site and version.

    Raises:
        MalformedError: the metrics are out of bounds.
    """
    job = run.job
    check_metrics(event.metrics)
    member = job.members.get(site)
    asked = run.evaluating.get(site)
    if asked is not None and asked.version <= event.version:
        del run.evaluating[site]
        changed(run, site)
    if member is None or not member.active:
        return
    if not member.evaluated_version < event.version <= job.number:
        return
    batch.emit(
        job,
        EvaluationReported(
            job=job.id,
            version=event.version,
            site=site,
            role=member.role,
            examples=event.examples,
            metrics=event.metrics,
        ),
    )
    changed(run, site)
    # Adding up many reports once more for each of them would cost a large fleet its time.
    count = len(job.reports[event.version]) if event.version in job.reports else 0
    part = count % (1 + count // LOOKS) == 0 or count >= _able(job)
    run.unjudged = run.unjudged or part or member.role == "evaluator"


def gave_up(run: Run, site: str) -> None:
    """The site could not evaluate what it was asked: this version goes without it."""
    asked = run.evaluating.pop(site, None)
    if asked is not None:
        run.unevaluated[site] = asked.version
        changed(run, site)


# ---------------------------------------------------------------- what reports add up to


def reached(job: Job) -> str:
    """Why the target counts as reached, or an empty string (design 4.13).

    The evaluators' word decides where there is an evaluator. Otherwise a quorum of the sites must
    have reported on one version: `pacing.quorum`, and never less than half of those that can.
    """
    stop = job.spec.stop
    if stop.target is None:
        return ""
    for version in sorted(job.reports, reverse=True):
        reports = _decisive(job, job.reports[version])
        found = _combine(job, reports).get(stop.metric)
        if found is None or found.value is None:
            continue
        good = found.value >= stop.target if stop.mode == "max" else found.value <= stop.target
        if good:
            return (
                f"{stop.metric} {found.value:.6g} at version {version} reached the target "
                f"{stop.target:g}"
            )
    return ""


def _decisive(job: Job, reports: dict[str, Report]) -> dict[str, Report]:
    if job.evaluators:
        return {site: report for site, report in reports.items() if report.role == "evaluator"}
    need = max(job.spec.pacing.quorum, _able(job) // 2 + 1)
    if len(reports) < need:
        return {}
    having = {site: report for site, report in reports.items() if report.examples > 0}
    return having if len(having) >= need else {}


def _able(job: Job) -> int:
    """How many sites can report on one version."""
    return min(job.spec.sites.select or job.roster.testing, job.roster.testing)


def _combine(job: Job, reports: dict[str, Report]) -> dict[str, Combined]:
    per_site = {site: report.metrics for site, report in reports.items()}
    return combine(per_site, frozenset(job.spec.evaluation.lower_is_better))


def newest(job: Job) -> tuple[dict[str, Combined], int | None]:
    """Combined metrics for people, and their version.

    The newest version on which the evaluators, or a quorum of the sites, have reported; before
    there is one, the newest with any report.
    """
    versions = sorted(job.reports, reverse=True)
    for version in versions:
        reports = _decisive(job, job.reports[version])
        if reports:
            return _combine(job, reports), version
    for version in versions:
        return _combine(job, job.reports[version]), version
    return {}, None

"""The life of a job: `advance` does, after every stimulus, whatever can be done now.

    initialising  a site is asked for version 0; the job starts when the wanted sites are ready
    running       one round after the other, until a stop rule is met
    draining      no new round; the last version is evaluated and written, then the job is finished
    ended         version made by a commit under way still counts; checkpoint; release

Every wait has a deadline here or at the engine (a fold request), and `Run.hold` or `explain` says
what it is for. A paused job waits for a person.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator import conductor, evaluation
from coordinator.actions import Discard, KeepVersions, Release, TakeInit, Verdict, WriteCheckpoint
from coordinator.assign import gap
from coordinator.job import Job, Member, covered
from coordinator.journal import CheckpointMade, InitAsked, SiteFailed, VersionMade
from coordinator.membership import check_layouts, dismiss, tell_returned
from coordinator.round import lacking, opening
from coordinator.run import Around, Batch, Run
from coordinator.stimuli import CheckpointDone, InitFacts
from coordinator.streaming import buffer_deadline
from protocol.bodies import check_upload_fits
from protocol.errors import LimitError
from protocol.jobspec import JobSpec
from protocol.layout import Layout
from protocol.messages import Initialise, VerdictKind
from protocol.words import some

# Copies of the model that the fold process holds per job: the model and what its optimizer keeps.
COPIES = {
    "average": 1, "momentum": 2, "nesterov": 2, "delayed_nesterov": 3,
    "adagrad": 2, "adam": 3, "yogi": 3,
}  # fmt: skip


def resident_bytes(spec: JobSpec, dense_bytes: int) -> int:
    """What a running job holds in the fold process between commits, about, in bytes."""
    adaptive = spec.pacing.compensation == "adaptive"
    return dense_bytes * (COPIES[spec.server.optimizer] + spec.local.scaffold + adaptive)


def advance(run: Run, batch: Batch, around: Around) -> None:
    """Take every step that is due."""
    job = run.job
    evaluation.expire(run, batch)
    conductor.call_back(run, batch)
    conductor.close_if_due(run, batch)
    conductor.ask_commit(run, batch)
    if job.state == "running":
        _stop_rules(run, batch)
    if job.state in ("initialising", "running") and job.round is None and job.committing is None:
        _go_on(run, batch, around)
    if job.streams and job.round is not None:
        _stream(run, batch, around)
    if job.state == "running":
        evaluation.ask(run, batch)
    if job.state == "draining":
        _drain(run, batch)
    _keep_versions(run, batch)
    _checkpoint(run, batch)
    _release(run, batch)


# ---------------------------------------------------------------- version 0


def _initialise(run: Run, batch: Batch) -> None:
    job, run.hold = run.job, _missing_sites(run.job)
    if job.init_given:
        known = (run.layouts.get(member.layout_digest) for member in _by_preference(job))
        layout = next((layout for layout in known if layout is not None), None)
        if layout is not None and not run.init_asked:
            run.init_asked = True
            batch.do(TakeInit(job=job.id, spec=job.spec, layout=layout))
        if run.init_asked:
            run.hold = "version 0 is being made of the given file"
        return
    if job.init_site:
        limit = run.config.init_timeout_seconds
        if batch.now < job.init_asked_at + limit:
            run.hold = f"{job.init_site} is building version 0"
            return
        _init_failed(run, batch, job.init_site, f"no version 0 from it in {limit:g} s")
    enough = len(job.roster.sites) >= job.spec.sites.wanted
    if not enough and not job.roster.evaluators:
        return
    left = [member for member in _by_preference(job) if member.site not in job.init_failures]
    if left:
        batch.emit(job, InitAsked(job=job.id, site=left[0].site))
        run.send(batch, left[0].site, Initialise(job=job.id))
        run.hold = f"{left[0].site} is building version 0"
    elif job.init_failures:
        causes = [f"{site}: {why}" for site, why in sorted(job.init_failures.items())]
        fail(run, batch, f"no site could build version 0; {'; '.join(causes)}")


def _by_preference(job: Job) -> Iterator[Member]:
    yield from job.roster.evaluators
    yield from job.roster.sites


def _init_failed(run: Run, batch: Batch, site: str, reason: str) -> None:
    batch.emit(
        run.job,
        SiteFailed(job=run.job.id, site=site, epoch=0, clock=0, attempt=0, reason=reason),
    )


def init_done(run: Run, batch: Batch, site: str, facts: InitFacts) -> None:
    """Version 0 was read: take it, or ask the next site. The first one wins."""
    job = run.job
    run.init_asked = False
    problem = facts.problem or ("" if facts.layout else "it came without a layout")
    if job.version is not None:
        _answer(run, batch, site, "duplicate", "version 0 is here already")
    elif job.terminal:
        _answer(run, batch, site, "refused_drop", f"the job is {job.state}: {job.reason}")
    elif problem:
        _answer(run, batch, site, "refused_drop", problem)
        if not site:
            fail(run, batch, f"the file given for version 0 does not fit: {problem}")
        elif site == job.init_site:
            _init_failed(run, batch, site, problem)
    elif too_large := _too_large(run, facts.layout):
        _answer(run, batch, site, "refused_drop", too_large)
        fail(run, batch, too_large)
    else:
        batch.emit(
            job,
            VersionMade(
                job=job.id,
                version=0,
                digest=facts.digest,
                bytes=facts.bytes,
                layout=facts.layout,
                by=site,
            ),
        )
        _answer(run, batch, site, "counted", "it is version 0")
        check_layouts(run, batch)


def _too_large(run: Run, layout: Layout | None) -> str:
    """Why no update of this model could ever be taken: known before anybody trains."""
    spec, limit = run.job.spec, run.config.upload_bytes_max
    if layout is None or spec.evaluation_only:
        return ""
    try:
        check_upload_fits(layout, control=spec.local.scaffold, upload_bytes_max=limit)
    except LimitError as error:
        return f"{error.message} {error.hint}"
    return ""


def _answer(run: Run, batch: Batch, site: str, verdict: VerdictKind, reason: str) -> None:
    if site:
        batch.do(
            Verdict(
                job=run.job.id,
                site=site,
                epoch=0,
                clock=0,
                attempt=0,
                verdict=verdict,
                reason=reason,
            )
        )


# ---------------------------------------------------------------- running


def _missing_sites(job: Job) -> str:
    here, wanted = len(job.roster.sites), job.spec.sites.wanted
    return f"{here} of {wanted} sites are ready" if here < wanted else ""


def _causes(job: Job) -> str:
    """Why the last rounds were void; rounds with the same reason share a sentence."""
    rounds: dict[str, list[int]] = {}
    for number, reason in job.failures:
        rounds.setdefault(reason, []).append(number)
    return "; ".join(
        f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {reason}"
        for reason, numbers in rounds.items()
    )


def _go_on(run: Run, batch: Batch, around: Around) -> None:
    job = run.job
    if job.failed_in_row >= job.spec.pacing.failed_rounds_max:
        fail(run, batch, f"{job.failed_in_row} rounds in a row were void; {_causes(job)}")
        return
    if job.version is None:
        _initialise(run, batch)
    else:
        _open(run, batch, around)
    if job.state in ("initialising", "running") and job.round is None:
        _wait(run, batch, around, run.hold or "no round could be opened")


def _wait(run: Run, batch: Batch, around: Around, why: str) -> None:
    """A job in which nothing happens fails when it has waited long enough."""
    job, limit = run.job, run.job.spec.pacing.start_timeout_seconds
    if batch.now >= job.idle_since + limit:
        who = gap(run, list(around.runs.values()), around.sessions) if lacking(job) else ""
        fail(run, batch, f"waited {limit:g} s in vain: {why}{': ' if who else ''}{who}")


def _open(run: Run, batch: Batch, around: Around) -> None:
    job = run.job
    run.hold = _no_memory(run, around) if not job.started else ""
    run.hold = run.hold or ("" if job.started else _missing_sites(job))
    if run.hold:
        return
    if job.state == "initialising":
        run.move(batch, "start", f"{len(job.roster.sites)} sites were ready")
    if job.spec.evaluation_only:
        run.move(batch, "drain", "version 0 was evaluated")
        return
    if around.disk_full:
        run.hold = f"the coordinator's disk is full: {around.disk_full}"
        return
    found = opening(job, batch.now)
    if isinstance(found, str):
        run.hold = found
        return
    run.hold = _no_spool(run, batch, around, len(found.tasks))
    if not run.hold:
        conductor.open_round(run, batch, found)


def _stream(run: Run, batch: Batch, around: Around) -> None:
    """A rule without rounds: its one round is open for as long as the job runs."""
    job = run.job
    if job.state == "draining":
        reason = f"the job ends: {job.reason}"
        conductor.void(run, batch, reason, late=reason)
        return
    _checkpoint(run, batch)  # before the next commit: between two of them there may be no pause
    if job.failed_in_row >= job.spec.pacing.failed_rounds_max:
        fail(run, batch, f"{job.failed_in_row} commits in a row failed; {_causes(job)}")
        return
    if job.lost_in_row >= job.spec.pacing.failed_rounds_max * max(len(job.roster.training), 1):
        fail(run, batch, f"{job.lost_in_row} periods in a row came to nothing; {_last_words(job)}")
        return
    run.hold = ""
    if around.disk_full:
        run.hold = f"the coordinator's disk is full: {around.disk_full}"
    elif not run.hold:
        run.hold = _no_spool(run, batch, around, 1)
    if job.terminal:
        return
    conductor.go_on(run, batch, opening=job.state == "running" and not run.hold)
    if not job.at_work and job.state == "running":
        able = len(job.roster.training)
        run.hold = run.hold or (f"{able} sites with training data are here" if not able else "")
        _wait(run, batch, around, run.hold or "no site goes on")


def _last_words(job: Job) -> str:
    """What became of every site's last period; sites with the same reason share a sentence."""
    sites: dict[str, list[str]] = {}
    for site, member in sorted(job.members.items()):
        if member.last is not None:
            sites.setdefault(member.last.reason, []).append(site)
    return "; ".join(f"{some(names)}: {reason}" for reason, names in sites.items())


def _no_memory(run: Run, around: Around) -> str:
    need = resident_bytes(run.job.spec, run.job.dense_bytes)
    limit = run.config.jobs_resident_bytes_max
    others = [other.job for other in around.runs.values() if other is not run]
    held = sum(
        resident_bytes(job.spec, job.dense_bytes)
        for job in others
        if job.started and job.state in ("running", "draining")
    )
    if held and held + need > limit:
        return (
            f"queued for memory: it needs {need} bytes, running jobs hold {held}, "
            f"jobs_resident_bytes_max is {limit}"
        )
    return ""


def spool_bytes(job: Job) -> int:
    """Bytes of updates that this job holds, or will when everybody at work is in."""
    coming = (len(job.round.training) if job.round is not None else 0) + len(job.carried)
    return job.kept_bytes + job.spooled_bytes + coming * job.dense_bytes


def _no_spool(run: Run, batch: Batch, around: Around, updates: int) -> str:
    job, limit = run.job, run.config.spool_bytes_max
    run.wants_room = False
    held = sum(spool_bytes(other.job) for other in around.runs.values())
    need = updates * job.dense_bytes
    if held + need <= limit:
        return ""
    text = (
        f"a round of {updates} updates needs {need} bytes, {held} are held, "
        f"spool_bytes_max is {limit}"
    )
    if need > limit:
        fail(run, batch, f"{text}: raise it, or select fewer sites")
    run.wants_room = bool(covered(job, job.number)) and not job.spec.keep.updates
    return f"queued for room: {text}"


def _stop_rules(run: Run, batch: Batch) -> None:
    job, stop = run.job, run.job.spec.stop
    due = run.unjudged or run.judged != job.number
    run.unjudged, run.judged = False, job.number
    reason = evaluation.reached(job) if due else ""
    if not reason and stop.versions is not None and job.number >= stop.versions:
        reason = f"version {job.number} was reached"
    if not reason and stop.seconds is not None and job.ran_seconds(batch.now) >= stop.seconds:
        reason = f"{stop.seconds:g} s of running time were over"
    if reason:
        run.move(batch, "drain", reason)


# ---------------------------------------------------------------- ending


def _final_deadline(run: Run) -> float:
    return run.job.idle_since + run.config.evaluation_timeout_seconds


def _drain(run: Run, batch: Batch) -> None:
    job = run.job
    if job.round is not None or job.committing is not None:
        return
    run.hold = ""
    conductor.call_back(run, batch, f"the job ends: {job.reason}")
    if job.version is not None and batch.now < _final_deadline(run):
        waits = evaluation.ask_last(run, batch)
        if waits:
            run.hold = f"the evaluation of version {job.number} by {some(waits)}"
        elif job.checkpoint < job.number and not run.checkpoint_problem:
            run.hold = f"the checkpoint of version {job.number}"
    if not run.hold:
        behind = job.checkpoint < job.number
        note = f" (checkpoint still due: {run.checkpoint_problem or 'slow'})" if behind else ""
        run.move(batch, "finish", f"{job.reason}{note}")
        end(run, batch)


def fail(run: Run, batch: Batch, reason: str) -> None:
    """The job cannot go on."""
    run.move(batch, "fail", reason)
    end(run, batch)


def end(run: Run, batch: Batch) -> None:
    """The job has ended: close what is open and dismiss the sites."""
    job = run.job
    reason = f"the job is {job.state}: {job.reason}"
    conductor.void(run, batch, reason, late=reason)
    conductor.call_back(run, batch, reason)
    for site in sorted(run.present):
        dismiss(run, batch, site, reason, final=True)
    tell_returned(run, batch, reason)
    run.layouts.clear()
    run.evaluating.clear()
    run.hold = ""


# ---------------------------------------------------------------- what is kept


def _keep_versions(run: Run, batch: Batch) -> None:
    job = run.job
    oldest = job.number - job.spec.keep.versions + 1
    for asked in run.evaluating.values():  # the first was asked first, for the oldest version
        oldest = min(oldest, asked.version)
        break
    if oldest > run.oldest_kept:
        run.oldest_kept = oldest
        besides = tuple(sorted(v for v in _bases(job) if v < oldest))
        batch.do(KeepVersions(job=job.id, oldest=oldest, besides=besides))


def _bases(job: Job) -> set[int]:
    """Versions that somebody trains from, or may be told to, or that a commit needs once more."""
    tasks = job.round.tasks.values() if job.round is not None else ()
    found = {task.base.version for task in tasks if task.base and task.state == "training"}
    found |= {task.base.version for task in job.carried.values() if task.base}
    if job.spec.pacing.compensation != "none":
        found |= {spool.base for spool in job.spools.values()}
    found |= {mark.version for mark in job.marks.values()}
    if job.marks:  # pinned reads may go back to the version with a site's own latest
        found |= {member.seen.version for member in job.active("site") if member.seen}
    return found


def _checkpoint_at(run: Run) -> float | None:
    """When the next checkpoint is due, in job time; None: none is, or one is being written."""
    job, policy = run.job, run.job.spec.checkpoint
    if job.number <= job.checkpoint or job.committing is not None or run.checkpoint_asked:
        return None
    at_rest = not job.at_work and job.state in ("paused", "draining")
    behind = job.number - job.checkpoint
    if job.terminal or at_rest or run.wants_room or behind >= policy.every:
        return run.checkpoint_not_before
    return max(job.checkpoint_at + policy.seconds, run.checkpoint_not_before)


def _checkpoint(run: Run, batch: Batch) -> None:
    due = _checkpoint_at(run)
    if due is not None and batch.now >= due:
        run.checkpoint_asked = True
        batch.do(WriteCheckpoint(job=run.job.id, version=run.job.number))


def checkpoint_done(run: Run, batch: Batch, stimulus: CheckpointDone) -> None:
    """A checkpoint is on disk: the spools it covers may go. Or it is not: try again later."""
    job = run.job
    run.checkpoint_asked = False
    run.checkpoint_problem = stimulus.problem
    if stimulus.problem:
        run.checkpoint_not_before = batch.now + run.config.checkpoint_retry_seconds
        return
    if not job.checkpoint < stimulus.version <= job.number:
        return
    gone = covered(job, stimulus.version)
    batch.emit(job, CheckpointMade(job=job.id, version=stimulus.version))
    if gone and not job.spec.keep.updates:
        batch.do(Discard(job=job.id, spools=tuple(gone)))


def _release(run: Run, batch: Batch) -> None:
    job = run.job
    resting = job.terminal or (job.state == "paused" and not job.at_work)
    if not resting or job.committing is not None:
        run.released = False
    elif not run.released and not run.checkpoint_asked and job.checkpoint >= job.number:
        run.released = True
        batch.do(Release(job=job.id))


# ---------------------------------------------------------------- time


def deadlines(run: Run) -> Iterator[float]:
    """Everything that becomes due for this job by the passing of time alone."""
    job, spec = run.job, run.job.spec
    if job.round is not None and not job.streams:
        yield job.round.deadline
    if job.round is not None and job.streams:
        yield from (job.round.tasks[site].deadline for site in job.round.training)
        free = job.committing is None and not run.checkpoint_asked
        if job.queue and spec.pacing.rule == "buffered" and free:
            yield buffer_deadline(job)
    yield from (task.deadline for task in job.carried.values())
    at_rest = not job.at_work
    if job.state in ("initialising", "running") and at_rest:
        yield job.idle_since + spec.pacing.start_timeout_seconds
        if job.version is None and job.init_site:
            yield job.init_asked_at + run.config.init_timeout_seconds
    if job.state == "running" and spec.stop.seconds is not None and job.running_since is not None:
        yield job.running_since + spec.stop.seconds - job.running_seconds
    if job.state == "draining" and at_rest:
        yield _final_deadline(run)
    for asked in run.evaluating.values():
        yield asked.deadline  # the first was asked first, and all have the same time
        break
    due = _checkpoint_at(run)
    if due is not None:
        yield due

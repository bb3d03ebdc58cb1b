"""The coordinator's core: stimuli in, ordered actions out; `now` is job time in seconds.

    stimulus -> decide -> journal events -> evolve(state, event) -> actions that follow

Nothing here does IO or reads a clock. `restore` is `evolve` over the journal, and `resume` asks
again for whatever was outstanding when the process before this one ended. What a stimulus costs
does not grow with the number of sites: leases, rosters and deadlines are kept up to date.

    sessions     who is connected, leases, namesakes       run         a job in motion
    assign       sites -> jobs                             job         its state, by events
    membership   epochs, clocks, refusals                  round       decisions of a round
    lifecycle    version 0, start, stop, checkpoints       conductor   carrying them out
    evaluation   who evaluates what, targets               explain     the same, for people
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator import assign, conductor, evaluation, explain, lifecycle, membership
from coordinator import stimuli as s
from coordinator.actions import AnyAction, CloseSession, Send
from coordinator.job import Job, evolve, submitted
from coordinator.journal import Commanded, Entry, JobSubmitted
from coordinator.run import Around, Batch, CoreConfig, Run
from coordinator.sessions import Admitted, Refused, Session, Sessions
from protocol.errors import ConflictError, MalformedError, NotFoundError
from protocol.jobstates import COMMANDS, next_state
from protocol.messages import Bye, Declined, EndJob, Evaluated, Failed, Progress, Ready
from protocol.views import JobView

__all__ = ["Core", "CoreConfig"]

LATE_SECONDS = 1.0  # waking later than this after `wake_at` is a stall of the coordinator itself
ENDED_TOLD_MAX = 16  # newest ended jobs that a connecting site is reminded of


class Core:
    """Membership, assignment and all jobs."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._sessions = Sessions(config.lease_seconds, config.grace_seconds)
        self._assignment = assign.Assignment(config.site_jobs_max)
        self._runs: dict[str, Run] = {}
        self._live: dict[str, Run] = {}  # those that have anything left to do
        self._disk_full = ""
        self._jobs_due: float | None = None  # the first deadline of a job, as of the last batch

    # ------------------------------------------------------------ from the journal

    def restore(self, entries: Iterable[Entry]) -> None:
        """Rebuild the state from the journal: its next entries, in order, before anything else."""
        for entry in entries:
            event = entry.event
            if isinstance(event, JobSubmitted):
                self._add(submitted(event, entry.now))
            elif event.job in self._runs:  # events of a deleted job may outlive its submission
                evolve(self._runs[event.job].job, event, entry.now)

    def resume(self, now: float) -> list[AnyAction]:
        """After `restore`: ask again for what was outstanding, and give members fresh leases."""
        for run in self._runs.values():
            job = run.job
            run.released = job.terminal and job.checkpoint >= job.number and not job.committing
            if run.released:
                del self._live[job.id]
            self._sessions.expect([(m.site, m.role) for m in job.active()], now)
        return self._settle(Batch(now))

    # ------------------------------------------------------------ stimuli

    def handle(self, stimulus: s.Stimulus, now: float) -> list[AnyAction]:
        """Decide. A refusal (ConflictError, NotFoundError, ...) is raised and changes nothing."""
        if isinstance(stimulus, s.SiteHeard):
            self.heard(stimulus.site, now)
            return []
        due = self.wake_at()
        if due is not None and now > due + LATE_SECONDS:
            self._sessions.spare(now)
        batch = Batch(now)
        self._take(stimulus, batch)
        if isinstance(stimulus, s.SiteReported) and isinstance(stimulus.event, Progress):
            return []  # many come, and nothing ever becomes due by one
        return self._settle(batch)

    def _take(self, stimulus: s.Stimulus, batch: Batch) -> None:
        match stimulus:
            case s.SiteConnected():
                self._connected(stimulus, batch)
            case s.SiteClosed():
                self._sessions.close(stimulus.site, batch.now)
            case s.SiteLeft():
                self._left(stimulus, batch)
            case s.SiteReported():
                self._reported(stimulus, batch)
            case s.JobSubmission():
                self._submitted(stimulus, batch)
            case s.JobCommand():
                self._commanded(stimulus, batch)
            case s.InitComplete():
                run = self._run(stimulus.job)
                lifecycle.init_done(run, batch, stimulus.site, stimulus.facts)
            case s.UploadComplete():
                self.heard(stimulus.site, batch.now)
                run = self._run(stimulus.job)
                conductor.upload(run, batch, stimulus)
                membership.give_up(run, batch, stimulus.site, stimulus.facts.problem)
            case s.CommitDone():
                conductor.commit_done(self._run(stimulus.job), batch, stimulus.facts)
            case s.CheckpointDone():
                lifecycle.checkpoint_done(self._run(stimulus.job), batch, stimulus)
            case s.DiskState():
                self._disk_full = (stimulus.reason or "no space left") if stimulus.full else ""
            case s.Tick():
                pass

    def _settle(self, batch: Batch) -> list[AnyAction]:
        """Do whatever has become due by now, for all sites and jobs."""
        for session in self._sessions.expire(batch.now):
            silence = batch.now - session.heard_at
            reason = f"not heard for {silence:.1f} s, its lease has ended"
            self._leave_jobs(batch, session.site, reason)
            if session.instance:
                batch.do(CloseSession(site=session.site, reason=reason, retry=True))
        around = Around(disk_full=self._disk_full, sessions=self._sessions, runs=self._runs)
        for run in list(self._live.values()):
            lifecycle.advance(run, batch, around)
            if run.job.terminal and run.released:
                del self._live[run.job.id]
        self._assignment.look_at(batch.freed)
        for run, session in self._assignment.pairs(self._going(), self._sessions):
            membership.prepare(run, batch, session.site, session.role)
        due = [at for run in self._live.values() for at in lifecycle.deadlines(run)]
        self._jobs_due = min(due, default=None)
        return batch.close()

    def wake_at(self) -> float | None:
        """When to send a `Tick` if nothing happens before; None: never."""
        lease, job = self._sessions.wake_at(), self._jobs_due
        return lease if job is None or (lease is not None and lease < job) else job

    def _going(self) -> list[Run]:
        """Jobs that have not ended, in the order of their submission."""
        return [run for run in self._live.values() if not run.job.terminal]

    # ------------------------------------------------------------ sites

    def admit(self, site: str, instance: str, now: float) -> Admitted | Refused:
        """Ask before opening a session; after Admitted hand in a `SiteConnected`.

        `SiteConnected` begins a new session with an empty mailbox: the core sends again what is
        outstanding for the site.
        """
        return self._sessions.admit(site, instance, now)

    def heard(self, site: str, now: float) -> None:
        """Any byte from the site, as `SiteHeard` but without a batch: cheap, for every chunk."""
        self._sessions.heard(site, now)

    def stalled(self, seconds: float) -> None:
        """The coordinator did not listen for so long: leases are extended by it."""
        self._sessions.extend(seconds)

    def last_heard_seconds(self, site: str, now: float) -> float | None:
        """Age of the last byte from a site with a session; None when it has none."""
        session = self._sessions.get(site)
        return None if session is None or not session.instance else now - session.heard_at

    def job_of(self, site: str) -> str:
        """The job that the site works for now, or an empty string."""
        held = assign.works_for(self._going(), site)
        return held[0].job.id if held else ""

    def _connected(self, stimulus: s.SiteConnected, batch: Batch) -> None:
        site, role = stimulus.site, stimulus.role
        if isinstance(self.admit(site, stimulus.instance, batch.now), Refused):
            raise ConflictError(f"site {site!r} is connected from another process already.")
        another = self._sessions.connect(site, role, stimulus.instance, stimulus.tasks, batch.now)
        ended = [run for run in self._runs.values() if run.job.terminal]
        for run in ended[-ENDED_TOLD_MAX:]:
            if site in run.job.members:
                reason = f"the job is {run.job.state}: {run.job.reason}"
                end = EndJob(job=run.job.id, reason=reason, final=True)
                membership.remind(run, batch, site)
                batch.do(Send(site=site, instruction=end))
        if another:
            for run in self._live.values():
                run.declined.discard(site)
        self._assignment.look_at([site])
        for run in self._going():
            if site in run.job.members:
                run.returned.add(site)
        for run in assign.works_for(self._going(), site):
            membership.prepare(run, batch, site, role)

    def _left(self, stimulus: s.SiteLeft, batch: Batch) -> None:
        site, reason = stimulus.site, stimulus.reason or "it said goodbye"
        for run in self._live.values():
            membership.dismiss(run, batch, site, reason, final=False)
        self._leave_jobs(batch, site, reason)
        if self._sessions.get(site) is not None:
            retry = not stimulus.removed
            batch.do(Send(site=site, instruction=Bye(reason=reason, retry=retry)))
            batch.do(CloseSession(site=site, reason=reason, retry=retry))
            self._sessions.drop(site)

    def _leave_jobs(self, batch: Batch, site: str, reason: str) -> None:
        for run in self._going():
            membership.leave(run, batch, site, reason)

    def _reported(self, stimulus: s.SiteReported, batch: Batch) -> None:
        site, event = stimulus.site, stimulus.event
        session = self._sessions.get(site)
        if session is None or not session.instance:
            raise ConflictError(f"site {site!r} has no open session.", "Say hello first.")
        self.heard(site, batch.now)
        run = self._runs.get(event.job)
        if run is None or run.job.terminal:
            reason = "there is no such job" if run is None else f"the job is {run.job.state}"
            end = EndJob(job=event.job, reason=reason, final=True)
            if isinstance(event, Ready):
                batch.do(Send(site=site, instruction=end))
            return
        match event:
            case Ready():
                membership.ready(run, batch, site, session.role, event)
            case Declined():
                membership.refuse(run, batch, site, event.reason)
            case Progress():
                run.progress[site] = event
            case Failed():
                membership.failed(run, batch, site, event)
            case Evaluated():
                evaluation.reported(run, batch, site, event)

    # ------------------------------------------------------------ jobs

    def _submitted(self, stimulus: s.JobSubmission, batch: Batch) -> None:
        if stimulus.job in self._runs:
            raise ConflictError(f"job {stimulus.job} exists already.")
        if stimulus.init is not None and stimulus.init.problem:
            raise MalformedError(f"the file for version 0: {stimulus.init.problem}")
        given = stimulus.init is not None
        event = JobSubmitted(job=stimulus.job, spec=stimulus.spec, by=stimulus.by, init=given)
        run = self._add(submitted(event, batch.now))
        batch.emit(run.job, event)

    def _add(self, job: Job) -> Run:
        run = Run(job, self.config)
        self._runs[job.id] = self._live[job.id] = run
        return run

    def _commanded(self, stimulus: s.JobCommand, batch: Batch) -> None:
        run = self._run(stimulus.job)
        what = stimulus.stimulus
        if what not in COMMANDS:
            raise ConflictError(
                f"{what} is not a command; there are {', '.join(sorted(COMMANDS))}."
            )
        next_state(run.job.state, what)  # refuses before anything is journalled
        event = Commanded(job=stimulus.job, by=stimulus.by, what=what, reason=stimulus.reason)
        batch.emit(run.job, event)
        why = f": {stimulus.reason}" if stimulus.reason else ""
        run.move(batch, what, f"{what} asked for by {stimulus.by}{why}")
        if run.job.terminal:
            lifecycle.end(run, batch)

    def _run(self, job: str) -> Run:
        run = self._runs.get(job)
        if run is None:
            raise NotFoundError(f"there is no job {job}.")
        return run

    def forget(self, job: str) -> None:
        """Drop an ended job from memory (its deletion). ConflictError when it has not ended."""
        run = self._run(job)
        if not run.job.terminal or run.job.committing is not None:
            raise ConflictError(f"job {job} is {run.job.state}.", "Stop it first.")
        del self._runs[job]
        self._live.pop(job, None)

    def jobs(self) -> tuple[str, ...]:
        """Ids of all jobs, in the order of their submission."""
        return tuple(self._runs)

    def job(self, job: str) -> Job:
        """The state that the journal tells of a job: to be read, never changed. NotFoundError."""
        return self._run(job).job

    def spools(self, job: str) -> frozenset[str]:
        """Spool files that are still needed; any other of the job may go. NotFoundError."""
        return frozenset(self._run(job).job.spools)

    def view(self, job: str, now: float) -> JobView:
        """The job as it stands. `created_at` and `ended_at` are job time, and the byte counts of
        the sockets are 0: the shell fills these from its tables.
        """
        return explain.view(self._run(job), list(self._runs.values()), self._sessions, now)

    def sessions(self) -> Sequence[Session]:
        """All sessions by site name, for people."""
        return sorted(self._sessions, key=lambda session: session.site)

"""Which site works for which job: jobs in the order of their submission take what is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.run import Run
from coordinator.sessions import Session, Sessions
from protocol.words import some


def fault(run: Run, session: Session) -> str:
    """Why this site cannot work for this job at all; empty when it can."""
    job, site = run.job, session.site
    if job.spec.sites.names and session.role == "site" and site not in job.spec.sites.names:
        return "it is not among the job's sites"
    if session.tasks and job.spec.task.name not in session.tasks:
        return f"its owner has not allowed the task {job.spec.task.name!r}"
    if site in run.declined:
        return job.refused.get(site, "it was refused before")
    return ""


def works_for(runs: Sequence[Run], site: str) -> list[Run]:
    """The jobs, not ended, that a site is a member of or loading for."""
    found = []
    for run in runs:
        member = run.job.members.get(site)
        joined = site in run.present or (member is not None and member.active)
        if joined and not run.job.terminal:
            found.append(run)
    return found


def gap(run: Run, runs: Sequence[Run], sessions: Sessions) -> str:
    """What keeps each site that could be a member from being one; empty: there is none to name."""
    job = run.job
    active = {member.site for member in job.active()}
    names = job.spec.sites.names
    notes = []
    for session in sorted(sessions, key=lambda session: session.site):
        site = session.site
        if site in active or session.role != "site" or (names and site not in names):
            continue
        busy = [other for other in works_for(runs, site) if other is not run]
        if run.present.get(site) == "loading":
            notes.append(f"{site} is loading")
        elif busy and not fault(run, session):
            notes.append(f"{site} is busy with job {busy[0].job.id}")
        elif session.instance:
            notes.append(f"{site}: {fault(run, session).removesuffix('.') or 'not asked yet'}")
    away = [site for site in names or sorted(job.refused) if sessions.get(site) is None]
    for site in away:
        if site not in active:
            before = f", and declined before: {job.refused[site]}" if site in job.refused else ""
            notes.append(f"{site} is not connected{before.removesuffix('.')}")
    return some(notes, "; ")


class Assignment:
    """Looks only at sites that may get another answer than the last time: they have connected, are
    free of a job, or were given one; and at all when a job came or went, or took to another state.
    """

    def __init__(self, site_jobs_max: int) -> None:
        self._site_jobs_max = site_jobs_max
        self._changed: set[str] = set()
        self._states: tuple[tuple[str, str], ...] = ()

    def look_at(self, sites: Iterable[str]) -> None:
        """Something about these sites has changed."""
        self._changed.update(sites)

    def pairs(self, runs: Sequence[Run], sessions: Sessions) -> list[tuple[Run, Session]]:
        """What `assign` says of all sessions; `runs` are all jobs that have not ended."""
        states = tuple((run.job.id, run.job.state) for run in runs)
        if states != self._states:
            self._states = states
            found = list(sessions)
        else:
            known = (sessions.get(site) for site in self._changed)
            found = [session for session in known if session is not None]
        pairs = assign(runs, found, self._site_jobs_max) if found else []
        self._changed = {session.site for _, session in pairs}
        return pairs


def assign(
    runs: Sequence[Run], sessions: Sequence[Session], site_jobs_max: int
) -> list[tuple[Run, Session]]:
    """New pairs of job and site. `runs` in order of submission; each site gets one job a call.

    Jobs that are paused or draining keep their sites and take no new ones.
    """
    pairs = []
    open_ = any(run.job.state in ("initialising", "running") for run in runs)
    for session in sorted(sessions, key=lambda session: session.site) if open_ else ():
        held = works_for(runs, session.site)
        if not session.instance or len(held) >= site_jobs_max:
            continue
        for run in runs:
            takes = run.job.state in ("initialising", "running") and run not in held
            if takes and not fault(run, session):
                pairs.append((run, session))
                break
    return pairs

"""Which site works for which job: jobs in the order of their submission take what is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.run import Run
from coordinator.sessions import Session, Sessions


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

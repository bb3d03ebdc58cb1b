"""What happens to jobs as log lines with job, site and version, for whoever reads logs.

A line per change of a job and per version; single updates and rounds only at level debug.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from coordinator import journal as j

log = logging.getLogger("coordinator.jobs")


def tell(events: Iterable[j.Event]) -> None:
    """Log events that were stored."""
    for event in events:
        level, text = _line(event)
        if text and log.isEnabledFor(level):
            extra = {key: getattr(event, key, None) for key in ("job", "site", "version")}
            log.log(level, "%s", text, extra=extra)


def _line(event: j.Event) -> tuple[int, str]:
    """Level and text; an empty text: nothing worth a line."""
    match event:
        case j.JobSubmitted(spec=spec, by=by):
            return logging.INFO, f"job {spec.name!r} was submitted by {by}"
        case j.Commanded(what=what, by=by, reason=reason):
            return logging.INFO, f"{by} asks to {what}{_because(reason)}"
        case j.JobMoved(state=state, reason=reason):
            level = logging.WARNING if state == "failed" else logging.INFO
            return level, f"the job is {state}{_because(reason)}"
        case j.SiteEntered(site=site, role=role, epoch=epoch):
            return logging.INFO, f"{role} {site} takes part, epoch {epoch}"
        case j.SiteEnded(site=site, reason=reason):
            return logging.INFO, f"{site} takes part no more{_because(reason)}"
        case j.SiteRefused(site=site, reason=reason):
            return logging.WARNING, f"{site} does not take part{_because(reason)}"
        case j.SiteFailed(site=site, epoch=0, reason=reason):  # not in a period
            return logging.WARNING, f"{site} failed{_because(reason)}"
        case j.SiteFailed(site=site, clock=clock, reason=reason):
            return logging.WARNING, f"{site} failed at clock {clock}{_because(reason)}"
        case j.VersionMade(version=version, by=by):
            made = f" by {by}" if by else ""
            return logging.INFO, f"version {version} was made{made}"
        case j.RoundClosed(cohort=(), round=number, reason=reason):
            return logging.WARNING, f"round {number} is void{_because(reason)}"
        case j.UpdateSettled(site=site, clock=clock, verdict=verdict, reason=reason):
            level = logging.DEBUG if verdict in ("queued", "counted") else logging.WARNING
            return level, f"the update of {site}, clock {clock}, is {verdict}{_because(reason)}"
        case j.RoundOpened(round=number, tasks=tasks):
            return logging.DEBUG, f"round {number} begins with {len(tasks)} sites"
        case j.PeriodOpened(task=task, reason=reason):
            return logging.DEBUG, f"{task.site} goes on: {reason}"
        case j.CheckpointMade():
            return logging.DEBUG, "a checkpoint was written"
        case _:
            return logging.DEBUG, ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""

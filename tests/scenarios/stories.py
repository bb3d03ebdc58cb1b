"""A run told in lines: what the journal holds, with its times, in words a person can check."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator import journal as j
from simulation.fleet import Fleet


def tell(world: Fleet) -> str:
    """The whole journal of a run."""
    lines = [f"{entry.now:7.2f}  {line}" for entry in world.journal for line in _line(entry.event)]
    return "\n".join(lines) + "\n"


def _line(event: j.Event) -> Iterator[str]:
    match event:
        case j.JobSubmitted():
            yield f"{event.job}: submitted by {event.by}"
        case j.JobMoved():
            yield f"{event.job}: {event.state} ({event.reason})"
        case j.SiteEntered():
            yield f"{event.site} enters as {event.role}: epoch {event.epoch}, clock {event.clock}"
        case j.SiteEnded():
            yield f"{event.site} ends epoch {event.epoch} ({event.reason})"
        case j.SiteRefused():
            yield f"{event.site} is refused ({event.reason})"
        case j.InitAsked():
            yield f"{event.site} is asked for version 0"
        case j.RoundOpened():
            tasks = ", ".join(f"{task.site}@{task.clock}" for task in event.tasks)
            out = f", left out {', '.join(event.left_out)}" if event.left_out else ""
            yield f"round {event.round} opens on version {event.version}: {tasks}{out}"
        case j.Retried():
            yield f"{event.site}@{event.clock} is tried again ({event.reason})"
        case j.UpdateSettled():
            yield f"{event.site}@{event.clock} {event.verdict} ({event.reason})"
        case j.RoundClosed():
            what = f"makes version {event.version}" if event.cohort else "is void"
            yield f"round {event.round} {what} ({event.reason})"
        case j.VersionMade():
            yield f"version {event.version} is made"
        case j.CheckpointMade():
            yield f"checkpoint of version {event.version}"
        case j.EvaluationReported():
            yield f"{event.site} evaluated version {event.version}"
        case j.SiteFailed():
            yield f"{event.site}@{event.clock} failed ({event.reason})"
        case j.Commanded():
            yield f"{event.by} asks to {event.what}"

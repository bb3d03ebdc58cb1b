"""Views as HTML. Every text that came from outside is escaped, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Final

from protocol.metrics import Combined
from protocol.views import JobList, JobSiteView, JobView, SiteList, SiteView
from protocol.words import size, span

_NONE: Final = "–"


def render_jobs(jobs: JobList) -> str:
    """All jobs, each with its progress, its bytes and its sites."""
    if not jobs.jobs:
        return (
            "<h2>Jobs</h2><p>No jobs yet. <code>skerry job submit job.toml</code> submits one.</p>"
        )
    return "<h2>Jobs</h2>" + "".join(_job(job) for job in jobs.jobs)


def render_sites(sites: SiteList) -> str:
    """All sites of this coordinator."""
    if not sites.sites:
        return (
            "<h2>Sites</h2><p>No site has joined. <code>skerry token create</code> lets one in.</p>"
        )
    head = ("site", "role", "state", "last heard", "job", "up", "down", "software")
    return "<h2>Sites</h2>" + _table(head, (_site(site) for site in sites.sites))


def _job(job: JobView) -> str:
    why = job.waiting or job.reason
    figures = [
        ("version", str(job.version)),
        ("running", span(job.running_seconds)),
        ("model", size(job.model_bytes)),
        ("up", size(job.bytes_up)),
        ("down", size(job.bytes_down)),
        ("against dense exchange", saving(job)),
    ]
    return (
        f'<section class="job"><h3>{escape(job.name)} <small>{escape(job.id)}</small> '
        f'<span class="state {escape(job.state)}">{escape(job.state)}</span></h3>'
        + (f"<p>{escape(why)}</p>" if why else "")
        + _figures(figures)
        + _metrics(job.metrics, job.metrics_version)
        + _table(
            ("site", "clock", "examples", "counted", "refused", "up", "down", "doing"),
            (_job_site(site) for site in job.sites),
        )
        + "</section>"
    )


def saving(job: JobView) -> str:
    """What of dense float32 exchange was really sent; nothing while there is nothing to compare."""
    if not job.dense_bytes:
        return _NONE
    return f"{100 * (job.bytes_up + job.bytes_down) / job.dense_bytes:.1f} %"


def _metrics(metrics: Mapping[str, Combined], version: int | None) -> str:
    if not metrics:
        return ""
    rows = []
    for name, found in sorted(metrics.items()):
        worst = f"{_number(found.worst_value)} at {found.worst_site}" if found.worst_site else _NONE
        odd = ", ".join(found.nonfinite) or _NONE
        rows.append((name, _number(found.value), worst, f"{found.sites} of {found.of_sites}", odd))
    title = f"metrics of version {version}" if version is not None else "metric"
    return _table((title, "value", "worst", "sites", "not finite at"), rows)


def _job_site(site: JobSiteView) -> tuple[str, ...]:
    return (
        site.site,
        str(site.clock),
        str(site.train_examples),
        str(site.counted),
        str(site.refused),
        size(site.bytes_up),
        size(site.bytes_down),
        site.doing if site.active else f"gone; {site.doing}",
    )


def _site(site: SiteView) -> tuple[str, ...]:
    heard = site.last_heard_seconds
    return (
        site.name,
        site.role,
        site.state,
        _NONE if heard is None else f"{span(heard)} ago",
        site.job or _NONE,
        size(site.bytes_up),
        size(site.bytes_down),
        site.software,
    )


def _figures(pairs: Iterable[tuple[str, str]]) -> str:
    inner = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs)
    return f"<dl>{inner}</dl>"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    if not body:
        return ""
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"

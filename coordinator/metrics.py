"""`/metrics`: what Prometheus is told. Every figure comes from the same views that people see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.http import Services
from protocol.jobstates import TERMINAL, JobState
from protocol.views import Info, JobView, SiteView, VersionView

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SITE_STATES: Final = ("connected", "away", "drained", "revoked")


class Snapshot(NamedTuple):
    """What the figures are made from, taken at one moment."""

    jobs: Sequence[JobView]
    newest: dict[str, VersionView]
    sites: Sequence[SiteView]
    info: Info
    ready: bool
    uploads: int
    streams: int
    loop_lag_seconds: float
    loop_lag_seconds_max: float


async def collect(services: Services) -> bytes:
    """The text that Prometheus reads."""
    engine = services.engine
    jobs = (await engine.jobs()).jobs
    newest: dict[str, VersionView] = {}
    for job in jobs:
        if job.state not in TERMINAL and job.version > 0:
            for made in (await engine.versions(job.id, job.version - 1)).versions:
                newest[job.id] = made
    return render(
        Snapshot(
            jobs=jobs,
            newest=newest,
            sites=(await engine.sites()).sites,
            info=engine.info(),
            ready=engine.health().status == "ok" and not services.stopping,
            uploads=services.uploads.now,
            streams=services.streams.now,
            loop_lag_seconds=services.lag.last,
            loop_lag_seconds_max=services.lag.most,
        )
    )


def render(snapshot: Snapshot) -> bytes:
    """Snapshot -> exposition text."""
    registry = CollectorRegistry()
    registry.register(_Families(snapshot))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._families = [*_of_jobs(snapshot), *_of_sites(snapshot), *_of_process(snapshot)]

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_jobs(snapshot: Snapshot) -> list[Metric]:
    by_state = GaugeMetricFamily("skerry_jobs", "Jobs by state.", labels=["state"])
    counts = Counter(job.state for job in snapshot.jobs)
    for state in get_args(JobState):
        by_state.add_metric([state], counts[state])
    version = GaugeMetricFamily(
        "skerry_job_version", "Newest version of the model.", labels=["job"]
    )
    rounds = CounterMetricFamily("skerry_job_rounds", "Rounds opened.", labels=["job"])
    size = GaugeMetricFamily("skerry_job_model_bytes", "Size of the model.", labels=["job"])
    seconds = GaugeMetricFamily(
        "skerry_job_fold_seconds", "Time to fold the newest version.", labels=["job"]
    )
    moved = CounterMetricFamily(
        "skerry_job_bytes", "Socket bytes of a job.", labels=["job", "direction"]
    )
    dense = CounterMetricFamily(
        "skerry_job_dense_bytes", "Bytes that dense float32 exchange costs.", labels=["job"]
    )
    for job in snapshot.jobs:
        version.add_metric([job.id], job.version)
        rounds.add_metric([job.id], job.round)
        size.add_metric([job.id], job.model_bytes)
        moved.add_metric([job.id, "up"], job.bytes_up)
        moved.add_metric([job.id, "down"], job.bytes_down)
        dense.add_metric([job.id], job.dense_bytes)
        if job.id in snapshot.newest:
            seconds.add_metric([job.id], snapshot.newest[job.id].fold_seconds)
    return [by_state, version, rounds, size, seconds, moved, dense]


def _of_sites(snapshot: Snapshot) -> list[Metric]:
    by_state = GaugeMetricFamily("skerry_sites", "Sites by state.", labels=["state"])
    counts = Counter(site.state for site in snapshot.sites)
    for state in _SITE_STATES:
        by_state.add_metric([state], counts[state])
    moved = CounterMetricFamily(
        "skerry_site_bytes", "Socket bytes of a site.", labels=["site", "direction"]
    )
    for site in snapshot.sites:
        moved.add_metric([site.name, "up"], site.bytes_up)
        moved.add_metric([site.name, "down"], site.bytes_down)
    return [by_state, moved]


def _of_process(snapshot: Snapshot) -> list[Metric]:
    info = snapshot.info
    memory = GaugeMetricFamily(
        "skerry_memory_bytes", "Resident memory.", labels=["process", "kind"]
    )
    for process, kind, megabytes in (
        ("coordinator", "now", info.process_mb),
        ("coordinator", "peak", info.process_peak_mb),
        ("fold", "now", info.fold_mb),
        ("fold", "peak", info.fold_peak_mb),
    ):
        memory.add_metric([process, kind], megabytes * 1e6)
    build = GaugeMetricFamily("skerry_build", "Versions.", labels=["software", "protocol"])
    build.add_metric([info.software, str(info.protocol)], 1)
    return [
        memory,
        build,
        GaugeMetricFamily("skerry_ready", "1 when work can be taken.", value=int(snapshot.ready)),
        GaugeMetricFamily("skerry_uploads_open", "Uploads under way.", value=snapshot.uploads),
        GaugeMetricFamily("skerry_streams_open", "Event streams.", value=snapshot.streams),
        GaugeMetricFamily(
            "skerry_event_loop_lag_seconds",
            "How late the event loop last came to a timer.",
            value=snapshot.loop_lag_seconds,
        ),
        GaugeMetricFamily(
            "skerry_event_loop_lag_seconds_max",
            "The latest that it ever came.",
            value=snapshot.loop_lag_seconds_max,
        ),
    ]

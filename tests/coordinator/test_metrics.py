"""What Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.coordinator.fakeengine import JOB, Served


async def scrape(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    async with served.client.get(served.people + "/metrics", headers=served.person()) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        text = await answer.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_jobs_sites_and_process_are_told(served: Served):
    found = await scrape(served)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert value("skerry_jobs", state="running") == 1
    assert value("skerry_jobs", state="failed") == 0
    assert value("skerry_job_version", job=JOB) == 2
    assert value("skerry_job_rounds_total", job=JOB) == 3
    assert value("skerry_job_bytes_total", job=JOB, direction="up") == 10
    assert value("skerry_job_dense_bytes_total", job=JOB) == 80
    assert value("skerry_job_fold_seconds", job=JOB) == 0.25
    assert value("skerry_sites", state="connected") == 1
    assert value("skerry_memory_bytes", process="coordinator", kind="now") == 50e6
    assert value("skerry_ready") == 1


async def test_the_lag_of_the_event_loop_and_its_highest_are_told(served: Served):
    for seconds in (0.5, -1.0, 0.25):
        served.services.lag.note(seconds)
    found = await scrape(served)
    assert found["skerry_event_loop_lag_seconds", frozenset()] == 0.25
    assert found["skerry_event_loop_lag_seconds_max", frozenset()] == 0.5


async def test_names_that_need_escaping_stay_one_label(served: Served):
    served.engine.names["sks1.other"] = 'a"b\\c\n病院'
    found = await scrape(served)
    labels = frozenset({("site", 'a"b\\c\n病院'), ("direction", "up")})
    assert ("skerry_site_bytes_total", labels) in found


async def test_a_stopping_coordinator_is_not_ready(served: Served):
    served.services.stop()
    assert (await scrape(served))["skerry_ready", frozenset()] == 0

"""Views as HTML."""

from __future__ import annotations

import pytest

from protocol.metrics import Combined
from protocol.views import JobList, JobSiteView, JobView, SiteList, SiteView
from webui.render import render_jobs, render_sites, saving

EVIL = '<script>alert("x")</script>'


def job(**changes):
    fields = {
        "id": "j-1",
        "name": "digits",
        "task": "digits",
        "state": "running",
        "reason": "",
        "waiting": "round 4: waits for edge-2",
        "version": 3,
        "round": 4,
        "created_at": 0.0,
        "bytes_up": 1_500_000,
        "bytes_down": 500_000,
        "dense_bytes": 4_000_000,
        "metrics": {"accuracy": Combined(value=0.875, sites=2, of_sites=3, worst_site="b")},
        "metrics_version": 3,
        "sites": (
            JobSiteView(
                site="病院-3", role="site", active=True, epoch=1, clock=3, train_examples=10,
                eval_examples=2, doing="training clock 3", joined_at_version=0, counted=3,
            ),
        ),
    }  # fmt: skip
    return JobView(**{**fields, **changes})


def test_a_job_shows_state_wait_bytes_saving_metrics_and_sites():
    page = render_jobs(JobList(jobs=(job(),)))
    for text in ("running", "waits for edge-2", "1.5 MB", "50.0 %", "0.8750", "病院-3", "2 of 3"):
        assert text in page


@pytest.mark.parametrize("field", ["id", "name", "reason", "waiting"])
def test_text_from_outside_is_escaped_everywhere(field: str):
    page = render_jobs(
        JobList(
            jobs=(job(waiting="", **{field: EVIL}) if field != "waiting" else job(waiting=EVIL),)
        )
    )
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_names_of_sites_and_metrics_are_escaped():
    evil = job(metrics={EVIL: Combined(value=None, worst_site=EVIL, nonfinite=(EVIL,))})
    assert "<script" not in render_jobs(JobList(jobs=(evil,)))
    site = SiteView(
        name=EVIL, role="site", state="away", last_heard_seconds=None, joined_at=0.0,
        software=EVIL, tasks=(EVIL,), job=EVIL,
    )  # fmt: skip
    page = render_sites(SiteList(sites=(site,)))
    assert "<script" not in page
    assert "away" in page


def test_nothing_yet_says_what_to_do():
    assert "job submit" in render_jobs(JobList(jobs=()))
    assert "token create" in render_sites(SiteList(sites=()))


def test_there_is_no_saving_before_anything_was_sent():
    assert saving(job(dense_bytes=0)) == "–"


def test_a_job_without_sites_and_metrics_has_no_empty_tables():
    assert "<table" not in render_jobs(JobList(jobs=(job(sites=(), metrics={}),)))

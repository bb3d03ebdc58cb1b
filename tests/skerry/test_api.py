"""The client of the people API."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.errors import (
    ConflictError,
    InvalidFileError,
    NotFoundError,
    Problem,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
)
from protocol.jobspec import JobSpec, TaskRef
from protocol.views import JobDetail, JobList, VersionList, VersionView
from skerry.api import Api, follow
from tests.skerry.fakeapi import FakeApi, fake_api
from tests.webui.test_render import job


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with fake_api() as running:
        yield running


def version(number: int) -> VersionView:
    return VersionView(
        version=number, digest="d", bytes=1, made_at=0.0, cohort=("a",), missing={},
        update_norm=0.0, model_norm=0.0, fold_seconds=0.0,
    )  # fmt: skip


def detail(**changes: Any) -> JobDetail:
    return JobDetail(job=job(**changes), spec=JobSpec(name="digits", task=TaskRef(name="digits")))


def test_the_token_is_sent_and_the_answer_decoded(fake: FakeApi):
    fake.answer("GET /api/v1/jobs", JobList(jobs=(job(),)))
    assert [one.id for one in Api(fake.url, "secret").jobs()] == ["j-1"]
    assert fake.seen[0][1]["Authorization"] == "Bearer secret"


def test_an_error_comes_back_as_the_error_that_it_was(fake: FakeApi):
    error = InvalidFileError(
        "bad job.", "hint", problems=(Problem(key="period", found="x", allowed="y"),)
    )
    fake.answer("GET /api/v1/jobs", error.body(), 422)
    with pytest.raises(InvalidFileError) as caught:
        Api(fake.url).jobs()
    assert caught.value.problems == error.problems
    fake.answer("GET /api/v1/jobs", ConflictError("no.").body(), 409)
    with pytest.raises(ConflictError):
        Api(fake.url).jobs()


def test_somebody_who_is_no_coordinator_is_said_to_be_none(fake: FakeApi):
    fake.answer("GET /api/v1/jobs", b"<html>router</html>", 404)
    with pytest.raises(UnreachableError, match="is no coordinator: HTTP 404"):
        Api(fake.url).jobs()
    fake.answer("GET /api/v1/jobs", b"<html>router</html>", 200)
    with pytest.raises(UnreachableError, match="answered /api/v1/jobs with something else"):
        Api(fake.url).jobs()


def test_nobody_is_unreachable_with_the_reason():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="connection refused"):
            Api(url).jobs()


def test_a_tls_listener_asked_in_plain_http_is_guessed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(UnreachableError, match="hung up") as caught:
            Api(url).jobs()
        thread.join()
    assert "https://" in caught.value.hint


def test_whoever_has_no_token_is_told_how_to_give_one(fake: FakeApi):
    fake.answer("GET /api/v1/jobs", UnauthenticatedError("this needs a credential.").body(), 401)
    with pytest.raises(UnauthenticatedError) as caught:
        Api(fake.url).jobs()
    assert "SKERRY_TOKEN" in caught.value.hint


def test_silence_ends_at_the_deadline():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        api = Api(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
        with pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"):
            api.jobs()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "file:///etc/passwd"])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(UsageError):
        Api(url)


def test_loopback_never_goes_through_a_proxy(fake: FakeApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fake.answer("GET /api/v1/jobs", JobList(jobs=()))
    assert Api(fake.url).jobs() == ()


def test_a_job_is_found_by_id_name_or_beginning(fake: FakeApi):
    jobs = (job(id="j-aa", name="one"), job(id="j-ab", name="two"), job(id="j-b", name="two"))
    fake.answer("GET /api/v1/jobs", JobList(jobs=jobs))
    api = Api(fake.url)
    assert api.find_job("j-aa") == "j-aa"
    assert api.find_job("one") == "j-aa"
    assert api.find_job("j-b") == "j-b"
    with pytest.raises(UsageError, match="j-ab, j-b"):
        api.find_job("two")
    with pytest.raises(UsageError, match="j-aa, j-ab"):
        api.find_job("j-a")
    with pytest.raises(NotFoundError):
        api.find_job("three")


def test_names_in_any_language_are_quoted_in_paths(fake: FakeApi):
    fake.answer("POST /api/v1/sites/Klinik-Z%C3%BCrich%2F3/drain", {})
    Api(fake.url).site_command("Klinik-Zürich/3", "drain", "Umbau")
    assert fake.seen[0][0].endswith("/drain")
    assert msgspec.json.decode(fake.seen[0][2]) == {"reason": "Umbau"}


def test_an_export_is_written_whole_or_refused(fake: FakeApi, tmp_path: Path):
    headers = {"X-Skerry-Missing": '["head"]', "X-Skerry-Missing-Count": "7"}
    fake.answer("GET /api/v1/jobs/j-1/export?version=3", b"x" * 5000, headers=headers)
    found = Api(fake.url).export("j-1", tmp_path / "m", 3)
    assert found == (["head"], 7)
    assert (tmp_path / "m").stat().st_size == 5000
    fake.answer("GET /api/v1/jobs/j-1/export", b"x" * 50, headers={"Content-Length": "60"})
    with pytest.raises(UnreachableError):
        Api(fake.url, timeout=0.5).export("j-1", tmp_path / "n")


def test_following_shows_each_version_once_and_ends_with_the_stored_end(fake: FakeApi):
    events = b"retry: 1000\n\nid: 5\nevent: journal\ndata: {}\n\n: still here\n\n"
    fake.answer("GET /api/v1/jobs/j-1/events?after=0", events)
    fake.answer("GET /api/v1/jobs/j-1/events?after=5", events)
    fake.answer("GET /api/v1/jobs/j-1", detail(version=3))
    fake.answer(
        "GET /api/v1/jobs/j-1/versions", VersionList(versions=tuple(map(version, range(4))))
    )
    fake.answer("GET /api/v1/jobs/j-1/versions?after=2", VersionList(versions=(version(3),)))
    shown: list[int] = []
    for step, change in enumerate(follow(Api(fake.url), "j-1")):
        shown += [one.version for one in change.versions]
        if step == 2:  # the core says finished before it is stored: this is not the end yet
            fake.answer("GET /api/v1/jobs/j-1", detail(version=3, state="finished"))
        if step == 5:
            assert shown == [0, 1, 2]
            fake.answer("GET /api/v1/jobs/j-1", detail(version=3, state="finished", ended_at=9.0))
        assert step < 20
    assert shown == [0, 1, 2, 3]


def test_a_hundred_versions_come_page_by_page(fake: FakeApi):
    fake.answer("GET /api/v1/jobs/j-1", detail(version=99, state="finished", ended_at=1.0))
    for after, page in ((None, range(50)), (49, range(50, 100))):
        query = "" if after is None else f"?after={after}"
        versions = VersionList(versions=tuple(map(version, page)))
        fake.answer(f"GET /api/v1/jobs/j-1/versions{query}", versions)
    (change,) = follow(Api(fake.url), "j-1")
    assert [one.version for one in change.versions] == list(range(100))

"""What the doctor finds."""

from __future__ import annotations

import socket
import time
from email.utils import formatdate
from pathlib import Path

import msgspec
import pytest

from client.agentsettings import AgentSettings, TaskSettings
from client.taskref import hash_task
from coordinator.settings import CoordinatorSettings
from protocol.errors import UnauthenticatedError
from protocol.version import PROTOCOL, SOFTWARE
from protocol.views import Health, Info
from skerry import doctor
from skerry.api import Api
from tests.skerry.fakeapi import fake_api


def info(protocol: int = PROTOCOL) -> Info:
    return Info(coordinator="c", software=SOFTWARE, protocol=protocol, agents_url="", people_url="")


def test_old_python_and_missing_packages_fail_with_what_to_do():
    assert doctor.python((3, 10, 2)).status == "fail"
    assert doctor.python((3, 11, 0)).status == "ok"
    missing, present = doctor.packages(("msgspec", "no-such-package-here"))
    assert (missing.status, missing.hint) == ("fail", "pip install no-such-package-here")
    assert present.text.startswith("msgspec ")


def test_a_taken_port_is_a_warning_and_a_free_one_is_not():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert doctor.port("port", listen).status == "warn"
    assert doctor.port("port", listen).status == "ok"


def test_clocks_that_differ_are_noticed():
    now = float(int(time.time()))  # the header has whole seconds
    assert doctor.clock(formatdate(now, usegmt=True), now).status == "ok"
    off = doctor.clock(formatdate(now - 60, usegmt=True), now)
    assert (off.status, "+60 s" in off.text) == ("warn", True)
    assert doctor.clock("not a date", now).status == "warn"


@pytest.fixture
def task(tmp_path: Path) -> TaskSettings:
    (tmp_path / "task.py").write_text("class Mine: pass\n", encoding="utf-8")
    return TaskSettings(reference=str(tmp_path / "task.py:Mine"))


def test_the_allow_list_is_checked_for_code_hash_and_data(task: TaskSettings):
    def status(**changes: str) -> tuple[str, int]:
        changed = msgspec.structs.replace(task, **changes)
        (found,) = doctor.tasks(AgentSettings(tasks={"mine": changed}))
        return found.status, found.code

    assert status() == ("ok", 0)
    assert status(sha256=hash_task(task.reference)) == ("ok", 0)
    assert status(sha256="0" * 64) == ("fail", 4)
    assert status(reference="/none/task.py") == ("fail", 5)
    assert status(data="/none/data") == ("fail", 5)


def test_a_protocol_that_cannot_talk_fails():
    assert doctor.protocol(info()).status == "ok"
    assert doctor.protocol(info(PROTOCOL + 5)).code == 4


def test_everything_is_looked_at_when_a_coordinator_answers(tmp_path: Path):
    with fake_api() as fake:
        fake.answer("GET /readyz", Health(status="ok"))
        fake.answer("GET /api/v1/info", info())
        fake.answer("GET /", b"<!doctype html>", headers={"Content-Type": "text/html"})
        found = list(
            doctor.examine(
                Api(fake.url, "t"),
                CoordinatorSettings(data_dir=str(tmp_path / "not" / "there")),
                AgentSettings(),
                unknown=["SKERRY_LEESE"],
                asked=True,
            )
        )
        by_name = {one.check: one.status for one in found}
        assert by_name == {
            "python": "ok", "packages": "ok", "disk": by_name["disk"], "settings": "warn",
            "tasks": "ok", "coordinator": "ok", "protocol": "ok", "clock": "ok", "page": "ok",
        }  # fmt: skip
        fake.answer("GET /readyz", Health(status="degraded", reasons=("disk full",)), 503)
        assert "disk full" in doctor.reach(Api(fake.url), asked=True).text
        fake.answer("GET /api/v1/info", UnauthenticatedError("no token.").body(), 401)
        assert next(iter(doctor.answering(Api(fake.url)))).code == 4


def test_a_coordinator_that_was_named_must_answer():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        api = Api(f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert (doctor.reach(api, asked=True).status, doctor.reach(api, asked=True).code) == (
            "fail",
            3,
        )
        assert doctor.reach(api, asked=False).status == "warn"

"""Settings of the coordinator: which go together, and which are a sentence each."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.runner import BEAT_SECONDS
from coordinator.settings import CoordinatorSettings, is_loopback, split_listen
from protocol.errors import InvalidFileError


def test_the_defaults_can_work_and_stay_on_this_machine():
    settings = CoordinatorSettings()
    settings.check()
    assert is_loopback(split_listen(settings.listen_agents)[0])
    assert is_loopback(split_listen(settings.listen_people)[0])


def test_every_setting_has_its_sentence():
    for field in msgspec.inspect.type_info(CoordinatorSettings).fields:  # type: ignore[attr-defined]
        info = field.type
        sentence = (getattr(info, "extra_json_schema", None) or {}).get("description", "")
        assert sentence.endswith("."), field.name


def test_all_problems_are_named_at_once():
    settings = CoordinatorSettings(
        listen_agents="nowhere",
        listen_people="127.0.0.1:70000",
        data_dir="",
        tls_certificate="c.pem",
        lease_seconds=2.0,
        grace_seconds=3.0,
        upload_bytes_max=2,
        spool_bytes_max=1,
    )
    with pytest.raises(InvalidFileError) as refused:
        settings.check()
    assert {problem.key for problem in refused.value.problems} == {
        "listen_agents",
        "listen_people",
        "data_dir",
        "tls_key",
        "grace_seconds",
        "upload_bytes_max",
    }


def test_a_lease_shorter_than_the_beat_that_renews_it_is_refused():
    known = msgspec.convert({"lease_seconds": 1.5, "grace_seconds": 1.0}, CoordinatorSettings)
    assert known.lease_seconds > BEAT_SECONDS
    with pytest.raises(msgspec.ValidationError, match=r">= 1\.5.*lease_seconds"):
        msgspec.convert({"lease_seconds": 1.0}, CoordinatorSettings)


def test_a_ca_alone_is_no_certificate():
    assert [one.key for one in CoordinatorSettings(tls_ca="ca.pem").problems()] == ["tls_ca"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("127.0.0.1:8470", ("127.0.0.1", 8470)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:443", ("::1", 443)),
        ("fl.example.org:65535", ("fl.example.org", 65535)),
    ],
)
def test_addresses_are_read(value: str, expected: tuple[str, int]):
    assert split_listen(value) == expected


@pytest.mark.parametrize(
    "value", ["", "8470", ":8470", "a:", "a:b", "a:65536", "::1:80", "[x]:80", "a:-1", "a:１"]
)
def test_what_is_no_address_is_refused(value: str):
    with pytest.raises(ValueError):
        split_listen(value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_only_what_nobody_else_can_reach_is_loopback(host: str, expected: bool):
    assert is_loopback(host) is expected


def test_unknown_settings_are_refused():
    with pytest.raises(msgspec.ValidationError, match="lease_second"):
        msgspec.convert({"lease_second": 1.0}, CoordinatorSettings)

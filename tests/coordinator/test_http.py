"""JSON in and out: caps, depth, errors."""

from __future__ import annotations

import pytest

from coordinator.http import Gauge, decode, refusal
from protocol.errors import BusyError, MalformedError, UnauthenticatedError
from protocol.limits import JSON_DEPTH_MAX
from protocol.messages import Hello, Leave


def nested(levels: int) -> bytes:
    return b'{"instance":"i","more":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_json_is_taken_up_to_its_depth():
    assert decode(Hello, nested(JSON_DEPTH_MAX)).instance == "i"


@pytest.mark.parametrize("levels", [JSON_DEPTH_MAX + 1, 100, 100_000])
def test_deeper_json_is_refused(levels: int):
    with pytest.raises(MalformedError, match=f"deeper than {JSON_DEPTH_MAX}"):
        decode(Hello, nested(levels))


@pytest.mark.parametrize("raw", [b"[" * 1_000_000, b"}{" * 1_000, b'"' + b"[" * 100])
def test_brackets_without_end_are_refused_too(raw: bytes):
    with pytest.raises(MalformedError):
        decode(Hello, raw)


def test_brackets_within_text_are_no_depth():
    text = '[{\\"' * 1_000
    assert decode(Leave, f'{{"reason":"{text}"}}'.encode()).reason == '[{"' * 1_000


def test_wide_json_is_no_deep_json():
    wide = b'{"instance":"i","tasks":[],"more":[' + b",".join([b"[]"] * 10_000) + b"]}"
    assert decode(Hello, wide).instance == "i"


def test_a_gauge_refuses_above_its_cap_and_names_the_setting():
    gauge = Gauge(1, "uploads", "uploads_max")
    with gauge, pytest.raises(BusyError, match="uploads_max allows 1"), gauge:
        pass
    assert gauge.now == 0


def test_a_gauge_is_given_back_when_the_work_fails():
    gauge = Gauge(1, "uploads", "uploads_max")
    with pytest.raises(ZeroDivisionError), gauge:
        raise ZeroDivisionError
    assert gauge.now == 0


def test_refusals_say_in_headers_what_clients_act_on():
    assert refusal(UnauthenticatedError("no.")).headers["WWW-Authenticate"] == "Bearer"
    assert refusal(BusyError("no.")).headers["Retry-After"] == "1"
    slow = BusyError("no.", details={"retry_after_seconds": 41.6})
    assert refusal(slow).headers["Retry-After"] == "42"

"""Bytes that no agent sends: garbage, oversize, truncated, too old. Nothing runs, nothing breaks."""

from __future__ import annotations

import http.client
import json
import pickle
from pathlib import Path

import pytest

from protocol import frames
from protocol.errors import ErrorBody
from protocol.messages import Hello, Welcome, decode, encode
from protocol.version import PROTOCOL
from tests.e2e.harness import Place

pytestmark = pytest.mark.e2e


class Intruder:
    """A site with a real credential that does not behave."""

    def __init__(self, place: Place, name: str) -> None:
        assert place.addresses
        folder = place.join(name)
        self.secret = (folder / "secret").read_text(encoding="utf-8").strip()
        self.netloc = place.addresses.agents.removeprefix("http://")
        self.session = ""

    def send(
        self, method: str, path: str, body: bytes = b"", protocol: str | None = str(PROTOCOL)
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.netloc, timeout=10)
        headers = {"Authorization": f"Bearer {self.secret}", "X-Skerry-Session": self.session}
        if protocol is not None:
            headers["X-Skerry-Protocol"] = protocol
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def hello(self) -> None:
        hello = Hello(protocol=PROTOCOL, instance="intruder", tasks=("stub",))
        status, raw = self.send("POST", "/agent/v1/hello", encode(hello))
        assert status == 200, raw
        self.session = decode(Welcome, raw).session


def refusal(raw: bytes) -> str:
    return decode(ErrorBody, raw).message


def test_garbage_a_truncated_frame_and_a_pickle_are_refused_and_the_job_goes_on(place: Place):
    """PC-109: a pickle is bytes like any other; its marker file must not exist."""
    place.start()
    marker = place.folder / "marker"
    intruder = Intruder(place, "mallory")
    intruder.hello()
    place.sites("a", "b")
    job = place.submit(versions=2, sites={"names": ["a", "b"]})

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (str(marker),)

    bomb = pickle.dumps(Bomb())
    upload = f"/agent/v1/jobs/{job}/updates?epoch=0&clock=0&attempt=0&offset=0"
    whole = frames.encode_meta(b"{}") + frames.encode_end()
    for path in (
        upload,
        f"/agent/v1/jobs/{job}/init?offset=0",
        "/agent/v1/events",
        "/agent/v1/join",
    ):
        for body in (bomb, b"\0" * 4096, whole[:-3], json.dumps({"pickle": bomb.hex()}).encode()):
            status, raw = intruder.send("POST", path, body)
            assert 400 <= status < 500, (path, status, raw)
            assert refusal(raw)
    assert place.finished(job).version == 2
    assert not marker.exists()


def test_an_oversized_body_is_refused_before_it_is_taken(place: Place):
    """PC-020: the refusal is a 413 with the limit and the size; other routes keep a small cap."""
    place.start(flags={"upload-bytes-max": "1000000"})
    intruder = Intruder(place, "mallory")
    intruder.hello()
    status, raw = intruder.send("POST", "/agent/v1/leave", b"x" * 1_049_648)
    assert status == 413
    assert "1048576" in refusal(raw).replace(",", "")


@pytest.mark.parametrize(("theirs", "named"), [(None, "no protocol"), ("99", "99")])
def test_a_foreign_protocol_is_refused_with_both_numbers(
    place: Place, theirs: str | None, named: str
):
    """PC-087: refused at registration, with both versions and what to upgrade."""
    place.start()
    intruder = Intruder(place, "old")
    hello = Hello(protocol=int(theirs) if theirs else None, instance="x")
    status, raw = intruder.send("POST", "/agent/v1/hello", encode(hello), protocol=theirs)
    assert status == 426
    assert named in refusal(raw)
    assert f"protocol {PROTOCOL}" in refusal(raw)

"""Sites that reach the coordinator only through a proxy: TLS in a CONNECT tunnel."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from client.join import join_site
from protocol.errors import UnreachableError
from protocol.views import TokenRequest
from tests.connectproxy import ConnectProxy
from tests.e2e.harness import Place

pytestmark = pytest.mark.e2e
FLAGS = {"listen-agents": "0.0.0.0:0", "advertise": "127.0.0.1"}
TLS_RECORD = re.compile(rb"\x16\x03.")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the proxy variables of this test, and of the agents that it starts."""

    def set_to(**values: str) -> None:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_a_job_runs_through_the_proxy_that_https_proxy_names(
    place: Place, environment: Callable[..., None]
):
    with ConnectProxy("edge:s3cret") as proxy:
        environment(HTTPS_PROXY=f"http://edge:s3cret@127.0.0.1:{proxy.port}")
        addresses = place.start(flags=FLAGS)
        place.sites("a", "b")
        assert place.finished(place.submit(versions=2)).version == 2
        target = addresses.agents.removeprefix("https://")
        assert set(proxy.tunnels) == {target}
        assert proxy.refused == 0
        assert proxy.bytes_up > 0
        assert all(TLS_RECORD.match(first) for first in proxy.first_bytes)


def test_the_proxy_of_the_settings_wins_over_the_environment(
    place: Place, environment: Callable[..., None]
):
    with ConnectProxy() as proxy:
        environment()
        place.start(flags=FLAGS)
        settings = place.join("a") / "agent.toml"
        named = f'proxy = "http://127.0.0.1:{proxy.port}"\n'
        settings.write_text(named + settings.read_text(encoding="utf-8"), encoding="utf-8")
        environment(HTTPS_PROXY="http://127.0.0.1:9")
        place.agent("a")
        assert place.finished(place.submit(wanted=1, versions=1)).version == 1
        assert proxy.tunnels


def test_no_proxy_is_honoured(place: Place, environment: Callable[..., None]):
    with ConnectProxy() as proxy:
        environment(HTTPS_PROXY=f"http://127.0.0.1:{proxy.port}", NO_PROXY="127.0.0.1")
        place.start(flags=FLAGS)
        place.sites("a")
        assert place.finished(place.submit(wanted=1, versions=1)).version == 1
        assert proxy.tunnels == []


@pytest.mark.parametrize("who", ["", "edge:wrong@"])
def test_a_proxy_that_wants_credentials_is_named_with_what_to_do(
    place: Place, environment: Callable[..., None], who: str
):
    addresses = place.start(flags=FLAGS)
    token = place.api.create_token(TokenRequest(site="a")).token
    with ConnectProxy("edge:s3cret") as proxy:
        environment(HTTPS_PROXY=f"http://{who}127.0.0.1:{proxy.port}")
        with pytest.raises(UnreachableError, match="407") as refused:
            asyncio.run(
                join_site(token, name="a", folder=place.site_folder("a"), url=addresses.agents)
            )
    assert f"127.0.0.1:{proxy.port}" in refused.value.message
    assert "HTTPS_PROXY" in refused.value.hint
    assert "wrong" not in refused.value.message + refused.value.hint


def test_a_proxy_that_is_not_there_is_named(place: Place, environment: Callable[..., None]):
    addresses = place.start(flags=FLAGS)
    token = place.api.create_token(TokenRequest(site="a")).token
    with ConnectProxy() as proxy:
        port = proxy.port
    environment(HTTPS_PROXY=f"http://127.0.0.1:{port}")
    with pytest.raises(UnreachableError, match=f"proxy http://127.0.0.1:{port}"):
        asyncio.run(join_site(token, name="a", folder=place.site_folder("a"), url=addresses.agents))

"""Beyond loopback everything is TLS, and the CA is the one that the token names."""

from __future__ import annotations

import asyncio

import pytest

from client.join import join_site
from privacy.tokens import format_join_token, parse_join_token
from protocol.errors import SkerryError
from protocol.views import TokenRequest
from tests.e2e.harness import Place

pytestmark = pytest.mark.e2e
FLAGS = {"listen-agents": "0.0.0.0:0", "advertise": "127.0.0.1"}


def test_a_job_runs_over_tls_with_the_ca_that_the_token_pins(place: Place):
    addresses = place.start(flags=FLAGS)
    assert addresses.agents.startswith("https://127.0.0.1:")
    place.sites("Klinik-Zürich", "病院-3")
    job = place.submit(versions=2)
    view = place.finished(job)
    assert view.version == 2
    assert {site.site for site in view.sites} == {"Klinik-Zürich", "病院-3"}
    assert (place.site_folder("病院-3") / "ca.pem").is_file()


def test_a_coordinator_with_another_ca_than_the_tokens_gets_no_secret(place: Place):
    addresses = place.start(flags=FLAGS)
    token = parse_join_token(place.api.create_token(TokenRequest(site="a")).token)
    forged = type(token)(id=token.id, secret=token.secret, ca="0" * 64, url=token.url)
    folder = place.site_folder("a")
    with pytest.raises(SkerryError, match="the join token pins"):
        asyncio.run(
            join_site(format_join_token(forged), name="a", folder=folder, url=addresses.agents)
        )
    assert not (folder / "secret").exists()
    assert place.api.tokens().tokens[0].used_at is None

"""The byte ledger is what really crossed the sockets, and each byte is charged to its job."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.e2e.harness import Place
from tests.faultproxy import FaultProxy

pytestmark = pytest.mark.e2e
ELEMENTS, VERSIONS = 100_000, 5


async def test_the_ledger_equals_what_a_proxy_counts_and_bodies_are_charged_to_the_job(
    place: Place,
):
    await asyncio.to_thread(place.start)
    assert place.addresses
    host, _, port = place.addresses.agents.removeprefix("http://").rpartition(":")
    async with AsyncExitStack() as stack:
        proxies = {}
        for name in ("a", "b"):
            await asyncio.to_thread(place.join, name)
            proxies[name] = await stack.enter_async_context(FaultProxy(host, int(port)))
            place.configure(name, url=proxies[name].url)
            place.agent(name)
        job = await asyncio.to_thread(
            place.submit, versions=VERSIONS, task={"options": {"elements": ELEMENTS}}
        )
        view = await asyncio.to_thread(place.finished, job)
        for child in place.agents.values():
            child.process.terminate()
            await asyncio.to_thread(child.process.wait, 10)
        sites = {site.name: site for site in (await asyncio.to_thread(place.api.sites)).sites}
    for name, proxy in proxies.items():
        assert sites[name].bytes_up == pytest.approx(proxy.bytes_up, rel=1e-3)
        assert sites[name].bytes_down == pytest.approx(proxy.bytes_down, rel=1e-3)
    body = 4 * ELEMENTS
    ups = 2 * VERSIONS + 1  # every update, and version 0 from one site
    assert 0 <= view.bytes_up - ups * body < 0.02 * ups * body, "bodies and their headers, no more"
    downs = 2 * VERSIONS
    assert 0 <= view.bytes_down - downs * body < 0.02 * downs * body

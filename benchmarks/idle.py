"""Idle: what a site costs while nothing happens, and what 200 of them cost the coordinator.

One real agent is measured by /proc over a minute. The 200 are sessions of the real protocol (join,
hello, long poll) held by one process, because what counts there is the coordinator's side.
`bare_wake_ms` is what this machine charges a process that does nothing but wake up: on some virtual
machines that is milliseconds, and idling is mostly waking.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.places import Place, place
from privacy.keys import new_private_key, public_hex, sign_join
from privacy.tokens import parse_join_token
from protocol.messages import Hello, Instructions, Join, Joined, Welcome, decode, encode
from protocol.version import PROTOCOL
from protocol.views import TokenRequest

AGENTS: Final = 200
SECONDS: Final = 60.0
QUICK_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 5.0  # what a start leaves behind is no idling


def cpu_seconds(pid: int) -> float:
    """Time on a processor of all threads of a process, in seconds.

    From the scheduler's own clock (nanoseconds): the ticks in /proc/PID/stat charge ten whole
    milliseconds to whoever runs at a tick, and that is when sleepers wake.
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in 1e6 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ProcessLookupError(pid)


def run(*, quick: bool) -> dict[str, Any]:
    """Measure one agent, then many sessions."""
    seconds = QUICK_SECONDS if quick else SECONDS
    with place() as here:
        here.join("only")
        pid = here.agent("only")
        settle(here, 1)
        time.sleep(SETTLE_SECONDS)
        before = cpu_seconds(pid)
        time.sleep(seconds)
        agent_cpu = (cpu_seconds(pid) - before) / seconds * 100
        agent_mb = rss_mb(pid)
        coordinator_cpu = asyncio.run(many(here, AGENTS, seconds))
        wake_ms = bare_wake_ms(seconds / 6)
    return {
        "bare_wake_ms": round(wake_ms, 2),
        "agent_mb": round(agent_mb, 1),
        "agent_cpu_percent": round(agent_cpu, 3),
        "coordinator_cpu_percent": round(coordinator_cpu, 2),
        "agents": AGENTS,
        "span_seconds": seconds,
    }


def bare_wake_ms(seconds: float) -> float:
    """What this machine charges an empty event loop for waking up, in ms of CPU: the floor."""
    program = (
        "import asyncio\n"
        "async def main():\n"
        "    while True:\n"
        "        await asyncio.sleep(0.25)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        time.sleep(1)
        before = cpu_seconds(process.pid)
        time.sleep(seconds)
        return (cpu_seconds(process.pid) - before) / (seconds / 0.25) * 1e3
    finally:
        process.kill()
        process.wait()


def settle(here: Place, sites: int) -> None:
    """Wait until so many sites are connected."""
    end = time.monotonic() + 30
    while sum(site.state == "connected" for site in here.api.sites().sites) < sites:
        if time.monotonic() > end:
            raise TimeoutError(f"{sites} sites did not connect within 30 s.")
        time.sleep(0.1)


async def many(here: Place, count: int, seconds: float) -> float:
    """Hold `count` sessions open; the coordinator's CPU over `seconds`, in percent of a core."""
    pid = here.processes.children[0].process.pid
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(here.addresses.agents, connector=connector) as http:
        polling = [asyncio.Event() for _ in range(count)]
        polls = [
            asyncio.create_task(hold(here, http, f"idle-{k:03d}", event))
            for k, event in enumerate(polling)
        ]
        async with asyncio.timeout(120):
            await asyncio.gather(*(event.wait() for event in polling))
        await asyncio.sleep(SETTLE_SECONDS)
        before = cpu_seconds(pid)
        await asyncio.sleep(seconds)
        used = cpu_seconds(pid) - before
        done = [poll for poll in polls if poll.done()]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        if done:
            raise RuntimeError(f"{len(done)} of {count} sessions ended early: {done[0]}")
        return used / seconds * 100


async def hold(here: Place, http: aiohttp.ClientSession, name: str, polling: asyncio.Event) -> None:
    """One site: join, hello, and poll until cancelled; `polling` is set before the first poll."""
    created = await asyncio.to_thread(here.api.create_token, TokenRequest(site=name))
    token = parse_join_token(created.token)
    key = new_private_key()
    join = Join(
        protocol=PROTOCOL,
        token_id=token.id,
        token_secret=token.secret,
        name=name,
        public_key=public_hex(key),
        proof=sign_join(key, token.id, name),
    )
    headers = {"X-Skerry-Protocol": str(PROTOCOL)}
    async with http.post("/agent/v1/join", data=encode(join), headers=headers) as answer:
        joined = decode(Joined, await answer.read())
    headers["Authorization"] = f"Bearer {joined.secret}"
    hello = Hello(protocol=PROTOCOL, instance=secrets.token_hex(8), tasks=())
    async with http.post("/agent/v1/hello", data=encode(hello), headers=headers) as answer:
        welcome = decode(Welcome, await answer.read())
    headers["X-Skerry-Session"] = welcome.session
    cursor = welcome.cursor
    polling.set()
    while True:
        path = f"/agent/v1/next?cursor={cursor}"
        async with http.get(path, headers=headers) as answer:
            cursor = decode(Instructions, await answer.read()).cursor


BARS: Final = {
    "agent_mb": "<= 60",
    "agent_cpu_percent": "<= 0.1",
    "coordinator_cpu_percent": "<= 5",
}

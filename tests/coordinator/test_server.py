"""The coordinator as a process: it starts, refuses to start, and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic

import aiohttp
import msgspec
import pytest

from coordinator import tls
from coordinator.server import Addresses, serve
from coordinator.settings import CoordinatorSettings
from privacy.keys import new_private_key, public_hex, sign_join
from privacy.tokens import parse_join_token
from protocol.errors import ConflictError, InvalidFileError, UsageError
from protocol.messages import Bye, Hello, Instructions, Join, Joined, Welcome, decode, encode
from protocol.version import PROTOCOL
from protocol.views import SiteList, TokenCreated, TokenRequest

PROGRAM = """
import asyncio, sys
from time import monotonic
from coordinator.server import serve
from coordinator.settings import CoordinatorSettings
from protocol.errors import SkerryError

def ready(agents, people):
    print(agents, people, flush=True)

settings = CoordinatorSettings(
    data_dir=sys.argv[1], listen_agents=sys.argv[2], listen_people=sys.argv[3], log_level="info"
)
began = monotonic()
try:
    sys.exit(asyncio.run(serve(settings, ready)))
except SkerryError as error:
    print(f"{error}\\nafter {monotonic() - began:.3f} s", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Running(msgspec.Struct):
    process: asyncio.subprocess.Process
    agents: str
    people: str
    token: str

    @property
    def admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


async def start(
    folder: Path, agents: str = "127.0.0.1:0", people: str = "127.0.0.1:0"
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        str(folder),
        agents,
        people,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@contextlib.asynccontextmanager
async def coordinator(folder: Path) -> AsyncIterator[Running]:
    """A real coordinator in a process of its own."""
    process = await start(folder)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            agents, people = (await process.stdout.readline()).decode().split()
        token = (folder / "admin-token").read_text(encoding="utf-8").strip()
        yield Running(process, agents, people, token)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def join(client: aiohttp.ClientSession, running: Running, name: str) -> dict[str, str]:
    """Join and say hello over the real API; the headers of a site with an open session."""
    async with client.post(
        running.people + "/api/v1/tokens",
        data=encode(TokenRequest(site=name)),
        headers=running.admin,
    ) as answer:
        token = parse_join_token(decode(TokenCreated, await answer.read()).token)
    assert token.url == running.agents
    key = new_private_key()
    request = Join(
        protocol=PROTOCOL,
        token_id=token.id,
        token_secret=token.secret,
        name=name,
        public_key=public_hex(key),
        proof=sign_join(key, token.id, name),
    )
    headers = {"X-Skerry-Protocol": str(PROTOCOL)}
    async with client.post(
        running.agents + "/agent/v1/join", data=encode(request), headers=headers
    ) as answer:
        assert answer.status == 200
        headers["Authorization"] = f"Bearer {decode(Joined, await answer.read()).secret}"
    async with client.post(
        running.agents + "/agent/v1/hello",
        data=encode(Hello(protocol=PROTOCOL, instance="i")),
        headers=headers,
    ) as answer:
        welcome = decode(Welcome, await answer.read())
    return {**headers, "X-Skerry-Session": welcome.session}


def never(*_: str) -> None:
    pytest.fail("it said that it was ready")


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_one_ctrl_c_closes_three_pages_and_three_agents_and_ends_within_5_s(tmp_path: Path):
    """PC-083: event streams and long polls are told at once, the exit code is 130, the fold
    process is gone, and so is the file with the addresses.
    """
    async with coordinator(tmp_path) as running, aiohttp.ClientSession() as client:
        polls = []
        for name in ("Klinik-Zürich", "病院-3", "edge-1"):
            headers = await join(client, running, name)
            polls.append(
                asyncio.create_task(
                    client.get(running.agents + "/agent/v1/next?cursor=0", headers=headers)
                )
            )
        pages = [
            await client.get(running.people + "/api/v1/events", headers=running.admin)
            for _ in range(3)
        ]
        for page in pages:
            await page.content.readuntil(b"\n\n")
        # All three polls are open once the coordinator shows their sites as connected.
        async with asyncio.timeout(10):
            while True:
                async with client.get(
                    running.people + "/api/v1/sites", headers=running.admin
                ) as answer:
                    sites = decode(SiteList, await answer.read()).sites
                if [site.state for site in sites] == ["connected"] * 3:
                    break
        assert Addresses(**msgspec.json.decode((tmp_path / "addresses.json").read_bytes())) == (
            Addresses(
                agents=running.agents,
                people=running.people,
                ca_fingerprint="",
                pid=running.process.pid,
            )
        )
        below = children(running.process.pid)
        assert len(below) == 1
        began = monotonic()
        running.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(5):
            for poll in polls:
                async with await poll as answer:
                    found = decode(Instructions, await answer.read())
                    assert isinstance(found.items[-1], Bye)
                    assert found.items[-1].retry
            for page in pages:
                assert b"\n\n" not in await page.content.read()
            code = await running.process.wait()
        assert monotonic() - began < 5
        assert code == 130
        assert not alive(below[0])
        assert not (tmp_path / "addresses.json").exists()


async def test_a_second_ctrl_c_ends_at_once(tmp_path: Path):
    """PC-083: with an upload that never ends, the first Ctrl-C waits; the second does not."""
    async with coordinator(tmp_path) as running, aiohttp.ClientSession() as client:
        sending = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield bytes(1024)
            sending.set()
            await asyncio.Event().wait()

        upload = asyncio.create_task(
            client.post(
                running.people + "/api/v1/inits",
                data=body(),
                headers={**running.admin, "Content-Length": "100000"},
            )
        )
        await sending.wait()
        async with client.get(running.people + "/healthz"):
            pass
        below = children(running.process.pid)
        running.process.send_signal(signal.SIGINT)
        assert running.process.stderr is not None
        # aiohttp's answer to a new connection is refusal as soon as the first signal was taken.
        async with asyncio.timeout(5):
            while True:
                try:
                    async with client.get(running.people + "/readyz") as answer:
                        if answer.status == 503:
                            break
                except aiohttp.ClientConnectionError:
                    break
            began = monotonic()
            running.process.send_signal(signal.SIGINT)
            assert await running.process.wait() == 130
            assert monotonic() - began < 1
            while any(alive(pid) for pid in below):
                await asyncio.to_thread(os.sched_yield)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)


async def test_sigterm_ends_with_0_and_the_log_is_json_lines_off_a_terminal(tmp_path: Path):
    async with coordinator(tmp_path) as running:
        assert running.process.stderr is not None
        running.process.terminate()
        assert await asyncio.wait_for(running.process.wait(), 5) == 0
        lines = (await running.process.stderr.read()).decode().splitlines()
    said = [json.loads(line)["message"] for line in lines]
    assert f"sites: {running.agents}, people: {running.people}" in said
    assert "stopping: got SIGTERM." in said


@pytest.mark.parametrize("taken", ["agents", "people"])
async def test_a_taken_port_ends_a_second_coordinator_within_2_s_and_harms_nobody(
    tmp_path: Path, taken: str
):
    """PC-084: non-zero exit with port and process; the first coordinator goes on answering."""
    async with coordinator(tmp_path / "first") as running, aiohttp.ClientSession() as client:
        address = (running.agents if taken == "agents" else running.people).removeprefix("http://")
        second = await start(
            tmp_path / "second",
            **{taken: address},  # type: ignore[arg-type]
        )
        _, stderr = await asyncio.wait_for(second.communicate(), 20)
        text = stderr.decode()
        assert second.returncode == 2
        assert address.rpartition(":")[2] in text
        assert f"(pid {running.process.pid})" in text
        assert f"listen_{taken}" in text
        assert "Traceback" not in text
        async with client.get(running.people + "/readyz") as answer:
            assert answer.status == 200
        # From the call on; how long Python takes to start is not ours.
        assert float(text.split()[-2]) < 2


async def test_a_taken_port_is_found_before_anything_else_is_begun(tmp_path: Path):
    """PC-084: the refusal itself takes well under 2 s and leaves no trace of a start."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = CoordinatorSettings(
        data_dir=str(tmp_path / "data"),
        listen_agents="127.0.0.1:0",
        listen_people=f"127.0.0.1:{port}",
    )
    began = monotonic()
    with pytest.raises(UsageError, match=str(port)):
        await serve(settings, never, stop=asyncio.Event())
    assert monotonic() - began < 2
    assert not (tmp_path / "data" / "addresses.json").exists()
    server.close()


async def test_two_coordinators_do_not_share_a_data_folder(tmp_path: Path):
    settings = CoordinatorSettings(
        data_dir=str(tmp_path), listen_agents="127.0.0.1:0", listen_people="127.0.0.1:0"
    )
    async with coordinator(tmp_path):
        with pytest.raises(ConflictError):
            await serve(settings, never, stop=asyncio.Event())


async def test_settings_that_make_no_sense_are_refused_first(tmp_path: Path):
    settings = CoordinatorSettings(data_dir=str(tmp_path / "data"), listen_agents="nowhere")
    with pytest.raises(InvalidFileError):
        await serve(settings, never, stop=asyncio.Event())
    assert not (tmp_path / "data").exists()


async def test_beyond_loopback_both_listeners_speak_tls_with_the_ca_of_the_token(tmp_path: Path):
    host = tls.own_address()
    settings = CoordinatorSettings(
        data_dir=str(tmp_path), listen_agents="0.0.0.0:0", listen_people="0.0.0.0:0"
    )
    urls: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, lambda *both: urls.set_result(both), stop=stop))
    async with asyncio.timeout(30):
        await asyncio.wait({task, urls}, return_when=asyncio.FIRST_COMPLETED)
    agents, people = urls.result()
    assert agents.startswith(f"https://{host}:")
    assert people.startswith(f"https://{host}:")
    trust = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))
    async with aiohttp.ClientSession() as client:
        async with client.get(agents + "/agent/v1/ca", ssl=trust) as answer:
            shown = await answer.read()
        assert shown == (tmp_path / "tls" / "ca.pem").read_bytes()
        async with client.post(
            people + "/api/v1/tokens",
            data=encode(TokenRequest()),
            headers={
                "Authorization": "Bearer "
                + (tmp_path / "admin-token").read_text(encoding="utf-8").strip()
            },
            ssl=trust,
        ) as answer:
            token = parse_join_token(decode(TokenCreated, await answer.read()).token)
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(people.replace("https:", "http:") + "/healthz")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get(people + "/healthz", ssl=ssl.create_default_context())
    assert token.url == agents
    assert token.ca == decode(Addresses, (tmp_path / "addresses.json").read_bytes()).ca_fingerprint
    assert len(token.ca) == 64
    stop.set()
    assert await asyncio.wait_for(task, 10) == 0

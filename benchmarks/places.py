"""A coordinator and stub sites as real processes, for benchmarks of everything but training."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple

import msgspec

from client.join import join_site
from client.taskref import hash_task
from protocol import jobfile
from protocol.errors import JobFailedError
from protocol.jobstates import TERMINAL
from protocol.views import JobRequest, TokenRequest
from skerry.api import Api
from skerry.processes import Addresses, Processes, start_agent, start_coordinator

_LOOK_SECONDS: Final = 0.5


class Place(NamedTuple):
    """A running coordinator: its folder, addresses, processes and API."""

    folder: Path
    addresses: Addresses
    processes: Processes
    api: Api

    def join(self, name: str) -> Path:
        """Enrol a site that runs the stub worker; its agent is not started."""
        folder = self.folder / name
        token = self.api.create_token(TokenRequest(site=name)).token
        joining = join_site(
            token=token,
            url=self.addresses.agents,
            name=name,
            role="site",
            folder=folder,
            insecure=False,
        )
        asyncio.run(joining)
        command = msgspec.json.encode((sys.executable, "-m", "client.stub")).decode()
        task = msgspec.json.encode(str(self.folder / "stub_task.py")).decode()
        text = f"worker_command = {command}\n[tasks.stub]\nreference = {task}\n"
        (folder / "agent.toml").write_text(text, encoding="utf-8")
        return folder

    def agent(self, name: str) -> int:
        """Start the agent of a site that has joined; returns its process id."""
        return start_agent(self.processes, name, self.folder / name).process.pid

    def run_job(self, sites: int, elements: int, versions: int, seconds: float) -> str:
        """Submit a job of stub updates and wait until it has finished.

        Raises:
            JobFailedError: it ended otherwise, or took longer than `seconds`.
        """
        task = {"name": "stub", "sha256": hash_task(str(self.folder / "stub_task.py"))}
        spec = jobfile.from_mapping(
            {
                "name": f"{sites}x{elements}",
                "task": {**task, "options": {"elements": elements}},
                "sites": {"wanted": sites},
                "period": {"steps": 1},
                "stop": {"versions": versions},
                "evaluation": {"every": 0, "sites": False},
            }
        )
        view = self.api.submit(JobRequest(spec=spec)).job
        end = monotonic() + seconds
        while view.state != "finished":
            if view.state in TERMINAL or monotonic() > end:
                raise JobFailedError(
                    f"{spec.name} is {view.state}: {view.reason or view.waiting}",
                    f"logs: {self.folder / 'logs'}",
                )
            # Seldom, and not at every change: whoever watches costs what is measured.
            sleep(_LOOK_SECONDS)
            view = self.api.job(view.id).job
        return view.id


@contextmanager
def place() -> Iterator[Place]:
    """A coordinator in a temporary folder; all processes end with the block."""
    with (
        tempfile.TemporaryDirectory(prefix="skerry-bench-") as name,
        Processes(Path(name) / "logs") as processes,
    ):
        folder = Path(name)
        (folder / "stub_task.py").write_text("class Stub:\n    pass\n", encoding="utf-8")
        addresses = start_coordinator(processes, folder / "coordinator")
        token = (folder / "coordinator" / "admin-token").read_text(encoding="utf-8").strip()
        yield Place(folder, addresses, processes, Api(addresses.people, token))

"""A coordinator and sites as real processes, for tests.

Most tests use the stub worker, which pretends to train but moves real updates; what it sends is a
function of seed, site and clock, so two runs with the same sites must end in the same bits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Self

import msgspec

from client.join import join_site
from client.taskref import hash_task
from protocol import jobfile
from protocol.jobspec import JobSpec
from protocol.jobstates import TERMINAL
from protocol.messages import SiteRole
from protocol.views import JobRequest, JobView, TokenRequest, VersionView
from skerry.api import Api
from skerry.processes import Addresses, Child, Processes, start_agent, start_coordinator

STUB = (sys.executable, "-m", "client.stub")


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, Mapping) else value
    return merged


class Place:
    """One coordinator and its sites. Use as a context manager; nothing outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "coordinator"
        self.task = folder / "stub_task.py"
        self.task.write_text("class Stub:\n    pass\n", encoding="utf-8")
        self.processes = Processes(folder / "logs")
        self.addresses: Addresses | None = None
        self.coordinator: Child | None = None
        self.agents: dict[str, Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.processes.stop()

    # ------------------------------------------------------------ the coordinator
    def start(self, crash_at: str = "", flags: Mapping[str, str] | None = None) -> Addresses:
        """Start, or start again at the same addresses; `crash_at` names a crash point."""
        given = dict(flags or {})
        if self.addresses:
            given |= {
                "listen-agents": self.addresses.agents.removeprefix("http://"),
                "listen-people": self.addresses.people.removeprefix("http://"),
            }
        old = os.environ.pop("SKERRY_CRASH_AT", None)
        env = {"SKERRY_CRASH_AT": crash_at} if crash_at else {}
        self.addresses = start_coordinator(self.processes, self.data, given, env=env)
        if old is not None:
            os.environ["SKERRY_CRASH_AT"] = old
        self.coordinator = self.processes.children[-1]
        return self.addresses

    def kill(self) -> None:
        """`kill -9` the coordinator, and wait until it is gone."""
        assert self.coordinator
        self.coordinator.process.kill()
        self.coordinator.process.wait(10)

    def crashed(self, seconds: float = 30.0) -> None:
        """Wait until the coordinator has died by SIGKILL at its crash point."""
        assert self.coordinator
        assert self.coordinator.process.wait(seconds) == -signal.SIGKILL

    @property
    def api(self) -> Api:
        assert self.addresses
        token = (self.data / "admin-token").read_text(encoding="utf-8").strip()
        return Api(self.addresses.people, token, timeout=5)

    # ------------------------------------------------------------ sites
    def site_folder(self, name: str) -> Path:
        return self.folder / "sites" / name

    def join(self, name: str, role: SiteRole = "site", url: str = "", **options: object) -> Path:
        """Enrol a site that runs the stub worker with these options."""
        assert self.addresses
        token = self.api.create_token(TokenRequest(site=name, role=role)).token
        folder = self.site_folder(name)
        asyncio.run(
            join_site(
                token=token,
                url=url or self.addresses.agents,
                name=name,
                role=role,
                folder=folder,
                insecure=False,
            )
        )
        self.configure(name, **options)
        return folder

    def configure(self, name: str, url: str = "", **options: object) -> None:
        """Write the site's settings."""
        lines = [f"worker_command = {msgspec.json.encode(STUB).decode()}"]
        if url:
            lines.append(f'url = "{url}"')
        lines += ["[tasks.stub]", f'reference = "{self.task}"', "[tasks.stub.options]"]
        lines += [f'{key} = "{value}"' for key, value in options.items()]
        text = "\n".join(lines) + "\n"
        tomllib.loads(text)
        (self.site_folder(name) / "agent.toml").write_text(text, encoding="utf-8")

    def agent(self, name: str) -> Child:
        """Start the agent of a site that has joined."""
        self.agents[name] = start_agent(self.processes, name, self.site_folder(name))
        return self.agents[name]

    def sites(self, *names: str, **options: object) -> None:
        """Join and start several sites."""
        for name in names:
            self.join(name, **options)
            self.agent(name)

    # ------------------------------------------------------------ jobs
    def spec(self, wanted: int = 2, versions: int = 3, **over: Any) -> JobSpec:
        base = {
            "name": "stub",
            "seed": 7,
            "task": {"name": "stub", "sha256": hash_task(str(self.task)), "options": {}},
            "sites": {"wanted": wanted},
            "period": {"steps": 1},
            "stop": {"versions": versions},
            "evaluation": {"every": 0, "sites": False},
            "checkpoint": {"every": 2},
        }
        return jobfile.from_mapping(deep_merge(base, over))

    def submit(self, wanted: int = 2, versions: int = 3, **over: Any) -> str:
        spec = self.spec(wanted, versions, **over)
        return self.api.submit(JobRequest(spec=spec)).job.id

    def wait(self, job: str, until: Callable[[JobView], bool], seconds: float = 40.0) -> JobView:
        """Follow the job's journal until `until` holds; fails with its last view."""
        end = monotonic() + seconds
        seq = 0
        view = self.api.job(job).job
        while not until(view):
            for last in self.api.changes(job, seq):
                seq = last
                view = self.api.job(job).job
                if until(view):
                    return view
                assert monotonic() < end, f"timed out: {view}"
            assert monotonic() < end, f"timed out: {view}"
            view = self.api.job(job).job
        return view

    def finished(self, job: str, seconds: float = 40.0) -> JobView:
        view = self.wait(job, lambda v: v.state in TERMINAL, seconds)
        assert view.state == "finished", view
        return view

    def versions(self, job: str) -> tuple[VersionView, ...]:
        return self.api.versions(job)

    def digests(self, job: str) -> list[str]:
        return [version.digest for version in self.versions(job)]

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text(encoding="utf-8")

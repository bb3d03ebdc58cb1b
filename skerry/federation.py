"""A whole federation on one machine: a coordinator, and sites that really join it with tokens.

Used by the demo, by `skerry dev` and by end-to-end tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from client.join import join_site
from protocol.jobspec import JobSpec
from protocol.messages import SiteRole
from protocol.names import file_id
from protocol.views import TokenRequest
from skerry.api import Api
from skerry.processes import Addresses, Child, Processes, start_agent, start_coordinator

ROOT: Final = Path(__file__).resolve().parent.parent
EXAMPLES: Final = ROOT / "examples"


class SitePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A site to be: its name and the one task that it allows."""

    name: str
    task: str
    reference: str
    options: dict[str, str] = {}
    data: str = ""
    role: SiteRole = "site"


class Federation(msgspec.Struct, frozen=True, kw_only=True):
    """A running federation."""

    folder: Path
    addresses: Addresses
    api: Api
    agents: tuple[Child, ...]


def start(
    processes: Processes, folder: Path, plans: Sequence[SitePlan], *, threads: int = 1
) -> Federation:
    """Start a coordinator in `folder`/coordinator and an agent for every plan beside it."""
    data_dir = folder / "coordinator"
    addresses = start_coordinator(processes, data_dir)
    api = connect(addresses, data_dir)
    folders = asyncio.run(_join_all(api, folder, plans))
    agents = []
    for plan, site in zip(plans, folders, strict=True):
        (site / "agent.toml").write_text(agent_toml(plan, threads), encoding="utf-8")
        agents.append(start_agent(processes, plan.name, site))
    return Federation(folder=folder, addresses=addresses, api=api, agents=tuple(agents))


def for_sites(spec: JobSpec, count: int) -> JobSpec:
    """The job as it runs with the `count` sites that are here, however many its file asks for."""
    replace = msgspec.structs.replace
    return replace(
        spec,
        sites=replace(spec.sites, wanted=count, names=(), select=min(spec.sites.select, count)),
        pacing=replace(spec.pacing, quorum=min(spec.pacing.quorum, count)),
    )


def connect(addresses: Addresses, data_dir: Path) -> Api:
    """The API with the admin token that the coordinator wrote at its first start."""
    token = (data_dir / "admin-token").read_text(encoding="utf-8").strip()
    return Api(addresses.people, token)


def agent_toml(plan: SitePlan, threads: int) -> str:
    """The settings file of a site: an allow-list with one task."""
    lines = [
        f"threads = {threads}",
        "",
        f"[tasks.{quoted(plan.task)}]",
        f"reference = {quoted(plan.reference)}",
    ]
    if plan.data:
        lines.append(f"data = {quoted(plan.data)}")
    if plan.options:
        pairs = (f"{quoted(key)} = {quoted(text)}" for key, text in plan.options.items())
        lines.append(f"options = {{ {', '.join(pairs)} }}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


async def _join_all(api: Api, folder: Path, plans: Sequence[SitePlan]) -> list[Path]:
    folders = [folder / "sites" / file_id(plan.name) for plan in plans]
    for plan, site in zip(plans, folders, strict=True):
        made = await asyncio.to_thread(
            api.create_token, TokenRequest(site=plan.name, role=plan.role)
        )
        await join_site(token=made.token, url="", name=plan.name, role=plan.role, folder=site)
    return folders

"""`skerry coordinator`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from coordinator.server import serve
from coordinator.settings import CoordinatorSettings
from skerry.cli import flags
from skerry.cli.output import emit, json_flag, note
from skerry.processes import Addresses
from webui.pages import mount


@click.command()
@json_flag
@flags.flags_of(CoordinatorSettings, "coordinator")
def coordinator(as_json: bool, **given: Any) -> int:
    """Run a coordinator until Ctrl-C or SIGTERM.

    \b
    Examples:
      skerry coordinator
      skerry coordinator --listen-agents 0.0.0.0:8470 --advertise fl.example.org
    """
    settings = flags.load(CoordinatorSettings, "coordinator", given).values

    def ready(agents_url: str, people_url: str) -> None:
        if as_json:
            emit(Addresses(agents=agents_url, people=people_url))
        else:
            note(f"agents connect to {agents_url}")
            note(f"page and API are at {people_url}")

    return asyncio.run(serve(settings, ready, mount=mount)) or 0

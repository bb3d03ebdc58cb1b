"""`skerry agent`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from client.agent import run_agent
from client.agentsettings import AgentSettings
from skerry.cli import flags


@click.command()
@flags.flags_of(AgentSettings, "agent")
def agent(**given: Any) -> int:
    """Run this site's agent until Ctrl-C or SIGTERM.

    It runs only what the owner allows in its settings file:

    \b
      [tasks.digits]
      reference = "examples/digits/task.py:Digits"
      options = { part = "0", parts = "4" }
    """
    return asyncio.run(run_agent(flags.load(AgentSettings, "agent", given).values))

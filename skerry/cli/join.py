"""`skerry join`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from client.agentsettings import AgentSettings
from client.join import join_site
from protocol.messages import SiteRole
from protocol.names import clean_name
from skerry.cli.output import note


@click.command()
@click.argument("token")
@click.option("--name", required=True, help="Name of this site, in any language.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=AgentSettings().folder,
    show_default=True,
    help="The site's folder: identity, state, log of what was sent.",
)
@click.option("--url", default="", help="Address of the coordinator, if not that of the token.")
@click.option("--evaluator", is_flag=True, help="This site evaluates and never trains.")
@click.option("--insecure", is_flag=True, help="Allow plain http:// beyond this machine.")
def join(token: str, name: str, folder: Path, url: str, evaluator: bool, insecure: bool) -> None:
    """Enrol this site: TOKEN is good once, and comes from `skerry token create`.

    \b
    Examples:
      skerry join skj1.eyJ... --name edge-1
      skerry join "$(cat token)" --name Klinik-Zürich --folder /var/lib/skerry-site
    """
    role: SiteRole = "evaluator" if evaluator else "site"
    identity = asyncio.run(
        join_site(
            token=token.strip(),
            url=url,
            name=clean_name(name, "site name"),
            role=role,
            folder=folder,
            insecure=insecure,
        )
    )
    note(f"{identity.name} has joined; its identity is in {folder}")
    note(f"allow a task in its settings, then: skerry agent --folder {folder}")

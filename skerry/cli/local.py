"""`skerry config show`, `skerry doctor`, `skerry version`."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from client.agentsettings import AgentSettings
from coordinator.settings import CoordinatorSettings
from protocol.version import PROTOCOL, SOFTWARE
from skerry import doctor as checks
from skerry import settings
from skerry.cli import access
from skerry.cli.output import coloured, emit, json_flag, note, table

ROLES: Final[dict[str, type[msgspec.Struct]]] = {
    "coordinator": CoordinatorSettings,
    "agent": AgentSettings,
    "person": access.PersonSettings,
}


@click.group()
def config() -> None:
    """Show settings: defaults < file < SKERRY_* variables < flags."""


@config.command("show")
@click.argument("role", type=click.Choice(list(ROLES)), required=False)
@click.option("--config", metavar="FILE", help="Settings file of ROLE.")
@json_flag
def show(role: str | None, config: str | None, as_json: bool) -> None:
    """Print all settings and where they came from.

    With ROLE only those of one role.

    \b
    Examples:
      skerry config show coordinator
      SKERRY_LEASE_SECONDS=30 skerry config show coordinator --json
    """
    env = settings.environment()
    found = {}
    for name in [role] if role else ROLES:
        file = Path(config) if config else settings.find_file(name, env)
        found[name] = list(settings.load(ROLES[name], file=file, env=env).rows())
    for name in settings.unknown_variables(env, list(ROLES.values())):
        note(f"warning: {name} is no setting")
    if as_json:
        emit(
            {
                name: {key: {"value": value, "origin": origin} for key, value, origin in rows}
                for name, rows in found.items()
            }
        )
        return
    for name, rows in found.items():
        click.echo(table((name, "value", "from"), [(k, _text(v), o) for k, v, o in rows]))
        click.echo()


@click.command()
@json_flag
@access.options
def doctor(as_json: bool, **given: Any) -> int:
    """Look for what is wrong: packages, disk, ports, coordinator, clock, certificate, tasks, page.

    Exit code 0 when nothing failed, else that of the first failure.
    """
    env = settings.environment()
    person = access.load_person(dict(given)).values
    found = list(
        checks.examine(
            access.connect(given),
            settings.load(
                CoordinatorSettings, file=settings.find_file("coordinator", env), env=env
            ).values,
            settings.load(AgentSettings, file=settings.find_file("agent", env), env=env).values,
            unknown=settings.unknown_variables(env, list(ROLES.values())),
            asked=bool(person.coordinator),
        )
    )
    if as_json:
        emit({"findings": found})
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for one in found:
            mark = f"{one.status:<4}"
            if coloured(sys.stdout):
                mark = click.style(mark, fg=colours[one.status])
            click.echo(f"{mark}  {one.check}: {one.text}")
            if one.hint and one.status != "ok":
                click.echo(f"      {one.hint}")
    return next((one.code for one in found if one.status == "fail"), 0)


@click.command()
@json_flag
def version(as_json: bool) -> None:
    """Print the versions of Skerry, its protocol, Python and torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    found = {
        "skerry": SOFTWARE,
        "protocol": PROTOCOL,
        "python": platform.python_version(),
        "torch": torch,
        "platform": platform.platform(),
    }
    if as_json:
        emit(found)
    else:
        click.echo("\n".join(f"{name} {value or 'not installed'}" for name, value in found.items()))


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "(none)"
    if isinstance(value, dict):
        return "(none)" if not value else str(value)
    if isinstance(value, bool):  # as files and variables write it
        return str(value).lower()
    return "(empty)" if value in {"", None} else str(value)

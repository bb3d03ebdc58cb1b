"""`skerry site ...` and `skerry token ...`."""

from __future__ import annotations

import time
from typing import Any

import click

from protocol import limits
from protocol.errors import UsageError
from protocol.messages import SiteRole
from protocol.names import clean_name
from protocol.views import TokenRequest, TokenView
from protocol.words import size, span
from skerry.cli import access
from skerry.cli.output import confirm, emit, json_flag, note, table

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@click.group()
def site() -> None:
    """List, drain and revoke sites."""


@site.command("list")
@json_flag
@access.options
def list_sites(as_json: bool, **given: Any) -> None:
    """List all sites with what they do."""
    found = access.connect(given).sites()
    if as_json:
        emit(found)
        return
    if not found.sites:
        note("no sites yet; `skerry token create` makes a token for one to join with")
        return
    rows = [
        (
            one.name,
            one.role,
            one.state,
            "-" if one.last_heard_seconds is None else f"{span(one.last_heard_seconds)} ago",
            one.job or "-",
            size(one.bytes_up),
            size(one.bytes_down),
            one.software,
            ", ".join(one.tasks),
        )
        for one in found.sites
    ]
    heads = ("site", "role", "state", "last heard", "job", "up", "down", "software", "tasks")
    click.echo(table(heads, rows, (5, 6)))


@site.command()
@click.argument("name")
@click.option("--reason", default="", help="Why; it stands in the history.")
@access.options
def drain(name: str, reason: str, **given: Any) -> None:
    """Give the site no more work after its open period."""
    access.connect(given).site_command(clean_name(name, "site name"), "drain", reason)
    note(f"site {name} is being drained")


@site.command()
@click.argument("name")
@click.option("--reason", default="", help="Why; it stands in the history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@access.options
def revoke(name: str, reason: str, yes: bool, **given: Any) -> None:
    """Lock the site out for good; it must join again under a new token."""
    if not yes:
        confirm(f"Revoke site {name}? Its agent will stop for good.")
    access.connect(given).site_command(clean_name(name, "site name"), "revoke", reason)
    note(f"site {name} is revoked")


@click.group()
def token() -> None:
    """Create, list and revoke join tokens."""


@token.command()
@click.option("--site", "site_name", default="", help="The only name it is good for.")
@click.option("--evaluator", is_flag=True, help="For a site that evaluates and never trains.")
@click.option("--ttl", default="1h", show_default=True, help="How long it is good: 30m, 2h, 1d.")
@json_flag
@access.options
def create(site_name: str, evaluator: bool, ttl: str, as_json: bool, **given: Any) -> None:
    """Make a join token: good once, for one site. It is shown only now.

    \b
    Examples:
      skerry token create --site edge-1
      skerry join "$(skerry token create)" --name edge-1
    """
    role: SiteRole = "evaluator" if evaluator else "site"
    name = clean_name(site_name, "site name") if site_name else ""
    made = access.connect(given).create_token(
        TokenRequest(site=name, role=role, ttl_seconds=seconds(ttl))
    )
    if as_json:
        emit(made)
        return
    note(f"good once, until {_clock(made.view.expires_at)}, for {made.view.site or 'any name'}")
    click.echo(made.token)


@token.command("list")
@json_flag
@access.options
def list_tokens(as_json: bool, **given: Any) -> None:
    """List join tokens, without their secrets."""
    found = access.connect(given).tokens()
    if as_json:
        emit(found)
        return
    rows = [
        (one.id, one.site or "any", one.role, _clock(one.expires_at), _state(one, time.time()))
        for one in found.tokens
    ]
    click.echo(table(("id", "for", "role", "good until", "state"), rows))


@token.command("revoke")
@click.argument("token_id")
@access.options
def revoke_token(token_id: str, **given: Any) -> None:
    """Make a token worthless. A site that has joined with it stays: see `skerry site revoke`."""
    access.connect(given).revoke_token(token_id)
    note(f"token {token_id} is revoked")


def seconds(text: str) -> float:
    """A span such as 90, 90s, 30m, 2h or 1d in seconds.

    Raises:
        UsageError: not of that form, or longer than a token may live.
    """
    digits, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS else (text, "s")
    if not digits.isascii() or not digits.isdigit():
        raise UsageError(f"{text!r} is not a time span.", "Write 30m, 2h or 1d.")
    found = int(digits) * _UNITS[unit]
    if not 0 < found <= limits.TOKEN_TTL_SECONDS_MAX:
        raise UsageError(
            f"a token may live for 1 s to {span(limits.TOKEN_TTL_SECONDS_MAX)}, not {text!r}."
        )
    return found


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _state(one: TokenView, now: float) -> str:
    if one.revoked:
        return "revoked"
    if one.used_at is not None:
        return f"used by {one.used_by}"
    return "expired" if one.expires_at < now else "good"

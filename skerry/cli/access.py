"""Which coordinator the command line talks to, and with which token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import msgspec
from msgspec import Meta

from coordinator.settings import CoordinatorSettings
from protocol.errors import UsageError
from skerry import settings
from skerry.api import Api
from skerry.processes import read_addresses

F = TypeVar("F", bound=Callable[..., Any])


class PersonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of somebody who uses a coordinator."""

    coordinator: Annotated[
        str,
        Meta(
            description="Address of the people listener. Empty: the coordinator of `data_dir`, "
            "or http://127.0.0.1:8471."
        ),
    ] = ""
    token: Annotated[
        str, Meta(description="API token. Empty: the admin token in `data_dir`, if it is there.")
    ] = ""
    ca_bundle: Annotated[
        str, Meta(description="CA certificates (PEM) to trust. Empty: those of the system.")
    ] = ""
    data_dir: Annotated[str, Meta(description="Data folder of a coordinator on this machine.")] = (
        CoordinatorSettings().data_dir
    )
    timeout_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="Longest wait for an answer.")
    ] = 30.0


def options(command: F) -> F:
    """Add --coordinator, --token-file, --ca-bundle, --data-dir and --config to a verb."""
    for flag, text in (
        ("--config", "Settings file (default: ~/.config/skerry/person.toml)."),
        ("--data-dir", "Data folder of a coordinator on this machine."),
        ("--ca-bundle", "CA certificates (PEM) to trust."),
        ("--token-file", "File with an API token (or SKERRY_TOKEN)."),
        ("--coordinator", "Address of the coordinator (or SKERRY_COORDINATOR)."),
    ):
        command = click.option(flag, metavar=flag[2:].rsplit("-", 1)[-1].upper(), help=text)(
            command
        )
    return command


def load_person(given: dict[str, Any]) -> settings.Loaded[PersonSettings]:
    """Settings from file, variables and the flags of `options`, which are taken out of `given`."""
    config, token_file = given.pop("config", None), given.pop("token_file", None)
    flags = {name: given.pop(name, None) for name in ("coordinator", "ca_bundle", "data_dir")}
    if token_file:
        flags["token"] = _read_token(Path(token_file))
    env = settings.environment()
    file = Path(config) if config else settings.find_file("person", env)
    return settings.load(PersonSettings, file=file, env=env, flags=flags)


def connect(given: dict[str, Any]) -> Api:
    """The API client that the flags, variables and files describe."""
    values = load_person(given).values
    folder = Path(values.data_dir)
    addresses = read_addresses(folder)
    url = values.coordinator or (addresses.people if addresses else "http://127.0.0.1:8471")
    token, ca_bundle = values.token, values.ca_bundle
    if addresses and url.rstrip("/") == addresses.people.rstrip("/"):
        # The coordinator's own folder is readable: its admin token and CA are at hand.
        token = token or _token_of(folder)
        own_ca = folder / "tls" / "ca.pem"
        ca_bundle = ca_bundle or (str(own_ca) if own_ca.is_file() else "")
    return Api(
        url,
        token,
        ca_bundle=Path(ca_bundle) if ca_bundle else None,
        timeout=values.timeout_seconds,
    )


def _token_of(folder: Path) -> str:
    file = folder / "admin-token"
    return _read_token(file) if file.is_file() else ""


def _read_token(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {file} cannot be read: {error}.") from None

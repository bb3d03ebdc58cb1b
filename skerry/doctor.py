"""Looks for what is wrong on this machine: each finding is ok, warn or fail, with what to do."""

from __future__ import annotations

import shutil
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from client.agentsettings import AgentSettings
from client.taskref import hash_task
from coordinator.settings import CoordinatorSettings, split_listen
from protocol.errors import SkerryError, UnreachableError
from protocol.version import PROTOCOL, SOFTWARE
from protocol.views import Info
from skerry.api import Api

Status = Literal["ok", "warn", "fail"]
DISK_WARN_BYTES: Final = 2 << 30
CLOCK_SKEW_WARN_SECONDS: Final = 5.0
CERTIFICATE_WARN_DAYS: Final = 14
_CONNECT_SECONDS: Final = 5.0
# Needed by everybody; what only one of the roles needs is looked for when that role starts.
_PACKAGES: Final = ("aiohttp", "click", "cryptography", "msgspec", "numpy", "safetensors", "torch")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `code` is the exit code that a failure leads to."""

    check: str
    status: Status
    text: str
    hint: str = ""
    code: int = 0


def examine(
    api: Api,
    coordinator: CoordinatorSettings,
    agent: AgentSettings,
    *,
    unknown: list[str],
    asked: bool,
) -> Iterator[Finding]:
    """All checks, one after the other.

    Args:
        unknown: `SKERRY_*` variables that no setting knows.
        asked: a coordinator was named, so that it must answer.
    """
    yield python(sys.version_info[:3])
    yield from packages()
    yield disk(Path(coordinator.data_dir))
    for name in unknown:
        yield Finding(
            check="settings",
            status="warn",
            text=f"{name} is no setting",
            hint="`skerry config show` lists all of them.",
        )
    yield from tasks(agent)
    found = reach(api, asked=asked)
    yield found
    if found.status == "ok":
        yield from answering(api)
    else:
        yield port("port for agents", coordinator.listen_agents)
        yield port("port for people", coordinator.listen_people)


def python(version: tuple[int, ...]) -> Finding:
    """Python 3.11 or newer."""
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding(check="python", status="fail", text=text, hint="Use 3.11 or newer.", code=2)
    return Finding(check="python", status="ok", text=text)


def packages(names: tuple[str, ...] = _PACKAGES) -> Iterator[Finding]:
    """Packages that are needed, with their versions; nothing is imported."""
    versions, missing = [], []
    for name in names:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding(
            check="packages",
            status="fail",
            text=f"not installed: {', '.join(missing)}",
            hint=f"pip install {' '.join(missing)}",
            code=2,
        )
    if versions:
        yield Finding(check="packages", status="ok", text=", ".join(versions))


def disk(folder: Path) -> Finding:
    """Free space where a coordinator or a site would write."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    text = f"{free / 1e9:.1f} GB free in {existing}"
    if free < DISK_WARN_BYTES:
        hint = "Models and uploads need room: point data_dir (or a site's folder) elsewhere."
        return Finding(check="disk", status="warn", text=text, hint=hint)
    return Finding(check="disk", status="ok", text=text)


def port(check: str, listen: str) -> Finding:
    """Whether a coordinator could listen there."""
    host, number = split_listen(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return Finding(
                check=check,
                status="warn",
                text=f"{listen} is taken ({error.strerror})",
                hint="Another program listens there; `skerry coordinator` needs another port.",
            )
    return Finding(check=check, status="ok", text=f"{listen} is free")


def tasks(agent: AgentSettings) -> Iterator[Finding]:
    """The allow-list: code is there, its hash is the pinned one, data is there."""
    if not agent.tasks:
        yield Finding(
            check="tasks",
            status="ok",
            text="no task is allowed on this machine",
            hint="A site runs only what [tasks.NAME] in its settings names.",
        )
    for name, task in agent.tasks.items():
        yield _task(name, task.reference, task.sha256, task.data, agent.base)


def _task(name: str, reference: str, sha256: str, data: str, base: Path | None) -> Finding:
    check = f"task {name}"
    try:
        found = hash_task(reference, base)
    except SkerryError as error:
        text, code = error.message, error.exit_code
        return Finding(check=check, status="fail", text=text, hint=error.hint, code=code)
    if sha256 and found != sha256:
        return Finding(
            check=check,
            status="fail",
            text=f"{reference} has the hash {found[:12]}..., pinned is {sha256[:12]}...",
            hint="Read what changed; then pin the new hash, or restore the old code.",
            code=4,
        )
    if data and not ((base or Path()) / data).exists():
        hint = "Correct `data` in the site's settings."
        return Finding(check=check, status="fail", text=f"no data at {data}", hint=hint, code=5)
    pinned = "pinned" if sha256 else "not pinned"
    return Finding(check=check, status="ok", text=f"{reference}, sha256 {found[:12]}... ({pinned})")


def reach(api: Api, *, asked: bool) -> Finding:
    """Whether a coordinator answers and can take work."""
    try:
        health = api.ready()
    except UnreachableError as error:
        status: Status = "fail" if asked else "warn"
        code = error.exit_code if asked else 0
        text = error.message
        return Finding(check="coordinator", status=status, text=text, hint=error.hint, code=code)
    if health.status != "ok":
        text = f"{api.url} is {health.status}: {'; '.join(health.reasons)}"
        hint = "Its log and /readyz say more."
        return Finding(check="coordinator", status="warn", text=text, hint=hint)
    return Finding(check="coordinator", status="ok", text=f"{api.url} answers and takes work")


def answering(api: Api) -> Iterator[Finding]:
    """What only a coordinator that answers can tell: versions, clock, certificate, page."""
    try:
        yield protocol(api.call(Info, "GET", "/api/v1/info"))
    except SkerryError as error:
        hint, code = error.hint, error.exit_code
        yield Finding(check="token", status="fail", text=error.message, hint=hint, code=code)
    with api.open("GET", "/") as answer:
        yield clock(answer.headers.get("Date", ""), time.time())
        good = answer.status == 200 and answer.headers.get_content_type() == "text/html"
        text = f"{api.url}/ {'is served' if good else 'is not a page'}"
        yield Finding(check="page", status="ok" if good else "warn", text=text)
    if api.url.startswith("https://"):
        yield certificate(api, time.time())


def protocol(info: Info) -> Finding:
    """Both sides' protocol numbers."""
    text = f"protocol {info.protocol} (Skerry {info.software}); here {PROTOCOL} ({SOFTWARE})"
    if info.protocol not in {PROTOCOL, PROTOCOL + 1}:
        hint = "Upgrade the older side."
        return Finding(check="protocol", status="fail", text=text, hint=hint, code=4)
    return Finding(check="protocol", status="ok", text=text)


def clock(date: str, now: float) -> Finding:
    """How far this clock and the coordinator's are apart, by the Date header (whole seconds)."""
    try:
        skew = now - parsedate_to_datetime(date).timestamp()
    except ValueError:
        text = "the answer had no date"
        return Finding(check="clock", status="warn", text=text)
    if abs(skew) > CLOCK_SKEW_WARN_SECONDS:
        return Finding(
            check="clock",
            status="warn",
            text=f"this clock is {skew:+.0f} s off the coordinator's",
            hint="Tokens and certificates have dates: set both by NTP.",
        )
    return Finding(check="clock", status="ok", text="the same as the coordinator's")


def certificate(api: Api, now: float) -> Finding:
    """Names and expiry of the coordinator's certificate, which has been verified."""
    parts = urlsplit(api.url)
    address = (parts.hostname or "", parts.port or 443)
    with (
        socket.create_connection(address, _CONNECT_SECONDS) as raw,
        api.tls.wrap_socket(raw, server_hostname=parts.hostname) as secured,
    ):
        shown = secured.getpeercert() or {}
    names = ", ".join(str(entry[1]) for entry in shown.get("subjectAltName", ()))
    days = (ssl.cert_time_to_seconds(str(shown["notAfter"])) - now) / 86_400
    text = f"good for {names}; {days:.0f} days left"
    if days < CERTIFICATE_WARN_DAYS:
        hint = "The coordinator renews its own certificates; renew yours."
        return Finding(check="certificate", status="warn", text=text, hint=hint)
    return Finding(check="certificate", status="ok", text=text)

"""The one table of routes: who may call what, on which listener, with how much.

The applications, the OpenAPI document and the test that walks every route with every role are all
made from it. A handler that is not in this table cannot be reached.
"""

# ruff: noqa: E501  one row per line reads as the table that it is

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec
from aiohttp import web

from coordinator import agents_api as agents
from coordinator import people_api as people
from coordinator.auth import Role
from coordinator.http import Call
from protocol import messages, views
from protocol.limits import JSON_BODY_BYTES_MAX, SMALL_BODY_BYTES_MAX

ListenerName = Literal["agents", "people"]
Handler = Callable[[Call], Awaitable[msgspec.Struct | web.StreamResponse | None]]

STREAM: Final = -1  # no cap here: bytes go to disk under the engine's own limits


class Route(NamedTuple):
    """One row. `cap` is the largest body in bytes (0: none is taken, STREAM: the engine decides).

    `takes` and `gives` are message types, or the media type of bytes; `session` asks for an open
    session beside the credential; `query` names query parameters.
    """

    listener: ListenerName
    method: str
    path: str
    role: Role
    handler: Handler
    summary: str
    cap: int = 0
    takes: Any = None
    gives: Any = None
    session: bool = False
    query: tuple[str, ...] = ()


SMALL: Final = SMALL_BODY_BYTES_MAX
STRANGER: Final = 16 << 10  # of whoever has no credential yet
LARGE: Final = JSON_BODY_BYTES_MAX
BODY: Final = "application/octet-stream"
_IDENTITY: Final = ("epoch", "clock", "attempt")


def _agents(
    method: str, path: str, role: Role, handler: Handler, summary: str, **rest: Any
) -> Route:
    return Route("agents", method, "/agent/v1" + path, role, handler, summary, **rest)


def _people(
    method: str, path: str, role: Role, handler: Handler, summary: str, **rest: Any
) -> Route:
    return Route("people", method, "/api/v1" + path, role, handler, summary, **rest)


def _plain(path: str, role: Role, handler: Handler, summary: str, **rest: Any) -> Route:
    return Route("people", "GET", path, role, handler, summary, **rest)


# fmt: off
TABLE: Final[tuple[Route, ...]] = (
    _agents("GET", "/ca", "none", agents.ca, "The CA certificate.", gives="application/x-pem-file"),
    _agents("POST", "/join", "none", agents.join, "Enrol a site with a one-time token.", cap=STRANGER, takes=messages.Join, gives=messages.Joined),
    _agents("POST", "/hello", "site", agents.hello, "Open a session.", cap=SMALL, takes=messages.Hello, gives=messages.Welcome),
    _agents("GET", "/next", "site", agents.poll, "Wait for instructions.", gives=messages.Instructions, session=True, query=("cursor",)),
    _agents("POST", "/events", "site", agents.events, "Report events.", cap=LARGE, takes=messages.Events, session=True),
    _agents("POST", "/jobs/{job}/updates", "site", agents.upload, "Send an update.", cap=STREAM, takes=BODY, gives=messages.Receipt, session=True, query=(*_IDENTITY, "offset")),
    _agents("GET", "/jobs/{job}/updates", "site", agents.upload_state, "Where an update stands.", gives=messages.Receipt, session=True, query=_IDENTITY),
    _agents("POST", "/jobs/{job}/init", "site", agents.init, "Send version 0.", cap=STREAM, takes=BODY, gives=messages.Receipt, session=True, query=("offset",)),
    _agents("GET", "/jobs/{job}/versions/{version}", "site", agents.version, "Fetch a version.", gives=BODY, session=True, query=("offset",)),
    _agents("POST", "/leave", "site", agents.leave, "Say goodbye.", cap=SMALL, takes=messages.Leave, session=True),

    _people("GET", "/jobs", "viewer", people.jobs, "All jobs.", gives=views.JobList),
    _people("POST", "/jobs", "operator", people.submit, "Submit a job.", cap=SMALL, takes=views.JobRequest, gives=views.JobDetail),
    _people("POST", "/jobs/validate", "viewer", people.validate, "What is wrong with a job.", cap=SMALL, takes=views.JobRequest, gives=views.Validation),
    _people("GET", "/jobs/{job}", "viewer", people.job, "One job.", gives=views.JobDetail),
    _people("DELETE", "/jobs/{job}", "admin", people.delete, "Delete an ended job and its files."),
    _people("POST", "/jobs/{job}/pause", "operator", people.command("pause"), "Open no more rounds.", cap=SMALL, takes=views.CommandRequest, gives=views.JobDetail),
    _people("POST", "/jobs/{job}/resume", "operator", people.command("resume"), "Go on.", cap=SMALL, takes=views.CommandRequest, gives=views.JobDetail),
    _people("POST", "/jobs/{job}/drain", "operator", people.command("drain"), "Finish after the open round.", cap=SMALL, takes=views.CommandRequest, gives=views.JobDetail),
    _people("POST", "/jobs/{job}/stop", "operator", people.command("stop"), "End now.", cap=SMALL, takes=views.CommandRequest, gives=views.JobDetail),
    _people("GET", "/jobs/{job}/versions", "viewer", people.versions, "Versions of a job.", gives=views.VersionList, query=("after",)),
    _people("GET", "/jobs/{job}/updates", "viewer", people.updates, "Settled updates.", gives=views.UpdateList, query=("after",)),
    _people("GET", "/jobs/{job}/journal", "viewer", people.journal, "Journal rows.", gives=views.JournalPage, query=("after",)),
    _people("GET", "/jobs/{job}/events", "viewer", people.job_events, "Journal rows of a job as they come.", gives="text/event-stream", query=("after",)),
    _people("GET", "/jobs/{job}/export", "operator", people.export, "A version as safetensors.", gives=BODY, query=("version",)),
    _people("POST", "/inits", "operator", people.store_init, "Store a model to begin with.", cap=STREAM, takes=BODY, gives=views.InitStored),
    _people("GET", "/events", "viewer", people.all_events, "Journal rows of all jobs as they come.", gives="text/event-stream", query=("after",)),
    _people("GET", "/sites", "viewer", people.sites, "All sites.", gives=views.SiteList),
    _people("POST", "/sites/{site}/drain", "operator", people.site_command("drain"), "Take a site out of all jobs.", cap=SMALL, takes=views.CommandRequest, gives=views.SiteView),
    _people("POST", "/sites/{site}/revoke", "admin", people.site_command("revoke"), "Remove a site for good.", cap=SMALL, takes=views.CommandRequest, gives=views.SiteView),
    _people("GET", "/tokens", "admin", people.tokens, "Join tokens.", gives=views.TokenList),
    _people("POST", "/tokens", "admin", people.create_token, "A new join token.", cap=SMALL, takes=views.TokenRequest, gives=views.TokenCreated),
    _people("DELETE", "/tokens/{token}", "admin", people.revoke_token, "Make a token useless."),
    _people("GET", "/info", "viewer", people.info, "The coordinator itself.", gives=views.Info),
    _people("GET", "/openapi.json", "none", people.openapi, "This document.", gives="application/json"),
    _plain("/healthz", "none", people.healthz, "Whether the process works.", gives=views.Health),
    _plain("/readyz", "none", people.readyz, "Whether it can take work.", gives=views.Health),
    _plain("/metrics", "viewer", people.prometheus, "Figures for Prometheus.", gives="text/plain"),
)
# fmt: on

"""The page's routes. They know nothing of the coordinator but its API, and ask it like any client.

`/` and `/static/...` are the same for everybody and hold nothing. `/page` asks the API's own
handlers with the credential of its caller: whoever may not read the API gets its refusal.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

import msgspec
from aiohttp import web

from protocol.views import JobList, SiteList
from webui.render import render_jobs, render_sites

_TYPES: Final = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def mount(app: web.Application) -> None:
    """Add the page to an application that already serves `/api/v1`."""
    app.router.add_get("/", _index)
    app.router.add_get("/page", _page)
    app.router.add_get("/static/{name}", _static)


async def _index(_: web.Request) -> web.Response:
    return _file("index.html")


async def _static(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in _TYPES:  # the table, not the file system, says what there is
        raise web.HTTPNotFound
    return _file(name)


async def _page(request: web.Request) -> web.StreamResponse:
    jobs = await _ask(request, "/api/v1/jobs")
    sites = await _ask(request, "/api/v1/sites")
    for answer in (jobs, sites):
        if answer.status != 200:
            return answer
    return _html(
        render_jobs(msgspec.json.decode(_body(jobs), type=JobList))
        + render_sites(msgspec.json.decode(_body(sites), type=SiteList))
    )


async def _ask(request: web.Request, path: str) -> web.StreamResponse:
    match = await request.app.router.resolve(request.clone(rel_url=path))
    return await match.handler(request)


def _body(answer: web.StreamResponse) -> bytes:
    assert isinstance(answer, web.Response)
    assert isinstance(answer.body, bytes)
    return answer.body


def _file(name: str) -> web.Response:
    body = files("webui").joinpath("static", name).read_bytes()
    return web.Response(
        body=body,
        content_type=_TYPES[name],
        charset="utf-8",
        headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"},
    )


def _html(text: str) -> web.Response:
    return web.Response(
        text=text,
        content_type="text/html",
        charset="utf-8",
        headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"},
    )

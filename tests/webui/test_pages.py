"""The page's routes, on an application with an API like the coordinator's."""

from __future__ import annotations

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from protocol.views import JobList, SiteList
from tests.webui.test_render import job
from webui.pages import mount


def make_app():
    async def jobs(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer good":
            return web.Response(status=401, text="no")
        return web.Response(body=msgspec.json.encode(JobList(jobs=(job(),))))

    async def sites(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(SiteList(sites=())))

    app = web.Application()
    app.router.add_get("/api/v1/jobs", jobs)
    app.router.add_get("/api/v1/sites", sites)
    mount(app)
    return app


async def test_the_frame_is_public_and_loads_nothing_from_elsewhere():
    async with TestClient(TestServer(make_app())) as client:
        answer = await client.get("/")
        text = await answer.text()
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http://" not in text
        assert "https://" not in text
        for name in ("page.js", "page.css"):
            assert f"/static/{name}" in text
            assert (await client.get(f"/static/{name}")).status == 200


async def test_the_content_needs_the_credential_that_the_api_needs():
    async with TestClient(TestServer(make_app())) as client:
        assert (await client.get("/page")).status == 401
        answer = await client.get("/page", headers={"Authorization": "Bearer good"})
        assert answer.status == 200
        assert answer.headers["Cache-Control"] == "no-store"
        assert "digits" in await answer.text()


async def test_no_path_leads_out_of_the_static_folder():
    async with TestClient(TestServer(make_app())) as client:
        for path in ("/static/..%2frender.py", "/static/__init__.py", "/static/"):
            assert (await client.get(path)).status == 404

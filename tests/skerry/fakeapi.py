"""A coordinator's people API that answers what a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec


class FakeApi:
    """`answers` maps "METHOD /path" to (status, value or bytes, headers); `seen` is what came."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, tuple[int, Any, dict[str, str]]] = {}
        self.seen: list[tuple[str, dict[str, str], bytes]] = []

    def answer(
        self, call: str, value: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.answers[call] = (status, value, headers or {})

    def bodies(self, call: str) -> list[Any]:
        return [msgspec.json.decode(raw) for name, _, raw in self.seen if name == call and raw]


@contextmanager
def fake_api() -> Iterator[FakeApi]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            call = f"{self.command} {self.path}"
            api.seen.append((call, dict(self.headers), self.rfile.read(length)))
            status, value, headers = api.answers.get(
                call, (404, {"error": "NotFoundError", "message": f"nothing at {call}."}, {})
            )
            raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
            self.send_response(status)
            for name, text in {"Content-Length": str(len(raw)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815  names of http.server

        def log_message(self, *_: Any) -> None:
            """Nothing: the test output stays clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api = FakeApi(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)

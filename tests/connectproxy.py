"""An HTTP proxy that only tunnels (CONNECT), as those at the edge of a hospital's network do."""

from __future__ import annotations

import base64
import select
import socket
import socketserver
import threading
from typing import Self

HEADER_BYTES_MAX = 8192
IDLE_SECONDS = 60.0


class ConnectProxy:
    """Runs in threads of its own. `tunnels` lists what was asked for, as host:port.

    With `credentials` ("user:password") whoever does not name them gets 407.
    """

    def __init__(self, credentials: str = "") -> None:
        self.tunnels: list[str] = []
        self.refused = 0
        self.bytes_up = 0
        self.first_bytes: list[bytes] = []  # of each tunnel: what an eavesdropper sees first
        self._expected = base64.b64encode(credentials.encode()).decode() if credentials else ""
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(IDLE_SECONDS)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEADER_BYTES_MAX:
            more = client.recv(4096)
            if not more:
                return
            head += more
        lines = head.split(b"\r\n")
        method, target, _ = lines[0].decode("ascii", "replace").split(" ")
        if self._expected and f"Proxy-Authorization: Basic {self._expected}".encode() not in lines:
            self.refused += 1
            client.sendall(
                b"HTTP/1.1 407 Proxy Authentication Required\r\n"
                b'Proxy-Authenticate: Basic realm="edge"\r\nContent-Length: 0\r\n\r\n'
            )
            return
        if method != "CONNECT":
            client.sendall(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")
            return
        self.tunnels.append(target)
        host, port = target.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=10) as server:
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self._pump(client, server)

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        first = True
        while True:
            ready, _, _ = select.select([client, server], [], [], IDLE_SECONDS)
            if not ready:
                return
            for source in ready:
                data = source.recv(64 << 10)
                if not data:
                    return
                if source is client:
                    self.bytes_up += len(data)
                    if first:
                        self.first_bytes.append(data[:3])
                        first = False
                (server if source is client else client).sendall(data)

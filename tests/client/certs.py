"""TLS for test servers: a CA and a server certificate made for the test."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from privacy.certificates import Pair, make_ca, make_server


def server_tls(folder: Path, ca: Pair, *hosts: str, days: float = 1.0) -> ssl.SSLContext:
    """A server context with a certificate of `ca` for `hosts`; negative days: expired."""
    now = time.time() if days > 0 else time.time() - 30 * 86400
    pair = make_server(ca, hosts=list(hosts), now=now, days=abs(days))
    certificate, key = folder / "server.pem", folder / "server.key"
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def new_ca(name: str = "test") -> Pair:
    """A CA that is valid now, and was a month ago."""
    return make_ca(name, now=time.time() - 60 * 86400)

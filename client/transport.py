"""HTTP to the coordinator: connections, credentials, and errors that say what to do.

Every wait has a deadline: connecting, each read, each answer; bodies have no total one, because a
slow link that moves bytes is a working link.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from protocol import limits, messages
from protocol.errors import (
    ErrorBody,
    LimitError,
    MalformedError,
    SkerryError,
    UnreachableError,
    UsageError,
    from_body,
)
from protocol.version import PROTOCOL, SOFTWARE

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
STALL_SECONDS: Final = 30.0
KEEP_ALIVE_SECONDS: Final = 60.0  # longer than a poll, so that idling is not interrupted to tidy up
_READ_BUFFER_BYTES: Final = 512 << 10
_HOSTNAME_MISMATCH: Final = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_EXPIRED: Final = (9, 10)  # not yet valid, has expired

T = TypeVar("T")


class NotACoordinatorError(UnreachableError):
    """Somebody answers at the address, but it is not a coordinator."""


class SilentError(UnreachableError):
    """Nothing came back in time, and nothing said that it would not."""


def check_url(url: str, *, insecure: bool) -> str:
    """The address in its canonical form.

    Raises:
        UsageError: not http(s), or plain http beyond this machine.
    """
    try:
        parsed = URL(url)
        host = parsed.host
    except ValueError:
        parsed, host = URL(), None
    if parsed.scheme not in ("http", "https") or not host:
        raise UsageError(f"{url!r} is not the address of a coordinator (https://host:port).")
    if parsed.scheme == "http" and not insecure and not _is_loopback(host):
        raise UsageError(
            f"{url} is plain http beyond this machine: everybody on the way could read and change "
            "what is sent.",
            "Use https://, or say --insecure on a network that you trust.",
        )
    return str(parsed.with_path(parsed.path.rstrip("/"))).rstrip("/")


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _environment_proxy(url: URL) -> str | None:
    """What HTTPS_PROXY, HTTP_PROXY and NO_PROXY (or the system's settings) say for this address."""
    if url.host is None or proxy_bypass(f"{url.host}:{url.port}"):
        return None
    return getproxies().get(url.scheme)


class Transport:
    """One agent's connections. `session` is sent along once it is known.

    Args:
        url: address of the coordinator, as from `check_url`.
        secret: the site's own; empty before it has joined.
        ca: certificates (PEM) that alone are trusted; None: those of the system.
        verify: False only to fetch a CA whose fingerprint is checked afterwards.
        proxy: address of an HTTP proxy; empty: what the environment says.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str = "",
        ca: Path | str | None = None,
        verify: bool = True,
        proxy: str = "",
    ) -> None:
        self.url = url
        self.session = ""
        self._secret = secret
        self._proxy = proxy or _environment_proxy(URL(url))
        self._ssl = _ssl_context(url, ca, verify=verify)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            limit=8,
            ssl=self._ssl,
            socket_factory=_keepalive_socket,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
        )
        self._http = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,  # it would look for a netrc file in a thread at every request
            raise_for_status=False,
            auto_decompress=False,
            read_bufsize=_READ_BUFFER_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def call(
        self,
        kind: type[T],
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str | int] | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> T:
        """A small request: `body` goes as JSON, the answer comes back as `kind`.

        Raises:
            UnreachableError: nobody answered within `seconds`, or not a coordinator.
            SkerryError: what the coordinator answered.
        """
        data = None if body is None else messages.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(seconds),
                self.request(method, path, params=params, data=data, headers=headers) as answer,
            ):
                raw = await read_capped(answer, limits.JSON_BODY_BYTES_MAX)
        except TimeoutError:
            raise SilentError(f"{self.url} did not answer within {seconds:.0f} s.") from None
        return self.decode(kind, raw)

    def decode(self, kind: type[T], raw: bytes) -> T:
        """An answer; one that is none tells that somebody else listens there."""
        if kind is type(None):
            return None
        try:
            return messages.decode(kind, raw)
        except MalformedError as error:
            raise self._stranger(f"its answer cannot be read: {error.message}") from None

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int] | None = None,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        sock_read: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose body or answer is streamed; an answer that is no success is raised.

        OSErrors of the caller's block count as the connection's: turn those of files into others.
        """
        assert self._http is not None, "the transport is not open"
        timeout = aiohttp.ClientTimeout(
            total=None, connect=None, sock_connect=CONNECT_SECONDS, sock_read=sock_read
        )
        try:
            async with self._http.request(
                method,
                URL(self.url + path, encoded=True).update_query(params or {}),
                data=data,
                headers=self._headers(headers or {}),
                timeout=timeout,
                proxy=self._proxy,
                allow_redirects=False,
            ) as answer:
                if answer.status >= 300:
                    raise await self._refusal(answer)
                yield answer
        except (aiohttp.ClientError, OSError, ssl.SSLError) as error:
            raise await self._explain(error) from None

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        headers = {"X-Skerry-Protocol": str(PROTOCOL), "User-Agent": f"skerry/{SOFTWARE}", **more}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        if self.session:
            headers["X-Skerry-Session"] = self.session
        return headers

    def _proxy_shown(self) -> str:
        """The proxy without its credentials."""
        return str(URL(self._proxy or "").with_user(None))

    # ------------------------------------------------------------ what went wrong

    async def _refusal(self, answer: aiohttp.ClientResponse) -> SkerryError:
        """The error in an answer, or what an answer that is not a coordinator's means."""
        raw = await read_capped(answer, limits.SMALL_BODY_BYTES_MAX)
        try:
            return from_body(messages.decode(ErrorBody, raw), answer.status)
        except MalformedError:
            pass
        if answer.status == 413:
            return LimitError(
                f"something between this site and {self.url} limits the size of bodies (HTTP 413).",
                "Raise the limit of that proxy (client_max_body_size and the like).",
            )
        if answer.status in (407, 502, 503, 504):
            return UnreachableError(
                f"a proxy in front of {self.url} answers HTTP {answer.status} {answer.reason}."
            )
        return self._stranger(f"it answers HTTP {answer.status} {answer.reason}")

    def _stranger(self, what: str) -> NotACoordinatorError:
        return NotACoordinatorError(
            f"{self.url} is not a Skerry coordinator: {what}.",
            "Check the address: agents connect to the coordinator's port for agents.",
        )

    async def _explain(self, error: Exception) -> SkerryError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return await self._certificate_trouble(error.certificate_error)
        if isinstance(error, aiohttp.ClientSSLError):
            return NotACoordinatorError(
                f"{self.url} does not speak TLS as expected: {error}.",
                "Is it the coordinator's port, and is it https:// there?",
            )
        if isinstance(error, aiohttp.ClientHttpProxyError):
            return UnreachableError(
                f"the proxy {self._proxy_shown()} does not let this site through to {self.url}: "
                f"it answers HTTP {error.status} {error.message}.",
                "Give it credentials in HTTPS_PROXY or the agent's proxy setting, as "
                "http://user:password@host:port."
                if error.status == 407
                else "Ask whoever runs it to allow CONNECT to this address, or name another.",
            )
        if isinstance(error, aiohttp.ClientProxyConnectionError):
            return UnreachableError(
                f"the proxy {self._proxy_shown()} in front of {self.url} cannot be reached.",
                "Check HTTPS_PROXY or the agent's proxy setting.",
            )
        if isinstance(error, aiohttp.ClientResponseError):
            return self._stranger(f"it does not speak HTTP ({error.message or 'no valid answer'})")
        if isinstance(error, TimeoutError):
            return UnreachableError(f"{self.url} stopped answering ({error or 'timeout'}).")
        cause = getattr(error, "os_error", error)
        number = getattr(cause, "errno", None) or 0
        # A failed look-up of a name has a negative number of its own, and its own text.
        text = os.strerror(number) if number > 0 else str(cause) or type(error).__name__
        return UnreachableError(f"{self.url} cannot be reached: {text}.")

    async def _certificate_trouble(self, error: Exception) -> UnreachableError:
        code = getattr(error, "verify_code", 0)
        text = getattr(error, "verify_message", str(error))
        host = URL(self.url).host or ""
        if code in _HOSTNAME_MISMATCH:
            names = await asyncio.to_thread(_presented_names, self._ssl, URL(self.url))
            presented = f"for {', '.join(names)}" if names else "for other names"
            return UnreachableError(
                f"the certificate of {self.url} is {presented}, not for {host}.",
                f"Use one of its names, or add {host} to the coordinator's `advertise` setting.",
            )
        if code in _EXPIRED:
            return UnreachableError(
                f"the certificate of {self.url} is not valid now: {text}.",
                "Renew it at the coordinator, and check the clocks of both machines.",
            )
        return UnreachableError(
            f"the certificate of {self.url} is not signed by the CA that this site trusts: {text}.",
            "If the coordinator was set up anew, join again with a new token.",
        )


async def read_capped(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body of an answer, if it is not longer than `most` bytes."""
    pieces = bytearray()
    async for piece in answer.content.iter_any():
        pieces += piece
        if len(pieces) > most:
            raise LimitError(f"an answer of more than {most} bytes was broken off.")
    return bytes(pieces)


def _ssl_context(url: str, ca: Path | str | None, *, verify: bool) -> ssl.SSLContext | bool:
    if not url.startswith("https:"):
        return True
    try:
        if isinstance(ca, str):
            context = ssl.create_default_context(cadata=ca)
        else:
            context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the certificates in {ca} cannot be loaded: {error}.") from None
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _presented_names(context: ssl.SSLContext | bool, url: URL) -> tuple[str, ...]:
    """Names in the certificate that the server shows, read by one more connection; best effort."""
    if not isinstance(context, ssl.SSLContext):
        return ()
    probe = ssl.create_default_context(cadata=_pem_of(context))
    probe.check_hostname = False
    try:
        with (
            socket.create_connection((url.host, url.port), timeout=CONNECT_SECONDS) as plain,
            probe.wrap_socket(plain, server_hostname=url.host) as secure,
        ):
            certificate = secure.getpeercert() or {}
    except (OSError, ValueError):
        return ()
    names = certificate.get("subjectAltName", ())
    return tuple(str(name[1]) for name in names)


def _pem_of(context: ssl.SSLContext) -> str:
    return "".join(ssl.DER_cert_to_PEM_cert(der) for der in context.get_ca_certs(binary_form=True))


def _keepalive_socket(
    address: tuple[Any, ...],
) -> socket.socket:
    """A socket on which a peer that vanished is noticed within about half a minute."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return made

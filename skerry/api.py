"""A client of the coordinator's API for people: small, synchronous, every call with a deadline."""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from protocol import limits
from protocol.errors import (
    ErrorBody,
    NotFoundError,
    SkerryError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
)
from protocol.errors import from_body as error_from_body
from protocol.jobstates import TERMINAL
from protocol.views import (
    CommandRequest,
    Health,
    Info,
    InitStored,
    JobDetail,
    JobList,
    JobRequest,
    JobView,
    JournalPage,
    SiteList,
    TokenCreated,
    TokenList,
    TokenRequest,
    UpdateList,
    UpdateView,
    Validation,
    VersionList,
    VersionView,
)

T = TypeVar("T")
TIMEOUT_SECONDS: Final = 30.0
_LINE_BYTES_MAX: Final = limits.JSON_BODY_BYTES_MAX
_CHUNK_BYTES: Final = 1 << 20


class Missing(NamedTuple):
    """Tensors that never left the sites; a long list of names is cut, `total` is not."""

    names: list[str]
    total: int


class Api:
    """One coordinator, as a person with a token sees it."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca_bundle: Path | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(
                f"{url!r} is not the address of a coordinator.",
                "Give it as --coordinator https://host:8471 or SKERRY_COORDINATOR.",
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.tls = _context(ca_bundle)
        self._token = token
        self._timeout = timeout
        handlers: list[urllib.request.BaseHandler] = []
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=self.tls))
        if _is_loopback(parts.hostname):  # a proxy cannot reach this machine's own loopback
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    # ------------------------------------------------------------ calls
    def open(
        self,
        method: str,
        path: str,
        body: bytes | IO[bytes] | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> HTTPResponse:
        """Send a request and return the open answer, which the caller closes.

        Raises:
            UnreachableError: no answer, or not from a coordinator.
            SkerryError: what the coordinator answered instead.
        """
        request = urllib.request.Request(self.url + path, data=body, method=method)  # noqa: S310
        request.add_header("Accept", "application/json")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if self._token:
            # Redirects to another host never get the token.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            answer = self._opener.open(request, timeout=timeout or self._timeout)
        except urllib.error.HTTPError as error:
            with closing(error):
                raise self._error_of(error) from None
        except (urllib.error.URLError, HTTPException, OSError) as error:
            raise self._unreachable(error) from None
        assert isinstance(answer, HTTPResponse)
        return answer

    def call(self, kind: type[T], method: str, path: str, message: Any = None) -> T:
        """Send `message` as JSON and decode the answer as `kind`."""
        body = None if message is None else msgspec.json.encode(message)
        with self.open(method, path, body) as answer:
            try:
                raw = answer.read(limits.JSON_BODY_BYTES_MAX)
                return msgspec.json.decode(raw or b"null", type=kind)
            except (OSError, HTTPException) as error:
                raise self._unreachable(error) from None
            except msgspec.MsgspecError as error:
                raise UnreachableError(
                    f"{self.url} answered {path} with something else: {str(error)[:200]}.",
                    "Is the address that of a coordinator's people listener?",
                ) from None

    def _error_of(self, error: urllib.error.HTTPError) -> SkerryError:
        try:
            body = msgspec.json.decode(error.read(limits.SMALL_BODY_BYTES_MAX), type=ErrorBody)
        except (msgspec.MsgspecError, OSError, HTTPException):
            server = error.headers.get("Server", "an unnamed server")
            return UnreachableError(
                f"what answers at {self.url} is no coordinator: HTTP {error.code} from {server}.",
                "Check the address (and a proxy in between).",
            )
        found = error_from_body(body, error.code)
        if isinstance(found, UnauthenticatedError) and not self._token:
            found.hint = "Give an API token with --token-file, SKERRY_TOKEN or SKERRY_TOKEN_FILE."
        return found

    def _unreachable(self, error: Exception) -> UnreachableError:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        hint = "Start one with `skerry coordinator`, or give its address with --coordinator."
        text = str(cause) or type(cause).__name__
        if isinstance(cause, ssl.SSLCertVerificationError):
            text = f"its certificate is not accepted: {cause.verify_message.rstrip('.')}"
            hint = (
                "Use one of its names, or add this one to the coordinator's `advertise` setting."
                if "mismatch" in cause.verify_message
                else "Give the coordinator's CA file with --ca-bundle or SKERRY_CA_BUNDLE."
            )
        elif isinstance(cause, (TimeoutError, socket.timeout)):
            text = f"no answer within {self._timeout:g} s"
        elif isinstance(cause, ConnectionRefusedError):
            text = "nothing listens there (connection refused)"
        elif isinstance(cause, RemoteDisconnected):
            text = "it hung up without an answer"
            hint = "If it speaks TLS, its address begins with https://."
        return UnreachableError(f"no coordinator at {self.url}: {text}.", hint)

    # ------------------------------------------------------------ jobs
    def jobs(self) -> tuple[JobView, ...]:
        """All jobs."""
        return self.call(JobList, "GET", "/api/v1/jobs").jobs

    def find_job(self, name: str) -> str:
        """The id of a job given by its id, its name, or the unique beginning of its id."""
        jobs = self.jobs()
        for matches in (
            [job.id for job in jobs if job.id == name],
            [job.id for job in jobs if job.name == name],
            [job.id for job in jobs if job.id.startswith(name)],
        ):
            if len(matches) == 1:
                return matches[0]
            if matches:
                raise UsageError(f"{name!r} may be any of {', '.join(matches)}.", "Give the id.")
        raise NotFoundError(f"there is no job {name!r} here.", "`skerry job list` names them all.")

    def job(self, job: str) -> JobDetail:
        """One job with its specification."""
        return self.call(JobDetail, "GET", f"/api/v1/jobs/{_segment(job)}")

    def submit(self, request: JobRequest) -> JobDetail:
        """Submit a job; it waits for its sites from now on."""
        return self.call(JobDetail, "POST", "/api/v1/jobs", request)

    def validate(self, request: JobRequest) -> Validation:
        """What the coordinator would say to this job."""
        return self.call(Validation, "POST", "/api/v1/jobs/validate", request)

    def store_init(self, file: Path) -> InitStored:
        """Upload a safetensors file as version 0 of a job to come."""
        with file.open("rb") as body:
            headers = {
                "Content-Length": str(file.stat().st_size),
                "Content-Type": "application/octet-stream",
            }
            with self.open("POST", "/api/v1/inits", body, headers=headers) as answer:
                return msgspec.json.decode(answer.read(1 << 16), type=InitStored)

    def command(self, job: str, what: str, reason: str) -> None:
        """Pause, resume, drain or stop a job."""
        path = f"/api/v1/jobs/{_segment(job)}/{what}"
        self.call(object, "POST", path, CommandRequest(reason=reason))

    def delete(self, job: str) -> None:
        """Delete a job that has ended, with everything stored about it."""
        self.call(object, "DELETE", f"/api/v1/jobs/{_segment(job)}")

    def versions(self, job: str, after: int = -1) -> tuple[VersionView, ...]:
        """Versions above `after`; -1: all of them."""
        query = "" if after < 0 else f"?after={after}"
        path = f"/api/v1/jobs/{_segment(job)}/versions{query}"
        return self.call(VersionList, "GET", path).versions

    def updates(self, job: str, after: int = 0) -> tuple[UpdateView, ...]:
        """Settled updates, in the order of their first verdict, from the `after`-th on."""
        path = f"/api/v1/jobs/{_segment(job)}/updates?after={after}"
        return self.call(UpdateList, "GET", path).updates

    def journal(self, job: str, after: int = 0) -> JournalPage:
        """A page of the job's journal above this row; an empty one at its end."""
        return self.call(JournalPage, "GET", f"/api/v1/jobs/{_segment(job)}/journal?after={after}")

    def export(self, job: str, target: Path, version: int | None = None) -> Missing:
        """Download a version as safetensors; returns the tensors that it cannot hold."""
        query = "" if version is None else f"?version={version}"
        with self.open("GET", f"/api/v1/jobs/{_segment(job)}/export{query}") as answer:
            named: list[str] = json.loads(answer.headers.get("X-Skerry-Missing") or "[]")
            total = int(answer.headers.get("X-Skerry-Missing-Count") or len(named))
            length = answer.headers.get("Content-Length")
            try:
                with target.open("wb") as file:
                    while piece := answer.read(_CHUNK_BYTES):
                        file.write(piece)
            except (HTTPException, ConnectionError, TimeoutError) as error:
                raise self._unreachable(error) from None
        if length is not None and target.stat().st_size != int(length):
            raise UnreachableError("the connection broke during the download.", "Try again.")
        return Missing(names=named, total=total)

    def changes(self, job: str, after: int = 0) -> Iterator[int]:
        """Yield the journal's last sequence number whenever it has grown, and at least once per
        `timeout` without news; the caller reads what it needs. Ends when the stream does.
        """
        path = f"/api/v1/jobs/{_segment(job)}/events?after={after}"
        with self.open("GET", path, headers={"Accept": "text/event-stream"}) as stream:
            last = after
            while True:
                try:
                    line = stream.readline(_LINE_BYTES_MAX)
                except TimeoutError:
                    yield last
                    return
                except (HTTPException, ConnectionError) as error:
                    raise self._unreachable(error) from None
                if not line:
                    return
                if line.startswith(b"id:"):
                    last = max(last, int(line[3:].strip() or 0))
                elif line in {b"\n", b"\r\n"} or line.startswith(b":"):
                    yield last

    # ------------------------------------------------------------ sites, tokens, the coordinator
    def sites(self) -> SiteList:
        """All sites."""
        return self.call(SiteList, "GET", "/api/v1/sites")

    def site_command(self, site: str, what: str, reason: str) -> None:
        """Drain or revoke a site."""
        path = f"/api/v1/sites/{_segment(site)}/{what}"
        self.call(object, "POST", path, CommandRequest(reason=reason))

    def tokens(self) -> TokenList:
        """Join tokens, without their secrets."""
        return self.call(TokenList, "GET", "/api/v1/tokens")

    def create_token(self, request: TokenRequest) -> TokenCreated:
        """A join token, good once."""
        return self.call(TokenCreated, "POST", "/api/v1/tokens", request)

    def revoke_token(self, token: str) -> None:
        """Make a join token worthless."""
        self.call(object, "DELETE", f"/api/v1/tokens/{_segment(token)}")

    def info(self) -> Info:
        """What this coordinator is."""
        return self.call(Info, "GET", "/api/v1/info")

    def ready(self) -> Health:
        """Whether it can take work; says why not."""
        request = urllib.request.Request(f"{self.url}/readyz")  # noqa: S310  scheme checked above
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return msgspec.json.decode(answer.read(1 << 16), type=Health)
        except urllib.error.HTTPError as error:
            with closing(error):
                return msgspec.json.decode(error.read(1 << 16), type=Health)
        except (urllib.error.URLError, HTTPException, OSError, msgspec.MsgspecError) as error:
            raise self._unreachable(error) from None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What `follow` saw: the job now, and versions that are complete (their metrics are in)."""

    job: JobView
    versions: tuple[VersionView, ...]


def follow(api: Api, job: str, after_version: int = -1) -> Iterator[Change]:
    """Yield changes of a job until it has ended; reconnects while the coordinator answers.

    A version is yielded once the next one exists or the job has ended: sites report their metrics
    of a version before they train on it.
    """
    seq = 0
    shown = after_version
    while True:
        for last in _once_and_then(api.changes(job, seq), seq):
            seq = last
            view = api.job(job).job
            # A job has ended when its end is stored, with the last metrics before it.
            ended = view.state in TERMINAL and view.ended_at is not None
            newest = view.version if ended else view.version - 1
            ready = _complete(api, job, shown, newest)
            if ready:
                shown = ready[-1].version
            yield Change(job=view, versions=ready)
            if ended:
                return


def _complete(api: Api, job: str, after: int, newest: int) -> tuple[VersionView, ...]:
    """Versions above `after` up to `newest`; the coordinator answers page by page."""
    found: list[VersionView] = []
    while after < newest:
        page = [one for one in api.versions(job, after) if after < one.version <= newest]
        if not page:
            break
        found += page
        after = page[-1].version
    return tuple(found)


def _once_and_then(changes: Iterator[int], first: int) -> Iterator[int]:
    yield first
    yield from changes


def _segment(name: str) -> str:
    return quote(name, safe="")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _context(ca_bundle: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_bundle) if ca_bundle else None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the CA bundle {ca_bundle} cannot be read: {error}.") from None

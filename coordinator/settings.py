"""Every setting of the coordinator: its type, bounds, default and sentence, here and nowhere else.

Loading (defaults < file < environment < flags) is generic and lives with the command line; it and
the reference page walk this class.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from protocol import limits
from protocol.errors import InvalidFileError, Problem

Bytes = Annotated[int, Meta(ge=1, le=1 << 60)]
Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


def _about(sentence: str) -> Meta:
    return Meta(description=sentence)


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one coordinator."""

    name: Annotated[str, _about("Name of this coordinator, shown to sites and people.")] = "skerry"
    data_dir: Annotated[
        str, _about("Folder for everything that is kept: journal, models, keys, tokens.")
    ] = "skerry-data"
    database_url: Annotated[
        str, _about("SQLAlchemy URL of the journal. Empty: a SQLite file in `data_dir`.")
    ] = ""
    rebuild_tables: Annotated[
        bool,
        _about(
            "Make all tables that people see anew from the journal at this start. They are "
            "written together with it, so this is only for a database that was repaired by hand."
        ),
    ] = False
    listen_agents: Annotated[
        str, _about("host:port where agents connect. Port 0 takes a free one.")
    ] = "127.0.0.1:8470"
    listen_people: Annotated[
        str, _about("host:port of API and page for people. Port 0 takes a free one.")
    ] = "127.0.0.1:8471"
    advertise: Annotated[
        tuple[str, ...],
        _about(
            "Host names and addresses by which others reach this coordinator; the first one "
            "stands in join tokens, all of them in the certificate."
        ),
    ] = ()

    tls_certificate: Annotated[
        str, _about("Certificate chain (PEM) of your own. Empty: one is made and renewed.")
    ] = ""
    tls_key: Annotated[str, _about("Private key (PEM) of `tls_certificate`.")] = ""
    tls_ca: Annotated[
        str, _about("CA certificate (PEM) that signed `tls_certificate`; agents pin it.")
    ] = ""
    insecure_plain_http: Annotated[
        bool,
        _about(
            "Serve plain HTTP beyond loopback. Everybody on the way can read and change "
            "models and take over sites; only for a private link or behind a TLS proxy."
        ),
    ] = False

    # A site that waits for its next instruction is counted as heard once a second (`beat`): with
    # less than that and some room, sites would lose their leases for nothing.
    lease_seconds: Annotated[
        float,
        Meta(
            ge=1.5,
            le=86_400.0,
            description="How long a site counts as there without a sign of life.",
        ),
    ] = limits.LEASE_SECONDS
    grace_seconds: Annotated[
        Seconds, _about("What is left of the lease when a site's connection closes.")
    ] = limits.CLOSED_CONNECTION_GRACE_SECONDS
    init_timeout_seconds: Annotated[
        Seconds, _about("How long a site may take to build version 0 before another is asked.")
    ] = 3600.0
    evaluation_timeout_seconds: Annotated[
        Seconds, _about("How long a report of an evaluation is waited for.")
    ] = 600.0
    long_poll_seconds: Annotated[
        float,
        Meta(gt=0.0, le=limits.LONG_POLL_SECONDS, description="How long an agent's poll waits."),
    ] = limits.LONG_POLL_SECONDS

    upload_bytes_max: Annotated[Bytes, _about("Largest single upload.")] = limits.UPLOAD_BYTES_MAX
    spool_bytes_max: Annotated[
        Bytes, _about("Room for all uploads that are not covered by a checkpoint yet.")
    ] = limits.SPOOL_BYTES_MAX
    jobs_resident_bytes_max: Annotated[
        Bytes, _about("Memory of the fold process for models; a job over it waits.")
    ] = limits.JOBS_RESIDENT_BYTES_MAX
    disk_reserve_bytes: Annotated[
        int, Meta(ge=0, le=1 << 60, description="Free disk space that is never used up.")
    ] = 256 << 20
    downloads_max: Annotated[
        Count, _about("Model downloads at the same time; the others wait their turn.")
    ] = 4
    uploads_max: Annotated[Count, _about("Uploads at the same time.")] = 256
    connections_max: Annotated[Count, _about("Open connections per listener.")] = 2048
    streams_max: Annotated[Count, _about("Open event streams of pages and watchers.")] = 256
    stream_event_bytes_max: Annotated[
        Bytes,
        _about(
            "Largest single event on an event stream; a larger one is announced by its number "
            "and fetched from the journal."
        ),
    ] = 256 << 10
    login_failures_max: Annotated[
        Count, _about("Wrong credentials per address and minute before it must wait.")
    ] = 30

    header_seconds: Annotated[Seconds, _about("Time to send a request's header.")] = 10.0
    body_idle_seconds: Annotated[
        Seconds, _about("Longest silence within a body, in either direction.")
    ] = 60.0
    keep_alive_seconds: Annotated[
        Seconds, _about("How long an idle connection is kept; agents reuse it for less.")
    ] = 75.0
    stop_seconds: Annotated[
        float, Meta(ge=0.1, le=5.0, description="Longest time that an orderly stop may take.")
    ] = 4.0

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _about("Least severity that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"], _about("auto: text on a terminal, JSON lines elsewhere.")
    ] = "auto"

    def problems(self) -> tuple[Problem, ...]:
        """Everything wrong with these values that their types cannot say."""
        found = [
            *_listen_problems("listen_agents", self.listen_agents),
            *_listen_problems("listen_people", self.listen_people),
        ]
        if not self.data_dir:
            found.append(Problem(key="data_dir", found="empty", allowed="a folder"))
        if bool(self.tls_certificate) != bool(self.tls_key):
            missing = "tls_key" if self.tls_certificate else "tls_certificate"
            found.append(
                Problem(key=missing, found="empty", allowed="both tls_certificate and tls_key")
            )
        if self.tls_ca and not self.tls_certificate:
            found.append(
                Problem(key="tls_ca", found=self.tls_ca, allowed="only with tls_certificate")
            )
        if self.grace_seconds > self.lease_seconds:
            found.append(
                Problem(
                    key="grace_seconds",
                    found=f"{self.grace_seconds:g}",
                    allowed=f"at most lease_seconds ({self.lease_seconds:g})",
                )
            )
        if self.upload_bytes_max > self.spool_bytes_max:
            found.append(
                Problem(
                    key="upload_bytes_max",
                    found=str(self.upload_bytes_max),
                    allowed=f"at most spool_bytes_max ({self.spool_bytes_max})",
                )
            )
        return tuple(found)

    def check(self) -> None:
        """Refuse settings that make no sense.

        Raises:
            InvalidFileError: naming every problem.
        """
        if found := self.problems():
            raise InvalidFileError("these settings cannot work together.", problems=found)


_HOST_CHARS_MAX: Final = 255


def split_listen(value: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as host and port.

    Raises:
        ValueError: not of that form.
    """
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(value)
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif ":" in host:
        raise ValueError(value)
    if not host or len(host) > _HOST_CHARS_MAX:
        raise ValueError(value)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen_problems(key: str, value: str) -> list[Problem]:
    try:
        split_listen(value)
    except ValueError:
        return [Problem(key=key, found=repr(value), allowed="host:port, for example 0.0.0.0:8470")]
    return []

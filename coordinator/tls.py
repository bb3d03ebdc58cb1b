"""TLS of the listeners: an own CA and certificate, kept and renewed, or the operator's files.

`privacy.certificates` makes and judges certificates as values; this module keeps them in files
(keys at 0600, folder at 0700) and in the live SSL context, which takes a renewed certificate
without a restart: connections that are open keep the old one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from coordinator.settings import CoordinatorSettings, is_loopback, split_listen
from privacy import certificates
from privacy.certificates import Pair
from protocol.errors import UsageError

log = logging.getLogger(__name__)

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared with, not listened on
_PEM_BYTES_MAX: Final = 1 << 20
# An address for documentation: nothing is sent there, the kernel only says which way it would go.
_ELSEWHERE: Final = ("192.0.2.1", 9)


class Source(Protocol):
    """Where certificate and key come from."""

    certificate: Path
    key: Path

    def refresh(self, now: float) -> bool:
        """Bring the files up to date; True when they changed. `now` in Unix seconds."""

    def ca(self) -> bytes:
        """PEM of the CA, empty when it is not known."""


class OwnFiles:
    """A CA of our own in `folder`, and a server certificate for `hosts` signed by it."""

    def __init__(self, folder: Path, name: str, hosts: Sequence[str]) -> None:
        self.certificate = folder / "server.pem"
        self.key = folder / "server-key.pem"
        self._ca = folder / "ca.pem"
        self._ca_key = folder / "ca-key.pem"
        self._folder = folder
        self._name = name
        self._hosts = tuple(hosts)

    def refresh(self, now: float) -> bool:
        """Make what is missing, renew what will expire or is for other names."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = self._authority(now)
        if self.certificate.exists() and self.key.exists():
            why = certificates.renewal(
                _read(self.certificate), ca=authority.certificate, hosts=self._hosts, now=now
            )
            if not why:
                _check_private(self.key)
                return False
            log.info("the server certificate is made again: %s", why)
        made = certificates.make_server(authority, hosts=self._hosts, now=now)
        _write(self.key, made.key, 0o600)
        _write(self.certificate, made.certificate, 0o644)
        return True

    def ca(self) -> bytes:
        """PEM of our CA."""
        return _read(self._ca)

    def _authority(self, now: float) -> Pair:
        if self._ca.exists() and self._ca_key.exists():
            _check_private(self._ca_key)
            authority = Pair(_read(self._ca), _read(self._ca_key))
            if certificates.describe(authority.certificate).not_after <= now:
                raise UsageError(
                    f"the CA in {self._ca} has expired.",
                    f"Remove {self._folder} to make a new one; every site has to join again.",
                )
            return authority
        authority = certificates.make_ca(self._name, now=now)
        _write(self._ca_key, authority.key, 0o600)
        _write(self._ca, authority.certificate, 0o644)
        return authority


class GivenFiles:
    """The operator's certificate and key; read again when they were replaced."""

    def __init__(self, certificate: Path, key: Path, ca: Path | None, hosts: Sequence[str]) -> None:
        self.certificate = certificate
        self.key = key
        self._ca = ca
        self._hosts = tuple(hosts)
        self._seen: tuple[tuple[int, int], ...] = ()

    def refresh(self, now: float) -> bool:
        """Check the files.

        Raises:
            UsageError: unreadable, readable by others, expired, or for other names.
        """
        state = tuple((_stat(p).st_mtime_ns, _stat(p).st_ino) for p in (self.certificate, self.key))
        if state == self._seen:
            return False
        _check_private(self.key)
        pem = _read(self.certificate)
        found = certificates.faults(pem, ca=None, hosts=self._hosts, now=now)
        if found:
            about = certificates.describe(pem)
            raise UsageError(
                f"{self.certificate} cannot serve here: {' '.join(found)}",
                f"It presents {', '.join(about.names) or 'no name'}; expected "
                f"{', '.join(self._hosts)}. Give another certificate, or change `advertise`.",
            )
        self._seen = state
        return True

    def ca(self) -> bytes:
        """PEM of the operator's CA, when it was named."""
        return _read(self._ca) if self._ca is not None else b""


class Tls:
    """The SSL context of all listeners of this coordinator."""

    def __init__(self, source: Source, now: float) -> None:
        self._source = source
        source.refresh(now)
        self.ca_pem = source.ca()
        self.fingerprint = certificates.fingerprint(self.ca_pem) if self.ca_pem else ""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._pem = b""
        self._load()
        log.info("TLS: %s", certificates.describe(self._pem))
        self.notes: tuple[str, ...] = ()  # what will go wrong soon, for people
        self._look_ahead(now)

    def refresh(self, now: float) -> bool:
        """Renew or read again; new connections get the new certificate. True when it changed.

        A replacement that cannot be used is logged and the present one stays.
        """
        try:
            changed = self._source.refresh(now)
            if changed:
                self._load()
                log.info("TLS now uses %s", certificates.describe(self._pem))
        except (UsageError, OSError) as error:
            log.warning("the certificate stays as it is: %s", error)
            changed = False
        self._look_ahead(now)
        return changed

    def _look_ahead(self, now: float) -> None:
        notes = []
        if when := certificates.expiring(self._pem, now=now):
            notes.append(
                f"the certificate {self._source.certificate} {when}: replace the file, it is read "
                "again within the hour."
            )
        if self.ca_pem and (when := certificates.expiring(self.ca_pem, now=now)):
            notes.append(f"the CA that sites pin {when}: with another one every site joins again.")
        for note in notes:
            if note not in self.notes:
                log.warning("%s", note)
        self.notes = tuple(notes)

    def _load(self) -> None:
        certificate, key = self._source.certificate, self._source.key
        try:
            self.context.load_cert_chain(certificate, key, password=_no_password)
            self._pem = _read(certificate)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"{certificate} and {key} do not go together or are no PEM files: {error}.",
                "The key must be the one that the certificate was made for, without a password.",
            ) from None


def prepare(settings: CoordinatorSettings, now: float) -> Tls | None:
    """TLS for the listeners that need it; None when every one of them is loopback or forced plain.

    Raises:
        UsageError: the operator's certificate does not fit.
    """
    needing = [host for host in listen_hosts(settings) if not is_loopback(host)]
    if not needing:
        return None
    if settings.insecure_plain_http:
        log.critical(
            "PLAIN HTTP on %s (insecure_plain_http): whoever is on the way can read and change "
            "models and take over sites.",
            ", ".join(needing),
        )
        return None
    hosts = certificate_hosts(settings)
    if settings.tls_certificate:
        ca = Path(settings.tls_ca) if settings.tls_ca else None
        expected = settings.advertise or [host for host in hosts if not is_loopback(host)]
        given = GivenFiles(Path(settings.tls_certificate), Path(settings.tls_key), ca, expected)
        return Tls(given, now)
    return Tls(OwnFiles(Path(settings.data_dir) / "tls", settings.name, hosts), now)


def listen_hosts(settings: CoordinatorSettings) -> tuple[str, str]:
    """Hosts of the two listeners: agents, people."""
    return split_listen(settings.listen_agents)[0], split_listen(settings.listen_people)[0]


def certificate_hosts(settings: CoordinatorSettings) -> tuple[str, ...]:
    """Every name and address that a certificate of this coordinator has to cover."""
    hosts = [*settings.advertise]
    for host in listen_hosts(settings):
        hosts += [own_address()] if host in _WILDCARDS else [host]
    hosts += ["localhost", "127.0.0.1"]
    return tuple(dict.fromkeys(hosts))


def url_host(settings: CoordinatorSettings, host: str) -> str:
    """The host to put into the URL of a listener on `host`."""
    if is_loopback(host):
        return host
    if settings.advertise:
        return settings.advertise[0]
    return own_address() if host in _WILDCARDS else host


def own_address() -> str:
    """The address of this machine towards the world, without asking any name server."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal and wait for ever.
    raise ValueError("the key has a password")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_PEM_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None


def _check_private(path: Path) -> None:
    # The group may read an operator's key (a certificate service's group), the world never.
    mode = stat.S_IMODE(_stat(path).st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise UsageError(
            f"the private key {path} has mode {mode:04o}: others can read or change it.",
            f"Run: chmod 600 {path}",
        )


def _write(path: Path, data: bytes, mode: int) -> None:
    part = path.with_name(path.name + ".tmp")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)

"""A coordinator's own certificate authority and server certificate, as PEM values.

The clock is an argument: `now` is Unix seconds. Keys are ECDSA P-256, which every TLS library
takes.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import RefusedError, UsageError

_BACKDATED_SECONDS: Final = 3600.0  # a site's clock may be slow
_COMMON_NAME_BYTES_MAX: Final = 64  # X.520
_DAY_SECONDS: Final = 86_400.0
_NEAR_SECONDS: Final = 30 * _DAY_SECONDS
_HOST: Final = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class Pair(NamedTuple):
    """A certificate and its private key, both PEM; the key belongs in a file of mode 0600."""

    certificate: bytes
    key: bytes


class Described(NamedTuple):
    """A certificate for people: whom it is for, until when (Unix seconds), and which one it is."""

    names: tuple[str, ...]
    not_before: float
    not_after: float
    fingerprint: str

    def __str__(self) -> str:
        names = ", ".join(self.names) or "no name"
        return (
            f"the certificate for {names}, valid {_day(self.not_before)} to "
            f"{_day(self.not_after)}, fingerprint {self.fingerprint[:16]}"
        )


def make_ca(name: str, *, now: float, days: float = 3650.0) -> Pair:
    """A self-signed authority that may sign server certificates and no further authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(f"Skerry CA {name}")
    certificate = (
        _builder(subject, subject, key.public_key(), now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def make_server(ca: Pair, *, hosts: Sequence[str], now: float, days: float = 365.0) -> Pair:
    """A server certificate for these host names and IP addresses, signed by `ca`.

    Raises:
        UsageError: no host at all, one that is neither name nor address, or an unreadable CA.
    """
    if not hosts:
        raise UsageError("a server certificate needs at least one host name or IP address.")
    alternatives = [_alternative(host) for host in hosts]
    issuer = _load(ca.certificate)
    authority = serialization.load_pem_private_key(ca.key, password=None)
    if not isinstance(authority, ec.EllipticCurvePrivateKey):
        raise UsageError("the CA's key file does not hold an ECDSA key in PEM.")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_named(hosts[0]), issuer.subject, key.public_key(), now, days)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            # without it OpenSSL's strict mode, Python's default since 3.13, refuses the chain
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority, hashes.SHA256())
    )
    return _pair(certificate, key)


def fingerprint(certificate: bytes) -> str:
    """sha256 of the DER form, 64 hex digits.

    Raises:
        UsageError: not a certificate in PEM.
    """
    return _load(certificate).fingerprint(hashes.SHA256()).hex()


def pinned(bundle: bytes, expected: str) -> bytes:
    """The one certificate of a PEM bundle that has the expected fingerprint.

    Raises:
        RefusedError: none has; names the expected and the found ones.
        UsageError: not certificates in PEM.
    """
    found = _load_all(bundle)
    for certificate in found:
        if certificate.fingerprint(hashes.SHA256()).hex() == expected:
            return certificate.public_bytes(serialization.Encoding.PEM)
    seen = ", ".join(each.fingerprint(hashes.SHA256()).hex()[:16] for each in found)
    raise RefusedError(
        f"the coordinator shows the CA {seen}, but the join token pins {expected[:16]}.",
        "Either the token is from another coordinator, or somebody sits in between: get a new "
        "token over a channel that you trust.",
    )


def describe(certificate: bytes) -> Described:
    """What to say about a certificate in a message.

    Raises:
        UsageError: not a certificate in PEM.
    """
    loaded = _load(certificate)
    return Described(
        names=_names(loaded),
        not_before=loaded.not_valid_before_utc.timestamp(),
        not_after=loaded.not_valid_after_utc.timestamp(),
        fingerprint=loaded.fingerprint(hashes.SHA256()).hex(),
    )


def faults(
    certificate: bytes, *, ca: bytes | None, hosts: Sequence[str], now: float
) -> tuple[str, ...]:
    """What is wrong with a server certificate for these hosts at this time, in sentences.

    Without `ca` nothing is said about who signed it.

    Raises:
        UsageError: not certificates in PEM.
    """
    about = describe(certificate)
    found: list[str] = []
    if now < about.not_before:
        found.append(f"it is valid from {_day(about.not_before)} only; is this clock right?")
    if now >= about.not_after:
        found.append(f"it expired on {_day(about.not_after)}.")
    uncovered = [host for host in hosts if not _covered(host, about.names)]
    if uncovered:
        names = ", ".join(about.names) or "no name"
        found.append(f"it is for {names}, not for {', '.join(uncovered)}.")
    if ca is not None:
        try:
            _load(certificate).verify_directly_issued_by(_load(ca))
        except (InvalidSignature, ValueError, TypeError):
            found.append(f"it was not signed by the CA {fingerprint(ca)[:16]}.")
    return tuple(found)


def renewal(certificate: bytes, *, ca: bytes, hosts: Sequence[str], now: float) -> str:
    """Why a new server certificate is due, or empty: faulty, or two thirds of its time are over."""
    found = faults(certificate, ca=ca, hosts=hosts, now=now)
    if found:
        return found[0]
    about = describe(certificate)
    due = about.not_after - (about.not_after - about.not_before) / 3
    return f"it expires on {_day(about.not_after)}." if now >= due else ""


def expiring(certificate: bytes, *, now: float) -> str:
    """A sentence when the end is near: a fifth of its time, at most 30 days; else empty."""
    about = describe(certificate)
    left = about.not_after - now
    if left <= 0:
        return f"expired on {_day(about.not_after)}"
    near = min(_NEAR_SECONDS, (about.not_after - about.not_before) / 5)
    return f"expires on {_day(about.not_after)}" if left < near else ""


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: float,
    days: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_date(now - _BACKDATED_SECONDS))
        .not_valid_after(_date(now + days * _DAY_SECONDS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _named(text: str) -> x509.Name:
    short = text.encode()[:_COMMON_NAME_BYTES_MAX].decode(errors="ignore")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, short)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        name = host.encode("idna").decode("ascii")
    except UnicodeError:
        name = ""
    if not _HOST.fullmatch(name):
        raise UsageError(f"{host[:80]!r} is neither a host name nor an IP address.")
    return x509.DNSName(name)


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    addresses = [str(each) for each in found.get_values_for_type(x509.IPAddress)]
    return (*found.get_values_for_type(x509.DNSName), *addresses)


def _covered(host: str, names: Sequence[str]) -> bool:
    alternative = _alternative(host)
    wanted = str(alternative.value).lower()
    _, _, parent = wanted.partition(".")
    for name in names:
        is_wildcard = name.startswith("*.") and isinstance(alternative, x509.DNSName)
        if name.lower() == wanted or (is_wildcard and name[2:].lower() == parent):
            return True
    return False


def _load(certificate: bytes) -> x509.Certificate:
    return _load_all(certificate)[0]


def _load_all(bundle: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(bundle)
    except ValueError:
        raise UsageError("this is not a certificate in PEM.") from None


def _date(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def _day(seconds: float) -> str:
    return _date(seconds).strftime("%Y-%m-%d")

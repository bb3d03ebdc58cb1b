"""Joining: a one-time token becomes this site's own identity.

token -> the CA, fetched unverified and checked by its fingerprint -> verified TLS
a new Ed25519 key -> Join with the proof that we hold it -> the site's own secret
"""

from __future__ import annotations

import time
from pathlib import Path

from client.sitefiles import SentLog, SiteFolder, SiteIdentity
from client.transport import Transport, check_url, read_capped
from privacy.certificates import pinned
from privacy.keys import new_private_key, public_hex, sign_join
from privacy.tokens import JoinToken, parse_join_token
from protocol import limits
from protocol.errors import ConflictError, UnauthenticatedError, UnreachableError
from protocol.messages import Join, Joined, SiteRole
from protocol.names import clean_name
from protocol.version import PROTOCOL, SOFTWARE, check_protocol


async def join_site(
    token: str,
    *,
    name: str,
    folder: Path,
    url: str = "",
    role: SiteRole = "site",
    insecure: bool = False,
    ca_bundle: Path | None = None,
    proxy: str = "",
) -> SiteIdentity:
    """Enrol this site at the coordinator that made the token, and store who it is.

    Args:
        token: the line that `skerry token create` printed.
        name: the site's name, in any language.
        folder: the site's folder, which must not hold an identity yet.
        url: where the coordinator is reached from here; empty: as the token says.
        role: `evaluator` for a site that only evaluates.
        insecure: allow plain http beyond this machine.
        ca_bundle: certificates to trust, when the token pins none.
        proxy: HTTP proxy; empty: what the environment says.

    Raises:
        SkerryError: with what to do; the folder is left as it was.
    """
    parsed = parse_join_token(token)
    site = SiteFolder(folder)
    name = clean_name(name, "site name")
    with site.locked():
        if site.joined:
            held = site.identity()
            raise ConflictError(
                f"{site.path} already holds the site {held.name!r} of {held.url}.",
                "Use another folder, or remove this one if that site is not needed any more.",
            )
        address = check_url(url or parsed.url, insecure=insecure)
        ca_pem = b""
        if parsed.ca and address.startswith("https:"):
            ca_pem = await _fetch_ca(address, parsed.ca, proxy)
        key = new_private_key()
        joined = await _post(address, parsed, name, role, key, ca_pem, ca_bundle, proxy)
        identity = SiteIdentity(
            name=joined.site,
            role=role,
            url=address,
            coordinator=joined.coordinator,
            protocol=joined.protocol,
        )
        entry = {"site": name, "coordinator": address}
        SentLog(site.path).add(time.time(), "join", entry)
        site.save_identity(identity, secret=joined.secret, key_pem=key, ca_pem=ca_pem)
    return identity


async def _fetch_ca(address: str, expected: str, proxy: str) -> bytes:
    """The coordinator's CA. Nothing secret is sent before its fingerprint was found right."""
    async with (
        Transport(address, verify=False, proxy=proxy) as transport,
        transport.request("GET", "/agent/v1/ca", sock_read=limits.LEASE_SECONDS) as answer,
    ):
        bundle = await read_capped(answer, limits.SMALL_BODY_BYTES_MAX)
    return pinned(bundle, expected)


async def _post(
    address: str,
    token: JoinToken,
    name: str,
    role: SiteRole,
    key: bytes,
    ca_pem: bytes,
    ca_bundle: Path | None,
    proxy: str,
) -> Joined:
    request = Join(
        protocol=PROTOCOL,
        software=SOFTWARE,
        token_id=token.id,
        token_secret=token.secret,
        name=name,
        role=role,
        public_key=public_hex(key),
        proof=sign_join(key, token.id, name),
    )
    trusted = ca_pem.decode("ascii") if ca_pem else ca_bundle
    async with Transport(address, ca=trusted, proxy=proxy) as transport:
        try:
            joined = await transport.call(Joined, "POST", "/agent/v1/join", request)
        except UnauthenticatedError as error:
            if not error.hint:
                error.hint = "A token is good for one join: ask for a new one."
            raise
        except UnreachableError as error:
            if not error.hint:  # with one it is known why, and that nothing was sent
                lost = "the answer with its secret was lost: revoke it and ask for a new token."
                error.hint = f"If the coordinator lists this site now, {lost}"
            raise
    check_protocol(joined.protocol, who="the coordinator")
    return joined

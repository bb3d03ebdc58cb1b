"""Secrets that are handed to people and sites, and how they are kept.

A join token is one line of text, good for one join:

    skj1.BASE64URL(JSON {id, secret, ca, url})

`ca` is the sha256 of the coordinator's CA certificate, so that the very first connection is
already checked; it is empty where no CA of ours stands behind the URL. Of every secret the
coordinator keeps the sha256 only. A plain hash is enough, because the secrets are 256 random bits
and no passwords.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from protocol.errors import UsageError

JOIN_PREFIX: Final = "skj1."
SECRET_BYTES: Final = 32
TOKEN_CHARS_MAX: Final = 4096

SecretKind = Literal["site", "api"]
_SECRET_PREFIX: Final[dict[SecretKind, str]] = {"site": "sks1.", "api": "ska1."}


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """What a site needs in order to join: where, whom to trust, and a secret for one use."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    secret: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    ca: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    url: Annotated[str, Meta(max_length=2048)]

    def __repr__(self) -> str:
        return f"JoinToken(id={self.id!r}, url={self.url!r})"  # the secret stays out of logs


_decoder: Final = msgspec.json.Decoder(JoinToken)


def new_join_token(url: str, ca: str = "") -> JoinToken:
    """A fresh token for the coordinator at `url`, whose CA has the fingerprint `ca`.

    Raises:
        UsageError: the URL or the fingerprint is none.
    """
    token = JoinToken(
        id=secrets.token_hex(8), secret=secrets.token_hex(SECRET_BYTES), ca=ca, url=url
    )
    return parse_join_token(format_join_token(token))


def format_join_token(token: JoinToken) -> str:
    """The one line that a person hands over."""
    raw = base64.urlsafe_b64encode(msgspec.json.encode(token))
    return JOIN_PREFIX + raw.rstrip(b"=").decode("ascii")


def parse_join_token(text: str) -> JoinToken:
    """The token in a line of text.

    Raises:
        UsageError: it is not one, or was cut off; the text itself is never repeated.
    """
    line = text.strip()
    if not line.startswith(JOIN_PREFIX) or len(line) > TOKEN_CHARS_MAX:
        raise UsageError(
            f"this is not a join token: one begins with {JOIN_PREFIX} and is a single line.",
            "Make one at the coordinator with `skerry token create`.",
        )
    body = line.removeprefix(JOIN_PREFIX)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        token = _decoder.decode(raw)
    except (binascii.Error, ValueError, RecursionError, msgspec.MsgspecError):
        raise UsageError(
            "this join token is damaged or was cut off.",
            "Copy the whole line that `skerry token create` printed.",
        ) from None
    _check_url(token)
    return token


def _check_url(token: JoinToken) -> None:
    try:
        parts = urlsplit(token.url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, an address in half a bracket
        good = False
    if not good:
        raise UsageError(f"the join token names {token.url[:80]!r}, which is not an http(s) URL.")
    if token.ca and parts.scheme != "https":
        raise UsageError(f"the join token pins a CA, but {token.url[:80]!r} is not https.")


def new_secret(kind: SecretKind) -> str:
    """A fresh secret of a site or of an API user; the prefix lets secret scanners find leaks."""
    return _SECRET_PREFIX[kind] + secrets.token_hex(SECRET_BYTES)


def hash_secret(secret: str) -> str:
    """What is stored of a secret: sha256, hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def secret_matches(secret: str, stored: str) -> bool:
    """True when `stored` is the hash of `secret`; takes the same time wherever they differ."""
    return hmac.compare_digest(hash_secret(secret).encode(), stored.encode())

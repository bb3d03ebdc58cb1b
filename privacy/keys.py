"""A site's Ed25519 key: made at the site, only its public half travels.

At join the site proves that it holds the private half. Masks and certificates build on this key.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from protocol.errors import UnauthenticatedError, UsageError

_JOIN_DOMAIN: Final = b"skerry join"


def new_private_key() -> bytes:
    """A fresh private key as PEM (PKCS 8, not encrypted), for a file of mode 0600."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_hex(private_pem: bytes) -> str:
    """The public half, 32 bytes as hex.

    Raises:
        UsageError: not an Ed25519 key in PEM.
    """
    return _load(private_pem).public_key().public_bytes_raw().hex()


def sign_join(private_pem: bytes, token_id: str, name: str) -> str:
    """The proof for `messages.Join`: a signature as hex.

    Raises:
        UsageError: not an Ed25519 key in PEM.
    """
    return _load(private_pem).sign(_statement(token_id, name)).hex()


def check_join_proof(public_key: str, proof: str, token_id: str, name: str) -> None:
    """Pass when whoever holds `public_key` signed to join with this token under this name.

    Raises:
        UnauthenticatedError: the proof is not theirs, is about something else, or is no signature.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(proof), _statement(token_id, name))
    except (InvalidSignature, ValueError):
        raise UnauthenticatedError(
            f"site {name!r} did not prove that it holds the key it wants to register.",
            "Join again from the machine where the key was made.",
        ) from None


def _statement(token_id: str, name: str) -> bytes:
    # Lengths go first, so that no two (token, name) pairs give the same bytes.
    parts = [text.encode("utf-8", "surrogatepass") for text in (token_id, name)]
    return _JOIN_DOMAIN + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _load(private_pem: bytes) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(private_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(
            "the site's key file does not hold an Ed25519 key in PEM.",
            "Restore it from a backup, or join again under a new token.",
        )
    return key

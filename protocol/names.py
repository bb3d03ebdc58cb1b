"""Identifiers that are safe in file names and URLs, derived from names in any language."""

from __future__ import annotations

import hashlib
import unicodedata

from protocol import limits
from protocol.errors import UsageError


def clean_name(name: str, what: str) -> str:
    """A name for people in its canonical form (NFC, no control characters, no blank ends).

    Raises:
        UsageError: empty, too long, or with control characters.
    """
    canonical = unicodedata.normalize("NFC", name).strip()
    if not canonical or len(canonical) > limits.NAME_CHARS_MAX:
        raise UsageError(
            f"{what} {canonical[:40]!r} must have 1 to {limits.NAME_CHARS_MAX} characters."
        )
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in canonical):
        raise UsageError(f"{what} {canonical[:40]!r} holds a control character.")
    return canonical


def file_id(name: str) -> str:
    """16 hex digits that stand for a name in file names: the same for the same name, always."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def derive_seed(seed: int, *names: str) -> int:
    """A 63-bit seed for one use, derived from the job's seed and the names of the use."""
    text = "\x1f".join([str(seed), *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

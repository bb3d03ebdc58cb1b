"""Figures the way people read them, the same wherever they are shown."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Final

NAMED_MAX: Final = 12  # things that a sentence names before it counts the others


def size(count: float) -> str:
    """Bytes in decimal units: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def some(parts: Collection[str], between: str = ", ") -> str:
    """The first of them, and how many more there are: a, b, c and 5 more."""
    more = len(parts) - NAMED_MAX
    named = list(islice(parts, NAMED_MAX))
    return between.join([*named, f"and {more} more"] if more > 0 else named)


def span(seconds: float) -> str:
    """A time span in at most two units: 4 s, 3 min 20 s, 2 h 5 min, 1 d."""
    whole = max(0, round(seconds))
    for long, short, factor, divisor in (
        ("d", "h", 86400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if whole >= factor:
            rest = whole % factor // divisor
            return f"{whole // factor} {long}" + (f" {rest} {short}" if rest else "")
    return f"{whole} s"

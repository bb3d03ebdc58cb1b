"""Figures the way people read them, the same wherever they are shown."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in decimal units: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


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

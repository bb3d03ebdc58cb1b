"""What the log says while the coordinator is away: one line a change, one a minute, pure."""

from __future__ import annotations

from typing import Final

SUMMARY_SECONDS: Final = 60.0


class Outage:
    """From the first failure to the next success. `now` is in seconds of any steady clock.

    A single failure that the next try repairs is no outage: proxies cut idle connections.
    """

    def __init__(self, quiet_tries: int = 1) -> None:
        self._quiet_tries = quiet_tries
        self._since: float | None = None
        self._said_at: float | None = None
        self._kinds: set[str] = set()
        self.tries = 0

    def failed(self, kind: str, reason: str, now: float) -> str | None:
        """A try failed; the line to log, if one is due. Each `kind` is told once an outage."""
        if self._since is None:
            self._since = now
        self.tries += 1
        if self.tries <= self._quiet_tries:
            return None
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._said_at = now
            return f"{reason} Trying again for as long as it takes."
        if self._said_at is not None and now - self._said_at >= SUMMARY_SECONDS:
            self._said_at = now
            return f"still away after {now - self._since:.0f} s and {self.tries} tries: {reason}"
        return None

    def over(self, now: float) -> str | None:
        """A try went well; the line to log, if the outage was told of."""
        since, tries, told = self._since, self.tries, bool(self._kinds)
        self._since, self._said_at, self.tries = None, None, 0
        self._kinds.clear()
        if since is None or not told:
            return None
        return f"connected again after {now - since:.0f} s and {tries} tries"

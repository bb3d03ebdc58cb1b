"""Growing pauses with full jitter, so that sites that lost one coordinator do not return as one."""

from __future__ import annotations

import random

from protocol.limits import BACKOFF_FIRST_SECONDS, BACKOFF_LAST_SECONDS


class Backoff:
    """The k-th pause is drawn uniformly between `first` and `first * 2**k`, at most `last`.

    All in seconds.
    """

    def __init__(
        self,
        rng: random.Random,
        first: float = BACKOFF_FIRST_SECONDS,
        last: float = BACKOFF_LAST_SECONDS,
    ) -> None:
        self._rng = rng
        self._first = first
        self._last = last
        self.tries = 0

    def pause(self) -> float:
        """The next pause in seconds."""
        self.tries += 1
        # The exponent is capped: an outage of weeks must not overflow a float.
        most = min(self._last, self._first * 2.0 ** min(self.tries, 32))
        return self._rng.uniform(self._first, most)

    def reset(self) -> None:
        """It worked: begin with the shortest pause again."""
        self.tries = 0

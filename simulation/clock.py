"""A clock that stands still while something happens, and then jumps to the next thing."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """Calls at times in seconds, in order of time and then of asking: the same every run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made = 0  # calls so far
        self._asked = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call at `time` (now, when that has passed)."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), self._asked, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call in so many seconds."""
        self.at(self.now + seconds, call, *arguments)

    def step(self) -> bool:
        """Jump to the next call and make it; False when nothing is left to happen."""
        if not self._queue:
            return False
        self.now, _, call, arguments = heapq.heappop(self._queue)
        self.made += 1
        call(*arguments)
        return True

"""Everything that happens by the clock happens on the same beat: the whole second.

Waking an idle process costs more than what it then does, so timers that may come a little early
share their wake-ups.
"""

from __future__ import annotations

import asyncio
import math


def on_the_second(seconds: float) -> float:
    """A wait of at most `seconds` that ends on a whole second of the loop's clock, if one fits.

    Shorter waits than two seconds stay as they are.
    """
    now = asyncio.get_running_loop().time()
    return math.floor(now + seconds) - now if seconds >= 2.0 else seconds


async def next_second() -> float:
    """Sleep until the next whole second of the loop's clock; how late this came, in seconds."""
    clock = asyncio.get_running_loop().time
    now = clock()
    due = math.floor(now) + 1.0
    await asyncio.sleep(due - now)
    return clock() - due

"""Instructions on their way to one site, redelivered until the site's cursor moves past them."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import Final

from protocol.errors import BusyError, UsageError
from protocol.messages import Bye, Instruction, Instructions, Settled

ITEMS_MAX: Final = 1_000
BATCH_MAX: Final = 100


class Mailbox:
    """Numbers instructions from 1; `cursor` is the number of the last one that the site has.

    One poll is answered at a time: a newer poll sends the older one home empty, because an agent
    that polls again has given up on the connection before.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[int, Instruction]] = deque()
        self._last = 0
        self._acknowledged = 0
        self._changed = asyncio.Event()
        self._poll = 0
        self._closed = False

    @property
    def cursor(self) -> int:
        """Where a new session starts to read."""
        return self._acknowledged

    def __len__(self) -> int:
        return len(self._items)

    def put(self, instruction: Instruction) -> None:
        """Append an instruction.

        Raises:
            BusyError: ITEMS_MAX instructions are waiting; the site does not read them.
        """
        if len(self._items) >= ITEMS_MAX:
            raise BusyError(f"{ITEMS_MAX} instructions wait for the site and it fetches none.")
        self._last += 1
        self._items.append((self._last, instruction))
        self._changed.set()

    def take(self, cursor: int) -> Instructions | None:
        """What lies beyond `cursor`, up to which the site has everything; None: nothing yet.

        Raises:
            UsageError: a cursor beyond anything that was sent.
        """
        if not 0 <= cursor <= self._last:
            raise UsageError(
                f"cursor {cursor} is not of this session, whose last is {self._last}.",
                "Open a new session.",
            )
        self._acknowledge(cursor)
        if not self._items and not self._closed:
            return None
        batch = [item for item in islice(self._items, BATCH_MAX) if item[0] > cursor]
        return Instructions(
            cursor=batch[-1][0] if batch else cursor,
            items=tuple(instruction for _, instruction in batch),
        )

    async def wait(self, cursor: int, timeout: float) -> Instructions:
        """As `take`, at once if there is anything, else empty after `timeout` seconds."""
        found = self.take(cursor)
        self._poll += 1
        mine = self._poll
        self._changed.set()  # an older poll goes home
        if found is None:
            self._changed = asyncio.Event()
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass
            found = self.take(cursor)
        return found if found is not None and mine == self._poll else Instructions(cursor=cursor)

    def _acknowledge(self, cursor: int) -> None:
        self._acknowledged = max(self._acknowledged, cursor)
        while self._items and self._items[0][0] <= self._acknowledged:
            self._items.popleft()

    def close(self, goodbye: Bye | None = None) -> None:
        """Answer the open poll with what there is, and every later one at once."""
        if goodbye is not None and not (self._items and isinstance(self._items[-1][1], Bye)):
            self._last += 1
            self._items.append((self._last, goodbye))
        self._closed = True
        self._changed.set()

    def successor(self) -> Mailbox:
        """The mailbox of the site's next session.

        The core sends afresh what is outstanding; only later words about updates (`Settled`) carry
        over, since those settle residuals and are said once.
        """
        heir = Mailbox()
        for _, instruction in self._items:
            if isinstance(instruction, Settled):
                heir.put(instruction)
        self.close()
        return heir

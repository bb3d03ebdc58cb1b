"""A spool as memory: its pages are looked at where the system keeps them, and never copied.

Reading a file from the page cache copies it once, which costs as much as adding it does. A mapped
one is added from where it lies. Pages that were looked at are let go as the reading goes on, so a
cohort of mapped spools takes a few megabytes of this process however long they are.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from protocol.errors import MalformedError

LET_GO_BYTES: Final = 256 << 10  # a call for so many bytes costs little beside adding them


class MappedBody:
    """A body on this machine's disk, read once from its front.

    Private and writable, because a tensor over memory wants it so; nobody writes. Nothing shortens
    a spool while it is in a cohort: only such a file may be mapped, since a page that is gone ends
    the process instead of raising an error.
    """

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            OSError: it cannot be opened.
            MalformedError: it is empty.
        """
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(
                    file.fileno(),
                    0,
                    flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            except ValueError:
                raise MalformedError(f"spool {path.name} is empty.") from None
        self._body = memoryview(self._map)
        self._at = 0
        self._let_go = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Tensors over it may live a little longer; the map goes with the last of them.
        self._body = memoryview(b"")

    def readinto(self, target: memoryview) -> int:
        """Copy the next bytes, as a file does: for headers and metadata."""
        found = self.view(len(target))
        target[: len(found)] = found
        return len(found)

    def view(self, count: int) -> memoryview:
        """The next `count` bytes, fewer at the end; those behind the view before may be let go."""
        ready = self._at // LET_GO_BYTES * LET_GO_BYTES
        if ready > self._let_go:
            self._map.madvise(mmap.MADV_DONTNEED, self._let_go, ready - self._let_go)
            self._let_go = ready
        found = self._body[self._at : self._at + count]
        self._at += len(found)
        return found

"""Engines for tests: with a fake fold process, and a clock and a disk to turn, where wanted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from coordinator.disk import DiskWatch
from coordinator.engine import Engine
from tests.coordinator import fakefold
from tests.coordinator.stubsite import settings_of

FAKE = (sys.executable, str(Path(fakefold.__file__)))


@dataclasses.dataclass
class Clock:
    """Turns on demand; `free` bytes are what the disk has."""

    now: float = 50.0
    wall: float = 1_700_000_000.0
    free: int = 1 << 40

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, clock: Clock | None = None, real: bool = False, **changes: object
) -> AsyncIterator[Engine]:
    """An engine on `folder`; its fold process is a fake one unless `real`."""
    if not real:
        changes["fold_command"] = FAKE
    settings = settings_of(folder, **changes)
    if clock is None:
        engine = Engine(settings)
    else:
        disk = DiskWatch(folder, settings.disk_reserve_bytes, free=lambda _: clock.free)
        engine = Engine(settings, clock.monotonic, wall=clock.time, disk=disk)
    await engine.start()
    try:
        async with asyncio.timeout(60.0):
            yield engine
    finally:
        await engine.stop()

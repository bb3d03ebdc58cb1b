"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.fakeengine import Served, running


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Both listeners with a fake engine behind them."""
    async with running(tmp_path) as found:
        yield found

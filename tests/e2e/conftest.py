"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder for one coordinator and its sites; every process ends with the test."""
    with Place(tmp_path) as made:
        yield made

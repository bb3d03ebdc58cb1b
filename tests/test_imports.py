"""The packages have generic names: one test asserts that it is ours that is tested."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.sourcetree import PACKAGES, ROOT


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks", "tests"])
def test_a_package_is_imported_from_this_repository(package: str):
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / package / "__init__.py"


def test_the_public_face_is_small_and_there():
    skerry = importlib.import_module("skerry")
    assert {"Task", "Data", "SiteContext", "__version__"} <= set(skerry.__all__)
    assert all(hasattr(skerry, name) for name in skerry.__all__)

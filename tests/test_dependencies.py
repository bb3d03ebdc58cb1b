"""What an installation asks of a user's machine: little, and in wide ranges.

That the oldest and the newest of each range really work is tested by `.ci/environments`, which
installs both and runs the tests that meet each library.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.sourcetree import PACKAGES, ROOT, imported, product

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [Requirement(text) for text in PROJECT["dependencies"]]
OPTIONAL = [
    Requirement(text) for extra in PROJECT["optional-dependencies"].values() for text in extra
]
OF_ANOTHER = {"yarl"}  # the type of a URL in aiohttp's interface
PINNED = {
    canonicalize_name(name): found
    for name, found in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
}


@pytest.mark.parametrize("requirement", [*REQUIRED, *OPTIONAL], ids=str)
def test_a_dependency_has_a_lower_bound_and_nothing_else(requirement: Requirement):
    """PC-086: a user's own torch, numpy or protobuf stack is never forced down or pinned."""
    operators = [each.operator for each in requirement.specifier]
    assert operators == ([] if requirement.name == "skerry" else [">="])
    assert requirement.marker is None
    assert requirement.url is None


def test_torch_and_numpy_are_taken_over_a_wide_range():
    """PC-086: from releases two years old to those that do not exist yet."""
    ranges = {each.name: each.specifier for each in REQUIRED}
    assert all(found in ranges["torch"] for found in ("2.6.0", "2.8.1", "2.13.0", "3.1"))
    assert all(found in ranges["numpy"] for found in ("1.26.4", "2.0", "2.4.6", "3.0"))
    assert not {"protobuf", "grpcio", "pydantic"} & set(ranges)


def test_the_tested_versions_lie_in_the_ranges_and_are_installed():
    """PC-086: the conflict check: what the tests run with satisfies every range."""
    for requirement in [*REQUIRED, *OPTIONAL]:
        pinned = PINNED.get(canonicalize_name(requirement.name))
        if pinned is None:
            assert requirement.name == "skerry"
            continue
        assert pinned in requirement.specifier
        assert version(requirement.name).split("+")[0] in requirement.specifier


def test_every_import_is_declared_and_every_dependency_is_used():
    providers = packages_distributions()
    used: set[str] = set()
    for source in product():
        for node in ast.walk(source.tree):
            for name in imported(node) if isinstance(node, ast.stmt) else ():
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in PACKAGES:
                    used |= {canonicalize_name(each) for each in providers.get(top, [top])}
    declared = {canonicalize_name(each.name) for each in REQUIRED}
    extras = {canonicalize_name(each.name) for each in OPTIONAL}
    assert sorted(used - declared - extras - OF_ANOTHER) == []
    # SQLAlchemy loads its driver by name, from the URL in the settings.
    assert sorted(declared - used) in ([], ["aiosqlite"])

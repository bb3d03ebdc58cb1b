"""What the tidy tests know about the source: its files, their syntax trees, names and imports."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "protocol": 0,
    "aggregation": 1,
    "privacy": 1,
    "coordinator": 2,
    "client": 2,
    "webui": 3,
    "simulation": 3,
    "skerry": 4,
}
PACKAGES = tuple(FLOORS)
LOOSE = ("benchmarks", "examples", "tests")  # may import any package, and no package imports them


class Source(NamedTuple):
    """A Python file: its path from the root, its dotted name and its syntax tree."""

    path: str
    module: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the packages and of benchmarks, examples and tests."""
    found = []
    for top in (*PACKAGES, *LOOSE):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT)
            parts = name.with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Source(str(name), module, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def product() -> tuple[Source, ...]:
    """The files of the eight packages."""
    return tuple(source for source in sources() if source.package in PACKAGES)


@cache
def files() -> tuple[str, ...]:
    """Every file under version control, or about to be: paths from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    if listed.returncode == 0:
        return tuple(name for name in listed.stdout.split("\0") if (ROOT / name).is_file())
    # An archive without its history: everything but hidden folders is source.
    every = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return tuple(str(path) for path in every if not any(p.startswith(".") for p in path.parts))


def aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> full dotted name, for everything that the file imports."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.split(".")[0]
                known[name.asname or top] = name.name if name.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                known[name.asname or name.name] = f"{node.module}.{name.name}"
    return known


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """The full name of an expression like `np.random.rand`, or empty when it is no plain name.

    An attribute of something that was not imported has no full name: it may be any object.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    if parts and node.id not in known:
        return ""
    return ".".join([known.get(node.id, node.id), *reversed(parts)])


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the full name of what is called (empty when that is no plain name)."""
    known = aliases(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func, known), node


def imported(node: ast.stmt) -> tuple[str, ...]:
    """The dotted names that an import statement names; `from a import b` gives a and a.b."""
    if isinstance(node, ast.Import):
        return tuple(name.name for name in node.names)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return (node.module, *(f"{node.module}.{name.name}" for name in node.names))
    return ()


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """Dotted names imported while the module itself is being loaded: not within functions, and not
    for type checkers only.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.stmt):
            yield from imported(node)
        waiting += ast.iter_child_nodes(node)

"""Style and layering, enforced as an ordinary test."""

from __future__ import annotations

import ast
from pathlib import Path

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


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_a_package_imports_only_from_lower_floors():
    wrong = []
    for package, floor in FLOORS.items():
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in imports(path) & set(FLOORS) - {package}:
                if FLOORS[name] >= floor:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong

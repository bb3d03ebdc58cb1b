"""What benchmarks share: bars, results as one line, and where they are recorded."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

ROOT: Final = Path(__file__).resolve().parent
RESULTS: Final = ROOT / "results"


class Bar(NamedTuple):
    """What a figure is measured against: it must be at most, or at least, the limit."""

    rule: Literal["<=", ">="]
    limit: float

    def holds(self, value: float) -> bool:
        """True when the bar is met."""
        return value <= self.limit if self.rule == "<=" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.rule} {self.limit:g}"

    @classmethod
    def parse(cls, text: str) -> Bar:
        """`<= 0.05` or `>= 5`, the way benchmarks write their bars.

        Raises:
            ValueError: neither of the two.
        """
        rule, _, limit = text.partition(" ")
        if rule == "<=":
            return cls("<=", float(limit))
        if rule == ">=":
            return cls(">=", float(limit))
        raise ValueError(f"{text!r} is not a bar: write '<= 0.05' or '>= 5'.")


def best_seconds(work: Callable[[], object], *, repeats: int) -> float:
    """The shortest of several runs: what the machine can do when nothing else disturbs it."""
    shortest = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def commit() -> str:
    """The short hash of the checked-out commit, or `unknown` outside a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures as `name.key`, the way bars name them."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def line(result: Mapping[str, Any]) -> str:
    """The result as one compact line of JSON; NaN and infinity become null."""
    return msgspec.json.encode(result).decode()


def record(name: str, result: Mapping[str, Any]) -> Path:
    """Append the line to `benchmarks/results/NAME.jsonl`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(line(result) + "\n")
    return path

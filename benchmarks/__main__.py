"""`python -m benchmarks NAME [--json] [--quick] [--record] [--seeds N]`.

A benchmark is a module of this package with `run(quick=...) -> fields` and `BARS`, which maps a
figure (`name.key` for nested ones) to `<= 0.05` or `>= 5`. The exit status is 0 when it measured,
even if a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from typing import Any

import benchmarks
from benchmarks.common import Bar, commit, flatten, line, record

NOT_BENCHMARKS = {"__main__", "common", "places", "simulator_training"}


def names() -> list[str]:
    """The benchmarks that there are."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in found if name not in NOT_BENCHMARKS)


def measure(name: str, *, quick: bool, **more: int) -> tuple[dict[str, Any], dict[str, Bar]]:
    """Run a benchmark: its line, and its bars. `more` is what only some of them take."""
    module = importlib.import_module(f"benchmarks.{name}")
    started = time.perf_counter()
    fields = module.run(quick=quick, **more)
    head = {
        "bench": name,
        "commit": commit(),
        "seconds": round(time.perf_counter() - started, 3),
        "quick": quick,
    }
    return head | fields, {key: Bar.parse(text) for key, text in module.BARS.items()}


def table(result: dict[str, Any], bars: dict[str, Bar]) -> str:
    """Figures, one per line, with their bars and whether they hold."""
    rows = []
    for name, value in flatten(result).items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        bar = bars.get(name)
        judged = f"{bar}  {'ok' if bar.holds(value) else 'missed'}" if bar and number else ""
        rows.append(f"{name:<32} {text:>12}  {judged}".rstrip())
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=f"Benchmarks: {', '.join(names())}."
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="one compact line, last on stdout")
    parser.add_argument("--quick", action="store_true", help="smaller and rougher")
    parser.add_argument("--record", action="store_true", help="append to results/NAME.jsonl")
    parser.add_argument("--seeds", type=int, help="chaos: how many plans")
    options = parser.parse_args(arguments)
    if options.name not in names():
        print(
            f"no such benchmark: {options.name}. There are: {', '.join(names())}", file=sys.stderr
        )
        return 2
    more = {} if options.seeds is None else {"seeds": options.seeds}
    if more and options.name != "chaos":
        print("--seeds is for chaos.", file=sys.stderr)
        return 2
    result, bars = measure(options.name, quick=options.quick, **more)
    if options.record:
        print(f"recorded in {record(options.name, result)}", file=sys.stderr)
    print(line(result) if options.json else table(result, bars))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What is printed, and where: results on stdout, notes on stderr, colour and bars on terminals."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import msgspec
from rich.cells import cell_len

from protocol.errors import SkerryError, UsageError

F = TypeVar("F", bound=Callable[..., Any])


def json_flag(command: F) -> F:
    """Add `--json` to a reading verb."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one compact JSON line on stdout."
    )(command)


def emit(value: Any) -> None:
    """One compact JSON line on stdout; NaN and infinity become null."""
    plain = _finite(msgspec.to_builtins(value, str_keys=True, enc_hook=str))
    click.echo(msgspec.json.encode(plain).decode())
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark for people, on stderr."""
    click.echo(text, err=True)


def confirm(question: str) -> None:
    """Ask on the terminal, and end here when the answer is no.

    Raises:
        UsageError: nobody is there to ask.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "this must be confirmed, and there is no terminal to ask on.", "Say --yes."
        )
    click.confirm(question, abort=True, err=True)


def fail(error: SkerryError, *, as_json: bool = False) -> None:
    """An error on stderr, sentence by sentence; with --json also as the one line on stdout."""
    start = click.style("error:", fg="red") if coloured(sys.stderr) else "error:"
    click.echo(f"{start} {error.message}", err=True)
    for problem in error.problems:
        click.echo(f"  {problem}", err=True)
    if error.hint:
        click.echo(error.hint, err=True)
    if as_json:
        emit(error.body())


def coloured(stream: Any) -> bool:
    """Colours only on a terminal, and never when NO_COLOR is set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Aligned columns, wide characters counted as two; columns in `right` flush right."""
    cells = [[_one_line(str(cell)) for cell in row] for row in [headings, *rows]]
    widths = [max(cell_len(row[i]) for row in cells) for i in range(len(headings))]
    lines = []
    for number, row in enumerate(cells):
        padded = [
            " " * (width - cell_len(cell)) + cell
            if column in right
            else cell + " " * (width - cell_len(cell))
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(padded).rstrip()
        lines.append(click.style(line, bold=True) if not number and coloured(sys.stdout) else line)
    return "\n".join(lines)


def number(value: float | None, digits: int = 4) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _one_line(text: str) -> str:
    """Names may hold anything; control characters must not reach the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value

"""Writes the pages of `docs/` that are generated: `./run docs`, `./run docs --check`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from skerry import job_page, settings_page

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "job.md": job_page.page,
    "settings.md": settings_page.page,
}


def main(arguments: Sequence[str], folder: Path = DOCS) -> int:
    """Write or check the pages; the exit code is 1 when a check fails, 2 for a wrong call."""
    if list(arguments) not in ([], ["--check"]):
        print("usage: python -m skerry.reference [--check]", file=sys.stderr)
        return 2
    stale = []
    for name, page in PAGES.items():
        text, file = page(), folder / name
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not arguments:
            file.write_text(text, encoding="utf-8")
    if arguments and stale:
        print(f"not up to date: {', '.join(stale)}. Run `./run docs`.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Where the agent's log goes: standard error, always UTF-8, whatever the system's locale."""

from __future__ import annotations

import io
import logging
import sys
from typing import TextIO

from protocol.logs import Form, formatter


def setup(level: str = "info", form: Form = "auto", stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream` (standard error), and nowhere else."""
    target = stream if stream is not None else sys.stderr
    if isinstance(target, io.TextIOWrapper):
        target.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter(form, terminal=target.isatty()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What goes wrong with HTTP is told by `link`, once and in words for people.
    logging.getLogger("aiohttp").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.ERROR)

"""Where the agent's log goes: standard error, always UTF-8, whatever the system's locale."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from protocol.logs import Form, send_to


def setup(level: str = "info", form: Form = "auto", stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream` (standard error), and nowhere else."""
    send_to(stream if stream is not None else sys.stderr, level, form)
    # What goes wrong with HTTP is told by `link`, once and in words for people.
    logging.getLogger("aiohttp").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def name_site(site: str) -> None:
    """Let every record of this process name the site that it works for."""

    def named(record: logging.LogRecord) -> bool:
        record.site = site
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(named)

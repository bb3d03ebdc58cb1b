"""Where the coordinator's log goes: standard error, always UTF-8, whatever the system's locale."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from protocol.logs import Form, send_to


def setup(level: str = "info", form: Form = "auto", stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream` (standard error), and nowhere else."""
    send_to(stream if stream is not None else sys.stderr, level, form)
    # Its records repeat what the HTTP layer already answers and logs with a reason.
    logging.getLogger("aiohttp").setLevel(logging.ERROR)
    logging.captureWarnings(capture=True)

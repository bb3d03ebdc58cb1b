"""How a log record becomes a line: text for a terminal, one JSON object per line otherwise.

Every process writes its log through these, so a log of a whole job can be read with one filter.
`job`, `site` and `version` come from the record (`extra={"job": ...}`) and are left out when they
are not set. A line never holds a line break of its own, so no name can forge a second record.
"""

from __future__ import annotations

import io
import logging
from typing import Final, Literal, TextIO

import msgspec

Form = Literal["auto", "text", "json"]

CONTEXT: Final = ("job", "site", "version")
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {
    0x0A: "\\n",
    0x0D: "\\r",
    0x09: "\\t",
    0x85: "\\x85",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}

# JSON allows these bare within text; readers of lines take them for line breaks.
_JSON_BREAKS: Final = {code: f"\\u{code:04x}" for code in (0x7F, 0x85, 0x2028, 0x2029)}


class JsonLines(logging.Formatter):
    """`{"time": ..., "level": ..., "message": ..., "job": ..., "error": ...}` per record."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object; `time` in Unix seconds, `error` is the traceback when there is one."""
        line: dict[str, str | int | float] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _utf8(record.getMessage()),
        }
        line |= {key: value for key, value in context(record).items() if key not in line}
        if record.exc_info:
            line["error"] = _utf8(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode().translate(_JSON_BREAKS)


class TextLines(logging.Formatter):
    """`12:00:03 warning  the message  (job j-1, site edge-2)`; a traceback follows indented."""

    default_time_format = "%H:%M:%S"
    default_msec_format = ""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback when there is one."""
        where = ", ".join(f"{key} {value}" for key, value in context(record).items())
        message = _utf8(record.getMessage()).translate(_CONTROL)
        line = f"{self.formatTime(record)} {record.levelname.lower():<8} {message}"
        if where:
            line += f"  ({where.translate(_CONTROL)})"
        if record.exc_info:
            trace = _utf8(self.formatException(record.exc_info))
            line += "\n" + "\n".join(f"    {text}" for text in trace.splitlines())
        return line


def context(record: logging.LogRecord) -> dict[str, str | int]:
    """What of job, site and version the record names."""
    found = {key: getattr(record, key, None) for key in CONTEXT}
    return {
        key: value if isinstance(value, int) else _utf8(str(value))
        for key, value in found.items()
        if value is not None and value != ""
    }


def formatter(form: Form, *, terminal: bool) -> logging.Formatter:
    """The formatter for a stream; `auto` means text on a terminal and JSON elsewhere."""
    if form == "auto":
        form = "text" if terminal else "json"
    return TextLines() if form == "text" else JsonLines()


def send_to(stream: TextIO, level: str, form: Form) -> None:
    """Send all log records of this process to `stream`, in UTF-8, and nowhere else."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(form, terminal=stream.isatty()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _utf8(text: str) -> str:
    # A lone surrogate (an undecodable file name) must not lose the whole record.
    return text.encode("utf-8", "backslashreplace").decode()

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import msgspec
import pytest

from client import logs


@pytest.fixture(autouse=True)
def _root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_records_are_json_lines_off_a_terminal_in_utf8():
    """PC-085: a log under any locale holds names as they are."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    logs.setup("info", "auto", stream)
    logging.getLogger("skerry.agent").info("works for 病院-3", extra={"job": "j-1"})
    logging.getLogger("skerry.agent").debug("not this")
    stream.flush()
    (line,) = raw.getvalue().decode("utf-8").splitlines()
    record = msgspec.json.decode(line)
    assert (record["message"], record["job"], record["level"]) == (
        "works for 病院-3",
        "j-1",
        "info",
    )


def test_text_is_for_people():
    stream = io.StringIO()
    logs.setup("debug", "text", stream)
    logging.getLogger("skerry.worker").debug("hello")
    assert "debug" in stream.getvalue()
    assert stream.getvalue().endswith("hello\n")


def test_every_record_names_the_site_once_it_is_known():
    stream = io.StringIO()
    logs.setup("info", "json", stream)
    logging.getLogger("skerry.agent").info("before")
    logs.name_site("病院-3")
    logging.getLogger("skerry.link").info("after", extra={"job": "j-1"})
    before, after = map(msgspec.json.decode, stream.getvalue().splitlines())
    assert "site" not in before
    assert (after["site"], after["job"]) == ("病院-3", "j-1")

import json
import logging
import sys

import pytest

from protocol.logs import JsonLines, TextLines, context, formatter


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    found = logging.LogRecord("skerry.test", logging.WARNING, "x.py", 1, message, args, None)
    found.__dict__.update(extra)
    return found


def failed(message: str) -> logging.LogRecord:
    found = record(message)
    try:
        raise ValueError("no\nroom")
    except ValueError:
        found.exc_info = sys.exc_info()
    return found


HOSTILE = "edge\n12:00:00 error  forged\r\x1b[2J\u2028\x00"


def test_a_json_line_has_time_level_message_and_context():
    line = json.loads(
        JsonLines().format(record("%s is late", "edge-1", job="j", site="edge-1", version=0))
    )
    assert isinstance(line.pop("time"), float)
    assert line == {
        "level": "warning", "logger": "skerry.test", "message": "edge-1 is late",
        "job": "j", "site": "edge-1", "version": 0,
    }  # fmt: skip


def test_a_text_line_reads_from_left_to_right():
    line = TextLines().format(record("late", job="j", site="病院-3"))
    assert line[8:] == " warning  late  (job j, site 病院-3)"
    assert TextLines().format(record("late")).endswith("warning  late")


@pytest.mark.parametrize("lines", [JsonLines(), TextLines()])
def test_no_name_can_forge_a_second_line(lines: logging.Formatter):
    text = lines.format(record("%s joined", HOSTILE, site=HOSTILE))
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "\x00" not in text


@pytest.mark.parametrize("lines", [JsonLines(), TextLines()])
def test_a_name_that_is_no_utf8_does_not_lose_the_record(lines: logging.Formatter):
    text = lines.format(record("file %s", "a\udc80b", site="\udc80"))
    assert text.encode("utf-8")
    assert "udc80" in text


def test_a_traceback_stays_with_its_record():
    line = json.loads(JsonLines().format(failed("broke")))
    assert "ValueError: no\nroom" in line["error"]
    first, *rest = TextLines().format(failed("broke")).splitlines()
    assert first.endswith("broke")
    assert rest
    assert all(each.startswith("    ") for each in rest)


def test_what_is_not_set_is_left_out():
    assert context(record("x", job="", site=None, version=3)) == {"version": 3}


def test_auto_is_text_for_people_and_json_for_machines():
    assert isinstance(formatter("auto", terminal=True), TextLines)
    assert isinstance(formatter("auto", terminal=False), JsonLines)
    assert isinstance(formatter("text", terminal=False), TextLines)
    assert isinstance(formatter("json", terminal=True), JsonLines)

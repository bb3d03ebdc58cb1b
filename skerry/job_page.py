"""The text of `docs/job.md`: every key of a job file, from the very classes that read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

import msgspec
from msgspec import inspect

from protocol.jobfile import job_type
from protocol.jobstates import TERMINAL, TRANSITIONS, JobState, JobStimulus
from protocol.schema import default, describe, join, plain

_HEAD: Final = """\
# The job file

<!-- Written by `./run docs` from protocol/jobspec.py and protocol/jobstates.py; do not edit. -->

A job is a TOML file. Keys that are left out have the default shown here; `-` means that the key has
no default. `skerry job validate FILE` lists everything that is wrong with a file at once: the key,
what was found, and what is allowed.

The smallest job:

```toml
name = "digits"

[task]
name = "digits"

[period]
steps = 20

[stop]
versions = 50
```
"""

_STATES: Final = """\
## States of a job

Each row is a state, each column what happens to the job; the cell is the state that follows. An
empty cell is refused with what would be allowed instead. The states in *italics* are final.
"""


def page() -> str:
    """The whole page as text."""
    sections = [
        _HEAD,
        *_sections(job_type(), ""),
        _STATES + "\n" + _states(),
    ]
    return "\n".join(sections)


def _sections(kind: inspect.StructType, key: str) -> Iterator[str]:
    title = f"## `[{key}]`" if key else "## Top level"
    rows = [
        _row(join(key, field.encode_name), field)
        for field in kind.fields
        if not isinstance(plain(field.type), inspect.StructType)
    ]
    lines = [title, "", _sentence(kind), ""]
    lines += ["| key | allowed | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    yield "\n".join(lines)
    for field in kind.fields:
        inner = plain(field.type)
        if isinstance(inner, inspect.StructType):
            yield from _sections(inner, join(key, field.encode_name))


def _row(key: str, field: inspect.Field) -> str:
    shown = "-" if field.required else _default(default(field))
    cells = (f"`{key}`", describe(field.type), shown, _meaning(field))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    return "-" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def _meaning(field: inspect.Field) -> str:
    kind = field.type
    if isinstance(kind, inspect.Metadata) and kind.extra_json_schema is not None:
        return str(kind.extra_json_schema.get("description", ""))
    return ""


def _sentence(kind: inspect.StructType) -> str:
    return " ".join((kind.cls.__doc__ or "").split())


def _states() -> str:
    stimuli = get_args(JobStimulus)
    lines = [
        "| state | " + " | ".join(stimuli) + " |",
        "| --- |" + " --- |" * len(stimuli),
    ]
    for state in get_args(JobState):
        name = f"*{state}*" if state in TERMINAL else state
        after = [TRANSITIONS.get((state, stimulus), "") for stimulus in stimuli]
        lines.append(f"| {name} | " + " | ".join(after) + " |")
    return "\n".join(lines) + "\n"

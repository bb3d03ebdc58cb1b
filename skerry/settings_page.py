"""The text of `docs/settings.md`: every setting of coordinator, agent and command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from client.agentsettings import AgentSettings
from coordinator.settings import CoordinatorSettings
from protocol import schema
from skerry.cli.access import PersonSettings
from skerry.settings import PREFIX, class_type

# Depends on the machine that writes the page.
_INTERPRETER: Final = "PYTHON"

_HEAD: Final = """\
# Settings

<!-- Written by `./run docs` from the classes of settings; do not edit. -->

Each value comes from the first of these that has it: a flag, a `SKERRY_*` variable, the settings
file (TOML), the default. `skerry config show` prints every value and where it came from.

A variable is named after its key, upper case, with `__` between levels: `SKERRY_LISTEN_PEOPLE`,
`SKERRY_TASKS__DIGITS__REFERENCE`. With `_FILE` at the end it names a file that holds the value:
`SKERRY_TOKEN_FILE`. Lists are separated by commas in flags and variables.

The file is the one of `--config`, else that of `SKERRY_CONFIG`, else `~/.config/skerry/ROLE.toml`,
else `/etc/skerry/ROLE.toml`.
"""

_ROLES: Final[dict[str, tuple[str, type[msgspec.Struct]]]] = {
    "coordinator": ("`skerry coordinator`", CoordinatorSettings),
    "agent": ("`skerry agent`", AgentSettings),
    "person": ("the verbs that talk to a coordinator", PersonSettings),
}


def page() -> str:
    """The whole page as text."""
    sections = [_HEAD]
    for role, (who, kind) in _ROLES.items():
        sections.append(f"## {role.capitalize()}\n\nFor {who}; the file is `{role}.toml`.\n")
        sections.append("\n".join(_rows(class_type(kind), "")) + "\n")
    return "\n".join(sections)


def _rows(kind: inspect.StructType, prefix: str) -> Iterator[str]:
    if not prefix:
        yield "| key | variable | allowed | default | meaning |"
        yield "| --- | --- | --- | --- | --- |"
    for field in kind.fields:
        key = prefix + field.encode_name
        inner = schema.plain(field.type)
        if isinstance(inner, inspect.DictType):
            value = schema.plain(inner.value_type)
            if isinstance(value, inspect.StructType):
                yield from _rows(value, f"{key}.NAME.")
                continue
        yield _row(key, field)


def _row(key: str, field: inspect.Field) -> str:
    variable = PREFIX + key.upper().replace(".", "__")
    given = schema.default(field)
    empty = given is None or (isinstance(given, (str, tuple, dict)) and not given)
    shown = "-" if field.required or empty else f"`{_default(given)}`"
    meaning = ""
    if isinstance(field.type, inspect.Metadata):
        meaning = str((field.type.extra_json_schema or {}).get("description", ""))
    cells = (f"`{key}`", f"`{variable}`", schema.describe(field.type), shown, meaning)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        value = [_INTERPRETER if item == sys.executable else item for item in value]
    return msgspec.json.encode(value, enc_hook=str).decode()

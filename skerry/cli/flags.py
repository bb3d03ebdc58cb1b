"""One flag per setting, made from the class of settings: names, sentences and defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from msgspec import inspect

from protocol import schema
from skerry import settings

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)


def flags_of(kind: type[msgspec.Struct], role: str) -> Callable[[F], F]:
    """Add `--config` and a flag for every plain setting of `kind` to a command."""

    def add(command: F) -> F:
        for name, field in reversed(_plain_fields(kind)):
            inner = schema.plain(field.type)
            switch = isinstance(inner, inspect.BoolType)
            command = click.option(
                f"--{name.replace('_', '-')}",
                name,
                default=None,
                flag_value="true" if switch else None,
                is_flag=switch,
                metavar=None if switch else _metavar(inner),
                help=_help(field),
            )(command)
        text = f"Settings file (default: ~/.config/skerry/{role}.toml, /etc/skerry/{role}.toml)."
        return click.option("--config", metavar="FILE", help=text)(command)

    return add


def load(kind: type[S], role: str, given: dict[str, Any]) -> settings.Loaded[S]:
    """The settings that the flags of `flags_of`, variables and file give."""
    env = settings.environment()
    config = given.pop("config", None)
    file = Path(config) if config else settings.find_file(role, env)
    return settings.load(kind, file=file, env=env, flags=given)


def _plain_fields(kind: type[msgspec.Struct]) -> list[tuple[str, inspect.Field]]:
    return [
        (name, field)
        for name, field in schema.leaves(settings.class_type(kind))
        if "." not in name and not isinstance(schema.plain(field.type), inspect.DictType)
    ]


def _metavar(kind: inspect.Type) -> str:
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return "NUMBER"
    return "A,B" if isinstance(kind, inspect.VarTupleType) else "TEXT"


def _help(field: inspect.Field) -> str:
    sentence = ""
    if isinstance(field.type, inspect.Metadata):
        sentence = str((field.type.extra_json_schema or {}).get("description", ""))
    default = schema.default(field)
    if default in {None, "", ()} or isinstance(default, bool):
        return sentence
    if isinstance(default, tuple):  # as the flag takes it
        default = ",".join(map(str, default))
    return f"{sentence} [default: {default}]"

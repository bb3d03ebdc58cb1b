"""Settings: defaults, then a TOML file, then `SKERRY_*` variables, then flags.

The settings themselves are msgspec classes of the packages that use them; this module fills any of
them and remembers where each value came from. A variable is named after its key, upper case, with
`__` between levels: `SKERRY_LISTEN_PEOPLE`, `SKERRY_TASKS__DIGITS__REFERENCE`. With `_FILE` at the
end it names a file that holds the value, for secrets.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import inspect

from protocol import schema
from protocol.errors import InvalidFileError, Problem

PREFIX: Final = "SKERRY_"
CONFIG_VARIABLE: Final = "SKERRY_CONFIG"
_FILE_BYTES_MAX: Final = 1 << 20
_SECRET: Final = re.compile(r"(^|_)(token|secret|password)$")
_PASSWORD_IN_URL: Final = re.compile(r"(://[^:/@\s]*:)[^@/\s]+@")

S = TypeVar("S", bound=msgspec.Struct)


class Loaded(msgspec.Struct, Generic[S], frozen=True):
    """Settings, and the origin of every value by dotted key; a key that is missing is a default."""

    values: S
    origins: dict[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, origin) of every setting, secrets blanked, in the order of the class."""
        for key, value in _flat(msgspec.to_builtins(self.values, enc_hook=str), ""):
            yield key, shown(key, value), self.origins.get(key, "default")


def load(
    kind: type[S],
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded[S]:
    """Fill `kind` from all sources; a later source wins, key by key.

    Args:
        kind: a class of settings; it may have `problems()` for rules between its fields.
        file: a TOML file, or None.
        env: variables, usually `os.environ`.
        flags: dotted key -> value; None means that the flag was not given.

    Raises:
        InvalidFileError: with every problem of every source.
    """
    root = class_type(kind)
    problems: list[Problem] = []
    tree = {} if file is None else _read_toml(file)
    origins = {key: f"file {file}" for key, _ in _flat(tree, "")}
    for name, raw in sorted((env or {}).items()):
        if found := _variable(root, name, raw, problems):
            path, value = found
            _put(tree, origins, path, value, f"environment {name}")
    for key, flag in (flags or {}).items():
        if flag is not None:
            path = key.split(".")
            target = _type_at(root, path)
            textual = isinstance(flag, str) and target is not None
            value = _from_text(flag, target) if textual and target else flag
            _put(tree, origins, path, value, f"flag --{key.replace('_', '-')}")
    reader = schema.Reader(root)
    values = msgspec.convert(reader.read(tree), kind, dec_hook=_make_path)
    problems += [_with_origin(problem, origins) for problem in reader.problems]
    between: Iterable[Problem] = getattr(values, "problems", tuple)()
    problems += [problem for problem in between if not reader.overlaps(problem.key)]
    if problems:
        raise InvalidFileError(
            f"these settings have {len(problems)} problem{'s' if len(problems) > 1 else ''}:",
            "`skerry config show` prints each value and where it came from.",
            problems=tuple(problems),
        )
    return Loaded(values, origins)


def environment() -> Mapping[str, str]:
    """The variables of this process."""
    return os.environ


def find_file(role: str, env: Mapping[str, str]) -> Path | None:
    """The settings file of a role when no --config was given: SKERRY_CONFIG, home, /etc."""
    if env.get(CONFIG_VARIABLE):
        return Path(env[CONFIG_VARIABLE])
    home = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or "/") / ".config")
    places = [home / "skerry" / f"{role}.toml", Path("/etc/skerry") / f"{role}.toml"]
    return next((place for place in places if place.is_file()), None)


def shown(key: str, value: Any) -> Any:
    """The value as it may be printed: secrets, and passwords in addresses, are blanked."""
    if _SECRET.search(key.rsplit(".", 1)[-1]):
        return "(set)" if value else "(not set)"
    return _PASSWORD_IN_URL.sub(r"\1***@", value) if isinstance(value, str) else value


def unknown_variables(env: Mapping[str, str], kinds: list[type[msgspec.Struct]]) -> list[str]:
    """`SKERRY_*` variables that no settings know: a typing error would go unnoticed."""
    known = {field for kind in kinds for field in kind.__struct_fields__} | {"config"}
    known |= {f"{field}_file" for field in known}
    return sorted(
        name
        for name in env
        if name.startswith(PREFIX) and name[len(PREFIX) :].lower().split("__")[0] not in known
    )


def class_type(kind: type[msgspec.Struct]) -> inspect.StructType:
    """The schema of a class of settings; paths are text in it, as in files and variables."""
    found = _paths_as_text(inspect.type_info(kind))
    assert isinstance(found, inspect.StructType)
    return found


def _paths_as_text(kind: inspect.Type) -> inspect.Type:
    replace = msgspec.structs.replace
    if isinstance(kind, inspect.CustomType) and issubclass(kind.cls, Path):
        return inspect.StrType()
    if isinstance(kind, inspect.Metadata):
        return replace(kind, type=_paths_as_text(kind.type))
    if isinstance(kind, inspect.UnionType):
        return replace(kind, types=tuple(map(_paths_as_text, kind.types)))
    if isinstance(kind, inspect.DictType):
        return replace(kind, value_type=_paths_as_text(kind.value_type))
    if isinstance(kind, inspect.StructType):
        fields = tuple(replace(one, type=_paths_as_text(one.type)) for one in kind.fields)
        return replace(kind, fields=fields)
    return kind


def _make_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value).expanduser()
    raise NotImplementedError(f"settings of type {kind}")  # as msgspec expects of a hook


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        raw = file.read_bytes()
        if len(raw) > _FILE_BYTES_MAX:
            raise InvalidFileError(f"{file} is larger than {_FILE_BYTES_MAX} bytes.")
        return tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise InvalidFileError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too deep
        raise InvalidFileError(f"{file} is not TOML in UTF-8: {error}.") from None


def _variable(
    root: inspect.StructType, name: str, raw: str, problems: list[Problem]
) -> tuple[list[str], Any] | None:
    """Path and value that a variable sets; None when it is about something else."""
    if not name.startswith(PREFIX) or name == CONFIG_VARIABLE:
        return None
    path = name[len(PREFIX) :].lower().split("__")
    kind = _type_at(root, path)
    if kind is None and path[-1].endswith("_file"):
        path[-1] = path[-1].removesuffix("_file")
        kind = _type_at(root, path)
        if kind is None:
            return None
        try:
            with Path(raw).open(encoding="utf-8") as file:
                raw = file.read(_FILE_BYTES_MAX).strip()
        except (OSError, UnicodeDecodeError) as error:
            allowed = f"the path of a file that can be read ({error})"
            problems.append(Problem(key=name, found=raw, allowed=allowed))
            return None
    return None if kind is None else (path, _from_text(raw, kind))


def _type_at(kind: inspect.Type, path: list[str]) -> inspect.Type | None:
    for name in path:
        kind = schema.plain(kind)
        if isinstance(kind, inspect.StructType):
            found = {field.encode_name: field.type for field in kind.fields}.get(name)
            if found is None:
                return None
            kind = found
        elif isinstance(kind, inspect.DictType):
            kind = kind.value_type
        else:
            return None
    return kind


def _from_text(raw: str, kind: inspect.Type) -> Any:
    """Text of a variable as the value it means; text that fits no type is left for the reader."""
    kind = schema.plain(kind)
    if isinstance(kind, inspect.UnionType):
        kinds = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
        return _from_text(raw, kinds[0]) if raw else None
    if isinstance(kind, inspect.BoolType):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return words.get(raw.lower(), raw)
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        convert = int if isinstance(kind, inspect.IntType) else float
        try:
            return convert(raw)
        except ValueError:
            return raw
    if isinstance(kind, (inspect.VarTupleType, inspect.TupleType)):
        item = kind.item_type if isinstance(kind, inspect.VarTupleType) else kind.item_types[0]
        return [_from_text(part.strip(), item) for part in raw.split(",") if part.strip()]
    if isinstance(kind, (inspect.DictType, inspect.StructType)):
        try:
            return tomllib.loads(f"value = {raw}")["value"]
        except ValueError:
            return raw
    return raw


def _put(
    tree: dict[str, Any], origins: dict[str, str], path: list[str], value: Any, origin: str
) -> None:
    for name in path[:-1]:
        below = tree.get(name)
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    tree[path[-1]] = value
    for key, _ in _flat({path[-1]: value}, ".".join([*path[:-1], ""]) if len(path) > 1 else ""):
        origins[key] = origin


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    found = str(shown(problem.key, problem.found))
    origin = origins.get(problem.key)
    return msgspec.structs.replace(problem, found=f"{found} ({origin})" if origin else found)

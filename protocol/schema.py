"""Plain values against msgspec classes: every problem at once, in words.

msgspec itself stops at the first problem. This walks the same classes, so types, bounds and
defaults stand in one place only, and goes on after each problem.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import NODEFAULT, inspect

from protocol.errors import Problem

_INT64: Final = 1 << 63
_FOUND_CHARS_MAX: Final = 60


class _Bad:
    """Stands for a value that cannot be taken."""


_BAD: Final = _Bad()


class Reader:
    """Reads a mapping for a struct type; collects problems instead of stopping.

    `touched` holds the keys that a problem is about, and for an unknown key also the one that was
    probably meant: rules between fields keep quiet about those.
    """

    def __init__(self, root: inspect.StructType) -> None:
        self._root = root
        self.problems: list[Problem] = []
        self.touched: set[str] = set()

    def read(self, value: Any) -> dict[str, Any]:
        """The fields that can be taken; required ones that cannot are filled with a stand-in."""
        taken: dict[str, Any] | _Bad = self._value(self._root, value, "")
        return dict(stand_in(self._root)) if isinstance(taken, _Bad) else taken

    def overlaps(self, key: str) -> bool:
        """True when a problem was found at, above or below this key."""
        return any(
            other in ("", key)
            or key.startswith((f"{other}.",))
            or other.startswith((f"{key}.", f"{key}["))
            for other in self.touched
        )

    def _problem(self, key: str, found: str, allowed: str) -> _Bad:
        self.problems.append(Problem(key=key or "(the whole file)", found=found, allowed=allowed))
        self.touched.add(key)
        return _BAD

    def _value(self, kind: inspect.Type, value: Any, key: str) -> Any:
        kind = plain(kind)
        if isinstance(kind, inspect.UnionType):
            fitting = [each for each in map(plain, kind.types) if _fits(each, value)]
            return value if fitting else self._problem(key, show(value), describe(kind))
        if not _fits(kind, value):
            return self._problem(key, show(value), describe(kind))
        if isinstance(kind, inspect.StructType):
            return self._struct(kind, value, key)
        if isinstance(kind, inspect.DictType):
            taken = {
                name: self._value(kind.value_type, item, join(key, name))
                for name, item in value.items()
            }
            return {name: item for name, item in taken.items() if item is not _BAD}
        if isinstance(kind, (inspect.VarTupleType, inspect.TupleType)):
            kinds = (
                kind.item_types
                if isinstance(kind, inspect.TupleType)
                else (kind.item_type,) * len(value)
            )
            items = [
                self._value(each, item, f"{key}[{index}]")
                for index, (each, item) in enumerate(zip(kinds, value, strict=True))
            ]
            return _BAD if _BAD in items else items
        return value

    def _struct(self, kind: inspect.StructType, value: Mapping[str, Any], key: str) -> Any:
        fields = {field.encode_name: field for field in kind.fields}
        for name in value:
            if name not in fields:
                self._unknown(join(key, name), name, fields, key)
        taken: dict[str, Any] = {}
        for name, field in fields.items():
            path = join(key, name)
            got: Any = _BAD
            if name in value:
                got = self._value(field.type, value[name], path)
            elif field.required:
                self._problem(path, "nothing", describe(field.type))
            if got is not _BAD:
                taken[name] = got
            elif field.required:
                taken[name] = stand_in(field.type)
        return taken

    def _unknown(
        self, path: str, name: str, fields: Mapping[str, inspect.Field], section: str
    ) -> None:
        near = [join(section, each) for each in difflib.get_close_matches(name, fields, n=1)]
        elsewhere = [each for each, _ in leaves(self._root) if each.rsplit(".", 1)[-1] == name]
        meant = near or elsewhere
        allowed = f"did you mean {' or '.join(meant)}?" if meant else ", ".join(fields)
        self._problem(path, "an unknown key", allowed)
        self.touched.update(meant)


def plain(kind: inspect.Type) -> inspect.Type:
    """A type without its description."""
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def join(section: str, name: str) -> str:
    """A dotted key, as TOML writes it."""
    part = name if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) else show(name)
    return f"{section}.{part}" if section else part


def leaves(root: inspect.StructType, section: str = "") -> Iterator[tuple[str, inspect.Field]]:
    """Every field that is not a section, with its dotted key, in the order of the classes."""
    for field in root.fields:
        key = join(section, field.encode_name)
        kind = plain(field.type)
        if isinstance(kind, inspect.StructType):
            yield from leaves(kind, key)
        else:
            yield key, field


def stand_in(kind: inspect.Type) -> Any:
    """Some value of a required field's type, so that the rest can still be looked at."""
    kind = plain(kind)
    if isinstance(kind, inspect.StructType):
        return {field.encode_name: stand_in(field.type) for field in kind.fields if field.required}
    if isinstance(kind, inspect.StrType):
        return "?"
    raise TypeError(f"a required field of type {kind} needs a stand-in here.")


def default(field: inspect.Field) -> Any:
    """A field's default; None when there is none or it is required."""
    if field.default is not NODEFAULT:
        return field.default
    return field.default_factory() if field.default_factory is not NODEFAULT else None


def show(value: Any) -> str:
    """A value of a file, short, as its writer would recognise it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"a table of {len(value)} keys"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= _INT64:
        return "a whole number beyond 64 bits"
    text = repr(value) if isinstance(value, (str, int, float)) else str(value)
    return text if len(text) <= _FOUND_CHARS_MAX else f"{text[:_FOUND_CHARS_MAX]}..."


def describe(kind: inspect.Type) -> str:
    """What a field may hold, in words: type and bounds."""
    kind = plain(kind)
    if isinstance(kind, inspect.UnionType):
        known = [describe(each) for each in kind.types if not isinstance(each, inspect.NoneType)]
        return " or ".join(known)
    if isinstance(kind, inspect.LiteralType):
        return ("one of " if len(kind.values) > 1 else "only ") + ", ".join(map(repr, kind.values))
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return f"text{_text_bounds(kind)}"
    if isinstance(kind, inspect.IntType):
        return f"a whole number{_bounds(kind)}"
    if isinstance(kind, inspect.FloatType):
        return f"a finite number{_bounds(kind)}"
    if isinstance(kind, inspect.VarTupleType):
        return f"a list of {describe(kind.item_type)}"
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)}, each {describe(kind.item_types[0])}"
    if isinstance(kind, inspect.DictType):
        return f"a table of {describe(kind.value_type)}"
    if isinstance(kind, inspect.StructType):
        return "a table"
    raise TypeError(f"the schema uses a type that has no words yet: {kind}")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:.12g} to {kind.le}"
    signs = {">=": kind.ge, ">": kind.gt, "<=": kind.le, "<": kind.lt}
    said = [f"{sign} {bound:.12g}" for sign, bound in signs.items() if bound is not None]
    return " " + " and ".join(said) if said else ""


def _text_bounds(kind: inspect.StrType) -> str:
    if kind.pattern is not None:
        return f" of the form {kind.pattern}"
    if kind.max_length is not None:
        return f" of {kind.min_length or 0} to {kind.max_length} characters"
    return ""


def _fits(kind: inspect.Type, value: Any) -> bool:
    """True when a value has the right kind and, for a scalar, lies within its bounds."""
    if isinstance(kind, inspect.NoneType):
        return value is None
    if isinstance(kind, inspect.LiteralType):
        return isinstance(value, str) and value in kind.values
    if isinstance(kind, inspect.BoolType):
        return isinstance(value, bool)
    if isinstance(kind, inspect.StrType):
        return isinstance(value, str) and _text_fits(kind, value)
    if isinstance(kind, inspect.IntType):
        return isinstance(value, int) and not isinstance(value, bool) and _within(kind, value)
    if isinstance(kind, inspect.FloatType):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and _within(kind, value)
    if isinstance(kind, (inspect.StructType, inspect.DictType)):
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if isinstance(kind, inspect.VarTupleType):
        return isinstance(value, (list, tuple))
    if isinstance(kind, inspect.TupleType):
        return isinstance(value, (list, tuple)) and len(value) == len(kind.item_types)
    raise TypeError(f"the schema uses a type that cannot be checked yet: {kind}")


def _within(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return False
    return (
        math.isfinite(value)
        and (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def _text_fits(kind: inspect.StrType, value: str) -> bool:
    return (
        (kind.min_length is None or len(value) >= kind.min_length)
        and (kind.max_length is None or len(value) <= kind.max_length)
        and (kind.pattern is None or re.search(kind.pattern, value) is not None)
    )

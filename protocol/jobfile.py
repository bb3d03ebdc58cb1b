"""Reads a job file: TOML text to a `JobSpec`, or every problem at once.

Each problem has its key, what was found and what is allowed. Types and bounds come from the classes
of `jobspec`, rules between fields from `jobrules`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from protocol import limits
from protocol.errors import InvalidFileError, LimitError, Problem, UsageError
from protocol.jobrules import RULES, warnings
from protocol.jobspec import JobSpec
from protocol.names import clean_name
from protocol.schema import Reader

_HINT: Final = "docs/job.md lists every key with its bounds and its default."


def job_type() -> inspect.StructType:
    """The schema of a job file."""
    found = inspect.type_info(JobSpec)
    assert isinstance(found, inspect.StructType)
    return found


_JOB: Final = job_type()


class Examined(NamedTuple):
    """A job as far as it could be read, and what is wrong with it."""

    spec: JobSpec
    problems: tuple[Problem, ...]


def parse(text: str, *, where: str) -> JobSpec:
    """The job in a TOML text; names are brought into their canonical form.

    `where` names the text in the error, usually the file's path.

    Raises:
        InvalidFileError: with every problem that it has.
        LimitError: the text is larger than JOB_FILE_BYTES_MAX.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > limits.JOB_FILE_BYTES_MAX:
        raise LimitError(
            f"{where} has {size} bytes; a job file has at most {limits.JOB_FILE_BYTES_MAX}.",
            details={"limit": limits.JOB_FILE_BYTES_MAX, "found": size},
        )
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise _invalid(where, (_syntax("values nested too deeply"),)) from None
    except tomllib.TOMLDecodeError as error:
        raise _invalid(where, (_syntax(str(error)),)) from None
    except ValueError:  # Python refuses to read a whole number of more than 4300 digits
        raise _invalid(where, (_syntax("a number with thousands of digits"),)) from None
    return from_mapping(data, where=where)


def from_mapping(data: Mapping[str, Any], *, where: str = "the job") -> JobSpec:
    """The job in plain values, as TOML or JSON give them.

    Raises:
        InvalidFileError: with every problem that it has.
    """
    spec, problems = examine(_with_canonical_names(data))
    if problems:
        raise _invalid(where, problems)
    return spec


def validate(spec: JobSpec) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Problems and warnings of a job that came as a value; no problems means it can be taken."""
    return examine(msgspec.to_builtins(spec)).problems, warnings(spec)


def examine(data: Mapping[str, Any]) -> Examined:
    """Read as far as possible. The job is only good when there are no problems."""
    reader = Reader(_JOB)
    spec = msgspec.convert(reader.read(data), JobSpec)
    problems = list(reader.problems)
    for rule in RULES:
        if not any(reader.overlaps(key) for key in rule.keys):
            problems += rule.check(spec)
    return Examined(spec, tuple(problems))


def _invalid(where: str, problems: tuple[Problem, ...]) -> InvalidFileError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return InvalidFileError(f"{where} has {count}:", _HINT, problems=problems)


def _syntax(message: str) -> Problem:
    line = re.search(r"\(at (line \d+), column \d+\)|\(at (end of document)\)", message)
    key = (line[1] or line[2]) if line else "(the whole file)"
    return Problem(key=key, found=message[:200], allowed="TOML 1.0")


def _with_canonical_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Names typed by people, normalised where that is possible; the rest is left to the rules."""
    found = dict(data)
    found["name"] = _canonical(found.get("name"))
    for section, key in (("task", "name"), ("sites", "names")):
        inner = found.get(section)
        if isinstance(inner, Mapping) and key in inner:
            value = inner[key]
            names = [_canonical(each) for each in value] if isinstance(value, list) else value
            found[section] = {**inner, key: _canonical(names)}
    if found["name"] is None:
        del found["name"]
    return found


def _canonical(name: Any) -> Any:
    try:
        return clean_name(name, "name") if isinstance(name, str) else name
    except UsageError:
        return name

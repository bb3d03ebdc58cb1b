"""How task code is named and hashed, without importing it and without torch.

A reference is one of

    path/to/task.py:Class    a file, and the class in it
    path/to/task.py          a file with a single Task class
    package.module:Class     an installed module

The hash of a file is the sha256 of its bytes. The hash of an installed package covers every `.py`
file of its top-level package, with relative names, so that a change anywhere in it is seen.
What a file imports beside itself is not covered: those files are the site owner's own.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import msgspec

from protocol.errors import NotFoundError, UsageError


class TaskReference(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed reference: exactly one of `path` and `module` is set; `name` may be empty."""

    path: Path | None = None
    module: str = ""
    name: str = ""


def parse_ref(reference: str, base: Path | None = None) -> TaskReference:
    """Parse a reference; a relative path is taken from `base` (default: the current folder).

    Raises:
        UsageError: it is in none of the three forms.
    """
    where, _, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if name and not name.isidentifier():
        where, name = reference, ""
    if where.endswith(".py"):
        path = Path(where).expanduser()
        return TaskReference(path=path if base is None else base / path, name=name)
    if name and all(piece.isidentifier() for piece in where.split(".")):
        return TaskReference(module=where, name=name)
    raise UsageError(
        f"{reference!r} does not name a task.",
        "Write path/to/task.py:Class, path/to/task.py or package.module:Class.",
    )


def hash_task(reference: str, base: Path | None = None) -> str:
    """sha256 (64 hex digits) of the code that a reference names; nothing of it is run.

    Raises:
        UsageError: the reference cannot be parsed.
        NotFoundError: no such file or module.
    """
    parsed = parse_ref(reference, base)
    if parsed.path is not None:
        return _hash_file(parsed.path)
    top = parsed.module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)  # of a top-level name: finds it, imports nothing
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise NotFoundError(
            f"the module {top!r} of the task {reference!r} is not installed here.",
            "Install it into the environment of the agent, or name a .py file.",
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if folders:
        return _hash_package(folders)
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise NotFoundError(f"the module {top!r} of the task {reference!r} has no source file.")
    return _hash_file(Path(spec.origin))


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NotFoundError(f"the task's file {path} cannot be read: {error.strerror}.") from None


def _hash_package(folders: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    files = {path.relative_to(folder).as_posix(): path for folder in folders
             for path in folder.rglob("*.py")}  # fmt: skip
    if not files:
        raise NotFoundError(f"the package in {', '.join(map(str, folders))} has no .py files.")
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0{_hash_file(path)}\n".encode())
    return digest.hexdigest()

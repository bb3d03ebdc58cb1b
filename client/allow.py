"""Which task code the owner of this site lets run.

The coordinator names a task and the hash that the job was submitted with. What runs is the file
that the owner named, and only if its hash, taken now, is the job's and the owner's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from client.agentsettings import TaskSettings
from client.sitefiles import path_of, text_of
from client.taskref import hash_task, parse_ref
from protocol.errors import SkerryError
from protocol.jobspec import TaskRef


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """The code to run, with absolute paths, and the owner's settings for it."""

    reference: str
    sha256: str
    data: str
    options: dict[str, str]


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence for the person who submitted the job."""

    reason: str


class AllowList:
    """The owner's `[tasks]`. Relative paths start at `base`."""

    def __init__(self, tasks: Mapping[str, TaskSettings], base: Path) -> None:
        self._tasks = dict(tasks)
        self.base = base.absolute()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all allowed tasks."""
        return tuple(sorted(self._tasks))

    def decide(self, spec: TaskRef) -> Allowed | Refused:
        """Judge a job's task by its name and by the hash of the code that lies here now."""
        owned = self._tasks.get(spec.name)
        if owned is None:
            listed = ", ".join(self.names) or "none"
            return Refused(
                reason=f"the owner of this site has not allowed the task {spec.name!r} (allowed: "
                f'{listed}). To allow it, the owner adds [tasks."{spec.name}"] to the agent\'s '
                "settings."
            )
        try:
            found = hash_task(str(path_of(owned.reference)), self.base)
            reference = text_of(self._absolute(owned.reference))
        except SkerryError as error:
            return Refused(reason=f"the task {spec.name!r} cannot be read here: {error}")
        if owned.sha256 and owned.sha256 != found:
            return Refused(
                reason=f"the code of the task {spec.name!r} at this site is not what its owner "
                f"approved: it has the hash {found}, approved is {owned.sha256}."
            )
        if spec.sha256 and spec.sha256 != found:
            return Refused(
                reason=f"the task {spec.name!r} of the job has the hash {spec.sha256}, the one at "
                f"this site has {found}: install the same version at both."
            )
        data = text_of(self.base / Path(owned.data).expanduser()) if owned.data else ""
        return Allowed(reference=reference, sha256=found, data=data, options=owned.options)

    def _absolute(self, reference: str) -> str:
        parsed = parse_ref(reference, self.base)
        if parsed.path is None:
            return reference
        return f"{parsed.path}:{parsed.name}" if parsed.name else str(parsed.path)

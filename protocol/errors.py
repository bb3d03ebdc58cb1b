"""Every error that crosses a boundary.

    SkerryError
    ├── UsageError          the caller's mistake: wrong flag, wrong call           exit 2  http 400
    │   └── InvalidFileError    a file with problems, all of them listed           exit 2  http 422
    ├── UnreachableError    nobody answers, or somebody who is not a coordinator   exit 3  http 503
    ├── RefusedError        understood and refused: not allowed, not now           exit 4  http 403
    │   ├── UnauthenticatedError   no credential, or a wrong one                   exit 4  http 401
    │   ├── ConflictError          it clashes with what is already there           exit 4  http 409
    │   ├── RemovedError           this identity or job is gone for good           exit 4  http 410
    │   ├── LimitError             above a limit; names limit, value and setting   exit 4  http 413
    │   ├── VersionError           the two protocols cannot talk                   exit 4  http 426
    │   ├── MalformedError         bytes that are not what they claim to be        exit 4  http 400
    │   └── BusyError              try again later                                 exit 4  http 429
    ├── NotFoundError       no such job, site, token or version                    exit 5  http 404
    └── JobFailedError      the job itself ended badly                             exit 1  http 409

`message` is a whole sentence that says what is wrong; `hint` says what to do now.
"""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong in a file: its key, what was found, and what is allowed."""

    key: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.key}: found {self.found}; allowed: {self.allowed}"


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as JSON, the body of every HTTP answer with a status of 400 and above."""

    error: str
    message: str
    hint: str = ""
    problems: tuple[Problem, ...] = ()
    details: dict[str, str | int | float | None] = {}


class SkerryError(Exception):
    """Base of all errors meant for people. Never raised itself."""

    http_status = 500
    exit_code = 1

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        problems: tuple[Problem, ...] = (),
        details: dict[str, str | int | float | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = problems
        self.details = details or {}

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.hint:
            lines.append(self.hint)
        return "\n".join(lines)

    def body(self) -> ErrorBody:
        """The same error as a JSON value."""
        return ErrorBody(
            error=type(self).__name__,
            message=self.message,
            hint=self.hint,
            problems=self.problems,
            details=self.details,
        )


class UsageError(SkerryError):
    """The caller asked for something that makes no sense."""

    http_status = 400
    exit_code = 2


class InvalidFileError(UsageError):
    """A file with problems; `problems` holds every one of them."""

    http_status = 422


class UnreachableError(SkerryError):
    """Nobody answers at the address, or what answers is not a coordinator."""

    http_status = 503
    exit_code = 3


class RefusedError(SkerryError):
    """Understood, and refused."""

    http_status = 403
    exit_code = 4


class UnauthenticatedError(RefusedError):
    """No credential, or one that is not known."""

    http_status = 401


class ConflictError(RefusedError):
    """It clashes with what is already there."""

    http_status = 409


class RemovedError(RefusedError):
    """This identity or job was removed; trying again will not help."""

    http_status = 410


class LimitError(RefusedError):
    """Above a limit. The message names the limit, the value found and the setting to change."""

    http_status = 413


class VersionError(RefusedError):
    """The two protocol versions cannot talk; the message holds both numbers."""

    http_status = 426


class MalformedError(RefusedError):
    """Bytes that are not what they claim to be: a bad frame, a bad checksum, unknown JSON."""

    http_status = 400


class BusyError(RefusedError):
    """Too much at once; the same call may succeed later."""

    http_status = 429


class NotFoundError(SkerryError):
    """No such job, site, token or version."""

    http_status = 404
    exit_code = 5


class JobFailedError(SkerryError):
    """The job itself ended in the state failed."""

    http_status = 409
    exit_code = 1


def _tree(root: type[SkerryError]) -> dict[str, type[SkerryError]]:
    known = {root.__name__: root}
    for child in root.__subclasses__():
        known |= _tree(child)
    return known


def from_body(body: ErrorBody, http_status: int) -> SkerryError:
    """The error that a peer answered with; an unknown name falls back on its HTTP status."""
    known = _tree(SkerryError)
    by_status = {kind.http_status: kind for kind in known.values()}
    kind = known.get(body.error) or by_status.get(http_status, SkerryError)
    return kind(body.message, body.hint, problems=body.problems, details=dict(body.details))

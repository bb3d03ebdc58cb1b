"""Who is asking, and may they: bearer credentials, roles, and a brake on guessing.

Credentials are 256-bit random secrets; the engine knows their hashes and compares in constant time.
A valid credential always passes, however many wrong ones came from the same address before: sites
behind one NAT must not be able to lock each other out. The brake spares the log and the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from coordinator.engine import ApiAccount, ApiRole, SiteAccount
from protocol.errors import BusyError, RefusedError, UnauthenticatedError

log = logging.getLogger(__name__)

Role = Literal["none", "site", "viewer", "operator", "admin"]
RANK: Final[dict[ApiRole, int]] = {"viewer": 1, "operator": 2, "admin": 3}
CREDENTIAL_CHARS_MAX: Final = 512
_ADDRESSES_MAX: Final = 4096
_WINDOW_SECONDS: Final = 60.0


class Caller(NamedTuple):
    """Who asks: a site of the agents' listener, or a person; `name` is empty for anybody."""

    name: str = ""
    role: Role = "none"
    evaluator: bool = False


class Registry(Protocol):
    """What this module needs of the engine."""

    def authenticate_site(self, secret: str) -> SiteAccount:
        """The site that holds this secret."""

    def authenticate_person(self, token: str) -> ApiAccount:
        """The person who holds this token."""


class Brake:
    """Counts wrong credentials per address in a sliding minute."""

    def __init__(self, failures_max: int, clock: Callable[[], float]) -> None:
        self._most = failures_max
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}  # address -> start, failures

    def failed(self, address: str) -> None:
        """Note a failure."""
        now = self._clock()
        start, failures = self._windows.pop(address, (now, 0))
        if now - start >= _WINDOW_SECONDS:
            start, failures = now, 0
        while len(self._windows) >= _ADDRESSES_MAX:
            self._windows.pop(next(iter(self._windows)))
        self._windows[address] = (start, failures + 1)
        if failures + 1 == self._most:
            log.warning("%d wrong credentials within a minute from %s.", self._most, address)

    def check(self, address: str) -> None:
        """Refuse an address with too many failures.

        Raises:
            BusyError: with the seconds to wait.
        """
        start, failures = self._windows.get(address, (0.0, 0))
        left = start + _WINDOW_SECONDS - self._clock()
        if failures >= self._most and left > 0:
            raise BusyError(
                f"{failures} wrong credentials came from this address within a minute.",
                f"Try again in {left:.0f} s.",
                details={"retry_after_seconds": round(left, 1)},
            )


def bearer(header: str | None) -> str:
    """The credential of an `Authorization` header.

    Raises:
        UnauthenticatedError: none there, or not a bearer credential.
    """
    scheme, _, credential = (header or "").partition(" ")
    credential = credential.strip()
    if scheme.lower() != "bearer" or not credential:
        raise UnauthenticatedError(
            "this needs a credential.", "Send it as `Authorization: Bearer ...`."
        )
    if len(credential) > CREDENTIAL_CHARS_MAX or not credential.isascii():
        raise UnauthenticatedError("this credential is not known here.")
    return credential


def authenticate(
    need: Role, header: str | None, address: str, registry: Registry, brake: Brake
) -> Caller:
    """Who asks, with enough rights for `need`.

    Raises:
        UnauthenticatedError: no credential, or an unknown one.
        RemovedError: the site was revoked.
        RefusedError: the credential is good, its role is not enough.
        BusyError: too many wrong ones from this address.
    """
    if need == "none":
        return Caller()
    try:
        credential = bearer(header)
        if need == "site":
            site = registry.authenticate_site(credential)
            return Caller(site.name, "site", site.role == "evaluator")
        person = registry.authenticate_person(credential)
    except UnauthenticatedError:
        brake.check(address)
        brake.failed(address)
        raise
    if RANK[person.role] < RANK[need]:
        raise RefusedError(
            f"this needs the role {need}; {person.name} is {person.role}.",
            "Use a token with that role.",
        )
    return Caller(person.name, person.role)

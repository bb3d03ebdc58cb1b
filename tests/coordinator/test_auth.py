"""Credentials, roles, and the brake on guessing."""

from __future__ import annotations

import pytest

from coordinator.auth import CREDENTIAL_CHARS_MAX, Brake, authenticate, bearer
from coordinator.engine import ApiAccount, SiteAccount
from protocol.errors import BusyError, RefusedError, UnauthenticatedError


class Registry:
    def authenticate_site(self, secret: str) -> SiteAccount:
        if secret != "site-secret":
            raise UnauthenticatedError("unknown.")
        return SiteAccount(name="edge-1", role="evaluator", state="active", public_key="")

    def authenticate_person(self, token: str) -> ApiAccount:
        if token != "viewer-token":
            raise UnauthenticatedError("unknown.")
        return ApiAccount(name="v", role="viewer")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "token abc", "Bearer é"]
)
def test_what_is_no_bearer_credential_is_refused(header: str | None):
    with pytest.raises(UnauthenticatedError):
        bearer(header)


def test_a_credential_of_any_length_is_not_looked_up():
    with pytest.raises(UnauthenticatedError):
        bearer("Bearer " + "a" * (CREDENTIAL_CHARS_MAX + 1))


def test_the_scheme_is_taken_in_any_case():
    assert bearer("bearer abc") == "abc"


def test_a_site_is_who_its_secret_says_and_keeps_its_role():
    brake = Brake(3, Clock())
    caller = authenticate("site", "Bearer site-secret", "a", Registry(), brake)
    assert (caller.name, caller.role, caller.evaluator) == ("edge-1", "site", True)


def test_a_person_with_too_little_rights_is_told_what_is_needed():
    with pytest.raises(RefusedError, match="needs the role admin; v is viewer"):
        authenticate("admin", "Bearer viewer-token", "a", Registry(), Brake(3, Clock()))


def test_wrong_credentials_are_slowed_down_but_a_right_one_always_passes():
    clock = Clock()
    brake = Brake(3, clock)

    def attempt(credential: str, address: str = "a") -> None:
        authenticate("viewer", f"Bearer {credential}", address, Registry(), brake)

    for _ in range(3):
        with pytest.raises(UnauthenticatedError):
            attempt("wrong")
    with pytest.raises(BusyError, match="3 wrong credentials") as refused:
        attempt("wrong")
    assert refused.value.details["retry_after_seconds"] == 60.0
    attempt("viewer-token")
    with pytest.raises(UnauthenticatedError):
        attempt("wrong", "another address")
    clock.now += 60.0
    with pytest.raises(UnauthenticatedError):
        attempt("wrong")


def test_failures_are_logged_once_however_many_come(caplog: pytest.LogCaptureFixture):
    brake = Brake(3, Clock())
    for _ in range(50):
        brake.failed("a")
    assert len(caplog.records) == 1


def test_many_addresses_do_not_fill_the_memory():
    brake = Brake(1, Clock())
    for number in range(10_000):
        brake.failed(f"address {number}")
    assert len(brake._windows) <= 4096
    with pytest.raises(BusyError):
        brake.check("address 9999")
    brake.check("address 0")

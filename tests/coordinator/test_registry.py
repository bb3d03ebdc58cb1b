"""Join tokens are good once, secrets are kept as hashes, revoked means revoked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.registry import Registry
from coordinator.store import Store, sqlite_url
from protocol.errors import (
    ConflictError,
    NotFoundError,
    RemovedError,
    UnauthenticatedError,
    UsageError,
)
from protocol.messages import Join
from protocol.views import TokenRequest


class Desk:
    """A registry on a database of its own, with a clock to turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.store = Store(sqlite_url(folder / "db"))
        self.registry = Registry(self.store, lambda: self.now)

    async def open(self) -> None:
        await self.store.open()
        await self.registry.open(self.folder / "admin-token")

    async def join(self, name: str, *, site: str = "", key: str = "aa" * 32) -> Join:
        secret, view = await self.registry.create_token(TokenRequest(site=site), by="me")
        return Join(
            token_id=view.id, token_secret=secret, name=name, public_key=key, proof="checked before"
        )


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(tmp_path)
    await made.open()
    yield made
    await made.store.close()


async def test_the_first_start_makes_an_admin_token_that_only_its_owner_reads(desk: Desk) -> None:
    path = desk.folder / "admin-token"
    assert path.stat().st_mode & 0o777 == 0o600
    account = desk.registry.authenticate_person(path.read_text().strip())
    assert (account.name, account.role) == ("admin", "admin")


async def test_replacing_the_admin_file_replaces_the_token(desk: Desk) -> None:
    path = desk.folder / "admin-token"
    old = path.read_text().strip()
    path.unlink()
    again = Registry(desk.store)
    await again.open(path)
    new = path.read_text().strip()
    assert new != old
    assert again.authenticate_person(new).role == "admin"
    with pytest.raises(UnauthenticatedError):
        again.authenticate_person(old)


async def test_an_open_admin_file_is_closed_and_an_empty_one_refused(desk: Desk) -> None:
    path = desk.folder / "admin-token"
    path.chmod(0o644)
    await Registry(desk.store).open(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("")
    with pytest.raises(UsageError, match="holds no token"):
        await Registry(desk.store).open(path)


async def test_people_have_roles_and_lose_them(desk: Desk) -> None:
    token = await desk.registry.add_person("vera", "viewer")
    assert desk.registry.authenticate_person(token).role == "viewer"
    with pytest.raises(ConflictError):
        await desk.registry.add_person("vera", "admin")
    again = Registry(desk.store)
    await again.open(desk.folder / "admin-token")
    assert again.authenticate_person(token).name == "vera"
    await desk.registry.remove_person("vera")
    with pytest.raises(UnauthenticatedError):
        desk.registry.authenticate_person(token)
    for name in ("vera", "admin"):
        with pytest.raises(NotFoundError):
            await desk.registry.remove_person(name)


async def test_a_site_joins_and_is_known_by_its_secret_also_after_a_restart(desk: Desk) -> None:
    name, secret = await desk.registry.redeem(await desk.join("病院-3"))
    assert name == "病院-3"
    again = Registry(desk.store)
    await again.open(desk.folder / "admin-token")
    for registry in (desk.registry, again):
        assert registry.authenticate_site(secret).name == "病院-3"
        with pytest.raises(UnauthenticatedError):
            registry.authenticate_site(secret[:-1])


async def test_no_secret_lies_in_the_database(desk: Desk) -> None:
    join = await desk.join("a")
    _, secret = await desk.registry.redeem(join)
    person = await desk.registry.add_person("vera", "viewer")
    await desk.store.close()
    stored = b"".join(path.read_bytes() for path in desk.folder.glob("db*"))
    for text in (secret, join.token_secret, person):
        assert text.encode() not in stored


async def test_of_many_who_race_with_one_token_exactly_one_wins(desk: Desk) -> None:
    join = await desk.join("a")
    results = await asyncio.gather(
        *(desk.registry.redeem(join) for _ in range(12)), return_exceptions=True
    )
    won = [result for result in results if isinstance(result, tuple)]
    assert len(won) == 1
    assert all(isinstance(result, (tuple, ConflictError)) for result in results)
    assert desk.registry.authenticate_site(won[0][1]).name == "a"
    token = (await desk.registry.tokens()).tokens[0]
    assert (token.used_by, token.used_at) == ("a", 1000.0)


async def test_tokens_that_are_no_good_say_why(desk: Desk) -> None:
    join = await desk.join("a", site="b")
    with pytest.raises(ConflictError, match="for site 'b', not for 'a'"):
        await desk.registry.redeem(join)
    join = await desk.join("a")
    with pytest.raises(UnauthenticatedError):
        await desk.registry.redeem(Join(**{**_fields(join), "token_secret": "00" * 32}))
    with pytest.raises(UnauthenticatedError):
        await desk.registry.redeem(Join(**{**_fields(join), "token_id": "nobody"}))
    with pytest.raises(ConflictError, match="for the role site, not for evaluator"):
        await desk.registry.redeem(Join(**{**_fields(join), "role": "evaluator"}))
    desk.now += 3601.0
    with pytest.raises(ConflictError, match="expired"):
        await desk.registry.redeem(join)
    join = await desk.join("a")
    await desk.registry.revoke_token(join.token_id)
    with pytest.raises(ConflictError, match="revoked"):
        await desk.registry.redeem(join)
    with pytest.raises(NotFoundError):
        await desk.registry.revoke_token("nobody")
    with pytest.raises(UsageError, match="ttl_seconds"):
        await desk.registry.create_token(TokenRequest(ttl_seconds=1e9), by="me")
    assert desk.registry.sites() == []


def _fields(join: Join) -> dict[str, str]:
    return {name: getattr(join, name) for name in join.__struct_fields__}


async def test_a_name_belongs_to_its_key_until_it_is_revoked(desk: Desk) -> None:
    _, first = await desk.registry.redeem(await desk.join("a"))
    with pytest.raises(ConflictError, match="another key"):
        await desk.registry.redeem(await desk.join("a", key="bb" * 32))
    _, second = await desk.registry.redeem(await desk.join("a"))  # the same key, a lost secret
    with pytest.raises(UnauthenticatedError):
        desk.registry.authenticate_site(first)
    await desk.registry.set_site("a", state="revoked")
    with pytest.raises(RemovedError, match="revoked"):
        desk.registry.authenticate_site(second)
    _, third = await desk.registry.redeem(await desk.join("a", key="bb" * 32))
    assert desk.registry.authenticate_site(third).public_key == "bb" * 32


async def test_changes_of_a_site_are_stored(desk: Desk) -> None:
    await desk.registry.redeem(await desk.join("a"))
    await desk.registry.set_site("a", tasks=("x", "y"), software="9")
    again = Registry(desk.store)
    await again.open(desk.folder / "admin-token")
    assert (again.site("a").tasks, again.site("a").software) == (("x", "y"), "9")
    with pytest.raises(NotFoundError):
        await desk.registry.set_site("b", state="revoked")

"""Who is known here: sites, join tokens, people. Of every secret only the sha256 is kept.

Sites and people are few and asked for on every request, so they are held in memory and written
through; a join token is used up by one conditional UPDATE, so two who race cannot both win.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Final, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import tables
from coordinator.disk import write_atomically
from coordinator.store import Store
from privacy.tokens import hash_secret, new_secret, secret_matches
from protocol import limits
from protocol.errors import (
    ConflictError,
    NotFoundError,
    RemovedError,
    UnauthenticatedError,
    UsageError,
)
from protocol.messages import Join, SiteRole
from protocol.names import clean_name
from protocol.views import TokenList, TokenRequest, TokenView

log = logging.getLogger("coordinator.registry")

ApiRole = Literal["viewer", "operator", "admin"]
SiteState = Literal["active", "drained", "revoked"]
FIRST_ADMIN: Final = "admin"
_TOKENS_SHOWN: Final = 1_000
_DUMMY_HASH: Final = hash_secret("nobody")


class SiteAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A site as the registry knows it."""

    name: str
    role: SiteRole
    state: SiteState
    public_key: str
    software: str = ""
    tasks: tuple[str, ...] = ()
    joined_at: float = 0.0


class ApiAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Who a person's token stands for."""

    name: str
    role: ApiRole


class Registry:
    """Sites, join tokens and people."""

    def __init__(self, store: Store, clock: Callable[[], float] = time) -> None:
        self._store = store
        self._clock = clock
        self._sites: dict[str, SiteAccount] = {}
        self._site_by_hash: dict[str, str] = {}
        self._people: dict[str, ApiAccount] = {}  # by hash

    async def open(self, admin_file: Path) -> None:
        """Load; on the first start make the admin's token and write it to `admin_file` (0600)."""

        async def work(connection: AsyncConnection) -> None:
            for row in await connection.execute(sa.select(tables.sites)):
                self._remember(
                    SiteAccount(
                        name=row.name,
                        role=row.role,
                        state=row.state,
                        public_key=row.public_key,
                        software=row.software,
                        tasks=msgspec.json.decode(row.tasks, type=tuple[str, ...]),
                        joined_at=row.joined_at,
                    ),
                    row.secret_hash,
                )
            for row in await connection.execute(sa.select(tables.people)):
                self._people[row.secret_hash] = ApiAccount(name=row.name, role=row.role)

        await self._store.read(work)
        await self._open_admin_file(admin_file)

    async def _open_admin_file(self, path: Path) -> None:
        # The file is the truth for this one account: whoever replaces it replaces the token.
        if path.exists():
            token = path.read_text(encoding="ascii").strip()
            if path.stat().st_mode & 0o077:
                log.warning("%s can be read by others; it is closed to them now.", path)
                path.chmod(0o600)
            if len(token) < len(new_secret("api")):
                raise UsageError(
                    f"{path} holds no token.", "Remove the file: a new one is made at the start."
                )
        else:
            token = new_secret("api")
            write_atomically(path, f"{token}\n".encode(), mode=0o600)
            log.info("the admin's token lies in %s", path)
        if self._people.get(hash_secret(token)) != ApiAccount(name=FIRST_ADMIN, role="admin"):
            await self._set_person(FIRST_ADMIN, "admin", token)

    def _remember(self, site: SiteAccount, secret_hash: str) -> None:
        self._sites[site.name] = site
        if secret_hash:
            self._site_by_hash[secret_hash] = site.name

    # ------------------------------------------------------------ who asks

    def authenticate_site(self, secret: str) -> SiteAccount:
        """The site that holds `secret`.

        Raises:
            UnauthenticatedError: nobody does.
            RemovedError: the site was revoked.
        """
        name = self._site_by_hash.get(hash_secret(secret))
        if name is None:
            raise UnauthenticatedError(
                "this site's credential is not known here.",
                "Join with a new token (`skerry join`).",
            )
        site = self._sites[name]
        if site.state == "revoked":
            raise RemovedError(
                f"site {name!r} was revoked at the coordinator.",
                "Ask the operator for a new join token if this was not meant.",
            )
        return site

    def authenticate_person(self, token: str) -> ApiAccount:
        """The person who holds `token`.

        Raises:
            UnauthenticatedError: nobody does.
        """
        person = self._people.get(hash_secret(token))
        if person is None:
            raise UnauthenticatedError(
                "this API token is not known here.",
                "The first one lies in the coordinator's data_dir, in the file admin-token.",
            )
        return person

    # ------------------------------------------------------------ sites

    def site(self, name: str) -> SiteAccount:
        """A site by name; NotFoundError."""
        found = self._sites.get(name)
        if found is None:
            raise NotFoundError(f"there is no site {name!r} here.", "`skerry site list` shows all.")
        return found

    def sites(self) -> list[SiteAccount]:
        """All sites, by name."""
        return [self._sites[name] for name in sorted(self._sites)]

    async def set_site(
        self,
        name: str,
        *,
        state: SiteState | None = None,
        software: str | None = None,
        tasks: tuple[str, ...] | None = None,
    ) -> None:
        """Change what is given; NotFoundError. Nothing is written when nothing changes."""
        held = self.site(name)
        site = msgspec.structs.replace(
            held,
            state=held.state if state is None else state,
            software=held.software if software is None else software,
            tasks=held.tasks if tasks is None else tasks,
        )
        if site == held:
            return
        stored = {
            "state": site.state,
            "software": site.software,
            "tasks": msgspec.json.encode(site.tasks).decode(),
        }

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(
                sa.update(tables.sites).where(tables.sites.c.name == name).values(**stored)
            )

        await self._store.write(work)
        self._sites[name] = site

    # ------------------------------------------------------------ join tokens

    async def create_token(self, request: TokenRequest, *, by: str) -> tuple[str, TokenView]:
        """A new join token: (its secret, hex; its view)."""
        if not 0 < request.ttl_seconds <= limits.TOKEN_TTL_SECONDS_MAX:
            raise UsageError(
                f"ttl_seconds is {request.ttl_seconds:g}; a join token lives for at most "
                f"{limits.TOKEN_TTL_SECONDS_MAX:g} s."
            )
        secret = secrets.token_hex(32)
        now = self._clock()
        view = TokenView(
            id=secrets.token_hex(8),
            site=clean_name(request.site, "site name") if request.site else "",
            role=request.role,
            created_at=now,
            expires_at=now + request.ttl_seconds,
        )

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(
                sa.insert(tables.join_tokens).values(
                    id=view.id,
                    secret_hash=hash_secret(secret),
                    site=view.site,
                    role=view.role,
                    created_by=by,
                    created_at=view.created_at,
                    expires_at=view.expires_at,
                )
            )

        await self._store.write(work)
        return secret, view

    async def tokens(self) -> TokenList:
        """Join tokens, newest first."""

        async def work(connection: AsyncConnection) -> TokenList:
            found = await connection.execute(
                sa.select(tables.join_tokens)
                .order_by(tables.join_tokens.c.created_at.desc())
                .limit(_TOKENS_SHOWN)
            )
            return TokenList(tokens=tuple(_token_view(row) for row in found))

        return await self._store.read(work)

    async def revoke_token(self, token_id: str) -> None:
        """Make a token useless; NotFoundError."""

        async def work(connection: AsyncConnection) -> int:
            done = await connection.execute(
                sa.update(tables.join_tokens)
                .where(tables.join_tokens.c.id == token_id)
                .values(revoked=True)
            )
            return done.rowcount

        if not await self._store.write(work):
            raise NotFoundError(f"there is no join token {token_id[:40]!r}.")

    async def redeem(self, join: Join) -> tuple[str, str]:
        """Use up a token and register the site; -> (its name, its secret: shown once).

        Raises:
            UnauthenticatedError: no such token, or a wrong secret.
            ConflictError: used, revoked or expired; for another name or role; the name is taken.
        """
        name = clean_name(join.name, "site name")
        secret = new_secret("site")
        now = self._clock()
        site = SiteAccount(
            name=name,
            role=join.role,
            state="active",
            public_key=join.public_key,
            software=join.software,
            joined_at=now,
        )

        async def work(connection: AsyncConnection) -> None:
            token = tables.join_tokens
            found = await connection.execute(sa.select(token).where(token.c.id == join.token_id))
            row = found.first()
            known = row.secret_hash if row is not None else _DUMMY_HASH
            if not secret_matches(join.token_secret, known) or row is None:
                raise UnauthenticatedError(
                    "this join token is not known here.", "Make a new one: `skerry token create`."
                )
            _check_token(row, join, name, now)
            used = await connection.execute(
                sa.update(token)
                .where(token.c.id == join.token_id, token.c.used_at.is_(None))
                .values(used_at=now, used_by=name)
            )
            if used.rowcount != 1:
                raise ConflictError("this join token was used by somebody else just now.")
            await connection.execute(
                self._store.upsert(
                    tables.sites,
                    ("name",),
                    {
                        "name": name,
                        "role": site.role,
                        "state": "active",
                        "secret_hash": hash_secret(secret),
                        "public_key": site.public_key,
                        "software": site.software,
                        "tasks": "[]",
                        "joined_at": now,
                    },
                )
            )

        held = self._sites.get(name)
        if held is not None and held.state != "revoked" and held.public_key != join.public_key:
            raise ConflictError(
                f"the name {name!r} is taken by a site with another key.",
                f"Choose another name, or revoke the old one first (`skerry site revoke {name}`).",
            )
        await self._store.write(work)
        for old in [h for h, of in self._site_by_hash.items() if of == name]:
            del self._site_by_hash[old]
        self._remember(site, hash_secret(secret))
        return name, secret

    # ------------------------------------------------------------ people

    async def add_person(self, name: str, role: ApiRole) -> str:
        """An API token for `name`, shown once; ConflictError when the name has one."""
        name = clean_name(name, "name")
        if any(person.name == name for person in self._people.values()):
            raise ConflictError(f"{name!r} has an API token already.", "Remove that one first.")
        token = new_secret("api")
        await self._set_person(name, role, token)
        return token

    async def remove_person(self, name: str) -> None:
        """Take back an API token; the first admin's goes by replacing its file."""
        held = [h for h, person in self._people.items() if person.name == name]
        if name == FIRST_ADMIN or not held:
            raise NotFoundError(f"there is no API token of {name!r} to remove.")

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(sa.delete(tables.people).where(tables.people.c.name == name))

        await self._store.write(work)
        for secret_hash in held:
            del self._people[secret_hash]

    async def _set_person(self, name: str, role: ApiRole, token: str) -> None:
        values = {
            "name": name,
            "role": role,
            "secret_hash": hash_secret(token),
            "created_at": self._clock(),
        }

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(self._store.upsert(tables.people, ("name",), values))

        await self._store.write(work)
        for old in [h for h, person in self._people.items() if person.name == name]:
            del self._people[old]
        self._people[hash_secret(token)] = ApiAccount(name=name, role=role)


def _check_token(row: sa.Row[tuple[object, ...]], join: Join, name: str, now: float) -> None:
    if row.revoked:
        raise ConflictError("this join token was revoked.", "Ask for a new one.")
    if row.used_at is not None:
        raise ConflictError(
            f"this join token was used already, by site {row.used_by!r}; it is good for one join.",
            "Make a new one: `skerry token create`.",
        )
    if now >= row.expires_at:
        raise ConflictError("this join token has expired.", "Make a new one.")
    if row.site and row.site != name:
        raise ConflictError(f"this join token is for site {row.site!r}, not for {name!r}.")
    if row.role != join.role:
        raise ConflictError(f"this join token is for the role {row.role}, not for {join.role}.")


def _token_view(row: sa.Row[tuple[object, ...]]) -> TokenView:
    return TokenView(
        id=row.id,
        site=row.site,
        role=row.role,
        created_at=row.created_at,
        expires_at=row.expires_at,
        used_at=row.used_at,
        used_by=row.used_by,
        revoked=bool(row.revoked),
    )

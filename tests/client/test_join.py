from __future__ import annotations

import contextlib
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from client.join import join_site
from client.sitefiles import SiteFolder
from privacy.certificates import Pair, fingerprint
from privacy.keys import check_join_proof, public_hex
from privacy.tokens import format_join_token, new_join_token
from protocol.errors import (
    ConflictError,
    RefusedError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
    VersionError,
)
from tests.client.certs import new_ca, server_tls
from tests.client.fake_coordinator import FakeCoordinator, refusal
from tests.faultproxy import FaultProxy


@contextlib.asynccontextmanager
async def coordinator(
    tls: ssl.SSLContext | None = None, ca: Pair | None = None
) -> AsyncIterator[FakeCoordinator]:
    fake = FakeCoordinator()
    fake.ca_pem = ca.certificate if ca else b""
    await fake.start(tls=tls)
    yield fake
    await fake.stop()


def token_for(url: str, ca: Pair | None = None) -> str:
    return format_join_token(new_join_token(url, fingerprint(ca.certificate) if ca else ""))


async def test_a_token_becomes_an_identity_of_its_own(tmp_path: Path):
    async with coordinator() as fake:
        identity = await join_site(token_for(fake.url), name=" 病院-3 🏥 ", folder=tmp_path / "s")
    folder = SiteFolder(tmp_path / "s")
    assert folder.identity() == identity
    assert (identity.name, identity.url) == ("病院-3 🏥", fake.url)
    assert folder.secret() == "sks1.x"
    assert folder.ca is None
    key = folder.private_file("key.pem")
    assert stat.S_IMODE((folder.path / "key.pem").stat().st_mode) == 0o600
    sent = fake.joins[0]
    assert sent.public_key == public_hex(key)
    check_join_proof(sent.public_key, sent.proof, sent.token_id, "病院-3 🏥")
    assert key not in repr(sent).encode()


async def test_the_ca_is_pinned_by_the_token(tmp_path: Path):
    ca = new_ca()
    async with coordinator(server_tls(tmp_path, ca, "127.0.0.1"), ca) as fake:
        await join_site(token_for(fake.url, ca), name="a", folder=tmp_path / "s")
    assert SiteFolder(tmp_path / "s").ca == tmp_path / "s" / "ca.pem"
    assert (tmp_path / "s" / "ca.pem").read_bytes() == ca.certificate


async def test_somebody_in_between_is_found_out_before_the_token_is_sent(tmp_path: Path):
    ca, false = new_ca(), new_ca("false")
    async with coordinator(server_tls(tmp_path, false, "127.0.0.1"), false) as fake:
        with pytest.raises(RefusedError, match="the join token pins"):
            await join_site(token_for(fake.url, ca), name="a", folder=tmp_path / "s")
        assert fake.joins == []
        # He may also show the true CA, which is no secret; his own certificate is not of it.
        fake.ca_pem = ca.certificate
        with pytest.raises(UnreachableError, match="not signed by the CA"):
            await join_site(token_for(fake.url, ca), name="a", folder=tmp_path / "s")
        assert fake.joins == []
    assert not SiteFolder(tmp_path / "s").joined


async def test_a_used_token_is_refused_and_leaves_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    used = UnauthenticatedError("this token was used already.")

    async def refuse(self: FakeCoordinator, request: object) -> object:
        return refusal(used)

    monkeypatch.setattr(FakeCoordinator, "_join", refuse)
    async with coordinator() as fake:
        with pytest.raises(UnauthenticatedError) as caught:
            await join_site(token_for(fake.url), name="a", folder=tmp_path / "s")
    assert "ask for a new one" in str(caught.value)
    assert not SiteFolder(tmp_path / "s").joined


async def test_a_folder_that_holds_a_site_is_left_alone(tmp_path: Path):
    async with coordinator() as fake:
        await join_site(token_for(fake.url), name="a", folder=tmp_path / "s")
        before = (tmp_path / "s" / "secret").read_bytes()
        with pytest.raises(ConflictError, match="already holds the site 'a'"):
            await join_site(token_for(fake.url), name="b", folder=tmp_path / "s")
        assert len(fake.joins) == 1
    assert (tmp_path / "s" / "secret").read_bytes() == before


async def test_a_lost_answer_says_what_to_do_about_the_token(tmp_path: Path):
    async with coordinator() as fake, FaultProxy("127.0.0.1", fake.port) as proxy:
        proxy.truncate_after = 5
        with pytest.raises(UnreachableError) as caught:
            await join_site(token_for(proxy.url), name="a", folder=tmp_path / "s")
    assert "new token" in caught.value.hint
    assert not SiteFolder(tmp_path / "s").joined


async def test_another_protocol_is_told_at_join(tmp_path: Path):
    """PC-087: the versions are compared before the site believes that it has joined."""
    async with coordinator() as fake:
        fake.protocol = 3
        with pytest.raises(VersionError, match="protocol 3"):
            await join_site(token_for(fake.url), name="a", folder=tmp_path / "s")
    assert not SiteFolder(tmp_path / "s").joined


async def test_plain_http_beyond_this_machine_is_refused_before_anything_is_sent(tmp_path: Path):
    with pytest.raises(UsageError, match="--insecure"):
        await join_site(token_for("http://10.255.0.1:1"), name="a", folder=tmp_path / "s")


@pytest.mark.parametrize("name", ["", "   ", "a\nb", "x" * 256])
async def test_bad_names_are_refused(tmp_path: Path, name: str):
    """PC-085: any language, and no control characters."""
    with pytest.raises(UsageError, match="site name"):
        await join_site(token_for("http://127.0.0.1:1"), name=name, folder=tmp_path / "s")


async def test_a_name_of_255_characters_is_good(tmp_path: Path):
    """PC-085: the longest name."""
    async with coordinator() as fake:
        identity = await join_site(token_for(fake.url), name="病" * 255, folder=tmp_path / "s")
    assert identity.name == "病" * 255

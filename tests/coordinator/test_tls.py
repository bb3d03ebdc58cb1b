"""Certificates in files and in the live context."""

from __future__ import annotations

import asyncio
import logging
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from time import time

import pytest

from coordinator import tls
from coordinator.settings import CoordinatorSettings
from privacy import certificates
from protocol.errors import InvalidFileError, UsageError

NOW = 1_800_000_000.0
DAY = 86_400.0


def outside(folder: Path, **values: object) -> CoordinatorSettings:
    return CoordinatorSettings(
        data_dir=str(folder),
        **{"listen_agents": "0.0.0.0:0", "advertise": ("fl.example.org",), **values},  # type: ignore[arg-type]
    )


def given(folder: Path, hosts: Sequence[str], now: float = NOW) -> tuple[Path, Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    ca = certificates.make_ca("theirs", now=now)
    pair = certificates.make_server(ca, hosts=hosts, now=now, days=30)
    paths = (folder / "c.pem", folder / "k.pem", folder / "ca.pem")
    for path, data in zip(paths, (pair.certificate, pair.key, ca.certificate), strict=True):
        path.write_bytes(data)
        path.chmod(0o600)
    return paths


def test_loopback_needs_no_tls(tmp_path: Path):
    assert tls.prepare(CoordinatorSettings(data_dir=str(tmp_path)), NOW) is None
    assert not (tmp_path / "tls").exists()


def test_beyond_loopback_plain_http_takes_a_flag_and_is_loud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert tls.prepare(outside(tmp_path, insecure_plain_http=True), NOW) is None
    [record] = caplog.records
    assert record.levelno == logging.CRITICAL
    assert "PLAIN HTTP on 0.0.0.0" in record.getMessage()


def test_a_certificate_is_made_once_and_kept_privately(tmp_path: Path):
    first = tls.prepare(outside(tmp_path), NOW)
    second = tls.prepare(outside(tmp_path), NOW + DAY)
    assert first is not None
    assert second is not None
    assert first.fingerprint == second.fingerprint
    folder = tmp_path / "tls"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("ca-key.pem", "server-key.pem"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    names = certificates.describe((folder / "server.pem").read_bytes()).names
    assert {"fl.example.org", "localhost", "127.0.0.1"} <= set(names)


def test_other_names_make_another_certificate_under_the_same_ca(tmp_path: Path):
    first = tls.prepare(outside(tmp_path), NOW)
    before = (tmp_path / "tls" / "server.pem").read_bytes()
    second = tls.prepare(outside(tmp_path, advertise=("new.example.org",)), NOW)
    assert first is not None
    assert second is not None
    assert first.fingerprint == second.fingerprint
    after = (tmp_path / "tls" / "server.pem").read_bytes()
    assert before != after
    assert "new.example.org" in certificates.describe(after).names


def test_a_certificate_is_renewed_before_it_expires(tmp_path: Path):
    made = tls.prepare(outside(tmp_path), NOW)
    assert made is not None
    path = tmp_path / "tls" / "server.pem"
    before = certificates.describe(path.read_bytes())
    assert not made.refresh(NOW + 10 * DAY)
    assert made.refresh(before.not_after - 10 * DAY)
    assert certificates.describe(path.read_bytes()).not_after > before.not_after


def test_a_key_that_others_can_read_is_refused(tmp_path: Path):
    tls.prepare(outside(tmp_path), NOW)
    (tmp_path / "tls" / "ca-key.pem").chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        tls.prepare(outside(tmp_path), NOW)


def test_an_expired_ca_is_named(tmp_path: Path):
    tls.prepare(outside(tmp_path), NOW)
    with pytest.raises(UsageError, match=r"ca\.pem has expired"):
        tls.prepare(outside(tmp_path), NOW + 4000 * DAY)


def test_the_operators_certificate_is_used_and_its_ca_pinned(tmp_path: Path):
    certificate, key, ca = given(tmp_path / "theirs", ["fl.example.org"])
    made = tls.prepare(
        outside(tmp_path, tls_certificate=str(certificate), tls_key=str(key), tls_ca=str(ca)),
        NOW,
    )
    assert made is not None
    assert made.fingerprint == certificates.fingerprint(ca.read_bytes())
    assert not (tmp_path / "tls").exists()


def test_a_certificate_for_another_name_is_refused_with_both_names(tmp_path: Path):
    certificate, key, _ = given(tmp_path / "theirs", ["other.example.org"])
    with pytest.raises(UsageError) as refused:
        tls.prepare(outside(tmp_path, tls_certificate=str(certificate), tls_key=str(key)), NOW)
    assert "other.example.org" in str(refused.value)
    assert "fl.example.org" in str(refused.value)
    assert "advertise" in refused.value.hint


def test_an_expired_certificate_is_refused_with_its_day(tmp_path: Path):
    certificate, key, _ = given(tmp_path / "theirs", ["fl.example.org"], NOW - 60 * DAY)
    with pytest.raises(UsageError, match="it expired on 20"):
        tls.prepare(outside(tmp_path, tls_certificate=str(certificate), tls_key=str(key)), NOW)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path):
    certificate, _, _ = given(tmp_path / "a", ["fl.example.org"])
    _, key, _ = given(tmp_path / "b", ["fl.example.org"])
    with pytest.raises(UsageError, match="do not go together"):
        tls.prepare(outside(tmp_path, tls_certificate=str(certificate), tls_key=str(key)), NOW)


@pytest.mark.parametrize("missing", ["c.pem", "k.pem"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str):
    certificate, key, _ = given(tmp_path / "theirs", ["fl.example.org"])
    (tmp_path / "theirs" / missing).unlink()
    with pytest.raises(UsageError, match=missing):
        tls.prepare(outside(tmp_path, tls_certificate=str(certificate), tls_key=str(key)), NOW)


def test_a_bad_replacement_is_logged_and_the_present_certificate_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    certificate, key, _ = given(tmp_path / "theirs", ["fl.example.org"])
    made = tls.prepare(outside(tmp_path, tls_certificate=str(certificate), tls_key=str(key)), NOW)
    assert made is not None
    certificate.unlink()
    certificate.write_bytes(b"nonsense")
    assert not made.refresh(NOW)
    assert "stays as it is" in caplog.text


def test_an_end_that_is_near_is_said_once_in_time_and_no_more_when_the_file_was_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """PC-071: 30 days of life; the last six of them are announced, while it still serves."""
    certificate, key, ca = given(tmp_path / "theirs", ["fl.example.org"])
    files = {"tls_certificate": str(certificate), "tls_key": str(key), "tls_ca": str(ca)}
    made = tls.prepare(outside(tmp_path, **files), NOW)
    assert made is not None
    assert not made.refresh(NOW + 23 * DAY)
    assert made.notes == ()
    for hour in range(3):
        assert not made.refresh(NOW + 25 * DAY + hour * 3600)
    assert len(made.notes) == 1
    assert f"{certificate} expires on " in made.notes[0]
    assert caplog.text.count("expires on") == 1
    assert not made.refresh(NOW + 31 * DAY)
    assert f"{certificate} expired on " in made.notes[0]
    given(tmp_path / "theirs", ["fl.example.org"], NOW + 31 * DAY)
    assert made.refresh(NOW + 31 * DAY)
    assert made.notes == ()


def test_the_end_of_a_ca_is_announced_because_every_site_must_join_again(tmp_path: Path):
    made = tls.prepare(outside(tmp_path), NOW)
    assert made is not None
    made.refresh(NOW + 3600 * DAY)
    assert made.notes == ()
    made.refresh(NOW + 3630 * DAY)
    assert len(made.notes) == 1
    assert "the CA that sites pin expires on" in made.notes[0]


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path):
    made = tls.prepare(outside(tmp_path), time() - 300 * DAY)
    assert made is not None
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=made.context
    )
    port = server.sockets[0].getsockname()[1]

    async def presented() -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=made.ca_pem.decode())
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="fl.example.org"
        )
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return bytes(found)

    before = await presented()
    assert await presented() == before
    assert made.refresh(time())
    assert await presented() != before
    server.close()


def test_urls_name_what_others_can_reach(tmp_path: Path):
    settings = outside(tmp_path)
    assert tls.url_host(settings, "0.0.0.0") == "fl.example.org"
    assert tls.url_host(settings, "127.0.0.1") == "127.0.0.1"
    bare = outside(tmp_path, advertise=())
    assert tls.url_host(bare, "10.1.2.3") == "10.1.2.3"
    assert tls.url_host(bare, "0.0.0.0") == tls.own_address()


def test_settings_that_miss_a_half_are_refused_before(tmp_path: Path):
    with pytest.raises(InvalidFileError):
        outside(tmp_path, tls_certificate="c.pem").check()

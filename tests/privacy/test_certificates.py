import ssl
from pathlib import Path

import pytest

from privacy.certificates import (
    describe,
    expiring,
    faults,
    fingerprint,
    make_ca,
    make_server,
    pinned,
    renewal,
)
from protocol.errors import RefusedError, UsageError

NOW = 1_800_000_000.0
DAY = 86_400.0
HOSTS = ("coordinator.example", "127.0.0.1", "::1")
CA = make_ca("test", now=NOW)
SERVER = make_server(CA, hosts=HOSTS, now=NOW, days=30)


def test_a_new_certificate_is_good_for_its_hosts():
    assert faults(SERVER.certificate, ca=CA.certificate, hosts=HOSTS, now=NOW) == ()
    assert describe(SERVER.certificate).names == HOSTS
    assert renewal(SERVER.certificate, ca=CA.certificate, hosts=HOSTS, now=NOW) == ""


def handshake(*, trust: bytes, host: str, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_bytes(LONG_SERVER.certificate)
    (tmp_path / "key.pem").write_bytes(LONG_SERVER.key)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    client_side = ssl.create_default_context(cadata=trust.decode())
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"
    assert client.getpeercert()


# Valid from 2001 to about 2056: a TLS library looks at the real clock, whatever it says.
LONG_CA = make_ca("long", now=1e9, days=20_000)
LONG_SERVER = make_server(LONG_CA, hosts=HOSTS, now=1e9, days=20_000)


@pytest.mark.parametrize("host", HOSTS)
def test_a_strict_tls_library_takes_the_pair(host: str, tmp_path: Path):
    handshake(trust=LONG_CA.certificate, host=host, tmp_path=tmp_path)


def test_a_tls_library_refuses_another_ca_and_another_name(tmp_path: Path):
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(
            trust=make_ca("long", now=1e9, days=20_000).certificate,
            host=HOSTS[0],
            tmp_path=tmp_path,
        )
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(trust=LONG_CA.certificate, host="evil.example", tmp_path=tmp_path)


def test_a_wrong_name_is_said_with_both_names():
    (fault,) = faults(SERVER.certificate, ca=CA.certificate, hosts=("10.0.0.7",), now=NOW)
    assert "coordinator.example" in fault
    assert "10.0.0.7" in fault


def test_expiry_and_a_wrong_clock_are_said_with_the_day():
    (late,) = faults(SERVER.certificate, ca=CA.certificate, hosts=HOSTS, now=NOW + 31 * DAY)
    assert "expired on 2027-02-14" in late
    (early,) = faults(SERVER.certificate, ca=CA.certificate, hosts=HOSTS, now=NOW - DAY)
    assert "is this clock right" in early
    assert faults(SERVER.certificate, ca=CA.certificate, hosts=HOSTS, now=NOW - 1800) == ()


def test_a_certificate_of_a_namesake_authority_is_refused():
    stranger = make_ca("test", now=NOW)
    (fault,) = faults(SERVER.certificate, ca=stranger.certificate, hosts=HOSTS, now=NOW)
    assert "not signed by the CA" in fault
    forged = make_server(stranger, hosts=HOSTS, now=NOW)
    assert faults(forged.certificate, ca=CA.certificate, hosts=HOSTS, now=NOW)


def test_renewal_is_due_in_the_last_third_and_when_hosts_change():
    def due(day: float, hosts: tuple[str, ...] = HOSTS) -> str:
        return renewal(SERVER.certificate, ca=CA.certificate, hosts=hosts, now=NOW + day * DAY)

    assert due(19) == ""
    assert "expires on" in due(21)
    assert "expired" in due(40)
    assert "not for new.example" in due(1, (*HOSTS, "new.example"))
    other = make_ca("other", now=NOW)
    assert "not signed" in renewal(SERVER.certificate, ca=other.certificate, hosts=HOSTS, now=NOW)


def test_an_end_is_near_in_the_last_fifth_and_within_30_days():
    """PC-071: whatever the length of its life."""
    for days, near in ((30, 6), (150, 30), (365, 30)):
        made = make_server(CA, hosts=HOSTS, now=NOW, days=days).certificate
        end = NOW + days * DAY
        assert expiring(made, now=end - (near + 0.1) * DAY) == ""
        assert expiring(made, now=end - (near - 0.1) * DAY).startswith("expires on 20")
        assert expiring(made, now=end).startswith("expired on 20")


def test_only_the_pinned_authority_is_taken_from_a_bundle():
    other = make_ca("other", now=NOW)
    bundle = other.certificate + CA.certificate
    assert pinned(bundle, fingerprint(CA.certificate)) == CA.certificate
    with pytest.raises(RefusedError) as caught:
        pinned(other.certificate, fingerprint(CA.certificate))
    assert fingerprint(other.certificate)[:16] in str(caught.value)
    assert fingerprint(CA.certificate)[:16] in str(caught.value)


def test_a_certificate_describes_itself_for_messages():
    text = str(describe(SERVER.certificate))
    assert "coordinator.example, 127.0.0.1, ::1" in text
    assert "to 2027-02-14" in text
    assert fingerprint(SERVER.certificate)[:16] in text
    assert "no name" in str(describe(CA.certificate))


@pytest.mark.parametrize("host", ["", "a b", "x" * 300, "-", "a\x00b", "http://x"])
def test_what_is_no_host_is_refused(host: str):
    with pytest.raises(UsageError, match="neither a host name"):
        make_server(CA, hosts=(host,), now=NOW)


def test_no_host_and_no_certificate_are_refused():
    with pytest.raises(UsageError, match="at least one"):
        make_server(CA, hosts=(), now=NOW)
    with pytest.raises(UsageError, match="not a certificate"):
        describe(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(UsageError, match="not a certificate"):
        fingerprint(b"")


def test_a_wildcard_covers_one_label_only():
    wild = make_server(CA, hosts=("*.example.org",), now=NOW)
    for host, good in [("a.example.org", True), ("b.a.example.org", False), ("example.org", False)]:
        assert (faults(wild.certificate, ca=CA.certificate, hosts=(host,), now=NOW) == ()) is good


def test_a_long_name_in_another_script_is_cut_between_characters():
    assert describe(make_ca("病院" * 50, now=NOW).certificate).names == ()


def test_names_in_other_scripts_are_carried_in_their_ascii_form():
    pair = make_server(CA, hosts=("klinik-zürich.example",), now=NOW)
    assert describe(pair.certificate).names == (
        "xn--" + "klinik-zürich".encode("punycode").decode() + ".example",
    )
    assert (
        faults(pair.certificate, ca=CA.certificate, hosts=("klinik-zürich.example",), now=NOW) == ()
    )

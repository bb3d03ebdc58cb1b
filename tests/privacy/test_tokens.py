import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privacy.tokens import (
    JOIN_PREFIX,
    format_join_token,
    hash_secret,
    new_join_token,
    new_secret,
    parse_join_token,
    secret_matches,
)
from protocol.errors import UsageError

FINGERPRINT = "ab" * 32


def forged(**fields: object) -> str:
    whole = {"id": "0" * 16, "secret": "1" * 64, "ca": "", "url": "http://localhost:1", **fields}
    kept = {key: value for key, value in whole.items() if value is not None}
    return JOIN_PREFIX + base64.urlsafe_b64encode(json.dumps(kept).encode()).decode().rstrip("=")


def test_a_token_survives_being_printed_and_typed():
    token = new_join_token("https://coordinator.example:8443", FINGERPRINT)
    text = format_join_token(token)
    assert text.startswith("skj1.")
    assert "\n" not in text
    assert parse_join_token(f"  {text}\n") == token


def test_no_two_tokens_share_id_or_secret_and_secrets_are_256_bits():
    tokens = [new_join_token("http://127.0.0.1:8440") for _ in range(50)]
    assert len({token.id for token in tokens}) == 50
    assert len({token.secret for token in tokens}) == 50
    assert all(len(bytes.fromhex(token.secret)) == 32 for token in tokens)


def test_the_secret_is_not_in_the_repr():
    token = new_join_token("http://127.0.0.1:8440")
    assert token.secret not in repr(token)
    assert token.id in f"{token}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "skj1.",
        "skj2.AAAA",
        "hello",
        "skj1.%%%%",
        "skj1." + "A" * 5000,
        "skj1." + base64.urlsafe_b64encode(b"[" * 3000).decode(),
        forged(secret=None),
        forged(secret="1" * 63),
        forged(secret="g" * 64),
        forged(id="../../etc"),
        forged(ca="not a fingerprint"),
        forged(url="ftp://x"),
        forged(url="file:///etc/passwd"),
        forged(url="http://"),
        forged(url="http://[::1"),
        forged(url="http://a:99999"),
        forged(url="http://a", ca=FINGERPRINT),
        forged(url=7),
    ],
)
def test_a_forged_or_damaged_token_is_refused_without_repeating_its_secret(text: str):
    with pytest.raises(UsageError) as caught:
        parse_join_token(text)
    assert "1" * 63 not in str(caught.value)


def test_every_shortened_token_is_refused():
    text = format_join_token(new_join_token("http://127.0.0.1:8440"))
    for length in range(len(text)):
        with pytest.raises(UsageError):
            parse_join_token(text[:length])


@given(st.text(max_size=300))
def test_random_text_is_never_a_token_and_never_another_error(text: str):
    for line in (text, JOIN_PREFIX + text):
        with pytest.raises(UsageError):
            parse_join_token(line)


def test_a_secret_matches_its_own_hash_only():
    for kind, prefix in (("site", "sks1."), ("api", "ska1.")):
        secret = new_secret(kind)
        stored = hash_secret(secret)
        assert secret.startswith(prefix)
        assert secret not in stored
        assert len(stored) == 64
        assert secret_matches(secret, stored)
        assert not secret_matches(new_secret(kind), stored)
        assert not secret_matches(secret[:-1], stored)
        assert not secret_matches(stored, stored)  # a leaked hash is no secret
        assert not secret_matches("\udc80", "é")

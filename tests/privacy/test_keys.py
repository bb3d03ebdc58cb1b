import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from privacy.keys import check_join_proof, new_private_key, public_hex, sign_join
from protocol.errors import UnauthenticatedError, UsageError

KEY = new_private_key()
PUBLIC = public_hex(KEY)
PROOF = sign_join(KEY, "token-1", "edge-1")


def test_the_holder_of_the_key_can_prove_it():
    check_join_proof(PUBLIC, PROOF, "token-1", "edge-1")
    assert len(bytes.fromhex(PUBLIC)) == 32
    assert b"PRIVATE KEY" in KEY


def test_a_proof_is_for_one_token_one_name_and_one_key():
    other = public_hex(new_private_key())
    for public, token, name in [
        (other, "token-1", "edge-1"),
        (PUBLIC, "token-2", "edge-1"),
        (PUBLIC, "token-1", "edge-2"),
        (PUBLIC, "token-1e", "dge-1"),  # the same characters, cut elsewhere
    ]:
        with pytest.raises(UnauthenticatedError, match="did not prove"):
            check_join_proof(public, PROOF, token, name)


@pytest.mark.parametrize("bad", ["", "zz", "00", "ff" * 32, "é", PROOF[:-2], PROOF + "00"])
def test_what_is_no_key_or_no_signature_is_refused_in_the_same_way(bad: str):
    with pytest.raises(UnauthenticatedError):
        check_join_proof(PUBLIC, bad, "token-1", "edge-1")
    with pytest.raises(UnauthenticatedError):
        check_join_proof(bad, PROOF, "token-1", "edge-1")


@given(st.integers(0, 511))
def test_one_flipped_bit_of_a_proof_is_refused(bit: int):
    raw = bytearray.fromhex(PROOF)
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UnauthenticatedError):
        check_join_proof(PUBLIC, raw.hex(), "token-1", "edge-1")


def test_a_key_file_of_another_kind_is_refused_with_what_to_do():
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for pem in (b"", b"nonsense", other):
        with pytest.raises(UsageError, match="Ed25519"):
            public_hex(pem)

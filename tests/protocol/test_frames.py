import struct
from itertools import pairwise

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import LimitError, MalformedError, SkerryError
from protocol.frames import (
    HEADER,
    HEADER_BYTES,
    FrameType,
    Scanner,
    body_bytes,
    encode_end,
    encode_meta,
    encode_part,
    pack_header,
    parse_header,
)

MIB = limits.FRAME_PAYLOAD_BYTES_MAX
SMALL = st.lists(st.binary(max_size=60), max_size=4)


def body(parts: list[bytes], meta: bytes = b"{}") -> bytes:
    pieces = [encode_meta(meta)]
    for index, part in enumerate(parts):
        pieces += [bytes(piece) for piece in encode_part(index, memoryview(part))]
    return b"".join([*pieces, encode_end()])


def boundaries(parts: list[bytes], meta: bytes = b"{}") -> set[int]:
    ends = [0, HEADER_BYTES + len(meta)]
    for part in parts:
        for start in range(0, len(part), MIB):
            ends.append(ends[-1] + HEADER_BYTES + len(part[start : start + MIB]))
    return {*ends, ends[-1] + HEADER_BYTES}


def scanner(parts: list[bytes]) -> Scanner:
    return Scanner(lambda _meta: [len(part) for part in parts])


def feed_in_pieces(scan: Scanner, data: bytes, cuts: list[int]) -> None:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, stop in pairwise(marks):
        scan.feed(data[start:stop])


@given(SMALL, st.lists(st.integers(0, 10**6), max_size=12))
def test_any_chunking_gives_the_same_result(parts: list[bytes], cuts: list[int]):
    data = body(parts)
    scan = scanner(parts)
    feed_in_pieces(scan, data, cuts)
    assert scan.done
    assert scan.good_offset == len(data) == body_bytes(2, [len(part) for part in parts])


def test_one_byte_at_a_time_is_enough():
    parts = [b"abc", b"", b"defgh"]
    scan = scanner(parts)
    for byte in body(parts):
        scan.feed(bytes([byte]))
    assert scan.done


@given(SMALL, st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=6))
def test_after_a_break_anywhere_rewind_and_resend_give_the_whole(
    parts: list[bytes], cut: int, cuts: list[int]
):
    data = body(parts)
    cut %= len(data) + 1
    scan = scanner(parts)
    feed_in_pieces(scan, data[:cut], cuts)
    good = scan.rewind()
    assert good in boundaries(parts)
    assert good <= cut
    assert good == max(edge for edge in boundaries(parts) if edge <= cut)
    feed_in_pieces(scan, data[good:], cuts)
    assert scan.done
    assert scan.good_offset == len(data)


def test_a_new_scanner_goes_on_after_the_stored_prefix():
    parts = [bytes(100), bytes(range(200))]
    data = body(parts)
    first = scanner(parts)
    first.feed(data[:-30])
    second = scanner(parts)
    second.feed(data[: first.good_offset])
    second.feed(data[first.good_offset :])
    assert second.done


@given(SMALL, st.integers(0, 10**9))
@settings(max_examples=300)
def test_a_single_flipped_bit_is_refused_or_leaves_the_body_unfinished(
    parts: list[bytes], position: int
):
    data = bytearray(body(parts))
    bit = position % (8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    scan = scanner(parts)
    try:
        scan.feed(data)
    except (MalformedError, LimitError):
        return
    assert not scan.done
    assert scan.good_offset <= bit // 8


@given(st.binary(max_size=200))
def test_random_bytes_raise_errors_for_people_only(data: bytes):
    try:
        scanner([]).feed(data)
    except SkerryError:
        return


@pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1])
def test_parts_around_the_frame_size_are_cut_at_it(size: int):
    parts = [bytes(size), b"x"]
    data = body(parts)
    assert len(data) == body_bytes(2, [size, 1])
    scan = scanner(parts)
    scan.feed(data)
    assert scan.done


def test_both_sides_agree_about_the_largest_metadata():
    """PC-022: META is packed up to the very constant that the reader takes, and refused above."""
    largest = bytes(limits.META_BYTES_MAX)
    scan = Scanner(lambda meta: [len(meta) - len(largest)])
    scan.feed(encode_meta(largest))
    assert scan.good_offset == HEADER_BYTES + limits.META_BYTES_MAX
    with pytest.raises(LimitError, match=f"META_BYTES_MAX = {limits.META_BYTES_MAX}"):
        encode_meta(largest + b"x")


@pytest.mark.parametrize("size", [1_398_490, 101 * 1024 * 1024])
def test_fields_around_old_limits_of_other_codecs_pass(size: int):
    """PC-022: 1,398,490 bytes and 101 MiB go in and come out."""
    part = memoryview(bytes(size))
    scan = Scanner(lambda _meta: [size])
    scan.feed(encode_meta(b"{}"))
    for piece in encode_part(0, part):
        assert len(piece) <= MIB
        scan.feed(piece)
    scan.feed(encode_end())
    assert scan.done
    assert scan.good_offset == body_bytes(2, [size])


@pytest.mark.parametrize("size", [2_147_483_647, 2_147_483_648, 2_369_781_118, 2_804_291_367])
def test_a_part_beyond_two_gibibytes_has_no_32_bit_sizes(size: int):
    """PC-017: sizes around and above 2^31 pass frame by frame, with one frame in memory."""
    payload = memoryview(bytes(MIB))
    whole, crc = size // MIB, crc32c(payload)
    scan = Scanner(lambda _meta: [size])
    scan.feed(encode_meta(b"{}"))
    for index in range(whole):
        scan.feed(HEADER.pack(FrameType.DATA, 0, 0, MIB, index * MIB, crc))
        scan.feed(payload)
    rest = payload[: size - whole * MIB]
    if rest:
        scan.feed(pack_header(FrameType.DATA, 0, whole * MIB, rest))
        scan.feed(rest)
    scan.feed(encode_end())
    assert scan.done
    assert body_bytes(2, [size]) == size + 2 + HEADER_BYTES * (2 + -(-size // MIB))


def test_a_length_from_outside_is_never_believed():
    for kind, most in [(1, limits.META_BYTES_MAX), (2, MIB), (3, 0)]:
        assert parse_header(struct.pack("<BBHIQI", kind, 0, 0, most, 0, 0)).length == most
        with pytest.raises(LimitError, match="above the limit"):
            parse_header(struct.pack("<BBHIQI", kind, 0, 0, most + 1, 0, 0))


def test_what_protocol_1_does_not_know_is_refused():
    with pytest.raises(MalformedError, match="type 4"):
        parse_header(struct.pack("<BBHIQI", 4, 0, 0, 0, 0, 0))
    with pytest.raises(MalformedError, match="flags 1"):
        parse_header(struct.pack("<BBHIQI", 2, 1, 0, 0, 0, 0))
    for kind in (1, 3):
        with pytest.raises(MalformedError, match="belongs to no part"):
            parse_header(struct.pack("<BBHIQI", kind, 0, 1, 0, 0, 0))


def data_frame(part: int, offset: int, payload: bytes) -> bytes:
    return pack_header(FrameType.DATA, part, offset, payload) + payload


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([data_frame(0, 0, b"abc")], "must begin with its META"),
        ([encode_end()], "must begin with its META"),
        ([encode_meta(b""), encode_meta(b"")], "second META"),
        ([encode_meta(b""), encode_end()], "0 of 3 bytes of part 0"),
        ([encode_meta(b""), data_frame(0, 0, b"abc"), encode_end()], "0 of 2 bytes of part 1"),
        ([encode_meta(b""), data_frame(1, 0, b"de")], "expected part 0"),
        ([encode_meta(b""), data_frame(0, 1, b"bc")], "expected part 0 offset 0"),
        ([encode_meta(b""), data_frame(0, 0, b"ab")], "length 3, found part 0 offset 0 length 2"),
        ([body([b"abc", b"de"]), b"x"], "after the END"),
        ([body([b"abc", b"de"])[:-20], data_frame(2, 0, b"f")], "more data than META"),
        ([encode_meta(b""), data_frame(0, 0, b"abc"), data_frame(0, 0, b"abc")], "expected part 1"),
    ],
)
def test_frames_out_of_order_are_refused_with_what_was_expected(pieces: list[bytes], says: str):
    scan = Scanner(lambda _meta: [3, 2])
    with pytest.raises(MalformedError, match=says):
        scan.feed(b"".join(pieces))


def test_damage_names_the_frame_and_the_offset():
    data = bytearray(body([b"abc"]))
    data[HEADER_BYTES + 2 + HEADER_BYTES] ^= 1
    with pytest.raises(MalformedError, match="DATA frame that ends at offset 45"):
        scanner([b"abc"]).feed(data)


def test_the_receiver_can_refuse_by_metadata_before_any_data():
    def refuse(_meta: bytes) -> list[int]:
        raise MalformedError("this update is not wanted.")

    scan = Scanner(refuse)
    with pytest.raises(MalformedError, match="not wanted"):
        scan.feed(body([b"abc"]))
    assert scan.good_offset == 0

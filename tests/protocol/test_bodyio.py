import array
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.bodies import PartMeta, UpdateMeta, decode_meta_json, encode_meta_json
from protocol.bodyio import BodyReader, write_body
from protocol.errors import LimitError, MalformedError, SkerryError
from protocol.frames import Scanner, body_bytes

NAMES = ("delta", "buffers", "ints", "control")
IDENTITY = {"job": "j", "site": "s", "epoch": 1, "clock": 2, "attempt": 1, "base_version": 3}


def meta_for(sizes: list[int]) -> UpdateMeta:
    return UpdateMeta(
        **IDENTITY,
        base_digest="",
        layout_digest="",
        examples=1.0,
        steps=1,
        effective_steps=1.0,
        parts=tuple(PartMeta(name=n, bytes=s) for n, s in zip(NAMES, sizes, strict=False)),
    )


def written(parts: list[bytes]) -> bytes:
    file = io.BytesIO()
    meta = encode_meta_json(meta_for([len(part) for part in parts]))
    count = write_body(file.write, meta, [memoryview(part) for part in parts])
    assert count == len(file.getvalue()) == body_bytes(len(meta), [len(part) for part in parts])
    return file.getvalue()


def read(data: bytes, *, at_a_time: int = 1 << 30) -> list[bytes]:
    file = io.BytesIO(data)
    reader = BodyReader(lambda view: file.readinto(view[:at_a_time]))
    parts = [bytearray() for _ in reader.meta.parts]
    for index, offset, view in reader.frames():
        assert offset == len(parts[index])
        parts[index] += view
    return [bytes(part) for part in parts]


sizes = st.integers(0, 12).map(lambda n: bytes(range(8 * n)))


@given(st.lists(sizes, max_size=4), st.integers(1, 40))
def test_what_was_written_is_read_however_little_the_file_gives(parts: list[bytes], step: int):
    assert read(written(parts), at_a_time=step) == parts


@given(st.lists(sizes, max_size=4), st.integers(1, 40))
def test_each_part_is_read_where_it_belongs(parts: list[bytes], step: int):
    file = io.BytesIO(written(parts))
    found = [bytearray(len(part)) for part in parts]
    reader = BodyReader(lambda view: file.readinto(view[:step]))
    seen = [bytearray() for _ in parts]
    for index, offset, view in reader.fill([memoryview(part) for part in found]):
        assert offset == len(seen[index])
        seen[index] += view
    assert [bytes(part) for part in found] == [bytes(part) for part in seen] == parts


def test_what_is_read_where_it_belongs_is_for_a_digest_to_check():
    part = bytes(2 * limits.MIB + 24)
    body = bytearray(written([part]))
    body[-100] ^= 1
    found = bytearray(len(part))
    file = io.BytesIO(body)
    pieces = list(BodyReader(file.readinto).fill([memoryview(found)]))
    assert sum(found) == 1
    assert max(len(view) for _, _, view in pieces) <= 1 << 18
    cut = BodyReader(io.BytesIO(body[:-1]).readinto)
    with pytest.raises(MalformedError, match="cut off"):
        list(cut.fill([memoryview(found)]))


def test_parts_of_any_element_type_are_written_as_their_bytes():
    floats = array.array("f", [1.5] * 300_000)
    ints = array.array("q", [1, -2])
    file = io.BytesIO()
    meta = encode_meta_json(meta_for([1_200_000, 0, 16]))
    write_body(
        file.write, meta, [memoryview(floats), memoryview(array.array("f")), memoryview(ints)]
    )
    assert read(file.getvalue()) == [floats.tobytes(), b"", ints.tobytes()]


def test_the_scanner_takes_what_was_written():
    data = written([bytes(limits.FRAME_PAYLOAD_BYTES_MAX + 8), b"", bytes(8)])
    scan = Scanner(lambda raw: [part.bytes for part in decode_meta_json(raw).parts])
    scan.feed(data)
    assert scan.done


def test_no_more_than_one_frame_is_held():
    part = bytes(5 * limits.FRAME_PAYLOAD_BYTES_MAX)
    file = io.BytesIO(written([part]))
    views = [view.obj for _, _, view in BodyReader(file.readinto).frames()]
    assert len(views) == 5
    assert all(view is views[0] for view in views)
    assert len(views[0]) == limits.FRAME_PAYLOAD_BYTES_MAX


def test_a_body_cut_off_anywhere_is_refused():
    data = written([bytes(8), bytes(16)])
    for length in range(len(data)):
        with pytest.raises(MalformedError, match="cut off"):
            read(data[:length])


@given(st.integers(0, 10**6))
def test_one_flipped_bit_is_refused(position: int):
    data = bytearray(written([bytes(range(16)), bytes(8)]))
    bit = position % (8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises((MalformedError, LimitError)):
        read(bytes(data))


def test_bytes_after_the_end_are_refused():
    with pytest.raises(MalformedError, match="after the END"):
        read(written([bytes(8)]) + b"x")


@given(st.binary(max_size=200))
def test_random_bytes_raise_errors_for_people_only(data: bytes):
    with pytest.raises(SkerryError):
        read(data)


def test_an_empty_update_is_a_whole_body():
    """PC-024: nothing passed the filter: META and END alone, and the notes arrive."""
    file = io.BytesIO()
    meta = meta_for([])
    noted = UpdateMeta(
        **{f: getattr(meta, f) for f in meta.__struct_fields__} | {"notes": ("round 3",)}
    )
    write_body(file.write, encode_meta_json(noted), [])
    file.seek(0)
    reader = BodyReader(file.readinto)
    assert list(reader.frames()) == []
    assert isinstance(reader.meta, UpdateMeta)
    assert reader.meta.notes == ("round 3",)
    assert read(written([b"", b"", b""])) == [b"", b"", b""]


def test_oversized_metadata_is_refused_before_a_byte_is_written():
    file = io.BytesIO()
    with pytest.raises(LimitError):
        write_body(file.write, bytes(limits.META_BYTES_MAX + 1), [])
    assert file.getvalue() == b""

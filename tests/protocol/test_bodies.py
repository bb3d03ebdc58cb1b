import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.bodies import (
    PartMeta,
    SnapshotMeta,
    UpdateMeta,
    check_upload_fits,
    decode_meta_json,
    dense_parts,
    encode_meta_json,
)
from protocol.errors import LimitError, MalformedError, UsageError
from protocol.layout import Layout, TensorSpec
from protocol.metrics import Metric, metric

LAYOUT = Layout(
    tensors=(
        TensorSpec(name="w", shape=(3, 2), dtype="float32", role="train"),
        TensorSpec(name="n", shape=(), dtype="int64", role="int"),
    )
)
UPDATE = UpdateMeta(
    job="j",
    site="edge-1",
    epoch=1,
    clock=2,
    attempt=1,
    base_version=7,
    base_digest="ab" * 32,
    layout_digest=LAYOUT.digest(),
    examples=100.0,
    steps=20,
    effective_steps=20.0,
    parts=dense_parts(LAYOUT, "update", control=False),
    metrics={"loss": metric(math.nan, 10)},
    discards={"clipped": 0.5},
    notes=("x",),
)
SNAPSHOT = SnapshotMeta(
    job="j",
    version=0,
    digest="cd" * 32,
    layout=LAYOUT,
    parts=dense_parts(LAYOUT, "snapshot", control=True),
)


@pytest.mark.parametrize("meta", [UPDATE, SNAPSHOT])
def test_metadata_survives_its_encoding(meta: UpdateMeta | SnapshotMeta):
    assert decode_meta_json(encode_meta_json(meta)) == meta


def test_dense_parts_are_named_in_canonical_order_and_empty_ones_are_kept():
    assert [(part.name, part.bytes) for part in UPDATE.parts] == [
        ("delta", 24), ("buffers", 0), ("ints", 8),
    ]  # fmt: skip
    assert [part.name for part in SNAPSHOT.parts] == ["params", "buffers", "ints", "control"]


def changed(**fields: object) -> bytes:
    plain = json.loads(encode_meta_json(UPDATE))
    return json.dumps({**plain, **fields}).encode()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (changed(steps=-1), "steps is -1"),
        (changed(steps=10**10), "steps is"),
        (changed(examples=-0.5), "examples is -0.5"),
        (changed(examples=1e13), "between 0 and 1e"),
        (changed(clock=-1), "clock is -1"),
        (changed(epoch=2**60), "epoch"),
        (changed(norm=-1.0), "norm is -1"),
        (changed(train_seconds=-1.0), "train_seconds"),
        (changed(discards={"x": -1.0}), "discard 'x' is -1"),
        (changed(discards={str(i): 0.0 for i in range(65)}), "more than 64 notes"),
        (changed(notes=["x"] * 65), "more than 64 notes"),
        (changed(notes=["x" * 2001]), "more than 2000"),
        (changed(site="x" * 256), "site is longer"),
        (changed(base_digest="x" * 256), "base_digest is longer"),
        (changed(parts=[{"name": "delta", "bytes": -4}]), "impossible size"),
        (changed(parts=[{"name": "delta", "bytes": 6}]), "impossible size"),
        (changed(parts=[{"name": "delta", "bytes": 1 << 43}]), "impossible size"),
        (changed(parts=[{"name": "delta", "bytes": 4}] * 2), "stands twice"),
        (changed(parts=[{"name": "delta", "bytes": 4}] * 9), "at most 8"),
        (changed(parts=[{"name": "weights", "bytes": 4}]), "cannot be read"),
        (changed(parts=[{"name": "delta", "bytes": 4, "codecs": ["zstd"]}]), "does not know"),
        (changed(parts=[{"name": "delta", "bytes": 4, "reference": "s3://x"}]), "does not know"),
        (changed(metrics={"m": {"examples": -1.0}}), "impossible count"),
        (changed(type="unknown"), "cannot be read"),
        (changed(examples=None), "cannot be read"),
        (changed(examples=True), "cannot be read"),
        (b"", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_metadata_out_of_bounds_is_refused(raw: bytes, says: str):
    with pytest.raises(MalformedError, match=says):
        decode_meta_json(raw)


def test_a_snapshot_of_an_impossible_version_is_refused():
    for version in (-1, 2**60):
        bad = msgspec.structs.replace(SNAPSHOT, version=version)
        with pytest.raises(MalformedError, match="version"):
            decode_meta_json(encode_meta_json(bad))


def test_a_snapshot_with_an_impossible_layout_is_refused():
    bad = msgspec.structs.replace(SNAPSHOT, layout=Layout(tensors=LAYOUT.tensors * 2))
    with pytest.raises(MalformedError, match="stands twice"):
        decode_meta_json(encode_meta_json(bad))


@given(st.binary(max_size=300))
def test_random_bytes_are_malformed_and_nothing_else(raw: bytes):
    with pytest.raises(MalformedError):
        decode_meta_json(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(json.loads(encode_meta_json(UPDATE)))), json_values)
def test_a_random_value_in_any_field_is_taken_or_malformed(field: str, value: object):
    try:
        meta = decode_meta_json(changed(**{field: value}))
    except MalformedError:
        return
    assert decode_meta_json(encode_meta_json(meta)) == meta


def test_an_update_without_any_part_is_valid():
    """PC-024: a filter that dropped everything leaves an update of notes alone."""
    empty = msgspec.structs.replace(UPDATE, parts=(), notes=("round 3",))
    assert decode_meta_json(encode_meta_json(empty)) == empty


@pytest.mark.parametrize("size", [2_147_483_648, 2_804_291_368, 4 * limits.ELEMENTS_MAX])
def test_part_sizes_beyond_32_bits_pass(size: int):
    """PC-017: sizes of parts are whole numbers of any width up to the limit."""
    part = PartMeta(name="delta", bytes=size)
    big = msgspec.structs.replace(UPDATE, parts=(part,))
    decoded = decode_meta_json(encode_meta_json(big))
    assert decoded.parts[0].bytes == size


def test_integer_metric_names_are_refused_when_packing():
    """PC-023: {0: 0.91, 1: 0.88} would come back with text keys; the sender is told at once."""
    numbered: dict[int, Metric] = {0: metric(0.91, 10), 1: metric(0.88, 10)}
    bad = msgspec.structs.replace(UPDATE, metrics=numbered)
    with pytest.raises(UsageError, match="metric name 0 is int"):
        encode_meta_json(bad)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_does_not_make_the_update_unreadable(norm: float):
    sick = msgspec.structs.replace(UPDATE, norm=norm, discards={"clipped": norm})
    decoded = decode_meta_json(encode_meta_json(sick))
    assert isinstance(decoded, UpdateMeta)
    assert decoded.norm == decoded.discards["clipped"] == 0.0


def test_a_model_above_the_upload_limit_is_refused_before_training():
    """PC-016: the error names the limit, the size and the setting, from the layout alone."""
    elements = 544_715_979 // 4
    model = Layout(
        tensors=(TensorSpec(name="w", shape=(elements,), dtype="float32", role="train"),)
    )
    with pytest.raises(LimitError) as caught:
        check_upload_fits(model, control=False, upload_bytes_max=536_870_912)
    text = str(caught.value)
    assert "536870912" in text
    assert str(caught.value.details["found"]) in text
    assert "upload_bytes_max" in text
    check_upload_fits(model, control=False, upload_bytes_max=545_000_000)
    with pytest.raises(LimitError):  # SCAFFOLD's part doubles it
        check_upload_fits(model, control=True, upload_bytes_max=545_000_000)

from math import prod
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import MalformedError
from protocol.layout import (
    ELEMENT_BYTES,
    FLOAT_DTYPES,
    ROLE_OF_PART,
    SNAPSHOT_PARTS,
    UPDATE_PARTS,
    DType,
    Layout,
    Part,
    Role,
    Segment,
    TensorSpec,
    check_layout,
    differences,
)


def spec(name: str, *shape: int, dtype: DType = "float32", role: Role = "train", tie: str = ""):
    return TensorSpec(name=name, shape=shape, dtype=dtype, role=role, tie=tie)


MODEL = Layout(
    tensors=(
        spec("embed.weight", 10, 4, dtype="bfloat16"),
        spec("norm.running_mean", 4, role="buffer"),
        spec("norm.num_batches_tracked", dtype="int64", role="int"),
        spec("head.weight", 10, 4, dtype="bfloat16", tie="embed.weight"),
        spec("scale"),
        spec("base.weight", 100, role="frozen"),
        spec("private", 7, role="local"),
        spec("nothing", 0, 3),
    ),
    frozen_fingerprint="ab" * 32,
)


def layouts() -> st.SearchStrategy[Layout]:
    def tensor(item: tuple[int, tuple[Role, DType, tuple[int, ...]]]) -> TensorSpec:
        index, (role, dtype, shape) = item
        is_float = dtype in FLOAT_DTYPES
        if role == "int" and is_float:
            dtype = "int64"
        if role in ("train", "buffer") and not is_float:
            dtype = "float16"
        return TensorSpec(name=f"t{index}", shape=shape, dtype=dtype, role=role)

    shape = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    item = st.tuples(st.sampled_from(get_args(Role)), st.sampled_from(get_args(DType)), shape)
    return st.lists(item, max_size=12).map(
        lambda items: Layout(tensors=tuple(map(tensor, enumerate(items))))
    )


def test_ties_frozen_and_local_tensors_lie_in_no_part():
    assert [slot.spec.name for slot in MODEL.slots("params")] == [
        "embed.weight",
        "scale",
        "nothing",
    ]
    assert [slot.start for slot in MODEL.slots("params")] == [0, 40, 41]
    assert MODEL.elements("delta") == MODEL.elements("control") == 41
    assert MODEL.part_bytes("params") == 164  # float32 on the wire, whatever the model's dtype
    assert MODEL.part_bytes("ints") == 8
    assert MODEL.dense_bytes() == 164 + 16 + 8
    check_layout(MODEL)


@given(layouts())
def test_slots_of_a_part_touch_without_gap_or_overlap(layout: Layout):
    check_layout(layout)
    for part in ROLE_OF_PART:
        end = 0
        for slot in layout.slots(part):
            assert slot.start == end
            end += prod(slot.spec.shape)
        assert end == layout.elements(part)
        assert layout.part_bytes(part) == end * ELEMENT_BYTES[part]


@given(layouts())
def test_a_layout_survives_json_and_keeps_its_digest(layout: Layout):
    again = msgspec.json.decode(msgspec.json.encode(layout), type=Layout)
    assert again == layout
    assert again.digest() == layout.digest()
    assert differences(layout, again) == ()


def test_the_digest_follows_everything_but_the_segments():
    segment = Segment(rank=0, part="params", start=0, stop=41)
    ranked = Layout(
        tensors=MODEL.tensors, frozen_fingerprint=MODEL.frozen_fingerprint, segments=(segment,)
    )
    check_layout(ranked)
    assert ranked.digest() == MODEL.digest()
    assert Layout(tensors=MODEL.tensors).digest() != MODEL.digest()
    assert Layout(tensors=MODEL.tensors[::-1]).digest() != MODEL.digest()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ((spec("a"), spec("a")), "'a' stands twice"),
        ((spec(""),), "1 to 512"),
        ((spec("x" * 513),), "1 to 512"),
        ((spec("a", -1),), "impossible shape"),
        ((spec("a", *[1] * 17),), "impossible shape"),
        ((spec("a", 1 << 41),), "more than"),
        ((spec("a", 1 << 63, 1 << 63),), "more than"),
        ((spec("a", dtype="int64"),), "takes floats"),
        ((spec("a", dtype="bool", role="buffer"),), "takes floats"),
        ((spec("a", role="int"),), "takes integers"),
        ((spec("a", tie="b"), spec("b")), "cannot own it"),
        ((spec("a", tie="a"),), "cannot own it"),
        ((spec("a"), spec("b", tie="a"), spec("c", tie="b")), "cannot own it"),
        ((spec("a"), spec("b", role="buffer", tie="a")), "cannot own it"),
        ((spec("a", 4), spec("b", 5, tie="a")), "cannot own it"),
        ((spec("a"), spec("b", dtype="float16", tie="a")), "cannot own it"),
        ((spec("a", 1 << 40), spec("b")), "part delta has more than"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_the_tensors_name(
    tensors: tuple[TensorSpec, ...], says: str
):
    with pytest.raises(MalformedError, match=says):
        check_layout(Layout(tensors=tensors))


def test_too_many_tensors_and_a_false_fingerprint_are_refused():
    with pytest.raises(MalformedError, match="at most 100000"):
        check_layout(Layout(tensors=(spec("a"),) * (limits.TENSORS_MAX + 1)))
    with pytest.raises(MalformedError, match="no sha256"):
        check_layout(Layout(tensors=(), frozen_fingerprint="x" * 65))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 42), (42, 42)])
def test_a_segment_outside_its_part_is_refused(start: int, stop: int):
    segment = Segment(rank=0, part="params", start=start, stop=stop)
    with pytest.raises(MalformedError, match="outside"):
        check_layout(Layout(tensors=MODEL.tensors, segments=(segment,)))


def test_differences_name_the_tensor_and_both_values():
    theirs = Layout(tensors=(spec("embed.weight", 10, 5, dtype="float16"), spec("extra")))
    found = "\n".join(differences(MODEL, theirs))
    assert "missing tensor 'scale'" in found
    assert "unknown tensor 'extra'" in found
    assert "'embed.weight' has shape (10, 5), the job has (10, 4)" in found
    assert "dtype 'float16', the job has 'bfloat16'" in found


def test_another_order_and_another_base_model_are_differences():
    (order,) = differences(MODEL, Layout(tensors=MODEL.tensors[::-1]))
    assert "another order" in order
    (base,) = differences(MODEL, Layout(tensors=MODEL.tensors))
    assert "same base model" in base
    assert "none" in base


def test_a_thousand_differences_are_counted_and_not_listed():
    theirs = Layout(tensors=tuple(spec(f"t{i}") for i in range(1000)))
    found = differences(MODEL, theirs)
    assert len(found) == 13
    assert found[-1] == "and 996 more"


def test_updates_and_snapshots_carry_the_same_elements_under_their_own_names():
    assert set(UPDATE_PARTS) | {"params"} == set(get_args(Part)) == set(SNAPSHOT_PARTS) | {"delta"}
    assert ELEMENT_BYTES["delta"] == ELEMENT_BYTES["params"] == ELEMENT_BYTES["control"]

from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, inspect

from protocol.errors import Problem
from protocol.schema import Reader, default, describe, join, leaves, show


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """A section."""

    word: Annotated[str, Meta(min_length=1, max_length=3)]
    pair: tuple[Annotated[float, Meta(ge=0.0, lt=1.0)], Annotated[float, Meta(ge=0.0, lt=1.0)]] = (
        0.1,
        0.2,
    )
    many: tuple[int, ...] = ()
    free: dict[str, str | int | float | bool] = {}


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    """A file."""

    inner: Inner
    kind: Literal["b", "a"] = "a"
    count: Annotated[int, Meta(ge=0, le=9)] = 0
    maybe: Annotated[float, Meta(gt=0.0)] | None = None
    code: Annotated[str, Meta(pattern="^x+$")] = "x"
    flag: bool = False


def outer() -> inspect.StructType:
    found = inspect.type_info(Outer)
    assert isinstance(found, inspect.StructType)
    return found


def problems(data: object) -> list[Problem]:
    reader = Reader(outer())
    msgspec.convert(reader.read(data), Outer)  # what is left can always be taken
    return reader.problems


GOOD = {"inner": {"word": "abc"}}


def test_good_values_of_every_kind_pass():
    inner = {
        "word": "ä",
        "pair": [0, 0.5],
        "many": [1, 2],
        "free": {"a": 1, "b": "x", "c": True, "d": 1.5},
    }
    full = {"inner": inner, "kind": "b", "count": 9, "maybe": 3, "code": "xx", "flag": True}
    assert problems(full) == []
    assert problems({**GOOD, "maybe": None}) == []


@pytest.mark.parametrize(
    ("data", "key", "found", "allowed"),
    [
        ({}, "inner", "nothing", "a table"),
        ({"inner": 3}, "inner", "3", "a table"),
        ({"inner": {}}, "inner.word", "nothing", "text of 1 to 3 characters"),
        ({"inner": {"word": ""}}, "inner.word", "''", "text of 1 to 3 characters"),
        ({"inner": {"word": "a", "many": [1, "2"]}}, "inner.many[1]", "'2'", "a whole number"),
        ({"inner": {"word": "a", "many": 1}}, "inner.many", "1", "a list of a whole number"),
        ({"inner": {"word": "a", "pair": [0.1]}}, "inner.pair", "a list of 1", "a list of 2, each a finite number >= 0 and < 1"),
        ({"inner": {"word": "a", "pair": [0.1, 1.0]}}, "inner.pair[1]", "1.0", "a finite number >= 0 and < 1"),
        ({"inner": {"word": "a", "free": {"x": []}}}, "inner.free.x", "a list of 0", "text or a whole number or a finite number or true or false"),
        ({**GOOD, "kind": "c"}, "kind", "'c'", "one of 'a', 'b'"),
        ({**GOOD, "kind": []}, "kind", "a list of 0", "one of 'a', 'b'"),
        ({**GOOD, "count": True}, "count", "true", "a whole number from 0 to 9"),
        ({**GOOD, "count": 1.0}, "count", "1.0", "a whole number from 0 to 9"),
        ({**GOOD, "count": 10}, "count", "10", "a whole number from 0 to 9"),
        ({**GOOD, "count": 10**30}, "count", "a whole number beyond 64 bits", "a whole number from 0 to 9"),
        ({**GOOD, "count": None}, "count", "nothing", "a whole number from 0 to 9"),
        ({**GOOD, "maybe": 0}, "maybe", "0", "a finite number > 0"),
        ({**GOOD, "maybe": float("nan")}, "maybe", "nan", "a finite number > 0"),
        ({**GOOD, "maybe": float("inf")}, "maybe", "inf", "a finite number > 0"),
        ({**GOOD, "maybe": True}, "maybe", "true", "a finite number > 0"),
        ({**GOOD, "code": "y"}, "code", "'y'", "text of the form ^x+$"),
        ({**GOOD, "flag": 1}, "flag", "1", "true or false"),
        ({**GOOD, "flag": "yes" * 50}, "flag", "'" + ("yes" * 50)[:59] + "...", "true or false"),
        ({**GOOD, "cuont": 1}, "cuont", "an unknown key", "did you mean count?"),
        ({**GOOD, "word": 1}, "word", "an unknown key", "did you mean inner.word?"),
        ({**GOOD, "zzz zzz": 1}, "'zzz zzz'", "an unknown key", "inner, kind, count, maybe, code, flag"),
        ([], "(the whole file)", "a list of 0", "a table"),
    ],
)  # fmt: skip
def test_a_problem_has_its_key_what_was_found_and_what_is_allowed(
    data: object, key: str, found: str, allowed: str
):
    assert problems(data) == [Problem(key=key, found=found, allowed=allowed)]


def test_every_problem_is_found_at_once():
    data = {"inner": {"word": 1, "pair": [2, 3], "many": [True]}, "kind": 0, "flag": 0, "x": 0}
    assert [problem.key for problem in problems(data)] == [
        "x", "inner.word", "inner.pair[0]", "inner.pair[1]", "inner.many[0]", "kind", "flag",
    ]  # fmt: skip


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["inner", "kind", "count", "maybe", "code", "flag", "?"]), anything
    )
    | st.fixed_dictionaries(
        {"inner": st.dictionaries(st.sampled_from(["word", "pair", "many", "free"]), anything)}
    )
)
def test_whatever_comes_the_rest_can_be_taken(data: dict[str, object]):
    found = problems(data)
    try:
        msgspec.convert(data, Outer)
    except msgspec.ValidationError:
        assert found  # msgspec and this reader agree on what is bad


def test_overlapping_keys_are_above_below_or_equal():
    reader = Reader(outer())
    reader.read({"inner": {"word": "a", "many": ["x"]}, "cuont": 3})
    for key in ("inner.many", "inner", "inner.many[0]", "cuont", "count"):
        assert reader.overlaps(key), key
    for key in ("inner.word", "inner.man", "kind", "inn"):
        assert not reader.overlaps(key), key


def test_leaves_are_dotted_and_in_order_with_their_defaults():
    fields = dict(leaves(outer()))
    assert list(fields) == [
        "inner.word", "inner.pair", "inner.many", "inner.free", "kind", "count", "maybe", "code", "flag",
    ]  # fmt: skip
    assert default(fields["inner.free"]) == {}
    assert default(fields["kind"]) == "a"
    assert default(fields["inner.word"]) is None


def test_words_for_values_and_keys():
    assert [show(each) for each in (None, True, {"a": 1}, (1, 2), "x", 1.5)] == [
        "nothing", "true", "a table of 1 keys", "a list of 2", "'x'", "1.5",
    ]  # fmt: skip
    assert join("a", "b-c_1") == "a.b-c_1"
    assert join("a", "b c") == "a.'b c'"
    assert len(join("", "x" * 999)) < 80


def test_a_type_without_words_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="no words"):
        describe(inspect.type_info(bytes))

import base64
import inspect
import json
import os
import pickle
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits, messages
from protocol.bodies import UpdateMeta, decode_meta_json
from protocol.bodyio import BodyReader
from protocol.errors import LimitError, MalformedError, SkerryError, UsageError
from protocol.frames import Scanner
from protocol.jobfile import from_mapping, parse
from protocol.jobspec import JobSpec, TaskRef
from protocol.layout import Layout
from protocol.messages import (
    Evaluated,
    Event,
    Events,
    Hello,
    Instruction,
    Instructions,
    Join,
    Message,
    Prepare,
    Progress,
    Ready,
    Train,
    VersionRef,
    decode,
    encode,
)
from protocol.metrics import metric

KINDS = [
    kind
    for _, kind in inspect.getmembers(messages, inspect.isclass)
    if issubclass(kind, Message) and kind is not Message
]
BASE = VersionRef(version=3, digest="ab" * 32, bytes=2_804_291_367)
INSTRUCTIONS = Instructions(
    cursor=9,
    items=(
        Prepare(job="j", spec=JobSpec(name="n", task=TaskRef(name="t"))),
        Train(job="j", epoch=1, clock=2, attempt=1, base=BASE, steps=5, evaluate=True),
    ),
)
EVENTS = Events(
    first=4,
    items=(
        Ready(
            job="j", layout=Layout(tensors=()), layout_digest="", train_examples=1, eval_examples=0
        ),
        Progress(job="j", epoch=1, clock=2, step=3, of=5),
        Evaluated(job="j", version=3, examples=10.0, metrics={"loss": metric(0.5, 10)}),
    ),
)


def join(**fields: Any) -> dict[str, Any]:
    return {
        "token_id": "t", "token_secret": "s", "name": "edge-1", "public_key": "k", "proof": "p",
    } | fields  # fmt: skip


@pytest.mark.parametrize("message", [INSTRUCTIONS, EVENTS])
def test_messages_survive_their_encoding(message: Instructions | Events):
    assert decode(type(message), encode(message)) == message


def test_every_instruction_and_event_has_a_tag_of_its_own():
    for union in (Instruction, Event):
        tags = [kind.__struct_config__.tag for kind in get_args(union)]
        assert None not in tags
        assert len(set(tags)) == len(tags)


def test_fields_of_a_newer_protocol_are_passed_over():
    raw = json.dumps(join(protocol=2, colour="blue")).encode()
    assert decode(Join, raw).protocol == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": 3}, "name"),
        ({"protocol": "1"}, "protocol"),
        ({"protocol": True}, "protocol"),
        ({"role": "admin"}, "role"),
        ({"proof": None}, "proof"),
    ],
)
def test_a_wrong_type_is_refused_with_the_fields_name(fields: dict[str, Any], says: str):
    with pytest.raises(MalformedError, match=says):
        decode(Join, json.dumps(join(**fields)).encode())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_bytes_raise_anything_but_an_error_for_people(kind: type[Message]):
    hostile = [
        b"", b"null", b"[]", b'"x"', b"{", b"\x00", b"\xff\xfe", b"{}" * 9, b"[" * 200_000,
        b'{"a":' * 200_000, b"1e999", b"-", b'{"reason":"\\ud800"}', b'{"job"', pickle.dumps({"job": "j"}),
    ]  # fmt: skip
    for raw in hostile:
        with pytest.raises(MalformedError) as caught:
            decode(kind, raw)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "raw",
    [
        b'{"cursor":99999999999999999999999999}',
        b'{"cursor":-1}',
        b'{"cursor":1.5}',
        b'{"cursor":1,"items":[{"type":"format_disk"}]}',
        b'{"cursor":1,"items":[{"type":["train"]}]}',
        b'{"cursor":1,"items":[{}]}',
    ],
)
def test_impossible_counts_and_unknown_instructions_are_malformed(raw: bytes):
    with pytest.raises(MalformedError):
        decode(Instructions, raw)


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_random_bytes_are_taken_or_malformed(kind: type[Message], raw: bytes):
    try:
        decode(kind, raw)
    except MalformedError:
        return


@given(
    st.sampled_from(KINDS),
    st.dictionaries(
        st.sampled_from(
            ["job", "items", "type", "spec", "layout", "cursor", "metrics", "base", "protocol"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
            max_leaves=6,
        ),
    ),
)
def test_random_json_is_taken_or_malformed(kind: type[Message], value: dict[str, Any]):
    try:
        decode(kind, json.dumps(value).encode())
    except MalformedError:
        return


def test_both_sides_agree_about_the_largest_message():
    """PC-022: what encode lets out, decode takes; above JSON_BODY_BYTES_MAX both refuse."""
    empty = len(encode(Hello(instance="")))
    largest = Hello(instance="x" * (limits.JSON_BODY_BYTES_MAX - empty))
    raw = encode(largest)
    assert len(raw) == limits.JSON_BODY_BYTES_MAX
    assert decode(Hello, raw) == largest
    with pytest.raises(LimitError, match="JSON_BODY_BYTES_MAX"):
        encode(msgspec.structs.replace(largest, instance=largest.instance + "x"))
    with pytest.raises(LimitError, match="JSON_BODY_BYTES_MAX"):
        decode(Hello, raw + b" ")


def test_integer_metric_names_are_refused_when_packing():
    """PC-023: neither alone nor inside Events does an evaluation leave with number keys."""
    numbered: dict[str, Any] = {0: metric(0.91, 1), 1: metric(0.88, 1)}  # type: ignore[dict-item]
    event = Evaluated(job="j", version=1, examples=1.0, metrics=numbered)
    for message in (event, Events(first=1, items=(event,))):
        with pytest.raises(UsageError, match="metric name 0 is int"):
            encode(message)


class Bomb:
    """Unpickling this makes the directory MARKER."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_in_any_field_is_never_executed(tmp_path: Path):
    """PC-109: raw, as text in every field of every message, and as a body; the marker stays away."""
    marker = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists()  # the bomb is live
    marker.rmdir()

    texts = [bomb.decode("latin-1"), base64.b64encode(bomb).decode(), bomb.hex()]
    for kind in [*KINDS, JobSpec, UpdateMeta]:
        with pytest.raises(MalformedError):
            decode(kind, bomb)
        for text in texts:
            for field in kind.__struct_fields__:
                try:
                    decode(kind, json.dumps({field: text, "type": "update"}).encode())
                except MalformedError:
                    continue
    for take in (
        decode_meta_json,
        lambda raw: Scanner(lambda _meta: []).feed(raw),
        lambda raw: BodyReader(lambda view: view.__setitem__(slice(0, 20), raw[:20]) or 20),
        lambda raw: parse(raw.decode("latin-1"), where="job.toml"),
        lambda raw: from_mapping({"name": raw, "task": {"name": raw, "options": {"x": raw}}}),
    ):
        with pytest.raises(SkerryError):
            take(bomb)
    assert not marker.exists()

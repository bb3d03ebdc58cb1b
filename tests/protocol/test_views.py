import inspect
import json
import math

import msgspec

from protocol import views
from protocol.metrics import combine, metric
from protocol.views import JobDetail, JobList, JobView, VersionView, View

KINDS = [
    kind
    for _, kind in inspect.getmembers(views, inspect.isclass)
    if issubclass(kind, View) and kind is not View
]
JOB = JobView(
    id="j", name="n", task="t", state="running", reason="", waiting="", version=1, round=2,
    created_at=1.5, metrics=combine({"a": {"loss": metric(math.nan, 3), "acc": metric(0.5, 3)}}),
)  # fmt: skip


def test_a_reader_sees_every_field_even_at_its_default():
    shown = json.loads(msgspec.json.encode(JobList(jobs=(JOB,))))["jobs"][0]
    assert list(shown) == list(JobView.__struct_fields__)


def test_a_view_survives_json_and_holds_no_nan():
    raw = msgspec.json.encode(JobList(jobs=(JOB,)))
    assert msgspec.json.decode(raw, type=JobList).jobs == (JOB,)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    shown = json.loads(raw, parse_constant=refuse)
    assert shown["jobs"][0]["metrics"]["loss"]["value"] is None
    assert shown["jobs"][0]["metrics"]["loss"]["nonfinite"] == ["a"]


def test_every_view_says_what_it_answers():
    assert all((kind.__doc__ or "").strip() for kind in KINDS)
    assert {JobDetail, VersionView} <= set(KINDS)


def test_every_list_answer_is_an_object_with_one_list():
    lists = [kind for kind in KINDS if kind.__name__.endswith(("List", "Page"))]
    assert len(lists) >= 6
    assert all(len(kind.__struct_fields__) == 1 for kind in lists)

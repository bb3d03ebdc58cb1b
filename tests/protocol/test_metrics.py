import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import MalformedError, UsageError
from protocol.metrics import Metric, check_metrics, combine, metric


def test_numbers_are_averaged_by_examples_without_any_setting():
    """PC-050: 0.9 on 10 examples and 0.5 on 990 are 0.504."""
    found = combine({"a": {"accuracy": metric(0.9, 10)}, "b": {"accuracy": metric(0.5, 990)}})
    accuracy = found["accuracy"]
    assert accuracy.value == pytest.approx(0.504, abs=1e-12)
    assert (accuracy.sites, accuracy.of_sites, accuracy.examples) == (2, 2, 1000)


def test_the_reduction_is_declared_and_never_guessed_from_a_name():
    """PC-051: 'minibatch_loss', 'max_len' and 'admin_score' are means; a declared max is a max."""
    sites = {
        "a": {
            "minibatch_loss": metric(1.0, 1),
            "max_len": metric(1.0, 1),
            "admin_score": metric(1.0, 1),
        },
        "b": {
            "minibatch_loss": metric(3.0, 3),
            "max_len": metric(3.0, 3),
            "admin_score": metric(3.0, 3),
        },
    }
    assert {name: each.value for name, each in combine(sites).items()} == {
        "minibatch_loss": 2.5, "max_len": 2.5, "admin_score": 2.5,
    }  # fmt: skip
    for reduction, value in [("max", 3.0), ("min", 1.0), ("sum", 4.0)]:
        declared = {
            site: {"n": metric(number, count, reduction)}
            for site, number, count in [("a", 1.0, 1), ("b", 3.0, 3)]
        }
        assert combine(declared)["n"].value == value


def test_text_missing_values_and_nan_follow_the_written_rule():
    """PC-052: acc over A and B, 2 of 3 sites; text is not combined; NaN is excluded and flagged."""
    found = combine(
        {
            "A": {"acc": metric(0.8, 100), "note": metric("ok", 100)},
            "B": {"acc": metric(0.6, 300)},
            "C": {"acc": metric(None, 100), "f1": metric(math.nan, 100)},
        }
    )
    assert found["acc"].value == pytest.approx(0.65)
    assert (found["acc"].sites, found["acc"].of_sites) == (2, 3)
    assert found["note"].value is None
    assert found["note"].sites == 0
    assert found["f1"].value is None
    assert found["f1"].nonfinite == ("C",)


def test_the_worst_site_is_named_by_direction():
    sites = {"a": {"x": metric(1.0, 1)}, "b": {"x": metric(2.0, 1)}}
    up, down = combine(sites)["x"], combine(sites, frozenset({"x"}))["x"]
    assert (up.worst_site, up.worst_value) == ("a", 1.0)
    assert (down.worst_site, down.worst_value) == ("b", 2.0)


def test_a_value_behind_zero_examples_is_not_available():
    found = combine({"a": {"x": metric(5.0, 0)}, "b": {"x": metric(1.0, 10)}})["x"]
    assert (found.value, found.sites, found.of_sites) == (1.0, 1, 2)
    assert combine({"a": {"x": metric(5.0, 0)}})["x"].value is None


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (10**400, "inf"),
        (-(10**400), "-inf"),
    ],
)
def test_numbers_that_json_lacks_become_tags(value: float, tag: str):
    assert metric(value, 1.0) == Metric(examples=1.0, nonfinite=tag)


def test_whole_numbers_and_booleans_are_numbers_on_the_wire():
    assert metric(True, 1) == Metric(value=1.0, examples=1)
    assert isinstance(metric(True, 1).value, float)
    assert isinstance(metric(3, 1).value, float)


def test_long_text_is_cut_by_the_sender_and_refused_by_the_receiver():
    check_metrics({"note": metric("x" * 5000, 1)})
    with pytest.raises(MalformedError, match="5000 characters"):
        check_metrics({"note": Metric(value="x" * 5000)})


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.dictionaries(
            st.sampled_from("xyz"),
            st.builds(
                metric,
                st.none() | st.floats() | st.text(max_size=5),
                st.floats(0, limits.EXAMPLES_MAX),
                st.sampled_from(["mean", "sum", "min", "max"]),
            ),
            max_size=3,
        ),
        max_size=5,
    )
)
def test_any_metrics_combine_to_finite_numbers_or_nothing(sites: dict[str, dict[str, Metric]]):
    for each in combine(sites).values():
        assert each.value is None or math.isfinite(each.value)
        assert each.worst_value is None or math.isfinite(each.worst_value)
        assert 0 <= each.sites <= each.of_sites == len(sites)


@given(st.lists(st.tuples(st.floats(-1e300, 1e300), st.floats(1e-3, 1e12)), min_size=1, max_size=9))
def test_a_mean_lies_between_the_lowest_and_the_highest(values: list[tuple[float, float]]):
    sites = {str(i): {"x": metric(v, n)} for i, (v, n) in enumerate(values)}
    mean = combine(sites)["x"].value
    assert mean is not None
    low, high = min(v for v, _ in values), max(v for v, _ in values)
    slack = 1e-12 * max(abs(low), abs(high))
    assert low - slack <= mean <= high + slack


def test_a_sum_beyond_float64_is_not_available():
    huge = {site: {"x": metric(1.7e308, 1, "sum")} for site in "ab"}
    assert combine(huge)["x"].value is None


def test_metric_names_that_are_numbers_are_refused():
    """PC-023: a per-class metric keyed 0..9 is refused where it is packed, with what to write."""
    numbered: dict[str, Metric] = {0: metric(0.91, 1)}  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="'class 0'"):
        check_metrics(numbered)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({str(i): Metric() for i in range(257)}, "at most 256"),
        ({"": Metric()}, "empty or too long"),
        ({"x" * 129: Metric()}, "empty or too long"),
        ({"x": Metric(examples=-1)}, "impossible count"),
        ({"x": Metric(examples=math.nan)}, "impossible count"),
        ({"x": Metric(examples=1e13)}, "impossible count"),
        ({"x": Metric(value=math.inf)}, "travel as a tag"),
    ],
)
def test_metrics_out_of_bounds_are_refused(metrics: dict[str, Metric], says: str):
    with pytest.raises(MalformedError, match=says):
        check_metrics(metrics)

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.weights import By, Share, coefficients, effective_steps, weigh

counts = st.lists(st.floats(1.0, 1e12), min_size=1, max_size=8)


def test_examples_are_capped():
    weights = weigh("examples", [Share(1000.0, 1.0), Share(10.0, 1.0)], examples_max=20.0)
    assert [w / weights.delta_total for w in weights.delta] == pytest.approx([2 / 3, 1 / 3])


def test_equal_counts_each_site_with_examples_once():
    weights = weigh("equal", [Share(1000.0, 1.0), Share(1.0, 1.0), Share(0.0, 1.0)])
    assert [w / weights.delta_total for w in weights.delta] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("by", ["examples", "equal", "steps"])
def test_nobody_has_examples_so_nothing_is_usable(by: By):
    """PC-013: two sites with zero examples: no weight, no division, in every way of weighing."""
    weights = weigh(by, [Share(0.0, 3.0), Share(0.0, 5.0)])
    assert not weights.usable
    assert weights.delta == (0.0, 0.0)
    assert not weigh(by, []).usable


@pytest.mark.parametrize("part", ["delta", "values"])
def test_each_part_has_weights_of_its_own_and_none_is_taken_from_another(part: str):
    """PC-015: FedNova's weights are for delta alone; values take the documented default."""
    weights = weigh("steps", [Share(1.0, 1.0), Share(2.0, 4.0)])
    shares = getattr(weights, part)
    ratio = shares[1] / shares[0]
    assert ratio == pytest.approx({"delta": 0.5, "values": 2.0}[part])


def test_an_unknown_way_of_weighing_is_refused_when_the_job_file_is_read():
    """PC-015: an unknown name for weights is refused at submission, with what is allowed."""
    import msgspec

    from protocol.jobspec import Weights

    with pytest.raises(msgspec.ValidationError, match="by"):
        msgspec.convert({"by": "model"}, Weights)


def test_fednova_is_the_mean_by_examples_when_all_take_the_same_steps():
    shares = [Share(3.0, 7.0), Share(1.0, 7.0)]
    nova, plain = weigh("steps", shares), weigh("examples", shares)
    assert [w / nova.delta_total for w in nova.delta] == pytest.approx(
        [w / plain.delta_total for w in plain.delta], rel=1e-6
    )


@given(counts, st.integers(-20, 20))
@settings(max_examples=50, deadline=None)
def test_a_power_of_two_changes_no_weight(raw: list[float], power: int):
    one = weigh("examples", [Share(count, 1.0) for count in raw])
    other = weigh("examples", [Share(count * 2.0**power, 1.0) for count in raw])
    assert one == other


@given(counts)
@settings(max_examples=50, deadline=None)
def test_the_mean_of_equal_vectors_is_that_vector(raw: list[float]):
    weights = weigh("examples", [Share(count, 1.0) for count in raw])
    assert sum(weights.delta) == pytest.approx(weights.delta_total, rel=1e-12)
    assert max(weights.delta) < 1.0 or max(weights.delta) == 1.0
    assert all(w == float(torch.tensor(w, dtype=torch.float32)) for w in weights.delta)


def test_effective_steps_follow_the_local_solver():
    assert effective_steps(5) == 5.0
    by_hand = sum(sum(0.9**j for j in range(5 - i)) for i in range(5))
    assert effective_steps(5, momentum=0.9) == pytest.approx(by_hand)
    shrunk = sum((1 - 0.1 * 0.5) ** i for i in range(5))
    assert effective_steps(5, lr=0.1, mu=0.5) == pytest.approx(shrunk)


def test_coefficients_are_added_and_divided_by_nothing() -> None:
    found = coefficients([0.25, 0.125])
    assert found.delta == (0.25, 0.125)
    assert (found.delta_total, found.values_total, found.part) == (1.0, 0.375, 0.375)
    assert found.usable


def test_coefficients_beyond_one_still_mix_values_convexly() -> None:
    found = coefficients([0.75, 0.75])
    assert found.part == 1.0
    assert sum(found.values) / found.values_total == 1.0


@pytest.mark.parametrize("given", [[], [0.0, 0.0], [-0.5, 1.0]])
def test_coefficients_that_say_nothing_or_nonsense_are_no_contribution(given: list[float]) -> None:
    assert not coefficients(given).usable

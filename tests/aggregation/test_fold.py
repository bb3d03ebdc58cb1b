from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.fold import Accumulator
from aggregation.tiles import as_bytes
from aggregation.weights import Share, weigh

finite = st.floats(-1e6, 1e6, width=32)


def mean_delta(updates: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    sums = Accumulator({"delta": updates[0].numel()})
    for update, weight in zip(updates, weights, strict=True):
        sums.add("delta", 0, as_bytes(update), weight)
    return sums.sums["delta"] / sum(weights)


def ints_mean(*values: int, weights: tuple[float, ...] = ()) -> int:
    sums = Accumulator({"ints": 1})
    weights = weights or (1.0,) * len(values)
    for value, weight in zip(values, weights, strict=True):
        sums.add_values("ints", 0, torch.tensor([value]), weight)
    return int(sums.ints_mean(sum(weights))[0])


def buffers_mean(values: list[list[float]], weights: list[float]) -> torch.Tensor:
    sums = Accumulator({"buffers": len(values[0])})
    for value, weight in zip(values, weights, strict=True):
        sums.add_values("buffers", 0, torch.tensor(value, dtype=torch.float32), weight)
    return sums.buffers_mean(sum(weights))


def test_weighted_mean_keeps_float32_and_is_exact():
    """PC-007: float32 [1, 2] x 3 and [3, 6] x 1 -> float32 [1.5, 3.0]."""
    result = mean_delta([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], [3.0, 1.0])
    assert result.dtype == torch.float32
    assert result.tolist() == [1.5, 3.0]


def test_a_thousand_small_updates_are_not_lost_to_rounding():
    """PC-009: one thousand additions of bfloat16's 0.001 give about 1, not 0.5."""
    small = torch.tensor([0.001], dtype=torch.bfloat16)
    sums = Accumulator({"delta": 1})
    naive = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(1000):
        sums.add_values("delta", 0, small.to(torch.float32), 1.0)
        naive += small
    assert float(naive) == 0.5
    assert float(sums.sums["delta"]) == pytest.approx(1.0, rel=2e-3)


@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_side_by_side_and_one_after_the_other_give_the_same_bits(
    seed: int, count: int, pieces: int
):
    rng = torch.Generator().manual_seed(seed)
    updates = [torch.randn(pieces * 3, generator=rng) for _ in range(count)]
    weights = weigh("examples", [Share(float(k + 1), 1.0) for k in range(count)]).delta
    whole = Accumulator({"delta": pieces * 3})
    for update, weight in zip(updates, weights, strict=True):
        whole.add("delta", 0, as_bytes(update), weight)
    tiled = Accumulator({"delta": pieces * 3})
    for start in range(0, pieces * 3, 3):
        for update, weight in zip(updates, weights, strict=True):
            tiled.add("delta", 4 * start, as_bytes(update[start : start + 3]), weight)
    assert tiled.complete()
    assert torch.equal(whole.sums["delta"], tiled.sums["delta"])


def test_another_order_gives_other_bits_so_order_is_part_of_the_contract():
    rng = torch.Generator().manual_seed(1)
    updates = [torch.randn(4096, generator=rng) for _ in range(8)]
    canonical = mean_delta(updates, [1.0] * 8)
    assert torch.equal(canonical, mean_delta(updates, [1.0] * 8))
    assert not torch.equal(canonical, mean_delta(updates[::-1], [1.0] * 8))
    assert torch.allclose(canonical, mean_delta(updates[::-1], [1.0] * 8), atol=1e-6)


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(finite, min_size=n, max_size=n), min_size=1, max_size=5),
            st.integers(0, 2**20),
        )
    )
)
@settings(max_examples=100, deadline=None)
def test_a_convex_mix_stays_between_the_smallest_and_the_largest_value(
    case: tuple[list[list[float]], int],
):
    values, seed = case
    rng = random.Random(seed)
    raw = [Share(rng.uniform(0.1, 1e6), 1.0) for _ in values]
    weights = weigh("examples", raw)
    sums = Accumulator({"buffers": len(values[0])})
    for value, weight in zip(values, weights.values, strict=True):
        sums.add_values("buffers", 0, torch.tensor(value, dtype=torch.float32), weight)
    mixed = sums.buffers_mean(weights.values_total)
    stacked = torch.tensor(values, dtype=torch.float32)
    assert bool((mixed >= stacked.min(0).values).all())
    assert bool((mixed <= stacked.max(0).values).all())


def test_a_mean_of_variances_is_never_negative():
    tiny = [[1e-38, 0.0, 0.01], [0.0, 0.0, 0.002]]
    mixed = buffers_mean(tiny, [1.0, 3.0])
    assert mixed.dtype == torch.float32
    assert bool((mixed >= 0).all())
    assert float(mixed[2]) == pytest.approx(0.004)


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.floats(0.01, 1e6), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_equal_integers_stay_exact_whatever_their_size(value: int, raw: list[float]):
    weights = weigh("examples", [Share(count, 1.0) for count in raw])
    sums = Accumulator({"ints": 1})
    for weight in weights.values:
        sums.add_values("ints", 0, torch.tensor([value]), weight)
    assert int(sums.ints_mean(weights.values_total)[0]) == value


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ((3, 5), 4),
        ((3, 4), 4),  # 3.5 -> 4, half to even
        ((4, 5), 4),  # 4.5 -> 4, half to even
        ((-3, -4), -4),
        ((0, 0), 0),
        ((0, 1, 1), 1),
        ((2**53 + 1, 2**53 + 3), 2**53 + 2),
    ],
)
def test_integers_are_rounded_half_to_even_in_any_order(values: tuple[int, ...], mean: int):
    for order in itertools.permutations(values):
        assert ints_mean(*order) == mean


def test_integers_at_both_ends_of_the_range_do_not_wrap_around():
    low, high = -(2**63), 2**63 - 1
    assert abs(ints_mean(low, high)) <= 2**10
    assert ints_mean(high, low, weights=(1.0, 0.0)) > 2**62


def test_a_gap_or_a_piece_outside_the_part_is_refused():
    sums = Accumulator({"delta": 4})
    with pytest.raises(ValueError, match="gap"):
        sums.add_values("delta", 2, torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="no elements"):
        sums.add_values("delta", 0, torch.ones(5), 1.0)
    assert not sums.complete()


def test_an_empty_part_is_complete_from_the_start():
    assert Accumulator({"delta": 0, "ints": 0}).complete()

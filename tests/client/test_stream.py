from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from client.seeds import seed_everything, seeded
from client.stream import Stream, batch_bounds, period_batches, sequential_batches
from protocol.errors import RefusedError


class Noisy(Dataset[Any]):
    """Examples that are augmented with the global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return float(index) + torch.rand(()).item() / 2


def make(data: Any, batch: int = 4, *, merge: bool = False) -> Stream:
    return Stream(data, batch_size=batch, seed=3, merge_single=merge)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def loader(workers: int = 0, *, generator: bool = False) -> DataLoader[Any]:
    own = torch.Generator().manual_seed(5) if generator else None
    return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers, generator=own)


def periods(stream: Stream, *, first: int, last: int, steps: int = 2) -> list[list[float]]:
    found = []
    for clock in range(first, last):
        seed_everything(clock)
        for batch in period_batches(stream, steps=steps, epochs=0):
            values = batch[0] if isinstance(batch, (tuple, list)) else batch
            found.append([round(float(value), 5) for value in values])
    return found


SOURCES = {
    "data set": lambda: numbers(10),
    "augmented": Noisy,
    "loader": loader,
    "loader with a generator": lambda: loader(generator=True),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("at", range(1, 6))
def test_a_restarted_stream_goes_on_with_the_very_same_batches(source: Any, at: int):
    whole = periods(make(source()), first=0, last=6)
    stream = make(source())
    begun = periods(stream, first=0, last=at)
    fresh = make(source())
    fresh.seek(stream.position)
    assert begun + periods(fresh, first=at, last=6) == whole


def test_every_pass_has_every_example_once_in_an_order_of_its_own():
    batches = periods(make(numbers(10)), first=0, last=3)
    first, second = [*chain(*batches[:3])], [*chain(*batches[3:])]
    assert sorted(first) == sorted(second) == [float(i) for i in range(10)]
    assert first != second


def test_epochs_are_whole_passes():
    stream = make(numbers(10))
    batches = list(period_batches(stream, steps=0, epochs=2))
    assert len(batches) == 6
    assert stream.position == (2, 0)
    assert stream.batches_per_pass == 3


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_epochs_after_a_cut_go_on_where_the_data_was(cut: int):
    """Else the end of the data would never have its turn at a site that is always cut."""
    stream = make(numbers(10))
    before = list(islice(period_batches(stream, steps=0, epochs=1), cut))
    after = list(period_batches(stream, steps=0, epochs=1))
    assert len(after) == stream.batches_per_pass
    seen = [float(x) for batch in [*before, *after][:3] for x in batch[0]]
    assert sorted(seen) == [float(i) for i in range(10)]


class Unknown:
    """Batches of which nobody knows how many there are."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(2), torch.ones(2), torch.ones(1)])


@pytest.mark.parametrize(("cut", "left"), [(1, 5), (2, 4), (3, 6)])
def test_the_rest_of_a_pass_of_unknown_length_is_the_first_pass(cut: int, left: int):
    stream = make(Unknown())
    list(islice(period_batches(stream, steps=0, epochs=2), cut))
    assert len(list(period_batches(stream, steps=0, epochs=2))) == left


@pytest.mark.parametrize(
    ("count", "merge", "sizes"),
    [
        (33, False, [32, 1]),
        (33, True, [33]),
        (32, True, [32]),
        (65, True, [32, 33]),
        (1, True, [1]),
        (0, True, []),
    ],
)
def test_the_last_batch_of_one_example_can_be_merged(count: int, merge: bool, sizes: list[int]):
    """PC-047: 33 examples in batches of 32."""
    assert [b - a for a, b in batch_bounds(count, 32, merge_single=merge)] == sizes


class Once:
    """An iterable that can be read only once."""

    def __init__(self) -> None:
        self._batches = iter([torch.zeros(2), torch.ones(2)])

    def __iter__(self) -> Iterator[Any]:
        return self._batches


@pytest.mark.parametrize(("steps", "epochs"), [(5, 0), (0, 2)])
def test_data_that_can_be_read_only_once_is_refused_at_its_end(steps: int, epochs: int):
    with pytest.raises(RefusedError, match="can be read only once"):
        list(period_batches(make(Once()), steps=steps, epochs=epochs))


def test_a_stream_draws_nothing_from_the_generators_of_the_period():
    seed_everything(1)
    before = torch.get_rng_state()
    make(numbers(10)).next_batch()
    with seeded(9):
        torch.rand(3)
    assert torch.get_rng_state().equal(before)


def test_test_data_comes_in_its_own_order():
    assert [b[0].tolist() for b in sequential_batches(numbers(3), 2)] == [[0.0, 1.0], [2.0]]
    assert list(sequential_batches(iter([1, 2]), 2)) == [1, 2]

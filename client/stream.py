"""A site's training data as one endless stream of batches with a position that can be kept.

A period takes up the stream where the last one left it; a restarted worker finds the very same
batch again, because the order of every pass derives from the seed and the number of the pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from client.seeds import seeded
from protocol.errors import RefusedError
from protocol.names import derive_seed


def is_dataset(data: object) -> bool:
    """True for map-style data sets, False for loaders and other iterables of batches."""
    return (
        not isinstance(data, DataLoader)
        and hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
    )


def take(dataset: Any, indices: Tensor) -> Any:
    """The batch of these examples, collated."""
    if isinstance(dataset, TensorDataset):
        return tuple(tensor[indices] for tensor in dataset.tensors)
    plain = indices.tolist()
    if hasattr(dataset, "__getitems__"):
        return default_collate(dataset.__getitems__(plain))
    return default_collate([dataset[i] for i in plain])


def batch_bounds(examples: int, batch_size: int, *, merge_single: bool) -> list[tuple[int, int]]:
    """Ranges of the batches of one pass; with `merge_single` a last batch of one example is put
    into the batch before it.
    """
    edges = list(range(0, examples, batch_size))
    if merge_single and len(edges) > 1 and examples - edges[-1] == 1:
        edges.pop()
    return list(itertools.pairwise([*edges, examples]))


class Stream:
    """Batches one after the other; `position` is (pass, batches taken of it)."""

    def __init__(self, data: Any, *, batch_size: int, seed: int, merge_single: bool) -> None:
        self.data = data
        self._seed = seed
        self._bounds = (
            batch_bounds(len(data), batch_size, merge_single=merge_single)
            if is_dataset(data)
            else None
        )
        self._batches: Iterator[Any] | None = None
        self.position = (0, 0)

    @property
    def batches_per_pass(self) -> int:
        """Batches in one pass; 0 when only a whole pass would tell."""
        if self._bounds is not None:
            return len(self._bounds)
        try:
            return len(self.data)
        except TypeError:
            return 0

    def seek(self, position: tuple[int, int]) -> None:
        """Go to a position; costs nothing when the stream is there already."""
        if position != self.position:
            self.position = position
            self._batches = None

    def forget(self) -> None:
        """Drop the open iterator; the next batch comes from a fresh one at `position`."""
        self._batches = None

    def next_batch(self) -> Any | None:
        """The next batch, or None at the end of a pass; the next call begins another pass."""
        number, taken = self.position
        batch: Any | None = None
        batches = self._batches
        if batches is None:
            # Samplers draw their order with the first batch: it belongs to the seed of the pass.
            # All later ones are drawn under the seed of the period, after a restart as before.
            seed = derive_seed(self._seed, "order", str(number))
            with seeded(seed):
                batches = self._open(seed, taken)
                if taken == 0:
                    batch = next(batches, None)
        if taken > 0:
            batch = next(batches, None)
        if batch is None:
            self.position, self._batches = (number + 1, 0), None
        else:
            self.position, self._batches = (number, taken + 1), batches
        return batch

    def _open(self, seed: int, taken: int) -> Iterator[Any]:
        if self._bounds is not None:
            return self._dataset_pass(self._bounds, seed, taken)
        generator = getattr(self.data, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        batches: Iterator[Any] = iter(self.data)
        for _ in range(taken):
            next(batches, None)
        return batches

    def _dataset_pass(self, bounds: list[tuple[int, int]], seed: int, taken: int) -> Iterator[Any]:
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(seed))
        for start, stop in bounds[taken:]:
            yield take(self.data, order[start:stop])


def period_batches(stream: Stream, *, steps: int, epochs: int) -> Iterator[Any]:
    """The batches of one period: `steps` of them, or those of `epochs` passes.

    A pass that was cut is gone on with, so that the end of the data has its turn too: the period
    has as many batches as whole passes would have or, where nobody knows how many that are, the
    rest counts as the first pass.

    Raises:
        RefusedError: the data gave no batch in a whole pass.
    """
    of_pass = stream.position[1]
    if not steps and of_pass:
        steps = epochs * stream.batches_per_pass
    taken, passes = 0, 0
    while taken < steps if steps else passes < epochs:
        batch = stream.next_batch()
        if batch is not None:
            taken, of_pass = taken + 1, of_pass + 1
            yield batch
            continue
        # The first end may be that of a pass which the last period used up.
        passes, was_empty, of_pass = passes + (taken > 0), of_pass == 0, 0
        if was_empty:
            raise RefusedError(
                "the training data gave no batch in a whole pass.",
                "Give a data set or an iterable that can be read again and again; a generator "
                "object can be read only once.",
            )


def sequential_batches(data: Any, batch_size: int) -> Iterable[Any]:
    """Batches of test data, in the data's own order."""
    if not is_dataset(data):
        batches: Iterator[Any] = iter(data)
        return batches
    bounds = batch_bounds(len(data), batch_size, merge_single=False)
    return (take(data, torch.arange(start, stop)) for start, stop in bounds)

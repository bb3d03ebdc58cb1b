from __future__ import annotations

import pytest
import torch
from torch import nn

from client.pipeline import make_update
from client.tensors import describe, gather, new_part, tensors_of
from protocol.errors import RefusedError
from protocol.layout import Part


def started(model: nn.Module, *, control: float | None = None) -> dict[Part, torch.Tensor]:
    layout = describe(model).layout
    parts: dict[Part, torch.Tensor] = {}
    for part in ("params", "buffers", "ints"):
        parts[part] = new_part(layout, part)
        gather(tensors_of(model), layout, part, parts[part])
    if control is not None:
        parts["control"] = torch.full_like(parts["params"], control)
    return parts


def test_delta_is_end_minus_start_and_buffers_are_values():
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2))
    start = started(model)
    with torch.no_grad():
        model[0].weight += 0.5  # type: ignore[operator]
        model[1].running_mean.fill_(3.0)  # type: ignore[operator, union-attr]
        model[1].num_batches_tracked.fill_(5)  # type: ignore[operator, union-attr]
    update = make_update(model, describe(model).layout, start, distance=0.1, residual=None)
    assert [*update.parts] == ["delta", "buffers", "ints"]
    torch.testing.assert_close(update.parts["delta"], torch.tensor([0.5, 0.5, 0, 0, 0, 0]))
    assert update.parts["buffers"].tolist() == [3.0, 3.0, 1.0, 1.0]
    assert update.parts["ints"].tolist() == [5]
    assert update.norm == pytest.approx(0.5**0.5)


def test_control_comes_from_the_training_and_the_residual_from_before():
    model = nn.Linear(1, 2, bias=False)
    start = started(model, control=0.25)
    with torch.no_grad():
        model.weight += 0.5
    owed = torch.tensor([1.0, -1.0])
    update = make_update(model, describe(model).layout, start, distance=0.2, residual=owed)
    torch.testing.assert_close(update.parts["control"], torch.tensor([-2.75, -2.75]))
    torch.testing.assert_close(update.parts["delta"], torch.tensor([1.5, -0.5]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_is_refused_by_the_tensors_name(value: float):
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    start = started(model)
    model[1].running_var[1] = value  # type: ignore[index]
    with pytest.raises(RefusedError, match=r"'1\.running_var' holds 1 values of 2"):
        make_update(model, describe(model).layout, start, distance=0.1, residual=None)

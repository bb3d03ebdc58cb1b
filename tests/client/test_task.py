from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

from client.task import SiteContext, Task


class Scores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


BATCH = (torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), torch.tensor([0, 1, 1]))


def test_the_defaults_are_those_of_a_classifier():
    task, model = Task(), Scores()
    expected = nn.functional.cross_entropy(*BATCH)
    assert task.loss(model, BATCH).equal(expected)
    metrics = task.metrics(model, BATCH)
    assert metrics["loss"].equal(expected)
    assert metrics["accuracy"].item() == pytest.approx(2 / 3)
    assert task.optimizer(model) is None


def test_model_and_data_have_to_be_defined():
    with pytest.raises(TypeError, match=r"Task must define model\(self\)"):
        Task().model()
    with pytest.raises(TypeError, match=r"Task must define data\(self, site\)"):
        Task().data(SiteContext(name="a", role="site", job="j", seed=0))


def test_options_are_a_copy_of_the_jobs():
    given = {"width": 3}
    task = Task(given)
    given["width"] = 4
    assert task.options == {"width": 3}


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 2),
        (torch.zeros(5), torch.zeros(5)),
        {"x": torch.zeros(5)},
        [[0] * 5, [1] * 5],
        ([torch.tensor(1.0)] * 5, torch.zeros(5)),
        (["a", "bc", "d", "e", "f"], torch.zeros(5)),
    ],
)
def test_examples_of_a_batch_are_counted_in_its_first_item(batch: object):
    assert Task().batch_examples(batch) == 5


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_a_named_tuple_stays_one():
    moved = Task().to_device(Pair(torch.zeros(1), torch.ones(1)), torch.device("meta"))
    assert isinstance(moved, Pair)
    assert moved.y.device.type == "meta"


def test_a_batch_is_moved_with_all_that_is_in_it():
    batch = OrderedDict(x=torch.zeros(2), y=[torch.ones(1), "text"])
    moved = Task().to_device(batch, torch.device("meta"))
    assert moved["x"].device.type == moved["y"][0].device.type == "meta"
    assert moved["y"][1] == "text"

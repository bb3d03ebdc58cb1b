from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from client.statecodec import decode_value, encode_value, fetch, store
from client.statefile import StateReader, read_value, write_state
from protocol.errors import MalformedError, UsageError


def through_a_file(path: Path, value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    tree = encode_value(value, "x", tensors)
    write_state(path, {"tree": tree}, [store(name, tensor) for name, tensor in tensors.items()])
    with path.open("rb") as file:
        reader = StateReader(file)
        found = {name: fetch(reader, name) for name in reader.entries}
        return decode_value(reader.value["tree"], found)


def test_values_come_back_exactly(tmp_path: Path):
    value = {
        "a": [1, 2.5, True, None, "text"],
        "b": (0.1, (1,), -math.inf),
        3: {"c": {1, 2}},
        "milestones": Counter({4: 2}),
    }
    found = through_a_file(tmp_path / "s", value)
    assert found == value
    assert isinstance(found["milestones"], Counter)
    assert math.isnan(through_a_file(tmp_path / "s", math.nan))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        torch.tensor(3),
        torch.empty(0, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([True, False]),
    ],
)
def test_tensors_come_back_with_dtype_and_shape(tmp_path: Path, tensor: Tensor):
    found = through_a_file(tmp_path / "s", {"t": tensor})["t"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert found.equal(tensor)


def test_the_file_is_ordinary_safetensors(tmp_path: Path):
    path = tmp_path / "s.safetensors"
    items = [store("a", torch.arange(3.0)), store("b", torch.tensor([1.0], dtype=torch.bfloat16))]
    write_state(path, {"k": 1}, items)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("a").tolist() == [0, 1, 2]
        assert file.get_tensor("b").dtype == torch.bfloat16
    assert read_value(path) == {"k": 1}


@pytest.mark.parametrize("value", [object(), {"deep": [lambda: 1]}, {(1, 2): 3}, {"m": b"raw"}])
def test_what_cannot_be_kept_is_refused_with_its_path(value: Any):
    with pytest.raises(UsageError, match=r"^optimizer"):
        encode_value(value, "optimizer", {})


def test_a_cut_or_strange_file_is_refused(tmp_path: Path):
    path = tmp_path / "s"
    write_state(path, {}, [store("a", torch.arange(300.0))])
    raw = path.read_bytes()
    path.write_bytes(raw[:-8])
    with path.open("rb") as file, pytest.raises(MalformedError, match="cut off"):
        fetch(StateReader(file), "a")
    for content in (b"", b"\xff" * 40, raw[:30]):
        path.write_bytes(content)
        with path.open("rb") as file, pytest.raises(MalformedError):
            StateReader(file)


def test_an_absent_file_has_an_empty_value(tmp_path: Path):
    assert read_value(tmp_path / "none") == {}

"""Tensors that never left the sites come back into an exported file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import InvalidFileError, NotFoundError
from skerry.merge import merge


@pytest.fixture
def files(tmp_path: Path):
    exported = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2.0, dtype=torch.float16)}
    base = {
        "a": torch.zeros(2, 3),
        "b": torch.tensor(0.0, dtype=torch.float16),
        "frozen": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "count": torch.tensor(9),
    }
    save_file(exported, tmp_path / "exported", metadata={"version": "7"})
    save_file(base, tmp_path / "base")
    return tmp_path / "exported", tmp_path / "base"


def test_missing_tensors_are_taken_from_the_base_and_others_are_not(files: tuple[Path, Path]):
    exported, base = files
    merge(exported, base, ["frozen", "empty", "count"])
    found = load_file(exported)
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(found["frozen"], torch.arange(5, dtype=torch.bfloat16))
    assert found["empty"].shape == (0, 4)
    assert found["count"] == 9
    assert set(found) == {"a", "b", "frozen", "empty", "count"}


def test_without_names_all_that_is_missing_is_taken(files: tuple[Path, Path]):
    exported, base = files
    merge(exported, base)
    assert set(load_file(exported)) == {"a", "b", "frozen", "empty", "count"}


def test_a_base_that_lacks_a_tensor_is_refused_and_nothing_changes(files: tuple[Path, Path]):
    exported, base = files
    before = exported.read_bytes()
    with pytest.raises(NotFoundError, match=r"head.weight"):
        merge(exported, base, ["frozen", "head.weight"])
    assert exported.read_bytes() == before


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 8,
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (60).to_bytes(8, "little")
        + b'{"frozen":{"dtype":"F32","shape":[1],"data_offsets":[0,99]}}',
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(files: tuple[Path, Path], raw: bytes):
    exported, base = files
    base.write_bytes(raw)
    with pytest.raises(InvalidFileError):
        merge(exported, base, ["frozen"])

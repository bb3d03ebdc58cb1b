"""Loaders and splits."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import InvalidFileError, NotFoundError, UsageError
from skerry import datasets
from skerry.datasets import dirichlet_split, part_of

SIZES = [5, 20, 40, 60, 80, 95, 110, 130, 160, 300]  # 1,000 examples in 10 unequal classes


@pytest.fixture
def labels():
    return np.repeat(np.arange(10), SIZES)


@pytest.mark.parametrize("alpha", [0.2, 100.0, 10_000.0])
@pytest.mark.parametrize("parts", [2, 7])
def test_a_class_that_runs_out_leaves_valid_parts_of_equal_size(
    labels: datasets.Labels, alpha: float, parts: int
):
    """PC-054: two parts of exactly half the data, classes of 5 to 300: no NaN, nothing twice."""
    split = dirichlet_split(labels, parts, alpha, 3, equal_sizes=True)
    assert sorted(np.concatenate(split)) == list(range(1000))
    assert {len(part) for part in split} <= {1000 // parts, 1000 // parts + 1}


@pytest.mark.parametrize("alpha", [1e-3, 0.2, 1.0, 100.0, 10_000.0])
@pytest.mark.parametrize("seed", [0, 3])
def test_every_index_is_in_exactly_one_part(labels: datasets.Labels, alpha: float, seed: int):
    """PC-054: shares of tiny and huge concentrations are finite, and cover everything once."""
    split = dirichlet_split(labels, 4, alpha, seed, min_size=0)
    assert sorted(np.concatenate(split)) == list(range(1000))


def test_a_split_that_cannot_be_had_names_the_scarcest_class(labels: datasets.Labels):
    """PC-054: the refusal names the class and how little of it there is."""
    with pytest.raises(UsageError, match="scarcest class is 0 with 5 examples"):
        dirichlet_split(labels, 10, 0.001, 3, min_size=95)


@pytest.mark.parametrize(
    ("parts", "alpha", "min_size"), [(0, 1.0, 1), (2, 0.0, 1), (2, float("nan"), 1), (2, 1.0, 501)]
)
def test_impossible_numbers_are_refused(
    labels: datasets.Labels, parts: int, alpha: float, min_size: int
):
    with pytest.raises(UsageError):
        dirichlet_split(labels, parts, alpha, 0, min_size=min_size)


def test_a_small_alpha_skews_more_than_a_large_one(labels: datasets.Labels):
    def spread(alpha: float) -> float:
        split = dirichlet_split(labels, 4, alpha, 1, equal_sizes=True)
        shares = [np.bincount(labels[part], minlength=10) / len(part) for part in split]
        return float(np.std(shares, axis=0).mean())

    assert spread(0.1) > 3 * spread(1000.0)


def test_sites_with_the_same_options_never_share_an_example(labels: datasets.Labels):
    parts = [
        part_of(labels, {"part": str(part), "parts": "4", "alpha": "0.5"}, 7) for part in range(4)
    ]
    assert sorted(np.concatenate(parts)) == list(range(1000))


@pytest.mark.parametrize("options", [{"part": "4", "parts": "4"}, {"part": "x"}, {"part": "-1"}])
def test_a_part_that_is_not_there_is_refused(labels: datasets.Labels, options: dict[str, str]):
    with pytest.raises(UsageError, match="site option"):
        part_of(labels, options, 7)


def write_idx(folder: Path, name: str, array: np.ndarray, *, zipped: bool = True):
    head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    if zipped:
        (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
    else:
        (folder / name).write_bytes(raw)


@pytest.fixture
def folder(tmp_path: Path):
    for name, count in (("train", 6), ("t10k", 2)):
        images = np.arange(count * 4).reshape(count, 2, 2) * 10
        write_idx(tmp_path, f"{name}-images-idx3-ubyte", images)
        write_idx(tmp_path, f"{name}-labels-idx1-ubyte", np.arange(count), zipped=False)
    return tmp_path


def test_a_folder_of_idx_files_is_read_gzipped_or_plain(folder: Path):
    images = datasets.fashion_mnist(folder)
    assert images.train_x.shape == (6, 1, 2, 2)
    assert images.train_x.dtype == np.float32
    assert float(images.train_x.max()) == pytest.approx(230 / 255)
    assert list(images.test_y) == [0, 1]
    assert datasets.has_fashion_mnist(folder)


@pytest.mark.parametrize("cut", [3, 10, 20])
def test_a_file_that_is_cut_short_is_named(folder: Path, cut: int):
    file = folder / "train-images-idx3-ubyte"
    (folder / "train-images-idx3-ubyte.gz").unlink()
    write_idx(folder, file.name, np.zeros((6, 2, 2)), zipped=False)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(InvalidFileError, match="train-images"):
        datasets.fashion_mnist(folder)


def test_what_is_not_there_names_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets, "DEBIAN_FASHION_MNIST", tmp_path / "no")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(NotFoundError, match=r"no.*cache/skerry/fashion-mnist"):
        datasets.fashion_mnist()
    assert not datasets.has_fashion_mnist()


def test_digits_are_the_same_every_time():
    first, second = datasets.digits(), datasets.digits()
    assert first.train_x.shape == (1437, 1, 8, 8)
    assert len(first.test_y) == 360
    assert np.array_equal(first.train_y, second.train_y)

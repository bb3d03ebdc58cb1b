"""Small real data for examples and the demo, and ways to split it over sites.

Nothing is downloaded when a program runs: the loaders look at a path that the caller gives, at the
place where Debian's package puts the files, and at a cache folder.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import InvalidFileError, NotFoundError, Problem, UsageError

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]

DEBIAN_FASHION_MNIST: Final = Path("/usr/share/datasets/fashion-mnist")
_SPLIT_TRIES: Final = 200
_IDX_BYTES_MAX: Final = 256 << 20
_FILES: Final = {
    "train_x": "train-images-idx3-ubyte",
    "train_y": "train-labels-idx1-ubyte",
    "test_x": "t10k-images-idx3-ubyte",
    "test_y": "t10k-labels-idx1-ubyte",
}


class Images(msgspec.Struct, frozen=True, kw_only=True):
    """Labelled images: `*_x` is float32 (n, 1, height, width) in [0, 1], `*_y` is int64 (n,)."""

    name: str
    train_x: Any  # Floats; msgspec has no arrays, and nothing here is decoded
    train_y: Any
    test_x: Any
    test_y: Any


def fashion_mnist(path: Path | str | None = None) -> Images:
    """Fashion-MNIST: 60,000 + 10,000 images of 28 x 28 in 10 classes (MIT licence).

    Args:
        path: a folder with the four IDX files, plain or gzipped.

    Raises:
        NotFoundError: no folder has them; the message names all that were looked at.
        InvalidFileError: a file is not what its name says.
    """
    places = _places(path)
    for folder in places:
        if found := _files_in(folder):
            arrays = {key: _read_idx(file) for key, file in found.items()}
            return Images(
                name="Fashion-MNIST",
                train_x=_scaled(arrays["train_x"]),
                train_y=arrays["train_y"].astype(np.int64),
                test_x=_scaled(arrays["test_x"]),
                test_y=arrays["test_y"].astype(np.int64),
            )
    raise NotFoundError(
        f"Fashion-MNIST is in none of: {', '.join(str(place) for place in places)}.",
        "On Debian: apt-get install dataset-fashion-mnist. Elsewhere: put the four "
        f"*-ubyte.gz files into {_cache() / 'fashion-mnist'}.",
    )


def has_fashion_mnist(path: Path | str | None = None) -> bool:
    """Whether `fashion_mnist` would find its files."""
    return any(_files_in(folder) for folder in _places(path))


def digits(test_fraction: float = 0.2, seed: int = 0) -> Images:
    """scikit-learn's digits: 1,797 images of 8 x 8 in 10 classes, in the installed package.

    Raises:
        NotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  an optional dependency
    except ImportError:
        raise NotFoundError(
            "the digits data set comes with scikit-learn, which is not installed.",
            "Install it: pip install 'skerry[demo]'.",
        ) from None
    bunch = load_digits()
    order = np.random.default_rng(seed).permutation(len(bunch.target))
    x = (bunch.images[order] / 16.0).astype(np.float32)[:, None]
    y = bunch.target[order].astype(np.int64)
    cut = int(len(y) * (1 - test_fraction))
    return Images(name="digits", train_x=x[:cut], train_y=y[:cut], test_x=x[cut:], test_y=y[cut:])


def dirichlet_split(
    labels: Labels,
    parts: int,
    alpha: float,
    seed: int,
    *,
    min_size: int = 1,
    equal_sizes: bool = False,
) -> list[Indices]:
    """Split indices over `parts` sites with skewed labels; every index is in exactly one part.

    By default each class is dealt out by its own proportions ~ Dirichlet(alpha), so sizes differ
    too, and a draw that leaves a part below `min_size` is drawn again. With `equal_sizes` each part
    has its own class mix ~ Dirichlet(alpha p), p the mix of the whole, and sizes differ by at most
    one; a class that has run out is left out of the mix, so later parts deviate more from theirs.

    Raises:
        UsageError: impossible numbers, or no draw gives every part `min_size` examples.
    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution", 2019.
    """
    if parts < 1 or not alpha > 0 or min_size < 0:
        raise UsageError(
            f"cannot split into {parts} parts with alpha {alpha} and at least {min_size} each.",
            "parts must be 1 or more, alpha above 0, min_size 0 or more.",
        )
    if len(labels) < parts * min_size:
        raise UsageError(
            f"{len(labels)} examples cannot give {parts} parts of at least {min_size}.",
            "Use fewer parts or a smaller min_size.",
        )
    random = np.random.default_rng(seed)
    classes = [random.permutation(np.flatnonzero(labels == one)) for one in np.unique(labels)]
    if equal_sizes:
        return _equal_parts(classes, parts, alpha, random)
    for _ in range(_SPLIT_TRIES):
        split = _proportional_parts(classes, parts, alpha, random)
        if min(len(part) for part in split) >= min_size:
            return split
    scarce = min(zip(np.unique(labels), classes, strict=True), key=lambda pair: len(pair[1]))
    raise UsageError(
        f"{_SPLIT_TRIES} draws with alpha {alpha:g} all left a part with fewer than {min_size} "
        f"examples; the scarcest class is {scarce[0]} with {len(scarce[1])} examples.",
        "Use a larger alpha, fewer parts, a smaller min_size, or equal_sizes.",
    )


def part_of(labels: Labels, options: Mapping[str, str], seed: int) -> Indices:
    """The part of a Dirichlet split that a site's options name: `part`, `parts` and `alpha`.

    All sites must use the same `seed`, `parts` and `alpha`: then no example is at two of them.

    Raises:
        UsageError: an option is missing or out of range.
    """
    try:
        part, parts = int(options.get("part", "0")), int(options.get("parts", "1"))
        alpha = float(options.get("alpha", "0.5"))
    except ValueError as error:
        raise UsageError(f"a site option of the split is not a number: {error}.") from None
    if not 0 <= part < parts:
        raise UsageError(
            f"the site option part = {part} must be at least 0 and below parts = {parts}."
        )
    return dirichlet_split(labels, parts, alpha, seed)[part]


def _proportional_parts(
    classes: Sequence[Indices], parts: int, alpha: float, random: np.random.Generator
) -> list[Indices]:
    piles: list[list[Indices]] = [[] for _ in range(parts)]
    for indices in classes:
        shares = random.dirichlet(np.full(parts, alpha))
        cuts = (np.cumsum(shares)[:-1] * len(indices)).round().astype(np.int64)
        for pile, piece in zip(piles, np.split(indices, cuts), strict=True):
            pile.append(piece)
    return [np.sort(np.concatenate(pile)) for pile in piles]


def _equal_parts(
    classes: Sequence[Indices], parts: int, alpha: float, random: np.random.Generator
) -> list[Indices]:
    left = np.array([len(indices) for indices in classes])
    sizes = [int(left.sum()) // parts + (part < int(left.sum()) % parts) for part in range(parts)]
    prior = len(classes) * left / max(left.sum(), 1)  # as they are in the whole: mean alpha
    split = []
    for size in sizes:
        mix = random.dirichlet(alpha * prior)
        taken = np.zeros_like(left)
        while (missing := size - int(taken.sum())) > 0:
            room = left - taken
            chances = np.where(room > 0, mix, 0.0)
            if not chances.sum() > 0:  # every class of this mix has run out: take what is there
                chances = room.astype(float)
            draw = random.multinomial(missing, chances / chances.sum())
            taken += np.minimum(draw, room)
        pieces = [
            indices[start : start + count]
            for indices, start, count in zip(
                classes, [len(c) for c in classes] - left, taken, strict=True
            )
        ]
        left = left - taken
        split.append(np.sort(np.concatenate(pieces)))
    return split


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skerry"


def _places(path: Path | str | None) -> list[Path]:
    return [Path(path)] if path else [DEBIAN_FASHION_MNIST, _cache() / "fashion-mnist"]


def _files_in(folder: Path) -> dict[str, Path]:
    """The four files, gzipped or plain; empty unless all are there."""
    found = {}
    for key, name in _FILES.items():
        for file in (folder / f"{name}.gz", folder / name):
            if file.is_file():
                found[key] = file
                break
    return found if len(found) == len(_FILES) else {}


def _scaled(pixels: NDArray[np.uint8]) -> Floats:
    return (pixels.astype(np.float32) / np.float32(255))[:, None]


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes: two zeros, type 8, rank, big-endian sizes, data."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(_IDX_BYTES_MAX)
    except (OSError, EOFError) as error:
        raise _not_idx(path, str(error)) from None
    rank = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) >= 4 else 0
    if rank not in {1, 3} or len(raw) < 4 + 4 * rank:
        raise _not_idx(path, f"it begins with {raw[:4].hex() or 'nothing'}")
    shape = [int(n) for n in np.frombuffer(raw, ">u4", rank, 4)]
    if len(raw) - 4 - 4 * rank != int(np.prod(shape, dtype=object)):
        raise _not_idx(path, f"its header says {shape}, its data has {len(raw) - 4 - 4 * rank}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _not_idx(path: Path, found: str) -> InvalidFileError:
    problem = Problem(key=str(path), found=found, allowed="an IDX file of unsigned bytes")
    return InvalidFileError(f"{path} cannot be read.", "Fetch it again.", problems=(problem,))

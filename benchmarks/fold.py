"""How fast updates are folded, against what this machine's memory allows in the same run.

`bound_gb_s`      torch adds whole float32 vectors, scaled, to a sum: nothing can fold faster
`fold_gb_s`       decode + weight + add of the same updates in memory, in pieces of 1 MiB
`ratio`           the one over the other
`spool_fold_gb_s` the same from spool files in the page cache, read as the fold process reads them

GB/s are 1e9 bytes of float32 updates per second; ten updates of 1e7 elements each. Memory comes in
huge pages, as it does in the fold process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from aggregation.fold import Accumulator
from aggregation.tiles import as_bytes, from_bytes
from aggregation.weights import Share, Weights, weigh
from benchmarks.common import best_seconds
from coordinator.fold_commit import fold_spools
from coordinator.foldclient import HUGE_PAGES
from protocol import limits
from protocol.bodies import UpdateMeta, dense_parts, encode_meta_json
from protocol.bodyio import write_body
from protocol.layout import Layout, TensorSpec

BARS: Final = {"ratio": ">= 0.8", "spool_fold_gb_s": ">= 5"}
UPDATES: Final = 10
PIECE: Final = limits.FRAME_PAYLOAD_BYTES_MAX


def run(*, quick: bool) -> dict[str, Any]:
    """Measure; `quick` takes a tenth of the elements and fewer repeats."""
    elements = 1_000_000 if quick else 10_000_000
    repeats = 5 if quick else 25
    os.environ.setdefault(*HUGE_PAGES)  # torch asks at its first tensor
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    updates = [torch.randn(elements, generator=rng) for _ in range(UPDATES)]
    weights = weigh("examples", [Share(100.0 + k, 1.0) for k in range(UPDATES)])
    gigabytes = UPDATES * elements * 4 / 1e9

    total = torch.zeros(elements)
    sums = Accumulator({"delta": elements})
    views = [as_bytes(update) for update in updates]

    def bound() -> None:
        for update, weight in zip(updates, weights.delta, strict=True):
            total.add_(update, alpha=weight)

    def fold() -> None:
        for offset in range(0, elements * 4, PIECE):
            piece = sums.piece("delta", offset // 4, min(PIECE // 4, elements - offset // 4))
            for view, weight in zip(views, weights.delta, strict=True):
                piece.add(from_bytes(view[offset : offset + PIECE], torch.float32), weight)

    # Taking turns, so that a neighbour on the machine slows both.
    bounds, folds = [], []
    fold()
    for _ in range(repeats):
        bounds.append(best_seconds(bound, repeats=1))
        folds.append(best_seconds(fold, repeats=1))
    bound_gb_s, fold_gb_s = gigabytes / min(bounds), gigabytes / min(folds)
    spool_gb_s = _from_spools(updates, weights, gigabytes, repeats)
    print(f"{UPDATES} updates of {elements} float32, best of {repeats}", file=sys.stderr)
    return {
        "fold_gb_s": round(fold_gb_s, 3),
        "bound_gb_s": round(bound_gb_s, 3),
        "ratio": round(fold_gb_s / bound_gb_s, 3),
        "spool_fold_gb_s": round(spool_gb_s, 3),
    }


def _from_spools(
    updates: list[torch.Tensor], weights: Weights, gigabytes: float, repeats: int
) -> float:
    elements = updates[0].numel()
    spec = TensorSpec(name="w", shape=(elements,), dtype="float32", role="train")
    layout = Layout(tensors=(spec,))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{k}.body" for k in range(UPDATES)]
        for k, (path, update) in enumerate(zip(paths, updates, strict=True)):
            meta = UpdateMeta(
                job="bench",
                site=f"site-{k}",
                epoch=1,
                clock=0,
                attempt=1,
                base_version=0,
                base_digest="",
                layout_digest=layout.digest(),
                examples=100.0 + k,
                steps=1,
                effective_steps=1.0,
                parts=dense_parts(layout, "update", control=False),
            )
            with path.open("wb") as file:
                nothing = memoryview(b"")
                write_body(file.write, encode_meta_json(meta), [as_bytes(update), nothing, nothing])
        sums = Accumulator({"delta": elements, "buffers": 0, "ints": 0})
        return gigabytes / best_seconds(lambda: fold_spools(paths, weights, sums), repeats=repeats)

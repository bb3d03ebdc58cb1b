"""The one place that states the order in which an update is made.

    1. check    the model has the tensors that it had, by name, shape and dtype
    2. delta    end - start, float32; start is the base as this model's dtypes could hold it
    3. control  SCAFFOLD's change, from that very delta
    4. residual what an earlier period owes is added
    5. norm     L2, before anything is held back
    6. encode   dense: the flat parts themselves
    7. finite   a NaN or an infinity is refused here, by the tensor's name

Source of the order: the residual comes before any filter, so that what a filter holds back is
counted once (Seide et al., "1-bit SGD", Interspeech 2014; design 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor, nn

from aggregation.scaffold import control_change
from aggregation.screen import energy_of
from client.tensors import check_unchanged, first_nonfinite, gather
from protocol.errors import RefusedError
from protocol.layout import Layout, Part


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """An update, ready to be written: flat parts on the CPU in canonical order."""

    parts: Mapping[Part, Tensor]
    norm: float


@torch.no_grad()
def make_update(
    model: nn.Module,
    layout: Layout,
    start: Mapping[Part, Tensor],
    *,
    distance: float,
    residual: Tensor | None,
) -> Outgoing:
    """Turn the trained model and the parts that it started from into an update.

    The memory of `start` becomes the update: `params` holds delta afterwards. `start` has `control`
    (the server's c) exactly when the job uses SCAFFOLD; `distance` is sum_t lr_t a_t, its K eta.

    Raises:
        ConflictError: the model's tensors are not those that it had.
        RefusedError: a value is NaN or infinite; names the tensor.
    """
    tensors = check_unchanged(model, layout)
    delta = start["params"]
    for slot in layout.slots("delta"):
        piece = delta[slot.start : slot.start + slot.spec.elements].view(slot.spec.shape)
        piece.neg_().add_(tensors[slot.spec.name].to(delta.device))
    parts: dict[Part, Tensor] = {"delta": delta}
    for part in ("buffers", "ints"):
        gather(tensors, layout, part, start[part])
        parts[part] = start[part]
    _check_finite(layout, parts)
    if "control" in start:
        if distance > 0.0:
            change = control_change(delta, start["control"], steps=1, lr=distance)
            start["control"].copy_(change)
        else:
            start["control"].zero_()
        parts["control"] = start["control"]
    if residual is not None:
        delta.add_(residual.to(delta.device))
    return Outgoing(parts=parts, norm=math.sqrt(energy_of(delta)))


def _check_finite(layout: Layout, parts: Mapping[Part, Tensor]) -> None:
    for name in ("delta", "buffers"):
        found = first_nonfinite(layout, name, parts[name])
        if found:
            raise RefusedError(
                f"after this period {found}.",
                "Lower the learning rate, set optimizer.clip_norm, or look for bad examples.",
            )

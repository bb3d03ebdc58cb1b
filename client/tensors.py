"""A model's state dict <-> layout and flat parts.

The only place that knows what may travel. It refuses, by name, what it cannot carry faithfully:
complex, quantised, sparse and meta tensors, dtypes without a float32 master copy, partly shared
storage, and state dict entries that are not tensors of the model.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, cast, get_args

import torch
from torch import Tensor, nn

from protocol.errors import ConflictError, InvalidFileError, Problem
from protocol.layout import DType, Layout, Part, Role, TensorSpec

_FINGERPRINT_CHUNK: Final = 1 << 22  # elements
_WRAPPERS: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside DataParallel, DistributedDataParallel or torch.compile."""
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors of the unwrapped model's state dict, in its order.

    Raises:
        InvalidFileError: an entry is no tensor, or is a copy and not the model's own.
    """
    model = unwrap(model)
    own = {id(t) for t in itertools.chain(model.parameters(), model.buffers())}
    state = model.state_dict(keep_vars=True)
    strange = [
        Problem(key=name, found=type(value).__name__, allowed="the model's parameters and buffers")
        for name, value in state.items()
        if id(value) not in own
    ]
    if strange:
        raise InvalidFileError(
            "the state dict of the task's model holds entries that cannot be exchanged: "
            + "; ".join(map(str, strange)),
            "Remove the extra state or the state dict hook that makes them.",
            problems=tuple(strange),
        )
    return dict(state)


class Description:
    """A model's layout, and notes on what it means for people."""

    def __init__(self, layout: Layout, notes: tuple[str, ...]) -> None:
        self.layout = layout
        self.notes = notes


def describe(
    model: nn.Module,
    *,
    personal: Sequence[str] = (),
    buffers: Literal["average", "local"] = "average",
) -> Description:
    """Layout of a model: order of the state dict, roles, ties, fingerprint of what is frozen.

    Raises:
        InvalidFileError: tensors that cannot be carried, all of them, each by its name.
    """
    tensors = tensors_of(model)
    problems = [p for name, t in tensors.items() if (p := _problem(name, t)) is not None]
    roles: dict[str, Role] = {}
    ties: dict[str, str] = {}
    if not problems:
        roles = {name: _role(name, t, personal, buffers) for name, t in tensors.items()}
        ties, problems = _ties(tensors, roles)
    if problems:
        raise InvalidFileError(
            "the task's model cannot be exchanged: " + "; ".join(map(str, problems)),
            problems=tuple(problems),
        )
    specs = tuple(
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_dtype(tensor),
            role=roles[name],
            tie=ties.get(name, ""),
        )
        for name, tensor in tensors.items()
    )
    layout = Layout(tensors=specs, frozen_fingerprint=fingerprint(tensors, specs))
    return Description(layout, _notes(model, layout, personal))


def _dtype(tensor: Tensor) -> DType:
    return cast("DType", str(tensor.dtype).removeprefix("torch."))


def _problem(name: str, tensor: Tensor) -> Problem | None:
    plain = "dense float16, bfloat16, float32, float64, bool and integers up to 64 bits"
    found = ""
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        found, plain = "a lazy tensor without a shape", "run one batch through it in model()"
    elif tensor.is_quantized:
        found = "a quantised tensor"
    elif tensor.is_complex():
        found, plain = f"complex numbers ({_dtype(tensor)})", "real and imaginary parts, apart"
    elif tensor.layout is not torch.strided:
        found = f"a tensor of layout {tensor.layout}"
    elif tensor.device.type == "meta":
        found, plain = "a meta tensor without values", "materialise it in model()"
    elif _dtype(tensor) not in get_args(DType):
        found = f"dtype {_dtype(tensor)}"
    elif any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        found, plain = "an expanded tensor whose elements share memory", "clone it in model()"
    return Problem(key=name, found=found, allowed=plain) if found else None


def _role(name: str, tensor: Tensor, personal: Sequence[str], buffers: str) -> Role:
    if any(fnmatchcase(name, pattern) for pattern in personal):
        return "local"
    if isinstance(tensor, nn.Parameter):
        return "train" if tensor.requires_grad else "frozen"
    if buffers == "local":
        return "local"
    return "buffer" if tensor.is_floating_point() else "int"


def _ties(
    tensors: Mapping[str, Tensor], roles: Mapping[str, Role]
) -> tuple[dict[str, str], list[Problem]]:
    """Later names whose elements are those of an earlier one; problems where only some are."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    ties: dict[str, str] = {}
    problems: list[Problem] = []
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        size = tensor.element_size()
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr()
        stop = start + extent * size
        others = spans.setdefault(tensor.untyped_storage().data_ptr(), [])
        for a, b, other in others:
            if b <= start or stop <= a:
                continue
            if not _same(tensor, tensors[other]):
                problems.append(
                    Problem(
                        key=name,
                        found=f"storage that overlaps {other!r} in part or in another shape",
                        allowed="tensors that are the same, or share nothing",
                    )
                )
            elif roles[name] != roles[other]:
                problems.append(
                    Problem(
                        key=name,
                        found=f"the storage of {other!r}, but role {roles[name]}",
                        allowed=f"the same role ({roles[other]}) for both names",
                    )
                )
            else:
                ties[name] = other
            break
        else:
            others.append((start, stop, name))
    return ties, problems


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def fingerprint(tensors: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> str:
    """sha256 over names, dtypes, shapes and bytes of the frozen tensors; empty without any."""
    frozen = [spec for spec in specs if spec.role == "frozen" and not spec.tie]
    if not frozen:
        return ""
    digest = hashlib.sha256()
    for spec in frozen:
        digest.update(f"{spec.name}\0{spec.dtype}\0{spec.shape}\0".encode())
        flat = tensors[spec.name].detach().reshape(-1)
        for start in range(0, flat.numel(), _FINGERPRINT_CHUNK):
            digest.update(byte_view(flat[start : start + _FINGERPRINT_CHUNK].cpu().contiguous()))
    return digest.hexdigest()


def _notes(model: nn.Module, layout: Layout, personal: Sequence[str]) -> tuple[str, ...]:
    notes: list[str] = []
    if unwrap(model) is not model:
        notes.append(f"the wrapper {type(model).__name__} is left out of all tensor names")
    own = [spec for spec in layout.tensors if not spec.tie]
    frozen = [spec for spec in own if spec.role == "frozen"]
    if frozen:
        notes.append(
            f"{sum(s.elements for s in frozen):,} frozen values in {len(frozen)} tensors are "
            "never sent; a fingerprint of them is compared"
        )
    local = [spec.name for spec in own if spec.role == "local"]
    if local:
        notes.append(f"{len(local)} tensors stay at this site: {_some(local)}")
    doubles = [spec.name for spec in own if spec.dtype == "float64" and spec.role != "frozen"]
    if doubles:
        notes.append(f"float64 travels as float32: {_some(doubles)}")
    ties = [f"{spec.name} = {spec.tie}" for spec in layout.tensors if spec.tie]
    if ties:
        notes.append(f"tied tensors travel once: {_some(ties)}")
    names = {spec.name for spec in layout.tensors}
    hidden = [name for name, _ in unwrap(model).named_buffers() if name not in names]
    if hidden:
        notes.append(f"buffers outside the state dict never travel: {_some(hidden)}")
    unused = [p for p in personal if not any(fnmatchcase(name, p) for name in names)]
    if unused:
        notes.append(f"these patterns of local.personal match no tensor: {_some(unused)}")
    return tuple(notes)


def _some(names: Sequence[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def check_unchanged(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The model's tensors, after making sure that training left its make-up alone.

    Raises:
        ConflictError: a tensor is missing, new, reshaped, or of another dtype; by name.
    """
    tensors = tensors_of(model)
    found = [f"{spec.name!r} is missing" for spec in layout.tensors if spec.name not in tensors]
    known = {spec.name: spec for spec in layout.tensors}
    for name, tensor in tensors.items():
        spec = known.get(name)
        if spec is None:
            found.append(f"{name!r} is new")
        elif tuple(tensor.shape) != spec.shape or _dtype(tensor) != spec.dtype:
            found.append(
                f"{name!r} is {_dtype(tensor)} {tuple(tensor.shape)} and was {spec.dtype} "
                f"{spec.shape}"
            )
        elif spec.tie and spec.tie in tensors and not _same(tensor, tensors[spec.tie]):
            found.append(f"{name!r} is not tied to {spec.tie!r} any more")
    if found:
        raise ConflictError(
            f"the task changed the model during training: {'; '.join(found)}.",
            "Build the whole model in model(), and change values only.",
        )
    return tensors


@torch.no_grad()
def gather(tensors: Mapping[str, Tensor], layout: Layout, part: Part, out: Tensor) -> None:
    """Copy a part's tensors into `out`, flat, in logical order; `out` is float32 (ints: int64)."""
    for slot in layout.slots(part):
        tensor = tensors[slot.spec.name]
        out[slot.start : slot.start + slot.spec.elements].view(slot.spec.shape).copy_(tensor)


@torch.no_grad()
def scatter(tensors: Mapping[str, Tensor], layout: Layout, part: Part, flat: Tensor) -> None:
    """Copy a flat part into the model, in place, each value cast once to its tensor's dtype."""
    for slot in layout.slots(part):
        piece = flat[slot.start : slot.start + slot.spec.elements]
        tensors[slot.spec.name].copy_(piece.view(slot.spec.shape))


def new_part(layout: Layout, part: Part, device: torch.device | None = None) -> Tensor:
    """A flat vector of zeros for a part: float32, or int64 for `ints`."""
    dtype = torch.int64 if part == "ints" else torch.float32
    return torch.zeros(layout.elements(part), dtype=dtype, device=device)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, shared and not copied."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def first_nonfinite(layout: Layout, part: Part, flat: Tensor) -> str:
    """A sentence on the first tensor that holds NaN or infinity; empty when all are finite."""
    if bool(torch.isfinite(flat.sum())):  # fast; a sum that overflows only costs a second look
        return ""
    for slot in layout.slots(part):
        piece = flat[slot.start : slot.start + slot.spec.elements]
        bad = int((~torch.isfinite(piece)).sum())
        if bad:
            return (
                f"tensor {slot.spec.name!r} holds {bad} values of {slot.spec.elements} that are "
                "NaN or infinite"
            )
    return ""

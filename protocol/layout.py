"""The layout: what a model is made of, and where each tensor lies in the flat parts.

An update or a snapshot is a short list of *parts*, each one flat vector:

- `params`   trainable floats, float32 (an update calls the same elements `delta`: end - start)
- `buffers`  floating buffers as values, float32
- `ints`     integer and boolean buffers as values, int64
- `control`  SCAFFOLD's control variate, float32, as long as `params`; absent otherwise

Roles decide what travels. `frozen` tensors never travel, a fingerprint of them does; `local` ones
never leave the site. A *tie* names the earlier tensor whose storage this one shares: it lies in no
part itself. The master copy of every float is float32, cast once at the site and once at export.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, Literal

import msgspec

from protocol import limits
from protocol.errors import MalformedError

Role = Literal["train", "buffer", "int", "frozen", "local"]
Part = Literal["delta", "params", "buffers", "ints", "control"]
DType = Literal[
    "float16", "bfloat16", "float32", "float64",
    "bool", "uint8", "int8", "int16", "int32", "int64",
]  # fmt: skip

FLOAT_DTYPES: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
ELEMENT_BYTES: Final[dict[Part, int]] = {
    "delta": 4, "params": 4, "buffers": 4, "ints": 8, "control": 4,
}  # fmt: skip
ROLE_OF_PART: Final[dict[Part, Role]] = {
    "delta": "train", "params": "train", "control": "train", "buffers": "buffer", "ints": "int",
}  # fmt: skip
UPDATE_PARTS: Final[tuple[Part, ...]] = ("delta", "buffers", "ints", "control")
SNAPSHOT_PARTS: Final[tuple[Part, ...]] = ("params", "buffers", "ints", "control")


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor: `tie` names the earlier tensor that owns the storage, or is empty."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    tie: str = ""

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a 0-dimensional tensor, 0 for an empty one."""
        return math.prod(self.shape)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """The range of elements of a part that one rank of a site owns: [start, stop)."""

    rank: int
    part: Part
    start: int
    stop: int


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor lies in its part: elements [start, start + spec.elements)."""

    spec: TensorSpec
    start: int


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All tensors of a model in the order of its state dict.

    `frozen_fingerprint` is a sha256 over the frozen tensors' names and bytes (empty when there are
    none): sites with another base model are refused by it. `segments` is empty when one rank owns
    everything.
    """

    tensors: tuple[TensorSpec, ...]
    frozen_fingerprint: str = ""
    segments: tuple[Segment, ...] = ()

    def slots(self, part: Part) -> tuple[Slot, ...]:
        """The tensors of a part with their offsets, in layout order; ties lie in no part."""
        role = ROLE_OF_PART[part]
        slots: list[Slot] = []
        start = 0
        for spec in self.tensors:
            if spec.role == role and not spec.tie:
                slots.append(Slot(spec=spec, start=start))
                start += spec.elements
        return tuple(slots)

    def elements(self, part: Part) -> int:
        """Length of a part, in elements."""
        role = ROLE_OF_PART[part]
        return sum(t.elements for t in self.tensors if t.role == role and not t.tie)

    def part_bytes(self, part: Part) -> int:
        """Length of a part's dense form, in bytes."""
        return self.elements(part) * ELEMENT_BYTES[part]

    def dense_bytes(self) -> int:
        """Bytes of one dense exchange in one direction: params, buffers and ints."""
        return sum(self.part_bytes(part) for part in ("params", "buffers", "ints"))

    def digest(self) -> str:
        """sha256 of the canonical JSON of this layout, without its segments."""
        plain = Layout(tensors=self.tensors, frozen_fingerprint=self.frozen_fingerprint)
        return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()


def check_layout(layout: Layout) -> None:
    """Refuse a layout that is out of bounds or contradicts itself.

    Raises:
        MalformedError: naming the tensor and what is wrong with it.
    """
    if len(layout.tensors) > limits.TENSORS_MAX:
        raise MalformedError(
            f"the layout has {len(layout.tensors)} tensors; at most {limits.TENSORS_MAX} are taken."
        )
    seen: dict[str, TensorSpec] = {}
    for spec in layout.tensors:
        _check_tensor(spec, seen)
        seen[spec.name] = spec
    if len(layout.frozen_fingerprint) > limits.DIGEST_CHARS:
        raise MalformedError("the fingerprint of the frozen tensors is no sha256.")
    # Once per part and not per segment: 100,000 of each would be 10^10 steps.
    elements = {part: layout.elements(part) for part in ROLE_OF_PART}
    for part, count in elements.items():
        if count > limits.ELEMENTS_MAX:
            raise MalformedError(f"part {part} has more than {limits.ELEMENTS_MAX} elements.")
    for segment in layout.segments:
        if not 0 <= segment.start <= segment.stop <= elements[segment.part]:
            raise MalformedError(f"segment {segment} lies outside its part.")


def _check_tensor(spec: TensorSpec, seen: dict[str, TensorSpec]) -> None:
    name = spec.name
    if not name or len(name) > limits.TENSOR_NAME_CHARS_MAX:
        raise MalformedError(
            f"tensor name {name[:60]!r} must have 1 to {limits.TENSOR_NAME_CHARS_MAX} characters."
        )
    if name in seen:
        raise MalformedError(f"tensor {name!r} stands twice in the layout.")
    if len(spec.shape) > limits.DIMENSIONS_MAX or any(size < 0 for size in spec.shape):
        raise MalformedError(f"tensor {name!r} has the impossible shape {spec.shape}.")
    if spec.elements > limits.ELEMENTS_MAX:
        raise MalformedError(f"tensor {name!r} has more than {limits.ELEMENTS_MAX} elements.")
    is_float = spec.dtype in FLOAT_DTYPES
    if spec.role in ("train", "buffer") and not is_float:
        raise MalformedError(f"tensor {name!r} is {spec.dtype}; role {spec.role} takes floats.")
    if spec.role == "int" and is_float:
        raise MalformedError(f"tensor {name!r} is {spec.dtype}; role int takes integers and bool.")
    if spec.tie:
        owner = seen.get(spec.tie)
        if owner is None or owner.tie or _storage(owner) != _storage(spec):
            raise MalformedError(f"tensor {name!r} is tied to {spec.tie!r}, which cannot own it.")


def _storage(spec: TensorSpec) -> tuple[Role, DType, int]:
    return spec.role, spec.dtype, spec.elements


def differences(ours: Layout, theirs: Layout, *, limit: int = 12) -> tuple[str, ...]:
    """What is different between the job's layout and a site's, in sentences; empty when equal."""
    mine = {t.name: t for t in ours.tensors}
    other = {t.name: t for t in theirs.tensors}
    found = [f"missing tensor {name!r}" for name in mine if name not in other]
    found += [f"unknown tensor {name!r}" for name in other if name not in mine]
    for name, spec in mine.items():
        their = other.get(name)
        if their is None or their == spec:
            continue
        for field in ("shape", "dtype", "role", "tie"):
            a, b = getattr(spec, field), getattr(their, field)
            if a != b:
                found.append(f"tensor {name!r} has {field} {b!r}, the job has {a!r}")
    if not found and [*mine] != [*other]:
        found.append("the tensors come in another order")
    if not found and ours.frozen_fingerprint != theirs.frozen_fingerprint:
        found.append(
            "the frozen tensors hold other values (fingerprint "
            f"{theirs.frozen_fingerprint[:12] or 'none'}, the job has "
            f"{ours.frozen_fingerprint[:12] or 'none'}): start from the same base model"
        )
    if len(found) > limit:
        found = [*found[:limit], f"and {len(found) - limit} more"]
    return tuple(found)

"""What the META frame of a body says: an update of a site, or a snapshot of a version."""

from __future__ import annotations

import math
import sys
from typing import Final, Literal

import msgspec

from protocol import limits
from protocol.errors import LimitError, MalformedError
from protocol.frames import body_bytes
from protocol.layout import ELEMENT_BYTES, Layout, Part, check_layout
from protocol.metrics import Metric, check_metrics

PARTS_MAX: Final = 8


class PartMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part: its name, its codecs in the order of encoding (dense: none) and its wire bytes.

    `reference` is where the bytes lie instead, for object stores; empty means inline.
    """

    name: Part
    bytes: int
    codecs: tuple[str, ...] = ()
    reference: str = ""


class UpdateMeta(msgspec.Struct, frozen=True, kw_only=True, tag="update", omit_defaults=True):
    """An update: identity, base, weights and parts. Its `delta` part is end minus start.

    `examples` n_k and `steps` tau_k are what the site declares; `effective_steps` is the L1 norm of
    a_k in FedNova (equal to `steps` for plain SGD). `norm` is the L2 norm of delta before any
    filter. `discards` names L2 norms of what the site threw away (clipped, decayed). A norm that is
    not finite travels as 0: the verdict on such an update is the coordinator's, which measures.
    """

    job: str
    site: str
    epoch: int
    clock: int
    attempt: int
    base_version: int
    base_digest: str
    layout_digest: str
    examples: float
    steps: int
    effective_steps: float
    parts: tuple[PartMeta, ...]
    metrics: dict[str, Metric] = {}
    norm: float = 0.0
    train_seconds: float = 0.0
    discards: dict[str, float] = {}
    notes: tuple[str, ...] = ()


class SnapshotMeta(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot", omit_defaults=True):
    """A version, whole. `digest` is the sha256 of all part bytes in order.

    `layout` is there in version 0 on its way up and in every snapshot file on its way down.
    """

    job: str
    version: int
    digest: str
    layout: Layout
    parts: tuple[PartMeta, ...]


BodyMeta = UpdateMeta | SnapshotMeta

_decoder: Final = msgspec.json.Decoder(BodyMeta)


def encode_meta_json(meta: BodyMeta) -> bytes:
    """META's payload.

    Raises:
        UsageError: a metric whose name is not text.
    """
    if isinstance(meta, UpdateMeta):
        check_metrics(meta.metrics)
        meta = msgspec.structs.replace(
            meta,
            norm=_finite(meta.norm),
            discards={name: _finite(loss) for name, loss in meta.discards.items()},
        )
    return msgspec.json.encode(meta)


def _finite(norm: float) -> float:
    return norm if math.isfinite(norm) else 0.0


def decode_meta_json(raw: bytes) -> BodyMeta:
    """Parse META's payload and check everything that can be checked without the job.

    Raises:
        MalformedError: not JSON of a known kind, or out of bounds.
    """
    try:
        meta = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedError(f"the metadata of this body cannot be read: {error}") from None
    if len(meta.parts) > PARTS_MAX:
        raise MalformedError(f"{len(meta.parts)} parts; at most {PARTS_MAX} are taken.")
    names = [part.name for part in meta.parts]
    if len(set(names)) != len(names):
        raise MalformedError(f"a part stands twice in {names}.")
    for part in meta.parts:
        width = ELEMENT_BYTES[part.name]
        if part.bytes % width or not 0 <= part.bytes <= limits.ELEMENTS_MAX * width:
            raise MalformedError(f"part {part.name} has the impossible size {part.bytes}.")
        if part.reference or part.codecs:
            raise MalformedError(f"part {part.name} uses a form that protocol 1 does not know.")
    if isinstance(meta, SnapshotMeta):
        check_layout(meta.layout)
        if not 0 <= meta.version <= limits.COUNT_MAX:
            raise MalformedError("the version of this snapshot is impossible.")
    else:
        _check_update(meta)
    return meta


def _check_update(meta: UpdateMeta) -> None:
    check_metrics(meta.metrics)
    bounds: list[tuple[str, float, float]] = [
        ("examples", meta.examples, limits.EXAMPLES_MAX),
        ("steps", meta.steps, limits.STEPS_MAX),
        ("effective_steps", meta.effective_steps, limits.STEPS_MAX),
        ("epoch", meta.epoch, limits.COUNT_MAX),
        ("clock", meta.clock, limits.COUNT_MAX),
        ("attempt", meta.attempt, limits.COUNT_MAX),
        ("base_version", meta.base_version, limits.COUNT_MAX),
        ("norm", meta.norm, sys.float_info.max),
        ("train_seconds", meta.train_seconds, sys.float_info.max),
    ]
    bounds += [
        (f"discard {name!r}", loss, sys.float_info.max) for name, loss in meta.discards.items()
    ]
    for name, value, most in bounds:
        if not (math.isfinite(value) and 0 <= value <= most):
            raise MalformedError(f"{name} is {value}; it must lie between 0 and {most:g}.")
    for name in ("job", "site", "base_digest", "layout_digest"):
        if len(getattr(meta, name)) > limits.NAME_CHARS_MAX:
            raise MalformedError(f"{name} is longer than {limits.NAME_CHARS_MAX} characters.")
    if max(len(meta.notes), len(meta.discards)) > limits.NOTES_MAX:
        raise MalformedError(f"more than {limits.NOTES_MAX} notes or discards.")
    if any(len(text) > limits.REASON_CHARS_MAX for text in (*meta.notes, *meta.discards)):
        raise MalformedError(f"a note of more than {limits.REASON_CHARS_MAX} characters.")


def dense_parts(
    layout: Layout, kind: Literal["update", "snapshot"], *, control: bool
) -> tuple[PartMeta, ...]:
    """The part list of a dense body for this layout, in canonical order; empty parts are kept."""
    first: Part = "delta" if kind == "update" else "params"
    names: list[Part] = [first, "buffers", "ints"]
    if control:
        names.append("control")
    return tuple(PartMeta(name=name, bytes=layout.part_bytes(name)) for name in names)


def check_upload_fits(layout: Layout, *, control: bool, upload_bytes_max: int) -> None:
    """Refuse a model whose updates the coordinator would refuse, before anything is trained.

    Raises:
        LimitError: naming the limit, the size of an update and the setting.
    """
    parts = dense_parts(layout, "update", control=control)
    size = body_bytes(0, [part.bytes for part in parts])  # META comes on top: some kilobytes
    if size > upload_bytes_max:
        raise LimitError(
            f"an update of this model has {size} bytes, above the limit of {upload_bytes_max} "
            "bytes for an upload.",
            "Raise the coordinator's setting upload_bytes_max.",
            details={"limit": upload_bytes_max, "found": size, "setting": "upload_bytes_max"},
        )

"""Optimizer and schedule states <-> JSON and tensors, without pickle.

Numbers, text, None, lists, tuples, sets of those, dictionaries, Counters and tensors are held
exactly; anything else is refused with the path at which it stands.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from client.statefile import StateReader, Stored
from client.tensors import byte_view
from protocol.errors import MalformedError, UsageError

_NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}


def store(name: str, tensor: Tensor) -> Stored:
    """A tensor as an item of a state file; shared with the tensor where it lies on the CPU."""
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        raise UsageError(f"the tensor {name} ({tensor.dtype}, {tensor.layout}) cannot be kept.")
    data = tensor.detach().cpu().contiguous()
    return Stored(name, _NAMES[tensor.dtype], tuple(tensor.shape), byte_view(data))


def fetch(reader: StateReader, name: str) -> Tensor:
    """A tensor of a state file, on the CPU."""
    entry = reader.entries.get(name)
    if entry is None or entry.dtype not in _DTYPES:
        raise MalformedError(f"the state file holds no usable tensor {name!r}.")
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    reader.read_into(name, byte_view(tensor))
    return tensor


def encode_value(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON of a value; its tensors are put into `tensors` under names that begin with `path`.

    Raises:
        UsageError: something in it cannot be kept; names the path.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set)):
        items = [encode_value(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {type(value).__name__: items}
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = [[_key(k, path), encode_value(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        return {kind: pairs}
    raise UsageError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept "
        "between periods.",
        'Set optimizer.state = "reset", or use an optimizer or schedule whose state dict holds '
        "tensors, numbers and text.",
    )


def decode_value(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode_value` made this JSON of."""
    if isinstance(value, list):
        return [decode_value(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "tensor":
            return tensors[inner]
        case "float":
            return float(inner)
        case "tuple":
            return tuple(decode_value(item, tensors) for item in inner)
        case "set":
            return {decode_value(item, tensors) for item in inner}
        case "dict":
            return {key: decode_value(item, tensors) for key, item in inner}
        case "counter":
            return Counter({key: decode_value(item, tensors) for key, item in inner})
        case _:
            raise MalformedError(f"a state file with a value of the unknown kind {kind!r}.")


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise UsageError(f"{path} has the key {key!r}; text and integers can be kept.")

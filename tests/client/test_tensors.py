from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from client.tensors import (
    byte_view,
    check_unchanged,
    describe,
    first_nonfinite,
    gather,
    new_part,
    scatter,
    tensors_of,
    unwrap,
)
from protocol.errors import ConflictError, InvalidFileError
from protocol.layout import Layout, Part, check_layout


def layout_of(model: nn.Module, **options: object) -> Layout:
    layout = describe(model, **options).layout  # type: ignore[arg-type]
    check_layout(layout)
    return layout


def flat(model: nn.Module, layout: Layout, part: Part) -> Tensor:
    out = new_part(layout, part)
    gather(tensors_of(model), layout, part, out)
    return out


def holding(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def test_every_tensor_keeps_its_name_shape_dtype_and_role():
    """PC-001 (site side): the 0-dim counter of BatchNorm stays int64 with shape ()."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    layout = layout_of(model)
    specs = {spec.name: (spec.shape, spec.dtype, spec.role) for spec in layout.tensors}
    assert specs == {
        "0.weight": ((2, 3), "float32", "train"),
        "0.bias": ((2,), "float32", "train"),
        "1.weight": ((2,), "float32", "train"),
        "1.bias": ((2,), "float32", "train"),
        "1.running_mean": ((2,), "float32", "buffer"),
        "1.running_var": ((2,), "float32", "buffer"),
        "1.num_batches_tracked": ((), "int64", "int"),
    }
    assert [spec.name for spec in layout.tensors] == [*model.state_dict()]
    ints = flat(model, layout, "ints")
    assert ints.tolist() == [0]
    scatter(tensors_of(model), layout, "ints", torch.tensor([4]))
    counter = model.state_dict()["1.num_batches_tracked"]
    assert (counter.item(), counter.shape, counter.dtype) == (4, torch.Size([]), torch.int64)


def test_buffers_travel_as_values_unless_they_are_told_to_stay():
    """PC-002 (site side): running statistics travel by default; staying home is an option."""
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    model[1].running_mean.fill_(7.5)  # type: ignore[union-attr, operator]
    assert flat(model, layout_of(model), "buffers").tolist() == [7.5, 1.0]
    described = describe(model, buffers="local")
    assert described.layout.elements("buffers") == described.layout.elements("ints") == 0
    assert any("running_mean" in note for note in described.notes)


def test_frozen_parameters_are_counted_and_never_travel():
    """PC-004: a million frozen and a thousand trainable values: 4,000 bytes travel."""
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1, bias=False))
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    described = describe(model)
    assert described.layout.part_bytes("params") == 4_000
    assert described.layout.dense_bytes() == 4_000
    assert any("1,000,000 frozen values" in note for note in described.notes)


def test_an_adapter_travels_and_its_base_is_known_by_a_fingerprint():
    """PC-012: adapter 2 x 256 x 4 values travel; another base gives another fingerprint."""

    class Adapted(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.base = nn.Linear(256, 256, bias=False)
            self.base.weight = nn.Parameter(torch.full((256, 256), value), requires_grad=False)
            self.down = nn.Linear(256, 4, bias=False)
            self.up = nn.Linear(4, 256, bias=False)

    layout = layout_of(Adapted(1.0))
    assert layout.elements("params") == 2_048
    assert [slot.spec.name for slot in layout.slots("params")] == ["down.weight", "up.weight"]
    assert layout.frozen_fingerprint
    assert layout.frozen_fingerprint == layout_of(Adapted(1.0)).frozen_fingerprint
    assert layout.digest() != layout_of(Adapted(1.5)).digest()


def test_a_missing_renamed_or_reshaped_tensor_is_named_at_the_end_of_a_period():
    """PC-005 (site side): a model that lost, gained or reshaped a tensor is refused by name."""
    model = nn.Sequential()
    model.add_module("w", nn.Linear(2, 2, bias=False))
    model.add_module("head", nn.Linear(2, 1))
    layout = layout_of(model)
    check_unchanged(model, layout)
    model.head.bias = None  # type: ignore[union-attr, assignment]
    with pytest.raises(ConflictError, match=r"'head\.bias' is missing"):
        check_unchanged(model, layout)
    model.head = nn.Linear(2, 3)
    with pytest.raises(ConflictError, match=r"'head\.weight' is float32 \(3, 2\) and was"):
        check_unchanged(model, layout)
    model.head = nn.Linear(2, 1)
    model.register_buffer("counter", torch.tensor(0))
    with pytest.raises(ConflictError, match="'counter' is new"):
        check_unchanged(model, layout)


def test_a_wrappers_prefix_is_left_out_of_all_names():
    """PC-006: DataParallel's `module.` is stripped, with a note; a module called so is kept."""
    plain = nn.Sequential()
    plain.add_module("fc", nn.Linear(2, 1))
    described = describe(nn.DataParallel(plain))
    assert [spec.name for spec in described.layout.tensors] == ["fc.weight", "fc.bias"]
    assert described.layout == describe(plain).layout
    assert any("DataParallel" in note for note in described.notes)
    assert unwrap(torch.compile(plain)) is plain  # type: ignore[arg-type]
    own = nn.Module()
    own.module = nn.Linear(2, 1)
    assert [spec.name for spec in layout_of(own).tensors] == ["module.weight", "module.bias"]


def test_half_precision_is_cast_wide_once_and_back_once():
    """PC-008: three float16 values of 40000 are averaged in float32 and come back as 40000."""
    model = holding(w=nn.Parameter(torch.tensor([40000.0], dtype=torch.float16)))
    layout = layout_of(model)
    sent = flat(model, layout, "params")
    assert sent.dtype == torch.float32
    scatter(tensors_of(model), layout, "params", (sent + sent + sent) / 3)
    assert model.w.dtype == torch.float16
    assert model.w.item() == 40000.0


def test_bfloat16_goes_through_without_numpy_and_is_rounded_once():
    """PC-009: 256 and 258 have the mean 257, rounded once to 256; bytes at rest are exact."""
    model = holding(w=nn.Parameter(torch.tensor([256.0, 258.0], dtype=torch.bfloat16)))
    layout = layout_of(model)
    assert layout.tensors[0].dtype == "bfloat16"
    sent = flat(model, layout, "params")
    assert sent.tolist() == [256.0, 258.0]
    scatter(tensors_of(model), layout, "params", sent.mean().expand(2).contiguous())
    assert model.w.tolist() == [256.0, 256.0]
    raw = bytes(byte_view(model.w.detach()))
    assert torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).equal(model.w)


def test_tied_weights_travel_once_and_stay_tied():
    """PC-010: Embedding(4, 3) tied to Linear(3, 4): 12 values, and one storage afterwards."""
    model = nn.Module()
    model.embedding = nn.Embedding(4, 3)
    model.out = nn.Linear(3, 4, bias=False)
    model.out.weight = model.embedding.weight
    layout = layout_of(model)
    assert layout.elements("params") == 12
    assert layout.tensors[1].tie == "embedding.weight"
    scatter(tensors_of(model), layout, "params", torch.arange(12.0))
    assert model.out.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert model.out.weight.flatten().tolist() == [float(i) for i in range(12)]
    model.out.weight = nn.Parameter(model.out.weight.detach().clone())
    with pytest.raises(ConflictError, match="is not tied to"):
        check_unchanged(model, layout)


def test_a_non_contiguous_tensor_travels_in_logical_order():
    """PC-011: arange(6) as (2, 3), transposed: rows [0, 3], [1, 4], [2, 5]."""
    model = holding(w=nn.Parameter(torch.arange(6.0).view(2, 3).t()))
    layout = layout_of(model)
    assert layout.tensors[0].shape == (3, 2)
    assert flat(model, layout, "params").tolist() == [0, 3, 1, 4, 2, 5]
    scatter(tensors_of(model), layout, "params", torch.tensor([0.0, 1, 2, 3, 4, 5]))
    assert model.w.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_zero_dimensional_empty_and_double_tensors_go_through():
    model = holding(
        scale=nn.Parameter(torch.tensor(2.5, dtype=torch.float64)),
        nothing=nn.Parameter(torch.empty(0, 3)),
        flag=torch.tensor(True),
    )
    described = describe(model)
    assert flat(model, described.layout, "params").tolist() == [2.5]
    assert any("float64 travels as float32: scale" in note for note in described.notes)
    scatter(tensors_of(model), described.layout, "ints", torch.tensor([0]))
    assert model.flag.dtype == torch.bool
    assert not model.flag


def overlapping() -> nn.Module:
    storage = torch.zeros(10)
    return holding(a=nn.Parameter(storage[:6]), b=nn.Parameter(storage[4:]))


def transposed() -> nn.Module:
    weight = torch.zeros(2, 3)
    return holding(a=nn.Parameter(weight), b=nn.Parameter(weight.t()))


def tied_by_halves() -> nn.Module:
    weight = torch.zeros(2, 3)
    return holding(a=nn.Parameter(weight), b=nn.Parameter(weight, requires_grad=False))


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (holding(z=nn.Parameter(torch.zeros(2, dtype=torch.complex64))), "z: found complex"),
        (holding(q=torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)), "q: found a q"),
        (holding(s=torch.zeros(2, 2).to_sparse()), "s: found a tensor of layout torch.sparse_coo"),
        (holding(m=torch.zeros(2, device="meta")), "m: found a meta tensor"),
        (holding(f=torch.zeros(2).to(torch.float8_e4m3fn)), "f: found dtype float8_e4m3fn"),
        (holding(e=torch.zeros(1).expand(3)), "e: found an expanded tensor"),
        (nn.Sequential(nn.LazyLinear(2)), "0.weight: found a lazy tensor"),
        (overlapping(), "b: found storage that overlaps 'a'"),
        (transposed(), "b: found storage that overlaps 'a'"),
        (tied_by_halves(), "b: found the storage of 'a', but role frozen"),
        (WithExtraState(1, 1), "_extra_state: found dict"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(model: nn.Module, words: str):
    with pytest.raises(InvalidFileError) as caught:
        describe(model)
    assert words in str(caught.value)


def test_pieces_of_one_storage_that_share_nothing_are_no_ties():
    storage = torch.arange(10.0)
    model = holding(a=nn.Parameter(storage[:5]), b=nn.Parameter(storage[5:]))
    assert flat(model, layout_of(model), "params").tolist() == [float(i) for i in range(10)]


def test_personal_layers_stay_and_a_pattern_without_a_match_is_noted():
    model = nn.Sequential()
    model.add_module("body", nn.Linear(2, 2))
    model.add_module("head", nn.Linear(2, 1))
    described = describe(model, personal=("head.*", "tail.*"))
    roles = {spec.name: spec.role for spec in described.layout.tensors}
    assert roles["head.weight"] == roles["head.bias"] == "local"
    assert roles["body.weight"] == "train"
    assert any("tail.*" in note for note in described.notes)


def test_buffers_outside_the_state_dict_are_noted():
    model = nn.Linear(1, 1)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    assert any("cache" in note for note in describe(model).notes)


def test_the_first_bad_tensor_is_named_with_its_count():
    layout = layout_of(nn.Linear(2, 2))
    values = torch.zeros(6)
    assert first_nonfinite(layout, "params", values) == ""
    values[4] = float("inf")
    values[5] = float("nan")
    assert first_nonfinite(layout, "params", values) == (
        "tensor 'bias' holds 2 values of 2 that are NaN or infinite"
    )
    assert first_nonfinite(layout, "params", torch.full((6,), 3e38)) == ""

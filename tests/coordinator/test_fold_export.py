from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from coordinator.foldapi import Export, TakeInit
from protocol.jobspec import Server
from protocol.layout import Layout
from tests.coordinator.folding import Bench, layout, spec, tensor


def export(bench: Bench, version: int) -> tuple[dict[str, torch.Tensor], Any]:
    target = bench.path / "out" / "model.safetensors"
    answer = bench.service.handle(Export(**bench.where, version=version, target=str(target)))
    assert not answer.fault
    return load_file(target), answer


def one(dtype: Any, *shape: int) -> Layout:
    return layout(tensor("w", shape, "train", dtype))


def test_three_large_halves_do_not_overflow(tmp_path: Path) -> None:
    """PC-008: three float16 updates of 40000 have the mean 40000, not infinity."""
    bench = Bench(tmp_path, one("float16", 1), spec())
    bench.init([0.0])
    bench.fold(1, *(bench.spool(site, [40000.0]) for site in "abc"))
    state, _ = export(bench, 1)
    assert state["w"].dtype == torch.float16
    assert state["w"].tolist() == [40000.0]


def test_bfloat16_is_averaged_wide_and_rounded_once(tmp_path: Path) -> None:
    """PC-009: 256 and 258 -> 257 in the master, 256 in bfloat16; it survives a checkpoint."""
    bench = Bench(tmp_path, one("bfloat16", 1), spec(server=Server(optimizer="momentum")))
    bench.init([0.0])
    bench.fold(1, bench.spool("a", [256.0]), bench.spool("b", [258.0]))
    bench.save(1)
    bench.restart()
    bench.recover(1)
    state, _ = export(bench, 1)
    assert state["w"].dtype == torch.bfloat16
    assert state["w"].tolist() == [256.0]
    assert bench.params(1) == [257.0]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.out = torch.nn.Linear(3, 4, bias=False)
        self.out.weight = self.embed.weight


def test_tied_weights_are_kept_once_and_exported_under_both_names(tmp_path: Path) -> None:
    """PC-010: Embedding(4,3) tied to Linear(3,4): 12 values, two rounds, checkpoint, resume."""
    tied = layout(tensor("embed.weight", (4, 3)), tensor("out.weight", (4, 3), tie="embed.weight"))
    assert tied.part_bytes("delta") == 48
    bench = Bench(tmp_path, tied, spec(server=Server(optimizer="nesterov")))
    bench.init(torch.zeros(12))
    bench.fold(1, bench.spool("a", torch.ones(12)), bench.spool("b", torch.ones(12)))
    bench.save(1)
    bench.restart()
    bench.recover(1)
    late = [bench.spool(site, torch.ones(12), clock=1) for site in "ab"]
    bench.fold(2, *late)
    state, _ = export(bench, 2)
    assert torch.equal(state["embed.weight"], state["out.weight"])
    model = Tied()
    model.load_state_dict(state, strict=True)
    assert model.embed.weight.data_ptr() == model.out.weight.data_ptr()
    assert model.out.weight[0, 0].item() > 1.0


def test_values_come_back_in_logical_order(tmp_path: Path) -> None:
    """PC-011: arange(6) as (2,3), transposed to (3,2): rows [0,3], [1,4], [2,5], at rest too."""
    turned = torch.arange(6.0).view(2, 3).t()
    bench = Bench(tmp_path, one("float32", 3, 2), spec(server=Server(optimizer="momentum")))
    bench.init(turned)
    bench.restart()
    bench.recover(0)
    state, _ = export(bench, 0)
    assert state["w"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert state["w"].is_contiguous()


def test_every_dtype_and_odd_shape_loads_into_the_model_it_came_from(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
            self.scalar = torch.nn.Parameter(torch.zeros(()))
            self.empty = torch.nn.Parameter(torch.zeros(0, 5))
            for name, dtype in INTS.items():
                self.register_buffer(name, torch.zeros(3, dtype=dtype))

    tensors = [tensor("wide", (3,), dtype="float64"), tensor("scalar", ()), tensor("empty", (0, 5))]
    tensors += [tensor(name, (3,), "int", name.removeprefix("b_")) for name in INTS]
    bench = Bench(tmp_path, layout(*tensors), spec())
    bench.init([1.0, 2.0, 3.0, 0.5], ints=[1, 0, 1] * len(INTS))
    state, answer = export(bench, 0)
    model = Odd()
    model.load_state_dict(state, strict=True)
    assert {name: t.dtype for name, t in state.items()} == {
        name: t.dtype for name, t in model.state_dict().items()
    }
    assert state["wide"].tolist() == [1.0, 2.0, 3.0]
    assert state["scalar"].shape == ()
    assert state["b_bool"].tolist() == [True, False, True]
    assert answer.digest == hashlib.sha256(Path(answer.path).read_bytes()).hexdigest()
    assert not list(tmp_path.rglob(".tmp-*"))


INTS = {
    f"b_{name}": getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64")
}


def test_frozen_and_local_tensors_are_listed_as_missing(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        layout(tensor("base", (9,), "frozen"), tensor("w", (1,)), tensor("head", (2,), "local")),
        spec(),
    )
    bench.init([1.0])
    state, answer = export(bench, 0)
    assert answer.missing == ("base", "head")
    assert set(state) == {"w"}


def test_a_version_that_is_not_in_memory_comes_from_its_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path, one("float32", 2), spec())
    bench.init([1.0, 2.0])
    bench.fold(1, bench.spool("a", [1.0, 1.0]))
    assert export(bench, 0)[0]["w"].tolist() == [1.0, 2.0]
    assert export(bench, 1)[0]["w"].tolist() == [2.0, 3.0]
    answer = bench.service.handle(Export(**bench.where, version=9, target=str(tmp_path / "x")))
    assert "version 9" in answer.fault


def test_an_export_is_a_valid_first_version_of_another_job(tmp_path: Path) -> None:
    tied = layout(tensor("a", (2,)), tensor("b", (2,), tie="a"))
    bench = Bench(tmp_path / "one", tied, spec())
    bench.init([1.0, 2.0])
    state, answer = export(bench, 0)
    other = Bench(tmp_path / "two", tied, spec())
    Path(answer.path).rename(other.path / "init.body")
    taken = other.service.handle(
        TakeInit(**other.where, spec=other.spec, safetensors=True, layout=tied)
    )
    assert taken.facts.digest == bench.digests[0]
    save_file({"b": state["b"]}, other.path / "init.body")  # one alias is enough
    again = other.service.handle(
        TakeInit(**other.where, spec=other.spec, safetensors=True, layout=tied)
    )
    assert again.facts.digest == bench.digests[0]

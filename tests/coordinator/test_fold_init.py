from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from coordinator.fold_model import digest_of
from coordinator.foldapi import TakeInit
from coordinator.stimuli import InitFacts
from protocol.layout import Layout
from tests.coordinator.folding import (
    SCAFFOLD,
    Bench,
    layout,
    spec,
    tensor,
    write_init,
    write_update,
)

FC = layout(tensor("fc.weight", (2, 2)), tensor("fc.bias", (2,)), tensor("n", (), "int", "int64"))
STATE = {
    "fc.weight": torch.arange(4.0).view(2, 2),
    "fc.bias": torch.ones(2),
    "n": torch.tensor(3),
}


def take(bench: Bench, **more: Any) -> InitFacts:
    answer = bench.service.handle(TakeInit(**bench.where, spec=bench.spec, **more))
    assert not answer.fault
    facts: InitFacts = answer.facts
    return facts


def take_file(bench: Bench, state: dict[str, torch.Tensor], layout: Layout | None) -> InitFacts:
    save_file(state, bench.path / "init.body")
    return take(bench, safetensors=True, layout=layout)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, FC, spec())


def test_a_snapshot_body_becomes_version_0_and_a_checkpoint(bench: Bench) -> None:
    facts = bench.init([0, 1, 2, 3, 1, 1], ints=[3])
    assert facts.layout == FC
    assert facts.digest == digest_of(bench.version(0).parts)
    assert (bench.path / "checkpoints" / "0" / "meta.json").exists()


def test_taking_it_twice_or_after_it_was_cleared_away_changes_nothing(bench: Bench) -> None:
    first = bench.init([0, 1, 2, 3, 1, 1], ints=[3])
    assert take(bench) == first
    (bench.path / "init.body").unlink()
    bench.restart()
    assert take(bench) == first


def test_a_state_dict_with_a_layout_becomes_version_0(bench: Bench) -> None:
    facts = take_file(bench, STATE, FC)
    assert facts.problem == ""
    assert bench.version(0).parts["params"].tolist() == [0, 1, 2, 3, 1, 1]
    assert bench.version(0).parts["ints"].tolist() == [3]


def test_half_precision_becomes_a_float32_master(bench: Bench) -> None:
    half = STATE | {"fc.weight": STATE["fc.weight"].to(torch.bfloat16)}
    assert take_file(bench, half, FC).digest == take_file(bench, STATE, FC).digest


def test_wrapped_and_unknown_names_are_refused_by_name(bench: Bench) -> None:
    """PC-006: 'module.fc.weight' and 'debug.counter' are named, never taken as other entries."""
    wrapped = {f"module.{name}": value for name, value in STATE.items()}
    problem = take_file(bench, wrapped, FC).problem
    assert "unknown tensor 'module.fc.weight'" in problem
    assert "missing tensor 'fc.weight'" in problem
    extra = take_file(bench, STATE | {"debug.counter": torch.ones(1)}, FC).problem
    assert "unknown tensor 'debug.counter'" in extra
    assert not (bench.path / "versions" / "0.body").exists()


def test_a_shape_or_a_kind_of_number_that_differs_is_named(bench: Bench) -> None:
    assert (
        "'fc.bias' has shape (3,)"
        in take_file(bench, STATE | {"fc.bias": torch.ones(3)}, FC).problem
    )
    assert "'n' is float32" in take_file(bench, STATE | {"n": torch.tensor(3.0)}, FC).problem


def test_without_a_layout_the_roles_are_guessed_from_names(bench: Bench) -> None:
    state = STATE | {"bn.running_var": torch.ones(2)}
    facts = take_file(bench, state, None)
    assert facts.layout is not None
    assert {t.name: t.role for t in facts.layout.tensors} == {
        "fc.weight": "train", "fc.bias": "train", "n": "int", "bn.running_var": "buffer",
    }  # fmt: skip


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_first_version_with_a_bad_number_is_refused_by_tensor(bench: Bench, bad: float) -> None:
    write_init(bench.path / "init.body", FC, [0, 0, 0, 0, bad, 0], ints=[0])
    assert "'fc.bias'" in take(bench).problem


@pytest.mark.parametrize("damage", ["cut", "flip", "update", "garbage", "digest"])
def test_a_damaged_first_version_is_a_problem_with_a_reason(bench: Bench, damage: str) -> None:
    path = bench.path / "init.body"
    write_init(path, FC, torch.zeros(6), ints=[0])
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(raw[:-40])
    elif damage == "flip":
        raw[-50] ^= 4
        path.write_bytes(raw)
    elif damage == "garbage":
        path.write_bytes(b"\x00" * 300)
    elif damage == "update":
        write_update(path, FC, "a", torch.zeros(6), ints=[0])
    else:
        from coordinator import fold_model

        model = fold_model.Model(
            job="job-1", layout=FC, version=0, digest="f" * 64,
            parts={"params": torch.zeros(6), "buffers": torch.zeros(0), "ints": torch.zeros(1, dtype=torch.int64)},
            state={},
        )  # fmt: skip
        fold_model.write_version(model, path)
    assert "version 0 cannot be taken" in take(bench).problem


@pytest.mark.parametrize(
    "raw", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}x", b"\x10\0\0\0\0\0\0\0" + b"not json at all!"]
)
def test_a_file_that_is_no_safetensors_is_refused(bench: Bench, raw: bytes) -> None:
    (bench.path / "init.body").write_bytes(raw)
    assert "safetensors" in take(bench, safetensors=True, layout=FC).problem


def test_an_unknown_type_in_a_safetensors_file_is_refused_by_name(bench: Bench) -> None:
    header = b'{"w":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    raw = len(header).to_bytes(8, "little") + header + b"\0"
    (bench.path / "init.body").write_bytes(raw)
    assert "'F8_E4M3'" in take(bench, safetensors=True, layout=FC).problem


def test_a_header_that_points_outside_its_file_is_refused(bench: Bench) -> None:
    header = b'{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    (bench.path / "init.body").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "longer or shorter" in take(bench, safetensors=True, layout=FC).problem


def test_a_scaffold_job_starts_with_a_control_variate_of_zero(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FC, spec(local=SCAFFOLD))
    bench.init(torch.ones(6), ints=[0])
    assert bench.version(0).parts["control"].tolist() == [0.0] * 6


def test_a_job_that_has_gone_on_takes_no_new_first_version(bench: Bench) -> None:
    bench.init(torch.zeros(6), ints=[0])
    bench.fold(1, bench.spool("a", torch.ones(6), ints=[1]))
    bench.save(1)
    answer = bench.service.handle(TakeInit(**bench.where, spec=bench.spec))
    assert "later version" in answer.fault

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.coordinator.folding import SCAFFOLD, Bench, layout, spec, tensor, write_init

HEADED = layout(
    tensor("w", (4,)), tensor("head.weight", (2, 3)), tensor("head.bias", (2,)),
    tensor("running_mean", (2,), "buffer"), tensor("seen", (), "int", "int64"),
)  # fmt: skip
ALL = {"buffers": [0.0, 0.0], "ints": [1]}


@pytest.fixture
def bench(tmp_path: Path):
    made = Bench(tmp_path, HEADED, spec())
    made.init(torch.zeros(12), [0.0, 0.0], [0])
    return made


def test_a_good_update_gives_its_facts(bench: Bench):
    member = bench.spool("a", [3.0] + [0.0] * 10 + [4.0], **ALL, examples=9.0, steps=7, clock=2)
    facts = bench.screen(member)
    assert facts.problem == ""
    assert (facts.examples, facts.steps, facts.clock, facts.norm) == (9.0, 7, 2, 5.0)


def test_a_missing_tensor_is_named(bench: Bench):
    """PC-005: an update without values for 'head.bias' is refused by that name; others count."""
    short = layout(*(t for t in HEADED.tensors if t.name != "head.bias"))
    full, bench.layout = bench.layout, short
    problem = bench.screen(bench.spool("c", torch.ones(10), **ALL)).problem
    assert "'head.bias'" in problem
    assert "'head.weight'" not in problem
    bench.layout = full
    good = [bench.spool(site, torch.ones(12), **ALL) for site in "ab"]
    assert [bench.screen(member).problem for member in good] == ["", ""]
    for version in (1, 2):
        bench.fold(version, *good)
        assert bench.version(version).layout == full


def test_an_extra_tensor_belongs_to_nobody(bench: Bench):
    """PC-006: values beyond the job's tensors are refused, never averaged as entries of their own."""
    bench.layout = layout(*HEADED.tensors, tensor("debug.counter", (1,)))
    problem = bench.screen(bench.spool("c", torch.ones(13), **ALL)).problem
    assert "belong to no tensor" in problem


def test_renamed_tensors_are_another_layout(bench: Bench):
    """PC-006: the same sizes under wrapped names ('module.') are refused as another layout."""
    bench.layout = layout(
        *(tensor("module." + t.name, t.shape, t.role, t.dtype) for t in HEADED.tensors)
    )
    assert "another layout" in bench.screen(bench.spool("a", torch.ones(12), **ALL)).problem


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_tensor_with_a_bad_number_is_named_and_counted(bench: Bench, bad: float):
    delta = torch.zeros(12)
    delta[5], delta[7], delta[11] = bad, bad, bad
    problem = bench.screen(bench.spool("a", delta, **ALL)).problem
    assert "'head.weight'" in problem
    assert "2 values" in problem
    assert "1 more" in problem


def test_a_bad_buffer_is_refused_too(bench: Bench):
    problem = bench.screen(
        bench.spool("a", torch.zeros(12), buffers=[0, math.nan], ints=[0])
    ).problem
    assert "'running_mean'" in problem
    assert "buffers" in problem


def test_a_bad_number_beyond_the_first_tile_is_found(tmp_path: Path):
    many = Bench(tmp_path, layout(tensor("a", (300_000,)), tensor("b", (3,))), spec())
    many.init(torch.zeros(300_003))
    delta = torch.zeros(300_003)
    delta[300_001] = math.nan
    assert "'b'" in many.screen(many.spool("x", delta)).problem


def test_zero_examples_cannot_be_weighed(bench: Bench):
    assert (
        "zero examples"
        in bench.screen(bench.spool("a", torch.ones(12), **ALL, examples=0.0)).problem
    )


@pytest.mark.parametrize("damage", ["flip", "cut", "append", "nothing", "other"])
def test_a_damaged_spool_is_a_problem_and_not_a_crash(bench: Bench, damage: str):
    member = bench.spool("a", torch.ones(12), **ALL)
    path = bench.path / "spools" / member.spool
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[-60] ^= 1
    elif damage == "cut":
        del raw[-30:]
    elif damage == "append":
        raw += b"x"
    elif damage == "nothing":
        raw.clear()
    else:
        raw = bytearray(b"GET / HTTP/1.1\r\n" * 4)
    path.write_bytes(raw)
    assert "cannot be read" in bench.screen(member).problem


def test_a_snapshot_is_not_an_update(bench: Bench):
    write_init(bench.path / "spools" / "s.body", HEADED, torch.zeros(12), [0, 0], [0])
    member = bench.spool("a", torch.ones(12), **ALL)
    (bench.path / "spools" / "s.body").rename(bench.path / "spools" / member.spool)
    assert "not an update" in bench.screen(member).problem


def test_control_comes_when_the_job_uses_scaffold_and_only_then(bench: Bench, tmp_path: Path):
    unasked = bench.spool("a", torch.ones(12), **ALL, control=torch.ones(12))
    assert "part 'control'" in bench.screen(unasked).problem
    with_control = Bench(tmp_path / "s", layout(tensor("w", (2,))), spec(local=SCAFFOLD))
    with_control.init([0.0, 0.0])
    assert "no part 'control'" in with_control.screen(with_control.spool("a", [1, 2])).problem
    nan = with_control.spool("b", [1, 2], control=[1.0, math.nan])
    assert "part control" in with_control.screen(nan).problem


def test_a_fresh_process_screens_from_the_versions_on_disk(bench: Bench):
    member = bench.spool("a", torch.ones(12), **ALL)
    bench.restart()
    assert bench.screen(member).problem == ""


def test_a_name_that_leads_out_of_the_folder_is_not_opened(bench: Bench):
    from coordinator.foldapi import Screen

    answer = bench.service.handle(Screen(**bench.where, spool="../init.body"))
    assert "not the name of a spool" in answer.fault

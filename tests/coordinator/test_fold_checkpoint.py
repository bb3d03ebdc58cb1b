"""Checkpoints and recovery: whole or not there, and bit for bit the same afterwards."""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from coordinator import crashpoints, fold_checkpoint
from coordinator.fold import FoldService
from coordinator.foldapi import SaveCheckpoint
from protocol.jobspec import Server
from tests.coordinator.folding import SCAFFOLD, Bench, layout, spec, tensor

ADAM = spec(server=Server(optimizer="adam"))
MODEL = layout(
    tensor("w", (3, 2)), tensor("twin", (3, 2), tie="w"), tensor("running_var", (2,), "buffer"),
    tensor("seen", (), "int", "int64"), tensor("empty", (0, 4)),
)  # fmt: skip


def member(bench: Bench, version: int, site: str = "a") -> Any:
    rng = torch.Generator().manual_seed(version + ord(site))
    delta = torch.randn(6, generator=rng)
    return bench.spool(site, delta, buffers=[0.5 * version, 1.0], ints=[version], clock=version)


def started(path: Path, job: Any = ADAM) -> Bench:
    bench = Bench(path, MODEL, job)
    bench.init(torch.linspace(-1, 1, 6), [1.0, 1.0], [0])
    return bench


def advance(bench: Bench, *versions: int) -> None:
    for version in versions:
        bench.fold(version, member(bench, version), member(bench, version, "b"))


@pytest.mark.parametrize(
    "optimizer",
    ["average", "momentum", "nesterov", "delayed_nesterov", "adagrad", "adam", "yogi"],
)
def test_recovery_goes_on_with_the_very_same_bits(tmp_path: Path, optimizer: Any) -> None:
    job = spec(server=Server(optimizer=optimizer))
    straight, broken = started(tmp_path / "one", job), started(tmp_path / "two", job)
    advance(straight, 1, 2, 3, 4, 5)
    advance(broken, 1, 2)
    assert broken.save(2).version == 2
    advance(broken, 3, 4)
    broken.restart()
    answer = broken.recover(2)
    assert not answer.fault
    assert answer.facts.version == 4
    advance(broken, 5)
    assert broken.digests == straight.digests


def test_control_variates_and_scaffold_survive_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, layout(tensor("w", (2,))), spec(local=SCAFFOLD))
    bench.init([0.0, 0.0])
    bench.fold(1, bench.spool("a", [1, 1], control=[1.0, 2.0]))
    bench.save(1)
    bench.restart()
    assert bench.recover(1).facts.digest == bench.digests[1]
    bench.fold(2, bench.spool("a", [1, 1], control=[1.0, 2.0], clock=1))
    assert bench.version(2).parts["control"].tolist() == [2.0, 4.0]


def test_a_checkpoint_newer_than_the_journal_knows_is_used(tmp_path: Path) -> None:
    bench = started(tmp_path)
    advance(bench, 1, 2, 3)
    bench.save(2)  # overtaken and never written
    bench.save(3)
    assert fold_checkpoint.versions(tmp_path / "checkpoints") == [3]
    bench.restart()
    answer = bench.recover(0)
    assert not answer.fault
    assert answer.facts.digest == bench.digests[3]


def test_a_spool_that_changed_is_seen_by_its_digest(tmp_path: Path) -> None:
    bench = started(tmp_path)
    advance(bench, 1, 2)
    bench.spool("a", torch.ones(6), buffers=[1.0, 1.0], ints=[2], clock=2)
    bench.restart()
    answer = bench.recover(0)
    assert "version 2 cannot be made again" in answer.fault
    assert "digest" in answer.fault


def test_recovery_writes_the_version_file_again(tmp_path: Path) -> None:
    bench = started(tmp_path)
    advance(bench, 1, 2)
    before = (tmp_path / "versions" / "2.body").read_bytes()
    shutil.rmtree(tmp_path / "versions")
    bench.restart()
    bench.recover(0)
    assert (tmp_path / "versions" / "2.body").read_bytes() == before


def test_the_same_fold_after_a_restart_gives_the_same_answer(tmp_path: Path) -> None:
    bench = started(tmp_path)
    advance(bench, 1)
    bench.restart()  # it died after the version file, before the journal row
    digest = bench.digests.pop(1)
    bench.recover(0, folds=[])
    advance(bench, 1)
    assert bench.digests[1] == digest


def test_without_server_state_a_version_is_its_own_checkpoint(tmp_path: Path) -> None:
    bench = started(tmp_path, spec())
    advance(bench, 1, 2)
    bench.restart()
    advance(bench, 3)
    assert bench.version(3).version == 3


@pytest.mark.parametrize("file", ["model.safetensors", "server.safetensors", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_never_loaded(tmp_path: Path, file: str, damage: str) -> None:
    bench = started(tmp_path)
    advance(bench, 1, 2)
    bench.service.handle(SaveCheckpoint(**bench.where, version=2))
    path = tmp_path / "checkpoints" / "2" / file
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(raw if damage == "flip" else raw[:-5])
    bench.restart()
    answer = bench.recover(2, folds=[])
    if file == "meta.json" and damage == "flip" and not answer.fault:
        assert answer.facts.digest == bench.digests[2]  # the bit was of no consequence
    else:
        assert answer.unknown_state
        assert "no whole checkpoint" in answer.fault


def killed(path: Path, version: int, instant: str) -> int:
    """Save a checkpoint in a child that is killed at `instant`; the signal that ended it."""
    child = os.fork()
    if child == 0:  # the child never returns into pytest
        os.environ[crashpoints.VARIABLE] = instant
        crashpoints._passages.clear()
        bench = Bench.__new__(Bench)
        bench.path, bench.spec, bench.service = path, ADAM, FoldService()
        try:
            recovered = bench.recover(0, folds=folds_of(path))
            assert not recovered.fault
            bench.save(version)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def folds_of(path: Path) -> list[Any]:
    from coordinator.foldapi import Refold

    return msgspec.json.decode((path / "folds.json").read_bytes(), type=list[Refold])


def test_a_kill_while_saving_always_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    """PC-080: killed at every named instant of saving: old or new, checked by digest."""
    bench = started(tmp_path)
    advance(bench, *range(1, 7))
    (tmp_path / "folds.json").write_bytes(msgspec.json.encode(bench.commits))
    instants = [
        *(f"fold_during_checkpoint:{nth}" for nth in (1, 2, 3)),
        "fold_after_checkpoint",
    ]
    seen = set()
    for instant in instants * 3:
        assert killed(tmp_path, 6, instant) == -signal.SIGKILL
        there = fold_checkpoint.versions(tmp_path / "checkpoints")
        seen.add(tuple(there))
        for version in there:
            model, _ = fold_checkpoint.load(tmp_path / "checkpoints" / str(version))
            assert model.digest == bench.digests[version]
        if instant == "fold_after_checkpoint":
            shutil.rmtree(tmp_path / "checkpoints" / "6")
    assert seen == {(0,), (6, 0)}


LARGE = layout(tensor("w", (400, 500)), tensor("running_var", (2,), "buffer"))


def saving(path: Path) -> tuple[int, int]:
    """A child that says by a byte when it begins to save version 1, and by another when it has.

    It then waits to be killed. Its process id, and the pipe to read from.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # the child never returns into pytest
        try:
            torch.set_num_threads(1)  # the parent's threads did not come along
            bench = Bench.__new__(Bench)
            bench.path, bench.spec, bench.service = path, ADAM, FoldService()
            assert not bench.recover(0, folds=folds_of(path)).fault
            os.write(writer, b"b")
            bench.save(1)
            os.write(writer, b"e")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"b"
    return child, reader


def test_fifty_kills_at_random_times_always_leave_a_loadable_checkpoint(tmp_path: Path) -> None:
    """PC-080: 50 kills -9 at random times during saving, 50 loads: old or new, by digest; from
    what each left the job goes on to the very bits of a job that nobody killed.
    """
    bench = Bench(tmp_path, LARGE, ADAM)
    bench.init(torch.linspace(-1, 1, 200_000), [1.0, 1.0])
    bench.fold(1, bench.spool("a", torch.full((200_000,), 0.5), buffers=[0.5, 1.0]))
    (tmp_path / "folds.json").write_bytes(msgspec.json.encode(bench.commits))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "old")
    last = bench.spool("a", torch.full((200_000,), 0.25), buffers=[0.5, 2.0], clock=1)
    calm = bench.fold(2, last).digest  # nobody was killed
    child, reader = saving(tmp_path)
    began = time.perf_counter()
    assert os.read(reader, 1) == b"e"
    took = time.perf_counter() - began  # random times are drawn from a save's own length
    random, interrupted, unfinished = Random(80), 0, 0
    for _ in range(50):
        # The child says nothing before it has saved; after that there is nothing to interrupt.
        ended, _, _ = select.select([reader], [], [], random.uniform(0.0, took))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(reader)
        there = fold_checkpoint.versions(tmp_path / "checkpoints")
        assert there in ([0], [1, 0], [1])
        interrupted += there == [0] and not ended
        unfinished += bool(list(tmp_path.rglob(".tmp-*")))
        for version in there:
            model, _ = fold_checkpoint.load(tmp_path / "checkpoints" / str(version))
            assert model.digest == bench.digests[version]
        bench.restart()
        answer = bench.recover(0, folds=bench.commits[:1])
        assert not answer.fault
        assert answer.facts.digest == bench.digests[1]
        assert bench.fold(2, last).digest == calm
        assert bench.save(2).version == 2
        assert fold_checkpoint.versions(tmp_path / "checkpoints") == [2]
        assert not list(tmp_path.rglob(".tmp-*"))
        shutil.rmtree(tmp_path / "checkpoints")  # begin again from the old one alone
        shutil.copytree(tmp_path / "old", tmp_path / "checkpoints")
        child, reader = saving(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    assert interrupted >= 1
    assert unfinished >= 1


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """PC-081: fifty interrupted saves leave at most one unfinished directory, and then none."""
    bench = started(tmp_path)
    advance(bench, 1)
    size = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    for nth in range(50):
        # what a kill at that instant leaves: the temporary names of this process and no other
        folder = tmp_path / "checkpoints" / f".tmp-{nth}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 20_000)
        (tmp_path / "versions" / f".tmp-{nth}.body").write_bytes(b"x" * 20_000)
    bench.restart()
    bench.recover(0)
    assert not list(tmp_path.rglob(".tmp-*"))
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) == size


def test_a_killed_save_leaves_its_directory_and_the_next_one_takes_it_away(tmp_path: Path) -> None:
    """PC-081: the same with a real kill."""
    bench = started(tmp_path)
    advance(bench, 1)
    (tmp_path / "folds.json").write_bytes(msgspec.json.encode(bench.commits))
    assert killed(tmp_path, 1, "fold_during_checkpoint:2") == -signal.SIGKILL
    assert [p.name for p in tmp_path.rglob(".tmp-*")] == [".tmp-1"]
    bench.restart()
    bench.recover(0)
    bench.save(1)
    assert not list(tmp_path.rglob(".tmp-*"))
    assert fold_checkpoint.versions(tmp_path / "checkpoints") == [1]


def test_a_whole_checkpoint_is_not_written_a_second_time(tmp_path: Path) -> None:
    bench = started(tmp_path)
    advance(bench, 1)
    folder = tmp_path / "checkpoints" / "1"
    inodes = []
    for fsync in (False, True):
        bench.service.handle(SaveCheckpoint(**bench.where, version=1, fsync=fsync))
        inodes.append((folder / "model.safetensors").stat().st_ino)
    assert inodes[0] == inodes[1]
    (folder / "meta.json").write_bytes(b"{}")
    assert bench.save(1).fault == ""
    assert fold_checkpoint.load(folder)[0].digest == bench.digests[1]

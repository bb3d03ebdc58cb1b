from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from client import sitestate
from client.statefile import read_value, write_state
from protocol.bodies import PartMeta, UpdateMeta


def meta_of(clock: int) -> UpdateMeta:
    return UpdateMeta(
        job="j", site="s", epoch=1, clock=clock, attempt=1, base_version=0, base_digest="",
        layout_digest="", examples=1.0, steps=1, effective_steps=1.0, norm=1.0,
        parts=(PartMeta(name="delta", bytes=4),),
    )  # fmt: skip


def make(folder: Path, clock: int) -> str:
    name = sitestate.update_name(1, clock, 1)
    with sitestate.new_update(folder, name) as update:
        (update / sitestate.BODY).write_bytes(b"body")
        write_state(update / sitestate.STATE, {"update": name}, ())
        sitestate.write_record(update, meta_of(clock), 4)
    return name


def give_back(state: Path, body: Path, target: Path, returned: list[str]) -> None:
    value = read_value(state)
    count = value.get("residual", 0) + len(body.read_bytes())
    write_state(target, value | {"returned": returned, "residual": count}, ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sitestate.prepare_folder(tmp_path)
    return tmp_path


def current(folder: Path) -> dict[str, Any]:
    return read_value(sitestate.current_state(folder))


@pytest.mark.parametrize("verdict", ["counted", "duplicate"])
def test_a_counted_update_becomes_the_state_and_goes(folder: Path, verdict: Any):
    name = make(folder, 0)
    for _ in range(2):
        sitestate.settle(folder, name, verdict, give_back)
        assert current(folder) == {"update": name}
        assert sitestate.unsettled(folder) == ()


def test_a_dropped_update_goes_and_the_state_stays(folder: Path):
    sitestate.settle(folder, make(folder, 0), "refused_drop", give_back)
    assert current(folder) == {}
    assert not list(folder.glob("*update*"))


@pytest.mark.parametrize("queued", [False, True])
def test_a_returned_update_is_put_back_once(folder: Path, queued: bool):
    name = make(folder, 0)
    if queued:
        sitestate.settle(folder, name, "queued", give_back)
        assert [record.clock for record in sitestate.unsettled(folder)] == [0]
    sitestate.settle(folder, name, "refused_return", give_back)
    assert current(folder) == {"update": name, "returned": [name], "residual": 4}
    make(folder, 0)  # as if it died before the folder was removed
    sitestate.settle(folder, name, "refused_return", give_back)
    assert current(folder)["residual"] == 4


def test_a_queued_update_that_is_dropped_later_is_a_discard(folder: Path):
    name = make(folder, 0)
    sitestate.settle(folder, name, "queued", give_back)
    sitestate.settle(folder, name, "refused_drop", give_back)
    assert current(folder) == {"update": name}
    assert sitestate.unsettled(folder) == ()


@pytest.mark.parametrize("verdict", ["queued", "counted", "refused_drop", "refused_return"])
@pytest.mark.parametrize("died", [False, True])
def test_a_queued_update_that_comes_back_when_a_later_one_is_made_is_in_the_next_period(
    folder: Path, verdict: Any, died: bool
):
    """Whatever becomes of the later one, and also when the first verdict is repeated."""
    first = make(folder, 0)
    sitestate.settle(folder, first, "queued", give_back)
    second = make(folder, 1)
    body = (folder / first / sitestate.BODY).read_bytes()
    sitestate.settle(folder, first, "refused_return", give_back)
    if died:
        (folder / first).mkdir()
        (folder / first / sitestate.BODY).write_bytes(body)
        sitestate.settle(folder, first, "refused_return", give_back)
    sitestate.settle(folder, second, verdict, give_back)
    assert current(folder)["residual"] == (8 if verdict == "refused_return" else 4)
    assert current(folder)["update"] == (first if verdict == "refused_drop" else second)


def test_a_return_that_was_half_done_is_completed_and_not_repeated(folder: Path):
    """The process dies after each of the two writes; the verdict comes again."""
    for writes in (1, 2):
        first, second = make(folder, 0), make(folder, 1)
        sitestate.settle(folder, first, "queued", give_back)
        left = [writes]

        def dies(state: Path, body: Path, target: Path, returned: list[str]) -> None:
            if not left[0]:  # noqa: B023
                raise KeyboardInterrupt
            left[0] -= 1  # noqa: B023
            give_back(state, body, target, returned)

        if writes == 1:
            with pytest.raises(KeyboardInterrupt):
                sitestate.settle(folder, first, "refused_return", dies)
        else:
            sitestate.settle(folder, first, "refused_return", dies)
        sitestate.settle(folder, first, "refused_return", give_back)
        assert current(folder)["residual"] == 4
        assert read_value(folder / second / sitestate.STATE)["residual"] == 4
        sitestate.settle(folder, second, "counted", give_back)
        assert current(folder)["residual"] == 4
        sitestate.current_state(folder).unlink()


def test_queued_updates_go_when_they_are_settled_for_good(folder: Path):
    for clock in range(3):
        sitestate.settle(folder, make(folder, clock), "queued", give_back)
    sitestate.forget_queued(folder, 1)
    assert [record.clock for record in sitestate.unsettled(folder)] == [1, 2]
    make(folder, 3)
    sitestate.forget_queued(folder, None)
    assert [record.clock for record in sitestate.unsettled(folder)] == [3]


def test_an_update_is_found_without_its_attempt(folder: Path):
    name = make(folder, 4)
    make(folder, 44)
    assert sitestate.find_update(folder, 1, 4, 0) == name
    assert sitestate.find_update(folder, 1, 4, 1) == name
    assert sitestate.find_update(folder, 1, 5, 0) == "update-1-5-0"


def test_unsettled_updates_are_listed_in_order(folder: Path):
    for clock in (10, 2):
        make(folder, clock)
    assert [record.clock for record in sitestate.unsettled(folder)] == [2, 10]


def test_a_half_written_update_never_appears_and_is_removed(folder: Path):
    with pytest.raises(KeyboardInterrupt), sitestate.new_update(folder, "update-1-0-1"):
        raise KeyboardInterrupt
    (folder / ".tmp-update-1-1-1").mkdir()
    sitestate.prepare_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["state"]

"""The fold process may die, hang or talk nonsense: the request is asked again, or says why not."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.foldapi import Done, DropJob, FoldRequest, Recover
from coordinator.foldclient import FoldClient, FoldError, memory_mb
from tests.coordinator import fakefold
from tests.coordinator.stubsite import spec_of

COMMAND = (sys.executable, str(Path(fakefold.__file__)))


@pytest.fixture
async def client() -> AsyncIterator[FoldClient]:
    made = FoldClient(command=COMMAND)
    yield made
    await made.stop()


def drop(folder: Path, job: str) -> DropJob:
    return DropJob(id=0, job=job, folder=str(folder))


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


async def test_it_starts_when_needed_and_answers(client: FoldClient, tmp_path: Path) -> None:
    assert client.memory() == (0.0, 0.0, 0.0)
    assert isinstance(await client.ask(drop(tmp_path, "ok"), Done), Done)
    now, peak, idle = client.memory()
    assert 1.0 < idle <= peak
    assert 1.0 < now <= peak
    assert (client.trouble, client.starts) == ("", 1)


@pytest.mark.parametrize(("given", "seen"), [({}, "1"), ({"THP_MEM_ALLOC_ENABLE": "0"}, "0")])
async def test_its_tensors_lie_in_huge_pages_unless_its_owner_says_otherwise(
    given: dict[str, str], seen: str
) -> None:
    client = FoldClient(command=COMMAND, environment=given)
    await client.start()
    environment = Path(f"/proc/{client.pid}/environ").read_text().split("\0")
    assert f"THP_MEM_ALLOC_ENABLE={seen}" in environment
    await client.stop()


async def test_requests_are_answered_one_after_the_other(
    client: FoldClient, tmp_path: Path
) -> None:
    jobs = [f"j{number}" for number in range(20)]
    await asyncio.gather(*(client.ask(drop(tmp_path, job), Done) for job in jobs))
    assert asked(tmp_path) == [f"DropJob {job}" for job in jobs]


@pytest.mark.parametrize("job", ["die", "garbage"])
async def test_a_death_or_nonsense_is_followed_by_a_new_process_and_the_same_request(
    client: FoldClient, tmp_path: Path, job: str
) -> None:
    await client.ask(drop(tmp_path, job), Done)
    assert asked(tmp_path) == [f"DropJob {job}"] * 2
    assert (client.starts, client.trouble) == (2, "")


async def test_a_request_that_always_kills_is_given_up_with_the_reason(
    client: FoldClient, tmp_path: Path
) -> None:
    with pytest.raises(FoldError, match=r"exit status 3.*3 times") as caught:
        await client.ask(drop(tmp_path, "always_die"), Done)
    assert not caught.value.disk_full
    assert "exit status 3" in client.trouble  # health shows it
    await client.ask(drop(tmp_path, "ok"), Done)
    assert client.trouble == ""


async def test_no_answer_in_time_is_a_death(tmp_path: Path) -> None:
    client = FoldClient(command=COMMAND, seconds_base=1.5)
    await client.ask(drop(tmp_path, "hang"), Done)
    assert client.starts == 2
    await client.stop()


async def test_faults_come_back_as_they_were_said(client: FoldClient, tmp_path: Path) -> None:
    with pytest.raises(FoldError, match="the file is missing"):
        await client.ask(drop(tmp_path, "fault"), Done)
    with pytest.raises(FoldError, match="no space left") as caught:
        await client.ask(drop(tmp_path, "full"), Done)
    assert caught.value.disk_full
    assert client.starts == 1


async def test_a_process_that_does_not_hold_the_job_is_told_to_recover_it(
    client: FoldClient, tmp_path: Path
) -> None:
    """PC-078: what the old process held in memory is made again, then the request repeated."""

    async def recover(request: FoldRequest) -> tuple[Recover, int]:
        how = Recover(
            id=0,
            job=request.job,
            folder=request.folder,
            spec=spec_of(),
            checkpoint=3,
            folds=(),
        )
        return how, 1000

    client.recover = recover
    await client.ask(drop(tmp_path, "unknown"), Done)
    assert asked(tmp_path) == ["DropJob unknown", "Recover unknown", "DropJob unknown"]


async def test_an_answer_of_another_kind_is_not_believed(
    client: FoldClient, tmp_path: Path
) -> None:
    with pytest.raises(FoldError, match="Saved instead of Done"):
        await client.ask(drop(tmp_path, "wrong"), Done)


async def test_its_stderr_is_logged(
    client: FoldClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="coordinator.fold"):
        await client.ask(drop(tmp_path, "ok"), Done)
        await client.stop()
    assert "the fake fold process speaks" in caplog.text


async def test_stop_leaves_no_process_even_in_the_middle_of_a_request(tmp_path: Path) -> None:
    """PC-083: the fold process never survives the coordinator."""
    client = FoldClient(command=COMMAND)
    await client.ask(drop(tmp_path, "ok"), Done)
    pid = client.pid
    assert pid is not None
    hanging = asyncio.ensure_future(client.ask(drop(tmp_path, "hang"), Done))
    await asyncio.sleep(0)
    await client.stop()
    with pytest.raises(FoldError, match="stopping"):
        await hanging
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(FoldError, match="stopping"):
        await client.ask(drop(tmp_path, "ok"), Done)


def test_memory_of_a_process_that_is_gone_is_unknown() -> None:
    assert memory_mb(2**22 + 1) is None
    own = memory_mb("self")
    assert own is not None
    assert 1.0 < own[0] <= own[1]
